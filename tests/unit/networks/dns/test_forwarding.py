"""Asking other DNS servers, here on the loopback: which is asked when, and which answer counts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from dnslib import QTYPE, RCODE, RR, A, DNSRecord

from engine.networks.dns import forwarding
from engine.networks.dns import messages as dns
from engine.networks.dns.forwarding import Forwarder, Server, open_socket

Answer = Callable[[DNSRecord], DNSRecord | None]


def answering(request: DNSRecord) -> DNSRecord:
    reply = request.reply()
    reply.add_answer(RR(str(request.q.qname), QTYPE.A, rdata=A("1.2.3.4"), ttl=1))
    return reply


def refusing(request: DNSRecord) -> DNSRecord:
    reply = request.reply()
    reply.header.rcode = RCODE.REFUSED
    return reply


def silent(_: DNSRecord) -> None:
    return None


class Upstream(asyncio.DatagramProtocol):
    """A server for UDP and TCP on one port of the loopback."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked = 0
        self.server = Server("")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: object) -> None:
        self.asked += 1
        if (reply := self.answer(DNSRecord.parse(data))) is not None:
            self.transport.sendto(reply.pack(), address)  # type: ignore[attr-defined]

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        size = int.from_bytes(await reader.readexactly(2), "big")
        if (reply := self.answer(DNSRecord.parse(await reader.readexactly(size)))) is not None:
            packed = reply.pack()
            writer.write(len(packed).to_bytes(2, "big") + packed)
        else:
            await reader.read()
        writer.close()


@asynccontextmanager
async def upstream(answer: Answer) -> AsyncIterator[Upstream]:
    found = Upstream(answer)
    tcp = await asyncio.start_server(found.connected, "127.0.0.1", 0)
    port = tcp.sockets[0].getsockname()[1]
    udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: found, ("127.0.0.1", port))
    found.server = Server("127.0.0.1", port)
    try:
        yield found
    finally:
        udp.close()
        tcp.close()


async def opener(server: Server, kind: socket.SocketKind) -> socket.socket:
    return open_socket(server, kind)


async def ask(forwarder: Forwarder, *servers: Upstream, tcp: bool) -> DNSRecord | None:
    message = DNSRecord.question("example.com").pack()
    method = forwarder.by_stream if tcp else forwarder.by_datagram
    reply = await method(dns.parse(message), message, [each.server for each in servers], opener)
    return DNSRecord.parse(reply) if reply is not None else None


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(limited())


by_both = pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])


@by_both
def test_a_refusal_is_the_answer_when_there_is_no_better(tcp: bool) -> None:
    async def body() -> None:
        async with upstream(refusing) as first, upstream(answering) as second:
            forwarder = Forwarder()
            found = await ask(forwarder, first, second, tcp=tcp)
            assert found is not None and str(found.a.rdata) == "1.2.3.4"
            found = await ask(forwarder, first, tcp=tcp)
            assert found is not None and found.header.rcode == RCODE.REFUSED

    run(body)


@by_both
def test_a_silent_server_is_asked_last_for_a_while(tcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "GRUDGE", 600)
    monkeypatch.setattr(forwarding, "PATIENCE", 0.05)
    monkeypatch.setattr(forwarding, "TIME_LIMIT", 0.5)

    async def body() -> None:
        async with upstream(silent) as dead, upstream(answering) as good:
            forwarder = Forwarder()
            assert await ask(forwarder, dead, good, tcp=tcp) is not None
            # from now on: how soon the other answers does not matter
            monkeypatch.setattr(forwarding, "PATIENCE", 60)
            monkeypatch.setattr(forwarding, "TIME_LIMIT", 60)
            for _ in range(3):
                assert await ask(forwarder, dead, good, tcp=tcp) is not None
            assert (dead.asked, good.asked) == (1, 4)

    run(body)


@by_both
def test_no_answer(tcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "TIME_LIMIT", 0.1)

    async def body() -> None:
        async with upstream(silent) as dead:
            assert await ask(Forwarder(), dead, tcp=tcp) is None
        assert await ask(Forwarder(), dead, tcp=tcp) is None, "no one listens there"

    run(body)
