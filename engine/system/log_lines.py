"""The lines that the engine's processes log to standard error, as text or as JSON.

The daemon chooses the form (`log-format`), and the processes that it starts inherit it by a
variable. This module does not load `logging`, which the monitor does without; `log_format.py` has
the part that does.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

VARIABLE = "ENGINED_LOG_FORMAT"
TEXT, JSON = "text", "json"


def choose(form: str) -> None:
    """Choose the form for this process, and for those that it starts."""
    os.environ[VARIABLE] = form


def is_json() -> bool:
    return os.environ.get(VARIABLE) == JSON


def json_line(level: str, text: str, time_ns: int, **fields: str) -> str:
    """One line as dockerd writes it: level, msg and time (RFC 3339, UTC, nine digits)."""
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    moment = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanoseconds:09}Z"
    document = {"level": level, "msg": text, "time": moment, **fields}
    # Paths of the host may have bytes that are not UTF-8.
    found = {name: value.encode(errors="backslashreplace").decode() for name, value in document.items()}
    return msgspec.json.encode(found).decode()


def say(text: str, level: str = "warning", prefix: str = "") -> None:
    """Log one line without `logging`. `prefix`: who says it, in front of a text."""
    line = json_line(level, text, time.time_ns()) if is_json() else f"{prefix}{text}"
    print(line, file=sys.stderr, flush=True)


__all__ = ["JSON", "TEXT", "choose", "is_json", "json_line", "say"]
