"""CDI devices and `--gpus` with a real engine: the edits of a specification in the container, hooks
at both ends of a run, and requests that are refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.harness import TempEngine, until

pytestmark = pytest.mark.own

NEWEST = "1.55"


@pytest.fixture(scope="module")
def equipped() -> Iterator[TempEngine]:
    """An engine with a directory of CDI specifications."""
    engine = TempEngine()
    specifications = engine.base / "cdi"
    engine.arguments = ("--cdi-spec-directory", str(specifications))
    specifications.mkdir()
    library = engine.base / "library"
    library.write_text("from the vendor")
    node = {"path": "/dev/thing0", "hostPath": "/dev/zero", "fileMode": 0o444}
    other = {"path": "/dev/thing1", "hostPath": "/dev/kmsg", "permissions": "w"}
    hooks = [
        {
            "hookName": name,
            "path": "/bin/sh",
            "args": ["sh", "-c", f"cat >/dev/null; echo {name} >>{engine.base}/hooks"],
            "env": [],
        }
        for name in ("createRuntime", "poststop")
    ]
    mount = {"hostPath": str(library), "containerPath": "/usr/lib/vendor/library", "options": ["ro", "nosuid", "bind"]}
    edits = {
        "env": ["VENDOR=1"],
        "deviceNodes": [node, other],
        "mounts": [mount],
        "hooks": hooks,
        "additionalGids": [4711],
    }
    document = {"cdiVersion": "0.6.0", "kind": "acme.com/thing", "devices": [{"name": "x", "containerEdits": edits}]}
    (specifications / "acme.json").write_text(json.dumps(document))
    with engine:
        engine.load_busybox()
        yield engine


@pytest.fixture
def engine(equipped: TempEngine) -> Iterator[TempEngine]:
    yield equipped
    equipped.remove_all()
    (equipped.base / "hooks").unlink(missing_ok=True)


def create(engine: TempEngine, *command: str, version: str = NEWEST, **host: Any) -> str:
    body = {"Image": "busybox", "Cmd": list(command), "HostConfig": {"NetworkMode": "none"} | host}
    answer = engine.request("POST", f"/v{version}/containers/create", body)
    assert answer.status == 201, answer
    return str(answer.json()["Id"])


def cdi(*names: str) -> dict[str, Any]:
    return {"Driver": "cdi", "DeviceIDs": list(names)}


@pytest.mark.parametrize("version", [NEWEST, "1.24"])
def test_the_edits_of_a_device(engine: TempEngine, version: str) -> None:
    """At 1.24 too: what a client sends is obeyed. Opening /dev/kmsg for writing writes nothing, and
    no container may by itself.
    """
    script = (
        "echo $VENDOR; cat /usr/lib/vendor/library; echo; head -c 4 /dev/thing0 | hexdump -v -e '1/1 \"%d\"'; echo;"
        "id -G; stat -c %a /dev/thing0; if true >/dev/thing1; then echo opened; fi"
    )
    request = cdi("acme.com/thing=x")
    identifier = create(engine, "sh", "-c", script, version=version, DeviceRequests=[request])
    engine.post(f"/containers/{identifier}/start")
    assert engine.wait(identifier) == 0, engine.logs(identifier)
    lines = engine.logs(identifier).decode().splitlines()
    assert lines[:3] == ["1", "from the vendor", "0000"]
    assert "4711" in lines[3].split() and lines[4:] == ["444", "opened"]
    shown = engine.request("GET", f"/v{version}/containers/{identifier}/json").json()["HostConfig"]["DeviceRequests"]
    assert shown == [
        {"Driver": "cdi", "Count": 0, "DeviceIDs": ["acme.com/thing=x"], "Capabilities": None, "Options": None}
    ]


def test_hooks_at_both_ends_of_a_run(engine: TempEngine) -> None:
    hooks = engine.base / "hooks"
    identifier = create(engine, "true", DeviceRequests=[cdi("acme.com/thing=x")])
    for runs in (1, 2):
        engine.post(f"/containers/{identifier}/start")
        engine.wait(identifier)
        until("the hooks", lambda runs=runs: hooks.read_text().split() == ["createRuntime", "poststop"] * runs)


def test_by_the_docker_cli(engine: TempEngine) -> None:
    environment = {name: value for name, value in engine.environment.items() if name != "DOCKER_API_VERSION"}
    command = [
        "docker",
        "run",
        "--rm",
        "--network",
        "none",
        "--device",
        "acme.com/thing=x",
        "busybox",
        "ls",
        "/dev/thing0",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"/dev/thing0\n"), done.stderr
    command = ["docker", "run", "--rm", "--network", "none", "--gpus", "all", "busybox", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 125
    assert b'could not select device driver "" with capabilities: [[gpu]]' in done.stderr


def test_what_is_refused_leaves_nothing(engine: TempEngine) -> None:
    for request, words in (
        (cdi("acme.com/thing=y"), "CDI device injection failed: unresolvable CDI devices acme.com/thing=y"),
        ({"Driver": "other"}, 'could not select device driver "other" with capabilities: []'),
    ):
        identifier = create(engine, "true", DeviceRequests=[request])
        answer = engine.request("POST", f"/v{NEWEST}/containers/{identifier}/start")
        assert answer.status == 400 and answer.message == words
        assert engine.inspect(identifier)["State"]["Error"] == words
    both = {"Image": "busybox", "HostConfig": {"DeviceRequests": [{"Count": 1, "DeviceIDs": ["0"]}]}}
    answer = engine.request("POST", f"/v{NEWEST}/containers/create", both)
    assert answer.status == 400 and "cannot set both Count and DeviceIDs" in answer.message


def test_gpus_by_a_specification(engine: TempEngine) -> None:
    """The specification is read at each start: drivers come and change while the engine runs."""
    edits = {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/null"}]}
    document = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": edits}]}
    path = Path(engine.base, "cdi", "nvidia.yaml")
    path.write_text(json.dumps(document))
    try:
        identifier = create(
            engine, "ls", "/dev/nvidia0", DeviceRequests=[{"Count": -1, "Capabilities": [["gpu"]], "Driver": ""}]
        )
        engine.post(f"/containers/{identifier}/start")
        assert engine.wait(identifier) == 0
    finally:
        os.unlink(path)
