"""Is this request something the engine can run? A pure function of the request and the runner's limits."""

from __future__ import annotations

from ...contracts.errors import InvalidRequest
from ...contracts.fields import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS
from ...contracts.requests import EngineRequest
from ...contracts.token_rules import check_token_rules
from ..step import RunnerSpec


def validate(request: EngineRequest, spec: RunnerSpec) -> None:
    """Raises InvalidRequest naming the field."""
    ids, vocabulary = request.prompt_ids, f"token ids in [0, {spec.vocab_size - 1}]"
    if len(ids) == 0:
        raise InvalidRequest("input_ids", "an empty prompt", "at least one token")
    if len(ids) >= spec.max_context_tokens:
        raise InvalidRequest(
            "input_ids",
            f"{len(ids)} tokens",
            f"at most {spec.max_context_tokens - 1} (the context less one output token)",
        )
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < spec.vocab_size:
            raise InvalidRequest("input_ids", extreme, vocabulary)
    if len(request.stop_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_ids", f"{len(request.stop_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
    for token in request.stop_ids:
        if not 0 <= token < spec.vocab_size:
            raise InvalidRequest("stop_ids", token, vocabulary)
    if len(request.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest("bad_words", f"{len(request.bad_words)} words", f"at most {MAX_BAD_WORDS}")
    for word in request.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest("bad_words", f"a word of {len(word)} tokens", f"1 to {MAX_BAD_WORD_TOKENS} tokens")
        for token in word:
            if not 0 <= token < spec.vocab_size:
                raise InvalidRequest("bad_words", token, vocabulary)
    check_token_rules(request, spec.vocab_size)
