"""The records of a swarm and their keys in etcd.

```
/swarm                cluster: spec, tokens, root certificate, epoch       any manager
/ca/key               key of the root certificate                          init, rotation
/dek                  key that secrets are encrypted with                  init
/leader               the leading manager; its CreateRevision fences       leader
/m/<node>             a manager's address and etcd member; its presence    that manager, lease
/n/<node>             spec and role: `Version.Index` of the API            any manager
/nd/<node>            description, status, session                         owner of the session
/s/<service>          spec: `Version.Index` of the API                     any manager
/se/<service>         update status, endpoint                              leader
/sa/<service>         registry authorization                               any manager
/sp/<service>/<n>     spec versions that tasks refer to                    leader
/t/<task>             desired state, slot, node                            leader
/ts/<task>            observed state                                       owner of the session
/sec/<id> /cfg/<id>   secrets (data encrypted) and configs                 any manager
/net/<network>        overlay networks with their subnets and VNI          any manager
/a/<attachment>       a container on an attachable network           owner of the session, leader
/x/<kind>/<name>      uniqueness of names and ports; barred nodes          with the object
/w/<node>             its revision is that manager's turn (`turns.py`)     that manager
```

There are hundreds of thousands of some records. None can be part of a cycle, so the garbage
collector does not look at them (`gc=False`).

Values are MessagePack arrays, so fields are added at the end and have defaults. Times are
nanoseconds since the epoch. Objects of the API (specs, descriptions) are kept as the structs of
`wire/`, as maps.

Not here: etcd (`etcd.py`), the cache and transactions (`store.py`).
"""

from __future__ import annotations

import secrets
from typing import Generic, TypeVar

import msgspec

from engine.swarm_session.states import Availability, NodeState, Role, TaskState
from engine.wire.nodes import GenericResource, NodeDescription
from engine.wire.secrets import ConfigSpec, SecretSpec
from engine.wire.services import Endpoint, ServiceSpec
from engine.wire.swarm import SwarmSpec
from engine.wire.tasks import PortConfig, PortStatus

R = TypeVar("R", bound=msgspec.Struct)

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 25


def new_id() -> str:
    """25 characters of base 36, as swarmkit's: 128 random bits."""
    return base36(secrets.randbits(128), ID_LENGTH)


def base36(number: int, length: int) -> str:
    """`number` with digits 0-9a-z, padded with zeros to `length`."""
    digits = []
    while number:
        number, digit = divmod(number, 36)
        digits.append(_LETTERS[digit])
    return "".join(reversed(digits)).rjust(length, "0")


