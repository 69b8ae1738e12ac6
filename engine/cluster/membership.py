"""The membership of this node: init, join, leave, promotion, demotion, a forced new cluster.

Each phase of `phases.py` has one step here. A step ends with the verb that leads to the next phase;
the phase is written before the step begins, so each step can be repeated after a crash of the
daemon, of the manager's process, or of both at once.

Not here: the session and tasks (`agent.py`), files (`state.py`), certificates
(`credentials.py`), the manager's process (`process.py`).

Owns:    the phase; the agent, the manager's process and the task that carries out the steps.
Locks:   `_lock`: one verb of a client at a time. A join waits for its outcome without it, so that a
         leave can end it.
Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from engine.cluster import addresses, credentials, process, requests
from engine.cluster.announcements import announce
from engine.cluster.certificates import Certificate
from engine.cluster.client import PORT, joined, split
from engine.cluster.phases import (
    LOCAL_STATES,
    NO_DATA,
    NOT_A_MANAGER,
    WORKER_IS_NOT_A_MANAGER,
    Phase,
    Verb,
    following,
)
from engine.cluster.state import Directory, Identity, State, new_id
from engine.errors import (
    BUG,
    EngineError,
    Forbidden,
    InvalidParameter,
    NoSwarm,
    ServerError,
    WrongState,
    words,
)
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Begin, Change, Done, Joined, LogLine, Peer, Renewed, Session
from engine.system.reconcile import Backoff, either
from engine.system.tasks import shield, spawn
from engine.system.threads import cancelled, uninterrupted, whole

if TYPE_CHECKING:
    from engine.cluster.parts import Parts
    from engine.wire.swarm import InitRequest, JoinRequest

JOIN_LIMIT = 20.0
"""Seconds that the client of a join waits."""
CLEANING = 5.0
"""Seconds that the client of a refused join waits until nothing of it is left."""
REGISTER_LIMIT = 5.0
"""Seconds that an init waits for the agent's session, which it does without if need be."""
START_WAIT = 5.0
"""Seconds that a request waits for a manager's process that is just being started again."""
LEAVE_LIMIT = 10.0
"""Seconds that a leave waits for a manager's process which has to be started for it."""
INFO_WAIT = 5.0
"""Seconds after the daemon's start in which /info waits for a manager that is just being started:
it would show a node that manages nothing otherwise.
"""
UNREACHABLE_TRIES = 3
"""Tries to join before the request fails because no manager answers."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between repetitions of a step's request, doubled by each."""
LONGEST_SLEEP = 60.0
"""Seconds between looks at the wall clock, because a suspended host stops timers."""
RENEWAL = (0.5, 0.8)
"""The part of a certificate's life in which it is renewed, at a random moment."""

_log = logging.getLogger(__name__)


class AgentOfNode(Protocol):
    """What membership uses of `agent.Agent`."""

    managers: tuple[Peer, ...]
    reason: str

    def start(self) -> None: ...
    async def close(self) -> None: ...
    async def leave(self, *, tell: bool) -> None: ...
    def renewed(self) -> None: ...


class MakeAgent(Protocol):
    def __call__(
        self,
        parts: Parts,
        identity: Identity,
        *,
        on_session: Callable[[Session], None],
        on_barred: Callable[[str], None],
    ) -> AgentOfNode: ...


