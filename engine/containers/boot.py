"""A container when the daemon starts: what runs of it, what a crash has left, what its restart
policy wants.

The monitor knows what runs, and the exits that no daemon has confirmed; the record is corrected by
it. `resume` comes first, for all containers: nearly all are as their record says. Then `restore`
corrects the others, and `start` follows for each.

Transient containers have no record. `end_strays` finds them by their directories.

Locks: the container's, while its record is corrected and while its last run is cleaned up.
Not here: processes without a container that the monitor knows (`daemon.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection, Iterator

import msgspec

from engine.config import Config
from engine.containers import bundle, launch, lifecycle, removal, restart
from engine.containers.container import RUNNING, Container
from engine.containers.lifecycle import State, Verb
from engine.containers.parts import Parts
from engine.monitor.handles import Exit, Process
from engine.runtime import cgroups
from engine.runtime.cgroups import Cgroups
from engine.system.tasks import spawn

_log = logging.getLogger(__name__)


def resume(container: Container) -> bool:
    """Take over the process of a container that ran on without a daemon. Returns False if it has
    none, or if its record does not say so.

    Nothing else uses the container yet, so this needs no lock.
    """
    parts, status = container.parts, container.record.status
    process = parts.monitor.processes.get(container.id)
    if process is None or status.state not in RUNNING or status.pid != process.pid:
        return False
    parts.monitor.exits.pop(container.id, None)  # of an earlier run
    _take_over(container, process)
    return True


def _take_over(container: Container, process: Process) -> None:
    container.process = process
    container.parts.volumes.resume(container.id, container.record.mounts)
    _restore_networks(container, process)
    container.follow(process)


async def restore(container: Container, on_host: bool) -> None:
    """Correct the record by the monitor's report: running, ended meanwhile, or gone after a reboot.

    `on_host`: its root is mounted or its control group exists. If nothing runs, a crash interrupted
    a start or a clean-up.
    """
    async with container.lock:
        monitor, status = container.parts.monitor, container.record.status
        process = monitor.processes.get(container.id)
        ended = monitor.exits.pop(container.id, None)
        abandoned = False
        if ended is not None and ended.at == status.finished_at:
            # The row has the exit; the run's resources may not have been released.
            ended, on_host = None, True
        if process is not None or ended is not None:
            state = lifecycle.following(status.state, Verb.FOUND, container.id)
            pid = process.pid if process is not None else 0
            if status.state in RUNNING:
                container.move(pid=pid)
            else:
                container.move(state=state, pid=pid, started_at=time.time_ns(), error="")
                await container.save()
            if process is not None:
                _take_over(container, process)
                return
            assert ended is not None
            container.parts.volumes.resume(container.id, container.record.mounts)
            container.record_exit(ended, await launch.oom_killed(container.record, container.parts))
        elif status.state in RUNNING:
            _log.warning("container %s: its process ended with the host or the monitor", container.id)
            container.record_exit(Exit(status=255, at=time.time_ns()), False)
            abandoned = True
        elif on_host or any(
            endpoint.ip_address or endpoint.global_ipv6_address for endpoint in container.record.networks.values()
        ):
            abandoned = True
            container.start_cut = status.state == State.CREATED
        else:
            if status.state == State.CREATED and container.record.host.auto_remove:
                # A reboot, or the end of daemon and monitor together, leaves no more of a start.
                directory = launch.directory_of(container.parts.config, container.id)
                container.start_cut = await asyncio.to_thread(bundle.was_begun, directory)
            return
    spawn(_clean_up(container, abandoned), f"container {container.id}: clean up after its last run")


def _restore_networks(container: Container, process: Process) -> None:
    record, parts = container.record, container.parts
    sandbox = launch.sandbox_of(record, parts)
    parts.attachments.restore(sandbox, record.networks, process, record.ports, record.status.started_at)


async def _clean_up(container: Container, abandoned: bool) -> None:
    async with container.lock:
        if container.process is None and not container.removed:
            await container.release_run(abandoned=abandoned)


def start(container: Container) -> None:
    """Apply its restart policy, or AutoRemove, if it does not run. A planned restart is due."""
    record = container.record
    state = record.status.state
    wanted = state == State.RESTARTING or (
        state == State.EXITED
        and restart.wanted_at_boot(
            *(record.host.restart_policy, record.status.exit_code, record.restart_count, record.stopped_by_user)
        )
    )
    if wanted:
        starting = contextlib.ExitStack()
        # now: containers that depend on it are started at the same time
        starting.enter_context(container.starting())
        spawn(_start(container, starting), f"container {container.id}: start at boot")
    else:
        removal.automatically(container)


async def _start(container: Container, starting: contextlib.ExitStack) -> None:
    with starting:
        async with container.lock:
            if container.record.status.state not in (State.RESTARTING, State.EXITED):
                return
            container.planned.cancel()
            container.move(state=lifecycle.following(container.record.status.state, Verb.BOOT, container.id))
        await container.start_by_policy()


# --- containers without a record ------------------------------------------------------------------


class _Linux(msgspec.Struct, frozen=True):
    cgroups_path: str = msgspec.field(default="", name="cgroupsPath")


class _Bundle(msgspec.Struct, frozen=True):
    """The part of a config.json that says where its processes are."""

    linux: _Linux = _Linux()


async def end_strays(parts: Parts, live: Collection[str]) -> None:
    """End the runs of containers that are not `live`: transient ones of an earlier daemon, which
    have a directory but no record. The caller removes the directories.
    """
    for container_id, cgroup in await asyncio.to_thread(lambda: list(_strays(parts.config, live))):
        _log.info("ending container %s: it was made for one run, and its daemon is gone", container_id)
        await parts.runtimes.default.delete(container_id)
        await asyncio.to_thread(kill_all, parts.cgroups, cgroup)
        await launch.remove_cgroup(parts, cgroup)


def _strays(config: Config, live: Collection[str]) -> Iterator[tuple[str, str]]:
    for directory in (config.root / "containers").iterdir():
        if directory.name not in live:
            found = _Bundle()
            # there is none, or half of one
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                found = msgspec.json.decode((directory / "config.json").read_bytes(), type=_Bundle)
            yield directory.name, cgroups.of_oci_path(directory.name, found.linux.cgroups_path)


def kill_all(hierarchies: Cgroups, cgroup: str) -> None:
    """Kill the processes of a cgroup of which the runtime has no state. Blocks on files."""
    for pid in hierarchies.processes(cgroup):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
