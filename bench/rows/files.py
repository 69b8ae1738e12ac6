"""Files into and out of containers: archives, one small file, a whole root, and the list of
changes.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import statistics
import tarfile
import time
from pathlib import Path
from typing import Any

from bench import image, steps, wire
from bench.engines import Engine
from bench.image import BIG
from bench.job import Figure, Job, Size, cost_figures, costs
from bench.report import Target
from bench.rows.images import Material, with_big

SMALL_FILES, LARGE_SIZE = 5000, 100_000_000


def many_files(path: Path, small: int, large: int) -> None:
    """An archive of small files and a large one, in one directory tree `in/`."""
    pool = image.Pool(7)
    with tarfile.open(path, "w") as archive:
        for at in range(small + 1):
            if at % 100 == 0:
                info = tarfile.TarInfo(f"in/d{at // 100}")
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            length = large if at == small else 100 + at % 4000
            info = tarfile.TarInfo(f"in/d{at // 100}/file{at}")
            info.size, info.mode, info.mtime = length, 0o644, image.EPOCH
            archive.addfile(info, io.BytesIO(pool.piece(length)))


class Archives:
    """One running container. The archive is put into it and read back."""

    def __init__(self, small: int, large: int) -> None:
        self._small, self._large = small, large
        # In memory, so that the client does not read it from the disk.
        self._file = os.fdopen(os.memfd_create("files.tar"))
        self._path = Path(f"/proc/self/fd/{self._file.fileno()}")

    def prepare(self, engine: Engine) -> str:
        if not self._path.stat().st_size:
            many_files(self._path, self._small, self._large)
        with engine.connection() as connection:
            return steps.run(connection, "sleep", "36000")

    def sample(self, engine: Engine, container: str) -> tuple[float, ...]:
        with engine.connection() as connection:
            status, body = connection.ask("GET", f"/containers/{container}/archive?path=/etc/passwd")
            if status != 200:
                raise wire.refusal("GET archive", status, body)
            place = f"/{time.monotonic_ns()}"  # a new one each time, for the reason in Material
            steps.execute(engine, container, "mkdir", place)
            begin = time.perf_counter()
            connection.upload("PUT", f"/containers/{container}/archive?path={place}", str(self._path))
            put = (time.perf_counter() - begin) * 1000
            found = steps.execute(
                engine, container, "sh", "-c", f"cd {place}/in; find . -type f | wc -l; wc -c < d1/file123"
            )
            assert found.split() == [b"%d" % (self._small + 1), b"223"], found
            begin = time.perf_counter()
            size = wire.Download(engine.socket, "GET", f"/containers/{container}/archive?path={place}/in").skip()
            get = (time.perf_counter() - begin) * 1000
            assert size > self._large + self._small * 1024, size
        return put, get

    @staticmethod
    def finish(engine: Engine, container: str) -> None:
        with engine.connection() as connection:
            steps.remove(connection, container)


def copied(engine: Engine, container: str) -> tuple[float, float]:
    """Milliseconds to put one small file, and to get it. Medians of ten."""
    text = b"small\n" * 100
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("small")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    puts, gets = [], []
    with engine.connection() as connection:
        for _ in range(10):
            begin = time.perf_counter()
            connection.expect(200, "PUT", f"/containers/{container}/archive?path=/tmp", out.getvalue())
            middle = time.perf_counter()
            body = connection.expect(200, "GET", f"/containers/{container}/archive?path=/tmp/small")
            gets.append((time.perf_counter() - middle) * 1000)
            puts.append((middle - begin) * 1000)
            assert text in wire.joined(body)
    return statistics.median(puts), statistics.median(gets)


def looked_up(count: int) -> Any:
    """HEAD of a file in a running container."""

    def sample(engine: Engine, container: str) -> tuple[float, float]:
        target = f"/containers/{container}/archive?path=/lines"
        with engine.connection() as connection:
            [shown] = re.findall(rb"(?im)^x-docker-container-path-stat: (\S+)", connection.head(target))
            stat = json.loads(base64.b64decode(shown))
            assert (stat["name"], stat["size"]) == ("lines", image.LINES_SIZE), stat
            return costs(engine, count, lambda: connection.head(target))

    return sample


def running(engine: Engine) -> str:
    with engine.connection() as connection:
        return steps.run(connection, "sleep", "36000")


def export(material: Material) -> Any:
    def sample(engine: Engine, container: str) -> float:
        begin = time.perf_counter()
        size = wire.Download(engine.socket, "GET", f"/containers/{container}/export").skip()
        elapsed = time.perf_counter() - begin
        assert size > material.big.size, f"{size} bytes of {material.big.size}"
        return elapsed * 1000

    return sample


def exported(material: Material) -> Any:
    prepare_image = with_big(material)

    def prepare(engine: Engine) -> str:
        prepare_image(engine)
        with engine.connection() as connection:
            return steps.create(connection, "sh", Image=BIG)

    return prepare


def changed(count: int) -> Any:
    """Prepare: a container that has created `count` files, a hundred per directory."""
    command = (
        f"i=0; while [ $i -lt {count // 100 - 1} ]; do "
        "mkdir -p /new/$i; (cd /new/$i; touch $(seq 99)); i=$((i+1)); done; touch /new/end"
    )

    def prepare(engine: Engine) -> str:
        with engine.connection() as connection:
            container = steps.run(connection, "sh", "-c", f"{command}; sleep 36000")
            until = time.monotonic() + 60
            while not steps.execute(engine, container, "sh", "-c", "ls /new/end 2>/dev/null || true"):
                assert time.monotonic() < until
                time.sleep(0.1)
        return container

    return prepare


def changes(count: int) -> Any:
    expected = (count // 100 - 1) * 100 + 2

    def sample(engine: Engine, container: str) -> float:
        with engine.connection() as connection:
            begin = time.perf_counter()
            body = connection.expect(200, "GET", f"/containers/{container}/changes")
            elapsed = time.perf_counter() - begin
        found = {one["Path"] for one in json.loads(wire.joined(body)) if one["Path"].startswith("/new")}
        assert len(found) == expected, f"{len(found)} paths, not {expected}"
        return elapsed * 1000

    return sample


def jobs(size: Size, material: Material) -> list[Job]:
    small, large = size.of(SMALL_FILES, 300), size.of(LARGE_SIZE, 2_000_000)
    archives = Archives(small, large)
    paths = size.of(20_000, 1000)
    what = f"{small:,} small files and one of {large // 1_000_000} MB"

    def finish(engine: Engine, container: str) -> None:
        with engine.connection() as connection:
            steps.remove(connection, container)

    return [
        Job(
            "archive",
            [
                Figure("archive-put", f"PUT archive of {what}", "ms", target=Target({"dockerd": 5, "podman": 1})),
                Figure("archive-get", f"GET archive of {what}", "ms", target=Target({"dockerd": 3, "podman": 1})),
            ],
            archives.sample,
            size.rounds(3),
            archives.prepare,
            finish,
            flush=True,
            memory=2 * large,
        ),
        Job(
            "copy",
            [
                Figure("copy-in", "PUT archive of one small file", "ms", target=Target({"dockerd": 1}, at_most=5)),
                Figure("copy-out", "GET archive of one small file", "ms", target=Target({"dockerd": 1}, at_most=5)),
            ],
            copied,
            size.rounds(3),
            running,
            finish,
        ),
        Job(
            "archive-head",
            cost_figures("archive-head", "HEAD archive of one file"),
            looked_up(size.of(100, 3)),
            size.rounds(3),
            running,
            finish,
        ),
        Job(
            "changes",
            [Figure("changes", f"changes of {paths:,} paths", "ms", target=Target({"dockerd": 5, "podman": 1}))],
            changes(paths),
            size.rounds(3),
            changed(paths),
            finish,
        ),
        Job(
            "export",
            [
                Figure(
                    "export",
                    f"export of a root of {450 // size.of(1, 10)} MB",
                    "ms",
                    target=Target({"dockerd": 4, "podman": 1}),
                )
            ],
            export(material),
            size.rounds(2),
            exported(material),
            finish,
            flush=True,
        ),
    ]
