"""The identity of a container's process: its User field looked up in the image's own /etc/passwd
and /etc/group.

Rules: passwd(5), group(5), and Docker's meaning of `user[:group]`, with one exception: a word of
       digits is always a uid or gid, even if an entry has that word as its name (CVE-2016-3697).
Numbers need not be listed. Without `:group` the process gets the user's primary group and every
group that lists the user; with `:group` only that one. The files are untrusted: they are read
inside the container's root, malformed lines are skipped, and files beyond `FILE_LIMIT` are refused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from engine.errors import InvalidParameter, reason
from engine.system.files import open_directory, read_in_root

FILE_LIMIT = 4 << 20
"""Bytes of /etc/passwd or /etc/group that are read; a larger file is refused."""

MAX_ID = 2**31 - 1


class Identity(NamedTuple):
    """Numbers for the kernel and the home directory for $HOME.

    `groups` begins with `gid`. Otherwise the process could drop `gid`, and so access files whose
    mode excludes its group (CVE-2022-36109).
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


class _User(NamedTuple):
    name: str
    uid: int
    gid: int
    home: str


class _Group(NamedTuple):
    name: str
    gid: int
    members: tuple[str, ...]


ROOT = Identity(0, 0, (0,), "/root")


def lookup(rootfs: Path | str, user: str, group_add: Iterable[str] = ()) -> Identity:
    """The identity of `user` in a mounted root. Blocks on files.

    Raises InvalidParameter for a name that is not listed and for a number out of range.
    """
    root = open_directory(rootfs)
    try:
        return identity(user, group_add, _read(root, "etc/passwd"), _read(root, "etc/group"))
    finally:
        os.close(root)


def owner(root: int, user: str) -> tuple[int, int]:
    """uid and gid of `user` in the root behind a descriptor. Blocks and raises as `lookup`."""
    found = identity(user, (), _read(root, "etc/passwd"), _read(root, "etc/group"))
    return found.uid, found.gid


def identity(user: str, group_add: Iterable[str], passwd: bytes, group: bytes) -> Identity:
    """As `lookup`, from the content of the files."""
    user_word, _, group_word = user.partition(":")
    found = _find_user(user_word or "0", passwd)
    groups = list(_groups(group))
    if group_word:
        gid = _group_number(group_word, groups)
        more: list[int] = []
    else:
        gid = found.gid
        more = [each.gid for each in groups if found.name and found.name in each.members]
    more += [_group_number(word, groups) for word in group_add]
    return Identity(found.uid, gid, tuple(dict.fromkeys((gid, *more))), found.home if _is_text(found.home) else "/")


def _is_text(home: str) -> bool:
    """True if it can be a variable's value in config.json: UTF-8 without NUL, not empty."""
    return home.isprintable() and bool(home)


def _find_user(word: str, passwd: bytes) -> _User:
    number = _number(word)
    for entry in _users(passwd):
        if entry.name == word if number is None else entry.uid == number:
            return entry
    if number is None:
        raise InvalidParameter(f"unable to find user {word}: no matching entries in passwd file")
    return _User("", number, 0, "")


def _group_number(word: str, groups: Iterable[_Group]) -> int:
    number = _number(word)
    if number is not None:
        return number
    for entry in groups:
        if entry.name == word:
            return entry.gid
    raise InvalidParameter(f"unable to find group {word}: no matching entries in group file")


def _number(word: str) -> int | None:
    digits = word.removeprefix("-")
    if not digits.isascii() or not digits.isdigit():
        return None
    if digits != word or len(word) > 10 or int(word) > MAX_ID:
        raise InvalidParameter(f"{word}: uids and gids must be in range 0-{MAX_ID}")
    return int(word)


def _users(passwd: bytes) -> Iterator[_User]:
    for fields in _lines(passwd):
        if len(fields) >= 4 and (uid := _listed(fields[2])) is not None and (gid := _listed(fields[3])) is not None:
            yield _User(fields[0], uid, gid, fields[5] if len(fields) > 5 else "")


def _groups(group: bytes) -> Iterator[_Group]:
    for fields in _lines(group):
        if len(fields) >= 3 and (gid := _listed(fields[2])) is not None:
            yield _Group(fields[0], gid, tuple(fields[3].split(",")) if len(fields) > 3 else ())


def _lines(content: bytes) -> Iterator[list[str]]:
    for line in content.decode("utf-8", "surrogateescape").split("\n"):
        if stripped := line.strip():
            yield stripped.split(":")


def _listed(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 10 and int(word) <= MAX_ID else None


def _read(root: int, path: str) -> bytes:
    try:
        return read_in_root(root, path, FILE_LIMIT)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR):
            return b""
        raise InvalidParameter(f"/{path} in the container: {reason(error)}") from error
