"""Log plugins, as the daemon sees them: it makes a FIFO for each container that logs to a plugin,
asks the plugin to read it (Docker's documentation, "Docker log driver plugins"), and asks again
when the plugin has ended.

The shipper writes the lines (`shipper/senders/plugin.py`). It always opens RUN/logging/<id>. A
managed plugin sees another name of the same FIFO, in a directory that it may change at will.

A FIFO without writers is at its end, and plugins stop reading then. So the daemon keeps it open for
writing too: shipper and daemon may end, one at a time. The kernel reports the end of the last
reader. Then the FIFO is replaced, because the plugin may have read half a frame, and the plugin is
asked again until it answers. Lines wait in the spool meanwhile.

Owns:    RUN/logging, and for each container with a log plugin a task and a descriptor.
Threads: the event loop's; FIFOs are made and removed in others.
Raises:  InvalidParameter at a create and ServerError at a start, in Docker's words.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from engine.containers import log_plan
from engine.errors import EngineError, InvalidParameter, ServerError, words
from engine.logs import drivers
from engine.logs.deliveries import LogPlugin
from engine.plugins.client import Plugin
from engine.plugins.registry import Plugins
from engine.system import files
from engine.system.reconcile import Backoff, either, first_of
from engine.system.tasks import spawn
from engine.system.threads import uninterrupted
from engine.wire.containers import LogConfig
from engine.wire.plugins import PluginAnswer

_log = logging.getLogger(__name__)

KIND = "LogDriver"
OF_MANAGED = "/run/docker/logging"
"""Where a managed plugin finds the FIFOs."""

OPEN_LIMIT = 10.0
"""Seconds that a plugin may take to open a FIFO that it has agreed to read."""
UNHEEDED_LIMIT = 10.0
"""Seconds that a plugin may take for a call whose failure does not matter."""
CLOSE_LIMIT = 3.0
"""Seconds that all plugins together may take to stop reading when the engine stops."""
STALLED = 30.0
"""Seconds after the end of a run without progress, until the plugin is no longer waited for. The
rest is delivered after the next start of the container or of the daemon."""
LOOK = 0.1
"""Seconds between looks at what is left to deliver, after the end of a run."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a plugin that has ended is asked again, and at most."""
STEADY = 10.0
"""Seconds of reading after which a plugin counts as well again."""
_FAILURES = (EngineError, OSError, RuntimeError)
"""Python raises RuntimeError when a thread cannot be started."""


