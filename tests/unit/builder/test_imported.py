"""Which steps of a cache from elsewhere a build may use."""

from __future__ import annotations

from typing import Any

import pytest

from engine.builder.cacheconfig import CacheLayer, Step, Steps
from engine.builder.imported import ImportedCache, ImportedLayer, Imports
from engine.wire.images import Descriptor

ABSENT: Any = None
DIFF_IDS = ("d0", "d1", "d2")
LAYERS = [ImportedLayer(Descriptor(digest=f"b{place}"), diff_id) for place, diff_id in enumerate(DIFF_IDS)]
TIME = "2026-01-02T03:04:05Z"


def cache(layer: int, layers: Any = LAYERS, created: str = TIME) -> ImportedCache:
    """One step whose result ends on that layer, each of which is on the one before."""
    known = tuple(CacheLayer(f"b{place}", place - 1) for place in range(len(LAYERS)))
    return ImportedCache("name", ABSENT, Steps(known, {"key": Step("key", layer, created)}), layers)


@pytest.mark.parametrize(
    ("layer", "below", "found"),
    [
        (0, (), True),
        (1, ("d0",), True),
        (2, ("d0", "d1"), True),
        (1, ("d0", "d1"), True),  # the step made no layer
        (2, ("d0",), False),
        (0, ("d0", "d1"), False),
        (1, ("other",), False),
        (1, ("d0", "other"), False),
        (-1, (), True),
        (7, (), False),
    ],
)
def test_a_step_fits_on_the_layers_below(layer: int, below: tuple[str, ...], found: bool) -> None:
    hit = cache(layer).find("key", below)
    assert (hit is not None) is found
    if hit is not None:
        assert [each.diff_id for each in hit.layers] == list(DIFF_IDS[: layer + 1])
    assert cache(layer).find("other", below) is None


def test_a_layer_that_cannot_be_used() -> None:
    assert cache(1, [LAYERS[0], None, None]).find("key", ("d0",)) is None


@pytest.mark.parametrize(("created", "expected"), [(TIME, TIME), ("yesterday", ""), ("", "")])
def test_when_a_step_was_made(created: str, expected: str) -> None:
    hit = cache(0, created=created).find("key", ())
    assert hit is not None and hit.created == expected


def test_caches_are_asked_in_their_order() -> None:
    first, second = cache(0), cache(0)
    hit = Imports([cache(2), first, second]).find("key", ())
    assert hit is not None and hit.cache is first
    assert Imports([first, second]).names == ["name", "name"]
    assert Imports([]).find("key", ()) is None
