"""The listener with real TLS on the loopback address: which peers may send which verbs, and what
slow, silent, greedy and hostile ones get.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from engine.errors import Forbidden
from engine.manager import keys, listener, records
from engine.manager.ca import Authority, found
from engine.manager.certificates import MANAGER_NAME, Root, Subject, new_root, request_key
from engine.manager.identity import Identity
from engine.manager.listener import Listener
from engine.manager.records import NodeRecord
from engine.manager.store import Put, Store
from engine.manager.tls import Credentials, dial
from engine.swarm_session import frames, messages
from engine.swarm_session.clock import SECOND
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Done
from engine.swarm_session.states import Role
from engine.wire.nodes import NodeDescription
from engine.wire.swarm import SwarmSpec
from tests.support import PATIENCE
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd

NODE = "m" * 25
HOUR = 3600 * SECOND


class Place:
    """A listener with its authority, and identities to call it with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = FakeClock(time.time())
        self.store = Store(FakeEtcd(self.clock), self.clock)
        self.served: list[tuple[messages.Message, Identity | None]] = []
        self.closed: list[Connection] = []

    async def open(self, **options: Any) -> None:
        await self.store.load()
        made = await found(SwarmSpec(), self.clock, node=NODE, address="127.0.0.1:0")
        record = NodeRecord(created=0, updated=0, role=Role.MANAGER)
        await self.store.commit([*made.changes, Put(records.NODES, NODE, record)])
        self.root = Root(made.cluster.root, made.ca_key.key)
        self.swarm = made.cluster.id
        self.authority = Authority(self.store, self.clock)
        self.credentials = Credentials(self.directory)
        self.credentials.install(roots=made.cluster.root, certificate=made.certificate, key=made.key)
        self.listener = Listener(self.credentials, self.authority, self.serve, self.closed.append, **options)
        await self.listener.listen(f"127.0.0.1:{free_port()}")
        self.address = f"127.0.0.1:{self.listener.port}"

    async def serve(self, connection: Connection, message: messages.Message, identity: Identity | None) -> None:
        self.served.append((message, identity))
        if isinstance(message, messages.Hello):
            connection.on_beat = lambda: None
        await connection.send(Done(seq=getattr(message, "seq", 0), body=b"served"))

    async def close(self) -> None:
        await self.listener.close()
        await self.store.close()

    async def node(
        self, name: str, role: Role, *, root: Root | None = None, ago: int = 0, swarm: str = ""
    ) -> Credentials:
        """Files of another node."""
        directory = self.directory / f"{name}-{time.monotonic_ns()}"
        directory.mkdir()
        key = keys.new_key()
        certificate = (root or self.root).issue(
            request_key(keys.request(key)),
            Subject(name, role, swarm or self.swarm),
            address="",
            now=self.clock.now() - ago,
            lifetime=HOUR,
        )
        if self.store.record(records.NODES, name) is None:
            await self.store.commit([Put(records.NODES, name, NodeRecord(created=0, updated=0, role=role))])
        credentials = Credentials(directory)
        credentials.install(roots=self.root.pem, certificate=certificate, key=key)
        return credentials

    def anonymous(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols([frames.ALPN])
        context.load_verify_locations(cadata=self.root.pem)
        return context


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.asynccontextmanager
async def place(directory: Path, **options: Any) -> AsyncIterator[Place]:
    made = Place(directory)
    await made.open(**options)
    try:
        yield made
    finally:
        await made.close()


HELLO = messages.Hello(description=NodeDescription())
OPEN = (messages.FetchRoot(), messages.Join(csr="", token=""), messages.Renew(csr=""))
OF_NODES = (HELLO, messages.Statuses(of=()), messages.LeaveSwarm(), messages.Renew(csr=""), messages.FetchRoot())
OF_MANAGERS = (
    messages.AddMember(peer_url=""),
    messages.PromoteMember(member=1),
    messages.RemoveMember(),
    messages.ReadLogs(tasks=()),
)
OF_THE_DAEMON = (
    messages.Begin(how="init", node="", listen="", advertise=""),
    messages.Call(verb="services.list"),
    messages.Follow(of="task", name="x"),
    messages.Watch(),
    messages.Stop(),
)


async def allowed(connection: Connection, asked: tuple[Any, ...]) -> list[str]:
    found = []
    for message in asked:
        try:
            answer = await connection.ask(message, timeout=5)
            assert answer.body == b"served"
            found.append(type(message).__name__)
        except Forbidden:
            pass
    return found


def names(asked: tuple[Any, ...]) -> list[str]:
    return [type(message).__name__ for message in asked]


async def test_a_peer_without_a_certificate(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        connection = await dial(here.address, here.anonymous())
        asked = (*OPEN, *OF_NODES[:3], *OF_MANAGERS)
        assert await allowed(connection, asked[:4]) == names(OPEN)
        assert await allowed(connection, asked[4:]) == []
        assert await allowed(connection, OF_THE_DAEMON) == []
        assert [identity for _, identity in here.served] == [None] * 3
        await connection.close()


async def test_a_worker(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        worker = await here.node("worker1", Role.WORKER)
        connection = await dial(here.address, worker.client())
        assert await allowed(connection, OF_NODES) == names(OF_NODES)
        assert await allowed(connection, (*OF_MANAGERS, *OF_THE_DAEMON, messages.Join(csr="", token=""))) == []
        assert {identity.node for _, identity in here.served if identity} == {"worker1"}
        await connection.close()


async def test_a_root_that_this_manager_does_not_know_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another manager has begun a rotation. A node that has renewed is not refused meanwhile, as it
    would give up; its connection is closed, until the records are here.
    """
    async with place(tmp_path) as here:
        pem, key = new_root(here.clock.now())
        root = Root(pem, key)
        renewed = await here.node("worker1", Role.WORKER, root=root)
        chain = renewed.certificate() + here.root.cross_sign(root, here.clock.now())
        renewed.install(certificate=chain, key=renewed.key_file.read_text())

        async def silent(timeout: float = 5.0) -> str:
            return "the swarm has lost its quorum"

        with monkeypatch.context() as patched:
            patched.setattr(here.store, "current", silent)
            connection = await dial(here.address, renewed.client())
            with pytest.raises(ConnectionError):
                await connection.ask(HELLO, timeout=5)
            await connection.close()
        rotated = msgspec.structs.replace(here.authority.cluster, rotation=pem)
        here.store.etcd.put_now("/swarm", records.encode(rotated))  # type: ignore[attr-defined]
        connection = await dial(here.address, renewed.client())
        assert await allowed(connection, OF_NODES) == names(OF_NODES)
        assert {identity.certificate for _, identity in here.served if identity} == {root.digest}
        await connection.close()


async def test_a_manager(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        manager = await here.node("manager2", Role.MANAGER)
        connection = await dial(here.address, manager.client())
        assert await allowed(connection, (*OF_NODES, *OF_MANAGERS)) == names((*OF_NODES, *OF_MANAGERS))
        assert await allowed(connection, OF_THE_DAEMON) == []
        await connection.close()


async def test_a_manager_that_is_to_be_a_worker(tmp_path: Path) -> None:
    """Its certificate is still that of a manager. Its own removal goes on."""
    async with place(tmp_path) as here:
        manager = await here.node("manager2", Role.MANAGER)
        connection = await dial(here.address, manager.client())
        await here.store.commit([Put(records.NODES, "manager2", NodeRecord(created=0, updated=0))])
        assert await allowed(connection, OF_MANAGERS) == ["RemoveMember"]
        assert await allowed(connection, OF_NODES) == names(OF_NODES)
        await connection.close()


async def test_a_removed_node_is_refused_in_the_middle_of_its_connection(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        worker = await here.node("worker1", Role.WORKER)
        connection = await dial(here.address, worker.client())
        assert await allowed(connection, (HELLO,)) == ["Hello"]
        await here.store.commit([here.authority.bar("worker1")])
        assert await allowed(connection, OF_NODES[:4]) == []
        with pytest.raises(Forbidden, match="removed"):
            await connection.ask(HELLO, timeout=5)
        await connection.close()


async def test_certificates_that_tls_refuses(tmp_path: Path) -> None:
    """Another CA, an expired one, one that is not valid yet: no message gets through."""
    async with place(tmp_path) as here:
        stranger = Root(*new_root(here.clock.now()))
        for credentials in (
            await here.node("one", Role.WORKER, root=stranger),
            await here.node("two", Role.WORKER, ago=2 * HOUR),
            await here.node("three", Role.WORKER, ago=-3 * HOUR),
        ):
            with pytest.raises((OSError, TimeoutError)):
                connection = await dial(here.address, credentials.client())
                await connection.ask(HELLO, timeout=5)
        assert here.served == []


async def test_a_certificate_of_our_root_for_another_swarm_is_that_of_a_stranger(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        other = await here.node("one", Role.MANAGER, swarm="another")
        connection = await dial(here.address, other.client())
        assert await allowed(connection, (HELLO, *OF_MANAGERS[:2], messages.FetchRoot())) == ["FetchRoot"]
        await connection.close()


async def test_a_server_that_is_no_manager_of_the_swarm_is_refused(tmp_path: Path) -> None:
    """A worker's certificate on a server, and a manager's of another CA."""
    async with place(tmp_path) as here:
        worker = await here.node("worker1", Role.WORKER)
        manager = await here.node("manager2", Role.MANAGER)
        stranger = await here.node("manager3", Role.MANAGER, root=Root(*new_root(here.clock.now())))
        for credentials in (worker, stranger):
            server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=credentials.server())
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ssl.SSLCertVerificationError):
                await dial(f"127.0.0.1:{port}", manager.client())
            server.close()


async def test_old_tls_and_other_protocols_are_refused(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        old = here.anonymous()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((OSError, TimeoutError)):
            connection = await dial(here.address, old)
            await connection.ask(messages.FetchRoot(), timeout=5)
        other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        other.load_verify_locations(cadata=here.root.pem)
        with pytest.raises((OSError, TimeoutError)):
            connection = await dial(here.address, other)
            await connection.ask(messages.FetchRoot(), timeout=5)
        assert here.served == []


async def test_a_renewed_certificate_is_used_at_once_and_connections_stay(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        worker = await here.node("worker1", Role.WORKER)
        before = await dial(here.address, worker.client())
        key = keys.new_key()
        renewed = await here.authority.sign(keys.request(key), NODE, Role.MANAGER, "127.0.0.1")
        here.credentials.install(certificate=renewed, key=key)
        after = await dial(here.address, worker.client())
        assert before.certificate != after.certificate
        assert await allowed(before, (HELLO,)) == ["Hello"] == await allowed(after, (HELLO,))
        await before.close()
        await after.close()


async def test_garbage_after_the_handshake_ends_the_connection(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        for garbage in (
            b"\xff" * 100,
            b"\x00\x00\x00\x01\xc1",
            (frames.UNIDENTIFIED_LONGEST + 1).to_bytes(4, "big") + b"x" * 100,
            b"\x00\x00\x01\x00" + b"\x91" * 256,
            b"\x00\x00\x00\x00",
            os.urandom(5000),
        ):
            reader, writer = await asyncio.open_connection(
                *here.address.split(":"), ssl=here.anonymous(), server_hostname="swarm-manager"
            )
            writer.write(garbage)
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(reader.read(), 5)
            writer.close()
        good = await dial(here.address, here.anonymous())
        assert await allowed(good, (messages.FetchRoot(),)) == ["FetchRoot"]
        await good.close()


async def test_a_stranger_cannot_ask_much_at_once(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        blocked = asyncio.Event()

        async def serve(connection: Connection, message: messages.Message, identity: Identity | None) -> None:
            await blocked.wait()
            await connection.send(Done(seq=message.seq))  # type: ignore[union-attr]

        here.listener._serve = serve
        connection = await dial(here.address, here.anonymous())
        asking = [asyncio.create_task(connection.ask(messages.FetchRoot(), timeout=5)) for _ in range(50)]
        await asyncio.sleep(0.3)
        assert sum(task.done() for task in asking) == 50 - listener.STRANGER_REQUESTS
        blocked.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert sum(isinstance(answer, Done) for answer in answers) == listener.STRANGER_REQUESTS
        await connection.close()


async def test_silent_connections_make_room(tmp_path: Path) -> None:
    """The oldest connection of the greediest address goes; those with a certificate stay."""
    async with place(tmp_path, strangers=5) as here:
        worker = await here.node("worker1", Role.WORKER)
        known = await dial(here.address, worker.client())
        assert await allowed(known, (HELLO,)) == ["Hello"]
        silent = [await asyncio.open_connection(*here.address.split(":")) for _ in range(20)]
        await asyncio.sleep(0.2)
        assert len(here.listener._strangers) == 5
        connection = await dial(here.address, here.anonymous())
        assert await allowed(connection, (messages.FetchRoot(),)) == ["FetchRoot"]
        assert await allowed(known, (HELLO,)) == ["Hello"]
        assert await asyncio.wait_for(silent[0][0].read(), 5 * PATIENCE) == b""
        for _, writer in silent:
            writer.close()
        await connection.close()
        await known.close()


async def test_slow_handshakes_and_strangers_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE", 0.3)
    monkeypatch.setattr(listener, "VISIT", 0.5)
    monkeypatch.setattr(listener, "SILENCE", 0.3)
    async with place(tmp_path) as here:
        worker = await here.node("worker1", Role.WORKER)
        reader, writer = await asyncio.open_connection(*here.address.split(":"))
        writer.write(b"\x16\x03\x01")
        assert await asyncio.wait_for(reader.read(), 5 * PATIENCE) == b""
        writer.close()
        visitor = await dial(here.address, here.anonymous())
        await asyncio.wait_for(visitor.closed.wait(), 5 * PATIENCE)
        mute = await dial(here.address, worker.client())
        session = await dial(here.address, worker.client())
        assert await allowed(session, (HELLO,)) == ["Hello"]
        await asyncio.wait_for(mute.closed.wait(), 5 * PATIENCE)
        await asyncio.sleep(0.5)
        assert not session.closed.is_set(), "beats are the session's own business"
        await session.close()
        await asyncio.sleep(0.1)
        assert not here.listener._strangers and not here.listener._of_node
        assert len(here.closed) == 3


async def test_a_node_has_a_few_connections_only(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        worker = await here.node("worker1", Role.WORKER)
        opened = [await dial(here.address, worker.client()) for _ in range(listener.CONNECTIONS + 3)]
        await asyncio.sleep(0.3)
        assert [each.closed.is_set() for each in opened] == [True] * 3 + [False] * listener.CONNECTIONS
        for each in opened:
            await each.close()


async def test_the_address_must_be_free_and_the_files_fit(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        second = Listener(here.credentials, here.authority, here.serve, here.closed.append)
        with pytest.raises(OSError, match="in use"):
            await second.listen(here.address)
        here.credentials.key_file.write_text(keys.new_key())
        third = Listener(Credentials(tmp_path), here.authority, here.serve, here.closed.append)
        with pytest.raises(OSError):
            await third.listen(f"127.0.0.1:{free_port()}")


def test_addresses_that_count_as_one() -> None:
    place_of = listener._place
    assert place_of("10.0.0.1") == place_of("::ffff:10.0.0.1") != place_of("10.0.0.2")
    assert place_of("fd00::1") == place_of("fd00::2") != place_of("fd00:0:0:1::1")
    assert place_of("fe80::1%eth0") == "fe80::"


def test_peers_that_reset_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the manager's own event loop, whose sockets have no address any more after their end."""
    caplog.set_level(logging.INFO)

    def reset(address: str, context: ssl.SSLContext | None, say: bytes) -> None:
        host, port = address.rsplit(":", 1)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if context is None:
                plain.sendall(say)
            else:
                with context.wrap_socket(plain, server_hostname=MANAGER_NAME) as peer:
                    peer.sendall(say)

    async def work() -> None:
        async with place(tmp_path, strangers=3) as here:
            context = here.anonymous()
            for _ in range(10):
                for given, say in ((None, b""), (None, b"x"), (context, b""), (context, b"\xff" * 8)):
                    await asyncio.gather(*(asyncio.to_thread(reset, here.address, given, say) for _ in range(4)))
            connection = await dial(here.address, context)
            assert (await connection.ask(messages.FetchRoot())).body == b"served"
            await connection.close()

    uvloop.run(work())
    assert not [each for each in caplog.records if each.exc_info], caplog.text
    assert "a local process" not in caplog.text, "the address is kept"
