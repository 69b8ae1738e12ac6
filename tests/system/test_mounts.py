"""HostConfig.Mounts of newer API versions on the host: mounts below a bind, parts of volumes, and
images."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.client import Answer
from tests.support.engine.harness import BREATH, TempEngine, until
from tests.support.images.archives import Image, Node, busybox_layer, directory, docker_archive, symlink, tar


@pytest.fixture
def engine(file_engine: TempEngine) -> Iterator[TempEngine]:
    """Checks at its end that no start has left a place below RUN."""
    yield file_engine
    file_engine.remove_all()
    file_engine.remove_volumes()
    places = file_engine.run / "volumes"
    until("starts left nothing", lambda: not places.exists() or os.listdir(places) == [])


def asked(engine: TempEngine, command: list[str], version: str = "1.55", **host: Any) -> Answer:
    body = {"Image": "busybox", "Cmd": command, "HostConfig": {"NetworkMode": "none", **host}}
    return engine.request("POST", f"/v{version}/containers/create", body)


def created(engine: TempEngine, command: list[str], version: str = "1.55", **host: Any) -> str:
    answer = asked(engine, command, version, **host)
    assert answer.status == 201, answer
    return str(answer.json()["Id"])


def started(engine: TempEngine, container: str, status: int = 204) -> str:
    """Starts it; returns the message of a failure."""
    answer = engine.request("POST", f"/v1.55/containers/{container}/start")
    assert answer.status == status, answer
    return "" if status == 204 else answer.message


def output(engine: TempEngine, script: str, version: str = "1.55", **host: Any) -> str:
    container = created(engine, ["sh", "-c", script], version, **host)
    started(engine, container)
    assert engine.wait(container) == 0, engine.logs(container)
    return engine.logs(container).decode()


def removed(engine: TempEngine, container: str) -> None:
    assert engine.request("DELETE", f"/v1.55/containers/{container}?force=1&v=1").status == 204


def names_in(answer: Answer) -> list[str]:
    """Of the entries of an archive."""
    assert answer.status == 200, answer
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as archive:
        return archive.getnames()


# --- mounts below a bind --------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A directory with a tmpfs mounted on `sub`."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "hidden").touch()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "sub"], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path / "sub"], check=True)


WRITES = "for x in /m/top /m/sub/below; do touch $x 2>/dev/null && echo writes; done; ls /m/sub"
"""Prints a line for each place where it can write, and the names below."""


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        ("1.55", None, ""),
        ("1.44", None, ""),
        ("1.44", {}, ""),
        ("1.43", None, "writes\nbelow\n"),
        ("1.43", {}, "writes\nbelow\n"),
        ("1.24", None, "writes\nbelow\n"),
        ("1.55", {"ReadOnlyNonRecursive": True}, "writes\nbelow\n"),
        ("1.55", {"ReadOnlyForceRecursive": True}, ""),
        ("1.24", {"ReadOnlyForceRecursive": True}, ""),
        ("1.55", {"NonRecursive": True}, "hidden\n"),
        ("1.40", {"NonRecursive": True}, "hidden\n"),
        ("1.39", {"NonRecursive": True}, "writes\nbelow\n"),
    ],
)
def test_read_only_with_the_mounts_below(
    engine: TempEngine, tree: Path, version: str, options: dict[str, Any] | None, expected: str
) -> None:
    """`options` are those of a bind in Mounts; None: it is in Binds."""
    bind = {"Type": "bind", "Source": str(tree), "Target": "/m", "ReadOnly": True}
    host = {"Binds": [f"{tree}:/m:ro"]} if options is None else {"Mounts": [bind | {"BindOptions": options}]}
    assert output(engine, WRITES, version, **host) == expected


@pytest.mark.parametrize("options", [None, {}, {"ReadOnlyForceRecursive": True}])
def test_a_file_that_is_read_only(engine: TempEngine, tmp_path: Path, options: dict[str, Any] | None) -> None:
    """`options` as above. Such as a configuration file, or the socket of an engine."""
    (tmp_path / "file").write_text("content\n")
    host: dict[str, Any] = {"Binds": [f"{tmp_path}/file:/new/f:ro"]}
    if options is not None:
        bind = {"Type": "bind", "Source": f"{tmp_path}/file", "Target": "/new/f", "ReadOnly": True}
        host = {"Mounts": [bind | {"BindOptions": options}]}
    host = {**host, "VolumesFrom": [created(engine, ["true"], Binds=[f"{tmp_path}/file:/g"]) + ":ro"]}
    script = "cat /new/f /g; for x in /new/f /g; do echo x 2>/dev/null >$x || echo read-only; done"
    assert output(engine, script, **host) == "content\ncontent\nread-only\nread-only\n"
    assert output(engine, "ls /s", Binds=[f"{engine.socket}:/s:ro"]) == "/s\n"


def test_what_writes_writes_below(engine: TempEngine, tree: Path) -> None:
    assert output(engine, WRITES, Binds=[f"{tree}:/m"]) == "writes\nwrites\nbelow\n"
    source = created(engine, ["true"], Binds=[f"{tree}:/m"])
    assert output(engine, WRITES, VolumesFrom=[source]) == "writes\nwrites\nbelow\n"
    assert output(engine, WRITES, VolumesFrom=[f"{source}:ro"]) == "below\n"
    assert output(engine, WRITES, "1.43", VolumesFrom=[f"{source}:ro"]) == "writes\nbelow\n"


@pytest.mark.parametrize("words", ["ro", "ro,rslave"])
def test_the_host_for_agents(engine: TempEngine, tmp_path: Path, words: str) -> None:
    """As programs that watch a host ask for it, with all that is mounted there."""
    if words != "ro":
        subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
        subprocess.run(["mount", "--make-shared", tmp_path], check=True)
    try:
        source = "/" if words == "ro" else str(tmp_path)
        script = f"touch /host/x /host{tmp_path}/x /sys/x 2>/dev/null || echo read-only; ls /host >/dev/null"
        assert output(engine, script, Binds=[f"{source}:/host:{words}", "/sys:/sys:ro"]) == "read-only\n"
    finally:
        if words != "ro":
            subprocess.run(["umount", tmp_path], check=True)


def test_a_read_only_bind_stays_so_after_a_restart_of_the_engine(engine: TempEngine, tree: Path) -> None:
    container = created(engine, ["sh", "-c", WRITES], Binds=[f"{tree}:/m:ro"])
    engine.restart()
    started(engine, container)
    assert engine.wait(container) == 0 and engine.logs(container) == b""


@pytest.fixture
def data(engine: TempEngine) -> Iterator[str]:
    """The image `data:1` of two layers: `d/file` and `d/link`, which the second one changes."""
    lower = tar([directory("d"), Node("d/file", b"old\n"), Node("d/gone", b""), symlink("d/link", "/etc")])
    upper = tar([directory("d"), Node("d/file", b"new\n"), Node("d/.wh.gone", b"")])
    archive = docker_archive(Image([lower, upper, busybox_layer()], ["data:1"]))
    answer = engine.request("POST", "/v1.55/images/load", archive, {"Content-Type": "application/x-tar"})
    assert answer.status == 200 and b"error" not in answer.body, answer
    yield "data:1"


# --- parts of volumes -----------------------------------------------------------------------------


@pytest.fixture
def volume(engine: TempEngine) -> Path:
    """The volume `vol` with `d/e/file`, and links in it."""
    answer = engine.request("POST", "/v1.55/volumes/create", {"Name": "vol"})
    assert answer.status == 201, answer
    place = Path(answer.json()["Mountpoint"])
    (place / "d" / "e").mkdir(parents=True)
    (place / "d" / "e" / "file").write_text("content\n")
    (place / "inside").symlink_to("d/e")
    (place / "outside").symlink_to("../../..")
    (place / "absolute").symlink_to("/etc")
    return place


def part(subpath: str, target: str = "/p", **more: Any) -> dict[str, Any]:
    return {"Type": "volume", "Source": "vol", "Target": target, "VolumeOptions": {"Subpath": subpath}, **more}


def test_a_part_of_a_volume(engine: TempEngine, volume: Path) -> None:
    mounts = [part("d"), part("./d/e/", "/q", ReadOnly=True), part("inside", "/r")]
    mounts.append(part("d/e/file", "/f", ReadOnly=True))
    script = "ls /p /q /r; cat /f; touch /p/new; touch /q/no 2>/dev/null || echo read-only; test ! -e /p/../d"
    assert output(engine, script, Mounts=mounts) == ("/p:\ne\n\n/q:\nfile\n\n/r:\nfile\ncontent\nread-only\n")
    assert sorted(os.listdir(volume / "d")) == ["e", "new"]


@pytest.mark.parametrize(
    ("subpath", "status", "words"),
    [
        ("missing", 404, "cannot access path vol/missing: no such file or directory"),
        ("d/e/file/x", 404, "cannot access path vol/d/e/file/x: not a directory"),
        ("outside", 400, "path concatenation escapes the base directory"),
        ("absolute", 400, "path concatenation escapes the base directory"),
        ("outside/etc", 400, "path concatenation escapes the base directory"),
    ],
)
def test_parts_that_cannot_be_mounted(engine: TempEngine, volume: Path, subpath: str, status: int, words: str) -> None:
    container = created(engine, ["true"], Mounts=[part(subpath)])
    assert words in started(engine, container, status)
    removed(engine, container)


def test_a_container_cannot_move_a_part(engine: TempEngine, volume: Path) -> None:
    """The whole volume belongs to another container, which puts links in the part's path."""
    attacker = created(engine, ["sh", "-c", "rm -r /v/d; ln -s /etc /v/d"], Binds=["vol:/v"])
    victim = created(engine, ["cat", "/p/e/file"], Mounts=[part("d")])
    started(engine, victim)
    assert engine.wait(victim) == 0 and engine.logs(victim) == b"content\n"
    started(engine, attacker)
    assert engine.wait(attacker) == 0
    assert "escapes" in started(engine, victim, 400)
    answer = engine.request("GET", f"/v1.55/containers/{victim}/archive?path=/p/hostname")
    assert answer.status == 400 and "escapes" in answer.message


