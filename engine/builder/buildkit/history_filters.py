"""Filters of `docker buildx history`: which build records a client asks for. Pure.

Each value is a line of CSV whose conditions all hold; one value of several is enough. Conditions:

    ref, repository, status    ==, !=, ~= (contains); alone: it is given
    startedAt, completedAt     >=, <=, >, < with a time in RFC 3339, or a duration before now
    duration                   the same, with a duration

Source: BuildKit's solver/llbsolver/history. There `~=` takes a regular expression; here it takes
text, because a client's expression could keep the event loop busy for minutes. Clients send text.
Raises: InvalidParameter that names the filter.
"""

from __future__ import annotations

import csv
import operator
import re
from collections.abc import Callable, Sequence

from engine.builder.buildkit.history_messages import BuildHistoryRecord
from engine.common import times
from engine.errors import InvalidParameter, words

Condition = Callable[[BuildHistoryRecord], bool]

LONGEST = 4096
"""Characters of all filters of a request. Each condition is asked of each record, in the event
loop.
"""
SECOND = 1_000_000_000
_TIMES = re.compile(r"(startedAt|completedAt|duration)(>=|<=|>|<)(.*)", re.DOTALL)
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_TEXT = re.compile(r"([A-Za-z.]+)(?:(==|!=|~=)(.+))?", re.DOTALL)
_EXPRESSION = re.compile(r"[*+?()\[\]{}|^$]")


def parse(filters: Sequence[str], now: int) -> Condition:
    """The condition that the values of a request state. `now`: nanoseconds since the epoch."""
    if sum(len(text) + 1 for text in filters) > LONGEST:
        raise InvalidParameter(f"the history filters have more than {LONGEST} characters")
    alternatives = [_all(text, now) for text in filters]
    if not alternatives:
        return lambda _: True
    return lambda record: any(one(record) for one in alternatives)


def _all(text: str, now: int) -> Condition:
    try:
        fields = [field for row in csv.reader([text]) for field in row if field]
    except csv.Error as error:
        raise InvalidParameter(f"invalid history filter {text[:200]!r}: {words(error)}") from None
    conditions = [_condition(field, now) for field in fields]
    return lambda record: all(one(record) for one in conditions)


def _condition(text: str, now: int) -> Condition:
    timed = _TIMES.fullmatch(text)
    if timed is not None:
        return _time(timed[1], timed[2], timed[3], now)
    found = _TEXT.fullmatch(text)
    if found is None:
        raise InvalidParameter(
            f"invalid history filter {text[:200]!r}: it must be KEY==VALUE, KEY!=VALUE or KEY~=VALUE"
        )
    key, comparison, wanted = found[1], found[2], _unquoted(found[3] or "")
    if comparison == "==":
        return lambda record: _value(record, key) == wanted
    if comparison == "!=":
        return lambda record: _value(record, key) != wanted
    if comparison == "~=":
        wanted = wanted.replace("\\.", ".")
        if _EXPRESSION.search(wanted) or "\\" in wanted:
            raise InvalidParameter(f"invalid history filter {text[:200]!r}: regular expressions are not supported")
        return lambda record: wanted in (_value(record, key) or "")
    return lambda record: bool(_value(record, key))


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _time(key: str, comparison: str, text: str, now: int) -> Condition:
    compare = _COMPARE[comparison]
    if key == "duration":
        try:
            limit = times.parse_duration(text)
        except ValueError:
            raise InvalidParameter(f"invalid duration {text[:100]!r}") from None
        return lambda record: compare(_nanoseconds(record, "completed") and _duration(record), limit)
    seconds = _moment(text, now) // SECOND
    field = "created" if key == "startedAt" else "completed"
    return lambda record: compare(_nanoseconds(record, field) // SECOND, seconds)


def _moment(text: str, now: int) -> int:
    try:
        return now - times.parse_duration(text)
    except ValueError:
        pass
    try:
        return times.parse_rfc3339(text)
    except ValueError:
        raise InvalidParameter(f"invalid time {text[:100]!r}") from None


def _nanoseconds(record: BuildHistoryRecord, field: str) -> int:
    """A time of the record; 0 if it has none yet."""
    found = getattr(record, field)
    return found.seconds * SECOND + found.nanoseconds if found is not None else 0


def _duration(record: BuildHistoryRecord) -> int:
    return _nanoseconds(record, "completed") - _nanoseconds(record, "created")


def _value(record: BuildHistoryRecord, key: str) -> str | None:
    if key == "ref":
        return record.ref
    if key == "status":
        return status(record)
    if key == "repository":
        return record.attributes.get("vcs:source") or record.attributes.get("context")
    return None


def status(record: BuildHistoryRecord) -> str:
    """`running`, `completed`, `error` or `canceled`."""
    if record.completed is None:
        return "running"
    if record.error is None:
        return "completed"
    return "canceled" if "context canceled" in record.error.message else "error"
