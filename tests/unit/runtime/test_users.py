from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.runtime.users import MAX_ID, Identity, identity, lookup

PASSWD = b"""\
root:x:0:0:root:/root:/bin/sh
# a comment
broken
half:x:12
word:x:one:two::/:/bin/sh
ann:x:1000:1001:Ann,,,:/home/ann:/bin/sh
bob:x:1002:1002::
big:x:99999999999:1::/big:
ann:x:5:5::/second:
1003:x:0:0::/evil:
"""
GROUP = b"""\
root:x:0:root
audio:x:29:ann,bob
bad:x:one:ann
short:x:44
video:x:45:bob

wheel:x:10:ann
10:x:0:
"""


def found(user: str, *more: str) -> Identity:
    return identity(user, more, PASSWD, GROUP)


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", Identity(0, 0, (0,), "/root")),
        ("root", Identity(0, 0, (0,), "/root")),
        ("0", Identity(0, 0, (0,), "/root")),
        ("ann", Identity(1000, 1001, (1001, 29, 10), "/home/ann")),
        ("1000", Identity(1000, 1001, (1001, 29, 10), "/home/ann")),
        ("bob", Identity(1002, 1002, (1002, 29, 45), "/")),
        ("ann:audio", Identity(1000, 29, (29,), "/home/ann")),
        ("ann:7", Identity(1000, 7, (7,), "/home/ann")),
        ("7:wheel", Identity(7, 10, (10,), "/")),
        ("4242", Identity(4242, 0, (0,), "/")),
        (":wheel", Identity(0, 10, (10,), "/root")),
        # Digits are a uid and a gid, even where an entry has them as its name (CVE-2016-3697).
        ("1003", Identity(1003, 0, (0,), "/")),
        ("ann:10", Identity(1000, 10, (10,), "/home/ann")),
        (str(MAX_ID), Identity(MAX_ID, 0, (0,), "/")),
    ],
)
def test_forms(user: str, expected: Identity) -> None:
    assert found(user) == expected


def test_more_groups() -> None:
    assert found("ann", "video", "7", "29").groups == (1001, 29, 10, 45, 7)
    assert found("ann:5", "5", "short").groups == (5, 44)
    assert found("ann:5", "10").groups == (5, 10)


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("nobody", "unable to find user nobody: no matching entries in passwd file"),
        ("ann:nogroup", "unable to find group nogroup: no matching entries in group file"),
        ("2147483648", "^2147483648: uids and gids must be in range 0-2147483647"),
        ("0:99999999999999999999", "uids and gids must be in range"),
        ("-1", "uids and gids must be in range 0-2147483647"),
        ("ann:-5", "^-5: uids and gids must be in range 0-2147483647"),
        ("big", "unable to find user big"),
        ("word", "unable to find user word"),
        ("٣", "unable to find user"),
    ],
)
def test_refusals(user: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        found(user)


def test_no_files_at_all(tmp_path: Path) -> None:
    assert lookup(tmp_path, "") == Identity(0, 0, (0,), "/")
    with pytest.raises(InvalidParameter):
        lookup(tmp_path, "ann")


def test_links_lead_nowhere_outside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (tmp_path / "passwd").write_bytes(b"evil:x:1:1::/evil:\n")
    (root / "etc/passwd").symlink_to(tmp_path / "passwd")
    (root / "etc/group").symlink_to("../../../../etc/group")
    with pytest.raises(InvalidParameter, match="unable to find user evil"):
        lookup(root, "evil")
    (root / "etc/passwd").unlink()
    os.mkfifo(root / "etc/passwd")
    assert lookup(root, "7").uid == 7
    (root / "etc/passwd").unlink()
    (root / "etc/passwd").symlink_to("/etc/passwd.real")
    (root / "etc/passwd.real").write_bytes(b"good:x:8:9::/good:\n")
    assert lookup(root, "good") == Identity(8, 9, (9,), "/good")


def test_huge_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    with open(tmp_path / "etc/passwd", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InvalidParameter, match="/etc/passwd in the container"):
        lookup(tmp_path, "")


@given(st.binary(max_size=200), st.binary(max_size=200), st.text(max_size=20))
def test_hostile_files(passwd: bytes, group: bytes, user: str) -> None:
    try:
        result = identity(user, (), passwd, group)
    except InvalidParameter:
        return
    assert 0 <= result.uid <= MAX_ID
    assert all(0 <= gid <= MAX_ID for gid in result.groups)


@pytest.mark.parametrize("home", [b"/h\xff", b"/h\0x", b"/h\x1b", b""])
def test_a_home_that_is_no_text(home: bytes) -> None:
    """It could not be written to config.json."""
    assert identity("x", (), b"x:x:5:5::" + home + b":\n", b"").home == "/"
