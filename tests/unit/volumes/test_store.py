"""Volumes and their records when a call is cancelled; tests/api/test_volumes.py has the rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engine.config import Config
from engine.events import EventLog
from engine.storage.records import Change, Records
from engine.volumes.store import VolumeStore
from engine.wire.volumes import VolumeCreate

CALLS: dict[str, Callable[[VolumeStore], Awaitable[object]]] = {
    "create": lambda volumes: volumes.create(VolumeCreate(name="new")),
    "remove": lambda volumes: volumes.remove("old"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_cancelled_call_leaves_rows_files_and_the_list_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The row is written although the caller is cancelled, so the call is completed."""
    tmp_path.joinpath("volumes").mkdir()

    async def main() -> None:
        records = Records(tmp_path / "state.db")
        volumes = VolumeStore(Config(root=tmp_path, run=tmp_path / "run"), records, EventLog())
        await volumes.open({})
        await volumes.create(VolumeCreate(name="old"))
        real, written, go_on = records.commit, asyncio.Event(), asyncio.Event()

        async def slow(*changes: Change) -> None:
            await real(*changes)
            written.set()
            await go_on.wait()

        monkeypatch.setattr(records, "commit", slow)
        calling = asyncio.ensure_future(CALLS[call](volumes))
        await written.wait()
        calling.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([calling])
        assert calling.cancelled()
        shown = {each.name for each in (await volumes.select({}, None))[0]}
        assert shown == {key for key, _ in records.rows("volume")} == {*os.listdir(tmp_path / "volumes")}
        await volumes.close()
        records.close()

    asyncio.run(main())
