"""Networks as records, predefined and user-defined, and the rules of a create body.

Rules: Docker Engine API 1.24, "Networks", with Docker's error words. Owns: the rows of kind
`network`. Pure but for the store. Not here: the drivers (`bridge.py`, `macvlan.py`), addresses
(`ipam.py`).
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_network

import msgspec

from engine.common.network_rules import (
    PREDEFINED_NAMES,
    SWARM,
    Address,
    Subnet,
    boolean,
    checked_name,
    checked_pool,
    is_size,
    mtu,
    own_options,
    parsed_address,
    with_gateway,
)
from engine.errors import Conflict, Forbidden, InvalidParameter, NotFound, Unimplemented
from engine.storage.records import Records
from engine.wire.networks import IPAM, ConfigReference, IPAMConfig, NetworkCreate

BRIDGE, HOST, NONE = "bridge", "host", "none"

PREDEFINED = ((BRIDGE, "bridge"), (HOST, "host"), (NONE, "null"))
"""Name and driver."""

DEFAULT_MODES = ("", "default", BRIDGE)
"""Values of NetworkMode that mean the default bridge."""

PREFIX = "eth"
"""Interfaces in containers are eth0, eth1, …"""
_PREFIX = re.compile(r"[A-Za-z]{1,11}")

BRIDGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_LEAST_MTU_OF_IPV6 = 1280
"""RFC 8200, 5."""
_MODES = {
    "macvlan": ("bridge", "private", "vepa", "passthru"),
    "ipvlan": ("l2", "l3", "l3s"),
}
"""Modes of the drivers whose links are over a link of the host, the default first."""
_IPVLAN_FLAGS = ("bridge", "private", "vepa")
IPVLAN = "ipvlan"
NO_IPAM = "null"
"""The IPAM driver of networks without subnets, whose driver, a plugin, chooses addresses."""
CONFIGURATION = "null"
"""The driver that a configuration-only network shows."""

_GATEWAY_MODES = ("", "nat", "nat-unprotected", "isolated")
_REFUSED = {
    "bridge.trusted_host_interfaces": ("",),
    "host_ipv4": ("",),
    "host_ipv6": ("",),
}
"""Options of Docker that this engine lacks, with the values that have no effect."""


class NetworkRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One network. `created` is in ns since the epoch. The default bridge's subnet is that of its
    link.
    """

    id: str
    name: str
    driver: str
    created: int
    scope: str = "local"
    internal: bool = False
    attachable: bool = False
    ingress: bool = False
    """A swarm balances published ports on it."""
    config_only: bool = False
    """The network only has configuration for others."""
    config_from: str = ""
    """The name of the network that it has its configuration from."""
    options: dict[str, str] = {}
    labels: dict[str, str] = {}
    enable_ipv4: bool = True
    enable_ipv6: bool = False
    ipam: IPAM = IPAM()
    """As given, with subnets and gateways filled in."""
    chosen_by_user: tuple[int, ...] = ()
    """IP versions whose subnet the user gave: static addresses are allowed there."""
    lent: tuple[str, ...] = ()
    """Addresses such as `10.0.0.1/24` that the engine added to an adopted bridge, removed with the
    network.
    """
    remote: bool = False
    """Its driver is a plugin."""
    ipam_pools: tuple[str, ...] = ()
    """Ids of the subnets in `ipam`, in their order, at the IPAM plugin that has chosen them."""
    parent_made: bool = False
    """True if the engine made the parent of this macvlan network, and removes it with the network.
    """

    @property
    def predefined(self) -> bool:
        return self.name in PREDEFINED_NAMES

    @property
    def imposed(self) -> tuple[int, ...]:
        """The IP versions whose subnet the engine does not choose: the user or a plugin does."""
        return self.versions if self.ipam_pools else self.chosen_by_user

    @property
    def versions(self) -> tuple[int, ...]:
        """The IP versions that the network has."""
        return ((4,) if self.enable_ipv4 else ()) + ((6,) if self.enable_ipv6 else ())


