"""Published ports and network isolation, with real packets: containers of a real engine, and a LAN
host in a namespace of the test.

That a packet does not arrive is proved by order: it is sent first, and then one that does arrive.
When the second one has arrived, the first one would have arrived too.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from engine.system import netfilter
from engine.system.netlink.conntrack import ConntrackSocket
from engine.system.netlink.nft import NftSocket
from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, free_run, until
from tests.support.engine.lan import (
    HOST,
    HOST6,
    LAN,
    LAN6,
    WHO,
    Lan,
    address_of,
    answer,
    asks,
    host_of_its_own,
    one_port,
    ports_of,
    run,
    serving,
    within,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

T = TypeVar("T")


@pytest.fixture(scope="module")
def lan() -> Iterator[Lan]:
    made = Lan()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[TempEngine]:
    with TempEngine() as made:
        made.load_busybox()
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: TempEngine) -> Iterator[None]:
    yield
    engine.remove_all()
    kernel = NftSocket()
    for name in ("address4", "any4", "address6", "any6"):
        assert kernel.elements(table(engine), name) == {}
    kernel.close()


def table(engine: TempEngine) -> str:
    return f"engined-{engine.bridge}"


@contextlib.contextmanager
def network(engine: TempEngine, **body: Any) -> Iterator[str]:
    name = f"n{secrets.token_hex(4)}"
    made = engine.request("POST", "/v1.24/networks/create", {"Name": name} | body)
    assert made.status == 201, made
    try:
        yield name
    finally:
        engine.remove_all()


# --- reaching a port ------------------------------------------------------------------------------


def test_from_everywhere(engine: TempEngine, lan: Lan) -> None:
    """The LAN by its own address, the host by address and by loopback, neighbours and the container
    itself."""
    web = serving(engine, {"80/tcp": [{}]})
    port = one_port(engine, web)
    gateway = engine.inspect(web)["NetworkSettings"]["Gateway"]
    assert LAN in lan.inside(lambda: answer(HOST, port))
    assert HOST in answer(HOST, port)
    assert gateway in answer("127.0.0.1", port)
    assert gateway in asks(engine, "bridge", gateway, port)
    assert gateway in asks(engine, "bridge", HOST, port)
    assert gateway in engine.docker("exec", web, "nc", "-w", "3", HOST, str(port)).out
    own = address_of(engine, web)
    assert lan.inside(lambda: answer(own, 80, 1)) == "TimeoutError"
    with network(engine) as other:
        assert asks(engine, other, HOST, port), "another network reaches what is published"
        assert not asks(engine, other, own, 80), "and nothing else"


def test_bound_to_one_address(engine: TempEngine, lan: Lan) -> None:
    web = serving(engine, {"80/tcp": [{"HostIp": HOST}]})
    port = one_port(engine, web, ip=HOST)
    assert LAN in lan.inside(lambda: answer(HOST, port))
    assert answer("127.0.0.1", port) == "ConnectionRefusedError"
    assert by_ipv6(lan, port) == NOBODY_BY_IPV6


class Sniffer:
    """Payloads of UDP datagrams that arrive at a container, published or not."""

    def __init__(self, engine: TempEngine, container: str) -> None:
        namespace = os.open(f"/proc/{engine.inspect(container)['State']['Pid']}/ns/net", os.O_RDONLY)
        self._wire = within(namespace, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)))
        self._wire.settimeout(20 * PATIENCE)
        os.close(namespace)

    def __enter__(self) -> Sniffer:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.close()

    def next(self) -> bytes:
        while True:
            packet, where = self._wire.recvfrom(2048)
            if packet[9] == socket.IPPROTO_UDP and where[2] != socket.PACKET_OUTGOING:
                return packet[28:]


def datagram(host: str, port: int, payload: bytes, source: int = 0) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind(("", source))
        sender.sendto(payload, (host, port))


def test_loopback_is_not_the_lans(engine: TempEngine, lan: Lan) -> None:
    """A port bound to 127.0.0.1 is reachable only from the host, whatever the LAN or a container
    sends. It is not reachable by the container's own address either.
    """
    web = serving(
        engine,
        {"80/udp": [{"HostIp": "127.0.0.1"}], "81/udp": [{}]},
        command=("sleep", "1000"),
        host={"CapAdd": ["NET_RAW"]},
    )
    local, public = one_port(engine, web, "80/udp", "127.0.0.1"), one_port(engine, web, "81/udp")
    with Sniffer(engine, web) as sniffer:
        lan.raw("127.0.0.1", local, b"spoofed")
        lan.inside(lambda: datagram(HOST, local, b"by address"))
        lan.raw(address_of(engine, web), 80, b"by the container's own")
        lan.inside(lambda: datagram(HOST, public, b"allowed"))
        assert sniffer.next() == b"allowed"
        datagram("127.0.0.1", local, b"from here")
        assert sniffer.next() == b"from here"


def test_ipv6(engine: TempEngine, lan: Lan) -> None:
    with network(engine, EnableIPv6=True) as six:
        web = serving(engine, {"80/tcp": [{}]}, network=six)
        ports = ports_of(engine, web)["80/tcp"]
        assert [ip for ip, _ in ports] == ["0.0.0.0", "::"]
        assert len({port for _, port in ports}) == 1
        port = ports[0][1]
        assert LAN6 in lan.inside(lambda: answer(HOST6, port))
        assert HOST6 in answer(HOST6, port)
        assert LAN in lan.inside(lambda: answer(HOST, port))
        assert asks(engine, six, HOST6, port)
        assert engine.docker("exec", web, "nc", "-w", "3", HOST6, str(port)).out
        inner = engine.inspect(web)["NetworkSettings"]["Networks"][six]["GlobalIPv6Address"]
        assert lan.inside(lambda: answer(inner, 80, 1)) == "TimeoutError"


def by_ipv6(lan: Lan, port: int) -> dict[str, str]:
    """The client's address as the service sees it, or the error, by the given path."""
    link_local = lan.link_local()
    answers = {
        "LAN": lan.inside(lambda: answer(HOST6, port)),
        "LAN, link-local": lan.inside(lambda: answer(f"{link_local}%eth0", port)),
        "host": answer(HOST6, port),
        "host, link-local": answer(f"{link_local}%{lan.name}", port),
        "host, loopback": answer("::1", port),
    }
    return {way: said.rpartition(":")[0].removeprefix("::ffff:") or said for way, said in answers.items()}


