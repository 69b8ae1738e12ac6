"""Generated image archives with the same bytes every time: Docker's format, OCI layout, and the
legacy layout.

For the tests, the benchmarks and `make demo`: `python tests/support/images/archives.py
busybox:latest > busybox.tar`.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BUSYBOX = Path("/bin/busybox")
EPOCH = 1_700_000_000
CREATED = "2023-11-14T22:13:20Z"


@dataclasses.dataclass(frozen=True)
class Node:
    """One entry of a layer."""

    name: str
    data: bytes = b""
    type: bytes = tarfile.REGTYPE
    mode: int = 0o644
    link: str = ""
    uid: int = 0
    gid: int = 0
    mtime: float = EPOCH
    device: tuple[int, int] = (0, 0)
    pax: tuple[tuple[str, str], ...] = ()


def directory(name: str, mode: int = 0o755, **more: Any) -> Node:
    return Node(name, type=tarfile.DIRTYPE, mode=mode, **more)


def symlink(name: str, target: str, **more: Any) -> Node:
    return Node(name, type=tarfile.SYMTYPE, mode=0o777, link=target, **more)


def hard_link(name: str, target: str, **more: Any) -> Node:
    return Node(name, type=tarfile.LNKTYPE, link=target, **more)


def tar(nodes: Iterable[Node], form: int = tarfile.PAX_FORMAT) -> bytes:
    """The entries as an archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for node in nodes:
            info = tarfile.TarInfo(node.name)
            info.type, info.mode, info.linkname = node.type, node.mode, node.link
            info.uid, info.gid, info.mtime = node.uid, node.gid, node.mtime
            info.devmajor, info.devminor = node.device
            info.size = len(node.data)
            info.pax_headers = dict(node.pax)
            archive.addfile(info, io.BytesIO(node.data))
    return out.getvalue()


@dataclasses.dataclass(frozen=True)
class Image:
    """Contents of an archive: layers as tar streams, lowest first, and `config` of the image
    configuration.
    """

    layers: Sequence[bytes]
    names: Sequence[str] = ()
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    created: str = CREATED
    parent: Image | None = None
    """The parent image, which has one history entry less."""

    def history(self) -> list[dict[str, Any]]:
        if self.parent is not None:
            return [*self.parent.history(), {"created": self.created, "created_by": "sh"}]
        history: list[dict[str, Any]] = [
            {"created": self.created, "created_by": f"/bin/sh -c #(nop) ADD layer {at}"}
            for at in range(len(self.layers))
        ]
        return [*history, {"created": self.created, "created_by": "/bin/sh -c #(nop) CMD", "empty_layer": True}]

    def configuration(self) -> bytes:
        document = {
            "architecture": "amd64",
            "os": "linux",
            "created": self.created,
            "docker_version": "26.1.3",
            "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "Labels": None, **self.config},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in self.layers]},
            "history": self.history(),
        }
        return json.dumps(document, sort_keys=True).encode()

    @property
    def id(self) -> str:
        return digest(self.configuration())


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def docker_archive(*images: Image, compress: Any = lambda data: data, reverse: bool = False) -> bytes:
    """The format of `docker save` up to version 24.

    `compress` packs each layer, `reverse` puts manifest.json first.
    """
    nodes: dict[str, Node] = {}
    manifest = []
    for image in images:
        config = image.id[7:] + ".json"
        nodes[config] = Node(config, image.configuration())
        names = []
        for layer in image.layers:
            folder = digest(layer)[7:]
            nodes[folder] = directory(folder)
            nodes[f"{folder}/layer.tar"] = Node(f"{folder}/layer.tar", compress(layer))
            names.append(f"{folder}/layer.tar")
        item = {"Config": config, "RepoTags": list(image.names) or None, "Layers": names}
        if image.parent is not None:
            item["Parent"] = image.parent.id
        manifest.append(item)
    nodes["manifest.json"] = Node("manifest.json", json.dumps(manifest).encode())
    ordered = list(nodes.values())
    return tar(ordered[::-1] if reverse else ordered)


def legacy_archive(image: Image) -> bytes:
    """The layout of the API document, as Docker 1.9 wrote it."""
    nodes: list[Node] = []
    parent = ""
    for at, layer in enumerate(image.layers):
        layer_id = hashlib.sha256(f"{at} {parent}".encode() + layer).hexdigest()
        document: dict[str, Any] = {
            "id": layer_id,
            "created": image.created,
            "container_config": {"Cmd": ["/bin/sh", "-c", f"#(nop) ADD layer {at}"]},
        }
        if parent:
            document["parent"] = parent
        if at == len(image.layers) - 1:
            document.update(architecture="amd64", os="linux", config=image.config, docker_version="1.9.1", Size=7)
        nodes += [
            directory(f"{layer_id}/"),
            Node(f"{layer_id}/VERSION", b"1.0"),
            Node(f"{layer_id}/json", json.dumps(document).encode()),
            Node(f"{layer_id}/layer.tar", layer),
        ]
        parent = layer_id
    repositories: dict[str, dict[str, str]] = {}
    for name in image.names:
        repository, _, tag = name.rpartition(":")
        repositories.setdefault(repository, {})[tag] = parent
    if repositories:
        nodes.append(Node("repositories", json.dumps(repositories).encode()))
    return tar(nodes)


def oci_archive(image: Image, compress: Any = gzip.compress, annotation: str = "io.containerd.image.name") -> bytes:
    """An OCI image layout in a tar file."""
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, media_type: str) -> dict[str, Any]:
        blobs[digest(data)] = data
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(image.configuration(), "application/vnd.oci.image.config.v1+json"),
        "layers": [blob(compress(layer), "application/vnd.oci.image.layer.v1.tar+gzip") for layer in image.layers],
    }
    entry = blob(json.dumps(manifest).encode(), manifest["mediaType"])
    index = {"schemaVersion": 2, "manifests": [{**entry, "annotations": {annotation: name}} for name in image.names]}
    index["manifests"] = index["manifests"] or [entry]
    return tar(
        [
            Node("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
            directory("blobs/"),
            directory("blobs/sha256/"),
            *(Node(f"blobs/sha256/{name[7:]}", data) for name, data in blobs.items()),
            Node("index.json", json.dumps(index).encode()),
        ]
    )


def busybox_layer() -> bytes:
    """A root file system of busybox and its applets.

    The binary must be static, as Debian's busybox-static or busybox is.
    """
    applets = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    folders = ("bin/", "dev/", "etc/", "home/", "proc/", "root/", "sys/", "usr/", "usr/bin/", "usr/sbin/", "var/")
    return tar(
        [
            *(directory(name) for name in folders),
            directory("tmp/", 0o1777),
            Node("bin/busybox", BUSYBOX.read_bytes(), mode=0o755),
            *(symlink(f"bin/{name}", "busybox") for name in sorted(applets) if name != "busybox"),
            Node("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n"),
            Node("etc/group", b"root:x:0:\nnobody:x:65534:\n"),
        ]
    )


def busybox(*names: str, config: dict[str, Any] | None = None) -> Image:
    """The image that the tests run."""
    return Image([busybox_layer()], names or ("busybox:latest",), {"Cmd": ["sh"], **(config or {})})


@functools.cache
def busybox_archive() -> bytes:
    """`busybox:latest` in the format of `docker save`."""
    return docker_archive(busybox())


if __name__ == "__main__":
    sys.stdout.buffer.write(docker_archive(busybox(*sys.argv[1:])))
