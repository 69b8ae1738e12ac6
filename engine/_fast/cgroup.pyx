# cython: language_level=3
"""Counters of one container (cgroup v1, v2 and any mix of both, and its network namespace) and of
the host's processors.

Every file is opened once and read again in place. The kernel's text is parsed without the GIL, and
`samples` reads any number of containers in one stretch without it. Not here: the counters' names in
the API (`containers/stats.py`), the cgroup of a container (`runtime/cgroups.py`).

Owns:    the descriptors, until `close()` or the object dies. The one of net/dev keeps the network
         namespace alive, so close it when the container has ended.
Threads: any; one reading of the same object at a time. A `close()` during a reading takes effect
         after it.
Raises:  FileNotFoundError when no file of the cgroup exists, OSError for other errors of opening. A
         reading raises nothing: it is None if the cgroup was removed (ENODEV), and a file that
         cannot be read counts as an empty one.
Rules:   kernel documents cgroup-v1/{cpuacct,memory,blkio-controller,pids}.rst, cgroup-v2.rst;
         proc(5). Incomplete lines are ignored, so a truncated text gives no wrong numbers. Lines of
         another form are skipped. Numbers are below 2**64; `max` is 2**64 - 1.
"""
import errno
import os

from cpython.exc cimport PyErr_SetFromErrnoWithFilename
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.errno cimport ENODEV, ENOENT, ENOTDIR, errno as c_errno
from libc.stdint cimport UINT32_MAX, UINT64_MAX, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp
from posix.fcntl cimport O_CLOEXEC, O_RDONLY, open as c_open
from posix.unistd cimport _SC_CLK_TCK, _SC_PAGESIZE, close as c_close, pread, sysconf

from engine._fast.linux cimport close_own

# the files of one container, in the order in which they are read
cdef enum:
    CPU_EACH
    CPU_MODES
    CPU_STAT
    MEMORY_STAT
    MEMORY_USAGE
    MEMORY_PEAK
    MEMORY_FAILURES
    MEMORY_LIMIT
    MEMORY_SWAP
    PIDS
    IO_BYTES
    IO_OPERATIONS
    NETWORK
    FILES

cdef enum:                               # the formats of the files
    NUMBERS                              # words on lines: "12 0 7"
    FLAT                                 # lines "name 12"
    IO_V1                                # lines "8:0 Read 12"
    IO_V2                                # lines "8:0 rbytes=12 wbytes=0"
    INTERFACES                           # net/dev; eight entries each, numbered in `major`
    # /proc/stat: "cpu" with the sum of its times, then one entry per online processor
    PROCESSORS

cdef enum:
    TEXT_FIRST = 12 << 10                # all files of a container on a small host
    TEXT_ROOM = 4 << 10                  # free space before a file is read
    TEXT_MAX = 1 << 20                   # no real file is this large; a larger one is truncated
    INTERFACE_VALUES = 8

cdef struct Entry:
    uint64_t value
    uint32_t name                        # offset in the text
    uint32_t length
    uint32_t major
    uint32_t minor

cdef struct Reading:
    char *text
    size_t room
    size_t used
    Entry *entries
    size_t entries_room
    size_t count
    size_t first[FILES + 1]              # a file's entries: from first[file] to first[file + 1]
    int failure                          # errno; ENODEV means gone

# nanoseconds of one unit of utime, stime and /proc/stat
cdef uint64_t TICK = 1_000_000_000 // sysconf(_SC_CLK_TCK)

NO_LIMIT = 0x7FFFFFFFFFFFFFFF // sysconf(_SC_PAGESIZE) * sysconf(_SC_PAGESIZE)
"""The value in v1's files that means: no limit. It is a number of whole pages."""


# --- reading and parsing, without the GIL ---------------------------------------------------------

cdef Entry *_append(Reading *reading) noexcept nogil:
    cdef Entry *grown
    if reading.count == reading.entries_room:
        grown = <Entry *>realloc(reading.entries, (reading.entries_room * 2 + 96) * sizeof(Entry))
        if grown == NULL:
            return NULL
        reading.entries = grown
        reading.entries_room = reading.entries_room * 2 + 96
    reading.count += 1
    return &reading.entries[reading.count - 1]


cdef int _put(
    Reading *reading, size_t name, size_t length, uint32_t major, uint32_t minor, uint64_t value,
) noexcept nogil:
    cdef Entry *entry = _append(reading)
    if entry == NULL:
        return -1
    entry.value = value
    entry.name = <uint32_t>name
    entry.length = <uint32_t>length
    entry.major = major
    entry.minor = minor
    return 0


