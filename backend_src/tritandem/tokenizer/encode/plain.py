"""Encodes text in which control tokens are nothing but characters.

Owns the twins of the reference tokenizer that do not know the control tokens. Knows nothing about templates.
Thread-safe for the same reasons as the reference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...contracts.arrays import Int32Array
from ..chats.segments import Segment
from ..files.source import AddedToken, TokenizerSource, tokenizer_from_spec
from .whole import WholeEncoder


class ControlTokenSpelled(Exception):
    """A vocabulary merged a control token out of plain characters, as some converted SentencePiece ones can."""


class PlainEncoder:
    """The twins: one for text at the start of a prompt, one for text after a control token.

    They differ where a tokenizer treats the very beginning specially (Metaspace, prepend_scheme "first"). Built when
    first needed: most servers never see such a text. Two threads may then both build one; either is right.
    """

    def __init__(self, source: TokenizerSource, control: Sequence[AddedToken]) -> None:
        self._spec = source.spec
        self._control = {token.id: token.content for token in control}
        self._control_ids = np.array(sorted(self._control), dtype=np.int32)

    @cached_property
    def _at_start(self) -> WholeEncoder:
        return self._twin(self._spec["pre_tokenizer"])

    @cached_property
    def _inside(self) -> WholeEncoder:
        continued = _without_first_prepend(self._spec["pre_tokenizer"])
        return self._at_start if continued == self._spec["pre_tokenizer"] else self._twin(continued)

    def _twin(self, pre_tokenizer: Any) -> WholeEncoder:
        added = [entry for entry in self._spec["added_tokens"] if entry["id"] not in self._control]
        return WholeEncoder(tokenizer_from_spec({**self._spec, "added_tokens": added, "pre_tokenizer": pre_tokenizer}))

    def encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        """int32 [n]; BOS and EOS are added as the reference would. Raises ControlTokenSpelled."""
        ids = self._checked(self._at_start.encode(text, False))
        return self._at_start.encode(text, True) if add_special_tokens else ids

    def encode_segments(self, segments: Sequence[Segment]) -> Int32Array:
        """int32 [n] of control tokens and plain text in turn. Raises ControlTokenSpelled."""
        parts = []
        for index, segment in enumerate(segments):
            if segment.control_id is not None:
                parts.append(np.array([segment.control_id], dtype=np.int32))
            else:
                encoder = self._inside if index else self._at_start
                parts.append(self._checked(encoder.encode(segment.text, False)))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def _checked(self, ids: Int32Array) -> Int32Array:
        found = ids[np.isin(ids, self._control_ids)]
        if len(found):
            raise ControlTokenSpelled(f"text that spells the control token {self._control[int(found[0])]!r}")
        return ids


def _without_first_prepend(pre_tokenizer: Any) -> Any:
    """The pre-tokenizer with every prepend_scheme "first" turned to "never"."""
    text = json.dumps(pre_tokenizer, ensure_ascii=False)
    return json.loads(text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"'))
