"""User networks on the real kernel: their state after a restart of the daemon, a reboot and a
crash, and the undo of failures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import threading
import time
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import Forbidden, InvalidParameter, ServerError
from engine.networks import endpoints, host, sandboxes
from engine.networks.bridge.driver import BridgeDriver
from engine.networks.endpoints import Network
from engine.system import links as system_links
from engine.system import namespaces
from engine.system.netlink import rtnl
from engine.system.netlink.codec import NetlinkError
from engine.system.netlink.rtnl import RouteSocket
from engine.wire.containers import EndpointSettings
from engine.wire.networks import NetworkCreate
from tests.support.engine.harness import BREATH, TempEngine, links, until
from tests.system.test_bridge import Body, Process, Sandbox, inside, isolated, network, reaches

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def body(name: str, *subnets: str, **fields: Any) -> NetworkCreate:
    ipam = {"Config": [{"Subnet": subnet} for subnet in subnets]}
    return msgspec.convert({"Name": name, "IPAM": ipam} | fields, NetworkCreate)


def bridges() -> set[str]:
    return {name for name in links() if name.startswith("br-")}


# --- in namespaces of the test's own --------------------------------------------------------------


async def _traffic(directory: Path) -> None:
    """Both IP versions, several networks at once, and the default route through the right one."""
    async with network(directory) as networks:
        await networks.create(body("six", "10.1.0.0/24", "fd01::/64", EnableIPv6=True))
        await networks.create(body("automatic", EnableIPv6=True))
        await networks.create(body("inner", "10.2.0.0/24", Internal=True))
        one = await networks.endpoint("one", on="six", IPAMConfig={"LinkLocalIPs": ["169.254.7.7"]})
        both = await networks.join(
            endpoints.Sandbox("both", "both"),
            {name: EndpointSettings() for name in ("automatic", "inner", "six", "bridge")},
            "inner",
        )
        assert both.path
        two = Sandbox(both.path, both.endpoints["six"])
        names = [
            line.split(":")[1].strip().split("@")[0] for line in inside(two, "ip", "-o", "link").stdout.splitlines()
        ]
        assert names == ["lo", "eth0", "eth1", "eth2", "eth3"]
        assert "10.2.0.2/24" in inside(two, "ip", "addr", "show", "eth0").stdout, (
            "the network of its NetworkMode is first"
        )
        assert both.endpoints["inner"].gateway == ""
        unique = both.endpoints["automatic"].global_ipv6_address
        assert unique.startswith("fd")
        assert f"default via {both.endpoints['automatic'].gateway} " in inside(two, "ip", "route").stdout
        assert "169.254.7.7/16" in inside(one, "ip", "addr").stdout
        for target in ("10.1.0.1", two.endpoint.ip_address, two.endpoint.global_ipv6_address, "fd01::1", "::1"):
            assert reaches(one, target), target
        lines = inside(await networks.endpoint("four"), "cat", "/proc/net/if_inet6").stdout.splitlines()
        assert [line.split()[-1] for line in lines] == ["lo"], "IPv6 is off elsewhere"
        for container in ("one", "both", "four"):
            await networks.leave(container)


async def _gateway_modes(directory: Path) -> None:
    """Another host reaches every port of an unprotected network, and none of another one. The host
    is not on an isolated network."""
    mode = "com.docker.network.bridge.gateway_mode_ipv"
    with namespaces.new_network() as lan:
        far = RouteSocket()
    with RouteSocket() as kernel:
        kernel.apply(rtnl.create_veth("lan0", "far0", lan), rtnl.change_link("lan0", up=True))
        here, there = kernel.link("lan0"), far.link("far0")
        assert here and there
        kernel.apply(rtnl.add_address(here.ifindex, IPv4Interface("192.0.2.254/24")))
        far.apply(rtnl.change_link("far0", up=True), rtnl.add_address(there.ifindex, IPv4Interface("192.0.2.1/24")))
        far.apply(rtnl.add_default_route(IPv4Address("192.0.2.254"), there.ifindex))
        async with network(directory) as networks:
            await networks.create(body("open", "10.1.0.0/24", Options={f"{mode}4": "nat-unprotected"}))
            await networks.create(body("shut", "10.2.0.0/24"))
            options = {f"{mode}4": "isolated", f"{mode}6": "isolated"}
            await networks.create(
                body("alone", "10.3.0.0/24", "fd03::/64", EnableIPv6=True, Internal=True, Options=options)
            )
            found = {name: await networks.endpoint(name, on=name) for name in ("open", "shut", "alone")}
            other = await networks.endpoint("other", on="alone")
            host = Sandbox(f"/proc/{os.getpid()}/fd/{lan}", found["open"].endpoint)
            assert reaches(host, "10.1.0.2") and not reaches(host, "10.2.0.2")
            assert reaches(found["shut"], "192.0.2.1")
            assert reaches(other, found["alone"].endpoint.ip_address)
            assert reaches(other, found["alone"].endpoint.global_ipv6_address)
            assert not reaches(other, "10.3.0.1")
            link = kernel.link(networks.get("alone").bridge)
            assert link and not kernel.addresses(link.ifindex)
            for name in (*found, "other"):
                await networks.leave(name)
            for name in found:
                await networks.remove(name)
            kernel.apply(rtnl.delete_link("lan0"))
    far.close()
    os.close(lan)


async def _macvlan(directory: Path) -> None:
    """A container directly on the LAN, seen there by its own MAC address."""
    with namespaces.new_network() as lan:
        far = RouteSocket()
    # the LAN: a veth pair whose far end is another host
    with RouteSocket() as kernel:
        kernel.apply(rtnl.create_veth("lan0", "far0", lan), rtnl.change_link("lan0", up=True))
        there = far.link("far0")
        assert there
        far.apply(rtnl.change_link("far0", up=True), rtnl.add_address(there.ifindex, IPv4Interface("192.0.2.1/24")))
        async with network(directory) as networks:
            with pytest.raises(InvalidParameter, match="parent link 'nothere'"):
                await networks.create(body("no", "192.0.2.0/24", Driver="macvlan", Options={"parent": "nothere"}))
            await networks.create(body("lan", "192.0.2.0/24", Driver="macvlan", Options={"parent": "lan0"}))
            one = await networks.endpoint("one", on="lan")
            assert one.endpoint.ip_address == "192.0.2.2"
            assert reaches(one, "192.0.2.1")
            assert "default via 192.0.2.1" in inside(one, "ip", "route").stdout
            seen = Sandbox(f"/proc/{os.getpid()}/fd/{lan}", one.endpoint)
            assert one.endpoint.mac_address in inside(seen, "ip", "neigh").stdout
            two = await networks.endpoint("two")
            held = await asyncio.to_thread(subprocess.Popen, ["nsenter", f"--net={two.path}", "sleep", "600"])
            process = Process(held.pid, os.pidfd_open(held.pid))
            await networks.connect("two", "lan", EndpointSettings(), process)
            assert reaches(two, "192.0.2.2"), "mode bridge"
            await networks.disconnect("two", "lan")
            assert "eth1" not in inside(two, "ip", "link").stdout
            held.kill()
            held.wait()
            os.close(process.pidfd)
            await networks.leave("one")
            await networks.leave("two")
            with pytest.raises(Forbidden, match="network lan is already using parent interface lan0"):
                await networks.create(body("again", "192.0.3.0/24", Driver="macvlan", Options={"parent": "lan0"}))
            await networks.remove("lan")
            kernel.apply(rtnl.delete_link("lan0"))
    far.close()
    os.close(lan)


async def _ipvlan(directory: Path) -> None:
    """A container on the LAN behind its parent's MAC address, or an error without the driver."""
    with namespaces.new_network() as lan:
        far = RouteSocket()
    with RouteSocket() as kernel:
        kernel.apply(rtnl.create_veth("lan0", "far0", lan), rtnl.change_link("lan0", up=True))
        there, parent = far.link("far0"), kernel.link("lan0")
        assert there and parent
        far.apply(rtnl.change_link("far0", up=True), rtnl.add_address(there.ifindex, IPv4Interface("192.0.2.1/24")))
        probe = rtnl.create_ipvlan("probe", parent=parent.ifindex, namespace=lan, mode="l2", flag="bridge")
        (missing,) = kernel.outcomes([probe])
        async with network(directory) as networks:
            options = {"Driver": "ipvlan", "Options": {"parent": "lan0"}}
            await networks.create(body("lan", "192.0.2.0/24", **options))
            if missing is not None:
                with pytest.raises(ServerError, match="network lan: this kernel has no ipvlan"):
                    await networks.endpoint("one", on="lan")
            else:
                far.apply(rtnl.delete_link("probe"))
                one = await networks.endpoint("one", on="lan")
                assert (one.endpoint.ip_address, one.endpoint.mac_address) == ("192.0.2.2", "")
                assert reaches(one, "192.0.2.1")
                assert "default via 192.0.2.1" in inside(one, "ip", "route").stdout
                seen = Sandbox(f"/proc/{os.getpid()}/fd/{lan}", one.endpoint)
                assert parent.address in inside(seen, "ip", "neigh").stdout
                await networks.leave("one")
            await networks.remove("lan")
            options["Options"]["ipvlan_mode"] = "l3"  # type: ignore[index]
            await networks.create(body("routed", "192.0.3.0/24", **options))
            if missing is None:
                two = await networks.endpoint("two", on="routed")
                assert "default dev eth0" in inside(two, "ip", "route").stdout
                await networks.leave("two")
            await networks.remove("routed")
            kernel.apply(rtnl.delete_link("lan0"))
    far.close()
    os.close(lan)


