# cython: language_level=3
"""The changes of a container: its overlay upper directory compared with the layers below.

Owns:    its descriptors; memory for names (walk.pyx), and at most 128 MiB of paths.
Threads: one at a time. The GIL is released for the comparison.
Raises:  OSError with the kernel's errno and the name. Files that vanish meanwhile are left out.
"""
from libc.errno cimport E2BIG, ELOOP, ENOENT, ENOMEM, ENOTDIR, errno
from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset, strcmp, strlen

import os

from engine._fast.linux cimport (
    AT_SYMLINK_NOFOLLOW, O_CLOEXEC, O_DIRECTORY, O_NOFOLLOW, O_RDONLY, S_ISDIR, close, fstatat,
    is_whiteout, openat, stat_t,
)
from engine._fast.walk cimport MAX_PATH, Level, Walk, is_mount_point, is_opaque, sort_names

cdef enum:
    MAX_CHANGES = 128 * 1024 * 1024     # bytes of all paths together
    MAX_LAYERS = 512

cdef enum:
    MODIFIED = 0
    ADDED = 1
    DELETED = 2
    UNCHANGED = 9           # a directory; becomes MODIFIED if an entry is added or deleted

    REPORTED = 1
    COVERED = 2


cdef class _Changes(Walk):
    """One `changes` while it runs.

    The lower layers belong to the engine and do not change, so paths in them are resolved by the
    usual calls.
    """

    cdef int *layers                # descriptors, topmost first
    cdef size_t layer_count
    # per directory on the way down and layer: 1 if the layer's entries show through
    cdef uint8_t *seen
    cdef size_t seen_room
    # per directory on the way down: REPORTED, and COVERED if no layer shows through
    cdef uint8_t *flags
    cdef size_t *slots              # per directory on the way down: offset of its change in `out`
    cdef char *out                  # per change: kind, path, NUL
    cdef size_t out_size
    cdef size_t out_room

    def __dealloc__(self):
        free(self.layers)
        free(self.seen)
        free(self.flags)
        free(self.slots)
        free(self.out)

    cdef int report(self, int kind, const char *path, size_t length) noexcept nogil:
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

    cdef void report_parent(self) noexcept nogil:
        """An entry was added or deleted: report its directory as modified."""
        if self.depth > 1 and not self.flags[self.depth - 1] & REPORTED:
            self.flags[self.depth - 1] |= REPORTED
            self.out[self.slots[self.depth - 1]] = 0x30 + MODIFIED

    cdef int below(self, stat_t *found, uint8_t *shows) noexcept nogil:
        """Look `path` up in the layers. Returns 1 with its status in `found`, 0 if there is none,
        -1 on failure.

        `shows[layer]` is set to 1 where a directory at `path` shows through.
        """
        cdef uint8_t *above = self.seen + (self.depth - 1) * self.layer_count
        cdef size_t index
        cdef stat_t status
        cdef int fd, there = 0
        cdef bint opaque
        memset(shows, 0, self.layer_count)
        if self.length > MAX_PATH:      # no layer has such paths
            return 0
        for index in range(self.layer_count):
            if not above[index]:
                continue
            if fstatat(self.layers[index], self.path, &status, AT_SYMLINK_NOFOLLOW) < 0:
                if errno == ENOENT or errno == ENOTDIR:
                    continue
                return self.fail(errno)
            if is_whiteout(&status):
                break
            if not there:
                there = 1
                found[0] = status
            if not S_ISDIR(status.st_mode):
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
        self.flags[0] = REPORTED
        return self.enter(fd)

    cdef int make_room(self) noexcept nogil:
        """Grow the arrays for one more directory."""
        cdef size_t wanted
        cdef void *room
        if self.depth + 1 >= self.seen_room:
            wanted = self.seen_room + 64
            room = realloc(self.seen, wanted * (self.layer_count + 1))
            if room == NULL:
                return self.fail(ENOMEM)
            self.seen = <uint8_t *>room
            room = realloc(self.flags, wanted)
            if room == NULL:
                return self.fail(ENOMEM)
            self.flags = <uint8_t *>room
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
            self.report_parent()
            return self.report(ADDED, self.path, length)
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
            self.report_parent()
            return self.report(DELETED, self.path, length)
        if not there and is_mount_point(self.path, parent, self.name, &own):
            return 0
        if not S_ISDIR(own.st_mode):
            if not there:
                self.report_parent()
            return self.report(MODIFIED if there else ADDED, self.path, length)
        fd = openat(parent, self.name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return 0 if errno in (ENOENT, ENOTDIR, ELOOP) else self.fail(errno)
        opaque = is_opaque(fd)
        self.flags[self.depth] = REPORTED | self.flags[self.depth - 1] & COVERED | (COVERED if opaque else 0)
        kind = MODIFIED
        if not there:
            self.report_parent()
            kind = ADDED
        elif S_ISDIR(lower.st_mode) and not opaque and not self.differs(&own, &lower, fd):
            self.flags[self.depth] &= ~REPORTED
            kind = UNCHANGED
        self.slots[self.depth] = self.out_size
        if self.report(kind, self.path, length) < 0:
            close(fd)
            return -1
        if self.enter(fd) < 0:
            return -1
        return self.report_missing() if self.flags[self.depth - 1] & COVERED else 0

    cdef bint shows_through(self) noexcept nogil:
        """True if a layer may have entries in the current directory."""
        cdef const uint8_t *above = self.seen + (self.depth - 1) * self.layer_count
        cdef size_t index
        for index in range(self.layer_count):
            if above[index]:
                return True
        return False

    cdef bint differs(self, const stat_t *own, const stat_t *lower, int fd) noexcept nogil:
        """True if the metadata of a directory differs. If not, the directory is in the upper
        directory only because one of its entries has changed.
        """
        if own.st_mode != lower.st_mode or own.st_uid != lower.st_uid or own.st_gid != lower.st_gid:
            return True
        if own.st_mtim.tv_sec == lower.st_mtim.tv_sec and own.st_mtim.tv_nsec == lower.st_mtim.tv_nsec:
            return False
        # The runtime creates mount points in /etc, which changes its time. Changed entries of /etc
        # are reported on their own.
        return strcmp(self.path, b"etc") != 0

    cdef int report_missing(self) noexcept nogil:
        """Report as deleted the layers' entries of the opaque directory just entered, if it has
        no such name.
        """
        cdef Level *level = &self.levels[self.depth - 1]
        cdef uint8_t *shows = self.seen + (self.depth - 1) * self.layer_count
        cdef size_t index, first = self.names_used, order = self.order_used, at, length
        cdef Level hidden
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
            if fstatat(level.fd, name, &own, AT_SYMLINK_NOFOLLOW) == 0:
                continue
            if length + 1 + strlen(name) > MAX_PATH:
                continue
            self.path[length] = b"/"
            memcpy(self.path + length + 1, name, strlen(name) + 1)
            status = self.shown(&found, shows)
            if status > 0:
                self.report_parent()
                status = self.report(DELETED, self.path, length + 1 + strlen(name))
            if status < 0:
                break
        self.path[length] = 0
        self.names_used = first
        self.order_used = order
        return status if status < 0 else 0

    cdef int shown(self, stat_t *found, const uint8_t *shows) noexcept nogil:
        """True if the layers together have an entry at `path`, and not a whiteout."""
        cdef size_t index
        for index in range(self.layer_count):
            if shows[index] and fstatat(self.layers[index], self.path, found, AT_SYMLINK_NOFOLLOW) == 0:
                return not is_whiteout(found)
        return 0


def changes(int upper, layers not None):
    """The changes that an overlay's upper directory makes to the layers below it, descriptors
    topmost first.

    Returns (path, kind), directories before their entries. Kinds are the API's: 0 modified, 1
    added, 2 deleted. A directory is modified if its metadata differs, or if entries were added or
    deleted. One that was removed and created again is modified, and its former entries are deleted.
    Raises OSError: E2BIG for more than 128 MiB of paths, ENAMETOOLONG for a path of more than 256
    KiB.
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
        if record[0] != 0x30 + UNCHANGED:
            found.append((record[1:], record[0] - 0x30))
            if len(found) % 1000 == 0:
                with nogil:             # let other threads run
                    pass
    return found
