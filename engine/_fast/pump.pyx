# cython: language_level=3
"""The monitor's epoll loop. It moves output of processes to logs and attached clients, and input of
clients to processes.

`Loop` waits. `Stdio` is the streams of one process and its attached clients. All decisions about
processes (spawning, exits, the daemon) are made in `engine/monitor/process.py`, which is called
only for rare events.

The rules of the byte path:
- Output is read into one buffer of the loop, after 8 spare bytes, so that header and payload go to
  a client in one send(2) without a copy or an allocation. Output that a client does not accept is
  buffered for it (`Kept`), up to `BACKLOG`. Beyond that the stream is not read, which stalls its
  writer as a full pipe does. Other processes are not affected.
- Output does not follow the head of an answer before the client has read the head. docker-py reads
  the head through a buffer and the output past it, so it would lose output that came together with
  the head.
- When a single client on a Unix socket is the only receiver and the pipe contains much data, its
  pages are moved from the pipe to the socket with splice(2), whole frames at a time. If not all
  pages of a frame fit, the rest is read and sent, so that no other code sees half a frame.
- One event moves at most `READS` times `READ` bytes, so that a busy process does not starve the
  others.
- A log may be full (`Sink.full`): then its process's output is not read either. A timer looks at
  such logs, and only while there are any.
- An idle descriptor costs no time, because no code here iterates over all processes. A stream that
  must not be read is armed with EPOLLONESHOT and no events; otherwise epoll would report a hang-up
  again and again.

Owns:    every descriptor given to `Stdio.start` and `Stdio.attach`, until the end of the stream or
         of the client.
Threads: one. The GIL is released only in epoll_wait(2), because the monitor has no other thread.
Raises:  OSError when a descriptor cannot be watched. An error inside an event is written to stderr
         and ends that event only.
"""
import heapq
import os
import sys
import traceback

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close, read, write

from engine._fast.board cimport Board
from engine._fast.frames cimport DetachKeys, put_header
from engine._fast.linux cimport (
    AF_UNIX, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLONESHOT,
    EPOLLOUT, F_DUPFD_CLOEXEC, F_GETFL, F_GETPIPE_SZ, F_SETFL, F_SETPIPE_SZ, FIONREAD, M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD, MSG_DONTWAIT, MSG_NOSIGNAL, O_NONBLOCK, SHUT_RDWR, SHUT_WR, SIOCOUTQ, SO_DOMAIN, SO_SNDBUF,
    SO_SNDBUFFORCE, SOL_SOCKET, SPLICE_F_NONBLOCK, close_own, epoll_create1, epoll_ctl, epoll_event, epoll_wait, fcntl,
    getsockopt, ioctl, mallopt, recv, send, setsockopt, shutdown, socklen_t, splice,
)
from engine._fast.sink cimport Sink
from engine._fast.spool cimport PackedLog, Spool
from engine._fast.unlogged cimport Unlogged

cdef enum:
    HEADER = 8
    SPLICE = 32 << 10           # bytes in a pipe from which splice(2) is cheaper than copying
    BACKLOG = 512 << 10         # bytes buffered for a client before its process's stream is stalled
    BLOCK = 1 << 20  # capacity of a backlog: the limit, and the last read that exceeded it
    # size to which a busy pipe is enlarged; Linux's default for pipe-max-size
    PIPE = 1 << 20
    SEND_BUFFER = 1 << 20       # SO_SNDBUF of a client: a whole frame fits
    LINGER = 5                  # seconds that a TCP client may take to close after we shut down
    PEEKS = 600                 # looks whether a client has read the head of its answer: 12 s
    PEEK = 20                   # milliseconds between two of them, at most
    LOOK = 50                   # milliseconds between looks at a full log
    LOOK_SELDOM = 1000          # … and at one that only waits for the removal of a file

cdef int64_t SECOND = 1000000000


cdef int64_t monotonic() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * SECOND + now.tv_nsec


cdef class Source:
    """A descriptor in the loop. `ready` is called with the events, and never after `close`."""

    cdef int want(self, uint32_t events) except -1:
        """Wait for `events`, errors and hang-ups. With EPOLLONESHOT alone, wait for nothing; at
        most one hang-up is reported."""
        cdef epoll_event event
        if self.closed or (self.registered and self.events == events and not events & EPOLLONESHOT):
            return 0
        event.events = events
        event.data.ptr = <void *>self
        if epoll_ctl(self.loop.epoll, EPOLL_CTL_MOD if self.registered else EPOLL_CTL_ADD, self.fd, &event) < 0:
            PyErr_SetFromErrno(OSError)
        if not self.registered:
            self.registered = True
            self.loop.live.add(self)
        self.events = events
        return 0

    cdef int ignore(self) except -1:
        # epoll_wait may already have returned an event with our address, so the object outlives the
        # batch of events.
        cdef epoll_event event
        if self.registered:
            memset(&event, 0, sizeof(event))
            epoll_ctl(self.loop.epoll, EPOLL_CTL_DEL, self.fd, &event)
            self.registered = False
            self.loop.live.discard(self)
            self.loop.grave.append(self)
        return 0

    cdef int shut(self) except -1:
        """Remove the descriptor from epoll, then close it. After close(2) only, the daemon's
        duplicate would keep it in the epoll set.
        """
        if not self.closed:
            self.ignore()
            self.closed = True
            close(self.fd)
            self.fd = -1
        return 0

    cdef int ready(self, uint32_t events) except -1:
        raise NotImplementedError


