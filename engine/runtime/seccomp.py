"""seccomp profiles: Docker's default, the operator's and a client's own, resolved for a container's
capabilities.

All are in Docker's format (`engine/common/seccomp_profiles.py`): rules may depend on capabilities,
architecture and kernel, which is resolved here. The default is `seccomp.json` beside this file. It
is an allow-list: other calls fail with EPERM, `clone3` with ENOSYS so that libc falls back to
`clone`, whose flags can be inspected. It allows what the default of Docker 29 allows, from the
profile of July 2026 on; `python -m tests.support.engine.seccomp` compares it with a newer one and
takes that over. libseccomp skips names that it or the architecture does not know, so a list newer
than the host's library is harmless (tested with crun 1.8.1 and runc 1.1.5 over libseccomp 2.5.4).

Owns:    a cache of filters of each default profile, one per set of the capabilities that matter in
         it.
Threads: any.
Raises:  InvalidParameter for a client's profile.
Not here: compiling (`system/seccomp.py`).
"""

from __future__ import annotations

import base64
import contextlib
import platform
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.common import seccomp_profiles
from engine.common.seccomp_profiles import Document, Syscall, decode, parse
from engine.errors import InvalidParameter
from engine.system import seccomp
from engine.system.seccomp import Condition, Rule

DEFAULT = Path(__file__).with_name("seccomp.json")
"""The default profile."""

_ALLOW, _ERRNO = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
_DOCKER_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "x86"}
"""uname(2) to the names in `includes` and `excludes`; others are the same."""


# --- a client's -----------------------------------------------------------------------------------


def custom(text: str) -> Document:
    """A client's profile, parsed and checked. Raises InvalidParameter with the reason."""
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidParameter(f"SecurityOpt: {error}") from error


def section(profile: Document, capabilities: Iterable[str], machine: str = "", release: str = "") -> msgspec.Raw:
    """The JSON of `linux.seccomp` for a container with these capabilities, on this host or one
    of that machine and kernel (as uname(2) names them).
    """
    machine, release = machine or platform.machine(), release or platform.release()
    return _section(profile, _architectures(profile, machine), _resolved(profile, capabilities, machine, release))


def _architectures(profile: Document, machine: str) -> list[str]:
    """Those that the filter is for; empty for the native one alone."""
    native = f"SCMP_ARCH_{machine.upper()}"
    return profile.architectures or [
        name
        for each in profile.arch_map or ()
        if each.architecture == native
        for name in (each.architecture, *(each.sub_architectures or ()))
    ]


def _resolved(profile: Document, capabilities: Iterable[str], machine: str, release: str) -> Iterator[Syscall]:
    """The rules that apply."""
    granted = frozenset(capabilities)
    for call in profile.syscalls or ():
        if _included(call.includes, granted, machine, release) and not _excluded(
            call.excludes, granted, machine, release
        ):
            yield call


def _section(profile: Document, architectures: list[str], calls: Iterable[Syscall]) -> msgspec.Raw:
    document: dict[str, object] = {"defaultAction": profile.default_action}
    if profile.default_errno_ret is not None:
        document["defaultErrnoRet"] = profile.default_errno_ret
    if architectures:
        document["architectures"] = architectures
    if profile.flags:
        document["flags"] = profile.flags
    document["syscalls"] = [_rule(call) for call in calls]
    return msgspec.Raw(msgspec.json.encode(document))


def _rule(call: Syscall) -> dict[str, object]:
    rule: dict[str, object] = {"names": call.names or [call.name], "action": call.action}
    if call.errno_ret is not None:
        rule["errnoRet"] = call.errno_ret
    if call.args:
        rule["args"] = [
            {"index": each.index, "value": each.value, "valueTwo": each.value_two, "op": each.op} for each in call.args
        ]
    return rule


def _included(wanted: seccomp_profiles.Condition, granted: frozenset[str], machine: str, release: str) -> bool:
    return (
        (not wanted.arches or _DOCKER_ARCHITECTURES.get(machine, machine) in wanted.arches)
        and granted.issuperset(wanted.caps or ())
        and (not wanted.min_kernel or _version(release) >= _version(wanted.min_kernel))
    )


