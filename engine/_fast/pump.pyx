# cython: language_level=3
"""The monitor's epoll loop: output of processes to logs and attached clients, input of clients to processes.

`Loop` waits, `Stdio` is the streams of one process and its attached clients, `Relay` passes connections by IPv6 on. All decisions
about processes (spawning, exits, the daemon) are `engine/monitor/process.py`'s, which is called only for rare events. `spawn`, `read_only`, `exit_of`
and `become_subreaper` are the system interfaces that Python's `os` lacks: a vfork with a working directory, a resource limit and a mount
namespace, a mount that nobody can write through, the exit status of a process that is not a child, and prctl(2).

The rules of the byte path:
- Output is read into one buffer of the loop, behind 8 spare bytes, so header and payload go to a client in one send(2) without a
  copy or an allocation. What a client does not take is kept for it (`Kept`), up to `BACKLOG`; beyond it the stream is not read any
  more, which stalls its writer as a full pipe does, and nobody else.
- Where one client at a Unix socket is all there is to feed and much waits in the pipe, the pages go from the pipe to the socket as they are
  (splice(2)), whole frames at a time: a frame whose pages did not all fit is finished by reading, so that no other code meets half a frame.
- One event moves at most `READS` times `READ` bytes, so that a busy process leaves the others their turn.
- A silent descriptor costs no time: nothing here walks all processes. A stream that must not be read is armed with EPOLLONESHOT and no events, because
  a hang-up would otherwise be reported without end.

Owns:    every descriptor given to `Stdio.start`, `Stdio.attach` and `Relay`, until the end of the stream, of the client, of the relay.
Threads: one. The GIL is released in epoll_wait(2) alone: the monitor has no other thread.
Raises:  OSError when a descriptor cannot be watched. What fails inside an event is written to stderr and ends that event only.
"""
import heapq
import os
import sys
import traceback

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, ECONNABORTED, EINPROGRESS, EINTR, errno
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.types cimport pid_t
from posix.unistd cimport close, read, write

from engine._fast.frames cimport DetachKeys, put_header
from engine._fast.jsonlog cimport LogWriter
from engine._fast.linux cimport (
    AF_INET, AF_INET6, AF_UNIX, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLONESHOT,
    EPOLLOUT, F_DUPFD_CLOEXEC, F_GETFL, F_GETPIPE_SZ, F_SETFL, F_SETPIPE_SZ, FIONREAD, IPPROTO_TCP, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD,
    MSG_DONTWAIT, MSG_NOSIGNAL, O_NONBLOCK, SHUT_RDWR, SHUT_WR, SIOCOUTQ, SO_DOMAIN, SO_ERROR, SO_KEEPALIVE, SO_LINGER, SO_SNDBUF,
    SO_SNDBUFFORCE, SOCK_CLOEXEC, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET, SPLICE_F_NONBLOCK, TCP_KEEPIDLE, TCP_NODELAY, accept4, connect,
    epoll_create1, epoll_ctl, epoll_event, epoll_wait, fcntl, getsockname, getsockopt, ioctl, linger, mallopt, recv, send, setsockopt,
    shutdown, sockaddr_in, sockaddr_in6, socket, socklen_t, splice,
)

cdef enum:
    HEADER = 8
    READ = 256 << 10            # bytes of one read(2)
    READS = 4                   # reads of one event, while each comes back full
    SPLICE = 32 << 10           # bytes in a pipe from which moving its pages costs less than copying them
    BACKLOG = 512 << 10         # bytes kept for a client before its process's stream is stalled
    BLOCK = 1 << 20             # room of a backlog: the limit, and the last read that exceeded it
    SPARES = 2                  # blocks that outlive their backlog, to be used by the next one
    PIPE = 1 << 20              # size to which a busy pipe is enlarged; Linux's default for pipe-max-size
    SEND_BUFFER = 1 << 20       # SO_SNDBUF of a client: a whole frame fits
    EVENTS = 64
    LINGER = 5                  # seconds that a TCP client gets to close after us
    ACCEPTS = 16                # connections that a relay takes before others have their turn
    KEEPALIVE = 60              # seconds of silence after which the kernel asks whether client and container still have their connection

cdef int64_t SECOND = 1000000000


cdef int64_t monotonic() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * SECOND + now.tv_nsec


cdef struct Kept:
    # Bytes that wait for a descriptor: data[start:start + used].
    char *data
    size_t start
    size_t used
    size_t room


