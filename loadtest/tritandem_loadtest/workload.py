"""What is sent: request `i` of a run as text and lengths, the same for the same seed in every process.

Pure but for reading prompt files once. Knows nothing about time or protocols. Lengths are in words: the generator
has no tokenizer; the server's own token counts are what reports use.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from .arrivals import Arrival
from .config import LoadTestError, RunConfig
from .transport.interface import Call

PROMPTS_DIR = Path(__file__).resolve().parent / "prompts"  # data of this package
TOKENS_PER_WORD = 1.3  # English under common byte-pair vocabularies; turns a trace's token counts into words


def parse_length(text: str) -> tuple[str, float, float]:
    """`"300"`, `"uniform:100-500"` or `"lognormal:300,0.5"` (median, sigma). Raises LoadTestError."""
    kind, _, rest = text.rpartition(":")
    try:
        if kind == "":
            return "fixed", float(rest), 0.0
        first, second = map(float, rest.split("-" if kind == "uniform" else ","))
        if (kind == "uniform" and first <= second) or (kind == "lognormal" and first > 0):
            return kind, first, second
    except ValueError:
        pass
    raise LoadTestError(
        f"length: given {text!r}, allowed: N, uniform:LOW-HIGH with LOW at most HIGH, or lognormal:MEDIAN,SIGMA"
    )


def draw_length(spec: tuple[str, float, float], rng: random.Random) -> int:
    """At least 1."""
    kind, a, b = spec
    if kind == "uniform":
        return max(1, rng.randint(int(a), int(b)))
    if kind == "lognormal":
        return max(1, round(rng.lognormvariate(math.log(a), b)))
    return max(1, int(a))


def endless_schema(name: str, max_tokens: int) -> dict[str, Any]:
    """A schema like no other's, whose answers do not end within so many tokens."""
    fields = {
        f"name_{name}": {"type": "string", "maxLength": 40},
        "kind": {"enum": [f"kind {name}", "other"]},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 3},
    }
    one = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": one, "minItems": max_tokens}


class Workload:
    """Makes the calls of a run. `call(arrival)` depends on the configuration and `arrival` only."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._prompt_words = parse_length(config.prompt_words)
        self._output_tokens = parse_length(config.output_tokens)
        self._vocabulary = (PROMPTS_DIR / "words.txt").read_text(encoding="utf-8").split()
        pool = random.Random(f"sentences {config.seed}")
        self._sentences = [_sentence(pool.choices(self._vocabulary, k=_SENTENCE_WORDS)) for _ in range(_SENTENCE_POOL)]
        source = (
            Path(config.prompts) if config.workload == "jsonl" else PROMPTS_DIR / f"{_FILES[config.workload]}.jsonl"
        )
        self._entries = read_prompts(source)

    def call(self, arrival: Arrival) -> Call:
        rng = random.Random(f"workload {self._config.seed} {arrival.index}")
        max_tokens = arrival.output_tokens or draw_length(self._output_tokens, rng)
        text_rng = rng
        if self._config.prompt_pool:
            text_rng = random.Random(f"pool {self._config.seed} {rng.randrange(self._config.prompt_pool)}")
        words = draw_length(self._prompt_words, text_rng)
        if arrival.prompt_tokens:
            words = max(1, round(arrival.prompt_tokens / TOKENS_PER_WORD))
        messages: tuple[tuple[str, str], ...] = ()
        kind = self._config.workload
        if arrival.prompt_tokens or kind == "words":
            prompt = self._text(words, text_rng)
        elif kind == "shared-prefix":
            prefix = self._shared_prefix(rng.randrange(self._config.shared_prefixes))
            prompt = f"{prefix}\n\n{self._text(words, text_rng)}"
        else:
            entry = self._entries[rng.randrange(len(self._entries))]
            if kind == "chat":
                messages = self._conversation(arrival.index)
            elif "messages" in entry:
                messages = tuple((m["role"], m["content"]) for m in entry["messages"])
            if kind == "jsonl":
                max_tokens = int(entry.get("max_tokens", max_tokens))
            prompt = as_transcript(messages) if messages else entry["prompt"]
        options, percent = dict(self._config.sampling), self._config.structured_percent
        if (arrival.index + 1) * percent // 100 > arrival.index * percent // 100:
            options["structured_outputs"] = {"json": endless_schema(f"{self._config.seed}_{arrival.index}", max_tokens)}
        return Call(f"lt-{self._config.seed}-{arrival.index}", prompt, max_tokens, options, messages)

    def _text(self, words: int, rng: random.Random) -> str:
        """Random sentences; the first differs from `rng` to `rng`, so that no prefix is shared.

        Whole sentences come from a pool: word by word, a prompt of 100,000 words would hold up other sends.
        """
        first = _sentence(rng.choices(self._vocabulary, k=min(words, _SENTENCE_WORDS)))
        whole, rest = divmod(words - min(words, _SENTENCE_WORDS), _SENTENCE_WORDS)
        last = [_sentence(rng.choices(self._vocabulary, k=rest))] if rest else []
        return " ".join([first, *rng.choices(self._sentences, k=whole), *last])

    def _shared_prefix(self, number: int) -> str:
        rng = random.Random(f"prefix {self._config.seed} {number}")
        return self._text(self._config.shared_prefix_words, rng)

    def _conversation(self, index: int) -> tuple[tuple[str, str], ...]:
        """Turn `t` of a conversation repeats turns 0..t-1 before it. Answers are the scripted ones, not the
        server's: otherwise a slow server would delay the next turn and the loop would no longer be open."""
        turns, group = self._config.chat_turns, _CONVERSATIONS_AT_ONCE
        round_number, within = divmod(index, turns * group)
        turn, slot = divmod(within, group)
        rng = random.Random(f"chat {self._config.seed} {round_number} {slot}")
        messages: list[tuple[str, str]] = []
        for _ in range(turn + 1):
            entry = self._entries[rng.randrange(len(self._entries))]
            messages += [("user", entry["prompt"]), ("assistant", entry["answer"])]
        return tuple(messages[:-1])


_FILES = {"bundled": "questions", "chat": "chat", "words": "questions", "shared-prefix": "questions"}
_CONVERSATIONS_AT_ONCE = 8
_SENTENCE_WORDS = 12
_SENTENCE_POOL = 4000


def _sentence(words: list[str]) -> str:
    return " ".join(words).capitalize() + "."


def as_transcript(messages: tuple[tuple[str, str], ...]) -> str:
    """A conversation for servers that take text only."""
    return "".join(f"{role.capitalize()}: {text}\n\n" for role, text in messages) + "Assistant:"


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """JSONL, one object a line with `prompt` or `messages` of roles and contents, optionally `max_tokens`.

    Raises LoadTestError.
    """
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise LoadTestError(f"{path} line {number}: {error}") from None
        if not isinstance(entry, dict) or not ({"prompt", "messages"} & set(entry)):
            raise LoadTestError(f"{path} line {number}: needs a key 'prompt' or 'messages'")
        messages = entry.get("messages", [])
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
        ):
            raise LoadTestError(f"{path} line {number}: each of 'messages' needs the keys 'role' and 'content'")
        entries.append(entry)
    if not entries:
        raise LoadTestError(f"{path} holds no prompts")
    return entries
