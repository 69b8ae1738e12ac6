"""Edge cases of the lifecycle: stops with and without a timeout, paused containers, signals,
restart policies, memory, names, many verbs at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.system.memory_events import MemoryEvents
from tests.support.engine import cgroups
from tests.support.engine.harness import TempEngine, alive, until

STUBBORN = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
POLITE = ("sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done")


def state(engine: TempEngine, identifier: str) -> Any:
    return engine.inspect(identifier)["State"]


def ready(engine: TempEngine, identifier: str) -> None:
    until("ready", lambda: b"ready" in engine.logs(identifier))


def events(engine: TempEngine, identifier: str, since: float) -> list[Any]:
    filters = json.dumps({"container": [identifier]}).replace('"', "%22").replace(" ", "")
    body = engine.request("GET", f"/v1.24/events?since={since:.9f}&until={time.time():.9f}&filters={filters}").body
    return [json.loads(line) for line in body.splitlines()]


def actions(engine: TempEngine, identifier: str, since: float) -> list[str]:
    return [event["status"] for event in events(engine, identifier, since)]


class Background:
    """A call in a thread; `result` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._value = self._call()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, seconds: float = 30) -> Any:
        self._thread.join(seconds)
        assert self.done
        return self._value


# --- stop, kill -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["stop", "restart"])
def test_without_patience(engine: TempEngine, verb: str) -> None:
    """t=0: the stop signal, followed at once by SIGKILL."""
    begin = time.time()
    identifier = engine.started(*STUBBORN)
    ready(engine, identifier)
    engine.post(f"/containers/{identifier}/{verb}?t=0")
    said = actions(engine, identifier, begin)
    end = ["start", "restart"] if verb == "restart" else []
    assert said == ["create", "start", "kill", "kill", "die", "stop", *end]
    assert state(engine, identifier)["Running"] == (verb == "restart")


def test_patience_without_end(engine: TempEngine) -> None:
    """t=-1: the stop waits without limit. Verbs with a timeout do not wait for it."""
    identifier = engine.started(*STUBBORN)
    ready(engine, identifier)
    patient = Background(lambda: engine.post(f"/containers/{identifier}/stop?t=-1"))
    until("the signal is sent", lambda: "kill" in actions(engine, identifier, time.time() - 60))
    time.sleep(0.3)
    assert not patient.done
    assert state(engine, identifier)["Running"]
    engine.post(f"/containers/{identifier}/start", 304)
    engine.post(f"/containers/{identifier}/stop?t=0")
    patient.result()
    assert state(engine, identifier)["ExitCode"] == 137


def test_removal_by_force_does_not_wait_for_a_patient_stop(engine: TempEngine) -> None:
    identifier = engine.started(*STUBBORN)
    ready(engine, identifier)
    patient = Background(lambda: engine.request("POST", f"/v1.24/containers/{identifier}/stop?t=-1"))
    until("the signal is sent", lambda: "kill" in actions(engine, identifier, time.time() - 60))
    assert engine.request("DELETE", f"/v1.24/containers/{identifier}").status == 409
    assert engine.request("DELETE", f"/v1.24/containers/{identifier}?force=1").status == 204
    assert patient.result().status == 204
    assert engine.request("GET", f"/v1.24/containers/{identifier}/json").status == 404


def test_stop_in_time_gives_the_program_s_own_code(engine: TempEngine) -> None:
    identifier = engine.started(*POLITE)
    ready(engine, identifier)
    engine.post(f"/containers/{identifier}/stop?t=30")
    assert state(engine, identifier)["ExitCode"] == 7


@pytest.mark.parametrize("number", ["INT", "SIGINT", "2"])
def test_stop_signal_of_the_container(engine: TempEngine, number: str) -> None:
    begin = time.time()
    identifier = engine.started(
        "sh", "-c", "trap 'exit 5' INT; trap 'exit 6' TERM; echo ready; while :; do sleep 0.05; done", StopSignal=number
    )
    ready(engine, identifier)
    engine.post(f"/containers/{identifier}/stop")
    assert state(engine, identifier)["ExitCode"] == 5
    [kill] = [event for event in events(engine, identifier, begin) if event["status"] == "kill"]
    assert kill["Actor"]["Attributes"]["signal"] == "2"


