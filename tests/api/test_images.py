"""Loading images: all archive formats, and archives that are refused without leaving a trace."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import socket
import tarfile
import threading
import time
import zlib
from collections.abc import Callable

import pytest
import zstandard

from tests.support.engine.client import Answer
from tests.support.engine.harness import TempEngine, busybox_archive, until
from tests.support.images.archives import Image, Node, docker_archive, tar

TAR = {"Content-Type": "application/x-tar"}


def load(engine: TempEngine, archive: bytes, query: str = "") -> Answer:
    return engine.request("POST", f"/v1.24/images/load{query}", archive, TAR)


def errors_of(answer: Answer) -> str:
    """The error that a load reported, before or inside its stream; "" for none."""
    if answer.status != 200:
        return answer.message
    values = [json.loads(line) for line in answer.body.splitlines()]
    return next((value["error"] for value in values if "error" in value), "")


def tags(engine: TempEngine) -> set[str]:
    listed = engine.request("GET", "/v1.24/images/json?all=1").json()
    return {tag for image in listed for tag in image["RepoTags"] or ()}


def repacked(
    archive: bytes, *, rename: str = "", change: Callable[[tarfile.TarInfo, bytes], bytes | None] = lambda _, data: data
) -> bytes:
    """The archive with its only tag renamed, and each file replaced by the result of `change` (None
    removes it).
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as source, tarfile.open(fileobj=out, mode="w") as target:
        for member in source:
            file = source.extractfile(member)
            data = change(member, file.read() if file else b"")
            if data is None:
                continue
            if rename and member.name in ("manifest.json", "repositories"):
                data = data.replace(b"busybox", rename.encode())
            if file:
                member.size = len(data)
            target.addfile(member, io.BytesIO(data) if file else None)
    return out.getvalue()


@pytest.fixture
def traceless(engine: TempEngine) -> Callable[[], None]:
    """Asserts that images, layers and blobs are the same as when the test began."""

    def state() -> tuple[set[str], set[str], set[str]]:
        ids = {image["Id"] for image in engine.request("GET", "/v1.24/images/json?all=1").json()}
        layers = set(os.listdir(engine.root / "layers"))
        blobs = {name for _, _, names in os.walk(engine.root / "content") for name in names}
        return ids, layers, blobs

    before = state()
    return lambda: until("nothing is left of it", lambda: state() == before)


@pytest.mark.own
@pytest.mark.parametrize(
    "wrap",
    [
        bytes,
        gzip.compress,
        lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
        lambda data: bz2.compress(data, 1),
        lambda data: lzma.compress(data, preset=0),
        lambda data: zstandard.ZstdCompressor(level=1).compress(data),
    ],
    ids=["identity", "gzip", "gzip-members", "bzip2", "xz", "zstd"],
)
def test_load_in_each_compression(engine: TempEngine, wrap: Callable[[bytes], bytes]) -> None:
    answer = load(engine, wrap(repacked(busybox_archive(), rename="wrapped")))
    assert errors_of(answer) == ""
    assert any(
        "Loaded image: wrapped:latest" in json.loads(line).get("stream", "") for line in answer.body.splitlines()
    )
    assert engine.docker("run", "--rm", "--network", "none", "wrapped", "echo", "ran").out == "ran\n"
    engine.docker("rmi", "wrapped")


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "drip"])
def test_uploads_that_stall_hold_up_no_load(engine: TempEngine, drip: bool) -> None:
    """More clients than processors stop in the middle of a layer, or send only one byte now and
    then."""
    large = docker_archive(Image([tar([Node("noise", os.urandom(4 << 20))])], ["stalled:latest"]))
    stop = threading.Event()

    def send(connection: socket.socket) -> None:
        at = len(large) // 2
        connection.sendall(large[:at])
        while not stop.wait(0.01):
            if drip:
                connection.sendall(large[at : at + 1])
                at += 1

    with contextlib.ExitStack() as stack:
        stack.callback(stop.set)
        threads = []
        for number in range((os.cpu_count() or 1) + 2):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(engine.socket)
            target = "/v1.24/images/load" if number else "/v1.24/images/create?fromSrc=-"
            connection.sendall(f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(large)}\r\n\r\n".encode())
            threads.append(threading.Thread(target=send, args=(connection,)))
            threads[-1].start()
            stack.callback(threads[-1].join)
        stack.callback(stop.set)
        time.sleep(1)
        assert errors_of(load(engine, busybox_archive())) == ""
        packed = gzip.compress(docker_archive(Image([tar([Node("f", b"data")])], ["honest:latest"])))
        assert errors_of(load(engine, packed)) == ""
        imported = engine.request(
            "POST", "/v1.24/images/create?fromSrc=-&repo=honest&tag=2", tar([Node("f", b"x")]), TAR
        )
        assert errors_of(imported) == ""
    engine.docker("rmi", "honest:latest", "honest:2")
    assert "stalled:latest" not in tags(engine)


def test_docker_load_and_quiet(engine: TempEngine) -> None:
    assert "Loaded image: busybox:latest" in engine.docker("load", input=busybox_archive()).out
    assert engine.docker("load", "-q", input=busybox_archive()).out.strip() == "Loaded image: busybox:latest"


@pytest.mark.own
def test_the_last_removal_leaves_nothing(own_engine: TempEngine) -> None:
    engine = own_engine
    assert len(engine.docker("rmi", "busybox").out.splitlines()) >= 2  # Untagged, Deleted…
    assert engine.request("GET", "/v1.24/images/json").body == b"[]\n"
    until("no layer is left", lambda: os.listdir(engine.root / "layers") == ["init"])
    assert not [name for _, _, names in os.walk(engine.root / "content") for name in names]
    engine.load_busybox()
    assert engine.docker("run", "--rm", "--network", "none", "busybox", "echo", "again").out == "again\n"


