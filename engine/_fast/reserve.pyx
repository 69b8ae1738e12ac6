# cython: language_level=3
"""Address space that is kept for the interpreter's small objects, so that the event loop goes on
where the host gives no more memory.

A request for much memory then fails with MemoryError, which ends one client's request. A failure
for a small object can come anywhere: asyncio loses a task by it, and what waits for the task waits
for ever. So while memory suffices, `PIECES` of `PIECE` bytes are mapped and never touched, which
costs no page. When the system has no memory for an arena of small objects, or for an object of at
most `LARGEST` bytes outside of them, one piece is unmapped, and the allocation is tried again.

Owns:    the pieces, and the interpreter's hooks for memory, for the life of the process.
Threads: allocations come from any, with and without the GIL; the pieces have a lock.
Raises:  nothing.
"""
from libc.stddef cimport size_t
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from engine._fast.linux cimport pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock

cdef extern from "Python.h":
    ctypedef enum PyMemAllocatorDomain:
        PYMEM_DOMAIN_RAW

    ctypedef struct PyMemAllocatorEx:
        void *ctx
        void *(*malloc)(void *ctx, size_t size) noexcept nogil
        void *(*calloc)(void *ctx, size_t count, size_t size) noexcept nogil
        void *(*realloc)(void *ctx, void *pointer, size_t size) noexcept nogil
        void (*free)(void *ctx, void *pointer) noexcept nogil

    ctypedef struct PyObjectArenaAllocator:
        void *ctx
        void *(*alloc)(void *ctx, size_t size) noexcept nogil
        void (*free)(void *ctx, void *pointer, size_t size) noexcept nogil

    void PyMem_GetAllocator(PyMemAllocatorDomain domain, PyMemAllocatorEx *allocator)
    void PyMem_SetAllocator(PyMemAllocatorDomain domain, PyMemAllocatorEx *allocator)
    void PyObject_GetArenaAllocator(PyObjectArenaAllocator *allocator)
    void PyObject_SetArenaAllocator(PyObjectArenaAllocator *allocator)

cdef enum:
    PIECE = 1 << 20                     # as large as an arena
    PIECES = 16
    LARGEST = 64 << 10

cdef void *kept[PIECES]
cdef int count = 0
cdef bint hooked = False
cdef pthread_mutex_t lock
cdef PyMemAllocatorEx raw
cdef PyObjectArenaAllocator arenas


def fill() -> int:
    """Map the pieces that are missing, as far as there is memory. Returns how many are mapped.

    The first call sets the interpreter's hooks, before other threads start.
    """
    global count, hooked
    cdef void *piece
    if not hooked:
        hooked = True
        hook()
    pthread_mutex_lock(&lock)
    while count < PIECES:
        piece = mmap(NULL, PIECE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if piece == MAP_FAILED:
            break
        kept[count] = piece
        count += 1
    pthread_mutex_unlock(&lock)
    return count


cdef void hook() noexcept:
    cdef PyMemAllocatorEx own_raw
    cdef PyObjectArenaAllocator own_arenas
    pthread_mutex_init(&lock, NULL)
    PyMem_GetAllocator(PYMEM_DOMAIN_RAW, &raw)
    own_raw.ctx = NULL
    own_raw.malloc = raw_malloc
    own_raw.calloc = raw_calloc
    own_raw.realloc = raw_realloc
    own_raw.free = raw_free
    PyMem_SetAllocator(PYMEM_DOMAIN_RAW, &own_raw)
    PyObject_GetArenaAllocator(&arenas)
    own_arenas.ctx = NULL
    own_arenas.alloc = arena_alloc
    own_arenas.free = arena_free
    PyObject_SetArenaAllocator(&own_arenas)


cdef bint give() noexcept nogil:
    """Unmap one piece. Returns False if there is none."""
    global count
    cdef void *piece = NULL
    pthread_mutex_lock(&lock)
    if count:
        count -= 1
        piece = kept[count]
    pthread_mutex_unlock(&lock)
    return piece != NULL and munmap(piece, PIECE) == 0


cdef void *raw_malloc(void *ctx, size_t size) noexcept nogil:
    cdef void *found = raw.malloc(raw.ctx, size)
    while found == NULL and size <= LARGEST and give():
        found = raw.malloc(raw.ctx, size)
    return found


cdef void *raw_calloc(void *ctx, size_t number, size_t size) noexcept nogil:
    cdef void *found = raw.calloc(raw.ctx, number, size)
    while found == NULL and (not size or number <= LARGEST // size) and give():
        found = raw.calloc(raw.ctx, number, size)
    return found


cdef void *raw_realloc(void *ctx, void *pointer, size_t size) noexcept nogil:
    cdef void *found = raw.realloc(raw.ctx, pointer, size)
    while found == NULL and size <= LARGEST and give():
        found = raw.realloc(raw.ctx, pointer, size)
    return found


cdef void raw_free(void *ctx, void *pointer) noexcept nogil:
    raw.free(raw.ctx, pointer)


cdef void *arena_alloc(void *ctx, size_t size) noexcept nogil:
    cdef void *found = arenas.alloc(arenas.ctx, size)
    while found == NULL and size <= PIECE and give():
        found = arenas.alloc(arenas.ctx, size)
    return found


cdef void arena_free(void *ctx, void *pointer, size_t size) noexcept nogil:
    arenas.free(arenas.ctx, pointer, size)
