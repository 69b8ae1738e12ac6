# cython: language_level=3, cdivision=True
"""Entries of a container's spool → messages of its log driver, in blocks.

A message is `head`, the time, `middle`, the text and `tail`, in this order, in the frame of the
transport. All but time and text are fixed bytes of the container, for stdout and for stderr. So
each protocol is a row of constants here, and its options are bytes that the caller builds once. Not
here: reading the spool, destinations and what they acknowledge (`engine/shipper`).

Owns:    nothing but the memory of a call. Hands out bytes.
Threads: one at a time per `Form`; the GIL is released around blocks of 32 KiB and more.
Raises:  ValueError for a form that does not exist, MemoryError. Lines that are no entries are
         skipped, whatever they contain.
"""
from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport PyObject, Py_XDECREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy

from engine._fast.jsonentry cimport (
    ENTRY_MAX, SLICE, TIME_SIZE, Entry, Text, escape, hex_four, measure, parse_line, parse_own, put_second, read_time,
    unescape, whole,
)
from engine._fast.linux cimport localtime_r, time_t, tm_t, tzset

import array

cdef extern from "Python.h":
    # raw pointers, because the bytes object is filled without the GIL and then shrunk to its final
    # size
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *, Py_ssize_t) except NULL
    char *bytes_text "PyBytes_AS_STRING"(PyObject *) nogil
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1

cdef enum:                              # text
    TEXT_RAW
    TEXT_JSON
    TEXT_MSGPACK_STR
    TEXT_JOURNAL
    TEXTS

cdef enum:                              # time
    TIME_NONE
    TIME_STAMP
    TIME_RFC3339
    TIME_RFC3339_MICRO
    TIME_RFC3339_NANO
    TIME_MILLIS_FRACTION
    TIME_MICROS_FRACTION
    TIME_EVENT_TIME
    TIME_SECONDS_INT
    TIME_MILLIS
    TIMES

cdef enum:                              # frame
    FRAME_LINE
    FRAME_NUL
    FRAME_COUNT
    FRAME_CONCATENATED
    FRAME_DATAGRAM
    FRAMES

cdef enum:                              # partial
    PARTIAL_NONE
    PARTIAL_FLUENTD
    PARTIAL_JOURNALD
    PARTIALS

RAW, JSON, MSGPACK_STR, JOURNAL = range(TEXTS)
(
    NO_TIME, STAMP, RFC3339, RFC3339_MICRO, RFC3339_NANO, MILLIS_FRACTION, MICROS_FRACTION, EVENT_TIME, SECONDS_INT,
    MILLIS,
) = range(TIMES)
LINE, NUL, COUNT, CONCATENATED, DATAGRAM = range(FRAMES)
NO_PARTIAL, FLUENTD, JOURNALD = range(PARTIALS)

cdef enum:
    RELEASE = 32 << 10                  # bytes from which the GIL is released
    ROOM_MAX = 1 << 30                  # `ends` are 32-bit numbers
    SLACK = 1024                        # room for the text of a usual line
    MOMENT = 48                         # most bytes of a time
    EXTRAS = 320                        # most bytes of the fields of `partial`
    # most bytes that frame and text add: a count, and `MESSAGE\n`, a size and a newline; and what
    # `unescape` writes beyond its end
    AROUND = 24 + 24 + 16
    PART = SLICE - 3                    # a line is split before a character

cdef int64_t SECOND = 1000000000
cdef const char *HEX = b"0123456789abcdef"
cdef const char *MONTHS = b"JanFebMarAprMayJunJulAugSepOctNovDec"
cdef array.array NUMBERS = array.array("I")

cdef struct Piece:
    const char *data
    size_t size

cdef struct Open:                       # a line that is delivered in parts; `ordinal` 0: none
    int64_t began                       # time of its first part
    int64_t ordinal                     # parts so far

cdef struct Scratch:
    char *data
    size_t room

cdef struct Run:                        # a call of `format`
    const char *block
    size_t size
    size_t at                           # bytes consumed
    size_t entries                      # entries consumed
    uint64_t number                     # of the next entry
    char *out
    size_t room                         # output at which the call ends
    size_t capacity
    size_t done                         # bytes of output
    size_t needed                       # … and what the next entry needs at most
    size_t messages
    uint32_t *ends
    size_t ends_room
    Scratch scratch

