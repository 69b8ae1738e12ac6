"""The records of builds: what they say, how long they stay, and what a crash leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from engine.builder.buildkit import history as module
from engine.builder.buildkit.control_messages import Exporter, SolveRequest, StatusResponse, Time, VertexWarning
from engine.builder.buildkit.history import ATTRIBUTES, History, Limits, Listener, Row
from engine.builder.buildkit.history_messages import COMPLETE, DELETED, STARTED, BuildHistoryEvent, BuildHistoryRecord
from engine.builder.buildkit.progress import Progress
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.rpc import protobuf
from engine.storage.records import Change, Records
from tests.support import PATIENCE

HOUR = 3600 * 1_000_000_000


def run(root: Path, work: Callable[[History], Awaitable[None]], limits: Limits | None = None) -> None:
    """Open the history in `root`, and close it after `work`."""

    async def all_of_it() -> None:
        records = Records(root / "state.db")
        try:
            history = History(root, records, limits)
            await history.open()
            await work(history)
            await history.close()
        finally:
            records.close()

    asyncio.run(all_of_it())


def failed(error: BaseException) -> tuple[int, str, bytes]:
    return 2, str(error), b"details of " + str(error).encode()


async def build(history: History, ref: str, *logs: str, error: Exception | None = None, result: bytes = b"") -> None:
    """A build of one step that writes `logs`."""
    progress = Progress(ref)
    request = SolveRequest(ref=ref, attributes={"filename": "Dockerfile"}, exporters=[Exporter("moby", {"name": "a"})])
    with (
        contextlib.suppress(InvalidParameter),
        contextlib.closing(progress),
        history.recorded(request, progress, failed) as outcome,
    ):
        vertex = progress.vertex("[1/1] RUN it")
        for text in logs:
            vertex.log(text)
        vertex.end(str(error or ""))
        if error is not None:
            raise error
        outcome.response = {"image.name": "a"}
        outcome.result = lambda: result
    await history.recent()


async def log_of(history: History, ref: str) -> list[StatusResponse]:
    return [protobuf.decode(message, StatusResponse) async for message in history.log(ref)]


async def blob_of(history: History, digest: str, offset: int = 0, size: int = 0) -> bytes:
    ref, part = history.blob(digest)
    return b"".join([piece async for piece in history.read(ref, part, offset, size)])


def test_a_record_of_a_build(tmp_path: Path) -> None:
    config = secrets.token_bytes(3000)

    async def work(history: History) -> None:
        await build(history, "one", "hello\n", "world\n", result=config)
        check(history)
        assert history.active() == []

    def check(history: History) -> None:
        record = history.find("one")
        assert record is not None and record.error is None and record.completed is not None
        assert (record.attributes, record.response) == ({"filename": "Dockerfile"}, {"image.name": "a"})
        assert record.exporters == [Exporter("moby", {"name": "a"})]
        assert (record.total_steps, record.completed_steps, record.cached_steps) == (1, 1, 0)

    async def again(history: History) -> None:
        check(history)
        messages = await log_of(history, "one")
        assert b"".join(log.message for each in messages for log in each.logs) == b"hello\nworld\n"
        assert messages[-1].vertexes[-1].completed is not None
        record = history.find("one")
        assert record is not None and record.logs is not None and record.result is not None
        plain = await blob_of(history, record.logs.digest)
        assert len(plain) == record.logs.size
        assert f"sha256:{hashlib.sha256(plain).hexdigest()}" == record.logs.digest
        assert await blob_of(history, record.logs.digest, 7, 9) == plain[7:16]
        assert await blob_of(history, record.logs.digest, len(plain)) == b""
        named = record.result.results[0].blob
        assert named is not None and named == record.result.result and await blob_of(history, named.digest) == config
        with pytest.raises(NotFound):
            history.blob("sha256:" + "0" * 64)

    run(tmp_path, work)
    run(tmp_path, again)


def test_a_failure(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        await build(history, "bad", error=InvalidParameter("no such thing"))
        record = history.find("bad")
        assert record is not None and record.error is not None and record.external_error is not None
        assert (record.error.code, record.error.message) == (2, "no such thing")
        assert await blob_of(history, record.external_error.digest) == b"details of no such thing"
        assert record.result is None

    run(tmp_path, work)


def test_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written while the build runs, and cut where it is too long, but for its vertices."""
    monkeypatch.setattr(module, "LOG_BYTES", 1 << 20)

    async def work(history: History) -> None:
        progress = Progress("long")
        with history.recorded(SolveRequest(ref="long"), progress, failed):
            for number in range(40):
                vertex = progress.vertex(f"step {number}")
                for _ in range(10):
                    progress.report(StatusResponse(logs=[], warnings=[VertexWarning(short=b"x" * 6000)]))
                    await progress.room()
                vertex.end()
        progress.close()
        await history.recent()
        record = history.find("long")
        assert record is not None and record.logs is not None
        assert 1 << 20 <= record.logs.size < 2 << 20
        assert (record.total_steps, record.completed_steps, record.warnings) == (40, 40, 400)
        messages = await log_of(history, "long")
        assert len({vertex.digest for each in messages for vertex in each.vertexes if vertex.completed}) == 40

    run(tmp_path, work)


