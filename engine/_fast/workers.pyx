# cython: language_level=3
"""Worker threads that write small files while their caller continues to read an archive.

Creating a file takes the kernel longer than reading one from an archive. So `layer.unpack` passes
small files on in batches, one batch per directory. The result is the same as in the archive's
order: all pending files of a directory go to the same worker, and before the caller creates any
other file, it checks `is_pending(name)` or calls `wait_idle()`.

Not here: which files may be batched (layer.pyx). Nothing of this is called from Python.

Owns:    its threads, batches and the directory descriptor of each submitted batch.
Threads: a pool is used by one caller. Its threads run without the GIL and with all signals blocked.
Raises:  nothing: the first failure is kept in the pool (`pool_error`).
"""
from libc.errno cimport EEXIST, EINTR, EISDIR, ENOENT, errno
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strcmp, strlen

from engine._fast.linux cimport (
    _SC_NPROCESSORS_ONLN, AT_SYMLINK_NOFOLLOW, O_CLOEXEC, O_CREAT, O_EXCL, O_NOFOLLOW, O_WRONLY,
    S_ISDIR, close, fchmod, fchown, fstat, fstatat, futimens, openat, pthread_cond_broadcast,
    pthread_cond_destroy, pthread_cond_init, pthread_cond_wait, pthread_join, pthread_mutex_destroy,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, start_thread, stat_t, sysconf,
    unlinkat, write,
)


cdef int create_file(int parent, const char *base, const Owner *owner, uint32_t mode) noexcept nogil:
    """Create a file and open it for writing; -1 on error.

    It gets its final mode at once, unless its owner changes or it has set-id bits. Then it gets
    only the owner's permissions first, and `set_owner_and_mode` sets the rest after the content is
    written.
    """
    if owner.explicit or mode & 0o7000:
        mode &= 0o700
    return openat(parent, base, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode)


cdef int set_owner_and_mode(int fd, const Owner *owner, uint32_t mode, uint8_t *preserved) noexcept nogil:
    """Apply owner and mode to a file from `create_file`; -1 on error.

    `preserved[mode]` caches that creating a file in this directory preserves `mode`: no umask and
    no default access control list removes bits.
    """
    cdef stat_t found
    if owner.explicit:
        # chown(2) before chmod(2): it clears the set-id bits.
        return -1 if fchown(fd, owner.uid, owner.gid) < 0 or fchmod(fd, mode) < 0 else 0
    if mode & 0o7000:
        return fchmod(fd, mode)
    if preserved[mode]:
        return 0
    if fstat(fd, &found) < 0:
        return -1
    if found.st_mode & 0o7777 != mode:
        return fchmod(fd, mode)
    preserved[mode] = True
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


cdef int write_small(int directory, const SmallFile *small, uint8_t *preserved) noexcept nogil:
    """Returns 0 or an errno."""
    cdef const char *base = <const char *>small + sizeof(SmallFile)
    cdef timespec times[2]
    cdef stat_t found
    cdef int status = 0, fd, races = 0
    while True:
        fd = create_file(directory, base, &small.owner, small.mode)
        if fd >= 0:
            break
        if errno == ENOENT:
            return 0        # the directory was removed, so the file would have been removed too
        if errno != EEXIST or races == MAX_RACES:
            return errno
        races += 1
        if fstatat(directory, base, &found, AT_SYMLINK_NOFOLLOW) == 0 and S_ISDIR(found.st_mode):
            return EISDIR   # made by the container: `may_batch` saw none there
        if unlinkat(directory, base, 0) < 0 and errno != ENOENT:
            return errno
    times[0] = times[1] = small.time
    if (
        write_all(fd, <const uint8_t *>base + small.length + 1, small.size) < 0
        or set_owner_and_mode(fd, &small.owner, small.mode, preserved) < 0
        or futimens(fd, times) < 0
    ):
        status = errno
    if close(fd) < 0 and status == 0:
        status = errno
    return status


cdef void *run_worker(void *argument) noexcept nogil:
    cdef Worker *worker = <Worker *>argument
    cdef Pool *pool = worker.pool
    cdef Batch *batch
    cdef SmallFile *small
    cdef uint8_t preserved[512]
    cdef size_t at
    cdef int status
    pthread_mutex_lock(&pool.lock)
    while True:
        batch = worker.first
        if batch == NULL:
            if pool.stopping:
                break
            pthread_cond_wait(&pool.changed, &pool.lock)
            continue
        status = pool.error
        if batch.directory < 0 and status == 0:
            status = -batch.directory
        pthread_mutex_unlock(&pool.lock)
        memset(preserved, 0, sizeof(preserved))
        at = 0
        small = <SmallFile *>batch.data
        while status == 0 and at < batch.used:
            small = <SmallFile *>(batch.data + at)
            status = write_small(batch.directory, small, preserved)
            at += small.room
        if batch.directory >= 0:
            close(batch.directory)
        pthread_mutex_lock(&pool.lock)
        if status and pool.error == 0:
            pool.error = status
            memcpy(pool.failed, <const char *>small + sizeof(SmallFile), small.length + 1)
        worker.first = batch.next
        worker.charged -= batch.charged
        pool.charged -= batch.charged
        pool.files -= batch.files
        batch.next = pool.spare
        pool.spare = batch
        pthread_cond_broadcast(&pool.changed)
    pthread_mutex_unlock(&pool.lock)
    return NULL


