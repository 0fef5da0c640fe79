"""Where a text may be cut so that the ids of the pieces, joined, are the ids of the whole.

Owns the rules and the decision which of them hold for a tokenizer. Pure. The rules (| is the cut):

    R1  [A-Za-z] | ' ' [A-Za-z]
    R2  [!-~ or CJK] '\\n' | [A-Za-z0-9 or CJK]
    R3  CJK | one of ，。、；：！？
"""

# Why they are exact for a known pre-tokenizer: its regex has no look-behind, so a scan that starts again at a true
# boundary of matches repeats the same matches, and each rule's pair is always such a boundary. Its only look-ahead,
# (?!\S), sees the end of the text where it saw white space before: the same truth value. NFC and NFKC never compose
# across these pairs, and BPE never merges across pre-tokens.

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..files.pretokenizers import SPLIT_CHAINS
from ..files.source import AddedToken, TokenizerSource

CJK = "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5"
R1 = "[A-Za-z](?= [A-Za-z])"
R2 = f"[!-~{CJK}]\n(?=[A-Za-z0-9{CJK}])"
R3 = f"[{CJK}](?=[，。、；：！？])"
# What stands on the two sides of a cut, without the context beyond: an added token that holds such a pair, or that
# takes white space from a side of it, makes the rules unsafe.
PAIR = re.compile(f"[A-Za-z] |\n[A-Za-z0-9{CJK}]|[{CJK}][，。、；：！？]")
SIDE = re.compile(f"[A-Za-z0-9{CJK}]")


@dataclass(frozen=True, slots=True)
class CutRules:
    """The cuts that are exact for one tokenizer. `drop_space`: the piece after a cut starts without its space.

    A SentencePiece tokenizer in the form "prepend ▁, then turn spaces into ▁" would give a piece that keeps its
    space two of them.
    """

    cut: re.Pattern[str]
    drop_space: bool = False

    def split(self, text: str, piece_chars: int) -> list[str]:
        """Pieces of `piece_chars` or a little more; one piece where no cut exists. O(len(text))."""
        return list(self.pieces(text, piece_chars))

    def pieces(self, text: str, piece_chars: int) -> Iterator[str]:
        """As `split`, each piece cut when it is asked for."""
        begin = 0
        while match := self.cut.search(text, begin + piece_chars - 1):
            yield text[begin : match.end()]
            begin = match.end()
            if self.drop_space:
                begin += 1
        yield text[begin:]


def cut_rules(source: TokenizerSource) -> CutRules | None:
    """The rules for a tokenizer, or None where nothing is proven: encode it whole then."""
    model = source.spec["model"]
    if model["type"] != "BPE" or model.get("dropout") or not _added_tokens_allow(source.added_tokens):
        return None
    normalizers = _flat(source.spec["normalizer"], "normalizers")
    pre_tokenizers = _flat(source.spec["pre_tokenizer"], "pretokenizers")
    if _is_known_byte_level(pre_tokenizers) and all(kind["type"] in ("NFC", "NFKC") for kind in normalizers):
        prefixes = any(part.get("add_prefix_space") for part in pre_tokenizers if part["type"] == "ByteLevel")
        # With add_prefix_space every piece gets a space in front: only R1's pieces have one anyway.
        return CutRules(re.compile(R1 if prefixes else f"{R1}|{R2}|{R3}"))
    return _sentencepiece_rules(normalizers, pre_tokenizers, model["vocab"])


def _sentencepiece_rules(normalizers: list[Any], pre_tokenizers: list[Any], vocab: dict[str, int]) -> CutRules | None:
    """R1 alone: a merge across it would need a vocabulary entry with a letter before a ▁."""
    if any(re.search("[A-Za-z]▁", entry) for entry in vocab):
        return None
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if not pre_tokenizers and normalizers == [{"type": "Prepend", "prepend": "▁"}, replaces]:
        return CutRules(re.compile(R1), drop_space=True)
    gemma_split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if normalizers == [replaces] and pre_tokenizers in ([], [gemma_split]):
        return CutRules(re.compile(R1))
    if not normalizers and len(pre_tokenizers) == 1 and pre_tokenizers[0]["type"] == "Metaspace":
        return CutRules(re.compile(R1)) if pre_tokenizers[0]["replacement"] == "▁" else None
    return None


def _is_known_byte_level(parts: list[Any]) -> bool:
    """GPT-2's regex inside `ByteLevel`, with digits apart or not; or a known chain of `Split` before it."""
    if not parts or parts[-1]["type"] != "ByteLevel":
        return False
    before, byte_level = parts[:-1], parts[-1]
    if byte_level.get("use_regex", True):
        return all(part["type"] == "Digits" for part in before) and len(before) <= 1
    plain = all(part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"] for part in before)
    return plain and tuple(part["pattern"].get("Regex") for part in before) in SPLIT_CHAINS


def _added_tokens_allow(tokens: Sequence[AddedToken]) -> bool:
    """No added token holds a cut, and none with flags can touch one."""
    for token in tokens:
        if PAIR.search(token.content):
            return False
        flagged = token.lstrip or token.rstrip or token.single_word
        if flagged and (SIDE.match(token.content[:1]) or SIDE.match(token.content[-1:])):
            return False
    return True


def _flat(part: Any, key: str) -> list[Any]:
    """A component as the list of its parts."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [leaf for inner in part[key] for leaf in _flat(inner, key)]
    return [part]
