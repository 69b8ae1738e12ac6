"""The rules of a build's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder import options
from engine.builder.options import Options
from engine.errors import EngineError, InvalidParameter, Unimplemented
from engine.images.archive import ARCHITECTURE
from engine.wire.containers import HostConfig, Ulimit
from engine.wire.images import Platform


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["", ""], []),
        (["a"], ["docker.io/library/a:latest"]),
        (["a", "a:latest", "library/a", "docker.io/a"], ["docker.io/library/a:latest"]),
        (["b:2", "a:1"], ["docker.io/library/b:2", "docker.io/library/a:1"]),
        (["registry:5000/x/y:t"], ["registry:5000/x/y:t"]),
    ],
)
def test_tags(names: list[str], expected: list[str]) -> None:
    assert [tag.canonical for tag in options.tags(names)] == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("A", 'Error parsing reference: "A" is not a valid repository/tag: invalid reference format'),
        ("a:", 'Error parsing reference: "a:" is not a valid repository/tag: invalid reference format'),
        ("a b", 'Error parsing reference: "a b" is not a valid repository/tag: invalid reference format'),
        ("sha256:1", 'Error parsing reference: "sha256:1" is not a valid repository/tag: refusing to create'),
        ("a@sha256:" + "0" * 64, "build tag cannot contain a digest"),
        ("a:t@sha256:" + "0" * 64, "build tag cannot contain a digest"),
    ],
)
def test_bad_tags(name: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        options.tags(["good", name])
    assert refused.value.message.startswith(words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("null", {}),
        ("{}", {}),
        ('{"a":"1","b":"","c":null}', {"a": "1", "b": "", "c": None}),
        ('{"a":"x=y z"}', {"a": "x=y z"}),
    ],
)
def test_arguments(text: str, expected: dict[str, str | None]) -> None:
    assert options.arguments(text) == expected


def test_labels() -> None:
    assert options.labels('{"b":"2","a":null,"":""}') == {"b": "2", "a": "", "": ""}
    assert options.labels("") == options.labels("null") == {}


def test_ulimits() -> None:
    text = '[{"Name":"nofile","Soft":10,"Hard":20},{"name":"core","hard":-1,"soft":null},null]'
    assert options.ulimits(text) == [Ulimit(name="nofile", soft=10, hard=20), Ulimit(name="core", hard=-1)]
    assert options.ulimits("") == options.ulimits("null") == options.ulimits("[]") == []


def test_cache_from() -> None:
    assert options.cache_from('["a","b:1","a","",null]') == ("a", "b:1")
    assert options.cache_from("null") == options.cache_from("") == ()


BAD_JSON = [
    (options.arguments, "error reading build args: buildargs: ", ["[]", "{", '{"a":1}', '"a"', "a=1", '{"a":["b"]}']),
    (options.arguments, "error reading build args: buildargs: ", ['{"":"1"}', '{"a=b":"1"}', '{"a":"\\u0000"}']),
    (options.labels, "error reading labels: labels: ", ["[]", "{", '{"a":1}', "a"]),
    (options.ulimits, "error reading ulimit settings: ulimits: ", ["{}", "[", '[{"Name":1}]', '["nofile"]']),
    (options.ulimits, "error reading ulimit settings: ulimits: ", ['[{"Name":"a","Soft":"1"}]', "nofile=1"]),
    (options.cache_from, "error reading cache-from: cachefrom: ", ["{}", "[1]", "busybox"]),
    (options.check_outputs, "invalid outputs specified: outputs: ", ["{}", "[1]", "type=tar"]),
]


@pytest.mark.parametrize(
    ("read", "words", "text"), [(read, words, text) for read, words, texts in BAD_JSON for text in texts]
)
def test_bad_json_names_its_parameter(read: Callable[[str], Any], words: str, text: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read(text)
    assert refused.value.message.startswith(words)


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
@pytest.mark.parametrize(
    "read",
    [
        options.arguments,
        options.labels,
        options.ulimits,
        options.cache_from,
        options.check_outputs,
        options.platform,
        lambda text: options.tags([text]),
        lambda text: options.host(HostConfig(extra_hosts=[text]), "172.17.0.1"),
        lambda text: options.check_frontend(text, text, text),
    ],
)
def test_any_text_is_read_or_refused_with_a_message(read: Callable[[str], Any], text: str) -> None:
    try:
        read(text)
    except EngineError as error:
        assert len(error.message) < 1000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linux", Platform(os="linux", architecture=ARCHITECTURE)),
        ("amd64", Platform(os="linux", architecture="amd64")),
        ("x86_64", Platform(os="linux", architecture="amd64")),
        ("linux/amd64", Platform(os="linux", architecture="amd64")),
        ("Linux/AMD64", Platform(os="linux", architecture="amd64")),
        ("linux/arm64/v8", Platform(os="linux", architecture="arm64")),
        ("linux/aarch64", Platform(os="linux", architecture="arm64")),
        ("linux/arm/v6", Platform(os="linux", architecture="arm", variant="v6")),
        ("linux/arm", Platform(os="linux", architecture="arm", variant="v7")),
        ("linux/sparc64", Platform(os="linux", architecture="sparc64")),
    ],
)
def test_platform(text: str, expected: Platform) -> None:
    assert options.platform(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", '"nonsense": unknown operating system or architecture'),
        ("a/b/c/d", '"a/b/c/d": cannot parse platform specifier'),
        ("linux/", '"linux/": cannot parse platform specifier'),
        ("linux/amd64,linux/arm64", "cannot parse platform specifier"),
        ("windows/amd64", 'operating system "windows" is not supported'),
        ("windows", 'operating system "windows" is not supported'),
    ],
)
def test_bad_platform(text: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        options.platform(text)
    assert words in refused.value.message


def test_no_platform() -> None:
    assert options.platform("") is None


def test_host_defaults_are_those_of_a_create() -> None:
    assert options.host(HostConfig(), "") == options.DEFAULT_HOST == Options().host
    assert options.DEFAULT_HOST.network_mode == "bridge"


@pytest.mark.parametrize(
    ("given_hosts", "expected"),
    [
        (["a:1.2.3.4"], ["a:1.2.3.4"]),
        (["a:::1", "b:[fe80::1]"], ["a:::1", "b:fe80::1"]),
        (["gw:host-gateway"], ["gw:172.17.0.1"]),
    ],
)
def test_extra_hosts(given_hosts: list[str], expected: list[str]) -> None:
    assert options.host(HostConfig(extra_hosts=given_hosts), "172.17.0.1").extra_hosts == expected


@pytest.mark.parametrize("isolation", ["", "default", "process"])
def test_isolation(isolation: str) -> None:
    assert options.host(HostConfig(isolation=isolation), "") == options.DEFAULT_HOST


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (HostConfig(isolation="hyperv"), 'Unsupported isolation: "hyperv"'),
        (HostConfig(memory=1000), "Memory: Minimum memory limit allowed is 6MB, got 1000"),
        (HostConfig(memory=8 << 20, memory_swap=4 << 20), "Minimum memoryswap limit should be larger than memory"),
        (HostConfig(memory_swap=8 << 20), "You should always set the Memory limit when using Memoryswap limit"),
        (HostConfig(memory=8 << 20, memory_swap=-2), "MemorySwap must be -1"),
        (HostConfig(cpu_shares=1), "The minimum allowed cpu-shares is 2"),
        (HostConfig(cpu_period=1), "CPU cfs period can not be less than 1ms"),
        (HostConfig(cpu_quota=1), "CPU cfs quota can not be less than 1ms"),
        (HostConfig(cpuset_cpus="a"), "Invalid value a for cpuset cpus"),
        (HostConfig(cpuset_mems="a"), "Invalid value a for cpuset mems"),
        (HostConfig(shm_size=-1), "SHM size must be greater than 0"),
        (HostConfig(ulimits=[Ulimit(name="nofile", soft=2, hard=1)]), "ulimit soft limit must be less than"),
        (HostConfig(extra_hosts=["nonsense"]), "bad format for add-host: 'nonsense'"),
        (HostConfig(extra_hosts=["a:b"]), "ExtraHosts: invalid IP address"),
        (HostConfig(network_mode="container:"), "NetworkMode: invalid container format"),
        (HostConfig(network_mode="container:x", extra_hosts=["a:1.1.1.1"]), "custom host-to-IP mapping"),
    ],
)
def test_bad_host(host: HostConfig, words: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        options.host(host, "")
    assert words in refused.value.message


@pytest.mark.parametrize(("version", "session", "remote"), [("", "", ""), ("1", "", ""), ("1", "s", "http://x")])
def test_frontend(version: str, session: str, remote: str) -> None:
    options.check_frontend(version, session, remote)


@pytest.mark.parametrize(
    ("version", "session", "remote", "kind", "words"),
    [
        ("3", "", "", InvalidParameter, 'invalid version "3"'),
        ("x", "", "", InvalidParameter, 'invalid version "x"'),
        ("2", "", "", InvalidParameter, "version: a build of version 2 needs a session"),
        ("2", "s", "", Unimplemented, "version: BuildKit builds by POST /build"),
        ("1", "s", "client-session", Unimplemented, "remote: client-session"),
    ],
)
def test_bad_frontend(version: str, session: str, remote: str, kind: type[EngineError], words: str) -> None:
    with pytest.raises(kind) as refused:
        options.check_frontend(version, session, remote)
    assert refused.value.message.startswith(words)


def test_outputs() -> None:
    for text in ("", "null", "[]", '[{"Type":"docker","Attrs":null}]', '[{"type":"image","attrs":{}}]'):
        options.check_outputs(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"Type":"local","Attrs":{"dest":"x"}}]', 'outputs: exporter "local with attributes" is not supported'),
        ('[{"Type":"tar"}]', 'outputs: exporter "tar" is not supported'),
        ("[{}]", 'outputs: exporter "" is not supported'),
    ],
)
def test_bad_outputs(text: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        options.check_outputs(text)
    assert refused.value.message.startswith(words)


def test_what_linux_and_a_stable_engine_do_not_have() -> None:
    options.check_squash(False, experimental=False)
    options.check_security([])
    with pytest.raises(InvalidParameter, match="squash is only supported with experimental mode"):
        options.check_squash(True, experimental=False)
    with pytest.raises(InvalidParameter, match="security options are not supported on linux"):
        options.check_security(["credentialspec=x"])
