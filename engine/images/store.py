"""The images of an engine: their records and tags, and every verb on them.

Owns: the records of kind `image` (tags are part of them), the blobs of configurations, and the
claims on layers that follow from both. Readers use immutable records in memory; a change becomes
visible after it was committed. Not here: the wire (`api/images.py`), archives and extraction
(archive.py, layers.py), what a container does with an image.

Load keeps nothing until all of it is verified: layers become durable one by one but are claimed by
the load alone, and images, their tags and the tags' former owners change in one transaction at the
end. A crash before it leaves layers without an image; the sweep at start removes them. The
write-back of the files is not awaited: see `pending` in storage/overlay.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine import times
from engine.errors import Conflict, EngineError, InvalidParameter, NotFound
from engine.events import EventLog
from engine.images import archive, reference
from engine.images.archive import ArchivedImage
from engine.images.idle import Idle
from engine.images.layers import Layers, chain_ids
from engine.images.load import Claims, Load
from engine.images.receiving import received
from engine.images.reference import Reference
from engine.storage.content import Content
from engine.storage.overlay import DRIVER_NAME
from engine.storage.records import Change, Records
from engine.storage.snapshots import Snapshots
from engine.system.observers import Observers
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted
from engine.wire.containers import Config
from engine.wire.images import (
    Deletion,
    Descriptor,
    GraphDriver,
    HistoryItem,
    ImageConfig,
    ImageInspect,
    ImageSummary,
    InspectRootFS,
    Manifest,
    Progress,
)

FILTERS = ("before", "dangling", "label", "reference", "since")

_log = logging.getLogger(__name__)


class ImageUser(NamedTuple):
    """A container that was made from an image; `name` may be empty while it is being made."""

    id: str
    name: str
    running: bool


class ImageRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The record of one image.

    `tags` and `digests` are canonical references (`docker.io/library/busybox:latest`).
    """

    id: str
    config: ImageConfig
    chain_ids: tuple[str, ...] = ()
    """One per layer, lowest first."""
    size: int = 0
    created: int = 0
    """ns since the epoch; 0 when the image does not say."""
    tags: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    pending: str = ""
    """As in `storage.snapshots.Layer`."""
    blobs: tuple[Descriptor, ...] = ()
    """One per layer, when it was pulled or pushed: its blobs in registries."""
    oci: bool = False
    """It arrived with an OCI manifest, and is pushed with one."""
    manifest: str = ""
    """Digest of the manifest that it was pulled with; a blob of the content store."""
    parent: str = ""
    """The image that it was made from, which is kept as long as this one.

    Unknown for pulled images.
    """

    @property
    def familiar_tags(self) -> list[str]:
        """In the familiar form, sorted."""
        return sorted(reference.read(tag).familiar for tag in self.tags)

    @property
    def familiar_digests(self) -> list[str]:
        return sorted(reference.read(digest).familiar for digest in self.digests)

    @property
    def labels(self) -> dict[str, str]:
        return self.config.config.labels if self.config.config is not None else {}


