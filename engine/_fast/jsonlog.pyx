# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Docker's json-file logs: one JSON object per entry, written by the monitor, read by the daemon while it is written.

An entry is `{"log":"…\\n","stream":"stdout","time":"2026-01-02T03:04:05.123456789Z"}` and a newline, byte for byte what Docker's own driver
writes: its escapes (`<`, `>`, `&`, U+2028, U+2029, controls but `\\n` and `\\r` as `\\uXXXX`), U+FFFD for each byte that is not UTF-8. `log` ends
in a newline, unless the line was cut at 16 KiB or its stream ended. The newest file is PATH, rotated ones are PATH.1, PATH.2, … by age.
Not here: options of the driver (`logs/`), waiting for more (`containers/logs.py`).

Owns:    the descriptors of its files. A writer is the only one of its file set. Readers need no word from it; it needs one from those that are to
         lose nothing to rotation (`LogWriter.follow`).
Threads: one at a time per object; the GIL is released around larger work.
Raises:  OSError with the kernel's errno; a writer only once per run of failures, see `LogWriter`.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_SetFromErrnoWithFilenameObject
from cpython.ref cimport PyObject, Py_XDECREF
from libc.errno cimport EINTR, EIO, ENOENT, ENOMEM, errno
from libc.stdint cimport uint32_t
from libc.stdio cimport rename, snprintf
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memmove
from posix.fcntl cimport O_APPEND, O_CLOEXEC, O_CREAT, O_RDONLY, O_RDWR, O_TRUNC, open
from posix.stat cimport fstat, stat, struct_stat
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec
from posix.unistd cimport F_OK, access, close, ftruncate, pread, unlink, write

from engine._fast.frames cimport HEADER_SIZE, put_header

import json
import os
from urllib.parse import quote_plus

cdef extern from "Python.h":
    # as raw pointers: the bytes object is filled without the GIL and then made as short as it turned out
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *, Py_ssize_t) except NULL
    char *bytes_text "PyBytes_AS_STRING"(PyObject *) nogil
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1

