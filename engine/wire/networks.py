"""Networks on the wire, as the newest API version documents them (Docker Engine API, "Network").

Structs name the fields and their defaults and have no behaviour. A pool's reserved addresses have
two names, `AuxAddress` and `AuxiliaryAddresses`. Both are accepted, and the reply has the name that
was given (`docs/COMPATIBILITY.md`).
"""

from __future__ import annotations

import msgspec

from engine.wire.containers import EndpointSettings


class IPAMConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True):
    """One pool: a subnet, the range that addresses are assigned from, the gateway, and reserved
    addresses by name, which are never assigned.
    """

    subnet: str = ""
    ip_range: str = msgspec.field(default="", name="IPRange")
    gateway: str = ""
    auxiliary_addresses: dict[str, str] = msgspec.field(default_factory=dict)
    """Kept under the name that the create body used.

    `AuxAddress` is the name in the documentation of API 1.24.
    """
    aux_address: dict[str, str] = msgspec.field(default_factory=dict)


class IPAM(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    driver: str = "default"
    options: dict[str, str] | None = None
    config: list[IPAMConfig] = msgspec.field(default_factory=list)


class EndpointResource(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """A container in a network; addresses with their prefix length."""

    name: str
    endpoint_id: str = msgspec.field(name="EndpointID")
    mac_address: str = ""
    ipv4_address: str = msgspec.field(default="", name="IPv4Address")
    ipv6_address: str = msgspec.field(default="", name="IPv6Address")


class ConfigReference(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The configuration-only network that another one takes its configuration from; "" for none."""

    network: str = ""


class Network(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """One element of GET /networks."""

    name: str
    id: str
    created: str
    scope: str
    driver: str
    enable_ipv4: bool = msgspec.field(name="EnableIPv4")
    enable_ipv6: bool = msgspec.field(name="EnableIPv6")
    ipam: IPAM = msgspec.field(name="IPAM")
    internal: bool
    attachable: bool
    ingress: bool
    config_from: ConfigReference
    config_only: bool
    options: dict[str, str]
    labels: dict[str, str]


class SubnetStatus(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """Numbers of addresses of a subnet, at most 2**64 - 1."""

    ips_in_use: int = msgspec.field(name="IPsInUse")
    """Assigned or reserved."""
    dynamic_ips_available: int = msgspec.field(name="DynamicIPsAvailable")
    """Those that an endpoint without a static address may get."""


class IPAMStatus(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    subnets: dict[str, SubnetStatus]


class NetworkStatus(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    ipam: IPAMStatus = msgspec.field(name="IPAM")


class NetworkPeer(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """A node of the swarm with endpoints on the network. `ip`: where its packets go to."""

    name: str
    ip: str = msgspec.field(name="IP")


class NetworkTask(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """A task on a network. `info`: the address of its node."""

    name: str
    endpoint_id: str = msgspec.field(name="EndpointID")
    endpoint_ip: str = msgspec.field(name="EndpointIP")
    info: dict[str, str] = msgspec.field(default_factory=dict)


class NetworkService(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """A service on a network, with its virtual address and the ports of mode ingress."""

    vip: str = msgspec.field(name="VIP")
    ports: list[str] = msgspec.field(default_factory=list)
    local_lb_index: int = msgspec.field(default=0, name="LocalLBIndex")
    """Always 0: services have no number here."""
    tasks: list[NetworkTask] = msgspec.field(default_factory=list)


class NetworkInspect(Network, rename="pascal", kw_only=True, frozen=True):
    """GET /networks/{id}."""

    containers: dict[str, EndpointResource]
    peers: list[NetworkPeer] | msgspec.UnsetType = msgspec.UNSET
    """Of networks of a swarm."""
    services: dict[str, NetworkService] | msgspec.UnsetType = msgspec.UNSET
    """On request, of networks of a swarm."""
    status: NetworkStatus | msgspec.UnsetType = msgspec.UNSET


class NetworkCreate(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /networks/create; an empty driver is `bridge`."""

    name: str = ""
    check_duplicate: bool = False
    """Used for requests before 1.25 only."""
    driver: str = ""
    scope: str = ""
    internal: bool = False
    attachable: bool = False
    ingress: bool = False
    config_only: bool = False
    config_from: ConfigReference = ConfigReference()
    ipam: IPAM = msgspec.field(default_factory=IPAM, name="IPAM")
    enable_ipv4: bool | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="EnableIPv4")
    enable_ipv6: bool | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="EnableIPv6")
    options: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class NetworkCreated(msgspec.Struct, rename="pascal", frozen=True):
    id: str
    warning: str


class NetworkConnect(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /networks/{id}/connect."""

    container: str = ""
    endpoint_config: EndpointSettings = msgspec.field(default_factory=EndpointSettings)


class NetworkDisconnect(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /networks/{id}/disconnect."""

    container: str = ""
    force: bool = False


class NetworksPruned(msgspec.Struct, rename="pascal", frozen=True):
    """POST /networks/prune: names, and null when none was removed."""

    networks_deleted: list[str] | None
