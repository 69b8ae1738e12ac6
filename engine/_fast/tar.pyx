# cython: language_level=3
"""Reads tar archives as a stream: v7, ustar, star, GNU (long names, sparse) and PAX (with extended
attributes and sparse 0.0, 0.1, 1.0).

Where the formats leave a choice, this module follows Go's archive/tar, which writes and reads
nearly every layer. Entries without content (links, directories, devices) have no payload, whatever
their size field is, and global PAX headers are ignored.

Owns:    one buffer. The descriptor and the source stay the caller's. Names are returned as written;
         layer.pyx cleans them.
Threads: one at a time. The GIL is taken only to call a Python source or digest, once per buffer.
Raises:  ArchiveError for a damaged archive, with the offset of the entry; OSError with the kernel's
         errno.
"""
from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.errno cimport EINTR, ESPIPE, errno
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memmove, memset, strcmp, strlen, strncmp, strstr

import os

from engine._fast.linux cimport (
    lseek, pread, read,
)

cdef enum:
    BLOCK = 512
    BUFFER = 512 * 1024             # fits a core's L2 cache twice over
    MAX_HEADER = 1024 * 1024        # of a PAX header or a GNU long name, as in Go's archive/tar
    MAX_EXTENTS = 256 * 1024        # of one sparse file
    MAX_ATTRIBUTES = 1024

    RECORDED = 128 * 1024           # of tar-split data at a time
    RECORD_HEAD = 20                # see tarsplit.pyx

    HAS_PATH = 1
    HAS_LINK = 2
    HAS_SIZE = 4
    HAS_UID = 8
    HAS_GID = 16
    HAS_MTIME = 32
    HAS_MAJOR = 64
    HAS_MINOR = 128
    HAS_SPARSE = 256
    HAS_SPARSE_NAME = 512
    HAS_REAL_SIZE = 1024

cdef int64_t MAX_ENTRIES = 10 * 1000 * 1000
cdef int64_t MAX_UINT32 = 4294967295
# 8 PiB, which is larger than any real file, so that sums cannot overflow
cdef int64_t MAX_SIZE = <int64_t>1 << 53


class ArchiveError(ValueError):
    """The archive is damaged, truncated, hostile or of an unsupported kind. The message says which,
    and where.
    """


cdef ssize_t read_source(object source, uint8_t *buffer, size_t room) except -1:
    """Call `source.readinto` with a buffer that the source must not keep. Returns the number of
    bytes.
    """
    cdef ssize_t got = source.readinto(PyMemoryView_FromMemory(<char *>buffer, room, PyBUF_WRITE))
    if got < 0 or <size_t>got > room:
        raise ValueError(f"readinto returned {got} for a buffer of {room} bytes")
    return got


cdef bint parse_number(const uint8_t *field, size_t size, int64_t *value) noexcept nogil:
    """Parse an octal or base-256 field (GNU tar manual, "Extensions").

    Returns False if it is neither, or too large.
    """
    cdef uint64_t number = 0
    cdef size_t at = 0
    cdef bint negative
    cdef uint8_t byte
    if field[0] & 0x80:
        negative = field[0] & 0x40
        for at in range(size):
            byte = field[at]
            if negative:
                byte = <uint8_t>~byte
            if at == 0:
                byte &= 0x7F
            if number >> 55:
                return False
            number = number << 8 | byte
        value[0] = ~<int64_t>number if negative else <int64_t>number
        return True
    while at < size and (field[at] == 0x20 or field[at] == 0):
        at += 1
    while at < size and 0x30 <= field[at] <= 0x37:
        if number >> 59:
            return False
        number = number << 3 | (field[at] - 0x30)
        at += 1
    while at < size:
        if field[at] != 0x20 and field[at] != 0:
            return False
        at += 1
    value[0] = <int64_t>number
    return True


cdef bint parse_decimal(const char *text, size_t size, int64_t *value) noexcept nogil:
    """Parse an integer of a PAX record."""
    cdef uint64_t number = 0
    cdef size_t at = 0
    cdef bint negative = False
    if size and text[0] == b"-":
        negative = True
        at = 1
    if at >= size or size - at > 19:
        return False
    while at < size:
        if text[at] < 0x30 or text[at] > 0x39:
            return False
        number = number * 10 + <uint64_t>(text[at] - 0x30)
        at += 1
    if number > <uint64_t>INT64_MAX:
        return False
    value[0] = -<int64_t>number if negative else <int64_t>number
    return True


cdef bint parse_time(const char *text, size_t size, int64_t *seconds, int64_t *nanoseconds) noexcept nogil:
    """Parse `[-]seconds[.fraction]` into seconds, rounded down, and the remaining nanoseconds."""
    cdef const char *dot = <const char *>memchr(text, b".", size)
    cdef size_t whole = dot - text if dot != NULL else size
    cdef size_t at = whole + 1
    cdef int64_t rest = 0, scale = 100000000
    if not parse_decimal(text, whole, seconds):
        return False
    while at < size:
        if text[at] < 0x30 or text[at] > 0x39:
            return False
        rest += scale * (text[at] - 0x30)
        scale //= 10
        at += 1
    if size and text[0] == b"-" and rest:
        seconds[0] -= 1
        rest = 1000000000 - rest
    nanoseconds[0] = rest
    return True


