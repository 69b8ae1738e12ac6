"""Networks at API 1.25 and newer: raw HTTP, and what a container sees."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from tests.api.test_networks import create, disconnect, inspect, pools, run, sleeper
from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, free_ports, until


def newer(engine: TempEngine, method: str, target: str, body: Any = None, status: int = 200) -> Any:
    """A request of the newest API version; returns the response's JSON."""
    answer = engine.request(method, target, body)
    assert answer.status == status, answer
    return answer.json() if answer.body else None


def test_prune(engine: TempEngine) -> None:
    create(engine, "spare", Labels={"tier": "test"})
    create(engine, "stopped")
    create(engine, "used")
    engine.create("true", network="stopped")
    sleeper(engine, "used")
    target = "/networks/prune?filters="
    assert newer(engine, "POST", target + quote('{"until":["24h"]}')) == {"NetworksDeleted": None}
    assert newer(engine, "POST", target + quote('{"label!":{"tier":true}}')) == {"NetworksDeleted": ["stopped"]}
    assert newer(engine, "POST", "/v1.25" + target) == {"NetworksDeleted": ["spare"]}
    assert sorted(engine.networks()) == ["used"]
    assert "'name'" in newer(engine, "POST", target + quote('{"name":["used"]}'), status=400)["message"]
    assert engine.request("POST", "/v1.24/networks/prune").status == 404


# --- the resource ---------------------------------------------------------------------------------


def make(engine: TempEngine, name: str, status: int = 201, version: str = "", **fields: Any) -> Any:
    made = newer(engine, "POST", f"{version}/networks/create", {"Name": name} | fields, status)
    engine.networks()
    return made


def test_create_and_inspect(engine: TempEngine) -> None:
    made = make(engine, "mine", Attachable=True, Scope="local", EnableIPv4=None, EnableIPv6=None, ConfigFrom=None)
    assert made == {"Id": made["Id"], "Warning": ""}
    shown = newer(engine, "GET", "/networks/mine?verbose=true&scope=local")
    (pool,) = shown["IPAM"]["Config"]
    assert shown.pop("Created").startswith("20") and shown.pop("IPAM")["Driver"] == "default"
    assert shown == {
        "Name": "mine",
        "Id": made["Id"],
        "Scope": "local",
        "Driver": "bridge",
        "EnableIPv4": True,
        "EnableIPv6": False,
        "Internal": False,
        "Attachable": True,
        "Ingress": False,
        "ConfigFrom": {"Network": ""},
        "ConfigOnly": False,
        "Containers": {},
        "Options": {},
        "Labels": {},
        "Status": {"IPAM": {"Subnets": {pool["Subnet"]: {"IPsInUse": 3, "DynamicIPsAvailable": 253}}}},
    }
    assert "Status" not in newer(engine, "GET", "/v1.51/networks/mine")
    for query, status in (("verbose=perhaps", 400), ("scope=swarm", 404)):
        newer(engine, "GET", f"/networks/mine?{query}", status=status)


def test_the_list(engine: TempEngine) -> None:
    """It has no containers from 1.28 on."""
    make(engine, "mine")
    container = sleeper(engine, "mine")

    def listed(version: str) -> Any:
        found = {each["Name"]: each for each in newer(engine, "GET", f"{version}/networks")}
        return found["mine"]

    for version in ("", "/v1.28"):
        assert not listed(version).keys() & {"Containers", "Status"}
    assert [*listed("/v1.27")["Containers"]] == [container]
    whole = newer(engine, "GET", "/networks/mine")
    assert listed("") == {key: value for key, value in whole.items() if key not in ("Containers", "Status")}


