"""Entries → messages of each driver. Budget: 2 µs a line of 92 bytes, which is 500,000 lines/s of a
core.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.micro import sized
from engine._fast import wireform
from engine._fast.logwriter import LogWriter
from engine._fast.wireform import Form, entries

LINES = sized(100_000, 5_000)
BLOCK = 64 << 10  # bytes that a destination takes from a container in turn
KINDS = {
    "ascii": b"2026-01-02 03:04:05 INFO  request served path=/index.html status=200 bytes=5120 took=0.004\n",
    "json": b'{"level":"info","msg":"served","path":"/index.html","status":200,"bytes":5120,"took":0.004}\n',
    "cyrillic": "Журнал событий: всё хорошо, ошибок нет, 2026 год\n".encode(),
}
ID = b"0123456789ab" * 5 + b"cdef"


def pair(text: bytes) -> tuple[bytes, bytes]:
    """With the stream's severity and name."""
    return text.replace(b"%d", b"6").replace(b"%s", b"stdout"), text.replace(b"%d", b"3").replace(b"%s", b"stderr")


def form(text: int, time: int, frame: int, head: bytes, middle: bytes, tail: bytes, **more: Any) -> Form:
    return Form(text=text, time=time, frame=frame, head=pair(head), middle=pair(middle), tail=pair(tail), **more)


FLUENTD = b"\x84\xaccontainer_id\xd9\x40" + ID + b"\xaecontainer_name\xa4/web\xa6source\xa6%s\xa3log"
W = wireform
FORMS = {
    "syslog": (W.RAW, W.STAMP, W.LINE, b"<3%d>", b" 0123456789ab[42]: ", b"", {"skip_empty": True}),
    "syslog-udp": (W.RAW, W.STAMP, W.DATAGRAM, b"<3%d>", b" 0123456789ab[42]: ", b"\n", {"longest": 1472}),
    "rfc5424micro": (W.RAW, W.RFC3339_MICRO, W.COUNT, b"<3%d>1 ", b" host web 42 web - ", b"\n", {}),
    "gelf": (
        *(W.JSON, W.MILLIS_FRACTION, W.NUL, b'{"version":"1.1","host":"host","timestamp":'),
        *(b',"level":%d,"short_message":"', b'","_container_id":"' + ID + b'","_tag":"0123456789ab"}', {}),
    ),
    "fluentd": (
        *(W.MSGPACK_STR, W.EVENT_TIME, W.CONCATENATED, b"\x92", FLUENTD, b""),
        {"partial": W.FLUENTD, "part_middle": pair(b"\x88" + FLUENTD[1:])},
    ),
    "splunk": (
        *(W.JSON, W.MICROS_FRACTION, W.CONCATENATED, b'{"time":"'),
        *(b'","host":"host","event":{"source":"%s","tag":"0123456789ab","line":"', b'"}}', {"skip_blank": True}),
    ),
    "journald": (
        *(W.JOURNAL, W.RFC3339_NANO, W.DATAGRAM, b"PRIORITY=%d\nSYSLOG_TIMESTAMP=", b"\n"),
        *(b"CONTAINER_ID_FULL=" + ID + b"\nCONTAINER_NAME=web\nSYSLOG_IDENTIFIER=web\n", {"partial": W.JOURNALD}),
    ),
}


def spool(tmp_path: Path, kind: str) -> bytes:
    path = tmp_path / "log"
    writer = LogWriter(os.fsencode(path))
    writer.write(1, KINDS[kind] * LINES)
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMS)
def test_format(benchmark: Any, tmp_path: Path, name: str, kind: str) -> None:
    block = spool(tmp_path, kind)
    *fixed, options = FORMS[name]
    shape = form(*fixed, **options)  # type: ignore[arg-type]

    def run() -> int:
        at = count = 0
        while at < len(block):
            _, consumed, done, _, _ = shape.format(block, at, count, BLOCK)
            at += consumed
            count += done
        return count

    made = shape.format(block, 0, 0, 0)[0]
    text = KINDS[kind][:-1]
    assert (json.dumps(text.decode(), ensure_ascii=False)[1:-1].encode() if fixed[0] == W.JSON else text) in made
    assert benchmark.pedantic(run, rounds=7, warmup_rounds=1) == LINES
    benchmark.extra_info["µs/line"] = round(benchmark.stats["min"] / LINES * 1e6, 3)


def test_format_one_line(benchmark: Any, tmp_path: Path) -> None:
    """A container that writes a line now and then."""
    block = spool(tmp_path, "ascii")
    block = block[: block.index(b"\n") + 1]
    *fixed, options = FORMS["gelf"]
    shape = form(*fixed, **options)  # type: ignore[arg-type]
    assert benchmark(shape.format, block, 0, 0, BLOCK)[2] == 1


def test_entries(benchmark: Any, tmp_path: Path) -> None:
    block = spool(tmp_path, "ascii")

    def run() -> int:
        at = count = 0
        while at < len(block):
            _, consumed, done = entries(block, at, BLOCK)
            at += consumed
            count += done
        return count

    assert benchmark.pedantic(run, rounds=7, warmup_rounds=1) == LINES
    benchmark.extra_info["µs/line"] = round(benchmark.stats["min"] / LINES * 1e6, 3)
