from libc.stdint cimport int64_t, uint32_t, uint64_t

from engine._fast.linux cimport epoll_event
from engine._fast.unlogged cimport Unlogged

cdef enum:
    READ = 256 << 10            # bytes of one read(2)
    READS = 4                   # reads of one event, while each comes back full
    SPARES = 2                  # blocks of closed backlogs, for reuse
    EVENTS = 64


cdef struct Kept:
    # Bytes that wait for a descriptor: data[start:start + used].
    char *data
    size_t start
    size_t used
    size_t room


cdef class Source:
    cdef Loop loop
    cdef readonly int fd
    cdef uint32_t events
    cdef bint registered
    cdef bint closed

    cdef int want(self, uint32_t events) except -1
    cdef int ignore(self) except -1
    cdef int shut(self) except -1
    cdef int ready(self, uint32_t events) except -1


cdef class Loop:
    cdef int epoll
    cdef epoll_event batch[EVENTS]
    cdef char *buffer
    cdef char *spare[SPARES]
    cdef int spares
    cdef set live               # sources in epoll, which holds only their addresses
    cdef list grave             # sources removed during this batch
    cdef set blocked            # clients with a backlog
    cdef dict held              # clients by number, until released
    cdef set waiting            # `Stdio` with a log that waits (`Sink.waits`)
    cdef object looking         # the timer that looks at them
    cdef list timers
    cdef int64_t now
    cdef int64_t swept
    cdef uint64_t last_client
    cdef bint stopped
    # where output is read to before it is logged; None: private memory
    cdef public Unlogged unlogged
    cdef public int stall

    cdef int patience(self) except -2
    cdef int ring(self) except -1
    cdef int sweep(self) except -1
    cdef int await_log(self, object stdio, bint soon) except -1
    cdef int keep(self, Kept *kept, const char *data, size_t size) except -1
    cdef void drop(self, Kept *kept) noexcept
