"""Services of a network of the swarm as containers of one node see them: names, virtual addresses,
and what a restart of the daemon or another program leaves of them.

Needs root. No cluster: the test says what its managers would say.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from engine.networks.attachments import Lent
from engine.networks.dns.names import Names
from engine.networks.endpoints import Sandbox
from engine.networks.network import NetworkRecord, Overlay
from engine.networks.overlay import balance
from engine.system import links, namespaces, netfilter
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket
from engine.wire.containers import EndpointSettings
from engine.wire.networks import IPAM, IPAMConfig
from tests.support import PATIENCE
from tests.system.test_bridge import Engine, isolated, network
from tests.system.test_resolver import ask

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ID = "f" * 25
RECORD = NetworkRecord(
    id=ID,
    name="front",
    driver="overlay",
    created=1,
    scope="swarm",
    ipam=IPAM(config=[IPAMConfig(subnet="10.5.0.0/20", gateway="10.5.0.1")]),
)
SERVICE = IPv4Address("10.5.0.2")
WEB, OTHER, CLIENT = (IPv4Address(f"10.5.0.{at}") for at in (11, 12, 13))

T = TypeVar("T")


class Given(NamedTuple):
    """A lender of one address, in place of the managers."""

    engine: Engine
    address: IPv4Address

    async def lend(self, container_id: str, name: str, key: str, settings: EndpointSettings) -> Lent:
        return Lent(self.engine.networks.by_id[ID], {4: self.address})

    def release(self, container_id: str, network_id: str) -> None:
        pass

    async def give_back(self, container_id: str, network_id: str) -> None:
        pass


async def _joined(engine: Engine, name: str, address: IPv4Address) -> int:
    """A container on the network; returns the descriptor of its namespace."""
    engine.lender = Given(engine, address)
    joined = await engine.join(Sandbox(name, name), {"front": EndpointSettings()}, "front")
    assert joined.path
    return int(joined.path.rpartition("/")[2])


async def _adopted(engine: Engine) -> None:
    await asyncio.to_thread(_underlay)
    meant = Overlay(vni=4097, port=4789, local=IPv4Address("10.77.9.1"))
    await engine.networks.overlays.adopt(RECORD, meant)


def _underlay() -> None:
    links.create("under0", "bridge")
    with RouteSocket() as kernel:
        link = kernel.link("under0")
        assert link is not None
        kernel.apply(
            rtnl.add_address(link.ifindex, IPv4Interface("10.77.9.1/24")),
            rtnl.change_link("under0", up=True),
        )


def _inside(namespace: int, act: Callable[[], T]) -> T:
    with namespaces.inside_network(namespace):
        return act()


def _serve(namespace: int, name: str) -> list[socket.socket]:
    """Answer connections to port 80 and datagrams to port 53 with a name."""
    tcp = _inside(namespace, lambda: socket.create_server(("0.0.0.0", 80)))
    udp = _inside(namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    udp.bind(("0.0.0.0", 53))
    accepted: list[socket.socket] = []

    def connections() -> None:
        try:
            while True:
                one, _ = tcp.accept()
                accepted.append(one)
                one.send(name.encode())
        except OSError:
            for each in accepted:
                each.close()

    def datagrams() -> None:
        try:
            while True:
                _, client = udp.recvfrom(10)
                udp.sendto(name.encode(), client)
        except (OSError, TypeError):
            pass

    for each in (connections, datagrams):
        threading.Thread(target=each, daemon=True).start()
    return [tcp, udp]


def _connected(namespace: int, address: IPv4Address) -> socket.socket:
    made = _inside(namespace, lambda: socket.create_connection((str(address), 80), 3))
    made.settimeout(3 * PATIENCE)
    return made


async def _answers(namespace: int, address: IPv4Address, times: int) -> Counter[str]:
    def once() -> str:
        with _connected(namespace, address) as connection:
            return connection.recv(20).decode()

    return Counter([await asyncio.to_thread(once) for _ in range(times)])


def _stop(servers: list[socket.socket]) -> None:
    for each in servers:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


async def _reset(connection: socket.socket) -> None:
    with connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        for _ in range(40):
            connection.send(b"?")
            await asyncio.sleep(0.02)


async def _names_and_services(directory: Path) -> None:
    async with network(directory) as engine:
        overlays = engine.networks.overlays
        await _adopted(engine)
        web, other, client = [
            await _joined(engine, name, address) for name, address in (("web", WEB), ("other", OTHER), ("c", CLIENT))
        ]
        servers = _serve(web, "web") + _serve(other, "other")
        overlays.set_names(
            ID,
            {
                "s": Names(("web-service", "alias"), (SERVICE,)),
                "tasks.s": Names(("tasks.web-service",), (WEB, OTHER), rotated=True),
                "t": Names(("elsewhere.1.abc",), (IPv4Address("10.5.0.99"),)),
            },
            (),
        )
        await overlays.set_services(ID, {SERVICE: [WEB, OTHER]}, ())

        async def found(name: str, kind: str = "A") -> list[str]:
            return [str(each.rdata) for each in (await ask(client, name, kind)).rr]

        for name in ("web-service", "ALIAS", "web-service.front"):
            assert await found(name) == [str(SERVICE)]
        assert await found("web-service", "AAAA") == []
        assert sorted(await found("tasks.web-service")) == [str(WEB), str(OTHER)]
        assert await found("elsewhere.1.abc") == ["10.5.0.99"]
        assert await found("99.0.5.10.in-addr.arpa", "PTR") == ["elsewhere.1.abc.front."]
        assert await found("web") == [str(WEB)]
        answers = await _answers(client, SERVICE, 40)
        assert answers.keys() == {"web", "other"}
        assert set(await _answers(web, SERVICE, 20)) == {"web", "other"}  # itself, too

        # a withdrawn backend keeps its connections until it has gone
        await overlays.set_services(ID, {SERVICE: [WEB]}, ())
        open_ = _connected(client, SERVICE)
        assert await asyncio.to_thread(open_.recv, 20) == b"web"
        udp = _inside(client, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.settimeout(1)
        udp.connect((str(SERVICE), 53))

        def said() -> bytes:
            udp.send(b"?")
            try:
                return udp.recv(20)
            except TimeoutError:  # its answer was under way when the client moved
                return b""

        assert await asyncio.to_thread(said) == b"web"
        await overlays.set_services(ID, {SERVICE: [OTHER]}, ())
        end = time.monotonic() + 20 * PATIENCE
        while await asyncio.to_thread(said) != b"other":
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        open_.send(b"still there?")
        assert set(await _answers(client, SERVICE, 5)) == {"other"}
        await overlays.set_peers(ID, {}, [WEB])
        await _reset(open_)
        udp.close()

        # another program removes the rules
        space = engine.networks.drivers.overlays.space(engine.networks.by_id[ID])
        await asyncio.to_thread(_inside, space.descriptor, lambda: netfilter.run(f"delete table inet {balance.TABLE}"))
        await overlays.mend()  # unless the notice of the change came first
        assert not await overlays.mend()
        assert set(await _answers(client, SERVICE, 5)) == {"other"}

        # a container of this host ends: its clients learn it at once
        open_ = _connected(client, SERVICE)
        assert await asyncio.to_thread(open_.recv, 20) == b"other"
        await overlays.set_services(ID, {SERVICE: [WEB]}, ())
        open_.send(b"?")
        await engine.leave("other")
        await _reset(open_)

        overlays.set_names(ID, {}, ["s", "unknown"])
        assert (await ask(client, "web-service")).header.rcode != 0 or not await found("web-service")
        _stop(servers)
        for name in ("web", "c"):
            await engine.leave(name)
        await overlays.drop(ID)
        await asyncio.to_thread(_remove_underlay)
        assert not engine.networks.names._networks


def _remove_underlay() -> None:
    with RouteSocket() as kernel:
        kernel.apply(rtnl.delete_link("under0"))


def test_names_and_services(tmp_path: Path) -> None:
    isolated(_names_and_services, tmp_path)


async def _without_backends(directory: Path) -> None:
    async with network(directory) as engine:
        overlays = engine.networks.overlays
        await _adopted(engine)
        client = await _joined(engine, "c", CLIENT)
        overlays.set_names(ID, {"s": Names(("web",), (SERVICE,)), "tasks.s": Names(("tasks.web",), (), True)}, ())
        await overlays.set_services(ID, {SERVICE: ()}, ())
        assert [str(each.rdata) for each in (await ask(client, "web")).rr] == [str(SERVICE)]
        assert (await ask(client, "tasks.web")).rr == []
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(_connected, client, SERVICE)
        await overlays.set_services(ID, {}, [SERVICE])
        with pytest.raises(OSError, match=re.compile("no route|unreachable", re.I)):
            await asyncio.to_thread(_connected, client, SERVICE)
        await engine.leave("c")
        await overlays.drop(ID)
        await asyncio.to_thread(_remove_underlay)


def test_a_service_without_backends(tmp_path: Path) -> None:
    isolated(_without_backends, tmp_path)
