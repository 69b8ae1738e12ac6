"""The `changes` of an import or a commit: Dockerfile instructions that only change an image's configuration.

CMD, ENTRYPOINT, ENV, EXPOSE, HEALTHCHECK, LABEL, ONBUILD, SHELL, STOPSIGNAL, USER, VOLUME, WORKDIR, as the Dockerfile reference has them, without the
expansion of variables. Pure. Not here: building.
Raises: InvalidParameter that names the instruction.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.errors import InvalidParameter
from engine.wire.containers import Config, Empty, Healthcheck

_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_PORT = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?", re.IGNORECASE)
_MAX_LINES = 1000


def apply(config: Config, changes: Sequence[str]) -> Config:
    """`config` after every instruction, in order."""
    lines = [line.strip() for text in changes for line in text.replace("\\\n", "").splitlines()]
    if len(lines) > _MAX_LINES:
        raise InvalidParameter(f"changes: more than {_MAX_LINES} instructions")
    for line in lines:
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition(" ")
        instruction = _INSTRUCTIONS.get(name.upper())
        if instruction is None:
            raise InvalidParameter(f"{name} is not a valid change command")
        rest = rest.strip()
        if not rest:
            raise InvalidParameter(f"{name.upper()} requires at least one argument")
        config = msgspec.structs.replace(config, **instruction(config, rest))
    return config


def _array(text: str) -> list[str] | None:
    """A JSON array of strings; None for what is none, which then is a shell's line."""
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


def _cmd(config: Config, text: str) -> dict[str, Any]:
    return {"cmd": _command(config, text)}


def _entrypoint(config: Config, text: str) -> dict[str, Any]:
    return {"entrypoint": _command(config, text)}


def _words(text: str) -> list[str]:
    """Words in quotes or without, backslashes taken off."""
    found: list[str] = []
    word: list[str] = []
    quote = ""
    within = False
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'" and at + 1 < len(text):
            at += 1
            word.append(text[at])
            within = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word.append(char)
        elif char in "'\"":
            quote, within = char, True
        elif char.isspace():
            if within:
                found.append("".join(word))
            word, within = [], False
        else:
            word.append(char)
            within = True
        at += 1
    if quote:
        raise InvalidParameter(f"unexpected end of statement while looking for matching quote: {text}"[:300])
    return [*found, "".join(word)] if within else found


def _pairs(name: str, text: str) -> dict[str, str]:
    """`key=value …`, or the old form `key value`."""
    first = text.split(None, 1)
    if "=" not in first[0]:
        if len(first) < 2:
            raise InvalidParameter(f"{name} must have two arguments")
        return {first[0]: first[1]}
    pairs = {}
    for word in _words(text):
        key, equals, value = word.partition("=")
        if not equals:
            raise InvalidParameter(f"Syntax error - can't find = in {word!r}. Must be of the form: name=value")
        if not key:
            raise InvalidParameter(f"{name} names can not be blank")
        pairs[key] = value
    return pairs


def _env(config: Config, text: str) -> dict[str, Any]:
    pairs = _pairs("ENV", text)
    found = [line for line in config.env or () if line.partition("=")[0] not in pairs]
    order = [line.partition("=")[0] for line in config.env or ()]
    if not set(order) & set(pairs):
        return {"env": [*found, *(f"{key}={value}" for key, value in pairs.items())]}
    # What was there keeps its place.
    changed = [
        f"{key}={pairs.pop(key)}" if key in pairs else line for key, line in zip(order, config.env or (), strict=True)
    ]
    return {"env": [*changed, *(f"{key}={value}" for key, value in pairs.items())]}


def _label(config: Config, text: str) -> dict[str, Any]:
    return {"labels": {**config.labels, **_pairs("LABEL", text)}}


def _expose(config: Config, text: str) -> dict[str, Any]:
    ports: dict[str, Empty] = dict(config.exposed_ports) if isinstance(config.exposed_ports, dict) else {}
    for word in text.split():
        match = _PORT.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if match is None or not 0 < first <= last <= 65535:
            raise InvalidParameter(f"invalid containerPort: {word}")
        for port in range(first, last + 1):
            ports[f"{port}/{(match[3] or 'tcp').lower()}"] = {}
    return {"exposed_ports": ports}


def _user(_: Config, text: str) -> dict[str, Any]:
    return {"user": text}


def _workdir(config: Config, text: str) -> dict[str, Any]:
    return {"working_dir": posixpath.normpath(posixpath.join("/", config.working_dir, text))}


def _volume(config: Config, text: str) -> dict[str, Any]:
    paths = _array(text)
    if paths is None:
        paths = text.split()
    if not all(path.strip() for path in paths):
        raise InvalidParameter("VOLUME specified can not be an empty string")
    return {"volumes": {**(config.volumes or {}), **{path: {} for path in paths}}}


def _onbuild(config: Config, text: str) -> dict[str, Any]:
    trigger = text.split(maxsplit=1)[0].upper()
    if trigger in ("ONBUILD", "MAINTAINER", "FROM"):
        raise InvalidParameter(f"{trigger} isn't allowed as an ONBUILD trigger")
    return {"on_build": [*(config.on_build or ()), text]}


def _stopsignal(_: Config, text: str) -> dict[str, Any]:
    if not re.fullmatch(r"\d+|[A-Z0-9+-]+", text.upper()):
        raise InvalidParameter(f"Invalid signal: {text}")
    return {"stop_signal": text}


def _shell(_: Config, text: str) -> dict[str, Any]:
    words = _array(text)
    if not words:
        raise InvalidParameter("SHELL requires the arguments to be in JSON form")
    return {"shell": words}


def _healthcheck(config: Config, text: str) -> dict[str, Any]:
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
    """Go's, in nanoseconds."""
    if not re.fullmatch(rf"(?:{_DURATION.pattern})+", value):
        raise InvalidParameter(f"invalid duration of --{name}: {value!r}")
    total = sum(int(float(number) * _UNITS[unit]) for number, unit in _DURATION.findall(value))
    if not 10**6 <= total < 1 << 62:
        raise InvalidParameter(f"Interval {value!r} cannot be less than 1ms")
    return total


_INSTRUCTIONS: dict[str, Callable[[Config, str], dict[str, Any]]] = {
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
