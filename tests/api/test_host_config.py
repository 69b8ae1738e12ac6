"""HostConfig wherever clients put it and in every version: Mounts, Init, AutoRemove, outside
HostConfig, and in the body of a start."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.builds.building import printed
from tests.support.engine import cgroups
from tests.support.engine.harness import TempEngine, until

MISSING = 'invalid mount config for type "bind": bind source path does not exist: '


def post(engine: TempEngine, path: str, body: Any = None, status: int = 204, version: str = "1.24") -> Any:
    answer = engine.request("POST", f"/v{version}{path}", body)
    assert answer.status == status, answer
    return answer.json() if answer.body else None


@pytest.fixture
def tidied(engine: TempEngine) -> Iterator[TempEngine]:
    """The engine, for a test that makes images."""
    yield engine
    engine.remove_all()
    busybox = engine.request("GET", "/v1.24/images/busybox/json").json()["Id"]
    for image in engine.request("GET", "/v1.24/images/json?all=1").json():
        if image["Id"] != busybox:
            assert engine.request("DELETE", f"/v1.24/images/{image['Id']}?force=1").status == 200
    assert engine.request("DELETE", "/v1.24/images/x:1").status in (200, 404)


def filters(**wanted: str) -> str:
    return quote(json.dumps({name: [value] for name, value in wanted.items()}))


def output(engine: TempEngine, *command: str, **host: Any) -> str:
    """Output of a container that runs to its end."""
    identifier = engine.started(*command, host=host)
    assert engine.wait(identifier) == 0, engine.logs(identifier)
    return engine.logs(identifier).decode()


# --- Mounts ---------------------------------------------------------------------------------------


def test_mounts_of_each_type(engine: TempEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from the host")
    mounts = [
        {"Type": "volume", "Source": "mounts-v", "Target": "/x", "VolumeOptions": {"Labels": {"a": "b"}}},
        {"Type": "bind", "Source": str(tmp_path), "Target": "/y", "ReadOnly": True},
        {"Type": "tmpfs", "Target": "/z", "TmpfsOptions": {"SizeBytes": 1 << 20, "Mode": 0o700}},
    ]
    first = engine.started(
        "sh", "-c", "echo kept >/x/f; cat /y/file; ! touch /y/no; df -k /z | tail -1", host={"Mounts": mounts}
    )
    assert engine.wait(first) == 0
    said = engine.logs(first).decode()
    assert "from the host" in said and " 1024 " in said
    shown = {each["Destination"]: each for each in engine.inspect(first)["Mounts"]}
    assert {path: each["Type"] for path, each in shown.items()} == {"/x": "volume", "/y": "bind", "/z": "tmpfs"}
    assert (shown["/x"]["Name"], shown["/y"]["Source"], shown["/y"]["RW"]) == ("mounts-v", str(tmp_path), False)
    assert engine.inspect(first)["HostConfig"]["Mounts"][0]["Source"] == "mounts-v"
    assert engine.request("GET", "/v1.24/volumes/mounts-v").json()["Labels"] == {"a": "b"}
    assert output(engine, "cat", "/x/f", Mounts=mounts) == "kept\n"
    listed = engine.request("GET", "/v1.24/containers/json?all=1").json()
    assert {each["Type"] for entry in listed for each in entry["Mounts"]} >= {"volume", "bind", "tmpfs"}


def test_a_shared_tmpfs(engine: TempEngine) -> None:
    lines = output(engine, "cat", "/proc/self/mountinfo", Tmpfs={"/t": "shared"}).splitlines()
    assert " shared:" in next(line for line in lines if " /t " in line)


def test_mounts_by_the_docker_cli(engine: TempEngine) -> None:
    engine.docker("run", "--rm", "--mount", "type=volume,source=cli-v,target=/x", "busybox", "touch", "/x/there")
    result = engine.docker("run", "--rm", "--mount", "type=volume,source=cli-v,target=/x", "busybox", "ls", "/x")
    assert result.line == "there"
    result = engine.docker(
        "run", "--rm", "--mount", "type=bind,source=/no/such,target=/x", "busybox", "true", status=125
    )
    assert MISSING + "/no/such" in result.err


def test_binds_of_mounts_are_not_made_unless_asked_for(engine: TempEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "new")
    mount: dict[str, Any] = {"Type": "bind", "Source": path, "Target": "/x"}
    answer = engine.request("POST", "/v1.24/containers/create", {"Image": "busybox", "HostConfig": {"Mounts": [mount]}})
    assert (answer.status, answer.message) == (400, MISSING + path)
    identifier = engine.create("true", host={"Mounts": [mount | {"BindOptions": {"CreateMountpoint": True}}]})
    engine.post(f"/containers/{identifier}/start")
    assert os.path.isdir(path)
    os.mkdir(tmp_path / "gone")
    identifier = engine.create("true", host={"Mounts": [mount | {"Source": f"{tmp_path}/gone"}]})
    os.rmdir(tmp_path / "gone")
    assert MISSING in engine.request("POST", f"/v1.24/containers/{identifier}/start").message


@pytest.mark.parametrize(
    ("host", "image_volume"),
    [
        ({"Binds": ["/tmp:/proc//sys"]}, ""),
        ({"Binds": ["/tmp:/proc"]}, ""),
        ({"Binds": ["/tmp:/sys"]}, ""),
        ({"Tmpfs": {"/proc/self/attr": ""}}, ""),
        ({"Mounts": [{"Type": "tmpfs", "Target": "/proc/self"}]}, ""),
        ({}, "/proc"),
    ],
)
def test_nothing_is_mounted_over_proc_and_sys(tidied: TempEngine, host: dict[str, Any], image_volume: str) -> None:
    """Not by an image's VOLUME either (CVE-2019-16884), with any runtime."""
    engine = tidied
    image = "busybox"
    if image_volume:
        base = engine.create("true")
        image = "evil"
        post(engine, f"/commit?container={base}&repo={image}&changes=" + quote(f"VOLUME {image_volume}"), status=201)
    answer = engine.request("POST", "/v1.24/containers/create", {"Image": image, "Cmd": ["true"], "HostConfig": host})
    assert answer.status == 400 and "invalid mount destination" in answer.message, answer


