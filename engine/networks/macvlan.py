"""Endpoints of macvlan networks: links of their own MAC over a link of the host, seen by the LAN as hosts of their own.

Rules: Docker's macvlan driver (options `parent`, `macvlan_mode`). The host keeps nothing: a link lives and dies with its namespace.
Everything blocks on the kernel and is called in threads. Raises: InvalidParameter for a parent that is not there; OSError.
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


def check(links: Netlink, network: str, options: Options) -> None:
    """Raises InvalidParameter unless the parent is there."""
    if links.link(options.parent) is None:
        raise InvalidParameter(f"network {network}: parent link {options.parent[:100]!r} does not exist on this host")


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
