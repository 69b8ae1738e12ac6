"""Names on user networks, queried by real containers from the resolver in their resolv.conf."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.harness import BREATH, TempEngine, until

SLEEP = ("sleep", "1000")
RESOLVER = "127.0.0.11"


@pytest.fixture
def networks(engine: TempEngine) -> Callable[..., str]:
    """Makes networks; the engine's fixture removes them."""

    def make(name: str, **body: Any) -> str:
        answer = engine.request("POST", "/v1.24/networks/create", {"Name": name} | body)
        assert answer.status == 201, answer
        return str(answer.json()["Id"])

    return make


def on(engine: TempEngine, network: str, name: str, *command: str, host: Any = None, **endpoint: Any) -> str:
    """A running container on that network."""
    return engine.started(
        *(command or SLEEP),
        name=name,
        network=network,
        host=host or {},
        NetworkingConfig={"EndpointsConfig": {network: endpoint}},
    )


def address(engine: TempEngine, container: str, network: str) -> str:
    return str(engine.inspect(container)["NetworkSettings"]["Networks"][network]["IPAddress"])


def look_up(engine: TempEngine, container: str, name: str, kind: str = "a") -> list[str] | str:
    """The result of busybox nslookup: addresses or names; otherwise its error."""
    result = engine.docker("exec", container, "nslookup", f"-type={kind}", name, status=None)
    lines = result.out.splitlines()
    assert any(RESOLVER in line for line in lines[:3]), result
    for words in ("NXDOMAIN", "SERVFAIL"):
        if words in result.out:
            return words
    found = []
    for line in lines[3:]:
        if line.startswith("Address") and ":53" not in line:
            found.append(line.split(": ")[1].strip())
        elif "name = " in line:
            found.append(line.partition("name = ")[2].strip())
    return found


def test_names_aliases_and_ids(engine: TempEngine, networks: Any) -> None:
    networks("front")
    web = on(engine, "front", "web", Aliases=["www", "Any"])
    other = on(engine, "front", "other", Aliases=["any"])
    first, second = address(engine, web, "front"), address(engine, other, "front")
    for name in ("web", "WEB", "www", "web.front", web[:12], "web."):
        assert look_up(engine, other, name) == [first], name
    assert look_up(engine, web, "web") == [first]
    both = [tuple(look_up(engine, other, "any")) for _ in range(4)]
    assert {*both} == {(first, second), (second, first)}
    assert look_up(engine, other, "web", "aaaa") == []
    back = ".".join(reversed(first.split("."))) + ".in-addr.arpa"
    assert look_up(engine, other, back, "ptr") == ["web.front"]


def test_networks_are_apart(engine: TempEngine, networks: Any) -> None:
    front, back = networks("front", Internal=True), networks("back", Internal=True)
    web, db = on(engine, "front", "web"), on(engine, "back", "db")
    assert look_up(engine, web, "db") == look_up(engine, db, "web") == "NXDOMAIN"
    for network, container in ((back, web), (front, db)):
        answer = engine.request("POST", f"/v1.24/networks/{network}/connect", {"Container": container})
        assert answer.status == 200, answer
    assert look_up(engine, web, "db") == [address(engine, db, "front")]
    assert look_up(engine, web, "db.back") == [address(engine, db, "back")]
    assert look_up(engine, db, "web") == [address(engine, web, "back")]
    answer = engine.request("POST", f"/v1.24/networks/{front}/disconnect", {"Container": db})
    assert answer.status == 200, answer
    assert look_up(engine, web, "db") == [address(engine, db, "back")]
    assert look_up(engine, web, "db.front") == "SERVFAIL"


def test_internal_networks_ask_nobody_outside(engine: TempEngine, networks: Any) -> None:
    networks("inner", Internal=True)
    lonely = on(engine, "inner", "lonely")
    assert look_up(engine, lonely, "example.com") == "SERVFAIL"
    assert look_up(engine, lonely, "single") == "NXDOMAIN"


