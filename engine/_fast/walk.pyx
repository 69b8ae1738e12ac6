# cython: language_level=3
"""A walk through a directory tree by descriptors, in sorted order, without following links.

Only the lowest 64 directories stay open. Directories above them are opened again by path, below the
top and without links, in steps of PATH_MAX. The names of a directory are read at once and sorted,
so that one tree always gives the same sequence.

Owns:    its descriptors, and memory for the names between the top and the current entry, at most
         128 MiB.
Threads: one at a time, without the GIL.
Raises:  OSError with the kernel's errno and the path (`raise_failure`); a method without the GIL
         returns -1.
"""
from libc.errno cimport E2BIG, EINTR, ELOOP, ENAMETOOLONG, ENOENT, ENOMEM, ENOTDIR, errno
from libc.stdint cimport uint8_t, uint16_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, strcmp, strlen

import os

from engine._fast.linux cimport (
    DT_FIFO, DT_LNK, DT_REG, DT_SOCK, O_CLOEXEC, O_DIRECTORY, O_NOFOLLOW, O_RDONLY, RESOLVE_BENEATH,
    RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, S_ISDIR, S_ISREG, ST_NODEV, SYS_getdents64, close,
    fgetxattr, fstatvfs, is_dot, openat, openat2, qsort_r, stat_t, statvfs_t, syscall,
)

cdef enum:
    OPEN_LEVELS = 64                # directories that stay open on the way down
    DIRENTS = 32 * 1024
    MAX_NAMES = 128 * 1024 * 1024

cdef uint64_t BENEATH = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS


cdef bint is_opaque(int directory) noexcept nogil:
    cdef char value[8]
    return fgetxattr(directory, b"trusted.overlay.opaque", value, sizeof(value)) == 1 and value[0] == b"y"


cdef bint is_nodev(int directory) noexcept nogil:
    cdef statvfs_t mount
    return fstatvfs(directory, &mount) == 0 and mount.f_flag & ST_NODEV != 0


cdef bint is_empty(int parent, const char *name) noexcept nogil:
    """True if that directory is empty."""
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
    """True for an empty mount point that a runtime creates where the image has none."""
    if S_ISDIR(found.st_mode):
        if strcmp(path, b"dev") != 0 and strcmp(path, b"proc") != 0 and strcmp(path, b"sys") != 0:
            return False
        return is_empty(parent, name)
    return S_ISREG(found.st_mode) and found.st_size == 0 and (
        strcmp(path, b"etc/hosts") == 0 or strcmp(path, b"etc/hostname") == 0 or strcmp(path, b"etc/resolv.conf") == 0
    )


cdef int compare_names(const void *one, const void *other, void *names) noexcept nogil:
    return strcmp(<const char *>names + (<const size_t *>one)[0], <const char *>names + (<const size_t *>other)[0])


cdef void sort_names(size_t *order, size_t count, const char *names) noexcept nogil:
    if count > 1:       # qsort_r(3) does not take the NULL of an empty first directory
        qsort_r(order, count, sizeof(size_t), compare_names, <void *>names)


cdef class Walk:
    """The state of a walk: the directories from `top` down to the current one, and their
    remaining names.
    """

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
        free(self.levels)
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
        """Go down into the directory at `path`. `fd` belongs to the walk from now on."""
        cdef Level *level
        cdef void *room
        if self.depth == self.levels_room:
            room = realloc(self.levels, (self.levels_room + 64) * sizeof(Level))
            if room == NULL:
                close(fd)
                return self.fail(ENOMEM)
            self.levels = <Level *>room
            self.levels_room += 64
        if self.depth >= OPEN_LEVELS:
            level = &self.levels[self.depth - OPEN_LEVELS]
            if level.fd >= 0:
                close(level.fd)
                level.fd = -1
        level = &self.levels[self.depth]
        level.fd = fd
        level.path = self.length
        level.names = self.names_used
        level.next = level.end = self.order_used
        level.nodev = is_nodev(fd)
        self.depth += 1
        return self.read_names(level)

    cdef int read_names(self, Level *level) noexcept nogil:
        """Append the sorted names of `level.fd` to `names` and `order`."""
        cdef long size
        cdef size_t at, length
        cdef const char *name
        cdef char type
        cdef void *room
        while True:
            size = syscall(SYS_getdents64, level.fd, self.found, <size_t>DIRENTS)
            if size < 0:
                if errno == EINTR:
                    continue
                if errno == ENOENT:         # the directory was removed
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
        level.end = self.order_used
        sort_names(self.order + level.next, level.end - level.next, self.names)
        return 0

    cdef void leave(self) noexcept nogil:
        cdef Level *level
        self.depth -= 1
        level = &self.levels[self.depth]
        if level.fd >= 0:
            close(level.fd)
        self.names_used = level.names
        self.order_used = self.levels[self.depth - 1].end if self.depth else 0

    cdef int open_again(self) noexcept nogil:
        """Open the directory at `path`, in steps of MAX_PATH.

        Returns a descriptor, -1 on failure.
        """
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
        """Advance `path` and `name` to the next name; `parent` is its directory.

        Returns 1, 0 at the end of the directory, -1 on failure. A path of more than LONGEST bytes
        is a failure.
        """
        cdef Level *level = &self.levels[self.depth - 1]
        cdef const char *name
        cdef size_t length, at
        cdef void *room
        self.length = level.path
        self.path[self.length] = 0
        if level.next == level.end:
            return 0
        if level.fd < 0:
            # By its path, without following links. The container may have replaced it, but only by
            # another of its own directories.
            level.fd = self.open_again()
            if level.fd < 0:
                if errno == ENOENT or errno == ENOTDIR or errno == ELOOP:
                    level.next = level.end
                    return 0
                return self.fail(errno)
            level.nodev = is_nodev(level.fd)
        name = self.names + self.order[level.next]
        self.is_file = (name - 1)[0] == DT_REG
        self.is_plain = self.is_file or (name - 1)[0] == DT_LNK or (name - 1)[0] == DT_FIFO or (name - 1)[0] == DT_SOCK
        level.next += 1
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
        parent[0] = level.fd
        return 1
