"""One sequence as the host sees it: what was launched for it, what is known of it, what was told of it.

Owned by the core's thread, except that the outbox reads tokens and stamps under its lock. Knows nothing
about other sequences, blocks' contents or the device.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from ...contracts.arrays import Float32Array, Int32Array
from ...contracts.requests import EngineRequest
from ...contracts.stream import FinishCode, TokenScores
from ...grammar import Matcher
from ..step import (
    ALLOWED_TOKENS,
    BAD_WORDS,
    GREEDY,
    LOGIT_BIAS,
    STRUCTURED,
    TABLED,
    PrefillChunk,
    SamplingFeatures,
    StepResult,
)
from ..structure.tables import Walker
from .kv_blocks import NULL_BLOCK, chain_hash, root_hash

NO_SLOT = -1


@dataclass(eq=False, slots=True)
class SequenceState:
    """`stored` and `promised` run ahead of `output_ids` by what is launched and not read yet.

    While decoding, stored == prompt tokens + promised - 1: the newest token's K and V come with the next step.
    """

    request: EngineRequest
    output_budget: int  # output tokens at most, the context's end included
    accepted_ns: int
    arrival: int  # order of acceptance; the newest is preempted first
    structure: Matcher | Walker | None = None  # what `output_ids` have left of the structure asked for

    slot: int = NO_SLOT
    blocks: list[int] = field(default_factory=list)
    prefill_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))  # prompt, and output if resumed
    prefill_tokens: int = 0  # length of prefill_ids
    stored: int = 0  # tokens whose K and V the launched steps store
    promised: int = 0  # output tokens that the launched steps sample
    output_ids: list[int] = field(default_factory=list)
    finish: FinishCode = FinishCode.RUNNING
    error: str = ""

    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    prefill_start_ns: int = 0
    first_token_ns: int = 0
    latest_token_ns: int = 0
    logprobs: list[float] = field(default_factory=list)  # where asked for, one per output token that was not sent yet
    top: list[tuple[Int32Array, Float32Array]] = field(default_factory=list)  # likewise
    scores: TokenScores | None = None  # of the prompt's tokens behind the first, as far as known, until they are sent
    forced: list[int] = field(default_factory=list)  # what follows the tokens of steps in flight, with no choice
    forced_from: int = 0  # output tokens before it
    forced_start: int = 0  # the position from which the chunk stores that carries it; 0: none did
    slow_masks: int = 0  # that took so long that others must not wait for more of them
    sent: int = 0  # output tokens that the outbox has handed out
    registered_blocks: int = 0  # full blocks that the prefix cache knows
    dropped_blocks: int = 0  # the first ones, behind every layer's window: `blocks` has the null block there
    reused_tokens: int = 0  # of this stay in a slot, found in the prefix cache
    takes_cached: bool = True  # cleared once what it found there may have been wrong
    gives_cached: bool = True  # likewise what it holds
    features: frozenset[str] = field(init=False)  # what its tokens need beyond argmax
    family: list[SequenceState] = field(default_factory=list)  # live sequences of one prompt, itself among them
    scoring: bool = field(init=False)  # its prompt's tokens are to be scored, and no first token is known
    plain: bool = field(init=False)  # nothing, nor log-probabilities; most are, and need no look at their parameters
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        request, sampling = self.request, self.request.sampling
        lists = {
            BAD_WORDS: request.bad_words,
            LOGIT_BIAS: request.logit_bias,
            ALLOWED_TOKENS: request.allowed_token_ids,
        }
        self.features = sampling.features.union(name for name, listed in lists.items() if listed)
        self.scoring = sampling.prompt_logprobs is not None
        asks = self.features or self.scoring or self.structure is not None
        self.plain = not asks and sampling.logprobs is None

    @property
    def seq_id(self) -> int:
        return self.request.seq_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def known_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def prefill_left(self) -> int:
        """Tokens still to be prefilled; meaningful while the sequence holds a slot."""
        return max(0, self.prefill_tokens - self.stored)

    @property
    def decodable(self) -> bool:
        """The next launched step may decode it."""
        return self.stored >= self.prefill_tokens and self.promised < self.output_budget

    def follow_by(self, feature: str) -> None:
        """Its structure is followed by masks of the host or by a table, as long as it has its slot."""
        self.features = self.features - {STRUCTURED, TABLED} | {feature}

    def follow(self, token: int, code: int) -> int:
        """Take a token that was chosen with finish code `code` into the structure; the code that it ends with."""
        if self.structure is None or code == FinishCode.STOP:
            return code
        if token in self.structure.vocabulary.end_ids:  # though the request names no end tokens
            return FinishCode.STOP
        if not self.structure.accept(token):
            return FinishCode.ERROR
        if self.forced:
            self.take_forced()
        return FinishCode.COMPLETE if self.structure.is_over() else code

    def end(self, finish: FinishCode, error: str) -> None:
        self.finish, self.error = finish, error
        if not self.first_token_ns:  # what it must have begun with was never stored
            self.output_ids = []

    def why_no_choice(self) -> str:
        """For the client, where no token had a score: the fields that together may have left none."""
        if self.structure is None:
            return "the model's logits are not finite"
        request = self.request
        given = {
            "bad_words": request.bad_words,
            "logit_bias": request.logit_bias,
            "allowed_token_ids": request.allowed_token_ids,
            "min_tokens": request.sampling.min_tokens,
        }
        others = ", ".join(name for name, value in given.items() if value) or "the model's logits"
        return f"no token is left: what the structure of the answer allows next, {others} forbid"

    def keep_logprobs(self, result: StepResult, row: int) -> None:
        """Those of its newest token, where asked for."""
        self.scoring = False  # it has come to its first token
        count = self.request.sampling.logprobs
        if count is None:
            return
        assert result.logprobs is not None
        self.logprobs.append(float(result.logprobs[row]))
        if count and result.top_ids is not None and result.top_logprobs is not None:
            ids, values = result.top_ids[row, :count], result.top_logprobs[row, :count]
            if self.structure is not None:  # fewer may be allowed than were asked for
                count = int(np.isfinite(values).sum())
            self.top.append((ids[:count], values[:count]))

    @property
    def forks(self) -> bool:
        """It may begin on the blocks of another of its family: it has nothing but its prompt, and may take them."""
        return len(self.family) > 1 and not self.output_ids and not self.scoring and self.takes_cached

    def elder(self) -> SequenceState | None:
        """Of its family, one in a slot, best one whose launched steps store the whole prompt."""
        placed = [one for one in self.family if one.slot != NO_SLOT and one.gives_cached]
        return max(placed, key=lambda one: one.stored >= one.prompt_tokens, default=None)

    def ids_between(self, start: int, end: int) -> Int32Array:
        """Known tokens [start, end) of prompt and output."""
        prompt = self.request.prompt_ids
        outputs = self.output_ids[max(0, start - len(prompt)) : max(0, end - len(prompt))]
        return np.concatenate((prompt[start:end], np.asarray(outputs, np.int32)))

    def _content(self, start: int, end: int) -> bytes:
        """`ids_between` as bytes; mostly of a few output tokens, for which an array of numpy's is slow to make."""
        prompt = self.request.prompt_ids
        content = prompt[start:end].tobytes() if start < len(prompt) else b""
        if end > len(prompt):
            content += array("i", self.output_ids[max(0, start - len(prompt)) : end - len(prompt)]).tobytes()
        return content

    @property
    def structure_ahead(self) -> Matcher | Walker | None:
        """As it is behind `prefill_ids`."""
        beyond = self.prefill_ids[self.known_tokens :]
        if self.structure is None or not len(beyond):
            return self.structure
        ahead = self.structure.copy()
        for token in beyond.tolist():
            ahead.accept(token)
        return ahead

    def begin(self, slot: int, blocks: list[int], cached_tokens: int) -> None:
        """Take a slot; `cached_tokens` of the prefill are in shared blocks already."""
        if not self.prefill_start_ns:
            self.cached_tokens = min(cached_tokens, self.prompt_tokens)  # forced tokens may be cached, too
        self.slot, self.blocks = slot, blocks
        self.prefill_ids = self.ids_between(0, self.known_tokens)
        self.prefill_tokens = len(self.prefill_ids)
        self.stored, self.promised = cached_tokens, len(self.output_ids)
        self.reused_tokens, self.registered_blocks = cached_tokens, 0
        self.dropped_blocks = blocks.count(NULL_BLOCK)
        self.forced, self.forced_start = [], 0

    def force(self, run: list[int], in_flight: int) -> None:
        """`run` follows `output_ids`, and steps in flight choose the first of it: prefill it instead of decoding."""
        self.prefill_ids = np.concatenate((self.ids_between(0, self.known_tokens), np.array(run, np.int32)))
        self.prefill_tokens, self.forced_start = len(self.prefill_ids), self.stored
        self.promised = len(self.output_ids) + len(run)
        self.forced, self.forced_from = run[in_flight:], len(self.output_ids) + in_flight

    def take_forced(self) -> bool:
        """False: there is nothing, or not all before it is known yet."""
        if not self.forced or len(self.output_ids) != self.forced_from:
            return False
        assert self.structure is not None
        taken = all(self.structure.accept(token) for token in self.forced)
        assert taken, "what is forced is allowed"
        self.output_ids += self.forced
        self.forced = []
        return True

    def chunk(self, count: int) -> PrefillChunk:
        """The next `count` tokens of the prefill."""
        start, end = self.stored, self.stored + count
        ids, last = self.prefill_ids[start:end], end == self.prefill_tokens
        if not self.scoring:
            return PrefillChunk(self.slot, start, ids, last)
        alternatives = self.request.sampling.prompt_logprobs or 0
        return PrefillChunk(self.slot, start, ids, last, self.prefill_ids[start + 1 : end + 1], alternatives)

    def keep_scores(self, start: int, scores: TokenScores) -> None:
        """Of the tokens behind position `start`. A chunk that ran twice brings the same again."""
        if not self.scoring or self.finish:
            return
        if self.scores is None:
            size = self.prompt_tokens - 1
            shape = (size, scores.top_ids.shape[1])
            values, ids = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
            self.scores = TokenScores(np.zeros(size, np.float32), ids, values)
        end = start + len(scores.logprobs)
        self.scores.logprobs[start:end] = scores.logprobs
        self.scores.top_ids[start:end], self.scores.top_logprobs[start:end] = scores.top_ids, scores.top_logprobs

    def block_hashes(self, block_tokens: int, count: int) -> list[bytes]:
        """Names of the first `count` full blocks of the known tokens."""
        known = len(self._hashes)
        if known < count:
            content = self._content(known * block_tokens, count * block_tokens)
            block_bytes = len(content) // (count - known)
            parent = self._hashes[-1] if self._hashes else root_hash(self.request.prefix_salt)
            for start in range(0, len(content), block_bytes):
                parent = chain_hash(parent, content[start : start + block_bytes])
                self._hashes.append(parent)
        return self._hashes[:count]


def features_of(sequences: list[SequenceState]) -> SamplingFeatures:
    """The least that serves every row which samples in a step."""
    special = [sequence for sequence in sequences if not sequence.plain]
    if not special:
        return GREEDY
    counts = [sequence.request.sampling.logprobs for sequence in special]
    return SamplingFeatures(
        asked=frozenset().union(*(sequence.features for sequence in special)),
        top_logprobs=max(-1 if count is None else count for count in counts),
    )
