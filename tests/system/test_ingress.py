"""Published ports of services over three hosts in network namespaces, without engines and managers:
real links, rules and packets. Containers are namespaces with servers of the test.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import TypeVar

import msgspec
import pytest

from engine.networks import network
from engine.networks.endpoints import Network
from engine.networks.filter import BridgeRules, Filter
from engine.networks.ipam import mac_address
from engine.networks.network import NetworkRecord, Overlay
from engine.networks.overlay import ingress
from engine.networks.overlay.driver import OverlayDriver
from engine.networks.overlay.encryption import Encryption
from engine.networks.overlay.ingress import Ingress
from engine.networks.sandboxes import Interface, empty
from engine.system import namespaces, netfilter
from engine.system.netlink.conntrack import ConntrackSocket
from engine.system.netlink.nft import NftSocket
from engine.system.netlink.rtnl import RouteSocket
from engine.wire.networks import IPAM, IPAMConfig
from tests.support import PATIENCE
from tests.support.engine import packets

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

T = TypeVar("T")

NET, SUBNET = "10.77.9", IPv4Network("10.255.0.0/16")
CLIENT = f"{NET}.100"
OWN = IPv4Address("10.255.0.5")
WAIT = 2.0 * PATIENCE


class Place:
    """A network namespace, and a thread that lives in it."""

    def __init__(self, namespace: int = -1) -> None:
        if namespace < 0:
            with namespaces.new_network() as made:
                namespace = made
        self.namespace = namespace
        self._thread = ThreadPoolExecutor(1, initializer=namespaces.enter_network, initargs=(namespace,))
        self._servers: list[socket.socket] = []
        self("ip link set lo up")

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.namespace}"

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        return self._thread.submit(function, *arguments).result(60)

    def __call__(self, command: str) -> str:
        done = subprocess.run(
            ["nsenter", f"--net={self.path}", *command.split()], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def write(self, setting: str, value: str) -> None:
        command = ["nsenter", f"--net={self.path}", "sh", "-c", f"echo {value} > /proc/sys/net/{setting}"]
        subprocess.run(command, check=True)

    def socket(self, kind: int, *, port: int = 0, address: str = "") -> socket.socket:
        made = self.run(lambda: socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind))
        made.settimeout(WAIT)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        return made

    def ask(self, to: str, port: int, *, udp: bool = False, source: int = 0) -> tuple[str, str]:
        """Connect; returns the name of the server and the client's address that it saw."""
        with self.socket(socket.SOCK_DGRAM if udp else socket.SOCK_STREAM, port=source) as client:
            client.connect((to, port))
            client.send(b"?")
            name, address, _ = client.recv(1000).decode().split()
            return name, address

    def serve(self, name: str, port: int) -> None:
        """Answer with this name and the client's address, by TCP, and by UDP from an address that
        the kernel chooses.
        """
        listening = self.socket(socket.SOCK_STREAM, port=port)
        listening.listen(100)
        listening.settimeout(None)
        datagrams = self.socket(socket.SOCK_DGRAM, port=port)
        datagrams.settimeout(None)
        self._servers += [listening, datagrams]

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, (address, number) = listening.accept()
                    threading.Thread(target=answer, args=(client, address, number), daemon=True).start()

        def answer(client: socket.socket, address: str, number: int) -> None:
            with client, contextlib.suppress(OSError):
                while client.recv(1000):
                    client.send(f"{name} {address} {number}".encode())

        def answer_datagrams() -> None:
            with contextlib.suppress(OSError, TypeError):  # None is received after the end
                while True:
                    _, (address, number) = datagrams.recvfrom(1000)
                    datagrams.sendto(f"{name} {address} {number}".encode(), (address, number))

        for each in (serve, answer_datagrams):
            threading.Thread(target=each, daemon=True).start()

    def close(self) -> None:
        for each in self._servers:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.shutdown()
        os.close(self.namespace)


