"""Log plugins: a FIFO for each container, from which the plugin reads entries (Docker's
documentation, "Docker log driver plugins").

A frame is a length of four bytes and a LogEntry in the encoding of Protocol Buffers. The daemon
makes the FIFOs and asks the plugin to read them (`containers/log_plugins.py`). It replaces the FIFO
of a plugin that has ended, because half a frame may have been read from it.

FIONREAD counts the bytes in a FIFO that have not been read. A line counts as delivered when it was
read, and the plugin has not closed the FIFO in the `GRACE` seconds after it.

Frames are written only while the FIFO has room for all of their bytes, so that a shipper that is
killed leaves no half of a frame behind, and the next one can go on with the same FIFO.

Owns:    a descriptor of each FIFO.
Threads: the event loop's. Writes do not block.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import select
import stat
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from engine._fast import wireform
from engine._fast.wireform import Form
from engine.logs.deliveries import Delivery, LogPlugin
from engine.shipper.destination import TURN, Destination, Mark, Owner, back_off, describe
from engine.shipper.feed import Entry, Feed

GRACE = 1.0
"""Seconds that a plugin may take to store what it has read. The lines of its last second are sent
again to the next one."""
LOOK = 0.05
"""Seconds between looks at what has been read, while something is on the way."""
LONGEST_PAUSE = 1.0
"""Seconds between attempts to open a FIFO, at most: this costs no more than a system call."""
PATIENCE = 5
"""Attempts to open a FIFO, in about a second, until that is an error: a plugin may open it some
time after it has agreed to.
"""
FINISH = 2.0
"""Seconds that plugins may take to read the last lines."""
PIPE = 1 << 20
"""Bytes of a FIFO: /proc/sys/fs/pipe-max-size, which is a limit for other users."""
PAGE = os.sysconf("SC_PAGE_SIZE")
"""Bytes of a part of a FIFO. A write fills whole parts."""

_SOURCES = (b"\x0a\x06stdout\x10", b"\x0a\x06stderr\x10")
"""Field 1 of an entry, and the tag of the time."""
_MASK = (1 << 64) - 1


# --- entries --------------------------------------------------------------------------------------


def frame(stream: int, at: int, line: bytes, part: tuple[str, int, bool] | None = None) -> bytes:
    """One entry. `stream`: 1 stdout, 2 stderr. `at`: nanoseconds since the epoch. `part`: of a line
    in several parts, the line's id, the number of this part from 1 on, and whether it is the last.
    """
    entry = _SOURCES[stream - 1] + _varint(at & _MASK)
    if line:
        entry += b"\x1a" + _varint(len(line)) + line
    if part is not None:
        name, ordinal, last = part
        data = (
            (b"\x08\x01" if last else b"") + b"\x12" + _varint(len(name)) + name.encode() + b"\x18" + _varint(ordinal)
        )
        entry += b"\x20\x01\x2a" + _varint(len(data)) + data
    return len(entry).to_bytes(4, "big") + entry


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def frames(feed: Feed, entries: Iterable[Entry]) -> list[bytes]:
    """Entries of a feed as frames. `feed.form.state` says which lines have begun (`wireform.Form`),
    and is set to what holds after them."""
    state = list(feed.form.state)
    found = []
    for stream, at, text, ended in entries:
        place = 2 * (stream - 1)
        part = None
        if not ended or state[place + 1]:
            began, ordinal = (state[place], state[place + 1] + 1) if state[place + 1] else (at, 1)
            part = (_part_id(feed, stream, began), ordinal, ended)
            state[place], state[place + 1] = (0, 0) if ended else (began, ordinal)
        found.append(frame(stream, at, text, part))
    feed.form.state = (state[0], state[1], state[2], state[3])
    return found


def _part_id(feed: Feed, stream: int, began: int) -> str:
    """The same for all parts of a line, also when they are sent again."""
    text = f"{feed.document.id} {stream} {began}"
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


# --- one FIFO -------------------------------------------------------------------------------------


class Pipe:
    """The writing end of a container's FIFO."""

    def __init__(self, path: str) -> None:
        """Raises OSError, also when no process has the FIFO open for reading."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise OSError(errno.ENOENT, "the plugin has not been asked to read this container's lines") from error
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise OSError(errno.ENXIO, "the plugin does not read this container's lines") from error
        self._path = path
        self._frames: deque[bytes] = deque()
        self._writes: deque[tuple[int, int]] = deque()
        """Where each write that is not read ends, and the parts of the FIFO that it takes at
        most."""
        self._used = 0
        self._written = 0
        self._recent: deque[tuple[float, int]] = deque()
        """When which number of bytes had been read."""
        self.queued = 0
        """Bytes of all frames so far."""
        self.settled = 0
        """Bytes that are delivered."""
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISFIFO(status.st_mode):
                raise OSError(errno.EINVAL, f"{path} is not a FIFO")
            self._inode = status.st_ino
            if fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ) < PIPE:
                with suppress(PermissionError):  # without the capability, beyond the limit
                    fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE)
            self._parts = fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ) // PAGE
            self._left = self._unread() > 0
        except BaseException:
            os.close(self._fd)
            raise
        self._poll = select.poll()
        self._poll.register(self._fd, 0)  # POLLERR is always reported

    def _unread(self) -> int:
        found: int = struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0\0\0\0"))[0]
        return found

    @property
    def over(self) -> bool:
        """No process reads this FIFO any more, or it was replaced or removed."""
        if self._poll.poll(0):
            return True
        try:
            return os.stat(self._path).st_ino != self._inode
        except FileNotFoundError:
            return True

    @property
    def blocked(self) -> bool:
        """Nothing more fits now."""
        return self._left or bool(self._frames)

    def push(self, more: Iterable[bytes]) -> None:
        """Write these frames when there is room. Raises OSError."""
        for each in more:
            self._frames.append(each)
            self.queued += len(each)
        self._flush()

    def look(self, now: float) -> None:
        """Find out what has been read, and write on. Raises OSError."""
        unread = self._unread()
        if self._left:  # an earlier shipper's: whether all of its parts are full is not known
            self._left = unread > 0
        if self._left:
            return
        read = self._written - unread
        while self._writes and self._writes[0][0] <= read:
            self._used -= self._writes.popleft()[1]
        if not self._recent or (self._recent[-1][1] < read and now - self._recent[-1][0] >= LOOK / 2):
            self._recent.append((now, read))
        while self._recent and self._recent[0][0] <= now - GRACE:
            self.settled = self._recent.popleft()[1]
        self._flush()

    def _flush(self) -> None:
        while self._frames and not self._left:
            room = (self._parts - self._used) * PAGE
            group = []
            while self._frames and len(self._frames[0]) <= room:
                group.append(self._frames.popleft())
                room -= len(group[-1])
            if not group:
                if self._used:
                    return
                group.append(self._frames.popleft())  # it is larger than the FIFO
            data = b"".join(group)
            size = 0
            with suppress(BlockingIOError):
                size = os.write(self._fd, data)
            self._written += size
            self._writes.append((self._written, -(-size // PAGE)))
            self._used += self._writes[-1][1]
            if size < len(data):
                self._frames.appendleft(data[size:])
                return

    def close(self) -> None:
        os.close(self._fd)


# --- the plugin -----------------------------------------------------------------------------------


class _Channel:
    """A feed's way to the plugin."""

    def __init__(self) -> None:
        self.pipe: Pipe | None = None
        self.marks: deque[Mark] = deque()
        self.parked = False
        """It has lines, for which there is no room or no FIFO now."""
        self.error = ""
        self.attempts = 0
        self.retry_at = 0.0

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
        self.marks.clear()


