"""The OpenAI-compatible API over HTTP, in processes of its own: it translates, and asks Triton over gRPC.

Brings neither torch nor transformers. What a field means stands in `fields.py`, the two shapes of an answer in
`chat.py` and `completions.py`; a further endpoint is a file like these and its line in `SHAPES` of `app.py`.
"""
