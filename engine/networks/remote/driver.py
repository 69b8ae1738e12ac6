"""The calls to network plugins: Docker's protocol NetworkDriver.

Rules: libnetwork's document "Remote Drivers", and its client where that is silent. Networks have
local scope. Node discovery is for drivers of global scope, so DiscoverNew and DiscoverDelete are
not called; neither is EndpointOperInfo, of whose values Docker shows none.

The calls are made on the event loop, never in the threads of `drivers.Workers`: a plugin that hangs
delays its own networks alone. Not here: the order of calls and its undo (`remote_endpoints.py`),
links (`remote_links.py`), where plugins listen (`engine/plugins`).
Raises: NotFound for a plugin that does not exist; ServerError that names the network: `Refused`
when the plugin answered with an error, `Unanswered` when it did not answer in time.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Mapping
from ipaddress import ip_interface, ip_network
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.common import network_rules
from engine.common.network_rules import Address, Subnet, parsed_address
from engine.errors import EngineError, Forbidden, InvalidParameter, NotFound, ServerError
from engine.networks import ports, requested
from engine.networks.network import NO_IPAM, NetworkRecord
from engine.networks.publishing import Request
from engine.plugins.client import Cut, Plugin, Refused, Unanswered
from engine.plugins.registry import Plugins
from engine.wire.containers import EndpointSettings
from engine.wire.network_plugins import EndpointCreated, EndpointJoined, FilledInterface, NetworkCapabilities
from engine.wire.networks import IPAMConfig
from engine.wire.plugins import PluginAnswer

KIND = "NetworkDriver"

_OPTIONAL = ("ProgramExternalConnectivity", "RevokeExternalConnectivity")

_PREFIX = re.compile(r"[!-$&-.0-9;-~]{1,12}")
"""What a link's name may begin with, so that a number of three digits has room behind it."""

A = TypeVar("A", bound=PluginAnswer)


class Route(NamedTuple):
    """A static route of a sandbox. `via` None: to neighbours."""

    to: Subnet
    via: Address | None


class Joined(NamedTuple):
    """What a plugin wants done in the sandbox of an endpoint."""

    source: str
    """The link on the host that becomes the endpoint; empty for none."""
    name: str
    """Its name in the sandbox; empty: the next free one of `prefix`."""
    prefix: str
    gateways: tuple[Address | None, Address | None]
    """IPv4, IPv6."""
    routes: tuple[Route, ...]


