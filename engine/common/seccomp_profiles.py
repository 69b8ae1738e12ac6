"""seccomp profiles in Docker's format: what a document may say.

A profile is a client's (HostConfig.SecurityOpt), the operator's (`seccomp-profile`), or the
engine's own. Pure. Not here: what one means for a container (`runtime/seccomp.py`).
"""

from __future__ import annotations

import msgspec

from engine.errors import decoding_reason

BUILTIN, UNCONFINED = "builtin", "unconfined"
"""Names in place of a document: the engine's own profile, and none."""

_ACTIONS = frozenset(
    f"SCMP_ACT_{name}" for name in ("KILL", "KILL_PROCESS", "KILL_THREAD", "TRAP", "ERRNO", "TRACE", "ALLOW", "LOG")
)
_OPERATORS = frozenset(f"SCMP_CMP_{name}" for name in ("NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"))
_FLAGS = frozenset(f"SECCOMP_FILTER_FLAG_{name}" for name in ("TSYNC", "LOG", "SPEC_ALLOW"))


class _Struct(msgspec.Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    pass


class Argument(_Struct, frozen=True, kw_only=True):
    index: int
    value: int = 0
    value_two: int = 0
    op: str


class Condition(_Struct, frozen=True, kw_only=True):
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
    args: list[Argument] | None = None
    includes: Condition = Condition()
    excludes: Condition = Condition()


class _ArchitectureMap(_Struct, frozen=True, kw_only=True):
    architecture: str
    sub_architectures: list[str] | None = None


class Document(_Struct, frozen=True, kw_only=True):
    """A profile in Docker's format."""

    default_action: str
    default_errno_ret: int | None = None
    architectures: list[str] | None = None
    arch_map: list[_ArchitectureMap] | None = None
    flags: list[str] | None = None
    listener_path: str = ""
    syscalls: list[Syscall] | None = None


decode = msgspec.json.Decoder(Document).decode


def parse(text: str | bytes) -> Document:
    """A checked profile. Raises ValueError with the reason."""
    try:
        found = decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"Decoding seccomp profile failed: {decoding_reason(error)}") from error
    if (reason := _broken(found)) is not None:
        raise ValueError(f"invalid seccomp profile: {reason}")
    return found


def _broken(found: Document) -> str | None:
    """What is wrong with it; None for a profile that can be in force."""
    if found.architectures and found.arch_map:
        return "use either 'architectures' or 'archMap'"
    if found.listener_path:
        return "'listenerPath' is not supported by this engine"
    for flag in found.flags or ():
        if flag not in _FLAGS:
            return f"unknown flag {flag!r}"
    for call in found.syscalls or ():
        if call.name and call.names:
            return "use either 'name' or 'names'"
        if not (call.name or call.names):
            return "a rule without 'names'"
        for argument in call.args or ():
            if argument.op not in _OPERATORS or not 0 <= argument.index <= 5:
                return f"rule for {call.name or call.names}: bad argument {argument.index} {argument.op!r}"
    for action in (found.default_action, *(call.action for call in found.syscalls or ())):
        if action not in _ACTIONS:
            return f"unknown or unsupported action {action!r}"
    return None
