# cython: language_level=3
"""A tar stream assembled from headers, ranges of files, and files below a directory.

Headers are ustar, with a PAX header (POSIX.1, pax) in front for long names, large numbers,
fractions of seconds and attributes. Sparse files are GNU's, version 1.0, as in pack.pyx.

Not here: which entries there are (builder/copying.py).

Owns:    the headers, and the file being read. Descriptors that are given stay the caller's.
Threads: one at a time. `readinto` releases the GIL.
Raises:  OSError with the kernel's errno and the file's name.
"""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.errno cimport EINTR, EINVAL, EIO, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

import os

from engine._fast.linux cimport (
    O_CLOEXEC, O_NOCTTY, O_NOFOLLOW, O_NONBLOCK, O_RDONLY, RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS, S_ISREG, close, fstat, openat2, pread, stat_t,
)

cdef enum:
    BLOCK = 512
    LITERAL = 0                 # bytes of `arena`
    ZEROS = 1
    RANGE = 2                   # of the descriptor `fd`
    NAMED = 3                   # the file called by `arena` at `at`, below the descriptor `fd`

cdef int64_t MAX_OCTAL_7 = 0o7777777
cdef int64_t MAX_OCTAL_11 = 0o77777777777


cdef struct Part:
    int kind
    int fd
    size_t at                   # in the arena
    int64_t offset              # in the file
    int64_t size


cdef void put_octal(uint8_t *field, size_t size, uint64_t number) noexcept nogil:
    cdef size_t at = size - 1
    field[at] = 0
    while at:
        at -= 1
        field[at] = 0x30 + <uint8_t>(number & 7)
        number >>= 3


cdef bytes record(bytes key, bytes value):
    """A PAX record: its length in decimal, which counts itself, `key=value` and a newline."""
    cdef Py_ssize_t rest = len(key) + len(value) + 3, length = rest + 1
    while rest + len(str(length)) != length:
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


cdef bytes decimal_time(int64_t seconds, int64_t fraction):
    sign = b""
    if seconds < 0:
        sign = b"-"
        if fraction:            # -1.25 is -2 s and 750,000,000 ns
            seconds += 1
            fraction = 1000000000 - fraction
        seconds = -seconds
    return (b"%s%d.%09d" % (sign, seconds, fraction)).rstrip(b"0") if fraction else b"%s%d" % (sign, seconds)


