"""Worker threads that write small files, for C callers.

See workers.pyx for the order that they keep.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from posix.time cimport timespec

from engine._fast.linux cimport pthread_cond_t, pthread_mutex_t, pthread_t

cdef enum:
    SMALL = 64 << 10        # bytes: files up to this size may be batched
    # threads of a pool; more of them only wait for the kernel's directory locks
    WORKERS = 2
    BATCH = 192 << 10       # bytes of file headers, names and contents in a batch
    MAX_BATCHES = 20        # batches of a pool
    MAX_RACES = 1000        # attempts at one entry while other processes use its name

cdef struct Owner:
    uint32_t uid
    uint32_t gid
    bint explicit           # must be set with chown(2); otherwise the file is created with it

# A file in a batch. Its name, with the NUL, and its content follow.
cdef struct SmallFile:
    size_t room             # bytes of header, name and content, padded
    size_t length           # of the name
    size_t size
    timespec time
    Owner owner
    uint32_t mode

# Files for one directory, in archive order.
cdef struct Batch:
    Batch *next
    int directory           # descriptor owned by the batch, or a negative errno if there is none
    uint64_t device         # device and inode identify the directory
    uint64_t inode
    size_t used
    int64_t charged         # bytes, as `charge` in layer.pyx counts them
    int64_t files
    uint8_t data[BATCH]

cdef struct Pool

cdef struct Worker:
    Pool *pool
    pthread_t thread
    Batch *first            # queue; the first batch is being written
    Batch *last
    int64_t charged

# `lock` guards everything except the content of a submitted batch, which does not change any more.
cdef struct Pool:
    pthread_mutex_t lock
    pthread_cond_t changed
    Worker workers[WORKERS]
    int count
    int batches             # allocated so far
    Batch *spare
    int64_t charged
    int64_t files
    bint stopping
    int error               # errno of the first failure; later batches are dropped
    char failed[4096]       # name of the file that failed

cdef int create_file(int parent, const char *base, const Owner *owner, uint32_t mode) noexcept nogil
cdef int set_owner_and_mode(int fd, const Owner *owner, uint32_t mode, uint8_t *preserved) noexcept nogil
cdef int write_all(int fd, const uint8_t *data, size_t size) noexcept nogil

cdef Pool *start_pool() noexcept nogil
cdef void stop_pool(Pool *pool) noexcept nogil
cdef Batch *new_batch(Pool *pool) noexcept nogil
cdef void submit(Pool *pool, Batch *batch) noexcept nogil
cdef bint has_name(const Batch *batch, const char *base, size_t length) noexcept nogil
cdef bint is_pending(Pool *pool, uint64_t device, uint64_t inode, const char *base) noexcept nogil
cdef void wait_idle(Pool *pool) noexcept nogil
cdef int pool_error(Pool *pool) noexcept nogil
cdef void unwritten(Pool *pool, int64_t *size, int64_t *files) noexcept nogil
