"""Typed Dockerfile instructions: one logical line to one frozen record.

A record holds the values as they are written, with their quotes and variables; `expand` replaces
them. `read` checks flags and the number of arguments, `check` quotes and substitutions, and the
values that have no variables. Not here: joining lines (builder/dockerfile/lines.py), the effect on
a configuration (effects.py).
Raises: InvalidParameter in the words of Docker, without the line's number.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidParameter
from engine.images.instructions import mounts, words
from engine.images.instructions.mounts import RunMount
from engine.images.instructions.nearest import hint
from engine.images.instructions.words import Expand, Heredoc, Line, Unnumbered


class _Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """`line`: its first line in the file, from 1. `text`: as `Step N : …` shows it."""

    line: int = 0
    text: str = ""


class Inline(NamedTuple):
    """A file whose content stands in the Dockerfile: a heredoc of COPY or ADD."""

    name: str
    content: str
    expand: bool
    """Variables in the content are replaced. `expand` (the function) does it."""


class From(_Instruction, frozen=True, kw_only=True):
    """`FROM [--platform=P] image [AS name]`; `name` is in lower case, empty when not given."""

    image: str
    name: str = ""
    platform: str = ""


class Run(_Instruction, frozen=True, kw_only=True):
    """`command`: a tuple is the JSON form, a str is for the shell. See `script` for heredocs."""

    command: tuple[str, ...] | str
    heredocs: tuple[Heredoc, ...] = ()
    mounts: tuple[RunMount, ...] = ()
    network: str = "default"
    security: str = "sandbox"
    mount_flags: tuple[str, ...] = ()
    """The texts of `mounts`, which `expand` reads again."""


class _Transfer(_Instruction, frozen=True, kw_only=True):
    """`sources` and `heredocs` go to `destination`. An empty `from_` is the build's context."""

    sources: tuple[str, ...]
    destination: str
    heredocs: tuple[Inline, ...] = ()
    from_: str = ""
    chown: str = ""
    chmod: str = ""
    link: bool = False
    parents: bool = False
    exclude: tuple[str, ...] = ()
    checksum: str = ""
    keep_git_dir: bool | None = None
    unpack: bool | None = None


class Copy(_Transfer, frozen=True, kw_only=True):
    """`COPY`; never `checksum`, `keep_git_dir`, `unpack`."""


class Add(_Transfer, frozen=True, kw_only=True):
    """`ADD`; never `from_`, `parents`. None: the flag was not given."""


class Env(_Instruction, frozen=True, kw_only=True):
    """`legacy`: written as `ENV key value`."""

    pairs: tuple[tuple[str, str], ...]
    legacy: bool = False


class Arg(_Instruction, frozen=True, kw_only=True):
    """Names with their default values; None: no default."""

    pairs: tuple[tuple[str, str | None], ...]


class Label(_Instruction, frozen=True, kw_only=True):
    """`legacy`: written as `LABEL key value`."""

    pairs: tuple[tuple[str, str], ...]
    legacy: bool = False


class Cmd(_Instruction, frozen=True, kw_only=True):
    """`command`: a tuple is the JSON form, a str is for the shell."""

    command: tuple[str, ...] | str


class Entrypoint(_Instruction, frozen=True, kw_only=True):
    """`command`: a tuple is the JSON form, a str is for the shell. Empty: no entrypoint."""

    command: tuple[str, ...] | str


class Expose(_Instruction, frozen=True, kw_only=True):
    """Ports and ranges in sorted order, as written."""

    ports: tuple[str, ...]


class Volume(_Instruction, frozen=True, kw_only=True):
    paths: tuple[str, ...]


class User(_Instruction, frozen=True, kw_only=True):
    user: str


class Workdir(_Instruction, frozen=True, kw_only=True):
    path: str


class Shell(_Instruction, frozen=True, kw_only=True):
    command: tuple[str, ...]


class StopSignal(_Instruction, frozen=True, kw_only=True):
    signal: str


