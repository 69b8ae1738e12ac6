"""Networks through the API: raw HTTP, the docker CLI, docker-py; and as a container sees them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import docker
import docker.errors
import docker.types
import pytest

from tests.support.engine.client import Answer
from tests.support.engine.harness import TempEngine, links, until


def create(engine: TempEngine, name: str, status: int = 201, **fields: Any) -> Any:
    """The response's JSON."""
    answer = engine.request("POST", "/v1.24/networks/create", {"Name": name} | fields)
    assert answer.status == status, answer
    engine.networks()
    return answer.json()


def pools(*configs: dict[str, Any]) -> dict[str, Any]:
    return {"Config": list(configs)}


def connect(engine: TempEngine, network: str, container: str, status: int = 200, **config: Any) -> Answer:
    body = {"Container": container} | ({"EndpointConfig": config} if config else {})
    answer = engine.request("POST", f"/v1.24/networks/{network}/connect", body)
    assert answer.status == status, answer
    return answer


def disconnect(engine: TempEngine, network: str, container: str, status: int = 200) -> Answer:
    answer = engine.request("POST", f"/v1.24/networks/{network}/disconnect", {"Container": container})
    assert answer.status == status, answer
    return answer


def inspect(engine: TempEngine, network: str) -> Any:
    answer = engine.request("GET", f"/v1.24/networks/{network}")
    assert answer.status == 200, answer
    return answer.json()


def run(engine: TempEngine, container: str, *command: str) -> str:
    return engine.docker("exec", container, *command).out


def sleeper(engine: TempEngine, network: str, name: str = "", **keywords: Any) -> str:
    return engine.started("sleep", "600", network=network, name=name, **keywords)


# --- the resource ---------------------------------------------------------------------------------


def test_predefined_networks(engine: TempEngine) -> None:
    found = {entry["Name"]: entry for entry in engine.request("GET", "/v1.24/networks").json()}
    assert {name: (entry["Driver"], entry["Scope"]) for name, entry in found.items()} == {
        "bridge": ("bridge", "local"),
        "host": ("host", "local"),
        "none": ("null", "local"),
    }
    assert found["bridge"] == inspect(engine, "bridge") == inspect(engine, found["bridge"]["Id"][:12])
    assert found["bridge"]["Options"]["com.docker.network.bridge.default_bridge"] == "true"
    assert found["bridge"]["IPAM"]["Config"][0]["Subnet"]
    for name in found:
        answer = engine.request("DELETE", f"/v1.24/networks/{name}")
        assert (answer.status, answer.json()["message"]) == (
            403,
            f"{name} is a pre-defined network and cannot be removed",
        )
        assert "predefined" in create(engine, name, 403)["message"]


@pytest.mark.parametrize("mtu", ["68", "500", "1279", "1280"])
def test_small_mtus(engine: TempEngine, mtu: str) -> None:
    """A link with an MTU below 1280 has no IPv6, and the kernel refuses its IPv6 settings."""
    create(engine, "small", Options={"com.docker.network.driver.mtu": mtu})
    container = sleeper(engine, "small")
    assert run(engine, container, "cat", "/sys/class/net/eth0/mtu").strip() == mtu
    gateway = inspect(engine, "small")["IPAM"]["Config"][0]["Gateway"]
    run(engine, container, "ping", "-c", "1", "-W", "5", "-s", "8", gateway)


@pytest.mark.parametrize("name", ["test@#$", "kiwl$%^", "a b", "ä"])
def test_names_with_other_characters(engine: TempEngine, name: str) -> None:
    made = create(engine, name)["Id"]
    assert inspect(engine, quote(name))["Id"] == made
    assert engine.docker("network", "inspect", "-f", "{{.Id}}", name).out.strip() == made
    container = sleeper(engine, name)
    assert name in engine.inspect(container)["NetworkSettings"]["Networks"]


