"""Fluentd: answers, chunks, and the messages as an independent decoder sees them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.logs.deliveries import Delivery, Fluentd
from engine.shipper import destination as destinations
from engine.shipper.destination import Refused
from engine.shipper.senders import fluentd, streams
from engine.shipper.senders.fluentd import CHUNKS, FluentdStream, answers
from engine.shipper.senders.streams import Connection
from tests.support.logs.targets.forward import Incomplete, unpack
from tests.unit.shipper.spools import Owner, Spool, until
from tests.unit.shipper.test_streams import Line


def answer(chunk: str, **more: str) -> bytes:
    return msgspec.msgpack.encode({"ack": chunk, **more})


# --- answers --------------------------------------------------------------------------------------

CHUNK = "p4eHdfR+SXq9YlW0iTJ5Zw=="
GOOD = [
    answer(CHUNK),
    answer("x" * 31),
    answer("x" * 32),
    answer("x" * 255),
    answer("x" * 300),
    answer("é"),
    answer(CHUNK, other="value"),
    b"\x82\xa5other\xa1v\xa3ack\xa1x",
    b"\x81\xc4\x03ack\xc4\x01x",  # binaries
    b"\x81\xa3ack\xda\x00\x01x",
    b"\x81\xa3ack\xdb\x00\x00\x00\x01x",
    b"\x81\xa3ack\xc5\x00\x01x",
    b"\x81\xa3ack\xc6\x00\x00\x00\x01x",
]


@pytest.mark.parametrize("data", GOOD)
def test_whole_answers(data: bytes) -> None:
    expected = unpack(data)[0]
    name = expected.get("ack", expected.get(b"ack"))
    received = bytearray(data)
    assert answers(received) == [name.decode() if isinstance(name, bytes) else name]
    assert not received


@pytest.mark.parametrize("data", GOOD)
def test_answers_byte_by_byte(data: bytes) -> None:
    received = bytearray()
    for byte in data[:-1]:
        received.append(byte)
        assert answers(received) == []
    received.append(data[-1])
    assert len(answers(received)) == 1 and not received


@pytest.mark.parametrize("data", GOOD)
def test_answers_with_a_tail(data: bytes) -> None:
    received = bytearray(data + GOOD[0] + data[: len(data) // 2])
    assert len(answers(received)) == 2
    assert received == data[: len(data) // 2]


def test_an_empty_map_acknowledges_nothing() -> None:
    received = bytearray(b"\x80")
    assert answers(received) == [""] and not received


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x93",
        b"\x00",
        b"\xc0",
        b"\xff",
        b"\xa3ack",
        b"\x81\xa3ack\x05",
        b"\x81\x05\xa3ack",
        b"\x81\xa3ack\x80",
        b"\x81\xa3ack\xc0",
        b"\xde\x00\x01\xa3ack\xa1x",
        b"\x93\xa4HELO",
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(Refused):
        answers(bytearray(data))


def test_an_endless_answer() -> None:
    received = bytearray(b"\x81\xa3ack\xdb\x7f\xff\xff\xff" + bytes(4096))
    with pytest.raises(Refused, match="too long"):
        answers(received)


@pytest.mark.parametrize("seed", range(100))
def test_any_bytes(seed: int) -> None:
    """Refused or waited for; nothing else is raised, and nothing loops."""
    chance = random.Random(seed)
    data = bytearray(answer(CHUNK) + answer("y" * 40))
    for _ in range(chance.randrange(1, 6)):
        match chance.randrange(3):
            case 0:
                data[chance.randrange(len(data))] = chance.randrange(256)
            case 1:
                del data[chance.randrange(len(data)) :]
                data += b"\x81"
            case 2:
                data.insert(chance.randrange(len(data)), chance.randrange(256))
    try:
        found = answers(data)
    except Refused:
        return
    assert all(isinstance(each, str) for each in found)


# --- chunks ---------------------------------------------------------------------------------------


class Server(Line):
    """The other side: messages as they are decoded."""

    @property
    def messages(self) -> list[tuple[str, list[Any], dict[str, Any]]]:
        found, at = [], 0
        while True:
            try:
                message, at = unpack(self.wire, at)
            except Incomplete:
                assert at == len(self.wire)
                return found
            found.append(tuple(message))

    @property
    def chunks(self) -> list[str]:
        return [options["chunk"] for _, _, options in self.messages]

    @property
    def texts(self) -> list[str]:
        return [record["log"] for _, entries, _ in self.messages for _, record in entries]

    def answer(self, *chunks: str) -> None:
        self.data_received(b"".join(answer(chunk) for chunk in chunks))


class Forwarding(FluentdStream):
    """Connects to a `Server`."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        self.servers: list[Server] = []
        self._first_pause = 0.001

    async def dial(self) -> Connection:
        self._chunks.clear()
        server = Server(self._wake)
        self.servers.append(server)
        return server


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LOOK", 0.001)


