# cython: language_level=3
"""Tar streams extracted to disk: image layers in overlayfs's format, and archives put into a
container.

The kernel resolves every name of the archive: each parent directory is opened by openat2(2) with
RESOLVE_IN_ROOT, so that links, `..` and absolute names stay inside the layer. The last component is
only created, with O_EXCL or by a call that does not follow links. Names whose `..` lead above the
root, and hard links to files outside, are refused before that.

Whiteouts (OCI Image Specification, "Representing Changes"): `.wh.NAME` becomes a character device
0/0 called NAME, and `.wh..wh..opq` the attribute trusted.overlay.opaque of its directory. Other
names that begin with `.wh..wh.` are aufs's metadata and left out. `unpack` gives none of these
names a meaning.

An entry replaces an earlier one of its name. `apply` tells of such names, because dockerd takes no
layer that has one.

`unpack` writes to a live container, which may change its file system at any time. The result may
then be wrong, but it stays inside the container: every directory is opened from the container's
root, across its volumes, and an entry is created by its last name in that directory. Archives that
would fill the file system are refused (`charge`). Small files are written by worker threads
(workers.pyx), with the same result as if each entry had waited for the one before.

Owns:    nothing between calls. Descriptors stay the caller's.
Threads: any number at once, each on another directory. The GIL is released, except to read a Python
         source.
Raises:  tar.ArchiveError, and OSError with the kernel's errno and the entry's name. The files
         extracted until then stay; the caller removes them.
"""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport (
    EEXIST, EINTR, EISDIR, ELOOP, ENAMETOOLONG, ENOENT, ENOMEM, ENOSPC, ENOTDIR, EOPNOTSUPP, EPERM, errno,
)
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset, strcmp, strlen, strncmp, strrchr
from posix.time cimport timespec

from engine._fast.idmap cimport IdMap, free_ids, map_id, read_ids
from engine._fast.linux cimport (
    AT_SYMLINK_NOFOLLOW, F_DUPFD_CLOEXEC, O_CLOEXEC, O_DIRECTORY, O_NOFOLLOW, O_PATH, O_RDONLY,
    RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_XDEV, S_IFBLK, S_IFCHR, S_IFIFO, S_ISDIR, S_ISLNK, S_ISGID,
    S_ISREG, chmod_opened, close, close_own, fchmod, fchown, fchownat, fcntl, fsetxattr, fstat, fstatat, fstatvfs,
    ftruncate, futimens, is_dot, is_whiteout, linkat, lsetxattr, makedev, mkdirat, mknodat, openat, openat2,
    pwrite, stat_t, statvfs_t, symlinkat, unlinkat, utimensat,
)
from engine._fast.paths cimport clean
from engine._fast.tar cimport TAR_MAX_PATH, Attribute, Entry, Reader
from engine._fast.tree cimport remove_entry
from engine._fast.workers cimport (
    BATCH, MAX_RACES, SMALL, Batch, Owner, Pool, SmallFile, create_file, has_name, is_pending, new_batch,
    pool_error, set_owner_and_mode, start_pool, stop_pool, submit, unwritten, wait_idle, write_all,
)

cdef enum:
    # most bytes that `unpack` may write between two checks of the free space
    UNCHECKED = 16 << 20
    # bytes that it leaves free, or a twentieth of the file system if that is less
    RESERVE = 512 << 20
    INODES = 4096           # inodes likewise
    FEW = 64                # files after which starting threads pays

    FIRST_NAMES = 1024      # slots for names at first
    MOST_NAMES = 4 << 20    # and at most, which take 32 MiB

# bytes of directory names kept until their times are set
cdef int64_t MAX_NAMES = 32 * 1024 * 1024


cdef struct Directory:
    char *path
    timespec times[2]
    bint implied            # created as a parent; the archive had no entry for it so far


cdef uint64_t hash_of(const char *raw, const char *path, size_t length) noexcept nogil:
    """A hash of a name as Go's filepath.Clean writes it: `path` is the clean form of `raw` without
    a leading slash. Never 0.
    """
    cdef uint64_t word, hashed = length * 2 + (raw[0] == b"/")
    cdef size_t at = 0, part
    while at < length:
        part = length - at
        word = 0
        memcpy(&word, path + at, part if part < 8 else 8)
        hashed = (hashed ^ word) * <uint64_t>0x9FB21C651E98DF25
        hashed ^= hashed >> 32
        at += 8
    hashed *= <uint64_t>0x9FB21C651E98DF25
    hashed ^= hashed >> 29
    return hashed if hashed else 1


