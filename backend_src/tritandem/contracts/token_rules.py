"""What a request says about single tokens of the vocabulary: is it within the limits, and does it leave a choice?

Pure, tier 0; asked where a request is decoded and once more by the engine.
"""

from __future__ import annotations

from .errors import InvalidRequest
from .fields import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MOST_LOGIT_BIAS
from .requests import EngineRequest, GenerationRequest


def check_token_rules(request: GenerationRequest | EngineRequest, vocab_size: int) -> None:
    """Raises InvalidRequest naming `logit_bias` or `allowed_token_ids`.

    Of the allowed ids one must end no bad word and, with min_tokens, not the answer: whatever was generated before,
    that one can then be chosen.
    """
    bias, allowed = request.logit_bias, request.allowed_token_ids
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", f"{len(bias)} ids", f"at most {MAX_LOGIT_BIAS}")
    if len(allowed) > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequest("allowed_token_ids", f"{len(allowed)} ids", f"at most {MAX_ALLOWED_TOKEN_IDS}")
    for name, ids in (("logit_bias", [token for token, _ in bias]), ("allowed_token_ids", allowed)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(name, token, f"ids in 0..{vocab_size - 1}")
    for token, value in bias:
        if not abs(value) <= MOST_LOGIT_BIAS:  # a NaN is not
            raise InvalidRequest(
                f"logit_bias[{token}]", value, f"a number in [-{MOST_LOGIT_BIAS:g}, {MOST_LOGIT_BIAS:g}]"
            )
    banned = {word[-1] for word in request.bad_words if word}
    if request.sampling.min_tokens:
        banned.update(request.stop_ids)
    if allowed and banned.issuperset(allowed):
        left = "at least one id that ends no bad word and, with min_tokens, is no end token"
        raise InvalidRequest("allowed_token_ids", list(allowed), left)
