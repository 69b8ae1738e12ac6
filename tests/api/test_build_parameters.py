"""Each parameter of POST /build, by its effect on the image, RUN's containers and the cache."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.builds.building import build, cgroup_parent, context, exists, image, post, printed, read, refused
from tests.support.builds.web import served
from tests.support.engine.harness import TempEngine
from tests.support.images.archives import Image, busybox_layer
from tests.support.images.registry import PASSWORD, USER, Registry

V1 = os.path.exists("/sys/fs/cgroup/memory")
"""The host has cgroup v1."""


# --- t --------------------------------------------------------------------------------------------


def test_tags(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nLABEL a=b\n", t=["one", "two:2", "one:latest", "", "localhost/three/four:5"])
    identifier = image(builder, built.id)["Id"]
    names = ["one:latest", "two:2", "localhost/three/four:5"]
    assert [image(builder, name)["Id"] for name in names] == [identifier] * 3
    assert sorted(image(builder, "one")["RepoTags"]) == sorted(names)


def test_a_tag_moves(builder: TempEngine) -> None:
    first = build(builder, "FROM busybox\nLABEL a=1\n", t="moving")
    second = build(builder, "FROM busybox\nLABEL a=2\n", t="moving")
    assert first.id != second.id
    assert image(builder, "moving")["Id"].startswith(f"sha256:{second.id}")
    assert image(builder, first.id)["RepoTags"] == []


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        (["good", "Bad"], "repository name must be lowercase|invalid reference format|Error parsing reference"),
        (["a@sha256:" + "0" * 64], "build tag cannot contain a digest"),
        (["a:b:c"], "invalid reference format|Error parsing reference"),
    ],
)
def test_bad_tags_are_refused_before_a_step(tags: list[str], words: str, builder: TempEngine) -> None:
    answer = post(builder, context("FROM busybox\nRUN echo never\n"), t=tags)
    assert answer.status in (400, 500), answer
    assert re.search(words, answer.message)
    assert not exists(builder, "good")


# --- buildargs, labels ----------------------------------------------------------------------------


def test_build_arguments(builder: TempEngine) -> None:
    dockerfile = 'FROM busybox\nARG a\nARG b=default\nARG c=default\nRUN echo "[$a] [$b] [$c]"; env | grep PROXY\n'
    arguments = {"a": "x y", "b": None, "c": "", "HTTP_PROXY": "http://p"}
    built = build(builder, dockerfile, buildargs=arguments, nocache=1)
    assert "[x y] [default] []" in built.lines
    assert "HTTP_PROXY=http://p" in built.lines
    config = image(builder, built.id)["Config"]
    assert not any(each.split("=")[0] in ("a", "b", "c", "HTTP_PROXY") for each in config["Env"])


@pytest.mark.own  # dockerd 20.10 warns at any version
def test_an_unused_argument_fails_at_the_end(builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nRUN echo done\n", buildargs={"b": "1", "a": "2"}, t="unused")
    assert "done" in built.lines
    assert built.error is not None
    assert built.error["error"] == "One or more build-args [a b] were not consumed, failing build."
    assert not exists(builder, "unused")


def test_labels(builder: TempEngine) -> None:
    """They act as a last instruction and win."""
    labels = {"z": "parameter", "a": "has 'quotes' and \"such\" $HOME", "empty": ""}
    built = build(builder, "FROM busybox\nLABEL z=file other=kept\n", labels=labels)
    assert image(builder, built.id)["Config"]["Labels"] == {**labels, "other": "kept"}
    again = build(builder, "FROM busybox\nLABEL z=file other=kept\n", labels=dict(reversed(labels.items())))
    assert again.id == built.id, "the order in the request does not matter"


@pytest.mark.parametrize("name", ["buildargs", "labels", "ulimits", "cachefrom"])
def test_bad_json_names_the_parameter(name: str, builder: TempEngine) -> None:
    answer = builder.request("POST", f"/v1.24/build?{name}=nonsense", context("FROM busybox\n"))
    assert answer.status in (400, 500), answer
    assert answer.message


# --- cache ----------------------------------------------------------------------------------------


def test_nocache(builder: TempEngine) -> None:
    dockerfile = "FROM busybox\nRUN cat /proc/sys/kernel/random/uuid > /u\nRUN cat /u\n"
    first = build(builder, dockerfile)
    assert build(builder, dockerfile).id == first.id
    third = build(builder, dockerfile, nocache=1)
    assert third.id != first.id and "Using cache" not in third.text
    fourth = build(builder, dockerfile)
    assert fourth.text.count("Using cache") == 2
    assert fourth.id == third.id, "what was built without look-ups is found later"


def test_the_cache_and_the_context(builder: TempEngine) -> None:
    """Content, mode and name count; times and other files do not."""
    dockerfile = "FROM busybox\nCOPY a /\nRUN true\n"
    first = build(builder, dockerfile, {"a": b"1"})
    assert build(builder, dockerfile, {"a": b"1", "other": b"2"}).id == first.id
    assert build(builder, dockerfile, {"a": b"2"}).id != first.id


def test_the_cache_after_files_of_another_stage(builder: TempEngine) -> None:
    """What follows a COPY of a stage is found at once, however the COPY itself was found."""
    word = secrets.token_hex(8)
    dockerfile = f"FROM busybox AS one\nRUN echo {word} > /word\nFROM busybox\nCOPY --from=one /word /\nRUN cat /word\n"
    first = build(builder, dockerfile)
    second = build(builder, dockerfile)
    assert second.id == first.id and second.text.count("Using cache") == 3, second.text


@pytest.mark.own  # dockerd needs the parents' ids beside the pulled image
def test_cachefrom(builder: TempEngine) -> None:
    """An image that was loaded is no cache, unless it is named."""
    dockerfile = "FROM busybox\nRUN cat /proc/sys/kernel/random/uuid > /u\nENV a=b\n"
    first = build(builder, dockerfile, t="remembered")
    archive = builder.request("GET", "/v1.24/images/remembered/get").body
    assert builder.request("DELETE", "/v1.24/images/remembered").status == 200
    assert builder.request("POST", "/v1.24/images/load", archive).status == 200
    second = build(builder, dockerfile, cachefrom=["remembered", "no-such-image"])
    assert second.text.count("Using cache") == 2
    assert second.id == first.id
    builder.request("DELETE", "/v1.24/images/remembered")
    assert build(builder, dockerfile).id != first.id


# --- rm, forcerm ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [({}, 0), ({"rm": 1}, 0), ({"rm": 0}, 2), ({"rm": "false"}, 2), ({"rm": 0, "forcerm": 1}, 0)],
)
def test_containers_of_successful_steps(parameters: dict[str, Any], kept: int, builder: TempEngine) -> None:
    built = build(builder, "FROM busybox\nRUN true\nRUN echo two\n", nocache=1, **parameters)
    assert built.id
    assert len(builder.containers()) == kept
    assert ("Removing intermediate container" in built.text) == (kept == 0)


@pytest.mark.parametrize(("parameters", "kept"), [({}, 1), ({"rm": 1}, 1), ({"rm": 0}, 1), ({"forcerm": 1}, 0)])
def test_the_container_of_a_failed_step(parameters: dict[str, Any], kept: int, builder: TempEngine) -> None:
    """It can be looked at, committed and started again."""
    built = build(builder, "FROM busybox\nENV v=1\nRUN echo $v > /made; exit 5\n", nocache=1, **parameters)
    assert built.code == 5
    found = [each for each in builder.containers() if builder.inspect(each)["State"]["ExitCode"] == 5]
    assert len(found) == kept
    for identifier in found:
        assert "A /made" in builder.docker("diff", identifier).out.splitlines()
        committed = builder.docker("commit", identifier, "failed").line
        assert builder.docker("run", "--rm", "--network", "none", committed, "cat", "/made").out == "1\n"
        builder.post(f"/containers/{identifier}/start")
        assert builder.wait(identifier) == 5


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "script", "expected"),
    [
        ({"memory": 64 << 20}, "memory/memory.limit_in_bytes memory.max", 64 << 20),
        ({"cpushares": 512}, "cpu/cpu.shares cpu.weight", 512 if V1 else 20),
        ({"cpuperiod": 50_000, "cpuquota": 25_000}, "cpu/cpu.cfs_period_us", 50_000),
        ({"cpuperiod": 50_000, "cpuquota": 25_000}, "cpu/cpu.cfs_quota_us cpu.max", 25_000 if V1 else "25000 50000"),
        ({"cpusetcpus": "0"}, "cpuset/cpuset.cpus cpuset.cpus", 0),
        ({"cpusetmems": "0"}, "cpuset/cpuset.mems cpuset.mems", 0),
        ({"memory": 64 << 20, "memswap": 64 << 20}, "memory/memory.memsw.limit_in_bytes memory.swap.max", None),
    ],
)
def test_limits_of_run(parameters: dict[str, Any], script: str, expected: Any, builder: TempEngine) -> None:
    """They hold in the container, and are not in the image."""
    built = build(builder, "FROM busybox\nRUN true\n", nocache=1, networkmode="none", **parameters)
    assert built.id
    files = script.split()
    if (not V1 and len(files) == 1) or expected is None:
        return
    assert printed(builder, f"cat /sys/fs/cgroup/{files[0] if V1 else files[-1]}", **parameters) == [str(expected)]


def test_a_limit_of_memory_kills(builder: TempEngine) -> None:
    dockerfile = "FROM busybox\nRUN tail -c 100000000 /dev/zero > /dev/null; true; exec tail -c 100000000 /dev/zero\n"
    built = build(builder, dockerfile, memory=16 << 20, memswap=16 << 20)
    assert built.code == 137


def test_ulimits(builder: TempEngine) -> None:
    ulimits = [{"Name": "nofile", "Soft": 123, "Hard": 456}, {"Name": "core", "Soft": 0, "Hard": 0}]
    assert printed(builder, "ulimit -n; ulimit -H -n; ulimit -c", ulimits=ulimits) == ["123", "456", "0"]


@pytest.mark.parametrize(
    ("parameters", "kilobytes"), [({}, 65536), ({"shmsize": 0}, 65536), ({"shmsize": 1 << 20}, 1024)]
)
def test_shmsize(parameters: dict[str, Any], kilobytes: int, builder: TempEngine) -> None:
    (line,) = printed(builder, "df -k /dev/shm | tail -n 1", **parameters)
    assert line.split()[1] == str(kilobytes)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"memory": 1000}, "[Mm]inimum memory limit"),
        ({"memory": 64 << 20, "memswap": 32 << 20}, "Minimum memoryswap limit should be larger than memory limit"),
        ({"shmsize": -1}, "SHM size"),
        ({"cpuperiod": 1}, "CPU cfs period can not be less than 1ms"),
        ({"cpusetcpus": "nonsense"}, "[Ii]nvalid value nonsense for cpuset cpus"),
        ({"ulimits": [{"Name": "nofile", "Soft": 2, "Hard": 1}]}, "soft limit must be less than|error setting rlimit"),
        ({"ulimits": [{"Name": "nonsense", "Soft": 1, "Hard": 1}]}, "invalid ulimit type: nonsense|wrong rlimit value"),
    ],
)
def test_bad_limits(parameters: dict[str, Any], words: str, builder: TempEngine) -> None:
    """Here they are refused at once; dockerd meets them in the first RUN."""
    answer = post(builder, context("FROM busybox\nRUN true\n"), nocache=1, **parameters)
    message = str((read(answer).error or {}).get("error")) if answer.status == 200 else answer.message
    assert re.search(words, message), message


@pytest.mark.own
@pytest.mark.parametrize(
    "parameters",
    [{"memory": "1g"}, {"shmsize": "64m"}, {"cpushares": "x"}, {"isolation": "hyperv"}, {"squash": 1}, {"version": 7}],
)
def test_bad_values_are_refused_at_once(parameters: dict[str, Any], builder: TempEngine) -> None:
    refused(post(builder, context("FROM busybox\n"), **parameters))


def test_cgroupparent(builder: TempEngine) -> None:
    parent = cgroup_parent(builder)
    lines = printed(builder, "cat /proc/1/cgroup", cgroupparent=parent)
    if V1:  # in its own namespace it would see `/` alone
        assert all(f"{parent}/" in line for line in lines if ":memory:" in line), lines


# --- network, hosts -------------------------------------------------------------------------------


def test_networkmode(builder: TempEngine) -> None:
    interfaces = "ls /sys/class/net | tr '\\n' ' '; echo"
    assert printed(builder, interfaces, networkmode="none") == ["lo "]
    for mode in ("", "default", "bridge"):
        assert printed(builder, interfaces, networkmode=mode) == ["eth0 lo "]


@pytest.mark.own  # another engine may have a network namespace of its own
def test_networkmode_host(builder: TempEngine) -> None:
    assert printed(builder, "readlink /proc/self/ns/net", networkmode="host") == [os.readlink("/proc/self/ns/net")]


def test_networkmode_of_a_user_s_network(builder: TempEngine) -> None:
    builder.docker("network", "create", "ours")
    server = builder.started("sleep", "600", name="server", network="ours")
    try:
        built = build(builder, "FROM busybox\nRUN ping -c 1 -W 5 server\n", networkmode="ours", nocache=1)
        assert "1 packets received" in built.text
        mode = f"container:{server}"
        assert printed(builder, "hostname -i || ip -o addr show eth0", networkmode=mode)
    finally:
        builder.remove_all()


def test_a_network_that_does_not_exist(builder: TempEngine) -> None:
    answer = post(builder, context("FROM busybox\nRUN true\n"), networkmode="no-such-network", nocache=1)
    message = str((read(answer).error or {}).get("error")) if answer.status == 200 else answer.message
    assert "no-such-network" in message and "not found" in message.lower(), message


def test_extrahosts(builder: TempEngine) -> None:
    dockerfile = "FROM busybox\nRUN cat /etc/hosts\n"
    built = build(builder, dockerfile, extrahosts=["one:1.2.3.4", "gw:host-gateway"], nocache=1)
    assert re.search(r"^1\.2\.3\.4\s+one$", built.text, re.MULTILINE)
    gateway = re.search(r"^([0-9.]+)\s+gw$", built.text, re.MULTILINE)
    assert gateway is not None
    (route,) = printed(builder, "ip route | grep ^default", networkmode="bridge")
    assert f"via {gateway[1]} " in route
    out = builder.docker("run", "--rm", "--network", "none", built.id, "cat", "/etc/hosts").out
    assert "one" not in out and "gw" not in out


# --- target, platform, version --------------------------------------------------------------------

STAGES = """
FROM busybox AS first
LABEL is=first
FROM busybox AS second
LABEL is=second
RUN echo second runs
FROM second
LABEL is=third
"""


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("", "third"),
        ("first", "first"),
        ("FIRST", "first"),
        pytest.param("0", "first", marks=pytest.mark.own),
        ("second", "second"),
        pytest.param("2", "third", marks=pytest.mark.own),
    ],
)
def test_target(target: str, expected: str, builder: TempEngine) -> None:
    built = build(builder, STAGES, target=target, nocache=1)
    assert image(builder, built.id)["Config"]["Labels"] == {"is": expected}
    assert ("second runs" in built.lines) == (expected != "first")


def test_an_unknown_target(builder: TempEngine) -> None:
    answer = post(builder, context(STAGES), target="nonsense")
    message = str((read(answer).error or {}).get("error")) if answer.status == 200 else answer.message
    assert re.search(r"(target stage|build target) \"?nonsense\"? (could not be|not) found|nonsense", message), message


@pytest.mark.own
def test_platform(builder: TempEngine) -> None:
    """Another one is fine without a RUN: nothing of it is executed."""
    built = build(builder, "FROM scratch\nCOPY a /\n", {"a": b"x"}, platform="linux/arm64")
    found = image(builder, built.id)
    assert (found["Os"], found["Architecture"]) == ("linux", "arm64")
    dockerfile = "FROM busybox\nARG TARGETARCH\nARG TARGETOS\nRUN echo $TARGETOS $TARGETARCH\n"
    assert "linux amd64" in build(builder, dockerfile, platform="linux/amd64").lines
    refused(post(builder, context("FROM scratch\n"), platform="windows/amd64"))


@pytest.mark.own
def test_version(builder: TempEngine) -> None:
    assert build(builder, "FROM busybox\n", version=1).id
    assert "session" in refused(post(builder, context("FROM busybox\n"), version=2))


# --- remote ---------------------------------------------------------------------------------------


@pytest.mark.own
def test_remote(builder: TempEngine) -> None:
    """A text is the Dockerfile, an archive the context. The body is ignored."""
    archive = context("FROM x\n", {"f/File": b"FROM busybox\nCOPY a /\nLABEL from=archive\n", "a": b"a"})
    files = {
        "/text": ("text/plain", b"FROM busybox\nLABEL from=text\n"),
        "/c.tar": ("application/x-tar", archive),
        "/c.tgz": ("application/octet-stream", gzip.compress(archive)),
        "/page": ("text/html", b"<html>"),
    }
    with served(files) as url:
        built = read(post(builder, b"", remote=f"{url}/text", dockerfile="ignored"))
        assert image(builder, built.id)["Config"]["Labels"] == {"from": "text"}
        for name in ("c.tar", "c.tgz"):
            built = read(post(builder, b"", remote=f"{url}/{name}", dockerfile="f/File"))
            assert image(builder, built.id)["Config"]["Labels"] == {"from": "archive"}
        for path in ("/missing", "/page"):
            answer = post(builder, b"", remote=url + path)
            message = str((read(answer).error or {}).get("error")) if answer.status == 200 else answer.message
            assert message


# --- pull, X-Registry-Config ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[Registry]:
    with Registry(password=True) as found:
        yield found


def _config(host: str, password: str = PASSWORD) -> dict[str, str]:
    document = {host: {"username": USER, "password": password}}
    return {"X-Registry-Config": base64.urlsafe_b64encode(json.dumps(document).encode()).decode()}


@pytest.mark.own
def test_a_private_base(guarded: Registry, builder: TempEngine) -> None:
    name = f"{guarded.host}/private/base:1"
    guarded.put("private/base", "1", Image([busybox_layer()], config={"Labels": {"is": "private"}}))
    body = context(f"FROM {name}\nRUN echo built\n")
    for headers in ({}, _config(guarded.host, "wrong"), {"X-Registry-Config": "!!!"}, _config("another.example")):
        answer = post(builder, body, headers)
        assert answer.status != 200 or read(answer).error is not None, headers
    built = read(post(builder, body, _config(guarded.host)))
    assert "built" in built.lines
    assert image(builder, built.id)["Config"]["Labels"] == {"is": "private"}
    for key in (f"https://{guarded.host}/v1/", f"http://{guarded.host}"):
        assert read(post(builder, body, _config(key), pull=1)).id


@pytest.mark.own
def test_pull(guarded: Registry, builder: TempEngine) -> None:
    """A newer base is seen with `pull` alone."""
    name = f"{guarded.host}/private/moving"
    headers = _config(guarded.host)
    body = context(f"FROM {name}\nRUN true\n")

    def label(**parameters: Any) -> str:
        built = read(post(builder, body, headers, **parameters))
        assert built.error is None, built.objects
        return str(image(builder, built.id)["Config"]["Labels"]["v"])

    for version in ("1", "2"):
        guarded.put("private/moving", "latest", Image([busybox_layer()], config={"Labels": {"v": version}}))
        assert label() == "1"
    assert label(pull=1) == "2"
    assert read(post(builder, body, headers, pull=1)).text.count("Using cache") == 1
