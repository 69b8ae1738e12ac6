"""The shipper process: it finds spools with something to deliver, gives each to its destination,
and tells the daemon what it asks.

It learns of new lines from the board, a memory that it shares with the monitor (`_fast/board`). The
monitor sets a bit per spool, and rings the bell, a FIFO, only while the shipper sleeps. Spools that
no container writes any more are found in ROOT/logs when it starts and when the monitor says so.

It ends when no container with a remote driver runs and nothing is left to deliver. The monitor
starts it again.

Owns:    RUN/shipper/lock, `version` and `socket`, and ROOT/logs/undelivered, the spools of removed
         containers.
Threads: the event loop's; cursors are written, and lines are counted, in others.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

from engine import __version__
from engine._fast.board import Board
from engine.errors import words
from engine.logs import deliveries
from engine.logs.deliveries import Delivery, Key
from engine.shipper.destination import Destination, describe
from engine.shipper.feed import Feed
from engine.shipper.senders import destination as make_destination
from engine.system import log_format
from engine.system.tasks import spawn

_log = logging.getLogger("engine.shipper")

LOOK = 0.003
"""Seconds between looks at the board while lines come. Lines of that time are sent together."""
SAVE = 1.0
"""Seconds until an acknowledged position is in its cursor. A shipper that is killed sends what was
acknowledged since again, unless the board still has it."""
IDLE = 60.0
"""Seconds without anything to deliver until the process ends."""
REPORT = 1.0
"""Seconds for which lost lines of a container are added up for the daemon."""
GIVE_UP = 600.0
"""Seconds that lines of a removed container are kept for their target."""
TIDY = 5.0
"""Seconds between looks for what is over."""
BUSY, HOMELESS = 3, 4
"""Exit statuses: another shipper serves this RUN; RUN/shipper was removed."""
UNDELIVERED = "undelivered"
"""Below ROOT/logs: spools of removed containers, `ID.SECONDS` with the time of the removal."""


COUNTING = 1.0
"""Seconds that an answer takes to count the lines that wait. The daemon waits for two."""


class _Question(msgspec.Struct, frozen=True):
    """`containers`: ids, or None for all."""

    containers: list[str] | None


class Shipper:
    """All feeds and destinations."""

    def __init__(
        self, root: str, run: str, *, tidy: float = TIDY, idle: float = IDLE, give_up: float = GIVE_UP
    ) -> None:
        """The times are those of the constants. Raises OSError."""
        self._times = (tidy, idle, give_up)
        self.logs = f"{root}/logs"
        self.directory = f"{run}/shipper"
        self.board = Board(os.fsencode(self.directory), monitor=False)
        self.feeds: dict[str, Feed] = {}
        self.destinations: dict[Key, Destination] = {}
        self._unsaved: set[Feed] = set()
        self._scanned = self._generation = -1
        self._looking: asyncio.TimerHandle | None = None
        self._due: asyncio.TimerHandle | None = None
        """Of the next save."""
        self._saves = False
        """A save runs."""
        self._leaves = False
        """The process ends: what is not saved is saved when its feed is closed."""
        self._busy_at = time.monotonic()
        self._ending = asyncio.Event()
        self._homeless = False
        self._lost: dict[Feed, int] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    async def serve(self) -> int:
        """Returns when there is nothing left to do, or after SIGTERM, with the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        path = f"{self.directory}/socket"
        with suppress(FileNotFoundError):
            os.unlink(path)
        server = await asyncio.start_unix_server(self._answer, path)
        os.chmod(path, 0o600)
        loop.add_reader(self.board.bell, self._rung)
        tidying = loop.create_task(self._tidy())
        self._rung()
        await self._ending.wait()
        loop.remove_reader(self.board.bell)
        if self._looking is not None:
            self._looking.cancel()
        tidying.cancel()
        server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.gather(
                    *(each.end(orderly=True) for each in self.destinations.values()), *self._background
                )
        self._leaves = True
        if self._due is not None:
            self._due.cancel()
        await loop.shutdown_default_executor()
        self._report_lost()
        for feed in self.feeds.values():
            self._close(feed)
        with suppress(FileNotFoundError):
            os.unlink(path)
        return HOMELESS if self._homeless else 0

    # --- the board --------------------------------------------------------------------------------

    def _rung(self) -> None:
        self.board.wake()
        if self._looking is None:
            self._look()

    def _look_now(self) -> None:
        if self._ending.is_set():
            return
        if self._looking is not None:
            self._looking.cancel()
        self.board.wake()
        self._look()

    def _look(self) -> None:
        """Take what has changed. Sleep when nothing has; until then look again soon."""
        self._looking = None
        if self.board.replaced:
            self._new_board()
        if self.board.generation != self._generation:
            self._new_generation()
        changed = self.board.changed()
        for number in changed:
            self._take(number)
        if self.board.scans() != self._scanned:
            if self._scanned < 0:
                self._scan_all()
            self._scanned = self.board.scans()
            self._scan()
            changed.append(-1)
        if changed or not self.board.sleep():
            self._looking = asyncio.get_running_loop().call_later(LOOK, self._look)

    def _new_board(self) -> None:
        """A new monitor has made another board."""
        loop = asyncio.get_running_loop()
        try:
            board = Board(os.fsencode(self.directory), monitor=False)
        except OSError as error:  # another layout, or removed: the monitor starts another process
            _log.error("%s/board: %s", self.directory, words(error))
            self._homeless = True
            self._ending.set()
            return
        loop.remove_reader(self.board.bell)
        self.board = board
        loop.add_reader(board.bell, self._rung)
        self._scanned = self._generation = -1

    def _new_generation(self) -> None:
        """A new monitor writes the spools. Slots that it has opened may have lost their bits, which
        were taken for those of the last monitor."""
        self._generation = self.board.generation
        for feed in self.feeds.values():
            feed.slot = -1
        number = 0
        while self._take(number):
            number += 1

    def _take(self, number: int) -> bool:
        """Take what has changed in that slot. Returns False if there is no such slot."""
        try:
            name, is_open, written, lines = self.board.slot(number)
        except IndexError:
            return False
        if name:
            try:
                self._slot_changed(number, name, is_open, written, lines)
            except Exception:  # a fault of this program, or a sender that is not installed
                _log.exception("container %s", name[:12])
        return True

    def _slot_changed(self, number: int, name: str, is_open: bool, written: int, lines: int) -> None:
        feed = self.feeds.get(name)
        if feed is None:
            feed = self._load(f"{self.logs}/{name}")
            if feed is None:
                return
        # A slot that has fewer lines than before has been closed and opened again.
        opened = is_open and (feed.slot != number or lines < feed.slot_lines)
        if opened:
            self._refresh(feed)
            feed.slot = number
        if is_open:
            feed.written, feed.slot_lines = written, lines
            if opened:
                self.acknowledged(feed)
            feed.limit_lag()
        elif feed.slot in (number, -1):  # else it has been opened again meanwhile, in another slot
            feed.slot, feed.written = -1, written
        feed.destination.notify(feed)

    # --- spools on disk ---------------------------------------------------------------------------

    def _scan_all(self) -> None:
        """Find the spools of containers that do not run. Later ones are found by the board."""
        for name in _listed(self.logs):
            if name != UNDELIVERED and name not in self.feeds:
                feed = self._load(f"{self.logs}/{name}")
                if feed is not None:
                    feed.destination.notify(feed)

    def _scan(self) -> None:
        """Find the spools of removed containers."""
        removed = f"{self.logs}/{UNDELIVERED}"
        for name in _listed(removed):
            container, _, at = name.partition(".")
            feed = self.feeds.get(container)
            if feed is None:
                feed = self._load(f"{removed}/{name}")
            else:
                feed.directory = f"{removed}/{name}"
            if feed is not None and not feed.until:
                feed.until = (int(at) if at.isdecimal() else time.time()) + self._times[2]
                feed.destination.notify(feed)

    def _load(self, directory: str) -> Feed | None:
        """The feed of a spool on disk; None, with a line in the log, if it cannot be served."""
        document = self._document(directory)
        if document is None:
            return None
        try:
            feed = Feed(directory, document, self._destination(document))
        except FileNotFoundError:
            return None  # a container that is just being removed
        except OSError as error:
            _log.error("%s: %s", directory, words(error))
            return None
        except Exception:  # a fault of this program, or a sender that is not installed
            _log.exception("%s", directory)
            return None
        self.feeds[document.id] = feed
        feed.destination.add(feed)
        return feed

    def _document(self, directory: str) -> Delivery | None:
        try:
            with open(f"{directory}/delivery", "rb") as file:
                return deliveries.decode(file.read())
        except FileNotFoundError:
            return None  # a container that is being created or removed
        except (OSError, msgspec.MsgspecError) as error:
            _log.error("%s/delivery: %s", directory, words(error))
            return None

    def _refresh(self, feed: Feed) -> None:
        """The container may have been started again, with another document."""
        document = self._document(feed.directory)
        if document is None or document == feed.document:
            return
        if document.target.destination != feed.document.target.destination:
            feed.rollback()
            feed.destination.remove(feed)
            feed.destination = self._destination(document)
            feed.destination.add(feed)
        feed.change(document)

    def _destination(self, document: Delivery) -> Destination:
        key = document.target.destination
        found = self.destinations.get(key)
        if found is None:
            found = self.destinations[key] = make_destination(self, document)
        return found

    # --- what feeds and destinations report -------------------------------------------------------

    def acknowledged(self, feed: Feed) -> None:
        if feed.slot >= 0 and not self.board.ack(feed.slot, feed.document.id, *feed.acked):
            feed.slot = -1
        self._unsaved.add(feed)
        self._save_soon()

    def lost(self, feed: Feed, lines: int) -> None:
        self._unsaved.add(feed)
        self._save_soon()
        if not self._lost:
            asyncio.get_running_loop().call_later(REPORT, self._report_lost)
        self._lost[feed] = self._lost.get(feed, 0) + lines

    def _report_lost(self) -> None:
        lost, self._lost = self._lost, {}
        for feed, lines in lost.items():
            self._report("lost", feed.destination, container=feed.document.id, lines=lines)

    def changed(self, destination: Destination) -> None:
        if destination.error:
            _log.warning("%s %s: %s", destination.driver, destination.address, destination.error)
        else:
            _log.warning("%s %s: reached again", destination.driver, destination.address)
        self._report("unreachable" if destination.error else "reachable", destination)

    def _report(self, action: str, destination: Destination, **more: object) -> None:
        """To the daemon, which may not be there."""
        document = {
            "action": action,
            "driver": destination.driver,
            "address": destination.address,
            "error": destination.error,
            "containers": len(destination.feeds),
            **more,
        }
        with suppress(OSError):
            self._events.sendto(msgspec.json.encode(document), f"{self.directory}/events.sock")

    def _save_soon(self) -> None:
        if self._due is None and not self._saves and not self._leaves:
            self._due = asyncio.get_running_loop().call_later(SAVE, self._save)

    def _save(self) -> None:
        self._due = None
        unsaved, self._unsaved = self._unsaved, set()
        positions = [(feed, feed.position()) for feed in unsaved]

        def save() -> None:
            for feed, position in positions:
                feed.save(position)

        self._saves = True
        saved = asyncio.get_running_loop().run_in_executor(None, save)
        saved.add_done_callback(self._saved)

    def _saved(self, done: asyncio.Future[None]) -> None:
        self._saves = False
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("positions cannot be saved: %s", words(error))
        if self._unsaved:
            self._save_soon()

    def _close(self, feed: Feed) -> None:
        if feed in self._unsaved:
            self._unsaved.discard(feed)
            try:
                feed.save(feed.position())
            except OSError as error:
                _log.error("%s: %s", feed.directory, words(error))
        feed.close()

    # --- what is over -----------------------------------------------------------------------------

    async def _tidy(self) -> None:
        tidy, idle, _ = self._times
        while True:
            await asyncio.sleep(tidy)
            for feed in list(self.feeds.values()):
                if feed.broken:  # nothing else may tell that its spool can be read again
                    feed.destination.notify(feed)
                # a save that runs may use the feed's descriptor, and writes an older position
                if feed.slot < 0 and not self._saves:
                    await self._conclude(feed)
            for key, each in list(self.destinations.items()):
                if not each.feeds:
                    del self.destinations[key]
                    if each.error:
                        self._report("forgotten", each)
                    task = spawn(each.end(orderly=True), f"shipper: the end of {each.driver} to {each.address}")
                    self._background.add(task)
                    task.add_done_callback(self._background.discard)
            if self.board.replaced:
                self._rung()
            now = time.monotonic()
            if self.feeds or self._unsaved or self._background:
                self._busy_at = now
            elif now - self._busy_at > idle:
                self._ending.set()

    async def _conclude(self, feed: Feed) -> None:
        """Forget a feed that is delivered, or whose time is over."""
        if self._is_gone(feed):
            return
        over = bool(feed.until) and time.time() > feed.until
        if not over and (feed.queued or not feed.delivered):
            return
        if not feed.delivered:
            size, lines = await asyncio.to_thread(feed.waiting, feed.acked)
            if self._saves:  # begun meanwhile: the next time
                return
            lines = lines or 0
            feed.dropped_lines += lines
            _log.warning("container %s, removed: %d lines (%d bytes) dropped", feed.name, lines, size)
            self._report("lost", feed.destination, container=feed.document.id, lines=lines)
        self._forget(feed)
        if feed.until:
            await asyncio.to_thread(shutil.rmtree, feed.directory, ignore_errors=True)

    def _is_gone(self, feed: Feed) -> bool:
        """Its directory was removed, and the feed is forgotten; or it was just renamed."""
        if os.path.exists(feed.directory):
            return False
        if any(name.startswith(feed.document.id) for name in _listed(f"{self.logs}/{UNDELIVERED}")):
            self._scan()  # the monitor reports it soon
        else:
            self._forget(feed)
        return True

    def _forget(self, feed: Feed) -> None:
        feed.destination.remove(feed)
        del self.feeds[feed.document.id]
        self._close(feed)

    # --- questions of the daemon ------------------------------------------------------------------

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One line {"containers": [id…]} (null: all), one line of states by id."""
        try:
            wanted = msgspec.json.decode(await reader.readline(), type=_Question).containers
            self._look_now()  # the answer counts all lines that were written before the question
            names = list(self.feeds) if wanted is None else [name for name in wanted if name in self.feeds]
            deadline = time.monotonic() + COUNTING
            states = {name: await self._state(self.feeds[name], deadline) for name in names if name in self.feeds}
            writer.write(msgspec.json.encode(states) + b"\n")
            await writer.drain()
        except (OSError, ValueError) as error:  # msgspec's are ValueErrors
            _log.error("a question of the daemon: %s", describe(error))
        finally:
            writer.close()

    async def _state(self, feed: Feed, deadline: float) -> dict[str, object]:
        acked, dropped = feed.acked, feed.dropped_lines
        waiting: tuple[int, int | None] = (0, 0)
        if feed.written != acked.bytes or feed.slot < 0:
            waiting = await asyncio.to_thread(feed.waiting, acked, deadline)
        destination = feed.destination
        return {
            "driver": destination.driver,
            "address": destination.address,
            "error": destination.trouble(feed),
            "since": destination.since,
            "attempts": destination.attempts,
            "delivered": acked.lines - dropped,
            "waiting": waiting[1],
            "waiting_bytes": waiting[0],
            "dropped": dropped,
        }


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def main(arguments: list[str]) -> int:
    """Arguments: `--root DIR --run DIR`. Exit status 0: nothing is left to do."""
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    root, run = options.pop("--root", ""), options.pop("--run", "")
    if not root or not run or options:
        print("usage: python -m engine.shipper --root DIR --run DIR", file=sys.stderr)
        return 2
    log_format.configure("info", "%(asctime)s %(levelname)s %(message)s")
    os.makedirs(f"{run}/shipper", mode=0o700, exist_ok=True)
    lock = os.open(f"{run}/shipper/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another shipper serves {run}", file=sys.stderr)
        return BUSY
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    with open(f"{run}/shipper/version", "w") as file:
        file.write(__version__)
    with suppress(PermissionError):  # started by hand, as the leader of a group
        os.setsid()
    _raise_limits()
    try:
        return asyncio.run(_serve(root, run))
    except OSError as error:
        print(f"{run}: {words(error)}", file=sys.stderr)
        return 1


async def _serve(root: str, run: str) -> int:
    return await Shipper(root, run).serve()


def _raise_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
