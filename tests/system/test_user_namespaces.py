"""Containers in user namespaces (`--userns-remap`), with each runtime: whose the files are, inside
and on the disk, and that one copy of the layers serves every range.

An engine here has an /etc/subuid and an /etc/subgid of its own, in a mount namespace of its own.
"""

from __future__ import annotations

import io
import os
import pwd
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.system import namespaces, user_namespaces
from engine.system.user_namespaces import IdMap, Range
from tests.support import PATIENCE
from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until

USER = pwd.getpwuid(1).pw_name
UID, GID, COUNT = 1_500_000, 1_700_000, 65536
"""First ids on the host, different for users and groups."""
OTHER = 2_500_000
"""First id of another range."""

FULL = "id -u; id -g; cat /proc/self/uid_map /proc/self/gid_map"
SHOW = "stat -c '%n %u:%g' "


def within(directory: Path, uid: int = UID, gid: int = GID) -> tuple[str, ...]:
    """A command for `TempEngine.within`: it has these first ids, and /tmp with flags that a mount
    in the namespace must keep, as on Debian 13.
    """
    (directory / f"subuid-{uid}").write_text(f"{USER}:{uid}:{COUNT}\n")
    (directory / f"subgid-{uid}").write_text(f"{USER}:{gid}:{COUNT}\n")
    mounts = "mount --rbind /tmp /tmp && mount -o remount,bind,nosuid,nodev /tmp && " + "".join(
        f"test -e /etc/{name} || touch /etc/{name}; mount --bind {directory}/{name}-{uid} /etc/{name} && "
        for name in ("subuid", "subgid")
    )
    return ("unshare", "--mount", "sh", "-c", f'{mounts}exec "$@"', "sh")


def remapped(directory: Path, *arguments: str) -> TempEngine:
    engine = TempEngine("--userns-remap", USER, *arguments, within=within(directory))
    engine.base.chmod(0o711)  # as of a host's directories: the namespace's root opens RUN
    return engine


@pytest.fixture(scope="module", params=["crun", "runc"])
def module_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TempEngine]:
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} here")
    with remapped(tmp_path_factory.mktemp("etc"), "--runtime", request.param) as engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def engine(module_engine: TempEngine) -> Iterator[TempEngine]:
    yield module_engine
    module_engine.remove_all()


def said(engine: TempEngine, *command: str, options: tuple[str, ...] = ()) -> str:
    """What a container prints that is removed at its end. The command is a shell's."""
    return engine.docker("run", "--rm", *options, "busybox", "sh", "-c", *command).out


