from libc.stdint cimport int64_t, uint64_t

cdef class Sink:
    cdef readonly bytes path               # inode of the live log file; empty when there is none
    cdef readonly uint64_t outrun          # readers that are no longer waited for, in total
    cdef readonly uint64_t dropped         # entries that could not be written, in total
    cdef readonly uint64_t turns           # rotations after which a file can be packed, in total
    cdef readonly bint full                # the process must wait: its output is not to be read
    cdef readonly bint waits               # `look` is to be called from time to time

    cdef int write_raw(self, int stream, const char *data, size_t size) except -1
    cdef int place(self, uint64_t *inode, int64_t *offset) except -1
    cdef const char *unfinished(self, int stream, size_t *size) noexcept
    cpdef bint look(self) except -1
    cpdef resume(self, tuple lines, int stream, bytes chunk, uint64_t inode, int64_t offset)
    cpdef end(self, int stream=*)
    cpdef position(self)
    cpdef pending(self, int stream)
    cpdef follow(self, uint64_t number, uint64_t inode)
    cpdef unfollow(self, uint64_t number)
    cpdef close(self)
