"""Platforms of images, what registries say about a name, and refused credentials, at the versions
that have them and at older ones."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import docker
import docker.errors
import pytest

from tests.support.builds import building
from tests.support.engine.client import Answer
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Image, Node, digest, docker_archive, oci_archive, tar
from tests.support.images.registry import OCI_INDEX, PASSWORD, USER, Registry

pytestmark = pytest.mark.own

IMAGE = Image([tar([Node("etc/mark", b"for amd64")])], ["thing:latest"], {"Cmd": ["true"]})
ARM64 = {"os": "linux", "architecture": "arm64", "variant": "v8"}
AMD64 = {"os": "linux", "architecture": "amd64"}
UNKNOWN = {"os": "unknown", "architecture": "unknown"}


class Arm64(Image):
    """An image whose configuration is for arm64."""

    def configuration(self) -> bytes:
        document = json.loads(super().configuration())
        return json.dumps({**document, "architecture": "arm64", "variant": "v8"}).encode()


FOREIGN = Arm64([tar([Node("etc/mark", b"for arm64")])], ["foreign:latest"], {"Cmd": ["true"]})


@pytest.fixture(scope="module")
def plain() -> Iterator[Registry]:
    with Registry() as found:
        yield found


@pytest.fixture(scope="module")
def guarded() -> Iterator[Registry]:
    with Registry(password=True) as found:
        yield found


def query(name: str, platform: dict[str, str]) -> str:
    return f"{name}={quote(json.dumps(platform))}"


def auth(**fields: str) -> dict[str, str]:
    return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()}


def pull(engine: TempEngine, target: str, *, version: str = "1.55", headers: dict[str, str] | None = None) -> Answer:
    return engine.request("POST", f"/v{version}/images/create?{target}", None, headers)


def said(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer
    return [json.loads(line) for line in answer.body.splitlines()]


def put_index(registry: Registry, repository: str) -> str:
    """Both images and an attestation as `:all`; the digest of the index."""
    entries = []
    for image, platform in ((IMAGE, AMD64), (FOREIGN, ARM64), (IMAGE, UNKNOWN)):
        put = registry.put(repository, "", image)
        entries.append(
            {"mediaType": put.media_type, "digest": put.digest, "size": len(put.manifest), "platform": platform}
        )
    entries[2]["annotations"] = {"vnd.docker.reference.type": "attestation-manifest"}
    document = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    return digest(registry.put_manifest(repository, "all", document, OCI_INDEX))


def test_a_pull_for_another_platform(clean: TempEngine, plain: Registry) -> None:
    put_index(plain, "multi")
    name = f"{plain.host}/multi"
    assert not [line for line in said(pull(clean, f"fromImage={name}&tag=all&platform=linux/arm64")) if "error" in line]
    shown = clean.request("GET", f"/images/{name}:all/json").json()
    assert (shown["Id"], shown["Architecture"], shown["Variant"]) == (FOREIGN.id, "arm64", "v8")
    # an older version does not have the parameter; the tag moves to this host's image
    said(pull(clean, f"fromImage={name}&tag=all&platform=linux/arm64", version="1.31"))
    shown = clean.request("GET", f"/images/{name}:all/json").json()
    assert shown["Id"] == IMAGE.id and "Variant" not in shown
    refused = pull(clean, f"fromImage={name}&tag=all&platform=linux/s390x")
    assert refused.status == 404
    assert "no matching manifest for linux/s390x in the manifest list entries" in refused.message
    assert pull(clean, f"fromImage={name}&tag=all&platform=pdp11").status == 400


def test_an_image_of_one_platform_is_pulled_with_a_warning(clean: TempEngine, plain: Registry) -> None:
    plain.put("single", "latest", IMAGE)
    name = f"{plain.host}/single"
    lines = [line.get("status", "") for line in said(pull(clean, f"fromImage={name}&platform=linux/arm64"))]
    assert (
        f"WARNING: image with reference {name}:latest was found but its platform (linux/amd64) "
        "does not match the specified platform (linux/arm64)"
    ) in lines
    assert clean.request("GET", f"/images/{name}/json").json()["Id"] == IMAGE.id
    lines = [line.get("status", "") for line in said(pull(clean, f"fromImage={name}&platform=linux/amd64"))]
    assert not any("WARNING" in line for line in lines)


def test_an_image_of_another_platform_is_not_found(clean: TempEngine, plain: Registry) -> None:
    name = f"{plain.host}/named"
    loaded = dataclasses.replace(IMAGE, names=[f"{name}:latest"])
    clean.request("POST", "/images/load", docker_archive(loaded))
    for method, target, older in (
        ("GET", f"/images/{name}/json?{query('platform', ARM64)}", "1.48"),
        ("GET", f"/images/{name}/history?{query('platform', ARM64)}", "1.47"),
        ("GET", f"/images/{name}/get?{query('platform', ARM64)}", "1.47"),
        ("GET", f"/images/get?names={name}&{query('platform', ARM64)}", "1.47"),
        ("POST", f"/images/{name}/push?{query('platform', ARM64)}", "1.45"),
        ("DELETE", f"/images/{name}?{query('platforms', ARM64)}", "1.49"),
    ):
        refused = clean.request(method, target)
        assert refused.status == 404 and "does not match the specified platform (linux/arm64/v8)" in refused.message
        for wrong in ("platform=linux/arm64", "platform={}", f"{query('platform', AMD64)}&{query('platform', ARM64)}"):
            given = wrong.replace("platform=", "platforms=") if method == "DELETE" else wrong
            place, _, rest = target.partition("?")
            names = f"{rest.partition('&')[0]}&" if rest.startswith("names=") else ""
            assert clean.request(method, f"{place}?{names}{given}").status == 400, (target, given)
        assert clean.request(method, f"/v{older}{target}").status == 200, target
        clean.request("POST", "/images/load", docker_archive(loaded))
    both = clean.request("GET", f"/images/{name}/json?manifests=1&{query('platform', AMD64)}")
    assert both.status == 400 and "manifests and platform" in both.message
    for target in (f"/images/{name}/json?manifests=1", f"/images/{name}/json?{query('platform', AMD64)}"):
        assert clean.request("GET", target).json()["Id"] == IMAGE.id
    assert clean.request("DELETE", f"/images/{name}?{query('platforms', AMD64)}").status == 200


def test_load_for_a_platform(clean: TempEngine) -> None:
    answer = clean.request("POST", f"/images/load?{query('platform', ARM64)}", docker_archive(IMAGE))
    assert answer.status == 404 or "does not match the specified platform" in answer.body.decode()
    assert clean.request("GET", "/images/thing/json").status == 404
    for archive in (docker_archive(FOREIGN), oci_archive(FOREIGN)):
        answer = clean.request("POST", f"/images/load?quiet=1&{query('platform', ARM64)}", archive)
        assert [line["stream"] for line in said(answer)] == ["Loaded image: foreign:latest\n"]


def test_import_for_a_platform(clean: TempEngine) -> None:
    for target, expected in (
        ("platform=linux/arm64/v9", ("arm64", "v9")),
        ("platform=linux/s390x", ("s390x", None)),
        ("", ("amd64", None)),
    ):
        answer = clean.request("POST", f"/images/create?fromSrc=-&repo=made&{target}", IMAGE.layers[0])
        assert "error" not in answer.body.decode()
        shown = clean.request("GET", "/images/made/json").json()
        assert (shown["Architecture"], shown.get("Variant")) == expected
    refused = clean.request("POST", "/images/create?fromSrc=-&platform=windows/amd64", IMAGE.layers[0])
    assert refused.status == 400 and "windows" in refused.message


def test_distribution(clean: TempEngine, plain: Registry, guarded: Registry) -> None:
    index = put_index(plain, "looked/at")
    one = plain.put("looked/at", "one", FOREIGN)
    found = clean.request("GET", f"/distribution/{plain.host}/looked/at:all/json").json()
    assert found["Descriptor"]["mediaType"] == OCI_INDEX and found["Descriptor"]["digest"] == index
    assert found["Platforms"] == [AMD64, ARM64, UNKNOWN]
    for name in (f"{plain.host}/looked/at:one", f"{plain.host}/looked/at@{one.digest}"):
        assert clean.request("GET", f"/v1.30/distribution/{name}/json").json() == {
            "Descriptor": {"mediaType": one.media_type, "digest": one.digest, "size": len(one.manifest)},
            "Platforms": [ARM64],
        }
    assert clean.request("GET", f"/v1.29/distribution/{plain.host}/looked/at:one/json").status == 400
    unknown = clean.request("GET", f"/distribution/{plain.host}/looked/at:none/json")
    assert unknown.status == 404 and "manifest unknown" in unknown.message
    assert clean.request("GET", "/distribution/UPPER/json").status == 400
    by_id = clean.request("GET", f"/distribution/{IMAGE.id[7:]}/json")
    assert by_id.status == 500 and "no manifest found for full image ID" in by_id.message
    guarded.put("private", "latest", IMAGE)
    target = f"/distribution/{guarded.host}/private/json"
    for headers in ({}, auth(username=USER, password="wrong")):
        assert clean.request("GET", target, None, headers).status == 401
    assert clean.request("GET", target, None, guarded.auth).json()["Platforms"] == [AMD64]


def test_refused_credentials(clean: TempEngine, guarded: Registry) -> None:
    guarded.put("mine", "latest", IMAGE)
    target = f"fromImage={guarded.host}/mine&tag=latest"
    wrong = auth(username=USER, password="wrong")
    for version, headers, status in (
        ("1.55", wrong, 401),
        ("1.25", wrong, 401),
        ("1.24", wrong, 404),
        ("1.55", {}, 404),
        ("1.55", {"X-Registry-Auth": "%%%"}, 404),
        ("1.24", {"X-Registry-Auth": "%%%"}, 400),
        ("1.55", auth(username=USER, password=PASSWORD), 200),
    ):
        assert pull(clean, target, version=version, headers=headers).status == status, (version, headers)


def test_a_build_from_another_platform(clean: TempEngine, plain: Registry) -> None:
    """What is here for this host is pulled for the platform that the Dockerfile names."""
    put_index(plain, "base")
    name = f"{plain.host}/base:all"
    said(pull(clean, f"fromImage={name}"))
    for platform, expected in (("linux/arm64", "arm64"), ("linux/amd64", "amd64")):
        built = building.build(clean, f"FROM --platform={platform} {name}\nCOPY a /a\n", {"a": b"x"}, t="made")
        assert built.error is None, built
        assert clean.request("GET", "/images/made/json").json()["Architecture"] == expected
    refused = building.build(clean, f"FROM --platform=linux/s390x {name}\nCOPY a /a\n", {"a": b"x"})
    assert refused.error is not None and "no matching manifest for linux/s390x" in refused.error["error"]


def test_attestations(clean: TempEngine) -> None:
    refused = clean.request("GET", "/images/busybox/attestations")
    assert refused.status == 501 and "attestations" in refused.message
    assert clean.request("GET", "/images/nothing/attestations").status == 404
    assert clean.request("GET", "/v1.54/images/busybox/attestations").status == 400


def test_through_docker_py(clean: TempEngine, plain: Registry) -> None:
    put_index(plain, "python")
    with contextlib.closing(docker.DockerClient(f"unix://{clean.socket}", version="auto")) as client:
        data = client.images.get_registry_data(f"{plain.host}/python:all")
        assert data.has_platform("linux/arm64/v8") and data.has_platform("linux/amd64")
        assert not data.has_platform("linux/s390x")
        assert data.pull(platform="linux/arm64").attrs["Architecture"] == "arm64"
        with pytest.raises(docker.errors.NotFound):
            client.images.pull(f"{plain.host}/python", tag="all", platform="linux/s390x")


def test_a_pinned_image(clean: TempEngine, plain: Registry) -> None:
    """`name:tag@digest`: the tag may have moved."""
    pinned = f"{plain.host}/pinned:old@{plain.put('pinned', 'new', IMAGE).digest}"
    said(pull(clean, f"fromImage={pinned}"))
    body = {"Image": pinned, "HostConfig": {"NetworkMode": "none"}}
    created = clean.request("POST", "/containers/create", body)
    assert created.status == 201, created
    assert clean.inspect(created.json()["Id"])["Image"] == IMAGE.id


def test_through_the_cli(clean: TempEngine, plain: Registry) -> None:
    environment = {name: value for name, value in clean.environment.items() if name != "DOCKER_API_VERSION"}

    def cli(*arguments: str, status: int = 0) -> str:
        done = subprocess.run(["docker", *arguments], env=environment, capture_output=True, timeout=60, check=False)
        assert done.returncode == status, done
        return (done.stdout + done.stderr).decode()

    put_index(plain, "cli")
    name = f"{plain.host}/cli:all"
    cli("pull", "--platform", "linux/arm64", name)
    assert cli("image", "inspect", "--format", "{{.Architecture}}", name) == "arm64\n"
    assert "does not match" in cli("image", "inspect", "--platform", "linux/amd64", name, status=1)
    assert "manifest list" in cli("pull", "--platform", "linux/s390x", name, status=1)
    cli("pull", "-q", name)
    assert cli("image", "inspect", "--platform", "linux/amd64", "--format", "{{.Architecture}}", name) == "amd64\n"
    cli("history", "--platform", "linux/amd64", name)
    assert name.rpartition(":")[0] in cli("image", "ls")
    cli("image", "rm", "--platform", "linux/amd64", name)
