"""The common part of senders: turns, marks, failures and new attempts."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from engine._fast.wireform import Form
from engine.logs.deliveries import Delivery, Syslog
from engine.shipper import destination as module
from engine.shipper import forms
from engine.shipper.destination import FIRST_PAUSE, LONGEST_PAUSE, Destination, Refused, describe
from engine.shipper.feed import Feed
from tests.unit.shipper.spools import Nowhere, Owner, Spool, delivery, number, until


class Scripted(Destination):
    """A sender that settles at once. `failures`: raised by `open`, in turn; None: it succeeds."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        self.failures: list[BaseException | None] = []
        self.breaks: list[BaseException] = []
        """Raised after one feed's turn, which is not settled."""
        self.got: list[tuple[str, list[int]]] = []
        self.opened = self.closed = self.finished = 0
        self.room = 1 << 16

    def form(self, document: Delivery) -> Form:
        assert isinstance(document.target, Syslog)
        return forms.syslog(document, document.target, datagrams=False)

    async def open(self) -> None:
        self.opened += 1
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure

    async def pass_on(self) -> None:
        at = 0
        while True:
            feed = self.next_feed()
            if feed is None:
                await self.wait()
                continue
            formed = feed.format(self.room)
            if formed is None:
                feed.idle()
                continue
            self.notify(feed)
            lines = [number(line.partition(b": ")[2]) for line in formed.wire.splitlines()]
            self.got.append((feed.document.tag, lines))
            at += 1
            self.sent(at, feed)
            if self.breaks:
                raise self.breaks.pop(0)
            self.settle(at)
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.closed += 1

    async def finish(self) -> None:
        self.finished += 1

    @property
    def lines(self) -> list[int]:
        return [line for _, lines in self.got for line in lines]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No pauses between attempts; returns those that there would have been."""
    pauses: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    return pauses


def joined(tmp_path: Path, count: int = 1, **more: Any) -> tuple[Scripted, list[Spool]]:
    """A destination with some feeds."""
    owner = Owner()
    destination = Scripted(owner, delivery())
    spools = []
    for index in range(count):
        spool = Spool(tmp_path / f"spool{index}", tag=f"t{index}", **more)
        spool.feed.destination = destination
        spool.owner = owner
        spools.append(spool)
    return destination, spools


async def served(destination: Scripted, spools: list[Spool]) -> None:
    for spool in spools:
        destination.add(spool.feed)
        destination.notify(spool.feed)


# --- turns ----------------------------------------------------------------------------------------


def test_delivers_what_is_there_and_what_comes(tmp_path: Path) -> None:
    destination, (spool,) = joined(tmp_path)
    spool.write(3)

    async def scene() -> None:
        await served(destination, [spool])
        await until(lambda: spool.feed.delivered)
        spool.write(2)
        destination.notify(spool.feed)
        assert not spool.feed.delivered
        await until(lambda: spool.feed.delivered)
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert destination.lines == [0, 1, 2, 3, 4]
    assert destination.opened == 1


def test_feeds_take_turns(tmp_path: Path) -> None:
    """One that has much does not keep the others from theirs."""
    destination, spools = joined(tmp_path, 4)
    destination.room = 1000
    spools[0].write(500)
    for spool in spools[1:]:
        spool.write(3)

    async def scene() -> None:
        await served(destination, spools)
        await until(lambda: all(spool.feed.delivered for spool in spools))
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert [tag for tag, _ in destination.got[:5]] == ["t0", "t1", "t2", "t3", "t0"]
    by_tag = {f"t{index}": [] for index in range(4)}  # type: dict[str, list[int]]
    for tag, lines in destination.got:
        by_tag[tag] += lines
    assert by_tag == {"t0": list(range(500)), **{f"t{index}": [0, 1, 2] for index in (1, 2, 3)}}


def test_a_feed_is_queued_once(tmp_path: Path) -> None:
    destination, (spool,) = joined(tmp_path)
    for _ in range(5):
        destination.notify(spool.feed)
    assert destination.next_feed() is spool.feed and destination.next_feed() is None


def test_a_feed_that_leaves_has_no_turn(tmp_path: Path) -> None:
    destination, spools = joined(tmp_path, 2)
    for spool in spools:
        destination.feeds.add(spool.feed)
        destination.notify(spool.feed)
    destination.remove(spools[0].feed)
    assert not spools[0].feed.queued
    assert destination.next_feed() is spools[1].feed and destination.next_feed() is None


def test_wait(tmp_path: Path) -> None:
    destination, (spool,) = joined(tmp_path)

    async def scene() -> None:
        assert not await destination.wait(0)
        asyncio.get_running_loop().call_soon(destination.notify, spool.feed)
        assert await destination.wait()
        assert await destination.wait()
        asyncio.get_running_loop().call_soon(destination.interrupt)
        await destination.wait_for_change(None)
        destination.next_feed()
        asyncio.get_running_loop().call_soon(destination.interrupt)
        assert not await destination.wait()

    asyncio.run(scene())


# --- marks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(7))
def test_settle_acknowledges_in_order(tmp_path: Path, at: int) -> None:
    spool = Spool(tmp_path / "spool")
    spool.write(6)
    for index in range(6):
        spool.feed.take(1)
        spool.destination.sent(index + 1, spool.feed)
    spool.destination.settle(at)
    assert spool.feed.acked.lines == at
    assert spool.destination.has_marks(spool.feed) == (at < 6)
    spool.destination.settle(6)
    assert spool.feed.acked.lines == 6 and not spool.destination.has_marks(spool.feed)


def test_marks_of_several_feeds(tmp_path: Path) -> None:
    destination, spools = joined(tmp_path, 2)
    for turn in range(3):
        for index, spool in enumerate(spools):
            spool.write(1)
            spool.feed.take(1)
            destination.sent(10 * turn + index, spool.feed)
    destination.settle(10)
    assert [spool.feed.acked.lines for spool in spools] == [2, 1]


def test_a_feed_that_has_left_and_returned(tmp_path: Path) -> None:
    """Marks from before it left do not settle those that it has since."""
    destination, (spool,) = joined(tmp_path)
    destination.feeds.add(spool.feed)
    spool.write(2)
    spool.feed.take(1)
    destination.sent(1, spool.feed)
    spool.feed.rollback()
    destination.remove(spool.feed)
    destination.settle(1)
    assert spool.feed.acked.lines == 0
    spool.feed.take(1)
    destination.sent(2, spool.feed)
    spool.feed.take(1)
    destination.sent(3, spool.feed)
    destination.settle(2)
    assert spool.feed.acked.lines == 1 and destination.has_marks(spool.feed)
    destination.settle(3)
    assert spool.feed.acked.lines == 2 and not destination.has_marks(spool.feed)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_failure_sends_again_from_what_is_settled(tmp_path: Path, quick: list[float], count: int) -> None:
    destination, (spool,) = joined(tmp_path)
    destination.room = 1
    destination.breaks = [ConnectionResetError(104, "Connection reset by peer") for _ in range(count)]
    spool.write(4)

    async def scene() -> None:
        await served(destination, [spool])
        await until(lambda: spool.feed.delivered)
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert destination.lines == [0] * count + [0, 1, 2, 3]
    assert destination.opened == count + 1 and destination.closed >= count
    assert spool.owner.changes == ["Connection reset by peer", ""]
    assert destination.attempts == 0 and destination.error == ""


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (OSError(-2, "lookup log.example: Name or service not known"), "lookup log.example: Name or service not known"),
        (TimeoutError(), "timed out"),
        (Refused("no  such\nindex"), "no such index"),
        (EOFError(), "EOFError"),
        (ssl.SSLError(1, "wrong version number"), "wrong version number"),
        (ValueError("a fault"), "a fault"),
        (OSError("x" * 300), "x" * 200),
    ],
)
def test_a_target_that_is_away(tmp_path: Path, quick: list[float], failure: Exception, text: str) -> None:
    destination, (spool,) = joined(tmp_path)
    destination.failures = [failure] * 4
    spool.write(1)

    async def scene() -> None:
        await served(destination, [spool])
        await until(lambda: destination.attempts == 3)
        assert destination.error == text and spool.owner.changes == [text]
        await until(lambda: spool.feed.delivered)
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert destination.lines == [0] and spool.owner.changes == [text, ""]
    assert destination.error == "" and destination.attempts == 0


def test_pauses_grow(tmp_path: Path, quick: list[float]) -> None:
    destination, (spool,) = joined(tmp_path)
    destination.failures = [ConnectionRefusedError(111, "Connection refused")] * 30
    spool.write(1)

    async def scene() -> None:
        await served(destination, [spool])
        await until(lambda: spool.feed.delivered)
        await destination.end(orderly=False)

    asyncio.run(scene())
    for index, pause in enumerate(quick[:30]):
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2**index)
        assert longest / 2 <= pause <= longest, index
    assert quick[29] >= LONGEST_PAUSE / 2


def test_reached_without_a_settled_line_keeps_the_pauses(tmp_path: Path) -> None:
    """A target that accepts connections and ends them is tried ever less often."""
    owner = Owner()
    destination = Nowhere(owner, delivery())
    destination.failed(ConnectionResetError(104, "reset"))
    destination.failed(ConnectionResetError(104, "reset"))
    destination.reached()
    assert destination.error == "" and destination.attempts == 2 and owner.changes == ["reset", ""]
    destination.reached()
    assert owner.changes == ["reset", ""]


def test_another_reason_is_no_other_event(tmp_path: Path) -> None:
    owner = Owner()
    destination = Nowhere(owner, delivery())
    destination.failed(ConnectionResetError(104, "reset"))
    since = destination.since
    destination.failed(ConnectionRefusedError(111, "refused"))
    assert owner.changes == ["reset"] and destination.error == "refused" and destination.since == since


def test_the_end(tmp_path: Path) -> None:
    destination, (spool,) = joined(tmp_path)
    spool.write(1)

    async def scene() -> None:
        await served(destination, [spool])
        await until(lambda: spool.feed.delivered)
        await destination.end(orderly=True)
        await destination.end(orderly=True)

    asyncio.run(scene())
    assert destination.finished == 1 and destination.closed == 1


def test_nothing_is_sent_while_it_ends(tmp_path: Path) -> None:
    destination, (spool,) = joined(tmp_path)
    destination.notify(spool.feed)
    destination.ending = True
    assert destination.next_feed() is None


def test_the_end_of_a_target_that_is_away_is_quick(tmp_path: Path) -> None:
    destination, (spool,) = joined(tmp_path)
    destination.failures = [ConnectionRefusedError(111, "refused")] * 50
    spool.write(1)

    async def scene() -> None:
        await served(destination, [spool])
        await until(lambda: destination.error)
        await destination.end(orderly=True)

    asyncio.run(scene())
    assert destination.finished == 0


def test_a_fault_in_one_destination_leaves_others(tmp_path: Path, quick: list[float]) -> None:
    """An exception that no target causes is logged, and the target tried again."""
    destination, (spool,) = joined(tmp_path)
    destination.breaks = [AssertionError("a fault of the sender")]
    spool.write(1)

    async def scene() -> None:
        await served(destination, [spool])
        await until(lambda: spool.feed.delivered)
        await destination.end(orderly=False)

    asyncio.run(scene())
    assert destination.lines == [0, 0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(111, "Connection refused"), "Connection refused"),
        (TimeoutError("no acknowledgement"), "no acknowledgement"),
        (OSError(), "OSError"),
    ],
)
def test_describe(error: BaseException, text: str) -> None:
    assert describe(error) == text


def test_describe_a_certificate() -> None:
    error = ssl.SSLCertVerificationError()
    error.verify_message = "certificate has expired"
    assert describe(error) == "certificate verify failed: certificate has expired"


def test_a_feed_of_another_destination_is_not_notified(tmp_path: Path) -> None:
    """`feeds` are those that are rolled back after a failure."""
    destination, spools = joined(tmp_path, 2)
    for spool in spools:
        destination.feeds.add(spool.feed)
        spool.write(1)
        spool.feed.take(1)
    destination.remove(spools[0].feed)

    async def scene() -> None:
        await destination.abandon()

    asyncio.run(scene())
    feeds: list[Feed] = [spool.feed for spool in spools]
    assert [feed.queued for feed in feeds] == [False, True] and [feed.at.lines for feed in feeds] == [1, 0]
