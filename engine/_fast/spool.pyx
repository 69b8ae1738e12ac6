# cython: language_level=3, cdivision=True
"""Logs whose rotated files are more than the last ones of a number: some are packed, and some must
stay until they are delivered.

`PackedLog` is a json-file log with packed files, PATH.2.gz in place of PATH.2. `Spool` is one of a
container whose output the shipper delivers to a remote log; it counts on the board (`board.pyx`)
what is written, and keeps what is not acknowledged.

Not here: writing to the live file (`logwriter.pyx`), packing itself, which the daemon does
(`packed.pyx`), and the delivery (`engine/shipper`).

Owns:    the names of the log's files: nothing else renames or removes them while it is open.
Threads: one at a time per object. Rotation runs with the GIL.
Raises:  OSError with the kernel's errno.
"""
import errno
import os
import stat
import time
import traceback
from collections import deque, namedtuple
from contextlib import suppress

from cpython.exc cimport PyErr_SetFromErrnoWithFilenameObject
from libc.stdint cimport int64_t, uint64_t
from posix.stat cimport fstat, struct_stat
from posix.unistd cimport close

from engine._fast.board cimport Board
from engine._fast.logwriter cimport LENIENCE, LogWriter
from engine._fast.packed cimport Label, read_label

cdef enum:
    # newest removed files whose inode numbers are not used again
    GONE = 32
    INODES = 48                         # tries to get another number

