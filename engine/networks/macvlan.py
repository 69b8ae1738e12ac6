"""Endpoints of macvlan networks: links of their own MAC over a link of the host, seen by the LAN as hosts of their own.

Rules: Docker's macvlan driver (options `parent`, `macvlan_mode`). A link lives and dies with its namespace; what the host keeps is a parent that
the engine made (`open_parent`), as long as the network.
Everything blocks on the kernel and is called in threads. Raises: InvalidParameter for a parent that is not there, ServerError for what this kernel
lacks; OSError.
"""

from __future__ import annotations

import errno
import secrets

from engine.errors import InvalidParameter, ServerError
from engine.networks import sandboxes
from engine.networks.network import Options
from engine.networks.sandboxes import Interface
from engine.system import netlink
from engine.system.netlink import Netlink


def open_parent(links: Netlink, network: str, options: Options, alias: str) -> bool:
    """See that the parent is there; whether it is the engine's own: a dummy, or the VLAN `eth0.10` of a link `eth0`, made where it is missing.

    Raises InvalidParameter for one that cannot be made; OSError. Nothing is left then.
    """
    name = options.parent
    where = f"network {network}: parent link {name[:100]!r}"
    if len(name.encode()) > 15:
        raise InvalidParameter(f"{where} does not exist on this host: a link's name has at most 15 bytes")
    if name == "lo":
        raise InvalidParameter(f"{where}: loopback interface is not a valid macvlan parent link")
    found = links.link(name)
    if found is not None:
        return found.alias == alias
    if options.dummy:
        request = netlink.create_dummy(name)
    else:
        base, dot, number = name.rpartition(".")
        under = links.link(base) if dot else None
        if under is None:
            raise InvalidParameter(f"{where} does not exist on this host")
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 4094):
            raise InvalidParameter(f"{where} does not exist on this host, and its vlan id must be between 1-4094")
        request = netlink.create_vlan(name, parent=under.ifindex, number=int(number))
    failure = links.outcomes([request])[0]
    if failure is not None:
        if failure.errno == errno.EOPNOTSUPP:
            raise ServerError(f"{where}: this kernel has no links of the kind {request.what.split()[0]}") from failure
        raise failure
    try:
        links.apply(netlink.change_link(name, alias=alias), netlink.change_link(name, up=True))
    except BaseException:
        links.outcomes([netlink.delete_link(name)])
        raise
    return True


def remove_parent(links: Netlink, name: str, alias: str) -> None:
    """Remove a parent that the engine made. One that is not there is fine; one that is another's by now stays."""
    found = links.link(name)
    if found is not None and found.alias == alias:
        failure = links.outcomes([netlink.delete_link(name)])[0]
        if failure is not None and failure.errno != errno.ENODEV:
            raise failure


def plug(links: Netlink, namespace: int, network: str, options: Options, name: str, interface: Interface) -> str:
    """A link over the parent, as `name` in the namespace; returns the new endpoint's id. On failure nothing is left."""
    parent = links.link(options.parent)
    if parent is None:
        raise ServerError(f"network {network}: parent link {options.parent} does not exist on this host")
    request = netlink.create_macvlan(
        name, parent=parent.ifindex, namespace=namespace, mode=options.mode, mac=interface.mac, mtu=interface.mtu
    )
    failure = links.outcomes([request])[0]
    if failure is not None:
        if failure.errno == errno.EOPNOTSUPP:
            raise ServerError(f"network {network}: this kernel has no macvlan") from failure
        raise failure
    try:
        sandboxes.finish(namespace, name, interface)
    except BaseException:
        sandboxes.remove_by_mac(namespace, interface.mac)
        raise
    return secrets.token_hex(32)
