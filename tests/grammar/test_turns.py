"""Tenants take turns."""

from __future__ import annotations

import random

from tritandem.grammar.turns import Turns


def test_a_tenant_with_much_waits_for_each_of_the_others_once_a_round() -> None:
    turns: Turns[str] = Turns()
    for one in ("a1", "a2", "a3", "b1", "c1", "b2"):
        turns.put(one[0], one)
    assert turns.take() == "a1"
    turns.put("d", "d1")
    assert [turns.take() for _ in range(6)] == ["b1", "c1", "a2", "d1", "b2", "a3"]
    assert turns.take() is None


def test_tenants_that_have_their_share_keep_their_places() -> None:
    turns: Turns[str] = Turns()
    for one in ("a1", "b1", "a2", "c1"):
        turns.put(one[0], one)
    assert turns.take(but="a") == "b1"
    assert turns.take(but=["a", "c"]) is None
    assert [turns.take() for _ in range(3)] == ["a1", "c1", "a2"]


def test_whatever_comes_in_goes_out_once_and_in_its_tenants_order() -> None:
    rng, turns, inside = random.Random(5), Turns[tuple[str, int]](), dict[str, list[int]]()
    for number in range(2000):
        if rng.random() < 0.5:
            tenant = rng.choice("abcd")
            turns.put(tenant, (tenant, number))
            inside.setdefault(tenant, []).append(number)
        elif (one := turns.take()) is not None:
            tenant, taken = one
            assert taken == inside[tenant].pop(0)
        assert len(turns) == sum(map(len, inside.values()))
        assert all(turns.held(tenant) == len(own) for tenant, own in inside.items())
