"""A full disk: operations that free space work, those that need space report the reason, and exits
are kept. The tests run on small file systems of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.errors import ServerError
from engine.storage.records import Records
from tests.support.engine.harness import TempEngine, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextlib.contextmanager
def small_disk(kind: str, place: Path, image: Path, size: int) -> Iterator[None]:
    """A file system of that many MiB at `place`."""
    place.mkdir(exist_ok=True)
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}m,mode=700", "tmpfs", str(place)]
    else:
        with open(image, "wb") as file:
            file.truncate(size << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
        mount = ["mount", "-o", "loop,errors=remount-ro", str(image), str(place)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    with small_disk(request.param, place, tmp_path / "image", 20):
        yield place


def fill(place: Path) -> None:
    """Use every free block, as dd in a container would."""
    descriptor = os.open(place / "fill", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, bytes(size))
    finally:
        os.close(descriptor)


class Thing(msgspec.Struct, frozen=True):
    text: str


def test_records_change_and_go_on_a_full_disk(disk: Path) -> None:
    """Existing records can be updated thousands of times, new ones are refused, and all can be
    removed, also after a restart. New ones are accepted again when there is space.
    """

    async def work(restarted: bool) -> None:
        records = Records(disk / "state.db")
        things = records.table("thing", Thing)

        async def refused() -> None:
            for at in range(400):
                await records.commit(things.put(f"new {restarted} {at}", Thing("x" * 2000)))

        if not restarted:
            await asyncio.gather(*(records.commit(things.put(str(at), Thing("x" * 2000))) for at in range(200)))
            fill(disk)
        with pytest.raises(ServerError, match=r"records in .*: no space left on device"):
            await refused()
        for turn in range(8):
            await asyncio.gather(
                *(records.commit(things.put(str(at), Thing("y" * (2000 + turn)))) for at in range(100, 200))
            )
        first, last = (0, 50) if not restarted else (50, 100)
        for at in range(first, last):
            await records.commit(things.delete(str(at)))
        if restarted:
            for key in things.load():
                await records.commit(things.delete(key))
            assert things.load() == {}
            (disk / "fill").unlink()
            await asyncio.sleep(1.1)
            await refused()
        records.close()

    asyncio.run(work(False))
    fill(disk)
    asyncio.run(work(True))


def test_records_survive_a_kill_on_a_full_disk(disk: Path) -> None:
    """Two processes end without `close`. The log keeps its blocks."""
    script = """if True:
        import asyncio, os, sys
        from pathlib import Path
        from engine.storage.records import Records
        from tests.system.test_full_disk import Thing, fill
        place, first = Path(sys.argv[1]), int(sys.argv[2])
        async def main():
            records = Records(place / "state.db")
            things = records.table("thing", Thing)
            if first == 0:
                for at in range(100):
                    await records.commit(things.put(str(at), Thing("x" * 3000)))
                fill(place)
            for at in range(first, first + 40):
                await records.commit(things.delete(str(at)), things.put("99", Thing(str(at) * 500)))
            print(len(things.load()), flush=True)
            os._exit(9)
        asyncio.run(main())
    """
    for first, left in ((0, 60), (40, 20)):
        command = [sys.executable, "-c", script, str(disk), str(first)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (9, f"{left}\n"), done.stderr
    records = Records(disk / "state.db")
    assert len(records.rows("thing")) == 20
    records.close()


@pytest.fixture
def full_engine(tmp_path: Path) -> Iterator[TempEngine]:
    """An engine on an ext4 of 64 MiB, with busybox; not full yet."""
    engine = TempEngine()
    engine.root = tmp_path / "root"
    with small_disk("ext4", engine.root, tmp_path / "image", 64), engine:
        engine.load_busybox()
        yield engine


def test_a_full_disk_is_freed_by_the_api(full_engine: TempEngine) -> None:
    """A container fills the disk. Exits are recorded, lines that are lost are counted, everything
    can be removed, before and after a restart, and then all operations work as before.
    """
    engine = full_engine
    hog = engine.started("sh", "-c", "until [ -e /go ]; do sleep 0.1; done; cat /dev/zero > /x; sleep 1000")
    loud = engine.started("sh", "-c", "trap 'yes | head -c 100000' USR1; while :; do sleep 0.1; done")
    killed = engine.started("sleep", "1000")
    ended = engine.started("sh", "-c", "read x; exit 5", OpenStdin=True)
    idle = engine.create("true", host={"Binds": ["named:/v"]})
    engine.touch(hog, "/go")
    until("the disk is full", lambda: os.statvfs(engine.root).f_bavail == 0)
    fill(engine.root)
    engine.post(f"/containers/{loud}/kill?signal=USR1")
    until("lost lines are counted", lambda: engine.inspect(loud).get("LogDropped", 0) > 0)
    assert engine.log().count(f"{loud}: lines of its output cannot be written to its log, and are lost") == 1
    engine.post(f"/containers/{killed}/kill")
    assert engine.wait(killed) == 137
    answers = [
        engine.request("POST", "/v1.24/containers/create", {"Image": "busybox", "Cmd": ["true"]}) for _ in range(300)
    ]
    refused = [answer for answer in answers if answer.status != 201]
    assert refused, "the disk is not full"
    for answer in refused:
        assert answer.status == 500 and "no space left on device" in answer.json()["message"].lower(), answer
    put = engine.request(
        "PUT", f"/v1.24/containers/{idle}/archive?path=/", big_archive(), {"Content-Type": "application/x-tar"}
    )
    assert put.status == 500 and "no space left on device" in put.json()["message"].lower(), put
    engine.restart()
    fill(engine.root)
    assert engine.inspect(killed)["State"]["ExitCode"] == 137
    lost = engine.inspect(loud)["LogDropped"]
    assert engine.request("GET", "/v1.24/info").json()["LogDropped"] >= lost > 1000
    engine.post(f"/containers/{ended}/kill")
    assert engine.wait(ended) == 137
    engine.terminate()
    fill(engine.root)
    engine.start()
    assert engine.inspect(ended)["State"]["ExitCode"] == 137
    for answer in answers:
        if answer.status == 201:
            removed = engine.request("DELETE", f"/v1.24/containers/{answer.json()['Id']}")
            assert removed.status == 204, removed
    for container in (ended, killed, idle):
        fill(engine.root)
        removed = engine.request("DELETE", f"/v1.24/containers/{container}?v=1")
        assert removed.status == 204, removed
    removed = engine.request("DELETE", "/v1.24/volumes/named")
    assert removed.status == 204, removed
    (engine.root / "fill").unlink()
    for container in (hog, loud):
        removed = engine.request("DELETE", f"/v1.24/containers/{container}?force=1")
        assert removed.status == 204, removed
    assert "LogDropped" not in engine.request("GET", "/v1.24/info").json()
    until("there is space", lambda: os.statvfs(engine.root).f_bavail > 1000)
    time.sleep(1.1)
    assert engine.wait(engine.started("true")) == 0


def test_an_image_goes_from_a_full_disk(full_engine: TempEngine) -> None:
    engine = full_engine
    fill(engine.root)
    engine.restart()
    removed = engine.request("DELETE", "/v1.24/images/busybox")
    assert removed.status == 200, removed
    (engine.root / "fill").unlink()
    time.sleep(1.1)
    engine.load_busybox()


def test_a_disk_that_has_become_read_only(full_engine: TempEngine) -> None:
    """As after an error of the disk. What runs can be stopped, also without a daemon."""
    engine = full_engine
    first, _second = (engine.started("sleep", "1000") for _ in range(2))
    device = subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE", str(engine.root)], capture_output=True, text=True, check=True
    ).stdout.strip()
    Path(f"/sys/fs/ext4/{os.path.basename(device)}/trigger_fs_error").write_text("as a bad sector does")
    with pytest.raises(OSError, match="Read-only file system"):
        (engine.root / "new").touch()
    engine.request("POST", f"/v1.24/containers/{first}/kill")
    created = engine.request("POST", "/v1.24/containers/create", {"Image": "busybox"})
    assert created.status == 500 and "read" in created.message, created
    engine.kill9()
    engine.stop()
    assert not [each for each in engine.present() if str(engine.root) not in each]


def big_archive() -> bytes:
    """A file of 40 MiB of zeros, which take space."""
    import io
    import tarfile

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo("big")
        entry.size = 40 << 20
        tar.addfile(entry, io.BytesIO(b"x" * entry.size))
    return packed.getvalue()
