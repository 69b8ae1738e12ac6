# cython: language_level=3
"""Stores output that the monitor has read but not logged yet, so that the next monitor can log it.

A monitor that is killed between read(2) of a pipe and write(2) of the log would lose what it had
read: a chunk of up to 256 KiB, and the unfinished line of every stream. So output of processes with
a log is read straight into a memory-mapped file, and unfinished lines are written to it
(`Unlogged`). The next monitor reads the file (`left_in`). When it takes a process over, it writes
that process's part to its log. RUN is a tmpfs, so none of this reaches a disk.

The file: a head, the chunk, then a slot for each process with a log.
- The chunk is filled with 0xFF between reads, a byte that UTF-8 does not contain. When the monitor
  dies inside or right after read(2), before the size is stored, the data ends at the last other
  byte.
- A slot contains its process's key and two copies of each stream's unfinished line. Each new line
  replaces the older copy, and has the number of its chunk. It is written after the chunk's entries
  are in the log. So if a line has the number of the current chunk, that chunk is logged. Otherwise
  the newest line is from before the chunk, and the log shows how many of the chunk's entries it has
  (`LogWriter.resume`).

A daemon that has the file sees whether something is between a pipe and its log (`all_logged`).

Not here: which process has which log (`monitor/monitor.py`).

Owns:    the file and its mapping.
Threads: the loop's; `all_logged`: any.
Raises:  OSError when the file cannot be made. Later failures (RUN is full) only leave the line
         unprotected.
"""
import os
import struct
from collections.abc import Sequence

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_SetFromErrnoWithFilenameObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from posix.fcntl cimport O_CLOEXEC, O_CREAT, O_RDWR, O_TRUNC, open, posix_fallocate
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport pread, pwrite

from engine._fast.linux cimport POLLIN, POLLNVAL, close_own, poll, pollfd

