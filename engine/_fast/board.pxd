cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    ID = 72                             # bytes of a container's id at most, with a NUL


cdef struct Acked:
    # A position up to which everything is acknowledged; the newest one has the largest `turn`.
    # `check` is the sum of the others.
    uint64_t turn
    uint64_t inode
    int64_t offset
    int64_t bytes
    int64_t lines
    uint64_t check


cdef struct Slot:
    # Cold, written by the monitor: `version` is odd during a change.
    uint64_t version
    uint64_t open
    char id[ID]
    uint64_t salt                       # of the sums in `acks`: differs for each opening
    Acked begun                         # the position when the slot was opened
    char _cold[48]
    # Hot, written by the monitor with each flush. Lines of the processor's cache of their own.
    int64_t written
    int64_t lines
    char _hot[48]
    # Written by the shipper, in turns. A torn copy has the wrong sum; the other one is whole then.
    Acked acks[2]
    char _acks[32]


cdef struct Head:
    uint64_t magic
    uint64_t generation
    uint64_t ready                      # slots that have memory
    uint64_t used                       # slots that were ever used
    char _first[32]
    uint64_t scans
    char _second[56]
    uint64_t sleeping                   # the shipper waits for the bell
    char _third[56]


@cython.final
cdef class Board:
    cdef readonly int bell
    cdef int fd
    cdef char *area                     # the mapping: head, bits, slots
    cdef Head *head
    cdef uint64_t *bits                 # of changed slots
    cdef Slot *slots
    cdef bint monitor
    # id → slot of the open ones, and of the closed ones until they are reused
    cdef dict _numbers                  # id → slot, until it is used again
    cdef list _empty                    # slots that are no container's
    cdef dict _closed                   # closed slots, the longest closed first
    cdef dict _left                     # those that an earlier monitor had
    cdef uint64_t seen                  # `scans` at the shipper's last look
    cdef uint64_t salts

    cdef bint map(self, bytes path, bint fresh) except -1
    cdef int allocate(self, int64_t offset, int64_t size) except -1
    cdef int begin(self) except -1
    cdef int empty(self, int number) except -1
    cdef int free(self) except -1
    cdef Slot *at(self, int number) except NULL
    cpdef void wrote(self, int slot, int64_t size, int64_t lines) noexcept nogil
    cpdef int64_t acked(self, int slot) noexcept nogil
    cpdef int64_t unacked(self, int slot) noexcept nogil
    cdef bint position(self, Slot *slot, Acked *found) noexcept nogil
    cdef void mark(self, int slot) noexcept nogil
    cdef void ring(self) noexcept nogil
    cdef bint copy(self, int slot, Slot *into) noexcept nogil
    cdef int grow(self) except -1
