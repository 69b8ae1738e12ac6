"""The local driver's names and options, and the removal of a volume."""

import asyncio
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter, ServerError
from engine.system import mounts
from engine.volumes import local

PLAIN = {"type": "tmpfs", "device": "tmpfs"}


@pytest.mark.parametrize("name", ["ab", "a-b_c.d", "0" * 64, "a" * local.LONGEST_NAME])
def test_good_names(name: str) -> None:
    local.check_name(name)
    with pytest.raises(InvalidParameter):
        local.check_name(name + "/")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a", "too short, names should be at least two alphanumeric characters"),
        ("", "includes invalid characters"),
        ("..", "includes invalid characters"),
        ("../x", 'create ../x: "../x" includes invalid characters for a local volume name, only "[a-zA-Z0-9]'),
        (".hidden", "If you intended to pass a host directory, use absolute path"),
        ("a/b", "includes invalid characters"),
        ("a\n", "includes invalid characters"),
        ("ä1", "includes invalid characters"),
        ("a" * (local.LONGEST_NAME + 1), "longer than"),
    ],
)
def test_bad_names(name: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        local.check_name(name)
    assert words in raised.value.message


@given(st.text(max_size=300))
def test_a_name_that_passes_is_one_component(name: str) -> None:
    try:
        local.check_name(name)
    except InvalidParameter:
        return
    assert "/" not in name and "\0" not in name and not name.startswith(".")
    assert len((local.HIDDEN + name).encode()) <= 255


def test_no_options_are_a_directory() -> None:
    assert local.parse_options("v", {}) is None
    assert local.parse_options("v", {"o": "", "type": "", "device": ""}) is None


def test_options() -> None:
    found = local.parse_options("v", {**PLAIN, "o": "size=10m,ro,nosuid,uid=3,rshared"})
    assert found is not None
    assert (found.type, found.device, found.data) == ("tmpfs", "tmpfs", "size=10m,uid=3")
    assert found.flags == mounts.MS_RDONLY | mounts.MS_NOSUID
    assert found.propagation == mounts.MS_SHARED | mounts.MS_REC
    later = local.parse_options("v", {**PLAIN, "o": "ro,rw,,defaults"})
    assert later is not None and (later.flags, later.data) == (0, "")
    bind = local.parse_options("v", {"type": "none", "device": "/srv", "o": "rbind"})
    assert bind is not None and bind.flags == mounts.MS_BIND | mounts.MS_REC


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"foo": "bar"}, 'create v: invalid option key: "foo"'),
        ({**PLAIN, "size": "1g"}, 'invalid option key: "size"'),
        ({"type": "tmpfs"}, 'missing required option: "device"'),
        ({"device": "tmpfs"}, 'missing required option: "type"'),
        ({"o": "size=1m"}, 'missing required option: "device"'),
        ({**PLAIN, "o": "remount"}, "remount is not supported for a new mount"),
        ({**PLAIN, "o": "a\0b"}, "NUL"),
        ({**PLAIN, "o": "x" * mounts.PAGE}, "longer than the kernel reads"),
        ({"type": "none", "device": "relative", "o": "bind"}, "relative is not an absolute path"),
    ],
)
def test_bad_options(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        local.parse_options("v", options)
    assert words in raised.value.message


@given(
    st.lists(st.sampled_from([*local._FLAGS, *local._PROPAGATIONS, "size=1m", "x", "addr=1.2.3.4", ""]), max_size=12)
)
def test_what_is_no_flag_is_for_the_file_system(words: list[str]) -> None:
    found = local.parse_options("v", {"type": "t", "device": "/d", "o": ",".join(words)})
    assert found is not None
    known = local._FLAGS.keys() | local._PROPAGATIONS.keys()
    assert found.data == ",".join(word for word in words if word and word not in known)
    assert bool(found.flags & mounts.MS_BIND) == ("bind" in words or "rbind" in words)
    assert not found.flags & mounts.MS_REMOUNT


def test_addresses_are_resolved() -> None:
    assert local.resolved("addr=127.0.0.1,nfsvers=4") == "addr=127.0.0.1,nfsvers=4"
    assert local.resolved("rw,addr=localhost") in ("rw,addr=127.0.0.1", "rw,addr=::1")
    assert local.resolved("addr=fe80::1,hard") == "addr=fe80::1,hard"
    assert local.resolved("") == ""
    with pytest.raises(OSError):
        local.resolved("addr=no-such-host.invalid")


# --- removal --------------------------------------------------------------------------------------


def driver(tmp_path: Path, act: Callable[[local.LocalDriver], Awaitable[None]]) -> Path:
    """Run with a driver that has the volume `data`, which has a file. Returns its directory."""
    directory = tmp_path / "volumes"
    directory.mkdir()

    async def scenario() -> None:
        opened = local.LocalDriver(directory, tmp_path / "run")
        await opened.open([])
        await opened.create("data", {})
        await opened.keep("data")
        (directory / "data/_data/file").write_text("kept")
        try:
            await act(opened)
        finally:
            await opened.close()

    asyncio.run(scenario())
    return directory


def entries(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_hidden_volume_has_no_name_until_it_is_restored(tmp_path: Path) -> None:
    async def act(opened: local.LocalDriver) -> None:
        await opened.hide("data")
        assert entries(opened.directory) == [".volume-data"]
        await opened.restore("data")

    directory = driver(tmp_path, act)
    assert entries(directory) == ["data"]
    assert (directory / "data/_data/file").read_text() == "kept"


def test_a_hidden_volume_is_discarded(tmp_path: Path) -> None:
    async def act(opened: local.LocalDriver) -> None:
        await opened.hide("data")
        await opened.discard("data")

    assert entries(driver(tmp_path, act)) == []


def test_hiding_clears_what_an_earlier_failure_left(tmp_path: Path) -> None:
    async def act(opened: local.LocalDriver) -> None:
        (opened.directory / ".volume-data/_data").mkdir(parents=True)
        (opened.directory / ".volume-data/_data/old").touch()
        await opened.hide("data")

    assert entries(driver(tmp_path, act) / ".volume-data/_data") == ["file"]


def test_a_volume_whose_directory_is_missing_can_be_removed_and_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(opened: local.LocalDriver) -> None:
        (opened.directory / "data").rename(tmp_path / "elsewhere")
        with caplog.at_level(logging.WARNING):
            await opened.hide("data")
        assert "volume data: its directory is missing" in caplog.text
        await opened.restore("data")
        await opened.hide("data")
        await opened.discard("data")

    assert entries(driver(tmp_path, act)) == []


def test_what_fails_names_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async def act(opened: local.LocalDriver) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            with pytest.raises(ServerError, match=r"^remove data: No space left on device$"):
                await opened.hide("data")
            with pytest.raises(ServerError, match=r"^volume data: restoring its directory: No space left on device$"):
                await opened.restore("data")
        await opened.hide("data")

    assert entries(driver(tmp_path, act)) == [".volume-data"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_mount_in_a_volume_is_not_entered_and_does_not_stay(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "file").write_text("precious")

    async def act(opened: local.LocalDriver) -> None:
        below = opened.directory / "data" / "_data" / "below"
        below.mkdir()
        await opened.mount("data", PLAIN, "user")
        bind = ["mount", "--bind", foreign, opened.directory / "data" / "_data"]
        await asyncio.to_thread(subprocess.run, bind, check=True)
        await opened.hide("data")
        await opened.discard("data")
        assert mounts.mounts(opened.directory) == []

    directory = driver(tmp_path, act)
    assert not (directory / ".volume-data").exists() and (foreign / "file").read_text() == "precious"
