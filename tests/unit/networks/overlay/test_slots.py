"""Slots of services: equal shares, few changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.networks.overlay import slots

BACKENDS = st.lists(st.integers(0, 90), max_size=80)


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        (0, 0),
        (1, 1),
        (20, 20),
        (32, 32),
        (33, 512),
        (64, 512),
        (65, 1024),
        (2048, 16384),
        (16384, 16384),
        (16385, 65536),
        (100_000, 65536),
    ],
)
def test_sizes(backends: int, expected: int) -> None:
    assert slots.size(backends) == expected
    assert not expected or expected in slots.SIZES


@given(st.lists(BACKENDS, max_size=12))
def test_shares_are_equal(changes: list[list[int]]) -> None:
    filled: list[int] = []
    for backends in changes:
        filled = slots.fill(filled, backends)
        assert len(filled) == slots.size(len(set(backends)))
        shares = Counter(filled)
        assert shares.keys() == set(backends)
        assert not shares or max(shares.values()) - min(shares.values()) <= 1


@given(BACKENDS)
def test_the_same_backends_change_nothing(backends: list[int]) -> None:
    filled = slots.fill((), backends)
    assert slots.fill(filled, backends[::-1]) == filled


def test_one_backend_comes_or_goes() -> None:
    before = slots.fill((), range(6))
    more = slots.fill(before, range(7))
    assert more[:6] == before
    less = slots.fill(before, [0, 1, 3, 4, 5])
    assert sum(a != b for a, b in zip(less, before, strict=False)) == 1
    large = slots.fill((), range(60))
    fewer = slots.fill(large, range(59))
    assert len(fewer) == len(large)
    assert sum(a != b for a, b in zip(fewer, large, strict=True)) <= 9


def test_more_backends_than_slots() -> None:
    filled = slots.fill((), range(70_000))
    assert len(filled) == len(set(filled)) == 65536
