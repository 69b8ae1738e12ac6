# cython: language_level=3, cdivision=True
"""Compressed files of json-file logs: PATH.1.gz and so on.

They are gzip files (RFC 1952), which any program can read. Their header has an extra field with the
original's inode and size, the number of its entries and their times. So a reader knows the log's
positions and finds the tail without reading the file. Compressed files of other engines lack the
field, and can be read nevertheless.

Not here: which file is compressed when (`containers/packing.py`), its renaming, which is the
monitor's (`spool.pyx`).

Owns:    nothing. Descriptors are the caller's.
Threads: any number; one at a time per object.
Raises:  OSError. A damaged file ends where its damage begins.
"""
import os
import struct

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EINTR, ENOMEM, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcmp, memcpy, memmove
from posix.stat cimport fstat, struct_stat
from posix.unistd cimport pread

from engine._fast.jsonentry cimport ENTRY_MAX, TIME_SIZE, Entry, parse_line, read_time
from engine._fast.linux cimport set_errno

cdef enum:
    LABELLED = 64                       # bytes of a header with a label
    BLOCK = 256 << 10

# RFC 1952, 2.3: magic, deflate, FEXTRA; no time; level 1's hint; Unix. Then the size of the extra
# field: one subfield, "en", of 48 bytes.
cdef bytes OPENING = b"\x1f\x8b\x08\x04\0\0\0\0\x04\x03" + struct.pack("<H2sH", 52, b"en", 48)
cdef const char *OPENING_TEXT = PyBytes_AS_STRING(OPENING)

HEADER = LABELLED


cdef int read_label(int fd, Label *into) noexcept nogil:
    """Returns 1 if the file has a label, 0 for a gzip file without one, -1 with errno for another
    file. Without one, the inode is the file's own and the size is modulo 4 GiB."""
    cdef char header[LABELLED]
    cdef struct_stat status
    cdef uint32_t size = 0
    cdef ssize_t got
    if fstat(fd, &status) < 0:
        return -1
    got = pread(fd, header, LABELLED, 0)
    if got < 0:
        return -1
    if got == LABELLED and memcmp(header, OPENING_TEXT, 16) == 0:
        memcpy(into, header + 16, sizeof(Label))
        if into.size >= 0:
            return 1
    into.inode = status.st_ino
    if status.st_size >= 4 and pread(fd, &size, 4, status.st_size - 4) < 0:
        return -1
    into.size = size
    into.lines = into.entries = -1
    into.first = into.last = 0
    return 0


def label(int fd):
    """(inode, size, lines, entries, time of the first entry, time of the last one) of a packed
    file's original; None if it has no label. Raises OSError."""
    cdef Label found
    cdef int kind = read_label(fd, &found)
    if kind < 0:
        PyErr_SetFromErrno(OSError)
    if kind == 0:
        return None
    return found.inode, found.size, found.lines, found.entries, found.first, found.last


cdef int survey(int fd, Label *into) noexcept nogil:
    """Count what a label says of a file. -1 with errno."""
    cdef size_t room = ENTRY_MAX + BLOCK
    cdef char *block = <char *>malloc(room + 32)
    cdef const char *line
    cdef const char *newline
    cdef size_t used = 0, want
    cdef ssize_t got
    cdef int64_t at = 0
    cdef bint skipping = False
    cdef Entry entry
    into.lines = into.entries = into.first = into.last = 0
    if block == NULL:
        set_errno(ENOMEM)
        return -1
    while at < into.size:
        want = min(<int64_t>BLOCK, into.size - at)
        got = pread(fd, block + used, want, at)
        if got < 0 and errno == EINTR:
            continue
        if got <= 0:
            free(block)
            return <int>got
        at += got
        used += got
        line = block
        while True:
            newline = <const char *>memchr(line, c'\n', block + used - line)
            if newline == NULL:
                break
            into.lines += 1
            if not skipping and parse_line(line, newline - line, &entry):
                into.entries += 1
                into.last = max(read_time(entry.time, TIME_SIZE), 0)
                if into.entries == 1:
                    into.first = into.last
            skipping = False
            line = newline + 1
        used -= line - block
        if used >= ENTRY_MAX:
            skipping = True
            used = 0
        memmove(block, line, used)
    free(block)
    return 0


def pack(int source, int target) -> None:
    """Compress a rotated file into an empty one, and have it on the disk. Raises OSError, also if
    the file shrinks meanwhile."""
    from isal import isal_zlib  # not loaded by the monitor

    cdef Label found
    cdef struct_stat status
    cdef int failed
    cdef int64_t at = 0
    if fstat(source, &status) < 0:
        PyErr_SetFromErrno(OSError)
    found.inode = status.st_ino
    found.size = status.st_size
    with nogil:
        failed = survey(source, &found)
    if failed < 0:
        PyErr_SetFromErrno(OSError)
    write_all(target, OPENING + (<char *>&found)[:sizeof(Label)])
    stream = isal_zlib.compressobj(1, isal_zlib.DEFLATED, -15)
    check = 0
    while at < found.size:
        block = os.pread(source, min(<int64_t>BLOCK, found.size - at), at)
        if not block:
            raise OSError(f"a log was truncated while it was compressed: {at} of {found.size} bytes are left")
        at += len(block)
        check = isal_zlib.crc32(block, check)
        write_all(target, stream.compress(block))
    write_all(target, stream.flush() + struct.pack("<II", check, found.size & 0xFFFFFFFF))
    os.fdatasync(target)


cdef int write_all(int target, bytes data) except -1:
    cdef object view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return 0


cdef class Unpacker:
    """Reads the original of a packed file from its beginning, piece by piece, with little memory.
    The descriptor stays the caller's."""

    def __cinit__(self, int fd):
        self.fd = fd
        self.begin()

    cdef int begin(self) except -1:
        from isal import igzip_lib

        self.stream = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        self.at = self.offset = 0
        self.ended = False
        return 0

    cdef ssize_t read(self, char *into, size_t size) except -1:
        """The next bytes of the original, at most `size`; 0 at its end, or where the file is
        damaged."""
        cdef bytes data, found
        while not self.ended:
            data = b""
            if self.stream.needs_input:
                data = os.pread(self.fd, BLOCK // 4, self.at)
                self.at += len(data)
                if not data:
                    self.ended = True           # it was cut off
                    break
            try:
                found = self.stream.decompress(data, size)
                self.ended = self.stream.eof
            except OSError:
                raise
            except Exception:                   # of isal: the file is damaged
                self.ended = True
                break
            if found:
                memcpy(into, PyBytes_AS_STRING(found), PyBytes_GET_SIZE(found))
                self.offset += PyBytes_GET_SIZE(found)
                return PyBytes_GET_SIZE(found)
        return 0

    cdef int64_t go_to(self, int64_t offset) except -1:
        """Continue at that offset of the original, or at its end. Returns where that is."""
        cdef char *nowhere
        cdef ssize_t got = 1
        if offset < self.offset:
            self.begin()
        if offset > self.offset:
            nowhere = <char *>malloc(BLOCK)
            if nowhere == NULL:
                raise MemoryError
            try:
                while got and self.offset < offset:
                    got = self.read(nowhere, min(<int64_t>BLOCK, offset - self.offset))
            finally:
                free(nowhere)
        return self.offset
