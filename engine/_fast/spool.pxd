from libc.stdint cimport int64_t, uint64_t

from engine._fast.board cimport Board
from engine._fast.logwriter cimport LogWriter


cdef class PackedLog(LogWriter):
    cdef public bint compress
    # `Rotated` of PATH.1 and so on; None for a number that is free
    cdef list files
    # (inode, time) of files that were removed or packed lately
    cdef object gone
    cdef bint surplus                      # more files than `max_file`, or too large ones, are kept

    cdef list listed(self)
    cdef int turn(self) except -1
    cdef tuple make(self)
    cdef tuple pinned(self)
    cdef int prune(self) except -1
    cdef bint removable(self, Py_ssize_t number) except -1
    cdef bint acknowledged(self, Py_ssize_t number) except -1
    cdef int truncated(self, int64_t lost) except -1
    cdef bytes name(self, Py_ssize_t number, bint packed)


cdef class Spool(PackedLog):
    cdef Board board
    cdef readonly int slot                 # of the board; -1: none
    cdef str id
    cdef readonly int64_t quota
    cdef readonly bint blocking
    cdef int64_t total                     # bytes since the spool began, up to the live file's end
    cdef int64_t told                      # of these, what the board has
    cdef uint64_t entries                  # since the object was made, with the dropped ones
    cdef uint64_t told_entries
    cdef int64_t acked                     # at the last look at the board

    cdef int tell(self) except -1
    cdef int64_t end_of(self, Py_ssize_t number) except -1
