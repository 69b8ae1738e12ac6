"""A real registry, with and without passwords and TLS: pull and push through the API and the docker
CLI, verified with skopeo."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import os
import shutil
import socket
import stat
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import zstandard

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine, until
from tests.support.images import registry, trees
from tests.support.images.archives import (
    Image,
    Node,
    busybox_layer,
    digest,
    directory,
    docker_archive,
    hard_link,
    symlink,
    tar,
)
from tests.support.images.registry import DOCKER_MANIFEST, OCI_INDEX, PASSWORD, USER, Registry

pytestmark = pytest.mark.own


def _marked(layer: bytes) -> bytes:
    """The layer with one more file, which makes it another one than the shared engine has."""
    out, mark = io.BytesIO(layer), tarfile.TarInfo("etc/mark")
    mark.size = 4
    with tarfile.open(fileobj=out, mode="a") as archive:
        archive.addfile(mark, io.BytesIO(b"mark"))
    return out.getvalue()


BASE = _marked(busybox_layer())
CHANGES = tar(
    [
        directory("etc/"),
        Node("etc/noise", os.urandom(2_000_000), mode=0o4755, uid=7, gid=8),
        Node("etc/.wh.group"),
        hard_link("etc/again", "etc/noise"),
        symlink("etc/link", "../nowhere"),
        Node("etc/caps", b"c", pax=(("SCHILY.xattr.user.note", "kept"),)),
        directory("opt/", 0o1777),
        Node("opt/.wh..wh..opq"),
    ]
)
IMAGE = Image([BASE, CHANGES], ["thing:latest"], {"Cmd": ["cat", "/etc/caps"], "Labels": {"a": "b"}})


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)


@pytest.fixture(scope="module")
def plain() -> Iterator[Registry]:
    with Registry() as found:
        yield found


@pytest.fixture(scope="module")
def guarded() -> Iterator[Registry]:
    with Registry(password=True, tls=True) as found:
        yield found


def pull(engine: TempEngine, name: str, tag: str = "latest", headers: dict[str, str] | None = None) -> list[Any]:
    answer = engine.request("POST", f"/v1.24/images/create?fromImage={name}&tag={tag}", None, headers)
    assert answer.status == 200, answer
    return [json.loads(line) for line in answer.body.splitlines()]


def push(engine: TempEngine, name: str, tag: str = "latest", headers: dict[str, str] | None = None) -> list[Any]:
    answer = engine.request("POST", f"/v1.24/images/{name}/push?tag={tag}", None, headers)
    assert answer.status == 200, answer
    return [json.loads(line) for line in answer.body.splitlines()]


def load(engine: TempEngine, image: Image, *names: str) -> None:
    answer = engine.request("POST", "/v1.24/images/load", docker_archive(image), {"Content-Type": "application/x-tar"})
    assert answer.status == 200, answer
    for name in names:
        repository, _, tag = name.rpartition(":")
        tagged = engine.request("POST", f"/v1.24/images/{image.names[0]}/tag?repo={repository}&tag={tag}")
        assert tagged.status == 201, tagged


def skopeo(*arguments: str) -> str:
    done = subprocess.run(["skopeo", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def errors(said: list[Any]) -> list[str]:
    return [value["error"] for value in said if "error" in value]


# --- pull -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "compress", "media_type"),
    [
        ("tar+gzip", _gzip, DOCKER_MANIFEST),
        ("tar+gzip", _gzip, registry.OCI_MANIFEST),
        ("tar+zstd", zstandard.ZstdCompressor().compress, registry.OCI_MANIFEST),
        ("tar", bytes, registry.OCI_MANIFEST),
    ],
    ids=["docker", "oci", "zstd", "plain"],
)
def test_pull_of_each_kind(clean: TempEngine, plain: Registry, kind: str, compress: Any, media_type: str) -> None:
    put = plain.put("team/thing", "v1", IMAGE, kind=kind, compress=compress, media_type=media_type)
    name = f"{plain.host}/team/thing"
    said = pull(clean, name, "v1")
    assert said[0] == {"status": "Pulling from team/thing", "id": "v1"}
    assert said[-2:] == [
        {"status": f"Digest: {put.digest}"},
        {"status": f"Status: Downloaded newer image for {name}:v1"},
    ]
    for blob in put.blobs:
        steps = [value["status"] for value in said if value.get("id") == blob[7:19]]
        order = [
            "Pulling fs layer",
            "Downloading",
            "Verifying Checksum",
            "Download complete",
            "Extracting",
            "Pull complete",
        ]
        assert [step for step in order if step in steps] == order
        assert steps[0] == order[0] and steps[-1] == order[-1]
    downloading = next(value for value in said if value["status"] == "Downloading")
    assert downloading["progressDetail"]["total"] > 0 and downloading["progress"].startswith("[")
    found = clean.request("GET", f"/v1.24/images/{name}:v1/json").json()
    assert found["Id"] == IMAGE.id
    assert found["RepoDigests"] == [f"{name}@{put.digest}"]
    assert pull(clean, name, "v1")[-1] == {"status": f"Status: Image is up to date for {name}:v1"}
    assert clean.docker("run", "--rm", "--network", "none", f"{name}:v1").out == "c"


def test_pull_through_the_cli(clean: TempEngine, plain: Registry) -> None:
    put = plain.put("cli", "latest", IMAGE)
    plain.put("cli", "other", IMAGE)
    name = f"{plain.host}/cli"
    out = clean.docker("pull", name).out
    assert f"Digest: {put.digest}" in out and "Pull complete" in out
    assert clean.docker("pull", "-q", f"{name}@{put.digest}").out.strip() == f"{name}@{put.digest}"
    clean.docker("pull", "-a", name)
    assert set(clean.docker("images", "--format", "{{.Tag}}", name).out.split()) == {"latest", "other"}
    assert clean.docker("run", "--rm", "--network", "none", f"{name}@{put.digest}").out == "c"
    failed = clean.docker("pull", f"{name}:nope", status=1)
    assert f"manifest for {name}:nope not found: manifest unknown" in failed.err


def test_a_pull_through_docker_py(clean: TempEngine, plain: Registry) -> None:
    plain.put("py", "one", IMAGE)
    client = clean.client()
    try:
        image = client.images.pull(f"{plain.host}/py", tag="one")
        assert image.id == IMAGE.id
        events = client.events(since=0, until=int(time.time()) + 1, decode=True, filters={"event": "pull"})
        found = [event for event in events if event["id"] == f"{plain.host}/py:one"]
        assert found[0]["Actor"]["Attributes"] == {"a": "b", "name": f"{plain.host}/py"}
    finally:
        client.close()


def test_what_is_not_there_is_404_before_the_stream(clean: TempEngine, plain: Registry, guarded: Registry) -> None:
    plain.put("there", "latest", IMAGE)
    for target in (
        f"fromImage={plain.host}/there&tag=not",
        f"fromImage={plain.host}/there:not",
        f"fromImage={plain.host}/nowhere&tag=latest",
        f"fromImage={plain.host}/nowhere",
        f"fromImage={plain.host}/there@{digest(b'')}",
        f"fromImage={guarded.host}/x&tag=latest",
    ):
        answer = clean.request("POST", f"/v1.24/images/create?{target}")
        assert answer.status == 404, (target, answer)
        assert answer.message
    for target in (
        "fromImage=UPPER",
        f"fromImage={plain.host}/there&tag=a/b",
        "fromImage=",
        "",
        "fromImage=x&tag=sha256:1",
    ):
        assert clean.request("POST", f"/v1.24/images/create?{target}").status == 400, target
    assert clean.request("POST", "/v1.24/images/create?fromImage=scratch&tag=latest").status == 403
    bad = {"X-Registry-Auth": "%%%"}
    assert (
        clean.request("POST", f"/v1.24/images/create?fromImage={plain.host}/there&tag=latest", None, bad).status == 400
    )


def test_an_index_leads_to_this_host(clean: TempEngine, plain: Registry) -> None:
    put = plain.put("multi", "", IMAGE)
    entries = [
        {"mediaType": put.media_type, "digest": put.digest, "size": len(put.manifest), "platform": platform}
        for platform in ({"os": "linux", "architecture": "s390x"}, {"os": "linux", "architecture": _architecture()})
    ]
    document = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    index = plain.put_manifest("multi", "all", document, OCI_INDEX)
    said = pull(clean, f"{plain.host}/multi", "all")
    assert {"status": f"Digest: {digest(index)}"} in said
    found = clean.request("GET", f"/v1.24/images/{plain.host}/multi:all/json").json()
    assert found["RepoDigests"] == [f"{plain.host}/multi@{digest(index)}"]


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def test_ten_pulls_at_once_download_each_blob_once(clean: TempEngine, plain: Registry) -> None:
    other = Image([BASE, CHANGES, tar([Node("third", os.urandom(500_000))])], (), {"Cmd": ["true"]})
    puts = [plain.put("many", "a", IMAGE), plain.put("many", "b", other)]

    def downloads(blob: str) -> int:
        return len(plain.requests("GET /v2/many/blobs/", blob))

    before = {blob: downloads(blob) for put in puts for blob in put.blobs}
    results: list[list[Any]] = []
    threads = [
        threading.Thread(target=lambda tag=tag: results.append(pull(clean, f"{plain.host}/many", tag)))  # type: ignore[misc]
        for tag in "ababababab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 10 and not any(errors(said) for said in results)
    once_more = {blob: count + 1 for blob, count in before.items()}
    # the registry logs a line at the end of a transfer, which is after the client has all data
    until("its log tells of one each", lambda: {blob: downloads(blob) for blob in before} == once_more)


def test_closing_the_connection_cancels(clean: TempEngine) -> None:
    """The registry sends a layer without end. When the client disconnects, the registry connection
    is closed and the received data removed."""
    config = IMAGE.configuration()
    manifest = {
        "schemaVersion": 2,
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest(config),
            "size": len(config),
        },
        "layers": [
            {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest(bytes([at])), "size": 1 << 40}
            for at in range(2)
        ],
    }
    ended = threading.Semaphore(0)
    begun = threading.Semaphore(0)

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as requests, contextlib.suppress(OSError):
            if connection.recv(1, socket.MSG_PEEK) == b"\x16":
                return
            while line := requests.readline():
                target = line.split()[1].decode()
                while requests.readline().strip():
                    pass
                body = {"/v2/": b"{}", "/v2/x/manifests/y": json.dumps(manifest).encode()}.get(target)
                body = config if target.endswith(digest(config)) else body
                kind = registry.OCI_MANIFEST if "manifests" in target else "application/octet-stream"
                size = 1 << 40 if body is None else len(body)
                connection.sendall(
                    f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode()
                )
                if body is None:
                    begun.release()
                    try:
                        while True:
                            connection.sendall(bytes(65536))
                            threading.Event().wait(0.001)
                    except OSError:
                        ended.release()
                        return
                connection.sendall(body)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            try:
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(clean.socket)
        connection.sendall(
            f"POST /v1.24/images/create?fromImage={host}/x&tag=y HTTP/1.1\r\n".encode()
            + b"Host: x\r\nContent-Length: 0\r\n\r\n"
        )
        for _ in range(2):
            assert begun.acquire(timeout=30 * PATIENCE)
        assert b"200 OK" in connection.recv(65536)
        connection.close()
        for _ in range(2):
            assert ended.acquire(timeout=30 * PATIENCE)
        listener.shutdown(socket.SHUT_RDWR)


# --- push -----------------------------------------------------------------------------------------


def test_push_and_what_others_see(clean: TempEngine, plain: Registry, tmp_path: Path) -> None:
    name = f"{plain.host}/pushed/thing"
    load(clean, IMAGE, f"{name}:v1", f"{plain.host}/pushed/neighbour:v1")
    said = push(clean, name, "v1")
    assert not errors(said), said
    assert said[0] == {"status": f"The push refers to repository [{name}]"}
    assert {value["status"] for value in said if "id" in value} >= {"Preparing", "Pushing", "Pushed"}
    media_type, raw = plain.manifest("pushed/thing", "v1")
    assert media_type == DOCKER_MANIFEST
    assert said[-1]["aux"] == {"Tag": "v1", "Digest": digest(raw), "Size": len(raw)}
    assert said[-2]["status"] == f"v1: digest: {digest(raw)} size: {len(raw)}"
    assert json.loads(raw)["config"]["digest"] == IMAGE.id
    found = clean.request("GET", f"/v1.24/images/{name}:v1/json").json()
    assert found["RepoDigests"] == [f"{name}@{digest(raw)}"]

    again = push(clean, name, "v1")
    assert [value.get("status") for value in again].count("Layer already exists") == 2
    assert again[-1] == said[-1]
    neighbour = push(clean, f"{plain.host}/pushed/neighbour", "v1")
    assert [value.get("status") for value in neighbour].count("Mounted from pushed/thing") == 2
    assert neighbour[-1]["aux"]["Digest"] == digest(raw)

    inspected = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{name}:v1"))
    assert inspected["Digest"] == digest(raw)
    skopeo("copy", "--src-tls-verify=false", f"docker://{name}:v1", f"dir:{tmp_path}")
    layers = json.loads((tmp_path / "manifest.json").read_bytes())["layers"]
    unpacked = [gzip.decompress((tmp_path / layer["digest"][7:]).read_bytes()) for layer in layers]
    assert unpacked == [BASE, CHANGES]


def test_from_skopeo_and_back_with_equal_digests_and_trees(clean: TempEngine, plain: Registry, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(docker_archive(IMAGE))
    source = f"docker://{plain.host}/round/source:v1"
    skopeo("copy", "--dest-tls-verify=false", f"docker-archive:{tmp_path}/archive", source)
    pull(clean, f"{plain.host}/round/source", "v1")
    root = _layers(clean, f"{plain.host}/round/source:v1")
    clean.docker("tag", f"{plain.host}/round/source:v1", f"{plain.host}/round/copy:v1")
    said = push(clean, f"{plain.host}/round/copy", "v1")
    theirs = json.loads(skopeo("inspect", "--tls-verify=false", source))["Digest"]
    assert said[-1]["aux"]["Digest"] == theirs
    clean.docker("rmi", "-f", IMAGE.id)
    load(clean, IMAGE)
    assert _layers(clean, IMAGE.id) == root


def _layers(engine: TempEngine, name: str) -> list[Any]:
    """The trees of an image's layers as stored on disk, lowest first."""
    data = engine.request("GET", f"/v1.24/images/{name}/json").json()["GraphDriver"]["Data"]
    found = [data["UpperDir"], *data.get("LowerDir", "").split(":")]
    snapshots = [trees.snapshot(path) for path in reversed(found) if path]
    for tree in snapshots:
        # The root, which has no entry in the layers, and whiteouts have the time of the extraction.
        del tree["."]
        tree.update(
            {name: (*entry[:3], 0, *entry[4:]) for name, entry in tree.items() if entry[0] == oct(stat.S_IFCHR)}
        )
    return snapshots


