"""The default bridge and user networks on the real kernel, in network and mount namespaces of the
test; verified through pyroute2.

Needs root. Each body runs in a forked child outside the host's network namespace. At its end it
checks that nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import socket
import struct
import subprocess
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.config import Config
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.networks import endpoints, host, sandboxes
from engine.storage.records import Records
from engine.system import namespaces, netfilter
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket
from engine.wire.containers import EndpointSettings
from engine.wire.networks import NetworkCreate
from tests.support.fakes.networks import Both
from tests.support.forks import fork

pyroute2 = pytest.importorskip("pyroute2")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

CLONE_NEWNS = 0x20000

Body = Callable[[Path], Coroutine[Any, Any, None]]


def isolated(body: Body, directory: Path) -> None:
    """Run the body isolated from the host's network; its failure is this test's."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        words = ""
        try:
            os.close(reading)
            _leave_the_host()
            asyncio.run(body(directory))
        except BaseException:
            words = traceback.format_exc()
        os.write(writing, words.encode()[-60000:])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        words = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child has ended with the status {status}"
    if words:
        pytest.fail(words, pytrace=False)


def _leave_the_host() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(namespaces.CLONE_NEWNET | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    # sysfs shows the network namespace of the process that mounts it, and mounts must not propagate
    # to the host
    for source, target, kind, flags in ((b"none", b"/", None, 1 << 18 | 1 << 14), (b"sysfs", b"/sys", b"sysfs", 0)):
        if libc.mount(source, target, kind, flags, None):
            raise OSError(ctypes.get_errno(), "mount")
    with RouteSocket() as links:
        links.apply(rtnl.change_link("lo", up=True))


class Process(NamedTuple):
    pid: int
    pidfd: int


class Sandbox(NamedTuple):
    """The addresses and names of one container on one network."""

    path: str
    endpoint: EndpointSettings


class Engine(Both):
    """Networks as containers use them, with shortcuts for the default bridge's endpoints."""

    async def endpoint(self, container: str, mac: str = "", on: str = "bridge", **asked: Any) -> Sandbox:
        wanted = {on: msgspec.convert(asked, EndpointSettings)}
        joined = await self.join(endpoints.Sandbox(container, container), wanted, on, {on: mac})
        assert joined.path
        return Sandbox(joined.path, joined.endpoints[on])

    @property
    def subnet(self) -> Any:
        return self.get("bridge").pools[4].subnet


@contextlib.asynccontextmanager
async def network(directory: Path, **config: Any) -> AsyncIterator[Engine]:
    """An open network; it is removed completely afterwards."""
    gc.collect()  # frees leftovers of earlier tests
    before = set(os.listdir("/proc/self/fd"))
    records = Records(directory / "state.db")
    made = Engine(Config(**config), records)
    try:
        await made.open()
        yield made
    finally:
        await made.close(remove=True)
        records.close()
    await until(lambda: len(set(os.listdir("/proc/self/fd")) - before) <= 1, "descriptors closed")
    await until(lambda: _links() == ["lo"], "links gone")
    if netfilter.available():
        assert "engined" not in netfilter.run("list ruleset")


def _links() -> list[str]:
    with RouteSocket() as links:
        return [link.name for link in links.links()]


def _oracle() -> set[str]:
    """Names of the links as pyroute2 reads them."""
    with pyroute2.IPRoute() as kernel:
        return {each.get_attr("IFLA_IFNAME") for each in kernel.get_links()}


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.02)


def inside(sandbox: Sandbox, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["nsenter", f"--net={sandbox.path}", *argv], capture_output=True, text=True, timeout=60, check=False
    )


def reaches(sandbox: Sandbox, address: str) -> bool:
    return inside(sandbox, "busybox", "ping", "-c", "1", "-W", "5", address).returncode == 0


# --- netlink --------------------------------------------------------------------------------------


