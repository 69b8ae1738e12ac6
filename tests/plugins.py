"""A volume plugin for the tests: Docker's plugin protocol over a Unix socket or TCP, with the
standard library only.
"""

from __future__ import annotations

import http.server
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class VolumePlugin:
    """Keeps volumes as directories below `directory`, and remembers every call. Serves from
    `__enter__` to `__exit__`.

    `answers` replaces calls: method → a body, bytes as they are, or a (status, body) pair.
    `delays`: method → seconds.
    """

    def __init__(
        self, directory: Path, *, scope: str = "local", implements: tuple[str, ...] = ("VolumeDriver",)
    ) -> None:
        self.directory = directory
        self.scope = scope
        self.implements = list(implements)
        self.calls: list[tuple[str, Answer]] = []
        self.volumes: dict[str, Answer] = {}
        self.mounted: dict[str, list[str]] = {}
        self.answers: dict[str, Any] = {}
        self.delays: dict[str, float] = {}
        self._server: socketserver.BaseServer | None = None

    def listen(self, path: Path | None = None) -> str:
        """Listen on the Unix socket `path`, or on TCP. Returns the address."""
        plugin = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = plugin._answer(self.path.strip("/"), json.loads(body) if body else {})
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

            def address_string(self) -> str:
                return "engine"

        class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
            daemon_threads = True
            address_family = socket.AF_UNIX if path is not None else socket.AF_INET

        address: Any = str(path) if path is not None else ("127.0.0.1", 0)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        self._server = Server(address, Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return f"unix://{path}" if path is not None else f"tcp://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def names(self, method: str) -> list[str]:
        """Volumes that this method was called for, in order."""
        return [body["Name"] for called, body in self.calls if called == f"VolumeDriver.{method}"]

    def _answer(self, method: str, body: Answer) -> tuple[int, bytes]:
        self.calls.append((method, body))
        time.sleep(self.delays.get(method, 0))
        answer = self.answers.get(method)
        if answer is None:
            calls: dict[str, Callable[[Answer], Answer]] = {
                "Plugin.Activate": lambda _: {"Implements": self.implements},
                "VolumeDriver.Capabilities": lambda _: {"Capabilities": {"Scope": self.scope}},
                "VolumeDriver.List": lambda _: {"Volumes": [self._view(name) for name in self.volumes], "Err": ""},
                "VolumeDriver.Create": self._create,
                "VolumeDriver.Remove": self._remove,
                "VolumeDriver.Get": lambda body: {"Volume": self._view(body["Name"], status=True)},
                "VolumeDriver.Path": lambda body: {"Mountpoint": self._view(body["Name"])["Mountpoint"]},
                "VolumeDriver.Mount": self._mount,
                "VolumeDriver.Unmount": self._unmount,
            }
            if method not in calls:
                return 404, b"no such call"
            try:
                answer = calls[method](body)
            except KeyError:
                answer = {"Err": f"no volume {body['Name']}"}
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        return status, answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    def _path(self, name: str) -> Path:
        return self.directory / name.replace("/", "_")

    def _view(self, name: str, *, status: bool = False) -> Answer:
        shown: Answer = {"Name": name, "Mountpoint": str(self._path(name))}
        if status:
            shown["Status"] = {"options": self.volumes[name]}
        return shown if name in self.volumes else {}[name]

    def _create(self, body: Answer) -> Answer:
        self.volumes[body["Name"]] = body.get("Opts") or {}
        os.makedirs(self._path(body["Name"]), exist_ok=True)
        return {"Err": ""}

    def _remove(self, body: Answer) -> Answer:
        del self.volumes[body["Name"]]
        return {}

    def _mount(self, body: Answer) -> Answer:
        self.mounted.setdefault(body["Name"], []).append(body["ID"])
        return self._view(body["Name"])

    def _unmount(self, body: Answer) -> Answer:
        self.mounted[body["Name"]].remove(body["ID"])
        return {"Err": ""}
