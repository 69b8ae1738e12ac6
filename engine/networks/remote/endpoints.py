"""What plugins have for the endpoints of this engine: endpoints of network plugins, addresses of
IPAM plugins; made in the protocol's order, and undone in reverse.

A row is written before a plugin is asked for anything, and removed when the plugin has been asked
to take it back. So a daemon that was killed knows what to give back (`settle`). A call that timed
out, or whose answer was garbage, may have taken effect: it is undone like one that did.

Owns: the rows of kind `plugin-endpoint`, the files in RUN/netns, the tasks that give back what an
earlier daemon left. Runs on the event loop, except what waits for the kernel (`remote_links.py`).
Callers hold the sandbox's lock, or the container is starting or has ended; they are not cancelled.
Not here: the calls (`remote.py`, `remote_ipam.py`), settings of endpoints (`endpoints.py`).
Raises: ServerError and the kinds of `remote.py`; `detach`, `release` and `conceal` raise nothing,
as there is nothing that their callers could do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec

from engine.common.network_rules import Address
from engine.errors import EngineError, ServerError, words
from engine.networks import endpoints, requested
from engine.networks.endpoints import Assigned, Network
from engine.networks.publishing import Request
from engine.networks.remote import driver as remote
from engine.networks.remote import links as remote_links
from engine.networks.remote.driver import RemoteDriver
from engine.networks.remote.ipam import RemoteIpam
from engine.plugins.client import Cut, Plugin, Refused, Unanswered
from engine.storage.records import Records
from engine.system.netlink.rtnl import RouteSocket
from engine.system.tasks import spawn
from engine.system.threads import cancelled
from engine.wire.containers import EndpointSettings

_log = logging.getLogger(__name__)

InThread = Callable[..., Awaitable[Any]]


class EndpointRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One endpoint, by the ids of container and network."""

    container: str
    network: str
    name: str
    """The network's name."""
    driver: str = ""
    """Its plugin; empty when the driver is one of the engine's."""
    endpoint: str = ""
    """The endpoint's id, if `driver` is given."""
    source: str = ""
    """The name of its link on the host; empty until there is one."""
    inside: str = ""
    """The name of its link in the sandbox."""
    exposed: bool = False
    """The plugin was asked to connect it to the outside."""
    ipam: str = ""
    addresses: tuple[tuple[str, str], ...] = ()
    """By the plugin `ipam`: the id of the pool, and the address."""


