"""Datagrams: GELF's chunks and compression, what counts as delivered, and what the journal gets.

Unix sockets in the test's directory; nothing leaves the process.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.logs.deliveries import Delivery, Gelf, Journald, Syslog
from engine.shipper.destination import Destination
from engine.shipper.feed import Formed
from engine.shipper.senders import datagrams
from engine.shipper.senders.datagrams import (
    GELF_CHUNK,
    GELF_CHUNKS,
    GRACE,
    GelfDatagrams,
    Journal,
    SyslogDatagrams,
    chunks,
)
from tests.support.logs.targets.gelf import Chunks, decoded
from tests.unit.shipper.spools import Owner, Spool, delivery, number, until

# --- GELF -----------------------------------------------------------------------------------------

PART = GELF_CHUNK - 12


@pytest.mark.parametrize("size", [1, 100, GELF_CHUNK - 1, GELF_CHUNK])
def test_a_message_that_fits_is_one_datagram(size: int) -> None:
    assert chunks(b"{" * size) == [b"{" * size]


@pytest.mark.parametrize("size", [GELF_CHUNK + 1, 2 * PART, 2 * PART + 1, 50_000, GELF_CHUNKS * PART])
def test_a_large_message_is_cut(size: int) -> None:
    message = bytes(index * 7 % 251 for index in range(size))
    parts = chunks(message)
    assert len(parts) == -(-size // PART)
    assert {part[:10] for part in parts} == {parts[0][:10]} and parts[0][:2] == b"\x1e\x0f"
    assert [part[10] for part in parts] == list(range(len(parts)))
    assert {part[11] for part in parts} == {len(parts)}
    assert max(map(len, parts)) <= GELF_CHUNK
    random.Random(size).shuffle(parts)
    receiver = Chunks()
    assert [each for part in parts if (each := receiver.take(part)) is not None] == [message]


def test_ids_of_messages_differ() -> None:
    assert chunks(bytes(5000))[0][2:10] != chunks(bytes(5000))[0][2:10]


@pytest.mark.parametrize("size", [GELF_CHUNKS * PART + 1, 1 << 20])
def test_what_needs_too_many_chunks_is_not_sent(size: int) -> None:
    assert chunks(bytes(size)) == []


MESSAGES = [b'{"a":1}', b'{"b":"%b"}' % (b"x" * 5000), b'{"c":"%b"}' % random.Random(1).randbytes(6000).hex().encode()]


@pytest.mark.parametrize("compression", ["gzip", "zlib", "none"])
@pytest.mark.parametrize("level", [-1, 0, 1, 5, 9])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_packed(tmp_path: Path, compression: Any, level: int, count: int) -> None:
    spool = Spool(tmp_path / "spool")
    document = delivery(Gelf("udp", "127.0.0.1", 1, compression=compression, level=level))
    spool.feed.document = document
    gelf = GelfDatagrams(Owner(), document)
    wire = b"".join(MESSAGES[:count])
    ends = [sum(map(len, MESSAGES[: index + 1])) for index in range(count)]
    packed, packed_ends = gelf.packed(spool.feed, Formed(wire, count, array.array("I", ends)))
    begins = [0, *packed_ends]
    datagrams = [packed[begin:end] for begin, end in zip(begins, packed_ends, strict=False)]
    assert all(len(each) <= GELF_CHUNK for each in datagrams)
    receiver = Chunks()
    whole = [each for datagram in datagrams if (each := receiver.take(datagram)) is not None]
    assert [decoded(each) for each in whole] == [json.loads(message) for message in MESSAGES[:count]]
    first = {"gzip": b"\x1f\x8b", "zlib": b"\x78", "none": b"{"}[compression]
    assert all(each.startswith(first) for each in whole)
    spool.feed.close()


def test_a_message_that_is_too_large_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.feed.document = document = delivery(Gelf("udp", "127.0.0.1", 1, compression="none"))
    owner = Owner()
    gelf = GelfDatagrams(owner, document)
    gelf.feeds.add(spool.feed)
    large = bytes(GELF_CHUNKS * PART + 1)
    wire, ends = gelf.packed(spool.feed, Formed(MESSAGES[0] + large, 2, array.array("I", [7, 7 + len(large)])))
    assert (wire, list(ends)) == (MESSAGES[0], [7])
    assert (owner.losses, spool.feed.dropped_lines) == ([1], 1)
    syslog = SyslogDatagrams(owner, spool.document)
    syslog.feeds.add(spool.feed)
    asyncio.run(syslog.too_large(spool.feed, large))
    assert (owner.losses, spool.feed.dropped_lines) == ([1, 1], 2)
    spool.feed.close()


def test_feeds_of_one_destination_compress_as_their_options_say(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    one = delivery(Gelf("udp", "127.0.0.1", 1, compression="none"))
    other = delivery(Gelf("udp", "127.0.0.1", 1, compression="gzip"))
    assert one.target.destination == other.target.destination
    gelf = GelfDatagrams(Owner(), one)
    formed = Formed(MESSAGES[0], 1, array.array("I", [len(MESSAGES[0])]))
    spool.feed.document = one
    assert gelf.packed(spool.feed, formed)[0] == MESSAGES[0]
    spool.feed.document = other
    assert decoded(gelf.packed(spool.feed, formed)[0]) == {"a": 1}
    spool.feed.close()


# --- Unix sockets ---------------------------------------------------------------------------------


class Receiver:
    """A datagram socket that the test reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bind()

    def bind(self) -> None:
        self.path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.setblocking(False)

    def read(self, most: int = 1 << 30) -> list[bytes]:
        """Messages that are there, without the empty ones."""
        found: list[bytes] = []
        while len(found) < most:
            try:
                message = self.socket.recv(1 << 20)
            except BlockingIOError:
                break
            if message:
                found.append(message)
        return found


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr(datagrams, "LOOK", 0.001)
    made = Receiver(tmp_path / "log")
    yield made
    made.socket.close()