async def _macvlan_parents(directory: Path) -> None:
    """A VLAN of an existing link, or a dummy link without a parent, is created for a network and
    removed with it; existing links stay."""
    with namespaces.new_network() as lan:
        far = RouteSocket()
    with RouteSocket() as kernel:

        def plug_in() -> int:
            kernel.apply(rtnl.create_veth("lan0", "far0", lan), rtnl.change_link("lan0", up=True))
            far.apply(rtnl.change_link("far0", up=True))
            link = kernel.link("lan0")
            assert link
            return link.ifindex

        index, here = plug_in(), namespaces.network()

        def parents() -> set[str]:
            return {name for name in links() if name.startswith(("lan0.", "dm-"))}

        def vlan(name: str, parent: str, subnet: str = "192.0.2.0/24") -> NetworkCreate:
            return body(name, subnet, Driver="macvlan", Options={"parent": parent})

        async with network(directory) as networks:
            for parent in ("nothere.10", "lan0.0", "lan0.4095", "lan0.x", "lan0.", "lan0.1.2", "lo", "x" * 16, "é" * 8):
                with pytest.raises(InvalidParameter, match="network no: parent link"):
                    await networks.create(vlan("no", parent))
            try:
                await asyncio.to_thread(system_links.create, "probe", "dummy")
                kernel.apply(rtnl.delete_link("probe"))
            except NetlinkError:  # then the error says so, and existing links replace both kinds
                for wanted, kind in ((vlan("no", "lan0.10"), "vlan"), (body("no", Driver="macvlan"), "dummy")):
                    with pytest.raises(ServerError, match=f"network no: parent link.*no links of the kind {kind}"):
                        await networks.create(wanted)

                def instead(name: str, kind: str, **_: object) -> None:
                    mac = f"02:00:00:00:00:{len(links()):02x}"
                    kernel.apply(rtnl.create_macvlan(name, parent=index, namespace=here, mode="bridge", mac=mac))

                system_links.create = instead
            assert not parents()
            await networks.create(vlan("ten", "lan0.10"))
            # A failure after the link was created removes it again.
            add = networks._store.add

            def refuse(*_: object) -> None:
                raise ServerError("refused")

            networks._store.add = refuse  # type: ignore[method-assign, assignment]
            for wanted in (vlan("no", "lan0.11", "192.0.3.0/24"), body("no", Driver="macvlan")):
                with pytest.raises(ServerError, match="refused"):
                    await networks.create(wanted)
            networks._store.add = add  # type: ignore[method-assign]
            await networks.create(body("alone", "192.0.4.0/24", Driver="macvlan"))
            await networks.create(
                body("inner", "192.0.5.0/24", Driver="macvlan", Internal=True, Options={"parent": "lan0"})
            )
            made = {"lan0.10", *(f"dm-{networks.get(name).record.id[:12]}" for name in ("alone", "inner"))}
            assert parents() == made
            for name in ("ten", "alone", "inner"):
                two, three = await networks.endpoint("two", on=name), await networks.endpoint("three", on=name)
                assert reaches(two, three.endpoint.ip_address)
                assert ("default" in inside(two, "ip", "route").stdout) == (name == "ten")
                await networks.leave("two")
                await networks.leave("three")
            alias = networks.drivers.alias
            kernel.apply(rtnl.delete_link("lan0"))
        # The next daemon recreates them, and removes links with its alias that have no record.
        index = plug_in()
        kernel.apply(
            rtnl.create_bridge("dm-orphan", mac="02:00:00:00:00:0c"), rtnl.change_link("dm-orphan", alias=alias)
        )
        async with network(directory) as networks:
            assert parents() == made
            for name in ("ten", "alone", "inner"):
                await networks.remove(name)
            assert not parents()
            kernel.apply(rtnl.create_bridge("lan0.12", mac="02:00:00:00:00:0d"))
            await networks.create(vlan("mine", "lan0.12"))
            await networks.remove("mine")
            assert parents() == {"lan0.12"}, "what was there stays"
            kernel.apply(rtnl.delete_link("lan0.12"), rtnl.delete_link("lan0"))
    far.close()
    os.close(lan)
    os.close(here)