async def _netlink(_: Path) -> None:
    with RouteSocket() as links:
        assert links.link("nothere") is None
        links.apply(
            rtnl.create_bridge("b0", mac="02:42:00:00:00:09"),
            rtnl.change_link("b0", up=True, alias="words"),
        )
        bridge = links.link("b0")
        assert bridge is not None
        assert (bridge.kind, bridge.alias, bridge.address, bridge.up) == ("bridge", "words", "02:42:00:00:00:09", True)
        interface = IPv4Interface("10.9.0.1/24")
        links.apply(rtnl.add_address(bridge.ifindex, interface))
        assert [each.interface for each in links.addresses(bridge.ifindex)] == [interface]
        assert (int(interface.network[0]), int(interface.network[-1]), False) in links.route_spans()
        with pytest.raises(rtnl.NetlinkError, match=r"10.9.0.1/24.*exists"):
            links.apply(rtnl.add_address(bridge.ifindex, interface))
        with pytest.raises(rtnl.NetlinkError, match="link nothere") as caught:
            links.apply(rtnl.change_link("nothere", up=True))
        assert caught.value.errno == 19
        # a batch continues after a failure, and reports which request failed
        outcomes = links.outcomes(
            [rtnl.delete_link("nothere"), rtnl.change_link("b0", up=False), rtnl.delete_link("no2")]
        )
        assert [outcome is None for outcome in outcomes] == [False, True, False]
        outcomes = links.outcomes(rtnl.delete_link(f"none{number}") for number in range(1000))
        assert {outcome.errno for outcome in outcomes if outcome} == {19}
        links.apply(*(rtnl.create_bridge(f"many{number}", mac="02:42:00:00:00:0a") for number in range(40)))
        assert len(links.links()) == 42
        assert await asyncio.to_thread(_oracle) == {link.name for link in links.links()}
        links.apply(rtnl.delete_link("b0"), *(rtnl.delete_link(f"many{number}") for number in range(40)))


async def _threads(_: Path) -> None:
    """Entering and leaving namespaces affects only the calling thread, also if the block fails."""
    home = os.stat("/proc/thread-self/ns/net").st_ino
    await asyncio.to_thread(int)  # a thread started inside would start in the new namespace
    with namespaces.new_network() as descriptor:
        assert os.stat("/proc/thread-self/ns/net").st_ino == os.fstat(descriptor).st_ino != home
        assert await asyncio.to_thread(lambda: os.stat("/proc/thread-self/ns/net").st_ino) == home
    assert os.stat("/proc/thread-self/ns/net").st_ino == home
    os.close(descriptor)
    kept = []
    with pytest.raises(ZeroDivisionError), namespaces.new_network() as descriptor:
        kept.append(descriptor)
        raise ZeroDivisionError
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(kept[0])
    assert os.stat("/proc/thread-self/ns/net").st_ino == home


async def _netfilter(_: Path) -> None:
    if not netfilter.available():
        return
    netfilter.run("add table inet t\nadd chain inet t c")
    with pytest.raises(netfilter.NetfilterError, match="No such file"):
        netfilter.run("add chain inet t d\nadd rule inet t nothere accept")
    assert "chain d" not in netfilter.run("list table inet t")
    netfilter.run("delete table inet t")


# --- endpoints ------------------------------------------------------------------------------------


async def _endpoints(directory: Path) -> None:
    async with network(directory) as bridge:
        assert str(bridge.subnet) == "172.17.0.0/16"
        one = await bridge.endpoint("one")
        two = await bridge.endpoint("two", "02-42-AA-00-00-07")
        assert one.endpoint.ip_address == "172.17.0.2"
        assert one.endpoint.mac_address == "02:42:ac:11:00:02"
        assert one.endpoint.gateway == "172.17.0.1"
        assert one.endpoint.ip_prefix_len == 16
        assert one.endpoint.network_id == bridge.get("bridge").record.id
        assert two.endpoint.mac_address == "02:42:aa:00:00:07"
        assert len(one.endpoint.endpoint_id) == 64
        for source, target in ((one, "172.17.0.3"), (two, "172.17.0.2"), (one, "172.17.0.1"), (one, "127.0.0.1")):
            assert reaches(source, target), (source, target)
        links = [line.split()[-1] for line in inside(one, "cat", "/proc/net/if_inet6").stdout.splitlines()]
        assert links == ["lo"], "IPv6 is off inside, but for the loopback"

        assert sandboxes.host_end(one.endpoint.endpoint_id) in await asyncio.to_thread(_oracle)
        shown = inside(one, "ip", "-o", "link").stdout
        assert "02:42:ac:11:00:02" in shown and "eth0" in shown
        assert "default via 172.17.0.1 dev eth0" in inside(one, "ip", "route").stdout
        await bridge.leave("one")
        await bridge.leave("one")
        await until(lambda: sandboxes.host_end(one.endpoint.endpoint_id) not in _links(), "veth of one gone")
        three = await bridge.endpoint("three")
        assert three.endpoint.ip_address == "172.17.0.4", "a freed address rests"
        assert reaches(three, "172.17.0.3")


