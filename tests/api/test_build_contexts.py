"""Contexts and archives that a client should not send, and what COPY makes of unusual ones: nothing
outside of the image changes, and nothing is left behind.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.support.builds.building import TAR, build, context, post, refused
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Node, directory, hard_link, symlink, tar
from tests.support.images.trees import snapshot

COPIES = "FROM busybox\nCOPY . /c/\n"
UP = "../" * 12


def state(engine: TempEngine) -> dict[str, object]:
    """Files under the engine's root that a context could reach."""
    found: dict[str, object] = {}
    for name in ("tmp", "volumes", "layers/init"):
        if (engine.root / name).exists():
            found |= {f"{name}/{path}": entry for path, entry in snapshot(engine.root / name).items()}
    return found


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([Node(UP + "etc/engined-was-here")], "the entry leads out of the archive"),
        ([Node("a/../../engined-was-here")], "the entry leads out of the archive"),
        ([symlink("out", "/tmp"), Node("out/engined-was-here")], "not a directory, but another entry is below it"),
        ([symlink("out", UP + "tmp"), Node("out/engined-was-here")], "not a directory"),
        ([hard_link("passwd", "/etc/passwd")], "no such file in the context"),
        ([hard_link("passwd", UP + "etc/passwd")], "it leads out of the context"),
        ([Node(".wh.bin")], "reserved for layers"),
        ([Node(".wh.\udcff")], ".wh.?: names"),
        ([Node("d/.wh..wh..opq")], "reserved for layers"),
        ([Node("bin", type=tarfile.CHRTYPE, device=(0, 0))], "the device 0/0 is reserved for layers"),
        ([Node("disk", type=tarfile.BLKTYPE, device=(8, 1 << 20))], "there is no device 8/1048576"),
        ([Node("n" * 4096)], "more than 4095 bytes"),
        ([Node("n" * 256)], "more than 255 bytes"),
        ([Node("d/" * 2000 + "n" * 200)], "more than 4095 bytes"),
        ([Node("a"), Node("a/b")], "not a directory"),
    ],
)
def test_hostile_contexts_are_refused(nodes: list[Node], words: str, builder: TempEngine) -> None:
    before = state(builder)
    assert words in refused(post(builder, tar([Node("Dockerfile", COPIES.encode()), *nodes])))
    assert state(builder) == before
    assert not os.path.exists("/tmp/engined-was-here") and not os.path.exists("/etc/engined-was-here")
    assert build(builder, "FROM busybox\n").id


def test_a_bomb_of_members_is_refused(builder: TempEngine) -> None:
    """More members than a context may have: 256 MB of headers in 1 MB."""
    header = tarfile.TarInfo("same").tobuf()
    body = gzip.compress(tar([Node("Dockerfile", b"FROM busybox\n")])[:1024], 1)
    body += gzip.compress(header * 500_001, 1)
    assert "more than 500000 entries" in refused(post(builder, body))


def test_a_bomb_of_zeros(builder: TempEngine) -> None:
    """200 MB of zeros in 200 KB are a file like any other; as long as nothing copies it, it takes
    no space."""
    info = tarfile.TarInfo("zeros")
    info.size = 200 << 20
    body = gzip.compress(tar([Node("Dockerfile", b"FROM busybox\nCOPY small /\n"), Node("small")])[:1536])
    body += gzip.compress(info.tobuf()) + gzip.compress(bytes(1 << 20)) * 201
    answer = builder.request("POST", "/v1.24/build", body, TAR, 60)
    assert answer.status == 200 and b"Successfully built" in answer.body, answer


@pytest.mark.parametrize(
    "node",
    [
        Node("Dockerfile", type=tarfile.FIFOTYPE),
        directory("Dockerfile"),
        symlink("Dockerfile", "loop"),
        symlink("Dockerfile", "/etc/passwd"),
        symlink("Dockerfile", UP + "etc/passwd"),
    ],
    ids=["fifo", "directory", "loop", "absolute", "relative"],
)
def test_a_dockerfile_that_is_no_file(node: Node, builder: TempEngine) -> None:
    nodes = [node, symlink("loop", "Dockerfile")] if node.link == "loop" else [node]
    message = refused(post(builder, tar(nodes)))
    assert "Dockerfile" in message and "root:" not in message


