"""`python -m bench.sink KIND PLACE`: a receiver of log lines that only counts them, for the rows of
`rows/delivery.py`.

KIND `stream` (a TCP port: lines, messages that end in a zero byte, MessagePack), `datagrams` (a UDP
port), `journal` (the path of a Unix datagram socket) or `http` (a TCP port: POST bodies). It prints
`ready`, and answers each line on stdin with the number of lines so far.

Its processor time is nobody's in the rows; it should still be small, because it shares the cores.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading

from bench.image import MARK

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 27\r\n\r\n{"text":"Success","code":0}'


class Counter:
    def __init__(self) -> None:
        self.lines = 0
        self._lock = threading.Lock()

    def add(self, lines: int) -> None:
        with self._lock:
            self.lines += lines


def stream(listener: socket.socket, counter: Counter) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_stream, args=(connection, counter), daemon=True).start()


def _stream(connection: socket.socket, counter: Counter) -> None:
    while data := connection.recv(1 << 20):
        counter.add(data.count(MARK))


def http(listener: socket.socket, counter: Counter) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_http, args=(connection, counter), daemon=True).start()


def _http(connection: socket.socket, counter: Counter) -> None:
    received = b""
    while True:
        while (end := received.find(b"\r\n\r\n")) < 0:
            data = connection.recv(1 << 20)
            if not data:
                return
            received += data
        head, body = received[:end].lower(), received[end + 4 :]
        if b"transfer-encoding: chunked" in head:
            while not body.endswith(b"0\r\n\r\n"):
                body += connection.recv(1 << 20)
            received = b""
        else:
            found = re.search(rb"content-length: (\d+)", head)
            size = int(found[1]) if found else 0
            parts = [body]
            have = len(body)
            while have < size:
                parts.append(connection.recv(1 << 20))
                have += len(parts[-1])
            body = b"".join(parts)
            body, received = body[:size], body[size:]
        counter.add(body.count(MARK))
        connection.sendall(ANSWER)


def datagrams(receiver: socket.socket, counter: Counter) -> None:
    """A datagram is a line. Compressed ones are not looked into."""
    while True:
        counter.add(len(receiver.recv(1 << 16)) > 0)


def journal(receiver: socket.socket, counter: Counter) -> None:
    while True:  # an empty datagram only asks whether the receiver lives
        counter.add(MARK in receiver.recv(1 << 16))


def main(arguments: list[str]) -> int:
    kind, place = arguments
    counter = Counter()
    if kind == "journal":
        os.makedirs(os.path.dirname(place), exist_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bound.bind(place)
    elif kind == "datagrams":
        bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        bound.bind(("127.0.0.1", int(place)))
    else:
        bound = socket.create_server(("127.0.0.1", int(place)))
    for option in (socket.SO_RCVBUF, getattr(socket, "SO_RCVBUFFORCE", 33)):
        if kind in ("datagrams", "journal"):
            bound.setsockopt(socket.SOL_SOCKET, option, 64 << 20)
    work = {"stream": stream, "http": http, "datagrams": datagrams, "journal": journal}[kind]
    threading.Thread(target=work, args=(bound, counter), daemon=True).start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(counter.lines, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
