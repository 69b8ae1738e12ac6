"""The interface of a network driver: the links of a network on this host, and endpoints in
sandboxes.

`drivers.py` chooses a driver by the record's `driver`; the rest of the package makes no other
distinction. Every method blocks on the kernel and is called in threads, several at once.

Raises, in every method: EngineError kinds that name the network, and OSError, which the caller
turns into a kind with the container's name. A failure leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

from engine.networks.endpoints import Network
from engine.networks.sandboxes import Interface
from engine.wire.containers import EndpointSettings

Gateways = Sequence[IPv4Address | IPv6Address]


class SubnetContested(Exception):
    """Another engine of this host chose the same subnet at the same moment and keeps it."""


class Driver(Protocol):
    """One per engine and driver name."""

    @property
    def routes(self) -> bool:
        """True if the host is the router of its networks, so that published ports lead to them."""
        ...

    def links(self, network: Network) -> Sequence[str]:
        """Names of links on the host that the engine may have made for the network."""
        ...

    def make(self, made: Network) -> None:
        """Make a new network's links and rules; sets `made.link` and the fields of `made.record`
        that describe them.

        Raises SubnetContested.
        """
        ...

    def restore(self, network: Network) -> None:
        """Find or recreate the links of a network that was made before this daemon started."""
        ...

    def unmake(self, network: Network) -> None:
        """Remove everything that `make` made. Failures are logged."""
        ...

    def slow_to_unmake(self, network: Network) -> bool:
        """True if `unmake` takes too long for a client to wait."""
        ...

    def new_sandbox(self, network: Network, interface: Interface, gateways: Gateways) -> tuple[int, str]:
        """A new network namespace with an endpoint as eth0 and default routes.

        Returns its descriptor, owned by the caller, and the endpoint id.
        """
        ...

    def plug(self, network: Network, namespace: int, name: str, interface: Interface) -> str:
        """Add an endpoint to a namespace, as link `name`; returns the endpoint id."""
        ...

    def unplug(self, network: Network, namespace: int, settings: EndpointSettings) -> None:
        """Remove an endpoint from a namespace that stays in use.

        An endpoint that is already gone is fine.
        """
        ...

    def released(self, network: Network, settings: EndpointSettings) -> None:
        """The endpoint's namespace was released. Does not block."""
        ...