class Host(Place):
    """A node: what an engine has of the ingress network."""

    def __init__(self, lan: Place, number: int) -> None:
        super().__init__()
        self.number = number
        self.address = IPv4Address(f"{NET}.{number}")
        connect(lan, self, str(self.address))
        self.write("ipv4/ip_forward", "1")
        self("ip link add br0 type bridge")
        self("ip address add 172.18.0.1/16 dev br0")
        self("ip link set br0 up")
        self.filter = Filter(f"engined-test{number}")
        self.containers: list[Place] = []
        self.run(self._open)
        assert self.found is not None

    def _open(self) -> None:
        self.filter.open((BridgeRules("br0", (IPv4Network("172.18.0.0/16"),)),))
        self.links = RouteSocket()
        self.driver = OverlayDriver(self.links, self.filter, "test", Encryption(self.filter))
        config = IPAMConfig(subnet=str(SUBNET), gateway="10.255.0.1")
        record = NetworkRecord(
            id=secrets.token_hex(32),
            name="ingress",
            driver="overlay",
            created=1,
            scope="swarm",
            ipam=IPAM(config=[config]),
            chosen_by_user=(4,),
        )
        self.found = Network(record, network.options(record), routes=True)
        self.found.overlay = Overlay(vni=4096, port=4789, local=self.address, ingress=True)
        self.found.options = msgspec.structs.replace(self.found.options, bridge=f"ov-{record.id[:12]}", mtu=1450)
        self.found.fill()
        self.driver.make(self.found)
        self.driver.lead(self.found, SUBNET)
        self.ingress = self.opened()

    def opened(self) -> Ingress:
        """As the next daemon does."""
        made = Ingress(self.filter, self.driver.space(self.found).descriptor, self.found.bridge, SUBNET, self.address)
        made.open()
        return made

    def nodes(self, hosts: Sequence[Host]) -> None:
        others = [each.address for each in hosts if each is not self]
        self.run(self.driver.set_nodes, self.found, others)
        self.run(self.ingress.set_nodes, others)

    def container(self, address: str) -> Place:
        """On the bridge and, second, on the ingress network."""
        made = Place(self.run(empty, None))
        self.containers.append(made)
        end = f"c{len(self.containers)}"
        self(f"ip link add {end} type veth peer name eth0 netns {made.path}")
        self(f"ip link set {end} master br0 up")
        made(f"ip address add 172.18.0.{len(self.containers) + 1}/16 dev eth0")
        made("ip link set eth0 up")
        made("ip route add default via 172.18.0.1")
        own = IPv4Address(address)
        interface = Interface(mac_address(own), (IPv4Interface(f"{address}/16"),), 1450, datagrams=True)
        self.run(self.driver.plug, self.found, made.namespace, "eth1", interface)
        return made

    def close(self) -> None:
        self.run(self.ingress.close, True)
        self.run(self.driver.unmake, self.found)
        self.run(self.filter.close, True)
        self.run(self.links.close)
        for each in self.containers:
            each.close()
        super().close()


def connect(lan: Place, host: Place, address: str) -> None:
    end = f"l{address.rpartition('.')[2]}"
    lan(f"ip link add {end} type veth peer name eth0 netns {host.path}")
    lan(f"ip link set {end} master lan up")
    host(f"ip address add {address}/24 dev eth0")
    host("ip link set eth0 up")


class Swarm:
    def __init__(self) -> None:
        self._closing = contextlib.ExitStack()
        self.lan = self._open(Place())
        self.lan("ip link add lan type bridge")
        self.lan("ip link set lan up")
        self.client = self._open(Place())
        connect(self.lan, self.client, CLIENT)
        self.hosts = [self._open(Host(self.lan, number)) for number in (1, 2, 3)]
        for each in self.hosts:
            each.nodes(self.hosts)
        self.tasks: dict[str, Host] = {}

    def _open(self, made: T) -> T:
        self._closing.callback(made.close)  # type: ignore[attr-defined]
        return made

    def task(self, host: Host, address: str) -> Place:
        made = host.container(address)
        self.tasks[address] = host
        for each in self.hosts:
            if each is not host:
                each.run(each.driver.set_peers, each.found, {IPv4Address(address): host.address}, ())
        return made

    def publish(self, ports: dict[tuple[str, int], tuple[int, list[str]]]) -> list[dict[tuple[str, int], str]]:
        wanted = {port: (to, [*map(IPv4Address, backends)]) for port, (to, backends) in ports.items()}
        return [each.run(each.ingress.set_ports, wanted)[0] for each in self.hosts]

    def close(self) -> None:
        self._closing.close()


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    made = Swarm()
    try:
        yield made
    finally:
        made.close()


