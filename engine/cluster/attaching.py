"""Addresses of this node's containers on networks of the swarm: those of tasks, which the managers
have sent with them, and those of plain containers on attachable networks, which are asked for.

An attachment is a record of the managers. It holds the address of one plain container on one
network, from before the container joins until it has left. It is kept on disk, so a daemon that
starts knows what its containers use; each session tells the managers which attachments there still
are, and the managers remove the others. A container that is restarted keeps its attachment, also
while no manager can be reached.

An attachment that managers were asked to remove is never used again, as they may remove it later
even if their answer did not come. One that the managers have lost, as this node was away for long
or a backup was restored, is asked for again with its address. If that is refused, its container
leaves the network, because another one may have the address.

Owns:    the attachments; the records of the kind `swarm-attachment`.
Threads: the event loop's.
Raises:  the managers' kinds: NotFound (network), Forbidden (not attachable); ServerError when no
         manager answers in time, or none has an address.
Not here: endpoints (`networks/attachments.py`), the networks themselves (`views.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

import msgspec

from engine.cluster.parts import Parts
from engine.containers import settings as of_containers
from engine.errors import EngineError, Forbidden, InvalidParameter, NotAttachable, NotFound, ServerError, words
from engine.networks.attachments import Lent
from engine.swarm_session.frames import Connection
from engine.swarm_session.messages import Assigned, Attach, Attached, Detach
from engine.system.reconcile import Backoff, Reconciler
from engine.system.tasks import shield
from engine.wire.containers import EndpointSettings

if TYPE_CHECKING:
    from engine.cluster.views import NodeNetworks
    from engine.containers.container import Container

ATTACH_LIMIT = 20.0
"""Seconds until a container whose address does not come is refused."""
VIEW_LIMIT = 10.0
"""Seconds that the view of an attached network may take, which was sent before the answer."""
LINGER = 2.0
"""Seconds that an attachment is kept for the next run of its container."""
BOOT_LINGER = 30.0
"""The same for containers that did not run when the daemon started."""
GIVE_BACK_LIMIT = 2.0
"""Seconds that the end of a container waits for the managers."""
LEAVE_LIMIT = 5.0
"""Seconds in which all are given back by a node that leaves."""
AGAIN = 2.0
"""Seconds until what failed is tried again."""
AT_ONCE = 32
"""Attachments that are asked for again at a time."""

_log = logging.getLogger(__name__)

TaskOf = Callable[[str], Assigned | None]
"""The task of a container, by the container's id. Raises WrongState if the task has ended."""


class AttachmentRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    container: str
    network: str
    address: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    """What other nodes call the container."""


