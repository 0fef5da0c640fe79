"""The load that benchmarks of running servers share: which prompts are repeated."""

from __future__ import annotations

import argparse

import pytest
from tritandem_bench.word_loads import read_prompts


@pytest.mark.parametrize(("text", "pool"), [("distinct", 0), ("pool:1", 1), ("pool:64", 64)])
def test_benchmarks_say_distinct_or_pool(text: str, pool: int) -> None:
    assert read_prompts(text) == pool


@pytest.mark.parametrize("text", ["", "pool", "pool:0", "pool:-1", "pool:x", "distinct:3"])
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="distinct or pool:N"):
        read_prompts(text)
