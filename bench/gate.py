"""An authorization plugin that allows everything, as fast as Python can: `python -m bench.gate
SOCKET`. Prints "ready", and serves until its input ends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading

_ANSWERS = {True: b'{"Implements":["authz"]}', False: b'{"Allow":true}'}


def serve(connection: socket.socket) -> None:
    """Answer every request of one connection."""
    received = b""
    with connection:
        while True:
            while b"\r\n\r\n" not in received:
                data = connection.recv(65536)
                if not data:
                    return
                received += data
            head, _, received = received.partition(b"\r\n\r\n")
            left = int(head.lower().partition(b"content-length:")[2].split()[0]) - len(received)
            while left > 0:
                left -= len(connection.recv(min(left, 65536)))
            received = b""
            answer = _ANSWERS[b"Plugin.Activate" in head]
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))


def listen(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    threading.Thread(target=listen, args=(sys.argv[1],), daemon=True).start()
    sys.stdin.buffer.read()
    os.unlink(sys.argv[1])
