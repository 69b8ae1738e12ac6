# cython: language_level=3, cdivision=True
"""Shared memory of the monitor and the shipper: how far each container's spool is written, and how
far the shipper has delivered it.

RUN/shipper/board is a file that both map, with a slot for each spool that the monitor has open. The
monitor adds to a slot's totals and sets its bit with each flush. The shipper takes the bits, reads
the spools and stores the position up to which everything is acknowledged. RUN/shipper/bell is a
FIFO: the monitor writes a byte to it when something has changed and the shipper sleeps.

Either process may be killed at any instruction, and the other must not be misled:
- An acknowledged position is several words, which the shipper stores into the older of two copies.
  Each copy has a sum. A torn copy is recognised by it, and then the other one is taken.
- The sum begins with the slot's salt, which differs for each opening. So a position that the
  shipper stores late, when the slot is another container's already, is not taken for that
  container's.
- The shipper announces that it sleeps before it looks at the bits a last time, and the monitor sets
  a bit before it looks whether the shipper sleeps. These are sequentially consistent, so that no
  change is overlooked. A monitor that is killed before it rings is followed by one that rings.

A page of a sparse file on tmpfs that cannot be allocated would raise SIGBUS. So the part in use is
allocated (posix_fallocate(3)), and it grows in steps. The mapping has room for all slots, so that
pointers stay valid.

Not here: the spool's files (`logwriter.pyx`), the position on disk (`engine/logs/cursor.py`).

Owns:    the mapping and the descriptors of both files.
Threads: one at a time.
Raises:  OSError when the files cannot be made or grow.
"""
import os
from contextlib import suppress

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_SetFromErrnoWithFilenameObject
from libc.errno cimport ENOSPC
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcmp, memcpy, memset
from posix.fcntl cimport O_CLOEXEC, O_CREAT, O_NONBLOCK, O_RDWR, open, posix_fallocate
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.stat cimport S_ISFIFO, fstat, struct_stat
from posix.unistd cimport close, ftruncate, read, write

from engine._fast.linux cimport O_NOFOLLOW, close_own

cdef extern from *:
    """
    #include <stdint.h>
    static inline uint64_t load(const void *at) { return __atomic_load_n((const uint64_t *)at, __ATOMIC_SEQ_CST); }
    static inline void store(void *at, uint64_t value) { __atomic_store_n((uint64_t *)at, value, __ATOMIC_SEQ_CST); }
    static inline uint64_t take(void *at) { return __atomic_exchange_n((uint64_t *)at, 0, __ATOMIC_SEQ_CST); }
    static inline void set_bits(void *at, uint64_t bits) { __atomic_fetch_or((uint64_t *)at, bits, __ATOMIC_SEQ_CST); }
    static inline uint64_t relaxed(const void *at) { return __atomic_load_n((const uint64_t *)at, __ATOMIC_RELAXED); }
    static inline void put(void *at, uint64_t value) { __atomic_store_n((uint64_t *)at, value, __ATOMIC_RELAXED); }
    static inline void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    static inline int lowest(uint64_t bits) { return __builtin_ctzll(bits); }
    """
    uint64_t load(const void *at) noexcept nogil
    void store(void *at, uint64_t value) noexcept nogil
    uint64_t take(void *at) noexcept nogil
    void set_bits(void *at, uint64_t bits) noexcept nogil
    uint64_t relaxed(const void *at) noexcept nogil
    void put(void *at, uint64_t value) noexcept nogil
    void fence() noexcept nogil
    int lowest(uint64_t bits) noexcept nogil

cdef enum:
    SLOTS = 65536                       # of a sparse file
    BITS_AT = 4096
    SLOTS_AT = 12288                    # BITS_AT and a bit for each slot
    STEP = 256                          # slots that are given memory at a time
    KEPT = 1024                         # slots from which closed ones are used again
    TRIES = 4096                        # looks at a slot that the monitor is changing
    LOOKS = 16                          # looks at positions that the shipper is storing

