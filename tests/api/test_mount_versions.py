"""HostConfig.Mounts at the versions that have something, and just below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.client import Answer
from tests.support.engine.harness import TempEngine


def create(engine: TempEngine, version: str, mount: dict[str, Any], **host: Any) -> Answer:
    body = {"Image": "busybox", "Cmd": ["true"], "HostConfig": {"NetworkMode": "none", "Mounts": [mount], **host}}
    answer = engine.request("POST", f"/v{version}/containers/create", body)
    if answer.status == 201:
        removal = engine.request("DELETE", f"/v1.55/containers/{answer.json()['Id']}?v=1")
        assert removal.status == 204, removal
    return answer


PART = {"Type": "volume", "Source": "parts", "Target": "/x", "VolumeOptions": {"Subpath": "a"}}
IMAGE = {"Type": "image", "Source": "busybox", "Target": "/x"}
FORCED = {
    "Type": "bind",
    "Source": "/",
    "Target": "/x",
    "ReadOnly": True,
    "BindOptions": {"ReadOnlyForceRecursive": True},
}
FOREIGN = {"Type": "tmpfs", "Target": "/x", "VolumeOptions": {"NoCopy": True}}


@pytest.mark.parametrize(
    ("mount", "since", "before", "words"),
    [
        (PART, "1.45", "1.44", "VolumeOptions.Subpath needs API v1.45 or newer"),
        (IMAGE, "1.48", "1.47", 'Mount type "Image" needs API v1.48 or newer'),
        (FORCED, "1.44", "1.43", "BindOptions.ReadOnlyForceRecursive needs API v1.44 or newer"),
    ],
)
def test_what_older_versions_refuse(
    engine: TempEngine, mount: dict[str, Any], since: str, before: str, words: str
) -> None:
    assert create(engine, since, mount).status == 201
    refused = create(engine, before, mount)
    assert (refused.status, refused.message) == (400, words)
    assert create(engine, "1.24", mount).status == 201, "it is obeyed where clients cannot know better"


def test_options_of_another_type(engine: TempEngine) -> None:
    assert create(engine, "1.41", FOREIGN).status == 201
    for version in ("1.42", "1.24"):
        refused = create(engine, version, FOREIGN)
        assert refused.status == 400
        assert refused.message == ('invalid mount config for type "tmpfs": field VolumeOptions must not be specified')


def test_sources_that_are_made(engine: TempEngine, tmp_path: Path) -> None:
    mount = {
        "Type": "bind",
        "Source": f"{tmp_path}/made",
        "Target": "/x",
        "BindOptions": {"CreateMountpoint": True},
    }
    assert create(engine, "1.42", mount).status == 201
    refused = create(engine, "1.41", mount)
    assert refused.status == 400 and "bind source path does not exist" in refused.message


def test_warning_of_a_volume_driver(engine: TempEngine) -> None:
    mount = {"Type": "volume", "Source": "warned", "Target": "/x"}
    answer = create(engine, "1.48", mount, VolumeDriver="local")
    assert answer.status == 201 and [each.split(":")[0] for each in answer.json()["Warnings"]] == ["WARNING"]
    assert "volume-driver" in answer.json()["Warnings"][0]
    for version, driver in (("1.47", "local"), ("1.48", "")):
        assert create(engine, version, mount, VolumeDriver=driver).json()["Warnings"] == []
    for name in ("warned", "parts"):
        assert engine.request("DELETE", f"/v1.55/volumes/{name}?force=1").status == 204