def test_an_oci_image_stays_one(clean: TempEngine, plain: Registry) -> None:
    put = plain.put("oci/from", "v1", IMAGE, kind="tar+zstd", compress=zstandard.ZstdCompressor().compress)
    pull(clean, f"{plain.host}/oci/from", "v1")
    clean.docker("tag", f"{plain.host}/oci/from:v1", f"{plain.host}/oci/to:v1")
    said = push(clean, f"{plain.host}/oci/to", "v1")
    assert not errors(said)
    assert plain.manifest("oci/to", "v1") == (put.media_type, put.manifest)


def test_push_of_every_tag_through_the_cli(clean: TempEngine, plain: Registry) -> None:
    name = f"{plain.host}/tags"
    load(clean, IMAGE, f"{name}:a", f"{name}:b")
    clean.docker("push", "-a", name)
    assert sorted(json.loads(plain.request("GET", "/v2/tags/tags/list")[2])["tags"]) == ["a", "b"]
    out = clean.docker("push", f"{name}:a").out
    assert "Layer already exists" in out and "a: digest: sha256:" in out


def test_unknown_images_are_404(clean: TempEngine, plain: Registry) -> None:
    for name, tag in ((f"{plain.host}/unknown", ""), (f"{plain.host}/unknown", "x"), ("nothing", "latest")):
        answer = clean.request("POST", f"/v1.24/images/{name}/push?tag={tag}")
        assert answer.status == 404, answer
        assert "An image does not exist locally with the tag" in answer.message


