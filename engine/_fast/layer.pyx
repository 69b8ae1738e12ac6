# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Tar streams laid out on disk: image layers in overlayfs's terms, and archives put into a container; trees taken away again, and measured.

Where a name of the archive leads is the kernel's to say: each parent directory is opened by openat2(2) with RESOLVE_IN_ROOT (links, `..`
and absolute names end inside the layer), and the last name is only ever created, with O_EXCL or a call that follows nothing. Names whose
`..` lead above the root, and links to what is outside, are refused before that.

Whiteouts (OCI image specification, "Representing Changes"): `.wh.NAME` becomes a character device 0/0 called NAME, `.wh..wh..opq` the
attribute trusted.overlay.opaque of its directory, other names with `.wh..wh.` are left out (aufs kept its own things there). That is so in layers
alone: for `unpack` they are names like others.

`unpack` writes to a live container, which may change anything meanwhile. What it then gets may be wrong, but it is in the container: every
directory is opened anew from the container's root, volumes included, and what is made is made by its last name in that directory. An archive may
be a bomb: see `charge`.

What `unpack` spends is nearly all the kernel's, in making files: so threads of its own write the small ones (`Crew`), while it reads on. What comes out is
as if each entry had waited for the one before it.

Owns:    nothing between calls. Descriptors stay the caller's.
Threads: any number at once, each on another directory. The GIL is released for the whole of a call, but for reading a Python source.
Raises:  tar.ArchiveError, and OSError with the kernel's errno and the entry's name. What was laid out by then stays: the caller's to remove.
"""
from libc.errno cimport EEXIST, EINTR, EISDIR, ELOOP, ENAMETOOLONG, ENOMEM, ENOENT, ENOSPC, ENOTDIR, ENOTEMPTY, EOPNOTSUPP, EPERM, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset, strcmp, strlen, strncmp, strrchr

import os

from engine._fast.linux cimport RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_XDEV, openat2
from engine._fast.tar cimport TAR_MAX_PATH, Entry, Reader

cdef extern from "<fcntl.h>" nogil:
    enum:
        AT_REMOVEDIR
        AT_FDCWD
        AT_SYMLINK_NOFOLLOW
        O_CLOEXEC
        O_CREAT
        O_DIRECTORY
        O_EXCL
        O_NOFOLLOW
        O_PATH
        O_RDONLY
        O_WRONLY
        F_DUPFD_CLOEXEC
    int fcntl(int fd, int command, ...)
    int openat(int directory, const char *path, int flags, ...)

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_create(pthread_t *thread, const void *attributes, void *(*run)(void *) noexcept nogil, void *argument)
    int pthread_join(pthread_t thread, void **result)
    int pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_cond_init(pthread_cond_t *condition, const void *attributes)
    int pthread_cond_destroy(pthread_cond_t *condition)
    int pthread_cond_broadcast(pthread_cond_t *condition)
    int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)

cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    enum:
        SIG_SETMASK
    int sigfillset(sigset_t *signals)
    int pthread_sigmask(int how, const sigset_t *signals, sigset_t *before)

cdef extern from "<unistd.h>" nogil:
    enum:
        _SC_NPROCESSORS_ONLN
    long sysconf(int name)
    int close(int fd)
    int unlinkat(int directory, const char *path, int flags)
    int ftruncate(int fd, int64_t size)
    int fchown(int fd, uint32_t uid, uint32_t gid)
    int fchownat(int directory, const char *path, uint32_t uid, uint32_t gid, int flags)
    int linkat(int old_directory, const char *old_path, int new_directory, const char *new_path, int flags)
    int symlinkat(const char *target, int directory, const char *path)
    ssize_t write(int fd, const void *data, size_t size)
    ssize_t pwrite(int fd, const void *data, size_t size, int64_t offset)

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
    cdef struct timespec:
        int64_t tv_sec
        int64_t tv_nsec
    cdef struct stat_t "stat":
        uint32_t st_mode
        int64_t st_size
        int64_t st_nlink
        uint64_t st_rdev
        uint64_t st_dev
        uint64_t st_ino
    enum:
        S_IFBLK
        S_IFCHR
        S_IFIFO
        S_ISGID
    int fstat(int fd, stat_t *found)
    int fchmod(int fd, uint32_t mode)
    int fchmodat(int directory, const char *path, uint32_t mode, int flags)
    int mkdirat(int directory, const char *path, uint32_t mode)
    int mknodat(int directory, const char *path, uint32_t mode, uint64_t device)
    int futimens(int fd, const timespec *times)
    int utimensat(int directory, const char *path, const timespec *times, int flags)
    bint S_ISCHR(uint32_t mode)
    int fstatat(int directory, const char *path, stat_t *found, int flags)
    bint S_ISREG(uint32_t mode)
    bint S_ISLNK(uint32_t mode)
    bint S_ISDIR(uint32_t mode)

cdef extern from "<sys/statvfs.h>" nogil:
    cdef struct statvfs_t "statvfs":
        unsigned long f_frsize
        uint64_t f_blocks
        uint64_t f_bavail
        uint64_t f_files
        uint64_t f_favail
    int fstatvfs(int fd, statvfs_t *found)

cdef extern from "<sys/sysmacros.h>" nogil:
    uint64_t makedev(uint32_t major, uint32_t minor)

cdef extern from "<sys/xattr.h>" nogil:
    int fsetxattr(int fd, const char *name, const void *value, size_t size, int flags)
    int lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags)

cdef enum:
    DEEPEST = 64            # directories open at once
    NAMES = 100000          # tries for a name that the tree does not have yet
    UNCHECKED = 16 << 20    # bytes that `unpack` may write between two looks at the free space, or a quarter of what it has where that is less
    RESERVE = 512 << 20     # bytes that it leaves free, or a twentieth of the file system where that is less
    INODES = 4096           # inodes likewise
    SMALL = 64 << 10        # bytes of a file up to which it is the crew's
    FEW = 64                # files that are written before threads are worth their start
    HANDS = 2               # threads of a crew: more only queue for the kernel's locks
    BATCH = 192 << 10       # bytes of a batch
    BATCHES = 20            # how many there are at most
    RACES = 1000            # times that one entry is tried again when others use its name


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
        if errno != ENOENT and errno != ENOTDIR and errno != ELOOP:     # somebody took its place: who asked for it looks again
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


cdef void measure(int fd, int64_t *size, double *shared, int64_t *entries, int depth) noexcept nogil:
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
        if S_ISREG(status.st_mode) or S_ISLNK(status.st_mode):
            if status.st_nlink > 1:
                shared[0] += <double>status.st_size / <double>status.st_nlink
            else:
                size[0] += status.st_size
        elif S_ISDIR(status.st_mode) and depth < 4 * DEEPEST:
            below = openat(dirfd(directory), found.d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
            if below >= 0:
                measure(below, size, shared, entries, depth + 1)
    closedir(directory)


def usage(int directory):
    """Bytes of the files and of the links' targets below a directory descriptor, as Docker counts them, and entries of every type.
    What a writer takes away meanwhile is not counted.

    A file of several names is shared out among them. Directories more than 256 deep are counted as one entry, closed.
    """
    cdef int64_t size = 0, entries = 0
    cdef double shared = 0
    cdef int fd = openat(directory, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
    if fd < 0:
        raise OSError(errno, os.strerror(errno))
    with nogil:
        measure(fd, &size, &shared, &entries, 0)
    return size + round(shared), entries


# --- files of a container, made and written ---------------------------------------------------------------------------

cdef struct Owner:
    uint32_t uid
    uint32_t gid
    bint given              # to be set, rather than what the file is made with


cdef int make_file(int parent, const char *base, const Owner *owner, uint32_t mode) noexcept nogil:
    """A new file, open to be written; -1. With its mode already where nothing can be lost by that: no one else's, and no set-id bit."""
    if owner.given or mode & 0o7000:
        mode &= 0o700
    return openat(parent, base, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode)


