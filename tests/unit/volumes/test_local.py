"""The local driver's names and options."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.system import mounts
from engine.volumes import local

PLAIN = {"type": "tmpfs", "device": "tmpfs"}


@pytest.mark.parametrize("name", ["ab", "a-b_c.d", "0" * 64, "a" * local.LONGEST_NAME])
def test_good_names(name: str) -> None:
    local.check_name(name)


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
        ({**PLAIN, "o": "remount"}, "remount is nothing that a new mount can be"),
        ({**PLAIN, "o": "a\0b"}, "NUL"),
        ({**PLAIN, "o": "x" * 4096}, "longer than the kernel reads"),
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
