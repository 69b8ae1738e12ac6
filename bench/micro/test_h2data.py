"""DATA of a session as clients send it: packets of 32 KiB in two frames, in reads of 64 KiB."""

from __future__ import annotations

import struct
from typing import Any

from bench.micro import sized
from engine._fast.h2data import Scanner

TOTAL = sized(64 << 20, 4 << 20)
PACKET = bytes(range(256)) * 128


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", 0, 0, 1) + payload


def test_feed(benchmark: Any) -> None:
    message = struct.pack(">BI", 0, len(PACKET)) + PACKET
    data = (frame(message[:4096]) + frame(message[4096:])) * (TOTAL // len(PACKET))
    pieces = [data[at : at + 65536] for at in range(0, len(data), 65536)]
    scanner = Scanner(0, 1 << 20, 4 << 20)
    scanner.register(1, 1 << 62, b"")
    assert [found for piece in pieces for _, found in scanner.feed(piece)[1]] == [PACKET] * (TOTAL // len(PACKET))

    def run() -> None:
        for piece in pieces:
            scanner.feed(piece)

    benchmark(run)
    benchmark.extra_info["MB/s"] = round(TOTAL / benchmark.stats["min"] / 1e6)