cdef int give(int fd, const Owner *owner, uint32_t mode, uint8_t *kept) noexcept nogil:
    """Owner and mode of what `make_file` made; -1. `kept`: of each mode, whether a file made with it in this directory has had it.

    The umask, and an access control list that the directory hands down, take bits of it away.
    """
    cdef stat_t found
    if owner.given:
        # chown(2) clears the set-id bits and security.capability.
        return -1 if fchown(fd, owner.uid, owner.gid) < 0 or fchmod(fd, mode) < 0 else 0
    if mode & 0o7000:
        return fchmod(fd, mode)
    if kept[mode]:
        return 0
    if fstat(fd, &found) < 0:
        return -1
    if found.st_mode & 0o7777 != mode:
        return fchmod(fd, mode)
    kept[mode] = True
    return 0


cdef int write_all(int fd, const uint8_t *data, size_t size) noexcept nogil:
    cdef ssize_t put
    while size:
        put = write(fd, data, size)
        if put < 0:
            if errno == EINTR:
                continue
            return -1
        data += put
        size -= put
    return 0


# A file in a batch; its name, with the NUL, and its content follow.
cdef struct Small:
    size_t room             # of all of it
    size_t length           # of the name
    size_t size
    timespec time
    Owner owner
    uint32_t mode


# Files for one directory, in the order of the archive.
cdef struct Batch:
    Batch *next
    int directory           # its own descriptor, or the errno of why there is none, negative
    uint64_t device         # and inode, which say whether two descriptors are of one directory
    uint64_t inode
    size_t used
    int64_t charged         # bytes, as `charge` counts them
    int64_t files
    uint8_t data[BATCH]


cdef struct Crew

cdef struct Hand:
    Crew *crew
    pthread_t thread
    Batch *first            # what it has to do; the first is being written
    Batch *last
    int64_t charged


# Threads that write small files. All is guarded by `lock`, but what is in a batch, which nobody changes once it has been handed over.
#
# The order of the archive holds where it matters: what is for one directory goes to one hand as long as that has something for it, and whoever
# makes anything else asks first whether its name is `awaited`, or waits until all is written.
cdef struct Crew:
    pthread_mutex_t lock
    pthread_cond_t changed
    Hand hands[HANDS]
    int count
    int batches             # that were allocated
    Batch *spare
    int64_t charged
    int64_t files
    bint ending
    int error               # errno of the first failure; what is handed over afterwards is dropped
    char failed[4096]


cdef int write_small(int directory, const Small *small, uint8_t *kept) noexcept nogil:
    """0, or errno."""
    cdef const char *base = <const char *>small + sizeof(Small)
    cdef timespec times[2]
    cdef stat_t found
    cdef int status = 0, fd, races = 0
    while True:
        fd = make_file(directory, base, &small.owner, small.mode)
        if fd >= 0:
            break
        if errno == ENOENT:
            return 0        # as `missing`
        if errno != EEXIST or races == RACES:
            return errno
        races += 1
        if fstatat(directory, base, &found, AT_SYMLINK_NOFOLLOW) == 0 and S_ISDIR(found.st_mode):
            return EISDIR   # a container's doing: it was not there before
        if unlinkat(directory, base, 0) < 0 and errno != ENOENT:
            return errno
    times[0] = times[1] = small.time
    if (
        write_all(fd, <const uint8_t *>base + small.length + 1, small.size) < 0
        or give(fd, &small.owner, small.mode, kept) < 0
        or futimens(fd, times) < 0
    ):
        status = errno
    if close(fd) < 0 and status == 0:
        status = errno
    return status


cdef void *run_hand(void *argument) noexcept nogil:
    cdef Hand *hand = <Hand *>argument
    cdef Crew *crew = hand.crew
    cdef Batch *batch
    cdef Small *small
    cdef uint8_t kept[512]
    cdef size_t at
    cdef int status
    pthread_mutex_lock(&crew.lock)
    while True:
        batch = hand.first
        if batch == NULL:
            if crew.ending:
                break
            pthread_cond_wait(&crew.changed, &crew.lock)
            continue
        status = crew.error
        if batch.directory < 0 and status == 0:
            status = -batch.directory
        pthread_mutex_unlock(&crew.lock)
        memset(kept, 0, sizeof(kept))
        at = 0
        small = <Small *>batch.data
        while status == 0 and at < batch.used:
            small = <Small *>(batch.data + at)
            status = write_small(batch.directory, small, kept)
            at += small.room
        if batch.directory >= 0:
            close(batch.directory)
        pthread_mutex_lock(&crew.lock)
        if status and crew.error == 0:
            crew.error = status
            memcpy(crew.failed, <const char *>small + sizeof(Small), small.length + 1)
        hand.first = batch.next
        hand.charged -= batch.charged
        crew.charged -= batch.charged
        crew.files -= batch.files
        batch.next = crew.spare
        crew.spare = batch
        pthread_cond_broadcast(&crew.changed)
    pthread_mutex_unlock(&crew.lock)
    return NULL