@pytest.mark.parametrize("verb", ["stop?t=20", "kill", "kill?signal=TERM"])
def test_a_paused_container_can_be_ended(engine: TempEngine, verb: str) -> None:
    identifier = engine.started(*POLITE)
    ready(engine, identifier)
    engine.post(f"/containers/{identifier}/pause")
    engine.post(f"/containers/{identifier}/{verb}")
    assert engine.wait(identifier) == (137 if verb == "kill" else 7)
    shown = state(engine, identifier)
    assert (shown["Running"], shown["Paused"], shown["Status"]) == (False, False, "exited")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/kill"), ("POST", "/stop?t=0"), ("DELETE", "?force=1")], ids=["kill", "stop", "rm"]
)
def test_a_frozen_container_that_counts_as_running_can_be_ended(engine: TempEngine, method: str, path: str) -> None:
    """A daemon that is killed during a pause leaves one. Under v1 SIGKILL alone does not end it."""
    identifier = engine.started("sleep", "1000")
    group = cgroups.Group(engine.inspect(identifier)["State"]["Pid"])
    name, frozen = ("cgroup.freeze", "1") if cgroups.V2 else ("freezer.state", "FROZEN")
    (group.directory("freezer") / name).write_text(frozen)
    answer = engine.request(method, f"/v1.24/containers/{identifier}{path}")
    assert answer.status == 204, answer
    assert method == "DELETE" or engine.wait(identifier) == 137


def test_a_paused_container_keeps_other_signals_for_later(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "trap 'echo hup' HUP; echo ready; while :; do sleep 0.05; done")
    ready(engine, identifier)
    engine.post(f"/containers/{identifier}/pause")
    engine.post(f"/containers/{identifier}/kill?signal=HUP")
    time.sleep(0.2)
    assert b"hup" not in engine.logs(identifier)
    assert state(engine, identifier)["Paused"]
    engine.post(f"/containers/{identifier}/unpause")
    until("the signal arrives", lambda: b"hup" in engine.logs(identifier))


@pytest.mark.parametrize("form", ["10", "USR1", "SIGUSR1", "sigusr1", "usr1"])
def test_forms_of_a_signal(engine: TempEngine, form: str) -> None:
    identifier = engine.started("sh", "-c", "trap 'exit 11' USR1; echo ready; while :; do sleep 0.05; done")
    ready(engine, identifier)
    engine.post(f"/containers/{identifier}/kill?signal={form}")
    assert engine.wait(identifier) == 11


@pytest.mark.parametrize("form", ["0", "65", "-1", "SIGNOPE", "9.5", "1e1", "99999999999999999999"])
def test_what_is_no_signal(engine: TempEngine, form: str) -> None:
    identifier = engine.started("sleep", "600")
    answer = engine.request("POST", f"/v1.24/containers/{identifier}/kill?signal={form}")
    assert answer.status == 400
    assert "signal" in answer.message
    assert state(engine, identifier)["Running"]


def test_real_time_signals(engine: TempEngine) -> None:
    identifier = engine.started(
        "sh", "-c", f"trap 'exit 12' {signal.SIGRTMIN + 3}; echo ready; while :; do sleep 0.05; done"
    )
    ready(engine, identifier)
    engine.post(f"/containers/{identifier}/kill?signal=RTMIN%2B3")
    assert engine.wait(identifier) == 12


def test_kill_of_what_does_not_run(engine: TempEngine) -> None:
    identifier = engine.create("true")
    answer = engine.request("POST", f"/v1.24/containers/{identifier}/kill")
    assert answer.status == 500
    assert f"Container {identifier} is not running" in answer.message


# --- wait -----------------------------------------------------------------------------------------


def test_every_waiter_is_answered(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "read x; exit 9", OpenStdin=True)
    waiters = [Background(lambda: engine.wait(identifier)) for _ in range(8)]
    time.sleep(0.3)
    assert not any(waiter.done for waiter in waiters)
    engine.post(f"/containers/{identifier}/kill")
    assert [waiter.result() for waiter in waiters] == [137] * 8
    assert engine.wait(identifier) == 137
    assert engine.wait(engine.create("true")) == 0


# --- restart policies -----------------------------------------------------------------------------


