"""`python -m tests.support.logs.targets.log_plugin SOCKET DIRECTORY`: a log plugin as a process
that can be killed. `LogPlugin` runs it.

It has stored what it has read: in DIRECTORY/entries, before it reads on. DIRECTORY/calls has every
call. DIRECTORY/faults says how it answers: method → "hang", "die", "garbage", or the text of `Err`.
As Docker's example, it refuses a file that it reads already, and reads a FIFO until its end.
"""

from __future__ import annotations

import http.server
import json
import os
import select
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.logs.targets.programs import Server


@dataclass(frozen=True)
class LogEntry:
    """An entry as the plugin has decoded it; `part`: id, ordinal, last."""

    container: str
    source: str
    time: int
    line: bytes
    partial: bool
    part: tuple[str, int, bool] | None


class LogPlugin(Server):
    """The process. It listens at the same socket each time."""

    def __init__(self, directory: Path, path: Path) -> None:
        super().__init__(directory)
        self.path = path

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        command = [
            *("env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-m", "tests.support.logs.targets.log_plugin"),
            *(str(self.path), str(self.directory)),
        ]
        self.run(command, lambda: _answers(self.path))

    def pause(self) -> None:
        """It reads nothing, and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def faults(self, **faults: str) -> None:
        """`StartLogging="hang"` and so on."""
        write = self.directory / "faults.new"
        write.write_text(json.dumps({f"LogDriver.{method}": fault for method, fault in faults.items()}))
        write.rename(self.directory / "faults")

    def calls(self, method: str = "") -> list[tuple[str, dict[str, Any]]]:
        """The calls so far, or those of one method."""
        try:
            lines = (self.directory / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [(called, body) for called, body in map(json.loads, lines)]
        return [each for each in found if method in ("", each[0].rpartition(".")[2])]

    def entries(self, container: str = "") -> list[LogEntry]:
        """All entries in the order of their arrival, or those of one container."""
        try:
            data = (self.directory / "entries").read_bytes()
        except FileNotFoundError:
            return []
        found = []
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            fields = json.loads(line)
            if not container or fields["container"] == container:
                part = fields["part"]
                fields |= {"line": fields["line"].encode("latin-1"), "part": part and tuple(part)}
                found.append(LogEntry(**fields))
        return found

    def texts(self) -> list[bytes]:
        return [each.line + b"\n" for each in self.entries()]


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


# --- Protocol Buffers, independent of the engine's ------------------------------------------------


def fields(data: bytes) -> dict[int, int | bytes]:
    """The fields of a message by number. Raises ValueError, IndexError."""
    found: dict[int, int | bytes] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number
            if shift > 63:
                raise ValueError("a varint of more than ten bytes")

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if number in found:
            raise ValueError(f"field {number} twice")
        if kind == 0:
            found[number] = varint()
        elif kind == 2:
            size = varint()
            if at + size > len(data):
                raise ValueError(f"field {number} is cut")
            found[number] = data[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {kind}")
    return found


def decoded(container: str, data: bytes) -> LogEntry:
    """One LogEntry. Raises ValueError for a field that it does not have."""
    got: dict[int, Any] = fields(data)
    if got.keys() - {1, 2, 3, 4, 5}:
        raise ValueError(f"fields {sorted(got)}")
    part = None
    if 5 in got:
        meta: dict[int, Any] = fields(got[5])
        if meta.keys() - {1, 2, 3}:
            raise ValueError(f"fields {sorted(meta)}")
        part = (meta.get(2, b"").decode(), meta.get(3, 0), bool(meta.get(1, 0)))
    at = got.get(2, 0)
    at -= (1 << 64) if at >= 1 << 63 else 0
    return LogEntry(container, got.get(1, b"").decode(), at, got.get(3, b""), bool(got.get(4, 0)), part)


def whole(container: str, data: bytes) -> tuple[list[LogEntry], bytes]:
    """The whole frames of a stream, and the rest."""
    at, found = 0, []
    while at + 4 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        if at + 4 + size > len(data):
            break
        found.append(decoded(container, data[at + 4 : at + 4 + size]))
        at += 4 + size
    return found, data[at:]


# --- the program ----------------------------------------------------------------------------------


class Reader(threading.Thread):
    """Reads one FIFO until its end, or until it is stopped and the FIFO is empty."""

    def __init__(self, plugin: Program, file: str, container: str) -> None:
        super().__init__(daemon=True)
        self._plugin, self._file, self._container = plugin, file, container
        self._end, self._ending = os.pipe()
        self.start()

    def run(self) -> None:
        fifo = os.open(self._file, os.O_RDONLY)
        os.set_blocking(fifo, False)
        rest = b""
        while True:
            ready, _, _ = select.select([fifo, self._end], [], [])
            if fifo not in ready:
                break
            data = os.read(fifo, 1 << 16)
            if not data:
                break
            rest = self._plugin.store(self._container, rest + data)
        os.close(fifo)

    def stop(self) -> None:
        os.write(self._ending, b"x")
        self.join()


class Program:
    """The plugin."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._entries = os.open(directory / "entries", append, 0o600)
        self._calls = os.open(directory / "calls", append, 0o600)
        self._readers: dict[str, Reader] = {}
        # an entry that the last process has not stored whole
        if (size := os.fstat(self._entries).st_size) and not (directory / "entries").read_bytes().endswith(b"\n"):
            os.truncate(self._entries, (directory / "entries").read_bytes()[:size].rfind(b"\n") + 1)

    def store(self, container: str, data: bytes) -> bytes:
        """Store the whole frames; returns the rest."""
        entries, rest = whole(container, data)
        lines = [json.dumps(vars(each) | {"line": each.line.decode("latin-1")}) + "\n" for each in entries]
        os.write(self._entries, "".join(lines).encode())
        return rest

    def answer(self, method: str, body: dict[str, Any]) -> bytes:
        os.write(self._calls, json.dumps([method, body]).encode() + b"\n")
        try:
            fault = json.loads((self._directory / "faults").read_text()).get(method)
        except FileNotFoundError:
            fault = None
        if fault == "hang":
            time.sleep(3600)
        if fault == "die":
            os._exit(1)
        if fault == "garbage":
            return b"<html>"
        if fault:
            return json.dumps({"Err": fault}).encode()
        match method:
            case "Plugin.Activate":
                return b'{"Implements":["LogDriver"]}'
            case "LogDriver.Capabilities":
                return b'{"Cap":{"ReadLogs":true}}'
            case "LogDriver.StartLogging":
                file = body["File"]
                if file in self._readers and self._readers[file].is_alive():
                    return json.dumps({"Err": f"logger for {file} exists"}).encode()
                self._readers[file] = Reader(self, file, body["Info"]["ContainerID"])
                return b"{}"
            case "LogDriver.StopLogging":
                reader = self._readers.pop(body["File"], None)
                if reader is not None:
                    reader.stop()
                return b"{}"
        return b'{"Err":"no such call"}'


def main(path: str, directory: str) -> None:
    program = Program(Path(directory))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = program.answer(self.path.strip("/"), json.loads(body) if body else {})
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

        def address_string(self) -> str:
            return "engine"

    class Listener(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    Listener(path, Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
