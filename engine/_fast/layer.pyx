# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Trees of files on directory descriptors: a layer taken away again, and measured.

Owns:    nothing between calls. Descriptors stay the caller's.
Threads: any number at once. The GIL is released for the whole of a call.
Raises:  OSError with the kernel's errno.
"""
from libc.errno cimport EEXIST, EISDIR, ENOENT, ENOTDIR, ENOTEMPTY, EPERM, errno
from libc.stdint cimport int64_t, uint32_t
from libc.stdio cimport snprintf

import os

cdef extern from "<fcntl.h>" nogil:
    enum:
        AT_REMOVEDIR
        AT_SYMLINK_NOFOLLOW
        O_CLOEXEC
        O_DIRECTORY
        O_NOFOLLOW
        O_RDONLY
    int openat(int directory, const char *path, int flags, ...)

cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    int unlinkat(int directory, const char *path, int flags)

cdef extern from "<stdio.h>" nogil:
    int renameat(int old_directory, const char *old_path, int new_directory, const char *new_path)

cdef extern from "<dirent.h>" nogil:
    ctypedef struct DIR:
        pass
    cdef struct dirent:
        char *d_name
        unsigned char d_type
    enum:
        DT_DIR
        DT_UNKNOWN
    DIR *fdopendir(int fd)
    dirent *readdir(DIR *directory)
    void rewinddir(DIR *directory)
    int closedir(DIR *directory)
    int dirfd(DIR *directory)

cdef extern from "<sys/stat.h>" nogil:
    cdef struct stat_t "stat":
        uint32_t st_mode
        int64_t st_size
        int64_t st_nlink
    int fstatat(int directory, const char *path, stat_t *found, int flags)
    bint S_ISREG(uint32_t mode)
    bint S_ISDIR(uint32_t mode)

cdef enum:
    DEEPEST = 64            # directories open at once
    NAMES = 100000          # tries for a name that the tree does not have yet


cdef struct Removal:
    int top                 # where directories that lie too deep are moved
    long moved
    long removed
    long serial
    int error               # errno of the first entry that resisted


cdef inline bint is_dot(const char *name) noexcept nogil:
    return name[0] == b"." and (name[1] == 0 or (name[1] == b"." and name[2] == 0))


cdef void note(Removal *removal, int number) noexcept nogil:
    if removal.error == 0:
        removal.error = number


cdef void empty(int fd, Removal *removal, int depth) noexcept nogil:
    """Remove what is in the directory `fd`, which is used up."""
    cdef DIR *directory = fdopendir(fd)
    cdef dirent *found
    cdef long before
    if directory == NULL:
        note(removal, errno)
        close(fd)
        return
    while True:
        before = removal.removed + removal.moved
        rewinddir(directory)
        while True:
            found = readdir(directory)
            if found == NULL:
                break
            if not is_dot(found.d_name):
                remove_one(dirfd(directory), found.d_name, removal, depth, found.d_type == DT_DIR)
        # Once more: readdir(3) may leave out names that came while it ran (moved here), or whose neighbours went.
        if depth > 0 or removal.removed + removal.moved == before:
            break
    closedir(directory)


cdef void remove_one(int parent, const char *name, Removal *removal, int depth, bint directory) noexcept nogil:
    cdef char moved_name[64]
    cdef int fd
    if not directory:
        if unlinkat(parent, name, 0) == 0:
            removal.removed += 1
            return
        if errno == ENOENT:
            return
        if errno != EISDIR and errno != EPERM:
            note(removal, errno)
            return
    if depth >= DEEPEST:
        if unlinkat(parent, name, AT_REMOVEDIR) == 0:
            removal.removed += 1
            return
        for _ in range(NAMES):
            removal.serial += 1
            snprintf(moved_name, sizeof(moved_name), b".removed-%ld", removal.serial)
            if renameat(parent, name, removal.top, moved_name) == 0:
                removal.moved += 1
                return
            if errno != EEXIST and errno != ENOTEMPTY and errno != ENOTDIR:
                break
        note(removal, errno)
        return
    if unlinkat(parent, name, AT_REMOVEDIR) == 0:
        removal.removed += 1
        return
    if errno == ENOENT:
        return
    if errno != ENOTEMPTY:
        note(removal, EPERM if errno == ENOTDIR else errno)
        return
    fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
    if fd < 0:
        note(removal, errno)
        return
    if depth == 0:
        removal.top = fd
    empty(fd, removal, depth + 1 if depth else 1)
    if unlinkat(parent, name, AT_REMOVEDIR) == 0:
        removal.removed += 1
    elif errno != ENOENT and errno != ENOTEMPTY:
        note(removal, errno)


def remove_tree(int parent, bytes name not None):
    """Remove `name` in the directory `parent` with all below it, however deep; absent is fine.

    No link is followed; 64 directories are open at most. What resists stays, the rest goes; then the first errno is raised.
    """
    cdef Removal removal
    cdef const char *text = name
    cdef long before
    with nogil:
        removal.top = -1
        removal.moved = removal.removed = removal.serial = 0
        removal.error = 0
        while True:
            before = removal.removed + removal.moved
            removal.error = 0
            remove_one(parent, text, &removal, 0, False)
            if removal.removed + removal.moved == before or removal.error != 0:
                break
    if removal.error == 0 and os.access(name, os.F_OK, dir_fd=parent, follow_symlinks=False):
        removal.error = ENOTEMPTY
    if removal.error != 0:
        raise OSError(removal.error, os.strerror(removal.error), os.fsdecode(name))


cdef void measure(int fd, int64_t *size, int64_t *entries, int depth) noexcept nogil:
    """Add up what is in the directory `fd`, which is used up."""
    cdef DIR *directory = fdopendir(fd)
    cdef dirent *found
    cdef stat_t status
    cdef int below
    if directory == NULL:
        close(fd)
        return
    while True:
        found = readdir(directory)
        if found == NULL:
            break
        if is_dot(found.d_name):
            continue
        entries[0] += 1
        if fstatat(dirfd(directory), found.d_name, &status, AT_SYMLINK_NOFOLLOW) < 0:
            continue
        if S_ISREG(status.st_mode):
            size[0] += status.st_size // (status.st_nlink if status.st_nlink > 1 else 1)
        elif S_ISDIR(status.st_mode) and depth < 4 * DEEPEST:
            below = openat(dirfd(directory), found.d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
            if below >= 0:
                measure(below, size, entries, depth + 1)
    closedir(directory)


def usage(int directory):
    """Bytes of the regular files below a directory descriptor, and entries of every type. What a writer takes away meanwhile is not counted.

    A file of several names is shared out among them. Directories more than 256 deep are counted as one entry, closed.
    """
    cdef int64_t size = 0, entries = 0
    cdef int fd = openat(directory, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
    if fd < 0:
        raise OSError(errno, os.strerror(errno))
    with nogil:
        measure(fd, &size, &entries, 0)
    return size, entries
