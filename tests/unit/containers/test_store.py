"""The rows of containers: a deleted row stays deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.containers.store import ContainerRecord, ContainerStore
from engine.errors import NotFound, ServerError
from engine.storage.records import Records
from engine.wire.containers import Config, HostConfig


def _record(name: str = "web") -> ContainerRecord:
    return ContainerRecord(
        id="a" * 64,
        name=name,
        created=1,
        image_id="",
        parent="",
        path="sh",
        args=(),
        config=Config(),
        host=HostConfig(),
    )


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "state.db")


def test_a_deleted_record_cannot_be_saved_again(records: Records) -> None:
    async def story() -> None:
        store = ContainerStore(records)
        await store.add(_record())
        deleting = asyncio.create_task(store.delete(_record().id))
        # its deletion is queued: a later save would write the row again
        await asyncio.sleep(0)
        with pytest.raises(NotFound):
            await store.save(_record("again"))
        await deleting
        with pytest.raises(NotFound):
            await store.save(_record("again"))

    asyncio.run(story())
    assert ContainerStore(records).load() == {}
    records.close()


def test_a_failed_delete_leaves_it_as_it_was(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ServerError("disk full")

    async def story() -> None:
        store = ContainerStore(records)
        await store.add(_record())
        with monkeypatch.context() as patch:
            patch.setattr(records, "commit", fail)
            with pytest.raises(ServerError):
                await store.delete(_record().id)
            with pytest.raises(ServerError):
                await store.add(_record().__class__(**{**_as_dict(_record()), "id": "b" * 64}))
        assert "b" * 64 not in store
        await store.save(_record("kept"))

    asyncio.run(story())
    assert ContainerStore(records).load()["a" * 64].name == "kept"
    records.close()


def _as_dict(record: ContainerRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