cdef class Assembly:
    """The entries that were added and not read yet."""

    cdef uint8_t *arena
    cdef size_t arena_size
    cdef size_t arena_room
    cdef Part *parts
    cdef size_t count
    cdef size_t room
    cdef size_t current
    cdef int64_t done           # bytes of the current part
    cdef int file               # being read, or -1
    cdef int error

    def __cinit__(self):
        self.file = -1

    def __dealloc__(self):
        if self.file >= 0:
            close(self.file)
        free(self.arena)
        free(self.parts)

    def close(self):
        """Drop what was not read."""
        if self.file >= 0:
            close(self.file)
            self.file = -1
        self.clear()

    cdef void clear(self) noexcept:
        self.count = self.current = self.arena_size = 0
        self.done = 0

    cdef uint8_t *reserve(self, size_t size) except NULL:
        cdef size_t wanted = self.arena_size + size
        cdef void *room
        if wanted > self.arena_room:
            wanted += wanted // 2 + 65536
            room = realloc(self.arena, wanted)
            if room == NULL:
                raise MemoryError()
            self.arena = <uint8_t *>room
            self.arena_room = wanted
        return self.arena + self.arena_size

    cdef int add(self, int kind, int fd, size_t at, int64_t offset, int64_t size) except -1:
        cdef size_t wanted
        cdef void *room
        cdef Part *last
        if self.count and kind == LITERAL:
            last = &self.parts[self.count - 1]
            if last.kind == LITERAL and last.at + <size_t>last.size == at:
                last.size += size
                return 0
        if self.count == self.room:
            wanted = self.room * 2 if self.room else 512
            room = realloc(self.parts, wanted * sizeof(Part))
            if room == NULL:
                raise MemoryError()
            self.parts = <Part *>room
            self.room = wanted
        self.parts[self.count].kind = kind
        self.parts[self.count].fd = fd
        self.parts[self.count].at = at
        self.parts[self.count].offset = offset
        self.parts[self.count].size = size
        self.count += 1
        return 0

    cdef int literal(self, bytes data) except -1:
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef size_t at = self.arena_size
        if size == 0:
            return 0
        memcpy(self.reserve(size), PyBytes_AS_STRING(data), size)
        self.arena_size += size
        return self.add(LITERAL, -1, at, 0, size)

    cdef int pad(self, int64_t size) except -1:
        size = -size & (BLOCK - 1)
        return self.add(ZEROS, -1, 0, 0, size) if size else 0

    def entry(
        self,
        bytes name not None,
        str kind not None,
        uint32_t mode,
        uint32_t uid,
        uint32_t gid,
        mtime,
        int64_t size=0,
        bytes link=b"",
        tuple xattrs=(),
        uint32_t major=0,
        uint32_t minor=0,
        bytes extents=None,
        int64_t stored=0,
    ):
        """Add the headers of an entry. For a regular file of a size that is not 0, one of the other
        methods must add its content next.

        `mtime`: nanoseconds. `extents`: a sparse file's map, pairs of 64-bit offset and size;
        `stored` is then the size of its content.
        """
        cdef int64_t seconds, fraction
        cdef bytes pax = b"", table = b""
        cdef char type = <char>ord(kind)
        cdef const int64_t *pairs
        cdef Py_ssize_t index
        cdef int64_t payload = size
        whole, part = divmod(mtime, 1000000000)
        seconds, fraction = whole, part
        if xattrs:
            pax = b"".join([record(b"SCHILY.xattr." + key, value) for key, value in xattrs])
        if extents is not None:
            pairs = <const int64_t *>PyBytes_AS_STRING(extents)
            lines = [b"%d\n" % (PyBytes_GET_SIZE(extents) // 16)]
            for index in range(PyBytes_GET_SIZE(extents) // 8):
                lines.append(b"%d\n" % pairs[index])
            table = b"".join(lines)
            table += bytes(-len(table) & (BLOCK - 1))
            pax += (
                record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0")
                + record(b"GNU.sparse.name", name) + record(b"GNU.sparse.realsize", b"%d" % size)
            )
            payload = stored + len(table)
        if PyBytes_GET_SIZE(name) > 100:
            pax += record(b"path", name)
        if PyBytes_GET_SIZE(link) > 100:
            pax += record(b"linkpath", link)
        if payload > MAX_OCTAL_11:
            pax += record(b"size", b"%d" % payload)
        if uid > MAX_OCTAL_7:
            pax += record(b"uid", b"%d" % uid)
        if gid > MAX_OCTAL_7:
            pax += record(b"gid", b"%d" % gid)
        if fraction or seconds < 0 or seconds > MAX_OCTAL_11:
            pax += record(b"mtime", decimal_time(seconds, fraction))
        if pax:
            self.block(b"././@PaxHeader", b"x", 0o644, 0, 0, 0, len(pax), b"", 0, 0)
            self.literal(pax)
            self.literal(bytes(-len(pax) & (BLOCK - 1)))
        self.block(name, type, mode, uid, gid, seconds if seconds > 0 else 0, payload, link, major, minor)
        self.literal(table)

    cdef int block(
        self, bytes name, char type, uint32_t mode, uint32_t uid, uint32_t gid, int64_t seconds, int64_t size,
        bytes link, uint32_t major, uint32_t minor
    ) except -1:
        cdef uint8_t *block = self.reserve(BLOCK)
        cdef size_t begin = self.arena_size
        cdef Py_ssize_t length = PyBytes_GET_SIZE(name), link_length = PyBytes_GET_SIZE(link)
        cdef uint32_t sum = 0
        cdef int at
        memset(block, 0, BLOCK)
        memcpy(block, PyBytes_AS_STRING(name), length if length < 100 else 100)
        put_octal(block + 100, 8, mode & 0o7777)
        put_octal(block + 108, 8, uid)
        put_octal(block + 116, 8, gid)
        put_octal(block + 124, 12, size)
        put_octal(block + 136, 12, seconds)
        memset(block + 148, 0x20, 8)
        block[156] = <uint8_t>type
        memcpy(block + 157, PyBytes_AS_STRING(link), link_length if link_length < 100 else 100)
        memcpy(block + 257, b"ustar\x0000", 8)
        if type == b"3" or type == b"4":
            put_octal(block + 329, 8, major)
            put_octal(block + 337, 8, minor)
        for at in range(BLOCK):
            sum += block[at]
        put_octal(block + 148, 7, sum)
        self.arena_size += BLOCK
        return self.add(LITERAL, -1, begin, 0, BLOCK)

    def data(self, bytes content not None):
        """Content in memory."""
        self.literal(content)
        self.pad(len(content))

    def range(self, int descriptor, int64_t offset, int64_t size):
        """Content at an offset of a file, which must be that long."""
        if size:
            self.add(RANGE, descriptor, 0, offset, size)
            self.pad(size)

    def named(self, int root, bytes path not None, int64_t size):
        """The content of a regular file below the directory `root`, without links in its path. If
        the file has become shorter, zeros follow.
        """
        if size:
            begin = self.arena_size
            memcpy(self.reserve(len(path) + 1), PyBytes_AS_STRING(path), len(path) + 1)
            self.arena_size += len(path) + 1
            self.add(NAMED, root, begin, 0, size)
            self.pad(size)

    def zeros(self, int64_t size):
        """Bytes of padding, or of the end mark."""
        if size:
            self.add(ZEROS, -1, 0, 0, size)

    def readinto(self, target not None):
        """Read up to the whole buffer; less only if nothing more was added."""
        cdef Py_buffer view
        cdef int64_t got
        PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
        try:
            with nogil:
                got = self.fill(<uint8_t *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        if got < 0:
            name = ""
            if self.current < self.count and self.parts[self.current].kind == NAMED:
                name = os.fsdecode(<char *>(self.arena + self.parts[self.current].at))
            raise OSError(self.error, os.strerror(self.error), name)
        if self.current == self.count:
            self.clear()
        return got

    cdef int64_t fill(self, uint8_t *data, int64_t room) noexcept nogil:
        cdef int64_t filled = 0, size
        cdef ssize_t got
        cdef Part *part
        while filled < room and self.current < self.count:
            part = &self.parts[self.current]
            size = part.size - self.done
            if size > room - filled:
                size = room - filled
            if part.kind == LITERAL:
                memcpy(data + filled, self.arena + part.at + self.done, <size_t>size)
            elif part.kind == ZEROS:
                memset(data + filled, 0, <size_t>size)
            else:
                if part.kind == NAMED and self.file < 0 and self.open(part) < 0:
                    return -1
                got = pread(
                    part.fd if part.kind == RANGE else self.file, data + filled, <size_t>size, part.offset + self.done
                )
                if got < 0:
                    if errno == EINTR:
                        continue
                    return self.fail(errno)
                if got == 0:
                    if part.kind == RANGE:
                        return self.fail(EIO)
                    memset(data + filled, 0, <size_t>size)
                    got = size
                size = got
            filled += size
            self.done += size
            if self.done == part.size:
                if self.file >= 0:
                    close(self.file)
                    self.file = -1
                self.done = 0
                self.current += 1
        return filled

    cdef int fail(self, int number) noexcept nogil:
        self.error = number
        return -1

    cdef int open(self, Part *part) noexcept nogil:
        cdef stat_t found
        self.file = openat2(
            part.fd, <char *>(self.arena + part.at), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
            RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
        )
        if self.file < 0 or fstat(self.file, &found) < 0:
            return self.fail(errno)
        return 0 if S_ISREG(found.st_mode) else self.fail(EINVAL)


__all__ = ["Assembly"]
