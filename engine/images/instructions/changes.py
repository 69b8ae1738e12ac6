"""The `changes` of an import or a commit: Dockerfile instructions that only change an image's
configuration.

CMD, ENTRYPOINT, ENV, EXPOSE, HEALTHCHECK, LABEL, ONBUILD, SHELL, STOPSIGNAL, USER, VOLUME, WORKDIR,
as the Dockerfile reference describes them. In ENV, EXPOSE, LABEL, STOPSIGNAL, USER, VOLUME and
WORKDIR, variables of earlier lines are replaced ("Environment replacement"). Pure. Not here:
building.
Raises: InvalidParameter that names the instruction.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from engine.errors import InvalidParameter
from engine.wire.containers import Config, Empty, Healthcheck

_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_PORT = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#!?$-]")
_MAX_LINES = 1000
_MAX_VALUE = 128 * 1024
"""Characters: programs cannot be given longer values (execve(2), MAX_ARG_STRLEN)."""


Variables = Mapping[str, str]


def apply(config: Config, changes: Sequence[str], environment: Sequence[str] = ()) -> Config:
    """`config` with every instruction applied, in order.

    `environment`: further variables; those of `config` override them.
    """
    lines = [line.strip() for text in changes for line in text.replace("\\\n", "").splitlines()]
    if len(lines) > _MAX_LINES:
        raise InvalidParameter(f"changes: more than {_MAX_LINES} instructions")
    for line in lines:
        if not line or line.startswith("#"):
            continue
        name, rest = [*line.split(maxsplit=1), ""][:2]
        instruction = _INSTRUCTIONS.get(name.upper())
        if instruction is None:
            raise InvalidParameter(f"{name} is not a valid change command")
        if not rest:
            raise InvalidParameter(f"{name.upper()} requires at least one argument")
        variables = {
            key: value for key, _, value in (one.partition("=") for one in (*environment, *(config.env or ())))
        }
        config = msgspec.structs.replace(config, **instruction(config, rest, variables))
    return config


# --- words (Dockerfile reference, "Environment replacement" and "Escape") -------------------------


def _words(text: str) -> list[str]:
    """The words as they are written, with their quotes and backslashes."""
    found: list[str] = []
    begin = -1
    quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        if begin < 0 and not char.isspace():
            begin = at
        if char == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char.isspace() and begin >= 0:
            found.append(text[begin:at])
            begin = -1
        at += 1
    return [*found, text[begin:]] if begin >= 0 else found


def _expanded(text: str, variables: Variables) -> str:
    """The value of a word: quotes and backslashes removed, variables replaced by their values."""
    try:
        value, _ = _until("", text, 0, variables)
    except RecursionError:
        raise InvalidParameter("changes: variables are nested too deeply") from None
    return value


def _until(end: str, text: str, at: int, variables: Variables) -> tuple[str, int]:
    """The value of `text` from `at` to the next unquoted `end`, and the position after that. With
    an empty `end`: to the end of `text`.
    """
    out: list[str] = []
    quote = ""
    begun = at
    while at < len(text):
        char = text[at]
        at += 1
        if quote == "'":
            if char == quote:
                quote = ""
            else:
                out.append(char)
        elif char == quote:
            quote = ""
        elif char == "\\":
            following = text[at : at + 1]
            # Within double quotes a backslash is literal unless one of these follows.
            out.append(char + following if quote and following not in ('"', "$", "\\") else following)
            at += 1
        elif char == "$":
            value, at = _variable(text, at, variables)
            out.append(value)
        elif not quote and char in "'\"":
            quote, begun = char, at
        elif not quote and char == end:
            return _bounded("".join(out)), at
        else:
            out.append(char)
    if quote:
        kind = "single-quote" if quote == "'" else "double-quote"
        raise InvalidParameter(
            f"unexpected end of statement while looking for matching {kind}: {text[begun - 1 :]}"[:300]
        )
    if end:
        raise InvalidParameter(f"syntax error: missing '{end}': {text}"[:300])
    return _bounded("".join(out)), at


def _bounded(value: str) -> str:
    if len(value) > _MAX_VALUE:  # `ENV A=$A$A`, a few dozen times, would exhaust memory
        raise InvalidParameter(f"changes: a value is longer than {_MAX_VALUE} characters")
    return value


def _variable(text: str, at: int, variables: Variables) -> tuple[str, int]:
    """The value of the expression after a `$`, and the position after it."""
    if text[at : at + 1] != "{":
        name = _NAME.match(text, at)
        return ("$", at) if name is None else (variables.get(name[0], ""), name.end())
    name = _NAME.match(text, at + 1)
    if name is None:
        raise InvalidParameter(f"syntax error: bad substitution: ${text[at:]}"[:300])
    value, at = variables.get(name[0], ""), name.end()
    operator = text[at : at + 2]
    if operator[:1] == "}":
        return value, at + 1
    if operator not in (":-", ":+", ":?"):
        raise InvalidParameter(f"unsupported modifier ({operator}) in substitution: {text}"[:300])
    word, at = _until("}", text, at + 2, variables)
    if operator == ":?" and not value:
        raise InvalidParameter(f"{name[0]}: {word or 'not allowed to be unset'}"[:300])
    return (value or word if operator == ":-" else word if operator == ":+" and value else value), at


# --- the instructions -----------------------------------------------------------------------------


def _array(text: str) -> list[str] | None:
    """A JSON array of strings. None for anything else, which is a command line for the shell."""
    if not text.startswith("["):
        return None
    try:
        return msgspec.json.decode(text, type=list[str])
    except (msgspec.MsgspecError, RecursionError):
        return None


def _command(config: Config, text: str) -> list[str]:
    words = _array(text)
    if words is not None:
        return words
    shell = config.shell if isinstance(config.shell, list) and config.shell else ["/bin/sh", "-c"]
    return [*shell, text]


def _cmd(config: Config, text: str, _: Variables) -> dict[str, Any]:
    return {"cmd": _command(config, text)}


def _entrypoint(config: Config, text: str, _: Variables) -> dict[str, Any]:
    return {"entrypoint": _command(config, text)}


def _pairs(name: str, text: str, variables: Variables) -> dict[str, str]:
    """`key=value …`, or the old form `key value`."""
    words = _words(text)
    if "=" not in words[0]:
        first = text.split(None, 1)
        if len(first) < 2:
            raise InvalidParameter(f"{name} must have two arguments")
        given = [(first[0], first[1])]
    else:
        given = []
        for word in words:
            key, equals, value = word.partition("=")
            if not equals:
                raise InvalidParameter(
                    f"Syntax error - can't find = in {word!r}. Must be of the form: name=value"[:300]
                )
            given.append((key, value))
    pairs = {_expanded(key, variables): _expanded(value, variables) for key, value in given}
    if "" in pairs:
        raise InvalidParameter(f"{name} names can not be blank")
    return pairs


def _env(config: Config, text: str, variables: Variables) -> dict[str, Any]:
    pairs = _pairs("ENV", text, variables)
    found = [line for line in config.env or () if line.partition("=")[0] not in pairs]
    order = [line.partition("=")[0] for line in config.env or ()]
    if not set(order) & set(pairs):
        return {"env": [*found, *(f"{key}={value}" for key, value in pairs.items())]}
    # Existing entries keep their place.
    changed = [
        f"{key}={pairs.pop(key)}" if key in pairs else line for key, line in zip(order, config.env or (), strict=True)
    ]
    return {"env": [*changed, *(f"{key}={value}" for key, value in pairs.items())]}


def _label(config: Config, text: str, variables: Variables) -> dict[str, Any]:
    return {"labels": {**config.labels, **_pairs("LABEL", text, variables)}}


def _expose(config: Config, text: str, variables: Variables) -> dict[str, Any]:
    ports: dict[str, Empty] = dict(config.exposed_ports) if isinstance(config.exposed_ports, dict) else {}
    # One variable may hold several ports.
    for word in (port for one in _words(text) for port in _expanded(one, variables).split()):
        match = _PORT.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if match is None or not 0 < first <= last <= 65535:
            raise InvalidParameter(f"invalid containerPort: {word}")
        for port in range(first, last + 1):
            ports[f"{port}/{(match[3] or 'tcp').lower()}"] = {}
    return {"exposed_ports": ports}


def _user(_: Config, text: str, variables: Variables) -> dict[str, Any]:
    return {"user": _expanded(text, variables)}


def _workdir(config: Config, text: str, variables: Variables) -> dict[str, Any]:
    path = _expanded(text, variables)
    return {"working_dir": posixpath.normpath(posixpath.join("/", config.working_dir, path)).replace("//", "/")}


def _volume(config: Config, text: str, variables: Variables) -> dict[str, Any]:
    words = _array(text)
    paths = [_expanded(word, variables) for word in (_words(text) if words is None else words)]
    if not all(path.strip() for path in paths):
        raise InvalidParameter("VOLUME specified can not be an empty string")
    return {"volumes": {**(config.volumes or {}), **{path: {} for path in paths}}}


def _onbuild(config: Config, text: str, _: Variables) -> dict[str, Any]:
    trigger = text.split(maxsplit=1)[0].upper()
    if trigger in ("ONBUILD", "MAINTAINER", "FROM"):
        raise InvalidParameter(f"{trigger} isn't allowed as an ONBUILD trigger")
    return {"on_build": [*(config.on_build or ()), text]}


def _stopsignal(_: Config, text: str, variables: Variables) -> dict[str, Any]:
    text = _expanded(text, variables)
    if not re.fullmatch(r"\d+|[A-Z0-9+-]+", text.upper()):
        raise InvalidParameter(f"Invalid signal: {text}")
    return {"stop_signal": text}


def _shell(_: Config, text: str, _variables: Variables) -> dict[str, Any]:
    words = _array(text)
    if not words:
        raise InvalidParameter("SHELL requires the arguments to be in JSON form")
    return {"shell": words}


def _healthcheck(config: Config, text: str, _variables: Variables) -> dict[str, Any]:
    options: dict[str, int] = {}
    fields = {"interval": "interval", "timeout": "timeout", "start-period": "start_period", "retries": "retries"}
    while text.startswith("--"):
        option, _, text = text.partition(" ")
        text = text.strip()
        name, _, value = option[2:].partition("=")
        if name not in fields:
            raise InvalidParameter(f"Unknown flag: {name}")
        options[fields[name]] = _count(value) if name == "retries" else _duration(name, value)
    kind, _, rest = text.partition(" ")
    if kind.upper() == "NONE":
        return {"healthcheck": Healthcheck(test=["NONE"])}
    if kind.upper() != "CMD" or not rest.strip():
        raise InvalidParameter(f"Unknown type {kind!r} in HEALTHCHECK (try CMD)")
    words = _array(rest.strip())
    test = ["CMD", *words] if words is not None else ["CMD-SHELL", rest.strip()]
    return {"healthcheck": Healthcheck(test=test, **options)}


def _count(value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise InvalidParameter(f"--retries must be a number, not {value!r}")
    return int(value)


def _duration(name: str, value: str) -> int:
    """A duration in Go's format, in nanoseconds."""
    if not re.fullmatch(rf"(?:{_DURATION.pattern})+", value):
        raise InvalidParameter(f"invalid duration of --{name}: {value!r}")
    total = sum(int(float(number) * _UNITS[unit]) for number, unit in _DURATION.findall(value))
    if not 10**6 <= total < 1 << 62:
        raise InvalidParameter(f"Interval {value!r} cannot be less than 1ms")
    return total


_INSTRUCTIONS: dict[str, Callable[[Config, str, Variables], dict[str, Any]]] = {
    "CMD": _cmd,
    "ENTRYPOINT": _entrypoint,
    "ENV": _env,
    "EXPOSE": _expose,
    "HEALTHCHECK": _healthcheck,
    "LABEL": _label,
    "ONBUILD": _onbuild,
    "SHELL": _shell,
    "STOPSIGNAL": _stopsignal,
    "USER": _user,
    "VOLUME": _volume,
    "WORKDIR": _workdir,
}

__all__ = ["apply"]