class Healthcheck(_Instruction, frozen=True, kw_only=True):
    """`test`: ("NONE",), ("CMD", …) or ("CMD-SHELL", line). Nanoseconds; 0 inherits."""

    test: tuple[str, ...]
    interval: int = 0
    timeout: int = 0
    start_period: int = 0
    start_interval: int = 0
    retries: int = 0


class OnBuild(_Instruction, frozen=True, kw_only=True):
    """`trigger`: the instruction for the next build, with its heredocs below it."""

    trigger: str


class Maintainer(_Instruction, frozen=True, kw_only=True):
    author: str


Instruction = (
    From
    | Run
    | Copy
    | Add
    | Env
    | Arg
    | Label
    | Cmd
    | Entrypoint
    | Expose
    | Volume
    | User
    | Workdir
    | Shell
    | StopSignal
    | Healthcheck
    | OnBuild
    | Maintainer
)


def read(line: Line, escape: str = "\\") -> Instruction:
    """The record of a logical line."""
    reader = _READERS.get(line.keyword)
    if reader is None:
        raise InvalidParameter(f"unknown instruction: {line.keyword}{hint(line.keyword, _READERS)}")
    if "\0" in line.original or (line.keyword == "RUN" and any("\0" in body.content for body in line.heredocs)):
        raise InvalidParameter(words.NUL)
    return reader(_readable(line), escape)


def _readable(line: Line) -> Line:
    """The line as a configuration and the history can hold it. Sources of COPY and ADD, and what
    heredocs contain, keep bytes that are not UTF-8.
    """
    if line.original.isascii():
        return line
    names_files = line.keyword in ("COPY", "ADD")
    return msgspec.structs.replace(
        line,
        original=words.readable(line.original),
        flags=tuple((name, None if value is None else words.readable(value)) for name, value in line.flags),
        text=words.readable(line.text),
        rest=line.rest if names_files else words.readable(line.rest),
    )


def read_text(text: str, escape: str = "\\", *, whole_arrays: bool = False) -> Instruction:
    """The record of an ONBUILD trigger, which stands on one line, with its heredocs below."""
    first, _, below = text.strip(words.SPACE).partition("\n")
    source = words.Source(below.splitlines(keepends=True))
    line = words.with_heredocs(words.line(first, 0), source)
    if source.at < len(source.lines):
        raise InvalidParameter(f"an ONBUILD trigger must be one instruction: {text}"[:300])
    if line.keyword in ("ONBUILD", "FROM", "MAINTAINER"):
        raise InvalidParameter(f"{line.keyword.lower()} isn't allowed as an ONBUILD trigger")
    return read(msgspec.structs.replace(line, whole_arrays=whole_arrays), escape)


def expand(instruction: Instruction, variables: Mapping[str, str], escape: str = "\\") -> Instruction:
    """The instruction with its variables replaced and its quotes removed, where the language does
    that. Others are returned as they are.
    """

    def word(text: str) -> str:
        return words.expanded(text, variables, escape)

    return _replaced(instruction, word, lambda text: words.expanded_content(text, variables), strict=True)


def check(instruction: Instruction, escape: str = "\\") -> None:
    """Raises what `expand` raises whatever the variables are."""

    def word(text: str) -> str:
        words.check(text, escape)
        # A value with variables is checked when they are known.
        return text if "$" in text else words.expanded(text, {}, escape)

    def content(text: str) -> str:
        words.check_content(text)
        return text

    _replaced(instruction, word, content, strict=False)


