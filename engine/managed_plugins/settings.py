"""The settings of a plugin: the values of its config that `docker plugin set` may change.

A setting is `NAME[.FIELD]=VALUE`. NAME is the name of an environment variable (field `value`), a
mount (`source`), a device (`path`) or the arguments (`value`); the config lists the fields that may
be set (`Settable`). Without FIELD it is the only field listed.

Pure. Raises: InvalidParameter in Docker's words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from engine.errors import InvalidParameter
from engine.wire.plugins import PluginConfig, PluginDevice, PluginMount, PluginSettings

N = TypeVar("N", PluginDevice, PluginMount)

_replace = msgspec.structs.replace


def initial(config: PluginConfig) -> PluginSettings:
    """Those of a plugin that was just installed: a variable without a value is not set."""
    return PluginSettings(
        mounts=config.mounts,
        env=[f"{each.name}={each.value}" for each in config.env if each.value is not None],
        args=config.args.value or [],
        devices=config.linux.devices or [],
    )


def changed(config: PluginConfig, settings: PluginSettings, changes: Sequence[str]) -> PluginSettings:
    """The settings with `changes`: all of them, or InvalidParameter."""
    for change in changes:
        settings = _changed(config, settings, change)
    return settings


def _changed(config: PluginConfig, settings: PluginSettings, change: str) -> PluginSettings:
    words, _, value = change.partition("=")
    name, field = _split(words)
    if not name:
        raise InvalidParameter("invalid format, must be <name>[.<field>][=<value>]")
    if "\0" in change:
        raise InvalidParameter(f"setting {name[:100]!r}: its value has a zero byte")
    for variable in config.env:
        if variable.name == name:
            _check(name, field, variable.settable, "value")
            return _replace(settings, env=_with_variable(settings.env, name, value))
    for mount in config.mounts:
        if mount.name == name:
            _check(name, field, mount.settable, "source")
            if mount.source is None:
                raise InvalidParameter(f"mount {name} of the plugin has no source that could be set")
            if mount.type == "bind":
                _check_path(name, value)
            return _replace(settings, mounts=_named(settings.mounts, name, lambda each: _replace(each, source=value)))
    for device in config.linux.devices or ():
        if device.name == name:
            _check(name, field, device.settable, "path")
            if device.path is None:
                raise InvalidParameter(f"device {name} of the plugin has no path that could be set")
            _check_path(name, value)
            return _replace(settings, devices=_named(settings.devices, name, lambda each: _replace(each, path=value)))
    if config.args.name == name:
        _check(name, field, config.args.settable, "value")
        return _replace(settings, args=value.split(" ") if value else [])
    raise InvalidParameter(f'setting "{name[:200]}" not found in the plugin configuration')


def _split(words: str) -> tuple[str, str]:
    """NAME and FIELD. The field is after the last dot that is not the first character."""
    at = words.rfind(".")
    return (words[:at], words[at + 1 :]) if at > 0 else (words, "")


def _check(name: str, field: str, settable: Sequence[str] | None, only: str) -> None:
    """Raises InvalidParameter unless `field`, or the one that an empty one means, may be set.
    `only`: the field that this kind of setting has."""
    listed = settable or ()
    if not field and len(listed) > 1:
        raise InvalidParameter(f"setting {name}: multiple fields are settable, one must be specified")
    wanted = field or "".join(listed)
    if wanted != only or wanted not in listed:
        shown = f"{name}.{field}" if field else name
        raise InvalidParameter(f'"{shown}" is not settable')


def _check_path(name: str, value: str) -> None:
    if value and not value.startswith("/"):
        raise InvalidParameter(f"setting {name}: {value[:200]!r} is not an absolute path")


def _with_variable(variables: Sequence[str], name: str, value: str) -> list[str]:
    new = f"{name}={value}"
    if not any(each.partition("=")[0] == name for each in variables):
        return [*variables, new]
    return [new if each.partition("=")[0] == name else each for each in variables]


def _named(values: Sequence[N], name: str, change: Callable[[N], N]) -> list[N]:
    return [change(each) if each.name == name else each for each in values]


def carried(before: PluginConfig, settings: PluginSettings, config: PluginConfig) -> PluginSettings:
    """The settings of an upgraded plugin: what its user has set stays set where the new config
    permits it.
    """
    kept = initial(config)
    for change in _made(before, settings):
        try:
            kept = changed(config, kept, [change])
        except InvalidParameter:  # the new version has no such setting
            continue
    return kept


def _made(config: PluginConfig, settings: PluginSettings) -> list[str]:
    """The changes that lead from the initial settings to these."""
    first = initial(config)
    found = [
        f"{name}.value={value}"
        for name, _, value in (each.partition("=") for each in settings.env)
        if f"{name}={value}" not in first.env
    ]
    for mount, old in zip(settings.mounts, first.mounts, strict=True):
        if mount.source != old.source:
            found.append(f"{mount.name}.source={mount.source}")
    for device, former in zip(settings.devices, first.devices, strict=True):
        if device.path != former.path:
            found.append(f"{device.name}.path={device.path}")
    if settings.args != first.args:
        found.append(f"{config.args.name}.value={' '.join(settings.args)}")
    return found
