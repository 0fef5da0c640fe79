"""The block pool loses nothing, hands nothing out twice, and finds what it was told."""

from __future__ import annotations

import random

import pytest
from tritandem.engine.host.kv_blocks import BlockPool, chain_hash, root_hash


def test_the_null_block_is_never_handed_out() -> None:
    assert sorted(BlockPool(9).allocate(8)) == list(range(1, 9))


def test_allocating_more_than_is_free_is_a_defect() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="4 blocks asked for, 3 free"):
        pool.allocate(4)


def test_freeing_twice_is_a_defect() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_a_hash_names_the_content_and_everything_before_it() -> None:
    a, b = b"ab", b"cd"
    assert chain_hash(chain_hash(root_hash(0), a), b) == chain_hash(chain_hash(root_hash(0), bytes(a)), bytes(b))
    assert chain_hash(chain_hash(root_hash(0), a), b) != chain_hash(root_hash(0), b)
    assert chain_hash(root_hash(0), a) != chain_hash(root_hash(0), b)


def test_the_longest_unused_content_is_given_up_first_and_tails_before_heads() -> None:
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, name in zip(old + new, (b"a", b"b", b"c", b"d"), strict=True):
        pool.register(block, name)
    pool.free(old)
    pool.free(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.lookup([b"a", b"b"]) == old[:1]
    assert pool.lookup([b"c", b"d"]) == new


def test_a_shared_block_outlives_its_first_owner() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.register(blocks[0], b"a")
    pool.share(pool.lookup([b"a"]))
    pool.free(blocks)
    assert pool.free_blocks == 1
    pool.free(blocks)
    assert pool.free_blocks == 2


def test_forgotten_blocks_take_along_whatever_was_computed_from_them() -> None:
    pool = BlockPool(9)
    trunk, left, right, other = pool.allocate(2), pool.allocate(2), pool.allocate(1), pool.allocate(1)
    for block, name, parent in zip(trunk + left, (b"a", b"b", b"c", b"d"), (None, b"a", b"b", b"c"), strict=True):
        pool.register(block, name, parent)
    pool.register(right[0], b"e", b"b")
    pool.register(other[0], b"f")
    pool.free(right)
    pool.forget(trunk[1:])
    assert pool.lookup([b"a", b"b", b"c", b"d"]) == trunk[:1]
    assert pool.lookup([b"f"]) == other
    assert pool.free_blocks == 3
    again = pool.allocate(1)
    pool.register(again[0], b"b", b"a")
    assert pool.lookup([b"a", b"b", b"e"]) == [trunk[0], again[0]], "what was computed from the old one stays away"
    pool.check_integrity()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_random_walk_keeps_every_block_in_one_place(prefix_cache: bool) -> None:
    rng = random.Random(11)
    pool = BlockPool(20, prefix_cache)
    held: list[list[int]] = []
    for _ in range(2000):
        action = rng.random()
        if action < 0.4 and (count := rng.randint(1, 4)) <= pool.free_blocks:
            held.append(pool.allocate(count))
        elif action < 0.6 and held:
            parent = None
            for block in rng.choice(held):
                name = bytes([rng.randint(0, 30)])
                pool.register(block, name, parent)
                parent = name
        elif action < 0.62 and held:
            pool.forget(rng.choice(held))
        elif action < 0.7:
            hits = pool.lookup([bytes([rng.randint(0, 30)]) for _ in range(3)])
            pool.share(hits)
            held.append(hits)
        elif held:
            pool.free(held.pop(rng.randrange(len(held))))
        pool.check_integrity()
    for blocks in held:
        pool.free(blocks)
    pool.check_integrity()
    assert pool.free_blocks == pool.total_blocks
