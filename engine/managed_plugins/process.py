"""The processes of managed plugins: started when a plugin is enabled, restarted when they exit, and
kept over restarts of the daemon.

A plugin runs as a container does (`containers/launch.py`), under its id as key of the runtime, the
monitor, the control group and the snapshot. It has no record of its own: what runs is known by the
monitor, and what is to run by the plugin's record.

    RUN/plugins/ID/           its socket; /run/docker/plugins in the plugin
    RUN/plugins/ID.logging/   the FIFOs of a log driver; /run/docker/logging in the plugin
    RUN/netns/                the sandboxes that a network driver finds
    ROOT/plugins/ID/          config.json, its output (a json-file log), `propagated`

The snapshot, these directories and the mounts below PropagatedMount (`propagated.py`) belong to a
plugin from `start` to `stop`, over any number of exits. An exit is followed by a restart with a
delay that doubles (`containers/restart.py`).

Locks: a plugin's, while its process is started or ended.
Not here: records, and whether a plugin is in use (`store.py`).
Raises: ServerError that names the plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import logging
import os
import re
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, ParamSpec

import msgspec

from engine.containers import boot, bundle, launch, program, restart
from engine.containers.body import directory as normal
from engine.containers.parts import Parts
from engine.containers.start import Placed, Program
from engine.errors import EngineError, NotFound, ServerError, reason, reason_with_file, words
from engine.logs.targets import JsonFile
from engine.managed_plugins import propagated, spec
from engine.managed_plugins.record import PluginRecord
from engine.monitor.handles import Exit, LaunchFailed, Process
from engine.plugins.client import connect
from engine.plugins.discovery import Endpoint
from engine.plugins.registry import Plugins
from engine.runtime import cgroups, users
from engine.runtime.oci import failure_reason
from engine.system import detached_mounts, files, limits, namespaces
from engine.system.detached_mounts import Tree, place_beside
from engine.system.tasks import shield, spawn
from engine.system.threads import cancelled, in_own_thread, uninterrupted
from engine.wire import oci

P = ParamSpec("P")

STOP_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL, as in Docker."""
FAILED_SECONDS = 1.0
"""The same after a start that failed, for whose end a client waits."""
START_SECONDS = 30.0
"""Seconds that a plugin has to listen after an exit, and when the daemon starts."""
OPEN_SECONDS = 10.0
"""Seconds that the daemon's start waits for plugins."""
SOCKETS, NETNS = "plugins", "netns"
"""Below RUN."""

