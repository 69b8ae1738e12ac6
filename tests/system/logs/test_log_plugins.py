"""Log drivers that are plugins: an engine, its monitor and its shipper, and a plugin that is a
process of its own. Lines are numbered, so that a lost one shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.logs.deliveries import LogPlugin as Remote
from tests.support.engine.harness import TempEngine, alive, below, kill_and_wait, size_of, until
from tests.support.logs import numbered
from tests.support.logs.shipping import Shipping
from tests.support.logs.targets.log_plugin import LogPlugin, whole


@pytest.fixture
def own() -> Iterator[TempEngine]:
    """An engine of the test's own, which leaves nothing behind. Plugins have five seconds for a
    call.
    """
    engine = TempEngine("--plugin-timeout", "5")
    engine.arguments += ("--plugin-socket-directory", str(engine.base / "sockets"))
    with engine:
        engine.load_busybox()
        yield engine
        if engine.process is not None:
            engine.remove_all()
            engine.stop()
        engine.assert_gone()


@pytest.fixture
def plugin(own: TempEngine) -> Iterator[LogPlugin]:
    """The driver `far`."""
    with LogPlugin(own.base / "far", own.base / "sockets" / "far.sock") as made:
        yield made
        if own.process is not None:
            own.remove_all()
            own.stop()  # it would wait for a plugin that has gone


def log(kind: str = "far", **options: str) -> dict[str, Any]:
    return {"LogConfig": {"Type": kind, "Config": {name.replace("_", "-"): value for name, value in options.items()}}}


def shipper(engine: TempEngine) -> int:
    """The pid of the shipper; 0 when there is none."""
    try:
        pid = int((engine.run / "shipper" / "lock").read_text() or "0")
    except FileNotFoundError:
        return 0
    return pid if pid and alive(pid) else 0


def counting(engine: TempEngine, count: int, pause: str = "0.01", **options: str) -> str:
    command = f"i=0; while [ $i -lt {count} ]; do echo w:$i; i=$((i+1)); sleep {pause}; done; sleep 600"
    return engine.started("sh", "-c", command, host=log(**options))


def arrived(plugin: LogPlugin, count: int) -> None:
    until(f"{count} lines arrive", lambda: numbered.complete(plugin.texts(), {"w": count}), 60)


def test_a_run(own: TempEngine, plugin: LogPlugin) -> None:
    container = own.started(
        *("sh", "-c", "echo out; echo err >&2; printf end"),
        host=log(colour="blue", tag="{{.X", mode="non-blocking", max_buffer_size="1m"),
        name="web",
        Env=["A=b"],
        Labels={"l": "m"},
    )
    own.wait(container)
    until("logging has ended", lambda: plugin.calls("StopLogging"))
    assert [method for method, _ in plugin.calls()] == [
        "Plugin.Activate",
        "LogDriver.Capabilities",
        "LogDriver.StartLogging",
        "LogDriver.StopLogging",
    ]
    (_, start), (_, stop) = plugin.calls("StartLogging")[0], plugin.calls("StopLogging")[0]
    assert start["File"] == stop["File"] == str(own.run / "logging" / container)
    info = start["Info"]
    shown = own.inspect(container)
    assert info["ContainerCreated"] == shown["Created"]
    assert {name: info[name] for name in info if name not in ("ContainerCreated", "ContainerEnv")} == {
        "Config": {"colour": "blue", "tag": "{{.X", "mode": "non-blocking", "max-buffer-size": "1m"},
        "ContainerID": container,
        "ContainerName": "/web",
        "ContainerEntrypoint": "sh",
        "ContainerArgs": ["-c", "echo out; echo err >&2; printf end"],
        "ContainerImageID": shown["Image"],
        "ContainerImageName": "busybox",
        "ContainerLabels": {"l": "m"},
        "LogPath": "",
        "DaemonName": "docker",
    }
    assert "A=b" in info["ContainerEnv"]
    assert sorted((each.source, each.line) for each in plugin.entries(container) if each.line != b"end") == [
        ("stderr", b"err"),
        ("stdout", b"out"),
    ]
    (end,) = [each for each in plugin.entries(container) if each.line == b"end"]
    assert end.partial and end.part is not None and end.part[1:] == (1, False)
    assert sorted(own.logs(container).splitlines()) == [b"end", b"err", b"out"]
    assert shown["HostConfig"]["LogConfig"]["Type"] == "far" and shown["LogPath"] == ""
    info = own.request("GET", "/v1.24/info").json()
    assert info["Plugins"]["Log"][-1] == "far"
    until("the FIFO is removed", lambda: not any((own.run / "logging").iterdir()))


def test_no_line_is_lost_while_anything_is_killed(own: TempEngine, plugin: LogPlugin) -> None:
    container = counting(own, 600)
    arrived(plugin, 20)
    kill_and_wait(shipper(own))
    arrived(plugin, 100)
    assert len(plugin.calls("StartLogging")) == 1
    own.kill_monitor()
    arrived(plugin, 180)
    plugin.kill()
    plugin.start()
    arrived(plugin, 280)
    assert len(plugin.calls("StartLogging")) == 2
    own.kill9()
    arrived(plugin, 350)
    kill_and_wait(shipper(own))
    own.start()
    arrived(plugin, 420)
    own.kill9()
    plugin.kill()
    own.start()
    plugin.start()
    arrived(plugin, 600)
    numbered.assert_right(plugin.texts(), {"w": 600})
    assert own.logs(container, "stdout=1").count(b"\n") == 600


def test_a_plugin_that_reads_is_left_alone_by_a_restart_of_the_daemon(own: TempEngine, plugin: LogPlugin) -> None:
    container = counting(own, 100, "0.02")
    arrived(plugin, 10)
    own.restart()
    arrived(plugin, 40)
    until("it is known", lambda: own.request("GET", "/v1.24/info").json()["Plugins"]["Log"][-1] == "far")
    own.kill9()
    own.start()
    arrived(plugin, 100)
    (verdict,) = numbered.assert_right(plugin.texts(), {"w": 100}).values()
    assert verdict.duplicates == 0
    assert [method for method, _ in plugin.calls()].count("LogDriver.StartLogging") == 1
    assert plugin.calls("StopLogging") == []
    own.request("DELETE", f"/v1.24/containers/{container}?force=1")
    until("it has stopped", lambda: plugin.calls("StopLogging"))


def test_a_container_that_ends_without_a_daemon(own: TempEngine, plugin: LogPlugin) -> None:
    """The next daemon asks the plugin to stop."""
    own.started("sh", "-c", "echo w:0; sleep 2; echo w:1", host=log())
    arrived(plugin, 1)
    own.kill9()
    arrived(plugin, 2)
    own.start()
    until("it has stopped", lambda: plugin.calls("StopLogging"))
    assert len(plugin.calls("StartLogging")) == 1


def test_restarts_of_a_container(own: TempEngine, plugin: LogPlugin) -> None:
    """Each run has a logger of its own, and no line of the last run is lost."""
    count = "i=$(cat /n 2>/dev/null || echo 0); j=$((i+200)); echo $j >/n"
    command = f"{count}; while [ $i -lt $j ]; do echo w:$i; i=$((i+1)); done"
    container = own.started("sh", "-c", command, host=log())
    for _ in range(4):
        own.wait(container)
        assert own.request("POST", f"/v1.24/containers/{container}/start").status == 204
    arrived(plugin, 1000)
    numbered.assert_right(plugin.texts(), {"w": 1000})
    until("all have stopped", lambda: len(plugin.calls("StopLogging")) == 5)
    order = [method.rpartition(".")[2] for method, _ in plugin.calls() if method.endswith("Logging")]
    assert order == ["StartLogging", "StopLogging"] * 5


def test_a_terminal_and_long_lines(own: TempEngine, plugin: LogPlugin) -> None:
    container = own.started("sh", "-c", "echo a; echo b >&2", host=log(), Tty=True)
    own.wait(container)
    until("all has arrived", lambda: len(plugin.entries(container)) == 2)
    assert {(each.source, each.line) for each in plugin.entries(container)} == {("stdout", b"a\r"), ("stdout", b"b\r")}
    text = b"0123456789" * 4000
    command = "t=; for i in $(seq 4000); do t=${t}0123456789; done; for i in 1 2 3 4 5; do echo $t; done"
    container = own.create("sh", "-c", command, host=log())
    own.request("POST", f"/v1.24/containers/{container}/start")
    own.wait(container)

    def lines() -> list[bytes]:
        found, parts = [], b""
        for each in plugin.entries(container):
            assert each.partial and each.part is not None
            parts += each.line
            if each.part[2]:
                found.append(parts)
                parts = b""
        return found

    until("all has arrived", lambda: len(lines()) == 5)
    assert lines() == [text] * 5
    parts = [each.part for each in plugin.entries(container) if each.part is not None]
    assert len({name for name, _, _ in parts}) == 5
    assert [ordinal for _, ordinal, _ in parts] == [1, 2, 3] * 5
    assert max(len(each.line) for each in plugin.entries(container)) <= 16 << 10


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no room", "error creating logger: no room"),
        ("hang", "did not answer within 5 seconds"),
        ("garbage", "sent an invalid reply"),
        ("die", "error creating logger: "),
    ],
)
def test_a_start_that_the_plugin_fails(own: TempEngine, plugin: LogPlugin, fault: str, words: str) -> None:
    """The start fails with it, and leaves nothing behind; the next one succeeds."""
    container = own.create("echo", "w:0", host=log())
    plugin.faults(StartLogging=fault)
    answer = own.request("POST", f"/v1.24/containers/{container}/start")
    assert answer.status == 500
    message = answer.json()["message"]
    assert message.startswith("failed to initialize logging driver: ") and words in message
    assert own.inspect(container)["State"]["Status"] == "created"
    assert not any((own.run / "logging").iterdir())
    plugin.faults()
    if fault == "die":
        plugin.kill()
        plugin.start()
    else:
        assert len(plugin.calls("StopLogging")) == 1
    assert own.request("POST", f"/v1.24/containers/{container}/start").status == 204
    arrived(plugin, 1)


def test_capabilities_do_not_matter(own: TempEngine, plugin: LogPlugin) -> None:
    plugin.faults(Capabilities="none", StopLogging="none")
    for count in (1, 2):
        own.wait(own.started("echo", f"w:{count - 1}", host=log()))
        arrived(plugin, count)


def test_a_runtime_that_fails(own: TempEngine, plugin: LogPlugin) -> None:
    """The plugin has been asked by then."""
    container = own.create("/absent", host=log())
    assert own.request("POST", f"/v1.24/containers/{container}/start").status == 404
    until("it has stopped", lambda: plugin.calls("StopLogging"))
    until("the FIFO is removed", lambda: not any((own.run / "logging").iterdir()))


def test_drivers_that_do_not_exist(own: TempEngine, plugin: LogPlugin) -> None:
    def refusal(kind: str, **options: str) -> str:
        body = {"Image": "busybox", "HostConfig": log(kind, **options)}
        answer = own.request("POST", "/v1.24/containers/create", body)
        assert answer.status == 400, answer
        return str(answer.json()["message"])

    words = 'error looking up logging plugin nix: plugin "nix" not found'
    assert refusal("nix") == words
    assert refusal("gcplogs") == "logger: no log driver named 'gcplogs' is registered"
    assert "'../far' is registered" in refusal("../far")
    assert "logging mode not supported: x" in refusal("far", mode="x")
    assert "max-buffer-size option is only supported with 'mode=non-blocking'" in refusal("far", max_buffer_size="1m")
    assert "cache-disabled" in refusal("far", cache_disabled="maybe")
    container = own.create("true", host=log())
    plugin.kill()
    plugin.path.unlink()
    # the client of a plugin that has been used before stays: another daemon does not know it
    own.restart()
    answer = own.request("POST", f"/v1.24/containers/{container}/start")
    assert answer.status == 500
    assert answer.json()["message"] == (
        'failed to initialize logging driver: error looking up logging plugin far: plugin "far" not found'
    )


def test_the_default_driver(own: TempEngine, plugin: LogPlugin) -> None:
    own.terminate()
    own.arguments += ("--log-driver", "far", "--log-opt", "colour=red")
    own.start()
    own.wait(own.started("echo", "w:0"))
    arrived(plugin, 1)
    assert plugin.calls("StartLogging")[0][1]["Info"]["Config"] == {"colour": "red"}
    own.wait(own.started("true", host=log("json-file")))
    own.remove_all()
    own.terminate()
    own.arguments += ("--log-driver", "nix")
    with pytest.raises(AssertionError, match="Failed to set log opts: logger: no log driver named 'nix' is registered"):
        own.start()
    own.process = None
    own.arguments = own.arguments[:-6]
    own.start()


def test_lines_of_a_removed_container_are_delivered(own: TempEngine, plugin: LogPlugin) -> None:
    """The plugin is away at the removal, and returns to another daemon."""
    container = own.started("sh", "-c", "sleep 1; for i in $(seq 0 199); do echo w:$i; done", host=log())
    plugin.pause()
    own.wait(container)
    plugin.kill()
    own.request("DELETE", f"/v1.24/containers/{container}?force=1")
    own.restart()
    plugin.start()
    arrived(plugin, 200)
    numbered.assert_right(plugin.texts(), {"w": 200})
    until("the spools are gone", lambda: not any(each.is_file() for each in below(own.root / "logs")), 60)
    until("the FIFO is removed", lambda: not any((own.run / "logging").iterdir()))


def test_a_plugin_that_does_not_read_holds_its_containers_only(own: TempEngine, plugin: LogPlugin) -> None:
    options = {"cache_max_size": "1m", "cache_max_file": "2"}
    held = own.started("sh", "-c", "i=0; while :; do echo w:$i; i=$((i+1)); done", host=log(**options))
    arrived(plugin, 100)
    plugin.pause()
    spools = own.root / "logs" / held

    def size() -> int:
        return size_of(spools.glob("spool.log*"))

    def settled() -> bool:
        before = size()
        time.sleep(0.3)  # a pause of the container's output is no event
        return before == size()

    until("the spool is full", lambda: size() > 1_500_000 and settled())
    free = own.started("echo", "here", host=log("json-file"))
    own.wait(free)
    assert own.logs(free) == b"here\n"
    shown = own.inspect(held)["LogDelivery"]
    assert (shown["Driver"], shown["Address"]) == ("far", "plugin") and shown["Waiting"] > 1000
    plugin.resume()
    arrived(plugin, 60_000)
    texts = plugin.texts()
    numbered.assert_right(texts, {"w": max(numbered.by_writer(texts)["w"]) + 1})


def test_a_plugin_that_goes_is_an_event(own: TempEngine, plugin: LogPlugin) -> None:
    container = counting(own, 100_000, "0.02")
    arrived(plugin, 10)
    plugin.kill()

    def events() -> list[str]:
        target = f"/events?since=1&until={time.time():.0f}.9&filters=" + '{"type":["daemon"]}'
        return [json.loads(line)["Action"] for line in own.request("GET", target).body.splitlines()]

    until("the state says so", lambda: own.inspect(container)["LogDelivery"]["State"] == "retrying")
    until("there is an event", lambda: events() == ["log-unreachable"])
    plugin.start()
    until("it is reached again", lambda: own.inspect(container)["LogDelivery"]["State"] != "retrying")
    until("there is an event of its return", lambda: events() == ["log-unreachable", "log-reachable"])


@pytest.mark.nightly
def test_plugins_that_are_killed_again_and_again(own: TempEngine, plugin: LogPlugin) -> None:
    """It has stored what it has read a second ago."""
    chance = random.Random(5)
    command = "i=0; while [ $i -lt 1500 ]; do echo {}:$i; i=$((i+1)); [ $((i%5)) = 0 ] && sleep 0.03; done; sleep 600"
    for name in "abc":
        own.started("sh", "-c", command.format(name), host=log())
    until("lines arrive", lambda: len(plugin.texts()) > 50)
    for _ in range(4):
        time.sleep(chance.uniform(0.2, 1.5))  # at random, while lines come
        plugin.kill()
        plugin.start()
    wanted = dict.fromkeys("abc", 1500)
    until("all lines arrive", lambda: numbered.complete(plugin.texts(), wanted), 90)
    for verdict in numbered.assert_right(plugin.texts(), wanted).values():
        assert verdict.restarts <= 4


def test_the_shipper_is_killed_while_a_plugin_reads_slowly(shipping: Shipping) -> None:
    """No frame is cut: the next shipper goes on with the same FIFO."""
    chance = random.Random(6)
    path = shipping.run / "fifo"
    os.mkfifo(path)
    both = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    kept = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # the daemon's
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.close(both)
    spool = shipping.spool(Remote("far", str(path)))
    got, count = bytearray(), 0
    shipping.start()

    def read(seconds: float, size: int) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                got.extend(os.read(reader, size))
            time.sleep(0.002)

    for _ in range(6):
        for _ in range(20):
            spool.write(numbered.lines("w", count, 10, chance.randrange(10, 9000)))
            count += 10
            read(chance.uniform(0.005, 0.03), 3001)
        shipping.kill()
        shipping.start()

    def lines() -> list[bytes]:
        read(0.1, 1 << 20)
        return [each.line + b"\n" for each in whole("", bytes(got))[0]]

    until("all lines arrive", lambda: numbered.complete(lines(), {"w": count}), 90)
    (verdict,) = numbered.assert_right(lines(), {"w": count}).values()
    assert verdict.restarts <= 6
    until("all is acknowledged", lambda: shipping.states()[spool.id]["waiting"] == 0)
    os.close(reader)
    os.close(kept)
