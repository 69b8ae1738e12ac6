"""The parts of a manager that serves: built by `Begin`, closed by `Stop` or with the process.

```
 Member (etcd) ── Store ──┬── Control      requests of the API
                          ├── Dispatcher   sessions of agents ── Logs
                          ├── Joining      certificates and members
                          ├── Listener     port 2377: sessions, joins, other managers
                          └── Leadership   while this manager leads: Loops
```

Owns:    all of these, opened in this order and closed in the reverse one.
Threads: the event loop's.
Raises:  InvalidParameter for bad settings, ServerError when etcd does not serve or a port is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.errors import EngineError, ServerError, Unavailable, WrongState, reason, words
from engine.manager import founding, joining, orchestration, roots
from engine.manager.backup import Backups, save
from engine.manager.ca import Authority
from engine.manager.control import nodes
from engine.manager.control.table import Control
from engine.manager.dispatcher import Dispatcher
from engine.manager.identity import Identity
from engine.manager.joining import Joining
from engine.manager.leader import Leadership
from engine.manager.listener import Listener
from engine.manager.liveness import Liveness
from engine.manager.logs import Logs
from engine.manager.loops import Loops
from engine.manager.member import QUOTA, Member
from engine.manager.networks import IngressLoop
from engine.manager.quorum import Quorum
from engine.manager.records import CLUSTER, MANAGERS, NODE_DATA
from engine.manager.renewal import Upkeep
from engine.manager.roles import RoleLoop
from engine.manager.rotation import RotationLoop
from engine.manager.space import Space
from engine.manager.store import Event, Store
from engine.manager.tls import Credentials, dial
from engine.swarm_session import messages
from engine.swarm_session.clock import Clock, SystemClock
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Begin, Message, Peer
from engine.system.tasks import spawn
from engine.system.threads import cancelled

REMOVED = 3
"""Exit status of a manager whose node was removed from the swarm, or demoted."""

_log = logging.getLogger(__name__)


class Running:
    """One manager that serves."""

    node: str
    control: Control
    dispatcher: Dispatcher
    joining: Joining
    logs: Logs

    def __init__(self, root: Path, run: Path, begin: Begin, end: Callable[[int], None]) -> None:
        self.node = begin.node
        self._root, self._run = root, run
        self._begin = begin
        self._end = end
        self._clock: Clock = SystemClock()
        self._stack = contextlib.AsyncExitStack()
        self._credentials = Credentials(root)
        self._identity: Identity | None = None
        self._identified: object = None

    @classmethod
    async def begin(cls, root: Path, run: Path, begin: Begin, end: Callable[[int], None]) -> Running:
        """Build all parts. `end(status)` ends the process, when this node was removed from the
        managers.
        """
        made = cls(root, run, begin, end)
        try:
            await made._open()
        except BaseException:
            await made.close()
            raise
        return made

    async def close(self) -> None:
        """Close the parts. Agents go to other managers; etcd's data stays."""
        await self._stack.aclose()

    async def identity(self) -> Identity:
        """That of the own node, whose daemon speaks on the Unix socket.

        Raises Forbidden when the swarm does not know its certificate, Unavailable when it may.
        """
        now = (self._credentials.stamp(), roots.members(self._authority.cluster))
        if now != self._identified or self._identity is None:
            certificate = ssl.PEM_cert_to_DER_cert(_first(self._credentials.certificate()))
            self._identity, self._identified = await self._authority.known(certificate), now
        return self._identity

    async def _open(self) -> None:
        begin = self._begin
        await asyncio.to_thread(self._credentials.mend)
        self._member = member = Member(
            self._root,
            self._run,
            node=begin.node,
            listen=begin.listen,
            advertise=begin.advertise,
            raft=founding.raft_of(self._root, begin),
        )
        self._stack.push_async_callback(member.stop)
        self._etcd = etcd = await founding.METHODS[begin.how](self._credentials, member, begin, self._clock)
        member.on_removed = lambda: self._end(REMOVED)
        if member.removed:
            self._end(REMOVED)
            raise ServerError("this manager was removed from the swarm's members")
        quorum = Quorum(etcd, self._clock, self._credentials, self._addresses_of_others)
        self._store = store = Store(
            etcd, self._clock, node=begin.node, reachable=quorum.reachable, broken=lambda: member.trouble
        )
        self._stack.push_async_callback(store.close)
        self._authority = authority = Authority(store, self._clock)
        self.joining = Joining(store, etcd, authority, self._clock, node=begin.node)
        loops = Loops(
            [
                *orchestration.loops(store, self._clock),
                RoleLoop(store, self._clock, self.joining.members, authority),
                RotationLoop(store, self._clock),
                Liveness(store, self._clock),
                IngressLoop(store, self._clock),
            ],
            store,
            self._clock,
        )
        store.subscribe(self._changed)
        await store.load()
        if begin.how == "force":
            await founding.take_all(store, authority, self._credentials, begin, self._clock)
        self.dispatcher = Dispatcher(store, self._clock, begin.node, authority, address=begin.advertise)
        self.control = Control(
            store,
            self._clock,
            node=begin.node,
            authority=authority,
            guard=self.joining.members.why_not,
            expel=self.joining.members.remove,
            peers=self.dispatcher.nodes_on,
        )
        listener = Listener(self._credentials, self._authority, self._serve, self.dispatcher.disconnected)
        self._stack.push_async_callback(listener.close)
        self._stack.push_async_callback(self.dispatcher.close)  # before: it says Bye to the agents
        self.logs = Logs(store, self._clock, self.dispatcher, self._dial)
        await self.dispatcher.start()
        await self._listen(listener)
        upkeep = Upkeep(
            store,
            self._clock,
            authority,
            self._credentials,
            node=begin.node,
            address=begin.advertise,
            of_etcd=lambda: member.roots,
        )
        self._stack.push_async_callback(upkeep.close)
        upkeep.start()
        leadership = Leadership(store, etcd, self._clock, node=begin.node, address=begin.advertise)
        leading = spawn(leadership.run(loops.lead), "manager: leadership", fatal=True)
        self._stack.push_async_callback(cancelled, leading)
        space = Space(etcd, self._clock, quota=QUOTA)
        self._stack.push_async_callback(cancelled, spawn(space.run(), "manager: room in etcd"))
        backups = Backups(self._root, etcd, self._clock, node=begin.node, keep=self._old_backups)
        self._stack.push_async_callback(cancelled, spawn(backups.run(), "manager: backups"))

    def _addresses_of_others(self) -> list[str]:
        """Those of the other managers, as far as they are known."""
        found = {node: entry.record.address for node, entry in self._store.all(MANAGERS).items()}
        for node in nodes.managers(self._store).keys() - found.keys():
            data = self._store.record(NODE_DATA, node)
            found[node] = "" if data is None else data.manager_address
        return [address for node, address in found.items() if node != self.node]

    def _old_backups(self) -> int:
        cluster = self._store.record(CLUSTER)
        return 0 if cluster is None else cluster.spec.raft.keep_old_snapshots or 0

    async def backup(self, path: str) -> bytes:
        """Write a backup to a new file. Returns JSON: Swarm, Revision."""
        header = await save(self._etcd, self._clock, self.node, Path(path))
        return msgspec.json.encode({"Swarm": header.swarm, "Revision": header.revision})

    async def _listen(self, listener: Listener) -> None:
        try:
            await listener.listen(self._begin.listen)
        except OSError as error:
            raise ServerError(f"cannot listen on {self._begin.listen}: {reason(error)}") from error

    async def _serve(self, connection: Connection, message: Message, identity: Identity | None) -> None:
        """One message of a peer that may send it."""
        if isinstance(message, JOINING):
            await self.joining.serve(connection, message, identity)
        elif identity is not None:
            await self.dispatcher.serve(connection, message, identity)

    async def _dial(self, node: str) -> Connection:
        """A connection to another manager. Raises Unavailable when it is absent or silent."""
        presence = self._store.record(MANAGERS, node)
        if presence is None:
            raise Unavailable(f"manager {node} is not present")
        try:
            return await dial(presence.address, self._credentials.client())
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"manager {node} at {presence.address}: {words(error)}") from error

    def _changed(self, event: Event) -> None:
        """Keep the raft settings on disk, for the member's next start."""
        if event.kind is CLUSTER and event.new is not None:
            founding.keep_raft(self._root, event.new.record.spec.raft)

    async def leave(self, force: bool) -> None:
        """Have this manager's member removed by another one, because its node leaves. Without a
        quorum of the others it leaves all the same, and they need a forced new cluster.

        Raises WrongState unless `force`.
        """
        members = await self.joining.members.all()
        others = {self.joining.members.owner(member) for member in members} - {self.node}
        present = {node: entry.record.address for node, entry in self._store.all(MANAGERS).items() if node in others}
        if not force:
            raise WrongState(_warning(len(present), len(members)))
        if not present:
            return
        peers = [Peer(node=node, address=address) for node, address in present.items()]
        try:
            await self.joining.members.step_aside()
            await joining.removed(self._root, peers, force=True)
        except EngineError as error:
            _log.warning("this manager leaves, but its member of etcd is not removed: %s", error.message)


JOINING = (
    messages.FetchRoot,
    messages.Join,
    messages.Renew,
    messages.AddMember,
    messages.PromoteMember,
    messages.RemoveMember,
)
"""Messages that `Joining` serves; the others of a TLS connection are the dispatcher's."""


def _warning(others: int, managers: int) -> str:
    """Why a manager does not leave without force. `others` are reachable, besides itself."""
    text = "this node participates in the swarm as a manager"
    if managers <= 1:
        text += ". It is the last manager: leaving erases all current state of the swarm"
    elif others < (managers - 1) // 2 + 1:
        text += (
            f". Of {managers} managers {others} others are reachable: without this one the swarm "
            "would result in a loss of quorum"
        )
    else:
        text += f". {managers - 1} of {managers} managers would be left"
    return f"{text}. Use force to leave all the same"


def _first(chain: str) -> str:
    """The first certificate of a PEM file."""
    end = "-----END CERTIFICATE-----"
    return chain[: chain.index(end) + len(end)] + "\n"
