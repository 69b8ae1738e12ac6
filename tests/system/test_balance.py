"""Virtual addresses of services, in a namespace laid out as an overlay's: real packets of real
sockets.

Needs root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from pathlib import Path
from typing import TypeVar

import pytest

from engine.networks.overlay import balance
from engine.networks.overlay.balance import Balance
from engine.system import namespaces, netfilter
from engine.system.netlink.nft import Element, NftSocket
from tests.support import PATIENCE
from tests.support.engine import packets

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

GATEWAY = IPv4Address("10.5.0.1")
LOST = IPv4Address("10.5.0.50")
"""A route leads there, but nothing answers."""
SERVICE, OTHER = IPv4Address("10.5.0.100"), IPv4Address("10.5.0.101")
HOSTS = 4

T = TypeVar("T")


class Net:
    """A network's namespace and `HOSTS` containers' on it."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._threads = ThreadPoolExecutor(32)
        self.namespace = self._new()
        self.hosts = [self._new() for _ in range(HOSTS)]
        self.addresses = [IPv4Address(f"10.5.0.{10 + at}") for at in range(HOSTS)]
        path = f"/proc/{os.getpid()}/fd"
        enter = ["nsenter", f"--net={path}/{self.namespace}"]
        lines = ["link set lo up", f"addr add {GATEWAY}/32 dev lo", "route add unreachable 10.5.0.0/24"]
        lines += ["link add lost type veth peer name tsol", "link set lost up", f"route add {LOST}/32 dev lost"]
        lines += [f"neigh add {LOST} lladdr 02:00:00:00:00:01 dev lost nud permanent", "link set tsol up"]
        for at, (host, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
            lines += [
                f"link add v{at} type veth peer name eth0 netns {path}/{host}",
                f"link set v{at} up",
                f"route add {address}/32 dev v{at}",
            ]
        self._ip(enter, lines)
        self.inside(self.namespace, _settings)
        for host, address in zip(self.hosts, self.addresses, strict=True):
            lines = ["link set lo up", "link set eth0 up", f"addr add {address}/24 dev eth0 noprefixroute"]
            lines += [f"route add {GATEWAY} dev eth0 scope link", f"route add default via {GATEWAY}"]
            self._ip(["nsenter", f"--net={path}/{host}"], lines)

    def _ip(self, enter: list[str], lines: list[str]) -> None:
        subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)

    def _new(self) -> int:
        made = self.run(_new_network)
        self._undo.callback(os.close, made)
        return made

    def run(self, act: Callable[[], T]) -> T:
        return self._threads.submit(act).result()

    def inside(self, namespace: int, act: Callable[[], T]) -> T:
        def enter() -> T:
            with namespaces.inside_network(namespace):
                return act()

        return self.run(enter)

    def socket(self, host: int, kind: socket.SocketKind) -> socket.socket:
        made = self.inside(self.hosts[host], lambda: socket.socket(socket.AF_INET, kind))
        made.settimeout(3 * PATIENCE)
        self._undo.callback(made.close)
        return made

    def serve(self, host: int) -> None:
        """Answer on TCP port 80 and UDP port 53 with the number of the host and the client's
        address.

        A connection stays open until its client closes it.
        """
        tcp, udp = self.socket(host, socket.SOCK_STREAM), self.socket(host, socket.SOCK_DGRAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind(("0.0.0.0", 80))
        tcp.listen(128)
        udp.bind(("0.0.0.0", 53))
        tcp.settimeout(None)
        udp.settimeout(None)

        def connections() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted, client = tcp.accept()
                    threading.Thread(target=echo, args=(accepted, client), daemon=True).start()

        def echo(accepted: socket.socket, client: tuple[str, int]) -> None:
            with accepted, contextlib.suppress(OSError):
                while accepted.recv(100):
                    accepted.send(f"{host} {client[0]}".encode())

        def datagrams() -> None:
            # after shutdown(2) there is no client
            with contextlib.suppress(OSError, TypeError):
                while True:
                    _, client = udp.recvfrom(100)
                    udp.sendto(f"{host} {client[0]}".encode(), client)

        for each in (connections, datagrams):
            threading.Thread(target=each, daemon=True).start()
        self._undo.callback(tcp.shutdown, socket.SHUT_RDWR)
        self._undo.callback(_shut, udp)

    def connect(self, host: int, to: IPv4Address) -> socket.socket:
        made = self.socket(host, socket.SOCK_STREAM)
        made.connect((str(to), 80))
        return made

    def ask(self, host: int, to: IPv4Address) -> str:
        """Which host answers a new connection, and what it takes for the client's address."""
        with self.connect(host, to) as made:
            return said(made)

    def close(self) -> None:
        self._undo.close()
        self._threads.shutdown()


def said(connection: socket.socket) -> str:
    connection.send(b"?")
    return connection.recv(100).decode()


def _new_network() -> int:
    with namespaces.new_network() as made:
        return made


def _settings() -> None:
    for name in ("ip_forward", "conf/all/forwarding"):
        with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write("1")


def _shut(udp: socket.socket) -> None:
    with contextlib.suppress(OSError):
        udp.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    try:
        for host in range(1, HOSTS):
            made.serve(host)
        yield made
    finally:
        made.close()


@pytest.fixture
def balanced(net: Net) -> Iterator[Balance]:
    made = Balance(net.namespace, GATEWAY)
    net.run(lambda: made.set({SERVICE: net.addresses[1:]}))
    yield made
    made.close()


def test_each_backend_gets_connections_from_the_clients_own_address(net: Net, balanced: Balance) -> None:
    answers = Counter(net.ask(0, SERVICE) for _ in range(90))
    assert answers.keys() == {f"{host} 10.5.0.10" for host in (1, 2, 3)}
    assert min(answers.values()) >= 12


def test_a_backend_reaches_its_own_service_and_itself(net: Net, balanced: Balance) -> None:
    balanced.set({SERVICE: net.addresses[1:2]})
    assert net.ask(1, SERVICE) == f"1 {GATEWAY}"
    assert net.ask(2, SERVICE) == "1 10.5.0.12"
    assert net.ask(1, net.addresses[1]) == "1 10.5.0.11"


def test_ping(net: Net, balanced: Balance) -> None:
    request = b"\x08\x00" + (0xFFFF - 0x0800 - 0x1234 - 1).to_bytes(2, "big") + b"\x12\x34\x00\x01"
    icmp = net.inside(net.hosts[0], lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
    with icmp:
        icmp.settimeout(3 * PATIENCE)
        icmp.sendto(request, (str(SERVICE), 0))
        answer, (answering, _) = icmp.recvfrom(100)
        assert answering == str(SERVICE)
        assert answer[20] == 0


def test_a_service_without_backends_refuses_at_once(net: Net, balanced: Balance) -> None:
    balanced.set({SERVICE: ()})
    with pytest.raises(ConnectionRefusedError):
        net.connect(0, SERVICE)
    with net.socket(0, socket.SOCK_DGRAM) as udp:
        udp.connect((str(SERVICE), 53))
        udp.send(b"?")
        with pytest.raises(ConnectionRefusedError):
            udp.recv(100)
        balanced.set({SERVICE: net.addresses[1:2]})
        assert said(udp).startswith("1 ")


def test_a_withdrawn_backend_finishes_its_connections(net: Net, balanced: Balance) -> None:
    balanced.set({SERVICE: net.addresses[1:2]})
    with net.connect(0, SERVICE) as tcp, net.socket(0, socket.SOCK_DGRAM) as udp:
        udp.connect((str(SERVICE), 53))
        assert said(tcp).startswith("1 ") and said(udp).startswith("1 ")
        withdrawn = balanced.set({SERVICE: net.addresses[2:3]})
        assert withdrawn == {net.addresses[1]}
        assert said(udp).startswith("1 ")
        balanced.forget_datagrams(withdrawn)
        assert said(udp).startswith("2 ")
        assert said(tcp).startswith("1 ")
        assert net.ask(0, SERVICE).startswith("2 ")
        balanced.end([*withdrawn, net.addresses[2]])
        with pytest.raises(ConnectionResetError):
            said(tcp)
        with net.connect(0, SERVICE) as other:
            assert said(other).startswith("2 ")  # it is a backend
    # back in time: nothing is forgotten
    with net.connect(0, net.addresses[1]) as tcp:
        balanced.set({SERVICE: net.addresses[1:2]})
        balanced.forget_datagrams(withdrawn)
        assert said(tcp).startswith("1 ")


def test_no_connection_fails_while_backends_come_and_go(net: Net, balanced: Balance) -> None:
    stop = threading.Event()
    failures: list[str] = []
    done = 0

    def client() -> None:
        nonlocal done
        while not stop.is_set():
            try:
                net.ask(0, SERVICE)
                done += 1
            except OSError as error:
                failures.append(str(error))

    place = f"/proc/self/fd/{net.hosts[0]}"
    before = packets.repeated_syns(place)
    threads = [threading.Thread(target=client) for _ in range(4)]
    for each in threads:
        each.start()
    more = [IPv4Address(f"10.5.0.{10 + at % 3 + 1}") for at in range(3)]
    turn = 0
    while turn < 300 or (done < 200 and not failures):
        turn += 1
        balanced.set({SERVICE: more[: 1 + turn % 3], OTHER: more[turn % 3 :]})
    stop.set()
    for each in threads:
        each.join()
    assert not failures
    assert packets.repeated_syns(place) == before, "a packet was lost"


def test_the_next_daemon_goes_on(net: Net, balanced: Balance) -> None:
    balanced.set({OTHER: net.addresses[1:2]})
    before = elements(net)
    with net.connect(0, OTHER) as tcp:
        successor = Balance(net.namespace, GATEWAY)
        assert not successor.mend()
        assert successor.set({SERVICE: net.addresses[:0:-1], OTHER: net.addresses[1:2]}) == set()
        assert elements(net) == before
        assert said(tcp).startswith("1 ")
    assert not successor.mend()
    successor.close()
    another = Balance(net.namespace, GATEWAY)
    assert another.set({OTHER: net.addresses[1:2]}) == set(net.addresses[2:])
    assert net.ask(0, OTHER).startswith("1 ")
    with pytest.raises(OSError, match=r"No route|unreachable"):
        net.connect(0, SERVICE)
    another.close()


@pytest.mark.parametrize(
    "harm",
    [
        "delete table inet {}",
        "flush table inet {}",
        "flush map inet {} slots",
        "flush map inet {} services",
        "flush set inet {} self",
        "add element inet {} ended {{ 10.5.0.11 }}",
        "add element inet {} slots {{ 10.5.0.100 . 9 : 10.5.0.9 }}",
    ],
)
def test_what_others_change_is_mended(net: Net, balanced: Balance, harm: str) -> None:
    before = elements(net)
    net.inside(net.namespace, lambda: netfilter.run(harm.format(balance.TABLE)))
    assert balanced.mend()
    assert elements(net) == before
    assert net.ask(0, SERVICE)
    assert not balanced.mend()
    # the next change finds the harm, too
    net.inside(net.namespace, lambda: netfilter.run(f"delete table inet {balance.TABLE}"))
    balanced.set({SERVICE: net.addresses[1:3]})
    assert net.ask(0, SERVICE)
    assert not balanced.mend()


def test_a_connection_that_a_lost_node_never_answers_moves(net: Net, balanced: Balance) -> None:
    """The first packet is lost; so is its entry, and the next attempt finds another backend."""
    balanced.set({SERVICE: [LOST]})
    with net.connect(0, net.addresses[1]) as direct, net.socket(0, socket.SOCK_STREAM) as tcp:
        tcp.setblocking(False)
        assert tcp.connect_ex((str(SERVICE), 80)) == errno.EINPROGRESS
        withdrawn = balanced.set({SERVICE: net.addresses[1:2]})
        assert withdrawn == {LOST}
        balanced.forget_unanswered([*withdrawn, *net.addresses])
        assert select.select([], [tcp], [], 8)[1]
        tcp.settimeout(3 * PATIENCE)
        assert said(tcp).startswith("1 ")
        balanced.set({SERVICE: net.addresses[2:3]})
        balanced.forget_unanswered(net.addresses)  # it has answered
        assert said(tcp).startswith("1 ")
        assert said(direct).startswith("1 ")


def test_what_has_gone_and_comes_back(net: Net, balanced: Balance) -> None:
    balanced.set({SERVICE: ()})
    balanced.end(net.addresses)
    balanced.end(net.addresses)
    assert len(elements(net)["ended"]) == HOSTS
    assert net.ask(0, net.addresses[1]).startswith("1 ")  # not by the service
    successor = Balance(net.namespace, GATEWAY)
    assert successor.set({SERVICE: net.addresses[1:2]}) == set()
    assert len(elements(net)["ended"]) == HOSTS - 1
    assert net.ask(0, SERVICE).startswith("1 ")
    successor.set({OTHER: net.addresses[2:]})
    assert {*elements(net)["ended"]} == {net.addresses[0].packed}
    assert not successor.mend()
    many = [IPv4Address("10.6.0.0") + number for number in range(12_000)]
    successor.end(many)
    assert len(elements(net)["ended"]) == balance._ENDED
    assert not successor.mend()
    successor.close()


def test_a_backend_that_has_gone_before_it_is_withdrawn(net: Net, balanced: Balance) -> None:
    """A crashed container: the managers withdraw it a moment after its end."""
    balanced.set({SERVICE: net.addresses[1:2], OTHER: net.addresses[1:3]})
    with net.connect(0, SERVICE) as open_:
        balanced.end(net.addresses[1:2])
        assert said(open_).startswith("1 "), "until then it may be a new one with the address"
        balanced.set({SERVICE: net.addresses[2:3]})
        assert said(open_).startswith("1 "), "another service still leads there"
        assert balanced.set({}, [OTHER]) == {net.addresses[1]}
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(10):
                said(open_)
    assert {*elements(net)["ended"]} == {net.addresses[1].packed}
    assert not balanced.mend()
    balanced.set({SERVICE: net.addresses[1:2]})
    assert net.ask(0, SERVICE).startswith("1 ") and not elements(net)["ended"]
    balanced.set({SERVICE: net.addresses[2:3]})
    assert not elements(net)["ended"], "it has not ended this time"


def test_a_network_without_services_has_no_table(net: Net) -> None:
    made = Balance(net.namespace, GATEWAY)
    assert made.set({}) == set()
    assert not made.mend()
    assert "table" not in net.inside(net.namespace, lambda: netfilter.run("list tables"))
    made.set({SERVICE: net.addresses[1:2]})
    assert net.ask(0, SERVICE).startswith("1 ")
    liberal = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
    assert net.inside(net.namespace, liberal.read_text) == "1\n"
    made.close()
    with pytest.raises(netfilter.NetfilterError, match="not on this node"):
        made.set({SERVICE: net.addresses[2:3]})
    made.end(net.addresses)
    made.forget_datagrams(net.addresses)
    assert not made.mend()


def test_many_services_and_large_ones(net: Net) -> None:
    made = Balance(net.namespace, GATEWAY)
    addresses = [IPv4Address(f"10.9.{at // 250}.{at % 250}") for at in range(3000)]
    services = {IPv4Address(f"10.5.1.{at}"): addresses[: 3 * at] for at in range(60)}
    made.set({**services, SERVICE: net.addresses[1:2]})
    assert not made.mend()
    assert net.ask(0, SERVICE).startswith("1 ")
    made.set({SERVICE: [*net.addresses[1:2], *addresses]}, services.keys())
    assert not made.mend()
    made.set({SERVICE: net.addresses[2:3]})
    assert net.ask(0, SERVICE).startswith("2 ")
    made.set({}, [SERVICE])
    assert not any(elements(net).values())
    made.close()


def elements(net: Net) -> dict[str, dict[bytes, Element]]:
    def read() -> dict[str, dict[bytes, Element]]:
        with NftSocket() as kernel:
            return {name: kernel.elements(balance.TABLE, name) for name in balance._SETS}

    return net.inside(net.namespace, read)