# --- passwords and TLS ----------------------------------------------------------------------------


def test_passwords(clean: TempEngine, guarded: Registry) -> None:
    name = f"{guarded.host}/private/thing"
    load(clean, IMAGE, f"{name}:v1")
    assert errors(push(clean, name, "v1")) == ["no basic auth credentials"]
    wrong = {"X-Registry-Auth": base64.b64encode(json.dumps({"username": USER, "password": "?"}).encode()).decode()}
    assert "unauthorized" in errors(push(clean, name, "v1", wrong))[0]
    assert not errors(push(clean, name, "v1", guarded.auth))
    clean.docker("rmi", "-f", IMAGE.id)
    for headers in ({}, wrong, {"X-Registry-Auth": "e30="}):
        answer = clean.request("POST", f"/v1.24/images/create?fromImage={name}&tag=v1", None, headers)
        assert answer.status == 404 and "pull access denied" in answer.message
    assert not errors(pull(clean, name, "v1", guarded.auth))


def test_skopeo_both_ways_with_passwords_and_tls(clean: TempEngine, guarded: Registry, tmp_path: Path) -> None:
    name = f"{guarded.host}/both/ways"
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    shutil.copy(guarded.authority, certificates / "ca.crt")
    credentials = f"{USER}:{PASSWORD}"
    load(clean, IMAGE, f"{name}:ours")
    pushed = push(clean, name, "ours", guarded.auth)[-1]["aux"]["Digest"]
    here = _layers(clean, f"{name}:ours")
    clean.docker("rmi", "-f", IMAGE.id)
    source = ("--src-cert-dir", str(certificates), "--src-creds", credentials, f"docker://{name}:ours")
    target = ("--dest-cert-dir", str(certificates), "--dest-creds", credentials)
    skopeo("copy", *source, f"dir:{tmp_path}/dir")
    assert digest((tmp_path / "dir" / "manifest.json").read_bytes()) == pushed
    skopeo("copy", *target, f"dir:{tmp_path}/dir", f"docker://{name}:theirs")
    skopeo("copy", "--format", "oci", *target, f"dir:{tmp_path}/dir", f"docker://{name}:oci")
    for tag in ("theirs", "oci"):
        assert not errors(pull(clean, name, tag, guarded.auth))
        found = clean.request("GET", f"/v1.24/images/{name}:{tag}/json").json()
        # As an OCI image it has another configuration, because skopeo drops fields that OCI does
        # not define.
        assert (found["Id"] == IMAGE.id) is (f"{name}@{pushed}" in found["RepoDigests"]) is (tag == "theirs")
        assert _layers(clean, f"{name}:{tag}") == here
        clean.docker("rmi", "-f", found["Id"])


