from libc.stdint cimport int64_t, uint64_t

cdef struct Line:                         # what has come of a stream's line, without its newline
    char *data
    size_t size
    size_t room


cdef enum:
    MAX_CUTS = 16                          # files of a log at most for which what does not last is not written

cdef class LogWriter:
    cdef readonly bytes path
    cdef const char *path_text
    cdef readonly int64_t max_size
    cdef readonly int max_file
    cdef readonly int error                # errno while writing fails, 0 when the last write went well
    cdef readonly uint64_t dropped         # entries lost to failed writes since the object was made
    cdef bytes attrs                       # `,"attrs":{…}` or empty, as it stands in each entry
    cdef const char *attrs_text
    cdef size_t attrs_size
    cdef int fd
    cdef uint64_t inode
    cdef int64_t size                      # bytes in the live file, as far as this object has written it
    cdef int64_t limit                     # size at which the next rotation is tried; 0: never
    cdef int64_t last                      # time stamp of the newest entry, ns since the epoch
    cdef int64_t second                    # the second that `clock` spells
    cdef char clock[20]
    cdef Line lines[2]
    cdef char *out                         # formatted entries, only during a call
    cdef size_t out_size
    cdef size_t cuts[MAX_CUTS + 1]         # where in `out` the files that are still to be begun begin
    cdef int cut_count
    cdef bint turned                       # a rotation has gone well in this call
    cdef int fault                         # errno of the last write(2) or rotation, 0 when it went well
    cdef bint torn                         # the file ends in part of an entry that could not be cut off
    cdef dict followers                    # number → inode of the newest file that the follower is known to hold
    cdef Py_ssize_t followed               # how many there are
    cdef Py_ssize_t behind                 # how many are not known to hold the live file
    cdef readonly uint64_t outrun          # how many rotation has ceased to wait for, in all
    cdef int long_files                    # rotated files that grew beyond their size for a follower's sake

    cpdef write(self, int stream, data)
    cdef int write_raw(self, int stream, const char *data, size_t size) except -1
    cpdef end(self, int stream=*)
    cpdef position(self)
    cpdef pending(self, int stream)
    cpdef close(self)
    cpdef follow(self, uint64_t number, uint64_t inode)
    cpdef unfollow(self, uint64_t number)

    cdef int begin(self) except -1
    cdef int finish(self) except -1
    cdef void take(self, int stream, const char *data, size_t size) noexcept nogil
    cdef void cut(self, size_t at) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef void emit(self, int stream, const char *data, size_t size, bint newline) noexcept nogil
    cdef void flush(self, size_t upto) noexcept nogil
    cdef int rotate(self) noexcept nogil
    cdef void trim(self) noexcept nogil
    cdef int count(self) except -1
    cdef int leave_behind(self) except -1
    cdef int repair(self) except -1
