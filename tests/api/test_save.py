"""Archives of `docker save`: readable by every reader, with the layers' original bytes, and
loadable again."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.engine.client import Answer
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Image, Node, busybox_layer, digest, directory, docker_archive, symlink, tar

pytestmark = pytest.mark.own

BASE = busybox_layer()
NOISE = random.Random(1).randbytes(70_000)
TOP = tar([directory("etc/"), Node("etc/mark", NOISE), Node("etc/.wh.group")], tarfile.GNU_FORMAT)
FIRST = Image([BASE, TOP], ["first:a", "first:b", "registry.example:5000/team/first:c"], {"Cmd": ["cat", "/etc/mark"]})
SECOND = Image([BASE, tar([Node("other")])], ["second:latest"], {"Cmd": ["true"]})


@pytest.fixture
def loaded(engine: TempEngine) -> TempEngine:
    archive = docker_archive(FIRST, SECOND)
    assert engine.request("POST", "/v1.24/images/load", archive, {"Content-Type": "application/x-tar"}).status == 200
    return engine


def members(answer: Answer) -> dict[str, bytes]:
    """Regular members by name; links are followed, as a reader would."""
    assert answer.status == 200, answer
    assert answer.headers["content-type"] == "application/x-tar"
    found = {}
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as archive:
        names = archive.getnames()
        assert len(names) == len(set(names))
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                found[member.name] = file.read()
    return found


def test_the_three_layouts(loaded: TempEngine) -> None:
    found = members(loaded.request("GET", "/v1.24/images/get?names=first&names=second:latest"))
    for name, data in found.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(data).hexdigest() == name.rpartition("/")[2]
    layers = {digest(layer): layer for layer in (BASE, TOP, SECOND.layers[1])}
    for diff_id, layer in layers.items():
        assert found[f"blobs/sha256/{diff_id[7:]}"] == layer

    items = {item["Config"]: item for item in json.loads(found["manifest.json"])}
    assert items[f"blobs/sha256/{FIRST.id[7:]}"]["RepoTags"] == ["first:a", "first:b"]
    assert items[f"blobs/sha256/{SECOND.id[7:]}"]["RepoTags"] == ["second:latest"]
    assert [found[name] for name in items[f"blobs/sha256/{FIRST.id[7:]}"]["Layers"]] == [BASE, TOP]

    assert json.loads(found["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads(found["index.json"])
    names = {entry["annotations"]["io.containerd.image.name"]: entry["digest"] for entry in index["manifests"]}
    assert set(names) == {f"docker.io/library/{name}" for name in ("first:a", "first:b", "second:latest")}
    manifest = json.loads(found[f"blobs/sha256/{names['docker.io/library/first:a'][7:]}"])
    assert manifest["config"]["digest"] == FIRST.id
    assert [layer["size"] for layer in manifest["layers"]] == [len(BASE), len(TOP)]

    repositories = json.loads(found["repositories"])
    assert set(repositories) == {"first", "second"}
    top = repositories["first"]["a"]
    assert found[f"{top}/VERSION"] == b"1.0"
    assert found[f"{top}/layer.tar"] == TOP
    document = json.loads(found[f"{top}/json"])
    assert document["id"] == top and document["config"]["Cmd"] == ["cat", "/etc/mark"]
    assert found[f"{document['parent']}/layer.tar"] == BASE


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("first:b", ["first:b"]),
        ("registry.example:5000/team/first:c", ["registry.example:5000/team/first:c"]),
        (FIRST.id, None),
        (FIRST.id[7:19], None),
    ],
)
def test_one_image(loaded: TempEngine, name: str, tags: list[str] | None) -> None:
    found = members(loaded.request("GET", f"/v1.24/images/{name}/get"))
    (item,) = json.loads(found["manifest.json"])
    assert item["RepoTags"] == tags
    assert len(json.loads(found["index.json"])["manifests"]) == 1
    assert ("repositories" in found) is (tags is not None)


def test_what_is_not_there(loaded: TempEngine) -> None:
    for target in ("nothing/get", "get?names=first:a&names=nothing", "get?names=first:x"):
        answer = loaded.request("GET", f"/v1.24/images/{target}")
        assert answer.status == 404 and "No such image" in answer.message
    assert loaded.request("GET", "/v1.24/images/get").status == 400


def test_through_the_cli_and_back(loaded: TempEngine) -> None:
    path = loaded.base / "saved.tar"
    loaded.docker("save", "-o", str(path), "first:a", "second")
    loaded.docker("rmi", "-f", FIRST.id, SECOND.id)
    out = loaded.docker("load", "-i", str(path)).out
    assert out.splitlines() == ["Loaded image: first:a", "Loaded image: second:latest"]
    assert loaded.request("GET", "/v1.24/images/first:a/json").json()["Id"] == FIRST.id
    done = loaded.docker("run", "--rm", "--network", "none", "first:a", "cat", "/etc/mark", status=0)
    assert done.out


def test_an_image_with_a_layer_that_replaces_its_own_files(engine: TempEngine) -> None:
    """Under another name, by a link: a name itself occurs once."""
    way = [directory("d/"), symlink("way", "d"), directory("way/sub")]
    layer = tar([*way, Node("d/f", b"first" * 1000), Node("way/f", b"second"), Node("d/sub", b"a file now")])
    image = Image([layer], ["odd:latest"], {})
    engine.request("POST", "/v1.24/images/load", docker_archive(image), {"Content-Type": "application/x-tar"})
    found = members(engine.request("GET", "/v1.24/images/odd/get"))
    assert found[f"blobs/sha256/{digest(layer)[7:]}"] == layer
    engine.docker("rmi", "odd")


def test_others_read_it(loaded: TempEngine, tmp_path: Path) -> None:
    archive = tmp_path / "saved.tar"
    archive.write_bytes(loaded.request("GET", "/v1.24/images/first:a/get").body)
    for at, source in enumerate(
        (f"docker-archive:{archive}", f"docker-archive:{archive}:first:a", f"oci-archive:{archive}:a")
    ):
        copied = tmp_path / str(at)
        done = subprocess.run(["skopeo", "copy", source, f"dir:{copied}"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads((copied / "manifest.json").read_bytes())["config"]["digest"] == FIRST.id
    if shutil.which("podman"):
        store = ("--root", str(tmp_path / "root"), "--runroot", str(loaded.base / "pod"), "--storage-driver", "vfs")
        podman = ["podman", *store]
        done = subprocess.run([*podman, "load", "-i", str(archive)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        listed = subprocess.run([*podman, "images", "--no-trunc", "-q"], capture_output=True, text=True, check=True)
        assert FIRST.id in listed.stdout


def test_a_client_that_leaves(loaded: TempEngine) -> None:
    def open_layers() -> list[str]:
        found = []
        for name in os.listdir(f"/proc/{loaded.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{loaded.pid}/fd/{name}"))
        return [
            path for path in found if path.startswith(f"{loaded.root}/layers/")
        ]  # but not wait for the write-back, which holds the directory

    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(loaded.socket)
            connection.sendall(b"GET /v1.24/images/first/get HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    until("the files are closed", lambda: open_layers() == [])
