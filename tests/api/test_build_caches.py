"""Caches of builds by buildx that come from elsewhere: inline in an image, or of their own, in a
real registry or at the client; and caches that cannot be read.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.builds import sessions
from tests.support.builds.buildx import Build, Built
from tests.support.builds.sessions import Caller, field, fields
from tests.support.engine.harness import TempEngine
from tests.support.images.registry import OCI_MANIFEST, PASSWORD, USER, Registry

pytestmark = pytest.mark.own

CACHE_CONFIG = "application/vnd.buildkit.cacheconfig.v0"
INLINE = {"build-arg:BUILDKIT_INLINE_CACHE": "1"}


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with Registry() as found:
        yield found


def text() -> str:
    """Steps whose results differ from run to run, so that it shows whether they have run."""
    return (
        f"FROM busybox\nRUN echo {secrets.token_hex(8)} >/word\nRUN cat /proc/sys/kernel/random/uuid >/uuid\n"
        "RUN true\nCOPY file /file\nLABEL a=b\n"
    )


def build(engine: TempEngine, dockerfile: str, name: str = "", imports: Any = (), **given: Any) -> Built:
    options = dict(given.pop("options", {}))
    if imports:
        options["cache-imports"] = json.dumps(imports)
    files = {"dockerfile": {"Dockerfile": dockerfile.encode()}, "context": {"file": b"content"}}
    return Build(engine.socket, files, names=name, options=options, **given).result()


def push(engine: TempEngine, name: str, headers: Mapping[str, str] | None = None) -> None:
    repository, _, tag = name.rpartition(":")
    target = f"/v1.24/images/{quote(repository, safe='/:')}/push?tag={tag}"
    pushed = engine.request("POST", target, headers={"X-Registry-Auth": "e30="} | dict(headers or {}))
    assert b"errorDetail" not in pushed.body, pushed.body


def forget(engine: TempEngine) -> None:
    """Remove every image but busybox, and the build cache."""
    for image in engine.request("GET", "/v1.24/images/json").json():
        for tag in image["RepoTags"]:
            if not tag.startswith(("busybox", "<")):
                assert engine.docker("rmi", tag).status == 0
    assert engine.request("POST", "/v1.45/images/prune").status == 200
    assert engine.request("POST", "/v1.45/build/prune?all=1").status == 200


def uuid(engine: TempEngine, image: str) -> str:
    return engine.docker("run", "--rm", "--network", "none", image, "cat", "/uuid").out


def cached(built: Built) -> list[bool]:
    assert built.failure is None, built.failure
    return [vertex.cached for vertex in built.vertices if vertex.name[0] == "[" and "/" in vertex.name.split("]")[0]]


def test_an_inline_cache(own_engine: TempEngine, registry: Registry) -> None:
    engine, file, name = own_engine, text(), f"{registry.host}/inline:1"
    plain = build(engine, file)
    first = build(engine, file, name, options=INLINE)
    assert first.image_id != plain.image_id and first.image_id == build(engine, file, name, options=INLINE).image_id
    expected = uuid(engine, name)
    push(engine, name)
    forget(engine)
    imports = [{"Type": "registry", "Attrs": {"ref": name}}]
    again = build(engine, file, "again:1", imports)
    assert cached(again) == [False, True, True, True, True]
    assert again.vertex(f"importing cache manifest from {name}").statuses == {"found 4 steps": True}
    assert uuid(engine, "again:1") == expected
    assert engine.docker("run", "--rm", "--network", "none", "again:1", "cat", "/file").out == "content"
    labels = engine.request("GET", "/v1.24/images/again:1/json").json()["Config"]["Labels"]
    assert labels == {"a": "b"}
    # what was used is a part of the engine's own cache now
    assert cached(build(engine, file, "again:2"))[1:] == [True] * 4
    # a step that has changed is no hit, nor are those after it
    forget(engine)
    changed = build(engine, file.replace("RUN true", "RUN true; true"), "again:3", imports)
    assert cached(changed) == [False, True, True, False, False]
    # nothing is looked up with --no-cache
    none = build(engine, file, "again:4", imports, options={"no-cache": ""})
    assert cached(none) == [False] * 5 and uuid(engine, "again:4") != expected


def test_the_image_of_a_base_says_nothing_of_its_user(own_engine: TempEngine, registry: Registry) -> None:
    """The inline cache of a base is not that of an image that is made of it."""
    base = build(own_engine, text(), "base:1", options=INLINE)
    assert base.failure is None
    made = build(own_engine, "FROM base:1\nLABEL x=y\n", f"{registry.host}/made:1")
    push(own_engine, f"{registry.host}/made:1")
    configuration = json.loads(registry.request("GET", f"/v2/made/blobs/{made.image_id}")[2])
    assert "moby.buildkit.cache.v0" not in configuration


def exported(engine: TempEngine, file: str, registry: Registry) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A cache of its own with the steps of a build: its manifest, and its blobs by digest."""
    name = f"{registry.host}/source:{secrets.token_hex(4)}"
    image_id = build(engine, file, name, options=INLINE).image_id
    push(engine, name)
    _, raw = registry.manifest("source", name.rpartition(":")[2])
    layers = json.loads(raw)["layers"]
    image = json.loads(registry.request("GET", f"/v2/source/blobs/{image_id}")[2])
    blobs, described = {}, []
    for place, (layer, diff_id) in enumerate(zip(layers, image["rootfs"]["diff_ids"], strict=True)):
        blobs[layer["digest"]] = registry.request("GET", f"/v2/source/blobs/{layer['digest']}")[2]
        assert f"sha256:{hashlib.sha256(gzip.decompress(blobs[layer['digest']])).hexdigest()}" == diff_id
        described.append(layer | {"annotations": {"containerd.io/uncompressed": diff_id}})
        layers[place] = {"blob": layer["digest"], "parent": place - 1}
    records = json.loads(base64.b64decode(image["moby.buildkit.cache.v0"]))
    configuration = json.dumps({"layers": layers, "records": records}).encode()
    digest = f"sha256:{hashlib.sha256(configuration).hexdigest()}"
    blobs[digest] = configuration
    config = {"mediaType": CACHE_CONFIG, "digest": digest, "size": len(configuration)}
    return {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": described}, blobs


@pytest.mark.parametrize("place", ["registry", "local"])
def test_a_cache_of_its_own(own_engine: TempEngine, registry: Registry, place: str) -> None:
    engine, file = own_engine, text()
    manifest, blobs = exported(engine, file, registry)
    build(engine, file, "first:1")
    expected = uuid(engine, "first:1")
    services = {}
    if place == "registry":
        for content in blobs.values():
            registry.put_blob("cache", content)
        registry.put_manifest("cache", "1", manifest, OCI_MANIFEST)
        imports = [{"Type": "registry", "Attrs": {"ref": f"{registry.host}/cache:1"}}]
    else:
        raw = json.dumps(manifest).encode()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        services = sessions.of_content("local:/some/cache", blobs | {digest: raw})
        imports = [{"Type": "local", "Attrs": {"src": "/some/cache", "digest": digest}}]
    forget(engine)
    again = build(engine, file, "again:1", imports, services=services)
    assert cached(again) == [False, True, True, True, True]
    assert uuid(engine, "again:1") == expected


def test_a_layer_that_is_missing_or_damaged(own_engine: TempEngine, registry: Registry) -> None:
    """The step runs, and the build goes on."""
    engine, file = own_engine, text()
    manifest, blobs = exported(engine, file, registry)
    forget(engine)
    for damage in (b"damaged", None):
        kept = dict(blobs)
        layer = manifest["layers"][-2]["digest"]
        if damage is None:
            del kept[layer]
        else:
            kept[layer] = damage
        raw = json.dumps(manifest).encode()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        services = sessions.of_content("local:/c", kept | {digest: raw})
        imports = [{"Type": "local", "Attrs": {"src": "/c", "digest": digest}}]
        built = build(engine, file, "again:1", imports, services=services)
        assert cached(built) == [False, True, False, False, False]
        ran = next(vertex for vertex in built.vertices if "uuid" in vertex.name)
        assert b"cache /c: " in ran.log
        forget(engine)


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("registry", {"ref": "HOST/none:1"}, "not found"),
        ("registry", {"ref": "127.0.0.1:1/none"}, "127.0.0.1:1"),
        ("registry", {"ref": "A B"}, "invalid reference format"),
        ("registry", {"ref": "HOST/odd:1"}, "neither a cache nor an image"),
        ("registry", {"ref": "HOST/bad:1"}, "invalid cache configuration"),
        ("local", {"src": "/x"}, "a local cache needs src and digest"),
        ("local", {"src": "/x", "digest": "sha256:" + "0" * 64}, "offers no image layouts"),
        ("gha", {}, "unknown cache importer: gha"),
    ],
)
def test_a_cache_that_cannot_be_read(
    builder: TempEngine, registry: Registry, kind: str, attributes: dict[str, str], message: str
) -> None:
    if "odd" in attributes.get("ref", ""):
        registry.put_manifest(
            "odd", "1", {"schemaVersion": 2, "manifests": []}, "application/vnd.oci.image.index.v1+json"
        )
    if "bad" in attributes.get("ref", ""):
        digest = registry.put_blob("bad", b"{]")
        config = {"mediaType": CACHE_CONFIG, "digest": digest, "size": 2}
        registry.put_manifest("bad", "1", {"schemaVersion": 2, "config": config, "layers": []}, OCI_MANIFEST)
    attributes = {name: value.replace("HOST", registry.host) for name, value in attributes.items()}
    built = build(builder, text(), "", [{"Type": kind, "Attrs": attributes}])
    assert built.failure is None
    shown = built.vertices[0]
    assert shown.name.startswith("importing cache manifest from ") and message in shown.error, shown


