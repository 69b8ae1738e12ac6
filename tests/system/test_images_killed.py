"""kill -9 of a real daemon at random instants of pulls, loads and deletes: after a restart there
are no orphans, and no image lacks a layer.

The instants are spread over the duration of an undisturbed run of the verb; the seed is in the
message of a failure.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import json
import os
import random
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support import PATIENCE
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Image, Node, docker_archive, tar
from tests.support.images.registry import Registry
from tests.support.nightly import nightly

ROUNDS = 6
"""Number of kills of each verb."""

LAYERS = [tar([Node(f"d{at}/f{number}", os.urandom(20_000)) for number in range(100)]) for at in range(4)]
IMAGE = Image(LAYERS, ["victim:latest", "victim:other"], {})
SHARING = Image([*LAYERS[:2], tar([Node("own", b"own")])], ["sharing:latest"], {})


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with Registry() as found:
        found.put("victim", "v1", IMAGE, compress=lambda data: gzip.compress(data, 1))
        yield found


def whole(engine: TempEngine) -> set[str]:
    """Names of all images. Asserts that the layers of each are complete, byte for byte, and that
    nothing else is on the disk.
    """
    images = engine.request("GET", "/v1.24/images/json?digests=1").json()
    directories: set[str] = set()
    for image in images:
        found = engine.request("GET", f"/v1.24/images/{image['Id']}/json").json()
        data = found["GraphDriver"]["Data"]
        directories.update((data["UpperDir"], *data.get("LowerDir", data["UpperDir"]).split(":")))
        saved = engine.request("GET", f"/v1.24/images/{image['Id']}/get")
        assert saved.status == 200, saved
        with tarfile.open(fileobj=io.BytesIO(saved.body)) as archive:
            for diff_id in found["RootFS"]["Layers"]:
                member = archive.extractfile(f"blobs/sha256/{diff_id[7:]}")
                assert member is not None and hashlib.sha256(member.read()).hexdigest() == diff_id[7:]
    directories.update(
        engine.inspect(container)["GraphDriver"]["Data"]["UpperDir"] for container in engine.containers()
    )
    assert {str(path) for path in (engine.root / "layers").glob("*/diff")} == directories
    blobs = set(os.listdir(engine.root / "content" / "sha256"))
    assert {image["Id"][7:] for image in images} <= blobs
    manifests = sum(any(name != "<none>@<none>" for name in image["RepoDigests"]) for image in images)
    assert len(blobs) <= len(images) + manifests
    assert os.listdir(engine.root / "tmp") == []
    return {name for image in images for name in image["RepoTags"]}


def ignoring_the_kill(work: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        work()


@pytest.mark.parametrize("verb", ["pull", *nightly("load", "delete")])
def test_killed_at_random_instants(registry: Registry, verb: str) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    name = f"{registry.host}/victim:v1"
    archive = docker_archive(IMAGE)
    sharing = docker_archive(SHARING)
    with TempEngine() as engine:

        def pull() -> None:
            engine.request("POST", f"/v1.24/images/create?fromImage={name}")

        def load(data: bytes = archive) -> None:
            engine.request("POST", "/v1.24/images/load", data, {"Content-Type": "application/x-tar"})

        def delete() -> None:
            engine.request("DELETE", f"/v1.24/images/{IMAGE.id}?force=1")

        work = {"pull": pull, "load": load, "delete": delete}[verb]
        load(sharing)
        undisturbed = 0.0
        for number in range(ROUNDS + 1):
            delete()
            if verb == "delete":
                load()
            thread = threading.Thread(target=ignoring_the_kill, args=(work,))
            begin = time.monotonic()
            thread.start()
            if number == 0:  # undisturbed, to measure the duration
                thread.join()
                undisturbed = time.monotonic() - begin
            else:
                threading.Event().wait(chance.uniform(0, 1.1 * undisturbed))
                engine.restart()
                thread.join()
            names = whole(engine)
            there = names - {"sharing:latest"}
            wanted = {name} if verb == "pull" else set(IMAGE.names)
            assert "sharing:latest" in names and there in (set(), wanted), (seed, number, names)
        work()
        assert (whole(engine) == {"sharing:latest"}) is (verb == "delete"), seed
        delete()
        assert engine.request("DELETE", f"/v1.24/images/{SHARING.id}").status == 200
        assert whole(engine) == set() and os.listdir(engine.root / "content" / "sha256") == []


def test_killed_while_a_registry_stalls(registry: Registry) -> None:
    """A partially received layer, and the files extracted from it so far, are removed with the
    daemon."""
    config = IMAGE.configuration()
    packed = gzip.compress(LAYERS[0], 1)
    layers = [
        {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": f"sha256:{at:064}", "size": len(packed)}
        for at in range(4)
    ]
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = json.dumps(
        {"schemaVersion": 2, "config": {"digest": IMAGE.id, "size": len(config)}, "layers": layers}
    ).encode()
    stalled = threading.Semaphore(0)
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as requests, contextlib.suppress(OSError):
            while (line := requests.readline()).startswith(b"GET"):
                while requests.readline().strip():
                    pass
                target = line.split()[1].decode()
                body = {"/v2/": b"{}", "/v2/x/manifests/y": manifest, f"/v2/x/blobs/{IMAGE.id}": config}.get(
                    target, packed
                )
                connection.sendall(
                    f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                )
                if body is packed:
                    connection.sendall(body[: len(body) // 2])
                    stalled.release()
                    over.wait()
                    return
                connection.sendall(body)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener, TempEngine() as engine:
        threading.Thread(target=accept, daemon=True).start()
        target = f"/v1.24/images/create?fromImage=127.0.0.1:{listener.getsockname()[1]}/x&tag=y"
        thread = threading.Thread(target=ignoring_the_kill, args=(lambda: engine.request("POST", target),))
        thread.start()
        for _ in layers:
            assert stalled.acquire(timeout=30 * PATIENCE)
        engine.restart()
        thread.join()
        assert whole(engine) == set() and os.listdir(engine.root / "layers") == ["init"]
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
