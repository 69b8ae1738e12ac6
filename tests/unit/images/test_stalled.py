"""Clients and registries that stop sending in the middle block no other work on images, however
many they are.

Needs root, because layers are extracted.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gzip
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from engine.images import archive, importing
from engine.images.reference import with_tag
from tests.support import PATIENCE
from tests.support.images.archives import Image, Node, directory, docker_archive, legacy_archive, tar
from tests.unit.images.test_registry import Ask, Good, Server, asked, blob
from tests.unit.images.test_registry import stage as with_registry
from tests.unit.images.test_store import HIGH, LOW, Stage, pieces

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ENGINE = Path(__file__).resolve().parents[3] / "engine"
LARGE = tar([directory("d"), Node("d/noise", os.urandom(3 << 20))])
SMALL = tar([Node("small", b"small")])
STALLED = 12
"""More than any thread pool has on a small host."""

Tick = Callable[[], Awaitable[object]]


async def never() -> None:
    await asyncio.Event().wait()


async def now_and_then() -> None:
    await asyncio.sleep(0.005)


async def stalling(data: bytes, cut: int, sent: asyncio.Event, tick: Tick) -> AsyncIterator[bytes]:
    """The first `cut` bytes of `data`, then one byte after each `tick`."""
    async for piece in pieces(data[:cut], 100_000):
        yield piece
    sent.set()
    for at in range(cut, len(data)):
        await tick()
        yield data[at : at + 1]


@contextlib.asynccontextmanager
async def stalled_uploads(stage: Stage, compress: Callable[[bytes], bytes], tick: Tick) -> AsyncIterator[None]:
    """Loads and imports that have reached the middle of a layer."""
    tasks, waits = [], []

    async def load(body: AsyncIterator[bytes]) -> None:
        async for _ in stage.images.load(body):
            pass

    for at in range(STALLED):
        data = compress(docker_archive(Image([LARGE], [f"stalled:{at}"])))
        sent = asyncio.Event()
        body = stalling(data, len(data) // 2, sent, tick)
        if at % 3:
            tasks.append(asyncio.create_task(load(body)))
        else:
            tasks.append(asyncio.create_task(importing.bring(stage.images, stage.events, body, "-", None, (), "")))
        waits.append(sent.wait())
    await asyncio.gather(*waits)
    await asyncio.sleep(0.05)
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.parametrize("tick", [never, now_and_then])
@pytest.mark.parametrize("compress", [bytes, lambda data: gzip.compress(data, 1)], ids=["plain", "gzip"])
def test_stalled_uploads_hold_nobody_up(tmp_path: Path, compress: Callable[[bytes], bytes], tick: Tick) -> None:
    async def work() -> None:
        async with Stage(tmp_path) as stage:
            before = await stage.load(docker_archive(Image([LOW], ["before:latest"])))
            assert before
            async with asyncio.timeout(30 * PATIENCE), stalled_uploads(stage, compress, tick):
                await stage.load(docker_archive(Image([LOW, HIGH], ["plain:latest"])))
                await stage.load(gzip.compress(docker_archive(Image([LOW, SMALL], ["packed:latest"]))))
                await stage.load(legacy_archive(Image([HIGH, SMALL], ["legacy:latest"])))
                for data in (SMALL, gzip.compress(HIGH)):
                    tag = with_tag("imported", "x")
                    await importing.bring(stage.images, stage.events, pieces(data), "-", tag, (), "")
                # As a commit does, with a layer that is already in a file.
                async with archive.received(pieces(LARGE), stage.images.temporary, stage.images.layers) as span:
                    await stage.images.layers.digest_of(span)
            assert stage.on_disk()[2] == []

    asyncio.run(work())


def test_stalled_registries_hold_nobody_up(tmp_path: Path) -> None:
    """Layers that are extracted while they arrive from registries that stopped sending."""

    def image() -> Image:
        return Image([tar([Node(f"{at}", os.urandom(200_000))]) for at in range(6)])

    async def work() -> None:
        goods = [Good(image()) for _ in range(3)]

        async def half(ask: Ask) -> None:
            good = next(good for good, server in zip(goods, servers, strict=True) if ask in server.asked)
            data = good.blobs[ask.path.rpartition("/")[2]]
            await ask.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) // 2])
            await never()

        async with contextlib.AsyncExitStack() as stack:
            _, puller = await stack.enter_async_context(with_registry(tmp_path, goods[0], max_downloads=20))
            servers = [await stack.enter_async_context(Server(good)) for good in goods]
            for good in goods:
                good.special = {blob(at, good): half for at in range(len(good.layers))}
            pulls = [asyncio.create_task(puller.pull(f"{server.host}/a/b")) for server in servers]
            await asked(lambda: all(sum("/blobs/" in ask.path for ask in server.asked) >= 6 for server in servers))
            await asyncio.sleep(0.3)
            async with asyncio.timeout(20 * PATIENCE):
                await puller.stage.load(docker_archive(Image([LOW, HIGH], ["plain:latest"])))
                await puller.stage.load(gzip.compress(legacy_archive(Image([HIGH, SMALL], ["legacy:latest"]))))
            for pull in pulls:
                assert not pull.done()
                pull.cancel()
            await asyncio.wait(pulls)

    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


POOLS = {
    "containers/packing.py": "compresses log files that are complete",
    "containers/stats.py": "reads files of cgroups and of /proc",
    "images/layers.py": "extraction and digests of complete bytes, never of those that are still being received",
    "images/push.py": "packs layers that are here; the chunks wait for the registry on the loop",
    "networks/drivers.py": "exchanges with the kernel",
    "networks/dns/resolver.py": "opens sockets in namespaces; what they ask is awaited on the loop",
    "storage/overlay.py": "counts the files of layers and containers",
    "system/detached_mounts.py": "mounts of the engine; what waits for a client has threads without a bound",
    "system/threads.py": "asyncio.to_thread, in the care of its callers; what waits has threads without a bound",
    "volumes/local.py": "the engine's own directories; file systems of others have HostPaths",
}
"""The code allowed to create a pool of threads, with the reason why its work never waits for a
client."""


def test_who_may_have_a_pool() -> None:
    """A thread of a shared pool that waits for a client blocks all other users of the pool."""
    found = set()
    for path in ENGINE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Threads":
                found.add(str(path.relative_to(ENGINE)))
    assert found == POOLS.keys()