def test_numbers_of_addresses(engine: TempEngine) -> None:
    make(engine, "mine", IPAM=pools({"Subnet": "10.232.7.0/24", "IPRange": "10.232.7.128/28"}))

    def counts() -> tuple[int, int]:
        found = newer(engine, "GET", "/networks/mine")["Status"]["IPAM"]["Subnets"]["10.232.7.0/24"]
        return found["IPsInUse"], found["DynamicIPsAvailable"]

    assert counts() == (3, 16)
    container = sleeper(engine, "mine")
    assert counts() == (4, 15)
    engine.post(f"/containers/{container}/stop?t=0")
    until("the address is free", lambda: counts() == (3, 16))


def test_names_are_unique(engine: TempEngine) -> None:
    make(engine, "twice")
    message = make(engine, "twice", 409, "/v1.25", CheckDuplicate=False)["message"]
    assert message == "network with name twice already exists"


def test_subnets_have_no_host_bits(engine: TempEngine) -> None:
    config = pools({"Subnet": "10.232.8.9/24"})
    message = make(engine, "mine", 400, "/v1.25", IPAM=config)["message"]
    assert "invalid subnet 10.232.8.9/24: it should be 10.232.8.0/24" in message
    make(engine, "mine", 201, "/v1.24", IPAM=config)
    assert inspect(engine, "mine")["IPAM"]["Config"][0]["Subnet"] == "10.232.8.0/24"


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"Ingress": True}, 400, "needs a swarm"),
        ({"Scope": "swarm"}, 400, "local networks alone"),
        ({"ConfigFrom": {"Network": "nothere"}}, 404, "configuration network 'nothere' not found"),
        ({"ConfigFrom": {"Network": "bridge"}}, 404, "configuration network 'bridge' not found"),
        ({"EnableIPv4": False}, 400, "IPv4 or IPv6 must be enabled"),
        ({"Driver": "ipvlan", "Options": {"parent": "nothere0"}}, 400, "parent link 'nothere0' does not exist"),
        ({"Driver": "overlay"}, 503, "This node is not a swarm manager"),
        ({"Driver": "weave"}, 404, 'plugin "weave" not found'),
    ],
)
def test_bad_creates(engine: TempEngine, fields: dict[str, Any], status: int, words: str) -> None:
    assert words in make(engine, "bad", status, **fields)["message"]
    assert engine.networks() == {}


def test_configuration_networks(engine: TempEngine) -> None:
    config = pools({"Subnet": "10.232.9.0/24"})
    make(engine, "conf", ConfigOnly=True, IPAM=config, Labels={"a": "b"})
    make(engine, "mine", ConfigFrom={"Network": "conf"})
    shown = newer(engine, "GET", "/networks/mine")
    assert (shown["ConfigFrom"], shown["Labels"]) == ({"Network": "conf"}, {"a": "b"})
    container = sleeper(engine, "mine")
    assert endpoints_of(engine, container)["mine"]["IPAddress"] == "10.232.9.2"
    message = newer(engine, "POST", "/networks/conf/connect", {"Container": container}, 403)["message"]
    assert "containers cannot be on a configuration network" in message
    assert "is in use" in newer(engine, "DELETE", "/networks/conf", status=403)["message"]
    assert several(engine, 400, "conf", conf={})["message"].endswith("cannot be on a configuration network")
    assert engine.request("DELETE", f"/containers/{container}?force=1").status == 204
    assert newer(engine, "POST", "/networks/prune") == {"NetworksDeleted": ["mine"]}
    assert newer(engine, "DELETE", "/networks/conf", status=204) is None


