"""Sizes on CUDA are pure functions: graph buckets and the share of memory that becomes KV blocks."""

from __future__ import annotations

import pytest
from tritandem.contracts.errors import ConfigError
from tritandem.engine.runners.memory import choose_num_blocks
from tritandem.engine.runners.pass_size import batch_buckets


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 33, 100, 256, 1000])
def test_every_batch_size_has_a_bucket_and_the_last_is_the_limit(max_rows: int) -> None:
    buckets = batch_buckets(max_rows)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == max_rows
    assert buckets[0] == 1


def test_padding_never_exceeds_a_third_beyond_eight_rows() -> None:
    buckets = batch_buckets(256)
    for rows in range(9, 257):
        bucket = next(size for size in buckets if size >= rows)
        assert bucket - rows < 8 or (bucket - rows) / bucket < 1 / 3


def test_the_cache_gets_its_fraction_of_what_a_step_leaves() -> None:
    assert choose_num_blocks(1000, 200, 0.5, block_bytes=10, useful_blocks=10**6) == 40


def test_no_more_blocks_than_all_slots_could_fill() -> None:
    assert choose_num_blocks(10**9, 0, 0.9, block_bytes=10, useful_blocks=77) == 77


def test_weights_that_leave_no_room_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="leave 3 MiB and a step needs 2 MiB"):
        choose_num_blocks(3 << 20, 2 << 20, 0.9, block_bytes=1 << 20, useful_blocks=100)
