"""Resources that a container shares with others when it starts: namespaces (`container:` modes) and
its links on the default bridge.

A namespace is opened while its owner is known to live, and the runtime gets the path of the
engine's own descriptor, because a pid may have been reused by the time the runtime opens it. With
IpcMode the container also gets the owner's /dev/shm: a detached copy of that mount (open_tree(2)),
attached below RUN while the runtime binds it.

Rules: Docker's for `--network`, `--pid` and `--ipc container:`, and for `--link` (hosts entries and
       the environment of linked containers).
Owns: the descriptors and that mount, until the caller's exit stack closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from engine.containers.body import PRIVATE, joined
from engine.containers.lifecycle import State
from engine.containers.store import ContainerRecord
from engine.errors import Conflict, InvalidParameter, NotFound, ServerError
from engine.monitor.handles import Process
from engine.networks.ports import each_exposed
from engine.system import mounts, namespaces

BRIDGE = "bridge"
_LONGEST_CHAIN = 16
"""Two containers that were restarted in turn may each name the other."""


class Peer(Protocol):
    """The facts about another container that are needed here."""

    record: ContainerRecord

    @property
    def running(self) -> bool: ...

    @property
    def directory(self) -> Path: ...


Find = Callable[[str], Peer]
"""By id, name or prefix; raises NotFound."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Paths for the runtime, empty where the container has its own; `peer` owns the network that it
    joins.
    """

    network: str = ""
    pid: str = ""
    ipc: str = ""
    user: int = -1
    """Descriptor of the user namespace of the containers whose namespaces it joins. Its root can
    use only namespaces that its own user namespace owns.
    """
    shm: str = ""
    peer: Peer | None = None
    files: Path | None = None
    """The directory with hosts, hostname and resolv.conf of that network: the peer's, or that of
    the container which the peer joins.
    """


async def join(
    record: ContainerRecord,
    find: Find,
    processes: Mapping[str, Process],
    shm: Path,
    stack: contextlib.AsyncExitStack,
) -> Joined:
    """Open the namespaces that the record's modes name; `stack` closes them. `shm` is a directory
    to create for the other's /dev/shm, if needed.

    Raises NotFound, Conflict (it does not run) or InvalidParameter (itself).
    """
    host = record.host
    network = pid = ipc = tree = ""
    peer: Peer | None = None
    owners = _Owners(record, processes, stack)
    if name := joined(host.network_mode):
        peer = _running(name, "network", record, find)
        owners.add(peer, "network")
        network = path(_open(peer, "net", "network", processes, stack))
    if name := joined(host.pid_mode):
        other = _running(name, "PID namespace", record, find)
        owners.add(other, "PID namespace")
        pid = path(_open(other, "pid", "PID namespace", processes, stack))
    if name := joined(host.ipc_mode):
        other = _running(name, "IPC", record, find)
        if other.record.host.ipc_mode in (PRIVATE, "none"):
            raise InvalidParameter(
                f"container {other.record.id}: non-shareable IPC (hint: use IpcMode:shareable for the donor container)"
            )
        owners.add(other, "IPC")
        ipc = path(_open(other, "ipc", "IPC", processes, stack))
        if other.record.host.ipc_mode == "host":
            tree = "/dev/shm"
        else:
            namespace = _open(other, "mnt", "IPC", processes, stack)
            await asyncio.to_thread(_bring, namespace, shm)
            stack.push_async_callback(asyncio.to_thread, _discard, shm)
            tree = str(shm)
    files = network_owner(peer, find).directory if peer is not None else None
    return Joined(network=network, pid=pid, ipc=ipc, user=owners.descriptor, shm=tree, peer=peer, files=files)


class _Owners:
    """The one user namespace that owns all namespaces which a container joins."""

    def __init__(
        self, record: ContainerRecord, processes: Mapping[str, Process], stack: contextlib.AsyncExitStack
    ) -> None:
        self.descriptor = -1
        self._parts = record, processes, stack
        self._found = (0, 0)

    def add(self, peer: Peer, what: str) -> None:
        """Raises Conflict where the container's root could not use the namespace of the peer."""
        record, processes, stack = self._parts
        if record.ids is None:
            return
        if peer.record.ids != record.ids:
            raise Conflict(
                f"cannot join {what} of container {peer.record.id}: it has other ids: give both the same UsernsMode"
            )
        owner = _open(peer, "user", what, processes, stack)
        status = os.fstat(owner)
        if self.descriptor >= 0 and self._found != (status.st_dev, status.st_ino):
            raise Conflict(f"cannot join {what} of container {peer.record.id}: it is in another user namespace")
        self.descriptor, self._found = owner, (status.st_dev, status.st_ino)


