# cython: language_level=3
"""tar-split: reassembles a layer's tar stream, byte for byte, with the files that were extracted
from it.

A layer is identified by the digest of its tar stream, and different tar programs write different
streams for the same tree. So `layer.apply` records everything in the stream except file contents
(`tar.Recorder`).

Format:  a sequence of 20-byte records, little-endian: size u64, offset u64, length u32. With length
         0, `size` bytes of the stream follow. Otherwise a path of `length` bytes follows, and the
         stream continues with `size` bytes of that file, starting at `offset`.
Owns:    one buffer and the descriptor of the file being read. The directory and the source stay the
         caller's.
Threads: one at a time. The GIL is taken only to read the source.
Raises:  ArchiveError for damaged tar-split data and for a file that has become shorter; OSError
         with the kernel's errno and the path.
"""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove

import os

from engine._fast.linux cimport (
    O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK, O_RDONLY, RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_XDEV, close, close_own, openat2, pread,
)
from engine._fast.tar cimport read_source

from engine._fast.tar import ArchiveError

cdef enum:
    BUFFER = 128 * 1024
    HEAD = 20
    MAX_PATH = 4095


cdef class Stream:
    """The tar stream of one layer, read in order.

    `source`: an object with `readinto` that gives the tar-split data. `directory`: a descriptor of
    the layer's root.
    """

    cdef object source
    cdef object failure
    cdef int directory
    cdef int file
    cdef uint8_t *buffer
    cdef size_t start
    cdef size_t filled
    cdef uint64_t raw           # bytes of the stream that follow in the buffer
    cdef uint64_t left          # bytes of the open file
    cdef int64_t offset
    cdef char path[4096]
    cdef int error              # errno, or 0 when `reason` describes the fault
    cdef const char *reason

    def __cinit__(self, source not None, int directory):
        self.file = -1
        self.source = source
        self.directory = directory
        self.buffer = <uint8_t *>malloc(BUFFER)
        if self.buffer == NULL:
            raise MemoryError()

    def __dealloc__(self):
        close_own(self.file)
        free(self.buffer)

    def close(self):
        """Close the file being read. Idempotent; not while another thread reads."""
        if self.file >= 0:
            close(self.file)
            self.file = -1

    def readinto(self, target not None):
        """Fill `target`. Returns the number of bytes, less than its size only at the end."""
        cdef Py_buffer room
        cdef int64_t got
        PyObject_GetBuffer(target, &room, PyBUF_WRITABLE)
        with nogil:
            got = self.read(<uint8_t *>room.buf, room.len)
        PyBuffer_Release(&room)
        if got < 0:
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            name = os.fsdecode(<bytes>self.path)
            if self.error:
                raise OSError(self.error, os.strerror(self.error), name)
            raise ArchiveError(f"{(<bytes>self.reason).decode()}: {name}")
        return got

    cdef int64_t fail(self, int number, const char *reason) noexcept nogil:
        self.error = number
        self.reason = reason
        return -1

    cdef int64_t read(self, uint8_t *target, size_t size) noexcept nogil:
        cdef size_t done = 0, part
        cdef ssize_t got
        while done < size:
            if self.raw:
                if self.start == self.filled:
                    got = self.need(1)
                    if got < 0:
                        return -1
                    if got == 0:
                        return self.fail(0, b"the tar-split data of a layer is truncated")
                part = min(self.filled - self.start, size - done)
                if part > self.raw:
                    part = self.raw
                memcpy(target + done, self.buffer + self.start, part)
                self.start += part
                self.raw -= part
                done += part
            elif self.left:
                part = size - done
                if part > self.left:
                    part = self.left
                got = pread(self.file, target + done, part, self.offset)
                if got < 0:
                    if errno == EINTR:
                        continue
                    return self.fail(errno, NULL)
                if got == 0:
                    return self.fail(0, b"a file of a layer is shorter than it was")
                self.offset += got
                self.left -= got
                done += got
            else:
                got = self.next()
                if got < 0:
                    return -1
                if got == 0:
                    break
        return done

    cdef int next(self) noexcept nogil:
        """Start the next record. Returns 1, 0 at the end, -1 on failure."""
        cdef uint64_t size
        cdef uint32_t length
        cdef int got = self.need(HEAD)
        if got < 0:
            return -1
        if got == 0:
            return 0 if self.start == self.filled else <int>self.fail(0, b"the tar-split data of a layer is truncated")
        memcpy(&size, self.buffer + self.start, 8)
        memcpy(&self.offset, self.buffer + self.start + 8, 8)
        memcpy(&length, self.buffer + self.start + 16, 4)
        self.start += HEAD
        if length == 0:
            self.raw = size
            return 1
        if length > MAX_PATH:
            return <int>self.fail(0, b"the tar-split data of a layer is damaged")
        got = self.need(length)
        if got <= 0:
            return -1 if got < 0 else <int>self.fail(0, b"the tar-split data of a layer is truncated")
        memcpy(self.path, self.buffer + self.start, length)
        self.path[length] = 0
        self.start += length
        self.left = size
        if self.file >= 0:
            close(self.file)
        # A path that is no longer a regular file must not block or be followed; reading it fails.
        self.file = openat2(
            self.directory,
            self.path,
            O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC,
            RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV,
        )
        return 1 if self.file >= 0 else <int>self.fail(errno, NULL)

    cdef int need(self, size_t count) noexcept nogil:
        """Buffer `count` contiguous bytes of tar-split data.

        Returns 1, 0 if it ends before, -1 on failure.
        """
        cdef ssize_t got
        while self.filled - self.start < count:
            if self.start:
                memmove(self.buffer, self.buffer + self.start, self.filled - self.start)
                self.filled -= self.start
                self.start = 0
            with gil:
                got = self.fill()
            if got <= 0:
                return <int>got
            self.filled += got
        return 1

    cdef ssize_t fill(self):
        try:
            return read_source(self.source, self.buffer + self.filled, BUFFER - self.filled)
        except BaseException as error:
            self.failure = error
            return -1
