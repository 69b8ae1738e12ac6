"""Records: whole transactions, grouped, each caller's fate its own."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec
import pytest

from engine.errors import ServerError
from engine.storage.records import Change, Records


class Thing(msgspec.Struct, frozen=True):
    name: str
    size: int = 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def test_put_load_delete_and_reopen(path: Path) -> None:
    async def main() -> None:
        records = Records(path)
        things = records.table("thing", Thing)
        others = records.table("other", Thing)
        await records.commit(
            things.put("a", Thing("one")), things.put("b", Thing("two", 2)), others.put("a", Thing("x"))
        )
        await records.commit(things.put("a", Thing("new")), things.delete("b"), things.delete("never"))
        await records.commit()
        assert things.load() == {"a": Thing("new")}
        records.close()
        records.close()
        with pytest.raises(ServerError, match="closed"):
            await records.commit(things.delete("a"))

    asyncio.run(main())
    again = Records(path)
    assert again.table("thing", Thing).load() == {"a": Thing("new")}
    assert again.table("other", Thing).load() == {"a": Thing("x")}
    again.close()
    assert not path.with_name("state.db-wal").exists()


def test_many_callers_are_grouped_and_a_bad_change_is_its_callers_alone(path: Path) -> None:
    async def main() -> None:
        records = Records(path)
        things = records.table("thing", Thing)
        bad = Change("thing", "bad", "not bytes".__class__)  # type: ignore[arg-type]  # a type: SQLite refuses to bind it
        commits = [records.commit(things.put(str(at), Thing("x", at))) for at in range(200)]
        commits.insert(100, records.commit(things.put("with bad", Thing("y")), bad))
        results = await asyncio.gather(*commits, return_exceptions=True)
        assert isinstance(results.pop(100), ServerError)
        assert results == [None] * 200
        loaded = things.load()
        assert len(loaded) == 200 and "with bad" not in loaded
        records.close()

    asyncio.run(main())


def test_a_cancelled_callers_changes_are_written(path: Path) -> None:
    async def main() -> None:
        records = Records(path)
        things = records.table("thing", Thing)
        task = asyncio.create_task(records.commit(things.put("a", Thing("one"))))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await records.commit(things.put("b", Thing("two")))
        assert set(things.load()) == {"a", "b"}
        records.close()

    asyncio.run(main())


def test_a_corrupt_record_is_named(path: Path) -> None:
    Records(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO record VALUES('thing', 'broken one', x'c1')")
    connection.close()
    records = Records(path)
    with pytest.raises(ServerError, match=r"thing broken one .*corrupt"):
        records.table("thing", Thing).load()
    records.close()


def test_a_newer_or_damaged_file_is_refused(path: Path, tmp_path: Path) -> None:
    Records(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(ServerError, match="newer engine"):
        Records(path)
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database" * 1000)
    with pytest.raises(ServerError, match=r"garbage\.db"):
        Records(garbage)


def test_nobody_but_the_owner_reads_the_files(path: Path) -> None:
    path.touch(0o644)
    records = Records(path)
    asyncio.run(records.commit(records.table("thing", Thing).put("a", Thing("secret"))))
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.glob("state.db*")}
    assert len(modes) > 1 and set(modes.values()) == {0o600}, modes
    records.close()
