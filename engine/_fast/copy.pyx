# cython: language_level=3
"""Copies a directory tree below another directory descriptor: content, owners, modes, attributes,
times, holes, hard links.

Containers may change both trees meanwhile. So every step opens one name in an open directory, no
link is followed, and hard links are made through openat2(2) below the target (RESOLVE_IN_ROOT).
Content is shared if the file system can do so (FICLONE), otherwise copied in the kernel
(copy_file_range(2)), otherwise read and written. Holes stay holes. Sockets and overlayfs's
whiteouts (devices 0/0) are skipped.

Owns:    nothing between calls. Descriptors stay the caller's. Two descriptors are open per level of
         depth.
Threads: any number at once. The GIL is released for the whole of a call.
Raises:  OSError with the kernel's errno and the path below the source. The caller must remove what
         was copied until then.
"""
from libc.errno cimport (
    EINTR, EINVAL, ENAMETOOLONG, ENODATA, ENOENT, ENOSYS, ENOTTY, ENXIO, EOPNOTSUPP, EPERM, ERANGE, EXDEV, errno,
)
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, strlen, strncmp
from posix.time cimport timespec

import os

from engine._fast.linux cimport (
    AT_FDCWD, AT_SYMLINK_FOLLOW, AT_SYMLINK_NOFOLLOW, DIR, FICLONE, O_CLOEXEC, O_CREAT, O_DIRECTORY,
    O_EXCL, O_NOATIME, O_NOFOLLOW, O_NONBLOCK, O_PATH, O_RDONLY, O_WRONLY, RESOLVE_IN_ROOT,
    RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV, S_IFMT, S_ISBLK, S_ISCHR, S_ISDIR,
    S_ISFIFO, S_ISLNK, S_ISREG, SEEK_DATA, SEEK_HOLE, chmod_opened, close, closedir, copy_file_range,
    dirent, dirfd, fchmod, fchown, fchownat, fdopendir, fgetxattr, flistxattr, fsetxattr, fstat,
    fstatat, ftruncate, futimens, hash_inode, ioctl, is_dot, lgetxattr, linkat, llistxattr, lseek,
    lsetxattr, mkdirat, mknodat, openat, openat2, pread, pwrite, readdir, readlinkat, stat_t,
    symlinkat, utimensat,
)

cdef enum:
    LONGEST = 4095          # bytes of a path
    BUFFER = 1 << 18        # at least XATTR_SIZE_MAX and XATTR_LIST_MAX
    RANGE = 1 << 30         # of one copy_file_range(2)


cdef struct Known:
    uint64_t device
    uint64_t inode
    char *path              # of its first name, below the target


cdef struct Copy:
    int target              # the top
    char path[LONGEST + 1]  # of the current entry, below the top
    size_t length
    char *buffer
    Known *known            # files with several names: open addressing, `room` is a power of two
    size_t known_count
    size_t room
    bint clones             # FICLONE has not failed yet
    bint ranges             # copy_file_range(2) has not failed yet
    int64_t size
    int64_t entries
    int error


cdef inline int failed(Copy *copy) noexcept nogil:
    copy.error = errno
    return -1


# --- files with several names ---------------------------------------------------------------------

cdef Known *place(Known *table, size_t room, uint64_t device, uint64_t inode) noexcept nogil:
    cdef size_t at = hash_inode(device, inode) & (room - 1)
    while table[at].path != NULL and (table[at].inode != inode or table[at].device != device):
        at = (at + 1) & (room - 1)
    return &table[at]


cdef int remember(Copy *copy, const stat_t *status) noexcept nogil:
    cdef Known *grown
    cdef Known *entry
    cdef size_t index, room
    if 2 * (copy.known_count + 1) > copy.room:
        room = 2 * copy.room if copy.room else 256
        grown = <Known *>malloc(room * sizeof(Known))
        if grown == NULL:
            return failed(copy)
        for index in range(room):
            grown[index].path = NULL
        for index in range(copy.room):
            if copy.known[index].path != NULL:
                place(grown, room, copy.known[index].device, copy.known[index].inode)[0] = copy.known[index]
        free(copy.known)
        copy.known = grown
        copy.room = room
    entry = place(copy.known, copy.room, status.st_dev, status.st_ino)
    if entry.path == NULL:
        entry.path = <char *>malloc(copy.length + 1)
        if entry.path == NULL:
            return failed(copy)
        memcpy(entry.path, copy.path, copy.length + 1)
        entry.device = status.st_dev
        entry.inode = status.st_ino
        copy.known_count += 1
    return 0


