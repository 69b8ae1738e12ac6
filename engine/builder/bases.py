"""What a build knows of images before it has them: the configuration of an image that is here, or
of the one in its registry, whose layers are not fetched for that.

Threads: the event loop's. Not here: FROM, which pulls (`steps/base.py`).
Raises:  Unresolved for an image that is neither here nor in its registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.builder import options as option
from engine.builder.dockerfile.lines import at_line
from engine.builder.dockerfile.stages import Image
from engine.builder.dockerfile.walk import Base
from engine.builder.errors import Unresolved
from engine.builder.options import Options
from engine.builder.parts import Parts
from engine.builder.steps import base as names
from engine.errors import EngineError, InvalidParameter
from engine.images import reference
from engine.images.archive import is_digest
from engine.images.credentials import NOBODY
from engine.images.registry.repository import NoManifest
from engine.images.store import ImageStore
from engine.wire.images import ImageConfig

TURN = 16
"""Images that are looked up in one turn of the event loop."""


def here(image: Image, options: Options, images: ImageStore) -> Base | None:
    """What is known of an image, if it is here. A named context may stand for it."""
    platform = option.platform(image.stage.platform, options.dialect) or options.platform
    name = names.named(image.name, options)
    if name == names.SCRATCH:
        return Base()
    try:
        return _base(names.local(name, platform, options, images).config)
    except EngineError:
        kept = images.kept.find(name) if options.contexts else None
        return None if kept is None else _base(kept.config)


async def all_here(images: Iterable[Image], options: Options, store: ImageStore) -> list[tuple[Image, Base | None]]:
    """`here` for each. There may be thousands, so other work has its turns."""
    found = []
    for number, image in enumerate(images, 1):
        found.append((image, here(image, options, store)))
        if not number % TURN:
            await asyncio.sleep(0)
    return found


async def find(images: Iterable[Image], options: Options, parts: Parts) -> dict[int, Base]:
    """The images that stages begin with, by the index of the stage. Registries are asked for those
    that are not here, with `options.pull` for all, at once. The image of a named context may be
    unknown.
    """
    found: dict[int, Base] = {}
    missing: dict[tuple[str, str], list[Image]] = {}
    for number, image in enumerate(images, 1):
        if not number % TURN:
            await asyncio.sleep(0)
        name = names.named(image.name, options)
        asks = options.pull and not is_digest(name)  # what is here may not be what FROM gets
        base = here(image, options, parts.images) if name == names.SCRATCH or (name and not asks) else None
        if base is None and name:
            missing.setdefault((image.name, image.stage.platform), []).append(image)
        elif base is not None and image.is_base:
            found[image.stage.index] = base
    asked = (_asked(same[0], options, parts) for same in missing.values())
    for same, answer in zip(missing.values(), await asyncio.gather(*asked, return_exceptions=True), strict=True):
        if isinstance(answer, BaseException):
            raise answer
        found |= {image.stage.index: answer for image in same if image.is_base}
    return found


def titles(images: Iterable[Image], options: Options) -> dict[str, int]:
    """What BuildKit's progress says while `find` works, each with the line that names the image
    first.
    """
    found: dict[str, int] = {}
    for image in images:
        name = names.named(image.name, options)
        if name and name != names.SCRATCH and not is_digest(name):
            own = "internal" if name == image.name else f"context {image.name}"
            found.setdefault(f"[{own}] load metadata for {option.context_key(name)}", image.line)
    return found


async def _asked(image: Image, options: Options, parts: Parts) -> Base:
    platform = option.platform(image.stage.platform, options.dialect) or options.platform
    name = names.named(image.name, options)
    try:
        wanted = reference.parse(name)
        credentials = options.credentials.get(wanted.domain, NOBODY)
        return _base(await parts.remote.configuration(name, credentials, platform))
    except EngineError as error:
        shown = option.context_key(name)
        answer = f"{shown}: not found" if isinstance(error, NoManifest) else error.message
        named = f"{name}: " if name == image.name else ""
        text = f"{named}failed to resolve source metadata for {shown}: {answer}"
        message = at_line(InvalidParameter(text), image.line, image.text).message
        raise Unresolved(message, image.line, text, answer) from error


def _base(document: ImageConfig) -> Base:
    config = document.config
    platform = f"{document.os}/{document.architecture}"
    if config is None:
        return Base(platform=platform)
    return Base(config.env or (), config.on_build or (), config.shell or (), platform, config.working_dir)


__all__ = ["all_here", "find", "here"]