cdef Crew *assemble() noexcept nogil:
    """NULL where one processor is all there is, or nothing can be had."""
    cdef Crew *crew
    cdef sigset_t all, before
    cdef long processors = sysconf(_SC_NPROCESSORS_ONLN)
    if processors < 2:
        return NULL
    crew = <Crew *>malloc(sizeof(Crew))
    if crew == NULL:
        return NULL
    memset(crew, 0, sizeof(Crew))
    pthread_mutex_init(&crew.lock, NULL)
    pthread_cond_init(&crew.changed, NULL)
    sigfillset(&all)
    pthread_sigmask(SIG_SETMASK, &all, &before)
    while crew.count < HANDS:
        crew.hands[crew.count].crew = crew
        if pthread_create(&crew.hands[crew.count].thread, NULL, run_hand, &crew.hands[crew.count]) != 0:
            break
        crew.count += 1
    pthread_sigmask(SIG_SETMASK, &before, NULL)
    if crew.count == 0:
        dismiss(crew)
        return NULL
    return crew


cdef void dismiss(Crew *crew) noexcept nogil:
    """After all it has to do."""
    cdef Batch *batch
    cdef int index
    pthread_mutex_lock(&crew.lock)
    crew.ending = True
    pthread_cond_broadcast(&crew.changed)
    pthread_mutex_unlock(&crew.lock)
    for index in range(crew.count):
        pthread_join(crew.hands[index].thread, NULL)
    while crew.spare != NULL:
        batch = crew.spare
        crew.spare = batch.next
        free(batch)
    pthread_cond_destroy(&crew.changed)
    pthread_mutex_destroy(&crew.lock)
    free(crew)


cdef Batch *new_batch(Crew *crew) noexcept nogil:
    """An empty one, as soon as there is one; NULL without memory."""
    cdef Batch *batch
    pthread_mutex_lock(&crew.lock)
    if crew.spare == NULL and crew.batches < BATCHES:
        batch = <Batch *>malloc(sizeof(Batch))
        if batch != NULL:
            crew.batches += 1
    else:
        while crew.spare == NULL:
            pthread_cond_wait(&crew.changed, &crew.lock)
        batch = crew.spare
        crew.spare = batch.next
    pthread_mutex_unlock(&crew.lock)
    return batch


cdef void hand_over(Crew *crew, Batch *batch) noexcept nogil:
    cdef Hand *hand
    cdef Hand *chosen = NULL
    cdef Batch *other
    cdef int index
    batch.next = NULL
    pthread_mutex_lock(&crew.lock)
    for index in range(crew.count):
        hand = &crew.hands[index]
        other = hand.first
        while other != NULL and not (other.inode == batch.inode and other.device == batch.device):
            other = other.next
        if other != NULL:
            chosen = hand
            break
        if chosen == NULL or hand.charged < chosen.charged:
            chosen = hand
    if chosen.first == NULL:
        chosen.first = batch
    else:
        chosen.last.next = batch
    chosen.last = batch
    chosen.charged += batch.charged
    crew.charged += batch.charged
    crew.files += batch.files
    pthread_cond_broadcast(&crew.changed)
    pthread_mutex_unlock(&crew.lock)


cdef bint has_name(const Batch *batch, const char *base, size_t length) noexcept nogil:
    cdef size_t at = 0
    cdef const Small *small
    while at < batch.used:
        small = <const Small *>(batch.data + at)
        if small.length == length and strcmp(<const char *>small + sizeof(Small), base) == 0:
            return True
        at += small.room
    return False


cdef bint awaited(Crew *crew, uint64_t device, uint64_t inode, const char *base) noexcept nogil:
    """Whether the crew still has a file of that name for that directory."""
    cdef Batch *batch
    cdef size_t length = strlen(base)
    cdef int index
    cdef bint found = False
    pthread_mutex_lock(&crew.lock)
    for index in range(crew.count):
        batch = crew.hands[index].first
        while batch != NULL and not found:
            found = batch.inode == inode and batch.device == device and has_name(batch, base, length)
            batch = batch.next
    pthread_mutex_unlock(&crew.lock)
    return found


cdef void finish(Crew *crew) noexcept nogil:
    """Wait until all that was handed over is written."""
    cdef int index = 0
    pthread_mutex_lock(&crew.lock)
    while index < crew.count:
        if crew.hands[index].first != NULL:
            pthread_cond_wait(&crew.changed, &crew.lock)
        else:
            index += 1
    pthread_mutex_unlock(&crew.lock)


# --- a layer from its tar stream ------------------------------------------------------------------------------------

cdef int64_t MAX_NAMES = 32 * 1024 * 1024       # bytes kept of the names of directories, whose times come last


cdef struct Directory:
    char *path
    timespec times[2]
    bint implied            # made because something lies in it; no entry of its own was met


cdef int clean(const char *raw, char *path) noexcept nogil:
    """`raw` without empty parts, `.` and `..`, relative; its length, or -1 when it leads above the root. `path` holds TAR_MAX_PATH + 1."""
    cdef size_t length = 0, part
    cdef const char *at = raw
    while at[0]:
        if at[0] == b"/":
            at += 1
            continue
        part = 0
        while at[part] and at[part] != b"/":
            part += 1
        if part == 1 and at[0] == b".":
            pass
        elif part == 2 and at[0] == b"." and at[1] == b".":
            if length == 0:
                return -1
            while length and path[length - 1] != b"/":
                length -= 1
            if length:
                length -= 1
        else:
            if length:
                path[length] = b"/"
                length += 1
            memcpy(path + length, at, part)
            length += part
        at += part
    path[length] = 0
    return <int>length


