"""The engine's nftables table in a network namespace of the test: its content, and its
restoration."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

import pytest

from engine.networks import filter as filter_module
from engine.networks.filter import BridgeRules, Filter
from engine.networks.ports import Published, Relayed
from engine.system import namespaces, netfilter
from engine.system.netlink import rtnl
from engine.system.netlink.codec import NetlinkError
from engine.system.netlink.conntrack import ConntrackSocket
from engine.system.netlink.nft import Element, Generations, NftSocket
from engine.system.netlink.rtnl import RouteSocket
from tests.support.engine.harness import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

TABLE = "engined-test"
RULES = BridgeRules("br0", (IPv4Network("10.9.0.0/24"), IPv6Network("fd00:9::/64")))
WEB = (IPv4Address("10.9.0.2"), IPv6Address("fd00:9::2"))
PORTS = (
    Published("tcp", "0.0.0.0", 8000, 80, 200),
    Published("tcp", "::", 8000, 80, 200),
    Published("udp", "127.0.0.1", 53, 53),
    Published("sctp", "::1", 9, 9),
)
RELAYED = Relayed(frozenset(range(8000, 8200)), frozenset({1}))
"""Published TCP ports reached by IPv6 through an IPv4 loopback alias."""


def alone(body: Callable[[], None]) -> None:
    """Run the body in a thread with a new network namespace; its failure is the test's."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with namespaces.new_network() as descriptor:
                with RouteSocket() as links:
                    links.apply(rtnl.create_bridge("br0", mac="02:42:00:00:00:01"))
                body()
            os.close(descriptor)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def content() -> dict[str, int]:
    """Elements of each set."""
    kernel = NftSocket()
    names = (
        "bridges",
        "made",
        "inside",
        "internal",
        "masqueraded",
        "hairpin4",
        "hairpin6",
        "address4",
        "any4",
        "address6",
        "any6",
        "relayed_anywhere",
        "relayed_at_loopback",
    )
    found = {name: len(kernel.elements(TABLE, name)) for name in names}
    kernel.close()
    return found


FULL = {
    "bridges": 1,
    "made": 1,
    "inside": 1,
    "internal": 0,
    "masqueraded": 1,
    "hairpin4": 1,
    "hairpin6": 1,
    "address4": 201,
    "any4": 200,
    "address6": 1,
    "any6": 200,
    "relayed_anywhere": 200,
    "relayed_at_loopback": 1,
}
EMPTY = dict.fromkeys(FULL, 0)
OF_PORTS = ("address4", "any4", "address6", "any6", "relayed_anywhere", "relayed_at_loopback")


def made() -> Filter:
    table = Filter(TABLE)
    table.open([RULES], 4711)
    table.settle()
    table.publish("web", WEB, PORTS, RELAYED)
    return table


def test_elements_come_and_go() -> None:
    def body() -> None:
        table = made()
        assert content() == FULL
        listed = netfilter.run(f"list table inet {TABLE}")
        assert "tcp . 8199 : 10.9.0.2 . 279" in listed
        assert "udp . 127.0.0.1 . 53 : 10.9.0.2 . 53" in listed
        assert "sctp . ::1 . 9 : fd00:9::2 . 9" in listed
        assert '10.9.0.0/24 . "br0"' in listed
        assert Path("/proc/sys/net/ipv4/conf/br0/route_localnet").read_text() == "1\n"
        table.unpublish("web")
        table.unpublish("web")
        table.remove_network("br0")
        table.remove_network("br0")
        assert content() == EMPTY
        table.add_network(BridgeRules("br1", (IPv4Network("10.8.0.0/24"),), internal=True, icc=False))
        assert content() == EMPTY | {"bridges": 1, "made": 1, "internal": 1, "hairpin4": 1}
        table.publish("four", (WEB[0], None), PORTS)
        assert content()["any6"] == 0, "it has no such address"
        table.close(remove=True)
        assert TABLE not in netfilter.run("list tables")

    alone(body)


@pytest.mark.parametrize(
    "harm",
    [
        "flush ruleset",
        f"delete table inet {TABLE}",
        f"flush table inet {TABLE}",
        f"flush chain inet {TABLE} forward",
        f"flush chain inet {TABLE} relayed",
        f"flush set inet {TABLE} bridges",
        f"delete element inet {TABLE} any4 {{ tcp . 8100 }}",
        f"delete element inet {TABLE} relayed_anywhere {{ 8100 }}",
        f"add element inet {TABLE} any4 {{ tcp . 1 : 10.9.0.3 . 1 }}",
        (
            f"delete element inet {TABLE} any4 {{ tcp . 8100 }}\n"
            f"add element inet {TABLE} any4 {{ tcp . 8100 : 10.9.0.9 . 1 }}"
        ),
        f"add table inet {TABLE} {{ flags dormant; }}",
    ],
)
def test_what_is_missing_is_put_back(harm: str) -> None:
    def body() -> None:
        table = made()
        notices = Generations()
        before = netfilter.run(f"list table inet {TABLE}")
        assert not table.mend()
        table.publish("more", WEB, [Published("tcp", "0.0.0.0", 1, 1)])
        table.unpublish("more")
        assert not notices.by_others(table.authors), "own changes are no news"
        netfilter.run(harm)
        assert notices.by_others(table.authors)
        assert netfilter.run("list ruleset") != before
        assert table.mend()
        assert sorted(netfilter.run(f"list table inet {TABLE}").split()) == sorted(before.split())
        assert content() == FULL
        assert not table.mend()
        notices.close()
        table.close(remove=True)

    alone(body)


