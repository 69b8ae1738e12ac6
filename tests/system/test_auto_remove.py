"""HostConfig.AutoRemove across crashes and restarts of the daemon and the monitor, and the stop of
the engine: each container is removed once, with its anonymous volumes. And StopTimeout at the stop
of the engine.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, alive, until

REMOVED = {"Volumes": {"/v": {}}, "host": {"AutoRemove": True}}


def _waiting(engine: TempEngine, **config: Any) -> tuple[str, str]:
    """A container with AutoRemove that ends with 3 once it finds /end, and its volume."""
    script = "until [ -e /end ]; do sleep 0.05; done; exit 3"
    identifier = engine.started("sh", "-c", script, **(REMOVED | config))
    return identifier, engine.inspect(identifier)["Mounts"][0]["Name"]


def _end(engine: TempEngine, identifier: str) -> None:
    engine.touch(identifier, "/end")


def _gone(engine: TempEngine, identifier: str, volume: str) -> bool:
    found = [
        engine.request("GET", f"/{path}").status for path in (f"containers/{identifier}/json", f"volumes/{volume}")
    ]
    return found == [404, 404]


def test_an_exit_while_no_daemon_is_there(own_engine: TempEngine) -> None:
    engine = own_engine
    before = engine.footprint()
    identifier, volume = _waiting(engine)
    running, other = _waiting(engine)
    pid = engine.inspect(identifier)["State"]["Pid"]
    end = Path(f"/proc/{pid}/root/end")
    engine.kill9()
    end.touch()
    until("it has ended", lambda: not alive(pid))
    engine.start()
    until("it is gone", lambda: _gone(engine, identifier, volume))
    assert engine.inspect(running)["State"]["Running"], "one that runs goes on"
    engine.restart()
    _end(engine, running)
    until("it is gone too", lambda: _gone(engine, running, other))
    engine.assert_settles(before)
    engine.assert_recorded()


def test_the_monitor_dies(own_engine: TempEngine) -> None:
    engine = own_engine
    identifier, volume = _waiting(engine)
    engine.replace_monitor()
    assert engine.inspect(identifier)["State"]["Running"]
    _end(engine, identifier)
    until("it is gone", lambda: _gone(engine, identifier, volume))


def test_a_reboot(own_engine: TempEngine) -> None:
    """One that was created and never started stays: its client may be about to start it."""
    engine = own_engine
    identifier, volume = _waiting(engine)
    created = engine.create("true", **REMOVED)
    engine.reboot()
    until("it is gone", lambda: _gone(engine, identifier, volume))
    assert engine.containers() == [created]


def test_the_engine_is_stopped(own_engine: TempEngine) -> None:
    engine = own_engine
    identifier, volume = _waiting(engine)
    engine.stop(5)
    engine.start()
    until("it is gone", lambda: _gone(engine, identifier, volume))


def test_a_restart_by_a_client_keeps_it(own_engine: TempEngine) -> None:
    engine = own_engine
    identifier, volume = _waiting(engine)
    pid = engine.inspect(identifier)["State"]["Pid"]
    assert engine.request("POST", f"/containers/{identifier}/restart?t=0").status == 204
    state = engine.inspect(identifier)["State"]
    assert state["Running"] and state["Pid"] != pid
    _end(engine, identifier)
    until("it is gone", lambda: _gone(engine, identifier, volume))


def test_the_stop_of_the_engine_waits_no_longer_than_a_containers_own_timeout(own_engine: TempEngine) -> None:
    engine = own_engine
    script = "trap 'sleep 10; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    identifier = engine.started("sh", "-c", script, StopTimeout=1)
    until("ready", lambda: b"ready" in engine.logs(identifier))
    engine.stop(60)
    engine.start()
    assert engine.inspect(identifier)["State"]["ExitCode"] == 137


@pytest.mark.parametrize("both", [False, True], ids=["daemon", "daemon and monitor"])
def test_a_start_that_is_cut(tmp_path: Path, both: bool) -> None:
    """The client of the start has got an error, and will not remove it. One that was created alone
    may still be started.
    """
    runtime, gate = tmp_path / "slow", tmp_path / "gate"
    os.mkfifo(gate)
    runtime.write_text(
        f'#!/bin/sh\ncase "$*" in *\'run --detach\'*) : < {gate};; esac\nexec {shutil.which("crun") or "runc"} "$@"\n'
    )
    runtime.chmod(0o755)
    with TempEngine("--runtime", str(runtime)) as engine:
        engine.load_busybox()
        waits = engine.create("true", **REMOVED)
        identifier = engine.create("sleep", "600", **REMOVED)
        volume = engine.inspect(identifier)["Mounts"][0]["Name"]
        client = engine.popen("start", identifier)
        until("the start is under way", (engine.root / "containers" / identifier / "config.json").exists)
        if both:
            os.kill(engine.monitor_pid(), signal.SIGKILL)
        engine.kill9()
        assert client.wait(30 * PATIENCE) != 0
        engine.start()
        until("it is gone", lambda: _gone(engine, identifier, volume))
        assert engine.inspect(waits)["State"]["Status"] == "created"
