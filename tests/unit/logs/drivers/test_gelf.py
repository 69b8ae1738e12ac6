"""The options of gelf."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameter
from engine.logs.deliveries import Gelf
from engine.logs.drivers import gelf
from engine.logs.options import Missing, Options

UDP, TCP = "udp://192.0.2.1:12201", "tcp://h:12201"


def parse(address: str = UDP, **options: str) -> Gelf:
    given = {"gelf-address": address} if address else {}
    given |= {f"gelf-{name.replace('_', '-')}": value for name, value in options.items()}
    return gelf.parse(Options("gelf", given, empty=False))


@pytest.mark.parametrize(
    ("address", "options", "expected"),
    [
        (UDP, {}, Gelf("udp", "192.0.2.1", 12201)),
        (TCP, {}, Gelf("tcp", "h", 12201)),
        ("udp://[::1]:1", {}, Gelf("udp", "::1", 1)),
        ("udp://:1", {}, Gelf("udp", "127.0.0.1", 1)),
        ("udp://h:1/", {}, Gelf("udp", "h", 1)),
        (UDP, {"compression_type": "gzip"}, Gelf("udp", "192.0.2.1", 12201)),
        (UDP, {"compression_type": "zlib"}, Gelf("udp", "192.0.2.1", 12201, "zlib")),
        (UDP, {"compression_type": "none"}, Gelf("udp", "192.0.2.1", 12201, "none")),
        (UDP, {"compression_level": "-1"}, Gelf("udp", "192.0.2.1", 12201, level=-1)),
        (UDP, {"compression_level": "9"}, Gelf("udp", "192.0.2.1", 12201, level=9)),
        (TCP, {"tcp_max_reconnect": "0"}, Gelf("tcp", "h", 12201)),
        (TCP, {"tcp_reconnect_delay": "60"}, Gelf("tcp", "h", 12201, reconnect_delay=60)),
    ],
)
def test_accepted(address: str, options: dict[str, str], expected: Gelf) -> None:
    assert parse(address, **options) == expected


@pytest.mark.parametrize(
    ("address", "options", "name", "words"),
    [
        ("http://h:1", {}, "address", "gelf: endpoint needs to be TCP or UDP"),
        ("h:1", {}, "address", "gelf: endpoint needs to be TCP or UDP"),
        ("udp://h", {}, "address", "gelf: please provide gelf-address as proto://host:port"),
        ("udp://h:x", {}, "address", "invalid port"),
        ("udp://h:1/x", {}, "address", "should not contain a path element"),
        (UDP, {"compression_type": "bzip2"}, "compression-type", "must be gzip, zlib or none"),
        (UDP, {"compression_type": ""}, "compression-type", "must be gzip, zlib or none"),
        (UDP, {"compression_level": "10"}, "compression-level", "must be from -1 to 9"),
        (UDP, {"compression_level": "-2"}, "compression-level", "must be from -1 to 9"),
        (UDP, {"compression_level": "fast"}, "compression-level", "not a number"),
        (TCP, {"compression_type": "none"}, "compression-type", "compression is only supported on UDP"),
        (TCP, {"compression_level": "1"}, "compression-level", "compression is only supported on UDP"),
        (UDP, {"tcp_max_reconnect": "1"}, "tcp-max-reconnect", '"gelf-tcp-max-reconnect" is only valid for TCP'),
        (UDP, {"tcp_reconnect_delay": "1"}, "tcp-reconnect-delay", '"gelf-tcp-reconnect-delay" is only valid for TCP'),
        (TCP, {"tcp_max_reconnect": "-1"}, "tcp-max-reconnect", "must be from 0 to 2147483647"),
        (TCP, {"tcp_reconnect_delay": "1s"}, "tcp-reconnect-delay", "not a number"),
    ],
)
def test_refused(address: str, options: dict[str, str], name: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(address, **options)
    assert f"for log opt 'gelf-{name}' for gelf log driver: {words}" in caught.value.message


def test_the_address_is_required() -> None:
    for options in ({}, {"compression_level": "3"}):
        with pytest.raises(Missing, match="gelf-address is a required parameter"):
            parse("", **options)
    with pytest.raises(InvalidParameter, match="compression-level"):
        parse("", compression_level="x")


def test_which_containers_can_share_a_connection() -> None:
    assert parse().destination == parse(compression_type="none", compression_level="3").destination
    others: list[Any] = [
        parse(),
        parse(TCP),
        parse("udp://192.0.2.1:1"),
        parse("udp://192.0.2.2:12201"),
        parse(TCP, tcp_reconnect_delay="9"),
    ]
    assert len({each.destination for each in others}) == len(others)