async def _neighbours(directory: Path) -> None:
    """Host and containers know each other in advance, by entries that the kernel does not count:
    those of all namespaces together may be 1,024.
    """
    records = Records(directory / "state.db")
    before = Engine(Config(), records)
    await before.open()
    await before.create(NetworkCreate(name="six", enable_ipv6=True))
    one, two, ended = [await before.endpoint(each, on="six") for each in ("one", "two", "ended")]
    bridge, gateway = before.get("six").bridge, before.get("six").link.address
    for sandbox in (one, two, ended):
        given = sandbox.endpoint
        for address in (given.gateway, given.ipv6_gateway):
            assert _neighbour("eth0", address, sandbox) == (gateway, True)
        for address in (given.ip_address, given.global_ipv6_address):
            known = given.mac_address, True
            await until(lambda to=address, known=known: _neighbour(bridge, to) == known, "the host knows it")
        assert reaches(sandbox, given.gateway) and reaches(sandbox, given.ipv6_gateway)

    # A MAC that changes is learned from the container's own question.
    other = "02:00:00:00:00:77"
    assert inside(one, "ip", "link", "set", "eth0", "address", other).returncode == 0
    assert reaches(one, one.endpoint.gateway)
    assert _neighbour(bridge, one.endpoint.ip_address) == (other, True)

    # Entries of containers that end without a daemon go with the next one, and no others.
    _ip("neigh", "add", "10.255.255.1", "lladdr", other, "dev", bridge, "extern_learn")
    async with _sleeping_in(one) as container:
        await before.close(remove=False)
        after = Engine(Config(), records)
        await after.open()
        process = Process(container.pid, os.pidfd_open(container.pid))
        after.restore(endpoints.Sandbox("one", "one"), {"six": one.endpoint}, process)
        assert _neighbour(bridge, ended.endpoint.ip_address)
        await after.settle()
        for each in (two, ended):
            assert not _neighbour(bridge, each.endpoint.ip_address)
            assert not _neighbour(bridge, each.endpoint.global_ipv6_address)
        assert _neighbour(bridge, "10.255.255.1") == (other, True)
        assert _neighbour(bridge, one.endpoint.ip_address) == (other, True)
        os.close(process.pidfd)
        container.kill()
        container.wait()
        await after.leave("one")
    for address in (one.endpoint.ip_address, one.endpoint.global_ipv6_address):
        await until(lambda to=address: not _neighbour(bridge, to), "the host has forgotten it")
    await after.close(remove=True)
    records.close()


def _neighbour(link: str, address: str, of: Sandbox | None = None) -> tuple[str, bool] | None:
    """The MAC of a neighbour, and whether it was known in advance; None if there is no entry."""
    argv = "ip", "neigh", "show", address, "dev", link
    shown = inside(of, *argv) if of else subprocess.run(argv, capture_output=True, text=True, check=True)
    words = shown.stdout.split()
    return (words[words.index("lladdr") + 1], "extern_learn" in words) if "lladdr" in words else None


async def _nat(directory: Path) -> None:
    """The outside world is a second namespace without a route to the containers, so only
    masqueraded packets are answered.
    """
    with RouteSocket() as links:
        with namespaces.new_network() as outside:
            far = RouteSocket()
        links.apply(rtnl.create_veth("up0", "far0", outside), rtnl.change_link("up0", up=True))
        near_link = links.link("up0")
        far_link = far.link("far0")
        assert near_link and far_link
        links.apply(rtnl.add_address(near_link.ifindex, IPv4Interface("203.0.113.1/24")))
        far.apply(
            rtnl.change_link("far0", up=True),
            rtnl.change_link("lo", up=True),
            rtnl.add_address(far_link.ifindex, IPv4Interface("203.0.113.9/24")),
        )
        async with network(directory, bridge="b-1.x") as bridge:
            one = await bridge.endpoint("one")
            there = Sandbox(f"/proc/{os.getpid()}/fd/{outside}", one.endpoint)
            assert reaches(one, "203.0.113.9") == netfilter.available()
            if netfilter.available():
                # with a route back, unsolicited packets still do not reach it
                far.apply(rtnl.add_default_route(IPv4Address("203.0.113.1"), far_link.ifindex))
                result = inside(there, "busybox", "ping", "-c", "1", "-W", "1", "172.17.0.2")
                assert result.returncode != 0, result.stdout
            links.apply(rtnl.delete_link("up0"))
        far.close()
        os.close(outside)