cdef class Source:
    """A descriptor in the loop. `ready` is called with the events; a closed one is not called any more."""

    cdef Loop loop
    cdef readonly int fd
    cdef uint32_t events
    cdef bint registered
    cdef bint closed

    cdef int want(self, uint32_t events) except -1:
        """Wait for `events`, errors and hang-ups. With EPOLLONESHOT alone: for nothing, but at most one hang-up."""
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
        # The kernel may have handed out an event with our address already, so the object outlives the batch of events.
        cdef epoll_event event
        if self.registered:
            memset(&event, 0, sizeof(event))
            epoll_ctl(self.loop.epoll, EPOLL_CTL_DEL, self.fd, &event)
            self.registered = False
            self.loop.live.discard(self)
            self.loop.grave.append(self)
        return 0

    cdef int shut(self) except -1:
        """Leave the loop, then close: the daemon's duplicate would keep a merely closed descriptor in the epoll set."""
        if not self.closed:
            self.ignore()
            self.closed = True
            close(self.fd)
            self.fd = -1
        return 0

    cdef int ready(self, uint32_t events) except -1:
        raise NotImplementedError


cdef class Watch(Source):
    """A descriptor whose events go to a Python callable. The descriptor stays the caller's."""

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
        """No further call; to be done before the descriptor is closed."""
        self.ignore()
        self.closed = True
        self.callback = None


cdef class Timer:
    """One call at `deadline` (ns, monotonic) unless cancelled."""

    cdef readonly int64_t deadline
    cdef object callback

    def __lt__(self, Timer other not None) -> bool:
        return self.deadline < other.deadline

    def cancel(self) -> None:
        self.callback = None


cdef class Loop:
    """Waits for descriptors and timers. `stall`: seconds after which a client that took nothing of its output is disconnected; 0: never."""

    cdef int epoll
    cdef epoll_event batch[EVENTS]
    cdef char *buffer
    cdef char *spare[SPARES]
    cdef int spares
    cdef set live               # sources in epoll, which knows only their addresses
    cdef list grave             # sources that left it during this batch
    cdef set blocked            # clients with a backlog
    cdef dict held              # clients by number, until released
    cdef list timers
    cdef int64_t now
    cdef int64_t swept
    cdef uint64_t last_client
    cdef bint stopped
    cdef public int stall

    def __cinit__(self, int stall=0):
        self.stall = stall
        self.live = set()
        self.grave = []
        self.blocked = set()
        self.held = {}
        self.timers = []
        self.now = monotonic()
        self.buffer = <char *>malloc(HEADER + READ)
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.epoll < 0:
            PyErr_SetFromErrno(OSError)
        if self.buffer == NULL:
            raise MemoryError
        # Freed backlogs go back to the system: the monitor is judged by what it keeps when idle.
        mallopt(M_MMAP_THRESHOLD, 512 << 10)
        mallopt(M_TRIM_THRESHOLD, 256 << 10)

    def __dealloc__(self):
        cdef int index
        if self.epoll >= 0:
            close(self.epoll)
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

    def relay(self, int fd, bytes address not None, int most) -> Relay:
        """Serve the listening IPv6 socket `fd`, to which the rules of the host give connections for other ports (TPROXY): each goes on to its
        own port at the IPv4 `address` (4 bytes). At most so many at a time; others wait in the socket's queue.
        """
        return Relay(self, fd, address, most)

    def stop(self) -> None:
        self.stopped = True

    def release(self, uint64_t number) -> bool:
        """The held client `number` takes its output; False when there is none."""
        cdef Client client = self.held.pop(number, None)
        if client is None:
            return False
        client.held = False
        client.progress = monotonic()
        client.go_on()
        return True

    def abandon(self, uint64_t number) -> None:
        """Close the held client `number`: nobody is left to release it."""
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

    cdef int patience(self) except -2:
        """Milliseconds until the next timer or look at blocked clients; -1: none."""
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
        """Disconnect clients that have taken nothing for too long; at most once a second."""
        cdef Client client
        if not self.stall or self.now - self.swept < SECOND:
            return 0
        self.swept = self.now
        for client in list(self.blocked):
            if self.now - client.progress > self.stall * SECOND:
                client.lose()
                client.leave(False)
        return 0

    # A backlog's block is taken from the spares, so that a client that is always a little behind costs no allocation.

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
    cdef bint busy              # the last read or move was a large one
    cdef int64_t size           # of the pipe; 0: not a pipe, or one that may not grow

    cdef int ready(self, uint32_t events) except -1:
        cdef int turn
        for turn in range(READS):
            if self.paused or self.closed or (self.move() if self.busy else self.pull(READ)) < READ:
                break
        return 0

    cdef ssize_t move(self) except -1:
        """As `pull`, without a copy where that can be: whole frames, to one client that has room for them."""
        cdef Client client = self.stdio.only(self.stream)
        cdef int left = 0, waiting = 0
        cdef ssize_t moved, size
        cdef bint gone
        if client is None or ioctl(self.fd, FIONREAD, &left) < 0 or left < SPLICE:
            return self.pull(READ)
        size = min(left, READ, client.room >> 1)    # what the kernel calls writable has room for this
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
        while left:                     # the client is behind, or gone: in either case these bytes are its own
            moved = read(self.fd, self.loop.buffer, left)
            if moved > 0:
                if not gone:
                    self.loop.keep(&client.kept, self.loop.buffer, moved)
                left -= <int>moved
            elif moved == 0 or errno != EINTR:
                break
        if gone:
            return self.broken(client)
        if client.kept.used:
            client.progress = self.loop.now
            client.go_on()
        return size

    cdef ssize_t broken(self, Client client) except -1:
        client.lose()
        return 0

    cdef int grow(self, ssize_t size) except -1:
        """A pipe that was found full is made larger."""
        if self.size and size >= self.size:
            self.size = fcntl(self.fd, F_SETPIPE_SZ, <int>PIPE)
            if self.size < 0 or self.size >= READ:
                self.size = 0
        return 0

    cdef ssize_t pull(self, size_t limit) except -1:
        """Read once and hand it on; 0 when nothing is there, or the stream has ended (then it is closed)."""
        cdef char *payload = self.loop.buffer + HEADER
        cdef ssize_t size
        while True:
            size = read(self.fd, payload, limit)
            if size >= 0 or errno != EINTR:
                break
        if size < 0 and errno == EAGAIN:
            return 0
        if size <= 0:                   # a terminal ends with EIO
            self.stdio.output_ended(self)
            return 0
        self.busy = size >= SPLICE
        self.grow(size)
        self.stdio.spread(self.stream, payload, size)
        return size

    cdef int pause(self, bint paused) except -1:
        if paused != self.paused:
            self.paused = paused
            self.want(EPOLLONESHOT if paused else EPOLLIN)
        return 0

    cdef int drain(self) except -1:
        """Read what is in the pipe now, however slow the clients are: it is bounded by the pipe's size."""
        cdef int left = 0
        cdef ssize_t size
        if ioctl(self.fd, FIONREAD, &left) < 0:
            left = 0
        if self.stdio.tty:
            left = READ                 # the line discipline is filled in the background: FIONREAD does not see all
        while left > 0 and not self.closed:
            size = self.pull(READ if left > READ else left)
            if size == 0:
                break
            left -= size
        if not self.closed:
            self.pull(READ)             # sees the end
        return 0


