"""Each driver's messages, as an independent decoder sees them: fields, keys that collide, unusual
labels."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine._fast.wireform import Form
from engine.logs.deliveries import Fluentd, Gelf, Splunk, Syslog, Tls
from engine.shipper import forms
from tests.support.logs.targets.forward import EventTime, unpack
from tests.unit.shipper.spools import ID, delivery

TIME = "2026-01-02T03:04:05.123456789Z"
SECONDS, NANOSECONDS = 1767323045, 123456789
TEXTS = [
    b"hello",
    b'tab\tand \\ "quotes"',
    "Grüße 𝄞 \u2028".encode(),
    b"<html>&amp;</html>",
    b"\x00\x01\x1b[31m",
    b"{}",
    b" ",
]

FACTS: dict[str, Any] = {
    "name": "web",
    "tag": "the/tag",
    "host": "box",
    "pid": 77,
    "image_id": "sha256:abc",
    "image_name": "busybox:latest",
    "command": "sh -c 'a'",
    "created": 1_700_000_000_123_456_789,
}


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The times of syslog are local."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def entry(text: bytes, stream: str = "stdout", *, newline: bool = True) -> bytes:
    shown = json.dumps(text.decode() + "\n" * newline)
    return f'{{"log":{shown},"stream":"{stream}","time":"{TIME}"}}\n'.encode()


def formed(form: Form, *entries: bytes) -> bytes:
    return form.format(b"".join(entries), 0, 7, 1 << 20)[0]


# --- syslog ---------------------------------------------------------------------------------------

HEADS = {
    "unix": "<30>Jan  2 03:04:05 the/tag[77]: ",
    "rfc3164": "<30>Jan  2 03:04:05 box the/tag[77]: ",
    "rfc5424": "<30>1 2026-01-02T03:04:05Z box the/tag 77 the/tag - ",
    "rfc5424micro": "<30>1 2026-01-02T03:04:05.123456Z box the/tag 77 the/tag - ",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("scheme", ["udp", "tcp", "tcp+tls", "unix", "unixgram"])
def test_syslog(kind: Any, scheme: Any, text: bytes) -> None:
    target = Syslog(scheme, "h", path="/p", format=kind, tls=Tls() if scheme == "tcp+tls" else None)
    datagrams = scheme in ("udp", "unixgram")
    form = forms.syslog(delivery(target, **FACTS), target, datagrams=datagrams)
    message = HEADS[kind].encode() + text
    counted = scheme == "tcp+tls" and kind.startswith("rfc5424")
    framed = message if datagrams else b"%d %b" % (len(message), message) if counted else message + b"\n"
    assert formed(form, entry(text)) == framed


@pytest.mark.parametrize("facility", [0, 3, 16, 23])
@pytest.mark.parametrize(("stream", "severity"), [("stdout", 6), ("stderr", 3)])
def test_syslog_priorities(facility: int, stream: str, severity: int) -> None:
    target = Syslog("tcp", "h", facility=facility)
    form = forms.syslog(delivery(target, **FACTS), target, datagrams=False)
    assert formed(form, entry(b"x", stream)).startswith(b"<%d>Jan" % (8 * facility + severity))


@pytest.mark.parametrize("kind", HEADS)
def test_syslog_tags_begin_no_message(kind: Any) -> None:
    """A label of an image can be a tag, with line breaks."""
    target = Syslog("tcp", "h", format=kind)
    facts = FACTS | {"tag": "a\n<0>Jan\r\0\x7f\x85b"}
    sent = formed(forms.syslog(delivery(target, **facts), target, datagrams=False), entry(b"x"))
    assert sent.count(b"\n") == 1 and b"a_<0>Jan____b" in sent


@pytest.mark.parametrize("kind", HEADS)
def test_syslog_sends_no_empty_lines(kind: Any) -> None:
    target = Syslog("tcp", "h", format=kind)
    form = forms.syslog(delivery(target, **FACTS), target, datagrams=False)
    assert formed(form, entry(b""), entry(b"x"), entry(b"")).count(b"\n") == 1


def test_syslog_without_a_host_name() -> None:
    target = Syslog("tcp", "h", format="rfc5424")
    form = forms.syslog(delivery(target, tag="t"), target, datagrams=False)
    assert formed(form, entry(b"x")).split(b" ")[2] == b"-"


def test_a_datagram_of_udp_is_not_too_large() -> None:
    target = Syslog("udp", "h")
    form = forms.syslog(delivery(target, **FACTS), target, datagrams=True)
    message = formed(form, entry("é".encode() * 40_000))
    assert 65_504 <= len(message) <= forms.UDP_LONGEST
    message.decode()


# --- GELF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("stream", "level"), [("stdout", 6), ("stderr", 3)])
@pytest.mark.parametrize("scheme", ["udp", "tcp"])
def test_gelf(scheme: Any, text: bytes, stream: str, level: int) -> None:
    target = Gelf(scheme, "h", 1)
    form = forms.gelf(delivery(target, **FACTS, attributes={"label": 'v\n"', "_under": "u"}), target)
    message = formed(form, entry(text, stream))
    assert message.endswith(b"}\0" if scheme == "tcp" else b"}") and message.count(b"\0") == (scheme == "tcp")
    assert json.loads(message.rstrip(b"\0")) == {
        "version": "1.1",
        "host": "box",
        "short_message": text.decode(),
        "timestamp": 1767323045.123,
        "level": level,
        "_container_id": ID,
        "_container_name": "web",
        "_image_id": "sha256:abc",
        "_image_name": "busybox:latest",
        "_command": "sh -c 'a'",
        "_tag": "the/tag",
        "_created": "2023-11-14T22:13:20.123456789Z",
        "_label": 'v\n"',
        "_under": "u",
    }


def test_gelf_labels_replace_fields_of_their_name() -> None:
    """As in Docker; a name is in the message once."""
    target = Gelf("tcp", "h", 1)
    form = forms.gelf(delivery(target, **FACTS, attributes={"tag": "mine", "": "empty", "ключ": "ж"}), target)
    pairs = json.loads(formed(form, entry(b"x")).rstrip(b"\0"), object_pairs_hook=lambda pairs: pairs)
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names))
    assert dict(pairs)["_tag"] == "mine" and dict(pairs)["_"] == "empty" and dict(pairs)["_ключ"] == "ж"


def test_gelf_sends_no_empty_lines() -> None:
    target = Gelf("tcp", "h", 1)
    assert formed(forms.gelf(delivery(target, **FACTS), target), entry(b"")) == b""


# --- the journal ----------------------------------------------------------------------------------


def journal_fields(message: bytes) -> list[tuple[str, bytes]]:
    """Fields of the native protocol, https://systemd.io/JOURNAL_NATIVE_PROTOCOL/."""
    found = []
    while message:
        line, _, rest = message.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack_from("<Q", rest)
            value, message = rest[8 : 8 + size], rest[8 + size + 1 :]
            assert rest[8 + size : 9 + size] == b"\n"
        else:
            message = rest
        found.append((name.decode(), value))
    return found


