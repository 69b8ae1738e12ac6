"""Tags of logs: the templates of the option `tag`, and the values and functions that they have.

Names and functions are those that dockerd gives them (`logger.Info` and its functions). Pure.
Raises: InvalidParameter that quotes the action.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from engine.common.templates import Function, Table, Value, check, expand
from engine.errors import InvalidParameter
from engine.logs.facts import Facts

ID = "{{.ID}}"
FULL_ID = "{{.FullID}}"
"""Default templates."""

LONGEST = 4096
"""Characters of a tag: every line carries it."""

DAEMON = "docker"
"""`.DaemonName`. Configurations of log servers look for it."""

_FIELDS = frozenset((
    "ID", "FullID", "Name", "ImageID", "ImageFullID", "ImageName", "ImageFullName", "Hostname", "Command",
    "DaemonName", "Config", "LogPath", "ContainerID", "ContainerName", "ContainerEntrypoint", "ContainerArgs",
    "ContainerImageID", "ContainerImageName", "ContainerCreated", "ContainerEnv", "ContainerLabels",
))  # fmt: skip


def validate(template: str) -> None:
    """Raises InvalidParameter for a template that no container could expand."""
    check(template, _FIELDS, _FUNCTIONS.keys())


def render(template: str, facts: Facts, options: Mapping[str, str]) -> str:
    """The tag of a container. `options`: those of its log."""
    if "{{" not in template:
        tag = template
    elif template == ID:  # most tags
        tag = facts.id[:12]
    else:
        tag = expand(template, _values(facts, options), _FUNCTIONS)
    if len(tag) > LONGEST:
        raise InvalidParameter(f"the tag has {len(tag)} characters, more than {LONGEST}")
    return tag


def _values(facts: Facts, options: Mapping[str, str]) -> dict[str, Value]:
    return {
        "ID": facts.id[:12],
        "FullID": facts.id,
        "Name": facts.name,
        "ImageID": facts.image_id.rpartition(":")[2][:12],
        "ImageFullID": facts.image_id,
        "ImageName": facts.image_name,
        "ImageFullName": facts.image_name,
        "Hostname": facts.hostname,
        "Command": facts.command,
        "DaemonName": DAEMON,
        "Config": Table(options),
        "LogPath": facts.log_path,
        "ContainerID": facts.id,
        "ContainerName": f"/{facts.name}",
        "ContainerEntrypoint": facts.path,
        "ContainerArgs": list(facts.args),
        "ContainerImageID": facts.image_id,
        "ContainerImageName": facts.image_name,
        "ContainerCreated": _time(facts.created),
        "ContainerEnv": list(facts.environment),
        "ContainerLabels": Table(facts.labels),
    }


def _time(ns: int) -> str:
    """As Go prints a time in UTC."""
    seconds, fraction = divmod(ns, 1_000_000_000)
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    return (f"{text}.{fraction:09d}".rstrip("0") if fraction else text) + " +0000 UTC"


# --- functions ------------------------------------------------------------------------------------
# A TypeError becomes the message "wrong arguments for …" (`engine.common.templates`).


def _text(value: Value) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LONGEST:
        raise TypeError
    return value


def _json(value: Value) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _split(text: Value, separator: Value) -> Value:
    words, at = _text(text), _text(separator)
    return words.split(at) if at else list(words)


def _join(words: Value, separator: Value) -> str:
    if not isinstance(words, list):
        raise TypeError
    return _text(separator).join(words)


def _title(text: Value) -> str:
    """The first letter of each word in upper case; the rest stays as it is."""
    out = []
    inside = False
    for character in _text(text):
        out.append(character if inside else character.title())
        inside = character.isalnum() or character == "_" or (not character.isascii() and not character.isspace())
    return "".join(out)


def _pad(text: Value, before: Value, after: Value) -> str:
    return text and " " * _number(before) + _text(text) + " " * _number(after)  # type: ignore[return-value]


def _truncate(text: Value, length: Value) -> str:
    """Counted in bytes."""
    return _text(text).encode()[: _number(length)].decode(errors="ignore")


_FUNCTIONS: dict[str, Function] = {
    "json": _json,
    "split": _split,
    "join": _join,
    "title": _title,
    "lower": lambda text: _text(text).lower(),
    "upper": lambda text: _text(text).upper(),
    "pad": _pad,
    "truncate": _truncate,
}

__all__ = ["FULL_ID", "ID", "LONGEST", "render", "validate"]
