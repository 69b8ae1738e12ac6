"""The resolver with real sockets in real network namespaces, and upstream servers that are slow,
dead or malicious. Needs root."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Interface, ip_address
from typing import Any

import pytest
import uvloop
from dnslib import EDNS0, QTYPE, RCODE, RR, A, DNSRecord

from engine.errors import ServerError
from engine.networks.dns import forwarding, resolver
from engine.networks.dns.forwarding import Forwarder, HostServers, Server
from engine.networks.dns.names import NameTable
from engine.networks.dns.resolver import Resolver
from engine.system import namespaces, netfilter
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket
from tests.support import PATIENCE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@functools.cache
def _askers(process: int) -> ThreadPoolExecutor:
    """The threads that ask. Tests that fork use this module too, and a child has none of its
    parent's threads.
    """
    return ThreadPoolExecutor(8)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts: on a busy machine a server may be slow. Tests of timeouts set their
    own."""
    monkeypatch.setattr(forwarding, "PATIENCE", 60)
    monkeypatch.setattr(forwarding, "TIME_LIMIT", 120)


@pytest.fixture
def namespace() -> Iterator[int]:
    """A network namespace with its loopback up, in place of a container's."""
    with _namespace() as made:
        yield made


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    with namespaces.new_network() as made, RouteSocket() as links:
        links.apply(rtnl.change_link("lo", up=True))
    try:
        yield made
    finally:
        os.close(made)


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Run the body on the engine's event loop; no socket or namespace of it is left."""

    async def all_of_it() -> None:
        before = _held()
        await body()
        await until(lambda: _held() <= before, "sockets and namespaces closed")

    uvloop.run(all_of_it())


def _held() -> set[str]:
    held = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{each}")
            if target.startswith(("socket:", "net:")):
                held.add(f"{each} {target}")
    return held


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    namespace: int, *hosts: Server, names: NameTable | None = None, container: str = "c", **options: Any
) -> AsyncIterator[Resolver]:
    made = Resolver(names or table(), lambda: hosts)
    await made.open_for(container, namespace, **options)
    try:
        yield made
    finally:
        await made.close()


def table() -> NameTable:
    names = NameTable()
    for number, (container, aliases, addresses) in enumerate(
        (
            ("c", ["asker"], ["10.0.0.2"]),
            ("web", ["www", "all"], ["10.0.0.3", "fd00::3"]),
            ("db", ["all"], ["10.0.0.4"]),
        )
    ):
        names.add(
            f"endpoint {number}",
            network_id="n",
            network="mynet",
            container_id=container,
            names=[container, *aliases],
            addresses=[ip_address(each) for each in addresses],
        )
    return names


async def ask(
    namespace: int, name: str, kind: str = "A", *, tcp: bool = False, size: int = 0, wait: float = 20
) -> DNSRecord:
    """Ask 127.0.0.11 in the namespace as a container does."""
    record = DNSRecord.question(name, kind)
    if size:
        record.add_ar(EDNS0(udp_len=size))
    reply = DNSRecord.parse(await raw(namespace, record.pack(), tcp=tcp, wait=wait))
    assert reply.header.id == record.header.id and reply.header.qr == 1
    assert reply.q == record.q
    return reply


async def raw(namespace: int, message: bytes, *, tcp: bool = False, wait: float = 20) -> bytes:
    return await asyncio.get_running_loop().run_in_executor(_askers(os.getpid()), _raw, namespace, message, tcp, wait)


def _raw(namespace: int, message: bytes, tcp: bool, wait: float) -> bytes:
    with _asking(namespace, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM, wait) as asking:
        if not tcp:
            asking.send(message)
            return asking.recv(65535)
        asking.sendall(len(message).to_bytes(2, "big") + message)
        return _framed(asking)


@contextlib.contextmanager
def _asking(namespace: int, kind: socket.SocketKind, wait: float = 20) -> Iterator[socket.socket]:
    with namespaces.inside_network(namespace):
        asking = socket.socket(socket.AF_INET, kind)
    with asking:
        asking.settimeout(wait)
        asking.connect(("127.0.0.11", 53))
        yield asking


