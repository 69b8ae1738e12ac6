"""Clients of a service, in a network namespace of their own: what do they see of scaling, updates
and faults?

    python -m tests.support.swarm.load get ADDRESS:PORT … [--rate 500]
    python -m tests.support.swarm.load hold ADDRESS:PORT … [--rate 50]
    python -m tests.support.swarm.load stream ADDRESS:PORT [--seconds 2]
    python -m tests.support.swarm.load serial ADDRESS:PORT [--seconds 2]

`get` begins so many HTTP requests in a second, each on a connection of its own, whether earlier
ones were answered or not. `hold` has one connection to each address and sends so many lines in a
second on it, which the peer must echo. `stream` reads what the peer sends, as fast as it comes.
`serial` makes one request after the other, each on a connection of its own.

`get` and `hold` end at the end of stdin. Each prints `begun` after the first answer, then one line
of JSON. `Load` runs the program for a test. Imports the standard library alone, and starts no
thread.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.support import PATIENCE, ROOT

LONGEST = 10.0 * PATIENCE
"""Seconds after which a request without a whole answer has failed."""
LISTED = 20
"""Failures that are named in the result."""


def parsed(target: str) -> tuple[str, int]:
    address, _, port = target.rpartition(":")
    return address, int(port)


# --- requests -------------------------------------------------------------------------------------


@dataclass
class Request:
    """One request under way."""

    connection: socket.socket
    target: str
    began: float
    answer: bytes = b""


class Requests:
    """All requests of one run. One thread, which waits for sockets with epoll."""

    def __init__(self, targets: list[str], rate: float) -> None:
        self.targets = [(target, parsed(target)) for target in targets]
        self.pause = 1 / rate
        self.open: dict[int, Request] = {}
        self.times: list[float] = []
        self.answers: Counter[str] = Counter()
        self.failures: list[tuple[float, str, str]] = []
        self.late = 0.0
        """Most seconds that a request began after its time: this program was not run."""
        self._epoll = select.epoll()
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        stdin = sys.stdin.fileno()
        self._epoll.register(stdin, select.EPOLLIN | select.EPOLLHUP)
        due, number, ends = self._began, 0, False
        while not ends or self.open:
            now = time.monotonic()
            while not ends and due <= now:
                self.late = max(self.late, now - due)
                self._begin(*self.targets[number % len(self.targets)])
                number += 1
                due += self.pause
            for descriptor, events in self._epoll.poll(max(0.0, 0.1 if ends else due - time.monotonic())):
                if descriptor == stdin:
                    ends = True
                    self._epoll.unregister(stdin)
                else:
                    self._go_on(self.open[descriptor], events)
            self._expire(time.monotonic() - LONGEST)
        took = time.monotonic() - self._began
        ordered = sorted(self.times)
        return {
            "total": number,
            "failed": len(self.failures),
            "failures": self.failures[:LISTED],
            "answers": dict(self.answers),
            "rate": number / took,
            "late": self.late,
            "p50": ordered[len(ordered) // 2] if ordered else 0.0,
            "p99": ordered[len(ordered) * 99 // 100] if ordered else 0.0,
            "longest": ordered[-1] if ordered else 0.0,
        }

    def _begin(self, target: str, address: tuple[str, int]) -> None:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        request = Request(connection, target, time.monotonic())
        failure = connection.connect_ex(address)
        if failure not in (0, errno.EINPROGRESS):
            self._fail(request, f"connect: {errno.errorcode[failure]}")
            return
        self.open[connection.fileno()] = request
        self._epoll.register(connection.fileno(), select.EPOLLOUT)

    def _go_on(self, request: Request, events: int) -> None:
        stage = "connect" if events & select.EPOLLOUT else f"read after {len(request.answer)} bytes"
        try:
            if failure := request.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._fail(request, f"{stage}: {errno.errorcode[failure]}")
            elif events & select.EPOLLOUT:
                request.connection.send(b"GET / HTTP/1.0\r\n\r\n")
                self._epoll.modify(request.connection.fileno(), select.EPOLLIN)
            elif chunk := request.connection.recv(65536):
                request.answer += chunk
            else:
                self._answered(request)
        except OSError as error:
            self._fail(request, f"{stage}: {error}")

    def _answered(self, request: Request) -> None:
        head, _, body = request.answer.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            self._fail(request, f"answer: {head[:60]!r}")
            return
        self._close(request)
        if not self.times:
            print("begun", flush=True)
        self.times.append(time.monotonic() - request.began)
        self.answers[body.decode(errors="replace").strip()] += 1

    def _expire(self, before: float) -> None:
        # in the order in which they began
        while self.open and (oldest := next(iter(self.open.values()))).began < before:
            self._fail(oldest, f"no answer in {LONGEST:g} s, {len(oldest.answer)} bytes came")

    def _fail(self, request: Request, why: str) -> None:
        self.failures.append((round(time.monotonic() - self._began, 3), request.target, why))
        self._close(request)

    def _close(self, request: Request) -> None:
        self.open.pop(request.connection.fileno(), None)
        request.connection.close()  # epoll forgets it


# --- connections that stay ------------------------------------------------------------------------


def hold(targets: list[str], rate: float) -> dict[str, Any]:
    """Send a line in turn on each connection and wait for its echo."""
    connections = []
    for target in targets:
        connection = socket.create_connection(parsed(target), LONGEST)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(LONGEST * 3)
        connections.append((target, connection))
    echoes, longest, broken = 0, 0.0, ""
    began = time.monotonic()
    while not broken:
        for target, connection in connections:
            line, sent = b"%d\n" % echoes, time.monotonic()
            try:
                connection.sendall(line)
                received = b""
                while len(received) < len(line) and (chunk := connection.recv(64)):
                    received += chunk
            except OSError as error:
                broken = f"{target}: {error} after {echoes} echoes"
                break
            if received != line:
                broken = f"{target}: {received!r} instead of {line!r}"
                break
            longest = max(longest, time.monotonic() - sent)
            if not echoes:
                print("begun", flush=True)
            echoes += 1
        if select.select([sys.stdin], [], [], 1 / rate)[0]:
            break
    return {"echoes": echoes, "longest": longest, "broken": broken, "seconds": time.monotonic() - began}


def stream(target: str, seconds: float) -> dict[str, Any]:
    """Read for so long; returns bytes per second of the later three quarters."""
    connection = socket.create_connection(parsed(target), LONGEST)
    connection.settimeout(LONGEST)
    buffer = bytearray(1 << 20)
    connection.recv_into(buffer)
    print("begun", flush=True)
    began = time.monotonic()
    received, since = 0, began + seconds / 4
    while (now := time.monotonic()) < began + seconds:
        size = connection.recv_into(buffer)
        assert size, "the peer has closed the connection"
        received += size if now >= since else 0
    connection.close()
    return {"rate": received / (time.monotonic() - since)}


def serial(target: str, seconds: float) -> dict[str, Any]:
    """Requests one after the other for so long; returns how many in a second."""
    address, answered = parsed(target), 0
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds or not answered:
        with socket.create_connection(address, LONGEST) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
            assert b" 200 " in answer, answer
        if not answered:
            print("begun", flush=True)
        answered += 1
    return {"rate": answered / (now - began)}


# --- for tests ------------------------------------------------------------------------------------


class Load:
    """Runs this program in a network namespace while the block runs; `result` has its JSON then.

    Raises AssertionError if no first answer comes, or the program fails.
    """

    def __init__(
        self, place: str, kind: str, *targets: str, rate: float | None = None, seconds: float | None = None
    ) -> None:
        """`place` is a path of the namespace, such as /proc/1/ns/net."""
        self._command = ["nsenter", f"--net={place}", sys.executable, "-m", "tests.support.swarm.load", kind, *targets]
        self._command += [] if rate is None else ["--rate", str(rate)]
        self._command += [] if seconds is None else ["--seconds", str(seconds)]
        self.result: dict[str, Any] = {}

    def __enter__(self) -> Load:
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 3 * LONGEST)
        if not ready or self._process.stdout.readline() != "begun\n":
            self._process.kill()
            raise AssertionError(f"no answer: {self._command}: {self._process.communicate()}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        out, err = self._process.communicate(timeout=6 * LONGEST)
        if self._process.returncode == 0:
            self.result = json.loads(out)
            if error is not None:
                error.add_note(f"clients meanwhile: {self.result}")
        elif error is None:
            raise AssertionError(f"{self._command}: {err}")

    def assert_none_failed(self) -> None:
        """Each request was answered; or each connection was held."""
        assert not self.result.get("failed") and not self.result.get("broken"), self.result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.swarm.load", description="Clients of a service.")
    parser.add_argument("kind", choices=("get", "hold", "stream", "serial"))
    parser.add_argument("targets", nargs="+", metavar="ADDRESS:PORT")
    parser.add_argument("--rate", type=float, help="requests or lines in a second [default: 500, 50]")
    parser.add_argument("--seconds", type=float, default=2, help="how long `stream` and `serial` last [default: 2]")
    arguments = parser.parse_args()
    with contextlib.suppress(PermissionError):
        os.nice(-5)  # what it measures is not its own wait for a core
    if arguments.kind == "get":
        found = Requests(arguments.targets, arguments.rate or 500).run()
    elif arguments.kind == "hold":
        found = hold(arguments.targets, arguments.rate or 50)
    else:
        found = (stream if arguments.kind == "stream" else serial)(arguments.targets[0], arguments.seconds)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