cdef extern from *:
    """
    #include <stdint.h>
    static inline void store(uint64_t *into, uint64_t value) { __atomic_store_n(into, value, __ATOMIC_SEQ_CST); }
    static inline void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    void store(uint64_t *into, uint64_t value) noexcept nogil
    void fence() noexcept nogil

cdef enum:
    # the head ends before it; the last 8 bytes are for a frame's header
    SPARE = 64
    CHUNK = 256 << 10
    AREA = 266240                       # whole pages: SPARE and CHUNK fit
    LINE = 16384                        # bytes of an unfinished line at most
    KEY = 128
    PIPES = 2                           # of a process: stdout and stderr
    HALF = 16 + LINE                    # number of the chunk, size, line
    SLOT = KEY + 4 * HALF


class Left:
    """The unlogged output of one process of a dead monitor.

    `chunk`: bytes of `stream` that had been read when the log ended at (`inode`, `offset`).
    """

    def __init__(self, key: str, slot: int) -> None:
        self.key = key
        self.slot = slot
        self.lines = (b"", b"")
        self.stream = 0
        self.chunk = b""
        self.inode = 0
        self.offset = 0


cdef class Unlogged:
    def __cinit__(self, bytes path not None):
        cdef int failure
        self.path = path
        self.free = []
        self.fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0o600)
        if self.fd < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, path)
        # a page that cannot be allocated would raise SIGBUS
        failure = posix_fallocate(self.fd, 0, AREA)
        if failure:
            raise OSError(failure, os.strerror(failure), os.fsdecode(path))
        self.area = <char *>mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_SHARED, self.fd, 0)
        if self.area == <char *>MAP_FAILED:
            self.area = NULL
            PyErr_SetFromErrnoWithFilenameObject(OSError, path)
        self.head = <Head *>self.area
        self.chunk = self.area + SPARE
        memset(self.chunk, 0xFF, CHUNK)

    def __dealloc__(self):
        if self.area != NULL:
            munmap(self.area, AREA)
        close_own(self.fd)

    cdef int take(self, bytes key) except -1:
        """Allocate a slot for a process, which `name` makes valid. Raises ValueError for a key that
        is too long."""
        if not 0 < PyBytes_GET_SIZE(key) < KEY:
            raise ValueError("a key has 1 to 127 bytes")
        if self.free:
            return self.free.pop()
        self.slots += 1
        return self.slots - 1

    cdef void name(self, int slot, bytes key) noexcept:
        """The slot is this process's from now on, and an earlier monitor's is not read any more.
        So the lines that the process's log was resumed with have to be there already."""
        cdef char text[KEY]
        memset(text, 0, KEY)
        memcpy(text, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
        pwrite(self.fd, text, KEY, AREA + <int64_t>slot * SLOT)

    cdef void give_back(self, int slot) noexcept:
        """Free the slot: its process has ended, and its log is closed."""
        cdef char nothing[16]
        cdef int half
        memset(nothing, 0, sizeof(nothing))
        # clear the key first: that frees the slot
        pwrite(self.fd, nothing, 1, AREA + <int64_t>slot * SLOT)
        for half in range(4):
            pwrite(self.fd, nothing, 16, AREA + <int64_t>slot * SLOT + KEY + half * HALF)
        self.free.append(slot)

    cdef void begin(self, int slot, int stream, uint64_t inode, int64_t offset) noexcept:
        """Record that the next bytes in `chunk` belong to this stream."""
        self.number += 1
        self.head.size = 0
        self.head.slot = slot
        self.head.stream = stream
        self.head.inode = inode
        self.head.offset = offset
        store(&self.head.active, self.number)

    cdef void came(self, size_t size) noexcept:
        store(&self.head.size, size)

    cdef void put(self, int slot, int stream, int half, const char *line, size_t size) noexcept:
        """Store the unfinished line of a stream after the last chunk. Everything before it is in
        the log.

        `half`: the copy that the last call did not write.
        """
        cdef char text[HALF]
        cdef uint64_t parts[2]
        if size > LINE:
            return
        parts[0] = self.number
        parts[1] = size
        memcpy(text, parts, 16)
        if size:
            memcpy(text + 16, line, size)
        pwrite(self.fd, text, 16 + size, AREA + <int64_t>slot * SLOT + KEY + ((stream - 1) * 2 + half) * HALF)

    cdef void done(self) noexcept:
        """Record that the chunk's entries are in the log and its unfinished line is stored
        (`put`).
        """
        store(&self.head.active, 0)

    cdef void clear(self, size_t size) noexcept:
        """Discard the chunk, which is no longer needed."""
        memset(self.chunk, 0xFF, size)


def left_in(bytes path not None) -> dict:
    """Unlogged output in the file of a dead monitor, by key, for each of its processes with a log.

    Raises OSError when it cannot be read.
    """
    with open_file(path) as file:
        data = file.read()
    found = {}
    if len(data) < AREA:
        return found
    active, size, inode, offset, chunk_slot, stream = struct.unpack_from("=QQQqII", data, 0)
    for slot in range((len(data) - AREA + SLOT - 1) // SLOT):
        at = AREA + slot * SLOT
        key = data[at : at + KEY].split(b"\0", 1)[0]
        if not key:
            continue
        left = Left(key.decode(errors="replace"), slot)
        in_flight = active and slot == chunk_slot and stream in (1, 2)
        lines = []
        for number in (1, 2):
            newest = (0, b"")
            for half in range(2):
                where = at + KEY + ((number - 1) * 2 + half) * HALF
                if where + 16 <= len(data):
                    made, length = struct.unpack_from("=QQ", data, where)
                    if made > newest[0] and length <= LINE and where + 16 + length <= len(data):
                        newest = (made, data[where + 16 : where + 16 + length])
            lines.append(newest[1])
            if in_flight and number == stream and newest[0] == active:
                in_flight = False
        left.lines = (lines[0], lines[1])
        if in_flight:
            chunk = data[SPARE : SPARE + CHUNK]
            left.chunk = chunk[:size] if 0 < size <= CHUNK else chunk.rstrip(b"\xff")
            left.stream, left.inode, left.offset = stream, inode, offset
        found[left.key] = left
    return found


def forget(bytes path not None, int slot) -> None:
    """Invalidate a slot in the file of a dead monitor: its process is another monitor's now, or
    another process has its key. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(file, b"\0", AREA + slot * SLOT)
    finally:
        os.close(file)


def all_logged(int file, pipes: Sequence[int]) -> bool:
    """True if everything that was written to these pipes before this call is in the log, but for
    unfinished lines: the pipes are empty, and the monitor of this `file` has no chunk.

    False also when that cannot be found out. The pipes come first: before the monitor reads a pipe,
    it stores that a chunk is `active`, and it is stored until the chunk is logged. That stays true
    when the monitor dies. poll(2) of a pipe waits for no lock, unlike FIONREAD.
    """
    cdef pollfd waited[PIPES]
    cdef uint64_t active
    cdef int count = 0
    if len(pipes) > PIPES:
        return False
    for pipe in pipes:
        waited[count].fd = pipe
        waited[count].events = POLLIN
        count += 1
    if poll(waited, count, 0) < 0:
        return False
    for index in range(count):
        if waited[index].revents & (POLLIN | POLLNVAL):
            return False
    fence()
    return pread(file, &active, sizeof(active), 0) == sizeof(active) and active == 0


def open_file(path: bytes):
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb")