def made(tmp_path: Path, **options: Any) -> tuple[Forwarding, Spool]:
    spool = Spool(tmp_path / "spool", target=Fluentd(port=1, **options))
    forwarding = Forwarding(spool.owner, spool.document)
    spool.feed.destination = forwarding
    spool.feed.form = forwarding.form(spool.document)
    return forwarding, spool


def scene(forwarding: Forwarding, spool: Spool, play: Callable[[], Any]) -> None:
    async def run() -> None:
        forwarding.add(spool.feed)
        forwarding.notify(spool.feed)
        try:
            await play()
        finally:
            await forwarding.end(orderly=False)
            spool.feed.close()

    asyncio.run(run())


def test_an_acknowledged_chunk_settles(tmp_path: Path) -> None:
    forwarding, spool = made(tmp_path, request_ack=True)
    spool.write(3)

    async def play() -> None:
        await until(lambda: forwarding.servers and forwarding.servers[0].messages)
        (server,) = forwarding.servers
        ((tag, entries, options),) = server.messages
        assert tag == "tag" and options["size"] == len(entries) == 3
        assert spool.feed.acked.lines == 0
        server.answer(options["chunk"])
        await until(lambda: spool.feed.acked.lines == 3)

    scene(forwarding, spool, play)
    assert spool.owner.changes == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_acknowledgements_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    """A position is acknowledged when everything before it is."""
    forwarding, spool = made(tmp_path, request_ack=True)

    async def play() -> None:
        for turn in range(3):
            spool.write(1)
            forwarding.notify(spool.feed)
            await until(lambda turn=turn: forwarding.servers and len(forwarding.servers[0].messages) == turn + 1)
        (server,) = forwarding.servers
        chunks = server.chunks
        given: set[int] = set()
        for each in order:
            server.answer(chunks[each])
            given.add(each)
            expected = next(count for count in range(4) if count not in given)
            await until(lambda expected=expected: spool.feed.acked.lines == expected)

    scene(forwarding, spool, play)