def test_options_that_are_malformed(builder: TempEngine) -> None:
    for value, message in (("x", "invalid value for cache-imports"), (json.dumps([{}] * 2), "")):
        built = build(builder, "FROM busybox\n", options={"cache-imports": value})
        assert (built.failure is not None and message in built.failure.message) if message else built.failure is None
    many = [{"Type": "registry", "Attrs": {"ref": f"x{number}"}} for number in range(30)]
    built = build(builder, "FROM busybox\n", "", many)
    assert built.failure is not None and "a build imports at most 20 caches" in built.failure.message


def test_credentials(own_engine: TempEngine) -> None:
    engine, file = own_engine, text()
    with Registry(password=True) as private:
        name = f"{private.host}/private:1"
        build(engine, file, name, options=INLINE)
        login = base64.urlsafe_b64encode(json.dumps({"username": USER, "password": PASSWORD}).encode()).decode()
        push(engine, name, {"X-Registry-Auth": login})
        forget(engine)
        imports = [{"Type": "registry", "Attrs": {"ref": name}}]
        services = sessions.of_credentials({private.host: (USER, PASSWORD)})
        assert cached(build(engine, file, "", imports, services=services))[1:] == [True] * 4
        forget(engine)
        refused = build(engine, file, "", imports)
        assert refused.vertices[0].error and not any(cached(refused))


