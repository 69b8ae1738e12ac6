"""Builds by buildx whose files change meanwhile, whose client or daemon is killed, and whose disk
is full. No image gets a file that the directory never had, and each build after it has the files as
they are then.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.programs import FORKY
from tests.support import PATIENCE
from tests.support.builds.project import OLD, Project, described, open_contexts
from tests.support.engine.harness import TempEngine, until
from tests.support.nightly import nightly
from tests.system.test_build_killed import sound
from tests.system.test_full_disk import fill, small_disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

STEPS = """\
FROM busybox
COPY . /project/
RUN find /project | sort | md5sum > /sum
FROM scratch
COPY --from=0 /project /project
"""


# --- files that change ----------------------------------------------------------------------------


def version(name: str, number: int) -> bytes:
    """A content that shows whether it is whole: equal lines, whose number is in them."""
    lines = 1 + number * 7919 % 3000
    return b"%s %d %d\n" % (name.encode(), number, lines) * lines


def assert_whole(name: str, content: bytes) -> None:
    """It is one version of the file, or empty."""
    line, _, _ = content.partition(b"\n")
    if content:
        assert line.split()[0] == name.encode() and version(name, int(line.split()[1])) == content, (name, line)


def rewrite(path: Path, content: bytes, aside: Path) -> None:
    """In place, by one write of what is not longer than before."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        size = os.fstat(descriptor).st_size
        if size == len(content):
            os.pwrite(descriptor, content, 0)
            return
    finally:
        os.close(descriptor)
    replace(path, content, aside)


def replace(path: Path, content: bytes, aside: Path) -> None:
    aside.write_bytes(content)
    aside.replace(path)


def replace_with_its_time(path: Path, content: bytes, aside: Path) -> None:
    """As `rsync --times` of a file that was changed elsewhere."""
    aside.write_bytes(content)
    modified = OLD + random.randrange(10**12) * 2
    os.utime(aside, ns=(modified, modified))
    aside.replace(path)


def empty(path: Path, content: bytes, aside: Path) -> None:
    os.truncate(path, 0)


def take_away(path: Path, content: bytes, aside: Path) -> None:
    path.rename(aside)
    time.sleep(0.002)
    aside.rename(path)


def turn_into_directory(path: Path, content: bytes, aside: Path) -> None:
    path.unlink()
    path.mkdir()
    time.sleep(0.002)
    path.rmdir()
    replace(path, content, aside)


CHANGES = (rewrite, replace, replace, replace_with_its_time, empty, take_away, turn_into_directory)


@contextlib.contextmanager
def changing(directory: Path, aside: Path, seed: int, pause: float) -> Iterator[None]:
    """Change its files until the end."""
    names = sorted(path.name for path in directory.iterdir())
    dice, stop = random.Random(seed), threading.Event()

    def change() -> None:
        number = 0
        while not stop.wait(dice.uniform(0, 2 * pause)):
            number += 1
            name = dice.choice(names)
            dice.choice(CHANGES)(directory / name, version(name, number), aside)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("rounds", [6, *nightly(20)])
