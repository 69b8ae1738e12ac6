"""Every case of the table of Dockerfiles (tests/data/build, tests/support/builds/table.py), over
the API.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.builds.table import Case, Runner, table
from tests.support.engine.harness import TempEngine, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def engine() -> Iterator[TempEngine]:
    """One engine for all cases. At the end nothing is left but the containers of failed steps."""
    with TempEngine() as engine:
        engine.load_busybox()
        before = engine.footprint()
        yield engine
        for container in engine.containers():
            assert engine.inspect(container)["State"]["ExitCode"] != 0
            assert engine.request("DELETE", f"/v1.24/containers/{container}").status == 204
        until("only layers are left", lambda: engine.footprint().beyond(before).keys() <= {"directories"})
        until("no file of a build is left", lambda: os.listdir(engine.root / "tmp") == [])


@pytest.fixture(scope="module")
def runner(engine: TempEngine) -> Runner:
    return Runner(engine.request)


@pytest.mark.parametrize("case", table(), ids=lambda case: case.name)
def test_case(runner: Runner, case: Case) -> None:
    found = list(runner.differences(case))
    assert not found, "\n".join(found)
