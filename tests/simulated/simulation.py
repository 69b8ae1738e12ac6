"""One manager process with its etcd, and agents in another process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from engine.manager.process import SOCKET
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Begin, Call, Message
from tests.simulated import manager
from tests.support import ROOT


class Simulation:
    """The processes, and requests to the manager. Call `start` first, `close` at the end."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="simulated-", dir="/tmp"))
        self.run = self.directory / "run"
        self.last: dict[str, Any] = {"sessions": 0, "running": 0, "beat": 0.0}
        """The last line that the agents printed."""
        self.worst_beat = 0.0
        self._processes: list[subprocess.Popen[str]] = []
        self._connection: Connection
        self._reading: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        for directory in ("root", "run"):
            (self.directory / directory).mkdir(mode=0o700)
        log = open(self.directory / "manager.log", "w")  # noqa: ASYNC230, SIM115
        program = [sys.executable, "-m", "tests.simulated.manager", str(self.directory / "root"), str(self.run)]
        self._processes.append(subprocess.Popen(program, stderr=log, stdout=log, text=True, cwd=ROOT))  # noqa: ASYNC220
        path = self.run / SOCKET
        for _ in range(5000):
            # it does not listen yet
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                reader, writer = await asyncio.open_unix_connection(path)
                break
            await asyncio.sleep(0.02)
        else:
            raise TimeoutError(f"nothing listens on {path}")
        self._connection = Connection(reader, writer, _nothing, dialled=True)
        self._reading.append(asyncio.ensure_future(self._connection.run()))
        address = f"127.0.0.1:{_free_port()}"
        await self._connection.ask(
            Begin(how="init", node=manager.node_name(99_999), listen=address, advertise=address, body=b"{}")
        )

    async def agents(self, count: int, turns: int = 0) -> None:
        """Makes `count` nodes and their agents, which withdraw so many tasks a second. Returns when
        all have a session.
        """
        reader, writer = await asyncio.open_unix_connection(self.run / manager.SOCKET)
        writer.write(f"nodes {count}\n".encode())
        assert await reader.readline() == b"done\n"
        writer.close()
        program = [sys.executable, "-m", "tests.simulated.agents", str(self.run), str(count), str(turns)]
        process = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE, cwd=ROOT)
        self._agents = process
        self._reading.append(asyncio.ensure_future(self._read(process)))
        await self.until("sessions", count, 120 + count / 100)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            report = json.loads(line)
            if "refused" in report:
                raise AssertionError(report["refused"])
            self.last = report
            self.worst_beat = max(self.worst_beat, report["beat"])

    async def until(self, name: str, value: int, seconds: float) -> None:
        """Wait until the agents report this value."""
        deadline = time.monotonic() + seconds
        while self.last[name] != value:
            for reading in self._reading:
                if reading.done():
                    reading.result()
            assert time.monotonic() < deadline, f"{self.last}, {name} {value} expected\n{self.log()}"
            await asyncio.sleep(0.05)

    async def call(self, verb: str, name: str = "", body: Any = None, **query: Any) -> Any:
        encoded = b"" if body is None else json.dumps(body).encode()
        answer = await self._connection.ask(Call(verb=verb, name=name, query=query, body=encoded))
        return json.loads(answer.body) if answer.body else None

    async def create(self, name: str, replicas: int, network: str = "") -> str:
        template: dict[str, Any] = {"ContainerSpec": {"Image": "busybox"}}
        if network:
            template["Networks"] = [{"Target": network}]
        spec = {"Name": name, "TaskTemplate": template, "Mode": {"Replicated": {"Replicas": replicas}}}
        made = await self.call("services.create", body=spec)
        return str(made["ID"])

    async def until_stored(self, service: str, count: int, seconds: float) -> None:
        """Wait until the manager lists `count` running tasks of the service."""
        deadline = time.monotonic() + seconds
        while True:
            found = await self.call("services.list", filters={"id": [service]}, status=True)
            if found[0]["ServiceStatus"]["RunningTasks"] == count:
                return
            assert time.monotonic() < deadline, found[0]["ServiceStatus"]
            await asyncio.sleep(0.1)

    def log(self) -> str:
        return (self.directory / "manager.log").read_text()[-4000:]

    @property
    def manager_pid(self) -> int:
        return self._processes[0].pid

    async def close(self) -> None:
        for reading in self._reading:
            reading.cancel()
        if hasattr(self, "_agents"):
            with contextlib.suppress(ProcessLookupError):
                self._agents.kill()
            await self._agents.wait()
        for process in self._processes:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 20)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.asynccontextmanager
async def simulation(agents: int, turns: int = 0) -> AsyncIterator[Simulation]:
    made = Simulation()
    try:
        await made.start()
        await made.agents(agents, turns)
        yield made
    finally:
        await made.close()


async def _nothing(connection: Connection, message: Message) -> None:
    raise AssertionError(message)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
