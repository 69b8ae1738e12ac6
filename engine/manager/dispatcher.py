"""Sessions of agents with this manager: who is here, who lives, what each is sent.

A session begins with `Hello`: the node's record gets this manager as its owner and a new session
id, and any earlier session of the node, here or at another manager, ends. The agent is then sent
the views of its networks and its assignments, whole and then as they change, and its terms
(`Session`) when one of them changes. An assignment is never sent before the networks it is on.

Liveness. Beats are kept in memory: nothing of them is stored. A node whose connection broke, or
whose beats stopped, is

- `disconnected` in its record 3 s after its connection broke without another session anywhere, and
  while its host has acknowledged no packet for 3 s, if there are networks for which that matters,
- `down` after three periods without a beat, and its tasks are replaced then.

Sessions that this manager ends itself (quorum lost, more than its share of agents, the end of the
process) are no failures of the node, which goes to another manager. After a stop of this process (a
stalled host, SIGSTOP) or a time without quorum no node is declared down before it could have come
back: a manager that did not listen cannot tell who was silent.

All sessions are looked at four times a second, which takes 1.5 ms for 10,000 of them. Nothing is
ordered by time, so a beat costs one assignment.

Owns:     the sessions, the tasks that watch them, `NODE_DATA` of nodes whose owner this manager is.
Not here: nodes whose owner is lost (`liveness.py`), the content of assignments (`assignments.py`)
          and of views (`views.py`), plain containers on networks (`attaching.py`), certificates
          (`ca.py`).
Threads:  the event loop's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from engine.errors import EngineError, Forbidden, InvalidParameter, ServerError, Unavailable
from engine.manager import logs, records
from engine.manager.assignments import AssignmentSet
from engine.manager.attaching import Attachments
from engine.manager.batches import Batches
from engine.manager.ca import Authority
from engine.manager.identity import Identity
from engine.manager.kv import EtcdError
from engine.manager.records import Cluster, NodeData, new_id
from engine.manager.statuses import Statuses
from engine.manager.store import Change, Compare, Event, Put, Store
from engine.manager.views import Feed, NetworkViews
from engine.swarm_session import messages
from engine.swarm_session.clock import SECOND, Clock
from engine.swarm_session.frames import HIGH_WATER, Connection
from engine.swarm_session.messages import Beat, Bye, Done, Hello, Message, Peer
from engine.swarm_session.states import NodeState, Role, TaskState
from engine.system.tasks import spawn

PERIOD = 5.0
"""Seconds between beats, where the swarm's settings name none."""
LEAST_PERIOD = 0.5
"""The looks at all sessions are not fine enough for a shorter one."""
JITTER = 0.1
"""Part of the period by which those of the sessions differ."""
GRACE = 3
"""Periods without a beat until a node is down."""
RETURN = 6
"""Periods that all nodes have to come back after a time without quorum."""
SUSPECT = 3.0
"""Seconds after a connection broke until its node is disconnected."""
UNEASY = 1.2
"""Seconds of silence after which a node's host is sent something that TCP repeats soon."""
TICK = 0.25
"""Seconds between two looks at all sessions."""
TURNS = 4
PER_TURN = 500
"""The links of so many sessions are looked at with each look, and of all of them in four looks at
most: that takes 6 us for each.
"""
LATE = 1.0
"""A look that comes this many seconds too late shows that the process was stopped."""
QUORUM = 3.0
"""Seconds without quorum until the agents are sent away."""
ANSWER = 2.0
"""Seconds that etcd may take for an answer that needs quorum."""
FRESH = 3.0
"""Seconds after such an answer in which nodes may be declared down."""
REGISTRATIONS = 3
REGISTRATIONS_PERIOD = 8.0
"""A node may register so many times in so many seconds."""
LONGEST_DESCRIPTION = 256 << 10
"""Bytes of what a node says of itself."""
UNREAD = 30.0
"""Seconds that an agent may leave its assignments unread."""
GATHER = 0.02
"""Seconds between two rounds of assignments."""
SPREAD = 0.06
"""Seconds from a new attachment to its answer, in which other nodes learn of its address: 30 ms
when they are idle. Tasks have it long before they start.
"""
SLICE = 0.005
"""Seconds of sending after which others are served."""
SHARE = 1.5
"""Times the mean of sessions from which a manager sends agents to others."""
SHARE_PERIOD = 10.0
SHARE_LEAST = 10
"""Sessions above the mean that do not matter."""