tzset()  # localtime_r(3) need not read the time zone itself


# --- entries --------------------------------------------------------------------------------------


cdef int find(const char *line, size_t size, Entry *entry, Text *text, Scratch *scratch) noexcept nogil:
    """Parse a line (without its newline). Returns 1 for an entry, 0 for another line, -1 without
    memory. `entry.log` is then as `measure` demands. It points into the line or into `scratch`,
    where 16 bytes behind it can be read.
    """
    cdef char *raw
    cdef char *end
    cdef char *again
    if size < ENTRY_MAX and parse_own(line, size, entry) and measure(entry.log, entry.size, text):
        return 1  # an own entry has 60 bytes after its text
    if size >= ENTRY_MAX:
        return 0
    if scratch.room < 8 * size + 128:
        free(scratch.data)
        scratch.room = 0
        scratch.data = <char *>malloc(8 * size + 128)
        if scratch.data == NULL:
            return -1
        scratch.room = 8 * size + 128
    memcpy(scratch.data, line, size)
    memcpy(scratch.data + size, b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32)
    if not parse_line(scratch.data, size, entry):
        return 0
    if measure(entry.log, entry.size, text):
        return 1
    # What another engine wrote, or a damaged disk: decode it and encode it as this engine does.
    raw = scratch.data + size + 32
    end = unescape(raw, entry.log, entry.size)
    if end == NULL:
        return 0
    again = raw + size + 32
    entry.log = again
    entry.size = escape(again, raw, end - raw, False) - again
    return measure(entry.log, entry.size, text)


cdef int nine_digits(const char *at) noexcept nogil:
    """The value of nine decimal digits, or -1."""
    cdef int number = 0, index
    cdef unsigned digit, wrong = 0
    for index in range(9):
        digit = <unsigned>(<unsigned char>at[index]) - c'0'
        wrong |= digit > 9
        number = number * 10 + <int>(digit & 15)
    return -1 if wrong else number


cdef bint is_space(int rune) noexcept nogil:
    """Unicode's White_Space."""
    return (
        9 <= rune <= 13 or rune == 0x20 or rune == 0x85 or rune == 0xA0 or rune == 0x1680 or 0x2000 <= rune <= 0x200A
        or rune == 0x2028 or rune == 0x2029 or rune == 0x202F or rune == 0x205F or rune == 0x3000
    )


cdef bint is_blank(const char *at, size_t size) noexcept nogil:
    """Returns 1 if a measured text is empty or white space."""
    cdef const char *end = at + size
    cdef unsigned char byte
    cdef int rune
    while at < end:
        byte = <unsigned char>at[0]
        if byte == c'\\' and at[1] == c'u':
            rune = hex_four(at + 2)
            at += 6
        elif byte == c'\\':
            if memchr(b"ntrf", at[1], 4) == NULL:
                return False
            rune = c' '
            at += 2
        elif byte < 0x80:
            rune = byte
            at += 1
        elif byte < 0xE0:
            rune = (byte & 0x1F) << 6 | (at[1] & 0x3F)
            at += 2
        elif byte < 0xF0:
            rune = (byte & 0xF) << 12 | (at[1] & 0x3F) << 6 | (at[2] & 0x3F)
            at += 3
        else:
            return False
        if not is_space(rune):
            return False
    return True


cdef size_t cut(const char *at, size_t size, size_t limit, bint escaped, size_t *raw) noexcept nogil:
    """Size of the longest beginning of a measured text that takes at most `limit` bytes, `escaped`
    or decoded, and ends after a character. `raw`: its size when decoded."""
    cdef const char *begin = at
    cdef const char *end = at + size
    cdef const char *stop
    cdef size_t used = 0, run, width, plain
    cdef int rune
    raw[0] = 0
    while at < end:
        stop = <const char *>memchr(at, c'\\', end - at)
        run = (stop if stop != NULL else end) - at
        if run > limit - used:
            run = whole(at, limit - used)
            raw[0] += run
            return at + run - begin
        used += run
        raw[0] += run
        at += run
        if stop == NULL:
            break
        width = 2
        plain = 1
        if at[1] == c'u':
            width = 6
            rune = hex_four(at + 2)
            plain = 1 if rune < 0x80 else 2 if rune < 0x800 else 3
        if (width if escaped else plain) > limit - used:
            break
        used += width if escaped else plain
        raw[0] += plain
        at += width
    return at - begin