def test_create_inspect_remove(engine: TempEngine) -> None:
    fields = {
        "CheckDuplicate": True,
        "Driver": "bridge",
        "Internal": True,
        "EnableIPv6": True,
        "IPAM": pools(
            {"Subnet": "fd77:1::/64"},
            {
                "Subnet": "10.231.0.0/16",
                "IPRange": "10.231.9.0/24",
                "Gateway": "10.231.0.9",
                "AuxAddress": {"router": "10.231.9.1"},
            },
        ),
        "Options": {
            "com.docker.network.driver.mtu": "1400",
            "com.docker.network.bridge.name": engine.bridge[:10] + "u",
        },
        "Labels": {"a": "b"},
    }
    made = create(engine, "whole", **fields)
    assert made == {"Id": made["Id"], "Warning": ""}
    shown = inspect(engine, "whole")
    assert shown == {
        "Name": "whole",
        "Id": made["Id"],
        "Scope": "local",
        "Driver": "bridge",
        "EnableIPv6": True,
        "IPAM": {
            "Driver": "default",
            "Options": None,
            "Config": [
                {
                    "Subnet": "10.231.0.0/16",
                    "IPRange": "10.231.9.0/24",
                    "Gateway": "10.231.0.9",
                    "AuxAddress": {"router": "10.231.9.1"},
                },
                {"Subnet": "fd77:1::/64", "Gateway": "fd77:1::1"},
            ],
        },
        "Internal": True,
        "Containers": {},
        "Options": fields["Options"],
        "Labels": {"a": "b"},
    }
    link = engine.bridge[:10] + "u"
    assert links()[link]["mtu"] == 1400
    container = sleeper(engine, "whole")
    endpoint = engine.inspect(container)["NetworkSettings"]["Networks"]["whole"]
    assert endpoint == endpoint | {
        "NetworkID": made["Id"],
        "Gateway": "",
        "IPAddress": "10.231.9.0",
        "IPPrefixLen": 16,
        "IPv6Gateway": "",
        "GlobalIPv6Address": "fd77:1::2",
        "GlobalIPv6PrefixLen": 64,
        "MacAddress": "02:42:0a:e7:09:00",
        "Aliases": [container[:12]],
    }
    assert re.fullmatch("[0-9a-f]{64}", endpoint["EndpointID"])
    assert inspect(engine, "whole")["Containers"] == {
        container: {
            "Name": engine.inspect(container)["Name"][1:],
            "EndpointID": endpoint["EndpointID"],
            "MacAddress": "02:42:0a:e7:09:00",
            "IPv4Address": "10.231.9.0/16",
            "IPv6Address": "fd77:1::2/64",
        }
    }
    addresses = run(engine, container, "ip", "addr")
    assert "mtu 1400" in addresses and "10.231.9.0/16" in addresses and "fd77:1::2/64" in addresses
    assert "default" not in run(engine, container, "ip", "route"), "there is no way out of an internal network"
    answer = engine.request("DELETE", "/v1.24/networks/whole")
    name = engine.inspect(container)["Name"][1:]
    assert (answer.status, answer.json()["message"]) == (
        403,
        f'error while removing network: network whole has active endpoints (name:"{name}" id:"{container[:12]}")',
    )
    engine.request("POST", f"/v1.24/containers/{container}/rename?name=other")
    assert inspect(engine, "whole")["Containers"][container]["Name"] == "other"
    engine.request("DELETE", f"/v1.24/containers/{container}?force=1")
    assert inspect(engine, "whole")["Containers"] == {}
    assert engine.request("DELETE", "/v1.24/networks/whole").status == 204
    assert engine.request("GET", "/v1.24/networks/whole").json() == {"message": "network whole not found"}
    assert engine.request("DELETE", "/v1.24/networks/whole").status == 404
    until("its bridge is down", lambda: link not in links())


def test_small_subnets_that_overlap_nothing(engine: TempEngine) -> None:
    for number in range(20):
        create(engine, f"small{number}")
    subnets = [inspect(engine, f"small{number}")["IPAM"]["Config"][0]["Subnet"] for number in range(20)]
    assert len(set(subnets)) == 20
    assert all(subnet.endswith("/24") for subnet in subnets)
    routes = engine_routes()
    assert all(routes.count(subnet) == 1 for subnet in subnets), "its own route alone"


def engine_routes() -> list[str]:
    lines = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines]


