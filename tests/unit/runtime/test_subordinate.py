"""The ids of `userns-remap`, from the files of a host."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import Config
from engine.containers import defaults
from engine.errors import ServerError
from engine.runtime import subordinate
from engine.system.user_namespaces import IdMap, Range

USER = pwd.getpwuid(1)
"""A user and a group of this name are on every host: daemon, or bin."""
GROUP = USER.pw_name


def read(directory: Path, value: str, uids: str, gids: str | None = None) -> IdMap | None:
    subuid, subgid = directory / "subuid", directory / "subgid"
    subuid.write_text(uids)
    subgid.write_text(uids if gids is None else gids)
    return subordinate.of_option(value, subuid, subgid)


@pytest.mark.parametrize(
    "value", [USER.pw_name, str(USER.pw_uid), f"{USER.pw_name}:{GROUP}", f"{USER.pw_uid}:{USER.pw_gid}"]
)
def test_every_form_of_a_user(tmp_path: Path, value: str) -> None:
    found = read(tmp_path, value, f"{USER.pw_name}:100000:65536\n", f"{USER.pw_name}:200000:1000\n")
    assert found == IdMap(uids=(Range(0, 100000, 65536),), gids=(Range(0, 200000, 1000),))
    assert found.root == (100000, 200000)


def test_ranges_follow_one_another_by_their_first_id(tmp_path: Path) -> None:
    text = f"""\
# {USER.pw_name}:1:1
other:5000:5

{USER.pw_name}:300000:10
{USER.pw_uid}:100000:5
{USER.pw_name}x:7:7
"""
    found = read(tmp_path, USER.pw_name, text)
    assert found is not None
    assert found.uids == (Range(0, 100000, 5), Range(5, 300000, 10))
    assert found.outside(5, 4) == (300000, 100004)


def test_root_means_none(tmp_path: Path) -> None:
    assert read(tmp_path, "root", "") is None
    assert read(tmp_path, "0:0", "") is None


@pytest.mark.parametrize(
    ("value", "text", "words"),
    [
        ("nobody-has-this", "", "the host has no user nobody-has-this"),
        ("4294967290", "", "the host has no user 4294967290"),
        (f"{USER.pw_name}:nobody-has-this", "", "the host has no group nobody-has-this"),
        (USER.pw_name, "", f"subuid has no range for user {USER.pw_name}"),
        (USER.pw_name, f"{USER.pw_name}:1", "subuid: line 1: it is not NAME:FIRST:COUNT"),
        (USER.pw_name, f"\n{USER.pw_name}:a:1", "subuid: line 2: it is not NAME:FIRST:COUNT"),
        (USER.pw_name, f"{USER.pw_name}:1:0", "line 1: the ids are not in the range"),
        (USER.pw_name, f"{USER.pw_name}:4294967000:65536", "line 1: the ids are not in the range"),
        (USER.pw_name, f"{USER.pw_name}:10:10\n{USER.pw_name}:19:2", "two ranges of .* have the id 19"),
        (USER.pw_name, "".join(f"{USER.pw_name}:{2 * at}:1\n" for at in range(341)), "more than 340 ranges"),
    ],
)
def test_refusals_name_the_option_and_the_file(tmp_path: Path, value: str, text: str, words: str) -> None:
    with pytest.raises(ServerError, match=words) as caught:
        read(tmp_path, value, text)
    assert caught.value.message.startswith(f"--userns-remap {value}: ")
    assert "\n" not in caught.value.message


def test_missing_files_and_a_missing_user_of_docker(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="subuid: no such file or directory"):
        subordinate.of_option(USER.pw_name, tmp_path / "subuid", tmp_path / "subgid")
    with pytest.raises(ServerError, match=r"no user dockremap: make it, .*: useradd "):
        defaults.of(Config(userns_remap="default"))


@given(st.text(st.sampled_from("ab:0123 \n#"), max_size=60))
def test_any_file(text: str) -> None:
    try:
        found = subordinate.parse(text, ("a", "1"))
    except ValueError as error:
        assert str(error).startswith("line ")
        return
    lines = [line.strip().split(":") for line in text.split("\n")]
    assert found == [
        (int(first), int(count)) for owner, first, count in (x for x in lines if len(x) == 3) if owner in ("a", "1")
    ]
    assert all(count >= 1 for _, count in found)
