"""The lifecycle table `(State, Verb) → State or error`: the verbs that each state allows. Pure.

`docs/lifecycle.md` is written from it (`make docs`). Clients and scripts match the error texts:
they are Docker's at API 1.24. A pair that is not in the table cannot happen: asking for it is an
error of the engine.

Not here: carrying out the verbs (`container.py`).
"""

from __future__ import annotations

from enum import StrEnum

from engine.errors import Conflict, EngineError, NotModified, WrongState


class State(StrEnum):
    """As the list filter `status` and inspect's `State.Status` name them."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    RESTARTING = "restarting"
    EXITED = "exited"
    REMOVING = "removing"


class Verb(StrEnum):
    """Verbs of clients, followed by changes that happen to a container by itself."""

    START = "start"
    STOP = "stop"
    KILL = "kill"
    PAUSE = "pause"
    UNPAUSE = "unpause"
    ATTACH = "attach"
    RESIZE = "resize"
    UPDATE = "update"
    REMOVE = "remove"
    REMOVE_BY_FORCE = "remove by force"
    EXIT = "exit"
    """Its process has ended, and is not restarted."""
    EXIT_TO_RESTART = "exit to restart"
    """Its process has ended, and its restart policy restarts it."""
    FAIL = "fail"
    """A start failed."""
    THAW = "thaw"
    """A fatal signal has to reach a frozen process."""
    FOUND = "found"
    """At boot: the monitor has its process."""
    BOOT = "boot"
    """At boot: its restart policy starts it."""


class Refusal:
    """An error kind and its text, `{id}` in it."""

    __slots__ = ("kind", "text")

    def __init__(self, kind: type[EngineError], text: str) -> None:
        self.kind = kind
        self.text = text


_C, _R, _P, _T, _E, _D = State.CREATED, State.RUNNING, State.PAUSED, State.RESTARTING, State.EXITED, State.REMOVING

_STARTED = Refusal(NotModified, "Container {id} is already started")
_STOPPED = Refusal(NotModified, "Container {id} is already stopped")
_PAUSED_START = Refusal(WrongState, "Cannot start a paused container, try unpause instead.")
_DEAD = Refusal(Conflict, "Container {id} is marked for removal and cannot be started.")
_NOT_RUNNING = Refusal(WrongState, "Container {id} is not running")
_PAUSED_RESTARTING = Refusal(WrongState, "Container {id} is restarting, wait until the container is running")
_ALREADY_PAUSED = Refusal(WrongState, "Container {id} is already paused")
_NOT_PAUSED = Refusal(WrongState, "Container {id} is not paused")
_ATTACH_PAUSED = Refusal(Conflict, "Container {id} is paused. Unpause the container before attach")
_UPDATE_DEAD = Refusal(Conflict, "Container {id} is marked for removal and cannot be updated.")
_REMOVE = 'cannot remove container "{id}": container is '
_REMOVE_RUNNING = Refusal(Conflict, _REMOVE + "running: stop the container before removing or force remove")
_REMOVE_RESTARTING = Refusal(Conflict, _REMOVE + "restarting: stop the container before removing or force remove")
_REMOVE_PAUSED = Refusal(Conflict, _REMOVE + "paused and must be unpaused first")

TABLE: dict[tuple[State, Verb], State | Refusal] = {
    (_C, Verb.START): _R,
    (_R, Verb.START): _STARTED,
    (_P, Verb.START): _PAUSED_START,
    (_T, Verb.START): _R,
    (_E, Verb.START): _R,
    (_D, Verb.START): _DEAD,
    (_C, Verb.STOP): _STOPPED,
    (_R, Verb.STOP): _E,
    (_P, Verb.STOP): _E,
    (_T, Verb.STOP): _E,
    (_E, Verb.STOP): _STOPPED,
    (_D, Verb.STOP): _STOPPED,
    (_C, Verb.KILL): _NOT_RUNNING,
    (_R, Verb.KILL): _R,
    (_P, Verb.KILL): _P,
    (_T, Verb.KILL): _E,
    (_E, Verb.KILL): _NOT_RUNNING,
    (_D, Verb.KILL): _NOT_RUNNING,
    (_C, Verb.PAUSE): _NOT_RUNNING,
    (_R, Verb.PAUSE): _P,
    (_P, Verb.PAUSE): _ALREADY_PAUSED,
    (_T, Verb.PAUSE): _PAUSED_RESTARTING,
    (_E, Verb.PAUSE): _NOT_RUNNING,
    (_D, Verb.PAUSE): _NOT_RUNNING,
    (_C, Verb.UNPAUSE): _NOT_PAUSED,
    (_R, Verb.UNPAUSE): _NOT_PAUSED,
    (_P, Verb.UNPAUSE): _R,
    (_T, Verb.UNPAUSE): _NOT_PAUSED,
    (_E, Verb.UNPAUSE): _NOT_PAUSED,
    (_D, Verb.UNPAUSE): _NOT_PAUSED,
    (_C, Verb.ATTACH): _C,
    (_R, Verb.ATTACH): _R,
    (_P, Verb.ATTACH): _ATTACH_PAUSED,
    (_T, Verb.ATTACH): _T,
    (_E, Verb.ATTACH): _E,
    (_D, Verb.ATTACH): _DEAD,
    (_C, Verb.RESIZE): _NOT_RUNNING,
    (_R, Verb.RESIZE): _R,
    (_P, Verb.RESIZE): _P,
    (_T, Verb.RESIZE): _NOT_RUNNING,
    (_E, Verb.RESIZE): _NOT_RUNNING,
    (_D, Verb.RESIZE): _NOT_RUNNING,
    (_C, Verb.UPDATE): _C,
    (_R, Verb.UPDATE): _R,
    (_P, Verb.UPDATE): _P,
    (_T, Verb.UPDATE): _T,
    (_E, Verb.UPDATE): _E,
    (_D, Verb.UPDATE): _UPDATE_DEAD,
    (_C, Verb.REMOVE): _D,
    (_R, Verb.REMOVE): _REMOVE_RUNNING,
    (_P, Verb.REMOVE): _REMOVE_PAUSED,
    (_T, Verb.REMOVE): _REMOVE_RESTARTING,
    (_E, Verb.REMOVE): _D,
    (_D, Verb.REMOVE): _D,
    (_C, Verb.REMOVE_BY_FORCE): _D,
    (_R, Verb.REMOVE_BY_FORCE): _D,
    (_P, Verb.REMOVE_BY_FORCE): _D,
    (_T, Verb.REMOVE_BY_FORCE): _D,
    (_E, Verb.REMOVE_BY_FORCE): _D,
    (_D, Verb.REMOVE_BY_FORCE): _D,
    (_R, Verb.EXIT): _E,
    (_P, Verb.EXIT): _E,
    (_R, Verb.EXIT_TO_RESTART): _T,
    (_P, Verb.EXIT_TO_RESTART): _T,
    (_C, Verb.FAIL): _C,
    (_T, Verb.FAIL): _E,
    (_E, Verb.FAIL): _E,
    (_P, Verb.THAW): _R,
    (_C, Verb.FOUND): _R,
    (_R, Verb.FOUND): _R,
    (_P, Verb.FOUND): _P,
    (_T, Verb.FOUND): _R,
    (_E, Verb.FOUND): _R,
    (_T, Verb.BOOT): _T,
    (_E, Verb.BOOT): _T,
}


def following(state: State, verb: Verb, container_id: str) -> State:
    """The state after `verb`. `container_id`: its id, or the name that the client used.

    Raises the table's kind of error, naming the container, where the verb is refused.
    """
    entry = TABLE[state, verb]
    if isinstance(entry, Refusal):
        raise entry.kind(entry.text.format(id=container_id))
    return entry