def _framed(asking: socket.socket) -> bytes:
    received = b""
    while len(received) < 2 or len(received) < 2 + int.from_bytes(received[:2], "big"):
        chunk = asking.recv(65535)
        assert chunk, "closed"
        received += chunk
    assert len(received) == 2 + int.from_bytes(received[:2], "big")
    return received[2:]


def addresses(reply: DNSRecord) -> list[str]:
    assert reply.header.rcode == RCODE.NOERROR
    return [str(rr.rdata) for rr in reply.rr]


def _both(address: str, port: int) -> tuple[socket.socket, socket.socket]:
    """A UDP and a TCP socket with the same port; 0: a port that is free for both."""
    while True:
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((address, port))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            udp.bind((address, tcp.getsockname()[1]))
        except OSError as error:
            tcp.close()
            udp.close()
            if port or error.errno != errno.EADDRINUSE:
                raise
        else:
            return udp, tcp


class Upstream:
    """A name server. `reply` returns the answer to a query: bytes, a list of bytes, or nothing.
    `asked` has the queries that it received.
    """

    def __init__(self, reply: Callable[[DNSRecord], list[bytes]], address: str = "127.0.0.1", port: int = 0) -> None:
        self._reply = reply
        self.asked: list[DNSRecord] = []
        self.sources: list[Any] = []
        self._udp, self._tcp = _both(address, port)
        self.server = Server(address, self._udp.getsockname()[1])

    async def __aenter__(self) -> Upstream:
        asyncio.get_running_loop().add_reader(self._udp, self._datagram)
        self._listening = await asyncio.start_server(self._stream, sock=self._tcp)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._udp)
        self._udp.close()
        self._listening.close()

    def _datagram(self) -> None:
        message, source = self._udp.recvfrom(65535)
        self.sources.append(source)
        for reply in self._answers(message):
            self._udp.sendto(reply, source)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            message = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            replies = self._answers(message)
            for reply in replies:
                writer.write(len(reply).to_bytes(2, "big") + reply)
            if not replies:
                await reader.read()
        writer.close()

    def _answers(self, message: bytes) -> list[bytes]:
        query = DNSRecord.parse(message)
        self.asked.append(query)
        return self._reply(query)


def replying(address: str) -> Callable[[DNSRecord], list[bytes]]:
    def reply(query: DNSRecord) -> list[bytes]:
        made = query.reply()
        made.add_answer(RR(query.q.qname, QTYPE.A, rdata=A(address), ttl=60))
        return [made.pack()]

    return reply


def refusing(rcode: int) -> Callable[[DNSRecord], list[bytes]]:
    def reply(query: DNSRecord) -> list[bytes]:
        made = query.reply()
        made.header.rcode = rcode
        return [made.pack()]

    return reply


def silent(query: DNSRecord) -> list[bytes]:
    return []


# --- its own names --------------------------------------------------------------------------------


@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
def test_own_names(namespace: int, tcp: bool) -> None:
    async def body() -> None:
        async with serving(namespace, forward=False):
            assert addresses(await ask(namespace, "WEB", tcp=tcp)) == ["10.0.0.3"]
            assert addresses(await ask(namespace, "www.mynet", "AAAA", tcp=tcp)) == ["fd00::3"]
            assert addresses(await ask(namespace, "web", "ANY", tcp=tcp)) == ["10.0.0.3", "fd00::3"]
            assert addresses(await ask(namespace, "db", "AAAA", tcp=tcp)) == []
            assert addresses(await ask(namespace, "db", "MX", tcp=tcp)) == []
            assert addresses(await ask(namespace, "4.0.0.10.in-addr.arpa", "PTR", tcp=tcp)) == ["db.mynet."]
            back = ip_address("fd00::3").reverse_pointer
            assert addresses(await ask(namespace, back, "PTR", tcp=tcp)) == ["web.mynet."]
            both = {tuple(addresses(await ask(namespace, "all", tcp=tcp))) for _ in range(4)}
            assert both == {("10.0.0.3", "10.0.0.4"), ("10.0.0.4", "10.0.0.3")}
            assert (await ask(namespace, "nobody", tcp=tcp)).header.rcode == RCODE.NXDOMAIN
            assert (await ask(namespace, "example.com", tcp=tcp)).header.rcode == RCODE.SERVFAIL

    run(body)


