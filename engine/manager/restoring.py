"""`engined swarm backup` and `engined swarm restore`: a backup on demand, and a swarm of one
manager made of a backup.

The first asks the manager that runs. The second runs while the daemon is stopped: it starts etcd
for as long as it takes, and leaves ROOT/swarm as that of a manager, which the daemon's next start
finds. Until its last step nothing of it counts, and it can be repeated.

Owns:    during a restore ROOT/swarm: certificate, etcd's data.
Threads: an event loop of its own.
Raises:  InvalidParameter for a bad file or address, WrongState when the host is part of another
         swarm, ServerError when etcd or the disk fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import shutil
from pathlib import Path
from typing import NamedTuple

from engine.errors import InvalidParameter, ServerError, Unavailable
from engine.manager import backup, founding, keys
from engine.manager.backup import Backup
from engine.manager.ca import Authority
from engine.manager.certificates import Root, Subject, request_key
from engine.manager.member import Member
from engine.manager.records import CA_KEY, CLUSTER, NODES, Cluster, NodeRecord
from engine.manager.store import Compare, Put, Store
from engine.manager.tls import PORT, Credentials
from engine.swarm_session import messages
from engine.swarm_session.clock import SystemClock
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Begin, Message
from engine.swarm_session.states import Role
from engine.system.tasks import spawn

LIFETIME = 90 * 24 * 3600 * 1_000_000_000
"""Of the certificate until the store can sign one."""


class Restored(NamedTuple):
    node: str
    swarm: str
    epoch: int
    listen: str
    advertise: str


async def ask(run: Path, path: Path) -> dict[str, int | str]:
    """Have the manager of `run` write a backup to `path`. Returns what it says about it.

    Raises Unavailable when no manager runs.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(run / "manager.sock")
    except OSError as error:
        raise Unavailable(f"no manager of a swarm runs in {run}: {error.strerror}") from error
    connection = Connection(reader, writer, _nothing, dialled=True)
    reading = spawn(connection.run(), "connection to the manager")
    try:
        done = await connection.ask(messages.Backup(path=str(path)))
        found: dict[str, int | str] = json.loads(done.body)
        return found
    except ConnectionError as error:
        raise ServerError("the manager ended before the backup was written") from error
    finally:
        await connection.close()
        reading.cancel()


async def _nothing(connection: Connection, message: Message) -> None:
    """The manager asks nothing of this program."""


def address(text: str) -> str:
    """`IP[:port]` as host:port. Raises InvalidParameter."""
    host, port = text, PORT
    if text.startswith("[") or text.count(":") == 1:
        host, _, number = text.rpartition(":")
        if text.endswith("]"):
            host, number = text, str(PORT)
        host = host.removeprefix("[").removesuffix("]")
        if not number.isascii() or not number.isdigit() or not 0 < int(number) < 65536:
            raise InvalidParameter(f"address {text}: bad port {number}")
        port = int(number)
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        raise InvalidParameter(f"address {text}: not of the form IP[:port]") from None
    return f"[{found}]:{port}" if found.version == 6 else f"{found}:{port}"


async def restore(root: Path, run: Path, content: Backup, *, node: str, listen: str, advertise: str) -> Restored:
    """Make ROOT/swarm that of the only manager of the swarm in `content`. `node` is its id. Data of
    an etcd that was there is kept beside it, as etcd.before, or in a mount point as member.before.
    """
    if ipaddress.ip_address(advertise.rpartition(":")[0].strip("[]")).is_unspecified:
        raise InvalidParameter(f"advertise address {advertise}: other nodes need one that is not a wildcard")
    cluster = content.cluster
    for directory in (root, run):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    credentials = Credentials(root)
    clock = SystemClock()
    _certify(credentials, content, cluster, node, advertise, clock.now())
    data = root / "etcd"
    if data.is_mount():
        data /= "member"
    before = data.with_name(f"{data.name}.before")
    if data.exists():
        shutil.rmtree(before, ignore_errors=True)
        data.rename(before)
    member = Member(root, run, node=node, listen=listen, advertise=advertise, raft=cluster.spec.raft)
    member.wipe()
    try:
        etcd = await member.start()
        await backup.fill(etcd, content)
        store = Store(etcd, clock)
        await store.load()
        try:
            if store.get(NODES, node) is None:
                now = clock.now()
                record = NodeRecord(created=now, updated=now, role=Role.MANAGER)
                await store.commit([Put(NODES, node, record)], [Compare(NODES, node)])
            begin = Begin(how="force", node=node, listen=listen, advertise=advertise)
            await founding.take_all(store, Authority(store, clock), credentials, begin, clock)
            founding.keep_raft(root, cluster.spec.raft)
            made = store.record(CLUSTER)
            assert made is not None
        finally:
            await store.close()
    except BaseException:
        await member.stop()
        member.wipe()
        with contextlib.suppress(FileNotFoundError):
            before.rename(data)
        raise
    await member.stop()
    return Restored(node, made.id, made.epoch, listen, advertise)


def _certify(credentials: Credentials, content: Backup, cluster: Cluster, node: str, advertise: str, now: int) -> None:
    """A certificate for etcd's start, signed with the key in the backup. With an external CA the
    node's own one has to be there still.
    """
    found = next((value for key, value in content.keys if key == CA_KEY.path("")), None)
    key = CA_KEY.decode(found).key if found else ""
    if key:
        own = keys.new_key()
        certificate = Root(cluster.root, key).issue(
            request_key(keys.request(own)),
            Subject(node, Role.MANAGER, cluster.id),
            address=advertise,
            now=now,
            lifetime=LIFETIME,
        )
        credentials.install(roots=cluster.root, certificate=certificate, key=own)
    elif not credentials.certificate():
        raise ServerError(
            "the backup has no CA key, as an external CA signs for this swarm: "
            "restore on a host that still has its certificate in ROOT/swarm"
        )
