# cython: language_level=3
"""DATA frames of an HTTP/2 connection (RFC 9113), taken out of what h2 reads.

h2 needs 20 us for a frame of 16 KiB, most of it for copies and events. Here DATA of registered
streams becomes gRPC messages (compression flag, big-endian 32-bit size, message), with one copy of
each byte. All other bytes pass unchanged. END_STREAM becomes an empty DATA frame, so that h2's
state of the stream stays true. h2 does not see the payload, so the caller opens the windows for it.

`feed` stops after the headers that begin a stream's DATA: its caller registers the stream and goes
on, so that what came with the headers is taken, too.

What breaks the protocol passes too: h2 closes the connection for it. So nothing is taken out of a
header block, which may be spread over frames, and no frame that is too large or has wrong padding.

Owns:    an incomplete frame header, and per stream an incomplete message. Messages are the
         caller's.
Threads: one at a time; the GIL is kept, calls are as long as a copy of their data.
Raises:  OverflowError for more bytes than a stream's window allows.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

cdef enum:
    HEADER = 9                  # bytes of a frame header
    DATA = 0                    # types of frames
    HEADERS = 1
    PUSH_PROMISE = 5
    CONTINUATION = 9
    END_STREAM = 1              # flags
    END_HEADERS = 4
    PADDED = 8
    PREFIX = 5                  # bytes before a message


cdef inline uint32_t big(const uint8_t *data) noexcept:
    return <uint32_t>data[0] << 24 | <uint32_t>data[1] << 16 | <uint32_t>data[2] << 8 | data[3]


cdef inline uint32_t stream_of(const uint8_t *head) noexcept:
    """The stream of a frame; the reserved bit before it is ignored (RFC 9113, 4.1)."""
    return big(head + 5) & 0x7FFFFFFF


cdef class _Stream:
    """The messages of one stream."""

    cdef int number
    cdef int64_t window
    cdef uint8_t prefix[PREFIX]
    cdef size_t filled          # bytes of the prefix, or of the message
    cdef bytes message          # None while the prefix is incomplete
    cdef size_t size
    cdef bint failed

    cdef int deliver(self, const uint8_t *data, size_t length, size_t limit, list found) except -1:
        """Take in the next bytes; append what is complete to `found`."""
        cdef size_t part
        while length and not self.failed:
            if self.message is None:
                part = min(length, PREFIX - self.filled)
                memcpy(self.prefix + self.filled, data, part)
                self.filled += part
                data += part
                length -= part
                if self.filled < PREFIX:
                    return 0
                self.size = big(self.prefix + 1)
                if self.prefix[0] or self.size > limit:
                    self.failed = True
                    found.append((self.number, None))
                    return 0
                self.filled = 0
                self.message = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>self.size)
            part = min(length, self.size - self.filled)
            memcpy(PyBytes_AS_STRING(self.message) + self.filled, data, part)
            self.filled += part
            data += part
            length -= part
            if self.filled == self.size:
                self.complete(found)
        return 0

    cdef int complete(self, list found) except -1:
        found.append((self.number, self.message))
        self.message = None
        self.filled = 0
        return 0


cdef class Scanner:
    """The bytes of one connection, cut anywhere."""

    cdef dict streams
    cdef size_t limit
    cdef uint32_t largest
    cdef size_t skipped         # bytes of the preface to pass
    cdef uint8_t head[HEADER + 1]
    cdef size_t head_size
    cdef size_t left            # bytes of the current frame's payload
    cdef size_t padding         # of them at its end
    cdef _Stream taking         # None while the frame passes
    cdef bint last              # the frame ends the stream
    cdef bint in_headers
    cdef bint begins            # the frame is all headers of a stream that goes on

    def __init__(self, size_t preface, uint32_t largest, size_t limit):
        """`preface`: bytes before the first frame. `largest`: payload of a frame. `limit`: bytes of
        a message.
        """
        self.streams = {}
        self.skipped = preface
        self.largest = largest
        self.limit = limit

    def passing(self, int number) -> bool:
        """True if a DATA frame of the stream passes and is incomplete: h2 has yet to give its data,
        so the stream cannot be registered now.
        """
        return (self.left > 0 and self.taking is None and self.head[3] == DATA
                and stream_of(self.head) == <uint32_t>number)

    def register(self, int number, int64_t window, bytes begun not None) -> list:
        """Take the DATA of a stream from the next frame on. `begun`: bytes of an incomplete
        message. Returns as `feed` what they complete.
        """
        cdef _Stream stream = _Stream()
        found = []
        stream.number = number
        stream.window = window
        stream.deliver(<const uint8_t *>PyBytes_AS_STRING(begun), len(begun), self.limit, found)
        self.streams[number] = stream
        return found

    def forget(self, int number) -> bool:
        """Pass the DATA of a stream again. True if a message is incomplete."""
        cdef _Stream stream = self.streams.pop(number, None)
        return stream is not None and (stream.message is not None or stream.filled > 0)

    def open(self, int number, int64_t size) -> bool:
        """The window of a stream was opened. False if the stream is not registered."""
        cdef _Stream stream = self.streams.get(number)
        if stream is None:
            return False
        stream.window += size
        return True

    def feed(self, bytes data not None, size_t place=0):
        """Scan `data` from `place` on, to its end or to where DATA of another stream may begin.

        Returns the bytes for h2, what was taken, how many bytes that were of the connection's
        window, and the place to go on from. Taken are pairs with the number of a stream: a message;
        None if the next message is compressed or too long; or the size of padding, which only the
        window has to know.
        """
        cdef const uint8_t *begin = <const uint8_t *>PyBytes_AS_STRING(data)
        cdef size_t size = len(data), run = place, part, content
        cdef Py_ssize_t start = 0       # where the current header begins; -1: in earlier data
        cdef int64_t taken = 0
        cdef list found = []
        cdef bytearray passed = None
        if self.head_size:
            start = -1
        while place < size:
            if self.skipped:
                part = min(self.skipped, size - place)
                self.skipped -= part
                place += part
                continue
            if self.left:
                part = min(self.left, size - place)
                if self.taking is not None and self.left > self.padding:
                    content = min(part, self.left - self.padding)
                    self.taking.deliver(begin + place, content, self.limit, found)
                place += part
                self.left -= part
                if self.taking is not None:
                    run = place
                    if not self.left:
                        passed = self.end(passed)
                elif self.begins and not self.left:
                    size = place
                continue
            if not self.head_size:
                start = <Py_ssize_t>place
            while place < size and self.head_size < HEADER:
                self.head[self.head_size] = begin[place]
                self.head_size += 1
                place += 1
            if self.head_size < HEADER:
                break
            stream = self.streams.get(stream_of(self.head)) if self.head[3] == DATA else None
            part = big(self.head) >> 8
            if stream is not None and (self.in_headers or part > self.largest):
                stream = None
            if stream is not None and self.head[4] & PADDED and part:
                if self.head_size == HEADER:
                    if place == size:
                        break
                    self.head[HEADER] = begin[place]
                    self.head_size += 1
                    place += 1
            if stream is not None and self.head[4] & PADDED and (not part or self.head[HEADER] >= part):
                stream = None
            if stream is None:
                self.begin_passing(part)
                if start < 0:
                    passed = bytearray() if passed is None else passed
                    passed += self.head[:self.head_size]
                    run = place
            else:
                if start > <Py_ssize_t>run:
                    passed = bytearray() if passed is None else passed
                    passed += data[run:start]
                passed = bytearray() if passed is None else passed
                self.begin_taking(stream, part, found)
                taken += <int64_t>part
                run = place
                if not self.left:
                    passed = self.end(passed)
            self.head_size = 0
        if self.head_size:              # incomplete: it waits for the rest
            if start > <Py_ssize_t>run:
                passed = bytearray() if passed is None else passed
                passed += data[run:start]
            run = size
            if passed is None:
                passed = bytearray()
        if passed is None:
            return data if size - run == <size_t>len(data) else data[run:size], found, taken, place
        if run < size:
            passed += data[run:size]
        return bytes(passed), found, taken, place

    cdef int begin_passing(self, size_t length) except -1:
        """A frame passes whose header is complete."""
        cdef uint8_t kind = self.head[3], flags = self.head[4]
        if kind == HEADERS or kind == PUSH_PROMISE:
            self.in_headers = not flags & END_HEADERS
        elif kind == CONTINUATION and flags & END_HEADERS:
            self.in_headers = False
        self.begins = kind == HEADERS and flags & (END_HEADERS | END_STREAM) == END_HEADERS
        self.taking = None
        self.padding = 0
        self.left = length - (self.head_size - HEADER)
        return 0

    cdef int begin_taking(self, _Stream stream, size_t length, list found) except -1:
        """A frame is taken."""
        stream.window -= <int64_t>length
        if stream.window < 0:
            raise OverflowError(f"stream {stream.number} has sent more than its window")
        self.taking = stream
        self.last = self.head[4] & END_STREAM
        self.padding = 0
        self.left = length
        if self.head_size > HEADER:
            self.padding = self.head[HEADER]
            self.left -= 1
            found.append((stream.number, <int>self.padding + 1))
        return 0

    cdef bytearray end(self, bytearray passed):
        """A taken frame is complete."""
        cdef uint8_t empty[HEADER]
        cdef _Stream stream = self.taking
        self.taking = None
        if not self.last:
            return passed
        empty[:] = [0, 0, 0, DATA, END_STREAM, 0, 0, 0, 0]
        empty[5] = stream.number >> 24 & 0xFF
        empty[6] = stream.number >> 16 & 0xFF
        empty[7] = stream.number >> 8 & 0xFF
        empty[8] = stream.number & 0xFF
        passed = bytearray() if passed is None else passed
        passed += empty[:HEADER]
        return passed