async def _subnets(directory: Path) -> None:
    with RouteSocket() as links:
        links.apply(rtnl.create_bridge("lan", mac="02:00:00:00:00:01"), rtnl.change_link("lan", up=True))
        lan = links.link("lan")
        assert lan
        links.apply(rtnl.add_address(lan.ifindex, IPv4Interface("172.17.44.1/24")))
        records = Records(directory / "a.db")
        first = Engine(Config(bridge="e1"), records)
        await first.open()
        second = Engine(Config(bridge="e2", bridge_subnet="10.77.0.5/24"), records)
        await second.open()
        assert str(first.subnet) == "172.18.0.0/16", "172.17 is a route of the host"
        assert (str(second.subnet), second.host_gateway) == ("10.77.0.0/24", "10.77.0.5")
        given = {(await second.endpoint(str(number))).endpoint.ip_address for number in range(6)}
        assert given == {f"10.77.0.{number}" for number in (1, 2, 3, 4, 6, 7)}, "the gateway's own is never given"
        assert first.get("host").record == second.get("host").record, "ids are the records'"
        await first.close(remove=True)
        assert links.link("e1") is None
        assert links.link("e2") is not None, "the other engine's bridge stays"
        await second.close(remove=True)
        records.close()
        # another program's bridge is used with its own address and not modified
        records = Records(directory / "b.db")
        adopting = Engine(Config(bridge="lan", bridge_subnet="10.1.0.0/16"), records)
        await adopting.open()
        assert str(adopting.subnet) == "172.17.44.0/24"
        assert (await adopting.endpoint("x")).endpoint.ip_address == "172.17.44.2"
        await adopting.close(remove=True)
        records.close()
        assert links.link("lan") is not None
        with namespaces.new_network() as other:
            pass
        links.apply(rtnl.create_veth("v0", "v1", other))
        records = Records(directory / "c.db")
        wrong = Engine(Config(bridge="v0"), records)
        with pytest.raises(ServerError, match=r"v0.*not a bridge"):
            await wrong.open()
        await wrong.close(remove=True)
        records.close()
        os.close(other)


@contextlib.asynccontextmanager
async def _sleeping_in(sandbox: Sandbox) -> AsyncIterator[subprocess.Popen[bytes]]:
    container = await asyncio.to_thread(subprocess.Popen, ["nsenter", f"--net={sandbox.path}", "sleep", "600"])
    try:
        await until(
            lambda: os.path.samestat(os.stat(f"/proc/{container.pid}/ns/net"), os.stat(sandbox.path)), "sleep is inside"
        )
        yield container
    finally:
        container.kill()
        container.wait()


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True)


async def _routes(directory: Path) -> None:
    """Those of a VPN are wider than networks; what is on a link, or not wider, is avoided."""
    _ip("link", "add", "lan", "address", "02:00:00:00:00:01", "type", "bridge")
    _ip("tuntap", "add", "dev", "tun0", "mode", "tun")
    for link in ("lan", "tun0"):
        _ip("link", "set", link, "up")
    _ip("address", "add", "203.0.113.2/24", "dev", "lan")
    _ip("-6", "address", "add", "2001:db8::2/64", "dev", "lan", "nodad")
    for wide in ("default", "0.0.0.0/1", "128.0.0.0/1", "192.168.0.0/16"):
        _ip("route", "add", wide, "via", "203.0.113.1")
    _ip("route", "add", "172.16.0.0/12", "dev", "tun0")
    _ip("route", "add", "172.18.0.0/24", "dev", "tun0")
    _ip("route", "add", "172.18.1.0/25", "nexthop", "via", "203.0.113.1", "nexthop", "via", "203.0.113.3")
    _ip("route", "add", "172.18.2.0/23", "dev", "lan", "table", "7")
    _ip("-6", "route", "add", "fd00::/16", "via", "2001:db8::1")
    _ip("-6", "route", "add", "fd00:1::/64", "via", "2001:db8::1")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("engine.networks.drivers").addHandler(handler)
    records = Records(directory / "vpn.db")
    engine = Engine(Config(bridge="e1"), records)
    await engine.open()
    assert str(engine.subnet) == "172.17.0.0/16"
    await engine.create(NetworkCreate(name="mine"))
    assert str(engine.get("mine").pools[4].subnet) == "172.18.4.0/24"
    await engine.close(remove=False)
    assert not warnings
    _ip("route", "add", "172.18.4.128/25", "via", "203.0.113.1")
    engine = Engine(Config(bridge="e1"), records)
    await engine.open()
    assert str(engine.get("mine").pools[4].subnet) == "172.18.4.0/24", "it is kept"
    assert warnings == ["network mine: a route of this host hides a part of its subnet 172.18.4.0/24"]
    await engine.close(remove=True)
    records.close()

    records = Records(directory / "pools.db")
    pools = "base=10.9.0.0/23,size=24", "base=fd00:1::/63,size=64"
    engine = Engine(Config(bridge="e2", address_pools=pools), records)
    await engine.open()
    assert str(engine.subnet) == "10.9.0.0/24"
    await engine.create(NetworkCreate(name="both", enable_ipv6=True))
    assert [str(pool.subnet) for pool, _ in engine.get("both").subnets] == ["10.9.1.0/24", "fd00:1:0:1::/64"]
    for body, words in (
        (NetworkCreate(name="more"), r"network more: .*IPv4 .*--default-address-pool"),
        (NetworkCreate(name="more", enable_ipv4=False, enable_ipv6=True), r"network more: .*IPv6 .*fully subnetted"),
    ):
        with pytest.raises(ServerError, match=words):
            await engine.create(body)
    await engine.remove("both")
    await engine.create(NetworkCreate(name="more"))
    await engine.close(remove=True)
    records.close()