def _excluded(unwanted: seccomp_profiles.Condition, granted: frozenset[str], machine: str, release: str) -> bool:
    return bool(
        (unwanted.arches and _DOCKER_ARCHITECTURES.get(machine, machine) in unwanted.arches)
        or granted.intersection(unwanted.caps or ())
        or (unwanted.min_kernel and _version(release) >= _version(unwanted.min_kernel))
    )


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


# --- one that many containers have ----------------------------------------------------------------


class Profile(NamedTuple):
    """One filter in the two forms that runtimes take."""

    section: msgspec.Raw
    """The JSON of `linux.seccomp`."""
    program: str
    """The compiled filter in base64, for a runtime that takes one ready-made; empty when
    libseccomp is missing, or the profile has actions that `system/seccomp.py` does not compile.
    """


class Filters:
    """The filters of one profile: one per set of those capabilities that matter in it, made when a
    container first needs it.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self.capabilities = frozenset(
            name
            for call in document.syscalls or ()
            for condition in (call.includes, call.excludes)
            for name in condition.caps or ()
        )
        """Those that matter."""
        self._profile = lru_cache(maxsize=64)(self._make)

    def profile(self, capabilities: Iterable[str], machine: str = "") -> Profile:
        """For a container with these capabilities; `machine` as uname(2) names it, this host's when
        not given.
        """
        return self._profile(self.capabilities.intersection(capabilities), machine or platform.machine())

    def calls(self, capabilities: frozenset[str], machine: str, release: str) -> list[Syscall]:
        """The rules that apply, those of the same effect in one."""
        merged: dict[object, Syscall] = {}
        for call in _resolved(self._document, capabilities, machine, release):
            effect = (call.action, call.errno_ret, tuple(call.args or ()))
            names = {*(call.names or [call.name]), *(merged[effect].names or () if effect in merged else ())}
            merged[effect] = Syscall(names=sorted(names), action=call.action, errno_ret=call.errno_ret, args=call.args)
        return list(merged.values())

    def _make(self, capabilities: frozenset[str], machine: str) -> Profile:
        document, architectures = self._document, _architectures(self._document, machine)
        calls = self.calls(capabilities, machine, platform.release())
        compiled = b""
        if architectures and machine == platform.machine() and seccomp.available() and _compiles(document, calls):
            errno = document.default_errno_ret
            # rules that libseccomp cannot join: the runtime says it
            with contextlib.suppress(OSError):
                compiled = seccomp.program(
                    map(_compiled, calls),
                    default_errno=_EPERM if errno is None else errno,
                    architectures=architectures,
                )
        return Profile(_section(document, architectures, calls), base64.b64encode(compiled).decode())


_EPERM = 1


def _compiles(document: Document, calls: Iterable[Syscall]) -> bool:
    """True for an allow-list without flags, as Docker's profile is."""
    actions = {call.action for call in calls}
    return document.default_action == _ERRNO and not document.flags and actions <= {_ALLOW, _ERRNO}


def _compiled(call: Syscall) -> Rule:
    errno = _EPERM if call.errno_ret is None else call.errno_ret
    return Rule(
        call.names or (),
        [Condition(each.index, each.value, each.op, each.value_two) for each in call.args or ()],
        None if call.action == _ALLOW else errno,
    )


# --- the default ----------------------------------------------------------------------------------


def profile(capabilities: Iterable[str], machine: str = "") -> Profile:
    """The default profile for a container with these capabilities, as `Filters.profile`."""
    return builtin().profile(capabilities, machine)


def rules(capabilities: Iterable[str], machine: str = "", release: str = "") -> list[Rule]:
    """The calls that the default profile allows, and calls with an error of their own; others fail
    with EPERM.
    """
    machine, release = machine or platform.machine(), release or platform.release()
    return [_compiled(call) for call in builtin().calls(frozenset(capabilities), machine, release)]


@cache
def default() -> Document:
    """The document."""
    return decode(DEFAULT.read_bytes())


@cache
def builtin() -> Filters:
    """The default profile's."""
    return Filters(default())