def test_duplicates(engine: TempEngine) -> None:
    create(engine, "twice")
    assert create(engine, "twice", 409, CheckDuplicate=True) == {"message": "network with name twice already exists"}
    second = create(engine, "twice")["Id"]
    answer = engine.request("GET", "/v1.24/networks/twice")
    assert (answer.status, answer.json()["message"]) == (
        400,
        "network twice is ambiguous (2 matches found based on name)",
    )
    assert engine.request("DELETE", f"/v1.24/networks/{second[:20]}").status == 204
    assert inspect(engine, "twice")["Id"] != second


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"Name": ""}, 400, "invalid network name"),
        ({"Driver": "nothere"}, 404, 'plugin "nothere" not found'),
        ({"IPAM": {"Driver": "nothere"}}, 404, 'plugin "nothere" not found'),
        ({"IPAM": pools({"Subnet": "10.1.2.3"})}, 400, "network bad: subnet: invalid CIDR address: '10.1.2.3'"),
        (
            {"IPAM": pools({"Subnet": "10.230.0.0/24", "Gateway": "10.230.1.1"})},
            400,
            "network bad: gateway: 10.230.1.1",
        ),
        ({"IPAM": pools({"Subnet": "10.230.0.0/24", "IPRange": "10.0.0.0/8"})}, 400, "IPRange 10.0.0.0/8"),
        ({"IPAM": pools({"Subnet": "10.229.128.0/24"})}, 403, "subnet 10.229.128.0/24: Pool overlaps"),
        ({"IPAM": pools({"Subnet": "10.0.0.0/8"})}, 403, "subnet 10.0.0.0/8: Pool overlaps"),
        ({"IPAM": "x"}, 400, "IPAM"),
        ({"Options": {"com.docker.network.driver.mtu": "no"}}, 400, "mtu 'no'"),
        ({"Options": {"com.docker.network.bridge.name": "lo"}}, 403, "bridge lo"),
        ({"Driver": "macvlan", "Options": {"parent": "nothere0"}}, 400, "parent link 'nothere0' does not exist"),
    ],
)
def test_bad_creates_change_nothing(engine: TempEngine, fields: dict[str, Any], status: int, words: str) -> None:
    create(engine, "there", IPAM=pools({"Subnet": "10.229.0.0/16"}))
    before, links = engine.request("GET", "/v1.24/networks/").body, own_bridges(engine)
    answer = engine.request("POST", "/v1.24/networks/create", {"Name": "bad"} | fields)
    assert answer.status == status, answer
    assert words in answer.json()["message"]
    assert engine.request("GET", "/v1.24/networks").body == before
    assert own_bridges(engine) <= links, "those of networks removed before go meanwhile"


def own_bridges(engine: TempEngine) -> set[str]:
    """Bridges with this engine's alias."""
    alias = f"engined {inspect(engine, 'bridge')['Id'][:12]}"
    return {name for name, link in links().items() if link.get("ifalias") == alias}


def test_filters(engine: TempEngine) -> None:
    one = create(engine, "one", Labels={"a": "b"})["Id"]
    create(engine, "two")

    def found(**filters: Any) -> list[str]:
        answer = engine.request("GET", f"/v1.24/networks?filters={quote(json.dumps(filters))}")
        assert answer.status == 200, answer
        return sorted(entry["Name"] for entry in answer.json())

    assert found(type=["custom"]) == found(type={"custom": True}) == ["one", "two"]
    assert found(type=["builtin"]) == ["bridge", "host", "none"]
    assert found(name=["on"]) == ["none", "one"]
    assert found(id=[one[:8]]) == ["one"]
    assert found(driver=["bridge"]) == ["bridge", "one", "two"]
    assert found(label=["a"]) == found(label=["a=b"]) == ["one"]
    assert found(label=["a=c"]) == []
    assert found(name=["o"], driver=["null"]) == ["none"]
    for wrong in ({"type": ["x"]}, {"nothere": ["x"]}):
        answer = engine.request("GET", f"/v1.24/networks?filters={quote(json.dumps(wrong))}")
        assert answer.status == 400, answer


def test_older_versions(engine: TempEngine) -> None:
    create(engine, "old", Internal=True, Labels={"a": "b"})
    assert {"Internal", "EnableIPv6", "Labels"} <= inspect(engine, "old").keys()
    shown = engine.request("GET", "/v1.22/networks/old").json()
    assert not {"Internal", "EnableIPv6", "Labels"} & shown.keys()
    engine.request("POST", "/v1.21/networks/create", {"Name": "older", "Internal": True, "Labels": {"a": "b"}})
    newer = inspect(engine, "older")
    assert (newer["Internal"], newer["Labels"]) == (False, {})


# --- containers on networks -----------------------------------------------------------------------


