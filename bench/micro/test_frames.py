"""Frames of the sizes that attach and logs send. The result is checked first, then timed."""

from __future__ import annotations

from typing import Any

from bench.micro import sized
from engine._fast.frames import Demultiplexer, DetachKeys, mux

TOTAL = sized(64 << 20, 4 << 20)


def test_mux(benchmark: Any) -> None:
    """32 KiB payloads, as a pipe gives them."""
    data = bytes(range(256)) * 128
    assert mux(1, data)[8:] == data

    def run() -> None:
        for _ in range(TOTAL // len(data)):
            mux(1, data)

    benchmark(run)
    benchmark.extra_info["MB/s"] = round(TOTAL / benchmark.stats["min"] / 1e6)


def test_demultiplex_logs(benchmark: Any) -> None:
    """Frames of 100 bytes, as logs make them, in reads of 64 KiB."""
    frame = mux(1, b"x" * 99 + b"\n")
    text = frame * (TOTAL // 8 // len(frame))
    pieces = [text[at : at + 65536] for at in range(0, len(text), 65536)]
    reader = Demultiplexer()
    assert b"".join(data for piece in pieces for _, data in reader.feed(piece)) == (b"x" * 99 + b"\n") * (
        len(text) // len(frame)
    )
    assert reader.complete

    def run() -> None:
        for piece in pieces:
            reader.feed(piece)

    benchmark(run)
    benchmark.extra_info["MB/s"] = round(len(text) / benchmark.stats["min"] / 1e6)


def test_detach_keys(benchmark: Any) -> None:
    """Much input, which the matcher must scan."""
    data = bytes(byte for byte in range(256) if byte != 0x10) * 128
    keys = DetachKeys(b"\x10\x11")
    assert keys.feed(data) == (data, False)

    def run() -> None:
        for _ in range(TOTAL // len(data)):
            keys.feed(data)

    benchmark(run)
    benchmark.extra_info["MB/s"] = round(TOTAL / benchmark.stats["min"] / 1e6)