def test_networks_without_ipv4(engine: TempEngine) -> None:
    make(engine, "six", EnableIPv4=False, EnableIPv6=True)
    make(engine, "four", 201, "/v1.47", EnableIPv4=False, EnableIPv6=True)
    assert newer(engine, "GET", "/networks/four")["EnableIPv4"] is True
    shown = newer(engine, "GET", "/networks/six")
    (pool,) = shown["IPAM"]["Config"]
    assert (shown["EnableIPv4"], shown["EnableIPv6"], ip_network(pool["Subnet"]).version) == (False, True, 6)
    container = sleeper(engine, "six", "here")
    endpoint = endpoints_of(engine, container)["six"]
    assert (endpoint["IPAddress"], endpoint["Gateway"]) == ("", "")
    assert ip_address(endpoint["GlobalIPv6Address"]) in ip_network(pool["Subnet"])
    assert "inet " not in run(engine, container, "ip", "addr", "show", "eth0")
    other = sleeper(engine, "six")
    run(engine, other, "ping", "-c", "1", "-W", "5", "here")
    assert pool["Gateway"] in run(engine, container, "ip", "-6", "route", "show", "default")
    engine.post(f"/containers/{container}/restart?t=0")
    assert endpoints_of(engine, container)["six"]["IPAddress"] == ""
    engine.restart()
    assert endpoints_of(engine, other)["six"]["GlobalIPv6Address"]
    run(engine, other, "ping", "-c", "1", "-W", "5", "here")


def test_ports_of_a_container_without_ipv4(engine: TempEngine) -> None:
    make(engine, "six", EnableIPv4=False, EnableIPv6=True)
    gateway = inspect(engine, "six")["IPAM"]["Config"][0]["Gateway"]
    (port,) = free_ports(1)
    published = {"PortBindings": {"80/tcp": [{"HostPort": str(port)}]}}
    serve = ("sh", "-c", "echo found > /index.html; exec httpd -f -p 80 -h /")
    container = engine.started(*serve, network="six", host=published)
    bindings = newer(engine, "GET", f"/containers/{container}/json")["NetworkSettings"]["Ports"]["80/tcp"]
    assert bindings == [{"HostIp": "::", "HostPort": str(port)}]

    def answer() -> str:
        try:
            with urlopen(f"http://[{gateway}]:{port}/index.html", timeout=10 * PATIENCE) as reply:
                return str(reply.read().decode())
        except OSError:
            return ""

    until("the container serves", lambda: answer() == "found\n")
    published["PortBindings"]["80/tcp"][0] |= {"HostIp": "127.0.0.1"}
    refused = engine.create("true", network="six", host=published)
    words = engine.post(f"/containers/{refused}/start", 500).json()["message"]
    assert "the container has no IPv4 address, its network no IPv4" in words


def test_prefix_of_interfaces(engine: TempEngine) -> None:
    make(engine, "mine", Options={"com.docker.network.container_iface_prefix": "net"})
    make(engine, "other")
    container = sleeper(engine, "mine")
    newer(engine, "POST", "/networks/other/connect", {"Container": container})
    assert set(run(engine, container, "ls", "/sys/class/net").split()) >= {"lo", "net0", "eth0"}


# --- endpoints ------------------------------------------------------------------------------------


def several(engine: TempEngine, status: int = 201, mode: str = "one", version: str = "/v1.55", **endpoints: Any) -> Any:
    body = {
        "Image": "busybox",
        "Cmd": ["sleep", "600"],
        "HostConfig": {"NetworkMode": mode},
        "NetworkingConfig": {"EndpointsConfig": endpoints},
    }
    return newer(engine, "POST", f"{version}/containers/create", body, status)


def endpoints_of(engine: TempEngine, container: str, version: str = "") -> Any:
    return newer(engine, "GET", f"{version}/containers/{container}/json")["NetworkSettings"]["Networks"]


