"""Builds by `docker buildx build`: a directory of the client, of which an engine asks for what it
does not have.

The client is the docker CLI of Debian's newest suite (`.ci/clients`). What it needs itself is in
each figure, so `context-client` has it alone. The files have times of nanoseconds long ago: both
engines keep such files.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import steps
from bench.engines import Engine
from bench.image import EPOCH, Pool
from bench.job import Figure, Job, Size
from bench.report import Target
from bench.rows.images import Material
from bench.wire import Lacks

CLIENT = Path(__file__).resolve().parents[2] / ".venv" / "clients" / "forky"
FILES = 2000
SMALL, LARGE = 2000, 320_000
"""Bytes of a file."""
TIMEOUT = 600

MANY, TINY = 100_000, 200
"""Files of a project, and bytes of each."""

STEPS = f"""\
FROM {steps.IMAGE}
WORKDIR /app
COPY part /app/
RUN find /app -type f | wc -l > /count
"""
"""A third of the files is copied."""
ALL = f"FROM {steps.IMAGE}\nCOPY . /app/\n"

TARGETS = 8
BAKED = f"{STEPS}ARG VALUE\nRUN echo $VALUE > /value\n"
"""Each target has a value of its own, a new one each time."""
FAILS = f"FROM {steps.IMAGE}\nARG VALUE\nRUN echo $VALUE && false\n"
LINES = 60
CHECKED = f"FROM {steps.IMAGE}\nENV NAME1=value\n"
CHECKED += "".join(f"ENV NAME{at}=value$NAME{at - 1}\n" for at in range(2, LINES))
"""Each line uses what the line before it has set."""


class Project:
    """A client's directory, made at its first use."""

    def __init__(self, material: Material, name: str, count: int, file_size: int, dockerfile: str = STEPS) -> None:
        self._material = material
        self._count = count
        self._name = name
        self._file_size = file_size
        self._dockerfile = dockerfile
        self._time = itertools.count(EPOCH * 10**9 + 123_456_789, 1_000_003)

    @property
    def directory(self) -> Path:
        found = self._material.directory / f"project-{self._name}"
        if not found.exists():
            pool = Pool(self._file_size)
            for at in range(self._count):
                place = found / ("part" if at % 3 == 0 else "rest") / f"d{at // 100:03}"
                place.mkdir(parents=True, exist_ok=True)
                self._write(place / f"file{at}", pool.piece(self._file_size))
            found.mkdir(parents=True, exist_ok=True)
            self._write(found / "Dockerfile", self._dockerfile.encode())
        return found

    def _write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        modified = next(self._time)
        os.utime(path, ns=(modified, modified))

    def change(self) -> None:
        """Another content for one of the files that are copied."""
        self._write(self.directory / "part" / "d000" / "file0", os.urandom(self._file_size))


