"""All containers of the engine: by id, name and prefix, their links, and what concerns several of
them at once.

Not here: one container's verbs (`container.py`), how a new one comes to be (`create.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from engine import metrics
from engine.common.pruning import OnlyOne
from engine.common.turns import Turn
from engine.containers import boot, create, image_mounts, removal, settings, sharing, transient
from engine.containers.container import Container, Lifecycle
from engine.containers.defaults import Defaults
from engine.containers.extra_mounts import ExtraMount, Sandbox
from engine.containers.launch import BUNDLES, ROOT
from engine.containers.lifecycle import State
from engine.containers.names import Names, checked_name
from engine.containers.parts import Parts
from engine.containers.store import ContainerRecord
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound, ServerError
from engine.images.record import ImageRecord, ImageUser
from engine.runtime import cgroups
from engine.storage.snapshots import Ingest
from engine.system import detached_mounts
from engine.system.files import remove_tree
from engine.system.threads import uninterrupted
from engine.wire.containers import CreateBody, Created, UpdateBody

_log = logging.getLogger(__name__)


class Containers:
    """All containers of the engine, by id, name and prefix."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._names = Names()
        self._all: dict[str, Container] = {}
        self._creating: dict[str, str] = {}
        self._linked: dict[str, set[str]] = {}
        """Container id → ids of the containers that link to it."""
        self._mounted: set[str] = set()
        """Keys of the snapshots that an earlier daemon has mounted."""
        self.lifecycle = Lifecycle()
        self.leaving = False
        self.pruning = OnlyOne()
        self.generation = 0
        self.ending: set[Container] = set()
        self.support = parts.cgroups.support()

    async def take_over(self) -> None:
        """Take over the mounts that the last daemon made for containers and plugins. This comes
        before `open`, and before a plugin runs.
        """
        await asyncio.to_thread(detached_mounts.make_private, self.parts.config.run / ROOT)
        self._mounted = await self.parts.snapshots.resume(self.parts.monitor.kept)
        self.parts.monitor.keep(self.parts.snapshots.mount_namespace.descriptor)

    async def load(self) -> None:
        """Load the records. What runs is not known before `open`."""
        records = self.parts.store.load()
        await self.parts.volumes.open({record.id: record.mounts for record in records.values()})
        turn = Turn()
        for record in sorted(records.values(), key=lambda each: each.created):
            image_mounts.retain(record, self.parts.snapshots)
            named = await self._with_own_name(self._with_runtime(record))
            self._add(Container(self.parts, named, self))
            await turn.over()

    async def open(self) -> None:
        """Correct the records by the monitor's reports."""
        await asyncio.to_thread(sharing.sweep, self.parts.config.run / "shm")
        await asyncio.to_thread(remove_tree, self.parts.config.run / BUNDLES)
        turn = Turn()
        others = []
        for container in [*self._all.values()]:
            self.parts.attachments.reserve(container.record.networks)
            if not boot.resume(container):
                others.append(container)
            await turn.over()
        if others:
            left = self._mounted | await asyncio.to_thread(self._left_on_host)
            await asyncio.gather(*(boot.restore(each, each.id in left) for each in others))
        # From now on: a run that ended without a daemon is cleaned up first (`boot.start`).
        self.lifecycle.ended.subscribe(removal.automatically)
        await self.parts.volumes.sweep()

    def _with_runtime(self, record: ContainerRecord) -> ContainerRecord:
        """The record, also one of an earlier version, with its runtime and the name that clients
        see. Such a record has one name for both.
        """
        if record.runtime:
            return record
        runtimes, name = self.parts.runtimes, record.host.runtime or ""
        host = msgspec.structs.replace(record.host, runtime=runtimes.shown(name))
        return msgspec.structs.replace(record, host=host, runtime=name or runtimes.default.name)

    async def _with_own_name(self, record: ContainerRecord) -> ContainerRecord:
        """The record, with another name if an older container has this one: earlier versions could
        write such rows, and one of them must not keep the engine from starting.
        """
        try:
            self._names.add(record.id, record.name)
        except Conflict as error:
            renamed = msgspec.structs.replace(record, name=f"{record.name}-{record.id[:12]}")
            _log.error("container %s is renamed to %s: %s", record.id, renamed.name, error.message)
            self._names.add(renamed.id, renamed.name)
            with contextlib.suppress(ServerError):  # a full disk; the next start does the same
                await self.parts.store.save(renamed)
            return renamed
        return record

    def _left_on_host(self) -> set[str]:
        """Ids of containers that have a control group: running ones, and those left by a crash."""
        found: set[str] = set()
        records = [each.record for each in self._all.values()]
        parents = {cgroups.parent(record.parent_cgroup, record.cgroup_driver) for record in records}
        return found.union(*(self.parts.cgroups.children(parent) for parent in parents))

    def _add(self, container: Container) -> None:
        self._all[container.id] = container
        self.generation += 1
        for child in container.record.links.values():
            self._linked.setdefault(child, set()).add(container.id)
        self._links_changed(container.record.links.values())

    def _links_changed(self, containers: Iterable[str]) -> None:
        """Invalidate cached replies of these containers, which show names from links: a child those
        of its parents, a parent its children's.
        """
        for each in containers:
            if (container := self._all.get(each)) is not None:
                container.touch()

    def images_changed(self, image_ids: Collection[str]) -> None:
        """Names of these images were moved or removed.

        The list shows an image's id when the container's name for it refers to another image.
        """
        for container in self._all.values():
            if container.record.image_id in image_ids:
                container.touch()

    def names_by_link(self, child: str) -> list[str]:
        """`/parent/alias` for every link to the child."""
        if not self._linked.get(child):
            return []
        parents = [self._all[each].record for each in self._linked[child] if each in self._all]
        return sorted(
            f"/{parent.name}/{alias}" for parent in parents for alias, to in parent.links.items() if to == child
        )

    def unlinked(self, container: Container, child: str) -> None:
        """Its link to the container of that id was removed."""
        if child not in container.record.links.values():
            self._linked.get(child, set()).discard(container.id)
        self._links_changed([child])

    async def relink(self, child: str) -> None:
        """That container has started: update its address in the containers linked to it."""
        for parent in tuple(self._linked.get(child, ())):
            if (container := self._all.get(parent)) is not None:
                await settings.relink(container)

    def __contains__(self, key: object) -> bool:
        return key in self._all

    def __iter__(self) -> Iterator[Container]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def get(self, text: str) -> Container:
        """By id, name, unique prefix, or by link:

        `/parent/alias`. Raises NotFound `No such container: X`.
        """
        parent, slash, alias = text.removeprefix("/").partition("/")
        if slash:
            named = self._names.find(parent)
            container = self._all.get(named) if named is not None else None
            found = self._all.get(container.record.links.get(alias, "")) if container is not None else None
        else:
            found = self._all.get(self._names.resolve(text))
        if found is None:  # or it is being created
            raise NotFound(f"No such container: {text}")
        return found

    def find(self, container_id: str) -> Container | None:
        """By whole id; None when it is gone."""
        return self._all.get(container_id)

    def runs(self, container_id: str) -> bool:
        container = self.find(container_id)
        return container is not None and container.running

    async def create(self, body: CreateBody, name: str, platform: str = "") -> Created:
        """A new container.

        Raises InvalidParameter, NotFound (image), Conflict (name); a failure leaves nothing behind.
        """
        began = time.monotonic()
        _, created = await self._create(body, name, platform, None)
        metrics.CONTAINER_ACTIONS.since("create", began)
        return created

    async def create_transient(
        self,
        wanted: CreateBody,
        image: ImageRecord,
        name: str = "",
        mounts: Sequence[ExtraMount] = (),
        defaults: Defaults | None = None,
    ) -> Container:
        """A new container that only this daemon knows. It is in memory alone until `keep`; the next
        daemon ends its process and removes what it has on the host.

        It stands on the image's layers; the image need not be in the store. The body's
        configuration is complete: nothing of the image's is merged into it, and its Volumes are not
        mounted. `mounts` are those of its first start, whose root has no mark of a container if a
        `Sandbox` is among them. `defaults` hold instead of the operator's. It ends with `take`,
        `keep` or a removal.

        Raises InvalidParameter, NotFound, Conflict (name); a failure leaves nothing behind.
        """
        marked = not any(isinstance(mount, Sandbox) for mount in mounts)
        container, _ = await self._create(wanted, name, "", image, defaults, marked=marked)
        container.extra_mounts = tuple(mounts)
        return container

    async def take(self, container: Container) -> Ingest:
        """The changes of a transient container whose run has ended, for `Layers.seal`. The
        container is removed.

        The caller retains the layer below, and abandons or commits the ingest. Raises Conflict
        while it runs and after a client has stopped it, NotFound if it was removed meanwhile.
        """
        return await transient.take(container)

    async def keep(self, container: Container) -> None:
        """Make an ordinary container of a transient one whose run has ended. Raises Conflict while
        it runs, NotFound if it was removed meanwhile, ServerError.
        """
        await transient.keep(container)

    async def _create(
        self,
        body: CreateBody,
        name: str,
        platform: str,
        image: ImageRecord | None,
        defaults: Defaults | None = None,
        *,
        marked: bool = True,
    ) -> tuple[Container, Created]:
        """A new container, transient with `image`. `marked`: as in `create.commit`."""
        chosen = checked_name(name) if name else ""
        drafted = create.draft(
            *(body, chosen or self._names.random(), platform, self.parts, self.get, self.support, image),
            defaults=defaults,
        )
        record = drafted.record
        made: list[Container] = []
        self._names.reserve(record.id, record.name)
        self._creating[record.id] = record.image_id
        try:
            await self.parts.deliveries.check(record.host.log_config)
            await create.commit(
                *(drafted, self.parts, lambda record: made.append(self._created(record))),
                transient=image is not None,
                marked=marked,
            )
        except BaseException:
            if record.id not in self._all:
                self._names.discard(record.id, record.name)
            elif image is not None:  # its caller was cancelled, and cannot end it later
                with contextlib.suppress(NotFound):
                    await uninterrupted(removal.remove(made[0], force=True))
            raise
        finally:
            del self._creating[record.id]
        return made[0], Created(record.id, drafted.warnings)

    def _created(self, record: ContainerRecord) -> Container:
        """Its row is there."""
        container = Container(self.parts, record, self)
        self._names.add(record.id, record.name)
        self._add(container)
        self.parts.attachments.reserve(record.networks)
        container.publish("create", record.created)
        return container

    async def update(self, container: Container, change: UpdateBody) -> list[str]:
        """As `settings.update`, on this host."""
        return await settings.update(container, change, self.support)

    async def rename(self, container: Container, name: str) -> None:
        """Raises Conflict when the name is taken, InvalidParameter when it breaks the pattern."""
        if not name:
            raise InvalidParameter("Neither old nor new names may be empty")
        await settings.rename(container, checked_name(name))

    @contextlib.contextmanager
    def renaming(self, container: Container, name: str) -> Iterator[None]:
        """Reserve the new name while its row is written; then release the old one.

        On failure the new one is released. The caller holds the container's lock: otherwise a
        second rename could release or use a name that another container has taken since. Raises
        Conflict.
        """
        before = container.record.name
        self._names.reserve(container.id, name)
        try:
            yield
        except BaseException:
            self._names.release(name)
            raise
        self._names.release(before)
        self._links_changed((*container.record.links.values(), *self._linked.get(container.id, ())))

    def host_changed(self, container: Container, before: ContainerRecord) -> None:
        """It has another HostConfig; links and networks may differ from the record `before`."""
        record = container.record
        for child in before.links.values():
            self._linked.get(child, set()).discard(container.id)
        for child in record.links.values():
            self._linked.setdefault(child, set()).add(container.id)
        self._links_changed((*before.links.values(), *record.links.values()))
        if before.networks != record.networks:
            self.parts.attachments.unreserve(before.networks)
            self.parts.attachments.reserve(record.networks)

    def removed(self, container: Container) -> None:
        """Its row is gone."""
        self._all.pop(container.id, None)
        self.generation += 1
        for child in container.record.links.values():
            self._linked.get(child, set()).discard(container.id)
        self._links_changed((*container.record.links.values(), *self._linked.pop(container.id, ())))
        self.parts.attachments.unreserve(container.record.networks)
        self._names.discard(container.id, container.record.name)
        self.lifecycle.gone(container)

    def using_image(self, image_id: str) -> list[ImageUser]:
        """Users of the image: containers, and creates in progress."""
        users = [
            ImageUser(container.id, container.record.name, container.running)
            for container in self._all.values()
            if container.record.image_id == image_id
            or any(mount.image_id == image_id for mount in container.record.image_mounts)
        ]
        users += [
            ImageUser(container_id, "", False) for container_id, used in self._creating.items() if used == image_id
        ]
        return users

    def by_image(self) -> Counter[str]:
        """The number of containers of every image that has any, by its id."""
        return Counter(container.record.image_id for container in self._all.values())

    def counts(self) -> dict[State, int]:
        """The number of containers in each state."""
        counts = dict.fromkeys(State, 0)
        for container in self._all.values():
            counts[container.record.status.state] += 1
        return counts

    async def stop_all(self, timeout: float) -> None:
        """For `engined stop`: stop all containers at once."""

        self.leaving = True

        async def stop(container: Container) -> None:
            try:
                await container.stop_with_engine(timeout)
            except EngineError as error:
                _log.error("container %s: %s", container.id, error.message)

        await asyncio.gather(*(stop(container) for container in self._all.values()))

    async def settled(self) -> None:
        """Wait for running verbs and clean-ups."""
        busy = [container for container in self._all.values() if container.lock.locked()]
        await asyncio.gather(*(container.settled() for container in busy), return_exceptions=True)
