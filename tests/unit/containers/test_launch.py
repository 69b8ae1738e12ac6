"""A process in a root of its own, without a container's record. Builds, plugins and cluster tasks
will use this.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.containers import launch
from engine.containers.start import Program
from engine.errors import ServerError
from engine.monitor.handles import LaunchFailed
from engine.wire import oci
from engine.wire.containers import HostConfig, ThrottleDevice
from tests.support import PATIENCE
from tests.support.fakes.world import World, run, world

__all__ = ["world"]

STEP = Program(key="step-1", bundle=Path("/run/step-1"), cgroup="/engined/step-1", tty=True, size=(24, 80))


def test_a_program_runs_and_ends(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        async with contextlib.AsyncExitStack() as undo:
            process = await launch.run(STEP, engine.parts, 3, undo)
            assert world.host.processes["step-1"].argv == ("crun", "run", "step-1")
            world.host.end("step-1", 7)
            assert (await process.exit).status == 7
            undo.pop_all()
        assert not world.rows

    run(story())


@pytest.mark.parametrize(("mode", "killed"), [("host", ["/engined/c"]), ("container:a", ["/engined/c"]), ("", [])])
def test_the_rest_of_a_shared_pid_namespace_ends_with_the_first_process(mode: str, killed: list[str]) -> None:
    """The exit is reported only when their output has been read."""
    seen: list[str] = []
    done = threading.Event()

    def kill(cgroup: str) -> None:
        seen.append(cgroup)
        done.set()

    record: Any = SimpleNamespace(id="c", parent_cgroup="", cgroup_driver="", host=SimpleNamespace(pid_mode=mode))
    parts: Any = SimpleNamespace(cgroups=SimpleNamespace(kill=kill))

    child = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(child.pid)

    async def story() -> None:
        process: Any = SimpleNamespace(pidfd=pidfd, exit=asyncio.get_running_loop().create_future())
        gc.collect()  # frees leftovers of earlier tests
        before = len(os.listdir("/proc/self/fd"))
        launch.end_with(process, record, parts)
        if killed:
            assert await asyncio.to_thread(done.wait, 30 * PATIENCE)
        launch.end_with(process, record, parts)
        process.exit.set_result(None)  # reported before its end was noticed
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen == killed and len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(story())
    child.wait()
    os.close(pidfd)


def test_what_is_raised_later_takes_the_process_back(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        with pytest.raises(ServerError, match="no network"):
            async with contextlib.AsyncExitStack() as undo:
                await launch.run(STEP, engine.parts, 3, undo)
                raise ServerError("no network")
        assert not world.host.processes
        assert not world.host.journal

    run(story())


def test_a_refusal_of_the_runtime_leaves_nothing(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        world.host.refuse["step-1"] = LaunchFailed("exec: no such file", 1)
        with pytest.raises(LaunchFailed):
            async with contextlib.AsyncExitStack() as undo:
                await launch.run(STEP, engine.parts, 3, undo)
        assert not world.host.processes
        assert "step-1" in engine.monitor.forgotten

    run(story())


@pytest.mark.parametrize(("scope", "starts"), [(True, True), (False, False)])
def test_a_scope_is_asked_for_again_when_systemd_comes_back(world: World, scope: bool, starts: bool) -> None:
    reason = "sd-bus call: Message recipient disconnected from message bus without replying"

    async def story() -> None:
        engine = await world.boot()
        world.host.refuse["step-1"] = LaunchFailed(reason, 1)
        program = dataclasses.replace(STEP, scope=scope)
        async with contextlib.AsyncExitStack() as undo:
            if starts:
                await launch.run(program, engine.parts, 3, undo)
                assert world.host.processes["step-1"].argv == ("crun", "run", "step-1")
            else:
                with pytest.raises(LaunchFailed, match="without replying"):
                    await launch.run(program, engine.parts, 3, undo)
        assert not world.host.processes

    run(story())


def test_the_reason_is_told_if_systemd_takes_nothing_back(world: World) -> None:
    async def story() -> None:
        engine = await world.boot()
        world.host.refuse["step-1"] = LaunchFailed("sd-bus call: Connection reset by peer", 1)
        default = engine.parts.runtimes.default

        async def delete(_key: str) -> None:
            raise ServerError("crun delete: cannot open sd-bus")

        refusing: Any = SimpleNamespace(run_argv=default.run_argv, delete=delete)
        async with contextlib.AsyncExitStack() as undo:
            with pytest.raises(LaunchFailed, match="Connection reset by peer"):
                await launch.run(dataclasses.replace(STEP, scope=True, runtime=refusing), engine.parts, 3, undo)
            undo.pop_all()

    run(story())


def test_a_control_group_is_removed_when_its_last_process_has_exited() -> None:
    """A killed runtime may still be exiting in it."""
    answers: list[OSError | None] = [OSError(errno.EBUSY, "busy"), OSError(errno.EBUSY, "busy"), None]

    def remove(cgroup: str) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    parts: Any = SimpleNamespace(cgroups=SimpleNamespace(mode="v2", remove=remove))
    asyncio.run(launch.remove_cgroup(parts, "/engined/c"))
    assert answers == []


@pytest.mark.parametrize(
    ("driver", "mode", "looks", "processes", "calls"),
    [
        ("systemd", "v2", 3, [], ["discard"]),
        ("systemd", "v2", 1000, [], ["delete", *["kill"] * 10]),
        ("systemd", "v2", 3, [7], ["delete", "kill", "kill"]),
        ("systemd", "hybrid", 0, [], ["delete", "remove"]),
        ("cgroupfs", "v2", 1000, [], ["discard"]),
    ],
)
def test_a_scope_is_removed_by_systemd(
    driver: str, mode: str, looks: int, processes: list[int], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself when it sees that no process is left, or because the runtime asks it to. Nothing
    else removes the directory.
    """
    monkeypatch.setattr(launch, "_SCOPE_PAUSES", (0.0,) * 10)
    seen: list[str] = []
    left = [True] * looks

    async def ask(name: str) -> None:
        seen.append(name)

    runtime = SimpleNamespace(discard=lambda *_: ask("discard"), delete=lambda _: ask("delete"))
    cgroups = SimpleNamespace(
        mode=mode,
        exists=lambda _: bool(left) and left.pop(),
        processes=lambda _: processes,
        kill=lambda _: seen.append("kill"),
        remove=lambda _: seen.append("remove"),
    )
    host = SimpleNamespace(device_requests=())
    record: Any = SimpleNamespace(id="c" * 64, parent_cgroup="", cgroup_driver=driver, host=host, runtime="crun")
    parts: Any = SimpleNamespace(cgroups=cgroups, runtimes=SimpleNamespace(of=lambda _: runtime))
    asyncio.run(launch._discard(record, parts))
    assert seen == calls


def test_systemd_is_told_no_limit_of_a_device_that_is_gone() -> None:
    """The other limits must reach it: otherwise its next reload takes them back."""
    told: list[oci.Resources] = []

    async def change(_: str, resources: oci.Resources) -> None:
        told.append(resources)

    rates = [ThrottleDevice(path="/dev/none", rate=1)]
    host = HostConfig(memory=64 << 20, blkio_device_read_bps=rates, blkio_device_write_iops=rates)
    cgroups = SimpleNamespace(swap_accounting=False)
    parts: Any = SimpleNamespace(cgroups=cgroups, scope_limits=SimpleNamespace(change=change))
    record: Any = SimpleNamespace(id="c", host=host)
    asyncio.run(launch.tell_systemd(record, parts))
    assert [(each.memory, each.block_io) for each in told] == [(oci.Memory(limit=64 << 20), None)]