NOBODY_BY_IPV6 = dict.fromkeys(
    ("LAN", "LAN, link-local", "host", "host, link-local", "host, loopback"), "ConnectionRefusedError"
)


@pytest.mark.parametrize("host_ip", ["", "0.0.0.0", "::"])
def test_by_ipv6_to_a_container_without(engine: TempEngine, lan: Lan, host_ip: str) -> None:
    """TCP is relayed for every address of the host, also while no daemon runs and with the next
    daemon."""
    web = serving(engine, {"80/tcp": [{"HostIp": host_ip}]})
    port = one_port(engine, web, ip=host_ip or "0.0.0.0")
    passed_on = dict.fromkeys(NOBODY_BY_IPV6, engine.inspect(web)["NetworkSettings"]["Gateway"])
    assert by_ipv6(lan, port) == passed_on
    engine.kill9()
    assert by_ipv6(lan, port) == passed_on
    engine.start()
    assert by_ipv6(lan, port) == passed_on
    engine.kill_monitor()
    assert by_ipv6(lan, port) == passed_on
    engine.docker("rm", "-f", web)
    assert by_ipv6(lan, port) == NOBODY_BY_IPV6


def test_by_ipv6_to_what_docker_run_publishes(engine: TempEngine, lan: Lan) -> None:
    web = engine.docker("run", "-d", "-p", "80", "-p", "127.0.0.1::81", "busybox", *WHO).line
    port = int(engine.docker("port", web, "80/tcp").line.removeprefix("0.0.0.0:"))
    until("it listens", lambda: ":" in answer("127.0.0.1", port))
    assert set(by_ipv6(lan, port).values()) == {engine.inspect(web)["NetworkSettings"]["Gateway"]}
    assert by_ipv6(lan, one_port(engine, web, "81/tcp", "127.0.0.1")) == NOBODY_BY_IPV6


def test_by_ipv6_to_an_address_of_another_link(engine: TempEngine, lan: Lan) -> None:
    with network(engine, EnableIPv6=True) as six:
        pools = engine.request("GET", f"/v1.24/networks/{six}").json()["IPAM"]["Config"]
        gateway = next(each["Gateway"] for each in pools if ":" in each["Gateway"])
        port = one_port(engine, serving(engine, {"80/tcp": [{}]}))
        assert ":" in lan.inside(lambda: answer(gateway, port))
        port = one_port(engine, serving(engine, {"80/tcp": [{"HostIp": "0.0.0.0"}]}, network=six))
        assert ":" in lan.inside(lambda: answer(HOST6, port)), "the container has IPv6, its port has not"


def test_by_ipv6_from_a_container() -> None:
    """A container with IPv6 reaches one without it by an address of the host, where netfilter does
    not process bridged frames."""
    with host_of_its_own(ipv6=True) as (apart, namespace):
        switch = Path("/proc/sys/net/bridge/bridge-nf-call-ip6tables")
        if within(namespace, switch.exists):
            within(namespace, lambda: switch.write_text("0"))
        port = one_port(apart, serving(apart, {"80/tcp": [{}]}))
        with network(apart, EnableIPv6=True) as six:
            pools = apart.request("GET", f"/v1.24/networks/{six}").json()["IPAM"]["Config"]
            gateway = next(each["Gateway"] for each in pools if ":" in each["Gateway"])
            assert asks(apart, six, gateway, port)


