"""CDI specifications: which texts are one, which device wins, and what a request means."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.runtime import cdi
from engine.runtime.cdi import Edits, Registry, Specification
from engine.wire.containers import DeviceRequest

NVIDIA = b"""---
cdiVersion: "0.5.0"
kind: nvidia.com/gpu
containerEdits:
  env:
    - NVIDIA_VISIBLE_DEVICES=void
  deviceNodes:
    - path: /dev/nvidiactl
  hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-ctk
      args: [nvidia-ctk, hook, update-ldcache, --folder, /usr/lib]
  mounts:
    - hostPath: /usr/lib/libcuda.so.1
      containerPath: /usr/lib/libcuda.so.1
      options: [ro, nosuid, nodev, bind]
devices:
  - name: "0"
    containerEdits:
      deviceNodes:
        - {path: /dev/nvidia0, hostPath: /dev/nvidia0, permissions: rw, fileMode: 438}
  - name: "1"
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia1
  - name: all
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia0
        - path: /dev/nvidia1
"""
"""As nvidia-ctk writes it, shortened."""


def specification(**changes: Any) -> dict[str, Any]:
    edits = {"env": ["A=b"]}
    return {
        "cdiVersion": "0.6.0",
        "kind": "acme.com/thing",
        "devices": [{"name": "x", "containerEdits": edits}],
    } | changes


def device(**edits: Any) -> dict[str, Any]:
    return specification(devices=[{"name": "x", "containerEdits": edits}])


def parsed(document: dict[str, Any]) -> Specification:
    return cdi.parse(json.dumps(document).encode(), json=True)


def requested(*names: str, **fields: Any) -> DeviceRequest:
    return DeviceRequest(driver="cdi", device_ids=list(names), **fields)


def gpus(**fields: Any) -> DeviceRequest:
    return DeviceRequest(**({"capabilities": [["gpu"]]} | fields))


# --- one specification ----------------------------------------------------------------------------


def test_a_specification_in_yaml() -> None:
    found = cdi.parse(NVIDIA, json=False)
    assert (found.kind, [each.name for each in found.devices]) == ("nvidia.com/gpu", ["0", "1", "all"])
    assert found.container_edits.hooks[0].args[2] == "update-ldcache"
    assert found.container_edits.mounts[0].options == ("ro", "nosuid", "nodev", "bind")
    (node,) = found.devices[0].container_edits.device_nodes
    assert (node.path, node.permissions, node.file_mode, node.uid) == ("/dev/nvidia0", "rw", 0o666, None)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "cdiVersion"),
        (specification(cdiVersion="2.0.0"), "cdiVersion '2.0.0' is not known"),
        (specification(cdiVersion="1"), "cdiVersion '1' is not known"),
        (specification(kind="acme.com"), "is not VENDOR/CLASS"),
        (specification(kind="acme.com/a/b"), "is not VENDOR/CLASS"),
        (specification(kind="-/a"), "is not VENDOR/CLASS"),
        (specification(devices=[{"name": "a b", "containerEdits": {}}]), "is not the name of a device"),
        (specification(devices=[{"name": "a", "containerEdits": {}}] * 2), "the same name"),
        (specification(devices=[{"name": "a"}]), "containerEdits"),
        (specification(devices="a"), "Expected `array`"),
        (device(env=["A"]), "env 'A' is not NAME=VALUE"),
        (device(env=["=A"]), "env '=A' is not NAME=VALUE"),
        (device(deviceNodes=[{"path": "dev/x"}]), "wrong path or type"),
        (device(deviceNodes=[{"path": "/dev/x", "type": "d"}]), "wrong path or type"),
        (device(deviceNodes=[{"path": "/dev/x", "permissions": "rx"}]), "permissions 'rx'"),
        (device(mounts=[{"hostPath": "/a", "containerPath": "b"}]), "wrong path"),
        (device(mounts=[{"hostPath": "", "containerPath": "/b"}]), "wrong path"),
        (device(mounts=[{"hostPath": "/a", "containerPath": "//"}]), "wrong path"),
        (device(deviceNodes=[{"path": "/dev/x\0"}]), "a NUL character"),
        (device(env=["A=\0"]), "a NUL character"),
        (device(hooks=[{"hookName": "never", "path": "/bin/true"}]), "wrong name or path"),
        (device(hooks=[{"hookName": "prestart", "path": "true"}]), "wrong name or path"),
    ],
)
def test_no_specification(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parsed(document)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"a: [", b"\xff", b"!!python/object:os.system {}", b"a: *b"])
def test_broken_texts(text: bytes) -> None:
    for as_json in (True, False):
        with pytest.raises(ValueError):
            cdi.parse(text, json=as_json)


@given(st.binary() | st.text(alphabet=string.printable).map(str.encode))
def test_any_bytes_are_a_specification_or_a_value_error(text: bytes) -> None:
    for as_json in (True, False):
        try:
            cdi.parse(text, json=as_json)
        except ValueError:
            continue


_words = st.text(alphabet=string.ascii_letters + string.digits, min_size=1, max_size=8)
_nodes = st.builds(
    cdi.DeviceNode, path=_words.map(lambda word: f"/dev/{word}"), permissions=st.sampled_from(("", "r", "rwm"))
)
_edits = st.builds(
    Edits,
    env=st.lists(st.tuples(_words, st.text()).map(lambda pair: f"v{pair[0]}={pair[1]}".replace("\0", ""))).map(tuple),
    device_nodes=st.lists(_nodes).map(tuple),
    additional_gids=st.lists(st.integers(0, 2**31 - 1)).map(tuple),
)


@given(_edits)
def test_what_is_written_is_read(edits: Edits) -> None:
    whole = Specification(
        cdi_version="1.0.0", kind="acme.com/x", devices=(cdi.Device(name="a", container_edits=edits),)
    )
    assert cdi.parse(msgspec.json.encode(whole), json=True) == whole
    assert cdi.parse(msgspec.yaml.encode(whole), json=False) == whole


# --- the specifications of a host -----------------------------------------------------------------


def test_a_later_directory_has_precedence(tmp_path: Path) -> None:
    for name, value in (("etc", "1"), ("run", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thing.json").write_text(json.dumps(device(env=[f"A={value}"])))
    registry = Registry((tmp_path / "etc", tmp_path / "missing", tmp_path / "run"))
    assert registry.devices() == ["acme.com/thing=x"]
    assert registry.edits([requested("acme.com/thing=x")]).env == ("A=2",)


def test_two_in_one_directory_are_a_conflict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(specification()))
    registry = Registry((tmp_path,))
    assert registry.devices() == [] and "have the device acme.com/thing=x" in caplog.text
    (tmp_path / "b.json").unlink()
    assert registry.devices() == ["acme.com/thing=x"], "files are read again"


def test_broken_files_are_skipped_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken.yaml").write_text("kind: [")
    (tmp_path / "large.json").write_text(" " * (cdi.FILE_LIMIT + 1))
    (tmp_path / "directory.json").mkdir()
    os.mkfifo(tmp_path / "fifo.json")  # without a writer: to open it must not wait for one
    (tmp_path / "other.txt").write_text("x")
    (tmp_path / "good.json").write_text(json.dumps(specification()))
    assert Registry((tmp_path,)).devices() == ["acme.com/thing=x"]
    for name in ("broken.yaml", "large.json", "directory.json", "fifo.json"):
        assert f"{tmp_path}/{name} is skipped" in caplog.text
    assert "other.txt" not in caplog.text


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    (tmp_path / "nvidia.yaml").write_bytes(NVIDIA)
    (tmp_path / "thing.json").write_text(json.dumps(specification(containerEdits={"env": ["ALL=1"]})))
    return Registry((tmp_path,))


# --- requests -------------------------------------------------------------------------------------


def test_edits_of_a_specification_come_once_and_first(registry: Registry) -> None:
    edits = registry.edits([requested("nvidia.com/gpu=1", "nvidia.com/gpu=0"), requested("acme.com/thing=x")])
    assert [node.path for node in edits.device_nodes] == ["/dev/nvidiactl", "/dev/nvidia1", "/dev/nvidia0"]
    assert edits.env == ("NVIDIA_VISIBLE_DEVICES=void", "ALL=1", "A=b")
    assert (len(edits.hooks), len(edits.mounts)) == (1, 1)
    assert registry.edits([]) == cdi.NONE


@pytest.mark.parametrize(
    ("request_", "nodes"),
    [
        (gpus(count=-1), ["/dev/nvidia0", "/dev/nvidia1"]),
        (gpus(count=2), ["/dev/nvidia0", "/dev/nvidia1"]),
        (gpus(count=1, driver="nvidia"), ["/dev/nvidia0"]),
        (gpus(device_ids=["1"]), ["/dev/nvidia1"]),
        (gpus(count=1, capabilities=[["tpu"], ["gpu", "compute"]]), ["/dev/nvidia0"]),
        (gpus(), None),
    ],
)
def test_gpus(registry: Registry, request_: DeviceRequest, nodes: list[str] | None) -> None:
    found = [node.path for node in registry.edits([request_]).device_nodes]
    assert found == (["/dev/nvidiactl", *nodes] if nodes else [])


def test_gpus_of_the_vendor_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "amd.json").write_text(json.dumps(specification(kind="amd.com/gpu")))
    registry = Registry((tmp_path,))
    assert registry.edits([gpus(count=-1)]).env == ("A=b",)
    assert registry.edits([gpus(driver="amd", device_ids=["x"])]).env == ("A=b",)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (gpus(driver="other"), 'could not select device driver "other" with capabilities: [[gpu]]'),
        (
            gpus(capabilities=[["tpu", "gpu"], ["x"]]),
            'could not select device driver "" with capabilities: [[tpu gpu] [x]]',
        ),
        (DeviceRequest(), 'could not select device driver "" with capabilities: []'),
        (gpus(driver="amd"), 'could not select device driver "amd" with capabilities: [[gpu]]'),
        (gpus(count=3), "unresolvable CDI devices nvidia.com/gpu=2"),
        (
            requested("acme.com/thing=y", "z"),
            "CDI device injection failed: unresolvable CDI devices acme.com/thing=y, z",
        ),
        (requested(count=1), "unexpected count in CDI device request"),
        (requested("acme.com/thing=x", options={"a": "b"}), "unexpected options in CDI device request"),
    ],
)
def test_requests_that_are_refused(registry: Registry, request_: DeviceRequest, words: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        registry.edits([request_])
    assert words in raised.value.message


@pytest.mark.parametrize(
    "edits", [{"intelRdt": {"closID": "x"}}, {"netDevices": [{"hostInterfaceName": "eth9", "name": "a"}]}]
)
def test_edits_that_this_engine_does_not_have(tmp_path: Path, edits: dict[str, Any]) -> None:
    (tmp_path / "thing.json").write_text(json.dumps(device(**edits)))
    with pytest.raises(InvalidParameter, match=f"{next(iter(edits))} is not supported by this engine"):
        Registry((tmp_path,)).edits([requested("acme.com/thing=x")])