def _replaced(  # noqa: PLR0912 - a case for each instruction
    instruction: Instruction, word: Expand, content: Expand, *, strict: bool
) -> Instruction:
    """The instruction with each of its words replaced. `strict`: no value has variables left."""
    changes: dict[str, Any]
    match instruction:
        case Env() | Label():
            changes = {"pairs": tuple((word(key), word(value)) for key, value in instruction.pairs)}
            if isinstance(instruction, Env):  # Docker has labels without a name
                _no_blank(changes["pairs"])
        case Arg():
            changes = {
                "pairs": tuple((word(key), None if value is None else word(value)) for key, value in instruction.pairs)
            }
            _no_blank(changes["pairs"])
        case Copy() | Add():
            changes = {
                "sources": tuple(map(word, instruction.sources)),
                "destination": word(instruction.destination),
                "chown": word(instruction.chown),
                "chmod": word(instruction.chmod),
                "checksum": word(instruction.checksum),
                "exclude": tuple(map(word, instruction.exclude)),
                "heredocs": tuple(
                    one._replace(content=content(one.content), expand=False) if one.expand else one
                    for one in instruction.heredocs
                ),
            }
            if isinstance(instruction, Copy) and any(_URL.match(source) for source in changes["sources"]):
                raise InvalidParameter("source can't be a URL for COPY")
            if strict or "$" not in changes["chmod"]:
                check_chmod(changes["chmod"])
        case Run():
            if not instruction.mount_flags:
                return instruction
            changes = {"mounts": tuple(mounts.read(text, word, strict=strict) for text in instruction.mount_flags)}
        case Expose():
            # One variable may hold several ports.
            changes = {"ports": tuple(port for text in instruction.ports for port in word(text).split())}
            for port in changes["ports"]:
                if strict or "$" not in port:
                    ports_of(port)
        case Volume():
            changes = {"paths": tuple(map(word, instruction.paths))}
            if not all(path.strip() for path in changes["paths"]):
                raise InvalidParameter("VOLUME specified can not be an empty string")
        case User():
            changes = {"user": word(instruction.user)}
        case Workdir():
            changes = {"path": word(instruction.path)}
        case StopSignal():
            changes = {"signal": word(instruction.signal)}
            if strict or "$" not in changes["signal"]:
                check_signal(changes["signal"])
        case From():
            changes = {"image": word(instruction.image), "platform": word(instruction.platform)}
        case _:
            return instruction
    return msgspec.structs.replace(instruction, **changes)


_URL = re.compile("https?://.", re.IGNORECASE)


def _no_blank(pairs: Sequence[tuple[str, str | None]]) -> None:
    """Of names with variables: others are checked as they are written."""
    for key, value in pairs:
        if not key:
            raise InvalidParameter(f"invalid environment variable: ={value or ''}: names can not be blank"[:300])


def script(run: Run) -> tuple[tuple[str, ...] | str, bytes | None]:
    """What a RUN executes: its command, and the content of a script file.

    With heredocs, the command (a str, for the shell) contains them. If the only word is a heredoc
    whose content begins with `#!`, the command (for the shell) is that script's path,
    `/dev/pipes/NAME`, where the content must be found with mode 0755.
    """
    if not run.heredocs or not isinstance(run.command, str):
        return run.command, None
    head = words.heredoc_head(run.command)
    first = run.heredocs[0]
    if head is None:
        whole = "".join(f"\n{one.content}{one.name}" for one in run.heredocs)
        return words.readable(run.command + whole), None
    content = first.value()
    if content.startswith("#!"):
        return f"/dev/pipes/{first.name}", content.encode(errors="surrogateescape")
    return words.readable(content), None


# --- flags ----------------------------------------------------------------------------------------

_FLAGS: dict[str, dict[str, str]] = {
    "FROM": {"platform": "text"},
    "RUN": {"mount": "list", "network": "text", "security": "text"},
    "COPY": {
        "from": "text",
        "chown": "text",
        "chmod": "text",
        "link": "bool",
        "parents": "bool",
        "exclude": "list",
    },
    "ADD": {
        "chown": "text",
        "chmod": "text",
        "link": "bool",
        "exclude": "list",
        "checksum": "text",
        "keep-git-dir": "bool",
        "unpack": "bool",
    },
    "HEALTHCHECK": {
        "interval": "text",
        "timeout": "text",
        "start-period": "text",
        "start-interval": "text",
        "retries": "text",
    },
}


def _flags(line: Line) -> dict[str, Any]:
    """The values of the flags that are given: str, bool, or a list of str."""
    known = _FLAGS.get(line.keyword, {})
    found: dict[str, Any] = {}
    for name, value in line.flags:
        kind = known.get(name)
        if kind is None:
            raise InvalidParameter(f"unknown flag: --{name}{hint(name, known)}")
        if name in found and kind != "list":
            raise InvalidParameter(f"duplicate flag specified: --{name}")
        if (value is None and kind != "bool") or (value == "" and kind == "bool"):
            raise InvalidParameter(f"missing a value on flag: --{name}")
        if kind == "list":
            found.setdefault(name, []).append(value)
        elif kind == "bool":
            truth = (value or "true").lower()
            if truth not in ("true", "false"):
                raise InvalidParameter(f"expecting boolean value for flag --{name}, not: {value}")
            found[name] = truth == "true"
        else:
            found[name] = value
    return found


