"""A swarm in memory around one real membership: other managers, the manager's process, the agent.

Each effect of the membership on it is a point at which the daemon can be killed: before the effect,
or just after it, before the daemon knows. A killed daemon does nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from engine.cluster import addresses, credentials, membership, process
from engine.cluster.membership import Membership
from engine.cluster.phases import Phase
from engine.cluster.state import Directory, Identity
from engine.config import Config
from engine.errors import EngineError, InvalidParameter, ServerError, Unavailable
from engine.events import EventLog
from engine.manager import certificates
from engine.manager.keys import new_key, request
from engine.swarm_session.messages import Begin, Joined, Peer, Renewed, Session
from engine.swarm_session.states import Role

SWARM = "swarm0000000000000000000x"
ROOT, ROOT_KEY = certificates.new_root(1_700_000_000_000_000_000)
KEY = new_key()
CSR = request(KEY)
DIGEST = credentials.digest(ROOT)
SECRETS = {"worker": "w" * 25, "manager": "m" * 25}
OTHER = Peer(node="other", address="10.0.0.9:2377")


def token(role: str) -> str:
    return f"SWMTKN-1-{DIGEST}-{SECRETS[role]}"


def certificate(node: str, role: str) -> str:
    subject = certificates.Subject(node, Role[role.upper()], SWARM)
    key = certificates.request_key(CSR)
    root = certificates.Root(ROOT, ROOT_KEY)
    now = 1_700_000_000_000_000_000
    return root.issue(key, subject, address="10.0.0.1", now=now, lifetime=10**9 * 3600 * 24 * 3650)


class Killed(BaseException):
    """The daemon has received SIGKILL."""


async def local_subnets() -> tuple[str, ...]:
    """Of this host."""
    return ("192.168.1.0/24",)


class World:
    """All that a crash of the daemon does not end."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.wishes: dict[str, str] = {}
        """The role that the swarm wishes of a node."""
        self.down: set[str] = set()
        self.members: set[str] = set()
        self.process = False
        self.tasks = False
        self.reachable = True
        self.refusal: EngineError | None = None
        """Of every request to another manager."""
        self.trouble: EngineError | None = None
        """Of every `Begin`."""
        self.dead = False
        self.points = 0
        self.kill_at = 0
        self.effects: set[object] = set()
        """Those that threads of the daemon are carrying out."""
        self.agents: list[FakeAgent] = []
        self.daemon: Membership | None = None
        monkeypatch.setattr(process, "Process", lambda *_, **given: FakeProcess(self, **given))
        monkeypatch.setattr(process, "check_programs", lambda: None)
        monkeypatch.setattr(credentials, "join", self._join)
        monkeypatch.setattr(credentials, "renew", self._renew)
        monkeypatch.setattr(credentials, "keys", self._keys)
        monkeypatch.setattr(membership, "SHORTEST_PAUSE", 0.001)
        monkeypatch.setattr(membership, "LONGEST_PAUSE", 0.01)
        monkeypatch.setattr(membership, "REGISTER_LIMIT", 0.05)
        monkeypatch.setattr(addresses, "of_host", self._host)
        for name in ("save", "keep_request", "trust", "_exchange", "remove_member", "erase"):
            self._mortal(monkeypatch, name)

    def _host(self) -> list[Any]:
        return [addresses.HostAddress("eth0", ipaddress.ip_address("10.0.0.1"))]

    def _mortal(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(Directory, name)

        def effect(*given: Any) -> Any:
            on_loop = threading.current_thread() is threading.main_thread()
            assert not on_loop or name == "_exchange", f"{name}: the event loop waits for the disk"
            this = object()
            self.effects.add(this)
            try:
                self.point()
                result = real(*given)
                self.point()
                return result
            finally:
                self.effects.discard(this)

        monkeypatch.setattr(Directory, name, effect)

    def point(self) -> None:
        self.points += 1
        if self.points == self.kill_at:
            self.dead = True
        if self.dead:
            raise Killed

    # --- the daemon -------------------------------------------------------------------------------

    def start(self) -> Membership:
        """A daemon that has just started."""
        config = Config(root=self.directory / "root", run=self.directory / "run")
        parts: Any = SimpleNamespace(
            config=config, networks=SimpleNamespace(by_id={}, local_subnets=local_subnets), events=EventLog()
        )
        self.daemon = Membership(parts, lambda *given, **named: FakeAgent(self, *given, **named))
        self.daemon.load()
        self.daemon.start()
        return self.daemon

    async def restart(self, *, manager_too: bool = False) -> Membership:
        """After a kill: the tasks of the dead daemon are gone, and a new one starts."""
        await self.bury()
        if manager_too:
            self.process = False
        return self.start()

    async def bury(self) -> None:
        self.dead = True
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await until(lambda: not self.effects)
        self.dead, self.kill_at = False, 0
        self.agents.clear()

    def agent(self) -> FakeAgent | None:
        running = [agent for agent in self.agents if agent.running]
        assert len(running) <= 1, "two agents"
        return running[0] if running else None

    async def wish(self, node: str, role: str) -> None:
        """The operator promotes or demotes this node."""
        self.wishes[node] = role
        if role == "worker" and node in self.members and self.process:
            self.members.discard(node)
            self.end_process()
        await self.tell()

    async def tell(self) -> None:
        agent = self.agent()
        if agent is not None:
            agent.tell()
        await asyncio.sleep(0)

    def end_process(self) -> None:
        self.process = False
        for found in list(FakeProcess.all):
            if found.world is self and found.watched:
                found.watched = found.serves = False
                found.on_removed()

    def node(self) -> str:
        (node,) = [*self.wishes]
        return node

    async def settled(self, phase: Phase) -> None:
        await until(lambda: self.rests(phase))

    def rests(self, phase: Phase) -> bool:
        """Returns True if this phase is reached, and has what belongs to it."""
        if self.daemon is None or self.daemon.phase is not phase:
            return False
        agent = self.agent()
        if phase is Phase.WORKER:
            return agent is not None and agent.identity.role == "worker"
        if phase is Phase.MANAGER:
            return agent is not None and agent.identity.role == "manager" and self.process
        return True

    def check(self) -> None:
        """What holds of a membership at rest."""
        assert self.daemon is not None
        root = self.directory / "root" / "swarm"
        match self.daemon.phase:
            case Phase.NONE:
                assert not root.exists() or not list(root.iterdir())
                assert not self.process and not self.tasks
                # a swarm of which nothing is left needs no member removed
                assert "other" not in self.members or self.members == {"other"}, self.members
                assert self.agent() is None
            case Phase.WORKER:
                assert not (root / "etcd").exists() and not self.process
                assert not self.members - {"other"}
                self._check_certificate("worker")
            case Phase.MANAGER:
                assert (root / "etcd").exists() and self.process
                assert self.node() in self.members
                self._check_certificate("manager")
            case phase:
                raise AssertionError(phase)

    def _check_certificate(self, role: str) -> None:
        directory = Directory(self.directory / "root" / "swarm")
        found = directory.certificate()
        assert found is not None and (found.role, found.node) == (role, self.node())
        assert directory.key() == KEY
        assert not list(directory.path.glob("node.crt.new"))

    # --- other managers ---------------------------------------------------------------------------

    def _check_reachable(self) -> None:
        if not self.reachable:
            raise credentials.Unreachable("10.0.0.9:2377: connection refused")
        if self.refusal is not None:
            raise self.refusal

    async def _keys(self, question: dict[str, str]) -> dict[str, str]:
        self.point()
        await asyncio.sleep(0)
        return {"key": KEY, "csr": CSR}

    async def _join(
        self, directory: Directory, remotes: Any, token: str, *, advertise: str, availability: str
    ) -> tuple[Joined, str, str]:
        self.point()
        self._check_reachable()
        key, csr = await credentials.request(directory)
        secret = token.rpartition("-")[2]
        roles = [role for role, known in SECRETS.items() if known == secret]
        if not roles:
            raise InvalidParameter("A valid join token is necessary")
        node = hashlib.sha256(csr.encode()).hexdigest()[:25]
        self.wishes[node] = roles[0]
        self.down.discard(node)
        self.point()
        await asyncio.sleep(0)
        return (
            Joined(
                node=node,
                swarm=SWARM,
                certificate=certificate(node, roles[0]),
                root=ROOT,
                role=roles[0],
                managers=(OTHER,),
                seen="10.0.0.1",
                epoch=1,
            ),
            key,
            remotes[0],
        )

    async def _renew(self, directory: Directory, own: Any, managers: Any, *, advertise: str) -> tuple[Renewed, str]:
        self.point()
        if own is None:
            assert OTHER.address in managers
            self._check_reachable()
        key, _ = await credentials.request(directory)
        role = self.wishes[self.node()]
        self.point()
        await asyncio.sleep(0)
        return Renewed(certificate=certificate(self.node(), role), root=ROOT, role=role), key


class FakeProcess:
    """As `process.Process`, of which `World` keeps what survives the daemon."""

    all: ClassVar[list[FakeProcess]] = []

    def __init__(self, world: World, *, on_removed: Callable[[], None], log_level: str) -> None:
        self.world = world
        self.on_removed = on_removed
        self.serves = self.watched = False
        self.trouble = ""
        FakeProcess.all.append(self)

    async def begin(self, begin: Begin) -> None:
        world = self.world
        world.point()
        world.process = True
        root = world.directory / "root" / "swarm"
        world.point()
        await asyncio.sleep(0)
        if world.trouble is not None:
            raise world.trouble
        match begin.how:
            case "init":
                world.wishes = {begin.node: "manager"}
                world.members.add(begin.node)
                (root / "ca.crt").write_text(ROOT)
                (root / "node.key").write_text(KEY)
                (root / "node.crt").write_text(certificate(begin.node, "manager"))
            case "join":
                found = Directory(root).certificate()
                if found is None or found.role != "manager":
                    raise ServerError("the certificate is no manager's")
                if world.wishes[begin.node] != "manager":
                    world.process = False
                    raise process.Removed("removed")
                world.members.add(begin.node)
            case "force":
                world.members = {begin.node}
            case "restore":
                if begin.node not in world.members:
                    world.process = False
                    raise process.Removed("removed")
        (root / "etcd" / "member" / "wal").mkdir(parents=True, exist_ok=True)
        world.point()
        self.serves = self.watched = True

    async def stop(self, *, leave: bool = False, force: bool = False) -> None:
        self.world.point()
        if leave:
            assert force
            if self.world.process:
                self.world.members -= {*self.world.wishes}
        self.world.point()
        self.world.process = self.serves = self.watched = False
        await asyncio.sleep(0)
        self.world.point()

    async def connection(self, seconds: float) -> Any:
        if self.serves and not seconds:
            return self  # a renewal
        raise Unavailable("its manager is still starting")

    async def ask(self, message: Any, *, timeout: float) -> Any:
        raise Unavailable("nothing is managed here")

    async def detach(self) -> None:
        self.serves = self.watched = False

    def clear(self) -> None:
        self.world.point()


class FakeAgent:
    """As `agent.Agent`. It has a session at once, while any manager can be reached."""

    def __init__(
        self,
        world: World,
        parts: Any,
        identity: Identity,
        *,
        on_session: Callable[[Session], None],
        on_barred: Callable[[str], None],
    ) -> None:
        self.world, self.identity = world, identity
        self.on_session, self.on_barred = on_session, on_barred
        self.managers = identity.peers
        self.reason = ""
        self.running = False
        self.renewals = 0

    def start(self) -> None:
        assert self.identity.node and self.identity.swarm
        self.running = True
        self.world.tasks = True
        self.world.agents.append(self)
        asyncio.get_running_loop().call_soon(self.tell)

    def tell(self, **more: Any) -> None:
        """The manager tells the terms of the session."""
        world = self.world
        if not self.running or world.dead or not world.reachable or not world.wishes:
            return
        if self.identity.role == "manager" and not world.process:
            return
        session = Session(
            id="s",
            node=self.identity.node,
            period=5,
            managers=(OTHER,) if "other" in world.members or not world.members else (),
            role=world.wishes.get(self.identity.node, "worker"),
            epoch=2,
            root=ROOT,
            **more,
        )
        with contextlib.suppress(Killed):
            self.on_session(session)

    def renewed(self) -> None:
        self.renewals += 1

    async def close(self) -> None:
        self.running = False

    async def leave(self, *, tell: bool) -> None:
        self.running = False
        self.world.point()
        self.world.tasks = False
        if tell:
            self.world.down.add(self.identity.node)
        await asyncio.sleep(0)
        self.world.point()


async def until(probe: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not probe():
        assert time.monotonic() < limit, "it does not happen"
        await asyncio.sleep(0.002)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(300):
            await test()

    asyncio.run(limited())