cdef class _Layout:
    """One `apply` while it runs."""

    cdef int root
    cdef Reader reader
    cdef int parent_fd              # of `parent`, -1 for none
    cdef bint parent_gives_group    # set-group-id: what is made in it does not get our own group
    cdef char parent[4096]
    cdef char path[4096]
    cdef char link[4096]
    cdef char name[4352]            # of the entry in the making, or of a parent
    cdef Directory *directories
    cdef size_t directory_count
    cdef size_t directory_room
    cdef int64_t names
    cdef int64_t size
    cdef int64_t refused            # extended attributes that the file system does not take
    cdef bint root_met
    cdef int races                  # how often others used this entry's name
    cdef bint into                  # `unpack`: into a container, across its mounts
    cdef bint keep_kinds            # no directory is replaced by something else, nor the reverse
    cdef const char *base           # where in the root names begin
    cdef size_t base_length
    cdef int64_t allowed            # bytes that may be written to `device` before free space is looked at again
    cdef uint64_t device
    cdef uint64_t parent_device     # and inode, of `parent`
    cdef uint64_t parent_inode
    cdef uint64_t made_device       # and inode, of a directory that this made last and where it put nothing but files; inode 0: none
    cdef uint64_t made_inode
    cdef uint8_t kept[512]          # see `give`
    cdef Crew *crew                 # NULL: none
    cdef Batch *batch               # for `parent`, not yet handed over; NULL: none
    cdef int files                  # that were written before there was a crew

    def __cinit__(self, int root, Reader reader not None):
        self.root = root
        self.reader = reader
        self.parent_fd = -1
        self.directories = NULL
        self.base = b""
        self.crew = NULL
        self.batch = NULL

    def __dealloc__(self):
        cdef size_t index
        if self.parent_fd >= 0:
            close(self.parent_fd)
        for index in range(self.directory_count):
            free(self.directories[index].path)
        free(self.directories)

    cdef int fail(self, const char *reason) noexcept nogil:
        snprintf(self.name, sizeof(self.name), b"%s: %.3900s", reason, self.reader.entry.name)
        return self.reader.fail(self.name)

    cdef int fail_system(self) noexcept nogil:
        return self.reader.fail_system(self.reader.entry.name, errno)

    cdef int missing(self) noexcept nogil:
        """After a call failed about what was just made, or in a directory just opened: 0 where others may have taken that away.

        Then it is as if they had done so later, with what the entry would have put there.
        """
        return 0 if self.into and (errno == ENOENT or errno == ENOTDIR or errno == ELOOP) else self.fail_system()

    cdef int again(self, const char *base) noexcept nogil:
        """After something could not be made because its name is taken: make room. -1 when others use the name again and again."""
        self.races += 1
        if self.races > RACES:
            return self.fail(b"changed again and again while it was put there")
        return self.make_room(base)

    # --- directories ------------------------------------------------------------------------------------------------

    cdef void forget_parent(self) noexcept nogil:
        self.hand_over()
        if self.parent_fd >= 0:
            close(self.parent_fd)
        self.parent_fd = -1

    cdef int open_directory(self, const char *path, int flags) noexcept nogil:
        cdef uint64_t resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
        if not self.into:
            resolve |= RESOLVE_NO_XDEV
        if path[0] == 0:
            path = b"."
        return openat2(self.root, path, flags | O_DIRECTORY | O_CLOEXEC, resolve)

    cdef int enter(self, size_t length) noexcept nogil:
        """Have `parent_fd` for the first `length` bytes of `path`, made where they do not exist."""
        cdef stat_t found
        if self.parent_fd >= 0 and strncmp(self.parent, self.path, length) == 0 and self.parent[length] == 0:
            return 0
        self.forget_parent()
        memcpy(self.parent, self.path, length)
        self.parent[length] = 0
        self.parent_fd = self.open_directory(self.parent, O_PATH)
        while self.parent_fd < 0:
            if errno != ENOENT and errno != ENOTDIR:
                return self.fail_system()
            if self.settle() < 0 or self.make_parents(length) < 0:
                return -1
            self.parent_fd = self.open_directory(self.parent, O_PATH)
            self.races += 1
            if self.races > RACES:
                return self.fail(b"a parent of the entry was changed again and again")
        if fstat(self.parent_fd, &found) < 0:
            return self.fail_system()
        self.parent_gives_group = found.st_mode & S_ISGID != 0
        self.parent_device = found.st_dev
        self.parent_inode = found.st_ino
        memset(self.kept, 0, sizeof(self.kept))
        return 0

    cdef int make_parents(self, size_t length) noexcept nogil:
        """Walk down `parent`, making what is missing; a whiteout in the way becomes an opaque directory.

        In a live container others may be faster, or take it away again: who calls looks, and tries again.
        """
        cdef size_t at = 0, begin
        cdef int fd, above = self.open_directory(b"", O_PATH)
        cdef stat_t found
        cdef char kept
        cdef bint whiteout
        if above < 0:
            return self.fail_system()
        self.made_inode = 0
        while at < length:
            begin = at
            while at < length and self.parent[at] != b"/":
                at += 1
            kept = self.parent[at]
            self.parent[at] = 0
            fd = self.open_directory(self.parent, O_PATH)
            if fd < 0:
                whiteout = False
                if errno == ENOTDIR or errno == ENOENT:
                    if fstatat(above, self.parent + begin, &found, AT_SYMLINK_NOFOLLOW) == 0:
                        whiteout = not self.into and S_ISCHR(found.st_mode) and found.st_rdev == 0
                        if not whiteout:
                            close(above)
                            self.parent[at] = kept
                            return 0 if S_ISDIR(found.st_mode) else self.fail(b"a parent of the entry is no directory")
                        unlinkat(above, self.parent + begin, 0)
                    elif at <= self.base_length:        # the directory that the archive is for
                        close(above)
                        return self.reader.fail_system(self.base, ENOENT)
                    if mkdirat(above, self.parent + begin, 0o755) == 0:
                        fd = openat(above, self.parent + begin, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                        if fd >= 0 and fchmod(fd, 0o755) < 0:       # whatever the umask made of it
                            close(fd)
                            fd = -1
                if fd < 0:
                    close(above)
                    self.parent[at] = kept
                    return 0 if self.into and errno == EEXIST else self.missing()
                if self.remember(self.parent, True) < 0 or (whiteout and self.make_opaque(fd) < 0):
                    close(fd)
                    close(above)
                    return -1
            close(above)
            above = fd
            self.parent[at] = kept
            at += 1
        close(above)
        return 0

    cdef int make_opaque(self, int directory) noexcept nogil:
        """Hide what lower layers have in it. `directory` may be an O_PATH descriptor, which fsetxattr(2) does not take."""
        cdef int status, fd = openat(directory, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
        if fd < 0:
            return self.fail_system()
        status = fsetxattr(fd, b"trusted.overlay.opaque", b"y", 1, 0)
        if status < 0:
            self.fail_system()
        close(fd)
        return status

    cdef int remember(self, const char *path, bint implied) noexcept nogil:
        """Keep a directory for the end, when nothing changes its times any more."""
        cdef Directory *room
        cdef Directory *directory
        cdef size_t wanted, length = strlen(path)
        self.names += length + sizeof(Directory)
        if self.names > MAX_NAMES:
            return self.reader.fail(b"the layer has too many directories: their names take more than 32 MiB")
        if self.directory_count == self.directory_room:
            wanted = self.directory_room * 2 if self.directory_room else 256
            room = <Directory *>realloc(self.directories, wanted * sizeof(Directory))
            if room == NULL:
                return self.reader.fail_system(b"list of directories", 12)
            self.directories = room
            self.directory_room = wanted
        directory = &self.directories[self.directory_count]
        directory.path = <char *>malloc(length + 1)
        if directory.path == NULL:
            return self.reader.fail_system(b"list of directories", 12)
        memcpy(directory.path, path, length + 1)
        self.set_times(directory.times)
        directory.implied = implied
        self.directory_count += 1
        return 0

    cdef void set_times(self, timespec *times) noexcept nogil:
        times[0].tv_sec = times[1].tv_sec = self.reader.entry.seconds
        times[0].tv_nsec = times[1].tv_nsec = self.reader.entry.nanoseconds

    cdef int finish_directories(self) noexcept nogil:
        """Times of the directories that entries named. One that was replaced meanwhile has lost its claim."""
        cdef size_t index
        cdef int fd
        for index in range(self.directory_count):
            if self.directories[index].implied:
                continue
            fd = self.open_directory(self.directories[index].path, O_RDONLY | O_NOFOLLOW)
            if fd < 0:
                continue
            if futimens(fd, self.directories[index].times) < 0:
                self.reader.fail_system(self.directories[index].path, errno)
                close(fd)
                return -1
            close(fd)
        return 0

    # --- entries ----------------------------------------------------------------------------------------------------

    cdef int run(self) noexcept nogil:
        cdef int status = self.place_all()
        if self.settle() < 0:
            status = -1
        if self.crew != NULL:
            dismiss(self.crew)
            self.crew = NULL
        return status if status < 0 else self.finish_directories()

    cdef int place_all(self) noexcept nogil:
        cdef int got
        while True:
            got = self.reader.next()
            if got < 0:
                return -1
            if got == 0:
                break
            if self.place() < 0:
                return -1
        return self.reader.drain()

    cdef int place(self) noexcept nogil:
        cdef Entry *entry = &self.reader.entry
        cdef int length = clean(entry.name, self.path)
        cdef size_t begin = 0, at
        cdef const char *base
        self.races = 0
        if length < 0:
            return self.fail(b"the entry leads out of the directory" if self.into else b"the entry leads out of the layer")
        if length == 0:
            if self.into and entry.type == b"5":
                return 0            # the directory itself stays as it is
            if entry.type != b"5":
                return self.fail(b"the root of the archive is no directory" if self.into else b"the root of the layer is no directory")
            self.root_met = True
            return self.finish_directory(self.root, b".", False)
        length = self.put_base(self.path, length)
        if length < 0:
            return self.reader.fail_system(entry.name, ENAMETOOLONG)
        for at in range(<size_t>length + 1):
            if self.path[at] == b"/" or self.path[at] == 0:
                if not self.into and strncmp(self.path + begin, b".wh..wh.", 8) == 0 and (
                    self.path[at] != 0 or strcmp(self.path + begin, b".wh..wh..opq") != 0
                ):
                    return 0
                if self.path[at]:
                    begin = at + 1
        base = self.path + begin
        if self.enter(begin - 1 if begin else 0) < 0:
            return -1
        if self.crew != NULL:
            if entry.type == b"0" and entry.size <= SMALL and not entry.sparse and entry.attribute_count == 0 and self.may_batch(base):
                return self.add_small(base)
            if self.await_name(base) < 0:
                return -1
        if entry.type != b"0" and self.in_made():
            self.made_inode = 0
        if not self.into and strncmp(base, b".wh.", 4) == 0:
            if strcmp(base, b".wh..wh..opq") == 0:
                return self.make_opaque(self.parent_fd)
            return self.white_out(base + 4)
        if entry.type == b"5":
            return self.place_directory(base)
        if entry.type == b"0":
            return self.place_file(base)
        if entry.type == b"1":
            return self.place_link(base)
        return self.place_special(base)

    # --- what the crew does ---------------------------------------------------------------------------------------------

    cdef bint may_batch(self, const char *base) noexcept nogil:
        """Only what replaces nothing but a file: paths lead where they lead now, whether or not the crew has come to it."""
        cdef stat_t found
        if self.in_made():
            return True
        if fstatat(self.parent_fd, base, &found, AT_SYMLINK_NOFOLLOW) < 0:
            return errno == ENOENT
        return S_ISREG(found.st_mode)

    cdef bint in_made(self) noexcept nogil:
        return self.made_inode != 0 and self.parent_inode == self.made_inode and self.parent_device == self.made_device

    cdef int add_small(self, const char *base) noexcept nogil:
        cdef Entry *entry = &self.reader.entry
        cdef size_t length = strlen(base), size = <size_t>entry.size, part
        cdef size_t room = (sizeof(Small) + length + 1 + size + 15) & ~<size_t>15
        cdef const uint8_t *data
        cdef uint8_t *at
        cdef Small *small
        if self.charge(entry.size + 4096) < 0:
            return -1
        if self.batch != NULL and self.batch.used + room > BATCH:
            self.hand_over()
        if self.batch == NULL:
            if self.check_crew() < 0:
                return -1
            self.batch = new_batch(self.crew)
            if self.batch == NULL:
                return self.reader.fail_system(entry.name, ENOMEM)
            self.batch.used = 0
            self.batch.charged = self.batch.files = 0
            self.batch.device = self.parent_device
            self.batch.inode = self.parent_inode
        small = <Small *>(self.batch.data + self.batch.used)
        small.room = room
        small.length = length
        small.size = size
        small.time.tv_sec = entry.seconds
        small.time.tv_nsec = entry.nanoseconds
        small.mode = entry.mode
        self.set_owner(&small.owner)
        at = <uint8_t *>small + sizeof(Small)
        memcpy(at, base, length + 1)
        at += length + 1
        while size:
            if self.reader.payload(&data, &part) <= 0:
                return self.fail(b"truncated archive")
            memcpy(at, data, part)
            at += part
            size -= part
        # Only now is it whole.
        self.batch.used += room
        self.batch.files += 1
        self.batch.charged += entry.size + 4096
        self.size += entry.size
        return 0

    cdef void hand_over(self) noexcept nogil:
        cdef Batch *batch = self.batch
        self.batch = NULL
        if batch == NULL:
            return
        batch.directory = fcntl(self.parent_fd, F_DUPFD_CLOEXEC, 0)
        if batch.directory < 0:
            batch.directory = -errno
        hand_over(self.crew, batch)

    cdef int check_crew(self) noexcept nogil:
        """-1 when it has failed."""
        cdef int error
        pthread_mutex_lock(&self.crew.lock)
        error = self.crew.error
        pthread_mutex_unlock(&self.crew.lock)
        return self.reader.fail_system(self.crew.failed, error) if error else 0

    cdef int await_name(self, const char *base) noexcept nogil:
        """Before something is made in `parent`: have what comes before it under the same name."""
        if self.batch != NULL and has_name(self.batch, base, strlen(base)):
            return self.settle()
        if awaited(self.crew, self.parent_device, self.parent_inode, base):
            return self.settle()
        return 0

    cdef int settle(self) noexcept nogil:
        """Have all that came so far; -1 when some of it failed."""
        if self.crew == NULL:
            return 0
        self.hand_over()
        finish(self.crew)
        return self.check_crew()

    cdef int put_base(self, char *path, int length) noexcept nogil:
        """A clean path seen from the root rather than from where the names begin; its length, or -1 when it gets too long."""
        if self.base_length == 0:
            return length
        if self.base_length + 1 + length > TAR_MAX_PATH:
            return -1
        memmove(path + self.base_length + 1, path, length + 1)
        memcpy(path, self.base, self.base_length)
        path[self.base_length] = b"/"
        return <int>self.base_length + 1 + length

    cdef int charge(self, int64_t size) noexcept nogil:
        """Before `size` bytes are written to a file in `parent`: refuse what would fill the file system up.

        An archive of some kilobytes may inflate to anything. A twentieth of a file system stays free, or 512 MiB where that is less, and likewise
        4,096 of its inodes. What the crew has not written yet is as good as written.
        """
        cdef statvfs_t found
        cdef int64_t free, reserve, charged = 0, files = 0
        self.allowed -= size
        if self.allowed >= 0 and self.parent_device == self.device:
            return 0
        if self.crew != NULL:
            self.hand_over()
            pthread_mutex_lock(&self.crew.lock)
            charged, files = self.crew.charged, self.crew.files
            pthread_mutex_unlock(&self.crew.lock)
        if fstatvfs(self.parent_fd, &found) < 0:
            return self.fail_system()
        reserve = <int64_t>(found.f_blocks * found.f_frsize // 20)
        free = <int64_t>(found.f_bavail * found.f_frsize) - (reserve if reserve < RESERVE else RESERVE) - size - charged
        if free < 0:
            return self.reader.fail_system(self.reader.entry.name, ENOSPC)
        self.allowed = free // 4 if free // 4 < UNCHECKED else UNCHECKED
        self.device = self.parent_device
        if found.f_files:
            reserve = <int64_t>(found.f_files // 20)
            free = <int64_t>found.f_favail - (reserve if reserve < INODES else INODES) - files
            if free <= 0:
                return self.reader.fail_system(self.reader.entry.name, ENOSPC)
            if free * 1024 < self.allowed:
                self.allowed = free * 1024      # each of them is charged at least four times that
        return 0

    cdef int white_out(self, const char *base) noexcept nogil:
        cdef stat_t found
        cdef int fd, status
        if base[0] == 0 or is_dot(base):
            return self.fail(b"whiteout of what is no name")
        if mknodat(self.parent_fd, base, S_IFCHR, 0) == 0:
            return 0
        if errno != EEXIST or fstatat(self.parent_fd, base, &found, AT_SYMLINK_NOFOLLOW) < 0:
            return self.fail_system()
        if not S_ISDIR(found.st_mode):
            return 0            # what this layer brings hides the lower one as it is
        fd = openat(self.parent_fd, base, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return self.fail_system()
        status = self.make_opaque(fd)
        close(fd)
        return status

    cdef int make_room(self, const char *base) noexcept nogil:
        """Take away what an earlier entry put there. 1 when that was a whiteout, else 0, or -1.

        In a live container others may have been faster, or put something there anew: who calls tries again.
        """
        cdef stat_t found
        cdef Removal removal
        cdef int parent = self.parent_fd
        if self.settle() < 0:
            return -1
        if fstatat(parent, base, &found, AT_SYMLINK_NOFOLLOW) < 0:
            return 0 if self.into and errno == ENOENT else self.fail_system()
        if not (S_ISCHR(found.st_mode) and found.st_rdev == 0) and self.reader.spell_out() < 0:
            return -1
        if S_ISDIR(found.st_mode):
            if self.keep_kinds:
                return self.fail(b"cannot overwrite directory with non-directory")
            memset(&removal, 0, sizeof(removal))
            removal.top = -1
            remove_one(parent, base, &removal, 0, True)
            if removal.error:
                return self.reader.fail_system(self.reader.entry.name, removal.error)
            return 0
        if unlinkat(parent, base, 0) < 0 and not (self.into and (errno == ENOENT or errno == EISDIR)):
            return self.fail_system()
        return not self.into and S_ISCHR(found.st_mode) and found.st_rdev == 0

    cdef int place_directory(self, const char *base) noexcept nogil:
        cdef stat_t found
        cdef int fd, whiteout = 0
        cdef bint made = True
        if self.into and self.charge(4096) < 0:
            return -1
        while mkdirat(self.parent_fd, base, 0o700) < 0:
            if errno != EEXIST:
                return self.missing()
            made = False
            if self.settle() < 0:       # it may be about to have another group or mode
                return -1
            if fstatat(self.parent_fd, base, &found, AT_SYMLINK_NOFOLLOW) < 0:
                self.races += 1
                if errno == ENOENT and self.races <= RACES:
                    continue
                return self.fail_system()
            if S_ISDIR(found.st_mode):
                break
            if self.keep_kinds:
                return self.fail(b"cannot overwrite non-directory with directory")
            whiteout = self.again(base)
            if whiteout < 0:
                return -1
        if whiteout:
            fd = openat(self.parent_fd, base, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
            if fd < 0:
                return self.fail_system()
            if self.make_opaque(fd) < 0:
                close(fd)
                return -1
            close(fd)
        return self.finish_directory(self.parent_fd, base, made)

    cdef int finish_directory(self, int above, const char *base, bint made) noexcept nogil:
        """On one descriptor: a container may put a link in its place at any time, and chmod(2) by name would follow that out of its root."""
        cdef Entry *entry = &self.reader.entry
        cdef stat_t found
        cdef int status = 0, fd = openat(above, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return self.missing()
        # Always: it may have been there, with another owner.
        if fchown(fd, entry.uid, entry.gid) < 0 or fchmod(fd, entry.mode) < 0:
            status = self.fail_system()
        elif self.set_attributes(fd, -1, NULL) < 0:
            status = -1
        elif made and fstat(fd, &found) == 0:
            self.made_device, self.made_inode = found.st_dev, found.st_ino
        close(fd)
        if status < 0:
            return -1
        if above == self.root:
            self.forget_parent()        # its set-group-id bit may be another now
        return self.remember(self.path, False)

    cdef void set_owner(self, Owner *owner) noexcept nogil:
        owner.uid, owner.gid = self.reader.entry.uid, self.reader.entry.gid
        owner.given = owner.uid != 0 or owner.gid != 0 or self.parent_gives_group

    cdef int place_file(self, const char *base) noexcept nogil:
        cdef Entry *entry = &self.reader.entry
        cdef timespec times[2]
        cdef Owner owner
        cdef int status = 0, fd
        if self.into:
            if self.charge(entry.size + 4096) < 0:
                return -1
            self.files += 1
            if self.files == FEW:
                self.crew = assemble()
        self.set_owner(&owner)
        while True:
            fd = make_file(self.parent_fd, base, &owner, entry.mode)
            if fd >= 0:
                break
            if errno != EEXIST:
                return self.missing()
            if self.again(base) < 0:
                return -1
        if entry.sparse:
            status = self.write_sparse(fd)
        elif entry.size:
            status = self.write_whole(fd)
        if status == 0 and give(fd, &owner, entry.mode, self.kept) < 0:
            status = self.fail_system()
        if status == 0 and entry.attribute_count:
            status = self.set_attributes(fd, -1, NULL)
        if status == 0:
            self.set_times(times)
            if futimens(fd, times) < 0:
                status = self.fail_system()
        if close(fd) < 0 and status == 0:
            status = self.fail_system()
        self.size += entry.real_size
        return status

    cdef int write_whole(self, int fd) noexcept nogil:
        cdef const uint8_t *data
        cdef size_t size
        cdef int got
        if self.reader.recording and self.reader.record_file(self.path, 0, self.reader.entry.size) < 0:
            return -1
        while True:
            got = self.reader.payload(&data, &size)
            if got <= 0:
                return got
            if write_all(fd, data, size) < 0:
                return self.fail_system()

    cdef int write_sparse(self, int fd) noexcept nogil:
        cdef Entry *entry = &self.reader.entry
        cdef const uint8_t *data = NULL
        cdef size_t size = 0, part, index
        cdef int64_t at, left
        cdef ssize_t put
        if ftruncate(fd, entry.real_size) < 0:
            return self.fail_system()
        if self.reader.recording and self.reader.left:
            for index in range(entry.extent_count):
                if entry.extents[index].size and (
                    self.reader.record_file(self.path, entry.extents[index].offset, entry.extents[index].size) < 0
                ):
                    return -1
        for index in range(entry.extent_count):
            at = entry.extents[index].offset
            left = entry.extents[index].size
            while left:
                if size == 0 and self.reader.payload(&data, &size) <= 0:
                    return self.fail(b"truncated archive")
                part = size if <int64_t>size < left else <size_t>left
                put = pwrite(fd, data, part, at)
                if put < 0:
                    if errno == EINTR:
                        continue
                    return self.fail_system()
                data += put
                size -= put
                at += put
                left -= put
        return 0

    cdef int place_link(self, const char *base) noexcept nogil:
        """A hard link, to what this layer has inside its root."""
        cdef Entry *entry = &self.reader.entry
        cdef int length = clean(entry.link, self.link)
        cdef char *target = self.link
        cdef char *slash
        cdef stat_t old, new
        cdef int fd, status = 0
        if self.settle() < 0:
            return -1
        if length <= 0:
            return self.fail(b"the hard link leads out of the directory" if self.into else b"the hard link leads out of the layer")
        if self.put_base(self.link, length) < 0:
            return self.reader.fail_system(entry.link, ENAMETOOLONG)
        slash = strrchr(self.link, b"/")
        if slash == NULL:
            fd = self.open_directory(b"", O_PATH)
        else:
            slash[0] = 0
            target = slash + 1
            fd = self.open_directory(self.link, O_PATH)
        if fd < 0 or fstatat(fd, target, &old, AT_SYMLINK_NOFOLLOW) < 0:
            status = errno
            if fd >= 0:
                close(fd)
            if status == ENOENT or status == ENOTDIR:
                return self.fail(
                    b"the target of the hard link is not there" if self.into else b"the target of the hard link is not in the layer"
                )
            return self.reader.fail_system(entry.name, status)
        if S_ISDIR(old.st_mode):
            close(fd)
            return self.fail(b"hard link to a directory")
        while status == 0 and linkat(fd, target, self.parent_fd, base, 0) < 0:
            if errno != EEXIST:
                status = self.missing()
                break
            if fstatat(self.parent_fd, base, &new, AT_SYMLINK_NOFOLLOW) == 0 and new.st_ino == old.st_ino and new.st_dev == old.st_dev:
                break
            status = self.again(base)
            if status > 0:
                status = 0
        close(fd)
        return status

    cdef int make_special(self, const char *base) noexcept nogil:
        cdef Entry *entry = &self.reader.entry
        if entry.type == b"2":
            return symlinkat(entry.link, self.parent_fd, base)
        if entry.type == b"3":
            return mknodat(self.parent_fd, base, S_IFCHR | entry.mode, makedev(entry.major, entry.minor))
        if entry.type == b"4":
            return mknodat(self.parent_fd, base, S_IFBLK | entry.mode, makedev(entry.major, entry.minor))
        return mknodat(self.parent_fd, base, S_IFIFO | entry.mode, 0)

    cdef int change_mode(self, const char *base) noexcept nogil:
        """Of a node that must not be opened. By a descriptor all the same: chmod(2) by name follows a link put in the node's place."""
        cdef char path[32]
        cdef int status, fd = openat(self.parent_fd, base, O_PATH | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return self.missing()
        snprintf(path, sizeof(path), b"/proc/self/fd/%d", fd)
        status = fchmodat(AT_FDCWD, path, self.reader.entry.mode, 0)
        if status < 0 and self.into and errno == EOPNOTSUPP:
            status = 0          # a link that somebody put in its place
        if status < 0:
            self.fail_system()
        close(fd)
        return status

    cdef int place_special(self, const char *base) noexcept nogil:
        """A symbolic link, device or FIFO."""
        cdef Entry *entry = &self.reader.entry
        cdef timespec times[2]
        if entry.type == b"2" and entry.link[0] == 0:
            return self.fail(b"symbolic link to nothing")
        if self.into and self.charge(4096) < 0:
            return -1
        while self.make_special(base) < 0:
            if errno != EEXIST:
                return self.missing()
            if self.again(base) < 0:
                return -1
        if (entry.uid or entry.gid or self.parent_gives_group) and (
            fchownat(self.parent_fd, base, entry.uid, entry.gid, AT_SYMLINK_NOFOLLOW) < 0
        ):
            return self.missing()
        if entry.type != b"2" and self.change_mode(base) < 0:
            return -1
        if self.set_attributes(-1, self.parent_fd, base) < 0:
            return -1
        self.set_times(times)
        if utimensat(self.parent_fd, base, times, AT_SYMLINK_NOFOLLOW) < 0:
            return self.missing()
        if entry.type == b"2":
            self.size += strlen(entry.link)
        return 0

    cdef int set_attributes(self, int fd, int above, const char *base) noexcept nogil:
        """On `fd`, or when that is -1 on `base` in `above`, which is not followed."""
        cdef Entry *entry = &self.reader.entry
        cdef char path[320]
        cdef size_t index
        cdef int status
        if entry.attribute_count and fd < 0:
            if snprintf(path, sizeof(path), b"/proc/self/fd/%d/%s", above, base) >= <int>sizeof(path):
                return self.fail(b"name too long")
        for index in range(entry.attribute_count):
            # overlayfs would take these as its own: an opaque directory, or a redirection to elsewhere among the layers.
            if strncmp(entry.attributes[index].name, b"trusted.overlay.", 16) == 0:
                self.refused += 1
                continue
            if fd >= 0:
                status = fsetxattr(fd, entry.attributes[index].name, entry.attributes[index].value, entry.attributes[index].size, 0)
            else:
                status = lsetxattr(path, entry.attributes[index].name, entry.attributes[index].value, entry.attributes[index].size, 0)
            if status < 0:
                # As Docker does: a file system or a kind of file that cannot keep an attribute is no reason to refuse the image.
                if errno != EOPNOTSUPP and errno != EPERM:
                    return self.missing()
                self.refused += 1
        return 0


def apply(source, int directory, *, int64_t offset=0, int64_t size=-1, digest=None, int64_t[::1] progress=None, recipe=None):
    """Lay out a layer's uncompressed tar stream below the descriptor of an empty `directory`.

    `source`: a descriptor (`offset`, `size`: a range of a seekable one), or an object with `readinto`. `digest`: a hashlib object that is fed
    the whole stream (its diff_id). `progress`: an array of two 64-bit integers: to the first the bytes
    read are added as they come, and when the second is not 0 the call ends with EINTR. Answer: bytes of the files and of the links' targets, number of entries, the directories that were made without an
    entry of their own (paths, b"" for the root), and how many extended attributes were not kept.

    `recipe`: an object with `write`, which is given what `recipe.Stream` makes the same stream from again, and `finish(size)`, `size` being that of
    the stream. `spell_out()` is called, once, before an entry takes away what an earlier one placed: what was written so far must from then on
    stand for itself, as what follows does.
    """
    cdef Reader reader = Reader(source, offset=offset, size=size, digest=digest, recipe=recipe)
    cdef _Layout layout = _Layout(directory, reader)
    cdef size_t index
    cdef int status
    if progress is not None:
        if progress.shape[0] < 2:
            raise ValueError("progress has two items")
        reader.progress = &progress[0]
    with nogil:
        status = layout.run()
    if status < 0:
        reader.raise_failure()
    if recipe is not None:
        recipe.finish(reader.position)
    implied = {}
    if not layout.root_met:
        implied[b""] = None
    for index in range(layout.directory_count):
        if layout.directories[index].implied:
            implied[<bytes>layout.directories[index].path] = None
    if implied:
        for index in range(layout.directory_count):
            if not layout.directories[index].implied:
                implied.pop(<bytes>layout.directories[index].path, None)
    return layout.size, reader.entries, list(implied), layout.refused


def unpack(source, int root, bytes at not None, *, bint keep_kinds=False):
    """Put an uncompressed archive into the directory `at` (relative, clean, b"" for the root) below the descriptor of a container's root.

    As tar does it: what is in the way of a file is removed, a directory of the same name is merged, its owner, mode and time become the archive's;
    those of `at` itself stay. `keep_kinds`: ArchiveError rather than a directory replaced by something else, or the reverse. Links in
    the way are followed within the root. Run it where the root's mounts are mounted, so that the kernel refuses (EBUSY) to take away what they are on.

    Answer: bytes of the files and of the links' targets, number of entries, and how many extended attributes were not kept.
    """
    cdef Reader reader = Reader(source)
    cdef _Layout layout = _Layout(root, reader)
    cdef int status
    layout.into = True
    layout.keep_kinds = keep_kinds
    layout.base = at
    layout.base_length = len(at)
    with nogil:
        status = layout.run()
    if status < 0:
        reader.raise_failure()
    return layout.size, reader.entries, layout.refused
