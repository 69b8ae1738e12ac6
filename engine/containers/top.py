"""The processes of a container, as ps(1) on the host shows them (`system/ps.py`)."""

from __future__ import annotations

import asyncio

from engine.containers.container import Container
from engine.errors import ServerError
from engine.system.host_paths import HostPaths
from engine.system.ps import process_list
from engine.wire.stats import ProcessList

_processes = HostPaths()
"""The command line of a process cannot be read while it waits for a file system with its memory
locked."""


async def top(container: Container, ps_args: str) -> ProcessList:
    """Raises ServerError when it does not run, InvalidParameter for bad `ps_args`."""
    if not container.running:
        raise ServerError(f"Container {container.id} is not running")
    pids = await asyncio.to_thread(container.parts.cgroups.processes, container.cgroup)
    found = await _processes.run(process_list, pids, ps_args)
    container.publish("top")
    return found