class RemoteEndpoints:
    """One engine's."""

    def __init__(
        self,
        driver: RemoteDriver,
        ipam: RemoteIpam,
        records: Records,
        in_thread: InThread,
        kernel: Callable[[], RouteSocket],
        keys: Path,
    ) -> None:
        """`kernel`: the host's links. `keys`: RUN/netns."""
        self._driver = driver
        self._ipam = ipam
        self._records = records
        self._in_thread = in_thread
        self._kernel = kernel
        self._keys = keys
        self._table = records.table("plugin-endpoint", EndpointRow)
        self._rows: dict[str, dict[str, EndpointRow]] = {}
        """By container and network."""
        self._returning: dict[str, asyncio.Task[None]] = {}
        """By container."""
        self._replaying: asyncio.Task[None] | None = None
        self._locks: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = weakref.WeakValueDictionary()
        """By container and network, held while something is given back: a container's end and the
        removal of its network may want that at the same time.
        """

    def load(self) -> None:
        """At the daemon's start. Raises ServerError when a row cannot be decoded."""
        for row in self._table.load().values():
            self._rows.setdefault(row.container, {})[row.network] = row

    async def settle(self, live: Mapping[str, Collection[str]], networks: Iterable[Network]) -> None:
        """The containers are restored; `live` are the networks of those that run. Replay requests
        to IPAM plugins and give all other endpoints back, in the background.
        """
        networks = [*networks]
        planned = [network for network in networks if network.record.ipam_pools]
        if planned:
            self._replaying = spawn(self._replay_all(planned), "networks: requesting addresses again")
        kept = {self._key(each).name for each, rows in self._rows.items() if any(row.driver for row in rows.values())}
        await self._in_thread(remote_links.hide_all, self._keys, kept)
        for container, rows in [*self._rows.items()]:
            ended = [each for each in rows if each not in live.get(container, ())]
            if ended:
                known = {network.record.id for network in networks}
                work = self._return(container, ended, known)
                task = spawn(work, f"container {container}: endpoints of an earlier run")
                self._returning[container] = task

    async def _return(self, container_id: str, networks: Collection[str], known: Collection[str]) -> None:
        try:
            if self._replaying is not None:  # or it would request their addresses
                await asyncio.wait([self._replaying])
            for network_id in networks:
                await self.detach(container_id, network_id)
                if network_id in known:
                    await self.release(container_id, network_id)
                else:  # another network may have its subnets by now
                    await self._forgotten(container_id, network_id)
        finally:
            self._returning.pop(container_id, None)

    async def _replay_all(self, networks: Iterable[Network]) -> None:
        async def replay(network: Network) -> None:
            try:
                await self.replay(network)
            except EngineError as error:  # again before the next endpoint
                _log.warning("%s", error.message)

        await asyncio.gather(*map(replay, networks))

    def __contains__(self, container_id: object) -> bool:
        """True if plugins have something for the container."""
        return container_id in self._rows

    async def ready(self, container_id: str, network_id: str = "") -> None:
        """Before endpoints are made: what the container had on the network, or (empty) on all, is
        given back, as far as its plugins can be reached now.
        """
        task = self._returning.get(container_id)
        if task is not None:
            await asyncio.wait([task])
        for each in [*self._rows.get(container_id, ())]:
            if network_id in ("", each):
                await self.detach(container_id, each)
                await self.release(container_id, each)

    async def give_up(self, network_id: str) -> None:
        """The network is being removed: give back what its plugins have for it, and forget the
        rest, which ends with the network.
        """
        for container_id in [each for each, rows in self._rows.items() if network_id in rows]:
            await self.ready(container_id, network_id)
            await self._forgotten(container_id, network_id)

    async def _forgotten(self, container_id: str, network_id: str) -> None:
        async with self._row_lock(container_id, network_id):
            if network_id in self._rows.get(container_id, {}):
                await self._detached(container_id, network_id, ipam="", addresses=())

    def _row_lock(self, container_id: str, network_id: str) -> asyncio.Lock:
        return self._locks.setdefault((container_id, network_id), asyncio.Lock())

    async def close(self, remove: bool) -> None:
        """With `remove` no container runs: unmount what is left."""
        for task in (*self._returning.values(), *filter(None, [self._replaying])):
            await cancelled(task)
        if remove:
            await self._in_thread(remote_links.hide_all, self._keys)

    # --- addresses --------------------------------------------------------------------------------

    async def lend(
        self, container_id: str, network: Network, settings: EndpointSettings, mac: str, undo: contextlib.AsyncExitStack
    ) -> tuple[Assigned, str]:
        """Addresses of an endpoint that is about to be made, and its MAC if it has to be a certain
        one, by the network's IPAM plugin.
        """
        record = network.record
        endpoints.check_usable(network)
        static = requested.wanted_addresses(record, settings)
        await self.replay(network)
        plugin = await self._ipam_of(network)
        if (await self._ipam.terms(plugin)).needs_mac and not mac:
            mac = (b"\x02" + secrets.token_bytes(5)).hex(":")
        undo.push_async_callback(self.release, container_id, record.id)
        lent: dict[int, Address] = {}
        for identifier, (pool, _) in zip(record.ipam_pools, network.subnets, strict=True):
            version = pool.subnet.version
            try:
                address = await self._ipam.request(plugin, identifier, static.get(version), mac)
            except EngineError as error:
                raise ServerError(f"network {record.name}: {error.message}") from error
            lent[version] = address
            row = self._row(container_id, network)
            await self._keep(row, ipam=plugin.name, addresses=(*row.addresses, (identifier, str(address))))
            if address not in pool.subnet:
                raise ServerError(
                    f"network {record.name}: IPAM plugin {plugin.name} returned {address}, "
                    f"which is not in {pool.subnet}"
                )
        return lent, mac

    async def release(self, container_id: str, network_id: str) -> None:
        """Give the addresses of an endpoint back."""
        async with self._row_lock(container_id, network_id):
            row = self._rows.get(container_id, {}).get(network_id)
            if row is not None and row.ipam:
                await self._release(row)

    async def _release(self, row: EndpointRow) -> None:
        try:
            plugin = await self._ipam.get(row.ipam)
        except EngineError as error:
            # kept for the next daemon: the plugin may be there again
            _log.warning("network %s: addresses of container %s: %s", row.name, row.container, error.message)
            return
        for identifier, address in row.addresses:
            await self._ipam.release(plugin, row.name, identifier, address)
        await self._forget(row, ipam="", addresses=())

    async def replay(self, network: Network) -> None:
        """See `RemoteIpam.replay`."""
        used = [
            ip_address(address)
            for rows in self._rows.values()
            for identifier, address in (rows[network.record.id].addresses if network.record.id in rows else ())
        ]
        try:
            await self._ipam.replay(network.record, used)
        except EngineError as error:
            raise ServerError(f"network {network.record.name}: {error.message}") from error

    async def _ipam_of(self, network: Network) -> Plugin:
        try:
            return await self._ipam.get(network.record.ipam.driver)
        except EngineError as error:
            raise ServerError(f"network {network.record.name}: {error.message}") from error

    # --- endpoints --------------------------------------------------------------------------------

    async def attach(
        self, container_id: str, network: Network, namespace: int, settings: EndpointSettings, request: Request
    ) -> EndpointSettings:
        """Make an endpoint in the namespace; returns its settings. A failure leaves nothing."""
        record, key = network.record, self._key(container_id)
        plugin = await self._driver.of(record.name, record.driver)
        settings = msgspec.structs.replace(settings, endpoint_id=secrets.token_hex(32))
        where = f"network {record.name}, container {container_id}"
        tell = partial(self._tell, plugin, record.name, record.id, settings.endpoint_id)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._detached, container_id, record.id)
            row = await self._keep(
                self._row(container_id, network), driver=record.driver, endpoint=settings.endpoint_id
            )
            async with _undone(undo, partial(tell, "DeleteEndpoint")):
                answer = await self._driver.create_endpoint(plugin, record, settings, request)
            settings = remote.filled(where, settings, answer)
            try:
                present = await self._in_thread(remote_links.show, namespace, key)
                async with _undone(undo, partial(tell, "Leave")):
                    join = await self._driver.join(plugin, record, settings.endpoint_id, str(key), request)
                joined = remote.joined(where, join)
                if joined.source:
                    interface = endpoints.interface(network, settings)
                    name = remote_links.inner_name(interface.name, joined, present)
                    await self._keep(row, source=joined.source, inside=name)
                    interface = interface._replace(name=name)
                    await self._in_thread(
                        *(remote_links.move_in, self._kernel(), key, joined.source, interface, joined.routes)
                    )
            except OSError as error:
                raise ServerError(f"{where}: {error.strerror or error}") from error
            undo.pop_all()
        gateways = [str(each or "") for each in joined.gateways]
        return msgspec.structs.replace(settings, gateway=gateways[0], ipv6_gateway=gateways[1])

    async def detach(self, container_id: str, network_id: str) -> None:
        """Remove an endpoint; one that is gone is fine.

        A plugin that does not exist or answer is asked again before the next start of the container
        or by the next daemon. So it delays the end of a container by one time limit.
        """
        async with self._row_lock(container_id, network_id):
            row = self._rows.get(container_id, {}).get(network_id)
            if row is not None and row.driver:
                await self._detach(row)

    async def _detach(self, row: EndpointRow) -> None:
        try:
            plugin = await self._driver.get(row.driver)
        except EngineError as error:
            _log.warning("network %s: endpoint of container %s: %s", row.name, row.container, error.message)
            plugin = None
        answered = plugin is not None and await self._leave(plugin, row)
        await self._move_out(row)
        if answered and plugin is not None and await self._tell(plugin, *_names(row), "DeleteEndpoint"):
            await self._detached(row.container, row.network)
        else:
            await self._hide(row.container, but=row.network)

    async def _leave(self, plugin: Plugin, row: EndpointRow) -> bool:
        """Have the plugin take an endpoint out of its sandbox.

        Returns False if it did not answer.
        """
        if row.exposed and not await self._tell(plugin, *_names(row), "RevokeExternalConnectivity"):
            return False
        return await self._tell(plugin, *_names(row), "Leave")

    async def _move_out(self, row: EndpointRow) -> None:
        if row.source:
            try:
                await self._in_thread(remote_links.move_out, self._key(row.container), row.inside, row.source)
            except (EngineError, OSError) as error:
                _log.warning(
                    "network %s: link %s of container %s: %s", row.name, row.source, row.container, words(error)
                )

    async def _detached(self, container_id: str, network_id: str, **more: Any) -> None:
        """The plugin has no endpoint any more. `more`: further changes of the row."""
        row = self._rows[container_id][network_id]
        await self._forget(row, driver="", endpoint="", source="", inside="", exposed=False, **more)
        await self._hide(container_id)

    async def _hide(self, container_id: str, but: str = "") -> None:
        """Remove the sandbox's key unless an endpoint, other than that on `but`, needs it."""
        rows = self._rows.get(container_id, {})
        if not any(row.driver for each, row in rows.items() if each != but):
            try:
                await self._in_thread(remote_links.hide, self._key(container_id))
            except (EngineError, OSError) as error:
                _log.warning("container %s: unmounting its network namespace: %s", container_id, words(error))

    async def _tell(self, plugin: Plugin, network: str, network_id: str, endpoint_id: str, method: str) -> bool:
        """A call that undoes another. A failure is logged. Returns False if there was no answer.

        It is repeated once when the connection is cut: the plugin may have ended, and runs again.
        """
        call = partial(self._driver.tell, plugin, network, method, network_id, endpoint_id)
        try:
            try:
                await call()
            except Cut:
                await call()
        except EngineError as error:
            _log.warning("endpoint %s: %s", endpoint_id, error.message)
            return not isinstance(error, Unanswered)
        return True

    # --- connections from outside -----------------------------------------------------------------

    async def expose(self, container_id: str, outlet: Network | None, request: Request) -> None:
        """Have the plugin of the network of the default route connect the container to the outside,
        with its ports, and no other one. None: another driver does that, or there is no route.
        """
        wanted = outlet.record.id if outlet is not None and outlet.record.remote else ""
        await self.conceal(container_id, wanted)
        row = self._rows.get(container_id, {}).get(wanted)
        if row is None or row.exposed:
            return
        plugin = await self._driver.of(row.name, row.driver)
        row = await self._keep(row, exposed=True)
        name, *ids = _names(row)
        try:
            options = remote.port_options(request)
            await self._driver.tell(plugin, name, "ProgramExternalConnectivity", *ids, Options=options)
        except EngineError as error:
            if not isinstance(error, Refused):
                await self._tell(plugin, *_names(row), "RevokeExternalConnectivity")
            await self._keep(row, exposed=False)
            raise ServerError(
                f"driver failed programming external connectivity on endpoint {container_id} ({row.endpoint}): "
                f"{error.message}"
            ) from error

    async def conceal(self, container_id: str, but: str = "") -> None:
        """Undo `expose` on all networks but that of the id `but`."""
        for network_id, row in [*self._rows.get(container_id, {}).items()]:
            if row.exposed and network_id != but:
                try:
                    plugin = await self._driver.of(row.name, row.driver)
                except EngineError as error:
                    _log.warning("container %s: %s", container_id, error.message)
                    continue
                await self._tell(plugin, *_names(row), "RevokeExternalConnectivity")
                await self._keep(row, exposed=False)

    # --- rows -------------------------------------------------------------------------------------

    def _key(self, container_id: str) -> Path:
        return self._keys / container_id[:12]

    def _row(self, container_id: str, network: Network) -> EndpointRow:
        record = network.record
        kept = self._rows.get(container_id, {}).get(record.id)
        return kept or EndpointRow(container=container_id, network=record.id, name=record.name)

    async def _keep(self, row: EndpointRow, **changes: Any) -> EndpointRow:
        """Write a row, changed; returns it. Raises ServerError: it is in memory then."""
        row = msgspec.structs.replace(row, **changes)
        self._rows.setdefault(row.container, {})[row.network] = row
        await self._records.commit(self._table.put(f"{row.container} {row.network}", row))
        return row

    async def _forget(self, row: EndpointRow, **changes: Any) -> None:
        """Change a row after something was given back; without anything left, remove it. A failure
        is logged: the next daemon gives it back once more.
        """
        row = msgspec.structs.replace(row, **changes)
        change = self._table.put(f"{row.container} {row.network}", row)
        if row.driver or row.ipam:
            self._rows[row.container][row.network] = row
        else:
            del self._rows[row.container][row.network]
            if not self._rows[row.container]:
                del self._rows[row.container]
            change = self._table.delete(f"{row.container} {row.network}")
        try:
            await self._records.commit(change)
        except ServerError as error:
            _log.warning("container %s: %s", row.container, error.message)


def _names(row: EndpointRow) -> tuple[str, str, str]:
    """Of an endpoint: its network's name and id, and its own id."""
    return row.name, row.network, row.endpoint


@contextlib.asynccontextmanager
async def _undone(undo: contextlib.AsyncExitStack, opposite: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """For a call that `opposite` undoes, also when it is unknown whether the plugin has done it."""
    try:
        yield
    except Refused:
        raise
    except BaseException:
        undo.push_async_callback(opposite)
        raise
    undo.push_async_callback(opposite)
