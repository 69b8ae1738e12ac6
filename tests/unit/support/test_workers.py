"""Runs whose workers die or are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PATIENCE, ROOT
from tests.support.engine.harness import until

COMMAND = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]

DIES = """
import os, time, pytest

@pytest.mark.parametrize("number", range(6))
def test(number):
    with open(os.environ["RUN"], "a") as run:
        print(__name__, number, file=run)
    if (__name__, number) in {deaths}:
        time.sleep(0.5)  # the other workers have ended
        os._exit(1)
"""


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param({("test_c", 3)}, id="in the middle"),
        pytest.param({("test_c", 5)}, id="in the last test"),
        pytest.param({("test_a", 0), ("test_c", 0), ("test_c", 1)}, id="several times"),
    ],
)
def test_all_tests_run_once_when_a_worker_dies(deaths: set[tuple[str, int]], tmp_path: Path) -> None:
    for name in ("test_a", "test_b", "test_c"):
        (tmp_path / f"{name}.py").write_text(DIES.format(deaths=deaths))
    run = subprocess.run(
        [
            *COMMAND,
            "-p",
            "tests.support.workers",
            "-n",
            "2",
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        env=os.environ | {"RUN": str(tmp_path / "run")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    begun = sorted((tmp_path / "run").read_text().splitlines())
    assert begun == [f"{name} {number}" for name in ("test_a", "test_b", "test_c") for number in range(6)]
    assert f"{len(deaths)} failed, {18 - len(deaths)} passed" in run.stdout
    for name, number in deaths:
        assert f"crashed while running '{name}.py::test[{number}]'" in run.stdout


SLOW = """
import os, time, pytest

@pytest.fixture(scope="session")
def slow():
    yield
    for _ in range(18):  # not one sleep, which a second interrupt would end
        time.sleep(1)
    open(os.environ["RUN"], "a").close()

def test(slow):
    open(os.environ["RUN"] + ".begun", "a").close()
    time.sleep(1000)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_worker_ends_what_it_has_started(number: signal.Signals, tmp_path: Path) -> None:
    """execnet ends it after 15 s, xdist after 10."""
    (tmp_path / "test_slow.py").write_text(SLOW)
    ends = tmp_path / "run"
    with subprocess.Popen(
        [*COMMAND, "-p", "tests.conftest", "-n", "1", "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"RUN": str(ends)},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    ) as run:
        until("the test runs", (tmp_path / "run.begun").exists)
        run.send_signal(number)
        until("the fixture ends", ends.exists, seconds=60)