def test_run_on_a_network(engine: TempEngine) -> None:
    create(engine, "mine", IPAM=pools({"Subnet": "10.228.0.0/24"}))
    container = engine.docker(
        *("run", "-d", "--network", "mine", "--ip", "10.228.0.77", "--network-alias", "db", "--name", "fixed"),
        *("busybox", "sleep", "600"),
    ).line
    settings = engine.inspect(container)["NetworkSettings"]
    endpoint = settings["Networks"]["mine"]
    assert endpoint["IPAMConfig"] == {"IPv4Address": "10.228.0.77"}
    assert (endpoint["IPAddress"], endpoint["MacAddress"]) == ("10.228.0.77", "02:42:0a:e4:00:4d")
    assert endpoint["Aliases"] == ["db", container[:12]]
    assert (settings["IPAddress"], settings["Gateway"], settings["EndpointID"]) == ("", "", "")
    assert settings["SandboxKey"]
    shown = run(engine, container, "ip", "addr", "show", "eth0")
    assert "10.228.0.77/24" in shown and "02:42:0a:e4:00:4d" in shown
    assert "10.228.0.77\t" in run(engine, container, "cat", "/etc/hosts")
    entry = engine.request("GET", "/v1.24/containers/json").json()[0]
    assert entry["NetworkSettings"]["Networks"]["mine"]["IPAddress"] == "10.228.0.77"
    # while stopped it keeps only the address that it requested, and gets it again
    engine.docker("stop", "-t", "0", "fixed")
    until("it has left", lambda: inspect(engine, "mine")["Containers"] == {})
    kept = engine.inspect(container)["NetworkSettings"]["Networks"]["mine"]
    assert (kept["IPAMConfig"], kept["IPAddress"], kept["EndpointID"]) == ({"IPv4Address": "10.228.0.77"}, "", "")
    engine.docker("start", "fixed")
    assert engine.inspect(container)["NetworkSettings"]["Networks"]["mine"]["IPAddress"] == "10.228.0.77"


def test_a_mac_is_for_the_network_of_the_create(engine: TempEngine) -> None:
    create(engine, "mine")
    create(engine, "other")
    container = engine.create("sleep", "600", network="mine", MacAddress="02:42:00:00:00:77")
    connect(engine, "other", container)
    engine.post(f"/containers/{container}/start")
    networks = engine.inspect(container)["NetworkSettings"]["Networks"]
    assert networks["mine"]["MacAddress"] == "02:42:00:00:00:77" != networks["other"]["MacAddress"]
    assert "02:42:00:00:00:77" in run(engine, container, "ip", "link", "show", "eth0")


def test_containers_of_one_network_meet(engine: TempEngine) -> None:
    create(engine, "mine")
    server = engine.started("sh", "-c", "while :; do echo found me | nc -l -p 7000; done", network="mine")
    address = engine.inspect(server)["NetworkSettings"]["Networks"]["mine"]["IPAddress"]
    script = f"i=0; until nc {address} 7000 </dev/null; do i=$((i+1)); [ $i -lt 300 ] || exit 9; sleep 0.1; done"
    assert engine.docker("run", "--rm", "--network", "mine", "busybox", "sh", "-c", script).out == "found me\n"
    for other in ("bridge", "none"):
        result = engine.docker(
            "run", "--rm", "--network", other, "busybox", "nc", "-w", "1", address, "7000", status=None
        )
        assert "found" not in result.out, "networks are apart"


def test_connect_and_disconnect_while_it_runs(engine: TempEngine) -> None:
    create(engine, "a-net", IPAM=pools({"Subnet": "10.227.0.0/24"}))
    create(engine, "z-net", EnableIPv6=True, IPAM=pools({"Subnet": "10.227.1.0/24"}, {"Subnet": "fd77:2::/64"}))
    container = sleeper(engine, "bridge", "moves")
    before = run(engine, container, "ip", "route")
    connect(
        engine, "z-net", "moves", IPAMConfig={"IPv4Address": "10.227.1.50", "IPv6Address": "fd77:2::50"}, Aliases=["x"]
    )
    settings = engine.inspect(container)["NetworkSettings"]
    assert settings["IPAddress"] == settings["Networks"]["bridge"]["IPAddress"] != ""
    endpoint = settings["Networks"]["z-net"]
    assert (endpoint["IPAddress"], endpoint["GlobalIPv6Address"]) == ("10.227.1.50", "fd77:2::50")
    assert endpoint["Aliases"] == ["x", container[:12]]
    shown = run(engine, container, "ip", "addr", "show", "eth1")
    assert "10.227.1.50/24" in shown and "fd77:2::50/64" in shown
    # the default route is through the network with both IP versions, as in Docker
    assert "default via 10.227.1.1" in run(engine, container, "ip", "route")
    assert "default via fd77:2::1" in run(engine, container, "ip", "-6", "route")
    assert "64 bytes" in run(engine, container, "ping", "-c", "1", "-W", "5", "fd77:2::1")
    disconnect(engine, "z-net", container)
    assert run(engine, container, "ip", "route") == before
    connect(engine, "a-net", container)
    assert "default via 10.227.0.1" in run(engine, container, "ip", "route"), "else the first by name"
    disconnect(engine, "bridge", container)
    assert engine.inspect(container)["NetworkSettings"]["IPAddress"] == ""
    assert [*engine.inspect(container)["NetworkSettings"]["Networks"]] == ["a-net"]
    disconnect(engine, "a-net", container)
    assert engine.inspect(container)["NetworkSettings"]["Networks"] == {}
    assert "eth" not in run(engine, container, "ip", "-o", "link")
    connect(engine, "bridge", container)
    assert "default via" in run(engine, container, "ip", "route")
    assert run(engine, container, "ip", "-o", "link", "show", "eth0")
    engine.docker("restart", "-t", "0", "moves")
    assert [*engine.inspect(container)["NetworkSettings"]["Networks"]] == ["bridge"]


