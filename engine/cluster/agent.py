"""The agent of a node: its session with a manager, over which tasks come and their states go.

On managers the session goes over the own manager's Unix socket; when that is refused for some time,
and on workers, over mutual TLS to one of the managers, in the order that the node's id gives. A
session that is lost, or that the manager ends (`Bye`), is followed by another one, with a growing
and random pause. Without any manager the tasks run on, and what becomes of them is reported later.

Statuses are collected for a moment, written to disk, and sent; the last one of a task wins. A new
session begins with the states of all tasks.

Owns:    the session, the executor.
Threads: the event loop's.
Raises:  nothing from `start` on: `reason` says why there is no session.
Not here: certificates, roles and the list of managers on disk, which are `membership.py`'s; it gets
each `Session` message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from engine.cluster import client, logs
from engine.cluster.attaching import Attaching
from engine.cluster.bodies import Node
from engine.cluster.description import description
from engine.cluster.executor import Executor
from engine.cluster.parts import Parts
from engine.cluster.state import CERTIFICATE, KEY, ROOTS, Identity
from engine.cluster.views import NodeNetworks
from engine.errors import BUG, EngineError, Forbidden, ServerError, words
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import (
    Assignments,
    Beat,
    Bye,
    Ended,
    Hello,
    LeaveSwarm,
    Message,
    Peer,
    ReadLogs,
    Session,
    Statuses,
    Views,
    order_of_managers,
)
from engine.system.reconcile import Backoff, either
from engine.system.tasks import spawn
from engine.system.threads import cancelled
from engine.wire.nodes import NodeDescription

HELLO_LIMIT = 20.0
"""Seconds that a manager may take to begin a session: it may wait for quorum."""
OWN_HELLO_LIMIT = 10.0
"""Seconds for the own manager, which is given up for others while they can still save this node
from being taken for lost."""
REPORT_LIMIT = 30.0
"""Seconds that it may take to store statuses."""
LEAVE_LIMIT = 5.0
BACKOFF = 0.1, 8.0
"""Seconds between attempts: at first, and at most."""
OWN_LIMIT = 5.0
"""Seconds for which the own manager may begin no session before others are tried in turn with
it.
"""
BATCH_TIME = 0.1
URGENT_TIME = 0.005
"""Seconds in which statuses are collected: at most, and when other nodes wait for one of them."""
BATCH = 1000
"""Statuses in one message."""
SILENCE = 1.5
"""Periods after which a beat that the manager has not answered means that the session is lost. This
leaves a period to find another manager: after three, this node is taken for lost.
"""
SAVE_PAUSE = 1.0
DESCRIPTION_TIME = 20.0
"""Seconds after which the node looks whether it is still as it was described: plugins come and
go.
"""

_log = logging.getLogger(__name__)


class Facts(NamedTuple):
    """What this node's networks are like, for `Hello`."""

    features: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()


class Silent(ServerError):
    """The manager does not answer beats."""


class _Outdated(ServerError):
    """The manager has to know this node as it is now: another session begins. No fault."""


