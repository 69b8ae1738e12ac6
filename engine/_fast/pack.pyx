# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Trees of files as they lie on the disk: written as a tar stream, and told as the changes of a container.

A tree is walked by descriptors, and no link is followed. Each name is opened with O_PATH | O_NOFOLLOW first, and only what is a regular file then is
opened to be read, through that very descriptor: no FIFO or device is ever opened, whatever a container puts in their places meanwhile. That is two
opens, of which /proc's costs as much as the file. So where a mount opens no devices (nodev, as of those that an archive is taken from), what its
directory calls a file is opened at once, O_NOFOLLOW and O_NONBLOCK, and gone about in the other way when it turns out to be something else: a FIFO
that a container has put there meanwhile may have had a reader for an instant. The names of a directory are read whole and sorted, so one tree is one stream.

A path may be longer than the kernel takes at once: its directory is open, and what was closed on the way down is opened again in steps.

Headers are ustar's, with a PAX header in front where those can't say it (long names, large numbers, attributes; POSIX.1, pax); files with holes
are GNU's sparse files, version 1.0 (GNU tar manual, "Storing Sparse Files"). Sockets are left out: tar has no form for them.

Of an overlay's upper directory (`layer`) the stream is that of a layer (OCI image specification, "Representing Changes"): a character device 0/0 becomes
`.wh.NAME`, trusted.overlay.opaque becomes `.wh..wh..opq`. The empty mount points that a runtime makes are nobody's change.

Owns:    its descriptors; memory for the names on the way from the top to where it is, at most 128 MiB, and 16 MiB for those of hard links.
Threads: one at a time. The GIL is released for the whole of a call.
Raises:  OSError with the kernel's errno and the name. What vanishes meanwhile is left out; a file that shrinks is filled up with zeros.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport E2BIG, EACCES, EINTR, ELOOP, ENAMETOOLONG, ENODATA, ENOENT, ENOMEM, ENOTDIR, EOPNOTSUPP, EPERM, ERANGE, errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset, strcmp, strlen, strncmp

import os

from engine._fast.linux cimport RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, openat2

cdef extern from "<fcntl.h>" nogil:
    enum:
        AT_SYMLINK_NOFOLLOW
        O_CLOEXEC
        O_DIRECTORY
        O_NOATIME
        O_NOCTTY
        O_NOFOLLOW
        O_NONBLOCK
        O_PATH
        O_RDONLY
    int open(const char *path, int flags, ...)
    int openat(int directory, const char *path, int flags, ...)

cdef extern from "<unistd.h>" nogil:
    enum:
        SEEK_DATA
        SEEK_HOLE
    int close(int fd)
    int64_t lseek(int fd, int64_t offset, int whence)
    ssize_t pread(int fd, void *data, size_t size, int64_t offset)
    ssize_t readlinkat(int directory, const char *path, char *target, size_t size)
    long syscall(long number, ...)

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_getdents64

cdef extern from "<sys/stat.h>" nogil:
    cdef struct timespec:
        int64_t tv_sec
        int64_t tv_nsec
    cdef struct stat_t "stat":
        uint32_t st_mode
        uint32_t st_uid
        uint32_t st_gid
        int64_t st_size
        int64_t st_blocks
        uint64_t st_nlink
        uint64_t st_rdev
        uint64_t st_dev
        uint64_t st_ino
        timespec st_mtim
    int fstat(int fd, stat_t *found)
    int fstatat(int directory, const char *path, stat_t *found, int flags)
    bint S_ISCHR(uint32_t mode)
    bint S_ISBLK(uint32_t mode)
    bint S_ISDIR(uint32_t mode)
    bint S_ISFIFO(uint32_t mode)
    bint S_ISLNK(uint32_t mode)
    bint S_ISREG(uint32_t mode)
    bint S_ISSOCK(uint32_t mode)

cdef extern from "<sys/statvfs.h>" nogil:
    cdef struct statvfs_t "statvfs":
        unsigned long f_flag
    enum:
        ST_NODEV
    int fstatvfs(int fd, statvfs_t *found)

