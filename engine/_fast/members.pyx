# cython: language_level=3
"""The members of a tar archive with everything that a copy of them needs: clean names, attributes,
and the sha256 of contents, which is computed while the archive is read.

Not here: what a member may be (builder/context.py), the format (tar.pyx).

Owns:    a reader. What it returns is the caller's.
Threads: one at a time. The GIL is held, except while the source waits and while hashlib works on
         large pieces.
Raises:  ArchiveError for a damaged archive, and for a name that leads out of it or that no file
         system can have; what the source raises.
"""
from cpython.buffer cimport PyBUF_READ, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport INT64_MAX, int64_t, uint8_t
from libc.string cimport memcpy, strlen, strncmp

from hashlib import sha256

from engine._fast.paths cimport clean
from engine._fast.tar cimport Entry, Reader

from engine._fast.tar import ArchiveError

cdef enum:
    SMALL = 128 * 1024          # contents that are hashed in one piece
    MAX_NAME = 255              # NAME_MAX of every file system that layers are on

cdef bytes EMPTY = sha256(b"").digest()


cdef bint has_parts(const char *path, ssize_t length, ssize_t *parent, bint *whiteout) noexcept nogil:
    """The parts of a clean path. Returns False if one is longer than a file's name may be.

    `parent`: the length of the parent's path. `whiteout`: a part begins with `.wh.`.
    """
    cdef ssize_t at, begin = 0
    whiteout[0] = False
    for at in range(length + 1):
        if at == length or path[at] == b"/":
            if at - begin > MAX_NAME:
                return False
            if strncmp(path + begin, b".wh.", 4) == 0:
                whiteout[0] = True
            if at < length:
                begin = at + 1
    parent[0] = begin - 1 if begin else 0
    return True


cdef inline str text(const char *data, ssize_t size):
    return PyUnicode_DecodeUTF8(<char *>data, size, b"surrogateescape")


cdef class Members:
    """The members of an archive in an object with `readinto`, in their order."""

    cdef Reader reader
    cdef object source
    cdef char path[4097]

    def __cinit__(self, source not None):
        self.reader = Reader(source)
        self.source = source

    def take(self, Py_ssize_t count, int64_t large=INT64_MAX):
        """The next `count` members, fewer at the end of the archive, with digests of contents.

        A content of more than `large` bytes is not read: its digest is None, and `skip` of the
        source is called with the number of bytes to leave out.

        Each is a tuple: path, parent, whiteout, type, mode, uid, gid, size, mtime in nanoseconds,
        link as written, attributes, major, minor, offset of the content, its stored size, map of a
        sparse file (pairs of 64-bit offset and size) or None, and the sha256 of a regular file or
        None. The digest of a sparse file is that of its map and the stored content.
        """
        found = []
        while len(found) < count:
            member = self.next(large)
            if member is None:
                break
            found.append(member)
        return found

    def following(self):
        """The next member as in `take`, without a digest, or None. `content` reads its content."""
        return self.next(-1)

    def content(self, target not None):
        """Read stored content of the current member into a buffer; 0 at its end."""
        cdef Py_buffer view
        cdef const uint8_t *data
        cdef size_t size
        cdef Py_ssize_t filled = 0
        cdef int got = 1
        PyObject_GetBuffer(target, &view, PyBUF_WRITABLE)
        try:
            while filled < view.len and self.reader.left:
                got = self.piece(<size_t>(view.len - filled), &data, &size)
                if got <= 0:
                    break
                memcpy(<uint8_t *>view.buf + filled, data, size)
                filled += size
        finally:
            PyBuffer_Release(&view)
        if got < 0:
            self.reader.raise_failure()
        return filled

    cdef int piece(self, size_t room, const uint8_t **data, size_t *size) noexcept:
        """As `Reader.payload`, of at most `room` bytes."""
        cdef int64_t left = self.reader.left, rest = 0
        cdef int got
        if <int64_t>room < left:
            rest = left - <int64_t>room
            self.reader.left = <int64_t>room
        got = self.reader.payload(data, size)
        self.reader.left += rest
        return got

    cdef object next(self, int64_t hashed):
        cdef Entry *entry = &self.reader.entry
        cdef ssize_t length, parent
        cdef bint whiteout
        cdef int64_t offset, stored
        cdef int got = self.reader.next()
        if got < 0:
            self.reader.raise_failure()
        if got == 0:
            return None
        length = clean(entry.name, self.path)
        if length < 0 or not has_parts(self.path, length, &parent, &whiteout):
            name = text(entry.name, strlen(entry.name))
            raise ArchiveError(
                f"{name}: the entry leads out of the archive" if length < 0
                else f"{name}: a name of more than {MAX_NAME} bytes"
            )
        offset = entry.offset
        stored = self.reader.left
        extents = None
        digest = None
        if entry.sparse:
            extents = PyBytes_FromStringAndSize(<char *>entry.extents, entry.extent_count * 16)
        if entry.type == b"0":
            if stored <= hashed or (extents is not None and hashed >= 0):
                digest = self.digest(extents, entry.real_size)
            elif hashed >= 0:
                self.skip()
        attributes = ()
        if entry.attribute_count:
            attributes = self.attributes()
        return (
            text(self.path, length),
            text(self.path, parent),
            whiteout,
            chr(entry.type),
            entry.mode,
            entry.uid,
            entry.gid,
            entry.real_size,
            entry.seconds * 1000000000 + entry.nanoseconds
            if -9000000000 < entry.seconds < 9000000000
            else <object>entry.seconds * 1000000000 + entry.nanoseconds,
            text(entry.link, strlen(entry.link)),
            attributes,
            entry.major,
            entry.minor,
            offset,
            stored,
            extents,
            digest,
        )

    cdef int skip(self) except -1:
        """Leave out the content of the current member."""
        cdef int64_t left = self.reader.left, buffered = <int64_t>(self.reader.filled - self.reader.start)
        if buffered > left:
            buffered = left
        self.reader.start += <size_t>buffered
        self.reader.position += left
        self.reader.left = 0
        if left > buffered:
            self.source.skip(left - buffered)
        return 0

    cdef object attributes(self):
        cdef Entry *entry = &self.reader.entry
        cdef size_t index
        found = {}
        for index in range(entry.attribute_count):
            found[<bytes>entry.attributes[index].name] = (
                PyBytes_FromStringAndSize(entry.attributes[index].value, entry.attributes[index].size)
            )
        return tuple(sorted(found.items()))

    cdef bytes digest(self, extents, int64_t size):
        """The sha256 of the current member's content, which is read."""
        cdef const uint8_t *data
        cdef size_t part
        cdef int got
        if extents is None and self.reader.left == 0:
            return EMPTY
        if extents is None and self.reader.left <= SMALL:
            # In one piece: creating a hash object costs more than a few hundred bytes of it.
            got = self.reader.need(<size_t>self.reader.left)
            if got > 0:
                got = self.reader.payload(&data, &part)
            elif got == 0:
                self.reader.fail(b"truncated archive")
            if got <= 0:
                self.reader.raise_failure()
            return sha256(PyMemoryView_FromMemory(<char *>data, part, PyBUF_READ)).digest()
        hashed = sha256()
        if extents is not None:
            hashed.update(b"sparse %d " % size + extents)
        while self.reader.left:
            if self.reader.payload(&data, &part) < 0:
                self.reader.raise_failure()
            hashed.update(PyMemoryView_FromMemory(<char *>data, part, PyBUF_READ))
        return hashed.digest()


__all__ = ["Members"]