@pytest.mark.parametrize("text", [*TEXTS, b"", b"a=b", b"two\nlines"])
@pytest.mark.parametrize(("stream", "priority"), [("stdout", b"6"), ("stderr", b"3")])
def test_journald(text: bytes, stream: str, priority: bytes) -> None:
    form = forms.journald(delivery(**FACTS, attributes={"com.example/key": "v", "multi": "a\nb"}))
    fields = journal_fields(formed(form, entry(text, stream)))
    assert dict(fields) == {
        "MESSAGE": text,
        "PRIORITY": priority,
        "CONTAINER_ID": ID[:12].encode(),
        "CONTAINER_ID_FULL": ID.encode(),
        "CONTAINER_NAME": b"web",
        "CONTAINER_TAG": b"the/tag",
        "IMAGE_NAME": b"busybox:latest",
        "SYSLOG_IDENTIFIER": b"the/tag",
        "SYSLOG_TIMESTAMP": TIME.encode(),
        "CONTAINER_LOG_EPOCH": ID.encode(),
        "CONTAINER_LOG_ORDINAL": b"7",
        "COM_EXAMPLE_KEY": b"v",
        "MULTI": b"a\nb",
    }
    assert len(fields) == 13


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("label", "LABEL"),
        ("com.example.some-label", "COM_EXAMPLE_SOME_LABEL"),
        ("_trusted", "TRUSTED"),
        ("__x", "X"),
        ("1st", "ST"),
        ("a1", "A1"),
        ("ключ", ""),
        ("straße", "STRA_E"),
        ("ı", ""),
        ("...", ""),
        ("", ""),
        ("a=b", "A_B"),
        ("a\nb", "A_B"),
        ("x" * 100, "X" * 64),
    ],
)
def test_journal_fields(name: str, field: str) -> None:
    assert forms.journal_field(name) == field
    assert not field or re.fullmatch("[A-Z][A-Z0-9_]{0,63}", field)


@pytest.mark.parametrize("name", ["message", "MESSAGE", "priority", "syslog.timestamp", "container-partial-id"])
def test_a_label_is_no_second_value_of_a_line(name: str) -> None:
    form = forms.journald(delivery(**FACTS, attributes={name: "label"}))
    assert b"label" not in formed(form, entry(b"x"))


def test_a_label_of_a_containers_field_replaces_it() -> None:
    form = forms.journald(delivery(**FACTS, attributes={"container.name": "mine"}))
    fields = journal_fields(formed(form, entry(b"x")))
    assert [value for name, value in fields if name == "CONTAINER_NAME"] == [b"mine"]


