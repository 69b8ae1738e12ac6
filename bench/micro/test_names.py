"""The resolver over real UDP in a network namespace, and its message code beside dnslib's. The
answer is checked first, then timed. Needs root.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any

import dnslib
import pytest
import uvloop

from engine.networks.dns import messages as dns
from engine.networks.dns.names import NameTable
from engine.networks.dns.resolver import TTL, Resolver
from engine.system import namespaces
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket

QUERIES = 20_000
WINDOW = 32
"""Queries in progress at once, as from a container with so many threads."""
CONTAINERS = 1_000


def table() -> NameTable:
    """A network of a thousand containers, five of which share an alias."""
    names = NameTable()
    for number in range(CONTAINERS):
        names.add(
            f"endpoint {number}",
            network_id="n",
            network="mynet",
            container_id=f"c{number}",
            names=[f"web{number}", f"{number:012x}", *(["all"] if number < 5 else [])],
            addresses=[IPv4Address("10.0.0.2") + number],
        )
    return names


@pytest.fixture
def served() -> Iterator[tuple[int, int]]:
    """A namespace, and the process that answers in it."""
    with namespaces.new_network() as namespace, RouteSocket() as links:
        links.apply(rtnl.change_link("lo", up=True))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            uvloop.run(_serve(namespace, writing))
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    os.close(reading)
    yield namespace, child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(namespace)


async def _serve(namespace: int, ready: int) -> None:
    resolver = Resolver(table(), tuple)
    await resolver.open_for("c7", namespace)
    os.write(ready, b".")
    await asyncio.Event().wait()


@pytest.mark.timed("the server is another process")
def test_queries(benchmark: Any, served: tuple[int, int]) -> None:
    """Names, an alias of five containers, a name with its network, an AAAA query without an answer,
    and a reverse look-up.
    """
    namespace, server = served
    with namespaces.inside_network(namespace):
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asking.settimeout(10)
    asking.connect(("127.0.0.11", 53))
    messages = [
        dnslib.DNSRecord.question(name, kind).pack()
        for name, kind in (
            ("web3", "A"),
            ("web900", "A"),
            ("all", "A"),
            ("Web3.mynet", "A"),
            ("web9", "AAAA"),
            ("7.0.0.10.in-addr.arpa", "PTR"),
        )
    ]
    counts = []
    for message in messages:
        asking.send(message)
        counts.append(len(dnslib.DNSRecord.parse(asking.recv(4096)).rr))
    assert counts == [1, 1, 5, 1, 0, 1]

    def run() -> None:
        for number in range(QUERIES):
            asking.send(messages[number % len(messages)])
            if number >= WINDOW:
                asking.recv(4096)
        for _ in range(WINDOW):
            asking.recv(4096)

    before, rounds = _cpu(server), 5
    with asking:
        benchmark.pedantic(run, rounds=rounds)
    used = _cpu(server) - before
    benchmark.extra_info["queries/s"] = round(QUERIES / benchmark.stats["min"])
    benchmark.extra_info["queries/s of CPU"] = round(QUERIES * rounds / used)


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_message(benchmark: Any) -> None:
    """Parse a query and build its answer."""
    message = dnslib.DNSRecord.question("web").pack()
    address = IPv4Address("10.0.0.2").packed
    reply = benchmark(lambda: dns.answer(dns.parse(message), (dns.address_record(address, TTL),)))
    assert str(dnslib.DNSRecord.parse(reply).a.rdata) == "10.0.0.2"


@pytest.mark.timed("another library")
def test_message_by_dnslib(benchmark: Any) -> None:
    """The same with dnslib, for comparison."""
    message = dnslib.DNSRecord.question("web").pack()

    def run() -> bytes:
        query = dnslib.DNSRecord.parse(message)
        reply = query.reply()
        reply.add_answer(dnslib.RR(query.q.qname, dnslib.QTYPE.A, rdata=dnslib.A("10.0.0.2"), ttl=TTL))
        packed: bytes = reply.pack()
        return packed

    assert str(dnslib.DNSRecord.parse(benchmark(run)).a.rdata) == "10.0.0.2"
