# cython: language_level=3, cdivision=True
"""The monitor's side of a json-file log: turns output into entries, writes them to files and
rotates the files.

The newest file is PATH, rotated ones are PATH.1, PATH.2, … by age. Not here: the text form of an
entry (`jsonentry.pyx`), reading (`logreader.pyx`), options of the driver (`engine/logs`).

Owns:    the descriptor of the live file. It is the only writer of its files. Readers need no
         contact with the writer, but a reader that must not lose entries to rotation registers
         (`LogWriter.follow`).
Threads: one at a time per object; the GIL is released around larger work.
Raises:  OSError with the kernel's errno, only once per run of failures, see `LogWriter`.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_SetFromErrnoWithFilenameObject
from libc.errno cimport EINTR, EINVAL, EIO, ENOENT, ENOMEM, errno
from libc.stdio cimport rename, snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcpy, memmove
from posix.fcntl cimport O_APPEND, O_CLOEXEC, O_CREAT, O_RDONLY, O_RDWR, O_TRUNC, open
from posix.stat cimport S_ISREG, fchmod, fstat, stat, struct_stat
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec
from posix.unistd cimport F_OK, access, close, ftruncate, unlink, write

from engine._fast.jsonentry cimport (
    DISORDERED, ENTRY_EXTRA, SLICE, last_newline, newest_time, put_entry, put_second, whole,
)
from engine._fast.linux cimport O_NOFOLLOW, O_NONBLOCK, close_own, memrchr
from engine._fast.sink cimport Sink

import os

cdef enum:
    PATH_ROOM = 4096 + 16
    OUT_FLUSH = 256 << 10               # formatted entries are written when they exceed this
    ATTRS_MAX = 32 << 10
    RELEASE = 32 << 10                  # bytes from which the GIL is released

# nanoseconds by which the clock may be set back while time stamps still increase
cdef int64_t LEAP = 3 * <int64_t>1000000000

# The buffer for formatted entries is needed only during a call, so all writers of the process share
# one. A call takes it away while it runs (the GIL is held then), so that a second thread would
# allocate its own.
cdef size_t OUT_ROOM = OUT_FLUSH + 6 * SLICE + ATTRS_MAX + ENTRY_EXTRA
cdef char *spare_out = NULL


cdef class LogWriter(Sink):
    """Appends a container's output to its log, and rotates it.

    Lines are assembled per stream, however the reads split them. Entries completed by a call are
    written before it returns, with one write(2) for each 256 KiB. Without followers, entries that
    rotation would remove within the same call are not written at all. A line of 16 KiB or more
    makes several entries, of which only the last ends in a newline; a UTF-8 character is never
    split. Time stamps strictly increase within the file set, also after the log is reopened and
    when the clock is set back by `LEAP` or less. If it is set back further, they go back too, and
    the live file gets the mode bit `DISORDERED`: readers must not search by time up to its end.
    While the file cannot get that bit, time stamps go on to increase.
    The last digit of a time stamp is never 0, so that Docker's form, which drops trailing zeros,
    always has nine digits too.

    When a write fails (ENOSPC, EIO, …) its entries are counted in `dropped`, and a partial entry
    that reached the file is removed from it. The first call that fails raises OSError, after it has
    consumed all its data. Later calls try again and raise nothing until one has succeeded. So a
    series of failures raises one exception; `error` is set during the series.

    Rotation is postponed until every follower is known to hold the live file, so that no follower
    is two files behind. Meanwhile the file grows beyond `max_size`. When it has grown by
    `LENIENCE`, rotation no longer waits for the late followers (`outrun`) until they report again,
    and they lose the entries that rotation removes. Files that grew this way are removed earlier.
    So the whole set exceeds its options by at most `LENIENCE`, plus as much in the live file. The
    writer never waits.

    On opening, bytes after the last newline are removed. They are the rest of a write during which
    the host crashed, and never were an entry. A reader that waits at this place reads it again.
    """

    def __cinit__(self, bytes path not None, int64_t max_size=0, int max_file=1, *, bytes attrs=b"", bint exact=False):
        """`max_size`: bytes at which the log rotates (0: never). `max_file`: files that are kept
        (1: rotation removes the old file). `attrs`: an encoded JSON object that each entry carries,
        or empty. `exact`: bytes that are not UTF-8 are kept, in a form that only `LogReader` knows.
        """
        self.fd = -1
        if not 0 < len(path) < 4096 or b"\0" in path:
            raise ValueError("the path of a log has 1 to 4095 bytes")
        if max_size < 0 or max_file < 1:
            raise ValueError("a log has a size of 0 or more and one file or more")
        if len(attrs) > ATTRS_MAX or b"\n" in attrs:
            raise ValueError(f"attributes take at most {ATTRS_MAX} bytes, on one line")
        self.path = path
        self.path_text = PyBytes_AS_STRING(path)
        self.max_size = self.limit = max_size
        self.max_file = max_file
        self.skips = max_file <= MAX_CUTS
        self.attrs = b',"attrs":' + attrs if attrs else b""
        self.attrs_text = PyBytes_AS_STRING(self.attrs)
        self.attrs_size = len(self.attrs)
        self.second = -1
        self.exact = exact
        self.followers = {}
        # O_NONBLOCK: the path may be another kind of file, which must not block the caller.
        self.fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0o640)
        if self.fd < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, path)
        self.repair()

    def __dealloc__(self):
        free(self.lines[0].data)
        free(self.lines[1].data)
        close_own(self.fd)

    cdef int repair(self) except -1:
        """Remove an incomplete last line, and find the newest time stamp."""
        cdef struct_stat status
        cdef int64_t whole_size, newest = -1
        cdef int older
        if fstat(self.fd, &status) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        if not S_ISREG(status.st_mode):
            raise OSError(EINVAL, "not a regular file", os.fsdecode(self.path))
        self.inode = status.st_ino
        self.size = status.st_size
        if self.size:
            whole_size = last_newline(self.fd, self.size, NULL)
            if whole_size < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if whole_size < self.size:
                if ftruncate(self.fd, whole_size) < 0:
                    PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
                self.size = whole_size
            newest = newest_time(self.fd, self.size)
        if newest < 0 and self.max_file > 1:
            older = open(self.path + b".1", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)
            if older >= 0:
                if fstat(older, &status) == 0 and S_ISREG(status.st_mode):
                    newest = newest_time(older, status.st_size)
                close(older)
        self.last = newest if newest > 0 else 0
        return 0

    cpdef write(self, int stream, data):
        """Take bytes of stream 1 (stdout) or 2 (stderr)."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len:
                self.write_raw(stream, <const char *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef int write_raw(self, int stream, const char *data, size_t size) except -1:
        """As `write`.

        Raises OSError as described for the class; the data is consumed in any case.
        """
        if stream != 1 and stream != 2:
            raise ValueError(f"no such output stream: {stream}")
        self.begin()
        if size >= RELEASE:
            with nogil:
                self.take(stream, data, size)
                self.settle()
        else:
            self.take(stream, data, size)
            self.settle()
        return self.finish()

    cpdef end(self, int stream=0):
        """Called when the stream (0: both) has ended. An unfinished line becomes an entry without a
        newline."""
        cdef int index
        cdef Line *line
        if stream < 0 or stream > 2:
            raise ValueError(f"no such output stream: {stream}")
        self.begin()
        for index in range(2):
            line = &self.lines[index]
            if line.size and (stream == 0 or stream == index + 1):
                self.emit(index + 1, line.data, line.size, False)
                line.size = 0
            if stream == 0 or stream == index + 1:
                free(line.data)
                line.data = NULL
                line.room = 0
        self.settle()
        self.finish()

    cdef int place(self, uint64_t *inode, int64_t *offset) except -1:
        inode[0] = self.inode
        offset[0] = self.size
        return 0

    cdef const char *unfinished(self, int stream, size_t *size) noexcept:
        size[0] = self.lines[stream - 1].size
        return self.lines[stream - 1].data

    cpdef resume(self, tuple lines, int stream, bytes chunk, uint64_t inode, int64_t offset):
        """As `Sink.resume`. Counts the entries of the chunk that the log already has, and skips
        them. The count is exact because the places where a line is split depend only on its bytes.
        """
        cdef Line *line
        cdef int index
        cdef bytes text
        for index in range(2):
            text = lines[index]
            line = &self.lines[index]
            if text:
                if len(text) >= SLICE or line.size:
                    raise ValueError("not an unfinished line, or one in the middle of another")
                free(line.data)
                line.data = <char *>malloc(SLICE)
                if line.data == NULL:
                    line.room = 0
                    raise MemoryError
                line.room = SLICE
                line.size = len(text)
                memcpy(line.data, PyBytes_AS_STRING(text), line.size)
        if chunk:
            self.skip = self.entries_since(inode, offset)
            try:
                self.write_raw(stream, PyBytes_AS_STRING(chunk), len(chunk))
            finally:
                self.skip = 0

    cdef Py_ssize_t entries_since(self, uint64_t inode, int64_t offset) except -1:
        """Number of entries after that position; all entries if its file has been removed by
        rotation."""
        cdef Py_ssize_t count = 0
        for number in range(self.max_file):
            name = self.path if number == 0 else b"%s.%d" % (self.path, number)
            try:
                found, same = self.count_after(name, inode, offset)
            except FileNotFoundError:
                break
            count += found
            if same:
                break
        return count

    cdef tuple count_after(self, bytes name, uint64_t inode, int64_t offset):
        """Number of newlines in a file, after `offset` if it has that `inode`; and whether it
        has."""
        cdef Py_ssize_t count = 0
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            same = os.fstat(file).st_ino == inode
            at = offset if same else 0
            while part := os.pread(file, 1 << 20, at):
                count += part.count(b"\n")
                at += len(part)
        finally:
            os.close(file)
        return count, same

    cpdef position(self):
        """(inode, offset) of the end of the last entry: equals `LogReader.position` after reading
        it."""
        cdef struct_stat status
        if self.fd < 0:
            raise ValueError("the log is closed")
        # fstat(2), because an operator may truncate a log that is being written
        if fstat(self.fd, &status) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        return self.inode, status.st_size

    cpdef pending(self, int stream):
        """The unfinished line so far (a prompt, for example), which is not an entry yet."""
        if stream != 1 and stream != 2:
            raise ValueError(f"no such output stream: {stream}")
        return PyBytes_FromStringAndSize(self.lines[stream - 1].data, self.lines[stream - 1].size)

    cpdef close(self):
        """End both streams and release the file. Idempotent."""
        cdef int fd
        if self.fd < 0:
            return
        try:
            self.end()
        finally:
            fd = self.fd
            self.fd = -1
            close(fd)

    cpdef follow(self, uint64_t number, uint64_t inode):
        """The reader `number` (chosen by the caller) holds the files open up to the one with
        `inode`, 0 for none. Rotation waits until it holds the live one."""
        self.followers[number] = inode
        self.count()

    cpdef unfollow(self, uint64_t number):
        """That reader has finished. An unknown number is no error."""
        self.followers.pop(number, None)
        self.count()

    cdef int count(self) except -1:
        self.followed = len(self.followers)
        self.behind = 0
        for inode in self.followers.values():
            self.behind += inode != self.inode
        if not self.behind:
            self.limit = self.max_size
        return 0

    cdef int leave_behind(self) except -1:
        """Stop waiting for the followers that do not hold the live file."""
        self.outrun += self.behind
        self.followers = {number: inode for number, inode in self.followers.items() if inode == self.inode}
        return self.count()

    cdef int begin(self) except -1:
        global spare_out
        cdef timespec now
        cdef int64_t now_ns
        if self.fd < 0:
            raise ValueError("the log is closed")
        if self.out != NULL:
            raise RuntimeError("a log writer serves one thread at a time")
        self.out = spare_out
        spare_out = NULL
        if self.out == NULL:
            self.out = <char *>malloc(OUT_ROOM)
            if self.out == NULL:
                raise MemoryError
        self.out_size = 0
        self.turned = False
        clock_gettime(CLOCK_REALTIME, &now)
        now_ns = <int64_t>now.tv_sec * 1000000000 + now.tv_nsec
        if now_ns - 1 > self.last:
            self.last = now_ns - 1
        elif self.last - now_ns > LEAP and self.mark():  # the clock was ahead
            self.last = now_ns - 1
        return 0

    cdef bint mark(self) noexcept:
        """Note at the live file that time stamps go back at its end. Returns True if it is noted.

        Otherwise they must not go back yet: a search by time would miss entries.
        """
        cdef struct_stat status
        return fstat(self.fd, &status) == 0 and fchmod(self.fd, (status.st_mode & 0o7777) | DISORDERED) == 0

    cdef int finish(self) except -1:
        global spare_out
        cdef int before = self.error
        if spare_out == NULL:
            spare_out = self.out
        else:
            free(self.out)
        self.out = NULL
        self.error = self.fault
        if self.fault and not before:
            raise OSError(self.fault, os.strerror(self.fault), os.fsdecode(self.path))
        return 0

    cdef void take(self, int stream, const char *data, size_t size) noexcept nogil:
        """Cut `data` into entries; keep the rest of the last line."""
        cdef Line *line = &self.lines[stream - 1]
        cdef const char *at = data
        cdef const char *end = data + size
        cdef const char *newline
        cdef char *grown
        cdef size_t part, cut
        while at < end:
            part = min(<size_t>(end - at), SLICE - line.size)
            newline = <const char *>memchr(at, c'\n', part)
            if line.size == 0:
                if newline != NULL:
                    self.emit(stream, at, newline - at, True)
                    at = newline + 1
                    continue
                if part == SLICE:
                    cut = whole(at, part)
                    self.emit(stream, at, cut, False)
                    at += cut
                    continue
            if newline != NULL:
                part = newline - at
            if line.size + part > line.room:
                cut = line.room if line.room else 256
                while cut < line.size + part:
                    cut *= 2
                grown = <char *>realloc(line.data, cut)
                if grown == NULL:
                    self.fault = ENOMEM
                    self.dropped += 1
                    return
                line.data = grown
                line.room = cut
            memcpy(line.data + line.size, at, part)
            line.size += part
            at += part
            if newline != NULL:
                self.emit(stream, line.data, line.size, True)
                line.size = 0
                at += 1
            elif line.size == SLICE:
                cut = whole(line.data, SLICE)
                self.emit(stream, line.data, cut, False)
                line.size = SLICE - cut
                memmove(line.data, line.data + cut, line.size)
        # Free the memory of a long line, because there may be thousands of idle containers.
        if line.room > 4096 and line.size == 0:
            free(line.data)
            line.data = NULL
            line.room = 0

    cdef void cut(self, size_t at) noexcept nogil:
        """Mark that a file of the log ends at `at` in `out`. Entries that no file will contain
        after this call are dropped.
        """
        cdef size_t gone, index
        self.cuts[self.cut_count] = at
        self.cut_count += 1
        if self.cut_count > self.max_file:
            self.cut_count -= 1
            memmove(self.cuts, self.cuts + 1, self.cut_count * sizeof(size_t))
        gone = self.cuts[0]
        if self.cut_count == self.max_file and gone:
            self.out_size -= gone
            memmove(self.out, self.out + gone, self.out_size)
            for index in range(<size_t>self.cut_count):
                self.cuts[index] -= gone

    cdef void settle(self) noexcept nogil:
        """Write all formatted entries, each to its file."""
        cdef size_t done = 0, end
        cdef int index
        for index in range(self.cut_count):
            end = self.cuts[index] - done
            self.flush(end)
            done += end
            self.rotate()
        self.cut_count = 0
        self.flush(self.out_size)

    cdef void emit(self, int stream, const char *data, size_t size, bint newline) noexcept nogil:
        """Format one entry after the others of this call. Rotates first if the file would become
        too large.
        """
        cdef char *into
        cdef size_t before = self.out_size
        cdef size_t begun
        cdef int64_t size_before
        if self.skip:
            self.skip -= 1
            return
        if self.out_size > OUT_FLUSH:
            self.settle()
            before = 0
        self.last += 1
        if self.last % 10 == 0:
            self.last += 1
        if self.last // 1000000000 != self.second:
            self.second = self.last // 1000000000
            put_second(self.clock, self.second)
        into = put_entry(
            self.out + before, stream, data, size, newline, self.attrs_text, self.attrs_size, self.clock,
            <int>(self.last % 1000000000), self.exact
        )
        self.out_size = into - self.out
        if self.limit:
            begun = self.cuts[self.cut_count - 1] if self.cut_count else 0
            size_before = <int64_t>(before - begun) + (0 if self.cut_count else self.size)
            if size_before > 0 and size_before + <int64_t>(self.out_size - before) > self.limit:
                if self.turned and not self.followed and self.skips:
                    self.cut(before)
                else:
                    self.flush(before)
                    self.turned = self.rotate() == 0

    cdef void flush(self, size_t upto) noexcept nogil:
        """Write the first `upto` bytes of the formatted entries and move the rest to the front.
        Sets `fault`."""
        cdef size_t done = 0, kept
        cdef ssize_t part
        cdef int failure = 0
        cdef struct_stat status
        cdef const char *newline
        if upto == 0:
            return
        if self.torn:
            part = write(self.fd, b"\n", 1)
            if part == 1:
                self.torn = False
                self.size += 1
            else:
                failure = errno if part < 0 else EIO
        while done < upto and not failure:
            part = write(self.fd, self.out + done, upto - done)
            if part > 0:
                done += part
            elif part == 0:
                failure = EIO
            elif errno != EINTR:
                failure = errno
        self.size += done
        self.fault = failure
        if failure:
            newline = <const char *>memrchr(self.out, c'\n', done)
            kept = newline + 1 - self.out if newline != NULL else 0
            if kept < done:
                if fstat(self.fd, &status) == 0 and ftruncate(self.fd, status.st_size - <int64_t>(done - kept)) == 0:
                    self.size -= done - kept
                else:
                    self.torn = True
            while kept < upto:
                newline = <const char *>memchr(self.out + kept, c'\n', upto - kept)
                kept = newline + 1 - self.out if newline != NULL else upto
                self.dropped += 1
        self.out_size -= upto
        if self.out_size:
            memmove(self.out, self.out + upto, self.out_size)

    cdef int rotate(self) noexcept nogil:
        """PATH becomes PATH.1 and so on, a new file becomes PATH. On failure the old file keeps
        growing and rotation is tried again later.

        Postponed while a follower does not hold PATH yet. The new file is created before the oldest
        is removed, so that its inode number differs and a position always refers to one file.
        """
        cdef char older[PATH_ROOM]
        cdef char newer[PATH_ROOM]
        cdef struct_stat status
        cdef int fd, index
        cdef const char *path = self.path_text
        if fstat(self.fd, &status) == 0 and status.st_size < self.size:
            self.size = status.st_size                  # an operator truncated it
            if self.size + <int64_t>self.out_size <= self.limit:
                return 0
        if self.behind:
            if self.size < self.max_size + LENIENCE:
                self.limit = self.max_size + LENIENCE
                return 0
            with gil:
                self.leave_behind()
        snprintf(newer, sizeof(newer), b"%s.new", path)
        fd = open(newer, O_RDWR | O_APPEND | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0o640)
        if fd >= 0 and fstat(fd, &status) == 0 and S_ISREG(status.st_mode):
            index = 1
            while index < self.max_file - 1:            # the sequence ends at the first free number
                snprintf(older, sizeof(older), b"%s.%d", path, index)
                if access(older, F_OK) < 0:
                    break
                index += 1
            for index in range(index, 1, -1):
                snprintf(newer, sizeof(newer), b"%s.%d", path, index - 1)
                snprintf(older, sizeof(older), b"%s.%d", path, index)
                rename(newer, older)
            snprintf(older, sizeof(older), b"%s.1", path)
            snprintf(newer, sizeof(newer), b"%s.new", path)
            if self.max_file == 1 or rename(path, older) == 0 or errno == ENOENT:
                if rename(newer, path) == 0:
                    close(self.fd)
                    self.fd = fd
                    self.inode = status.st_ino
                    self.long_files += self.size > 2 * self.max_size
                    self.size = 0
                    self.limit = self.max_size
                    self.torn = False
                    self.behind = self.followed
                    if self.long_files:
                        self.trim()
                    return 0
                if self.max_file > 1:
                    rename(older, path)
            unlink(newer)
        if fd >= 0:
            close(fd)
        self.limit = self.size + self.max_size // 8 + 4096
        return -1

    cdef void trim(self) noexcept nogil:
        """Remove the oldest files while the set is too large because some files grew for a
        follower.
        """
        cdef char name[PATH_ROOM]
        cdef struct_stat status
        cdef int64_t left = self.max_size * self.max_file + LENIENCE
        cdef int index = 1
        self.long_files = 0
        while index < self.max_file:
            snprintf(name, sizeof(name), b"%s.%d", self.path_text, index)
            if stat(name, &status) < 0:
                break
            left -= status.st_size
            self.long_files += status.st_size > 2 * self.max_size
            if left < 0 and index > 1:
                unlink(name)
            index += 1