def test_login(clean: TempEngine, guarded: Registry) -> None:
    body = {"username": USER, "password": PASSWORD, "email": "", "serveraddress": guarded.host}
    begin = clean.log_path.stat().st_size
    answer = clean.request("POST", "/v1.24/auth", body)
    assert (answer.status, answer.json()) == (200, {"Status": "Login Succeeded", "IdentityToken": ""})
    refused = clean.request("POST", "/v1.24/auth", {**body, "password": "?"})
    assert refused.status == 401 and "401 Unauthorized" in refused.message
    assert '"?"' not in clean.log(begin)
    done = clean.docker("login", "-u", USER, "--password-stdin", guarded.host, input=PASSWORD)
    assert "Login Succeeded" in done.out
    load(clean, IMAGE, f"{guarded.host}/logged/in:v1")
    clean.docker("push", f"{guarded.host}/logged/in:v1")
    clean.docker("logout", guarded.host)
    assert "no basic auth credentials" in clean.docker("push", f"{guarded.host}/logged/in:v1", status=1).err


def test_certificates_are_verified_where_the_operator_gave_one(guarded: Registry, tmp_path: Path) -> None:
    guarded.put("tls", "v1", IMAGE)
    directory = tmp_path / guarded.host
    directory.mkdir()
    shutil.copy(guarded.authority, directory / "ca.crt")
    with TempEngine("--registry-certificates", str(tmp_path)) as engine:
        assert not errors(pull(engine, f"{guarded.host}/tls", "v1", guarded.auth))
        engine.docker("rmi", f"{guarded.host}/tls:v1")
        with Registry(tls=True) as other:
            shutil.copy(other.authority, directory / "ca.crt")
        answer = engine.request("POST", f"/v1.24/images/create?fromImage={guarded.host}/tls&tag=v1", None, guarded.auth)
        assert answer.status == 500 and "tls: failed to verify certificate: x509: " in answer.message, answer


