"""The constant parts of each driver's messages, from a container's document.

A message is `head`, the entry's time, `middle`, its text and `tail` (`_fast/wireform`). The fields
and their names are those of Docker's drivers, which receivers' configurations rely on.
"""

from __future__ import annotations

import re
import struct

import msgspec

from engine._fast import wireform
from engine._fast.wireform import Form
from engine.common import times
from engine.logs.deliveries import Delivery, Fluentd, Gelf, Splunk, Syslog

ERROR, INFORMATION = 3, 6
"""Severities of stderr and stdout (RFC 5424 6.2.1)."""
_LEVELS = (INFORMATION, ERROR)
_STREAMS = ("stdout", "stderr")
_NANOSECONDS = 1_000_000_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

UDP_LONGEST = 65_507
"""Bytes of the largest payload of a UDP datagram over IPv4."""


def syslog(document: Delivery, target: Syslog, *, datagrams: bool) -> Form:
    """RFC 3164 or RFC 5424. MSGID is the tag too, and the process's id the daemon's, as in
    Docker. Control characters of the tag, which can come from a label of an image, are replaced: a
    line break would begin another message."""
    tag, host, pid = _CONTROL.sub("_", document.tag), document.host or "-", document.pid
    if target.format == "unix":
        times_as, middle, version = wireform.STAMP, f" {tag}[{pid}]: ", ""
    elif target.format == "rfc3164":
        times_as, middle, version = wireform.STAMP, f" {host} {tag}[{pid}]: ", ""
    else:
        micro = target.format == "rfc5424micro"
        times_as, version = (wireform.RFC3339_MICRO if micro else wireform.RFC3339), "1 "
        middle = f" {host} {tag} {pid} {tag} - "
    head = tuple(f"<{target.facility * 8 + level}>{version}".encode() for level in _LEVELS)
    framed = wireform.COUNT if target.octet_counted else wireform.LINE
    return Form(
        text=wireform.RAW,
        time=times_as,
        frame=wireform.DATAGRAM if datagrams else framed,
        head=(head[0], head[1]),
        middle=_same(middle.encode()),
        tail=_same(b""),
        skip_empty=True,
        longest=UDP_LONGEST if datagrams and target.scheme == "udp" else 0,
    )


def gelf(document: Delivery, target: Gelf) -> Form:
    """GELF 1.1. Extra fields have a leading underscore."""
    fields = {
        "_container_id": document.id,
        "_container_name": document.name,
        "_image_id": document.image_id,
        "_image_name": document.image_name,
        "_command": document.command,
        "_tag": document.tag,
        "_created": times.rfc3339(document.created),
    }
    fields |= {name if name.startswith("_") else f"_{name}": value for name, value in document.attributes.items()}
    extra = msgspec.json.encode(fields)[1:]
    start = b'{"version":"1.1","host":%b,"timestamp":' % msgspec.json.encode(document.host)
    middles = tuple(b',"level":%d,"short_message":"' % level for level in _LEVELS)
    return Form(
        text=wireform.JSON,
        time=wireform.MILLIS_FRACTION,
        frame=wireform.DATAGRAM if target.scheme == "udp" else wireform.NUL,
        head=_same(start),
        middle=(middles[0], middles[1]),
        tail=_same(b'",' + extra),
        skip_empty=True,
    )


def journald(document: Delivery) -> Form:
    """Fields of the journal's native protocol; each ends in a newline."""
    fields = {
        "CONTAINER_ID": document.id[:12],
        "CONTAINER_ID_FULL": document.id,
        "CONTAINER_NAME": document.name,
        "CONTAINER_TAG": document.tag,
        "IMAGE_NAME": document.image_name,
        "SYSLOG_IDENTIFIER": document.tag,
        "CONTAINER_LOG_EPOCH": document.id,
    }
    for name, value in document.attributes.items():
        allowed = journal_field(name)
        if allowed and allowed not in _JOURNAL_OWN:
            fields[allowed] = value
    constant = b"".join(_journal(name, value) for name, value in fields.items())
    heads = tuple(b"PRIORITY=%d\n%bSYSLOG_TIMESTAMP=" % (level, constant) for level in _LEVELS)
    return Form(
        text=wireform.JOURNAL,
        time=wireform.RFC3339_NANO,
        frame=wireform.DATAGRAM,
        head=(heads[0], heads[1]),
        middle=_same(b"\n"),
        tail=_same(b""),
        partial=wireform.JOURNALD,
    )