async def _restart(directory: Path) -> None:
    """A daemon that ended leaves running containers connected; the next daemon knows their
    addresses."""
    records = Records(directory / "state.db")
    before = Engine(Config(), records)
    await before.open()
    sandbox = await before.endpoint("old")
    async with _sleeping_in(sandbox) as container:
        ids = {each.record.name: each.record.id for each in before}
        await before.close(remove=False)
        after = Engine(Config(), records)
        await after.open()
        assert {each.record.name: each.record.id for each in after} == ids
        assert after.subnet == before.subnet
        process = Process(container.pid, os.pidfd_open(container.pid))
        after.restore(endpoints.Sandbox("old", "old"), {"bridge": sandbox.endpoint}, process)
        assert after.inspected(after.get("bridge")).containers["old"].ipv4_address == "172.17.0.2/16"
        new = await after.endpoint("new")
        assert new.endpoint.ip_address == "172.17.0.3"
        assert reaches(new, "172.17.0.2")
        container.kill()
        container.wait()
        await after.leave("old")
        await until(lambda: sandboxes.host_end(sandbox.endpoint.endpoint_id) not in _links(), "veth gone")
        await after.close(remove=True)
    records.close()
    await until(lambda: _links() == ["lo"], "links gone")


async def _deleted(directory: Path) -> None:
    """An operator deletes bridges. The next container that needs one gets it, and earlier
    containers are reconnected.
    """
    async with network(directory) as networks:
        await networks.create(
            msgspec.convert({"Name": "own", "Options": {"com.docker.network.driver.mtu": "1400"}}, NetworkCreate)
        )
        for name in ("bridge", "own"):
            first, second = [await networks.endpoint(f"{name}{number}", on=name) for number in range(2)]
            assert reaches(first, second.endpoint.ip_address)
            with RouteSocket() as links:
                deleted = links.link(networks.get(name).bridge)
                links.apply(rtnl.delete_link(deleted.name))
                third = await networks.endpoint(f"{name}2", on=name)
                assert links.link(deleted.name).ifindex != deleted.ifindex
            assert third.endpoint.gateway == first.endpoint.gateway
            for sandbox in (first, second):
                assert reaches(third, sandbox.endpoint.ip_address)
                assert reaches(sandbox, third.endpoint.ip_address)
                assert reaches(sandbox, sandbox.endpoint.gateway)


async def _deleted_and_back(directory: Path) -> None:
    """An operator deletes bridges. They are recreated at once, with all their endpoints. Bridges of
    other programs and of removed networks are not."""
    async with network(directory) as networks:
        with RouteSocket() as links:
            links.apply(rtnl.create_bridge("theirs", mac="02:00:00:00:00:01"))
        for name in ("own", "six", "lent", "removed"):
            body = {"Name": name, "EnableIPv6": name == "six"}
            if name == "lent":
                body["Options"] = {"com.docker.network.bridge.name": "theirs"}
            await networks.create(msgspec.convert(body, NetworkCreate))
        removed = networks.get("removed").bridge
        await networks.remove("removed")
        await until(lambda: not _index(removed), "the removed network's bridge is gone")
        with RouteSocket() as links:
            links.apply(rtnl.delete_link("theirs"))
        for name in ("bridge", "own", "six"):
            first, second = [await networks.endpoint(f"{name}{number}", on=name) for number in range(2)]
            pairs = [(first, second), (second, first)]
            addresses = [one.endpoint.gateway for one, _ in pairs] + [other.endpoint.ip_address for _, other in pairs]
            if name == "six":
                addresses += [first.endpoint.global_ipv6_address, first.endpoint.ipv6_gateway]
            for _ in range(3):
                with RouteSocket() as links:
                    before = links.link(networks.get(name).bridge)
                    links.apply(rtnl.delete_link(before.name))
                await until(lambda before=before: _index(before.name) not in (0, before.ifindex), "the bridge is back")
                for address in addresses:
                    await until(lambda one=second, to=address: reaches(one, to), f"{address} is reached")
                assert _setting(f"ipv4/conf/{before.name}/route_localnet") == "1"
        # Their notices came before those of the recreated bridges.
        assert not _index("theirs") and not _index(removed)
        # Many at once, while one network is removed, and all of them at the end.
        made = [networks.get(name).bridge for name in ("bridge", "own", "six")]
        for container in [*networks.get("own").sandboxes]:
            await networks.leave(container)
        with RouteSocket() as links:
            links.apply(*(rtnl.delete_link(each) for each in made))
        await networks.remove("own")
        await until(lambda: [bool(_index(each)) for each in made] == [True, False, True], "only the others are back")
        with RouteSocket() as links:
            links.apply(*(rtnl.delete_link(each) for each in (made[0], made[2])))


