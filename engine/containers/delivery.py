"""Lines of containers on their way to remote log targets, as the daemon sees them: the document for
the shipper, the state of the delivery, and what is left of a removed container.

The monitor writes the spool and starts the shipper (`engine/shipper`), which delivers while no
daemon runs too. ROOT/logs/<id> has a container's spool, document and position. It remains after the
container's end, because lines may still be waiting. A removal renames it to
ROOT/logs/undelivered/<id>.<seconds> if they are; the shipper removes it when they are delivered, or
given up.

Owns:    ROOT/logs but what the shipper removes, and the socket RUN/shipper/events.sock.
Threads: the event loop's; files are read and written in others.
Raises:  ServerError when a target cannot be reached at a start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from engine import __version__
from engine.config import Config
from engine.containers import log_plan
from engine.containers.log_plugins import LogPlugins
from engine.errors import ServerError
from engine.events import EventLog
from engine.logs import cursor, deliveries, drivers, reach
from engine.logs.deliveries import Delivery, LogPlugin
from engine.plugins.registry import Plugins
from engine.system.files import remove_tree, write_atomically
from engine.wire.containers import LogConfig
from engine.wire.system import LogDeliveries, LogDelivery, LogTarget

_log = logging.getLogger(__name__)

UNDELIVERED = "undelivered"
"""Below ROOT/logs: spools of removed containers."""
ANSWER_LIMIT = 2.0
"""Seconds that the shipper may take to answer."""
SETTLE_LIMIT = 3.0
"""Seconds that log plugins may take for the last lines when the engine stops."""
END_LIMIT = 10.0
"""Seconds that a shipper of another version may take to end."""
_EVENT_LONGEST = 8192


class State(msgspec.Struct, frozen=True):
    """The shipper's answer for one container. `since`: seconds since the epoch when `error` was set
    or cleared; empty, the target is reached."""

    driver: str
    address: str
    error: str
    since: float
    delivered: int
    waiting: int | None
    """None: there were too many to be counted in time."""
    waiting_bytes: int
    dropped: int


class _Change(msgspec.Struct, frozen=True):
    """What the shipper reports unasked."""

    action: str
    driver: str
    address: str
    error: str = ""
    containers: int = 0
    container: str = ""
    lines: int = 0


_states = msgspec.json.Decoder(dict[str, State])
_changes = msgspec.json.Decoder(_Change)


class Deliveries:
    """The deliveries of one engine's containers. `ship` has the monitor run a shipper, which looks
    at ROOT/logs again."""

    def __init__(
        self, config: Config, events: EventLog, engine_name: str, ship: Callable[[], None], plugins: Plugins
    ) -> None:
        self._logs = config.root / log_plan.SPOOLS
        self._shipper = config.run / "shipper"
        self._strict = config.log_start == "strict"
        self._default = drivers.of_daemon(config)
        self._events = events
        self._name = engine_name
        self._ship = ship
        self.plugins = LogPlugins(config.run, plugins, self._left)
        self._socket: socket.socket | None = None
        self._away: set[tuple[str, str]] = set()
        """Targets that were reported as unreachable. Each new shipper reports them again."""

    async def open(self) -> None:
        """Receive what the shipper reports. Raises OSError, and InvalidParameter when the default
        driver is a plugin that does not exist."""
        await self.plugins.check_default(self._default)
        self._socket = await asyncio.to_thread(self._bind)
        asyncio.get_running_loop().add_reader(self._socket, self._reported)

    def _bind(self) -> socket.socket:
        self._shipper.mkdir(mode=0o700, exist_ok=True)
        path = self._shipper / "events.sock"
        path.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        bound.bind(str(path))
        path.chmod(0o600)
        return bound

    async def settled(self) -> None:
        """All containers have ended: wait a little for log plugins, as the shipper does for its
        targets."""
        await self.plugins.settled(SETTLE_LIMIT)

    async def close(self, *, stop: bool) -> None:
        """`stop`: the engine has been stopped with all containers."""
        await self.plugins.close(stop=stop)
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    # --- a container's start and removal ----------------------------------------------------------

    def directory(self, container_id: str) -> Path:
        return self._logs / container_id

    async def check(self, log: LogConfig) -> None:
        """Raises InvalidParameter when the driver is a plugin that cannot be used."""
        await self.plugins.check(log)

    async def prepare(self, delivery: Delivery) -> None:
        """Write the document of a container that is about to start. Raises ServerError when its
        target cannot be reached and the configuration demands it."""
        if isinstance(delivery.target, LogPlugin):
            # First, so that a daemon that starts after a crash asks the plugin to stop.
            await asyncio.to_thread(self._write, delivery)
            await self.plugins.start(delivery.id, delivery.name, delivery.target, strict=self._strict)
            return
        if self._strict:
            try:
                await reach.check(delivery.target)
            except reach.FAILURES as error:
                raise ServerError(f"failed to initialize logging driver: {reach.reason(error)}") from error
        await asyncio.to_thread(self._write, delivery)

    def ended(self, container_id: str) -> None:
        """Its run has ended, or its start has failed."""
        self.plugins.ended(container_id)

    def _write(self, delivery: Delivery) -> None:
        directory = self.directory(delivery.id)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / "delivery", deliveries.encode(delivery), mode=0o600)

    async def removed(self, container_id: str) -> None:
        """The container is gone: keep its spool as long as lines wait for their target."""
        if await asyncio.to_thread(self._leave, container_id):
            self._ship()

    def _leave(self, container_id: str) -> bool:
        directory = self.directory(container_id)
        if not directory.exists():
            return False
        if not _waits(directory):
            remove_tree(directory)
            return False
        undelivered = self._logs / UNDELIVERED
        undelivered.mkdir(mode=0o700, exist_ok=True)
        directory.rename(undelivered / f"{container_id}.{int(time.time())}")
        return True

    async def sweep(self, live: Collection[str], runs: Callable[[str], bool]) -> None:
        """At the daemon's start: a shipper of another version ends, and the monitor starts one of
        this version. Spools of containers without a record are left as by a removal.
        Has the shipper run if anything waits, and log plugins read what they have not got. `runs`
        reports whether a container runs."""

        def look() -> bool:
            if not self._logs.exists():
                return False
            waits = False
            for directory in list(self._logs.iterdir()):
                if directory.name == UNDELIVERED:
                    waits = any(directory.iterdir()) or waits
                elif directory.name in live:
                    waits = _waits(directory) or waits
                else:
                    waits = self._leave(directory.name) or waits
            return waits

        await asyncio.to_thread(self._end_other_version)
        if await asyncio.to_thread(look):
            self._ship()
        await self.plugins.resume(await asyncio.to_thread(lambda: list(self._by_plugins(runs))), runs)

    def _by_plugins(self, runs: Callable[[str], bool]) -> Iterator[tuple[str, str, LogPlugin]]:
        """As `LogPlugins.resume` wants them."""
        for path in [*self._logs.glob("*/delivery"), *self._logs.glob(f"{UNDELIVERED}/*/delivery")]:
            found = _document(path.parent)
            if found is None or not isinstance(found.target, LogPlugin):
                continue
            if runs(found.id) or os.path.exists(found.target.fifo) or _waits(path.parent):
                yield found.id, found.name, found.target

    def _left(self, container_id: str) -> int:
        """Bytes of its output that are not delivered, also of a removed one."""
        directory = self.directory(container_id)
        size = _unacknowledged(directory, _cursor(directory))
        # looked for last: a removal may rename it meanwhile
        for each in self._logs.glob(f"{UNDELIVERED}/{container_id}.*"):
            size += _unacknowledged(each, _cursor(each))
        return size

    def _end_other_version(self) -> None:
        try:
            if (self._shipper / "version").read_text() == __version__:
                return
            lock = os.open(self._shipper / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            for _ in range(round(END_LIMIT / 0.1)):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(int(os.pread(lock, 32, 0)), signal.SIGTERM)
                time.sleep(0.1)
            _log.warning("the shipper of another version does not end")
        finally:
            os.close(lock)

    # --- states -----------------------------------------------------------------------------------

    async def state(self, container_id: str) -> LogDelivery | None:
        """How far a container's lines are delivered; None if it has no remote target, or has not
        been started."""
        states = await self._ask([container_id])
        if container_id in states:
            return _shown(states[container_id])
        return await asyncio.to_thread(self._on_disk, container_id)

    def _on_disk(self, container_id: str) -> LogDelivery | None:
        """What the shipper has left on disk, when it does not run or has nothing to do for this
        container."""
        directory = self.directory(container_id)
        delivery = _document(directory)
        if delivery is None:
            return None
        known = _cursor(directory)
        size = _unacknowledged(directory, known)
        return LogDelivery(
            driver=delivery.target.destination[0],
            address=delivery.target.address,
            state="waiting" if size else "delivered",
            waiting=None if size else 0,
            delivered=known.lines - known.dropped_lines,
            waiting_bytes=size,
            dropped=known.dropped_lines,
        )

    async def totals(self) -> LogDeliveries | None:
        """All deliveries together; None while the shipper has none."""
        states = await self._ask(None)
        if not states:
            return None
        counts = [state.waiting for state in states.values()]
        targets: dict[tuple[str, str], list[State]] = {}
        for state in states.values():
            targets.setdefault((state.driver, state.address), []).append(state)
        return LogDeliveries(
            containers=len(states),
            delivered=sum(state.delivered for state in states.values()),
            waiting=None if None in counts else sum(filter(None, counts)),
            waiting_bytes=sum(state.waiting_bytes for state in states.values()),
            dropped=sum(state.dropped for state in states.values()),
            targets=[_target(found) for _, found in sorted(targets.items())],
        )

    async def _ask(self, containers: Iterable[str] | None) -> dict[str, State]:
        """The shipper's answer; nothing when it does not run."""
        question = msgspec.json.encode({"containers": None if containers is None else list(containers)}) + b"\n"
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                reader, writer = await asyncio.open_unix_connection(str(self._shipper / "socket"))
                try:
                    writer.write(question)
                    return _states.decode(await reader.read(-1))
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.MsgspecError):
            return {}

    def _reported(self) -> None:
        """The shipper reports that a target has gone or returned, or that lines were dropped."""
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    change = _changes.decode(self._socket.recv(_EVENT_LONGEST))
                except msgspec.MsgspecError as error:
                    _log.error("a report of the shipper: %s", error)
                    continue
                self._publish(change)

    def _publish(self, change: _Change) -> None:
        attributes = {"name": self._name, "driver": change.driver, "address": change.address}
        if change.action == "lost":
            attributes |= {"container": change.container, "lines": str(change.lines)}
            _log.warning("container %s: %d log lines were dropped", change.container, change.lines)
        else:
            target = change.driver, change.address
            if change.action == "forgotten":  # no container uses it any more
                self._away.discard(target)
                return
            if change.action == "unreachable":
                if target in self._away:
                    return
                self._away.add(target)
            else:
                self._away.discard(target)
            attributes |= {"containers": str(change.containers)}
            if change.error:
                attributes["error"] = change.error
            _log.warning("log target %s %s: %s", change.driver, change.address, change.error or "reached again")
        self._events.publish("daemon", f"log-{change.action}", self._name, attributes)