async def _no_names(directory: Path) -> None:
    """A container in which a network's resolver cannot be started is not connected to the network:
    its links, routes and addresses are unchanged."""
    async with network(directory) as networks:
        await networks.create(body("a", "10.3.0.0/29"))
        one = await networks.endpoint("one")
        held = await asyncio.to_thread(subprocess.Popen, ["nsenter", f"--net={one.path}", "sleep", "600"])
        process = Process(held.pid, os.pidfd_open(held.pid))
        before = [inside(one, "ip", *what).stdout for what in (("-o", "link"), ("-o", "addr"), ("route",))]
        served = networks._resolver.open_for

        async def refuse(*_: object, **__: object) -> None:
            raise ServerError("no resolver on 127.0.0.11: refused")

        networks._resolver.open_for = refuse  # type: ignore[method-assign, assignment]
        for _ in range(10):  # more attempts than the network has addresses
            with pytest.raises(ServerError, match="no resolver"):
                await networks.connect("one", "a", EndpointSettings(), process)
            assert [inside(one, "ip", *what).stdout for what in (("-o", "link"), ("-o", "addr"), ("route",))] == before
            assert not networks.get("a").sandboxes
        networks._resolver.open_for = served  # type: ignore[method-assign]
        await networks.connect("one", "a", EndpointSettings(), process)
        assert reaches(one, "10.3.0.1")
        assert networks._resolver.serves("one")
        held.kill()
        held.wait()
        os.close(process.pidfd)
        await networks.leave("one")


