"""Messages that every plugin understands (Docker's documentation, "Docker Plugin API"). Structs
name the fields and have no behaviour.
"""

from __future__ import annotations

from typing import Annotated

import msgspec


class PluginAnswer(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The base of every answer. `err` is empty when the call succeeded."""

    err: str | None = None


class Activation(PluginAnswer, rename="pascal", kw_only=True, frozen=True):
    """POST /Plugin.Activate: the driver kinds that the plugin implements."""

    implements: list[str] | None = None


# --- managed plugins: the config of a plugin, and the plugin in answers --------------------------


class PluginInterface(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    types: list[str] = msgspec.field(default_factory=list)
    """`PREFIX.CAPABILITY/VERSION`: `docker.volumedriver/1.0`."""
    socket: str = ""
    """The socket's name in /run/docker/plugins, as the plugin sees it."""
    protocol_scheme: str = ""


Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
"""Of a user or a group."""


class PluginUser(msgspec.Struct, rename="upper", kw_only=True, frozen=True):
    uid: Id = 0
    gid: Id = 0


class PluginNetwork(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    type: str = ""


class PluginDevice(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    name: str = ""
    description: str = ""
    settable: list[str] | None = None
    path: str | None = None


class PluginLinux(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    capabilities: list[str] | None = None
    allow_all_devices: bool = False
    devices: list[PluginDevice] | None = None


class PluginMount(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    name: str = ""
    description: str = ""
    settable: list[str] | None = None
    source: str | None = None
    destination: str = ""
    type: str = ""
    options: list[str] | None = None


class PluginEnv(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    name: str = ""
    description: str = ""
    settable: list[str] | None = None
    value: str | None = None


class PluginArgs(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    name: str = ""
    description: str = ""
    settable: list[str] | None = None
    value: list[str] | None = None


class PluginRootfs(msgspec.Struct, kw_only=True, frozen=True):
    type: str = "layers"
    diff_ids: list[str] = msgspec.field(default_factory=list)


class PluginConfig(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The config of a plugin, media type application/vnd.docker.plugin.v1+json. That of Docker 1.12
    (v0) is upgraded when it is read."""

    docker_version: str | msgspec.UnsetType = msgspec.UNSET
    """The engine that made it. Engines have stopped setting it."""
    description: str = ""
    documentation: str = ""
    interface: PluginInterface = PluginInterface()
    entrypoint: list[str] = msgspec.field(default_factory=list)
    work_dir: str = ""
    user: PluginUser = PluginUser()
    network: PluginNetwork = PluginNetwork()
    linux: PluginLinux = PluginLinux()
    propagated_mount: str = ""
    ipc_host: bool = False
    pid_host: bool = False
    mounts: list[PluginMount] = msgspec.field(default_factory=list)
    env: list[PluginEnv] = msgspec.field(default_factory=list)
    args: PluginArgs = PluginArgs()
    rootfs: PluginRootfs = msgspec.field(default_factory=PluginRootfs, name="rootfs")


class PluginSettings(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The values in force: those of the config, as `docker plugin set` has changed them."""

    mounts: list[PluginMount] = msgspec.field(default_factory=list)
    env: list[str] = msgspec.field(default_factory=list)
    """`NAME=value`."""
    args: list[str] = msgspec.field(default_factory=list)
    devices: list[PluginDevice] = msgspec.field(default_factory=list)


class PluginInspect(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """GET /plugins/{name}/json, and an element of GET /plugins."""

    id: str
    name: str
    """With its tag."""
    enabled: bool
    settings: PluginSettings
    plugin_reference: str
    """Where it was pulled from."""
    config: PluginConfig


class PluginPrivilege(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """Something of the host that a plugin asks for. Clients show the list, and send it back when
    their user has accepted it."""

    name: str = ""
    description: str = ""
    value: list[str] = msgspec.field(default_factory=list)
