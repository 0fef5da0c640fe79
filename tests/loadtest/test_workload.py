"""Workloads: request i is the same text in every process, lengths are the asked ones, prefixes are shared or not."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from tritandem_loadtest.arrivals import Arrival
from tritandem_loadtest.config import WORKLOADS, LoadTestError, RunConfig
from tritandem_loadtest.workload import Workload, parse_length

BUNDLED = [name for name in WORKLOADS if name != "jsonl"]


@pytest.mark.parametrize("name", BUNDLED)
def test_a_request_depends_on_seed_and_index_only(name: str) -> None:
    config = RunConfig(workload=name, prompt_words="uniform:20-60", seed=5)
    one, other = Workload(config), Workload(config)
    calls = [one.call(Arrival(i, 0.0)) for i in range(30)]
    assert [other.call(Arrival(i, 9.9)) for i in reversed(range(30))] == calls[::-1]
    assert [Workload(replace(config, seed=6)).call(Arrival(i, 0.0)).prompt for i in range(30)] != [
        call.prompt for call in calls
    ]


@pytest.mark.parametrize("words", [1, 11, 12, 13, 300, 88_000])
def test_fixed_prompts_have_exactly_that_many_words(words: int) -> None:
    workload = Workload(RunConfig(workload="words", prompt_words=str(words)))
    assert len(workload.call(Arrival(0, 0.0)).prompt.split()) == words


def test_prompts_of_the_words_workload_share_no_beginning() -> None:
    workload = Workload(RunConfig(workload="words", prompt_words="50"))
    beginnings = {tuple(workload.call(Arrival(i, 0.0)).prompt.split()[:6]) for i in range(500)}
    assert len(beginnings) == 500


def test_shared_prefixes_are_as_many_and_as_long_as_asked() -> None:
    config = RunConfig(workload="shared-prefix", shared_prefixes=3, shared_prefix_words=80, prompt_words="10")
    prompts = [Workload(config).call(Arrival(i, 0.0)).prompt for i in range(40)]
    prefixes = {prompt.split("\n\n")[0] for prompt in prompts}
    assert len(prefixes) == 3
    assert {len(prefix.split()) for prefix in prefixes} == {80}
    assert len({prompt.split("\n\n")[1] for prompt in prompts}) == 40


def test_structured_requests_come_evenly_each_with_a_schema_of_its_own() -> None:
    workload = Workload(RunConfig(workload="words", structured_percent=25, sampling={"top_k": 5}))
    options = [workload.call(Arrival(i, 0.0)).options for i in range(40)]
    schemas = [json.dumps(one["structured_outputs"]) for one in options if "structured_outputs" in one]
    assert [i for i, one in enumerate(options) if "structured_outputs" in one] == list(range(3, 40, 4))
    assert len(set(schemas)) == 10
    assert all(one["top_k"] == 5 for one in options)


def test_a_conversation_repeats_its_earlier_turns() -> None:
    workload = Workload(RunConfig(workload="chat", chat_turns=3))
    # Eight conversations run at once: request 0, 8 and 16 are the turns of the first.
    turns = [workload.call(Arrival(i, 0.0)).messages for i in (0, 8, 16)]
    assert [len(messages) for messages in turns] == [1, 3, 5]
    assert turns[1][:1] == turns[0]
    assert turns[2][:3] == turns[1]
    assert [role for role, _ in turns[2]] == ["user", "assistant", "user", "assistant", "user"]


def test_a_trace_decides_lengths_over_the_workload() -> None:
    call = Workload(RunConfig(workload="bundled")).call(Arrival(0, 0.0, prompt_tokens=1300, output_tokens=77))
    assert len(call.prompt.split()) == 1000
    assert call.max_tokens == 77


def test_distributions_have_the_asked_centre_and_bounds() -> None:
    uniform = Workload(RunConfig(workload="bundled", output_tokens="uniform:10-30"))
    lengths = [uniform.call(Arrival(i, 0.0)).max_tokens for i in range(400)]
    assert (min(lengths), max(lengths)) == (10, 30)
    skewed = Workload(RunConfig(workload="bundled", output_tokens="lognormal:100,0.5"))
    lengths = [skewed.call(Arrival(i, 0.0)).max_tokens for i in range(400)]
    assert statistics.median(lengths) == pytest.approx(100, rel=0.1)
    assert statistics.mean(lengths) > statistics.median(lengths)


@pytest.mark.parametrize(
    "text", ["", "many", "uniform:5", "uniform:9-5", "normal:1,2", "lognormal:1-2", "lognormal:0,1"]
)
def test_a_wrong_length_is_named(text: str) -> None:
    with pytest.raises(LoadTestError, match="length"):
        parse_length(text)


def test_own_prompts_come_from_a_file_with_their_own_limits(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 5}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    workload = Workload(RunConfig(workload="jsonl", prompts=str(path), output_tokens="9"))
    calls = {(call.prompt, call.max_tokens) for call in (workload.call(Arrival(i, 0.0)) for i in range(20))}
    assert calls == {("one", 5), ("User: two\n\nAssistant:", 9)}


@pytest.mark.parametrize("second", ['{"text": "two"}', '{"messages": [{"content": "two"}]}', '{"messages": "two"}'])
def test_a_broken_prompt_file_names_the_line(second: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "one"}}\n{second}\n')
    with pytest.raises(LoadTestError, match="line 2"):
        Workload(RunConfig(workload="jsonl", prompts=str(path)))
