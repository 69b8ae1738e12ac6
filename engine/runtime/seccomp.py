"""seccomp profiles: Docker's default and a client's own, resolved for a container's capabilities.

Both are in Docker's format: rules may depend on capabilities, architecture and kernel, which is
resolved here. The default is `seccomp.json` beside this file. It is an allow-list: other calls fail
with EPERM, `clone3` with ENOSYS so that libc falls back to `clone`, whose flags can be inspected.
It allows what the default of Docker 29 allows, from the profile of July 2026 on; `python -m
tests.support.engine.seccomp` compares it with a newer one and takes that over. libseccomp skips
names that it or the architecture does not know, so a list newer than the host's library is harmless
(tested with crun 1.8.1 and runc 1.1.5 over libseccomp 2.5.4).

Owns:    a cache of default profiles, one per set of those capabilities that matter here.
Threads: any.
Raises:  InvalidParameter for a client's profile.
Not here: compiling (`system/seccomp.py`).
"""

from __future__ import annotations

import base64
import platform
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.errors import InvalidParameter, decoding_reason
from engine.system import seccomp
from engine.system.seccomp import Condition, Rule

DEFAULT = Path(__file__).with_name("seccomp.json")
"""The default profile."""

_ACTIONS = frozenset(
    f"SCMP_ACT_{name}" for name in ("KILL", "KILL_PROCESS", "KILL_THREAD", "TRAP", "ERRNO", "TRACE", "ALLOW", "LOG")
)
_OPERATORS = frozenset(f"SCMP_CMP_{name}" for name in ("NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"))
_FLAGS = frozenset(f"SECCOMP_FILTER_FLAG_{name}" for name in ("TSYNC", "LOG", "SPEC_ALLOW"))
_ALLOW, _ERRNO = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
_DOCKER_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "x86"}
"""uname(2) to the names in `includes` and `excludes`; others are the same."""


# --- documents ------------------------------------------------------------------------------------


