"""The endpoints that a create asks for, from NetworkingConfig and NetworkMode.

Not here: endpoints of running containers (`networks/endpoints.py`), the rules of one endpoint
(`networks/requested.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from engine.containers import body
from engine.errors import EngineError, InvalidParameter
from engine.networks import endpoints as of_networks
from engine.networks import requested
from engine.networks.network import HOST, NONE
from engine.networks.networks import Networks
from engine.wire.containers import EndpointSettings, NetworkingConfig


class Wanted(NamedTuple):
    """The requested endpoints, both by network name."""

    networks: dict[str, EndpointSettings]
    macs: dict[str, str]
    """Requested MAC addresses."""


def wanted(networks: Networks, mode: str, asked: NetworkingConfig, *, unchecked: bool = False) -> Wanted:
    """The requested endpoints. Without any the one that NetworkMode names.

    Networks that do not exist are the start's concern: clients take a 404 of a create for a missing
    image. `unchecked`: so is what the existing ones do not allow.

    Raises InvalidParameter, with every reason.
    """
    primary = networks.name_of(mode)
    endpoints: dict[str, EndpointSettings] = {}
    for key, settings in asked.endpoints_config.items():
        name = networks.name_of(key)
        if name in endpoints:
            raise InvalidParameter(f"EndpointsConfig: network {name} is given twice, once as {key}")
        endpoints[name] = _identified(networks, key, name, settings or EndpointSettings())
    endpoints = endpoints or {primary: _identified(networks, mode, primary, EndpointSettings())}
    names = endpoints.keys() | {primary}
    for alone in (HOST, NONE):
        if alone in names and len(names) > 1:
            raise InvalidParameter(
                f"Container cannot be connected to network endpoints: {', '.join(endpoints)}: its NetworkMode is "
                f"{primary}, and no other network goes with {alone}"
            )
    reasons: list[str] = []
    for name, settings in endpoints.items():
        checks: list[Callable[[], object]] = [
            *requested.checks(name, settings),
            *(partial(body.parse_link, link) for link in settings.links or ()),
        ]
        refused = [reason for reason in map(_refusal, checks) if reason]
        if not refused and not unchecked and (reason := _refusal(partial(networks.check_endpoint, name, settings))):
            refused = [reason]
        reasons += refused
    if reasons:
        raise InvalidParameter(reasons[0] if len(reasons) == 1 else "invalid endpoint settings:\n" + "\n".join(reasons))
    links = [requested.driver_options(name, each.driver_opts).name for name, each in endpoints.items()]
    for link in links:
        if link and links.count(link) > 1:
            raise InvalidParameter(f"endpoint.ifname: two interfaces of a container cannot be named {link}")
    macs = {name: requested.mac_address(each.mac_address, name) for name, each in endpoints.items() if each.mac_address}
    kept = {
        name: msgspec.structs.replace(of_networks.asked(each), network_id=each.network_id)
        for name, each in endpoints.items()
    }
    return Wanted(kept, macs)


def _identified(networks: Networks, key: str, name: str, settings: EndpointSettings) -> EndpointSettings:
    """The settings with the id of a network of a swarm that was given by its id: a network of this
    engine may have the same name. Of others the name counts.
    """
    for given in (settings.network_id, key):
        if networks.is_shared(given, name):
            return msgspec.structs.replace(settings, network_id=given)
    return msgspec.structs.replace(settings, network_id="")


def _refusal(check: Callable[[], object]) -> str:
    try:
        check()
    except EngineError as error:
        return error.message
    return ""
