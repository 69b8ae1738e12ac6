"""The driver journald: lines become entries of the host's journal."""

from __future__ import annotations

from engine.logs.deliveries import Journald
from engine.logs.options import Options

NAME = "journald"
OPTIONS: frozenset[str] = frozenset()


def parse(options: Options) -> Journald:
    return Journald()
