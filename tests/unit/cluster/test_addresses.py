"""Addresses of init and join: every form, defaults, and what is refused with which words."""

from __future__ import annotations

import contextlib
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster import addresses
from engine.cluster.addresses import Chosen, HostAddress, choose
from engine.cluster.client import joined, split
from engine.errors import InvalidParameter


def host(**links: str) -> list[HostAddress]:
    """Addresses by interface, several with spaces between."""
    return [
        HostAddress(name, ipaddress.ip_address(text))
        for name, addresses_of in {"lo": "127.0.0.1 ::1", **links}.items()
        for text in addresses_of.split()
    ]


ONE = host(eth0="10.1.0.5 fe80::1", engined0="172.17.0.1", br9="172.18.0.1")
TWO = host(eth0="10.1.0.5 2001:db8::5", eth1="192.168.7.9")
OWN = {"engined0", "br9"}


def chosen(listen: str, advertise: str = "", of: list[HostAddress] = ONE, *, must: bool = True) -> Chosen:
    return choose(listen, advertise, "", of, OWN, must_advertise=must)


@pytest.mark.parametrize(
    ("listen", "advertise", "of", "expected"),
    [
        ("0.0.0.0:2377", "", ONE, ("0.0.0.0:2377", "10.1.0.5:2377")),
        ("0.0.0.0", "", ONE, ("0.0.0.0:2377", "10.1.0.5:2377")),
        ("0.0.0.0:4000", "", ONE, ("0.0.0.0:4000", "10.1.0.5:4000")),
        ("0.0.0.0:4000", "10.1.0.5", ONE, ("0.0.0.0:4000", "10.1.0.5:4000")),
        ("0.0.0.0:4000", "10.1.0.5:5000", ONE, ("0.0.0.0:4000", "10.1.0.5:5000")),
        ("0.0.0.0", "eth0", ONE, ("0.0.0.0:2377", "10.1.0.5:2377")),
        ("0.0.0.0", "eth0:99", ONE, ("0.0.0.0:2377", "10.1.0.5:99")),
        ("eth0", "", ONE, ("10.1.0.5:2377", "10.1.0.5:2377")),
        ("eth0:1234", "", ONE, ("10.1.0.5:1234", "10.1.0.5:1234")),
        ("10.1.0.5", "", ONE, ("10.1.0.5:2377", "10.1.0.5:2377")),
        ("127.0.0.1", "", ONE, ("127.0.0.1:2377", "127.0.0.1:2377")),
        ("192.168.7.9:7", "203.0.113.8", TWO, ("192.168.7.9:7", "203.0.113.8:7")),
        ("[::]:2377", "", ONE, ("[::]:2377", "10.1.0.5:2377")),
        ("[2001:db8::5]:80", "", TWO, ("[2001:db8::5]:80", "[2001:db8::5]:80")),
        ("2001:db8::5", "", TWO, ("[2001:db8::5]:2377", "[2001:db8::5]:2377")),
        ("0.0.0.0", "eth1", TWO, ("0.0.0.0:2377", "192.168.7.9:2377")),
        ("0.0.0.0", "", host(eth0="2001:db8::5"), ("0.0.0.0:2377", "[2001:db8::5]:2377")),
    ],
)
def test_chosen(listen: str, advertise: str, of: list[HostAddress], expected: tuple[str, str]) -> None:
    assert chosen(listen, advertise, of)[:2] == expected


