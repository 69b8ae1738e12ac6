# cython: language_level=3
"""The stream format of attach, exec and logs (8-byte header and payload), and the matcher of detach
keys.

A frame is `stream` (0 stdin, 1 stdout, 2 stderr), three zero bytes, the payload's size as a
big-endian 32-bit number, and the payload (Docker Engine API, ContainerAttach, "Stream format"). Not
here: sockets, and the text form of detach keys (`containers/streams.py`).

Owns:    the bytes of an unfinished frame header or key sequence.
Threads: one at a time per object; the GIL is kept, calls are short.
Raises:  ValueError for a stream, size or header that the format does not allow.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcpy

cdef enum:
    # no engine sends larger frames; a larger size means that the stream is corrupt
    PAYLOAD_MAX = 64 << 20


def header(int stream, size_t size) -> bytes:
    """The header of a frame with `size` bytes of payload."""
    cdef unsigned char text[HEADER_SIZE]
    if stream < 0 or stream > 2:
        raise ValueError(f"no such stream: {stream}")
    if size > 0xFFFFFFFF:
        raise ValueError(f"a frame holds less than 4 GiB, not {size} bytes")
    put_header(text, stream, <uint32_t>size)
    return text[:HEADER_SIZE]


def mux(int stream, data not None) -> bytes:
    """One frame with `data` as payload."""
    cdef Py_buffer view
    cdef bytes frame
    cdef unsigned char *into
    if stream < 0 or stream > 2:
        raise ValueError(f"no such stream: {stream}")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len > 0xFFFFFFFF:
            raise ValueError(f"a frame holds less than 4 GiB, not {view.len} bytes")
        frame = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + view.len)
        into = <unsigned char *>PyBytes_AS_STRING(frame)
        put_header(into, stream, <uint32_t>view.len)
        if view.len:
            memcpy(into + HEADER_SIZE, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return frame


cdef class Demultiplexer:
    """Decodes frames from bytes split at any place.

    A payload is returned as it arrives, not when its frame is complete: only an incomplete header
    is buffered.
    """

    cdef unsigned char head[HEADER_SIZE]
    cdef size_t headed                   # bytes of `head` received
    cdef size_t wanted                   # bytes of payload still to come
    cdef int stream

    def feed(self, data not None) -> list:
        """Pairs (stream, bytes), none of them empty. After ValueError the object is unusable."""
        cdef list pairs = []
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.split(<const unsigned char *>view.buf, view.len, pairs)
        finally:
            PyBuffer_Release(&view)
        return pairs

    cdef int split(self, const unsigned char *at, size_t left, list pairs) except -1:
        cdef size_t part
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
        return 0

    @property
    def complete(self) -> bool:
        """Returns True if no frame is incomplete, so that the stream may end here."""
        return self.headed == 0 and self.wanted == 0


cdef class DetachKeys:
    """Finds the detach key sequence in a client's input, however it is split over reads.

    Keys that may start the sequence are held back, and forwarded after a mismatch. Docker's reader
    starts again after a mismatch and may miss a sequence. Here none is missed: ctrl-p, ctrl-p,
    ctrl-q forwards one ctrl-p and detaches. An empty sequence never matches.
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
        """Returns True if `data` can be forwarded unchanged, without `feed_raw`: no key is held
        back and none of it starts the sequence."""
        if self.length == 0:
            return True
        return self.matched == 0 and not self.detached and memchr(data, self.keys[0], size) == NULL

    cdef size_t feed_raw(self, const char *data, size_t size, char *into) noexcept nogil:
        """Write the keys to forward to `into`, which has room for `size` + `length` bytes; return
        their number. See `detached`."""
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
            # the first of the keys that are held back can no longer start the sequence
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

    def feed(self, data not None) -> tuple:
        """(bytes to forward, detached). Once detached, the rest of the data and all later data are
        dropped."""
        cdef Py_buffer view
        cdef size_t out
        cdef bytes forward
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            forward = PyBytes_FromStringAndSize(NULL, view.len + self.length)
            out = self.feed_raw(<const char *>view.buf, view.len, PyBytes_AS_STRING(forward))
        finally:
            PyBuffer_Release(&view)
        return forward[:out], self.detached

    def held(self) -> bytes:
        """The keys held back: forward them when the client ends its input."""
        return self.sequence[:self.matched]