def test_the_request_names_caches_too(own_engine: TempEngine, registry: Registry) -> None:
    """Caches of Control/Solve itself, and an inline export that it asks for."""
    engine, file, name = own_engine, text(), f"{registry.host}/field:1"
    files = {"dockerfile": {"Dockerfile": file.encode()}, "context": {"file": b"content"}}

    def solve(entry: bytes) -> bytes:
        with sessions.session(engine.socket, sessions.of_files(files)) as (session, _), Caller(engine.socket) as caller:
            request = field(1, secrets.token_hex(8)) + field(3, "moby") + sessions.mapping(4, {"name": name})
            request += field(5, session) + field(6, "dockerfile.v0") + field(8, entry)
            return caller.ask("/moby.buildkit.v1.Control/Solve", request)

    solve(field(4, field(1, "inline")))
    push(engine, name)
    forget(engine)
    assert fields(solve(field(5, field(1, "registry") + sessions.mapping(2, {"ref": name}))))[1]
    records = engine.request("GET", "/v1.45/system/df?type=build-cache").json()["BuildCache"]
    assert len(records) >= 4
    assert registry.requests("GET", "/v2/field/blobs/")


MULTISTAGE = """
FROM busybox AS made
RUN cat /proc/sys/kernel/random/uuid >/side
FROM busybox
RUN cat /proc/sys/kernel/random/uuid >/uuid
COPY --from=made /side /side
RUN true
"""