async def _undone(directory: Path) -> None:
    """Nothing of a network or an endpoint is left, whichever step fails."""
    async with network(directory) as networks:
        await networks.create(body("first", "10.3.0.0/29"))
        await networks.create(body("second", "10.4.0.0/29"))
        before = bridges()
        # a network: its rules, its record
        for part, name in ((networks.drivers.filter, "add_network"), (networks.networks._store, "add")):
            original = getattr(part, name)

            def refuse(*_: object) -> None:
                raise ServerError("refused")

            setattr(part, name, refuse)
            with pytest.raises(ServerError, match="refused"):
                await networks.create(body("third"))
            setattr(part, name, original)
            assert bridges() == before
        with pytest.raises(Forbidden, match="Pool overlaps"):
            await networks.create(body("third", "10.3.0.0/16"))
        # an endpoint: the second of two networks is full, or the kernel refuses
        wanted = {"first": EndpointSettings(), "second": EndpointSettings()}
        for number in range(5):
            await networks.endpoint(f"filler{number}", on="second")
        for _ in range(10):
            with pytest.raises(ServerError, match=r"no available IPv4 addresses.*second"):
                await networks.join(endpoints.Sandbox("new", "new"), wanted, "first")
        assert not networks.get("first").sandboxes
        await networks.leave("filler0")
        plug = sandboxes.plug

        def fail(*_: object) -> str:
            raise NetlinkError(12, "veth: Cannot allocate memory")

        sandboxes.plug = fail
        for _ in range(10):
            with pytest.raises(ServerError, match=r"network second, container new.*Cannot allocate"):
                await networks.join(endpoints.Sandbox("new", "new"), wanted, "first")
        sandboxes.plug = plug
        joined = await networks.join(endpoints.Sandbox("new", "new"), wanted, "first")
        assert {name: each.ip_address for name, each in joined.endpoints.items()}.keys() == wanted.keys()
        for container_id in [*networks._sandboxes]:
            await networks.leave(container_id)
        with pytest.raises(Forbidden, match="bridge lo"):
            await networks.create(body("third", Options={"engine.network.bridge.name": "lo"}))


