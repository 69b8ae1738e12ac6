"""Targets of a process's output: the daemon makes them from a container's options, and the monitor
opens a sink for each.

A log driver that writes in the monitor adds a tagged struct here, a row to `logs/drivers` (its
options) and one to `monitor/launch.py` (`open_sink`). Only msgspec is imported, because the monitor
loads this module.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class JsonFile(msgspec.Struct, array_like=True, frozen=True, tag="json-file"):
    """A json-file log: absolute path, size in bytes at which it rotates (0: never), number of files
    kept (>= 1).

    `attrs`: an encoded JSON object that every entry carries (log options `labels`, `env`), or
    empty. `compress`: rotated files are compressed with gzip.
    `exact`: bytes that are not UTF-8 are kept; other programs may not be able to read the files.
    """

    path: str
    max_size: int = 0
    max_file: int = 1
    attrs: bytes = b""
    compress: bool = False
    exact: bool = False


class Spool(msgspec.Struct, array_like=True, frozen=True, tag="spool"):
    """The log of a container whose lines the shipper delivers to a remote target
    (`logs/deliveries.py`): files in the json-file format in `directory`, an absolute path.

    `max_size`, `max_file`, `compress`: as in `JsonFile`, but a file that holds undelivered lines
    may be kept beyond `max_file`. `quota`: bytes of undelivered lines above which `blocking` pauses
    the container's output; without `blocking` the oldest undelivered lines are dropped instead.
    """

    directory: str
    max_size: int
    max_file: int
    quota: int
    blocking: bool = True
    compress: bool = False


Target: TypeAlias = JsonFile | Spool
"""The union of all targets."""

__all__ = ["JsonFile", "Spool", "Target"]
