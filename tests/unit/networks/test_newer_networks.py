"""`Networks` on a host without a kernel: what API 1.25 and newer have."""

from __future__ import annotations

import asyncio
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.common.pruning import Selection
from engine.errors import Conflict, Forbidden, InvalidParameter, NotFound, ServerError
from engine.networks import host
from engine.networks.dns import messages as dns
from engine.networks.endpoints import Sandbox
from engine.networks.ipam import NETWORK_POOLS
from engine.networks.network import NetworkRecord, NetworkStore
from engine.storage.records import Records
from engine.system.netlink.codec import NetlinkError
from engine.wire.containers import EndpointIPAMConfig, EndpointSettings
from tests.unit.networks.fakes import Host
from tests.unit.networks.test_networks import ANY, PORTS, PROCESS, body, opened, snapshot, world

__all__ = ["world"]


def test_prune(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            for name, labels in (("old", {}), ("kept", {"keep": "1"}), ("busy", {}), ("stuck", {})):
                await networks.create(body(name, Labels=labels))
            await networks.join(Sandbox("c", "c"), {"busy": ANY}, "busy")
            assert await networks.prune(Selection(until_ns=1)) == []
            assert [each.record.name for each in await networks.prune(Selection(labels=("keep=1",)))] == ["kept"]
            await networks.create(body("kept", Labels={"keep": "1"}))
            removed = NetworkStore.remove

            async def refused(store: NetworkStore, record: NetworkRecord) -> None:
                assert (await asyncio.gather(networks.prune(Selection()), return_exceptions=True))[
                    0
                ].__class__ is Conflict
                if record.name == "stuck":
                    raise ServerError("the disk is full")
                await removed(store, record)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(NetworkStore, "remove", refused)
                gone = await networks.prune(Selection(not_labels=("keep",)))
            assert [each.record.name for each in gone] == ["old"]
            assert sorted(each.record.name for each in networks if not each.record.predefined) == [
                "busy",
                "kept",
                "stuck",
            ]
            await networks.leave("c")
            assert len(await networks.prune(Selection())) == 3
            event = networks.networks._events.history(0)[-1]
            assert (event.type, event.action) == ("network", "prune")
            assert (event.actor.id, event.actor.attributes) == ("", {"reclaimed": "0"})

    asyncio.run(run())


def test_options_that_an_earlier_version_ignored_have_no_effect(
    world: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("old", Options={"com.docker.network.driver.mtu": "1400"}))
            record = networks.networks.get("old").record
            refused = {"com.docker.network.bridge.gateway_mode_ipv4": "routed", "engine.network.host_ipv4": "1.2.3.4"}
        records = Records(tmp_path / "state.db")
        table = records.table("network", NetworkRecord)
        older = msgspec.structs.replace(record, options=record.options | refused)
        await records.commit(table.put(record.id, older))
        records.close()
        async with opened(tmp_path) as networks:
            found = networks.networks.get("old")
            assert found.record.options.keys() > refused.keys() and found.options.mtu == 1400
        assert caplog.text.count(": ignored") == len(refused)

    asyncio.run(run())


def test_what_host_gateway_means(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, bridge_subnet="10.9.0.5/24") as networks:
            assert networks.host_gateways() == ["10.9.0.5"]

    asyncio.run(run())


def test_a_network_without_ipv4(world: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HAS_IPV6", True)

    async def run() -> None:
        async with opened(tmp_path) as networks:
            before = snapshot(networks, world)
            await networks.create(body("six", EnableIPv4=False, EnableIPv6=True))
            six = networks.get("six")
            (pool,) = six.record.ipam.config
            assert (six.record.enable_ipv4, [*six.pools]) == (False, [6])
            assert pool.subnet.startswith("fd") and pool.gateway
            settings = (await networks.join(Sandbox("c", "c", request=PORTS), {"six": ANY}, "six")).endpoints["six"]
            assert (settings.ip_address, settings.ip_prefix_len, settings.gateway) == ("", 0, "")
            assert settings.ipv6_gateway == pool.gateway and settings.mac_address.startswith("02:42:")
            (inside,) = [each for each in world.namespaces.values() if each]
            assert [str(each.ip) for each in inside["eth0"].addresses] == [settings.global_ipv6_address]
            (port,) = await networks.opened("c")
            assert port.host_ip == "::"
            (shown,) = networks.inspected(six).containers.values()
            assert (shown.ipv4_address, shown.ipv6_address) == ("", f"{settings.global_ipv6_address}/64")
            status = networks.inspected(six).status
            assert status.ipam.subnets[pool.subnet].ips_in_use == 3
            await networks.leave("c")
            assert networks.inspected(six).status.ipam.subnets[pool.subnet].ips_in_use == 2
            await networks.remove("six")
            await asyncio.gather(*(task for _, task in networks._going.values()))
            assert snapshot(networks, world) == before

    asyncio.run(run())


def test_a_subnet_with_room_for_one_container(world: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HAS_IPV6", True)

    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("two", EnableIPv6=True, IPAM=_pools("10.9.0.0/31", "fd77:5::/127")))
            for name in "ab":
                given = (await networks.join(Sandbox(name, name), {"two": ANY}, "two")).endpoints["two"]
                assert (given.gateway, given.ip_address, given.ip_prefix_len) == ("10.9.0.0", "10.9.0.1", 31)
                assert (given.ipv6_gateway, given.global_ipv6_address) == ("fd77:5::", "fd77:5::1")
                with pytest.raises(ServerError, match="no available IPv4 addresses"):
                    await networks.join(Sandbox("c", "c"), {"two": ANY}, "two")
                await networks.leave(name)

    asyncio.run(run())


def test_a_subnet_of_a_size(world: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.0.0.0/26 and ::/120 ask for any subnet of that size."""
    monkeypatch.setattr(host, "HAS_IPV6", True)

    async def run() -> None:
        async with opened(tmp_path) as networks:
            found = []
            for name in ("one", "two"):
                await networks.create(body(name, EnableIPv6=True, IPAM=_pools("0.0.0.0/26", "::/120")))
                found.append([ip_network(each.subnet) for each in networks.get(name).record.ipam.config])
            for four, six in found:
                assert four.prefixlen == 26 and any(four.subnet_of(pool.base) for pool in NETWORK_POOLS)
                assert six.prefixlen == 120 and six.subnet_of(ip_network("fd00::/8"))
            assert not any(a.version == b.version and a.overlaps(b) for a in found[0] for b in found[1])
            static = EndpointSettings(ipam_config=EndpointIPAMConfig(ipv4_address=str(found[0][0][5])))
            with pytest.raises(InvalidParameter, match="only when connecting to networks with user configured subnets"):
                await networks.join(Sandbox("c", "c"), {"one": static}, "one")
            for subnet, kind, words in (
                ("0.0.0.0/8", ServerError, "non-overlapping IPv4 address pool"),
                ("::/56", InvalidParameter, "none larger than a /64"),
            ):
                with pytest.raises(kind, match=words):
                    await networks.create(body("large", EnableIPv6=":" in subnet, IPAM=_pools(subnet)))

    asyncio.run(run())


_SWITCHED_OFF = {"com.docker.network.endpoint.sysctls": "net.ipv6.conf.IFNAME.disable_ipv6=1"}


def _pools(*subnets: str) -> dict[str, Any]:
    return {"Config": [{"Subnet": subnet} for subnet in subnets]}


def test_an_endpoint_whose_ipv6_is_switched_off(world: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no address that would not work, and none that other containers resolve."""
    monkeypatch.setattr(host, "HAS_IPV6", True)
    fixed = EndpointIPAMConfig(ipv6_address="fd77:5::9", link_local_ips=["fe80::9"])

    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("both", EnableIPv6=True, IPAM=_pools("10.9.0.0/24", "fd77:5::/64")))
            await networks.create(body("six", "fd77:6::/64", EnableIPv4=False, EnableIPv6=True))
            own = EndpointSettings(driver_opts=_SWITCHED_OFF, ipam_config=fixed)
            for container, settings, ipv6 in (("a", own, True), ("b", ANY, False)):
                given = (
                    await networks.join(Sandbox(container, container, ipv6=ipv6), {"both": settings}, "both")
                ).endpoints
                shown = given["both"]
                assert shown.ip_address and shown.gateway
                assert (shown.global_ipv6_address, shown.global_ipv6_prefix_len, shown.ipv6_gateway) == ("", 0, "")
            for inside in world.namespaces.values():
                assert [each.version for link in inside.values() for each in link.addresses] == [4]
            assert len(networks.get("both").pools[6]) == 0
            await networks.create(body("more", EnableIPv6=True, IPAM=_pools("10.8.0.0/24", "fd77:8::/64")))
            assert not (await networks.connect("b", "more", ANY, PROCESS)).global_ipv6_address
            alone = (await networks.join(Sandbox("c", "c", ipv6=False), {"six": ANY}, "six")).endpoints["six"]
            assert not alone.ip_address and not alone.global_ipv6_address and alone.mac_address
            for each in "abc":
                await networks.leave(each)

    asyncio.run(run())


def test_a_configuration_network(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("conf", "10.1.0.0/24", ConfigOnly=True, Labels={"a": "b"}))
            with pytest.raises(NotFound, match="configuration network 'other' not found"):
                await networks.create(body("net", ConfigFrom={"Network": "other"}))
            await networks.create(body("net", ConfigFrom={"Network": "conf"}))
            shown = networks.shown(networks.get("net"))
            assert (shown.config_from.network, shown.labels, shown.ipam.config[0].subnet) == (
                "conf",
                {"a": "b"},
                "10.1.0.0/24",
            )
            conf = networks.inspected(networks.get("conf"))
            assert (conf.config_only, conf.driver, conf.status) == (True, "null", msgspec.UNSET)
            for attempt in (
                networks.join(Sandbox("c", "c"), {"conf": ANY}, "conf"),
                networks.remove("conf"),
            ):
                with pytest.raises(Forbidden, match="configuration network"):
                    await attempt
            with pytest.raises(Forbidden, match="configuration network"):
                networks.check("c", "conf", ANY, [])
            assert [each.record.name for each in await networks.prune(Selection())] == ["net"]
        async with opened(tmp_path) as networks:
            assert networks.get("conf").record.config_only
            await networks.remove("conf")

    asyncio.run(run())


def test_ipvlan(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        world.add_link("lan0", "")
        async with opened(tmp_path) as networks:
            options = {"Options": {"parent": "lan0", "ipvlan_mode": "l3"}}
            await networks.create(body("lan", "10.1.0.0/24", Driver="ipvlan", **options))
            await networks.create(body("a", "10.2.0.0/24"))
            before = snapshot(networks, world)
            with pytest.raises(InvalidParameter, match="ipvlan interfaces do not support custom mac"):
                networks.check("c", "lan", EndpointSettings(mac_address="02:42:00:00:00:01"), [])
            settings = (await networks.join(Sandbox("c", "c"), {"lan": ANY, "a": ANY}, "lan")).endpoints["lan"]
            assert (settings.ip_address, settings.gateway, settings.mac_address) == ("10.1.0.2", "", "")
            assert "ipvlan eth0" in world.steps and "route by eth0: [4]" in world.steps
            await networks.disconnect("c", "lan")
            (inside,) = [each for each in world.namespaces.values() if each]
            assert [*inside] == ["eth1"]
            await networks.leave("c")
            assert snapshot(networks, world) == before

            def refused(what: str) -> None:
                if what.startswith("ipvlan"):
                    raise NetlinkError(95, what)

            world.fail = refused
            with pytest.raises(ServerError, match="network lan: this kernel has no ipvlan"):
                await networks.join(Sandbox("c", "c"), {"lan": ANY}, "lan")
            assert snapshot(networks, world) == before
            world.fail = lambda _: None

    asyncio.run(run())


def test_names_of_interfaces(world: Host, tmp_path: Path) -> None:
    def named(name: str) -> EndpointSettings:
        return EndpointSettings(driver_opts={"com.docker.network.endpoint.ifname": name})

    async def run() -> None:
        async with opened(tmp_path) as networks:
            for name in "abc":
                await networks.create(body(name))
            before = snapshot(networks, world)
            with pytest.raises(InvalidParameter, match="cannot be named front"):
                await networks.join(Sandbox("c", "c"), {"a": named("front"), "b": named("front")}, "a")
            assert snapshot(networks, world) == before
            joined = await networks.join(Sandbox("c", "c"), {"b": named("eth0"), "a": ANY, "c": named("back")}, "a")
            with pytest.raises(InvalidParameter, match="the container has an interface back already"):
                await networks.connect("c", "bridge", named("back"), PROCESS)
            (inside,) = [each for each in world.namespaces.values() if "back" in each]
            addresses = {name: str(each.addresses[0].ip) for name, each in inside.items()}
            assert addresses == {
                "eth1": joined.endpoints["a"].ip_address,
                "eth0": joined.endpoints["b"].ip_address,
                "back": joined.endpoints["c"].ip_address,
            }

    asyncio.run(run())


def test_names_follow_the_container(world: Host, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as networks:
            await networks.create(body("a"))
            wanted = {"a": EndpointSettings(aliases=["x", "host"]), "bridge": ANY}
            joined = await networks.join(Sandbox("c" * 64, "one", hostname="host"), wanted, "a")
            assert joined.endpoints["a"].dns_names == ["one", "x", "host", "c" * 12]
            assert joined.endpoints["a"].aliases == ["x", "host"] and joined.endpoints["bridge"].dns_names is None
            networks.renamed("c" * 64, "two")
            networks._names.add(
                *["seen"],
                **{"network_id": networks.get("a").record.id, "network": "a", "container_id": "seen"},
                **{"names": ["seen"], "addresses": []},
            )
            assert networks._names.find("seen", dns.encoded("two") or b"")
            assert networks._names.find("seen", dns.encoded("host") or b"")
            assert not networks._names.find("seen", dns.encoded("one") or b"")

    asyncio.run(run())
