"""What this node reports of itself to the managers: resources, platform, engine, drivers. The
scheduler and `docker node inspect` use it.

Pure. Not here: the certificate's issuer, which the manager adds.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine import __version__
from engine.common.facts import Counts, Host
from engine.wire.nodes import (
    DiscreteResource,
    EngineDescription,
    EnginePlugin,
    GenericResource,
    NamedResource,
    NodeDescription,
    Platform,
    Resources,
)

BILLION = 1_000_000_000


def description(host: Host, counts: Counts, volume_drivers: Iterable[str], resources: Iterable[str]) -> NodeDescription:
    """`resources`: as in `--node-generic-resource`, which are valid."""
    plugins = [
        *(EnginePlugin("Authorization", name) for name in counts.authorization_plugins),
        *(EnginePlugin("Log", name) for name in counts.log_drivers),
        *(EnginePlugin("Network", name) for name in counts.network_drivers),
        *(EnginePlugin("Volume", name) for name in volume_drivers),
    ]
    return NodeDescription(
        hostname=host.name,
        platform=Platform(architecture=host.machine, os=host.os),
        resources=Resources(
            nano_cpus=host.cpus * BILLION,
            memory_bytes=host.memory,
            generic_resources=generic_resources(resources),
        ),
        engine=EngineDescription(
            engine_version=__version__,
            labels={name: value for name, _, value in (label.partition("=") for label in counts.labels)},
            plugins=sorted(plugins, key=_order),
        ),
    )


def _order(plugin: EnginePlugin) -> tuple[str, str]:
    return plugin.type, plugin.name


def generic_resources(entries: Iterable[str]) -> list[GenericResource]:
    """`SSD=3` is a number of equal items, `GPU=UUID1` one item of its own."""
    found = []
    for entry in entries:
        kind, _, value = entry.partition("=")
        if value.isascii() and value.isdigit():
            found.append(GenericResource(discrete_resource_spec=DiscreteResource(kind, int(value))))
        else:
            found.append(GenericResource(named_resource_spec=NamedResource(kind, value)))
    return found


__all__ = ["description", "generic_resources"]
