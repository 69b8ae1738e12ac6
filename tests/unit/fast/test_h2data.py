"""The scanner of DATA frames, with h2 as the oracle: the same bytes give the same messages, however
they are cut, and with or without it."""

from __future__ import annotations

import struct

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, StreamEnded, StreamReset, TrailersReceived, WindowUpdated
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings
from hypothesis import given, settings
from hypothesis import strategies as st

from engine._fast.h2data import Scanner

WINDOW, LARGEST, LIMIT = 1 << 20, 1 << 15, 5000
STREAMS = (1, 3, 5)
REGISTERED = (1, 3)
HEADERS = [(":method", "POST"), (":path", "/x"), (":scheme", "http"), (":authority", "x")]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(content: bytes) -> bytes:
    return struct.pack(">BI", 0, len(content)) + content


def connected() -> tuple[H2Connection, H2Connection]:
    """A client that has begun the streams, and a server that knows them."""
    client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    server = H2Connection(H2Configuration(client_side=False, header_encoding=None))
    server.local_settings = Settings(False, {SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
    server.max_inbound_frame_size = LARGEST
    client.initiate_connection()
    server.initiate_connection()
    server.increment_flow_control_window(1 << 24)
    for number in STREAMS:
        client.send_headers(number, HEADERS)
    client.receive_data(server.data_to_send())
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    return client, server


class Seen:
    """What a server has seen of each stream, in order."""

    def __init__(self, server: H2Connection, scanner: Scanner | None) -> None:
        self._server = server
        self._scanner = scanner
        self.data = dict.fromkeys(STREAMS, b"")
        """Bytes of messages that are complete when a scanner took them, else all bytes."""
        self.ends: list[tuple[int, str]] = []
        self.other: list[str] = []
        self.taken = 0
        self.failed = False

    def feed(self, data: bytes) -> None:
        place = 0
        while not self.failed and place < len(data):
            passed = data
            if self._scanner is not None:
                passed, place = self._scan(data, place)
            else:
                place = len(data)
            self._receive(passed)

    def _scan(self, data: bytes, place: int) -> tuple[bytes, int]:
        assert self._scanner is not None
        try:
            passed, found, size, place = self._scanner.feed(data, place)
        except OverflowError:
            self.failed = True
            return b"", place
        self.taken += size
        for number, one in found:
            if isinstance(one, bytes):
                self.data[number] += message(one)
        return passed, place

    def _receive(self, data: bytes) -> None:
        try:
            for event in self._server.receive_data(data) if data else ():
                if isinstance(event, DataReceived):
                    self.data[event.stream_id] += event.data
                elif isinstance(event, StreamEnded | StreamReset | TrailersReceived):
                    self.ends.append((event.stream_id, type(event).__name__))
                elif isinstance(event, WindowUpdated):
                    self.other.append(f"window {event.stream_id}")
                else:
                    self.other.append(type(event).__name__)
        except H2Error:
            self.failed = True


CONTENT = st.binary(max_size=300) | st.integers(0, 1500).map(bytes)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("messages"), st.sampled_from(STREAMS), st.lists(CONTENT, max_size=4), st.integers(20, 600)),
        st.tuples(st.just("padded"), st.sampled_from(STREAMS), CONTENT, st.integers(0, 255)),
        st.tuples(st.just("ping"), st.just(0), st.none(), st.none()),
        st.tuples(st.just("window"), st.sampled_from(STREAMS), st.none(), st.none()),
        st.tuples(st.just("end"), st.sampled_from(STREAMS), st.binary(max_size=20), st.none()),
        st.tuples(st.just("trailers"), st.sampled_from(STREAMS), st.integers(0, 9000), st.none()),
        st.tuples(st.just("reset"), st.sampled_from(STREAMS), st.none(), st.none()),
    ),
    max_size=8,
)


def sent(client: H2Connection, actions: list[tuple[str, int, object, object]]) -> bytes:
    """The bytes of a client that keeps the protocol."""
    ended: set[int] = set()
    for kind, number, what, size in actions:
        if number in ended:
            continue
        if kind == "messages":
            assert isinstance(what, list) and isinstance(size, int)
            data = b"".join(map(message, what))
            for at in range(0, len(data), size):
                client.send_data(number, data[at : at + size])
        elif kind == "padded":
            assert isinstance(what, bytes) and isinstance(size, int)
            client.send_data(number, message(what), pad_length=size)
        elif kind == "ping":
            client.ping(b"12345678")
        elif kind == "window":
            client.increment_flow_control_window(5, number)
        elif kind == "end":
            assert isinstance(what, bytes)
            client.send_data(number, message(what), end_stream=True)
            ended.add(number)
        elif kind == "trailers":
            assert isinstance(what, int)
            # CONTINUATION follows
            client.send_headers(number, [("x", "é" * what)], end_stream=True)
            ended.add(number)
        else:
            client.reset_stream(number, ErrorCodes.CANCEL)
            ended.add(number)
    return client.data_to_send()


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    found = []
    at = turn = 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        found.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return found


CUTS = st.lists(st.integers(1, 5000) | st.integers(1, 12), min_size=3, max_size=8)


@settings(deadline=None, max_examples=100)
@given(ACTIONS, CUTS)
def test_the_same_as_h2_alone(actions: list[tuple[str, int, object, object]], cuts: list[int]) -> None:
    client, server = connected()
    data = sent(client, actions)
    alone = Seen(server, None)
    alone.feed(data)
    scanner = Scanner(0, LARGEST, LIMIT)
    for number in REGISTERED:
        scanner.register(number, WINDOW, b"")
    both = Seen(connected()[1], scanner)
    for piece in pieces(data, cuts):
        both.feed(piece)
    assert (both.data, both.ends, both.failed) == (alone.data, alone.ends, False)
    assert both.other == alone.other
    assert not any(scanner.forget(number) for number in STREAMS)


