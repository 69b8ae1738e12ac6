# cython: language_level=3
"""The part of a log driver that runs in the monitor and receives a process's output from the pump.

A driver subclasses `Sink` and overrides at least `write_raw`. The other methods are for sinks that
can be read while they are written; their defaults are for sinks that cannot. Not here: the
json-file driver (`logwriter.pyx`), the choice of a sink by options (`engine/logs`,
`engine/monitor/launch.py`).

Owns:    nothing.
Threads: the loop's. `write_raw` must not wait for a peer, because it would delay every container.
Raises:  an exception of a driver is written to the monitor's log and ends neither the process nor
         its clients.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint64_t


cdef class Sink:
    """Takes the bytes of both streams, in pieces of any size."""

    cdef int write_raw(self, int stream, const char *data, size_t size) except -1:
        """Take bytes of stream 1 (stdout) or 2 (stderr)."""
        raise NotImplementedError

    cdef int place(self, uint64_t *inode, int64_t *offset) except -1:
        """As `position`, but from memory: where the next entry will be written."""
        inode[0] = 0
        offset[0] = 0
        return 0

    cdef const char *unfinished(self, int stream, size_t *size) noexcept:
        """As `pending`, without a copy."""
        size[0] = 0
        return NULL

    cpdef bint look(self) except -1:
        """Update `full` and `waits`; returns the latter. Called by a timer while `waits` is
        true."""
        return False

    cpdef resume(self, tuple lines, int stream, bytes chunk, uint64_t inode, int64_t offset):
        """Continue where a dead monitor stopped. `lines`: the unfinished lines of both streams.
        `chunk`: bytes of `stream` that it had read when the log ended at (`inode`, `offset`).
        Entries that are in the log already are not written again."""
        for index in range(2):
            if lines[index]:
                self.write_raw(index + 1, PyBytes_AS_STRING(<bytes?>lines[index]), len(lines[index]))
        if chunk:
            self.write_raw(stream, PyBytes_AS_STRING(chunk), len(chunk))

    cpdef end(self, int stream=0):
        """Called when the stream (0: both) has ended, so that an unfinished line is complete."""

    cpdef position(self):
        """(inode, offset) of the end of the readable entries; (0, 0) if the sink cannot be read."""
        return 0, 0

    cpdef pending(self, int stream):
        """The bytes of an unfinished line, which were consumed and cannot be read from the sink
        yet.
        """
        return b""

    cpdef follow(self, uint64_t number, uint64_t inode):
        """The reader `number` (chosen by the caller) holds the log's files open up to the one with
        `inode`, 0 for none."""

    cpdef unfollow(self, uint64_t number):
        """Called when that reader has finished. An unknown number is no error."""

    cpdef close(self):
        """End both streams and release all resources. Idempotent."""
