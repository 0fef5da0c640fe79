"""What a model's files say, read without torch or transformers: the one answer for every room."""
