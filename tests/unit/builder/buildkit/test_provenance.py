"""The provenance in a build's record, beside what dockerd 28.5.2 answers for such a build."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.builder.buildkit import provenance
from engine.images.record import ImageRecord
from engine.wire.images import ImageConfig

ID, DIGEST = f"sha256:{1:064x}", f"sha256:{2:064x}"
CONFIG = ImageConfig(os="linux", architecture="amd64")


def predicate(attributes: dict[str, str], bases: dict[str, ImageRecord] | None = None) -> Any:
    inputs = provenance.Inputs(ref="abc", attributes=attributes, bases=bases or {}, begun=10**18, ended=10**18 + 1)
    return json.loads(provenance.predicate(inputs))


def test_a_build_of_files_of_the_client() -> None:
    given = {"filename": "Dockerfile", "image-resolve-mode": "local", "build-arg:X": "2", "label:q": "r"}
    found = predicate(given, {"busybox": ImageRecord(id=ID, config=CONFIG)})
    environment = found["invocation"].pop("environment")
    assert environment["platform"].startswith("linux/")
    metadata = found.pop("metadata")
    assert found == {
        "builder": {"id": ""},
        "buildType": "https://mobyproject.org/buildkit@v1",
        "materials": [
            {"uri": "pkg:docker/busybox@latest?platform=linux%2Famd64", "digest": {"sha256": f"{1:064x}"}},
        ],
        "invocation": {
            "configSource": {"entryPoint": "Dockerfile"},
            "parameters": {
                "frontend": "dockerfile.v0",
                "args": {"build-arg:X": "2", "label:q": "r"},
                "locals": [{"name": "context"}, {"name": "dockerfile"}],
            },
        },
    }
    assert metadata == {
        "buildInvocationID": "abc",
        "buildStartedOn": "2001-09-09T01:46:40Z",
        "buildFinishedOn": "2001-09-09T01:46:40.000000001Z",
        "completeness": {"parameters": True, "environment": True, "materials": False},
        "reproducible": False,
    }


def test_a_build_of_a_repository() -> None:
    given = {"context": "https://user:word@example.com/x.git#main", "vcs:source": "s", "vcs:revision": "r"}
    found = predicate(given)
    assert found["invocation"]["configSource"] == {
        "uri": "https://xxxxx@example.com/x.git#main",
        "entryPoint": "Dockerfile",
    }
    assert "locals" not in found["invocation"]["parameters"]
    assert found["metadata"]["https://mobyproject.org/buildkit@v1#metadata"] == {
        "vcs": {"source": "s", "revision": "r"}
    }


@pytest.mark.parametrize(
    ("name", "digests", "uri", "digest"),
    [
        ("example.com:5000/a/b:1", (), "pkg:docker/example.com:5000/a/b@1?", ID),
        ("busybox", (f"docker.io/library/busybox@{DIGEST}",), "pkg:docker/busybox@latest?", DIGEST),
        ("busybox", (f"example.com/busybox@{DIGEST}",), "pkg:docker/busybox@latest?", ID),
        (f"busybox@{DIGEST}", (f"docker.io/library/busybox@{DIGEST}",), "pkg:docker/busybox?", DIGEST),
        ("A B", (), "pkg:docker/a%20b?", ID),
    ],
)
def test_a_base(name: str, digests: tuple[str, ...], uri: str, digest: str) -> None:
    (found,) = predicate({}, {name: ImageRecord(id=ID, config=CONFIG, digests=digests)})["materials"]
    assert found == {"uri": f"{uri}platform=linux%2Famd64", "digest": {"sha256": digest.removeprefix("sha256:")}}