cdef extern from "<dirent.h>" nogil:
    enum:
        DT_FIFO
        DT_LNK
        DT_REG
        DT_SOCK

cdef extern from "<sys/sysmacros.h>" nogil:
    uint32_t major(uint64_t device)
    uint32_t minor(uint64_t device)

cdef extern from "<sys/xattr.h>" nogil:
    ssize_t fgetxattr(int fd, const char *name, void *value, size_t size)
    ssize_t flistxattr(int fd, char *list, size_t size)
    ssize_t listxattr(const char *path, char *list, size_t size)
    ssize_t getxattr(const char *path, const char *name, void *value, size_t size)

cdef extern from *:
    """
    #include <stdlib.h>
    #include <string.h>

    static int pack_compare(const void *one, const void *other, void *names)
    {
        return strcmp((const char *)names + *(const size_t *)one, (const char *)names + *(const size_t *)other);
    }

    static void pack_sort(size_t *order, size_t count, const char *names)
    {
        qsort_r(order, count, sizeof *order, pack_compare, (void *)names);
    }
    """
    void sort_names "pack_sort"(size_t *order, size_t count, const char *names) nogil

cdef enum:
    BLOCK = 512
    MAX_PATH = 4095                 # that the kernel takes at once
    LONGEST = 256 * 1024            # bytes of a path: more than once in a PAX header, of which Go reads 1 MiB
    OPEN_LEVELS = 64                # directories that stay open on the way down
    DIRENTS = 32 * 1024
    MAX_EXTENTS = 16 * 1024         # of one sparse file; what comes behind the last is sent with its holes
    MAX_NAMES = 128 * 1024 * 1024
    MAX_CHANGES = 128 * 1024 * 1024 # bytes of their paths together: a container may have as many files as it likes, as deep as it likes
    MAX_LINKS = 16 * 1024 * 1024    # beyond, a further name of a file is sent as a file of its own
    MAX_VALUE = 64 * 1024           # XATTR_SIZE_MAX
    MAX_LAYERS = 512

cdef uint64_t BENEATH = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS

cdef int64_t MAX_OCTAL_7 = 0o7777777
cdef int64_t MAX_OCTAL_11 = 0o77777777777


cdef inline bint is_dot(const char *name) noexcept nogil:
    return name[0] == b"." and (name[1] == 0 or (name[1] == b"." and name[2] == 0))


cdef inline bint is_whiteout(const stat_t *found) noexcept nogil:
    return S_ISCHR(found.st_mode) and found.st_rdev == 0


cdef bint is_opaque(int directory) noexcept nogil:
    cdef char value[8]
    return fgetxattr(directory, b"trusted.overlay.opaque", value, sizeof(value)) == 1 and value[0] == b"y"


cdef bint is_nodev(int directory) noexcept nogil:
    cdef statvfs_t mount
    return fstatvfs(directory, &mount) == 0 and mount.f_flag & ST_NODEV != 0


cdef bint is_empty(int parent, const char *name) noexcept nogil:
    """Whether that directory has nothing in it."""
    cdef uint8_t found[1024]
    cdef long size
    cdef size_t at
    cdef bint empty = True
    cdef int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
    if fd < 0:
        return False
    while empty:
        size = syscall(SYS_getdents64, fd, found, sizeof(found))
        if size <= 0:
            break
        at = 0
        while at < <size_t>size:
            if not is_dot(<char *>found + at + 19):
                empty = False
            at += (<uint16_t *>(found + at + 16))[0]
    close(fd)
    return empty


cdef bint is_mount_point(const char *path, int parent, const char *name, const stat_t *found) noexcept nogil:
    """One that a runtime makes where the image has none, and that holds nothing."""
    if S_ISDIR(found.st_mode):
        return (strcmp(path, b"dev") == 0 or strcmp(path, b"proc") == 0 or strcmp(path, b"sys") == 0) and is_empty(parent, name)
    return S_ISREG(found.st_mode) and found.st_size == 0 and (
        strcmp(path, b"etc/hosts") == 0 or strcmp(path, b"etc/hostname") == 0 or strcmp(path, b"etc/resolv.conf") == 0
    )


