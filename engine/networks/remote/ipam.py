"""The calls to IPAM plugins, which choose subnets and addresses: Docker's protocol IpamDriver.

Rules: libnetwork's document "IPAM Driver", and its client where that is silent. The subnets that a
plugin has chosen are in the network's record, with their ids. Pools (`ipam.py`) note the addresses
that it gives, so that no two endpoints have the same one.

Runs on the event loop. Not here: which endpoint has which address, and giving addresses back after
a crash (`remote_endpoints.py`).
Raises: NotFound for a plugin that does not exist; ServerError that names the network: `Refused`
when the plugin answered with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Iterable, Mapping
from ipaddress import ip_interface, ip_network
from typing import NamedTuple, TypeVar

import msgspec

from engine.common import network_rules
from engine.common.network_rules import Address
from engine.errors import EngineError, InvalidParameter, NotFound, ServerError
from engine.networks.network import NetworkRecord
from engine.plugins.client import Plugin, Refused
from engine.plugins.registry import Plugins
from engine.wire.network_plugins import AddressGiven, AddressSpaces, IpamAnswer, IpamCapabilities, PoolGiven
from engine.wire.networks import IPAMConfig

KIND = "IpamDriver"

_GATEWAY = "com.docker.network.gateway"
_AS_GATEWAY = {"RequestAddressType": _GATEWAY}
_MAC = "com.docker.network.endpoint.macaddress"

A = TypeVar("A", bound=IpamAnswer)

_log = logging.getLogger(__name__)


class Terms(NamedTuple):
    """What a plugin is like."""

    space: str
    """Where its subnets for networks of local scope are from."""
    needs_mac: bool
    needs_replay: bool


class RemoteIpam:
    """The IPAM plugins of one engine."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._terms: weakref.WeakKeyDictionary[Plugin, Terms] = weakref.WeakKeyDictionary()
        self._having: dict[str, Plugin] = {}
        """By network: the client of the process that has its subnets and addresses."""
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """By network, held during a replay."""

    async def get(self, name: str) -> Plugin:
        """Raises NotFound when there is none, ServerError."""
        return await self._plugins.get(name, KIND)

    async def terms(self, plugin: Plugin) -> Terms:
        found = self._terms.get(plugin)
        if found is None:
            capable = IpamCapabilities()
            with contextlib.suppress(NotFound):  # the call is optional
                capable = await _call(plugin, "GetCapabilities", IpamCapabilities)
            spaces = await _call(plugin, "GetDefaultAddressSpaces", AddressSpaces)
            found = self._terms[plugin] = Terms(
                spaces.local_default_address_space or "",
                bool(capable.requires_mac_address),
                bool(capable.requires_request_replay),
            )
        return found

    # --- a network's subnets ----------------------------------------------------------------------

    async def request_pools(self, record: NetworkRecord, undo: contextlib.AsyncExitStack) -> tuple[NetworkRecord, str]:
        """The record with subnets and gateways by its plugin, and their address space. `undo` gets
        what gives them back.
        """
        where = f"network {record.name}"
        plugin = await self.get(record.ipam.driver)
        try:
            terms = await self.terms(plugin)
            asked = [*record.ipam.config]
            given = {ip_network(each.subnet).version for each in asked}
            wanted: list[tuple[int, IPAMConfig]] = [(ip_network(each.subnet).version, each) for each in asked]
            wanted += [(version, IPAMConfig()) for version in record.versions if version not in given]
            config, ids = [], []
            for version, each in sorted(wanted, key=lambda pair: pair[0]):
                if version in record.versions:
                    pool = await self._request_pool(plugin, terms, record, version, each, undo)
                    config.append(pool[0])
                    ids.append(pool[1])
        except EngineError as error:
            raise ServerError(f"{where}: {error.message}") from error
        self._having[record.id] = plugin
        undo.callback(self._having.pop, record.id, None)
        ipam = msgspec.structs.replace(record.ipam, config=config)
        return msgspec.structs.replace(record, ipam=ipam, ipam_pools=tuple(ids)), terms.space

    async def _request_pool(
        self,
        plugin: Plugin,
        terms: Terms,
        record: NetworkRecord,
        version: int,
        asked: IPAMConfig,
        undo: contextlib.AsyncExitStack,
    ) -> tuple[IPAMConfig, str]:
        answer = await _call(
            plugin, "RequestPool", PoolGiven, _pool_request(terms.space, asked, record.ipam.options, version)
        )
        identifier = answer.pool_id or ""
        undo.push_async_callback(self._release_pool, plugin, record.name, identifier)
        try:
            pool = network_rules.checked_pool(
                record.name, msgspec.structs.replace(asked, subnet=answer.pool or "", gateway="")
            )
            if not pool.subnet or ip_network(pool.subnet).version != version:
                raise InvalidParameter(f"network {record.name}: it is not one of IPv{version}")
        except InvalidParameter as error:
            raise ServerError(
                f"IPAM plugin {plugin.name} returned an invalid pool {(answer.pool or '')[:100]!r}: {error.message}"
            ) from error
        gateway = ((answer.data or {}).get(_GATEWAY) or "").partition("/")[0]
        if asked.gateway or not gateway:
            taken = await self._request(plugin, identifier, asked.gateway, _AS_GATEWAY)
            gateway = str(taken)
            undo.push_async_callback(self.release, plugin, record.name, identifier, gateway)
        for text in network_rules.excluded(asked).values():
            await self._request(plugin, identifier, text, {})
            undo.push_async_callback(self.release, plugin, record.name, identifier, text)
        try:
            return network_rules.checked_pool(record.name, msgspec.structs.replace(pool, gateway=gateway)), identifier
        except InvalidParameter as error:
            raise ServerError(
                f"IPAM plugin {plugin.name} returned an invalid gateway {gateway[:100]!r}: {error.message}"
            ) from error

    async def release_pools(self, record: NetworkRecord) -> None:
        """Give back the subnets of a removed network. Failures are logged."""
        self._having.pop(record.id, None)
        try:
            plugin = await self.get(record.ipam.driver)
        except EngineError as error:
            _log.warning("network %s: its subnets are not given back: %s", record.name, error.message)
            return
        for identifier, config in zip(record.ipam_pools, record.ipam.config, strict=True):
            for text in (config.gateway, *network_rules.excluded(config).values()):
                await self.release(plugin, record.name, identifier, text)
            await self._release_pool(plugin, record.name, identifier)

    async def _release_pool(self, plugin: Plugin, network: str, identifier: str) -> None:
        try:
            await _call(plugin, "ReleasePool", IpamAnswer, {"PoolID": identifier})
        except EngineError as error:
            _log.warning("network %s: a subnet is not given back: %s", network, error.message)

    # --- addresses --------------------------------------------------------------------------------

    async def request(self, plugin: Plugin, identifier: str, address: Address | None, mac: str) -> Address:
        """An address of the pool with this id: a free one, or `address`."""
        options = {_MAC: mac} if mac else {}
        return await self._request(plugin, identifier, str(address or ""), options)

    async def _request(self, plugin: Plugin, identifier: str, address: str, options: Mapping[str, str]) -> Address:
        # When the answer does not come, nothing is given back: a free address is not known, and a
        # certain one may be used by another host.
        body = {"PoolID": identifier, "Address": address, "Options": options}
        answer = await _call(plugin, "RequestAddress", AddressGiven, body)
        text = answer.address or ""
        try:
            if "%" in text:
                raise ValueError("it has a zone")
            return ip_interface(text).ip
        except ValueError as error:
            raise ServerError(f"IPAM plugin {plugin.name} returned an invalid address {text[:100]!r}") from error

    async def release(self, plugin: Plugin, network: str, identifier: str, address: str) -> None:
        """Give an address back. A failure is logged."""
        try:
            await _call(plugin, "ReleaseAddress", IpamAnswer, {"PoolID": identifier, "Address": address})
        except EngineError as error:
            _log.warning("network %s: address %s is not given back: %s", network, address, error.message)

    # --- after a restart of the daemon or of the plugin -------------------------------------------

    async def replay(self, record: NetworkRecord, addresses: Iterable[Address]) -> None:
        """Before the use of a network: request its subnets, and the `addresses` of endpoints, again
        if the plugin needs it and has another process, or the engine another one, than before.

        A refusal is logged: a plugin that has outlived the daemon has them still. Raises
        ServerError for other failures, and is to be called again then.
        """
        plugin = await self.get(record.ipam.driver)
        if self._having.get(record.id) is plugin:
            return
        async with self._locks.setdefault(record.id, asyncio.Lock()):
            if self._having.get(record.id) is plugin:
                return
            terms = await self.terms(plugin)
            if terms.needs_replay:
                await self._replay(plugin, terms, record, addresses)
            self._having[record.id] = plugin

    async def _replay(self, plugin: Plugin, terms: Terms, record: NetworkRecord, addresses: Iterable[Address]) -> None:
        for identifier, config in zip(record.ipam_pools, record.ipam.config, strict=True):
            subnet = ip_network(config.subnet)
            body = _pool_request(terms.space, config, record.ipam.options, subnet.version)
            try:
                answer = await _call(plugin, "RequestPool", PoolGiven, body)
            except Refused as error:
                _log.warning("network %s: subnet %s is not requested again: %s", record.name, subnet, error.message)
                continue
            if answer.pool_id != identifier:
                raise ServerError(
                    f"IPAM plugin {plugin.name} has another id for the subnet {subnet} than before its restart"
                )
            wanted = [(config.gateway, _AS_GATEWAY)]
            wanted += [(each, {}) for each in network_rules.excluded(config).values()]
            wanted += [(str(each), {}) for each in addresses if each in subnet]
            for address, options in wanted:
                try:
                    await self._request(plugin, identifier, address, options)
                except Refused as error:
                    _log.warning("network %s: %s is not requested again: %s", record.name, address, error.message)


def _pool_request(space: str, asked: IPAMConfig, options: Mapping[str, str] | None, version: int) -> dict[str, object]:
    return {
        "AddressSpace": space,
        "Pool": asked.subnet,
        "SubPool": asked.ip_range,
        "Options": options or {},
        "V6": version == 6,
    }


async def _call(plugin: Plugin, method: str, answer: type[A], body: Mapping[str, object] | None = None) -> A:
    found = await plugin.call(f"{KIND}.{method}", answer, body)
    if found.error:
        raise Refused(f"{plugin.name}: {method}: remote: {found.error}")
    return found
