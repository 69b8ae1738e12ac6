"""Plugins for the tests: Docker's plugin protocol over a Unix socket or TCP, with the standard
library only.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class Raw(bytes):
    """An answer as it is on the wire. The connection is closed after it."""


class Plugin:
    """Remembers every call. Serves from `listen` to `close`, with HTTP/1.1 and kept connections if
    `keep`.

    `answers` replaces calls: method → a body, bytes as they are, a (status, body) pair, or `Raw`.
    `delays`: method → seconds before the call is carried out; `stalls`: after it. `cut`: method →
    the part of the answer that is sent, after the call was carried out, before the connection is
    closed. A call that `close` interrupts gets no answer.
    """

    def __init__(self, *implements: str, keep: bool = False) -> None:
        self.implements = list(implements)
        self.keep = keep
        self.calls: list[tuple[str, Answer]] = []
        self.bare: list[str] = []
        """The methods of calls without a body."""
        self.answers: dict[str, Any] = {}
        self.delays: dict[str, float] = {}
        self.stalls: dict[str, float] = {}
        self._healed = threading.Event()
        self.cut: dict[str, float] = {}
        self.last = ""
        """A method. After the answer to it, the plugin is dead."""
        self.connections = 0
        """Number of connections so far."""
        self._open: set[socket.socket] = set()
        self._server: socketserver.BaseServer | None = None
        self._closed = threading.Event()

    def listen(self, path: Path | None = None) -> str:
        """Listen on the Unix socket `path`, or on TCP. Returns the address."""
        plugin = self
        self._closed.clear()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1" if plugin.keep else "HTTP/1.0"
            wbufsize = -1  # head and body in one write

            def setup(self) -> None:
                super().setup()
                plugin.connections += 1
                plugin._open.add(self.connection)

            def finish(self) -> None:
                plugin._open.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                method = self.path.strip("/")
                if not body:
                    plugin.bare.append(method)
                status, answer = plugin._answer(method, json.loads(body) if body else {})
                plugin._healed.wait(plugin.stalls.get(method, 0))
                part = plugin.cut.get(method, 1.0)
                if part < 1.0:
                    self.close_connection = True
                    if not part:
                        return
                if plugin._closed.is_set():
                    self.close_connection = True
                    return
                if isinstance(answer, Raw):
                    self.close_connection = True
                    self.wfile.write(answer)
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                if plugin.last == self.path.strip("/"):
                    self.server.socket.close()
                    self.close_connection = True
                self.end_headers()
                self.wfile.write(answer[: int(len(answer) * part)])

            def log_message(self, *_: Any) -> None:
                pass

            def address_string(self) -> str:
                return "engine"

        class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
            daemon_threads = True
            address_family = socket.AF_UNIX if path is not None else socket.AF_INET

            def handle_error(self, *_: Any) -> None:
                """The engine has closed the connection."""

        address: Any = str(path) if path is not None else ("127.0.0.1", 0)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        self._server = Server(address, Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return f"unix://{path}" if path is not None else f"tcp://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for each in list(self._open):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Answer as it should from now on."""
        for each in (self.answers, self.delays, self.stalls, self.cut):
            each.clear()
        self._healed.set()
        self._healed = threading.Event()

    def _answer(self, method: str, body: Answer) -> tuple[int, bytes]:
        self.calls.append((method, body))
        self._closed.wait(self.delays.get(method, 0))
        answer = self.answers.get(method)
        if answer is None:
            answer = {"Implements": self.implements} if method == "Plugin.Activate" else self.answer(method, body)
        status, answer = answer if isinstance(answer, tuple) else (200, answer)
        return status, answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    def answer(self, method: str, body: Answer) -> Any:
        """To a call that `answers` does not have."""
        calls = self.methods()
        if method not in calls:
            return 404, b"no such call"
        try:
            return calls[method](body)
        except KeyError as error:
            return {"Err": f"no {error}"}

    def methods(self) -> dict[str, Callable[[Answer], Answer]]:
        """What it can do."""
        return {}


class AuthzPlugin(Plugin):
    """Allows everything except what `deny` names: a function of method and body that returns the
    message of a denial, or the empty text.
    """

    def __init__(self, *, keep: bool = True) -> None:
        super().__init__("authz", keep=keep)
        self.deny: Callable[[str, Answer], str] = lambda method, body: ""

    def answer(self, method: str, body: Answer) -> Any:
        words = self.deny(method, body)
        return {"Allow": not words, "Msg": words}

    def asked(self, method: str = "AuthZReq") -> list[Answer]:
        """The bodies of these calls, with bodies of requests and replies decoded."""
        return [
            body | {name: base64.b64decode(body[name]) for name in ("RequestBody", "ResponseBody") if name in body}
            for called, body in list(self.calls)
            if called == f"AuthZPlugin.{method}"
        ]


class VolumePlugin(Plugin):
    """Keeps volumes as directories below `directory`."""

    def __init__(
        self, directory: Path, *, scope: str = "local", implements: tuple[str, ...] = ("VolumeDriver",)
    ) -> None:
        super().__init__(*implements)
        self.directory = directory
        self.scope = scope
        self.volumes: dict[str, Answer] = {}
        self.mounted: dict[str, list[str]] = {}

    def methods(self) -> dict[str, Callable[[Answer], Answer]]:
        return {
            "VolumeDriver.Capabilities": lambda _: {"Capabilities": {"Scope": self.scope}},
            "VolumeDriver.List": lambda _: {"Volumes": [self._view(name) for name in self.volumes], "Err": ""},
            "VolumeDriver.Create": self._create,
            "VolumeDriver.Remove": self._remove,
            "VolumeDriver.Get": lambda body: {"Volume": self._view(body["Name"], status=True)},
            "VolumeDriver.Path": lambda body: {"Mountpoint": self._view(body["Name"])["Mountpoint"]},
            "VolumeDriver.Mount": self._mount,
            "VolumeDriver.Unmount": self._unmount,
        }

    def names(self, method: str) -> list[str]:
        """Volumes that this method was called for, in order."""
        return [body["Name"] for called, body in self.calls if called == f"VolumeDriver.{method}"]

    def _path(self, name: str) -> Path:
        return self.directory / name.replace("/", "_")

    def _view(self, name: str, *, status: bool = False) -> Answer:
        shown: Answer = {"Name": name, "Mountpoint": str(self._path(name))}
        if status:
            shown["Status"] = {"options": self.volumes[name]}
        return shown if name in self.volumes else {}[f"volume {name}"]

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
