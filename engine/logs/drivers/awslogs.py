"""The driver awslogs: a stream of Amazon CloudWatch Logs."""

from __future__ import annotations

import re
from typing import Literal

from engine.common import patterns
from engine.errors import InvalidParameter
from engine.logs.deliveries import Awslogs
from engine.logs.options import Missing, Options, address

NAME = "awslogs"
OPTIONS = frozenset((
    "awslogs-region", "awslogs-endpoint", "awslogs-group", "awslogs-stream", "awslogs-create-group",
    "awslogs-create-stream", "awslogs-datetime-format", "awslogs-multiline-pattern", "awslogs-credentials-endpoint",
    "awslogs-force-flush-interval-seconds", "awslogs-max-buffered-events", "awslogs-format",
))  # fmt: skip

EMF: Literal["json/emf"] = "json/emf"

REGION = re.compile(r"[a-z0-9-]*")
"""A region becomes a part of a host's name."""

_DATETIME = "awslogs-datetime-format"
_MULTILINE = "awslogs-multiline-pattern"
_MOST = (1 << 31) - 1
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def _one_of(words: tuple[str, ...], length: int | None = None) -> str:
    return f"(?:{'|'.join(word[:length] for word in words)})"


SEQUENCES = {
    "a": _one_of(_WEEKDAYS, 3),
    "A": _one_of(_WEEKDAYS),
    "w": "[0-6]",
    "d": "(?:0[1-9]|[12][0-9]|3[01])",
    "b": _one_of(_MONTHS, 3),
    "B": _one_of(_MONTHS),
    "m": "(?:0[1-9]|1[0-2])",
    "Y": r"\d{4}",
    "y": r"\d{2}",
    "H": "(?:[01][0-9]|2[0-3])",
    "I": "(?:0[1-9]|1[0-2])",
    "p": "[AP]M",
    "M": "[0-5][0-9]",
    "S": "[0-5][0-9]",
    "f": r"\d{6}",
    "L": r"\.\d{3}",
    "z": r"[+-]\d{4}",
    "Z": "[A-Z]{2,5}",
    "j": "(?:00[1-9]|0[1-9][0-9]|[12][0-9][0-9]|3[0-5][0-9]|36[0-6])",
    "%": "%",
}
"""Expressions for the sequences of `awslogs-datetime-format`. `%L` includes the point."""


def parse(options: Options) -> Awslogs:
    group = options.text("awslogs-group")
    if _DATETIME in options and _MULTILINE in options:
        raise InvalidParameter(f"you cannot configure log opt '{_DATETIME}' and '{_MULTILINE}' at the same time")
    form = options.text("awslogs-format")
    if form not in ("", EMF):
        raise options.invalid("awslogs-format", f"unsupported log format '{form}'")
    if form and (_DATETIME in options or _MULTILINE in options):
        raise InvalidParameter(
            f"you cannot configure log opt '{_DATETIME}' or '{_MULTILINE}' when log opt 'awslogs-format' is set to "
            f"'{EMF}'"
        )
    _positive(options, "awslogs-max-buffered-events", 4096)  # lines wait in the spool instead
    target = Awslogs(
        region=options.text("awslogs-region"),
        group=group,
        stream=options.text("awslogs-stream"),
        create_group=options.boolean("awslogs-create-group", False),
        create_stream=options.boolean("awslogs-create-stream", True),
        multiline=_expression(options) if _DATETIME in options else options.expression(_MULTILINE),
        credentials_endpoint=options.text("awslogs-credentials-endpoint"),
        endpoint=options.text("awslogs-endpoint"),
        flush_interval=_positive(options, "awslogs-force-flush-interval-seconds", 5),
        format=EMF if form else "",
    )
    if not REGION.fullmatch(target.region):
        raise options.invalid("awslogs-region", "not a region")
    if target.credentials_endpoint and not re.fullmatch(r"/[!-~]*", target.credentials_endpoint):
        raise options.invalid("awslogs-credentials-endpoint", "must be a path that begins with /")
    if target.endpoint:
        try:
            address(target.endpoint, ("http", "https"))
        except ValueError as error:
            raise options.invalid("awslogs-endpoint", str(error)) from error
    if not group:
        raise Missing("must specify a value for log opt 'awslogs-group'")
    return target


def _positive(options: Options, name: str, default: int) -> int:
    return options.integer(name, default, 1, _MOST, "must specify a positive integer")


def _expression(options: Options) -> str:
    """`awslogs-datetime-format` as an expression. Its text between the sequences is one already."""

    def one(match: re.Match[str]) -> str:
        if match[1] not in SEQUENCES:
            raise options.invalid(_DATETIME, f"unsupported sequence '{match[0]}'")
        return SEQUENCES[match[1]]

    text = re.sub(r"%(.)", one, options.text(_DATETIME), flags=re.DOTALL)
    try:
        patterns.compiled(text)
    except ValueError as error:
        raise options.invalid(_DATETIME, f"error parsing regexp: {error}") from error
    return text
