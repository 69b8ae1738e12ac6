"""Removal of a directory entry for C callers."""

cdef int remove_entry(int parent, const char *name, bint directory) noexcept nogil
