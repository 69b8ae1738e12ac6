"""The images of tasks: each is asked for in its registry before a start, as swarmkit does, so that
a tag that has moved is noticed.

An image that this node has is used when the registry cannot be reached, refuses or is slow to
answer. Without a network the registry client, 15 MB, is not even loaded (`_has_address`). Tasks
that need the same image at the same time share one pull, and its outcome is good for some seconds:
a service of 100 tasks asks its registry once.

Owns:    pulls in progress.
Threads: the event loop's.
Raises:  NotFound `No such image: X` with the reason of the failed pull.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable

from engine.errors import EngineError, InvalidParameter, NotFound, ServerError
from engine.images import reference
from engine.images.archive import is_digest
from engine.images.credentials import registry_auth
from engine.images.reference import Reference
from engine.images.remote import Remote
from engine.images.store import ImageStore
from engine.system.tasks import shield
from engine.system.threads import cancelled, in_own_thread

FRESH = 5.0
"""Seconds for which a pull need not be repeated."""
REFUSED = 30.0
"""Seconds for which a registry that failed is not asked again, if the image is here."""
ANSWER = 5.0
"""Seconds that a registry has to answer, if the image is here."""

_HUB = "registry-1.docker.io"

_log = logging.getLogger(__name__)


class _Pull:
    """One pull, and the number of tasks that wait for it."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task = task
        self.waiting = 0


class Pulls:
    """Those of one node."""

    def __init__(self, images: ImageStore, remote: Remote, *, mirrors: Callable[[], bool] = lambda: False) -> None:
        """`mirrors`: True if a mirror may answer instead of Docker Hub."""
        self._mirrors = mirrors
        self._images = images
        self._remote = remote
        self._running: dict[tuple[str, str], _Pull] = {}
        self._until: dict[tuple[str, str], float] = {}
        """When the outcome of a pull is not good any more, time.monotonic."""

    async def bring(self, image: str, auth: str) -> None:
        """Have the image on this node. `auth`: the header X-Registry-Auth of the service.

        The pull is cancelled when all of its callers are. Raises NotFound.
        """
        here = self._here(image)
        if here and _fixed(image):
            return
        if is_digest(image) or is_digest(f"sha256:{image}"):  # an id, which no registry knows
            raise NotFound(f"No such image: {image}")
        key = image, auth
        if here and self._until.get(key, 0) > time.monotonic():
            return
        pull = self._running.get(key)
        if pull is None:
            task = asyncio.get_running_loop().create_task(self._pull(image, auth), name=f"pulling {image} for tasks")
            pull = self._running[key] = _Pull(task)
            task.add_done_callback(lambda done: self._running.pop(key, None))
        pull.waiting += 1
        try:
            refusal = await shield(pull.task)
        finally:
            pull.waiting -= 1
            if not pull.waiting and not pull.task.done():
                await cancelled(pull.task)
        self._remember(key, REFUSED if refusal else FRESH)
        if refusal and not self._here(image):
            raise NotFound(f"No such image: {image}: {refusal}")

    async def close(self) -> None:
        """Cancel all pulls."""
        for pull in list(self._running.values()):
            await cancelled(pull.task)

    def _here(self, image: str) -> bool:
        try:
            self._images.get(image)
        except EngineError:
            return False
        return True

    def _remember(self, key: tuple[str, str], seconds: float) -> None:
        now = time.monotonic()
        self._until = {each: until for each, until in self._until.items() if until > now}
        self._until[key] = now + seconds

    async def _pull(self, image: str, auth: str) -> str:
        """Returns the reason when it fails, otherwise ""."""
        here = self._here(image)
        try:
            name = reference.parse(image)
            if not name.digest:
                name = name.tagged()
            async with asyncio.timeout(ANSWER if here else None):
                if here and not self._remote.loaded and not await self._has_address(name):
                    raise ServerError(f"lookup {name.domain}: no such host")
                pulling = await self._remote.pull(name.canonical, "", registry_auth(auth))
            async with contextlib.aclosing(pulling.run()) as steps:
                async for _ in steps:
                    pass
        except TimeoutError:
            reason = f"its registry did not answer for {ANSWER:g} s"
        except EngineError as error:
            reason = error.message
        else:
            return ""
        if here:
            _log.warning("image %s cannot be pulled; tasks use the one that is here: %s", image, reason)
        return reason

    async def _has_address(self, name: Reference) -> bool:
        """False if the registry's host is known to have no address."""
        if self._mirrors() or any(each.lower().endswith("_proxy") for each in os.environ):
            return True
        host = _HUB if name.domain == reference.DEFAULT_DOMAIN else name.domain
        host = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
        try:
            await in_own_thread(lambda: socket.getaddrinfo(host, None))
        except OSError:
            return False
        return True


def _fixed(image: str) -> bool:
    """True if the name means the same image for ever: an id, or a name with a digest."""
    if is_digest(image):
        return True
    try:
        return bool(reference.parse(image).digest)
    except InvalidParameter:
        return True  # the prefix of an id


__all__ = ["Pulls"]
