"""The options of splunk."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameter
from engine.logs.deliveries import Splunk, Tls
from engine.logs.drivers import splunk
from engine.logs.options import Missing, Options

URL = "https://h:8088"
COLLECTOR = f"{URL}/services/collector/event/1.0"
TOKEN = "176FCEBF-4CF5-4EDF-91BC-703796522D20"


def parse(url: str = URL, token: str = TOKEN, **options: str) -> Splunk:
    given = {f"splunk-{name.replace('_', '-')}": value for name, value in options.items()}
    given |= {"splunk-url": url} if url else {}
    given |= {"splunk-token": token} if token else {}
    return splunk.parse(Options("splunk", given, empty=False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://h:8088", COLLECTOR),
        ("https://h:8088/", COLLECTOR),
        ("HTTPS://h:8088", COLLECTOR),
        ("https://h", "https://h/services/collector/event/1.0"),
        ("http://192.0.2.1:1", "http://192.0.2.1:1/services/collector/event/1.0"),
        ("http://[::1]:1", "http://[::1]:1/services/collector/event/1.0"),
    ],
)
def test_urls(text: str, expected: str) -> None:
    found = parse(text)
    assert found.url == found.address == expected
    assert (found.tls is not None) == expected.startswith("https:")


@pytest.mark.parametrize(
    "text", ["h:8088", "ftp://h", "https://", "https://h/path", "https://h?a=b", "https://h#f", "https://u:p@h", "x"]
)
def test_urls_that_are_none(text: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(text)
    assert caught.value.message == (
        f"invalid value '{text}' for log opt 'splunk-url' for splunk log driver: "
        "splunk: expected format scheme://dns_name_or_ip:port for splunk-url"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"source": "s", "sourcetype": "t", "index": "i"}, {"source": "s", "sourcetype": "t", "index": "i"}),
        ({"source": ""}, {}),
        ({"format": "inline"}, {}),
        ({"format": "json"}, {"format": "json"}),
        ({"format": "raw"}, {"format": "raw"}),
        ({"verify_connection": "false"}, {"verify_connection": False}),
        ({"gzip": "true"}, {"gzip": True}),
        ({"gzip": "true", "gzip_level": "0"}, {"gzip": True, "gzip_level": 0}),
        ({"gzip_level": "9"}, {"gzip_level": 9}),
        ({"gzip_level": "-1"}, {}),
        ({"index_acknowledgment": "true"}, {"index_acknowledgment": True}),
        ({"capath": "/ca.pem"}, {"tls": Tls(ca="/ca.pem")}),
        ({"caname": "name"}, {"tls": Tls(server_name="name")}),
        ({"insecureskipverify": "true"}, {"tls": Tls(skip_verify=True)}),
        ({"insecureskipverify": "false"}, {}),
    ],
)
def test_accepted(options: dict[str, str], expected: dict[str, Any]) -> None:
    assert parse(**options) == Splunk(url=COLLECTOR, token=TOKEN, **({"tls": Tls()} | expected))


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"format": "xml"}, "format", "Unknown format specified, supported formats are inline, json and raw"),
        ({"format": ""}, "format", "Unknown format specified"),
        ({"verify_connection": "no"}, "verify-connection", "neither true nor false"),
        ({"insecureskipverify": "2"}, "insecureskipverify", "neither true nor false"),
        ({"gzip": ""}, "gzip", "neither true nor false"),
        ({"gzip_level": "10"}, "gzip-level", "must be from -1 to 9"),
        ({"gzip_level": "-2"}, "gzip-level", "must be from -1 to 9"),
        ({"gzip_level": "best"}, "gzip-level", "not a number"),
        ({"index_acknowledgment": "x"}, "index-acknowledgment", "neither true nor false"),
    ],
)
def test_refused(options: dict[str, str], name: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(**options)
    assert f"for log opt 'splunk-{name}' for splunk log driver: {words}" in caught.value.message
    assert TOKEN not in caught.value.message


def test_required_options() -> None:
    with pytest.raises(Missing, match="splunk: splunk-url is expected"):
        parse("")
    with pytest.raises(Missing, match="splunk: splunk-token is expected"):
        parse(token="")
    with pytest.raises(InvalidParameter, match="gzip-level"):
        parse("", "", gzip_level="x")


def test_the_token_is_not_quoted() -> None:
    for token in ("se cret", "secret\r\nX: y", "sécret"):
        with pytest.raises(InvalidParameter) as caught:
            parse(token=token)
        assert caught.value.message == (
            "invalid value for log opt 'splunk-token' for splunk log driver: must have printable ASCII characters only"
        )


def test_which_containers_can_share_a_connection() -> None:
    same = {"source": "s", "sourcetype": "t", "index": "i", "format": "raw", "verify_connection": "false"}
    assert parse().destination == parse(**same).destination
    others = [
        parse(),
        parse("https://g:8088"),
        parse("http://h:8088"),
        parse(token="other"),
        parse(gzip="true"),
        parse(gzip_level="1"),
        parse(index_acknowledgment="true"),
        parse(capath="/a"),
        parse(caname="a"),
        parse(insecureskipverify="true"),
    ]
    assert len({each.destination for each in others}) == len(others)