def test_own_name_servers_are_asked_from_inside(engine: TempEngine, networks: Any) -> None:
    """The server is on an internal network, which only its containers can reach."""
    networks("net", Internal=True)
    server = on(engine, "net", "server")
    where = address(engine, server, "net")
    asking = on(engine, "net", "asking", host={"Dns": [where]})
    inside = f"--net=/proc/{engine.inspect(server)['State']['Pid']}/ns/net"
    answering = subprocess.Popen(
        ["nsenter", inside, sys.executable, "-m", "dnslib.fixedresolver", "-r", ". 60 IN A 9.9.9.9", "-a", where],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until("its server answers", lambda: look_up(engine, asking, "example.com") == ["9.9.9.9"])
        assert look_up(engine, asking, "server") == [where]
        assert look_up(engine, server, "example.com") == "SERVFAIL"
    finally:
        answering.kill()
        answering.wait()


def test_connected_from_the_default_bridge(engine: TempEngine, networks: Any) -> None:
    front = networks("front", Internal=True)
    web = on(engine, "front", "web")
    plain = engine.started(*SLEEP, name="plain", network="bridge")
    assert RESOLVER not in engine.docker("exec", plain, "cat", "/etc/resolv.conf").out
    answer = engine.request(
        "POST",
        f"/v1.24/networks/{front}/connect",
        {"Container": plain, "EndpointConfig": {"Aliases": ["late"], "Links": ["web:linked"]}},
    )
    assert answer.status == 200, answer
    assert look_up(engine, plain, "web") == look_up(engine, plain, "linked") == [address(engine, web, "front")]
    assert look_up(engine, web, "late") == look_up(engine, web, "plain") == [address(engine, plain, "front")]
    assert look_up(engine, web, "linked") == "NXDOMAIN"


def test_links_are_private(engine: TempEngine, networks: Any) -> None:
    networks("net", Internal=True)
    app = on(engine, "net", "app", Links=["db:database"])
    assert look_up(engine, app, "database") == "NXDOMAIN"
    db = on(engine, "net", "db")
    assert look_up(engine, app, "database") == [address(engine, db, "net")]
    assert look_up(engine, db, "database") == "NXDOMAIN"


def test_renamed_stopped_and_started_again(engine: TempEngine, networks: Any) -> None:
    networks("net", Internal=True)
    asking, web = on(engine, "net", "asking"), on(engine, "net", "web")
    engine.post(f"/containers/{web}/rename?name=shop")
    assert look_up(engine, asking, "web") == "NXDOMAIN"
    assert look_up(engine, asking, "shop") == [address(engine, web, "net")]
    engine.post(f"/containers/{web}/stop?t=0")
    assert look_up(engine, asking, "shop") == "NXDOMAIN"
    engine.post(f"/containers/{web}/start")
    assert look_up(engine, asking, "shop") == [address(engine, web, "net")]
    assert look_up(engine, web, "asking") == [address(engine, asking, "net")]


def test_both_ip_versions(engine: TempEngine, networks: Any) -> None:
    networks("six", Internal=True, EnableIPv6=True, IPAM={"Config": [{"Subnet": "fd12:3456:789a::/64"}]})
    web, asking = on(engine, "six", "web"), on(engine, "six", "asking")
    settings = engine.inspect(web)["NetworkSettings"]["Networks"]["six"]
    assert look_up(engine, asking, "web", "aaaa") == [settings["GlobalIPv6Address"]]
    assert look_up(engine, asking, "web") == [settings["IPAddress"]]
    hosts = Path(engine.inspect(web)["HostsPath"]).read_text()
    assert f"{settings['IPAddress']}\t{web[:12]}\n{settings['GlobalIPv6Address']}\t{web[:12]}\n" in hosts


def test_files(engine: TempEngine, networks: Any) -> None:
    networks("net", Internal=True)
    host = {"Dns": ["10.1.1.1"], "DnsSearch": ["a.example", "b.example"], "DnsOptions": ["timeout:1"]}
    made = on(engine, "net", "made", host=host | {"ExtraHosts": ["host.docker.internal:10.9.9.9"]})
    files = engine.inspect(made)
    assert Path(files["ResolvConfPath"]).read_text().splitlines() == [
        f"nameserver {RESOLVER}",
        "search a.example b.example",
        "options timeout:1 ndots:0",
    ]
    hosts = Path(files["HostsPath"]).read_text().splitlines()
    assert hosts[-2:] == ["10.9.9.9\thost.docker.internal", f"{address(engine, made, 'net')}\t{made[:12]}"]
    sharing = engine.started(*SLEEP, network="container:made")
    assert look_up(engine, sharing, "made.") == [address(engine, made, "net")]


def test_a_containers_own_server_on_port_53(engine: TempEngine, networks: Any) -> None:
    networks("net", Internal=True)
    server = on(engine, "net", "server", "sh", "-c", "while :; do echo hello | nc -l -p 53; done")
    asking = on(engine, "net", "asking")

    def said() -> bool:
        return engine.docker("exec", asking, "nc", address(engine, server, "net"), "53", status=None).out == "hello\n"

    until("its server answers", said)
    assert look_up(engine, server, "asking") == [address(engine, asking, "net")]


@pytest.mark.own
def test_nothing_is_left_of_it(engine: TempEngine, networks: Any) -> None:
    def round_of(count: int) -> None:
        networks("net", Internal=True)
        containers = [on(engine, "net", f"c{number}") for number in range(count)]
        assert look_up(engine, containers[0], f"c{count - 1}") == [address(engine, containers[-1], "net")]
        engine.remove_all()

    round_of(1)
    before = engine.descriptors()
    for _ in range(3):
        round_of(6)
    until("descriptors as before", lambda: engine.descriptors() <= before + BREATH)


@pytest.mark.own
@pytest.mark.parametrize("way", ["kill9", "terminate"])
def test_names_are_back_with_the_daemon(own_engine: TempEngine, way: str) -> None:
    engine = own_engine
    answer = engine.request("POST", "/v1.24/networks/create", {"Name": "net", "Internal": True})
    assert answer.status == 201, answer
    web = on(engine, "net", "web", Aliases=["www"], Links=["asking:friend"])
    asking = on(engine, "net", "asking")
    for _ in range(2):
        getattr(engine, way)()
        engine.start()
        assert look_up(engine, asking, "www") == look_up(engine, asking, "web") == [address(engine, web, "net")]
        assert look_up(engine, web, "friend") == [address(engine, asking, "net")]
        assert look_up(engine, web, "example.com") == "SERVFAIL"
    late = on(engine, "net", "late")
    assert look_up(engine, asking, "late") == [address(engine, late, "net")]
    engine.remove_all()
