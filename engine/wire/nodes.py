"""Nodes on the wire, as the newest API version documents them (Docker Engine API, "Node").

Structs name the fields and their defaults and have no behaviour.
"""

from __future__ import annotations

import msgspec

from engine.wire.fields import shown
from engine.wire.swarm import TLSInfo, Version


class Platform(msgspec.Struct, rename="pascal", omit_defaults=True, frozen=True, gc=False):
    """Of a node, `x86_64` and `linux`; of a service's image, `amd64` and `linux`."""

    architecture: str = ""
    os: str = msgspec.field(default="", name="OS")


class NamedResource(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    """One item of a kind: GPU=UUID1."""

    kind: str = ""
    value: str = ""


class DiscreteResource(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    """A number of equal items: SSD=3."""

    kind: str = ""
    value: int = 0


class GenericResource(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """One of both is given."""

    named_resource_spec: NamedResource | None = None
    discrete_resource_spec: DiscreteResource | None = None


class Resources(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """What a node has, or a task reserves."""

    nano_cpus: int = msgspec.field(default=0, name="NanoCPUs")
    """`NanoCPU` is the name in the service documentation of API 1.24."""
    memory_bytes: int = 0
    generic_resources: list[GenericResource] = msgspec.field(default_factory=list)


class EnginePlugin(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    """`type`: Volume, Network, Log, Authorization."""

    type: str = ""
    name: str = ""


class EngineDescription(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    engine_version: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    plugins: list[EnginePlugin] = msgspec.field(default_factory=list)


class NodeDescription(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """What a node reports of itself."""

    hostname: str = ""
    platform: Platform = msgspec.field(default_factory=Platform)
    resources: Resources = msgspec.field(default_factory=Resources)
    engine: EngineDescription = msgspec.field(default_factory=EngineDescription)
    tls_info: TLSInfo = msgspec.field(default_factory=TLSInfo, name="TLSInfo")


class NodeSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """What the operator wants of a node. The body of POST /nodes/{id}/update."""

    name: str = ""
    labels: dict[str, str] = shown({})
    role: str = ""
    """worker or manager."""
    availability: str = ""
    """active, pause or drain."""


class NodeStatus(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    state: str = ""
    """unknown, down, ready, disconnected."""
    message: str = ""
    addr: str = ""


class ManagerStatus(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    leader: bool = False
    reachability: str = ""
    """unknown, unreachable, reachable."""
    addr: str = ""


class Node(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True):
    """One element of GET /nodes. Managers alone have a `manager_status`."""

    id: str = msgspec.field(name="ID")
    version: Version = msgspec.field(default_factory=Version)
    created_at: str
    updated_at: str
    spec: NodeSpec
    description: NodeDescription = msgspec.field(default_factory=NodeDescription)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)
    manager_status: ManagerStatus | None = None