_LOG_SIZE, _LOG_FILES = 1 << 20, 2
_QUOTED = 2000
"""Characters of a plugin's output in the error of a start that failed."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.2
"""Seconds between looks for the socket."""
_DYING = 0.25
"""Seconds that a process may take to end after it has cut its connection."""
_ID = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger(__name__)


class _Enabled:
    """One plugin that is to run."""

    def __init__(self, record: PluginRecord) -> None:
        self.record = record
        self.lock = asyncio.Lock()
        self.process: Process | None = None
        """None while it does not run."""
        self.began = 0.0
        self.leaving = asyncio.Event()
        """It is being disabled, or the daemon ends while it starts."""
        self.starting = False
        """A client waits for its start."""
        self.planned = restart.Planned(lambda: None)
        self.restarting: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f'plugin "{self.record.name}" ({self.record.id[:12]})'


class Processes:
    """Those of one engine."""

    def __init__(self, parts: Parts, plugins: Plugins) -> None:
        self._parts = parts
        self._plugins = plugins
        self._namespace = parts.snapshots.mount_namespace
        self._all: dict[str, _Enabled] = {}
        self._closing = False

    def __contains__(self, key: str) -> bool:
        """True if `key` is the id of a plugin that is to run."""
        return key in self._all

    def runs(self, plugin_id: str) -> bool:
        enabled = self._all.get(plugin_id)
        return enabled is not None and enabled.process is not None

    def endpoint(self, record: PluginRecord) -> Endpoint:
        """Where it listens. Raises InvalidParameter for an invalid name of the socket."""
        return Endpoint(socket=str(self._sockets(record.id) / spec.socket_name(record)), hostile=True)

    def exited(self, key: str, exit: Exit) -> bool:
        """The monitor reports the end of a process. Returns False if it is no plugin's."""
        if key not in self._all:
            return False
        self._parts.monitor.forget(key)
        return True

    # --- verbs ------------------------------------------------------------------------------------

    async def start(self, record: PluginRecord, timeout: float) -> None:
        """Run the plugin, and wait until it answers with the kinds of driver that its config names,
        at most `timeout` seconds. A failure undoes everything.
        """
        if record.id in self._all:
            raise ServerError(f'plugin "{record.name}" runs already')
        enabled = self._add(record)
        enabled.starting = True
        if self._closing:
            enabled.leaving.set()
        try:
            async with enabled.lock:
                await self._start(enabled, timeout)
        except BaseException:
            await uninterrupted(self._leave(enabled, FAILED_SECONDS))
            raise
        finally:
            enabled.starting = False

    def give_up(self, plugin_id: str) -> None:
        """Let the `start` fail that a client waits for."""
        enabled = self._all.get(plugin_id)
        if enabled is not None and enabled.starting:
            enabled.leaving.set()

    async def stop(self, record: PluginRecord) -> None:
        """End the process: SIGTERM, and SIGKILL after 10 seconds. Then release what it had.
        Failures are logged.
        """
        enabled = self._all.get(record.id)
        if enabled is not None:
            await uninterrupted(self._leave(enabled))

    async def stop_all(self) -> None:
        """`stop` of every plugin at once."""
        await asyncio.gather(*(uninterrupted(self._leave(enabled)) for enabled in [*self._all.values()]))

    async def open(self, records: Iterable[PluginRecord]) -> None:
        """When the daemon starts: take over the processes that run, start the other enabled
        plugins, and end those that are not enabled. A plugin whose start fails is started again
        later.

        The snapshots' mounts have been taken over (`Containers.take_over`).
        """
        records = [*records]
        left = await asyncio.to_thread(self._parts.cgroups.children)
        left |= {*self._parts.monitor.processes, *self._parts.monitor.exits}
        await asyncio.gather(
            *(self._end_disabled(record, record.id in left) for record in records if not record.enabled)
        )
        restoring = [self._restored(self._add(record), record.id in left) for record in records if record.enabled]
        if restoring:
            # A plugin that hangs does not keep the daemon from serving.
            await asyncio.wait(restoring, timeout=OPEN_SECONDS)
        for plugin_id in await propagated.kept(self._namespace) - self._all.keys():
            await propagated.drop(self._namespace, plugin_id)
        await self._leave_sandboxes()
        await asyncio.to_thread(_sweep, self._parts.config.run / SOCKETS, {*self._all})
        await asyncio.to_thread(_sweep, self._parts.config.root / "plugins", {record.id for record in records})

    async def discard(self, plugin_id: str) -> None:
        """Remove the files of a plugin that was removed: its output, and what it has written below
        PropagatedMount. A failure is logged; the next start of the daemon tries again.
        """
        try:
            await asyncio.to_thread(files.remove_tree, self._directory(plugin_id))
        except OSError as error:
            _log.error("plugin %s: removing its files: %s", plugin_id[:12], reason_with_file(error))

    def give_up_starts(self) -> None:
        """The daemon is about to end: starts that clients wait for fail now."""
        self._closing = True
        for plugin_id in self._all:
            self.give_up(plugin_id)

    async def close(self) -> None:
        """The daemon ends. The processes stay. Returns when no start and no stop is under way."""
        self._closing = True
        await asyncio.gather(*(self._settle(enabled) for enabled in [*self._all.values()]))

    async def tree(self, record: PluginRecord, path: str) -> int:
        """See `client.Managed.tree`."""
        enabled = self._all.get(record.id)
        if enabled is None:
            raise ServerError(f'plugin "{record.name}" is disabled')
        below = _below(path, record.config.propagated_mount)
        try:
            if below is not None:
                cloning = self._namespace.run_apart(lambda: propagated.tree(record.id, below))
            elif enabled.process is None:
                raise ServerError("it does not run")
            else:
                cloning = _of_its_root(enabled.process, path)
            return await _within(self._parts.config.plugin_timeout, cloning)
        except TimeoutError as error:
            raise ServerError(f'plugin "{record.name}": {path}: its file system does not answer') from error
        except (ServerError, OSError) as error:
            why = error.message if isinstance(error, ServerError) else reason(error)
            raise ServerError(f'plugin "{record.name}": {path}: {why}') from error

    # --- one plugin; the caller holds its lock ----------------------------------------------------

    def _add(self, record: PluginRecord) -> _Enabled:
        enabled = self._all[record.id] = _Enabled(record)
        enabled.planned = restart.Planned(lambda: self._restart(enabled))
        return enabled

    async def _start(self, enabled: _Enabled, timeout: float) -> None:
        """Run it, and wait until it answers. After a failure no process is left, but what it
        acquired. Raises ServerError.
        """
        enabled.began = time.monotonic()
        began = datetime.datetime.now(datetime.UTC)
        try:
            enabled.process = process = await self._launch(enabled.record)
            process.exit.add_done_callback(functools.partial(self._ended, enabled, process))
            await self._ready(enabled, process, timeout)
        except (EngineError, OSError) as error:
            why = failure_reason(error.reason) if isinstance(error, LaunchFailed) else words(error)
            await uninterrupted(self._end(enabled, FAILED_SECONDS))
            said = await asyncio.to_thread(_output, self._log_file(enabled.record.id), began)
            if said:
                why = f"{why}; its output ends: {said}"
            raise ServerError(f'plugin "{enabled.record.name}": {why}') from error

    async def _launch(self, record: PluginRecord) -> Process:
        parts = self._parts
        limits.ensure_descriptors(limits.PER_START)
        parts.grace_period.expect()
        root = parts.config.run / launch.ROOT
        async with contextlib.AsyncExitStack() as undo:
            async with contextlib.AsyncExitStack() as borrowed:
                await asyncio.to_thread(self._make_directories, record)
                await parts.snapshots.mount(record.id)
                extra = Placed(root=root)
                if record.config.propagated_mount:
                    extra = await self._propagated(record, root, borrowed)
                rootfs = parts.snapshots.mounted(record.id)
                await asyncio.to_thread(self._write_bundle, record, rootfs, extra)
                namespace = await borrowed.enter_async_context(parts.snapshots.shown(record.id, root, extra.beside))
                plugin = Program(
                    key=record.id,
                    bundle=self._directory(record.id),
                    cgroup=cgroups.path(record.id),
                    log=JsonFile(str(self._log_file(record.id)), _LOG_SIZE, _LOG_FILES),
                )
                process = await launch.run(plugin, parts, namespace, undo)
            undo.pop_all()
        return process

    async def _propagated(self, record: PluginRecord, root: Path, borrowed: contextlib.AsyncExitStack) -> Placed:
        await propagated.keep(self._namespace, record.id, self._directory(record.id) / "propagated")
        tree = await propagated.peer(self._namespace, record.id)
        # the last close of a mount waits for an RCU grace period
        borrowed.push_async_callback(asyncio.to_thread, os.close, tree)
        mount = spec.propagated_mount(record, str(place_beside(root, 0)))
        return Placed(
            root=place_beside(root),
            beside=(Tree(tree),),
            mounts={mount.destination: mount},
            here={mount.destination: ""},
            directories=frozenset((mount.destination,)),
        )

    def _make_directories(self, record: PluginRecord) -> None:
        sockets, directory = self._sockets(record.id), self._directory(record.id)
        for made in (sockets.parent, directory.parent):
            made.mkdir(mode=0o710, exist_ok=True)
        for made in (sockets, directory):
            made.mkdir(mode=0o700, exist_ok=True)
        if "logdriver" in record.kinds:
            self._logging(record.id).mkdir(mode=0o700, exist_ok=True)
        if _is_network_driver(record):
            # It has a slave of it, and finds there the sandboxes of later containers too.
            detached_mounts.make_shared(self._parts.config.run / NETNS)
        # That of an earlier process: nothing would listen, or bind(2) would fail.
        (sockets / spec.socket_name(record)).unlink(missing_ok=True)

    def _write_bundle(self, record: PluginRecord, rootfs: str, extra: Placed) -> None:
        config, directory, sockets = record.config, self._directory(record.id), self._sockets(record.id)
        place = spec.Place(
            rootfs=str(extra.root),
            sockets=sockets,
            logging=self._logging(record.id),
            netns=self._parts.config.run / NETNS,
            identity=users.lookup(rootfs, f"{config.user.uid}:{config.user.gid}"),
            runtime=self._parts.runtimes.default,
            cgroups=self._parts.cgroups,
            propagated=next((mount.source for mount in extra.mounts.values()), ""),
        )
        document = spec.build(record, place)
        process = document.process
        search = next((each.partition("=")[2] for each in process.env if each.startswith("PATH=")), "")
        mounted = [(each.destination, each.source if each.type == "bind" else "") for each in document.mounts]
        mounted += extra.here.items()
        program.check(rootfs, process.args[0], search, process.cwd, mounted)
        bundle.make_mount_points(rootfs, document.mounts, extra)
        files.write_atomically(directory / "config.json", oci.encode(document), 0o600)
        (directory / "runtime.log").unlink(missing_ok=True)

    async def _ready(self, enabled: _Enabled, process: Process, timeout: float) -> None:
        """Wait until it answers. Raises ServerError when it ends, is disabled, or takes longer."""
        answering = asyncio.ensure_future(self._answers(enabled.record, timeout))
        leaving = asyncio.ensure_future(enabled.leaving.wait())
        try:
            await asyncio.wait((answering, leaving, process.exit), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and answering.exception() is not None:
                # A process that dies cuts its connection first, and its end says more.
                await asyncio.wait((process.exit,), timeout=_DYING)
            if process.exit.done():
                raise ServerError(f"it exited with status {process.exit.result().status}")
            if leaving.done():
                raise ServerError("the daemon ends" if self._closing else "it is being disabled")
            if not answering.done():
                raise ServerError(
                    f"it did not answer at {self.endpoint(enabled.record).socket} within {timeout:g} seconds"
                )
            answering.result()
        finally:
            await cancelled(answering)
            await cancelled(leaving)

    async def _answers(self, record: PluginRecord, timeout: float) -> None:
        found = self.endpoint(record)
        pause = _FIRST_PAUSE
        while not await asyncio.to_thread(_is_socket, found.socket):
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        plugin = await connect(record.name, found, timeout)
        try:
            await plugin.activate()
        except NotFound:
            return  # Docker does not activate managed plugins, so some do not serve the call
        finally:
            await plugin.close()
        missing = record.kinds - plugin.implements
        if missing:
            raise ServerError(f"it does not implement {', '.join(sorted(missing))} of its config's Interface.Types")

    def _ended(self, enabled: _Enabled, process: Process, ended: asyncio.Future[Exit]) -> None:
        """Its process has ended. Start it again, unless the engine has ended it."""
        if enabled.process is not process:
            return
        enabled.process = None
        _log.warning("%s: exited with status %d", enabled, ended.result().status)
        spawn(self._after_exit(enabled), f"{enabled}: clean up after its exit")

    async def _after_exit(self, enabled: _Enabled) -> None:
        async with enabled.lock:
            if enabled.leaving.is_set() or enabled.process is not None or enabled.planned or self._closing:
                return
            await self._clean_up(enabled.record)
            enabled.planned.plan(time.monotonic() - enabled.began)

    def _restart(self, enabled: _Enabled) -> None:
        enabled.restarting = spawn(self._start_again(enabled), f"{enabled}: restart")

    async def _start_again(self, enabled: _Enabled) -> None:
        async with enabled.lock:
            if enabled.leaving.is_set() or enabled.process is not None or self._closing:
                return
            try:
                await self._start(enabled, START_SECONDS)
            except ServerError as error:
                self._failed(enabled, error)
            else:
                _log.info("%s: runs again", enabled)

    def _failed(self, enabled: _Enabled, error: ServerError) -> None:
        """A start failed that no client waits for."""
        if not enabled.leaving.is_set() and not self._closing:
            enabled.planned.plan(0)
            _log.error("%s; next attempt in %.1f s", error.message, enabled.planned.delay)

    def _restored(self, enabled: _Enabled, left: bool) -> asyncio.Task[None]:
        enabled.restarting = spawn(self._restore(enabled, left), f"{enabled}: restore")
        return enabled.restarting

    async def _restore(self, enabled: _Enabled, left: bool) -> None:
        """Take over its process, or start it. `left`: the monitor knows it, or it has a control
        group."""
        record, monitor = enabled.record, self._parts.monitor
        async with enabled.lock:
            process = monitor.processes.get(record.id)
            if process is not None and await self._is_whole(record):
                enabled.process, enabled.began = process, time.monotonic()
                process.exit.add_done_callback(functools.partial(self._ended, enabled, process))
                return
            if record.id in monitor.exits:
                _log.warning("%s: exited with status %d", enabled, monitor.exits[record.id].status)
            if left:
                enabled.process = process
                await self._end(enabled, 0)
            try:
                await self._start(enabled, START_SECONDS)
            except ServerError as error:
                self._failed(enabled, error)

    async def _is_whole(self, record: PluginRecord) -> bool:
        """True if the mounts of its process are still those of the engine's mount namespace."""
        with contextlib.suppress(NotFound):
            self._parts.snapshots.mounted(record.id)
            return not record.config.propagated_mount or await propagated.is_kept(self._namespace, record.id)
        return False

    async def _end_disabled(self, record: PluginRecord, left: bool) -> None:
        """End what a crash has left of its start or its stop."""
        if left:
            enabled = self._add(record)
            enabled.process = self._parts.monitor.processes.get(record.id)
            await self._leave(enabled, 0)
        else:
            await self._attempt(record, self._parts.snapshots.unmount, record.id)

    async def _settle(self, enabled: _Enabled) -> None:
        enabled.planned.cancel()
        if enabled.restarting is not None:
            await cancelled(enabled.restarting)
        if enabled.starting:
            # Its client has gone, or the server did not wait for it.
            await uninterrupted(self._leave(enabled, FAILED_SECONDS))
        async with enabled.lock:
            pass  # a stop has ended

    async def _leave(self, enabled: _Enabled, seconds: float = STOP_SECONDS) -> None:
        """End it, after so many seconds by force, and release what it has. The caller does not hold
        its lock.
        """
        enabled.leaving.set()
        enabled.planned.cancel()
        async with enabled.lock:
            record = enabled.record
            if self._all.get(record.id) is not enabled:
                return
            await self._end(enabled, seconds)
            await self._attempt(record, self._parts.snapshots.unmount, record.id)
            await self._attempt(record, propagated.drop, self._namespace, record.id)
            for place in (self._sockets(record.id), self._logging(record.id)):
                await self._attempt(record, asyncio.to_thread, files.remove_tree, place)
            del self._all[record.id]
            await self._attempt(record, self._leave_sandboxes)

    async def _leave_sandboxes(self) -> None:
        """Give up the shared mount of RUN/netns if no plugin has a slave of it."""
        if not any(_is_network_driver(each.record) for each in self._all.values()):
            await asyncio.to_thread(detached_mounts.remove_shared, self._parts.config.run / NETNS)

    async def _end(self, enabled: _Enabled, seconds: float) -> None:
        """End its process, and remove what the runtime and the monitor have of it."""
        process, enabled.process = enabled.process, None
        key = enabled.record.id
        if process is not None and not process.exit.done():
            for number, limit in ((signal.SIGTERM, seconds), (signal.SIGKILL, launch.END_LIMIT)):
                with contextlib.suppress(EngineError):  # it has just ended
                    self._parts.monitor.signal(key, number)
                if (await asyncio.wait((process.exit,), timeout=limit))[0]:
                    break
        await self._clean_up(enabled.record)

    async def _clean_up(self, record: PluginRecord) -> None:
        """After the end of its process: the next use activates it again, and processes that it left
        (in the host's pid namespace) end.
        """
        parts, cgroup = self._parts, cgroups.path(record.id)
        await self._attempt(record, self._plugins.forget, record.name)
        await self._attempt(record, parts.runtimes.default.delete, record.id)
        await self._attempt(record, asyncio.to_thread, boot.kill_all, parts.cgroups, cgroup)
        await self._attempt(record, launch.remove_cgroup, parts, cgroup)
        parts.monitor.forget(record.id)

    async def _attempt(
        self, record: PluginRecord, step: Callable[P, Awaitable[object]], *arguments: P.args, **keywords: P.kwargs
    ) -> None:
        try:
            await step(*arguments, **keywords)
        except (EngineError, OSError) as error:
            _log.error('plugin "%s": cleaning up: %s', record.name, words(error))

    # --- places -----------------------------------------------------------------------------------

    def _sockets(self, plugin_id: str) -> Path:
        return self._parts.config.run / SOCKETS / plugin_id

    def _logging(self, plugin_id: str) -> Path:
        # Beside the sockets, not below them: the plugin may replace anything there by a link.
        return self._parts.config.run / SOCKETS / f"{plugin_id}.logging"

    def _directory(self, plugin_id: str) -> Path:
        return self._parts.config.root / "plugins" / plugin_id

    def _log_file(self, plugin_id: str) -> Path:
        return self._directory(plugin_id) / "output.log"


def _is_network_driver(record: PluginRecord) -> bool:
    return "networkdriver" in record.kinds


def _is_socket(path: str) -> bool:
    """True if it is a socket, and not a link, which would lead the engine to another one."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    return False


def _below(path: str, directory: str) -> str | None:
    """The part of `path` below `directory`; None if it is elsewhere."""
    if not directory:
        return None
    path, directory = normal(path), normal(directory)
    if path != directory and not path.startswith(f"{directory}/"):
        return None
    return path[len(directory) :].lstrip("/")


async def _within(seconds: float, opening: Coroutine[Any, Any, int]) -> int:
    """The descriptor that `opening` opens. Raises TimeoutError after that time. One that comes
    later, or after the caller was cancelled, is closed.

    A path of a plugin may lead into a file system that it serves, which may never answer.
    """
    task = asyncio.ensure_future(opening)
    try:
        async with asyncio.timeout(seconds):
            return await shield(task)
    except (TimeoutError, asyncio.CancelledError):
        task.add_done_callback(_close_late)
        raise


def _close_late(task: asyncio.Task[int]) -> None:
    if not task.cancelled() and task.exception() is None:
        # in a thread: closing the last descriptor of a mount waits for an RCU grace period
        asyncio.get_running_loop().run_in_executor(None, os.close, task.result())


async def _of_its_root(process: Process, path: str) -> int:
    return await in_own_thread(lambda: _tree_of(process, path))


def _tree_of(process: Process, path: str) -> int:
    """A detached copy of the mounts at a path of the process's root. Blocks."""
    with contextlib.ExitStack() as stack:
        root = os.open(f"/proc/{process.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, root)
        # After the root was opened: it shows that the process is still the plugin's.
        namespace = namespaces.of_process(process.pid, process.pidfd, "mnt")
        stack.callback(os.close, namespace)
        found = files.open_in_root(root, path, os.O_PATH)
        stack.callback(os.close, found)
        return detached_mounts.clone_within(namespace, found, recursive=True)


class _Line(msgspec.Struct):
    log: str
    time: datetime.datetime


def _output(path: Path, since: datetime.datetime) -> str:
    """The end of what it has written since then, from its json-file log. Blocks."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * _QUOTED))
            lines = file.read().splitlines()
    except OSError:
        return ""
    text = ""
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # the first may be cut
            entry = msgspec.json.decode(line, type=_Line)
            text += entry.log if entry.time >= since else ""
    return text.strip()[-_QUOTED:]


def _sweep(directory: Path, wanted: Iterable[str]) -> None:
    """Remove the directories of plugins that are not wanted. Blocks on files."""
    kept = {*wanted}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            plugin_id = name.removesuffix(".logging")
            if _ID.fullmatch(plugin_id) and plugin_id not in kept:
                files.remove_tree(directory / name)