def test_fifos_and_dangling_links_are_copied(builder: TempEngine) -> None:
    files = {
        "pipe": Node("pipe", type=tarfile.FIFOTYPE),
        "l": symlink("l", UP + "etc/passwd"),
        "m": symlink("m", "/no"),
    }
    built = build(builder, f"{COPIES}RUN cd /c; test -p pipe && readlink l && readlink m && cat l\n", files)
    assert f"{UP}etc/passwd\n/no\n" in built.text
    failed = build(builder, "FROM busybox\nCOPY l /\n", files)
    assert failed.error is not None and "l: no such file or directory" in failed.error["error"]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([Node("first"), Node(UP + "tmp/engined-was-here")], "leads out of the archive"),
        ([Node("first"), symlink("out", "/tmp"), Node("out/engined-was-here")], ""),
        ([Node("first"), hard_link("h", UP + "etc/passwd")], "leads out of the archive"),
        ([Node("first"), hard_link("h", "/etc/passwd")], "not in the layer"),
        ([Node("first"), Node(".wh.bin")], "reserved for layers"),
        ([Node("first"), Node("w", type=tarfile.CHRTYPE, device=(0, 0))], "reserved for layers"),
    ],
)
def test_hostile_archives_stay_inside(nodes: list[Node], words: str, builder: TempEngine) -> None:
    before = state(builder)
    built = build(builder, "FROM busybox\nADD a.tar /x/\nRUN cat /etc/passwd\n", {"a.tar": tar(nodes)})
    if words:
        assert built.error is not None and words in built.error["error"]
    assert state(builder) == before and not os.path.exists("/tmp/engined-was-here")


def test_links_of_the_image_are_followed_inside_it(builder: TempEngine) -> None:
    """COPY through links that lead up, to `/` and to nowhere. On the host nothing changes."""
    dockerfile = (
        f"FROM busybox\nRUN mkdir /d && ln -s {UP}d /up && ln -s /d /abs && ln -s /new/place /dangling"
        " && ln -s /d/target /d/file\n"
        "COPY a /up/one\nCOPY a /abs/\nCOPY a /dangling\nCOPY a /d/file\nADD t.tar /abs/\n"
        "RUN cd /d; ls -R /d /new; cat one a target inside /new/place\n"
    )
    built = build(builder, dockerfile, {"a": b"copied\n", "t.tar": tar([Node("inside", b"copied\n")])})
    assert built.error is None, built.objects
    assert "copied\n" * 5 in built.text
    assert not os.path.exists("/d") and not os.path.exists("/new")


def test_a_destination_that_would_be_a_whiteout(builder: TempEngine) -> None:
    for line in ("COPY a /bin/.wh.sh", "COPY a /bin/.wh..wh..opq", "ADD a /.wh.bin/", "WORKDIR /x\nCOPY a .wh.y"):
        built = build(builder, f"FROM busybox\n{line}\n", {"a": b""})
        assert built.error is not None and "reserved for layers" in built.error["error"]


def test_names_that_are_not_utf_8(builder: TempEngine) -> None:
    files = {"\udcff/\udcfe": b"x", "t\udcff.tar": tar([Node("in\udcff", b"inside")])}
    dockerfile = b"FROM busybox\nCOPY \xff /\xff\nADD *.tar /\nRUN cat /\xff/* /in*; cd /\xff; echo * | od -An -tx1\n"
    built = build(builder, dockerfile, files)
    assert built.error is None and "xinside fe 0a" in " ".join(built.text.split()), built.objects
    failed = build(builder, b"FROM busybox\nCOPY none\xff /\n", files)
    assert failed.error is not None and "stat none?: no such file" in failed.error["error"]


