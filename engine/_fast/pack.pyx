# cython: language_level=3
"""Directory trees written as tar streams.

A container may change the tree meanwhile, so no link is followed, and no FIFO or device is ever
opened. Each name is opened with O_PATH | O_NOFOLLOW first, and a regular file is then opened for
reading through that descriptor in /proc/self/fd, which costs as much as opening the file. On a
mount that opens no devices (nodev, as those that archives are taken from) an entry whose d_type is
a regular file is opened directly instead, with O_NOFOLLOW and O_NONBLOCK. If it proves to be of
another type, it is opened the first way. If a FIFO has replaced it, the FIFO then had a reader for
a moment.

Headers are ustar, with a PAX header (POSIX.1, pax) in front for long names, large numbers and
attributes. Files with holes are GNU sparse files, version 1.0 (GNU tar manual, "Storing Sparse
Files"). Sockets are left out: tar has no type for them.

With `layer`, the tree is the upper directory of an overlay, and the stream that of a layer (OCI
Image Specification, "Representing Changes"): a character device 0/0 becomes `.wh.NAME`,
trusted.overlay.opaque becomes `.wh..wh..opq`. Empty mount points that the runtime created are left
out.

With `tar_split`, the data from which tarsplit.pyx makes the same stream again is written too. Then
nothing may change the tree: a file that shrinks is an error, and files are opened directly. An
entry named `.wh.*` is EINVAL, because in a layer it stands for a deletion.

Owns:    its descriptors; memory for names (walk.pyx), and at most 16 MiB for the names of hard
         links.
Threads: one at a time. The GIL is released for the whole of a call.
Raises:  OSError with the kernel's errno and the name. Files that vanish meanwhile are left out; a
         file that shrinks is padded with zeros.
"""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport (
    EACCES, EINTR, EINVAL, EIO, ENAMETOOLONG, ENODATA, ENOENT, ENOMEM, ENXIO, EOPNOTSUPP, EPERM, ERANGE, errno,
)
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset, strlen, strncmp

import os

from engine._fast.idmap cimport OVERFLOW, IdMap, free_ids, map_id, read_ids
from engine._fast.linux cimport (
    O_CLOEXEC, O_DIRECTORY, O_NOCTTY, O_NOFOLLOW, O_NONBLOCK, O_PATH, O_RDONLY, S_ISBLK, S_ISCHR,
    S_ISDIR, S_ISLNK, S_ISREG, S_ISSOCK, SEEK_DATA, SEEK_HOLE, close, close_own, fgetxattr, flistxattr, fstat,
    getxattr, hash_inode, is_whiteout, listxattr, lseek, major, minor, open, openat, pread, readlinkat,
    stat_t,
)
from engine._fast.tar cimport Recorder
from engine._fast.walk cimport MAX_PATH, Walk, is_mount_point, is_opaque

cdef enum:
    BLOCK = 512
    # of one sparse file; data after the last extent is sent with its holes
    MAX_EXTENTS = 16 * 1024
    MAX_LINKS = 16 * 1024 * 1024    # of names; beyond it, hard links are sent as separate files
    MAX_VALUE = 64 * 1024           # XATTR_SIZE_MAX

cdef int64_t MAX_OCTAL_7 = 0o7777777
cdef int64_t MAX_OCTAL_11 = 0o77777777777


cdef struct Extent:
    int64_t offset
    int64_t size

cdef struct Link:
    uint64_t device
    uint64_t inode
    size_t name             # offset of its name, plus one; 0: no entry


cdef void put_octal(uint8_t *field, size_t size, uint64_t number) noexcept nogil:
    """Write octal digits with leading zeros and a NUL.

    Of a larger number only the low digits are written; a PAX record then has the whole number.
    """
    cdef size_t at = size - 1
    field[at] = 0
    while at:
        at -= 1
        field[at] = 0x30 + <uint8_t>(number & 7)
        number >>= 3