def test_by_ipv6_through_a_firewall(engine: TempEngine, lan: Lan) -> None:
    """The host's own rules for incoming traffic to a port hold as for a host program that listens
    there."""
    port = one_port(engine, serving(engine, {"80/tcp": [{}]}))
    own = f"other-{secrets.token_hex(4)}"
    chain = "type filter hook input priority 0"
    netfilter.run(
        f"table inet {own} {{\nchain in {{\n{chain};\n"
        f"ip6 saddr {LAN6} tcp dport {port} reject with icmpx admin-prohibited\n}}\n}}"
    )
    try:
        assert lan.inside(lambda: answer(HOST6, port)) == "PermissionError"
        assert ":" in answer(HOST6, port)
    finally:
        netfilter.run(f"delete table inet {own}")
    assert ":" in lan.inside(lambda: answer(HOST6, port))


def test_by_ipv6_to_a_range(engine: TempEngine, lan: Lan) -> None:
    """Every port of the range leads to the right container port."""
    each_its_own = "for port in 1 50 200; do nc -ll -p $port -e echo $port & done; wait"
    before = free_run(202)
    bindings = {"1-200/tcp": [{"HostPort": f"{before + 1}-{before + 200}"}]}
    web = serving(engine, bindings, command=("sh", "-c", each_its_own))
    for inner in (1, 50, 200):
        until("it listens", lambda inner=inner: answer("127.0.0.1", before + inner) == str(inner))
        assert lan.inside(lambda inner=inner: answer(HOST6, before + inner)) == str(inner)
    assert lan.inside(lambda: answer(HOST6, before + 2)) == "ConnectionResetError", "the container listens at none"
    assert lan.inside(lambda: answer(HOST6, before + 201)) == "ConnectionRefusedError"
    assert engine.inspect(web)["State"]["Running"]


def test_nobody_reaches_more_by_ipv6_than_is_published(engine: TempEngine, lan: Lan) -> None:
    """The relay's socket refuses direct connections, and internal networks cannot reach it."""
    web = serving(engine, {"80/tcp": [{}]})
    port = one_port(engine, web)
    (relay,) = {*re.findall(r"tproxy ip6 to \[::1\]:(\d+)", netfilter.run(f"list table inet {table(engine)}"))}
    assert lan.inside(lambda: answer(HOST6, int(relay))) == "ConnectionRefusedError"
    assert answer(HOST6, int(relay)) == "ConnectionRefusedError"
    assert answer("::1", int(relay)) == "ConnectionResetError"
    with network(engine, Internal=True, EnableIPv6=True) as inside:
        pools = engine.request("GET", f"/v1.24/networks/{inside}").json()["IPAM"]["Config"]
        gateway = next(each["Gateway"] for each in pools if ":" in each["Gateway"])
        assert lan.inside(lambda: answer(gateway, port)), "it is an address of the host"
        for host in (gateway, HOST6):
            assert not asks(engine, inside, host, port)


def test_ipv6_without_ipv6(engine: TempEngine, lan: Lan) -> None:
    """Unreachable combinations are refused: an IPv6 address for a container without one, a UDP port
    of ::1."""
    wanted = {"NetworkMode": "bridge", "PortBindings": {"80/tcp": [{"HostIp": HOST6}]}}
    container = engine.create("sleep", "1000", network="bridge", host=wanted)
    refused = engine.request("POST", f"/v1.24/containers/{container}/start")
    assert refused.status == 500
    assert "the container has no IPv6 address" in refused.json()["message"]
    assert HOST6 in refused.json()["message"]
    assert engine.inspect(container)["State"]["Status"] == "created"
    host = {"PortBindings": {"80/udp": [{"HostIp": "::1"}]}}
    refused = engine.request(
        "POST", "/v1.24/containers/create", {"Image": "busybox", "Cmd": ["true"], "HostConfig": host}
    )
    assert refused.status == 400
    assert "only TCP ports can be published at ::1" in refused.json()["message"]