cdef struct Frame:
    int fd              # of the directory; -1 while it is closed
    size_t path         # length of its path
    size_t next         # index of the next of its names
    size_t end
    size_t names        # where they begin
    bint nodev          # no device opens in it


cdef class _Walk:
    """The way from a directory down to where the walk is: names in `names`, each behind its d_type, their order per directory in `order`."""

    cdef int top
    cdef Frame *frames
    cdef size_t depth
    cdef size_t frames_room
    cdef char *names
    cdef size_t names_used
    cdef size_t names_room
    cdef size_t *order
    cdef size_t order_used
    cdef size_t order_room
    cdef uint8_t *found
    cdef char *path
    cdef size_t path_room
    cdef size_t length
    cdef const char *name           # the last part of `path`
    cdef bint is_file               # as its directory says
    cdef bint is_plain              # likewise: nothing that could be a directory or a whiteout
    cdef int error
    cdef char failed[MAX_PATH + 1]

    def __cinit__(self):
        self.top = -1
        self.path_room = MAX_PATH + 1
        self.path = <char *>malloc(self.path_room)
        self.found = <uint8_t *>malloc(DIRENTS)
        if self.path == NULL or self.found == NULL:
            raise MemoryError()
        self.path[0] = 0

    def __dealloc__(self):
        while self.depth:
            self.leave()
        if self.top >= 0:
            close(self.top)
        free(self.path)
        free(self.frames)
        free(self.names)
        free(self.order)
        free(self.found)

    cdef int fail(self, int number) noexcept nogil:
        if self.error == 0:
            self.error = number
            snprintf(self.failed, sizeof(self.failed), b"%s", self.path)
        return -1

    cdef object raise_failure(self):
        raise OSError(self.error, os.strerror(self.error), os.fsdecode(<bytes>self.failed))

    cdef int enter(self, int fd) noexcept nogil:
        """Go down into the directory at `path`, whose descriptor is used up."""
        cdef Frame *frame
        cdef void *room
        if self.depth == self.frames_room:
            room = realloc(self.frames, (self.frames_room + 64) * sizeof(Frame))
            if room == NULL:
                close(fd)
                return self.fail(ENOMEM)
            self.frames = <Frame *>room
            self.frames_room += 64
        if self.depth >= OPEN_LEVELS:
            frame = &self.frames[self.depth - OPEN_LEVELS]
            if frame.fd >= 0:
                close(frame.fd)
                frame.fd = -1
        frame = &self.frames[self.depth]
        frame.fd = fd
        frame.path = self.length
        frame.names = self.names_used
        frame.next = frame.end = self.order_used
        frame.nodev = is_nodev(fd)
        self.depth += 1
        return self.read_names(frame)

    cdef int read_names(self, Frame *frame) noexcept nogil:
        cdef long size
        cdef size_t at, length
        cdef const char *name
        cdef char type
        cdef void *room
        while True:
            size = syscall(SYS_getdents64, frame.fd, self.found, <size_t>DIRENTS)
            if size < 0:
                if errno == EINTR:
                    continue
                if errno == ENOENT:         # it was removed
                    break
                return self.fail(errno)
            if size == 0:
                break
            at = 0
            while at < <size_t>size:
                name = <const char *>(self.found + at + 19)
                type = <char>self.found[at + 18]
                at += (<uint16_t *>(self.found + at + 16))[0]
                if is_dot(name):
                    continue
                length = strlen(name) + 1
                if self.names_used + 1 + length > self.names_room:
                    if self.names_room >= MAX_NAMES:
                        return self.fail(E2BIG)
                    room = realloc(self.names, self.names_room * 2 if self.names_room else 64 * 1024)
                    if room == NULL:
                        return self.fail(ENOMEM)
                    self.names = <char *>room
                    self.names_room = self.names_room * 2 if self.names_room else 64 * 1024
                if self.order_used == self.order_room:
                    room = realloc(self.order, (self.order_room * 2 if self.order_room else 4096) * sizeof(size_t))
                    if room == NULL:
                        return self.fail(ENOMEM)
                    self.order = <size_t *>room
                    self.order_room = self.order_room * 2 if self.order_room else 4096
                self.names[self.names_used] = type
                self.names_used += 1
                memcpy(self.names + self.names_used, name, length)
                self.order[self.order_used] = self.names_used
                self.order_used += 1
                self.names_used += length
        frame.end = self.order_used
        sort_names(self.order + frame.next, frame.end - frame.next, self.names)
        return 0

    cdef void leave(self) noexcept nogil:
        cdef Frame *frame
        self.depth -= 1
        frame = &self.frames[self.depth]
        if frame.fd >= 0:
            close(frame.fd)
        self.names_used = frame.names
        self.order_used = self.frames[self.depth - 1].end if self.depth else 0

    cdef int open_again(self) noexcept nogil:
        """The directory at `path`, in as many steps as the kernel needs; -1."""
        cdef int fd, above = self.top
        cdef size_t at = 0, end
        cdef const char *part
        cdef char kept
        while True:
            end = self.length
            if end - at > MAX_PATH:
                end = at + MAX_PATH
                while self.path[end] != b"/":
                    end -= 1
            kept = self.path[end]
            self.path[end] = 0
            part = self.path + at
            if end == at:
                part = b"."
            fd = openat2(above, part, O_RDONLY | O_DIRECTORY | O_CLOEXEC, BENEATH)
            self.path[end] = kept
            if above != self.top:
                close(above)
            if fd < 0 or end == self.length:
                return fd
            above = fd
            at = end + 1

    cdef int next(self, int *parent) noexcept nogil:
        """The next name: `path`, `name` and the descriptor of its directory. 1, 0 when the directory has no more, -1.

        One of more than 256 KiB is an error.
        """
        cdef Frame *frame = &self.frames[self.depth - 1]
        cdef const char *name
        cdef size_t length, at
        cdef void *room
        self.length = frame.path
        self.path[self.length] = 0
        if frame.next == frame.end:
            return 0
        if frame.fd < 0:
            # By its path, without links: a container may have put another directory of its own there meanwhile, no more.
            frame.fd = self.open_again()
            if frame.fd < 0:
                if errno == ENOENT or errno == ENOTDIR or errno == ELOOP:
                    frame.next = frame.end
                    return 0
                return self.fail(errno)
            frame.nodev = is_nodev(frame.fd)
        name = self.names + self.order[frame.next]
        self.is_file = (name - 1)[0] == DT_REG
        self.is_plain = self.is_file or (name - 1)[0] == DT_LNK or (name - 1)[0] == DT_FIFO or (name - 1)[0] == DT_SOCK
        frame.next += 1
        length = strlen(name)
        at = self.length + 1 if self.length else 0
        if at + length >= self.path_room:
            if at + length > LONGEST:
                return self.fail(ENAMETOOLONG)
            room = realloc(self.path, self.path_room * 2)
            if room == NULL:
                return self.fail(ENOMEM)
            self.path = <char *>room
            self.path_room *= 2
        if at:
            self.path[self.length] = b"/"
        memcpy(self.path + at, name, length + 1)
        self.length = at + length
        self.name = self.path + at
        parent[0] = frame.fd
        return 1