cdef class _Names:
    """The names of a layer's entries, as hashes in an open-addressing table."""

    cdef uint64_t *slots
    cdef size_t room
    cdef size_t used

    def __cinit__(self):
        self.slots = <uint64_t *>calloc(FIRST_NAMES, sizeof(uint64_t))
        if self.slots == NULL:
            raise MemoryError()
        self.room = FIRST_NAMES

    def __dealloc__(self):
        free(self.slots)

    cdef int add(self, uint64_t name) noexcept nogil:
        """Returns 1 for a name that is there already, otherwise 0. Names beyond half of MOST_NAMES
        are not kept.
        """
        cdef size_t at = name & (self.room - 1)
        while self.slots[at]:
            if self.slots[at] == name:
                return 1
            at = (at + 1) & (self.room - 1)
        if self.used * 2 < self.room or self.grow():
            self.put(name)
        return 0

    cdef void put(self, uint64_t name) noexcept nogil:
        cdef size_t at = name & (self.room - 1)
        while self.slots[at]:
            at = (at + 1) & (self.room - 1)
        self.slots[at] = name
        self.used += 1

    cdef bint grow(self) noexcept nogil:
        cdef uint64_t *before = self.slots
        cdef uint64_t *after
        cdef size_t index, room = self.room
        if room * 4 > MOST_NAMES:
            return False
        after = <uint64_t *>calloc(room * 4, sizeof(uint64_t))
        if after == NULL:
            return False
        self.slots, self.room, self.used = after, room * 4, 0
        for index in range(room):
            if before[index]:
                self.put(before[index])
        free(before)
        return True


