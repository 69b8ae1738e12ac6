"""The strict parser refuses what Go refuses, and nothing else."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine import strict


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        (strict.ADDRESS, ["", None, "10.0.0.1", "::1", "fe80::1"], ["10.0.0.1/8", "10.0.0.01", "fe80::1%eth0", 1]),
        (strict.PREFIX, ["", "10.0.0.1/8", "fd00::/64", "0.0.0.0/0"], ["10.0.0.1", "10.0.0.0/33", "10.0.0.0/08", "/8"]),
        (
            strict.MAC,
            ["", "02:42:ac:11:00:02", "02:42:AC:11:00:02:00:01"],
            ["02-42-ac-11-00-02", "02:42", "0242ac110002"],
        ),
        (
            strict.TIME,
            ["0001-01-01T00:00:00Z", "2024-02-29T23:59:59.123456789Z", "2024-01-01T00:00:00+02:00"],
            ["", "2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01T00:00:00", "2024-01-01T24:00:00Z", 5],
        ),
        (strict.PRINTED_TIME, ["", "2024-01-01T00:00:00Z"], ["now", "2024-01-01"]),
        (strict.PORT, ["80/tcp", "53/udp", "9/sctp", "80", "0"], ["", "tcp", "80/icmp", "65536/tcp", "80-90/tcp"]),
        (strict.HOST_PORT, ["", "80", "8000-8010"], ["any", "80/tcp", 80]),
        (strict.BYTES, ["", None, "EBE="], ["ctrl-p", "EBE"]),
        (strict.INT, [0, -1, None, 1 << 62], ["1", 1.0, True, 1 << 63]),
        (strict.UINT64, [0, (1 << 64) - 1], [-1, 1 << 64]),
        (strict.UINT16, [0, 65535], [65536, -1]),
        (strict.BOOL, [True, None], [0, "true"]),
        (strict.TEXT, ["", None], [0, []]),
        (strict.FLOAT, [0, 1.5, None], ["1", True]),
        (strict.STRINGS, [None, [], ["a"]], ["a", [1], {}]),
        (strict.STRINGS_OR_STRING, [None, "a", ["a"]], [1, [1]]),
        (strict.PAIRS, [[["a", "b"]]], [[["a"]], [["a", "b", "c"]], [["a", 1]]]),
        (strict.LABELS, [None, {}, {"a": "b"}], [[], {"a": 1}]),
        (
            strict.PORT_MAP,
            [{"80/tcp": None}, {"80/tcp": [{"HostIp": "", "HostPort": "1"}]}],
            [{"x": None}, {"80/tcp": 1}],
        ),
        (strict.ENDPOINT, [{}, {"gateway": "", "Unknown": object()}], [{"Gateway": "1.2.3.4/8"}, {"gateway": "x"}, []]),
    ],
)
def test_values(shape: strict.Shape, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert strict.faults(value, shape) == []
    for value in bad:
        assert len(strict.faults(value, shape)) == 1, value


def test_faults_have_their_paths() -> None:
    answer = {
        "State": {"Health": {"Log": [{"Start": ""}]}},
        "NetworkSettings": {"Networks": {"a b": {"IPAddress": "10.0.0.1/8"}}},
    }
    assert strict.faults(answer, strict.INSPECT) == [
        "State.Health.Log[0].Start: not a time: ''",
        "NetworkSettings.Networks.a b.IPAddress: not an address: '10.0.0.1/8'",
    ]


@given(st.ip_addresses(), st.integers(0, 128))
def test_addresses_and_prefixes(address: ipaddress.IPv4Address | ipaddress.IPv6Address, bits: int) -> None:
    text = str(address)
    assert strict.is_address(text) == ("%" not in text)
    assert strict.is_prefix(f"{text}/{bits}") == ("%" not in text and bits <= address.max_prefixlen)
    assert not strict.is_prefix(text) and not strict.is_address(f"{text}/{bits}")


@given(st.datetimes(timezones=st.just(UTC)))
def test_times(moment: datetime) -> None:
    assert strict.is_time(moment.isoformat())
    assert strict.is_time(moment.isoformat().replace("+00:00", "Z"))
    assert not strict.is_time(moment.replace(tzinfo=None).isoformat())


@given(st.text(max_size=30))
def test_any_text(text: str) -> None:
    """The parsers return a boolean for every text."""
    for parse in (
        strict.is_address,
        strict.is_prefix,
        strict.is_hardware_address,
        strict.is_time,
        strict.is_port,
        strict.is_base64,
    ):
        assert parse(text) in (True, False)