cdef class Watch(Source):
    """A descriptor whose events call a Python callable. The caller keeps the descriptor."""

    cdef object callback

    def __init__(self, Loop loop not None, int fd, callback, uint32_t events=EPOLLIN):
        self.loop = loop
        self.fd = fd
        self.callback = callback
        self.want(events)

    cdef int ready(self, uint32_t events) except -1:
        self.callback(events)
        return 0

    def change(self, uint32_t events) -> None:
        self.want(events)

    def cancel(self) -> None:
        """Stop calling. Call before the descriptor is closed."""
        self.ignore()
        self.closed = True
        self.callback = None


cdef class Timer:
    """Calls once at `deadline` (ns, monotonic) unless cancelled."""

    cdef readonly int64_t deadline
    cdef object callback

    def __lt__(self, Timer other not None) -> bool:
        return self.deadline < other.deadline

    def cancel(self) -> None:
        self.callback = None


cdef class Loop:
    """Waits for descriptors and timers. `stall`: seconds after which a client that accepts no
    output is disconnected; 0: never."""

    def __cinit__(self, int stall=0):
        self.stall = stall
        self.live = set()
        self.grave = []
        self.blocked = set()
        self.held = {}
        self.waiting = set()
        self.timers = []
        self.now = monotonic()
        self.buffer = <char *>malloc(HEADER + READ)
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.epoll < 0:
            PyErr_SetFromErrno(OSError)
        if self.buffer == NULL:
            raise MemoryError
        # Return freed backlogs to the kernel, so that the idle monitor stays small.
        mallopt(M_MMAP_THRESHOLD, 512 << 10)
        mallopt(M_TRIM_THRESHOLD, 256 << 10)

    def __dealloc__(self):
        cdef int index
        close_own(self.epoll)
        free(self.buffer)
        for index in range(self.spares):
            free(self.spare[index])

    def watch(self, int fd, callback, uint32_t events=EPOLLIN) -> Watch:
        """Call `callback(events)` whenever `fd` has `events`, an error or a hang-up."""
        return Watch(self, fd, callback, events)

    def call_later(self, double seconds, callback) -> Timer:
        cdef Timer timer = Timer.__new__(Timer)
        timer.deadline = monotonic() + <int64_t>(seconds * SECOND)
        timer.callback = callback
        heapq.heappush(self.timers, timer)
        return timer

    def stop(self) -> None:
        self.stopped = True

    def release(self, uint64_t number) -> bool:
        """Start to send the held client `number` its output. Returns False when there is no such
        client."""
        cdef Client client = self.held.pop(number, None)
        if client is None:
            return False
        client.taking = READY
        client.progress = monotonic()
        if client.eof and client.ends_with_input():
            client.leave(False, True)
        else:
            client.go_on()
        return True

    def abandon(self, uint64_t number) -> None:
        """Close the held client `number`, because the connection that would have released it has
        ended."""
        cdef Client client = self.held.get(number)
        if client is not None:
            client.leave(False)

    def run(self) -> None:
        """Serve until `stop`."""
        cdef int count, index, timeout
        cdef Source source
        while not self.stopped:
            timeout = self.patience()
            with nogil:
                count = epoll_wait(self.epoll, self.batch, EVENTS, timeout)
            if count < 0 and errno != EINTR:
                PyErr_SetFromErrno(OSError)
            self.now = monotonic()
            for index in range(count):
                source = <Source>self.batch[index].data.ptr
                if source.registered:
                    try:
                        source.ready(self.batch[index].events)
                    except Exception:
                        traceback.print_exc()
                        sys.stderr.flush()
            source = None
            if self.grave:
                self.grave.clear()
            if self.timers:
                self.ring()
            if self.blocked:
                self.sweep()

    cdef int await_log(self, object stdio, bint soon) except -1:
        """Look at the log of this `Stdio` until it waits no more."""
        cdef int64_t wait = <int64_t>(LOOK if soon else LOOK_SELDOM) * 1000000
        self.waiting.add(stdio)
        if self.looking is not None and (<Timer>self.looking).deadline > monotonic() + wait:
            (<Timer>self.looking).cancel()
            self.looking = None
        if self.looking is None:
            self.looking = self.call_later(wait / <double>SECOND, self.look)
        return 0

    def look(self) -> None:
        cdef Stdio stdio
        cdef set waiting = self.waiting
        self.looking = None
        self.waiting = set()
        for each in waiting:
            stdio = each
            try:
                stdio.look()
            except Exception:
                traceback.print_exc()
                sys.stderr.flush()
                self.await_log(stdio, False)

    cdef int patience(self) except -2:
        """Milliseconds until the next timer or check of blocked clients; -1: none."""
        cdef int64_t wait = -1
        while self.timers and (<Timer>self.timers[0]).callback is None:
            heapq.heappop(self.timers)
        if self.timers:
            wait = (<Timer>self.timers[0]).deadline - monotonic()
            wait = 0 if wait < 0 else wait // 1000000 + 1
            if wait > 3600000:
                wait = 3600000
        if self.blocked and self.stall and (wait < 0 or wait > 1000):
            wait = 1000
        return <int>wait

    cdef int ring(self) except -1:
        cdef Timer timer
        cdef object callback
        while self.timers:
            timer = self.timers[0]
            if timer.callback is not None and timer.deadline > monotonic():
                break
            heapq.heappop(self.timers)
            callback = timer.callback
            timer.callback = None
            if callback is not None:
                try:
                    callback()
                except Exception:
                    traceback.print_exc()
                    sys.stderr.flush()
        return 0

    cdef int sweep(self) except -1:
        """Disconnect clients that have accepted nothing for too long; checks at most once a
        second."""
        cdef Client client
        if not self.stall or self.now - self.swept < SECOND:
            return 0
        self.swept = self.now
        for client in list(self.blocked):
            if self.now - client.progress > self.stall * SECOND:
                client.lose()
                client.leave(False)
        return 0

    # Take a backlog's block from the spares, so that a client that is always slightly behind causes
    # no allocation.

    cdef int keep(self, Kept *kept, const char *data, size_t size) except -1:
        cdef size_t room
        cdef char *grown
        if kept.data == NULL:
            if self.spares:
                self.spares -= 1
                kept.data = self.spare[self.spares]
            else:
                kept.data = <char *>malloc(BLOCK)
                if kept.data == NULL:
                    raise MemoryError
            kept.room = BLOCK
            kept.start = kept.used = 0
        if kept.start + kept.used + size > kept.room:
            if kept.start:
                memmove(kept.data, kept.data + kept.start, kept.used)
                kept.start = 0
            if kept.used + size > kept.room:
                room = 2 * (kept.used + size)
                grown = <char *>realloc(kept.data, room)
                if grown == NULL:
                    raise MemoryError
                kept.data = grown
                kept.room = room
        memcpy(kept.data + kept.start + kept.used, data, size)
        kept.used += size
        return 0

    cdef void drop(self, Kept *kept) noexcept:
        if kept.data != NULL:
            if kept.room == BLOCK and self.spares < SPARES:
                self.spare[self.spares] = kept.data
                self.spares += 1
            else:
                free(kept.data)
        kept.data = NULL
        kept.start = kept.used = kept.room = 0


