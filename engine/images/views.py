"""Images as the API shows them: the list, one image, its history.

Functions of the index and of the layers that snapshots know; nothing is changed here.
Raises: NotFound as `Index.get` does. Not here: encoding (`api/images.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import UNSET

from engine.common import labels, times
from engine.images import platforms, reference
from engine.images.index import Index
from engine.images.record import ImageRecord, nanoseconds
from engine.images.reference import Reference
from engine.storage.overlay import DRIVER_NAME
from engine.storage.snapshots import Snapshots
from engine.wire.containers import Config
from engine.wire.images import (
    DefaultConfig,
    GraphDriver,
    HistoryItem,
    ImageInspect,
    ImageMetadata,
    ImageSummary,
    InspectRootFS,
    Platform,
)

FILTERS = ("before", "dangling", "label", "label!", "reference", "since", "until")
NOT_COMPUTED = -1


def summaries(
    index: Index,
    *,
    intermediate: bool = False,
    name: str = "",
    filters: Mapping[str, Sequence[str]] | None = None,
    until_ns: int = 0,
    shared: Mapping[str, int] | None = None,
    containers: Mapping[str, int] | None = None,
) -> list[ImageSummary]:
    """The list, newest first. `intermediate`: also nameless images that others were made from.

    `name`: only images with that repository, or repository and tag, with `*` and `?` within a
    part. `until_ns`: only images made before that time. `shared` and `containers`: the sizes of
    shared layers and the numbers of containers, by id, if they are to be shown. Raises NotFound
    for an unknown image in the filters `before` and `since`.
    """
    filters = filters or {}
    bounds = [(index.get(other).created, True) for other in filters.get("before", ())]
    bounds += [(index.get(other).created, False) for other in filters.get("since", ())]
    dangling = filters.get("dangling")
    shown = []
    for record in sorted(index, key=lambda record: (-record.created, record.id)):
        if any(record.created >= at if before else record.created <= at for at, before in bounds):
            continue
        if until_ns and not 0 < record.created < until_ns:
            continue
        if index.has_children(record.id) and (
            (record.nameless and not intermediate) or (dangling and not bool(record.tags))
        ):
            continue
        if dangling and bool(record.tags) == (dangling[0] in ("1", "true", "True")):
            continue
        if not labels.have_all(record.labels, filters.get("label", ())):
            continue
        if "label!" in filters and labels.have_all(record.labels, filters["label!"]):
            continue
        names = [reference.read(text) for text in (*record.tags, *record.digests)]
        if name or "reference" in filters:
            names = [
                each for each in names if _matches_any(each, ((name,) if name else (), filters.get("reference", ())))
            ]
            if not names:
                continue
        shown.append(
            ImageSummary(
                id=record.id,
                parent_id=record.parent,
                repo_tags=sorted(each.familiar for each in names if not each.digest),
                repo_digests=sorted(each.familiar for each in names if each.digest),
                created=times.unix_seconds(record.created),
                size=record.size,
                shared_size=NOT_COMPUTED if shared is None else shared.get(record.id, 0),
                labels=record.labels,
                containers=NOT_COMPUTED if containers is None else containers.get(record.id, 0),
            )
        )
    return shown


def inspect(
    index: Index, snapshots: Snapshots, name: str, platform: Platform | None = None, *, maker: bool = False
) -> ImageInspect:
    """Everything about one image. `maker`: also the container that it was made from.

    Raises NotFound, also for an image of another platform.
    """
    record = index.get(name)
    config = record.config
    platforms.check(name, config, platform)
    return ImageInspect(
        id=record.id,
        repo_tags=record.familiar_tags,
        repo_digests=record.familiar_digests,
        parent=record.parent or UNSET,
        comment=config.comment or UNSET,
        created=times.rfc3339(nanoseconds(config.created)) if record.created else UNSET,
        container=config.container if maker else UNSET,
        container_config=(config.container_config or Config()) if maker else UNSET,
        docker_version=config.docker_version or UNSET,
        engine_version=config.docker_version or UNSET,
        author=config.author or UNSET,
        config=_defaults(config.config or Config()),
        architecture=config.architecture,
        variant=config.variant or UNSET,
        os=config.os,
        os_version=config.os_version or UNSET,
        size=record.size,
        graph_driver=GraphDriver(
            name=DRIVER_NAME, data=snapshots.layer_data(record.chain_ids[-1]) if record.chain_ids else {}
        ),
        root_fs=InspectRootFS(type="layers", layers=list(config.rootfs.diff_ids)),
        metadata=ImageMetadata(last_tag_time=times.rfc3339(record.tagged)),
    )


def _defaults(config: Config) -> DefaultConfig:
    return DefaultConfig(
        user=config.user,
        exposed_ports=config.exposed_ports or {},
        env=config.env or None,
        entrypoint=config.entrypoint or None,
        cmd=config.cmd or None,
        healthcheck=config.healthcheck,
        args_escaped=config.args_escaped or False,
        volumes=config.volumes or None,
        working_dir=config.working_dir,
        on_build=config.on_build or None,
        labels=config.labels or None,
        stop_signal=config.stop_signal or "",
        shell=config.shell or UNSET,
    )


def history(index: Index, snapshots: Snapshots, name: str, platform: Platform | None = None) -> list[HistoryItem]:
    """The steps that made an image, newest first, also those without a layer.

    Raises NotFound, also for an image of another platform.
    """
    record = index.get(name)
    platforms.check(name, record.config, platform)
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


def _matches_any(name: Reference, choices: Iterable[Sequence[str]]) -> bool:
    """True when a name matches one pattern of every choice that has any."""
    return all(any(_matches(name, pattern) for pattern in patterns) for patterns in choices if patterns)


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
