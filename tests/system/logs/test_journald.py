"""The log driver journald with a journal in a mount namespace of its own, as journalctl shows its
entries."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.logs.deliveries import Journald
from tests.support.engine.harness import until
from tests.support.logs import numbered
from tests.support.logs.shipping import Shipping, Spool
from tests.support.logs.targets.journal import Journal, Namespace, value


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with Namespace() as made:
        yield made


@pytest.fixture
def journal(base: Path, namespace: Namespace) -> Iterator[Journal]:
    with Journal(base / "journal", namespace) as made:
        yield made


@pytest.fixture
def shipping(base: Path, namespace: Namespace) -> Iterator[Shipping]:
    made = Shipping(base, namespace.within)
    try:
        yield made
    finally:
        made.close()
        if made.log.exists():
            print(made.log.read_text())


def entries(journal: Journal, spool: Spool, count: int) -> list[dict[str, object]]:
    """Those of a container, when there are so many."""
    match = f"CONTAINER_ID_FULL={spool.id}"
    found: list[dict[str, object]] = until(
        f"{count} entries", lambda: len(all := journal.entries(match)) >= count and all
    )
    assert len(found) == count
    return found


TEXTS = (
    b"plain",
    b"",
    b"a=b",
    b"tab\there",
    b"carriage\rreturn",
    b"\x01\x1b[31mred",
    "Grüße 𝄞".encode(),
    b"  spaces ",
    b"%n {}",
)


def test_fields(shipping: Shipping, journal: Journal) -> None:
    attributes = {"com.example/label": "v", "ENV": "e", "two.lines": "a\nb", "_hidden": "h", "message": "not mine"}
    spool = shipping.spool(Journald(), tag="the/tag", attributes=attributes)
    before = time.time()
    spool.write(b"".join(text + b"\n" for text in TEXTS))
    spool.write(b"to stderr\n", 2)
    shipping.start()
    found = entries(journal, spool, len(TEXTS) + 1)
    assert [value(each, "MESSAGE") for each in found] == [*TEXTS, b"to stderr"]
    assert [each["PRIORITY"] for each in found] == ["6"] * len(TEXTS) + ["3"]
    assert [each["CONTAINER_LOG_ORDINAL"] for each in found] == [str(number) for number in range(len(found))]
    for each in found:
        assert {
            "CONTAINER_ID": spool.id[:12],
            "CONTAINER_ID_FULL": spool.id,
            "CONTAINER_NAME": "web",
            "CONTAINER_TAG": "the/tag",
            "IMAGE_NAME": "busybox",
            "SYSLOG_IDENTIFIER": "the/tag",
            "CONTAINER_LOG_EPOCH": spool.id,
            "COM_EXAMPLE_LABEL": "v",
            "ENV": "e",
            "TWO_LINES": "a\nb",
            "HIDDEN": "h",
            "_TRANSPORT": "journal",
        }.items() <= each.items()
        assert "CONTAINER_PARTIAL_MESSAGE" not in each
        stamp = str(each["SYSLOG_TIMESTAMP"])
        assert stamp.endswith("Z") and len(stamp) == 30
        at = datetime.fromisoformat(stamp[:26]).replace(tzinfo=UTC).timestamp()
        assert before - 1 <= at <= time.time()


def test_text_that_is_no_utf_8(shipping: Shipping, journal: Journal) -> None:
    """The spool has replaced it."""
    spool = shipping.spool(Journald())
    spool.write(b"bad \xff\xfe\n")
    shipping.start()
    (found,) = entries(journal, spool, 1)
    assert value(found, "MESSAGE") == "bad \ufffd\ufffd".encode()


def test_long_lines_are_parts(shipping: Shipping, journal: Journal) -> None:
    spool = shipping.spool(Journald())
    spool.write(b"x" * 40_000 + b"\n")
    spool.write(b"y" * 16_384 + b"\n", 2)
    spool.write(b"short\n")
    shipping.start()
    found = entries(journal, spool, 6)
    out, err = found[:3], found[3:5]
    for parts, text in ((out, b"x" * 40_000), (err, b"y" * 16_384)):
        assert b"".join(value(each, "MESSAGE") for each in parts) == text
        assert len({each["CONTAINER_PARTIAL_ID"] for each in parts}) == 1
        assert [each["CONTAINER_PARTIAL_ORDINAL"] for each in parts] == [
            str(number) for number in range(1, len(parts) + 1)
        ]
        assert [each["CONTAINER_PARTIAL_LAST"] for each in parts] == ["false"] * (len(parts) - 1) + ["true"]
        assert [each.get("CONTAINER_PARTIAL_MESSAGE") for each in parts] == ["true"] * (len(parts) - 1) + [None]
    assert out[0]["CONTAINER_PARTIAL_ID"] != err[0]["CONTAINER_PARTIAL_ID"]
    assert "CONTAINER_PARTIAL_ID" not in found[5]


def test_more_than_a_datagram(shipping: Shipping, journal: Journal) -> None:
    """Messages of 500 KB are passed as files, among others that are not."""
    label = "l" * 500_000
    large = shipping.spool(Journald(), attributes={"label": label})
    small = shipping.spool(Journald())
    for number in range(20):
        large.write(numbered.line("large", number))
        small.write(numbered.line("small", number))
    shipping.start()
    for spool, name in ((large, "large"), (small, "small")):
        found = entries(journal, spool, 20)
        assert [value(each, "MESSAGE") for each in found] == [b"%b:%d" % (name.encode(), n) for n in range(20)]
        assert all(each.get("LABEL") == (label if name == "large" else None) for each in found)


def test_the_journal_is_absent_at_first(shipping: Shipping, base: Path, namespace: Namespace) -> None:
    spool = shipping.spool(Journald())
    spool.write(numbered.lines("a", 0, 100))
    shipping.start()
    state = until("it is away", lambda: (all := shipping.states())[spool.id]["error"] and all[spool.id])
    assert (state["error"], state["waiting"]) == ("No such file or directory", 100)
    with Journal(base / "journal", namespace) as journal:
        found = entries(journal, spool, 100)
        assert [value(each, "MESSAGE") for each in found] == [b"a:%d" % number for number in range(100)]
        until("it is delivered", lambda: shipping.states()[spool.id]["waiting"] == 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_lost_when_the_journal_restarts(shipping: Shipping, journal: Journal, how: int) -> None:
    """What a killed journal had in its queue is sent again."""
    spool = shipping.spool(Journald())
    shipping.start()
    written = 0
    for _ in range(4):
        for _ in range(20):
            spool.write(numbered.lines("a", written, 100))
            written += 100
        # not before it reads
        until("it reads", lambda least=written - 2000: len(journal.entries(f"CONTAINER_ID_FULL={spool.id}")) > least)
        journal.kill(how)
        spool.write(numbered.lines("a", written, 10))
        written += 10
        journal.start()
    until("all are delivered", lambda: shipping.states()[spool.id]["waiting"] == 0, 60)
    texts = [value(each, "MESSAGE") + b"\n" for each in journal.entries(f"CONTAINER_ID_FULL={spool.id}")]
    (found,) = numbered.assert_right(texts, {"a": written}).values()
    # a turn of 64 KiB that had begun, and one that the journal may not have read, for each kill
    assert found.duplicates <= 4 * 2 * (64 << 10) // 250


def test_a_killed_shipper(shipping: Shipping, journal: Journal) -> None:
    spool = shipping.spool(Journald())
    shipping.start()
    written = 0
    for _ in range(4):
        spool.write(numbered.lines("a", written, 1000))
        written += 1000
        until("it sends", lambda least=written - 1000: len(journal.entries(f"CONTAINER_ID_FULL={spool.id}")) > least)
        shipping.kill()
        shipping.start()
    until("all are delivered", lambda: shipping.states()[spool.id]["waiting"] == 0, 60)
    texts = [value(each, "MESSAGE") + b"\n" for each in journal.entries(f"CONTAINER_ID_FULL={spool.id}")]
    numbered.assert_right(texts, {"a": written})


def test_nothing_is_left(namespace: Namespace) -> None:
    """The namespace ends with its holder."""
    path = namespace.path("/run")
    assert os.path.isdir(path)
    namespace.close()
    with contextlib.suppress(FileNotFoundError):
        raise AssertionError(os.listdir(path))