cdef class Packer(Walk):
    """The tar stream of a file or directory tree, given by an O_PATH descriptor, under `name`.

    A directory `d` comes with everything below it: `d/`, `d/a`, ...; with its own entry only if
    `top` is true. With an empty `name` the entries are called `a`, with `/` they are called `/a`.
    `fine`: write times with nanoseconds. `layer`: write the stream of a layer, see the module.
    `ids`: ranges of uids and gids to translate, as (begin, other, count); others become 65534.
    """

    cdef bytes prefix_bytes
    cdef const char *prefix
    cdef bint with_top
    cdef bint fine
    cdef bint layer
    cdef int stage              # 0: the top, 1: below it, 2: the end mark, 3: done
    cdef bint single
    cdef uint8_t *head          # headers not yet returned
    cdef size_t head_room
    cdef size_t head_size
    cdef size_t head_at
    cdef uint8_t *pax
    cdef size_t pax_room
    cdef size_t pax_size
    cdef char *value            # of an attribute
    cdef char *attributes       # the list of their names
    cdef int file               # being read, or -1
    cdef Extent *extents
    cdef size_t extent_count
    cdef size_t extent
    cdef int64_t at             # in the extent
    cdef int64_t padding
    cdef Link *links
    cdef size_t links_room
    cdef size_t links_used
    cdef char *link_names
    cdef size_t link_names_used
    cdef size_t link_names_room
    cdef char *full
    cdef size_t full_room
    cdef char target[MAX_PATH + 1]
    cdef IdMap ids
    cdef Recorder recorder      # of tar-split data, or None
    cdef readonly list sockets
    """Paths of the sockets so far, with `tar_split`."""
    cdef bint recording
    cdef readonly int64_t content
    """Bytes of regular files and of links' targets so far, each counted once."""
    cdef readonly int64_t size
    """Bytes of the stream so far."""

    def __cinit__(
        self,
        int descriptor,
        bytes name not None,
        *,
        bint top=True,
        bint fine=False,
        bint layer=False,
        tar_split=None,
        ids=None,
    ):
        cdef stat_t found
        read_ids(&self.ids, ids)
        if tar_split is not None:
            self.sockets = []
            self.recording = True
            self.recorder = Recorder(tar_split)
        self.file = -1
        self.prefix_bytes = name
        self.prefix = self.prefix_bytes
        self.with_top = top
        self.fine = fine
        self.layer = layer
        if len(name) > MAX_PATH:
            raise OSError(ENAMETOOLONG, os.strerror(ENAMETOOLONG), os.fsdecode(name))
        self.value = <char *>malloc(MAX_VALUE)
        self.attributes = <char *>malloc(MAX_VALUE)
        self.extents = <Extent *>malloc(MAX_EXTENTS * sizeof(Extent))
        self.full = NULL
        if self.value == NULL or self.attributes == NULL or self.extents == NULL:
            raise MemoryError()
        if fstat(descriptor, &found) < 0:
            raise OSError(errno, os.strerror(errno), os.fsdecode(name))
        self.single = not S_ISDIR(found.st_mode)
        if self.single:
            self.top = os.dup(descriptor)
        else:
            self.top = openat(descriptor, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
            if self.top < 0:
                raise OSError(errno, os.strerror(errno), os.fsdecode(name))

    def __dealloc__(self):
        close_own(self.file)
        free(self.head)
        free(self.pax)
        free(self.value)
        free(self.attributes)
        free(self.extents)
        free(self.full)
        free(self.links)
        free(self.link_names)
        free_ids(&self.ids)

    def readinto(self, target not None):
        """Fill `target` with the next bytes of the stream. Returns their number, less than its size
        only at the end.
        """
        cdef Py_buffer room
        cdef int64_t got
        PyObject_GetBuffer(target, &room, PyBUF_WRITABLE)
        with nogil:
            got = self.fill(<uint8_t *>room.buf, room.len)
        PyBuffer_Release(&room)
        if got < 0:
            self.raise_failed()
        return got

    cdef object raise_failed(self):
        if self.recorder is not None:
            self.recorder.raise_failure()
        self.raise_failure()

    def read(self, size_t size):
        """Return the next `size` bytes of the stream, less only at the end."""
        cdef bytes piece = PyBytes_FromStringAndSize(NULL, size)
        cdef uint8_t *data = <uint8_t *>PyBytes_AS_STRING(piece)
        cdef int64_t got
        with nogil:
            got = self.fill(data, size)
        if got < 0:
            self.raise_failed()
        return piece if <size_t>got == size else piece[:got]

    def close(self):
        """Close the descriptors. From now on `read` returns b""."""
        while self.depth:
            self.leave()
        if self.file >= 0:
            close(self.file)
        if self.top >= 0:
            close(self.top)
        self.file = self.top = -1
        self.head_size = self.head_at = self.extent = self.extent_count = 0
        self.padding = 0
        self.stage = 3

    cdef int64_t fill(self, uint8_t *data, size_t room) noexcept nogil:
        cdef size_t done = 0, part
        cdef ssize_t got
        cdef Extent *extent
        while done < room:
            if self.head_at < self.head_size:
                part = self.head_size - self.head_at
                if part > room - done:
                    part = room - done
                memcpy(data + done, self.head + self.head_at, part)
                self.head_at += part
                done += part
            elif self.extent < self.extent_count:
                extent = &self.extents[self.extent]
                if self.at == extent.size:
                    self.extent += 1
                    self.at = 0
                    continue
                part = room - done
                if <int64_t>part > extent.size - self.at:
                    part = <size_t>(extent.size - self.at)
                got = pread(self.file, data + done, part, extent.offset + self.at)
                if got < 0:
                    if errno == EINTR:
                        continue
                    return self.fail(errno)
                if got == 0:            # the file shrank; its header is already sent
                    if self.recording:
                        return self.fail(EIO)
                    memset(data + done, 0, part)
                    got = part
                self.at += got
                done += got
            elif self.padding:
                part = <size_t>self.padding
                if part > room - done:
                    part = room - done
                memset(data + done, 0, part)
                self.padding -= part
                done += part
            elif self.stage == 3:
                break
            elif self.step() < 0 or (self.recording and self.record_entry() < 0):
                return -1
        self.size += done
        return done

    # --- tar-split data ---------------------------------------------------------------------------

    cdef int record_entry(self) noexcept nogil:
        """Record what `step` has prepared."""
        cdef size_t index
        cdef Extent *extent
        if self.recorder.put(self.head, self.head_size) < 0:
            return -1
        if self.extent_count:
            if self.length > MAX_PATH:
                return self.record_contents()
            for index in range(self.extent_count):
                extent = &self.extents[index]
                if extent.size and (
                    self.recorder.put_file(self.path, <uint32_t>self.length, extent.offset, extent.size) < 0
                ):
                    return -1
            if self.recorder.put(NULL, <size_t>self.padding) < 0:
                return -1
        return self.recorder.flush() if self.stage == 3 else 0

    cdef int record_contents(self) noexcept nogil:
        """Record the bytes of a file whose path is longer than the kernel takes at once."""
        cdef size_t index
        cdef int64_t at, wanted
        cdef ssize_t got
        for index in range(self.extent_count):
            at = 0
            while at < self.extents[index].size:
                wanted = self.extents[index].size - at
                if wanted > MAX_VALUE:
                    wanted = MAX_VALUE
                got = pread(self.file, self.value, wanted, self.extents[index].offset + at)
                if got <= 0:
                    if got < 0 and errno == EINTR:
                        continue
                    return self.fail(errno if got < 0 else EIO)
                if self.recorder.put(<uint8_t *>self.value, got) < 0:
                    return -1
                at += got
        if self.recorder.put(NULL, <size_t>self.padding) < 0:
            return -1
        return self.recorder.flush() if self.stage == 3 else 0

    # --- the walk ---------------------------------------------------------------------------------

    cdef int step(self) noexcept nogil:
        """Prepare the next entry, or the end mark."""
        cdef int parent, got
        self.head_size = self.head_at = 0
        self.extent = self.extent_count = 0
        if self.file >= 0:
            close(self.file)
            self.file = -1
        if self.stage == 0:
            return self.begin()
        if self.stage == 1:
            while self.depth:
                got = self.next(&parent)
                if got < 0:
                    return -1
                if got == 0:
                    self.leave()
                    continue
                return self.entry(parent)
            self.stage = 2
        self.stage = 3
        if self.reserve_head(2 * BLOCK) < 0:
            return -1
        memset(self.head, 0, 2 * BLOCK)
        self.head_size = 2 * BLOCK
        return 0

    cdef int begin(self) noexcept nogil:
        cdef stat_t found
        cdef int fd
        if fstat(self.top, &found) < 0:
            return self.fail(errno)
        self.stage = 2 if self.single else 1
        if self.single:
            return self.describe(self.top, &found, False)
        if self.with_top and self.describe(self.top, &found, False) < 0:
            return -1
        fd = openat(self.top, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
        if fd < 0:
            return self.fail(errno)
        return self.enter(fd)

    cdef int entry(self, int parent) noexcept nogil:
        cdef stat_t found
        cdef int below, status, fd
        if self.recording and strncmp(self.name, b".wh.", 4) == 0:
            return self.fail(EINVAL)        # the stream would be that of a deletion
        if self.is_file and (self.recording or self.levels[self.depth - 1].nodev):
            status = self.file_entry(parent)
            if status <= 0:
                return status
        fd = openat(parent, self.name, O_PATH | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return 0 if errno == ENOENT else self.fail(errno)
        if fstat(fd, &found) < 0:
            status = self.fail(errno)
            close(fd)
            return status
        if self.layer and (is_whiteout(&found) or is_mount_point(self.path, parent, self.name, &found)):
            close(fd)
            return self.white_out(b"", self.name) if is_whiteout(&found) else 0
        if S_ISSOCK(found.st_mode):
            close(fd)
            if self.recording:
                with gil:
                    self.sockets.append((<bytes>self.path)[:self.length])
            return 0
        status = self.describe(fd, &found, False)
        if status == 0 and S_ISDIR(found.st_mode):
            below = openat(fd, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
            if below < 0:
                status = 0 if errno == ENOENT else self.fail(errno)
            else:
                if self.layer and is_opaque(below):
                    status = self.white_out(self.name, b".wh..opq")
                if status == 0:
                    status = self.enter(below)
                else:
                    close(below)
        close(fd)
        return status

    cdef int file_entry(self, int parent) noexcept nogil:
        """Send an entry whose d_type is a regular file.

        Returns 0, 1 if the file has been replaced by another type, or -1 on failure.
        """
        cdef stat_t found
        cdef int fd = openat(parent, self.name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)
        if fd < 0:
            return 1
        if fstat(fd, &found) < 0 or not S_ISREG(found.st_mode) or (
            self.layer and is_mount_point(self.path, parent, self.name, &found)
        ):
            close(fd)
            return 1
        return self.describe(fd, &found, True)

    cdef int white_out(self, const char *directory, const char *name) noexcept nogil:
        """An empty file `.wh.NAME` beside the entry, or in `directory` if that is not empty."""
        cdef stat_t none
        cdef size_t above = self.length - strlen(self.name), length = strlen(name), at
        memset(&none, 0, sizeof(none))
        none.st_nlink = 1
        if self.reserve_full(self.length + length + 8) < 0:
            return -1
        self.pax_size = 0
        memcpy(self.full, self.path, above)
        at = above
        if directory[0]:
            memcpy(self.full + at, directory, strlen(directory))
            at += strlen(directory)
            self.full[at] = b"/"
            at += 1
        memcpy(self.full + at, b".wh.", 4)
        memcpy(self.full + at + 4, name, length + 1)
        none.st_mode = 0o644
        return self.write_head(b"0", &none, at + 4 + length, b"", 0)

    # --- an entry ---------------------------------------------------------------------------------

    cdef int reserve_full(self, size_t size) noexcept nogil:
        cdef void *room
        if size > self.full_room:
            room = realloc(self.full, size + MAX_PATH)
            if room == NULL:
                return self.fail(ENOMEM)
            self.full = <char *>room
            self.full_room = size + MAX_PATH
        return 0

    cdef ssize_t full_name(self, bint directory) noexcept nogil:
        """Write the entry's name in the archive to `full`. Returns its length, or -1."""
        cdef size_t length = strlen(self.prefix)
        if self.reserve_full(length + self.length + 3) < 0:
            return -1
        memcpy(self.full, self.prefix, length)
        if self.length:
            if length and self.full[length - 1] != b"/":
                self.full[length] = b"/"
                length += 1
            memcpy(self.full + length, self.path, self.length)
            length += self.length
        if directory and (length == 0 or self.full[length - 1] != b"/"):
            self.full[length] = b"/"
            length += 1
        self.full[length] = 0
        return length

    cdef int describe(self, int fd, stat_t *found, bint readable) noexcept nogil:
        """Write the headers of an open entry, and set up a file's content for `fill`.

        `readable`: `fd` is a regular file open for reading, which the packer owns from now on.
        Otherwise `fd` is an O_PATH descriptor of any type.
        """
        cdef ssize_t length = self.full_name(S_ISDIR(found.st_mode))
        cdef const char *first = NULL
        cdef char path[32]
        cdef ssize_t size
        if readable:
            self.file = fd          # `step` closes it
        if length < 0:
            return -1
        self.pax_size = 0
        if found.st_nlink > 1 and not S_ISDIR(found.st_mode):
            if self.linked(found, length, &first) < 0:
                return -1
            if first != NULL:
                return self.write_head(b"1", found, length, first, 0)
        snprintf(path, sizeof(path), b"/proc/self/fd/%d", fd)
        if S_ISREG(found.st_mode):
            if not readable:
                self.file = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)
                if self.file < 0 or fstat(self.file, found) < 0:
                    return self.fail(errno)
            if self.keep_attributes(self.file, NULL) < 0:
                return self.fail(errno)
            return self.describe_file(found, length)
        if S_ISDIR(found.st_mode):
            if self.keep_attributes(-1, path) < 0:
                return -1
            return self.write_head(b"5", found, length, b"", 0)
        if S_ISLNK(found.st_mode):
            size = readlinkat(fd, b"", self.target, MAX_PATH)
            if size < 0:
                return self.fail(errno)
            self.target[size] = 0
            self.content += size
            if self.keep_attributes(-1, path) < 0:
                return -1
            return self.write_head(b"2", found, length, self.target, 0)
        if self.keep_attributes(-1, path) < 0:
            return -1
        return self.write_head(
            b"3" if S_ISCHR(found.st_mode) else b"4" if S_ISBLK(found.st_mode) else b"6", found, length, b"", 0
        )

    cdef int describe_file(self, const stat_t *found, size_t length) noexcept nogil:
        cdef int64_t size = found.st_size, sum = 0
        cdef size_t index, map_size = 0, start
        cdef char number[48]
        cdef char *cut
        self.content += size
        self.extents[0].offset = 0
        self.extents[0].size = size
        self.extent_count = 1
        self.at = 0
        if size > 2 * BLOCK and found.st_blocks * 512 < size:
            self.find_extents(size)
        if self.extent_count == 1 and self.extents[0].size == size:
            self.padding = -size & (BLOCK - 1)
            if size == 0:
                self.extent_count = 0
            return self.write_head(b"0", found, length, b"", size)
        # Like GNU tar, end the map of a file that ends in a hole with an empty extent.
        for index in range(self.extent_count):
            sum += self.extents[index].size
            map_size += <size_t>snprintf(
                number,
                sizeof(number),
                b"%lld\n%lld\n",
                <long long>self.extents[index].offset,
                <long long>self.extents[index].size,
            )
        map_size += <size_t>snprintf(number, sizeof(number), b"%zu\n", self.extent_count)
        map_size += -map_size & (BLOCK - 1)
        self.padding = -sum & (BLOCK - 1)
        if (
            self.add(b"GNU.sparse.major", b"1", 1) < 0
            or self.add(b"GNU.sparse.minor", b"0", 1) < 0
            or self.add(b"GNU.sparse.name", self.full, length) < 0
            or self.add_number(b"GNU.sparse.realsize", size) < 0
        ):
            return -1
        if self.write_head(b"0", found, length, b"", sum + map_size) < 0:
            return -1
        if self.reserve_head(self.head_size + map_size + 1) < 0:
            return -1
        start = self.head_size
        memset(self.head + start, 0, map_size)
        start += <size_t>snprintf(<char *>self.head + start, sizeof(number), b"%zu\n", self.extent_count)
        for index in range(self.extent_count):
            start += <size_t>snprintf(
                <char *>self.head + start,
                sizeof(number),
                b"%lld\n%lld\n",
                <long long>self.extents[index].offset,
                <long long>self.extents[index].size,
            )
        self.head[start] = 0
        self.head_size += map_size
        return 0

    cdef void find_extents(self, int64_t size) noexcept nogil:
        """Find the extents of data. If the file system does not support SEEK_DATA, the whole file
        is one extent.
        """
        cdef int64_t data = 0, hole
        cdef size_t count = 0
        while True:
            data = lseek(self.file, data, SEEK_DATA)
            if data < 0 or data >= size:
                break
            if count == MAX_EXTENTS - 1:
                hole = size
            else:
                hole = lseek(self.file, data, SEEK_HOLE)
                if hole < 0 or hole > size:
                    hole = size
            self.extents[count].offset = data
            self.extents[count].size = hole - data
            count += 1
            data = hole
            if hole == size:
                break
        if data < 0 and errno != ENXIO:     # ENXIO: only a hole is left
            return
        if count == 0 or self.extents[count - 1].offset + self.extents[count - 1].size < size:
            self.extents[count].offset = size
            self.extents[count].size = 0
            count += 1
        self.extent_count = count

    cdef int linked(self, const stat_t *found, size_t length, const char **first) noexcept nogil:
        """Look up a file with several names.

        `first` becomes the name under which it was sent; unchanged if it was not sent yet.
        """
        cdef size_t at, wanted
        cdef void *room
        if self.links_used * 2 >= self.links_room and self.grow_links() < 0:
            return -1
        at = hash_inode(found.st_dev, found.st_ino) & (self.links_room - 1)
        while self.links[at].name:
            if self.links[at].inode == found.st_ino and self.links[at].device == found.st_dev:
                first[0] = self.link_names + self.links[at].name - 1
                return 0
            at = (at + 1) & (self.links_room - 1)
        if self.link_names_used + length + 1 > MAX_LINKS:
            return 0
        if self.link_names_used + length + 1 > self.link_names_room:
            wanted = self.link_names_room * 2 + length + MAX_PATH
            room = realloc(self.link_names, wanted)
            if room == NULL:
                return self.fail(ENOMEM)
            self.link_names = <char *>room
            self.link_names_room = wanted
        memcpy(self.link_names + self.link_names_used, self.full, length + 1)
        self.links[at].device = found.st_dev
        self.links[at].inode = found.st_ino
        self.links[at].name = self.link_names_used + 1
        self.links_used += 1
        self.link_names_used += length + 1
        return 0

    cdef int grow_links(self) noexcept nogil:
        cdef size_t wanted = self.links_room * 2 if self.links_room else 256, index, at
        cdef Link *room = <Link *>malloc(wanted * sizeof(Link))
        if room == NULL:
            return self.fail(ENOMEM)
        memset(room, 0, wanted * sizeof(Link))
        for index in range(self.links_room):
            if self.links[index].name:
                at = hash_inode(self.links[index].device, self.links[index].inode) & (wanted - 1)
                while room[at].name:
                    at = (at + 1) & (wanted - 1)
                room[at] = self.links[index]
        free(self.links)
        self.links = room
        self.links_room = wanted
        return 0

    # --- headers ----------------------------------------------------------------------------------

    cdef int keep_attributes(self, int fd, const char *path) noexcept nogil:
        """Add a PAX record for each extended attribute, except overlayfs's and the kernel's
        `system.`.
        """
        cdef ssize_t size, got
        cdef char key[300]
        cdef const char *name = self.attributes
        # Ask for the size first. It is nearly always 0, and the kernel allocates as much memory as
        # the caller offers.
        size = flistxattr(fd, NULL, 0) if fd >= 0 else listxattr(path, NULL, 0)
        if size > 0:
            if fd >= 0:
                size = flistxattr(fd, self.attributes, MAX_VALUE)
            else:
                size = listxattr(path, self.attributes, MAX_VALUE)
        if size < 0:
            return 0 if errno in (EOPNOTSUPP, EPERM, EACCES, ENOENT, ERANGE) else self.fail(errno)
        while name < self.attributes + size:
            if strncmp(name, b"trusted.overlay.", 16) != 0 and strncmp(name, b"system.", 7) != 0:
                if fd >= 0:
                    got = fgetxattr(fd, name, self.value, MAX_VALUE)
                else:
                    got = getxattr(path, name, self.value, MAX_VALUE)
                if got < 0:
                    if errno not in (EOPNOTSUPP, EPERM, EACCES, ENOENT, ENODATA, ERANGE):
                        return self.fail(errno)
                else:
                    snprintf(key, sizeof(key), b"SCHILY.xattr.%s", name)
                    if self.add(key, self.value, got) < 0:
                        return -1
            name += strlen(name) + 1
        return 0

    cdef int add(self, const char *key, const char *value, size_t size) noexcept nogil:
        """Add a PAX record: its length in decimal, which counts itself, `key=value` and a
        newline.
        """
        cdef size_t rest = strlen(key) + size + 3, length = rest + 1, at, wanted
        cdef size_t digits = 1, power = 10
        cdef void *room
        while length >= power:
            digits += 1
            power *= 10
            length = rest + digits
        length = rest + digits
        if length >= power:
            length += 1
        if self.pax_size + length + BLOCK > self.pax_room:
            wanted = self.pax_room * 2 + length + BLOCK
            room = realloc(self.pax, wanted)
            if room == NULL:
                return self.fail(ENOMEM)
            self.pax = <uint8_t *>room
            self.pax_room = wanted
        at = self.pax_size
        at += <size_t>snprintf(<char *>self.pax + at, self.pax_room - at, b"%zu %s=", length, key)
        memcpy(self.pax + at, value, size)
        self.pax[at + size] = b"\n"
        self.pax_size += length
        return 0

    cdef int add_number(self, const char *key, int64_t number) noexcept nogil:
        cdef char text[32]
        return self.add(key, text, <size_t>snprintf(text, sizeof(text), b"%lld", <long long>number))

    cdef int reserve_head(self, size_t size) noexcept nogil:
        cdef void *room
        if size > self.head_room:
            room = realloc(self.head, size + 4096)
            if room == NULL:
                return self.fail(ENOMEM)
            self.head = <uint8_t *>room
            self.head_room = size + 4096
        return 0

    cdef int write_head(
        self, char type, const stat_t *found, size_t length, const char *link, int64_t size
    ) noexcept nogil:
        """Append the header of entry `full` to `head`, after a PAX header if it needs one."""
        cdef size_t link_length = strlen(link), padded
        cdef char text[48]
        cdef stat_t translated
        cdef int digits
        cdef int64_t seconds = found.st_mtim.tv_sec, fraction = found.st_mtim.tv_nsec if self.fine else 0
        if self.ids.uids != NULL:
            translated = found[0]
            if not map_id(self.ids.uids, self.ids.uid_count, &translated.st_uid):
                translated.st_uid = OVERFLOW
            if not map_id(self.ids.gids, self.ids.gid_count, &translated.st_gid):
                translated.st_gid = OVERFLOW
            found = &translated
        if length > 100 and self.add(b"path", self.full, length) < 0:
            return -1
        if link_length > 100 and self.add(b"linkpath", link, link_length) < 0:
            return -1
        if size > MAX_OCTAL_11 and self.add_number(b"size", size) < 0:
            return -1
        if found.st_uid > MAX_OCTAL_7 and self.add_number(b"uid", found.st_uid) < 0:
            return -1
        if found.st_gid > MAX_OCTAL_7 and self.add_number(b"gid", found.st_gid) < 0:
            return -1
        if fraction or seconds < 0 or seconds > MAX_OCTAL_11:
            if seconds < 0 and fraction:        # -1.25 is stored as -2 s and 750,000,000 ns
                seconds += 1
                fraction = 1000000000 - fraction
                digits = snprintf(text, sizeof(text), b"-%lld.%09lld", <long long>-seconds, <long long>fraction)
            elif fraction:
                digits = snprintf(text, sizeof(text), b"%lld.%09lld", <long long>seconds, <long long>fraction)
            else:
                digits = snprintf(text, sizeof(text), b"%lld", <long long>seconds)
            if fraction:
                while text[digits - 1] == b"0":
                    digits -= 1
            if self.add(b"mtime", text, digits) < 0:
                return -1
        padded = self.pax_size + (-self.pax_size & (BLOCK - 1)) if self.pax_size else 0
        if self.reserve_head(self.head_size + padded + 2 * BLOCK) < 0:
            return -1
        if self.pax_size:
            self.write_block(b"x", b"././@PaxHeader", 14, b"", 0, NULL, self.pax_size)
            memset(self.head + self.head_size, 0, padded)
            memcpy(self.head + self.head_size, self.pax, self.pax_size)
            self.head_size += padded
        self.write_block(type, self.full, length, link, link_length, found, size)
        return 0

    cdef void write_block(
        self,
        char type,
        const char *name,
        size_t length,
        const char *link,
        size_t link_length,
        const stat_t *found,
        int64_t size,
    ) noexcept nogil:
        cdef uint8_t *block = self.head + self.head_size
        cdef uint32_t sum = 0
        cdef int at
        memset(block, 0, BLOCK)
        memcpy(block, name, length if length < 100 else 100)
        put_octal(block + 100, 8, found.st_mode & 0o7777 if found != NULL else 0o644)
        put_octal(block + 108, 8, found.st_uid if found != NULL else 0)
        put_octal(block + 116, 8, found.st_gid if found != NULL else 0)
        put_octal(block + 124, 12, size)
        put_octal(block + 136, 12, found.st_mtim.tv_sec if found != NULL and found.st_mtim.tv_sec > 0 else 0)
        memset(block + 148, b" ", 8)
        block[156] = type
        memcpy(block + 157, link, link_length if link_length < 100 else 100)
        memcpy(block + 257, b"ustar\x0000", 8)
        if type == b"3" or type == b"4":
            put_octal(block + 329, 8, major(found.st_rdev))
            put_octal(block + 337, 8, minor(found.st_rdev))
        for at in range(BLOCK):
            sum += block[at]
        put_octal(block + 148, 7, sum)
        self.head_size += BLOCK