def test_search_says_that_there_is_none(clean: TempEngine, plain: Registry) -> None:
    answer = clean.request("GET", f"/v1.24/images/search?term={plain.host}/thing")
    assert answer.status == 500 and "does not offer a search" in answer.message
    assert clean.request("GET", "/v1.24/images/search").status == 400
    assert clean.request("GET", "/v1.24/images/search?term=x&limit=1000").status == 400


@pytest.mark.parametrize("name", ["stars", "is-automated", "is-official"])
def test_search_filters_are_checked_before_the_registry_is_asked(clean: TempEngine, name: str) -> None:
    filters = quote(json.dumps({name: {"a": True}}))
    answer = clean.request("GET", f"/v1.24/images/search?term=127.0.0.1:1/thing&filters={filters}")
    assert (answer.status, answer.message) == (400, f"Invalid filter '{name}=a'")


def test_a_kill_in_the_middle_leaves_nothing(plain: Registry) -> None:
    noise = Image([tar([Node(f"n{at}", os.urandom(3_000_000))]) for at in range(4)], (), {})
    plain.put("killed", "v1", noise, compress=lambda data: gzip.compress(data, 1))
    with TempEngine() as engine:
        engine.load_busybox()
        before = len(os.listdir(engine.root / "layers"))
        for pause in (0.0, 0.02, 0.05, 0.08, 0.12, 0.2, 0.3):
            target = f"/v1.24/images/create?fromImage={plain.host}/killed&tag=v1"
            thread = threading.Thread(target=_ignoring_errors, args=(engine, target))
            thread.start()
            threading.Event().wait(pause)
            engine.restart()
            thread.join()
            images = engine.request("GET", "/v1.24/images/json").json()
            whole = any(f"{plain.host}/killed:v1" in image["RepoTags"] for image in images)
            assert len(os.listdir(engine.root / "layers")) == before + 4 * whole
            assert os.listdir(engine.root / "tmp") == []
            if whole:
                engine.docker("rmi", f"{plain.host}/killed:v1")
        assert not errors(pull(engine, f"{plain.host}/killed", "v1"))


def _ignoring_errors(engine: TempEngine, target: str) -> None:
    try:
        engine.request("POST", target)
    except OSError:
        pass
    except Exception as error:  # http.client's own, when the answer breaks off
        assert "IncompleteRead" in repr(error) or "RemoteDisconnected" in repr(error)
