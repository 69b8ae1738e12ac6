# cython: language_level=3
"""The stream format of attach, exec and logs (8-byte header and payload), and the matcher of detach keys.

A frame is `stream` (0 stdin, 1 stdout, 2 stderr), three zero bytes, the payload's size as a big-endian 32-bit number, the payload
(specification, attach: "Stream details"). Not here: sockets, and the text form of detach keys (`containers/streams.py`).

Owns:    the bytes of a frame or of a key sequence that has begun and not ended.
Threads: one at a time per object; the GIL is kept, calls are short.
Raises:  ValueError for a stream, size or header that the format does not have.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcpy

cdef enum:
    PAYLOAD_MAX = 64 << 20              # no engine sends larger frames; beyond it the stream is out of step


def header(int stream, size_t size) -> bytes:
    """The header of a frame with `size` bytes of payload."""
    cdef unsigned char text[HEADER_SIZE]
    if stream < 0 or stream > 2:
        raise ValueError(f"no such stream: {stream}")
    if size > 0xFFFFFFFF:
        raise ValueError(f"a frame holds less than 4 GiB, not {size} bytes")
    put_header(text, stream, <uint32_t>size)
    return text[:HEADER_SIZE]


def mux(int stream, const unsigned char[::1] data not None) -> bytes:
    """One frame with `data` as payload."""
    cdef size_t size = data.shape[0]
    if stream < 0 or stream > 2:
        raise ValueError(f"no such stream: {stream}")
    if size > 0xFFFFFFFF:
        raise ValueError(f"a frame holds less than 4 GiB, not {size} bytes")
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + size)
    cdef unsigned char *into = <unsigned char *>PyBytes_AS_STRING(frame)
    put_header(into, stream, <uint32_t>size)
    if size:
        memcpy(into + HEADER_SIZE, &data[0], size)
    return frame


cdef class Demultiplexer:
    """Reads frames back from bytes in any split.

    A payload is handed out as it comes, not when its frame is complete: nothing but a begun header is ever kept.
    """

    cdef unsigned char head[HEADER_SIZE]
    cdef size_t headed                   # bytes of `head` that have come
    cdef size_t wanted                   # bytes of payload still to come
    cdef int stream

    def feed(self, const unsigned char[::1] data not None) -> list:
        """Pairs (stream, bytes), none of them empty. After ValueError the object is of no further use."""
        cdef list pairs = []
        cdef const unsigned char *at
        cdef size_t left = data.shape[0], part
        if left == 0:
            return pairs
        at = &data[0]
        while left:
            if self.wanted:
                part = min(left, self.wanted)
                pairs.append((self.stream, PyBytes_FromStringAndSize(<const char *>at, part)))
                self.wanted -= part
            else:
                part = min(left, HEADER_SIZE - self.headed)
                memcpy(self.head + self.headed, at, part)
                self.headed += part
                if self.headed == HEADER_SIZE:
                    self.headed = 0
                    self.stream = self.head[0]
                    self.wanted = (
                        <size_t>self.head[4] << 24 | <size_t>self.head[5] << 16
                        | <size_t>self.head[6] << 8 | self.head[7]
                    )
                    if self.stream > 2 or self.head[1] or self.head[2] or self.head[3] or self.wanted > PAYLOAD_MAX:
                        raise ValueError(f"not a frame header: {self.head[:HEADER_SIZE].hex()}")
            at += part
            left -= part
        return pairs

    @property
    def complete(self) -> bool:
        """Nothing has begun that has not ended: the stream may end here."""
        return self.headed == 0 and self.wanted == 0


cdef class DetachKeys:
    """Finds the key sequence that detaches a client in what it types, however it is split over reads.

    Keys that may be the start of the sequence are held back and forwarded as soon as they turn out not to be. Unlike Docker's
    reader, which starts anew after a mismatch, the first occurrence always counts: ctrl-p, ctrl-p, ctrl-q forwards one ctrl-p
    and detaches. An empty sequence never matches.
    """

    def __cinit__(self, bytes sequence not None):
        cdef size_t at, kept = 0
        self.sequence = sequence
        self.keys = <const unsigned char *>PyBytes_AS_STRING(sequence)
        self.length = len(sequence)
        self.fallback = <size_t *>malloc((self.length + 1) * sizeof(size_t))
        if self.fallback == NULL:
            raise MemoryError
        self.fallback[0] = 0
        if self.length:
            self.fallback[1] = 0
        for at in range(1, self.length):
            while kept and self.keys[at] != self.keys[kept]:
                kept = self.fallback[kept]
            if self.keys[at] == self.keys[kept]:
                kept += 1
            self.fallback[at + 1] = kept

    def __dealloc__(self):
        free(self.fallback)

    cdef bint passes(self, const char *data, size_t size) noexcept nogil:
        """Whether `data` can be forwarded untouched, without `feed_raw`: no key is held back and none of it starts the sequence."""
        if self.length == 0:
            return True
        return self.matched == 0 and not self.detached and memchr(data, self.keys[0], size) == NULL

    cdef size_t feed_raw(self, const char *data, size_t size, char *into) noexcept nogil:
        """Write what is to be forwarded to `into`, which has room for `size` + `length` bytes; return how much. See `detached`."""
        cdef size_t at = 0, out = 0, kept, run
        cdef const char *start
        if self.detached:
            return 0
        if self.length == 0:
            memcpy(into, data, size)
            return size
        while at < size:
            if self.matched == 0:
                start = <const char *>memchr(data + at, self.keys[0], size - at)
                run = size - at if start == NULL else start - (data + at)
                memcpy(into + out, data + at, run)
                out += run
                at += run
                if at == size:
                    break
            kept = self.matched
            while kept and <unsigned char>data[at] != self.keys[kept]:
                kept = self.fallback[kept]
            # the keys that stopped being a possible start are the first ones held back
            memcpy(into + out, self.keys, self.matched - kept)
            out += self.matched - kept
            if <unsigned char>data[at] == self.keys[kept]:
                self.matched = kept + 1
            else:
                self.matched = 0
                into[out] = data[at]
                out += 1
            at += 1
            if self.matched == self.length:
                self.matched = 0
                self.detached = True
                break
        return out

    def feed(self, const unsigned char[::1] data not None) -> tuple:
        """(bytes to forward, detached). Once detached, the rest of the data and all later data are dropped."""
        cdef size_t size = data.shape[0], out
        cdef bytes forward
        if size == 0:
            return b"", self.detached
        forward = PyBytes_FromStringAndSize(NULL, size + self.length)
        out = self.feed_raw(<const char *>&data[0], size, PyBytes_AS_STRING(forward))
        return forward[:out], self.detached

    def held(self) -> bytes:
        """The keys held back: to be forwarded when the client ends its input."""
        return self.sequence[:self.matched]
