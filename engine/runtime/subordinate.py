"""The ids that dockerd's `userns-remap` gives to containers: the subordinate ids of a user of the
host.

Rules: Docker's documentation, "Isolate containers with a user namespace"; subuid(5), subgid(5).
A line of /etc/subuid or /etc/subgid belongs to the user by its name or its uid. Its ranges, by
their first id, follow one another inside of the namespace. The group of `USER:GROUP` must exist,
and decides nothing, as in dockerd.

Blocking: the host's users may come from a directory service (nsswitch.conf(5)).
Raises: ServerError that names the option. Not here: the namespaces (system/user_namespaces.py).
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ServerError
from engine.system.user_namespaces import IdMap, Range

DEFAULT, DOCKERS_USER = "default", "dockremap"
"""The value of the option that means Docker's own user, and that user."""

MOST_RANGES = 340
"""Lines of a map that the kernel takes (user_namespaces(7))."""
MAX_ID = 2**32 - 2

_SUBUID, _SUBGID = Path("/etc/subuid"), Path("/etc/subgid")


def of_option(value: str, subuid: Path = _SUBUID, subgid: Path = _SUBGID) -> IdMap | None:
    """The map of `userns-remap`, a value that `config/rules.py` has checked. None for root, which
    cannot be remapped with itself: user namespaces are off then, as in dockerd.
    """
    user_word, colon, group_word = value.partition(":")
    user = _user(user_word, value)
    if user.pw_name == "root":
        return None
    if colon or user_word != DEFAULT:
        _check_group(group_word if colon else user_word, value)
    return IdMap(
        uids=_mapped(_ranges(subuid, user, value), subuid, user, value),
        gids=_mapped(_ranges(subgid, user, value), subgid, user, value),
    )


def _user(word: str, value: str) -> pwd.struct_passwd:
    name = DOCKERS_USER if word == DEFAULT else word
    try:
        return pwd.getpwuid(int(name)) if _is_number(name) else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        pass
    cure = ""
    if word == DEFAULT:
        cure = f": make it, with its lines in {_SUBUID} and {_SUBGID}: useradd --system --add-subids-for-system {name}"
    raise ServerError(f"--userns-remap {value}: the host has no user {name}{cure}")


def _check_group(word: str, value: str) -> None:
    try:
        if _is_number(word):
            grp.getgrgid(int(word))
        else:
            grp.getgrnam(word)
    except (KeyError, OverflowError) as error:
        raise ServerError(f"--userns-remap {value}: the host has no group {word}") from error


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _ranges(path: Path, user: pwd.struct_passwd, value: str) -> list[tuple[int, int]]:
    try:
        text = path.read_text("utf-8", "surrogateescape")
    except OSError as error:
        raise ServerError(f"--userns-remap {value}: {path}: {(error.strerror or '').lower()}") from error
    try:
        return sorted(parse(text, (user.pw_name, str(user.pw_uid))))
    except ValueError as error:
        raise ServerError(f"--userns-remap {value}: {path}: {error}") from error


def parse(text: str, owners: Iterable[str]) -> list[tuple[int, int]]:
    """First id and count of each range of these owners. Comments and lines of others are skipped.

    Raises ValueError, which names the line, for one of theirs that is not `NAME:FIRST:COUNT`.
    """
    known = set(owners)
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        owner, _, rest = line.strip().partition(":")
        if owner not in known:
            continue
        first, _, count = rest.partition(":")
        if not (_is_number(first) and _is_number(count)) or max(len(first), len(count)) > 10:
            raise ValueError(f"line {number}: it is not NAME:FIRST:COUNT")
        if not int(count) or int(first) + int(count) - 1 > MAX_ID:
            raise ValueError(f"line {number}: the ids are not in the range 0 to {MAX_ID}")
        found.append((int(first), int(count)))
    return found


def _mapped(found: list[tuple[int, int]], path: Path, user: pwd.struct_passwd, value: str) -> tuple[Range, ...]:
    if not found:
        raise ServerError(f"--userns-remap {value}: {path} has no range for user {user.pw_name}")
    if len(found) > MOST_RANGES:
        raise ServerError(f"--userns-remap {value}: {path} has more than {MOST_RANGES} ranges for {user.pw_name}")
    ranges: list[Range] = []
    inside = after = 0
    for first, count in found:
        if first < after:
            raise ServerError(f"--userns-remap {value}: {path}: two ranges of {user.pw_name} have the id {first}")
        ranges.append(Range(inside, first, count))
        inside, after = inside + count, first + count
    return tuple(ranges)