cdef class Recorder:
    """Writes tar-split data (tarsplit.pyx has its format) to an object with `write`, many records
    at a time.
    """

    def __cinit__(self, receiver not None):
        self.receiver = receiver
        self.data = <uint8_t *>malloc(RECORDED)
        if self.data == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.data)

    cdef int put(self, const uint8_t *data, size_t size) noexcept nogil:
        """Record bytes of the stream; NULL stands for zeros."""
        cdef size_t part
        cdef uint64_t number
        while size:
            if RECORDED - self.size <= RECORD_HEAD and self.flush() < 0:
                return -1
            part = RECORDED - self.size - RECORD_HEAD
            if part > size:
                part = size
            number = part
            memcpy(self.data + self.size, &number, 8)
            memset(self.data + self.size + 8, 0, 12)
            self.size += RECORD_HEAD
            if data == NULL:
                memset(self.data + self.size, 0, part)
            else:
                memcpy(self.data + self.size, data, part)
                data += part
            self.size += part
            size -= part
        return 0

    cdef int put_file(self, const char *path, uint32_t length, int64_t offset, int64_t size) noexcept nogil:
        """Record that the next `size` bytes of the stream are in the file `path` at `offset`."""
        if RECORDED - self.size < RECORD_HEAD + length and self.flush() < 0:
            return -1
        memcpy(self.data + self.size, &size, 8)
        memcpy(self.data + self.size + 8, &offset, 8)
        memcpy(self.data + self.size + 16, &length, 4)
        memcpy(self.data + self.size + RECORD_HEAD, path, length)
        self.size += RECORD_HEAD + length
        return 0

    cdef int flush(self) noexcept nogil:
        """Write what is recorded. Returns -1 if the receiver fails; see `raise_failure`."""
        cdef size_t size = self.size
        self.size = 0
        if size == 0:
            return 0
        with gil:
            try:
                self.receiver.write(<bytes>self.data[:size])
            except BaseException as error:
                self.failure = error
                return -1
        return 0

    cdef int inline_files(self) noexcept nogil:
        """From now on no recorded file may be read again: the receiver copies their contents."""
        if self.flush() < 0:
            return -1
        with gil:
            try:
                self.receiver.inline_files()
            except BaseException as error:
                self.failure = error
                return -1
        return 0

    cdef object raise_failure(self):
        """Raise the receiver's error, if there is one."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


cdef class Reader:
    """One archive: in a descriptor (`offset` and `size` for a range of a seekable one), or in an
    object with `readinto`.

    `digest`: a hashlib object that is fed every byte of the stream, including the padding after the
    end mark. `tar_split`: an object with `write` that receives the data from which the same stream
    can be reassembled with the files (tarsplit.pyx).
    """

    def __cinit__(self, source not None, *, int64_t offset=0, int64_t size=-1, digest=None, tar_split=None):
        self.descriptor = -1
        self.buffer = NULL
        self.progress = NULL
        self.headers = NULL
        self.entry.name = self.entry.link = NULL
        self.entry.extents = NULL
        self.entry.attributes = NULL
        self.error = -1
        self.end = -1
        self.pending_offset = -1
        if isinstance(source, int):
            self.descriptor = source
            self.seekable = lseek(self.descriptor, 0, 1) >= 0
            self.at = offset
            if size >= 0:
                self.end = offset + size
            if not self.seekable and offset:
                raise OSError(ESPIPE, os.strerror(ESPIPE))
        else:
            self.source = source
        self.digest = digest
        if tar_split is not None:
            self.recording = True
            self.recorder = Recorder(tar_split)
        self.buffer = <uint8_t *>malloc(BUFFER)
        self.entry.name = <char *>malloc(TAR_MAX_PATH + 2)
        self.entry.link = <char *>malloc(TAR_MAX_PATH + 2)
        if self.buffer == NULL or self.entry.name == NULL or self.entry.link == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.buffer)
        free(self.headers)
        free(self.entry.name)
        free(self.entry.link)
        free(self.entry.extents)
        free(self.entry.attributes)

    cdef int fail(self, const char *reason) noexcept nogil:
        if self.error == -1:
            self.error = 0
            snprintf(self.reason, sizeof(self.reason), b"%s", reason)
        return -1

    cdef int fail_system(self, const char *what, int number) noexcept nogil:
        if self.error == -1:
            self.error = number
            snprintf(self.reason, sizeof(self.reason), b"%s", what)
        return -1

    cdef object raise_failure(self):
        """Raise the error that `fail`, `fail_system` or the Python source has stored."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if self.recorder is not None:
            self.recorder.raise_failure()
        text = (<bytes>self.reason).decode("utf-8", "replace")
        if self.error > 0:
            raise OSError(self.error, os.strerror(self.error), text)
        raise ArchiveError(text)

    cdef int fill(self) noexcept nogil:
        """Read more bytes into the buffer. Returns their number, 0 at the end, -1 on failure."""
        cdef ssize_t got
        cdef size_t room
        if self.recording and self.keep() < 0:
            return -1
        if self.progress != NULL and self.progress[1]:
            return self.fail_system(b"cancelled", EINTR)
        if self.start == self.filled:
            self.start = self.filled = self.captured = 0
        elif self.filled == BUFFER:
            memmove(self.buffer, self.buffer + self.start, self.filled - self.start)
            self.filled -= self.start
            self.start = self.captured = 0
        room = BUFFER - self.filled
        if self.descriptor < 0:
            with gil:
                got = self.fill_from_source(room)
            if got < 0:
                return -1
        else:
            if self.end >= 0 and <int64_t>room > self.end - self.at:
                room = <size_t>(self.end - self.at)
            while True:
                if self.seekable:
                    got = pread(self.descriptor, self.buffer + self.filled, room, self.at)
                else:
                    got = read(self.descriptor, self.buffer + self.filled, room)
                if got >= 0 or errno != EINTR:
                    break
            if got < 0:
                return self.fail_system(b"reading the archive", errno)
            self.at += got
        if got > 0 and self.digest is not None:
            with gil:
                if self.update(self.filled, got) < 0:
                    return -1
        self.filled += got
        if self.progress != NULL:
            self.progress[0] += got
        return <int>got

    cdef ssize_t fill_from_source(self, size_t room):
        try:
            return read_source(self.source, self.buffer + self.filled, room)
        except BaseException as error:
            self.failure = error
            return -1

    cdef int update(self, size_t at, size_t size):
        try:
            self.digest.update(PyMemoryView_FromMemory(<char *>(self.buffer + at), size, PyBUF_READ))
        except BaseException as error:
            self.failure = error
            return -1
        return 0

    cdef int need(self, size_t count) noexcept nogil:
        """Buffer `count` contiguous bytes (at most BUFFER) at `start`.

        Returns 1, 0 if the stream ends before (the bytes before its end are buffered), -1 on
        failure.
        """
        cdef int got
        while self.filled - self.start < count:
            if self.start and BUFFER - self.start < count:
                if self.recording and self.keep() < 0:
                    return -1
                memmove(self.buffer, self.buffer + self.start, self.filled - self.start)
                self.filled -= self.start
                self.start = self.captured = 0
            got = self.fill()
            if got <= 0:
                return got
        return 1

    cdef int skip(self, int64_t count) noexcept nogil:
        cdef size_t have
        cdef int got
        while count > 0:
            have = self.filled - self.start
            if have == 0:
                if self.seekable and self.digest is None and not self.recording and self.end >= 0 and count >= BUFFER:
                    if count > self.end - self.at:
                        return self.fail(b"truncated archive")
                    self.at += count
                    self.position += count
                    return 0
                got = self.fill()
                if got < 0:
                    return -1
                if got == 0:
                    return self.fail(b"truncated archive")
                continue
            if <int64_t>have > count:
                have = <size_t>count
            self.start += have
            self.position += have
            count -= have
        return 0

    cdef int payload(self, const uint8_t **data, size_t *size) noexcept nogil:
        """The next piece of the entry's payload, valid until the next call.

        Returns 1, 0 if all of it was read, -1 on failure.
        """
        cdef int got
        if self.left == 0:
            return 0
        if self.filled == self.start:
            got = self.fill()
            if got < 0:
                return -1
            if got == 0:
                return self.fail(b"truncated archive")
        size[0] = self.filled - self.start
        if <int64_t>size[0] > self.left:
            size[0] = <size_t>self.left
        data[0] = self.buffer + self.start
        self.start += size[0]
        self.position += size[0]
        self.left -= size[0]
        if self.passing:
            self.captured = self.start
            if self.left == 0:
                self.passing = False
        return 1

    cdef int drain(self) noexcept nogil:
        """Read the stream to its end, which also feeds digest and tar-split."""
        cdef int got
        if self.digest is None and not self.recording and self.descriptor >= 0:
            return 0
        while True:
            self.position += self.filled - self.start
            self.start = self.filled
            got = self.fill()
            if got < 0:
                return -1
            if got == 0:
                return self.recorder.flush() if self.recording else 0

    # --- tar-split --------------------------------------------------------------------------------

    cdef int keep(self) noexcept nogil:
        """Record the bytes of the buffer before `start` that are not recorded yet and belong to no
        file.
        """
        cdef size_t at = self.captured
        self.captured = self.start
        return self.recorder.put(self.buffer + at, self.start - at) if self.start > at else 0

    cdef int record_file(self, const char *path, int64_t offset, int64_t size) noexcept nogil:
        """Record that the next `size` bytes of the stream are in the file `path` at `offset`."""
        if self.verbatim:
            return 0
        if self.keep() < 0 or self.recorder.put_file(path, <uint32_t>strlen(path), offset, size) < 0:
            return -1
        self.passing = True
        return 0

    cdef int inline_files(self) noexcept nogil:
        """Called before a file that the tar-split data refers to is removed. From now on the data
        contains file contents, and the receiver replaces its references by contents.
        """
        if not self.recording or self.verbatim:
            return 0
        self.verbatim = True
        return self.recorder.inline_files()

    # --- headers ----------------------------------------------------------------------------------

    cdef int next(self) noexcept nogil:
        """Go to the next entry and fill `entry`. Returns 1, 0 at the end of the archive, -1 on
        failure.
        """
        cdef const uint8_t *block
        cdef Entry *entry = &self.entry
        cdef int64_t size
        cdef int got
        cdef char type
        cdef bint zero = False
        if self.finished:
            return 0
        if self.skip(self.left) < 0:
            return -1
        if self.padding:
            got = self.need(<size_t>self.padding)
            if got == 0:
                # Go's tar.Writer pads an entry only at the next entry or at Close. A program that
                # does not call Close ends the archive here, which Docker accepts: umoci insert.
                self.finished = True
                return 0
            if got < 0 or self.skip(self.padding) < 0:
                return -1
        self.left = self.padding = 0
        self.pax_flags = 0
        self.sparse_major = self.sparse_minor = 0
        self.sparse_numbered = False
        self.headers_size = 0
        entry.attribute_count = entry.extent_count = 0
        entry.sparse = False
        entry.name[0] = entry.link[0] = 0
        while True:
            got = self.need(BLOCK)
            if got < 0:
                return -1
            if got == 0:
                if self.filled != self.start or self.pax_flags:
                    return self.fail(b"truncated archive")
                self.finished = True
                return 0
            block = self.buffer + self.start
            if block[0] == 0 and memcmp(block, block + 1, BLOCK - 1) == 0:
                self.start += BLOCK
                self.position += BLOCK
                if zero or self.pax_flags:
                    if self.pax_flags:
                        return self.fail(b"truncated archive: a header without its entry")
                    self.finished = True
                    return 0
                zero = True
                continue
            if zero:
                return self.fail(b"damaged archive: entries after an end mark")
            self.entries += 1
            if self.entries > MAX_ENTRIES:
                return self.fail(b"the archive has more than 10 million entries")
            if not self.check(block):
                return self.fail(b"damaged archive: bad checksum of a header")
            if not parse_number(block + 124, 12, &size):
                return self.fail(b"damaged archive: bad size field")
            if size < 0 or size > MAX_SIZE:
                return self.fail(b"damaged archive: negative or absurd size")
            type = <char>block[156]
            if type == b"L" or type == b"K" or type == b"x" or type == b"g":
                self.start += BLOCK
                self.position += BLOCK
                if size > MAX_HEADER:
                    return self.fail(b"extended header of more than 1 MiB")
                if type == b"L":
                    if self.read_long(size, entry.name) < 0:
                        return -1
                    self.pax_flags |= HAS_PATH
                elif type == b"K":
                    if self.read_long(size, entry.link) < 0:
                        return -1
                    self.pax_flags |= HAS_LINK
                elif self.read_pax(size, type == b"x") < 0:
                    return -1
                continue
            if type == b"V" or type == b"N":      # volume label; long names of a very old GNU tar
                self.start += BLOCK
                self.position += BLOCK
                if self.skip(size + (-size & (BLOCK - 1))) < 0:
                    return -1
                self.pax_flags = 0
                self.headers_size = entry.attribute_count = entry.extent_count = 0
                continue
            return self.read_header(block)

    cdef bint check(self, const uint8_t *block) noexcept nogil:
        """True if the checksum is right. POSIX adds unsigned bytes; some old programs added signed
        ones.
        """
        cdef int64_t written
        # without a branch in the loop, so that the compiler can vectorize it
        cdef uint32_t sum = 8 * 0x20, negative = 0
        cdef int at
        if not parse_number(block + 148, 8, &written):
            return False
        for at in range(BLOCK):
            sum += block[at]
            negative += block[at] >> 7
        for at in range(148, 156):
            sum -= block[at]
            negative -= block[at] >> 7
        return written == <int64_t>sum or written == <int64_t>sum - 256 * <int64_t>negative

    cdef int read_header(self, const uint8_t *block) noexcept nogil:
        cdef Entry *entry = &self.entry
        cdef int64_t size, number
        cdef size_t length, prefix = 0, prefix_room
        cdef bint ustar = memcmp(block + 257, b"ustar\0", 6) == 0
        cdef bint gnu = memcmp(block + 257, b"ustar  \0", 8) == 0
        cdef char type = <char>block[156]
        cdef bint content

        if not self.pax_flags & (HAS_PATH | HAS_SPARSE_NAME):
            length = field_length(block, 100)
            if ustar:
                # star (magic "tar\0" at the end of the block) has times after a shorter prefix.
                prefix_room = 131 if memcmp(block + 508, b"tar\0", 4) == 0 else 155
                prefix = field_length(block + 345, prefix_room)
            if prefix:
                memcpy(entry.name, block + 345, prefix)
                entry.name[prefix] = b"/"
                prefix += 1
            memcpy(entry.name + prefix, block, length)
            entry.name[prefix + length] = 0
        if not self.pax_flags & HAS_LINK:
            length = field_length(block + 157, 100)
            memcpy(entry.link, block + 157, length)
            entry.link[length] = 0
        if entry.name[0] == 0:
            return self.fail(b"damaged archive: entry without a name")

        if not parse_number(block + 100, 8, &number):
            return self.fail_entry(b"bad mode field")
        entry.mode = <uint32_t>(number & 0o7777)
        if not self.pax_flags & HAS_UID:
            if not parse_number(block + 108, 8, &number) or number < 0 or number >= MAX_UINT32:
                return self.fail_entry(b"bad owner field")
            entry.uid = <uint32_t>number
        if not self.pax_flags & HAS_GID:
            if not parse_number(block + 116, 8, &number) or number < 0 or number >= MAX_UINT32:
                return self.fail_entry(b"bad group field")
            entry.gid = <uint32_t>number
        if not self.pax_flags & HAS_MTIME:
            if not parse_number(block + 136, 12, &entry.seconds):
                return self.fail_entry(b"bad time field")
            entry.nanoseconds = 0
        if self.pax_flags & HAS_SIZE:
            size = self.pax_size
        else:
            parse_number(block + 124, 12, &size)

        if type == 0 or type == b"0" or type == b"7":
            length = strlen(entry.name)
            type = b"5" if type == 0 and entry.name[length - 1] == b"/" else b"0"
        elif type == b"S":
            if not gnu:
                return self.fail_entry(b"sparse file in a header that is not GNU's")
        elif type < b"1" or type > b"6":
            snprintf(
                self.reason,
                sizeof(self.reason),
                b"unsupported type of entry (0x%02x): %.400s",
                <int><uint8_t>type,
                entry.name,
            )
            self.error = 0
            return -1

        entry.major = entry.minor = 0
        if type == b"3" or type == b"4":
            if not self.pax_flags & HAS_MAJOR:
                if not parse_number(block + 329, 8, &number) or number < 0 or number > MAX_UINT32:
                    return self.fail_entry(b"bad device number")
                entry.major = <uint32_t>number
            else:
                entry.major = <uint32_t>self.pax_major
            if not self.pax_flags & HAS_MINOR:
                if not parse_number(block + 337, 8, &number) or number < 0 or number > MAX_UINT32:
                    return self.fail_entry(b"bad device number")
                entry.minor = <uint32_t>number
            else:
                entry.minor = <uint32_t>self.pax_minor

        content = type == b"0" or type == b"S"
        if not content:
            size = 0
        entry.type = type if type != b"S" else <char>b"0"
        entry.size = entry.real_size = size
        self.left = size
        self.padding = -size & (BLOCK - 1)
        if type == b"S":
            if self.read_old_sparse(block) < 0:
                return -1
        else:
            self.start += BLOCK
            self.position += BLOCK
        if content and type != b"S" and (self.pax_flags & HAS_SPARSE or self.sparse_major):
            if self.sparse_major == 1 and self.sparse_minor == 0:
                if self.read_sparse_map() < 0:
                    return -1
            elif self.sparse_major > 1 or (self.sparse_major == 1 and self.sparse_minor):
                return self.fail_entry(b"unknown version of sparse file")
            if self.pending_offset >= 0:
                return self.fail_entry(b"bad map of a sparse file")
            if not self.pax_flags & HAS_REAL_SIZE:
                return self.fail_entry(b"sparse file without its size")
            entry.sparse = True
            entry.real_size = self.pax_real_size
        if entry.sparse and self.check_extents() < 0:
            return -1
        entry.offset = self.position
        if self.end >= 0 and self.left > self.end - self.at + <int64_t>(self.filled - self.start):
            return self.fail_entry(b"truncated archive")
        return 1

    cdef int fail_entry(self, const char *reason) noexcept nogil:
        if self.error == -1:
            self.error = 0
            snprintf(self.reason, sizeof(self.reason), b"%s: %.400s", reason, self.entry.name)
        return -1

    cdef int read_long(self, int64_t size, char *target) noexcept nogil:
        """Read a GNU long name or link, up to its first NUL."""
        cdef size_t length
        cdef int got
        if size > TAR_MAX_PATH + 1:
            return self.fail(b"name of more than 4095 bytes")
        got = self.need(<size_t>(size + (-size & (BLOCK - 1))))
        if got <= 0:
            return -1 if got < 0 else self.fail(b"truncated archive")
        length = field_length(self.buffer + self.start, <size_t>size)
        if length > TAR_MAX_PATH:
            return self.fail(b"name of more than 4095 bytes")
        memcpy(target, self.buffer + self.start, length)
        target[length] = 0
        return self.skip(size + (-size & (BLOCK - 1)))

    cdef int read_pax(self, int64_t size, bint apply) noexcept nogil:
        cdef size_t before = self.headers_size
        cdef const uint8_t *data
        cdef size_t part
        cdef int64_t left = size
        cdef char *room
        cdef int got
        if not apply:
            return self.skip(size + (-size & (BLOCK - 1)))
        if before:
            return self.fail(b"damaged archive: two extended headers for one entry")
        if <size_t>size + 1 > self.headers_room:
            room = <char *>realloc(self.headers, <size_t>size + 1)
            if room == NULL:
                return self.fail_system(b"extended header", 12)
            self.headers = room
            self.headers_room = <size_t>size + 1
        while left:
            if self.filled == self.start:
                got = self.fill()
                if got <= 0:
                    return -1 if got < 0 else self.fail(b"truncated archive")
            part = self.filled - self.start
            if <int64_t>part > left:
                part = <size_t>left
            data = self.buffer + self.start
            memcpy(self.headers + self.headers_size, data, part)
            self.headers_size += part
            self.start += part
            self.position += part
            left -= part
        if self.skip(-size & (BLOCK - 1)) < 0:
            return -1
        return self.parse_pax()

    cdef int parse_pax(self) noexcept nogil:
        """Parse records `length key=value\\n` (POSIX.1, pax, "pax Extended Header").

        Each key and value is NUL-terminated in place.
        """
        cdef char *at = self.headers
        cdef char *end = self.headers + self.headers_size
        cdef char *space
        cdef char *equals
        cdef char *last
        cdef int64_t length
        self.pending_offset = -1
        self.pax_flags |= 1 << 20       # an entry must follow
        while at < end:
            space = <char *>memchr(at, b" ", min_size(end - at, 20))
            if space == NULL or not parse_decimal(at, space - at, &length):
                return self.fail(b"damaged archive: bad record in an extended header")
            if length <= space - at + 2 or length > end - at or at[length - 1] != b"\n":
                return self.fail(b"damaged archive: bad record in an extended header")
            last = at + length - 1
            equals = <char *>memchr(space + 1, b"=", last - space - 1)
            if equals == NULL or equals == space + 1:
                return self.fail(b"damaged archive: bad record in an extended header")
            equals[0] = 0
            last[0] = 0
            if self.pax_record(space + 1, equals - space - 1, equals + 1, last - equals - 1) < 0:
                return -1
            at = last + 1
        return 0

    cdef int pax_record(self, char *key, size_t key_size, char *value, size_t size) noexcept nogil:
        cdef Entry *entry = &self.entry
        cdef int64_t number, offset
        cdef Attribute *room
        cdef char *comma
        if strlen(key) != key_size:
            return self.fail(b"damaged archive: NUL in a key of an extended header")
        if strncmp(key, b"SCHILY.xattr.", 13) == 0:
            if key_size == 13:
                return self.fail(b"extended attribute without a name")
            if entry.attribute_count == self.attributes_room:
                if self.attributes_room >= MAX_ATTRIBUTES:
                    return self.fail(b"more than 1024 extended attributes on one entry")
                room = <Attribute *>realloc(entry.attributes, (self.attributes_room + 32) * sizeof(Attribute))
                if room == NULL:
                    return self.fail_system(b"extended attributes", 12)
                entry.attributes = room
                self.attributes_room += 32
            entry.attributes[entry.attribute_count].name = key + 13
            entry.attributes[entry.attribute_count].value = value
            entry.attributes[entry.attribute_count].size = size
            entry.attribute_count += 1
            return 0
        if strncmp(key, b"GNU.sparse.", 11) == 0:
            return self.sparse_record(key + 11, value, size)
        if size == 0:
            return 0            # an empty value cancels a record; the plain header applies
        if strcmp(key, b"path") == 0:
            if self.pax_flags & HAS_SPARSE_NAME:
                return 0
            if copy_name(entry.name, value, size) < 0:
                return self.fail(b"name with a NUL or of more than 4095 bytes")
            self.pax_flags |= HAS_PATH
        elif strcmp(key, b"linkpath") == 0:
            if copy_name(entry.link, value, size) < 0:
                return self.fail(b"name of a link with a NUL or of more than 4095 bytes")
            self.pax_flags |= HAS_LINK
        elif strcmp(key, b"size") == 0:
            if not parse_decimal(value, size, &number) or number < 0 or number > MAX_SIZE:
                return self.fail(b"damaged archive: negative or absurd size")
            self.pax_size = number
            self.pax_flags |= HAS_SIZE
        elif strcmp(key, b"uid") == 0 or strcmp(key, b"gid") == 0:
            # for chown(2), 2**32 - 1 means: do not change
            if not parse_decimal(value, size, &number) or number < 0 or number >= MAX_UINT32:
                return self.fail(b"damaged archive: bad owner in an extended header")
            if key[0] == b"u":
                entry.uid = <uint32_t>number
                self.pax_flags |= HAS_UID
            else:
                entry.gid = <uint32_t>number
                self.pax_flags |= HAS_GID
        elif strcmp(key, b"mtime") == 0:
            if not parse_time(value, size, &entry.seconds, &entry.nanoseconds):
                return self.fail(b"damaged archive: bad time in an extended header")
            self.pax_flags |= HAS_MTIME
        elif strcmp(key, b"SCHILY.devmajor") == 0 or strcmp(key, b"SCHILY.devminor") == 0:
            if not parse_decimal(value, size, &number) or number < 0 or number > MAX_UINT32:
                return self.fail(b"damaged archive: bad device number in an extended header")
            if key[11] == b"a":
                self.pax_major = number
                self.pax_flags |= HAS_MAJOR
            else:
                self.pax_minor = number
                self.pax_flags |= HAS_MINOR
        return 0

    cdef int sparse_record(self, const char *key, char *value, size_t size) noexcept nogil:
        """Parse one `GNU.sparse.KEY` (GNU tar manual, "Storing Sparse Files")."""
        cdef int64_t number
        cdef int64_t offset = -1
        cdef char *comma
        if strcmp(key, b"name") == 0:
            if size == 0 or copy_name(self.entry.name, value, size) < 0:
                return self.fail(b"name with a NUL or of more than 4095 bytes")
            self.pax_flags |= HAS_SPARSE_NAME
            return 0
        if strcmp(key, b"map") == 0:
            self.pax_flags |= HAS_SPARSE
            while size:
                comma = <char *>memchr(value, b",", size)
                if comma == NULL:
                    comma = value + size
                if not parse_decimal(value, comma - value, &number):
                    return self.fail(b"bad map of a sparse file")
                if offset < 0:
                    offset = number
                    if offset < 0:
                        return self.fail(b"bad map of a sparse file")
                else:
                    if self.add_extent(offset, number) < 0:
                        return -1
                    offset = -1
                if comma == value + size:
                    break
                size -= comma - value + 1
                value = comma + 1
            return 0 if offset < 0 else self.fail(b"bad map of a sparse file")
        if not parse_decimal(value, size, &number) or number < 0 or number > MAX_SIZE:
            return self.fail(b"damaged archive: bad number of a sparse file")
        if strcmp(key, b"major") == 0:
            self.sparse_major = <int>min_size(<size_t>number, 1000)
        elif strcmp(key, b"minor") == 0:
            self.sparse_minor = <int>min_size(<size_t>number, 1000)
        elif strcmp(key, b"size") == 0 or strcmp(key, b"realsize") == 0:
            self.pax_real_size = number
            self.pax_flags |= HAS_REAL_SIZE
        elif strcmp(key, b"offset") == 0:
            self.pax_flags |= HAS_SPARSE
            if self.pending_offset >= 0:
                return self.fail(b"bad map of a sparse file")
            self.pending_offset = number
        elif strcmp(key, b"numbytes") == 0:
            if self.pending_offset < 0:
                return self.fail(b"bad map of a sparse file")
            if self.add_extent(self.pending_offset, number) < 0:
                return -1
            self.pending_offset = -1
        elif strcmp(key, b"numblocks") == 0:
            self.pax_flags |= HAS_SPARSE
        return 0

    # --- sparse files -----------------------------------------------------------------------------

    cdef int add_extent(self, int64_t offset, int64_t size) noexcept nogil:
        cdef Entry *entry = &self.entry
        cdef Extent *room
        cdef size_t wanted
        if offset < 0 or size < 0 or offset > MAX_SIZE or size > MAX_SIZE:
            return self.fail(b"bad map of a sparse file")
        if entry.extent_count == self.extents_room:
            if self.extents_room >= MAX_EXTENTS:
                return self.fail(b"sparse file of more than 262144 pieces")
            wanted = self.extents_room * 2 if self.extents_room else 64
            room = <Extent *>realloc(entry.extents, wanted * sizeof(Extent))
            if room == NULL:
                return self.fail_system(b"map of a sparse file", 12)
            entry.extents = room
            self.extents_room = wanted
        entry.extents[entry.extent_count].offset = offset
        entry.extents[entry.extent_count].size = size
        entry.extent_count += 1
        return 0

    cdef int old_extents(self, const uint8_t *at, int count) noexcept nogil:
        """Parse the 24-byte pairs of a GNU header, up to the first empty one."""
        cdef int64_t offset, size
        cdef int index
        for index in range(count):
            if at[24 * index] == 0 and at[24 * index + 12] == 0:
                return 0
            if not parse_number(at + 24 * index, 12, &offset) or not parse_number(at + 24 * index + 12, 12, &size):
                return self.fail_entry(b"bad map of a sparse file")
            if self.add_extent(offset, size) < 0:
                return -1
        return 0

    cdef int read_old_sparse(self, const uint8_t *block) noexcept nogil:
        cdef Entry *entry = &self.entry
        cdef bint more = block[482] != 0
        cdef int got
        entry.sparse = True
        if not parse_number(block + 483, 12, &entry.real_size) or entry.real_size < 0 or entry.real_size > MAX_SIZE:
            return self.fail_entry(b"bad size of a sparse file")
        if self.old_extents(block + 386, 4) < 0:
            return -1
        self.start += BLOCK
        self.position += BLOCK
        while more:
            got = self.need(BLOCK)
            if got <= 0:
                return -1 if got < 0 else self.fail(b"truncated archive")
            more = self.buffer[self.start + 504] != 0
            if self.old_extents(self.buffer + self.start, 21) < 0:
                return -1
            self.start += BLOCK
            self.position += BLOCK
            # A block without extents that announces another block could repeat without end.
            if more and entry.extent_count == 0:
                return self.fail_entry(b"bad map of a sparse file")
        return 0

    cdef int map_number(self, int64_t *value) noexcept nogil:
        """Read a decimal line of the map in front of the payload (sparse 1.0)."""
        cdef int64_t number = 0
        cdef int digits = 0
        cdef int got
        cdef uint8_t byte
        while True:
            if self.left == 0:
                return self.fail_entry(b"bad map of a sparse file")
            if self.filled == self.start:
                got = self.fill()
                if got <= 0:
                    return -1 if got < 0 else self.fail(b"truncated archive")
            byte = self.buffer[self.start]
            self.start += 1
            self.position += 1
            self.left -= 1
            if byte == 10 and digits:
                value[0] = number
                return 0
            digits += 1
            if byte < 0x30 or byte > 0x39 or digits > 17:
                return self.fail_entry(b"bad map of a sparse file")
            number = number * 10 + (byte - 0x30)

    cdef int read_sparse_map(self) noexcept nogil:
        cdef int64_t begun = self.left, count, offset, size, rest
        self.entry.extent_count = 0
        if self.map_number(&count) < 0:
            return -1
        if count > MAX_EXTENTS:
            return self.fail(b"sparse file of more than 262144 pieces")
        while count:
            if self.map_number(&offset) < 0 or self.map_number(&size) < 0 or self.add_extent(offset, size) < 0:
                return -1
            count -= 1
        rest = -(begun - self.left) & (BLOCK - 1)
        if rest > self.left:
            return self.fail_entry(b"bad map of a sparse file")
        self.left -= rest
        self.entry.size = self.left
        return self.skip(rest)

    cdef int check_extents(self) noexcept nogil:
        """Check that the extents ascend, do not overlap, lie within the file, and have the
        payload's total size.
        """
        cdef Entry *entry = &self.entry
        cdef Extent *extent
        cdef int64_t end = 0, sum = 0
        cdef size_t index
        for index in range(entry.extent_count):
            extent = &entry.extents[index]
            if extent.offset < end or extent.offset + extent.size > entry.real_size:
                return self.fail_entry(b"bad map of a sparse file")
            end = extent.offset + extent.size
            sum += extent.size
        if sum != self.left:
            return self.fail_entry(b"bad map of a sparse file")
        return 0

    # --- for Python -------------------------------------------------------------------------------

    def index(self, int64_t limit):
        """Every entry as (name, type, offset of the payload, size, link). Payloads are skipped.
        Raises ArchiveError if there are more than `limit` entries.

        A sparse file has size -1, because its payload is not its content.
        """
        cdef int got
        found = []
        while True:
            with nogil:
                got = self.next()
            if got < 0:
                self.raise_failure()
            if got == 0:
                return found
            if len(found) >= limit:
                raise ArchiveError(f"the archive has more than {limit} entries")
            found.append((
                <bytes>self.entry.name,
                chr(self.entry.type),
                self.entry.offset,
                -1 if self.entry.sparse else self.entry.size,
                <bytes>self.entry.link,
            ))

    def following(self):
        """Go to the next entry. Returns (type, offset of the payload, size) as in `index`, or None
        at the end. Raises ArchiveError.
        """
        cdef int got
        with nogil:
            got = self.next()
        if got < 0:
            self.raise_failure()
        if got == 0:
            return None
        return chr(self.entry.type), self.entry.offset, -1 if self.entry.sparse else self.entry.size

    def peek(self, size_t count):
        """The first `count` bytes of the payload (512 KiB at most), or fewer if it is shorter. They
        are not consumed.
        """
        cdef int got
        if <int64_t>count > self.left:
            count = <size_t>self.left
        with nogil:
            got = self.need(min_size(count, BUFFER))
        if got < 0:
            self.raise_failure()
        return <bytes>self.buffer[self.start:self.start + min_size(count, self.filled - self.start)]

    def take_buffered(self):
        """The bytes of the payload that were read ahead. The caller reads the rest from the source
        itself and then calls `passed`.
        """
        cdef size_t size = self.filled - self.start
        if <int64_t>size > self.left:
            size = <size_t>self.left
        data = <bytes>self.buffer[self.start:self.start + size]
        self.start += size
        self.position += size
        self.left -= size
        return data

    def passed(self, int64_t count):
        """Report that the caller has read `count` bytes of the payload from the source."""
        self.position += count
        self.left -= count

    def skim(self):
        """Read all entries and return their number, for the benchmark."""
        cdef int got
        with nogil:
            while True:
                got = self.next()
                if got <= 0:
                    break
            if got == 0:
                got = self.drain()
        if got < 0:
            self.raise_failure()
        return self.entries


cdef inline size_t min_size(size_t one, size_t other) noexcept nogil:
    return one if one < other else other


cdef inline size_t field_length(const uint8_t *field, size_t room) noexcept nogil:
    """Length of a text that ends at a NUL or fills its field."""
    cdef const uint8_t *end = <const uint8_t *>memchr(field, 0, room)
    return end - field if end != NULL else room


cdef int copy_name(char *target, const char *value, size_t size) noexcept nogil:
    if size > TAR_MAX_PATH or memchr(value, 0, size) != NULL:
        return -1
    memcpy(target, value, size)
    target[size] = 0
    return 0
