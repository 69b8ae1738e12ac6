"""Targets of a process's output: the daemon makes them from a container's options, and the monitor
opens a sink for each.

A log driver that writes in the monitor adds a tagged struct here, a row to `logs/drivers.py` (its
options) and one to `monitor/launch.py` (`open_sink`). Only msgspec is imported, because the monitor
loads this module.
"""

from __future__ import annotations

import msgspec


class JsonFile(msgspec.Struct, array_like=True, frozen=True, tag="json-file"):
    """A json-file log: absolute path, size in bytes at which it rotates (0: never), number of files
    kept (>= 1).

    `attrs`: an encoded JSON object that every entry carries (log options `labels`, `env`), or
    empty.
    """

    path: str
    max_size: int = 0
    max_file: int = 1
    attrs: bytes = b""


Target = JsonFile
"""The union of all targets."""