def test_files_of_a_part(engine: TempEngine, volume: Path) -> None:
    """Archive calls see what the container sees, whether it runs or not."""
    container = created(engine, ["sleep", "1000"], Mounts=[part("d/e")])
    path = f"/v1.55/containers/{container}/archive?path=/p"
    assert names_in(engine.request("GET", path)) == ["p", "p/file"]
    started(engine, container)
    assert names_in(engine.request("GET", path)) == ["p", "p/file"]
    engine.restart()
    assert names_in(engine.request("GET", path)) == ["p", "p/file"]
    body = tar([Node("put", b"x")])
    headers = {"Content-Type": "application/x-tar"}
    assert engine.request("PUT", path, body, headers).status == 200
    assert (volume / "d" / "e" / "put").read_text() == "x"


def test_a_part_is_inherited_as_a_part(engine: TempEngine, volume: Path) -> None:
    source = created(engine, ["true"], Mounts=[part("d/e")])
    assert output(engine, "ls /p", VolumesFrom=[source]) == "file\n"


def test_a_part_is_not_filled_from_the_image(engine: TempEngine, data: str, volume: Path) -> None:
    (volume / "empty").mkdir()
    body = {"Image": data, "Cmd": ["ls", "/d"], "HostConfig": {"Mounts": [part("empty", "/d")]}}
    answer = engine.request("POST", "/v1.55/containers/create", body)
    assert answer.status == 201, answer
    started(engine, answer.json()["Id"])
    assert engine.wait(answer.json()["Id"]) == 0
    assert os.listdir(volume / "empty") == []