cdef class Input(Source):
    """The write end of stdin, or a duplicate of a terminal's master. `finishing`: it is closed when what is kept has been taken."""

    cdef Stdio stdio
    cdef Kept kept
    cdef bint finishing
    cdef bint enlarged

    def __dealloc__(self):
        free(self.kept.data)

    cdef int put(self, const char *data, size_t size) except -1:
        cdef ssize_t written = 0
        if self.closed or self.finishing:
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
        """End of input: close when all of it has been taken."""
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


cdef class Client(Source):
    """An attached client's socket. It lives on after its process until it has taken all output."""

    cdef Stdio stdio
    cdef readonly uint64_t number
    cdef int streams            # bit 1 << stream for each one wanted
    cdef bint stdin
    cdef bint raw
    cdef bint held
    cdef bint eof               # it has ended its side
    cdef bint lost              # it takes no output any more
    cdef bint ending            # no more output comes: closed after what is kept
    cdef bint lingering         # shut down by us, not yet by it
    cdef bint plain             # a Unix socket: close(2) loses nothing that was sent
    cdef bint behind            # its socket is too full for a frame to be moved into it
    cdef int room               # of its socket, in the kernel's account
    cdef DetachKeys keys
    cdef bytes early
    cdef Kept kept
    cdef int64_t progress       # when it last took something

    def __dealloc__(self):
        free(self.kept.data)

    cdef ssize_t give(self, const char *data, size_t size) except -2:
        """send(2); how much was taken, or -1 when the client is gone."""
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
            if not self.held:
                sent = self.give(data, size)
                if sent < 0:
                    self.lose()
                    return 0
                if <size_t>sent == size:
                    return 0
            self.progress = self.loop.now
        self.loop.keep(&self.kept, data + sent, size - sent)
        if not self.held:
            self.loop.blocked.add(self)
            self.go_on()
        return 0

    cdef int go_on(self) except -1:
        """Wait for what this client can do now."""
        cdef uint32_t events = 0
        if self.closed or self.lingering:
            return 0
        if (self.kept.used or self.behind) and not self.held:
            self.loop.blocked.add(self)
            events |= EPOLLOUT
        if self.ending:
            if self.kept.used == 0 and not self.held:
                self.conclude()
                return 0
        elif not self.eof and (not self.stdin or self.stdio.hears()):
            events |= EPOLLIN
        self.want(events if events or not self.lost else EPOLLONESHOT)
        return 0

    cdef int ready(self, uint32_t events) except -1:
        if self.lingering:
            self.await_close()
            return 0
        if events & (EPOLLERR | EPOLLHUP) and not self.lost:
            self.lose()
        if events & EPOLLOUT and not self.closed and not self.held:
            if self.behind:
                self.caught_up()
            if self.kept.used:
                self.flush()
        if events & EPOLLIN and not self.closed and self.events & EPOLLIN:
            self.hear()
        return 0

    cdef int await_room(self) except -1:
        """Stall the streams until the socket has room again (unix(7): when three quarters of it are free)."""
        if not self.behind:
            self.behind = True
            self.progress = self.loop.now
            self.go_on()
            self.stdio.go_on()
        return 0

    cdef int caught_up(self) except -1:
        self.behind = False
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
        """Read once from the client, for the process's stdin or for nothing."""
        cdef char *data = self.loop.buffer
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
            if self.stdin:
                self.stdio.client_input_ended()
            if self.lost:
                self.leave(False)
            else:
                self.go_on()
            return 0
        if self.stdin:
            self.type(data, size)
        return 0

    cdef int type(self, const char *data, size_t size) except -1:
        """Give typed bytes to the process, and look for the detach keys."""
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
        """The process runs: the bytes that had come with the request are its first input."""
        cdef bytes early = self.early
        self.early = b""
        if early and self.stdin and not self.closed:
            self.type(PyBytes_AS_STRING(early), PyBytes_GET_SIZE(early))
        self.go_on()
        return 0

    cdef int lose(self) except -1:
        """It takes no more output. What it had typed before still counts, so it stays until its input has been read."""
        self.lost = True
        self.behind = False
        self.streams = 0
        self.loop.drop(&self.kept)
        self.loop.blocked.discard(self)
        if self.held or self.ending or not self.stdin or self.eof or (self.stdio.running and self.stdio.input is None):
            self.leave(False)
        else:
            self.go_on()
            self.stdio.go_on()
        return 0

    cdef int leave(self, bint by_keys) except -1:
        """End this client before its process ends."""
        cdef bint ending = self.ending
        if self.closed:
            return 0
        self.behind = False
        self.streams = 0
        self.ending = True
        self.held = False
        self.loop.held.pop(self.number, None)
        if self in self.stdio.clients:
            self.stdio.clients.remove(self)
        if by_keys and not self.lost:
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

    cdef int end(self) except -1:
        """No more output comes."""
        if not self.closed and not self.ending:
            self.ending = True
            self.behind = False
            if self.lost:
                self.shut()
            else:
                self.go_on()
        return 0

    cdef int conclude(self) except -1:
        """All has been sent. Unread input must not turn the end of our output into a reset, so it is read away first."""
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

    `owner` is told: `detached(number, keys)` when a client left before the process's end, `input_ended()` when stdin was closed while
    the process runs, `drained()` when after `finish` the last output has been read, logged and given to the clients' sockets or backlogs.
    """

    cdef Loop loop
    cdef public object owner
    cdef list clients
    cdef Output out
    cdef Output err
    cdef Input input
    cdef LogWriter log
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

    @property
    def attached(self) -> int:
        """Number of clients."""
        return len(self.clients)

    def descriptors(self) -> tuple:
        """Letters as in `messages.State`, and the descriptors that are still open, in the same order."""
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
        """Call `callback()` once the log's end is another one than that, or the process has ended."""
        if not self.running or self.log is None or self.log.position() != (inode, offset):
            callback()
        else:
            if self.watchers is None:
                self.watchers = []
            self.watchers.append((inode, offset, callback))

    def follow_log(self, uint64_t number, uint64_t inode) -> None:
        """The reader `number` of the log holds its files up to `inode`: `LogWriter.follow`."""
        if self.log is not None:
            self.log.follow(number, inode)

    def unfollow_log(self, uint64_t number) -> None:
        """That reader is gone."""
        if self.log is not None:
            self.log.unfollow(number)

    def unwatch_log(self, callback) -> None:
        """Forget the watch with that `callback`."""
        if self.watchers is not None:
            self.watchers = [watcher for watcher in self.watchers if watcher[2] is not callback] or None

    def attach(
        self, int fd, bint stdin, bint stdout, bint stderr, bint raw, bytes head, bytes early, bytes detach_keys, bint hold
    ) -> int:
        """Take the socket `fd` as a client; its number. From here on output is kept for it, first of all `head` is sent."""
        cdef Client client = Client.__new__(Client)
        cdef int domain = 0, wanted = SEND_BUFFER, size = 0
        cdef socklen_t length = sizeof(int)
        cdef ssize_t sent
        cdef int stream
        cdef bytes pending
        client.loop = self.loop
        client.stdio = self
        client.fd = fd
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK)
        getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length)
        client.plain = domain == AF_UNIX
        length = sizeof(int)
        if client.plain and getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, &length) == 0 and size < wanted:
            if setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &wanted, sizeof(wanted)) < 0:
                setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof(wanted))
        self.loop.last_client += 1
        if client.plain:
            length = sizeof(int)
            getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &client.room, &length)
        client.number = self.loop.last_client
        client.stdin = stdin
        client.streams = (stdout << 1) | (stderr << 2)
        client.raw = raw
        client.early = early
        if stdin and raw and detach_keys:
            client.keys = DetachKeys(detach_keys)
        client.held = hold
        client.progress = monotonic()
        self.clients.append(client)
        if hold:
            self.loop.held[client.number] = client
        if head:
            sent = client.give(PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head))
            if sent < 0:
                client.lose()
            elif sent < PyBytes_GET_SIZE(head):
                self.loop.keep(&client.kept, PyBytes_AS_STRING(head) + sent, PyBytes_GET_SIZE(head) - sent)
        if hold and self.log is not None:
            # What has come of a line that is not in the log yet is beyond the log's position, and was read before this client came.
            for stream in range(1, 3):
                pending = self.log.pending(stream)
                if pending and client.streams & (1 << stream) and not client.closed:
                    if not raw:
                        put_header(<unsigned char *>self.loop.buffer, stream, <uint32_t>len(pending))
                        self.loop.keep(&client.kept, self.loop.buffer, HEADER)
                    self.loop.keep(&client.kept, PyBytes_AS_STRING(pending), PyBytes_GET_SIZE(pending))
        try:
            if self.running:
                client.begin()
            else:
                client.go_on()
        except OSError:                 # epoll has no room: the caller is told, and no half client stays
            client.leave(False)
            raise
        return client.number

    def start(self, int stdin, int stdout, int stderr, int terminal, bint stdin_once, LogWriter log) -> None:
        """The process runs, with these descriptors (-1: none); they are this object's now."""
        cdef Client client
        cdef int duplicate
        self.running = True
        self.tty = terminal >= 0
        self.stdin_once = stdin_once
        self.log = log
        if self.tty:
            duplicate = fcntl(terminal, F_DUPFD_CLOEXEC, 3)
            if duplicate < 0:
                PyErr_SetFromErrno(OSError)
            self.input = self.open_input(duplicate)
            self.out = self.open_output(terminal, 1)
        else:
            if stdin >= 0:
                self.input = self.open_input(stdin)
            if stdout >= 0:
                self.out = self.open_output(stdout, 1)
            if stderr >= 0:
                self.err = self.open_output(stderr, 2)
        for client in list(self.clients):
            client.begin()
        self.go_on()

    def finish(self, double grace) -> None:
        """The process has exited: read what is left. Children that hold its streams open are given `grace` seconds of output."""
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
        """Close all clients: no process will run."""
        cdef Client client
        for client in list(self.clients):
            client.end()
        self.clients.clear()

    # --- inside ---------------------------------------------------------------------------------------------------

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
        """Whether input of clients can be read now: there is room for it, or it will be thrown away."""
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
        """Give one read of output to the log and to every client. `payload` has `HEADER` bytes of room before it."""
        cdef Client client
        cdef Py_ssize_t index = len(self.clients)
        cdef bint full = False
        cdef uint64_t outrun
        if self.log is not None:
            outrun = self.log.outrun
            try:
                self.log.write_raw(stream, payload, size)
            except Exception:           # a log that fails is no reason to stop a process or its clients
                traceback.print_exc()
                sys.stderr.flush()
            if self.log.outrun != outrun:
                print(f"{os.fsdecode(self.log.path)}: {self.log.outrun - outrun} readers are too far behind to be waited for", file=sys.stderr, flush=True)
            if self.watchers is not None:
                self.tell()
        if index == 0:
            return 0
        put_header(<unsigned char *>payload - HEADER, stream, <uint32_t>size)
        while index:                    # from the end: a client that is lost leaves the list
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

    cdef Client only(self, int stream):
        """The client at a Unix socket that alone gets the stream, has taken all of it so far, and needs no log beside it; else None."""
        cdef Client client
        if self.log is not None or self.tty or len(self.clients) != 1:
            return None
        client = <Client>self.clients[0]
        if not client.plain or client.held or client.kept.used or not client.streams & (1 << stream):
            return None
        return client

    cdef int go_on(self) except -1:
        """Read the streams whose clients have room, stall the others."""
        cdef Client client
        cdef int full = 0
        for client in self.clients:
            if client.kept.used >= BACKLOG or client.behind:
                full |= client.streams
        if self.out is not None:
            self.out.pause((full & 2) != 0)
        if self.err is not None:
            self.err.pause((full & 4) != 0)
        return 0

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
        """A client ended its stdin: with `stdin_once` the process's ends too. A terminal has no end to give."""
        if self.running and self.stdin_once and not self.tty and self.input is not None:
            self.input.finish()
        return 0

    cdef int ended(self) except -1:
        """All output has been read."""
        cdef list watchers = self.watchers
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
            try:
                self.log.end()
                self.log.close()
            except Exception:
                traceback.print_exc()
                sys.stderr.flush()
            self.log = None
        self.owner.drained()            # first: a client that asks for the exit code when its stream ends must find it
        self.dismiss()
        for watcher in watchers or ():
            watcher[2]()
        return 0