_JOURNAL_OWN = {
    *("MESSAGE", "PRIORITY", "SYSLOG_TIMESTAMP", "CONTAINER_LOG_ORDINAL", "CONTAINER_PARTIAL_MESSAGE"),
    *("CONTAINER_PARTIAL_ID", "CONTAINER_PARTIAL_ORDINAL", "CONTAINER_PARTIAL_LAST"),
}
"""Fields that differ from line to line. A label of that name would be a second value."""


def journal_field(name: str) -> str:
    """A label's or variable's name as a field of the journal: upper case, other characters replaced
    by underscores. Empty if nothing is left. The journal drops names that begin with a digit, and
    those that begin with an underscore are trusted fields, which clients cannot set
    (systemd.journal-fields(7))."""
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper().lstrip("_0123456789")[:64]


def _journal(name: str, value: str) -> bytes:
    data = value.encode(errors="replace")
    if b"\n" in data:
        return b"%b\n%b%b\n" % (name.encode(), struct.pack("<Q", len(data)), data)
    return b"%b=%b\n" % (name.encode(), data)


def fluentd(document: Delivery, target: Fluentd) -> Form:
    """Entries of Forward mode: [time, record]."""
    records = []
    for stream in _STREAMS:
        fields = {"container_id": document.id, "container_name": f"/{document.name}", "source": stream}
        fields |= {name: value for name, value in document.attributes.items() if name not in _FLUENTD_OWN}
        pairs = b"".join(msgspec.msgpack.encode(part) for pair in fields.items() for part in pair)
        whole, part = (_map_header(len(fields) + size) for size in (1, 5))
        key = pairs + msgspec.msgpack.encode("log")
        records.append((whole + key, part + key))
    return Form(
        text=wireform.MSGPACK_STR,
        time=wireform.EVENT_TIME if target.sub_second else wireform.SECONDS_INT,
        frame=wireform.CONCATENATED,
        head=_same(b"\x92"),
        middle=(records[0][0], records[1][0]),
        part_middle=(records[0][1], records[1][1]),
        tail=_same(b""),
        partial=wireform.FLUENTD,
    )


_FLUENTD_OWN = {"log", "partial_message", "partial_id", "partial_ordinal", "partial_last"}
"""Names that differ from line to line. A label of that name would be in the map twice."""


def _map_header(size: int) -> bytes:
    return bytes([0x80 | size]) if size < 16 else b"\xde" + size.to_bytes(2, "big")


def splunk(document: Delivery, target: Splunk) -> Form:
    """Events of the HTTP Event Collector, formats `inline` and `raw`. Their ends are needed when
    the collector refuses one of them.
    """
    event: tuple[tuple[bytes, bytes], tuple[bytes, bytes]]
    if target.format == "raw":
        prefix = "".join([f"{document.tag} "] * bool(document.tag))
        prefix += "".join(f"{name}={value} " for name, value in document.attributes.items())
        text = msgspec.json.encode(prefix)[:-1]
        event = _same(b',"event":' + text), _same(b'"}')
    else:
        ends = [b'","source":"%b"%b}}' % (stream.encode(), splunk_extra(document)) for stream in _STREAMS]
        event = _same(b',"event":{"line":"'), (ends[0], ends[1])
    start, rest = splunk_envelope(document, target)
    return Form(
        text=wireform.JSON,
        time=wireform.MICROS_FRACTION,
        frame=wireform.DATAGRAM,
        head=_same(start),
        middle=(rest + event[0][0], rest + event[0][1]),
        tail=event[1],
        skip_blank=target.format == "raw",
    )


def splunk_envelope(document: Delivery, target: Splunk) -> tuple[bytes, bytes]:
    """The parts of an event before and after its time, up to the member `event`."""
    fields = {"host": document.host, "source": target.source, "sourcetype": target.sourcetype, "index": target.index}
    given = {name: value for name, value in fields.items() if value or name == "host"}
    return b'{"time":"', b'",' + msgspec.json.encode(given)[1:-1]


def splunk_extra(document: Delivery) -> bytes:
    """Members of an event besides line and source, each after a comma."""
    extra = b',"tag":' + msgspec.json.encode(document.tag) if document.tag else b""
    if document.attributes:
        extra += b',"attrs":' + msgspec.json.encode(document.attributes)
    return extra


def _same(part: bytes) -> tuple[bytes, bytes]:
    """For both streams."""
    return part, part
