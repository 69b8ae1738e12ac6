"""The walk through a directory tree that packing and comparing share. See walk.pyx."""

from libc.stdint cimport uint8_t

from engine._fast.linux cimport stat_t

cdef enum:
    MAX_PATH = 4095                 # bytes of a path that the kernel takes at once
    # bytes of a path, which may occur twice in a PAX header; Go reads 1 MiB of it
    LONGEST = 256 * 1024

cdef struct Level:
    int fd                  # of the directory; -1 while it is closed
    size_t path             # length of its path
    size_t next             # index of the next of its names
    size_t end
    size_t names            # where they begin
    bint nodev              # its mount opens no devices

cdef class Walk:
    cdef int top
    cdef Level *levels
    cdef size_t depth
    cdef size_t levels_room
    cdef char *names                # of all directories on the way down, each after its d_type
    cdef size_t names_used
    cdef size_t names_room
    cdef size_t *order              # offsets of names, sorted per directory
    cdef size_t order_used
    cdef size_t order_room
    cdef uint8_t *found
    cdef char *path
    cdef size_t path_room
    cdef size_t length
    cdef const char *name           # the last component of `path`
    cdef bint is_file               # a regular file by its d_type
    cdef bint is_plain              # neither a directory nor a whiteout by its d_type
    cdef int error
    cdef char failed[MAX_PATH + 1]

    cdef int fail(self, int number) noexcept nogil
    cdef object raise_failure(self)
    cdef int enter(self, int fd) noexcept nogil
    cdef int read_names(self, Level *level) noexcept nogil
    cdef void leave(self) noexcept nogil
    cdef int open_again(self) noexcept nogil
    cdef int next(self, int *parent) noexcept nogil

cdef void sort_names(size_t *order, size_t count, const char *names) noexcept nogil
cdef bint is_opaque(int directory) noexcept nogil
cdef bint is_mount_point(const char *path, int parent, const char *name, const stat_t *found) noexcept nogil