async def _adopted(directory: Path) -> None:
    """A pre-existing bridge is used by its name, and left unchanged when its network is removed."""

    def localnet() -> str:
        return Path("/proc/sys/net/ipv4/conf/mine0/route_localnet").read_text().strip()

    def addresses() -> set[str]:
        bridge = kernel.link("mine0")
        assert bridge is not None
        return {str(each.interface) for each in kernel.addresses(bridge.ifindex)}

    with RouteSocket() as kernel:
        kernel.apply(rtnl.create_bridge("mine0", mac="02:00:00:00:00:01"))
        own = kernel.link("mine0")
        assert own is not None
        kernel.apply(rtnl.add_address(own.ifindex, IPv4Interface("10.5.1.1/24")))
        async with network(directory) as networks:
            await networks.create(body("mine", "10.5.0.0/24", Options={"engine.network.bridge.name": "mine0"}))
            one = await networks.endpoint("one", on="mine")
            assert reaches(one, "10.5.0.1")
            assert (addresses(), localnet()) == ({"10.5.1.1/24", "10.5.0.1/24"}, "1")
            with pytest.raises(Forbidden, match="bridge name mine0 is already used"):
                await networks.create(body("other", Options={"engine.network.bridge.name": "mine0"}))
            await networks.leave("one")
            await networks.remove("mine")
            assert (addresses(), localnet()) == ({"10.5.1.1/24"}, "0")
            await networks.create(body("own", "10.5.1.0/24", Options={"engine.network.bridge.name": "mine0"}))
            assert addresses() == {"10.5.1.1/24"}
            await networks.remove("own")
            assert addresses() == {"10.5.1.1/24"}, "what was there stays"
            kernel.apply(rtnl.delete_link("mine0"))


async def _swept(directory: Path) -> None:
    """Bridges of this engine without a record are removed at start; those of another engine
    stay."""
    async with network(directory) as networks:
        await networks.create(body("kept"))
        kept = networks.get("kept").bridge
        alias = networks.drivers.alias
        with RouteSocket() as kernel:
            for name, text in (("br-orphan", alias), ("br-other", "engined 0123456789ab")):
                kernel.apply(rtnl.create_bridge(name, mac="02:00:00:00:00:01"), rtnl.change_link(name, alias=text))
            host.sweep(kernel, kernel.links(), alias, {kept})
            assert "br-orphan" not in links()
            assert {kept, "br-other"} <= links().keys()
            kernel.apply(rtnl.delete_link("br-other"))