async def _deleted_while_it_returns(directory: Path) -> None:
    """A bridge is deleted again before all its endpoints are restored. Waiting callers get a bridge
    that has them."""
    async with network(directory) as networks:
        first = await networks.endpoint("first")
        bridges = networks.drivers.bridges
        assert bridges is not None
        plug, gone = bridges.replug, []

        def replug(found: Any, link: Any) -> None:
            if not gone:
                gone.append(link.ifindex)
                with RouteSocket() as links:
                    links.apply(rtnl.delete_link(link.name))
            plug(found, link)

        bridges.replug = replug  # type: ignore[method-assign]
        with RouteSocket() as links:
            links.apply(rtnl.delete_link("engined0"))
        second = await networks.endpoint("second")
        assert gone and _index("engined0") not in (0, *gone)
        assert reaches(second, first.endpoint.ip_address)
        assert reaches(first, first.endpoint.gateway)


def _index(name: str) -> int:
    """Index of the link of that name; 0 when there is none."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def _setting(name: str) -> str:
    return Path(f"/proc/sys/net/{name}").read_text().strip()


async def _removals(_: Path) -> None:
    """Changes of all links except veths are reported, and nothing else."""
    with namespaces.new_network() as elsewhere:
        pass
    removals = rtnl.Removals()
    with RouteSocket() as links:
        assert removals.take() == set()
        links.apply(rtnl.create_bridge("b", mac="02:00:00:00:00:01"), rtnl.create_veth("veth1", "x", elsewhere))
        links.apply(rtnl.create_veth("vethereal", "y", elsewhere), rtnl.create_veth("a", "z", elsewhere))
        indexes = {name: _index(name) for name in ("a", "b", "veth1")}
        links.apply(rtnl.change_link("veth1", master=indexes["b"], up=True), rtnl.change_link("veth1", master=0))
        links.apply(rtnl.delete_link("veth1"))
        assert removals.take() == set()
        links.apply(rtnl.delete_link("a"), rtnl.delete_link("b"))
        assert removals.take() == {indexes["a"], indexes["b"]}
        with socket.socket(fileno=os.dup(removals.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        for _ in range(20):  # more than the buffer holds
            links.apply(rtnl.create_bridge("b", mac="02:00:00:00:00:01"), rtnl.delete_link("b"))
        assert removals.take() is None
        assert removals.take() == set()
    removals.close()
    os.close(elsewhere)


async def _deleted_meanwhile(directory: Path) -> None:
    """A bridge deleted while no daemon ran is recreated with its containers."""
    records = Records(directory / "state.db")
    before = Engine(Config(), records)
    await before.open()
    sandbox = await before.endpoint("old")
    async with _sleeping_in(sandbox) as container:
        await before.close(remove=False)
        with RouteSocket() as links:
            links.apply(rtnl.delete_link("engined0"))
        after = Engine(Config(), records)
        await after.open()
        process = Process(container.pid, os.pidfd_open(container.pid))
        after.restore(endpoints.Sandbox("old", "old"), {"bridge": sandbox.endpoint}, process)
        await after.settle()
        assert reaches(await after.endpoint("new"), sandbox.endpoint.ip_address)
        container.kill()
        container.wait()
        await after.leave("old")
        await after.close(remove=True)
    records.close()


async def _failures(directory: Path) -> None:
    async with network(directory, bridge_subnet="10.5.0.0/29") as bridge:
        for number in range(5):
            await bridge.endpoint(str(number))
        with pytest.raises(ServerError, match="no available IPv4 addresses"):
            await bridge.endpoint("more")
        await bridge.leave("3")
        assert (await bridge.endpoint("more")).endpoint.ip_address == "10.5.0.5"
        await bridge.leave("2")
        # the kernel refuses: the address is released
        original = sandboxes.ReadySandbox.configure

        def refuse(self: sandboxes.ReadySandbox, *_: object) -> None:
            raise rtnl.NetlinkError(12, "address: Cannot allocate memory")

        sandboxes.ReadySandbox.configure = refuse  # type: ignore[method-assign]
        for _ in range(20):
            with pytest.raises(ServerError, match=r"container one.*Cannot allocate"):
                await bridge.endpoint("one")
        sandboxes.ReadySandbox.configure = original  # type: ignore[method-assign]
        assert (await bridge.endpoint("one")).endpoint.ip_address == "10.5.0.4"
        await bridge.leave("1")
        # a cancelled caller leaves nothing
        for _ in range(20):
            starting = asyncio.ensure_future(bridge.endpoint("given-up"))
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        await bridge.endpoint("last")
        with pytest.raises(NotFound, match="network nothere not found"):
            await bridge.endpoint("x", on="nothere")
    records = Records(directory / "wrong.db")
    for wrong in (
        {"bridge": "a/b"},
        {"bridge": "x" * 16},
        {"bridge_subnet": "10.0.0.0/33"},
        {"bridge_subnet": "10.0.0.0/31"},
    ):
        with pytest.raises(InvalidParameter):
            Engine(Config(**wrong), records)
    records.close()


async def _concurrent(directory: Path) -> None:
    async with network(directory) as bridge:
        made = await asyncio.gather(*(bridge.endpoint(str(number)) for number in range(120)))
        assert len({sandbox.endpoint.ip_address for sandbox in made}) == 120
        assert len({sandbox.path for sandbox in made}) == 120
        assert reaches(made[0], made[-1].endpoint.ip_address)
        await asyncio.gather(*(bridge.leave(str(number)) for number in range(120)))


async def _lingering(directory: Path) -> None:
    """A process keeps the namespace alive. The veth's end on the host is deleted nevertheless."""
    sandboxes.LINGER = 0.2
    async with network(directory) as bridge:
        sandbox = await bridge.endpoint("held")
        descriptor = os.open(sandbox.path, os.O_RDONLY)
        await bridge.leave("held")
        await until(lambda: sandboxes.host_end(sandbox.endpoint.endpoint_id) not in _links(), "veth deleted")
        os.close(descriptor)


