"""What a plugin asks of the host, and whether its user has accepted that.

Pure. The list is computed from the config that the plugin is run with, never from what a client
says.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import InvalidParameter
from engine.wire.plugins import PluginConfig, PluginPrivilege

ISOLATED = ("", "bridge", "null")
"""Kinds of network that give no access to the host's."""


def required(config: PluginConfig) -> list[PluginPrivilege]:
    """The privileges that a plugin with this config has, in Docker's order and words."""
    linux = config.linux
    found = [
        *_one("network", "permissions to access a network", config.network.type not in ISOLATED, config.network.type),
        *_one("host ipc namespace", "allow access to host ipc namespace", config.ipc_host),
        *_one("host pid namespace", "allow access to host pid namespace", config.pid_host),
    ]
    for mount in config.mounts:
        found += _one("mount", "host path to mount", mount.source is not None, mount.source or "")
    for device in linux.devices or ():
        found += _one("device", "host device to access", device.path is not None, device.path or "")
    found += _one("allow-all-devices", "allow 'rwm' access to all devices", linux.allow_all_devices)
    if linux.capabilities:
        found.append(
            PluginPrivilege(
                name="capabilities",
                description="list of additional capabilities required",
                value=linux.capabilities,
            )
        )
    return found


def _one(name: str, description: str, asked: bool, value: str = "true") -> list[PluginPrivilege]:
    return [PluginPrivilege(name=name, description=description, value=[value])] if asked else []


def check(name: str, wanted: Iterable[PluginPrivilege], accepted: Iterable[PluginPrivilege]) -> None:
    """Raises InvalidParameter unless exactly the privileges that the plugin wants were accepted.

    The whole lists are compared, as sets: their order and descriptions mean nothing.
    """
    asked, given = _as_set(wanted), _as_set(accepted)
    if asked == given:
        return
    missing = ", ".join(sorted(map(_words, asked - given)))
    surplus = ", ".join(sorted(map(_words, given - asked)))
    raise InvalidParameter(
        f"incorrect privileges for plugin {name}"
        + (f": not accepted: {missing}" if missing else "")
        + (f": accepted, but not asked for: {surplus}" if surplus else "")
    )


_Privilege = tuple[str, frozenset[str]]


def _as_set(privileges: Iterable[PluginPrivilege]) -> frozenset[_Privilege]:
    return frozenset((each.name, frozenset(each.value)) for each in privileges)


def _words(privilege: _Privilege) -> str:
    name, values = privilege
    return f"{name} [{' '.join(sorted(values))}]"[:300]
