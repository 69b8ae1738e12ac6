# cython: language_level=3
"""Sockets that reserve ports of the host, bound in runs at a few microseconds each.

Rules:   socket(7), ip(7), ipv6(7), udp(7). Addresses, and the meaning of a failure, belong to
         `engine/networks/ports.py`.
Owns:    nothing; the descriptors are the caller's.
Threads: any; the GIL is released during a run.
Raises:  nothing when the kernel refuses: the first failure ends a run and is returned as an errno.
"""
from libc.errno cimport errno
from libc.stdint cimport uint16_t
from libc.string cimport memcpy, memset
from posix.unistd cimport close

from engine._fast.linux cimport (
    AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY, SO_RCVBUF, SO_REUSEADDR, SOCK_CLOEXEC, SOCK_STREAM, SOL_SOCKET,
    bind as bind_address, htons, setsockopt, sockaddr_in, sockaddr_in6, socket,
)

cdef enum:
    RUN = 256                   # sockets of a call


def bind(
    int family, int kind, int protocol, bytes address not None, int first, int count, bint both = False
) -> tuple[list[int], int]:
    """Bind sockets to `count` ports (256 at most) of a packed address, from `first` on. Returns the
    sockets and 0; or the sockets before the port that failed, and its errno.

    Stream sockets can be bound despite connections in TIME_WAIT, but no other process can listen on
    their ports, not even with a reuse option. Datagram sockets discard everything that arrives.
    IPv6 sockets are for IPv6 only, unless `both` is true and the address is `::`.
    """
    cdef int[RUN] descriptors
    cdef int made = 0, number = 0, descriptor
    cdef const char *packed = address
    if len(address) != (16 if family == AF_INET6 else 4):
        raise ValueError(f"address: {len(address)} bytes")
    with nogil:
        while made < min(count, RUN):
            descriptor = _bound(family, kind, protocol, packed, first + made, both)
            if descriptor < 0:
                number = -descriptor
                break
            descriptors[made] = descriptor
            made += 1
    return [descriptors[each] for each in range(made)], number


def close_all(list descriptors not None) -> None:
    """Close all of them without the GIL."""
    cdef int[RUN] several
    cdef int number, count, each
    for number in range(0, len(descriptors), RUN):
        count = min(RUN, len(descriptors) - number)
        for each in range(count):
            several[each] = descriptors[number + each]
        with nogil:
            for each in range(count):
                close(several[each])


cdef int _bound(int family, int kind, int protocol, const char *address, int port, bint both) noexcept nogil:
    """A descriptor, or a negative errno."""
    cdef sockaddr_in of4
    cdef sockaddr_in6 of6
    cdef int zero = 0, one = 1, alone = not both, failed = 0
    cdef int descriptor = socket(family, kind | SOCK_CLOEXEC, protocol)
    if descriptor < 0:
        return -errno
    if family == AF_INET6:
        failed = setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &alone, sizeof(int))
    if not failed:
        if kind == SOCK_STREAM:
            failed = setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(int))
        else:
            failed = setsockopt(descriptor, SOL_SOCKET, SO_RCVBUF, &zero, sizeof(int))
    if not failed:
        if family == AF_INET6:
            memset(&of6, 0, sizeof(of6))
            of6.sin6_family, of6.sin6_port = family, htons(<uint16_t>port)
            memcpy(&of6.sin6_addr, address, 16)
            failed = bind_address(descriptor, &of6, sizeof(of6))
        else:
            memset(&of4, 0, sizeof(of4))
            of4.sin_family, of4.sin_port = family, htons(<uint16_t>port)
            memcpy(&of4.sin_addr, address, 4)
            failed = bind_address(descriptor, &of4, sizeof(of4))
    if not failed and kind == SOCK_STREAM:
        failed = setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &zero, sizeof(int))
    if failed:
        failed = errno
        close(descriptor)
        return -failed
    return descriptor
