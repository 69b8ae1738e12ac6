# cython: language_level=3
"""Directory trees removed and measured by descriptor, without following links.

Owns:    nothing between calls. At most 64 directories are open at a time.
Threads: any number at once. The GIL is released for the whole of a call.
Raises:  OSError with the kernel's errno.
"""
from cpython.bytes cimport PyBytes_AsString
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.errno cimport (
    EEXIST, EISDIR, ELOOP, ENOENT, ENOTDIR, ENOTEMPTY, EPERM, errno,
)
from libc.stdint cimport int64_t, uint8_t, uint16_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc

import os

from engine._fast.linux cimport (
    AT_REMOVEDIR, AT_SYMLINK_NOFOLLOW, DIR, DT_DIR, DT_LNK, DT_REG, DT_UNKNOWN, O_CLOEXEC, O_DIRECTORY, O_NOFOLLOW,
    O_RDONLY, RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, S_ISDIR, S_ISLNK, S_ISREG, SYS_getdents64, close, closedir, dirent,
    dirfd, fdopendir, fstatat, is_dot, openat, openat2, readdir, renameat, rewinddir, stat_t, syscall, unlinkat,
)

cdef enum:
    MAX_OPEN = 64           # directories open at once
    MAX_SERIAL = 100000     # attempts to find a name that the tree does not have yet
    DIRENTS = 32 * 1024     # bytes of a directory's entries that are read at a time


cdef struct Total:
    int64_t alone           # bytes of files with one name
    double shared           # bytes of the others, divided among their names
    int64_t entries


cdef struct Size:
    const char *path
    Total total


cdef struct Removal:
    int top                 # directories below MAX_OPEN levels are moved up into this one
    long moved
    long removed
    long serial
    int error               # errno of the first entry that could not be removed


cdef void note(Removal *removal, int number) noexcept nogil:
    if removal.error == 0:
        removal.error = number


cdef void empty_directory(int fd, Removal *removal, int depth) noexcept nogil:
    """Remove everything in the directory `fd`. Closes `fd`."""
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
        # Again: readdir(3) may skip names that were added (moved here) or removed while it ran.
        if depth > 0 or removal.removed + removal.moved == before:
            break
    closedir(directory)


cdef void remove_one(
    int parent, const char *name, Removal *removal, int depth, bint directory
) noexcept nogil:
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
    if depth >= MAX_OPEN:
        if unlinkat(parent, name, AT_REMOVEDIR) == 0:
            removal.removed += 1
            return
        for _ in range(MAX_SERIAL):
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
        # Another process may have replaced it: the next pass handles that.
        if errno != ENOENT and errno != ENOTDIR and errno != ELOOP:
            note(removal, errno)
        return
    if depth == 0:
        removal.top = fd
    empty_directory(fd, removal, depth + 1 if depth else 1)
    if unlinkat(parent, name, AT_REMOVEDIR) == 0:
        removal.removed += 1
    elif errno != ENOENT and errno != ENOTEMPTY:
        note(removal, errno)


cdef int remove_entry(int parent, const char *name, bint directory) noexcept nogil:
    """Remove `name` in one pass.

    Returns 0, or the first errno. `directory`: it is known to be one.
    """
    cdef Removal removal
    removal.top = -1
    removal.moved = removal.removed = removal.serial = 0
    removal.error = 0
    remove_one(parent, name, &removal, 0, directory)
    return removal.error


def remove_tree(int parent, bytes name not None):
    """Remove `name` in the directory `parent` with everything below it, to any depth.

    A missing name is no error. Links are not followed. Entries that cannot be removed are left; the
    rest is removed, then OSError is raised with the first errno.
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


cdef void measure(int fd, uint8_t *found, Total *total, int depth) noexcept nogil:
    """Add up the entries of the directory `fd`. Closes `fd`. `found` has room for DIRENTS bytes.

    getdents64(2), because readdir(3) asks for the descriptor's status and flags, and allocates and
    frees its buffer: that takes as long as to read a small directory. The kernel's record is
    (inode, offset, length, kind, name): 8, 8, 2 and 1 bytes, and the name's.
    """
    cdef uint8_t *deeper = NULL
    cdef stat_t status
    cdef const char *name
    cdef uint8_t kind
    cdef size_t at
    cdef long size
    cdef int below
    while True:
        size = syscall(SYS_getdents64, fd, found, <size_t>DIRENTS)
        if size <= 0:
            break
        at = 0
        while at < <size_t>size:
            kind = found[at + 18]
            name = <const char *>found + at + 19
            at += (<uint16_t *>(found + at + 16))[0]
            if is_dot(name):
                continue
            total.entries += 1
            if kind != DT_DIR:
                if kind != DT_REG and kind != DT_LNK and kind != DT_UNKNOWN:
                    continue
                if fstatat(fd, name, &status, AT_SYMLINK_NOFOLLOW) < 0:
                    continue
                if S_ISREG(status.st_mode) or S_ISLNK(status.st_mode):
                    if status.st_nlink > 1:
                        total.shared += <double>status.st_size / <double>status.st_nlink
                    else:
                        total.alone += status.st_size
                if not S_ISDIR(status.st_mode):
                    continue
            if depth < 4 * MAX_OPEN:
                if deeper == NULL:
                    deeper = <uint8_t *>malloc(DIRENTS)
                    if deeper == NULL:
                        continue
                below = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                if below >= 0:
                    measure(below, deeper, total, depth + 1)
    free(deeper)
    close(fd)


def usage(int directory):
    """Bytes of files and link targets below a directory descriptor, as Docker counts them, and the
    number of entries.

    The size of a file with several names is divided among them. A directory 256 levels deep counts
    as one entry and is not opened. Entries removed while this runs are not counted.
    """
    cdef Total total = Total(0, 0, 0)
    cdef uint8_t *buffer
    cdef int fd = openat(directory, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
    if fd < 0:
        raise OSError(errno, os.strerror(errno))
    buffer = <uint8_t *>malloc(DIRENTS)
    if buffer == NULL:
        close(fd)
        raise MemoryError
    with nogil:
        measure(fd, buffer, &total, 0)
        free(buffer)
    return total.alone + round(total.shared), total.entries


def sizes(int root, list paths not None):
    """As the bytes of `usage`, of each directory below the descriptor `root`. Links in the paths
    are errors (ELOOP).

    Where a directory cannot be opened the size is its errno, negative.
    """
    cdef Py_ssize_t index, count = len(paths)
    cdef int fd
    cdef Size *found = <Size *>PyMem_Calloc(max(count, 1), sizeof(Size))
    cdef uint8_t *buffer = <uint8_t *>malloc(DIRENTS)
    try:
        if found == NULL or buffer == NULL:
            raise MemoryError
        for index in range(count):
            found[index].path = PyBytes_AsString(paths[index])
        with nogil:
            for index in range(count):
                fd = openat2(
                    root, found[index].path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS
                )
                if fd < 0:
                    found[index].total.alone = -errno
                else:
                    measure(fd, buffer, &found[index].total, 0)
        return [found[index].total.alone + round(found[index].total.shared) for index in range(count)]
    finally:
        free(buffer)
        PyMem_Free(found)
