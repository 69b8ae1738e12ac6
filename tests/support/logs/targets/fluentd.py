"""The server of Fluentd's Forward protocol that npm's @fluent-org/logger has, as a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.logs.targets.certificates import Pair
from tests.support.logs.targets.programs import Server

MODULES = ROOT / ".venv/clients/npm/node_modules"
_SCRIPT = """
const { FluentServer, EventTime } = require("@fluent-org/logger");
const fs = require("fs");
const [out, listen, cert, key] = process.argv.slice(2);
const tls = cert ? { cert: fs.readFileSync(cert), key: fs.readFileSync(key) } : undefined;
const server = new FluentServer({ listenOptions: JSON.parse(listen), tlsOptions: tls });
const file = fs.openSync(out, "a");
server.on("entry", (tag, time, record) => {
  const at = time instanceof EventTime ? [time.epoch, time.nano] : time;
  fs.writeSync(file, JSON.stringify({ tag, time: at, record }) + "\\n");
});
server.listen().then(() => fs.writeFileSync(out + ".port", String(server.port ?? 0)));
"""


class FluentServer(Server):
    """Stores entries in a file. It acknowledges a chunk before it has stored its entries."""

    def __init__(self, directory: Path, *, path: str = "", pair: Pair | None = None) -> None:
        """`path`: of a Unix socket to listen on. `pair`: it speaks TLS."""
        super().__init__(directory)
        self.port = 0
        self.path = path
        self._pair = pair
        self.received = directory / "received"

    def start(self) -> None:
        port = self.directory / "received.port"
        port.unlink(missing_ok=True)
        (self.directory / "server.js").write_text(_SCRIPT)
        listen = {"path": self.path} if self.path else {"port": self.port, "host": "127.0.0.1"}
        if self.path:
            Path(self.path).unlink(missing_ok=True)
        command = [
            *("env", f"NODE_PATH={MODULES}", str(MODULES / ".bin/node"), "server.js"),
            *(str(self.received), json.dumps(listen)),
            *((self._pair.cert, self._pair.key) if self._pair is not None else ()),
        ]
        self.run(command, lambda: port.exists() and port.read_text())
        self.port = int(port.read_text())

    def entries(self) -> list[dict[str, Any]]:
        """{tag, time, record} of each entry; the time is [seconds, nanoseconds] or seconds."""
        if not self.received.exists():
            return []
        data = self.received.read_bytes()
        return [json.loads(line, object_hook=_text) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def _text(value: dict[str, Any]) -> Any:
    """The server decodes an empty text as a Buffer."""
    return "" if value == {"type": "Buffer", "data": []} else value