class Agent:
    """That of one node, as long as it is in one swarm."""

    def __init__(
        self,
        parts: Parts,
        identity: Identity,
        *,
        on_session: Callable[[Session], None],
        on_barred: Callable[[str], None],
        networks: NodeNetworks,
        attaching: Attaching,
    ) -> None:
        """`networks` and `attaching` outlive the agent. `on_session` gets the terms of each session
        and their changes, `on_barred` the reason when this node was removed from the swarm.
        """
        self.managers: tuple[Peer, ...] = identity.peers
        self.reason = "no manager has been reached yet"
        """Why there is no session; "" when there is one."""
        self._parts = parts
        self._identity = identity
        self._on_session = on_session
        self._on_barred = on_barred
        host = parts.host
        node = Node(id=identity.node, hostname=host.name, architecture=host.machine, os=host.os)
        self._networks = networks
        self._attaching = attaching
        self._executor = Executor(parts, node, networks, self._changed, self._stored)
        self._running: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        """Of the session."""
        self._session: Session | None = None
        self._described = NodeDescription()
        """As the session's manager knows this node."""
        self._begun = asyncio.Event()
        """Set while there is a session."""
        self._bye: Bye | None = None
        self._renewed = False
        """The session was ended for one with a new certificate."""
        self._heard = 0.0
        self._leaving = False
        self._unsaved: dict[str, None] = {}
        self._unsent: dict[str, None] = {}
        self._dirty = asyncio.Event()
        self._urgent = asyncio.Event()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """By task: those that wait until its status is stored."""
        self._order = 0
        """Position in the order of managers."""
        self._at_own = False
        """The own manager is tried, or has the session."""
        self._own_failed = 0.0
        """Since when the own manager has begun no session; 0: it has, or was not tried."""
        self._accepted = asyncio.Event()
        """Set when the session's terms are accepted: tasks of an earlier cluster are not taken."""

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on with the tasks on disk, and look for a manager. Raises ServerError when records
        cannot be read.
        """
        self._networks.open(self._identity.node, self._identity.data_path)
        self._attaching.open(self._executor.task_of)
        self._executor.open()
        self._running = spawn(self._run(), "swarm: the agent")
        self._reporting = spawn(self._report(), "swarm: reports of tasks")

    async def close(self) -> None:
        """The daemon ends, or another agent takes over. Tasks run on."""
        for each in (self._running, self._reporting):
            if each is not None:
                await cancelled(each)
        self._running = self._reporting = None
        self._attaching.lost()
        await self._executor.close()
        await self._networks.close()
        with contextlib.suppress(ServerError):
            await self._executor.save(self._unsaved)

    async def leave(self, *, tell: bool = True) -> None:
        """End and remove all tasks and their records, and tell a manager that this node leaves,
        unless there is none to tell.
        """
        self._leaving = True
        if self._running is None:
            self.start()
        await self._executor.end()
        await self._attaching.clear()
        if tell:
            try:
                async with asyncio.timeout(LEAVE_LIMIT):
                    await self._begun.wait()
                    assert self._connection is not None
                    await self._connection.ask(LeaveSwarm())
            except (TimeoutError, ConnectionError, EngineError) as error:
                _log.warning("no manager was told that this node leaves: %s", words(error))
        await self.close()
        await self._networks.clear()

    def renewed(self) -> None:
        """The certificate's files were replaced: begin another session with it."""
        if self._connection is not None:
            self._renewed = True
            self._connection.writer.close()

    # --- sessions ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = Backoff(*BACKOFF, jitter=True)
        while True:
            began = time.monotonic()
            silent = normal = False
            try:
                await self._one_session()
                why = "the manager has ended the session" if self._bye is None else self._bye.reason
            except _Outdated as error:
                why, normal = error.message, True
            except Forbidden as error:  # a node that was removed while it was away
                why = error.message
                self._on_barred(why)
            except (EngineError, OSError, TimeoutError, EOFError) as error:
                silent = isinstance(error, Silent)
                why = words(error)
            except Exception:
                _log.exception("the session with a manager has failed")
                why = BUG
            had = self._begun.is_set()
            if self._at_own:
                self._own_failed = 0.0 if had else self._own_failed or began
            self._begun.clear()
            self._connection = self._session = None
            self._attaching.lost()
            self._no_more_waiting()
            self.reason = "" if normal else why
            if self._bye is not None and self._bye.barred:
                self._on_barred(self._bye.reason)
            if had:
                level = logging.INFO if normal else logging.WARNING
                _log.log(level, "the session with a manager has ended: %s", why)
                self._order = self._order + 1 if silent or self._bye is not None else 0
                if time.monotonic() - began > BACKOFF[1]:
                    backoff.reset()
            else:
                _log.info("no session with a manager: %s", why)
                self._order += 1
            await asyncio.sleep(backoff.failed())

    async def _one_session(self) -> None:
        self._bye = None
        self._renewed = False
        self._accepted = asyncio.Event()
        connection = await self._dial()
        async with client.opened(connection):
            self._described = await self._description()
            facts = await self._network_facts()
            self._unsent.clear()  # all of them go with this message
            limit = OWN_HELLO_LIMIT if self._at_own else HELLO_LIMIT
            session = await connection.ask(self._hello(facts), timeout=limit)
            if not isinstance(session, Session):
                raise ServerError(f"the manager has answered with {type(session).__name__}")
            if session.epoch < self._identity.epoch:
                raise ServerError(
                    f"this manager belongs to an earlier cluster (epoch {session.epoch}, "
                    f"this node has seen {self._identity.epoch})"
                )
            self._connection = connection
            self._terms(session)
            self._heard = time.monotonic()
            connection.on_beat = self._beaten
            self.reason = ""
            self._accepted.set()
            self._begun.set()
            self._attaching.begin(connection, session.attachments_lost)
            self._dirty.set()
            _log.info("session with the manager %s", connection.peer or "of this node")
            await self._beat(connection)

    async def _dial(self) -> Connection:
        identity = self._identity
        own = identity.role == "manager"
        others = [peer for peer in order_of_managers(identity.node, self.managers) if peer.node != identity.node]
        failing = self._own_failed and time.monotonic() - self._own_failed > OWN_LIMIT
        self._at_own = own and not (failing and others and self._order % 2)
        if self._at_own:
            try:
                return await client.dial_own(identity.socket.parent, self._serve)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise ServerError("the manager of this node does not serve yet") from error
        if not others:
            raise ServerError("no manager of the swarm is known")
        peer = others[(self._order // 2 if own else self._order) % len(others)]
        directory = identity.directory
        try:
            roots = (directory / ROOTS).read_text()
            tls = client.context(roots, directory / CERTIFICATE, directory / KEY)
        except (OSError, ssl.SSLError) as error:
            raise ServerError(f"the node's certificate cannot be read: {words(error)}") from error
        try:
            return await client.dial(peer.address, tls, self._serve)
        except (OSError, TimeoutError, ValueError) as error:
            raise ServerError(f"{peer.address}: {words(error)}") from error

    def _hello(self, facts: Facts) -> Hello:
        identity = self._identity
        return Hello(
            description=self._described,
            advertise=identity.advertise,
            epoch=identity.epoch,
            statuses=self._executor.statuses(),
            manager_address=identity.manager_address,
            data_address=identity.data_path,
            features=facts.features,
            subnets=facts.subnets,
            attachments=self._attaching.in_use(),
        )

    async def _description(self) -> NodeDescription:
        parts = self._parts
        drivers = await parts.volumes.known_drivers()
        return description(parts.host, parts.counts(), drivers, parts.config.generic_resources)

    async def _network_facts(self) -> Facts:
        networks = self._parts.networks
        try:
            return Facts(await networks.overlays.features(), await networks.local_subnets())
        except (EngineError, OSError) as error:
            _log.warning("what this host's networks can do is not known: %s", words(error))
            return Facts()

    def _terms(self, session: Session) -> None:
        self._session = session
        self._networks.port = session.data_path_port
        if session.managers:
            self.managers = session.managers
        if session.epoch > self._identity.epoch:
            self._identity = msgspec.structs.replace(self._identity, epoch=session.epoch)
        self._on_session(session)

    def _beaten(self) -> None:
        self._heard = time.monotonic()

    async def _beat(self, connection: Connection) -> None:
        """Beat until the session ends, also because this node is not as it was described."""
        described = time.monotonic()
        while not connection.closed.is_set() and self._bye is None:
            assert self._session is not None
            period = max(0.05, self._session.period)
            connection.write(Beat())
            await either(connection.closed, period)
            if time.monotonic() - self._heard > SILENCE * period:
                raise Silent(f"the manager was silent for {time.monotonic() - self._heard:.1f} s")
            if time.monotonic() - described > DESCRIPTION_TIME:
                described = time.monotonic()
                if await self._description() != self._described:
                    raise _Outdated("the description of this node has changed")
        if self._renewed:
            raise _Outdated("the certificate of this node was renewed")

    async def _serve(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Assignments):
            await self._accepted.wait()
            await self._assign(connection, message)
        elif isinstance(message, Views):
            await self._accepted.wait()
            await self._see(connection, message)
        elif isinstance(message, Session):
            await self._accepted.wait()
            self._terms(message)
        elif isinstance(message, Bye):
            self._bye = message
            connection.writer.close()
        elif isinstance(message, ReadLogs):
            await self._read_logs(connection, message)

    async def _assign(self, connection: Connection, message: Assignments) -> None:
        if self._leaving:
            return
        try:
            await self._executor.assign(message)
        except EngineError as error:
            _log.error("tasks of the manager cannot be taken: %s", error.message)
        except Exception:
            _log.exception("tasks of the manager cannot be taken")
        else:
            return
        connection.writer.close()  # the next session brings the whole set

    async def _see(self, connection: Connection, message: Views) -> None:
        if self._leaving:
            return
        try:
            await self._networks.update(message)
        except EngineError as error:
            _log.error("networks of the manager cannot be taken: %s", error.message)
        except Exception:
            _log.exception("networks of the manager cannot be taken")
        else:
            return
        connection.writer.close()  # the next session brings them whole

    # --- reports ----------------------------------------------------------------------------------

    def _changed(self, task: str, urgent: bool) -> None:
        self._unsaved[task] = None
        self._unsent[task] = None
        self._dirty.set()
        if urgent:
            self._urgent.set()

    async def _stored(self, task: str) -> None:
        """Wait until a manager has stored the task's last status; without a session not at all."""
        if self._begun.is_set() and task in self._unsent:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(task, []).append(waiting)
            await waiting

    def _no_more_waiting(self) -> None:
        while self._waiting:
            self._have_stored(next(iter(self._waiting)))

    def _have_stored(self, task: str) -> None:
        for waiting in self._waiting.pop(task, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def _report(self) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(URGENT_TIME)
            await either(self._urgent, BATCH_TIME)
            self._urgent.clear()
            self._dirty.clear()
            try:
                await self._save()
                await self._send()
            except (EngineError, ConnectionError, TimeoutError) as error:
                _log.warning("the states of tasks cannot be reported: %s", words(error))
            except Exception:
                _log.exception("the states of tasks cannot be reported")
            else:
                continue
            await asyncio.sleep(SAVE_PAUSE)
            self._dirty.set()

    async def _save(self) -> None:
        unsaved, self._unsaved = self._unsaved, {}
        try:
            await self._executor.save(unsaved)
        except BaseException:
            self._unsaved = unsaved | self._unsaved
            raise

    async def _send(self) -> None:
        """Without a session they wait: the next one begins with all of them."""
        while self._unsent and self._begun.is_set() and self._connection is not None and not self._leaving:
            chosen = list(self._unsent)[:BATCH]
            for task in chosen:
                del self._unsent[task]
            try:
                statuses = self._executor.statuses(chosen)
                if statuses:
                    await self._connection.ask(Statuses(of=statuses), timeout=REPORT_LIMIT)
                for task in chosen:
                    if task not in self._unsent:  # otherwise there is a later one
                        self._have_stored(task)
            except BaseException:
                self._unsent = dict.fromkeys(chosen) | self._unsent
                raise

    # --- logs -------------------------------------------------------------------------------------

    async def _read_logs(self, connection: Connection, message: ReadLogs) -> None:
        found = [(task, self._executor.container_of(task)) for task in message.tasks]

        async def answer(lines: msgspec.Struct) -> None:
            await connection.stream(msgspec.structs.replace(lines, seq=message.seq))

        await logs.send(found, message.query, answer)
        await connection.send(Ended(seq=message.seq))


__all__ = ["Agent"]