# --- instructions ---------------------------------------------------------------------------------


def _at_least_one(line: Line) -> None:
    if not line.rest:
        raise InvalidParameter(f"{line.keyword} requires at least one argument")


def _exactly_one(line: Line) -> str:
    if not line.rest:
        raise InvalidParameter(f"{line.keyword} requires exactly one argument")
    _flags(line)
    return line.rest


def _from(line: Line, escape: str) -> From:
    found = words.plain_words(line.rest)
    name = ""
    if len(found) == 3 and found[1].lower() == "as":
        name = found[2].lower()
        if not _STAGE_NAME.fullmatch(name):
            raise InvalidParameter(
                f'invalid name for build stage: "{found[2]}", name can\'t start with a number or contain symbols'
            )
    elif len(found) != 1:
        raise InvalidParameter("FROM requires either one or three arguments")
    return From(
        line=line.number, text=line.original, image=found[0], name=name, platform=_flags(line).get("platform", "")
    )


_STAGE_NAME = re.compile(r"[a-z][a-z0-9._-]*")


def _command(line: Line) -> tuple[str, ...] | str:
    found = words.array(line.rest, whole=line.whole_arrays)
    return line.rest if found is None else tuple(found)


def _run(line: Line, escape: str) -> Run:
    flags = _flags(line)
    command = _command(line)
    network, security = flags.get("network", "default"), flags.get("security", "sandbox")
    if network not in ("default", "none", "host"):
        raise InvalidParameter(f'invalid network mode "{network}"')
    if security not in ("sandbox", "insecure"):
        raise InvalidParameter(f'security "{security}" is not valid')
    texts = tuple(flags.get("mount", ()))
    return Run(
        line=line.number,
        text=line.original,
        command=command,
        heredocs=line.heredocs,
        mounts=tuple(mounts.read(text, _as_written, strict=False) for text in texts),
        network=network,
        security=security,
        mount_flags=texts,
    )


def _as_written(text: str) -> str:
    return text


def _transfer(line: Line, escape: str) -> Copy | Add:
    listed = words.array(line.rest, whole=line.whole_arrays)
    paths = words.plain_words(line.rest) if listed is None else listed
    if len(paths) < 2:
        raise InvalidParameter(
            f"{line.keyword} requires at least two arguments, but only one was provided."
            " Destination could not be determined"
            if paths
            else f"{line.keyword} requires at least two arguments"
        )
    flags = _flags(line)
    *sources, destination = paths
    bodies = {body.name: body for body in line.heredocs}

    def body(word: str) -> Heredoc | None:
        head = words.heredoc_head(word) if listed is None else None
        return bodies.get(head.name) if head else None

    if body(destination) is not None:
        raise InvalidParameter(f"{line.keyword} cannot accept a heredoc as a destination")
    origin = flags.get("from", "")
    if re.search(r"\$.", origin):
        raise InvalidParameter(
            "variable expansion is not supported for --from, define a new stage with FROM using ARG from global scope"
            f" as a workaround: {origin}"
        )
    inline = [heredoc for word in sources if (heredoc := body(word)) is not None]
    return (Copy if line.keyword == "COPY" else Add)(
        line=line.number,
        text=line.original,
        sources=tuple(word for word in sources if body(word) is None),
        destination=words.readable(destination),
        heredocs=tuple(Inline(one.name, one.value(), one.expand) for one in inline),
        from_=origin,
        chown=flags.get("chown", ""),
        chmod=flags.get("chmod", ""),
        link=flags.get("link", False),
        parents=flags.get("parents", False),
        exclude=tuple(flags.get("exclude", ())),
        checksum=flags.get("checksum", ""),
        keep_git_dir=flags.get("keep-git-dir"),
        unpack=flags.get("unpack"),
    )


