"""Plugins as API 1.24 shows them: settings as `Config`, the config as `Manifest`."""

from __future__ import annotations

from typing import Any

from engine.api.versions.change import Downgrade
from engine.wire.plugins import PluginInspect


def _name(plugin: PluginInspect) -> str:
    return plugin.name.rpartition(":")[0]


def _tag(plugin: PluginInspect) -> str:
    return plugin.name.rpartition(":")[2]


def _config(plugin: PluginInspect) -> dict[str, Any]:
    settings = plugin.settings
    return {"Mounts": settings.mounts, "Env": settings.env, "Args": settings.args, "Devices": settings.devices}


def _manifest(plugin: PluginInspect) -> dict[str, Any]:
    config = plugin.config
    return {
        "ManifestVersion": "v0",
        "Description": config.description,
        "Documentation": config.documentation,
        "Interface": {"Types": config.interface.types, "Socket": config.interface.socket},
        "Entrypoint": config.entrypoint,
        "Workdir": config.work_dir,
        "User": config.user,
        "Network": config.network,
        "Capabilities": config.linux.capabilities,
        "Mounts": config.mounts,
        "Devices": config.linux.devices,
        "Env": config.env,
        "Args": config.args,
    }


AS_IN_1_24: Downgrade = {
    "Name": _name,
    "Tag": _tag,
    "Active": lambda plugin: plugin.enabled,
    "Config": _config,
    "Manifest": _manifest,
    "Enabled": None,
    "Settings": None,
    "PluginReference": None,
}
