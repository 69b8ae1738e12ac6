"""Parses signals as clients write them: a number, `SIGINT`, `INT`, `SIGRTMIN+3`."""

from __future__ import annotations

import re
import signal

from engine.errors import InvalidParameter

_REAL_TIME = re.compile(r"RT(MIN|MAX)([+-]\d{1,2})?")


def signal_number(text: str) -> int:
    """The number of a signal on this host (signal(7)).

    Raises InvalidParameter with the text in it.
    """
    name = text.upper().removeprefix("SIG")
    if text.isascii() and text.isdigit():  # only without SIG: `SIG42` is not a name
        number = int(text[:4])
    elif match := _REAL_TIME.fullmatch(name):
        number = (signal.SIGRTMIN if match[1] == "MIN" else signal.SIGRTMAX) + int(match[2] or 0)
    else:
        number = getattr(signal, f"SIG{name}", 0) if name.isalnum() else 0
    if not 1 <= number <= signal.SIGRTMAX:
        raise InvalidParameter(f"Invalid signal: {text}")
    return int(number)
