from libc.stdint cimport int64_t, uint64_t

from engine._fast.sink cimport Sink

cdef struct Line:                         # the unfinished line of a stream
    char *data
    size_t size
    size_t room


cdef enum:
    # Entries that rotation removes within the same call are not written, for logs of at most so
    # many files.
    MAX_CUTS = 16
    LENIENCE = 32 << 20  # bytes by which a log may exceed its options because of followers

cdef class LogWriter(Sink):
    cdef const char *path_text
    cdef readonly int64_t max_size
    cdef readonly int max_file
    # errno while writing fails, 0 if the last write succeeded
    cdef readonly int error
    cdef bytes attrs                       # `,"attrs":{…}` or empty, as it stands in each entry
    cdef const char *attrs_text
    cdef size_t attrs_size
    cdef int fd
    cdef uint64_t inode
    # bytes in the live file, as far as this object has written it
    cdef int64_t size
    cdef int64_t limit                     # size at which the next rotation is tried; 0: never
    cdef int64_t last                      # time stamp of the newest entry, ns since the epoch
    cdef bint exact                        # bytes that are not UTF-8 are kept
    cdef int64_t second                    # the second that `clock` holds as text
    cdef char clock[20]
    cdef Line lines[2]
    cdef char *out                         # formatted entries, only during a call
    cdef size_t out_size
    cdef size_t cuts[MAX_CUTS + 1]         # start in `out` of each file that is still to be begun
    cdef int cut_count
    cdef bint turned                       # a rotation has succeeded in this call
    # entries that rotation removes within a call are not written
    cdef bint skips
    cdef int fault  # errno of the last write(2) or rotation, 0 when it succeeded
    cdef bint torn  # the file ends in a partial entry that could not be removed
    cdef dict followers  # number → inode of the newest file that the follower is known to hold open
    cdef Py_ssize_t followed               # number of followers
    cdef Py_ssize_t behind                 # number of followers not known to hold the live file
    cdef Py_ssize_t skip                   # entries of a repeated chunk that the log already has
    cdef int long_files  # rotated files that grew beyond `max_size` because of a follower

    cpdef write(self, int stream, data)

    cdef Py_ssize_t entries_since(self, uint64_t inode, int64_t offset) except -1
    cdef tuple count_after(self, bytes name, uint64_t inode, int64_t offset)
    cdef int begin(self) except -1
    cdef bint mark(self) noexcept
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
