# cython: language_level=3, cdivision=True
"""Entries of Docker's json-file logs: their text form, and finding them in a file.

An entry is `{"log":"…\\n","stream":"stdout","time":"2026-01-02T03:04:05.123456789Z"}` and a
newline, byte for byte what Docker's own driver writes: its escapes (`<`, `>`, `&`, U+2028, U+2029,
controls except `\\n` and `\\r` as `\\uXXXX`), U+FFFD for each byte that is not UTF-8. In an exact
log such a byte 0xNN is `\\udcNN` instead, half of a surrogate pair, which no text has; readers turn
it into the byte again. `log` ends in a newline, unless the line was split at 16 KiB or its stream
ended. Not here: the files of a log (`logwriter.pyx`, `logreader.pyx`).

Owns:    nothing. Descriptors and buffers are the caller's.
Threads: any number; all functions but `time_text` run without the GIL.
Raises:  nothing: functions that read a file return -1 and leave errno. Those with `ready` read no
         more than that many bytes, reduce it by what they have read, and never wait for a disk:
         otherwise errno is EAGAIN. With NULL they read and wait.
"""
from libc.errno cimport EAGAIN, EINTR, ENOMEM, errno
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy
from posix.unistd cimport pread

from engine._fast.linux cimport RWF_NOWAIT, iovec, memrchr, preadv2, set_errno

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

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
        /* < > */
        special = _mm_or_si128(special, _mm_cmpeq_epi8(_mm_or_si128(b, _mm_set1_epi8(2)), _mm_set1_epi8('>')));
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
            special |= (unsigned)(c < 0x20 || c >= 0x80 || c == '"' || c == '\\\\' || c == '&' || c == '<'
                                  || c == '>') << i;
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
    """
    unsigned escape_16(char *into, const char *start) noexcept nogil
    unsigned unescape_16(char *into, const char *start) noexcept nogil
    int first_bit(unsigned mask) noexcept nogil

# year 2200: a later time stamp in a file is not trusted
cdef int64_t LAST_TIME = 7258118400 * 1000000000

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


# --- UTF-8 and JSON strings -----------------------------------------------------------------------


cdef inline int rune_size(const unsigned char *at, size_t left) noexcept nogil:
    """Size of the multi-byte character that begins at `at`, or 0 when it is invalid (Unicode 15,
    table 3-7)."""
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
    """Size of `data` without an incomplete character at its end."""
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


cdef char *escape(char *into, const char *data, size_t size, bint exact) noexcept nogil:
    """Write `data` as the inside of a JSON string as Docker does, or so that `unescape` returns the
    same bytes (`exact`). Needs room for 6 * size + 16 bytes. Returns the end."""
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
        # a run of non-ASCII characters: text in other scripts is one long run
        while at < end:
            byte = <unsigned char>at[0]
            if byte >= 0x80:
                width = rune_size(<const unsigned char *>at, end - at)
                if width == 0:
                    memcpy(into, b"\\ufffd", 6)
                    if exact:
                        memcpy(into + 2, b"dc", 2)
                        into[4] = HEX[byte >> 4]
                        into[5] = HEX[byte & 0xF]
                    into += 6
                    at += 1
                elif (
                    width == 3 and byte == 0xE2 and <unsigned char>at[1] == 0x80
                    and (<unsigned char>at[2] & 0xFE) == 0xA8
                ):
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


# --- time stamps ----------------------------------------------------------------------------------


cdef inline void put_two(char *into, int number) noexcept nogil:
    into[0] = <char>(c'0' + number // 10)
    into[1] = <char>(c'0' + number % 10)


cdef void put_second(char *into, int64_t second) noexcept nogil:
    """Write `2026-01-02T03:04:05`, 19 characters, for seconds since the epoch in the years 1970 to
    9999."""
    cdef int64_t days = second // 86400, era, rest, year, month
    cdef int clock = <int>(second % 86400)
    days += 719468  # days from 0000-03-01, so that the leap day is the last day of a year
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


cdef void put_fraction(char *into, int nanoseconds) noexcept nogil:
    """Write `.123456789Z`."""
    cdef int at
    into[0] = c'.'
    for at in range(9, 0, -1):
        into[at] = <char>(c'0' + nanoseconds % 10)
        nanoseconds //= 10
    into[10] = c'Z'


cdef inline int digits(const char *at, int count) noexcept nogil:
    """The value of `count` decimal digits, or -1."""
    cdef int number = 0, index
    for index in range(count):
        if not c'0' <= at[index] <= c'9':
            return -1
        number = number * 10 + (at[index] - c'0')
    return number


cdef int64_t read_time(const char *text, size_t size) noexcept nogil:
    """Nanoseconds since the epoch of an RFC 3339 time, with a fraction of any length and any
    offset; -1 when invalid or out of range."""
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
    """Write a time stamp of 30 characters, always with nine digits; `LAST_TIME` for a later
    time."""
    at_ns = min(at_ns, LAST_TIME)
    put_second(into, at_ns // 1000000000)
    put_fraction(into + 19, <int>(at_ns % 1000000000))


def time_text(int64_t at_ns) -> str:
    """RFC 3339 in UTC with nine digits, as the API shows it with `timestamps=1`."""
    cdef char text[TIME_SIZE]
    if not 0 <= at_ns < LAST_TIME:
        raise ValueError(f"not a time of this age: {at_ns} ns")
    put_time(text, at_ns)
    return text[:TIME_SIZE].decode()


# --- entries --------------------------------------------------------------------------------------

cdef char *put_entry(
    char *into, int stream, const char *data, size_t size, bint newline, const char *attrs, size_t attrs_size,
    const char *second, int nanoseconds, bint exact,
) noexcept nogil:
    """Write one entry. Needs room for 6 * size + attrs_size + ENTRY_EXTRA bytes. `attrs`:
    `,"attrs":{…}` or nothing, `second`: as by `put_second`, `exact`: as for `escape`.

    Returns the end.
    """
    memcpy(into, OPENING, OPENING_SIZE)
    into = escape(into + OPENING_SIZE, data, size, exact)
    if newline:
        memcpy(into, b"\\n", 2)
        into += 2
    memcpy(into, CLOSING_STDOUT if stream == 1 else CLOSING_STDERR, CLOSING_SIZE)
    into += CLOSING_SIZE
    if attrs_size:
        memcpy(into, attrs, attrs_size)
        into += attrs_size
    memcpy(into, TIME_KEY, TIME_KEY_SIZE)
    into += TIME_KEY_SIZE
    memcpy(into, second, 19)
    put_fraction(into + 19, nanoseconds)
    into += TIME_SIZE
    memcpy(into, b'"}\n', 3)
    return into + 3


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
    """Write the decoded inside of a JSON string. The result has at most `size` bytes, but up to 16
    bytes more are read and overwritten. Returns NULL if it is malformed.
    """
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
            if 0xDC80 <= rune < 0xDD00:  # a byte of an exact log
                into[0] = <char>(rune & 0xFF)
                into += 1
                continue
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
    """Returns 1 if `unescape` would accept it. Reads up to 16 bytes beyond its end."""
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


cdef bint measure(const char *at, size_t size, Text *found) noexcept nogil:
    """Returns 1 if the inside of a JSON string is valid and can be copied into other JSON as it is:
    UTF-8, no control bytes, no escaped surrogates, and `\\n` for each newline. What `escape` writes
    is like that. Reads up to 16 bytes beyond its end."""
    cdef const char *end = at + size
    cdef char sink[16]
    cdef unsigned special
    cdef unsigned char byte
    cdef int width, rune
    found.size = size
    found.newline = False
    found.inner = False
    while at < end:
        special = escape_16(sink, at)
        width = 16 if special == 0 else first_bit(special)
        if width >= end - at:
            return True
        at += width
        if special == 0:
            continue
        while at < end:
            byte = <unsigned char>at[0]
            if byte >= 0x80:
                width = rune_size(<const unsigned char *>at, end - at)
                if width == 0:
                    return False
                at += width
            elif byte == c'\\':
                if end - at < 2:
                    return False
                if at[1] == c'"':  # the most frequent one: JSON in a line
                    pass
                elif at[1] == c'n':
                    if end - at == 2:
                        found.newline = True
                    else:
                        found.inner = True
                elif at[1] == c'u':
                    rune = hex_four(at + 2) if end - at >= 6 else -1
                    if rune < 0 or rune == c'\n' or 0xD800 <= rune < 0xE000:
                        return False
                    found.size -= 5 if rune < 0x80 else 4 if rune < 0x800 else 3
                    at += 6
                    continue
                elif memchr(b'\\/rtbf', at[1], 6) == NULL:
                    return False
                found.size -= 1
                at += 2
            elif byte < 0x20 or byte == c'"':
                return False
            elif byte == c'<' or byte == c'>' or byte == c'&':
                at += 1
            else:
                break
    return True


cdef const char *after_space(const char *at, const char *end) noexcept nogil:
    while at < end and (at[0] == c' ' or at[0] == c'\t' or at[0] == c'\r'):
        at += 1
    return at


cdef const char *after_string(const char *at, const char *end) noexcept nogil:
    """The position after the closing quote of the string that `at` is in, or NULL."""
    while at < end:
        if at[0] == c'"':
            return at + 1
        at += 2 if at[0] == c'\\' else 1
    return NULL


cdef const char *after_value(const char *at, const char *end) noexcept nogil:
    """The position after the JSON value at `at`, or NULL. Checks only nesting and strings."""
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
    """Parse an entry in any JSON form: other key order, spaces, unknown keys, short time stamps."""
    cdef const char *key
    cdef const char *value
    cdef size_t key_size, size
    cdef int64_t time = -1
    entry.log = at
    entry.size = 0
    entry.stream = 0
    entry.attrs = NULL
    while at < end and at[0] == 0:  # NUL bytes, which a host crash may leave before the next entry
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


cdef bint parse_own(const char *at, size_t size, Entry *entry) noexcept nogil:
    """Parse an entry exactly as this engine writes it, without attributes; the caller must still
    validate `log`."""
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
    if (
        memcmp(tail, TIME_KEY, TIME_KEY_SIZE) != 0
        or tail[TIME_KEY_SIZE + 19] != c'.' or tail[TIME_KEY_SIZE + 29] != c'Z'
    ):
        return False
    if tail[TIME_KEY_SIZE + TIME_SIZE] != c'"' or tail[TIME_KEY_SIZE + TIME_SIZE + 1] != c'}':
        return False
    memcpy(entry.time, tail + TIME_KEY_SIZE, TIME_SIZE)
    entry.attrs = NULL
    return True


cdef bint parse_line(const char *at, size_t size, Entry *entry) noexcept nogil:
    """Returns 1 if a line (without its newline) is an entry. Reads up to 16 bytes beyond its
    end."""
    if size >= ENTRY_MAX:
        return False
    return (parse_own(at, size, entry) and sound(entry.log, entry.size)) or parse_any(at, at + size, entry)


cdef ssize_t read_part(int fd, char *into, size_t size, int64_t offset, int64_t *ready) noexcept nogil:
    """pread(2) once; -1 with errno."""
    cdef iovec piece
    cdef ssize_t got
    if ready == NULL:
        return pread(fd, into, size, offset)
    if ready[0] <= 0:
        set_errno(EAGAIN)
        return -1
    piece.iov_base = into
    piece.iov_len = min(size, <size_t>ready[0])
    got = preadv2(fd, &piece, 1, offset, RWF_NOWAIT)
    if got > 0:
        ready[0] -= got
    return got


cdef ssize_t read_at(int fd, char *into, size_t size, int64_t offset, int64_t *ready) noexcept nogil:
    """pread(2) until `size` bytes or the end of the file; -1 with errno."""
    cdef size_t done = 0
    cdef ssize_t part
    while done < size:
        part = read_part(fd, into + done, size - done, offset + done, ready)
        if part == 0:
            break
        if part > 0:
            done += part
        elif errno != EINTR:
            return -1
    return done


cdef int64_t last_newline(int fd, int64_t high, int64_t *ready) noexcept nogil:
    """Offset after the last newline before `high`, 0 when there is none, -1 with errno."""
    cdef char block[16384]
    cdef ssize_t size
    cdef const char *newline
    while high > 0:
        size = min(high, <int64_t>sizeof(block))
        high -= size
        size = read_at(fd, block, size, high, ready)
        if size < 0:
            return -1
        newline = <const char *>memrchr(block, c'\n', size)
        if newline != NULL:
            return high + (newline + 1 - block)
    return 0


cdef int64_t scan_back(
    int fd, int64_t low, int64_t high, ssize_t *wanted, char *time, int64_t *ready
) noexcept nogil:
    """Offset of the `wanted`th entry backwards from `high`, but not before `low`; -1 with errno.
    `high` is after a newline.

    `wanted` is reduced by the entries found; `time` is that of the earliest of them.
    """
    # most requests are for a few lines
    cdef size_t room = min(<size_t>SCAN_BLOCK, <size_t>min(wanted[0], SCAN_BLOCK) * USUAL_LINE + FIRST_BLOCK)
    cdef char *block = <char *>malloc(room + 32)
    cdef char *grown
    cdef const char *newline
    cdef ssize_t size, begin, end
    cdef int64_t at
    cdef Entry entry
    while high > low and wanted[0] > 0 and block != NULL:
        at = max(low, high - <int64_t>room)
        size = read_at(fd, block, high - at, at, ready)
        # an error, or the file has been truncated meanwhile
        if size < high - at:
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
        elif room > ENTRY_MAX:
            high = at                                   # too long for an entry
            continue
        if wanted[0] > 0 and (end == size or room < SCAN_BLOCK):
            room = max(2 * room, <size_t>SCAN_BLOCK)
            grown = <char *>realloc(block, room + 32)
            if grown == NULL:
                free(block)
            block = grown
    if block == NULL:
        set_errno(ENOMEM)
        return -1
    free(block)
    return high


cdef int64_t newest_time(int fd, int64_t high) noexcept nogil:
    """Time stamp of the last entry before `high`, which is after a newline; -1 when there is
    none."""
    cdef ssize_t wanted = 1
    cdef char time[TIME_SIZE]
    if scan_back(fd, 0, high, &wanted, time, NULL) < 0 or wanted:
        return -1
    return read_time(time, TIME_SIZE)


cdef int probe(
    int fd, int64_t offset, int64_t high, int64_t *begins, char *time, int64_t *ready
) noexcept nogil:
    """Find the first entry that begins in [offset, high): 1 when there is one, 0 when none, -1 with
    errno."""
    cdef size_t room = 64 << 10
    cdef char *block = <char *>malloc(room + 32)
    cdef char *grown
    cdef const char *newline
    cdef ssize_t size, begin
    cdef int64_t at = offset - 1 if offset else 0        # a line begins after a newline
    cdef bint inside = offset > 0
    cdef Entry entry
    while block != NULL:
        size = read_at(fd, block, room, at, ready)
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
    set_errno(ENOMEM)
    return -1
