# cython: language_level=3
"""The daemon's side of a json-file log: reads it while the monitor writes and rotates it, and
while rotated files are packed (`packed.pyx`).

A packed file is decompressed piece by piece while it is read. An offset in it is one of its
original, and so is its inode number. Not here: the text form of an entry (`jsonentry.pyx`), waiting
for more (`containers/logs.py`).

Owns:    the descriptors of the files that it holds open.
Threads: one at a time per object, except `close`; the GIL is released around larger work. With
         `nowait` it can be the loop's: nothing waits for a disk then, and the work is bounded.
Raises:  OSError with the kernel's errno.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_SetFromErrnoWithFilenameObject
from cpython.ref cimport PyObject, Py_XDECREF
from libc.errno cimport EAGAIN, EINTR, EINVAL, ENOENT, errno
from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memmove
from posix.fcntl cimport O_CLOEXEC, O_RDONLY, open
from posix.stat cimport S_ISREG, fstat, stat, struct_stat
from posix.unistd cimport close

from engine._fast.frames cimport HEADER_SIZE, put_header
from engine._fast.jsonentry cimport (
    DISORDERED, ENTRY_MAX, SLICE, TIME_SIZE, Entry, last_newline, parse_any, parse_line, parse_own, probe, put_time,
    read_part, scan_back, unescape,
)
from engine._fast.linux cimport AT_FDCWD, O_NOATIME, O_NOFOLLOW, O_NONBLOCK, RESOLVE_CACHED, openat2
from engine._fast.packed cimport LABELLED, Label, Survey, read_label

import json
import os
from time import time_ns
from urllib.parse import quote_plus

from isal import igzip_lib

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
    PACKED_BLOCK = 64 << 10             # bytes of a packed file read at a time
    READY_BYTES = 256 << 10             # most bytes that are read with `nowait` …
    READY_FILES = 8                     # … and file names that are tried
    READY_TRIES = 3                     # a rename or mount elsewhere looks like a name to be read
    TRAILER = 8                         # bytes after the data of a gzip member: RFC 1952, 2.3.1


def _url_text(bytes attrs) -> bytes:
    """`key=value,…` of an entry's attributes, sorted and escaped as Docker's `details` shows them.
    Empty when they are malformed."""
    try:
        pairs = json.loads(attrs)
        return ",".join(f"{quote_plus(key)}={quote_plus(pairs[key])}" for key in sorted(pairs)).encode() + b" "
    except (ValueError, TypeError, RecursionError):
        return b" "


cdef class File:
    """An open file of the log. It is closed with the object."""

    cdef int fd
    cdef uint64_t inode                     # as positions name it: of the original, if it is packed
    cdef uint64_t own                       # of the file itself
    cdef bint packed
    cdef bint disordered                    # as the mode bit `DISORDERED`
    cdef Label label                        # of a packed file

    def __cinit__(self):
        self.fd = -1

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)

    cdef bint is_same(self, File other):
        """True if both have the same entries: `other` may have been packed since it was opened."""
        return self.own == other.own or (self.packed and not other.packed and self.inode == other.inode)


cdef File opened(bytes name, bint packed, bint nowait):
    """None if there is no such file. Raises OSError, also for a packed file with `nowait`."""
    cdef File file = File.__new__(File)
    cdef struct_stat status
    cdef int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK
    if nowait:
        for _ in range(READY_TRIES):
            # a read that updates the time of access may wait for the file system's journal
            file.fd = openat2(AT_FDCWD, <const char *>name, flags | O_NOATIME, RESOLVE_CACHED)
            if file.fd >= 0 or errno != EAGAIN:
                break
    else:
        file.fd = open(<const char *>name, flags)
    if file.fd < 0:
        if errno != ENOENT:
            PyErr_SetFromErrnoWithFilenameObject(OSError, name)
        return None
    if fstat(file.fd, &status) < 0:
        PyErr_SetFromErrnoWithFilenameObject(OSError, name)
    if not S_ISREG(status.st_mode):
        raise OSError(EINVAL, "not a regular file", os.fsdecode(name))
    file.inode = file.own = status.st_ino
    file.packed = packed
    file.disordered = (status.st_mode & DISORDERED) != 0
    if packed:
        if nowait:
            raise too_much(name)
        if read_label(file.fd, &file.label) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, name)
        file.inode = file.label.inode
    return file


cdef object too_much(bytes name):
    return BlockingIOError(EAGAIN, "it is too much to be read at once", os.fsdecode(name))


cdef class Unpacker:
    """Reads the original of a packed file from its beginning. Ends early where that is damaged.

    Checksums of labelled files are not compared: that would take away the last lines, and nothing
    else could be read instead.
    """

    cdef File file
    cdef int64_t at                         # bytes of the packed file that were read
    # decompresses the current member of the gzip file, or None
    cdef object stream
    # the member is the one with the label, whose header is skipped
    cdef bint raw
    cdef bytes rest                         # what was read beyond its end
    cdef bint ended

    def __cinit__(self, File file not None):
        self.file = file
        self.rest = b""
        if file.label.entries >= 0:
            self.raw = True
            self.at = LABELLED
            self.stream = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_DEFLATE)

    cdef ssize_t read(self, char *into, size_t size) except -1:
        """The next bytes, at most `size`; 0 at the end."""
        cdef bytes given, found
        while not self.ended:
            if self.stream is None:
                # zeros may follow a member: gzip(1)
                given = (self.rest or self.more()).lstrip(b"\0")
                if not given:
                    given = self.more().lstrip(b"\0")
                self.rest = given
                if not given:
                    break
                self.stream = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            given = b""
            if self.stream.needs_input:
                given, self.rest = self.rest or self.more(), b""
                if not given:
                    break                                       # it was cut
            try:
                found = self.stream.decompress(given, size)
            except igzip_lib.error:
                break
            if self.stream.eof:
                self.rest = self.stream.unused_data
                self.stream = None
                if self.raw:
                    self.raw = False
                    self.at += TRAILER - len(self.rest)
                    self.rest = b""
            if found:
                memcpy(into, PyBytes_AS_STRING(found), len(found))
                return len(found)
        self.ended = True
        self.stream = None
        self.rest = b""
        return 0

    cdef bytes more(self):
        cdef bytes data = os.pread(self.file.fd, PACKED_BLOCK, self.at)
        self.at += len(data)
        return data


cdef Survey survey(File file, int64_t limit, bint whole):
    """What a packed file has in the first `limit` bytes of its original; not `whole`: what it has
    up to the first entry, or in a few blocks without one."""
    cdef Survey found = Survey.__new__(Survey)
    cdef Unpacker unpacker = Unpacker.__new__(Unpacker, file)
    cdef char *buffer = <char *>malloc(BLOCK)
    cdef ssize_t got
    if buffer == NULL:
        raise MemoryError
    try:
        while found.found.size < limit:
            got = unpacker.read(buffer, BLOCK)
            if got == 0:
                break
            with nogil:
                found.feed(buffer, min(<int64_t>got, limit - found.found.size))
            if not whole and (found.found.entries or found.found.size > 2 * ENTRY_MAX):
                break
    finally:
        free(buffer)
    return found


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
    # Raise BlockingIOError, or another OSError, rather than wait or do much. The reader is useless
    # after that. Unset it when all is well: from then on its reads may wait.
    cdef public bint nowait
    cdef int64_t ready                      # bytes that may still be read with `nowait`
    cdef bint rotates                       # it may have other files than `path`
    cdef bint busy                          # a thread is inside `read`
    cdef bint closing                       # `close` was called during `read`, which then closes
    cdef int64_t budget                     # bytes that this `read` may still scan
    cdef bint wanted[3]                     # by stream
    cdef bint timestamps
    cdef bint framed
    cdef bint sliced[3]  # the stream's last entry is part of a line that continues in its next one
    cdef bint from_time
    cdef bint to_time
    cdef bint disordered                    # time stamps go back somewhere in the files
    cdef int64_t until_ns
    cdef char since[TIME_SIZE]
    cdef char until[TIME_SIZE]
    cdef bytes details
    cdef const char *details_text
    cdef size_t details_size
    cdef bint to_position
    cdef File until_file                    # the last one to be read, with `to_position`
    cdef int64_t until_offset
    cdef File file                          # being read, or None
    cdef int fd                             # of `file`, -1 when there is none
    cdef uint64_t inode                     # of `file`
    cdef int64_t offset                     # of buffer[start] in it
    cdef bint sealed                        # the file is known to be rotated, so its size is final
    cdef bint packed                        # `file` is
    cdef Unpacker unpacker                  # of a packed file that is being read
    cdef int64_t before                     # entries of a packed file that precede the tail
    cdef list newer                         # `File` objects of the files after it, oldest first
    cdef char *buffer
    cdef size_t room
    cdef size_t start                       # unread: buffer[start:end]
    cdef size_t end
    cdef bint skipping                      # inside a line that is too long for an entry
    cdef size_t refused  # room that the next entry needs and `refused` for lack of it

    def __cinit__(
        self, bytes path not None, *, bint stdout=True, bint stderr=True, int64_t since_ns=0, int64_t until_ns=0,
        bint timestamps=False, bint framed=False, bytes details=b"", tuple until_position=None,
        bint until_now=False, bint nowait=False, bint rotates=True,
    ):
        """`since_ns`, `until_ns`: both inclusive, 0 for none. `details`: a text that is put before
        each line, after the entry's own attributes. `until_position`: (inode, offset) from
        `LogWriter.position`; entries after it are not read. `until_now`: entries written from now
        on are not read. `nowait`: until that attribute is unset, only what is in the caches is
        read, and not more than READY_BYTES. `rotates`: False for a log that has one file only.
        """
        cdef File file
        self.fd = -1
        self.newer = []
        self.path = path
        self.nowait = nowait
        self.rotates = rotates
        self.ready = READY_BYTES
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
            self.until_ns = until_ns
            put_time(self.until, until_ns)
        self.newer = self.collect(None)
        self.disordered = any((<File>each).disordered for each in self.newer)
        if until_now and until_position is None and self.newer:
            file = self.newer[len(self.newer) - 1]
            # a line may be half written
            until_position = (file.inode, INT64_MAX if file.packed else self.high(file))
        if until_position is not None:
            self.to_position = True
            until_inode, self.until_offset = until_position
            while self.newer and (<File>self.newer[len(self.newer) - 1]).inode != until_inode:
                self.newer.pop()
            if self.newer:
                self.until_file = self.newer[len(self.newer) - 1]
            else:                                       # rotated away: all existing files are newer
                self.close()
        if self.newer:
            self.enter()
            if self.from_time:
                self.seek_since()

    def __dealloc__(self):
        free(self.buffer)

    cdef list collect(self, File known):
        """Open the files newer than `known` (None: all files), oldest first. `known` is held open,
        so that its own number cannot be reused.

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
            if self.nowait:
                raise too_much(self.path)
        return found

    cdef list walk(self, File known, bint last):
        """As `collect`. Returns None when the files were renamed meanwhile, or, in the `last`
        attempt, the files found so far."""
        cdef list found = []
        cdef int number = 0, missing = 0
        cdef uint64_t live = 0
        cdef File file
        # one number may be missing during a rotation
        while missing < 2 and (self.rotates or number == 0):
            if self.nowait and number == READY_FILES:
                raise too_much(self.path)
            name = self.path if number == 0 else b"%s.%d" % (self.path, number)
            file = opened(name, False, self.nowait)
            if file is None and number:                 # a file is packed before it is removed
                file = opened(name + b".gz", True, self.nowait)
            number += 1
            if file is None:
                missing += 1
                continue
            missing = 0
            if number == 1:
                live = file.own
            elif self.live_inode() != live:
                if last:
                    break
                return None
            if known is not None and file.is_same(known):
                break
            if not any(file.own == (<File>each).own for each in found):
                found.append(file)
        found.reverse()
        return found

    cdef int64_t *readiness(self) noexcept:
        """For functions of `jsonentry.pyx`."""
        return &self.ready if self.nowait else NULL

    cdef uint64_t live_inode(self) noexcept:
        """Inode at PATH; 0 when there is no file."""
        cdef struct_stat status
        return status.st_ino if stat(self.path, &status) == 0 else 0

    cdef int enter(self) except -1:
        """Continue with the next newer file of `newer`."""
        self.file = self.newer.pop(0)
        self.fd = self.file.fd
        self.inode = self.file.inode
        self.packed = self.file.packed
        self.unpacker = None
        self.offset = self.before = 0
        self.start = self.end = 0
        self.skipping = False
        # opened under a rotated name, hence after its last write
        self.sealed = self.packed or len(self.newer) > 0
        return 0

    cdef int keep_up(self) except -1:
        """Open the files newer than the newest known one, before rotation removes them."""
        cdef struct_stat status
        cdef int64_t held = 0
        cdef File newest = self.newer[len(self.newer) - 1] if self.newer else self.file
        if self.to_position or stat(self.path, &status) < 0:
            return 0
        if status.st_ino == newest.own or len(self.newer) >= HELD_FILES:
            return 0
        for each in self.newer:
            if fstat((<File>each).fd, &status) == 0:
                held += status.st_size
        if held < HELD_BYTES:
            self.newer += self.collect(newest)
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
        if self.to_position and self.file is self.until_file:
            return 0
        if not self.packed:
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
            self.newer = self.collect(self.file)
            if not self.newer:
                return 0
        self.enter()
        return 1

    cdef int64_t high(self, File file) except -1:
        """Limit up to which a file that is not packed may be read now: after its last whole line,
        and not beyond `until_position`."""
        cdef struct_stat status
        cdef int64_t size
        if fstat(file.fd, &status) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        size = last_newline(file.fd, min(<int64_t>status.st_size, self.limit(file)), self.readiness())
        if size < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        return size

    cdef int64_t limit(self, File file) noexcept:
        """Offset of `until_position` if it is in this file."""
        return self.until_offset if self.to_position and file is self.until_file else INT64_MAX

    cdef int seek_since(self) except -1:
        """Go to just before the first entry that is not older than `since`, by bisection over time,
        if entries are in order. A packed file is read from its beginning."""
        cdef int64_t low = 0, middle, found = 0, high
        cdef int64_t *ready = self.readiness()
        cdef int answer
        cdef char time[TIME_SIZE]
        if self.disordered:
            return 0
        while self.newer:
            if not self.begins(<File>self.newer[0], time) or memcmp(time, self.since, TIME_SIZE) > 0:
                break
            self.enter()
        if self.packed:
            return 0
        high = self.high(self.file)
        while high - low > BLOCK:
            middle = low + (high - low) // 2
            with nogil:
                answer = probe(self.fd, middle, high, &found, time, ready)
            if answer < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if answer == 0 or memcmp(time, self.since, TIME_SIZE) >= 0:
                high = middle
            else:
                low = found
        self.offset = low
        return 0

    cdef bint begins(self, File file, char *time) except -1:
        """Find the time of a file's first entry. Returns False if it has none. A packed file is
        decompressed for that only when it has no label, and no further than needed."""
        cdef int64_t found = 0, first
        cdef int answer
        if file.packed:
            first = file.label.first
            if file.label.entries < 0:
                first = survey(file, INT64_MAX, False).found.first
            if first > 0:
                put_time(time, first)
            return first > 0
        answer = probe(file.fd, 0, self.high(file), &found, time, self.readiness())
        if answer < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        return answer

    def seek_tail(self, ssize_t lines) -> None:
        """Continue with the last `lines` entries of both streams together, as Docker counts. Call
        before the first `read`.

        Reads backwards no further than needed. Partial entries count; lines that are not entries do
        not. Labels have the counts of packed files, so that none is decompressed here.
        """
        cdef ssize_t left = lines
        cdef int64_t found = 0, before = 0, low, high
        cdef int64_t *ready = self.readiness()
        cdef int index
        cdef File file = self.file
        cdef char time[TIME_SIZE]
        if lines < 0:
            raise ValueError("the tail of a log has 0 lines or more")
        if self.fd < 0:
            return
        index = len(self.newer)
        # index 0 is the file being read, the others are newer[index - 1]
        while True:
            if index:
                file = self.newer[index - 1]
            if file.packed:
                found = 0
                before = self.entries(file)
                if before >= left:
                    before -= left
                    left = 0
                else:
                    left -= before
                    before = 0
            else:
                low = 0 if index else self.offset
                high = max(low, self.high(file))
                with nogil:
                    found = scan_back(file.fd, low, high, &left, time, ready)
                if found < 0:
                    PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if left == 0 or index == 0:
                break
            index -= 1
            file = self.file
        for _ in range(index):
            self.enter()
        self.offset = found
        self.before = before if self.packed else 0
        self.start = self.end = 0

    cdef int64_t entries(self, File file) except -1:
        """Number of entries in a packed file, up to `until_position`."""
        cdef int64_t limit = self.limit(file)
        if file.label.entries >= 0 and limit >= file.label.size:
            return file.label.entries
        return survey(file, limit, True).found.entries

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
        self.budget = self.ready if self.nowait else PATIENCE
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
                    # newer entries are later than this
                    if self.disordered and self.to_time and time_ns() > self.until_ns:
                        self.done = True
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
        cdef int64_t *ready = &self.ready if self.nowait else NULL
        cdef bint own, last_file = self.to_position and self.file is self.until_file
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
                if self.packed:
                    got = self.unpack()
                else:
                    got = read_part(
                        self.fd, self.buffer + self.end, self.room - self.end, self.offset + <int64_t>self.end, ready
                    )
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
                if self.before:
                    if parse_line(line, size, &entry):
                        self.before -= 1
                    break
                if not own and not parse_any(line, line + size, &entry):
                    break
                if self.from_time and memcmp(entry.time, self.since, TIME_SIZE) < 0:
                    break
                if self.to_time and memcmp(entry.time, self.until, TIME_SIZE) > 0:
                    if self.disordered:                 # older ones may follow
                        break
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

    cdef ssize_t unpack(self) except -1 with gil:
        """Read more of a packed file into the buffer."""
        if self.unpacker is None:
            self.unpacker = Unpacker.__new__(Unpacker, self.file)
        return self.unpacker.read(self.buffer + self.end, self.room - self.end)

    cdef ssize_t put_attrs(self, char *into, Entry *entry) except -1 with gil:
        cdef bytes text = _url_text(entry.attrs[:entry.attrs_size])
        memcpy(into, PyBytes_AS_STRING(text), len(text))
        return len(text)

    def position(self) -> tuple:
        """(inode, offset) of the next byte that `read` reads; (0, 0) if there is no log yet."""
        return self.inode, self.offset

    def newest(self) -> int:
        """Inode of the newest file held open; 0 if there is none. Rotation loses none of the files
        up to it.
        """
        return (<File>self.newer[len(self.newer) - 1]).inode if self.newer else self.inode

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
        self.fd = -1
        self.file = self.until_file = None
        self.unpacker = None
        self.newer = []
        free(self.buffer)
        self.buffer = NULL
        self.start = self.end = 0
        return 0
