"""The messages of a swarm, over framed connections (`frames.py`).

Three conversations use them:

- daemon → own manager, on RUN/swarm/manager.sock: `Begin`, `Call`, `Follow`, `Stop`
- agent → manager, mutual TLS on port 2377 or the same Unix socket: `FetchRoot`, `Join`, `Renew`,
  `Hello`, then `Session`, `Assignments`, `Views`, `Status`, `Attach`, `Beat`
- manager → manager, mutual TLS on port 2377: `AddMember`, `PromoteMember`, `RemoveMember`

A message with a `seq` that is not 0 is a request, and each answer has the same `seq`. A connection
without a verified certificate may send `FetchRoot`, `Join` and `Renew` alone.

Versions. Managers and agents of one swarm may be of different versions during an upgrade. Structs
are maps with short names: fields that a peer does not know are ignored, and missing ones get their
defaults. `PROTOCOL` is raised when that does not suffice, and is part of the ALPN name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, TypeAlias, Union

import msgspec

from engine.wire.nodes import GenericResource, NodeDescription
from engine.wire.services import ServiceSpec
from engine.wire.tasks import PortStatus

PROTOCOL = 1


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="!"):
    pass


class _Request(_Message, frozen=True, kw_only=True):
    seq: int = 0


class Peer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A manager that agents may use. `address`: host:port."""

    node: str
    address: str
    absent: bool = False
    """It does not run, as far as the sender knows."""


def order_of_managers(node: str, managers: Iterable[Peer]) -> list[Peer]:
    """The managers in the order in which an agent tries them: those that run first, each group by
    rendezvous hashing, so that each manager has about the same number of agents and few of them
    move when a manager comes or goes.
    """

    def rank(peer: Peer) -> tuple[bool, bytes]:
        return peer.absent, hashlib.blake2b(f"{node} {peer.node}".encode(), digest_size=8).digest()

    return sorted(managers, key=rank)


# --- any conversation -----------------------------------------------------------------------------


class Refused(_Request, frozen=True, tag="refused"):
    """The request failed. `kind` is the name of a class of `engine.errors`."""

    kind: str
    message: str


class Done(_Request, frozen=True, tag="done"):
    """The request succeeded. `body` is what its verb returns, JSON for verbs of the API."""

    body: bytes = b""
    warning: str = ""
    """The answer may be old: an election runs, or quorum is lost."""


class Ended(_Request, frozen=True, tag="ended"):
    """No more answers follow in a stream."""


class Cancel(_Message, frozen=True, tag="cancel"):
    """The sender reads no more answers of its request `of`: the work for it is cancelled."""

    of: int


class Credit(_Message, frozen=True, tag="credit"):
    """The sender has read `answers` more answers of its request `of` (`Connection.stream`)."""

    of: int
    answers: int


class Beat(_Message, frozen=True, tag="beat"):
    """An agent lives. Answered by `Beat`."""


class Bye(_Message, frozen=True, tag="bye"):
    """Go to another manager, or to none: `reason`. `barred`: this node was removed."""

    reason: str
    barred: bool = False


# --- daemon → own manager -------------------------------------------------------------------------


class Begin(_Request, frozen=True, tag="begin"):
    """Become a manager. Answered by `Done` when requests are served.

    `how`: "restore" what ROOT/swarm has; "init" a new swarm; "force" a new swarm of this member
    alone out of what ROOT/swarm/etcd has; "join" the swarm of `peers`, with the certificate in
    ROOT/swarm, as another member. Repeating a `Begin` that was cut is safe.
    """

    how: str
    node: str
    listen: str
    """host:port of the listener of agents and managers."""
    advertise: str
    """host:port that others reach it at."""
    peers: tuple[Peer, ...] = ()
    body: bytes = b""
    """JSON of the init request's body."""
    data_path: str = ""
    subnets: tuple[str, ...] = ()
    """Of init: local subnets of this node, which the network ingress keeps away from."""


class Call(_Request, frozen=True, tag="call"):
    """One verb of the API. Answered by `Done` with JSON of the newest version's document.

    `verb`: "services.create"; `name`: id, name or prefix of the object; `query`: parameters;
    `body`: JSON of the newest version's document.
    """

    verb: str
    name: str = ""
    query: dict[str, Any] = {}
    body: bytes = b""


class Follow(_Request, frozen=True, tag="follow"):
    """Logs of tasks, answered by `LogLines` and `Ended`. `of`: "service" or "task"; `query`: the
    parameters of the API, decoded.
    """

    of: str
    name: str
    query: dict[str, Any] = {}


class Watch(_Request, frozen=True, tag="watch"):
    """Answered by `Change`, for every change that the daemon publishes as an event (1.33)."""


class Change(_Request, frozen=True, tag="change"):
    """An event of the swarm. `kind`: service, node, secret, config, network."""

    kind: str
    action: str
    id: str
    attributes: dict[str, str] = {}
    time: int = 0


