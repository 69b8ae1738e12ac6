"""The removal of a container: by a client, and of one with HostConfig.AutoRemove at its end.

The row is the commit point: a container is gone once its row is deleted, even if some of its files
are left for the next daemon to sweep. As in dockerd, AutoRemove also removes a container whose
start failed, before the client gets the error, and at the daemon's start one that has ended. One
that was created and never started is kept then: its client may be about to start it.

Locks: the container's, also while its process is killed (`Container.kill_and_record`).
Not here: names and links in the table of containers (`containers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from engine import metrics
from engine.containers import image_mounts, lifecycle, mount_points
from engine.containers.lifecycle import State, Verb
from engine.errors import Conflict, EngineError, NotFound, ServerError, words
from engine.system.files import remove_tree
from engine.system.tasks import spawn
from engine.system.threads import whole

if TYPE_CHECKING:
    from engine.containers.container import Container

_log = logging.getLogger(__name__)


async def remove(container: Container, *, force: bool, volumes: bool = False, called: str = "") -> None:
    """Delete it with its files, and with `volumes` its anonymous volumes that no other container
    uses. `called`: the name that the client used, for the error.

    Raises Conflict when it runs and not `force`, NotFound when it has been removed.
    """
    deleted: list[str] = []
    await container.end_recorded()
    try:
        began = time.monotonic()
        await _remove(container, force, volumes, called or container.id, deleted)
        metrics.CONTAINER_ACTIONS.since("delete", began)
    finally:
        # Nothing is awaited between this and the reply, so the reply is written first. A docker
        # CLI that removes its container itself (`run --rm` below 1.25) aborts its request at
        # this event.
        if deleted:
            container.publish("destroy")


def automatically(container: Container) -> None:
    """Its run has ended, or the daemon starts: remove it in the background if it has AutoRemove,
    unless a client restarts it. One whose only start ended with a daemon goes too.
    """
    ended = container.record.status.state == State.EXITED and not container.restarting
    if (ended or container.start_cut) and container.record.host.auto_remove:
        spawn(_automatically(container), f"removing container {container.id}, which has AutoRemove")


async def _automatically(container: Container) -> None:
    with contextlib.suppress(NotFound, Conflict):  # a client has removed or started it
        await remove(container, force=False, volumes=True)


async def after_failed_start(container: Container) -> None:
    """Remove it if it has AutoRemove. A failure is logged, as the client gets that of the start.

    The caller holds the lock.
    """
    if not container.record.host.auto_remove:
        return
    deleted: list[str] = []
    try:
        await _erase(container, Verb.REMOVE, True, deleted)
    except EngineError as error:
        _log.error("container %s: removing it after a failed start (AutoRemove): %s", container.id, error.message)
    if deleted:
        container.publish("destroy")


@whole
async def _remove(container: Container, force: bool, volumes: bool, called: str, deleted: list[str]) -> None:
    async with container.lock:
        container.check_present()
        verb = Verb.REMOVE_BY_FORCE if force else Verb.REMOVE
        lifecycle.following(container.record.status.state, verb, called)
        await container.kill_and_record()
        await _erase(container, verb, volumes, deleted)


async def _erase(container: Container, verb: Verb, volumes: bool, deleted: list[str]) -> None:
    """Delete the row, then the files. `deleted` gets the id once the row is deleted, even if later
    steps fail.
    """
    before = container.record
    container.move(state=lifecycle.following(before.status.state, verb, container.id))
    try:
        await _delete_row(container, volumes)
    except BaseException as failure:
        if not container.removed:
            container.put(before)
            container.answer_removal(words(failure))
        raise
    deleted.append(container.id)
    container.gone()
    container.parts.monitor.drop(container.id)
    outcomes = await asyncio.gather(
        container.parts.snapshots.remove(container.id),
        image_mounts.release(before, container.parts.snapshots),
        asyncio.to_thread(remove_tree, container.directory),
        container.parts.deliveries.removed(container.id),
        return_exceptions=True,
    )
    for error in outcomes:
        if isinstance(error, BaseException):  # the next daemon sweeps the rest
            left = ServerError(f"container {container.id} is removed, but some of its files are left: {words(error)}")
            container.answer_removal(left.message)
            raise left from error
    container.answer_removal()


async def _delete_row(container: Container, volumes: bool) -> None:
    record, parts = container.record, container.parts
    named = mount_points.named_volumes(record.host)
    async with parts.volumes.leave(container.id, record.mounts, named, anonymous=volumes) as changes:
        await parts.store.delete(container.id, *changes)
        container.removed = True
        container.peers.removed(container)