cdef class Output(Source):
    """The read end of stdout or stderr, or a terminal's master."""

    cdef Stdio stdio
    cdef int stream
    cdef bint paused
    cdef bint busy              # the last read or splice was a large one
    cdef int64_t size           # of the pipe; 0: not a pipe, or one that cannot be enlarged

    cdef int ready(self, uint32_t events) except -1:
        cdef int turn
        for turn in range(READS):
            if self.paused or self.closed or (self.move() if self.busy else self.pull(READ)) < READ:
                break
        return 0

    cdef ssize_t move(self) except -1:
        """Like `pull`, but with splice(2) where possible: whole frames, to the only client, which
        has room for them."""
        cdef Client client = self.stdio.only(self.stream)
        cdef int left = 0, waiting = 0
        cdef ssize_t moved, size
        cdef bint gone
        if client is None or ioctl(self.fd, FIONREAD, &left) < 0 or left < SPLICE:
            return self.pull(READ)
        # a socket that epoll reports as writable has room for this
        size = min(left, READ, client.room >> 1)
        if ioctl(client.fd, SIOCOUTQ, &waiting) < 0:
            return self.pull(READ)
        if waiting + size > client.room:
            client.await_room()
            return 0
        if not client.raw:
            put_header(<unsigned char *>self.loop.buffer, self.stream, <uint32_t>size)
            moved = client.give(self.loop.buffer, HEADER)
            if moved != HEADER:
                return self.pull(READ) if moved == 0 else self.broken(client)
        left = <int>size
        while left:
            moved = splice(self.fd, NULL, client.fd, NULL, left, SPLICE_F_NONBLOCK)
            if moved > 0:
                left -= <int>moved
            elif moved == 0 or errno != EINTR:
                break
        gone = left and moved < 0 and errno != EAGAIN
        self.busy = size >= SPLICE
        self.grow(size)
        while left:  # the client is slow or gone: read the rest of the frame into its backlog
            moved = read(self.fd, self.loop.buffer, left)
            if moved > 0:
                if not gone:
                    self.loop.keep(&client.kept, self.loop.buffer, moved)
                left -= <int>moved
            elif moved == 0 or errno != EINTR:
                break
        if gone or (left and not client.raw):
            # Another process has read from the pipe meanwhile, which a container can do through
            # /proc. The announced frame cannot be completed, and later output must not be taken as
            # a part of it.
            return self.broken(client)
        if client.kept.used:
            client.progress = self.loop.now
            client.go_on()
        return size

    cdef ssize_t broken(self, Client client) except -1:
        client.lose()
        return 0

    cdef int grow(self, ssize_t size) except -1:
        """Enlarge a pipe that was found full."""
        if self.size and size >= self.size:
            self.size = fcntl(self.fd, F_SETPIPE_SZ, <int>PIPE)
            if self.size < 0 or self.size >= READ:
                self.size = 0
        return 0

    cdef ssize_t pull(self, size_t limit) except -1:
        """Read once and pass the data on. Returns 0 if there is no data, or if the stream has
        ended, in which case it is closed.
        """
        cdef Unlogged unlogged = self.loop.unlogged if self.stdio.slot >= 0 else None
        cdef char *payload = self.loop.buffer + HEADER
        cdef ssize_t size
        cdef uint64_t inode = 0
        cdef int64_t offset = 0
        if unlogged is not None:
            self.stdio.log.place(&inode, &offset)
            payload = unlogged.chunk
            unlogged.begin(self.stdio.slot, self.stream, inode, offset)
        while True:
            size = read(self.fd, payload, limit)
            if size >= 0 or errno != EINTR:
                break
        if size <= 0:
            if unlogged is not None:
                unlogged.done()             # a plain store: errno is preserved
            if size < 0 and errno == EAGAIN:
                return 0
            self.stdio.output_ended(self)   # a terminal ends with EIO
            return 0
        if unlogged is not None:
            unlogged.came(size)
        self.busy = size >= SPLICE
        self.grow(size)
        try:
            self.stdio.spread(self.stream, payload, size)
        finally:
            if unlogged is not None:
                unlogged.done()
                unlogged.clear(size)
        return size

    cdef int pause(self, bint paused) except -1:
        if paused != self.paused:
            self.paused = paused
            self.want(EPOLLONESHOT if paused else EPOLLIN)
        return 0

    cdef int drain(self) except -1:
        """Read everything that is in the pipe now, even if clients are slow. The pipe's size limits
        the amount."""
        cdef int left = 0
        cdef ssize_t size
        if ioctl(self.fd, FIONREAD, &left) < 0:
            left = 0
        if self.stdio.tty:
            # The line discipline is filled asynchronously, so FIONREAD does not count all data.
            left = READ
        while left > 0 and not self.closed:
            size = self.pull(READ if left > READ else left)
            if size == 0:
                break
            left -= size
        if not self.closed:
            self.pull(READ)             # reads end of file
        return 0