def test_names_come_and_go_while_it_serves(namespace: int) -> None:
    async def body() -> None:
        async with serving(namespace, forward=False) as served:
            served.names.remove("endpoint 1")
            assert (await ask(namespace, "web")).header.rcode == RCODE.NXDOMAIN
            served.names.remove("endpoint 0")
            assert (await ask(namespace, "db")).header.rcode == RCODE.NXDOMAIN

    run(body)


def test_noise_gets_an_error_or_silence_and_nothing_breaks(namespace: int) -> None:
    async def body() -> None:
        async with serving(namespace, forward=False):
            reply = await raw(namespace, b"\0\7\1\0\0\1\0\0\0\0\0\0\x03we")
            assert (reply[:2], reply[3] & 15) == (b"\0\7", RCODE.FORMERR)
            for noise in (b"", b"x", b"\0\7\x81\0\0\0\0\0\0\0\0\0"):
                with pytest.raises(TimeoutError):
                    await raw(namespace, noise, wait=0.05)
            assert addresses(await ask(namespace, "web"))

    run(body)


def test_many_names_are_cut_and_come_whole_by_tcp(namespace: int) -> None:
    async def body() -> None:
        names = table()
        for number in range(200):
            names.add(
                f"many {number}",
                network_id="n",
                network="mynet",
                container_id=f"m{number}",
                names=[f"m{number}", "many"],
                addresses=[ip_address(f"10.0.1.{number}")],
            )
        async with serving(namespace, names=names):
            short = await ask(namespace, "many")
            assert short.header.tc and 0 < len(short.rr) < 40
            assert 40 < len((await ask(namespace, "many", size=1232)).rr) < 100
            assert not (await ask(namespace, "many", size=4096)).header.tc
            assert len((await ask(namespace, "many", tcp=True)).rr) == 200

    run(body)


def test_the_containers_own_server_has_port_53(namespace: int) -> None:
    """On every address except 127.0.0.11.

    The ports that the resolver really uses are not visible.
    """

    async def body() -> None:
        async with serving(namespace):
            with namespaces.inside_network(namespace):
                own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                stream = socket.socket()
            with own, stream, _asking(namespace, socket.SOCK_DGRAM) as asking:
                own.bind(("0.0.0.0", 53))
                stream.bind(("0.0.0.0", 53))
                stream.listen()
                asking.connect(("127.0.0.1", 53))
                asking.send(b"mine")
                assert own.recv(10) == b"mine"
                assert addresses(await ask(namespace, "web")) == addresses(await ask(namespace, "web", tcp=True))

    run(body)


