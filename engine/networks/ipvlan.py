"""The ipvlan driver: links that share the MAC address of a link of the host.

In mode l2 the LAN sees the addresses of the containers behind the parent's MAC. In the modes l3 and
l3s the parent routes, and containers have no neighbours, no broadcasts and no gateway.

Rules: Docker's ipvlan driver (options `parent`, `ipvlan_mode`, `ipvlan_flag`). An endpoint's link
       exists as long as its namespace. The parent is as for macvlan (`macvlan.py`).

Owns nothing. Threads: any but the event loop's. Raises: as `macvlan.py`.
"""

from __future__ import annotations

import secrets

from engine.networks import endpoints, sandboxes
from engine.networks.endpoints import Network
from engine.networks.macvlan import OverParent
from engine.networks.sandboxes import Interface
from engine.system.netlink import rtnl
from engine.wire.containers import EndpointSettings


class IpvlanDriver(OverParent):
    """One engine's ipvlan networks."""

    def plug(self, network: Network, namespace: int, name: str, interface: Interface) -> str:
        options = network.options
        request = rtnl.create_ipvlan(
            name,
            parent=self.parent(network).ifindex,
            namespace=namespace,
            mode=options.mode,
            flag=options.flag,
            mtu=interface.mtu,
        )
        self.create(network, request)
        try:
            sandboxes.finish(namespace, name, interface)
            if options.layer3 and not network.closed:
                sandboxes.route_by_link(namespace, name, network.pools)
        except BaseException:
            sandboxes.remove(namespace, name)
            raise
        return secrets.token_hex(32)

    def unplug(self, network: Network, namespace: int, settings: EndpointSettings) -> None:
        if namespace >= 0:
            for address in endpoints.addresses(settings):
                sandboxes.remove_by_address(namespace, address)
