"""Bad input and a bad host: a full disk, hostile contexts over HTTP, and secrets, which are found
nowhere."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.support.builds.table import TAR, Built, build, read
from tests.support.engine.harness import TempEngine, below, contents, until
from tests.support.images.archives import Node, directory, hard_link, symlink, tar
from tests.system.test_full_disk import small_disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def dockerfile(text: str, *more: Node) -> list[Node]:
    return [Node("Dockerfile", text.encode()), *more]


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[TempEngine]:
    """An engine on an ext4 of 64 MiB, with busybox."""
    engine = TempEngine()
    engine.root = tmp_path / "root"
    with small_disk("ext4", engine.root, tmp_path / "image", 64), engine:
        engine.load_busybox()
        yield engine


def test_a_step_that_fills_the_disk(small: TempEngine) -> None:
    """Its build fails alone: a container goes on, and the next build has room."""
    going = small.started("sh", "-c", "while true; do sleep 0.1; done")
    free = os.statvfs(small.root).f_bavail
    for text in ("RUN cat /dev/zero > /x", "COPY big /x\nRUN cat /x /x /x /x > /y"):
        found = build(small.request, dockerfile(f"FROM busybox\n{text}\n", Node("big", os.urandom(10 << 20))))
        assert "returned a non-zero code: 1" in found.error, found
        assert "No space left on device" in found.text
        small.request("POST", f"/v1.24/containers/{going}/restart?t=0")
        for container in small.containers():
            if container != going:
                small.request("DELETE", f"/v1.24/containers/{container}?force=1")
        small.request("POST", "/v1.24/build/prune?all=1")
        until("there is room again", lambda: os.statvfs(small.root).f_bavail > free - 1000)
    assert small.inspect(going)["State"]["Running"]
    assert build(small.request, dockerfile("FROM busybox\nRUN echo 1 > /x\n")).image


def test_a_context_that_fills_the_disk(small: TempEngine) -> None:
    """The reason is in the answer, after the whole context was read."""
    free = os.statvfs(small.root).f_bavail
    big = dockerfile("FROM busybox\nCOPY big /x\n", Node("big", os.urandom(80 << 20)))
    found = build(small.request, big)
    assert not found.image and re.search("no space left|not enough space", found.error), found
    until("there is room again", lambda: os.statvfs(small.root).f_bavail > free - 1000)
    half = dockerfile("FROM busybox\nCOPY big /x\nCOPY big /y\n", Node("big", os.urandom(22 << 20)))
    found = build(small.request, half)
    assert not found.image and re.search("no space left|not enough space", found.error), found
    small.request("POST", "/v1.24/build/prune?all=1")
    until("there is room again", lambda: os.statvfs(small.root).f_bavail > free - 1000)
    assert os.listdir(small.root / "tmp") == []
    assert build(small.request, dockerfile("FROM busybox\nCOPY a /x\n", Node("a", b"A"))).image


# --- hostile contexts -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[TempEngine]:
    with TempEngine() as engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def engine(shared: TempEngine) -> Iterator[TempEngine]:
    """Afterwards no file of a build is left, and builds work."""
    yield shared
    shared.remove_all()
    until("no file of a build is left", lambda: os.listdir(shared.root / "tmp") == [])
    assert build(shared.request, dockerfile("FROM busybox\nCOPY a /a\n", Node("a", os.urandom(8)))).image
    assert shared.containers() == []
    assert shared.request("POST", "/v1.24/build/prune?all=1").status == 200


CANARY = Path(f"/tmp/canary-of-build-tests-{os.getpid()}")


@pytest.fixture
def canary() -> Iterator[Path]:
    """A directory of the host that contexts try to reach."""
    CANARY.mkdir()
    (CANARY / "secret").write_text("cuckoo")
    yield CANARY
    assert sorted(os.listdir(CANARY)) == ["secret"] and (CANARY / "secret").read_text() == "cuckoo"
    (CANARY / "secret").unlink()
    CANARY.rmdir()


OUT = "../" * 20 + str(CANARY)[1:]
HOSTILE = {
    "a name that climbs": [Node(f"{OUT}/new", b"x")],
    "an absolute name": [Node(f"{CANARY}/new", b"x")],
    "a link out and a file through it": [symlink("l", str(CANARY)), Node("l/new", b"x")],
    "a climbing link and a file through it": [symlink("l", OUT), Node("l/new", b"x")],
    "a link to the root and a file through it": [symlink("l", "/"), Node(f"l{CANARY}/new", b"x")],
    "a hard link out": [hard_link("h", f"{CANARY}/secret")],
    "a hard link that climbs": [hard_link("h", f"{OUT}/secret")],
    "a hard link to a link out": [symlink("l", f"{CANARY}/secret"), hard_link("h", "l")],
    "a hard link to nothing": [hard_link("h", "missing")],
    "a directory replaced by a link": [directory("d"), symlink("d", str(CANARY)), Node("d/new", b"x")],
    "a file below a file": [Node("f", b"x"), Node("f/g", b"y")],
    "a device": [Node("n", type=tarfile.CHRTYPE, device=(1, 1))],
    "a block device": [Node("n", type=tarfile.BLKTYPE, device=(8, 0))],
    "a whiteout": [directory("etc"), Node("etc/.wh.passwd")],
    "an opaque directory": [directory("etc"), Node("etc/.wh..wh..opq")],
    "the whole name a climb": [Node("..", b"x")],
    "an empty name": [Node("", b"x")],
    "a name of 4,096 bytes": [Node("n" * 4096, b"x")],
    "a path of many parts": [Node("d/" * 2040 + "f", b"x")],
    "a deep tree": [directory("/".join(["d"] * depth)) for depth in range(1, 300)],
    "a name with a newline and escapes": [Node("a\nb\x1b[31m", b"x")],
    "a name that is no text": [Node("\udcff\udcfe", b"x")],
    "links in a circle": [symlink("d/a", "../e"), symlink("e", "d/a"), Node("f", b"x")],
    "a long chain of links": [*(symlink(f"l{at}", f"l{at + 1}") for at in range(100)), Node("l100", b"x")],
    "set-user-ID root": [Node("s", b"x", mode=0o6755)],
    "all bits of a mode": [Node("s", b"x", mode=0o177777)],
    "an owner out of range": [Node("s", b"x", uid=1 << 31, gid=1 << 31)],
    "a time far away": [Node("s", b"x", mtime=1 << 40)],
    "a time before the epoch": [Node("s", b"x", mtime=-(1 << 35))],
    "a Dockerfile that is a link out": [symlink("Dockerfile", f"{CANARY}/secret")],
    "a Dockerfile that is a FIFO": [Node("Dockerfile", type=tarfile.FIFOTYPE)],
    "a Dockerfile that is a device": [Node("Dockerfile", type=tarfile.CHRTYPE, device=(1, 5))],
    "a Dockerfile that is a directory": [directory("Dockerfile")],
    "a Dockerfile of zeros": [Node("Dockerfile", bytes(1 << 20))],
    "a Dockerfile of one line": [Node("Dockerfile", b"FROM busybox\nRUN " + b"x" * (3 << 20))],
    "an ignore file of many patterns": [Node(".dockerignore", b"**/*a*/**/*b*\n" * 20_000)],
    "an ignore file that is a link": [symlink(".dockerignore", f"{CANARY}/secret")],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_member(engine: TempEngine, canary: Path, kind: str) -> None:
    """An error, or an image that has only what is in the context."""
    nodes = dockerfile("FROM busybox\nCOPY . /c/\nRUN ! grep -r cucko[o] /c\n", *HOSTILE[kind])
    found = build(engine.request, nodes, {"forcerm": "1"})
    assert found.image or found.error, found
    assert "internal" not in found.error.lower() and "Traceback" not in engine.log()


@pytest.mark.parametrize("source", ["l", "l/secret", "d/../l", "l/../l", "*", "l*", "/l"])
@pytest.mark.parametrize(
    "target", [str(CANARY), OUT, f"/../../{OUT}", f"d/{OUT}"], ids=["absolute", "up", "above the root", "below"]
)
def test_a_source_through_a_link(engine: TempEngine, canary: Path, source: str, target: str) -> None:
    """Links of a context end inside it, however they are reached."""
    nodes = dockerfile(
        f"FROM busybox\nCOPY {source} /c/\nRUN ! grep -r cucko[o] /c\n", directory("d"), symlink("l", target)
    )
    found = build(engine.request, nodes, {"forcerm": "1"})
    assert "returned a non-zero code" not in found.error, found


@pytest.mark.parametrize("where", ["/l/x", "/l/d/x", "/l/../l/x", "/a/b/x"])
def test_a_destination_through_a_link(engine: TempEngine, canary: Path, where: str) -> None:
    """Links of the image end inside the image."""
    text = f"FROM busybox\nRUN ln -s {OUT} /l && mkdir /a && ln -s {CANARY} /a/b\nCOPY f {where}\nADD t.tar {where}d/\n"
    packed = tar([symlink("s", str(CANARY)), Node("s/new", b"x")])
    nodes = dockerfile(text, Node("f", b"x"), Node("t.tar", packed))
    found = build(engine.request, nodes, {"forcerm": "1"})
    assert found.image or found.error, found


@pytest.mark.parametrize("cut", [0, 1, 100, 511, 512, 600, 1024, 1500, 2048])
def test_a_context_that_is_cut(engine: TempEngine, cut: int) -> None:
    """End blocks may be missing; a member may not."""
    whole = tar(dockerfile("FROM busybox\nCOPY f /f\n", Node("f", b"x" * 600)))
    found = build(engine.request, whole[:cut])
    assert found.error and not found.image, found


def test_a_context_without_end_blocks(engine: TempEngine) -> None:
    whole = tar(dockerfile("FROM busybox\nCOPY f /f\n", Node("f", b"x" * 512)))
    assert build(engine.request, whole[: 4 * 512]).image


def test_noise_instead_of_a_context(engine: TempEngine) -> None:
    for noise in (b"x", b"\x00" * 5000, os.urandom(5000), b"\x1f\x8b" + os.urandom(5000), b"BZh9" + os.urandom(500)):
        found = build(engine.request, noise)
        assert found.error and not found.image, (noise[:4], found)


def test_a_bomb(engine: TempEngine) -> None:
    """A gzip of a sparse gigabyte takes no more memory than any other context."""
    out = io.BytesIO()
    with gzip.open(out, "wb", 1) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        text = b"FROM busybox\n"
        info = tarfile.TarInfo("Dockerfile")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
        info = tarfile.TarInfo("zeros")
        info.size = 1 << 30
        with open("/dev/zero", "rb") as zeros:
            archive.addfile(info, zeros)
    before = peak(engine)
    found = build(engine.request, out.getvalue())
    assert found.image or found.error, found
    assert peak(engine) < before + (200 << 20)


def test_many_members(engine: TempEngine) -> None:
    """A hundred thousand empty files: an image or an error, in bounded memory."""
    block = tar([Node("n0000000")])[:512]
    members = []
    for at in range(100_000):
        header = bytearray(block)
        header[1:8] = b"%07d" % at
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        members.append(bytes(header))
    body = gzip.compress(tar(dockerfile("FROM busybox\nENV a=b\n"))[:1024] + b"".join(members) + bytes(1024), 1)
    before = peak(engine)
    found = build(engine.request, body)
    assert found.image or found.error, found
    assert peak(engine) < before + (400 << 20)


def peak(engine: TempEngine) -> int:
    """Bytes of memory that the daemon has used at most."""
    for line in Path(f"/proc/{engine.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


# --- secrets --------------------------------------------------------------------------------------


def found_in(place: Path, secret: bytes) -> list[str]:
    """Files below a directory that have the secret, or its base64, in content or name."""
    words = (secret, base64.b64encode(secret)[:-3], base64.urlsafe_b64encode(secret)[:-3])
    named = [str(path) for path in below(place) if any(word in os.fsencode(path.name) for word in words)]
    return named + [str(path) for path, data in contents(place) if any(word in data for word in words)]


def everything_said(engine: TempEngine) -> bytes:
    """Events, containers, images with their histories, and the log."""
    said = [engine.log().encode()]
    for target in (f"/events?since=0&until={time.time()}", "/containers/json?all=1", "/images/json?all=1", "/info"):
        said.append(engine.request("GET", f"/v1.24{target}").body)
    for image in engine.request("GET", "/v1.24/images/json?all=1").json():
        said += [engine.request("GET", f"/v1.24/images/{image['Id']}/{kind}").body for kind in ("json", "history")]
    return b"".join(said)


def test_credentials_of_registries_are_found_nowhere(own_engine: TempEngine) -> None:
    secret = b"correct-horse-battery-staple-15"
    config = {"127.0.0.1:1": {"username": "u", "password": secret.decode()}}
    header = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()

    def asked(text: str) -> Built:
        body, headers = tar(dockerfile(text)), {**TAR, "X-Registry-Config": header}
        return read(own_engine.request("POST", "/v1.24/build?" + urlencode({"t": "x"}), body, headers))

    assert asked("FROM 127.0.0.1:1/private\n").error
    assert asked("FROM busybox\nRUN echo 1 > /x\n").image
    own_engine.terminate()
    own_engine.start()
    assert found_in(own_engine.base, secret) == []
    assert secret not in everything_said(own_engine)