def test_a_link_of_the_image_leads_no_mount_over_proc(tidied: TempEngine) -> None:
    engine = tidied
    base = engine.started("ln", "-s", "/proc/self", "/link")
    assert engine.wait(base) == 0
    post(engine, f"/commit?container={base}&repo=linked", status=201)
    identifier = engine.create("true", Image="linked", Volumes={"/link/attr": {}})
    answer = engine.request("POST", f"/v1.24/containers/{identifier}/start")
    assert answer.status == 400 and "invalid mount destination" in answer.message, answer


def test_the_top_of_the_cgroup_tree_is_read_only(engine: TempEngine) -> None:
    assert (
        output(
            engine,
            "sh",
            "-c",
            "mkdir /sys/fs/cgroup/x 2>/dev/null && echo made; touch /sys/fs/cgroup/y 2>/dev/null && echo made; true",
        )
        == ""
    )


# --- other fields of newer versions ---------------------------------------------------------------


def test_auto_remove(engine: TempEngine) -> None:
    identifier = engine.create("sh", "-c", "exit 3", Volumes={"/v": {}}, host={"AutoRemove": True})
    volume = engine.inspect(identifier)["Mounts"][0]["Name"]
    engine.post(f"/containers/{identifier}/start")
    until("it is gone", lambda: engine.request("GET", f"/v1.24/containers/{identifier}/json").status == 404)
    until("its volume is gone", lambda: engine.request("GET", f"/v1.24/volumes/{volume}").status == 404)
    query = f"&filters={filters(container=identifier)}"

    def actions() -> list[str]:
        history = engine.request("GET", f"/v1.24/events?since=0&until={time.time():.9f}{query}").body
        return [json.loads(line)["status"] for line in history.splitlines()]

    until("the events", lambda: actions()[-2:] == ["die", "destroy"])
    body = {"Image": "busybox", "HostConfig": {"AutoRemove": True, "RestartPolicy": {"Name": "always"}}}
    assert "AutoRemove" in engine.request("POST", "/v1.24/containers/create", body).message


