"""The records of exec instances: which are kept, for how long, and how many. No process is run."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.containers import exec as exec_module
from engine.containers.exec import ExecRecord, Execs
from engine.containers.lifecycle import State
from engine.errors import Conflict, InvalidParameter, NotFound, ServerError
from engine.monitor.handles import Exit
from engine.system.grace_period import GracePeriod
from engine.wire.exec import ExecCreate


class FakeContainer:
    def __init__(self, identifier: str) -> None:
        self.id = identifier
        self.record = SimpleNamespace(status=SimpleNamespace(state=State.RUNNING, pid=1))
        self.running = True
        self.said: list[tuple[str, dict[str, str]]] = []

    def publish(self, action: str, **attributes: str) -> None:
        self.said.append((action, attributes))


class FakeMonitor:
    def __init__(self) -> None:
        self.processes: dict[str, Any] = {}
        self.exits: dict[str, Exit] = {}
        self.forgotten: list[str] = []
        self.losses = 0

    async def take_reports(self) -> None:
        pass

    def forget(self, key: str) -> None:
        self.forgotten.append(key)


class FakeContainers(dict[str, FakeContainer]):
    find = dict.get


class Bench:
    def __init__(self, run: Path, monitor: FakeMonitor | None = None) -> None:
        self.container = FakeContainer("c")
        self.monitor = monitor or FakeMonitor()
        self.containers = FakeContainers(c=self.container)
        self.execs = Execs(run, self.containers, self.monitor, SimpleNamespace(), GracePeriod(()))  # type: ignore[arg-type]
        self.execs.open()

    async def created(self, *command: str) -> str:
        return await self.execs.create(self.container, ExecCreate(cmd=list(command or ("true",))))  # type: ignore[arg-type]

    async def finished(self, at: int) -> str:
        exec_id = await self.created()
        self.execs.exited(exec_id, Exit(status=3, at=at))
        await settled()
        return exec_id


async def settled() -> None:
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


def test_finished_ones_are_kept_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path)
        now = 10**18
        monkeypatch.setattr(exec_module.time, "time_ns", lambda: now)
        old = await bench.finished(now)
        assert bench.execs.get(old).exit_code == 3
        now += exec_module.KEPT_SECONDS * 10**9 // 2
        young = await bench.finished(now)
        assert bench.execs.get(old)
        now += exec_module.KEPT_SECONDS * 10**9 // 2 + 1
        await bench.created()
        with pytest.raises(NotFound):
            bench.execs.get(old)
        assert bench.execs.get(young)
        assert bench.monitor.forgotten == [old, young]

    asyncio.run(scenario())


def test_the_last_finished_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path)
        monkeypatch.setattr(exec_module, "FINISHED_KEPT", 20)
        idle = await bench.created()
        ended = [await bench.finished(1 << 62) for _ in range(50)]
        assert len(bench.execs) <= 22
        assert all(bench.execs.get(each).exit_code == 3 for each in ended[-20:])
        with pytest.raises(NotFound):
            bench.execs.get(ended[0])
        assert bench.execs.get(idle)

    asyncio.run(scenario())


def test_there_is_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path)
        monkeypatch.setattr(exec_module, "MOST_KEPT", 20)
        ended = [await bench.finished(1 << 62) for _ in range(50)]
        assert len(bench.execs) <= 20
        assert bench.execs.get(ended[-1])
        idle = [await bench.created() for _ in range(60)]
        assert len(bench.execs) <= 20
        assert bench.execs.get(idle[-1])
        assert set(bench.execs.of("c")) <= set(idle)

    asyncio.run(scenario())


def test_ids_of_a_container(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path)
        first, second = await bench.created(), await bench.created()
        assert bench.execs.of("c") == [first, second]
        bench.execs.exited(first, Exit(status=0, at=1))
        bench.execs.exited(first, Exit(status=9, at=2))  # a second report changes nothing
        await settled()
        assert bench.execs.get(first).exit_code == 0
        assert bench.execs.of("c") == [second]
        bench.execs.forget_container("c")
        assert bench.execs.of("c") == []
        assert bench.execs.of("other") == []
        actions = [action for action, _ in bench.container.said]
        assert actions == ["exec_create: true ", "exec_create: true ", "exec_die"]

    asyncio.run(scenario())


def test_refusals(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path)
        with pytest.raises(InvalidParameter):
            await bench.created("")
        for state in (State.PAUSED, State.EXITED, State.CREATED, State.RESTARTING):
            bench.container.record.status.state = state
            with pytest.raises(Conflict):
                await bench.created()
        assert len(bench.execs) == 0

    asyncio.run(scenario())


def test_broken_records_are_swept(tmp_path: Path) -> None:
    directory = tmp_path / "exec"
    directory.mkdir()
    (directory / "broken").write_bytes(b"\xc1 nonsense")
    (directory / "torn").write_bytes(b"")

    async def scenario() -> None:
        Bench(tmp_path)

    asyncio.run(scenario())
    assert not list(directory.iterdir())


def test_instances_are_forgotten_at_the_end_of_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that was never started cannot be started in the next run. One that ran is kept
    for a while, for a client that lost its stream."""
    monkeypatch.setattr(exec_module, "LINGER", 0.01)

    async def scenario() -> None:
        bench = Bench(tmp_path)
        idle, ended = await bench.created(), await bench.finished(1)
        bench.execs.run_ended("c")
        with pytest.raises(NotFound, match=f"No such exec instance: {idle}"):
            await bench.execs.start(idle, detach=True)
        assert bench.execs.get(ended).exit_code == 3
        fresh = await bench.created()  # the container has been started again
        await asyncio.sleep(0.05)
        with pytest.raises(NotFound):
            bench.execs.get(ended)
        assert bench.execs.get(fresh)
        bench.execs.forget_container("c")
        assert len(bench.execs) == 0

    asyncio.run(scenario())
    assert not list((tmp_path / "exec").iterdir())


