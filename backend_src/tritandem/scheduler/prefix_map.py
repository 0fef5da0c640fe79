"""Which engine has probably cached the beginning of a prompt: a hint, so a wrong one costs time only.

Owned by the scheduling thread. Remembers chained hashes of the prompts handed to each engine, oldest forgotten
first; knows nothing about blocks, and nothing about evictions inside the engine.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

from ..contracts.arrays import Int32Array

PIECE_TOKENS = 64
MAX_PIECES = 128  # of one prompt: longer common beginnings do not change the choice
MAX_REMEMBERED = 32_768
_SALT_KEY = secrets.token_bytes(16)  # of this process: nobody can look for a tenant's name with another one's salt


def tenant_salt(tenant: str, scope: str) -> int:
    """int64 that the names of a tenant's prefixes begin with, here and in the engine's cache.

    0 with the scope "shared", and for requests that name no tenant: those share.
    """
    if scope == "shared" or not tenant:
        return 0
    name = tenant.encode("utf-8", "surrogatepass")  # half a character, which JSON can write, is one too
    digest = hashlib.blake2b(name, digest_size=8, key=_SALT_KEY).digest()
    return int.from_bytes(digest, "little", signed=True)


def prefix_hashes(prompt_ids: Int32Array, salt: int) -> list[int]:
    """Hash i stands for the first (i + 1) * PIECE_TOKENS ids; the last id never counts, it is always computed."""
    hashes, chain = [], salt
    for piece in range(min((len(prompt_ids) - 1) // PIECE_TOKENS, MAX_PIECES)):
        chain = hash((chain, prompt_ids[piece * PIECE_TOKENS : (piece + 1) * PIECE_TOKENS].tobytes()))
        hashes.append(chain)
    return hashes


class PrefixMap:
    """Of one engine."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, hashes: list[int]) -> int:
        """Length of the longest remembered beginning, in tokens."""
        pieces = 0
        for chain in hashes:
            if chain not in self._seen:
                break
            pieces += 1
        return pieces * PIECE_TOKENS

    def remember(self, hashes: list[int]) -> None:
        for chain in reversed(hashes):  # the beginning is used last, so that it is forgotten last
            self._seen[chain] = None
            self._seen.move_to_end(chain)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        self._seen.clear()
