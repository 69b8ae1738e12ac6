"""Uploads as clients send them: when the answer begins, whether the connection is kept, and the
cost of aborted uploads.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, busybox_archive, until
from tests.support.forks import fork


def connect(engine: TempEngine, seconds: float = 30.0) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    connection.connect(engine.socket)
    return connection


def head(target: str, size: int, *fields: str) -> bytes:
    lines = [
        f"POST {target} HTTP/1.1",
        "Host: x",
        "Content-Type: application/x-tar",
        f"Content-Length: {size}",
        *fields,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def answered(connection: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        more = connection.recv(65536)
        assert more, found
        found += more
    return found


def a_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("file")
        member.size = 300_000
        archive.addfile(member, io.BytesIO(bytes(300_000)))
    return out.getvalue()


@pytest.mark.parametrize("query", ["", "?quiet=0", "?quiet=1"])
def test_a_load_is_answered_when_it_was_read_and_keeps_the_connection(engine: TempEngine, query: str) -> None:
    archive = busybox_archive()
    with connect(engine) as connection:
        connection.sendall(head(f"/v1.24/images/load{query}", len(archive)))
        connection.sendall(archive[:1000])
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(30 * PATIENCE)
        connection.sendall(archive[1000:])
        found = answered(connection, b"0\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 200 ") and b"Loaded image: busybox:latest" in found
        assert b"connection: close" not in found.lower()
        connection.sendall(b"GET /_ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answered(connection, b"\r\n\r\nOK").startswith(b"HTTP/1.1 200 ")


def test_an_import_is_answered_when_it_was_read(engine: TempEngine) -> None:
    archive = a_tar()
    with connect(engine) as connection:
        connection.sendall(head("/v1.24/images/create?fromSrc=-&repo=uploaded", len(archive)) + archive[:100])
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(30 * PATIENCE)
        connection.sendall(archive[100:])
        assert b'"status":"sha256:' in answered(connection, b"0\r\n\r\n")


def test_expect_is_answered_before_the_load(engine: TempEngine) -> None:
    archive = busybox_archive()
    with connect(engine) as connection:
        connection.sendall(head("/v1.24/images/load", len(archive), "Expect: 100-continue"))
        assert answered(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(archive)
        assert b"Loaded image" in answered(connection, b"0\r\n\r\n")


def test_skopeo_copies_to_the_daemon(clean: TempEngine, tmp_path: Path) -> None:
    engine = clean
    engine.load_busybox()
    host = f"unix://{engine.socket}"
    copy = ["skopeo", "--insecure-policy", "copy", "--quiet"]
    there = ["--src-daemon-host", host, "docker-daemon:busybox:latest", f"dir:{tmp_path}/image"]
    back = ["--dest-daemon-host", host, f"dir:{tmp_path}/image", "docker-daemon:skopeo:1"]
    for arguments in (there, back):
        done = subprocess.run([*copy, *arguments], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
    listed = engine.request("GET", "/v1.24/images/json").json()
    assert any("skopeo:1" in image["RepoTags"] for image in listed)


def test_curl_uploads_and_keeps_the_connection(engine: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(busybox_archive())
    arguments = ["-sS", "-H", "Content-Type: application/x-tar", "--data-binary", f"@{tmp_path}/a.tar"]
    target = "http://x/v1.24/images/load"
    done = subprocess.run(
        ["curl", "--unix-socket", engine.socket, *arguments, "-w", "%{num_connects}\n", target, target],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.count("Loaded image: busybox:latest") == 2, done.stderr
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["1", "0"], "one connection for both"


def test_a_python_client_loads(engine: TempEngine) -> None:
    (image,) = engine.client().images.load(busybox_archive())
    assert "busybox:latest" in image.tags


def resident(engine: TempEngine) -> int:
    """Bytes of the daemon's memory."""
    for line in Path(f"/proc/{engine.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


def abort_many(engine: TempEngine, count: int, size: int) -> None:
    """`count` clients send most of a large body and disconnect."""
    start = head("/v1.24/containers/create", size + 200_000).replace(b"application/x-tar", b"application/json")
    connections = [connect(engine) for _ in range(count)]
    body = memoryview(b'{"Image":"' + bytes(size).replace(b"\0", b"x"))
    left = {connection.fileno(): (connection, memoryview(start + body)) for connection in connections}
    deadline = time.monotonic() + 20 * PATIENCE
    while left and time.monotonic() < deadline:  # as much as the engine accepts
        progress = False
        for number, (connection, data) in list(left.items()):
            connection.setblocking(False)
            try:
                sent = connection.send(data[: 1 << 18])
            except BlockingIOError:
                continue
            progress = True
            if sent == len(data):
                del left[number]
            else:
                left[number] = (connection, data[sent:])
        if not progress:
            time.sleep(0.05)
            if time.monotonic() > deadline - 17:
                break
    for connection in connections:
        connection.close()


def test_aborted_bodies_leave_no_memory_behind(engine: TempEngine) -> None:
    """60 clients disconnect in the middle of 4 MB, three times.

    Reference cycles once kept 200 MB.
    """
    for _ in range(3):
        assert engine.request("GET", "/v1.24/info").status == 200
    before = resident(engine)
    for _ in range(3):
        abort_many(engine, 60, 4_000_000)
    until("the daemon gives the memory back", lambda: resident(engine) - before < 30 << 20, 20)
    assert engine.request("GET", "/_ping").status == 200


def test_large_bodies_at_once_are_all_read(engine: TempEngine) -> None:
    """60 uploads of 3.5 MB, which are more than the engine reads at once.

    Each gets its response.
    """
    body = b'{"Image":"' + b"x" * 3_500_000 + b'"}'
    start = head("/v1.24/containers/create", len(body)).replace(b"application/x-tar", b"application/json")
    children = []
    for _ in range(6):
        child = fork()
        if not child:
            status = 1
            try:
                for _ in range(10):
                    with connect(engine, 60) as connection:
                        connection.sendall(start + body)
                        assert answered(connection, b"\r\n\r\n").startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