class ImageStore:
    """All images of one engine; its methods belong to one loop."""

    def __init__(
        self,
        records: Records,
        content: Content,
        snapshots: Snapshots,
        events: EventLog,
        *,
        users: Callable[[str], Sequence[ImageUser]],
    ) -> None:
        self._records = records
        self._table = records.table("image", ImageRecord)
        self._content = content
        self._snapshots = snapshots
        self._events = events
        self._users = users
        self._layers = Layers(snapshots)
        self.idle = Idle()
        self.idle.when_idle(self._layers.release)
        self._images: dict[str, ImageRecord] = {}
        self.changed: Observers[[Collection[str]]] = Observers("images changed")
        """Called with the ids of images that are new, deleted or renamed."""
        self._by_name: dict[str, str] = {}
        """Canonical tag or digest reference → id."""
        self._children: dict[str, set[str]] = {}
        """Image → the images made from it, if any."""
        self._changing = asyncio.Lock()
        """Held from a decision about records until they are committed and visible."""
        self._loading: dict[str, int] = {}
        """chain_ids claimed by running loads, with the number of claims."""
        self._settling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Load the records; drop images that lost layers or configuration in a crash, and blobs
        that no image names.
        """
        changes: list[Change] = []
        blobs = self._content.digests()
        for image_id, record in self._table.load().items():
            lost = self._lost(record, blobs)
            if lost:
                _log.warning("image %s is dropped: %s", image_id, lost)
                changes.append(self._table.delete(image_id))
            else:
                self._put(record)
        await self._records.commit(*changes)
        named = self._images.keys() | {record.manifest for record in self._images.values()}
        for digest in blobs - named:
            self._content.delete(digest)
        if any(record.pending for record in self._images.values()):
            self._settle_soon()

    def _lost(self, record: ImageRecord, blobs: set[str]) -> str:
        if record.pending not in ("", self._snapshots.boot):
            return "the host went down before it was on the disk"
        if record.id not in blobs:
            return "its configuration is missing"
        for chain_id in record.chain_ids:
            if self._snapshots.layer(chain_id) is None:
                return f"its layer {chain_id} is missing"
        return ""

    async def close(self) -> None:
        """Wait for background work."""
        self.idle.close()
        self._layers.release()
        if self._settling is not None:
            await asyncio.wait([self._settling])

    # --- reading ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[ImageRecord]:
        return iter(self._images.values())

    def chain_ids(self) -> set[str]:
        """Every layer that an image or a load under way needs."""
        return {chain_id for record in self._images.values() for chain_id in record.chain_ids} | self._loading.keys()

    def get(self, name: str) -> ImageRecord:
        """By reference (latest when it has no tag), id, or a prefix of an id that only one image
        has.

        Raises NotFound as Docker does, with the complete name (`busybox:latest`) or with the fault
        of its form.
        """
        found = self._images.get(name) or self._images.get(f"sha256:{name}")
        if found is not None:
            return found
        missing = name
        try:
            wanted = reference.parse(name).tagged()
        except InvalidParameter as error:
            missing = f"{name}: {error.message}"
        else:
            image_id = self._by_name.get(wanted.canonical)
            if image_id is not None:
                return self._images[image_id]
            missing = wanted.familiar
        prefix = name.removeprefix("sha256:")
        if prefix and set(prefix) <= set("0123456789abcdef"):
            matches = [image_id for image_id in self._images if image_id.startswith(prefix, 7)]
            if len(matches) > 1:
                raise NotFound(f"No such image: {name}: {len(matches)} images have an id that begins so")
            if matches:
                return self._images[matches[0]]
            if len(prefix) == 64:
                missing = name
        raise NotFound(f"No such image: {missing}")

    def summaries(
        self,
        *,
        intermediate: bool = False,
        name: str = "",
        filters: Mapping[str, Sequence[str]] | None = None,
    ) -> list[ImageSummary]:
        """The list, newest first. `intermediate`: also nameless images that others were made from.

        `name`: only images with that repository, or repository and tag, with `*` and `?` within a
        part. Raises NotFound for an unknown image in the filters `before` and `since`.
        """
        filters = filters or {}
        bounds = [(self.get(other).created, True) for other in filters.get("before", ())]
        bounds += [(self.get(other).created, False) for other in filters.get("since", ())]
        dangling = filters.get("dangling")
        found = []
        for record in sorted(self._images.values(), key=lambda record: (-record.created, record.id)):
            if any(record.created >= at if before else record.created <= at for at, before in bounds):
                continue
            nameless = not record.tags and not record.digests
            if record.id in self._children and (
                (nameless and not intermediate) or (dangling and not bool(record.tags))
            ):
                continue
            if dangling and bool(record.tags) == (dangling[0] in ("1", "true", "True")):
                continue
            if not _labelled(record.labels, filters.get("label", ())):
                continue
            names = list(record.tags)
            patterns = [*((name,) if name else ()), *filters.get("reference", ())]
            if patterns:
                names = [tag for tag in names if all(_matches(reference.read(tag), pattern) for pattern in patterns)]
                if not names:
                    continue
            found.append(self._summary(record, names))
        return found

    def _summary(self, record: ImageRecord, names: Iterable[str]) -> ImageSummary:
        tags = sorted(reference.read(name).familiar for name in names)
        nameless = not tags and not record.digests
        return ImageSummary(
            id=record.id,
            parent_id=record.parent,
            repo_tags=["<none>:<none>"] if nameless else tags,
            repo_digests=["<none>@<none>"] if nameless else record.familiar_digests,
            created=times.unix_seconds(record.created),
            size=record.size,
            virtual_size=record.size,
            labels=record.labels,
        )

    def inspect(self, name: str) -> ImageInspect:
        """Everything about one image. Raises as `get`."""
        record = self.get(name)
        config = record.config
        return ImageInspect(
            id=record.id,
            repo_tags=record.familiar_tags,
            repo_digests=record.familiar_digests,
            parent=record.parent,
            comment=config.comment,
            created=times.rfc3339(record.created),
            container=config.container,
            container_config=config.container_config or Config(),
            docker_version=config.docker_version,
            engine_version=config.docker_version,
            author=config.author,
            config=config.config or Config(),
            architecture=config.architecture,
            os=config.os,
            size=record.size,
            virtual_size=record.size,
            graph_driver=GraphDriver(
                name=DRIVER_NAME, data=self._snapshots.layer_data(record.chain_ids[-1]) if record.chain_ids else {}
            ),
            root_fs=InspectRootFS(type="layers", layers=list(config.rootfs.diff_ids)),
        )

    def history(self, name: str) -> list[HistoryItem]:
        """The steps that made an image, newest first, also those without a layer. As `get`."""
        record = self.get(name)
        sizes = [layer.size for chain_id in record.chain_ids if (layer := self._snapshots.layer(chain_id))]
        items: list[HistoryItem] = []
        for step in record.config.history:
            size = 0 if step.empty_layer or not sizes else sizes.pop(0)
            items.append(
                HistoryItem(
                    id="<missing>",
                    created=times.unix_seconds(_nanoseconds(step.created)),
                    created_by=step.created_by,
                    tags=None,
                    size=size,
                    comment=step.comment,
                )
            )
        for size in sizes:  # layers that the history does not list
            created = times.unix_seconds(record.created)
            items.append(HistoryItem(id="<missing>", created=created, created_by="", tags=None, size=size, comment=""))
        items.reverse()
        maker: ImageRecord | None = record
        for at, item in enumerate(items):  # as many steps as there are images: each image has one
            if maker is None:
                break
            items[at] = msgspec.structs.replace(item, id=maker.id, tags=maker.familiar_tags or None)
            maker = self._images.get(maker.parent)
        return items

    # --- tags -------------------------------------------------------------------------------------

    async def tag(self, name: str, repository: str, tag: str = "") -> None:
        """Give the image `name` another name. An image that had that name loses it.

        Raises NotFound, and InvalidParameter for a malformed name.
        """
        wanted = reference.with_tag(repository, tag)
        async with self._changing:
            record = self.get(name)
            await self._commit(self._renamed({record.id: record}, {record.id: [wanted]}))
        self._publish(record.id, "tag", wanted.familiar)

    def _renamed(
        self, changed: dict[str, ImageRecord], names: Mapping[str, Sequence[Reference]]
    ) -> dict[str, ImageRecord]:
        """`changed`, with names added and taken from their former owners.

        The later of two claims on one name wins.
        """
        changed = dict(changed)
        for image_id, wanted in names.items():
            for name in wanted:
                canonical = name.canonical
                owners = {
                    self._by_name.get(canonical),
                    *(i for i, record in changed.items() if canonical in record.tags),
                }
                for owner in owners - {None, image_id}:
                    former = changed.get(owner or "") or self._images[owner or ""]
                    tags = tuple(tag for tag in former.tags if tag != canonical)
                    changed[former.id] = msgspec.structs.replace(former, tags=tags)
                record = changed[image_id]
                if canonical not in record.tags:
                    changed[image_id] = msgspec.structs.replace(record, tags=(*record.tags, canonical))
        return changed

    def descendants(self, image_id: str) -> set[str]:
        """The image and those that were made from it, directly or not."""
        children: dict[str, list[str]] = {}
        for record in self._images.values():
            if record.parent:
                children.setdefault(record.parent, []).append(record.id)
        found, waiting = set[str](), [image_id]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting += children.get(each, ())
        return found

    async def _commit(self, changed: Mapping[str, ImageRecord | None]) -> None:
        """Write the records (None: remove it), then publish them to readers."""
        await self._records.commit(
            *(
                self._table.delete(image_id) if record is None else self._table.put(image_id, record)
                for image_id, record in changed.items()
            )
        )
        for image_id, record in changed.items():
            old = self._images.get(image_id)
            if old is not None:
                for name in (*old.tags, *old.digests):
                    if self._by_name.get(name) == image_id:
                        del self._by_name[name]
                if old.parent:
                    self._children[old.parent].discard(image_id)
                    if not self._children[old.parent]:
                        del self._children[old.parent]
            if record is None:
                del self._images[image_id]
            else:
                self._put(record)
        self.changed(changed.keys())

    def _put(self, record: ImageRecord) -> None:
        if record.id not in self._images and record.chain_ids:
            self._snapshots.retain(record.chain_ids[-1])
        self._images[record.id] = record
        if record.parent:
            self._children.setdefault(record.parent, set()).add(record.id)
        for name in (*record.tags, *record.digests):
            self._by_name[name] = record.id

    def _publish(self, image_id: str, action: str, name: str) -> None:
        record = self._images.get(image_id)
        self._events.publish("image", action, image_id, {**(record.labels if record else {}), "name": name})

    # --- delete -----------------------------------------------------------------------------------

    async def delete(self, name: str, force: bool = False, prune: bool = True) -> list[Deletion]:
        """Take a name from an image, or the image from the engine when that was its last name or it
        is named by id.

        `prune`: images that it was made from go too, up to the first that has a name, a container
        or another image made from it. Raises InvalidParameter for a blank name, NotFound, and
        Conflict as Docker does.
        """
        if not name.strip():
            raise InvalidParameter("image name cannot be blank")
        async with self._changing:
            record = self.get(name)
            done: list[Deletion] = []
            by_id = record.id.startswith(name.removeprefix("sha256:"), 7)
            if by_id:
                if _single_repository(record):
                    self._check_unused(record, force=force, references=False)
            else:
                record = await self._untag(record, name, force, done)
                if record.tags or record.digests:
                    return done
            try:
                self._check_unused(record, force=force, references=not _single_repository(record))
            except Conflict:
                # A name was requested to be removed, and was. It is no failure that the image stays
                # for its containers.
                if not by_id:
                    return done
                raise
            going = [record, *(self._orphans(record) if prune else ())]
            await self._commit({each.id: None for each in going})
            for each in going:
                await asyncio.to_thread(self._content.delete, each.id)
                await self._drop_manifest(each.manifest)
        for gone in (*record.tags, *record.digests):
            done.append(Deletion(untagged=reference.read(gone).familiar))
            self._events.publish("image", "untag", record.id, {**record.labels, "name": record.id})
        for each in going:
            self._events.publish("image", "delete", each.id, {**each.labels, "name": each.id})
            done.append(Deletion(deleted=each.id))
            if each.chain_ids:
                done += [Deletion(deleted=chain_id) for chain_id in await self._snapshots.release(each.chain_ids[-1])]
        return done

    def _orphans(self, record: ImageRecord) -> Iterator[ImageRecord]:
        """Nameless ancestors that are unused once this image is gone, the nearest first."""
        while (parent := self._images.get(record.parent)) is not None:
            if parent.tags or parent.digests or self._users(parent.id) or len(self._children[parent.id]) > 1:
                return
            yield parent
            record = parent

    async def _untag(self, record: ImageRecord, name: str, force: bool, done: list[Deletion]) -> ImageRecord:
        """Remove one name from an image, and the digests of a repository without remaining tags."""
        wanted = reference.parse(name).tagged()
        users = self._users(record.id)
        if not force and users and _single_repository(record):
            raise Conflict(
                f'conflict: unable to remove repository reference "{name}" (must force) - '
                f"container {users[0].id[:12]} is using its referenced image {record.id[7:19]}"
            )
        tags = tuple(tag for tag in record.tags if tag != wanted.canonical)
        digests = tuple(digest for digest in record.digests if digest != wanted.canonical)
        if not any(reference.read(tag).repository == wanted.repository for tag in tags):
            digests = tuple(digest for digest in digests if reference.read(digest).repository != wanted.repository)
        gone = [found for found in (*record.tags, *record.digests) if found not in (*tags, *digests)]
        remaining = msgspec.structs.replace(record, tags=tags, digests=digests)
        await self._commit({record.id: remaining})
        for canonical in gone:
            done.append(Deletion(untagged=reference.read(canonical).familiar))
            self._publish(record.id, "untag", record.id)
        return remaining

    def _check_unused(self, record: ImageRecord, *, force: bool, references: bool) -> None:
        """Raises Conflict when the image cannot be deleted.

        `force` overrides everything but running containers and child images.
        """
        if record.id in self._children:
            raise Conflict(
                f"conflict: unable to delete {record.id[7:19]} (cannot be forced) - image has dependent child images"
            )
        for user in self._users(record.id):
            if user.running:
                raise Conflict(
                    f"conflict: unable to delete {record.id[7:19]} (cannot be forced) - "
                    f"image is being used by running container {user.id[:12]}"
                )
        if force:
            return
        if references and (record.tags or record.digests):
            raise Conflict(
                f"conflict: unable to delete {record.id[7:19]} (must be forced) - "
                "image is referenced in multiple repositories"
            )
        for user in self._users(record.id):
            raise Conflict(
                f"conflict: unable to delete {record.id[7:19]} (must be forced) - "
                f"image is being used by stopped container {user.id[:12]}"
            )

    # --- load -------------------------------------------------------------------------------------

    async def load(self, body: AsyncIterator[bytes], quiet: bool = False) -> AsyncGenerator[Progress, None]:
        """Load every image of an archive, or none. Yields the progress that Docker's clients draw;
        with `quiet` only the confirmations.

        Raises InvalidParameter for a bad archive, ServerError when the disk does not take it.
        Nothing is left behind then.
        """
        with self.idle.work():
            async with received(body, self._content.temporary, self._layers, self._snapshots.layer_paths()) as (
                span,
                early,
            ):
                found = await archive.images(await self._layers.work(archive.Archive, span, early), self._layers)
                load = Load(self._layers, found, self.claims())
                try:
                    async with contextlib.aclosing(load.run()) as steps:
                        async for progress in steps:
                            if not quiet:
                                yield progress
                    confirmations = await uninterrupted(self._keep(found))
                finally:
                    await uninterrupted(load.release())
        self._settle_soon()
        for confirmation in confirmations:
            yield confirmation

    async def _keep(self, found: Sequence[ArchivedImage]) -> list[Progress]:
        """Create the records of images whose layers all exist."""
        async with self._changing:
            changed: dict[str, ImageRecord] = {}
            names: dict[str, list[Reference]] = {}
            said: list[Progress] = []
            for image in found:
                image_id = await asyncio.to_thread(self._content.ingest, image.raw)
                record = changed.get(image_id) or self._images.get(image_id) or self._record(image_id, image.config)
                if image.parent:
                    record = msgspec.structs.replace(record, parent=image.parent)
                changed[image_id] = record
                names.setdefault(image_id, []).extend(image.names)
                for name in image.names:
                    former = self._by_name.get(name.canonical, image_id)
                    if former != image_id:
                        said.append(Progress(stream=_renamed_text(name, former)))
                    said.append(Progress(stream=f"Loaded image: {name.familiar}\n"))
                if not image.names:
                    said.append(Progress(stream=f"Loaded image ID: {image_id}\n"))
            try:
                await self._commit(self._renamed(changed, names))
            except BaseException:
                for image_id in changed.keys() - self._images.keys():
                    self._content.delete(image_id)
                raise
        for image in found:
            self._publish(image.id, "load", image.id)
            for name in image.names:
                self._publish(image.id, "tag", name.familiar)
        return said

    # --- for those that bring images from elsewhere (pull, import, commit) ------------------------

    @property
    def layers(self) -> Layers:
        return self._layers

    @property
    def snapshots(self) -> Snapshots:
        return self._snapshots

    @property
    def temporary(self) -> Path:
        """A directory for receiving a body."""
        return self._content.temporary

    @contextlib.asynccontextmanager
    async def claimed(self) -> AsyncIterator[Callable[[str], None]]:
        """A function that claims a layer, which need not exist yet.

        At the end of the context, claimed layers without an image are removed.
        """
        claims = self.claims()
        try:
            yield claims.claim
        finally:
            await uninterrupted(claims.release())

    def claims(self) -> Claims:
        """As `claimed`, for operations that do not end with a block."""
        return Claims(self._snapshots, self._loading, self.idle)

    def configuration(self, record: ImageRecord) -> bytes:
        """The document whose digest is the image's id. Blocking."""
        return self._content.read(record.id)

    async def adopt(
        self,
        raw: bytes,
        config: ImageConfig,
        *,
        tags: Sequence[Reference] = (),
        digest: Reference | None = None,
        blobs: Sequence[Descriptor] = (),
        oci: bool = False,
        manifest: bytes = b"",
        parent: str = "",
    ) -> bool:
        """Make an image of a configuration whose layers all exist and are claimed, or name the
        existing one. False when nothing changed.
        """
        image_id = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        async with self._changing:
            await asyncio.to_thread(self._content.ingest, raw)
            known = self._images.get(image_id)
            record = known or self._record(image_id, config)
            if known is None and parent in self._images:
                record = msgspec.structs.replace(record, parent=parent)
            changed: dict[str, ImageRecord] = {}
            if manifest:
                kept = await asyncio.to_thread(self._content.ingest, manifest)
                record = msgspec.structs.replace(record, blobs=tuple(blobs), oci=oci, manifest=kept)
            if digest is not None and digest.canonical not in record.digests:
                former = self._images.get(self._by_name.get(digest.canonical, ""))
                if former is not None:
                    rest = tuple(name for name in former.digests if name != digest.canonical)
                    changed[former.id] = msgspec.structs.replace(former, digests=rest)
                record = msgspec.structs.replace(record, digests=(*record.digests, digest.canonical))
            changed = self._renamed({**changed, image_id: record}, {image_id: tags})
            names_changed = known is None or (known.tags, known.digests) != (
                changed[image_id].tags,
                changed[image_id].digests,
            )
            if changed != {image_id: known}:
                try:
                    await uninterrupted(self._commit(changed))
                except BaseException:
                    if image_id not in self._images:
                        self._content.delete(image_id)
                    raise
                finally:
                    await self._drop_manifest(record.manifest)
                    if known is not None:
                        await self._drop_manifest(known.manifest)
        self._settle_soon()
        return names_changed

    async def _drop_manifest(self, digest: str) -> None:
        """Remove the blob unless an image names it."""
        if digest and all(digest not in (record.manifest, record.id) for record in self._images.values()):
            await asyncio.to_thread(self._content.delete, digest)

    def manifest(self, record: ImageRecord) -> tuple[bytes, Manifest]:
        """The manifest that the image was pulled with. Blocking."""
        raw = self._content.read(record.manifest)
        return raw, archive.decode(raw, Manifest, record.manifest)

    async def pushed(self, image_id: str, digest: Reference, blobs: Sequence[Descriptor]) -> None:
        """Record the digest and blobs of the image in a registry.

        Does nothing when the image was deleted meanwhile.
        """
        async with self._changing:
            record = self._images.get(image_id)
            if record is None:
                return
            changed: dict[str, ImageRecord] = {}
            former = self._images.get(self._by_name.get(digest.canonical, image_id))
            if former is not None and former.id != image_id:
                rest = tuple(name for name in former.digests if name != digest.canonical)
                changed[former.id] = msgspec.structs.replace(former, digests=rest)
            digests = tuple(dict.fromkeys((*record.digests, digest.canonical)))
            # The pulled manifest stays: a registry that has those blobs gets it again.
            kept = record.blobs if record.manifest else tuple(blobs)
            changed[image_id] = msgspec.structs.replace(record, digests=digests, blobs=kept)
            await uninterrupted(self._commit(changed))

    def _record(self, image_id: str, config: ImageConfig) -> ImageRecord:
        chains = chain_ids(config.rootfs.diff_ids)
        layers = [layer for chain_id in chains if (layer := self._snapshots.layer(chain_id))]
        return ImageRecord(
            id=image_id,
            config=config,
            chain_ids=chains,
            size=sum(layer.size for layer in layers),
            created=_nanoseconds(config.created),
            pending=self._snapshots.boot,
        )

    def _settle_soon(self) -> None:
        """Write loaded layers back to the disk, in the background, one run at a time."""
        before = self._settling

        async def settle() -> None:
            try:
                if before is not None:
                    await asyncio.wait([before])
                pending = [image_id for image_id, record in self._images.items() if record.pending]
                if not pending:
                    return
                await self._snapshots.settle()
                async with self._changing:
                    await self._commit(
                        {
                            image_id: msgspec.structs.replace(self._images[image_id], pending="")
                            for image_id in pending
                            if image_id in self._images
                        }
                    )
            except (EngineError, OSError) as error:
                _log.warning("writing back images: %s", error)

        self._settling = spawn(settle(), "writing back images")