class RemoteDriver:
    """The network plugins of one engine."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._scopes: weakref.WeakKeyDictionary[Plugin, str] = weakref.WeakKeyDictionary()

    async def get(self, name: str) -> Plugin:
        """The plugin, which must have local scope.

        Raises NotFound when there is none, ServerError when it fails, Forbidden for global scope.
        """
        plugin = await self._plugins.get(name, KIND)
        scope = self._scopes.get(plugin)
        if scope is None:
            found = await plugin.call(f"{KIND}.GetCapabilities", NetworkCapabilities)
            scope = found.scope or ""
            for each in (scope, found.connectivity_scope or scope):
                if each not in ("local", "global"):
                    raise ServerError(
                        f"plugin {plugin.name}: invalid capability: expecting 'local' or 'global', got {each[:100]!r}"
                    )
            self._scopes[plugin] = scope
        if scope == "global":
            raise Forbidden(
                f'driver "{plugin.name}" has global scope: Cannot create a multi-host network from a worker node. '
                "Please create the network from a manager node."
            )
        return plugin

    async def of(self, network: str, driver: str) -> Plugin:
        """The plugin of a network that exists. Raises ServerError, also when there is none."""
        try:
            return await self.get(driver)
        except EngineError as error:
            raise ServerError(f"network {network}: {error.message}") from error

    def active(self) -> list[str]:
        """Names of the plugins that have been used."""
        return self._plugins.active(KIND)

    # --- networks ---------------------------------------------------------------------------------

    async def create_network(self, record: NetworkRecord, space: str) -> None:
        """`space`: the address space of its subnets."""
        options: dict[str, object] = {
            "com.docker.network.enable_ipv6": record.enable_ipv6,
            "com.docker.network.generic": record.options,
        }
        if record.internal:
            options["com.docker.network.internal"] = True
        body = {
            "NetworkID": record.id,
            "Options": options,
            "IPv4Data": _pools(record, 4, space),
            "IPv6Data": _pools(record, 6, space),
        }
        await _call(await self.of(record.name, record.driver), record.name, "CreateNetwork", PluginAnswer, body)

    async def delete_network(self, record: NetworkRecord) -> None:
        plugin = await self.of(record.name, record.driver)
        await _call(plugin, record.name, "DeleteNetwork", PluginAnswer, {"NetworkID": record.id})

    # --- endpoints --------------------------------------------------------------------------------

    async def create_endpoint(
        self, plugin: Plugin, record: NetworkRecord, given: EndpointSettings, request: Request
    ) -> FilledInterface | None:
        """`given` are the endpoint's settings, with its id. Returns what the plugin has added."""
        interface = {
            "Address": _cidr(given.ip_address, given.ip_prefix_len),
            "AddressIPv6": _cidr(given.global_ipv6_address, given.global_ipv6_prefix_len),
            "MacAddress": given.mac_address,
        }
        options = {**(given.driver_opts or {}), **port_options(request)}
        body = {**_ids(record.id, given.endpoint_id), "Interface": interface, "Options": options}
        return (await _call(plugin, record.name, "CreateEndpoint", EndpointCreated, body)).interface

    async def join(
        self, plugin: Plugin, record: NetworkRecord, endpoint_id: str, key: str, request: Request
    ) -> EndpointJoined:
        """`key`: the path of the sandbox's namespace."""
        body = {**_ids(record.id, endpoint_id), "SandboxKey": key, "Options": port_options(request)}
        return await _call(plugin, record.name, "Join", EndpointJoined, body)

    async def tell(
        self, plugin: Plugin, network: str, method: str, network_id: str, endpoint_id: str, **more: object
    ) -> None:
        """Call `Leave`, `DeleteEndpoint`, or one of the two for connections from outside, which a
        plugin need not have.
        """
        body = {**_ids(network_id, endpoint_id), **more}
        with contextlib.suppress(*((_NotImplemented,) if method in _OPTIONAL else ())):
            await _call(plugin, network, method, PluginAnswer, body)


class _NotImplemented(Refused):
    """The plugin does not have this call."""


async def _call(plugin: Plugin, network: str, method: str, answer: type[A], body: Mapping[str, object]) -> A:
    try:
        return await plugin.call(f"{KIND}.{method}", answer, body)
    except Refused as error:
        raise Refused(f"network {network}: {plugin.name}: {method}: remote: {error.message}") from error
    except NotFound as error:
        raise _NotImplemented(f"network {network}: {error.message}") from error
    except (Unanswered, Cut) as error:
        raise type(error)(f"network {network}: {error.message}") from error
    except EngineError as error:
        raise ServerError(f"network {network}: {error.message}") from error


def _ids(network_id: str, endpoint_id: str) -> dict[str, object]:
    return {"NetworkID": network_id, "EndpointID": endpoint_id}


def _cidr(address: str, prefix: int) -> str:
    return f"{address}/{prefix}" if address else ""


def _pools(record: NetworkRecord, version: int, space: str) -> list[dict[str, object]]:
    """The subnets of one IP version as the plugin gets them."""
    if record.ipam.driver == NO_IPAM:
        anywhere = "0.0.0.0/0" if version == 4 else "::/0"
        return [{"AddressSpace": NO_IPAM, "Pool": anywhere}] if version in record.versions else []
    found = []
    for config in record.ipam.config:
        subnet = ip_network(config.subnet)
        if subnet.version == version and version in record.versions:
            found.append(_pool(config, subnet, space))
    return found


def _pool(config: IPAMConfig, subnet: Subnet, space: str) -> dict[str, object]:
    shown: dict[str, object] = {"AddressSpace": space, "Pool": config.subnet}
    if config.gateway:
        shown["Gateway"] = f"{config.gateway}/{subnet.prefixlen}"
    if auxiliary := network_rules.excluded(config):
        shown["AuxAddresses"] = {name: f"{address}/{subnet.prefixlen}" for name, address in auxiliary.items()}
    return shown


# --- ports ----------------------------------------------------------------------------------------


