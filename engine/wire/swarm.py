"""The swarm and its settings on the wire, as the newest API version documents them (Docker Engine
API, "Swarm"), and what the objects of a swarm have in common.

Structs name the fields and their defaults and have no behaviour. Times are RFC 3339 texts in
objects; durations are nanoseconds. Fields that Docker always sends are `shown`.
"""

from __future__ import annotations

import msgspec

from engine.wire.fields import shown


class Version(msgspec.Struct, rename="pascal", frozen=True, gc=False):
    """The version of an object. An update names the one that it changes."""

    index: int = 0


class Driver(msgspec.Struct, rename="pascal", omit_defaults=True, frozen=True, gc=False):
    """A driver of logs, networks, secrets or templates, and its options."""

    name: str = ""
    options: dict[str, str] = msgspec.field(default_factory=dict)


# --- settings -------------------------------------------------------------------------------------


class OrchestrationConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    task_history_retention_limit: int | None = None
    """Tasks kept per slot or node; negative: all."""


class RaftConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """Zero means the default."""

    snapshot_interval: int = 0
    keep_old_snapshots: int | None = None
    log_entries_for_slow_followers: int = 0
    election_tick: int = shown(0)
    """In seconds, as `heartbeat_tick`."""
    heartbeat_tick: int = shown(0)


class DispatcherConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    heartbeat_period: int = 0


class ExternalCA(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """A CA that signs the certificates of nodes. The protocol is always cfssl."""

    protocol: str = shown("")
    url: str = msgspec.field(name="URL", default="")
    options: dict[str, str] = msgspec.field(default_factory=dict)
    ca_cert: str = msgspec.field(name="CACert", default="")


class CAConfig(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    node_cert_expiry: int = 0
    external_cas: list[ExternalCA] = msgspec.field(default_factory=list, name="ExternalCAs")
    """`ExternalCA` is the name in the documentation of API 1.24."""
    signing_ca_cert: str = msgspec.field(default="", name="SigningCACert")
    signing_ca_key: str = msgspec.field(default="", name="SigningCAKey")
    """Only in requests."""
    force_rotate: int = 0


class TaskDefaults(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    log_driver: Driver | None = None


class EncryptionConfig(msgspec.Struct, rename="pascal", kw_only=True, frozen=True, gc=False):
    auto_lock_managers: bool = False


class SwarmSpec(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """The settings of a swarm: the body of POST /swarm/update, and part of that of init."""

    name: str = ""
    labels: dict[str, str] = shown({})
    orchestration: OrchestrationConfig = shown(OrchestrationConfig())
    raft: RaftConfig = shown(RaftConfig())
    dispatcher: DispatcherConfig = shown(DispatcherConfig())
    ca_config: CAConfig = msgspec.field(default_factory=CAConfig, name="CAConfig")
    task_defaults: TaskDefaults = shown(TaskDefaults())
    encryption_config: EncryptionConfig = shown(EncryptionConfig())


# --- objects --------------------------------------------------------------------------------------


class TLSInfo(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True, frozen=True, gc=False):
    """The root of trust. Binary fields are base64 on the wire."""

    trust_root: str = ""
    cert_issuer_subject: bytes = b""
    """DER of the issuer's name."""
    cert_issuer_public_key: bytes = b""
    """DER of its SubjectPublicKeyInfo."""


class ClusterInfo(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """A swarm without its tokens, as in /info."""

    id: str = msgspec.field(name="ID")
    version: Version = Version()
    created_at: str
    updated_at: str
    spec: SwarmSpec
    tls_info: TLSInfo = msgspec.field(default=TLSInfo(), name="TLSInfo")
    root_rotation_in_progress: bool = False
    default_addr_pool: list[str] = msgspec.field(default_factory=list)
    subnet_size: int = 24
    data_path_port: int = 4789


class JoinTokens(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    worker: str
    manager: str


class Swarm(ClusterInfo, rename="pascal", kw_only=True, frozen=True):
    """GET /swarm."""

    join_tokens: JoinTokens


class Peer(msgspec.Struct, rename="pascal", frozen=True):
    """A manager in /info. `addr`: host:port."""

    node_id: str = msgspec.field(name="NodeID")
    addr: str = ""


class SwarmInfo(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """The manager's part of Swarm in /info. The whole is `wire.system.SwarmInfo`."""

    error: str = ""
    """Why this manager can do nothing, if it cannot."""
    remote_managers: list[Peer] = msgspec.field(default_factory=list)
    nodes: int = 0
    managers: int = 0
    cluster: ClusterInfo | None = None


# --- requests -------------------------------------------------------------------------------------


class InitRequest(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /swarm/init."""

    listen_addr: str = ""
    advertise_addr: str = ""
    data_path_addr: str = ""
    data_path_port: int = 0
    force_new_cluster: bool = False
    spec: SwarmSpec = msgspec.field(default_factory=SwarmSpec)
    auto_lock_managers: bool = False
    availability: str = ""
    default_addr_pool: list[str] = msgspec.field(default_factory=list)
    subnet_size: int = 0


class JoinRequest(msgspec.Struct, rename="pascal", kw_only=True, frozen=True):
    """POST /swarm/join. The token tells the role."""

    listen_addr: str = ""
    advertise_addr: str = ""
    data_path_addr: str = ""
    remote_addrs: list[str] = msgspec.field(default_factory=list)
    """`RemoteAddr` in the description of API 1.24."""
    join_token: str = ""
    availability: str = ""


class UnlockKey(msgspec.Struct, rename="pascal", frozen=True):
    """The body of POST /swarm/unlock, and the reply of GET /swarm/unlockkey."""

    unlock_key: str = ""
