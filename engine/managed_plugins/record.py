"""The record of a managed plugin (kind `plugin`, by its id)."""

from __future__ import annotations

import msgspec

from engine.wire.images import Descriptor
from engine.wire.plugins import PluginConfig, PluginSettings


class PluginRecord(msgspec.Struct, kw_only=True, frozen=True):
    """One installed plugin."""

    id: str
    """64 hexadecimal digits. An upgrade keeps it."""
    name: str
    """`NAME:TAG` without the default registry: how users of the plugin name it."""
    reference: str = ""
    """Where it was pulled from, in full: `docker.io/vendor/name:tag`."""
    enabled: bool = False
    """It is to run, also after the next start of the daemon."""
    config: PluginConfig
    settings: PluginSettings
    chain_id: str
    """Of its topmost layer (OCI image specification, "Layer ChainID"). Its process has a writable
    snapshot on top, whose key is `id`."""

    document: bytes = b""
    """The bytes of its config, as registries have them."""
    blobs: tuple[Descriptor, ...] = ()
    """Its layers, lowest first, as the registry that it comes from has them. Empty for a plugin
    that was made here."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of driver in its config, in lower case: `volumedriver`."""
        return frozenset(each.partition("/")[0].rpartition(".")[2].lower() for each in self.config.interface.types)
