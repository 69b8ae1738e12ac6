"""What API 1.45 changed."""

from __future__ import annotations

import msgspec

from engine.api.versions.change import Change, Flag
from engine.api.versions.mounts import option, refusing
from engine.common.network_rules import PREDEFINED_NAMES
from engine.wire.containers import ContainerInspect, CreateBody, EndpointSettings


def _with_names(found: ContainerInspect) -> dict[str, EndpointSettings]:
    """The networks, with the container's short id and host name among the aliases."""
    names = (found.id[:12], found.config.hostname)
    return {
        network: settings
        if network in PREDEFINED_NAMES
        else msgspec.structs.replace(
            settings, aliases=[*dict.fromkeys((*(settings.aliases or ()), *filter(None, names)))]
        )
        for network, settings in (found.network_settings.networks or {}).items()
    }


CHANGES = (
    Change("1.45", "inspect of an image shows no Container and ContainerConfig", flag=Flag.IMAGE_WITHOUT_MAKER),
    Change(
        "1.45",
        "aliases are those that were asked for; DNSNames has them all",
        of=ContainerInspect,
        downgrade={"NetworkSettings.Networks": _with_names},
    ),
    Change(
        "1.45",
        "create takes Subpath of volumes in Mounts",
        of=CreateBody,
        upgrade=refusing(option("VolumeOptions", "Subpath"), "VolumeOptions.Subpath needs API v1.45 or newer"),
        down_to="1.25",
    ),
)