def test_sctp(engine: TempEngine, lan: Lan) -> None:
    """SCTP packets are forwarded like the others: one is sent on the wire, and arrives."""
    web = serving(engine, {"80/sctp": [{}]}, command=("sleep", "1000"))
    port = one_port(engine, web, "80/sctp")
    namespace = os.open(f"/proc/{engine.inspect(web)['State']['Pid']}/ns/net", os.O_RDONLY)
    with within(namespace, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_SCTP)) as receiver:
        receiver.settimeout(20 * PATIENCE)
        # INIT (RFC 9260, 3.3.2): tag, window, streams, first number; CRC32c over it all
        chunk = struct.pack(">BBHIIHHI", 1, 0, 20, 7, 65535, 1, 1, 1)
        packet = bytearray(struct.pack(">HHII", 4242, port, 0, 0) + chunk)
        packet[8:12] = struct.pack("<I", crc32c(packet))

        def send() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_SCTP) as sender:
                sender.sendto(packet, (HOST, 0))

        lan.inside(send)
        got = receiver.recv(2048)
    os.close(namespace)
    assert got[12:16] == socket.inet_aton(LAN)
    assert struct.unpack_from(">HH", got, 20) == (4242, 80)


def crc32c(data: bytes | bytearray) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


# --- networks -------------------------------------------------------------------------------------


def test_internal(engine: TempEngine, lan: Lan) -> None:
    """No traffic in or out, not even by a port that another network publishes. Neighbours can reach
    each other.
    """
    web = serving(engine, {"80/tcp": [{}]})
    port = one_port(engine, web)
    with network(engine, Internal=True) as inside:
        shut = serving(engine, {"80/tcp": [{}]}, network=inside)
        assert ports_of(engine, shut) == {}
        own = address_of(engine, shut, inside)
        assert asks(engine, inside, own, 80)
        assert not asks(engine, inside, HOST, port)
        assert lan.inside(lambda: answer(own, 80, 1)) == "TimeoutError"


def test_without_icc(engine: TempEngine, lan: Lan) -> None:
    """Neighbours reach each other only by published ports."""
    with network(engine, Options={"com.docker.network.bridge.enable_icc": "false"}) as apart:
        web = serving(engine, {"80/tcp": [{}]}, network=apart)
        own = address_of(engine, web, apart)
        assert answer(own, 80), "the host"
        assert not asks(engine, apart, own, 80)
        assert asks(engine, apart, HOST, one_port(engine, web))


def test_masquerade(engine: TempEngine, lan: Lan) -> None:
    """The LAN sees the host's address; with masquerade off it sees the container's."""
    with lan.inside(lambda: socket.create_server((LAN, 0))) as server:
        server.settimeout(20 * PATIENCE)
        number = str(server.getsockname()[1])

        def client_of(network: str) -> tuple[str, str]:
            made = engine.started("nc", "-w", "20", LAN, number, network=network)
            connection, (peer, _) = server.accept()
            with connection:  # the container runs, and has its address, while this is open
                return peer, address_of(engine, made, network)

        assert client_of("bridge")[0] == HOST
        with network(engine, Options={"com.docker.network.bridge.enable_ip_masquerade": "false"}) as plain:
            seen, own = client_of(plain)
            assert seen == own


def test_host_binding(engine: TempEngine, lan: Lan) -> None:
    with network(engine, Options={"com.docker.network.bridge.host_binding_ipv4": "127.0.0.1"}) as local:
        web = serving(engine, {"80/tcp": [{}]}, network=local)
        port = one_port(engine, web, ip="127.0.0.1")
        assert answer("127.0.0.1", port)
        assert lan.inside(lambda: answer(HOST, port)) == "ConnectionRefusedError"
        assert by_ipv6(lan, port) == NOBODY_BY_IPV6


def test_the_way_out_moves(engine: TempEngine) -> None:
    """Ports follow the network of the container's default route."""
    with network(engine) as first:
        web = serving(engine, {"80/tcp": [{"HostPort": "0"}]}, network=first)
        engine.docker("network", "connect", "bridge", web)
        port = one_port(engine, web)
        assert answer("127.0.0.1", port)
        engine.docker("network", "disconnect", first, web)
        port = one_port(engine, web)
        assert answer("127.0.0.1", port)
        engine.docker("network", "disconnect", "bridge", web)
        assert answer("127.0.0.1", port) == "ConnectionRefusedError"
        assert ports_of(engine, web) == {}


# --- which ports ----------------------------------------------------------------------------------