class Backup(_Request, frozen=True, tag="backup"):
    """Write all records to a new file, as `engined swarm backup` asks. Answered by `Done` with
    JSON: Swarm, Revision.
    """

    path: str
    """Absolute."""


class Stop(_Request, frozen=True, tag="stop"):
    """End the manager's process. `leave`: remove this member from the swarm before."""

    leave: bool = False
    force: bool = False


# --- agent → manager: without a certificate -------------------------------------------------------


class FetchRoot(_Request, frozen=True, tag="root?"):
    """Answered by `Done` with the PEM of the root certificate."""


class Join(_Request, frozen=True, tag="join"):
    """A certificate for a new node. `csr`: PEM, of which the key alone is used."""

    csr: str
    token: str
    advertise: str = ""
    availability: str = ""


class Joined(_Request, frozen=True, tag="joined"):
    node: str
    swarm: str
    certificate: str
    root: str
    role: str
    """worker or manager, by the token."""
    managers: tuple[Peer, ...]
    seen: str
    """The address that the manager saw."""
    epoch: int = 0


class Renew(_Request, frozen=True, tag="renew"):
    """A new certificate in the role that the swarm wishes. Without a verified certificate (it has
    expired), `certificate` is the old one, and `signature` is its key's over the CSR.
    """

    csr: str
    certificate: str = ""
    signature: bytes = b""
    advertise: str = ""
    """Address of a manager for its certificate, when it is another one than before."""


class Renewed(_Request, frozen=True, tag="renewed"):
    certificate: str
    root: str
    role: str


# --- agent ↔ manager: a session -------------------------------------------------------------------


class Hello(_Request, frozen=True, tag="hello"):
    """An agent begins its session. Answered by `Session`, then the manager sends `Assignments`."""

    description: NodeDescription
    advertise: str = ""
    epoch: int = 0
    statuses: tuple[Status, ...] = ()
    """Of all tasks that the agent has."""
    manager_address: str = ""
    data_address: str = ""
    """Where VXLAN packets of this node come from and go to; "" for `advertise`."""
    features: tuple[str, ...] = ()
    """As `NodeData.features`."""
    subnets: tuple[str, ...] = ()
    """As `NodeData.subnets`."""
    attachments: tuple[str, ...] = ()
    """Ids of those that its containers use. Others of this node are removed."""


class Session(_Request, frozen=True, tag="session"):
    """The session's terms. Sent again, with seq 0, when one of them changes."""

    id: str
    node: str
    period: float
    """Seconds between beats."""
    managers: tuple[Peer, ...]
    role: str
    """The wish: another one than the certificate's asks for `Renew`."""
    epoch: int
    renew: bool = False
    """The certificate should be renewed now (CA rotation)."""
    root: str = ""
    """PEM of the roots to trust from now on."""
    expiry: int = 0
    """Nanoseconds that certificates are valid."""
    availability: str = "active"
    data_path_port: int = 4789
    """UDP port of VXLAN in this swarm."""
    attachments_lost: tuple[str, ...] = ()
    """In the answer to `Hello`: those of its attachments that the managers do not have."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a secret or config."""

    id: str
    name: str
    data: bytes
    template: str = ""
    """"golang" when the content is a template."""


class Assigned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One task for this node."""

    id: str
    service: str
    name: str
    """web.1.<id>, or web.<node>.<id> for global services."""
    spec: str
    """Key in `Assignments.specs`."""
    desired: int
    slot: int = 0
    secrets: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    generic: tuple[GenericResource, ...] = ()
    addresses: dict[str, str] = {}
    """IPv4 address by network id, for the networks of the swarm that it is on."""


class Assignments(_Message, frozen=True, tag="assign"):
    """The tasks of this node: the whole set, or changes of it. Specs, secrets and configs come once
    and are kept by the agent until nothing refers to them. A task that is taken out is ended
    without a report, and forgotten.
    """

    whole: bool = False
    put: tuple[Assigned, ...] = ()
    remove: tuple[str, ...] = ()
    specs: dict[str, ServiceSpec] = {}
    """By `service/version`."""
    auths: dict[str, str] = {}
    """X-Registry-Auth by service."""
    secrets: tuple[Delivery, ...] = ()
    configs: tuple[Delivery, ...] = ()
    log_driver: Any = None
    """TaskDefaults.LogDriver as a `Driver`'s map, for tasks whose spec names none."""


class Status(_Message, frozen=True, tag="status-of"):
    """The observed state of one task."""

    task: str
    state: int
    since: int
    message: str = ""
    error: str = ""
    container: str = ""
    pid: int = 0
    exit_code: int = 0
    ports: tuple[PortStatus, ...] = ()
    ready: bool = False
    ran: int = 0
    """When it was first seen running; 0 for never."""


class Statuses(_Request, frozen=True, tag="status"):
    """Answered by `Done` when they are stored. The last one of a task wins."""

    of: tuple[Status, ...]


# --- networks of the swarm ------------------------------------------------------------------------