def local(tmp_path: Path, receiver: Receiver) -> tuple[Destination, Spool]:
    spool = Spool(tmp_path / "spool", target=Syslog("unixgram", path=str(receiver.path)))
    made = SyslogDatagrams(spool.owner, spool.document)
    made._first_pause = 0.001
    spool.feed.destination = made
    spool.feed.form = made.form(spool.document)
    return made, spool


def numbers(messages: list[bytes]) -> list[int]:
    return [number(message.partition(b": ")[2]) for message in messages]


def test_a_full_queue_is_waited_for(tmp_path: Path, receiver: Receiver) -> None:
    """Nothing counts as delivered that the receiver has not read."""
    destination, spool = local(tmp_path, receiver)
    spool.write(100)
    got: list[int] = []

    async def scene() -> None:
        destination.add(spool.feed)
        destination.notify(spool.feed)
        while len(got) < 100:
            await asyncio.sleep(0.0002)
            assert spool.feed.acked.lines <= len(got)
            got.extend(numbers(receiver.read(7)))
        await until(lambda: receiver.read() or spool.feed.acked.lines == 100)
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert got == list(range(100))
    spool.feed.close()


def test_what_a_dead_receiver_had_not_read_is_sent_again(tmp_path: Path, receiver: Receiver) -> None:
    destination, spool = local(tmp_path, receiver)
    spool.write(5)

    async def scene() -> None:
        destination.add(spool.feed)
        destination.notify(spool.feed)
        await until(lambda: spool.feed.drained)
        receiver.socket.close()  # the kernel frees the messages
        await until(lambda: spool.owner.changes)
        assert spool.feed.acked.lines == 0
        receiver.bind()
        got: list[int] = []
        while spool.feed.acked.lines < 5:
            got += numbers(receiver.read())
            await asyncio.sleep(0.001)
        assert got == [0, 1, 2, 3, 4]
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert spool.owner.changes[-1] == ""
    spool.feed.close()


def test_the_orderly_end_waits_for_the_receiver(tmp_path: Path, receiver: Receiver) -> None:
    destination, spool = local(tmp_path, receiver)
    spool.write(5)

    async def scene() -> None:
        destination.add(spool.feed)
        destination.notify(spool.feed)
        await until(lambda: spool.feed.drained)
        ending = asyncio.ensure_future(destination.end(orderly=True))
        await asyncio.sleep(0.002)
        assert numbers(receiver.read()) == [0, 1, 2, 3, 4]
        await ending

    asyncio.run(scene())
    assert spool.feed.acked.lines == 5
    spool.feed.close()