@pytest.mark.parametrize(
    ("listen", "advertise", "of", "words"),
    [
        ("", "", ONE, "ListenAddr: must not be empty"),
        ("0.0.0.0", "", TWO, r"multiple addresses.*10\.1\.0\.5 on eth0, 192\.168\.7\.9 on eth1"),
        ("0.0.0.0", "", host(), "could not find the system's IP address"),
        ("0.0.0.0", "", host(engined0="172.17.0.1"), "could not find the system's IP address"),
        ("0.0.0.0", "0.0.0.0", ONE, "AdvertiseAddr '0.0.0.0': advertise address must be a non-zero"),
        ("203.0.113.8", "", ONE, "ListenAddr '203.0.113.8': .* is not an address of this host"),
        ("eth9", "", ONE, "ListenAddr 'eth9': .*no interface eth9"),
        ("0.0.0.0", "eth9:1", ONE, "AdvertiseAddr 'eth9:1': .*no interface eth9"),
        ("10.1.0.5:0", "", ONE, "ListenAddr '10.1.0.5:0'"),
        ("10.1.0.5:70000", "", ONE, "ListenAddr '10.1.0.5:70000'"),
        ("10.1.0.5:x", "", ONE, "ListenAddr '10.1.0.5:x'"),
        (":2377", "", ONE, "ListenAddr ':2377'"),
        ("eth0", "", host(eth0="10.0.0.1 10.0.0.2"), r"several addresses \(10.0.0.1, 10.0.0.2\)"),
        ("eth0", "", host(eth0="fe80::1"), "interface eth0 has no IP address"),
    ],
)
def test_refused(listen: str, advertise: str, of: list[HostAddress], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        chosen(listen, advertise, of)


def of_kinds(**links: str) -> list[HostAddress]:
    """Links as `kind address [address]`; `device` stands for no kind, a kind with "-" is down."""
    return [
        HostAddress(name, ipaddress.ip_address(text), "" if kind == "device" else kind.rstrip("-"), kind[-1] != "-")
        for name, link in links.items()
        for kind, *addresses_of in [link.split()]
        for text in addresses_of
    ]


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ({"docker0": "bridge 172.20.0.1", "eth0": "device 10.1.0.5", "wg0": "wireguard 10.9.0.1"}, "10.1.0.5"),
        ({"cni7": "veth 10.88.0.1", "virbr0": "bridge 192.168.122.1", "eth0": "device 2001:db8::5"}, "2001:db8::5"),
        ({"eth0": "device fe80::1", "bond0": "bond 10.1.0.5", "docker0": "bridge 172.20.0.1"}, "10.1.0.5"),
        ({"eth0": "veth 10.1.0.5", "cni0": "bridge 10.88.0.1"}, "10.1.0.5"),  # in a container
        ({"br0": "bridge 10.1.0.5", "tun0": "tun 10.8.0.6"}, "10.1.0.5"),
        ({"tun0": "tun 10.8.0.6", "engined0": "bridge 172.17.0.1"}, "10.8.0.6"),
        ({"eth0": "device 10.1.0.5", "eth1": "device- 10.2.0.5"}, "10.1.0.5"),
    ],
)
def test_the_only_address_is_that_of_a_device(links: dict[str, str], expected: str) -> None:
    assert chosen("0.0.0.0", of=of_kinds(**links)).advertise == joined(expected, 2377)


def test_two_devices_or_two_bridges_are_several_addresses() -> None:
    for of in (
        of_kinds(eth0="device 10.1.0.5", eth1="device 10.2.0.5", docker0="bridge 172.20.0.1"),
        of_kinds(br0="bridge 10.1.0.5", virbr0="bridge 10.2.0.5"),
    ):
        with pytest.raises(InvalidParameter, match=r"multiple addresses \(10.1.0.5 on \w+, 10.2.0.5 on \w+\)"):
            chosen("0.0.0.0", of=of)


def test_a_join_leaves_the_address_to_the_manager() -> None:
    assert chosen("0.0.0.0:2377", of=TWO, must=False).advertise == ""
    assert chosen("eth1", of=TWO, must=False).advertise == "192.168.7.9:2377"


@pytest.mark.parametrize(
    ("listen", "data_path", "of", "outgoing", "expected"),
    [
        ("0.0.0.0", "", TWO, "192.168.7.9", "192.168.7.9"),
        ("10.1.0.5", "", TWO, "192.168.7.9", "10.1.0.5"),
        ("0.0.0.0", "eth0:1", host(eth0="10.1.0.5", eth1="192.168.7.9"), "192.168.7.9", "10.1.0.5"),
        ("0.0.0.0", "", ONE, "", "10.1.0.5"),
        ("[::]", "", host(eth0="2001:db8::5"), "2001:db8::5", "2001:db8::5"),
    ],
)
def test_an_address_that_nat_leads_here(
    listen: str, data_path: str, of: list[HostAddress], outgoing: str, expected: str
) -> None:
    routes = [ipaddress.ip_address(text) for text in outgoing.split()]
    made = choose(listen, "203.0.113.9", data_path, of, OWN, must_advertise=True, outgoing=routes)
    assert (made.advertise, made.data_path) == ("203.0.113.9:2377", expected)


def test_an_address_that_nat_leads_to_an_unknown_one() -> None:
    with pytest.raises(InvalidParameter, match="multiple addresses"):
        choose("0.0.0.0", "203.0.113.9", "", TWO, OWN, must_advertise=True)


def test_data_path() -> None:
    assert chosen("0.0.0.0", "10.1.0.5").data_path == "", "as managers tell it"
    assert choose("0.0.0.0", "eth0", "eth1", TWO, OWN, must_advertise=True).data_path == "192.168.7.9"
    with pytest.raises(InvalidParameter, match="DataPathAddr 'x'"):
        choose("0.0.0.0", "eth0", "x", TWO, OWN, must_advertise=True)


def test_of_this_host() -> None:
    found = addresses.of_host()
    assert {each.address for each in found} >= set(addresses.outgoing())
    assert ("lo", ipaddress.ip_address("127.0.0.1")) in [each[:2] for each in found]


@given(st.ip_addresses(), st.integers(1, 65535))
def test_split_and_joined(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> None:
    assert split(joined(str(address), port)) == (str(address), port)
    assert split(str(address), port) == (str(address), port)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidParameter):
        made = chosen(text, text)
        assert split(made.listen)[1] > 0
