"""The default bridge network: a bridge, its subnet, NAT to the outside, and an endpoint per container.

Rules: what Docker documents for the `bridge` network: containers reach each other, the gateway, the host and by masquerade the outside; the
outside reaches no container unless asked. Everything here is derived: an existing bridge keeps its own address as subnet, running
containers bring their addresses back at boot (`restore`).

Owns: the bridge link that it made (known by its alias), the nftables table of that bridge, the sandboxes of containers. Not here: published ports,
names, networks of users. Raises: ServerError and InvalidParameter that name network and container.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import AddressValueError, IPv4Address, IPv4Interface, IPv4Network, NetmaskValueError
from pathlib import Path
from typing import NamedTuple, TypeVar

from engine.config import Config
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.networks import sandboxes
from engine.networks.ipam import AddressPool, free_subnet, mac_address
from engine.networks.network import BRIDGE, NetworkStore
from engine.networks.sandboxes import BridgeFull, Stock
from engine.storage.records import Records
from engine.system import netfilter, netlink
from engine.system.netlink import Netlink
from engine.wire.containers import EndpointSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALIAS = "engined"
"""ifalias of a bridge that the engine made and may remove."""

WORKERS = 4
"""Threads that wait for the kernel; more would only queue at its one network lock."""

_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_HAS_IPV6 = Path("/proc/sys/net/ipv6")
_BRIDGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")

_DEFAULT_MODES = ("", "default", BRIDGE)


class Sandbox(NamedTuple):
    """What a container gets. `path` is empty for one restored at boot: its namespace is the running container's own."""

    path: str
    endpoint: EndpointSettings


class _Held(NamedTuple):
    address: IPv4Address
    endpoint_id: str
    sandbox: sandboxes.Sandbox | None


