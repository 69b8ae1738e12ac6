"""The configuration of one start: the command line, which overrides the file, which overrides the
defaults.

A file is TOML with the options' own names, or dockerd's JSON (`docker`): one whose name ends in
.json, or that begins with `{`.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from engine.config import docker, rules
from engine.config.declaration import Config, options
from engine.errors import decoding_reason, reason

LARGEST = 1 << 20
"""Bytes of a file."""
_NULL = os.makedev(1, 3)
"""/dev/null, which is an empty file."""

DEFAULT_FILE = "/etc/engined/engined.toml"
"""Read where the command line names none, if it is there."""


class FileError(ValueError):
    """The configuration file is invalid, or cannot be read. Its text, one line, is for the
    operator.
    """

    def __init__(self, text: str) -> None:
        super().__init__(_line(text))


class Settings(NamedTuple):
    """What a file says."""

    fields: dict[str, Any]
    names: dict[str, str]
    """The file's name of each option, by field."""
    meaningless: dict[str, str]
    """Keys that change nothing, and why."""
    dockers: bool = False
    """It is dockerd's JSON."""


class Source(NamedTuple):
    """What a configuration is made from, again at a reload."""

    chosen: dict[str, Any]
    """Fields that the command line sets."""
    file: str
    """Empty for none."""

    def load(self) -> Loaded:
        """Raises ValueError that names the invalid option; FileError if that is the file's, or the
        file cannot be read.
        """
        found = read(self.file) if self.file else Settings({}, {}, {})
        flags = {option.field: option.flag for option in options()}

        def fail(field: str, text: str) -> NoReturn:
            if field in found.names and field not in self.chosen:
                raise FileError(f"--config {self.file}: {found.names[field]}{_joined(text)}")
            raise ValueError(_line(f"{flags[field]}{_joined(text)}"))

        others = {option.field: option.docker for option in options() if option.docker} if found.dockers else {}
        names = flags | others | found.names | {field: flags[field] for field in self.chosen}
        return Loaded(_config(found.fields | self.chosen, fail), names, found.meaningless)


class Loaded(NamedTuple):
    """A configuration that is valid."""

    config: Config
    names: dict[str, str]
    """What each option is called where it was set: flag, or key of the file."""
    meaningless: dict[str, str]
    """Keys of the file that change nothing, and why."""


class Verdict(NamedTuple):
    """What becomes of a key of a file."""

    key: str
    kind: str
    """in force, has no meaning here, or refused"""
    why: str


IN_FORCE, NO_MEANING, REFUSED = "in force", "has no meaning here", "refused"


def default_file() -> str:
    """The file of an engine whose command line names none; empty if there is none."""
    return DEFAULT_FILE if Path(DEFAULT_FILE).exists() else ""


def parse(chosen: dict[str, Any], file: str | None = None) -> Config:
    """The configuration of these fields, where they are not None, and of the file. Raises as
    `Source.load`.
    """
    return Source({field: value for field, value in chosen.items() if value is not None}, file or "").load().config


def _joined(text: str) -> str:
    return text if text.startswith(": ") else f" {text}"


