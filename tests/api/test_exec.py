"""Exec: its user, permissions, terminal and exit. No output is lost and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE
from tests.support.engine import client
from tests.support.engine.client import Answer, payload, read_to_end
from tests.support.engine.harness import BREATH, TempEngine, alive, until

MANY = int(os.environ.get("ENGINED_EXECS", "200"))
"""Number of consecutive execs, each inspected at the end of its stream; ENGINED_EXECS=20000 for a
long run."""

ALL = {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True}


def created(
    engine: TempEngine, container: str, *command: str, status: int = 201, version: str = "/v1.24", **config: Any
) -> str:
    body = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(command)} | config
    answer = engine.request("POST", f"{version}/containers/{container}/exec", body)
    assert answer.status == status, answer
    return str(answer.json().get("Id", answer.json().get("message")))


def opened(
    engine: TempEngine, exec_id: str, early: bytes = b"", *, version: str = "/v1.24", **body: Any
) -> tuple[socket.socket, bytes]:
    """Start the exec attached.

    Returns the stream, and the bytes that came with the response head.
    """
    content = json.dumps({"Detach": False, "Tty": False} | body).encode()
    connection = client.connect(engine.socket)
    connection.sendall(
        f"POST {version}/exec/{exec_id}/start HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
        + early
    )
    answer = b""
    while b"\r\n\r\n" not in answer:
        chunk = connection.recv(65536)
        assert chunk, answer
        answer += chunk
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 UPGRADED\r\n"), answer
    return connection, rest


def run(engine: TempEngine, container: str, *command: str, **config: Any) -> tuple[int, bytes]:
    """Exit code and stdout of an exec without a terminal."""
    exec_id = created(engine, container, *command, **config)
    output = payload(read_to_end(*opened(engine, exec_id)))
    return inspected(engine, exec_id)["ExitCode"], output


def inspected(engine: TempEngine, exec_id: str, version: str = "/v1.24") -> Any:
    answer = engine.request("GET", f"{version}/exec/{exec_id}/json")
    assert answer.status == 200, answer
    return answer.json()


def start(engine: TempEngine, exec_id: str, **body: Any) -> Answer:
    return engine.request("POST", f"/v1.24/exec/{exec_id}/start", {"Detach": True} | body)


@pytest.fixture
def box(engine: TempEngine) -> str:
    """A running container with a user `app` of group `staff`, who is also in `audio`."""
    identifier = engine.started(
        *("sh", "-c"),
        "echo app:x:1000:50::/home/app:/bin/sh >>/etc/passwd; echo staff:x:50: >>/etc/group; "
        "echo audio:x:29:app >>/etc/group; echo ready; sleep 6000",
        Env=["FROM=container"],
    )
    until("ready", lambda: b"ready" in engine.logs(identifier))
    return identifier


# --- user, permissions, environment ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "identity"),
    [
        ("", "0:0:0"),
        ("app", "1000:50:50 29"),
        ("app:audio", "1000:29:29"),
        ("1000", "1000:50:50 29"),
        ("77", "77:0:0"),
        ("77:88", "77:88:88"),
        ("app:88", "1000:88:88"),
    ],
)
def test_user_forms(engine: TempEngine, box: str, user: str, identity: str) -> None:
    code, output = run(engine, box, "sh", "-c", 'echo "$(id -u):$(id -g):$(id -G)"', User=user)
    assert (code, output.decode().strip()) == (0, identity)


def test_home_and_environment(engine: TempEngine, box: str) -> None:
    _, output = run(engine, box, "sh", "-c", "echo $HOME $FROM $OWN $PWD", User="app", Env=["OWN=yes"])
    assert output == b"/home/app container yes /\n"


@pytest.mark.parametrize("user", ["nobody-here", "app:nothing", "4294967296", "-1"])
def test_users_that_are_not_there(engine: TempEngine, box: str, user: str) -> None:
    words = created(engine, box, "true", User=user, status=400)
    result = engine.docker("exec", "-u", user, box, "true", status=None)
    assert result.status == 1 and words in result.err
    assert engine.inspect(box)["ExecIDs"] is None


def test_a_user_that_goes_before_the_start(engine: TempEngine, box: str) -> None:
    run(engine, box, "sh", "-c", "cp /etc/passwd /tmp; echo late:x:1234:1234::/:/bin/sh >> /etc/passwd")
    exec_id = created(engine, box, "true", User="late")
    run(engine, box, "sh", "-c", "cat /tmp/passwd > /etc/passwd")
    answer = start(engine, exec_id)
    assert answer.status == 400, answer
    assert inspected(engine, exec_id)["ExitCode"] in (126, 127)


@pytest.mark.parametrize("command", ["no-such-program", "/no/such/program", "/etc/passwd"])
def test_a_detached_start_of_what_cannot_run(engine: TempEngine, box: str, command: str) -> None:
    exec_id = created(engine, box, command)
    assert start(engine, exec_id).status == 400
    assert inspected(engine, exec_id)["ExitCode"] in (126, 127)


def test_privileged(engine: TempEngine, box: str) -> None:
    def effective(**config: Any) -> int:
        _, output = run(engine, box, "grep", "CapEff", "/proc/self/status", **config)
        return int(output.split()[1], 16)

    plain, privileged = effective(), effective(Privileged=True)
    own = int(Path("/proc/self/status").read_text().partition("CapBnd:")[2].split()[0], 16)
    assert privileged == own
    assert plain & privileged == plain
    if own.bit_count() > 14:
        assert plain != privileged
    assert effective(Privileged=True, User="app") & ~own == 0


def test_it_is_in_the_container(engine: TempEngine, box: str) -> None:
    pid = engine.inspect(box)["State"]["Pid"]
    script = "for n in pid net mnt uts ipc; do readlink /proc/self/ns/$n; done"
    _, output = run(engine, box, "sh", "-c", script)
    assert output.decode().split() == [os.readlink(f"/proc/{pid}/ns/{n}") for n in ("pid", "net", "mnt", "uts", "ipc")]
    exec_id = created(engine, box, "sleep", "600")
    assert start(engine, exec_id).status == 200
    own = inspected(engine, exec_id)
    assert own["Running"] is True
    assert own["ExitCode"] is None
    assert Path(f"/proc/{own['Pid']}/cgroup").read_text() == Path(f"/proc/{pid}/cgroup").read_text()


# --- refusals -------------------------------------------------------------------------------------


def test_refusals(engine: TempEngine, box: str) -> None:
    assert "command" in created(engine, box, status=400)
    assert engine.request("POST", f"/v1.24/containers/{box}/exec", {"Cmd": None}).status == 400
    assert engine.request("POST", f"/v1.24/containers/{box}/exec", {"Cmd": [""]}).status == 400
    assert "keys" in created(engine, box, "true", DetachKeys="ctrl-", status=400)
    assert "NUL" in created(engine, box, "echo\0x", status=400)
    for field, value in (("User", "root\0"), ("Env", ["A=\0"])):
        assert "NUL" in created(engine, box, "true", status=400, **{field: value})
    assert created(engine, "nobody", "true", status=404) == "No such container: nobody"
    for method, path in (("GET", "json"), ("POST", "start"), ("POST", "resize?h=1&w=1")):
        answer = engine.request(method, f"/v1.24/exec/nothing/{path}", {} if method == "POST" else None)
        assert (answer.status, answer.message) == (404, "No such exec instance: nothing")

    waiting = created(engine, box, "true")
    engine.post(f"/containers/{box}/pause")
    assert "paused" in created(engine, box, "true", status=409)
    answer = start(engine, waiting)
    assert answer.status == 409
    assert "paused" in answer.message
    engine.post(f"/containers/{box}/unpause")
    assert start(engine, waiting).status == 200
    assert start(engine, waiting).status == 409

    late = created(engine, box, "true")
    engine.post(f"/containers/{box}/stop?t=0")
    assert "is not running" in created(engine, box, "true", status=409)
    assert start(engine, late).status == 404
    assert "is not running" in created(engine, engine.create("true"), "true", status=409)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (("no-such-program",), 127, "executable file not found"),
        (("/no/such/program",), 127, "no such file or directory"),
        (("/etc/passwd",), 126, "permission denied"),
        (("/tmp",), 126, ""),
        (("sh", "-c", "exit 42"), 42, ""),
        (("sh", "-c", "kill -9 $$"), 137, ""),
        (("sh", "-c", "kill -15 $$"), 143, ""),
    ],
)
def test_exit_codes(engine: TempEngine, box: str, command: tuple[str, ...], code: int, words: str) -> None:
    result = engine.docker("exec", box, *command, status=None)
    assert result.status == code, result
    assert words in (result.out + result.err).lower()
    exec_id = created(engine, box, *command)
    read_to_end(*opened(engine, exec_id))
    own = inspected(engine, exec_id)
    assert (own["Running"], own["ExitCode"], own["CanRemove"]) == (False, code, True)


def test_the_exit_code_is_there_when_the_stream_ends(engine: TempEngine, box: str) -> None:
    """Consecutive execs over raw HTTP: all output, and an inspect right after the end."""
    before = engine.descriptors()
    for number in range(MANY):
        code = number % 256
        exec_id = created(engine, box, "sh", "-c", f"echo {number}; exit {code}")
        assert payload(read_to_end(*opened(engine, exec_id))) == b"%d\n" % number
        own = inspected(engine, exec_id)
        assert (own["Running"], own["ExitCode"]) == (False, code), number
    until("descriptors are given back", lambda: engine.descriptors() <= before + BREATH)
    assert engine.inspect(box)["ExecIDs"] is None


def test_many_at_once_lose_nothing(engine: TempEngine, box: str) -> None:
    wrong: list[Any] = []

    def work(worker: int) -> None:
        for number in range(64):
            text = f"{worker}/{number} " * 500
            code, output = run(engine, box, "echo", text)
            if (code, output) != (0, text.encode() + b"\n"):
                wrong.append((worker, number, code, len(output)))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.own
def test_nothing_is_left(engine: TempEngine, box: str) -> None:
    directory = Path(engine.run) / "exec"
    until("quiet", lambda: not list(directory.iterdir()))
    for number in range(20):
        created(engine, box, "true")
        start(engine, created(engine, box, "true" if number % 2 else "/no/such"))
    until("no directories", lambda: not list(directory.iterdir()))
    waiting = engine.inspect(box)["ExecIDs"]
    assert len(waiting) == 20
    engine.request("DELETE", f"/v1.24/containers/{box}?force=1")
    assert engine.request("GET", f"/v1.24/exec/{waiting[0]}/json").status == 404


def test_an_instance_goes_with_its_container(engine: TempEngine, box: str) -> None:
    ended, running = created(engine, box, "true"), created(engine, box, "sleep", "1000")
    read_to_end(*opened(engine, ended))
    start(engine, running)
    engine.request("DELETE", f"/v1.24/containers/{box}?force=1")
    for each in (ended, running):
        answer = engine.request("GET", f"/v1.24/exec/{each}/json")
        assert (answer.status, answer.message) == (404, f"No such exec instance: {each}")


def test_exec_ids(engine: TempEngine, box: str) -> None:
    assert engine.inspect(box)["ExecIDs"] is None
    running = created(engine, box, "sh", "-c", "while [ ! -e /go ]; do sleep 0.02; done")
    start(engine, running)
    assert engine.inspect(box)["ExecIDs"] == [running]
    waiting = created(engine, box, "true")
    assert engine.inspect(box)["ExecIDs"] == [running, waiting]
    run(engine, box, "touch", "/go")
    until("it ended", lambda: engine.inspect(box)["ExecIDs"] == [waiting])
    start(engine, waiting)
    until("it ended", lambda: engine.inspect(box)["ExecIDs"] is None)


def test_it_ends_with_its_container(engine: TempEngine, box: str) -> None:
    exec_id = created(engine, box, "sleep", "600")
    stream, early = opened(engine, exec_id)
    until("it runs", lambda: inspected(engine, exec_id)["Pid"])
    engine.post(f"/containers/{box}/stop?t=0")
    assert read_to_end(stream, early) == b""
    assert inspected(engine, exec_id)["ExitCode"] == 137


# --- streams --------------------------------------------------------------------------------------


def test_streams_are_apart_and_stdin_ends_alone(engine: TempEngine, box: str) -> None:
    exec_id = created(engine, box, "sh", "-c", "cat; echo err >&2; sleep 0.2; echo after; exit 3", **ALL)
    stream, early = opened(engine, exec_id, b"with the request ")
    stream.sendall(b"later ")
    stream.shutdown(socket.SHUT_WR)
    received = read_to_end(stream, early)
    assert payload(received, 1) == b"with the request later after\n"
    assert payload(received, 2) == b"err\n"
    assert inspected(engine, exec_id)["ExitCode"] == 3


def test_only_the_streams_asked_for(engine: TempEngine, box: str) -> None:
    exec_id = created(engine, box, "sh", "-c", "echo out; echo err >&2; cat", AttachStdout=False)
    received = read_to_end(*opened(engine, exec_id))
    assert (payload(received, 1), payload(received, 2)) == (b"", b"err\n")


def test_detached(engine: TempEngine, box: str) -> None:
    exec_id = created(engine, box, "sh", "-c", "sleep 0.1; echo done >/made")
    answer = start(engine, exec_id)
    assert (answer.status, answer.body) == (200, b"")
    until("made", lambda: run(engine, box, "cat", "/made")[1] == b"done\n")
    no_streams = created(engine, box, "touch", "/silent", AttachStdout=False, AttachStderr=False)
    assert start(engine, no_streams, Detach=False).status == 200
    until("made", lambda: run(engine, box, "test", "-e", "/silent")[0] == 0)
    engine.docker("exec", "-d", box, "touch", "/by-cli")
    until("made", lambda: run(engine, box, "test", "-e", "/by-cli")[0] == 0)


def test_a_large_pipe(engine: TempEngine, box: str) -> None:
    data = os.urandom(1 << 20) * 8
    result_path = engine.base / "piped"
    with open(result_path, "wb") as sink:
        child = engine.popen("exec", "-i", box, "cat", stdin=-1, stdout=sink)
        child.communicate(data, timeout=60)
    assert child.returncode == 0
    assert result_path.read_bytes() == data


def test_terminal_and_its_size(engine: TempEngine, box: str) -> None:
    """A size given before the start is the initial size; later ones are announced by SIGWINCH."""
    # crun sets the terminal's size concurrently with the program's start, not before it.
    script = (
        "until stty size 2>/dev/null | grep .; do sleep 0.01; done; "
        "until [ \"$(stty size)\" = '50 120' ]; do sleep 0.02; done; echo resized"
    )
    exec_id = created(engine, box, "sh", "-c", script, Tty=True, **ALL)
    assert engine.request("POST", f"/v1.24/exec/{exec_id}/resize?h=20&w=40").status == 201
    stream, received = opened(engine, exec_id, Tty=True)
    while b"\r\n" not in received:
        received += stream.recv(4096)
    assert received == b"20 40\r\n"
    assert engine.request("POST", f"/v1.24/exec/{exec_id}/resize?h=50&w=120").status == 201
    assert read_to_end(stream, received).endswith(b"resized\r\n")
    assert engine.request("POST", f"/v1.24/exec/{exec_id}/resize?h=1&w=1").status == 500
    plain = created(engine, box, "true")
    assert engine.request("POST", f"/v1.24/exec/{plain}/resize?h=1&w=1").status == 500


@pytest.mark.own
def test_a_size_that_comes_while_it_is_being_made(tmp_path: Path) -> None:
    runtime, gate = tmp_path / "slow", tmp_path / "gate"
    os.mkfifo(gate)
    runtime.write_text(
        f"""#!/bin/sh\n{shutil.which("crun") or "runc"} "$@"; status=$?\n"""
        f"""case "$*" in *'exec --detach'*) : < {gate};; esac\nexit $status\n"""
    )
    runtime.chmod(0o755)
    with TempEngine("--runtime", str(runtime)) as engine:
        engine.load_busybox()
        script = "until [ \"$(stty size)\" = '50 120' ]; do sleep 0.02; done; echo resized"
        exec_id = created(engine, engine.started("sleep", "600"), "sh", "-c", script, Tty=True, **ALL)
        stream, early = opened(engine, exec_id, Tty=True)
        assert engine.request("POST", f"/v1.24/exec/{exec_id}/resize?h=50&w=120").status == 201
        gate.write_text("")  # the engine is notified of the process
        assert read_to_end(stream, early).endswith(b"resized\r\n")


