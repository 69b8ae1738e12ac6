"""An image of 450 MB in four layers: loaded, saved, pulled, pushed.

Debian's registry runs in each engine's own network namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from isal import igzip

from bench import steps, wire
from bench.engines import Engine
from bench.image import BIG, Big
from bench.job import Figure, Job, Size
from bench.meanwhile import Meanwhile
from bench.report import Target
from bench.rows import resources
from tests.support.engine.harness import until
from tests.support.images import registry as registries

PORT = 5000
HOST = f"127.0.0.1:{PORT}"


class Material:
    """Images on disk, and in a registry's storage. They are made at their first use and removed by
    `close`.

    Every load and every pull uses another image, and none is deleted in between: ext4 skips inodes
    that were deleted within the last minutes, one by one (`recently_deleted`), which takes longer
    than the engine's own work.
    """

    PULLED = 10
    """Number of the first image that is pulled. Images with lower numbers are loaded."""

    def __init__(self, scale: int, pulls: int) -> None:
        self._scale = scale
        self._pulls = pulls
        self._directory: Path | None = None
        self._big: dict[int, Big] = {}
        self._stored: Path | None = None

    @property
    def directory(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="bench", dir="/tmp"))
        return self._directory

    def image(self, number: int) -> Big:
        if number not in self._big:
            place = self.directory / str(number)
            place.mkdir()
            self._big[number] = Big(place, self._scale, number)
        return self._big[number]

    @property
    def big(self) -> Big:
        """`big:0`."""
        return self.image(0)

    @property
    def stored(self) -> Path:
        """Storage of a registry that has the images to pull, with layers compressed by igzip at its
        best level.
        """
        if self._stored is None:
            with registries.Registry() as registry, ThreadPoolExecutor(2) as pool:
                for number in range(self.PULLED, self.PULLED + self._pulls):
                    _put(registry, pool, self.image(number))
                shutil.copytree(registry.base / "data", self.directory / "data")
            self._stored = self.directory / "data"
        return self._stored

    def close(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = self._stored = None
        self._big.clear()


def _put(registry: registries.Registry, pool: ThreadPoolExecutor, big: Big) -> None:
    registry.put_blob("big", big.configuration)
    document = {
        "schemaVersion": 2,
        "mediaType": registries.DOCKER_MANIFEST,
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": len(big.configuration),
            "digest": big.id,
        },
        "layers": list(pool.map(lambda path: _packed(registry, path), big.layers)),
    }
    registry.put_manifest("big", big.name.partition(":")[2], document, registries.DOCKER_MANIFEST)


def _packed(registry: registries.Registry, path: Path) -> dict[str, Any]:
    packed = igzip.compress(path.read_bytes(), 3, mtime=0)
    return {
        "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "size": len(packed),
        "digest": registry.put_blob("big", packed),
    }


@contextlib.contextmanager
def registry(engine: Engine, storage: Path) -> Iterator[None]:
    """A registry at HOST, for this engine only, with this storage."""
    with tempfile.TemporaryDirectory(prefix="reg", dir="/tmp") as base:
        config = Path(base) / "config.yml"
        log = Path(base) / "log"
        config.write_text(
            "version: 0.1\nlog: {level: info, accesslog: {disabled: true}}\n"
            f"storage: {{filesystem: {{rootdirectory: {storage}}}}}\nhttp: {{addr: {HOST}}}\n"
        )
        with open(log, "wb") as output:
            process = subprocess.Popen(
                engine.namespaces.command(registries.PROGRAM, "serve", str(config)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        engine.namespaces.not_the_engine.add(process.pid)
        try:
            until("the registry listens", lambda: b"listening on" in log.read_bytes() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.kill()
            process.wait()
            engine.namespaces.not_the_engine.discard(process.pid)


def has(engine: Engine, name: str, identifier: str) -> None:
    """Assert that the image exists and has the expected id."""
    with engine.connection() as connection:
        shown = connection.json("GET", f"/images/{name}/json")
    assert shown["Id"].removeprefix("sha256:") == identifier[7:], f"{name} is {shown['Id']}, not {identifier}"


def load(engine: Engine, big: Big) -> None:
    with engine.connection() as connection:
        connection.upload("POST", "/images/load?quiet=1", str(big.archive))


def loaded(material: Material) -> Any:
    def sample(engine: Engine, numbers: Iterator[int]) -> tuple[float, ...]:
        big = material.image(next(numbers))
        with Meanwhile(engine) as meanwhile:
            begin = time.perf_counter()
            load(engine, big)
            elapsed = time.perf_counter() - begin
        has(engine, big.name, big.id)
        return elapsed * 1000, meanwhile.ping, meanwhile.memory

    return sample


def saved(material: Material) -> Any:
    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        with Meanwhile(engine) as meanwhile:
            begin = time.perf_counter()
            size = wire.Download(engine.socket, "GET", f"/images/{BIG}/get").skip()
            elapsed = time.perf_counter() - begin
        assert size > material.big.size, f"{size} bytes of an image of {material.big.size}"
        return elapsed * 1000, meanwhile.ping, meanwhile.memory

    return sample


def pulled(material: Material) -> Any:
    def sample(engine: Engine, numbers: Iterator[int]) -> tuple[float, ...]:
        big = material.image(next(numbers))
        tag = big.name.partition(":")[2]
        with registry(engine, material.stored), engine.connection() as connection, Meanwhile(engine) as meanwhile:
            begin = time.perf_counter()
            body = connection.expect(200, "POST", f"/images/create?fromImage={HOST}/big&tag={tag}")
            elapsed = time.perf_counter() - begin
            assert b'"error"' not in body, body[-500:]
        has(engine, f"{HOST}/big:{tag}", big.id)
        return elapsed * 1000, meanwhile.ping, meanwhile.memory

    return sample


def pushed(material: Material) -> Any:
    """Push into a registry that is empty each time."""

    def sample(engine: Engine, _: Any) -> tuple[float, ...]:
        storage = Path(tempfile.mkdtemp(prefix="pushed", dir=material.directory))
        try:
            with registry(engine, storage), engine.connection() as connection:
                connection.expect(201, "POST", f"/images/{BIG}/tag?repo={HOST}/pushed&tag=latest")
                with Meanwhile(engine) as meanwhile:
                    begin = time.perf_counter()
                    body = connection.expect(200, "POST", f"/images/{HOST}/pushed/push?tag=latest")
                    elapsed = time.perf_counter() - begin
                assert b'"error"' not in body, body[-500:]
            blobs = storage / "docker/registry/v2/blobs/sha256" / material.big.id[7:9] / material.big.id[7:]
            assert blobs.exists(), "the registry has not the image's configuration"
        finally:
            shutil.rmtree(storage)
        with engine.connection() as connection:
            connection.ask("DELETE", f"/images/{HOST}/pushed:latest")
        return elapsed * 1000, meanwhile.ping, meanwhile.memory

    return sample


def rest_after_work(material: Material, lives: int) -> Any:
    """PSS once the engine has loaded an image, pulled two, pushed one and run a number of
    containers.
    """

    def live(connection: wire.Connection, _: int) -> None:
        container = steps.run(connection, "true")
        assert steps.wait(connection, container) == 0
        steps.remove(connection, container)

    def sample(engine: Engine, _: Any) -> float:
        tag = material.image(Material.PULLED).name.partition(":")[2]
        storage = Path(tempfile.mkdtemp(prefix="pushed", dir=material.directory))
        try:
            with engine.connection() as connection:
                connection.ask("DELETE", f"/images/{BIG}?force=1")
                load(engine, material.big)
                with registry(engine, material.stored):
                    for _ in range(2):
                        connection.ask("DELETE", f"/images/{HOST}/big:{tag}?force=1")
                        body = connection.expect(200, "POST", f"/images/create?fromImage={HOST}/big&tag={tag}")
                        assert b'"error"' not in body, body[-500:]
                with registry(engine, storage):
                    connection.expect(201, "POST", f"/images/{BIG}/tag?repo={HOST}/pushed&tag=latest")
                    body = connection.expect(200, "POST", f"/images/{HOST}/pushed/push?tag=latest")
                    assert b'"error"' not in body, body[-500:]
                connection.ask("DELETE", f"/images/{HOST}/pushed:latest")
        finally:
            shutil.rmtree(storage)
        steps.side_by_side(engine, list(range(lives)), live)
        return resources.settled(engine) / (1 << 20)

    return sample


def with_images(material: Material, first: int, count: int) -> Any:
    """Prepare: before any sample, generate `count` images from the number `first` on. Those from
    Material.PULLED on are stored in a registry.
    """

    def prepare(_: Engine) -> Iterator[int]:
        for number in range(first, first + count):
            material.image(number)
        if first == Material.PULLED:
            assert material.stored
        return itertools.count(first)

    return prepare


def with_big(material: Material) -> Any:
    """Prepare: load the image."""

    def prepare(engine: Engine) -> None:
        with engine.connection() as connection:
            status, _ = connection.ask("GET", f"/images/{BIG}/json")
        if status != 200:
            load(engine, material.big)
        has(engine, BIG, material.big.id)

    return prepare


def jobs(size: Size, material: Material) -> list[Job]:
    megabytes = 450 // size.of(1, 10)
    rounds = size.rounds(2)
    lives = size.of(1000, 50)

    def job(name: str, what: str, target: Target, sample: Any, prepare: Any, *, writes: bool = False) -> Job:
        figures = [
            Figure(name, f"{what} of an image of {megabytes} MB", "ms", target=target),
            Figure(f"{name}-ping", "the slowest answer to a ping meanwhile", "ms", target=Target(at_most=20)),
            Figure(f"{name}-memory", "the most memory that it took for that", "MiB", target=Target(at_most=150)),
        ]
        memory = megabytes * 1_000_000 if writes else 0
        return Job(name, figures, sample, rounds, prepare=prepare, warm=False, flush=True, memory=memory)

    not_slower = Target({"dockerd": 1, "podman": 1})
    return [
        job(
            *("load", "load", Target({"dockerd": 4, "podman": 1}), loaded(material)),
            with_images(material, 0, rounds),
            writes=True,
        ),
        job("save", "save", not_slower, saved(material), with_big(material)),
        job("push", "push into an empty registry", not_slower, pushed(material), with_big(material)),
        job(
            *("pull", "pull", Target({"dockerd": 3, "podman": 1}), pulled(material)),
            with_images(material, Material.PULLED, rounds),
            writes=True,
        ),
        Job(
            "rest-after-work",
            [
                Figure(
                    "rest-after-work",
                    f"PSS of all engine processes after a load, two pulls, a push and {lives} container lives",
                    "MiB",
                    target=Target(at_most=65),
                )
            ],
            rest_after_work(material, lives),
            prepare=with_images(material, Material.PULLED, 1),
            warm=False,
            idle=0,
        ),
    ]