def owner(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid


def test_root_of_a_container_is_the_first_id_of_the_range(engine: TempEngine) -> None:
    assert said(engine, FULL).split() == ["0", "0", "0", str(UID), str(COUNT), "0", str(GID), str(COUNT)]
    options = engine.request("GET", "/v1.40/info").json()["SecurityOptions"]
    assert "name=userns" in options
    container = engine.docker("run", "-d", "busybox", "sleep", "1000").line
    pid = engine.inspect(container)["State"]["Pid"]
    assert owner(Path(f"/proc/{pid}")) == (UID, GID)
    # the record says with which range it was started
    assert engine.docker("run", "--rm", "--userns=host", "busybox", "cat", "/proc/self/uid_map").out.split()[1] == "0"


def test_files_have_the_ids_of_the_container_inside_and_on_the_disk(engine: TempEngine) -> None:
    made = "touch /f && chown 5:6 /f && mkdir /d && ln -s x /d/l && rm /bin/vi; echo x >>/etc/passwd"
    container = engine.docker(
        "create", "-w", "/work/dir", "busybox", "sh", "-c", f"{made}; {SHOW}/ /f /d /d/l /work"
    ).line
    engine.docker("start", "-a", container)
    assert engine.logs(container).split(b"\n")[:-1] == [b"/ 0:0", b"/f 5:6", b"/d 0:0", b"/d/l 0:0", b"/work 0:0"]
    data = engine.inspect(container)["GraphDriver"]["Data"]
    upper = Path(data["UpperDir"])
    owners = {path.name: owner(path) for path in upper.rglob("*")}
    assert owners["f"] == (5, 6)
    assert {owners[name] for name in ("d", "l", "work", "dir", "passwd")} == {(0, 0)}


def test_what_the_engine_adds_belongs_to_the_containers_root(engine: TempEngine) -> None:
    shown = said(
        engine,
        f"{SHOW}/etc/hosts /etc/hostname /etc/resolv.conf /dev/shm /t /v /dev/pts /proc/self/status "
        "&& echo x >>/etc/hosts && echo x >/dev/shm/x && echo x >/t/x && echo x >/v/x",
        options=("--tmpfs", "/t", "-v", "/v"),
    )
    assert set(re.findall(r" (\S+)$", shown, re.M)) == {"0:0"}, shown


def test_standard_streams_can_be_opened_again(engine: TempEngine) -> None:
    """/dev/stdout, by root and by another user; and the host's /dev/null stays root's."""
    for user in ("0", "33:44"):
        done = engine.docker(
            "run",
            "--rm",
            "-i",
            "-u",
            user,
            "busybox",
            "sh",
            "-c",
            "cat </dev/stdin; echo o >/dev/stdout; echo e >/dev/stderr",
            input="i\n",
        )
        assert (done.out, done.err) == ("i\no\n", "e\n")
        assert said(engine, "cat; echo >/dev/null && echo end", options=("-u", user)) == "end\n"
        assert said(engine, "stat -c %u $(tty); echo x >/dev/tty", options=("-t", "-u", user)).split() == [
            user[:2].strip(":"),
            "x",
        ]
    assert owner(Path("/dev/null")) == (0, 0)


def test_exec_and_health_checks(engine: TempEngine) -> None:
    container = engine.docker(
        "run", "-d", "--health-cmd", "test $(id -u) = 0", "--health-interval", "0.2s", "busybox", "sleep", "1000"
    ).line
    assert engine.docker("exec", container, "sh", "-c", FULL).out.split()[:4] == ["0", "0", "0", str(UID)]
    for user in ("0", "7:8"):
        done = engine.docker(
            "exec", "-u", user, container, "sh", "-c", "id -u; echo o >/dev/stdout; echo e >/dev/stderr"
        )
        assert (done.out, done.err) == (f"{user[0]}\no\n", "e\n")
    refused = engine.docker("exec", "-u", "70000", container, "id", status=None)
    assert "uid 70000 cannot be mapped to a host ID" in refused.out + refused.err
    until("healthy", lambda: engine.inspect(container)["State"]["Health"]["Status"] == "healthy")
    assert owner(Path("/dev/null")) == (0, 0)


def test_what_dockerd_refuses_with_it(engine: TempEngine) -> None:
    for options, words in (
        (
            ("--privileged",),
            "privileged mode is incompatible with user namespaces.  You must run the container in the ",
        ),
        (("--network=host",), "cannot share the host's network namespace when user namespaces are enabled"),
        (("--pid=host",), "cannot share the host PID namespace when user namespaces are enabled"),
        (("--user=70000",), "uid 70000 cannot be mapped to a host ID"),
        (("--tmpfs=/t:uid=70000",), "uid 70000 cannot be mapped to a host ID"),
        (("--tmpfs=/t:gid=70001,uid=5",), "gid 70001 cannot be mapped to a host ID"),
    ):
        done = engine.docker("run", "--rm", *options, "busybox", "true", status=125)
        assert words in done.err
        if "--user" not in options[0]:
            host = ("--userns=host", *options)
            assert said(engine, "cat /proc/self/uid_map", options=host).split()[1] == "0"
    assert engine.containers() == []
    assert said(engine, "echo x >/x", options=("--uts=host", "--ipc=host")) == ""
    done = engine.docker("run", "--rm", "--read-only", "busybox", "touch", "/x", status=1)
    assert "Read-only file system" in done.err


def test_the_network_is_its_roots(engine: TempEngine) -> None:
    engine.docker("network", "create", "n")
    try:
        for network in ("bridge", "n", "none"):
            shown = said(
                engine,
                "ip link set lo down && ip link set lo up && cat /proc/sys/net/ipv4/ip_forward && ls /sys/class/net",
                options=("--network", network, "--cap-add=NET_ADMIN", "--sysctl=net.ipv4.ip_forward=0"),
            )
            assert shown.split() == ["0", *(["eth0"] if network != "none" else []), "lo"]
        engine.docker(
            *("run", "-d", "--network", "n", "--name", "server", "busybox"),
            *("sh", "-c", "mkdir /w && echo hello >/w/index.html && httpd -f -h /w"),
        )
        asking = ("run", "--rm", "--network", "n", "busybox", "wget", "-qO-", "http://server/")
        until("an answer", lambda: engine.docker(*asking, status=None).out == "hello\n")
    finally:
        engine.remove_all()


def test_namespaces_of_another_container(engine: TempEngine) -> None:
    """Its user namespace comes with them: the owner of a namespace decides what root may do."""
    engine.docker("run", "-d", "--name", "one", "--ipc", "shareable", "busybox", "sleep", "1000")
    space = engine.docker("exec", "one", "readlink", "/proc/self/ns/user").line
    for kind in ("network", "pid", "ipc"):
        shown = said(
            engine,
            "readlink /proc/self/ns/user; ip link set lo up && ls -d /dev/mqueue",
            options=(f"--{kind}=container:one", "--cap-add=NET_ADMIN"),
        )
        assert shown.split() == [space, "/dev/mqueue"], kind
    engine.docker("run", "-d", "--name", "two", "--ipc", "shareable", "busybox", "sleep", "1000")
    for options, words in ((("--pid=container:one", "--ipc=container:two"), "it is in another user namespace"),):
        done = engine.docker("run", "--rm", *options, "busybox", "true", status=125)
        assert words in done.err
    engine.docker("run", "-d", "--name", "host", "--userns=host", "busybox", "sleep", "1000")
    done = engine.docker("run", "--rm", "--network=container:host", "busybox", "true", status=125)
    assert "it has other ids: give both the same UsernsMode" in done.err
    assert said(engine, "id -u", options=("--userns=host", "--network=container:one")) == "0\n"


def archive(*nodes: tuple[str, int, int]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as written:
        for name, uid, gid in nodes:
            entry = tarfile.TarInfo(name)
            entry.uid, entry.gid = uid, gid
            written.addfile(entry)
    return out.getvalue()


def owners_in(data: bytes) -> dict[str, tuple[int, int]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as read:
        return {entry.name: (entry.uid, entry.gid) for entry in read}


def test_archives_have_the_ids_of_the_container(engine: TempEngine) -> None:
    """In and out, of the root and of volumes, while it runs and afterwards."""
    container = engine.docker(
        "run", "-d", "-v", "/v", "busybox", "sh", "-c", "touch /v/a /tmp/a && chown 5:6 /v/a /tmp/a && sleep 1000"
    ).line
    until("its files", lambda: engine.docker("exec", container, "ls", "/tmp/a", status=None).status == 0)
    for turn, name in enumerate(("running", "stopped")):
        for place in ("tmp", "v"):
            target = f"/v1.40/containers/{container}/archive?path=/{place}"
            assert engine.request("PUT", target, archive((name, 7, 8 + turn))).status == 200
            found = owners_in(engine.request("GET", target).body)
            assert found[f"{place}/a"] == (5, 6)
            assert found[f"{place}/{name}"] == (7, 8 + turn)
            refused = engine.request("PUT", target, archive(("foreign", COUNT, 0)))
            assert refused.status == 400
            assert "its owner has no id on the host: foreign" in refused.json()["message"]
        exported = owners_in(engine.request("GET", f"/v1.40/containers/{container}/export").body)
        assert exported[f"tmp/{name}"] == (7, 8 + turn)
        assert exported["bin/"[:-1]] == (0, 0)
        engine.docker("stop", "-t", "0", container)
    engine.docker("start", container)
    shown = engine.docker("exec", container, "sh", "-c", f"{SHOW}/tmp/* /v/*").out
    assert shown.split("\n")[:-1] == [
        *("/tmp/a 5:6", "/tmp/running 7:8", "/tmp/stopped 7:9"),
        *("/v/a 5:6", "/v/running 7:8", "/v/stopped 7:9"),
    ]


def test_volumes_and_binds(engine: TempEngine) -> None:
    """Volumes have the host's ids on the disk: those of the image's files are mapped. Binds are not
    shifted, and a source that the start makes belongs to the container's root.
    """
    done = engine.docker(
        "build", "-t", "data", "-", input="FROM busybox\nRUN mkdir /v && touch /v/f && chown -R 5:6 /v\n"
    )
    assert "Successfully tagged" in done.out
    try:
        sources = engine.base / "made/by/it"
        options = ("-v", "vol:/v", "-v", "empty:/e", "-v", f"{sources}:/b", "-v", f"{engine.base}:/host:ro")
        shown = engine.docker(
            "run", "--rm", *options, "data", "sh", "-c", f"{SHOW}/v /v/f /e /b /host && touch /b/x"
        ).out
        assert shown.split("\n")[:-1] == ["/v 5:6", "/v/f 5:6", "/e 0:0", "/b 0:0", "/host 65534:65534"]
        volumes = engine.root / "volumes"
        assert owner(volumes / "vol/_data/f") == (UID + 5, GID + 6)
        assert owner(volumes / "empty/_data") == (UID, GID)
        assert owner(sources / "x") == owner(sources) == owner(engine.base / "made") == (UID, GID)
    finally:
        engine.remove_all()
        engine.docker("rmi", "data")


DOCKERFILE = f"""
FROM busybox AS base
RUN cat /proc/self/uid_map && touch /own && chown 3:4 /own && echo x >/dev/stdout
FROM base
COPY --chown=5:6 file /copied
COPY --from=base /own /from
RUN --mount=type=cache,target=/c --mount=type=bind,source=file,target=/b --mount=type=bind,from=base,target=/o \
    --mount=type=bind,rw,source=.,target=/w --mount=type=tmpfs,target=/t \
    {SHOW}/c /b /o/own /w/file /copied /from && touch /c/x /w/x /t/x
RUN --mount=type=cache,target=/c {SHOW}/c/x
RUN <<EOT
#!/bin/sh
echo a script of $(id -u)
EOT
"""


def test_builds_commits_and_images_as_mounts(engine: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    done = subprocess.run(
        ["docker", "build", "-t", "built", str(tmp_path)],
        env=engine.environment | {"DOCKER_BUILDKIT": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    lines = done.stdout.split("\n")
    shown = ["/c 0:0", "/b 0:0", "/o/own 3:4", "/w/file 0:0", "/copied 5:6", "/from 3:4", "/c/x 0:0", "a script of 0"]
    assert [line for line in lines if line in shown] == shown, done.stdout
    assert any(re.fullmatch(rf" +0 +{UID} +{COUNT}", line) for line in lines)
    try:
        for mode in ("", "host"):
            container = engine.docker(
                "run",
                "-d",
                f"--userns={mode}",
                "built",
                "sh",
                "-c",
                "touch /committed; chown 8:9 /committed; sleep 1000",
            ).line
            show = "exec", container, "sh", "-c", f"{SHOW}/committed"
            until("its file", lambda show=show: "8:9" in engine.docker(*show, status=None).out)
            assert "A /committed" in engine.docker("diff", container).out.split("\n")
            engine.docker("commit", container, "committed")
            for other in ("", "host"):
                shown_by = engine.docker(
                    "run", "--rm", f"--userns={other}", "committed", "sh", "-c", f"{SHOW}/committed /own"
                )
                assert shown_by.out == "/committed 8:9\n/own 3:4\n"
            engine.docker("rmi", "committed")
        mounted = engine.request(
            "POST",
            "/v1.48/containers/create",
            {
                "Image": "busybox",
                "Cmd": ["sh", "-c", f"{SHOW}/i/own /i/copied"],
                "HostConfig": {"Mounts": [{"Type": "image", "Source": "built", "Target": "/i"}]},
            },
        ).json()["Id"]
        engine.docker("start", "-a", mounted)
        assert engine.logs(mounted) == b"/i/own 3:4\n/i/copied 5:6\n"
    finally:
        engine.remove_all()
        engine.docker("rmi", "built")


def test_another_range_and_none_on_the_same_files(tmp_path: Path) -> None:
    """A container that runs keeps its ids, whatever the next engine has; its next start gets those
    of that engine. Layers and containers are the same files for all.
    """
    engine = remapped(tmp_path)
    with engine:
        engine.load_busybox()
        container = engine.docker(
            "run",
            "-d",
            "--name",
            "old",
            "-v",
            "vol:/v",
            "busybox",
            "sh",
            "-c",
            "touch /f /v/f && chown 5:6 /f /v/f && sleep 1000",
        ).line
        show = ("exec", container, "sh", "-c", f"cat /proc/self/uid_map; {SHOW}/f")
        until("its files", lambda: "/f 5:6" in engine.docker(*show, status=None).out)
        for uid, arguments in ((OTHER, ("--userns-remap", USER)), (0, ()), (UID, ("--userns-remap", USER))):
            engine.terminate()
            engine.arguments, engine.within = (
                arguments,
                within(tmp_path, uid, OTHER if uid == OTHER else GID) if uid else (),
            )
            engine.start()
            until("its ids", lambda: engine.docker(*show).out.split() == ["0", str(UID), str(COUNT), "/f", "5:6"])
            target = f"/v1.40/containers/{container}/archive?path=/f"
            assert owners_in(engine.request("GET", target).body) == {"f": (5, 6)}
            engine.docker("exec", "-u", "1", container, "sh", "-c", "echo o >/dev/stdout")
            shown = engine.docker(
                "run", "--rm", "--volumes-from", "old", "busybox", "sh", "-c", f"cat /proc/self/uid_map; {SHOW}/v/f"
            ).out
            # volumes keep the host's ids
            volume = {UID: "5:6", OTHER: "65534:65534", 0: f"{UID + 5}:{GID + 6}"}[uid]
            assert shown.split()[1] == str(uid) and shown.split()[-1] == volume
        engine.terminate()
        engine.arguments, engine.within = (), ()
        engine.start()
        engine.docker("restart", "-t", "0", container)
        until("the host's ids", lambda: engine.docker(*show).out.split()[1] == "0")
        assert "/f 5:6" in engine.docker(*show).out


def test_a_mount_of_another_range_is_not_used_again(tmp_path: Path) -> None:
    """A client still reads from a container whose run has ended; the next one has other ids."""
    with remapped(tmp_path) as engine:
        engine.load_busybox()
        made = "dd if=/dev/zero of=/big bs=1M count=40 2>/dev/null; touch /f && chown 5:6 /f && sleep 1000"
        container = engine.docker("run", "-d", "busybox", "sh", "-c", made).line
        show = ("exec", container, "sh", "-c", f"cat /proc/self/uid_map; {SHOW}/f")
        until("its files", lambda: "/f 5:6" in engine.docker(*show, status=None).out)
        before = engine.inspect(container)["State"]["Pid"]
        engine.terminate()
        engine.within = within(tmp_path, OTHER, OTHER)
        engine.start()
        with client.connect(engine.socket, 60) as stream:
            request = (
                f"GET /v1.40/containers/{container}/archive?path=/big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            stream.sendall(request.encode())
            assert stream.recv(12) == b"HTTP/1.1 200"
            restart = engine.popen("restart", "-t", "0", container)
            until("its end", lambda: engine.inspect(container)["State"]["Pid"] != before)
            while stream.recv(1 << 20):
                pass
        assert restart.wait(60 * PATIENCE) == 0, restart.communicate()
        until(
            "its ids",
            lambda: engine.docker(*show, status=None).out.split() == ["0", str(OTHER), str(COUNT), "/f", "5:6"],
        )


@pytest.mark.parametrize("step", ["detached_mounts.map_ids", "_mount", "os.statvfs"])
def test_a_kill_while_the_layers_are_mapped(step: str, tmp_path: Path) -> None:
    """The next engine takes over the namespace in which the trial mount is, or its place."""
    program = """
import asyncio, os, sys, threading, time
from pathlib import Path
from engine.storage import overlay
from engine.storage.records import Records
from engine.system.user_namespaces import IdMap, Range

def stop(*_, **__):
    print(threading.get_native_id(), flush=True)
    time.sleep(1000)

root, step = Path(sys.argv[1]), sys.argv[2]
ids = IdMap(uids=(Range(0, 1500000, 10),), gids=(Range(0, 1500000, 10),))
snapshots = overlay.OverlaySnapshots(root, Records(root / "state.db"), ids=ids)
if step:
    module, _, name = step.rpartition(".")
    setattr(getattr(overlay, module) if module else overlay, name, stop)
asyncio.run(snapshots.resume(int(sys.argv[3])))
os._exit(0)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen([*command, step, "-1"], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        thread = int(killed.stdout.readline())
        namespace = os.open(f"/proc/{killed.pid}/task/{thread}/ns/mnt", os.O_RDONLY)
        killed.kill()
    try:
        subprocess.run([*command, "", str(namespace)], pass_fds=[namespace], check=True)
    finally:
        os.close(namespace)
    assert os.listdir(tmp_path / "layers") == []


def test_a_kill_of_daemon_and_monitor(tmp_path: Path) -> None:
    with remapped(tmp_path) as engine:
        engine.load_busybox()
        container = engine.docker("run", "-d", "busybox", "sh", "-c", "touch /f && chown 5:6 /f && sleep 1000").line
        engine.restart()
        engine.replace_monitor()
        assert (
            until("an exec", lambda: engine.docker("exec", container, "sh", "-c", f"{SHOW}/f", status=None).out)
            == "/f 5:6\n"
        )
        engine.restart()
        engine.docker("rm", "-f", container)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--userns-remap", "nobody-has-this"), "--userns-remap nobody-has-this: the host has no user nobody-has-this"),
        (("--userns-remap", "a:b:c"), "'a:b:c': must be default, USER, USER:GROUP, UID or UID:GID"),
    ],
)
def test_refused_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(AssertionError) as caught, TempEngine(*arguments):
        pass
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("engined: ")]
    assert words in line


def test_a_file_system_without_mapped_mounts(tmp_path: Path) -> None:
    """ramfs has none. The engine says so in one line, and leaves nothing."""
    engine = remapped(tmp_path)
    (engine.base / "fs").mkdir()
    engine.root = engine.base / "fs/root"
    mount = f"mount -t ramfs ramfs {engine.base}/fs && "
    engine.within = (*engine.within[:4], mount + engine.within[4], engine.within[5])
    with pytest.raises(AssertionError) as caught, engine:
        pass
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("engined: ")]
    assert re.fullmatch(
        r"engined: --userns-remap needs overlays of ID-mapped mounts \(Linux 5\.19\) on the file system of "
        rf"{engine.root}/layers: .+",
        line,
    )


def test_a_directory_that_the_root_of_a_container_cannot_pass(tmp_path: Path) -> None:
    engine = remapped(tmp_path)
    engine.base.chmod(0o710)
    with pytest.raises(AssertionError) as caught, engine:
        pass
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("engined: ")]
    words = f"engined: --userns-remap: {engine.base}, above {engine.run}, must permit others to pass: chmod o+x"
    assert line == words


def test_a_container_that_is_older_than_the_option(tmp_path: Path) -> None:
    """Its start is refused like a create, and it is as before without the option."""
    with TempEngine(within=within(tmp_path)) as engine:
        engine.base.chmod(0o711)
        engine.load_busybox()
        plain = engine.docker("create", "busybox", "sh", "-c", f"{SHOW}/etc/hosts; echo x >>/etc/hosts").line
        privileged = engine.docker("create", "--privileged", "busybox", "true").line
        for arguments, status in ((("--userns-remap", USER), 1), ((), 0)):
            engine.docker("start", "-a", plain)
            engine.terminate()
            engine.arguments = arguments
            engine.start()
            done = engine.docker("start", "-a", privileged, status=status)
            assert ("privileged mode is incompatible with user namespaces" in done.err) == bool(arguments)
            assert engine.docker("start", "-a", plain).out == "/etc/hosts 0:0\n"
            owners = {
                owner(engine.root / f"containers/{plain}/{name}") for name in ("hosts", "hostname", "resolv.conf")
            }
            assert owners == {(UID, GID) if arguments else (0, 0)}


def test_namespaces_of_a_map() -> None:
    """The kernel has the map that was meant; a network namespace has the owner that was meant."""
    ids = IdMap(uids=(Range(0, UID, 10), Range(10, OTHER, 5)), gids=(Range(0, GID, 10),))
    with namespaces.new_network(ids) as network:
        entered = os.stat("/proc/thread-self/ns/net").st_ino
    user = user_namespaces.owner(network)
    with namespaces.new_network(None, user) as second:
        pass
    other = user_namespaces.owner(second)
    own = os.open("/proc/self/ns/user", os.O_RDONLY)
    try:
        assert os.fstat(network).st_ino == entered != os.fstat(second).st_ino
        assert os.fstat(user).st_ino == os.fstat(other).st_ino != os.fstat(own).st_ino
        shown = subprocess.run(
            [
                "nsenter",
                f"--user=/proc/{os.getpid()}/fd/{user}",
                f"--net=/proc/{os.getpid()}/fd/{second}",
                "sh",
                "-c",
                "cat /proc/self/uid_map && ip link set lo up",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout.split() == ["0", str(UID), "10", "10", str(OTHER), "5"]
    finally:
        for descriptor in (network, user, second, other, own):
            os.close(descriptor)
    with pytest.raises(OSError, match="Invalid argument"):
        IdMap(uids=(Range(0, 0, 0),), gids=(Range(0, 0, 1),)).namespace()


def test_the_limit_of_user_namespaces_is_named() -> None:
    """In a namespace whose own limit is 0: such limits are those of each namespace."""
    program = """
from engine.system.user_namespaces import IdMap, Range
for make in (IdMap.namespace, IdMap.network):
    try:
        make(IdMap(uids=(Range(0, 0, 1),), gids=(Range(0, 0, 1),)))
    except OSError as error:
        print(error.strerror)
"""
    shell = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    words = "the limit of user namespaces is reached: user.max_user_namespaces or user.max_net_namespaces"
    assert done.stdout.splitlines() == [words, words]


def test_files_of_another_user(tmp_path: Path) -> None:
    """The thread makes files with these ids, and keeps its capabilities meanwhile."""
    locked = tmp_path / "locked"
    locked.mkdir(0o700)
    os.chown(locked, 5, 5)
    with user_namespaces.files_of(UID, GID):
        (locked / "made").touch()
    (locked / "after").touch()
    assert owner(locked / "made") == (UID, GID)
    assert owner(locked / "after") == (0, 0)