def both_answer(client: Place, address: str, port: int, udp: bool, sees: str) -> None:
    """A port leads to `a` and `b`, by chance, and both see this address; no request is lost."""
    before = packets.repeated_syns(client.path)
    seen: set[tuple[str, str]] = set()
    for asked in range(64):
        seen.add(client.ask(address, port, udp=udp))
        if asked > 16 and len(seen) > 1:
            break
    assert seen == {("a", sees), ("b", sees)}, (address, udp)
    assert packets.repeated_syns(client.path) == before, "a packet was lost"


def test_the_task_sees_its_client_through_every_node(swarm: Swarm) -> None:
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    swarm.task(swarm.hosts[1], "10.255.0.6").serve("b", 8080)
    assert swarm.publish(
        {("tcp", 80): (8080, ["10.255.0.5", "10.255.0.6"]), ("udp", 53): (8080, ["10.255.0.5", "10.255.0.6"])}
    ) == [{}, {}, {}]
    for host in swarm.hosts:
        for udp in (False, True):
            port = 53 if udp else 80
            both_answer(swarm.client, str(host.address), port, udp, sees=CLIENT)
            # from the node itself, by its address and by that of its loopback
            for address in (str(host.address), "127.0.0.1"):
                both_answer(host, address, port, udp, sees=str(host.address))


def test_containers_of_a_node_are_seen_with_its_address(swarm: Swarm) -> None:
    """Their own addresses mean nothing to other nodes."""
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    asking = swarm.task(swarm.hosts[1], "10.255.0.6")
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"])})
    for entry in swarm.hosts:
        assert asking.ask(str(entry.address), 80) == ("a", str(swarm.hosts[1].address))


def test_one_port_of_a_client_towards_several_nodes(swarm: Swarm) -> None:
    """For the task these are connections with one address and port, at the same time."""
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"]), ("udp", 53): (8080, ["10.255.0.5"])})
    for kind, port in ((socket.SOCK_STREAM, 80), (socket.SOCK_DGRAM, 53)):
        with contextlib.ExitStack() as closing:
            clients = [closing.enter_context(swarm.client.socket(kind, port=40000 + port)) for _ in swarm.hosts]
            for client, host in zip(clients, swarm.hosts, strict=True):
                client.connect((str(host.address), port))
            for _ in range(3):
                seen = set()
                for client in clients:
                    client.send(b"?")
                    name, address, number = client.recv(1000).decode().split()
                    assert (name, address) == ("a", CLIENT)
                    seen.add(number)
                assert len(seen) == len(clients)


def test_withdrawn_tasks_keep_their_connections(swarm: Swarm) -> None:
    for number, name in enumerate("ab"):
        swarm.task(swarm.hosts[number], f"10.255.0.{number + 5}").serve(name, 8080)
    entry = swarm.hosts[2]
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"])})
    with swarm.client.socket(socket.SOCK_STREAM) as client:
        client.connect((str(entry.address), 80))
        swarm.publish({("tcp", 80): (8080, ["10.255.0.6"])})
        assert {swarm.client.ask(str(entry.address), 80)[0] for _ in range(8)} == {"b"}
        client.send(b"?")
        assert client.recv(1000).startswith(b"a ")
        # with its end the next packet is led elsewhere, and refused
        entry.run(entry.ingress.forget, [IPv4Address("10.255.0.5")])
        client.send(b"?")
        with pytest.raises(ConnectionResetError):
            client.recv(1000)


def test_a_task_that_ends_at_once(swarm: Swarm) -> None:
    """Its end is known before ports lead elsewhere. Its address is in use again later."""
    for number, name in enumerate("ab"):
        swarm.task(swarm.hosts[number], f"10.255.0.{number + 5}").serve(name, 8080)
    entry = swarm.hosts[2]
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"])})
    with swarm.client.socket(socket.SOCK_STREAM) as client, entry.socket(socket.SOCK_STREAM) as own:
        client.connect((str(entry.address), 80))
        own.connect(("127.0.0.1", 80))
        entry.run(entry.ingress.forget, [IPv4Address("10.255.0.5")])
        swarm.publish({("tcp", 80): (8080, ["10.255.0.6"])})
        assert not entry.run(entry.ingress.mend)
        for each in (client, own):
            with pytest.raises(ConnectionResetError):
                each.send(b"?")
                each.recv(1000)
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"])})
    assert swarm.client.ask(str(entry.address), 80)[0] == "a"


