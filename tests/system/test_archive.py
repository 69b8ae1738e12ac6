"""Archive calls against hostile containers: paths swapped in a tight loop, malicious names and
files, archive bombs; crashes during a call; leaks."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node, directory, symlink, tar
from tests.support.images.trees import snapshot
from tests.support.nightly import nightly

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

CALLS = 1_000
"""GET and PUT calls together while paths are swapped."""


@pytest.fixture
def own(file_engine: TempEngine) -> Iterator[TempEngine]:
    yield file_engine
    file_engine.remove_all()
    file_engine.remove_volumes()


def archive(engine: TempEngine, method: str, container: str, path: str, body: Any = None) -> client.Answer:
    return engine.request(method, f"/v1.24/containers/{container}/archive?path={quote(path, safe='')}", body)


class Keeper:
    """Many requests on one connection; a broken one is replaced."""

    def __init__(self, engine: TempEngine) -> None:
        self._engine = engine
        self._connection: client._UnixConnection | None = None

    def ask(self, method: str, target: str, body: bytes | None = None) -> tuple[int, bytes]:
        for _ in range(2):
            connection = self._connection
            if connection is None:
                connection = self._connection = client._UnixConnection(self._engine.socket, 60)
            try:
                connection.request(method, target, body)
                response = connection.getresponse()
                return response.status, response.read()
            except OSError:
                connection.close()
                self._connection = None
        raise AssertionError("the engine does not answer")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@pytest.mark.parametrize("calls", [CALLS, *nightly(10 * CALLS)])
def test_paths_swapped_in_a_tight_loop(own: TempEngine, tmp_path: Path, calls: int) -> None:
    """`/t/p` alternates between a directory, a link to a host directory, and a link that leaves by
    `..`; the same in a volume."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("host's secret")
    before = snapshot(outside)
    volume = tmp_path / "volume"
    volume.mkdir()
    swap = f"""
    mkdir -p /t /vol; ln -s /proc/1/root{outside} /t/magic
    while :; do
      for d in /t /vol; do
        mkdir $d/p; echo -n mine > $d/p/secret; rm -rf $d/p; ln -s {outside} $d/p
        rm -rf $d/p; ln -s ../../../../../../../../..{outside} $d/p
        rm -rf $d/p; ln -s /proc/1/root{outside} $d/p; rm -rf $d/p
      done
    done
    """
    binds = [f"{volume}:/vol"]
    container = own.started("sh", "-c", swap, host={"Binds": binds})
    until("it swaps", lambda: archive(own, "HEAD", container, "/t/magic").status == 200)
    evil = tar([Node("secret", b"written"), Node("p/secret", b"written"), directory("p"), symlink("p2", "p")])
    base = f"/v1.24/containers/{container}/archive?path="
    answered: list[int] = []
    bodies: set[bytes] = set()
    said: set[bytes] = set()

    def work(at: int) -> None:
        keeper = Keeper(own)
        for turn in range(calls // 8):
            path = ("/t/p", "/t/p/", "/t/p/secret", "/vol/p/secret", "/vol/p/.", "/t/magic/secret")[(turn + at) % 6]
            status, body = keeper.ask("GET", base + quote(path, safe=""))
            answered.append(status)
            if status >= 500:
                said.add(body)
            if b"host's secret" in body:
                bodies.add(body)
            path = ("/t/p", "/t", "/vol/p", "/vol", "/t/p/.")[(turn + at) % 5]
            status, body = keeper.ask("PUT", base + quote(path, safe=""), evil)
            answered.append(status)
            if status >= 500:
                said.add(body)
        keeper.close()

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bodies, "a file of the host was read"
    assert snapshot(outside) == before, "a file of the host was written"
    assert len(answered) == calls
    assert answered.count(200) > calls // 10  # the engine does not refuse everything
    assert set(answered) <= {200, 400, 404}, said
    assert own.inspect(container)["State"]["Running"]


EXCHANGE = """
import ctypes, sys
syscall, names = ctypes.CDLL(None).syscall, [name.encode() for name in sys.argv[1:]]
while True:
    for name in names:
        # renameat2(2), RENAME_EXCHANGE: at no time is there neither of the two
        syscall(316, -100, b"mine", -100, name, 2)
"""


@pytest.mark.parametrize("kind", ["directory", "fifo", "parent"])
def test_owners_and_modes_reach_no_link_that_takes_the_place(own: TempEngine, tmp_path: Path, kind: str) -> None:
    """Between its creation and its chmod, an entry is replaced by a link to the host's root,
    through /proc."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    before = outside.stat()
    volume = tmp_path / "volume"
    volume.mkdir()
    for name in ("magic", "plain"):
        (volume / name).symlink_to(f"/proc/{own.pid}/root{outside}" if name == "magic" else outside)
    container = own.create("true", host={"Binds": [f"{volume}:/vol"]})
    made = {
        "directory": [directory("mine", mode=0o777, uid=7, gid=7)],
        "fifo": [Node("mine", type=tarfile.FIFOTYPE, mode=0o777, uid=7, gid=7)],
        "parent": [Node("mine/below", b"x", mode=0o777, uid=7, gid=7)],
    }[kind]
    evil = tar(made * 500)
    swapper = subprocess.Popen([sys.executable, "-c", EXCHANGE, "magic", "plain"], cwd=volume)
    try:
        statuses = {archive(own, "PUT", container, "/vol", evil).status for _ in range(30)}
    finally:
        swapper.kill()
        swapper.wait()
    after = outside.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid), statuses
    assert not os.listdir(outside) and own.request("GET", "/_ping").status == 200


def test_names_and_files_made_to_harm(own: TempEngine) -> None:
    script = r"""
    mkdir /h; cd /h; mkfifo fifo; mknod null c 1 3; mknod zero c 1 5; mknod disk b 8 0
    ln -s /proc/self/root/etc magic; ln -s loop loop
    dd if=/dev/zero of=hole bs=1 count=1 seek=10G 2>/dev/null; printf x > "$(printf 'not\377utf8')"
    n=12345678901234567890123456789012345678901234567890; i=0
    while [ $i -lt 100 ]; do mkdir $n; cd $n; i=$((i+1)); done
    cd /h; mkdir flat; cd flat; i=0; while [ $i -lt 300 ]; do mkdir d; cd d; i=$((i+1)); done; touch /ready; sleep 1000
    """
    container = own.started("sh", "-c", script)
    until("it is done", lambda: archive(own, "HEAD", container, "/ready").status == 200)
    before = own.open_files()
    for path in ("/h/fifo", "/h/null", "/h/zero", "/h/disk"):
        answer = archive(own, "GET", container, path)
        # a header was sent, and no content was read
        assert answer.status == 200 and len(answer.body) == 1536
    assert len(archive(own, "GET", container, "/h/hole").body) < 20_000
    assert archive(own, "GET", container, "/h/magic/passwd").status in (400, 404)
    assert archive(own, "GET", container, "/h/loop/x").status == 400
    assert archive(own, "HEAD", container, "/h/loop").status == 400
    assert archive(own, "GET", container, "/" + "x" * 300).status == 400
    assert archive(own, "GET", container, "/h" * 2100).status == 400
    assert archive(own, "GET", container, "/h/not%FFutf8").status == 404
    assert own.request("GET", f"/v1.24/containers/{container}/archive?path=/h/not%FFutf8").status == 400
    answer = archive(own, "GET", container, "/h/flat")
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as opened:
        assert len(opened.getnames()) == 301
    # paths that no tar reader accepts: the response is cut off
    with contextlib.suppress(Exception):
        archive(own, "GET", container, "/h")
    for entry in own.request("GET", f"/v1.24/containers/{container}/changes").json() or []:
        assert entry["Kind"] in (0, 1, 2)
    until("every descriptor is given back", lambda: own.open_files() <= before)
    assert own.docker("exec", container, "echo", "alive").out == "alive\n"


def test_sockets_are_left_out(own: TempEngine, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        container = own.create("true", host={"Binds": [f"{tmp_path}:/vol"]})
        with tarfile.open(fileobj=io.BytesIO(archive(own, "GET", container, "/vol").body)) as opened:
            assert opened.getnames() == ["vol"]
        assert archive(own, "GET", container, "/vol/s").status == 400
        assert archive(own, "HEAD", container, "/vol/s").status == 200


def test_a_bomb_ends_before_the_disk_is_full(own: TempEngine, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=8192", "tmpfs", small], check=True)
    try:
        container = own.create("true", host={"Binds": [f"{small}:/vol"]})
        bomb = gzip.compress(tar([Node(f"f{at}", bytes(8 << 20)) for at in range(40)]))
        assert len(bomb) < 1 << 20
        answer = archive(own, "PUT", container, "/vol", bomb)
        assert answer.status == 500 and "no space left on device" in answer.message
        free = os.statvfs(small)
        assert free.f_bavail >= free.f_blocks // 20
        many = gzip.compress(tar([Node(f"e{at}") for at in range(30_000)]))
        answer = archive(own, "PUT", container, "/vol", many)
        assert answer.status == 500 and os.statvfs(small).f_favail >= 8192 // 20 - 1
    finally:
        until(
            "it is let go", lambda: not subprocess.run(["umount", small], check=False, capture_output=True).returncode
        )


def test_memory_stays_flat_for_a_slow_client(own: TempEngine) -> None:
    container = own.create("true")
    assert archive(own, "PUT", container, "/", tar([Node("big", os.urandom(1 << 20) * 64)])).status == 200

    def resident() -> int:
        return int(Path(f"/proc/{own.pid}/statm").read_text().split()[1]) * 4096

    before = resident()
    connections = []
    for _ in range(8):
        connection = client.connect(own.socket)
        connection.sendall(f"GET /v1.24/containers/{container}/archive?path=/big HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        connections.append(connection)
    for _ in range(8):
        connection = client.connect(own.socket, 1)
        head = (
            f"PUT /v1.24/containers/{container}/archive?path=/tmp HTTP/1.1\r\n"
            "Host: x\r\nContent-Length: 67108864\r\n\r\n"
        )
        connection.sendall(head.encode())
        # an incomplete file
        with contextlib.suppress(TimeoutError):
            connection.sendall(tar([Node("x", bytes(1 << 20))])[:1000])
        connections.append(connection)
    time.sleep(0.5)
    assert resident() - before < 64 << 20
    assert own.request("GET", "/v1.24/containers/json").status == 200
    for connection in connections:
        connection.close()
    until("the work has stopped", lambda: archive_threads_idle(own))


def test_clients_that_stall_hold_nobody_up(own: TempEngine) -> None:
    """More clients stall than there are threads for archives, after the header and in the middle of
    a file.
    """
    container = own.create("true")
    body = tar([Node("x", bytes(1 << 20))])
    stalled = []
    for at in range(100):
        connection = client.connect(own.socket)
        target = f"/v1.24/containers/{container}/archive?path=/tmp"
        connection.sendall(f"PUT {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body[: 1000 if at % 2 else 800_000])
        stalled.append(connection)
    assert archive(own, "PUT", container, "/", body).status == 200
    assert archive(own, "GET", container, "/x").status == 200
    assert own.request("GET", "/v1.24/containers/json").status == 200
    for connection in stalled[:10]:  # a stalled client may also continue
        connection.sendall(body[1000 if stalled.index(connection) % 2 else 800_000 :])
        assert connection.recv(12) == b"HTTP/1.1 200"
    for connection in stalled:
        connection.close()
    until("the work has stopped", lambda: archive_threads_idle(own))
    until("their threads are gone", lambda: len(os.listdir(f"/proc/{own.pid}/task")) < 60)


def mounted_on_host(engine: TempEngine) -> list[str]:
    """All mounts except the directory where runtimes find a root."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(engine.base) in line and line.split()[4] != str(engine.run / "root")]


def archive_threads_idle(engine: TempEngine, running: int = 0) -> bool:
    """True if no call holds a container's root: the mount namespace has only the roots of running
    containers."""
    found = set()
    for task in os.listdir(f"/proc/{engine.pid}/task"):
        with contextlib.suppress(OSError):
            found.add(Path(f"/proc/{engine.pid}/task/{task}/mountinfo").read_text())
    return all(text.count(" /roots/") == running and " /calls/" not in text for text in found if " /layers " in text)


def test_a_client_that_goes_away_stops_the_work(own: TempEngine) -> None:
    container = own.create("true")
    assert archive(own, "PUT", container, "/", tar([Node("big", os.urandom(1 << 20) * 64)])).status == 200
    before = own.open_files()
    for target in ("archive?path=/", "export"):
        with client.connect(own.socket) as connection:
            connection.sendall(f"GET /v1.24/containers/{container}/{target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            connection.recv(100)
    with client.connect(own.socket) as connection:
        connection.sendall(
            f"PUT /v1.24/containers/{container}/archive?path=/tmp HTTP/1.1\r\n".encode()
            + b"Host: x\r\nContent-Length: 99999999\r\n\r\n"
        )
        connection.sendall(tar([Node("part", b"x" * 100_000)])[:50_000])
    until("nothing is held", lambda: own.open_files() <= before and archive_threads_idle(own))


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
@pytest.mark.parametrize("call", ["GET", "PUT", "export"])
def test_killed_in_mid_call(own: TempEngine, running: bool, call: str) -> None:
    container = own.create("sleep", "1000")
    assert archive(own, "PUT", container, "/", tar([Node("big", os.urandom(1 << 20) * 32)])).status == 200
    if running:
        own.post(f"/containers/{container}/start")
    own.restart()
    before = own.footprint()
    with client.connect(own.socket) as connection:
        if call == "PUT":
            head = (
                f"PUT /v1.24/containers/{container}/archive?path=/tmp HTTP/1.1\r\n"
                "Host: x\r\nContent-Length: 99999999\r\n\r\n"
            )
            connection.sendall(head.encode() + tar([Node("part", b"x" * 2_000_000)])[:1_500_000])
            until("it is extracted", lambda: archive(own, "HEAD", container, "/tmp/part").status == 200)
        else:
            target = "export" if call == "export" else "archive?path=/"
            connection.sendall(f"GET /v1.24/containers/{container}/{target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            connection.recv(100)
        own.kill9()
    assert mounted_on_host(own) == []
    own.start()
    own.assert_settles(before)
    assert archive(own, "PUT", container, "/tmp", tar([Node("part", b"whole")])).status == 200
    if not running:
        own.post(f"/containers/{container}/start")
    assert own.docker("exec", container, "cat", "/tmp/part").out == "whole"


def test_start_stop_and_remove_while_files_are_read(own: TempEngine) -> None:
    """A container's overlay is mounted only once at a time, so calls that began before a start see
    the container's changes, and the reverse.
    """
    container = own.create("sh", "-c", "while :; do date > /ticks; sleep 0.02; done")
    assert archive(own, "PUT", container, "/", tar([Node("big", os.urandom(1 << 20) * 32)])).status == 200
    with client.connect(own.socket) as slow:
        slow.sendall(f"GET /v1.24/containers/{container}/archive?path=/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        slow.recv(100)
        for _ in range(3):
            own.post(f"/containers/{container}/start")
            until("it ticks", lambda: archive(own, "HEAD", container, "/ticks").status == 200)
            assert archive(own, "PUT", container, "/tmp", tar([Node("x", b"put")])).status == 200
            assert own.docker("exec", container, "cat", "/tmp/x").out == "put"
            own.post(f"/containers/{container}/stop?t=0")
            assert archive(own, "GET", container, "/tmp/x").body.count(b"put") == 1
        assert own.request("DELETE", f"/v1.24/containers/{container}?force=1").status == 204
    until("nothing is held", lambda: archive_threads_idle(own))
    assert archive(own, "GET", container, "/").status == 404


def test_the_same_files_put_by_many_at_once(own: TempEngine) -> None:
    """Each call finds names that another call has just created or will replace. All succeed, as in
    Docker, which serializes the calls."""
    container = own.started("sleep", "1000", host={"Binds": ["shared:/vol"]})
    kinds = [
        Node("t/file", b"x"),
        symlink("t/link", "file"),
        Node("t/pipe", type=tarfile.FIFOTYPE),
        Node("t/a/file", b"y"),
    ]
    data = tar([directory("t"), *(kinds * 50)])
    answers: list[tuple[int, bytes]] = []

    def work(path: str) -> None:
        for _ in range(5):
            answer = archive(own, "PUT", container, path, data)
            answers.append((answer.status, answer.body))

    threads = [threading.Thread(target=work, args=(path,)) for path in ("/", "/", "/vol", "/vol")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 20 and {status for status, _ in answers} == {200}, answers
    for path in ("/t/file", "/vol/t/file"):
        assert archive(own, "GET", container, path).status == 200


def test_volumes_that_go_with_their_container_while_it_is_read(own: TempEngine) -> None:
    """A call that comes too late answers that there is no such container, whichever part was
    removed first.
    """
    odd: list[client.Answer] = []
    for _ in range(15):
        container = own.create("true", Volumes={"/a": {}, "/b": {}, "/c": {}})
        stop = threading.Event()

        def read(container: str, stop: threading.Event) -> None:
            while not stop.is_set():
                answer = archive(own, "GET", container, "/a")
                if answer.status not in (200, 404):
                    odd.append(answer)

        readers = [threading.Thread(target=read, args=(container, stop)) for _ in range(3)]
        for reader in readers:
            reader.start()
        assert own.request("DELETE", f"/v1.24/containers/{container}?v=1").status == 204
        stop.set()
        for reader in readers:
            reader.join()
    assert not odd
    assert own.request("GET", "/v1.24/volumes").json()["Volumes"] == []


def test_calls_leave_no_mount_and_no_descriptor(own: TempEngine, tmp_path: Path) -> None:
    container = own.started("sleep", "1000", host={"Binds": [f"{tmp_path}:/vol", "named:/named"]})
    for _ in range(2):
        archive(own, "GET", container, "/vol")
    before = own.open_files()
    for _ in range(30):
        assert archive(own, "GET", container, "/vol").status == 200
        assert archive(own, "PUT", container, "/named", tar([Node("x", b"x")])).status == 200
        assert archive(own, "GET", container, "/nope").status == 404
        assert archive(own, "PUT", container, "/vol", b"garbage" * 100).status == 400
        assert own.request("GET", f"/v1.24/containers/{container}/changes").status == 200
        assert own.request("GET", f"/v1.24/containers/{container}/export").status == 200
    until("descriptors are given back", lambda: own.open_files() <= before)
    until("mounts are given back", lambda: archive_threads_idle(own, running=1))
    assert mounted_on_host(own) == []


def test_a_bind_whose_host_path_the_container_swaps(own: TempEngine, tmp_path: Path) -> None:
    """`-v /a:/a -v /a/b:/b`: reads and writes at /b reach the container's mount, whatever the
    container does with /a/b.
    """
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("mine")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("host's secret")
    command = f"mv /a/b /a/c; ln -s {tmp_path}/outside /a/b; touch /ready; sleep 1000"
    container = own.started("sh", "-c", command, host={"Binds": [f"{tmp_path}/a:/a", f"{tmp_path}/a/b:/b"]})
    until("it has swapped", lambda: archive(own, "HEAD", container, "/ready").status == 200)
    answer = archive(own, "GET", container, "/b/file")
    assert answer.status == 200 and b"mine" in answer.body and b"host's secret" not in answer.body
    assert archive(own, "PUT", container, "/b", tar([Node("file", b"written")])).status == 200
    assert (tmp_path / "outside" / "file").read_text() == "host's secret"
    assert (tmp_path / "a" / "c" / "file").read_text() == "written"
    assert b"host's secret" not in archive(own, "GET", container, "/").body


def test_a_bound_file_that_was_replaced_on_the_host(own: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("host's secret")
    (tmp_path / "a").mkdir()
    for name in ("conf", "a/f"):
        (tmp_path / name).write_text("old")
    binds = [f"{tmp_path}/conf:/conf", f"{tmp_path}/a:/a", f"{tmp_path}/a/f:/f"]
    container = own.started("sleep", "1000", host={"Binds": binds})
    (tmp_path / "new").write_text("new")
    os.rename(tmp_path / "new", tmp_path / "conf")
    assert (
        b"new" in archive(own, "GET", container, "/conf").body
    )  # as in Docker, though the container still has the old one
    own.docker("exec", container, "sh", "-c", f"rm /a/f; ln -s {tmp_path}/outside /a/f")
    answer = archive(own, "GET", container, "/f")
    assert answer.status == 200 and b"host's secret" not in answer.body
    assert archive(own, "PUT", container, "/", tar([Node("f", b"x")])).status in (200, 500)
    assert (tmp_path / "outside").read_text() == "host's secret"