# --- connections by IPv6 to containers that have none ----------------------------------------------------------------------


cdef uint16_t port_of(int fd) noexcept nogil:
    """The own port of an IPv6 socket, in network order; 0 when the kernel does not tell."""
    cdef sockaddr_in6 own
    cdef socklen_t length = sizeof(own)
    if getsockname(fd, &own, &length) < 0 or own.sin6_family != AF_INET6:
        return 0
    return own.sin6_port


cdef class Relay(Source):
    """A listening IPv6 socket. What it has passed on goes on without it."""

    cdef uint32_t address       # network order
    cdef uint16_t port          # its own; network order
    cdef readonly int count
    cdef int most

    def __init__(self, Loop loop not None, int fd, bytes address not None, int most):
        self.loop = loop
        self.fd = fd
        self.most = most
        if PyBytes_GET_SIZE(address) != 4:
            raise ValueError("not an IPv4 address")
        memcpy(&self.address, PyBytes_AS_STRING(address), 4)
        self.port = port_of(fd)
        self.want(EPOLLIN)

    def close(self) -> None:
        """Take no more."""
        self.shut()

    cdef int ready(self, uint32_t events) except -1:
        cdef int turn, accepted
        for turn in range(ACCEPTS):
            if self.closed:
                return 0
            if self.count >= self.most:
                self.want(EPOLLONESHOT)
                return 0
            accepted = accept4(self.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)
            if accepted >= 0:
                self.pass_on(accepted)
            elif errno == EAGAIN:
                return 0
            elif errno != EINTR and errno != ECONNABORTED:      # no descriptor is free: it would wake the loop without end
                self.want(EPOLLONESHOT)
                self.loop.call_later(1, self.go_on)
                return 0
        return 0

    def go_on(self) -> None:
        if not self.closed and self.count < self.most:
            self.want(EPOLLIN)

    cdef int pass_on(self, int accepted) except -1:
        """Connect to where the client wanted to go."""
        cdef sockaddr_in target
        cdef uint16_t port = port_of(accepted)
        cdef int one = 1, idle = KEEPALIVE, descriptor
        cdef End near = End.__new__(End), far
        near.loop = self.loop
        near.fd = accepted
        if port == 0 or port == self.port:
            return near.reset()         # no rule has led it here
        memset(&target, 0, sizeof(target))
        target.sin_family = AF_INET
        target.sin_port = port
        target.sin_addr.s_addr = self.address
        far = End.__new__(End)
        far.loop = self.loop
        far.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)
        if far.fd < 0:
            return near.reset()
        for descriptor in (accepted, far.fd):
            setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))
            setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one))
            setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle))
        if connect(far.fd, &target, sizeof(target)) < 0 and errno != EINPROGRESS:
            far.reset()
            return near.reset()
        near.other, far.other = far, near
        near.relay = far.relay = self
        self.count += 1
        far.connecting = True
        try:
            near.arm()
            far.arm()
        except OSError:
            near.cut()
            raise
        return 0