cdef class Input(Source):
    """The write end of stdin, or a duplicate of a terminal's master. `finishing`: close it once its
    backlog is written."""

    cdef Stdio stdio
    cdef Kept kept
    cdef bint finishing
    cdef bint enlarged

    def __dealloc__(self):
        free(self.kept.data)

    cdef int put(self, const char *data, size_t size) except -1:
        cdef ssize_t written = 0
        if self.closed or self.finishing or size == 0:
            return 0
        if self.kept.used == 0:
            written = self.give(data, size)
            if written < 0:
                return 0
            if <size_t>written == size:
                return 0
            if not self.enlarged and size >= <size_t>READ >> 2:
                self.enlarged = True
                fcntl(self.fd, F_SETPIPE_SZ, <int>PIPE)
        self.loop.keep(&self.kept, data + written, size - written)
        self.want(EPOLLOUT)
        return 0

    cdef ssize_t give(self, const char *data, size_t size) except -2:
        cdef ssize_t written
        while True:
            written = write(self.fd, data, size)
            if written >= 0:
                return written
            if errno == EAGAIN:
                return 0
            if errno != EINTR:
                self.end()
                return -1

    cdef int ready(self, uint32_t events) except -1:
        cdef ssize_t written
        if self.kept.used == 0:
            return 0
        written = self.give(self.kept.data + self.kept.start, self.kept.used)
        if written < 0:
            return 0
        self.kept.start += written
        self.kept.used -= written
        if self.kept.used == 0:
            self.loop.drop(&self.kept)
            if self.finishing:
                self.end()
            else:
                self.want(EPOLLONESHOT)
                self.stdio.listen()
        return 0

    cdef int finish(self) except -1:
        """End of input: close once everything is written."""
        if not self.closed and not self.finishing:
            if self.kept.used == 0:
                self.end()
            else:
                self.finishing = True
        return 0

    cdef int end(self) except -1:
        if not self.closed:
            self.shut()
            self.loop.drop(&self.kept)
            self.stdio.input_ended()
        return 0


cdef enum Taking:
    # How a client takes output.
    READY                       # at once, after its backlog
    HELD                        # not before `Loop.release`
    UNREAD                      # not before it has read the head, which is still in its socket
    BEHIND                      # its socket is too full to splice a frame into it: streams stall
    LOST                        # no more


