"""The build cache: which step made which image, by the step's key.

A record names the image that a step made. The image and its layers live in the image store like any
other, so the cache has no content of its own. Deleting an image removes the step, unless a build of
BuildKit's dialect has used it (`own`): then the store keeps the image for the cache alone, and a
build that finds the step has it recorded again. Images and records are written in groups: while a
build runs after each step that made a layer, and at its end together with the tags.

Owns:    the records of kind `step`; images that are not written yet, and the claims on their
         layers.
Threads: the event loop's.
Raises:  ServerError when the disk fails.
Not here: keys (`keys.py`), what is looked up when (`solver.py`), what is removed (`prune.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from engine.builder.loading import STEPS
from engine.builder.state import State
from engine.errors import EngineError
from engine.images.importing import encoded
from engine.images.load import Claims
from engine.images.reference import Reference
from engine.images.store import Built, ImageStore
from engine.storage.records import Change, Records
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted

_log = logging.getLogger(__name__)


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One step's result. Times in ns since the epoch."""

    image_id: str
    parent: str = ""
    """The key of the step before."""
    text: str = ""
    """The step as its image's history shows it."""
    same_as: str = ""
    """The key of the same step, if this is a second key of it (`Cache.know`)."""
    own: bool = False
    """It stays when its image is deleted."""
    created: int = 0
    last_used: int = 0
    uses: int = 0


class Uses:
    """What one build uses: no prune removes these images, and no deletion their layers, until
    `release`.
    """

    def __init__(self, images: ImageStore, used: Counter[str]) -> None:
        """`used`: of all builds."""
        self._claims = images.claims()
        self._all = used
        self._own: Counter[str] = Counter()

    def add(self, state: State) -> None:
        if state.top:
            self._claims.claim(state.top)
        self._own[state.image_id] += 1
        self._all[state.image_id] += 1

    async def release(self) -> None:
        """Idempotent."""
        self._all -= self._own
        self._own.clear()
        await uninterrupted(self._claims.release())


