# cython: language_level=3
"""Connections to published ports that no rule of the host leads to containers: the monitor accepts
them and forwards them.

One listening socket gets the IPv6 connections to containers that have only IPv4 addresses: rules
redirect them to it (TPROXY), and each is forwarded to its own port at an IPv4 address. On a host
where the engine writes no rules, each published port has a listening socket, whose connections are
forwarded to one address and port. Not here: the loop (`pump.pyx`), the rules (`engine/networks`),
datagrams (`monitor/datagrams.py`).

Owns:    the listening socket given to `Relay`, until it is closed, and both sockets of every
         connection.
Threads: the loop's.
Raises:  OSError when a descriptor cannot be watched.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, ECONNABORTED, EINPROGRESS, EINTR, errno
from libc.stdint cimport uint16_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from engine._fast.linux cimport (
    AF_INET, AF_INET6, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLONESHOT, EPOLLOUT, IPPROTO_TCP, MSG_DONTWAIT, MSG_NOSIGNAL,
    SHUT_WR, SO_ERROR, SO_KEEPALIVE, SO_LINGER, SO_PROTOCOL, SOCK_CLOEXEC, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET,
    TCP_KEEPIDLE, TCP_NODELAY, accept4, connect, getsockname, getsockopt, htons, linger, recv, send, setsockopt,
    shutdown, sockaddr_in, sockaddr_in6, socket, socklen_t,
)
from engine._fast.pump cimport READ, READS, Kept, Loop, Source

cdef enum:
    # connections that a relay accepts in one turn, before other descriptors are served
    ACCEPTS = 16
    KEEPALIVE = 60  # seconds of silence after which the kernel probes both ends (TCP keepalive)


cdef uint16_t port_of(int fd) noexcept nogil:
    """The local port of an IPv6 socket, in network order; 0 on failure."""
    cdef sockaddr_in6 own
    cdef socklen_t length = sizeof(own)
    if getsockname(fd, &own, &length) < 0 or own.sin6_family != AF_INET6:
        return 0
    return own.sin6_port


cdef class Room:
    """How many connections the relays of one monitor may have at once."""

    cdef public int count
    cdef readonly int most

    def __init__(self, int most):
        self.most = most


cdef class Relay(Source):
    """A listening socket. Connections that it has forwarded continue without it."""

    cdef char[16] address
    cdef int family             # of the address
    cdef uint16_t port          # where connections go; 0: the port that the client has connected to
    cdef uint16_t own           # the listening socket's own port, of a socket at IPv6
    cdef int protocol
    cdef Room room

    def __init__(self, Loop loop not None, int fd, bytes address not None, Room room not None, uint16_t port=0):
        cdef socklen_t length = sizeof(self.protocol)
        self.loop = loop
        self.fd = fd
        self.room = room
        if PyBytes_GET_SIZE(address) not in (4, 16):
            raise ValueError("not an address")
        self.family = AF_INET if PyBytes_GET_SIZE(address) == 4 else AF_INET6
        memcpy(self.address, PyBytes_AS_STRING(address), PyBytes_GET_SIZE(address))
        self.port = htons(port)
        self.own = port_of(fd)
        if getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &self.protocol, &length) < 0:
            self.protocol = 0
        self.want(EPOLLIN)

    def close(self) -> None:
        """Accept no more connections."""
        self.shut()

    cdef int ready(self, uint32_t events) except -1:
        cdef int turn, accepted
        for turn in range(ACCEPTS):
            if self.closed:
                return 0
            if self.room.count >= self.room.most:
                self.wait()
                return 0
            accepted = accept4(self.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)
            if accepted >= 0:
                self.pass_on(accepted)
            elif errno == EAGAIN:
                return 0
            # no free descriptor: the waiting connection would wake the loop again and again
            elif errno != EINTR and errno != ECONNABORTED:
                self.wait()
                return 0
        return 0

    cdef int wait(self) except -1:
        self.want(EPOLLONESHOT)
        self.loop.call_later(1, self.go_on)
        return 0

    def go_on(self) -> None:
        if self.closed:
            return
        if self.room.count < self.room.most:
            self.want(EPOLLIN)
        else:
            self.loop.call_later(1, self.go_on)

    cdef int pass_on(self, int accepted) except -1:
        """Connect to `address`, at `port` or the port that the client connected to."""
        cdef sockaddr_in of4
        cdef sockaddr_in6 of6
        cdef uint16_t port = self.port if self.port else port_of(accepted)
        cdef int one = 1, idle = KEEPALIVE, descriptor, failed
        cdef End near = End.__new__(End), far
        near.loop = self.loop
        near.fd = accepted
        if self.port == 0 and (port == 0 or port == self.own):
            return near.reset()         # a direct connection, which no rule redirected
        far = End.__new__(End)
        far.loop = self.loop
        far.fd = socket(self.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, self.protocol)
        if far.fd < 0:
            return near.reset()
        for descriptor in (accepted, far.fd):
            setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))
            setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one))
            setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle))
        if self.family == AF_INET:
            memset(&of4, 0, sizeof(of4))
            of4.sin_family, of4.sin_port = AF_INET, port
            memcpy(&of4.sin_addr, self.address, 4)
            failed = connect(far.fd, &of4, sizeof(of4))
        else:
            memset(&of6, 0, sizeof(of6))
            of6.sin6_family, of6.sin6_port = AF_INET6, port
            memcpy(&of6.sin6_addr, self.address, 16)
            failed = connect(far.fd, &of6, sizeof(of6))
        if failed < 0 and errno != EINPROGRESS:
            far.reset()
            return near.reset()
        near.other, far.other = far, near
        near.relay = far.relay = self
        self.room.count += 1
        far.connecting = True
        try:
            near.arm()
            far.arm()
        except OSError:
            near.cut()
            raise
        return 0


cdef class End(Source):
    """One of the two sockets of a forwarded connection. Data that it cannot take at once is
    buffered; meanwhile its peer is not read."""

    cdef Relay relay
    cdef End other
    cdef Kept kept
    cdef bint connecting
    cdef bint heard             # end of file was read, and passed on to the peer

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
        """Send `data`, and buffer the rest if the socket is full. Returns -1 if the connection is
        broken."""
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
        """Called when the connection is broken at one end: reset the other end."""
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
        relay.room.count -= 1
        if not relay.closed:
            relay.want(EPOLLIN)
        return 0