class Overlay(msgspec.Struct, frozen=True, kw_only=True):
    """What a network that spans the nodes of a swarm is on this host."""

    vni: int
    """Number of its VXLAN."""
    port: int
    """UDP port of the VXLAN, the same on all nodes."""
    local: IPv4Address
    """The address by which the other nodes reach this one."""
    encrypted: bool = False
    secret: bytes = b""
    """Of an encrypted one."""
    ingress: bool = False
    """True for the network by which the nodes reach the tasks of published ports."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A network's options as its driver understands them."""

    bridge: str = ""
    """Name of the link; empty: `br-` and the network's id."""
    icc: bool = True
    masquerade: bool = True
    unprotected: tuple[int, ...] = ()
    """IP versions by which other hosts reach every port of the containers."""
    bare: tuple[int, ...] = ()
    """IP versions of which the bridge has no address, so that the host is not on the network."""
    host_binding: str = ""
    mtu: int = 0
    parent: str = ""
    """The parent of a macvlan or ipvlan network; never empty there."""
    dummy: bool = False
    """True if the parent is a dummy link, which leads nowhere."""
    mode: str = ""
    """Of a macvlan or ipvlan network."""
    flag: str = ""
    """Of an ipvlan network: which of its containers reach one another."""
    prefix: str = PREFIX
    """Names of interfaces in containers begin with it."""

    @property
    def layer3(self) -> bool:
        """True for an ipvlan network without neighbours and gateways: its links route."""
        return self.mode in ("l3", "l3s")


def options(record: NetworkRecord) -> Options:
    """The driver's options. Unknown ones are ignored, as in Docker.

    Raises InvalidParameter naming network, option and value.
    """
    if record.remote:
        return Options()  # the plugin gets them as they are
    given = own_options(record.options)
    where = f"network {record.name}"
    for key, harmless in _REFUSED.items():
        if given.get(key, "") not in harmless:
            raise InvalidParameter(f"{where}: option {key}={given[key][:100]} is not supported by this engine")
    if boolean(given.get("bridge.default_bridge"), False, f"{where}: default_bridge"):
        raise Forbidden(f"{where}: there is one default bridge, and it is predefined")
    bridge = given.get("bridge.name", "")
    if bridge and not BRIDGE_NAME.fullmatch(bridge):
        raise InvalidParameter(f"{where}: bridge name {bridge[:100]!r} is not 1 to 15 letters, digits, '_', '.' or '-'")
    binding = given.get("bridge.host_binding_ipv4", "")
    if binding:
        parsed_address(binding, f"{where}: host_binding_ipv4")
    inhibited = (4,) if boolean(given.get("bridge.inhibit_ipv4"), False, f"{where}: inhibit_ipv4") else ()
    gateway_modes = {version: given.get(f"bridge.gateway_mode_ipv{version}", "") for version in (4, 6)}
    for version, mode in gateway_modes.items():
        if mode not in _GATEWAY_MODES:
            raise InvalidParameter(f"{where}: gateway_mode_ipv{version} {mode[:100]!r} is not supported by this engine")
        if mode == "isolated" and not record.internal:
            raise InvalidParameter(f"{where}: gateway mode 'isolated' can only be used for an internal network")
    prefix = given.get("container_iface_prefix", "") or PREFIX
    if not _PREFIX.fullmatch(prefix):
        raise InvalidParameter(f"{where}: container_iface_prefix {prefix[:100]!r} is not 1 to 11 letters")
    mode, flag, parent, dummy = "", "", "", False
    modes = _MODES.get(record.driver)
    if modes is not None:
        mode = record.options.get(f"{record.driver}_mode", "") or modes[0]
        if mode not in modes:
            raise InvalidParameter(f"{where}: requested {record.driver} mode {mode[:100]!r} is not valid")
        parent = record.options.get("parent", "")
        if record.internal or not parent:  # Docker's rule and names
            parent, dummy = f"{'dm' if record.driver == 'macvlan' else 'di'}-{record.id[:12]}", True
    if record.driver == IPVLAN:
        flag = record.options.get("ipvlan_flag", "") or _IPVLAN_FLAGS[0]
        if flag not in _IPVLAN_FLAGS:
            raise InvalidParameter(f"{where}: requested ipvlan flag {flag[:100]!r} is not valid")
    return Options(
        bridge=bridge,
        icc=boolean(given.get("bridge.enable_icc"), True, f"{where}: enable_icc"),
        unprotected=tuple(version for version, mode in gateway_modes.items() if mode == "nat-unprotected"),
        bare=tuple(version for version, mode in gateway_modes.items() if mode == "isolated" or version in inhibited),
        masquerade=boolean(given.get("bridge.enable_ip_masquerade"), True, f"{where}: enable_ip_masquerade"),
        host_binding=binding,
        mtu=mtu(given, where),
        parent=parent,
        dummy=dummy,
        mode=mode,
        flag=flag,
        prefix=prefix,
    )


