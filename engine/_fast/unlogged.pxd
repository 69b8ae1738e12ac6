from libc.stdint cimport int64_t, uint32_t, uint64_t

# of the file; everything but `active` is valid while `active` is not 0
cdef struct Head:
    uint64_t active                        # number of the current chunk, 0 for none
    uint64_t size                          # its bytes; 0 while the read has not returned
    uint64_t inode                         # where its log ended before it
    int64_t offset
    uint32_t slot
    uint32_t stream


cdef class Unlogged:
    cdef readonly bytes path
    cdef int fd
    cdef char *area                        # the mapping: the head, then the chunk
    cdef Head *head
    # where output is read to; the 8 bytes before it are for a frame's header
    cdef char *chunk
    cdef uint64_t number                   # number of the last chunk
    cdef list free                         # slots that are free for reuse
    cdef uint32_t slots

    cdef int take(self, bytes key) except -1
    cdef void name(self, int slot, bytes key) noexcept
    cdef void give_back(self, int slot) noexcept
    cdef void begin(self, int slot, int stream, uint64_t inode, int64_t offset) noexcept
    cdef void came(self, size_t size) noexcept
    cdef void put(self, int slot, int stream, int half, const char *line, size_t size) noexcept
    cdef void done(self) noexcept
    cdef void clear(self, size_t size) noexcept