def test_connect_before_the_start(engine: TempEngine) -> None:
    create(engine, "one")
    create(engine, "two", IPAM=pools({"Subnet": "10.226.0.0/24"}))
    container = engine.create("sleep", "600", network="one")
    connect(engine, "two", container, IPAMConfig={"IPv4Address": "10.226.0.9"})
    assert inspect(engine, "two")["Containers"] == {}
    engine.post(f"/containers/{container}/start")
    networks = engine.inspect(container)["NetworkSettings"]["Networks"]
    assert {*networks} == {"one", "two"}
    assert networks["two"]["IPAddress"] == "10.226.0.9"
    assert "10.226.0.9/24" in run(engine, container, "ip", "addr", "show", "eth1")
    for name, endpoint in networks.items():
        assert inspect(engine, name)["Containers"][container]["IPv4Address"].startswith(endpoint["IPAddress"] + "/")
    # compose disconnects and reconnects before it starts
    engine.docker("stop", "-t", "0", container)
    disconnect(engine, "one", container)
    connect(engine, "one", container, Aliases=["web"])
    engine.post(f"/containers/{container}/start")
    assert "web" in engine.inspect(container)["NetworkSettings"]["Networks"]["one"]["Aliases"]


def test_connect_again_before_the_start(engine: TempEngine) -> None:
    """The settings are replaced, and a static address is free again. A running container is
    refused.
    """
    create(engine, "one", IPAM=pools({"Subnet": "10.231.40.0/29"}))
    container = engine.create("sleep", "600", network="bridge")

    static = {"IPAMConfig": {"IPv4Address": "10.231.40.5"}, "MacAddress": "02:42:00:00:00:01"}
    connect(engine, "one", container, Aliases=["a"], **static)
    connect(engine, "one", container, Aliases=["b"])
    endpoint = engine.inspect(container)["NetworkSettings"]["Networks"]["one"]
    assert "b" in endpoint["Aliases"] and "a" not in endpoint["Aliases"] and endpoint["IPAMConfig"] in (None, {})
    others = [sleeper(engine, "one") for _ in range(4)]  # of 5
    addresses = {engine.inspect(each)["NetworkSettings"]["Networks"]["one"]["IPAddress"] for each in others}
    assert "10.231.40.5" in addresses, "nothing keeps it"
    engine.post(f"/containers/{container}/start")
    endpoint = engine.inspect(container)["NetworkSettings"]["Networks"]["one"]
    assert endpoint["IPAddress"] and endpoint["MacAddress"] != "02:42:00:00:00:01"
    connect(engine, "one", container, 403, Aliases=["c"])


def test_none_can_be_left_for_a_network(engine: TempEngine) -> None:
    create(engine, "mine")
    container = sleeper(engine, "none")
    answer = connect(engine, "mine", container, 403)
    assert "private (none) mode" in answer.json()["message"]
    assert container in inspect(engine, "none")["Containers"]
    disconnect(engine, "none", container)
    connect(engine, "mine", container)
    assert "default via" in run(engine, container, "ip", "route")
    engine.request("DELETE", f"/v1.24/containers/{container}?force=1")
    assert inspect(engine, "none")["Containers"] == {}