async def _full(directory: Path) -> None:
    async with network(directory, bridge_trunks=False) as bridge:
        await bridge.endpoint("first")
        await bridge.endpoint("last-of-all")
        count = 2
        with pytest.raises(ServerError, match="all 1023 ports of bridge engined0") as caught:
            for number in range(2000):
                await bridge.endpoint(str(number))
                count += 1
        assert isinstance(caught.value.__cause__, sandboxes.BridgeFull)
        assert count >= 1000
        await bridge.leave("first")

        async def one_more() -> bool:
            with contextlib.suppress(ServerError):
                await bridge.endpoint("more")
                return True
            return False

        end = time.monotonic() + 60
        while not await one_more():
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        for container in [*bridge.get("bridge").sandboxes]:
            await bridge.leave(container)


# --- router advertisements ------------------------------------------------------------------------


def _checksum(source: bytes, target: bytes, message: bytes) -> int:
    data = source + target + struct.pack("!II", len(message), socket.IPPROTO_ICMPV6) + message
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def advertise(container: Sandbox) -> None:
    """The packet that radvd or an attacker with CAP_NET_RAW sends: a default router and a prefix
    for addresses (RFC 4861, 4.2)."""
    source = bytes.fromhex("fe80000000000000ffffffffffffff01")
    target = bytes.fromhex("ff020000000000000000000000000001")
    prefix = struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 86400, 14400, 0) + bytes.fromhex("20010db8bad00bad") + bytes(8)
    message = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + prefix
    message = message[:2] + struct.pack("!H", _checksum(source, target, message)) + message[4:]
    packet = struct.pack("!IHBB", 6 << 28, len(message), socket.IPPROTO_ICMPV6, 255) + source + target + message
    mac = bytes.fromhex(container.endpoint.mac_address.replace(":", ""))
    with open(container.path, "rb") as namespace, namespaces.inside_network(namespace.fileno()):
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        with wire:
            wire.bind(("eth0", 0))
            for _ in range(3):
                wire.send(bytes.fromhex("333300000001") + mac + b"\x86\xdd" + packet)