cdef class End(Source):
    """One of the two sockets of a connection that is passed on. What it does not take at once is kept; meanwhile nothing is read for it."""

    cdef Relay relay
    cdef End other
    cdef Kept kept
    cdef bint connecting
    cdef bint heard             # it has ended its side, and the other one has been told

    def __dealloc__(self):
        free(self.kept.data)

    cdef int arm(self) except -1:
        cdef uint32_t events = 0
        if self.connecting or self.kept.used:
            events |= EPOLLOUT
        if not self.heard and not self.other.kept.used and not self.other.connecting:
            events |= EPOLLIN
        self.want(events if events else EPOLLONESHOT)
        return 0

    cdef int ready(self, uint32_t events) except -1:
        cdef int turn, error = 0
        cdef socklen_t length = sizeof(error)
        cdef ssize_t size
        if events & EPOLLERR:
            return self.cut()
        if self.connecting and events & (EPOLLOUT | EPOLLHUP):
            if getsockopt(self.fd, SOL_SOCKET, SO_ERROR, &error, &length) < 0 or error:
                return self.cut()
            self.connecting = False
        if self.kept.used and events & (EPOLLOUT | EPOLLHUP) and self.flush() < 0:
            return self.cut()
        for turn in range(READS):
            if self.heard or self.other.kept.used or self.other.connecting or not events & (EPOLLIN | EPOLLHUP):
                break
            size = recv(self.fd, self.loop.buffer, READ, MSG_DONTWAIT)
            if size > 0:
                if self.other.take(self.loop.buffer, size) < 0:
                    return self.cut()
            elif size == 0:
                self.heard = True
                shutdown(self.other.fd, SHUT_WR)
            elif errno == EAGAIN:
                break
            elif errno != EINTR:
                return self.cut()
            if size < READ:
                break
        if self.heard and self.other.heard and not self.kept.used and not self.other.kept.used:
            return self.conclude()
        self.arm()
        self.other.arm()
        return 0

    cdef ssize_t take(self, const char *data, size_t size) except -2:
        """Send, and keep what the socket has no room for; -1 when it is broken."""
        cdef ssize_t sent
        while True:
            sent = send(self.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent < 0 and errno == EINTR:
                continue
            if sent < 0 and errno != EAGAIN:
                return -1
            sent = max(sent, 0)
            if <size_t>sent < size:
                self.loop.keep(&self.kept, data + sent, size - sent)
            return sent

    cdef ssize_t flush(self) except -2:
        cdef ssize_t sent = send(self.fd, self.kept.data + self.kept.start, self.kept.used, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < 0:
            return 0 if errno == EAGAIN or errno == EINTR else -1
        self.kept.start += sent
        self.kept.used -= sent
        if self.kept.used == 0:
            self.loop.drop(&self.kept)
        return sent

    cdef int cut(self) except -1:
        """The connection is broken at one end: the other one is told so."""
        cdef End other = self.other
        if not self.closed:
            self.reset()
            other.reset()
            self.part()
        return 0

    cdef int reset(self) except -1:
        cdef linger now
        now.l_onoff, now.l_linger = 1, 0
        setsockopt(self.fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now))
        return self.shut()

    cdef int conclude(self) except -1:
        self.shut()
        self.other.shut()
        return self.part()

    cdef int part(self) except -1:
        cdef Relay relay = self.relay
        cdef End other = self.other
        self.loop.drop(&self.kept)
        self.loop.drop(&other.kept)
        self.other = other.other = None
        self.relay = other.relay = None
        relay.count -= 1
        relay.go_on()
        return 0


cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <linux/types.h>
    #include <sched.h>
    #include <signal.h>
    #include <string.h>
    #include <sys/ioctl.h>
    #include <sys/prctl.h>
    #include <sys/resource.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    /* linux/mount.h and asm/unistd.h, Linux 5.2 and 5.12; older headers lack them. The numbers are the same on every architecture. */
    #define ENGINE_OPEN_TREE 428
    #define ENGINE_MOUNT_SETATTR 442
    #define ENGINE_OPEN_TREE_CLONE 1
    struct engine_mount_attributes {
        __u64 set, clear, propagation, user_namespace;
    };

    static int engine_read_only(const char *path)
    {
        struct engine_mount_attributes wanted = {1, 0, 1 << 18, 0};     /* MOUNT_ATTR_RDONLY, MS_PRIVATE */
        int tree = syscall(ENGINE_OPEN_TREE, AT_FDCWD, path, ENGINE_OPEN_TREE_CLONE | O_CLOEXEC);
        if (tree >= 0 && syscall(ENGINE_MOUNT_SETATTR, tree, "", AT_EMPTY_PATH, &wanted, sizeof(wanted)) < 0) {
            int error = errno;
            close(tree);
            errno = error;
            return -1;
        }
        return tree;
    }

    /* Start a program as posix_spawn(3) does, which has no resource limits and, before glibc 2.29, no working directory.
       vfork(2): the monitor's pages are not copied and it is told why exec failed. Until exec the child runs on the parent's stack
       and memory, so it makes only system calls; all signals are blocked meanwhile. A script cannot be executed by a descriptor that
       is closed by then: what fails so is tried by its name. */
    static pid_t engine_spawn(int program, char *const argv[], char *const envp[], const char *cwd, int in, int out, int err,
                              unsigned long files, const int *inherited, int count, int namespace_, int *failure)
    {
        sigset_t all, before;
        volatile int error = 0;
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, &before);
        pid_t pid = vfork();
        if (pid == 0) {
            unsigned long plain[4] = {(unsigned long)SIG_DFL, 0, 0, 0};     /* the kernel's struct sigaction, not glibc's */
            struct rlimit limit;
            sigset_t none;
            for (int number = 1; number < NSIG; number++)       /* 32 and 33 too, which glibc keeps to itself and its posix_spawn ignores */
                syscall(SYS_rt_sigaction, number, plain, NULL, 8);
            if (files && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
                limit.rlim_cur = files;
                setrlimit(RLIMIT_NOFILE, &limit);
            }
            sigemptyset(&none);
            if ((namespace_ < 0 || setns(namespace_, CLONE_NEWNS) == 0)
                && dup2(in, 0) >= 0 && dup2(out, 1) >= 0 && dup2(err, 2) >= 0 && chdir(cwd) == 0
                && sigprocmask(SIG_SETMASK, &none, NULL) == 0) {
                for (int index = 0; index < count; index++)
                    fcntl(inherited[index], F_SETFD, 0);
                if (program >= 0)
                    syscall(SYS_execveat, program, "", argv, envp, AT_EMPTY_PATH);
                execvpe(argv[0], argv, envp);
            }
            error = errno;
            _exit(127);
        }
        if (pid < 0)
            error = errno;
        sigprocmask(SIG_SETMASK, &before, NULL);
        *failure = error;
        return pid;
    }

    /* linux/pidfd.h, Linux 6.15; older headers lack it. */
    struct engine_pidfd_info {
        __u64 mask, cgroupid;
        __u32 pid, tgid, ppid, ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid;
        __s32 exit_code;
    };
    #define ENGINE_PIDFD_GET_INFO _IOWR(0xFF, 11, struct engine_pidfd_info)
    #define ENGINE_PIDFD_INFO_EXIT (1UL << 3)
    """
    pid_t engine_spawn(
        int program, char **argv, char **envp, const char *cwd, int stdin, int stdout, int stderr, unsigned long files,
        const int *inherited, int count, int namespace_, int *failure
    )
    int engine_read_only(const char *path)
    cdef struct engine_pidfd_info:
        uint64_t mask
        int32_t exit_code
    unsigned long ENGINE_PIDFD_GET_INFO
    uint64_t ENGINE_PIDFD_INFO_EXIT
    int PR_SET_CHILD_SUBREAPER
    int prctl(int option, unsigned long value)


cdef char **strings(list texts) except NULL:
    cdef char **array = <char **>malloc((len(texts) + 1) * sizeof(char *))
    cdef Py_ssize_t index
    if array == NULL:
        raise MemoryError
    for index in range(len(texts)):
        array[index] = PyBytes_AS_STRING(<bytes?>texts[index])
    array[len(texts)] = NULL
    return array


def spawn(
    list argv, list environment, bytes cwd not None, int stdin, int stdout, int stderr, unsigned long files, int program=-1,
    inherited=(), int namespace=-1,
) -> int:
    """Start `argv` (bytes) with these three descriptors; its pid. The program is the file `program`, else the first one, looked up in PATH.

    It keeps the descriptors `inherited` (at most 4) under their own numbers. `namespace`: a descriptor of the mount namespace that it is in.

    Signals are as a shell would leave them. `files`: its soft limit of open files, 0: as ours. A failure to execute is an
    OSError with the kernel's errno, and no child is left.
    """
    cdef int failure = 0
    cdef pid_t pid
    cdef char **arguments = NULL
    cdef char **variables = NULL
    cdef int kept[4]
    cdef int count = 0
    for descriptor in inherited:
        if count == 4:
            raise ValueError("a process inherits at most 4 descriptors")
        kept[count] = descriptor
        count += 1
    try:
        arguments = strings(argv)
        variables = strings(environment)
        pid = engine_spawn(program, arguments, variables, cwd, stdin, stdout, stderr, files, kept, count, namespace, &failure)
    finally:
        free(arguments)
        free(variables)
    if failure:
        if pid > 0:
            os.waitpid(pid, 0)
        raise OSError(failure, os.strerror(failure), os.fsdecode(argv[0]))
    return pid


def read_only(bytes path not None) -> int:
    """A descriptor of the file at `path` in a read-only mount of its own, attached nowhere (open_tree(2), mount_setattr(2), Linux 5.12).

    Nobody can write to the file by what /proc tells of a process that executes it. Raises OSError.
    """
    cdef int descriptor = engine_read_only(path)
    if descriptor < 0:
        raise OSError(errno, os.strerror(errno), os.fsdecode(path))
    return descriptor


def exit_of(int pidfd) -> int | None:
    """Wait status of a process that somebody else has reaped (PIDFD_GET_INFO, Linux >= 6.15); None when the kernel does not know it (yet)."""
    cdef engine_pidfd_info info
    memset(&info, 0, sizeof(info))
    info.mask = ENGINE_PIDFD_INFO_EXIT
    if ioctl(pidfd, ENGINE_PIDFD_GET_INFO, &info) < 0 or not info.mask & ENGINE_PIDFD_INFO_EXIT:
        return None
    return info.exit_code


def become_subreaper() -> None:
    """Orphans among our descendants become our children (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if prctl(PR_SET_CHILD_SUBREAPER, 1) < 0:
        PyErr_SetFromErrno(OSError)