def test_on_failure_tries_so_often_and_no_more(engine: TempEngine) -> None:
    begin = time.time()
    identifier = engine.started(
        "sh", "-c", "date +%s.%N; exit 3", host={"RestartPolicy": {"Name": "on-failure", "MaximumRetryCount": 2}}
    )
    until("it gave up", lambda: state(engine, identifier)["Status"] == "exited")
    shown = engine.inspect(identifier)
    assert shown["RestartCount"] == 2
    assert shown["State"]["ExitCode"] == 3
    assert len(engine.logs(identifier).splitlines()) == 3
    said = actions(engine, identifier, begin)
    assert said == ["create", "start", "die", "start", "die", "start", "die"]


def test_on_failure_is_content_with_success(engine: TempEngine) -> None:
    identifier = engine.started("true", host={"RestartPolicy": {"Name": "on-failure"}})
    until("it ended", lambda: state(engine, identifier)["Status"] == "exited")
    time.sleep(0.3)
    assert engine.inspect(identifier)["RestartCount"] == 0


def test_the_delay_doubles(engine: TempEngine) -> None:
    begin = time.time()
    identifier = engine.started("false", host={"RestartPolicy": {"Name": "always"}})
    until("five restarts", lambda: engine.inspect(identifier)["RestartCount"] >= 5)
    engine.post(f"/containers/{identifier}/stop")
    pairs = [(e["status"], e["timeNano"]) for e in events(engine, identifier, begin)]
    ends = [at for status, at in pairs if status == "die"]
    starts = [at for status, at in pairs if status == "start"][1:]
    gaps = [(start - end) / 1e9 for start, end in zip(starts, ends, strict=False)]
    for number, gap in enumerate(gaps[:4]):
        assert gap >= 0.1 * 2**number, gaps
    shown = state(engine, identifier)
    assert (shown["Running"], shown["Restarting"]) == (False, False)
    time.sleep(0.5)
    assert not state(engine, identifier)["Running"]


def test_while_it_waits_for_its_restart(engine: TempEngine) -> None:
    identifier = engine.started("sh", "-c", "exit 4", host={"RestartPolicy": {"Name": "always"}})
    until("a long delay", lambda: engine.inspect(identifier)["RestartCount"] >= 5)
    until("it waits", lambda: state(engine, identifier)["Restarting"])
    shown = state(engine, identifier)
    assert (shown["Status"], shown["Running"], shown["ExitCode"]) == ("restarting", True, 4)
    [entry] = engine.request("GET", "/v1.24/containers/json").json()
    assert entry["Status"].startswith("Restarting (4) ")
    assert entry["State"] == "restarting"
    waiter = Background(lambda: engine.wait(identifier))
    assert engine.request("POST", f"/v1.24/containers/{identifier}/pause").status == 500
    assert engine.request("DELETE", f"/v1.24/containers/{identifier}").status == 409
    engine.post(f"/containers/{identifier}/stop")
    assert waiter.result() == 4
    assert state(engine, identifier)["Status"] == "exited"
    engine.post(f"/containers/{identifier}/stop", 304)


@pytest.mark.parametrize("verb", ["stop?t=0", "kill", "kill?signal=TERM"])
def test_the_user_s_word_beats_the_policy(engine: TempEngine, verb: str) -> None:
    identifier = engine.started(*POLITE, host={"RestartPolicy": {"Name": "always"}})
    ready(engine, identifier)
    engine.post(f"/containers/{identifier}/{verb}")
    until("it ended", lambda: state(engine, identifier)["Status"] == "exited")
    time.sleep(0.3)
    assert state(engine, identifier)["Status"] == "exited"