@settings(deadline=None, max_examples=100)
@given(ACTIONS, CUTS, st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=12)), max_size=4))
def test_bytes_that_break_the_protocol(
    actions: list[tuple[str, int, object, object]], cuts: list[int], damage: list[tuple[int, bytes]]
) -> None:
    """h2 without the scanner, and with it, see the same until it fails; and never more."""
    client, server = connected()
    data = bytearray(sent(client, actions))
    for at, wrong in damage:
        if data:
            place = at % len(data)
            data[place : place + len(wrong)] = wrong
    alone, seen = Seen(server, None), []
    for piece in pieces(bytes(data), cuts):
        alone.feed(piece)
    scanner = Scanner(0, LARGEST, LIMIT)
    for number in REGISTERED:
        scanner.register(number, WINDOW, b"")
    both = Seen(connected()[1], scanner)
    for piece in pieces(bytes(data), cuts):
        both.feed(piece)
        seen.append(both.failed)
    for number in STREAMS:
        begins = both.data[number][: len(alone.data[number])]
        assert both.failed or alone.failed or number in REGISTERED or begins == alone.data[number]
    if not alone.failed:
        assert both.ends == alone.ends or both.failed


@pytest.mark.parametrize("step", [1, 2, 7, 1 << 20])
def test_what_is_returned(step: int) -> None:
    data = b"PREFACE" + frame(4, 0, 0, b"")
    data += frame(0, 0, 1, message(b"one")[:6]) + frame(0, 8, 1, b"\2" + message(b"one")[6:] + b"\0\0")
    data += frame(0, 1, 1, message(b"")) + frame(0, 0, 5, b"not registered")
    scanner = Scanner(7, LARGEST, LIMIT)
    assert scanner.register(1, WINDOW, b"") == []
    results = [scanner.feed(data[at : at + step]) for at in range(0, len(data), step)]
    assert b"".join(rest for rest, _, _, _ in results) == (
        b"PREFACE" + frame(4, 0, 0, b"") + frame(0, 1, 1, b"") + frame(0, 0, 5, b"not registered")
    )
    assert [one for _, found, _, _ in results for one in found] == [(1, 3), (1, b"one"), (1, b"")]
    assert sum(size for _, _, size, _ in results) == 6 + 5 + 5


def test_data_passes_as_the_same_object() -> None:
    data = frame(6, 0, 0, b"12345678")
    assert Scanner(0, LARGEST, LIMIT).feed(data)[0] is data


@pytest.mark.parametrize("step", [1, 3, 10, 1 << 20])
def test_data_that_comes_with_its_headers(step: int) -> None:
    head, ending, content = frame(1, 4, 3, b"head"), frame(1, 5, 5, b"ends"), frame(0, 0, 3, message(b"three"))
    data = ending + head + content + frame(6, 0, 0, b"12345678")
    scanner, passed, taken, registered = Scanner(0, LARGEST, LIMIT), b"", [], False
    for piece in (data[at : at + step] for at in range(0, len(data), step)):
        place = 0
        while place < len(piece):
            rest, found, _, place = scanner.feed(piece, place)
            passed += rest
            taken += found
            if not registered and passed == ending + head:
                scanner.register(3, WINDOW, b"")
                registered = True
    assert (passed, taken) == (ending + head + frame(6, 0, 0, b"12345678"), [(3, b"three")])


def test_messages_that_are_refused() -> None:
    for wrong in (struct.pack(">BI", 1, 3) + b"abc", struct.pack(">BI", 0, LIMIT + 1)):
        scanner = Scanner(0, LARGEST, LIMIT)
        scanner.register(1, WINDOW, b"")
        assert scanner.feed(frame(0, 0, 1, message(b"x") + wrong + message(b"y")))[1] == [(1, b"x"), (1, None)]
        assert scanner.feed(frame(0, 0, 1, b"more"))[1] == []


def test_an_incomplete_message() -> None:
    scanner = Scanner(0, LARGEST, LIMIT)
    assert scanner.register(1, WINDOW, message(b"one") + message(b"two")[:6]) == [(1, b"one")]
    assert scanner.feed(frame(0, 0, 1, b"wo\0"))[1] == [(1, b"two")]
    assert scanner.forget(1) and not scanner.forget(1)
    assert scanner.feed(data := frame(0, 0, 1, b"rest")) == (data, [], 0, len(data))


def test_a_frame_that_passes_cannot_be_registered_in_its_middle() -> None:
    scanner = Scanner(0, LARGEST, LIMIT)
    data = frame(0, 0, 1, message(b"one"))
    scanner.feed(data[:12])
    assert scanner.passing(1) and not scanner.passing(3)
    scanner.feed(data[12:])
    assert not scanner.passing(1)
    scanner.register(1, WINDOW, b"")
    scanner.feed(data[:12])
    assert not scanner.passing(1), "it is taken"
    scanner.feed(data[12:])
    scanner.forget(1)
    reserved = frame(0, 0, 1 | 1 << 31, message(b"one"))
    scanner.feed(reserved[:12])
    assert scanner.passing(1), "the reserved bit is ignored"


def test_the_window() -> None:
    scanner = Scanner(0, LARGEST, LIMIT)
    scanner.register(1, 10, b"")
    scanner.feed(frame(0, 0, 1, bytes(10)))
    assert scanner.open(1, 5) and not scanner.open(3, 5)
    scanner.feed(frame(0, 0, 1, bytes(5)))
    with pytest.raises(OverflowError, match="stream 1 has sent more than its window"):
        scanner.feed(frame(0, 0, 1, b"x"))