class NetworkView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A network, as a node needs it."""

    name: str
    vni: int
    subnets: tuple[tuple[str, str], ...]
    """Subnet and gateway."""
    created: int = 0
    internal: bool = False
    attachable: bool = False
    ingress: bool = False
    encrypted: bool = False
    secret: bytes = b""
    """As `NetworkRecord.secret`."""
    labels: dict[str, str] = {}
    options: dict[str, str] = {}


class EndpointView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A task or an attached container on a network, on any node."""

    id: str
    """Of the task, or of the attachment."""
    node: str
    address: str
    name: str = ""
    """Of its container."""
    service: str = ""
    """Id; "" for an attached container."""
    aliases: tuple[str, ...] = ()
    """Names of an attached container besides its own."""
    ready: bool = False
    """Traffic may be led to it."""


class PortView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A port of mode ingress."""

    protocol: str
    published: int
    target: int


class ServiceView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A service on a network."""

    id: str
    name: str
    address: str = ""
    """Its virtual address; "" in the mode dnsrr."""
    aliases: tuple[str, ...] = ()
    ports: tuple[PortView, ...] = ()
    """On the network ingress alone."""


class View(_Message, frozen=True, tag="view"):
    """A network that this node needs, whole or as it changes: its own tasks or containers are on
    it, or it is the ingress network. A whole view replaces the one before; more views of the same
    message may belong to it. `gone`: the node does not need the network any more.
    """

    network: str
    gone: bool = False
    definition: NetworkView | None = None
    """Given if the view is whole."""
    endpoints: tuple[EndpointView, ...] = ()
    endpoints_gone: tuple[str, ...] = ()
    services: tuple[ServiceView, ...] = ()
    services_gone: tuple[str, ...] = ()
    nodes: dict[str, str] = {}
    """Data address by node, of all nodes with endpoints; of all nodes on the network ingress. A
    lost node keeps its address: its endpoints are not `ready` where their service has others.
    """
    nodes_gone: tuple[str, ...] = ()


class Views(_Message, frozen=True, tag="views"):
    """The agent's networks and their changes, sent before the `Assignments` that need them. The
    first ones of a session are `whole`: the agent has no others.
    """

    of: tuple[View, ...]
    whole: bool = False


class Attach(_Request, frozen=True, tag="attach"):
    """A plain container of this node joins an attachable network. Answered by `Attached`. It
    replaces an earlier attachment of the container, and keeps its address unless it names another.
    """

    network: str
    """Id, name, or the beginning of an id."""
    container: str
    name: str
    aliases: tuple[str, ...] = ()
    address: str = ""
    """The one that its client wants."""


class Attached(_Request, frozen=True, tag="attached"):
    """It has this address. The network's view was sent before."""

    attachment: str
    network: str
    address: str


class Detach(_Request, frozen=True, tag="detach"):
    """Its endpoint has been removed. Answered by `Done`, also if there is no such attachment."""

    attachment: str


class ReadLogs(_Request, frozen=True, tag="logs?"):
    """From manager to agent: the logs of these tasks. Answered by `LogLines` and `Ended`."""

    tasks: tuple[str, ...]
    query: dict[str, Any] = {}


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    task: str
    stream: int
    """1 stdout, 2 stderr."""
    time: int
    data: bytes
    node: str = ""
    service: str = ""
    details: dict[str, str] = {}


class LogLines(_Request, frozen=True, tag="logs"):
    lines: tuple[LogLine, ...]


class LeaveSwarm(_Request, frozen=True, tag="leave"):
    """This node leaves. Answered by `Done` when it is marked down."""


# --- manager → manager ----------------------------------------------------------------------------


class AddMember(_Request, frozen=True, tag="member+"):
    """Add the sender as a learner. Answered by `MemberAdded`. A member that the same node had
    before is removed first."""

    peer_url: str


class MemberAdded(_Request, frozen=True, tag="member-added"):
    member: int
    initial_cluster: str
    """As etcd's --initial-cluster."""


class PromoteMember(_Request, frozen=True, tag="member-promote"):
    """Make the sender's learner a voting member. Answered by `Done`; refused with `Unavailable`
    while it is behind.
    """

    member: int


class RemoveMember(_Request, frozen=True, tag="member-"):
    """Remove the sender's own member, because it leaves. Answered by `Done`."""

    force: bool = False


Message: TypeAlias = Union[  # noqa: UP007 (a union of so many is read by msgspec at import)
    Refused, Done, Ended, Cancel, Credit, Beat, Bye, Begin, Call, Follow, Watch, Change, Backup, Stop,
    FetchRoot, Join, Joined, Renew, Renewed, Hello, Session, Assignments, Statuses,
    Views, Attach, Attached, Detach, ReadLogs, LogLines, LeaveSwarm,
    AddMember, MemberAdded, PromoteMember, RemoveMember,
]  # fmt: skip
ANY = Message

ANSWERS = (Refused, Done, Ended, Joined, Renewed, Session, LogLines, MemberAdded, Change, Attached)
"""Messages that only answer. One whose request is not waited for any more is dropped."""
STREAMED = (Follow, ReadLogs, Watch)
"""Requests with several answers. `Cancel` ends them."""
