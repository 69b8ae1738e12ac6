"""Records: whole transactions, grouped; a failure concerns only its own caller."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.containers.store import ContainerStore
from engine.errors import Conflict, ServerError
from engine.images.record import ImageRecord
from engine.networks.network import NetworkRecord
from engine.storage import schema
from engine.storage.overlay import Snapshot
from engine.storage.records import Change, Records
from engine.storage.snapshots import Layer
from engine.volumes.views import VolumeRecord

DATA = Path(__file__).resolve().parent.parent.parent / "data"


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


def change_file(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def filled(path: Path) -> None:
    """A database with two things, closed."""

    async def main() -> None:
        records = Records(path)
        things = records.table("thing", Thing)
        await records.commit(things.put("a", Thing("one", 1)), things.put("b", Thing("two", 2)))
        records.close()

    asyncio.run(main())


def test_a_record_that_does_not_decode_is_named(path: Path) -> None:
    Records(path).close()
    value = b"\xc1"
    row = f"('thing', 'broken one', x'{value.hex()}', {schema.checksum('thing', 'broken one', value)})"
    change_file(path, f"INSERT INTO record VALUES{row}")
    records = Records(path)
    with pytest.raises(ServerError, match=r"thing broken one .*corrupt"):
        records.table("thing", Thing).load()
    records.close()


@pytest.mark.parametrize(
    "damage",
    [
        # it still decodes
        "UPDATE record SET value = CAST(replace(value, x'6f', x'70') AS BLOB) WHERE key = 'a'",
        "UPDATE record SET value = CAST(value AS TEXT) WHERE key = 'a'",
        "UPDATE record SET checksum = checksum + 1 WHERE key = 'a'",
        "UPDATE record SET kind = 'think' WHERE key = 'a'",
    ],
)
def test_a_damaged_record_is_refused_by_name_and_nothing_is_changed(path: Path, damage: str) -> None:
    filled(path)
    change_file(path, damage)
    before = path.read_bytes()
    with pytest.raises(ServerError, match=r"state\.db is damaged: wrong checksum of thin. a\b.*Nothing was changed"):
        Records(path)
    assert path.read_bytes() == before


def test_any_flipped_byte_is_found_or_harmless(path: Path, tmp_path: Path) -> None:
    """A flipped byte in the free space of a page changes nothing. Any other one makes the engine
    refuse the file.
    """
    filled(path)
    whole = path.read_bytes()
    refused = 0
    copy = tmp_path / "copy.db"
    used = [at for at in range(3 * 4096) if whole[at]]
    for at in random.Random(14).sample(used, 80):
        copy.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            records = Records(copy)
        except ServerError:
            refused += 1
            continue
        assert records.table("thing", Thing).load() == {"a": Thing("one", 1), "b": Thing("two", 2)}
        records.close()
    assert refused > 40


def test_a_newer_or_damaged_file_is_refused(path: Path, tmp_path: Path) -> None:
    Records(path).close()
    change_file(path, "PRAGMA user_version=99")
    with pytest.raises(
        ServerError, match=rf"state\.db was written by a newer engine \(schema 99; .* {schema.SCHEMA}\)"
    ):
        Records(path)
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database" * 1000)
    with pytest.raises(ServerError, match=r"garbage\.db"):
        Records(garbage)


def test_one_engine_at_a_time(path: Path) -> None:
    records = Records(path)
    with pytest.raises(ServerError, match="another engine uses this ROOT"):
        Records(path)
    records.close()
    Records(path).close()


# --- a root that lost its records -----------------------------------------------------------------


def trace_of_engine_id(root: Path) -> None:
    (root / "engine-id").write_text("ABCD\n")


def trace_of_layers(root: Path) -> None:
    (root / "layers" / "100" / "diff").mkdir(parents=True)


def trace_of_a_volume(root: Path) -> None:
    (root / "volumes" / "data").mkdir(parents=True)


@pytest.mark.parametrize("trace", [trace_of_engine_id, trace_of_layers, trace_of_a_volume])
@pytest.mark.parametrize("state", ["missing", "empty", "no records"])
def test_a_used_root_without_records_is_refused(tmp_path: Path, trace: Callable[[Path], None], state: str) -> None:
    trace(tmp_path)
    path = tmp_path / "state.db"
    if state == "empty":
        path.touch()
    elif state == "no records":
        change_file(path, "PRAGMA journal_mode=WAL")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ServerError, match=r"state\.db is missing or empty, but .*Nothing was changed.*move .* away"):
        Records.in_root(tmp_path)
    assert [each for each in sorted(tmp_path.rglob("*")) if "-room" not in each.name] == before


def test_a_fresh_root_and_a_used_one(tmp_path: Path) -> None:
    for name in ("layers/init", "containers", "volumes"):
        (tmp_path / name).mkdir(parents=True)
    Records.in_root(tmp_path).close()
    trace_of_layers(tmp_path)
    trace_of_engine_id(tmp_path)
    Records.in_root(tmp_path).close()


# --- migrations -----------------------------------------------------------------------------------


def test_a_file_of_the_first_schema(path: Path) -> None:
    """tests/data/state-1.db was written by an engine of schema 1: three containers, an image,
    volumes and networks.
    """
    shutil.copy(DATA / "state-1.db", path)
    for _ in range(2):  # the first time it is migrated
        records = Records(path)
        containers = {each.name: each for each in ContainerStore(records).load().values()}
        images = records.table("image", ImageRecord).load()
        volumes = records.table("volume", VolumeRecord).load()
        networks = {each.name: each for each in records.table("network", NetworkRecord).load().values()}
        layers, snapshots = records.table("layer", Layer).load(), records.table("snapshot", Snapshot).load()
        records.close()
        assert set(containers) == {"finished", "web", "anon"}
        assert containers["finished"].status.exit_code == 7 and "A=b" in (containers["finished"].config.env or ())
        web = containers["web"]
        assert web.host.memory == 64 << 20 and web.host.binds == ["data:/data", "/tmp:/host:ro"]
        assert (web.host.pids_limit, web.host.memory_swappiness, web.host.ipc_mode) == (None, None, "shareable")
        assert web.host.kernel_memory is msgspec.UNSET
        assert web.host.restart_policy.name == "on-failure" and web.host.restart_policy.maximum_retry_count == 3
        (image,) = images.values()
        assert sorted(image.tags) == ["docker.io/library/busybox:latest", "docker.io/library/other:v1"]
        assert set(image.chain_ids) == set(layers) and {each.parent for each in containers.values()} == set(layers)
        assert set(snapshots) == {each.id for each in containers.values()}
        assert volumes["data"].labels == {"keep": "yes"} and len(volumes) == 2
        assert [each.anonymous for name, each in volumes.items() if name != "data"] == [True]
        assert {"bridge", "host", "none", "front"} <= set(networks)
        assert networks["front"].labels == {"tier": "front"}
    change = sqlite3.connect(path)
    assert change.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA,)
    change.close()


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(DATA / "state-1.db", path)

    def fails(connection: sqlite3.Connection) -> None:
        schema.MIGRATIONS_OF_TEST[1](connection)
        raise sqlite3.OperationalError("broken on the way")

    monkeypatch.setattr(schema, "MIGRATIONS_OF_TEST", dict(schema.MIGRATIONS), raising=False)
    monkeypatch.setitem(schema.MIGRATIONS, 1, fails)
    with pytest.raises(ServerError, match="broken on the way"):
        Records(path)
    monkeypatch.undo()
    records = Records(path)
    assert len(records.rows("container")) == 3
    records.close()


def test_records_are_rewritten_by_a_migration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(msgspec.Struct):
        title: str
        size: int

    filled(path)

    def renamed(connection: sqlite3.Connection) -> None:
        schema.rewrite(connection, "thing", lambda old: {"title": old["name"], "size": old["size"]})

    monkeypatch.setattr(schema, "SCHEMA", schema.SCHEMA + 1)
    monkeypatch.setitem(schema.MIGRATIONS, schema.SCHEMA - 1, renamed)
    records = Records(path)
    assert records.table("thing", Named).load() == {"a": Named("one", 1), "b": Named("two", 2)}
    records.close()


def test_a_failure_that_is_not_sqlites_is_the_callers_and_the_writer_goes_on(path: Path) -> None:
    async def main() -> None:
        records = Records(path)
        with pytest.raises(ServerError):
            await records.commit(Change("thing", "bad", "text"))  # type: ignore[arg-type]
        await records.commit(records.table("thing", Thing).put("a", Thing("one")))
        records.close()

    asyncio.run(main())


def test_nobody_but_the_owner_reads_the_files(path: Path) -> None:
    path.touch(0o644)
    records = Records(path)
    asyncio.run(records.commit(records.table("thing", Thing).put("a", Thing("secret"))))
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.glob("state.db*")}
    assert len(modes) > 1 and set(modes.values()) == {0o600}, modes
    records.close()


def test_what_is_called_when_changes_are_written(tmp_path: Path) -> None:
    async def run() -> None:
        records = Records(tmp_path / "state.db")
        table = records.table("volume", Thing)
        seen: list[object] = []

        def then() -> None:
            seen.append((threading.current_thread() is threading.main_thread(), records.rows("volume")[0][0]))

        await records.commit(table.put("one", Thing(name="x")), then=then)
        assert seen == [(False, "one")]
        wrong = Change("volume", "two", object())  # type: ignore[arg-type]
        with pytest.raises(ServerError):
            await records.commit(wrong, then=then)
        assert len(seen) == 1, "only of changes that were written"
        records.close()

    asyncio.run(run())


def test_what_is_called_before_changes_are_written(tmp_path: Path) -> None:
    async def run() -> None:
        records = Records(tmp_path / "state.db")
        table = records.table("volume", Thing)
        seen: list[object] = []

        def first() -> None:
            seen.append((threading.current_thread() is threading.main_thread(), records.rows("volume")))

        await records.commit(table.put("one", Thing(name="x")), first=first)
        assert seen == [(False, [])]
        wrong = Change("volume", "two", object())  # type: ignore[arg-type]
        with pytest.raises(ServerError):
            await records.commit(wrong, first=first)
        assert len(seen) == 2, "once, also when the transaction is tried again"
        records.close()

    asyncio.run(run())


def test_a_change_whose_first_step_fails_is_not_written_and_others_are(tmp_path: Path) -> None:
    async def run() -> None:
        records = Records(tmp_path / "state.db")
        table = records.table("volume", Thing)
        began = threading.Event()
        called: list[str] = []

        def fail(error: Exception) -> None:
            raise error

        # the writer waits here, so that the others are one batch
        waiting = asyncio.ensure_future(records.commit(table.put("one", Thing(name="x")), first=began.wait))
        await asyncio.sleep(0)
        refused = Conflict("the directory is in use")
        commits = [
            records.commit(table.put("two", Thing(name="x"))),
            records.commit(
                table.put("three", Thing(name="x")),
                first=lambda: fail(refused),
                then=lambda: called.append("three"),
            ),
            records.commit(table.put("four", Thing(name="x")), first=lambda: fail(OSError(13, "no"))),
            records.commit(table.put("five", Thing(name="x")), then=lambda: called.append("five")),
        ]
        together = asyncio.gather(*commits, return_exceptions=True)
        await asyncio.sleep(0)
        began.set()
        await waiting
        two, three, four, five = await together
        assert two is None and five is None and three is refused
        assert isinstance(four, ServerError) and four.message.endswith("state.db: no")
        assert called == ["five"]
        assert [key for key, _ in records.rows("volume")] == ["five", "one", "two"]
        records.close()

    asyncio.run(run())
