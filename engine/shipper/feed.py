"""One container's spool as the shipper reads it, and the position up to which the target has it.

A feed has two positions. `at` is where it reads next; `acked` is the position up to which the
target has acknowledged everything. A sender advances `at` by `format` or `take`, and `acked` by
`acknowledge`. After a lost connection `rollback` returns to `acked`, so lines are sent again rather
than lost.

The monitor writes and rotates the files (`_fast/logwriter`). In blocking mode it removes no file
that has unacknowledged entries. Otherwise a feed that lags more than its quota skips entries, or
finds that files are gone. Then it counts the lost lines and delivers one line that says so. The
count belongs to a position, like the numbers of bytes and lines: what is skipped again after a
rollback is not counted twice.

Both positions are between two lines. A line without an end is read again when there is more, since
the monitor removes what a failed write has left.

Not here: when there is something to read (`process.py`), where the messages go (`senders/`).

Owns:    the descriptor of the file that it reads, and `cursor`.
Threads: the event loop's. Reads are of the page cache, a block at a time.
Raises:  OSError when the cursor cannot be opened or written. A spool that cannot be read is logged,
         and read again later.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from engine._fast import wireform
from engine.common import times
from engine.errors import words
from engine.logs import cursor
from engine.logs.cursor import Cursor
from engine.logs.deliveries import Delivery

if TYPE_CHECKING:
    from engine.shipper.destination import Destination

_log = logging.getLogger(__name__)

SPOOL = "spool.log"
CURSOR = "cursor"

BLOCK = 64 << 10
"""Bytes of one read, unless an entry is longer."""
LONGEST = 4 << 20
"""Bytes of the longest entry. More bytes without a newline are no entry, and are passed over."""
WALKS = 20
"""Attempts to list or open the files while rotation renames them."""

T = TypeVar("T")


class Position(NamedTuple):
    """A place in a spool: file and offset, and what precedes it since the spool began."""

    inode: int = 0
    offset: int = 0
    bytes: int = 0
    lines: int = 0


class Lost(NamedTuple):
    """What was skipped since this process has opened the spool. `untold`: lines of which the target
    does not know yet; `estimated`: their file is gone, so that they cannot be counted."""

    lines: int = 0
    bytes: int = 0
    untold: int = 0
    estimated: bool = False


class State(NamedTuple):
    """What belongs to a position besides its numbers. `form`: parts of long lines that the form has
    seen."""

    form: wireform.State
    lost: Lost = Lost()
    turn: int = 0
    """Differs from the feed's if the file has been truncated since. Then the position is void."""


class Formed(NamedTuple):
    """Messages of one feed. `ends`: where each ends in `wire`, for datagrams."""

    wire: bytes
    messages: int
    ends: Sequence[int]


class Entry(NamedTuple):
    """A line, or a part of one: its stream (1 stdout, 2 stderr), time in nanoseconds since the
    epoch, text without the newline. Without `ended` the line continues in the stream's next
    entry."""

    stream: int
    time: int
    text: bytes
    ended: bool