def test_several_endpoints_at_create(engine: TempEngine) -> None:
    create(engine, "one", IPAM=pools({"Subnet": "10.232.1.0/24"}))
    two = create(engine, "two", IPAM=pools({"Subnet": "10.232.2.0/24"}))["Id"]
    fixed = {"IPAMConfig": {"IPv4Address": "10.232.2.9"}, "Aliases": ["nine"]}
    container = several(engine, two=fixed, one={})["Id"]
    engine.post(f"/containers/{container}/start")
    networks = engine.inspect(container)["NetworkSettings"]["Networks"]
    assert sorted(networks) == ["one", "two"] and networks["two"]["IPAddress"] == "10.232.2.9"
    assert "10.232.1." in run(engine, container, "ip", "-4", "addr", "show", "eth0")
    assert "10.232.2.9/24" in run(engine, container, "ip", "-4", "addr", "show", "eth1")
    assert "nine" in run(engine, sleeper(engine, "two"), "nslookup", "nine")
    message = several(engine, 400, two={}, **{two: {}})["message"]
    assert message == f"EndpointsConfig: network two is given twice, once as {two}"
    for mode, others in (("host", {"one": {}}), ("one", {"one": {}, "none": {}})):
        assert "no other network goes with" in several(engine, 400, mode, **others)["message"]


def test_what_a_network_does_not_allow_is_refused_at_create(engine: TempEngine) -> None:
    create(engine, "one", IPAM=pools({"Subnet": "10.232.3.0/24"}))
    create(engine, "any")
    outside = {"IPAMConfig": {"IPv4Address": "10.9.9.9"}}
    for endpoints, words in (
        ({"one": outside}, "Requested address is out of range: 10.9.9.9"),
        ({"any": outside}, "only when connecting to networks with user configured subnets"),
        ({"default": outside}, "on user defined networks only"),
        ({"bridge": {"Aliases": ["a"]}}, "only for containers in user defined networks"),
        ({"one": {"MacAddress": "01:00:00:00:00:00"}}, "network one: invalid MacAddress '01:00:00:00:00:00'"),
        ({"one": {"DriverOpts": {"com.docker.network.endpoint.ifname": "a/b"}}}, "endpoint.ifname: 'a/b'"),
    ):
        (mode,) = endpoints
        assert words in several(engine, 400, mode, **endpoints)["message"]
    message = several(engine, 400, "one", one=outside, any=outside)["message"]
    assert message.startswith("invalid endpoint settings:\n") and message.count("10.9.9.9") == 2
    assert newer(engine, "GET", "/containers/json?all=1") == []


def test_mac_addresses_of_endpoints(engine: TempEngine) -> None:
    create(engine, "one")
    create(engine, "two")
    first, second, third = (f"02:42:00:00:07:0{number}" for number in range(3))
    container = several(engine, one={"MacAddress": first}, two={"MacAddress": second.upper().replace(":", "-")})["Id"]

    def seen() -> dict[str, str]:
        return {name: each["MacAddress"] for name, each in endpoints_of(engine, container).items()}

    assert seen() == {"one": "", "two": ""}
    for _ in range(2):
        engine.post(f"/containers/{container}/start")
        assert seen() == {"one": first, "two": second}
        assert run(engine, container, "cat", "/sys/class/net/eth1/address").strip() == second
        engine.post(f"/containers/{container}/stop?t=0")
    assert newer(engine, "GET", f"/v1.51/containers/{container}/json")["Config"]["MacAddress"] == first
    assert "MacAddress" not in newer(engine, "GET", f"/containers/{container}/json")["Config"]
    engine.post(f"/containers/{container}/start")
    disconnect(engine, "two", container)
    for version, mac in (("/v1.53", None), ("/v1.54", third)):
        body = {"Container": container, "EndpointConfig": {"MacAddress": third}}
        newer(engine, "POST", f"{version}/networks/two/connect", body)
        assert (seen()["two"] == third) is (mac is not None)
        disconnect(engine, "two", container)


def test_the_mac_of_a_container(engine: TempEngine) -> None:
    """Before 1.52 it was one for the whole container."""
    mac = "02:42:00:00:07:09"
    body = {"Image": "busybox", "Cmd": ["sleep", "600"], "MacAddress": mac}
    for version, warned in (("/v1.43", False), ("/v1.51", True)):
        made = newer(engine, "POST", f"{version}/containers/create", body, 201)
        assert any("MacAddress field is now deprecated" in each for each in made["Warnings"]) is warned
        engine.post(f"/containers/{made['Id']}/start")
        assert endpoints_of(engine, made["Id"])["bridge"]["MacAddress"] == mac
        engine.post(f"/containers/{made['Id']}/stop?t=0")
    made = newer(engine, "POST", "/v1.52/containers/create", body, 201)
    engine.post(f"/containers/{made['Id']}/start")
    assert endpoints_of(engine, made["Id"])["bridge"]["MacAddress"] != mac