def test_auto_remove_of_a_start_that_fails(engine: TempEngine) -> None:
    """As in dockerd it is gone, with its volume, when the client has the error."""
    identifier = engine.create("/nothere", Volumes={"/v": {}}, host={"AutoRemove": True})
    volume = engine.inspect(identifier)["Mounts"][0]["Name"]
    assert "no such file" in engine.request("POST", f"/v1.24/containers/{identifier}/start").message
    assert engine.request("GET", f"/v1.24/containers/{identifier}/json").status == 404
    assert engine.request("GET", f"/v1.24/volumes/{volume}").status == 404


def test_the_largest_quota_and_number_of_processes(engine: TempEngine) -> None:
    """The kernel takes these; what is above them is refused at the create, not at the start."""
    identifier = engine.started("sleep", "600", host={"CpuQuota": 2**44 - 1, "PidsLimit": 4 << 20})
    assert cgroups.Group(engine.inspect(identifier)["State"]["Pid"]).quota == 2**44 - 1
    for host in ({"CpuQuota": 2**44}, {"PidsLimit": (4 << 20) + 1}):
        answer = engine.request("POST", "/v1.24/containers/create", {"Image": "busybox", "HostConfig": host})
        assert (answer.status, next(iter(host)) in answer.message) == (400, True)


def test_stop_timeout(engine: TempEngine) -> None:
    """The one with a second is killed while the other one still has minutes."""
    deaf = "sh", "-c", "trap '' TERM; echo on; while :; do sleep 0.1; done"
    long, short = (engine.started(*deaf, StopTimeout=seconds) for seconds in (600, 1))
    for identifier in (long, short):
        until("it has set its trap", lambda each=identifier: engine.logs(each) == b"on\n")
    stopping = threading.Thread(target=engine.post, args=(f"/containers/{long}/stop",))
    stopping.start()
    try:
        begin = time.monotonic()
        engine.post(f"/containers/{short}/stop")
        assert time.monotonic() - begin > 0.9
        assert engine.inspect(long)["State"]["Running"]
    finally:
        engine.post(f"/containers/{long}/kill")
        stopping.join()