def test_conflicts(engine: TempEngine) -> None:
    """Conflicts are found before the start, with Docker's message. Nothing is left, and the port is
    free once its owner has ended."""
    first = serving(engine, {"80/tcp": [{}]})
    port = one_port(engine, first)
    wanted = {"NetworkMode": "bridge", "PortBindings": {"80/tcp": [{"HostPort": str(port)}], "81/tcp": [{}]}}
    second = engine.create("sleep", "1000", name=f"x{secrets.token_hex(3)}", network="bridge", host=wanted)
    refused = engine.request("POST", f"/v1.24/containers/{second}/start")
    assert refused.status == 500
    words = refused.json()["message"]
    assert words.startswith(
        f"driver failed programming external connectivity on endpoint {engine.inspect(second)['Name'][1:]} ("
    )
    assert words.endswith(f"): Bind for 0.0.0.0:{port} failed: port is already allocated")
    assert engine.inspect(second)["State"]["Status"] == "created"
    engine.docker("rm", "-f", first)
    engine.post(f"/containers/{second}/start")
    assert one_port(engine, second) == port


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
def test_programs_of_the_host(engine: TempEngine, kind: socket.SocketKind) -> None:
    """A listening process is detected before the start; while a container holds a port no process
    can listen on it."""
    protocol = "tcp" if kind == socket.SOCK_STREAM else "udp"
    with socket.socket(socket.AF_INET, kind) as program:
        program.bind(("127.0.0.1", 0))
        if protocol == "tcp":
            program.listen()
        port = program.getsockname()[1]
        bindings = {f"80/{protocol}": [{"HostPort": str(port)}]}
        container = engine.create("sleep", "1000", network="bridge", host={"PortBindings": bindings})
        refused = engine.request("POST", f"/v1.24/containers/{container}/start")
        assert refused.status == 500
        assert refused.json()["message"].endswith(f"listen {protocol}4 0.0.0.0:{port}: bind: address already in use")
    engine.post(f"/containers/{container}/start")
    for _ in range(2):
        with socket.socket(socket.AF_INET, kind) as program, pytest.raises(OSError, match="in use"):
            program.bind(("127.0.0.1", port))
        engine.restart()


def test_range_and_all(engine: TempEngine) -> None:
    """200 adjacent ports; PublishAllPorts of the exposed ones; a range for one port."""
    probe = serving(engine, {"1-200/tcp": [{}], "80/tcp": [{"HostPort": "0"}]}, ExposedPorts={"9/udp": {}})
    found = ports_of(engine, probe)
    assert sum(len(each) for each in found.values()) == 201
    assert found["9/udp"] == []
    assert all(answer("127.0.0.1", port) for _, port in found["80/tcp"])
    (row,) = engine.request("GET", "/v1.24/containers/json").json()
    rows = row["Ports"]
    assert {"PrivatePort": 9, "Type": "udp"} in rows
    assert len(rows) == 202
    assert {"IP": "0.0.0.0", "PrivatePort": 80, "PublicPort": one_port(engine, probe), "Type": "tcp"} in rows
    every = serving(engine, {}, ExposedPorts={"80/tcp": {}, "7/udp": {}}, host={"PublishAllPorts": True})
    assert answer("127.0.0.1", one_port(engine, every))
    assert one_port(engine, every, "7/udp")
    assert str(one_port(engine, every)) in engine.docker("port", every, "80/tcp").line
    free = one_port(engine, every)
    engine.docker("rm", "-f", every)
    bindings = {"80/tcp": [{"HostPort": f"{free}-{free + 20}"}]}
    given = {one_port(engine, serving(engine, bindings)) for _ in range(3)}
    assert len(given) == 3
    assert given <= {*range(free, free + 21)}


def test_a_stopped_container_has_no_ports(engine: TempEngine) -> None:
    web = serving(engine, {"80/tcp": [{}]})
    port = one_port(engine, web)
    engine.docker("kill", web)
    until("the port is closed", lambda: answer("127.0.0.1", port) == "ConnectionRefusedError")
    assert ports_of(engine, web) == {}
    engine.post(f"/containers/{web}/start")
    assert one_port(engine, web)


# --- changes on the host --------------------------------------------------------------------------


def test_the_next_one_has_them_when_the_wait_is_answered(engine: TempEngine) -> None:
    bindings = {"PortBindings": {"80/tcp": [{"HostPort": str(free_run(1))}]}}
    for _ in range(20):
        assert engine.wait(engine.started("true", network="bridge", host=bindings)) == 0


def test_daemon_gone(engine: TempEngine, lan: Lan) -> None:
    """Traffic continues without a daemon. The next daemon holds the same ports, and closes those of
    containers that ended meanwhile."""
    web, gone = serving(engine, {"80/tcp": [{}], "81/udp": [{}]}), serving(engine, {"80/tcp": [{}]})
    before, port, other = ports_of(engine, web), one_port(engine, web), one_port(engine, gone)
    pid = engine.inspect(gone)["State"]["Pid"]
    engine.kill9()
    assert LAN in lan.inside(lambda: answer(HOST, port))
    os.kill(pid, 9)
    engine.start()
    assert ports_of(engine, web) == before
    assert LAN in lan.inside(lambda: answer(HOST, port))
    until("the other's port is closed", lambda: answer("127.0.0.1", other) == "ConnectionRefusedError")
    clash = engine.create("true", network="bridge", host={"PortBindings": {"80/tcp": [{"HostPort": str(port)}]}})
    assert engine.request("POST", f"/v1.24/containers/{clash}/start").status == 500


