"""Binds, Mounts, Tmpfs and volumes: accepted forms, refusals with their messages, and the resulting
mounts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.containers import mount_points
from engine.containers.mount_points import Inherited
from engine.containers.store import ContainerRecord, ImageMount, MountOptions
from engine.errors import InvalidParameter
from engine.images.record import ImageRecord
from engine.wire.containers import Config, HostConfig, Mount, MountPoint
from engine.wire.images import ImageConfig


def test_binds_are_shown_as_mounts() -> None:
    host_config = HostConfig(binds=["/src:/dst/./x//", "vol:/v:ro"])
    bind, volume = mount_points.mount_points(Config(), host_config).points
    assert (bind.source, bind.destination, bind.rw, bind.propagation) == ("/src", "/dst/x", True, "rprivate")
    assert (volume.name, volume.source, volume.driver, volume.rw) == ("vol", "", "", False)


@pytest.mark.parametrize(
    ("given", "source"), [("/no/../s", "/s"), ("/s/", "/s"), ("//s//t/.", "/s/t"), ("/../..", "/"), ("/", "/")]
)
def test_sources_of_binds_are_cleaned(given: str, source: str) -> None:
    of_mount = mount(Type="bind", Source=given, Target="/b")
    points, *_ = mount_points.mount_points(Config(), HostConfig(binds=[f"{given}:/a"], mounts=[of_mount]))
    assert [point.source for point in points] == [source, source]


def test_two_mounts_on_one_destination_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="Duplicate mount point: /x"):
        mount_points.mount_points(Config(), HostConfig(binds=["/a:/x", "/b:/x/"]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ("noexec", "nosuid", "nodev")),
        ("defaults", ("noexec", "nosuid", "nodev")),
        ("exec,size=64m", ("nosuid", "nodev", "exec", "size=64m")),
        ("rw,ro,mode=1777", ("noexec", "nosuid", "nodev", "ro", "mode=1777")),
        ("size=1m,size=2m,dev,suid", ("noexec", "dev", "suid", "size=2m")),
        ("shared", ("noexec", "nosuid", "nodev", "shared")),
        ("rslave,size=1m,private", ("noexec", "nosuid", "nodev", "size=1m", "private")),
        ("size=50%,nr_inodes=1k,uid=3,gid=4,mpol=bind:0-1", None),
    ],
)
def test_tmpfs_options(given: str, expected: tuple[str, ...] | None) -> None:
    found = mount_points.tmpfs_options(given)
    assert found == (expected or ("noexec", "nosuid", "nodev", *given.split(",")))


def test_binds_take_the_place_of_inherited_mounts() -> None:
    inherited = Inherited(mount_points.mount_points(Config(), HostConfig(binds=["/a:/x", "/b:/y", "/d:/t"])).points)
    found = mount_points.mount_points(Config(), HostConfig(binds=["/c:/x"], tmpfs={"/t/": ""}), [inherited]).points
    assert {each.destination: each.source for each in found} == {"/x": "/c", "/y": "/b"}
    with pytest.raises(InvalidParameter, match="Duplicate mount point: /t"):
        mount_points.mount_points(Config(), HostConfig(binds=["/c:/t"], tmpfs={"/t/": ""}))


def test_volumes_without_a_name_are_made_where_nothing_else_is() -> None:
    config = Config(volumes={"/a": {}, "/b/": {}, "/t": {}, "relative": {}})
    host_config = HostConfig(binds=["named:/a:nocopy", "other:/c"], tmpfs={"/t": ""}, volume_driver="d")
    points, populated, *_ = mount_points.mount_points(config, host_config)
    assert [each.destination for each in points] == ["/a", "/c", "/b", "/relative"]
    assert populated == {"/b", "/c", "/relative"}
    anonymous = points[2]
    assert re.fullmatch("[0-9a-f]{64}", str(anonymous.name)) and (anonymous.driver, anonymous.mode) == ("d", "")
    assert mount_points.named_volumes(host_config) == {"named", "other"}


@pytest.mark.parametrize("path", ["/proc", "/proc/", "/proc//sys", "/proc/self/attr", "/x/../proc/1", "/sys"])
def test_mounts_over_proc_and_sys_are_refused(path: str) -> None:
    """Also an image's VOLUME, which the image's author controls (CVE-2019-16884)."""
    for config, host_config in (
        (Config(), HostConfig(binds=[f"/tmp:{path}"])),
        (Config(), HostConfig(binds=[f"name:{path}"])),
        (Config(), HostConfig(tmpfs={path: ""})),
        (Config(volumes={path: {}}), HostConfig()),
    ):
        with pytest.raises(InvalidParameter, match="invalid mount destination"):
            mount_points.mount_points(config, host_config)


@pytest.mark.parametrize("path", ["/x/" + "a" * 256, "/" + "é" * 128, "/a" * 2048])
def test_destinations_that_no_file_system_takes_are_refused(path: str) -> None:
    for config, host_config in (
        (Config(), HostConfig(binds=[f"/tmp:{path}"])),
        (Config(), HostConfig(tmpfs={path: ""})),
        (Config(volumes={path: {}}), HostConfig()),
    ):
        with pytest.raises(InvalidParameter, match=r"invalid mount destination .* bytes of at most 4095"):
            mount_points.mount_points(config, host_config)
    longest = "/" + "a" * 255
    assert mount_points.mount_points(Config(volumes={longest: {}}), HostConfig()).points[0].destination == longest


def test_mounts_that_hide_nothing_of_proc_and_sys() -> None:
    for bind in (
        "/x:/proc/cpuinfo",
        "/x:/proc/sys/kernel/ns_last_pid",
        "/x:/sys/fs/cgroup",
        "/sys/:/sys:ro",
        "/proc:/proc",
    ):
        mount_points.mount_points(Config(), HostConfig(binds=[bind]))
    for bind in ("/:/sys", "/sys/kernel:/sys", "/sys:/proc"):
        with pytest.raises(InvalidParameter, match="invalid mount destination"):
            mount_points.mount_points(Config(), HostConfig(binds=[bind]))


@pytest.mark.parametrize(
    ("mode", "accepted"),
    [("cached", True), ("ro,delegated", True), ("consistent", True), ("cached,consistent", False), ("default", False)],
)
def test_words_of_consistency_have_no_effect(mode: str, accepted: bool) -> None:
    if accepted:
        assert mount_points.parse_bind(f"/a:/b:{mode}").read_only == ("ro" in mode.split(","))
        return
    with pytest.raises(InvalidParameter, match="invalid mode"):
        mount_points.parse_bind(f"/a:/b:{mode}")


@given(text=st.text(alphabet="ab/:.,rowzZ\0nc", max_size=30))
def test_a_bind_is_read_whole_or_refused(text: str) -> None:
    try:
        bind = mount_points.parse_bind(text)
    except InvalidParameter as error:
        assert "bind mount spec" in error.message
        return
    assert bind.destination.startswith("/") and ".." not in bind.destination.split("/")
    if ":" not in text:
        assert (bind.source, bind.named, bind.mode) == ("", True, "")
        return
    assert text.startswith(f"{bind.source}:") and bind.named == (not bind.source.startswith("/"))
    options = bind.mode.split(",") if bind.mode else []
    assert len(set(options)) == len(options) and bind.read_only == ("ro" in options)
    again = mount_points.parse_bind(f"{bind.source}:{bind.destination}" + (f":{bind.mode}" if bind.mode else ""))
    assert again == bind


def test_volumes_from() -> None:
    assert mount_points.parse_volumes_from("a") == ("a", True)
    assert mount_points.parse_volumes_from("a:ro,z") == ("a", False)
    with pytest.raises(InvalidParameter, match="invalid mode: bar"):
        mount_points.parse_volumes_from("a:bar")


# --- HostConfig.Mounts ----------------------------------------------------------------------------


def mount(**fields: Any) -> Mount:
    """A Mount with defaults as clients send them."""
    return msgspec.convert(fields, Mount)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"Type": "npipe", "Target": "/x"}, 'invalid mount config for type "npipe": mount type unknown'),
        ({"Target": "/x"}, 'invalid mount config for type "": mount type unknown'),
        ({"Type": "bind", "Source": "/s"}, "field Target must not be empty"),
        ({"Type": "bind", "Target": "/x"}, 'invalid mount config for type "bind": field Source must not be empty'),
        ({"Type": "bind", "Source": "s", "Target": "/x"}, "invalid mount path: 's' mount path must be absolute"),
        ({"Type": "bind", "Source": "/s", "Target": "x"}, "invalid mount path: 'x' mount path must be absolute"),
        ({"Type": "volume", "Source": "s", "Target": "/"}, "invalid specification: destination can't be '/'"),
        ({"Type": "volume", "Source": "s", "Target": "/x/.."}, "destination can't be '/'"),
        ({"Type": "bind", "Source": "/s", "Target": "/x", "VolumeOptions": {}}, "field VolumeOptions must not be"),
        ({"Type": "volume", "Target": "/x", "BindOptions": {}}, "field BindOptions must not be specified"),
        ({"Type": "bind", "Source": "/s", "Target": "/x", "BindOptions": {"Propagation": "p"}}, "invalid propagation"),
        ({"Type": "volume", "Target": "/x", "ReadOnly": True}, "ReadOnly mode when using anonymous volumes"),
        (
            {"Type": "volume", "Target": "/x", "VolumeOptions": {"Subpath": "a"}},
            "must not set Subpath when using anonymous volumes",
        ),
        ({"Type": "image", "Target": "/x"}, 'invalid mount config for type "image": field Source must not be empty'),
        ({"Type": "image", "Source": "i", "Target": "/x", "TmpfsOptions": {}}, "field TmpfsOptions must not be"),
        ({"Type": "volume", "Target": "/x", "ImageOptions": {}}, "field ImageOptions must not be specified"),
        ({"Type": "cluster", "Source": "c", "Target": "/x"}, "cluster volumes (CSI) are not supported"),
        ({"Type": "tmpfs", "Source": "s", "Target": "/x"}, "field Source must not be specified"),
        ({"Type": "tmpfs", "Target": "/x", "TmpfsOptions": {"SizeBytes": -1}}, "SizeBytes must not be negative"),
        ({"Type": "tmpfs", "Target": "/x", "TmpfsOptions": {"Mode": 0o10000}}, "Mode must be a file mode"),
    ],
)
def test_mounts_that_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(words)):
        mount_points.check(mount(**fields))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([["bogus"]], "invalid option: bogus"),
        ([["noexec"], ["exec", "1"]], "invalid option: exec=1"),
        ([["exec,suid"]], "invalid option: exec,suid"),
        ([[""]], "invalid option: "),
        ([[]], "invalid option array length"),
        ([["uid", "1", "2"]], "invalid option array length"),
    ],
)
def test_tmpfs_options_that_are_refused(options: list[list[str]], words: str) -> None:
    with pytest.raises(InvalidParameter, match=f"{re.escape(words)}$"):
        mount_points.check(mount(Type="tmpfs", Target="/x", TmpfsOptions={"Options": options}))


@pytest.mark.parametrize(
    ("read_only", "options", "words"),
    [
        (True, {"ReadOnlyForceRecursive": True}, ""),
        (True, {"ReadOnlyForceRecursive": True, "Propagation": "private"}, ""),
        (True, {"ReadOnlyNonRecursive": True, "Propagation": "rslave"}, ""),
        (False, {"ReadOnlyForceRecursive": True}, "BindOptions.ReadOnlyForceRecursive needs ReadOnly"),
        (False, {"ReadOnlyNonRecursive": True}, "BindOptions.ReadOnlyNonRecursive needs ReadOnly"),
        (True, {"ReadOnlyForceRecursive": True, "Propagation": "rslave"}, "needs the propagation mode rprivate"),
        (True, {"ReadOnlyForceRecursive": True, "ReadOnlyNonRecursive": True}, "mount options conflict"),
        (True, {"ReadOnlyForceRecursive": True, "NonRecursive": True}, "mount options conflict"),
    ],
)
def test_recursively_read_only_binds(read_only: bool, options: dict[str, Any], words: str) -> None:
    given = mount(Type="bind", Source="/s", Target="/x", ReadOnly=read_only, BindOptions=options)
    if not words:
        mount_points.check(given)
        return
    with pytest.raises(InvalidParameter, match=re.escape(words)):
        mount_points.check(given)


SUBPATHS = {
    "a": True,
    "a/b/": True,
    "./a": True,
    "a/../b": True,
    "a/..": True,
    "...": True,
    "": True,
    "..": False,
    "/a": False,
    "a/../..": False,
    "../a": False,
    "a/../../b/c": False,
    "a\0b": False,
}


@pytest.mark.parametrize("of", ["volume", "image"])
@pytest.mark.parametrize("subpath", SUBPATHS)
def test_subpaths(subpath: str, of: str) -> None:
    given = mount(Type=of, Source="s", Target="/x", **{f"{of.capitalize()}Options": {"Subpath": subpath}})
    if SUBPATHS[subpath]:
        mount_points.check(given)
        return
    with pytest.raises(InvalidParameter, match=f"subpath must be a relative path within the {of}"):
        mount_points.check(given)


@given(text=st.text(alphabet="./a\0", max_size=12))
def test_a_subpath_stays_within_its_volume(text: str) -> None:
    """Every beginning of one that is accepted names a place at or below the top."""
    try:
        mount_points.check(mount(Type="volume", Source="s", Target="/x", VolumeOptions={"Subpath": text}))
    except InvalidParameter as error:
        assert "subpath must be a relative path" in error.message
        return
    parts = text.split("/")
    for end in range(len(parts) + 1):
        assert not os.path.normpath("/".join(parts[:end]) or ".").startswith((".." + "/", "/"))
        assert os.path.normpath("/".join(parts[:end]) or ".") != ".."


IMAGE = ImageRecord(id="sha256:1", config=ImageConfig(), chain_ids=("c0", "c1"))


def test_image_mounts() -> None:
    found = mount_points.mount_points(
        Config(volumes={"/i": {}, "/v": {}}),
        HostConfig(
            mounts=[
                mount(Type="image", Source="busybox", Target="/i/"),
                mount(Type="image", Source="busybox", Target="/j", ImageOptions={"Subpath": "bin"}),
            ]
        ),
        [Inherited(points=[MountPoint(type="bind", source="/s", destination="/j")])],
        image={"busybox": IMAGE}.__getitem__,
    )
    assert [each.destination for each in found.points] == ["/v"]
    expected = ImageMount(destination="/i", name="busybox", image_id="sha256:1", chain_id="c1")
    assert found.images == (expected, msgspec.structs.replace(expected, destination="/j", subpath="bin"))
    with pytest.raises(InvalidParameter, match="invalid mount destination"):
        mount_points.mount_points(
            Config(),
            HostConfig(mounts=[mount(Type="image", Source="busybox", Target="/proc/1")]),
            image={"busybox": IMAGE}.__getitem__,
        )


def record(host: HostConfig, *, recursive: bool) -> ContainerRecord:
    found = mount_points.mount_points(Config(), host, image=lambda name: IMAGE, recursive=recursive)
    return ContainerRecord(
        id="c",
        name="c",
        created=0,
        image_id="",
        parent="",
        path="",
        args=(),
        config=Config(),
        host=host,
        mounts=found.points,
        mount_options=found.options,
        image_mounts=found.images,
    )


HOST = HostConfig(
    binds=["/a:/ro:ro", "/b:/rw", "v:/vro:ro"],
    mounts=[
        mount(Type="bind", Source="/s", Target="/plain", ReadOnly=True),
        mount(Type="bind", Source="/s", Target="/alone", ReadOnly=True, BindOptions={"ReadOnlyNonRecursive": True}),
        mount(Type="bind", Source="/s", Target="/forced", ReadOnly=True, BindOptions={"ReadOnlyForceRecursive": True}),
        mount(Type="bind", Source="/s", Target="/flat", BindOptions={"NonRecursive": True}),
        mount(Type="volume", Source="w", Target="/part", VolumeOptions={"Subpath": "a/b"}),
        mount(Type="tmpfs", Target="/t", ReadOnly=True),
        mount(Type="image", Source="busybox", Target="/i"),
    ],
)


@pytest.mark.parametrize("recursive", [True, False])
def test_how_mounts_are_made(recursive: bool) -> None:
    read_only: Any = "recursive" if recursive else ""
    found = record(HOST, recursive=recursive)
    expected = {
        "/ro": MountOptions(read_only=read_only),
        "/vro": MountOptions(read_only=read_only),
        "/plain": MountOptions(read_only=read_only),
        "/forced": MountOptions(read_only="forced"),
        "/flat": MountOptions(shallow=True),
        "/part": MountOptions(subpath="a/b"),
    }
    assert mount_points.options_of(found) == {
        place: options for place, options in expected.items() if options != MountOptions()
    }
    assert mount_points.subpaths(found) == {"/part": "a/b"}
    # A record of an earlier version of the engine has only the HostConfig. It was not recursive.
    earlier = msgspec.structs.replace(found, mount_options={})
    assert mount_points.options_of(earlier) == {
        place: options
        for place, options in expected.items()
        if options.read_only != "recursive" and options != MountOptions()
    }


def test_options_are_inherited() -> None:
    """A part of a volume stays a part, and what becomes read-only is so with the mounts below."""
    of = record(HOST, recursive=True)
    inherited = mount_points.inherited(of, writable=False, recursive=True)
    heir = mount_points.mount_points(Config(), HostConfig(binds=["/z:/flat", "/y:/i"]), [inherited], recursive=True)
    assert heir.options == {
        "/ro": MountOptions(read_only="recursive"),
        "/rw": MountOptions(read_only="recursive"),
        "/vro": MountOptions(read_only="recursive"),
        "/plain": MountOptions(read_only="recursive"),
        "/forced": MountOptions(read_only="forced"),
        "/part": MountOptions(subpath="a/b", read_only="recursive"),
    }
    assert heir.images == ()
    assert mount_points.mount_points(Config(), HostConfig(), [inherited]).images == of.image_mounts
    rw = {each.destination for each in heir.points if each.rw}
    assert rw == {"/flat", "/i"}


def test_a_volume_driver_that_mounts_ignore() -> None:
    volume = mount(Type="volume", Source="v", Target="/x")
    named = mount(Type="volume", Source="v", Target="/x", VolumeOptions={"DriverConfig": {"Name": "d"}})
    for mounts, driver, ignored in (
        ([volume], "d", True),
        ([volume], "", False),
        ([named], "d", False),
        ([mount(Type="tmpfs", Target="/x")], "d", False),
        ([], "d", False),
    ):
        host = HostConfig(mounts=mounts, volume_driver=driver)
        assert mount_points.ignores_volume_driver(host) is ignored, host


def test_mounts_of_each_type() -> None:
    host = HostConfig(
        binds=["/b:/y"],
        tmpfs={"/u": "exec"},
        mounts=[
            mount(
                Type="volume",
                Source="v",
                Target="/x/",
                VolumeOptions={
                    "NoCopy": True,
                    "Labels": {"a": "b"},
                    "DriverConfig": {"Name": "local", "Options": {"o": "size=1m"}},
                },
            ),
            mount(Type="volume", Target="/anonymous"),
            mount(Type="bind", Source="/s//t", Target="/z", ReadOnly=True, BindOptions={"NonRecursive": True}),
            mount(Type="bind", Source="/", Target="/w", BindOptions={"Propagation": "rslave"}),
            mount(
                Type="tmpfs",
                Target="/t",
                ReadOnly=True,
                TmpfsOptions={"SizeBytes": 4096, "Mode": 0o1777, "Options": [["exec"], ["uid", "5"]]},
            ),
        ],
    )
    for each in host.mounts or ():
        mount_points.check(each)
    points, populated, volumes, *_ = mount_points.mount_points(Config(volumes={"/t": {}}), host)
    found = {each.destination: each for each in points}
    assert set(found) == {"/y", "/x", "/anonymous", "/z", "/w"}
    assert found["/x"] == MountPoint(type="volume", name="v", destination="/x", driver="local")
    assert found["/z"] == MountPoint(type="bind", source="/s/t", destination="/z", rw=False, propagation="rprivate")
    assert (found["/w"].source, found["/w"].propagation) == ("/", "rslave")
    assert populated == {"/anonymous"}
    assert (volumes["v"].driver_opts, volumes["v"].labels) == ({"o": "size=1m"}, {"a": "b"})
    assert mount_points.named_volumes(host) == {"v"}
    assert mount_points.temporary(host) == {"/u": "exec", "/t": "ro,size=4096,mode=1777,exec,uid=5"}
    assert mount_points.tmpfs_options("ro,size=4096,mode=1777,exec,uid=5") == (
        *("nosuid", "nodev", "ro", "exec"),
        *("size=4096", "mode=1777", "uid=5"),
    )


def test_one_destination_once() -> None:
    volume = mount(Type="volume", Source="v", Target="/x")
    for host in (
        HostConfig(binds=["/b:/x"], mounts=[volume]),
        HostConfig(tmpfs={"/x": ""}, mounts=[volume]),
        HostConfig(mounts=[volume, mount(Type="tmpfs", Target="/x/")]),
    ):
        with pytest.raises(InvalidParameter, match="Duplicate mount point: /x"):
            mount_points.mount_points(Config(), host)


def test_sources_of_binds_in_mounts_exist(tmp_path: Path) -> None:
    there = mount(Type="bind", Source=str(tmp_path), Target="/x")
    missing = mount(Type="bind", Source=f"{tmp_path}/no", Target="/y")
    made = mount(Type="bind", Source=f"{tmp_path}/no", Target="/z", BindOptions={"CreateMountpoint": True})
    mount_points.check_sources(HostConfig(mounts=[there, made], binds=["/nowhere:/q"]))
    with pytest.raises(InvalidParameter, match=f"bind source path does not exist: {tmp_path}/no"):
        mount_points.check_sources(HostConfig(mounts=[missing]))
