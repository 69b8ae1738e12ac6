"""Fixtures of the clients' tests: each docker CLI, bound to the shared engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients import programs
from tests.support.engine.harness import Result, TempEngine


class Docker:
    """A docker CLI that uses one engine at the version that they negotiate."""

    def __init__(self, program: programs.Program, engine: TempEngine) -> None:
        self.program = program
        self.engine = engine

    def __call__(self, *arguments: str, **keywords: Any) -> Result:
        """`docker ARGUMENTS`. Raises AssertionError unless it exits with `status`, 0 by default."""
        return self.program.run(self.engine, *arguments, **keywords)

    def lines(self, *arguments: str) -> list[str]:
        return self(*arguments).out.splitlines()

    @property
    def minor(self) -> int:
        """Minor number of the API version that it speaks."""
        return int(self.program.api.partition(".")[2])


def _remove_volumes(engine: TempEngine) -> None:
    for volume in engine.request("GET", "/v1.24/volumes").json()["Volumes"]:
        removed = engine.request("DELETE", f"/v1.24/volumes/{volume['Name']}")
        assert removed.status in (204, 404), removed


@pytest.fixture
def bare(engine: TempEngine) -> Iterator[TempEngine]:
    """The shared engine, without containers, networks and volumes before and after the test."""
    _remove_volumes(engine)
    yield engine
    engine.remove_all()
    _remove_volumes(engine)


@pytest.fixture(params=programs.PARAMETERS, ids=lambda program: program.name)
def docker(request: pytest.FixtureRequest, bare: TempEngine) -> Docker:
    return Docker(request.param, bare)


@pytest.fixture(params=programs.PARAMETERS, ids=lambda program: program.name)
def builder(request: pytest.FixtureRequest, clean: TempEngine) -> Docker:
    """The same. Images that the test adds are removed afterwards, with all their files."""
    return Docker(request.param, clean)