cdef inline bint _space(char letter) noexcept nogil:
    return letter == b" " or letter == b"\t"


cdef inline size_t _skip(const char *text, size_t at, size_t end) noexcept nogil:
    while at < end and _space(text[at]):
        at += 1
    return at


cdef inline size_t _word(const char *text, size_t at, size_t end) noexcept nogil:
    while at < end and not _space(text[at]):
        at += 1
    return at


cdef bint _number(const char *text, size_t at, size_t end, uint64_t *value) noexcept nogil:
    """Returns 1 if text[at:end] as a whole is a number."""
    cdef uint64_t total = 0
    cdef unsigned char digit
    if end - at == 3 and memcmp(text + at, b"max", 3) == 0:
        value[0] = UINT64_MAX
        return True
    if at == end or end - at > 20:
        return False
    while at < end:
        digit = <unsigned char>(text[at] - <char>48)
        if digit > 9 or total > UINT64_MAX // 10 or (total == UINT64_MAX // 10 and digit > 5):
            return False
        total = total * 10 + digit
        at += 1
    value[0] = total
    return True


cdef bint _device(const char *text, size_t at, size_t end, uint32_t *major, uint32_t *minor) noexcept nogil:
    """Returns 1 if text[at:end] is "major:minor"."""
    cdef uint64_t one, two
    cdef const char *colon = <const char *>memchr(text + at, c":", end - at)
    if colon == NULL:
        return False
    if not _number(text, at, colon - text, &one) or not _number(text, colon - text + 1, end, &two):
        return False
    if one > UINT32_MAX or two > UINT32_MAX:
        return False
    major[0] = <uint32_t>one
    minor[0] = <uint32_t>two
    return True


cdef int _line(Reading *reading, const char *text, size_t at, size_t end, int form) noexcept nogil:
    cdef size_t word, stop, equals, begin
    cdef uint64_t value = 0, total = 0
    cdef uint64_t columns[16]
    cdef uint32_t major = 0, minor = 0
    cdef int index
    at = _skip(text, at, end)
    if form == NUMBERS:
        while at < end:
            stop = _word(text, at, end)
            if _number(text, at, stop, &value) and _put(reading, at, 0, 0, 0, value) < 0:
                return -1
            at = _skip(text, stop, end)
        return 0
    if form == INTERFACES:
        word = end
        # an alias has a colon in its name, the counters have none
        while word > at and text[word - 1] != b":":
            word -= 1
        if word < at + 2:
            return 0
        stop = word - 1
        begin = word
        for index in range(16):
            begin = _skip(text, begin, end)
            equals = _word(text, begin, end)
            if not _number(text, begin, equals, &columns[index]):
                return 0
            begin = equals
        for index in range(INTERFACE_VALUES):               # four columns of each direction
            if _put(reading, at, stop - at, index, 0, columns[index if index < 4 else index + 4]) < 0:
                return -1
        return 0
    word = _word(text, at, end)
    if form == PROCESSORS:
        if word - at < 3 or memcmp(text + at, b"cpu", 3) != 0:
            return 0
        if word - at > 3:
            if not _number(text, at + 3, word, &value) or value >= UINT32_MAX:
                return 0
            return _put(reading, at, word - at, <uint32_t>value, 0, 0)
        begin = word
        # user nice system idle iowait irq softirq, the times that Docker adds up
        for index in range(7):
            begin = _skip(text, begin, end)
            stop = _word(text, begin, end)
            if not _number(text, begin, stop, &value):
                return 0
            total += value
            begin = stop
        return _put(reading, at, word - at, UINT32_MAX, 0, total * TICK)
    if form == FLAT:
        begin = _skip(text, word, end)
        stop = _word(text, begin, end)
        if word == at or not _number(text, begin, stop, &value) or _skip(text, stop, end) != end:
            return 0
        return _put(reading, at, word - at, 0, 0, value)
    if not _device(text, at, word, &major, &minor):
        return 0
    at = _skip(text, word, end)
    if form == IO_V1:
        word = _word(text, at, end)
        begin = _skip(text, word, end)
        stop = _word(text, begin, end)
        if word == at or not _number(text, begin, stop, &value) or _skip(text, stop, end) != end:
            return 0
        return _put(reading, at, word - at, major, minor, value)
    while at < end:
        stop = _word(text, at, end)
        equals = at
        while equals < stop and text[equals] != b"=":
            equals += 1
        if at < equals < stop and _number(text, equals + 1, stop, &value):
            if _put(reading, at, equals - at, major, minor, value) < 0:
                return -1
        at = _skip(text, stop, end)
    return 0


