"""What a plugin asks of the host, and the comparison with what was accepted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.managed_plugins import privileges
from engine.wire.plugins import (
    PluginConfig,
    PluginDevice,
    PluginLinux,
    PluginMount,
    PluginNetwork,
    PluginPrivilege,
)

EVERYTHING = PluginConfig(
    network=PluginNetwork(type="host"),
    ipc_host=True,
    pid_host=True,
    mounts=[
        PluginMount(name="state", source="/var/lib/x", destination="/x", type="bind"),
        PluginMount(name="own", destination="/tmp", type="tmpfs"),
        PluginMount(name="key", source="", destination="/key", type="bind"),
    ],
    linux=PluginLinux(
        capabilities=["CAP_SYS_ADMIN", "CAP_NET_ADMIN"],
        allow_all_devices=True,
        devices=[PluginDevice(name="fuse", path="/dev/fuse"), PluginDevice(name="none")],
    ),
)


def test_all_of_them_in_dockers_order_and_words() -> None:
    assert [(each.name, each.description, each.value) for each in privileges.required(EVERYTHING)] == [
        ("network", "permissions to access a network", ["host"]),
        ("host ipc namespace", "allow access to host ipc namespace", ["true"]),
        ("host pid namespace", "allow access to host pid namespace", ["true"]),
        ("mount", "host path to mount", ["/var/lib/x"]),
        ("mount", "host path to mount", [""]),
        ("device", "host device to access", ["/dev/fuse"]),
        ("allow-all-devices", "allow 'rwm' access to all devices", ["true"]),
        ("capabilities", "list of additional capabilities required", ["CAP_SYS_ADMIN", "CAP_NET_ADMIN"]),
    ]


@pytest.mark.parametrize(("network", "asked"), [("", 0), ("null", 0), ("bridge", 0), ("host", 1), ("other", 1)])
def test_networks(network: str, asked: int) -> None:
    config = PluginConfig(network=PluginNetwork(type=network))
    assert [each.value for each in privileges.required(config)] == [[network]] * asked
    assert privileges.required(PluginConfig()) == []


@given(st.permutations(privileges.required(EVERYTHING)), st.booleans())
def test_order_and_descriptions_mean_nothing(accepted: list[PluginPrivilege], backwards: bool) -> None:
    given_back = [
        PluginPrivilege(name=each.name, value=each.value[::-1] if backwards else each.value) for each in accepted
    ]
    privileges.check("p", privileges.required(EVERYTHING), given_back)


@given(st.integers(0, 7))
def test_one_that_is_missing_or_too_many(at: int) -> None:
    wanted = privileges.required(EVERYTHING)
    rest = wanted[:at] + wanted[at + 1 :]
    with pytest.raises(InvalidParameter, match=r"incorrect privileges for plugin p: not accepted: "):
        privileges.check("p", wanted, rest)
    with pytest.raises(InvalidParameter, match=r"incorrect privileges for plugin p: accepted, but not asked for: "):
        privileges.check("p", rest, wanted)


@given(st.integers(0, 7), st.sampled_from(["name", "more", "fewer", "other"]))
def test_another_value_at_any_place(at: int, change: str) -> None:
    wanted = privileges.required(EVERYTHING)
    one = wanted[at]
    other = {
        "name": msgspec.structs.replace(one, name="x"),
        "more": msgspec.structs.replace(one, value=[*one.value, "/"]),
        "fewer": msgspec.structs.replace(one, value=one.value[:-1]),
        "other": msgspec.structs.replace(one, value=["/"]),
    }[change]
    with pytest.raises(InvalidParameter, match="incorrect privileges"):
        privileges.check("p", wanted, [*wanted[:at], other, *wanted[at + 1 :]])
