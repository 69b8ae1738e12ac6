"""The docker CLIs of four ages at the versions that they negotiate: 20.10, 26.1, 28.2, 28.5.

tests/api/test_docker_cli.py has the details at API 1.24. Here each command is used as of its
version, and its effect is looked at from outside.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from pathlib import Path

import pytest

from tests.clients.conftest import Docker
from tests.support.engine.harness import TempEngine, free_ports, until
from tests.support.images.registry import PASSWORD, USER, Registry

QUIET = ("--network", "none")


def test_negotiation(docker: Docker) -> None:
    seen = json.loads(docker("version", "--format", "{{json .}}").out)
    assert seen["Client"]["ApiVersion"] == docker.program.api
    assert (seen["Server"]["ApiVersion"], seen["Server"]["MinAPIVersion"]) == ("1.55", "1.18")
    words = docker("version").out
    assert words.count("API version:") >= 2 and "1.55 (minimum version 1.18)" in words
    assert "Storage Driver: overlay2" in docker("info").out


def test_run_as_in_the_issue(docker: Docker) -> None:
    """An init, mounts of three types, CPUs and a health check in one `run --rm`."""
    seen = docker(
        *("run", "--rm", "--init", "--cpus", "0.5", "--pids-limit", "50", "--hostname", "h"),
        *("--mount", "type=volume,source=kept,target=/kept", "--mount", "type=volume,target=/anonymous"),
        *("--mount", "type=tmpfs,target=/scratch,tmpfs-size=1m,tmpfs-mode=0700"),
        *("--mount", f"type=bind,source={docker.engine.base},target=/host,readonly"),
        *("--health-cmd", "true", "--health-interval", "1s", "--health-start-period", "1s"),
        *("--add-host", "gateway:host-gateway", "--env", "A=b", "--workdir", "/kept", "--cap-drop", "ALL"),
        *("busybox", "sh", "-c"),
        "cat /proc/1/cmdline | tr '\\0' ' '; echo; hostname; pwd; echo $A; grep -c gateway /etc/hosts;"
        "grep -o ' /scratch tmpfs [^ ]*' /proc/mounts; touch /host/x 2>&1; grep CapEff /proc/self/status;"
        "touch /kept/file",
    ).out.splitlines()
    assert seen[0].startswith("/sbin/docker-init -- sh -c ")
    assert seen[1:5] == ["h", "/kept", "b", "1"]
    assert "size=1024k" in seen[5] and "mode=700" in seen[5]
    assert "Read-only file system" in seen[6]
    assert seen[7].split() == ["CapEff:", "0000000000000000"]
    assert docker.engine.containers() == []
    assert docker.lines("volume", "ls", "-q") == ["kept"], "the anonymous volume went with its container"
    assert docker("run", "--rm", *QUIET, "-v", "kept:/k", "busybox", "ls", "/k").out == "file\n"
    docker("volume", "rm", "kept")


@pytest.mark.parametrize("remove", [(), ("--rm",)], ids=["keep", "rm"])
def test_exit_codes(docker: Docker, remove: tuple[str, ...]) -> None:
    ended = docker("run", *remove, *QUIET, "busybox", "sh", "-c", "echo out; echo err >&2; exit 7", status=7)
    assert (ended.out, ended.err) == ("out\n", "err\n")
    docker("run", *remove, *QUIET, "busybox", "no-such-program", status=127)
    docker("run", *remove, *QUIET, "busybox", "/etc", status=126)
    docker("run", *remove, "--network", "no-such-network", "busybox", "true", status=125)
    assert "100" in docker("run", *remove, *QUIET, "-i", "busybox", "wc", "-c", input="x" * 100).out


def test_a_terminal(docker: Docker) -> None:
    assert docker("run", "--rm", "-t", *QUIET, "busybox", "echo", "hi").out == "hi\r\n"
    docker("run", "-d", "--name", "tty", *QUIET, "busybox", "top")
    assert docker("exec", "-t", "tty", "tty").out == "/dev/pts/0\r\n"


def test_what_is_created(docker: Docker) -> None:
    """Options come back from inspect as the CLI shows them."""
    docker(
        *("create", "--name", "all", "--init", "--cpus", "0.75", "--memory", "64m", "--memory-swap", "-1"),
        *("--pids-limit", "9", "--cgroupns", "private", "--ipc", "shareable", "--device-cgroup-rule", "c 1:3 r"),
        *("--stop-timeout", "3", "--stop-signal", "INT", "--restart", "on-failure:2", "--cap-add", "net_admin"),
        *("--security-opt", "systempaths=unconfined", "--ulimit", "nofile=200:200", "--log-opt", "max-size=1m"),
        *("--sysctl", "net.core.somaxconn=64", "--tmpfs", "/t:size=1m", "--dns", "10.211.4.1", "--shm-size", "1m"),
        *("--health-cmd", "true", "--health-start-period", "2s", "--group-add", "7", "--oom-score-adj", "9"),
        *("--expose", "9/sctp", "--label", "a=b", "--read-only", "--blkio-weight", "0", "busybox", "top"),
    )
    (seen,) = json.loads(docker("inspect", "all").out)
    config, host = seen["Config"], seen["HostConfig"]
    assert config["StopTimeout"] == 3 and config["StopSignal"] == "INT" and config["Labels"] == {"a": "b"}
    assert config["Healthcheck"] == {"Test": ["CMD-SHELL", "true"], "StartPeriod": 2 * 10**9}
    assert config["ExposedPorts"] == {"9/sctp": {}}
    assert host["Init"] is True and host["NanoCpus"] == 750_000_000 and host["PidsLimit"] == 9
    assert (host["Memory"], host["MemorySwap"], host["ShmSize"]) == (64 << 20, -1, 1 << 20)
    assert (host["CgroupnsMode"], host["IpcMode"]) == ("private", "shareable")
    assert host["DeviceCgroupRules"] == ["c 1:3 r"] and host["RestartPolicy"]["MaximumRetryCount"] == 2
    assert host["MaskedPaths"] == [] and host["ReadonlyPaths"] == []
    assert host["Sysctls"] == {"net.core.somaxconn": "64"} and host["Tmpfs"] == {"/t": "size=1m"}
    assert host["Dns"] == ["10.211.4.1"] and host["GroupAdd"] == ["7"] and host["OomScoreAdj"] == 9
    assert host["ReadonlyRootfs"] is True and host["LogConfig"]["Config"] == {"max-size": "1m"}
    assert [cap.upper().removeprefix("CAP_") for cap in host["CapAdd"]] == ["NET_ADMIN"]
    docker("start", "all")
    assert docker("exec", "all", "cat", "/proc/sys/net/core/somaxconn").out == "64\n"
    # Equal ones: with runc 1.1 the soft limit of an exec is sometimes the hard one.
    assert docker("exec", "all", "sh", "-c", "ulimit -n; ulimit -Hn").out == "200\n200\n"


def test_newer_options(docker: Docker) -> None:
    """Options that came after 20.10, each from the API version that has it."""
    options = ["--name", "new", "--health-cmd", "true"]
    if docker.minor >= 44:
        options += ["--health-start-interval", "100ms", "--annotation", "org.example=x"]
        options += ["--network", "name=bridge,mac-address=02:42:ac:11:00:99"]
    if docker.minor >= 48:
        options += ["--mount", "type=image,source=busybox,target=/image"]
    docker("run", "-d", *options, "busybox", "top")
    (seen,) = json.loads(docker("inspect", "new").out)
    if docker.minor >= 44:
        assert seen["Config"]["Healthcheck"]["StartInterval"] == 10**8
        assert seen["HostConfig"]["Annotations"] == {"org.example": "x"}
        assert docker("exec", "new", "cat", "/sys/class/net/eth0/address").out == "02:42:ac:11:00:99\n"
    if docker.minor >= 48:
        assert docker("exec", "new", "/image/bin/busybox", "echo", "hi").out == "hi\n"


def test_a_life(docker: Docker) -> None:
    name = docker("run", "-d", "--name", "first", *QUIET, "busybox", "sh", "-c", "echo on; exec top").line
    until("it has printed", lambda: docker("logs", "first").out.startswith("on\n"))
    assert docker("rename", "first", "life").out == ""
    assert docker.lines("ps", "-q", "--no-trunc") == [name]
    assert "top" in docker("top", "life", "-o", "pid,args").out
    assert docker("stats", "--no-stream", "--format", "{{.Name}} {{.PIDs}}", "life").line == "life 1"
    assert docker("stats", "--no-stream", "--format", "{{.Name}}").line == "life"
    for command, state in (("pause", "paused"), ("unpause", "running"), ("kill", "exited"), ("start", "running")):
        docker(command, "life")
        assert docker("inspect", "-f", "{{.State.Status}}", "life").line == state
    docker("restart", "-t", "0", "life")
    docker("update", "--cpus", "0.5", "--memory", "32m", "--memory-swap", "32m", "--pids-limit", "20", "life")
    host = docker.engine.inspect(name)["HostConfig"]
    assert (host["Memory"], host["PidsLimit"]) == (32 << 20, 20)
    docker("exec", "life", "touch", "/tmp/new")
    assert "A /tmp/new" in docker.lines("diff", "life")
    docker("stop", "-t", "0", "life")
    assert docker("wait", "life").line in ("137", "143"), "SIGTERM comes just before SIGKILL"
    docker("rm", "-v", "life")
    assert "No such container: life" in docker("logs", "life", status=1).err


def test_stop_with_a_signal(docker: Docker) -> None:
    script = "trap 'exit 9' USR1; echo on; while :; do sleep 0.05; done"
    docker("run", "-d", "--name", "s", *QUIET, "busybox", "sh", "-c", script)
    until("the trap is set", lambda: docker("logs", "s").out == "on\n")
    if docker.minor >= 42:
        docker("stop", "--signal", "USR1", "s")
    else:
        docker("kill", "--signal", "USR1", "s")
    assert docker("wait", "s").line == "9"


def test_logs(docker: Docker) -> None:
    script = "for i in 1 2 3; do echo $i; done; echo e >&2"
    docker("run", "--name", "l", *QUIET, "busybox", "sh", "-c", script)
    assert docker("logs", "l").out == "1\n2\n3\n"
    assert docker("logs", "l").err == "e\n"
    assert docker("logs", "--since", "10m", "l").out == "1\n2\n3\n"
    assert docker("logs", "--until", "10m", "l").out == ""
    assert docker("logs", "--tail", "0", "l").out == ""
    assert docker("logs", "-f", "-t", "l").out.count("Z ") == 3


def test_attach_and_start(docker: Docker) -> None:
    docker("create", "-i", "--name", "a", *QUIET, "busybox", "sh", "-c", "cat; exit 4")
    assert docker("start", "-a", "-i", "a", input="through", status=4).out == "through"
    docker("run", "-d", "--name", "b", *QUIET, "busybox", "sh", "-c", "trap 'exit 6' TERM; while :; do sleep 0.1; done")
    docker("attach", "--no-stdin", "no-such", status=1)


def test_exec(docker: Docker) -> None:
    docker("run", "-d", "--name", "e", *QUIET, "busybox", "top")
    words = docker(
        "exec", "-e", "A=b c", "-w", "/etc", "-u", "65534:7", "e", "sh", "-c", 'echo "$A"; pwd; id -u; id -g'
    )
    assert words.out == "b c\n/etc\n65534\n7\n"
    docker("exec", "e", "sh", "-c", "exit 5", status=5)
    docker("exec", "e", "no-such-program", status=127)
    assert docker("exec", "-i", "e", "cat", input="in").out == "in"
    assert docker("exec", "-d", "e", "touch", "/tmp/done").out == ""
    until("the detached exec has run", lambda: docker("exec", "e", "ls", "/tmp").out == "done\n")
    docker("exec", "--detach-keys", "ctrl-a", "e", "true")


def test_cp(docker: Docker, tmp_path: Path) -> None:
    docker("run", "-d", "--name", "c", *QUIET, "busybox", "top")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("text")
    docker("cp", str(tmp_path / "tree"), "c:/tmp")
    assert docker("exec", "c", "cat", "/tmp/tree/file").out == "text"
    docker("cp", "c:/tmp/tree/file", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "text"
    docker("cp", "-a", str(tmp_path / "back"), "c:/etc/renamed")
    archive = docker.program.run_bytes(docker.engine, "cp", "c:/etc/renamed", "-")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert tar.getnames() == ["renamed"]
    assert "no-such" in docker("cp", "c:/no-such", str(tmp_path), status=1).err


def test_ps_filters(docker: Docker) -> None:
    (port,) = free_ports(1)
    docker("network", "create", "n")
    well = docker(
        *("run", "-d", "--name", "well", "--network", "n", "-v", "vol:/v", "-p", f"127.0.0.1:{port}:80"),
        *("--expose", "90", "--health-cmd", "true", "--health-interval", "100ms", "--label", "k=v"),
        *("busybox", "top"),
    ).line
    docker("run", "--name", "gone", *QUIET, "busybox", "sh", "-c", "exit 3", status=3)
    until("it is healthy", lambda: docker("inspect", "-f", "{{.State.Health.Status}}", "well").line == "healthy")
    assert "(healthy)" in docker("ps").out
    assert f"127.0.0.1:{port}->80/tcp" in docker("ps").out and docker("port", "well", "80").line == f"127.0.0.1:{port}"
    for wanted in (
        *("health=healthy", "network=n", "volume=vol", "volume=/v", "label=k=v", "status=running", "name=wel"),
        *(f"publish={port}", "publish=80", "expose=90/tcp", "is-task=false", f"id={well[:12]}", "ancestor=busybox"),
    ):
        key = ["--filter", "status=running"] if wanted.startswith(("is-task", "ancestor")) else []
        if wanted == "publish=80":  # the container's side of a port is not published
            assert docker.lines("ps", "-q", "--no-trunc", "--filter", wanted) in ([], [well])
            continue
        assert docker.lines("ps", "-a", "-q", "--no-trunc", "--filter", wanted, *key) == [well], wanted
    assert len(docker.lines("ps", "-a", "-q", "--filter", "exited=3")) == 1
    assert docker("ps", "-a", "-s", "--format", "{{.Names}}", "--last", "1").line == "gone"
    docker("rm", "-f", "well", "gone")
    docker("volume", "rm", "vol")


def test_networks(docker: Docker) -> None:
    options = ["--subnet", "10.211.5.0/24", "--gateway", "10.211.5.1", "--ip-range", "10.211.5.128/25"]
    options += ["--aux-address", "printer=10.211.5.130", "--attachable", "--label", "a=b", "--opt", "x=y"]
    docker("network", "create", *options, "lan")
    docker("network", "create", "--internal", "--ipv6", "--subnet", "fd21:5::/64", "inner")
    docker(
        "run",
        "-d",
        "--name",
        "one",
        "--network",
        "lan",
        "--ip",
        "10.211.5.20",
        "--network-alias",
        "uno",
        "busybox",
        "top",
    )
    docker("run", "-d", "--name", "two", "--network", "lan", "--link", "one:linked", "busybox", "top")
    docker("network", "connect", "--alias", "second", "inner", "one")
    docker("network", "connect", "inner", "two")
    for name in ("one", "uno", "linked", "second"):
        docker("exec", "two", "ping", "-c", "1", "-W", "5", name)
    (seen,) = json.loads(docker("network", "inspect", "lan").out)
    assert seen["Attachable"] is True and seen["Labels"] == {"a": "b"} and seen["Options"]["x"] == "y"
    assert {"10.211.5.20/24"} <= {each["IPv4Address"] for each in seen["Containers"].values()}
    assert docker("network", "ls", "-q", "--filter", "scope=local", "--filter", "name=lan").out.count("\n") == 1
    docker("network", "disconnect", "-f", "inner", "two")
    assert "has active endpoints" in docker("network", "rm", "lan", status=1).err
    docker("rm", "-f", "one", "two")
    assert sorted(docker.lines("network", "prune", "-f")[1:3]) == ["inner", "lan"]
    # 20.10 has words of its own
    missing = "network lan not found" if docker.minor > 41 else "No such network: lan"
    assert missing in docker("network", "inspect", "lan", status=1).err


def test_volumes(docker: Docker) -> None:
    assert docker("volume", "create", "--label", "a=b", "named").line == "named"
    anonymous = docker("volume", "create").line
    (seen,) = json.loads(docker("volume", "inspect", "named").out)
    assert seen["Labels"] == {"a": "b"} and seen["Scope"] == "local" and seen["CreatedAt"]
    assert docker.lines("volume", "ls", "-q", "--filter", "label=a=b", "--filter", "dangling=true") == ["named"]
    if docker.minor >= 42:
        assert anonymous in docker("volume", "prune", "-f").out
        assert docker.lines("volume", "ls", "-q") == ["named"], "a prune keeps volumes with names"
        assert "named" in docker("volume", "prune", "-a", "-f").out
    else:
        assert {"named", anonymous} <= set(docker.lines("volume", "prune", "-f")), "as prunes below 1.42"
    assert docker.lines("volume", "ls", "-q") == []
    docker("volume", "rm", "no-such", status=1)
    docker("volume", "rm", "-f", "no-such")


def test_images(own_engine: TempEngine, docker: Docker, tmp_path: Path) -> None:
    docker = Docker(docker.program, own_engine)  # the prune is of all images
    docker("tag", "busybox", "host.example/other:1")
    docker("run", "--name", "made", *QUIET, "busybox", "touch", "/made")
    docker("commit", "-m", "words", "-c", "ENV A=b", "made", "committed:1")
    assert docker.lines("image", "ls", "-q", "--filter", "reference=committed:*", "--no-trunc")[0].startswith("sha256:")
    assert "words" in docker("history", "committed:1").out
    docker("save", "-o", str(tmp_path / "saved"), "committed:1", "host.example/other:1")
    docker("export", "-o", str(tmp_path / "exported"), "made")
    docker("rm", "made")
    assert "Untagged: committed:1" in docker("rmi", "committed:1", "host.example/other:1").out
    loaded = docker("load", "-i", str(tmp_path / "saved")).out
    assert "Loaded image: committed:1" in loaded and "Loaded image: host.example/other:1" in loaded
    assert docker("run", "--rm", *QUIET, "committed:1", "sh", "-c", "ls /made; echo $A").out == "/made\nb\n"
    docker("import", "-c", "CMD ls /made", str(tmp_path / "exported"), "imported:2")
    assert docker("run", "--rm", *QUIET, "imported:2").out == "/made\n"
    assert (
        docker("image", "inspect", "-f", "{{.Os}} {{.Config.Cmd}}", "imported:2").line == "linux [/bin/sh -c ls /made]"
    )
    docker("rmi", "host.example/other:1")  # another name of an image that a container will use
    docker("run", "-d", "--name", "user", *QUIET, "busybox", "top")
    pruned = docker("image", "prune", "-a", "-f").out
    assert "untagged: imported:2" in pruned and "Total reclaimed space: " in pruned
    assert docker("image", "ls", "--format", "{{.Repository}}").line == "busybox", "a container uses it"


def test_builds(builder: Docker, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM busybox\nCOPY file /\nRUN cat /file > /copy\nCMD cat /copy\n")
    (tmp_path / "file").write_text("text")
    for number, choice in enumerate(("0", "1") if builder.program.plugins else ("0",)):
        builder("build", "-t", f"built:{number}", str(tmp_path), DOCKER_BUILDKIT=choice)
        assert builder("run", "--rm", *QUIET, f"built:{number}").out == "text"
    assert "Total" in builder("builder", "prune", "-a", "-f").out


def test_disk_usage(own_engine: TempEngine, docker: Docker) -> None:
    docker = Docker(docker.program, own_engine)
    docker("volume", "create", "counted")
    docker("run", "--name", "used", *QUIET, "-v", "counted:/v", "busybox", "sh", "-c", "head -c 5000 /dev/zero > /x")
    rows = {line.split("  ")[0]: line.split() for line in docker.lines("system", "df")[1:]}
    assert rows["Images"][1:3] == ["1", "1"]
    assert rows["Containers"][1:3] == ["1", "0"] and rows["Local Volumes"][2:4] == ["1", "1"]
    verbose = docker("system", "df", "-v").out
    for word in ("busybox", "used", "counted", "5kB"):
        assert word in verbose
    docker("rm", "used")
    docker("volume", "rm", "counted")


def test_system_prune(own_engine: TempEngine, docker: Docker) -> None:
    docker = Docker(docker.program, own_engine)
    docker("volume", "create", "named")
    docker("network", "create", "unused")
    docker("run", "--name", "ended", *QUIET, "-v", "/anonymous", "busybox", "true")
    said = docker("system", "prune", "-a", "-f", "--volumes").out
    for words in ("Deleted Containers:", "Deleted Networks:\nunused", "Deleted Volumes:", "untagged: busybox:latest"):
        assert words in said
    assert docker.lines("ps", "-aq") == docker.lines("images", "-q") == []
    assert docker.lines("volume", "ls", "-q") == (["named"] if docker.minor >= 42 else [])
    assert "reclaimed space: 0B" in docker("system", "prune", "-f").out


def test_events(docker: Docker) -> None:
    begin = time.time()
    docker("run", "--rm", "--name", "seen", *QUIET, "--label", "a=b", "busybox", "true")

    def seen() -> list[str]:
        said = docker(
            *("events", "--since", f"{begin:.6f}", "--until", f"{time.time():.6f}", "--format", "{{json .}}"),
            *("--filter", "type=container", "--filter", "scope=local", "--filter", "label=a=b"),
        ).out
        return [json.loads(line)["Action"] for line in said.splitlines()]

    until("its end was published", lambda: "destroy" in seen())
    assert [action for action in seen() if action in ("create", "start", "die", "destroy")] == [
        *("create", "start", "die", "destroy")
    ]


def test_a_registry(builder: Docker) -> None:
    docker = builder
    with Registry(password=True) as registry:
        name = f"{registry.host}/box:1"
        docker("tag", "busybox", name)
        assert "no basic auth credentials" in docker("push", name, status=1).err
        wrong = docker("login", "-u", USER, "-p", "wrong", registry.host, status=1)
        assert "unauthorized" in wrong.err.lower() or "incorrect" in wrong.err.lower()
        docker("login", "-u", USER, "-p", PASSWORD, registry.host)
        assert "digest: sha256:" in docker("push", name).out
        docker("rmi", name)
        pulled = docker("pull", name).out
        assert "Status: Downloaded newer image" in pulled or "Image is up to date" in pulled
        assert docker("image", "inspect", "-f", "{{len .RepoDigests}}", name).line == "1"
        assert docker("run", "--rm", *QUIET, "--pull", "always", name, "echo", "hi").out == "hi\n"
        docker("rmi", name)
        docker("logout", registry.host)


def test_what_is_not_served(docker: Docker) -> None:
    """Commands of swarm and plugins end with a message, and lists are empty."""
    assert "This node is not a swarm manager" in docker("node", "ls", status=1).err
    assert "This node is not a swarm manager" in docker("service", "ls", status=1).err
    assert docker.lines("plugin", "ls", "-q") == []
    docker("plugin", "inspect", "none", status=1)
    refused = docker("run", "--rm", "--gpus", "all", *QUIET, "busybox", "true", status=125)
    assert "could not select device driver" in refused.err
    assert docker("inspect", "nothing", status=1).err.strip().lower().endswith("no such object: nothing")
