"""The images of an engine: their records and tags, and every verb on them.

Owns:    the records of kind `image` (tags are part of them), the blobs of configurations, and the
         claims on layers that follow from both. Readers use immutable records in memory
         (`index.py`); a change becomes visible after it was committed.
Threads: the event loop's. One lock covers each decision about records until it is visible.
Raises:  NotFound, Conflict, InvalidParameter as Docker does; ServerError when the disk fails.
Not here: how images are shown (`views.py`), archives and extraction (`archive.py`, `layers.py`),
what a container does with an image.

Load keeps nothing until all of it is verified: layers become durable one by one but are claimed by
the load alone, and images, their tags and the tags' former owners change in one transaction at the
end. A crash before it leaves layers without an image; the sweep at start removes them. The
write-back of the files is not awaited: see `pending` in storage/overlay.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.common.pruning import OnlyOne
from engine.errors import Conflict, EngineError, InvalidParameter, words
from engine.events import EventLog
from engine.images import archive, platforms, reference, views
from engine.images.archive import ArchivedImage
from engine.images.idle import Idle
from engine.images.index import Index
from engine.images.layers import Layers, chain_ids
from engine.images.load import Claims, Load
from engine.images.receiving import received
from engine.images.record import ImageRecord, ImageUser, created
from engine.images.reference import Reference
from engine.images.usage import Sizes
from engine.storage.content import Content
from engine.storage.records import Change, Records
from engine.storage.snapshots import Snapshots
from engine.system.observers import Observers
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted
from engine.wire.images import (
    Deletion,
    Descriptor,
    ImageConfig,
    ImageSummary,
    Manifest,
    Platform,
    Progress,
)

_log = logging.getLogger(__name__)


class Built(NamedTuple):
    """An image made here: its id, its document and that document's bytes, and the image that it was
    made from. The bytes are empty for an image of the store that gets a parent.
    """

    id: str
    config: ImageConfig
    raw: bytes
    parent: str


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
        counts: Callable[[], Mapping[str, int]],
    ) -> None:
        """`users`: the containers that were made from an image. `counts`: their number for every
        image that has any, by id.
        """
        self._records = records
        self._table = records.table("image", ImageRecord)
        self._content = content
        self._snapshots = snapshots
        self._events = events
        self._users = users
        self._counts = counts
        self._layers = Layers(snapshots)
        self.idle = Idle()
        self.index = Index()
        """All images; its readers need no lock."""
        self.kept = Index()
        """Deleted images that the build cache keeps, with their layers: see `keeps`."""
        self.keeps: Callable[[str], bool] = lambda image_id: False
        """True if the build cache keeps the image of this id when it is deleted."""
        self.sizes = Sizes(self.index, self._layer_size)
        self.changed: Observers[[Collection[str]]] = Observers("images changed")
        """Called with the ids of images that are new, deleted or renamed."""
        self.pruning = OnlyOne()
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
                _log.warning("image %s cannot be read and is removed: %s", image_id, lost)
                changes.append(self._table.delete(image_id))
            else:
                self._show(record)
        await self._records.commit(*changes)
        named = self.index.ids() | self.kept.ids() | {record.manifest for record in self.index}
        for digest in blobs - named:
            self._content.delete(digest)
        if any(record.pending for record in self._all()):
            self._settle_soon()

    def _all(self) -> Iterator[ImageRecord]:
        return itertools.chain(self.index, self.kept)

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
        if self._settling is not None:
            await asyncio.wait([self._settling])

    # --- reading ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[ImageRecord]:
        return iter(self.index)

    def chain_ids(self) -> set[str]:
        """Every layer that an image, the build cache or a load under way needs."""
        return {chain_id for record in self._all() for chain_id in record.chain_ids} | self._loading.keys()

    def get(self, name: str, platform: Platform | None = None) -> ImageRecord:
        """See `Index.get`. Raises NotFound also for an image of another platform."""
        record = self.index.get(name)
        platforms.check(name, record.config, platform)
        return record

    def containers(self) -> Mapping[str, int]:
        """The number of containers of every image that has any, by id."""
        return self._counts()

    def usage(self) -> tuple[int, list[ImageSummary]]:
        """Bytes of all layers, and the images with the room that each takes."""
        found = views.summaries(self.index, shared=self.sizes.shared, containers=self._counts())
        return self.sizes.total, found

    def _layer_size(self, chain_id: str) -> int:
        layer = self._snapshots.layer(chain_id)
        return layer.size if layer is not None else 0

    # --- tags -------------------------------------------------------------------------------------

    async def tag(self, name: str, repository: str, tag: str = "") -> None:
        """Give the image `name` another name. An image that had that name loses it.

        Raises NotFound, and InvalidParameter for a malformed name.
        """
        wanted = reference.with_tag(repository, tag)
        async with self._changing:
            record = msgspec.structs.replace(self.get(name), tagged=time.time_ns())
            await self._commit(self.index.renamed({record.id: record}, {record.id: [wanted]}))
        self._publish(record.id, "tag", wanted.familiar)

    async def _commit(self, changed: Mapping[str, ImageRecord | None], *more: Change) -> None:
        """Write the records (None: remove it), with `more` in one transaction, then publish them to
        readers.
        """
        await self._records.commit(*await asyncio.to_thread(self._changes, changed), *more)
        for image_id, record in changed.items():
            if record is None:
                self.index.drop(image_id)
                self.kept.drop(image_id)
            else:
                self._show(record)
        self.changed(changed.keys())

    def _changes(self, changed: Mapping[str, ImageRecord | None]) -> list[Change]:
        """Encode the records: those of a build with many steps have 100 MB. Blocking."""
        return [
            self._table.delete(image_id) if record is None else self._table.put(image_id, record)
            for image_id, record in changed.items()
        ]

    def _show(self, record: ImageRecord) -> None:
        """A committed record, to readers. A new image keeps its layers."""
        if not self._has(record.id) and record.chain_ids:
            self._snapshots.retain(record.chain_ids[-1])
        shown, other = (self.kept, self.index) if record.kept else (self.index, self.kept)
        other.drop(record.id)
        shown.put(record)

    def _has(self, image_id: str) -> bool:
        return image_id in self.index or image_id in self.kept

    def _publish(self, image_id: str, action: str, name: str) -> None:
        record = self.index.find(image_id)
        self._events.publish("image", action, image_id, {**(record.labels if record else {}), "name": name})

    def publish_created(self, image_id: str) -> None:
        """The event of an image that a build or a commit has made, also without a name."""
        self._publish(image_id, "create", image_id)

    # --- delete -----------------------------------------------------------------------------------

    async def delete(
        self, name: str, force: bool = False, prune: bool = True, platform: Platform | None = None
    ) -> list[Deletion]:
        """Take a name from an image, or the image from the engine when that was its last name or it
        is named by id. With `platform` only an image of that platform.

        `prune`: images that it was made from go too, up to the first that has a name, a container
        or another image made from it. Raises InvalidParameter for a blank name, NotFound, and
        Conflict as Docker does.
        """
        if not name.strip():
            raise InvalidParameter("image name cannot be blank")
        async with self._changing:
            record = self.get(name, platform)
            done: list[Deletion] = []
            by_id = record.id.startswith(name.removeprefix("sha256:"), 7) or name.endswith(f"@{record.id}")
            if by_id:
                if record.in_one_repository:
                    self._check_unused(record, force=force, references=False)
            else:
                record = await self._untag(record, name, force, done)
                if record.tags or record.digests:
                    return done
            try:
                self._check_unused(record, force=force, references=not record.in_one_repository)
            except Conflict:
                # A name was requested to be removed, and was. It is no failure that the image stays
                # for its containers.
                if not by_id:
                    return done
                raise
            going = await self._drop(record, parents=prune)
        return done + await self._dropped(going)

    async def _drop(self, record: ImageRecord, *, parents: bool) -> list[ImageRecord]:
        """Remove the record of an image, and with `parents` those of the nameless images that it
        was made from. Returns them for `_dropped`, which follows without the lock. Those that the
        build cache needs are kept for it.
        """
        going = [record, *(self.index.orphans(record, self._users) if parents else ())]
        going = [msgspec.structs.replace(each, kept=self.keeps(each.id)) for each in going]
        nameless = {"tags": (), "digests": (), "manifest": ""}
        await self._commit(
            {each.id: msgspec.structs.replace(each, **nameless) if each.kept else None for each in going}
        )
        for each in going:
            if not each.kept:
                await asyncio.to_thread(self._content.delete, each.id)
            await self._drop_manifest(each.manifest)
        return going

    async def _dropped(self, going: Sequence[ImageRecord]) -> list[Deletion]:
        """Publish the end of images and release their layers."""
        done: list[Deletion] = []
        for each in going:
            for gone in (*each.tags, *each.digests):
                done.append(Deletion(untagged=reference.read(gone).familiar))
                self._events.publish("image", "untag", each.id, {**each.labels, "name": each.id})
        for each in going:
            self._events.publish("image", "delete", each.id, {**each.labels, "name": each.id})
            done.append(Deletion(deleted=each.id))
            if each.chain_ids and not each.kept:
                done += [Deletion(deleted=chain_id) for chain_id in await self._snapshots.release(each.chain_ids[-1])]
        return done

    async def delete_if(self, image_id: str, wanted: Callable[[ImageRecord], bool]) -> list[Deletion]:
        """Delete an image with all its names, and the nameless images that it was made from, if it
        is still there, no container and no other image was made from it, and `wanted` is true.
        """
        async with self._changing:
            record = self.index.find(image_id)
            if record is None or self.index.has_children(image_id) or self._users(image_id) or not wanted(record):
                return []
            going = await self._drop(record, parents=True)
        return await self._dropped(going)

    async def delete_cached(self, image_id: str) -> bool:
        """Delete an image that the build cache no longer needs: a kept one, or one without a name,
        a container and an image made from it. False if it stays.
        """
        async with self._changing:
            kept, record = self.kept.find(image_id), self.index.find(image_id)
            if kept is None and (
                record is None or not record.nameless or self.index.has_children(image_id) or self._users(image_id)
            ):
                return False
            await self._commit({image_id: None})
            await asyncio.to_thread(self._content.delete, image_id)
            await self._drop_manifest(record.manifest if record is not None else "")
        if record is not None:
            await self._dropped([record])
        elif kept is not None and kept.chain_ids:  # clients have seen its end before
            await self._snapshots.release(kept.chain_ids[-1])
        return True

    async def _untag(self, record: ImageRecord, name: str, force: bool, done: list[Deletion]) -> ImageRecord:
        """Remove one name from an image, and the digests of a repository without remaining tags."""
        wanted = reference.parse(name).tagged()
        users = self._users(record.id)
        if not force and users and record.in_one_repository:
            raise Conflict(
                f'conflict: unable to remove repository reference "{name}" (must force) - '
                f"container {users[0].id[:12]} is using its referenced image {record.id[7:19]}"
            )
        tags = tuple(tag for tag in record.tags if tag != wanted.canonical)
        digests = tuple(digest for digest in record.digests if digest != wanted.canonical)
        if not any(reference.read(tag).repository == wanted.repository for tag in tags):
            digests = tuple(digest for digest in digests if reference.read(digest).repository != wanted.repository)
        gone = [found for found in (*record.tags, *record.digests) if found not in (*tags, *digests)]
        # Without a digest, the manifest that it was pulled with has no name left.
        manifest = record.manifest if digests else ""
        remaining = msgspec.structs.replace(record, tags=tags, digests=digests, manifest=manifest)
        await self._commit({record.id: remaining})
        if manifest != record.manifest:
            await self._drop_manifest(record.manifest)
        for canonical in gone:
            done.append(Deletion(untagged=reference.read(canonical).familiar))
            self._publish(record.id, "untag", record.id)
        return remaining

    def _check_unused(self, record: ImageRecord, *, force: bool, references: bool) -> None:
        """Raises Conflict when the image cannot be deleted.

        `force` overrides everything but running containers and child images.
        """
        if self.index.has_children(record.id):
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

    async def load(
        self, body: AsyncIterator[bytes], quiet: bool = False, platform: Platform | None = None
    ) -> AsyncGenerator[Progress, None]:
        """Load every image of an archive, or none. Yields the progress that Docker's clients draw;
        with `quiet` only the confirmations.

        Raises InvalidParameter for a bad archive, NotFound for one without an image for
        `platform`, ServerError when the disk does not take it. Nothing is left behind then.
        """
        with self.idle.work():
            async with received(body, self._content.temporary, self._layers, self._snapshots.layer_paths()) as (
                span,
                early,
            ):
                members = await self._layers.work(archive.Archive, span, early)
                images = await archive.images(members, self._layers, platform)
                load = Load(self._layers, images, self.claims())
                try:
                    async with contextlib.aclosing(load.run()) as steps:
                        async for progress in steps:
                            if not quiet:
                                yield progress
                    confirmations = await uninterrupted(self._keep(images))
                finally:
                    await uninterrupted(load.release())
        self._settle_soon()
        for confirmation in confirmations:
            yield confirmation

    async def _keep(self, images: Sequence[ArchivedImage]) -> list[Progress]:
        """Create the records of images whose layers all exist."""
        async with self._changing:
            changed: dict[str, ImageRecord] = {}
            names: dict[str, list[Reference]] = {}
            said: list[Progress] = []
            for image in images:
                image_id = await asyncio.to_thread(self._content.ingest, image.raw)
                record = changed.get(image_id) or self.index.find(image_id) or self._record(image_id, image.config)
                if image.parent:
                    record = msgspec.structs.replace(record, parent=image.parent)
                changed[image_id] = record
                names.setdefault(image_id, []).extend(image.names)
                for name in image.names:
                    former = self.index.owner(name)
                    if former is not None and former.id != image_id:
                        said.append(Progress(stream=_renamed_text(name, former.id)))
                    said.append(Progress(stream=f"Loaded image: {name.familiar}\n"))
                if not image.names:
                    said.append(Progress(stream=f"Loaded image ID: {image_id}\n"))
            try:
                await self._commit(self.index.renamed(changed, names))
            except BaseException:
                for image_id in changed:
                    if not self._has(image_id):
                        self._content.delete(image_id)
                raise
        for image in images:
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
            known = self.index.find(image_id)
            record = known or self._record(image_id, config)
            if known is None and parent in self.index:
                record = msgspec.structs.replace(record, parent=parent)
            changed: dict[str, ImageRecord] = {}
            if manifest:
                kept = await asyncio.to_thread(self._content.ingest, manifest)
                record = msgspec.structs.replace(record, blobs=tuple(blobs), oci=oci, manifest=kept)
            if digest is not None and digest.canonical not in record.digests:
                changed = self.index.without_digest(digest, image_id)
                record = msgspec.structs.replace(record, digests=(*record.digests, digest.canonical))
            changed = self.index.renamed({**changed, image_id: record}, {image_id: tags})
            names_changed = known is None or (known.tags, known.digests) != (
                changed[image_id].tags,
                changed[image_id].digests,
            )
            if changed != {image_id: known}:
                try:
                    await uninterrupted(self._commit(changed))
                except BaseException:
                    if not self._has(image_id):
                        self._content.delete(image_id)
                    raise
                finally:
                    await self._drop_manifest(record.manifest)
                    if known is not None:
                        await self._drop_manifest(known.manifest)
        self._settle_soon()
        return names_changed

    async def record(
        self, built: Sequence[Built], names: Mapping[str, Sequence[Reference]], *more: Change, last: bool = True
    ) -> None:
        """Record images made here whose layers all exist and are claimed, and give images names,
        with `more` in one transaction.

        `last`: no more of them follow soon, so the layers are written back to the disk now. Raises
        NotFound for a named image that is not there; nothing has changed then.
        """
        async with self._changing:
            await asyncio.to_thread(lambda: [self._content.ingest(image.raw) for image in built if image.raw])
            changed: dict[str, ImageRecord] = {}
            try:
                for number, image in enumerate(built, 1):
                    if not number % 50:  # a build may have a thousand
                        await asyncio.sleep(0)
                    record = (
                        self.index.find(image.id)
                        or self._revived(image.id, changed)
                        or self._record(image.id, image.config)
                    )
                    if not record.parent and (image.parent in self.index or image.parent in changed):
                        record = msgspec.structs.replace(record, parent=image.parent)
                    changed[image.id] = record
                for image_id in names.keys() - changed.keys():
                    changed[image_id] = self.get(image_id)
                await uninterrupted(self._commit(self.index.renamed(changed, names), *more))
            except BaseException:
                for image in built:
                    if not self._has(image.id):
                        self._content.delete(image.id)
                raise
        for image_id, references in names.items():
            self.publish_created(image_id)
            for name in references:
                self._publish(image_id, "tag", name.familiar)
        if last:
            self._settle_soon()

    async def _drop_manifest(self, digest: str) -> None:
        """Remove the blob unless an image names it."""
        if digest and all(digest not in (record.manifest, record.id) for record in self.index):
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
            record = self.index.find(image_id)
            if record is None:
                return
            changed = self.index.without_digest(digest, image_id)
            digests = tuple(dict.fromkeys((*record.digests, digest.canonical)))
            # The pulled manifest stays: a registry that has those blobs gets it again.
            kept = record.blobs if record.manifest else tuple(blobs)
            changed[image_id] = msgspec.structs.replace(record, digests=digests, blobs=kept)
            await uninterrupted(self._commit(changed))

    def _revived(self, image_id: str, changed: Collection[str]) -> ImageRecord | None:
        """The record of a kept image, for clients to see again; None if it is not kept. `changed`:
        ids of images that are recorded with it.
        """
        record = self.kept.find(image_id)
        if record is None:
            return None
        parent = record.parent if record.parent in self.index or record.parent in changed else ""
        return msgspec.structs.replace(record, kept=False, parent=parent)

    def _record(self, image_id: str, config: ImageConfig) -> ImageRecord:
        chains = chain_ids(config.rootfs.diff_ids)
        layers = [layer for chain_id in chains if (layer := self._snapshots.layer(chain_id))]
        return ImageRecord(
            id=image_id,
            config=config,
            chain_ids=chains,
            size=sum(layer.size for layer in layers),
            created=created(config),
            pending=self._snapshots.boot,
        )

    def _settle_soon(self) -> None:
        """Write loaded layers back to the disk, in the background, one run at a time."""
        before = self._settling

        async def settle() -> None:
            try:
                if before is not None:
                    await asyncio.wait([before])
                pending = [record.id for record in self._all() if record.pending]
                if not pending:
                    return
                await self._snapshots.settle()
                async with self._changing:
                    await self._commit(
                        {
                            image_id: msgspec.structs.replace(record, pending="")
                            for image_id in pending
                            if (record := self.index.find(image_id) or self.kept.find(image_id)) is not None
                        }
                    )
            except (EngineError, OSError) as error:
                _log.warning("writing back images: %s", words(error))

        self._settling = spawn(settle(), "writing back images")


def _renamed_text(name: Reference, former: str) -> str:
    return f"The image {name.familiar} already exists, renaming the old one with ID {former} to empty string\n"
