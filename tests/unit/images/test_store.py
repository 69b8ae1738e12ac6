"""Images in the engine: load in every packaging, names, list, inspect, history, and Docker's rules
of deletion.

Needs root, because layers are extracted.
"""

from __future__ import annotations

import asyncio
import bz2
import dataclasses
import gzip
import json
import lzma
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from engine.common import times
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound
from engine.events import EventLog
from engine.images import reference, views
from engine.images.layers import chain_ids
from engine.images.progress import bar
from engine.images.record import ImageUser
from engine.images.save import save
from engine.images.store import ImageStore
from engine.storage.content import Content
from engine.storage.overlay import OverlaySnapshots
from engine.storage.records import Records
from engine.wire.images import Progress
from tests.support.images.archives import (
    Image,
    Node,
    digest,
    directory,
    docker_archive,
    hard_link,
    legacy_archive,
    oci_archive,
    symlink,
    tar,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

LOW = tar([directory("./"), directory("etc"), Node("etc/name", b"low"), Node("bin/sh", b"x" * 3000, mode=0o755)])
HIGH = tar([Node("etc/name", b"high"), Node("bin/.wh.sh")])
OTHER = tar([Node("other", b"other")])

ONE = Image([LOW], ["one:latest"], {"Cmd": ["sh"], "Labels": {"kind": "first", "x": ""}}, "2020-01-02T03:04:05.5Z")
TWO = Image([LOW, HIGH], ["two:a", "registry.example:5000/team/two:b"], {"User": "u"}, "2021-01-02T03:04:05Z")
BARE = Image([OTHER], [], {}, "2022-01-02T03:04:05Z")


async def pieces(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


class Stage:
    """A store over a root, opened as at a start of the daemon."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.users: dict[str, list[ImageUser]] = {}
        self.records = Records(root / "state.db")
        self.snapshots = OverlaySnapshots(root, self.records)
        self.events = EventLog()
        self.images = ImageStore(
            self.records,
            Content(root),
            self.snapshots,
            self.events,
            users=lambda image_id: self.users.get(image_id, []),
            counts=lambda: {image_id: len(users) for image_id, users in self.users.items()},
        )

    async def __aenter__(self) -> Stage:
        await self.images.open()
        await self.snapshots.sweep(set(), self.images.chain_ids())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.images.close()
        self.records.close()

    async def load(self, data: bytes, quiet: bool = True) -> list[Progress]:
        return [progress async for progress in self.images.load(pieces(data), quiet)]

    def on_disk(self) -> tuple[list[str], list[str], list[str]]:
        """Layers, blobs, temporary files."""
        places = ("layers", "content/sha256", "tmp")
        layers, blobs, temporary = (sorted(os.listdir(self.root / place)) for place in places)
        return layers, blobs, temporary

    def told(self) -> list[tuple[str, str]]:
        return [(message.action, message.actor.attributes["name"]) for message in self.events.history(0)]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Stage], Awaitable[None]]], None]:
    def runner(work: Callable[[Stage], Awaitable[None]]) -> None:
        async def main() -> None:
            async with Stage(tmp_path) as stage:
                await work(stage)

        asyncio.run(main())

    return runner


Run = Callable[[Callable[[Stage], Awaitable[None]]], None]


def xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


# --- load -----------------------------------------------------------------------------------------

WRAPPINGS = {
    "docker": docker_archive,
    "docker, manifest first": lambda image: docker_archive(image, reverse=True),
    "docker, gzip": lambda image: gzip.compress(docker_archive(image)),
    "docker, gzip in members": lambda image: b"".join(
        gzip.compress(docker_archive(image)[at:][:5000]) for at in range(0, len(docker_archive(image)), 5000)
    ),
    "docker, bzip2": lambda image: bz2.compress(docker_archive(image)),
    "docker, xz": lambda image: xz(docker_archive(image)),
    "docker, zstd": lambda image: zstandard.compress(docker_archive(image)),
    "docker, layers gzip": lambda image: docker_archive(image, compress=gzip.compress),
    "docker, layers bzip2 in xz": lambda image: xz(docker_archive(image, compress=bz2.compress)),
    "oci": lambda image: oci_archive(image, compress=lambda data: data),
    "oci, gzip": oci_archive,
    "oci, zstd": lambda image: oci_archive(image, compress=zstandard.compress),
    "oci, xz": lambda image: oci_archive(image, compress=xz),
    "oci, ref.name": lambda image: oci_archive(image, annotation="org.opencontainers.image.ref.name"),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_load(run: Run, wrapping: str) -> None:
    async def work(stage: Stage) -> None:
        said = await stage.load(WRAPPINGS[wrapping](TWO))
        assert sorted(line.stream for line in said) == [
            "Loaded image: registry.example:5000/team/two:b\n",
            "Loaded image: two:a\n",
        ]
        record = stage.images.get("two:a")
        assert record.id == TWO.id and record.config.config is not None and record.config.config.user == "u"
        assert record.chain_ids == chain_ids([digest(LOW), digest(HIGH)]) and record.size == 3000 + 3 + 4
        top = stage.snapshots.layer_path(record.chain_ids[-1])
        assert (top / "etc/name").read_text() == "high" and (top / "bin/sh").is_char_device()
        await stage.images.close()
        assert not any(layer.pending for layer in (stage.snapshots.layer(name) for name in record.chain_ids) if layer)
        assert not stage.images.get("two:a").pending

    run(work)

    async def after(stage: Stage) -> None:
        assert stage.images.get(TWO.id).familiar_tags == ["registry.example:5000/team/two:b", "two:a"]
        layers, blobs, temporary = stage.on_disk()
        assert (len(layers), blobs, temporary) == (2, [TWO.id[7:]], [])

    run(after)


@pytest.mark.parametrize("names", [["old:a", "old:b"], []])
def test_load_legacy(run: Run, names: list[str]) -> None:
    image = Image([LOW, HIGH], names, {"Cmd": ["sh"], "Volumes": {"/v": None}, "Labels": None})

    async def work(stage: Stage) -> None:
        said = await stage.load(legacy_archive(image))
        assert len(said) == max(1, len(names)) and all(line.stream.startswith("Loaded image") for line in said)
        (record,) = stage.images
        assert record.familiar_tags == names
        assert record.config.rootfs.diff_ids == (digest(LOW), digest(HIGH))
        assert record.config.config is not None and record.config.config.volumes == {"/v": {}}
        assert [item.created_by for item in views.history(stage.images.index, stage.images.snapshots, record.id)] == [
            "/bin/sh -c #(nop) ADD layer 1",
            "/bin/sh -c #(nop) ADD layer 0",
        ]

    run(work)


def test_progress(run: Run) -> None:
    async def work(stage: Stage) -> None:
        big = Image([LOW, tar([Node("big", os.urandom(3 << 20))])], ["big:latest"])
        said = await stage.load(docker_archive(big), quiet=False)
        assert said[-1] == Progress(stream="Loaded image: big:latest\n")
        for layer in big.layers:
            own = [line for line in said if line.id == digest(layer)[7:19]]
            assert own and all(line.status == "Loading layer" for line in own)
            last = own[-1].progress_detail
            assert last is not None and last.current == last.total == len(layer)
            assert own[-1].progress.startswith("[" + "=" * 50 + ">]")
        again = await stage.load(docker_archive(big), quiet=False)
        assert again == [Progress(stream="Loaded image: big:latest\n")], "what is there is not loaded again"
        assert stage.told() == [("load", big.id), ("tag", "big:latest")] * 2

    run(work)


def test_the_bar() -> None:
    assert bar(0, 1000) == "[>" + " " * 50 + "]       0B/1kB"
    assert bar(512_000, 1_024_000) == "[" + "=" * 25 + ">" + " " * 25 + "]    512kB/1.024MB"
    assert bar(5, 0).startswith("[" + "=" * 50 + ">]")


def test_several_images_and_shared_layers(run: Run) -> None:
    async def work(stage: Stage) -> None:
        said = await stage.load(docker_archive(ONE, TWO, BARE))
        assert f"Loaded image ID: {BARE.id}\n" in [line.stream for line in said]
        assert len(stage.images) == 3 and len(stage.on_disk()[0]) == 3

    run(work)


def test_a_name_moves_to_the_newer_image(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE))
        said = await stage.load(docker_archive(Image([OTHER], ["one:latest"])))
        assert (
            said[0].stream
            == f"The image one:latest already exists, renaming the old one with ID {ONE.id} to empty string\n"
        )
        assert stage.images.get(ONE.id).tags == () and stage.images.get("one").id != ONE.id

    run(work)


def test_ten_loads_at_once_leave_each_layer_once(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await asyncio.gather(*(stage.load(docker_archive(image)) for image in [ONE, TWO] * 5))
        assert len(stage.images) == 2
        layers = stage.on_disk()[0]
        assert len(layers) == 2, layers

    run(work)


def test_a_bad_load_does_not_spoil_a_good_one_of_the_same_layer(run: Run) -> None:
    liar = Image([tar([Node("x", b"other bytes")])], ["liar:latest"])
    configuration = ONE.configuration()
    bad = docker_archive(liar).replace(liar.configuration(), configuration[: len(liar.configuration())])

    async def work(stage: Stage) -> None:
        results = await asyncio.gather(
            *(stage.load(data) for data in [bad, docker_archive(ONE), bad, docker_archive(TWO)]), return_exceptions=True
        )
        assert [isinstance(result, EngineError) for result in results] == [True, False, True, False]
        assert stage.images.get("one") and stage.images.get("two:a")

    run(work)


def spoilt(**changes: Any) -> bytes:
    """A Docker archive whose manifest or configuration was tampered with."""
    document = json.loads(TWO.configuration()) | changes.pop("configuration", {})
    raw = json.dumps(document).encode()
    manifest = {"Config": "c.json", "RepoTags": ["bad:latest"], "Layers": ["a/layer.tar", "b/layer.tar"]} | changes
    return tar(
        [
            Node("c.json", raw),
            Node("a/layer.tar", LOW),
            Node("b/layer.tar", HIGH),
            symlink("s/layer.tar", "../a/layer.tar"),
            symlink("absolute", "/etc/passwd"),
            symlink("out", "../../../etc/passwd"),
            symlink("loop", "loop"),
            hard_link("h", "b/layer.tar"),
            Node("manifest.json", json.dumps([manifest]).encode()),
        ]
    )


def test_links_between_members(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(spoilt(Layers=["s/layer.tar", "h"]))
        assert len(stage.images) == 1

    run(work)


NESTED = b"[" * 100_000
LAYERS = {"rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64, digest(HIGH)]}}
TWICE = Image([tar([Node("etc/name", b"1"), Node("etc/other"), Node("etc/name", b"2")])], ["bad:latest"])
ESCAPE = Image([tar([Node("../../evil", b"x")])], ["bad:latest"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no image|no manifest.json"),
        (b"\0" * 10240, "no manifest.json"),
        (b"garbage" * 1000, "invalid archive"),
        (docker_archive(TWO)[:-12000], "truncated|invalid archive"),
        (docker_archive(TWO)[:5000], "truncated"),
        (gzip.compress(docker_archive(TWO))[:-100], "damaged gzip"),
        (gzip.compress(docker_archive(TWO))[:-8] + bytes(8), "damaged gzip"),
        (bz2.compress(docker_archive(TWO))[:-50], "damaged bzip2"),
        (xz(docker_archive(TWO))[:-50], "damaged xz"),
        (xz(docker_archive(TWO)) + b"garbage", "damaged xz"),
        (zstandard.compress(docker_archive(TWO))[:-50], "invalid archive|truncated|damaged zstd"),
        (tar([Node("manifest.json", b"{")]), "manifest.json"),
        (tar([Node("manifest.json", NESTED)]), "manifest.json"),
        (tar([Node("manifest.json", b"[]")]), "no image"),
        (tar([Node("manifest.json", b"x" * (5 << 20))]), "more than"),
        (tar([Node("manifest.json", b'[{"Config":"none"}]')]), "none is missing"),
        (tar([Node("index.json", b"{}")]), "no image"),
        (tar([Node("index.json", b'{"manifests":[{"digest":"sha256:../../x"}]}')]), "invalid digest"),
        (tar([Node("index.json", json.dumps({"manifests": [{"digest": digest(b"a")}]}).encode())]), "is missing"),
        (tar([Node("repositories", b'{"x":{"y":"../../etc"}}')]), "invalid layer id"),
        (tar([Node("repositories", b'{"x":{"y":"no"}}')]), "is missing"),
        (
            tar(
                [Node("repositories", b'{"x":{"y":"z"}}'), Node("z/layer.tar", LOW), Node("z/json", b'{"parent":"z"}')]
            ),
            "max depth",
        ),
        (spoilt(Layers=["a/layer.tar"]), "layers length mismatch: expected 1, got 2"),
        (spoilt(Layers=["b/layer.tar", "a/layer.tar"]), "diff_id"),
        (spoilt(Layers=["absolute", "b/layer.tar"]), "not a regular file"),
        (spoilt(Layers=["out", "b/layer.tar"]), "missing"),
        (spoilt(Layers=["loop", "b/layer.tar"]), "not a regular file"),
        (spoilt(Layers=["../../../../etc/passwd", "b/layer.tar"]), "missing"),
        (spoilt(Config="/etc/passwd"), "missing"),
        (spoilt(RepoTags=["Bad:latest"]), "must be lowercase"),
        (spoilt(RepoTags=[f"x@{digest(b'')}"]), "invalid tag"),
        (spoilt(RepoTags=["x"]), "invalid tag 'x'"),
        (
            spoilt(configuration={"history": [{"created_by": "RUN"}] * 3}),
            "too many non-empty layers in History section",
        ),
        (spoilt(configuration={"os": "windows"}), 'operating system "windows"'),
        (spoilt(configuration=LAYERS), "diff_id"),
        (spoilt(configuration={"rootfs": {"type": "layers", "diff_ids": ["sha256:../../x", "y"]}}), "invalid diff_id"),
        (spoilt(configuration={"rootfs": {"type": "layers", "diff_ids": [digest(LOW)] * 129}}), "max depth"),
        (spoilt(configuration={"rootfs": {"type": "wings"}}), "wings"),
        (spoilt(configuration={"config": {"Env": 5}}), "c.json"),
        (spoilt(configuration={"config": {"ExposedPorts": {"80/tcp": 5}}}), "expected object, got int"),
        (spoilt(configuration={"config": {"StopTimeout": 10**30}}), "config.StopTimeout: expected integer <= "),
        (spoilt(configuration={"config": {"Healthcheck": {"Interval": -(10**30)}}}), "expected integer >= "),
        (spoilt(configuration={"created": "yesterday"}), "created: 'yesterday' is not an RFC 3339 time"),
        (spoilt(configuration={"created": "2024-02-30T00:00:00Z"}), "is not an RFC 3339 time"),
        (spoilt(configuration={"created": "2024-02-03"}), "is not an RFC 3339 time"),
        (spoilt(configuration={"history": [{}, {"created": "x"}]}), "history.1..created: 'x' is not an RFC 3339 time"),
        (docker_archive(TWICE), "layer: duplicates of file paths not supported: etc/name"),
        (docker_archive(TWICE, compress=gzip.compress), "duplicates of file paths not supported"),
        (oci_archive(TWICE), "duplicates of file paths not supported"),
        (docker_archive(ESCAPE), "leads out"),
        (docker_archive(ONE, ESCAPE), "leads out"),
        (docker_archive(Image([LOW[:600]], ["bad:latest"])), "truncated"),
        (docker_archive(Image([b"no tar"], ["bad:latest"])), "truncated"),
        (docker_archive(Image([LOW], ["bad:latest"]), compress=lambda data: gzip.compress(data)[:-9]), "damaged gzip"),
    ],
)
def test_a_bad_archive_leaves_nothing(run: Run, data: bytes, message: str) -> None:
    async def work(stage: Stage) -> None:
        with pytest.raises(InvalidParameter, match=message):
            await stage.load(data)
        assert stage.on_disk() == ([], [], []) and len(stage.images) == 0
        assert not (stage.root.parent / "evil").exists() and stage.told() == []

    run(work)


def test_a_failing_body_or_leaving_client_leaves_nothing(run: Run) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield docker_archive(TWO)[:4000]
        raise InvalidParameter("the client left")

    async def work(stage: Stage) -> None:
        with pytest.raises(InvalidParameter, match="left"):
            async for _ in stage.images.load(breaks()):
                pass
        big = Image([LOW, tar([Node(f"f{at}", os.urandom(2000)) for at in range(2000)])], ["big:latest"])
        for delay in (0, 0.001, 0.005, 0.02):
            task = asyncio.create_task(stage.load(docker_archive(big), quiet=False))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                assert stage.on_disk() == ([], [], [])
        steps = stage.images.load(pieces(docker_archive(TWO)))
        await anext(steps)
        await steps.aclose()
        assert stage.on_disk()[2] == []

    run(work)


# --- names ----------------------------------------------------------------------------------------


def test_get(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO, BARE))
        for name in ("one", "one:latest", "docker.io/library/one", ONE.id, ONE.id[7:], ONE.id[7:19], ONE.id[:20]):
            assert stage.images.get(name).id == ONE.id
        assert stage.images.get("registry.example:5000/team/two:b").id == TWO.id
        for name, message in {
            "two": "No such image: two:latest$",
            "none:x": "No such image: none:x$",
            "One": "No such image: One: .*must be lowercase",
            "": "No such image: ",
            "0" * 64: "No such image: 0+$",
            "a b": "invalid reference format",
        }.items():
            with pytest.raises(NotFound, match=message):
                stage.images.get(name)

    run(work)


def test_a_digest_counts_not_the_tag_beside_it(run: Run) -> None:
    """`name:tag@digest`, as compose files pin images."""

    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO))
        pulled = reference.parse(f"one@{digest(b'manifest')}")
        await stage.images.adopt(ONE.configuration(), stage.images.get("one").config, digest=pulled)
        for name in (f"one@{pulled.digest}", f"one:latest@{pulled.digest}", f"one:moved@{pulled.digest}"):
            assert stage.images.get(name).id == ONE.id
        for name in (f"other@{ONE.id}", f"one:x@{ONE.id}"):
            assert stage.images.get(name).id == ONE.id
        missing = f"one:latest@{digest(b'another')}"
        with pytest.raises(NotFound, match=f"No such image: {missing}"):
            stage.images.get(missing)
        assert lines(await stage.images.delete(f"one:moved@{pulled.digest}")) == [{"Untagged": f"one@{pulled.digest}"}]
        assert {"Deleted": ONE.id} in lines(await stage.images.delete(f"one@{ONE.id}"))

    run(work)


def test_a_manifest_goes_with_the_last_digest(run: Run) -> None:
    """Also if the image stays with another name, as it was before it was pulled."""

    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE))
        before = stage.on_disk()
        pulled = [reference.parse(f"{name}@{digest(b'{}')}") for name in ("a.b/c", "a.b/d")]
        for each in pulled:
            await stage.images.adopt(
                ONE.configuration(), stage.images.get("one").config, digest=each, manifest=b"{}", oci=True
            )
        for each, left in zip(pulled, (1, 0), strict=True):
            assert stage.images.get("one").manifest == digest(b"{}")
            await stage.images.delete(each.canonical)
            assert len(stage.on_disk()[1]) - len(before[1]) == left
        assert stage.on_disk() == before and stage.images.get("one").manifest == ""

    run(work)


def test_the_time_of_the_last_tag(run: Run) -> None:
    def time_of(stage: Stage, name: str) -> int:
        shown = views.inspect(stage.images.index, stage.images.snapshots, name).metadata.last_tag_time
        return times.parse_rfc3339(shown)

    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, BARE))
        assert time_of(stage, BARE.id) == 0
        first = time_of(stage, "one")
        await stage.images.tag("one", "one")
        second = time_of(stage, "one")
        await stage.images.tag(BARE.id, "one")
        assert second == time_of(stage, ONE.id) and time_of(stage, "one") >= second >= first > 0

    run(work)


def test_an_ambiguous_prefix_says_so(run: Run) -> None:
    async def work(stage: Stage) -> None:
        images = [Image([OTHER], [f"n{at}:x"], {"Labels": {"n": str(at)}}) for at in range(17)]
        await stage.load(docker_archive(*images))
        with pytest.raises(NotFound, match="images have an id with this prefix"):
            for digit in "0123456789abcdef":
                if any(image.id[7] == digit for image in images):
                    stage.images.get(digit)

    run(work)


def test_tag(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO))
        await stage.images.tag("one", "docker.io/library/extra", "")
        await stage.images.tag("one", "docker.io/library/extra", "")
        await stage.images.tag(ONE.id[7:15], "localhost:5000/x", "y")
        assert stage.images.get("one").familiar_tags == ["extra:latest", "localhost:5000/x:y", "one:latest"]
        await stage.images.tag("two:a", "one")
        assert stage.images.get("one").id == TWO.id and "one:latest" not in stage.images.get(ONE.id).familiar_tags
        with pytest.raises(NotFound):
            await stage.images.tag("none", "x")
        for repository, tag in (("Upper", ""), ("x", "bad tag"), (f"x@{ONE.id}", ""), ("f" * 64, "")):
            with pytest.raises(InvalidParameter):
                await stage.images.tag("one", repository, tag)
        assert stage.told()[-1] == ("tag", "one:latest")

    run(work)

    async def after(stage: Stage) -> None:
        assert stage.images.get("one").id == TWO.id and stage.images.get("localhost:5000/x:y").id == ONE.id

    run(after)


CHILD = Image([LOW, HIGH], ["child:latest"], parent=ONE)
GRANDCHILD = Image([LOW, HIGH, OTHER], ["grandchild:latest"], parent=CHILD)


def test_parents_come_with_an_archive(run: Run) -> None:
    """The parent is known if it is in the archive too, as in archives of Docker."""

    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(GRANDCHILD, ONE, CHILD))
        images = stage.images
        assert [
            views.inspect(images.index, images.snapshots, name).parent or "" for name in ("one", "child", "grandchild")
        ] == ["", ONE.id, CHILD.id]
        assert [item.id for item in views.history(images.index, images.snapshots, "grandchild")][:3] == [
            GRANDCHILD.id,
            CHILD.id,
            ONE.id,
        ]
        saving = await save(images, stage.events, ["one", "grandchild", "child"])
        saved = b"".join([chunk async for chunk in saving])
        await saving.aclose()
        with pytest.raises(Conflict, match="dependent child images"):
            await images.delete(ONE.id)
        await images.delete("grandchild")
        await images.delete("child")
        assert not images.get("one").parent and len(images) == 1
        await stage.load(saved)
        assert [
            views.inspect(images.index, images.snapshots, name).parent or "" for name in ("one", "child", "grandchild")
        ] == ["", ONE.id, CHILD.id]
        await stage.load(docker_archive(dataclasses.replace(CHILD, names=["alone:latest"])))
        assert images.get("alone").parent == ONE.id, "what is known of an image stays"

    run(work)


def test_a_parent_that_is_not_in_the_archive(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE))
        await stage.load(docker_archive(CHILD))
        assert stage.images.get("child").parent == ""

    run(work)


@pytest.mark.parametrize("parent", [TWO, BARE])
def test_a_parent_that_an_image_was_not_made_from(run: Run, parent: Image) -> None:
    archive = docker_archive(parent, CHILD).replace(ONE.id.encode(), parent.id.encode())

    async def work(stage: Stage) -> None:
        with pytest.raises(InvalidParameter, match="is not a valid parent for"):
            await stage.load(archive)
        assert len(stage.images) == 0 and stage.on_disk() == ([], [], [])

    run(work)


def test_images_that_are_their_own_parents(run: Run) -> None:
    """Cycles are refused, because a deletion follows parents."""
    empty = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}
    documents = [json.dumps({**empty, "author": author}).encode() for author in "ab"]
    ids = [digest(document) for document in documents]
    items = [
        {"Config": f"{at}.json", "RepoTags": [f"{at}:latest"], "Layers": [], "Parent": parent}
        for at, parent in enumerate(reversed(ids))
    ]
    nodes = [Node(f"{at}.json", document) for at, document in enumerate(documents)]

    async def work(stage: Stage) -> None:
        with pytest.raises(InvalidParameter, match="is not a valid parent for"):
            await stage.load(tar([*nodes, Node("manifest.json", json.dumps(items).encode())]))

    run(work)


def test_deletion_takes_nameless_parents_along(run: Run) -> None:
    """Nameless parents are deleted too, unless another image was made from them."""
    nameless = dataclasses.replace(CHILD, names=[])
    other = Image([LOW, HIGH, LOW], ["other:latest"], parent=nameless)
    both = dataclasses.replace(GRANDCHILD, parent=nameless)

    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, nameless, both, other))
        deleted = [line.deleted for line in await stage.images.delete("grandchild") if line.deleted]
        assert deleted[0] == GRANDCHILD.id and nameless.id not in deleted
        assert {summary.id for summary in views.summaries(stage.images.index)} == {ONE.id, other.id}
        deleted = [line.deleted for line in await stage.images.delete("other") if line.deleted]
        assert deleted[0] == other.id and nameless.id in deleted and ONE.id not in deleted
        assert len(stage.images) == 1

    run(work)


# --- list, inspect, history -----------------------------------------------------------------------


def test_list(run: Run) -> None:
    async def work(stage: Stage) -> None:
        images = stage.images
        assert views.summaries(images.index) == []
        await stage.load(docker_archive(ONE, TWO, BARE))

        def ids(**query: Any) -> list[str]:
            return [summary.id for summary in views.summaries(images.index, **query)]

        assert ids() == [BARE.id, TWO.id, ONE.id]
        bare, two, one = views.summaries(images.index)
        assert bare.repo_tags == bare.repo_digests == []
        assert two.repo_tags == ["registry.example:5000/team/two:b", "two:a"] and two.repo_digests == []
        assert one.labels == {"kind": "first", "x": ""} and one.created == 1577934245
        assert one.size == 3003 and one.parent_id == ""
        assert msgspec.to_builtins(views.summaries(images.index)[0]).keys() == {
            *("Id", "ParentId", "RepoTags", "RepoDigests", "Created", "Size", "SharedSize", "Labels", "Containers")
        }
        assert ids(filters={"dangling": ["true"]}) == [BARE.id]
        assert ids(filters={"dangling": ["false"]}) == [TWO.id, ONE.id]
        assert ids(filters={"label": ["kind"]}) == ids(filters={"label": ["kind=first", "x="]}) == [ONE.id]
        assert ids(filters={"label": ["kind=other"]}) == []
        assert ids(filters={"before": ["two:a"]}) == [ONE.id] and ids(filters={"since": [ONE.id[7:15]]}) == [
            BARE.id,
            TWO.id,
        ]
        with pytest.raises(NotFound):
            ids(filters={"before": ["none"]})
        assert ids(name="two") == ids(name="t*") == ids(name="two:a") == ids(name="docker.io/library/two") == [TWO.id]
        assert ids(name="*") == [TWO.id, ONE.id] and ids(name="*/two") == []
        assert views.summaries(images.index, name="two")[0].repo_tags == ["two:a"]
        assert ids(name="registry.example:5000/team/*") == [TWO.id]

    run(work)


def test_inspect(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(TWO))
        index, snapshots = stage.images.index, stage.images.snapshots
        shown = msgspec.to_builtins(views.inspect(index, snapshots, "two:a"))
        assert shown["Id"] == TWO.id and shown["Created"] == "2021-01-02T03:04:05Z"
        assert not {"Parent", "Comment", "Author", "Variant", "OsVersion", "Container", "ContainerConfig"} & {*shown}
        assert shown["DockerVersion"] == shown["EngineVersion"] == "26.1.3"
        assert shown["RootFS"] == {"Type": "layers", "Layers": [digest(LOW), digest(HIGH)]}
        assert (shown["Architecture"], shown["Os"], shown["Size"]) == ("amd64", "linux", 3007)
        assert shown["Config"] == {"User": "u", "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
        assert shown["RepoDigests"] == []
        older = msgspec.to_builtins(views.inspect(index, snapshots, "two:a", maker=True))
        assert older["Container"] == "" and older["ContainerConfig"]["Cmd"] is None
        data = shown["GraphDriver"]["Data"]
        assert shown["GraphDriver"]["Name"] == "overlay2" and {"name"} <= set(os.listdir(data["UpperDir"] + "/etc"))
        assert os.listdir(data["LowerDir"] + "/bin") == ["sh"]

    run(work)


def test_history(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(TWO))
        top, high, low = views.history(stage.images.index, stage.images.snapshots, "two:a")
        assert (top.id, top.size, top.tags) == (TWO.id, 0, ["registry.example:5000/team/two:b", "two:a"])
        assert (high.id, high.size, high.tags) == ("<missing>", 4, None) and low.size == 3003
        assert low.created == 1609556645 and low.created_by.endswith("layer 0")

    run(work)


# --- delete ---------------------------------------------------------------------------------------


def lines(done: list[Any]) -> list[dict[str, str]]:
    return [msgspec.to_builtins(line) for line in done]


def test_delete_by_name(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO))
        assert lines(await stage.images.delete("two:a")) == [{"Untagged": "two:a"}]
        assert stage.images.get(TWO.id).familiar_tags == ["registry.example:5000/team/two:b"]
        chains = chain_ids([digest(LOW), digest(HIGH)])
        assert lines(await stage.images.delete("registry.example:5000/team/two:b")) == [
            {"Untagged": "registry.example:5000/team/two:b"},
            {"Deleted": TWO.id},
            {"Deleted": chains[1]},
        ], "the lower layer belongs to the other image too"
        assert lines(await stage.images.delete("one")) == [
            {"Untagged": "one:latest"},
            {"Deleted": ONE.id},
            {"Deleted": chains[0]},
        ]
        await stage.images.close()
        assert stage.on_disk() == ([], [], [])
        assert stage.told()[-4:] == [("untag", TWO.id), ("delete", TWO.id), ("untag", ONE.id), ("delete", ONE.id)]
        for name in ("one", "No"):
            with pytest.raises(NotFound, match=f"No such image: {name}"):
                await stage.images.delete(name)

    run(work)


def test_delete_by_id(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, TWO))
        short = TWO.id[7:19]
        with pytest.raises(Conflict) as caught:
            await stage.images.delete(short)
        assert caught.value.message == (
            f"conflict: unable to delete {short} (must be forced) - image is referenced in multiple repositories"
        )
        assert [line.get("Untagged") for line in lines(await stage.images.delete(short, force=True))][:2] == [
            "two:a",
            "registry.example:5000/team/two:b",
        ]
        assert {"Untagged": "one:latest"} in lines(await stage.images.delete(ONE.id))
        assert len(stage.images) == 0

    run(work)


def test_delete_of_an_image_in_use(run: Run) -> None:
    async def work(stage: Stage) -> None:
        await stage.load(docker_archive(ONE))
        short = ONE.id[7:19]
        stopped = ImageUser("c" * 64, "/stopped", False)
        running = ImageUser("d" * 64, "/running", True)

        async def refused(name: str, force: bool = False) -> str:
            with pytest.raises(Conflict) as caught:
                await stage.images.delete(name, force=force)
            assert stage.images.get("one").id == ONE.id
            return caught.value.message

        stage.users[ONE.id] = [stopped]
        assert await refused("one") == (
            'conflict: unable to remove repository reference "one" (must force) - '
            f"container cccccccccccc is using its referenced image {short}"
        )
        assert await refused(short) == (
            f"conflict: unable to delete {short} (must be forced) - "
            "image is being used by stopped container cccccccccccc"
        )
        stage.users[ONE.id] = [stopped, running]
        for force in (False, True):
            assert await refused(short, force) == (
                f"conflict: unable to delete {short} (cannot be forced) - "
                "image is being used by running container dddddddddddd"
            )
        assert lines(await stage.images.delete("one", force=True)) == [{"Untagged": "one:latest"}]
        assert stage.images.get(ONE.id).tags == (), "the name goes, the image stays for its container"
        stage.users[ONE.id] = [stopped]
        await stage.snapshots.prepare("c", stage.images.get(ONE.id).chain_ids[-1])
        assert lines(await stage.images.delete(ONE.id, force=True)) == [{"Deleted": ONE.id}]
        assert len(stage.on_disk()[0]) == 2, "its container still stands on the layer"
        await stage.snapshots.remove("c")
        assert stage.on_disk()[0] == []

    run(work)


def test_load_and_delete_at_once(run: Run) -> None:
    async def work(stage: Stage) -> None:
        for _ in range(5):
            await stage.load(docker_archive(ONE, TWO))
            await asyncio.gather(
                stage.load(docker_archive(ONE, TWO)),
                stage.images.delete("one"),
                stage.images.delete(TWO.id, force=True),
                return_exceptions=True,
            )
            for record in stage.images:
                assert all(stage.snapshots.layer(chain_id) for chain_id in record.chain_ids)
                assert (stage.root / "content/sha256" / record.id[7:]).exists()

    run(work)


# --- after a crash --------------------------------------------------------------------------------


def test_what_a_power_failure_may_have_torn_is_dropped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_settling(self: OverlaySnapshots) -> None:
        pass

    async def load(stage: Stage) -> None:
        await stage.load(docker_archive(ONE))
        await stage.images.close()
        monkeypatch.setattr(OverlaySnapshots, "settle", no_settling)
        monkeypatch.setattr(ImageStore, "_settle_soon", lambda self: None)
        await stage.load(docker_archive(TWO))

    async def same_boot(stage: Stage) -> None:
        assert len(stage.images) == 2

    async def next_boot(stage: Stage) -> None:
        assert [record.id for record in stage.images] == [ONE.id]
        assert len(stage.on_disk()[0]) == 1 and stage.on_disk()[1] == [ONE.id[7:]]

    run(load)
    run(same_boot)
    monkeypatch.setattr("engine.storage.overlay._boot_id", lambda: "another")
    run(next_boot)


def test_an_image_without_its_layer_or_configuration_is_dropped(run: Run, tmp_path: Path) -> None:
    async def load(stage: Stage) -> None:
        await stage.load(docker_archive(ONE, BARE))
        layer = stage.snapshots.layer(digest(OTHER))
        assert layer is not None
        os.rename(tmp_path / "layers" / str(layer.number), tmp_path / "lost")
        (tmp_path / "content/sha256" / ONE.id[7:]).unlink()

    async def after(stage: Stage) -> None:
        assert len(stage.images) == 0 and stage.on_disk() == ([], [], [])
        await stage.load(docker_archive(ONE, BARE))
        assert len(stage.images) == 2

    run(load)
    run(after)