def _configured_by(container: Sandbox) -> list[str]:
    """Addresses and routes of the host made from the container's router advertisements."""
    advertise(container)
    time.sleep(0.3)  # the kernel applies them at once
    found = subprocess.run(["ip", "-6", "route"], capture_output=True, text=True, check=True).stdout.splitlines()
    found += subprocess.run(["ip", "-6", "-o", "addr"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if "proto ra" in line or "2001:db8:bad" in line]


def _set(path: str, value: str) -> None:
    (Path("/proc/sys/net") / path).write_text(value)


async def _router_advertisements(directory: Path) -> None:
    """A container cannot give the host a route or an address (CVE-2020-13401)."""
    if not host.HAS_IPV6:
        return
    for setting in ("accept_ra", "autoconf", "accept_redirects"):
        _set(f"ipv6/conf/default/{setting}", "1")
    _set("ipv6/conf/all/forwarding", "0")
    with RouteSocket() as links:
        links.apply(rtnl.create_bridge("uplink0", mac="02:42:00:00:00:77"), rtnl.change_link("uplink0", up=True))
        links.apply(rtnl.create_bridge("deaf0", mac="02:42:00:00:00:78"))
        _set("ipv6/conf/deaf0/accept_ra", "0")
        async with network(directory) as networks:
            one = await networks.endpoint("one")
            assert _configured_by(one) == []
            # IPv6 forwarding is enabled for the first network that needs it.
            assert _setting("ipv6/conf/all/forwarding") == "0"
            await networks.create(
                msgspec.convert(
                    {"Name": "six", "EnableIPv6": True, "IPAM": {"Config": [{"Subnet": "fd00:6::/64"}]}}, NetworkCreate
                )
            )
            assert _setting("ipv6/conf/all/forwarding") == "1"
            two, made = await networks.endpoint("two", on="six"), networks.get("six").bridge
            accepting = {
                name: _setting(f"ipv6/conf/{name}/accept_ra") for name in os.listdir("/proc/sys/net/ipv6/conf")
            }
            assert accepting.pop("uplink0") == "2", "the host's own link goes on accepting them"
            assert accepting.pop("deaf0") == "0", "one that did not accept them does not begin to"
            assert (accepting.pop("all"), accepting.pop("default"), accepting.pop("lo")) == ("1", "1", "2")
            ends = {sandboxes.host_end(each.endpoint.endpoint_id) for each in (one, two)}
            # not those of sandboxes in stock, which may be in the making
            assert {"engined0", made} | ends <= accepting.keys()
            for name in {"engined0", made} | ends:
                for setting in ("accept_ra", "autoconf", "accept_redirects"):
                    assert _setting(f"ipv6/conf/{name}/{setting}") == "0", (name, setting)
            assert _configured_by(one) == _configured_by(two) == []
            # The rules hold even where an operator's sysctl applies to the bridge.
            if netfilter.available():
                for name in ("engined0", made):
                    _set(f"ipv6/conf/{name}/accept_ra", "2")
                    _set(f"ipv6/conf/{name}/autoconf", "1")
                assert _configured_by(one) == _configured_by(two) == []
                netfilter.run("delete table inet engined-engined0")
                assert _configured_by(two), "without either they would be taken: this test can fail"
            links.apply(rtnl.delete_link("uplink0"), rtnl.delete_link("deaf0"))


async def _advertisements_to_an_adopted_bridge(directory: Path) -> None:
    """On a pre-existing bridge the host may configure its own addresses: its settings are not
    changed."""
    if not host.HAS_IPV6:
        return
    with RouteSocket() as links:
        links.apply(rtnl.create_bridge("mine0", mac="02:42:00:00:00:77"), rtnl.change_link("mine0", up=True))
        _set("ipv6/conf/mine0/accept_ra", "2")
        async with network(directory) as networks:
            await networks.create(
                msgspec.convert({"Name": "mine", "Options": {"com.docker.network.bridge.name": "mine0"}}, NetworkCreate)
            )
            assert _setting("ipv6/conf/mine0/accept_ra") == "2"
            one = await networks.endpoint("one", on="mine")
            # the kernel may take a second to see that the bridge has a carrier
            assert any(_configured_by(one) for _ in range(20))
            await networks.leave("one")
            await networks.remove("mine")
            links.apply(rtnl.delete_link("mine0"))


@pytest.mark.parametrize(
    "body",
    [
        _netlink,
        _removals,
        _threads,
        _netfilter,
        _endpoints,
        _neighbours,
        _nat,
        _subnets,
        _routes,
        _restart,
        _deleted,
        _deleted_and_back,
        _deleted_while_it_returns,
        _deleted_meanwhile,
        _failures,
        _concurrent,
        _lingering,
        _full,
        _router_advertisements,
        _advertisements_to_an_adopted_bridge,
    ],
    ids=lambda body: body.__name__.strip("_"),
)
def test_bridge(body: Body, tmp_path: Path) -> None:
    isolated(body, tmp_path)


def test_host_is_untouched() -> None:
    """The tests above have changed nothing outside their namespaces."""
    own = {
        "engined0",
        "b-1.x",
        "e1",
        "e2",
        "lan",
        "v0",
        "theirs",
    }  # other engines on this host may start and stop meanwhile
    assert own.isdisjoint(name for _, name in socket.if_nameindex())
