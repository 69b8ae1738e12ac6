"""Directories of a client, which buildx builds, and images that must have their files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from tests.clients.programs import FORKY
from tests.support.engine.harness import Result, TempEngine

OLD = time.time_ns() // 10**9 * 10**9 - 3600 * 10**9 + 123_456_789
"""A time that tells a content from others (`engine/builder/kept.py`)."""
_UNITS = {"B": 1, "kB": 1000, "MB": 10**6, "GB": 10**9}


class Project:
    """A directory that is built. Everything is copied to `/project`, without another Dockerfile."""

    def __init__(self, engine: TempEngine, directory: Path) -> None:
        self.engine = engine
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.dockerfile()

    def dockerfile(self, text: str = "FROM scratch\nCOPY . /project/\n", name: str = "Dockerfile") -> None:
        self.write(name, text.encode())

    def write(self, name: str, content: bytes, mtime: int = 0) -> Path:
        """A file whose time is old enough to be kept."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.age(path, mtime)
        return path

    def age(self, path: Path, mtime: int = 0) -> None:
        mtime = mtime or OLD + int.from_bytes(os.urandom(3)) // 2 * 2
        os.utime(path, ns=(mtime, mtime), follow_symlinks=False)

    def command(self, *arguments: str) -> list[str]:
        return [FORKY.path, "buildx", "build", "--progress=plain", *arguments]

    def build(self, *arguments: str, cwd: Path | None = None) -> int:
        """Bytes that the client has sent of its context."""
        return sent(self.run(*arguments, cwd=cwd).err)

    def run(self, *arguments: str, cwd: Path | None = None, status: int | None = 0) -> Result:
        """Build into `out`. Raises AssertionError unless the client exits with `status`."""
        command = [*self.command(*arguments), "--output", f"type=local,dest={self.out}", "."]
        shutil.rmtree(self.out, ignore_errors=True)
        return FORKY.run(self.engine, *command[1:], cwd=cwd or self.directory, status=status)

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A client that builds an image, in a process group of its own. It reports to stderr."""
        return subprocess.Popen(
            [*self.command(*arguments), "."],
            cwd=self.directory,
            env=FORKY.environment(self.engine),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def out(self) -> Path:
        return self.directory.with_name(self.directory.name + ".out")

    def assert_same(self, *, times: bool = False) -> None:
        """The image has the files as they are now: names, kinds, modes and contents. `times`:
        theirs too, which a step from the cache need not have.
        """
        expected, found = described(self.directory), described(self.out / "project")
        wrong = {
            path: (_shown(expected.get(path)), _shown(found.get(path)))
            for path in expected.keys() | found.keys()
            if (path in expected) != (path in found) or expected[path].seen(times) != found[path].seen(times)
        }
        assert not wrong, wrong


class Described(NamedTuple):
    """What an image keeps of a file."""

    mode: str
    content: bytes
    """The target of a link."""
    mtime: int
    """In seconds, as in archives."""

    def seen(self, times: bool) -> tuple[str, bytes, int]:
        return (self.mode, self.content, self.mtime if times else 0)


def described(directory: Path) -> dict[str, Described]:
    """The files below a directory, by their paths in it."""
    found = {}
    for path in directory.rglob("*"):
        status = path.lstat()
        content = b""
        if path.is_symlink():
            content = os.fsencode(os.readlink(path))
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(directory))] = Described(oct(status.st_mode), content, int(status.st_mtime))
    return found


def _shown(file: Described | None) -> object:
    return file and (file.mode, len(file.content), file.content[:40], file.mtime)


def sent(output: str) -> int:
    """Bytes of the context, from the client's progress."""
    numbers = {line.split()[0] for line in output.splitlines() if line.endswith("[internal] load build context")}
    found = [
        round(float(size) * _UNITS[unit])
        for number, size, unit in re.findall(r"^(#\d+) transferring context: ([\d.]+)([kMG]?B)", output, re.MULTILINE)
        if number in numbers
    ]
    return max(found, default=0)


def open_contexts(engine: TempEngine) -> list[str]:
    """Files of contexts that the daemon has open, also unnamed ones."""
    found = []
    for link in Path(f"/proc/{engine.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(link))
    return [each for each in found if each.startswith((f"{engine.root}/build/contexts", f"{engine.root}/tmp"))]