def export(
    engine: TempEngine, kind: str, attributes: Mapping[str, str], services: Any = None, file: str = MULTISTAGE
) -> Built:
    """A build whose cache is exported, as a client asks for it in Control/Solve."""
    files = {"dockerfile": {"Dockerfile": file.encode()}, "context": {"file": b"content"}}
    more = field(8, field(4, field(1, kind) + sessions.mapping(2, attributes)))
    return Build(engine.socket, files, names="first:1", services=services, more=more, direct=True).result()


@pytest.mark.parametrize("place", ["registry", "local"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_export(own_engine: TempEngine, registry: Registry, place: str, mode: str) -> None:
    engine = own_engine
    blobs: dict[str, bytes] = {}
    services = sessions.of_directory("local:/d", blobs) if place == "local" else {}
    ref = f"{registry.host}/export-{mode}:1"
    given = {"ref": ref} if place == "registry" else {"dest": "/d"}
    built = export(engine, place, given | {"mode": mode}, services)
    assert built.failure is None, built.failure
    vertex = built.vertex(f"exporting cache to {'registry' if place == 'registry' else 'client directory'}")
    assert not vertex.error and all(vertex.statuses.values())
    manifest = json.loads(built.response["cache.manifest"])
    assert manifest["mediaType"] == OCI_MANIFEST
    assert f"writing cache image manifest {manifest['digest']}" in vertex.statuses
    expected = uuid(engine, "first:1")
    attributes = {"ref": ref} if place == "registry" else {"src": "/d", "digest": manifest["digest"]}
    if place == "local":
        assert len(blobs[manifest["digest"]]) == manifest["size"]
        services = sessions.of_directory("local:/d", blobs)
        # again: the directory has everything
        before = dict(blobs)
        assert export(engine, place, given | {"mode": mode}, services).response["cache.manifest"]
        assert blobs == before
        services = sessions.of_directory("local:/d", blobs)
    forget(engine)
    imports = [{"Type": place, "Attrs": attributes}]
    again = build(engine, MULTISTAGE, "again:1", imports, services=services)
    assert again.failure is None, again.failure
    assert uuid(engine, "again:1") == expected
    side = next(vertex for vertex in again.vertices if vertex.name.startswith("[made 2/2]"))
    assert side.cached is (mode == "max")
    assert again.vertex("[stage-1 4/4] RUN true").cached is (mode == "max")


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("gha", {}, "unknown cache exporter: 'gha'"),
        ("local", {}, "cache export local: dest is missing"),
        ("registry", {"ref": "a", "mode": "most"}, "mode 'most' must be min or max"),
        ("registry", {"ref": "a", "compression": "zstd"}, "compression 'zstd' is not supported"),
        ("registry", {"ref": "127.0.0.1:1/none"}, "error exporting cache: "),
        ("local", {"dest": "/d"}, "offers no caches"),
    ],
)
def test_an_export_that_fails(builder: TempEngine, kind: str, attributes: dict[str, str], message: str) -> None:
    built = export(builder, kind, attributes, file="FROM busybox\nRUN echo a >/a\n")
    assert built.failure is not None and message in built.failure.message, built.failure


def test_an_export_that_may_fail(builder: TempEngine) -> None:
    attributes = {"ref": "127.0.0.1:1/none", "ignore-error": "true"}
    built = export(builder, "registry", attributes, file="FROM busybox\nRUN echo a >/a\n")
    assert built.failure is None
    assert "127.0.0.1:1" in built.vertex("exporting cache to registry").error