cdef extern from "<fcntl.h>" nogil:
    enum:
        O_NOFOLLOW

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #include <errno.h>
    extern void *memrchr(const void *, int, size_t);

    /* Each copies 16 bytes and returns a bit for each byte that may not stand as it is: in a JSON string to be written
       (escape_16), or in one being read, where only the end and escapes matter (unescape_16). */
    #if defined(__SSE2__)
    #include <emmintrin.h>
    static inline unsigned escape_16(char *into, const char *from)
    {
        __m128i b = _mm_loadu_si128((const __m128i *)from), special;
        _mm_storeu_si128((__m128i *)into, b);
        special = _mm_cmplt_epi8(b, _mm_set1_epi8(0x20));          /* signed: controls and all bytes from 0x80 */
        special = _mm_or_si128(special, _mm_cmpeq_epi8(b, _mm_set1_epi8('"')));
        special = _mm_or_si128(special, _mm_cmpeq_epi8(b, _mm_set1_epi8('\\\\')));
        special = _mm_or_si128(special, _mm_cmpeq_epi8(b, _mm_set1_epi8('&')));
        special = _mm_or_si128(special, _mm_cmpeq_epi8(_mm_or_si128(b, _mm_set1_epi8(2)), _mm_set1_epi8('>')));  /* < > */
        return (unsigned)_mm_movemask_epi8(special);
    }
    static inline unsigned unescape_16(char *into, const char *from)
    {
        __m128i b = _mm_loadu_si128((const __m128i *)from), special;
        _mm_storeu_si128((__m128i *)into, b);
        special = _mm_or_si128(_mm_cmpeq_epi8(b, _mm_set1_epi8('"')), _mm_cmpeq_epi8(b, _mm_set1_epi8('\\\\')));
        return (unsigned)_mm_movemask_epi8(special);
    }
    #else
    static inline unsigned escape_16(char *into, const char *from)
    {
        unsigned special = 0;
        memcpy(into, from, 16);
        for (int i = 0; i < 16; i++) {
            unsigned char c = (unsigned char)from[i];
            special |= (unsigned)(c < 0x20 || c >= 0x80 || c == '"' || c == '\\\\' || c == '&' || c == '<' || c == '>') << i;
        }
        return special;
    }
    static inline unsigned unescape_16(char *into, const char *from)
    {
        unsigned special = 0;
        memcpy(into, from, 16);
        for (int i = 0; i < 16; i++)
            special |= (unsigned)(from[i] == '"' || from[i] == '\\\\') << i;
        return special;
    }
    #endif
    static inline int first_bit(unsigned mask) { return __builtin_ctz(mask); }
    static inline void errno_set(int number) { errno = number; }
    """
    unsigned escape_16(char *into, const char *start) noexcept nogil
    unsigned unescape_16(char *into, const char *start) noexcept nogil
    int first_bit(unsigned mask) noexcept nogil
    void errno_set(int number) noexcept nogil
    void *memrchr(const void *data, int byte, size_t size) noexcept nogil

cdef enum:
    SLICE = 16384                       # bytes of a line in one entry at most, Docker's rule
    TIME_SIZE = 30                      # 2026-01-02T03:04:05.123456789Z
    PATH_ROOM = 4096 + 16
    OUT_FLUSH = 256 << 10               # formatted entries are written when there are more than these
    ATTRS_MAX = 32 << 10
    PATIENCE = 32 << 20                 # what one read() looks through at most when all of it is filtered out
    RELEASE = 32 << 10                  # bytes from which the GIL is released
    BLOCK = 256 << 10                   # what a reader reads at once
    HELD_FILES = 64                     # rotated files that a reader holds open at most before it comes to them
    HELD_BYTES = 64 << 20               # … and no further ones once those hold so much
    LENIENCE = 32 << 20                 # bytes that a log may be larger than its options say for the sake of its followers
    WALKS = 20                          # times that a row of files that moves is looked at anew
    ENTRY_MAX = 4 << 20                 # no entry of this engine is larger than 100 KiB; others may cut their lines later

cdef int64_t LAST_TIME = 7258118400 * 1000000000       # year 2200: a later time stamp in a file is not believed

cdef const char *HEX = b"0123456789abcdef"
cdef const char *OPENING = b'{"log":"'
cdef const char *CLOSING_STDOUT = b'","stream":"stdout"'
cdef const char *CLOSING_STDERR = b'","stream":"stderr"'
cdef const char *TIME_KEY = b',"time":"'
cdef enum:
    OPENING_SIZE = 8
    CLOSING_SIZE = 19
    TIME_KEY_SIZE = 9
    ENVELOPE = OPENING_SIZE + CLOSING_SIZE + TIME_KEY_SIZE + TIME_SIZE + 3      # and `"}\n`


# --- UTF-8 and JSON strings ---------------------------------------------------------------------------------------


cdef inline int rune_size(const unsigned char *at, size_t left) noexcept nogil:
    """Size of the multi-byte character that begins at `at`, or 0 when none does (Unicode 15, table 3-7)."""
    cdef unsigned char a = at[0], b
    if a < 0xC2 or a > 0xF4 or left < 2:
        return 0
    b = at[1]
    if a < 0xE0:
        return 2 if b & 0xC0 == 0x80 else 0
    if left < 3 or at[2] & 0xC0 != 0x80:
        return 0
    if a < 0xF0:
        if b & 0xC0 != 0x80 or (a == 0xE0 and b < 0xA0) or (a == 0xED and b > 0x9F):
            return 0
        return 3
    if left < 4 or at[3] & 0xC0 != 0x80 or b & 0xC0 != 0x80 or (a == 0xF0 and b < 0x90) or (a == 0xF4 and b > 0x8F):
        return 0
    return 4


cdef size_t whole(const char *data, size_t size) noexcept nogil:
    """How much of `data` stays when a character that is not complete at its end is left for later."""
    cdef size_t back
    cdef unsigned char byte
    for back in range(1, 4):
        if back > size:
            break
        byte = <unsigned char>data[size - back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            if (byte >= 0xF0 and back < 4) or (byte >= 0xE0 and back < 3) or back < 2:
                return size - back
            break
    return size


cdef char *escape(char *into, const char *data, size_t size) noexcept nogil:
    """Write `data` as the inside of a JSON string as Docker does; room for 6 * size + 16 bytes. Returns the end."""
    cdef const char *at = data
    cdef const char *end = data + size
    cdef char rest[16]
    cdef unsigned special
    cdef unsigned char byte
    cdef int width
    while at < end:
        if end - at >= 16:
            special = escape_16(into, at)
            if special == 0:
                into += 16
                at += 16
                continue
            width = first_bit(special)
        else:
            memcpy(rest, at, end - at)
            special = escape_16(into, rest) & ((1u << (end - at)) - 1)
            if special == 0:
                return into + (end - at)
            width = first_bit(special)
        into += width
        at += width
        # a run of characters that need care: text in other scripts is one long run
        while at < end:
            byte = <unsigned char>at[0]
            if byte >= 0x80:
                width = rune_size(<const unsigned char *>at, end - at)
                if width == 0:
                    memcpy(into, b"\\ufffd", 6)
                    into += 6
                    at += 1
                elif width == 3 and byte == 0xE2 and <unsigned char>at[1] == 0x80 and (<unsigned char>at[2] & 0xFE) == 0xA8:
                    memcpy(into, b"\\u202", 5)
                    into[5] = HEX[<unsigned char>at[2] & 0xF]
                    into += 6
                    at += 3
                else:
                    memcpy(into, at, width)
                    into += width
                    at += width
            elif byte == c'"' or byte == c'\\':
                into[0] = c'\\'
                into[1] = byte
                into += 2
                at += 1
            elif byte == c'\n':
                memcpy(into, b"\\n", 2)
                into += 2
                at += 1
            elif byte == c'\r':
                memcpy(into, b"\\r", 2)
                into += 2
                at += 1
            elif byte < 0x20 or byte == c'<' or byte == c'>' or byte == c'&':
                memcpy(into, b"\\u00", 4)
                into[4] = HEX[byte >> 4]
                into[5] = HEX[byte & 0xF]
                into += 6
                at += 1
            else:
                break
    return into


# --- time stamps --------------------------------------------------------------------------------------------------


cdef inline void put_two(char *into, int number) noexcept nogil:
    into[0] = <char>(c'0' + number // 10)
    into[1] = <char>(c'0' + number % 10)


cdef void put_second(char *into, int64_t second) noexcept nogil:
    """`2026-01-02T03:04:05`, 19 characters, of seconds since the epoch in the years 1970 to 9999."""
    cdef int64_t days = second // 86400, era, rest, year, month
    cdef int clock = <int>(second % 86400)
    days += 719468                                      # from 0000-03-01, so that a leap day ends its year
    era = days // 146097
    rest = days % 146097
    year = (rest - rest // 1460 + rest // 36524 - rest // 146096) // 365
    rest -= 365 * year + year // 4 - year // 100
    month = (5 * rest + 2) // 153
    rest -= (153 * month + 2) // 5
    year += era * 400
    month += 3
    if month > 12:
        month -= 12
        year += 1
    put_two(into, <int>(year // 100))
    put_two(into + 2, <int>(year % 100))
    into[4] = c'-'
    put_two(into + 5, <int>month)
    into[7] = c'-'
    put_two(into + 8, <int>rest + 1)
    into[10] = c'T'
    put_two(into + 11, clock // 3600)
    into[13] = c':'
    put_two(into + 14, clock // 60 % 60)
    into[16] = c':'
    put_two(into + 17, clock % 60)


cdef inline void put_fraction(char *into, int nanoseconds) noexcept nogil:
    """`.123456789Z`."""
    cdef int at
    into[0] = c'.'
    for at in range(9, 0, -1):
        into[at] = <char>(c'0' + nanoseconds % 10)
        nanoseconds //= 10
    into[10] = c'Z'


cdef inline int digits(const char *at, int count) noexcept nogil:
    """The number that `count` decimal digits spell, or -1."""
    cdef int number = 0, index
    for index in range(count):
        if not c'0' <= at[index] <= c'9':
            return -1
        number = number * 10 + (at[index] - c'0')
    return number


cdef int64_t read_time(const char *text, size_t size) noexcept nogil:
    """Nanoseconds since the epoch of an RFC 3339 time, fraction of any length, any offset; -1 when it is none or out of range."""
    cdef int year, month, day, hour, minute, second, offset = 0, part
    cdef int64_t days, nanoseconds = 0, scale = 100000000
    cdef const char *at = text + 19
    cdef const char *end = text + size
    if size < 20 or text[4] != c'-' or text[7] != c'-' or text[13] != c':' or text[16] != c':':
        return -1
    if text[10] != c'T' and text[10] != c't':
        return -1
    year = digits(text, 4)
    month = digits(text + 5, 2)
    day = digits(text + 8, 2)
    hour = digits(text + 11, 2)
    minute = digits(text + 14, 2)
    second = digits(text + 17, 2)
    if not 1970 <= year < 2200 or not 1 <= month <= 12 or not 1 <= day <= 31:
        return -1
    if not 0 <= hour <= 23 or not 0 <= minute <= 59 or not 0 <= second <= 60:
        return -1
    if at[0] == c'.':
        at += 1
        if at == end or not c'0' <= at[0] <= c'9':
            return -1
        while at < end and c'0' <= at[0] <= c'9':
            nanoseconds += (at[0] - c'0') * scale
            scale //= 10
            at += 1
    if at == end:
        return -1
    if at[0] == c'Z' or at[0] == c'z':
        at += 1
    elif (at[0] == c'+' or at[0] == c'-') and end - at == 6 and at[3] == c':':
        offset = digits(at + 1, 2)
        part = digits(at + 4, 2)
        if not 0 <= offset <= 23 or not 0 <= part <= 59:
            return -1
        offset = (offset * 60 + part) * (60 if at[0] == c'+' else -60)
        at += 6
    if at != end:
        return -1
    if month <= 2:
        year -= 1
        month += 9
    else:
        month -= 3
    days = 365 * <int64_t>year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 1 - 719468
    nanoseconds += (((days * 24 + hour) * 60 + minute) * 60 + second - offset) * 1000000000
    return nanoseconds if nanoseconds >= 0 else -1


cdef void put_time(char *into, int64_t at_ns) noexcept nogil:
    """30 characters of time stamp, always with nine digits."""
    put_second(into, at_ns // 1000000000)
    put_fraction(into + 19, <int>(at_ns % 1000000000))


def time_text(int64_t at_ns) -> str:
    """RFC 3339 in UTC with nine digits, as the API shows it with `timestamps=1`."""
    cdef char text[TIME_SIZE]
    if not 0 <= at_ns < LAST_TIME:
        raise ValueError(f"not a time of this age: {at_ns} ns")
    put_time(text, at_ns)
    return text[:TIME_SIZE].decode()


# --- entries in a file --------------------------------------------------------------------------------------------

cdef struct Entry:
    const char *log                     # still escaped
    size_t size
    int stream
    char time[TIME_SIZE]
    const char *attrs                   # an encoded JSON object, or NULL
    size_t attrs_size


cdef int hex_four(const char *at) noexcept nogil:
    cdef int number = 0, index, digit
    cdef char c
    for index in range(4):
        c = at[index]
        if c'0' <= c <= c'9':
            digit = c - c'0'
        elif c'a' <= c <= c'f':
            digit = c - c'a' + 10
        elif c'A' <= c <= c'F':
            digit = c - c'A' + 10
        else:
            return -1
        number = number << 4 | digit
    return number


cdef inline char *put_rune(char *into, int rune) noexcept nogil:
    if rune < 0x80:
        into[0] = <char>rune
        return into + 1
    if rune < 0x800:
        into[0] = <char>(0xC0 | rune >> 6)
        into[1] = <char>(0x80 | rune & 0x3F)
        return into + 2
    if rune < 0x10000:
        into[0] = <char>(0xE0 | rune >> 12)
        into[1] = <char>(0x80 | rune >> 6 & 0x3F)
        into[2] = <char>(0x80 | rune & 0x3F)
        return into + 3
    into[0] = <char>(0xF0 | rune >> 18)
    into[1] = <char>(0x80 | rune >> 12 & 0x3F)
    into[2] = <char>(0x80 | rune >> 6 & 0x3F)
    into[3] = <char>(0x80 | rune & 0x3F)
    return into + 4


cdef char *unescape(char *into, const char *at, size_t size) noexcept nogil:
    """Write what the inside of a JSON string means; never more than `size` bytes, but up to 16 more are scribbled on and read. NULL: malformed."""
    cdef const char *end = at + size
    cdef unsigned special
    cdef int width, rune, low
    cdef char c
    while at < end:
        special = unescape_16(into, at)
        width = 16 if special == 0 else first_bit(special)
        if width >= end - at:
            return into + (end - at)
        into += width
        at += width
        if special == 0:
            continue
        if at[0] == c'"' or end - at < 2:
            return NULL
        c = at[1]
        at += 2
        if c == c'n':
            into[0] = c'\n'
        elif c == c'"' or c == c'\\' or c == c'/':
            into[0] = c
        elif c == c'r':
            into[0] = c'\r'
        elif c == c't':
            into[0] = c'\t'
        elif c == c'b':
            into[0] = c'\b'
        elif c == c'f':
            into[0] = c'\f'
        elif c == c'u':
            if end - at < 4:
                return NULL
            rune = hex_four(at)
            if rune < 0:
                return NULL
            at += 4
            if 0xD800 <= rune < 0xE000:
                low = -1
                if rune < 0xDC00 and end - at >= 6 and at[0] == c'\\' and at[1] == c'u':
                    low = hex_four(at + 2)
                if 0xDC00 <= low < 0xE000:
                    rune = 0x10000 + ((rune - 0xD800) << 10) + (low - 0xDC00)
                    at += 6
                else:
                    rune = 0xFFFD
            into = put_rune(into, rune) - 1
        else:
            return NULL
        into += 1
    return into


cdef bint sound(const char *at, size_t size) noexcept nogil:
    """Whether `unescape` would take it. Reads up to 16 bytes beyond."""
    cdef const char *end = at + size
    cdef char sink[16]
    cdef unsigned special
    cdef int width
    while at < end:
        special = unescape_16(sink, at)
        width = 16 if special == 0 else first_bit(special)
        if width >= end - at:
            return True
        at += width
        if special == 0:
            continue
        if at[0] == c'"' or end - at < 2:
            return False
        if at[1] == c'u':
            if end - at < 6 or hex_four(at + 2) < 0:
                return False
            at += 6
        elif memchr(b'n"\\/rtbf', at[1], 8) != NULL:
            at += 2
        else:
            return False
    return True


cdef const char *after_space(const char *at, const char *end) noexcept nogil:
    while at < end and (at[0] == c' ' or at[0] == c'\t' or at[0] == c'\r'):
        at += 1
    return at


cdef const char *after_string(const char *at, const char *end) noexcept nogil:
    """Behind the closing quote of the string that `at` is inside of, or NULL."""
    while at < end:
        if at[0] == c'"':
            return at + 1
        at += 2 if at[0] == c'\\' else 1
    return NULL


cdef const char *after_value(const char *at, const char *end) noexcept nogil:
    """Behind the JSON value at `at`, or NULL. Checks no more than nesting and strings need."""
    cdef int depth = 0
    while at != NULL and at < end:
        if at[0] == c'"':
            at = after_string(at + 1, end)
            if depth == 0:
                return at
            continue
        if at[0] == c'{' or at[0] == c'[':
            depth += 1
        elif at[0] == c'}' or at[0] == c']':
            if depth == 0:
                return at
            depth -= 1
            if depth == 0:
                return at + 1
        elif at[0] == c',' and depth == 0:
            return at
        at += 1
    return NULL


cdef bint parse_any(const char *at, const char *end, Entry *entry) noexcept nogil:
    """An entry in any JSON that means one: other key order, spaces, unknown keys, short time stamps."""
    cdef const char *key
    cdef const char *value
    cdef size_t key_size, size
    cdef int64_t time = -1
    entry.log = at
    entry.size = 0
    entry.stream = 0
    entry.attrs = NULL
    while at < end and at[0] == 0:                      # what a crash of the host may leave before the next entry
        at += 1
    at = after_space(at, end)
    if at == end or at[0] != c'{':
        return False
    while True:
        at = after_space(at + 1, end)
        if at == end or at[0] != c'"':
            return False
        key = at + 1
        at = after_string(key, end)
        if at == NULL:
            return False
        key_size = at - 1 - key
        at = after_space(at, end)
        if at == end or at[0] != c':':
            return False
        value = after_space(at + 1, end)
        at = after_value(value, end)
        if at == NULL or at == value:
            return False
        size = at - value
        if value[0] == c'"':
            if key_size == 3 and memcmp(key, b"log", 3) == 0:
                entry.log = value + 1
                entry.size = size - 2
                if not sound(entry.log, entry.size):
                    return False
            elif key_size == 6 and memcmp(key, b"stream", 6) == 0:
                if size == 8 and memcmp(value, b'"stdout"', 8) == 0:
                    entry.stream = 1
                elif size == 8 and memcmp(value, b'"stderr"', 8) == 0:
                    entry.stream = 2
                else:
                    return False
            elif key_size == 4 and memcmp(key, b"time", 4) == 0:
                time = read_time(value + 1, size - 2)
        elif value[0] == c'{' and key_size == 5 and memcmp(key, b"attrs", 5) == 0:
            entry.attrs = value
            entry.attrs_size = size
        at = after_space(at, end)
        if at == end:
            return False
        if at[0] == c'}':
            break
        if at[0] != c',':
            return False
    if after_space(at + 1, end) != end or entry.stream == 0 or time < 0:
        return False
    put_time(entry.time, time)
    return True


cdef inline bint parse_own(const char *at, size_t size, Entry *entry) noexcept nogil:
    """An entry exactly as this engine writes it, without attributes; `log` is still to be found sound."""
    cdef const char *tail
    if size < ENVELOPE - 1 or memcmp(at, OPENING, OPENING_SIZE) != 0:
        return False
    tail = at + size - (ENVELOPE - 1 - OPENING_SIZE)
    if memcmp(tail, CLOSING_STDOUT, CLOSING_SIZE) == 0:
        entry.stream = 1
    elif memcmp(tail, CLOSING_STDERR, CLOSING_SIZE) == 0:
        entry.stream = 2
    else:
        return False
    entry.log = at + OPENING_SIZE
    entry.size = tail - entry.log
    tail += CLOSING_SIZE
    if memcmp(tail, TIME_KEY, TIME_KEY_SIZE) != 0 or tail[TIME_KEY_SIZE + 19] != c'.' or tail[TIME_KEY_SIZE + 29] != c'Z':
        return False
    if tail[TIME_KEY_SIZE + TIME_SIZE] != c'"' or tail[TIME_KEY_SIZE + TIME_SIZE + 1] != c'}':
        return False
    memcpy(entry.time, tail + TIME_KEY_SIZE, TIME_SIZE)
    entry.attrs = NULL
    return True


cdef inline bint parse_line(const char *at, size_t size, Entry *entry) noexcept nogil:
    """Whether a line without its newline is an entry. Reads up to 16 bytes beyond it."""
    if size >= ENTRY_MAX:
        return False
    return (parse_own(at, size, entry) and sound(entry.log, entry.size)) or parse_any(at, at + size, entry)


cdef ssize_t read_at(int fd, char *into, size_t size, int64_t offset) noexcept nogil:
    """pread(2) until `size` bytes or the end of the file; -1 with errno."""
    cdef size_t done = 0
    cdef ssize_t part
    while done < size:
        part = pread(fd, into + done, size - done, offset + done)
        if part == 0:
            break
        if part > 0:
            done += part
        elif errno != EINTR:
            return -1
    return done


cdef int64_t last_newline(int fd, int64_t high) noexcept nogil:
    """Offset behind the last newline before `high`, 0 when there is none, -1 with errno."""
    cdef char block[16384]
    cdef ssize_t size
    cdef const char *newline
    while high > 0:
        size = min(high, <int64_t>sizeof(block))
        high -= size
        size = read_at(fd, block, size, high)
        if size < 0:
            return -1
        newline = <const char *>memrchr(block, c'\n', size)
        if newline != NULL:
            return high + (newline + 1 - block)
    return 0


cdef int64_t scan_back(int fd, int64_t low, int64_t high, ssize_t *wanted, char *time) noexcept nogil:
    """Where the `wanted`th entry from `high` backwards begins, not before `low`; -1 with errno. `high` is behind a newline.

    `wanted` is lowered by the entries met, `time` is that of the foremost of them.
    """
    cdef size_t room = BLOCK
    cdef char *block = <char *>malloc(room + 32)
    cdef char *grown
    cdef const char *newline
    cdef ssize_t size, begin, end
    cdef int64_t at
    cdef Entry entry
    while high > low and wanted[0] > 0 and block != NULL:
        at = max(low, high - <int64_t>room)
        size = read_at(fd, block, high - at, at)
        if size < high - at:                            # an error, or the file has been emptied meanwhile
            free(block)
            return -1 if size < 0 else low
        end = size
        while end > 0 and wanted[0] > 0:
            newline = <const char *>memrchr(block, c'\n', end - 1)
            if newline == NULL and at > low:
                break                                   # begins before this block
            begin = newline + 1 - block if newline != NULL else 0
            if parse_line(block + begin, end - 1 - begin, &entry):
                wanted[0] -= 1
                memcpy(time, entry.time, TIME_SIZE)
            end = begin
        if end < size:
            high = at + end
        elif room <= ENTRY_MAX:
            room *= 2
            grown = <char *>realloc(block, room + 32)
            if grown == NULL:
                free(block)
            block = grown
        else:
            high = at                                   # too long for an entry
    if block == NULL:
        errno_set(ENOMEM)
        return -1
    free(block)
    return high


cdef int64_t newest_time(int fd, int64_t high) noexcept nogil:
    """Time stamp of the last entry before `high`, which is behind a newline; -1 when there is none."""
    cdef ssize_t wanted = 1
    cdef char time[TIME_SIZE]
    if scan_back(fd, 0, high, &wanted, time) < 0 or wanted:
        return -1
    return read_time(time, TIME_SIZE)


cdef int probe(int fd, int64_t offset, int64_t high, int64_t *begins, char *time) noexcept nogil:
    """The first entry that begins in [offset, high): 1 when there is one, 0 when none, -1 with errno."""
    cdef size_t room = 64 << 10
    cdef char *block = <char *>malloc(room + 32)
    cdef char *grown
    cdef const char *newline
    cdef ssize_t size, begin
    cdef int64_t at = offset - 1 if offset else 0        # a line begins behind a newline
    cdef bint inside = offset > 0
    cdef Entry entry
    while block != NULL:
        size = read_at(fd, block, room, at)
        begin = 0
        while size > 0:
            newline = <const char *>memchr(block + begin, c'\n', size - begin)
            if newline == NULL:
                break
            if not inside:
                if at + begin >= high:
                    size = 0
                    break
                if parse_line(block + begin, newline - block - begin, &entry):
                    begins[0] = at + begin
                    memcpy(time, entry.time, TIME_SIZE)
                    free(block)
                    return 1
            inside = False
            begin = newline + 1 - block
        if size < <ssize_t>room:                         # the end of the file, or of the range
            free(block)
            return -1 if size < 0 else 0
        if begin:
            at += begin
        elif room <= ENTRY_MAX:
            room *= 2
            grown = <char *>realloc(block, room + 32)
            if grown == NULL:
                free(block)
            block = grown
        else:
            at += size                                   # too long for an entry: look for its end
            inside = True
    errno_set(ENOMEM)
    return -1


# --- writing ------------------------------------------------------------------------------------------------------

# The buffer for formatted entries: needed only while a call runs, so all writers of the process share one. A call takes it
# away while it runs (the GIL is held then), so that a second thread would make its own.
cdef size_t OUT_ROOM = OUT_FLUSH + 6 * SLICE + ATTRS_MAX + 4096
cdef char *spare_out = NULL


cdef class LogWriter:
    """Appends a container's output to its log, and rotates it.

    Lines are put together per stream, over any split of reads. What is complete after a call has been written when the call returns, with
    one write(2) for each 256 KiB of entries; while nobody follows, what rotation takes away within the same call is not written at all. A
    line of 16 KiB or more makes several entries, of which only the last ends in a newline; the cut is never inside a UTF-8 character. Time
    stamps strictly increase within the file set, reopening included; their last digit is never 0, so that Docker's form (which drops
    trailing zeros) always has nine digits, too.

    When a write fails (ENOSPC, EIO, …) its entries are counted in `dropped`, part of an entry that reached the file is cut off again, and the
    first call that meets the failure raises OSError, after all its data have been taken. Later calls try again and are silent until
    one has succeeded: one exception per run of failures, `error` says whether one lasts.

    Rotation waits until every follower is known to hold the live file, so that none is ever two files behind; meanwhile the file grows beyond
    `max_size`. Those that have not come when it has grown by `LENIENCE` are waited for no more (`outrun`) until they are heard of again, and
    lose what rotation removes. Files that became so long are removed the sooner, so the whole set has at most that much more than its options say,
    and as much again in the live file. The writer itself never waits.

    On opening, bytes after the last newline (a crash of the host in the middle of a write) are cut off: they never were an entry,
    and a reader that waits for their end rereads that place.
    """

    def __cinit__(self, bytes path not None, int64_t max_size=0, int max_file=1, *, bytes attrs=b""):
        """`max_size` bytes at which the log rotates (0: never), `max_file` files kept (1: the rotated file is gone), `attrs`: an encoded
        JSON object that each entry carries, or nothing."""
        self.fd = -1
        if not 0 < len(path) < 4096 or b"\0" in path:
            raise ValueError("the path of a log has 1 to 4095 bytes")
        if max_size < 0 or max_file < 1:
            raise ValueError("a log has a size of 0 or more and one file or more")
        if len(attrs) > ATTRS_MAX or b"\n" in attrs:
            raise ValueError(f"attributes take at most {ATTRS_MAX} bytes, on one line")
        self.path = path
        self.path_text = PyBytes_AS_STRING(path)
        self.max_size = self.limit = max_size
        self.max_file = max_file
        self.attrs = b',"attrs":' + attrs if attrs else b""
        self.attrs_text = PyBytes_AS_STRING(self.attrs)
        self.attrs_size = len(self.attrs)
        self.second = -1
        self.followers = {}
        self.fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0o640)
        if self.fd < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, path)
        self.repair()

    def __dealloc__(self):
        free(self.lines[0].data)
        free(self.lines[1].data)
        if self.fd >= 0:
            close(self.fd)

    cdef int repair(self) except -1:
        """Cut a torn tail off, and find the newest time stamp."""
        cdef struct_stat status
        cdef int64_t whole_size, newest = -1
        cdef int older
        if fstat(self.fd, &status) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        self.inode = status.st_ino
        self.size = status.st_size
        if self.size:
            whole_size = last_newline(self.fd, self.size)
            if whole_size < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if whole_size < self.size:
                if ftruncate(self.fd, whole_size) < 0:
                    PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
                self.size = whole_size
            newest = newest_time(self.fd, self.size)
        if newest < 0 and self.max_file > 1:
            older = open(self.path + b".1", O_RDONLY | O_CLOEXEC | O_NOFOLLOW)
            if older >= 0:
                if fstat(older, &status) == 0:
                    newest = newest_time(older, status.st_size)
                close(older)
        self.last = newest if newest > 0 else 0
        return 0

    cpdef write(self, int stream, data):
        """Take bytes of stream 1 (stdout) or 2 (stderr)."""
        cdef const unsigned char[::1] view = data
        if view.shape[0]:
            self.write_raw(stream, <const char *>&view[0], view.shape[0])

    cdef int write_raw(self, int stream, const char *data, size_t size) except -1:
        """As `write`. Raises as the class says: the data have been taken whether it raises or not."""
        if stream != 1 and stream != 2:
            raise ValueError(f"no such output stream: {stream}")
        self.begin()
        if size >= RELEASE:
            with nogil:
                self.take(stream, data, size)
                self.settle()
        else:
            self.take(stream, data, size)
            self.settle()
        return self.finish()

    cpdef end(self, int stream=0):
        """The stream (0: both) is over: what has come of a last line becomes an entry without newline."""
        cdef int index
        cdef Line *line
        if stream < 0 or stream > 2:
            raise ValueError(f"no such output stream: {stream}")
        self.begin()
        for index in range(2):
            line = &self.lines[index]
            if line.size and (stream == 0 or stream == index + 1):
                self.emit(index + 1, line.data, line.size, False)
                line.size = 0
            if stream == 0 or stream == index + 1:
                free(line.data)
                line.data = NULL
                line.room = 0
        self.settle()
        self.finish()

    cpdef position(self):
        """(inode, offset) of the end of the last entry: what `LogReader.position` says after having read it."""
        cdef struct_stat status
        if self.fd < 0:
            raise ValueError("the log is closed")
        if fstat(self.fd, &status) < 0:                 # asked, since an operator may empty a log under the writer
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        return self.inode, status.st_size

    cpdef pending(self, int stream):
        """What has come of a line that has not ended and is therefore no entry yet (a prompt, say)."""
        if stream != 1 and stream != 2:
            raise ValueError(f"no such output stream: {stream}")
        return PyBytes_FromStringAndSize(self.lines[stream - 1].data, self.lines[stream - 1].size)

    cpdef close(self):
        """End both streams and give the file back. Idempotent."""
        cdef int fd
        if self.fd < 0:
            return
        try:
            self.end()
        finally:
            fd = self.fd
            self.fd = -1
            close(fd)

    cpdef follow(self, uint64_t number, uint64_t inode):
        """The reader `number` (the caller's choice) holds the files up to the one with `inode`, 0 for none: rotation waits until it holds the live one."""
        self.followers[number] = inode
        self.count()

    cpdef unfollow(self, uint64_t number):
        """That reader is gone. No error when it is not known."""
        self.followers.pop(number, None)
        self.count()

    cdef int count(self) except -1:
        self.followed = len(self.followers)
        self.behind = 0
        for inode in self.followers.values():
            self.behind += inode != self.inode
        if not self.behind:
            self.limit = self.max_size
        return 0

    cdef int leave_behind(self) except -1:
        """Wait no more for the followers that do not hold the live file."""
        self.outrun += self.behind
        self.followers = {number: inode for number, inode in self.followers.items() if inode == self.inode}
        return self.count()

    cdef int begin(self) except -1:
        global spare_out
        cdef timespec now
        cdef int64_t now_ns
        if self.fd < 0:
            raise ValueError("the log is closed")
        if self.out != NULL:
            raise RuntimeError("a log writer serves one thread at a time")
        self.out = spare_out
        spare_out = NULL
        if self.out == NULL:
            self.out = <char *>malloc(OUT_ROOM)
            if self.out == NULL:
                raise MemoryError
        self.out_size = 0
        self.turned = False
        clock_gettime(CLOCK_REALTIME, &now)
        now_ns = <int64_t>now.tv_sec * 1000000000 + now.tv_nsec
        if now_ns - 1 > self.last:                      # else the clock went back: go on from the last time stamp
            self.last = now_ns - 1
        return 0

    cdef int finish(self) except -1:
        global spare_out
        cdef int before = self.error
        if spare_out == NULL:
            spare_out = self.out
        else:
            free(self.out)
        self.out = NULL
        self.error = self.fault
        if self.fault and not before:
            raise OSError(self.fault, os.strerror(self.fault), os.fsdecode(self.path))
        return 0

    cdef void take(self, int stream, const char *data, size_t size) noexcept nogil:
        """Cut `data` into entries; keep the rest of the last line."""
        cdef Line *line = &self.lines[stream - 1]
        cdef const char *at = data
        cdef const char *end = data + size
        cdef const char *newline
        cdef char *grown
        cdef size_t part, cut
        while at < end:
            part = min(<size_t>(end - at), SLICE - line.size)
            newline = <const char *>memchr(at, c'\n', part)
            if line.size == 0:
                if newline != NULL:
                    self.emit(stream, at, newline - at, True)
                    at = newline + 1
                    continue
                if part == SLICE:
                    cut = whole(at, part)
                    self.emit(stream, at, cut, False)
                    at += cut
                    continue
            if newline != NULL:
                part = newline - at
            if line.size + part > line.room:
                cut = line.room if line.room else 256
                while cut < line.size + part:
                    cut *= 2
                grown = <char *>realloc(line.data, cut)
                if grown == NULL:
                    self.fault = ENOMEM
                    self.dropped += 1
                    return
                line.data = grown
                line.room = cut
            memcpy(line.data + line.size, at, part)
            line.size += part
            at += part
            if newline != NULL:
                self.emit(stream, line.data, line.size, True)
                line.size = 0
                at += 1
            elif line.size == SLICE:
                cut = whole(line.data, SLICE)
                self.emit(stream, line.data, cut, False)
                line.size = SLICE - cut
                memmove(line.data, line.data + cut, line.size)
        if line.room > 4096 and line.size == 0:         # thousands of idle containers: keep no memory for a long line past
            free(line.data)
            line.data = NULL
            line.room = 0

    cdef void cut(self, size_t at) noexcept nogil:
        """A file of the log ends at `at` in `out`, once that is written. What no file will hold by then is left out."""
        cdef size_t gone, index
        self.cuts[self.cut_count] = at
        self.cut_count += 1
        if self.cut_count > self.max_file:
            self.cut_count -= 1
            memmove(self.cuts, self.cuts + 1, self.cut_count * sizeof(size_t))
        gone = self.cuts[0]
        if self.cut_count == self.max_file and gone:
            self.out_size -= gone
            memmove(self.out, self.out + gone, self.out_size)
            for index in range(<size_t>self.cut_count):
                self.cuts[index] -= gone

    cdef void settle(self) noexcept nogil:
        """Write all formatted entries, each to its file."""
        cdef size_t done = 0, end
        cdef int index
        for index in range(self.cut_count):
            end = self.cuts[index] - done
            self.flush(end)
            done += end
            self.rotate()
        self.cut_count = 0
        self.flush(self.out_size)

    cdef void emit(self, int stream, const char *data, size_t size, bint newline) noexcept nogil:
        """Format one entry behind the others of this call; rotate before it when it would not fit the file."""
        cdef char *into
        cdef size_t before = self.out_size
        cdef size_t begun
        cdef int64_t size_before
        if self.out_size > OUT_FLUSH:
            self.settle()
            before = 0
        into = self.out + before
        memcpy(into, OPENING, OPENING_SIZE)
        into = escape(into + OPENING_SIZE, data, size)
        if newline:
            memcpy(into, b"\\n", 2)
            into += 2
        memcpy(into, CLOSING_STDOUT if stream == 1 else CLOSING_STDERR, CLOSING_SIZE)
        into += CLOSING_SIZE
        if self.attrs_size:
            memcpy(into, self.attrs_text, self.attrs_size)
            into += self.attrs_size
        memcpy(into, TIME_KEY, TIME_KEY_SIZE)
        into += TIME_KEY_SIZE
        self.last += 1
        if self.last % 10 == 0:
            self.last += 1
        if self.last // 1000000000 != self.second:
            self.second = self.last // 1000000000
            put_second(self.clock, self.second)
        memcpy(into, self.clock, 19)
        put_fraction(into + 19, <int>(self.last % 1000000000))
        into += TIME_SIZE
        memcpy(into, b'"}\n', 3)
        self.out_size = into + 3 - self.out
        if self.limit:
            begun = self.cuts[self.cut_count - 1] if self.cut_count else 0
            size_before = <int64_t>(before - begun) + (0 if self.cut_count else self.size)
            if size_before > 0 and size_before + <int64_t>(self.out_size - before) > self.limit:
                if self.turned and not self.followed and self.max_file <= MAX_CUTS:
                    self.cut(before)
                else:
                    self.flush(before)
                    self.turned = self.rotate() == 0

    cdef void flush(self, size_t upto) noexcept nogil:
        """Write the first `upto` bytes of the formatted entries; the others move to the front. Sets `fault`."""
        cdef size_t done = 0, kept
        cdef ssize_t part
        cdef int failure = 0
        cdef struct_stat status
        cdef const char *newline
        if upto == 0:
            return
        if self.torn:
            part = write(self.fd, b"\n", 1)
            if part == 1:
                self.torn = False
                self.size += 1
            else:
                failure = errno if part < 0 else EIO
        while done < upto and not failure:
            part = write(self.fd, self.out + done, upto - done)
            if part > 0:
                done += part
            elif part == 0:
                failure = EIO
            elif errno != EINTR:
                failure = errno
        self.size += done
        self.fault = failure
        if failure:
            newline = <const char *>memrchr(self.out, c'\n', done)
            kept = newline + 1 - self.out if newline != NULL else 0
            if kept < done:
                if fstat(self.fd, &status) == 0 and ftruncate(self.fd, status.st_size - <int64_t>(done - kept)) == 0:
                    self.size -= done - kept
                else:
                    self.torn = True
            while kept < upto:
                newline = <const char *>memchr(self.out + kept, c'\n', upto - kept)
                kept = newline + 1 - self.out if newline != NULL else upto
                self.dropped += 1
        self.out_size -= upto
        if self.out_size:
            memmove(self.out, self.out + upto, self.out_size)

    cdef int rotate(self) noexcept nogil:
        """PATH becomes PATH.1 and so on, a new file becomes PATH. When that fails the old file just grows on and it is tried again later.

        It is put off while a follower does not hold PATH yet. The new file is made before the old one goes: its inode number differs, so a position never means another file than it did.
        """
        cdef char older[PATH_ROOM]
        cdef char newer[PATH_ROOM]
        cdef struct_stat status
        cdef int fd, index
        cdef const char *path = self.path_text
        if fstat(self.fd, &status) == 0 and status.st_size < self.size:
            self.size = status.st_size                  # an operator emptied it
            if self.size + <int64_t>self.out_size <= self.limit:
                return 0
        if self.behind:
            if self.size < self.max_size + LENIENCE:
                self.limit = self.max_size + LENIENCE
                return 0
            with gil:
                self.leave_behind()
        snprintf(newer, sizeof(newer), b"%s.new", path)
        fd = open(newer, O_RDWR | O_APPEND | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0o640)
        if fd >= 0 and fstat(fd, &status) == 0:
            index = 1
            while index < self.max_file - 1:            # the row ends at the first number that is free
                snprintf(older, sizeof(older), b"%s.%d", path, index)
                if access(older, F_OK) < 0:
                    break
                index += 1
            for index in range(index, 1, -1):
                snprintf(newer, sizeof(newer), b"%s.%d", path, index - 1)
                snprintf(older, sizeof(older), b"%s.%d", path, index)
                rename(newer, older)
            snprintf(older, sizeof(older), b"%s.1", path)
            snprintf(newer, sizeof(newer), b"%s.new", path)
            if self.max_file == 1 or rename(path, older) == 0 or errno == ENOENT:
                if rename(newer, path) == 0:
                    close(self.fd)
                    self.fd = fd
                    self.inode = status.st_ino
                    self.long_files += self.size > 2 * self.max_size
                    self.size = 0
                    self.limit = self.max_size
                    self.torn = False
                    self.behind = self.followed
                    if self.long_files:
                        self.trim()
                    return 0
                if self.max_file > 1:
                    rename(older, path)
            unlink(newer)
        if fd >= 0:
            close(fd)
        self.limit = self.size + self.max_size // 8 + 4096
        return -1

    cdef void trim(self) noexcept nogil:
        """Remove the oldest files while all together are too large: some were let grow for a follower's sake."""
        cdef char name[PATH_ROOM]
        cdef struct_stat status
        cdef int64_t left = self.max_size * self.max_file + LENIENCE
        cdef int index = 1
        self.long_files = 0
        while index < self.max_file:
            snprintf(name, sizeof(name), b"%s.%d", self.path_text, index)
            if stat(name, &status) < 0:
                break
            left -= status.st_size
            self.long_files += status.st_size > 2 * self.max_size
            if left < 0 and index > 1:
                unlink(name)
            index += 1


# --- reading ------------------------------------------------------------------------------------------------------


def _url_text(bytes attrs) -> bytes:
    """`key=value,…` of an entry's attributes, sorted and escaped as Docker's `details` shows them; empty when they are no such object."""
    try:
        pairs = json.loads(attrs)
        return ",".join(f"{quote_plus(key)}={quote_plus(pairs[key])}" for key in sorted(pairs)).encode() + b" "
    except (ValueError, TypeError, RecursionError):
        return b" "


cdef class LogReader:
    """Reads a container's log as a client wants it, while it is written and rotated.

    The files that exist when the object is made are held open, so that rotation loses none of them; newer ones are looked for at each `read`, and up
    to `HELD_FILES` and `HELD_BYTES` of them held open too, for a reader that is slower than its writer for a while (`newest` is for the writer to
    be told). Only whole lines are consumed: a torn one is read again later. Lines that are no entries are skipped.
    Memory is bounded by `BLOCK` (more for a longer entry) and is given back at the end of the log, where followers wait.
    Files the writer has removed before they were reached are lost to the reader, as to everyone.
    """

    cdef readonly bytes path
    cdef readonly bint done                 # nothing will ever come: `until_ns` or `until_position` has been reached, or it is closed
    cdef readonly bint at_end               # the last `read` met the end of what has been written, or `done`
    cdef bint busy                          # a thread is inside `read`
    cdef bint closing                       # … and closes when it leaves
    cdef int64_t budget                     # bytes that this `read` may still look through
    cdef bint wanted[3]                     # by stream
    cdef bint timestamps
    cdef bint framed
    cdef bint sliced[3]                     # the stream's last entry is part of a line that goes on in its next one
    cdef bint from_time
    cdef bint to_time
    cdef char since[TIME_SIZE]
    cdef char until[TIME_SIZE]
    cdef bytes details
    cdef const char *details_text
    cdef size_t details_size
    cdef bint to_position
    cdef uint64_t until_inode
    cdef int64_t until_offset
    cdef int fd                             # the file being read, -1 while there is none
    cdef uint64_t inode
    cdef int64_t offset                     # of buffer[start] in it
    cdef bint sealed                        # it is known to be rotated: its end is final
    cdef list newer                         # (descriptor, inode) of the files after it, oldest first
    cdef char *buffer
    cdef size_t room
    cdef size_t start                       # unread: buffer[start:end]
    cdef size_t end
    cdef bint skipping                      # inside a line that is too long for an entry
    cdef size_t refused                     # room that the next entry needs and did not find

    def __cinit__(self, bytes path not None, *, bint stdout=True, bint stderr=True, int64_t since_ns=0, int64_t until_ns=0,
                  bint timestamps=False, bint framed=False, bytes details=b"", tuple until_position=None, bint until_now=False):
        """`since_ns`, `until_ns`: both included, 0 for none. `details`: put before each line as it is; an entry's own attributes go first.
        `until_position`: (inode, offset) as `LogWriter.position` gives it; what lies behind is not read. `until_now`: nor is what comes from now on."""
        cdef struct_stat status
        cdef int64_t whole_size
        self.fd = -1
        self.newer = []
        self.path = path
        self.wanted[1] = stdout
        self.wanted[2] = stderr
        self.timestamps = timestamps
        self.framed = framed
        self.details = details
        self.details_text = PyBytes_AS_STRING(details)
        self.details_size = len(details)
        if since_ns > 0:
            self.from_time = True
            put_time(self.since, min(since_ns, LAST_TIME))
        if until_ns > 0:
            self.to_time = True
            put_time(self.until, min(until_ns, LAST_TIME))
        self.newer = self.collect(0)
        if until_now and until_position is None and self.newer:
            fd, inode = self.newer[len(self.newer) - 1]
            if fstat(fd, &status) < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, path)
            whole_size = last_newline(fd, status.st_size)       # a line may be half written
            if whole_size < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, path)
            until_position = (inode, whole_size)
        if until_position is not None:
            self.to_position = True
            self.until_inode, self.until_offset = until_position
            inodes = [inode for _, inode in self.newer]
            if self.until_inode in inodes:
                index = inodes.index(self.until_inode) + 1
                for fd, _ in self.newer[index:]:
                    os.close(fd)
                del self.newer[index:]
            else:                                       # rotated away: all that is there is newer
                self.close()
        if self.newer:
            self.enter()
            if self.from_time:
                self.seek_since()

    def __dealloc__(self):
        free(self.buffer)
        if self.fd >= 0:
            close(self.fd)
        for fd, _ in self.newer:
            close(fd)

    cdef list collect(self, uint64_t known):
        """Open the files newer than inode `known` (which is held open, so that its number means it), oldest first.

        From the newest to the oldest, against the direction in which files are renamed: a file that moves meanwhile is met twice, never missed. When
        a new one has come meanwhile, a name may mean a newer file than the name before: it is done again. A log that never stands still
        gives only its newest files, in their order.
        """
        cdef list found = None
        cdef int turn
        for turn in range(WALKS):
            found = self.walk(known, turn == WALKS - 1)
            if found is not None:
                break
        return found

    cdef list walk(self, uint64_t known, bint last):
        """As `collect`; None when the row has moved, or, for the `last` time, what was found until then."""
        cdef list found = []
        cdef int number = 0, missing = 0, fd
        cdef uint64_t live = 0
        cdef struct_stat status
        try:
            while missing < 2:                          # one number may be missing while the row moves up
                name = self.path if number == 0 else b"%s.%d" % (self.path, number)
                number += 1
                fd = open(<const char *><bytes>name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW)
                if fd < 0:
                    if errno != ENOENT:
                        PyErr_SetFromErrnoWithFilenameObject(OSError, name)
                    missing += 1
                    continue
                missing = 0
                found.append((fd, 0))
                if fstat(fd, &status) < 0:
                    PyErr_SetFromErrnoWithFilenameObject(OSError, name)
                found[len(found) - 1] = (fd, status.st_ino)
                if number == 1:
                    live = status.st_ino
                elif self.live_inode() != live:
                    close(found.pop()[0])
                    if last:
                        break
                    while found:
                        close(found.pop()[0])
                    return None
                if known and status.st_ino == known:
                    close(found.pop()[0])
                    break
                if any(inode == status.st_ino for _, inode in found[:len(found) - 1]):
                    close(found.pop()[0])
        except BaseException:
            for opened, _ in found:
                os.close(opened)
            raise
        found.reverse()
        return found

    cdef uint64_t live_inode(self) noexcept:
        """Inode at PATH; 0 when nothing is there."""
        cdef struct_stat status
        return status.st_ino if stat(self.path, &status) == 0 else 0

    cdef int enter(self) except -1:
        """Leave the file being read for the next newer one that is known."""
        if self.fd >= 0:
            close(self.fd)
        self.fd, self.inode = self.newer.pop(0)
        self.offset = 0
        self.start = self.end = 0
        self.skipping = False
        self.sealed = len(self.newer) > 0               # met under a rotated name, hence after its last write
        return 0

    cdef int keep_up(self) except -1:
        """Hold the files that have come since the newest known one, before rotation removes them."""
        cdef struct_stat status
        cdef int64_t held = 0
        cdef uint64_t newest = self.newer[len(self.newer) - 1][1] if self.newer else self.inode
        if self.to_position or stat(self.path, &status) < 0 or status.st_ino == newest or len(self.newer) >= HELD_FILES:
            return 0
        for fd, _ in self.newer:
            if fstat(fd, &status) == 0:
                held += status.st_size
        if held < HELD_BYTES:
            self.newer += self.collect(newest)
        return 0

    cdef int leave(self) except -1:
        """The end of the file being read has been met: 1 when there is more to read in it or in another, else 0."""
        cdef struct_stat status
        cdef struct_stat live
        if self.fd < 0:
            self.newer = self.collect(0)
            if self.newer:
                self.enter()
                return 1
            return 0
        if self.to_position and self.inode == self.until_inode:
            return 0
        if fstat(self.fd, &status) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        if status.st_size < self.offset:                # emptied by an operator
            self.offset = 0
            return 1
        if not self.sealed:
            if stat(self.path, &live) < 0:
                if errno != ENOENT:
                    PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
                return 0                                # removed, or in the middle of a rotation
            if live.st_ino == self.inode:
                return 0
            self.sealed = True                          # what was written between the last read and the rotation comes first
            return 1
        if not self.newer:
            self.newer = self.collect(self.inode)
            if not self.newer:
                return 0
        self.enter()
        return 1

    cdef int64_t high(self, int fd, uint64_t inode) except -1:
        """How far a file may be read now: behind its last whole line, and not beyond `until_position`."""
        cdef struct_stat status
        cdef int64_t size
        if fstat(fd, &status) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        size = status.st_size
        if self.to_position and inode == self.until_inode:
            size = min(size, self.until_offset)
        size = last_newline(fd, size)
        if size < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
        return size

    cdef int seek_since(self) except -1:
        """Go to just before the first entry that is not older than `since`, by time: entries are in order."""
        cdef int64_t low = 0, middle, found = 0, high
        cdef int answer
        cdef char time[TIME_SIZE]
        while self.newer:
            fd, inode = self.newer[0]
            answer = probe(fd, 0, self.high(fd, inode), &found, time)
            if answer < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if answer == 0 or memcmp(time, self.since, TIME_SIZE) > 0:
                break
            self.enter()
        high = self.high(self.fd, self.inode)
        while high - low > BLOCK:
            middle = low + (high - low) // 2
            with nogil:
                answer = probe(self.fd, middle, high, &found, time)
            if answer < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if answer == 0 or memcmp(time, self.since, TIME_SIZE) >= 0:
                high = middle
            else:
                low = found
        self.offset = low
        return 0

    def seek_tail(self, ssize_t lines) -> None:
        """Go on with the last `lines` entries of both streams together, as Docker counts; to be called before the first `read`.

        Reads backwards no further than needed. Partial entries count, lines that are no entries do not.
        """
        cdef ssize_t left = lines
        cdef int64_t found, low, high
        cdef int fd, index
        cdef uint64_t inode
        cdef char time[TIME_SIZE]
        if lines < 0:
            raise ValueError("the tail of a log has 0 lines or more")
        if self.fd < 0:
            return
        index = len(self.newer)
        while True:                                     # index 0 is the file being read, the others are newer[index - 1]
            if index:
                fd, inode = self.newer[index - 1]
                low = 0
            else:
                fd, inode, low = self.fd, self.inode, self.offset
            high = max(low, self.high(fd, inode))
            with nogil:
                found = scan_back(fd, low, high, &left, time)
            if found < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
            if left == 0 or index == 0:
                break
            index -= 1
        for _ in range(index):
            self.enter()
        self.offset = found
        self.start = self.end = 0

    def read(self, size_t max_bytes) -> bytes:
        """What comes next, at most `max_bytes` (more only for one entry that is larger).

        Empty when `at_end`, else when nothing of the next 32 MiB of the log is wanted: a caller's other work gets its turn then.
        """
        if self.busy:
            raise RuntimeError("a log reader serves one thread at a time")
        if self.done:
            self.at_end = True
            return b""
        self.at_end = False
        self.busy = True
        self.budget = PATIENCE
        try:
            return self.fetch(max(max_bytes, 1))
        finally:
            self.busy = False
            if self.closing:
                self.release()

    cdef bytes fetch(self, size_t room):
        cdef PyObject *raw = NULL
        cdef size_t size = 0
        cdef bytes result
        if self.fd < 0 and not self.leave():
            self.at_end = True
            return b""
        self.keep_up()
        if self.buffer == NULL:
            self.buffer = <char *>malloc(BLOCK + 32)
            if self.buffer == NULL:
                raise MemoryError
            self.room = BLOCK
        raw = new_bytes(NULL, room + 32)                # 32: see unescape
        try:
            while True:
                with nogil:
                    size += self.take(<char *>bytes_text(raw) + size, room - size)
                if self.closing:
                    self.done = True
                if self.done:
                    self.at_end = True
                    break
                if self.refused:
                    if size:
                        break
                    room = self.refused
                    _PyBytes_Resize(&raw, room + 32)
                elif self.budget <= 0:
                    break
                elif not self.leave():
                    self.at_end = True
                    break
            _PyBytes_Resize(&raw, size)
            result = <bytes>raw
        finally:
            Py_XDECREF(raw)
        if self.at_end and self.start == self.end:      # a follower may wait for hours
            free(self.buffer)
            self.buffer = NULL
        return result

    cdef ssize_t take(self, char *into, size_t room) except -1 nogil:
        """Read and render entries until `into` is full (`refused`), the file's end, or `done`. Returns the bytes written."""
        cdef char *out = into
        cdef char *body
        cdef char *text
        cdef const char *line
        cdef const char *newline
        cdef size_t size, need
        cdef ssize_t got
        cdef char *grown
        cdef bint own, last_file = self.to_position and self.inode == self.until_inode
        cdef Entry entry
        self.refused = 0
        while True:
            if last_file and self.offset >= self.until_offset:
                self.done = True
                break
            line = self.buffer + self.start
            newline = <const char *>memchr(line, c'\n', self.end - self.start) if self.end > self.start else NULL
            if newline == NULL:
                if self.skipping:
                    self.offset += self.end - self.start
                    self.start = self.end
                if self.start:
                    memmove(self.buffer, self.buffer + self.start, self.end - self.start)
                    self.end -= self.start
                    self.start = 0
                if self.end == self.room:
                    if self.room >= ENTRY_MAX:
                        self.skipping = True
                        continue
                    grown = <char *>realloc(self.buffer, 2 * self.room + 32)
                    if grown == NULL:
                        with gil:
                            raise MemoryError
                    self.buffer = grown
                    self.room *= 2
                if self.closing or self.budget <= 0:
                    break
                got = pread(self.fd, self.buffer + self.end, self.room - self.end, self.offset + <int64_t>self.end)
                if got < 0:
                    if errno == EINTR:
                        continue
                    with gil:
                        PyErr_SetFromErrnoWithFilenameObject(OSError, self.path)
                if got == 0:
                    self.end = 0                        # a torn line: to be read again when it may be whole
                    break
                self.end += got
                self.budget -= got
                continue
            size = newline - line
            own = not self.skipping and size < ENTRY_MAX and parse_own(line, size, &entry)
            while not self.skipping and size < ENTRY_MAX:       # leaves by break; comes back once when `own` proves wrong
                if not own and not parse_any(line, line + size, &entry):
                    break
                if self.from_time and memcmp(entry.time, self.since, TIME_SIZE) < 0:
                    break
                if self.to_time and memcmp(entry.time, self.until, TIME_SIZE) > 0:
                    self.done = True
                    return out - into
                if not self.wanted[entry.stream]:
                    break
                need = entry.size + 8 + TIME_SIZE + 1 + self.details_size
                if entry.attrs != NULL and self.details_size:
                    need += 3 * entry.attrs_size
                if need > room - (out - into):
                    self.refused = need
                    return out - into
                body = out + HEADER_SIZE if self.framed else out
                text = body
                if not self.sliced[entry.stream]:
                    if self.timestamps:
                        memcpy(text, entry.time, TIME_SIZE)
                        text[TIME_SIZE] = c' '
                        text += TIME_SIZE + 1
                    if self.details_size:
                        if entry.attrs != NULL:
                            text += self.put_attrs(text, &entry)
                        else:
                            memcpy(text, self.details_text, self.details_size)
                            text += self.details_size
                grown = unescape(text, entry.log, entry.size)
                if grown == NULL:
                    if not own:
                        break
                    own = False
                    continue
                if grown > text:
                    self.sliced[entry.stream] = (grown - 1)[0] != c'\n' and grown - text > SLICE - 4
                    if self.framed:
                        put_header(<unsigned char *>out, entry.stream, <uint32_t>(grown - body))
                    out = grown
                break
            self.skipping = False
            self.start += size + 1
            self.offset += size + 1
        return out - into

    cdef ssize_t put_attrs(self, char *into, Entry *entry) except -1 with gil:
        cdef bytes text = _url_text(entry.attrs[:entry.attrs_size])
        memcpy(into, PyBytes_AS_STRING(text), len(text))
        return len(text)

    def position(self) -> tuple:
        """(inode, offset) of what `read` takes next; (0, 0) when there is no log yet."""
        return self.inode, self.offset

    def newest(self) -> int:
        """Inode of the newest file that is held: rotation can take none of those up to it away. 0 when there is none."""
        return self.newer[len(self.newer) - 1][1] if self.newer else self.inode

    def close(self) -> None:
        """Give the files back; nothing more is read. Idempotent, and for any thread: one that is inside `read` leaves it soon."""
        self.done = True
        if self.busy:
            self.closing = True
        else:
            self.release()

    cdef int release(self) except -1:
        self.done = True
        if self.fd >= 0:
            close(self.fd)
            self.fd = -1
        for fd, _ in self.newer:
            close(fd)
        self.newer = []
        free(self.buffer)
        self.buffer = NULL
        self.start = self.end = 0
        return 0
