"""Image builds by POST /build: steps and a context without and with the cache, many metadata steps,
many small files, one big file, independent stages, and the memory that builds leave.

The contexts are tar archives on disk with the same bytes in every run. A sample asserts that the
build ended with an image, and that the image is the expected one where the id tells it.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import steps, wire
from bench.engines import Engine
from bench.image import EPOCH, Pool
from bench.job import Figure, Job, Size
from bench.meanwhile import Meanwhile
from bench.report import Target
from bench.rows.images import Material
from bench.rows.resources import settled

FILES, FILE_SIZE = 2000, 2000
SMALL_FILES, SMALL_SIZE = 10_000, 4096
BIG_SIZE = 1 << 30
STAGES = 4

STEPS = f"""\
FROM {steps.IMAGE}
ENV LANG=C MODE=production
WORKDIR /app
RUN mkdir -p /var/cache/app && echo prepared > /var/cache/app/state
COPY . /app/
RUN find /app -type f | wc -l > /var/cache/app/count
RUN sort /var/cache/app/count > /var/cache/app/sorted
CMD ["sh", "-c", "cat /var/cache/app/sorted"]
"""
"""Eight steps, three of them RUN."""


def archive(path: Path, dockerfile: str, files: Iterable[tuple[str, bytes]] = ()) -> Path:
    """Write a context."""
    with tarfile.open(path, "w") as context:
        for name, data in [("Dockerfile", dockerfile.encode()), *files]:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o644, EPOCH
            context.addfile(info, io.BytesIO(data))
    return path


def tree(count: int, size: int, changed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Files in directories of a hundred. The last one has `changed` in it."""
    pool = Pool(count)
    for at in range(count):
        data = pool.piece(size)
        yield f"src/d{at // 100:03}/file{at}", b"%08d" % changed + data[8:] if at == count - 1 else data


def built(engine: Engine, context: Path, query: str = "") -> str:
    """Build; returns the image's short id. Raises ValueError when the build fails."""
    with engine.connection() as connection:
        body = connection.upload("POST", f"/build?t=built&rm=1{query}", str(context))
    said = [json.loads(line) for line in wire.joined(body).splitlines() if line.strip()]
    text = "".join(one.get("stream", "") for one in said)
    _, found, rest = text.rpartition("Successfully built ")
    if not found:
        raise ValueError(f"no image: {text[-500:]} {said[-1:]}")
    return rest.split()[0]


