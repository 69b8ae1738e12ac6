"""The macvlan driver: links with MAC addresses of their own over a link of the host, seen by the
LAN as hosts of their own.

Rules: Docker's macvlan driver (options `parent`, `macvlan_mode`). An endpoint's link exists as long
       as its namespace. A parent that the engine made exists as long as the network.

Owns nothing. Threads: any but the event loop's. Raises: InvalidParameter for a parent that does not
exist, ServerError for features that this kernel lacks; OSError.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Sequence

import msgspec

from engine.errors import InvalidParameter, ServerError, words
from engine.networks import host, sandboxes
from engine.networks.driver import Gateways
from engine.networks.endpoints import Network
from engine.networks.network import Options
from engine.networks.sandboxes import Interface
from engine.system import links
from engine.system.netlink import rtnl
from engine.system.netlink.codec import NetlinkError, Request
from engine.system.netlink.rtnl import Link, RouteSocket
from engine.system.user_namespaces import IdMap
from engine.wire.containers import EndpointSettings

_log = logging.getLogger(__name__)


class OverParent:
    """Base of the drivers whose links share a link of the host, the parent."""

    routes = False

    def __init__(self, kernel: RouteSocket, alias: str, ids: IdMap | None = None) -> None:
        """`alias` marks parents that the engine made. `ids`: see `namespaces.new_network`."""
        self.kernel = kernel
        self._ids = ids
        self._alias = alias

    def links(self, network: Network) -> Sequence[str]:
        return (network.options.parent,) if network.record.parent_made else ()

    def make(self, made: Network) -> None:
        parent_made = open_parent(self.kernel, made.record.name, made.options, self._alias)
        made.record = msgspec.structs.replace(made.record, parent_made=parent_made)

    def restore(self, network: Network) -> None:
        if network.record.parent_made:
            open_parent(self.kernel, network.record.name, network.options, self._alias)

    def unmake(self, network: Network) -> None:
        if network.record.parent_made:
            try:
                remove_parent(self.kernel, network.options.parent, self._alias)
            except OSError as error:
                _log.warning("network %s: %s", network.record.name, words(error))

    def slow_to_unmake(self, network: Network) -> bool:
        return False

    def new_sandbox(self, network: Network, interface: Interface, gateways: Gateways) -> tuple[int, str]:
        namespace = sandboxes.empty(self._ids)
        try:
            endpoint_id = self.plug(network, namespace, interface.name or sandboxes.INSIDE, interface)
            if gateways:
                sandboxes.route(namespace, gateways)
        except BaseException:
            sandboxes.close(namespace)
            raise
        return namespace, endpoint_id

    def plug(self, network: Network, namespace: int, name: str, interface: Interface) -> str:
        raise NotImplementedError

    def parent(self, network: Network) -> Link:
        """Raises ServerError when it is missing."""
        parent = self.kernel.link(network.options.parent)
        if parent is None:
            raise ServerError(
                f"network {network.record.name}: parent link {network.options.parent} does not exist on this host"
            )
        return parent

    def create(self, network: Network, request: Request) -> None:
        """Create a link. Raises ServerError when the kernel lacks this kind of link, OSError."""
        failure = self.kernel.outcomes([request])[0]
        if failure is None:
            return
        if failure.errno == errno.EOPNOTSUPP:
            raise ServerError(f"network {network.record.name}: this kernel has no {network.record.driver}") from failure
        raise failure

    def released(self, network: Network, settings: EndpointSettings) -> None:
        """The kernel removes the link with its namespace."""


class MacvlanDriver(OverParent):
    """One engine's macvlan networks."""

    def plug(self, network: Network, namespace: int, name: str, interface: Interface) -> str:
        parent, mode = self.parent(network).ifindex, network.options.mode
        request = rtnl.create_macvlan(
            name, parent=parent, namespace=namespace, mode=mode, mac=interface.mac, mtu=interface.mtu
        )
        self.create(network, request)
        try:
            sandboxes.finish(namespace, name, interface)
        except BaseException:
            sandboxes.remove_by_mac(namespace, interface.mac)
            raise
        return secrets.token_hex(32)

    def unplug(self, network: Network, namespace: int, settings: EndpointSettings) -> None:
        if namespace >= 0:
            sandboxes.remove_by_mac(namespace, settings.mac_address)


def open_parent(kernel: RouteSocket, network: str, options: Options, alias: str) -> bool:
    """Make sure that the parent exists. Returns True if the engine made it, now or before.

    It makes a dummy, or the VLAN `eth0.10` of a link `eth0`. Raises InvalidParameter for any other
    missing parent; OSError. A failure leaves nothing behind.
    """
    name = options.parent
    where = f"network {network}: parent link {name[:100]!r}"
    if len(name.encode()) > 15:
        raise InvalidParameter(f"{where} does not exist on this host: a link's name has at most 15 bytes")
    if name == "lo":
        raise InvalidParameter(f"{where}: loopback interface is not a valid parent link")
    parent = kernel.link(name)
    if parent is not None:
        return parent.alias == alias
    kind, attributes = "dummy", {}
    if not options.dummy:
        base, dot, number = name.rpartition(".")
        under = kernel.link(base) if dot else None
        if under is None:
            raise InvalidParameter(f"{where} does not exist on this host")
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 4094):
            raise InvalidParameter(f"{where} does not exist on this host, and its vlan id must be between 1-4094")
        kind, attributes = "vlan", {"link": under.ifindex, "vlan_id": int(number)}
    try:
        links.create(name, kind, **attributes)
    except NetlinkError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise ServerError(f"{where}: this kernel has no links of the kind {kind}") from error
        raise
    try:
        host.ignore_router_advertisements(name)
        kernel.apply(rtnl.change_link(name, alias=alias), rtnl.change_link(name, up=True))
    except BaseException:
        kernel.outcomes([rtnl.delete_link(name)])
        raise
    return True


def remove_parent(kernel: RouteSocket, name: str, alias: str) -> None:
    """Remove a parent that the engine made.

    A missing one is fine; another program's link of that name stays.
    """
    parent = kernel.link(name)
    if parent is not None and parent.alias == alias:
        failure = kernel.outcomes([rtnl.delete_link(name)])[0]
        if failure is not None and failure.errno != errno.ENODEV:
            raise failure
