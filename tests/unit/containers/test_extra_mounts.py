"""Mounts of one run besides those of its record: whose their files are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.containers.extra_mounts import File, placed
from engine.system.detached_mounts import NewFile
from engine.system.user_namespaces import IdMap, Range

IDS = IdMap(uids=(Range(0, 100_000, 1000),), gids=(Range(0, 200_000, 1000),))


@pytest.mark.parametrize(("ids", "owner"), [(None, (5, 6)), (IDS, (100_005, 200_006))])
def test_a_secret_belongs_to_a_user_of_the_container(ids: IdMap | None, owner: tuple[int, int]) -> None:
    async def main() -> None:
        no_namespace: Any = None  # only binds need it
        secret = File(destination="/run/secrets/s", content=b"x", uid=5, gid=6)
        async with placed([secret], no_namespace, Path("/run/root"), ids) as found:
            assert found.beside == [NewFile(b"x", 0o400, *owner)]
            assert found.mounts["/run/secrets/s"].source == "/run/root/0"

    asyncio.run(main())
