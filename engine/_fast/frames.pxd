from libc.stdint cimport uint32_t

cdef enum:
    HEADER_SIZE = 8


cdef inline void put_header(unsigned char *into, int stream, uint32_t size) noexcept nogil:
    """Write the 8 bytes of a frame header: stream, three zeros, big-endian payload size."""
    into[0] = <unsigned char>stream
    into[1] = 0
    into[2] = 0
    into[3] = 0
    into[4] = <unsigned char>(size >> 24)
    into[5] = <unsigned char>(size >> 16)
    into[6] = <unsigned char>(size >> 8)
    into[7] = <unsigned char>size


cdef class DetachKeys:
    cdef readonly bytes sequence
    cdef const unsigned char *keys
    cdef size_t length
    cdef size_t matched                    # matched keys that are held back
    # Knuth-Morris-Pratt failure function: matched keys that remain after a mismatch
    cdef size_t *fallback
    cdef readonly bint detached

    cdef bint passes(self, const char *data, size_t size) noexcept nogil
    cdef size_t feed_raw(self, const char *data, size_t size, char *into) noexcept nogil