class Feed:
    """A container's lines on their way to `destination`."""

    def __init__(self, directory: str, document: Delivery, destination: Destination) -> None:
        """Raises OSError when the cursor cannot be opened."""
        self.directory = directory
        self.document = document
        self.destination = destination
        self.form = destination.form(document)
        self.slot = -1
        """Its slot on the board; -1 when the monitor does not write this spool."""
        self.slot_lines = 0
        """Lines that were written since that slot was opened."""
        self.queued = False
        """It waits in its destination for its turn."""
        self.drained = False
        """Everything that was written before its last turn has been read."""
        self.broken = False
        """The spool could not be read the last time."""
        self.written = 0
        """Bytes that the monitor has written since the spool began; 0 if that is not known."""
        self.dropped_lines = 0
        self.dropped_bytes = 0
        """What the target never gets of what precedes `acked`."""
        self.until = 0.0
        """Of a removed container: when to give up, by the clock of `time.time`. 0: never."""
        self._fd = -1
        self._sealed = False
        """The file that is open grows no more."""
        self._block = b""
        self._start = 0
        self._lost = Lost()
        self._turn = 0
        """Times that the file of the position was found truncated."""
        self._cursor = os.open(f"{directory}/{CURSOR}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        known = cursor.decode(os.pread(self._cursor, cursor.SIZE, 0)) or Cursor()
        self.at = self.acked = Position(known.inode, known.offset, known.bytes, known.lines)
        self.dropped_lines, self.dropped_bytes = known.dropped_lines, known.dropped_bytes
        self._fresh = self.form.state
        self._acked_state = State(self._fresh)

    @property
    def name(self) -> str:
        """For messages."""
        return self.document.id[:12]

    @property
    def in_flight(self) -> bool:
        """Something has been read that the target has not acknowledged."""
        return self.at.bytes > self.acked.bytes or self._lost != self._acked_state.lost

    @property
    def delivered(self) -> bool:
        """Everything has been read, and the target has it."""
        return self.drained and not self.in_flight and not self._lost.untold

    # --- reading ----------------------------------------------------------------------------------

    def format(self, room: int) -> Formed | None:
        """Messages of about `room` bytes from the position `at`, which advances. They may be empty,
        when the driver sends nothing for these entries. None: everything written has been read."""

        def read(block: bytes, start: int) -> tuple[Formed, int, int]:
            wire, consumed, count, ends, messages = self.form.format(block, start, self.at.lines, room)
            return Formed(wire, messages, ends), consumed, count

        return self._advance(read)

    def take(self, room: int) -> list[Entry] | None:
        """Entries of about `room` bytes from the position `at`, which advances; None at the end."""

        def read(block: bytes, start: int) -> tuple[list[Entry], int, int]:
            found, consumed, count = wireform.entries(block, start, room)
            return [Entry(*each) for each in found], consumed, count

        return self._advance(read)

    def _advance(self, read: Callable[[bytes, int], tuple[T, int, int]]) -> T | None:
        try:
            found = self._read(read)
        except OSError as error:
            self._broke(error)
            return None
        self.broken = False
        return found

    def _broke(self, error: OSError) -> None:
        """This spool cannot be read now. The others of the destination go on."""
        if not self.broken:
            self.broken = True
            _log.error("%s: %s", self.directory, words(error))
        self._close_file()
        self._block, self._start = b"", 0

    def _read(self, read: Callable[[bytes, int], tuple[T, int, int]]) -> T | None:
        if self._lags():
            self._skip()
        passed = self.at.bytes
        while not self._lost.untold:
            if self._start < len(self._block):
                found, consumed, count = read(self._block, self._start)
                if consumed:
                    self._start += consumed
                    self._pass(consumed, count)
                    return found
            if not self._read_on() and not self._lost.untold:
                # only what is no entry: it is acknowledged like the others
                if self.at.bytes > passed:
                    return read(b"", 0)[0]
                self.drained = True
                return None
        return read(self._notice(), 0)[0]

    def peek(self) -> bool:
        """There is something to read."""
        try:
            more = self._start < len(self._block) or self._lost.untold > 0 or self._read_on()
        except OSError as error:
            self._broke(error)
            return False
        self.drained = not more
        return more

    def _pass(self, size: int, lines: int = 0) -> None:
        inode, offset, done, count = self.at
        self.at = Position(inode, offset + size, done + size, count + lines)

    def _read_on(self) -> bool:
        """Read more into the block. False: there is no whole line more."""
        if self._fd < 0 and not self._open():
            return False
        while True:
            rest = self._block[self._start :]
            if len(rest) < LONGEST:
                data = os.pread(self._fd, max(BLOCK, len(rest)), self.at.offset + len(rest))
                if b"\n" in data:
                    self._block, self._start = rest + data, 0
                    return True
                ahead = len(rest) + len(data)
            else:  # no entry
                data = b""
                ahead, end = self._line_end(self.at.offset + len(rest))
                if end:
                    self._block, self._start = b"", 0
                    self._pass(end - self.at.offset)
                    continue
            self._block, self._start = rest + data, 0
            if not data and not self._next_file(ahead):
                self._block, self._start = b"", 0
                return False

    def _line_end(self, offset: int) -> tuple[int, int]:
        """Bytes from the position `at` to the end of the file, and the offset behind the next
        newline from `offset` on; 0 if there is none."""
        while data := os.pread(self._fd, LONGEST, offset):
            if (found := data.find(b"\n")) >= 0:
                return 0, offset + found + 1
            offset += len(data)
        return offset - self.at.offset, 0

    def _next_file(self, ahead: int) -> bool:
        """At the end of a file, with `ahead` bytes behind the position that are no line yet.
        Returns True if there may be more, in this file or in the next one."""
        for _ in range(WALKS):
            try:
                status = os.stat(f"{self.directory}/{SPOOL}")
            except FileNotFoundError:
                return False  # it is being rotated, or the container is removed
            if status.st_ino == self.at.inode:
                if status.st_size < self.at.offset:
                    self._truncated()
                    return status.st_size > 0
                return False
            if not self._sealed:
                # there may be more, written between the last read and the rotation
                self._sealed = True
                return True
            files = self._files(self.at.inode)
            found = any(inode == self.at.inode for inode, _, _ in files)
            newer = files[1:] if found else files
            if not newer:
                return False
            if self._enter(newer, ahead, lost=not found):
                return True
        return False

    def _enter(self, files: Sequence[tuple[int, int, str]], ahead: int, *, lost: bool) -> bool:
        """Continue at the beginning of the first of these files. `ahead`: bytes at the end of the
        file before it that are no line. `lost`: there was a file between it and the position,
        perhaps several. Returns False if it has been renamed since it was listed."""
        inode, _, path = files[0]
        opened = _open(path, inode)
        if opened < 0:
            return False
        self._close_file()
        self._fd = opened
        self._block, self._start = b"", 0
        self._sealed = len(files) > 1
        self.at = Position(inode, 0, self.at.bytes + ahead, self.at.lines)
        if lost and self.written:
            begins = self.written - sum(size for _, size, _ in files)
            if begins > self.at.bytes:
                self._lose(begins - self.at.bytes, None)
        return True

    def _open(self) -> bool:
        """Open the file of the position `at`; the oldest one if it does not exist. False: there is
        no file."""
        for _ in range(WALKS):
            files = self._files(self.at.inode)
            if not files:
                return False
            inode, size, path = files[0]
            if inode == self.at.inode:
                opened = _open(path, inode)
                if opened >= 0:
                    if self.at.offset > size or not self._ends_line(opened):
                        self._truncated()
                    self._fd = opened
                    self._sealed = len(files) > 1
                    return True
            # Before the first entry the inode is 0.
            elif self._enter(files, 0, lost=self.at.inode != 0):
                return True
        return False

    def _truncated(self) -> None:
        """An operator has truncated the file of the position: all that it has now is new. The
        monitor counts bytes in the same way (`_fast/spool`)."""
        inode, offset, done, lines = self.at
        self._turn += 1
        self._block, self._start = b"", 0
        self.at = Position(inode, 0, max(0, done - offset), lines)
        if self.acked.inode == inode:
            self.acked = self.at
            self._acked_state = self._acked_state._replace(turn=self._turn)
            self.destination.owner.acknowledged(self)

    def _ends_line(self, fd: int) -> bool:
        """The position `at` is behind a newline of this file, or at its beginning."""
        return self.at.offset == 0 or os.pread(fd, 1, self.at.offset - 1) == b"\n"

    def _files(self, known: int) -> list[tuple[int, int, str]]:
        """(inode, size, path) of the files from inode `known` on, oldest first; all files if it
        does not exist. Compressed files are not listed: their entries are acknowledged.

        Listed from newest to oldest, against the direction in which they are renamed, so that a
        file that is renamed meanwhile is found twice rather than missed. Repeated when the live
        file changes meanwhile.
        """
        live = f"{self.directory}/{SPOOL}"
        found: list[tuple[int, int, str]] = []
        for _ in range(WALKS):
            found.clear()
            number, missing, before = 0, 0, _inode(live)
            while missing < 2:  # one number may be missing during a rotation
                path = f"{live}.{number}" if number else live
                number += 1
                try:
                    status = os.stat(path)
                except FileNotFoundError:
                    missing += 1
                    continue
                missing = 0
                if not any(status.st_ino == inode for inode, _, _ in found):
                    found.append((status.st_ino, status.st_size, path))
                if status.st_ino == known:
                    break
            if _inode(live) == before:
                break
        found.reverse()
        return found

    # --- lines that are lost ----------------------------------------------------------------------

    def _lags(self) -> bool:
        document = self.document
        return not document.blocking and 0 < document.quota < self.written - self.at.bytes

    def limit_lag(self) -> None:
        """In non-blocking mode skip what exceeds the quota, also while the target is away."""
        if self._lags():
            try:
                self._skip()
            except OSError as error:
                self._broke(error)

    def _skip(self) -> None:
        """Go on three quarters of the quota before the end, and count the skipped lines."""
        target = self.written - self.document.quota * 3 // 4
        size = lines = 0
        while self.at.bytes < target:
            wanted = self._start + target - self.at.bytes
            # the line that reaches the target, or else all lines of the block
            end = self._block.find(b"\n", wanted - 1) + 1 if wanted <= len(self._block) else 0
            end = end or self._block.rfind(b"\n", self._start) + 1
            if end:
                count = self._block.count(b"\n", self._start, end)
                self._pass(end - self._start, count)
                size, lines, self._start = size + end - self._start, lines + count, end
            elif not self._read_on():
                break
        if size:
            self._lose(size, lines)
            self.form.state = self._fresh
            if not self.destination.has_marks(self):
                self.acknowledge(*self.mark())

    def _lose(self, size: int, lines: int | None) -> None:
        """`lines`: the position has passed them; None if they cannot be counted, because their
        file is gone. Then the position passes them here."""
        lost = self._lost
        estimated = lines is None
        if lines is None:
            average = self.at.bytes / self.at.lines if self.at.lines else 200
            lines = max(1, round(size / average))
            self.at = self.at._replace(bytes=self.at.bytes + size, lines=self.at.lines + lines)
        self._lost = Lost(lost.lines + lines, lost.bytes + size, lost.untold + lines, lost.estimated or estimated)
        self.destination.owner.lost(self, lines)

    def _notice(self) -> bytes:
        """An entry that says which lines are missing before the next one."""
        about = "about " if self._lost.estimated else ""
        text = f"{about}{self._lost.untold} lines of this container were lost before this one: its target is too slow\n"
        self._lost = self._lost._replace(untold=0, estimated=False)
        entry = {"log": text, "stream": "stderr", "time": times.rfc3339(time.time_ns() | 1)}
        return msgspec.json.encode(entry) + b"\n"

    # --- acknowledged -----------------------------------------------------------------------------

    def mark(self) -> tuple[Position, State]:
        """What `acknowledge` needs when the target has everything that was read so far."""
        return self.at, State(self.form.state, self._lost, self._turn)

    def acknowledge(self, position: Position, state: State) -> None:
        """The target has everything before the position."""
        before = self._acked_state
        void = state.turn != self._turn or position.bytes < self.acked.bytes
        if void or (position == self.acked and state == before):
            return
        self.acked, self._acked_state = position, state
        self.dropped_lines += state.lost.lines - before.lost.lines
        self.dropped_bytes += state.lost.bytes - before.lost.bytes
        self.destination.owner.acknowledged(self)

    def rollback(self, mark: tuple[Position, State] | None = None) -> None:
        """Read again from the acknowledged position, or from a `mark` after it."""
        position, state = mark if mark is not None else (self.acked, self._acked_state)
        self.drained = False
        self._lost = state.lost
        if self.at == position:
            return
        if self.at.inode != position.inode:
            self._close_file()
        self.at = position
        self._block, self._start = b"", 0
        self._sealed = False
        self.form.state = state.form

    def position(self) -> Cursor:
        """What the cursor should say now."""
        return Cursor(*self.acked, self.dropped_lines, self.dropped_bytes)

    def save(self, position: Cursor) -> None:
        """Write the cursor. For any thread, while the feed is not closed."""
        os.pwrite(self._cursor, cursor.encode(position), 0)

    def change(self, document: Delivery) -> None:
        """The container runs again, with other names, or with another target."""
        self.document = document
        self.form = self.destination.form(document)
        self._fresh = self.form.state
        self._acked_state = self._acked_state._replace(form=self._fresh)

    def rest(self) -> None:
        """Keep nothing in memory that was read ahead: the next turn may be far away, and many feeds
        may wait for theirs."""
        self._block, self._start = b"", 0

    def idle(self) -> None:
        """Everything is read: keep no file open that may have been rotated away."""
        if self.slot < 0:
            self._close_file()

    def waiting(self, acked: Position, deadline: float = math.inf) -> tuple[int, int | None]:
        """Bytes and lines after the position `acked`, which may change meanwhile. Counts newlines,
        so it is for threads. The lines are None if that was not done by `deadline`, a time of
        `time.monotonic`.
        """
        size, lines = 0, 0
        counted = True
        for inode, _, path in self._files(acked.inode):
            offset = acked.offset if inode == acked.inode else 0
            with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
                end = os.fstat(file.fileno()).st_size
                size += max(0, end - offset)
                while counted and offset < end:
                    counted = time.monotonic() < deadline
                    data = os.pread(file.fileno(), min(1 << 20, end - offset), offset)
                    if not data:
                        break
                    lines += data.count(b"\n")
                    offset += len(data)
        return size, lines if counted else None

    def close(self) -> None:
        """Idempotent."""
        self._close_file()
        if self._cursor >= 0:
            os.close(self._cursor)
            self._cursor = -1

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._sealed = False


def _open(path: str, inode: int) -> int:
    """A descriptor of that file; -1 if it has another name meanwhile."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return -1
    if os.fstat(opened).st_ino == inode:
        return opened
    os.close(opened)
    return -1


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
