"""The docker CLI in ordinary use, pinned to API 1.24: each command's effect, not only its exit
code."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import threading
import time
import tty
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, until
from tests.support.nightly import nightly


def test_run_prints_and_removes(engine: TempEngine) -> None:
    result = engine.docker("run", "--rm", "--network", "none", "busybox", "echo", "hello")
    assert (result.out, result.err) == ("hello\n", "")
    assert engine.containers() == []


def test_run_on_the_default_network(engine: TempEngine) -> None:
    """The container has its own address, a default route to the bridge's gateway, and gets an
    answer from the gateway.
    """
    script = (
        "ip -4 -o addr show eth0; ip route; ping -c 1 -W 5 $(ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p')"
    )
    result = engine.docker("run", "--rm", "busybox", "sh", "-c", script)
    assert "inet " in result.out
    assert "1 packets received" in result.out


def test_containers_reach_each_other(engine: TempEngine) -> None:
    server = engine.docker("run", "-d", "busybox", "sh", "-c", "echo found me | nc -l -p 7000").line
    address = engine.inspect(server)["NetworkSettings"]["IPAddress"]
    script = f"i=0; until nc {address} 7000 </dev/null; do i=$((i+1)); [ $i -lt 300 ] || exit 9; sleep 0.1; done"
    assert engine.docker("run", "--rm", "busybox", "sh", "-c", script).out == "found me\n"


def test_stderr_stays_apart(engine: TempEngine) -> None:
    result = engine.docker("run", "--rm", "--network", "none", "busybox", "sh", "-c", "echo out; echo err >&2")
    assert (result.out, result.err) == ("out\n", "err\n")


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_exit_code_of_the_program(engine: TempEngine, code: int) -> None:
    engine.docker("run", "--rm", "--network", "none", "busybox", "sh", "-c", f"exit {code}", status=code)


@pytest.mark.own  # dockerd 20.10 leaves this client waiting forever
@pytest.mark.parametrize("remove", [[], ["--rm"]])
def test_127_when_the_program_is_missing(engine: TempEngine, remove: list[str]) -> None:
    result = engine.docker("run", *remove, "--network", "none", "busybox", "no-such-program", status=127, timeout=30)
    assert "executable file not found" in result.err or "no such file or directory" in result.err
    if not remove or _cli_major(engine) >= 23:  # an older CLI does not wait for the removal
        assert len(engine.containers()) == (0 if remove else 1)


def _cli_major(engine: TempEngine) -> int:
    return int(engine.docker("version", "--format", "{{.Client.Version}}").out.split(".")[0])


@pytest.mark.own
def test_126_when_the_program_may_not_run(engine: TempEngine) -> None:
    result = engine.docker("run", "--network", "none", "busybox", "/etc", status=126, timeout=30)
    assert "permission denied" in result.err.lower() or "is a directory" in result.err.lower()


def test_125_when_the_engine_refuses(engine: TempEngine) -> None:
    result = engine.docker("run", "--network", "no-such-network", "busybox", "true", status=125)
    assert "no-such-network" in result.err
    engine.docker("run", "--rm", "--name", "bad/name", "busybox", "true", status=125)


def test_137_when_it_was_killed(engine: TempEngine) -> None:
    running = engine.popen(
        "run", "--rm", "--name", "victim", "--network", "none", "busybox", "sh", "-c", "echo on; exec sleep 600"
    )
    assert running.stdout and running.stdout.readline() == b"on\n"
    engine.docker("kill", "victim")
    assert running.wait(30 * PATIENCE) == 137
    running.communicate()
    assert engine.containers() == []


def test_143_when_it_was_terminated(engine: TempEngine) -> None:
    running = engine.popen(
        "run",
        "--name",
        "term",
        "--network",
        "none",
        "busybox",
        "sh",
        "-c",
        "trap 'exit 143' TERM; echo on; while :; do sleep 0.05; done",
    )
    assert running.stdout and running.stdout.readline() == b"on\n"
    running.send_signal(signal.SIGTERM)  # the CLI forwards it
    assert running.wait(30 * PATIENCE) == 143
    running.communicate()


@pytest.mark.parametrize("size", [64 << 20, *nightly(1 << 30)])
def test_a_pipe_through_cat(engine: TempEngine, size: int) -> None:
    """`size` bytes through `docker run -i busybox cat`, compared by checksum; neither end buffers
    all of them."""
    block = os.urandom(1 << 20)
    sent, received = hashlib.sha256(), hashlib.sha256()
    count = 0
    running = engine.popen(
        "run", "-i", "--rm", "--network", "none", "busybox", "cat", stdin=subprocess.PIPE, stderr=None
    )
    assert running.stdin and running.stdout

    def feed() -> None:
        assert running.stdin
        with running.stdin as pipe:
            for number in range(size >> 20):
                # no two blocks are equal, so the order matters
                piece = number.to_bytes(8, "big") + block[8:]
                sent.update(piece)
                pipe.write(piece)

    feeder = threading.Thread(target=feed)
    feeder.start()
    while chunk := running.stdout.read1(1 << 20):  # type: ignore[attr-defined]
        received.update(chunk)
        count += len(chunk)
    feeder.join()
    assert running.wait(30 * PATIENCE) == 0
    assert count == size
    assert received.digest() == sent.digest()


def test_pipe_of_nothing(engine: TempEngine) -> None:
    assert engine.docker("run", "-i", "--rm", "--network", "none", "busybox", "cat", input=b"").out == ""


def test_run_with_a_terminal(engine: TempEngine) -> None:
    """-t: one stream with CR LF, the size of the caller's terminal, and what is typed arrives."""
    import fcntl
    import struct
    import termios

    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    tty.setraw(inner)
    script = (
        "until [ \"$(stty size)\" = '33 99' ]; do sleep 0.05; done; echo size ok; read word; echo got $word; exit 5"
    )
    running = engine.popen(
        "run",
        "-it",
        "--rm",
        "--network",
        "none",
        "busybox",
        "sh",
        "-c",
        script,
        stdin=inner,
        stdout=inner,
        stderr=inner,
    )
    os.close(inner)
    seen = b""

    def see(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 30 * PATIENCE
        while text not in seen:
            assert select.select([outer], [], [], max(0, deadline - time.monotonic()))[0], seen
            try:
                seen += os.read(outer, 4096)
            except OSError:  # EIO: the other side is closed
                break
        assert text in seen, seen

    see(b"size ok\r\n")
    os.write(outer, b"word\r")
    see(b"got word\r\n")
    assert running.wait(30 * PATIENCE) == 5
    os.close(outer)


def test_detached_run_wait_logs(engine: TempEngine) -> None:
    identifier = engine.docker(
        "run", "-d", "--network", "none", "--name", "detached", "busybox", "sh", "-c", "echo one; echo two >&2; exit 3"
    ).line
    assert re.fullmatch("[0-9a-f]{64}", identifier)
    assert engine.docker("wait", "detached").line == "3"
    result = engine.docker("logs", "detached")
    assert (result.out, result.err) == ("one\n", "two\n")


def test_ps(engine: TempEngine) -> None:
    running = engine.docker(
        "run", "-d", "--network", "none", "--name", "up", "--label", "a=b", "busybox", "sleep", "600"
    ).line
    engine.docker("run", "--network", "none", "--name", "down", "busybox", "sh", "-c", "exit 7", status=7)
    form = "{{.ID}} {{.Names}} {{.Image}} {{.State}}"
    assert engine.docker("ps", "--no-trunc", "--format", form).line == f"{running} up busybox running"
    listed = engine.docker("ps", "-a", "--format", "{{.Names}} {{.Status}}").out.splitlines()
    assert [line.split()[0] for line in listed] == ["down", "up"]  # newest first
    assert listed[0].startswith("down Exited (7) ")
    assert listed[1].startswith("up Up ")
    assert engine.docker("ps", "-aq", "--filter", "status=exited").out.count("\n") == 1
    assert engine.docker("ps", "-q", "--no-trunc", "--filter", "label=a=b").line == running
    assert engine.docker("ps", "-aq", "--filter", "name=down").out.count("\n") == 1
    assert engine.docker("ps", "-n", "1", "--format", "{{.Names}}").line == "down"


def test_logs_follow_sees_all_and_ends(engine: TempEngine) -> None:
    engine.docker(
        "run",
        "-d",
        "--network",
        "none",
        "--name",
        "follow",
        "busybox",
        "sh",
        "-c",
        "for i in $(seq 500); do echo $i; [ $((i % 100)) = 0 ] && sleep 0.1; done; true",
    )
    assert engine.docker("logs", "-f", "follow").out.split() == [str(number) for number in range(1, 501)]
    assert engine.docker("logs", "--tail", "3", "follow").out.split() == ["498", "499", "500"]
    stamped = engine.docker("logs", "-t", "--tail", "2", "follow").out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z (499|500)$", line) for line in stamped), stamped
    stamp = stamped[1].split()[0]
    assert engine.docker("logs", "--since", stamp, "follow").out.split()[-1:] == ["500"]


def test_attach_and_detach_keys(engine: TempEngine) -> None:
    """A second terminal attaches, detaches by ctrl-p ctrl-q, and the container continues."""
    engine.docker(
        "run",
        "-dit",
        "--network",
        "none",
        "--name",
        "attached",
        "busybox",
        "sh",
        "-c",
        "read word; echo got $word; exit 4",
    )
    outer, inner = pty.openpty()
    tty.setraw(inner)
    first = engine.popen("attach", "attached", stdin=inner, stdout=inner, stderr=subprocess.PIPE)
    until("the client is attached", lambda: _attached(engine, "attached") >= 1)
    os.write(outer, b"\x10\x11")
    first.wait(30 * PATIENCE)
    assert engine.inspect("attached")["State"]["Running"]
    second = engine.popen("attach", "attached", stdin=inner, stdout=inner, stderr=subprocess.PIPE)
    until("the second client is attached", lambda: _attached(engine, "attached") >= 2)
    os.write(outer, b"hello\r")
    assert second.wait(30 * PATIENCE) == 4
    seen = b""
    while b"got hello" not in seen:  # the output of a terminal arrives with a delay
        assert select.select([outer], [], [], 30)[0], seen
        seen += os.read(outer, 65536)
    os.close(inner)
    os.close(outer)
    for attached in (first, second):
        attached.communicate()


def _attached(engine: TempEngine, name: str) -> int:
    """How many attach events the container has had."""
    history = engine.request("GET", f"/v1.24/events?since=0&until={time.time():.9f}").body
    return sum(
        json.loads(line)["Action"] == "attach" and json.loads(line)["Actor"]["Attributes"].get("name") == name
        for line in history.splitlines()
    )


@pytest.mark.own  # dockerd 20.10 drops output after the client's half-close
def test_attach_passes_the_output_on(engine: TempEngine) -> None:
    engine.docker(
        "run", "-di", "--network", "none", "--name", "catted", "busybox", "sh", "-c", "read word; echo $word; exit 8"
    )
    # The end of its stdin ends the attach, so output may be missing. The CLI waits for the exit
    # code.
    engine.docker("attach", "catted", input="through\n", status=8)
    assert engine.docker("logs", "catted").out == "through\n"


def test_stop_asks_then_kills(engine: TempEngine) -> None:
    engine.docker(
        "run",
        "-d",
        "--network",
        "none",
        "--name",
        "polite",
        "busybox",
        "sh",
        "-c",
        "trap 'echo bye; exit 9' TERM; echo on; while :; do sleep 0.05; done",
    )
    engine.docker(
        "run",
        "-d",
        "--network",
        "none",
        "--name",
        "deaf",
        "busybox",
        "sh",
        "-c",
        "trap '' TERM; echo on; while :; do sleep 0.05; done",
    )
    for name in ("polite", "deaf"):
        until("it has set its trap", lambda name=name: engine.logs(name) == b"on\n")
    assert engine.docker("stop", "-t", "600", "polite", timeout=60).line == "polite"
    assert engine.inspect("polite")["State"]["ExitCode"] == 9
    assert engine.logs("polite").endswith(b"bye\n")
    engine.docker("stop", "-t", "1", "deaf")
    assert engine.inspect("deaf")["State"]["ExitCode"] == 137
    engine.docker("stop", "deaf")  # already stopped: no change, no error


def test_kill_with_and_without_a_signal(engine: TempEngine) -> None:
    engine.docker(
        "run",
        "-d",
        "--network",
        "none",
        "--name",
        "killed",
        "busybox",
        "sh",
        "-c",
        "trap 'echo usr1' USR1; echo on; while :; do sleep 0.05; done",
    )
    until("it has set its trap", lambda: engine.logs("killed") == b"on\n")
    engine.docker("kill", "-s", "USR1", "killed")
    until("the signal has come", lambda: engine.logs("killed") == b"on\nusr1\n")
    assert engine.inspect("killed")["State"]["Running"]
    engine.docker("kill", "killed")
    assert engine.wait("killed") == 137
    assert "is not running" in engine.docker("kill", "killed", status=1).err


def test_restart_keeps_the_files_and_the_log(engine: TempEngine) -> None:
    engine.docker(
        "run",
        "-d",
        "--network",
        "none",
        "--name",
        "again",
        "busybox",
        "sh",
        "-c",
        "echo x >> /count; wc -l < /count; exec sleep 600",
    )
    until("first start", lambda: engine.logs("again") == b"1\n")
    first = engine.inspect("again")["State"]
    engine.docker("restart", "-t", "0", "again")
    until("second start", lambda: engine.logs("again") == b"1\n2\n")
    second = engine.inspect("again")["State"]
    assert second["Running"] and second["Pid"] != first["Pid"] and second["StartedAt"] > first["StartedAt"]


def test_start_of_a_stopped_container_attached(engine: TempEngine) -> None:
    engine.docker("create", "-i", "--network", "none", "--name", "stopped", "busybox", "sh", "-c", "cat; exit 6")
    for text in ("one", "two"):
        assert engine.docker("start", "-ai", "stopped", input=text, status=6).out == text


def test_rm(engine: TempEngine) -> None:
    engine.docker("run", "-d", "--network", "none", "--name", "removed", "busybox", "sleep", "600")
    assert engine.docker("rm", "removed", status=1).err
    assert engine.inspect("removed")["State"]["Running"]
    assert engine.docker("rm", "-f", "removed").line == "removed"
    assert engine.containers() == []
    assert "No such container: removed" in engine.docker("rm", "removed", status=1).err


def test_inspect(engine: TempEngine) -> None:
    identifier = engine.docker(
        *(
            "create",
            "--network",
            "none",
            "--name",
            "shown",
            "--hostname",
            "box",
            "-e",
            "A=1",
            "-w",
            "/tmp",
            "-u",
            "1:2",
        ),
        *("--label", "k=v", "--memory", "64m", "--cap-drop", "ALL", "--read-only", "busybox", "echo", "a b"),
    ).line
    (shown,) = json.loads(engine.docker("inspect", "shown").out)
    assert shown["Id"] == identifier
    assert shown["Name"] == "/shown"
    assert (shown["Path"], shown["Args"]) == ("echo", ["a b"])
    config, host = shown["Config"], shown["HostConfig"]
    assert (config["Hostname"], config["WorkingDir"], config["User"]) == ("box", "/tmp", "1:2")
    assert "A=1" in config["Env"]
    assert config["Labels"] == {"k": "v"}
    assert (host["Memory"], host["CapDrop"], host["ReadonlyRootfs"]) == (64 << 20, ["ALL"], True)
    assert shown["State"]["Status"] == "created"
    assert engine.docker("inspect", "-f", "{{.State.Running}}", "shown").line == "false"
    (image,) = json.loads(engine.docker("inspect", "busybox").out)
    assert image["Id"] == shown["Image"]
    assert engine.docker("inspect", "no-such-thing", status=1).out.strip() == "[]"


def test_what_create_asked_for_is_what_runs(engine: TempEngine) -> None:
    script = (
        "hostname; echo $A; pwd; id -u; id -g; touch /x 2>/dev/null || echo read-only; "
        "grep CapEff /proc/self/status; ulimit -n"
    )
    result = engine.docker(
        *("run", "--rm", "--network", "none", "--hostname", "box", "-e", "A=1", "-w", "/tmp", "-u", "1:2"),
        *("--cap-drop", "ALL", "--read-only", "--ulimit", "nofile=100:200", "busybox", "sh", "-c", script),
    )
    assert result.out.splitlines() == ["box", "1", "/tmp", "1", "2", "read-only", "CapEff:\t0000000000000000", "100"]


def test_binds(engine: TempEngine, tmp_path: object) -> None:
    directory = os.fspath(tmp_path)  # type: ignore[call-overload]
    with open(f"{directory}/given", "w") as file:
        file.write("from outside")
    engine.docker(
        "run",
        "--rm",
        "--network",
        "none",
        "-v",
        f"{directory}:/data",
        "busybox",
        "sh",
        "-c",
        "cp /data/given /data/taken",
    )
    assert Path(f"{directory}/taken").read_text() == "from outside"
    result = engine.docker(
        "run", "--rm", "--network", "none", "-v", f"{directory}:/data:ro", "busybox", "rm", "/data/given", status=1
    )
    assert "Read-only" in result.err
    assert os.path.exists(f"{directory}/given")


def test_images_tag_rmi(engine: TempEngine) -> None:
    identifier = engine.docker("images", "-q", "--no-trunc", "busybox:latest").line
    engine.docker("tag", "busybox", "example.org/some/name:v1")
    try:
        listed = engine.docker("images", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}").out.splitlines()
        assert f"example.org/some/name:v1 {identifier}" in listed
        assert f"busybox:latest {identifier}" in listed
        assert (
            engine.docker("run", "--rm", "--network", "none", "example.org/some/name:v1", "echo", "same").out
            == "same\n"
        )
    finally:
        removed = engine.docker("rmi", "example.org/some/name:v1").out
    assert removed == "Untagged: example.org/some/name:v1\n"
    assert "No such image" in engine.docker("rmi", "example.org/some/name:v1", status=1).err


def test_dangling_images_are_listed(engine: TempEngine) -> None:
    """The CLI needs `RepoDigests`, which it does not request. `docker images -qf dangling=true` is
    the usual way to find images to remove.
    """
    made = []
    engine.docker("run", "--name", "dangler", "--network", "none", "busybox", "touch", "/new")
    try:
        made.append(engine.docker("commit", "dangler", "dangling:latest").line)
        engine.docker("tag", "busybox", "dangling:latest")
        assert engine.docker("images", "-q", "--no-trunc", "-f", "dangling=true").line == made[0]
        listed = engine.docker("images", "--no-trunc", "--format", "{{.Repository}} {{.Tag}} {{.ID}}").out.splitlines()
        assert f"<none> <none> {made[0]}" in listed
        assert made[0] in engine.docker("images", "-a", "-q", "--no-trunc").out.split()
        answer = engine.request("GET", "/v1.18/images/json").json()
        assert {tuple(image["RepoDigests"]) for image in answer} == {(), ("<none>@<none>",)}
    finally:
        engine.docker("rm", "-f", "dangler")
        engine.docker("rmi", "-f", "dangling:latest", *made)


def test_messages_that_scripts_look_for(engine: TempEngine) -> None:
    def message(method: str, target: str, body: object = None) -> str:
        answer = engine.request(method, f"/v1.24{target}", body)
        assert answer.status >= 400
        return answer.message

    assert message("POST", "/containers/create", {"Image": "test456"}) == "No such image: test456:latest"
    assert message("DELETE", "/images/%20") == "image name cannot be blank"
    assert message("GET", '/images/json?filters={"dangling":["invalid"]}') == "Invalid filter 'dangling=invalid'"
    assert "dial tcp" in message("POST", "/images/create?fromSrc=http://host.invalid/x.tar")


def test_rmi_of_an_image_in_use(engine: TempEngine) -> None:
    engine.docker("tag", "busybox", "inuse:1")
    engine.docker("create", "--network", "none", "--name", "user", "inuse:1", "true")
    engine.docker("rmi", "inuse:1")  # one of two remaining names: only untagged
    refused = engine.docker("rmi", "busybox", status=1).err
    assert "user" in refused or "conflict" in refused.lower()
    assert engine.docker("images", "-q", "busybox").out
    assert engine.docker("start", "-a", "user").out == ""


def test_events_in_order(engine: TempEngine) -> None:
    begin = f"{time.time():.9f}"
    watching = engine.popen("events", "--since", begin, "--filter", "type=container", "--format", "{{json .}}")
    engine.docker("run", "--rm", "--network", "none", "--name", "eventful", "busybox", "sh", "-c", "exit 3", status=3)
    seen = []
    assert watching.stdout
    while not seen or seen[-1]["Action"] != "destroy":
        line = watching.stdout.readline()
        assert line, (seen, watching.communicate())
        seen.append(json.loads(line))
    watching.terminate()
    watching.communicate()
    actions = [event["Action"] for event in seen]
    assert [action for action in actions if action in ("create", "attach", "start", "die", "destroy")] == [
        "create",
        "attach",
        "start",
        "die",
        "destroy",
    ]
    (die,) = [event for event in seen if event["Action"] == "die"]
    assert die["Actor"]["Attributes"]["exitCode"] == "3"
    assert (die["Actor"]["Attributes"]["name"], die["Actor"]["Attributes"]["image"]) == ("eventful", "busybox")
    stamps = [event["timeNano"] for event in seen]
    assert stamps == sorted(stamps)


def test_names(engine: TempEngine) -> None:
    """Full id, any unique prefix, the name; a name that is taken; a prefix that is not unique; a
    random name.
    """
    first = engine.docker("create", "--network", "none", "--name", "named", "busybox", "true").line
    for name in (first, first[:12], first[:4], "named"):
        assert engine.inspect(name)["Id"] == first
    assert engine.docker("inspect", "-f", "{{.Id}}", "/named").line == first
    taken = engine.docker("create", "--name", "named", "busybox", "true", status=1).err
    assert f'The container name "/named" is already in use by container "{first}"' in taken
    second = engine.docker("create", "--network", "none", "busybox", "true").line
    assert re.fullmatch("/[a-z]+_[a-z]+[0-9]*", engine.inspect(second)["Name"])
    while not any(other != first and other[0] == first[0] for other in engine.containers()):
        engine.create("true")
    ambiguous = engine.request("GET", f"/v1.24/containers/{first[0]}/json")
    assert ambiguous.status == 400
    assert "multiple" in ambiguous.message.lower() or "ambiguous" in ambiguous.message.lower()
    assert engine.request("POST", f"/v1.24/containers/{first[0]}/start").status == ambiguous.status
    assert engine.inspect(first)["State"]["Status"] == "created"


def test_version_and_info(engine: TempEngine) -> None:
    assert engine.docker("version", "--format", "{{.Server.APIVersion}} {{.Server.Os}}").out.split()[1] == "linux"
    engine.started("sleep", "600")
    engine.create("true")
    shown = json.loads(engine.docker("info", "--format", "{{json .}}").out)
    assert (shown["Containers"], shown["ContainersRunning"], shown["ContainersStopped"]) == (2, 1, 1)
    assert shown["Images"] >= 1
    assert shown["NCPU"] == len(os.sched_getaffinity(0))