def port_options(request: Request) -> dict[str, object]:
    """Exposed and published ports as libnetwork's labels: the plugin publishes them."""
    exposed = [(ports.PROTOCOLS[protocol], port) for port, protocol in ports.each_exposed(request.exposed) if port]
    bindings = [
        (ports.PROTOCOLS[protocol], port, host_ip, first, last)
        for port, protocol, host_ip, first, last in ports.each_binding(request.bindings)
    ]
    bound = {(protocol, port) for protocol, port, *_ in bindings}
    exposed += sorted(bound.difference(exposed))
    if request.publish_all:
        bindings += [(protocol, port, "", 0, 0) for protocol, port in exposed if (protocol, port) not in bound]
    return {
        "com.docker.network.endpoint.exposedports": [{"Proto": protocol, "Port": port} for protocol, port in exposed],
        "com.docker.network.portmap": [
            {"Proto": protocol, "IP": "", "Port": port, "HostIP": host_ip, "HostPort": first, "HostPortEnd": last}
            for protocol, port, host_ip, first, last in bindings
        ],
    }


# --- answers --------------------------------------------------------------------------------------


def filled(where: str, settings: EndpointSettings, answer: FilledInterface | None) -> EndpointSettings:
    """The settings with what the plugin has chosen. `where` begins error messages.

    Raises ServerError for values that are invalid, and for those that were given already.
    """
    if answer is None:
        return settings
    changes: dict[str, Any] = {}
    if answer.mac_address:
        if settings.mac_address:
            raise ServerError(f"{where}: driver modified interface MAC address: it is {settings.mac_address}")
        try:
            changes["mac_address"] = requested.mac_address(answer.mac_address, where)
        except InvalidParameter as error:
            raise ServerError(error.message) from error
    for version, text, field, prefix in (
        (4, answer.address, "ip_address", "ip_prefix_len"),
        (6, answer.address_ipv6, "global_ipv6_address", "global_ipv6_prefix_len"),
    ):
        if not text:
            continue
        if present := getattr(settings, field):
            raise ServerError(f"{where}: driver modified interface address: it is {present}")
        try:
            if "/" not in text or "%" in text:
                raise ValueError("it has no prefix length, or a zone")
            interface = ip_interface(text)
            if interface.version != version:
                raise ValueError(f"it is not of IPv{version}")
        except ValueError as error:
            raise ServerError(f"{where}: the driver's address {text[:100]!r} is invalid: {error}") from error
        changes |= {field: str(interface.ip), prefix: interface.network.prefixlen}
    return msgspec.structs.replace(settings, **changes)


def joined(where: str, answer: EndpointJoined) -> Joined:
    """The checked answer to a join. Raises ServerError."""
    names = answer.interface_name
    source = (names.src_name if names else "") or ""
    name = (names.dst_name if names else "") or ""
    prefix = (names.dst_prefix if names else "") or "eth"
    for text in filter(None, (source, name)):
        if not requested.is_link_name(text):
            raise ServerError(f"{where}: the driver's interface name {text[:100]!r} is not one for an interface")
    if not _PREFIX.fullmatch(prefix):
        raise ServerError(f"{where}: the driver's prefix {prefix[:100]!r} is not one for names of interfaces")
    gateways = (
        _address(where, "gateway", answer.gateway, 4),
        _address(where, "IPv6 gateway", answer.gateway_ipv6, 6),
    )
    return Joined(source, name, prefix, gateways, tuple(_routes(where, answer)))


def _routes(where: str, answer: EndpointJoined) -> list[Route]:
    found = []
    for each in answer.static_routes or ():
        text = each.destination or ""
        try:
            to = ip_network(text, strict=False)
        except ValueError as error:
            raise ServerError(f"{where}: the driver's route to {text[:100]!r}: it is not a subnet") from error
        if each.route_type not in (0, 1):
            raise ServerError(f"{where}: the driver's route to {to} has the unknown type {each.route_type}")
        via = _address(where, f"next hop to {to}", each.next_hop, to.version) if each.route_type == 0 else None
        if each.route_type == 0 and via is None:
            raise ServerError(f"{where}: the driver's route to {to} has no next hop")
        found.append(Route(to, via))
    return found


def _address(where: str, what: str, text: str | None, version: int) -> Address | None:
    if not text:
        return None
    try:
        found = parsed_address(text, what)
        if found.version != version:
            raise ValueError(f"it is not of IPv{version}")
    except (InvalidParameter, ValueError) as error:
        raise ServerError(f"{where}: the driver's {what} {text[:100]!r} is invalid: {error}") from error
    return found