# --- the stream -----------------------------------------------------------------------------------------------------

cdef struct Extent:
    int64_t offset
    int64_t size

cdef struct Link:
    uint64_t device
    uint64_t inode
    size_t name             # where it begins, plus one; 0: no entry


cdef inline size_t hash_of(uint64_t device, uint64_t inode) noexcept nogil:
    return <size_t>((inode * <uint64_t>0x9E3779B97F4A7C15) ^ (device * <uint64_t>0xC2B2AE3D27D4EB4F) >> 7)


cdef void put_octal(uint8_t *field, size_t size, uint64_t number) noexcept nogil:
    """Digits with leading zeros and a NUL behind; of a number that is too large the lower part, since a PAX record says it."""
    cdef size_t at = size - 1
    field[at] = 0
    while at:
        at -= 1
        field[at] = 0x30 + <uint8_t>(number & 7)
        number >>= 3


cdef class Packer(_Walk):
    """The tar stream of what an O_PATH descriptor stands for, `name` being what it is called there.

    A directory comes with all below it: `name/`, `name/a` ...; its own entry only when `top` is true. With an empty `name` what is below is called
    `a`, with `/` it is `/a`. `fine`: times with fractions of a second. `layer`: see the module.
    """

    cdef bytes prefix_bytes
    cdef const char *prefix
    cdef bint with_top
    cdef bint fine
    cdef bint layer
    cdef int stage              # 0: the top, 1: below it, 2: the end mark, 3: done
    cdef bint single
    cdef uint8_t *head          # headers not yet given
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

    def __cinit__(self, int descriptor, bytes name not None, *, bint top=True, bint fine=False, bint layer=False):
        cdef stat_t found
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
        if self.file >= 0:
            close(self.file)
        free(self.head)
        free(self.pax)
        free(self.value)
        free(self.attributes)
        free(self.extents)
        free(self.full)
        free(self.links)
        free(self.link_names)

    def read(self, size_t size):
        """The next `size` bytes of the stream, less only at the end."""
        cdef bytes piece = PyBytes_FromStringAndSize(NULL, size)
        cdef uint8_t *data = <uint8_t *>PyBytes_AS_STRING(piece)
        cdef int64_t got
        with nogil:
            got = self.fill(data, size)
        if got < 0:
            self.raise_failure()
        return piece if <size_t>got == size else piece[:got]

    def close(self):
        """Give the descriptors back. What is read from now on is nothing."""
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
                if got == 0:            # it became shorter: the header is out
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
            elif self.step() < 0:
                return -1
        return done

    cdef int step(self) noexcept nogil:
        """Go on to the next entry."""
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
        if self.is_file and self.frames[self.depth - 1].nodev:
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
        """An entry that its directory says is a file. 1 when it cannot be taken so, with nothing done; 0, or -1."""
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
        """An empty file `.wh.NAME` beside the entry, or in it when it is a directory."""
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

    # --- an entry ---------------------------------------------------------------------------------------------------

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
        """`full` is the name in the archive; its length, or -1."""
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
        """The headers of what a descriptor stands for, and a file's content for `fill`.

        `readable`: it is a file, open to be read, and the descriptor is used up; else it is an O_PATH descriptor.
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
        # GNU tar ends the map of a file that ends in a hole with an empty piece; so the reader knows that nothing is missing.
        for index in range(self.extent_count):
            sum += self.extents[index].size
            map_size += <size_t>snprintf(
                number, sizeof(number), b"%lld\n%lld\n", <long long>self.extents[index].offset, <long long>self.extents[index].size
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
        if self.write_head(b"0", found, length, b"", sum + map_size) < 0 or self.reserve_head(self.head_size + map_size + 1) < 0:
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
        """Where the file has data; one piece, as it is, when the file system can't tell."""
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
        if data < 0 and errno != 6:     # ENXIO: nothing but a hole behind
            return
        if count == 0 or self.extents[count - 1].offset + self.extents[count - 1].size < size:
            self.extents[count].offset = size
            self.extents[count].size = 0
            count += 1
        self.extent_count = count

    cdef int linked(self, const stat_t *found, size_t length, const char **first) noexcept nogil:
        """Another name of a file: `first` is the one it has been sent under. Of a new one the name is kept."""
        cdef size_t at, wanted
        cdef void *room
        if self.links_used * 2 >= self.links_room and self.grow_links() < 0:
            return -1
        at = hash_of(found.st_dev, found.st_ino) & (self.links_room - 1)
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
                at = hash_of(self.links[index].device, self.links[index].inode) & (wanted - 1)
                while room[at].name:
                    at = (at + 1) & (wanted - 1)
                room[at] = self.links[index]
        free(self.links)
        self.links = room
        self.links_room = wanted
        return 0

    # --- headers ----------------------------------------------------------------------------------------------------

    cdef int keep_attributes(self, int fd, const char *path) noexcept nogil:
        """A PAX record for each extended attribute, but for overlayfs's own and what the kernel derives."""
        cdef ssize_t size, got
        cdef char key[300]
        cdef const char *name = self.attributes
        # How much there is first, which is nothing nearly always: for as much as one offers the kernel finds memory.
        size = flistxattr(fd, NULL, 0) if fd >= 0 else listxattr(path, NULL, 0)
        if size > 0:
            size = flistxattr(fd, self.attributes, MAX_VALUE) if fd >= 0 else listxattr(path, self.attributes, MAX_VALUE)
        if size < 0:
            return 0 if errno in (EOPNOTSUPP, EPERM, EACCES, ENOENT, ERANGE) else self.fail(errno)
        while name < self.attributes + size:
            if strncmp(name, b"trusted.overlay.", 16) != 0 and strncmp(name, b"system.", 7) != 0:
                got = fgetxattr(fd, name, self.value, MAX_VALUE) if fd >= 0 else getxattr(path, name, self.value, MAX_VALUE)
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
        """A PAX record: its length in decimal, which counts itself, `key=value` and a newline."""
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

    cdef int write_head(self, char type, const stat_t *found, size_t length, const char *link, int64_t size) noexcept nogil:
        """The entry `full`, with a PAX header in front when it needs one, behind what `head` has."""
        cdef size_t link_length = strlen(link), padded
        cdef char text[48]
        cdef int digits
        cdef int64_t seconds = found.st_mtim.tv_sec, fraction = found.st_mtim.tv_nsec if self.fine else 0
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
            if seconds < 0 and fraction:        # -1.25 is two seconds before, and three quarters
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
        self, char type, const char *name, size_t length, const char *link, size_t link_length, const stat_t *found, int64_t size
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


