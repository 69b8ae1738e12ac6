"""The driver local: files that rotate and are compressed without any option.

The engine writes them in the format of json-file, in its exact form (`_fast/jsonentry`): the bytes
of the output are kept, whatever they are. Docker's own format is not for other programs to read
either. The cache of a log that goes to a remote target has the same options, with the prefix
`cache-`, and the same defaults.
"""

from __future__ import annotations

from engine.logs.drivers.json_file import OPTIONS, Files, count
from engine.logs.options import Options

__all__ = ["NAME", "OPTIONS", "parse"]

NAME = "local"

_MAX_SIZE = 20 << 20
_MAX_FILE = 5


def parse(options: Options, prefix: str = "") -> Files:
    """`prefix`: of the options' names."""
    files = Files(
        options.size(f"{prefix}max-size", _MAX_SIZE),
        count(options, f"{prefix}max-file", _MAX_FILE),
        options.boolean(f"{prefix}compress", True),
    )
    if files.max_size <= 0:
        raise options.invalid(f"{prefix}max-size", f"{prefix}max-size must be a positive number")
    if files.compress and files.max_file == 1:
        raise options.invalid(f"{prefix}max-file", "compression cannot be enabled when max file count is 1")
    return files
