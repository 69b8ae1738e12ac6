# cython: language_level=3
"""The daemon's side of a json-file log: reads it while the monitor writes and rotates it.

Rotated files may be compressed (`packed.pyx`). They are decompressed while they are read, piece by
piece. A position in one is a position in its original.

Not here: the text form of an entry (`jsonentry.pyx`), waiting for more (`containers/logs.py`).

Owns:    the descriptors of the files that it holds open.
Threads: one at a time per object, except `close`; the GIL is released around larger work.
Raises:  OSError with the kernel's errno.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_SetFromErrnoWithFilenameObject
from cpython.ref cimport PyObject, Py_XDECREF
from libc.errno cimport EINTR, EINVAL, ENOENT, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memmove
from posix.fcntl cimport O_CLOEXEC, O_RDONLY, open
from posix.stat cimport S_ISREG, fstat, stat, struct_stat
from posix.unistd cimport close, pread

from engine._fast.frames cimport HEADER_SIZE, put_header
from engine._fast.jsonentry cimport (
    ENTRY_MAX, SLICE, TIME_SIZE, Entry, last_newline, parse_any, parse_line, parse_own, probe, put_time, scan_back,
    unescape,
)
from engine._fast.linux cimport O_NOFOLLOW, O_NONBLOCK
from engine._fast.packed cimport Label, Unpacker, read_label

import json
import os
from urllib.parse import quote_plus

cdef extern from "Python.h":
    # raw pointers, because the bytes object is filled without the GIL and then shrunk to its final
    # size
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *, Py_ssize_t) except NULL
    char *bytes_text "PyBytes_AS_STRING"(PyObject *) nogil
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1

cdef enum:
    PATIENCE = 32 << 20  # most bytes that one read() scans when all of them are filtered out
    BLOCK = 256 << 10                   # bytes read at a time
    HELD_FILES = 64  # most rotated files that a reader holds open ahead of its position
    HELD_BYTES = 64 << 20               # … and no more files once these hold so many bytes
    WALKS = 20                          # attempts to list the files while rotation renames them


def _url_text(bytes attrs) -> bytes:
    """`key=value,…` of an entry's attributes, sorted and escaped as Docker's `details` shows them.
    Empty when they are malformed."""
    try:
        pairs = json.loads(attrs)
        return ",".join(f"{quote_plus(key)}={quote_plus(pairs[key])}" for key in sorted(pairs)).encode() + b" "
    except (ValueError, TypeError, RecursionError):
        return b" "


cdef class Piece:
    """An open file of the log. It is closed with the object."""

    cdef int fd
    cdef uint64_t inode                     # of the original, if it is packed
    cdef bint packed
    cdef Label label                        # of a packed one

    def __cinit__(self):
        self.fd = -1

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)


cdef Piece open_piece(bytes name, bint packed):
    """None if there is no such file."""
    cdef Piece piece = Piece.__new__(Piece)
    cdef struct_stat status
    piece.fd = open(<const char *>name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)
    if piece.fd < 0:
        if errno != ENOENT:
            PyErr_SetFromErrnoWithFilenameObject(OSError, name)
        return None
    if fstat(piece.fd, &status) < 0:
        PyErr_SetFromErrnoWithFilenameObject(OSError, name)
    if not S_ISREG(status.st_mode):
        raise OSError(EINVAL, "not a regular file", os.fsdecode(name))
    piece.inode = status.st_ino
    piece.packed = packed
    if packed:
        if read_label(piece.fd, &piece.label) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, name)
        piece.inode = piece.label.inode
    return piece


cdef class LogReader:
    """Reads a container's log as a client requested it, while it is written and rotated.

    The files that exist when the object is created are held open, so that rotation loses none of
    them. Each `read` looks for newer files. Up to `HELD_FILES` and `HELD_BYTES` of those are held
    open too, because a reader may be slower than its writer for a while. The caller reports
    `newest` to the writer. Only complete lines are consumed; an incomplete one is read again later.
    Lines that are not entries are skipped. Memory is bounded by `BLOCK` (more for a longer entry)
    and is released at the end of the log, where followers wait. Files that the writer removed
    before the reader opened them are lost.
    """

    cdef readonly bytes path
    # True if no more entries follow: `until_ns` or `until_position` was reached, or it is closed
    cdef readonly bint done
    cdef readonly bint at_end  # the last `read` reached the end of the written entries, or `done`
    cdef bint busy                          # a thread is inside `read`
    cdef bint closing                       # `close` was called during `read`, which then closes
    cdef int64_t budget                     # bytes that this `read` may still scan
    cdef bint wanted[3]                     # by stream
    cdef bint timestamps
    cdef bint framed
    cdef bint sliced[3]  # the stream's last entry is part of a line that continues in its next one
    cdef bint from_time
    cdef bint to_time
    cdef char since[TIME_SIZE]
    cdef char until[TIME_SIZE]
    cdef bytes details
    cdef const char *details_text
    cdef size_t details_size
    cdef bint to_position
    cdef uint64_t until_inode
    cdef int64_t until_offset
    cdef Piece here                         # the file being read; None when there is none
    cdef int fd                             # its descriptor, or -1
    cdef uint64_t inode
    cdef int64_t offset                     # of buffer[start] in it
    cdef bint sealed                        # the file is known to be rotated, so its size is final
    cdef Unpacker unpacker                  # of the file being read; None if it is not packed
    cdef list newer                         # `Piece` of the files after it, oldest first
    cdef char *buffer
    cdef size_t room
    cdef size_t start                       # unread: buffer[start:end]
    cdef size_t end
    cdef bint skipping                      # inside a line that is too long for an entry
    cdef size_t refused  # room that the next entry needs and `refused` for lack of it

    def __cinit__(
        self, bytes path not None, *, bint stdout=True, bint stderr=True, int64_t since_ns=0, int64_t until_ns=0,
        bint timestamps=False, bint framed=False, bytes details=b"", tuple until_position=None,
        bint until_now=False,
    ):
        """`since_ns`, `until_ns`: both inclusive, 0 for none. `details`: a text that is put before
        each line, after the entry's own attributes. `until_position`: (inode, offset) from
        `LogWriter.position`; entries after it are not read. `until_now`: entries written from now
        on are not read.
        """
        cdef Piece piece
        self.fd = -1
        self.newer = []
        self.path = path
        self.wanted[1] = stdout
        self.wanted[2] = stderr
        self.timestamps = timestamps
        self.framed = framed
        self.details = details
        self.details_text = PyBytes_AS_STRING(details)
        self.details_size = len(details)
        if since_ns > 0:
            self.from_time = True
            put_time(self.since, since_ns)
        if until_ns > 0:
            self.to_time = True
            put_time(self.until, until_ns)
        self.newer = self.collect(None)
        if until_now and until_position is None and self.newer:
            piece = self.newer[len(self.newer) - 1]
            until_position = (piece.inode, self.high(piece))        # a line may be half written
        if until_position is not None:
            self.to_position = True
            self.until_inode, self.until_offset = until_position
            inodes = [(<Piece>each).inode for each in self.newer]
            if self.until_inode in inodes:
                del self.newer[inodes.index(self.until_inode) + 1 :]
            else:                                       # rotated away: all existing files are newer
                self.close()
        if self.newer:
            self.enter()
            if self.from_time:
                self.seek_since()

    def __dealloc__(self):
        free(self.buffer)

    cdef list collect(self, Piece known):
        """Open the files newer than `known`, oldest first; all files without it.

        Files are opened from newest to oldest, against the direction in which they are renamed. So
        a file that is renamed meanwhile is found twice rather than missed. If a new file appears
        meanwhile, a name may refer to a newer file than the name before it; then the listing is
        repeated. For a log that rotates all the time only its newest files are returned, in order.
        """
        cdef list found = None
        cdef int turn
        for turn in range(WALKS):
            found = self.walk(known, turn == WALKS - 1)
            if found is not None:
                break
        return found

    cdef list walk(self, Piece known, bint last):
        """As `collect`. Returns None when the files were renamed meanwhile, or, in the `last`
        attempt, the files found so far."""
        cdef list found = []
        cdef int number = 0, missing = 0
        cdef uint64_t live = 0
        cdef Piece piece
        while missing < 2:  # one number may be missing during a rotation
            name = self.path if number == 0 else b"%s.%d" % (self.path, number)
            piece = open_piece(name, False)
            if piece is None and number:
                # packing makes it before it removes the other
                piece = open_piece(name + b".gz", True)
            number += 1
            if piece is None:
                missing += 1
                continue
            missing = 0
            if number == 1:
                live = piece.inode
            elif self.live_inode() != live:
                if last:
                    break
                return None
            if known is not None and self.same(piece, known):
                break
            if not any(self.same(piece, each) for each in found):
                found.append(piece)
        found.reverse()
        return found

    cdef bint same(self, Piece one, Piece other) except -1:
        """True if two pieces have the same original.

        The inode number of a packed file's original may be used again. Two plain files are both
        open, so theirs differ. Otherwise the time of the first entry decides: no two entries of a
        log have the same.
        """
        cdef char first[TIME_SIZE]
        cdef char second[TIME_SIZE]
        if one.inode != other.inode:
            return False
        if one.packed and other.packed:
            return memcmp(&one.label, &other.label, sizeof(Label)) == 0
        if one.packed or other.packed:
            return (
                self.first_time(one, first) > 0 and self.first_time(other, second) > 0
                and memcmp(first, second, TIME_SIZE) == 0
            )
        return True

    cdef uint64_t live_inode(self) noexcept:
        """Inode at PATH; 0 when there is no file."""
        cdef struct_stat status
        return status.st_ino if stat(self.path, &status) == 0 else 0

    cdef int enter(self) except -1:
        """Continue with the next newer file of `newer`."""
        self.unpacker = None
        self.here = self.newer.pop(0)
        self.fd, self.inode = self.here.fd, self.here.inode
        if self.here.packed:
            self.unpacker = Unpacker(self.fd)
        self.offset = 0
        self.start = self.end = 0
        self.skipping = False
        # opened under a rotated name, hence after its last write
        self.sealed = self.here.packed or len(self.newer) > 0
        return 0

    cdef int keep_up(self) except -1:
        """Open the files newer than the newest known one, before rotation removes them."""
        cdef struct_stat status
        cdef int64_t held = 0
        cdef uint64_t newest = self.newest()
        if self.to_position or stat(self.path, &status) < 0 or status.st_ino == newest or len(self.newer) >= HELD_FILES:
            return 0
        for each in self.newer:
            if fstat((<Piece>each).fd, &status) == 0:
                held += status.st_size
        if held < HELD_BYTES:
            self.newer += self.collect(self.newer[len(self.newer) - 1] if self.newer else self.here)
        return 0

    cdef int leave(self) except -1:
        """Called at the end of the file being read. Returns 1 if there is more to read, in this
        file or in another one, else 0.
        """
        cdef struct_stat status
        cdef struct_stat live
        if self.fd < 0:
            self.newer = self.collect(None)
            if self.newer:
                self.enter()
                return 1
            return 0
        if self.to_position and self.inode == self.until_inode:
            return 0
        if self.unpacker is None:
            if fstat(self.fd, &status) < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if status.st_size < self.offset:            # truncated by an operator
                self.offset = 0
                return 1
        if not self.sealed:
            if stat(self.path, &live) < 0:
                if errno != ENOENT:
                    PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
                return 0                                # removed, or being rotated
            if live.st_ino == self.inode:
                return 0
            self.sealed = True  # first read what was written between the last read and the rotation
            return 1
        if not self.newer:
            self.newer = self.collect(self.here)
            if not self.newer:
                return 0
        self.enter()
        return 1

    cdef int64_t high(self, Piece piece) except -1:
        """Limit up to which the file may be read now: after its last whole line, and not beyond
        `until_position`."""
        cdef struct_stat status
        cdef int64_t size
        if fstat(piece.fd, &status) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        size = piece.label.size if piece.packed else status.st_size
        if self.to_position and piece.inode == self.until_inode:
            size = min(size, self.until_offset)
        if piece.packed:
            return size
        size = last_newline(piece.fd, size)
        if size < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        return size

    cdef int seek_since(self) except -1:
        """Go to just before the first entry that is not older than `since`, by bisection over time:
        entries are in order. A packed file is read from its beginning."""
        cdef int64_t low = 0, middle, found = 0, high
        cdef int answer
        cdef char time[TIME_SIZE]
        cdef Piece piece
        while self.newer:
            if not self.is_older():
                piece = self.newer[0]
                answer = self.first_time(piece, time)
                if answer == 0 or memcmp(time, self.since, TIME_SIZE) > 0:
                    break
            self.enter()
        if self.unpacker is not None:
            return 0
        high = self.high(self.here)
        while high - low > BLOCK:
            middle = low + (high - low) // 2
            with nogil:
                answer = probe(self.fd, middle, high, &found, time)
            if answer < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if answer == 0 or memcmp(time, self.since, TIME_SIZE) >= 0:
                high = middle
            else:
                low = found
        self.offset = low
        return 0

    cdef bint is_older(self) noexcept:
        """True if the label of the file being read says that its entries are older than
        `since`."""
        cdef char time[TIME_SIZE]
        if self.here is None or self.here.label.last <= 0:
            return False
        put_time(time, self.here.label.last)
        return memcmp(time, self.since, TIME_SIZE) < 0

    cdef int first_time(self, Piece piece, char *time) except -1:
        """The time of a file's first entry. Returns 0 if it has none."""
        cdef int64_t found = 0
        cdef int answer
        if piece.packed:
            if piece.label.first > 0:
                put_time(time, piece.label.first)
                return 1
            return 0 if piece.label.entries == 0 else self.unpack_entries(piece, 1, &found, time) > 0
        answer = probe(piece.fd, 0, self.high(piece), &found, time)
        if answer < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        return answer

    cdef ssize_t unpack_entries(self, Piece piece, ssize_t most, int64_t *after, char *time) except -1:
        """Read the first `most` entries of a packed file. Returns how many there are; `after` is
        the offset after the last of them, `time` is its time."""
        cdef Unpacker unpacker = Unpacker(piece.fd)
        cdef size_t room = ENTRY_MAX + BLOCK, used = 0
        cdef ssize_t got, count = 0
        cdef int64_t high = self.high(piece), at = 0
        cdef char *block = <char *>malloc(room + 32)
        cdef const char *line
        cdef const char *newline
        cdef bint skipping = False
        cdef Entry entry
        after[0] = 0
        if block == NULL:
            raise MemoryError
        try:
            while count < most:
                got = unpacker.read(block + used, BLOCK)
                if got == 0:
                    break
                used += got
                line = block
                with nogil:
                    while count < most:
                        newline = <const char *>memchr(line, c'\n', block + used - line)
                        if newline == NULL or at + (newline + 1 - block) > high:
                            break
                        if not skipping and parse_line(line, newline - line, &entry):
                            count += 1
                            after[0] = at + (newline + 1 - block)
                            memcpy(time, entry.time, TIME_SIZE)
                        skipping = False
                        line = newline + 1
                    at += line - block
                    used -= line - block
                    memmove(block, line, used)
                    if used >= ENTRY_MAX:
                        skipping = True
                        at += used
                        used = 0
        finally:
            free(block)
        return count

    def seek_tail(self, ssize_t lines) -> None:
        """Continue with the last `lines` entries of both streams together, as Docker counts. Call
        before the first `read`.

        Reads backwards no further than needed. Partial entries count; lines that are not entries do
        not. Of packed files only the one where the tail begins is decompressed, if the others have
        labels.
        """
        cdef ssize_t left = lines
        cdef int64_t found, low, high
        cdef int index
        cdef Piece piece
        cdef char time[TIME_SIZE]
        if lines < 0:
            raise ValueError("the tail of a log has 0 lines or more")
        if self.fd < 0:
            return
        index = len(self.newer)
        # index 0 is the file being read, the others are newer[index - 1]
        while True:
            piece = self.newer[index - 1] if index else self.here
            if piece.packed:
                found = self.tail_packed(piece, &left)
            else:
                low = 0 if index else self.offset
                high = max(low, self.high(piece))
                with nogil:
                    found = scan_back(piece.fd, low, high, &left, time)
                if found < 0:
                    PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if left == 0 or index == 0:
                break
            index -= 1
        for _ in range(index):
            self.enter()
        self.offset = found
        self.start = self.end = 0

    cdef int64_t tail_packed(self, Piece piece, ssize_t *wanted) except -1:
        """As `scan_back`, for a packed file."""
        cdef int64_t after = 0
        cdef ssize_t count
        cdef char time[TIME_SIZE]
        if wanted[0] == 0:
            return piece.label.size
        count = piece.label.entries
        if count < 0 or (self.to_position and piece.inode == self.until_inode):
            count = self.unpack_entries(piece, 1 << 62, &after, time)
        if count <= wanted[0]:
            wanted[0] -= count
            return 0
        self.unpack_entries(piece, count - wanted[0], &after, time)
        wanted[0] = 0
        return after

    def read(self, size_t max_bytes) -> bytes:
        """The next bytes, at most `max_bytes` (more only for one entry that is larger).

        Empty at the end (`at_end`), and also if the next 32 MiB of the log contain no requested
        entry, so that the caller can do other work.
        """
        if self.busy:
            raise RuntimeError("a log reader serves one thread at a time")
        if self.done:
            self.at_end = True
            return b""
        self.at_end = False
        self.busy = True
        self.budget = PATIENCE
        try:
            return self.fetch(max(max_bytes, <size_t>1))
        finally:
            self.busy = False
            if self.closing:
                self.release()

    cdef bytes fetch(self, size_t room):
        cdef PyObject *raw = NULL
        cdef size_t size = 0
        cdef bytes result
        if self.fd < 0 and not self.leave():
            self.at_end = True
            return b""
        self.keep_up()
        if self.buffer == NULL:
            self.buffer = <char *>malloc(BLOCK + 32)
            if self.buffer == NULL:
                raise MemoryError
            self.room = BLOCK
        raw = new_bytes(NULL, room + 32)                # 32: see unescape
        try:
            while True:
                with nogil:
                    size += self.take(<char *>bytes_text(raw) + size, room - size)
                if self.closing:
                    self.done = True
                if self.done:
                    self.at_end = True
                    break
                if self.refused:
                    if size:
                        break
                    room = self.refused
                    _PyBytes_Resize(&raw, room + 32)
                elif self.budget <= 0:
                    break
                elif not self.leave():
                    self.at_end = True
                    break
            _PyBytes_Resize(&raw, size)
            result = <bytes>raw
        finally:
            Py_XDECREF(raw)
        if self.at_end and self.start == self.end:      # release memory: a follower may wait long
            free(self.buffer)
            self.buffer = NULL
        return result

    cdef ssize_t take(self, char *into, size_t room) except -1 nogil:
        """Read and render entries until `into` is full (`refused`), the file ends, or `done`.
        Returns the bytes written."""
        cdef char *out = into
        cdef char *body
        cdef char *text
        cdef const char *line
        cdef const char *newline
        cdef size_t size, need
        cdef ssize_t got
        cdef char *grown
        cdef bint own, last_file = self.to_position and self.inode == self.until_inode
        cdef Entry entry
        self.refused = 0
        while True:
            if last_file and self.offset >= self.until_offset:
                self.done = True
                break
            line = self.buffer + self.start
            newline = <const char *>memchr(line, c'\n', self.end - self.start) if self.end > self.start else NULL
            if newline == NULL:
                if self.skipping:
                    self.offset += self.end - self.start
                    self.start = self.end
                if self.start:
                    memmove(self.buffer, self.buffer + self.start, self.end - self.start)
                    self.end -= self.start
                    self.start = 0
                if self.end == self.room:
                    if self.room >= ENTRY_MAX:
                        self.skipping = True
                        continue
                    grown = <char *>realloc(self.buffer, 2 * self.room + 32)
                    if grown == NULL:
                        with gil:
                            raise MemoryError
                    self.buffer = grown
                    self.room *= 2
                if self.closing or self.budget <= 0:
                    break
                if self.unpacker is not None:
                    with gil:
                        got = self.unpack(self.offset + <int64_t>self.end)
                else:
                    got = pread(self.fd, self.buffer + self.end, self.room - self.end, self.offset + <int64_t>self.end)
                if got < 0:
                    if errno == EINTR:
                        continue
                    with gil:
                        PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
                if got == 0:
                    self.end = 0  # an incomplete line is read again later
                    break
                self.end += got
                self.budget -= got
                continue
            size = newline - line
            own = not self.skipping and size < ENTRY_MAX and parse_own(line, size, &entry)
            # left by break; repeated once if the entry is not in this engine's own form
            while not self.skipping and size < ENTRY_MAX:
                if not own and not parse_any(line, line + size, &entry):
                    break
                if self.from_time and memcmp(entry.time, self.since, TIME_SIZE) < 0:
                    break
                if self.to_time and memcmp(entry.time, self.until, TIME_SIZE) > 0:
                    self.done = True
                    return out - into
                if not self.wanted[entry.stream]:
                    break
                need = entry.size + 8 + TIME_SIZE + 1 + self.details_size
                if entry.attrs != NULL and self.details_size:
                    need += 3 * entry.attrs_size
                if need > room - (out - into):
                    self.refused = need
                    return out - into
                body = out + HEADER_SIZE if self.framed else out
                text = body
                if not self.sliced[entry.stream]:
                    if self.timestamps:
                        memcpy(text, entry.time, TIME_SIZE)
                        text[TIME_SIZE] = c' '
                        text += TIME_SIZE + 1
                    if self.details_size:
                        if entry.attrs != NULL:
                            text += self.put_attrs(text, &entry)
                        else:
                            memcpy(text, self.details_text, self.details_size)
                            text += self.details_size
                grown = unescape(text, entry.log, entry.size)
                if grown == NULL:
                    if not own:
                        break
                    own = False
                    continue
                if grown > text:
                    self.sliced[entry.stream] = (grown - 1)[0] != c'\n' and grown - text > SLICE - 4
                    if self.framed:
                        put_header(<unsigned char *>out, entry.stream, <uint32_t>(grown - body))
                    out = grown
                break
            self.skipping = False
            self.start += size + 1
            self.offset += size + 1
        return out - into

    cdef ssize_t unpack(self, int64_t offset) except -1:
        """Read a packed file at that offset of its original into the rest of the buffer."""
        if self.unpacker.go_to(offset) != offset:
            return 0
        return self.unpacker.read(self.buffer + self.end, self.room - self.end)

    cdef ssize_t put_attrs(self, char *into, Entry *entry) except -1 with gil:
        cdef bytes text = _url_text(entry.attrs[:entry.attrs_size])
        memcpy(into, PyBytes_AS_STRING(text), len(text))
        return len(text)

    def position(self) -> tuple:
        """(inode, offset) of the next byte that `read` reads; (0, 0) if there is no log yet."""
        return self.inode, self.offset

    cpdef uint64_t newest(self):
        """Inode of the newest file held open; 0 if there is none. Rotation loses none of the files
        up to it.
        """
        return (<Piece>self.newer[len(self.newer) - 1]).inode if self.newer else self.inode

    def close(self) -> None:
        """Release the files; nothing more is read. Idempotent, and callable from any thread: a
        `read` that is running returns soon."""
        self.done = True
        if self.busy:
            self.closing = True
        else:
            self.release()

    cdef int release(self) except -1:
        self.done = True
        self.unpacker = None
        self.here = None
        self.fd = -1
        self.newer = []
        free(self.buffer)
        self.buffer = NULL
        self.start = self.end = 0
        return 0