def test_names_of_endpoints(engine: TempEngine) -> None:
    create(engine, "one")
    container = several(engine, one={"Aliases": ["nick"]})["Id"]
    short = container[:12]
    assert endpoints_of(engine, container)["one"]["DNSNames"] is None
    engine.post(f"/containers/{container}/rename?name=first")
    engine.post(f"/containers/{container}/start")
    endpoint = endpoints_of(engine, container)["one"]
    assert (endpoint["Aliases"], endpoint["DNSNames"]) == (["nick"], ["first", "nick", short])
    assert endpoints_of(engine, container, "/v1.44")["one"]["Aliases"] == ["nick", short]
    assert "DNSNames" not in endpoints_of(engine, container, "/v1.24")["one"]
    engine.post(f"/containers/{container}/rename?name=second")
    assert endpoints_of(engine, container)["one"]["DNSNames"] == ["second", "nick", short]
    assert "second.one" in run(engine, sleeper(engine, "one"), "nslookup", endpoint["IPAddress"])
    engine.post(f"/containers/{container}/stop?t=0")
    assert endpoints_of(engine, container)["one"]["DNSNames"] == ["second", "nick", short]


def test_priority_of_gateways(engine: TempEngine) -> None:
    gateways = {}
    for name, subnet in (("a", "10.232.4.0/24"), ("b", "10.232.5.0/24"), ("c", "10.232.6.0/24")):
        create(engine, name, IPAM=pools({"Subnet": subnet}))
        gateways[inspect(engine, name)["IPAM"]["Config"][0]["Gateway"]] = name

    def default(container: str) -> str:
        words = run(engine, container, "ip", "route", "show", "default").split()
        return gateways[words[words.index("via") + 1]]

    plain = several(engine, mode="b", b={"GwPriority": 1}, a={}, version="/v1.47")["Id"]
    container = several(engine, mode="b", b={"GwPriority": 1}, a={})["Id"]
    for each in (plain, container):
        engine.post(f"/containers/{each}/start")
    assert (default(plain), default(container)) == ("a", "b")
    assert endpoints_of(engine, container)["b"]["GwPriority"] == 1
    newer(engine, "POST", "/networks/c/connect", {"Container": container, "EndpointConfig": {"GwPriority": 2}})
    assert default(container) == "c"
    disconnect(engine, "c", container)
    assert default(container) == "b"
    newer(engine, "POST", "/networks/c/connect", {"Container": container, "EndpointConfig": {"GwPriority": -1}})
    disconnect(engine, "b", container)
    assert default(container) == "a"


def test_options_of_endpoints(engine: TempEngine) -> None:
    create(engine, "one")
    create(engine, "two")
    option = "com.docker.network.endpoint."
    named = {f"{option}ifname": "front0", f"{option}sysctls": "net.ipv4.conf.IFNAME.log_martians=1"}
    container = several(engine, one={"DriverOpts": named}, two={})["Id"]
    engine.post(f"/containers/{container}/start")
    assert set(run(engine, container, "ls", "/sys/class/net").split()) >= {"lo", "front0", "eth0"}
    setting = "/proc/sys/net/ipv4/conf/{}/log_martians"
    assert run(engine, container, "cat", setting.format("front0"), setting.format("eth0")).split() == ["1", "0"]
    run(engine, container, "ping", "-c", "1", "-W", "5", inspect(engine, "one")["IPAM"]["Config"][0]["Gateway"])
    assert endpoints_of(engine, container)["one"]["DriverOpts"] == named
    disconnect(engine, "two", container)
    connected = {"Container": container, "EndpointConfig": {"DriverOpts": {f"{option}ifname": "back"}}}
    newer(engine, "POST", "/networks/two/connect", connected)
    assert "back" in run(engine, container, "ls", "/sys/class/net").split()
    unknown = {"DriverOpts": {f"{option}sysctls": "net.ipv4.conf.IFNAME.no_such_thing=1"}}
    refused = several(engine, one=unknown)["Id"]
    words = engine.post(f"/containers/{refused}/start", 400).json()["message"]
    assert "sysctl net.ipv4.conf.IFNAME.no_such_thing=1: No such file or directory" in words


