"""What the tokenizer hands over: ids, when they were made, or why there are none.

Three tensors, the same whether the scheduler asked for them itself or the ensemble carries them there. The ensemble
is Triton's: whatever it gives the scheduler, a client can give as well. So the tokenizer seals its stamps and refusals,
and the scheduler takes a seal once, and only while it is fresh. Ids need none: any client may send ids, and they are
checked in either case.
"""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...contracts import error_codec
from ...contracts.arrays import Int32Array
from ...contracts.errors import InvalidRequest, TritandemError
from ..request.schema import REFUSAL, TOKENIZED_NS
from ..request.tensor_values import check
from .inner_key import InnerKey

IDS = "input_ids"
OUTPUTS = (IDS, TOKENIZED_NS.name, REFUSAL.name)
# Instead of the refusal, for who can do without a tensor that says nothing; the ensemble cannot.
RARE_REFUSAL = "rare_refusal"
CALL_OUTPUTS = (IDS, TOKENIZED_NS.name, RARE_REFUSAL)
FRESH_NS = 60 * 10**9  # from tokenizer to scheduler, Triton's queues included; older stamps count for nothing
_SEALED = 3  # words of TOKENIZED_NS before the seal: two stamps, and a number that no other answer has
_NUMBERS = itertools.count(secrets.randbits(62))  # of this process; another begins elsewhere
_NO_IDS: Int32Array = np.full(1, -1, np.int32)


@dataclass(frozen=True, slots=True)
class Handover:
    """`ids`: int32 [n], without meaning where there is a refusal."""

    ids: Int32Array
    received_ns: int
    tokenized_ns: int
    refusal: TritandemError | None = None


def pack(handed: Handover, key: InnerKey) -> dict[str, Any]:
    """The arrays of one response, batch dimension first."""
    ids = handed.ids if handed.refusal is None else _NO_IDS
    refusal = b"" if handed.refusal is None else json.dumps(error_codec.pack(handed.refusal)).encode()
    words = np.array([handed.received_ns, handed.tokenized_ns, next(_NUMBERS)], np.int64)
    sealed = np.concatenate((words, key.seal(words, refusal)))
    return {
        IDS: ids.reshape(1, -1),
        TOKENIZED_NS.name: sealed.reshape(1, -1),
        REFUSAL.name: np.array([[refusal]], np.object_),
    }


def unpack(arrays: MutableMapping[str, Any]) -> Handover:
    """Of an answer to a call for OUTPUTS or CALL_OUTPUTS. The ids are copied."""
    ids, words = arrays[IDS].reshape(-1), arrays[TOKENIZED_NS.name].reshape(-1)
    told = arrays.get(RARE_REFUSAL, arrays.get(REFUSAL.name))
    refusal = None if told is None else _refusal(told.reshape(-1)[0])
    return Handover(np.array(ids, np.int32), int(words[0]), int(words[1]), refusal)


def _refusal(text: bytes) -> TritandemError | None:
    return error_codec.unpack(json.loads(text)) if text else None


class SealedHandovers:
    """Where the ensemble's requests come in. Belongs to one thread."""

    def __init__(self, key: InnerKey) -> None:
        self._key = key
        # Seals taken since `_turned_ns`, and in the FRESH_NS before: none is forgotten while it is fresh.
        self._taken: set[bytes] = set()
        self._taken_before: set[bytes] = set()
        self._turned_ns = 0

    def take(self, arrays: MutableMapping[str, Any], now_ns: int) -> Handover | None:
        """What the ensemble carried, None for a request that came without it. Takes its tensors out of `arrays`, but
        leaves the ids. Raises InvalidRequest for what the tokenizer has not said, or has said before."""
        given = {tensor.name: arrays.pop(tensor.name) for tensor in (TOKENIZED_NS, REFUSAL) if tensor.name in arrays}
        if not given:
            return None
        if len(given) < 2 or IDS not in arrays:
            raise _forged(next(iter(given)))
        words, [text] = check(TOKENIZED_NS, given[TOKENIZED_NS.name]), check(REFUSAL, given[REFUSAL.name])
        seal = self._key.seal(words[:_SEALED], text if isinstance(text, bytes) else str(text).encode())
        if not hmac.compare_digest(seal.tobytes(), words[_SEALED:].tobytes()):
            raise _forged(TOKENIZED_NS.name)
        received_ns, tokenized_ns = int(words[0]), int(words[1])
        if now_ns - tokenized_ns > FRESH_NS:
            received_ns = tokenized_ns = now_ns
        elif not self._first_time(seal.tobytes(), now_ns):
            raise InvalidRequest(TOKENIZED_NS.name, "what another request has brought", _ALLOWED)
        ids = np.array(arrays[IDS].reshape(-1), np.int32)
        return Handover(ids, received_ns, tokenized_ns, _refusal(text))

    def _first_time(self, seal: bytes, now_ns: int) -> bool:
        if now_ns - self._turned_ns > FRESH_NS:
            self._taken, self._taken_before, self._turned_ns = set(), self._taken, now_ns
        if seal in self._taken or seal in self._taken_before:
            return False
        self._taken.add(seal)
        return True


_ALLOWED = "nothing: this tensor goes from the tokenizer to the scheduler, inside the ensemble"


def _forged(name: str) -> InvalidRequest:
    return InvalidRequest(name, "what the tokenizer has not said", _ALLOWED)
