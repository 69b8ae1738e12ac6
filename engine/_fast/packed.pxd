from libc.stdint cimport int64_t, uint64_t

cdef struct Label:                      # what the header of a packed file says of the original
    uint64_t inode
    int64_t size
    int64_t lines                       # newlines; -1: unknown
    int64_t entries                     # lines that are entries; -1: unknown
    # times of the first and last entry, ns since the epoch; 0: unknown
    int64_t first
    int64_t last


cdef int read_label(int fd, Label *into) noexcept nogil


cdef class Unpacker:
    cdef int fd
    cdef int64_t at                     # in the file: what was read
    cdef object stream
    cdef bint ended
    cdef readonly int64_t offset        # in the original: what was returned

    cdef ssize_t read(self, char *into, size_t size) except -1
    cdef int begin(self) except -1
    cdef int64_t go_to(self, int64_t offset) except -1


cdef int survey(int fd, Label *into) noexcept nogil
cdef int write_all(int target, bytes data) except -1
