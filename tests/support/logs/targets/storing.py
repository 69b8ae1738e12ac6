"""`python -m tests.support.logs.targets.storing KIND FILE PORT`: an own receiver as a process that
can be killed.

KIND: `lines`, `nul` (messages that end in a newline, or a zero byte) or `forward` (Fluentd, with
acknowledgements). It has stored what it has read: in FILE, before it reads on or acknowledges. The
texts of Forward entries are stored as lines. `Storing` runs it.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from tests.support import ROOT
from tests.support.logs.targets.forward import Event, ForwardReceiver
from tests.support.logs.targets.programs import Server, free_port, listens
from tests.support.logs.targets.streams import Stream, StreamReceiver


class Storing(Server):
    """The process. It listens at the same port each time."""

    def __init__(self, directory: Path, kind: str) -> None:
        super().__init__(directory)
        self.kind = kind
        self.port = free_port()
        self.file = directory / "stored"

    def start(self) -> None:
        command = [
            *("env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-m", "tests.support.logs.targets.storing"),
            *(self.kind, str(self.file), str(self.port)),
        ]
        self.run(command, lambda: listens(self.port))

    def messages(self) -> list[bytes]:
        """Whole messages of all connections, in the order of their beginning."""
        found: list[bytes] = []
        end = b"\0" if self.kind == "nul" else b"\n"
        names = self.directory.glob(f"{self.file.name}.*")
        for path in sorted(names, key=lambda path: int(path.suffix[1:])):
            found += path.read_bytes().split(end)[:-1]
        return found


def _next_file(prefix: str) -> int:
    """The file of another connection, numbered after those of earlier processes."""
    number = 0
    while True:
        try:
            return os.open(f"{prefix}.{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            number += 1


def main(kind: str, file: str, port: str) -> None:
    stores: dict[Stream, int] = {}

    class Files(StreamReceiver):
        def greet(self, stream: Stream) -> None:
            stores[stream] = _next_file(file)

    class Lines(Files):
        def took(self, stream: Stream) -> None:
            os.write(stores[stream], stream.data)
            stream.data.clear()

    class Forward(Files, ForwardReceiver):
        def store(self, stream: Stream, events: list[Event]) -> None:
            os.write(stores[stream], b"".join(each.record["log"].encode() + b"\n" for each in events))
            self.options.clear()

    (Forward if kind == "forward" else Lines)(port=int(port))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
