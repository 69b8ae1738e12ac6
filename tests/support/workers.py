"""xdist's workers: which files of tests they get, and how they end.

A test that hangs ends its worker (`faulthandler_timeout`). xdist's own scheduler gives the rest to
another worker, with three faults: the test that ended the worker is run again, a file whose tests
have all been run keeps a new worker waiting for ever, and a file for a new worker that is still
collecting is lost.

An interrupted run, or one whose controller was killed, lets its workers end what they have started:
engines, containers and mounts. That takes longer than xdist and execnet allow.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from execnet.gateway_base import WorkerGateway
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import NodeManager, WorkerController

END = 120
"""Seconds in which an interrupted worker must end what it has started."""


class Files(LoadFileScheduling):
    """The scheduler of `--dist loadfile`."""

    def remove_node(self, node: WorkerController) -> str | None:
        """The test in which the worker died, or None if it has ended; as the scheduler's."""
        units = self.assigned_work[node]
        died = next((test for unit in units.values() for test, done in unit.items() if not done), None)
        if died is not None:
            units[self._split_scope(died)][died] = True
        for scope in [scope for scope, unit in units.items() if all(unit.values())]:
            del units[scope]
        super().remove_node(node)
        return died

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files | None:
    return Files(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_keyboard_interrupt() -> None:
    global _interrupted  # noqa: PLW0603 (one run per process)
    _interrupted = True


_interrupted = False


def _end(gateway: Any) -> None:
    """In a worker whose controller ends or has ended: interrupt its tests once, and wait."""
    gateway._execpool.trigger_shutdown()
    if not gateway._execpool.waitall(0.1) and not _interrupted:
        os.kill(os.getpid(), signal.SIGINT)
    gateway._execpool.waitall(END)


NodeManager.EXIT_TIMEOUT = END
WorkerGateway._terminate_execution = _end