async def _taken_by_another(directory: Path) -> None:
    """Another engine uses the same subnet at the same moment. The younger link is removed."""
    async with network(directory) as networks:
        original = BridgeDriver._contested
        seen: list[str] = []

        def contested(self: BridgeDriver, made: Network) -> bool:
            seen.append(str(made.pools[4].subnet))
            return len(seen) < 3

        BridgeDriver._contested = contested  # type: ignore[method-assign]
        await networks.create(body("mine"))
        BridgeDriver._contested = original  # type: ignore[method-assign]
        assert seen == ["172.18.0.0/24", "172.18.1.0/24", "172.18.2.0/24"]
        assert str(networks.get("mine").pools[4].subnet) == "172.18.2.0/24"
        assert bridges() == {networks.get("mine").bridge}


@pytest.mark.parametrize(
    "scene",
    [
        _traffic,
        _gateway_modes,
        _macvlan,
        _ipvlan,
        _macvlan_parents,
        _no_names,
        _undone,
        _adopted,
        _swept,
        _taken_by_another,
    ],
    ids=lambda scene: scene.__name__.strip("_"),
)
def test_networks(scene: Body, tmp_path: Path) -> None:
    isolated(scene, tmp_path)


# --- with a daemon that dies ----------------------------------------------------------------------


def create(engine: TempEngine, name: str, **fields: Any) -> str:
    answer = engine.request("POST", "/v1.24/networks/create", {"Name": name} | fields)
    assert answer.status == 201, answer
    engine.networks()
    return str(answer.json()["Id"])


def inspect(engine: TempEngine, name: str) -> Any:
    answer = engine.request("GET", f"/v1.24/networks/{name}")
    assert answer.status == 200, answer
    return answer.json()


def own_bridges(engine: TempEngine) -> set[str]:
    """Bridges of user networks with this engine's alias."""
    mark = f"engined {inspect(engine, 'bridge')['Id'][:12]}"
    return {name for name, link in links().items() if link.get("ifalias") == mark}


def test_networks_outlive_the_daemon(own_engine: TempEngine) -> None:
    engine = own_engine
    create(engine, "one", IPAM={"Config": [{"Subnet": "10.215.0.0/24"}]})
    create(engine, "two")
    fixed = {"NetworkingConfig": {"EndpointsConfig": {"one": {"IPAMConfig": {"IPv4Address": "10.215.0.7"}}}}}
    container = engine.started("sleep", "600", network="one", name="stays", **fixed)
    peer = engine.started("sleep", "600", network="two", name="peer")
    for name in ("two", "bridge"):
        answer = engine.request("POST", f"/v1.24/networks/{name}/connect", {"Container": container})
        assert answer.status == 200, answer
    settings = engine.inspect(container)["NetworkSettings"]
    before = [inspect(engine, name) for name in ("one", "two", "bridge")]
    address = engine.inspect(peer)["NetworkSettings"]["Networks"]["two"]["IPAddress"]
    descriptors = engine.descriptors()
    for _ in range(2):
        engine.restart()
        assert engine.inspect(container)["NetworkSettings"] == settings
        assert [inspect(engine, name) for name in ("one", "two", "bridge")] == before
        assert "1 packets received" in engine.docker("exec", "stays", "ping", "-c", "1", "-W", "5", address).out
    assert engine.request("DELETE", "/v1.24/networks/two").status == 403
    taken = {each["IPv4Address"] for each in inspect(engine, "two")["Containers"].values()}
    other = engine.started("true", network="two")
    assert engine.wait(other) == 0
    assert len(taken) == 2
    answer = engine.request("POST", "/v1.24/networks/two/disconnect", {"Container": container})
    assert answer.status == 200, answer
    assert "eth1" not in engine.docker("exec", "stays", "ip", "link").out
    answer = engine.request("POST", "/v1.24/networks/two/connect", {"Container": container})
    assert answer.status == 200, answer
    assert "1 packets received" in engine.docker("exec", "stays", "ping", "-c", "1", "-W", "5", address).out
    engine.remove_all()
    until("its bridges are down", lambda: not own_bridges(engine))
    until("descriptors are closed", lambda: engine.descriptors() <= descriptors + BREATH)