class Attaching:
    """Lends addresses to endpoints on networks of the swarm (`networks.attachments.Lender`)."""

    def __init__(self, parts: Parts, networks: NodeNetworks) -> None:
        self._parts = parts
        self._networks = networks
        self._records = parts.records
        self._rows = parts.records.table("swarm-attachment", AttachmentRow)
        self._all: dict[str, AttachmentRow] = {}
        self._of: dict[tuple[str, str], str] = {}
        """Attachment by container and network."""
        self._ends: dict[str, asyncio.TimerHandle] = {}
        """Attachments whose container has left, until they are given back."""
        self._returned: set[str] = set()
        """Attachments that are given back as soon as a manager answers."""
        self._returns = self._reconciler(self._give_one_back, "given back")
        self._outdated: dict[str, bool] = {}
        """Attachments that are asked for again: True if the managers have lost them, False if they
        know the container under another name.
        """
        self._renewals = self._reconciler(self._renew_one, "asked for again")
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._lends = False
        """This node is part of a swarm, and does not leave it."""
        self._connection: Connection | None = None
        self._online = asyncio.Event()
        self._task_of: TaskOf = lambda container: None
        networks.keep_while(self._holds)

    def _reconciler(self, step: Callable[[str], Awaitable[None]], what: str) -> Reconciler[str]:
        """Each attachment is tried by itself: one may fail for ever, or its container be busy for
        long.
        """

        def failed(attachment: str, error: Exception, seconds: float) -> None:
            bug = not isinstance(error, (EngineError, TimeoutError, ConnectionError))
            _log.warning("attachment %s cannot be %s yet: %s", attachment, what, words(error), exc_info=bug)

        return Reconciler(
            step,
            failed,
            what=lambda attachment: f"swarm: attachment {attachment} is {what}",
            backoff=lambda: Backoff(AGAIN, AGAIN),
        )

    # --- life -------------------------------------------------------------------------------------

    def restore(self) -> None:
        """At the daemon's start. Raises ServerError when a record cannot be decoded."""
        self._all = self._rows.load()
        self._of = {(row.container, row.network): attachment for attachment, row in self._all.items()}
        self._lends = True

    def open(self, task_of: TaskOf) -> None:
        """An agent begins, which has these tasks."""
        self._task_of = task_of
        self._lends = True
        self._returns.open()
        self._renewals.open()

    def settle(self) -> None:
        """The containers are restored: give back what none of them uses."""
        for attachment, row in self._all.items():
            container = self._parts.containers.find(row.container)
            if container is None or (container.running and not _is_on(container, row.network)):
                self._returned.add(attachment)
            elif not container.running:
                self._end_later(attachment, BOOT_LINGER)

    def begin(self, connection: Connection, lost: Iterable[str]) -> None:
        """A session has begun, with `in_use`: the managers have removed all others, and do not have
        those that are `lost`.
        """
        self._connection = connection
        self._online.set()
        self._give_back()
        self._outdated |= {attachment: True for attachment in lost if attachment in self._all}
        self._renew()

    def lost(self) -> None:
        """The session has ended."""
        self._connection = None
        self._online.clear()

    def in_use(self) -> tuple[str, ...]:
        """For `Hello.attachments`. One that is to be given back is among them until managers were
        asked for that: its container may start before.
        """
        return tuple(
            attachment
            for attachment, row in self._all.items()
            if self._of.get((row.container, row.network)) == attachment
        )

    def _holds(self, network: str) -> bool:
        return any(row.network == network and attachment not in self._returned for attachment, row in self._all.items())

    async def close(self) -> None:
        for handle in self._ends.values():
            handle.cancel()
        self._ends.clear()
        await self._returns.close()
        await self._renewals.close()

    async def clear(self) -> None:
        """This node leaves the swarm: plain containers leave its networks, and stay. No container
        joins one from now on.
        """
        self._lends = False
        joined = {(row.container, row.network): None for row in self._all.values()}
        for container_id, network in joined | dict.fromkeys(self._networks.occupants()):
            container = self._parts.containers.find(container_id)
            if container is not None:
                await self._leave(container, network)
        try:
            async with asyncio.timeout(LEAVE_LIMIT):
                for attachment in [*self._all]:
                    await self._end(attachment)
        except (EngineError, TimeoutError, ConnectionError) as error:
            _log.warning("not all attachments could be given back to the swarm: %s", words(error))
        await self.close()
        rows = [self._rows.delete(attachment) for attachment in self._all]
        self._all.clear()
        self._of.clear()
        self._returned.clear()
        self._outdated.clear()
        await self._records.commit(*rows)

    async def _leave(self, container: Container, network: str) -> None:
        """One that is just starting leaves when it has started."""
        async with container.lock:
            if not _is_on(container, network):
                return
        try:
            await of_containers.disconnect(container, network)
        except EngineError as error:
            _log.warning("container %s: leaving network %s: %s", container.id, network, error.message)

    # --- what endpoints get -----------------------------------------------------------------------

    async def lend(self, container_id: str, name: str, key: str, settings: EndpointSettings) -> Lent:
        """The address of an endpoint that is about to be made on a network of the swarm, which is
        on this node then. `key`: name or id of the network.
        """
        if not self._lends:
            raise NotFound(f"network {key} not found")
        network = settings.network_id if self._networks.knows(settings.network_id) else self._networks.named(key)
        task = self._task_of(container_id)
        if task is not None and network in task.addresses:
            adopted = await self._networks.need(network)
            return Lent(adopted, {4: IPv4Address(task.addresses[network])})
        address = settings.ipam_config.ipv4_address if settings.ipam_config is not None else ""
        aliases = dict.fromkeys((*(settings.aliases or ()), container_id[:12]))
        ask = Attach(network=network or key, container=container_id, name=name, aliases=tuple(aliases), address=address)
        attachment = self._of.get((container_id, network), "")
        if attachment and not self._serves(attachment, ask):
            await self._end(attachment)
            attachment = ""
        if not attachment:
            try:
                attachment = await self._attach(ask)
            except NotFound:
                if ask.network == key:
                    raise
                # it was removed, and perhaps made again under its name
                attachment = await self._attach(msgspec.structs.replace(ask, network=key))
        self._keep(attachment)
        row = self._all[attachment]
        try:
            async with asyncio.timeout(VIEW_LIMIT):
                await self._networks.arrives(row.network)
                adopted = await self._networks.need(row.network)
        except TimeoutError:
            self.release(container_id, row.network)
            raise ServerError(f"network {key}: {self._networks.trouble(row.network)}") from None
        except BaseException:
            self.release(container_id, row.network)
            raise
        if (row.name, row.aliases) != (ask.name, ask.aliases):
            self._outdated[attachment] = False
            self._renew()
        return Lent(adopted, {4: IPv4Address(row.address)})

    def _serves(self, attachment: str, ask: Attach) -> bool:
        """The managers have not lost it, and its address is the one that is wanted."""
        lost = self._outdated.get(attachment, False)
        return not lost and ask.address in ("", self._all[attachment].address)

    def renamed(self, container_id: str) -> None:
        """Other nodes get to know its name."""
        for attachment, row in self._all.items():
            if row.container == container_id:
                self._outdated.setdefault(attachment, False)
        self._renew()

    def release(self, container_id: str, network_id: str) -> None:
        """The endpoint was not made. Its address is kept for a moment, for the next try."""
        attachment = self._of.get((container_id, network_id))
        if attachment is not None:
            self._end_later(attachment, LINGER)

    async def give_back(self, container_id: str, network_id: str) -> None:
        """The endpoint was removed, and so is the attachment, unless the container is about to
        start again.
        """
        attachment = self._of.get((container_id, network_id))
        if attachment is None:
            return
        container = self._parts.containers.find(container_id)
        if container is not None and container.starts:
            self._end_later(attachment, LINGER)
            return
        try:
            async with asyncio.timeout(GIVE_BACK_LIMIT):
                await self._end(attachment)
        except (EngineError, TimeoutError, ConnectionError):
            self._return(attachment)

    # --- attachments ------------------------------------------------------------------------------

    async def _attach(self, ask: Attach) -> str:
        """A new attachment. A caller that is cancelled has it given back."""
        asking = asyncio.ensure_future(self._ask(ask))
        try:
            return await shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._not_wanted)
            raise

    def _not_wanted(self, asked: asyncio.Future[str]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._return(asked.result())

    async def _ask(self, ask: Attach) -> str:
        try:
            async with asyncio.timeout(ATTACH_LIMIT):
                await self._online.wait()
                assert self._connection is not None
                answer = await self._connection.ask(ask, timeout=ATTACH_LIMIT)
        except Forbidden as error:
            raise NotAttachable(error.message) from error
        except (TimeoutError, ConnectionError) as error:
            raise ServerError(
                f"network {ask.network}: no manager of the swarm has attached the container in time"
            ) from error
        if not isinstance(answer, Attached):
            raise ServerError(f"network {ask.network}: the manager has answered with {type(answer).__name__}")
        row = AttachmentRow(
            container=ask.container,
            network=answer.network,
            address=answer.address,
            name=ask.name,
            aliases=ask.aliases,
        )
        before = self._of.get((row.container, row.network), "")
        self._all[answer.attachment] = row
        self._of[row.container, row.network] = answer.attachment
        changes = [self._rows.put(answer.attachment, row)]
        if before:  # the managers have replaced it
            self._forget(before)
            changes.append(self._rows.delete(before))
        try:
            await self._records.commit(*changes)
        except BaseException:
            self._return(answer.attachment)
            raise
        return answer.attachment

    def _forget(self, attachment: str) -> None:
        self._keep(attachment)
        self._outdated.pop(attachment, None)
        del self._all[attachment]

    def _keep(self, attachment: str) -> None:
        """Its container uses it."""
        self._returned.discard(attachment)
        handle = self._ends.pop(attachment, None)
        if handle is not None:
            handle.cancel()

    def _end_later(self, attachment: str, seconds: float) -> None:
        self._keep(attachment)
        self._ends[attachment] = asyncio.get_running_loop().call_later(seconds, self._return, attachment)

    def _return(self, attachment: str) -> None:
        """Give it back when a manager can be asked."""
        self._ends.pop(attachment, None)
        self._returned.add(attachment)
        self._give_back()

    def _give_back(self) -> None:
        if self._connection is not None:
            for attachment in self._returned:
                self._returns.mark(attachment)

    async def _give_one_back(self, attachment: str) -> None:
        async with self._asking:
            if attachment in self._returned and self._connection is not None:
                await self._end(attachment)

    # --- what is asked for again ------------------------------------------------------------------

    def _renew(self) -> None:
        if self._connection is not None and self._lends:
            for attachment in self._outdated:
                self._renewals.mark(attachment)

    async def _renew_one(self, attachment: str) -> None:
        if attachment not in self._outdated or self._connection is None or not self._lends:
            return
        row = self._all.get(attachment)
        container = None if row is None else self._parts.containers.find(row.container)
        if row is not None and container is not None:
            await self._replace(attachment, row, container)
        self._outdated.pop(attachment, None)

    async def _replace(self, attachment: str, row: AttachmentRow, container: Container) -> None:
        async with container.lock:
            if self._of.get((row.container, row.network)) != attachment:
                return
            if not container.running or not _is_on(container, row.network):
                if self._outdated.get(attachment, False):
                    del self._of[row.container, row.network]  # its next start asks for another one
                    self._return(attachment)
                return
            name = container.record.name
            ask = Attach(
                network=row.network, container=row.container, name=name, aliases=row.aliases, address=row.address
            )
            try:
                async with self._asking:
                    await self._attach(ask)
                return
            except (NotFound, NotAttachable, InvalidParameter) as error:
                reason = error.message
            self._return(attachment)
        _log.error("container %s leaves network %s, which it has lost: %s", row.container, row.network, reason)
        await self._leave(container, row.network)

    async def _end(self, attachment: str) -> None:
        """Have the managers remove it. Raises EngineError, TimeoutError, ConnectionError."""
        if self._connection is None:
            raise ServerError("no manager of the swarm can be reached")
        handle = self._ends.pop(attachment, None)
        if handle is not None:
            handle.cancel()
        self._returned.add(attachment)
        row = self._all.get(attachment)
        if row is not None and self._of.get((row.container, row.network)) == attachment:
            # never used again: without an answer, it may still be removed later
            del self._of[row.container, row.network]
        with contextlib.suppress(NotFound):
            await self._connection.ask(Detach(attachment=attachment), timeout=ATTACH_LIMIT)
        self._returned.discard(attachment)
        self._outdated.pop(attachment, None)
        if self._all.pop(attachment, None) is not None:
            await self._records.commit(self._rows.delete(attachment))


def _is_on(container: Container, network: str) -> bool:
    return any(endpoint.network_id == network for endpoint in container.record.networks.values())


__all__ = ["Attaching", "TaskOf"]