class BridgeNetwork:
    """The network `bridge`, and the names and ids of the other predefined ones."""

    def __init__(self, config: Config, records: Records) -> None:
        if not _BRIDGE_NAME.fullmatch(config.bridge):
            raise InvalidParameter(
                f"bridge {config.bridge!r}: the name must be 1 to 15 letters, digits, '_', '.' or '-'"
            )
        self.name = config.bridge
        self.networks = NetworkStore(records)
        self._configured = _subnet(config.bridge_subnet)
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="network")
        self._links: Netlink | None = None
        self._stock: Stock | None = None
        self._addresses: AddressPool | None = None
        self._interface: IPv4Interface | None = None
        self._held: dict[str, _Held] = {}

    async def open(self) -> None:
        """Make or adopt the bridge, pick its subnet, let traffic out. Raises ServerError with the kernel's reason."""
        await self.networks.open()
        try:
            await self._in_thread(self._open)
        except OSError as error:
            raise ServerError(f"bridge {self.name}: {error.strerror or error}") from error

    @property
    def gateway(self) -> IPv4Address:
        assert self._interface is not None
        return self._interface.ip

    @property
    def subnet(self) -> IPv4Network:
        assert self._interface is not None
        return self._interface.network

    # --- names --------------------------------------------------------------------------------------------------------

    def id_of(self, name: str) -> str:
        """The id of a network by any of its names. Raises NotFound."""
        return self.networks.get(self.name_of(name)).id

    def name_of(self, mode: str) -> str:
        """The name of the network that a NetworkMode or an id means; what is unknown is given back as it is."""
        if mode in _DEFAULT_MODES:
            return BRIDGE
        try:
            return self.networks.get(mode).name
        except (NotFound, InvalidParameter):
            return mode

    def check_mode(self, mode: str) -> None:
        """Raises NotFound for a network that does not exist."""
        self.networks.get(self.name_of(mode))

    # --- endpoints ----------------------------------------------------------------------------------------------------

    async def endpoint(self, container_id: str, mac: str = "") -> Sandbox:
        """A sandbox with an address for a container that starts. A failure takes everything back.

        Raises InvalidParameter for a bad MAC, ServerError when addresses or ports of the bridge are exhausted or the kernel refuses.
        """
        assert self._addresses is not None
        wanted = _checked_mac(mac)
        if container_id in self._held:
            await self.release(container_id)
        address = self._addresses.take()
        try:
            held = await self._connected(address, wanted or mac_address(address))
        except BaseException as error:
            self._addresses.give(address)
            if isinstance(error, BridgeFull):
                raise ServerError(
                    f"network {BRIDGE}, container {container_id}: {error.strerror}; a bridge takes no more containers than that"
                ) from error
            if isinstance(error, OSError):
                raise ServerError(f"network {BRIDGE}, container {container_id}: {error.strerror or error}") from error
            raise
        assert held.sandbox is not None
        self._held[container_id] = held
        return Sandbox(held.sandbox.path, self._settings(held, wanted or mac_address(address)))

    async def _connected(self, address: IPv4Address, mac: str) -> _Held:
        """`_connect` in a thread; when the caller is cancelled meanwhile, what the thread still brings is closed."""
        connecting = asyncio.ensure_future(self._in_thread(self._connect, address, mac))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(_close_unwanted)
            raise

    async def release(self, container_id: str) -> None:
        """Take back what a container had here. One that has nothing is fine."""
        held = self._held.pop(container_id, None)
        if held is None:
            return
        assert self._addresses is not None and self._stock is not None
        if held.sandbox is not None:
            held.sandbox.close()
        self._addresses.give(held.address)
        self._stock.released((held.endpoint_id,))

    async def restore(self, container_id: str, endpoint: EndpointSettings) -> Sandbox:
        """Know again the endpoint of a container that ran on while no daemon was there. Its address is its own even outside today's subnet."""
        assert self._addresses is not None
        address = IPv4Address(endpoint.ip_address)
        if container_id not in self._held:
            try:
                self._addresses.claim(address)
            except InvalidParameter as error:
                logger.warning("container %s keeps its address: %s", container_id, error.message)
            self._held[container_id] = _Held(address, endpoint.endpoint_id, None)
        return Sandbox("", endpoint)

    async def close(self, remove: bool) -> None:
        """Let go of the sandboxes; with `remove` also take down the bridge, when the engine made it, and its rules."""
        for held in self._held.values():
            if held.sandbox is not None:
                held.sandbox.close()
        await self._in_thread(self._close, remove)
        self._held.clear()
        self._workers.shutdown()

    # --- in threads ---------------------------------------------------------------------------------------------------

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    def _connect(self, address: IPv4Address, mac: str) -> _Held:
        assert self._stock is not None
        sandbox = self._stock.take()
        try:
            sandbox.configure(IPv4Interface((address, self.subnet.prefixlen)), self.gateway, mac)
        except BaseException:
            sandbox.close()
            raise
        return _Held(address, sandbox.endpoint_id, sandbox)

    def _open(self) -> None:
        links = self._links = Netlink()
        bridge = links.link(self.name)
        if bridge is None:
            # A MAC of its own, the same at every start, so that ARP entries of containers outlive the daemon.
            mac = "02:42:" + hashlib.sha256(self.name.encode()).digest()[:4].hex(":")
            links.apply(netlink.create_bridge(self.name, mac=mac), netlink.change_link(self.name, alias=ALIAS))
            bridge = links.link(self.name)
            assert bridge is not None
        elif bridge.kind != "bridge":
            raise ServerError(
                f"bridge {self.name}: a link of that name exists and is no bridge ({bridge.kind or 'physical'})"
            )
        own = [address.interface for address in links.addresses(bridge.ifindex)]
        self._interface = interface = self._chosen(links, own)
        if not own:
            links.apply(netlink.add_address(bridge.ifindex, interface))
        links.apply(netlink.change_link(self.name, up=True, without_ipv6_address=_HAS_IPV6.exists()))
        self._addresses = AddressPool(BRIDGE, interface.network, (interface.ip,))
        _forward()
        self._let_out(interface.network)
        self._stock = Stock(links, self.name, bridge.ifindex)

    def _chosen(self, links: Netlink, own: list[IPv4Interface]) -> IPv4Interface:
        wanted = self._configured
        if own:
            if wanted is not None and wanted.network != own[0].network:
                logger.warning(
                    "bridge %s keeps its subnet %s, not %s: remove the bridge to change it",
                    self.name,
                    own[0].network,
                    wanted,
                )
            return own[0]
        if wanted is not None:
            return wanted
        taken = [*links.routes(), *(address.interface.network for address in links.addresses())]
        subnet = free_subnet(taken)
        return IPv4Interface((subnet[1], subnet.prefixlen))

    @property
    def _table(self) -> str:
        """The alphabet of bridge names (`_BRIDGE_NAME`) is a part of nftables' own for names."""
        return f"engined-{self.name}"

    def _let_out(self, subnet: IPv4Network) -> None:
        rules = f"""
            add table inet {self._table}
            delete table inet {self._table}
            table inet {self._table} {{
                chain postrouting {{
                    type nat hook postrouting priority srcnat; policy accept;
                    ip saddr {subnet} oifname != "{self.name}" masquerade
                }}
                chain forward {{
                    type filter hook forward priority filter; policy accept;
                    oifname "{self.name}" iifname "{self.name}" accept
                    oifname "{self.name}" ct state established,related accept
                    oifname "{self.name}" drop
                    iifname "{self.name}" accept
                }}
            }}
            """
        try:
            netfilter.run(rules)
        except netfilter.NetfilterError as error:
            logger.warning("bridge %s: no masquerade, containers do not reach beyond this host: %s", self.name, error)

    def _close(self, remove: bool) -> None:
        if self._stock is not None:
            self._stock.close()
        if self._links is None:
            return
        if remove:
            bridge = self._links.link(self.name)
            if bridge is not None and bridge.alias == ALIAS:
                outcome = self._links.outcomes([netlink.delete_link(self.name)])[0]
                if outcome is not None and outcome.errno != errno.ENODEV:
                    logger.warning("bridge %s: %s", self.name, outcome)
            if netfilter.available():
                try:
                    netfilter.run(f"add table inet {self._table}\ndelete table inet {self._table}")
                except netfilter.NetfilterError as error:
                    logger.warning("bridge %s: rules stay: %s", self.name, error)
        self._links.close()
        self._links = None

    def _settings(self, held: _Held, mac: str) -> EndpointSettings:
        return EndpointSettings(
            network_id=self.id_of(BRIDGE),
            endpoint_id=held.endpoint_id,
            gateway=str(self.gateway),
            ip_address=str(held.address),
            ip_prefix_len=self.subnet.prefixlen,
            mac_address=mac,
        )