def test_the_monitor_forgets_an_exit_when_its_file_is_gone(tmp_path: Path) -> None:
    """A daemon that finds the file but no exit would report 255."""

    async def scenario() -> None:
        bench = Bench(tmp_path)
        there: list[bool] = []
        bench.monitor.forget = lambda key: there.append((tmp_path / "exec" / key).exists())  # type: ignore[method-assign]
        exec_id = await bench.created()
        (tmp_path / "exec" / exec_id).touch()
        bench.execs.exited(exec_id, Exit(status=3, at=1))
        await settled()
        assert there == [False]

    asyncio.run(scenario())


def test_a_probe_without_descriptors_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def scenario() -> None:
        bench = Bench(tmp_path)
        monkeypatch.setattr(exec_module.socket, "socketpair", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            await bench.execs.probe(bench.container, ["true"], 1, 100)  # type: ignore[arg-type]
        assert bench.execs.of("c") == [] and len(bench.execs) == 0

    asyncio.run(scenario())


def test_a_paused_container_is_named_as_the_client_did(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = Bench(tmp_path)
        bench.container.record.status.state = State.PAUSED
        with pytest.raises(Conflict, match="Container web is paused, unpause the container before exec"):
            await bench.execs.create(bench.container, ExecCreate(cmd=["true"]), "web")  # type: ignore[arg-type]

    asyncio.run(scenario())


def attached(run: Path, exec_id: str = "e") -> Bench:
    """A daemon that finds an instance which runs with a client."""
    (run / "exec").mkdir(exist_ok=True)
    config = ExecCreate(cmd=["sleep", "1"], attach_stdout=True)
    record = ExecRecord(id=exec_id, container_id="c", config=config, started=True, attached=True)
    (run / "exec" / exec_id).write_bytes(msgspec.msgpack.encode(record))
    monitor = FakeMonitor()
    monitor.processes[exec_id] = SimpleNamespace(pid=7)
    return Bench(run, monitor)


def test_whose_stream_ended_with_the_monitor_is_inspected_at_its_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = attached(tmp_path)
        assert (await bench.execs.inspect("e")).running, "its client is there"
        bench.monitor.losses += 1
        asked = [asyncio.create_task(bench.execs.inspect("e")) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in asked)
        bench.execs.exited("e", Exit(status=7, at=1))
        assert [(found.running, found.exit_code) for found in await asyncio.gather(*asked)] == [(False, 7)] * 2
        await settled()

    asyncio.run(scenario())


def test_whose_stream_ended_with_the_monitor_and_that_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_module, "CUT_GRACE", 0.01)

    async def scenario() -> None:
        bench = attached(tmp_path)
        bench.monitor.losses += 1
        asked = [bench.execs.inspect("e") for _ in range(2)]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, ServerError)
            assert error.message == "exec e runs, but the connection to its output has been lost"
        assert (await bench.execs.inspect("e")).running, "it has been said once"

    asyncio.run(scenario())


def test_whose_client_had_left_before_the_monitor_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        bench = attached(tmp_path)
        bench.execs.detached("e", by_keys=False)
        assert bench.container.said == []
        bench.monitor.losses += 1
        assert (await bench.execs.inspect("e")).running

    asyncio.run(scenario())