cdef class _Extraction:
    """One `apply` or `unpack` while it runs."""

    cdef int root
    cdef Reader reader
    cdef int parent_fd              # of `parent`, -1 for none
    cdef bint parent_gives_group    # set-group-id: new entries get its group
    cdef char parent[4096]
    cdef char path[4096]
    cdef char link[4096]
    cdef char name[4352]            # text of a failure
    cdef Directory *directories
    cdef size_t directory_count
    cdef size_t directory_room
    cdef int64_t names
    cdef int64_t size
    cdef int64_t refused            # extended attributes that were not set
    cdef bint root_met
    cdef int races                  # attempts that failed because others used this entry's name
    cdef _Names met                 # names of the entries so far; None in `unpack`
    cdef char repeated[4096]        # the first one that occurred again, "" for none
    cdef bint into                  # `unpack`: a live container, across its mounts
    cdef bint owned                 # all entries get `uid` and `gid`
    cdef uint32_t uid
    cdef uint32_t gid
    cdef IdMap ids                  # of the entries' owners, to those that they get
    cdef bint keep_kinds            # a directory is not replaced by another type, nor the reverse
    cdef const char *base           # directory in the root that names are relative to
    cdef size_t base_length
    # bytes left to write to `device` before free space is checked again
    cdef int64_t allowed
    cdef uint64_t device
    cdef uint64_t parent_device     # device and inode of `parent`
    cdef uint64_t parent_inode
    cdef uint64_t made_device       # device and inode of the last directory created, while it holds
                                    # only files; inode 0: none
    cdef uint64_t made_inode
    cdef uint8_t preserved[512]     # see `set_owner_and_mode`; for `parent`
    cdef Pool *pool                 # NULL: none
    cdef Batch *batch               # for `parent`, not submitted yet; NULL: none
    cdef int files                  # written before the pool was started

    def __cinit__(self, int root, Reader reader not None):
        self.root = root
        self.reader = reader
        self.parent_fd = -1
        self.directories = NULL
        self.base = b""
        self.pool = NULL
        self.batch = NULL

    def __dealloc__(self):
        cdef size_t index
        close_own(self.parent_fd)
        for index in range(self.directory_count):
            free(self.directories[index].path)
        free(self.directories)
        free_ids(&self.ids)

    cdef int fail(self, const char *reason) noexcept nogil:
        snprintf(self.name, sizeof(self.name), b"%s: %.3900s", reason, self.reader.entry.name)
        return self.reader.fail(self.name)

    cdef int fail_system(self) noexcept nogil:
        return self.reader.fail_system(self.reader.entry.name, errno)

    cdef int missing(self) noexcept nogil:
        """Called after a call failed on a file just created or opened. Returns 0 if the container
        may have removed the file, else -1.

        0 is no error: the result is the same as if the container had removed the complete entry.
        """
        return 0 if self.into and (errno == ENOENT or errno == ENOTDIR or errno == ELOOP) else self.fail_system()

    cdef int again(self, const char *base) noexcept nogil:
        """Remove the file that has the entry's name, so that the entry can be tried again; see
        `make_room`.

        Also returns -1 after MAX_RACES attempts.
        """
        self.races += 1
        if self.races > MAX_RACES:
            return self.fail(b"changed again and again while it was put there")
        return self.make_room(base)

    # --- directories ------------------------------------------------------------------------------

    cdef void forget_parent(self) noexcept nogil:
        self.submit_batch()
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
        """Open the first `length` bytes of `path` as `parent_fd`, creating missing directories."""
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
            if self.races > MAX_RACES:
                return self.fail(b"a parent of the entry was changed again and again")
        if fstat(self.parent_fd, &found) < 0:
            return self.fail_system()
        self.parent_gives_group = found.st_mode & S_ISGID != 0
        self.parent_device = found.st_dev
        self.parent_inode = found.st_ino
        memset(self.preserved, 0, sizeof(self.preserved))
        return 0

    cdef bint leads_nowhere(self, size_t length) noexcept nogil:
        """True if the first `length` bytes of `path` lead through a symbolic link whose target is
        no directory of this layer. The link hides what a whiteout below it could remove.
        """
        cdef stat_t found
        cdef size_t at
        cdef char kept
        cdef int fd, status
        if self.parent_fd >= 0 and strncmp(self.parent, self.path, length) == 0 and self.parent[length] == 0:
            return False
        for at in range(1, length + 1):
            if at < length and self.path[at] != b"/":
                continue
            kept = self.path[at]
            self.path[at] = 0
            fd = self.open_directory(self.path, O_PATH)
            status = 0
            if fd < 0:
                fd = openat2(
                    self.root, self.path, O_PATH | O_NOFOLLOW | O_CLOEXEC,
                    RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV,
                )
                status = 1 if fd >= 0 and fstat(fd, &found) == 0 and S_ISLNK(found.st_mode) else -1
            self.path[at] = kept
            if fd >= 0:
                close(fd)
            if status:
                return status > 0
        return False

    cdef int make_parents(self, size_t length) noexcept nogil:
        """Create the missing directories of `parent`. A whiteout among them becomes an opaque
        directory.

        A live container may create or remove the same directories: the caller opens the path and
        tries again.
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
                        whiteout = not self.into and is_whiteout(&found)
                        if not whiteout:
                            close(above)
                            self.parent[at] = kept
                            return 0 if S_ISDIR(found.st_mode) else self.fail(b"a parent of the entry is no directory")
                        unlinkat(above, self.parent + begin, 0)
                    elif at <= self.base_length:        # `base` itself does not exist
                        close(above)
                        return self.reader.fail_system(self.base, ENOENT)
                    if mkdirat(above, self.parent + begin, 0o755) == 0:
                        fd = openat(above, self.parent + begin, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                        if fd >= 0 and fchmod(fd, 0o755) < 0:       # whatever the umask is
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
        """Hide the entries that lower layers have in it.

        `directory` may be an O_PATH descriptor.
        """
        cdef int status, fd = openat(directory, b".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)
        if fd < 0:
            return self.fail_system()
        status = fsetxattr(fd, b"trusted.overlay.opaque", b"y", 1, 0)
        if status < 0:
            self.fail_system()
        close(fd)
        return status

    cdef int remember(self, const char *path, bint implied) noexcept nogil:
        """Remember a directory.

        Its times are set at the end, after all entries, which change them.
        """
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
                return self.reader.fail_system(b"list of directories", ENOMEM)
            self.directories = room
            self.directory_room = wanted
        directory = &self.directories[self.directory_count]
        directory.path = <char *>malloc(length + 1)
        if directory.path == NULL:
            return self.reader.fail_system(b"list of directories", ENOMEM)
        memcpy(directory.path, path, length + 1)
        self.set_times(directory.times)
        directory.implied = implied
        self.directory_count += 1
        return 0

    cdef void set_times(self, timespec *times) noexcept nogil:
        times[0].tv_sec = times[1].tv_sec = self.reader.entry.seconds
        times[0].tv_nsec = times[1].tv_nsec = self.reader.entry.nanoseconds

    cdef int finish_directories(self) noexcept nogil:
        """Set the times of directories that have an entry.

        A directory that a later entry has replaced is skipped.
        """
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

    # --- entries ----------------------------------------------------------------------------------

    cdef int run(self) noexcept nogil:
        cdef int status = self.place_all()
        if self.settle() < 0:
            status = -1
        if self.pool != NULL:
            stop_pool(self.pool)
            self.pool = NULL
        return status if status < 0 else self.finish_directories()

    cdef int place_all(self) noexcept nogil:
        cdef int got
        while True:
            got = self.reader.next()
            if got < 0:
                return -1
            if got == 0:
                break
            if self.owned:
                self.reader.entry.uid = self.uid
                self.reader.entry.gid = self.gid
            if self.ids.uids != NULL and not (
                map_id(self.ids.uids, self.ids.uid_count, &self.reader.entry.uid)
                and map_id(self.ids.gids, self.ids.gid_count, &self.reader.entry.gid)
            ):
                return self.fail(b"its owner has no id on the host")
            if self.place() < 0:
                return -1
        return self.reader.drain()

    cdef int place(self) noexcept nogil:
        cdef Entry *entry = &self.reader.entry
        cdef int length = <int>clean(entry.name, self.path)
        cdef size_t begin = 0, at
        cdef const char *base
        self.races = 0
        if length < 0:
            return self.fail(
                b"the entry leads out of the directory" if self.into else b"the entry leads out of the layer"
            )
        if not self.into and self.met.add(hash_of(entry.name, self.path, length)) and self.repeated[0] == 0:
            memcpy(self.repeated, self.path, length + 1)
            if length == 0:
                self.repeated[0] = b"/"
        if length == 0:
            if self.into and entry.type == b"5":
                return 0            # `unpack` leaves the directory itself unchanged
            if not self.into and entry.type == b"1":
                return 0            # kaniko writes one
            if entry.type != b"5":
                return self.fail(
                    b"the root of the archive is no directory"
                    if self.into
                    else b"the root of the layer is no directory"
                )
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
        if not self.into and strncmp(base, b".wh.", 4) == 0 and begin and self.leads_nowhere(begin - 1):
            return 0
        if self.enter(begin - 1 if begin else 0) < 0:
            return -1
        if self.pool != NULL:
            if self.is_small() and self.may_batch(base):
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

    # --- files for the worker threads -------------------------------------------------------------

    cdef bint is_small(self) noexcept nogil:
        cdef Entry *entry = &self.reader.entry
        return entry.type == b"0" and entry.size <= SMALL and not entry.sparse and entry.attribute_count == 0

    cdef bint may_batch(self, const char *base) noexcept nogil:
        """True if the entry replaces nothing or only a file. Then paths resolve the same before and
        after it is written.
        """
        cdef stat_t found
        if self.in_made():
            return True
        if fstatat(self.parent_fd, base, &found, AT_SYMLINK_NOFOLLOW) < 0:
            return errno == ENOENT
        return S_ISREG(found.st_mode)

    cdef bint in_made(self) noexcept nogil:
        """True if `parent` is the directory in `made_inode`."""
        return self.made_inode != 0 and self.parent_inode == self.made_inode and self.parent_device == self.made_device

    cdef int add_small(self, const char *base) noexcept nogil:
        cdef Entry *entry = &self.reader.entry
        cdef size_t length = strlen(base), size = <size_t>entry.size, part
        cdef size_t room = (sizeof(SmallFile) + length + 1 + size + 15) & ~<size_t>15
        cdef const uint8_t *data
        cdef uint8_t *at
        cdef SmallFile *small
        if self.charge(entry.size + 4096) < 0:
            return -1
        if self.batch != NULL and self.batch.used + room > BATCH:
            self.submit_batch()
        if self.batch == NULL:
            if self.check_pool() < 0:
                return -1
            self.batch = new_batch(self.pool)
            if self.batch == NULL:
                return self.reader.fail_system(entry.name, ENOMEM)
            self.batch.used = 0
            self.batch.charged = self.batch.files = 0
            self.batch.device = self.parent_device
            self.batch.inode = self.parent_inode
        small = <SmallFile *>(self.batch.data + self.batch.used)
        small.room = room
        small.length = length
        small.size = size
        small.time.tv_sec = entry.seconds
        small.time.tv_nsec = entry.nanoseconds
        small.mode = entry.mode
        self.set_owner(&small.owner)
        at = <uint8_t *>small + sizeof(SmallFile)
        memcpy(at, base, length + 1)
        at += length + 1
        while size:
            if self.reader.payload(&data, &part) <= 0:
                return self.fail(b"truncated archive")
            memcpy(at, data, part)
            at += part
            size -= part
        # Counted only when complete.
        self.batch.used += room
        self.batch.files += 1
        self.batch.charged += entry.size + 4096
        self.size += entry.size
        return 0

    cdef void submit_batch(self) noexcept nogil:
        cdef Batch *batch = self.batch
        self.batch = NULL
        if batch == NULL:
            return
        batch.directory = fcntl(self.parent_fd, F_DUPFD_CLOEXEC, 0)
        if batch.directory < 0:
            batch.directory = -errno
        submit(self.pool, batch)

    cdef int check_pool(self) noexcept nogil:
        """-1 if a worker has failed."""
        cdef int error = pool_error(self.pool)
        return self.reader.fail_system(self.pool.failed, error) if error else 0

    cdef int await_name(self, const char *base) noexcept nogil:
        """Called before `base` is created in `parent`: wait for earlier entries of that name."""
        if self.batch != NULL and has_name(self.batch, base, strlen(base)):
            return self.settle()
        if is_pending(self.pool, self.parent_device, self.parent_inode, base):
            return self.settle()
        return 0

    cdef int settle(self) noexcept nogil:
        """Wait until all entries so far are written; -1 if one failed."""
        if self.pool == NULL:
            return 0
        self.submit_batch()
        wait_idle(self.pool)
        return self.check_pool()

    cdef int put_base(self, char *path, int length) noexcept nogil:
        """Put `base` in front of a clean path. Returns its length, or -1 if it is too long."""
        if self.base_length == 0:
            return length
        if self.base_length + 1 + length > TAR_MAX_PATH:
            return -1
        memmove(path + self.base_length + 1, path, length + 1)
        memcpy(path, self.base, self.base_length)
        path[self.base_length] = b"/"
        return <int>self.base_length + 1 + length

    cdef int charge(self, int64_t size) noexcept nogil:
        """Called before `size` bytes are written to a file in `parent`: refuse entries that would
        fill the file system.

        A small archive may inflate to any size. A twentieth of the file system stays free, or 512
        MiB if that is less. The same holds for inodes, with 4,096 as the limit. Submitted files
        count as written.
        """
        cdef statvfs_t found
        cdef int64_t free, reserve, charged = 0, files = 0
        self.allowed -= size
        if self.allowed >= 0 and self.parent_device == self.device:
            return 0
        if self.pool != NULL:
            self.submit_batch()
            unwritten(self.pool, &charged, &files)
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
                self.allowed = free * 1024      # a file is charged at least 4,096
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
            return 0            # an entry of this layer hides the lower one anyway
        fd = openat(self.parent_fd, base, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return self.fail_system()
        status = self.make_opaque(fd)
        close(fd)
        return status

    cdef int make_room(self, const char *base) noexcept nogil:
        """Remove the file that an earlier entry created at `base`. Returns 1 if it was a whiteout,
        0 if not, -1 on failure.

        A live container may create a file there again; the caller then tries again.
        """
        cdef stat_t found
        cdef int status, parent = self.parent_fd
        if self.settle() < 0:
            return -1
        if fstatat(parent, base, &found, AT_SYMLINK_NOFOLLOW) < 0:
            return 0 if self.into and errno == ENOENT else self.fail_system()
        if not is_whiteout(&found) and self.reader.inline_files() < 0:
            return -1
        if S_ISDIR(found.st_mode):
            if self.keep_kinds:
                return self.fail(b"cannot overwrite directory with non-directory")
            status = remove_entry(parent, base, True)
            return self.reader.fail_system(self.reader.entry.name, status) if status else 0
        if unlinkat(parent, base, 0) < 0 and not (self.into and (errno == ENOENT or errno == EISDIR)):
            return self.fail_system()
        return not self.into and is_whiteout(&found)

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
            if self.settle() < 0:       # a pending file may still be created by its current mode
                return -1
            if fstatat(self.parent_fd, base, &found, AT_SYMLINK_NOFOLLOW) < 0:
                self.races += 1
                if errno == ENOENT and self.races <= MAX_RACES:
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
        """Set owner, mode and attributes.

        By descriptor: chmod(2) by name would follow a link that a container puts there.
        """
        cdef Entry *entry = &self.reader.entry
        cdef stat_t found
        cdef int status = 0, fd = openat(above, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return self.missing()
        # Also for owner 0, because the directory may have existed with another owner.
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
            self.forget_parent()        # its set-group-id bit may have changed
        return self.remember(self.path, False)

    cdef void set_owner(self, Owner *owner) noexcept nogil:
        owner.uid, owner.gid = self.reader.entry.uid, self.reader.entry.gid
        owner.explicit = owner.uid != 0 or owner.gid != 0 or self.parent_gives_group

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
                self.pool = start_pool()
        self.set_owner(&owner)
        while True:
            fd = create_file(self.parent_fd, base, &owner, entry.mode)
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
        if status == 0 and set_owner_and_mode(fd, &owner, entry.mode, self.preserved) < 0:
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
        """A hard link to an earlier entry of this archive."""
        cdef Entry *entry = &self.reader.entry
        cdef int length = <int>clean(entry.link, self.link)
        cdef char *target = self.link
        cdef char *slash
        cdef stat_t old, new
        cdef int fd, status = 0
        if self.settle() < 0:
            return -1
        if length <= 0:
            return self.fail(
                b"the hard link leads out of the directory" if self.into else b"the hard link leads out of the layer"
            )
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
                    b"the target of the hard link does not exist"
                    if self.into
                    else b"the target of the hard link is not in the layer"
                )
            return self.reader.fail_system(entry.name, status)
        if S_ISDIR(old.st_mode):
            close(fd)
            return self.fail(b"hard link to a directory")
        while status == 0 and linkat(fd, target, self.parent_fd, base, 0) < 0:
            if errno != EEXIST:
                status = self.missing()
                break
            if fstatat(self.parent_fd, base, &new, AT_SYMLINK_NOFOLLOW) == 0 and (
                new.st_ino == old.st_ino and new.st_dev == old.st_dev
            ):
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
        """chmod(2) of a device or FIFO, which must not be opened, by an O_PATH descriptor."""
        cdef int status, fd = openat(self.parent_fd, base, O_PATH | O_NOFOLLOW | O_CLOEXEC)
        if fd < 0:
            return self.missing()
        status = chmod_opened(fd, self.reader.entry.mode)
        if status < 0 and self.into and errno == EOPNOTSUPP:
            status = 0          # the container has replaced the file by a link
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
        """Set extended attributes on `fd`, or if that is -1, on `base` in `above` without
        following it.
        """
        cdef Entry *entry = &self.reader.entry
        cdef Attribute *attribute
        cdef char path[320]
        cdef size_t index
        cdef int status
        if entry.attribute_count and fd < 0:
            if snprintf(path, sizeof(path), b"/proc/self/fd/%d/%s", above, base) >= <int>sizeof(path):
                return self.fail(b"name too long")
        for index in range(entry.attribute_count):
            attribute = &entry.attributes[index]
            # overlayfs would act on these attributes: opaque directories, redirects to other
            # directories of the layers.
            if strncmp(attribute.name, b"trusted.overlay.", 16) == 0:
                self.refused += 1
                continue
            if fd >= 0:
                status = fsetxattr(fd, attribute.name, attribute.value, attribute.size, 0)
            else:
                status = lsetxattr(path, attribute.name, attribute.value, attribute.size, 0)
            if status < 0:
                # As in Docker, an attribute that the file system or the file type cannot have does
                # not fail the image.
                if errno != EOPNOTSUPP and errno != EPERM:
                    return self.missing()
                self.refused += 1
        return 0


def apply(
    source, int directory, *, int64_t offset=0, int64_t size=-1, digest=None, progress=None, tar_split=None
):
    """Extract a layer's uncompressed tar stream below the descriptor of an empty `directory`.

    `source`: a descriptor (`offset`, `size`: a range of a seekable one), or an object with
    `readinto`. `digest`: a hashlib object that is fed the whole stream, for the diff_id.
    `progress`: an array of two 64-bit integers: [0] is incremented by the bytes read, non-zero in
    [1] ends the call with EINTR. `tar_split`: receives the tar-split data by `write`.
    `inline_files()` is called once, before an entry replaces an earlier one: from then on file
    contents are written too, and the receiver must rewrite what it has so that it does not refer to
    files. `finish(size)`, with the size of the stream, comes last.

    Returns bytes of files and link targets, the number of entries, the paths of directories that
    have no entry of their own (b"" for the root), the number of extended attributes that were not
    set, and the first name that occurs twice, b"" without one.
    """
    cdef Reader reader = Reader(source, offset=offset, size=size, digest=digest, tar_split=tar_split)
    cdef _Extraction extraction = _Extraction(directory, reader)
    cdef Py_buffer counters
    cdef size_t index
    cdef int status
    extraction.met = _Names()
    if progress is None:
        with nogil:
            status = extraction.run()
    else:
        PyObject_GetBuffer(progress, &counters, PyBUF_WRITABLE)
        try:
            if counters.itemsize != sizeof(int64_t) or counters.len < 2 * <Py_ssize_t>sizeof(int64_t):
                raise ValueError("progress: expected two 64-bit integers")
            reader.progress = <int64_t *>counters.buf
            with nogil:
                status = extraction.run()
        finally:
            reader.progress = NULL
            PyBuffer_Release(&counters)
    if status < 0:
        reader.raise_failure()
    if tar_split is not None:
        tar_split.finish(reader.position)
    implied = {}
    if not extraction.root_met:
        implied[b""] = None
    for index in range(extraction.directory_count):
        if extraction.directories[index].implied:
            implied[<bytes>extraction.directories[index].path] = None
    if implied:
        for index in range(extraction.directory_count):
            if not extraction.directories[index].implied:
                implied.pop(<bytes>extraction.directories[index].path, None)
    return extraction.size, reader.entries, list(implied), extraction.refused, <bytes>extraction.repeated


def unpack(source, int root, bytes at not None, *, bint keep_kinds=False, tuple owner=None, ids=None):
    """Extract an uncompressed archive into the directory `at` below the descriptor of a container's
    root.

    `at` is a clean relative path, b"" for the root. As with tar, an entry replaces a file of its
    name, and a directory is merged and gets the archive's owner, mode and time; `at` itself is
    unchanged. `keep_kinds`: raise ArchiveError if an entry would replace a directory by another
    type, or the reverse. `owner`: uid and gid of all entries, in place of the archive's. `ids`:
    ranges of uids and gids to translate, as (begin, other, count); another id raises ArchiveError.
    Links in the path are followed within the root. Call it in the mount namespace of the container,
    where the kernel refuses to remove mount points (EBUSY).

    Returns bytes of files and link targets, the number of entries, and the number of extended
    attributes that were not set.
    """
    cdef Reader reader = Reader(source)
    cdef _Extraction extraction = _Extraction(root, reader)
    cdef int status
    extraction.into = True
    extraction.keep_kinds = keep_kinds
    if owner is not None:
        extraction.owned = True
        extraction.uid, extraction.gid = owner
    read_ids(&extraction.ids, ids)
    extraction.base = at
    extraction.base_length = len(at)
    with nogil:
        status = extraction.run()
    if status < 0:
        reader.raise_failure()
    return extraction.size, reader.entries, extraction.refused
