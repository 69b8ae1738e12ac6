"""The image after a step: its document, and the documents that steps make of it. Pure.

Every step is an image whose parent is the image of the step before (Docker's classic builder), so
each can be run, tagged and inspected. A state is made without the store; `cache.Recorder` records
it.

Not here: cache keys (`keys.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine import __version__
from engine.common import times
from engine.images.archive import ARCHITECTURE
from engine.images.importing import EMPTY_LAYER, encoded
from engine.images.layers import chain_ids
from engine.images.record import ImageRecord
from engine.wire.containers import Config
from engine.wire.images import History, ImageConfig, RootFS

DEFAULT_SHELL = ("/bin/sh", "-c")

DEFAULT_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Added to the environment of a base image without PATH."""


_LARGE = 64 << 10
"""Bytes of a document, and entries of a configuration, that are many."""
_ENTRIES = 500


class State(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The image after a step."""

    key: str
    """Its cache key: see keys.py."""
    image_id: str = ""
    """Empty for `FROM scratch` before its first step."""
    document: ImageConfig = ImageConfig()
    raw: bytes = b""
    """The encoded document; empty for a base image, which is in the store."""
    chain_ids: tuple[str, ...] = ()
    parent: str = ""
    """The image before this step."""

    @property
    def config(self) -> Config:
        return self.document.config or Config()

    @property
    def top(self) -> str:
        """chain_id of the topmost layer; empty without layers."""
        return self.chain_ids[-1] if self.chain_ids else ""

    @property
    def large(self) -> bool:
        """To copy or encode its document takes more than a millisecond or two."""
        config = self.config
        lists = (config.env, config.labels, config.exposed_ports, config.volumes, config.on_build)
        return len(self.raw) > _LARGE or sum(len(each or ()) for each in lists) > _ENTRIES

    @property
    def short(self) -> str:
        """The id as the output shows it; empty for an image that does not exist."""
        return self.image_id[7:19]


class Made(NamedTuple):
    """The result of a step of a build that may have made a layer."""

    state: State
    in_image: bool
    """The step is one of the image's own stages."""


def of_image(record: ImageRecord, key: str) -> State:
    """The state of a base image: its configuration with a PATH, without the triggers of ONBUILD."""
    return State(key=key, image_id=record.id, document=record.config, chain_ids=record.chain_ids)


def shell_of(config: Config) -> list[str]:
    """The shell of the image's shell forms."""
    return list(config.shell) if config.shell else [*DEFAULT_SHELL]


def commented(config: Config, *words: str) -> list[str]:
    """The command that records a step which runs nothing: `/bin/sh -c #(nop) …`."""
    return [*shell_of(config), *words]


def after(
    state: State,
    *,
    key: str,
    config: Config,
    command: Sequence[str],
    diff_id: str = "",
    author: str | None = None,
    container: str = "",
    epoch: int | None = None,
    created: str = "",
    comment: str = "",
) -> State:
    """The image that a step makes of `state`.

    `command`: what the history shows. `diff_id`: the digest of its layer, if it made one. `author`:
    set by MAINTAINER. `container`: the id of the one that ran. `epoch`: SOURCE_DATE_EPOCH in
    seconds; times are not later. `created`: when the step was made, if that was elsewhere.
    `comment`: BuildKit's in the history; its images know no container that made them, and its
    history no authors.
    """
    base = state.document
    now = times.parse_rfc3339(created) if created else time.time_ns()
    created = times.rfc3339(now if epoch is None else min(now, epoch * 10**9))
    empty = diff_id in ("", EMPTY_LAYER)
    diff_ids = (*base.rootfs.diff_ids, *(() if empty else (diff_id,)))
    author = base.author if author is None else author
    step = History(
        created=created,
        created_by=" ".join(command),
        author="" if comment else author,
        comment=comment,
        empty_layer=empty,
    )
    document = msgspec.structs.replace(
        base,
        created=created,
        author=author,
        architecture=base.architecture or ARCHITECTURE,
        os=base.os or "linux",
        config=config,
        rootfs=RootFS(diff_ids=diff_ids),
        history=(*base.history, step),
        container=container,
        container_config=(
            None if comment else msgspec.structs.replace(config, cmd=list(command), image=state.image_id)
        ),
        docker_version="" if comment else __version__,
        comment=comment,
    )
    return recorded(document, key, state.image_id, state.chain_ids, diff_ids)


def without_steps(empty: State, *, epoch: int | None = None) -> State:
    """The image of `FROM scratch` alone. `epoch`: as in `after`."""
    now = time.time_ns()
    created = times.rfc3339(now if epoch is None else min(now, epoch * 10**9))
    document = msgspec.structs.replace(empty.document, created=created)
    return recorded(document, empty.key, "", (), ())


def recorded(document: ImageConfig, key: str, parent: str, below: tuple[str, ...], diff_ids: tuple[str, ...]) -> State:
    """The state of a new document. `below`: the chain of the parent."""
    chain = below
    if len(diff_ids) == len(below) + 1 and below:
        both = f"{below[-1]} {diff_ids[-1]}".encode()
        chain = (*below, f"sha256:{hashlib.sha256(both).hexdigest()}")
    elif len(diff_ids) != len(below):
        chain = chain_ids(diff_ids)
    raw = encoded(document)
    image_id = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    return State(key=key, image_id=image_id, document=document, raw=raw, chain_ids=chain, parent=parent)


__all__ = [
    "DEFAULT_PATH",
    "DEFAULT_SHELL",
    "Made",
    "State",
    "after",
    "commented",
    "of_image",
    "recorded",
    "shell_of",
    "without_steps",
]
