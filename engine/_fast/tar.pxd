"""The tar reader for C callers: everything `nogil`, failures as -1 with the reason kept in the
reader (`fail`, raised by `raise_failure`).
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t

cdef extern from *:
    """
    #define TAR_MAX_PATH 4095
    """
    const int TAR_MAX_PATH

cdef struct Extent:
    int64_t offset
    int64_t size

cdef struct Attribute:
    const char *name            # NUL-terminated
    const char *value
    size_t size

cdef struct Entry:
    char *name                  # NUL-terminated, as written: not cleaned
    char *link
    # '0' regular, '1' hard link, '2' symlink, '3' char, '4' block, '5' directory, '6' FIFO
    char type
    uint32_t mode               # permission bits with setuid, setgid, sticky
    uint32_t uid
    uint32_t gid
    int64_t size                # bytes of payload in the stream that follow now
    int64_t real_size           # bytes of the file
    int64_t seconds             # mtime
    int64_t nanoseconds
    uint32_t major
    uint32_t minor
    bint sparse
    Extent *extents
    size_t extent_count
    Attribute *attributes       # extended attributes; valid until the next entry
    size_t attribute_count
    int64_t offset              # of the payload in the stream

cdef ssize_t read_source(object source, uint8_t *buffer, size_t room) except -1

cdef class Recorder:
    cdef object receiver
    cdef object failure
    cdef uint8_t *data          # not written yet
    cdef size_t size

    cdef int put(self, const uint8_t *data, size_t size) noexcept nogil
    cdef int put_file(self, const char *path, uint32_t length, int64_t offset, int64_t size) noexcept nogil
    cdef int flush(self) noexcept nogil
    cdef int inline_files(self) noexcept nogil
    cdef object raise_failure(self)

cdef class Reader:
    cdef Entry entry
    cdef readonly int64_t entries
    cdef int64_t position       # of `start` in the stream
    cdef int descriptor
    cdef bint seekable
    cdef int64_t at             # next byte of the descriptor
    cdef int64_t end            # -1: until the end of the stream
    cdef object source
    cdef object digest
    cdef object failure
    cdef uint8_t *buffer
    cdef size_t start
    cdef size_t filled
    cdef bint finished
    # [0] counts the bytes read, [1] non-zero stops the reader; or NULL. Its owner outlives the
    # reader.
    cdef int64_t *progress
    cdef Recorder recorder      # of the tar-split data, or None
    cdef size_t captured        # bytes of the buffer up to here are in the tar-split data already
    cdef bint recording
    cdef bint verbatim          # the tar-split data includes file contents
    cdef bint passing           # the tar-split data refers to a file for the current payload
    cdef int error              # errno of the failure, 0 for a fault of the archive, -1 for none
    cdef char reason[512]
    cdef int64_t left           # bytes of payload that were not read yet
    cdef int64_t padding
    # the extended header of this entry; names of attributes point into it
    cdef char *headers
    cdef size_t headers_size
    cdef size_t headers_room
    cdef size_t extents_room
    cdef size_t attributes_room
    cdef int64_t pax_size
    cdef int64_t pax_real_size
    cdef int64_t pax_major
    cdef int64_t pax_minor
    cdef int64_t pending_offset
    cdef int pax_flags
    cdef int sparse_major
    cdef int sparse_minor
    cdef bint sparse_numbered

    cdef int fail(self, const char *reason) noexcept nogil
    cdef int fail_system(self, const char *what, int number) noexcept nogil
    cdef int fill(self) noexcept nogil
    cdef ssize_t fill_from_source(self, size_t room)
    cdef int update(self, size_t at, size_t size)
    cdef int need(self, size_t count) noexcept nogil
    cdef int skip(self, int64_t count) noexcept nogil
    cdef int next(self) noexcept nogil
    cdef int payload(self, const uint8_t **data, size_t *size) noexcept nogil
    cdef int drain(self) noexcept nogil
    cdef int keep(self) noexcept nogil
    cdef int record_file(self, const char *path, int64_t offset, int64_t size) noexcept nogil
    cdef int inline_files(self) noexcept nogil
    cdef object raise_failure(self)
    cdef int read_header(self, const uint8_t *block) noexcept nogil
    cdef bint check(self, const uint8_t *block) noexcept nogil
    cdef int fail_entry(self, const char *reason) noexcept nogil
    cdef int read_long(self, int64_t size, char *target) noexcept nogil
    cdef int read_pax(self, int64_t size, bint apply) noexcept nogil
    cdef int parse_pax(self) noexcept nogil
    cdef int pax_record(self, char *key, size_t key_size, char *value, size_t size) noexcept nogil
    cdef int sparse_record(self, const char *key, char *value, size_t size) noexcept nogil
    cdef int old_extents(self, const uint8_t *at, int count) noexcept nogil
    cdef int add_extent(self, int64_t offset, int64_t size) noexcept nogil
    cdef int read_old_sparse(self, const uint8_t *block) noexcept nogil
    cdef int read_sparse_map(self) noexcept nogil
    cdef int map_number(self, int64_t *value) noexcept nogil
    cdef int check_extents(self) noexcept nogil
