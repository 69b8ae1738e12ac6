"""The processes of a container, as ps(1) on the host shows them (`system/ps`)."""

from __future__ import annotations

import asyncio

from engine.containers.container import Container
from engine.errors import ServerError
from engine.system import host_paths
from engine.system.ps.listing import process_list
from engine.system.ps.options import DEFAULT, parse
from engine.wire.stats import ProcessList


async def top(container: Container, ps_args: str) -> ProcessList:
    """Raises ServerError when it does not run, InvalidParameter for bad `ps_args`."""
    if not container.running:
        raise ServerError(f"Container {container.id} is not running")
    pids = await asyncio.to_thread(container.parts.cgroups.processes, container.cgroup)
    found = await host_paths.run(process_list, pids, parse(ps_args or DEFAULT))
    container.publish("top")
    return found