class Contexts:
    """Context archives by name, made at their first use in the directory of `material`."""

    def __init__(self, material: Material, size: Size) -> None:
        self._material = material
        self._size = size

    def path(self, name: str, dockerfile: str, files: Iterable[tuple[str, bytes]] = ()) -> Path:
        found = self._material.directory / f"context-{name}.tar"
        return found if found.exists() else archive(found, dockerfile, files)

    def steps(self, changed: int = 0) -> Path:
        return self.path(f"steps{changed}", STEPS, tree(self._size.of(FILES, 200), FILE_SIZE, changed))

    def small_files(self, changed: int) -> Path:
        files = tree(self._size.of(SMALL_FILES, 1000), SMALL_SIZE, changed)
        return self.path(f"small{changed}", f"FROM {steps.IMAGE}\nCOPY . /app/\n", files)

    def big_file(self, _: int) -> Path:
        data = random.Random(1).randbytes(1 << 20) * (self._size.of(BIG_SIZE, BIG_SIZE // 10) >> 20)
        return self.path("big", f"FROM {steps.IMAGE}\nENV a=b\n", [("big", data)])

    @property
    def labels(self) -> Path:
        lines = "".join(f"LABEL number.{at}=value-{at}\n" for at in range(99))
        return self.path("labels", f"FROM {steps.IMAGE}\n{lines}")

    @property
    def stages(self) -> Path:
        lines = [f"FROM {steps.IMAGE} AS stage{at}\nRUN sleep 1; echo {at} > /out{at}\n" for at in range(STAGES)]
        copies = [f"COPY --from=stage{at} /out{at} /\n" for at in range(STAGES)]
        return self.path("stages", "".join([*lines, f"FROM {steps.IMAGE}\n", *copies]))

    @property
    def small(self) -> Path:
        return self.path("tiny", f'FROM {steps.IMAGE}\nCOPY a /a\nRUN echo b > /b\nCMD ["c"]\n', [("a", b"a")])


def milliseconds(engine: Engine, context: Path, query: str = "") -> tuple[float, str]:
    """The time of a build, and the image."""
    begin = time.perf_counter()
    image = built(engine, context, query)
    return (time.perf_counter() - begin) * 1000, image


def numbers(context: Callable[[int], Path], count: int, first: int) -> Any:
    """Prepare: `count` contexts before the first sample. Each differs in one file, so that no
    engine has its layer.
    """

    def prepare(_: Engine) -> Iterator[int]:
        for number in range(first, first + count):
            context(number)
        return itertools.count(first)

    return prepare


def from_nothing(contexts: Contexts, count: int) -> Any:
    def sample(engine: Engine, numbers: Iterator[int]) -> float:
        elapsed, image = milliseconds(engine, contexts.steps(next(numbers)), "&nocache=1")
        with engine.connection() as connection:
            right = f"test $(cat /var/cache/app/sorted) = {count + 1}"  # and the Dockerfile
            container = steps.run(connection, "sh", "-c", right, Image=image)
            assert steps.wait(connection, container) == 0, "not all files are in the image"
            steps.remove(connection, container)
        return elapsed

    return sample


def cached(contexts: Contexts) -> Any:
    def sample(engine: Engine, image: str) -> float:
        elapsed, again = milliseconds(engine, contexts.steps())
        assert again == image, f"{again}, not {image} again"
        return elapsed

    return sample


def one_changed(contexts: Contexts) -> Any:
    """The context with another byte in one file each time. It is written before the time."""

    def sample(engine: Engine, seen: tuple[Iterator[int], set[str]]) -> float:
        numbers, images = seen
        elapsed, image = milliseconds(engine, contexts.steps(next(numbers)))
        assert image not in images, f"{image} again"
        images.add(image)
        return elapsed

    return sample


def metadata(contexts: Contexts) -> Any:
    def sample(engine: Engine, _: Any) -> float:
        elapsed, image = milliseconds(engine, contexts.labels, "&nocache=1")
        with engine.connection() as connection:
            labels = connection.json("GET", f"/images/{image}/json")["Config"]["Labels"]
        assert {name: value for name, value in labels.items() if name.startswith("number.")} == {
            f"number.{at}": f"value-{at}" for at in range(99)
        }
        return elapsed

    return sample


def received(place: Callable[[int], Path]) -> Any:
    def sample(engine: Engine, numbers: Iterator[int]) -> tuple[float, ...]:
        context = place(next(numbers))
        with Meanwhile(engine) as meanwhile:
            elapsed, _image = milliseconds(engine, context, "&nocache=1")
        return elapsed, meanwhile.ping, meanwhile.memory

    return sample


def written(contexts: Contexts) -> Any:
    """A big context, and how many times as long that takes as copying it to a file."""
    received_ = received(contexts.big_file)

    def sample(engine: Engine, state: Any) -> tuple[float, ...]:
        found = received_(engine, state)
        return *found, found[0] / _copied(contexts.big_file(0), engine.base)

    return sample


def _copied(source: Path, directory: Path) -> float:
    """Milliseconds to read a file from the page cache and write it to another one."""
    buffer = memoryview(bytearray(1 << 20))
    with open(source, "rb", 0) as file, tempfile.TemporaryFile(dir=directory, buffering=0) as copy:
        begin = time.perf_counter()
        while size := file.readinto(buffer):
            copy.write(buffer[:size])
        return (time.perf_counter() - begin) * 1000


def side_by_side(contexts: Contexts) -> Any:
    def sample(engine: Engine, _: Any) -> float:
        return milliseconds(engine, contexts.stages, "&nocache=1")[0]

    return sample


def left_in_memory(contexts: Contexts, count: int) -> Any:
    """MiB of anonymous memory that `count` builds leave."""

    def sample(engine: Engine, _: Any) -> float:
        def work(times: int) -> float:
            for _ in range(times):
                built(engine, contexts.small, "&nocache=1")
            settled(engine)
            return engine.memory("Anonymous") / (1 << 20)

        before = work(20)
        return work(count) - before

    return sample


def jobs(size: Size, material: Material) -> list[Job]:
    contexts = Contexts(material, size)
    files, small, big = size.of(FILES, 200), size.of(SMALL_FILES, 1000), size.of(BIG_SIZE, BIG_SIZE // 10)
    rounds, builds = size.rounds(3), size.of(100, 10)
    what = f"8 steps, 3 of them RUN, and {files:,} files"

    def warm(engine: Engine) -> str:
        return built(engine, contexts.steps())

    def changed(engine: Engine) -> tuple[Iterator[int], set[str]]:
        return numbers(contexts.steps, rounds + 1, 1)(engine), {warm(engine)}

    def figure(name: str, text: str, target: Target, unit: str = "ms") -> Figure:
        return Figure(name, text, unit, target=target)

    def meanwhile(name: str) -> list[Figure]:
        return [
            Figure(f"{name}-ping", "the slowest answer to a ping meanwhile", "ms", target=Target(at_most=20)),
            Figure(f"{name}-memory", "the most memory that it took for that", "MiB", target=Target(at_most=150)),
        ]

    return [
        Job(
            "build",
            [figure("build", f"a build of {what}, nothing cached", Target({"dockerd": 8}, 400))],
            from_nothing(contexts, files),
            rounds,
            prepare=numbers(contexts.steps, rounds + 1, 100),
            flush=True,
        ),
        Job(
            "build-cached",
            [figure("build-cached", "the same, all cached", Target({"dockerd": 8}, 80))],
            cached(contexts),
            rounds,
            prepare=warm,
            flush=True,
        ),
        Job(
            "build-changed",
            [figure("build-changed", f"the same with one of {files:,} files changed", Target({"dockerd": 5}, 250))],
            one_changed(contexts),
            rounds,
            prepare=changed,
            flush=True,
        ),
        Job(
            "build-metadata",
            [figure("build-metadata", "a build of 100 steps that change only the config", Target({"dockerd": 5}, 60))],
            metadata(contexts),
            warm=False,
        ),
        Job(
            "build-files",
            [
                figure(
                    "build-files",
                    f"COPY of a context of {small:,} files of 4 KB, one of them new",
                    Target({"dockerd": 5}, 1000),
                ),
                *meanwhile("build-files"),
            ],
            received(contexts.small_files),
            rounds,
            prepare=numbers(contexts.small_files, rounds, 1),
            warm=False,
            flush=True,
            memory=200 << 20,
        ),
        Job(
            "build-big-file",
            [
                figure("build-big-file", f"a context of one file of {big >> 20} MiB", Target({"dockerd": 1})),
                *meanwhile("build-big-file"),
                figure("build-big-file-written", "the same / the time to copy the file", Target(at_most=1.3), "x"),
            ],
            written(contexts),
            size.rounds(3),
            prepare=numbers(contexts.big_file, 1, 0),
            warm=False,
            flush=True,
            memory=3 * big,
        ),
        Job(
            "build-stages",
            [figure("build-stages", f"{STAGES} independent stages that sleep a second", Target(at_most=1500))],
            side_by_side(contexts),
            warm=False,
        ),
        Job(
            "build-memory",
            [
                Figure(
                    "build-memory",
                    f"anonymous memory that {builds} builds leave",
                    "MiB",
                    target=Target(at_most=8),
                )
            ],
            left_in_memory(contexts, builds),
            ours=True,
            idle=0,
        ),
    ]