cdef int _parse(Reading *reading, size_t at, size_t end, int form) noexcept nogil:
    cdef const char *text = reading.text
    cdef const char *newline
    while at < end:
        newline = <const char *>memchr(text + at, c"\n", end - at)
        if newline == NULL:
            return 0
        if _line(reading, text, at, newline - text, form) < 0:
            return -1
        at = newline - text + 1
        # stop after the processors: the lines after them are long on a large host
        if form == PROCESSORS and at < end and text[at] != b"c":
            return 0
    return 0


cdef ssize_t _read(Reading *reading, int fd, bint to_end) noexcept nogil:
    """Append a file to the text. `to_end`: a seq file of many records, of which a read returns one
    page at a time; a cgroup file is returned whole.

    Bytes read, or -1 with errno.
    """
    cdef size_t begin = reading.used
    cdef ssize_t size
    cdef char *grown
    while True:
        if reading.room - reading.used < TEXT_ROOM and reading.room < TEXT_MAX:
            grown = <char *>realloc(reading.text, reading.room * 2)
            if grown == NULL:
                return -1
            reading.text = grown
            reading.room *= 2
        if reading.room == reading.used:
            break
        size = pread(fd, reading.text + reading.used, reading.room - reading.used, reading.used - begin)
        if size < 0:
            return -1
        reading.used += size
        if size == 0 or not (to_end or reading.used == reading.room):
            break
    return reading.used - begin


cdef void _read_all(const int *descriptors, const int *forms, Reading *reading) noexcept nogil:
    cdef int file
    cdef size_t begin
    cdef ssize_t size
    for file in range(FILES):
        reading.first[file] = reading.count
        if descriptors[file] < 0:
            continue
        begin = reading.used
        size = _read(reading, descriptors[file], file == NETWORK)
        if size < 0:
            if c_errno == ENODEV or c_errno == ENOENT:
                reading.failure = ENODEV
                return
            reading.used = begin
            continue
        if _parse(reading, begin, begin + size, forms[file]) < 0:
            reading.failure = 12
            return
    reading.first[FILES] = reading.count


cdef int _prepare(Reading *reading) except -1:
    reading.text = <char *>malloc(TEXT_FIRST)
    if reading.text == NULL:
        raise MemoryError()
    reading.room = TEXT_FIRST
    return 0


cdef void _release(Reading *reading) noexcept:
    free(reading.text)
    free(reading.entries)


# --- the result -----------------------------------------------------------------------------------

cdef class Sample:
    """One reading of a container. Times in nanoseconds, sizes in bytes; values of a controller that
    the host lacks are 0 or empty."""

    cdef readonly uint64_t cpu_total, cpu_user, cpu_kernel
    # by processor number, including offline ones; empty under v2, which lacks it
    cdef readonly tuple cpu_each
    cdef readonly uint64_t periods, throttled_periods, throttled_time
    cdef readonly bint memory_unified                  # `memory` has v2's names
    cdef readonly uint64_t memory_usage, memory_peak, memory_failures, memory_limit, memory_swap
    cdef readonly dict memory
    cdef readonly uint64_t pids
    # `io` holds v2's keys (rbytes, wios, ...) and `io_operations` nothing
    cdef readonly bint io_unified
    cdef readonly list io, io_operations               # (major, minor, name, value)
    # name: rx bytes, packets, errors, dropped, tx bytes, packets, errors, dropped; no lo
    cdef readonly dict networks


cdef inline str _name(Reading *reading, Entry *entry):
    return PyUnicode_DecodeUTF8(reading.text + entry.name, entry.length, "replace")


cdef inline uint64_t _single(Reading *reading, int file) noexcept:
    return reading.entries[reading.first[file]].value if reading.first[file] < reading.first[file + 1] else 0


cdef uint64_t _find(Reading *reading, int file, const char *name, size_t length) noexcept:
    cdef size_t index
    cdef Entry *entry
    for index in range(reading.first[file], reading.first[file + 1]):
        entry = &reading.entries[index]
        if entry.length == length and memcmp(reading.text + entry.name, name, length) == 0:
            return entry.value
    return 0