def test_ports_of_other_programs(swarm: Swarm) -> None:
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    host = swarm.hosts[1]
    with host.socket(socket.SOCK_STREAM, port=80) as other:
        other.listen()
        first, second, third = swarm.publish({("tcp", 80): (8080, ["10.255.0.5"]), ("tcp", 81): (8080, ["10.255.0.5"])})
        assert first == third == {}
        assert second == {("tcp", 80): "listen tcp4 0.0.0.0:80: bind: address already in use"}
        assert swarm.client.ask(str(host.address), 81)[0] == "a"
        assert host.run(host.ingress.retry)
    assert not host.run(host.ingress.retry)
    assert swarm.client.ask(str(host.address), 80)[0] == "a"
    with pytest.raises(OSError):
        host.socket(socket.SOCK_STREAM, port=80)
    swarm.publish({})
    with pytest.raises(ConnectionRefusedError):
        swarm.client.ask(str(host.address), 80)
    host.socket(socket.SOCK_STREAM, port=80).close()


def test_sctp_has_rules_without_sockets(swarm: Swarm) -> None:
    """The kernel of a host may have no such sockets. Packets pass nevertheless."""
    assert swarm.publish({("sctp", 80): (8080, ["10.255.0.5"])}) == [{}, {}, {}]
    host = swarm.hosts[0]
    assert "elements = { sctp . 80 . 0 : 10.255.0.5 . 8080 }" in host.run(netfilter.run, "list ruleset")
    assert not host.run(host.ingress.mend)


def test_another_address_of_a_node(swarm: Swarm) -> None:
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"])})
    host = swarm.hosts[0]
    host(f"ip address add {NET}.50/24 dev eth0")
    host.run(host.ingress.moved, IPv4Address(f"{NET}.50"))
    assert host.ask("127.0.0.1", 80) == ("a", f"{NET}.50")


def test_a_swarm_of_the_loopback_address(swarm: Swarm) -> None:
    """Of this host alone. Its tasks would drop packets that come from 127.0.0.1."""
    host = swarm.hosts[0]
    swarm.task(host, "10.255.0.5").serve("a", 8080)
    asking = host.container("10.255.0.6")
    host.run(host.ingress.moved, IPv4Address("127.0.0.1"))
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"]), ("udp", 53): (8080, ["10.255.0.5"])})
    for port, udp in ((80, False), (53, True)):
        assert host.ask("127.0.0.1", port, udp=udp)[0] == "a"
        assert host.ask(str(host.address), port, udp=udp)[0] == "a"
        for address in ("172.18.0.1", str(host.address)):
            assert asking.ask(address, port, udp=udp)[0] == "a"
    assert swarm.client.ask(str(host.address), 80) == ("a", CLIENT)
    assert not host.run(host.ingress.mend)


def test_a_port_without_tasks_refuses_connections(swarm: Swarm) -> None:
    swarm.publish({("tcp", 80): (8080, [])})
    with pytest.raises(ConnectionRefusedError):
        swarm.client.ask(str(swarm.hosts[0].address), 80)


def test_a_client_that_keeps_sending_reaches_the_first_task(swarm: Swarm) -> None:
    """Its datagrams pass while no task is ready, and while the rules are missing."""
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    swarm.task(swarm.hosts[1], "10.255.0.6").serve("b", 8080)
    entry = swarm.hosts[2]
    entry.run(netfilter.run, "table ip other { chain c { type filter hook input priority 0; ct state new accept; }; }")
    with swarm.client.socket(socket.SOCK_DGRAM) as client, entry.socket(socket.SOCK_DGRAM) as own:

        def send() -> None:
            client.sendto(b"?", (str(entry.address), 53))
            own.sendto(b"?", ("127.0.0.1", 53))

        def ask() -> set[str]:
            send()
            return {each.recv(1000).decode().split()[0] for each in (client, own)}

        send()  # before the port is published at all
        for address, name in (("10.255.0.5", "a"), ("10.255.0.6", "b")):
            swarm.publish({("udp", 53): (8080, [])})
            entry.run(entry.ingress.forget_datagrams, [IPv4Address("10.255.0.5")])
            send()
            swarm.publish({("udp", 53): (8080, [address])})
            assert ask() == {name}
        entry.run(netfilter.run, f"delete table inet {entry.filter.name}-ingress")
        entry.run(lambda: ConntrackSocket().forget_udp(4, {53}, ()))
        send()
        assert entry.run(entry.ingress.mend)
        assert ask() == {"b"}


