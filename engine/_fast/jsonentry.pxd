from libc.stdint cimport int64_t

cdef enum:
    SLICE = 16384                       # bytes of a line in one entry at most, Docker's rule
    TIME_SIZE = 30                      # 2026-01-02T03:04:05.123456789Z
    # bytes of an entry besides its line and attributes, including what `escape` writes beyond its
    # end
    ENTRY_EXTRA = 128
    # no entry of this engine is larger than 100 KiB; other engines may cut lines later
    ENTRY_MAX = 4 << 20
    # bytes by which the first block to be read backwards is chosen
    USUAL_LINE = 256
    FIRST_BLOCK = 4 << 10               # … and bytes in addition
    SCAN_BLOCK = 256 << 10              # bytes read at a time
    # Mode bit (S_ISVTX, which has no meaning for files) of a log's file: its time stamps, or those
    # from it to the next file, are not in order.
    DISORDERED = 0o1000

cdef struct Entry:
    const char *log                     # still escaped
    size_t size
    int stream
    char time[TIME_SIZE]
    const char *attrs                   # an encoded JSON object, or NULL
    size_t attrs_size

cdef struct Text:                       # what `measure` finds out about the line of an entry
    size_t size                         # of the decoded line, with its newline
    bint newline                        # the line ends in a newline
    bint inner                          # it has others, which no entry of this engine has


cdef size_t whole(const char *data, size_t size) noexcept nogil
cdef char *escape(char *into, const char *data, size_t size, bint exact) noexcept nogil
cdef int64_t read_time(const char *text, size_t size) noexcept nogil
cdef int hex_four(const char *at) noexcept nogil
cdef bint measure(const char *at, size_t size, Text *found) noexcept nogil
cdef char *unescape(char *into, const char *at, size_t size) noexcept nogil
cdef char *put_entry(
    char *into, int stream, const char *data, size_t size, bint newline, const char *attrs, size_t attrs_size,
    const char *second, int nanoseconds, bint exact,
) noexcept nogil
cdef void put_second(char *into, int64_t second) noexcept nogil
cdef int64_t read_time(const char *text, size_t size) noexcept nogil
cdef void put_time(char *into, int64_t at_ns) noexcept nogil
cdef bint parse_any(const char *at, const char *end, Entry *entry) noexcept nogil
cdef bint parse_own(const char *at, size_t size, Entry *entry) noexcept nogil
cdef bint parse_line(const char *at, size_t size, Entry *entry) noexcept nogil
cdef ssize_t read_part(int fd, char *into, size_t size, int64_t offset, int64_t *ready) noexcept nogil
cdef int64_t last_newline(int fd, int64_t high, int64_t *ready) noexcept nogil
cdef int64_t scan_back(
    int fd, int64_t low, int64_t high, ssize_t *wanted, char *time, int64_t *ready
) noexcept nogil
cdef int64_t newest_time(int fd, int64_t high) noexcept nogil
cdef int probe(
    int fd, int64_t offset, int64_t high, int64_t *begins, char *time, int64_t *ready
) noexcept nogil
