"""Pull and push, step by step, over a registry and a snapshotter that the test drives: progress,
clients that disconnect, corrupt data, a full disk.

The client's protocol is tested in test_registry.py. Needs root, because layers are extracted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.api.replies import json_lines
from engine.errors import EngineError, NotFound, ServerError
from engine.events import EventLog
from engine.images import pull, push, reference
from engine.images.pull import Downloads
from engine.images.push import Pushing
from engine.images.reference import Reference
from engine.images.registry import Fetched
from engine.images.store import ImageStore
from engine.images.turns import Turns
from engine.storage.content import Content
from engine.storage.records import Records
from engine.system import files
from engine.wire.images import Progress
from tests.support import PATIENCE
from tests.support.fakes.snapshots import Disk, FakeSnapshots
from tests.support.images.archives import Image, Node, digest, directory, docker_archive, tar
from tests.unit.images.test_store import pieces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

LOW = tar([directory("etc"), Node("etc/name", b"low"), Node("noise", os.urandom(100_000))])
HIGH = tar([Node("etc/name", b"high"), Node("more", os.urandom(50_000))])
IMAGE = Image([LOW, HIGH], ["h.example/a/b:t"])
NAME = reference.parse("h.example/a/b:t")
OCI = "application/vnd.oci.image.manifest.v1+json"
HALF = 30_000


class FakeRepository:
    """A repository in memory. `gates`: events that a transfer of a blob waits for in its middle.
    `failures`: exceptions that it raises there."""

    domain, path = "h.example", "a/b"

    def __init__(self, image: Image = IMAGE) -> None:
        config = image.configuration()
        packed = [gzip.compress(layer) for layer in image.layers]
        self.layers = [digest(data) for data in packed]
        self.blobs = {digest(data): data for data in (config, *packed)}
        self.document = {
            "schemaVersion": 2,
            "mediaType": OCI,
            "config": {"digest": digest(config), "size": len(config)},
            "layers": [
                {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest(data), "size": len(data)}
                for data in packed
            ],
        }
        self.manifests: dict[str, bytes] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.failures: dict[str, list[BaseException]] = {}
        self.fetched: list[str] = []
        self.at_work = 0

    # --- read -------------------------------------------------------------------------------------

    async def manifest(self, name: str) -> Fetched:
        await asyncio.sleep(0)
        raw = json.dumps(self.document).encode()
        return Fetched(raw, OCI, digest(raw))

    async def blob(self, name: str, limit: int) -> bytes:
        await asyncio.sleep(0)
        return self.blobs[name]

    async def fetch(
        self,
        name: str,
        size: int,
        target: int,
        report: Callable[[int], None],
        retrying: Callable[[float], None],
    ) -> None:
        self.fetched.append(name)
        self.at_work += 1
        try:
            data = self.blobs[name]
            os.write(target, data[:HALF])
            report(len(data[:HALF]))
            await self.gates.setdefault(name, opened()).wait()
            if self.failures.get(name):
                raise self.failures[name].pop()
            os.write(target, data[HALF:])
            report(len(data))
            if digest(data) != name:
                raise ServerError(f"filesystem layer verification failed for digest {name}")
        finally:
            self.at_work -= 1

    # --- write ------------------------------------------------------------------------------------

    async def has_blob(self, name: str, retrying: Callable[[float], None] = lambda _: None) -> bool:
        await asyncio.sleep(0)
        return name in self.blobs

    async def mount(self, name: str, source: str) -> bool:
        return False

    async def upload(self, source: Callable[[], Any], retrying: Callable[[float], None] = lambda _: None) -> Any:
        self.at_work += 1
        try:
            while True:
                sent = source()
                data = b""
                chunks = sent.chunks()
                try:
                    async for chunk in chunks:
                        data += chunk
                        await self.gates.setdefault("upload", opened()).wait()
                        if self.failures.get("upload"):
                            raise self.failures["upload"].pop()
                except ServerError as error:
                    if "again" not in error.message:
                        raise
                    retrying(1.0)
                    continue
                finally:
                    await chunks.aclose()
                assert sent.digest == digest(data)
                self.blobs[sent.digest] = data
                return sent
        finally:
            self.at_work -= 1

    async def put_manifest(self, name: str, raw: bytes, media_type: str) -> None:
        self.manifests[name] = raw


def opened() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def until(probe: Callable[[], bool]) -> None:
    """Wait until `probe` is true, or until the test's time limit."""
    while not probe():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Transfers:
    """An image store over fakes, and both directions of transfer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records = Records(root / "state.db")
        self.disk = Disk(root)
        self.snapshots = FakeSnapshots(self.disk)
        self.repository = FakeRepository()
        self.images = ImageStore(
            self.records, Content(root), self.snapshots, EventLog(), users=lambda image_id: [], counts=dict
        )
        self.downloads = Downloads(self.images.temporary, 6)
        self.pulled: list[tuple[Reference, bool]] = []

    async def __aenter__(self) -> Transfers:
        await self.images.open()
        self.packing = push.packing_threads()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.images.close()
        self.records.close()

    async def pull(self) -> AsyncGenerator[Progress, None]:
        resolved = await pull.resolve(self.repository, NAME)  # type: ignore[arg-type]
        steps = pull.bring(
            self.images,
            self.downloads,
            self.repository,  # type: ignore[arg-type]
            resolved,
            lambda name, new: self.pulled.append((name, new)),
        )
        try:
            async for progress in steps:
                yield progress
        finally:
            await steps.aclose()

    async def push(self) -> AsyncGenerator[Progress, None]:
        pushing = Pushing(self.images, self.repository, self.packing, Turns(5))  # type: ignore[arg-type]
        steps = pushing.run(push.chosen(self.images, NAME))
        try:
            async for progress in steps:
                yield progress
        finally:
            await steps.aclose()

    async def load(self) -> None:
        async for _ in self.images.load(pieces(docker_archive(IMAGE))):
            pass

    def is_idle(self) -> None:
        """No work is in progress, and only content that images refer to is kept."""
        assert self.downloads._running == {} and self.repository.at_work == 0
        chains = {chain_id for record in self.images for chain_id in record.chain_ids}
        assert self.images.chain_ids() == chains and self.images.layers._making == {}
        assert len(self.disk.directories()) == len(chains)
        assert os.listdir(self.root / "tmp") == []
        kept = {name for record in self.images for name in (record.id, record.manifest) if name}
        assert {f"sha256:{name}" for name in os.listdir(self.root / "content" / "sha256")} == kept


Work = Callable[[Transfers], Awaitable[None]]


def run(root: Path, work: Work) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), Transfers(root) as transfers:
            await work(transfers)
            await transfers.images.close()
            transfers.is_idle()

    asyncio.run(main())


async def all_of(steps: AsyncGenerator[Progress, None]) -> list[Progress]:
    return [progress async for progress in steps]


# --- pull -----------------------------------------------------------------------------------------


def test_the_progress_of_a_pull(tmp_path: Path) -> None:
    async def work(transfers: Transfers) -> None:
        said = await all_of(transfers.pull())
        assert said[0].status == "Pulling from a/b" and said[-1].status.startswith("Digest: sha256:")
        for layer in transfers.repository.layers:
            own = [progress.status for progress in said if progress.id == layer[7:19]]
            assert own[0] == "Pulling fs layer" and own[-1] == "Pull complete"
            ordered = ["Pulling fs layer", "Downloading", "Verifying Checksum", "Download complete", "Extracting"]
            positions = [own.index(status) for status in ordered if status in own]
            assert positions == sorted(positions) and "Download complete" in own
        assert transfers.pulled == [(NAME, True)] and transfers.images.get("h.example/a/b:t").id == IMAGE.id
        again = await all_of(transfers.pull())
        assert [progress.status for progress in again if progress.id != "t"][:2] == ["Already exists"] * 2
        assert transfers.pulled[1:] == [(NAME, False)] and len(transfers.repository.fetched) == 2

    run(tmp_path, work)


def test_two_pulls_share_downloads(tmp_path: Path) -> None:
    async def work(transfers: Transfers) -> None:
        gate = transfers.repository.gates[transfers.repository.layers[0]] = asyncio.Event()
        both = [asyncio.create_task(all_of(transfers.pull())) for _ in range(2)]
        await until(lambda: len(transfers.repository.fetched) == 2)
        both[0].cancel()
        await asyncio.wait([both[0]])
        assert transfers.repository.at_work >= 1, "the other pull still wants it"
        gate.set()
        await both[1]
        assert len(transfers.repository.fetched) == 2 and len(transfers.images) == 1

    run(tmp_path, work)


def steps_of_a_pull() -> range:
    """Step numbers, more than a pull has."""
    return range(1, 18, 2)


@pytest.mark.parametrize("stop", steps_of_a_pull())
def test_a_client_that_leaves_a_pull(tmp_path: Path, stop: int) -> None:
    """The client leaves after each step: the stream is closed, or the task that reads it is
    cancelled."""

    async def work(transfers: Transfers) -> None:
        steps = transfers.pull()
        for _ in range(stop):
            if await anext(steps, None) is None:
                break
        await steps.aclose()
        if not len(transfers.images):
            transfers.is_idle()

        async def read() -> None:
            seen = 0
            async with contextlib.aclosing(transfers.pull()) as steps:
                async for _ in steps:
                    seen += 1
                    if seen == stop:
                        task.cancel()
                        await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.wait([task])

    run(tmp_path, work)


@pytest.mark.parametrize("at", [0, 1])
def test_a_blob_that_is_not_what_its_digest_says(tmp_path: Path, at: int) -> None:
    async def work(transfers: Transfers) -> None:
        repository = transfers.repository
        name = repository.layers[at]
        other = bytearray(repository.blobs[name])
        other[-20] ^= 1
        repository.blobs[name] = bytes(other)
        with pytest.raises(EngineError, match=r"verification failed|damaged|diff_id"):
            await all_of(transfers.pull())
        assert len(transfers.images) == 0 and transfers.pulled == []

    run(tmp_path, work)


def test_a_download_that_fails_for_another_pull(tmp_path: Path) -> None:
    """The first client's credentials failed: the second pull tries with its own."""

    async def work(transfers: Transfers) -> None:
        name = transfers.repository.layers[0]
        gate = transfers.repository.gates[name] = asyncio.Event()
        transfers.repository.failures[name] = [ServerError("denied: not for you")]
        first = asyncio.create_task(all_of(transfers.pull()))
        await until(lambda: name in transfers.repository.fetched)
        second = asyncio.create_task(all_of(transfers.pull()))
        await until(lambda: any(download.users == 2 for download in transfers.downloads._running.values()))
        gate.set()
        with pytest.raises(ServerError, match="not for you"):
            await first
        await second
        assert transfers.repository.fetched.count(name) == 2 and len(transfers.images) == 1

    run(tmp_path, work)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "point", ["temporary file", "blob", "ingest", "directory", "tar-split", "extraction", "commit", "configuration"]
)
def test_a_full_disk_ends_a_pull(tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at any point is an error of the engine and leaves nothing behind. The next pull
    succeeds."""

    def full(*_: Any, **__: Any) -> Any:
        raise FULL

    async def step(name: str) -> None:
        if name.split(maxsplit=1)[0] == point:
            raise ServerError("no space left on device")

    async def work(transfers: Transfers) -> None:
        with monkeypatch.context() as broken:
            if point == "temporary file":
                broken.setattr(files, "temporary_file", full)
            elif point == "configuration":
                broken.setattr(files, "write_atomically", full)
            elif point == "directory":
                broken.setattr(files, "open_directory", full)
            elif point == "tar-split":
                broken.setattr("engine.images.layers.tarsplit.Writer", full)
            elif point == "extraction":
                broken.setattr("engine.images.layers._layer.apply", full)
            elif point == "blob":
                transfers.repository.failures[transfers.repository.layers[1]] = [FULL]
            else:
                transfers.snapshots.step = step
            with pytest.raises(ServerError, match="no space left on device"):
                await all_of(transfers.pull())
            transfers.is_idle()
        transfers.snapshots.step = FakeSnapshots(Disk(tmp_path / "other")).step
        await all_of(transfers.pull())
        assert len(transfers.images) == 1

    run(tmp_path, work)


def test_a_load_does_not_wait_for_a_pull(tmp_path: Path) -> None:
    """A load of the same layers as a pull from a registry that stopped sending. The first to finish
    creates them."""

    async def work(transfers: Transfers) -> None:
        for name in transfers.repository.layers:
            transfers.repository.gates[name] = asyncio.Event()
        pulling = asyncio.create_task(all_of(transfers.pull()))
        await until(lambda: len(transfers.images.layers._making) == 2)
        async with asyncio.timeout(20 * PATIENCE):
            await transfers.load()
        assert not pulling.done()
        for gate in transfers.repository.gates.values():
            gate.set()
        await pulling
        assert len(transfers.images) == 1 and len(transfers.disk.directories()) == 2

    run(tmp_path, work)


# --- push -----------------------------------------------------------------------------------------


def test_the_progress_of_a_push(tmp_path: Path) -> None:
    async def work(transfers: Transfers) -> None:
        await transfers.load()
        transfers.repository.blobs.clear()
        transfers.repository.failures["upload"] = [ServerError("once again")]
        said = await all_of(transfers.push())
        assert said[0].status == "The push refers to repository [h.example/a/b]"
        retried = 0
        for layer in IMAGE.layers:
            own = [progress.status for progress in said if progress.id == digest(layer)[7:19]]
            assert own[0] == "Preparing" and own[-1] == "Pushed" and "Pushing" in own
            retried += own.count("Retrying in 1 second")
        assert retried == 1
        raw = transfers.repository.manifests["t"]
        assert said[-1].aux is not None and said[-1].aux.digest == digest(raw)
        manifest = json.loads(raw)
        sent = [transfers.repository.blobs[layer["digest"]] for layer in manifest["layers"]]
        assert [gzip.decompress(data) for data in sent] == list(IMAGE.layers)
        assert hashlib.sha256(transfers.repository.blobs[IMAGE.id]).hexdigest() == IMAGE.id[7:]
        said = await all_of(transfers.push())
        assert [progress.status for progress in said].count("Layer already exists") == 2

    run(tmp_path, work)


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_client_that_leaves_a_push(tmp_path: Path, stop: int) -> None:
    async def work(transfers: Transfers) -> None:
        await transfers.load()
        transfers.repository.blobs.clear()
        steps = transfers.push()
        for _ in range(stop):
            await anext(steps, None)
        await steps.aclose()
        transfers.is_idle()
        await all_of(transfers.push())
        assert "t" in transfers.repository.manifests

    run(tmp_path, work)


def test_a_push_whose_upload_fails(tmp_path: Path) -> None:
    """The other layer's upload is aborted, and no manifest is put."""

    async def work(transfers: Transfers) -> None:
        await transfers.load()
        transfers.repository.blobs.clear()
        transfers.repository.failures["upload"] = [ServerError("denied")]
        with pytest.raises(ServerError, match="denied"):
            await all_of(transfers.push())
        assert transfers.repository.manifests == {}

    run(tmp_path, work)


def test_a_push_of_a_layer_whose_files_were_changed(tmp_path: Path) -> None:
    async def work(transfers: Transfers) -> None:
        await transfers.load()
        transfers.repository.blobs.clear()
        chain_id = transfers.images.get(IMAGE.id).chain_ids[0]
        (transfers.snapshots.layer_path(chain_id) / "noise").write_bytes(os.urandom(100_000))
        with pytest.raises(ServerError, match=r"have changed since it was extracted|regenerating"):
            await all_of(transfers.push())
        assert transfers.repository.manifests == {}

    run(tmp_path, work)


def test_an_image_that_is_deleted_while_it_is_pushed(tmp_path: Path) -> None:
    """Its layers stay until they have been sent."""

    async def work(transfers: Transfers) -> None:
        await transfers.load()
        transfers.repository.blobs.clear()
        gate = transfers.repository.gates["upload"] = asyncio.Event()
        pushing = asyncio.create_task(all_of(transfers.push()))
        await until(lambda: transfers.repository.at_work > 0)
        await transfers.images.delete(IMAGE.id, force=True)
        assert len(transfers.disk.directories()) == 2
        gate.set()
        await pushing
        assert "t" in transfers.repository.manifests
        with pytest.raises(NotFound):
            push.chosen(transfers.images, NAME)

    run(tmp_path, work)


def test_a_client_that_leaves_ends_the_work_at_once(tmp_path: Path) -> None:
    """This holds for the stream of JSON lines too: once it is closed, no work is in progress."""

    async def work(transfers: Transfers) -> None:
        for name in transfers.repository.layers:
            transfers.repository.gates[name] = asyncio.Event()
        request: Any = SimpleNamespace(version=None)
        lines = json_lines(transfers.pull(), request)
        await anext(lines)
        await anext(lines)
        await until(lambda: transfers.repository.at_work == 2)
        await lines.aclose()
        transfers.is_idle()

    run(tmp_path, work)