class Plugin(Destination):
    """A log plugin. A container whose FIFO is not read does not delay the others."""

    def __init__(self, owner: Owner, document: Delivery) -> None:
        super().__init__(owner, document)
        self._channels: dict[Feed, _Channel] = {}
        self._watched: set[Feed] = set()
        """Feeds that have something on the way, or are parked."""
        self._looked = 0.0

    def form(self, document: Delivery) -> Form:
        """Only its state is used: the messages are made here."""
        empty = (b"", b"")
        return Form(
            text=wireform.RAW, time=wireform.NO_TIME, frame=wireform.DATAGRAM, head=empty, middle=empty, tail=empty
        )

    def add(self, feed: Feed) -> None:
        self._channels[feed] = _Channel()
        super().add(feed)

    def remove(self, feed: Feed) -> None:
        super().remove(feed)
        self._watched.discard(feed)
        channel = self._channels.pop(feed, None)
        if channel is not None:
            channel.close()

    def trouble(self, feed: Feed) -> str:
        channel = self._channels.get(feed)
        return (channel.error if channel is not None else "") or self.error

    async def open(self) -> None:
        """Each FIFO is opened by itself."""

    async def close(self) -> None:
        self._watched.clear()
        for feed, channel in self._channels.items():
            channel.close()
            if channel.parked:
                channel.parked = False
                self.notify(feed)

    def _has_something(self) -> bool:
        """A FIFO is opened before there are lines: the plugin would find its end if the daemon
        ended first, which has it open too.
        """
        return bool(self._ready)

    async def pass_on(self) -> None:
        while True:
            feed = self.next_feed()
            now = time.monotonic()
            if feed is not None:
                self._act(feed, self._turn, now)
                await asyncio.sleep(0)
            if now - self._looked >= LOOK:
                self._looked = now
                for each in list(self._watched):
                    self._act(each, self._look, now)
            if feed is None:
                await self.wait(LOOK if self._watched else None)

    async def finish(self) -> None:
        for _ in range(round(FINISH / LOOK)):
            if not any(channel.marks for channel in self._channels.values()):
                break
            await asyncio.sleep(LOOK)

    def _act(self, feed: Feed, act: Callable[[Feed, _Channel, float], None], now: float) -> None:
        """A failure concerns this feed alone: it is read again from what is acknowledged."""
        channel = self._channels[feed]
        try:
            if channel.pipe is not None and channel.pipe.over:
                self._give_up(feed, channel)
            act(feed, channel, now)
        except BrokenPipeError:  # just now
            self._give_up(feed, channel)
        except OSError as error:
            self._give_up(feed, channel)
            channel.attempts += 1
            channel.retry_at = now + min(back_off(channel.attempts), LONGEST_PAUSE)
            if channel.attempts >= PATIENCE:
                channel.error = describe(error)
                if all(each.pipe is None for each in self._channels.values()):
                    self.failed(error)
        if channel.parked or channel.marks:
            self._watched.add(feed)
        else:
            self._watched.discard(feed)

    def _give_up(self, feed: Feed, channel: _Channel) -> None:
        """Of a FIFO: what is on the way is read again, and written to the next one."""
        channel.close()
        self._marked.pop(feed, None)
        if feed.in_flight:
            feed.rollback()
        channel.parked = feed.slot >= 0 or not feed.drained

    def _turn(self, feed: Feed, channel: _Channel, now: float) -> None:
        """Read lines of the feed, and write them."""
        channel.parked = True
        if channel.pipe is None:
            if feed.slot < 0 and not feed.peek():
                channel.parked = False
                return
            if now < channel.retry_at:
                return
            channel.pipe = Pipe(target_of(feed).fifo)
            channel.error = ""
        pipe = channel.pipe
        pipe.look(now)
        if pipe.blocked:
            return
        channel.parked = False
        entries = feed.take(TURN)
        if entries is None:
            feed.idle()
            return
        pipe.push(frames(feed, entries))
        self.sent(pipe.queued, feed)
        channel.marks.append(self._marks.pop())
        self.notify(feed)

    def _look(self, feed: Feed, channel: _Channel, now: float) -> None:
        """Settle what the plugin has read; go on with lines that wait."""
        pipe = channel.pipe
        if pipe is None:
            if now >= channel.retry_at:
                self.notify(feed)
            return
        pipe.look(now)
        while channel.marks and channel.marks[0].at <= pipe.settled:
            channel.attempts = 0
            self.settled(channel.marks.popleft())
        if channel.parked and not pipe.blocked:
            self.notify(feed)


def target_of(feed: Feed) -> LogPlugin:
    target = feed.document.target
    assert isinstance(target, LogPlugin)
    return target
