"""Fixtures of the outside-in tests, and the engine's log beside each failure.

`--against SOCKET` runs tests/api against another engine, for example dockerd. This shows whether a
test checks behaviour that clients expect, or only behaviour of this engine.

`--runtime runc` runs every engine of the tests with that runtime.

`--skips declared` fails a run that skips tests for a reason that is not in SKIPS, such as a run
without root.

`--nightly` runs the tests that are marked so, and no others. Without it they are left out: what
they show, with other versions, more rounds or worse luck, `make nightly` shows.

`-n 2 --dist loadfile` spreads the files of tests over two processes; `make test` takes more. Each
process has a network namespace and a shared engine of its own. The files that took longest begin
first; `--note-durations` writes tests/durations.json, which says how long that was.

`--hypothesis-profile chance` tries new examples, `night` many of them; without it they are the same
in each run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from engine.system import namespaces
from tests.support import ROOT
from tests.support.dbus.bus import Bus
from tests.support.engine import explain
from tests.support.engine.harness import TempEngine, until
from tests.support.swarm.clusters import Cluster
from tests.support.workers import pytest_keyboard_interrupt, pytest_xdist_make_scheduler  # noqa: F401 (hooks)

PR_SET_CHILD_SUBREAPER = 36

# These checks depend on the machine's speed or on chance. A test with its own suppress_health_check
# would enable them again.
_CHECKS = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
    HealthCheck.function_scoped_fixture,
]
# The same examples each time, so that a failure is caused by a change.
settings.register_profile("engined", deadline=None, suppress_health_check=_CHECKS, derandomize=True)
settings.register_profile("chance", deadline=None, suppress_health_check=_CHECKS)
settings.register_profile("night", deadline=None, suppress_health_check=_CHECKS, max_examples=500)
settings.register_profile("sanitized", settings.get_profile("engined"), max_examples=25)
settings.load_profile("sanitized" if os.environ.get("ENGINED_SANITIZE") else "engined")


class OtherEngine(TempEngine):
    """Another engine, which was started before the tests."""

    def __init__(self, socket: str) -> None:
        super().__init__()
        self.socket = socket

    def start(self) -> TempEngine:
        return self

    def close(self) -> None:
        shutil.rmtree(self.base)


SKIPS = (
    r"the kernel has no AppArmor",
    r"v2 reclaims, and kills if it must, instead of refusing",
    r"no block device here",
    r"numbers of x86_64",
    r"systemd is not process 1",
    r"v1 has other files",
    r".*hybrid.*",  # crun refuses cgroups in hybrid mode; the tests of runc run
)
"""Reasons why tests may be skipped on a host that has all of .ci/packages: its kernel, cgroups
and architecture.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--against", metavar="SOCKET", help="test the engine that listens there instead of this one")
    parser.addoption("--skips", choices=("any", "declared"), default="any", help="which tests may be skipped")
    parser.addoption("--nightly", action="store_true", help="run the tests that are for the night, and no others")
    parser.addoption("--note-durations", action="store_true", help="write tests/durations.json")
    parser.addoption("--runtime", metavar="NAME", help="the OCI runtime of every engine, instead of the best one")


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores ctrl-C in background jobs, and clients that tests interrupt inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # As ctrl-C, in workers too, so that fixtures end what they have started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if runtime := config.getoption("--runtime"):
        TempEngine.common = ("--runtime", runtime)
    if not config.getoption("--against") and os.geteuid() == 0:
        # root of a container, where only unit tests can run
        with contextlib.suppress(PermissionError):
            _leave_the_hosts_network()
    config.addinivalue_line("markers", "own: what is ours alone, and not asked of another engine (--against)")
    config.addinivalue_line("markers", "nightly: what repeats other tests, or takes long (--nightly)")


def _leave_the_hosts_network() -> None:
    """Give this process, and thereby its engines, a network namespace with a loopback device alone.

    Subnets and ports that tests name are free there, whatever the host or tests beside these use. A
    killed run leaves no links and rules behind.
    """
    with namespaces.new_network() as made:
        pass
    namespaces.enter_network(made)
    os.close(made)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations[_file(report.nodeid)] += report.duration
    if report.skipped and isinstance(report.longrepr, tuple):
        _note_skip(report.nodeid, report.longrepr[2])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _note_skip(report.nodeid, report.longrepr[2])


def _note_skip(test: str, text: str) -> None:
    reason = text.removeprefix("Skipped: ")
    if not any(re.fullmatch(each, reason, re.DOTALL) for each in SKIPS):
        _undeclared[f"{test}: {reason}"] = None


_undeclared: dict[str, None] = {}
"""Tests that were skipped for a reason that is not in SKIPS."""


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker skipped while it collected; it reports the skips of tests itself."""
    _undeclared.update(dict.fromkeys(getattr(node, "workeroutput", {}).get("undeclared", ())))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["undeclared"] = list(_undeclared)
    elif session.config.getoption("--note-durations"):
        long = {name: round(seconds) for name, seconds in sorted(_durations.items()) if seconds > 3}
        DURATIONS.write_text(json.dumps(long, indent=1) + "\n")
    if _undeclared and session.config.getoption("--skips") == "declared":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not config.getoption("--nightly"):
        terminalreporter.line("Tests of the night are left out; --nightly runs them, and no others.")
    if _undeclared and config.getoption("--skips") == "declared":
        terminalreporter.section("skipped for reasons that are not declared", red=True)
        for line in list(_undeclared)[:20]:
            terminalreporter.line(line)
        terminalreporter.line(
            f"{len(_undeclared)} tests: add the reason to SKIPS in tests/conftest.py, or mend the host"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    against, night = config.getoption("--against"), config.getoption("--nightly")
    left_out = [
        item
        for item in items
        if (against and ("tests/api/" not in item.nodeid or item.get_closest_marker("own")))
        or night != bool(item.get_closest_marker("nightly"))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    seconds: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    # the order within a file stays
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0))


def pytest_collection_finish() -> None:
    """The collector need not look at the tests again: they are a million objects, and many tests
    call it.
    """
    gc.collect()
    gc.freeze()


def _file(test: str) -> str:
    return test.partition("::")[0]


DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds of each file of tests that takes more than a few."""