# --- images ---------------------------------------------------------------------------------------


def image(target: str = "/i", source: str = "data:1", subpath: str = "", **more: Any) -> dict[str, Any]:
    options = {"ImageOptions": {"Subpath": subpath}} if subpath else {}
    return {"Type": "image", "Source": source, "Target": target, **options, **more}


def layers(engine: TempEngine) -> set[str]:
    return {name for name in os.listdir(engine.root / "layers") if name.isdecimal()}


def test_an_image_is_mounted(engine: TempEngine, data: str) -> None:
    mounts = [image(), image("/part", subpath="d")]
    script = "ls /i/d; cat /i/d/file /part/file; touch /i/x /part/x 2>/dev/null || echo read-only"
    assert output(engine, script, Mounts=mounts) == "file\nlink\nnew\nnew\nread-only\n"
    container = created(engine, ["/i/bin/busybox", "true"], Mounts=[image()])
    found = engine.request("GET", f"/v1.55/containers/{container}/json").json()
    (shown,) = found["Mounts"]
    identifier = engine.request("GET", "/v1.55/images/data:1/json").json()["Id"]
    assert shown == {
        "Type": "image",
        "Name": "data:1",
        "Source": identifier,
        "Destination": "/i",
        "Mode": "",
        "RW": False,
        "Propagation": "",
    }
    assert found["HostConfig"]["Mounts"] == [image()]
    (listed,) = (
        each for each in engine.request("GET", "/v1.55/containers/json?all=1").json() if each["Id"] == container
    )
    assert listed["Mounts"] == [shown]
    started(engine, container)
    assert engine.wait(container) == 0, "the program is in the mounted image"


@pytest.mark.parametrize("runtime", ["crun", "runc"])
def test_exec_beside_a_mounted_image(engine: TempEngine, data: str, runtime: str) -> None:
    """The root of such a container is at a place of its own, to which runc changes first."""
    container = created(engine, ["top"], Mounts=[image()], Runtime=runtime)
    started(engine, container)
    assert engine.docker("exec", container, "cat", "/i/d/file").out == "new\n"