# --- output ---------------------------------------------------------------------------------------


cdef inline char *put(char *into, const char *data, size_t size) noexcept nogil:
    memcpy(into, data, size)
    return into + size


cdef char *put_number(char *into, uint64_t number) noexcept nogil:
    cdef char text[20]
    cdef int at = 20
    while True:
        at -= 1
        text[at] = <char>(c'0' + number % 10)
        number //= 10
        if number == 0:
            break
    return put(into, text + at, 20 - at)


cdef inline size_t count_digits(size_t number) noexcept nogil:
    cdef size_t count = 1
    while number >= 10:
        number //= 10
        count += 1
    return count


cdef char *put_digits(char *into, int number, int count) noexcept nogil:
    """The last `count` decimal digits of a number."""
    cdef int at
    for at in range(count - 1, -1, -1):
        into[at] = <char>(c'0' + number % 10)
        number //= 10
    return into + count


cdef char *without_zeros(char *begin, char *end) noexcept nogil:
    """The end of the fraction `.…` at `begin` without trailing zeros, and without its point if
    nothing else is left."""
    while end[-1] == c'0':
        end -= 1
    return begin if end == begin + 1 else end


cdef char *put_big_endian(char *into, uint64_t number, int size) noexcept nogil:
    cdef int at
    for at in range(size):
        into[at] = <char>(number >> (8 * (size - 1 - at)))
    return into + size


cdef char *put_little_endian(char *into, uint64_t number) noexcept nogil:
    cdef int at
    for at in range(8):
        into[at] = <char>(number >> (8 * at))
    return into + 8


cdef char *put_unsigned(char *into, uint64_t number) noexcept nogil:
    """A MessagePack unsigned integer, in its shortest form."""
    if number < 0x80:
        return put_big_endian(into, number, 1)
    if number < 1 << 8:
        into[0] = <char>0xCC
        return put_big_endian(into + 1, number, 1)
    if number < 1 << 16:
        into[0] = <char>0xCD
        return put_big_endian(into + 1, number, 2)
    if number < <uint64_t>1 << 32:
        into[0] = <char>0xCE
        return put_big_endian(into + 1, number, 4)
    into[0] = <char>0xCF
    return put_big_endian(into + 1, number, 8)


cdef inline size_t str_header(size_t size) noexcept nogil:
    """Bytes before a MessagePack str of `size` bytes."""
    return 1 if size < 32 else 2 if size < 1 << 8 else 3 if size < 1 << 16 else 5


cdef char *put_str_header(char *into, size_t size) noexcept nogil:
    if size < 32:
        into[0] = <char>(0xA0 | size)
        return into + 1
    if size < 1 << 8:
        into[0] = <char>0xD9
        return put_big_endian(into + 1, size, 1)
    if size < 1 << 16:
        into[0] = <char>0xDA
        return put_big_endian(into + 1, size, 2)
    into[0] = <char>0xDB
    return put_big_endian(into + 1, size, 4)


cdef char *put_id(char *into, int64_t began, uint64_t salt) noexcept nogil:
    """64 hexadecimal digits that depend on the arguments alone (splitmix64)."""
    cdef uint64_t state = <uint64_t>began ^ salt, mixed
    cdef int word, digit
    for word in range(4):
        state += <uint64_t>0x9E3779B97F4A7C15
        mixed = (state ^ state >> 30) * <uint64_t>0xBF58476D1CE4E5B9
        mixed = (mixed ^ mixed >> 27) * <uint64_t>0x94D049BB133111EB
        mixed ^= mixed >> 31
        for digit in range(16):
            into[digit] = HEX[mixed >> (60 - 4 * digit) & 15]
        into += 16
    return into