cdef int link_known(Copy *copy, const stat_t *status, int parent, const char *name) noexcept nogil:
    """If the file was already copied under another name, create `name` as a hard link and return 1.
    Returns 0 if it was not copied yet.
    """
    cdef char link[64]
    cdef Known *entry
    cdef int fd, made
    if copy.room == 0:
        return 0
    entry = place(copy.known, copy.room, status.st_dev, status.st_ino)
    if entry.path == NULL:
        return 0
    fd = openat2(
        copy.target,
        entry.path,
        O_PATH | O_NOFOLLOW | O_CLOEXEC,
        RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV,
    )
    if fd < 0:
        return failed(copy)
    snprintf(link, sizeof(link), b"/proc/self/fd/%d", fd)
    made = linkat(AT_FDCWD, link, parent, name, AT_SYMLINK_FOLLOW)
    if made < 0:
        failed(copy)
    close(fd)
    return made if made < 0 else 1


# --- metadata -------------------------------------------------------------------------------------

cdef int copy_attributes(
    Copy *copy, int source, const char *source_path, int target, const char *target_path
) noexcept nogil:
    """Copy extended attributes, by descriptor, or by path if the descriptor is negative.

    Attributes that the target does not support are skipped, as in a layer.
    """
    cdef char *names = copy.buffer
    cdef char *value
    cdef ssize_t size, taken
    cdef size_t at = 0
    cdef int status
    size = flistxattr(source, names, 1 << 16) if source >= 0 else llistxattr(source_path, names, 1 << 16)
    if size < 0:
        return 0 if errno == EOPNOTSUPP or errno == ENOSYS else failed(copy)
    value = names + (1 << 16)
    while at < <size_t>size:
        # overlayfs's own attributes describe the layer, not the file
        if strncmp(names + at, b"trusted.overlay.", 16) != 0 and strncmp(names + at, b"user.overlay.", 13) != 0:
            if source >= 0:
                taken = fgetxattr(source, names + at, value, BUFFER - (1 << 16))
            else:
                taken = lgetxattr(source_path, names + at, value, BUFFER - (1 << 16))
            if taken >= 0:
                if target >= 0:
                    status = fsetxattr(target, names + at, value, <size_t>taken, 0)
                else:
                    status = lsetxattr(target_path, names + at, value, <size_t>taken, 0)
                if status < 0 and errno != EOPNOTSUPP and errno != EPERM:
                    return failed(copy)
            elif errno != ENODATA and errno != EOPNOTSUPP and errno != ERANGE:
                return failed(copy)
        at += strlen(names + at) + 1
    return 0


cdef int copy_metadata(Copy *copy, int source, const stat_t *status, int target) noexcept nogil:
    """Copy owner, mode, attributes and times, in this order, because chown(2) clears the setuid bit
    and capabilities.
    """
    cdef timespec times[2]
    if fchown(target, status.st_uid, status.st_gid) < 0 or fchmod(target, status.st_mode & 0o7777) < 0:
        return failed(copy)
    if copy_attributes(copy, source, NULL, target, NULL) < 0:
        return -1
    times[0] = status.st_atim
    times[1] = status.st_mtim
    if futimens(target, times) < 0:
        return failed(copy)
    return 0


# --- content --------------------------------------------------------------------------------------