def test_somebody_takes_the_rules_away(engine: TempEngine, lan: Lan) -> None:
    """The table, its rules and its elements are all restored soon. Other tables are not changed."""
    web = serving(engine, {"80/tcp": [{}]})
    port = one_port(engine, web)
    name, other = table(engine), f"other-{secrets.token_hex(4)}"
    layout = NftSocket()
    for harm in (f"delete table inet {name}", f"flush chain inet {name} published"):
        netfilter.run(harm)
        until(f"it works again after: {harm}", lambda: LAN in lan.inside(lambda: answer(HOST, port, 0.5)))
        with network(engine) as apart:
            assert not asks(engine, apart, address_of(engine, web), 80)
        web = serving(engine, {"80/tcp": [{"HostPort": str(port)}]})
    before = layout.layout(name)
    netfilter.run(f"add table inet {other}\nflush table inet {other}\ndelete table inet {other}")
    assert layout.layout(name) == before
    layout.close()
    assert LAN in lan.inside(lambda: answer(HOST, port))


def test_somebody_deletes_the_bridge(engine: TempEngine, lan: Lan) -> None:
    """It is restored at once: published ports are reachable again, and existing connections
    continue."""
    web, echo = serving(engine, {"80/tcp": [{}]}), serving(engine, {"80/tcp": [{}]}, command=ECHO)
    port, other = one_port(engine, web), one_port(engine, echo)
    until("it listens", lambda: answer("127.0.0.1", other, 0.1) == "TimeoutError")
    with lan.inside(lambda: socket.create_connection((HOST, other), 20)) as connection:
        run(f"ip link delete {engine.bridge}")
        connection.sendall(b"x")
        until("the host is answered", lambda: ":" in answer("127.0.0.1", port, 0.5))
        until("the LAN is answered", lambda: LAN in lan.inside(lambda: answer(HOST, port, 0.5)))
        assert connection.recv(1) == b"x"
    until("the LAN is answered by IPv6", lambda: ":" in lan.inside(lambda: answer(HOST6, port, 0.5)))
    assert asks(engine, "bridge", HOST, port)
    assert "has been restored" in engine.log()


def test_udp_clients_do_not_stay_with_the_old_container(engine: TempEngine, lan: Lan) -> None:
    """A client that keeps sending from one port reaches the container that publishes the port
    now.
    """
    first = serving(engine, {"80/udp": [{}]}, command=("sleep", "1000"))
    port = one_port(engine, first, "80/udp")

    def send(payload: bytes) -> None:
        lan.inside(lambda: datagram(HOST, port, payload, 5353))

    with Sniffer(engine, first) as sniffer:
        send(b"one")
        assert sniffer.next() == b"one"
    engine.docker("rm", "-f", first)
    send(b"nobody is there")
    second = serving(engine, {"80/udp": [{"HostPort": str(port)}]}, command=("sleep", "1000"))
    with Sniffer(engine, second) as sniffer:
        stop = threading.Event()

        def again() -> None:
            while not stop.wait(0.05):
                send(b"two")

        sender = threading.Thread(target=again)
        sender.start()
        try:
            assert sniffer.next() == b"two"
        finally:
            stop.set()
            sender.join()


# --- localhost, which is ::1 first ----------------------------------------------------------------

ECHO = ("nc", "-ll", "-p", "80", "-e", "cat")


def echoed(port: int, size: int, host: str = "::1") -> int:
    """The number of bytes, of `size`, that are echoed after the client has shut down its sending
    side. Asserts that they are equal.
    """
    sent = os.urandom(1 << 20) * (size >> 20)
    with socket.create_connection((host, port), 30) as connection:

        def send() -> None:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        came = bytearray()
        while part := connection.recv(1 << 20):
            came += part
        sender.join()
    assert came == sent[: len(came)]
    return len(came)


@pytest.mark.parametrize("six", [False, True], ids=["without IPv6", "with IPv6"])
def test_localhost(engine: TempEngine, six: bool) -> None:
    """Whether or not the container's network has IPv6, [::1] reaches the port like 127.0.0.1."""
    with network(engine, EnableIPv6=six) as name:
        page = "echo ok > /tmp/index.html; exec httpd -f -p 80 -h /tmp"
        web = serving(engine, {"80/tcp": [{}]}, network=name, command=("sh", "-c", page))
        port = one_port(engine, web)
        until("it listens", lambda: curl(f"127.0.0.1:{port}") == "ok")
        for target in (f"[::1]:{port}", f"localhost:{port}"):
            assert curl(target) == "ok", target
        engine.docker("rm", "-f", web)
        assert answer("::1", port) == "ConnectionRefusedError"