class Membership:
    """This node's part in a swarm. Made when there is one, or one begins."""

    def __init__(self, parts: Parts, make_agent: MakeAgent) -> None:
        self._parts = parts
        self._make_agent = make_agent
        self._directory = Directory(parts.config.root / "swarm")
        self._run = parts.config.run / "swarm"
        self._process = process.Process(
            self._directory.path,
            self._run,
            log_level=parts.config.log_level,
            on_removed=self._was_removed,
        )
        self._state = State()
        self._kept = State()
        """What the disk has of `_state`."""
        self._saving = asyncio.Lock()
        self._trusting: asyncio.Task[None] | None = None
        """The write of new roots."""
        self._agent: AgentOfNode | None = None
        self._identity: Identity | None = None
        self._lock = asyncio.Lock()
        self._driving: asyncio.Task[None] | None = None
        self._outcome: asyncio.Future[None] | None = None
        """Of a join whose client waits."""
        self._failure: EngineError | None = None
        """Of that join: the client is answered when everything is undone."""
        self._wake = asyncio.Event()
        self._registered = asyncio.Event()
        self._session: Session | None = None
        self._removed = False
        """The manager's process has ended because its member was removed."""
        self._barred = ""
        self._renew_now = False
        self._renewal: tuple[Certificate | None, float] = None, 0.0
        """The certificate, and the time at which it is renewed, in seconds since the epoch."""
        self._renewal_backoff = _backoff()
        self._patient_until = 0.0
        self._trouble = ""
        """Why the present step does not get on; "" when it does."""
        self._steps: dict[Phase, Callable[[], Awaitable[Verb]]] = {
            Phase.FORCING: self._force,
            Phase.JOINING: self._join,
            Phase.WORKER: self._work,
            Phase.MANAGER: self._manage,
            Phase.PROMOTING: self._promote,
            Phase.DEMOTING: self._demote,
            Phase.LEAVING: self._leave,
        }

    # --- what others see --------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def node(self) -> str:
        """Its id; "" while it has none."""
        return self._state.node

    @property
    def state(self) -> str:
        """LocalNodeState of /info."""
        return LOCAL_STATES[self.phase]

    @property
    def is_manager(self) -> bool:
        return self.phase in (Phase.MANAGER, Phase.FORCING)

    async def call(self, verb: str, name: str = "", query: dict[str, Any] | None = None, body: bytes = b"") -> Done:
        """The answer of the own manager to a verb of the API.

        Raises NoSwarm when this node is no manager, or when its process is still starting; the
        manager's kinds; ServerError when it has ended meanwhile.
        """
        return await requests.call(await self._connection(), verb, name, query or {}, body)

    async def follow(self, of: str, name: str, query: dict[str, Any]) -> AsyncGenerator[tuple[LogLine, ...], None]:
        """Logs of a service or task, until they end or the manager does."""
        async with contextlib.aclosing(requests.follow(await self._connection(), of, name, query)) as lines:
            async for each in lines:
                yield each

    async def watch(self) -> AsyncGenerator[Change, None]:
        """Changes of the swarm's objects, until the manager ends."""
        async with contextlib.aclosing(requests.watch(await self._connection())) as changes:
            async for change in changes:
                yield change

    async def _connection(self) -> Connection:
        if not self.is_manager:
            raise NoSwarm(NOT_A_MANAGER if self.phase in (Phase.NONE, Phase.JOINING) else WORKER_IS_NOT_A_MANAGER)
        try:
            return await self._process.connection(START_WAIT)
        except EngineError as error:
            raise NoSwarm(
                f"This node is not a swarm manager at the moment: {error.message}. Try again later."
            ) from error

    async def info(self) -> dict[str, Any]:
        """The fields of Swarm in /info."""
        if self.is_manager:
            await self._settled()
        state = self._state
        shown: dict[str, Any] = {
            "NodeID": state.node,
            "NodeAddr": split(state.address)[0] if state.address else "",
            "LocalNodeState": self.state,
            "ControlAvailable": self.is_manager and self._process.serves,
            "Error": state.error or self._trouble or (self._agent.reason if self._agent is not None else ""),
            "RemoteManagers": [{"NodeID": peer.node, "Addr": peer.address} for peer in state.managers] or None,
        }
        if not self.is_manager:
            return shown
        if not self._process.serves:
            why = state.error or self._process.trouble or self._trouble or "the manager of this node is still starting"
            return shown | {"Error": why}
        return shown | await requests.info(await self._process.connection(0), shown["Error"])

    async def _settled(self) -> None:
        """Just after the daemon's start, wait until the manager serves, and this node's agent has a
        session.
        """
        patience = self._patient_until - time.monotonic()
        if patience > 0 and not self._process.trouble:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(patience):
                    await self._process.connection(patience)
                    await self._registered.wait()

    # --- the daemon's life ------------------------------------------------------------------------

    def load(self) -> None:
        """Read the phase. Raises nothing: a file that cannot be read is the phase `error`."""
        try:
            self._directory.settle()
            self._state = self._directory.load()
        except ServerError as error:
            _log.error("swarm: %s", error.message)
            self._state = State(phase=Phase.ERROR, error=error.message)
        self._kept = self._state

    def start(self) -> None:
        """Take up what the daemon before has left."""
        self._patient_until = time.monotonic() + INFO_WAIT
        # In memory: the step itself is what is carried out again after a crash.
        self._state = msgspec.structs.replace(self._state, phase=following(self.phase, Verb.BOOT))
        self._drive()

    async def close(self, *, stop: bool) -> None:
        """End the daemon's part; tasks and the manager's process run on. With `stop` the process is
        ended too, and leaves nothing in RUN; its data stays.
        """
        async with self._lock:
            await self._halt()
            await self._close_agent()
            if stop:
                try:
                    await self._process.stop()
                except EngineError as error:
                    _log.error("swarm: %s", error.message)
                self._process.clear()
            else:
                await self._process.detach()

    # --- verbs of clients -------------------------------------------------------------------------

    @whole
    async def init(self, request: InitRequest) -> str:
        """Make a swarm, or by force a new one out of this manager's data. Returns the node's id."""
        verb = Verb.FORCE if request.force_new_cluster else Verb.INIT
        following(self.phase, verb)
        async with self._lock:
            phase = following(self.phase, verb)
            if self.phase is Phase.ERROR and not (self._state.node and self._directory.has_member()):
                raise NoSwarm(NO_DATA)
            process.check_programs()
            chosen = await self._addresses(request, must_advertise=True)
            body = msgspec.json.encode(request).decode()
            if phase is Phase.FORCING:
                await self._make_new(chosen, body)
            else:
                await self._found(chosen, body)
            await either(self._registered, REGISTER_LIMIT)
            return self._state.node

    async def _found(self, chosen: addresses.Chosen, body: str) -> None:
        await asyncio.to_thread(self._directory.make)
        await self._save(
            phase=Phase.FOUNDING,
            node=new_id(),
            listen=chosen.listen,
            advertise=chosen.advertise,
            data_path=chosen.data_path,
            request=body,
        )
        try:
            subnets: tuple[str, ...] = ()
            # then the ingress network takes its usual one
            with contextlib.suppress(EngineError, OSError):
                subnets = await self._parts.networks.local_subnets()
            await self._process.begin(msgspec.structs.replace(self._begin("init"), subnets=subnets))
            certificate = self._directory.certificate()
            if certificate is None:
                raise ServerError("the manager's process has written no certificate")
        except BaseException:
            await self._advance(Verb.FAIL)
            try:
                await self._advance(await self._leave())
            except EngineError as error:
                _log.error("swarm: a failed init is not undone yet: %s", error.message)
                self._drive()  # it is undone in the background
            raise
        await self._advance(Verb.SUCCEED, node=certificate.node, swarm=certificate.swarm, request="")
        self._drive()

    async def _make_new(self, chosen: addresses.Chosen, body: str) -> None:
        await self._halt()
        await self._close_agent()
        before = self._state
        try:
            await self._save(
                phase=following(self.phase, Verb.FORCE),
                listen=chosen.listen,
                advertise=chosen.advertise,
                data_path=chosen.data_path,
                request=body,
                error="",
            )
        except ServerError:
            self._drive()  # nothing has changed
            raise
        self._reset()  # what the swarm before has refused
        try:
            await self._make_by_force()
        except EngineError:
            # Its own addresses served before; what etcd has made of its data already stays.
            await self._advance(
                Verb.STRAND if before.phase is Phase.ERROR else Verb.FAIL,
                listen=before.listen,
                advertise=before.advertise,
                data_path=before.data_path,
                request="",
                error=before.error,
            )
            raise
        else:
            await self._advance(Verb.SUCCEED, request="")
        finally:
            self._drive()

    @whole
    async def join(self, request: JoinRequest) -> None:
        """Become a node of a swarm, in the role that the token gives."""
        following(self.phase, Verb.JOIN)
        async with self._lock:
            phase = following(self.phase, Verb.JOIN)
            credentials.check_token(request.join_token)
            remotes = _remotes(request.remote_addrs)
            if request.availability not in ("", "active", "pause", "drain"):
                raise InvalidParameter(f"Availability {request.availability!r}: must be active, pause or drain")
            chosen = await self._addresses(request, must_advertise=False)
            await asyncio.to_thread(self._directory.make)
            await self._save(
                phase=phase,
                listen=chosen.listen,
                advertise=chosen.advertise,
                data_path=chosen.data_path,
                remotes=remotes,
                token=request.join_token,
                availability=request.availability,
            )
            outcome = self._outcome = asyncio.get_running_loop().create_future()
            self._drive()
        try:
            async with asyncio.timeout(JOIN_LIMIT):
                await shield(outcome)
        except EngineError:
            if self._driving is not None:  # the client may ask at once what this node is
                await asyncio.wait([self._driving], timeout=CLEANING)
            raise
        except TimeoutError:
            if self._outcome is outcome:
                self._outcome = None
                await self._save(detached=True)
            raise ServerError(
                "Timeout was reached before node was joined. The attempt to join the swarm will continue in the "
                'background. Use the "docker info" command to see the current swarm status of your node.'
                + (f" So far: {self._trouble}" if self._trouble else "")
            ) from None

    @whole
    async def leave(self, force: bool) -> None:
        """Leave the swarm: tasks end, and nothing of it stays on this node."""
        following(self.phase, Verb.LEAVE)
        async with self._lock:
            phase = following(self.phase, Verb.LEAVE)
            if self.phase is Phase.MANAGER and not force:
                serving = await self._process.connection(0) if self._process.serves else None
                raise WrongState(await requests.warning(serving))
            await self._halt()
            try:
                await self._save(phase=phase, force=force)
                await self._advance(await self._leave())
            except BaseException:
                self._drive()  # the leave, or the step before it, goes on in the background
                raise

    async def _addresses(self, request: InitRequest | JoinRequest, *, must_advertise: bool) -> addresses.Chosen:
        host = await asyncio.to_thread(addresses.of_host)
        outgoing = await asyncio.to_thread(addresses.outgoing)
        default = "" if request.advertise_addr else self._parts.config.swarm_advertise
        try:
            return addresses.choose(
                request.listen_addr or ("" if must_advertise else f"0.0.0.0:{PORT}"),
                request.advertise_addr or default,
                request.data_path_addr,
                host,
                self._own_links(),
                must_advertise=must_advertise,
                outgoing=outgoing,
            )
        except InvalidParameter as error:
            if default and default in error.message:
                raise InvalidParameter(f"swarm-default-advertise-addr: {error.message}") from error
            raise

    def _own_links(self) -> set[str]:
        """Interfaces of the engine's own networks."""
        return {found.bridge for found in self._parts.networks.by_id.values() if found.bridge}

    # --- phases -----------------------------------------------------------------------------------

    def _drive(self) -> None:
        """Carry out the step of the phase, and those that follow."""
        if self._steps.get(self.phase) is not None:
            self._driving = spawn(self._carry_on(), "swarm: membership")

    async def _carry_on(self) -> None:
        """Carry out steps until a phase without one. A step that fails is repeated."""
        backoff = _backoff()
        self._trouble = ""
        while (step := self._steps.get(self.phase)) is not None:
            phase = self.phase
            try:
                await self._advance(await step())
            except EngineError as error:
                self._trouble = error.message
                _log.error("swarm: %s: %s", phase, error.message)
                await asyncio.sleep(backoff.failed())
            except Exception:
                self._trouble = BUG
                _log.exception("swarm: %s", phase)
                await asyncio.sleep(backoff.failed())
            else:
                _log.info("swarm: this node was %s and is %s", phase, self.phase)
                backoff.reset()
                self._trouble = ""

    async def _halt(self) -> None:
        """End the present step. It can be taken up again."""
        driving, self._driving = self._driving, None
        if driving is not None and driving is not asyncio.current_task():
            await cancelled(driving)

    async def _advance(self, verb: Verb, **changes: Any) -> None:
        phase = following(self.phase, verb)
        if phase is Phase.NONE:
            self._forget()
        else:
            await self._save(phase=phase, **changes)

    @whole
    async def _save(self, **changes: Any) -> None:
        """Change the state, first on disk. Raises ServerError; nothing has changed then."""
        async with self._saving:
            if self.phase is Phase.NONE and "phase" not in changes:
                return  # the swarm was left
            state = msgspec.structs.replace(self._state, **changes)
            if state != self._kept:
                await asyncio.to_thread(self._directory.save, state)
                self._kept = state
            # a session may have changed other fields meanwhile
            self._state = msgspec.structs.replace(self._state, **changes)

    def _forget(self) -> None:
        """It was left: nothing is on disk any more."""
        self._state = self._kept = State()
        self._reset()
        failure, self._failure = self._failure, None
        self._end_outcome(failure or NoSwarm("This node has left the swarm that it was joining"))

    def _reset(self) -> None:
        self._registered.clear()
        self._session = None
        self._removed = self._renew_now = False
        self._barred = self._trouble = ""

    def _end_outcome(self, error: EngineError | None = None) -> None:
        """Answer the client of a join, if one waits."""
        outcome, self._outcome = self._outcome, None
        if outcome is None or outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)

    # --- steps ------------------------------------------------------------------------------------

    async def _join(self) -> Verb:
        """JOINING: until a certificate is here."""
        certificate = self._directory.certificate()
        asked = self._outcome is not None or self._state.detached or self._directory.kept_request() is not None
        if certificate is None and not asked:
            return Verb.FAIL  # its client has seen the daemon end before any manager was asked
        backoff = _backoff()
        while certificate is None:
            try:
                answer, key, address = await credentials.join(
                    self._directory,
                    self._state.remotes,
                    self._state.token,
                    advertise=self._state.advertise,
                    availability=self._state.availability,
                )
            except credentials.Unreachable as error:
                self._trouble = error.message
                if backoff.failures >= UNREACHABLE_TRIES and not self._state.detached:
                    self._failure = error
                    return Verb.FAIL
            except EngineError as error:
                self._trouble = error.message
                if not self._state.detached:
                    self._failure = error
                    return Verb.FAIL
                if isinstance(error, InvalidParameter):
                    await self._save(error=error.message)
                    return Verb.STRAND
            else:
                certificate = await self._install(answer, key)
                managers = answer.managers or (Peer(node="", address=address),)
                await self._save(managers=managers, epoch=answer.epoch, seen=self._seen(answer.seen))
                break
            await asyncio.sleep(backoff.failed())
        await self._save(
            node=certificate.node,
            swarm=certificate.swarm,
            token="",
            managers=self._state.managers or tuple(Peer(node="", address=address) for address in self._state.remotes),
        )
        return Verb.PROMOTE if certificate.role == "manager" else Verb.SUCCEED

    def _seen(self, seen: str) -> str:
        """The address that the manager saw, with the port that a manager here listens on."""
        return joined(seen, split(self._state.listen)[1]) if seen else ""

    async def _work(self) -> Verb:
        """WORKER: until it is to be a manager, or was removed."""
        await self._process.stop()
        self._process.clear()
        await uninterrupted(asyncio.to_thread(self._directory.remove_member))
        await self._run_agent("worker")
        while True:
            self._wake.clear()
            if self._barred:
                return await self._strand()
            if self._session is not None and self._session.role == "manager":
                return Verb.PROMOTE
            if await self._keep_certificate() == "manager":
                return Verb.PROMOTE

    async def _manage(self) -> Verb:
        """MANAGER: until its member was removed."""
        events = spawn(announce(self.watch, self._parts.events), "swarm: events")
        try:
            return await self._keep_managing()
        finally:
            await cancelled(events)

    async def _keep_managing(self) -> Verb:
        self._removed = False
        await self._run_agent("manager")
        backoff = _backoff()
        while not self._process.watched:
            try:
                await self._process.begin(self._begin("restore"))
                self._trouble = ""
            except process.Removed:
                return Verb.DEMOTE
            except EngineError as error:
                self._trouble = error.message
                _log.error("swarm: the manager does not serve yet: %s", error.message)
                await asyncio.sleep(backoff.failed())
        while True:
            self._wake.clear()
            if self._removed:
                return Verb.DEMOTE
            if self._barred:
                return await self._strand()
            if await self._keep_certificate() == "worker":
                return Verb.DEMOTE

    async def _promote(self) -> Verb:
        """PROMOTING: a manager's certificate, then a voting member."""
        if self._outcome is None:
            await self._run_agent("worker")
        backoff = _backoff()
        while (certificate := self._directory.certificate()) is None or certificate.role != "manager":
            if self._barred:
                return await self._strand()
            if await self._renew() == "worker":
                return Verb.DEMOTE
            if self._trouble:
                await asyncio.sleep(backoff.failed())
        backoff = _backoff()
        while True:
            if self._barred:
                return await self._strand()
            if self._wishes("worker"):
                return Verb.DEMOTE
            try:
                await self._process.begin(self._begin("join"))
                self._trouble = ""
                return Verb.SUCCEED
            except process.Removed:
                await uninterrupted(asyncio.to_thread(self._directory.remove_member))
                self._trouble = "its etcd member was removed before it had a vote"
            except Forbidden as error:  # the wish was withdrawn meanwhile
                if await self._renew() == "worker":
                    return Verb.DEMOTE
                self._trouble = error.message
            except EngineError as error:
                self._trouble = error.message
            _log.warning("swarm: this node is not a manager yet: %s", self._trouble)
            await asyncio.sleep(backoff.failed())

    async def _demote(self) -> Verb:
        """DEMOTING: the member is gone; a worker's certificate."""
        await self._process.stop()
        self._process.clear()
        await uninterrupted(asyncio.to_thread(self._directory.remove_member))
        self._removed = False
        if self._wishes("manager"):
            self._session = None  # told before the demotion
        await self._close_agent()  # that of the manager, which asks its own process first
        backoff = _backoff()
        while not (role := await self._renew()):
            if self._barred:
                return await self._strand()
            # not before: each certificate needs a session of its own
            await self._run_agent("worker")
            await asyncio.sleep(backoff.failed())
        return Verb.SUCCEED if role == "worker" else Verb.PROMOTE

    async def _force(self) -> Verb:
        """FORCING, taken up by the next daemon: its client has not been answered."""
        backoff = _backoff()
        while True:
            try:
                await self._make_by_force()
            except process.Removed:
                return Verb.DEMOTE
            except EngineError as error:
                self._trouble = error.message
                _log.error("swarm: the new cluster is not made yet: %s", error.message)
                await asyncio.sleep(backoff.failed())
            else:
                await self._save(request="")
                return Verb.SUCCEED

    async def _make_by_force(self) -> None:
        await self._process.stop()
        await self._process.begin(self._begin("force"))

    async def _leave(self) -> Verb:
        """LEAVING: tasks end, the swarm forgets this node, and its files are removed."""
        if self._state.swarm:
            others = any(peer.node != self._state.node for peer in self._state.managers)
            member = self._directory.has_member() and others
            if member:
                await self._serve_to_leave()
            if self._agent is None:
                self._agent = self._new_agent()
            # a removed node has no swarm to tell
            await self._agent.leave(tell=others and not self._state.error)
            await self._close_agent()
            if member:
                await self._remove_own_member()
        else:
            await self._close_agent()
        await self._process.stop()
        self._process.clear()
        async with self._saving:  # what is to be saved meanwhile is dropped
            await uninterrupted(asyncio.to_thread(self._directory.erase))
        return Verb.SUCCEED

    async def _serve_to_leave(self) -> bool:
        """Have the manager's process serve, so that it can have its member removed by the others.

        Returns False when it does not, or has no member any more.
        """
        if self._process.serves:
            return True
        try:
            async with asyncio.timeout(LEAVE_LIMIT):
                await self._process.begin(self._begin("restore"))
        except process.Removed:
            return False
        except (EngineError, TimeoutError) as error:
            _log.warning("swarm: the manager does not serve to leave: %s", words(error))
            return False
        return True

    async def _remove_own_member(self) -> None:
        """A process that is killed meanwhile is started once more."""
        for _ in range(2):
            if not await self._serve_to_leave():
                return
            try:
                await self._process.stop(leave=True, force=True)
            except EngineError as error:
                _log.warning("swarm: the other managers may keep this node's member: %s", error.message)
            else:
                return

    async def _strand(self) -> Verb:
        """End the tasks of a node that the swarm has removed, and say why it is none any more."""
        await self._save(error=self._barred)
        if self._agent is not None:
            with contextlib.suppress(EngineError, OSError, TimeoutError):
                await self._agent.leave(tell=False)
        await self._close_agent()
        await self._process.stop()
        return Verb.STRAND

    # --- the agent --------------------------------------------------------------------------------

    async def _run_agent(self, role: str) -> None:
        """Keep an agent running that connects as this role does. Tasks are not touched."""
        identity = self._identity_as(role)
        if self._agent is not None and self._identity is not None:
            same = msgspec.structs.replace(identity, peers=self._identity.peers, epoch=self._identity.epoch)
            if same == self._identity:
                return
        await self._close_agent()
        self._registered.clear()
        agent = self._new_agent(identity)
        agent.start()
        self._agent = agent

    def _new_agent(self, identity: Identity | None = None) -> AgentOfNode:
        self._identity = identity or self._identity_as("manager" if self._directory.has_member() else "worker")
        return self._make_agent(self._parts, self._identity, on_session=self._has_session, on_barred=self._is_barred)

    async def _close_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            await agent.close()
        if self._trusting is not None:
            await uninterrupted(asyncio.wait([self._trusting]))

    def _identity_as(self, role: str) -> Identity:
        state = self._state
        return Identity(
            node=state.node,
            swarm=state.swarm,
            role=role,
            directory=self._directory.path,
            socket=self._run / "manager.sock",
            advertise=split(state.advertise)[0] if state.advertise else "",
            data_path=state.data_path,
            manager_address=state.address,
            peers=state.managers,
            epoch=state.epoch,
        )

    def _has_session(self, session: Session) -> None:
        """The agent has a session, or its terms have changed."""
        self._session = session
        if session.root and session.root != self._directory.roots() and self.phase is not Phase.LEAVING:
            self._trusting = spawn(self._trust(session.root, self._trusting), "swarm: trusted roots")
        # on disk with the next change of the phase, or by `_keep_session`
        self._state = msgspec.structs.replace(
            self._state,
            managers=session.managers or self._state.managers,
            epoch=max(session.epoch, self._state.epoch),
        )
        self._renew_now = session.renew
        self._registered.set()
        if self.phase in (Phase.WORKER, Phase.MANAGER):
            self._end_outcome()
        self._wake.set()

    async def _keep_session(self) -> None:
        """Write what a session has changed. Without it the next session brings it again."""
        if self._state != self._kept:
            try:
                await self._save()
            except ServerError as error:
                _log.error("swarm: %s", error.message)

    async def _trust(self, roots: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            await asyncio.to_thread(self._directory.trust, roots)
        except ServerError as error:
            _log.error("swarm: %s", error.message)
        else:
            if self._agent is not None:
                self._agent.renewed()

    def _is_barred(self, reason: str) -> None:
        self._barred = reason or "this node was removed from the swarm"
        self._wake.set()

    def _was_removed(self) -> None:
        self._removed = True
        self._wake.set()

    def _wishes(self, role: str) -> bool:
        return self._session is not None and self._session.role == role

    # --- certificates -----------------------------------------------------------------------------

    async def _keep_certificate(self) -> str:
        """Wait until something has woken this step; renew the certificate when its time has come.

        Returns the role of the certificate.
        """
        await self._keep_session()
        certificate = self._directory.certificate()
        if certificate is None or certificate != self._renewal[0]:
            begins, ends = (certificate.begins, certificate.ends) if certificate is not None else (0, 0)
            self._renewal = certificate, begins + (ends - begins) * random.uniform(*RENEWAL)
            self._renewal_backoff = _backoff()
        if self._renew_now or time.time() >= self._renewal[1]:
            role = await self._renew()
            if role:
                self._renew_now = False
            else:
                await either(self._wake, self._renewal_backoff.failed())
            return role
        await either(self._wake, min(self._renewal[1] - time.time(), LONGEST_SLEEP))
        return "" if certificate is None else certificate.role

    async def _renew(self) -> str:
        """Ask for a certificate in the role that the swarm wishes. Returns the role of the new one,
        or "" when there is none yet; `_trouble` has the reason then.
        """
        own = self._state.address
        known = [peer.address for peer in self._state.managers if peer.address != own]
        random.shuffle(known)
        known += [address for address in self._state.remotes if address not in known and address != own]
        serving = self._process.serves
        try:
            connection = await self._process.connection(0) if serving else None
            answer, key = await credentials.renew(self._directory, connection, known, advertise=own)
            certificate = await self._install(answer, key)
        except EngineError as error:
            self._trouble = error.message
            _log.warning("swarm: the certificate is not renewed yet: %s", error.message)
            if isinstance(error, Forbidden):
                self._is_barred(error.message)
            return ""
        self._trouble = ""
        self._session = None  # it told the wish of before
        if self._agent is not None and self.phase in (Phase.WORKER, Phase.MANAGER):
            self._agent.renewed()  # otherwise another agent follows
        return certificate.role

    async def _install(self, answer: Joined | Renewed, key: str) -> Certificate:
        return await uninterrupted(asyncio.to_thread(self._directory.install, answer.certificate, key, answer.root))

    def _begin(self, how: str) -> Begin:
        state = self._state
        return Begin(
            how=how,
            node=state.node,
            listen=state.listen,
            advertise=state.address,
            peers=tuple(peer for peer in state.managers if peer.node != state.node),
            body=state.request.encode(),
            data_path=state.data_path,
        )


def _backoff() -> Backoff:
    """The pauses between the repetitions of a request."""
    return Backoff(SHORTEST_PAUSE, LONGEST_PAUSE, jitter=True)


def _remotes(given: list[str]) -> tuple[str, ...]:
    """The addresses of managers that a join asks, as host:port. Raises InvalidParameter."""
    found = []
    for text in given:
        try:
            found.append(joined(*split(text)))
        except ValueError:
            raise InvalidParameter(f"RemoteAddrs {text!r}: must be host or host:port") from None
    if not found:
        raise InvalidParameter("RemoteAddrs: at least 1 address of a manager is required to join")
    return tuple(found)
