"""The peers that take part, the processor time of an engine, and what its namespaces leave
behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.engines import Dockerd, Engine, Engined, HostDockerd, Namespaces, Podman, default_kinds, processor_times
from bench.job import costs
from tests.support import ROOT
from tests.support.engine.harness import until

root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")


@pytest.mark.parametrize(
    ("newest", "host", "dockerd"),
    [(True, True, Dockerd), (True, False, Dockerd), (False, True, HostDockerd), (False, False, Dockerd)],
)
def test_the_newest_dockerd_is_the_default(
    newest: bool, host: bool, dockerd: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without either, the reason names what `make bench-peers` fetches."""
    monkeypatch.setattr(Dockerd, "program", sys.executable if newest else "/nowhere/dockerd")
    monkeypatch.setattr(HostDockerd, "program", sys.executable if host else "/nowhere/dockerd")
    assert default_kinds() == [Engined, dockerd, Podman]


@pytest.fixture
def namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespaces]:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    monkeypatch.setattr("bench.engines.PRIVATE", (str(tmp_path / "there"), str(tmp_path / "new" / "one")))
    found = Namespaces()
    yield found
    found.close()


@root
def test_private_directories(namespaces: Namespaces, tmp_path: Path) -> None:
    inside = namespaces.command("find", str(tmp_path), directory=tmp_path)
    shown = subprocess.run(inside, capture_output=True, text=True, check=True).stdout.split()
    assert {f"{tmp_path}/there", f"{tmp_path}/new/one"} <= {*shown} and f"{tmp_path}/there/file" not in shown
    namespaces.close()
    assert (tmp_path / "there" / "file").exists() and not (tmp_path / "new" / "one").exists()


ABANDONED = """
import os, signal, subprocess, sys
from pathlib import Path
import bench.engines

base = Path(sys.argv[1])
bench.engines.PRIVATE = (str(base.parent / "new"),)
namespaces = bench.engines.Namespaces()
namespaces.own(base)
engine = subprocess.Popen(namespaces.command("sh", "-c", "echo $$; exec sleep 1000"), stdout=subprocess.PIPE)
print(int(engine.stdout.readline()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@root
def test_what_a_killed_benchmark_leaves(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "root" / "containers").mkdir(parents=True)
    command = [sys.executable, "-c", ABANDONED, str(base)]
    pid = int(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False).stdout)
    until("directories are gone", lambda: not any(tmp_path.iterdir()))
    until("the process has ended", lambda: not os.path.exists(f"/proc/{pid}/exe"))


class Worker(Engine):
    """An engine of one process, which works for a moment for each line and answers it."""

    def __init__(self, namespaces: Namespaces) -> None:
        self.namespaces = namespaces
        work = "while read line; do i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo; done"
        self.process = subprocess.Popen(
            namespaces.command("sh", "-c", work), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"\n"


@root
def test_processor_time_of_requests(namespaces: Namespaces) -> None:
    worker = Worker(namespaces)
    asked: list[None] = []
    with worker.metered() as everything:
        milliseconds, spent = costs(worker, 5, lambda: asked.append(worker.ask()))
    assert 1 <= len(asked) <= 5 and milliseconds > 0
    assert 0 < spent * len(asked) <= everything.seconds * 1000 * 1.001
    with pytest.raises(AssertionError, match="ended while"), worker.metered():
        worker.process.communicate()


def test_processor_time_of_threads_that_have_ended() -> None:
    def work() -> None:
        while time.thread_time() < 0.05:
            pass

    before, _ = processor_times(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert processor_times(os.getpid())[0] - before >= 0.05
