"""A small HTTP proxy for tests: absolute-form requests and CONNECT, with a login as the test asks.
It reaches every host at 127.0.0.1, so that a test can use host names that do not exist.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import socketserver
import threading
import time
from urllib.parse import urlsplit

_CHUNK = 1 << 16


class Proxy:
    """One proxy, within `with`."""

    def __init__(self, login: str = "") -> None:
        """`login`: the `USER:PASSWORD` that it wants."""
        self.login = login
        self.asked: list[str] = []
        """The first line of each request."""
        self.slow: tuple[str, ...] = ()
        """Requests whose line contains one of these words wait for half a second."""
        self.most = 0
        """Such requests that waited at the same time."""
        self._slow_now = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    outer._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 64

        self._server = Server(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def requests(self, word: str) -> list[str]:
        return [line for line in self.asked if word in line]

    def _serve(self, client: socket.socket) -> None:
        """Each connection has one request, or is a tunnel."""
        head = b""
        while b"\r\n\r\n" not in head:
            if not (piece := client.recv(_CHUNK)):
                return
            head += piece
        head, _, early = head.partition(b"\r\n\r\n")
        first, *fields = head.decode("latin-1").split("\r\n")
        self.asked.append(first)
        wanted = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if self.login and f"proxy-authorization: {wanted}".lower() not in (each.lower() for each in fields):
            client.sendall(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        method, target, version = first.split(" ")
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        with socket.create_connection(("127.0.0.1", url.port or 80)) as server:
            if method == "CONNECT":
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                server.sendall(early)
                _join(client, server)
                return
            kept = [each for each in fields if not each.lower().startswith(("proxy-", "connection:"))]
            path = f"{url.path or '/'}{f'?{url.query}' if url.query else ''}"
            lines = [f"{method} {path} {version}", *kept, "Connection: close", "", ""]
            if any(word in first for word in self.slow):
                self._delay()
            server.sendall("\r\n".join(lines).encode("latin-1") + early)
            _join(client, server)

    def _delay(self) -> None:
        with self._lock:
            self._slow_now += 1
            self.most = max(self.most, self._slow_now)
        time.sleep(0.5)  # seconds: long enough for others to come meanwhile
        with self._lock:
            self._slow_now -= 1


def _join(client: socket.socket, server: socket.socket) -> None:
    """Carry bytes in both directions until the server has no more."""

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=carry, args=(client, server), daemon=True)
    thread.start()
    carry(server, client)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
    thread.join()