def check_chmod(mode: str) -> None:
    """Raises InvalidParameter unless it is empty, octal, or symbolic as chmod(1) has it."""
    if mode and not _CHMOD.fullmatch(mode):
        raise InvalidParameter(
            f"invalid chmod parameter: '{mode}'. it should be octal string and between 0 and 07777"[:300]
        )


_CLAUSE = r"[ugoa]*(?:[-+=](?:[rwxXst]*|[ugo]))+"
_CHMOD = re.compile(rf"0*[0-7]{{1,4}}|{_CLAUSE}(?:,{_CLAUSE})*")


def _pairs(line: Line, escape: str) -> tuple[tuple[tuple[str, str], ...], bool]:
    """`key=value …`, or the old form `key value`, and whether it is the old one."""
    found = words.words(line.rest, escape)
    given: list[tuple[str, str]] = []
    legacy = bool(line.rest) and (not found or "=" not in found[0])
    if legacy:
        first = re.split(r"[\t\v\f\r ]+", line.rest, maxsplit=1)
        if len(first) < 2:
            raise Unnumbered(f"{line.keyword} must have two arguments")
        given.append((first[0], first[1]))
    else:
        for word in found:
            key, equals, value = word.partition("=")
            if not equals:
                raise Unnumbered(f'Syntax error - can\'t find = in "{word}". Must be of the form: name=value'[:300])
            given.append((key, value))
    _flags(line)
    _at_least_one(line)
    if any(not key for key, _ in given):
        raise InvalidParameter(f"{line.keyword} names can not be blank")
    return tuple(given), legacy


def _env(line: Line, escape: str) -> Env:
    pairs, legacy = _pairs(line, escape)
    return Env(line=line.number, text=line.original, pairs=pairs, legacy=legacy)


def _label(line: Line, escape: str) -> Label:
    pairs, legacy = _pairs(line, escape)
    return Label(line=line.number, text=line.original, pairs=pairs, legacy=legacy)


def _arg(line: Line, escape: str) -> Arg:
    found = words.words(line.rest, escape)
    if not found:
        raise InvalidParameter("ARG requires at least one argument")
    _flags(line)
    pairs = tuple((key, value if equals else None) for key, equals, value in (word.partition("=") for word in found))
    if any(not key for key, _ in pairs):
        raise InvalidParameter("ARG names can not be blank")
    return Arg(line=line.number, text=line.original, pairs=pairs)


def _cmd(line: Line, escape: str) -> Cmd:
    _flags(line)
    return Cmd(line=line.number, text=line.original, command=_command(line))


def _entrypoint(line: Line, escape: str) -> Entrypoint:
    _flags(line)
    return Entrypoint(line=line.number, text=line.original, command=_command(line))


def _expose(line: Line, escape: str) -> Expose:
    _at_least_one(line)
    _flags(line)
    return Expose(line=line.number, text=line.original, ports=tuple(sorted(words.plain_words(line.rest))))


def _volume(line: Line, escape: str) -> Volume:
    _at_least_one(line)
    _flags(line)
    found = words.array(line.rest, whole=line.whole_arrays)
    paths = tuple(words.plain_words(line.rest) if found is None else found)
    if not paths:
        raise InvalidParameter("VOLUME requires at least one argument")
    if "" in paths:
        raise InvalidParameter("VOLUME specified can not be an empty string")
    return Volume(line=line.number, text=line.original, paths=paths)


def _user(line: Line, escape: str) -> User:
    return User(line=line.number, text=line.original, user=_exactly_one(line))


def _workdir(line: Line, escape: str) -> Workdir:
    return Workdir(line=line.number, text=line.original, path=_exactly_one(line))


def _stop_signal(line: Line, escape: str) -> StopSignal:
    return StopSignal(line=line.number, text=line.original, signal=_exactly_one(line))


def _maintainer(line: Line, escape: str) -> Maintainer:
    return Maintainer(line=line.number, text=line.original, author=_exactly_one(line))