def test_what_others_remove_comes_back(swarm: Swarm) -> None:
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"])})
    task, entry = swarm.hosts[0], swarm.hosts[1]

    def flush() -> None:
        netfilter.run("flush ruleset")
        with namespaces.inside_network(task.driver.space(task.found).descriptor):
            netfilter.run("flush ruleset")
            subprocess.run(["ip", "rule", "delete", "pref", "100"], check=True)
            subprocess.run(["ip", "neighbour", "delete", "192.0.0.8", "dev", "vxlan0"], check=True)

    assert not task.run(task.ingress.mend)
    task.run(flush)
    assert task.run(task.filter.mend), "it mends the ports on the host, too"
    assert task.run(task.ingress.mend)
    assert not task.run(task.ingress.mend)
    for host in (task, entry):
        assert swarm.client.ask(str(host.address), 80) == ("a", CLIENT)


@pytest.mark.parametrize("by", ["set_ports", "mend"])
def test_the_first_rules_are_refused(swarm: Swarm, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """The next change or repair installs them."""
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    host, run = swarm.hosts[0], netfilter.run

    def refused(text: str) -> str:
        if "-ingress" in text:
            raise netfilter.NetfilterError("Could not process rule: Cannot allocate memory")
        return run(text)

    ports = {("tcp", 80): (8080, [IPv4Address("10.255.0.5")])}
    with monkeypatch.context() as patched:
        patched.setattr(netfilter, "run", refused)
        with pytest.raises(netfilter.NetfilterError):
            host.run(host.ingress.set_ports, ports)
    if by == "mend":
        assert host.run(host.ingress.mend)
    else:
        assert host.run(host.ingress.set_ports, ports)[0] == {}
    assert swarm.client.ask(str(host.address), 80) == ("a", CLIENT)
    assert not host.run(host.ingress.mend)


def test_the_next_daemon_goes_on(swarm: Swarm) -> None:
    """An open connection lives on, and ports that are not published any more are closed."""
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"]), ("tcp", 81): (8080, ["10.255.0.5"])})
    host = swarm.hosts[1]
    with swarm.client.socket(socket.SOCK_STREAM) as client:
        client.connect((str(host.address), 80))
        host.run(host.ingress.close, False)
        assert swarm.client.ask(str(host.address), 80) == ("a", CLIENT)
        host.ingress = host.run(host.opened)
        host.nodes(swarm.hosts)
        assert swarm.client.ask(str(host.address), 81) == ("a", CLIENT)
        assert host.run(host.ingress.set_ports, {("tcp", 80): (8080, [IPv4Address("10.255.0.5")])}) == ({}, set())
        client.send(b"?")
        assert client.recv(1000).startswith(b"a ")
    assert swarm.client.ask(str(host.address), 80) == ("a", CLIENT)
    with pytest.raises(ConnectionRefusedError):
        swarm.client.ask(str(host.address), 81)


def test_no_request_fails_while_daemons_follow_one_another(swarm: Swarm) -> None:
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    wanted = {("tcp", 80): (8080, [IPv4Address("10.255.0.5")])}
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"])})
    failures: list[str] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                swarm.client.ask(str(swarm.hosts[1].address), 80)
            except OSError as error:
                failures.append(str(error))

    before = packets.repeated_syns(swarm.client.path)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(5):
            for host in swarm.hosts[:2]:
                host.run(host.ingress.close, False)
                host.ingress = host.run(host.opened)
                host.nodes(swarm.hosts)
                host.run(host.ingress.set_ports, wanted)
    finally:
        ended.set()
        asking.join()
    assert failures == []
    assert packets.repeated_syns(swarm.client.path) == before, "a packet was lost"


def test_without_the_egress_hook(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others have it: a swarm of different kernels."""
    host = swarm.hosts[0]
    monkeypatch.setattr(ingress, "_EGRESS", ingress._EGRESS.replace("hook egress", "hook missing"))

    def again() -> None:
        with namespaces.inside_network(host.driver.space(host.found).descriptor):
            netfilter.run("flush ruleset")
        host.ingress.close(True)

    host.run(again)
    host.ingress = host.run(host.opened)
    host.nodes(swarm.hosts)
    assert "NETFILTER_EGRESS" in caplog.text
    swarm.task(host, "10.255.0.5").serve("a", 8080)
    swarm.task(swarm.hosts[1], "10.255.0.6").serve("b", 8080)
    swarm.publish(
        {("tcp", 80): (8080, ["10.255.0.5", "10.255.0.6"]), ("udp", 53): (8080, ["10.255.0.5", "10.255.0.6"])}
    )
    for entry in swarm.hosts:
        for udp in (False, True):
            both_answer(swarm.client, str(entry.address), 53 if udp else 80, udp, sees=CLIENT)
        both_answer(entry, "127.0.0.1", 80, False, sees=str(entry.address))
    assert not host.run(host.ingress.mend)


def test_marks_are_numbers(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libnftables 1.1.3 writes the rule. 1.0.6 makes a number of what it shifts."""
    monkeypatch.setattr(ingress, "_NAMESPACE", ingress._NAMESPACE.replace("@ll,64,32", "@ll,64,32 << 1 >> 1"))
    host = swarm.hosts[0]
    host.ingress.close(True)
    host.ingress = host.run(host.opened)
    host.nodes(swarm.hosts)
    swarm.task(host, "10.255.0.5").serve("a", 8080)
    swarm.publish({("tcp", 80): (8080, ["10.255.0.5"])})
    for entry in swarm.hosts:
        assert swarm.client.ask(str(entry.address), 80) == ("a", CLIENT)


def test_many_tasks_share_a_port(swarm: Swarm) -> None:
    """Slots of more than one size, and large targets of a withdrawal."""
    entry = swarm.hosts[2]
    served = {f"10.255.{number >> 8}.{number & 255}" for number in range(256, 256 + 600)}
    swarm.task(swarm.hosts[0], "10.255.0.5").serve("a", 8080)
    for backends in (served, {*served, "10.255.0.5"}, {"10.255.0.5"}, {"10.255.0.5", *sorted(served)[:40]}, set()):
        wanted = {("tcp", 80): (8080, [*map(IPv4Address, sorted(backends))])}
        entry.run(entry.ingress.set_ports, wanted)
        assert not entry.run(entry.ingress.mend)
        kernel = entry.run(NftSocket)
        found = {
            str(IPv4Address(each.data[:4]))
            for each in kernel.elements(f"{entry.filter.name}-ingress", "slots").values()
        }
        kernel.close()
        assert found == backends


def test_datagrams_of_a_port_that_was_added_later(swarm: Swarm) -> None:
    task = swarm.task(swarm.hosts[0], "10.255.0.5")
    task.serve("a", 8080)
    task.run(netfilter.run, "flush ruleset")
    swarm.publish({("udp", 53): (8080, ["10.255.0.5"])})
    for _ in range(2):
        task.run(lambda: ingress.answer_datagrams(os.dup(task.namespace), OWN))
        assert swarm.client.ask(str(swarm.hosts[1].address), 53, udp=True) == ("a", CLIENT)

    def rules() -> str:
        return task.run(netfilter.run, "list ruleset").partition("chain")[2]

    host, before = swarm.hosts[0], rules()
    interface = Interface(mac_address(OWN), (IPv4Interface(f"{OWN}/16"),), 1450, datagrams=True)
    task("ip link delete eth1")
    host.run(host.driver.plug, host.found, task.namespace, "eth1", interface)
    assert rules() == before
    assert swarm.client.ask(str(swarm.hosts[1].address), 53, udp=True) == ("a", CLIENT)