def test_what_leaves_no_record(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        refused = SolveRequest(ref="one", internal=True), SolveRequest(ref="x" * 1000), SolveRequest(ref="\udcff")
        for request in refused:
            with history.recorded(request, Progress("one"), failed):
                assert history.active() == []
        await history.recent()
        assert history.ended() == []
        with pytest.raises(NotFound, match="no build record for ref one"):
            await history.delete("one")
        with pytest.raises(NotFound, match="no build record for ref one"):
            await history.pin("one", True)

    run(tmp_path, work)


def test_passwords_of_urls_are_not_recorded(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        progress = Progress("one")
        with history.recorded(SolveRequest(ref="one", attributes={"context": "https://a:b@c/d.git"}), progress, failed):
            assert [record.attributes for record in history.active()] == [{"context": "https://xxxxx@c/d.git"}]
        progress.close()

    run(tmp_path, work)


def test_texts_that_are_not_utf_8(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        progress = Progress("one")
        request = SolveRequest(ref="one", attributes={"a\udcff": "b\udcff"}, exporters=[Exporter("c\udcff")])
        with (
            contextlib.suppress(InvalidParameter),
            contextlib.closing(progress),
            history.recorded(request, progress, failed),
        ):
            raise InvalidParameter("d")
        await history.recent()
        (record,) = history.ended()
        assert record.attributes == {"a?": "b?"} and record.exporters == [Exporter("c?")]

    run(tmp_path, work)


def test_large_attributes_are_cut(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        exporters = [Exporter("x" * 1000, {"name": "x" * 1000})] * 1000
        request = SolveRequest(ref="one", attributes={"a": "b", "build-arg:X": "x" * (1 << 20)}, exporters=exporters)
        progress = Progress("one")
        with history.recorded(request, progress, failed):
            (record,) = history.active()
            assert record.attributes == {"a": "b"}
            assert record.exporters[0].attributes == {"name": "x" * 1000}
            assert len(protobuf.encode(record)) < 2 * ATTRIBUTES
        progress.close()

    run(tmp_path, work)


def rows(*ages: int, pinned: int = 0, stored: int = 10) -> dict[str, Row]:
    """Records that ended so many hours ago; the first ones are pinned."""
    return {
        str(number): Row(BuildHistoryRecord(completed=Time(1_000_000 - age * 3600), pinned=number < pinned), stored, ())
        for number, age in enumerate(ages)
    }


@pytest.mark.parametrize(
    ("found", "limits", "expected"),
    [
        (rows(1, 2, 3), Limits(2, 0), {"2"}),
        (rows(3, 2, 1), Limits(2, 0), {"0"}),
        (rows(1, 2, 3), Limits(2, 4 * HOUR), set()),
        (rows(1, 2, 5, 6), Limits(1, 4 * HOUR), {"2", "3"}),
        (rows(9, 8, 1, 2, pinned=2), Limits(1, 0), {"3"}),
        (rows(1, 2, 3, stored=module.STORED // 2), Limits(), {"2"}),
        (rows(9, 2, 3, pinned=1, stored=module.STORED // 2), Limits(), {"2"}),
        (rows(*[1] * (module.MOST + 1)), Limits(), {str(module.MOST)}),
    ],
)
def test_what_is_too_much(found: dict[str, Row], limits: Limits, expected: set[str]) -> None:
    assert module._beyond(found, limits, 1_000_000 * 1_000_000_000) == expected


def test_limits_are_kept(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        for number in range(6):
            await build(history, f"ref{number}")
            if number == 0:
                await history.pin("ref0", True)
        await history.settle()
        assert sorted(record.ref for record in history.ended()) == ["ref0", "ref3", "ref4", "ref5"]
        assert len(list((tmp_path / "build" / "history").iterdir())) == 4
        await history.pin("ref0", False)

    async def later(history: History) -> None:
        assert sorted(record.ref for record in history.ended()) == ["ref5"]
        await history.delete("ref5")
        assert not list((tmp_path / "build" / "history").iterdir())

    run(tmp_path, work, Limits(3, 0))
    run(tmp_path, later, Limits(1, 0))


def test_what_a_crash_leaves(tmp_path: Path) -> None:
    """Files without a record are removed, and records without their file."""
    directory = tmp_path / "build" / "history"

    async def work(history: History) -> None:
        for ref in ("whole", "short", "gone"):
            await build(history, ref, secrets.token_hex(1000))

    async def later(history: History) -> None:
        assert [record.ref for record in history.ended()] == ["whole"]
        assert [file.name for file in directory.iterdir()] == [history._path("whole").name]

    run(tmp_path, work)
    names = {ref: hashlib.sha256(ref.encode()).hexdigest()[:32] for ref in ("short", "gone")}
    (directory / names["short"]).write_bytes(b"x")
    (directory / names["gone"]).unlink()
    (directory / ".unfinished").write_bytes(b"x")
    (directory / "unknown").write_bytes(b"x")
    run(tmp_path, later)
    run(tmp_path, later)


def test_a_damaged_file(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        await build(history, "one", secrets.token_hex(1000))
        path = history._path("one")
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(ServerError, match="record of build one: its file is damaged"):
            await log_of(history, "one")

    run(tmp_path, work)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """The build is not recorded, and does not notice."""
    (tmp_path / "build").write_text("a file")

    async def work(history: History) -> None:
        await build(history, "one", "text")
        assert history.ended() == [] and history.active() == []

    run(tmp_path, work)


def test_a_database_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is left without its row, nor a row without its file."""

    async def work(history: History) -> None:
        await build(history, "one", "text")

        async def commit(*_: Change) -> None:
            raise ServerError("the disk is full")

        with monkeypatch.context() as context:
            context.setattr(history._records, "commit", commit)
            await build(history, "one", "again")
            await build(history, "two", "text")
        assert history.ended() == [] and history.active() == []
        assert os.listdir(tmp_path / "build" / "history") == []
        await build(history, "one", "text")
        assert [record.ref for record in history.ended()] == ["one"]

    run(tmp_path, work)


def test_listeners(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        with history.listen() as listener:
            await build(history, "one")
            await history.pin("one", True)
            await history.delete("one")
            found = [await listener.next() for _ in range(4)]
        assert [event.type for event in found] == [STARTED, COMPLETE, COMPLETE, DELETED]
        assert [event.record and event.record.pinned for event in found] == [False, False, True, False]
        assert [event.record and event.record.ref for event in found] == ["one"] * 4
        assert found[0].record is not None and found[0].record.completed is None

    run(tmp_path, work)


def test_a_listener_that_does_not_read() -> None:
    async def work() -> None:
        listener = Listener()
        for _ in range(module.BEHIND + 10):
            listener.add(BuildHistoryEvent())
        with pytest.raises(ServerError, match="behind"):
            await listener.next()

    asyncio.run(work())


def test_a_ref_that_is_used_again(tmp_path: Path) -> None:
    async def work(history: History) -> None:
        await build(history, "one", "first")
        await build(history, "one", "second")
        assert [record.ref for record in history.ended()] == ["one"]
        messages = await log_of(history, "one")
        assert [log.message for each in messages for log in each.logs] == [b"second"]

    run(tmp_path, work)


def test_a_ref_that_is_used_again_at_once(tmp_path: Path) -> None:
    """The record of the first build is still being written."""

    async def work(history: History) -> None:
        first, second = Progress("one"), Progress("one")
        texts = [secrets.token_hex(1 << 16) for _ in range(20)]
        with history.recorded(SolveRequest(ref="one"), first, failed):
            pass
        with history.recorded(SolveRequest(ref="one"), second, failed):
            for text in texts:
                for progress in (first, second):
                    progress.vertex("step").log(text)
                    await progress.room()
            first.close()
            await asyncio.wait([*history._tasks], return_when=asyncio.FIRST_COMPLETED)
            assert [record.ref for record in history.active()] == ["one"]
            assert sum(len(log.message) for report in await log_of(history, "one") for log in report.logs) == 20 << 17
        second.close()
        await history.recent()
        assert not history.active()
        assert sum(len(log.message) for report in await log_of(history, "one") for log in report.logs) == 20 << 17

    run(tmp_path, work)


def test_records_that_are_asked_for_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when another caller has got its answer meanwhile. Other records wait."""
    monkeypatch.setattr(module, "QUIET", 1000 * PATIENCE)

    async def work(history: History) -> None:
        progresses = {ref: Progress(ref) for ref in ("first", "second", "third")}
        callers = {}
        for ref, progress in progresses.items():
            with history.recorded(SolveRequest(ref=ref), progress, failed):
                pass
            if ref != "third":
                callers[ref] = asyncio.create_task(history.recent())
                await asyncio.sleep(0)
        progresses["third"].close()
        for ref, caller in callers.items():
            progresses[ref].close()
            await asyncio.wait_for(caller, 10 * PATIENCE)
            assert history.find(ref) is not None
        assert history.find("third") is None
        await asyncio.wait_for(history.close(), 10 * PATIENCE)
        assert history.find("third") is not None

    run(tmp_path, work)


def test_a_record_is_a_row(tmp_path: Path) -> None:
    """What is in the database has a size that does not grow with the log."""

    async def work(history: History) -> None:
        await build(history, "one", *["x" * 1000] * 200)
        row = history._rows["one"]
        assert len(msgspec.msgpack.encode(row)) < 2000
        assert row.completed <= time.time_ns()

    run(tmp_path, work)
