"""Sizes of all containers: which are kept, and when they are counted again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.containers import listing
from engine.containers.lifecycle import State
from engine.containers.usage import AT_ONCE, Sizes
from engine.errors import NotFound


class Walks:
    """Counts the walks; each finds one more byte than the last."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.at_once = self.most = 0

    async def sizes(self, container: Any) -> tuple[int, int]:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        self.done.append(container.id)
        return len(self.done), 1000


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Walks:
    found = Walks()
    monkeypatch.setattr(listing, "sizes", found.sizes)
    return found


def container(key: str, state: State = State.EXITED, *, mounted: bool = False) -> Any:
    def root(key: str) -> str:
        if not mounted:
            raise NotFound(key)
        return "/merged"

    status = SimpleNamespace(status=SimpleNamespace(state=state))
    return SimpleNamespace(
        id=key, generation=1, record=status, parts=SimpleNamespace(snapshots=SimpleNamespace(mounted=root))
    )


def own(sizes: Sizes, *containers: Any) -> list[int]:
    return [own for own, _ in asyncio.run(sizes.of(containers))]


def test_a_size_is_kept_until_something_changes(walks: Walks) -> None:
    sizes, first, second = Sizes(), container("a"), container("b", State.CREATED)
    assert own(sizes, first, second) == own(sizes, first, second) == [1, 2]
    first.generation += 1
    assert own(sizes, first, second) == [3, 2]
    assert walks.done == ["a", "b", "a"]


@pytest.mark.parametrize("state", [State.RUNNING, State.PAUSED, State.RESTARTING, State.REMOVING])
def test_others_are_counted_each_time(walks: Walks, state: State) -> None:
    sizes, one = Sizes(), container("a", state)
    assert own(sizes, one) == [1] and own(sizes, one) == [2]


def test_a_container_that_is_about_to_start_is_counted_each_time(walks: Walks) -> None:
    sizes, one = Sizes(), container("a", mounted=True)
    assert own(sizes, one) == [1] and own(sizes, one) == [2]


def test_a_change_during_the_walk_makes_the_size_outdated(walks: Walks, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, one = Sizes(), container("a")

    async def changing(container: Any) -> tuple[int, int]:
        container.generation += 1
        return await walks.sizes(container)

    monkeypatch.setattr(listing, "sizes", changing)
    assert own(sizes, one) == [1] and own(sizes, one) == [2]


def test_removed_containers_are_forgotten(walks: Walks) -> None:
    sizes, first, second = Sizes(), container("a"), container("b")
    own(sizes, first, second)
    assert own(sizes, second) == [2]
    assert own(sizes, first, second) == [3, 2]


def test_some_are_walked_at_a_time(walks: Walks) -> None:
    assert own(Sizes(), *(container(str(number)) for number in range(3 * AT_ONCE))) == [*range(1, 3 * AT_ONCE + 1)]
    assert walks.most == AT_ONCE
