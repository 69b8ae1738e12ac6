"""The states of tasks and nodes, and which of them follow each other. Pure.

The numbers of task states are swarmkit's, so that comparing them compares progress. A task only
moves forward. The names are the API's (1.24, "Tasks").
"""

from __future__ import annotations

import enum


class TaskState(enum.IntEnum):
    NEW = 0
    PENDING = 64
    """Addresses are assigned; waits for a node. `allocated` is a name of the same state."""
    ASSIGNED = 192
    ACCEPTED = 256
    PREPARING = 320
    READY = 384
    STARTING = 448
    RUNNING = 512
    COMPLETE = 576
    SHUTDOWN = 640
    FAILED = 704
    REJECTED = 768
    REMOVE = 800
    """Only as a desired state: end the task, then delete its record."""
    ORPHANED = 832
    """Its node was down for too long, or was removed."""

    @property
    def label(self) -> str:
        """The name on the wire."""
        return self.name.lower()

    @property
    def ended(self) -> bool:
        return self > TaskState.RUNNING


TASK_STATES = {state.label: state for state in TaskState} | {"allocated": TaskState.PENDING}
"""By name on the wire."""


class NodeState(enum.IntEnum):
    UNKNOWN = 0
    """Its manager is lost, and it has not come to another one yet."""
    DOWN = 1
    READY = 2
    DISCONNECTED = 3
    """Told to go to another manager."""

    @property
    def label(self) -> str:
        return self.name.lower()


class Role(enum.IntEnum):
    WORKER = 0
    MANAGER = 1

    @property
    def label(self) -> str:
        return self.name.lower()


class Availability(enum.IntEnum):
    ACTIVE = 0
    PAUSE = 1
    DRAIN = 2

    @property
    def label(self) -> str:
        return self.name.lower()
