"""Published ports as sockets, on loopback, with a server that only notes what it serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address

import pytest

from engine.networks.ports import PortInUse, Published
from engine.networks.serving import Serving

FOURTH, SIXTH = IPv4Address("10.1.0.2"), IPv6Address("fd00::2")


class Server:
    """The monitor."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.targets: dict[str, tuple[bytes, int]] = {}

    def serve(self, name: str, listener: int, address: bytes, port: int) -> None:
        held = os.dup(listener)
        if name in self.held:
            os.close(self.held[name])
        self.held[name], self.targets[name] = held, (address, port)

    async def end_serving(self, names: Sequence[str]) -> None:
        for name in names:
            del self.targets[name]
            os.close(self.held.pop(name))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    for descriptor in made.held.values():
        os.close(descriptor)


def serving(server: Server, *, active: bool = True) -> Serving:
    made = Serving(server, active=active)
    return made


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def begin(made: Serving, owner: str, *ports: Published) -> None:
    made.begin(made.listen(owner, (FOURTH, None), ports))


def test_connections_lead_to_the_container(server: Server) -> None:
    made, port = serving(server), free_port()
    begin(made, "one", Published("tcp", "127.0.0.1", port, 80))
    assert [*server.targets.values()] == [(FOURTH.packed, 80)]
    assert not refuses(port)
    asyncio.run(made.end("other"))
    assert not refuses(port)
    asyncio.run(made.end("one"))
    assert refuses(port) and not server.held


def test_the_container_s_address_of_the_same_version(server: Server) -> None:
    made, port = serving(server), free_port()
    both = Published("tcp", "0.0.0.0", port, 80), Published("tcp", "::", port, 80)
    made.begin(made.listen("one", (FOURTH, SIXTH), both))
    assert sorted(address for address, _ in server.targets.values()) == sorted((FOURTH.packed, SIXTH.packed))
    made.begin(made.listen("two", (None, SIXTH), [Published("tcp", "127.0.0.1", free_port(), 80)]))
    assert [*server.targets.values()][-1] == (SIXTH.packed, 80), "its only one"


def test_ipv4_ports_are_served_by_ipv6_too(server: Server) -> None:
    made, port = serving(server), free_port()
    begin(made, "one", Published("tcp", "0.0.0.0", port, 80))
    with socket.socket(socket.AF_INET6) as client:
        assert client.connect_ex(("::1", port)) == 0
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        begin(made, "two", Published("tcp", "0.0.0.0", other := taken.getsockname()[1], 80))
        assert not refuses(other), "by IPv4 alone, as a program has it by IPv6"


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_all_or_none(server: Server, protocol: str) -> None:
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    made, first = serving(server), free_port(kind)
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if protocol == "tcp":
            taken.listen()
        second = taken.getsockname()[1]
        ports = [Published(protocol, "127.0.0.1", port, 80) for port in (first, second)]
        with pytest.raises(
            PortInUse, match=f"listen {protocol}4 127.0.0.1:{second}: bind: address already in use"
        ) as failure:
            made.listen("one", (FOURTH, None), ports)
        assert failure.value.at == (protocol, second)
    with contextlib.closing(socket.socket(socket.AF_INET, kind)) as again:
        again.bind(("127.0.0.1", first))


def test_the_next_daemon_goes_on_with_the_same_sockets(server: Server) -> None:
    kept, gone, new = (Published("tcp", "127.0.0.1", free_port(), 80) for _ in range(3))
    begin(serving(server), "one", kept)
    begin(serving(server), "two", gone)
    before = {os.fstat(descriptor).st_ino for name, descriptor in server.held.items() if "one" in name}
    moved = IPv4Address("10.1.0.3"), None
    failures = asyncio.run(serving(server).settle([("one", moved, [kept, new])]))
    assert not failures
    assert before <= {os.fstat(descriptor).st_ino for descriptor in server.held.values()}
    assert {address for address, _ in server.targets.values()} == {moved[0].packed}
    assert not refuses(kept.host_port) and not refuses(new.host_port) and refuses(gone.host_port)


def test_a_daemon_with_rules_ends_all(server: Server) -> None:
    port = Published("tcp", "127.0.0.1", free_port(), 80)
    begin(serving(server), "one", port)
    assert asyncio.run(serving(server, active=False).settle([("one", (FOURTH, None), [port])])) == []
    assert refuses(port.host_port)