def test_many_files_and_a_large_one(builder: TempEngine) -> None:
    large = os.urandom(1 << 20) * 20
    files: dict[str, bytes | Node] = {f"d{at % 50}/f{at}": b"%d" % at for at in range(5000)}
    built = build(
        builder,
        f"{COPIES}RUN cd /c; find . -type f | wc -l; cat d*/f* | wc -c; md5sum large | cut -c1-32\n",
        {**files, "large": large},
    )
    text = f"5002\n{sum(len(str(at)) for at in range(5000))}\n{hashlib.md5(large).hexdigest()}\n"
    assert text in built.text


def test_changed_times_are_no_change(builder: TempEngine) -> None:
    """Content, mode and name bust the cache; times and owners do not."""

    def last(node: Node, *more: Node) -> str:
        nodes = [Node("Dockerfile", COPIES.encode()), node, *more]
        answer = builder.request("POST", "/v1.24/build", tar(nodes), TAR, 60)
        return answer.body.decode().rsplit("Successfully built ", 1)[1][:12]

    first = last(Node("a", b"1"))
    assert last(Node("a", b"1", mtime=5, uid=3, gid=4)) == first
    others = [
        last(Node("a", b"2")),
        last(Node("a", b"1", mode=0o600)),
        last(Node("b", b"1")),
        last(Node("a", b"1"), Node("b")),
        last(symlink("a", "1")),
        last(Node("a", b"1", pax=(("SCHILY.xattr.user.k", "v"),))),
    ]
    assert len({first, *others}) == len(others) + 1


def test_nothing_reads_the_hosts_files(builder: TempEngine, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret of the host")
    files = {"l": symlink("l", str(secret)), "d": symlink("d", str(tmp_path)), "r": symlink("r", "/")}
    for line in (
        "COPY l /x",
        "COPY d /x/",
        "COPY d/secret /x",
        f"COPY r{secret} /x",
        f"COPY {secret} /x",
        "COPY d/* /",
    ):
        body = context(f"FROM busybox\n{line}\nRUN cat /x /x/*\n", files)
        answer = builder.request("POST", "/v1.24/build", body, TAR, 60)
        assert b"secret of the host" not in answer.body and b"errorDetail" in answer.body, answer


@pytest.mark.parametrize("below", ["", "FROM busybox\nRUN mkdir -m 1750 /x && chown 3:4 /x\n"])
def test_archives_with_names_that_occur_twice(builder: TempEngine, below: str, tmp_path: Path) -> None:
    """The layer has each name once: Docker would not take it otherwise."""
    inner = tar([Node("x/b", b"first"), hard_link("x/c", "x/b"), Node("x/b", b"second"), Node("x/d/e", b"deep")])
    archive = tar([Node("b", b"archived")])
    nodes = {"b": Node("b", b"own"), "c": hard_link("c", "b"), "a.tar": archive, "i.tar": inner}
    last = f"{below or 'FROM scratch'}\nADD i.tar /\nADD b a.tar c /y/\n"
    image = build(builder, last, nodes).id
    saved = io.BytesIO(builder.request("GET", f"/v1.24/images/{image}/get").body)
    with tarfile.open(fileobj=saved) as archive:
        member = archive.extractfile("manifest.json")
        assert member is not None
        for name in json.load(member)[0]["Layers"][-2:]:
            layer = archive.extractfile(name)
            with tarfile.open(fileobj=layer) as opened:
                names = opened.getnames()
            assert len(set(names)) == len(names), names
    container = builder.create("true", Image=image)
    exported = io.BytesIO(builder.request("GET", f"/v1.24/containers/{container}/export").body)
    with tarfile.open(fileobj=exported) as root:
        texts = {
            name: file.read()
            for name in ("x/b", "x/c", "x/d/e", "y/b", "y/c")
            if (file := root.extractfile(name)) is not None
        }
        above = root.getmember("x")
    assert texts == {"x/b": b"second", "x/c": b"first", "x/d/e": b"deep", "y/b": b"archived", "y/c": b"own"}
    if below:
        assert (above.mode, above.uid, above.gid) == (0o1750, 3, 4), "that of the image below"
    builder.request("DELETE", f"/v1.24/containers/{container}")