def _shell(line: Line, escape: str) -> Shell:
    _at_least_one(line)
    _flags(line)
    found = words.array(line.rest, whole=line.whole_arrays)
    if found is None:
        raise InvalidParameter("SHELL requires the arguments to be in JSON form")
    if not found:
        raise InvalidParameter("SHELL requires at least one argument")
    return Shell(line=line.number, text=line.original, command=tuple(found))


def _on_build(line: Line, escape: str) -> OnBuild:
    _at_least_one(line)
    _flags(line)
    inner = words.line(line.rest, line.number)
    if inner.keyword == "ONBUILD":
        raise InvalidParameter("Chaining ONBUILD via `ONBUILD ONBUILD` isn't allowed")
    if inner.keyword in ("MAINTAINER", "FROM"):
        raise InvalidParameter(f"{inner.keyword} isn't allowed as an ONBUILD trigger")
    if inner.keyword in _READERS:  # others fail where the trigger runs, as in Docker
        read(msgspec.structs.replace(inner, heredocs=line.heredocs), escape)
    trigger = line.rest + "".join(f"\n{words.readable(one.content)}{one.name}" for one in line.heredocs)
    return OnBuild(line=line.number, text=line.original, trigger=trigger)


def _healthcheck(line: Line, escape: str) -> Healthcheck:
    kind, rest = [*re.split(f"[{words.SPACE}]+", line.rest, maxsplit=1), ""][:2]
    kind = kind.upper()
    if not kind:
        raise InvalidParameter("HEALTHCHECK requires at least one argument")
    flags = _flags(line)
    if kind == "NONE":
        if rest:
            raise InvalidParameter("HEALTHCHECK NONE takes no arguments")
        return Healthcheck(line=line.number, text=line.original, test=("NONE",))
    if kind != "CMD":
        raise InvalidParameter(f'Unknown type "{kind}" in HEALTHCHECK (try CMD)')
    found = words.array(rest, whole=line.whole_arrays)
    if not rest or found == []:
        raise InvalidParameter("Missing command after HEALTHCHECK CMD")
    return Healthcheck(
        line=line.number,
        text=line.original,
        test=("CMD-SHELL", rest) if found is None else ("CMD", *found),
        interval=_duration("interval", flags),
        timeout=_duration("timeout", flags),
        start_period=_duration("start-period", flags),
        start_interval=_duration("start-interval", flags),
        retries=_retries(flags.get("retries", "")),
    )


def _retries(value: str) -> int:
    if not value:
        return 0
    if not re.fullmatch(r"[-+]?[0-9]{1,10}", value) or not -(1 << 31) <= int(value) < 1 << 31:
        raise InvalidParameter(f'strconv.ParseInt: parsing "{value}": invalid syntax'[:300])
    if int(value) < 0:
        raise InvalidParameter(f"--retries cannot be negative ({int(value)})")
    return int(value)


_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_DURATION = re.compile(r"([0-9]*)(?:\.([0-9]*))?([^0-9.]*)")
_LONGEST_DURATION = 100
"""Characters."""


def _duration(name: str, flags: Mapping[str, Any]) -> int:
    """A duration in Go's format, in nanoseconds; 0 inherits."""
    value = flags.get(name, "")
    if value in ("", "0", "+0", "-0"):
        return 0
    total = 0
    invalid = InvalidParameter(f'time: invalid duration "{value}"'[:300])
    rest = value[1:] if value[0] in "+-" else value
    if not rest or len(rest) > _LONGEST_DURATION:
        raise invalid
    while rest:
        part = _DURATION.match(rest)
        assert part is not None, rest
        whole, fraction, unit = part[1], part[2] or "", part[3]
        if not whole and not fraction:
            raise invalid
        if not unit:
            raise InvalidParameter(f'time: missing unit in duration "{value}"')
        if unit not in _UNITS:
            raise InvalidParameter(f'time: unknown unit "{unit}" in duration "{value}"')
        total += int(whole or 0) * _UNITS[unit] + int(fraction or 0) * _UNITS[unit] // 10 ** len(fraction)
        rest = rest[part.end() :]
    if total >= 1 << 62:
        raise invalid
    if total and (value[0] == "-" or total < 10**6):
        raise InvalidParameter(f'Interval "{name}" cannot be less than 1ms')
    return total


