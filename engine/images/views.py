"""Images as the API shows them: the list, one image, its history.

Functions of the index and of the layers that snapshots know; nothing is changed here.
Raises: NotFound as `Index.get` does. Not here: encoding (`api/images.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine import labels, times
from engine.images import reference
from engine.images.index import Index
from engine.images.record import ImageRecord, nanoseconds
from engine.images.reference import Reference
from engine.storage.overlay import DRIVER_NAME
from engine.storage.snapshots import Snapshots
from engine.wire.containers import Config
from engine.wire.images import GraphDriver, HistoryItem, ImageInspect, ImageSummary, InspectRootFS

FILTERS = ("before", "dangling", "label", "reference", "since")


def summaries(
    index: Index,
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
    bounds = [(index.get(other).created, True) for other in filters.get("before", ())]
    bounds += [(index.get(other).created, False) for other in filters.get("since", ())]
    dangling = filters.get("dangling")
    found = []
    for record in sorted(index, key=lambda record: (-record.created, record.id)):
        if any(record.created >= at if before else record.created <= at for at, before in bounds):
            continue
        if index.has_children(record.id) and (
            (record.nameless and not intermediate) or (dangling and not bool(record.tags))
        ):
            continue
        if dangling and bool(record.tags) == (dangling[0] in ("1", "true", "True")):
            continue
        if not labels.have_all(record.labels, filters.get("label", ())):
            continue
        names = list(record.tags)
        patterns = [*((name,) if name else ()), *filters.get("reference", ())]
        if patterns:
            names = [tag for tag in names if all(_matches(reference.read(tag), pattern) for pattern in patterns)]
            if not names:
                continue
        found.append(_summary(record, names))
    return found


def _summary(record: ImageRecord, names: Iterable[str]) -> ImageSummary:
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


def inspect(index: Index, snapshots: Snapshots, name: str) -> ImageInspect:
    """Everything about one image."""
    record = index.get(name)
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
            name=DRIVER_NAME, data=snapshots.layer_data(record.chain_ids[-1]) if record.chain_ids else {}
        ),
        root_fs=InspectRootFS(type="layers", layers=list(config.rootfs.diff_ids)),
    )


def history(index: Index, snapshots: Snapshots, name: str) -> list[HistoryItem]:
    """The steps that made an image, newest first, also those without a layer."""
    record = index.get(name)
    sizes = [layer.size for chain_id in record.chain_ids if (layer := snapshots.layer(chain_id))]
    items: list[HistoryItem] = []
    for step in record.config.history:
        size = 0 if step.empty_layer or not sizes else sizes.pop(0)
        items.append(
            HistoryItem(
                id="<missing>",
                created=times.unix_seconds(nanoseconds(step.created)),
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
        maker = index.find(maker.parent)
    return items


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
