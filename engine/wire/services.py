"""Services on the wire, as the newest API version documents them (Docker Engine API, "Service").

Structs name the fields and their defaults and have no behaviour.
"""

from __future__ import annotations

import msgspec

from engine.wire.fields import shown
from engine.wire.swarm import Version
from engine.wire.tasks import NetworkAttachmentConfig, PortConfig, TaskSpec


class ReplicatedService(msgspec.Struct, rename="pascal", omit_defaults=True, frozen=True, gc=False):
    replicas: int | None = None
    """None means 1."""


class GlobalService(msgspec.Struct, frozen=True, gc=False):
    """One task on each node."""


class ReplicatedJob(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    max_concurrent: int | None = None
    """None means 1."""
    total_completions: int | None = None
    """None means `max_concurrent`."""


class GlobalJob(msgspec.Struct, frozen=True, gc=False):
    """One task on each node, which runs to its end."""


class ServiceMode(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """One of these; none means replicated."""

    replicated: ReplicatedService | None = None
    global_: GlobalService | None = msgspec.field(default=None, name="Global")
    replicated_job: ReplicatedJob | None = None
    global_job: GlobalJob | None = None


class UpdateConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """How an update or a rollback proceeds."""

    parallelism: int = shown(0)
    """0 means all at once."""
    delay: int = 0
    failure_action: str = ""
    """pause, continue, rollback; a rollback itself has no rollback."""
    monitor: int = 0
    max_failure_ratio: float = shown(0.0)
    order: str = shown("")
    """stop-first, start-first."""


class EndpointSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    mode: str = ""
    """vip, dnsrr."""
    ports: list[PortConfig] = msgspec.field(default_factory=list)


class VirtualIP(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    network_id: str = msgspec.field(default="", name="NetworkID")
    addr: str = ""
    """With its prefix length."""


class Endpoint(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    spec: EndpointSpec = msgspec.field(default_factory=EndpointSpec)
    ports: list[PortConfig] = msgspec.field(default_factory=list)
    virtual_ips: list[VirtualIP] = msgspec.field(default_factory=list, name="VirtualIPs")


class ServiceSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """The body of POST /services/create and /services/{id}/update."""

    name: str = ""
    labels: dict[str, str] = shown({})
    task_template: TaskSpec = msgspec.field(default_factory=TaskSpec)
    mode: ServiceMode = msgspec.field(default_factory=ServiceMode)
    update_config: UpdateConfig | None = None
    rollback_config: UpdateConfig | None = None
    networks: list[NetworkAttachmentConfig] = msgspec.field(default_factory=list)
    """The older place of `task_template.networks`."""
    endpoint_spec: EndpointSpec | None = None


class UpdateStatus(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    state: str = ""
    """updating, paused, completed, rollback_started, rollback_paused, rollback_completed."""
    started_at: str = ""
    completed_at: str = ""
    message: str = ""


class ServiceStatus(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    """Numbers of tasks, on request."""

    running_tasks: int = 0
    desired_tasks: int = 0
    completed_tasks: int = 0


class JobStatus(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    job_iteration: Version = Version()
    last_execution: str = "0001-01-01T00:00:00Z"


class Service(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """One element of GET /services."""

    id: str = msgspec.field(name="ID")
    version: Version = msgspec.field(default_factory=Version)
    created_at: str
    updated_at: str
    spec: ServiceSpec
    previous_spec: ServiceSpec | None = None
    endpoint: Endpoint = msgspec.field(default_factory=Endpoint)
    update_status: UpdateStatus | None = None
    service_status: ServiceStatus | None = None
    job_status: JobStatus | None = None


class ServiceCreated(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """`warnings`: null when there are none, as Docker sends it."""

    id: str = msgspec.field(name="ID")
    warnings: list[str] | None = None


class ServiceUpdated(msgspec.Struct, rename="pascal", frozen=True):
    warnings: list[str] | None = None