cdef list _devices(Reading *reading, int file):
    cdef size_t index
    cdef Entry *entry
    cdef list found = []
    for index in range(reading.first[file], reading.first[file + 1]):
        entry = &reading.entries[index]
        found.append((entry.major, entry.minor, _name(reading, entry), entry.value))
    return found


cdef dict _interfaces(Reading *reading):
    cdef size_t index = reading.first[NETWORK]
    cdef Entry *entry
    cdef dict found = {}
    while index < reading.first[FILES]:
        entry = &reading.entries[index]
        if not (entry.length == 2 and memcmp(reading.text + entry.name, b"lo", 2) == 0):
            found[_name(reading, entry)] = (
                entry[0].value, entry[1].value, entry[2].value, entry[3].value,
                entry[4].value, entry[5].value, entry[6].value, entry[7].value,
            )
        index += INTERFACE_VALUES
    return found


cdef Sample _sample(Counters counters, Reading *reading):
    cdef Sample sample = Sample.__new__(Sample)
    cdef size_t index
    cdef Entry *entry
    cdef list each
    cdef dict memory = {}
    if counters.cpu_unified:
        sample.cpu_total = _find(reading, CPU_STAT, b"usage_usec", 10) * 1000
        sample.cpu_user = _find(reading, CPU_STAT, b"user_usec", 9) * 1000
        sample.cpu_kernel = _find(reading, CPU_STAT, b"system_usec", 11) * 1000
        sample.throttled_time = _find(reading, CPU_STAT, b"throttled_usec", 14) * 1000
        sample.cpu_each = ()
    else:
        each = []
        for index in range(reading.first[CPU_EACH], reading.first[CPU_EACH + 1]):
            each.append(reading.entries[index].value)
            sample.cpu_total += reading.entries[index].value
        sample.cpu_each = tuple(each)
        sample.cpu_user = _find(reading, CPU_MODES, b"user", 4) * TICK
        sample.cpu_kernel = _find(reading, CPU_MODES, b"system", 6) * TICK
        sample.throttled_time = _find(reading, CPU_STAT, b"throttled_time", 14)
    sample.periods = _find(reading, CPU_STAT, b"nr_periods", 10)
    sample.throttled_periods = _find(reading, CPU_STAT, b"nr_throttled", 12)
    for index in range(reading.first[MEMORY_STAT], reading.first[MEMORY_STAT + 1]):
        entry = &reading.entries[index]
        memory[_name(reading, entry)] = entry.value
    sample.memory = memory
    sample.memory_unified = counters.memory_unified
    sample.memory_usage = _single(reading, MEMORY_USAGE)
    sample.memory_peak = _single(reading, MEMORY_PEAK)
    if counters.memory_unified:
        sample.memory_failures = _find(reading, MEMORY_FAILURES, b"max", 3)
        sample.memory_limit = min(_single(reading, MEMORY_LIMIT) or counters.ceiling, counters.ceiling)
        sample.memory_swap = _single(reading, MEMORY_SWAP)
        if counters.descriptors[MEMORY_PEAK] < 0:  # before Linux 5.19: the highest value seen here
            counters.highest = max(counters.highest, sample.memory_usage)
            sample.memory_peak = counters.highest
    else:
        sample.memory_failures = _single(reading, MEMORY_FAILURES)
        sample.memory_limit = _single(reading, MEMORY_LIMIT)
    sample.pids = _single(reading, PIDS)
    sample.io_unified = counters.io_unified
    sample.io = _devices(reading, IO_BYTES)
    sample.io_operations = _devices(reading, IO_OPERATIONS)
    sample.networks = _interfaces(reading)
    return sample


# --- a container's files --------------------------------------------------------------------------