def curl(target: str) -> str:
    done = subprocess.run(["curl", "-sS", "-m", "10", f"http://{target}/"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def test_bound_to_the_loopback_of_ipv6(engine: TempEngine, lan: Lan) -> None:
    """Another container may publish the same port at 127.0.0.1; the LAN reaches neither."""
    one = serving(engine, {"80/tcp": [{"HostIp": "127.0.0.1"}]}, command=("nc", "-ll", "-p", "80", "-e", "echo", "one"))
    port = one_port(engine, one, ip="127.0.0.1")
    bindings = {"80/tcp": [{"HostIp": "::1", "HostPort": str(port)}]}
    two = serving(engine, bindings, command=("nc", "-ll", "-p", "80", "-e", "echo", "two"))
    assert ports_of(engine, two) == {"80/tcp": [("::1", port)]}
    for host, said in (("127.0.0.1", "one"), ("::1", "two")):
        until(f"{host} says {said}", lambda host=host, said=said: answer(host, port) == said)
    assert by_ipv6(lan, port) == NOBODY_BY_IPV6 | {"host, loopback": "two"}
    with socket.socket(socket.AF_INET6) as program, pytest.raises(OSError, match="in use"):
        program.bind(("::1", port))


def test_a_program_of_the_host_has_the_port_at_ipv6(engine: TempEngine) -> None:
    """The host program keeps [::1]; the container has 127.0.0.1."""
    with socket.create_server(("::", 0), family=socket.AF_INET6) as program:
        port = program.getsockname()[1]
        web = serving(engine, {"80/tcp": [{"HostPort": str(port)}]})
        assert one_port(engine, web) == port
        assert answer("127.0.0.1", port)
        with socket.create_connection(("::1", port), 5), program.accept()[0]:
            pass


def test_what_goes_by_ipv6_from_the_lan(engine: TempEngine, lan: Lan) -> None:
    """All bytes arrive in both directions, and each side's end of stream is passed on."""
    web = serving(engine, {"80/tcp": [{}]}, command=ECHO)
    port = one_port(engine, web)
    until("it listens", lambda: answer("127.0.0.1", port, 0.1) == "TimeoutError")
    assert lan.inside(lambda: echoed(port, 16 << 20, HOST6)) == 16 << 20
    with lan.inside(lambda: socket.create_connection((HOST6, port), 20)) as connection:
        for _ in range(3):
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
            engine.restart()
        engine.docker("kill", web)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_what_goes_by_ipv6_loopback(engine: TempEngine) -> None:
    """All bytes arrive in both directions, and each side's end of stream is passed on; nothing is
    left in the monitor."""
    web = serving(engine, {"80/tcp": [{}]}, command=ECHO)
    port = one_port(engine, web)
    until("it listens", lambda: answer("127.0.0.1", port, 0.1) == "TimeoutError")
    descriptors = Path(f"/proc/{engine.monitor_pid()}/fd")
    before = len([*descriptors.iterdir()])
    assert echoed(port, 32 << 20) == 32 << 20
    assert echoed(port, 0) == 0
    # A client that reads nothing stalls only its own connection, and may disconnect abruptly.
    with socket.create_connection(("::1", port), 5) as deaf:
        deaf.settimeout(0.2)
        with pytest.raises(TimeoutError):
            deaf.sendall(bytes(64 << 20))
        assert echoed(port, 1 << 20) == 1 << 20
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    crowd = []
    for _ in range(50):
        crowd.append(socket.create_connection(("::1", port), 20))
        crowd[-1].sendall(b"x")
        assert crowd[-1].recv(1) == b"x"
    for each in crowd:
        each.close()
    until("its descriptors are closed", lambda: len([*descriptors.iterdir()]) <= before)
    # The container shuts down its side, or ends.
    with socket.create_connection(("::1", port), 5) as left:
        left.sendall(b"x")
        assert left.recv(1) == b"x"
        engine.docker("kill", web)
        left.settimeout(20 * PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert left.recv(1) == b""
    until("its descriptors are closed", lambda: len([*descriptors.iterdir()]) <= before)


def test_localhost_without_daemon_or_monitor(engine: TempEngine) -> None:
    """Connections last as long as the monitor. New ones are accepted after the daemon or the
    monitor has died.
    """
    web = serving(engine, {"80/tcp": [{}]}, command=ECHO)
    port = one_port(engine, web)
    until("it listens", lambda: answer("127.0.0.1", port, 0.1) == "TimeoutError")
    with socket.create_connection(("::1", port), 5) as connection:

        def lives() -> bool:
            connection.sendall(b"x")
            return connection.recv(1) == b"x"

        assert lives()
        engine.kill9()
        assert lives()
        assert echoed(port, 1 << 20) == 1 << 20
        engine.start()
        assert lives()
        assert echoed(port, 1 << 20) == 1 << 20
    engine.kill_monitor()
    assert echoed(port, 1 << 20) == 1 << 20


# --- a host of its own ----------------------------------------------------------------------------


def test_all_rules_of_the_host_are_flushed() -> None:
    """After `nft flush ruleset` everything is soon restored: ports, by both loopbacks, and
    isolation."""
    with host_of_its_own(ipv6=True) as (engine, namespace):
        web = serving(engine, {"80/tcp": [{}]})
        port = one_port(engine, web)
        for _ in range(2):
            within(namespace, lambda: netfilter.run("flush ruleset"))
            for host in ("127.0.0.1", "::1"):
                until(f"{host} answers", lambda host=host: ":" in within(namespace, lambda: answer(host, port, 0.5)))
            with network(engine) as apart:
                assert not asks(engine, apart, address_of(engine, web), 80)
            web = serving(engine, {"80/tcp": [{"HostPort": str(port)}]})


def test_a_host_without_ipv6() -> None:
    """Without IPv6 on the host, 127.0.0.1 works as elsewhere; [::1] does not exist."""
    with host_of_its_own(ipv6=False) as (engine, namespace):
        port = one_port(engine, serving(engine, {"80/tcp": [{}]}))
        assert ":" in within(namespace, lambda: answer("127.0.0.1", port))
        assert ":" in within(namespace, lambda: answer("localhost", port))
        assert within(namespace, lambda: answer("::1", port)) in ("OSError", "ConnectionRefusedError")
        engine.restart()
        assert ":" in within(namespace, lambda: answer("127.0.0.1", port))
        assert "ERROR" not in engine.log()


# --- isolation of networks ------------------------------------------------------------------------


def test_nothing_of_one_network_is_heard_on_another(engine: TempEngine) -> None:
    """No frame passes, not even ARP. This holds for broadcasts of a container and for packets to an
    address of the other network."""
    with network(engine) as one, network(engine) as other:
        speaker = engine.started(
            "sleep", "1000", network=one, name=f"s{secrets.token_hex(4)}", host={"CapAdd": ["NET_RAW"]}
        )
        hearer = engine.started("sleep", "1000", network=other)
        shut = engine.started("sleep", "1000", network=other)
        own, target = address_of(engine, speaker, one), address_of(engine, hearer, other)
        mac = bytes.fromhex(engine.inspect(speaker)["NetworkSettings"]["Networks"][one]["MacAddress"].replace(":", ""))
        namespace = os.open(f"/proc/{engine.inspect(hearer)['State']['Pid']}/ns/net", os.O_RDONLY)
        with within(namespace, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))) as wire:
            os.close(namespace)
            wire.settimeout(20 * PATIENCE)
            engine.docker("exec", speaker, "arping", "-c", "2", "-w", "1", "-I", "eth0", target, status=None)
            engine.docker("exec", speaker, "ping", "-c", "1", "-W", "1", target, status=1)
            engine.docker("exec", shut, "ping", "-c", "1", "-W", "5", target)
            while True:  # the neighbour's query comes last
                frame = wire.recv(2048)
                assert frame[6:12] != mac
                assert socket.inet_aton(own) not in frame
                if frame[12:14] == b"\x08\x00" and socket.inet_aton(address_of(engine, shut, other)) in frame:
                    break


def test_udp_connections_are_forgotten_at_both_ends(engine: TempEngine, lan: Lan) -> None:
    """Conntrack entries are deleted when a port is published and when it is withdrawn."""
    kernel = ConntrackSocket()

    def entries(port: int, address: str) -> int:
        return kernel.forget_udp(4, {port}, {socket.inet_aton(address)})

    web = serving(engine, {"80/udp": [{}]}, command=("sleep", "1000"))
    port, address = one_port(engine, web, "80/udp"), address_of(engine, web)
    lan.inside(lambda: datagram(HOST, port, b"here", 5354))
    # The entry is created when the datagram has passed, which on a busy machine is after sendto(2)
    # returns.
    until("there is one, by which it would be known", lambda: entries(port, address) == 1)
    lan.inside(lambda: datagram(HOST, port, b"here", 5354))
    engine.docker("rm", "-f", web)
    # earlier than the kernel's own timeout of 30 seconds
    until("the entry of the removed port is forgotten", lambda: not established(port), 15)
    lan.inside(lambda: datagram(HOST, port, b"nobody is there", 5355))
    serving(engine, {"80/udp": [{"HostPort": str(port)}]}, command=("sleep", "1000"))
    until("the entry from before is forgotten", lambda: not established(port), 15)
    kernel.close()


def established(port: int) -> list[str]:
    """Entries of this host's connection tracking table for a UDP port."""
    text = Path("/proc/net/nf_conntrack")
    return [line for line in text.read_text().splitlines() if f"dport={port} " in line and " udp " in line]