_READERS: dict[str, Callable[[Line, str], Instruction]] = {
    "ADD": _transfer,
    "ARG": _arg,
    "CMD": _cmd,
    "COPY": _transfer,
    "ENTRYPOINT": _entrypoint,
    "ENV": _env,
    "EXPOSE": _expose,
    "FROM": _from,
    "HEALTHCHECK": _healthcheck,
    "LABEL": _label,
    "MAINTAINER": _maintainer,
    "ONBUILD": _on_build,
    "RUN": _run,
    "SHELL": _shell,
    "STOPSIGNAL": _stop_signal,
    "USER": _user,
    "VOLUME": _volume,
    "WORKDIR": _workdir,
}


# --- values ---------------------------------------------------------------------------------------


def ports_of(text: str) -> list[str]:
    """`80`, `80-81/udp` as `80/tcp`, `80/udp` and `81/udp`. An address and a host port before it
    (`127.0.0.1:8080:80`) are checked and left out, as Docker does.
    """
    before, _, last = text.rpartition(":")
    address, _, host_ports = before.rpartition(":")
    ports, _, protocol = last.partition("/")
    if not ports:
        raise InvalidParameter(f'invalid port: "{text}": no port specified'[:300])
    if protocol.lower() not in ("", "tcp", "udp", "sctp"):
        raise InvalidParameter(f'invalid port: "{text}": invalid proto: {protocol}'[:300])
    _check_address(address)
    found = _port_range(ports)
    if found is None:
        raise InvalidParameter(f"invalid containerPort: {ports}"[:300])
    if host_ports:
        host = _port_range(host_ports)
        if host is None:
            raise InvalidParameter(f"invalid hostPort: {host_ports}"[:300])
        if len(found) not in (1, len(host)):
            raise InvalidParameter(
                f"invalid ranges specified for container and host Ports: {ports} and {host_ports}"[:300]
            )
    return [f"{port}/{protocol.lower() or 'tcp'}" for port in found]


def _check_address(address: str) -> None:
    """Raises InvalidParameter unless it is empty or an address, of IPv6 in brackets."""
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    try:
        ipaddress.ip_address(bare or "::")
    except ValueError as error:
        raise InvalidParameter(f"invalid IP address: {bare}"[:300]) from error


def _port_range(text: str) -> range | None:
    """The ports of `80` or `80-81`; None if these are none."""
    match = _PORTS.fullmatch(text)
    if match is None or not int(match[1]) <= int(match[2] or match[1]) <= 65535:
        return None
    return range(int(match[1]), int(match[2] or match[1]) + 1)


_PORTS = re.compile(r"\+?([0-9]{1,10})(?:-\+?([0-9]{1,10}))?")


def check_signal(text: str) -> None:
    """Raises InvalidParameter unless it is a signal's number or name (signal(7))."""
    known = (
        0 < int(text[:4]) <= signal.SIGRTMAX
        if text.isascii() and text.isdigit()
        else text.upper().removeprefix("SIG") in _signal_names()
    )
    if not known:
        raise InvalidParameter(f"invalid signal: {text}"[:300])


@functools.cache
def _signal_names() -> frozenset[str]:
    last = signal.SIGRTMAX - signal.SIGRTMIN
    names = [one.name.removeprefix("SIG") for one in signal.Signals]
    real_time = [f"RTMIN+{at}" for at in range(last + 1)] + [f"RTMAX-{at}" for at in range(last + 1)]
    return frozenset((*names, *real_time, "CLD", "POLL", "IOT"))


__all__ = [
    "Add",
    "Arg",
    "Cmd",
    "Copy",
    "Entrypoint",
    "Env",
    "Expose",
    "From",
    "Healthcheck",
    "Inline",
    "Instruction",
    "Label",
    "Maintainer",
    "OnBuild",
    "Run",
    "RunMount",
    "Shell",
    "StopSignal",
    "User",
    "Volume",
    "Workdir",
    "check",
    "check_chmod",
    "check_signal",
    "expand",
    "ports_of",
    "read",
    "read_text",
    "script",
]
