"""RUN: a command in a container of its own, whose changes become the layer where they lie.

The container is one like any other while it runs: it is listed, can be inspected, killed, and
entered by exec. It is in memory alone, so it costs no record, and its files are not written back to
the disk before they are a layer. Without `rm`, and of a failed step without `forcerm`, it stays as
an ordinary container.

Mounts of `RUN --mount` exist for the run alone: caches are directories of ROOT/build/caches, a bind
shows files of the context or of another stage, secrets are files in memory that no disk, record,
log or cache key ever has.

Rules: Dockerfile reference, RUN.
Raises: StepFailed when the command fails; EngineError of the start.
Not here: containers (engine/containers), the mounts (`mounts.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import msgspec

from engine.builder import copying, keys, rules
from engine.builder.dockerfile import created_by
from engine.builder.dockerfile.scope import Environment
from engine.builder.errors import StepFailed
from engine.builder.options import SANDBOX
from engine.builder.output import Log, Terminal
from engine.builder.stage import StageBuild
from engine.builder.state import State, shell_of
from engine.builder.steps import layer, mounts
from engine.containers import defaults, output, removal
from engine.containers.container import Container
from engine.containers.extra_mounts import Bind, Sandbox, Variable
from engine.errors import EngineError, InvalidParameter, NotFound
from engine.images.instructions import records
from engine.images.instructions.records import Run
from engine.images.record import ImageRecord
from engine.system.threads import uninterrupted
from engine.wire.containers import Config, CreateBody, HostConfig


async def apply(stage: StageBuild, instruction: Run, log: Log) -> None:
    """Carry out the instruction, whose variables are replaced."""
    before, config = stage.state, stage.state.config
    _check(stage, instruction)
    if instruction.command == ():  # RUN [], which Docker's classic builder accepts
        return
    command, content = records.script(instruction)
    script = None if content is None else (str(command), content)
    argv = [*shell_of(config), command] if isinstance(command, str) else [*command]
    environment = stage.scope.run_environment(config.env)
    recorded = [f"|{len(environment.key)}", *environment.key, *argv] if environment.key else argv
    if stage.own_history:
        recorded = [created_by.ran(argv, environment.declared)]
    wanted = await mounts.read(stage, instruction.mounts, log)
    host = _host(stage, instruction)
    network = host.network_mode if host.network_mode in ("none", "host") else "default"
    options = stage.site.options
    kept = ["volumes"] if config.volumes and options.dialect.keeps_volumes else []
    kept += ["hostname", options.hostname] if options.hostname not in ("", SANDBOX) else []
    key = await stage.compute(
        lambda: keys.key_of(
            *(before.key, "run", argv, script),
            *(environment.key, network, host.extra_hosts or (), wanted.key, *kept),
            config=config,
        )
    )

    async def make(log: Log, claim: Callable[[str], None]) -> State:
        container_config = Config(
            hostname=options.hostname,
            user=config.user,
            env=[*(config.env or ()), *environment.variables],
            cmd=argv,
            working_dir=config.working_dir,
            labels=config.labels,
            image=before.image_id,
            attach_stdout=True,
            attach_stderr=True,
        )
        run = _Container(stage, before, container_config, host, log)
        diff_id = await run.run(wanted, script, claim)
        return await stage.compute(
            lambda: stage.after(
                before,
                key=key,
                config=config,
                command=recorded,
                diff_id=diff_id,
                container="" if stage.own_history else run.id,
            )
        )

    await stage.reach(key, recorded, config, log, make, with_others=_of_this_build(stage, instruction, environment))


def _of_this_build(stage: StageBuild, instruction: Run, environment: Environment) -> object:
    """What a run has from its build that is no part of its key: it may fail of that, or leave a
    container.
    """
    options = stage.site.options
    own = stage.site.id if any(mount.type in ("secret", "ssh") for mount in instruction.mounts) else ""
    host = msgspec.to_builtins(options.host)
    return own, host, options.remove, options.force_remove, environment.variables


def _check(stage: StageBuild, instruction: Run) -> None:
    """Raises InvalidParameter for what this step may not do."""
    state = stage.state
    if not state.image_id and not state.chain_ids and not instruction.mounts:
        # As Docker says when a RUN follows `FROM scratch` at once; nothing could be executed.
        raise InvalidParameter("Please provide a source image with `from` prior to commit")
    rules.check(instruction, state.config.working_dir, stage.site.options)
    rules.permit(instruction, state.document.architecture, stage.site.options)


def _host(stage: StageBuild, instruction: Run) -> HostConfig:
    host = stage.site.options.host
    if instruction.network in ("", "default"):
        return host
    return msgspec.structs.replace(host, network_mode=instruction.network)


class _Container:
    """The container of one RUN step."""

    def __init__(self, stage: StageBuild, before: State, config: Config, host: HostConfig, log: Log) -> None:
        self._stage = stage
        self._parts = stage.site.parts
        self._options = stage.site.options
        self._before = before
        self._config = config
        self._host = host
        self._log = log
        keeps_volumes = self._options.dialect.keeps_volumes
        self._dropped = () if keeps_volumes else tuple(before.config.volumes or ())
        """Volumes, whose changes are no part of the image."""
        self._made: set[str] = set()
        """Directories that their mount points need, relative to the root."""
        self.id = ""

    async def run(self, wanted: mounts.Wanted, script: tuple[str, bytes] | None, claim: Callable[[str], None]) -> str:
        """Run the command. Returns the diff_id of its changes. `script`: path and content of a file
        for the run.
        """
        fields = {name: getattr(self._config, name) for name in Config.__struct_fields__}
        own = self._options.dialect.own_defaults
        body = CreateBody(**fields, host_config=defaults.without(self._host) if own else self._host)
        image = ImageRecord(id=self._before.image_id, config=self._before.document, chain_ids=self._before.chain_ids)
        turn = self._parts.caches.turn(wanted.locked)
        async with turn, self._parts.running, contextlib.AsyncExitStack() as borrowed:
            ready = await mounts.open_all(self._stage, wanted, self._log, borrowed)
            if script is not None:
                ready.add_script(*script)
            await self._add_volumes(ready, borrowed)
            if self._options.dialect.sandboxes:
                ready.mounts.append(Sandbox())
            container = await self._parts.containers.create_transient(
                body, image, mounts=ready.mounts, defaults=defaults.DOCKERS if own else None
            )
            self.id = container.id
            try:
                self._log.say(f" ---> Running in {container.id[:12]}\n", classic=True)
                code, failure = await self._wait(container)
                if code or failure:
                    await self._failed(container, code, failure)
                return await self._changes(container, claim)
            except BaseException:
                await uninterrupted(self._discard(container))
                raise

    async def _add_volumes(self, ready: mounts.Ready, borrowed: contextlib.AsyncExitStack) -> None:
        """Where the image lacks the directory of a volume, mount an empty one. Its mount point
        becomes a part of the image, as with Docker's volumes.
        """
        root = await self._stage.root() if self._dropped else -1
        taken = {mount.destination for mount in ready.mounts if not isinstance(mount, Variable | Sandbox)}
        for volume in self._dropped:
            try:
                place = await asyncio.to_thread(copying.destination, root, volume, directory=True)
            except InvalidParameter:  # something else is there
                continue
            path = f"/{place.path}"
            if not place.missing or path in taken:
                continue
            taken.add(path)
            self._made.update(place.missing)
            directory = await self._stage.site.scratch_directory(borrowed)
            await asyncio.to_thread(os.fchmod, directory, 0o755)
            ready.mounts.append(Bind(destination=path, source=directory, writable=True))

    async def _wait(self, container: Container) -> tuple[int, EngineError | None]:
        """The exit code, when its output has ended; the error of a start that failed."""
        attached = await output.output(container)
        try:
            try:
                await container.start()
            except EngineError as error:
                return container.record.status.exit_code, error
            terminal = Terminal(self._log)
            async for stream, data in attached:
                terminal.write(stream, data)
            terminal.end()
            return (await container.wait()).exit_code, None
        finally:
            attached.close()

    async def _failed(self, container: Container, code: int, failure: EngineError | None) -> None:
        """Raises StepFailed. The container stays, to be looked at, unless `forcerm`."""
        if self._options.force_remove:
            await self._discard(container)
            self._log.say(f"Removing intermediate container {container.id[:12]}\n", classic=True)
        else:
            with contextlib.suppress(NotFound):  # removed by a client
                await uninterrupted(self._parts.containers.keep(container))
        command = " ".join(self._config.cmd or ())
        if failure is not None:
            raise StepFailed(failure.message, code, command, started=False) from failure
        raise StepFailed(f"The command '{command}' returned a non-zero code: {code}", code, command)

    async def _changes(self, container: Container, claim: Callable[[str], None]) -> str:
        """Make the layer of its changes, and remove the container with `rm`."""
        below = self._before.document.rootfs.diff_ids
        images = self._parts.images
        if self._options.remove:
            ingest = await self._parts.containers.take(container)
        else:
            await uninterrupted(self._parts.containers.keep(container))
            ingest = await layer.copy_changes(self._parts, container)
        ingest = ingest._replace(stubs=tuple(stub for stub in ingest.stubs if stub not in self._made))
        extraction = await images.layers.seal(ingest, self._before.top, drop=self._dropped)
        diff_id = await layer.commit(self._parts, below, ingest, extraction, claim)
        if self._options.remove:
            self._log.say(f"Removing intermediate container {container.id[:12]}\n", classic=True)
        return diff_id

    async def _discard(self, container: Container) -> None:
        """Remove it, unless it was kept or is gone."""
        if self._parts.containers.parts.store.transient(container.id):
            with contextlib.suppress(NotFound):
                await removal.remove(container, force=True)


__all__ = ["apply"]