cdef int copy_bytes(Copy *copy, int source, int target, int64_t at, int64_t end) noexcept nogil:
    """Copy the range from `at` to `end`, or less if the file became shorter meanwhile."""
    cdef int64_t to = at
    cdef ssize_t moved, written, done
    while at < end and copy.ranges:
        moved = copy_file_range(source, &at, target, &to, <size_t>min(end - at, <int64_t>RANGE), 0)
        if moved == 0:
            return 0
        if moved < 0 and errno != EINTR:
            if errno != EXDEV and errno != EINVAL and errno != ENOSYS and errno != EOPNOTSUPP and errno != EPERM:
                return failed(copy)
            copy.ranges = False
    while at < end:
        moved = pread(source, copy.buffer, <size_t>min(end - at, <int64_t>BUFFER), at)
        if moved == 0:
            return 0
        if moved < 0:
            if errno == EINTR:
                continue
            return failed(copy)
        done = 0
        while done < moved:
            written = pwrite(target, copy.buffer + done, <size_t>(moved - done), at + done)
            if written < 0:
                if errno == EINTR:
                    continue
                return failed(copy)
            done += written
        at += moved
    return 0


cdef int copy_content(Copy *copy, int source, int target, int64_t size) noexcept nogil:
    cdef int64_t at = 0, hole
    if copy.clones:
        if ioctl(target, FICLONE, source) == 0:
            return 0
        if errno not in (EOPNOTSUPP, EXDEV, EINVAL, ENOTTY, ENOSYS, EPERM):
            return failed(copy)
        copy.clones = False
    if ftruncate(target, size) < 0:
        return failed(copy)
    while at < size:
        hole = lseek(source, at, SEEK_DATA)
        if hole < 0:
            if errno == ENXIO:
                return 0
            return copy_bytes(copy, source, target, at, size)  # SEEK_DATA is not supported
        at = hole
        hole = lseek(source, at, SEEK_HOLE)
        if hole < 0 or hole > size:
            hole = size
        if copy_bytes(copy, source, target, at, hole) < 0:
            return -1
        at = hole
    return 0


# --- the tree -------------------------------------------------------------------------------------

cdef int copy_file(Copy *copy, int source_parent, const char *name, int target_parent) noexcept nogil:
    cdef stat_t status
    cdef int source, target, outcome = -1
    source = openat(source_parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOATIME)
    if source < 0:
        return failed(copy)
    if fstat(source, &status) < 0 or not S_ISREG(status.st_mode):
        failed(copy)
    else:
        target = openat(target_parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0o600)
        if target < 0:
            failed(copy)
        else:
            if copy_content(copy, source, target, status.st_size) == 0 and (
                copy_metadata(copy, source, &status, target) == 0
            ):
                copy.size += status.st_size
                outcome = remember(copy, &status) if status.st_nlink > 1 else 0
            close(target)
    close(source)
    return outcome


cdef int copy_link(
    Copy *copy, int source_parent, const char *name, const stat_t *status, int target_parent
) noexcept nogil:
    cdef ssize_t length = readlinkat(source_parent, name, copy.buffer, LONGEST)
    if length < 0:
        return failed(copy)
    copy.buffer[length] = 0
    if symlinkat(copy.buffer, target_parent, name) < 0:
        return failed(copy)
    return finish_other(copy, source_parent, name, status, target_parent)


cdef int finish_other(
    Copy *copy, int source_parent, const char *name, const stat_t *status, int target_parent
) noexcept nogil:
    """Copy owner, attributes and times of a file that must not be opened: a link, a FIFO, a
    device.
    """
    cdef char source[320]
    cdef char target[320]
    cdef timespec times[2]
    if fchownat(target_parent, name, status.st_uid, status.st_gid, AT_SYMLINK_NOFOLLOW) < 0:
        return failed(copy)
    snprintf(source, sizeof(source), b"/proc/self/fd/%d/%s", source_parent, name)
    snprintf(target, sizeof(target), b"/proc/self/fd/%d/%s", target_parent, name)
    if copy_attributes(copy, -1, source, -1, target) < 0:
        return -1
    times[0] = status.st_atim
    times[1] = status.st_mtim
    if utimensat(target_parent, name, times, AT_SYMLINK_NOFOLLOW) < 0:
        return failed(copy)
    return remember(copy, status) if status.st_nlink > 1 else 0


cdef int copy_node(
    Copy *copy, int source_parent, const char *name, const stat_t *status, int target_parent
) noexcept nogil:
    # mknod(2) applies the umask to the mode.
    cdef int fd, outcome
    if mknodat(target_parent, name, (status.st_mode & S_IFMT) | 0o600, status.st_rdev) < 0:
        return failed(copy)
    if finish_other(copy, source_parent, name, status, target_parent) < 0:
        return -1
    fd = openat(target_parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC)
    if fd < 0:
        return failed(copy)
    outcome = chmod_opened(fd, status.st_mode & 0o7777)
    if outcome < 0:
        failed(copy)
    close(fd)
    return outcome


