"""Instructions that change the configuration: ENV, LABEL, CMD, EXPOSE, WORKDIR and the others.

They run nothing and make no layer, except for WORKDIR when the directory is missing. Each is an
image of its own (0.2 ms), as in Docker's classic builder.

Not here: what the instructions mean for a configuration (`images/instructions/effects.py`).
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable

import msgspec

from engine.builder import copying, keys
from engine.builder.copying import Selection
from engine.builder.dockerfile import created_by
from engine.builder.output import Log
from engine.builder.stage import StageBuild
from engine.builder.state import State, commented
from engine.builder.steps import layer, owners
from engine.containers import body
from engine.errors import InvalidParameter
from engine.images.instructions import effects
from engine.images.instructions.records import (
    Arg,
    Cmd,
    Env,
    Expose,
    Healthcheck,
    Instruction,
    Maintainer,
    Shell,
    Volume,
    Workdir,
)
from engine.system import files
from engine.wire.containers import Config

_NOTHING = Selection((), "dir", "")


async def apply(stage: StageBuild, instruction: Instruction, log: Log) -> None:
    """Carry out one instruction, whose variables are replaced."""
    config = stage.state.config
    author = None
    if isinstance(instruction, Arg):
        stage.declare(instruction)
    elif isinstance(instruction, Env):
        stage.scope.set_by_env(name for name, _ in instruction.pairs)
    elif isinstance(instruction, Maintainer):
        author = instruction.author
    elif isinstance(instruction, Healthcheck) and config.healthcheck:
        test = config.healthcheck.test or []
        if test and test[0] != "NONE":
            log.say(f"Note: overriding previous HEALTHCHECK: [{' '.join(test)}]\n", classic=True)
    elif isinstance(instruction, Volume) and not stage.site.options.dialect.keeps_volumes:
        await _check_volumes(stage, instruction)
    dialect = stage.site.options.dialect
    user = config.user if isinstance(instruction, Workdir) and dialect.users_workdir else ""

    def effect() -> tuple[Config, str, str]:
        changed = effects.configured(config, instruction, cmd_set=stage.cmd_set)
        if isinstance(instruction, Workdir) and dialect.users_workdir:
            changed = msgspec.structs.replace(changed, working_dir=body.directory(changed.working_dir))
        if isinstance(instruction, Cmd) and dialect.own_history:
            changed = msgspec.structs.replace(changed, args_escaped=True)
        text = effects.recorded(instruction, changed)
        if dialect.own_history:
            # It shows the values of ARG, which are those of this build.
            text = created_by.configured(instruction, config, changed, stage.scope.variables(changed.env))
        key = keys.key_of(stage.state.key, "meta", text, author, *filter(None, [user]), config=changed)
        return changed, text, key

    changed, text, key = await stage.compute(effect, large=isinstance(instruction, Expose))
    stage.cmd_set = stage.cmd_set or isinstance(instruction, Cmd)
    if stage.own_history:
        command = [text]
    elif isinstance(instruction, Workdir):
        command = commented(config, f"#(nop) {text}")
    else:
        command = commented(changed if isinstance(instruction, Shell) else config, "#(nop) ", text)
    if not isinstance(instruction, Workdir):
        await stage.reach(key, command, changed, log, author=author, makes_layer=False)
        return

    before = stage.state

    async def make(_: Log, claim: Callable[[str], None]) -> State:
        diff_id = await _make_directory(stage, before, changed.working_dir, user, claim)
        return await stage.compute(
            lambda: stage.after(before, key=key, config=changed, command=command, diff_id=diff_id)
        )

    await stage.reach(key, command, changed, log, make)


async def _check_volumes(stage: StageBuild, volume: Volume) -> None:
    """Raises InvalidParameter for a path that is a file in the image."""
    root = await stage.root()
    if root < 0:
        return

    def check() -> None:
        for path in volume.paths:
            try:
                found = files.open_in_root(root, path.strip("/") or ".", os.O_PATH)
            except OSError:
                continue
            try:
                if not stat.S_ISDIR(os.fstat(found).st_mode):
                    raise InvalidParameter(f"VOLUME {path}: cannot mount volume over existing file, file exists {path}")
            finally:
                os.close(found)

    await asyncio.to_thread(check)


async def _make_directory(stage: StageBuild, before: State, path: str, user: str, claim: Callable[[str], None]) -> str:
    """Make a missing working directory, and those above it: the user's, mode 0755. Returns the
    diff_id, or "".
    """
    root = await stage.root()
    try:
        place = await asyncio.to_thread(copying.destination, root, path, directory=True)
    except InvalidParameter as error:
        words = f"Cannot mkdir: {path} is not a directory"
        if stage.site.options.dialect.users_workdir:
            words = _obstacle(error)
        raise InvalidParameter(words) from error
    if not place.missing:
        return ""
    # A later RUN may add the user.
    owner = await owners.find(stage, before, user, root, known=False)

    def opened() -> copying.Stream:
        return copying.Stream(_NOTHING, place, root, owner=owner, now=time.time_ns(), epoch=stage.site.epoch)

    return await layer.lay_out(stage.site.parts, before.document.rootfs.diff_ids, opened, claim)


def _obstacle(error: InvalidParameter) -> str:
    """Why a directory cannot be made, as BuildKit says it."""
    if not isinstance(error, copying.NotDirectory):
        return "too many links"
    return f"{f'lstat {error.below}' if error.below else f'mkdir {error.path}'}: not a directory"


__all__ = ["apply"]
