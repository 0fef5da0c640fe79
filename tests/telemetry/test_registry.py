"""Claims about accumulating and draining metrics."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from tritandem.telemetry import families as f
from tritandem.telemetry.registry import Registry


def as_dict(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(c.name, c.labels): c.value for c in registry.changes()}


def test_counters_report_what_was_gained_since_the_last_drain() -> None:
    registry = Registry()
    registry.add(f.PROMPT_TOKENS, 5)
    registry.add(f.PROMPT_TOKENS, 2)
    assert as_dict(registry) == {("tritandem_prompt_tokens_total", ()): 7.0}
    assert as_dict(registry) == {}
    registry.add(f.PROMPT_TOKENS, 1)
    assert as_dict(registry) == {("tritandem_prompt_tokens_total", ()): 1.0}


def test_an_external_total_that_restarts_is_counted_from_zero_again() -> None:
    registry = Registry()
    for total, gained in ((10.0, 10.0), (15.0, 5.0), (3.0, 3.0)):
        registry.add_up_to(f.PREEMPTIONS, total, engine="engine")
        assert as_dict(registry) == {("tritandem_preemptions_total", (("engine", "engine"),)): gained}


def test_histogram_buckets_are_cumulative_and_end_with_infinity() -> None:
    registry = Registry()
    for tokens in (1, 3, 3, 1000):
        registry.observe(f.RESPONSE_TOKENS, tokens)
    drained = as_dict(registry)
    buckets = {labels[0][1]: v for (name, labels), v in drained.items() if name.endswith("_bucket")}
    assert buckets == {"1": 1, "2": 1, "4": 3, "8": 3, "16": 3, "32": 3, "64": 3, "128": 3, "+Inf": 4}
    assert drained[("tritandem_response_tokens_sum", ())] == 1007
    assert drained[("tritandem_response_tokens_count", ())] == 4


def test_gauges_are_drained_only_when_they_changed() -> None:
    registry = Registry()
    registry.set(f.REQUESTS_RUNNING, 3)
    assert as_dict(registry) == {("tritandem_requests_running", ()): 3}
    registry.set(f.REQUESTS_RUNNING, 3)
    assert as_dict(registry) == {}


def test_a_counter_of_nothing_appears_as_zero_once() -> None:
    registry = Registry()
    registry.add(f.PROMPT_TOKENS, 0)
    registry.add_up_to(f.PREEMPTIONS, 0.0, engine="e")
    assert as_dict(registry) == {
        ("tritandem_prompt_tokens_total", ()): 0.0,
        ("tritandem_preemptions_total", (("engine", "e"),)): 0.0,
    }
    registry.add_up_to(f.PREEMPTIONS, 0.0, engine="e")
    assert as_dict(registry) == {}


def test_wrong_labels_kinds_and_falling_counters_are_refused() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="declared"):
        registry.add(f.REQUESTS, outcome="COMPLETED")
    with pytest.raises(ValueError, match="not a gauge"):
        registry.set(f.PROMPT_TOKENS, 1)
    with pytest.raises(ValueError, match="cannot fall"):
        registry.add(f.PROMPT_TOKENS, -1)


def test_no_observation_is_lost_between_threads_and_drains() -> None:
    registry, drained = Registry(), Counter[str]()
    done = threading.Event()

    def observe() -> None:
        for _ in range(2000):
            registry.observe(f.SEND, 0.003)
            registry.add(f.OUTPUT_TOKENS)

    def drain() -> None:
        last = False
        while not last:
            last = done.is_set()
            drained.update({c.name: c.value for c in registry.changes() if not c.labels})

    threads = [threading.Thread(target=observe) for _ in range(4)]
    drainer = threading.Thread(target=drain)
    for thread in (*threads, drainer):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    drainer.join()
    assert drained["tritandem_output_tokens_total"] == 8000
    assert drained["tritandem_send_seconds_count"] == 8000


def test_every_family_follows_the_naming_conventions() -> None:
    assert len({family.name for family in f.FAMILIES}) == len(f.FAMILIES)
    for family in f.FAMILIES:
        assert family.name.startswith("tritandem_")
        assert family.name.endswith("_total") == (family.kind is f.Kind.COUNTER)
        assert bool(family.buckets) == (family.kind is f.Kind.HISTOGRAM)
        assert list(family.buckets) == sorted(set(family.buckets))