class _Struct(msgspec.Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    pass


class _Argument(_Struct, frozen=True, kw_only=True):
    index: int
    value: int = 0
    value_two: int = 0
    op: str


class _Condition(_Struct, frozen=True, kw_only=True):
    """`arches` as Go names them, `min_kernel` as `4.8`; all given conditions must hold."""

    caps: list[str] | None = None
    arches: list[str] | None = None
    min_kernel: str = ""


class Syscall(_Struct, frozen=True, kw_only=True):
    """One rule: these calls get this action when all of `args` hold."""

    name: str = ""
    names: list[str] | None = None
    action: str
    errno_ret: int | None = None
    args: list[_Argument] | None = None
    includes: _Condition = _Condition()
    excludes: _Condition = _Condition()


class _ArchitectureMap(_Struct, frozen=True, kw_only=True):
    architecture: str
    sub_architectures: list[str] | None = None


class Custom(_Struct, frozen=True, kw_only=True):
    """A profile in Docker's format."""

    default_action: str
    default_errno_ret: int | None = None
    architectures: list[str] | None = None
    arch_map: list[_ArchitectureMap] | None = None
    flags: list[str] | None = None
    listener_path: str = ""
    syscalls: list[Syscall] | None = None


_decode = msgspec.json.Decoder(Custom).decode


def custom(text: str) -> Custom:
    """A client's profile, parsed and checked. Raises InvalidParameter with the reason."""
    try:
        found = _decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidParameter(f"SecurityOpt: Decoding seccomp profile failed: {decoding_reason(error)}") from error
    if found.architectures and found.arch_map:
        raise _wrong("use either 'architectures' or 'archMap'")
    if found.listener_path:
        raise _wrong("'listenerPath' is not supported by this engine")
    for flag in found.flags or ():
        if flag not in _FLAGS:
            raise _wrong(f"unknown flag {flag!r}")
    for call in found.syscalls or ():
        if call.name and call.names:
            raise _wrong("use either 'name' or 'names'")
        if not (call.name or call.names):
            raise _wrong("a rule without 'names'")
        for argument in call.args or ():
            if argument.op not in _OPERATORS or not 0 <= argument.index <= 5:
                raise _wrong(f"rule for {call.name or call.names}: bad argument {argument.index} {argument.op!r}")
    for action in (found.default_action, *(call.action for call in found.syscalls or ())):
        if action not in _ACTIONS:
            raise _wrong(f"unknown or unsupported action {action!r}")
    return found


def _wrong(reason: str) -> InvalidParameter:
    return InvalidParameter(f"SecurityOpt: invalid seccomp profile: {reason}")


def section(profile: Custom, capabilities: Iterable[str], machine: str = "", release: str = "") -> msgspec.Raw:
    """The JSON of `linux.seccomp` for a container with these capabilities, on this host or one
    of that machine and kernel (as uname(2) names them).
    """
    machine, release = machine or platform.machine(), release or platform.release()
    return _section(profile, _architectures(profile, machine), _resolved(profile, capabilities, machine, release))


def _architectures(profile: Custom, machine: str) -> list[str]:
    """Those that the filter is for; empty for the native one alone."""
    native = f"SCMP_ARCH_{machine.upper()}"
    return profile.architectures or [
        name
        for each in profile.arch_map or ()
        if each.architecture == native
        for name in (each.architecture, *(each.sub_architectures or ()))
    ]


def _resolved(profile: Custom, capabilities: Iterable[str], machine: str, release: str) -> Iterator[Syscall]:
    """The rules that apply."""
    granted = frozenset(capabilities)
    for call in profile.syscalls or ():
        if _included(call.includes, granted, machine, release) and not _excluded(
            call.excludes, granted, machine, release
        ):
            yield call


def _section(profile: Custom, architectures: list[str], calls: Iterable[Syscall]) -> msgspec.Raw:
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


def _included(wanted: _Condition, granted: frozenset[str], machine: str, release: str) -> bool:
    return (
        (not wanted.arches or _DOCKER_ARCHITECTURES.get(machine, machine) in wanted.arches)
        and granted.issuperset(wanted.caps or ())
        and (not wanted.min_kernel or _version(release) >= _version(wanted.min_kernel))
    )


def _excluded(unwanted: _Condition, granted: frozenset[str], machine: str, release: str) -> bool:
    return bool(
        (unwanted.arches and _DOCKER_ARCHITECTURES.get(machine, machine) in unwanted.arches)
        or granted.intersection(unwanted.caps or ())
        or (unwanted.min_kernel and _version(release) >= _version(unwanted.min_kernel))
    )


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


# --- the default ----------------------------------------------------------------------------------


class Profile(NamedTuple):
    """One filter in the two forms that runtimes take."""

    section: msgspec.Raw
    """The JSON of `linux.seccomp`."""
    program: str
    """The compiled filter in base64, for a runtime that takes one ready-made; empty when
    libseccomp is missing.
    """


def profile(capabilities: Iterable[str], machine: str = "") -> Profile:
    """The default profile for a container with these capabilities; `machine` as uname(2) names
    it, this host's when not given.
    """
    return _profile(_capabilities_that_matter().intersection(capabilities), machine or platform.machine())


def rules(capabilities: Iterable[str], machine: str = "", release: str = "") -> list[Rule]:
    """The calls that the default profile allows, and calls with an error of their own; others fail
    with EPERM.
    """
    machine, release = machine or platform.machine(), release or platform.release()
    return [
        Rule(
            call.names or (),
            [Condition(each.index, each.value, each.op, each.value_two) for each in call.args or ()],
            None if call.action == _ALLOW else call.errno_ret,
        )
        for call in _default_calls(frozenset(capabilities), machine, release)
    ]


@cache
def default() -> Custom:
    """The document."""
    return _decode(DEFAULT.read_bytes())


@cache
def _capabilities_that_matter() -> frozenset[str]:
    return frozenset(
        name
        for call in default().syscalls or ()
        for condition in (call.includes, call.excludes)
        for name in condition.caps or ()
    )


def _default_calls(capabilities: frozenset[str], machine: str, release: str) -> list[Syscall]:
    """The rules that apply, those of the same effect in one."""
    merged: dict[object, Syscall] = {}
    for call in _resolved(default(), capabilities, machine, release):
        effect = (call.action, call.errno_ret, tuple(call.args or ()))
        names = {*(call.names or ()), *(merged[effect].names or () if effect in merged else ())}
        merged[effect] = Syscall(names=sorted(names), action=call.action, errno_ret=call.errno_ret, args=call.args)
    return list(merged.values())


@lru_cache(maxsize=64)
def _profile(capabilities: frozenset[str], machine: str) -> Profile:
    architectures = _architectures(default(), machine)
    compiled = b""
    if architectures and machine == platform.machine() and seccomp.available():
        errno = default().default_errno_ret
        assert errno is not None
        compiled = seccomp.program(rules(capabilities, machine), default_errno=errno, architectures=architectures)
    calls = _default_calls(capabilities, machine, platform.release())
    return Profile(_section(default(), architectures, calls), base64.b64encode(compiled).decode())