cdef class Counters:
    """The open files of one container.

    `cpu`, `cpuacct`, `memory`, `io`, `pids`: its cgroup's directory in the hierarchy with that
    controller, None without one. The files that exist show the version. `network`: net/dev of one
    of its processes, None for a container without interfaces of its own.
    """

    cdef int descriptors[FILES]
    cdef int forms[FILES]
    cdef bint cpu_unified, memory_unified, io_unified
    cdef bint doomed
    cdef int readings                                   # under way
    cdef uint64_t ceiling  # lowest memory.max above the cgroup, when it was opened
    cdef uint64_t highest

    def __cinit__(self):
        cdef int file
        for file in range(FILES):
            self.descriptors[file] = -1

    def __init__(
        self, *, bytes cpu=None, bytes cpuacct=None, bytes memory=None, bytes io=None, bytes pids=None,
        bytes network=None
    ):
        if self.doomed or self._any():
            raise ValueError("opened already")
        try:
            self._open_cpu(cpu, cpuacct)
            self._open_memory(memory)
            self._open_io(io)
            if pids is not None:
                self._open(PIDS, pids, b"/pids.current", NUMBERS)
            if not self._any():
                place = cpu or cpuacct or memory or io or pids
                raise FileNotFoundError(
                    errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(place) if place else "no cgroup"
                )
            if network is not None:
                self._open(NETWORK, network, b"", INTERFACES)
        except BaseException:
            self.close()
            raise

    def __dealloc__(self):
        self._close()

    cdef bint _any(self) noexcept:
        cdef int file
        for file in range(FILES):
            if self.descriptors[file] >= 0:
                return True
        return False

    cdef bint _open(self, int file, bytes directory, bytes name, int form) except -1:
        """Returns True if the file is there."""
        cdef bytes path = directory + name
        cdef int fd = c_open(path, O_RDONLY | O_CLOEXEC)
        if fd < 0:
            # ESRCH: /proc of a dead process
            if c_errno == ENOENT or c_errno == ENOTDIR or c_errno == ENODEV or c_errno == 3:
                return False
            PyErr_SetFromErrnoWithFilename(OSError, path)
        self.descriptors[file] = fd
        self.forms[file] = form
        return True

    cdef int _open_cpu(self, bytes cpu, bytes cpuacct) except -1:
        if cpuacct is not None and self._open(CPU_EACH, cpuacct, b"/cpuacct.usage_percpu", NUMBERS):
            self._open(CPU_MODES, cpuacct, b"/cpuacct.stat", FLAT)
            if cpu is not None:
                self._open(CPU_STAT, cpu, b"/cpu.stat", FLAT)
        elif cpu is not None or cpuacct is not None:
            self.cpu_unified = self._open(CPU_STAT, cpu or cpuacct, b"/cpu.stat", FLAT)
        return 0

    cdef int _open_memory(self, bytes memory) except -1:
        if memory is None:
            return 0
        if not self._open(MEMORY_USAGE, memory, b"/memory.current", NUMBERS):
            self._open(MEMORY_STAT, memory, b"/memory.stat", FLAT)
            self._open(MEMORY_USAGE, memory, b"/memory.usage_in_bytes", NUMBERS)
            self._open(MEMORY_PEAK, memory, b"/memory.max_usage_in_bytes", NUMBERS)
            self._open(MEMORY_FAILURES, memory, b"/memory.failcnt", NUMBERS)
            self._open(MEMORY_LIMIT, memory, b"/memory.limit_in_bytes", NUMBERS)
            return 0
        self.memory_unified = True
        self._open(MEMORY_STAT, memory, b"/memory.stat", FLAT)
        self._open(MEMORY_PEAK, memory, b"/memory.peak", NUMBERS)
        self._open(MEMORY_FAILURES, memory, b"/memory.events", FLAT)
        self._open(MEMORY_LIMIT, memory, b"/memory.max", NUMBERS)
        self._open(MEMORY_SWAP, memory, b"/memory.swap.current", NUMBERS)
        self.ceiling = NO_LIMIT
        above = os.path.dirname(memory)
        while True:
            try:
                with open(above + b"/memory.max", "rb") as file:
                    text = file.read(32)
            except OSError:
                return 0
            if text.strip().isdigit():
                self.ceiling = min(self.ceiling, int(text))
            above = os.path.dirname(above)

    cdef int _open_io(self, bytes io) except -1:
        if io is None:
            return 0
        if self._open(IO_BYTES, io, b"/io.stat", IO_V2):
            self.io_unified = True
            return 0
        # blk-throttle counts independently of the disk's scheduler. The schedulers' own files are
        # for kernels whose blk-throttle has no recursive counters.
        for name in (
            b"/blkio.throttle.io_service%s_recursive",
            b"/blkio.bfq.io_service%s_recursive",
            b"/blkio.io_service%s_recursive",
            b"/blkio.throttle.io_service%s",
        ):
            if self._open(IO_BYTES, io, name % b"_bytes", IO_V1):
                self._open(IO_OPERATIONS, io, name % b"d", IO_V1)
                return 0
        return 0

    cdef void _close(self) noexcept:
        cdef int file
        for file in range(FILES):
            if self.descriptors[file] >= 0:
                c_close(self.descriptors[file])
                self.descriptors[file] = -1

    def close(self) -> None:
        """Close the descriptors. Idempotent. Later readings are None."""
        self.doomed = True
        if not self.readings:
            self._close()

    @property
    def closed(self) -> bool:
        return self.doomed

    def sample(self):
        """Take a reading. Returns None if the cgroup was removed."""
        return samples([self])[0]


