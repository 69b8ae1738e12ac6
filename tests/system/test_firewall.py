"""Filters of other programs that drop what is forwarded: containers are reached, and reach others,
as without them. A host in a namespace of its own, its LAN, and real firewalls.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.engines import Dockerd
from engine.config import FIREWALL_MARK
from engine.system import netfilter
from tests.support import ROOT
from tests.support.dbus.bus import Bus
from tests.support.engine.harness import TempEngine, busybox_archive, until
from tests.support.engine.lan import (
    HOST,
    HOST6,
    LAN,
    LAN6,
    WHO,
    Lan,
    address_of,
    answer,
    host_of_its_own,
    one_port,
    run,
    serving,
    within,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

RULE = f"-A FORWARD -m mark --mark {FIREWALL_MARK:#x}/{FIREWALL_MARK:#x} -j ACCEPT"
NETWORK, SUBNET6 = "six", "fd97::/64"


class Place(NamedTuple):
    engine: TempEngine
    lan: Lan
    namespace: int

    def nft(self, commands: str) -> str:
        return within(self.namespace, lambda: netfilter.run(commands))

    def forward(self, iptables: str) -> list[str]:
        return self.lan.on_host(f"{iptables} -S FORWARD").splitlines()[1:]


@pytest.fixture
def place() -> Iterator[Place]:
    """The bus of some tests has no systemd, which the other driver of cgroups asks."""
    with host_of_its_own("--exec-opt", "native.cgroupdriver=cgroupfs", ipv6=True) as (engine, namespace):
        lan = Lan(namespace)
        try:
            yield Place(engine, lan, namespace)
        finally:
            lan.close()


@contextlib.contextmanager
def listening(lan: Lan) -> Iterator[int]:
    """A service of the LAN that sends each client its address. Yields its port."""
    server = lan.inside(lambda: socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, peer = server.accept()
                with connection:
                    connection.sendall(f"{peer[0]}\n".encode())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()


class Web(NamedTuple):
    """A container with one published port, and one that is not."""

    id: str
    port: int
    address: str


def web(place: Place) -> Web:
    engine = place.engine
    engine.request(
        "POST",
        "/v1.44/networks/create",
        {"Name": NETWORK, "EnableIPv6": True, "IPAM": {"Config": [{"Subnet": SUBNET6}]}},
    )
    made = serving(engine, {"80/tcp": [{}]}, network=NETWORK)
    return Web(made, one_port(engine, made), address_of(engine, made, NETWORK))


def reached(place: Place, container: Web) -> dict[str, str]:
    """What the LAN and the container get from each other, or the errors."""

    def ask(host: str, port: int) -> str:
        code = f"nc -w 2 {host} {port}"
        return place.engine.docker("exec", container.id, "sh", "-c", code, status=None).out.strip()

    with listening(place.lan) as port, ThreadPoolExecutor() as at_once:
        asked = {
            "to the LAN": at_once.submit(ask, LAN, port),
            "to the LAN by IPv6": at_once.submit(ask, LAN6, port),
            "published": at_once.submit(place.lan.inside, lambda: answer(HOST, container.port, 2)),
            "published, IPv6": at_once.submit(place.lan.inside, lambda: answer(HOST6, container.port, 2)),
            "not published": at_once.submit(place.lan.inside, lambda: answer(container.address, 80, 2)),
        }
        return {name: each.result() for name, each in asked.items()}


def works(found: dict[str, str]) -> bool:
    """Clients keep their addresses; containers have the host's; what is not published stays
    closed."""
    return (
        found["published"].startswith(f"::ffff:{LAN}:")
        and found["published, IPv6"].startswith(f"{LAN6}:")
        and found["not published"] == "TimeoutError"
        and found["to the LAN"] == f"::ffff:{HOST}"
        and found["to the LAN by IPv6"] == HOST6
    )


def check(place: Place, container: Web) -> None:
    until("all connections", lambda: works(reached(place, container)) or None)


@pytest.mark.parametrize("kind", ["nft", "legacy"])
def test_iptables(place: Place, kind: str) -> None:
    programs = [f"{name}-{kind}" for name in ("iptables", "ip6tables")]
    container = web(place)
    check(place, container)
    for program in programs:
        place.lan.on_host(f"{program} -P FORWARD DROP")
        place.lan.on_host(f"{program} -A FORWARD -j REJECT")
    check(place, container)
    for program in programs:
        assert place.forward(program)[:2] == ["-A FORWARD -j DOCKER-USER", RULE]
        place.lan.on_host(f"{program} -I DOCKER-USER -i {place.lan.name} -j DROP")
    found = reached(place, container)
    assert [found["published"], found["published, IPv6"]] == ["TimeoutError"] * 2, "people's rules come first"
    for program in programs:
        place.lan.on_host(f"{program} -F")
    check(place, container)
    place.engine.restart()
    check(place, container)
    for program in programs:
        assert place.forward(program) == ["-A FORWARD -j DOCKER-USER", RULE]
        place.lan.on_host(f"{program} -A DOCKER-USER -s 192.0.2.1 -j DROP" if "6" not in program else f"{program} -L")
        place.lan.on_host(f"{program} -I FORWARD -i {place.lan.name} -j DROP")
    check(place, container)
    place.engine.stop()
    for program in programs:
        assert RULE not in place.forward(program) and "-A FORWARD -j DOCKER-USER" in place.forward(program)
    assert "192.0.2.1" in place.lan.on_host(f"iptables-{kind} -S DOCKER-USER"), "people's rules stay"


STRICT = """
table inet strict {
    chain forwarded {
        type filter hook forward priority filter; policy drop;
        ct state invalid drop
    }
}
table ip late {
    chain everything {
        type filter hook forward priority 10; policy accept;
        iifname "lo" accept
        counter reject
    }
}
table inet fine {
    chain forward { type filter hook forward priority 20; policy accept; tcp dport 25 drop; }
}
"""


def warnings(place: Place) -> list[str]:
    found = place.engine.request("GET", "/info").json()["Warnings"]
    return [each for each in found if "nft 'insert rule" in each or "firewalld" in each]


def test_chains_of_nftables_are_named(place: Place) -> None:
    """They are not touched; the rule of the warning lets the packets pass."""
    place.nft(STRICT)
    container = web(place)
    place.engine.restart()
    assert not works(reached(place, container))
    found = warnings(place)
    assert (
        len(found) == 2
        and "chain forwarded of table inet strict" in found[0]
        and "chain everything of table ip late" in found[1]
    )
    for each in found:
        place.nft(each.partition("; add: nft ")[2].strip("'"))
    until("no warnings", lambda: not warnings(place))
    check(place, container)


def test_rules_are_flushed_beside_traffic(place: Place) -> None:
    place.lan.on_host("iptables-nft -P FORWARD DROP")
    container = web(place)
    check(place, container)
    place.nft("flush ruleset")
    place.lan.on_host("iptables-nft -P FORWARD DROP")
    check(place, container)
    assert RULE in place.forward("iptables-nft")


def test_other_firewalls_are_left_alone(place: Place) -> None:
    place.lan.on_host("iptables-nft -P FORWARD DROP")
    place.engine.arguments = ("--firewall", "own")
    place.engine.restart()
    container = web(place)
    assert not works(reached(place, container))
    assert place.forward("iptables-nft") == []
    (warning,) = warnings(place)
    assert "chain FORWARD of table ip filter" in warning


def udp_answer(host: str, port: int) -> str:
    """What a datagram to the port gets back; it is sent again until then."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(0.5)
        asking.connect((host, port))

        def ask() -> str:
            with contextlib.suppress(OSError):
                asking.send(b"hello")
                return asking.recv(100).decode()
            return ""

        return str(until("an answer", ask))