_durations: Counter[str] = Counter()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add to the report of a failure what its engines have done since the test's begin, and the
    state of the host.
    """
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if call.when == "setup":
        item.stash[_BEGINS] = {}
        item.stash[_BEGAN] = call.start
    for name, engine in _engines(getattr(item, "funcargs", {})):
        begin = item.stash[_BEGINS].setdefault(
            name, os.path.getsize(engine.log_path) if engine.log_path.exists() else 0
        )
        if report.failed:
            report.sections.extend(explain.sections(name, engine, begin, item.stash[_BEGAN]))
    if report.failed:
        report.sections.append(("host", explain.host()))


def _engines(fixtures: dict[str, object]) -> Iterator[tuple[str, TempEngine]]:
    """The engines of a test, with their names: its fixtures, and those that they have."""
    engines = {id(value): (name, value) for name, value in fixtures.items() if isinstance(value, TempEngine)}
    yield from engines.values()  # `engine` is `shared_engine`
    for name, value in fixtures.items():
        if isinstance(value, Cluster):
            several = value.nodes
        elif isinstance(value, list | tuple):
            several = value
        else:  # what a test or a client has beside its engine
            several = [*getattr(value, "__dict__", {}).values()]
        own = (each for each in several if isinstance(each, TempEngine) and id(each) not in engines)
        yield from ((f"{name}[{number}]", each) for number, each in enumerate(own))


_BEGINS: pytest.StashKey[dict[str, int]] = pytest.StashKey()
"""The size of each engine's log at the test's begin, by the engine's name."""
_BEGAN: pytest.StashKey[float] = pytest.StashKey()


@pytest.fixture(autouse=True)
def _orphans_are_not_ours() -> Iterator[None]:
    """Reset the subreaper attribute, prctl(2), which a monitor's client sets for its process.

    Otherwise orphans of later tests would be reparented to pytest and stay zombies. Usually init
    reaps them.
    """
    yield
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


class _Lost(logging.Handler):
    """Collects the errors that asyncio logs: exceptions of tasks and futures that were never
    retrieved, and failed callbacks.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(_FORMAT.format(record))


_FORMAT = logging.Formatter()


@pytest.fixture(autouse=True, scope="session")
def _lost() -> Iterator[_Lost]:
    handler = _Lost()
    logging.getLogger("asyncio").addHandler(handler)
    yield handler
    gc.collect()  # a task is reported when it is collected
    logging.getLogger("asyncio").removeHandler(handler)
    assert not handler.found, "\n".join(handler.found)


@pytest.fixture(autouse=True)
def _no_failure_is_lost(_lost: _Lost) -> Iterator[None]:
    """Fail a test in which a task or a callback failed and its exception was never retrieved ("Task
    exception was never retrieved").
    """
    yield
    found, _lost.found = _lost.found, []
    assert not found, "\n".join(found)


@pytest.fixture(scope="session")
def shared_engine(request: pytest.FixtureRequest) -> Iterator[TempEngine]:
    """One engine with busybox, shared by the tests.

    At the end it is stopped and must leave nothing behind.
    """
    other = request.config.getoption("--against")
    with OtherEngine(other) if other else TempEngine() as engine:
        engine.load_busybox()
        yield engine
        if not other:  # all state must survive a restart unchanged
            before = engine.listed()
            engine.restart()
            assert engine.listed() == before
            engine.assert_recorded()


@pytest.fixture
def engine(shared_engine: TempEngine) -> Iterator[TempEngine]:
    """The shared engine, without containers before and after the test. Names of images that a test
    adds are removed: with another name, busybox is not in use by that name alone.
    """
    shared_engine.remove_all()
    before = shared_engine.image_names()
    yield shared_engine
    shared_engine.remove_all()
    for name in shared_engine.image_names() - before:
        shared_engine.request("DELETE", f"/v1.24/images/{name}?force=1")
    if not isinstance(shared_engine, OtherEngine):
        shared_engine.assert_recorded()


@pytest.fixture
def clean(engine: TempEngine) -> Iterator[TempEngine]:
    """The shared engine. Images that a test adds are removed afterwards, with all their files and
    the build cache, which outlives images.
    """

    def prune() -> None:
        assert engine.request("POST", "/v1.31/build/prune").status == 200

    def state() -> tuple[int, ...]:
        return tuple(len(os.listdir(engine.root / place)) for place in ("layers", "content/sha256", "tmp"))

    def ids() -> list[str]:
        return [image["Id"] for image in engine.request("GET", "/v1.24/images/json").json()]

    prune()
    before, kept = state(), ids()
    yield engine
    engine.remove_all()
    for image in ids():  # newest first, so that children are removed before their parents
        if image not in kept:
            engine.request("DELETE", f"/v1.24/images/{image}?force=1")
    prune()
    until("nothing is left", lambda: state() == before)


@pytest.fixture(scope="module")
def file_engine() -> Iterator[TempEngine]:
    """An engine with busybox for the tests of one file, which may kill and restart it, and leave it
    running."""
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def own_engine() -> Iterator[TempEngine]:
    """An engine with busybox for a single test, which may kill, restart and stop it."""
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bus]:
    """A system bus for this process and those that it starts."""
    bus = Bus(tmp_path)
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={bus.socket}")
    bus.start()
    yield bus
    bus.stop()