# --- a create body --------------------------------------------------------------------------------


def plugins(body: NetworkCreate) -> tuple[str, str]:
    """The network plugin and the IPAM plugin that a create body names; "" for parts of the engine
    itself.
    """
    own = body.config_only or body.driver in ("", "bridge", "host", "null", "overlay", *_MODES)
    own_ipam = body.config_only or body.ipam.driver in ("", "default", NO_IPAM)
    return "" if own else body.driver, "" if own_ipam else body.ipam.driver


def checked(body: NetworkCreate, driver_plugin: str = "", ipam_plugin: str = "") -> NetworkRecord:
    """The record of a new network; free subnets are chosen later. `driver_plugin`, `ipam_plugin`:
    full names of the plugins that the body names.

    Raises InvalidParameter, Forbidden (predefined), NotFound (driver), Unimplemented (overlay).
    """
    name = checked_name(body.name)
    driver = body.driver or "bridge"
    if body.config_only:
        if body.internal or body.attachable or body.ingress or body.scope:
            raise Forbidden(
                f"network {name}: configuration network can only contain network specific fields. Network operator "
                "fields like [ ingress | internal | attachable | scope ] are not supported."
            )
        if body.config_from.network:
            raise Forbidden(f"network {name}: a configuration network cannot depend on another configuration network")
        driver = CONFIGURATION
    elif driver in ("host", "null"):
        raise Forbidden(f'network {name}: only one instance of "{driver}" network is allowed')
    elif driver == "overlay":
        raise Unimplemented(
            f'network {name}: driver "overlay": this version has no networks that span the nodes of a swarm'
        )
    elif driver_plugin:
        driver = driver_plugin
    elif driver not in ("bridge", *_MODES):
        raise NotFound(f'network {name}: plugin "{driver[:100]}" not found')
    if body.scope not in ("", "local"):
        raise InvalidParameter(f"network {name}: scope {body.scope[:100]!r}: this engine has local networks alone")
    if body.ingress:
        raise InvalidParameter(f"network {name}: an ingress network needs a swarm")
    ipam_driver = ipam_plugin or body.ipam.driver or "default"
    if ipam_driver not in ("default", NO_IPAM, ipam_plugin):
        raise NotFound(f'network {name}: IPAM plugin "{ipam_driver[:100]}" not found')
    if ipam_driver == NO_IPAM and not (driver_plugin or body.config_only):
        raise InvalidParameter(f"network {name}: {driver} networks need an IPAM driver that has subnets")
    enabled = {version: _enabled(body, version) for version in (4, 6)}
    if not any(enabled.values()):
        raise InvalidParameter(f"network {name}: IPv4 or IPv6 must be enabled")
    pools = [checked_pool(name, config) for config in body.ipam.config]
    # IPv4 first: clients read Config[0].
    given = sorted((pool for pool in pools if pool.subnet), key=lambda pool: ip_network(pool.subnet).version)
    subnets = [ip_network(pool.subnet) for pool in given]
    versions = [subnet.version for subnet in subnets]
    if len(set(versions)) != len(versions) or (len(pools) != len(versions) and 4 in versions):
        raise Forbidden(f"network {name}: {driver} driver doesn't support multiple subnets of one IP version")
    if versions and ipam_driver == NO_IPAM:
        raise InvalidParameter(f"network {name}: subnet {given[0].subnet}: the IPAM driver {NO_IPAM} has no subnets")
    if 4 in versions and not enabled[4]:
        raise InvalidParameter(f"network {name}: subnet {given[0].subnet}: IPv4 is not enabled")
    record = NetworkRecord(
        id=secrets.token_hex(32),
        name=name,
        driver=driver,
        created=time.time_ns(),
        internal=body.internal,
        attachable=body.attachable,
        config_only=body.config_only,
        config_from=body.config_from.network,
        enable_ipv4=enabled[4],
        enable_ipv6=enabled[6],
        options=body.options,
        labels=body.labels,
        ipam=IPAM(driver=ipam_driver, options=body.ipam.options, config=given),
        remote=bool(driver_plugin),
        chosen_by_user=tuple(subnet.version for subnet in subnets if not is_size(subnet)),
    )
    meant = options(record)  # raises for values that are not valid
    if record.enable_ipv6 and 0 < meant.mtu < _LEAST_MTU_OF_IPV6:
        raise InvalidParameter(
            f"network {name}: mtu {meant.mtu} is less than {_LEAST_MTU_OF_IPV6}, the least that IPv6 works with"
        )
    return record


