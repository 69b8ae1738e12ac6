from libc.stdint cimport int64_t, uint64_t

cdef enum:
    LABELLED = 64                       # bytes of the header of a file with a label


cdef struct Label:                      # what a packed file says of its original
    uint64_t inode
    int64_t size
    int64_t lines                       # newlines; -1: unknown
    int64_t entries                     # lines that are entries; -1: unknown
    # time stamps of the first and the last entry, ns since the epoch; 0: unknown, or no entry
    int64_t first
    int64_t last


cdef class Survey:
    cdef Label found                    # of what was fed: all but the inode
    cdef char *buffer                   # the unfinished line
    cdef size_t room
    cdef size_t used
    cdef bint skipping                  # inside a line that is too long for an entry

    cdef int feed(self, const char *data, size_t size) except -1 nogil


cdef int read_label(int fd, Label *into) noexcept nogil
cdef int write_all(int target, bytes data) except -1
