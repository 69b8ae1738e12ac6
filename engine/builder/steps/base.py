"""FROM: the image, earlier stage or empty root that a stage begins with.

A base image that is not here is pulled; with `pull` the registry is always asked. Two stages of one
build that begin with the same image pull it once.

Raises: NotFound, Unauthorized and ServerError of the pull; InvalidParameter for an image of another
        platform than FROM names.
Not here: ONBUILD triggers of the base (`stage.py`).
"""

from __future__ import annotations

import contextlib

import msgspec

from engine.builder import keys, state
from engine.builder.dialect import Dialect
from engine.builder.options import Options, context_key
from engine.builder.output import Log
from engine.builder.parts import Parts
from engine.builder.reports import Transfer
from engine.builder.state import State
from engine.errors import InvalidParameter, NotFound, ServerError
from engine.images import platforms, reference
from engine.images.archive import ARCHITECTURE, is_digest
from engine.images.credentials import NOBODY
from engine.images.record import ImageRecord
from engine.images.reference import Reference
from engine.images.store import ImageStore
from engine.wire.containers import Config
from engine.wire.images import ImageConfig, Platform

SCRATCH = "scratch"


def empty(platform: Platform | None, dialect: Dialect) -> State:
    """`FROM scratch`: no layers and no image yet."""
    wanted = platform or Platform(os="linux", architecture=ARCHITECTURE)
    config = Config(working_dir="/" if dialect.empty_images else "")
    document = ImageConfig(os=wanted.os, architecture=wanted.architecture, variant=wanted.variant, config=config)
    key = keys.key_of(keys.base_key(""), "platform", *_words(document))
    return inherited(State(key=key, document=document), dialect)


def of_image(record: ImageRecord, dialect: Dialect) -> State:
    """The state of a base image."""
    return inherited(state.of_image(record, keys.base_key(record.id)), dialect)


def inherited(base: State, dialect: Dialect) -> State:
    """What a stage has of its base: all but the identity of the container that it was committed
    from, and its author where the dialect says so. A base without PATH gets the default one.
    """
    config = base.config
    if not any(entry.partition("=")[0] == "PATH" for entry in config.env or ()):
        config = msgspec.structs.replace(config, env=[state.DEFAULT_PATH, *(config.env or ())])
    config = msgspec.structs.replace(config, hostname="", domainname="", image="")
    author = base.document.author if dialect.keeps_author else ""
    document = msgspec.structs.replace(base.document, config=config, author=author, cache="")
    return msgspec.structs.replace(base, document=document)


def named(name: str, options: Options) -> str:
    """The image that stands for a name; `scratch` may stand for one, too."""
    return options.contexts.get(context_key(name), name) if options.contexts else name


def local(name: str, platform: Platform | None, options: Options, images: ImageStore) -> ImageRecord:
    """The image that is here under a name, which may be that of a named context's image. Raises
    NotFound, InvalidParameter for a malformed name.

    For the classic builder a few letters of an id are a name. BuildKit would ask the registry for
    them: another image than the one here may have this name there.
    """
    if is_digest(name):
        return images.get(name)
    return images.get(tagged(name).canonical if options.dialect.names_images else name, platform)


def tagged(name: str) -> Reference:
    """The reference with a tag or a digest. Raises InvalidParameter."""
    wanted = reference.parse(name)
    return wanted if wanted.digest else wanted.tagged()


async def resolve(name: str, platform: Platform | None, options: Options, parts: Parts, log: Log) -> ImageRecord:
    """The image of that name, pulled if it is missing or `options.pull` asks for it."""
    record = None
    name = named(name, options)
    if not options.pull or is_digest(name):
        with contextlib.suppress(NotFound):
            record = local(name, platform, options, parts.images)
        if record is None and options.contexts:  # the result of a build that exports no image
            record = parts.images.kept.find(name)
    if record is None:
        record = await _pulled(name, platform, options, parts, log)
    if platform is not None and (words := platforms.mismatch(name, record.config, platform)):
        raise InvalidParameter(words)
    return record


async def _pulled(name: str, platform: Platform | None, options: Options, parts: Parts, log: Log) -> ImageRecord:
    wanted = tagged(name)
    credentials = options.credentials.get(wanted.domain, NOBODY)
    try:
        pulling = await parts.remote.pull(wanted.canonical, "", credentials, platform)
    except ServerError as error:  # of the connection, which does not name the image
        raise ServerError(f"failed to pull {name}: {error.message}") from error
    async with contextlib.aclosing(pulling.run()) as steps:
        async for progress in steps:
            log.write(
                Transfer(
                    status=progress.status,
                    id=progress.id,
                    progress=progress.progress,
                    progress_detail=progress.progress_detail,
                )
            )
    return parts.images.get(wanted.canonical)


def _words(document: ImageConfig) -> tuple[str, str, str]:
    return document.os, document.architecture, document.variant


__all__ = ["SCRATCH", "empty", "inherited", "named", "of_image", "resolve"]
