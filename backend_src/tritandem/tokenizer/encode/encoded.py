"""What the tokenizer hands out: ids with the story of how they were made.

Owns the result types of this room. Knows nothing about engines, threads or files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...contracts.arrays import Int32Array

# fastokens; safe cuts; `tokenizers` in one call; a remembered prefix, the rest by a slow engine
EngineName = Literal["fast", "pieces", "whole", "prefix_cache"]


class Ids(NamedTuple):
    """What an engine gave: int32 ids [n], the engine's name."""

    ids: Int32Array
    engine: EngineName


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of one text, and how they were made."""

    ids: Int32Array  # [n], n >= 0
    engine: EngineName
    queue_ns: int = 0  # from submission until an engine began
    encode_ns: int = 0


@dataclass(frozen=True, slots=True)
class TokenizerStats:
    """Counters since start-up, except `queue_size` and `fast_enabled`, which are the present."""

    queue_size: int = 0  # texts submitted and not yet encoded
    fast_enabled: bool = False
    texts: dict[str, int] = field(default_factory=dict)  # by engine
    tokens: dict[str, int] = field(default_factory=dict)  # by engine
    shadow_mismatches: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