cdef Pool *start_pool() noexcept nogil:
    """A pool, or NULL on a single processor and when threads or memory are not available."""
    cdef Pool *pool
    cdef long processors = sysconf(_SC_NPROCESSORS_ONLN)
    if processors < 2:
        return NULL
    pool = <Pool *>malloc(sizeof(Pool))
    if pool == NULL:
        return NULL
    memset(pool, 0, sizeof(Pool))
    pthread_mutex_init(&pool.lock, NULL)
    pthread_cond_init(&pool.changed, NULL)
    while pool.count < WORKERS:
        pool.workers[pool.count].pool = pool
        if start_thread(&pool.workers[pool.count].thread, run_worker, &pool.workers[pool.count]) != 0:
            break
        pool.count += 1
    if pool.count == 0:
        stop_pool(pool)
        return NULL
    return pool


cdef void stop_pool(Pool *pool) noexcept nogil:
    """Finish all submitted batches, then end the threads and free the pool."""
    cdef Batch *batch
    cdef int index
    pthread_mutex_lock(&pool.lock)
    pool.stopping = True
    pthread_cond_broadcast(&pool.changed)
    pthread_mutex_unlock(&pool.lock)
    for index in range(pool.count):
        pthread_join(pool.workers[index].thread, NULL)
    while pool.spare != NULL:
        batch = pool.spare
        pool.spare = batch.next
        free(batch)
    pthread_cond_destroy(&pool.changed)
    pthread_mutex_destroy(&pool.lock)
    free(pool)


cdef Batch *new_batch(Pool *pool) noexcept nogil:
    """Wait for an empty batch. Returns NULL when there is no memory for one."""
    cdef Batch *batch
    pthread_mutex_lock(&pool.lock)
    if pool.spare == NULL and pool.batches < MAX_BATCHES:
        batch = <Batch *>malloc(sizeof(Batch))
        if batch != NULL:
            pool.batches += 1
    else:
        while pool.spare == NULL:
            pthread_cond_wait(&pool.changed, &pool.lock)
        batch = pool.spare
        pool.spare = batch.next
    pthread_mutex_unlock(&pool.lock)
    return batch


cdef void submit(Pool *pool, Batch *batch) noexcept nogil:
    """Queue `batch` for the worker that has files of the same directory, or else the one with
    the least to write.
    """
    cdef Worker *worker
    cdef Worker *chosen = NULL
    cdef Batch *other
    cdef int index
    batch.next = NULL
    pthread_mutex_lock(&pool.lock)
    for index in range(pool.count):
        worker = &pool.workers[index]
        other = worker.first
        while other != NULL and not (other.inode == batch.inode and other.device == batch.device):
            other = other.next
        if other != NULL:
            chosen = worker
            break
        if chosen == NULL or worker.charged < chosen.charged:
            chosen = worker
    if chosen.first == NULL:
        chosen.first = batch
    else:
        chosen.last.next = batch
    chosen.last = batch
    chosen.charged += batch.charged
    pool.charged += batch.charged
    pool.files += batch.files
    pthread_cond_broadcast(&pool.changed)
    pthread_mutex_unlock(&pool.lock)


cdef bint has_name(const Batch *batch, const char *base, size_t length) noexcept nogil:
    """True if the batch has a file of that name."""
    cdef size_t at = 0
    cdef const SmallFile *small
    while at < batch.used:
        small = <const SmallFile *>(batch.data + at)
        if small.length == length and strcmp(<const char *>small + sizeof(SmallFile), base) == 0:
            return True
        at += small.room
    return False


cdef bint is_pending(Pool *pool, uint64_t device, uint64_t inode, const char *base) noexcept nogil:
    """True if a file of that name is still to be written to that directory."""
    cdef Batch *batch
    cdef size_t length = strlen(base)
    cdef int index
    cdef bint found = False
    pthread_mutex_lock(&pool.lock)
    for index in range(pool.count):
        batch = pool.workers[index].first
        while batch != NULL and not found:
            found = batch.inode == inode and batch.device == device and has_name(batch, base, length)
            batch = batch.next
    pthread_mutex_unlock(&pool.lock)
    return found


cdef void wait_idle(Pool *pool) noexcept nogil:
    """Wait until every submitted batch is written."""
    cdef int index = 0
    pthread_mutex_lock(&pool.lock)
    while index < pool.count:
        if pool.workers[index].first != NULL:
            pthread_cond_wait(&pool.changed, &pool.lock)
        else:
            index += 1
    pthread_mutex_unlock(&pool.lock)


cdef int pool_error(Pool *pool) noexcept nogil:
    """Errno of the first file that could not be written, its name being in `failed`; 0 for none."""
    cdef int error
    pthread_mutex_lock(&pool.lock)
    error = pool.error
    pthread_mutex_unlock(&pool.lock)
    return error


cdef void unwritten(Pool *pool, int64_t *size, int64_t *files) noexcept nogil:
    """Bytes and files that are submitted and not yet written."""
    pthread_mutex_lock(&pool.lock)
    size[0], files[0] = pool.charged, pool.files
    pthread_mutex_unlock(&pool.lock)
