"""Upgrades of endpoints and subnets in older create bodies.

Each function changes the JSON object of a create body in place. Fields that move to an endpoint
move to that of the main network, which HostConfig.NetworkMode names, as in dockerd's handlers.
Raises: InvalidParameter, in dockerd's words.
"""

from __future__ import annotations

import contextlib
from ipaddress import ip_network
from typing import Any

from engine.api.versions.change import notes
from engine.containers.body import of_interface
from engine.errors import InvalidParameter
from engine.networks.network import BRIDGE, DEFAULT_MODES, HOST
from engine.networks.requested import PLACE, SYSCTLS

_OPTION = f"com.docker.network.{SYSCTLS}"

Body = dict[str, Any]


def endpoints_of(request: Body) -> dict[str, Body]:
    """The endpoints in the body, by key."""
    found = _object(_object(request, "NetworkingConfig"), "EndpointsConfig")
    for key in [key for key, each in found.items() if each is None]:
        found[key] = {}
    return {key: each for key, each in found.items() if isinstance(each, dict)}


def one_endpoint(request: Body) -> None:
    """Refuse more than one endpoint."""
    endpoints = _object(_object(request, "NetworkingConfig"), "EndpointsConfig")
    if len(endpoints) > 1:
        raise InvalidParameter(
            f"Container cannot be connected to network endpoints: {', '.join(endpoints)}: several take API 1.44"
        )


def without(field: str) -> Any:
    """An upgrade that ignores a field of every endpoint."""

    def drop(request: Body) -> None:
        for endpoint in endpoints_of(request).values():
            endpoint.pop(field, None)

    return drop


def mac_of_container(request: Body) -> None:
    """`MacAddress` of the container is that of its one endpoint."""
    mac = request.pop("MacAddress", "")
    if not mac:
        return
    mode = _mode(request)
    if mode == HOST or mode.startswith("container:"):
        raise InvalidParameter("conflicting options: mac-address and the network mode")
    given = endpoints_of(request)
    endpoint = next(iter(given.values())) if given else _main(request)
    endpoint["MacAddress"] = mac


def mac_with_warning(request: Body) -> None:
    """`MacAddress` of the container is that of its endpoint on the main network, with a warning."""
    mac = request.pop("MacAddress", "")
    if not mac:
        return
    mode = _mode(request)
    if mode not in (HOST, "none") and not mode.startswith("container:"):
        endpoint = _main(request, "unable to migrate container-wide MAC address to a specific network")
        if not endpoint.get("MacAddress"):
            endpoint["MacAddress"] = mac
        elif endpoint["MacAddress"] != mac:
            raise InvalidParameter(
                "the container-wide MAC address must match the endpoint-specific MAC address for the main network, "
                "or be left empty"
            )
    _warn(
        request,
        "The container-wide MacAddress field is now deprecated. It should be specified in EndpointsConfig instead.",
    )


def interface_sysctls(request: Body) -> None:
    """HostConfig.Sysctls of eth0 become a driver option of the endpoint on the main network."""
    sysctls = _object(_object(request, "HostConfig"), "Sysctls")
    named = {name: words for name in sorted(sysctls) if (words := of_interface(name)) is not None}
    mode = _mode(request)
    if not named or mode == HOST or mode.startswith("container:"):
        return
    moved = []
    for name, (family, kind, interface, setting) in named.items():
        if interface != "eth0":
            raise InvalidParameter(
                f"unable to determine network endpoint for sysctl {name}, use driver option '{_OPTION}' to set "
                "per-interface sysctls"
            )
        moved.append(f"net.{family}.{kind}.{PLACE}.{setting}={sysctls.pop(name)}")
    endpoint = _main(request, f"unable to find a network for sysctl {next(iter(named))}")
    options = endpoint.setdefault("DriverOpts", {})
    if isinstance(options, dict):
        given = options.get(_OPTION)
        options[_OPTION] = ",".join([given, *moved] if isinstance(given, str) and given else moved)
        _warn(request, f'Migrated sysctl "{",".join(named)}" to DriverOpts{{"{_OPTION}":"{",".join(moved)}"}}.')


def unchecked(request: Body) -> None:
    """Leave the checks of endpoints against their networks to the start of the container."""
    notes(request)["endpoints_unchecked"] = True


def without_host_bits(request: Body) -> None:
    """Clear the host bits of a new network's subnets and ranges."""
    pools = _object(request, "IPAM").get("Config")
    for pool in pools if isinstance(pools, list) else ():
        for name in ("Subnet", "IPRange"):
            text = pool.get(name) if isinstance(pool, dict) else None
            if isinstance(text, str) and "/" in text:
                with contextlib.suppress(ValueError):
                    pool[name] = str(ip_network(text, strict=False))


def _mode(request: Body) -> str:
    mode = _object(request, "HostConfig").get("NetworkMode") or ""
    return BRIDGE if mode in DEFAULT_MODES else str(mode)


def _main(request: Body, refusal: str = "") -> Body:
    """The endpoint on the main network, made if there is none at all.

    Raises InvalidParameter if there are only others, as one of them may have the network's id for a
    name.
    """
    mode, given = _mode(request), endpoints_of(request)
    for key, endpoint in given.items():
        if key == mode or (mode == BRIDGE and key in DEFAULT_MODES):
            return endpoint
    if given:
        raise InvalidParameter(
            f"{refusal}: HostConfig.NetworkMode must match the identity of a network in NetworkingConfig"
        )
    networking = request["NetworkingConfig"] = _object(request, "NetworkingConfig")
    made: Body = {}
    networking["EndpointsConfig"] = {mode: made}
    return made


def _object(of: Body, name: str) -> Body:
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def _warn(request: Body, text: str) -> None:
    notes(request).setdefault("warnings", []).append(text)
