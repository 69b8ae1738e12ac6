"""A daemon that starts listens before it has restored containers: what it answers meanwhile is
right, what it cannot answer yet waits, and a failure or a kill in between loses nothing.

The monitor is stopped for as long as the restoration is to last.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE
from tests.support.engine.client import Answer, json_stream, request
from tests.support.engine.harness import TempEngine, alive, kill_and_wait, until
from tests.support.nightly import nightly

LONG = 60.0 * PATIENCE


@contextlib.contextmanager
def restoring(engine: TempEngine) -> Iterator[None]:
    """A daemon that was killed, and its successor, which restores containers for as long as this
    context lasts.
    """
    monitor = engine.monitor_pid()
    engine.kill9()
    os.kill(monitor, signal.SIGSTOP)
    try:
        engine.spawn()
        until("it answers", lambda: pinged(engine))
        yield
    finally:
        os.kill(monitor, signal.SIGCONT)


def pinged(engine: TempEngine) -> bool:
    with contextlib.suppress(OSError):
        return request(engine.socket, "GET", "/_ping").status == 200
    return False


def settled(engine: TempEngine) -> None:
    """It has restored all containers."""
    until("all are restored", lambda: "Restoring" not in request(engine.socket, "GET", "/info").json())


def asked(engine: TempEngine, method: str, target: str, body: Any = None) -> Answer:
    return request(engine.socket, method, target, body, timeout=LONG)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def waits(*answers: Future[Answer]) -> None:
    """None of them is there, although there was time."""
    time.sleep(0.3)  # a wrong answer would come at once
    assert not any(each.done() for each in answers), [each.result() for each in answers if each.done()]


def test_what_is_answered_meanwhile(own_engine: TempEngine, pool: ThreadPoolExecutor) -> None:
    engine = own_engine
    running = [engine.started("sleep", "600", name=f"runs{number}") for number in range(3)]
    resting = engine.create("true", name="rests")
    with restoring(engine):
        said = asked(engine, "GET", "/info").json()
        assert said["Restoring"] is True
        assert (said["Containers"], said["ContainersRunning"], said["ContainersStopped"]) == (4, 3, 1)
        assert asked(engine, "GET", "/version").status == 200
        listed = pool.submit(asked, engine, "GET", "/containers/json?all=1")
        inspected = pool.submit(asked, engine, "GET", "/containers/runs0/json")
        images = pool.submit(asked, engine, "GET", "/images/json")
        waits(listed, inspected, images)
    assert {each["Id"] for each in listed.result().json()} == {*running, resting}
    assert inspected.result().json()["State"]["Status"] == "running"
    assert len(images.result().json()) == 1
    settled(engine)


def test_verbs_wait(own_engine: TempEngine, pool: ThreadPoolExecutor) -> None:
    """A verb finds the container as it is, and no name is given twice."""
    engine = own_engine
    running = engine.started("sleep", "600", name="runs")
    resting = engine.create("true", name="rests")
    body = {"Image": "busybox"}
    with restoring(engine):
        taken = pool.submit(asked, engine, "POST", "/containers/create?name=runs", body)
        free = [pool.submit(asked, engine, "POST", "/containers/create?name=new", body) for _ in range(4)]
        again = pool.submit(asked, engine, "POST", f"/containers/{running}/start")
        removed = pool.submit(asked, engine, "DELETE", f"/containers/{resting}")
        pruned = pool.submit(asked, engine, "POST", "/volumes/prune")
        waits(taken, *free, again, removed, pruned)
    assert taken.result().status == 409
    assert Counter(each.result().status for each in free) == {201: 1, 409: 3}
    assert again.result().status == 304
    assert removed.result().status == 204
    assert pruned.result().status == 200
    assert {each.removeprefix("/") for each in named(engine)} == {"runs", "new"}


def test_a_stop_meanwhile_is_no_reason_to_start(own_engine: TempEngine, pool: ThreadPoolExecutor) -> None:
    """At its start the daemon starts containers with this policy that do not run."""
    engine = own_engine
    running = engine.started("sleep", "600", host={"RestartPolicy": {"Name": "always"}})
    with restoring(engine):
        stopped = pool.submit(asked, engine, "POST", f"/containers/{running}/stop?t=0")
        waits(stopped)
    assert stopped.result().status == 204
    settled(engine)
    until("it has started", lambda: engine.log().count("listening on ") >= 2)
    time.sleep(0.3)  # for a start by the restart policy, which must not come
    state = engine.inspect(running)["State"]
    assert (state["Status"], state["ExitCode"]) == ("exited", 137)


def named(engine: TempEngine) -> list[str]:
    return [name for each in asked(engine, "GET", "/containers/json?all=1").json() for name in each["Names"]]


def test_no_address_twice(own_engine: TempEngine, pool: ThreadPoolExecutor) -> None:
    engine = own_engine
    engine.docker("network", "create", "net")
    for _ in range(6):
        engine.started("sleep", "600", network="net")
    with restoring(engine):
        started = [pool.submit(run_on, engine, "net") for _ in range(12)]
        time.sleep(0.3)  # so that they wait before the restoration goes on
    for each in started:
        each.result()
    found = asked(engine, "GET", "/networks/net").json()["Containers"]
    assert len({each["IPv4Address"] for each in found.values()}) == len(found) == 18


def run_on(engine: TempEngine, network: str) -> None:
    body = {"Image": "busybox", "Cmd": ["sleep", "600"], "HostConfig": {"NetworkMode": network}}
    made = asked(engine, "POST", "/containers/create", body)
    assert made.status == 201, made
    assert asked(engine, "POST", f"/containers/{made.json()['Id']}/start").status == 204


def test_events_in_order(own_engine: TempEngine, pool: ThreadPoolExecutor) -> None:
    """A client that listens at once sees the end of what ended without a daemon, and then what was
    asked for meanwhile.
    """
    engine = own_engine
    ended = engine.started("sleep", "600", name="ended", host={"AutoRemove": True})
    pid = engine.inspect(ended)["State"]["Pid"]
    seen: list[tuple[str, str]] = []

    def listen() -> None:
        for event in json_stream(engine.socket, "/events", timeout=LONG):
            seen.append((event["Actor"]["Attributes"].get("name", ""), event["Action"]))
            if (event["Action"] == "destroy" and ended == event["Actor"]["ID"]) or len(seen) > 20:
                return

    monitor = engine.monitor_pid()
    engine.kill9()
    os.kill(monitor, signal.SIGSTOP)
    kill_and_wait_of_stopped(pid)
    try:
        engine.spawn()
        until("it answers", lambda: pinged(engine))
        listener = threading.Thread(target=listen)
        listener.start()
        until("it listens", lambda: asked(engine, "GET", "/info").json()["NEventsListener"] == 1)
        waiting = pool.submit(asked, engine, "GET", "/containers/json?filters=" + '{"name":["ended"]}')
        waits(waiting)
    finally:
        os.kill(monitor, signal.SIGCONT)
    listener.join(LONG)
    own = [action for name, action in seen if name == "ended"]
    assert own[0] == "die" and own[-1] == "destroy", seen
    assert waiting.result().json() == []


def kill_and_wait_of_stopped(pid: int) -> None:
    """SIGKILL to the process, whose parent does not run: it stays a zombie."""
    os.kill(pid, signal.SIGKILL)
    until("it has ended", lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize("status", ["healthy", "unhealthy"])
def test_filters(own_engine: TempEngine, pool: ThreadPoolExecutor, status: str) -> None:
    """By status and health, of what runs and of what has ended meanwhile."""
    engine = own_engine
    test = "true" if status == "healthy" else "false"
    checked = {"Test": ["CMD", test], "Interval": 200_000_000, "Retries": 1}
    healthy = engine.started("sleep", "600", Healthcheck=checked)
    ended = engine.started("sleep", "600")
    pid = engine.inspect(ended)["State"]["Pid"]
    until("it is probed", lambda: engine.inspect(healthy)["State"]["Health"]["Status"] == status)
    engine.kill9()
    kill_and_wait(pid)
    until("it has ended", lambda: not alive(pid))
    engine.spawn()
    until("it answers", lambda: pinged(engine))
    for filters, expected in (
        (f'{{"health":["{status}"]}}', [healthy]),
        ('{"status":["running"]}', [healthy]),
        ('{"status":["exited"]}', [ended]),
    ):
        found = asked(engine, "GET", f"/containers/json?filters={filters}").json()
        assert [each["Id"] for each in found] == expected, filters


@pytest.mark.parametrize("rounds", [2, *nightly(10)])
def test_killed_during_the_restoration(own_engine: TempEngine, pool: ThreadPoolExecutor, rounds: int) -> None:
    engine = own_engine
    engine.docker("network", "create", "net")
    running = [engine.started("sleep", "600", network="net") for _ in range(4)]
    restarted = engine.started("sleep", "600", host={"RestartPolicy": {"Name": "always"}})
    pid = engine.inspect(restarted)["State"]["Pid"]
    for turn in range(rounds):
        with restoring(engine):
            waiting = pool.submit(asked, engine, "POST", "/containers/create?name=never", {"Image": "busybox"})
            waits(waiting)
            engine.kill9()
            with pytest.raises(OSError):
                waiting.result()
            if turn == 0:
                kill_and_wait_of_stopped(pid)
        engine.start()
        listed = asked(engine, "GET", "/containers/json?all=1").json()
        assert {each["Id"] for each in listed} == {*running, restarted}
    until("it runs again", lambda: engine.inspect(restarted)["State"]["Running"])
    assert engine.inspect(restarted)["State"]["Pid"] != pid
    for each in running:
        assert engine.inspect(each)["State"]["Running"]


def test_a_start_that_fails(own_engine: TempEngine, pool: ThreadPoolExecutor) -> None:
    """Requests that wait are refused, containers run on, and the next daemon has them."""
    engine = own_engine
    running = engine.started("sleep", "600")
    (engine.run / "exec").rename(engine.run / "aside")
    with restoring(engine):
        (engine.run / "exec").write_text("no directory")
        listed = pool.submit(asked, engine, "GET", "/containers/json")
        waits(listed)
    with contextlib.suppress(OSError):  # its end was faster
        assert listed.result().status == 503
    assert engine.process is not None
    assert engine.process.wait(LONG) == 1
    engine.process = None
    (engine.run / "exec").unlink()
    (engine.run / "aside").rename(engine.run / "exec")
    engine.start()
    assert engine.inspect(running)["State"]["Running"]


@pytest.mark.parametrize("count", [400, *nightly(4000)])
def test_many_requests_meanwhile(own_engine: TempEngine, pool: ThreadPoolExecutor, count: int) -> None:
    engine = own_engine
    running = {engine.started("sleep", "600") for _ in range(5)}
    targets = ["/containers/json", f"/containers/{min(running)}/json", "/_ping", "/info", "/networks"]
    with restoring(engine):
        asked_for = [pool.submit(asked, engine, "GET", targets[number % 5]) for number in range(count)]
        time.sleep(0.3)  # so that they wait before the restoration goes on
    for number, each in enumerate(asked_for):
        answer = each.result()
        assert answer.status == 200, answer
        if number % 5 == 0:
            assert {one["Id"] for one in answer.json()} == running


def test_names_in_networks_afterwards(own_engine: TempEngine) -> None:
    """Containers find one another again once the daemon has started."""
    engine = own_engine
    engine.docker("network", "create", "net")
    engine.started("sleep", "600", network="net", name="one")
    two = engine.started("sleep", "600", network="net", name="two")
    engine.restart()
    assert "one" in engine.docker("exec", two, "nslookup", "one", "127.0.0.11").out
