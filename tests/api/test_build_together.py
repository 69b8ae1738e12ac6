"""Builds that run at the same time, or follow each other, over the socket: what they share and what
they do not.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.building import Built, build
from tests.harness import TempEngine

pytestmark = pytest.mark.own


class Building(threading.Thread):
    """A build in a thread of its own."""

    def __init__(self, engine: TempEngine, dockerfile: str, **parameters: Any) -> None:
        super().__init__()
        self._what = engine, dockerfile
        self._parameters = parameters
        self.start()

    def run(self) -> None:
        self._built = build(*self._what, **self._parameters)

    @property
    def built(self) -> Built:
        self.join()
        return self._built


def cached(built: Built) -> int:
    assert built.id
    return built.text.count("Using cache")


def test_steps_after_a_copy_of_a_stage_are_found_the_second_time(builder: TempEngine) -> None:
    dockerfile = "FROM busybox AS a\nRUN echo x > /x\nFROM busybox\nCOPY --from=a /x /y\nRUN cat /y\n"
    first, second = build(builder, dockerfile), build(builder, dockerfile)
    assert cached(first) == 0 and cached(second) == 3
    assert second.id == first.id


def test_a_run_is_shared_only_by_builds_with_the_same_limits(builder: TempEngine) -> None:
    """A step that fails for one build's limits does not fail for the other."""
    dockerfile = "FROM busybox\nRUN sleep 1; test $(ulimit -n) -gt 100\n"
    limit = [{"Name": "nofile", "Soft": 64, "Hard": 64}]
    builds = [Building(builder, dockerfile, ulimits=limit), Building(builder, dockerfile)]
    assert builds[0].built.code == 1
    assert builds[1].built.id


def test_locked_caches_in_any_order(builder: TempEngine) -> None:
    def dockerfile(*caches: str) -> str:
        mounts = " ".join(
            f"--mount=type=cache,id={each},target=/{number}{each},sharing=locked" for number, each in enumerate(caches)
        )
        return f"FROM busybox\nRUN {mounts} sleep 0.3\n"

    builds = [Building(builder, dockerfile(*each), nocache=1) for each in ("ab", "ba", "aa")]
    assert all(each.built.id for each in builds)