def _enabled(body: NetworkCreate, version: int) -> bool:
    """True if the network has this IP version: by its field, by its option, or by default."""
    given = body.enable_ipv4 if version == 4 else body.enable_ipv6
    if isinstance(given, bool):
        return given
    option = f"enable_ipv{version}"
    return boolean(own_options(body.options).get(option), version == 4, f"network {body.name}: {option}")


def configured_by(body: NetworkCreate, configuration: NetworkRecord) -> NetworkCreate:
    """The body with what a configuration-only network has for it. Raises Forbidden."""
    where = f"network {body.name}"
    if not configuration.config_only:
        raise Forbidden(f"{where}: {configuration.name} is not a configuration network")
    if body.options:
        raise Forbidden(
            f"{where}: network driver options are not supported if the network depends on a configuration network"
        )
    if body.labels or body.ipam.config or body.ipam.options or body.enable_ipv4 is False or body.enable_ipv6 is True:
        raise Forbidden(
            f"{where}: user supplied configurations are not supported if the network depends on a configuration network"
        )
    return msgspec.structs.replace(
        body,
        options=configuration.options,
        labels=configuration.labels,
        ipam=configuration.ipam,
        enable_ipv4=configuration.enable_ipv4,
        enable_ipv6=configuration.enable_ipv6,
        config_from=ConfigReference(network=configuration.name),
    )


def pools(record: NetworkRecord) -> Iterator[tuple[Subnet, Address, IPAMConfig]]:
    """Subnet and gateway of each IP version that the network serves."""
    for config in record.ipam.config:
        subnet = ip_network(config.subnet)
        if subnet.version in record.versions:
            yield subnet, parsed_address(config.gateway, f"network {record.name}: gateway"), config


def without_sizes(record: NetworkRecord) -> tuple[NetworkRecord, dict[int, int]]:
    """The record without the subnets of which only the size is given, and these sizes (prefix
    lengths) by IP version.
    """
    subnets = [ip_network(config.subnet) for config in record.ipam.config]
    sizes: dict[int, int] = {subnet.version: subnet.prefixlen for subnet in subnets if is_size(subnet)}
    config = [each for each, subnet in zip(record.ipam.config, subnets, strict=True) if not is_size(subnet)]
    return msgspec.structs.replace(record, ipam=msgspec.structs.replace(record.ipam, config=config)), sizes