cdef uint64_t salted(bytes data, int stream):
    """FNV-1a of the fixed bytes of a stream, which contain the container's id."""
    cdef uint64_t state = <uint64_t>0xCBF29CE484222325 + <uint64_t>stream
    cdef unsigned char byte
    for byte in data:
        state = (state ^ byte) * <uint64_t>0x100000001B3
    return state


cdef int fill(tuple texts, Piece *pieces) except -1:
    """Borrow the bytes of a pair. Returns the size of the larger one, which is below 1 MiB."""
    cdef int index
    cdef bytes text
    if len(texts) != 2:
        raise ValueError("a pair has bytes for stdout and for stderr")
    for index in range(2):
        text = texts[index]
        if text is None:
            raise TypeError("expected bytes, not None")
        pieces[index].data = PyBytes_AS_STRING(text)
        pieces[index].size = len(text)
        if len(text) >= 1 << 20:
            raise ValueError("the fixed bytes of a message take less than 1 MiB")
    return <int>max(pieces[0].size, pieces[1].size)


cdef class Form:
    """How entries of one container's spool become messages of its log driver.

    `head`, `middle`, `tail`: the fixed bytes of messages, for (stdout, stderr). `skip_empty`:
    entries without text make no message. `skip_blank`: nor do entries of white space, which an HTTP
    Event Collector refuses.
    `longest`: most bytes of a message without its frame, for datagrams; its text is cut after a
    character. Fixed bytes are not cut. 0: no limit.

    An entry of 16 KiB without a newline is a part of a longer line, which the next entry of its
    stream continues. `partial` adds the fields by which receivers join them, and needs the text of
    its protocol. With FLUENTD, `part_middle` takes the place of `middle` for parts, as the header
    of their map counts four pairs more. These follow the text. Fields of JOURNALD follow it too.
    A part's id depends on the time of the first part and on the fixed bytes only, so that parts
    that are sent again have the same id.
    """

    cdef int text
    cdef int time
    cdef int frame
    cdef int partial
    cdef bint skip_empty
    cdef bint skip_blank
    cdef size_t longest
    cdef tuple held                         # the bytes that the pieces point to
    cdef Piece head[2]
    cdef Piece middle[2]
    cdef Piece part_middle[2]
    cdef Piece tail[2]
    cdef size_t fixed                       # most bytes of a message besides its text
    cdef uint64_t salt[2]
    cdef Open lines[2]
    cdef bint busy
    # the time of the last entry
    cdef char clock[19]                     # its second in text, as in the entry
    cdef int64_t second
    cdef int nanoseconds
    cdef char prefix[MOMENT]                # the part of the form that changes once a second
    cdef size_t prefix_size
    cdef char zone[6]
    cdef size_t zone_size

    def __init__(
        self, *, int text, int time, int frame, tuple head not None, tuple middle not None, tuple tail not None,
        tuple part_middle=None, bint skip_empty=False, bint skip_blank=False, int partial=PARTIAL_NONE,
        Py_ssize_t longest=0,
    ):
        cdef int index
        if not (0 <= text < TEXTS and 0 <= time < TIMES and 0 <= frame < FRAMES and 0 <= partial < PARTIALS):
            raise ValueError("no such form")
        if partial == PARTIAL_FLUENTD and (text != TEXT_MSGPACK_STR or part_middle is None):
            raise ValueError("FLUENTD needs MSGPACK_STR and part_middle")
        if partial == PARTIAL_JOURNALD and text != TEXT_JOURNAL:
            raise ValueError("JOURNALD needs JOURNAL")
        if longest < 0:
            raise ValueError("a message has 0 bytes or more")
        if self.busy:
            raise RuntimeError("a form serves one thread at a time")
        if part_middle is None:
            part_middle = middle
        self.held = (head, middle, part_middle, tail)
        self.fixed = (
            fill(head, self.head) + max(fill(middle, self.middle), fill(part_middle, self.part_middle))
            + fill(tail, self.tail) + MOMENT + EXTRAS + AROUND
        )
        for index in range(2):
            self.salt[index] = salted(head[index] + middle[index], index)
            self.lines[index].began = self.lines[index].ordinal = 0
        self.text = text
        self.time = time
        self.frame = frame
        self.partial = partial
        self.skip_empty = skip_empty or skip_blank
        self.skip_blank = skip_blank
        self.longest = longest
        self.clock[0] = 0

    @property
    def state(self) -> tuple:
        """Which lines are delivered in parts: (time of the first part in ns, parts so far) of
        stdout, and of stderr. Set it back before the same entries are formatted again."""
        return self.lines[0].began, self.lines[0].ordinal, self.lines[1].began, self.lines[1].ordinal

    @state.setter
    def state(self, tuple state not None):
        cdef int64_t out_began, out_ordinal, err_began, err_ordinal
        out_began, out_ordinal, err_began, err_ordinal = state
        if out_ordinal < 0 or err_ordinal < 0:
            raise ValueError("an ordinal is 0 or more")
        self.lines[0].began = out_began
        self.lines[0].ordinal = out_ordinal
        self.lines[1].began = err_began
        self.lines[1].ordinal = err_ordinal

    def format(self, bytes block not None, Py_ssize_t start, uint64_t number, size_t room) -> tuple:
        """Messages of the entries from block[start:], until they have `room` bytes, but of one
        entry at least. `number`: of the first entry, for CONTAINER_LOG_ORDINAL.

        Returns (messages as bytes, bytes consumed of the block, entries consumed, end of each
        message, number of messages). The ends are empty unless the frame is DATAGRAM. Only whole
        lines are consumed. Lines that are no entries are consumed and not counted. Entries that
        make no message are counted.
        """
        cdef PyObject *raw = NULL
        cdef Open before[2]
        cdef Run run
        cdef size_t left
        cdef int status
        cdef array.array ends
        cdef bytes wire
        if self.busy:
            raise RuntimeError("a form serves one thread at a time")
        if not 0 <= start <= len(block):
            raise ValueError(f"not in the block: {start}")
        left = len(block) - start
        before[0] = self.lines[0]
        before[1] = self.lines[1]
        run.block = PyBytes_AS_STRING(block) + start
        run.size = left
        run.at = run.entries = run.done = run.needed = run.messages = run.ends_room = 0
        run.number = number
        run.room = min(room, <size_t>ROOM_MAX)
        run.capacity = min(run.room, 2 * left) + self.fixed + SLACK
        run.ends = NULL
        run.scratch.data = NULL
        run.scratch.room = 0
        raw = new_bytes(NULL, run.capacity)
        self.busy = True
        try:
            while True:
                run.out = bytes_text(raw)
                if left >= RELEASE:
                    with nogil:
                        status = self.take(&run)
                else:
                    status = self.take(&run)
                if status < 0:
                    raise MemoryError
                if status == 0:
                    break
                run.capacity = max(run.done + run.needed, min(2 * run.capacity, run.room + self.fixed + SLACK))
                _PyBytes_Resize(&raw, run.capacity)
            _PyBytes_Resize(&raw, run.done)
            wire = <bytes>raw
            ends = array.clone(NUMBERS, run.messages if self.frame == FRAME_DATAGRAM else 0, False)
            if self.frame == FRAME_DATAGRAM and run.messages:
                memcpy(ends.data.as_uints, run.ends, run.messages * sizeof(uint32_t))
        except BaseException:
            self.lines[0] = before[0]
            self.lines[1] = before[1]
            raise
        finally:
            self.busy = False
            free(run.ends)
            free(run.scratch.data)
            Py_XDECREF(raw)
        return wire, run.at, run.entries, ends, run.messages

    cdef int take(self, Run *run) noexcept nogil:
        """Format entries. Returns 0 at the end, 1 if the next entry does not fit into `out`, -1
        without memory."""
        cdef const char *line
        cdef const char *newline
        cdef uint32_t *grown
        cdef size_t size
        cdef int found
        cdef Entry entry
        cdef Text text
        while run.at < run.size and (run.entries == 0 or run.done < run.room):
            line = run.block + run.at
            newline = <const char *>memchr(line, c'\n', run.size - run.at)
            if newline == NULL:
                break
            size = newline - line
            found = find(line, size, &entry, &text, &run.scratch)
            if found < 0:
                return -1
            if found and self.tick(entry.time):
                run.needed = self.fixed + entry.size
                if run.needed > run.capacity - run.done:
                    return 1
                if self.frame == FRAME_DATAGRAM and run.messages == run.ends_room:
                    run.ends_room = 2 * run.ends_room + 64
                    grown = <uint32_t *>realloc(run.ends, run.ends_room * sizeof(uint32_t))
                    if grown == NULL:
                        return -1
                    run.ends = grown
                self.put_message(run, &entry, &text)
                run.entries += 1
                run.number += 1
            run.at += size + 1
        return 0

    cdef bint tick(self, const char *time) noexcept nogil:
        """Set the time that the next message shows. Returns 0 if it is none."""
        cdef int64_t at
        cdef int nanoseconds
        if memcmp(time, self.clock, 19) == 0:
            nanoseconds = nine_digits(time + 20)
            if nanoseconds < 0:
                return False
            self.nanoseconds = nanoseconds
            return True
        at = read_time(time, TIME_SIZE)
        if at < 0:
            return False
        memcpy(self.clock, time, 19)
        self.second = at // SECOND
        self.nanoseconds = <int>(at % SECOND)
        self.turn()
        return True

    cdef void turn(self) noexcept nogil:
        """Write what a new second changes."""
        cdef char *into = self.prefix
        cdef char *zone = self.zone
        cdef time_t at = self.second
        cdef tm_t local
        cdef long offset
        if self.time == TIME_STAMP or self.time == TIME_RFC3339 or self.time == TIME_RFC3339_MICRO:
            if localtime_r(&at, &local) == NULL:
                local.tm_gmtoff = local.tm_mon = local.tm_hour = local.tm_min = local.tm_sec = 0
                local.tm_mday = 1
            if self.time == TIME_STAMP:
                into = put(into, MONTHS + 3 * local.tm_mon, 3)
                into = put_digits(put(into, b" ", 1), local.tm_mday, 2)
                if local.tm_mday < 10:
                    into[-2] = c' '
                into = put_digits(put(into, b" ", 1), local.tm_hour, 2)
                into = put_digits(put(into, b":", 1), local.tm_min, 2)
                into = put_digits(put(into, b":", 1), local.tm_sec, 2)
            else:
                offset = local.tm_gmtoff
                put_second(into, max(<int64_t>0, self.second + offset))
                into += 19
                if offset == 0:
                    zone = put(zone, b"Z", 1)
                else:
                    zone = put(zone, b"+" if offset > 0 else b"-", 1)
                    offset = (offset if offset > 0 else -offset) // 60
                    zone = put_digits(zone, <int>(offset // 60), 2)
                    zone = put_digits(put(zone, b":", 1), <int>(offset % 60), 2)
        elif self.time == TIME_EVENT_TIME:
            # https://github.com/fluent/fluentd/wiki/Forward-Protocol-Specification-v1#eventtime-ext-format
            into = put_big_endian(put(into, b"\xd7\0", 2), self.second, 4)
        elif self.time == TIME_SECONDS_INT:
            into = put_unsigned(into, self.second)
        elif self.time == TIME_MILLIS_FRACTION or self.time == TIME_MICROS_FRACTION or (
            self.time == TIME_MILLIS and self.second
        ):
            into = put_number(into, self.second)
        self.prefix_size = into - self.prefix
        self.zone_size = zone - self.zone

    cdef char *put_time(self, char *into, Entry *entry) noexcept nogil:
        cdef char *fraction
        cdef int micros
        if self.time == TIME_RFC3339_NANO:
            into = put(into, entry.time, TIME_SIZE - 1)
            into = without_zeros(into - 10, into)
            return put(into, b"Z", 1)
        into = put(into, self.prefix, self.prefix_size)
        fraction = into
        if self.time == TIME_RFC3339:
            into = put(into, self.zone, self.zone_size)
        elif self.time == TIME_RFC3339_MICRO:
            into = put_digits(put(into, b".", 1), self.nanoseconds // 1000, 6)
            into = put(into, self.zone, self.zone_size)
        elif self.time == TIME_MILLIS_FRACTION:
            into = put_digits(put(into, b".", 1), self.nanoseconds // 1000000, 3)
            into = without_zeros(fraction, into)
        elif self.time == TIME_MICROS_FRACTION:
            micros = (self.nanoseconds + 500) // 1000
            if micros == 1000000:
                into = put_number(into - self.prefix_size, self.second + 1)
                micros = 0
            into = put_digits(put(into, b".", 1), micros, 6)
        elif self.time == TIME_EVENT_TIME:
            into = put_big_endian(into, self.nanoseconds, 4)
        elif self.time == TIME_MILLIS:
            if self.prefix_size:
                into = put_digits(into, self.nanoseconds // 1000000, 3)
            else:
                into = put_number(into, self.nanoseconds // 1000000)
        return into

    cdef char *put_extras(self, char *into, int index, uint64_t number, Open *part, bint last) noexcept nogil:
        """The fields of `partial`. `part.ordinal` is 0 for an entry that is a whole line."""
        cdef char text[20]
        cdef char *end
        if self.partial == PARTIAL_FLUENTD:
            if part.ordinal:
                into = put(into, b"\xafpartial_message\xa4true\xaapartial_id\xd9\x40", 34)
                into = put_id(into, part.began, self.salt[index])
                into = put(into, b"\xafpartial_ordinal", 16)
                end = put_number(text, part.ordinal)
                into = put_str_header(into, end - text)
                into = put(into, text, end - text)
                into = put(into, b"\xacpartial_last", 13)
                into = put(into, b"\xa4true", 5) if last else put(into, b"\xa5false", 6)
        elif self.partial == PARTIAL_JOURNALD:
            into = put_number(put(into, b"CONTAINER_LOG_ORDINAL=", 22), number)
            into = put(into, b"\n", 1)
            if part.ordinal:
                into = put_id(put(into, b"CONTAINER_PARTIAL_ID=", 21), part.began, self.salt[index])
                into = put_number(put(into, b"\nCONTAINER_PARTIAL_ORDINAL=", 27), part.ordinal)
                if last:
                    into = put(into, b"\nCONTAINER_PARTIAL_LAST=true\n", 29)
                else:
                    into = put(into, b"\nCONTAINER_PARTIAL_LAST=false\nCONTAINER_PARTIAL_MESSAGE=true\n", 61)
        return into

    cdef void put_message(self, Run *run, Entry *entry, Text *text) noexcept nogil:
        """Format an entry. Needs room for `fixed` and its text."""
        cdef int index = entry.stream - 1
        cdef Open *line = &self.lines[index]
        cdef Open part = line[0]
        cdef char moment[MOMENT]
        cdef char extras[EXTRAS]
        cdef char *out = run.out + run.done
        cdef char *begin
        cdef size_t moment_size, extras_size, text_size, around, most
        cdef size_t size = entry.size - 2 * text.newline         # as it stands in the entry
        cdef size_t raw = text.size - text.newline               # decoded
        cdef Piece middle = self.middle[index]
        cdef bint more = self.partial != PARTIAL_NONE and not text.newline and raw >= PART
        if more or part.ordinal:
            if part.ordinal == 0:
                part.began = self.second * SECOND + self.nanoseconds
            part.ordinal += 1
            line[0] = part
            if not more:
                line.began = line.ordinal = 0
            middle = self.part_middle[index]
        if self.skip_empty and (raw == 0 or (self.skip_blank and is_blank(entry.log, size))):
            return
        moment_size = self.put_time(moment, entry) - moment
        extras_size = self.put_extras(extras, index, run.number, &part, not more) - extras
        around = self.head[index].size + moment_size + middle.size + extras_size + self.tail[index].size
        text_size = self.text_size(size, raw, text.inner)
        if self.longest and around + text_size > self.longest:
            # 5: the largest header of a MessagePack str
            most = around + (
                5 if self.text == TEXT_MSGPACK_STR
                else self.text_size(0, 0, text.inner) if self.text == TEXT_JOURNAL else 0
            )
            most = self.longest - most if self.longest > most else 0
            size = cut(entry.log, size, most, self.text == TEXT_JSON, &raw)
            text_size = self.text_size(size, raw, text.inner)
        if self.frame == FRAME_COUNT:
            out = put(put_number(out, around + text_size), b" ", 1)
        out = put(out, self.head[index].data, self.head[index].size)
        out = put(out, moment, moment_size)
        out = put(out, middle.data, middle.size)
        if self.text == TEXT_MSGPACK_STR:
            out = put_str_header(out, raw)
        elif self.text == TEXT_JOURNAL:
            # https://systemd.io/JOURNAL_NATIVE_PROTOCOL: a value with a newline follows its size
            if text.inner:
                out = put_little_endian(put(out, b"MESSAGE\n", 8), raw)
            else:
                out = put(out, b"MESSAGE=", 8)
        begin = out
        if self.text == TEXT_JSON or raw == size:
            out = put(out, entry.log, size)
        else:
            unescape(out, entry.log, size)
            out += raw
        if self.text == TEXT_JOURNAL:
            out = put(out, b"\n", 1)
        elif self.frame == FRAME_LINE and text.inner and self.text == TEXT_RAW:
            # A newline would end the message. No entry of this engine has one inside.
            while begin < out:
                if begin[0] == c'\n':
                    begin[0] = c' '
                begin += 1
        out = put(out, extras, extras_size)
        out = put(out, self.tail[index].data, self.tail[index].size)
        if self.frame == FRAME_LINE:
            out = put(out, b"\n", 1)
        elif self.frame == FRAME_NUL:
            out = put(out, b"\0", 1)
        run.done = out - run.out
        if self.frame == FRAME_DATAGRAM:
            run.ends[run.messages] = <uint32_t>run.done
        run.messages += 1

    cdef size_t text_size(self, size_t size, size_t raw, bint inner) noexcept nogil:
        """Bytes of the text in a message. `size`: as it stands in the entry, `raw`: decoded."""
        if self.text == TEXT_JSON:
            return size
        if self.text == TEXT_MSGPACK_STR:
            return str_header(raw) + raw
        if self.text == TEXT_JOURNAL:
            return raw + (17 if inner else 9)
        return raw


def entries(bytes block not None, Py_ssize_t start, size_t room) -> tuple:
    """Entries of block[start:], until their text has `room` bytes, but one at least: for drivers
    that need Python for each line.

    Returns ([(stream, time in ns, text in UTF-8 without its newline, whether it had one)], bytes
    consumed of the block, entries consumed). Lines as in `Form.format`.
    """
    cdef const char *text
    cdef const char *line
    cdef const char *newline
    cdef char *grown
    cdef char *raw = NULL
    cdef size_t raw_room = 0, at = 0, left, done = 0, size
    cdef int64_t time
    cdef int status
    cdef Entry entry
    cdef Text measured
    cdef Scratch scratch
    cdef list found = []
    if not 0 <= start <= len(block):
        raise ValueError(f"not in the block: {start}")
    text = PyBytes_AS_STRING(block) + start
    left = len(block) - start
    scratch.data = NULL
    scratch.room = 0
    try:
        while at < left and (not found or done < room):
            line = text + at
            newline = <const char *>memchr(line, c'\n', left - at)
            if newline == NULL:
                break
            at += newline - line + 1
            status = find(line, newline - line, &entry, &measured, &scratch)
            if status < 0:
                raise MemoryError
            time = read_time(entry.time, TIME_SIZE) if status else -1
            if time < 0:
                continue
            size = measured.size - measured.newline
            if measured.size == entry.size:
                found.append((entry.stream, time, PyBytes_FromStringAndSize(entry.log, size), False))
            else:
                if raw_room < entry.size + 32:
                    grown = <char *>realloc(raw, 2 * entry.size + 4096)
                    if grown == NULL:
                        raise MemoryError
                    raw = grown
                    raw_room = 2 * entry.size + 4096
                unescape(raw, entry.log, entry.size)
                found.append((entry.stream, time, PyBytes_FromStringAndSize(raw, size), bool(measured.newline)))
            done += size
    finally:
        free(raw)
        free(scratch.data)
    return found, at, len(found)