class Cluster(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The swarm itself. `id` is O of every certificate."""

    id: str
    created: int
    updated: int
    spec: SwarmSpec
    root: str
    """PEM of the root certificate, which the tokens name. During a rotation nodes trust others too
    (`roots.py`).
    """
    worker_token: str
    manager_token: str
    epoch: int = 0
    """Raised by a forced new cluster. Agents refuse a smaller one than they have seen."""
    address_pool: tuple[str, ...] = ()
    subnet_size: int = 24
    data_path_port: int = 4789
    rotation: str = ""
    """PEM of the root that a rotation leads to; "" when none runs."""
    cross_signed: str = ""
    """`rotation`, signed by `root`."""
    force_rotate: int = 0
    abandoned: tuple[str, ...] = ()
    """PEM of the roots that rotations led to which did not end: nodes may have certificates of
    them.
    """
    issuer_changes: int = 0
    """How often certificates have come from another root before a rotation had ended."""


class CAKey(msgspec.Struct, array_like=True, frozen=True):
    """PEM of the root's private key; "" when only an external CA has it. `next`: of a rotation."""

    key: str
    next: str = ""


class DataKey(msgspec.Struct, array_like=True, frozen=True):
    """32 bytes for AES-GCM."""

    key: bytes


class Leader(msgspec.Struct, array_like=True, frozen=True):
    node: str
    term: int


class ManagerPresence(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Under the manager's own lease, so that it is absent when the manager is."""

    address: str
    """host:port for agents and managers."""
    member: int
    """Id of its etcd member."""


class NodeRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """What the operator wants of a node."""

    created: int
    updated: int
    name: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    role: Role = Role.WORKER
    """The wish. The certificate's OU is the fact."""
    availability: Availability = Availability.ACTIVE


class NodeData(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """What the node reports of itself, and what its manager observes."""

    description: NodeDescription | None = None
    state: NodeState = NodeState.UNKNOWN
    message: str = ""
    address: str = ""
    """As the manager sees it, without a port."""
    owner: str = ""
    """Manager that has its session; "" when none has."""
    session: str = ""
    since: int = 0
    """When `state` was entered."""
    role: Role = Role.WORKER
    """OU of the certificate that it last connected with."""
    certificate: str = ""
    """SHA-256 of the root that signed it, which tells when a rotation is complete."""
    manager_address: str = ""
    """host:port that its manager is, or would be, reached at."""
    data_address: str = ""
    """Where its VXLAN packets go to; "" for `address`."""
    features: tuple[str, ...] = ()
    """What its kernel has of: overlay, esp, egress."""
    subnets: tuple[str, ...] = ()
    """Local IPv4 subnets, which new networks of the swarm keep away from."""
    issuer_changes: int = 0
    """`Cluster.issuer_changes` when it last asked for a certificate."""


class ServiceRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    created: int
    updated: int
    spec: ServiceSpec
    """Networks, secrets and configs are resolved to ids."""
    previous: ServiceSpec | None = None
    """For a rollback."""
    version: int = 1
    """Counts the specs of this service. Tasks refer to it, and `/sp/<service>/<n>` keeps it."""
    iteration: int = 0
    """Of a job."""
    rollback: bool = False
    """`spec` was put back by a rollback: RollbackConfig applies."""
    ports: tuple[PortConfig, ...] = ()
    """Those of the spec, with each published port of mode ingress chosen and claimed."""


class UpdateRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The API's UpdateStatus. `state`: updating, paused, completed, rollback_started,
    rollback_paused, rollback_completed; "" when there was no update.
    """

    state: str = ""
    started: int = 0
    completed: int = 0
    message: str = ""


class ServiceStatus(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """What the leader makes of a service."""

    endpoint: Endpoint | None = None
    update: UpdateRecord = UpdateRecord()
    iteration: int = 0
    last_execution: int = 0
    version: int = 0
    """Of the spec that `update` is about. With another one than the service's, `update` is old."""


class ServiceAuth(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The header X-Registry-Auth, as it was sent. Never shown."""

    header: str
    previous: str = ""


class SpecVersion(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One spec that living tasks refer to."""

    spec: ServiceSpec


class Attached(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One endpoint on a network of the swarm. `address`: IPv4, without a prefix."""

    network: str
    address: str


class Task(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """What the leader wants of one task."""

    service: str
    version: int
    """Of the service's spec: `/sp/<service>/<version>`."""
    slot: int = 0
    """From 1; 0 for tasks of a global service."""
    node: str = ""
    """"" until the scheduler has found one. Tasks of global services have it from the start."""
    desired: TaskState = TaskState.RUNNING
    created: int = 0
    updated: int = 0
    waits: str = ""
    """Why no node has been found."""
    assigned: int = 0
    """When the scheduler found the node; 0 before."""
    starts_at: int = 0
    """Desired `ready` becomes `running` at this time (restart delay)."""
    follows: str = ""
    """The task in the same slot whose end it waits for; "" for none."""
    restarts: int = 0
    """Restarts of this slot that count for MaxAttempts."""
    window_from: int = 0
    """When the counting of `restarts` began."""
    iteration: int = 0
    generic: tuple[GenericResource, ...] = ()
    """Generic resources of the node that the scheduler has given to it."""
    by_update: bool = False
    """Written by a rolling update of its version. A task that restarts made is not."""
    networks: tuple[Attached, ...] = ()
    """Its addresses, which are given with its node and kept until its end is confirmed."""


class TaskStatus(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False):
    """What the node reports. Written under the session of the node; never goes back."""

    state: TaskState
    since: int
    message: str = ""
    error: str = ""
    container: str = ""
    pid: int = 0
    exit_code: int = 0
    ports: tuple[PortStatus, ...] = ()
    ready: bool = False
    """Traffic may be led to it."""
    ran: int = 0
    """When it was first seen running; 0 for never. As `since`, of the node's clock."""


class SecretRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    created: int
    updated: int
    spec: SecretSpec
    """Without Data."""
    data: bytes = b""
    """AES-GCM: 12 bytes of nonce, then the ciphertext. The id is the associated data."""


class ConfigRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    created: int
    updated: int
    spec: ConfigSpec
    """Without Data."""
    data: bytes = b""
    """As of a secret."""


class Turn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Its revision alone means something."""


class Subnet(msgspec.Struct, array_like=True, frozen=True):
    """One pool of addresses of a network, as text: 10.0.1.0/24, 10.0.1.1."""

    subnet: str
    gateway: str
    range: str = ""
    """The part of the subnet that addresses are given from; "" for all of it."""
    reserved: dict[str, str] = msgspec.field(default_factory=dict)
    """Addresses that are never given, by name."""


class NetworkRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A network of the swarm. It does not change after its creation."""

    created: int
    updated: int
    name: str
    subnets: tuple[Subnet, ...]
    vni: int
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    options: dict[str, str] = msgspec.field(default_factory=dict)
    """Of the driver, as given."""
    ipam_options: dict[str, str] = msgspec.field(default_factory=dict)
    internal: bool = False
    attachable: bool = False
    ingress: bool = False
    encrypted: bool = False
    secret: bytes = b""
    """What the keys of an encrypted network follow from."""


class AttachmentRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A plain container on an attachable network."""

    network: str
    node: str
    container: str
    created: int
    name: str = ""
    aliases: tuple[str, ...] = ()
    wanted: str = ""
    """The address that its client asked for."""
    address: str = ""
    """Given by the leader."""
    error: str = ""
    """Why there is none."""
    kind: str = ""
    """Of the error: the name of a class of `engine.errors`; "" for ServerError."""


class Claim(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The holder of a unique name or port, or the time until which a removed node is barred."""

    holder: str
    write: str = ""
    """Differs with each write of a claim that is the mark of its transaction (`store.py`), and that
    others may write with the same holder.
    """


class Kind(Generic[R]):
    """One sort of record: where its keys are, and its type."""

    def __init__(self, prefix: str, record: type[R]) -> None:
        self.prefix = prefix
        self.record = record
        self.decode = msgspec.msgpack.Decoder(record).decode

    def path(self, key: str) -> str:
        """The key in etcd. Records that there is one of have the key ""."""
        return self.prefix + key

    def __repr__(self) -> str:
        return f"Kind({self.prefix})"


CLUSTER = Kind("/swarm", Cluster)
CA_KEY = Kind("/ca/key", CAKey)
DATA_KEY = Kind("/dek", DataKey)
LEADER = Kind("/leader", Leader)
MANAGERS = Kind("/m/", ManagerPresence)
NODES = Kind("/n/", NodeRecord)
NODE_DATA = Kind("/nd/", NodeData)
SERVICES = Kind("/s/", ServiceRecord)
SERVICE_STATUS = Kind("/se/", ServiceStatus)
SERVICE_AUTH = Kind("/sa/", ServiceAuth)
SPEC_VERSIONS = Kind("/sp/", SpecVersion)
TASKS = Kind("/t/", Task)
TASK_STATUS = Kind("/ts/", TaskStatus)
SECRETS = Kind("/sec/", SecretRecord)
CONFIGS = Kind("/cfg/", ConfigRecord)
TURNS = Kind("/w/", Turn)
NETWORKS = Kind("/net/", NetworkRecord)
ATTACHMENTS = Kind("/a/", AttachmentRecord)
CLAIMS = Kind("/x/", Claim)

KINDS: tuple[Kind[msgspec.Struct], ...] = (  # type: ignore[assignment]
    CLUSTER,
    CA_KEY,
    DATA_KEY,
    LEADER,
    MANAGERS,
    NODES,
    NODE_DATA,
    SERVICES,
    SERVICE_STATUS,
    SERVICE_AUTH,
    SPEC_VERSIONS,
    TASKS,
    TASK_STATUS,
    SECRETS,
    CONFIGS,
    TURNS,
    NETWORKS,
    ATTACHMENTS,
    CLAIMS,
)

_encode = msgspec.msgpack.Encoder().encode


def encode(record: msgspec.Struct) -> bytes:
    return _encode(record)


def kind_of(path: str) -> tuple[Kind[msgspec.Struct], str] | None:
    """The kind and the record's key of a key in etcd; None for a key of a later version."""
    single = _SINGLE.get(path)
    if single is not None:
        return single, ""
    prefix = path[: path.find("/", 1) + 1]
    kind = _BY_PREFIX.get(prefix)
    return None if kind is None else (kind, path[len(prefix) :])


_SINGLE = {kind.prefix: kind for kind in KINDS if not kind.prefix.endswith("/")}
_BY_PREFIX = {kind.prefix: kind for kind in KINDS if kind.prefix.endswith("/")}


def spec_key(service: str, version: int) -> str:
    """The key of `SPEC_VERSIONS`."""
    return f"{service}/{version}"


def name_claim(kind: str, name: str) -> str:
    """The key of the claim of a name: `service/web`. Names of secrets and configs likewise."""
    return f"{kind}/{name}"


def port_claim(protocol: str, port: int) -> str:
    return f"port/{protocol}/{port}"


POOLS_CLAIM = "networks/pools"
"""Written with each network that is created or removed. Its revision shows a creation that it has
seen the subnets and VNIs of all of them.
"""


def barred_claim(node: str) -> str:
    return f"gone/{node}"


def use_claim(data: str) -> str:
    """Written with each service that refers to this secret or config. Its revision shows a removal
    that it has seen all of them.
    """
    return f"use/{data}"