cdef class Client(Source):
    """An attached client's socket. It outlives its process until it has received all output."""

    cdef Stdio stdio
    cdef readonly uint64_t number
    cdef int streams            # bit 1 << stream for each one requested
    cdef bint stdin
    cdef bint raw
    cdef Taking taking
    cdef bint peeking           # a timer looks whether it is still UNREAD
    cdef int peeks              # how often that was looked
    cdef bint eof               # it has shut down its sending side
    cdef bint ending            # no more output follows: close after the backlog is sent
    cdef bint lingering         # the monitor has shut down its side, the peer has not yet
    cdef bint plain             # a Unix socket: close(2) loses no sent data
    cdef int room               # bytes that the kernel allows in its socket (SO_SNDBUF)
    cdef DetachKeys keys
    cdef bytes early
    cdef Kept kept
    cdef int64_t progress       # when it last accepted output

    def __dealloc__(self):
        free(self.kept.data)

    cdef ssize_t give(self, const char *data, size_t size) except -2:
        """send(2); returns the bytes sent, or -1 when the client is gone."""
        cdef ssize_t sent
        while True:
            sent = send(self.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent >= 0:
                return sent
            if errno == EAGAIN:
                return 0
            if errno != EINTR:
                return -1

    cdef int deliver(self, const char *data, size_t size) except -1:
        cdef ssize_t sent = 0
        if self.kept.used == 0:
            if self.taking != HELD and not self.awaits_reading():
                sent = self.give(data, size)
                if sent < 0:
                    self.lose()
                    return 0
                if <size_t>sent == size:
                    return 0
            self.progress = self.loop.now
        self.loop.keep(&self.kept, data + sent, size - sent)
        if self.taking == UNREAD:
            self.peek_later()
        elif self.taking != HELD:
            self.loop.blocked.add(self)
            self.go_on()
        return 0

    cdef bint awaits_reading(self) noexcept:
        """True until the peer has read the head of the answer."""
        cdef int waiting = 0
        if self.taking == UNREAD and (self.peeks == PEEKS or ioctl(self.fd, SIOCOUTQ, &waiting) < 0 or waiting == 0):
            self.taking = READY
        return self.taking == UNREAD

    cdef int peek_later(self) except -1:
        if not self.peeking:
            self.peeking = True
            self.peeks += 1
            self.loop.call_later(min(self.peeks, PEEK) / 1000., self.peek)
        return 0

    def peek(self) -> None:
        self.peeking = False
        if self.closed or self.lingering:
            return
        if self.awaits_reading():
            self.peek_later()
        else:
            self.progress = monotonic()
            self.go_on()

    cdef int go_on(self) except -1:
        """Wait for the events that this client can handle now."""
        cdef uint32_t events = 0
        if self.closed or self.lingering:
            return 0
        if self.ending and self.kept.used == 0 and self.taking != HELD:
            self.conclude()
            return 0
        if self.taking == BEHIND or (self.taking == READY and self.kept.used):
            self.loop.blocked.add(self)
            events |= EPOLLOUT
        if not self.ending and not self.eof and (not self.stdin or self.stdio.hears()):
            events |= EPOLLIN
        self.want(events if events or self.taking != LOST else EPOLLONESHOT)
        return 0

    cdef int ready(self, uint32_t events) except -1:
        if self.lingering:
            self.await_close()
            return 0
        if events & (EPOLLERR | EPOLLHUP) and self.taking != LOST:
            self.lose()
        if events & EPOLLOUT and not self.closed:
            if self.taking == BEHIND:
                self.caught_up()
            if self.taking == READY and self.kept.used:
                self.flush()
        if events & EPOLLIN and not self.closed and self.events & EPOLLIN:
            self.hear()
        return 0

    cdef int await_room(self) except -1:
        """Stall the streams until the socket has room again (a Unix socket: when three quarters of
        it are free, unix(7))."""
        if self.taking != BEHIND:
            self.taking = BEHIND
            self.progress = self.loop.now
            self.go_on()
            self.stdio.go_on()
        return 0

    cdef int caught_up(self) except -1:
        self.taking = READY
        if self.kept.used == 0:
            self.loop.blocked.discard(self)
        self.go_on()
        self.stdio.go_on()
        return 0

    cdef int flush(self) except -1:
        cdef ssize_t sent = self.give(self.kept.data + self.kept.start, self.kept.used)
        if sent < 0:
            self.lose()
            return 0
        if sent:
            self.progress = self.loop.now
        self.kept.start += sent
        self.kept.used -= sent
        if self.kept.used == 0:
            self.loop.drop(&self.kept)
            self.loop.blocked.discard(self)
            self.go_on()
        if self.kept.used <= <size_t>BACKLOG >> 1:
            self.stdio.go_on()
        return 0

    cdef int hear(self) except -1:
        """Read once from the client, and write to the process's stdin or discard."""
        cdef char *data = self.loop.buffer
        cdef bytes held
        cdef ssize_t size
        while True:
            size = recv(self.fd, data, READ, MSG_DONTWAIT)
            if size >= 0 or errno != EINTR:
                break
        if size < 0:
            if errno != EAGAIN:
                self.lose()
                if not self.closed:
                    self.leave(False)
            return 0
        if size == 0:
            self.eof = True
            if self.stdin and self.keys is not None and self.stdio.input is not None:
                # the beginning of the detach keys that was held back; it cannot be completed now
                held = self.keys.held()
                self.stdio.input.put(PyBytes_AS_STRING(held), PyBytes_GET_SIZE(held))
            if self.ends_with_input():
                if self.taking == HELD:
                    self.go_on()        # `Loop.release` ends it
                else:
                    self.leave(False, True)
                return 0
            if self.stdin:
                self.stdio.client_input_ended()
            if self.taking == LOST:
                self.leave(False)
            else:
                self.go_on()
            return 0
        if self.stdin:
            self.type(data, size)
        return 0

    cdef bint ends_with_input(self):
        """True if the end of its input ends this client, as in Docker. False if it only closes the
        process's stdin."""
        return self.stdin and (self.stdio.tty or not self.stdio.stdin_once)

    cdef int type(self, const char *data, size_t size) except -1:
        """Write typed bytes to the process, and look for the detach keys."""
        cdef Input into = self.stdio.input
        cdef bytes forward
        if self.keys is None or self.keys.passes(data, size):
            if into is not None:
                into.put(data, size)
        else:
            forward, _ = self.keys.feed(data[:size])
            if into is not None:
                into.put(PyBytes_AS_STRING(forward), PyBytes_GET_SIZE(forward))
            if self.keys.detached:
                self.leave(True)
                return 0
        if into is not None and into.kept.used:
            self.stdio.listen()
        return 0

    cdef int begin(self) except -1:
        """Called when the process runs. Bytes that came with the request are its first input."""
        cdef bytes early = self.early
        self.early = b""
        if early and self.stdin and not self.closed:
            self.type(PyBytes_AS_STRING(early), PyBytes_GET_SIZE(early))
        self.go_on()
        return 0

    cdef int lose(self) except -1:
        """Mark that the client accepts no more output. It is kept until the input that it sent
        before has been read.
        """
        cdef bint held = self.taking == HELD
        self.taking = LOST
        self.streams = 0
        self.loop.drop(&self.kept)
        self.loop.blocked.discard(self)
        if held or self.ending or not self.stdin or self.eof or (self.stdio.running and self.stdio.input is None):
            self.leave(False)
        else:
            self.go_on()
            self.stdio.go_on()
        return 0

    cdef int leave(self, bint by_keys, bint flush=False) except -1:
        """End this client before its process ends. If it detached by keys, or with `flush`, its
        backlog is sent first."""
        cdef bint ending = self.ending
        if self.closed:
            return 0
        self.streams = 0
        self.ending = True
        if self.taking == HELD:
            self.taking = READY
        self.loop.held.pop(self.number, None)
        if self in self.stdio.clients:
            self.stdio.clients.remove(self)
        if (by_keys or flush) and self.taking != LOST:
            self.go_on()
        else:
            self.loop.drop(&self.kept)
            self.loop.blocked.discard(self)
            self.shut()
        if not ending:
            if self.stdin and not by_keys:
                self.stdio.client_input_ended()
            self.stdio.go_on()
            self.stdio.owner.detached(self.number, by_keys)
        return 0

    cdef int forsake(self) except -1:
        """Undo a failed attach. The descriptor stays open and belongs to the caller."""
        self.ignore()
        self.closed = True
        self.fd = -1
        self.loop.drop(&self.kept)
        self.loop.blocked.discard(self)
        self.loop.held.pop(self.number, None)
        if self in self.stdio.clients:
            self.stdio.clients.remove(self)
        return 0

    cdef int end(self) except -1:
        """Called when no more output follows."""
        if not self.closed and not self.ending:
            self.ending = True
            if self.taking == LOST:
                self.shut()
            else:
                self.go_on()
        return 0

    cdef int conclude(self) except -1:
        """Called when everything has been sent. Reads and discards unread input, because closing
        with unread input would reset the connection.
        """
        self.loop.blocked.discard(self)     # BEHIND, without a backlog
        if self.plain:
            shutdown(self.fd, SHUT_RDWR)
            while recv(self.fd, self.loop.buffer, READ, MSG_DONTWAIT) > 0:
                pass
            self.shut()
        else:
            shutdown(self.fd, SHUT_WR)
            self.lingering = True
            self.want(EPOLLIN)
            self.loop.call_later(LINGER, self.cut)
        return 0

    cdef int await_close(self) except -1:
        cdef ssize_t size = recv(self.fd, self.loop.buffer, READ, MSG_DONTWAIT)
        if size == 0 or (size < 0 and errno != EAGAIN and errno != EINTR):
            self.shut()
        return 0

    def cut(self) -> None:
        self.shut()


cdef class Stdio:
    """The streams of one process, before, while and after it runs, and its clients.

    The life of one, for a client that attaches before the start:

        stdio = Stdio(loop, owner)
        stdio.attach(socket, ...)           # nothing runs: it waits; more may come at any time
        stdio.start(0, 1, 2, -1, ...)       # the descriptors are taken over, output is read
        stdio.begin()                       # the daemon knows: input of clients is read too
        ...                                 # output goes to the log, then to each client
        stdio.finish(grace)                 # the process has exited: the pipes are read to the end
        owner.drained()                     # called: all is logged and passed on
        stdio.dismiss()                     # the exit is reported: clients get their end of stream

    With `hold` a client gets nothing until `Loop.release`: the daemon first sends it the log up to
    the position that it had at `attach`.

    Calls of `owner`: `detached(number, keys)` when a client left before the process's end;
    `input_ended()` when stdin was closed while the process runs; `rotated()` when a file of the log
    can be packed; `dropped(lines)` when entries could not be written to the log; `drained()` after
    `finish`, once the last output has been read, logged and passed to the clients' sockets or
    backlogs. The owner then ends their streams (`dismiss`).
    """

    cdef Loop loop
    cdef public object owner
    cdef list clients
    cdef Output out
    cdef Output err
    cdef Input input
    cdef Sink log
    cdef int slot               # of `Loop.unlogged`, -1: none
    cdef int unfinished         # streams with a line in the slot: bit 1 << stream
    cdef int halves             # which half of the slot has the stream's line
    cdef list watchers
    cdef Timer grace
    cdef readonly bint running
    cdef readonly bint tty
    cdef bint stdin_once
    cdef bint finishing

    def __init__(self, Loop loop not None, owner):
        self.loop = loop
        self.owner = owner
        self.clients = []
        self.slot = -1

    @property
    def attached(self) -> int:
        """Number of clients."""
        return len(self.clients)

    def descriptors(self) -> tuple:
        """Letters as in `messages.State`, and the descriptors that are still open, in the same
        order.
        """
        cdef list fds = []
        cdef str letters = ""
        if self.tty:
            return ("t", [self.out.fd]) if self.out is not None else ("", [])
        if self.input is not None:
            letters += "i"
            fds.append(self.input.fd)
        if self.out is not None:
            letters += "o"
            fds.append(self.out.fd)
        if self.err is not None:
            letters += "e"
            fds.append(self.err.fd)
        return letters, fds

    def position(self) -> tuple:
        """(inode, offset) of the log's end; (0, 0) without a log."""
        return self.log.position() if self.log is not None else (0, 0)

    def watch_log(self, uint64_t inode, int64_t offset, callback) -> None:
        """Call `callback()` once the log's end differs from that position, or the process has
        ended."""
        if not self.running or self.log is None or self.log.position() != (inode, offset):
            callback()
        else:
            if self.watchers is None:
                self.watchers = []
            self.watchers.append((inode, offset, callback))

    def follow_log(self, uint64_t number, uint64_t inode) -> None:
        """The reader `number` of the log holds its files open up to `inode`: `LogWriter.follow`.

        An `inode` of 0 registers the reader, which shall find all output until now: what is in the
        pipes is read first.
        """
        if inode == 0 and self.out is not None:
            self.out.ready(EPOLLIN)
        if inode == 0 and self.err is not None:
            self.err.ready(EPOLLIN)
        if self.log is not None:
            self.log.follow(number, inode)

    def unfollow_log(self, uint64_t number) -> None:
        """Called when that reader has finished."""
        if self.log is not None:
            self.log.unfollow(number)

    def replace_log(self, uint64_t inode, bytes packed not None) -> bool:
        """`packed` is the rotated file `inode` of the log, packed: `PackedLog.replace`."""
        return isinstance(self.log, PackedLog) and self.log.replace(inode, packed)

    def move_log(self, Board board not None) -> None:
        """The log goes on with another board: `Spool.move`. Raises OSError."""
        if isinstance(self.log, Spool):
            self.log.move(board)

    def unwatch_log(self, callback) -> None:
        """Remove the watch with that `callback`."""
        if self.watchers is not None:
            self.watchers = [watcher for watcher in self.watchers if watcher[2] is not callback] or None

    def attach(
        self, int fd, bint stdin, bint stdout, bint stderr, bint raw, bytes head, bytes early, bytes detach_keys,
        bint hold
    ) -> int:
        """Add the socket `fd` as a client; returns its number. From now on output is buffered for
        it; `head` is sent first.

        Takes ownership of `fd`, unless it raises (OSError, MemoryError).
        """
        cdef Client client = Client.__new__(Client)
        cdef int domain = 0, wanted = SEND_BUFFER, size = 0
        cdef socklen_t length = sizeof(int)
        cdef ssize_t sent
        cdef int stream
        cdef bytes pending
        client.loop = self.loop
        client.stdio = self
        if stdin and raw and detach_keys:
            client.keys = DetachKeys(detach_keys)
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK)
        getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length)
        client.plain = domain == AF_UNIX
        length = sizeof(int)
        if client.plain and getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, &length) == 0 and size < wanted:
            if setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &wanted, sizeof(wanted)) < 0:
                setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof(wanted))
        if client.plain:
            length = sizeof(int)
            getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &client.room, &length)
        self.loop.last_client += 1
        client.number = self.loop.last_client
        client.stdin = stdin
        client.streams = (stdout << 1) | (stderr << 2)
        client.raw = raw
        client.early = early
        client.taking = HELD if hold else READY
        client.progress = monotonic()
        client.fd = fd
        self.clients.append(client)
        try:
            if hold:
                self.loop.held[client.number] = client
            if head:
                sent = client.give(PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head))
                if sent < 0:
                    client.lose()
                elif sent < PyBytes_GET_SIZE(head):
                    self.loop.keep(&client.kept, PyBytes_AS_STRING(head) + sent, PyBytes_GET_SIZE(head) - sent)
                elif client.plain and not hold:
                    client.taking = UNREAD
            if hold and self.log is not None:
                # The bytes of an unfinished line that were read before this client attached are not
                # in the log yet.
                for stream in range(1, 3):
                    pending = self.log.pending(stream)
                    if pending and client.streams & (1 << stream) and not client.closed:
                        if not raw:
                            put_header(<unsigned char *>self.loop.buffer, stream, <uint32_t>len(pending))
                            self.loop.keep(&client.kept, self.loop.buffer, HEADER)
                        self.loop.keep(&client.kept, PyBytes_AS_STRING(pending), PyBytes_GET_SIZE(pending))
            if self.running:
                client.begin()
            else:
                client.go_on()
        except BaseException:           # for example, epoll has no room: leave no half client
            # The client has already left. Its descriptor is closed; the caller must not close it.
            if client.closed:
                return client.number
            client.forsake()
            raise
        return client.number

    def start(self, int stdin, int stdout, int stderr, int terminal, bint stdin_once, Sink log, bytes key=b"") -> None:
        """Called when the process runs, with these descriptors (-1: none). Input of its clients is
        not read until `begin`.

        Takes ownership of the descriptors and `log`, unless it raises OSError. `key`: with a log,
        its unwritten part is kept under that name in `Loop.unlogged`.
        """
        cdef int duplicate, stream
        try:
            if terminal >= 0:
                self.out = self.open_output(terminal, 1)
                duplicate = fcntl(terminal, F_DUPFD_CLOEXEC, 3)
                if duplicate < 0:
                    PyErr_SetFromErrno(OSError)
                self.input = self.open_input(duplicate)
            else:
                if stdout >= 0:
                    self.out = self.open_output(stdout, 1)
                if stderr >= 0:
                    self.err = self.open_output(stderr, 2)
                if stdin >= 0:
                    self.input = self.open_input(stdin)
        except BaseException:
            for output in (self.out, self.err):
                if output is not None:
                    (<Source>output).ignore()
                    (<Source>output).closed = True
            self.out = self.err = None
            self.input = None
            raise
        self.running = True
        self.tty = terminal >= 0
        self.stdin_once = stdin_once
        self.log = log
        if log is not None and key and self.loop.unlogged is not None:
            self.slot = self.loop.unlogged.take(key)
            self.loop.unlogged.number += 1      # lines that the log resumed with
            for stream in range(1, 3):
                self.secure(stream)
            self.loop.unlogged.name(self.slot, key)

    def begin(self) -> None:
        """Start to read the input of clients that waited for the process, and its output as far as
        the clients have room.
        """
        cdef Client client
        for client in list(self.clients):
            client.begin()
        if self.log is not None and self.log.waits:
            self.loop.await_log(self, self.log.full)
        self.go_on()

    def finish(self, double grace) -> None:
        """Called when the process has exited: read the remaining output. Children that keep its
        streams open may write for `grace` more seconds.
        """
        cdef Output output
        self.finishing = True
        for output in (self.out, self.err):
            if output is not None:
                output.drain()
        if self.out is None and self.err is None:
            self.ended()
        else:
            self.grace = self.loop.call_later(grace, self.expire)

    def expire(self) -> None:
        cdef Output output
        self.grace = None
        for output in (self.out, self.err):
            if output is not None:
                output.drain()
                if not output.closed:
                    self.output_ended(output)

    def dismiss(self) -> None:
        """Close all clients, because the process has ended or none will run."""
        cdef Client client
        for client in list(self.clients):
            client.end()
        self.clients.clear()

    # --- inside -----------------------------------------------------------------------------------

    cdef Output open_output(self, int fd, int stream):
        cdef Output output = Output.__new__(Output)
        cdef int64_t size
        output.loop = self.loop
        output.stdio = self
        output.fd = fd
        output.stream = stream
        size = fcntl(fd, F_GETPIPE_SZ)
        output.size = size if 0 < size < READ else 0
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK)
        output.want(EPOLLIN)
        return output

    cdef Input open_input(self, int fd):
        cdef Input into = Input.__new__(Input)
        into.loop = self.loop
        into.stdio = self
        into.fd = fd
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK)
        return into

    cdef bint hears(self):
        """Returns True if input of clients can be read now, because there is room for it or it will
        be discarded.
        """
        return self.running and (self.input is None or self.input.kept.used == 0)

    cdef int listen(self) except -1:
        cdef Client client
        cdef Py_ssize_t index
        for index in range(len(self.clients) - 1, -1, -1):
            client = <Client>self.clients[index]
            if client.stdin:
                client.go_on()
        return 0

    cdef int spread(self, int stream, char *payload, size_t size) except -1:
        """Pass one read of output to the log and to every client. `payload` has `HEADER` bytes of
        room before it."""
        cdef Client client
        cdef Py_ssize_t index = len(self.clients)
        cdef bint full = False
        cdef uint64_t outrun, turns, dropped
        if self.log is not None:
            outrun = self.log.outrun
            turns = self.log.turns
            dropped = self.log.dropped
            try:
                self.log.write_raw(stream, payload, size)
            except Exception as error:  # a failing log must not stop a process or its clients
                self.log_failed(error)
            if self.log.dropped != dropped:
                self.owner.dropped(self.log.dropped - dropped)
            if self.slot >= 0:
                self.secure(stream)
                self.loop.unlogged.done()
            if self.log.outrun != outrun:
                late = self.log.outrun - outrun
                print(
                    f"{os.fsdecode(self.log.path)}: rotation no longer waits for {late} readers, which are too slow",
                    file=sys.stderr, flush=True,
                )
            if self.log.turns != turns:
                self.owner.rotated()
            if self.log.waits:
                self.loop.await_log(self, self.log.full)
                full = self.log.full
            if self.watchers is not None:
                self.tell()
        if index == 0:
            if full:
                self.go_on()
            return 0
        put_header(<unsigned char *>payload - HEADER, stream, <uint32_t>size)
        while index:  # from the end, because a lost client is removed from the list
            index -= 1
            client = <Client>self.clients[index]
            if client.streams & (1 << stream):
                if client.raw:
                    client.deliver(payload, size)
                else:
                    client.deliver(payload - HEADER, HEADER + size)
                full = full or client.kept.used >= BACKLOG
        if full:
            self.go_on()
        return 0

    cdef int log_failed(self, error) except -1:
        """Report it once: the log raises only the first error of a series."""
        if isinstance(error, OSError):
            print(f"{error.filename}: {error.strerror}; lines of output are lost", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
            sys.stderr.flush()
        return 0

    cdef int secure(self, int stream) except -1:
        """Store the stream's unfinished line for the next monitor (`Loop.unlogged`)."""
        cdef size_t size = 0
        cdef const char *line = self.log.unfinished(stream, &size)
        cdef int bit = 1 << stream
        if size or self.unfinished & bit:
            self.halves ^= bit
            self.loop.unlogged.put(self.slot, stream, (self.halves & bit) != 0, line, size)
            self.unfinished = self.unfinished | bit if size else self.unfinished & ~bit
        return 0

    cdef Client only(self, int stream):
        """The only receiver of the stream, if splice(2) is possible: a client on a Unix socket
        without a backlog, and there is no log. Otherwise None.
        """
        cdef Client client
        if self.log is not None or self.tty or len(self.clients) != 1:
            return None
        client = <Client>self.clients[0]
        if not client.plain or client.taking == HELD or client.kept.used or not client.streams & (1 << stream):
            return None
        if client.awaits_reading():
            return None
        return client

    cdef int go_on(self) except -1:
        """Read the streams whose log and clients have room, and stall the others."""
        cdef Client client
        cdef int full = 6 if self.log is not None and self.log.full else 0
        for client in self.clients:
            if client.kept.used >= BACKLOG or client.taking == BEHIND:
                full |= client.streams
        if self.out is not None:
            self.out.pause((full & 2) != 0)
        if self.err is not None:
            self.err.pause((full & 4) != 0)
        return 0

    def look(self) -> None:
        """Called by a timer while the log waits."""
        if self.log is not None:
            if self.log.look():
                self.loop.await_log(self, self.log.full)
            if not self.log.full:
                self.go_on()

    cdef int tell(self) except -1:
        cdef tuple position = self.log.position()
        cdef list watchers = self.watchers
        cdef list left = []
        self.watchers = None
        for watcher in watchers:
            if (watcher[0], watcher[1]) == position:
                left.append(watcher)
            else:
                watcher[2]()
        if left:
            self.watchers = left if self.watchers is None else left + self.watchers
        return 0

    cdef int output_ended(self, Output output) except -1:
        output.shut()
        if output is self.out:
            self.out = None
        else:
            self.err = None
        if self.finishing and self.out is None and self.err is None:
            self.ended()
        return 0

    cdef int input_ended(self) except -1:
        self.input = None
        if not self.finishing:
            self.listen()
            self.owner.input_ended()
        return 0

    cdef int client_input_ended(self) except -1:
        """Called when a client has ended its input. With `stdin_once` the process's stdin is
        closed, unless it is a terminal.
        """
        if self.running and self.stdin_once and not self.tty and self.input is not None:
            self.input.finish()
        return 0

    cdef int ended(self) except -1:
        """Called when all output has been read."""
        cdef list watchers = self.watchers
        cdef uint64_t dropped
        if not self.running:
            return 0
        self.running = False
        self.watchers = None
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None
        if self.input is not None:
            self.input.end()
        if self.log is not None:
            dropped = self.log.dropped
            try:
                self.log.end()
                self.log.close()
            except Exception as error:
                self.log_failed(error)
            if self.log.dropped != dropped:
                self.owner.dropped(self.log.dropped - dropped)
            self.log = None
            if self.slot >= 0:
                self.loop.unlogged.give_back(self.slot)
                self.slot = -1
        # The owner ends the clients' streams when it has reported the exit, because a client may
        # ask for the exit code as soon as its stream ends.
        self.owner.drained()
        for watcher in watchers or ():
            watcher[2]()
        return 0
