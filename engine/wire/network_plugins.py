"""Answers of network and IPAM plugins (libnetwork's documents "Remote Drivers" and "IPAM Driver").
Structs name the fields and have no behaviour.
"""

from __future__ import annotations

import msgspec

from engine.wire.plugins import PluginAnswer


class NetworkCapabilities(PluginAnswer, rename="pascal", kw_only=True, frozen=True):
    """NetworkDriver.GetCapabilities: `local` or `global`."""

    scope: str | None = None
    connectivity_scope: str | None = None
    """Empty: as `scope`."""


class FilledInterface(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """What the plugin has chosen for an endpoint; addresses with their prefix length."""

    address: str | None = None
    address_ipv6: str | None = msgspec.field(default=None, name="AddressIPv6")
    mac_address: str | None = None


class EndpointCreated(PluginAnswer, rename="pascal", kw_only=True, frozen=True):
    """NetworkDriver.CreateEndpoint."""

    interface: FilledInterface | None = None


class InterfaceName(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The name of a link on the host, and what its name in the sandbox begins with, or is."""

    src_name: str | None = None
    dst_prefix: str | None = None
    dst_name: str | None = None


class StaticRoute(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    destination: str | None = None
    route_type: int = 0
    """0: by `next_hop`; 1: to neighbours."""
    next_hop: str | None = None


class EndpointJoined(PluginAnswer, rename="pascal", kw_only=True, frozen=True):
    """NetworkDriver.Join."""

    interface_name: InterfaceName | None = None
    gateway: str | None = None
    gateway_ipv6: str | None = msgspec.field(default=None, name="GatewayIPv6")
    static_routes: list[StaticRoute] | None = None
    disable_gateway_service: bool | None = None


class IpamAnswer(PluginAnswer, rename="pascal", kw_only=True, frozen=True):
    """The base of answers of IPAM plugins, whose field for a failure is `Error`."""

    error: str | None = None


class IpamCapabilities(IpamAnswer, rename="pascal", kw_only=True, frozen=True):
    """IpamDriver.GetCapabilities."""

    requires_mac_address: bool | None = msgspec.field(default=None, name="RequiresMACAddress")
    requires_request_replay: bool | None = None
    """The plugin forgets pools and addresses, so an engine that starts requests its own again."""


class AddressSpaces(IpamAnswer, rename="pascal", kw_only=True, frozen=True):
    """IpamDriver.GetDefaultAddressSpaces."""

    local_default_address_space: str | None = None
    global_default_address_space: str | None = None


class PoolGiven(IpamAnswer, rename="pascal", kw_only=True, frozen=True):
    """IpamDriver.RequestPool: a subnet, and the id by which its addresses are requested."""

    pool_id: str | None = msgspec.field(default=None, name="PoolID")
    pool: str | None = None
    data: dict[str, str] | None = None


class AddressGiven(IpamAnswer, rename="pascal", kw_only=True, frozen=True):
    """IpamDriver.RequestAddress: an address with the subnet's prefix length."""

    address: str | None = None
    data: dict[str, str] | None = None