def test_refused_connects_change_nothing(engine: TempEngine) -> None:
    create(engine, "mine", IPAM=pools({"Subnet": "10.225.0.0/29"}))
    create(engine, "auto")
    first = sleeper(engine, "mine", "first", NetworkingConfig={"EndpointsConfig": {"mine": {}}})
    other = sleeper(engine, "bridge", "other")
    on_host = sleeper(engine, "host", "on-host")
    shares = sleeper(engine, "container:first", "shares")
    taken = engine.inspect(first)["NetworkSettings"]["Networks"]["mine"]["IPAddress"]

    def state() -> Any:
        return [
            engine.request("GET", "/v1.24/networks").json(),
            [engine.inspect(each)["NetworkSettings"] for each in (first, other, on_host, shares)],
            run(engine, other, "ip", "-o", "addr"),
        ]

    before = state()
    for network, container, config, status, words in (
        ("nothere", other, {}, 404, "network nothere not found"),
        ("mine", "nothere", {}, 404, "No such container: nothere"),
        ("mine", "", {}, 400, "Container"),
        ("mine", first, {}, 403, "already exists in network mine"),
        ("host", other, {}, 403, "host network"),
        ("none", other, {}, 403, "private (none) mode"),
        ("mine", on_host, {}, 403, "host network"),
        ("mine", shares, {}, 403, "sharing network namespace"),
        ("mine", other, {"IPv4Address": taken}, 403, f"Address already in use: {taken} on network mine"),
        ("mine", other, {"IPv4Address": "10.225.0.1"}, 403, "Address already in use: 10.225.0.1 on network mine"),
        ("mine", other, {"IPv4Address": "10.224.0.1"}, 400, "10.224.0.1 is not a host address in the subnet"),
        ("mine", other, {"IPv4Address": "10.225.0.7"}, 400, "10.225.0.7 is not a host address in the subnet"),
        ("mine", other, {"IPv4Address": "x"}, 400, "invalid IP address: 'x'"),
        ("mine", other, {"IPv6Address": "fd00::1"}, 400, "user configured subnets"),
        ("auto", other, {"IPv4Address": "172.18.0.9"}, 400, "user configured subnets"),
        ("mine", other, {"LinkLocalIPs": ["10.0.0.1"]}, 400, "not a link-local address"),
    ):
        answer = connect(engine, network, container, status, **({"IPAMConfig": config} if config else {}))
        assert words in answer.json()["message"], (network, container, config, answer)
    for network, container, status, words in (
        ("mine", other, 403, "is not connected to the network mine"),
        ("host", on_host, 403, "host network"),
        ("nothere", other, 404, "network nothere not found"),
        ("mine", "nothere", 404, "No such container: nothere"),
    ):
        answer = disconnect(engine, network, container, status)
        assert words in answer.json()["message"]
    assert state() == before


def test_an_exhausted_pool(engine: TempEngine) -> None:
    create(engine, "tiny", IPAM=pools({"Subnet": "10.223.0.0/30"}))
    sleeper(engine, "tiny")
    second = engine.create("true", network="tiny")
    answer = engine.post(f"/containers/{second}/start", 500)
    assert (
        "no available IPv4 addresses on this network's address pools: tiny (10.223.0.0/30" in answer.json()["message"]
    )
    connected = sleeper(engine, "bridge")
    before = engine.inspect(connected)["NetworkSettings"]
    assert "tiny" in connect(engine, "tiny", connected, 500).json()["message"]
    assert engine.inspect(connected)["NetworkSettings"] == before
    assert len(inspect(engine, "tiny")["Containers"]) == 1


