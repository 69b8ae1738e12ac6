"""The config of a plugin as its author wrote it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.managed_plugins import config as configs
from engine.wire.plugins import PluginMount

DIGEST = f"sha256:{'0' * 64}"

BY_HAND: dict[str, Any] = {
    "description": "sshFS plugin for Docker",
    "documentation": "https://docs.docker.com/engine/extend/plugins/",
    "entrypoint": ["/docker-volume-sshfs"],
    "workdir": "/w",
    "env": [{"name": "DEBUG", "settable": ["value"], "value": "0"}],
    "interface": {"socket": "sshfs.sock", "types": ["docker.volumedriver/1.0"]},
    "linux": {"capabilities": ["CAP_SYS_ADMIN"], "devices": [{"path": "/dev/fuse"}]},
    "mounts": [
        {"destination": "/mnt/state", "options": ["rbind"], "source": "/var/lib/docker/plugins/", "type": "bind"},
        {"destination": "/root/.ssh", "name": "sshkey", "settable": ["source"], "source": "", "type": "bind"},
    ],
    "network": {"type": "host"},
    "propagatedmount": "/mnt/volumes",
    "pidhost": True,
    "args": None,
    "unknown": {"a": 1},
}
"""In the lower case of the documentation."""


def parse(document: Any, **how: Any) -> Any:
    return configs.parse(json.dumps(document).encode(), **how)


def test_names_in_any_case() -> None:
    config = parse(BY_HAND)
    assert config.interface.types == ["docker.volumedriver/1.0"] and config.interface.socket == "sshfs.sock"
    assert config.work_dir == "/w" and config.propagated_mount == "/mnt/volumes" and config.pid_host
    assert config.linux.devices[0].path == "/dev/fuse" and config.env[0].settable == ["value"]
    assert config.mounts[1].source == "" and config.network.type == "host" and config.args.value is None
    assert configs.is_plugin(config) and not configs.is_plugin(parse({"os": "linux", "config": {}}))
    assert configs.parse(configs.encoded(config)) == config
    assert parse({}).rootfs.diff_ids == [] and parse({"rootfs": None}).rootfs.diff_ids == []


def test_the_format_of_1_12() -> None:
    first = {
        **{name: value for name, value in BY_HAND.items() if name not in ("linux", "propagatedmount", "pidhost")},
        "ManifestVersion": "v0",
        "Capabilities": ["CAP_SYS_ADMIN"],
        "Devices": [{"Name": "fuse", "Path": "/dev/fuse"}],
        "linux": {"allowAllDevices": True},
        "mounts": [*BY_HAND["mounts"], {"Type": "tmpfs", "Destination": "/t", "Options": ["size=1m"]}],
    }
    config = parse(first, first=True)
    assert config.linux.capabilities == ["CAP_SYS_ADMIN"] and config.linux.devices[0].name == "fuse"
    assert not config.linux.allow_all_devices, "a field of later versions"
    assert [mount.options for mount in config.mounts] == [["rbind", "rshared"], ["rbind", "rshared"], ["size=1m"]]
    assert parse(first).linux.capabilities is None


@pytest.mark.parametrize("kind", [".docker.dummy/1.0/", "docker.volumedriver/1.0", "a.b.c-d/2"])
def test_types(kind: str) -> None:
    assert parse({"interface": {"types": [kind]}}).interface.types == [kind]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"Description": "again"}, "Description occurs twice"),
        ({"linux": {"devices": [], "Devices": []}}, "Linux.Devices occurs twice"),
        ({"mounts": [{"source": "/a", "Source": "/b", "destination": "/x"}]}, "Mounts.Source occurs twice"),
        ({"interface": {"types": ["volumedriver"]}}, "'volumedriver' is not a plugin type"),
        ({"interface": {"types": ["docker.x/1", 2]}}, "expected string"),
        ({"interface": {"socket": "../x.sock"}}, "'../x.sock' is not the name of a file"),
        ({"interface": {"socket": ".."}}, "is not the name of a file"),
        ({"interface": {"socket": "/run/docker.sock"}}, "is not the name of a file"),
        ({"interface": {"protocolScheme": "grpc"}}, "protocol 'grpc'"),
        ({"workdir": "w"}, "workdir 'w' is not an absolute path"),
        ({"propagatedmount": "../x"}, "propagatedMount '../x' is not an absolute path"),
        ({"mounts": [{"destination": "x"}]}, "destination of a mount 'x' is not an absolute path"),
        ({"env": [{"name": "A=B"}]}, "'A=B' is not the name of a variable"),
        ({"env": [{"value": "x"}]}, "'' is not the name of a variable"),
        ({"entrypoint": ["a\0b"]}, "zero byte"),
        ({"entrypoint": "sh"}, "expected array, got string"),
        ({"user": {"uid": "root"}}, "expected integer"),
        ({"user": {"uid": -1}}, "User.UID: expected integer >= 0"),
        ({"user": {"gid": 1 << 32}}, "User.GID: expected integer <= 4294967295"),
        ({"rootfs": {"type": "tar"}}, "rootfs has type 'tar'"),
        ({"rootfs": {"diff_ids": ["sha256:x"]}}, "invalid diff_id 'sha256:x'"),
        ({"rootfs": {"diff_ids": [DIGEST] * 129}}, "more than 128 layers"),
    ],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        parse({**BY_HAND, **change})
    assert raised.value.message.startswith("invalid plugin config: ") and words in raised.value.message


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"null"])
def test_no_object(raw: bytes) -> None:
    with pytest.raises(InvalidParameter, match="invalid plugin config: "):
        configs.parse(raw)


def test_a_large_one() -> None:
    raw = json.dumps({"description": "x" * configs.LONGEST}).encode()
    with pytest.raises(InvalidParameter, match=f"more than {configs.LONGEST}"):
        configs.parse(raw)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*BY_HAND, "Type", "path", "value", "Rootfs", "diff_ids"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_JSON, st.booleans())
def test_anything_is_a_config_or_refused(document: Any, first: bool) -> None:
    try:
        config = parse(document, first=first)
    except InvalidParameter:
        return
    assert configs.parse(configs.encoded(config)) == config
    for mount in config.mounts:
        assert isinstance(mount, PluginMount) and mount.destination.startswith("/")


@given(st.sampled_from(sorted(BY_HAND)), st.data())
def test_case_does_not_matter(name: str, data: st.DataObject) -> None:
    upper = data.draw(st.lists(st.booleans(), min_size=len(name), max_size=len(name)))
    spelled = "".join(char.upper() if up else char for char, up in zip(name, upper, strict=True))
    other = {spelled if key == name else key: value for key, value in BY_HAND.items()}
    assert msgspec.json.encode(parse(other)) == msgspec.json.encode(parse(BY_HAND))