@pytest.mark.parametrize(
    ("mount", "status", "words"),
    [
        (image(source="missing:1"), 404, "No such image: missing:1"),
        (image("/proc/1"), 400, "invalid mount destination"),
        (image(subpath="../x"), 400, "subpath must be a relative path within the image"),
    ],
)
def test_images_that_create_refuses(
    engine: TempEngine, data: str, mount: dict[str, Any], status: int, words: str
) -> None:
    answer = asked(engine, ["true"], Mounts=[mount])
    assert answer.status == status and words in answer.message


@pytest.mark.parametrize(
    ("subpath", "status", "words"), [("d/gone", 404, "cannot access path data:1/d/gone"), ("d/link", 400, "escapes")]
)
def test_parts_of_images_that_cannot_be_mounted(
    engine: TempEngine, data: str, subpath: str, status: int, words: str
) -> None:
    container = created(engine, ["true"], Mounts=[image(subpath=subpath)])
    assert words in started(engine, container, status)


def test_nothing_is_written_into_an_image(engine: TempEngine, data: str) -> None:
    container = created(engine, ["true"], Mounts=[image()])
    path = f"/v1.55/containers/{container}/archive?path=/i/d"
    answer = engine.request("PUT", path, tar([Node("x", b"")]), {"Content-Type": "application/x-tar"})
    assert answer.status == 403, answer


def calls(engine: TempEngine) -> list[str]:
    """Mounts that calls have made in the engine's mount namespace."""
    tasks = Path(f"/proc/{engine.pid}/task")
    found: set[str] = set()
    for task in os.listdir(tasks):
        with contextlib.suppress(OSError):  # the thread has just ended
            lines = (tasks / task / "mountinfo").read_text().splitlines()
            found |= {line.split()[4] for line in lines if line.split()[4].startswith("/calls/")}
    return sorted(found)


def test_starts_leave_nothing(engine: TempEngine, data: str, volume: Path) -> None:
    """Starts that succeed, and starts that fail at the last of several mounts."""
    good = created(engine, ["true"], Mounts=[part("d"), image(), image("/j", subpath="d")])
    bad = created(engine, ["true"], Mounts=[part("d"), image(), image("/j", subpath="none")])
    worse = created(engine, ["true"], Mounts=[image(), part("d"), part("none", "/q")])

    def once() -> None:
        started(engine, good)
        engine.wait(good)
        started(engine, bad, 404)
        started(engine, worse, 404)
        answer = engine.request("GET", f"/v1.55/containers/{bad}/archive?path=/")
        assert answer.status == 404, answer

    once()
    before = engine.descriptors()
    for _ in range(BREATH + 4):
        once()
    until("no descriptor is left", lambda: engine.descriptors() <= before + BREATH)
    until("no mount is left", lambda: calls(engine) == [])


def test_layers_stay_as_long_as_a_container_mounts_them(engine: TempEngine, data: str) -> None:
    before = layers(engine)
    container = created(engine, ["cat", "/i/d/file"], Mounts=[image()])
    removal = engine.request("DELETE", "/v1.55/images/data:1")
    assert removal.status == 409 and container[:12] in removal.message
    assert engine.request("DELETE", "/v1.55/images/data:1?force=1").status == 200
    for _ in range(2):
        started(engine, container)
        assert engine.wait(container) == 0
        engine.restart()
    assert engine.logs(container) == b"new\nnew\n"
    answer = engine.request("GET", f"/v1.55/containers/{container}/archive?path=/i/d")
    assert names_in(answer) == ["d", "d/file", "d/link"]
    heir = created(engine, ["cat", "/i/d/file"], VolumesFrom=[container])
    assert len(before - layers(engine)) == 0
    removed(engine, container)
    started(engine, heir)
    assert engine.wait(heir) == 0 and engine.logs(heir) == b"new\n"
    removed(engine, heir)
    until("its three layers are removed", lambda: len(before - layers(engine)) == 3)


def test_an_image_that_is_mounted_runs_on_through_a_kill(engine: TempEngine, data: str) -> None:
    container = created(engine, ["sleep", "1000"], Mounts=[image()])
    started(engine, container)
    engine.restart()
    done = engine.docker("exec", container, "cat", "/i/d/file")
    assert done.out == "new\n"
    assert engine.request("POST", f"/v1.55/containers/{container}/restart?t=0").status == 204
    assert engine.docker("exec", container, "cat", "/i/d/file").out == "new\n"
