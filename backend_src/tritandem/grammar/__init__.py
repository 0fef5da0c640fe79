"""What an answer may look like: grammars, the vocabulary in which they are spelled, and masks of allowed tokens."""

from ..contracts.grammars import Grammar, Kind, Thinking
from .compiled import Limits, Matcher, compile_grammar
from .vocabulary import Vocabulary

__all__ = ["Grammar", "Kind", "Limits", "Matcher", "Thinking", "Vocabulary", "compile_grammar"]
