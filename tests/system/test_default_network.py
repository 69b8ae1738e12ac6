"""dockerd's keys for networks, each by its effect: what inspect says, links and routes, files in
containers, packets. Each engine is alone in a network namespace with a LAN beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.engines import Dockerd, HostDockerd
from engine.system import netfilter
from tests.support.engine.harness import TempEngine, busybox_archive, until
from tests.support.engine.lan import (
    HOST,
    HOST6,
    LAN,
    LAN6,
    Lan,
    address_of,
    answer,
    host_of_its_own,
    one_port,
    ports_of,
    serving,
    within,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PREFIX = "com.docker.network."


class Place(NamedTuple):
    engine: TempEngine
    lan: Lan
    namespace: int

    def network(self, name: str = "bridge") -> dict[str, Any]:
        found: dict[str, Any] = self.engine.request("GET", f"/v1.48/networks/{name}").json()
        return found

    def option(self, key: str, name: str = "bridge") -> str | None:
        value: str | None = self.network(name)["Options"].get(PREFIX + key)
        return value

    def run(self, *command: str, options: tuple[str, ...] = ()) -> str:
        return self.engine.docker("run", "--rm", *options, "busybox", *command).out

    def create(self, name: str, **body: Any) -> None:
        assert self.engine.request("POST", "/v1.48/networks/create", {"Name": name, **body}).status == 201


@contextlib.contextmanager
def place_with(*arguments: str, **keys: Any) -> Iterator[Place]:
    """`keys`: of dockerd's file, `_` for `-`."""
    with contextlib.ExitStack() as stack:
        if keys:
            arguments = (*arguments, "--config", str(stack.enter_context(_file(keys))))
        engine, namespace = stack.enter_context(host_of_its_own(*arguments, ipv6=True))
        lan = Lan(namespace)
        stack.callback(lan.close)
        yield Place(engine, lan, namespace)