def test_changes_of_a_table_that_is_gone() -> None:
    """The table is restored completely."""

    def body() -> None:
        table = made()
        netfilter.run("flush ruleset")
        table.unpublish("web")
        assert content() == FULL | dict.fromkeys(OF_PORTS, 0)
        netfilter.run("flush ruleset")
        table.publish("web", WEB, PORTS, RELAYED)
        assert content() == FULL
        table.close(remove=True)

    alone(body)


def test_datagrams_that_passed_while_rules_were_missing() -> None:
    """A client that keeps sending would keep its entry, which leads nowhere, for ever."""

    def body() -> None:
        table, kernel = made(), ConntrackSocket()
        table.publish("dns", WEB, [Published("udp", "0.0.0.0", 53, 53), Published("udp", "::", 53, 53)])
        netfilter.run("delete table inet " + TABLE)
        netfilter.run("table inet other { chain c { type filter hook input priority 0; ct state new accept; }; }")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family, socket.SOCK_DGRAM) as client:
                for port in (53, 54):
                    client.sendto(b"?", (address, port))
        assert table.mend()
        for version in (4, 6):
            assert [kernel.forget_udp(version, {port}, ()) for port in (53, 54)] == [0, 1]
        table.close(remove=True)

    alone(body)


def test_the_next_daemon() -> None:
    """A new filter installs its rules, and keeps the elements of running containers until all are
    known."""

    def body() -> None:
        first = made()
        first.publish("gone", WEB, [Published("tcp", "0.0.0.0", 7, 7)])
        first.close(remove=False)
        second = Filter(TABLE)
        second.open([RULES])
        assert content() == FULL | {"any4": 201}
        second.publish("web", WEB, PORTS, RELAYED)
        assert not second.mend()
        second.settle()
        assert content() == FULL
        second.close(remove=True)

    alone(body)


def test_networks_of_a_swarm_are_adopted_later(caplog: pytest.LogCaptureFixture) -> None:
    """The elements of the earlier daemon stay until then."""

    def body() -> None:
        first = Filter(TABLE)
        first.open([RULES])
        links = ("ov-0123456789ab", "ov-1123456789ab")
        of_swarm = [
            BridgeRules(link, (IPv4Network(f"169.254.{number}.0/31"),), icc=False, entrance=True)
            for number, link in enumerate(links, 1)
        ]
        for each in of_swarm:
            first.add_network(each)
        first.add_network(BridgeRules("br1", (IPv4Network("10.8.0.0/24"),)))
        first.close(remove=False)
        second = Filter(TABLE)
        second.open([RULES])
        there = EMPTY | {"bridges": 3, "made": 3, "inside": 1, "masqueraded": 3, "hairpin4": 3, "hairpin6": 1}
        assert content() == there
        assert not second.mend()
        second.add_network(of_swarm[0])
        assert content() == there
        second.settle()
        assert content() == there | {"bridges": 2, "made": 2, "masqueraded": 2, "hairpin4": 2}
        assert not second.mend()
        second.remove_network(links[0])
        assert content() == there | {"bridges": 1, "made": 1, "masqueraded": 1, "hairpin4": 1}
        second.close(remove=True)

    alone(body)
    assert not caplog.records


def test_a_table_of_another_version() -> None:
    def body() -> None:
        netfilter.run(f"table inet {TABLE} {{\nset bridges {{\ntype ipv4_addr;\n}}\nchain old {{\n}}\n}}")
        table = made()
        assert content() == FULL
        assert "chain old" not in netfilter.run("list ruleset")
        table.close(remove=True)

    alone(body)


def test_a_kernel_that_cannot_relay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The other rules are the same as on other kernels; existing tables stay."""

    def body() -> None:
        made().close(remove=False)
        monkeypatch.setattr(filter_module, "_RELAY", "chain relay {{ nothing like it {port} }}")
        table = Filter(TABLE)
        table.open([RULES], 4711)
        assert content() == FULL
        assert "tproxy" not in netfilter.run(f"list table inet {TABLE}")
        table.publish("web", WEB, PORTS, RELAYED)
        table.settle()
        assert not table.mend()
        netfilter.run(f"delete table inet {TABLE}")
        assert table.mend()
        assert content() == FULL
        table.close(remove=True)

    alone(body)
    assert caplog.text.count("containers without IPv6 cannot be reached by IPv6") == 1


def test_all_or_nothing() -> None:
    def body() -> None:
        table = made()
        kernel = NftSocket()
        good, bad = ("bridges", Element(b"x".ljust(16, b"\0"))), ("nothere", Element(bytes(16)))
        for add in ([good, bad], [bad, good]):
            with pytest.raises(NetlinkError, match="words: No such file or directory"):
                kernel.change(TABLE, [], add, "words")
        with pytest.raises(NetlinkError):
            kernel.change(TABLE, [good], [], "words")
        assert content() == FULL
        assert kernel.layout("engined-none") == ()
        kernel.close()
        table.close(remove=True)

    alone(body)


def test_many() -> None:
    """Messages and transactions are limited in size; the ports of a thousand containers exceed the
    limits."""

    def body() -> None:
        table = made()
        table.publish("many", WEB, [Published("tcp", "0.0.0.0", 10000, 1, 40000)])
        # The list of a set that the kernel is still resizing has gaps.
        until("all are listed", lambda: content()["any4"] == 40200)
        table.unpublish("many")
        until("those of before are listed", lambda: content() == FULL)
        table.close(remove=True)

    alone(body)
