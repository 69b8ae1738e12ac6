"""Fixtures of the outside-in tests, and the engine's log beside each failure.

`--against SOCKET` runs tests/api against another engine that listens there, dockerd for one: it shows whether a test
asks for what clients are used to, or for what this engine happens to do.

`--runtime runc` runs every engine of the tests on that runtime.

`--hypothesis-profile chance` looks for examples that no run has seen; without it they are the same in each.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.harness import TempEngine, until

PR_SET_CHILD_SUBREAPER = 36

# How fast an example is made or run is a matter of the machine, how large it is one of chance. A test that names checks of its own
# (suppress_health_check) would have these back.
_CHECKS = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
    HealthCheck.function_scoped_fixture,
]
# The same examples each time: what fails, fails by the change.
settings.register_profile("engined", deadline=None, suppress_health_check=_CHECKS, derandomize=True)
settings.register_profile("chance", deadline=None, suppress_health_check=_CHECKS)
settings.load_profile("engined")


class OtherEngine(TempEngine):
    """Another engine, started by someone else."""

    def __init__(self, socket: str) -> None:
        super().__init__()
        self.socket = socket

    def start(self) -> TempEngine:
        return self

    def close(self) -> None:
        shutil.rmtree(self.base)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--against", metavar="SOCKET", help="test the engine that listens there instead of this one")
    parser.addoption("--runtime", metavar="NAME", help="the OCI runtime of every engine, instead of the best one")


def pytest_configure(config: pytest.Config) -> None:
    if runtime := config.getoption("--runtime"):
        TempEngine.common = ("--runtime", runtime)
    config.addinivalue_line("markers", "own: what is ours alone, and not asked of another engine (--against)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--against"):
        items[:] = [item for item in items if "tests/api/" in item.nodeid and not item.get_closest_marker("own")]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows what the engines it used logged since it began."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if call.when == "setup":
        item.stash[_BEGINS] = {}
    for name, value in getattr(item, "funcargs", {}).items():
        if isinstance(value, TempEngine):
            begin = item.stash[_BEGINS].setdefault(
                name, os.path.getsize(value.log_path) if value.log_path.exists() else 0
            )
            if report.failed:
                report.sections.append((f"log of {name}", value.log(begin) or value.log()))


_BEGINS: pytest.StashKey[dict[str, int]] = pytest.StashKey()


@pytest.fixture(autouse=True)
def _orphans_are_not_ours() -> Iterator[None]:
    """A monitor's client makes its process a subreaper (prctl(2)); tests that use one here must not leave pytest so.

    Else every orphan of later tests falls to pytest and stays a zombie, where on a host init collects it.
    """
    yield
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


@pytest.fixture(scope="session")
def shared_engine(request: pytest.FixtureRequest) -> Iterator[TempEngine]:
    """One engine with busybox for all tests that only use it; at the end it stops and leaves nothing behind."""
    other = request.config.getoption("--against")
    with OtherEngine(other) if other else TempEngine() as engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def engine(shared_engine: TempEngine) -> Iterator[TempEngine]:
    """The shared engine, without containers before and after the test."""
    shared_engine.remove_all()
    yield shared_engine
    shared_engine.remove_all()


@pytest.fixture
def clean(engine: TempEngine) -> Iterator[TempEngine]:
    """The shared engine; every image that a test brought is gone afterwards, and every byte of it."""

    def state() -> tuple[int, ...]:
        return tuple(len(os.listdir(engine.root / place)) for place in ("layers", "content/sha256", "tmp"))

    def ids() -> list[str]:
        return [image["Id"] for image in engine.request("GET", "/v1.24/images/json").json()]

    before, kept = state(), ids()
    yield engine
    engine.remove_all()
    for image in ids():  # newest first: those that others were made from come after them
        if image not in kept:
            engine.request("DELETE", f"/v1.24/images/{image}?force=1")
    until("nothing is left", lambda: state() == before)


@pytest.fixture
def own_engine() -> Iterator[TempEngine]:
    """An engine for this test alone, with busybox, that may be killed, restarted and stopped."""
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine
