"""Values of log options: sizes, numbers, durations, expressions and addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.logs.options import BIGGEST, Address, BadScheme, Options, address, size


@pytest.mark.parametrize(
    ("text", "decimal", "binary"),
    [
        ("200", 200, 200),
        ("7b", 7, 7),
        ("10m", 10_000_000, 10 << 20),
        ("10M", 10_000_000, 10 << 20),
        ("10mb", 10_000_000, 10 << 20),
        ("10 MiB", 10_000_000, 10 << 20),
        ("1.5k", 1500, 1536),
        ("0.1", 0, 0),
        ("0k", 0, 0),
        ("1g", 10**9, 1 << 30),
        ("2t", 2 * 10**12, 2 << 40),
        ("1p", 10**15, 1 << 50),
    ],
)
def test_sizes(text: str, decimal: int, binary: int) -> None:
    assert (size(text), size(text, binary=True)) == (decimal, binary)


@pytest.mark.parametrize(
    "text", ["", "m", "-1", "+1", "10x", "10 m b", "1e3", " 10m", "10m\n", "1..5m", "1.5.5", "٣m", "0x1", "9" * 31]
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="invalid size: '"):
        size(text)


def test_sizes_that_are_too_large() -> None:
    for text in ("9" * 30, "99999999p"):
        with pytest.raises(ValueError, match="too large"):
            size(text)
    assert size("4611686018427387000") <= BIGGEST


@given(st.text(max_size=12) | st.from_regex(r"\d{1,5}(\.\d)? ?[kmg]?i?b?", fullmatch=True))
def test_any_size_is_a_number_or_refused(text: str) -> None:
    try:
        assert 0 <= size(text) <= BIGGEST
    except ValueError as error:
        assert "size" in str(error)


def options(value: str, *, empty: bool = False) -> Options:
    return Options("x", {"name": value}, empty=empty)


def test_values_that_are_not_given() -> None:
    for given_ in (Options("x", {}, empty=False), options("", empty=True)):
        assert "name" not in given_
        assert given_.text("name", "t") == "t"
        assert given_.boolean("name", True) is True
        assert given_.integer("name", 7, 0, 1) == 7
        assert given_.size("name", 8) == 8
        assert given_.seconds("name", 9.0) == 9.0
        assert given_.expression("name") == ""
    assert "name" in options("")


def test_booleans_are_those_of_go() -> None:
    for text in ("1", "t", "T", "TRUE", "true", "True"):
        assert options(text).boolean("name", False) is True
    for text in ("0", "f", "F", "FALSE", "false", "False"):
        assert options(text).boolean("name", True) is False
    for text in ("yes", "tRUE", "", " true", "2"):
        with pytest.raises(InvalidParameter) as caught:
            options(text).boolean("name", True)
        assert caught.value.message == f"invalid value '{text}' for log opt 'name' for x log driver: " + (
            "neither true nor false"
        )


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("+3", 3), ("-2", -2), ("007", 7), ("9", 9)])
def test_integers(text: str, number: int) -> None:
    assert options(text).integer("name", 1, -2, 9) == number


@pytest.mark.parametrize("text", ["", "three", "1.5", "3 ", "٣", "1_0", "0x1", "--1", "9" * 40])
def test_integers_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match="'name' for x log driver: not a number"):
        options(text).integer("name", 1, -BIGGEST, BIGGEST)
    with pytest.raises(InvalidParameter, match="'name' for x log driver: because"):
        options(text).integer("name", 1, -BIGGEST, BIGGEST, "because")


def test_integers_out_of_range() -> None:
    with pytest.raises(InvalidParameter, match="must be from 0 to 9"):
        options("10").integer("name", 1, 0, 9)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("1s", 1), ("1m30s", 90), ("100ms", 0.1), ("1.5h", 5400), ("10us", 0.00001)]
)
def test_durations(text: str, seconds: float) -> None:
    assert options(text).seconds("name", 1.0) == pytest.approx(seconds)


def test_durations_that_are_none() -> None:
    for text in ("", "1", "-1", "x", "1 s", "s", "9999999h", "9" * 400 + "s", "9" * 9000 + "s"):
        with pytest.raises(InvalidParameter, match="'name' for x log driver: value must be a duration"):
            options(text).seconds("name", 1.0)
    with pytest.raises(InvalidParameter, match="non-negative"):
        options("-1s").seconds("name", 1.0)


@pytest.mark.parametrize(
    "text", ["(", ")", "[a", "a**", r"(a)\1", "(?=a)", "(?!a)", "(?<=a)", "x{1001}", "*", "[z-a]", "\\"]
)
def test_expressions_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter, match="'name' for x log driver: error parsing regexp: "):
        options(text).expression("name")


@pytest.mark.parametrize("text", ["", "^a.*$", r"\pL+", "(?P<n>a)", "(?i)x", "[[:alpha:]]", r"\d{4}", "(a+)+$"])
def test_expressions(text: str) -> None:
    assert options(text).expression("name") == text


@given(st.text(alphabet="ab()[]{}*+?|\\^$.-,1:=!<P", max_size=20))
def test_any_expression_is_taken_or_refused(text: str) -> None:
    try:
        assert options(text).expression("name") == text
    except InvalidParameter as error:
        assert "error parsing regexp" in error.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://host", Address("tcp", "host")),
        ("tcp://host/", Address("tcp", "host")),
        ("TCP://host:1", Address("tcp", "host", 1)),
        ("udp://192.0.2.1:65535", Address("udp", "192.0.2.1", 65535)),
        ("udp://[2001:db8::1]:514", Address("udp", "2001:db8::1", 514)),
        ("udp://[::1]", Address("udp", "::1")),
        ("udp://[fe80::1%25eth0]:1", Address("udp", "fe80::1%eth0", 1)),
        ("tcp://:7", Address("tcp", "", 7)),
        ("tcp://", Address("tcp")),
        ("tcp://a_b.example.:7", Address("tcp", "a_b.example.", 7)),
        ("unix:///a/b c", Address("unix", path="/a/b c")),
        ("unix:///a%20b", Address("unix", path="/a b")),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert address(text, ("tcp", "udp"), ("unix",)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "should be in form proto://address"),
        ("host", "should be in form proto://address"),
        ("host:514", "should be in form proto://address"),
        ("//host:514", "should be in form proto://address"),
        ("://host", "should be in form proto://address"),
        ("1tcp://host", "should be in form proto://address"),
        ("tcp:/host", "should be in form proto://address"),
        ("http://host", "unsupported scheme: 'http'"),
        ("unixgram:///a", "unsupported scheme: 'unixgram'"),
        ("tcp://host:c", 'invalid port "c"'),
        ("tcp://host:", 'invalid port ""'),
        ("tcp://host:0", 'invalid port "0"'),
        ("tcp://host:65536", 'invalid port "65536"'),
        ("tcp://host:-1", 'invalid port "-1"'),
        ("tcp://host:٣", 'invalid port "٣"'),
        ("tcp://host:1:2", "too many colons"),
        ("tcp://::1:514", "too many colons"),
        ("tcp://host:1/path", "should not contain a path element"),
        ("tcp://a b:1", 'invalid host "a b"'),
        ("tcp://a\n:1", 'invalid host "a'),
        ("tcp://u@host:1", 'invalid host "u@host"'),
        ("tcp://host?x=1", 'invalid host "host?x=1"'),
        ("tcp://[host]:1", 'invalid host "[host]"'),
        ("tcp://[127.0.0.1]:1", 'invalid host "[127.0.0.1]"'),
        ("tcp://[]:1", 'invalid host "[]"'),
        ("tcp://[::1]x:1", "too many colons"),
        ("tcp://[::1", "too many colons"),
        ("tcp://[x]]:1", 'invalid host "[x]]"'),
        ("unix://", "path is empty"),
        ("unix:///", "path is empty"),
        ("unix://relative", "absolute path of at most 107 bytes"),
        ("unix:///" + "x" * 107, "absolute path of at most 107 bytes"),
        ("unix:///a%00", "absolute path of at most 107 bytes"),
    ],
)
def test_addresses_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        address(text, ("tcp", "udp"), ("unix",))
    assert words in str(caught.value)
    assert isinstance(caught.value, BadScheme) == ("proto://" in words or "scheme" in words)


@given(st.text(max_size=20) | st.text(alphabet="tcp:/[]host0123456789%. ", max_size=20).map("tcp://".__add__))
def test_any_address_is_complete_or_refused(text: str) -> None:
    try:
        found = address(text, ("tcp", "udp"), ("unix",))
    except ValueError as error:
        assert str(error)
    else:
        assert 0 <= found.port < 65536 and not (set(found.host) & set(" /[]\n"))


def test_unknown_names_and_long_values_are_shortened() -> None:
    with pytest.raises(InvalidParameter) as caught:
        Options("x", {"n" * 1000: ""}, empty=False).only(("a",))
    assert caught.value.message == f"unknown log opt '{'n' * 200}' for x log driver"
    assert len(options("v" * 1000).invalid("name", "why").message) < 300


def test_secrets_are_not_quoted() -> None:
    found = Options("splunk", {"splunk-token": "secret"}, empty=False).invalid("splunk-token", "why")
    assert found.message == "invalid value for log opt 'splunk-token' for splunk log driver: why"