GONE_TIME = 10.0
"""Seconds for which their numbers are not used again. A cursor on the disk may be a second old."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Rotated = namedtuple("Rotated", "inode size packed")
"""A rotated file. `inode`, `size`: of the original, if it is packed."""


cdef class PackedLog(LogWriter):
    """A log whose rotated files may be packed. The daemon packs a file into another one, and
    `replace` gives that one its name.

    A position in a log is an inode number and an offset, and a packed file stands for its original.
    The kernel uses the numbers of removed files again, some file systems at once. So a new file
    does not get a number that a position may still have: that of a file that was removed or packed
    lately.

    Rotation renames all files before it removes one. So after a kill there is one file too many, or
    one number is free, which the next rotation sets right. A file that exists twice was just being
    replaced; the original counts.
    """

    def __cinit__(self, bytes path not None, int64_t max_size=0, int max_file=1, *, bytes attrs=b"", bint exact=False):
        cdef Label label
        self.skips = False
        self.gone = deque(maxlen=GONE)
        self.files = self.listed()
        first = next((each for each in self.files if each is not None), None)
        if self.last == 0 and first is not None and first.packed:
            # times of the live file go on from there
            file = os.open(self.name(self.files.index(first) + 1, True), _READ)
            try:
                if read_label(file, &label) == 1:
                    self.last = label.last
                else:
                    self.last = os.fstat(file).st_mtime_ns
            finally:
                os.close(file)

    cdef bytes name(self, Py_ssize_t number, bint packed):
        return b"%s.%d%s" % (self.path, number, b".gz" if packed else b"")

    cdef list listed(self):
        """Look at the rotated files."""
        cdef list found = []
        cdef int missing = 0
        cdef Label label
        while missing < 2:
            number = len(found) + 1
            try:
                status = os.lstat(self.name(number, False))
            except FileNotFoundError:
                pass
            else:
                with suppress(FileNotFoundError):
                    os.unlink(self.name(number, True))
                found.append(Rotated(status.st_ino, status.st_size, False))
                missing = 0
                continue
            try:
                file = os.open(self.name(number, True), _READ)
            except FileNotFoundError:
                found.append(None)
                missing += 1
                continue
            try:
                if read_label(file, &label) < 0:
                    PyErr_SetFromErrnoWithFilenameObject(OSError, self.name(number, True))
            finally:
                os.close(file)
            found.append(Rotated(label.inode, label.size, True))
            missing = 0
        del found[len(found) - missing :]
        return found

    cdef int rotate(self) noexcept nogil:
        """As `LogWriter.rotate`, with the rules of this class."""
        with gil:
            try:
                self.turn()
            except Exception as error:
                if not isinstance(error, OSError):
                    traceback.print_exc()
                self.limit = self.size + self.max_size // 8 + 4096
                return -1
            try:
                self.prune()
            except OSError:
                self.surplus = True     # tried again at the next rotation
        return 0

    cdef int turn(self) except -1:
        cdef struct_stat status
        cdef int fd = self.fd
        if fstat(fd, &status) == 0 and status.st_size < self.size:
            self.truncated(self.size - status.st_size)  # by an operator
            self.size = status.st_size
            if self.size + <int64_t>self.out_size <= self.limit:
                return 0
        if self.behind:
            if self.size < self.max_size + LENIENCE:
                self.limit = self.max_size + LENIENCE
                return 0
            self.leave_behind()
        fresh, inode = self.make()
        free = self.files.index(None) if None in self.files else len(self.files)
        old = None
        try:
            for index in range(free, 0, -1):
                packed = self.files[index - 1].packed
                os.rename(self.name(index, packed), self.name(index + 1, packed))
            with suppress(FileNotFoundError):           # an operator has removed it
                os.rename(self.path, self.name(1, False))
                old = Rotated(self.inode, self.size, False)
            try:
                os.rename(self.path + b".new", self.path)
            except OSError:
                if old is not None:
                    os.rename(self.name(1, False), self.path)
                raise
        except BaseException:
            os.close(fresh)
            with suppress(OSError):
                os.unlink(self.path + b".new")
            self.files = self.listed()
            raise
        del self.files[free : free + 1]
        self.files.insert(0, old)
        close(fd)
        self.fd, self.inode = fresh, inode
        self.size = 0
        self.limit = self.max_size
        self.torn = False
        self.behind = self.followed
        self.turns += self.compress
        return 0

    cdef tuple make(self):
        """(descriptor, inode) of an empty file PATH.new."""
        now = time.monotonic()
        taken = {inode for inode, at in self.gone if now - at < GONE_TIME}
        taken.update(self.pinned())
        held = []
        try:
            while True:
                file = os.open(self.path + b".new", _NEW, 0o640)
                status = os.fstat(file)
                if stat.S_ISREG(status.st_mode) and (status.st_ino not in taken or len(held) == INODES):
                    return file, status.st_ino
                # until another one has been made, so that it gets another number
                held.append(file)
                if len(held) > INODES:
                    raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(self.path + b".new"))
                os.unlink(self.path + b".new")
        finally:
            for file in held:
                os.close(file)

    cdef tuple pinned(self):
        """More numbers that no new file may have."""
        return ()

    cdef int prune(self) except -1:
        """Remove the oldest files, as far as there are too many or they are too large."""
        most = self.max_size * self.max_file + LENIENCE
        self.surplus = False
        while self.files:
            number = len(self.files)
            oldest = self.files[number - 1]
            if oldest is not None:
                large = number > 1 and sum(each.size for each in self.files if each is not None) > most
                if number < self.max_file and not large:
                    break
                if not self.removable(number):
                    self.surplus = True
                    break
                with suppress(FileNotFoundError):
                    os.unlink(self.name(number, oldest.packed))
                self.gone.append((oldest.inode, time.monotonic()))
            self.files.pop()
        return 0

    cdef bint removable(self, Py_ssize_t number) except -1:
        """True if the oldest file, which has that number, may be removed."""
        return True

    cdef bint acknowledged(self, Py_ssize_t number) except -1:
        """True if the file of that number, which is not packed, need not stay as it is."""
        return True

    cdef int truncated(self, int64_t lost) except -1:
        """An operator has removed bytes of the live file."""
        return 0

    def replace(self, uint64_t inode, bytes packed not None) -> bool:
        """The file `packed` is the rotated file `inode`, packed: it takes its place. Returns False,
        and removes it, if that file has been removed by rotation, is packed or must stay as it is.

        The inode number may be another file's by now, perhaps of the same size. So the time of
        modification must be the same too.
        """
        cdef Label label
        for number, each in enumerate(self.files, 1):
            if each is not None and each.inode == inode and not each.packed and self.acknowledged(number):
                file = os.open(packed, _READ)
                try:
                    same = (
                        read_label(file, &label) == 1 and (label.inode, label.size) == (inode, each.size)
                        and os.fstat(file).st_mtime_ns == os.lstat(self.name(number, False)).st_mtime_ns
                    )
                finally:
                    os.close(file)
                if not same:
                    break
                os.rename(packed, self.name(number, True))
                try:
                    os.unlink(self.name(number, False))
                except FileNotFoundError:
                    pass
                except OSError:
                    os.unlink(self.name(number, True))
                    raise
                self.files[number - 1] = each._replace(packed=True)
                self.gone.append((inode, time.monotonic()))
                return True
        with suppress(FileNotFoundError):
            os.unlink(packed)
        return False

    cdef Py_ssize_t entries_since(self, uint64_t inode, int64_t offset) except -1:
        cdef Py_ssize_t count = 0
        cdef Label label
        for number, each in enumerate([None, *self.files]):
            if number and each is None:
                continue
            if number == 0 or not each.packed:
                found, same = self.count_after(self.name(number, False) if number else self.path, inode, offset)
            else:
                # a file is packed long after its last entry: if it has the position, it is its end
                found, same = 0, each.inode == inode
                if not same:
                    file = os.open(self.name(number, True), _READ)
                    try:
                        if read_label(file, &label) == 1:
                            found = label.lines
                    finally:
                        os.close(file)
            count += found
            if same:
                break
        return count


cdef class Spool(PackedLog):
    """A log that the shipper delivers. `join` puts it on the board.

    The stream position of a byte is its number since the spool began, over all files. The shipper
    acknowledges positions (inode, offset, bytes, lines), where `bytes` is the stream position. The
    board has that of the spool's end; when a spool is opened, it follows from the newest
    acknowledged position and the sizes of the files after it. Rules for a position, which the
    shipper follows too:
    - Its file is the newest one with that inode number. The original of a packed file may have had
      the same.
    - Its file is unknown, since it has been removed: all files that are not packed are
      unacknowledged. When the spool is opened, their first byte gets the stream position `bytes`.
      Later the stream position of the end counts, so that what was removed counts as acknowledged.
    - Its offset is beyond the file's end, since an operator has truncated it: the whole file is
      unacknowledged. Its first byte has the stream position `bytes` - `offset`.
    Packed files are always acknowledged.

    A blocking spool is `full` when more than `quota` bytes are not acknowledged, until less than
    three quarters of it are. A file is removed when there are too many, and it is acknowledged. One
    that is not blocking also loses files that lie wholly more than `quota` bytes before its end.
    """

    def __cinit__(self, bytes path not None, int64_t max_size=0, int max_file=1, *, bytes attrs=b"", bint exact=False):
        self.slot = -1

    def join(self, Board board not None, str id not None, tuple acked not None, int64_t quota, bint blocking=True):
        """Open a slot of the board. `acked`: the newest known position (inode, offset, bytes,
        lines). Raises OSError."""
        inode, offset, position, lines = acked
        start = position
        after = 0
        if self.size == 0 and self.inode == inode and offset:
            # Either an operator has truncated the file, or it is another one, just made, with the
            # number of a removed one. Then the files before it are not acknowledged. So it is made
            # again.
            self.gone.append((inode, time.monotonic()))
            fd, fresh = self.make()
            try:
                os.rename(self.path + b".new", self.path)
            except BaseException:
                os.close(fd)
                raise
            close(self.fd)
            self.fd, self.inode = fd, fresh
        for each in [Rotated(self.inode, self.size, False), *self.files]:
            if each is None:
                continue
            if each.packed:
                break
            if each.inode == inode:
                start = position - offset
                after += each.size
                if offset > each.size:
                    acked = inode, 0, start, lines
                break
            after += each.size
        self.slot = board.open(id, acked, start + after)
        self.board = board
        self.id = id
        self.total = self.told = start + after
        self.told_entries = self.entries - self.dropped
        self.acked = acked[2]
        self.quota = quota
        self.blocking = blocking
        self.full = blocking and self.total - self.acked > quota
        try:
            self.prune()
        except OSError:
            self.surplus = True
        self.waits = self.full or self.surplus

    def move(self, Board board not None) -> None:
        """Go on with another board, because the first one has been removed. Raises OSError."""
        acked = self.board.last(self.id)
        self.slot = board.open(self.id, acked, self.told)
        self.board = board

    @property
    def unacked(self) -> int:
        """Bytes that are written and not acknowledged."""
        return self.board.unacked(self.slot) if self.board is not None else 0

    cdef void emit(self, int stream, const char *data, size_t size, bint newline) noexcept nogil:
        if not self.skip:
            self.entries += 1
        LogWriter.emit(self, stream, data, size, newline)

    cdef void flush(self, size_t upto) noexcept nogil:
        cdef int64_t before = self.size
        LogWriter.flush(self, upto)
        self.total += self.size - before

    cdef int finish(self) except -1:
        if self.board is not None:
            self.tell()
        return LogWriter.finish(self)

    cdef int tell(self) except -1:
        """Put on the board what was written since the last call."""
        cdef uint64_t entries = self.entries - self.dropped
        if self.total != self.told:
            self.board.wrote(self.slot, self.total - self.told, <int64_t>(entries - self.told_entries))
            self.told = self.total
            self.told_entries = entries
        if self.blocking and self.total - self.acked > self.quota:
            self.acked = self.board.acked(self.slot)
            self.full = self.full or self.total - self.acked > self.quota
        self.waits = self.full or self.surplus
        return 0

    cpdef bint look(self) except -1:
        cdef struct_stat status
        if self.board is None or self.fd < 0:
            self.full = self.waits = False
            return False
        if self.full:
            if fstat(self.fd, &status) == 0 and status.st_size < self.size:
                self.truncated(self.size - status.st_size)
                self.size = status.st_size
                self.tell()
            self.acked = self.board.acked(self.slot)
            self.full = self.total - self.acked >= max(self.quota - self.quota // 4, 1)
        if self.surplus:
            try:
                self.prune()
            except OSError:
                pass
        self.waits = self.full or self.surplus
        return self.waits

    cdef int truncated(self, int64_t lost) except -1:
        self.total -= lost
        return 0

    cdef int64_t end_of(self, Py_ssize_t number) except -1:
        """Stream position of the end of a rotated file."""
        cdef int64_t end = self.total - self.size
        for each in self.files[: number - 1]:
            if each is not None:
                end -= each.size
        return end

    cdef bint acknowledged(self, Py_ssize_t number) except -1:
        if self.board is None:
            return False
        self.acked = self.board.acked(self.slot)
        return self.acked >= self.end_of(number)

    cdef tuple pinned(self):
        last = self.board.last(self.id) if self.board is not None else None
        return () if last is None else (last[0],)

    cdef bint removable(self, Py_ssize_t number) except -1:
        if self.files[number - 1].packed or self.acknowledged(number):
            return True
        return self.board is not None and not self.blocking and self.total - self.end_of(number) > self.quota

    cpdef close(self):
        try:
            LogWriter.close(self)
        finally:
            if self.slot >= 0:
                self.board.close(self.slot)
                self.slot = -1
                self.board = None
