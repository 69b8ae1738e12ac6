"""GET /images/json and inspect of images, as versions from 1.25 on show them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Image, Node, docker_archive, tar

SHARED = tar([Node("shared", b"s" * 1000)])
OLD = Image([SHARED, tar([Node("old", b"o" * 10)])], ["old:1"], {"Labels": {"age": "old"}}, "2020-01-02T03:04:05Z")
NEW = Image([SHARED], ["new:1", "new:2"], {"User": "u"}, "2024-01-02T03:04:05Z")
NAMELESS = Image([tar([Node("nameless", b"n")])], [], {}, "2023-01-02T03:04:05Z")


@pytest.fixture
def stocked(clean: TempEngine) -> Iterator[TempEngine]:
    answer = clean.request("POST", "/images/load?quiet=1", docker_archive(OLD, NEW, NAMELESS))
    assert answer.status == 200 and b"error" not in answer.body
    yield clean


def listed(engine: TempEngine, version: str, query: str = "", **filters: Any) -> dict[str, Any]:
    text = f"filters={quote(json.dumps(filters))}&{query}"
    answer = engine.request("GET", f"/v{version}/images/json?{text}")
    assert answer.status == 200, answer
    return {image["Id"]: image for image in answer.json()}


def test_filters(stocked: TempEngine) -> None:
    ours = {OLD.id, NEW.id, NAMELESS.id}
    for filters, expected in (
        ({"until": ["2022-01-01"]}, {OLD.id}),
        ({"until": {"2023-06-01T00:00:00Z": True}}, {OLD.id, NAMELESS.id}),
        ({"until": ["2023-06-01T00:00:00Z", "2022-01-01"]}, {OLD.id}),
        ({"label!": ["age=old"]}, {NEW.id, NAMELESS.id}),
        ({"label": ["age"], "label!": ["age=new"]}, {OLD.id}),
        ({"reference": ["old", "new:1"]}, {OLD.id, NEW.id}),
        ({"dangling": ["1"]}, {NAMELESS.id}),
    ):
        assert listed(stocked, "1.25", **filters).keys() & ours == expected, filters
    assert listed(stocked, "1.55", reference=["new:2"])[NEW.id]["RepoTags"] == ["new:2"]
    assert listed(stocked, "1.40", "filter=old").keys() == {OLD.id}
    assert listed(stocked, "1.41", "filter=old").keys() >= ours, "filters alone"
    for wrong in ({"until": ["soon"]}, {"until": ["1h", "soon"]}, {"none": ["x"]}):
        assert stocked.request("GET", f"/images/json?filters={quote(json.dumps(wrong))}").status == 400


def test_what_older_versions_show(stocked: TempEngine) -> None:
    container = stocked.create("true", Image="new:1")
    newest = listed(stocked, "1.51", "shared-size=1&manifests=1")
    assert (newest[NEW.id]["Containers"], newest[OLD.id]["Containers"]) == (1, 0)
    assert newest[OLD.id]["SharedSize"] == 1000 and newest[OLD.id]["Size"] == 1010
    assert newest[NAMELESS.id]["SharedSize"] == 0
    assert "Manifests" not in newest[NEW.id] and "Descriptor" not in newest[NEW.id]
    older = listed(stocked, "1.50", "shared-size=1")
    assert older[NEW.id]["Containers"] == -1 and older[NEW.id]["SharedSize"] == 1000
    assert listed(stocked, "1.41", "shared-size=1")[NEW.id]["SharedSize"] == -1
    assert not {"Containers", "SharedSize"} & listed(stocked, "1.24", "shared-size=1")[NEW.id].keys()
    assert newest[NAMELESS.id]["RepoTags"] == newest[NAMELESS.id]["RepoDigests"] == []
    oldest = listed(stocked, "1.42")[NAMELESS.id]
    assert (oldest["RepoTags"], oldest["RepoDigests"]) == (["<none>:<none>"], ["<none>@<none>"])
    assert "VirtualSize" not in newest[OLD.id] and listed(stocked, "1.43")[OLD.id]["VirtualSize"] == 1010
    (usage,) = (each for each in stocked.request("GET", "/v1.44/system/df").json()["Images"] if each["Id"] == NEW.id)
    assert (usage["Containers"], usage["SharedSize"]) == (1, 1000), "at every version"
    assert stocked.request("GET", "/images/json?identity=1").status == 400
    assert stocked.request("GET", "/images/json?identity=1&manifests=1").status == 200
    assert stocked.request("GET", "/v1.53/images/json?identity=1").status == 200
    stocked.request("DELETE", f"/containers/{container}")


def test_inspect(stocked: TempEngine) -> None:
    def shown(version: str) -> dict[str, Any]:
        answer: dict[str, Any] = stocked.request("GET", f"/v{version}/images/new:1/json").json()
        return answer

    newest = shown("1.52")
    assert newest["Config"] == {"User": "u", "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
    assert newest["Metadata"]["LastTagTime"] > "2025" and newest["GraphDriver"]["Name"] == "overlay2"
    assert not {"Parent", "Comment", "Author", "Container", "VirtualSize", "Descriptor"} & newest.keys()
    assert shown("1.51")["Config"]["Labels"] is None and shown("1.51")["Parent"] == ""
    assert "Hostname" not in shown("1.50")["Config"] and shown("1.49")["Config"]["Hostname"] == ""
    assert "ContainerConfig" not in shown("1.45") and shown("1.44")["ContainerConfig"]["Cmd"] is None
    assert "VirtualSize" not in shown("1.44") and shown("1.43")["VirtualSize"] == 1000
    assert "Metadata" not in shown("1.24")
