"""The driver json-file: the default, with one file that rotates if `max-size` is given.

Docker's rules: sizes are decimal (`10m` is 10,000,000 bytes), `max-file` has no effect without
`max-size`, and `compress` needs both. Not here: the file's format and its rotation
(`_fast/logwriter`).
"""

from __future__ import annotations

from typing import NamedTuple

from engine.logs.options import BIGGEST, FILES_MAX, Options

NAME = "json-file"
OPTIONS = frozenset(("max-size", "max-file", "compress"))


class Files(NamedTuple):
    """Size in bytes at which the log rotates (0: never), number of files kept, and whether rotated
    files are compressed."""

    max_size: int = 0
    max_file: int = 1
    compress: bool = False


def parse(options: Options) -> Files:
    files = Files(options.size("max-size", 0), count(options), options.boolean("compress", False))
    if "max-size" in options and files.max_size <= 0:
        raise options.invalid("max-size", "max-size must be a positive number")
    if files.compress and (files.max_file < 2 or not files.max_size):
        raise options.invalid("compress", "compress cannot be true when max-file is less than 2 or max-size is not set")
    return files


def count(options: Options, name: str = "max-file", default: int = 1) -> int:
    """A number of files."""
    number = options.integer(name, default, -BIGGEST, BIGGEST)
    if number < 1:
        raise options.invalid(name, f"{name} cannot be less than 1")
    if number > FILES_MAX:
        raise options.invalid(name, f"{name} cannot be more than {FILES_MAX}")
    return number
