"""The program of the manager's process: arguments, the lock, signals, the log.

The daemon starts it when its node becomes a manager, and connects again after a restart of its own.
SIGTERM ends it with its etcd member, whose data stays.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop

from engine.manager.process import Manager
from engine.system import log_format, memory, tasks, threads
from engine.system.threads import raise_priority

LOCK = "manager.pid"
"""In RUN: locked while a manager's process runs, and holds its pid."""
FAILED = 4
"""Exit status when a task has failed that the manager cannot do without. The daemon starts it
again.
"""

_log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or `Stop`. Returns 3 if this node was removed from the swarm, 4 if a
    part of the manager has failed, and 1 if another process already manages this directory.
    """
    parser = argparse.ArgumentParser(prog="engine.manager", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="state: certificates, etcd's data, backups")
    parser.add_argument("--run", type=Path, required=True, help="sockets")
    parser.add_argument("--log-level", default="info")
    given = parser.parse_args(arguments)
    logging.raiseExceptions = False  # the daemon, whose stderr this is, may have ended
    log_format.configure(given.log_level)
    raise_priority()
    memory.configure()
    for directory in (given.root, given.run):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    lock = os.open(given.run / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"engined: another manager already runs in {given.run}", file=sys.stderr)
        return 1
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    status: int = uvloop.run(_serve(given.root, given.run))
    threads.finish()
    return status


def collect_rarely() -> None:
    """Let the garbage collector run less often, as nearly everything here is freed by reference
    counts: with 100,000 tasks a full collection stops the process for up to a second, and
    heartbeats with it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _serve(root: Path, run: Path) -> int:
    manager = Manager(root, run)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, manager.end)

    def failed(message: str) -> None:
        _log.critical("the manager's process ends: %s", message)
        manager.end(FAILED)

    tasks.when_fatal(failed)
    with threads.installed():
        await threads.start_all()
        memory.keep_reserve()
        await manager.listen()
        collect_rarely()
        try:
            return await manager.until_ended()
        finally:
            tasks.when_fatal(None)
            await manager.close()
