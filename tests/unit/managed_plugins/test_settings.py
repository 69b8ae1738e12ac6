"""Settings of plugins: what may be set, and what an upgrade keeps."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.managed_plugins import settings
from engine.wire.plugins import (
    PluginArgs,
    PluginConfig,
    PluginDevice,
    PluginEnv,
    PluginLinux,
    PluginMount,
    PluginSettings,
)

CONFIG = PluginConfig(
    env=[
        PluginEnv(name="DEBUG", settable=["value"], value="0"),
        PluginEnv(name="UNSET", settable=["value"]),
        PluginEnv(name="FIXED", value="1"),
        PluginEnv(name="BOTH", settable=["value", "name"], value="x"),
    ],
    mounts=[
        PluginMount(name="key", settable=["source"], source="", destination="/key", type="bind"),
        PluginMount(name="tmp", settable=["source"], source="tmpfs", destination="/tmp", type="tmpfs"),
        PluginMount(name="bare", settable=["source"], destination="/bare", type="bind"),
        PluginMount(name="still", settable=["options"], source="/s", destination="/still", type="bind"),
    ],
    linux=PluginLinux(
        devices=[
            PluginDevice(name="fuse", settable=["path"], path="/dev/fuse"),
            PluginDevice(name="nodev", settable=["path"]),
        ]
    ),
    args=PluginArgs(name="args", settable=["value"], value=["-v"]),
)
FIRST = settings.initial(CONFIG)


def changed(*changes: str) -> PluginSettings:
    return settings.changed(CONFIG, FIRST, changes)


def test_the_first_ones() -> None:
    assert FIRST.env == ["DEBUG=0", "FIXED=1", "BOTH=x"] and FIRST.args == ["-v"]
    assert FIRST.mounts == CONFIG.mounts and FIRST.devices == CONFIG.linux.devices
    assert settings.initial(PluginConfig()) == PluginSettings()


def test_every_kind() -> None:
    found = changed(
        "DEBUG=1", "UNSET.value=a=b.c", "key.source=/k", "fuse=/dev/x", "args=a  b", "tmp=t", "BOTH.value=y"
    )
    assert found.env == ["DEBUG=1", "FIXED=1", "BOTH=y", "UNSET=a=b.c"]
    assert [mount.source for mount in found.mounts] == ["/k", "t", None, "/s"]
    assert [device.path for device in found.devices] == ["/dev/x", None]
    assert found.args == ["a", "", "b"]
    assert changed("args").args == [] and changed("DEBUG").env[0] == "DEBUG=" and changed("key=").mounts[0].source == ""
    assert CONFIG.mounts[0].source == "", "the config stays"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", "invalid format, must be <name>[.<field>][=<value>]"),
        ("=x", "invalid format"),
        ("NO=1", 'setting "NO" not found in the plugin configuration'),
        (".value=1", 'setting ".value" not found'),
        ("debug=1", 'setting "debug" not found'),
        ("FIXED=2", '"FIXED" is not settable'),
        ("FIXED.value=2", '"FIXED.value" is not settable'),
        ("DEBUG.name=X", '"DEBUG.name" is not settable'),
        ("BOTH=y", "multiple fields are settable, one must be specified"),
        ("BOTH.name=y", '"BOTH.name" is not settable'),
        ("bare=/x", "mount bare of the plugin has no source"),
        ("nodev=/x", "device nodev of the plugin has no path"),
        ("still=/x", '"still" is not settable'),
        ("still.options=x", '"still.options" is not settable'),
        ("key=relative", "'relative' is not an absolute path"),
        ("fuse=../x", "'../x' is not an absolute path"),
        ("DEBUG=a\0b", "zero byte"),
    ],
)
def test_refused(change: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        changed("DEBUG=1", change)
    assert words in raised.value.message


_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
_CHANGE = st.builds(
    lambda name, field, value: f"{name}{field}{value}",
    st.sampled_from(["DEBUG", "UNSET", "FIXED", "BOTH", "key", "tmp", "fuse", "args", "still", "nothing", ""]),
    st.sampled_from(["", ".value", ".source", ".path", ".name", ".", ".a.b"]),
    st.one_of(st.just(""), _TEXT.map(lambda text: f"={text}"), _TEXT.map(lambda text: f"=/{text}")),
)


@given(st.lists(_CHANGE, max_size=6))
def test_only_what_is_settable_changes(changes: list[str]) -> None:
    try:
        found = changed(*changes)
    except InvalidParameter:
        return
    assert "FIXED=1" in found.env and found.mounts[2:] == CONFIG.mounts[2:]
    bare = [msgspec.structs.replace(mount, source=None) for mount in found.mounts]
    assert bare == [msgspec.structs.replace(mount, source=None) for mount in CONFIG.mounts]
    assert {each.partition("=")[0] for each in found.env} <= {each.name for each in CONFIG.env}
    assert len({each.partition("=")[0] for each in found.env}) == len(found.env)
    # an upgrade to the same config keeps all of it
    assert settings.carried(CONFIG, found, CONFIG) == found


@given(st.lists(_CHANGE, max_size=6))
def test_an_upgrade_to_a_config_without_settings(changes: list[str]) -> None:
    try:
        found = changed(*changes)
    except InvalidParameter:
        return
    later = PluginConfig(env=[PluginEnv(name="DEBUG", value="2"), PluginEnv(name="NEW", value="n")])
    assert settings.carried(CONFIG, found, later) == settings.initial(later)
