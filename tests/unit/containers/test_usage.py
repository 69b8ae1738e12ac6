"""Sizes of all containers: which are kept, and when they are counted again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine.containers.lifecycle import State
from engine.containers.usage import AT_ONCE, Sizes
from engine.errors import NotFound
from engine.storage.snapshots import Layer

BASE = 1000


class Walks:
    """Snapshots that count the walks; each finds one more byte than the last."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.most = 0
        self.mounts: set[str] = set()
        self.missing: set[str] = set()
        self.meanwhile: Callable[[], None] = lambda: None

    async def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        self.most = max(self.most, len(keys))
        await asyncio.sleep(0)
        self.meanwhile()
        found = {}
        for key in keys:
            self.done.append(key)
            found[key] = len(self.done)
        return {key: size for key, size in found.items() if key not in self.missing}

    def mounted(self, key: str) -> str:
        if key not in self.mounts:
            raise NotFound(key)
        return "/merged"

    def chain(self, parent: str) -> list[Layer]:
        return [Layer(number=1, diff_id="", size=BASE)]


@pytest.fixture
def walks() -> Walks:
    return Walks()


def container(walks: Walks, key: str, state: State = State.EXITED) -> Any:
    record = SimpleNamespace(status=SimpleNamespace(state=state), parent="p")
    parts = SimpleNamespace(snapshots=walks)
    return SimpleNamespace(id=key, generation=1, record=record, removed=False, parts=parts)


def own(sizes: Sizes, *containers: Any) -> list[int]:
    found = asyncio.run(sizes.of(containers))
    assert all(whole == own + BASE for own, whole in found)
    return [own for own, _ in found]


def test_a_size_is_kept_until_something_changes(walks: Walks) -> None:
    sizes, first, second = Sizes(), container(walks, "a"), container(walks, "b", State.CREATED)
    assert own(sizes, first, second) == own(sizes, first, second) == [1, 2]
    first.generation += 1
    assert own(sizes, first, second) == [3, 2]
    assert walks.done == ["a", "b", "a"]


@pytest.mark.parametrize("state", [State.RUNNING, State.PAUSED, State.RESTARTING, State.REMOVING])
def test_others_are_counted_each_time(walks: Walks, state: State) -> None:
    sizes, one = Sizes(), container(walks, "a", state)
    assert own(sizes, one) == [1] and own(sizes, one) == [2]


def test_a_container_that_is_about_to_start_is_counted_each_time(walks: Walks) -> None:
    walks.mounts.add("a")
    sizes, one = Sizes(), container(walks, "a")
    assert own(sizes, one) == [1] and own(sizes, one) == [2]


def test_a_change_during_the_walk_makes_the_size_outdated(walks: Walks) -> None:
    sizes, one = Sizes(), container(walks, "a")

    def change() -> None:
        one.generation += 1

    walks.meanwhile = change
    assert own(sizes, one) == [1] and own(sizes, one) == [2]


def test_removed_containers_are_forgotten(walks: Walks) -> None:
    sizes, first, second = Sizes(), container(walks, "a"), container(walks, "b")
    own(sizes, first, second)
    sizes.forget("a")
    assert own(sizes, second) == [2]
    assert own(sizes, first, second) == [3, 2]


def test_one_that_is_being_removed_has_no_size(walks: Walks) -> None:
    walks.missing.add("a")
    assert asyncio.run(Sizes().of([container(walks, "a"), container(walks, "b")])) == [(0, 0), (2, BASE + 2)]


def test_none() -> None:
    assert asyncio.run(Sizes().of([])) == []


def test_some_are_walked_at_a_time(walks: Walks) -> None:
    many = [container(walks, str(number)) for number in range(3 * AT_ONCE)]
    assert own(Sizes(), *many) == [*range(1, 3 * AT_ONCE + 1)]
    assert walks.most == AT_ONCE
