"""Rules of encrypted networks in network namespaces of the test: real nftables and real packets.

The kernels of the tests have no ESP, so its part here is a fake: all packets would be in the clear.
Needs root.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import Any, TypeVar

import pytest

from engine.networks.filter import Filter
from engine.networks.network import Overlay
from engine.networks.overlay import encryption
from engine.networks.overlay.encryption import Encryption
from engine.system import namespaces, netfilter
from engine.system.netlink.nft import Generations
from tests.support import PATIENCE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

T = TypeVar("T")

HERE, THERE = IPv4Address("10.77.7.1"), IPv4Address("10.77.7.2")
PORT = 4789
ONE, TWO, PLAIN = 4097, 0xABCDEF, 4099


class Esp:
    """Takes every policy and association."""

    def apply(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Hosts:
    """Two hosts; the first one is that of the engine."""

    def __init__(self) -> None:
        self._threads = []
        descriptors = []
        for _ in range(2):
            with namespaces.new_network() as made:
                descriptors.append(made)
            self._threads.append(ThreadPoolExecutor(1, initializer=namespaces.enter_network, initargs=(made,)))
        here, there = (f"/proc/{os.getpid()}/fd/{each}" for each in descriptors)
        for command in (
            f"nsenter --net={here} ip link add eth0 type veth peer name eth0 netns {there}",
            f"nsenter --net={here} ip address add {HERE}/24 dev eth0",
            f"nsenter --net={here} ip link set eth0 up",
            f"nsenter --net={there} ip address add {THERE}/24 dev eth0",
            f"nsenter --net={there} ip link set eth0 up",
        ):
            subprocess.run(command.split(), check=True)
        self._sockets = [self._on(at, _udp, address) for at, address in enumerate((HERE, THERE))]
        for each in descriptors:
            os.close(each)

    def _on(self, host: int, act: Callable[..., T], *arguments: object) -> T:
        return self._threads[host].submit(act, *arguments).result(30 * PATIENCE)

    def run(self, act: Callable[..., T], *arguments: object) -> T:
        """On the host of the engine."""
        return self._on(0, act, *arguments)

    def _arrives(self, source: int, number: int) -> bool:
        to = (THERE, HERE)[source]
        packet = b"\x08\0\0\0" + number.to_bytes(3, "big") + b"\0"
        receiving = self._sockets[1 - source]
        with contextlib.suppress(PermissionError, TimeoutError):  # dropped here; there
            self._sockets[source].sendto(packet, (str(to), PORT))
            return receiving.recv(100) == packet
        return False

    def leaves(self, number: int) -> bool:
        """True if a packet of this network leaves the engine's host in the clear."""
        return self._arrives(0, number)

    def enters(self, number: int) -> bool:
        return self._arrives(1, number)

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        for thread in self._threads:
            thread.shutdown()


def _udp(address: IPv4Address) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((str(address), PORT))
    made.settimeout(0.3 * PATIENCE)
    return made


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr(encryption, "XfrmSocket", Esp)
    made = Hosts()
    yield made
    made.close()


def opened(hosts: Hosts) -> tuple[Filter, Encryption]:
    table = Filter("engined-test")
    hosts.run(table.open, ())
    return table, Encryption(table)


def meant(number: int) -> Overlay:
    return Overlay(vni=number, port=PORT, local=HERE, encrypted=True, secret=bytes(32))


def test_nothing_is_in_the_clear(hosts: Hosts) -> None:
    table, encrypted = opened(hosts)
    assert hosts.leaves(ONE) and hosts.enters(ONE)
    for number in (ONE, TWO):
        hosts.run(encrypted.set, meant(number), [THERE])
        assert not hosts.leaves(number) and not hosts.enters(number)
    assert hosts.leaves(PLAIN) and hosts.enters(PLAIN)
    hosts.run(encrypted.remove, ONE)
    assert hosts.leaves(ONE) and hosts.enters(ONE) and not hosts.leaves(TWO)
    hosts.run(encrypted.remove, TWO)
    assert "-esp" not in hosts.run(netfilter.run, "list tables")
    encrypted.close()
    hosts.run(table.close, True)


def test_the_next_daemon(hosts: Hosts) -> None:
    """A network that is not adopted yet is encrypted, too."""
    table, first = opened(hosts)
    for number in (ONE, TWO):
        hosts.run(first.set, meant(number), [THERE])
    first.close()
    table.close(False)
    table, second = opened(hosts)
    assert not hosts.leaves(ONE) and not hosts.leaves(TWO)
    hosts.run(second.set, meant(ONE), ())
    assert not hosts.leaves(ONE) and not hosts.leaves(TWO) and not hosts.enters(TWO)
    hosts.run(second.settle, {TWO})
    assert not hosts.leaves(ONE) and not hosts.leaves(TWO)
    hosts.run(second.settle, ())
    assert not hosts.leaves(ONE) and hosts.leaves(TWO) and hosts.enters(TWO)
    second.close()
    table.close(False)
    table, third = opened(hosts)
    hosts.run(third.settle, ())
    assert "-esp" not in hosts.run(netfilter.run, "list tables")
    third.close()
    hosts.run(table.close, True)


@pytest.mark.parametrize(
    "harm", ["flush ruleset", "delete table inet {}", "flush table inet {}", "flush map inet {} networks"]
)
def test_what_others_remove_comes_back(hosts: Hosts, harm: str) -> None:
    """With the rules of the bridges, on the kernel's notice."""
    table, encrypted = opened(hosts)
    hosts.run(encrypted.set, meant(TWO), [THERE])
    before = hosts.run(netfilter.run, "list ruleset")
    notices = hosts.run(Generations)
    hosts.run(netfilter.run, harm.format("engined-test-esp"))
    assert notices.by_others(table.authors) and hosts.leaves(TWO)
    assert hosts.run(table.mend)
    assert not hosts.leaves(TWO) and not hosts.enters(TWO)
    assert sorted(hosts.run(netfilter.run, "list ruleset").split()) == sorted(before.split())
    assert not hosts.run(table.mend)
    notices.close()
    encrypted.close()
    assert not table.companions
    hosts.run(table.close, True)


def test_a_table_of_another_version(hosts: Hosts) -> None:
    table, encrypted = opened(hosts)
    old = "table inet engined-test-esp {\nset numbers {\ntype ipv4_addr;\n}\nchain old {\n}\n}"
    hosts.run(netfilter.run, old)
    hosts.run(encrypted.set, meant(ONE), [THERE])
    assert not hosts.leaves(ONE) and "chain old" not in hosts.run(netfilter.run, "list ruleset")
    encrypted.close()
    hosts.run(table.close, True)
