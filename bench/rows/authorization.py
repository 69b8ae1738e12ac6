"""Authorization plugins: what one plugin, which is asked twice, adds to the time of a request."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from typing import Any

from bench import wire
from bench.engines import Engine, Engined
from bench.job import Figure, Job, Size
from bench.report import Target
from tests.support import ROOT
from tests.support.engine.harness import TempEngine

PING = wire.request("GET", "/_ping")


class Guarded:
    """A second engine beside another, with a plugin that allows everything."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine, Engined)
        with contextlib.ExitStack() as stack:
            self._engine = TempEngine(
                within=engine.namespaces.command(directory=engine.checkout), checkout=engine.checkout
            )
            engine.namespaces.own(self._engine.base)
            stack.callback(self._engine.close)
            sockets = self._engine.base / "sockets"
            sockets.mkdir()
            self._plugin = subprocess.Popen(
                [sys.executable, "-m", "bench.gate", str(sockets / "gate.sock")],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(self._plugin.communicate)
            assert self._plugin.stdout is not None
            assert self._plugin.stdout.readline() == b"ready\n"
            self._engine.arguments = ("--plugin-socket-directory", str(sockets), "--authorization-plugin", "gate")
            self._engine.start()
            stack.callback(self._engine.stop)
            self._stack = stack.pop_all()

    def connection(self) -> wire.Connection:
        return wire.Connection(self._engine.socket)

    def close(self) -> None:
        self._stack.close()


def added(engine: Engine, guarded: Guarded) -> tuple[float, float]:
    """Milliseconds of a ping with one plugin, and how many more that are than without."""
    with engine.connection() as plain, guarded.connection() as asked:
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(300):
            for connection in (plain, asked):
                begin = time.perf_counter()
                connection.send(PING)
                status, body = connection.answer()
                times[connection is asked].append((time.perf_counter() - begin) * 1000)
                assert (status, body) == (200, b"OK"), (status, body)
    withal, without = statistics.median(times[True]), statistics.median(times[False])
    return withal, withal - without


def finish(_: Engine, guarded: Any) -> None:
    guarded.close()


def jobs(size: Size) -> list[Job]:
    return [
        Job(
            "authz",
            [
                Figure("authz", "ping, authorized by one plugin", "ms"),
                Figure("authz-added", "of that, for the plugin's two calls", "ms", target=Target({}, 0.5)),
            ],
            added,
            size.rounds(5),
            prepare=Guarded,
            finish=finish,
            idle=None,
            ours=True,
        )
    ]