cdef int copy_entry(Copy *copy, int source_parent, const char *name, int target_parent) noexcept nogil:
    cdef stat_t status
    cdef int source, target, linked, outcome
    if fstatat(source_parent, name, &status, AT_SYMLINK_NOFOLLOW) < 0:
        return 0 if errno == ENOENT else failed(copy)
    if S_ISDIR(status.st_mode):
        copy.entries += 1
        if mkdirat(target_parent, name, 0o700) < 0:
            return failed(copy)
        source = openat(source_parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        if source < 0:
            return failed(copy)
        target = openat(target_parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        if target < 0:
            failed(copy)
            close(source)
            return -1
        outcome = copy_directory(copy, source, target)
        close(target)
        return outcome
    if status.st_nlink > 1:
        linked = link_known(copy, &status, target_parent, name)
        if linked:
            copy.entries += linked > 0
            return 0 if linked > 0 else -1
    if S_ISREG(status.st_mode):
        outcome = copy_file(copy, source_parent, name, target_parent)
    elif S_ISLNK(status.st_mode):
        outcome = copy_link(copy, source_parent, name, &status, target_parent)
    elif S_ISFIFO(status.st_mode) or S_ISBLK(status.st_mode) or (S_ISCHR(status.st_mode) and status.st_rdev != 0):
        outcome = copy_node(copy, source_parent, name, &status, target_parent)
    else:
        return 0
    copy.entries += 1
    return outcome


cdef int copy_directory(Copy *copy, int source, int target) noexcept nogil:
    """Copy the entries of the directory `source`, then its own metadata. Closes `source`."""
    cdef DIR *directory = fdopendir(source)
    cdef dirent *found
    cdef stat_t status
    cdef size_t length = copy.length, size
    cdef int outcome = 0
    if directory == NULL:
        failed(copy)
        close(source)
        return -1
    while outcome == 0:
        found = readdir(directory)
        if found == NULL:
            break
        if is_dot(found.d_name):
            continue
        size = strlen(found.d_name)
        if length + 1 + size > LONGEST:
            copy.error = ENAMETOOLONG
            outcome = -1
            break
        if length:
            copy.path[length] = b"/"
            copy.length = length + 1 + size
        else:
            copy.length = size
        memcpy(copy.path + copy.length - size, found.d_name, size + 1)
        outcome = copy_entry(copy, dirfd(directory), found.d_name, target)
        if outcome == 0:
            copy.length = length
            copy.path[length] = 0
    if outcome == 0:
        if fstat(dirfd(directory), &status) < 0:
            outcome = failed(copy)
        else:
            outcome = copy_metadata(copy, dirfd(directory), &status, target)
    closedir(directory)
    return outcome


def copy_tree(int source, int target):
    """Copy the entries of the directory `source` into the directory `target`, and the owner, mode,
    attributes and times of `source` to `target` itself.

    A name that exists in `target` raises OSError EEXIST. Returns the bytes of regular files, and
    the number of entries of all types.
    """
    cdef Copy copy
    cdef size_t index
    cdef int outcome
    cdef int own = openat(source, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
    if own < 0:
        raise OSError(errno, os.strerror(errno))
    copy.target = target
    copy.path[0] = 0
    copy.length = copy.known_count = copy.room = 0
    copy.known = NULL
    copy.clones = copy.ranges = True
    copy.size = copy.entries = 0
    copy.error = 0
    copy.buffer = <char *>malloc(BUFFER)
    if copy.buffer == NULL:
        close(own)
        raise MemoryError
    with nogil:
        outcome = copy_directory(&copy, own, target)
        for index in range(copy.room):
            free(copy.known[index].path)
        free(copy.known)
        free(copy.buffer)
    if outcome < 0:
        raise OSError(copy.error, os.strerror(copy.error), os.fsdecode(<bytes>copy.path))
    return copy.size, copy.entries
