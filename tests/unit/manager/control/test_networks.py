"""The verbs of networks, and the networks and ports of services."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from engine.errors import Conflict, EngineError, Forbidden, InvalidParameter, NotFound, ServerError, Unimplemented
from engine.manager.control import context
from engine.manager.control.context import Precondition
from engine.manager.records import (
    ATTACHMENTS,
    CLAIMS,
    CLUSTER,
    MANAGERS,
    NETWORKS,
    POOLS_CLAIM,
    SERVICE_STATUS,
    SERVICES,
    TASKS,
    Attached,
    AttachmentRecord,
    ManagerPresence,
    ServiceStatus,
    Task,
    port_claim,
)
from engine.manager.store import Delete, Put, Store
from engine.swarm_session.states import TaskState
from engine.wire.services import Endpoint, VirtualIP
from tests.support.fakes.clock import FakeClock
from tests.support.fakes.etcd import FakeEtcd
from tests.unit.manager.control.conftest import NODE, Swarm


def body(name: str = "net", **fields: Any) -> dict[str, Any]:
    return {"Name": name, "Driver": "overlay", **fields}


def subnets(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"IPAM": {"Config": [{"Subnet": text, **fields} for text in texts]}}


def spec(name: str = "web", networks: list[str] | None = None, ports: list[dict[str, Any]] | None = None) -> Any:
    found: dict[str, Any] = {"Name": name, "TaskTemplate": {"ContainerSpec": {"Image": "busybox"}}}
    if networks:
        found["TaskTemplate"]["Networks"] = [{"Target": each} for each in networks]
    if ports is not None:
        found["EndpointSpec"] = {"Ports": ports}
    return found


async def made(swarm: Swarm, name: str = "net", **fields: Any) -> str:
    """The id of a new network."""
    return str((await swarm.networks_create(body=body(name, **fields)))["Id"])


async def service(swarm: Swarm, *arguments: Any, **keywords: Any) -> str:
    return str((await swarm.services_create(body=spec(*arguments, **keywords)))["ID"])


async def update(swarm: Swarm, key: str, body: Any, **query: Any) -> None:
    version = (await swarm.services_inspect(key))["Version"]["Index"]
    await swarm.services_update(key, body=body, version=version, **query)


async def test_a_swarm_begins_with_the_network_ingress(swarm: Swarm) -> None:
    await swarm.found()
    [ingress] = await swarm.networks_list()
    assert (ingress["Name"], ingress["Driver"], ingress["Scope"], ingress["Ingress"]) == (
        "ingress", "overlay", "swarm", True,
    )  # fmt: skip
    assert ingress["IPAM"]["Config"] == [{"Subnet": "10.255.0.0/16", "Gateway": "10.255.0.1"}]
    assert ingress["Options"]["com.docker.network.driver.overlay.vxlanid_list"] == "4096"


async def test_create_and_inspect(swarm: Swarm) -> None:
    await swarm.found()
    key = await made(swarm, Labels={"a": "b"}, Attachable=True, Internal=True, Options={"x": "y"})
    assert len(key) == 25
    for text in (key, key[:8], "net"):
        found = await swarm.networks_inspect(text)
        assert found["Id"] == key
    assert found["Labels"] == {"a": "b"} and found["Attachable"] and found["Internal"] and not found["Ingress"]
    assert found["IPAM"] == {
        "Driver": "default", "Options": None, "Config": [{"Subnet": "10.0.0.0/20", "Gateway": "10.0.0.1"}],
    }  # fmt: skip
    assert found["Options"] == {"x": "y", "com.docker.network.driver.overlay.vxlanid_list": "4097"}
    assert found["Containers"] == {} and found["Peers"] == [] and "Services" not in found
    again = await swarm.networks_inspect(await made(swarm, "other"))
    assert again["IPAM"]["Config"][0]["Subnet"] == "10.0.16.0/20"
    with pytest.raises(NotFound, match="network nope not found"):
        await swarm.networks_inspect("nope")
    with pytest.raises(Conflict, match="network with name net already exists"):
        await made(swarm)


async def test_subnets_keep_away_from_nodes_and_the_ingress(swarm: Swarm) -> None:
    await swarm.found()
    await swarm.node("w1", subnets=("10.0.0.0/9", "bad", "fd00::/64"))
    await swarm.node("w2", subnets=("10.128.0.1/10", "10.192.0.0/11", "10.224.0.0/12", "10.240.0.0/13"))
    found = [await swarm.networks_inspect(await made(swarm, f"n{number}")) for number in range(2)]
    assert [each["IPAM"]["Config"][0]["Subnet"] for each in found] == ["10.248.0.0/20", "10.248.16.0/20"]
    await swarm.node("w3", subnets=("10.248.0.0/14", "10.252.0.0/15", "10.254.0.0/16"))
    with pytest.raises(Forbidden, match=r"no /20 of 10.0.0.0/8 is free"):
        await made(swarm, "more")


async def test_pools_of_the_swarm(swarm: Swarm) -> None:
    await swarm.found()
    entry = swarm.store.get(CLUSTER)
    assert entry is not None
    record = replace(entry.record, address_pool=("192.168.0.0/23", "172.20.5.0/24"), subnet_size=25)
    await swarm.store.commit([Put(CLUSTER, "", record)])
    found = [(await swarm.networks_inspect(await made(swarm, f"n{number}"))) for number in range(6)]
    assert [each["IPAM"]["Config"][0]["Subnet"] for each in found] == [
        "192.168.0.0/25", "192.168.0.128/25", "192.168.1.0/25", "192.168.1.128/25", "172.20.5.0/25", "172.20.5.128/25",
    ]  # fmt: skip
    with pytest.raises(Forbidden, match=r"no /25 of 192.168.0.0/23, 172.20.5.0/24 is free"):
        await made(swarm, "more")
    shown = await swarm.swarm_inspect()
    assert (shown["DefaultAddrPool"], shown["SubnetSize"]) == (["192.168.0.0/23", "172.20.5.0/24"], 25)


async def test_given_subnets(swarm: Swarm) -> None:
    await swarm.found()
    pool = {"Subnet": "172.30.0.0/24", "IPRange": "172.30.0.128/25", "AuxiliaryAddresses": {"router": "172.30.0.1"}}
    other = {"Subnet": "172.30.1.0/24", "Gateway": "172.30.1.254"}
    key = await made(swarm, IPAM={"Config": [{}, pool, other]})
    assert (await swarm.networks_inspect(key))["IPAM"]["Config"] == [pool | {"Gateway": "172.30.0.2"}, other]
    with pytest.raises(Forbidden, match=r"172\.30\.0\.0/24 of network net"):
        await made(swarm, "other", **subnets("172.30.0.0/16"))
    with pytest.raises(Forbidden, match="Pool overlaps with other one on this address space"):
        await made(swarm, "other", **subnets("10.255.7.0/24"))


async def test_a_subnet_of_a_size(swarm: Swarm) -> None:
    await swarm.found()
    key = await made(swarm, **subnets("0.0.0.0/24"))
    assert (await swarm.networks_inspect(key))["IPAM"]["Config"] == [{"Subnet": "10.0.0.0/24", "Gateway": "10.0.0.1"}]
    key = await made(swarm, "both", IPAM={"Config": [{"Subnet": "0.0.0.0/24"}, {"Subnet": "10.0.1.0/24"}]})
    assert [each["Subnet"] for each in (await swarm.networks_inspect(key))["IPAM"]["Config"]] == [
        "10.0.2.0/24", "10.0.1.0/24",
    ]  # fmt: skip
    for bad, words in (("10.5.0.0/31", "a prefix length from 8 to 29"), ("0.0.0.0/9", "no /9 of 10.0.0.0/8 is free")):
        with pytest.raises((InvalidParameter, Forbidden), match=words):
            await made(swarm, "bad", **subnets(bad))


async def test_a_name_that_is_taken_comes_before_its_subnet(swarm: Swarm) -> None:
    await swarm.found()
    await made(swarm, **subnets("172.30.0.0/24"))
    with pytest.raises(Conflict, match="network with name net already exists"):
        await made(swarm, **subnets("172.30.0.0/24"))


async def test_a_subnet_that_another_manager_has_just_released(swarm: Swarm, etcd: FakeEtcd) -> None:
    await swarm.found()
    key = await made(swarm, **subnets("172.30.0.0/24"))
    etcd.delete_now(NETWORKS.path(key))  # the watch has not delivered it yet
    assert swarm.store.get(NETWORKS, key) is not None
    other = await made(swarm, "other", **subnets("172.30.0.0/24"))
    assert set(swarm.store.all(NETWORKS)) >= {other}


BAD: list[tuple[dict[str, Any], type[EngineError], str]] = [
    (body(""), InvalidParameter, "name"),
    (body("a b"), InvalidParameter, "'a b'.*DNS"),
    (body("a" * 64), InvalidParameter, "63 characters"),
    (body("host"), Forbidden, "predefined host network"),
    (body(Driver="bridge"), InvalidParameter, "Driver: 'bridge'"),
    (body(Scope="local"), InvalidParameter, "Scope: 'local'"),
    (body(EnableIPv6=True), InvalidParameter, "EnableIPv6: true"),
    (body(EnableIPv4=False), InvalidParameter, "EnableIPv4: false"),
    (body(ConfigFrom={"Network": "x"}), Unimplemented, "ConfigFrom"),
    (body(IPAM={"Driver": "x"}), InvalidParameter, "IPAM.Driver: 'x'"),
    (body(**subnets("fd00::/64")), InvalidParameter, "fd00::/64"),
    (body(**subnets("10.1.0.0/30")), InvalidParameter, "10.1.0.0/30"),
    (
        body(**subnets("10.1.0.0/16", "10.1.2.0/24")),
        InvalidParameter,
        "10.1.2.0/24: it overlaps",
    ),
    (body(**subnets("10.1.0.1/16")), InvalidParameter, "10.1.0.1/16"),
    (body(**subnets("10.1.0.0/16", Gateway="10.2.0.1")), InvalidParameter, "10.2.0.1"),
    (body(IPAM={"Config": [{"Gateway": "10.2.0.1"}]}), InvalidParameter, "must have a corresponding subnet"),
    (body(Options={"com.docker.network.driver.mtu": "12"}), InvalidParameter, "mtu '12'"),
    (body(Options={"com.docker.network.driver.overlay.vxlanid_list": "0"}), InvalidParameter, "vxlanid_list: '0'"),
    (body(Options={"com.docker.network.driver.overlay.vxlanid_list": "4096"}), Forbidden, "4096"),
    (body(Options={"encrypted": ""}), InvalidParameter, "option encrypted: no node of the swarm has ESP"),
    (body(Options={"encrypted": "perhaps"}), InvalidParameter, "'perhaps' is not a boolean"),
    (body(Labels={"": "x"}), InvalidParameter, "Labels"),
    (body(Ingress=True), Conflict, "already present"),
    (body(Ingress=True, Attachable=True), InvalidParameter, "ingress network cannot be attachable"),
    (body(Ingress=True, Internal=True), InvalidParameter, "ingress network cannot be internal"),
    (body("ingress"), Conflict, "network with name ingress already exists"),
]


@pytest.mark.parametrize(("given", "kind", "words"), BAD)
async def test_bad_bodies(swarm: Swarm, given: dict[str, Any], kind: type[EngineError], words: str) -> None:
    await swarm.found()
    revision = swarm.store.revision
    with pytest.raises(kind, match=words):
        await swarm.networks_create(body=given)
    assert swarm.store.revision == revision


async def test_encrypted_where_a_node_has_esp(swarm: Swarm) -> None:
    await swarm.found()
    await swarm.node("w", features=("overlay", "esp"))
    key = await made(swarm, Options={"encrypted": ""})
    record = swarm.store.record(NETWORKS, key)
    assert record is not None and record.encrypted
    other = swarm.store.record(NETWORKS, await made(swarm, "other", Options={"encrypted": "false"}))
    assert other is not None and not other.encrypted


async def test_vnis_are_given_again_last(swarm: Swarm) -> None:
    await swarm.found()
    for name in ("a", "b"):
        await made(swarm, name)
    await swarm.networks_remove("a")
    assert _vni(swarm, await made(swarm, "c")) == 4099
    given = await made(swarm, "d", Options={"com.docker.network.driver.overlay.vxlanid_list": "4100"})
    assert _vni(swarm, given) == 4100
    assert _vni(swarm, await made(swarm, "e")) == 4101


def _vni(swarm: Swarm, key: str) -> int:
    record = swarm.store.record(NETWORKS, key)
    assert record is not None
    return record.vni


async def test_many_at_once_get_different_subnets(swarm: Swarm) -> None:
    await swarm.found()
    keys = await asyncio.gather(*(made(swarm, f"n{number}") for number in range(60)))
    records = [swarm.store.record(NETWORKS, key) for key in keys]
    assert len({record.subnets[0].subnet for record in records if record}) == 60
    assert len({record.vni for record in records if record}) == 60


async def test_list_filters(swarm: Swarm) -> None:
    await swarm.found()
    a, b = await made(swarm, "a", Labels={"x": "1"}), await made(swarm, "b")
    await service(swarm, networks=["a"])

    async def names(**filters: list[str]) -> list[str]:
        return sorted(each["Name"] for each in await swarm.networks_list(filters=filters))

    assert await names() == ["a", "b", "ingress"]
    assert await names(id=[a]) == ["a"] and await names(name=["b"]) == ["b"]
    assert await names(label=["x=1"]) == ["a"] and await names(scope=["local"]) == []
    assert await names(scope=["swarm"]) == await names(driver=["overlay"]) == ["a", "b", "ingress"]
    assert await names(dangling=["true"]) == ["b"] and await names(dangling=["false"]) == ["a", "ingress"]
    with pytest.raises(InvalidParameter, match="Invalid filter 'nope'"):
        await names(nope=["x"])
    assert b


async def test_networks_in_use_stay(swarm: Swarm) -> None:
    await swarm.found()
    key = await made(swarm)
    web = await service(swarm, networks=["net"], ports=[{"TargetPort": 80}])
    assert (await swarm.services_inspect(web))["Spec"]["TaskTemplate"]["Networks"] == [{"Target": key}]
    with pytest.raises(Precondition, match="network net is in use by service web"):
        await swarm.networks_remove("net")
    with pytest.raises(Forbidden, match="ingress is a pre-defined network and cannot be removed"):
        await swarm.networks_remove("ingress")
    with pytest.raises(Precondition, match="ingress network ingress cannot be removed because service web"):
        await swarm.networks_remove("ingress", ingress=True)
    assert await swarm.networks_prune() == []
    await swarm.services_remove(web)
    assert await swarm.networks_prune(selection={"labels": ["x"]}) == []
    assert await swarm.networks_prune() == ["net"]
    await swarm.networks_remove("ingress", ingress=True)
    assert await swarm.networks_list() == []
    with pytest.raises(Precondition, match="no ingress network is present"):
        await service(swarm, ports=[{"TargetPort": 80}])
    await made(swarm, "mine", Ingress=True, **subnets("172.31.0.0/20"))
    await service(swarm, ports=[{"TargetPort": 80}])
    assert sorted(key for key in swarm.store.all(CLAIMS) if key.startswith("network")) == ["network/mine", POOLS_CLAIM]


async def test_a_removal_that_has_not_seen_a_service(swarm: Swarm) -> None:
    await swarm.found()
    await made(swarm)
    found = await asyncio.gather(service(swarm, networks=["net"]), swarm.networks_remove("net"), return_exceptions=True)
    assert sum(isinstance(each, BaseException) for each in found) == 1
    assert bool(swarm.store.all(SERVICES)) == (len(await swarm.networks_list()) == 2)


async def test_a_removal_whose_request_is_lost_while_another_manager_removes(
    swarm: Swarm, etcd: FakeEtcd, clock: FakeClock
) -> None:
    """The other removal writes the same key, and is not taken for this one."""
    await swarm.found()
    for name in ("x", "y"):
        await made(swarm, name)
    other = Store(etcd.peer(), clock)
    await other.load()
    etcd.lose_requests = 1
    removing = asyncio.create_task(swarm.networks_remove("x"))
    await clock.settle()
    await Swarm(other, clock).networks_remove("y")
    await clock.advance(1)
    await removing
    assert [each["Name"] for each in await swarm.networks_list()] == ["ingress"]
    await other.close()


async def test_targets_of_services(swarm: Swarm) -> None:
    await swarm.found()
    key = await made(swarm)
    with pytest.raises(Forbidden, match="ingress is not eligible for docker services"):
        await service(swarm, networks=["ingress"])
    with pytest.raises(InvalidParameter, match="duplicate network"):
        await service(swarm, networks=["net", key])
    with pytest.raises(InvalidParameter, match="cannot use it"):
        await service(swarm, networks=["host"], ports=[{"TargetPort": 80}])
    web = await service(swarm, networks=[key])
    await made(swarm, "two")
    await update(swarm, web, spec(networks=["two"]))
    with pytest.raises(Precondition, match="changing network in service is not supported"):
        await update(swarm, web, spec(networks=["net"]), network_changes=False)
    await update(swarm, web, spec(networks=["two"]), network_changes=False)
    await swarm.networks_remove("net")
    await update(swarm, web, spec(networks=["two"]))
    with pytest.raises(NotFound, match="network net not found"):
        await update(swarm, web, spec(networks=["net"]))


# --- ports ----------------------------------------------------------------------------------------


async def ports_of(swarm: Swarm, key: str) -> list[tuple[str, int, int]]:
    found = (await swarm.services_inspect(key))["Endpoint"]["Ports"]
    return [(port["Protocol"], port["PublishedPort"], port["TargetPort"]) for port in found]


async def test_ports_are_chosen_and_stay(swarm: Swarm) -> None:
    await swarm.found()
    one = await service(swarm, "one", ports=[{"TargetPort": 80}, {"TargetPort": 53, "Protocol": "udp"}])
    two = await service(swarm, "two", ports=[{"TargetPort": 80}, {"TargetPort": 30001, "PublishedPort": 30002}])
    assert await ports_of(swarm, one) == [("tcp", 30000, 80), ("udp", 30000, 53)]
    assert await ports_of(swarm, two) == [("tcp", 30001, 80), ("tcp", 30002, 30001)]
    await update(swarm, one, spec("one", ports=[{"TargetPort": 81}, {"TargetPort": 80}]))
    assert await ports_of(swarm, one) == [("tcp", 30003, 81), ("tcp", 30000, 80)]
    assert (await swarm.services_inspect(one))["Spec"]["EndpointSpec"]["Ports"][1].get("PublishedPort") is None
    await update(swarm, one, spec("one"), rollback="previous")
    assert await ports_of(swarm, one) == [("tcp", 30000, 80), ("udp", 30000, 53)]
    await swarm.services_remove(one)
    await swarm.services_remove(two)
    assert not [key for key in swarm.store.all(CLAIMS) if key.startswith("port/")]


async def test_a_port_that_was_in_mode_host_is_chosen_again(swarm: Swarm) -> None:
    await swarm.found()
    host = {"TargetPort": 80, "PublishedPort": 30000, "PublishMode": "host"}
    hosts = [await service(swarm, f"host{number}", ports=[host]) for number in range(2)]
    assert await ports_of(swarm, await service(swarm, "one", ports=[{"TargetPort": 80}])) == [("tcp", 30001, 80)]
    for key in hosts:
        await swarm.services_remove(key)
    two = await service(swarm, "two", ports=[{"TargetPort": 80}])
    assert await ports_of(swarm, two) == [("tcp", 30000, 80)]
    with pytest.raises(Conflict, match="port '30000' is already in use by service 'two'"):
        await service(swarm, "host", ports=[host])
    await swarm.services_remove(two)
    # the tasks of the earlier spec still have it
    key = await service(swarm, "host", ports=[host])
    await update(swarm, key, spec("host", ports=[{"TargetPort": 80}]))
    assert await ports_of(swarm, key) == [("tcp", 30002, 80)]


async def test_a_port_that_is_chosen_while_another_service_takes_it_in_mode_host(swarm: Swarm) -> None:
    await swarm.found()
    host = {"TargetPort": 80, "PublishedPort": 30000, "PublishMode": "host"}
    await swarm.services_remove(await service(swarm, "before", ports=[host]))
    keys = await asyncio.gather(
        service(swarm, "host", ports=[host]), service(swarm, "one", ports=[{"TargetPort": 80}]), return_exceptions=True
    )
    found = {str(port) for key in keys if isinstance(key, str) for _, port, _ in await ports_of(swarm, key)}
    assert len(found) == len([key for key in keys if isinstance(key, str)])


async def test_a_thousand_ports_are_one_transaction(swarm: Swarm, etcd: FakeEtcd) -> None:
    await swarm.found()
    ports = [[{"TargetPort": 80, "PublishedPort": first + number} for number in range(1000)] for first in (9000, 10000)]
    key = await service(swarm, ports=ports[0])
    await update(swarm, key, spec(ports=ports[1]))
    assert len([claim for claim in swarm.store.all(CLAIMS) if claim.startswith("port/")]) == 1000
    assert max(max(len(guards), len(operations)) for guards, operations in etcd.commits) <= 4096
    with pytest.raises(InvalidParameter, match=r"EndpointSpec\.Ports: 1001 ports, at most 1000 are allowed"):
        await service(swarm, "more", ports=[{"TargetPort": 80, "PublishMode": "host"} for _ in range(1001)])


async def test_ports_that_others_have(swarm: Swarm) -> None:
    await swarm.found()
    web = await service(swarm, ports=[{"TargetPort": 80, "PublishedPort": 8080}])
    host = {"TargetPort": 80, "PublishedPort": 8080, "PublishMode": "host"}
    ingress = {"TargetPort": 80, "PublishedPort": 8080}
    for port in (host, ingress):
        with pytest.raises(Conflict, match=rf"port '8080' is already in use by service 'web' \({web}\) as an ingress"):
            await service(swarm, "other", ports=[port])
    await service(swarm, "other", ports=[ingress | {"Protocol": "udp"}])
    third = await service(swarm, "third", ports=[host | {"PublishedPort": 9090}])
    await service(swarm, "fourth", ports=[host | {"PublishedPort": 9090}])
    with pytest.raises(ServerError, match=r"port '9090' is already in use by service '(third|fourth)'.*host-published"):
        await update(swarm, web, spec(ports=[ingress | {"PublishedPort": 9090}]))
    with pytest.raises(ServerError, match="already in use by service 'web'"):
        await update(swarm, third, spec("third", ports=[ingress]))
    await update(swarm, web, spec(ports=[host]))
    assert swarm.store.get(CLAIMS, port_claim("tcp", 8080)) is None
    await update(swarm, web, spec(ports=[ingress]))
    await update(swarm, web, spec())
    await update(swarm, third, spec("third", ports=[ingress]))
    assert await ports_of(swarm, third) == [("tcp", 8080, 80)]


@pytest.mark.parametrize("mode", ["ingress", "host"])
async def test_ports_of_the_swarm_itself(swarm: Swarm, mode: str) -> None:
    """2377 and 7946 are those of the manager and its etcd, 4789 is that of VXLAN."""
    await swarm.found()
    web = await service(swarm)
    for number, protocol in ((2377, "tcp"), (7946, "tcp"), (4789, "udp")):
        port = {"TargetPort": 80, "PublishedPort": number, "Protocol": protocol, "PublishMode": mode}
        rule = f"port '{number}' is already in use by the swarm itself"
        with pytest.raises(Conflict, match=rule):
            await service(swarm, "other", ports=[port])
        with pytest.raises(ServerError, match=rule):
            await update(swarm, web, spec(ports=[port]))
    others = [{"TargetPort": 80, "PublishedPort": 2377, "Protocol": "udp", "PublishMode": mode}]
    await service(swarm, "other", ports=others)
    # a chosen port is none of them either
    presence = ManagerPresence(address="10.0.0.2:30000", member=2)
    await swarm.store.commit([Put(MANAGERS, "n2", presence)])
    assert await ports_of(swarm, await service(swarm, "third", ports=[{"TargetPort": 80}])) == [("tcp", 30001, 80)]


async def test_one_port_wanted_by_many_at_once(swarm: Swarm) -> None:
    await swarm.found()
    ingress = {"TargetPort": 80, "PublishedPort": 8080}
    for mode in ("ingress", "host"):
        found = await asyncio.gather(
            *(
                service(swarm, f"{mode}{number}", ports=[ingress | ({"PublishMode": mode} if number else {})])
                for number in range(3)
            ),
            return_exceptions=True,
        )
        keys = [each for each in found if isinstance(each, str)]
        modes = [(await swarm.services_inspect(key))["Endpoint"]["Ports"][0]["PublishMode"] for key in keys]
        assert modes == ["ingress"] or set(modes) == {"host"}, modes
        for key in keys:
            await swarm.services_remove(key)


async def test_ports_are_chosen_for_many_at_once(swarm: Swarm) -> None:
    await swarm.found()
    keys = await asyncio.gather(*(service(swarm, f"web{number}", ports=[{"TargetPort": 80}]) for number in range(60)))
    assert sorted([(await ports_of(swarm, key))[0][1] for key in keys]) == [*range(30000, 30060)]


# --- what is on a network -------------------------------------------------------------------------


async def test_tasks_on_a_network(swarm: Swarm) -> None:
    await swarm.found()
    key = await made(swarm)
    web = await service(swarm, networks=["net"], ports=[{"TargetPort": 80}])
    task = Task(service=web, version=1, slot=1, node=NODE, assigned=1, networks=(Attached(key, "10.0.0.5"),))
    await swarm.store.commit([Put(TASKS, "task1", task)])
    [attached] = (await swarm.tasks_inspect("task1"))["NetworksAttachments"]
    assert attached["Addresses"] == ["10.0.0.5/20"]
    assert attached["Network"]["ID"] == key and attached["Network"]["Spec"]["Name"] == "net"
    assert attached["Network"]["IPAMOptions"]["Configs"] == [{"Subnet": "10.0.0.0/20", "Gateway": "10.0.0.1"}]
    found = await swarm.networks_inspect("net", verbose=True, status=True)
    assert found["Status"]["IPAM"]["Subnets"] == {"10.0.0.0/20": {"IPsInUse": 4, "DynamicIPsAvailable": 4092}}
    assert found["Peers"] == [{"Name": NODE[:12], "IP": "10.0.0.2"}]
    assert found["Services"] == {
        "web": {
            "VIP": "",
            "Ports": ["Target: 80, Publish: 30000"],
            "LocalLBIndex": 0,
            "Tasks": [
                {
                    "Name": "web.1.task1",
                    "EndpointID": "task1",
                    "EndpointIP": "10.0.0.5",
                    "Info": {"Host IP": "10.0.0.2"},
                }
            ],
        }
    }


async def test_numbers_of_addresses(swarm: Swarm) -> None:
    await swarm.found()
    pool = {"Subnet": "172.30.0.0/24", "IPRange": "172.30.0.128/25", "AuxiliaryAddresses": {"router": "172.30.0.130"}}
    key = await made(swarm, IPAM={"Config": [pool]})
    web = await service(swarm, networks=["net"])
    virtual = [VirtualIP(network_id=key, addr="172.30.0.129/24"), VirtualIP(network_id="other", addr="10.1.0.1/24")]
    task = Task(service=web, version=1, slot=1, node=NODE, assigned=1, networks=(Attached(key, "172.30.0.131"),))
    container = AttachmentRecord(network=key, node=NODE, container="c", created=1, address="172.30.0.5")
    await swarm.store.commit(
        [
            Put(TASKS, "task1", task),
            Put(SERVICE_STATUS, web, ServiceStatus(endpoint=Endpoint(virtual_ips=virtual))),
            Put(ATTACHMENTS, "a", container),
        ]
    )
    found = await swarm.networks_inspect("net", status=True)
    assert found["Status"]["IPAM"]["Subnets"] == {"172.30.0.0/24": {"IPsInUse": 7, "DynamicIPsAvailable": 124}}
    assert "Status" not in await swarm.networks_inspect("net")
    with pytest.raises(Precondition, match="in use by service web"):
        await swarm.networks_remove("net")
    await swarm.services_remove(web)
    with pytest.raises(Precondition, match="in use by container c"):
        await swarm.networks_remove("net")


async def test_a_network_of_tasks_that_an_update_has_not_replaced(swarm: Swarm) -> None:
    await swarm.found()
    key = await made(swarm)
    web = await service(swarm, networks=["net"])
    task = Task(service=web, version=1, slot=1, node=NODE, assigned=1, networks=(Attached(key, "10.0.0.5"),))
    await swarm.store.commit([Put(TASKS, "task1", task)])
    await update(swarm, web, spec())
    with pytest.raises(Precondition, match=r"network net is in use by task web\.1\.task1"):
        await swarm.networks_remove("net")
    assert await swarm.networks_prune() == []
    await swarm.store.commit([Put(TASKS, "task1", replace(task, desired=TaskState.SHUTDOWN))])
    await swarm.networks_remove("net")


async def test_others_are_served_while_many_tasks_are_looked_at(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    await swarm.found()
    key = await made(swarm)
    web = await service(swarm, networks=["net"])
    task = Task(service=web, version=1, node=NODE, assigned=1, desired=TaskState.SHUTDOWN)
    groups: list[Any] = [
        ([Put(TASKS, f"t{number}", replace(task, networks=(Attached(key, f"10.0.1.{number}"),)))], ())
        for number in range(200)
    ]
    other = swarm.store.record(SERVICES, web)
    assert other is not None
    groups += [
        ([Put(SERVICES, f"s{number}", replace(other, spec=replace(other.spec, name="s")))], ()) for number in range(50)
    ]
    await swarm.store.commit_many(groups)
    monkeypatch.setattr(context, "SLICE", -1.0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def turns_of(work: Any) -> int:
        before = turns
        await work
        return turns - before

    serving = asyncio.create_task(others())
    assert await turns_of(swarm.networks_inspect("net", verbose=True)) > 2 * 200 + 50
    assert await turns_of(swarm.networks_inspect("net", status=True)) > 3 * 200
    assert await turns_of(swarm.networks_list(filters={"dangling": ["true"]})) > 50
    await swarm.store.commit([Delete(SERVICES, key) for key in [*swarm.store.all(SERVICES)]])
    assert await turns_of(swarm.networks_remove("net")) > 200
    serving.cancel()
