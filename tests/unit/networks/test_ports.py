"""Published ports: the forms in request bodies, and the allocation."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.networks import ports
from engine.networks.ports import Listeners, Ports, PortTaken, Published, Wanted
from engine.system import namespaces
from engine.system.netlink import rtnl
from engine.system.netlink.rtnl import RouteSocket
from engine.wire.containers import PortBinding

V4 = ("0.0.0.0",)


def binding(port: str = "", ip: str = "") -> PortBinding:
    return PortBinding(host_ip=ip, host_port=port)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("80", (80, 80, "tcp")),
        ("80/tcp", (80, 80, "tcp")),
        ("53/UDP", (53, 53, "udp")),
        ("8000-8010/sctp", (8000, 8010, "sctp")),
        ("65535", (65535, 65535, "tcp")),
    ],
)
def test_port(text: str, found: tuple[int, int, str]) -> None:
    assert ports.parse(text, "ExposedPorts") == found


@pytest.mark.parametrize(
    "text", ["", "0", "65536", "80/icmp", "80/", "-1", "80-", "90-80", "80-65536", " 80", "８０", "80/tcp/udp", "a"]
)
def test_bad_port(text: str) -> None:
    with pytest.raises(InvalidParameter, match="ExposedPorts: Invalid port specification"):
        ports.parse(text, "ExposedPorts")


@pytest.mark.parametrize(
    ("text", "found"), [("", (0, 0)), ("0", (0, 0)), ("8080", (8080, 8080)), ("8000-8010", (8000, 8010))]
)
def test_host_port(text: str, found: tuple[int, int]) -> None:
    assert ports.parse_host_port(text) == found


@pytest.mark.parametrize("text", ["x", "80/tcp", "65536", "10-5", "0-10", "-", "1-2-3"])
def test_bad_host_port(text: str) -> None:
    with pytest.raises(InvalidParameter, match="Invalid port specification"):
        ports.parse_host_port(text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (lambda: ports.parse(text, "ExposedPorts"), lambda: ports.parse_host_port(text)):
        try:
            first, last, *_ = parse()
        except InvalidParameter:
            continue
        assert 0 <= first <= last <= 65535


def test_wanted() -> None:
    asked = ports.wanted(
        ["80/tcp", "81", "90-91/udp"],
        {
            "80/tcp": [binding("8080"), binding("", "127.0.0.1")],
            "1000-1002/tcp": [binding("2000-2002")],
            "7/udp": [binding("3000-3010", "::2")],
            "9/tcp": None,
        },
        publish_all=True,
        ipv6=True,
    )
    anywhere = ("0.0.0.0", "::")
    assert asked == [
        Wanted(80, "tcp", anywhere, 8080, 8080),
        Wanted(1000, "tcp", anywhere, 2000, 2000, 3),
        Wanted(7, "udp", ("::2",), 3000, 3010),
        Wanted(81, "tcp", anywhere, 0, 0),
        Wanted(80, "tcp", ("127.0.0.1",), 0, 0),
        Wanted(90, "udp", anywhere, 0, 0),
        Wanted(91, "udp", anywhere, 0, 0),
    ]
    assert ports.wanted(["80/tcp"], {}, publish_all=False) == []
    assert ports.wanted(["80"], {}, publish_all=True, default_ip="10.0.0.1") == [Wanted(80, "tcp", ("10.0.0.1",), 0, 0)]


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        ({"80-81/tcp": [binding("90-95")]}, "Invalid ranges specified"),
        ({"80/tcp": [binding("90", "300.1.1.1")]}, "invalid IP address"),
        ({"80/xyz": [binding("90")]}, "Invalid port specification"),
        ({"80/tcp": [binding("a")]}, "Invalid port specification"),
    ],
)
def test_bad_bindings(bindings: dict[str, list[PortBinding]], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        ports.check((), bindings)


def explicit(port: int, *host_ips: str, protocol: str = "tcp") -> Wanted:
    return Wanted(port, protocol, host_ips or V4, port, port)


def test_conflicts() -> None:
    held = Ports((32768, 32770))
    held.allocate("a", [explicit(80), explicit(443, "127.0.0.1")])
    for again in (explicit(80), explicit(80, "127.0.0.1"), explicit(443), explicit(443, "127.0.0.1")):
        with pytest.raises(PortTaken, match=f":{again.first} failed: port is already allocated"):
            held.allocate("b", [explicit(1000), again])
    assert len(held) == 1
    held.allocate("b", [explicit(1000), explicit(443, "10.0.0.1"), explicit(80, "::"), explicit(80, protocol="udp")])
    with pytest.raises(PortTaken, match=r"Bind for \[::1\]:80 failed"):
        held.allocate("c", [explicit(80, "::1")])
    assert held.give("a") == (Published("tcp", "0.0.0.0", 80, 80), Published("tcp", "127.0.0.1", 443, 443))
    held.allocate("c", [explicit(80)])
    assert held.give("nobody") == ()


def test_ephemeral() -> None:
    held = Ports((32768, 32770))
    any_port = Wanted(80, "tcp", ("0.0.0.0", "::"), 0, 0)
    assert [held.allocate(name, [any_port])[0].host_port for name in "abc"] == [32768, 32769, 32770]
    with pytest.raises(PortTaken, match="all ports are allocated"):
        held.allocate("d", [any_port])
    held.give("b")
    held.give("a")
    assert held.allocate("d", [any_port])[0].host_port == 32768, "what was given back longest ago comes after the end"
    assert held.allocate("e", [msgspec.structs.replace(any_port, protocol="udp")])[0].host_port == 32768
    held.give("d")
    assert held.allocate("f", [any_port], without=[("tcp", 32769)])[0].host_port == 32768


def test_range() -> None:
    held = Ports()
    one_of = Wanted(80, "tcp", V4, 8000, 8002)
    assert [held.allocate(name, [one_of])[0].host_port for name in "abc"] == [8000, 8001, 8002]
    with pytest.raises(PortTaken, match=r"0.0.0.0:8000-8002 failed: all ports are allocated"):
        held.allocate("d", [one_of])
    asked = ports.wanted((), {f"{n}/tcp": [binding(str(n))] for n in range(9000, 9200)}, publish_all=False)
    assert held.allocate("e", asked) == (Published("tcp", "0.0.0.0", 9000, 9000, 200),)
    with pytest.raises(PortTaken, match=":9100 failed"):
        held.allocate("f", [explicit(9100)])
    held.give("e")
    held.allocate("f", [explicit(9100)])


def test_claim() -> None:
    held = Ports()
    held.claim("a", [Published("tcp", "0.0.0.0", 80, 80, 10)])
    held.claim("b", [Published("tcp", "0.0.0.0", 85, 80), Published("tcp", "0.0.0.0", 90, 80)])
    assert held.give("b") == (Published("tcp", "0.0.0.0", 90, 80),)
    with pytest.raises(PortTaken):
        held.allocate("c", [explicit(89)])


asked_ports = st.lists(
    st.builds(
        lambda port, protocol, ips, first, more, count: Wanted(
            port, protocol, ips, first, first + more if first else 0, 1 if more or not first else count
        ),
        st.integers(1, 20),
        st.sampled_from(["tcp", "udp"]),
        st.sampled_from([("0.0.0.0",), ("127.0.0.1",), ("10.0.0.1",), ("0.0.0.0", "::"), ("::1",)]),
        st.integers(0, 20),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    max_size=4,
)


@given(st.lists(st.tuples(st.sampled_from("abcd"), asked_ports), max_size=10))
def test_nobody_shares_a_port(steps: list[tuple[str, list[Wanted]]]) -> None:
    """Compared with the simplest model: an owner for every single port."""
    held = Ports((30, 40))
    model: dict[str, list[Published]] = {}
    for owner, asked in steps:
        model.pop(owner, None)
        held.give(owner)
        try:
            got = [*ports.single(held.allocate(owner, asked))]
        except PortTaken:
            continue
        assert sorted((each.port, each.protocol, each.host_ip) for each in got) == sorted(
            (each.port + number, each.protocol, ip)
            for each in asked
            for ip in each.host_ips
            for number in range(each.count)
        )
        everything = [each for several in model.values() for each in several] + got
        for place, one in enumerate(everything):
            for other in everything[place + 1 :]:
                same = (
                    one.protocol == other.protocol and one.host_port == other.host_port and one.version == other.version
                )
                assert not (same and (one.host_ip == other.host_ip or {one.host_ip, other.host_ip} & {"0.0.0.0", "::"}))
        if got:
            model[owner] = got
    for owner in "abcd":
        held.give(owner)
    assert held._taken == {}


@given(st.sets(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=30))
def test_joining_loses_nothing(pairs: set[tuple[int, int]]) -> None:
    plain = sorted(Published("tcp", "0.0.0.0", host, port) for host, port in pairs)
    assert sorted(ports.single(ports.joined(plain))) == plain


def test_shown() -> None:
    published = [Published("tcp", "0.0.0.0", 8080, 80, 2), Published("udp", "::", 53, 53)]
    listed = ports.listed(["80/tcp", "9/sctp"], published)
    assert [(each.private_port, each.public_port, each.type, each.ip) for each in listed] == [
        (9, 0, "sctp", ""),
        (53, 53, "udp", "::"),
        (80, 8080, "tcp", "0.0.0.0"),
        (81, 8081, "tcp", "0.0.0.0"),
    ]
    bound = ports.bound(["80/tcp", "9/sctp"], published)
    assert bound["9/sctp"] is None
    assert bound["80/tcp"] == [binding("8080", "0.0.0.0")]
    assert bound["53/udp"] == [binding("53", "::")]


def test_what_images_expose_that_is_no_port() -> None:
    """Port 0 is shown and cannot be published. What is no port at all is left out: otherwise one
    image of another engine would spoil the list of all containers.
    """
    exposed = ["foo", "0/tcp", "70000/udp", "", "80/tcp"]
    assert [(each.private_port, each.type) for each in ports.listed(exposed, ())] == [(0, "tcp"), (80, "tcp")]
    assert ports.bound(exposed, ()) == {"0/tcp": None, "80/tcp": None}
    assert [each.port for each in ports.wanted(exposed, {}, publish_all=True)] == [80]
    ports.check(["0/tcp"], {})
    for text in ("foo", "70000/udp", ""):
        with pytest.raises(InvalidParameter, match="ExposedPorts"):
            ports.check([text], {})
    with pytest.raises(InvalidParameter, match="PortBindings"):
        ports.check([], {"0/tcp": []})


@pytest.fixture
def own_network() -> Iterator[None]:
    """Assume that no other program uses a port."""
    with namespaces.new_network() as made, RouteSocket() as links:
        links.apply(rtnl.change_link("lo", up=True))
        yield
    os.close(made)


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_listeners(protocol: str) -> None:
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as program:
        program.bind(("127.0.0.1", 0))
        if protocol == "tcp":
            program.listen()
        port = program.getsockname()[1]
        held = Listeners(100)
        with pytest.raises(
            ports.PortInUse, match=f"listen {protocol}4 0.0.0.0:{port}: bind: address already in use"
        ) as caught:
            held.hold("a", [Published(protocol, "0.0.0.0", port, 80)])
        assert caught.value.at == (protocol, port)
    held.hold("a", [Published(protocol, "127.0.0.1", port, 80)])
    with socket.socket(socket.AF_INET, kind) as program:
        program.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, protocol == "tcp")
        with pytest.raises(OSError, match="in use"):
            program.bind(("127.0.0.1", port))
            program.listen()
    held.release("a")
    held.release("a")
    with socket.socket(socket.AF_INET, kind) as program:
        program.bind(("127.0.0.1", port))
    held.close()


@pytest.mark.usefixtures("own_network")
def test_listeners_of_a_range_in_which_a_program_has_a_port_of_ipv6() -> None:
    held = Listeners(1000)
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as program:
        program.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        program.bind(("::", 8002))
        assert held.hold("a", [Published("tcp", "0.0.0.0", 8000, 80, 600)]) == ({*range(8000, 8600)} - {8002}, set())
    assert len(held._held["a"]) == 600
    # Linux 6.1 lets a program have an IPv4 address of a port that a socket holds for IPv4 and IPv6
    with pytest.raises(PortTaken, match=r"listen tcp4 127\.0\.0\.1:800[02]: bind: address already in use"):
        held.hold("b", [Published("tcp", "127.0.0.1", 7990, 80, 20)])
    assert [*held._held] == ["a"]
    held.close()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as program:
        program.bind(("127.0.0.1", 7999))


@pytest.mark.usefixtures("own_network")
def test_listeners_of_ports_that_are_published_apart_for_ipv6() -> None:
    held = Listeners(1000)
    ports_of = [Published("tcp", "0.0.0.0", 8000, 80, 3), Published("tcp", "::1", 8001, 80)]
    assert held.hold("a", ports_of) == ({8000, 8002}, {8001})
    assert len(held._held["a"]) == 4
    held.close()


def test_an_address_that_is_not_the_hosts_is_no_reason_to_try_other_ports() -> None:
    held = Listeners(100)
    with pytest.raises(PortTaken, match="bind: cannot assign requested address") as caught:
        held.hold("a", [Published("tcp", "192.0.2.1", 8000, 80, 3)])
    assert not isinstance(caught.value, ports.PortInUse)
    assert held._held == {}


def test_listeners_stop_at_their_limit() -> None:
    held = Listeners(0)
    held.hold("a", [Published("tcp", "127.0.0.1", 0, 80)])
    assert held._held == {}