def test_files_that_change_all_the_time(rounds: int, project: Project, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    for number in range(40):
        name = f"f{number}"
        project.write(f"files/{name}", version(name, number))
    for turn in range(rounds):
        with changing(project.directory / "files", tmp_path / "aside", seed + turn, 0.02):
            result = project.run(status=None)
        if result.status:
            assert re.search("it changes while it is read|is a directory", result.err), (seed, result)
        else:
            for name, file in described(project.out / "project" / "files").items():
                assert_whole(name, file.content)
        if turn % 3 == 2:
            project.run("--no-cache")
            project.assert_same(times=True)


def test_a_log_that_grows_meanwhile(project: Project) -> None:
    """It is not complete, but the build goes on: `docker build . > build.log`."""
    with open(project.directory / "build.log", "wb") as log:
        subprocess.run(
            [*project.command(), "."],
            cwd=project.directory,
            env=FORKY.environment(project.engine),
            stdout=log,
            stderr=log,
            timeout=60 * PATIENCE,
            check=True,
        )
    project.build()
    project.assert_same()


def test_a_file_that_the_client_cannot_read(project: Project) -> None:
    """BuildKit builds an empty one."""
    project.write("secret", b"x" * 100).chmod(0)
    project.write("open", b"y")
    for parent in project.directory.parents:
        if parent.stat().st_uid == 0 and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    config = project.directory.with_name("config")
    shutil.copytree(FORKY.environment(project.engine)["DOCKER_CONFIG"], config, symlinks=True)
    subprocess.run(["chmod", "-R", "a+rwX", str(config)], check=True)
    os.chmod(project.engine.socket, 0o666)
    for parent in Path(project.engine.socket).parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    refused = subprocess.run(
        project.command("."),
        cwd=project.directory,
        env=FORKY.environment(project.engine) | {"DOCKER_CONFIG": str(config), "HOME": str(config)},
        capture_output=True,
        user=65534,
        group=65534,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert refused.returncode and b"build context: secret: it changes while it is read, or" in refused.stderr, refused
    project.build()
    project.assert_same()


@pytest.mark.parametrize(
    "mtime",
    [OLD - OLD % 10**9, OLD - OLD % 10**6, 0, OLD + 10**18 + 1],
    ids=["whole-second", "whole-millisecond", "epoch", "future"],
)
def test_times_that_are_set(mtime: int, project: Project) -> None:
    """Whole seconds, whole milliseconds, the epoch, and the future: as of `touch -d`."""
    for content in (b"first", b"other", b"third"):
        path = project.directory / "file"
        path.write_bytes(content)
        os.utime(path, ns=(mtime, mtime))
        project.build()
        project.assert_same()


def test_builds_of_one_directory_at_once(project: Project, tmp_path: Path) -> None:
    """Each has the files as they are, also after a change between them."""
    for turn in range(2):
        project.write("file", os.urandom(100_000))
        outs = [tmp_path / f"out{turn}{number}" for number in range(4)]
        clients = [
            subprocess.Popen(
                [*project.command("--output", f"type=local,dest={out}"), "."],
                cwd=project.directory,
                env=FORKY.environment(project.engine),
                stderr=subprocess.DEVNULL,
            )
            for out in outs
        ]
        for client, out in zip(clients, outs, strict=True):
            assert client.wait(60 * PATIENCE) == 0
            found = {path: file.seen(False) for path, file in described(out / "project").items()}
            assert found == {path: file.seen(False) for path, file in described(project.directory).items()}


def test_directories_that_change_places(project_engine: TempEngine, tmp_path: Path) -> None:
    """They have one key, as they are built at one path by turns, and their files have one size."""
    one, other = (Project(project_engine, tmp_path / name) for name in ("app", "other"))
    for turn in range(6):
        one.write(f"d/file{turn % 2}", b"%d" % turn)
        one.build()
        one.assert_same()
        one.directory.rename(tmp_path / "aside")
        other.directory.rename(one.directory)
        (tmp_path / "aside").rename(other.directory)


# --- a client or a daemon that dies ---------------------------------------------------------------

PLACES = {
    "the list": r"load build context",
    "the transfer": r"transferring context: ",
    "copy": r"\[stage-0 2/3\] COPY",
    "run": r"\[stage-0 3/3\] RUN",
    "export": r"exporting",
}


def until_said(client: subprocess.Popen[bytes], pattern: str) -> None:
    """Wait until the client shows it. Raises AssertionError if its build ends without."""
    assert client.stderr is not None
    seen = b""
    for line in client.stderr:
        seen += line
        if re.search(pattern.encode(), line):
            return
    raise AssertionError(seen.decode())


def stocked(project: Project, count: int = 60) -> None:
    """Enough to be in the middle of something."""
    project.dockerfile(STEPS)
    for number in range(count):
        project.write(f"d{number % 7}/file{number}", os.urandom(200_000))


def settled(engine: TempEngine) -> None:
    """Nothing of a build goes on, and no file of it is open or left."""
    until("no container is left", lambda: not engine.containers())
    until("no file of a build is left", lambda: not os.listdir(engine.root / "tmp"))
    until("closed files", lambda: not open_contexts(engine))


def cleared(engine: TempEngine) -> None:
    """Without the cache there are the layers of images alone, whole."""
    assert engine.request("POST", "/v1.44/build/prune?all=1").status == 200
    sound(engine)


def killed(client: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(client.pid, signal.SIGKILL)
    client.communicate(timeout=60 * PATIENCE)


@pytest.mark.parametrize("where", PLACES)
def test_the_client_is_killed(where: str, project: Project) -> None:
    """Nothing of its build is left, and the next one has all files."""
    stocked(project)
    client = project.begin("--no-cache")
    until_said(client, PLACES[where])
    killed(client)
    settled(project.engine)
    project.write("d0/file0", b"changed")
    project.build()
    project.assert_same(times=True)
    cleared(project.engine)


@pytest.mark.parametrize("where", ["the transfer", "export", *nightly("the list", "copy", "run")])
def test_the_daemon_is_killed(where: str, tmp_path: Path) -> None:
    with TempEngine() as engine:
        engine.load_busybox()
        project = Project(engine, tmp_path / "project")
        stocked(project)
        client = project.begin("-t", "built")
        until_said(client, PLACES[where])
        engine.kill9()
        client.communicate(timeout=60 * PATIENCE)
        engine.start()
        settled(engine)
        project.write("d0/file0", b"changed")
        project.build()
        project.assert_same(times=True)
        assert project.build() < 200_000
        cleared(engine)


@pytest.mark.parametrize("rounds", [3, *nightly(10)])
def test_both_are_killed_at_random_instants(rounds: int, tmp_path: Path) -> None:
    """The client first, or the daemon, at any time of a build."""
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    with TempEngine() as engine:
        engine.load_busybox()
        project = Project(engine, tmp_path / "project")
        stocked(project)
        begin = time.monotonic()
        project.run()
        undisturbed = time.monotonic() - begin
        for turn in range(rounds):
            for _ in range(5):
                number = dice.randrange(60)
                project.write(f"d{number % 7}/file{number}", os.urandom(200_000))
            client = project.begin(*(["--no-cache"] if turn % 2 else []))
            threading.Event().wait(dice.uniform(0.1, 1) * undisturbed)
            if dice.random() < 0.5:
                killed(client)
            else:
                engine.kill9()
                client.communicate(timeout=60 * PATIENCE)
                engine.start()
            try:
                settled(engine)
                project.build()
                project.assert_same()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, turn {turn}") from error
        cleared(engine)


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture(params=["ext4", *nightly("tmpfs")])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    """A project for an engine on a disk of 64 MiB."""
    engine = TempEngine()
    engine.root = tmp_path / "root"
    with small_disk(request.param, engine.root, tmp_path / "image", 64), engine:
        engine.load_busybox()
        yield Project(engine, tmp_path / "project")


def too_large_to_receive(project: Project) -> None:
    project.write("big", os.urandom(80 << 20))


def too_large_to_copy(project: Project) -> None:
    project.write("big", os.urandom(24 << 20))
    project.dockerfile("FROM busybox\nCOPY . /project/\nCOPY big /again\n")


def too_large_to_run(project: Project) -> None:
    project.dockerfile("FROM busybox\nCOPY . /project/\nRUN cat /dev/zero > /zeros\n")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (too_large_to_receive, "build context: there is not enough space for it on the disk of {root}"),
        (too_large_to_copy, "no space left on device ({root}/layers/"),
        (too_large_to_run, "No space left on device"),
    ],
)
def test_a_build_that_fills_the_disk(make: Callable[[Project], None], words: str, small: Project) -> None:
    """The reason is in the error, and the next build has the files as they are."""
    engine = small.engine
    small.write("file", os.urandom(1 << 20))
    small.build()
    make(small)
    refused = small.run(status=1)
    assert words.format(root=engine.root) in refused.err, refused
    settled(engine)
    shutil.rmtree(small.directory)
    small.dockerfile()
    small.write("file", os.urandom(1 << 20))
    cleared(engine)
    small.build("--no-cache")
    small.assert_same(times=True)


@pytest.mark.parametrize("where", ["the transfer", "run", *nightly("the list", "copy", "export")])
def test_a_disk_that_becomes_full(where: str, small: Project) -> None:
    """At any time of a build. It ends well, or says why; the next one is right."""
    engine = small.engine
    stocked(small, 20)
    client = small.begin()
    until_said(client, PLACES[where])
    fill(engine.root)
    _, err = client.communicate(timeout=60 * PATIENCE)
    if client.returncode:
        assert re.search(rb"(?i)no space left|not enough space", err), err
    until("the daemon answers", lambda: engine.request("GET", "/_ping").status == 200)
    (engine.root / "fill").unlink()
    settled(engine)
    small.write("d0/file0", os.urandom(200_000))
    small.build()
    small.assert_same()
    cleared(engine)