def test_starts_that_fail(engine: TempEngine) -> None:
    """An unknown network is an error of start, because clients take a 404 of create as a missing
    image."""
    create(engine, "gone")
    create(engine, "mine", IPAM=pools({"Subnet": "10.222.0.0/24"}))
    container = engine.create("true", network="nothere")
    assert "network nothere not found" in engine.post(f"/containers/{container}/start", 404).json()["message"]
    container = engine.create("true", network="gone")
    engine.request("DELETE", "/v1.24/networks/gone")
    assert "network gone not found" in engine.post(f"/containers/{container}/start", 404).json()["message"]
    create(engine, "gone")
    engine.post(f"/containers/{container}/start")

    def asking(network: str, **config: Any) -> str:
        return engine.create("true", network=network, NetworkingConfig={"EndpointsConfig": {network: config}})

    holder = sleeper(
        engine, "mine", NetworkingConfig={"EndpointsConfig": {"mine": {"IPAMConfig": {"IPv4Address": "10.222.0.5"}}}}
    )
    for container, status, words in (
        (asking("mine", IPAMConfig={"IPv4Address": "10.222.0.5"}), 500, "Address already in use: 10.222.0.5"),
        (asking("mine", IPAMConfig={"IPv4Address": "10.221.0.5"}), 400, "10.221.0.5 is not a host address"),
        (asking("bridge", IPAMConfig={"IPv4Address": "10.221.0.5"}), 400, "supported on user defined networks only"),
        (asking("bridge", Aliases=["x"]), 400, "only for containers in user defined networks"),
    ):
        assert words in engine.post(f"/containers/{container}/start", status).json()["message"]
    assert [*inspect(engine, "mine")["Containers"]] == [holder]
    for wrong, words in (
        ({"IPv4Address": "999.1.1.1"}, "network mine: IPv4Address: invalid IP address: '999.1.1.1'"),
        ({"IPv4Address": "fd00::1"}, "network mine: invalid IPv4 address: fd00::1"),
        ({"LinkLocalIPs": ["10.0.0.1"]}, "network mine: LinkLocalIPs: 10.0.0.1 is not a link-local address"),
    ):
        body = {"Image": "busybox", "NetworkingConfig": {"EndpointsConfig": {"mine": {"IPAMConfig": wrong}}}}
        answer = engine.request("POST", "/v1.24/containers/create", body)
        assert (answer.status, answer.json()["message"]) == (400, words)
    body = {"Image": "busybox", "NetworkingConfig": {"EndpointsConfig": {"mine": {}, "gone": {}}}}
    answer = engine.request("POST", "/v1.24/containers/create", body)
    assert (answer.status, "cannot be connected to network endpoints" in answer.json()["message"]) == (400, True)
    body = {
        "Image": "busybox",
        "HostConfig": {"NetworkMode": "host"},
        "NetworkingConfig": {"EndpointsConfig": {"mine": {}}},
    }
    assert engine.request("POST", "/v1.24/containers/create", body).status == 400


def test_addresses_rest_and_static_ones_are_spared(engine: TempEngine) -> None:
    create(engine, "mine", IPAM=pools({"Subnet": "10.220.0.0/29"}))

    def address(container: str) -> str:
        return str(engine.inspect(container)["NetworkSettings"]["Networks"]["mine"]["IPAddress"])

    fixed = {"NetworkingConfig": {"EndpointsConfig": {"mine": {"IPAMConfig": {"IPv4Address": "10.220.0.3"}}}}}
    stopped = engine.create("sleep", "600", network="mine", **fixed)
    first = sleeper(engine, "mine")
    assert address(first) == "10.220.0.2"
    engine.request("DELETE", f"/v1.24/containers/{first}?force=1")
    assert [address(sleeper(engine, "mine")) for _ in range(3)] == ["10.220.0.4", "10.220.0.5", "10.220.0.6"]
    assert address(sleeper(engine, "mine")) == "10.220.0.2"
    engine.post(f"/containers/{stopped}/start")
    assert address(stopped) == "10.220.0.3"


def test_events(engine: TempEngine) -> None:
    since = time.time()
    network = create(engine, "told")["Id"]
    container = sleeper(engine, "told", "teller")
    second = create(engine, "second")["Id"]
    connect(engine, "second", container)
    disconnect(engine, "second", container)
    engine.request("DELETE", f"/v1.24/containers/{container}?force=1")
    engine.request("DELETE", "/v1.24/networks/told")

    def events() -> list[Any]:
        filters = quote(json.dumps({"type": ["network"]}))
        answer = engine.request("GET", f"/v1.24/events?since={since:.6f}&until={time.time():.6f}&filters={filters}")
        return [json.loads(line) for line in answer.body.splitlines()]

    found = events()
    assert [(event["Action"], event["Actor"]["ID"]) for event in found] == [
        ("create", network),
        ("connect", network),
        ("create", second),
        ("connect", second),
        ("disconnect", second),
        ("disconnect", network),
        ("destroy", network),
    ]
    assert all(event["Type"] == "network" for event in found)
    assert found[0]["Actor"]["Attributes"] == {"name": "told", "type": "bridge"}
    assert found[1]["Actor"]["Attributes"] == {"container": container, "name": "told", "type": "bridge"}