def test_at_most_so_many_chunks_are_without_acknowledgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop is not kept busy meanwhile, and each acknowledgement lets another chunk go."""
    monkeypatch.setattr(streams, "TURN", 500)
    forwarding, spool = made(tmp_path, request_ack=True)
    spool.write(2000)

    async def play() -> None:
        await until(lambda: forwarding.servers and len(forwarding.servers[0].messages) == CHUNKS)
        (server,) = forwarding.servers
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(server.messages) == CHUNKS
        server.answer(server.chunks[0])
        await until(lambda: len(server.messages) == CHUNKS + 1)
        answered = {server.chunks[0]}
        while not spool.feed.delivered:
            fresh = [chunk for chunk in server.chunks if chunk not in answered]
            server.answer(*fresh)
            answered |= set(fresh)
            await asyncio.sleep(0.001)
        assert server.texts == [f"line {number}" for number in range(2000)]

    scene(forwarding, spool, play)


def test_a_missing_acknowledgement_ends_the_connection(tmp_path: Path) -> None:
    forwarding, spool = made(tmp_path, request_ack=True, read_timeout=0.02)
    spool.write(2)

    async def play() -> None:
        await until(lambda: len(forwarding.servers) == 2 and forwarding.servers[1].messages)
        first, second = forwarding.servers
        assert first.texts == second.texts and first.chunks != second.chunks
        second.answer(*first.chunks)  # late, of another connection
        second.answer(*second.chunks)
        await until(lambda: spool.feed.acked.lines == 2)

    scene(forwarding, spool, play)
    assert spool.owner.changes == ["no acknowledgement of a chunk within 0.02 s", ""]


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", b"\x81\xa3ack\x05"])
def test_an_answer_in_another_protocol(tmp_path: Path, data: bytes) -> None:
    forwarding, spool = made(tmp_path, request_ack=True)
    spool.write(2)

    async def play() -> None:
        await until(lambda: forwarding.servers and forwarding.servers[0].messages)
        forwarding.servers[0].data_received(data)
        await until(lambda: len(forwarding.servers) == 2 and forwarding.servers[1].messages)
        assert spool.feed.acked.lines == 0

    scene(forwarding, spool, play)
    assert spool.owner.changes[0].startswith("the answer to a chunk")


def test_half_an_answer_and_an_end(tmp_path: Path) -> None:
    forwarding, spool = made(tmp_path, request_ack=True)
    spool.write(2)

    async def play() -> None:
        await until(lambda: forwarding.servers and forwarding.servers[0].messages)
        (server,) = forwarding.servers
        server.data_received(answer(server.chunks[0])[:-3])
        server.fin()
        await until(lambda: len(forwarding.servers) == 2 and forwarding.servers[1].messages)
        assert spool.feed.acked.lines == 0

    scene(forwarding, spool, play)


def test_an_acknowledgement_together_with_the_end(tmp_path: Path) -> None:
    forwarding, spool = made(tmp_path, request_ack=True)
    spool.write(2)

    async def play() -> None:
        await until(lambda: forwarding.servers and forwarding.servers[0].messages)
        (server,) = forwarding.servers
        server.answer(*server.chunks)
        server.fin()
        await until(lambda: spool.feed.acked.lines == 2)
        spool.write(1)
        forwarding.notify(spool.feed)
        await until(lambda: len(forwarding.servers) == 2 and forwarding.servers[1].messages)

    scene(forwarding, spool, play)
    assert forwarding.servers[1].texts == ["line 2"] and spool.owner.changes == []


def test_entries_of_which_nothing_is_sent(tmp_path: Path) -> None:
    """They are settled after the chunk before them, and the spool is delivered then."""
    forwarding, spool = made(tmp_path, request_ack=True)
    spool.write(1)

    async def play() -> None:
        await until(lambda: forwarding.servers and forwarding.servers[0].messages)
        spool.append(b"no entry\n")
        forwarding.notify(spool.feed)
        await until(lambda: spool.feed.drained)
        (server,) = forwarding.servers
        assert len(server.messages) == 1 and not spool.feed.delivered
        server.answer(*server.chunks)
        await until(lambda: spool.feed.delivered)

    scene(forwarding, spool, play)


def test_a_feed_that_has_left_and_returned(tmp_path: Path) -> None:
    forwarding, spool = made(tmp_path, request_ack=True)
    spool.write(1)

    async def play() -> None:
        await until(lambda: forwarding.servers and forwarding.servers[0].messages)
        (server,) = forwarding.servers
        spool.feed.rollback()
        forwarding.remove(spool.feed)
        forwarding.add(spool.feed)
        spool.write(1)
        forwarding.notify(spool.feed)
        await until(lambda: len(server.messages) == 2)
        server.answer(server.chunks[0])
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert spool.feed.acked.lines == 0
        server.answer(server.chunks[1])
        await until(lambda: spool.feed.delivered)

    scene(forwarding, spool, play)


def test_without_acknowledgements_a_message_has_no_chunk(tmp_path: Path) -> None:
    forwarding, spool = made(tmp_path)
    spool.write(2)

    async def play() -> None:
        await until(lambda: forwarding.servers and forwarding.servers[0].messages)
        (server,) = forwarding.servers
        ((_, _, options),) = server.messages
        assert options == {"size": 2}
        server.fin()
        await until(lambda: spool.feed.delivered)

    scene(forwarding, spool, play)


def test_the_first_pause_is_an_option(tmp_path: Path) -> None:
    for given, expected in [(0.01, 0.1), (2.5, 2.5), (100.0, 30.0)]:
        document = Spool(tmp_path / str(given), target=Fluentd(port=1, retry_wait=given)).document
        assert FluentdStream(Owner(), document)._first_pause == expected
    assert destinations.FIRST_PAUSE == 0.1 and fluentd.ACK_PATIENCE == 60


@pytest.mark.parametrize("request_ack", [True, False])
def test_a_connection_is_renewed_at_its_age(tmp_path: Path, request_ack: bool) -> None:
    """As `fluentd-async-reconnect-interval` wants it: after everything on the way, none twice."""
    forwarding, spool = made(tmp_path, request_ack=request_ack, async_=True, async_reconnect_interval=5.0)

    async def play() -> None:
        spool.write(2)
        forwarding.notify(spool.feed)
        await until(lambda: forwarding.servers and len(forwarding.servers[0].texts) == 2)
        (server,) = forwarding.servers
        forwarding._opened -= 5.0
        if request_ack:
            spool.write(1)
            forwarding.notify(spool.feed)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert len(server.texts) == 2 and not server.ending, "the answer is awaited first"
            server.answer(*server.chunks)
        await until(lambda: server.ending)
        server.fin()
        if not request_ack:
            spool.write(1)
            forwarding.notify(spool.feed)
        await until(lambda: len(forwarding.servers) == 2 and forwarding.servers[1].texts)
        assert spool.feed.acked.lines == 2

    scene(forwarding, spool, play)
    assert len(forwarding.servers[0].texts) == 2 and len(forwarding.servers[1].texts) == 1
    assert spool.owner.changes == []
