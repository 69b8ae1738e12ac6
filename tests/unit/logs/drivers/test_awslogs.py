"""The options of awslogs."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from engine.common import patterns
from engine.errors import InvalidParameter
from engine.logs.deliveries import Awslogs
from engine.logs.drivers import awslogs
from engine.logs.options import Missing, Options


def parse(group: str = "g", **options: str) -> Awslogs:
    given = {f"awslogs-{name.replace('_', '-')}": value for name, value in options.items()}
    given |= {"awslogs-group": group} if group else {}
    return awslogs.parse(Options("awslogs", given, empty=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"region": "eu-west-1"}, {"region": "eu-west-1"}),
        ({"stream": "s"}, {"stream": "s"}),
        ({"create_group": "true"}, {"create_group": True}),
        ({"create_group": ""}, {}),
        ({"create_stream": "false"}, {"create_stream": False}),
        ({"multiline_pattern": "^INFO"}, {"multiline": "^INFO"}),
        ({"credentials_endpoint": "/creds?x=1"}, {"credentials_endpoint": "/creds?x=1"}),
        ({"endpoint": "http://h:5000"}, {"endpoint": "http://h:5000"}),
        ({"endpoint": "https://logs.example"}, {"endpoint": "https://logs.example"}),
        ({"force_flush_interval_seconds": "30"}, {"flush_interval": 30}),
        ({"max_buffered_events": "100"}, {}),
        ({"format": "json/emf"}, {"format": "json/emf"}),
        ({"datetime_format": "%Y"}, {"multiline": r"\d{4}"}),
    ],
)
def test_accepted(options: dict[str, str], expected: dict[str, Any]) -> None:
    assert parse(**options) == Awslogs(**({"region": "", "group": "g", "stream": ""} | expected))


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({"region": "EU west"}, "region", "not a region"),
        ({"region": "x.evil.example/"}, "region", "not a region"),
        ({"create_group": "x"}, "create-group", "neither true nor false"),
        ({"create_stream": "x"}, "create-stream", "neither true nor false"),
        ({"multiline_pattern": "("}, "multiline-pattern", "error parsing regexp: missing ): ("),
        ({"multiline_pattern": "(?=x)"}, "multiline-pattern", "error parsing regexp"),
        ({"datetime_format": "%Y("}, "datetime-format", "error parsing regexp"),
        ({"datetime_format": "%Y %e"}, "datetime-format", "unsupported sequence '%e'"),
        ({"credentials_endpoint": "creds"}, "credentials-endpoint", "must be a path that begins with /"),
        ({"credentials_endpoint": "@evil.example/"}, "credentials-endpoint", "must be a path that begins with /"),
        ({"endpoint": "h:5000"}, "endpoint", "should be in form proto://address"),
        ({"endpoint": "ftp://h"}, "endpoint", "unsupported scheme"),
        ({"force_flush_interval_seconds": "0"}, "force-flush-interval-seconds", "must specify a positive integer"),
        ({"force_flush_interval_seconds": "-1"}, "force-flush-interval-seconds", "must specify a positive integer"),
        ({"force_flush_interval_seconds": "a"}, "force-flush-interval-seconds", "must specify a positive integer"),
        ({"max_buffered_events": "0"}, "max-buffered-events", "must specify a positive integer"),
        ({"max_buffered_events": "a"}, "max-buffered-events", "must specify a positive integer"),
        ({"format": "json"}, "format", "unsupported log format 'json'"),
    ],
)
def test_refused(options: dict[str, str], name: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(**options)
    assert f"for log opt 'awslogs-{name}' for awslogs log driver: {words}" in caught.value.message


def test_exclusive_options() -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse(datetime_format="%Y", multiline_pattern="x")
    assert caught.value.message == (
        "you cannot configure log opt 'awslogs-datetime-format' and 'awslogs-multiline-pattern' at the same time"
    )
    for name in ("datetime_format", "multiline_pattern"):
        with pytest.raises(InvalidParameter) as caught:
            parse(format="json/emf", **{name: "x"})
        assert caught.value.message == (
            "you cannot configure log opt 'awslogs-datetime-format' or 'awslogs-multiline-pattern' when log opt "
            "'awslogs-format' is set to 'json/emf'"
        )


def test_the_group_is_required() -> None:
    with pytest.raises(Missing, match="must specify a value for log opt 'awslogs-group'"):
        parse("", region="eu-west-1")
    with pytest.raises(InvalidParameter, match="create-group"):
        parse("", create_group="x")


def expression(form: str) -> Any:
    return patterns.compiled(parse(datetime_format=form).multiline)


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("%Y-%m-%d", "2024-12-31 text"),
        (r"\[%b %d, %Y %H:%M:%S\]", "[May 01, 2017 19:00:01] A message was logged"),
        ("%A %B %d %I:%M %p", "Wednesday February 29 11:59 PM"),
        ("%a %w %y", "Thu 4 24"),
        ("%H:%M:%S%L", "23:59:59.123"),
        ("%S.%f", "59.123456"),
        ("%z", "+0100"),
        ("%Z", "UTC"),
        ("%Z", "PST"),
        ("%Z", "CEST"),
        ("100%%", "100%"),
        ("%", "a % b"),
        ("no sequence", "no sequence"),
    ],
)
def test_datetime_formats(form: str, line: str) -> None:
    found = expression(form)
    assert found.search(line) and found.search(f"2024 before {line}")
    assert not found.search("another line")


def test_every_day_of_a_year() -> None:
    days, dates, hours = expression("^%j$"), expression("^%d %m %b %B %a %A$"), expression("^%H %I %p$")
    for number in range(366):
        day = datetime.date(2024, 1, 1) + datetime.timedelta(number)
        assert days.search(day.strftime("%j"))
        assert dates.search(day.strftime("%d %m %b %B %a %A"))
    for hour in range(24):
        assert hours.search(datetime.time(hour).strftime("%H %I %p"))
    for text in ("000", "367", "400", "1"):
        assert not days.search(text)


def test_each_sequence_is_one_expression() -> None:
    for name, text in awslogs.SEQUENCES.items():
        assert patterns.compiled(f"^{text}$") and expression(f"%{name}")


def test_which_containers_can_share_a_client() -> None:
    one = parse(region="eu-west-1")
    assert one.destination == parse("other", region="eu-west-1", stream="s", create_group="true").destination
    assert one.address == "logs.eu-west-1.amazonaws.com"
    others = [
        one,
        parse(),
        parse(region="eu-west-2"),
        parse(region="eu-west-1", endpoint="http://h"),
        parse(region="eu-west-1", credentials_endpoint="/x"),
        parse(region="eu-west-1", format="json/emf"),
    ]
    assert len({each.destination for each in others}) == len(others)