cdef uint64_t MAGIC = 0x0031647262676E65        # "engbrd1"
cdef size_t AREA = SLOTS_AT + SLOTS * sizeof(Slot)


cdef inline uint64_t mixed(uint64_t sum, uint64_t word) noexcept nogil:
    # zeros change it, too
    sum = (sum ^ word) * <uint64_t>0x9E3779B97F4A7C15 + <uint64_t>0xC2B2AE3D27D4EB4F
    return sum ^ sum >> 32


cdef inline uint64_t sum_of(uint64_t salt, const Acked *acked) noexcept nogil:
    cdef uint64_t sum = mixed(mixed(salt, acked.turn), acked.inode)
    sum = mixed(sum, acked.offset)
    sum = mixed(sum, acked.bytes)
    return mixed(sum, acked.lines)


cdef inline bint load_acked(const Acked *at, uint64_t salt, Acked *into) noexcept nogil:
    """Returns 1 if it is a whole position of this opening."""
    into.turn = relaxed(&at.turn)
    into.inode = relaxed(&at.inode)
    into.offset = <int64_t>relaxed(&at.offset)
    into.bytes = <int64_t>relaxed(&at.bytes)
    into.lines = <int64_t>relaxed(&at.lines)
    into.check = relaxed(&at.check)
    return into.check == sum_of(salt, into)


cdef str id_of(const Slot *slot):
    return slot.id[:ID].split(b"\0", 1)[0].decode(errors="replace")