def _shown(state: State) -> LogDelivery:
    current = "retrying" if state.error else "waiting" if state.waiting != 0 else "delivered"
    return LogDelivery(
        driver=state.driver,
        address=state.address,
        state=current,
        error=state.error,
        delivered=state.delivered,
        waiting=state.waiting,
        waiting_bytes=state.waiting_bytes,
        dropped=state.dropped,
    )


def _target(states: list[State]) -> LogTarget:
    first = states[0]
    return LogTarget(
        driver=first.driver,
        address=first.address,
        state="retrying" if first.error else "reached",
        error=first.error,
        containers=len(states),
    )


def _document(directory: Path) -> Delivery | None:
    try:
        return deliveries.decode((directory / "delivery").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def _cursor(directory: Path) -> cursor.Cursor:
    try:
        return cursor.decode((directory / "cursor").read_bytes()) or cursor.Cursor()
    except FileNotFoundError:
        return cursor.Cursor()


def _waits(directory: Path) -> bool:
    """The spool has something that its target has not acknowledged, as far as the disk shows."""
    return _unacknowledged(directory, _cursor(directory)) > 0


def _unacknowledged(directory: Path, known: cursor.Cursor) -> int:
    """Bytes after the acknowledged position. Compressed files are acknowledged."""
    size, number = 0, 0
    while True:
        path = directory / (f"{log_plan.SPOOL}.{number}" if number else log_plan.SPOOL)
        try:
            status = path.stat()
        except FileNotFoundError:
            return size
        if status.st_ino == known.inode:
            return size + max(0, status.st_size - known.offset)
        size += status.st_size
        number += 1