def _close_unwanted(connecting: asyncio.Future[_Held]) -> None:
    if not connecting.cancelled() and connecting.exception() is None and (sandbox := connecting.result().sandbox):
        sandbox.close()


def _forward() -> None:
    if _FORWARD.read_text().strip() == "0":
        _FORWARD.write_text("1")
        logger.info("net.ipv4.ip_forward switched on for this host")


def _subnet(text: str) -> IPv4Interface | None:
    """`172.30.0.0/16` (gateway is its first host) or `172.30.0.5/16` (gateway is that address)."""
    if not text:
        return None
    try:
        interface = IPv4Interface(text)
    except (AddressValueError, NetmaskValueError, ValueError) as error:
        raise InvalidParameter(f"bridge subnet {text!r} is no IPv4 subnet: {error}") from error
    network = interface.network
    if network.prefixlen > 30:
        raise InvalidParameter(f"bridge subnet {text!r} has no room for containers")
    if interface.ip == network.broadcast_address:
        raise InvalidParameter(f"bridge subnet {text!r}: the gateway can't be the broadcast address")
    return IPv4Interface((network[1], network.prefixlen)) if interface.ip == network.network_address else interface


def _checked_mac(text: str) -> str:
    mac = text.lower().replace("-", ":")
    if not mac:
        return ""
    if not _MAC.fullmatch(mac) or int(mac[:2], 16) & 1:
        raise InvalidParameter(f"MacAddress {text!r}: not a unicast MAC address such as 02:42:ac:11:00:02")
    return mac
