"""What a few prompts are answered when nothing else runs: greedy answers under load must be the same."""

from __future__ import annotations

from collections.abc import Sequence

from tritandem_client import AsyncClient
from tritandem_client.results import TokenLogprob

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    "Tell me about the sea. " + "Rain, trains and an old house. " * 8,
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at a temperature of",
)
TOKENS = 32
TIE = 1e-3  # two sums of the same float32 terms in another order differ by less: who is ahead by less may lose
HALF_A_CHARACTER = "\ufffd"


class Solo:
    """Knows the answers once `learn` has run."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.compared = 0

    async def learn(self, client: AsyncClient) -> None:
        """Ask each prompt alone. Raises RequestError."""
        for prompt in PROMPTS:
            whole = await client.generate(
                prompt, max_tokens=TOKENS, logprobs=2, sampling_parameters={"ignore_eos": True}
            )
            sure = tokens_before_tie(whole.logprobs)
            if sure:
                known = await client.generate(prompt, max_tokens=sure, sampling_parameters={"ignore_eos": True})
                self.answers[prompt] = known.text

    def agrees(self, prompt: str, text: str) -> bool:
        """Whether `text` begins as the answer alone did, or is its beginning."""
        self.compared += 1
        known, given = self.answers[prompt].rstrip(HALF_A_CHARACTER), text.rstrip(HALF_A_CHARACTER)
        return known.startswith(given) or given.startswith(known)


def tokens_before_tie(tokens: Sequence[TokenLogprob]) -> int:
    """How many tokens are far enough ahead of the second best for any batch to choose them."""
    for count, token in enumerate(tokens):
        best, second = sorted((logprob for _, logprob in token.top), reverse=True)[:2]
        if best - second < TIE:
            return count
    return len(tokens)
