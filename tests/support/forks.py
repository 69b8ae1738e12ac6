"""Children that are forks of a process of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from tests.support import PATIENCE, ROOT

PR_SET_PDEATHSIG = 1


def fork() -> int:
    """As os.fork. The child is killed when the thread ends that made it: it holds the pipe whose
    end tells xdist that a worker has died.
    """
    parent = os.getpid()
    child = os.fork()
    if not child and (ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != parent):
        os._exit(1)
    return child


def run_in_fork(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in a fork, whose log goes to standard error. If this is interrupted, the
    coroutine is cancelled. Raises AssertionError if it fails.
    """
    # in the fork, until it can be cancelled
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    child = fork()
    if not child:
        status = 1
        try:
            logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
            asyncio.run(main())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    signal.signal(signal.SIGUSR2, ignored)
    try:
        _, status = os.waitpid(child, 0)
    except BaseException:
        os.kill(child, signal.SIGUSR2)
        os.waitpid(child, 0)
        raise
    assert os.waitstatus_to_exitcode(status) == 0, "the fork has failed: see its standard error"


@contextlib.contextmanager
def engine_of_forks(run: Path) -> Iterator[None]:
    """If a fork fails or is interrupted, end what its daemon has left. `run`: the engine's RUN."""
    try:
        yield
    except BaseException:
        command = [sys.executable, "-m", "engine", "stop", "--run", str(run), "--time", "0"]
        subprocess.run(command, cwd=ROOT, timeout=60 * PATIENCE, check=False)
        raise


def cancel_when_interrupted() -> None:
    """Let the interrupt of `run_in_fork` cancel the current task. Signals of a terminal, which the
    daemon handles, do not.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, task.cancel)
