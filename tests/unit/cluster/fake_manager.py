"""A manager's process that manages nothing: it locks its pid file, listens and answers.

Run as `python -m tests.unit.cluster.fake_manager --root DIR --run DIR`, in the place of
`engine.manager`. Files in ROOT tell it how to behave:

    refuse    `Begin` is refused with this text
    removed   it ends with status 3 when it is asked to begin
    stuck     `Stop` is not answered, and SIGTERM is ignored
    keep      `Stop(leave)` without force is refused with this text

Each `Begin` is noted in ROOT/begun: pid and `how`.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import sys
from pathlib import Path

from engine.errors import ServerError, WrongState
from engine.swarm_session import messages
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Done, Message


class Fake:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.ended = asyncio.Event()
        self.status = 0

    def says(self, name: str) -> str:
        path = self.root / name
        return path.read_text() or name if path.exists() else ""

    def note(self, line: str) -> None:
        with open(self.root / "begun", "a", encoding="ascii") as notes:
            notes.write(line)

    def end(self, status: int = 0) -> None:
        self.status = status
        self.ended.set()

    async def serve(self, connection: Connection, message: Message) -> None:
        match message:
            case messages.Begin():
                if self.says("removed"):
                    self.end(3)
                    await asyncio.sleep(10)
                if refusal := self.says("refuse"):
                    raise ServerError(refusal)
                self.note(f"{os.getpid()} {message.how}\n")
                await connection.send(Done(seq=message.seq))
            case messages.Stop():
                if self.says("stuck"):
                    await asyncio.sleep(1000)
                if (refusal := self.says("keep")) and message.leave and not message.force:
                    raise WrongState(refusal)
                await connection.send(Done(seq=message.seq))
                self.end()
            case messages.Call(verb="exit"):
                self.end(int(message.name))
            case messages.Call():
                await connection.send(Done(seq=message.seq, body=message.verb.encode()))


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--log-level")
    given = parser.parse_args()
    lock = os.open(given.run / "manager.pid", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    fake = Fake(given.root)
    if fake.says("stuck"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path = given.run / "manager.sock"
    path.unlink(missing_ok=True)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Connection(reader, writer, fake.serve, dialled=False).run()

    await asyncio.start_unix_server(converse, str(path))
    await fake.ended.wait()
    await asyncio.sleep(0.05)
    path.unlink(missing_ok=True)
    return fake.status


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