@contextlib.contextmanager
def _file(keys: dict[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        file = Path(directory, "daemon.json")
        file.write_text(json.dumps({name.replace("_", "-"): value for name, value in keys.items()}))
        yield file


def test_subnet_part_and_gateway() -> None:
    with place_with(bip="192.168.150.5/24", fixed_cidr="192.168.150.128/25", default_gateway="192.168.150.99") as place:
        pool = {
            "Subnet": "192.168.150.0/24",
            "IPRange": "192.168.150.128/25",
            "Gateway": "192.168.150.5",
            "AuxiliaryAddresses": {"DefaultGatewayIPv4": "192.168.150.99"},
        }
        assert place.network()["IPAM"]["Config"] == [pool], "as dockerd 28.5.2"
        assert "inet 192.168.150.5/24 " in place.lan.on_host(f"ip address show {place.engine.bridge}")
        assert place.run("ip", "route").splitlines()[0].split()[:3] == ["default", "via", "192.168.150.99"]
        container = place.engine.started("sleep", "1000", network="bridge")
        endpoint = place.engine.inspect(container)["NetworkSettings"]["Networks"]["bridge"]
        assert (endpoint["IPAddress"], endpoint["Gateway"]) == ("192.168.150.129", "192.168.150.99")
        place.engine.restart()
        place.engine.docker("restart", "-t", "0", container)
        assert place.engine.inspect(container)["NetworkSettings"]["Networks"]["bridge"]["Gateway"] == "192.168.150.99"
        assert place.network()["IPAM"]["Config"] == [pool]


def test_other_addresses_after_a_restart() -> None:
    """A bridge that a container runs on keeps those that it has."""

    def subnets(place: Place) -> list[str]:
        return [each["Subnet"] for each in place.network()["IPAM"]["Config"]]

    def restarted(place: Place, *arguments: str) -> list[str]:
        place.engine.arguments = arguments
        place.engine.terminate()
        until(
            "the stock is gone", lambda: "veth" not in place.lan.on_host(f"ip link show master {place.engine.bridge}")
        )
        place.engine.start()
        return subnets(place)

    with place_with("--bip", "192.168.150.1/24") as place:
        assert subnets(place) == ["192.168.150.0/24"]
        assert restarted(place, "--bip", "192.168.151.1/24") == ["192.168.151.0/24"]
        six = restarted(place, "--bip", "192.168.151.1/24", "--ipv6", "--bip6", "fd99::1/64")
        assert six == ["192.168.151.0/24", "fd99::/64"]
        assert restarted(place, "--fixed-cidr", "192.168.152.0/25", "--ipv6", "--bip6", "fd98::1/64") == [
            "192.168.152.0/25",
            "fd98::/64",
        ]
        container = serving(place.engine, {"80/tcp": [{}]})
        place.engine.arguments = ("--bip", "192.168.153.1/24")
        place.engine.restart()
        assert subnets(place) == ["192.168.152.0/25"]
        assert "keeps its subnet 192.168.152.0/25, not 192.168.153.1/24" in place.engine.log()
        assert LAN in place.lan.inside(lambda: answer(HOST, one_port(place.engine, container)))


@pytest.mark.parametrize(
    ("keys", "subnet", "own"),
    [
        ({}, "", ""),
        ({"fixed_cidr_v6": "fd99::/64"}, "fd99::/64", "fd99::1"),
        ({"bip6": "fd99::5/64", "default_gateway_v6": "fd99::9"}, "fd99::/64", "fd99::5"),
    ],
)
def test_ipv6(keys: dict[str, str], subnet: str, own: str) -> None:
    with place_with(ipv6=True, **keys) as place:
        six = next(each for each in place.network()["IPAM"]["Config"] if ":" in each["Subnet"])
        assert place.network()["EnableIPv6"]
        assert subnet in ("", six["Subnet"]) and own in ("", six["Gateway"])
        assert f"inet6 {six['Gateway']}/64 " in place.lan.on_host(f"ip -6 address show {place.engine.bridge}")
        web = serving(place.engine, {"80/tcp": [{}]})
        endpoint = place.engine.inspect(web)["NetworkSettings"]["Networks"]["bridge"]
        assert endpoint["IPv6Gateway"] == keys.get("default_gateway_v6", six["Gateway"])
        ports = ports_of(place.engine, web)["80/tcp"]
        assert [ip for ip, _ in ports] == ["0.0.0.0", "::"]
        place.engine.restart()
        assert six in place.network()["IPAM"]["Config"], "it stays"
        if "default_gateway_v6" not in keys:
            assert LAN6 in place.lan.inside(lambda: answer(HOST6, ports[1][1])), "the client's address is kept"


def test_mtu_icc_masquerade_and_host_address() -> None:
    with place_with(mtu=1234, icc=False, ip_masq=False, ip="127.0.0.1") as place:
        assert place.option("driver.mtu") == "1234"
        assert place.option("bridge.enable_icc") == place.option("bridge.enable_ip_masquerade") == "false"
        assert place.option("bridge.host_binding_ipv4") == "127.0.0.1"
        assert "mtu 1234 " in place.lan.on_host(f"ip link show {place.engine.bridge}")
        assert "mtu 1234 " in place.run("ip", "link", "show", "eth0")
        web = serving(place.engine, {"80/tcp": [{}]})
        assert [ip for ip, _ in ports_of(place.engine, web)["80/tcp"]] == ["127.0.0.1"]
        address, port = address_of(place.engine, web), one_port(place.engine, web, ip="127.0.0.1")
        assert within(place.namespace, lambda: answer("127.0.0.1", port)), "the host reaches it"
        assert place.lan.inside(lambda: answer(HOST, port)) == "ConnectionRefusedError"
        said = place.engine.docker("run", "--rm", "busybox", "nc", "-w", "2", address, "80", status=None)
        assert said.status != 0, "no other container does"
        place.create("own")
        assert place.network("own")["Options"] == {}, "the keys are for the default network"
        assert "mtu 1500 " in place.run("ip", "link", "show", "eth0", options=("--network=own",))


def test_no_masquerade() -> None:
    """A service of the LAN sees the container's own address."""
    with place_with(ip_masq=False) as place:
        server = place.lan.inside(lambda: socket.create_server(("", 0)))
        seen: list[str] = []

        def serve() -> None:
            connection, peer = server.accept()
            connection.close()
            seen.append(peer[0])

        thread = threading.Thread(target=serve)
        thread.start()
        place.run("nc", "-w", "3", LAN, str(server.getsockname()[1]))
        thread.join()
        server.close()
        assert seen[0].startswith("172."), seen


def test_no_forwarding() -> None:
    forwarding = "cat /proc/sys/net/ipv4/ip_forward"
    with host_of_its_own(ipv6=True) as (engine, namespace):
        lan = Lan(namespace)
        try:
            engine.stop()
            lan.on_host("sysctl -qw net.ipv4.ip_forward=0")
            engine.arguments = ("--ip-forward=false",)
            engine.start()
            assert lan.on_host(forwarding).strip() == "0"
            info = engine.request("GET", "/info").json()
            assert not info["IPv4Forwarding"] and "WARNING: IPv4 forwarding is disabled" in info["Warnings"]
            engine.stop()
            engine.arguments = ()
            engine.start()
            assert lan.on_host(forwarding).strip() == "1"
        finally:
            lan.close()


def test_names_and_files_of_containers(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "dns": ["192.0.2.1"],
        "dns_search": ["a.example"],
        "dns_opts": ["ndots:3"],
        "host_gateway_ips": ["192.0.2.5", "fd98::5"],
    }
    with place_with(**keys) as place:
        own = "nameserver 192.0.2.1\nsearch a.example\noptions ndots:3\n"
        assert place.run("cat", "/etc/resolv.conf") == own
        assert place.run("cat", "/etc/resolv.conf", options=("--network=host",)) == own
        assert "nameserver 192.0.2.9\n" in place.run("cat", "/etc/resolv.conf", options=("--dns=192.0.2.9",))
        place.create("own")
        assert place.run("cat", "/etc/resolv.conf", options=("--network=own",)) == own.replace(
            "192.0.2.1", "127.0.0.11"
        )
        hosts = place.run("cat", "/etc/hosts", options=("--add-host=x:host-gateway",))
        assert "192.0.2.5\tx\nfd98::5\tx\n" in hosts
        container = place.engine.started("sleep", "1000", network="bridge")
        host = place.engine.inspect(container)["HostConfig"]
        assert (host["Dns"], host["DnsSearch"], host["DnsOptions"]) == ([], [], [])
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 192.0.2.77\nsearch my.example\n")
    with place_with("--resolv-conf", str(file)) as place:
        assert place.run("cat", "/etc/resolv.conf") == file.read_text()


def test_options_of_new_networks() -> None:
    options = {"bridge": {f"{PREFIX}driver.mtu": "1234", f"{PREFIX}bridge.enable_icc": "false"}, "ipvlan": {"a": "b"}}
    with place_with(default_network_opts=options) as place:
        place.create("one")
        assert place.network("one")["Options"] == options["bridge"]
        assert "mtu 1234 " in place.run("ip", "link", "show", "eth0", options=("--network=one",))
        place.create("two", Options={f"{PREFIX}driver.mtu": "1300"})
        assert place.network("two")["Options"] == {**options["bridge"], f"{PREFIX}driver.mtu": "1300"}
        place.create("configuration", ConfigOnly=True)
        assert place.network("configuration")["Options"] == options["bridge"]
        place.create("three", ConfigFrom={"Network": "configuration"})
        assert place.network("three")["Options"] == options["bridge"]
        assert place.option("driver.mtu") == "1500", "not of the default network"


def test_no_default_network() -> None:
    """As dockerd: containers that name no network, or `bridge`, have none."""
    with host_of_its_own(ipv6=True) as (engine, namespace):
        engine.stop()
        bridge, engine.bridge = engine.bridge, "none"
        engine.start()
        assert bridge not in within(namespace, lambda: Path("/proc/thread-self/net/dev").read_text())
        names = {each["Name"] for each in engine.request("GET", "/networks").json()}
        assert names == {"host", "none"}
        for network in ("default", "bridge"):
            said = engine.docker("run", "--rm", f"--network={network}", "-p", "80", "busybox", "ip", "link").out
            assert "lo:" in said and "eth0" not in said
        said = engine.docker("run", "--rm", "--add-host=x:host-gateway", "busybox", "true", status=None).err
        assert "unable to derive the IP value for host-gateway" in said
        said = engine.docker("network", "create", "bridge", status=None).err
        assert "operation is not permitted on predefined bridge network" in said
        engine.docker("network", "create", "own")
        web = serving(engine, {"80/tcp": [{}]}, network="own")
        assert within(namespace, lambda: answer("127.0.0.1", one_port(engine, web)))
        engine.restart()
        assert within(namespace, lambda: answer("127.0.0.1", one_port(engine, web)))
        engine.remove_all()
        engine.stop()
        engine.bridge = bridge


def test_a_bridge_of_the_host() -> None:
    with host_of_its_own(ipv6=True) as (engine, namespace):
        lan = Lan(namespace)
        try:
            engine.stop()
            lan.on_host(f"ip link add {engine.bridge} type bridge")
            lan.on_host(f"ip address add 10.77.0.1/24 dev {engine.bridge}")
            engine.arguments = ("--fixed-cidr", "10.77.0.64/26")
            engine.start()
            found = engine.request("GET", "/networks/bridge").json()["IPAM"]["Config"]
            assert found == [{"Subnet": "10.77.0.0/24", "IPRange": "10.77.0.64/26", "Gateway": "10.77.0.1"}]
            engine.stop()
            assert "10.77.0.1/24" in lan.on_host(f"ip address show {engine.bridge}"), "it is the host's"
            engine.start()
            lan.on_host(f"ip address show {engine.bridge}")
            engine.stop()
            engine.arguments = ("--fixed-cidr", "10.78.0.64/26")
            with pytest.raises(AssertionError, match=r"--fixed-cidr 10.78.0.64/26: must be a part of"):
                engine.start()
            lan.on_host(f"ip link delete {engine.bridge}")
        finally:
            engine.process = None
            engine.arguments = ()
            lan.close()


def test_ways_into_a_bridge() -> None:
    """`allow-direct-routing` and `bridge-accept-fwmark`."""
    with place_with() as place:
        web = serving(place.engine, {"80/tcp": [{"HostIp": "127.0.0.1"}]})
        address = address_of(place.engine, web)
        other = serving(place.engine, {})
        unpublished = address_of(place.engine, other)

        def direct(target: str) -> str:
            return place.lan.inside(lambda: answer(target, 80, 2))

        assert direct(address) == direct(unpublished) == "TimeoutError"
        place.engine.arguments = ("--allow-direct-routing", "--bridge-accept-fwmark", "0x2/0x3")
        place.engine.restart()
        until("direct routing", lambda: LAN in direct(address))
        assert direct(unpublished) == "TimeoutError"
        place.lan.on_host("iptables-nft -t mangle -A PREROUTING -p tcp --dport 80 -j MARK --set-mark 0x6")
        assert LAN in direct(unpublished), "by its mark"
        place.engine.docker("rm", "-f", web)
        place.engine.arguments = ()
        place.engine.restart()
        assert direct(unpublished) == "TimeoutError"


def test_rules_for_none() -> None:
    with place_with(iptables=False, ip6tables=False) as place:
        assert place.option("bridge.enable_ip_masquerade") == "false"
        assert "engined" not in within(place.namespace, lambda: netfilter.run("list tables"))
        assert (place.engine.request("GET", "/info").json()["Warnings"] or []) == []


class _Docker(Dockerd):
    """The newest dockerd with these keys."""

    def __init__(self, keys: dict[str, Any]) -> None:
        super().__init__()
        self._keys = keys

    def start(self) -> None:
        (self.base / "none.json").write_text(json.dumps(self._keys))
        super(HostDockerd, self).start()


COMPARED: list[dict[str, Any]] = [
    {},
    {"bip": "192.168.150.5/24", "fixed-cidr": "192.168.150.128/25", "default-gateway": "192.168.150.99"},
    {"ipv6": True, "bip6": "fd99::5/64", "fixed-cidr-v6": "fd99::/80", "default-gateway-v6": "fd99::9"},
    {"bip6": "fd99::5/64", "fixed-cidr-v6": "fd99::/80"},
    {"mtu": 1234, "icc": False, "ip-masq": False, "ip": "127.0.0.1"},
    {"dns": ["192.0.2.1"], "dns-search": ["a.example"], "dns-opts": ["ndots:3"]},
    {"host-gateway-ips": ["192.0.2.5", "fd98::5"]},
    {"default-network-opts": {"bridge": {f"{PREFIX}driver.mtu": "1400"}}},
    {"iptables": False, "ip6tables": False},
]


@pytest.mark.nightly
@pytest.mark.parametrize("keys", COMPARED, ids=lambda keys: ", ".join(keys) or "nothing")
def test_as_dockerd(keys: dict[str, Any]) -> None:
    """Both get the same file, and show the same but for names."""
    peer = _Docker(keys)
    try:
        peer.start()
        theirs = _shown(peer.socket)
    finally:
        peer.close()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_file(keys))
        engine, _ = stack.enter_context(host_of_its_own(ipv6=True))
        engine.stop()
        engine.arguments = ("--config", str(file))
        engine.start()
        assert _shown(engine.socket) == theirs


def _shown(socket_: str) -> dict[str, Any]:
    def ask(*arguments: str, given: bytes = b"") -> str:
        command = ["docker", "-H", f"unix://{socket_}", *arguments]
        done = subprocess.run(command, input=given, capture_output=True, check=False)
        return done.stdout.decode() or done.stderr.decode()

    def network(name: str) -> dict[str, Any]:
        (found,) = json.loads(ask("network", "inspect", name)) or [{}]
        options = {key: value for key, value in found.get("Options", {}).items() if key.startswith("com.docker.")}
        options.pop(f"{PREFIX}bridge.name", None)
        pools = sorted(found["IPAM"]["Config"], key=lambda pool: ":" in pool["Subnet"]) if found else []
        return {"options": options, "pools": pools, "ipv6": found.get("EnableIPv6")}

    ask("load", given=busybox_archive())
    ask("network", "create", "--subnet", "192.168.160.0/24", "--gateway", "192.168.160.1", "own")
    ask("run", "-d", "--name", "one", "-p", "80", "busybox", "sleep", "1000")
    (one,) = json.loads(ask("inspect", "one"))
    settings = one["NetworkSettings"]
    inside = ask(
        "exec", "one", "sh", "-c", "ip -o link show eth0; ip route; ip -6 route | grep default; cat /etc/resolv.conf"
    )
    words = [line for line in inside.splitlines() if line and not line.startswith(("#", "nameserver 10.", "fe80"))]
    endpoints = {
        name: [each[key] for key in ("Gateway", "IPAddress", "IPPrefixLen", "IPv6Gateway", "GlobalIPv6PrefixLen")]
        for name, each in settings["Networks"].items()
    }
    return {
        "bridge": network("bridge"),
        "own": network("own"),
        "endpoints": endpoints,
        "bindings": sorted({each["HostIp"] for each in settings["Ports"].get("80/tcp") or ()} - {"::"}),
        "host": {key: one["HostConfig"][key] for key in ("NetworkMode", "Dns", "DnsSearch", "DnsOptions")},
        "inside": [re.sub(r"^.*mtu (\d+).*$", r"mtu \1", line) for line in words],
        "hosts": ask("run", "--rm", "--add-host", "x:host-gateway", "busybox", "grep", "\tx$", "/etc/hosts"),
        "warnings": json.loads(ask("info", "--format", "{{json .Warnings}}")) or [],
    }
