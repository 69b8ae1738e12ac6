"""COPY and ADD: files of the context, of another stage or image, or from elsewhere, as a layer.

The files are chosen and their digest is known before the cache is asked, so a changed file is a
miss and a changed time is not. Content of another stage is looked up twice: by that stage's own
key, which costs nothing, then by the digest of the files. The layer is written in one pass, without
a container and without a mount.

`--link` has no effect, as in dockerd with overlay2: a layer that does not know its base makes the
directories above the destination anew, with another owner and mode, and replaces links to them.

Rules: Dockerfile reference, COPY and ADD.
Not here: which files a source means and their names below the destination (`copying.py`), files
from the network (`fetching.py`, `git.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from engine.builder import copying, fetching, git, keys, rules
from engine.builder.copying import Selection
from engine.builder.dockerfile import created_by
from engine.builder.output import Log
from engine.builder.stage import StageBuild
from engine.builder.state import State, commented
from engine.builder.steps import layer, owners
from engine.builder.trees import DirectoryTree, MemoryTree, Tree, source_path
from engine.errors import InvalidParameter, NotFound
from engine.images.instructions.records import Add, Copy
from engine.system.threads import uninterrupted


class _From(NamedTuple):
    """Where a COPY or ADD reads. `key`: of the stage or image, if it is one."""

    tree: Tree
    key: str = ""


async def apply(stage: StageBuild, instruction: Copy | Add, log: Log) -> None:
    """Carry out the instruction, whose variables are replaced."""
    name = "ADD" if isinstance(instruction, Add) else "COPY"
    words = created_by.copied(instruction) if stage.own_history else ""
    path = _absolute(stage, instruction.destination)
    is_directory = path.endswith("/")
    rules.check(instruction, stage.state.config.working_dir, stage.site.options)
    if instruction.chmod:
        copying.check_mode(instruction.chmod)
    how = (
        *(name, path, instruction.chown, instruction.chmod, instruction.link, instruction.parents),
        *(instruction.exclude, instruction.unpack),
        # The classic builder makes other layers, and some that BuildKit refuses.
        *(("keeps kinds",) if stage.site.options.dialect.keeps_kinds else ()),
        # As the history shows them; the classic one shows a digest.
        *filter(None, [words]),
    )
    before, config = stage.state, stage.state.config
    async with contextlib.AsyncExitStack() as borrowed:
        source = await borrowed.enter_async_context(_opened(stage, instruction, log))
        quick: tuple[str, ...] = ()
        if source.key:
            names = [os.fsencode(name) for name in instruction.sources]
            quick = (
                await stage.compute(lambda: keys.key_of(before.key, "copy", how, source.key, names, config=config)),
            )
            cached = None if stage.no_cache else stage.site.parts.cache.find(quick[0])
            if cached is not None and not stage.site.options.cache_from:
                stage.go_on(cached, log)
                return
        selection = await _select(stage, instruction, name, source.tree, borrowed, log, is_directory)
        key = await stage.compute(lambda: keys.key_of(before.key, "copy", how, selection.digest, config=config))
        # Docker, too, has no blank after the flag.
        chown = f"--chown={instruction.chown}" if instruction.chown else ""
        command = commented(config, f"#(nop) {name} {chown}{selection.kind}:{selection.digest} in {path} ")
        if stage.own_history:
            command = [words]

        async def make(_: Log, claim: Callable[[str], None]) -> State:
            diff_id = await _lay_out(stage, before, instruction, selection, path, claim)
            return await stage.compute(
                lambda: stage.after(before, key=key, config=config, command=command, diff_id=diff_id)
            )

        await stage.reach(key, command, config, log, make, known_as=quick)


def _absolute(stage: StageBuild, destination: str) -> str:
    """The destination from the root, with its slash at the end if it has one."""
    workdir = stage.state.config.working_dir or "/"
    whole = posixpath.normpath(posixpath.join("/", workdir, destination)).replace("//", "/")
    directory = destination.endswith("/") or destination in ("", ".", "..") or destination.endswith(("/.", "/.."))
    return whole if not directory or whole == "/" else f"{whole}/"


@contextlib.asynccontextmanager
async def _opened(stage: StageBuild, instruction: Copy | Add, log: Log) -> AsyncIterator[_From]:
    """The tree that `--from` names; the context without it."""
    if not instruction.from_:
        yield _From(stage.site.context)
        return
    async with stage.other_root(instruction.from_, log) as (descriptor, key):
        yield _From(DirectoryTree(descriptor), key)


async def _select(
    stage: StageBuild,
    instruction: Copy | Add,
    name: str,
    tree: Tree,
    borrowed: contextlib.AsyncExitStack,
    log: Log,
    is_directory: bool,
) -> Selection:
    """The files that are copied, with those from the network fetched."""
    parts, work = stage.site.parts, stage.site.parts.images.layers.work
    dialect = stage.site.options.dialect
    plain: list[str] = []
    chosen: list[Selection] = []
    several = len(instruction.sources) + len(instruction.heredocs) > 1

    async def choose(tree: Tree, sources: list[str], *, unpack: bool, patterns: bool = True) -> None:
        try:
            selection = await work(
                lambda: copying.select(
                    tree,
                    sources,
                    instruction=name,
                    exclude=instruction.exclude,
                    parents=instruction.parents,
                    unpack=unpack,
                    owners=bool(instruction.from_),
                    patterns=patterns,
                    may_be_empty=dialect.empty_wildcards,
                    merges=dialect.merges_sources,
                    rooted=dialect.rooted_sources,
                    destination_is_directory=is_directory,
                )
            )
        except NotFound as error:
            raise NotFound(f"{name} failed: {error.message}") from error
        chosen.append(selection)

    for source in instruction.sources:
        remote = isinstance(instruction, Add) and "://" in source
        repository = git.source_of_add(source) if isinstance(instruction, Add) else None
        if not remote and repository is None:
            if "://" in source and source.startswith(("http://", "https://")):
                raise InvalidParameter("source can't be a URL for COPY")
            plain.append(source)
        elif repository is not None:
            repository = repository._replace(
                keep_git_dir=bool(instruction.keep_git_dir) or repository.keep_git_dir,
                commit=instruction.checksum or repository.commit,
            )
            place = parts.images.temporary
            agent = await git.agent_of(repository, parts.sessions, stage.site.options.session, place, borrowed)
            checkout = await borrowed.enter_async_context(git.checkout(repository, place, agent=agent))
            await choose(DirectoryTree(checkout.root), ["."], unpack=False)
        else:
            download = await borrowed.enter_async_context(
                fetching.download(
                    *(source, parts.remote, parts.images.temporary, log.write),
                    checksum=instruction.checksum,
                    named=is_directory,
                )
            )
            await choose(download.tree, [download.name], unpack=bool(instruction.unpack), patterns=False)
    if plain:
        unpack = isinstance(instruction, Add) and instruction.unpack is not False
        await choose(tree, plain, unpack=unpack)
    for heredoc in instruction.heredocs:
        path = source_path(heredoc.name, rooted=dialect.rooted_sources)
        inline = MemoryTree({path: heredoc.content.encode(errors="surrogateescape")}, mtime=time.time_ns())
        await choose(inline, [path], unpack=False, patterns=False)
    if len(chosen) == 1 and not several:
        return chosen[0]
    merges = is_directory or dialect.merges_sources
    return await work(lambda: copying.join(chosen, instruction=name, destination_is_directory=merges))


async def _lay_out(
    stage: StageBuild,
    before: State,
    instruction: Copy | Add,
    selection: Selection,
    path: str,
    claim: Callable[[str], None],
) -> str:
    """Write the layer. Returns its diff_id."""
    parts, dialect = stage.site.parts, stage.site.options.dialect
    root = -1
    if before.top:
        root = await parts.images.snapshots.open_content(before.top)
    try:
        owner = await owners.find(stage, before, instruction.chown, root)
        newest = await parts.images.layers.work(_newest, selection)

        def opened() -> copying.Stream:
            place = copying.destination(root, path, directory=selection.needs_directory)
            return copying.Stream(
                *(selection.at(place), place if selection.pieces else place._replace(missing=()), root),
                owner=owner,
                chmod=instruction.chmod,
                now=newest or time.time_ns(),
                epoch=stage.site.epoch,
                keeps_kinds=dialect.keeps_kinds,
                keeps_times=dialect.keeps_times,
                owns_members=dialect.owns_members,
            )

        alike = (path, instruction.chown, instruction.chmod, selection.digest, newest)
        return await layer.lay_out(parts, before.document.rootfs.diff_ids, opened, claim, alike=alike)
    finally:
        if root >= 0:
            await uninterrupted(asyncio.to_thread(os.close, root))


def _newest(selection: Selection) -> int:
    """The latest time of the files: unlike the time of day, it makes the same layer of the same
    files again, unless they stand in the Dockerfile. There may be a million files.
    """
    return max((entry.mtime for piece in selection.pieces for _, entry in piece.entries), default=0)


__all__ = ["apply"]