# --- clients --------------------------------------------------------------------------------------


def test_docker_cli(engine: TempEngine) -> None:
    made = engine.docker(
        *("network", "create", "--driver", "bridge", "--subnet", "10.219.0.0/16", "--ip-range", "10.219.5.0/24"),
        *("--gateway", "10.219.0.254", "--aux-address", "printer=10.219.5.1", "--label", "a=b"),
        *("-o", "com.docker.network.bridge.enable_icc=true", "net"),
    ).line
    engine.networks()
    assert made[:12] in engine.docker("network", "ls", "--filter", "name=net").out
    shown = json.loads(engine.docker("network", "inspect", "net").out)[0]
    assert shown["Id"] == made
    assert shown["IPAM"]["Config"][0]["AuxiliaryAddresses"] == {"printer": "10.219.5.1"}
    container = engine.docker("run", "-d", "--name", "c", "busybox", "sleep", "600").line
    engine.docker("network", "connect", "--ip", "10.219.7.7", "--alias", "web", "net", "c")
    assert "10.219.7.7/16" in run(engine, "c", "ip", "addr")
    assert engine.docker("ps", "-q", "--no-trunc", "--filter", "network=net").line == container
    refused = engine.docker("network", "rm", "net", status=1)
    assert "has active endpoints" in refused.err
    engine.docker("network", "disconnect", "net", "c")
    assert engine.docker("network", "rm", "net").line == "net"
    assert "not found" in engine.docker("network", "inspect", "net", status=1).err
    assert "already exists" in (
        engine.docker("network", "create", "twice").line and engine.docker("network", "create", "twice", status=1).err
    )
    identifier = inspect(engine, "twice")["Id"]
    for given, shown in (
        ("name=twi", {"twice"}),
        (f"id={identifier[:12]}", {"twice"}),
        ("driver=host", {"host"}),
        ("driver=bridge", {"bridge", "twice"}),
        ("label=a", set()),
        ("type=custom", {"twice"}),
        ("type=builtin", {"bridge", "host", "none"}),
        ("scope=local", {"bridge", "host", "none", "twice"}),
        ("scope=swarm", set()),
        ("dangling=true", {"twice"}),
    ):
        listed = engine.docker("network", "ls", "--format", "{{.Name}}", "--filter", given).out
        assert {*listed.split()} == shown, given
    assert "Invalid filter" in engine.docker("network", "ls", "--filter", "nothere=x", status=1).err
    assert "user specified IP address" in engine.docker("run", "--ip", "10.1.1.1", "busybox", "true", status=125).err
    result = engine.docker("run", "--rm", "--network", "twice", "--link", "c:alias", "busybox", "env")
    assert "ALIAS" not in result.out, "links on users' networks are names alone"


@pytest.fixture
def client(engine: TempEngine) -> Iterator[docker.DockerClient]:
    found = engine.client()
    yield found
    found.close()


def test_docker_py(client: docker.DockerClient, engine: TempEngine) -> None:
    pool = docker.types.IPAMPool(
        subnet="10.218.0.0/24", gateway="10.218.0.254", aux_addresses={"vrouter": "10.218.0.1"}
    )
    network = client.networks.create(
        "py",
        driver="bridge",
        check_duplicate=True,
        ipam=docker.types.IPAMConfig(pool_configs=[pool]),
        labels={"a": "b"},
    )
    engine.networks()
    with pytest.raises(docker.errors.APIError) as raised:
        client.networks.create("py", check_duplicate=True)
    assert raised.value.status_code == 409
    assert [found.id for found in client.networks.list(names=["py"])] == [network.id]
    container = client.containers.run("busybox", ["sleep", "600"], detach=True, network="py")
    other = client.containers.run("busybox", ["sleep", "600"], detach=True)
    network.connect(other, ipv4_address="10.218.0.50", aliases=["o"])
    network.reload()
    assert {each.id for each in network.containers} == {container.id, other.id}
    assert network.attrs["Containers"][other.id]["IPv4Address"] == "10.218.0.50/24"
    with pytest.raises(docker.errors.APIError) as raised:
        network.connect(other)
    assert raised.value.status_code == 403
    network.disconnect(other, force=True)
    with pytest.raises(docker.errors.APIError, match="has active endpoints"):
        network.remove()
    container.remove(force=True)
    network.remove()
    with pytest.raises(docker.errors.NotFound):
        client.networks.get("py")