def test_nano_cpus(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600", host={"NanoCpus": 500_000_000})
    group = cgroups.Group(engine.inspect(identifier)["State"]["Pid"])
    assert (group.quota, group.period) == (50_000, 100_000)
    assert engine.inspect(identifier)["HostConfig"]["NanoCpus"] == 500_000_000


def test_init_is_obeyed_or_refused(engine: TempEngine) -> None:
    body = {"Image": "busybox", "Cmd": ["ps", "-o", "pid,args"], "HostConfig": {"Init": True, "NetworkMode": "none"}}
    answer = engine.request("POST", "/v1.24/containers/create", body)
    path = "/usr/libexec/docker:/usr/libexec/podman:" + os.environ["PATH"]
    if not any(shutil.which(name, path=path) for name in ("docker-init", "tini-static", "catatonit")):
        assert (answer.status, answer.message[:5]) == (400, "Init:")
        return
    identifier = answer.json()["Id"]
    engine.post(f"/containers/{identifier}/start")
    assert engine.wait(identifier) == 0
    assert "1 /sbin/docker-init -- ps" in engine.logs(identifier).decode()


def test_device_cgroup_rules(engine: TempEngine) -> None:
    """1:11 is /dev/kmsg. Opening it for writing needs no capability, and writes nothing."""
    command = ["sh", "-c", "mknod /x c 1 11; if true >/x; then echo opened; fi 2>/dev/null"]
    assert output(engine, *command) == ""
    assert output(engine, *command, DeviceCgroupRules=["c 1:11 w"]) == "opened\n"


def test_system_paths(engine: TempEngine) -> None:
    command = ("sh", "-c", "grep -c ' /proc/' /proc/self/mounts; true")
    assert int(engine.docker("run", "--rm", "busybox", *command).out) > 5
    free = engine.docker("run", "--rm", "--security-opt", "systempaths=unconfined", "busybox", *command)
    assert free.out == "0\n"


def test_cgroup_namespace(engine: TempEngine) -> None:
    """A private namespace shows the container's own group as the root."""
    groups = output(engine, "cat", "/proc/self/cgroup", CgroupnsMode="private").splitlines()
    assert groups and all(line.endswith(":/") for line in groups)


def test_what_this_engine_does_not_have_is_refused(engine: TempEngine) -> None:
    for host in ({"CpuRealtimePeriod": 5}, {"CpuRealtimeRuntime": 5}, {"Capabilities": ["CAP_CHOWN"]}):
        answer = engine.request("POST", "/v1.24/containers/create", {"Image": "busybox", "HostConfig": host})
        assert answer.status == 400 and answer.message == f"{next(iter(host))} is not supported by this engine"


def test_platform(engine: TempEngine) -> None:
    body = {"Image": "busybox", "Cmd": ["true"]}
    assert engine.request("POST", "/v1.24/containers/create?platform=linux", body).status == 201
    answer = engine.request("POST", "/v1.24/containers/create?platform=plan9%2Fmips", body)
    assert answer.status == 404 and "does not match the specified platform (plan9/mips)" in answer.message


# --- other places in the body ---------------------------------------------------------------------


def test_fields_of_host_config_beside_it(engine: TempEngine) -> None:
    def host(body: dict[str, Any]) -> dict[str, Any]:
        return dict(
            engine.inspect(post(engine, "/containers/create", {"Image": "busybox"} | body, 201)["Id"])["HostConfig"]
        )

    found = host({"CpuShares": 512, "Cpuset": "0", "memory": 64 << 20, "Binds": ["/tmp:/x"]})
    assert (found["CpuShares"], found["CpusetCpus"], found["Memory"], found["Binds"]) == (
        512,
        "0",
        64 << 20,
        ["/tmp:/x"],
    )
    found = host({"CpuShares": 512, "Binds": ["/tmp:/x"], "HostConfig": {"Memory": 64 << 20}})
    assert (found["CpuShares"], found["Memory"], found["Binds"]) == (512, 64 << 20, None)
    assert host({"CpuShares": 512, "HostConfig": {"CpuShares": 7}})["CpuShares"] == 7
    answer = engine.request("POST", "/v1.24/containers/create", {"Image": "busybox", "Memory": 524287})
    assert answer.status == 400 and "Minimum memory limit allowed is 6MB" in answer.message


def test_host_config_in_the_body_of_a_start(engine: TempEngine, tmp_path: Path) -> None:
    """It is applied below API 1.24, and refused at 1.24."""
    (tmp_path / "file").write_text("bound")
    identifier = engine.create("cat", "/foo/file", Volumes={"/foo": {}})
    body = {"Binds": [f"{tmp_path}:/foo"], "Memory": 64 << 20, "NetworkMode": "none"}
    answer = engine.request("POST", f"/v1.24/containers/{identifier}/start", body)
    assert (answer.status, answer.message) == (
        *(400, "starting container with HostConfig was deprecated since v1.10 and removed in v1.12"),
    )
    assert engine.inspect(identifier)["State"]["Status"] == "created"
    anonymous = engine.inspect(identifier)["Mounts"][0]["Name"]
    post(engine, f"/containers/{identifier}/start", {"Memory": 5}, 400, "1.23")
    post(engine, f"/containers/{identifier}/start", {"Binds": ["/a:/x", "/b:/x"]}, 400, "1.23")
    post(engine, f"/containers/{identifier}/start", body, version="1.23")
    assert engine.wait(identifier) == 0
    assert engine.logs(identifier) == b"bound"
    found = engine.inspect(identifier)
    assert (found["HostConfig"]["Memory"], found["HostConfig"]["Binds"]) == (64 << 20, body["Binds"])
    assert [each["Source"] for each in found["Mounts"]] == [str(tmp_path)]
    assert engine.request("DELETE", f"/v1.24/volumes/{anonymous}").status == 204, "nothing uses it any more"
    post(engine, f"/containers/{identifier}/start", {}, version="1.24")


def test_the_network_mode_in_the_body_of_a_start(engine: TempEngine) -> None:
    peer = engine.started("sleep", "600", NetworkDisabled=True, Hostname="peer")
    for mode in ("none", f"container:{peer}"):
        for body in ({"NetworkMode": mode}, {"HostConfig": {"NetworkMode": mode}, "NetworkMode": "host"}):
            identifier = engine.create("hostname", host={"NetworkMode": "bridge"})
            post(engine, f"/containers/{identifier}/start", body, version="1.23")
            assert engine.wait(identifier) == 0
            assert engine.inspect(identifier)["HostConfig"]["NetworkMode"] == mode
            shown = engine.logs(identifier).decode().strip()
            assert shown == (identifier[:12] if mode == "none" else "peer")
    named = engine.create("true", Hostname="mine")
    refused = post(engine, f"/containers/{named}/start", {"NetworkMode": f"container:{peer}"}, 400, "1.23")
    assert "conflicting options: hostname" in refused["message"]


# --- links, working directory, size ---------------------------------------------------------------


def test_links_are_shown_by_name_and_follow_a_shared_network(engine: TempEngine) -> None:
    engine.started("sleep", "600", name="target", network="bridge")
    engine.started("sleep", "600", name="proxy", network="container:target")
    engine.started("sleep", "600", name="one", network="bridge", host={"Links": ["target:t"]})
    engine.started("sleep", "600", name="two", network="bridge", host={"Links": ["proxy:p"]})
    address = engine.inspect("target")["NetworkSettings"]["IPAddress"]
    assert engine.inspect("one")["HostConfig"]["Links"] == ["/target:/one/t"]
    assert engine.inspect("two")["HostConfig"]["Links"] == ["/target:/two/p"]
    assert f"{address}\tp " in Path(engine.inspect("two")["HostsPath"]).read_text()
    post(engine, "/containers/target/rename?name=renamed")
    assert engine.inspect("one")["HostConfig"]["Links"] == ["/renamed:/one/t"]
    assert engine.request("DELETE", "/v1.24/containers/one/t?link=1").status == 204
    assert engine.inspect("one")["HostConfig"]["Links"] is None
    assert engine.request("DELETE", "/v1.24/containers/nosuch?link=1").status == 404


def test_the_working_directory_is_made_at_the_create(engine: TempEngine) -> None:
    identifier = engine.create("sh", "-c", "pwd; stat -c %u:%a .", WorkingDir="/home/foo/bar", User="1000")
    assert engine.request("HEAD", f"/v1.24/containers/{identifier}/archive?path=/home/foo/bar").status == 200
    engine.post(f"/containers/{identifier}/start")
    assert engine.wait(identifier) == 0
    assert engine.logs(identifier) == b"/home/foo/bar\n0:755\n"
    answer = engine.request("POST", "/v1.24/containers/create", {"Image": "busybox", "WorkingDir": "/bin/busybox"})
    assert answer.status == 400 and "Cannot mkdir: /bin/busybox" in answer.message, answer


def test_a_working_directory_with_dots_is_cleaned(engine: TempEngine) -> None:
    identifier = engine.create("pwd", WorkingDir="/no/./such//../place/")
    assert engine.inspect(identifier)["Config"]["WorkingDir"] == "/no/place"
    engine.post(f"/containers/{identifier}/start")
    assert engine.wait(identifier) == 0
    assert engine.logs(identifier) == b"/no/place\n"


def test_resize_with_and_without_a_terminal_and_a_run(engine: TempEngine) -> None:
    plain = engine.started("sleep", "600")
    post(engine, f"/containers/{plain}/resize?h=40&w=40", status=200)
    terminal = engine.create("stty", "size", Tty=True)
    post(engine, f"/containers/{terminal}/resize?h=11&w=22", status=500)
    engine.post(f"/containers/{terminal}/start")
    assert engine.wait(terminal) == 0
    assert engine.request("GET", f"/v1.24/containers/{terminal}/logs?stdout=1").body == b"11 22\r\n"
    post(engine, f"/containers/{terminal}/resize?h=33&w=44", status=500)
    for identifier, count in ((plain, 1), (terminal, 0)):
        asked = f"since=0&until={time.time():.9f}&filters={filters(container=identifier)}"
        history = engine.request("GET", f"/v1.24/events?{asked}").body
        assert history.count(b'"status":"resize"') == count


def test_kill_by_a_number_with_sig(engine: TempEngine) -> None:
    identifier = engine.started("sleep", "600")
    answer = engine.request("POST", f"/v1.24/containers/{identifier}/kill?signal=SIG42")
    assert (answer.status, answer.message) == (400, "Invalid signal: SIG42")


# --- the list -------------------------------------------------------------------------------------


def test_the_list_shows_an_image_by_id_when_its_name_has_moved_on(tidied: TempEngine) -> None:
    engine = tidied

    def shown() -> str:
        return str(
            next(each["Image"] for each in engine.request("GET", "/v1.24/containers/json").json() if each["Id"] == one)
        )

    post(engine, "/images/busybox/tag?repo=x&tag=1", status=201)
    one = engine.started("sleep", "600", Image="x:1")
    assert shown() == "x:1"
    post(engine, f"/commit?container={one}&repo=x&tag=1", status=201)
    assert shown() == engine.inspect(one)["Image"]
    post(engine, f"/images/{engine.inspect(one)['Image']}/tag?repo=x&tag=1", status=201)
    assert shown() == "x:1"


def test_filters_ancestor_with_descendants_and_health(tidied: TempEngine) -> None:
    engine = tidied

    def listed(name: str, value: str) -> set[str]:
        return {
            each["Id"]
            for each in engine.request("GET", f"/v1.24/containers/json?all=1&filters={filters(**{name: value})}").json()
        }

    base = engine.create("true")
    post(engine, f"/commit?container={base}&repo=child", status=201)
    child = engine.create("true", Image="child")
    assert {base, child} <= listed("ancestor", "busybox")
    assert listed("ancestor", "child") == {child}
    assert {base, child} <= listed("health", "none")
    assert not {base, child} & listed("health", "healthy")
    answer = engine.request("GET", "/v1.24/containers/json?filters=" + quote('{"health":["well"]}'))
    assert (answer.status, answer.message) == (400, "Unrecognised filter value for health: well")


# --- control groups -------------------------------------------------------------------------------


@pytest.mark.own
def test_limits_hold_in_exec_and_in_run(engine: TempEngine) -> None:
    """`tests/system/test_runtime.py` has it for the container's own process, with both runtimes."""
    container = engine.started("sleep", "600", host={"Memory": 50 << 20})
    ran = engine.docker("exec", container, "sh", "-c", cgroups.WRITES)
    assert cgroups.succeeded(ran.out) == ["tried"]
    ran = engine.docker("exec", "--privileged", container, "sh", "-c", cgroups.WRITES)
    assert cgroups.succeeded(ran.out) == ["tried"]
    assert cgroups.Group(engine.inspect(container)["State"]["Pid"]).memory == 50 << 20
    built = printed(engine, json.dumps(["sh", "-c", cgroups.WRITES]), memory=50 << 20)
    assert cgroups.succeeded("\n".join(built)) == ["tried"]


def test_parents_of_control_groups_go_with_the_last_container() -> None:
    """Directories that the engine has made are removed, also after a crash of the daemon. Those
    that existed before are not. The driver is cgroupfs: systemd makes its slices itself.
    """
    name = f"/engt{os.getpid()}"

    def there() -> list[str]:
        return [path for path, _, _ in os.walk(cgroups.ROOT) if f"{name}/" in f"{path}/"]

    with TempEngine("--exec-opt", "native.cgroupdriver=cgroupfs") as engine:
        engine.load_busybox()
        one, two = (engine.started("sleep", "600", host={"CgroupParent": f"{name}/x"}) for _ in range(2))
        assert there()
        engine.post(f"/containers/{one}/stop?t=0")
        engine.restart()
        assert there()
        engine.post(f"/containers/{two}/stop?t=0")
        until("they are gone", lambda: not there())
