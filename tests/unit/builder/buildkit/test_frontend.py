"""Options of `dockerfile.v0` as options of a build."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.builder import options
from engine.builder.buildkit import frontend
from engine.builder.buildkit.frontend import DOCKERFILE_V0, GATEWAY
from engine.builder.dialect import BUILDKIT
from engine.builder.options import DEFAULT_HOST, Options
from engine.errors import EngineError, InvalidParameter, Unimplemented
from engine.wire.containers import Ulimit
from engine.wire.images import Platform


def read(frontend_name: str = DOCKERFILE_V0, **given: str) -> frontend.Wanted:
    """Underscores in names stand for hyphens."""
    return frontend.read({name.replace("_", "-"): value for name, value in given.items()}, frontend_name, "10.0.0.1")


def test_defaults() -> None:
    wanted = read()
    how: dict[str, Any] = {"dialect": BUILDKIT, "hostname": "buildkitsandbox"}
    assert wanted.options == Options(dockerfile="Dockerfile", force_remove=True, host=DEFAULT_HOST, **how)
    assert (wanted.filename, wanted.context, wanted.dockerfile, wanted.url) == (
        "Dockerfile",
        "context",
        "dockerfile",
        "",
    )


def test_every_option() -> None:
    wanted = frontend.read(
        {
            "filename": "sub/My.Dockerfile",
            "target": "t",
            "build-arg:A": "1",
            "build-arg:B": "x=y",
            "build-arg:BUILDKIT_SYNTAX": "docker/dockerfile:1.7",
            "label:l": "v",
            "no-cache": "",
            "image-resolve-mode": "pull",
            "platform": "linux/arm64",
            "add-hosts": "a=1.2.3.4,b=host-gateway,c=::1",
            "ulimit": "nofile=10:20,core=0",
            "shm-size": "1048576",
            "cgroup-parent": "/builds",
            "force-network-mode": "none",
            "contextkey": "c",
            "dockerfilekey": "d",
            "local-sessionid:c": "other",
            "context:base": "docker-image://busybox",
            "context:extra": "local:extra",
            "context:other": "input:one",
            "vcs:revision": "ignored",
            "attest:provenance": "ignored",
        },
        DOCKERFILE_V0,
        "10.0.0.1",
        {"one": "id"},
    )
    found = wanted.options
    assert (found.dockerfile, found.target, found.no_cache, found.pull) == ("sub/My.Dockerfile", "t", True, True)
    assert found.arguments == {"A": "1", "B": "x=y", "BUILDKIT_SYNTAX": "docker/dockerfile:1.7"}
    assert found.labels == {"l": "v"}
    assert found.platform is not None and found.platform.architecture == "arm64"
    assert found.host.extra_hosts == ["a:1.2.3.4", "b:10.0.0.1", "c:::1"]
    assert found.host.ulimits == [Ulimit(name="nofile", soft=10, hard=20), Ulimit(name="core", soft=0, hard=0)]
    assert (found.host.shm_size, found.host.cgroup_parent, found.host.network_mode) == (1048576, "/builds", "none")
    assert (wanted.context, wanted.dockerfile, wanted.sessions) == ("c", "d", {"c": "other"})
    assert wanted.named == {"base": "docker-image://busybox", "extra": "local:extra", "other": "input:one"}
    assert wanted.inputs == {"one": "id"}


@pytest.mark.parametrize("mode", ["", "default", "sandbox"])
def test_the_default_network(mode: str) -> None:
    assert read(force_network_mode=mode).options.host == DEFAULT_HOST


def test_stages_without_the_cache() -> None:
    assert [read(no_cache=value).options.no_cache for value in ("", "a")] == [True, False]
    assert read(no_cache="A,b").options.no_cache_stages == {"a", "b"}


def test_the_host_name() -> None:
    assert read(hostname="h").options.hostname == "h"
    assert frontend.read({"build-arg:BUILDKIT_SANDBOX_HOSTNAME": "x"}, DOCKERFILE_V0, "").options.hostname == "x"


def test_limits_of_run() -> None:
    host = read(
        **{"memory": "67108864", "memswap": "-1", "cpushares": "512", "cpuperiod": "50000", "cpuquota": "25000"},
        cpusetcpus="0",
        cpusetmems="0",
    ).options.host
    assert (host.memory, host.memory_swap, host.cpu_shares) == (64 << 20, -1, 512)
    assert (host.cpu_period, host.cpu_quota, host.cpuset_cpus, host.cpuset_mems) == (50_000, 25_000, "0", "0")


def test_the_namespace_of_caches() -> None:
    found = frontend.read({"build-arg:BUILDKIT_CACHE_MOUNT_NS": "mine"}, DOCKERFILE_V0, "")
    assert found.options.cache_namespace == "mine"


def test_other_systems() -> None:
    assert read(platform="darwin/arm64").options.platform == Platform(os="darwin", architecture="arm64")
    with pytest.raises(InvalidParameter, match="windows"):
        options.platform("windows/amd64")


def test_contexts_from_elsewhere() -> None:
    git = read(context="https://example.com/x.git#main:dir")
    assert git.options.remote == git.url == "https://example.com/x.git#main:dir"
    upload = read(context="http://buildkit-session/abc")
    assert upload.options.remote == "" and upload.url == "http://buildkit-session/abc"
    assert frontend._upload_path(upload.url) == "/abc"
    assert not git.own_dockerfile and read(context=git.url, dockerfilekey="d").own_dockerfile


@pytest.mark.parametrize("url", ["https://x/y.git#main:dir", "git@x:y.git", "https://x/y.tar"])
def test_named_contexts_from_elsewhere(url: str) -> None:
    assert frontend.read({"context:base": url}, DOCKERFILE_V0, "10.0.0.1").named == {"base": url}


@pytest.mark.parametrize(
    "source", ["docker/dockerfile", "docker.io/docker/dockerfile:1.4", "docker/dockerfile-upstream:m"]
)
def test_the_frontend_as_an_image(source: str) -> None:
    assert read(GATEWAY, source=source) == read()


@pytest.mark.parametrize(
    ("name", "given", "kind", "words"),
    [
        ("", {}, Unimplemented, "frontend '' is not supported"),
        (GATEWAY, {"source": "my/frontend:1"}, Unimplemented, "frontend 'my/frontend:1' is not supported"),
        (GATEWAY, {"source": "docker/dockerfile:1\n"}, Unimplemented, "is not supported"),
        (DOCKERFILE_V0, {"requestid": "frontend.x"}, Unimplemented, "unsupported request frontend.x"),
        (DOCKERFILE_V0, {"frontend.caps": "a+forward,b"}, Unimplemented, "unsupported frontend capability b"),
        (DOCKERFILE_V0, {"context:base": "input:base"}, InvalidParameter, "named context 'base': its input is missing"),
        (DOCKERFILE_V0, {"context:base": "oci-layout://x"}, InvalidParameter, "needs a name and a digest"),
        (DOCKERFILE_V0, {"attest:sbom": ""}, Unimplemented, "SBOM"),
        (DOCKERFILE_V0, {"platform": "linux/amd64,linux/arm64"}, Unimplemented, "one platform"),
        (DOCKERFILE_V0, {"shm-size": "1k"}, InvalidParameter, "shm-size: '1k'"),
        (DOCKERFILE_V0, {"memory": "-1"}, InvalidParameter, "memory: '-1'"),
        (DOCKERFILE_V0, {"cpuquota": "x"}, InvalidParameter, "cpuquota: 'x'"),
        (DOCKERFILE_V0, {"memory": "1"}, InvalidParameter, "emory limit"),
        (DOCKERFILE_V0, {"contextsubdir": "a/b"}, Unimplemented, "contextsubdir"),
        (DOCKERFILE_V0, {"ulimit": "nofile=x"}, InvalidParameter, "ulimit: 'nofile=x'"),
        (DOCKERFILE_V0, {"add-hosts": "nothing"}, InvalidParameter, "nothing"),
    ],
)
def test_what_is_refused(name: str, given: dict[str, str], kind: type[EngineError], words: str) -> None:
    with pytest.raises(kind, match=words):
        frontend.read(given, name, "10.0.0.1")


@given(
    st.dictionaries(st.sampled_from(("filename", "platform", "ulimit", "add-hosts", "shm-size", "context")), st.text())
)
def test_random_options_are_valid_or_refused(given_options: dict[str, str]) -> None:
    try:
        frontend.read(given_options, DOCKERFILE_V0, "10.0.0.1")
    except EngineError as error:
        assert error.message


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"", ()),
        (b"\xef\xbb\xbf*.log\r\n# no\n\n  a/b/ \n", ("*.log", "a/b")),
        (b"/x\n!/y\n! z\n!\n", ("x", "!y", "!z", "!")),
        (b"a/../b//c\n.\n/\n", ("b/c", ".", "/")),
        (b" # not a comment\n", ("# not a comment",)),
        (b"caf\xe9", ("caf\udce9",)),
    ],
)
def test_patterns(raw: bytes, found: tuple[str, ...]) -> None:
    assert frontend.patterns(raw) == found


def test_images_of_a_dockerfile() -> None:
    """Each is looked up on the event loop, so it is there once, however often the file names it."""
    raw = b"FROM a\nCOPY --from=b x y\nCOPY --from=b x y\nFROM b\nCOPY --from=a x y\nFROM --platform=linux/386 a\n"
    found = [(image.name, image.stage.platform) for image in frontend._images_of(raw, Options(dialect=BUILDKIT))]
    assert found == [("a", ""), ("b", ""), ("a", "linux/386")]


def test_registries() -> None:
    names = ("r.example:5000/base", "other.example/x", "busybox", "busybox:1", "scratch", "", "0", "sha256:" + "a" * 64)
    assert frontend.registries(names) == {"r.example:5000", "other.example", "docker.io"}
