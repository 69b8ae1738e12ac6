"""Points in time as clients read and write them.

Inside the engine a time is an int: nanoseconds since the epoch. 0 means never.
"""

from __future__ import annotations

import calendar
import datetime
import re
import time

ZERO = "0001-01-01T00:00:00Z"
"""Go's zero time, which means never on the wire."""

_SECOND = 1_000_000_000
_UNITS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "μs": 1_000,
    "ms": 1_000_000,
    "s": _SECOND,
    "m": 60 * _SECOND,
    "h": 3600 * _SECOND,
}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_SECONDS = re.compile(r"(-?)(\d{1,18})(?:\.(\d{1,9})\d*)?", re.ASCII)
_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[Tt ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9})\d*)?)?)?(?:([Zz])|([+-])(\d\d):(\d\d))?",
    re.ASCII,
)


_STRICT = re.compile(r"[-\d]{10}T[:\d]{8}(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)", re.ASCII)


_utc = datetime.datetime.fromtimestamp


def rfc3339(ns: int) -> str:
    """RFC 3339 in UTC, as Go's RFC3339Nano writes it. 0 becomes Go's zero time."""
    return ZERO if ns == 0 else rfc3339_of_file(ns)


def rfc3339_of_file(ns: int) -> str:
    """As `rfc3339`, for the times of files, where 0 is 1970."""
    seconds, fraction = divmod(ns, _SECOND)
    try:
        text = _utc(seconds, datetime.UTC).isoformat()[:19]
    except (ValueError, OverflowError):  # beyond the year 9999
        year, month, day, hour, minute, second, *_ = time.gmtime(seconds)
        text = f"{year:04d}-{month:02d}-{day:02d}T{hour:02d}:{minute:02d}:{second:02d}"
    return f"{text}.{fraction:09d}".rstrip("0") + "Z" if fraction else text + "Z"


def unix_seconds(ns: int) -> int:
    """Unix seconds, for the integer timestamps of lists and image records."""
    return ns // _SECOND


def parse_rfc3339(text: str) -> int:
    """Parse a date, or date and time, with or without seconds, fraction and zone. Without a zone it
    is the host's local time. Raises ValueError.
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(f"not an RFC 3339 time: {text}")
    year, month, day, hour, minute, second, fraction, utc, sign, zone_hours, zone_minutes = match.groups()
    stamp = datetime.datetime(
        int(year), int(month), int(day), int(hour or 0), int(minute or 0), min(int(second or 0), 59)
    )
    if int(second or 0) > 60:
        raise ValueError(f"not an RFC 3339 time: {text}")
    if utc or sign:
        seconds = calendar.timegm(stamp.timetuple())
        if sign:
            offset = int(zone_hours) * 3600 + int(zone_minutes) * 60
            seconds -= offset if sign == "+" else -offset
    else:
        seconds = int(stamp.timestamp()) if stamp.year > 1 else calendar.timegm(stamp.timetuple())
    if second == "60":  # a leap second is taken as the next second, because Unix time has none
        seconds += 1
    if stamp.year == 1 and seconds <= calendar.timegm((1, 1, 1, 0, 0, 0)):
        return 0
    return seconds * _SECOND + int((fraction or "").ljust(9, "0"))


def is_rfc3339(text: str) -> bool:
    """True for a date and time with seconds and zone, as Go reads one in JSON."""
    try:
        parse_rfc3339(text)
    except ValueError:
        return False
    return _STRICT.fullmatch(text) is not None


def parse_duration(text: str) -> int:
    """Go's duration (`1h30m`, `10m`, `1.5s`, `-2s`) in nanoseconds. Raises ValueError."""
    body = text[1:] if text[:1] in ("-", "+") else text
    if body == "0":
        return 0
    total, end = 0, 0
    for part in _DURATION_PART.finditer(body):
        if part.start() != end:
            break
        whole, _, fraction = part[1].partition(".")
        unit = _UNITS[part[2]]
        total += int(whole or 0) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)
        end = part.end()
    if not body or end != len(body):
        raise ValueError(f"not a duration: {text}")
    return -total if text[0] == "-" else total


def parse_timestamp(text: str, now_ns: int) -> int:
    """Parse a value of `since` or `until`: Unix seconds with a fraction, RFC 3339, or a duration
    before `now_ns`. Raises ValueError.
    """
    match = _SECONDS.fullmatch(text)
    if match is not None:
        sign, seconds, fraction = match.groups()
        ns = int(seconds) * _SECOND + int((fraction or "").ljust(9, "0"))
        return -ns if sign else ns
    if len(text) >= 10 and text[4:5] == "-":
        return parse_rfc3339(text)
    return now_ns - parse_duration(text)