# --- the changes ----------------------------------------------------------------------------------------------------

cdef enum:
    MODIFIED = 0
    ADDED = 1
    DELETED = 2
    SAME = 9                # a directory that may yet turn out to be modified

    TOLD = 1
    COVERED = 2


cdef class _Changes(_Walk):
    """One `changes` while it runs. The layers below are the engine's own, and nobody changes them: paths into them are taken as they are."""

    cdef int *layers                # descriptors, topmost first
    cdef size_t layer_count
    cdef uint8_t *seen              # for each directory on the way and each layer: 1 when what is below it there shows through
    cdef size_t seen_room
    cdef uint8_t *told              # for each directory on the way: TOLD, and COVERED when nothing of the layers below shows through
    cdef size_t *slots              # for each directory on the way: where its change is in `out`
    cdef char *out                  # per change: kind, path, NUL
    cdef size_t out_size
    cdef size_t out_room

    def __dealloc__(self):
        free(self.layers)
        free(self.seen)
        free(self.told)
        free(self.slots)
        free(self.out)

    cdef int tell(self, int kind, const char *path, size_t length) noexcept nogil:
        cdef size_t wanted
        cdef void *room
        if self.out_size + length + 3 > MAX_CHANGES:
            return self.fail(E2BIG)
        if self.out_size + length + 3 > self.out_room:
            wanted = self.out_room * 2 + length + 64 * 1024
            room = realloc(self.out, wanted)
            if room == NULL:
                return self.fail(ENOMEM)
            self.out = <char *>room
            self.out_room = wanted
        self.out[self.out_size] = <char>(0x30 + kind)
        self.out[self.out_size + 1] = b"/"
        memcpy(self.out + self.out_size + 2, path, length)
        self.out[self.out_size + 2 + length] = 0
        self.out_size += length + 3
        return 0

    cdef void tell_parent(self) noexcept nogil:
        """What came or went changed the directory that it is in."""
        if self.depth > 1 and not self.told[self.depth - 1] & TOLD:
            self.told[self.depth - 1] |= TOLD
            self.out[self.slots[self.depth - 1]] = 0x30 + MODIFIED

    cdef int below(self, stat_t *found, uint8_t *shows) noexcept nogil:
        """What the layers have at `path`: 1, 0 for nothing, -1. `shows`: in which of them a directory there shows through."""
        cdef uint8_t *above = self.seen + (self.depth - 1) * self.layer_count
        cdef size_t index
        cdef stat_t looks
        cdef int fd, there = 0
        cdef bint opaque
        memset(shows, 0, self.layer_count)
        if self.length > MAX_PATH:      # no layer is made of such
            return 0
        for index in range(self.layer_count):
            if not above[index]:
                continue
            if fstatat(self.layers[index], self.path, &looks, AT_SYMLINK_NOFOLLOW) < 0:
                if errno == ENOENT or errno == ENOTDIR:
                    continue
                return self.fail(errno)
            if is_whiteout(&looks):
                break
            if not there:
                there = 1
                found[0] = looks
            if not S_ISDIR(looks.st_mode):
                break
            if not S_ISDIR(found.st_mode):
                break
            shows[index] = 1
            fd = openat(self.layers[index], self.path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
            if fd < 0:
                return self.fail(errno)
            opaque = is_opaque(fd)
            close(fd)
            if opaque:
                break
        return there

    cdef int start(self, int top) noexcept nogil:
        cdef int fd = openat(top, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
        if fd < 0:
            return self.fail(errno)
        if self.make_room() < 0:
            close(fd)
            return -1
        memset(self.seen, 1, self.layer_count)
        self.told[0] = TOLD
        return self.enter(fd)

    cdef int make_room(self) noexcept nogil:
        """For what is known of one more directory."""
        cdef size_t wanted
        cdef void *room
        if self.depth + 1 >= self.seen_room:
            wanted = self.seen_room + 64
            room = realloc(self.seen, wanted * (self.layer_count + 1))
            if room == NULL:
                return self.fail(ENOMEM)
            self.seen = <uint8_t *>room
            room = realloc(self.told, wanted)
            if room == NULL:
                return self.fail(ENOMEM)
            self.told = <uint8_t *>room
            room = realloc(self.slots, wanted * sizeof(size_t))
            if room == NULL:
                return self.fail(ENOMEM)
            self.slots = <size_t *>room
            self.seen_room = wanted
        return 0

    cdef int run(self, int top) noexcept nogil:
        cdef int parent, got
        if self.start(top) < 0:
            return -1
        while self.depth:
            got = self.next(&parent)
            if got < 0:
                return -1
            if got == 0:
                self.leave()
            elif self.look(parent) < 0:
                return -1
        return 0

    cdef int look(self, int parent) noexcept nogil:
        cdef stat_t own, lower
        cdef uint8_t *shows
        cdef size_t length = self.length
        cdef int fd, there, kind
        cdef bint opaque
        if self.is_plain and self.depth > 2 and not self.shows_through():
            self.tell_parent()
            return self.tell(ADDED, self.path, length)
        if fstatat(parent, self.name, &own, AT_SYMLINK_NOFOLLOW) < 0:
            return 0 if errno == ENOENT else self.fail(errno)
        if self.make_room() < 0:
            return -1
        shows = self.seen + self.depth * self.layer_count
        there = self.below(&lower, shows)
        if there < 0:
            return -1
        if is_whiteout(&own):
            if not there:
                return 0
            self.tell_parent()
            return self.tell(DELETED, self.path, length)
        if not there and is_mount_point(self.path, parent, self.name, &own):
            return 0
        if not S_ISDIR(own.st_mode):
            if not there:
                self.tell_parent()
            return self.tell(MODIFIED if there else ADDED, self.path, length)
        fd = openat(parent, self.name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return 0 if errno in (ENOENT, ENOTDIR, ELOOP) else self.fail(errno)
        opaque = is_opaque(fd)
        self.told[self.depth] = TOLD | self.told[self.depth - 1] & COVERED | (COVERED if opaque else 0)
        kind = MODIFIED
        if not there:
            self.tell_parent()
            kind = ADDED
        elif S_ISDIR(lower.st_mode) and not opaque and not self.differs(&own, &lower, fd):
            self.told[self.depth] &= ~TOLD
            kind = SAME
        self.slots[self.depth] = self.out_size
        if self.tell(kind, self.path, length) < 0:
            close(fd)
            return -1
        if self.enter(fd) < 0:
            return -1
        return self.tell_missing() if self.told[self.depth - 1] & COVERED else 0

    cdef bint shows_through(self) noexcept nogil:
        """Whether a layer may have something in the directory where the walk is."""
        cdef const uint8_t *above = self.seen + (self.depth - 1) * self.layer_count
        cdef size_t index
        for index in range(self.layer_count):
            if above[index]:
                return True
        return False

    cdef bint differs(self, const stat_t *own, const stat_t *lower, int fd) noexcept nogil:
        """A directory lies in the upper one because something in it does: it is changed itself when it looks other than below."""
        if own.st_mode != lower.st_mode or own.st_uid != lower.st_uid or own.st_gid != lower.st_gid:
            return True
        if own.st_mtim.tv_sec == lower.st_mtim.tv_sec and own.st_mtim.tv_nsec == lower.st_mtim.tv_nsec:
            return False
        # Making the mount points of etc changes its time, which is the runtime's doing; what else changes there tells of itself.
        return strcmp(self.path, b"etc") != 0

    cdef int tell_missing(self) noexcept nogil:
        """What the layers have in the covered directory just entered, and the container has not."""
        cdef Frame *frame = &self.frames[self.depth - 1]
        cdef uint8_t *shows = self.seen + (self.depth - 1) * self.layer_count
        cdef size_t index, first = self.names_used, order = self.order_used, at, length
        cdef Frame hidden
        cdef stat_t found, own
        cdef const char *name
        cdef int status = 0
        hidden.next = hidden.end = self.order_used
        for index in range(self.layer_count):
            if shows[index]:
                hidden.fd = openat(self.layers[index], self.path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                if hidden.fd < 0:
                    return self.fail(errno)
                hidden.next = self.order_used
                status = self.read_names(&hidden)
                close(hidden.fd)
                if status < 0:
                    return -1
        sort_names(self.order + order, self.order_used - order, self.names)
        length = self.length
        for at in range(order, self.order_used):
            name = self.names + self.order[at]
            if at > order and strcmp(name, self.names + self.order[at - 1]) == 0:
                continue
            if fstatat(frame.fd, name, &own, AT_SYMLINK_NOFOLLOW) == 0:
                continue
            if length + 1 + strlen(name) > MAX_PATH:
                continue
            self.path[length] = b"/"
            memcpy(self.path + length + 1, name, strlen(name) + 1)
            status = self.shown(&found, shows)
            if status > 0:
                self.tell_parent()
                status = self.tell(DELETED, self.path, length + 1 + strlen(name))
            if status < 0:
                break
        self.path[length] = 0
        self.names_used = first
        self.order_used = order
        return status if status < 0 else 0

    cdef int shown(self, stat_t *found, const uint8_t *shows) noexcept nogil:
        """Whether the layers together show something at `path`, rather than a whiteout."""
        cdef size_t index
        for index in range(self.layer_count):
            if shows[index] and fstatat(self.layers[index], self.path, found, AT_SYMLINK_NOFOLLOW) == 0:
                return not is_whiteout(found)
        return 0


def changes(int upper, layers not None):
    """What an overlay's upper directory changes of the layers below it, descriptors topmost first: (path, kind), parents before what is in them.

    Kinds are the API's: 0 modified, 1 added, 2 deleted. A directory is modified when it looks other than below, or when something came or went in
    it; one that was removed and made again is modified, and what it had is deleted. Paths are bytes. Raises OSError E2BIG when they are more than
    128 MiB together, ENAMETOOLONG when one is of more than 256 KiB.
    """
    cdef _Changes walk = _Changes()
    cdef size_t index
    cdef int status
    walk.layer_count = len(layers)
    if walk.layer_count > MAX_LAYERS:
        raise OSError(E2BIG, os.strerror(E2BIG))
    walk.layers = <int *>malloc((walk.layer_count + 1) * sizeof(int))
    if walk.layers == NULL:
        raise MemoryError()
    for index in range(walk.layer_count):
        walk.layers[index] = layers[index]
    walk.top = os.dup(upper)
    with nogil:
        status = walk.run(upper)
    if status < 0:
        walk.raise_failure()
    if walk.out_size == 0:
        return []
    found = []
    for record in (<bytes>walk.out[: walk.out_size - 1]).split(b"\0"):
        if record[0] != 0x30 + SAME:
            found.append((record[1:], record[0] - 0x30))
            if len(found) % 1000 == 0:
                with nogil:             # others get a turn
                    pass
    return found
