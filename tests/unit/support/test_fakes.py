"""The fakes behave like the real objects, where tests rely on it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.errors import NotFound
from engine.monitor.handles import Exit, LaunchFailed
from tests.support import PATIENCE
from tests.support.fakes.monitor import FakeMonitor, Host


def test_monitor() -> None:
    async def story() -> None:
        host = Host()
        ends: list[tuple[str, int]] = []
        monitor = FakeMonitor(Path("/run"), on_exit=lambda key, end: ends.append((key, end.status)), host=host)
        await monitor.open()
        process = await monitor.run("one", ["runtime"], cwd="/")
        assert monitor.processes["one"] is process
        host.ends_at_once["two"] = 7
        early = await monitor.run("two", ["runtime"], cwd="/")
        assert early.exit.result().status == 7 and "two" not in monitor.processes
        monitor.signal("one", 9)
        assert (await asyncio.shield(process.exit)).status == 137
        await asyncio.sleep(0)
        assert ends == [("two", 7), ("one", 137)] and set(host.journal) == {"one", "two"}
        monitor.forget("one")
        monitor.forget("two")
        assert not host.journal
        with pytest.raises(NotFound):
            monitor.signal("one", 9)

    asyncio.run(asyncio.wait_for(story(), 10 * PATIENCE))


def test_monitor_that_dies_during_a_run() -> None:
    async def story() -> None:
        host = Host()

        async def point(name: str) -> None:
            await asyncio.sleep(0)
            if name == "run two: made":
                host.kill_monitor()

        monitor = FakeMonitor(Path("/run"), on_exit=lambda key, end: None, host=host)
        await monitor.open()
        await monitor.run("one", ["runtime"], cwd="/")
        host.point = point
        with pytest.raises(LaunchFailed) as caught:
            await monitor.run("two", ["runtime"], cwd="/")
        assert caught.value.interrupted
        await monitor.run("three", ["runtime"], cwd="/")
        assert set(host.processes) == set(monitor.processes) == {"one", "three"}

    asyncio.run(asyncio.wait_for(story(), 10 * PATIENCE))


def test_monitor_of_a_daemon_that_dies() -> None:
    async def story() -> None:
        host = Host()
        first = FakeMonitor(Path("/run"), on_exit=lambda key, end: None, host=host)
        await first.open()
        await first.run("one", ["runtime"], cwd="/")
        await first.run("two", ["runtime"], cwd="/")
        host.kill_daemon()
        host.end("two", 3)
        ends: list[tuple[str, Exit]] = []
        second = FakeMonitor(Path("/run"), on_exit=lambda key, end: ends.append((key, end)), host=host)
        await second.open(hold=True)
        assert set(second.processes) == {"one"} and second.exits["two"].status == 3
        host.end("one", 4)
        assert second.exits["one"].status == 4 and not ends
        second.deliver()
        assert sorted((key, end.status) for key, end in ends) == [("one", 4), ("two", 3)]

    asyncio.run(asyncio.wait_for(story(), 10 * PATIENCE))
