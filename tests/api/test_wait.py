"""Waits by `condition`, with the head of their reply, and prunes of containers."""

from __future__ import annotations

import json
import socket
from urllib.parse import quote

import pytest

from tests.support.engine import client
from tests.support.engine.harness import TempEngine, until


class Wait:
    """A wait whose head has arrived; `answer` waits for its body."""

    def __init__(self, engine: TempEngine, target: str) -> None:
        self._connection = client.connect(engine.socket, 60)
        self._connection.sendall(f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        self.head = b""
        while b"\r\n\r\n" not in self.head:
            received = self._connection.recv(65536)
            assert received, self.head
            self.head += received
        self.head, _, self._body = self.head.partition(b"\r\n\r\n")

    def answer(self) -> bytes:
        """The chunks, joined."""
        with self._connection:
            while not self._body.endswith(b"0\r\n\r\n"):
                received = self._connection.recv(65536)
                assert received, self._body
                self._body += received
        parts = self._body.split(b"\r\n")
        return b"".join(parts[1::2])

    def pending(self) -> bool:
        """Nothing of the body is there."""
        self._connection.settimeout(0.2)
        try:
            self._body += self._connection.recv(65536)
        except TimeoutError:
            return not self._body
        finally:
            self._connection.settimeout(60)
        return False


def test_the_head_comes_before_the_start(engine: TempEngine) -> None:
    """As docker CLIs run a container: the next exit is that of a start which comes later."""
    identifier = engine.create("sh", "-c", "exit 7")
    waits = [
        Wait(engine, f"{version}/containers/{identifier}/wait?condition=next-exit")
        for version in ("/v1.30", "/v1.41", "")
    ]
    for wait in waits:
        assert wait.head.startswith(b"HTTP/1.1 200 ")
        assert b"content-type: application/json" in wait.head.lower()
    removed = Wait(engine, f"/containers/{identifier}/wait?condition=removed")
    assert Wait(engine, f"/containers/{identifier}/wait").answer() == b'{"StatusCode":0}\n'
    assert all(wait.pending() for wait in waits)
    engine.post(f"/containers/{identifier}/start")
    assert [json.loads(wait.answer()) for wait in waits] == [{"StatusCode": 7}] * 3
    assert removed.pending()
    engine.request("DELETE", f"/v1.24/containers/{identifier}")
    assert json.loads(removed.answer()) == {"StatusCode": 7}


@pytest.mark.parametrize("version", ["/v1.25", "/v1.29"])
def test_below_1_30_the_condition_is_ignored(engine: TempEngine, version: str) -> None:
    identifier = engine.create("true")
    for condition in ("next-exit", "removed", "no"):
        answer = engine.request("POST", f"{version}/containers/{identifier}/wait?condition={condition}")
        assert (answer.status, answer.json()) == (200, {"StatusCode": 0})


@pytest.mark.parametrize("version", ["/v1.24", "/v1.30", ""])
def test_an_unknown_condition_is_refused(engine: TempEngine, version: str) -> None:
    identifier = engine.create("true")
    answer = engine.request("POST", f"{version}/containers/{identifier}/wait?condition=no")
    assert (answer.status, answer.message) == (400, 'invalid condition: "no"')


def test_a_wait_of_a_container_that_removes_itself(engine: TempEngine) -> None:
    identifier = engine.create("sh", "-c", "exit 3", host={"AutoRemove": True})
    removed = Wait(engine, f"/v1.44/containers/{identifier}/wait?condition=removed")
    engine.post(f"/containers/{identifier}/start")
    assert json.loads(removed.answer()) == {"StatusCode": 3}
    assert engine.request("GET", f"/containers/{identifier}/json").status == 404


def test_a_client_that_leaves_is_forgotten(engine: TempEngine) -> None:
    identifier = engine.create("true")
    before = engine.open_files()
    waits = [Wait(engine, f"/containers/{identifier}/wait?condition=next-exit") for _ in range(20)]
    for wait in waits:
        wait._connection.shutdown(socket.SHUT_RDWR)
        wait._connection.close()
    until("their connections are closed", lambda: engine.open_files() <= before + 2)


# --- prune ----------------------------------------------------------------------------------------


def _prune(engine: TempEngine, filters: object = None, status: int = 200, version: str = "") -> client.Answer:
    query = "?filters=" + quote(json.dumps(filters)) if filters is not None else ""
    answer = engine.request("POST", f"{version}/containers/prune{query}")
    assert answer.status == status, answer
    return answer


def test_prune(engine: TempEngine) -> None:
    labelled = {"Labels": {"test.prune": "1"}}
    running = engine.started("sleep", "600", **labelled)
    created = engine.create("true", Volumes={"/v": {}}, **labelled)
    ended = engine.started("sh", "-c", "head -c 100000 /dev/zero > /file", **labelled)
    other = engine.create("true")
    engine.wait(ended)
    (volume,) = [mount["Name"] for mount in engine.inspect(created)["Mounts"]]
    events = client.json_stream(engine.socket, "/events?filters=" + quote(json.dumps({"event": ["prune"]})))
    mine = {"label": ["test.prune=1"]}
    assert _prune(engine, {"label!": ["test.prune"], **mine}).json() == {"ContainersDeleted": None, "SpaceReclaimed": 0}
    assert _prune(engine, {"until": ["24h"], **mine}).json() == {"ContainersDeleted": None, "SpaceReclaimed": 0}
    report = _prune(engine, {"label": {"test.prune=1": True}}).json()
    assert sorted(report["ContainersDeleted"]) == sorted((created, ended))
    assert report["SpaceReclaimed"] >= 100_000
    seen = [next(events) for _ in range(3)]
    assert [each["Actor"] for each in seen] == [
        {"ID": "", "Attributes": {"reclaimed": str(space)}} for space in (0, 0, report["SpaceReclaimed"])
    ]
    assert sorted(engine.containers()) == sorted((running, other))
    volumes = [each["Name"] for each in engine.request("GET", "/volumes").json()["Volumes"]]
    assert volume in volumes, "anonymous volumes stay"
    assert engine.request("DELETE", f"/volumes/{volume}").status == 204


def test_prunes_that_are_refused(engine: TempEngine) -> None:
    identifier = engine.create("true")
    assert "until" in _prune(engine, {"until": ["1h", "2h"]}, 400).message
    assert "yesterday" in _prune(engine, {"until": ["yesterday"]}, 400).message
    assert "name" in _prune(engine, {"name": ["x"]}, 400).message
    _prune(engine, status=404, version="/v1.24")
    assert engine.containers() == [identifier]