def docker(engine: Engine, *arguments: str, cwd: Path | None = None, status: int = 0) -> str:
    """What the client prints. Raises ValueError when it ends with another status, Lacks if it is
    not installed.
    """
    program = CLIENT / "bin" / "docker"
    if not program.exists():
        raise Lacks("the client is not installed (.ci/clients)")
    config = engine.base / "docker-config"
    config.mkdir(exist_ok=True)
    plugins = config / "cli-plugins"
    if not plugins.exists():
        plugins.symlink_to(CLIENT / "cli-plugins")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "BUILD"))}
    environment |= {"DOCKER_HOST": f"unix://{engine.socket}", "DOCKER_CONFIG": str(config)}
    done = subprocess.run(
        [program, *arguments],
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode != status:
        raise ValueError(f"docker {' '.join(arguments)}: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout.decode()


def built(engine: Engine, project: Project, *arguments: str) -> tuple[tuple[float, float], str]:
    """Milliseconds and the engine's processor time of a build, and the image's id."""
    with tempfile.NamedTemporaryFile() as name:
        command = ("build", "--provenance=false", "-t", "built", "--iidfile", name.name, *arguments, ".")
        return timed(engine, project, *command), Path(name.name).read_text()


def timed(engine: Engine, project: Project, *arguments: str, status: int = 0) -> tuple[float, float]:
    """Milliseconds and the engine's processor time of a command of buildx in the directory."""
    directory = project.directory
    with engine.metered() as meter:
        begin = time.perf_counter()
        docker(engine, "buildx", *arguments, cwd=directory, status=status)
        elapsed = (time.perf_counter() - begin) * 1000
    return elapsed, meter.seconds * 1000


def usable(engine: Engine) -> None:
    """Raises Lacks for an engine without BuildKit."""
    try:
        docker(engine, "buildx", "du")
    except ValueError as error:
        raise Lacks("it has no builds by buildx") from error


def cached(project: Project) -> Any:
    def sample(engine: Engine, image: str) -> tuple[float, float]:
        figures, found = built(engine, project)
        assert found == image, "not from the cache"
        return figures

    return sample


def uncached(project: Project) -> Any:
    def sample(engine: Engine, image: str) -> tuple[float, float]:
        figures, found = built(engine, project, "--no-cache")
        assert found, image
        return figures

    return sample


def first(project: Project) -> Any:
    def sample(engine: Engine, _: str) -> tuple[float, float]:
        docker(engine, "image", "rm", "-f", "built")
        docker(engine, "buildx", "prune", "--all", "--force")
        return built(engine, project)[0]

    return sample


def changed(project: Project) -> Any:
    def sample(engine: Engine, seen: set[str]) -> tuple[float, float]:
        project.change()
        figures, found = built(engine, project)
        assert found not in seen, "the old content was built"
        seen.add(found)
        return figures

    return sample


def baked(project: Project) -> Any:
    def sample(engine: Engine, _: str) -> tuple[float, float]:
        path = project.directory / "docker-bake.json"
        names = [f"target{at}" for at in range(TARGETS)]
        targets = {
            name: {"args": {"VALUE": os.urandom(8).hex()}, "tags": [name], "output": ["type=docker"]} for name in names
        }
        path.write_text(json.dumps({"group": {"default": {"targets": names}}, "target": targets}))
        figures = timed(engine, project, "bake", "--provenance=false")
        for name, target in targets.items():
            value = docker(engine, "run", "--rm", name, "cat", "/value")
            assert value == f"{target['args']['VALUE']}\n", value
        return figures

    return sample


def checked(project: Project) -> Any:
    def sample(engine: Engine, _: Any) -> tuple[float, float]:
        return timed(engine, project, "build", "--check", ".")

    return sample


def failing(project: Project) -> Any:
    def sample(engine: Engine, _: Any) -> tuple[float, float]:
        value = f"VALUE={os.urandom(8).hex()}"
        return timed(engine, project, "build", "--build-arg", value, ".", status=1)

    return sample


def client_alone() -> Callable[[Engine, Any], float]:
    def sample(engine: Engine, _: Any) -> float:
        begin = time.perf_counter()
        docker(engine, "buildx", "du")
        return (time.perf_counter() - begin) * 1000

    return sample


def jobs(size: Size, material: Material) -> list[Job]:
    files, many = size.of(FILES, 100), size.of(MANY, 1000)
    small = Project(material, "small", files, SMALL)
    large = Project(material, "large", files, LARGE)
    tiny = Project(material, "tiny", many, TINY, ALL)
    targets = Project(material, "targets", files, SMALL, BAKED)
    bad, lines = Project(material, "bad", 0, SMALL, FAILS), Project(material, "lines", 0, SMALL, CHECKED)
    megabytes = files * LARGE // 1_000_000
    rounds = size.rounds(5)
    cpu = "the engine's processor time for that"

    def warm(project: Project) -> Callable[[Engine], str]:
        def prepare(engine: Engine) -> str:
            usable(engine)
            # dockerd needs a second look, too: its first build is of other paths
            for _ in range(2):
                image = built(engine, project)[1]
            return image

        return prepare

    def job(
        name: str,
        what: str,
        sample: Any,
        prepare: Callable[[Engine], Any],
        figures: Sequence[Target | None],
        **more: Any,
    ) -> Job:
        """`figures`: the targets of the time and of the engine's processor time."""
        wall, processor = figures
        named = [Figure(name, what, "ms", target=wall), Figure(f"{name}-cpu", cpu, "ms", target=processor)]
        return Job(name, named, sample, rounds, prepare=prepare, **more)

    def beside(ratio: float, processor: Target | None = None) -> tuple[Target, Target]:
        """So many times as fast as dockerd, and with less processor time, or with that of the
        target.
        """
        return Target({"dockerd": ratio}), processor or Target({"dockerd": 1})

    def seen(engine: Engine) -> set[str]:
        return {warm(large)(engine)}

    return [
        Job(
            "context-client",
            [Figure("context-client", "`docker buildx du`: the client alone, and one question", "ms")],
            client_alone(),
            rounds,
            prepare=usable,
        ),
        job(
            *("context-cached", f"buildx with {files:,} files of 2 KB, all cached"),
            *(cached(small), warm(small), beside(1.5, Target(at_most=120))),
        ),
        job(
            *("context-cached-large", f"buildx with {megabytes} MB, all cached"),
            *(cached(large), warm(large), beside(1.3, Target(at_most=300))),
        ),
        job(
            *("context-cached-many", f"buildx with {many:,} files of {TINY} bytes, all cached"),
            *(cached(tiny), warm(tiny), (None, Target(at_most=900))),
            ours=True,  # a disk may need minutes to remove the files
        ),
        job(
            *("context-changed", f"one file changed of {megabytes} MB", changed(large), seen, beside(2)),
            flush=True,
        ),
        job(
            *("context-first", f"{megabytes // 3} of {megabytes} MB are sent", first(large), warm(large), beside(1.5)),
            flush=True,
        ),
        job(
            *("context-no-cache", f"--no-cache, {files:,} files of 2 KB", uncached(small), warm(small), beside(2.5)),
            flush=True,
        ),
        job(
            *("context-bake", f"bake of {TARGETS} targets, each with a RUN of its own"),
            *(baked(targets), warm(targets), beside(2)),
            flush=True,
        ),
        job("context-check", f"--check of {LINES} lines", checked(lines), usable, beside(1.5)),
        job("context-fails", "a RUN that fails, to the client's end", failing(bad), usable, beside(1.5)),
    ]