class Fifos:
    """The FIFOs on disk. Blocks."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._directory = run / log_plan.FIFOS

    def make(self, container_id: str, managed: str) -> int:
        """A new FIFO in place of the last one. `managed`: the id of a managed plugin that reads it,
        or empty. Returns a descriptor for reading and writing, so that neither end waits for the
        other. Raises OSError.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        path, made = self._directory / container_id, self._directory / f"{container_id}.new"
        made.unlink(missing_ok=True)
        os.mkfifo(made, 0o600)
        try:
            if managed:
                with self._of_managed(managed, make=True) as directory:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(container_id, dir_fd=directory)
                    os.link(made, container_id, dst_dir_fd=directory)
            made.rename(path)
        except BaseException:
            made.unlink()
            raise
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)

    def remove(self, container_id: str, managed: str) -> None:
        """Idempotent."""
        (self._directory / container_id).unlink(missing_ok=True)
        if managed:
            with contextlib.suppress(OSError), self._of_managed(managed, make=False) as directory:
                os.unlink(container_id, dir_fd=directory)

    @contextlib.contextmanager
    def _of_managed(self, plugin_id: str, *, make: bool) -> Iterator[int]:
        """A descriptor of the directory that a managed plugin sees."""
        with _opened(self._run) as run:
            name = f"plugins/{plugin_id}.logging"
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=run)
            with _opened(name, run) as directory:
                yield directory

    def writer(self, container_id: str) -> int:
        """The writing end of a FIFO that a plugin reads. Raises OSError when none does, or there is
        no FIFO.
        """
        return os.open(self._directory / container_id, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)

    def sweep(self, live: Collection[str]) -> None:
        """Remove what an earlier daemon has left, but for these containers."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                if name not in live:
                    (self._directory / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path | str, root: int | None = None) -> Iterator[int]:
    """A descriptor of the directory; links below `root` are not followed."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(path, flags) if root is None else files.open_without_links(root, str(path), flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class LogPlugins:
    """The containers of one engine that log to plugins. `left` reports how many bytes of a
    container's output are not delivered; it blocks.
    """

    def __init__(self, run: Path, plugins: Plugins, left: Callable[[str], int]) -> None:
        self.plugins = plugins
        self.left = left
        self.fifos = Fifos(run)
        self.away: set[str] = set()
        """Plugins that do not answer, by name. Each is logged once."""
        self._sessions: dict[str, Session] = {}
        self._ends: select.epoll | None = None
        """Reports FIFOs that have lost their last reader."""
        self._watched: dict[int, asyncio.Event] = {}
        plugins.users.append(self._users)

    async def check(self, log: LogConfig) -> None:
        """Raises InvalidParameter when the driver is a plugin that does not exist or answer."""
        if drivers.by_plugin(log):
            try:
                await self.plugins.get(log.type, KIND)
            except EngineError as error:
                raise InvalidParameter(_unfound(log.type, error)) from error

    async def check_default(self, log: LogConfig) -> None:
        """Raises InvalidParameter, in Docker's words, when the default driver is a plugin that does
        not exist. It may not run yet.
        """
        if drivers.by_plugin(log) and not await self.plugins.exists(log.type):
            raise InvalidParameter(f"Failed to set log opts: {drivers.unregistered(log.type).message}")

    async def start(self, container_id: str, name: str, target: LogPlugin, *, strict: bool) -> None:
        """A run of the container is about to start. `name`: the container's.

        Raises ServerError when the plugin does not agree to read its output, if `strict`.
        """
        await self._cut(container_id)
        session = self._sessions[container_id] = Session(self, container_id, name, target)
        if strict:
            try:
                await session.begin()
            except BaseException as error:
                del self._sessions[container_id]
                if isinstance(error, (EngineError, OSError)):
                    raise ServerError(f"failed to initialize logging driver: {words(error)}") from error
                raise
        session.follow()

    def ended(self, container_id: str) -> None:
        """The run has ended, or has not begun: the plugin is asked to stop once it has read all."""
        session = self._sessions.get(container_id)
        if session is not None:
            session.ended.set()

    async def resume(self, found: Sequence[tuple[str, str, LogPlugin]], runs: Callable[[str], bool]) -> None:
        """At the daemon's start: id, name and target of the containers that run, have a FIFO, or
        whose lines are not all delivered. `runs` reports whether a container runs.
        """
        known = {container_id for container_id, _, _ in found}
        await asyncio.to_thread(self.fifos.sweep, known.union(self._sessions))
        for container_id, name, target in found:
            if container_id not in self._sessions:
                session = self._sessions[container_id] = Session(self, container_id, name, target)
                if not runs(container_id):
                    session.ended.set()
                session.follow(resumed=True)

    async def settled(self, seconds: float) -> None:
        """Wait until plugins have read everything of runs that have ended, or the time is over."""
        tasks = {session.task for session in self._sessions.values() if session.task and session.ended.is_set()}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def close(self, *, stop: bool) -> None:
        """`stop`: plugins are asked to stop reading. Otherwise they go on until the next daemon."""
        cuts = [asyncio.ensure_future(self._cut(container_id, stop=stop)) for container_id in self._sessions]
        if cuts:
            _, late = await asyncio.wait(cuts, timeout=CLOSE_LIMIT)
            for each in late:
                each.cancel()
        if self._ends is not None:
            asyncio.get_running_loop().remove_reader(self._ends)
            self._ends.close()
            self._ends = None

    async def _cut(self, container_id: str, *, stop: bool = True) -> None:
        """End what is left of the last run, without waiting for its lines. They are not lost: they
        are read again from what is acknowledged.
        """
        session = self._sessions.pop(container_id, None)
        if session is not None:
            await session.cut(stop=stop)

    def forget(self, session: Session) -> None:
        """The session is over."""
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]

    def _users(self, name: str) -> Iterable[str]:
        return [
            f"container {each.name}"
            for each in self._sessions.values()
            if each.uses and name in (each.plugin, each.target.name)
        ]

    def watch(self, descriptor: int) -> asyncio.Event:
        """An event that is set when the FIFO loses its last reader."""
        if self._ends is None:
            self._ends = select.epoll()
            asyncio.get_running_loop().add_reader(self._ends, self._lost)
        event = self._watched[descriptor] = asyncio.Event()
        self._ends.register(descriptor, 0)  # EPOLLERR is always reported
        return event

    def unwatch(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None and self._ends is not None:
            self._ends.unregister(descriptor)

    def _lost(self) -> None:
        assert self._ends is not None
        for descriptor, _ in self._ends.poll(0):
            event = self._watched.get(descriptor)
            self.unwatch(descriptor)
            if event is not None:
                event.set()


class Session:
    """One container's output and the plugin that reads it, from the container's start until all of
    it is delivered.
    """

    def __init__(self, owner: LogPlugins, container_id: str, name: str, target: LogPlugin) -> None:
        self.id = container_id
        self.name = name
        self.target = target
        self.plugin = target.name
        """Its name as its kind has it: of a managed one, `NAME:TAG`."""
        self.ended = asyncio.Event()
        """The run has ended."""
        self.task: asyncio.Task[None] | None = None
        self._owner = owner
        self._managed = ""
        """The id of a managed plugin."""
        self._writer = -1
        """The FIFO, from the plugin's agreement to read it until the plugin is asked to stop."""
        self._known = False
        """The plugin may know the FIFO."""
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=True)
        """Times in a row that the plugin did not read, or not for long."""

    @property
    def uses(self) -> bool:
        """The container runs, or the plugin reads the rest of its output."""
        return not self.ended.is_set() or self._writer >= 0

    @property
    def _file(self) -> str:
        """The FIFO, as the plugin sees it."""
        return f"{OF_MANAGED}/{self.id}" if self._managed else self.target.fifo

    async def _found(self) -> Plugin:
        """Raises NotFound or ServerError."""
        found = await self._owner.plugins.get(self.target.name, KIND)
        self.plugin = found.name
        self._managed = found.managed.id if found.managed is not None else ""
        return found

    async def begin(self) -> None:
        """Have the plugin read a new FIFO. Raises EngineError or OSError; nothing is left then."""
        try:
            plugin = await self._found()
        except EngineError as error:
            raise ServerError(_unfound(self.target.name, error)) from error
        if self._known:
            await self._ask_to_stop()
        both: list[int] = []
        fifos = self._owner.fifos
        try:
            await uninterrupted(asyncio.to_thread(lambda: both.append(fifos.make(self.id, self._managed))))
            # Reads are served from the spool, whatever the answer is. Docker asks this first.
            await self._call_unheeded("LogDriver.Capabilities")
            self._known = True
            try:
                body = {"File": self._file, "Info": self.target.info}
                await plugin.call("LogDriver.StartLogging", PluginAnswer, body)
            except EngineError as error:
                await self._ask_to_stop()  # it may have begun all the same
                raise ServerError(f"error creating logger: {error.message}") from error
            self._writer = os.open(f"/proc/self/fd/{both[0]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except BaseException:
            await uninterrupted(asyncio.to_thread(fifos.remove, self.id, self._managed))
            raise
        finally:
            for each in both:
                os.close(each)

    def follow(self, *, resumed: bool = False) -> None:
        self.task = spawn(self._run(resumed), f"container {self.id}: logging to plugin {self.target.name}")

    async def _run(self, resumed: bool) -> None:
        if resumed:
            await self._resume()
        while True:
            try:
                if await self._attended():
                    break
            except _FAILURES as error:
                self._is_away(error)
            self._close()
            await asyncio.sleep(self._backoff.failed())
        await self._stop()
        self._owner.forget(self)

    async def _resume(self) -> None:
        """Go on with the FIFO of the last daemon, if the plugin still reads it."""
        self._known = True
        try:
            await uninterrupted(asyncio.to_thread(self._open))
            await self._found()
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                _log.warning("container %s: its FIFO cannot be opened: %s", self.id, words(error))
        except EngineError:  # asked again when it has closed the FIFO
            pass

    def _open(self) -> None:
        self._writer = self._owner.fifos.writer(self.id)

    async def _attended(self) -> bool:
        """Returns True when the plugin has read all of a run that has ended, or no longer reads it;
        False when it has closed the FIFO. Raises one of `_FAILURES`.
        """
        if self._writer < 0:
            if self.ended.is_set() and not await self._left():
                return True
            await self.begin()
        if not await self._is_read():
            raise ServerError("the plugin does not open the FIFO")
        if self.target.name in self._owner.away:
            self._owner.away.discard(self.target.name)
            _log.warning("log plugin %s reads again", self.target.name)
        begun = time.monotonic()
        closed = self._owner.watch(self._writer)
        try:
            if await first_of(closed.wait(), self.ended.wait()):
                return False
            left, since = -1, time.monotonic()
            while now_left := await self._left():
                if now_left != left:
                    left, since = now_left, time.monotonic()
                elif time.monotonic() - since > STALLED:
                    _log.warning(
                        "container %s: plugin %s does not read its last %d bytes", self.id, self.target.name, left
                    )
                    break
                if await either(closed, LOOK):
                    return False
            return True
        finally:
            self._owner.unwatch(self._writer)
            if time.monotonic() - begun > STEADY:
                self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=True)

    async def _is_read(self) -> bool:
        """Wait until the plugin has opened the FIFO. No event reports that."""
        poll = select.poll()
        poll.register(self._writer, 0)
        backoff, end = Backoff(0.001, 0.1), time.monotonic() + OPEN_LIMIT
        while poll.poll(0):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(backoff.failed())
        return True

    async def _left(self) -> int:
        return await asyncio.to_thread(self._owner.left, self.id)

    def _is_away(self, error: Exception) -> None:
        if self.target.name not in self._owner.away:
            self._owner.away.add(self.target.name)
            _log.warning("log plugin %s does not read: %s", self.target.name, words(error))

    def _close(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    async def _stop(self) -> None:
        """Ask the plugin to stop, and remove the FIFO."""
        if self._known:
            await self._ask_to_stop()
        self._close()
        # not cancelled: it would remove the FIFO of the next run
        await uninterrupted(asyncio.to_thread(self._owner.fifos.remove, self.id, self._managed))

    async def _ask_to_stop(self) -> None:
        await self._call_unheeded("LogDriver.StopLogging", with_file=True)
        self._known = False

    async def _call_unheeded(self, method: str, *, with_file: bool = False) -> None:
        """The plugin may not have this call, not know the FIFO, or not answer."""
        try:
            async with asyncio.timeout(UNHEEDED_LIMIT):
                plugin = await self._found()
                await plugin.call(method, PluginAnswer, {"File": self._file} if with_file else None)
        except (EngineError, TimeoutError) as error:
            _log.info("container %s: plugin %s: %s: %s", self.id, self.target.name, method, words(error))

    async def cut(self, *, stop: bool) -> None:
        """End the session at once."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait((self.task,))
        if stop:
            await self._stop()
        else:
            self._close()


def _unfound(name: str, error: EngineError) -> str:
    return f"error looking up logging plugin {name}: {error.message}"


__all__ = ["Fifos", "LogPlugins", "Session"]
