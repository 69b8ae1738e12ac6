"""The phases of a node's membership: the table `(Phase, Verb) → Phase or error`. Pure.

A phase is on disk before any of its effects, and names the step of `membership.py` that leads out
of it. Each step can be repeated, so a daemon that was killed takes it up again: the verb BOOT says
in which phase. A pair that is not in the table cannot happen: asking for it is an error of the
engine.

Not here: carrying out the steps (`membership.py`), the file (`state.py`).
"""

from __future__ import annotations

from enum import StrEnum

from engine.errors import EngineError, NoSwarm


class Phase(StrEnum):
    NONE = "none"
    """Not part of a swarm."""
    FOUNDING = "founding"
    """An init is under way. Its client has no answer yet, so a restart undoes it."""
    FORCING = "forcing"
    """A new swarm is made by force from this manager's data."""
    JOINING = "joining"
    """It asks for a certificate."""
    WORKER = "worker"
    MANAGER = "manager"
    PROMOTING = "promoting"
    """It becomes a manager: by its token or by the swarm's wish."""
    DEMOTING = "demoting"
    """Its etcd member is removed; it asks for a worker's certificate."""
    LEAVING = "leaving"
    ERROR = "error"
    """It cannot go on by itself. Leaving, by force if need be, leads out of it. So does a forced
    new cluster, if the node has a manager's data.
    """


class Verb(StrEnum):
    """Verbs of clients, followed by what the swarm wishes and by the outcomes of steps."""

    INIT = "init"
    FORCE = "init by force"
    JOIN = "join"
    LEAVE = "leave"
    BOOT = "boot"
    """The daemon starts."""
    PROMOTE = "promote"
    """The swarm has given this node the certificate of a manager, or wishes to."""
    DEMOTE = "demote"
    """The swarm wishes this node to be a worker, and has removed its etcd member."""
    SUCCEED = "succeed"
    FAIL = "fail"
    """The step is undone. Its client gets the reason."""
    STRAND = "strand"
    """It cannot succeed, and has no client any more: /info shows the reason."""


class Refusal:
    """An error kind and its text."""

    __slots__ = ("kind", "text")

    def __init__(self, kind: type[EngineError], text: str) -> None:
        self.kind = kind
        self.text = text


NOT_A_MANAGER = (
    'This node is not a swarm manager. Use "docker swarm init" or "docker swarm join" '
    "to connect this node to swarm and try again."
)
WORKER_IS_NOT_A_MANAGER = (
    "This node is not a swarm manager. Worker nodes can't be used to view or modify cluster state. "
    "Please run this command on a manager node or promote the current node to a manager."
)

_PART = Refusal(
    NoSwarm,
    'This node is already part of a swarm. Use "docker swarm leave" to leave this swarm and join another one.',
)
_NOT_PART = Refusal(NoSwarm, "This node is not part of a swarm")
NO_DATA = "This node is not a swarm manager: ForceNewCluster needs a manager's data"
_NO_DATA = Refusal(NoSwarm, NO_DATA)
_LEAVES = Refusal(NoSwarm, "This node is already part of a swarm, which it is leaving. Try again when it has left.")

_N, _F, _O, _J = Phase.NONE, Phase.FOUNDING, Phase.FORCING, Phase.JOINING
_W, _M, _P, _D = Phase.WORKER, Phase.MANAGER, Phase.PROMOTING, Phase.DEMOTING
_L, _E = Phase.LEAVING, Phase.ERROR