class Cache:
    """See the module."""

    def __init__(self, records: Records, images: ImageStore) -> None:
        """Reads the records; blocking, at start, after `ImageStore.open`."""
        self._images = images
        self._records = records
        self._table = records.table(STEPS, StepRecord)
        rows = self._table.load()
        self._steps = {
            key: step for key, step in rows.items() if step.image_id in images.index or step.image_id in images.kept
        }
        self._unwritten = rows.keys() - self._steps.keys()
        """Keys whose records have changed, or are gone, since they were written."""
        self._by_image: dict[str, set[str]] = {}
        for key, step in self._steps.items():
            self._by_image.setdefault(step.image_id, set()).add(key)
        self._unneeded = images.kept.ids() - self._by_image.keys()
        """Images that the store keeps although no step names them."""
        self._new: dict[str, State] = {}
        """Images that are not in the store yet, or have no parent there, by id, each after its
        parent.
        """
        self._claims: Claims | None = None
        """Of the layers of `_new`."""
        self.used: Counter[str] = Counter()
        """Ids of images that builds use now."""
        self._writing = asyncio.Lock()
        self._soon: asyncio.Task[None] | None = None
        images.changed.subscribe(self._images_changed)
        images.keeps = self._keeps

    def open(self) -> None:
        """Begin to remove what a crash has left."""
        if self._unneeded:
            self.write_soon()

    async def close(self) -> None:
        """Write what is not written yet."""
        try:
            while self._new or self._unwritten or self._unneeded:
                await self.write()
        except EngineError as error:
            _log.error("writing the build cache: %s", error.message)

    # --- look up and add --------------------------------------------------------------------------

    def uses(self) -> Uses:
        """The uses of one build, which must be released."""
        return Uses(self._images, self.used)

    def find(self, key: str) -> State | None:
        """The state that the step of this key made, if it is known and complete. It has the first
        key of the step, from which those of the steps after it are made.
        """
        step = self._steps.get(key)
        if step is None:
            return None
        state = self.find(step.same_as) if step.same_as else self.state(step.image_id, key)
        if state is None:
            self._forget(key)
            return None
        now = time.time_ns()
        self._steps[key] = msgspec.structs.replace(step, last_used=now, uses=step.uses + 1)
        self._unwritten.add(key)
        return state

    def state(self, image_id: str, key: str) -> State | None:
        """The state of an image under a key; None if the image or one of its layers is gone."""
        new = self._new.get(image_id)
        if new is not None:
            return msgspec.structs.replace(new, key=key)
        kept = self._images.kept.find(image_id)
        record = kept or self._images.index.find(image_id)
        if record is None or (record.chain_ids and self._images.snapshots.layer(record.chain_ids[-1]) is None):
            return None
        state = State(key=key, image_id=image_id, document=record.config, chain_ids=record.chain_ids)
        if kept is not None:
            # A prune may remove the kept one before this is written.
            self._record(msgspec.structs.replace(state, raw=_document(state), parent=kept.parent))
        return state

    def add(self, state: State, parent_key: str, text: str) -> None:
        """A step has made `state`. It is visible to other builds at once and written later."""
        self._put(state.key, state.image_id, parent_key, text)
        known = self._images.index.find(state.image_id)
        if state.raw if known is None else state.parent and not known.parent:
            self._record(state)

    def _record(self, state: State) -> None:
        """Have the next write record the image."""
        if self._claims is None:
            self._claims = self._images.claims()
        if state.top:
            self._claims.claim(state.top)
        self._new[state.image_id] = state

    def know(self, key: str, state: State, parent_key: str, text: str) -> None:
        """A second key of a step whose state `add` got or `find` returned."""
        known = self._steps.get(key)
        if known is None or (known.image_id, known.same_as) != (state.image_id, state.key):
            self._put(key, state.image_id, parent_key, text, same_as=state.key)

    def _put(self, key: str, image_id: str, parent_key: str, text: str, same_as: str = "") -> None:
        self._forget(key)
        now = time.time_ns()
        self._steps[key] = StepRecord(
            image_id=image_id, parent=parent_key, text=text, same_as=same_as, created=now, last_used=now
        )
        self._by_image.setdefault(image_id, set()).add(key)
        self._unwritten.add(key)

    def own(self, image_id: str) -> None:
        """Keep the steps of this image when it is deleted."""
        for key in self.steps_of(image_id):
            step = self._steps[key]
            if not step.own:
                self._steps[key] = msgspec.structs.replace(step, own=True)
                self._unwritten.add(key)

    def _keeps(self, image_id: str) -> bool:
        return any(self._steps[key].own for key in self.steps_of(image_id))

    def get(self, key: str) -> StepRecord | None:
        return self._steps.get(key)

    def __iter__(self) -> Iterator[tuple[str, StepRecord]]:
        return iter([*self._steps.items()])

    def steps_of(self, image_id: str) -> Collection[str]:
        """The keys whose result is this image."""
        return self._by_image.get(image_id, ())

    def drop(self, keys: Collection[str]) -> None:
        """Forget steps. Their images stay."""
        for key in keys:
            self._forget(key)
        self.write_soon()

    def _forget(self, key: str) -> None:
        step = self._steps.pop(key, None)
        if step is not None:
            self._unwritten.add(key)
            self._by_image[step.image_id].discard(key)
            if not self._by_image[step.image_id]:
                del self._by_image[step.image_id]
                if step.image_id in self._images.kept:
                    self._unneeded.add(step.image_id)

    def _images_changed(self, image_ids: Collection[str]) -> None:
        """Images were deleted, made or renamed: forget the steps of those that are gone."""
        for image_id in image_ids:
            gone = image_id not in self._images.index and image_id not in self._images.kept
            if image_id in self._by_image and gone and image_id not in self._new:
                for key in [*self._by_image[image_id]]:
                    self._forget(key)

    # --- on disk ----------------------------------------------------------------------------------

    async def write(self) -> None:
        """Write images and steps in one transaction.

        Raises ServerError; the images stay unwritten then, and the next write has them again.
        """
        async with self._writing:
            await uninterrupted(self._write({}, last=False))

    async def write_result(self, state: State, names: Sequence[Reference]) -> None:
        """As `write`, with the result of a build, whose layers the caller claims, and its names. An
        image of the cache may have been removed meanwhile; it is recorded again.
        """
        async with self._writing:
            # Checked under the lock: an earlier write may have recorded the image, and a prune may
            # have removed it since.
            if state.image_id not in self._new:
                raw = state.raw or _document(state)
                if raw:
                    self._record(msgspec.structs.replace(state, raw=raw))
            await uninterrupted(self._write({state.image_id: names}, last=True))

    def write_soon(self) -> None:
        """Write in the background, while builds go on."""
        if self._soon is None or self._soon.done():
            self._soon = spawn(self._write_quietly(), "writing the build cache")

    async def _write_quietly(self) -> None:
        while self._new or self._unwritten or self._unneeded:  # more may have come while it wrote
            if not await self.settle():
                break

    async def settle(self) -> bool:
        """Write what is unwritten now, so that the images of a build that failed are in the store
        when its client gets the end.

        Returns False if that failed. The build that ends next gets the error.
        """
        try:
            if self._new or self._unwritten or self._unneeded:
                await self.write()
        except EngineError as error:
            _log.warning("writing the build cache: %s", error.message)
            return False
        return True

    async def _write(self, names: Mapping[str, Sequence[Reference]], last: bool) -> None:
        new, keys, claims = dict(self._new), self._unwritten, self._claims
        self._unwritten, self._claims = set(), None
        changes: list[Change] = []
        for key in keys:
            step = self._steps.get(key)
            changes.append(self._table.delete(key) if step is None else self._table.put(key, step))
        built = [Built(state.image_id, state.document, state.raw, state.parent) for state in new.values()]
        try:
            if built or names:
                await self._images.record(built, names, *changes, last=last)
            else:
                await self._records.commit(*changes)
        except BaseException:
            self._unwritten |= keys
            if claims is not None:
                for state in new.values():
                    if state.top:
                        if self._claims is None:
                            self._claims = self._images.claims()
                        self._claims.claim(state.top)
            raise
        else:
            for image_id in new:
                self._new.pop(image_id, None)
            while self._unneeded:
                image_id = self._unneeded.pop()
                if image_id in self._images.kept and not (image_id in self._by_image or image_id in self._new):
                    await self._images.delete_cached(image_id)
        finally:
            if claims is not None:
                await claims.release()


def _document(state: State) -> bytes:
    """The bytes of a document that was made here; empty for one that another program has
    encoded.
    """
    raw = encoded(state.document)
    return raw if state.image_id == f"sha256:{hashlib.sha256(raw).hexdigest()}" else b""


__all__ = ["Cache", "StepRecord", "Uses"]