def network_owner(peer: Peer, find: Find) -> Peer:
    """The container whose network namespace the peer is in, at the end of a chain of
    `container:` modes.
    """
    for _ in range(_LONGEST_CHAIN):
        name = joined(peer.record.host.network_mode)
        if not name:
            break
        try:
            peer = find(name)
        except NotFound:
            break
    return peer


def _running(name: str, what: str, record: ContainerRecord, find: Find) -> Peer:
    peer = find(name)
    if peer.record.id == record.id:
        raise InvalidParameter(f"cannot join own {what}: container {record.id}")
    if peer.record.status.state == State.RESTARTING:
        raise Conflict(f"Container {peer.record.id} is restarting, wait until the container is running")
    if not peer.running:
        raise Conflict(f"cannot join {what} of a non running container: {peer.record.id}")
    return peer


def _open(peer: Peer, kind: str, what: str, processes: Mapping[str, Process], stack: contextlib.AsyncExitStack) -> int:
    process = processes.get(peer.record.id)
    try:
        if process is None:
            raise ProcessLookupError
        namespace = namespaces.of_process(process.pid, process.pidfd, kind)
    except OSError as error:
        raise Conflict(f"cannot join {what} of a non running container: {peer.record.id}") from error
    stack.callback(os.close, namespace)
    return namespace


def path(descriptor: int) -> str:
    """The path of this process's descriptor of a user namespace for the runtime, which is another
    process.

    With a single slash, runc from 1.1.13 on takes `/proc/PID/fd/N` for `/proc/PID/ns/user`: it
    compares the maps of this process with those of config.json, and refuses to start.
    """
    return f"/proc//{os.getpid()}/fd/{descriptor}"


def _bring(namespace: int, shm: Path) -> None:
    shm.mkdir(mode=0o700, parents=True, exist_ok=True)
    mounts.unmount(shm)  # left by a start that an earlier daemon did not finish
    mounts.copy_from(namespace, "/dev/shm", shm)


def _discard(shm: Path) -> None:
    mounts.unmount(shm)
    with contextlib.suppress(FileNotFoundError):
        shm.rmdir()


def sweep(directory: Path) -> None:
    """Remove mounts left by a daemon that was killed during a start."""
    with contextlib.suppress(FileNotFoundError):
        for each in directory.iterdir():
            _discard(each)


# --- links ----------------------------------------------------------------------------------------


def links(record: ContainerRecord, find: Find) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines for its hosts file and variables for its environment, from the current state of the
    linked containers.

    Raises ServerError in Docker's words when one does not run, or is not on the default bridge.
    """
    hosts: list[str] = []
    environment: list[str] = []
    for alias, container_id in record.links.items():
        try:
            child = find(container_id)
        except NotFound as error:
            raise ServerError(
                f"Cannot link to a removed container: {container_id} AS /{record.name}/{alias}"
            ) from error
        if not child.running:
            raise ServerError(f"Cannot link to a non running container: /{child.record.name} AS /{record.name}/{alias}")
        endpoint = child.record.networks.get(BRIDGE)
        if endpoint is None or not endpoint.ip_address:
            raise ServerError(f"Cannot link to /{child.record.name}, as it does not belong to the default network")
        names = dict.fromkeys((alias, child.record.config.hostname, child.record.name))
        hosts.append(f"{endpoint.ip_address}\t{' '.join(name for name in names if name)}")
        environment += link_environment(f"/{record.name}/{alias}", endpoint.ip_address, child.record)
    return tuple(hosts), tuple(environment)


def link_environment(name: str, address: str, child: ContainerRecord) -> Iterator[str]:
    """The variables of a link, as Docker's documentation of legacy links lists them.

    `name` is `/parent/alias`.
    """
    prefix = name.rpartition("/")[2].upper().replace("-", "_")
    exposed = child.config.exposed_ports
    found = each_exposed(exposed if isinstance(exposed, dict) else ())
    ports = sorted(found, key=lambda port: (port[1] != "tcp", port[0]))
    if ports:
        number, protocol = ports[0]
        yield f"{prefix}_PORT={protocol}://{address}:{number}"
    for number, protocol in ports:
        variable = f"{prefix}_PORT_{number}_{protocol.upper()}"
        yield f"{variable}={protocol}://{address}:{number}"
        yield f"{variable}_ADDR={address}"
        yield f"{variable}_PORT={number}"
        yield f"{variable}_PROTO={protocol}"
    yield f"{prefix}_NAME={name}"
    for entry in child.config.env or ():
        variable, equals, value = entry.partition("=")
        if equals and variable not in ("HOME", "PATH"):
            yield f"{prefix}_ENV_{variable}={value}"