def test_docker_exec_on_a_terminal(engine: TempEngine, box: str) -> None:
    master, slave = pty.openpty()
    child = engine.popen("exec", "-it", box, "sh", "-c", "tty; read x; echo got $x", stdin=slave, stdout=slave)
    os.close(slave)
    received = b""

    def read_until(text: bytes) -> None:
        nonlocal received
        deadline = time.monotonic() + 20 * PATIENCE
        while text not in received:
            assert time.monotonic() < deadline, received
            if select.select([master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    received += os.read(master, 4096)

    read_until(b"/dev/pts/")
    os.write(master, b"word\n")
    read_until(b"got word")
    assert child.wait(20 * PATIENCE) == 0
    os.close(master)


def test_detach_keys(engine: TempEngine, box: str) -> None:
    begin = time.time()
    exec_id = created(engine, box, "sh", "-c", "stty raw -echo; cat >/typed", Tty=True, DetachKeys="ctrl-a,b", **ALL)
    stream, early = opened(engine, exec_id, Tty=True)
    until("raw", lambda: run(engine, box, "test", "-e", "/typed")[0] == 0)
    for part in (b"one", b"\x01", b"c", b"two", b"\x01", b"b", b"three"):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stream.sendall(part)
            time.sleep(0.05)
    with contextlib.suppress(ConnectionResetError):
        read_to_end(stream, early)
    assert inspected(engine, exec_id)["Running"]
    until("it has what was typed", lambda: run(engine, box, "cat", "/typed")[1] == b"one\x01ctwo")

    def told() -> list[str]:
        detached = [event for event in events(engine, box, begin) if event["status"] == "exec_detach"]
        return [event["Actor"]["Attributes"]["execID"] for event in detached]

    until("the event of the detach", lambda: told() == [exec_id])


def test_the_default_detach_keys(engine: TempEngine, box: str) -> None:
    """An empty value means the default, because the docker CLI sends it if the user gave none."""
    exec_id = created(engine, box, "sh", "-c", "stty raw -echo; echo ready; sleep 600", Tty=True, DetachKeys="", **ALL)
    stream, received = opened(engine, exec_id, Tty=True)
    while b"ready" not in received:
        received += stream.recv(4096)
    stream.sendall(b"\x10\x11")
    read_to_end(stream, received)
    assert inspected(engine, exec_id)["Running"]


def test_without_a_terminal_every_byte_is_input(engine: TempEngine, box: str) -> None:
    exec_id = created(engine, box, "od", "-An", "-tx1", DetachKeys="a", **ALL)
    stream, early = opened(engine, exec_id)
    stream.sendall(b"\x10\x11a")
    stream.shutdown(socket.SHUT_WR)
    assert payload(read_to_end(stream, early)).split() == [b"10", b"11", b"61"]


def events(engine: TempEngine, identifier: str, since: float) -> list[Any]:
    filters = json.dumps({"container": [identifier]}).replace('"', "%22").replace(" ", "")
    body = engine.request("GET", f"/v1.24/events?since={since:.9f}&until={time.time():.9f}&filters={filters}").body
    return [json.loads(line) for line in body.splitlines()]


def test_events(engine: TempEngine, box: str) -> None:
    begin = time.time()
    exec_id = created(engine, box, "sh", "-c", "exit 6")
    read_to_end(*opened(engine, exec_id))
    found = until("three events", lambda: len(all_ := events(engine, box, begin)) == 3 and all_)
    assert [event["status"] for event in found] == ["exec_create: sh -c exit 6", "exec_start: sh -c exit 6", "exec_die"]
    assert all(event["Actor"]["Attributes"]["execID"] == exec_id for event in found)
    assert found[-1]["Actor"]["Attributes"]["exitCode"] == "6"


def test_inspect(engine: TempEngine, box: str) -> None:
    exec_id = created(engine, box, "sleep", "600", Tty=True, User="app", Privileged=True, DetachKeys="ctrl-x", **ALL)
    own = inspected(engine, exec_id)
    assert own == own | {
        "ID": exec_id,
        "ContainerID": box,
        "Running": False,
        "ExitCode": None,
        "CanRemove": False,
        "DetachKeys": "GA==",
        "OpenStdin": True,
        "OpenStdout": True,
        "OpenStderr": True,
        "ProcessConfig": {
            "entrypoint": "sleep",
            "arguments": ["600"],
            "tty": True,
            "privileged": True,
            "user": "app",
        },
    }


@pytest.mark.own
def test_it_survives_the_daemon(own_engine: TempEngine) -> None:
    """kill -9 of the daemon: the stream continues, and a new daemon knows the exec and its exit."""
    engine = own_engine
    box = engine.started("sleep", "6000")
    script = "while [ ! -e /go ]; do echo tick; sleep 0.02; done; echo last; exit 9"
    exec_id = created(engine, box, "sh", "-c", script)
    other = created(engine, box, "sh", "-c", "while [ ! -e /go ]; do sleep 0.02; done; exit 8")
    start(engine, other)
    stream, early = opened(engine, exec_id)
    until("both run", lambda: inspected(engine, exec_id)["Pid"] and inspected(engine, other)["Pid"])
    engine.kill9()
    assert stream.recv(4096)
    engine.start()
    own = inspected(engine, exec_id)
    assert own["Running"]
    assert own["Pid"]
    assert set(engine.inspect(box)["ExecIDs"]) == {exec_id, other}
    assert run(engine, box, "touch", "/go")[0] == 0
    assert read_to_end(stream, early).endswith(b"last\n")
    assert inspected(engine, exec_id)["ExitCode"] == 9
    until("the other ended", lambda: inspected(engine, other)["ExitCode"] == 8)


@pytest.mark.own
def test_one_that_ends_without_a_daemon(own_engine: TempEngine) -> None:
    engine = own_engine
    box = engine.started("sleep", "6000")
    exec_id = created(engine, box, "sh", "-c", "until [ -e /go ]; do sleep 0.02; done; exit 5")
    start(engine, exec_id)
    pid = inspected(engine, exec_id)["Pid"]
    root = os.open(f"/proc/{pid}/root", os.O_PATH)
    engine.kill9()
    os.close(os.open("go", os.O_CREAT | os.O_WRONLY, dir_fd=root))
    os.close(root)
    until("it ended", lambda: not alive(pid))
    engine.start()
    own = inspected(engine, exec_id)
    assert (own["Running"], own["ExitCode"]) == (False, 5)
