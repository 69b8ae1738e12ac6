"""Contexts of `docker build` by buildx, of which only changes are sent, and never an old content is
built."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.clients.programs import FORKY
from tests.support import PATIENCE
from tests.support.builds.project import OLD, Project, open_contexts
from tests.support.engine.harness import TempEngine, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

LARGE = 300_000
"""Bytes that are seen in what was sent."""


def kept(engine: TempEngine) -> list[dict[str, object]]:
    listed = engine.request("GET", "/v1.44/system/df?type=build-cache").json()["BuildCache"]
    return [each for each in listed or [] if each["Type"] == "source.local"]


def segments(engine: TempEngine) -> list[Path]:
    return [path for path in (engine.root / "build" / "contexts").glob("*/*") if path.name != "index"]


def test_only_changes_are_sent(project: Project) -> None:
    files = [project.write(f"d{number}/file", os.urandom(LARGE)) for number in range(4)]
    for path in files:
        project.age(path.parent)
    project.write("naïve/ファイル", os.urandom(LARGE))
    os.link(files[0], project.directory / "hard")
    (project.directory / "link").symlink_to("d0/file")
    project.age(project.directory / "link")

    def built(files_sent: float) -> None:
        size = project.build()
        project.assert_same()
        assert abs(size - files_sent * LARGE) < LARGE / 4, (size, files_sent)

    built(5)
    built(0)
    project.write("d1/file", os.urandom(LARGE))
    built(1)
    files[1].unlink()
    built(0)
    files[2].chmod(0o600)
    built(1)
    (project.directory / "link").unlink()
    (project.directory / "link").symlink_to("d2/file")
    built(0)
    (project.directory / "d3").rename(project.directory / "e3")
    built(1)
    (project.directory / "hard").unlink()
    built(0)
    built(0)


def test_two_dockerfiles_in_turn(project: Project) -> None:
    for name in "ab":
        project.write(f"{name}/file", os.urandom(LARGE))
        project.dockerfile(f"FROM scratch\nCOPY {name} /\n", f"{name}.Dockerfile")
    sizes = [project.build("-f", f"{name}.Dockerfile") for name in "ababab"]
    assert min(sizes[:2]) > LARGE and max(sizes[2:]) < LARGE / 4, sizes
    assert (project.out / "file").read_bytes() == (project.directory / "b/file").read_bytes()


@pytest.mark.parametrize("by", ["path", "working directory"])
def test_directories_of_one_name(by: str, project_engine: TempEngine, tmp_path: Path) -> None:
    """Their files have one size and one time, as only `touch -r` makes them."""
    projects = [Project(project_engine, tmp_path / parent / "app") for parent in "ab"]
    for _ in range(2):
        for project, content in zip(projects, (b"one", b"two"), strict=True):
            project.write("file", content, OLD)
            if by == "path":
                FORKY.run(
                    *(project_engine, "buildx", "build", "--output", f"type=local,dest={project.out}"),
                    *(str(project.directory.relative_to(tmp_path)),),
                    cwd=tmp_path,
                )
            else:
                project.build()
            project.assert_same()


def test_a_change_that_leaves_size_and_time(project: Project) -> None:
    """It happens right after the first build: a racy file."""
    path = project.directory / "file"
    for content in (b"first", b"other", b"third"):
        before = path.stat().st_mtime_ns if path.exists() else time.time_ns()
        path.write_bytes(content)
        os.utime(path, ns=(before, before))
        project.build()
        project.assert_same()


def test_files_of_one_time_are_renamed(project: Project) -> None:
    for name, content in (("d/a", b"one"), ("d/b", b"two")):
        project.write(name, content, OLD)
    for _ in range(2):
        project.age(project.directory / "d")
        project.build()
        a, b, aside = (project.directory / "d" / name for name in ("a", "b", "c"))
        a.rename(aside), b.rename(a), aside.rename(b)
    project.build()
    project.assert_same()


def test_what_copy_selects(project: Project) -> None:
    """Patterns, links, what is included again, and a mount, each from a kept context."""
    for name in ("x/y/z.txt", "x/w.txt", "x/w.log", "again.log", "sub/deep/file"):
        project.write(name, name.encode())
    project.write(".dockerignore", b"*.log\n**/*.log\n!again.log\n")
    (project.directory / "out").symlink_to("/etc/hostname")
    (project.directory / "in").symlink_to("x/y")
    project.dockerfile(
        "FROM busybox AS base\nRUN --mount=type=bind,source=sub,target=/m cp -r /m /mounted\n"
        "FROM scratch\nCOPY x/**/*.txt /deep/\nCOPY *.log /logs/\nCOPY in /linked/\n"
        "COPY --from=base /mounted /mounted\n"
    )
    for _ in range(2):
        project.build()
        found = sorted(str(path.relative_to(project.out)) for path in project.out.rglob("*") if path.is_file())
        assert found == ["deep/z.txt", "linked/z.txt", "logs/again.log", "mounted/deep/file"]
    project.dockerfile("FROM scratch\nCOPY out /\n")
    refused = FORKY.run(project.engine, *project.command(".")[1:], cwd=project.directory, status=1)
    assert "not found" in refused.err or "no such file" in refused.err


def test_disk_usage_and_prune(project: Project) -> None:
    engine = project.engine

    def pruned() -> bool:
        assert engine.request("POST", "/v1.44/build/prune?all=1").status == 200
        return not kept(engine) and not segments(engine)

    until("nothing of earlier builds", pruned)  # they keep their contexts after their end
    project.write("file", os.urandom(LARGE))
    project.build()
    (record,) = until("a kept context", lambda: kept(engine))
    assert record["Size"] >= LARGE and record["Description"] == "local source for context"
    usage = FORKY.run(engine, "buildx", "du", "--verbose", "--filter", "type=source.local").out
    assert "local source for context" in usage and "300kB" in usage, usage
    assert len(segments(engine)) == 1
    FORKY.run(engine, "buildx", "prune", "-f", "--filter", "type=regular")
    assert kept(engine)
    FORKY.run(engine, "buildx", "prune", "-f", "--filter", "type=source.local")
    assert not kept(engine) and not segments(engine)
    assert project.build() > LARGE
    project.assert_same()


def test_prune_during_builds(project: Project) -> None:
    stop = threading.Event()
    target = "/v1.44/build/prune?filters=" + quote('{"type": ["source.local"]}')

    def prune() -> None:
        while not stop.wait(0.01):
            assert project.engine.request("POST", target, timeout=60).status == 200

    pruning = threading.Thread(target=prune)
    pruning.start()
    try:
        for _ in range(5):
            for number in range(10):
                project.write(f"{number % 3}/{number}", os.urandom(10_000))
            project.build("--no-cache")
            project.assert_same()
    finally:
        stop.set()
        pruning.join()


def test_eight_targets_at_once(project: Project) -> None:
    for number in range(8):
        project.write(f"{number}/own", str(number).encode())
        project.write("common/file", os.urandom(LARGE))
    project.dockerfile("FROM scratch\nARG n\nCOPY common /common\nCOPY $n /own\n")
    targets = {
        f"t{number}": {"args": {"n": str(number)}, "output": [f"type=local,dest={project.out}/{number}"]}
        for number in range(8)
    }
    bake = {"group": {"default": {"targets": [*targets]}}, "target": targets}
    project.write("bake.json", json.dumps(bake).encode())
    for _ in range(2):
        shutil.rmtree(project.out, ignore_errors=True)
        FORKY.run(
            *(project.engine, "buildx", "bake", "--allow=fs=*", "-f", "bake.json"), cwd=project.directory, timeout=120
        )
        for number in range(8):
            assert (project.out / f"{number}/own/own").read_text() == str(number)
            common = (project.directory / "common/file").read_bytes()
            assert (project.out / f"{number}/common/file").read_bytes() == common
        project.write("common/file", os.urandom(LARGE))


def test_a_client_is_killed_in_the_middle(project: Project) -> None:
    """What it has sent is dropped, and what was kept stays."""
    project.write("small", os.urandom(LARGE))
    project.build()
    before = until("a kept context", lambda: segments(project.engine))
    large = project.write("large", b"")
    with large.open("r+b") as file:
        file.truncate(2 << 30)
    started = project.begin()
    assert started.stderr is not None
    for line in started.stderr:
        if b"transferring context: " in line:
            break
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate(timeout=60 * PATIENCE)
    until("closed files", lambda: not open_contexts(project.engine))
    assert segments(project.engine) == before
    large.unlink()
    assert project.build() < LARGE / 4
    project.assert_same()


@pytest.mark.parametrize("when", ["in the middle", "afterwards"])
def test_the_daemon_is_killed(when: str, tmp_path: Path) -> None:
    with TempEngine() as engine:
        engine.load_busybox()
        project = Project(engine, tmp_path / "project")
        project.write("small", os.urandom(LARGE))
        project.build()
        until("a kept context", lambda: segments(engine))
        if when == "in the middle":
            large = project.write("large", b"")
            os.truncate(large, 2 << 30)
            started = project.begin()
            assert started.stderr is not None
            for line in started.stderr:
                if b"transferring context: " in line:
                    break
            engine.kill9()
            started.communicate(timeout=60 * PATIENCE)
            large.unlink()
        else:
            project.write("small", os.urandom(LARGE))
            project.build()
            engine.kill9()
        engine.start()
        until("what was kept", lambda: kept(engine))
        assert len(segments(engine)) <= 2
        project.build()
        project.assert_same()
        assert project.build() < LARGE / 4