ANOTHER = "the node has begun another session"

_log = logging.getLogger(__name__)

_Group = tuple[Sequence[Change], Sequence[Compare]]


class _Session:
    """One agent that is connected."""

    __slots__ = (
        "asked",
        "assigned",
        "connection",
        "dirty",
        "feed",
        "id",
        "identity",
        "last",
        "node",
        "period",
        "silent",
        "terms",
        "unread",
        "watched",
    )

    def __init__(self, id: str, identity: Identity, connection: Connection, period: float, now: float) -> None:
        self.id = id
        self.node = identity.node
        self.identity = identity
        self.connection = connection
        self.period = period
        self.last = now
        """When the last beat came."""
        self.assigned: AssignmentSet | None = None
        """None until the agent has been sent its session."""
        self.feed = Feed(identity.node)
        self.dirty: set[str] = set()
        """Tasks that have changed."""
        self.terms: messages.Session | None = None
        self.unread = 0.0
        """Since when the agent does not read; 0 while it does."""
        self.watched = False
        """Its connection shows a lost link."""
        self.silent = False
        """Its link seems to be lost."""
        self.asked = False
        """It was sent something to acknowledge, since its host was heard last."""

    @property
    def local(self) -> bool:
        """The agent of this manager's own node."""
        return not self.connection.peer


class _Absent(msgspec.Struct):
    """A node of this manager that has no connection now."""

    session: str
    since: float
    """When its connection ended, or its last beat came."""
    grace: float
    """Seconds from then until it is down."""
    sent_away: bool = False
    suspect: bool = False


