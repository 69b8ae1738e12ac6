"""The engine with a control socket, RUN/control.sock, for tests of managed plugins below the API:
installs a plugin from a config and a root, starts and stops it, and looks at its trees.

    python -m tests.support.plugins.daemon serve …

One line of JSON per request, [verb, arguments], and one per answer: {"ok": …} or {"error": text}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

import msgspec

import engine.daemon
from engine.__main__ import main
from engine.errors import EngineError
from engine.managed_plugins.record import PluginRecord
from engine.wire.plugins import PluginConfig, PluginSettings
from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine
from tests.support.plugins.images import root


class PluginDaemon(engine.daemon.Daemon):
    """The daemon, and the verbs of the control socket."""

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        self.table = self.records.table("plugin", PluginRecord)
        path = self.config.run / "control.sock"
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve_control, path)
        stack.callback(path.unlink)
        stack.callback(server.close)
        await super()._listen(stack)

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        verb, arguments = json.loads(await reader.readline())
        try:
            answer: dict[str, Any] = {"ok": await getattr(self, f"do_{verb}")(**arguments)}
        except EngineError as error:
            answer = {"error": error.message}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    def _record(self, plugin: str) -> PluginRecord:
        return self.table.load()[plugin]

    async def do_install(self, plugin: str, config: dict[str, Any], root: str) -> None:
        wanted = msgspec.convert(config, PluginConfig)
        settings = PluginSettings(
            mounts=wanted.mounts,
            env=[f"{each.name}={each.value or ''}" for each in wanted.env],
            args=wanted.args.value or [],
            devices=wanted.linux.devices or [],
        )
        record = PluginRecord(
            id=plugin, name=f"vendor/{plugin[:4]}:latest", config=wanted, settings=settings, chain_id=""
        )
        await self.snapshots.prepare(plugin, None)
        # not tarfile: the Python of Debian 12 does not know its filters
        command = ["tar", "-xf", root, "-C", self.snapshots.upper(plugin)]
        await asyncio.to_thread(subprocess.run, command, check=True)
        await self.records.commit(self.table.put(plugin, record))

    async def do_enable(self, plugin: str, timeout: float = 30) -> None:
        await self.processes.start(self._record(plugin), timeout)
        await self._mark(plugin, True)

    async def do_run_only(self, plugin: str) -> None:
        """As an `enable` that is cut before its record is written."""
        await self.processes.start(self._record(plugin), 30)

    async def do_disable(self, plugin: str) -> None:
        await self._mark(plugin, False)
        await self.processes.stop(self._record(plugin))

    async def _mark(self, plugin: str, enabled: bool) -> None:
        record = msgspec.structs.replace(self._record(plugin), enabled=enabled)
        await self.records.commit(self.table.put(plugin, record))

    async def do_remove(self, plugin: str) -> None:
        await self.records.commit(self.table.delete(plugin))
        await self.snapshots.remove(plugin)
        await self.processes.discard(plugin)

    async def do_pid(self, plugin: str) -> int:
        """0 while it does not run."""
        process = self.monitor.processes.get(plugin)
        return process.pid if process is not None and self.processes.runs(plugin) else 0

    async def do_tree(self, plugin: str, path: str) -> dict[str, str]:
        """The files in the tree with their content."""
        tree = await self.processes.tree(self._record(plugin), path)
        try:
            names = os.listdir(f"/proc/self/fd/{tree}")
            return {name: self._read(tree, name) for name in names}
        finally:
            os.close(tree)

    def _read(self, tree: int, name: str) -> str:
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=tree)
        except OSError as error:
            return os.strerror(error.errno)
        try:
            return os.read(file, 1000).decode()
        except IsADirectoryError:
            return "/"
        finally:
            os.close(file)


class PluginEngine(TempEngine):
    """A `TempEngine` whose daemon has the control socket."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self._program = (sys.executable, "-m", "tests.support.plugins.daemon")

    def install(self, plugin: str, config: dict[str, Any]) -> None:
        """Install a plugin with the tests' root, under an id."""
        archive = self.base / "root.tar"
        if not archive.exists():
            archive.write_bytes(root())
        self._known.add(plugin)
        self.ask("install", plugin, config=config, root=str(archive))

    def ask(self, verb: str, plugin: str, **arguments: Any) -> Any:
        """The result of a verb. Raises ControlError with the message of its failure."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60 * PATIENCE)
            connection.connect(str(self.run / "control.sock"))
            connection.sendall(json.dumps([verb, {"plugin": plugin, **arguments}]).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
        if "error" in answer:
            raise ControlError(answer["error"])
        return answer["ok"]


class ControlError(Exception):
    """A verb failed."""


if __name__ == "__main__":
    engine.daemon.Daemon = PluginDaemon  # type: ignore[misc]
    sys.exit(main())
