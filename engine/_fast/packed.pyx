# cython: language_level=3, cdivision=True
"""Packed files of json-file logs: PATH.1.gz and so on, each made of a rotated file of that number.

They are gzip files (RFC 1952), which any program can read. An extra field of their header has the
original's inode number, size, number of entries and times, so that positions in the log keep their
meaning, and most questions are answered without decompressing anything. A gzip file without that
field can be read too; its own inode number stands for the original's then.

PATH.n wins if PATH.n.gz exists as well: packing was interrupted before it removed the original.

Not here: which files are packed when (`containers/packing.py`), their names (`spool.pyx`), reading
them (`logreader.pyx`).

Owns:    nothing. Descriptors are the caller's.
Threads: any number; one at a time per object.
Raises:  OSError with the kernel's errno.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memchr, memcmp, memcpy, memmove
from posix.unistd cimport pread

from engine._fast.jsonentry cimport DISORDERED, ENTRY_MAX, TIME_SIZE, Entry, parse_line, read_time
from engine._fast.linux cimport fstat, stat_t

import os
import struct

cdef enum:
    OPENING_SIZE = 16                   # bytes of a header before its label
    FIELDS = 6                          # of a label, 8 bytes each
    BLOCK = 256 << 10
    SLACK = 32  # bytes beyond the end of a line that `parse_line` may read

# RFC 1952, 2.3: magic, deflate, FEXTRA; no time; fastest; Unix. Then the length of the extra field,
# which has one subfield: its name and the length of the label.
cdef bytes OPENING = b"\x1f\x8b\x08\x04\0\0\0\0\x04\x03" + struct.pack("<H2sH", 4 + 8 * FIELDS, b"en", 8 * FIELDS)
cdef const char *OPENING_TEXT = PyBytes_AS_STRING(OPENING)

HEADER = LABELLED


cdef int read_label(int fd, Label *into) noexcept nogil:
    """Returns 1 if the file has a label, 0 if not, -1 with errno. Without one, the inode number is
    the file's own, the size is modulo 4 GiB (RFC 1952, 2.3.1), and all else is unknown."""
    cdef unsigned char header[LABELLED]
    cdef uint64_t fields[FIELDS]
    cdef stat_t status
    cdef ssize_t got
    cdef int field, byte
    while True:
        got = pread(fd, header, LABELLED, 0)
        if got >= 0:
            break
        if errno != EINTR:
            return -1
    if got == LABELLED and memcmp(header, OPENING_TEXT, OPENING_SIZE) == 0:
        for field in range(FIELDS):
            fields[field] = 0
            for byte in range(7, -1, -1):               # little-endian, as all of gzip
                fields[field] = fields[field] << 8 | header[OPENING_SIZE + 8 * field + byte]
        into.inode = fields[0]
        into.size, into.lines, into.entries = <int64_t>fields[1], <int64_t>fields[2], <int64_t>fields[3]
        into.first, into.last = <int64_t>fields[4], <int64_t>fields[5]
        if into.size >= into.lines and into.lines >= into.entries and into.entries >= 0 and into.last >= into.first:
            return 1
    if fstat(fd, &status) < 0:
        return -1
    into.inode = status.st_ino
    into.size = 0
    if status.st_size >= 4 and pread(fd, header, 4, status.st_size - 4) == 4:
        into.size = header[0] | header[1] << 8 | header[2] << 16 | <int64_t>header[3] << 24
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


cdef class Survey:
    """Counts what a label says of a file, which is fed to it in pieces of any size."""

    def __dealloc__(self):
        free(self.buffer)

    cdef int feed(self, const char *data, size_t size) except -1 nogil:
        cdef const char *line
        cdef const char *newline
        cdef char *grown
        cdef Entry entry
        if self.used + size + SLACK > self.room:
            grown = <char *>realloc(self.buffer, self.used + size + SLACK)
            if grown == NULL:
                with gil:
                    raise MemoryError
            self.buffer = grown
            self.room = self.used + size + SLACK
        memcpy(self.buffer + self.used, data, size)
        self.found.size += size
        line = self.buffer
        newline = <const char *>memchr(line + self.used, c'\n', size)
        self.used += size
        while newline != NULL:
            self.found.lines += 1
            if not self.skipping and parse_line(line, newline - line, &entry):
                self.found.last = max(read_time(entry.time, TIME_SIZE), 0)
                if self.found.entries == 0:
                    self.found.first = self.found.last
                self.found.entries += 1
            self.skipping = False
            line = newline + 1
            newline = <const char *>memchr(line, c'\n', self.buffer + self.used - line)
        self.used -= line - self.buffer
        if self.skipping or self.used >= ENTRY_MAX:
            self.skipping = True
            self.used = 0
        memmove(self.buffer, line, self.used)
        return 0


def pack(int source, int target, checkpoint=None) -> None:
    """Compress a rotated file into an empty one, which gets the same time of modification and the
    mode bit `DISORDERED`, and have it on the disk.

    `checkpoint` is called for each block, and may raise to end the work. Raises OSError.
    """
    from isal import isal_zlib  # not loaded by the monitor, which needs labels only

    cdef Survey survey = Survey.__new__(Survey)
    cdef stat_t status
    cdef Py_buffer view
    cdef int64_t at = 0
    if fstat(source, &status) < 0:
        PyErr_SetFromErrno(OSError)
    write_all(target, bytes(LABELLED))
    stream = isal_zlib.compressobj(1, isal_zlib.DEFLATED, -15)
    check = 0
    while block := os.pread(source, BLOCK, at):
        if checkpoint is not None:
            checkpoint()
        at += len(block)
        PyObject_GetBuffer(block, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                survey.feed(<const char *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        check = isal_zlib.crc32(block, check)
        write_all(target, stream.compress(block))
    write_all(target, stream.flush() + struct.pack("<II", check, at & 0xFFFFFFFF))
    found = survey.found
    fields = struct.pack(
        "<Q5q", status.st_ino, found.size, found.lines, found.entries, found.first, max(found.first, found.last)
    )
    if os.pwrite(target, OPENING + fields, 0) != LABELLED:
        raise OSError(f"a write of {LABELLED} bytes was cut")
    modified = status.st_mtim.tv_sec * 10**9 + status.st_mtim.tv_nsec
    os.utime(target, ns=(modified, modified))
    if status.st_mode & DISORDERED:
        os.fchmod(target, os.fstat(target).st_mode & 0o7777 | DISORDERED)
    os.fdatasync(target)
    # Frees the page cache of both, which will hardly be read soon.
    os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)


cdef int write_all(int target, bytes data) except -1:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return 0