def test_networks_come_back_after_a_reboot(own_engine: TempEngine) -> None:
    engine = own_engine
    create(engine, "kept", Options={"com.docker.network.driver.mtu": "1300"}, Labels={"a": "b"})
    before = inspect(engine, "kept")
    container = engine.started("sleep", "600", network="kept", name="again", host={"RestartPolicy": {"Name": "always"}})
    assert own_bridges(engine) == {f"br-{before['Id'][:12]}"}
    engine.reboot()
    until("it runs again", lambda: inspect(engine, "kept")["Containers"].keys() == {container})
    until("its process runs", lambda: engine.inspect(container)["State"]["Status"] == "running")
    after = inspect(engine, "kept")
    after.pop("Containers")
    assert after == {name: value for name, value in before.items() if name != "Containers"}
    assert own_bridges(engine) == {f"br-{before['Id'][:12]}"}
    gateway = before["IPAM"]["Config"][0]["Gateway"]
    assert "1 packets received" in engine.docker("exec", "again", "ping", "-c", "1", "-W", "5", gateway).out


def test_a_crash_leaves_no_bridge(own_engine: TempEngine) -> None:
    """The daemon is killed at random times while networks are created and removed. Afterwards every
    bridge has its record, and every record its bridge."""
    engine, chance = own_engine, random.Random(7)
    for round_ in range(5):
        stopped = threading.Event()

        def come_and_go(worker: int, round_: int = round_, stopped: threading.Event = stopped) -> None:
            number = 0
            with contextlib.suppress(OSError, ValueError, AssertionError):
                while not stopped.is_set():
                    name = f"n{round_}-{worker}-{number}"
                    engine.request("POST", "/v1.24/networks/create", {"Name": name})
                    if number % 3:
                        engine.request("DELETE", f"/v1.24/networks/{name}")
                    number += 1

        workers = [threading.Thread(target=come_and_go, args=(each,)) for each in range(3)]
        for worker in workers:
            worker.start()
        time.sleep(0.2 + chance.random() / 2)
        engine.kill9()
        stopped.set()
        for worker in workers:
            worker.join()
        engine.start()
        recorded = {f"br-{identifier[:12]}" for identifier in engine.networks().values()}
        assert own_bridges(engine) == recorded
    subnets = [inspect(engine, name)["IPAM"]["Config"][0]["Subnet"] for name in engine.networks()]
    assert len(set(subnets)) == len(subnets)
    for name in engine.networks():
        assert engine.request("DELETE", f"/v1.24/networks/{name}").status == 204
    until("the last bridges are down", lambda: not own_bridges(engine))


def test_removed_and_made_again_at_once(own_engine: TempEngine) -> None:
    """A bridge is removed after the response. A request for the same name or subnet waits for that,
    and a crash leaves nothing of it."""
    engine = own_engine
    options = {"com.docker.network.bridge.name": f"{engine.bridge[:10]}a"}
    for _ in range(5):
        create(engine, "again", IPAM={"Config": [{"Subnet": "10.216.0.0/24"}]}, Options=options)
        assert engine.request("DELETE", "/v1.24/networks/again").status == 204
        create(engine, "other", IPAM={"Config": [{"Subnet": "10.216.0.0/16"}]})
        assert engine.request("DELETE", "/v1.24/networks/other").status == 204
    create(engine, "again", IPAM={"Config": [{"Subnet": "10.216.0.0/24"}]}, Options=options)
    container = engine.started("sleep", "600", network="again", name="reaches")
    assert "1 packets received" in engine.docker("exec", container, "ping", "-c", "1", "-W", "5", "10.216.0.1").out
    for number in range(20):
        create(engine, f"n{number}")
    for number in range(20):
        assert engine.request("DELETE", f"/v1.24/networks/n{number}").status == 204
    engine.restart()
    until("only the one that is there has a bridge", lambda: own_bridges(engine) == {options[next(iter(options))]})
    for number in range(20):
        create(engine, f"n{number}")
    engine.remove_all()