def _renamed_text(name: Reference, former: str) -> str:
    return f"The image {name.familiar} already exists, renaming the old one with ID {former} to empty string\n"


def _nanoseconds(text: str) -> int:
    try:
        return times.parse_rfc3339(text) if text else 0
    except (ValueError, OverflowError):
        return 0  # a document from outside: no reason to reject the image


def _labelled(labels: Mapping[str, str], wanted: Iterable[str]) -> bool:
    for text in wanted:
        key, equals, value = text.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def _matches(name: Reference, pattern: str) -> bool:
    """True when a name matches a client's pattern: repository or repository:tag, familiar or
    canonical, with wildcards in each part.
    """
    candidates = (name.familiar_repository, name.familiar, name.repository, name.canonical)
    parts = pattern.split("/")
    return any(
        len(parts) == len(found)
        and all(fnmatch.fnmatchcase(part, wanted) for part, wanted in zip(found, parts, strict=True))
        for found in (candidate.split("/") for candidate in candidates)
    )


def _single_repository(record: ImageRecord) -> bool:
    """At most one tag, and all digests of its repository (Docker's isSingleReference)."""
    if len(record.tags) + len(record.digests) <= 1:
        return True
    repositories = {reference.read(digest).repository for digest in record.digests}
    if len(record.tags) > 1:
        return False
    first = reference.read((*record.tags, *record.digests)[0]).repository
    return repositories == {first}


__all__ = ["FILTERS", "ImageRecord", "ImageStore", "ImageUser"]
