"""Images and layers across crashes of the engine: killed at every step of load and delete, then
started again.

A child process runs the real store and kills itself (SIGKILL) before its n-th change of the disk,
for every n.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.images.archives import Image, Node, docker_archive, tar
from tests.unit.images.test_store import LOW, Stage

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ROOT = Path(__file__).parents[2]
KEPT = Image([LOW, tar([Node("kept", b"kept")])], ["kept:latest"])
COMING = Image([LOW, tar([Node("a", b"a"), Node("b", b"b")]), tar([Node("c", b"c")])], ["kept:latest", "coming:latest"])

CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from engine.images import layers
from engine.storage import overlay
from engine.storage.content import Content
from engine.storage.records import Records
from engine.system import files
from tests.system.test_layers import COMING, KEPT
from tests.unit.images.test_store import Stage
from tests.support.images.archives import docker_archive

left = int(sys.argv[2])

def counted(owner, name):
    original = getattr(owner, name)
    def step(*args, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **more)
    setattr(owner, name, step)

async def main():
    stage = Stage(Path(sys.argv[1]))
    async with stage:
        counted(Records, "_transact")
        counted(overlay, "_make")
        counted(overlay, "_inherit")
        counted(layers._layer, "apply")
        counted(files, "remove_tree")
        counted(files, "write_atomically")
        counted(files, "sync_file_system")
        counted(files, "temporary_file")
        counted(Content, "delete")
        if sys.argv[3] == "load":
            await stage.load(docker_archive(COMING))
        else:
            await stage.images.delete("kept:latest")
asyncio.run(main())
"""


def killed_at(root: Path, step: int, verb: str) -> bool:
    """Run the child. Returns False if it finished without being killed."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(root), str(step), verb],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def restarted(root: Path, check: Callable[[Stage], Any]) -> None:
    async def main() -> None:
        async with Stage(root) as stage:
            result = check(stage)
            if result is not None:
                await result

    asyncio.run(main())


def is_whole(stage: Stage) -> None:
    """Assert that every image has its layers and its blob, and that nothing else is on the disk."""
    used: set[str] = set()
    for record in stage.images:
        for chain_id in record.chain_ids:
            layer = stage.snapshots.layer(chain_id)
            assert layer is not None and stage.snapshots.layer_path(chain_id).is_dir()
            used.add(str(layer.number))
    layers, blobs, temporary = stage.on_disk()
    assert set(layers) == used and temporary == []
    assert blobs == sorted(record.id[7:] for record in stage.images)


def with_kept(root: Path) -> None:
    async def load(stage: Stage) -> None:
        await stage.load(docker_archive(KEPT))

    restarted(root, load)


def test_killed_at_every_step_of_a_load(tmp_path: Path) -> None:
    step = 1
    seen: set[bool] = set()
    while True:
        root = tmp_path / str(step)
        root.mkdir()
        with_kept(root)
        if not killed_at(root, step, "load"):
            break

        async def check(stage: Stage) -> None:
            is_whole(stage)
            there = any(record.id == COMING.id for record in stage.images)
            assert stage.images.get("kept").id == (COMING.id if there else KEPT.id), (
                "the name moved with the image, or not at all"
            )
            assert stage.images.get(KEPT.id)
            seen.add(there)
            await stage.load(docker_archive(COMING))
            assert stage.images.get("coming").id == stage.images.get("kept").id == COMING.id
            is_whole(stage)

        restarted(root, check)
        step += 1
    assert step > 8 and seen == {False, True}


def test_killed_at_every_step_of_a_delete(tmp_path: Path) -> None:
    step = 1
    seen: set[bool] = set()
    while True:
        root = tmp_path / str(step)
        root.mkdir()
        with_kept(root)
        if not killed_at(root, step, "delete"):
            break

        def check(stage: Stage) -> None:
            is_whole(stage)
            seen.add(len(stage.images) == 1)

        restarted(root, check)
        step += 1
    assert step > 3 and seen == {False, True}