def test_no_local_syslog(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", target=Syslog("unixgram", path=str(tmp_path / "none")))
    destination = SyslogDatagrams(spool.owner, spool.document)
    spool.feed.destination = destination
    spool.write(1)

    async def scene() -> None:
        destination.add(spool.feed)
        destination.notify(spool.feed)
        await until(lambda: destination.error)
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert destination.error == "No such file or directory"
    spool.feed.close()


# --- UDP, as its errors say -----------------------------------------------------------------------


class Udp(SyslogDatagrams):
    """Without a socket: the test says what the error queue has."""


class Queue:
    """A socket with an error queue only."""

    def __init__(self) -> None:
        self.errors: list[int] = []

    def recvmsg(self, *_: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
        if not self.errors:
            raise BlockingIOError
        return b"", [(0, 11, self.errors.pop(0).to_bytes(4, "little") + bytes(12))], 0, None


@pytest.fixture
def udp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Udp, Spool, Queue, list[float]]]:
    spool = Spool(tmp_path / "spool", target=Syslog("udp", "127.0.0.1", 1))
    made = Udp(spool.owner, spool.document)
    spool.feed.destination = made
    queue = Queue()
    made._socket = queue  # type: ignore[assignment]
    clock = [100.0]
    monkeypatch.setattr(datagrams.time, "monotonic", lambda: clock[0])
    yield made, spool, queue, clock
    spool.feed.close()


def send(udp: Udp, spool: Spool) -> None:
    spool.write(1)
    spool.feed.take(1)
    udp._sent += 1
    udp.sent(udp._sent, spool.feed)


def test_udp_is_delivered_when_no_error_has_come_for_a_while(udp: tuple[Udp, Spool, Queue, list[float]]) -> None:
    destination, spool, _, clock = udp
    send(destination, spool)
    destination._look_at_errors()
    assert spool.feed.acked.lines == 0
    clock[0] += GRACE * 0.51
    send(destination, spool)
    destination._look_at_errors()
    assert spool.feed.acked.lines == 0
    clock[0] += GRACE * 0.51
    destination._look_at_errors()
    assert spool.feed.acked.lines == 1
    clock[0] += GRACE
    destination._look_at_errors()
    assert spool.feed.acked.lines == 2 and not destination.has_marks(spool.feed)


@pytest.mark.parametrize("number", [111, 113, 101])
def test_an_error_of_icmp_fails(udp: tuple[Udp, Spool, Queue, list[float]], number: int) -> None:
    destination, spool, queue, clock = udp
    send(destination, spool)
    destination._look_at_errors()
    queue.errors.append(number)
    clock[0] += GRACE
    with pytest.raises(OSError) as caught:
        destination._look_at_errors()
    assert caught.value.errno == number and spool.feed.acked.lines == 0


def test_a_smaller_mtu_is_no_failure(udp: tuple[Udp, Spool, Queue, list[float]]) -> None:
    destination, spool, queue, clock = udp
    send(destination, spool)
    queue.errors.append(90)
    destination._look_at_errors()
    clock[0] += GRACE
    destination._look_at_errors()
    assert spool.feed.acked.lines == 1


# --- the journal ----------------------------------------------------------------------------------


class OwnJournal(Journal):
    """At another path."""

    path = ""

    async def dial(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.setblocking(False)
        made.connect(self.path)
        return made


def journal(tmp_path: Path, receiver: Receiver, **more: Any) -> tuple[OwnJournal, Spool]:
    document: Delivery = delivery(Journald(), **more)
    spool = Spool(tmp_path / "spool")
    made = OwnJournal(spool.owner, document)
    made.path = str(receiver.path)
    spool.feed.document = document
    spool.feed.destination = made
    spool.feed.form = made.form(document)
    return made, spool


def test_a_message_that_exceeds_a_datagram_is_a_sealed_file(tmp_path: Path, receiver: Receiver) -> None:
    """Also while the queue is full."""
    label = "x" * 500_000
    destination, spool = journal(tmp_path, receiver, attributes={"big": label})
    spool.write(30)
    found: list[bytes] = []

    async def scene() -> None:
        destination.add(spool.feed)
        destination.notify(spool.feed)
        while len(found) < 30:
            await asyncio.sleep(0.0002)
            try:
                data, descriptors, _, _ = socket.recv_fds(receiver.socket, 1 << 20, 4)
            except BlockingIOError:
                continue
            if not descriptors:
                assert data == b"", "an empty message, to see whether the receiver lives"
                continue
            (file,) = descriptors
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
            assert seals == fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            found.append(os.pread(file, 1 << 20, 0))
            os.close(file)
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert [b"\nMESSAGE=line %d\n" % index in each for index, each in enumerate(found)] == [True] * 30
    assert all(f"\nBIG={label}\n".encode() in each for each in found)
    assert spool.owner.changes == []
    spool.feed.close()