def test_a_real_client(namespace: int) -> None:
    async def body() -> None:
        async with serving(namespace, forward=False):
            process = await asyncio.create_subprocess_exec(
                *("nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", "busybox", "nslookup", "web", "127.0.0.11"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            output, _ = await asyncio.wait_for(process.communicate(), 30 * PATIENCE)
            assert b"10.0.0.3" in output and b"fd00::3" in output, output
            assert process.returncode == 0

    run(body)


def test_streams(namespace: int) -> None:
    """Split queries, several at once, a frame with a wrong length, and a client that only
    connects."""

    def talk() -> None:
        message = DNSRecord.question("web").pack()
        frame = len(message).to_bytes(2, "big") + message
        with _asking(namespace, socket.SOCK_STREAM) as asking:
            for octet in frame:
                asking.sendall(bytes((octet,)))
            assert addresses(DNSRecord.parse(_framed(asking))) == ["10.0.0.3"]
            asking.sendall(frame * 100)
            received = b""
            while len(received) < 100 * (len(message) + 2 + 16):
                received += asking.recv(65535)
            asking.sendall(b"\0\2xx" + frame)
            assert addresses(DNSRecord.parse(_framed(asking))) == ["10.0.0.3"]
            asking.sendall(b"\xff\xff" + frame)
        with contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(_asking(namespace, socket.SOCK_STREAM)) for _ in range(resolver.CONNECTIONS)]
            with _asking(namespace, socket.SOCK_STREAM) as one_more:
                assert one_more.recv(1) == b""
            waiting.pop().close()

    async def body() -> None:
        async with serving(namespace):
            await asyncio.get_running_loop().run_in_executor(_askers(os.getpid()), talk)
            assert addresses(await ask(namespace, "web")) == ["10.0.0.3"]

    run(body)


def test_an_idle_connection_is_closed(namespace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "IDLE", 0.1)

    def idle() -> None:
        with _asking(namespace, socket.SOCK_STREAM) as asking, contextlib.suppress(ConnectionResetError):
            assert asking.recv(1) == b""

    async def body() -> None:
        async with serving(namespace):
            await asyncio.get_running_loop().run_in_executor(_askers(os.getpid()), idle)

    run(body)


# --- forwarding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
def test_the_rest_is_asked_of_the_host(namespace: int, tcp: bool) -> None:
    """An upstream server may be on the host's loopback."""

    async def body() -> None:
        async with Upstream(replying("1.2.3.4")) as upstream, serving(namespace, upstream.server):
            assert addresses(await ask(namespace, "Example.com", size=1400, tcp=tcp)) == ["1.2.3.4"]
            assert addresses(await ask(namespace, "4.3.2.1.in-addr.arpa", "PTR", tcp=tcp)) == ["1.2.3.4"]
            assert addresses(await ask(namespace, "web", tcp=tcp)) == ["10.0.0.3"]
            assert [str(query.q.qname) for query in upstream.asked] == ["Example.com.", "4.3.2.1.in-addr.arpa."]
            assert upstream.asked[0].ar[0].edns_len == 1400

    run(body)


def test_ids_and_ports_of_what_is_passed_on_are_random(namespace: int) -> None:
    async def body() -> None:
        async with Upstream(replying("1.2.3.4")) as upstream, serving(namespace, upstream.server):
            message = DNSRecord.question("example.com").pack()
            for _ in range(20):
                assert (await raw(namespace, message))[:2] == message[:2]
            assert len({query.header.id for query in upstream.asked}) > 15
            assert len({port for _, port in upstream.sources}) > 15

    run(body)


def test_only_the_answer_to_the_question_is_taken(namespace: int) -> None:
    def lying(query: DNSRecord) -> list[bytes]:
        (true,) = replying("1.2.3.4")(query)
        (false,) = replying("6.6.6.6")(query)
        other = DNSRecord.question("other.example.com")
        other.header.id = query.header.id
        wrong_id = ((query.header.id + 1) & 0xFFFF).to_bytes(2, "big") + false[2:]
        asked_again = query.pack()
        return [b"", b"x", false[:12], wrong_id, replying("6.6.6.6")(other)[0], asked_again, true]

    async def body() -> None:
        async with Upstream(lying) as upstream, serving(namespace, upstream.server):
            assert addresses(await ask(namespace, "example.com")) == ["1.2.3.4"]

    run(body)


def test_others_cannot_answer_for_the_server(namespace: int) -> None:
    """An answer with the right id and question, but from another address."""
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    async def body() -> None:
        def reply(query: DNSRecord) -> list[bytes]:
            for _ in range(3):
                stranger.sendto(replying("6.6.6.6")(query)[0], upstream.sources[-1])
            return replying("1.2.3.4")(query)

        async with Upstream(reply) as upstream, serving(namespace, upstream.server):
            assert addresses(await ask(namespace, "example.com")) == ["1.2.3.4"]

    with stranger:
        run(body)


def test_long_answers_come_cut_and_then_by_tcp(namespace: int) -> None:
    def reply(query: DNSRecord) -> list[bytes]:
        made = query.reply()
        for number in range(1000):
            made.add_answer(RR(query.q.qname, QTYPE.A, rdata=A(f"10.0.{number // 250}.{number % 250}")))
        whole = made.pack()
        return [whole]

    def cut(query: DNSRecord) -> list[bytes]:
        made = query.reply()
        made.header.tc = 1
        return [made.pack()]

    async def body() -> None:
        async with Upstream(cut) as upstream, serving(namespace, upstream.server):
            assert (await ask(namespace, "example.com")).header.tc == 1
        async with Upstream(reply) as upstream, serving(namespace, upstream.server):
            assert len((await ask(namespace, "example.com", tcp=True)).rr) == 1000

    run(body)


@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
def test_the_next_server_is_asked(namespace: int, tcp: bool) -> None:
    async def body() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            nobody = Server("127.0.0.1", taken.getsockname()[1])
        no_route = Server("255.255.255.255")
        async with Upstream(refusing(RCODE.SERVFAIL)) as broken, Upstream(replying("1.2.3.4")) as good:
            async with serving(namespace, nobody, no_route, broken.server, good.server):
                assert addresses(await ask(namespace, "example.com", tcp=tcp)) == ["1.2.3.4"]
            assert (len(broken.asked), len(good.asked)) == (1, 1)
            async with serving(namespace, nobody, broken.server):
                assert (await ask(namespace, "example.com", tcp=tcp)).header.rcode == RCODE.SERVFAIL
        async with Upstream(refusing(RCODE.NXDOMAIN)) as first, Upstream(replying("1.2.3.4")) as second:
            async with serving(namespace, first.server, second.server):
                assert (await ask(namespace, "example.com", tcp=tcp)).header.rcode == RCODE.NXDOMAIN
            assert not second.asked

    run(body)


def test_a_silent_server_is_asked_last_for_a_while(namespace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "PATIENCE", 0.05)
    monkeypatch.setattr(forwarding, "GRUDGE", 600)
    was_silent = Forwarder._was_silent

    def once(forwarder: Forwarder, server: Server) -> None:
        was_silent(forwarder, server)
        # from the next query on; how soon the other server answers does not matter
        forwarding.PATIENCE = 60

    monkeypatch.setattr(Forwarder, "_was_silent", once)

    async def body() -> None:
        async with Upstream(silent) as dead, Upstream(replying("1.2.3.4")) as good:
            async with serving(namespace, dead.server, good.server):
                for _ in range(5):
                    assert addresses(await ask(namespace, "example.com")) == ["1.2.3.4"]
            assert (len(dead.asked), len(good.asked)) == (1, 5)

    run(body)


def test_a_lost_datagram_is_sent_again(namespace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "PATIENCE", 0.05)

    async def body() -> None:
        async with Upstream(lambda query: replying("1.2.3.4")(query) if len(upstream.asked) > 2 else []) as upstream:
            async with serving(namespace, upstream.server):
                assert addresses(await ask(namespace, "example.com")) == ["1.2.3.4"]
            assert len(upstream.asked) >= 3

    run(body)


@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
def test_a_dead_server_ends_in_servfail(namespace: int, tcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "TIME_LIMIT", 0.2)

    async def body() -> None:
        async with Upstream(silent) as dead, serving(namespace, dead.server):
            assert (await ask(namespace, "example.com", tcp=tcp)).header.rcode == RCODE.SERVFAIL
        async with serving(namespace):  # none at all
            assert (await ask(namespace, "example.com", tcp=tcp)).header.rcode == RCODE.SERVFAIL

    run(body)


def test_own_names_do_not_wait_for_a_dead_server(namespace: int) -> None:
    """Hundreds of queries wait, up to a limit. Queries beyond it fail at once; a repeated query
    counts once.
    """

    async def body() -> None:
        async with Upstream(silent) as dead, serving(namespace, dead.server) as served:
            with _asking(namespace, socket.SOCK_DGRAM) as asking:
                asking.setblocking(False)
                for number in range(resolver.WAITING + 50):
                    for _ in range(2 if number < 10 else 1):
                        asking.send(DNSRecord.question(f"n{number}.example.com").pack() if number else _SAME)
                    await asyncio.sleep(0)
                assert addresses(await ask(namespace, "web")) == ["10.0.0.3"]
                client = served._clients["c"]
                assert len(client.waiting) == served._waiting == resolver.WAITING
                told = 0
                with contextlib.suppress(BlockingIOError):
                    while True:
                        assert DNSRecord.parse(asking.recv(4096)).header.rcode == RCODE.SERVFAIL
                        told += 1
                assert told == 50 + 9

    run(body)


_SAME = DNSRecord.question("same.example.com").pack()


def test_nobody_takes_all_the_places(namespace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "CROWD", 20)

    async def body() -> None:
        async with Upstream(silent) as dead, serving(namespace, dead.server) as served:
            with _namespace() as other:
                await served.open_for("other", other)
                for where, container in ((namespace, "c"), (other, "other")):
                    with _asking(where, socket.SOCK_DGRAM) as asking:
                        for number in range(40):
                            asking.send(DNSRecord.question(f"n{number}.example.com").pack())
                    assert (await ask(where, "nobody.here", wait=20)).header.rcode == RCODE.SERVFAIL
                    assert len(served._clients[container].waiting) == (20 if container == "c" else 16)

    run(body)


# --- own servers, isolation -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def upstream_inside(namespace: int, address: str) -> AsyncIterator[Upstream]:
    """A server on port 53 of an address that only this namespace has."""
    with namespaces.inside_network(namespace):
        with RouteSocket() as links:
            links.apply(rtnl.add_address(1, IPv4Interface(f"{address}/32")))
        made = Upstream(replying("9.9.9.9"), address, 53)
    async with made:
        yield made


@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
def test_the_containers_own_servers_are_asked_from_inside(namespace: int, tcp: bool) -> None:
    async def body() -> None:
        async with Upstream(replying("1.2.3.4")) as hosts, upstream_inside(namespace, "10.99.0.1") as inside:
            async with serving(namespace, hosts.server, servers=["10.99.0.1"]):
                assert addresses(await ask(namespace, "example.com", tcp=tcp)) == ["9.9.9.9"]
            # without a default route as well: it reaches no more than the container itself
            async with serving(namespace, hosts.server, servers=["10.99.0.1"], forward=False):
                assert addresses(await ask(namespace, "example.com", tcp=tcp)) == ["9.9.9.9"]
            # servers that the host could reach and the container cannot
            async with serving(namespace, hosts.server, servers=["192.0.2.1", "fd00::1", "fe80::1%lo"]):
                assert (await ask(namespace, "example.com", tcp=tcp)).header.rcode == RCODE.SERVFAIL
            assert not hosts.asked and len(inside.asked) == 2

    run(body)


def test_without_a_way_out_the_host_is_not_asked(namespace: int) -> None:
    async def body() -> None:
        async with Upstream(replying("1.2.3.4")) as hosts, serving(namespace, hosts.server, forward=False) as served:
            assert (await ask(namespace, "example.com")).header.rcode == RCODE.SERVFAIL
            assert (await ask(namespace, "4.3.2.1.in-addr.arpa", "PTR")).header.rcode == RCODE.SERVFAIL
            assert (await ask(namespace, "single")).header.rcode == RCODE.NXDOMAIN
            assert not hosts.asked
            served.forward("c", True)
            assert addresses(await ask(namespace, "example.com")) == ["1.2.3.4"]
            await served.open_for("c", namespace, forward=False)
            assert (await ask(namespace, "example.com")).header.rcode == RCODE.SERVFAIL

    run(body)


# --- opening and closing --------------------------------------------------------------------------


def test_opened_again_after_the_daemon_went_away(namespace: int) -> None:
    """The rules still exist, the sockets do not. A client may still have an open connection."""

    async def body() -> None:
        first = Resolver(table(), tuple)
        await first.open_for("c", namespace)
        with _asking(namespace, socket.SOCK_STREAM) as held:
            await until(lambda: first._clients["c"].connections, "accepted")
            rules = _rules(namespace)
            await first.close()
            with pytest.raises((ConnectionRefusedError, TimeoutError)):
                await raw(namespace, DNSRecord.question("web").pack(), wait=0.1)
            async with serving(namespace, again=True):
                assert addresses(await ask(namespace, "web")) == ["10.0.0.3"]
                assert addresses(await ask(namespace, "web", tcp=True)) == ["10.0.0.3"]
                assert _rules(namespace) == rules
            held.close()

    run(body)


@pytest.mark.parametrize("loss", ["taken", "other rules"])
def test_opened_again_where_the_old_ports_are_lost(namespace: int, loss: str) -> None:
    """Another process of the container uses the ports now, or has changed the rules."""

    async def body() -> None:
        first = Resolver(table(), tuple)
        await first.open_for("c", namespace)
        before = _rules(namespace)
        await first.close()
        with namespaces.inside_network(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            if loss == "taken":
                taken.bind(("0.0.0.0", int(before.partition("udp dport set ")[2].split()[0])))
            else:
                netfilter.run("flush table ip engined-names")
            async with serving(namespace, again=True):
                assert addresses(await ask(namespace, "web")) == ["10.0.0.3"]
                assert addresses(await ask(namespace, "web", tcp=True)) == ["10.0.0.3"]
        assert _rules(namespace).count("table") == 1 and _rules(namespace) != before

    run(body)


def _rules(namespace: int) -> str:
    with namespaces.inside_network(namespace):
        return netfilter.run("list ruleset")


def test_a_host_without_nftables(namespace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> str:
        raise netfilter.NetfilterError("not installed")

    monkeypatch.setattr(netfilter, "run", refuse)

    async def body() -> None:
        for _ in range(2):
            async with serving(namespace):
                assert addresses(await ask(namespace, "web")) == ["10.0.0.3"]
                assert addresses(await ask(namespace, "web", tcp=True)) == ["10.0.0.3"]

    run(body)


def test_closed_with_queries_and_connections_under_way(namespace: int) -> None:
    async def body() -> None:
        async with Upstream(silent) as dead, serving(namespace, dead.server) as served:
            with _asking(namespace, socket.SOCK_STREAM) as stream, _asking(namespace, socket.SOCK_DGRAM) as asking:
                message = DNSRecord.question("example.com").pack()
                asking.send(message)
                stream.send(len(message).to_bytes(2, "big") + message)
                await until(lambda: served._waiting == 2, "both wait")
                served.close_for("c")
                served.close_for("c")
                assert not served.serves("c")
                await until(lambda: not served._waiting, "none waits")

    run(body)


def test_closed_while_it_opens(namespace: int) -> None:
    async def body() -> None:
        served = Resolver(table(), tuple)
        opening = asyncio.ensure_future(served.open_for("c", namespace))
        await asyncio.sleep(0)
        served.close_for("c")
        await opening
        assert not served.serves("c")
        opening = asyncio.ensure_future(served.open_for("c", namespace))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not served.serves("c")
        await served.open_for("c", namespace)
        assert addresses(await ask(namespace, "web")) == ["10.0.0.3"]
        await served.close()

    run(body)


def test_a_namespace_that_cannot_be_served() -> None:
    async def body() -> None:
        served = Resolver(table(), tuple)
        nothing = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(ServerError, match=r"container c: no resolver on 127.0.0.11"):
            await served.open_for("c", nothing)
        os.close(nothing)
        assert not served.serves("c")
        await served.close()

    run(body)


def test_the_namespace_ends_when_it_is_let_go(namespace: int) -> None:
    """Seen from another namespace, across the veth pair between them."""

    async def body() -> None:
        with namespaces.inside_network(namespace):
            links = RouteSocket()
        served = Resolver(table(), tuple)
        with links:
            with _namespace() as made:
                links.apply(rtnl.create_veth("there", "here", made))
                await served.open_for("c", made)
            with _namespace() as made:
                await served.open_for("other", made)
            await asyncio.sleep(0.05)
            assert links.link("there") is not None
            served.close_for("c")
            await until(lambda: links.link("there") is None, "the namespace ends")
            await served.close()

    run(body)


# --- the host's servers ---------------------------------------------------------------------------


def test_the_hosts_resolv_conf(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "_RELOAD", 0.0)
    path = tmp_path / "resolv.conf"
    servers = HostServers(path)
    assert servers.read() == ()
    path.write_text(
        "# nameserver 9.9.9.9\nsearch a b\nnameserver 127.0.0.53 # local\nnameserver nonsense\n\nnameserver\n"
        "nameserver fe80::1%lo\nnameserver 10.0.0.1\nnameserver 10.0.0.2\n"
    )
    expected = (Server("127.0.0.53"), Server("fe80::1%lo"), Server("10.0.0.1"))
    assert servers.read() == expected
    path.rename(tmp_path / "gone")
    assert servers.read() == expected
    path.write_text("nameserver 10.0.0.9\n")
    assert servers.read() == (Server("10.0.0.9"),)