@pytest.mark.own
@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("wrap", [bytes, lambda data: gzip.compress(data, 1)], ids=["plain", "gzip"])
def test_truncated(
    engine: TempEngine, traceless: Callable[[], None], part: float, wrap: Callable[[bytes], bytes]
) -> None:
    archive = wrap(_with_new_layer(b"truncated"))
    assert errors_of(load(engine, archive[: int(len(archive.rstrip(b"\0")) * part)]))
    assert not any(tag.startswith("fresh") for tag in tags(engine))
    traceless()


@pytest.mark.own
@pytest.mark.parametrize(
    ("kind", "archive"),
    [
        ("no tar", b"this is no archive" * 1000),
        ("empty tar", tarfile.NUL * 10240),
        ("broken gzip", gzip.compress(b"x" * 100000)[:-4] + b"\0\0\0\0"),
        ("gzip of garbage", gzip.compress(os.urandom(5000))),
        ("zlib", zlib.compress(b"x" * 1000)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_not_an_image(engine: TempEngine, traceless: Callable[[], None], kind: str, archive: bytes) -> None:
    assert errors_of(load(engine, archive)), kind
    traceless()


@pytest.mark.own
def test_a_layer_that_is_not_what_its_config_says(engine: TempEngine, traceless: Callable[[], None]) -> None:
    def spoil(member: tarfile.TarInfo, data: bytes) -> bytes:
        return data.replace(b"content", b"CONTENT") if len(data) > 5000 else data

    assert errors_of(load(engine, repacked(_with_new_layer(b"content"), change=spoil)))
    traceless()


@pytest.mark.own
def test_a_missing_layer(engine: TempEngine, traceless: Callable[[], None]) -> None:
    def leave_out(member: tarfile.TarInfo, data: bytes) -> bytes | None:
        return None if len(data) > 5000 else data

    assert errors_of(load(engine, repacked(_with_new_layer(b"missing"), change=leave_out)))
    traceless()


@pytest.mark.own
@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../escaped", tarfile.REGTYPE, ""),
        ("/../escaped", tarfile.REGTYPE, ""),
        ("a/../../escaped", tarfile.REGTYPE, ""),
        ("hard", tarfile.LNKTYPE, "../../../../../../../../etc/passwd"),
        ("hard", tarfile.LNKTYPE, "/etc/passwd"),
        (".wh...", tarfile.REGTYPE, ""),
        ("dir/.wh...", tarfile.REGTYPE, ""),
    ],
)
def test_layers_that_reach_out_stay_inside(engine: TempEngine, name: str, kind: bytes, link: str) -> None:
    """Such links are refused or resolved inside the layer. No entry outside the layer's directory
    is created, linked or removed.
    """
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    passwd = os.stat("/etc/passwd")
    around = set(os.listdir(engine.root))
    load(engine, _with_new_layer(b"reach", member))
    assert os.stat("/etc/passwd").st_nlink == passwd.st_nlink
    assert set(os.listdir(engine.root)) == around
    assert not [path for path in engine.base.rglob("escaped") if "diff" not in path.parts]
    engine.request("DELETE", "/v1.24/images/fresh?force=1")


@pytest.mark.own
def test_a_symlink_as_parent_is_not_followed_out(engine: TempEngine) -> None:
    outside = engine.base / "outside"
    outside.mkdir()
    link = tarfile.TarInfo("way")
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)
    through = tarfile.TarInfo("way/planted")
    load(engine, _with_new_layer(b"symlink", link, through))
    assert os.listdir(outside) == []
    outside.rmdir()
    engine.request("DELETE", "/v1.24/images/fresh?force=1")


def _with_new_layer(content: bytes, *members: tarfile.TarInfo) -> bytes:
    """A docker-archive `fresh:latest` of one layer that no other image has: a file of `content`
    and `members`.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        file = tarfile.TarInfo("file")
        data = content * 20000
        file.size = len(data)
        tar.addfile(file, io.BytesIO(data))
        for member in members:
            tar.addfile(member)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": ["true"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": ["fresh:latest"], "Layers": ["one/layer.tar"]}]).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in ((config_name, config), ("one/layer.tar", layer.getvalue()), ("manifest.json", manifest)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


@pytest.mark.own
def test_a_prefix_of_several_ids_names_none(engine: TempEngine) -> None:
    """An image name that does not resolve is 404 in every operation, as documented."""
    before = {image["Id"] for image in engine.request("GET", "/v1.24/images/json").json()}
    ids = {image[7]: image for image in before}
    for number in range(20):  # of 17 ids, two begin with the same digit
        load(engine, _with_new_layer(b"prefix%d" % number))
        engine.request("POST", f"/v1.24/images/fresh/tag?repo=prefix&tag=t{number}")
        found = engine.request("GET", f"/v1.24/images/prefix:t{number}/json").json()["Id"]
        if found[7] in ids:
            break
        ids[found[7]] = found
    alike = sum(image["Id"][7] == found[7] for image in engine.request("GET", "/v1.24/images/json").json())
    assert alike > 1
    for name in (found[7], f"sha256:{found[7]}"):
        for method, target in (
            ("GET", f"/images/{name}/json"),
            ("GET", f"/images/{name}/history"),
            ("GET", f"/images/{name}/get"),
            ("POST", f"/images/{name}/tag?repo=x"),
            ("DELETE", f"/images/{name}"),
        ):
            answer = engine.request(method, f"/v1.24{target}")
            assert answer.status == 404 and f"No such image: {name}: {alike} images" in answer.message, (target, answer)
    for image in {found, *ids.values()} - before:
        engine.request("DELETE", f"/v1.24/images/{image}?force=1")
