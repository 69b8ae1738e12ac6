"""Remote log drivers of containers: an engine, its monitor and its shipper, and a receiver that the
test can stop, cut and start again. Lines are numbered, so that a lost one shows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.builds import building
from tests.support.engine.harness import TempEngine, alive, below, kill_and_wait, size_of, until


class Receiver:
    """Keeps the lines that come over TCP to one port, or to a Unix socket."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.lines: list[bytes] = []
        self.port = 0
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []
        self.open()

    @property
    def address(self) -> str:
        return f"unix://{self.path}" if self.path else f"tcp://127.0.0.1:{self.port}"

    def open(self) -> None:
        if self.path:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self.path)
        else:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            self.port = listener.getsockname()[1]
        listener.listen(64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        rest = b""
        try:
            while data := connection.recv(1 << 16):
                *whole, rest = (rest + data).split(b"\n")
                self.lines += whole
        except OSError:
            pass

    def close(self) -> None:
        """The target goes: no process listens, and connections end."""
        if self._listener is None:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._connections.clear()

    def numbers(self) -> list[int]:
        """The numbers at the ends of the lines, in the order of arrival."""
        return [int(line.rsplit(b" ", 1)[1]) for line in self.lines if line.rsplit(b" ", 1)[1].isdigit()]

    def until(self, *numbers: int) -> None:
        wanted = set(numbers)
        until(f"{len(wanted)} lines arrive", lambda: wanted <= set(self.numbers()), 60)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def own() -> Iterator[TempEngine]:
    """An engine of the test's own, which leaves nothing behind."""
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine
        engine.remove_all()
        engine.stop()
        engine.assert_gone()


def log(kind: str, **options: str) -> dict[str, Any]:
    return {"LogConfig": {"Type": kind, "Config": {name.replace("_", "-"): value for name, value in options.items()}}}


def shipper(engine: TempEngine) -> int:
    """The pid of the shipper; 0 when there is none."""
    try:
        pid = int((engine.run / "shipper" / "lock").read_text() or "0")
    except FileNotFoundError:
        return 0
    return pid if pid and alive(pid) else 0


def counting(engine: TempEngine, receiver: Receiver, count: int, pause: str = "0.01", **options: str) -> str:
    command = f"i=0; while [ $i -lt {count} ]; do echo line $i; i=$((i+1)); sleep {pause}; done; sleep 600"
    host = log("syslog", syslog_address=receiver.address, **options)
    return engine.started("sh", "-c", command, host=host)


def delivery(engine: TempEngine, container: str) -> Any:
    return engine.inspect(container)["LogDelivery"]


def in_order(numbers: list[int]) -> bool:
    """Lines may come again after a failure, from an earlier one on; but none is skipped."""
    highest = -1
    for number in numbers:
        if number > highest + 1:
            return False
        highest = max(highest, number)
    return True


def test_lines_reach_the_target_and_can_be_read_here(own: TempEngine, receiver: Receiver) -> None:
    assert shipper(own) == 0
    container = own.started(
        *("sh", "-c", "echo out 1; echo err 2 >&2; sleep 600"),
        host=log("syslog", syslog_address=receiver.address, tag="{{.Name}}/{{.ID}}", syslog_facility="local3"),
        name="web",
    )
    receiver.until(1, 2)
    assert sorted(line[:5] for line in receiver.lines) == [b"<155>", b"<158>"]
    assert all(f" web/{container[:12]}[".encode() in line for line in receiver.lines)
    assert own.logs(container).splitlines() == [b"out 1", b"err 2"]
    assert own.logs(container, "stdout=1&tail=1&stderr=1") == b"err 2\n"
    assert own.inspect(container)["LogPath"] == ""
    state = delivery(own, container)
    assert (state["Driver"], state["Address"], state["Dropped"]) == ("syslog", receiver.address, 0)
    assert state["Delivered"] + state["Waiting"] == 2
    info = own.request("GET", "/v1.24/info").json()
    assert info["LogDeliveries"]["Containers"] == 1
    assert info["LogDeliveries"]["Targets"][0]["Address"] == receiver.address
    assert {"syslog", "gelf", "fluentd", "splunk", "awslogs", "local", "json-file", "none"} <= {*info["Plugins"]["Log"]}
    assert shipper(own)


def test_no_line_is_lost_while_anything_is_killed(own: TempEngine, receiver: Receiver) -> None:
    container = counting(own, receiver, 600)
    receiver.until(20)
    kill_and_wait(shipper(own))
    receiver.until(100)
    own.kill_monitor()
    receiver.until(200)
    own.kill9()
    receiver.until(300)
    kill_and_wait(shipper(own))
    own.start()
    receiver.until(400)
    receiver.close()
    time.sleep(0.5)
    receiver.open()
    receiver.until(*range(600))
    assert in_order(receiver.numbers())
    assert own.logs(container, "stdout=1").count(b"\n") == 600


def test_a_target_that_is_away(own: TempEngine, receiver: Receiver) -> None:
    container = counting(own, receiver, 200)
    receiver.until(10)
    receiver.close()

    def retrying() -> bool:
        state = delivery(own, container)
        return bool(state["State"] == "retrying" and "refused" in state["Error"] and state["Waiting"] > 0)

    def events() -> list[str]:
        target = f"/events?since=1&until={time.time():.0f}.9&filters=" + '{"type":["daemon"]}'
        return [json.loads(line)["Action"] for line in own.request("GET", target).body.splitlines()]

    until("the state says so", retrying)
    until("there is an event", lambda: events() == ["log-unreachable"])
    own.restart()
    until("the state says so again", retrying)
    receiver.open()
    receiver.until(*range(200))
    until("it is reached again", lambda: delivery(own, container)["State"] != "retrying")
    assert in_order(receiver.numbers())
    until("there is an event of its return", lambda: events() == ["log-reachable"])


def test_lines_of_a_removed_container_are_delivered(own: TempEngine, receiver: Receiver) -> None:
    container = counting(own, receiver, 100, pause="0")
    receiver.until(99)
    receiver.close()
    own.request("POST", f"/v1.24/containers/{container}/exec")
    other = own.create("sh", "-c", "seq 500 599", host=log("syslog", syslog_address=receiver.address))
    answer = own.request("POST", f"/v1.24/containers/{other}/start")
    assert answer.status == 500
    assert "failed to initialize logging driver: " in answer.json()["message"]
    assert "refused" in answer.json()["message"]
    receiver.open()
    assert own.request("POST", f"/v1.24/containers/{other}/start").status == 204
    own.wait(other)
    receiver.close()
    for each in (container, other):
        own.request("DELETE", f"/v1.24/containers/{each}?force=1")
    receiver.open()
    receiver.until(*range(500, 600))
    until("the spools are gone", lambda: not any(each.is_file() for each in below(own.root / "logs")), 60)


def test_a_full_spool_holds_its_container_only(own: TempEngine, receiver: Receiver) -> None:
    receiver.close()
    with TempEngine("--log-start", "lenient") as engine:
        engine.load_busybox()
        options = {"cache_max_size": "1m", "cache_max_file": "2"}
        held = engine.started(
            *("sh", "-c", "i=0; while :; do echo line $i; i=$((i+1)); done"),
            host=log("syslog", syslog_address=receiver.address, **options),
        )
        free = engine.started("sh", "-c", "while :; do echo here; sleep 0.05; done", host=log("json-file"))
        spools = engine.root / "logs" / held

        def size() -> int:
            return size_of(spools.glob("spool.log*"))

        until("the spool is full", lambda: size() > 2_000_000)
        before = size()
        time.sleep(0.5)
        assert size() <= max(before, 2_000_000) + 2_000_000
        count = engine.logs(free).count(b"\n")
        until("the other one goes on", lambda: engine.logs(free).count(b"\n") > count)
        receiver.open()
        receiver.until(60_000)
        assert in_order(receiver.numbers())
        engine.remove_all()


def test_non_blocking_drops_the_oldest_and_says_so(own: TempEngine, receiver: Receiver) -> None:
    receiver.close()
    with TempEngine("--log-start", "lenient") as engine:
        engine.load_busybox()
        container = engine.started(
            *("sh", "-c", "i=0; while [ $i -lt 60000 ]; do echo line $i; i=$((i+1)); done; sleep 600"),
            host=log("syslog", syslog_address=receiver.address, mode="non-blocking", max_buffer_size="1m"),
        )
        until("it has written all", lambda: b"line 59999" in engine.logs(container, "stdout=1&tail=1"), 60)
        until("lines are dropped", lambda: delivery(engine, container)["Dropped"] > 0)
        receiver.open()
        receiver.until(59_999)
        state = delivery(engine, container)
        numbers = receiver.numbers()
        assert numbers == sorted(numbers)
        assert any(b"lines of this container were lost" in line for line in receiver.lines)
        assert len(numbers) + state["Dropped"] == 60_000
        engine.remove_all()


def test_the_daemons_default_driver(receiver: Receiver) -> None:
    with TempEngine("--log-driver", "syslog", "--log-opt", f"syslog-address={receiver.address}") as engine:
        engine.load_busybox()
        container = engine.started("sh", "-c", "echo it is 7")
        receiver.until(7)
        assert engine.inspect(container)["HostConfig"]["LogConfig"] == {
            "Type": "syslog",
            "Config": {"syslog-address": receiver.address},
        }
        assert engine.request("GET", "/v1.24/info").json()["LoggingDriver"] == "syslog"
        other = engine.started("sh", "-c", "echo it is 8", host=log("json-file"))
        engine.wait(other)
        assert engine.inspect(other)["HostConfig"]["LogConfig"] == {"Type": "json-file", "Config": {}}
        engine.remove_all()


def test_a_build_does_not_use_the_daemons_default_driver(receiver: Receiver) -> None:
    with TempEngine("--log-driver", "syslog", "--log-opt", f"syslog-address={receiver.address}") as engine:
        engine.load_busybox()
        receiver.close()
        built = building.build(engine, "FROM busybox\nRUN echo built\n")
        assert "built\n" in built.text
        assert not (engine.root / "logs").exists()
        engine.remove_all()


def test_cache_disabled_keeps_only_what_waits(own: TempEngine, tmp_path: Path) -> None:
    receiver = Receiver(str(tmp_path / "syslog"))  # where the kernel says what has been read
    container = own.started(
        *("sh", "-c", "seq 0 99999 | sed 's/^/line /'; sleep 600"),
        host=log("syslog", syslog_address=receiver.address, cache_disabled="true"),
    )
    receiver.until(99_999)
    assert receiver.numbers() == list(range(100_000))
    answer = own.request("GET", f"/v1.24/containers/{container}/logs?stdout=1")
    assert answer.status == 500
    assert answer.json()["message"] == "configured logging driver does not support reading"
    directory = own.root / "logs" / container

    def kept() -> int:
        return size_of(Path(directory).glob("spool.log*"))

    until("delivered files are removed", lambda: kept() < 2_500_000)
    receiver.close()


def test_the_shipper_ends_when_it_has_nothing_to_do(own: TempEngine, receiver: Receiver) -> None:
    counting(own, receiver, 1)
    receiver.until(0)
    pid = shipper(own)
    own.remove_all()
    os.kill(pid, signal.SIGTERM)
    until("the shipper has ended", lambda: not alive(pid))
    counting(own, receiver, 2)
    receiver.until(1)
    assert shipper(own) not in (0, pid)


def test_rotated_files_are_compressed_and_read(own: TempEngine) -> None:
    options = {"max_size": "200k", "max_file": "4"}
    for kind, more in (("local", {}), ("json-file", {"compress": "true"})):
        container = own.started("sh", "-c", "seq 100000 106999; cat", OpenStdin=True, host=log(kind, **options, **more))
        directory = own.root / "containers" / container

        def packed(directory: Path = directory) -> list[str]:
            return sorted(each.name[-3:] for each in directory.glob("*-json.log.*"))

        until("all rotated files are compressed", lambda: packed() and set(packed()) == {".gz"})
        lines = own.logs(container).split()
        assert len(lines) > 5_000
        assert [int(line) for line in lines] == list(range(int(lines[0]), 107_000))
        assert own.logs(container, "stdout=1&tail=6500").split() == lines[-6500:]
        own.kill_monitor()
        assert own.logs(container).split() == lines
        own.post(f"/containers/{container}/kill")
        own.wait(container)
        assert own.logs(container).split() == lines
