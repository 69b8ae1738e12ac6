"""The endpoints that a create asks for, from NetworkingConfig and NetworkMode.

Not here: endpoints of running containers (`networks/endpoints.py`).
"""

from __future__ import annotations

from engine.containers import body
from engine.errors import InvalidParameter
from engine.networks import network
from engine.networks.network import HOST, NONE
from engine.networks.networks import Networks
from engine.wire.containers import EndpointSettings, NetworkingConfig


def wanted(networks: Networks, mode: str, asked: NetworkingConfig) -> dict[str, EndpointSettings]:
    """The requested endpoints by network name. Without any the one that NetworkMode names.

    Raises InvalidParameter.
    """
    primary = networks.name_of(mode)
    endpoints: dict[str, EndpointSettings] = {}
    for key, settings in asked.endpoints_config.items():
        name = networks.name_of(key)
        if name in endpoints:
            raise InvalidParameter(f"EndpointsConfig: network {name} is given twice, once as {key}")
        endpoints[name] = settings or EndpointSettings()
    endpoints = endpoints or {primary: EndpointSettings()}
    names = endpoints.keys() | {primary}
    for alone in (HOST, NONE):
        if alone in names and len(names) > 1:
            raise InvalidParameter(
                f"Container cannot be connected to network endpoints: {', '.join(endpoints)}: its NetworkMode is "
                f"{primary}, and no other network goes with {alone}"
            )
    for name, settings in endpoints.items():
        for link in settings.links or ():
            body.parse_link(link)
        network.static_addresses(name, settings)
        network.link_local_addresses(name, settings)
    return {
        name: EndpointSettings(ipam_config=each.ipam_config, links=each.links, aliases=each.aliases)
        for name, each in endpoints.items()
    }
