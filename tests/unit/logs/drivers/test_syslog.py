"""The options of syslog."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameter
from engine.logs.deliveries import Syslog, Tls
from engine.logs.drivers import syslog
from engine.logs.options import Options


def parse(**options: str) -> Syslog:
    return syslog.parse(Options("syslog", {k.replace("_", "-"): v for k, v in options.items()}, empty=False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"scheme": ""}),
        ("udp://192.0.2.1:5000", {"scheme": "udp", "host": "192.0.2.1", "port": 5000}),
        ("udp://logs.example", {"scheme": "udp", "host": "logs.example", "port": 514}),
        ("tcp://[2001:db8::1]:601", {"scheme": "tcp", "host": "2001:db8::1", "port": 601}),
        ("tcp://:601", {"scheme": "tcp", "host": "127.0.0.1", "port": 601}),
        ("tcp+tls://h:6514", {"scheme": "tcp+tls", "host": "h", "port": 6514, "tls": Tls()}),
        ("unix:///dev/log", {"scheme": "unix", "path": "/dev/log", "port": 0}),
        ("unixgram:///run/x", {"scheme": "unixgram", "path": "/run/x", "port": 0}),
    ],
)
def test_addresses(text: str, expected: dict[str, Any]) -> None:
    for name in ("syslog_address", "address"):
        assert parse(**{name: text}) == Syslog(**expected)


def test_both_names_of_the_address() -> None:
    assert parse(syslog_address="tcp://a", address="tcp://a").host == "a"
    assert parse(syslog_address="", address="tcp://a").host == "a"
    with pytest.raises(InvalidParameter, match="'address' for syslog log driver: conflicting options"):
        parse(syslog_address="tcp://a", address="tcp://b")


@pytest.mark.parametrize("text", ["corrupted:42", "host", "http://h:1", "tls://h:1", "tcp:h", "ftp://", "//h"])
def test_addresses_without_a_scheme(text: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(syslog_address=text)
    assert caught.value.message == f"syslog-address should be in form proto://address, got {text}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://h:x", 'invalid port "x"'),
        ("udp://h:70000", 'invalid port "70000"'),
        ("tcp://a b", 'invalid host "a b"'),
        ("tcp://h:1/path", "should not contain a path element"),
        ("unix://", "path is empty"),
        ("unixgram://relative", "absolute path"),
    ],
)
def test_addresses_that_are_none(text: str, words: str) -> None:
    for name in ("syslog-address", "address"):
        with pytest.raises(InvalidParameter) as caught:
            parse(**{name: text})
        assert caught.value.message == (
            f"invalid value '{text}' for log opt '{name}' for syslog log driver: "
            + caught.value.message.rpartition("driver: ")[2]
        )
        assert words in caught.value.message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((name, code) for code, name in enumerate(
            ("kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv", "ftp")
        )),
        *((f"local{number}", 16 + number) for number in range(8)),
        *((str(number), number) for number in range(24)),
        ("", 3), ("+5", 5), ("007", 7),
    ],
)  # fmt: skip
def test_facilities(text: str, code: int) -> None:
    assert parse(syslog_facility=text).facility == code


@pytest.mark.parametrize("text", ["24", "-1", "local8", "DAEMON", "security", "1.5", " 3"])
def test_facilities_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(syslog_facility=text)
    assert caught.value.message == (
        f"invalid value '{text}' for log opt 'syslog-facility' for syslog log driver: invalid syslog facility"
    )


def test_formats() -> None:
    forms = {"": "unix", "rfc3164": "rfc3164", "rfc5424": "rfc5424", "rfc5424micro": "rfc5424micro"}
    assert {text: parse(syslog_format=text).format for text in forms} == forms
    for text in ("unix", "RFC5424", "rfc5425"):
        with pytest.raises(InvalidParameter, match="'syslog-format' for syslog log driver: Invalid syslog format"):
            parse(syslog_format=text)


def test_tls() -> None:
    paths = {"syslog_tls_ca_cert": "/ca", "syslog_tls_cert": "/cert", "syslog_tls_key": "/key"}
    assert parse(syslog_address="tcp+tls://h", **paths).tls == Tls("/ca", "/cert", "/key")
    assert parse(syslog_address="tcp+tls://h", syslog_tls_skip_verify="false").tls == Tls(skip_verify=True)
    assert parse(syslog_address="tcp://h", **paths).tls is None


def test_messages_are_framed_by_their_length_for_rfc5424_over_tls_alone() -> None:
    found = {
        (scheme, form): parse(syslog_address=f"{scheme}://h", syslog_format=form).octet_counted
        for scheme in ("tcp", "udp", "tcp+tls")
        for form in ("", "rfc3164", "rfc5424", "rfc5424micro")
    }
    assert {case for case, counted in found.items() if counted} == {("tcp+tls", "rfc5424"), ("tcp+tls", "rfc5424micro")}


def test_which_containers_can_share_a_connection() -> None:
    one = parse(syslog_address="tcp://h", syslog_facility="mail")
    assert one.destination == parse(syslog_address="tcp://h:514", syslog_format="rfc5424").destination
    assert one.address == "tcp://h:514"
    assert parse().destination == parse(syslog_facility="3").destination and parse().address == "local"
    others = [
        parse(),
        one,
        parse(syslog_address="udp://h"),
        parse(syslog_address="tcp://h:515"),
        parse(syslog_address="tcp://g"),
        parse(syslog_address="unix:///h"),
        parse(syslog_address="unixgram:///h"),
        parse(syslog_address="tcp+tls://h"),
        parse(syslog_address="tcp+tls://h", syslog_format="rfc5424"),
        parse(syslog_address="tcp+tls://h", syslog_tls_ca_cert="/a"),
        parse(syslog_address="tcp+tls://h", syslog_tls_skip_verify=""),
    ]
    assert len({each.destination for each in others}) == len(others)
