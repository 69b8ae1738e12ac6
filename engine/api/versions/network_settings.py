"""NetworkSettings of inspect as older versions show it: with the endpoint on the default bridge
beside Networks.

An older object is built as a whole, because more fields are added than the newest one has.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from engine.networks.network import BRIDGE
from engine.wire.containers import ContainerInspect, EndpointSettings, NetworkSettings

_NONE = EndpointSettings()
_T = TypeVar("_T", bound="WithBridge")


class WithBridge(NetworkSettings, rename="pascal", kw_only=True, frozen=True):
    """As 1.25 to 1.51 show it."""

    endpoint_id: str = msgspec.field(name="EndpointID")
    gateway: str
    global_ipv6_address: str = msgspec.field(name="GlobalIPv6Address")
    global_ipv6_prefix_len: int = msgspec.field(name="GlobalIPv6PrefixLen")
    ip_address: str = msgspec.field(name="IPAddress")
    ip_prefix_len: int = msgspec.field(name="IPPrefixLen")
    ipv6_gateway: str = msgspec.field(name="IPv6Gateway")
    mac_address: str


class Complete(WithBridge, rename="pascal", kw_only=True, frozen=True):
    """As 1.18 to 1.24 show it, with fields that are always empty."""

    bridge: str = ""
    hairpin_mode: bool = False
    link_local_ipv6_address: str = msgspec.field(default="", name="LinkLocalIPv6Address")
    link_local_ipv6_prefix_len: int = msgspec.field(default=0, name="LinkLocalIPv6PrefixLen")
    secondary_ip_addresses: None = msgspec.field(default=None, name="SecondaryIPAddresses")
    secondary_ipv6_addresses: None = msgspec.field(default=None, name="SecondaryIPv6Addresses")


def with_bridge(found: ContainerInspect) -> WithBridge:
    return _older(found, WithBridge)


def complete(found: ContainerInspect) -> Complete:
    return _older(found, Complete)


def _older(found: ContainerInspect, of: type[_T]) -> _T:
    settings = found.network_settings
    on_bridge = settings.networks.get(BRIDGE, _NONE) if settings.networks else _NONE
    return of(
        sandbox_id=settings.sandbox_id,
        sandbox_key=settings.sandbox_key,
        ports=settings.ports,
        networks=settings.networks,
        endpoint_id=on_bridge.endpoint_id,
        gateway=on_bridge.gateway,
        global_ipv6_address=on_bridge.global_ipv6_address,
        global_ipv6_prefix_len=on_bridge.global_ipv6_prefix_len,
        ip_address=on_bridge.ip_address,
        ip_prefix_len=on_bridge.ip_prefix_len,
        ipv6_gateway=on_bridge.ipv6_gateway,
        mac_address=on_bridge.mac_address,
    )