def test_parts_in_the_journal() -> None:
    form = forms.journald(delivery(**FACTS))
    part = b"x" * (16 << 10)
    parts = [
        dict(journal_fields(formed(form, entry(text, newline=end))))
        for text, end in [(part, False), (part, False), (b"y", True)]
    ]
    assert len({each["CONTAINER_PARTIAL_ID"] for each in parts}) == 1
    assert [each["CONTAINER_PARTIAL_ORDINAL"] for each in parts] == [b"1", b"2", b"3"]
    assert [each["CONTAINER_PARTIAL_LAST"] for each in parts] == [b"false", b"false", b"true"]
    assert [each.get("CONTAINER_PARTIAL_MESSAGE") for each in parts] == [b"true", b"true", None]


# --- Fluentd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*TEXTS, b"", b"x" * 31, b"x" * 32, b"x" * 255, b"x" * 256, b"x" * 16000])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("sub_second", [True, False])
def test_fluentd(text: bytes, stream: str, sub_second: bool) -> None:
    target = Fluentd(sub_second=sub_second)
    form = forms.fluentd(delivery(target, **FACTS, attributes={"label": "v"}), target)
    (at, record), end = unpack(formed(form, entry(text, stream)))
    assert at == (EventTime(SECONDS, NANOSECONDS) if sub_second else SECONDS)
    assert record == {
        "container_id": ID,
        "container_name": "/web",
        "source": stream,
        "label": "v",
        "log": text.decode(),
    }
    assert end == len(formed(form, entry(text, stream)))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 11, 12, 13, 20, 300])
def test_fluentd_with_many_labels(count: int) -> None:
    """The header of a map has another form from 16 names on, which parts reach earlier."""
    target = Fluentd()
    labels = {f"label{index}": str(index) for index in range(count)}
    form = forms.fluentd(delivery(target, **FACTS, attributes=labels), target)
    part = entry(b"x" * (16 << 10), newline=False)
    wire = formed(form, entry(b"whole"), part, entry(b"end"))
    records, at = [], 0
    while at < len(wire):
        (_, record), at = unpack(wire, at)
        records.append(record)
    assert [len(record) for record in records] == [4 + count, 8 + count, 8 + count]
    assert all(labels.items() <= record.items() for record in records)
    assert [record.get("partial_last") for record in records] == [None, "false", "true"]
    assert [record.get("partial_ordinal") for record in records] == [None, "1", "2"]
    assert records[1]["partial_id"] == records[2]["partial_id"]


@pytest.mark.parametrize("name", ["log", "partial_message", "partial_id", "partial_ordinal", "partial_last"])
def test_fluentd_labels_do_not_replace_what_belongs_to_a_line(name: str) -> None:
    target = Fluentd()
    form = forms.fluentd(delivery(target, **FACTS, attributes={name: "label"}), target)
    wire = formed(form, entry(b"x" * (16 << 10), newline=False))
    (_, record), _ = unpack(wire)  # refuses a name that is there twice
    assert "label" not in record.values()


@pytest.mark.parametrize("name", ["container_id", "container_name", "source"])
def test_fluentd_labels_replace_other_fields(name: str) -> None:
    """As in Docker."""
    target = Fluentd()
    form = forms.fluentd(delivery(target, **FACTS, attributes={name: "label"}), target)
    (_, record), _ = unpack(formed(form, entry(b"x")))
    assert record[name] == "label" and len(record) == 4


# --- Splunk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_splunk_inline(text: bytes, stream: str) -> None:
    target = Splunk("https://h:8088", "token", source="s", sourcetype="st", index="i")
    form = forms.splunk(delivery(target, **FACTS, attributes={"label": "v"}), target)
    assert json.loads(formed(form, entry(text, stream))) == {
        "time": "1767323045.123457",
        "host": "box",
        "source": "s",
        "sourcetype": "st",
        "index": "i",
        "event": {"line": text.decode(), "source": stream, "tag": "the/tag", "attrs": {"label": "v"}},
    }


@pytest.mark.parametrize("text", TEXTS[:-1])
@pytest.mark.parametrize("tag", ["", "the/tag"])
def test_splunk_raw(text: bytes, tag: str) -> None:
    target = Splunk("https://h:8088", "token", format="raw")
    facts = FACTS | {"tag": tag, "attributes": {"label": 'v"'}}
    form = forms.splunk(delivery(target, **facts), target)
    event = json.loads(formed(form, entry(text)))
    assert event["event"] == f"{tag} " * bool(tag) + 'label=v" ' + text.decode()


@pytest.mark.parametrize("text", [b"", b" ", b"\t \r", "\u3000".encode()])
def test_splunk_raw_sends_no_blank_lines(text: bytes) -> None:
    target = Splunk("https://h:8088", "token", format="raw")
    assert formed(forms.splunk(delivery(target, **FACTS), target), entry(text)) == b""
