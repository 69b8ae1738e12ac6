"""Files into and out of containers, running and stopped: archive, copy, export, changes, and
`docker cp`, `export` and `diff` on top of them."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import random
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import zstandard

from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Node, directory, hard_link, symlink, tar
from tests.support.images.trees import snapshot

FILES = """
mkdir -p /d/sub; echo -n one > /d/one; echo -n two > /d/sub/two
ln -s /d /link; ln -s one /d/soft; ln /d/one /d/hard; ln -s nowhere /broken; ln -s ../../../../etc/passwd /up
mkfifo /d/pipe; chmod 6750 /d/one; chown 12:34 /d/sub/two; echo -n v > /vol/file; ready=1
"""


@pytest.fixture(params=["running", "stopped"])
def filled(request: pytest.FixtureRequest, engine: TempEngine, tmp_path: Path) -> Iterator[str]:
    """A container with FILES, a bind at /vol and a read-only one at /ro."""
    (tmp_path / "vol").mkdir()
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro" / "kept").write_text("kept")
    binds = [f"{tmp_path}/vol:/vol", f"{tmp_path}/ro:/ro:ro"]
    container = engine.started(
        "sh", "-c", f"{FILES}touch /done; sleep 1000", host={"Binds": binds, "Tmpfs": {"/tmpfs": ""}}, name="filled"
    )
    until("it has its files", lambda: stat_of(engine, container, "/done")[0] == 200)
    if request.param == "stopped":
        engine.post(f"/containers/{container}/stop?t=0")
    yield container


def archive(
    engine: TempEngine, method: str, container: str, path: str, body: Any = None, more: str = ""
) -> client.Answer:
    return engine.request(method, f"/v1.24/containers/{container}/archive?path={quote(path, safe='')}{more}", body)


def stat_of(engine: TempEngine, container: str, path: str, method: str = "HEAD") -> tuple[int, Any]:
    answer = archive(engine, method, container, path)
    header = answer.headers.get("x-docker-container-path-stat")
    assert header == answer.headers.get("x-engine-container-path-stat") or header is not None
    return answer.status, json.loads(base64.b64decode(header)) if header else None


def get(engine: TempEngine, container: str, path: str) -> dict[str, tarfile.TarInfo]:
    answer = archive(engine, "GET", container, path)
    assert answer.status == 200, answer
    assert answer.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as opened:
        return {member.name + "/" * member.isdir(): member for member in opened.getmembers()}


def names(body: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(body)) as opened:
        return opened.getnames()


def put(engine: TempEngine, container: str, path: str, nodes: list[Node] | bytes, more: str = "") -> client.Answer:
    return archive(engine, "PUT", container, path, nodes if isinstance(nodes, bytes) else tar(nodes), more)


def content(engine: TempEngine, container: str, path: str) -> bytes:
    answer = archive(engine, "GET", container, path)
    assert answer.status == 200, answer
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as opened:
        file = opened.extractfile(opened.getmembers()[0])
        assert file is not None
        return file.read()


# --- out: rules 1 to 4 ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name", "mode", "target", "first"),
    [
        ("/d", "d", 1 << 31 | 0o755, "", "d/"),
        ("/d/", "d", 1 << 31 | 0o755, "", "d/"),
        ("/d/.", ".", 1 << 31 | 0o755, "", "./"),
        ("d/one", "one", 1 << 23 | 1 << 22 | 0o750, "", "one"),
        ("//d/../d//one", "one", 1 << 23 | 1 << 22 | 0o750, "", "one"),
        ("/link", "link", 1 << 27 | 0o777, "/d", "link"),
        ("/link/", "link", 1 << 31 | 0o755, "", "link/"),
        ("/link/.", ".", 1 << 31 | 0o755, "", "./"),
        ("/link/one", "one", 1 << 23 | 1 << 22 | 0o750, "", "one"),
        ("/link/soft", "soft", 1 << 27 | 0o777, "/d/one", "soft"),
        ("/broken", "broken", 1 << 27 | 0o777, "/nowhere", "broken"),
        ("/up", "up", 1 << 27 | 0o777, "/etc/passwd", "up"),
        ("/d/pipe", "pipe", 1 << 25 | 0o644, "", "pipe"),
        ("/vol/file", "file", 0o644, "", "file"),
        ("/", "/", 1 << 31 | 0o755, "", "/"),
        (".", ".", 1 << 31 | 0o755, "", "./"),
    ],
)
def test_stat_and_names(
    engine: TempEngine, filled: str, path: str, name: str, mode: int, target: str, first: str
) -> None:
    status, found = stat_of(engine, filled, path)
    assert status == 200
    assert list(found) == ["name", "size", "mode", "mtime", "linkTarget"]
    assert (found["name"], oct(found["mode"]), found["linkTarget"]) == (name, oct(mode), target)
    assert abs(time.mktime(time.strptime(found["mtime"][:19], "%Y-%m-%dT%H:%M:%S")) - time.time()) < 366 * 86400
    if path == "d/one":
        assert found["size"] == 3
    assert stat_of(engine, filled, path, "GET") == (200, found)
    body = archive(engine, "GET", filled, path).body
    assert body[:100].rstrip(b"\0").decode() == first


def test_a_directory_with_all_there_is(engine: TempEngine, filled: str) -> None:
    found = get(engine, filled, "/d")
    assert sorted(found) == ["d/", "d/hard", "d/one", "d/pipe", "d/soft", "d/sub/", "d/sub/two"]
    assert found["d/soft"].issym() and found["d/soft"].linkname == "one"
    assert found["d/one"].islnk() and found["d/one"].linkname == "d/hard"
    assert found["d/pipe"].isfifo()
    assert (found["d/sub/two"].uid, found["d/sub/two"].gid) == (12, 34)
    assert found["d/hard"].mode == 0o6750
    assert "vol/file" in get(engine, filled, "/vol") and "/vol/file" in get(engine, filled, "/")


@pytest.mark.parametrize("path", ["/nope", "/nope/x", "/d/one/x", "/broken/", "/proc/version", "/dev/null", "/tmpfs/x"])
def test_what_is_not_there(engine: TempEngine, filled: str, path: str) -> None:
    for method in ("HEAD", "GET"):
        assert archive(engine, method, filled, path).status == 404
    assert archive(engine, "GET", filled, path).message == f"Could not find the file {path} in container {filled}"


@pytest.mark.parametrize("path", ["/d/one/", "/d/one/.", "/link/soft/", ""])
def test_what_is_no_directory(engine: TempEngine, filled: str, path: str) -> None:
    for method in ("HEAD", "GET"):
        assert archive(engine, method, filled, path).status == 400


@pytest.mark.parametrize("mounts", [(), ("/a/vol",), ("/a/vol", "/a/vol/out"), ("/link/v",), ("/a",)])
def test_a_stat_is_that_of_the_archive(engine: TempEngine, mounts: tuple[str, ...]) -> None:
    """Whatever links and mounts are on the way. HEAD looks beside the mounts where it may; GET
    never does.
    """
    script = (
        "mkdir -p /a/vol/d /a/vol/out /a/v/d /a/d; "
        "ln -s /a /link; ln -s vol/d /a/in; ln -s ../.. /a/d/up; ln -s /etc /a/vol/d/etc; "
        "echo x >/a/vol/d/file; echo xx >/a/d/file; touch /done; sleep 1000"
    )
    below = engine.started("sh", "-c", script)
    until("it has its files", lambda: stat_of(engine, below, "/done")[0] == 200)
    engine.post(f"/containers/{below}/kill")
    image = engine.request("POST", f"/v1.24/commit?container={below}").json()["Id"]
    volume = f"of-{'-'.join(mounts).replace('/', '.')}"
    host = {"Binds": [f"{volume}:{destination}" for destination in mounts]}
    container = engine.started(
        "sh", "-c", "for at in /a/*/d; do echo xxx >$at/new; done; sleep 1000", Image=image, host=host
    )
    until("it wrote", lambda: stat_of(engine, container, "/a/vol/d/new")[0] == 200)
    if "/a/vol/out" in mounts:  # only the outer volume shows that the inner mount would be at /a/d
        engine.post(f"/containers/{container}/kill")
        [place] = (each["Source"] for each in engine.inspect(container)["Mounts"] if each["Destination"] == "/a/vol")
        Path(place, "out").rmdir()
        Path(place, "out").symlink_to("../d")
    parts = ("a", "vol", "v", "d", "in", "up", "link", "etc", "hosts", "file", "new", "..")
    paths = ["/".join(("", *each)) for count in range(4) for each in itertools.product(parts, repeat=count)]
    paths = random.Random(7).sample(paths, 500)
    kinds = set()
    for path in (
        *paths,
        "/",
        "/a/",
        "/a/vol/",
        "/a/in/",
        "/link/.",
        "/etc/hosts",
        "/etc/",
        "/a/d/file/",
        "/a/v/d/new",
        "/a/d/d/new",
    ):
        head, got = stat_of(engine, container, path or "/"), stat_of(engine, container, path or "/", "GET")
        assert head == got, path
        kinds.add(head[0])
    assert kinds >= {200, 404}
    engine.remove_all()
    engine.remove_volumes()
    assert engine.request("DELETE", f"/v1.24/images/{image}").status == 200


def test_unknown_containers_and_versions(engine: TempEngine) -> None:
    for method, rest in (
        ("HEAD", "archive?path=/"),
        ("GET", "archive?path=/"),
        ("PUT", "archive?path=/"),
        ("GET", "export"),
        ("GET", "changes"),
    ):
        assert engine.request(method, f"/v1.24/containers/nothing/{rest}").status == 404
    container = engine.create("true")
    for version, copy, there in (
        ("1.18", 200, 404),
        ("1.19", 200, 404),
        ("1.20", 200, 200),
        ("1.23", 200, 200),
        ("1.24", 404, 200),
    ):
        base = f"/v{version}/containers/{container}"
        assert engine.request("POST", f"{base}/copy", {"Resource": "/etc/passwd"}).status == copy
        assert engine.request("GET", f"{base}/archive?path=/etc/passwd").status == there


def test_copy(engine: TempEngine, filled: str) -> None:
    def copied(resource: str) -> list[str]:
        answer = engine.request("POST", f"/v1.19/containers/{filled}/copy", {"Resource": resource})
        assert answer.status == 200 and answer.headers["content-type"] == "application/x-tar"
        return names(answer.body)

    assert copied("/d/one") == copied("/d/soft") == copied("d/one") == ["one"]
    assert copied("/link") == copied("/d/.") == ["d", "d/hard", "d/one", "d/pipe", "d/soft", "d/sub", "d/sub/two"]
    for resource, status in (("/nope", 404), ("/broken", 404), ("", 400)):
        assert engine.request("POST", f"/v1.19/containers/{filled}/copy", {"Resource": resource}).status == status


# --- in: rules 5 and 6 ----------------------------------------------------------------------------


def packed_zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, packed_zstd])
@pytest.mark.parametrize("path", ["/d", "/link", "/d/", "/vol"])
def test_an_archive_goes_in(engine: TempEngine, filled: str, pack: Callable[[bytes], bytes], path: str) -> None:
    nodes = [
        Node("new", b"new", mode=0o4711, uid=5, gid=6, pax=(("SCHILY.xattr.user.a", "value"),)),
        hard_link("same", "new"),
        symlink("soft", "../out"),
        directory("sub", mode=0o700),
        Node("made/for/it", b"x"),
        Node("one", b"other"),
        Node(".wh.name", b"no whiteout here"),
    ]
    assert put(engine, filled, path, pack(tar(nodes))).status == 200
    found = get(engine, filled, path.rstrip("/") + "/.")
    assert content(engine, filled, f"{path}/new") == b"new" and content(engine, filled, f"{path}/one") == b"other"
    new = found["./new"]
    assert (oct(new.mode), new.uid, new.gid, new.mtime) == ("0o4711", 5, 6, nodes[0].mtime)
    assert new.pax_headers["SCHILY.xattr.user.a"] == "value"
    assert found["./same"].linkname == "./new" and found["./soft"].linkname == "../out"
    assert found["./sub/"].mode == 0o700 and found["./made/for/"].mode == 0o755
    assert "./.wh.name" in found
    if path != "/vol":
        assert "./sub/two" in found  # merged


def chunked(data: bytes) -> bytes:
    """The data in chunks of 32 KiB, as Go clients send a body of unknown length."""
    pieces = [data[at : at + 32768] for at in range(0, len(data), 32768)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("coding", ["length", "chunked", "expect", "gzip"])
def test_large_archives_and_what_comes_after_them(engine: TempEngine, coding: str) -> None:
    """The body is so large that a worker thread reads the client's socket itself. No byte before,
    in or after it may be lost.
    """
    container = engine.create("true")
    files = {f"in/{at}": os.urandom(size) for at, size in enumerate((10, 700_000, 0, 3_000_000, 512, 33_000))}
    body = tar([Node(name, data) for name, data in files.items()])
    sent = gzip.compress(body, 1) if coding == "gzip" else chunked(body) if coding == "chunked" else body
    framing = "Transfer-Encoding: chunked" if coding == "chunked" else f"Content-Length: {len(sent)}"
    with client.connect(engine.socket) as connection, connection.makefile("rb") as answers:
        for path in ("/tmp", "/etc"):
            target = f"/v1.24/containers/{container}/archive?path={path}"
            expects = "Expect: 100-continue\r\n" if coding == "expect" else ""
            connection.sendall(f"PUT {target} HTTP/1.1\r\nHost: x\r\n{framing}\r\n{expects}\r\n".encode())
            if expects:
                assert answers.readline().startswith(b"HTTP/1.1 100") and answers.readline() == b"\r\n"
            connection.sendall(sent + b"GET /_ping HTTP/1.1\r\nHost: x\r\n\r\n")
            for _ in range(2):
                assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
                fields = dict(line.lower().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
                answers.read(int(fields[b"content-length"]))
    for path in ("/tmp", "/etc"):
        found = archive(engine, "GET", container, f"{path}/in").body
        with tarfile.open(fileobj=io.BytesIO(found)) as opened:
            for name, data in files.items():
                file = opened.extractfile(name)
                assert file is not None and file.read() == data


@pytest.mark.parametrize("left", [100_000, 5_000_000])
@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_a_large_archive_that_is_refused_in_its_middle(engine: TempEngine, coding: str, left: int) -> None:
    """The response arrives, whatever the client still sends. Afterwards the connection is kept if
    little of the body was left, otherwise closed.
    """
    container = engine.create("true")
    nodes = [Node("before", bytes(1_000_000)), Node("../out", b"x"), Node("after", bytes(left))]
    body = tar(nodes)
    sent = chunked(body) if coding == "chunked" else body
    framing = "Transfer-Encoding: chunked" if coding == "chunked" else f"Content-Length: {len(sent)}"
    with client.connect(engine.socket) as connection, connection.makefile("rb") as answers:
        target = f"/v1.24/containers/{container}/archive?path=/tmp"
        connection.sendall(f"PUT {target} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode() + sent)
        assert answers.readline() == b"HTTP/1.1 400 Bad Request\r\n"
        fields = dict(line.lower().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
        said = answers.read(int(fields[b"content-length"]))
        assert b"the entry leads out of the directory: ../out" in said
        if left > 1_000_000:
            assert answers.read() == b""
        else:
            assert b"connection" not in fields
            connection.sendall(b"GET /_ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
    assert archive(engine, "GET", container, "/tmp/before").status == 200
    assert archive(engine, "GET", container, "/tmp/after").status == 404


def test_links_that_lead_round_in_circles(engine: TempEngine, filled: str, tmp_path: Path) -> None:
    """Such links have no target. If they were not refused, `docker cp -L` would use the directory
    that contains them as the target.
    """
    assert put(engine, filled, "/d", [symlink("loop", "loop"), symlink("a", "b"), symlink("b", "a")]).status == 200
    for path in ("/d/loop", "/d/a", "/d/loop/", "/d/loop/x"):
        for method in ("HEAD", "GET"):
            assert archive(engine, method, filled, path).status == 400, path
    said = engine.docker("cp", "-L", f"{filled}:/d/loop", str(tmp_path / "out"), status=1).err
    assert "/d/loop: too many levels of symbolic links" in said and not (tmp_path / "out").exists()


def test_an_archive_that_its_writer_did_not_close(engine: TempEngine, filled: str) -> None:
    """The archive ends after the content of its last file, as Go's tar.Writer leaves it without
    Close. It is complete, and Docker accepts it.
    """
    data = tar([Node("left", b"left")], tarfile.USTAR_FORMAT)
    assert put(engine, filled, "/d", data[:516]).status == 200
    assert content(engine, filled, "/d/left") == b"left"
    assert "truncated" in put(engine, filled, "/d", data[:515]).message


def test_refusals(engine: TempEngine, filled: str) -> None:
    one = [Node("x", b"x")]
    assert put(engine, filled, "", one).status == 400
    assert put(engine, filled, "/nope", one).status == 404
    assert put(engine, filled, "/broken", one).status == 404
    for path in ("/d/one", "/d/one/", "/d/soft"):
        answer = put(engine, filled, path, one)
        assert (answer.status, answer.message) == (400, f"extraction point is not a directory: {path}")
    answer = put(engine, filled, "/ro", one)
    assert (answer.status, answer.message) == (403, "mounted volume is marked read-only")
    assert put(engine, filled, "/", [Node("ro/x", b"x")]).status == 403
    assert put(engine, filled, "/", [Node("d/new", b"x"), Node("../x", b"x")]).status == 400
    assert put(engine, filled, "/d", b"no archive at all" * 100).status == 400
    assert put(engine, filled, "/d", tar(one)[:512]).status == 400
    assert put(engine, filled, "/d", gzip.compress(tar(one))[:-20]).status == 400
    assert put(engine, filled, "/d", b"").status == 200  # as Docker
    assert list(get(engine, filled, "/ro")) == ["ro/", "ro/kept"]


@pytest.mark.parametrize("value", ["1", "True", "true"])
def test_no_overwrite_dir_non_dir(engine: TempEngine, filled: str, value: str) -> None:
    more = f"&noOverwriteDirNonDir={value}"
    answer = put(engine, filled, "/", [Node("d", b"x")], more)
    assert answer.status == 400 and "cannot overwrite directory with non-directory: d" in answer.message
    answer = put(engine, filled, "/d", [directory("one")], more)
    assert answer.status == 400 and "cannot overwrite non-directory with directory" in answer.message
    assert put(engine, filled, "/d", [directory("sub"), Node("one", b"x")], more).status == 200
    assert content(engine, filled, "/d/one") == b"x" and content(engine, filled, "/d/sub/two") == b"two"
    assert put(engine, filled, "/d", [Node("sub", b"file"), directory("one")], more.replace(value, "0")).status == 200
    assert content(engine, filled, "/d/sub") == b"file" and get(engine, filled, "/d/one") != {}


def test_files_of_the_containers_user(engine: TempEngine) -> None:
    """`docker cp -a`: the entries get the user of the container's configuration, if there is
    one.
    """
    passwd = Node("etc/passwd", b"app:x:1000:50::/:/bin/sh\n")
    entries = [directory("d", uid=7), Node("d/file", b"x")]

    def owners(user: str, more: str) -> str:
        container = engine.create("sh", "-c", "stat -c %u:%g /d /d/file", User=user)
        assert put(engine, container, "/", [passwd]).status == 200
        assert put(engine, container, "/", entries, more).status == 200
        engine.post(f"/containers/{container}/start")
        engine.wait(container)
        return engine.logs(container).decode()

    assert owners("app", "&copyUIDGID=true") == "1000:50\n1000:50\n"
    assert owners("1000:99", "&copyUIDGID=1") == "1000:99\n1000:99\n"
    assert owners("app", "&copyUIDGID=0") == owners("", "&copyUIDGID=1") == "7:0\n0:0\n"
    unknown = engine.create("true", User="nobody-here")
    answer = put(engine, unknown, "/", entries, "&copyUIDGID=1")
    assert (answer.status, "nobody-here" in answer.message) == (400, True)


def test_read_only_root(engine: TempEngine, tmp_path: Path) -> None:
    host = {"ReadonlyRootfs": True, "Binds": [f"{tmp_path}:/vol"]}
    container = engine.started("sleep", "1000", host=host)
    for _ in range(2):
        answer = put(engine, container, "/etc", [Node("x", b"x")])
        assert (answer.status, answer.message) == (403, "container rootfs is marked read-only")
        assert put(engine, container, "/vol", [Node("x", b"x")]).status == 200
        assert (tmp_path / "x").read_bytes() == b"x"
        (tmp_path / "x").unlink()
        if engine.inspect(container)["State"]["Running"]:
            engine.post(f"/containers/{container}/kill")


def test_mount_points_are_not_taken_away(engine: TempEngine, filled: str) -> None:
    for nodes in ([Node("vol", b"x")], [Node("etc", b"x")], [Node("etc/hosts", b"x")]):
        assert put(engine, filled, "/", nodes).status == 500
    if engine.inspect(filled)["State"]["Running"]:
        for name in ("proc", "dev", "tmpfs"):
            assert put(engine, filled, "/", [Node(name, b"x")]).status == 500
        assert engine.docker("exec", filled, "cat", "/proc/self/comm", "/vol/file").out == "cat\nv"
    assert content(engine, filled, "/vol/file") == b"v"


def test_a_stopped_containers_files_are_those_of_its_next_start(engine: TempEngine) -> None:
    container = engine.create("cat", "/put/file")
    assert put(engine, container, "/", [Node("put/file", b"content")]).status == 200
    engine.post(f"/containers/{container}/start")  # while the engine still has it open
    assert engine.wait(container) == 0
    assert engine.logs(container) == b"content"
    assert content(engine, container, "/put/file") == b"content"


# --- export and changes ---------------------------------------------------------------------------


def test_export(engine: TempEngine, filled: str) -> None:
    answer = engine.request("GET", f"/v1.24/containers/{filled}/export")
    assert answer.status == 200 and answer.headers["content-type"] == "application/octet-stream"
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as opened:
        members = {member.name: member for member in opened.getmembers()}
    assert {"bin/busybox", "d/one", "link", "d/pipe"} <= set(members)
    # volumes are not exported
    assert "vol" in members and "vol/file" not in members and "ro/kept" not in members
    assert not any(name.startswith(("proc/", "sys/", "dev/")) for name in members)


@pytest.mark.own
def test_export_import_through_the_cli(engine: TempEngine, filled: str) -> None:
    exported = subprocess.run(
        ["docker", "export", filled], env=engine.environment, capture_output=True, check=True, timeout=60
    )
    try:
        engine.docker("import", "-", "again:1", input=exported.stdout)
        shown = engine.docker(
            "run", "--rm", "--network", "none", "again:1", "sh", "-c", "cat /d/one /link/sub/two; stat -c %a /d/one"
        )
        assert shown.out == "onetwo6750\n"
    finally:
        engine.docker("rmi", "-f", "again:1", status=None)


def test_changes(engine: TempEngine) -> None:
    script = (
        "echo x > /etc/new; echo y >> /etc/passwd; rm /etc/group; rm -r /home; mkdir /home; touch /home/in; "
        "mkdir -p /a/b; touch /a/b/c; rmdir /root; ln -s x /soft; mkfifo /pipe; touch /gone; rm /gone; chmod 700 /tmp"
    )
    container = engine.create("sh", "-c", script)
    assert engine.request("GET", f"/v1.24/containers/{container}/changes").body in (b"[]\n", b"null\n")
    engine.post(f"/containers/{container}/start")
    assert engine.wait(container) == 0
    answer = engine.request("GET", f"/v1.24/containers/{container}/changes")
    assert answer.status == 200
    found = {each["Path"]: each["Kind"] for each in answer.json()}
    assert {tuple(each) for each in answer.json()} == {("Path", "Kind")}
    assert found == {
        "/a": 1, "/a/b": 1, "/a/b/c": 1, "/etc": 0, "/etc/new": 1, "/etc/passwd": 0, "/etc/group": 2,
        "/home": 0, "/home/in": 1, "/root": 2, "/soft": 1, "/pipe": 1, "/tmp": 0,
    }  # fmt: skip
    shown = engine.docker("diff", container).out.splitlines()
    assert sorted(shown) == sorted(f"{'CAD'[kind]} {path}" for path, kind in found.items())


def test_many_changes(engine: TempEngine) -> None:
    container = engine.create("true")
    nodes = [node for d in range(25) for node in (directory(f"d{d}"), *(Node(f"d{d}/{n}") for n in range(100)))]
    assert put(engine, container, "/tmp", nodes).status == 200
    found = engine.request("GET", f"/v1.24/containers/{container}/changes").json()
    expected = {f"/tmp/{node.name}": 1 for node in nodes} | {"/tmp": 0}
    assert {entry["Path"]: entry["Kind"] for entry in found} == expected and len(found) == len(expected)
    assert all(list(entry) == ["Path", "Kind"] for entry in found)


def test_the_start_itself_changes_nothing(engine: TempEngine) -> None:
    container = engine.started("true")
    engine.wait(container)
    assert not engine.request("GET", f"/v1.24/containers/{container}/changes").json()


def test_events(engine: TempEngine) -> None:
    container = engine.create("true")
    archive(engine, "HEAD", container, "/etc")
    archive(engine, "GET", container, "/etc")
    put(engine, container, "/etc", [Node("x", b"x")])
    engine.request("POST", f"/v1.20/containers/{container}/copy", {"Resource": "/etc"})
    engine.request("GET", f"/v1.24/containers/{container}/export")
    archive(engine, "GET", container, "/nope")
    events = engine.request("GET", f"/v1.24/events?since=0&until={time.time():.9f}").body.splitlines()
    actions = [event["Action"] for event in map(json.loads, events) if event.get("id") == container]
    assert actions == ["create", "archive-path", "extract-to-dir", "copy", "export"]


# --- docker cp ------------------------------------------------------------------------------------


def test_cp_out(engine: TempEngine, filled: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    engine.docker("cp", f"{filled}:/d/one", str(out))
    engine.docker("cp", f"{filled}:/d/one", str(out / "renamed"))
    assert (out / "one").read_text() == (out / "renamed").read_text() == "one"
    engine.docker("cp", f"{filled}:/d", str(out))
    assert (out / "d/sub/two").read_text() == "two" and os.readlink(out / "d/soft") == "one"
    engine.docker("cp", f"{filled}:/d/.", str(out / "contents"))
    assert (out / "contents/sub/two").read_text() == "two"
    engine.docker("cp", f"{filled}:/d", str(out / "contents"))
    assert (out / "contents/d/sub/two").read_text() == "two"
    engine.docker("cp", f"{filled}:/link", str(out))
    assert (out / "link").is_symlink()
    engine.docker("cp", "-L", f"{filled}:/link", str(out / "followed"))
    assert (out / "followed/one").read_text() == "one"
    engine.docker("cp", "-L", f"{filled}:/d/soft", str(out / "soft"))
    assert (out / "soft").read_text() == "one"
    engine.docker("cp", f"{filled}:/vol/file", str(out))
    assert (out / "file").read_text() == "v"
    streamed = subprocess.run(
        ["docker", "cp", f"{filled}:/d", "-"], env=engine.environment, capture_output=True, check=True
    )
    assert "d/sub/two" in names(streamed.stdout)
    assert "Could not find the file /nope" in engine.docker("cp", f"{filled}:/nope", str(out), status=1).err
    assert engine.docker("cp", f"{filled}:/d/one/", str(out), status=1).err


def test_cp_in(engine: TempEngine, filled: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "file").write_text("inner")
    (source / "file").write_text("file")
    (source / "link").symlink_to("file")
    engine.docker("cp", str(source / "file"), f"{filled}:/d")
    engine.docker("cp", str(source / "file"), f"{filled}:/d/renamed")
    engine.docker("cp", str(source / "file"), f"{filled}:/link/through")
    engine.docker("cp", str(source), f"{filled}:/d")
    engine.docker("cp", f"{source}/.", f"{filled}:/d/sub")
    engine.docker("cp", str(source), f"{filled}:/fresh")
    engine.docker("cp", str(source / "link"), f"{filled}:/d/aslink")
    engine.docker("cp", "-L", str(source / "link"), f"{filled}:/d/followed")
    engine.docker("cp", str(source / "file"), f"{filled}:/vol")
    for path in (
        "/d/file",
        "/d/renamed",
        "/d/through",
        "/d/source/file",
        "/d/sub/file",
        "/fresh/file",
        "/d/followed",
        "/vol/file",
    ):
        assert content(engine, filled, path) == b"file", path
    assert content(engine, filled, "/d/sub/inner/file") == b"inner" and content(engine, filled, "/d/sub/two") == b"two"
    assert get(engine, filled, "/d/aslink")["aslink"].issym()
    assert (tmp_path / "vol/file").read_text() == "file"
    engine.docker("cp", "-", f"{filled}:/d", input=tar([Node("streamed", b"streamed", uid=77)]))
    assert get(engine, filled, "/d/streamed")["streamed"].uid == 77
    assert "read-only" in engine.docker("cp", str(source / "file"), f"{filled}:/ro", status=1).err
    assert engine.docker("cp", str(source), f"{filled}:/d/one", status=1).err
    assert engine.docker("cp", str(source / "file"), f"{filled}:/nope/deep/", status=1).err


@pytest.mark.own
def test_a_tree_comes_back_as_it_went_in(engine: TempEngine, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.mkdir()
    back.mkdir()
    (source / "plain").write_bytes(os.urandom(70_000))
    os.link(source / "plain", source / "hard")
    os.setxattr(source / "plain", "user.name", b"\xff\0value")
    (source / os.fsdecode(b"not \xff utf-8")).write_text("x")
    (source / ("n" * 200) / ("m" * 200)).mkdir(parents=True)
    os.mknod(source / "null", 0o20666 | stat.S_IFCHR, os.makedev(1, 3))
    os.symlink("x" * 300, source / "long link")
    os.chown(source / "long link", 3_000_000, 7, follow_symlinks=False)
    with open(source / "hole", "wb") as file:
        file.seek(10 << 30)
        file.write(b"end")
    packed = subprocess.run(["tar", "-C", source, "--xattrs", "-cSf", "-", "."], capture_output=True, check=True).stdout
    assert len(packed) < 1 << 20
    container = engine.create("true")
    assert put(engine, container, "/tmp", packed).status == 200
    answer = archive(engine, "GET", container, "/tmp/.")
    assert len(answer.body) < 1 << 20, "the hole was sent"
    subprocess.run(["tar", "-C", back, "--xattrs", "-xpSf", "-"], input=answer.body, check=True)
    assert os.stat(back / "hole").st_size == (10 << 30) + 3 and os.stat(back / "hole").st_blocks < 100
    for tree in (source, back):
        with open(tree / "hole", "rb") as file:
            file.seek(10 << 30)
            assert file.read() == b"end"
        (tree / "hole").unlink()
    one, other = snapshot(source, times=False), snapshot(back, times=False)
    one.pop("."), other.pop(".")
    assert one == other


def test_the_mark_of_a_container(engine: TempEngine, tmp_path: Path) -> None:
    """/.dockerenv exists as in Docker, is not reported as a change, and a container's own copy is
    kept."""
    one, other = (engine.started("sleep", "600") for _ in range(2))
    stat = engine.docker("exec", one, "stat", "-c", "%a %s %u %F", "/.dockerenv").line
    assert stat == "755 0 0 regular empty file"
    answer = engine.request("GET", f"/v1.24/containers/{one}/changes")
    assert answer.json() == []
    exported = engine.request("GET", f"/v1.24/containers/{one}/export").body
    with tarfile.open(fileobj=io.BytesIO(exported)) as archive:
        assert ".dockerenv" in archive.getnames()
    engine.docker("exec", one, "sh", "-c", "echo x > /.dockerenv")
    assert engine.docker("exec", other, "cat", "/.dockerenv").out == ""
    engine.docker("exec", one, "rm", "/.dockerenv")
    engine.docker("exec", other, "ls", "/.dockerenv")
    engine.post(f"/containers/{one}/restart?t=0")
    engine.docker("exec", one, "ls", "/.dockerenv", status=1)
