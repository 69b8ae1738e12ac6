"""Volumes from API 1.25 on: what they show, prune, force, and volumes of a swarm."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from engine.common.times import parse_rfc3339
from tests.support.engine.harness import TempEngine


@pytest.fixture
def engine(engine: TempEngine) -> Iterator[TempEngine]:
    """The shared engine, without volumes before and after."""
    prune(engine, "1.25")
    yield engine
    engine.remove_all()
    prune(engine, "1.25")
    assert names(engine) == []


def prune(engine: TempEngine, version: str = "1.55", **filters: Any) -> dict[str, Any]:
    query = f"?filters={quote(json.dumps(filters))}" if filters else ""
    answer = engine.request("POST", f"/v{version}/volumes/prune{query}")
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json()
    assert list(found) == ["VolumesDeleted", "SpaceReclaimed"]
    return found


def names(engine: TempEngine) -> list[str]:
    return [each["Name"] for each in engine.request("GET", "/v1.55/volumes").json()["Volumes"]]


def make(engine: TempEngine, **body: Any) -> dict[str, Any]:
    answer = engine.request("POST", "/v1.55/volumes/create", body)
    assert answer.status == 201, answer
    found: dict[str, Any] = answer.json()
    return found


def test_what_volumes_show(engine: TempEngine) -> None:
    before = time.time()
    made = make(engine, Name="first", DriverOpts={"type": "tmpfs", "device": "tmpfs"}, Labels={"a": "1"})
    place = made.pop("Mountpoint")
    created = parse_rfc3339(made.pop("CreatedAt")) / 1e9
    assert before - 1 <= created <= time.time() and place.endswith("/volumes/first/_data")
    assert made == {
        "Name": "first",
        "Driver": "local",
        "Labels": {"a": "1"},
        "Scope": "local",
        "Options": {"type": "tmpfs", "device": "tmpfs"},
    }
    assert make(engine, Name="other")["Options"] is None
    (listed,) = (each for each in engine.request("GET", "/v1.55/volumes").json()["Volumes"] if each["Name"] == "first")
    assert listed["Options"] == made["Options"]
    assert not {"CreatedAt", "Options"} & engine.request("GET", "/v1.24/volumes/first").json().keys()
    assert engine.request("DELETE", "/v1.55/volumes/first").status == 204


@pytest.mark.parametrize(
    ("version", "filters", "gone"),
    [
        ("1.41", {}, {"named", "labelled", ""}),
        ("1.42", {}, {""}),
        ("1.42", {"all": ["1"]}, {"named", "labelled", ""}),
        ("1.55", {"all": {"true": True}}, {"named", "labelled", ""}),
        ("1.55", {"all": ["0"]}, {""}),
        ("1.55", {"all": ["true"], "label": ["a=b"]}, {"labelled"}),
        ("1.55", {"all": ["true"], "label!": ["a"]}, {"named", ""}),
    ],
)
def test_prune(engine: TempEngine, version: str, filters: dict[str, Any], gone: set[str]) -> None:
    container = engine.create("true", host={"Binds": ["used:/v"]}, Volumes={"/w": {}})
    of_container = set(names(engine))
    make(engine, Name="typed", DriverOpts={"type": "tmpfs", "device": "tmpfs"})
    unnamed = make(engine)
    assert unnamed["Labels"] == {"com.docker.volume.anonymous": ""}
    for volume in (make(engine, Name="named"), make(engine, Name="labelled", Labels={"a": "b"}), unnamed):
        Path(volume["Mountpoint"], "file").write_bytes(b"1234")
    gone = {name or unnamed["Name"] for name in gone}
    found = prune(engine, version, **filters)
    assert (set(found["VolumesDeleted"]), found["SpaceReclaimed"]) == (gone, 4 * len(gone))
    assert set(names(engine)) == {*of_container, "typed", "named", "labelled", unnamed["Name"]} - gone
    assert engine.request("DELETE", "/v1.55/volumes/typed").status == 204
    assert engine.request("DELETE", f"/v1.55/containers/{container}").status == 204
    assert set(prune(engine)["VolumesDeleted"]) >= of_container - {"used"}, "the container's anonymous one"
    assert "used" in names(engine)


@pytest.mark.parametrize("filters", [{"all": ["maybe"]}, {"all": ["1", "0"]}, {"until": ["1h"]}, {"dangling": ["1"]}])
def test_what_a_prune_refuses(engine: TempEngine, filters: dict[str, Any]) -> None:
    answer = engine.request("POST", f"/v1.55/volumes/prune?filters={quote(json.dumps(filters))}")
    assert answer.status == 400 and next(iter(filters)) in answer.message


def test_a_prune_is_an_event(engine: TempEngine) -> None:
    since = time.time()
    Path(make(engine)["Mountpoint"], "file").write_bytes(b"123")
    prune(engine)
    body = engine.request("GET", f"/v1.55/events?since={since:.9f}&until={time.time():.9f}").body
    events = [json.loads(line) for line in body.splitlines()]
    assert [(each["Action"], each["Actor"]["Attributes"]) for each in events if each["Action"] == "prune"] == [
        ("prune", {"reclaimed": "3"})
    ]


def test_force(engine: TempEngine) -> None:
    assert engine.request("DELETE", "/v1.55/volumes/none?force=1").status == 204
    assert engine.request("DELETE", "/v1.55/volumes/none").status == 404
    container = engine.create("true", host={"Binds": ["used:/v"]})
    answer = engine.request("DELETE", "/v1.55/volumes/used?force=1")
    assert (answer.status, answer.message) == (
        409,
        f"unable to remove volume: remove used: volume is in use - [{container}]",
    )


def test_volumes_of_a_swarm(engine: TempEngine) -> None:
    answer = engine.request("PUT", "/v1.55/volumes/x?version=1", {"Spec": {}})
    assert (answer.status, answer.message) == (
        503,
        "volume update only valid for cluster volumes, but swarm is unavailable",
    )
    assert engine.request("PUT", "/v1.41/volumes/x?version=1", {}).status == 400
    body = {"Name": "cluster", "ClusterVolumeSpec": {"Group": "g"}}
    answer = engine.request("POST", "/v1.55/volumes/create", body)
    assert answer.status == 501 and "ClusterVolumeSpec: cluster volumes (CSI) are not supported" in answer.message
    assert engine.request("POST", "/v1.41/volumes/create", body).status == 201