def link_local(mac: str) -> str:
    """The link-local address that a link makes of its MAC (RFC 4291, appendix A)."""
    one, *rest = bytes.fromhex(mac.replace(":", ""))
    digits = bytes((one ^ 2, *rest[:2], 0xFF, 0xFE, *rest[2:]))
    return str(IPv6Address(b"\xfe\x80" + bytes(6) + digits))


def test_ipv6_of_a_container(engine: TempEngine) -> None:
    """Every loopback has ::1, a link-local address is made of the MAC, and sysctls may switch IPv6
    off.
    """
    create(engine, "four")
    create(engine, "both", EnableIPv6=True, IPAM=pools({"Subnet": "fd77:9::/64"}))
    plain = several(engine, four={})["Id"]
    engine.post(f"/containers/{plain}/start")
    assert "inet6 ::1/128" in run(engine, plain, "ip", "-6", "addr")
    assert "eth0" not in run(engine, plain, "ip", "-6", "addr")
    six = several(engine, both={})["Id"]
    engine.post(f"/containers/{six}/start")
    newer(engine, "POST", "/networks/both/connect", {"Container": plain})
    for container, link in ((six, "eth0"), (plain, "eth1")):
        shown = run(engine, container, "ip", "-6", "addr", "show", link)
        assert f"inet6 {link_local(endpoints_of(engine, container)['both']['MacAddress'])}/64" in shown

    option = "com.docker.network.endpoint.sysctls"
    without = [several(engine, both={"DriverOpts": {option: "net.ipv6.conf.IFNAME.disable_ipv6=1"}})["Id"]]
    body = {"Image": "busybox", "Cmd": ["sleep", "600"]}
    body["HostConfig"] = {"NetworkMode": "both", "Sysctls": {"net.ipv6.conf.all.disable_ipv6": "1"}}
    without.append(newer(engine, "POST", "/containers/create", body, 201)["Id"])
    for container in without:
        engine.post(f"/containers/{container}/start")
        shown = endpoints_of(engine, container)["both"]
        assert shown["IPAddress"] and shown["GlobalIPv6Address"] == "" and shown["IPv6Gateway"] == ""
        assert "fd77:9:" not in run(engine, six, "nslookup", container[:12])
        assert "fd77:9:" not in run(engine, container, "cat", "/etc/hosts")
    assert "::1" not in run(engine, without[1], "cat", "/etc/hosts")


def test_sysctls_of_eth0(engine: TempEngine) -> None:
    create(engine, "one")
    body = {"Image": "busybox", "Cmd": ["sleep", "600"]}
    body["HostConfig"] = {"NetworkMode": "one", "Sysctls": {"net.ipv4.conf.eth0.log_martians": "1"}}
    made = newer(engine, "POST", "/v1.47/containers/create", body, 201)
    assert made["Warnings"][0].startswith('Migrated sysctl "net.ipv4.conf.eth0.log_martians" to DriverOpts')
    engine.post(f"/containers/{made['Id']}/start")
    assert run(engine, made["Id"], "cat", "/proc/sys/net/ipv4/conf/eth0/log_martians").strip() == "1"
    assert "must be supplied using driver option" in newer(engine, "POST", "/containers/create", body, 400)["message"]
