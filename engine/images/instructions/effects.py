"""The effect of an instruction on an image's configuration, and its words in the history.

Pure. Instructions come expanded. Not here: files, RUN, COPY and ADD (engine/builder).
Raises: InvalidParameter in the words of Docker.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from engine.images.instructions.records import (
    Arg,
    Cmd,
    Entrypoint,
    Env,
    Expose,
    Healthcheck,
    Instruction,
    Label,
    Maintainer,
    OnBuild,
    Shell,
    StopSignal,
    User,
    Volume,
    Workdir,
    check_signal,
    ports_of,
)
from engine.wire import containers as wire
from engine.wire.containers import Config

DEFAULT_SHELL = ("/bin/sh", "-c")


def shell(config: Config) -> Sequence[str]:
    """What runs the shell form of a command."""
    return config.shell if isinstance(config.shell, list) and config.shell else DEFAULT_SHELL


def command_line(config: Config, command: tuple[str, ...] | str) -> list[str]:
    """The arguments of a command; a str is run by the shell."""
    if isinstance(command, tuple):
        return list(command)
    return [*shell(config), command] if command else list(shell(config))


def configured(  # noqa: PLR0911 - a case for each instruction
    config: Config, instruction: Instruction, *, cmd_set: bool
) -> Config:
    """`config` after the instruction; unchanged for those that do not change it.

    `cmd_set`: this stage has had a CMD. Otherwise ENTRYPOINT removes the inherited one.
    """
    match instruction:
        case Env():
            return replace(config, env=_environment(config.env or (), instruction.pairs))
        case Label():
            return replace(config, labels={**config.labels, **dict(instruction.pairs)})
        case Expose():
            ports = dict(config.exposed_ports) if isinstance(config.exposed_ports, dict) else {}
            for text in instruction.ports:
                ports.update({key: {} for key in ports_of(text)})
            return replace(config, exposed_ports=ports)
        case Volume():
            return replace(config, volumes={**(config.volumes or {}), **{path: {} for path in instruction.paths}})
        case User():
            return replace(config, user=instruction.user)
        case Workdir():
            return replace(config, working_dir=_directory(config.working_dir, instruction.path))
        case Cmd():
            return replace(config, cmd=command_line(config, instruction.command) or None)
        case Entrypoint():
            entrypoint = command_line(config, instruction.command) if instruction.command else None
            return replace(config, entrypoint=entrypoint, cmd=config.cmd if cmd_set else None)
        case Shell():
            return replace(config, shell=list(instruction.command))
        case StopSignal():
            check_signal(instruction.signal)
            return replace(config, stop_signal=instruction.signal)
        case Healthcheck():
            return replace(config, healthcheck=_healthcheck(instruction))
        case OnBuild():
            return replace(config, on_build=[*(config.on_build or ()), instruction.trigger])
        case _:
            return config


def _directory(current: str, path: str) -> str:
    """An absolute path stays as it is, as in Docker; a relative one is joined and cleaned."""
    if path.startswith("/"):
        return path
    return posixpath.normpath(posixpath.join("/", current, path)).replace("//", "/")


def _environment(env: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Existing variables keep their place."""
    values = {line.partition("=")[0]: line for line in env}
    values.update({key: f"{key}={value}" for key, value in pairs})
    return list(values.values())


def _healthcheck(check: Healthcheck) -> wire.Healthcheck:
    return wire.Healthcheck(
        test=list(check.test),
        interval=check.interval,
        timeout=check.timeout,
        start_period=check.start_period,
        start_interval=check.start_interval,
        retries=check.retries,
    )


def recorded(  # noqa: PLR0911 - a case for each instruction
    instruction: Instruction, config: Config, *, whole_checks: bool = False
) -> str:
    """The text after `#(nop) ` in the history, as Docker 20.10 writes it; empty for instructions
    that are not metadata. `config`: after the instruction. `whole_checks`: HEALTHCHECK has its
    start interval, too, which Docker 20.10 did not know.
    """
    match instruction:
        case Env():
            return " ".join(("ENV", *(f"{key}={value}" for key, value in instruction.pairs)))
        case Label():
            return " ".join(("LABEL", *(f"{key}={value}" for key, value in instruction.pairs)))
        case Arg():
            texts = (key if value is None else f"{key}={value}" for key, value in instruction.pairs)
            return " ".join(("ARG", *texts))
        case Expose():
            return f"EXPOSE {' '.join(instruction.ports)}"
        case Volume():
            return f"VOLUME [{' '.join(instruction.paths)}]"
        case User():
            return f"USER {instruction.user}"
        case Workdir():
            return f"WORKDIR {config.working_dir}"
        case Cmd():
            return f"CMD {quoted_list(command_line(config, instruction.command))}"
        case Entrypoint():
            return f"ENTRYPOINT {quoted_list(config.entrypoint or ())}"
        case Shell():
            return f"SHELL [{' '.join(instruction.command)}]"
        case StopSignal():
            return f"STOPSIGNAL {instruction.signal}"
        case Healthcheck():
            return f"HEALTHCHECK {_recorded_check(instruction, whole=whole_checks)}"
        case OnBuild():
            return f"ONBUILD {instruction.trigger}"
        case Maintainer():
            return f"MAINTAINER {instruction.author}"
        case _:
            return ""


def _recorded_check(check: Healthcheck, *, whole: bool) -> str:
    """The structure as Go's `%q` prints it, with the retries as a character."""
    fields = (check.interval, check.timeout, check.start_period, *((check.start_interval,) if whole else ()))
    times = (_go_duration(time) for time in fields)
    retries = quoted(chr(check.retries) if check.retries <= 0x10FFFF else "\ufffd", "'")
    return f"&{{{quoted_list(check.test)} {' '.join(quoted(time) for time in times)} {retries}}}"


def _go_duration(nanoseconds: int) -> str:
    """As Go's `Duration.String`: `1h0m0s`, `1.5s`, `2ms`."""
    if not nanoseconds:
        return "0s"
    for unit, name in ((1, "ns"), (10**3, "µs"), (10**6, "ms")):
        if nanoseconds < unit * 1000:
            return f"{_decimal(nanoseconds, unit)}{name}"
    minutes, rest = divmod(nanoseconds, 60 * 10**9)
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(rest, 10**9)}s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text


def _decimal(number: int, unit: int) -> str:
    whole, rest = divmod(number, unit)
    return f"{whole}.{str(rest).zfill(len(str(unit)) - 1).rstrip('0')}" if rest else str(whole)


def quoted_list(texts: Iterable[str]) -> str:
    """A list as Go's `%q` prints it: `["a" "b"]`."""
    return f"[{' '.join(map(quoted, texts))}]"


_ESCAPES = {
    "\a": "\\a",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\v": "\\v",
    "\\": "\\\\",
}


def quoted(text: str, quote: str = '"') -> str:
    """A string in Go's syntax (strconv.Quote)."""
    return quote + "".join(_quoted_character(char, quote) for char in text) + quote


def _quoted_character(char: str, quote: str) -> str:
    if char == quote:
        return "\\" + char
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