def samples(list counters not None) -> list:
    """A reading of each container in order, None for a removed cgroup. The GIL is released once for
    all of them."""
    cdef Py_ssize_t size = len(counters), index
    cdef Counters each
    cdef list taken = []
    cdef Reading *readings = <Reading *>calloc(size or 1, sizeof(Reading))
    cdef const int **descriptors = <const int **>calloc(size or 1, sizeof(int *))
    cdef const int **forms = <const int **>calloc(size or 1, sizeof(int *))
    cdef list held = []
    try:
        if readings == NULL or descriptors == NULL or forms == NULL:
            raise MemoryError()
        for index in range(size):
            each = counters[index]
            if each is None:
                raise TypeError("Counters expected, not None")
            descriptors[index] = each.descriptors
            forms[index] = each.forms
            if each.doomed:
                readings[index].failure = ENODEV
                held.append(each)
                each.readings += 1
                continue
            _prepare(&readings[index])
            held.append(each)
            each.readings += 1
        with nogil:
            for index in range(size):
                if readings[index].failure == 0:
                    _read_all(descriptors[index], forms[index], &readings[index])
        for index in range(size):
            if readings[index].failure == 0:
                taken.append(_sample(held[index], &readings[index]))
            elif readings[index].failure == ENODEV:
                taken.append(None)
            else:
                raise MemoryError()
        return taken
    finally:
        for each in held:
            each.readings -= 1
            if each.doomed and not each.readings:
                each._close()
        if readings != NULL:
            for index in range(size):
                _release(&readings[index])
        free(readings)
        free(descriptors)
        free(forms)


# --- the host -------------------------------------------------------------------------------------

cdef class Processors:
    """/proc/stat, or another file of its form."""

    cdef int fd

    def __cinit__(self, bytes path not None=b"/proc/stat"):
        self.fd = c_open(path, O_RDONLY | O_CLOEXEC)
        if self.fd < 0:
            PyErr_SetFromErrnoWithFilename(OSError, path)

    def __dealloc__(self):
        close_own(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            c_close(self.fd)
            self.fd = -1

    def read(self) -> tuple:
        """The sum of the time of all processors since boot, idle time included, in nanoseconds; and
        the numbers of the online processors."""
        cdef Reading reading
        cdef ssize_t size
        cdef int status = 0
        reading.used = reading.count = reading.entries_room = 0
        reading.entries = NULL
        _prepare(&reading)
        try:
            with nogil:
                size = _read(&reading, self.fd, False)
                if size >= 0:
                    status = _parse(&reading, 0, size, PROCESSORS)
            if size < 0:
                PyErr_SetFromErrnoWithFilename(OSError, b"/proc/stat")
            if status < 0:
                raise MemoryError()
            total = 0
            online = []
            for index in range(reading.count):
                if reading.entries[index].major == UINT32_MAX:
                    total = reading.entries[index].value
                else:
                    online.append(reading.entries[index].major)
            return total, tuple(online)
        finally:
            _release(&reading)


FORMS = {
    "numbers": NUMBERS, "flat": FLAT, "io_v1": IO_V1, "io_v2": IO_V2, "interfaces": INTERFACES,
    "processors": PROCESSORS
}


def parse(str form not None, bytes text not None) -> list:
    """The entries (name, major, minor, value) in a text of that format. Calls only the parser, for
    tests."""
    cdef Reading reading
    cdef int kind = FORMS[form], status
    cdef size_t size = len(text)
    reading.used = reading.room = size
    reading.count = reading.entries_room = 0
    reading.entries = NULL
    reading.text = <char *>text         # borrowed: `text` stays held, and nothing writes to it
    try:
        with nogil:
            status = _parse(&reading, 0, size, kind)
        if status < 0:
            raise MemoryError()
        return [
            (reading.text[reading.entries[index].name:reading.entries[index].name + reading.entries[index].length],
             reading.entries[index].major, reading.entries[index].minor, reading.entries[index].value)
            for index in range(reading.count)
        ]
    finally:
        free(reading.entries)