def with_pool(record: NetworkRecord, subnet: IPv4Network | IPv6Network) -> NetworkRecord:
    """The record with a subnet chosen by the engine. IPv4 comes first."""
    config = [*record.ipam.config, IPAMConfig(subnet=str(subnet))]
    config.sort(key=lambda each: ip_network(each.subnet).version)
    return msgspec.structs.replace(record, ipam=msgspec.structs.replace(record.ipam, config=config))


def with_gateways(record: NetworkRecord) -> NetworkRecord:
    """The record with a gateway in each pool, by default the first host that is not excluded."""
    config = [with_gateway(record.name, pool) for pool in record.ipam.config]
    return msgspec.structs.replace(record, ipam=msgspec.structs.replace(record.ipam, config=config))


# --- the list -------------------------------------------------------------------------------------


class NetworkStore:
    """Networks by name, id and id prefix."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._table = records.table("network", NetworkRecord)
        self._all: dict[str, NetworkRecord] = {}
        self._ids: dict[str, list[str]] = {}
        """By name; a name may be given twice (CheckDuplicate)."""

    async def open(self) -> None:
        """Load the records; make the predefined networks that are missing."""
        loaded = self._table.load()
        names = {record.name for record in loaded.values()}
        made = [
            NetworkRecord(id=secrets.token_hex(32), name=name, driver=driver, created=time.time_ns())
            for name, driver in PREDEFINED
            if name not in names
        ]
        await self._records.commit(*(self._table.put(record.id, record) for record in made))
        for record in sorted((*loaded.values(), *made), key=lambda each: each.created):
            self._keep(record)

    def _keep(self, record: NetworkRecord) -> None:
        self._all[record.id] = record
        self._ids.setdefault(record.name, []).append(record.id)

    def _drop(self, record: NetworkRecord) -> None:
        del self._all[record.id]
        self._ids[record.name].remove(record.id)
        if not self._ids[record.name]:
            del self._ids[record.name]

    def __iter__(self) -> Iterator[NetworkRecord]:
        return iter(self._all.values())

    def __contains__(self, network_id: object) -> bool:
        return network_id in self._all

    def show(self, record: NetworkRecord) -> None:
        """Let lookups find a network that is stored elsewhere. Replaces the record of its id."""
        if record.id in self._all:
            self._drop(self._all[record.id])
        self._keep(record)

    def hide(self, network_id: str) -> None:
        """Undo `show`."""
        record = self._all.get(network_id)
        if record is not None:
            self._drop(record)

    def check_duplicate(self, name: str) -> None:
        """Raises Conflict in Docker's words."""
        if name in self._ids:
            raise Conflict(f"network with name {name} already exists")

    def warning(self, name: str) -> str:
        """Docker's warning for a name that is taken already; empty otherwise."""
        ids = self._ids.get(name)
        return f"Network with name {name} (id : {ids[0]}) already exists" if ids else ""

    async def add(self, record: NetworkRecord) -> None:
        """Add a record; it is durable on return."""
        await self._records.commit(self._table.put(record.id, record))
        self._keep(record)

    async def remove(self, record: NetworkRecord) -> None:
        """Remove a record: at once for lookups, durably on return. A failure restores it."""
        self._drop(record)
        try:
            await self._records.commit(self._table.delete(record.id))
        except BaseException:
            self._keep(record)
            raise

    def get(self, text: str) -> NetworkRecord:
        """By full id, name or unique id prefix. A network of this engine comes before one of a
        swarm with the same name.

        Raises NotFound in Docker's words, InvalidParameter when more than one matches.
        """
        if text in self._all:
            return self._all[text]
        ids = self._ids.get(text)
        by = "name"
        if ids is None:
            ids = [each for each in self._all if each.startswith(text)] if text else []
            by = "ID prefix"
        elif len(ids) > 1:
            ids = [each for each in ids if self._all[each].scope != SWARM] or ids
        if len(ids) > 1:
            raise InvalidParameter(f"network {text} is ambiguous ({len(ids)} matches found based on {by})")
        if not ids:
            raise NotFound(f"network {text} not found")
        return self._all[ids[0]]
