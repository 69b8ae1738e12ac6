"""What the state of a container does not permit: 500 up to API 1.24, as its documentation says, and
409 later, as in dockerd.
"""

from __future__ import annotations

import pytest

from tests.support.engine.harness import TempEngine


def _refusal(engine: TempEngine, version: str, container: str, verb: str) -> tuple[int, str]:
    answer = engine.request("POST", f"{version}/containers/{container}/{verb}")
    return answer.status, answer.message.replace(container, "ID")


@pytest.mark.parametrize(("version", "status"), [("/v1.24", 500), ("/v1.25", 409), ("", 409)])
def test_refusals(engine: TempEngine, version: str, status: int) -> None:
    created = engine.create("sleep", "600")
    running = engine.started("sleep", "600")
    paused = engine.started("sleep", "600")
    engine.post(f"/containers/{paused}/pause")
    for container, verb, words in (
        (created, "pause", "Container ID is not running"),
        (created, "unpause", "Container ID is not paused"),
        (created, "resize?h=1&w=1", "Container ID is not running"),
        (running, "unpause", "Container ID is not paused"),
        (paused, "pause", "Container ID is already paused"),
        (paused, "start", "Cannot start a paused container, try unpause instead."),
    ):
        assert _refusal(engine, version, container, verb) == (status, words)
    expected = "cannot kill container: ID: container ID is not running" if version != "/v1.24" else None
    assert _refusal(engine, version, created, "kill") == (status, expected or "Container ID is not running")


@pytest.mark.parametrize("version", ["/v1.25", ""])
def test_checkpoints(engine: TempEngine, version: str) -> None:
    identifier = engine.create("true")
    path = f"{version}/containers/{identifier}/checkpoints"
    for method, target in (("GET", path), ("POST", path), ("DELETE", f"{path}/one")):
        answer = engine.request(method, target)
        assert (answer.status, "experimental" in answer.message) == (501, True)
    assert engine.request("GET", f"/v1.24/containers/{identifier}/checkpoints").status == 404
    answer = engine.request("POST", f"{version}/containers/{identifier}/start?checkpoint=one")
    assert (answer.status, "experimental" in answer.message) == (400, True)


def test_renames_that_are_refused(engine: TempEngine) -> None:
    identifier = engine.create("true", name="one")
    engine.create("true", name="two")
    for name, status in (("", 400), ("one", 400), ("two", 409), ("a/b", 400)):
        assert engine.request("POST", f"/containers/{identifier}/rename?name={name}").status == status, name


def test_an_engine_with_experimental_features_says_so() -> None:
    with TempEngine("--experimental") as engine:
        assert engine.request("GET", "/_ping").headers["docker-experimental"] == "true"
        version, info = engine.request("GET", "/version").json(), engine.request("GET", "/info").json()
        assert (version["Experimental"], info["ExperimentalBuild"]) == (True, True)
        assert version["Components"][0]["Details"]["Experimental"] == "true"
        assert "true" in engine.docker("version", "--format", "{{.Server.Experimental}}").line
        answer = engine.request("POST", "/build?squash=1&remote=x")
        assert (answer.status, answer.message) == (501, "squash: this engine does not merge the layers of an image")
