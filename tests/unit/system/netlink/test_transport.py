"""The exchange for all families, against a fake kernel that answers with a list of datagrams."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable

import pytest

from engine.system.netlink import codec, transport
from engine.system.netlink.codec import ACK, DONE, DUMP_INTERRUPTED, ERROR, NetlinkError, Request
from engine.system.netlink.transport import NetlinkSocket

Reply = Callable[[list[int]], list[bytes]]


class Kernel:
    """Takes a send, answers with datagrams that `reply` makes of the sequence numbers."""

    def __init__(self, *replies: Reply) -> None:
        self.sent: list[list[tuple[int, int, int, bytes]]] = []
        self._replies = [*replies]
        self._waiting: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append([*codec.read_messages(data)])
        self._waiting += self._replies.pop(0)([sequence for _, _, sequence, _ in self.sent[-1]])

    def recv(self, _: int) -> bytes:
        return self._waiting.pop(0)


def plain(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    size = codec.HEADER.size + len(body)
    return codec.HEADER.pack(size, kind, flags, sequence & 0xFFFFFFFF, 0) + body + bytes(-size & 3)


def outcome(sequence: int, number: int = 0) -> bytes:
    return plain(ERROR, 0x100, sequence, struct.pack("=i", -number) + bytes(16))


def entry(sequence: int, body: bytes, flags: int = 2) -> bytes:
    return plain(24, flags, sequence, body)


def done(sequence: int, number: int = 0, flags: int = 2) -> bytes:
    return plain(DONE, flags, sequence, struct.pack("=i", -number))


@pytest.fixture
def made() -> NetlinkSocket:
    link = NetlinkSocket(socket.NETLINK_ROUTE, buffer=1 << 16)
    link.close()
    return link


def request(what: str = "x", flags: int = 0) -> Request:
    return Request(16, flags, b"body", what)


def play(made: NetlinkSocket, *replies: Reply) -> Kernel:
    kernel = Kernel(*replies)
    made._socket = kernel  # type: ignore[assignment]
    return kernel


def test_each_request_has_its_own_outcome(made: NetlinkSocket) -> None:
    kernel = play(made, lambda n: [outcome(n[0]) + outcome(n[1], errno.EEXIST), outcome(n[2])])
    answers = made.exchange([request("a"), request("b"), request("c")])
    assert [each.error and each.error.errno for each in answers] == [None, errno.EEXIST, None]
    assert str(answers[1].error) == "[Errno 17] b: File exists"
    assert all(flags & ACK for _, flags, _, _ in kernel.sent[0])


def test_answers_of_an_earlier_exchange_are_passed_over(made: NetlinkSocket) -> None:
    play(made, lambda n: [outcome(n[0] - 1, errno.EIO), entry(n[0], b"1234"), outcome(n[0])])
    (answer,) = made.exchange([request()])
    assert (answer.error, answer.bodies) == (None, [b"1234"])


def test_a_look_up_needs_no_acknowledgement(made: NetlinkSocket) -> None:
    kernel = play(made, lambda n: [entry(n[0], b"1234", 0)], lambda n: [outcome(n[0], errno.ENODEV)])
    assert made.exchange([request()], 0, single=True)[0].bodies == [b"1234"]
    (answer,) = made.exchange([request()], 0, single=True)
    assert answer.error is not None and answer.error.errno == errno.ENODEV
    assert not any(flags & ACK for sent in kernel.sent for _, flags, _, _ in sent)


def test_sequence_numbers_wrap(made: NetlinkSocket) -> None:
    made._sequence = 0xFFFFFFFE
    play(made, lambda n: [b"".join(map(outcome, n))], lambda n: [b"".join(map(outcome, n))])
    assert [each.error for each in made.exchange([request()] * 3)] == [None] * 3
    assert [each.error for each in made.exchange([request()] * 3)] == [None] * 3


def test_the_frames_of_a_batch_are_answered_only_on_failure(made: NetlinkSocket) -> None:
    frames = [request("begin"), request("a", ACK), request("end")]
    play(made, lambda n: [outcome(n[1])], lambda n: [outcome(n[0], errno.EPERM)])
    assert [each.error for each in made.exchange(frames, 0)] == [None] * 3
    assert [each.error is not None for each in made.exchange(frames, 0)] == [True, False, False]


def test_a_dump_that_was_interrupted_is_read_again(made: NetlinkSocket) -> None:
    """Otherwise entries may be missing while links are added and removed (netlink(7),
    NLM_F_DUMP_INTR).
    """
    kernel = play(
        made,
        lambda n: [entry(n[0], b"old1"), entry(n[0], b"old3", 2 | DUMP_INTERRUPTED) + done(n[0])],
        lambda n: [entry(n[0], b"old1"), done(n[0], flags=2 | DUMP_INTERRUPTED)],
        lambda n: [entry(n[0], b"new1") + entry(n[0], b"new2"), done(n[0])],
    )
    assert made.dump(request()) == [b"new1", b"new2"]
    assert len(kernel.sent) == 3


def test_a_dump_is_not_read_for_ever(made: NetlinkSocket) -> None:
    kernel = play(made, *[lambda n: [done(n[0], flags=2 | DUMP_INTERRUPTED)]] * transport.DUMPS)
    with pytest.raises(NetlinkError, match="list of links: the list changed during each of") as caught:
        made.dump(request("list of links"))
    assert caught.value.errno == errno.EINTR
    assert len(kernel.sent) == transport.DUMPS


@pytest.mark.parametrize("answer", [outcome, done])
def test_a_dump_that_fails(made: NetlinkSocket, answer: Callable[[int, int], bytes]) -> None:
    play(made, lambda n: [entry(n[0], b"1234"), answer(n[0], errno.ENOENT)])
    with pytest.raises(NetlinkError, match="words: No such file or directory"):
        made.dump(request("words"))
