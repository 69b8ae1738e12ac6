"""The commands `engined swarm backup FILE` and `engined swarm restore FILE`.

A backup is written by the manager that runs. A restore needs the engine stopped: it makes the
directory of a manager, which the engine's next start takes up.

Not here: the format and the work (`manager/backup.py`, `manager/restoring.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import sys
from pathlib import Path

from engine.cluster.phases import Phase
from engine.cluster.state import Directory, State, new_id
from engine.errors import EngineError, WrongState
from engine.manager import backup, restoring

LISTEN = "0.0.0.0:2377"


def main(arguments: argparse.Namespace) -> int:
    """Run one of the two. Returns the exit status."""
    try:
        if arguments.verb == "backup":
            print(_backup(Path(arguments.run), Path(arguments.file)))
        else:
            print(_restore(arguments))
    except EngineError as error:
        print(f"engined: {error.message}", file=sys.stderr)
        return 1
    return 0


def _backup(run: Path, path: Path) -> str:
    found = asyncio.run(restoring.ask(run / "swarm", path.absolute()))
    return f"swarm {found['Swarm']} at revision {found['Revision']}: {path}"


def _restore(arguments: argparse.Namespace) -> str:
    content = backup.load(Path(arguments.file))
    run = Path(arguments.run)
    for lock in (run / "engined.pid", run / "swarm" / "manager.pid"):
        if _held(lock):
            raise WrongState(f"the engine of {run} is running: stop it first (engined stop --run {run})")
    directory = Directory(Path(arguments.root) / "swarm")
    before = directory.load()
    swarm = content.cluster.id
    if before.swarm not in ("", swarm):
        raise WrongState(f"this host is part of the swarm {before.swarm}, and the backup is of {swarm}: leave it first")
    advertise = arguments.advertise_addr or before.advertise
    if not advertise:
        raise WrongState("an address for the other nodes is needed: --advertise-addr IP[:PORT]")
    listen = arguments.listen_addr or before.listen or LISTEN
    node = before.node or new_id()
    made = asyncio.run(
        restoring.restore(
            directory.path,
            run / "swarm",
            content,
            node=node,
            listen=restoring.address(listen),
            advertise=restoring.address(advertise),
        )
    )
    directory.save(
        State(
            phase=Phase.MANAGER,
            node=made.node,
            swarm=made.swarm,
            listen=made.listen,
            advertise=made.advertise,
            data_path=before.data_path,
            epoch=made.epoch,
        )
    )
    return f"node {made.node} is the only manager of the swarm {made.swarm}: start the engine"


def _held(path: Path) -> bool:
    """A process holds the lock of this pid file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
