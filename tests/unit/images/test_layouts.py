"""OCI image layouts as BuildKit and skopeo write them: an index of several platforms, and
attestations.

Needs root, because layers are extracted.
"""

from __future__ import annotations

import gzip
import json
import os
from typing import Any

import pytest

from engine.errors import EngineError, InvalidParameter, NotFound
from engine.images.platforms import HOST, text_of
from engine.wire.images import Platform
from tests.support.images.archives import Image, Node, digest, tar
from tests.unit.images.test_store import Run, Stage, pieces, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
__all__ = ["run"]

OCI = "application/vnd.oci.image"
HERE = {"os": "linux", "architecture": HOST.architecture}
FOREIGN = {"os": "linux", "architecture": "s390x"}
UNKNOWN = {"os": "unknown", "architecture": "unknown"}
ATTESTS = {"vnd.docker.reference.type": "attestation-manifest"}
NAME = {"io.containerd.image.name": "docker.io/library/multi:1"}


class Layout:
    """An image layout being written."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def blob(self, data: bytes, kind: str, **fields: Any) -> dict[str, Any]:
        self._blobs[digest(data)] = data
        return {"mediaType": f"{OCI}.{kind}", "digest": digest(data), "size": len(data), **fields}

    def image(self, platform: dict[str, str], **fields: Any) -> dict[str, Any]:
        """An image of one layer, whose content names its platform."""
        image = Image([tar([Node("etc/platform", "/".join(platform.values()).encode())])])
        document = json.loads(image.configuration()) | platform
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": self.blob(json.dumps(document).encode(), "config.v1+json"),
            "layers": [self.blob(gzip.compress(layer, mtime=0), "layer.v1.tar+gzip") for layer in image.layers],
        }
        return self.blob(json.dumps(manifest).encode(), "manifest.v1+json", platform=platform, **fields)

    def attestation(self, **fields: Any) -> dict[str, Any]:
        """A manifest of BuildKit about another one. Its layers are no archives."""
        config = json.dumps({"architecture": "unknown", "os": "unknown", "rootfs": {"diff_ids": [digest(b"{}")]}})
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(config.encode(), "config.v1+json"),
            "layers": [self.blob(b"{}", "layer.v1.tar")],
        }
        fields = {"platform": UNKNOWN, "annotations": ATTESTS} | fields
        return self.blob(json.dumps(manifest).encode(), "manifest.v1+json", **fields)

    def index(self, *entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
        document = {"schemaVersion": 2, "manifests": entries}
        return self.blob(json.dumps(document).encode(), "index.v1+json", **fields)

    def archive(self, *entries: dict[str, Any]) -> bytes:
        nodes = [Node(f"blobs/sha256/{name[7:]}", data) for name, data in self._blobs.items()]
        top = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
        return tar([Node("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'), *nodes, Node("index.json", top)])


def loaded(run: Run, data: bytes, platform: Platform | None = None) -> list[tuple[str, list[str]]]:
    """Architecture and names of the images that a load makes."""
    found: list[tuple[str, list[str]]] = []

    async def work(stage: Stage) -> None:
        async for _ in stage.images.load(pieces(data), platform=platform):
            pass
        found.extend((record.config.architecture, record.familiar_tags) for record in stage.images)

    run(work)
    return found


@pytest.mark.parametrize("kind", ["v1.tar+gzip+encrypted", "nydus.blob.v1"])
def test_a_layer_that_cannot_be_extracted(run: Run, kind: str) -> None:
    layout = Layout()
    entry = layout.image(HERE)
    manifest = json.loads(layout._blobs[entry["digest"]])
    manifest["layers"][0]["mediaType"] = f"{OCI}.layer.{kind}"
    with pytest.raises(InvalidParameter, match="unsupported layer type"):
        loaded(run, layout.archive(layout.blob(json.dumps(manifest).encode(), "manifest.v1+json", platform=HERE)))


def test_an_index_with_attestations(run: Run) -> None:
    """As `docker buildx build --output type=oci` writes it."""
    layout = Layout()
    index = layout.index(
        layout.image(FOREIGN), layout.image(HERE), layout.attestation(), layout.attestation(), annotations=NAME
    )
    assert loaded(run, layout.archive(index)) == [(HOST.architecture, ["multi:1"])]


@pytest.mark.parametrize("missing", ["platform", "annotations"])
def test_an_attestation_beside_an_image(run: Run, missing: str) -> None:
    """One of the two marks is enough, and it need not be in an inner index."""
    layout = Layout()
    marked = layout.attestation(**{missing: None})
    assert loaded(run, layout.archive(layout.image(HERE, annotations=NAME), marked)) == [
        (HOST.architecture, ["multi:1"])
    ]


def test_a_platform_is_chosen(run: Run) -> None:
    layout = Layout()
    index = layout.index(layout.image(FOREIGN), layout.image(HERE), layout.attestation(), annotations=NAME)
    wanted = Platform(os="linux", architecture="s390x")
    assert loaded(run, layout.archive(index), wanted) == [("s390x", ["multi:1"])]


@pytest.mark.parametrize(
    ("platform", "kind", "words"),
    [
        (None, InvalidParameter, f"no matching manifest for {text_of(HOST)} in the archive"),
        (Platform(os="linux", architecture="riscv64"), InvalidParameter, "no matching manifest for linux/riscv64"),
    ],
)
def test_an_index_without_the_platform(
    run: Run, platform: Platform | None, kind: type[EngineError], words: str
) -> None:
    layout = Layout()
    index = layout.index(layout.image(FOREIGN), layout.attestation(), annotations=NAME)
    with pytest.raises(kind, match=words):
        loaded(run, layout.archive(index), platform)


def test_an_image_for_another_platform(run: Run) -> None:
    layout = Layout()
    archive = layout.archive(layout.image(HERE, annotations=NAME))
    with pytest.raises(NotFound, match="multi:1 was found but its platform"):
        loaded(run, archive, Platform(os="linux", architecture="riscv64"))


def test_attestations_alone_are_no_image(run: Run) -> None:
    layout = Layout()
    with pytest.raises(InvalidParameter, match="no image in it"):
        loaded(run, layout.archive(layout.attestation()))