def _line(text: str) -> str:
    """With control characters, and what is no text, as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def read(file: str) -> Settings:
    """What a file says; the values are not checked. Raises FileError."""
    dockers, values = _values(file)
    try:
        if dockers:
            return _read_docker(values)
        by_name = {option.name: option.field for option in options()}
        for name in values:
            if name not in by_name:
                raise ValueError(f"unknown option {name}")
        return Settings(
            {by_name[name]: value for name, value in values.items()}, {by_name[name]: name for name in values}, {}
        )
    except ValueError as error:
        raise FileError(f"--config {file}: {error}") from error


def _values(file: str) -> tuple[bool, dict[str, Any]]:
    """Whether a file is dockerd's JSON, and its keys and values. Raises FileError."""
    try:
        text = _content(file).decode("utf-8-sig")
        dockers = is_dockers(file, text)
        return dockers, _json(text) if dockers else tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise FileError(f"--config {file}: is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise FileError(f"--config {file}: is nested too deeply") from error
    except OSError as error:
        raise FileError(f"--config {file}: {reason(error)}") from error
    except ValueError as error:
        raise FileError(f"--config {file}: {error}") from error


def _content(file: str) -> bytes:
    """Opened so that a FIFO does not block. Raises OSError, ValueError for what is no file."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) and status.st_rdev != _NULL:
            raise ValueError("is a directory" if stat.S_ISDIR(status.st_mode) else "is not a regular file")
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"is larger than {LARGEST >> 20} MiB")
    return content


def is_dockers(file: str, text: str) -> bool:
    """True for dockerd's JSON."""
    return file.endswith(".json") or text.lstrip().startswith("{")


def verdicts(file: str) -> list[Verdict]:
    """What becomes of each key of a file, for `engined check`. Raises FileError if the file cannot
    be read.
    """
    dockers, values = _values(file)
    by_name = {option.name: option.field for option in options()}
    found = []
    for key, value in values.items():
        known = docker.KEYS.get(key) if dockers else None
        if isinstance(known, docker.NoMeaning) and value is not known.as_it_is:
            found.append(Verdict(key, NO_MEANING, known.why))
            continue
        try:
            if not dockers and key not in by_name:
                raise ValueError("is not known")
            if dockers and docker.conflict(values)[0] == key:
                raise ValueError(docker.conflict(values)[1])
            _config(docker.read(key, value) if dockers else {by_name[key]: value}, _raise, alone=True)
        except ValueError as error:
            found.append(Verdict(key, REFUSED, _line(str(error).removeprefix(": "))))
        else:
            found.append(Verdict(key, IN_FORCE, ""))
    return found


def _raise(_: str, text: str) -> NoReturn:
    raise ValueError(text)


def from_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that keys of dockerd set. Raises ValueError that names the key."""
    return _read_docker(values).fields


def _read_docker(values: Mapping[str, Any]) -> Settings:
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    meaningless: dict[str, str] = {}
    wrong, why = docker.conflict(values)
    if wrong:
        raise ValueError(f"{wrong} {why}")
    for key in docker.in_order(values):
        try:
            found = docker.read(key, values[key])
        except ValueError as error:
            raise ValueError(f"{key}{_joined(str(error))}") from error
        known = docker.KEYS[key]
        if isinstance(known, docker.NoMeaning) and values[key] is not known.as_it_is:
            meaningless[key] = known.why
        fields |= found
        names |= dict.fromkeys(found, key)
    return Settings(fields, names, meaningless, True)


def _json(text: str) -> dict[str, Any]:
    """Raises ValueError with line and column; also for a key that is given twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{key} is given twice")
            found[key] = value
        return found

    def number(digits: str) -> int:
        if len(digits) > 1000:  # int() refuses more than 4,300 in words of its own
            raise ValueError(f"{digits[:20]}... is too large")
        return int(digits)

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number of JSON")

    try:
        hooks: Any = {"object_pairs_hook": once, "parse_constant": refuse, "parse_int": number}
        values = json.loads(text if text.strip() else "{}", **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    if values is None:  # as in dockerd
        return {}
    if not isinstance(values, dict):
        raise ValueError("must be a JSON object")
    return values


def _config(values: dict[str, Any], fail: Callable[[str, str], NoReturn], *, alone: bool = False) -> Config:
    """The checked configuration. Calls `fail` with the field and what is wrong with its value.
    `alone`: not what several options must be beside each other.
    """
    for name, value in values.items():
        for entry in value if isinstance(value, list | tuple) else [value]:
            if isinstance(entry, str) and "\0" in entry:
                fail(name, f"{entry!r}: must not contain a NUL character")
    try:
        config = msgspec.convert(values, Config, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        text = decoding_reason(error)
        field = re.match(r"\w*", text)
        assert field is not None
        fail(field[0], text[field.end() :])
    config = msgspec.structs.replace(config, root=config.root.resolve(), run=config.run.resolve())
    if (invalid := rules.broken(config, alone=alone)) is not None:
        fail(invalid.field, invalid.text)
    return config


def decode(document: bytes) -> Config:
    """A configuration that `encode` wrote. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(document, type=Config, dec_hook=_from_text)


def encode(config: Config) -> bytes:
    """The configuration as JSON, for `engined stop` when no daemon is alive."""
    return msgspec.json.encode(config, enc_hook=str)


def _from_text(kind: type[Any], value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{type(value).__name__}`")  # as msgspec says it
    return kind(value)
