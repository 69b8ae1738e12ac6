# cython: language_level=3
"""Many datagrams with one system call, sendmmsg(2).

One sendto(2) from Python takes about as long as formatting fifty messages.

Owns:    nothing. Descriptor and bytes are the caller's.
Threads: any number; the GIL is released while messages are sent.
Raises:  OSError with the kernel's errno, for the first message of a call only.
"""
from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, ECONNREFUSED, EINTR, ENOBUFS, ENOTCONN, errno
from libc.stdint cimport uint32_t
from libc.string cimport memset

from engine._fast.linux cimport MSG_DONTWAIT, MSG_NOSIGNAL, iovec, mmsghdr, sendmmsg, set_errno

import array

cdef enum:
    BATCH = 64                          # messages of a system call


def send(int fd, bytes wire not None, ends not None, Py_ssize_t first) -> int:
    """Send messages to the peer that the socket is connected to, from number `first` on, until
    the kernel takes no more.

    `ends`: where each message ends in `wire`, ascending; it begins where the one before it ends.
    Returns the number of messages sent, which is 0 if the socket is full (EAGAIN, ENOBUFS). If a
    message is refused after others were sent, these are counted, and the next call, which starts
    with that message, raises. UDP reports ECONNREFUSED for an earlier datagram and sends nothing
    then; so the message is sent again once. A Unix socket whose peer is gone is disconnected by the
    first ECONNREFUSED, so it may also raise ENOTCONN.
    """
    cdef array.array numbers
    cdef const uint32_t *at
    cdef Py_ssize_t count, sent = 0
    cdef const char *data = PyBytes_AS_STRING(wire)
    cdef uint32_t begin, end
    cdef Py_ssize_t index
    if isinstance(ends, array.array) and ends.typecode == "I":
        numbers = ends
    else:
        numbers = array.array("I", ends)
    count = len(numbers)
    if not 0 <= first <= count:
        raise ValueError(f"no such message: {first}")
    at = numbers.data.as_uints
    begin = at[first - 1] if first else 0
    end = begin
    for index in range(first, count):
        if at[index] < end:
            raise ValueError("the ends of messages ascend")
        end = at[index]
    if end > <size_t>len(wire):
        raise ValueError("a message ends after the bytes")
    if first == count:
        return 0
    with nogil:
        sent = send_from(fd, data, at, first, count, begin)
    if sent < 0:
        PyErr_SetFromErrno(OSError)
    return sent


cdef Py_ssize_t send_from(
    int fd, const char *data, const uint32_t *ends, Py_ssize_t first, Py_ssize_t count, uint32_t begin
) noexcept nogil:
    """Returns messages sent, or -1 with errno if the first is refused."""
    cdef mmsghdr messages[BATCH]
    cdef iovec parts[BATCH]
    cdef Py_ssize_t done = first
    cdef uint32_t at
    cdef unsigned size, index
    cdef int sent
    cdef bint again = False
    memset(messages, 0, sizeof(messages))
    for index in range(<unsigned>BATCH):
        messages[index].msg_hdr.msg_iov = &parts[index]
        messages[index].msg_hdr.msg_iovlen = 1
    while done < count:
        size = <unsigned>min(count - done, <Py_ssize_t>BATCH)
        at = begin
        for index in range(size):
            parts[index].iov_base = <void *>(data + at)
            parts[index].iov_len = ends[done + index] - at
            at = ends[done + index]
        sent = sendmmsg(fd, messages, size, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent > 0:
            done += sent
            begin = ends[done - 1]
            again = False
        elif sent == 0 or errno == EAGAIN or errno == ENOBUFS:
            break
        elif errno == ECONNREFUSED and not again:
            again = True
        elif errno != EINTR:
            if again and errno == ENOTCONN:
                set_errno(ECONNREFUSED)
            return done - first if done > first else -1
    return done - first