def test_a_crash_is_not_the_user_s_word(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", host={"RestartPolicy": {"Name": "unless-stopped"}})
    pid = state(engine, identifier)["Pid"]
    os.kill(pid, signal.SIGKILL)
    until("it runs again", lambda: state(engine, identifier)["Running"] and state(engine, identifier)["Pid"] != pid)
    assert engine.inspect(identifier)["RestartCount"] == 1


@pytest.mark.own
def test_policies_over_restarts_of_the_daemon(own_engine: TempEngine) -> None:
    engine = own_engine

    def made(policy: str) -> str:
        return engine.started("sleep", "600", host={"RestartPolicy": {"Name": policy}})

    stopped = {policy: made(policy) for policy in ("no", "always", "unless-stopped")}
    for identifier in stopped.values():
        engine.post(f"/containers/{identifier}/stop?t=0")
    running = {policy: made(policy) for policy in ("no", "always", "unless-stopped", "on-failure")}
    engine.terminate()
    engine.start()
    assert all(state(engine, identifier)["Running"] for identifier in running.values())
    until("always runs even so", lambda: state(engine, stopped["always"])["Status"] == "running")
    assert not state(engine, stopped["no"])["Running"]
    assert not state(engine, stopped["unless-stopped"])["Running"]

    engine.reboot()
    for policy in ("always", "unless-stopped", "on-failure"):
        until(f"{policy} runs", lambda policy=policy: state(engine, running[policy])["Status"] == "running")
    assert not state(engine, running["no"])["Running"]
    assert not state(engine, stopped["unless-stopped"])["Running"]

    engine.stop()  # `engined stop` does not count as a stop by the user
    engine.start()
    until("it runs", lambda: state(engine, running["unless-stopped"])["Status"] == "running")
    assert not state(engine, stopped["unless-stopped"])["Running"]


@pytest.mark.own
def test_a_stop_that_the_daemon_did_not_live_to_see(own_engine: TempEngine) -> None:
    """The signal is sent, then the daemon is killed, then the container exits. It still counts as
    stopped by the user."""
    engine = own_engine
    identifier = engine.started(
        "sh",
        "-c",
        "trap 'touch /asked' TERM; echo ready; while [ ! -e /go ]; do sleep 0.05; done",
        host={"RestartPolicy": {"Name": "unless-stopped"}},
    )
    ready(engine, identifier)
    Background(lambda: _quietly(engine, f"/v1.24/containers/{identifier}/stop?t=-1"))
    until("asked", lambda: "kill" in actions(engine, identifier, time.time() - 60))
    pid = state(engine, identifier)["Pid"]
    engine.kill9()
    Path(f"/proc/{pid}/root/go").touch()
    until("it ended", lambda: not alive(pid))
    engine.start()
    time.sleep(0.5)
    assert state(engine, identifier)["Status"] == "exited"
    assert engine.inspect(identifier)["RestartCount"] == 0


def _quietly(engine: TempEngine, target: str) -> None:
    with contextlib.suppress(Exception):
        engine.request("POST", target)


def test_a_killed_container_stays_down_while_it_restarts(engine: TempEngine) -> None:
    """The kill may come at any time, also during the restart."""
    for attempt in range(8):
        name = f"k{attempt}"
        engine.started("false", name=name, host={"RestartPolicy": {"Name": "always"}})
        time.sleep(0.04 + attempt * 0.02)
        answer = engine.request("POST", f"/v1.24/containers/{name}/kill")
        if answer.status == 204:
            time.sleep(0.3)
            assert state(engine, name)["Status"] == "exited", attempt


def test_what_was_removed_stays_removed(own_engine: TempEngine) -> None:
    """A resize that arrives during the removal does not recreate the row."""
    names = [own_engine.create("true", name=f"g{number}") for number in range(30)]
    work = [
        Background(lambda target=target, method=method: own_engine.request(method, target))  # type: ignore[misc]
        for name in names
        for method, target in (
            ("DELETE", f"/v1.24/containers/{name}"),
            ("POST", f"/v1.24/containers/{name}/resize?h=10&w=20"),
            ("POST", f"/v1.24/containers/{name}/resize?h=11&w=21"),
        )
    ]
    for each in work:
        each.result()
    assert own_engine.containers() == []
    own_engine.restart()
    assert own_engine.containers() == []


# --- memory ---------------------------------------------------------------------------------------


def test_a_kill_for_memory_is_an_event_at_once(engine: TempEngine) -> None:
    """The kernel kills a process other than the container's first one. The container continues, and
    the event is published before the container's end.
    """
    begin = time.time()
    grow = "(x=a; while :; do x=$x$x; done); echo survived; exec sleep 600"
    identifier = engine.started("sh", "-c", grow, host={"Memory": 16 << 20, "MemorySwap": 16 << 20})
    until("it survived", lambda: b"survived" in engine.logs(identifier))
    until("the event", lambda: "oom" in actions(engine, identifier, begin))
    assert state(engine, identifier)["Running"]
    engine.post(f"/containers/{identifier}/kill")
    assert actions(engine, identifier, begin).count("oom") == 1


def test_a_kill_for_memory_is_known_to_a_later_watch(engine: TempEngine) -> None:
    """A daemon may begin to watch a group after the kernel has killed in it: see `missed`."""
    grow = "(x=a; while :; do x=$x$x; done); echo survived; exec sleep 600"
    identifier = engine.started("sh", "-c", grow, host={"Memory": 16 << 20, "MemorySwap": 16 << 20})
    until("it survived", lambda: b"survived" in engine.logs(identifier))
    quiet = engine.started("sleep", "600", host={"Memory": 16 << 20})
    seen: list[str] = []

    async def story() -> None:
        watching = MemoryEvents()
        for container in (identifier, quiet):
            group = cgroups.Group(state(engine, container)["Pid"])
            watching.watch(group.directory("memory"), partial(seen.append, container), missed=True)
        watching.close()

    asyncio.run(story())
    assert seen == [identifier]


def test_killed_for_its_memory(engine: TempEngine) -> None:
    begin = time.time()
    identifier = engine.started(
        "sh", "-c", "x=a; while :; do x=$x$x; done", host={"Memory": 16 << 20, "MemorySwap": 16 << 20}
    )
    assert engine.wait(identifier) == 137
    shown = state(engine, identifier)
    assert shown["OOMKilled"] is True
    assert actions(engine, identifier, begin) == ["create", "start", "oom", "die"]
    engine.post(f"/containers/{identifier}/start")
    engine.wait(identifier)


def test_killed_by_hand_is_not_killed_for_memory(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", host={"Memory": 16 << 20})
    engine.post(f"/containers/{identifier}/kill")
    assert state(engine, identifier)["OOMKilled"] is False


# --- priority -------------------------------------------------------------------------------------


def test_the_daemon_answers_first_and_hands_that_on_to_nobody(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "100")
    assert os.getpriority(os.PRIO_PROCESS, engine.pid) == -10
    for task in (engine.monitor_pid(), state(engine, identifier)["Pid"]):
        assert os.getpriority(os.PRIO_PROCESS, task) == 0
        assert not os.sched_getscheduler(task) & os.SCHED_RESET_ON_FORK
    others = []
    for name in os.listdir(f"/proc/{engine.pid}/task"):
        if int(name) != engine.pid:
            # a thread for a single piece of work ends with it
            with contextlib.suppress(ProcessLookupError):
                others.append(os.getpriority(os.PRIO_PROCESS, int(name)))
    assert {*others} == {0}


# --- names ----------------------------------------------------------------------------------------


def test_rename(engine: TempEngine) -> None:
    begin = time.time()
    first, second = engine.create("true", name="first"), engine.create("true", name="second")
    engine.post("/containers/first/rename?name=third")
    assert engine.inspect("third")["Id"] == first
    assert engine.inspect(first)["Name"] == "/third"
    assert engine.request("GET", "/v1.24/containers/first/json").status == 404
    [event] = [event for event in events(engine, first, begin) if event["status"] == "rename"]
    assert event["Actor"]["Attributes"]["oldName"] == "/first"
    assert event["Actor"]["Attributes"]["name"] == "third"
    answer = engine.request("POST", "/v1.24/containers/second/rename?name=third")
    assert answer.status == 409
    assert first in answer.message
    assert engine.inspect("second")["Id"] == second
    for bad in ("", "third!", "a/b", "%20", "%00", "/"):
        assert engine.request("POST", f"/v1.24/containers/third/rename?name={bad}").status == 400, bad
    assert engine.inspect("third")["Id"] == first
    engine.post("/containers/third/rename?name=/first")
    engine.post("/containers/second/rename?name=third")
    assert engine.inspect("third")["Id"] == second


@pytest.mark.own
def test_a_new_name_lasts(own_engine: TempEngine) -> None:
    identifier = own_engine.started("sleep", "600", name="before")
    own_engine.post("/containers/before/rename?name=after")
    own_engine.restart()
    assert own_engine.inspect("after")["Id"] == identifier
    assert own_engine.create("true", name="before")


# --- many at once ---------------------------------------------------------------------------------


def test_a_storm_of_verbs(engine: TempEngine) -> None:
    """Random verbs in random order: every status is documented, and at the end the state is
    correct."""
    before = engine.footprint()
    identifier = engine.create("sleep", "600")
    allowed = {
        "start": {204, 304, 500},
        "stop?t=0": {204, 304},
        "kill": {204, 500},
        "restart?t=0": {204, 500},
        "pause": {204, 500},
        "unpause": {204, 500},
    }
    wrong: list[Any] = []

    def work(verbs: list[str]) -> None:
        for verb in verbs:
            answer = engine.request("POST", f"/v1.24/containers/{identifier}/{verb}")
            if answer.status not in allowed[verb]:
                wrong.append((verb, answer))

    names = [*allowed]
    workers = [Background(lambda shift=shift: work((names[shift:] + names[:shift]) * 4)) for shift in range(len(names))]
    for worker in workers:
        worker.result(120)
    assert not wrong
    shown = state(engine, identifier)
    assert shown["Running"] == bool(shown["Pid"]) == (shown["Pid"] != 0 and alive(shown["Pid"]))
    assert engine.request("DELETE", f"/v1.24/containers/{identifier}?force=1").status == 204
    engine.assert_settles(before)


def test_removed_in_the_middle_of_everything(engine: TempEngine) -> None:
    before = engine.footprint()
    for _ in range(5):
        identifier = engine.started("sleep", "600", host={"RestartPolicy": {"Name": "always"}})
        targets = [f"/v1.24/containers/{identifier}/{verb}" for verb in ("restart?t=0", "stop?t=0", "start", "kill")]
        calls = [Background(lambda target=target: engine.request("POST", target).status) for target in targets]
        target = f"/v1.24/containers/{identifier}?force=1"
        removed = Background(lambda target=target: engine.request("DELETE", target).status)
        assert removed.result() == 204
        for call in calls:
            assert call.result() in (204, 304, 404, 409, 500)
        assert engine.request("GET", f"/v1.24/containers/{identifier}/json").status == 404
    engine.assert_settles(before)


# --- events ---------------------------------------------------------------------------------------


def test_order_and_attributes_of_events(engine: TempEngine) -> None:
    begin = time.time()
    identifier = engine.started(*POLITE, name="told", Labels={"tier": "back"})
    ready(engine, identifier)
    assert engine.request("GET", "/v1.24/containers/told/top").status == 200
    engine.post("/containers/told/pause")
    engine.post("/containers/told/unpause")
    engine.post("/containers/told/restart?t=20")
    until("ready again", lambda: engine.logs(identifier).count(b"ready") == 2)
    engine.post("/containers/told/kill?signal=TERM")
    engine.wait(identifier)
    engine.post("/containers/told/start")
    until("ready again", lambda: engine.logs(identifier).count(b"ready") == 3)
    engine.post("/containers/told/stop?t=20")
    engine.request("DELETE", "/v1.24/containers/told")
    found = events(engine, identifier, begin)
    assert [event["status"] for event in found] == [
        *("create", "start", "top", "pause", "unpause"),
        *("kill", "die", "stop", "start", "restart"),
        *("kill", "die"),
        *("start", "kill", "die", "stop"),
        "destroy",
    ]
    for event in found:
        attributes = event["Actor"]["Attributes"]
        assert attributes["name"] == "told"
        assert attributes["image"] == event["from"] == "busybox"
        assert attributes["tier"] == "back"
        if event["status"] == "kill":
            assert attributes["signal"] == "15"
        if event["status"] == "die":
            assert attributes["exitCode"] == "7"
    times = [event["timeNano"] for event in found]
    assert times == sorted(times)


def test_a_start_waits_for_the_restart_of_whose_network_it_joins(engine: TempEngine) -> None:
    """Compose does this when it restarts a project: it restarts all its containers concurrently."""
    # ignores SIGTERM: its stop takes the full second of its timeout
    owner = engine.started("sleep", "600")
    joiner = engine.create("sleep", "600", network=f"container:{owner}")
    begin = time.time()

    def killed() -> bool:
        target = f"/v1.24/events?since={begin:.9f}&until={time.time():.9f}"
        return b'"Action":"kill"' in engine.request("GET", target).body

    with ThreadPoolExecutor(1) as pool:
        restart = pool.submit(engine.post, f"/containers/{owner}/restart?t=1")
        until("the restart has begun", killed)
        engine.post(f"/containers/{joiner}/start")
        restart.result()
    first, second = (os.readlink(f"/proc/{engine.inspect(each)['State']['Pid']}/ns/net") for each in (owner, joiner))
    assert first == second


def test_a_name_means_nothing_before_its_create_is_done(engine: TempEngine) -> None:
    seen: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        for number in range(20):
            making = pool.submit(engine.create, "true", name=f"new{number}")
            while not making.done():
                seen.add(engine.request("GET", f"/v1.24/containers/new{number}/json").status)
            making.result()
    assert seen <= {200, 404}
