"""The options of fluentd."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameter
from engine.logs.deliveries import Fluentd
from engine.logs.drivers import fluentd
from engine.logs.options import Options


def parse(**options: str) -> Fluentd:
    given = {f"fluentd-{name.replace('_', '-')}": value for name, value in options.items()}
    return fluentd.parse(Options("fluentd", given, empty=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("h", {"host": "h"}),
        ("h:1", {"host": "h", "port": 1}),
        (":1", {"port": 1}),
        ("[::1]:1", {"host": "::1", "port": 1}),
        ("[::1]", {"host": "::1"}),
        ("tcp://", {}),
        ("tcp://h:1", {"host": "h", "port": 1}),
        ("tls://h", {"scheme": "tls", "host": "h"}),
        ("unix:///run/x.sock", {"scheme": "unix", "path": "/run/x.sock", "host": "", "port": 0}),
    ],
)
def test_addresses(text: str, expected: dict[str, Any]) -> None:
    assert parse(address=text) == Fluentd(**expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("corrupted:c", 'invalid port "c"'),
        ("tcp://h:1/path", "should not contain a path element"),
        ("udp://h:1", "unsupported scheme: 'udp'"),
        ("unixgram:///x", "unsupported scheme: 'unixgram'"),
        ("unix://", "path is empty"),
        ("h:99999", 'invalid port "99999"'),
        ("::1", "too many colons"),
        ("a b", 'invalid host "a b"'),
    ],
)
def test_addresses_that_are_none(text: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(address=text)
    assert caught.value.message.startswith(f"invalid fluentd-address {text}: {words}")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"async": "true"}, {"async_": True}),
        ({"async_connect": "1"}, {"async_": True}),
        ({"async": "false"}, {}),
        ({"async": "", "async_connect": "t"}, {"async_": True}),
        ({"async": "1", "async_reconnect_interval": "100ms"}, {"async_": True, "async_reconnect_interval": 0.1}),
        ({"async": "1", "async_reconnect_interval": "10s"}, {"async_": True, "async_reconnect_interval": 10.0}),
        ({"async_reconnect_interval": "10s"}, {}),
        ({"async_reconnect_interval": "0"}, {}),
        ({"buffer_limit": "8m"}, {}),
        ({"buffer_limit": "1024"}, {}),
        ({"buffer_limit": ""}, {}),
        ({"retry_wait": "1500ms"}, {"retry_wait": 1.5}),
        ({"retry_wait": "0"}, {"retry_wait": 0.0}),
        ({"max_retries": "0"}, {}),
        ({"max_retries": "10"}, {}),
        ({"request_ack": "true"}, {"request_ack": True}),
        ({"sub_second_precision": "true"}, {"sub_second": True}),
        ({"write_timeout": "3s"}, {"write_timeout": 3.0}),
        ({"read_timeout": "1m"}, {"read_timeout": 60.0}),
    ],
)
def test_accepted(options: dict[str, str], expected: dict[str, Any]) -> None:
    assert parse(**options) == Fluentd(**expected)


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"async": "x"}, "async", "neither true nor false"),
        ({"async_connect": "x"}, "async-connect", "neither true nor false"),
        ({"request_ack": "yes"}, "request-ack", "neither true nor false"),
        ({"sub_second_precision": "ms"}, "sub-second-precision", "neither true nor false"),
        ({"async_reconnect_interval": "1"}, "async-reconnect-interval", "value must be a duration"),
        ({"async_reconnect_interval": "99ms"}, "async-reconnect-interval", "value must be between 100ms and 10s"),
        ({"async_reconnect_interval": "11s"}, "async-reconnect-interval", "value must be between 100ms and 10s"),
        ({"buffer_limit": "much"}, "buffer-limit", "invalid size: 'much'"),
        ({"buffer_limit": "0"}, "buffer-limit", "must be from 1 to"),
        ({"buffer_limit": "2t"}, "buffer-limit", "must be from 1 to"),
        ({"retry_wait": "5"}, "retry-wait", "value must be a duration"),
        ({"retry_wait": "-5s"}, "retry-wait", "value must be a duration that is non-negative"),
        ({"max_retries": "-1"}, "max-retries", "must be from 0 to 2147483647"),
        ({"max_retries": "2147483648"}, "max-retries", "must be from 0 to 2147483647"),
        ({"max_retries": "many"}, "max-retries", "not a number"),
        ({"write_timeout": "1"}, "write-timeout", "value must be a duration"),
        ({"write_timeout": "-1s"}, "write-timeout", "value must be a duration that is non-negative"),
        ({"read_timeout": "-1"}, "read-timeout", "value must be a duration"),
    ],
)
def test_refused(options: dict[str, str], name: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(**options)
    assert f"for log opt 'fluentd-{name}' for fluentd log driver: {words}" in caught.value.message


def test_both_names_of_async() -> None:
    with pytest.raises(InvalidParameter, match="cannot specify both 'fluentd-async' and 'fluentd-async-connect'"):
        parse(**{"async": "true", "async_connect": "true"})


def test_which_containers_can_share_a_connection() -> None:
    same = {"async": "true", "buffer_limit": "1m", "sub_second_precision": "true"}
    assert parse().destination == parse(**same).destination
    others = [
        parse(),
        parse(address="h"),
        parse(address=":1"),
        parse(address="tls://127.0.0.1"),
        parse(address="unix:///127.0.0.1"),
        parse(request_ack="true"),
        parse(retry_wait="2s"),
        parse(write_timeout="2s"),
        parse(read_timeout="2s"),
        parse(**{"async": "true"}, async_reconnect_interval="2s"),
    ]
    assert len({each.destination for each in others}) == len(others)