@contextlib.contextmanager
def echoing(engine: TempEngine, container: str, port: int) -> Iterator[None]:
    """In the container's network: sends datagrams back."""
    with open(f"/proc/{engine.inspect(container)['State']['Pid']}/ns/net", "rb") as namespace:
        server = within(namespace.fileno(), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with server:
        server.bind(("", port))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    data, client = server.recvfrom(100)
                    if not data:
                        return
                    server.sendto(data, client)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it was never connected
                server.shutdown(socket.SHUT_RDWR)
            thread.join()


def tables(place: Place) -> set[str]:
    """Of nftables on the host."""
    return {line for line in place.nft("list tables").splitlines() if "firewalld" not in line}


def test_no_rules_at_all(place: Place) -> None:
    """As with Docker's `iptables: false`: published ports are relayed, nothing is translated."""
    place.lan.on_host("iptables-nft -P FORWARD ACCEPT")
    before = web(place)
    check(place, before)
    place.engine.arguments = ("--firewall", "none")
    place.engine.restart()
    assert tables(place) == {"table ip filter"}, "rules of the daemon before have gone"
    assert place.forward("iptables-nft") == ["-A FORWARD -j DOCKER-USER"]
    gateways = place.engine.inspect(before.id)["NetworkSettings"]["Networks"][NETWORK]
    alone = serving(place.engine, {"80/tcp": [{}]})
    port, gateway = one_port(place.engine, alone), place.engine.inspect(alone)["NetworkSettings"]["Gateway"]
    echo = serving(place.engine, {"53/udp": [{}]}, command=("sleep", "1000"))
    udp = one_port(place.engine, echo, "53/udp")

    def said(host: str, port: int) -> str:
        return place.lan.inside(lambda: answer(host, port)).rpartition(":")[0].removeprefix("::ffff:")

    def served() -> bool:
        return (
            [said(HOST, before.port), said(HOST6, before.port)] == [gateways["Gateway"], gateways["IPv6Gateway"]]
            and said(HOST, port) == said(HOST6, port) == gateway
            and within(place.namespace, lambda: answer("127.0.0.1", port)).startswith("::ffff:")
            and [place.lan.inside(lambda host=host: udp_answer(host, udp)) for host in (HOST, HOST6, gateway)]  # type: ignore[misc]
            == ["hello"] * 3
        )

    with echoing(place.engine, echo, 53):
        assert served()
        place.engine.kill9()
        assert served()
        place.engine.start()
        assert served()
        place.engine.replace_monitor()
        until("the next monitor serves", served)
    # what is not published is reached by hosts that have a route, as nothing filters
    place.lan(f"ip route add {before.address}/32 via {HOST}")
    assert place.lan.inside(lambda: answer(before.address, 80)).startswith(f"::ffff:{LAN}:")
    assert tables(place) == {"table ip filter"}
    place.engine.docker("rm", "-f", alone)
    assert place.lan.inside(lambda: answer(HOST, port)) == "ConnectionRefusedError"
    place.engine.docker("run", "-d", "-p", f"{port}:80", "busybox", "sleep", "1000")
    taken = place.engine.docker("run", "-d", "-p", f"{HOST}:{port}:80", "busybox", "true", status=None)
    assert "port is already allocated" in taken.err
    place.engine.arguments = ()
    place.engine.restart()
    check(place, before)


@contextlib.contextmanager
def firewalld(place: Place, directory: Path) -> Iterator[Callable[[str], str]]:
    """firewalld with its default zone. Yields firewall-cmd."""
    config = directory / "firewalld"
    if not config.exists():
        shutil.copytree("/etc/firewalld", config)
    command = ["firewalld", "--nofork", "--nopid", f"--system-config={config}", f"--log-file={directory}/firewalld.log"]
    with subprocess.Popen([*place.lan.host_command, *command]) as daemon:

        def running() -> bool:
            return subprocess.run(["firewall-cmd", "--state"], capture_output=True, check=False).returncode == 0

        until("firewalld", running)
        yield lambda arguments: run(f"firewall-cmd {arguments}").strip()
        daemon.terminate()


def test_firewalld(bus: Bus, tmp_path: Path, place: Place) -> None:
    container = web(place)
    bridge = f"br-{place.engine.request('GET', f'/networks/{NETWORK}').json()['Id'][:12]}"
    with firewalld(place, tmp_path) as command:
        assert command("--get-default-zone") == "public"
        check(place, container)
        assert not warnings(place)
        command("--reload")
        check(place, container)
        place.engine.restart()
        assert {bridge, place.engine.bridge} <= set(command("--zone=docker --list-interfaces").split())
        check(place, container)
    with firewalld(place, tmp_path) as command:  # again
        check(place, container)
        place.engine.stop()
        assert command("--zone=docker --list-interfaces") == ""


def test_firewalld_that_cannot_be_asked(
    place: Place, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with firewalld(place, tmp_path):
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={bus.socket}.other")
        place.engine.restart()
        monkeypatch.undo()
        (warning,) = warnings(place)
        assert "firewalld rejects what containers send" in warning


def test_ufw(place: Place, tmp_path: Path) -> None:
    """With its defaults, in a copy of its configuration."""
    shutil.copytree("/etc/ufw", tmp_path / "ufw")
    shutil.copytree("/etc/default", tmp_path / "default", symlinks=True)

    def ufw(arguments: str) -> str:
        binds = "".join(
            f"mount --bind {tmp_path}/{name} {to};" for name, to in (("ufw", "/etc/ufw"), ("default", "/etc/default"))
        )
        command = [*place.lan.host_command, "unshare", "--mount", "sh", "-ec", f"{binds} exec ufw {arguments}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    container = web(place)
    assert "active" in ufw("--force enable")
    assert "-P FORWARD DROP" in place.lan.on_host("iptables -S FORWARD")
    check(place, container)
    ufw("reload")
    check(place, container)
    ufw("route deny in on eth9")
    ufw("--force disable")
    ufw("--force enable")
    check(place, container)
    place.engine.restart()
    check(place, container)


@pytest.mark.nightly
def test_beside_dockerd() -> None:
    """The newest dockerd on the same host, in both orders of start and stop: both are reached, and
    neither damages the other."""
    peer = Dockerd()
    engine = TempEngine(within=peer.namespaces.command(directory=ROOT)[:-1])
    namespace = os.open(f"/proc/{peer.namespaces.holder}/ns/net", os.O_RDONLY)
    lan = Lan(namespace)
    place = Place(engine, lan, namespace)

    def ask(*arguments: str, given: bytes = b"") -> str:
        command = ["docker", "-H", f"unix://{peer.socket}", *arguments]
        return subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True).stdout.decode()

    def peer_reached(port: str) -> bool:
        return lan.inside(lambda: answer(HOST, int(port), 2)).startswith(f"::ffff:{LAN}:")

    def both(container: Web, port: str) -> None:
        check(place, container)
        until("dockerd's container", lambda: peer_reached(port))

    try:
        for first, second in ((engine, peer), (peer, engine)):
            for each in (first, second):
                each.start()
            engine.load_busybox()
            container = web(place)
            ask("load", given=busybox_archive())
            ask("run", "-d", "-p", "80", "--name", "peer", "busybox", *WHO)
            port = ask("port", "peer", "80/tcp").split()[0].rpartition(":")[2]
            both(container, port)
            first.stop()
            first.start()
            if first is engine:
                engine.remove_all()
                container = web(place)
            both(container, port)
            ask("rm", "-f", "peer")
            engine.stop()
            peer.stop()
    finally:
        engine.close()
        lan.close()
        os.close(namespace)
        peer.close()
