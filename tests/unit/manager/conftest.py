"""Fixtures of the manager's unit tests.

Tests may be `async def`: they run in an event loop of their own, in which `store` is loaded before
and closed after. Time passes with `await clock.advance(seconds)` only.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from engine.manager.store import Store
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def etcd(clock: FakeClock) -> FakeEtcd:
    return FakeEtcd(clock)


@pytest.fixture
def store(etcd: FakeEtcd, clock: FakeClock) -> Store:
    return Store(etcd, clock, node="node1")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(_run(pyfuncitem.obj, arguments, pyfuncitem.funcargs.get("store")))
    return True


async def _run(test: Any, arguments: dict[str, Any], store: Store | None) -> None:
    if store is not None:
        await store.load()
    try:
        await test(**arguments)
    finally:
        if store is not None:
            await store.close()
