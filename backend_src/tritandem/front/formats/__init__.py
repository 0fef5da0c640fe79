"""What a model's text means: speech, thought and calls of functions, in the form that its template taught it.

One file a format, each a grammar over `Text`; `turn.py` reads an answer by one, `choose.py` says which. Pure.
"""