TABLE: dict[tuple[Phase, Verb], Phase | Refusal] = {
    (_N, Verb.INIT): _F,
    (_F, Verb.INIT): _PART,
    (_O, Verb.INIT): _PART,
    (_J, Verb.INIT): _PART,
    (_W, Verb.INIT): _PART,
    (_M, Verb.INIT): _PART,
    (_P, Verb.INIT): _PART,
    (_D, Verb.INIT): _PART,
    (_L, Verb.INIT): _LEAVES,
    (_E, Verb.INIT): _PART,
    # Outside of a swarm there is nothing to force: it is an init.
    (_N, Verb.FORCE): _F,
    (_F, Verb.FORCE): _PART,
    (_O, Verb.FORCE): _O,
    (_J, Verb.FORCE): _NO_DATA,
    (_W, Verb.FORCE): _NO_DATA,
    (_M, Verb.FORCE): _O,
    (_P, Verb.FORCE): _NO_DATA,
    (_D, Verb.FORCE): _NO_DATA,
    (_L, Verb.FORCE): _LEAVES,
    (_E, Verb.FORCE): _O,
    (_N, Verb.JOIN): _J,
    (_F, Verb.JOIN): _PART,
    (_O, Verb.JOIN): _PART,
    (_J, Verb.JOIN): _PART,
    (_W, Verb.JOIN): _PART,
    (_M, Verb.JOIN): _PART,
    (_P, Verb.JOIN): _PART,
    (_D, Verb.JOIN): _PART,
    (_L, Verb.JOIN): _LEAVES,
    (_E, Verb.JOIN): _PART,
    (_N, Verb.LEAVE): _NOT_PART,
    (_F, Verb.LEAVE): _L,
    (_O, Verb.LEAVE): _L,
    (_J, Verb.LEAVE): _L,
    (_W, Verb.LEAVE): _L,
    (_M, Verb.LEAVE): _L,
    (_P, Verb.LEAVE): _L,
    (_D, Verb.LEAVE): _L,
    (_L, Verb.LEAVE): _L,
    (_E, Verb.LEAVE): _L,
    (_N, Verb.BOOT): _N,
    (_F, Verb.BOOT): _L,
    (_O, Verb.BOOT): _O,
    (_J, Verb.BOOT): _J,
    (_W, Verb.BOOT): _W,
    (_M, Verb.BOOT): _M,
    (_P, Verb.BOOT): _P,
    (_D, Verb.BOOT): _D,
    (_L, Verb.BOOT): _L,
    (_E, Verb.BOOT): _E,
    (_J, Verb.PROMOTE): _P,
    (_W, Verb.PROMOTE): _P,
    (_D, Verb.PROMOTE): _P,
    (_M, Verb.DEMOTE): _D,
    (_P, Verb.DEMOTE): _D,
    (_O, Verb.DEMOTE): _D,
    (_F, Verb.SUCCEED): _M,
    (_O, Verb.SUCCEED): _M,
    (_J, Verb.SUCCEED): _W,
    (_P, Verb.SUCCEED): _M,
    (_D, Verb.SUCCEED): _W,
    (_L, Verb.SUCCEED): _N,
    (_F, Verb.FAIL): _L,
    (_O, Verb.FAIL): _M,
    (_J, Verb.FAIL): _L,
    (_O, Verb.STRAND): _E,
    (_J, Verb.STRAND): _E,
    (_W, Verb.STRAND): _E,
    (_M, Verb.STRAND): _E,
    (_P, Verb.STRAND): _E,
    (_D, Verb.STRAND): _E,
}


def following(phase: Phase, verb: Verb) -> Phase:
    """The phase after `verb`. Raises the table's kind of error where the verb is refused."""
    entry = TABLE[phase, verb]
    if isinstance(entry, Refusal):
        raise entry.kind(entry.text)
    return entry


LOCAL_STATES = {
    Phase.NONE: "inactive",
    Phase.FOUNDING: "pending",
    Phase.FORCING: "pending",
    Phase.JOINING: "pending",
    Phase.WORKER: "active",
    Phase.MANAGER: "active",
    Phase.PROMOTING: "active",
    Phase.DEMOTING: "active",
    Phase.LEAVING: "pending",
    Phase.ERROR: "error",
}
"""LocalNodeState of /info."""
