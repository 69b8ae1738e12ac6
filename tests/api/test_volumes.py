"""Volumes: the endpoints, and the use of volumes by containers, through raw HTTP, the docker CLI
and docker-py."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest

from tests.support.engine.client import Answer
from tests.support.engine.harness import TempEngine, until
from tests.support.images.archives import Image as ArchiveImage
from tests.support.images.archives import Node, busybox_layer, directory, docker_archive, symlink, tar


@pytest.fixture
def engine(engine: TempEngine) -> Iterator[TempEngine]:
    """The shared engine, without volumes before and after."""
    remove_volumes(engine)
    yield engine
    engine.remove_all()
    remove_volumes(engine)


def remove_volumes(engine: TempEngine) -> None:
    for name in names(engine):
        assert engine.request("DELETE", f"/v1.24/volumes/{name}").status == 204


def names(engine: TempEngine, filters: Any = None) -> list[str]:
    query = f"?filters={json.dumps(filters, separators=(',', ':'))}" if filters is not None else ""
    answer = engine.request("GET", f"/v1.24/volumes{query}".replace('"', "%22").replace("{", "%7B"))
    assert answer.status == 200, answer
    found = answer.json()
    assert list(found) == ["Volumes", "Warnings"] and isinstance(found["Warnings"], list)
    return [volume["Name"] for volume in found["Volumes"]]


def make(engine: TempEngine, status: int = 201, **body: Any) -> Answer:
    answer = engine.request("POST", "/v1.24/volumes/create", body)
    assert answer.status == status, answer
    return answer


def run(engine: TempEngine, *arguments: str, status: int = 0) -> str:
    """`docker run --rm` of a shell script, the last argument."""
    *options, script = arguments
    done = engine.docker("run", "--rm", "--network", "none", *options, "busybox", "sh", "-c", script, status=None)
    assert done.status == status, done
    return done.out


def volume_events(engine: TempEngine, since: float) -> list[tuple[str, str, dict[str, str]]]:
    body = engine.request("GET", f"/v1.24/events?since={since:.9f}&until={time.time():.9f}").body
    events = [json.loads(line) for line in body.splitlines()]
    return [
        (each["Action"], each["Actor"]["ID"], each["Actor"]["Attributes"])
        for each in events
        if each["Type"] == "volume"
    ]


# --- the endpoints --------------------------------------------------------------------------------


def test_create_inspect_remove(engine: TempEngine) -> None:
    made = make(engine, Name="first", Driver="local", DriverOpts={}, Labels={"a": "1"}).json()
    place = made.pop("Mountpoint")
    assert made == {"Name": "first", "Driver": "local", "Labels": {"a": "1"}, "Scope": "local"}
    assert os.path.isabs(place) and os.path.isdir(place) and place.endswith("/volumes/first/_data")
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o755
    shown = engine.request("GET", "/v1.24/volumes/first")
    assert shown.status == 200 and shown.json() == {**made, "Mountpoint": place}
    assert engine.request("DELETE", "/v1.24/volumes/first?force=1").status == 204
    assert not os.path.exists(os.path.dirname(place))
    for method in ("GET", "DELETE"):
        answer = engine.request(method, "/v1.24/volumes/first")
        assert (answer.status, answer.message) == (404, "get first: no such volume")


def test_a_name_is_generated(engine: TempEngine) -> None:
    found = {make(engine).json()["Name"], make(engine, Name="").json()["Name"]}
    assert len(found) == 2 and all(re.fullmatch("[0-9a-f]{64}", name) for name in found)
    assert engine.request("POST", "/v1.24/volumes/create").status == 201


def test_create_again_is_the_same_volume(engine: TempEngine) -> None:
    first = make(engine, Name="same", Labels={"a": "1"}).json()
    Path(first["Mountpoint"], "file").write_text("kept")
    assert make(engine, Name="same", Labels={"b": "2"}).json() == first
    assert Path(first["Mountpoint"], "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"Name": "../x"}, 'create ../x: "../x" includes invalid characters for a local volume name'),
        ({"Name": "a"}, "create a: volume name is too short, names should be at least two alphanumeric characters"),
        ({"Name": "a b"}, "includes invalid characters"),
        ({"Name": "n" * 256}, "longer than"),
        ({"Name": "opts", "DriverOpts": {"foo": "bar"}}, 'create opts: invalid option key: "foo"'),
        ({"Name": "opts", "DriverOpts": {"type": "tmpfs"}}, 'missing required option: "device"'),
        ({"Name": 5}, "Name"),
        ({"Name": "x1", "Labels": ["a"]}, "Labels"),
    ],
)
def test_what_is_refused(engine: TempEngine, body: dict[str, Any], words: str) -> None:
    assert words in make(engine, 400, **body).message
    assert names(engine) == []
    assert os.listdir(engine.root / "volumes") == []


def test_an_unknown_driver(engine: TempEngine) -> None:
    answer = make(engine, 404, Name="vol", Driver="nosuch")
    assert answer.message == 'create vol: error looking up volume plugin nosuch: plugin "nosuch" not found'
    assert make(engine, 404, Name="vol", Driver="../../etc/x").message.endswith("not found")
    done = engine.request(
        "POST",
        "/v1.24/containers/create",
        {"Image": "busybox", "HostConfig": {"Binds": ["vol:/v", "other:/o"], "VolumeDriver": "nosuch"}},
    )
    assert done.status == 400 and "error looking up volume plugin nosuch" in done.message
    make(engine, Name="vol")
    answer = make(engine, 409, Name="vol", Driver="nosuch")
    assert answer.message == "A volume named vol already exists. Choose a different volume name."
    assert names(engine) == ["vol"]


def test_filters(engine: TempEngine) -> None:
    for name, labels in (("one", {"a": "1"}), ("two", {"a": "2", "b": ""}), ("three", {})):
        make(engine, Name=name, Labels=labels)
    engine.create("true", host={"Binds": ["one:/v"]})
    assert names(engine) == ["one", "three", "two"]
    assert names(engine, {"name": ["o"]}) == ["one", "two"]
    assert names(engine, {"name": {"thr": True, "one": True}}) == ["one", "three"]
    assert names(engine, {"driver": ["loc"]}) == ["one", "three", "two"]
    assert names(engine, {"driver": ["other"]}) == []
    assert names(engine, {"label": ["a"]}) == ["one", "two"]
    assert names(engine, {"label": ["a=2", "b"]}) == ["two"]
    assert names(engine, {"dangling": ["true"]}) == names(engine, {"dangling": {"1": True}}) == ["three", "two"]
    assert names(engine, {"dangling": ["0"]}) == names(engine, {"dangling": ["false"]}) == ["one"]
    assert names(engine, {"dangling": ["true"], "name": ["two"]}) == ["two"]
    for bad in ("{%22dangling%22:[%22maybe%22]}", "{%22nonsense%22:[%22x%22]}", "[1"):
        assert engine.request("GET", f"/v1.24/volumes?filters={bad}").status == 400


def test_remove_in_use_names_the_users(engine: TempEngine) -> None:
    make(engine, Name="busy")
    users = [engine.create("true", host={"Binds": ["busy:/v"]}), engine.started("true", host={"Binds": ["busy:/v:ro"]})]
    answer = engine.request("DELETE", "/v1.24/volumes/busy")
    expected = f"unable to remove volume: remove busy: volume is in use - [{', '.join(users)}]"
    assert (answer.status, answer.message) == (409, expected)
    engine.remove_all()
    assert engine.request("DELETE", "/v1.24/volumes/busy").status == 204


def test_events(engine: TempEngine) -> None:
    since = time.time()
    make(engine, Name="ev")
    container = engine.started("true", host={"Binds": ["ev:/mnt:ro"]})
    engine.wait(container)
    until("unmounted", lambda: any(action == "unmount" for action, *_ in volume_events(engine, since)))
    assert engine.request("DELETE", f"/v1.24/containers/{container}").status == 204
    assert engine.request("DELETE", "/v1.24/volumes/ev").status == 204
    mounted = {
        "container": container,
        "destination": "/mnt",
        "driver": "local",
        "propagation": "",
        "read/write": "false",
    }
    assert volume_events(engine, since) == [
        ("create", "ev", {"driver": "local"}),
        ("mount", "ev", mounted),
        ("unmount", "ev", {"container": container, "driver": "local"}),
        ("destroy", "ev", {"driver": "local"}),
    ]


def test_the_order_of_events_is_dockers(engine: TempEngine) -> None:
    since = time.time()
    make(engine, Name="ordered")
    container = engine.started("true", network="bridge", host={"Binds": ["ordered:/mnt"]})
    engine.wait(container)
    engine.remove_all()
    events = engine.request("GET", f"/v1.24/events?since={since}&until={time.time() + 0.001}").body.splitlines()
    seen = [json.loads(event) for event in events]
    assert [
        f"{event['Type']} {event['Action']}"
        for event in seen
        if container in (event["Actor"]["ID"], event["Actor"]["Attributes"].get("container"))
    ] == [
        "container create",
        "network connect",
        "volume mount",
        "container start",
        "container die",
        "network disconnect",
        "volume unmount",
        "container destroy",
    ]


# --- volumes of containers ------------------------------------------------------------------------


def test_forms_of_v(engine: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("host\n")
    assert run(engine, "-v", f"{tmp_path}:/h", "cat /h/file; echo out >/h/new") == "host\n"
    assert (tmp_path / "new").read_text() == "out\n"
    assert "Read-only" in run(engine, "-v", f"{tmp_path}:/h:ro", "touch /h/x 2>&1; true")
    run(engine, "-v", f"{tmp_path}/made/deep:/h", "true")
    assert (tmp_path / "made" / "deep").is_dir()
    run(engine, "-v", f"{tmp_path}/file:/etc/one:ro", "grep host /etc/one")
    run(engine, "-v", "named:/v", "echo kept >/v/f")
    assert run(engine, "-v", "named:/v:ro", "cat /v/f; touch /v/x 2>/dev/null || echo ro") == "kept\nro\n"
    assert run(engine, "-v", "named:/v:z", "-v", "/anonymous", "ls /v /anonymous") == "/anonymous:\n\n/v:\nf\n"
    assert names(engine) == ["named"]
    inside = run(engine, "-v", f"{tmp_path}:/h", "-v", "named:/h/made", "cat /h/made/f; cat /h/file")
    assert inside == "kept\nhost\n"


def test_mounts_in_inspect_and_list(engine: TempEngine, tmp_path: Path) -> None:
    container = engine.create(
        "true",
        Volumes={"/anon": {}, "/named": {}},
        host={
            "Binds": [f"{tmp_path}:/bind:ro,Z", "named:/named:nocopy", f"{tmp_path}:/slave:rslave", "plain:/plain"],
            "Mounts": [{"Type": "volume", "Source": "plain", "Target": "/mounted"}],
        },
    )
    shown = {each["Destination"]: each for each in engine.inspect(container)["Mounts"]}
    assert [shown.pop(path)["Mode"] for path in ("/plain", "/mounted")] == ["z", "z"]
    anonymous = shown.pop("/anon")
    name = anonymous["Name"]
    root = str(engine.root / "volumes")
    assert re.fullmatch("[0-9a-f]{64}", name)
    common = {"Type": "volume", "Driver": "local", "RW": True, "Propagation": ""}
    assert anonymous == {
        "Name": name,
        "Source": f"{root}/{name}/_data",
        "Destination": "/anon",
        "Mode": "",
        **common,
    }
    assert shown == {
        "/bind": {
            "Type": "bind",
            "Source": str(tmp_path),
            "Destination": "/bind",
            "Mode": "ro,Z",
            "RW": False,
            "Propagation": "rprivate",
        },
        "/named": {
            "Name": "named",
            "Source": f"{root}/named/_data",
            "Destination": "/named",
            "Mode": "nocopy",
            **common,
        },
        "/slave": {
            "Type": "bind",
            "Source": str(tmp_path),
            "Destination": "/slave",
            "Mode": "rslave",
            "RW": True,
            "Propagation": "rslave",
        },
    }
    listed = engine.request("GET", "/v1.24/containers/json?all=1").json()
    assert {each["Destination"] for each in listed[0]["Mounts"]} == {"/anon", "/plain", "/mounted", *shown}
    for value, found in (("named", 1), (name, 1), ("/bind", 1), ("/nothing", 0), ("nam", 0)):
        filters = f'{{"volume":["{value}"]}}'.replace('"', "%22")
        answer = engine.request("GET", f"/v1.24/containers/json?all=1&filters={filters}")
        assert len(answer.json()) == found, value


@pytest.mark.own
def test_old_versions_show_volumes_by_destination(engine: TempEngine, tmp_path: Path) -> None:
    container = engine.create("true", host={"Binds": [f"{tmp_path}:/bind:ro", "named:/v"]})
    for version, has in (("1.18", True), ("1.19", True), ("1.20", False), ("1.24", False)):
        shown = engine.request("GET", f"/v{version}/containers/{container}/json").json()
        if has:
            assert shown["Volumes"] == {"/bind": str(tmp_path), "/v": f"{engine.root}/volumes/named/_data"}
            assert shown["VolumesRW"] == {"/bind": False, "/v": True}
        else:
            assert "Volumes" not in shown and "VolumesRW" not in shown


def test_removal_takes_anonymous_volumes_along(engine: TempEngine) -> None:
    def made(**host: Any) -> str:
        return engine.create("true", Volumes={"/anon": {}}, host=host)

    def anonymous(container: str) -> str:
        found = engine.inspect(container)["Mounts"]
        return next(str(each["Name"]) for each in found if each["Destination"] == "/anon")

    def remove(container: str, query: str) -> None:
        assert engine.request("DELETE", f"/v1.24/containers/{container}{query}").status == 204

    first = made(Binds=["named:/n"])
    volume = anonymous(first)
    remove(first, "")
    assert names(engine) == sorted([volume, "named"])
    second = made(Binds=["named:/n"])
    theirs = anonymous(second)
    remove(second, "?v=1")
    assert names(engine) == sorted([volume, "named"])
    # It is kept while other containers use it. The last one removes it, if it did not name it.
    third = made()
    shared = anonymous(third)
    inherits = engine.create("true", host={"VolumesFrom": [third]})
    remove(third, "?v=1")
    assert shared in names(engine) and shared != theirs
    remove(inherits, "?v=1")
    assert shared not in names(engine)
    # A container that named the volume does not remove it.
    fourth = engine.create("true", host={"Binds": [f"{volume}:/n"]})
    remove(fourth, "?v=1")
    assert volume in names(engine)


def test_docker_rm_v_and_run_rm(engine: TempEngine) -> None:
    engine.docker("run", "--name", "c1", "--network", "none", "-v", "/a", "-v", "named:/n", "busybox", "true")
    assert len(names(engine)) == 2
    engine.docker("rm", "-v", "c1")
    assert names(engine) == ["named"]
    run(engine, "-v", "/a", "true")
    assert names(engine) == ["named"]


def test_volumes_from(engine: TempEngine) -> None:
    source = engine.started(
        "sh", "-c", "echo x >/anon/f; echo y >/n/f", Volumes={"/anon": {}}, host={"Binds": ["named:/n"]}
    )
    assert engine.wait(source) == 0
    script = "cat /anon/f /n/f; echo more >>/n/f"
    assert run(engine, "--volumes-from", source, script) == "x\ny\n"
    refused = run(
        engine, "--volumes-from", f"{source}:ro", "touch /anon/f 2>/dev/null || touch /n/f 2>/dev/null || echo ro"
    )
    assert refused == "ro\n"
    own = run(engine, "--volumes-from", source, "-v", "other:/n", "ls /n; cat /anon/f")
    assert own == "x\n"
    tmpfs = run(engine, "--volumes-from", source, "--tmpfs", "/n", "grep -c ' /n tmpfs ' /proc/mounts; cat /anon/f")
    assert tmpfs == "1\nx\n"


def test_a_failed_create_leaves_no_volume(engine: TempEngine, tmp_path: Path) -> None:
    (engine.root / "volumes").mkdir(exist_ok=True)
    body = {
        "Image": "busybox",
        "Volumes": {"/fine": {}, "/etc/passwd": {}},
        "HostConfig": {"Binds": ["fresh:/also"]},
    }
    answer = engine.request("POST", "/v1.24/containers/create", body)
    assert answer.status == 400
    assert answer.message == "cannot mount volume over existing file, file exists /etc/passwd"
    assert names(engine) == [] and os.listdir(engine.root / "volumes") == []
    assert engine.containers() == []
    for binds in (["fresh:/a", "bad/name:/b"], ["fresh:/a", "x:/b"]):
        answer = engine.request(
            "POST", "/v1.24/containers/create", {"Image": "busybox", "HostConfig": {"Binds": binds}}
        )
        assert answer.status == 400, answer
    assert names(engine) == [] and os.listdir(engine.root / "volumes") == []


@pytest.mark.parametrize(
    "bind",
    [
        "a",
        "/",
        "/a:ro",
        "/a:",
        ":/a",
        "/a:b",
        "/a:/",
        "v:/b:ro,rw",
        "v:/b:z,Z",
        "v:/b:rshared",
        "/a:/b:nocopy",
        "/a:/b:ro:x",
    ],
)
def test_bad_binds(engine: TempEngine, bind: str) -> None:
    answer = engine.request("POST", "/v1.24/containers/create", {"Image": "busybox", "HostConfig": {"Binds": [bind]}})
    assert answer.status == 400 and "bind mount spec" in answer.message, answer


def test_many_containers_make_one_volume(engine: TempEngine) -> None:
    made: list[str] = []

    def create(own: str) -> None:
        made.append(engine.create("true", host={"Binds": ["both:/v", f"{own}:/w"]}))

    threads = [threading.Thread(target=create, args=(f"own{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and names(engine) == sorted(["both", *(f"own{n}" for n in range(8))])


# --- the image's content --------------------------------------------------------------------------


@pytest.fixture
def filled(engine: TempEngine) -> str:
    """An image with VOLUME /data in two layers, and a link that points outside it."""
    lower = [
        directory("data/", 0o2750, uid=7, gid=8),
        Node("data/one", b"1", mode=0o640, uid=7, gid=9),
        Node("data/gone", b"x"),
        directory("empty/", 0o1777, uid=3),
        symlink("escape", "/../../../../etc"),
    ]
    upper = [Node("data/two", b"2", mode=0o4755), Node("data/.wh.gone")]
    image = ArchiveImage(
        [busybox_layer(), tar(lower), tar(upper)],
        ("filled:latest",),
        {"Cmd": ["sh"], "Volumes": {"/data": {}, "/absent": {}}},
    )
    answer = engine.request(
        "POST", "/v1.24/images/load?quiet=1", docker_archive(image), {"Content-Type": "application/x-tar"}
    )
    assert answer.status == 200 and b"error" not in answer.body
    return "filled"


def test_copy_up(engine: TempEngine, filled: str) -> None:
    container = engine.create("true", Image=filled, host={"Binds": ["empty:/empty"]})
    shown = {each["Destination"]: Path(each["Source"]) for each in engine.inspect(container)["Mounts"]}
    assert sorted(shown) == ["/absent", "/data", "/empty"]
    data = shown["/data"]
    assert sorted(os.listdir(data)) == ["one", "two"]
    status = data.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o2750, 7, 8)
    status = (data / "one").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o640, 7, 9)
    assert stat.S_IMODE((data / "two").stat().st_mode) == 0o4755
    empty = shown["/empty"].stat()
    assert (stat.S_IMODE(empty.st_mode), empty.st_uid, os.listdir(shown["/empty"])) == (0o1777, 3, [])
    assert os.listdir(shown["/absent"]) == []


def test_copy_up_into_named_volumes_only_when_empty(engine: TempEngine, filled: str) -> None:
    def content(bind: str) -> list[str]:
        container = engine.create("true", Image=filled, host={"Binds": [bind]})
        source = next(each["Source"] for each in engine.inspect(container)["Mounts"] if each["Destination"] == "/data")
        return sorted(os.listdir(source))

    assert content("nocopy:/data:nocopy") == []
    assert content("fresh:/data:ro") == ["one", "two"]
    assert content("fresh:/data") == ["one", "two"]
    place = make(engine, Name="used").json()["Mountpoint"]
    Path(place, "mine").write_text("")
    assert content("used:/data") == ["mine"]
    Path(place, "mine").unlink()
    assert content("used:/data") == ["one", "two"]


def test_copy_up_stays_in_the_image(engine: TempEngine, filled: str) -> None:
    container = engine.create("true", Image=filled, host={"Binds": ["v1:/escape"]})
    source = next(each["Source"] for each in engine.inspect(container)["Mounts"] if each["Destination"] == "/escape")
    assert sorted(os.listdir(source)) == ["group", "passwd"]  # the image's own /etc
    engine.post(f"/containers/{container}/start")
    assert engine.wait(container) == 0


# --- clients --------------------------------------------------------------------------------------


def test_docker_volume(engine: TempEngine) -> None:
    assert engine.docker("volume", "create", "--label", "a=b", "cli").line == "cli"
    assert re.fullmatch("[0-9a-f]{64}", engine.docker("volume", "create").line)
    assert engine.docker("volume", "ls", "-q", "-f", "name=cli").line == "cli"
    assert engine.docker("volume", "ls", "-q", "-f", "dangling=true").out.count("\n") == 2
    assert (
        engine.docker("volume", "inspect", "-f", "{{.Driver}} {{.Labels.a}} {{.Scope}}", "cli").line == "local b local"
    )
    assert engine.docker("inspect", "-f", "{{.Name}}", "cli").line == "cli"
    options = ("-d", "local", "-o", "type=tmpfs", "-o", "device=tmpfs", "-o", "o=size=1m,uid=5")
    assert engine.docker("volume", "create", *options, "small").line == "small"
    assert run(engine, "-v", "small:/s", "df -k /s | tail -1 | awk '{print $2}'; stat -c %u /s") == "1024\n5\n"
    missing = engine.docker("volume", "inspect", "nothing", status=1)
    assert "no such volume" in missing.err.lower()
    engine.docker("create", "--name", "user", "-v", "cli:/v", "busybox")
    busy = engine.docker("volume", "rm", "cli", status=1)
    assert "volume is in use" in busy.err
    engine.docker("rm", "user")
    assert engine.docker("volume", "rm", "cli", "small").out == "cli\nsmall\n"
    refused = engine.docker("run", "--rm", "-v", "./no:/x", "busybox", status=None)
    assert refused.status in (0, 125)  # newer clients make it an absolute path


def test_docker_py(engine: TempEngine, tmp_path: Path) -> None:
    client = engine.client()
    try:
        made = client.volumes.create("py", driver="local", labels={"k": "v"})
        assert made.name == "py" and made.attrs["Labels"] == {"k": "v"}
        assert [each.name for each in client.volumes.list(filters={"dangling": True})] == ["py"]
        volumes = {"py": {"bind": "/v", "mode": "rw"}, str(tmp_path): {"bind": "/h", "mode": "ro"}}
        out = client.containers.run("busybox", ["sh", "-c", "echo x >/v/f; ls /h"], volumes=volumes, remove=True)
        assert out == b""
        assert Path(made.attrs["Mountpoint"], "f").read_text() == "x\n"
        container = client.containers.create("busybox", "true", volumes=["/one", "py:/two:ro"])
        shown = {each["Destination"]: each["RW"] for each in container.attrs["Mounts"]}
        assert shown == {"/one": True, "/two": False}
        with pytest.raises(docker.errors.APIError) as raised:
            made.remove()
        assert raised.value.status_code == 409
        heir = client.containers.create("busybox", "true", volumes_from=[f"{container.name}:ro"])
        assert {each["Destination"]: each["RW"] for each in heir.attrs["Mounts"]} == {"/one": False, "/two": False}
        heir.remove(v=True)
        assert len(client.volumes.list()) == 2
        container.remove(v=True)
        assert [each.name for each in client.volumes.list()] == ["py"]
        made.remove()
        with pytest.raises(docker.errors.NotFound):
            client.volumes.get("py")
    finally:
        client.close()


def test_mount_points_are_made_as_docker_makes_them(engine: TempEngine, tmp_path: Path) -> None:
    """Directories and files are 0755, also inside mounts around them, with every runtime."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    binds = [f"{tmp_path}/directory:/a/b", f"{tmp_path}/file:/c/d", f"{tmp_path}/file:/a/b/in/file", "named:/e/f"]
    host = {"Binds": binds, "Tmpfs": {"/t/u": ""}}
    made = {"Image": "busybox", "Cmd": ["true"], "Volumes": {"/a/b/volume": {}}, "HostConfig": host}
    answer = engine.request("POST", "/v1.24/containers/create", made)
    assert answer.status == 201, answer
    container = answer.json()["Id"]
    engine.post(f"/containers/{container}/start")
    assert engine.wait(container) == 0
    exported = engine.request("GET", f"/v1.24/containers/{container}/export").body
    with tarfile.open(fileobj=io.BytesIO(exported)) as archive:
        modes = {each.name.rstrip("/"): each.mode for each in archive.getmembers()}
    points = ("a", "a/b", "c", "c/d", "e", "e/f", "t", "t/u", "etc/hosts", "etc/hostname", "etc/resolv.conf")
    assert {name: oct(modes[name]) for name in points} == dict.fromkeys(points, "0o755")
    for name in ("in", "in/file", "volume"):
        assert stat.S_IMODE((tmp_path / "directory" / name).stat().st_mode) == 0o755, name


def test_sizes(engine: TempEngine) -> None:
    """SizeRw counts the container's writes to its own layer, and nothing in its volumes."""
    script = (
        "dd if=/dev/zero of=/own bs=1000 count=300; ln /own /other; ln -s /target /link; "
        "dd if=/dev/zero of=/v/f bs=1000 count=700"
    )
    container = engine.started("sh", "-c", script, Volumes={"/v": {}})
    assert engine.wait(container) == 0
    shown = engine.request("GET", f"/v1.24/containers/{container}/json?size=1").json()
    # a file counts once, a link with the length of its target, as in Docker
    assert shown["SizeRw"] == 300_007
    images = {each["Id"]: each["Size"] for each in engine.request("GET", "/v1.24/images/json").json()}
    assert shown["SizeRootFs"] == images[shown["Image"]] + 300_007
    listed = engine.request("GET", "/v1.24/containers/json?all=1&size=1").json()
    assert (listed[0]["SizeRw"], listed[0]["SizeRootFs"]) == (shown["SizeRw"], shown["SizeRootFs"])
