"""Prompts that are sent again and again, or never twice, and the benchmarks' word for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tritandem_loadtest
from tritandem_loadtest.arrivals import Arrival
from tritandem_loadtest.config import LoadTestError, RunConfig
from tritandem_loadtest.workload import PROMPTS_DIR, Workload


def prompts(**config: object) -> list[str]:
    workload = Workload(RunConfig(workload="words", **config))  # type: ignore[arg-type]
    return [workload.call(Arrival(i, 0.0)).prompt for i in range(400)]


def test_a_pool_of_prompts_is_sent_again_and_again() -> None:
    sent = prompts(prompt_pool=5, prompt_words="uniform:20-60")
    assert len(set(sent)) == 5
    assert min(map(sent.count, set(sent))) > 40
    assert len({prompt.split(".")[0] for prompt in sent}) == 5  # and the five have no beginning in common


def test_two_seeds_have_no_prompt_in_common_with_or_without_a_pool() -> None:
    for pool in (0, 5):
        assert not set(prompts(prompt_pool=pool, seed=0)) & set(prompts(prompt_pool=pool, seed=1))


def test_lengths_of_answers_are_drawn_for_each_request_of_a_pool() -> None:
    workload = Workload(RunConfig(workload="words", prompt_pool=1, output_tokens="uniform:1-100"))
    assert len({workload.call(Arrival(i, 0.0)).max_tokens for i in range(50)}) > 20


def test_a_pool_belongs_to_the_words_workload() -> None:
    with pytest.raises(LoadTestError, match="prompt_pool"):
        RunConfig(workload="chat", prompt_pool=3)
    with pytest.raises(LoadTestError, match="prompt_pool"):
        RunConfig(workload="words", prompt_pool=-1)


def test_bundled_prompts_lie_inside_the_package() -> None:
    assert PROMPTS_DIR.parent == Path(tritandem_loadtest.__file__).parent
    assert {path.name for path in PROMPTS_DIR.iterdir()} == {"chat.jsonl", "questions.jsonl", "words.txt"}
