"""Where instructions are counted (`bench.micro.instructions`), the fixture `benchmark` runs what is
measured a few times, so that caches are filled and the interpreter has specialised its code, and
once more while callgrind counts. Each row runs in a fork of its own: what ran before decides where
memory comes from, and so how much of it is cleared and copied.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from bench.micro import COUNTED

WARM = 3
"""Calls before the one that is counted."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timed(reason): its instructions are not counted, or not the same each time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if COUNTED:
        names = os.environ["ENGINED_COUNT_ROWS"].split("\n")
        items[:] = [
            item
            for item in items
            if not item.get_closest_marker("timed") and any(name in item.nodeid for name in names)
        ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not COUNTED:
        return None
    child = os.fork()
    if not child:
        status = 1
        try:
            failed = [report for report in runtestprotocol(item, log=False, nextitem=None) if not report.passed]
            print(*(report.longreprtext for report in failed), sep="\n", end="", flush=True)
            status = bool(failed)
        finally:
            os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        pytest.exit(f"{item.nodeid} has failed", returncode=pytest.ExitCode.TESTS_FAILED)
    # The kernel may give the number of this process to that of another row.
    for dump in Path(COUNTED).parent.glob(f"out.{child}.*"):
        dump.rename(dump.with_name(f"row.{item.session.items.index(item)}"))
    return True


class Counter:
    """Stands in for pytest-benchmark's fixture."""

    def __init__(self, shim: ctypes.CDLL, name: str) -> None:
        self._shim, self._name = shim, name.encode()
        self.extra_info: dict[str, Any] = {}
        self.stats = _Stats()

    def __call__(self, target: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self.pedantic(target, arguments, named)

    def pedantic(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        setup: Callable[[], Any] | None = None,
        **_: int,
    ) -> Any:
        """Call it, the last time counted; `setup` is called before each call, not counted."""
        named = kwargs or {}
        for _turn in range(WARM):
            if setup is not None and (given := setup()) is not None:
                args, named = given
            target(*args, **named)
        if setup is not None and (given := setup()) is not None:
            args, named = given
        gc.collect()
        gc.disable()  # it would run after so many allocations of whatever came before
        self._shim.count_from_here()
        result = target(*args, **named)
        self._shim.count_to_here(self._name)
        gc.enable()
        return result


class _Stats(dict[str, float]):
    """Each time is one second. Instructions are counted, so times are not reported."""

    def __init__(self) -> None:
        super().__init__(min=1.0)
        self.stats = SimpleNamespace(min=1.0)


if COUNTED:  # and pytest-benchmark is not loaded

    @pytest.fixture
    def benchmark(request: pytest.FixtureRequest) -> Counter:
        shim = ctypes.CDLL(COUNTED)
        assert shim.under_valgrind(), "ENGINED_COUNT is for python -m bench.micro.instructions"
        return Counter(shim, request.node.nodeid.removeprefix("bench/micro/"))
