"""One container's spool as the shipper reads it, and the position up to which the target has it.

A feed has two positions. `at` is where it reads next; `acked` is the position up to which the
target has acknowledged everything. A sender advances `at` by `format` or `take`, and `acked` by
`acknowledge`. After a lost connection `rollback` returns to `acked`, so lines are sent again rather
than lost.

The monitor writes and rotates the files (`_fast/logwriter`). In blocking mode it removes no file
that has unacknowledged entries. Otherwise a feed that lags more than its quota skips entries, or
finds that files are gone. Then it counts the lost lines and delivers one line that says so.

Not here: when there is something to read (`process.py`), where the messages go (`senders/`).

Owns:    the descriptor of the file that it reads, and `cursor`.
Threads: the event loop's. Reads are of the page cache, a block at a time.
Raises:  OSError when the spool or the cursor cannot be read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import msgspec

from engine import times
from engine._fast import wireform
from engine.logs import cursor
from engine.logs.cursor import Cursor
from engine.logs.deliveries import Delivery

if TYPE_CHECKING:
    from engine.shipper.destination import Destination

SPOOL = "spool.log"
CURSOR = "cursor"

BLOCK = 64 << 10
"""Bytes of one read, unless an entry is longer."""
LONGEST = 4 << 20
"""Bytes of the longest entry. More bytes without a newline are no entry."""
WALKS = 20
"""Attempts to list the files while rotation renames them."""

T = TypeVar("T")
State: TypeAlias = tuple[int, int, int, int]
"""Parts of long lines that a form has seen (`wireform.Form.state`)."""


class Position(NamedTuple):
    """A place in a spool: file and offset, and what precedes it since the spool began."""

    inode: int = 0
    offset: int = 0
    bytes: int = 0
    lines: int = 0


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
        self.queued = False
        """It waits in its destination for its turn."""
        self.drained = False
        """Everything that was written before its last turn has been read."""
        self.written = 0
        """Bytes that the monitor has written since the spool began, while it writes."""
        self.dropped_lines = 0
        self.dropped_bytes = 0
        self.until = 0.0
        """Of a removed container: when to give up, by the clock of `time.time`. 0: never."""
        self._fd = -1
        self._sealed = False
        self._block = b""
        self._start = 0
        self._notice = b""
        self._cursor = os.open(f"{directory}/{CURSOR}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        known = cursor.decode(os.pread(self._cursor, cursor.SIZE, 0)) or Cursor()
        self.at = self.acked = Position(known.inode, known.offset, known.bytes, known.lines)
        self.dropped_lines, self.dropped_bytes = known.dropped_lines, known.dropped_bytes
        self._fresh = self._acked_state = self.form.state

    @property
    def name(self) -> str:
        """For messages."""
        return self.document.id[:12]

    @property
    def in_flight(self) -> bool:
        """Something has been read that the target has not acknowledged."""
        return self.at.bytes > self.acked.bytes

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
        if self._lags():
            self._skip()
        if self._notice:
            notice, self._notice = self._notice, b""
            return read(notice, 0)[0]
        while True:
            if self._start < len(self._block):
                found, consumed, count = read(self._block, self._start)
                if consumed:
                    self._start += consumed
                    self._pass(consumed, count)
                    return found
            if not self._read_on():
                if self._start == len(self._block):
                    self._block, self._start = b"", 0
                self.drained = True
                return None

    def _pass(self, size: int, lines: int = 0) -> None:
        inode, offset, done, count = self.at
        self.at = Position(inode, offset + size, done + size, count + lines)

    def _read_on(self) -> bool:
        """Read more into the block. False: there is no whole entry more."""
        if self._fd < 0 and not self._open():
            return False
        while True:
            rest = self._block[self._start :]
            if len(rest) >= LONGEST:
                self._pass(len(rest))
                rest = b""
            data = os.pread(self._fd, max(BLOCK, len(rest)), self.at.offset + len(rest))
            self._block, self._start = rest + data, 0
            if b"\n" in data:
                return True
            if not data and not self._next_file():
                return False

    def _next_file(self) -> bool:
        """At the end of a file. Returns True if there may be more, in this file or in the next
        one."""
        try:
            status = os.stat(f"{self.directory}/{SPOOL}")
        except FileNotFoundError:
            return False  # it is being rotated, or the container is removed
        if status.st_ino == self.at.inode:
            if status.st_size < self.at.offset:  # truncated by an operator
                self.at = self.at._replace(offset=0)
                self._block, self._start = b"", 0
                return status.st_size > 0
            return False
        if not self._sealed:
            self._sealed = True  # written between the last read and the rotation
            return True
        files = self._files(self.at.inode)
        if not files:
            return False
        found = any(inode == self.at.inode for inode, _, _ in files)
        newer = files[1:] if found else files
        if not newer:
            return False
        self._enter(newer, lost=not found)
        return True

    def _enter(self, files: Sequence[tuple[int, int, str]], *, lost: bool) -> None:
        """Continue at the beginning of the first of these files. `lost`: there was a file between
        it and the position, perhaps several."""
        inode, _, path = files[0]
        self._close_file()
        self._fd = _open(path)
        # renamed since it was listed: the next turn finds it
        if os.fstat(self._fd).st_ino != inode:
            self._close_file()
            return
        done = self.at.bytes + len(self._block) - self._start
        if lost and self.written:
            begins = self.written - sum(size for _, size, _ in files)
            if begins > done:
                self._count_lost(begins - done, None)
                done = begins
        self.at = Position(inode, 0, done, self.at.lines)
        self._block, self._start = b"", 0
        self._sealed = len(files) > 1

    def _open(self) -> bool:
        """Open the file of the position `at`; the oldest one if it does not exist. False: there is
        no file."""
        files = self._files(self.at.inode)
        if not files:
            return False
        inode, size, path = files[0]
        if inode != self.at.inode:
            # Before the first entry the inode is 0.
            self._enter(files, lost=self.at.inode != 0)
            return self._fd >= 0
        self._fd = _open(path)
        if os.fstat(self._fd).st_ino != inode:
            self._close_file()
            return False
        if size < self.at.offset:
            self.at = self.at._replace(offset=size)
        self._sealed = len(files) > 1
        return True

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
            self._skip()

    def _skip(self) -> None:
        """Go on three quarters of the quota before the end, and count the skipped lines."""
        target = self.written - self.document.quota * 3 // 4
        skipped = lines = 0
        while self.at.bytes < target:
            if self._start == len(self._block) and not self._read_on():
                break
            size = min(len(self._block) - self._start, max(0, target - self.at.bytes))
            end = self._block.find(b"\n", self._start + max(0, size - 1)) + 1
            if not end and not self._read_on():
                break
            if end:
                count = self._block.count(b"\n", self._start, end)
                size, self._start = end - self._start, end
                self._pass(size, count)
                skipped, lines = skipped + size, lines + count
        if skipped:
            self._count_lost(skipped, lines)
            self.form.state = self._fresh
            if not self.destination.has_marks(self):
                self.acknowledge(self.at)

    def _count_lost(self, size: int, lines: int | None) -> None:
        """`lines`: None if they cannot be counted, because their file is gone."""
        about = ""
        if lines is None:
            average = self.at.bytes / self.at.lines if self.at.lines else 200
            lines, about = max(1, round(size / average)), "about "
        self.dropped_lines += lines
        self.dropped_bytes += size
        self.at = self.at._replace(lines=self.at.lines + (lines if about else 0))
        text = f"{about}{lines} lines of this container were lost before this one: its target is too slow\n"
        entry = {"log": text, "stream": "stderr", "time": times.rfc3339(time.time_ns() | 1)}
        self._notice = msgspec.json.encode(entry) + b"\n"
        self.destination.owner.lost(self, lines)

    # --- acknowledged -----------------------------------------------------------------------------

    def mark(self) -> tuple[Position, State]:
        """What `acknowledge` needs when the target has everything that was read so far."""
        return self.at, self.form.state

    def acknowledge(self, position: Position, state: State | None = None) -> None:
        """The target has everything before the position."""
        if position.bytes < self.acked.bytes or position == self.acked:
            return
        self.acked = position
        self._acked_state = state if state is not None else self.form.state
        self.destination.owner.acknowledged(self)

    def rollback(self, mark: tuple[Position, State] | None = None) -> None:
        """Read again from the acknowledged position, or from a `mark` after it."""
        position, state = mark if mark is not None else (self.acked, self._acked_state)
        self.drained = False
        if self.at == position:
            return
        if self.at.inode != position.inode:
            self._close_file()
        self.at = position
        self._block, self._start = b"", 0
        self._sealed = False
        self.form.state = state

    def save(self) -> None:
        """Write the acknowledged position to the cursor."""
        inode, offset, done, lines = self.acked
        known = Cursor(inode, offset, done, lines, self.dropped_lines, self.dropped_bytes)
        os.pwrite(self._cursor, cursor.encode(known), 0)

    def change(self, document: Delivery) -> None:
        """The container runs again, with other names, or with another target."""
        self.document = document
        self.form = self.destination.form(document)
        self._fresh = self._acked_state = self.form.state

    def rest(self) -> None:
        """Keep nothing in memory that was read ahead: the next turn may be far away, and many feeds
        may wait for theirs."""
        self._block, self._start = b"", 0

    def idle(self) -> None:
        """Everything is read: keep no file open that may have been rotated away."""
        if self.slot < 0:
            self._close_file()

    def waiting(self) -> tuple[int, int]:
        """Bytes and lines that are not acknowledged. Counts newlines: for threads."""
        size = lines = 0
        files = self._files(self.acked.inode)
        for inode, _, path in files:
            offset = self.acked.offset if inode == self.acked.inode else 0
            with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
                file.seek(offset)
                while data := file.read(1 << 20):
                    size += len(data)
                    lines += data.count(b"\n")
        return size, lines

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


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