@cython.final
cdef class Board:
    """The file and its bell, in a directory of their own.

    With `monitor`, they are made when missing, and a new generation begins: no slot is open, and
    `left` has the acknowledged positions of the earlier ones. Else both must exist. A board of
    another layout is replaced by the monitor; a shipper finds that its board is `replaced`.
    """

    def __cinit__(self, bytes directory not None, *, bint monitor):
        cdef struct_stat status
        cdef bytes path = directory + b"/board", bell = directory + b"/bell"
        self.fd = self.bell = -1
        self.monitor = monitor
        self._numbers = {}
        self._empty = []
        self._closed = {}
        self._left = {}
        if sizeof(Slot) != 384 or sizeof(Head) > BITS_AT:
            raise AssertionError("the layout of a board")
        if monitor:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            with suppress(FileExistsError):
                os.mkfifo(bell, 0o600)
        # for both, so that the FIFO always has a reader and a writer
        self.bell = open(bell, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW)
        if self.bell < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, bell)
        if fstat(self.bell, &status) < 0 or not S_ISFIFO(status.st_mode):
            raise FileExistsError(f"{os.fsdecode(bell)} is not a FIFO")
        if not self.map(path, False):
            if not monitor:
                raise FileNotFoundError(f"{os.fsdecode(path)}: no board of this layout")
            os.unlink(path)
            self.map(path, True)
        if monitor:
            self.begin()

    def __dealloc__(self):
        if self.area != NULL:
            munmap(self.area, AREA)
        close_own(self.fd)
        close_own(self.bell)

    cdef bint map(self, bytes path, bint fresh) except -1:
        """Map the file; returns False if it has another layout. `fresh`: give it this one."""
        cdef struct_stat status
        self.fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (O_CREAT if self.monitor else 0), 0o600)
        if self.fd < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, path)
        if fstat(self.fd, &status) < 0:
            PyErr_SetFromErrnoWithFilenameObject(OSError, path)
        fresh = fresh or (self.monitor and status.st_size == 0)
        if fresh:
            if ftruncate(self.fd, AREA) < 0:
                PyErr_SetFromErrnoWithFilenameObject(OSError, path)
            self.allocate(0, SLOTS_AT)
        elif status.st_size != <int64_t>AREA:
            close(self.fd)
            self.fd = -1
            return False
        self.area = <char *>mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_SHARED, self.fd, 0)
        if self.area == <char *>MAP_FAILED:
            self.area = NULL
            PyErr_SetFromErrnoWithFilenameObject(OSError, path)
        self.head = <Head *>self.area
        self.bits = <uint64_t *>(self.area + BITS_AT)
        self.slots = <Slot *>(self.area + SLOTS_AT)
        if fresh:
            store(&self.head.magic, MAGIC)
        elif load(&self.head.magic) != MAGIC or load(&self.head.ready) > SLOTS:
            munmap(self.area, AREA)
            self.area = NULL
            close(self.fd)
            self.fd = -1
            return False
        return True

    cdef int allocate(self, int64_t offset, int64_t size) except -1:
        cdef int failure = posix_fallocate(self.fd, offset, size)
        if failure:
            raise OSError(failure, f"the board of the shipper: {os.strerror(failure)}")
        return 0

    cdef int begin(self) except -1:
        """Begin a generation: close the slots of the last one. They keep their positions until they
        are used again, since this monitor may be killed before it has opened its spools."""
        cdef int number
        cdef Slot *slot
        cdef Acked acked
        for number in range(<int>self.head.used):
            slot = &self.slots[number]
            self.salts = max(self.salts, slot.salt)
            # an odd version: its opening was interrupted
            if not slot.id[0] or slot.version & 1 or not self.position(slot, &acked):
                self._empty.append(number)
                continue
            store(&slot.open, 0)
            id = id_of(slot)
            other = self._numbers.get(id)
            if other is not None and self.slots[<int>other].salt > slot.salt:
                self._empty.append(number)
                continue
            if other is not None:
                self._empty.append(other)
            self._numbers[id] = number
        self._left = dict.fromkeys(self._numbers.values())
        store(&self.head.generation, self.head.generation + 1)
        store(&self.head.scans, self.head.scans + 1)
        store(&self.head.sleeping, 1)   # so that it rings in any case
        self.ring()
        return 0

    @property
    def generation(self) -> int:
        """Number of the monitor that made the slots. Another one has made them again."""
        return load(&self.head.generation)

    @property
    def replaced(self) -> bool:
        """True if this file is no longer the board: its directory has been removed, or a monitor of
        another version has made another one."""
        cdef struct_stat status
        return fstat(self.fd, &status) < 0 or status.st_nlink == 0

    # --- the monitor ------------------------------------------------------------------------------

    def left(self) -> dict:
        """Positions (inode, offset, bytes, lines) up to which spools of earlier generations are
        acknowledged, by id, of those that have not been opened since."""
        return {id: self.last(id) for id, number in self._numbers.items() if number in self._left}

    def last(self, str id not None):
        """The newest such position of this container that the board has; None if it has none."""
        cdef Acked acked
        number = self._numbers.get(id)
        if number is None:
            return None
        self.position(&self.slots[<int>number], &acked)
        return acked.inode, acked.offset, acked.bytes, acked.lines

    def open(self, str id not None, tuple acked not None, int64_t written) -> int:
        """A slot for this container, whose spool is acknowledged up to the position `acked`
        (inode, offset, bytes, lines), and written up to the byte `written` since it began.

        Raises OSError when there is no room for another slot, ValueError for an id that is too
        long, or has an open slot.
        """
        cdef bytes text = id.encode()
        cdef int number
        cdef Slot *slot
        if not 0 < PyBytes_GET_SIZE(text) < ID or b"\0" in text:
            raise ValueError("an id has 1 to 71 bytes")
        own = self._numbers.get(id)
        if own is not None and own not in self._closed and own not in self._left:
            raise ValueError(f"{id} has an open slot")
        number = self.free()
        # not in its earlier slot, whose position would be lost if this monitor were killed
        # meanwhile
        slot = &self.slots[number]
        self._numbers[id] = number
        self.salts += 1
        store(&slot.version, slot.version | 1)
        fence()
        memset(slot.id, 0, ID)
        memcpy(slot.id, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        slot.open = 1
        slot.salt = self.salts
        slot.begun.turn = 0
        slot.begun.inode, slot.begun.offset, slot.begun.bytes, slot.begun.lines = acked
        slot.begun.check = sum_of(slot.salt, &slot.begun)
        put(&slot.written, written)
        put(&slot.lines, 0)
        fence()
        store(&slot.version, slot.version + 1)
        if own is not None and own != number:
            self._closed.pop(own, None)
            self._left.pop(own, None)
            self.empty(own)
        self.mark(number)
        self.ring()
        return number

    cdef int free(self) except -1:
        """The number of a slot to open. Positions are kept as long as there is room, those of
        earlier generations longest, as their spools may be opened soon."""
        cdef int number
        if self._empty:
            return self._empty.pop()
        if self.head.used >= (KEPT if self._closed else SLOTS) and (self._closed or self._left):
            closed = self._closed or self._left
            number = next(iter(closed))
            del closed[number]
            del self._numbers[id_of(&self.slots[number])]
            return number
        if self.head.used >= self.head.ready:
            self.grow()
        number = <int>self.head.used
        store(&self.head.used, number + 1)
        return number

    def settle(self) -> None:
        """All spools of earlier generations that still exist have been opened: the slots of the
        others may be used again."""
        self._closed.update(self._left)
        self._left.clear()

    cdef int empty(self, int number) except -1:
        """The closed slot is no container's."""
        cdef Slot *slot = &self.slots[number]
        store(&slot.version, slot.version | 1)
        fence()
        memset(slot.id, 0, ID)
        slot.open = 0
        fence()
        store(&slot.version, slot.version + 1)
        self._empty.append(number)
        self.mark(number)
        return 0

    def close(self, int slot) -> None:
        """The monitor writes no more to that spool. The slot keeps its content until it is opened
        for another one."""
        cdef Slot *closed = self.at(slot)
        if not closed.open:
            return
        store(&closed.open, 0)
        self._closed[slot] = None
        self.mark(slot)
        self.ring()

    cpdef void wrote(self, int slot, int64_t size, int64_t lines) noexcept nogil:
        """Count what was written to an open spool. Two stores, two atomic operations; a system call
        only if the shipper sleeps."""
        cdef Slot *opened = &self.slots[slot]
        put(&opened.written, opened.written + size)
        put(&opened.lines, opened.lines + lines)
        self.mark(slot)
        self.ring()

    cpdef int64_t acked(self, int slot) noexcept nogil:
        """Bytes of an open spool that are acknowledged, since it began."""
        cdef Acked found
        self.position(&self.slots[slot], &found)
        return found.bytes

    cpdef int64_t unacked(self, int slot) noexcept nogil:
        """Bytes of an open spool that are written and not acknowledged."""
        cdef int64_t left = self.slots[slot].written - self.acked(slot)
        return left if left > 0 else 0

    def rescan(self) -> None:
        """Have the shipper look at the deliveries on disk."""
        store(&self.head.scans, self.head.scans + 1)
        self.ring()

    cdef bint position(self, Slot *slot, Acked *found) noexcept nogil:
        """The newest position of the slot's opening. Returns 0 if there is none, since the opening
        was interrupted."""
        cdef Acked each
        cdef int index, turn
        if not load_acked(&slot.begun, slot.salt, found):
            memset(found, 0, sizeof(Acked))
            return False
        # Again, because the shipper may store both copies while they are read.
        for turn in range(LOOKS):
            for index in range(2):
                if load_acked(&slot.acks[index], slot.salt, &each) and each.turn > found.turn:
                    found[0] = each
            if found.turn:
                break
        return True

    cdef void mark(self, int slot) noexcept nogil:
        set_bits(&self.bits[slot // 64], <uint64_t>1 << (slot % 64))

    cdef void ring(self) noexcept nogil:
        cdef char byte = 1
        if load(&self.head.sleeping) and take(&self.head.sleeping):
            write(self.bell, &byte, 1)  # a full FIFO is heard as well

    cdef int grow(self) except -1:
        cdef uint64_t ready = self.head.ready
        if ready >= SLOTS:
            raise OSError(ENOSPC, "the board of the shipper has no free slot")
        self.allocate(SLOTS_AT + <int64_t>(ready * sizeof(Slot)), STEP * sizeof(Slot))
        store(&self.head.ready, ready + STEP)
        return 0

    cdef Slot *at(self, int number) except NULL:
        if not 0 <= number < <int64_t>load(&self.head.used):
            raise IndexError(f"the board has no slot {number}")
        return &self.slots[number]

    # --- the shipper ------------------------------------------------------------------------------

    def changed(self) -> list:
        """Numbers of the slots that have changed since the last call: opened, written or closed."""
        cdef list found = []
        cdef uint64_t bits
        cdef int word
        for word in range((<int>load(&self.head.used) + 63) // 64):
            if relaxed(&self.bits[word]):
                bits = take(&self.bits[word])
                while bits:
                    found.append(word * 64 + lowest(bits))
                    bits &= bits - 1
        return found

    def scans(self) -> int:
        """Grows with each `rescan`, and with each generation. `sleep` returns False until it is
        read."""
        self.seen = load(&self.head.scans)
        return self.seen

    def slot(self, int number) -> tuple:
        """(id, open, bytes written since the spool began, lines written since the slot was opened).
        A closed slot keeps its content until it is used again. The id is empty when the monitor is
        just changing the slot, which sets its bit again.

        After a new opening the shipper acknowledges its position again, since the monitor may know
        an older one only.
        """
        cdef Slot copy
        self.at(number)
        if not self.copy(number, &copy):
            return "", False, 0, 0
        return id_of(&copy), copy.open != 0, copy.written, copy.lines

    cdef bint copy(self, int slot, Slot *into) noexcept nogil:
        cdef uint64_t version
        cdef int turn
        for turn in range(TRIES):
            version = load(&self.slots[slot].version)
            if version & 1:
                continue
            memcpy(into, &self.slots[slot], sizeof(Slot))
            fence()
            if load(&self.slots[slot].version) == version:
                return into.id[0] != 0
        return False

    def ack(self, int slot, str id not None, uint64_t inode, int64_t offset, int64_t bytes, int64_t lines) -> bool:
        """Everything up to that position of the container's spool is delivered. Returns False, and
        stores nothing, if the slot is another container's.

        The newest call counts, also one that goes back: an operator may truncate a spool.
        """
        cdef Slot copy
        cdef Acked acked, first, second
        cdef Acked *into
        cdef object text = id.encode()
        self.at(slot)
        if PyBytes_GET_SIZE(text) >= ID or not self.copy(slot, &copy):
            return False
        if memcmp(copy.id, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text) + 1) != 0:
            return False
        # into the copy that is not valid, or the older one
        into = &self.slots[slot].acks[0]
        acked.turn = 1
        if load_acked(&copy.acks[1], copy.salt, &second):
            acked.turn = second.turn + 1
        if load_acked(&copy.acks[0], copy.salt, &first) and first.turn >= acked.turn - 1:
            acked.turn = first.turn + 1
            into = &self.slots[slot].acks[1]
        acked.inode, acked.offset, acked.bytes, acked.lines = inode, offset, bytes, lines
        acked.check = sum_of(copy.salt, &acked)
        put(&into.turn, acked.turn)
        put(&into.inode, acked.inode)
        put(&into.offset, acked.offset)
        put(&into.bytes, acked.bytes)
        put(&into.lines, acked.lines)
        store(&into.check, acked.check)
        return True

    def sleep(self) -> bool:
        """Announce that the shipper is going to wait for the bell. Returns False, and takes that
        back, if something has changed that it has not looked at."""
        cdef int word
        store(&self.head.sleeping, 1)
        if load(&self.head.scans) == self.seen:
            for word in range((<int>load(&self.head.used) + 63) // 64):
                if load(&self.bits[word]):
                    break
            else:
                return True
        store(&self.head.sleeping, 0)
        return False

    def wake(self) -> None:
        """The shipper is awake: the bell need not be rung, and is emptied."""
        cdef char bytes[256]
        store(&self.head.sleeping, 0)
        while read(self.bell, bytes, sizeof(bytes)) > 0:
            pass