class Dispatcher:
    """`start` when the store is loaded; `close` sends all agents away.

    `disconnected(connection)` must be called when a connection that was passed to `serve` has
    ended.
    """

    def __init__(self, store: Store, clock: Clock, node: str, authority: Authority, *, address: str = "") -> None:
        self.node = node
        self.address = address
        self.refuses = ""
        """Why no session may begin; "" when sessions are welcome."""
        self._store = store
        self._clock = clock
        self._authority = authority
        self._statuses = Statuses(store, clock)
        self._records: Batches[_Group, bool] = Batches(clock, store.commit_many, "manager: records of nodes")
        self._sessions: dict[str, _Session] = {}
        self._connections: dict[Connection, _Session] = {}
        self._absent: dict[str, _Absent] = {}
        self._registering: dict[str, Connection] = {}
        self._registrations: dict[str, deque[float]] = {}
        self._spared = 0.0
        """No node is declared down before this time."""
        self._answered = 0.0
        """When etcd last gave an answer that needs quorum."""
        self._writing: asyncio.Task[None] | None = None
        """The write of states of nodes."""
        self._doubted: dict[str, _Session] = {}
        """Whose link was lost or came back, which their records do not say yet."""
        self._doubting: asyncio.Task[None] | None = None
        """The write of that."""
        self._dirty: set[_Session] = set()
        self._wake = asyncio.Event()
        self._terms_of_all = False
        self._views = NetworkViews(store, clock, self._views_changed)
        self._attachments = Attachments(store, clock)
        self._managers: tuple[Peer, ...] | None = None
        """What `managers` returns, until it changes."""
        self._unsubscribe = store.subscribe(self._changed)
        self._tasks: list[asyncio.Task[None]] = []

    def nodes_on(self, network: str) -> list[str]:
        """The nodes with endpoints on a network of the swarm."""
        return self._views.nodes_on(network)

    async def start(self) -> None:
        """Serve. Nodes of an earlier process of this manager have six periods to come back."""
        for node in self._store.all(records.NODE_DATA):
            self._expect(node, RETURN, sent_away=True)
        self._tasks = [
            spawn(self._look_at_all(), "manager: liveness of agents", fatal=True),
            spawn(self._send_changes(), "manager: assignments", fatal=True),
            spawn(self._watch_quorum(), "manager: quorum", fatal=True),
            spawn(self._share(), "manager: sharing of agents"),
        ]

    async def close(self) -> None:
        """Send all agents to other managers, and end."""
        self.refuses = "this manager ends"
        self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        connections = list(self._connections)
        for session in list(self._sessions.values()):
            session.connection.write(Bye(reason=self.refuses))
        self._sessions.clear()
        self._connections.clear()
        await self._statuses.close()
        await self._records.close()
        await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)

    @property
    def sessions(self) -> int:
        """Agents that have a session here."""
        return len(self._sessions)

    def agent(self, node: str) -> Connection | None:
        """The connection of this node's agent, if its session is here."""
        session = self._sessions.get(node)
        return None if session is None else session.connection

    # --- requests of agents -----------------------------------------------------------------------

    async def serve(self, connection: Connection, message: Message, identity: Identity) -> None:
        """Serve one message of an agent. Raises the kinds of `errors`."""
        match message:
            case Hello():
                await self._register(connection, message, identity)
            case messages.Statuses():
                session = self._session(connection)
                if not await self._statuses.report(session.node, session.id, message.of):
                    raise Unavailable("this session has been replaced by another one")
                await connection.send(Done(seq=message.seq))
            case messages.Attach():
                await self._attach(connection, message)
            case messages.Detach():
                await self._attachments.remove(self._session(connection).node, message.attachment)
                await connection.send(Done(seq=message.seq))
            case messages.LeaveSwarm():
                await self._leave(connection, identity)
                await connection.send(Done(seq=message.seq))
            case messages.ReadLogs():
                await logs.relay(self, connection, message, self._store)
            case Bye():
                connection.abort("the agent ends its session")
            case _:
                raise InvalidParameter(f"a manager does not serve {type(message).__name__} here")

    def _session(self, connection: Connection) -> _Session:
        session = self._connections.get(connection)
        if session is None or self._sessions.get(session.node) is not session:
            raise Unavailable("this connection has no session")
        return session

    async def _register(self, connection: Connection, hello: Hello, identity: Identity) -> None:
        node = identity.node
        self._welcome(connection, hello, identity)
        await self._known(connection, node)
        self._registering[node] = connection
        try:
            data = await self._claim(connection, hello, identity)
            # before the agent can ask for more
            lost = await self._attachments.keep(node, hello.attachments)
        finally:  # the end of the connection cancels this
            if self._registering.get(node) is connection:
                del self._registering[node]
            self._expect(node)
        if connection.closed.is_set():
            return
        session = _Session(data.session, identity, connection, self._jittered(), self._clock.monotonic())
        current = self._store.record(records.NODE_DATA, node)
        if current is None or current.session != session.id:
            raise Unavailable(f"node {node} has begun another session")
        before = self._sessions.get(node)
        if before is not None and before.connection is connection:
            self._forget(before)
        elif before is not None:
            self._end(before, ANOTHER)
        self._absent.pop(node, None)
        self._sessions[node] = self._connections[connection] = session
        connection.on_beat = lambda: self._beat(session)
        session.terms = self._terms(session)
        answer = msgspec.structs.replace(
            session.terms, seq=hello.seq, root=self._authority.trusted(), attachments_lost=lost
        )
        # queued before the answer, as what the agent reports after the answer is newer
        reporting = spawn(self._report_of_hello(session, hello), "manager: statuses of a new session")
        await connection.send(answer)
        await self._prepare_views(session.feed)
        session.assigned = AssignmentSet(self._store, self._authority.unseal, node)
        session.dirty.clear()
        try:
            connection.write(self._views.whole(session.feed))
            connection.write(session.assigned.whole())
        except ServerError as error:  # the session has been answered already
            _log.error("assignments of node %s: %s", node, error.message)
            connection.abort(error.message)
            return
        await reporting

    async def _report_of_hello(self, session: _Session, hello: Hello) -> None:
        """Store the statuses of a `Hello`. The session ends if that fails."""
        try:
            await self._statuses.report(session.node, session.id, hello.statuses)
        except EngineError as error:
            session.connection.abort(f"the statuses of node {session.node} were not stored: {error.message}")

    async def _attach(self, connection: Connection, message: messages.Attach) -> None:
        session = self._session(connection)
        key, network, address = await self._attachments.add(session.node, session.id, message)
        while network not in session.feed.versions:  # its view goes before the answer
            if self._session(connection) is not session:
                raise Unavailable("this session has been replaced by another one")
            await self._send_to(session, attachments=True)
            if network not in session.feed.versions:
                await self._clock.sleep(GATHER)
        if self._views.elsewhere(network, session.node):
            await self._clock.sleep(SPREAD)  # or its first packets would have no way back
        answer = messages.Attached(seq=message.seq, attachment=key, network=network, address=address)
        await connection.send(answer)

    def _welcome(self, connection: Connection, hello: Hello, identity: Identity) -> None:
        """Raises Unavailable when no session may begin here now, InvalidParameter for a record that
        etcd would refuse, and with it others of the same transaction.
        """
        if self.refuses:
            raise Unavailable(self.refuses)
        size = len(records.encode(msgspec.structs.replace(hello, statuses=())))
        if size > LONGEST_DESCRIPTION:
            raise InvalidParameter(
                f"the description of node {identity.node} has {size} bytes, at most {LONGEST_DESCRIPTION} are allowed"
            )
        if connection.peer:
            now = self._clock.monotonic()
            times = self._registrations.setdefault(identity.node, deque(maxlen=REGISTRATIONS))
            if len(times) == REGISTRATIONS and now - times[0] < REGISTRATIONS_PERIOD:
                raise Unavailable(f"node {identity.node} registers too often: wait {REGISTRATIONS_PERIOD:.0f} s")
            times.append(now)
        epoch = self._authority.cluster.epoch
        if hello.epoch > epoch:
            raise Unavailable(
                f"this manager belongs to the swarm before a forced new cluster (epoch {epoch}, the node "
                f"has seen {hello.epoch})"
            )

    async def _known(self, connection: Connection, node: str) -> None:
        """Raises Forbidden for a node that was removed, and sends it away for good."""
        try:
            await self._authority.admit(Identity(node, Role.WORKER, ""))
        except Forbidden:
            if self._authority.barred(node):
                connection.write(Bye(reason="this node was removed from the swarm", barred=True))
            raise

    async def _claim(self, connection: Connection, hello: Hello, identity: Identity) -> NodeData:
        """Write this manager as the node's owner, with a new session. Raises Unavailable."""
        node = identity.node
        data_address = _data_address(hello.data_address)
        for _ in range(5):
            known = self._store.get(records.NODES, node)
            if known is None:
                raise Forbidden(f"node {node} is not part of this swarm: it was removed")
            entry = self._store.get(records.NODE_DATA, node)
            data = NodeData(
                description=hello.description,
                state=NodeState.READY,
                address=_host(hello.advertise) or connection.peer or _host(self.address),
                owner=self.node,
                session=new_id(),
                since=self._clock.now(),
                role=identity.role,
                certificate=identity.certificate,
                manager_address=hello.manager_address,
                data_address=data_address,
                features=hello.features,
                subnets=hello.subnets,
            )
            if entry is not None:
                data = msgspec.structs.replace(data, issuer_changes=entry.record.issuer_changes)
                if entry.record.state == NodeState.READY:
                    data = msgspec.structs.replace(data, since=entry.record.since)
            compares = (
                Compare(records.NODES, node, known.created, by_creation=True),
                Compare(records.NODE_DATA, node, 0 if entry is None else entry.revision),
            )
            (written,) = await self._records.add([((Put(records.NODE_DATA, node, data),), compares)])
            if written:
                return data
        raise Unavailable(f"the record of node {node} changed at each attempt")

    async def _leave(self, connection: Connection, identity: Identity) -> None:
        """Mark a node that leaves as down. Its record stays until it is removed."""
        node = identity.node
        session = self._sessions.get(node)
        if session is not None and session.connection is connection:
            self._forget(session)  # its connection stays open for the answer
        for _ in range(5):
            entry = self._store.get(records.NODE_DATA, node)
            if entry is None:
                return
            data = msgspec.structs.replace(
                entry.record,
                state=NodeState.DOWN,
                message="the node left the swarm",
                owner="",
                session="",
                since=self._clock.now(),
            )
            compares = (Compare(records.NODE_DATA, node, entry.revision),)
            (written,) = await self._records.add([((Put(records.NODE_DATA, node, data),), compares)])
            if written:
                return
        self._expect(node)
        raise Unavailable(f"the record of node {node} changed at each attempt")

    def _beat(self, session: _Session) -> None:
        session.last = self._clock.monotonic()
        if session.connection.backlog < HIGH_WATER:
            session.connection.write(Beat())

    # --- the end of sessions ----------------------------------------------------------------------

    def disconnected(self, connection: Connection) -> None:
        """The connection has ended. Its node may come back within its grace."""
        session = self._connections.pop(connection, None)
        if session is not None and self._sessions.get(session.node) is session:
            self._absent_now(session)

    def _expect(self, node: str, periods: int = GRACE, *, sent_away: bool = False) -> None:
        """Wait for a node whose owner this manager is by its record, if it has no connection."""
        data = self._store.record(records.NODE_DATA, node)
        if data is None or data.owner != self.node or data.state == NodeState.DOWN or node in self._registering:
            return
        session, absent = self._sessions.get(node), self._absent.get(node)
        if (session is None or session.id != data.session) and (absent is None or absent.session != data.session):
            grace = periods * self._period()
            self._absent[node] = _Absent(data.session, self._clock.monotonic(), grace, sent_away)

    def _absent_now(self, session: _Session, *, sent_away: bool = False) -> None:
        del self._sessions[session.node]
        self._dirty.discard(session)
        grace = GRACE * session.period
        self._absent[session.node] = _Absent(session.id, self._clock.monotonic(), grace, sent_away)

    def _send_away(self, session: _Session, reason: str) -> None:
        """End a session whose agent shall go to another manager."""
        session.connection.write(Bye(reason=reason))
        self._absent_now(session, sent_away=True)
        self._connections.pop(session.connection, None)
        spawn(session.connection.close(), "manager: end of a session")

    def _end(self, session: _Session, reason: str, *, barred: bool = False) -> None:
        """End a session that is the node's no more."""
        session.connection.write(Bye(reason=reason, barred=barred))
        self._forget(session)
        self._connections.pop(session.connection, None)
        spawn(session.connection.close(), "manager: end of a session")

    def _forget(self, session: _Session) -> None:
        if self._sessions.get(session.node) is session:
            del self._sessions[session.node]
        self._dirty.discard(session)

    # --- liveness ---------------------------------------------------------------------------------

    async def _look_at_all(self) -> None:
        before = self._clock.monotonic()
        turn = 0
        while True:
            await self._clock.sleep(TICK)
            now = self._clock.monotonic()
            if now - before > TICK + LATE:
                _log.warning("this process was stopped for %.1f s: nodes have time to beat again", now - before)
                self._spare(GRACE)
            before = now
            if self._views.due:
                self._wake.set()
            sessions = list(self._sessions.values())
            for session in sessions:
                self._look_at(session, now)
            turn += 1
            turns = min(TURNS, 1 + len(sessions) // PER_TURN)
            for session in sessions[turn % turns :: turns]:
                self._listen_to(session)
            if self._doubted and (self._doubting is None or self._doubting.done()) and not self.refuses:
                self._doubting = spawn(self._write_doubts(), "manager: links of nodes")
            free = self._writing is None or self._writing.done()
            if self._absent and free and not self.refuses and now - self._answered < FRESH:
                # not awaited: it takes up to 20 s when quorum is lost now
                self._writing = spawn(self._write_absent(now), "manager: states of nodes")

    def _spare(self, periods: float) -> None:
        self._spared = max(self._spared, self._clock.monotonic() + periods * self._period())

    def _look_at(self, session: _Session, now: float) -> None:
        if now - session.last > GRACE * session.period and now >= self._spared:
            session.connection.abort(f"node {session.node} is silent")
            self._absent_now(session)
            self._absent[session.node].since = session.last
        elif session.unread and now - session.unread > UNREAD:
            session.connection.abort(f"node {session.node} does not read")

    def _listen_to(self, session: _Session) -> None:
        """See whether the link to a node is there, if it has endpoints of networks."""
        if not session.watched:
            if not session.local and self._views.concerns(session.node):
                session.connection.watch_closely()
                session.watched = True
            return
        silence = session.connection.silence
        if silence > UNEASY and not session.asked:
            session.connection.write(Beat())
        session.asked = silence > UNEASY
        silent = silence > SUSPECT
        if silent != session.silent:
            session.silent = silent
            self._doubted[session.node] = session

    async def _write_doubts(self) -> None:
        """Write which nodes' links are lost or back. What fails is tried again at the next look."""
        doubted, self._doubted = self._doubted, {}
        groups: list[_Group] = []
        for node, session in doubted.items():
            entry = self._store.get(records.NODE_DATA, node)
            if entry is None or entry.record.session != session.id or self._sessions.get(node) is not session:
                continue
            state = NodeState.DISCONNECTED if session.silent else NodeState.READY
            if entry.record.state == state:
                continue
            message = "its host does not answer" if session.silent else ""
            new = msgspec.structs.replace(entry.record, state=state, message=message, since=self._clock.now())
            compares = (Compare(records.NODE_DATA, node, entry.revision),)
            groups.append(((Put(records.NODE_DATA, node, new),), compares))
        if not groups:
            return
        try:
            done = await self._store.commit_many(groups)
        except EngineError as error:
            _log.warning("links of nodes: %s", error.message)
            done = []
        if not all(done) or not done:
            self._doubted = doubted | self._doubted

    async def _write_absent(self, now: float) -> None:
        """Write the states that follow from the absence of nodes."""
        nodes: list[tuple[str, _Absent, NodeState]] = []
        groups: list[_Group] = []
        for node, absent in list(self._absent.items()):
            passed = now - absent.since
            down = passed >= absent.grace and now >= self._spared
            if not down and (absent.suspect or absent.sent_away or passed < SUSPECT):
                continue
            entry = self._store.get(records.NODE_DATA, node)
            if entry is None or entry.record.session != absent.session or entry.record.owner != self.node:
                del self._absent[node]
                continue
            state = NodeState.DOWN if down else NodeState.DISCONNECTED
            groups.append(self._absence(node, entry.record, entry.revision, state, passed))
            nodes.append((node, absent, state))
        if not groups:
            return
        try:
            done = await self._store.commit_many(groups)
        except EngineError as error:
            _log.warning("states of nodes: %s", error.message)
            return
        for (node, absent, state), written in zip(nodes, done, strict=True):
            if written and state == NodeState.DOWN:
                _log.warning("node %s is down", node)
                if self._absent.get(node) is absent:
                    del self._absent[node]
            elif written:
                absent.suspect = True

    def _absence(self, node: str, data: NodeData, revision: int, state: NodeState, passed: float) -> _Group:
        down = state == NodeState.DOWN
        new = msgspec.structs.replace(
            data,
            state=state,
            message=f"heartbeat failure: the node was silent for {passed:.0f} s" if down else "the connection broke",
            owner="" if down else data.owner,
            session="" if down else data.session,
            since=self._clock.now(),
        )
        return (Put(records.NODE_DATA, node, new),), (Compare(records.NODE_DATA, node, revision),)

    async def _watch_quorum(self) -> None:
        """Send all agents away when writes have been impossible for `QUORUM`: another manager may
        be able to serve them, and nobody's beats are counted that could not be written.
        """
        self._answered = self._clock.monotonic()
        failures = 0
        while True:
            try:
                await self._store.etcd.range("/swarm", keys_only=True, timeout=ANSWER)
            except EtcdError as error:
                failures += 1
                passed = self._clock.monotonic() - self._answered
                if failures > 1 and passed >= QUORUM and not self.refuses:
                    self.refuses = self._store.unavailable(error.message)
                    _log.warning("%s: agents are sent away", self.refuses)
                    if self._writing is not None:
                        self._writing.cancel()  # it must not be carried out when quorum is back
                    for session in list(self._sessions.values()):
                        self._send_away(session, self.refuses)
            else:
                self._answered = self._clock.monotonic()
                failures = 0
                if self.refuses:
                    _log.warning("quorum is back: agents are served again")
                    self.refuses = ""
                    self._spare(RETURN)
            await self._clock.sleep(1.0)

    # --- what agents are sent ---------------------------------------------------------------------

    def _changed(self, event: Event) -> None:
        self._views.changed(event)
        if not self._tasks:
            return  # not started
        kind = event.kind
        if kind is records.TASKS:
            for entry in (event.old, event.new):
                if entry is not None and entry.record.node:
                    self._task_changed(entry.record.node, event.key)
        elif kind is records.TASK_STATUS:
            if event.new is not None and event.new.record.state == TaskState.ORPHANED:
                task = self._store.record(records.TASKS, event.key)
                if task is not None:
                    self._task_changed(task.node, event.key)
        elif kind is records.NODE_DATA:
            self._node_changed(event)
        elif kind is records.NODES:
            if event.new is None or event.old is None or event.new.record.role != event.old.record.role:
                self._terms_changed()
            session = self._sessions.get(event.key)
            if session is not None and event.new is None:
                self._end(session, "this node was removed from the swarm", barred=True)
            elif session is not None:
                self._send_terms(session)
        elif kind is records.SPEC_VERSIONS:
            self._spec_came(event.key)
        elif kind is records.ATTACHMENTS:
            self._attachments.changed(event)
        elif kind is records.CLUSTER or kind is records.MANAGERS:
            self._terms_changed()

    def _task_changed(self, node: str, task: str) -> None:
        session = self._sessions.get(node)
        if session is not None:
            session.dirty.add(task)
            self._dirty.add(session)
            self._wake.set()

    def _spec_came(self, key: str) -> None:
        for session in self._sessions.values():
            if session.assigned is not None and (tasks := session.assigned.awaited.pop(key, None)):
                session.dirty |= tasks
                self._dirty.add(session)
                self._wake.set()

    def _node_changed(self, event: Event) -> None:
        """Another manager may have the node's session now."""
        new: NodeData | None = None if event.new is None else event.new.record
        session = self._sessions.get(event.key)
        own = session is not None and self._registering.get(event.key) is session.connection
        if new is not None and session is not None and not own:
            if new.session != session.id:
                self._end(session, ANOTHER)
            elif new.owner != self.node:
                self._send_away(session, "the swarm took this manager for lost")
        absent = self._absent.get(event.key)
        if absent is not None and (new is None or new.session != absent.session or new.owner != self.node):
            del self._absent[event.key]
        self._expect(event.key)
        old: NodeData | None = None if event.old is None else event.old.record
        if _managing(old) != _managing(new):
            self._terms_changed()

    def _views_changed(self, nodes: Iterable[str] | None) -> None:
        """There are views to send to these nodes, or to all."""
        if nodes is None:
            self._dirty.update(self._sessions.values())
        else:
            self._dirty.update(session for node in nodes if (session := self._sessions.get(node)) is not None)
        self._wake.set()

    async def _send_changes(self) -> None:
        while True:
            await self._wake.wait()
            self._views.flush()
            self._wake.clear()
            sessions, self._dirty = self._dirty, set()
            began = self._clock.monotonic()
            for session in sessions:
                await self._send_to(session)
                if self._clock.monotonic() - began > SLICE:
                    await asyncio.sleep(0)
                    began = self._clock.monotonic()
            if self._terms_of_all:
                self._terms_of_all = False
                for count, session in enumerate(list(self._sessions.values())):
                    self._send_terms(session)
                    if not count % 50:
                        await asyncio.sleep(0)
            await self._clock.sleep(GATHER)

    async def _prepare_views(
        self, feed: Feed, tasks: Iterable[str] | None = None, *, attachments: bool = False
    ) -> None:
        """Make the views of a node ready to be sent, with what these tasks need, and with all
        attachments. `tasks`: None for those that the node has at the end.
        """
        while True:
            needing = self._store.tasks_on(feed.node) if tasks is None else tasks
            if self._views.waits(needing) or (attachments and self._views.due):
                self._views.flush()
            missing = self._views.missing(feed)
            if not missing:
                return
            for network in missing:
                await self._views.build(network)

    async def _send_to(self, session: _Session, *, attachments: bool = False) -> None:
        """Send what has changed of a node's networks and tasks."""
        if self._sessions.get(session.node) is not session or session.assigned is None:
            return
        if session.connection.backlog > HIGH_WATER:
            session.unread = session.unread or self._clock.monotonic()
            self._dirty.add(session)
            self._wake.set()
            return
        session.unread = 0.0
        tasks, session.dirty = session.dirty, set()
        await self._prepare_views(session.feed, tasks, attachments=attachments)
        before, after = self._views.changes(session.feed)
        assignments = session.assigned.changes(tasks) if tasks else None
        try:
            for message in (before, assignments, after):
                if message is not None:
                    session.connection.write(message)
        except ServerError as error:
            _log.error("assignments of node %s: %s", session.node, error.message)
            session.connection.abort(error.message)

    # --- terms ------------------------------------------------------------------------------------

    def _terms_changed(self) -> None:
        self._managers = None
        self._terms_of_all = True
        self._wake.set()

    def _send_terms(self, session: _Session) -> None:
        before = session.terms
        if before is None or self._sessions.get(session.node) is not session:
            return
        session.terms = self._terms(session)
        if session.terms != before:
            root = session.terms.root if session.terms.root != before.root else ""
            session.connection.write(msgspec.structs.replace(session.terms, root=root))

    def _terms(self, session: _Session) -> messages.Session:
        node = self._store.record(records.NODES, session.node)
        cluster = self._authority.cluster
        mean = self._period()
        if not mean * (1 - JITTER) <= session.period <= mean * (1 + JITTER):
            session.period = self._jittered()
            session.last = self._clock.monotonic()
        return messages.Session(
            id=session.id,
            node=session.node,
            period=session.period,
            managers=self.managers(),
            role=(Role.WORKER if node is None else node.role).label,
            epoch=cluster.epoch,
            renew=self._authority.should_renew(session.identity),
            root=self._authority.trusted(),
            expiry=self._authority.expiry(),
            availability="active" if node is None else node.availability.label,
            data_path_port=cluster.data_path_port,
        )

    def managers(self) -> tuple[Peer, ...]:
        """The managers of the swarm: those that run, and those that are expected back."""
        if self._managers is not None:
            return self._managers
        present = self._store.all(records.MANAGERS)
        peers = [Peer(node=node, address=entry.record.address) for node, entry in present.items()]
        for node, entry in self._store.all(records.NODES).items():
            if entry.record.role == Role.MANAGER and node not in present:
                data = self._store.record(records.NODE_DATA, node)
                if address := _managing(data):
                    peers.append(Peer(node=node, address=address, absent=True))
        self._managers = tuple(sorted(peers, key=lambda peer: peer.node))
        return self._managers

    def _period(self) -> float:
        return period_of(self._store.record(records.CLUSTER))

    def _jittered(self) -> float:
        return self._period() * random.uniform(1 - JITTER, 1 + JITTER)

    # --- sharing of agents among managers ---------------------------------------------------------

    async def _share(self) -> None:
        """Send agents to managers that have fewer, a few at a time."""
        while True:
            await self._clock.sleep(SHARE_PERIOD)
            self._views.tidy()
            now = self._clock.monotonic()
            for node, times in list(self._registrations.items()):
                if now - times[-1] > REGISTRATIONS_PERIOD:
                    del self._registrations[node]
            for session in self._surplus():
                self._send_away(session, "this manager has more than its share of agents")

    def _surplus(self) -> list[_Session]:
        """The sessions to send away now: a twentieth at most, and only those whose first choice is
        another manager that runs.
        """
        managers = self.managers()
        running = [peer for peer in managers if not peer.absent]
        if len(running) < 2 or self.refuses:
            return []
        owned: dict[str, int] = {peer.node: 0 for peer in running}
        for entry in self._store.all(records.NODE_DATA).values():
            if entry.record.owner in owned:
                owned[entry.record.owner] += 1
        mean = sum(owned.values()) / len(owned)
        here = len(self._sessions)
        if here <= SHARE * mean or here - mean <= SHARE_LEAST:
            return []
        most = max(1, min(int(here - mean), here // 20))
        surplus: list[_Session] = []
        for session in self._sessions.values():
            choice = messages.order_of_managers(session.node, running)[0].node
            if choice != self.node and owned[choice] < mean and not session.local:
                surplus.append(session)
                if len(surplus) == most:
                    break
        return surplus


def period_of(cluster: Cluster | None) -> float:
    """Seconds between the beats of a swarm's agents."""
    period = 0 if cluster is None else cluster.spec.dispatcher.heartbeat_period
    return max(LEAST_PERIOD, period / SECOND) if period > 0 else PERIOD


def _managing(data: NodeData | None) -> str:
    """The address of a node's manager, which agents are told; "" for a worker."""
    return data.manager_address if data is not None and data.role == Role.MANAGER else ""


def _data_address(address: str) -> str:
    """The data address of a `Hello`. Raises InvalidParameter if it is no IPv4 address."""
    try:
        return str(ipaddress.IPv4Address(address)) if address else ""
    except ValueError:
        raise InvalidParameter(f"data_address {address[:64]!r} is no IPv4 address") from None


def _host(address: str) -> str:
    """`address` without its port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
