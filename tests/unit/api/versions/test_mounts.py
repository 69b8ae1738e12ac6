"""HostConfig.Mounts of create bodies: each row at its version and at the one before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.api import parameters
from engine.api.versions import VERSIONS
from engine.errors import InvalidParameter
from engine.wire.containers import CreateBody


def understood(version: str, **mount: Any) -> dict[str, Any]:
    """The only mount that a handler gets for that of a client."""
    body = msgspec.json.encode({"HostConfig": {"Mounts": [mount]}})
    decoded = parameters.decode_json(body, CreateBody, VERSIONS[version].upgrade(CreateBody))
    (found,) = msgspec.to_builtins(decoded)["HostConfig"]["Mounts"]
    assert isinstance(found, dict)
    return found


def check_ignored(since: str, before: str, options: str, **mount: Any) -> None:
    """Assert that these options of a mount are ignored at `before`, and at no version below
    1.25.
    """
    for version in (since, "1.55", "1.24", "1.18"):
        assert understood(version, **mount)[options] == mount[options], version
    for version in (before, "1.25"):
        assert not understood(version, **mount).get(options), version


def check_refused(since: str, before: str, words: str, **mount: Any) -> None:
    """Assert that the mount is refused at `before`, and at no version below 1.25."""
    for version in (since, "1.55", "1.24", "1.18"):
        assert understood(version, **mount)["Type"] == mount["Type"], version
    for version in (before, "1.25"):
        with pytest.raises(InvalidParameter) as caught:
            understood(version, **mount)
        assert caught.value.message == words, version


def test_binds_without_the_mounts_below() -> None:
    check_ignored("1.40", "1.39", "BindOptions", Type="bind", BindOptions={"NonRecursive": True})


def test_sources_of_binds_that_are_made() -> None:
    check_ignored("1.42", "1.41", "BindOptions", Type="bind", BindOptions={"CreateMountpoint": True})


@pytest.mark.parametrize("options", ["VolumeOptions", "TmpfsOptions", "ImageOptions"])
def test_options_of_another_type(options: str) -> None:
    check_ignored("1.42", "1.41", options, Type="bind", **{options: {}})


@pytest.mark.parametrize("kind", ["volume", "tmpfs"])
def test_options_of_its_own_type(kind: str) -> None:
    options = f"{kind.capitalize()}Options"
    for version in ("1.24", "1.41", "1.42"):
        assert understood(version, Type=kind, **{options: {}})[options] == {}


def test_options_of_binds_are_checked_at_every_version() -> None:
    assert understood("1.41", Type="volume", BindOptions={})["BindOptions"] == {}


def test_binds_that_are_read_only_below() -> None:
    words = "BindOptions.ReadOnlyForceRecursive needs API v1.44 or newer"
    check_refused("1.44", "1.43", words, Type="bind", BindOptions={"ReadOnlyForceRecursive": True})


def test_parts_of_volumes() -> None:
    words = "VolumeOptions.Subpath needs API v1.45 or newer"
    check_refused("1.45", "1.44", words, Type="volume", VolumeOptions={"Subpath": "a"})


def test_images() -> None:
    check_refused("1.48", "1.47", 'Mount type "Image" needs API v1.48 or newer', Type="image", Source="i")


@pytest.mark.parametrize(
    ("since", "before", "note"),
    [("1.44", "1.43", "flat_read_only"), ("1.48", "1.47", "volume_driver_unnoticed")],
)
def test_notes_for_the_create(since: str, before: str, note: str) -> None:
    for version, noted in ((since, False), ("1.55", False), (before, True), ("1.25", True), ("1.18", True)):
        body = parameters.decode_json(b"{}", CreateBody, VERSIONS[version].upgrade(CreateBody))
        assert getattr(body.from_older, note) is noted, version


@pytest.mark.parametrize("mounts", [None, [], "x", [None], [{"Type": 1, "VolumeOptions": "x"}], {}])
def test_bodies_that_are_no_mounts(mounts: Any) -> None:
    """What does not fit the structs is left to their decoder."""
    body = msgspec.json.encode({"HostConfig": {"Mounts": mounts}})
    for version in ("1.25", "1.41", "1.47", "1.55"):
        try:
            parameters.decode_json(body, CreateBody, VERSIONS[version].upgrade(CreateBody))
        except InvalidParameter as error:
            assert "Mounts" in error.message
