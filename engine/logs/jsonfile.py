"""The options of the json-file driver: the size limits of a log, and the labels and variables in
its entries.

Rules are those of Docker's driver: sizes are decimal (`10m` is 10,000,000 bytes), `max-file` has no
effect without `max-size`, unknown options are refused. Not here: the file's format and its rotation
(`_fast/logwriter`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.errors import InvalidParameter

NAME = "json-file"

ATTRIBUTES_MAX = 32 << 10
FILES_MAX = 1000
"""Largest `max-file`. It is limited because a reader holds every file of a log open. Docker has no
limit."""

_OPTIONS = frozenset(("max-size", "max-file", "compress", "labels", "env", "tag"))
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKmMgGtTpP])?[iI]?[bB]?", re.ASCII)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))


class Rotation(NamedTuple):
    """Size in bytes at which the log rotates (0: never), number of files kept."""

    max_size: int
    max_file: int


def rotation(options: Mapping[str, str]) -> Rotation:
    """The parsed options. Raises InvalidParameter for an option or a value that the driver does not
    have."""
    for name in options:
        if name not in _OPTIONS:
            raise InvalidParameter(f"unknown log opt '{name}' for {NAME} log driver")
    max_size, max_file = 0, 1
    if "max-size" in options:
        max_size = _size(options["max-size"])
        if max_size <= 0:
            raise InvalidParameter("log opt max-size: must be a positive number")
    if "max-file" in options:
        text = options["max-file"]
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise InvalidParameter(f"log opt max-file: {text!r} is not a number")
        max_file = int(text)
        if max_file < 1:
            raise InvalidParameter("log opt max-file: cannot be less than 1")
        if max_file > FILES_MAX:
            raise InvalidParameter(f"log opt max-file: cannot be more than {FILES_MAX}")
    if "compress" in options:
        text = options["compress"]
        if text in _TRUE:
            raise InvalidParameter("log opt compress: compression of rotated logs is not supported")
        if text not in _FALSE:
            raise InvalidParameter(f"log opt compress: {text!r} is neither true nor false")
    return Rotation(max_size, max_file)


def attributes(options: Mapping[str, str], labels: Mapping[str, str], environment: Sequence[str]) -> dict[str, str]:
    """The container's labels and variables (`NAME=value`) that the options `labels` and `env` name;
    a variable overrides a label."""
    chosen = {name: labels[name] for name in options.get("labels", "").split(",") if name in labels}
    variables = dict(pair.split("=", 1) for pair in environment if "=" in pair)
    chosen.update((name, variables[name]) for name in options.get("env", "").split(",") if name in variables)
    return chosen


def encoded(attributes: Mapping[str, str]) -> bytes:
    """The `attrs` of each entry: a JSON object sorted by name, as Go writes it, or nothing. Raises
    InvalidParameter when it is too large."""
    if not attributes:
        return b""
    text = (
        json.dumps(attributes, sort_keys=True, separators=(",", ":"), ensure_ascii=False).translate(_ESCAPED).encode()
    )
    if len(text) > ATTRIBUTES_MAX:
        raise InvalidParameter(f"log opts labels and env: {len(text)} bytes per log entry, more than {ATTRIBUTES_MAX}")
    return text


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidParameter(f"log opt max-size: invalid size: '{text}'")
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if size >= 1 << 62:
        raise InvalidParameter(f"log opt max-size: '{text}' is too large")
    return size
