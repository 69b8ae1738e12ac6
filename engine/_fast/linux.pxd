# C declarations of the kernel interfaces that Cython ships none for, by header, as man pages section 2 and 7 name them; and openat2(2), which libc has not.
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t
from posix.types cimport mode_t, off_t, pid_t


cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void *ptr
        int fd
        uint64_t u64

    cdef struct epoll_event:
        uint32_t events
        epoll_data_t data

    enum:
        EPOLLIN
        EPOLLOUT
        EPOLLERR
        EPOLLHUP
        EPOLLONESHOT
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLL_CTL_MOD
        EPOLL_CTL_DEL

    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event *event)
    int epoll_wait(int epfd, epoll_event *events, int maxevents, int timeout)


cdef extern from "<sys/ioctl.h>" nogil:
    enum:
        FIONREAD
    int ioctl(int fd, unsigned long request, ...)


cdef extern from "<linux/sockios.h>" nogil:
    enum:
        SIOCOUTQ


cdef extern from "<fcntl.h>" nogil:
    enum:
        F_GETFL
        F_SETFL
        F_GETPIPE_SZ
        F_SETPIPE_SZ
        F_DUPFD_CLOEXEC
        O_NONBLOCK
        SPLICE_F_NONBLOCK
    int fcntl(int fd, int cmd, ...)
    ssize_t splice(int source, void *source_offset, int target, void *target_offset, size_t size, unsigned int flags)


cdef extern from "<sys/socket.h>" nogil:
    ctypedef unsigned int socklen_t
    cdef struct sockaddr:
        unsigned short sa_family
    enum:
        AF_INET
        AF_INET6
        AF_UNIX
        SOCK_CLOEXEC
        SOCK_NONBLOCK
        SOCK_STREAM
        SOL_SOCKET
        SO_ERROR
        SO_KEEPALIVE
        SO_LINGER
        SO_RCVBUF
        SO_REUSEADDR
        SO_SNDBUF
        SO_SNDBUFFORCE
        SO_DOMAIN
        MSG_DONTWAIT
        MSG_NOSIGNAL
        SHUT_RD
        SHUT_WR
        SHUT_RDWR
    ssize_t send(int fd, const void *data, size_t size, int flags)
    ssize_t recv(int fd, void *data, size_t size, int flags)
    cdef struct linger:
        int l_onoff
        int l_linger
    int accept4(int fd, void *address, socklen_t *size, int flags)
    int bind(int fd, const void *address, socklen_t size)
    int connect(int fd, const void *address, socklen_t size)
    int shutdown(int fd, int how)
    int socket(int domain, int kind, int protocol)
    int getsockname(int fd, void *address, socklen_t *size)
    int getsockopt(int fd, int level, int name, void *value, socklen_t *size)
    int setsockopt(int fd, int level, int name, const void *value, socklen_t size)


cdef extern from "<netinet/in.h>" nogil:
    enum:
        IPPROTO_IPV6
        IPPROTO_TCP
        IPV6_V6ONLY
    cdef struct in_addr:
        uint32_t s_addr
    cdef struct sockaddr_in:
        unsigned short sin_family
        uint16_t sin_port
        in_addr sin_addr
    cdef struct in6_addr:
        pass
    cdef struct sockaddr_in6:
        unsigned short sin6_family
        uint16_t sin6_port
        in6_addr sin6_addr
    uint16_t htons(uint16_t number)


cdef extern from "<netinet/tcp.h>" nogil:
    enum:
        TCP_KEEPIDLE
        TCP_NODELAY


cdef extern from "<malloc.h>" nogil:
    enum:
        M_MMAP_THRESHOLD
        M_TRIM_THRESHOLD
    int mallopt(int parameter, int value)


cdef extern from "<linux/openat2.h>" nogil:
    enum:
        RESOLVE_NO_XDEV
        RESOLVE_NO_MAGICLINKS
        RESOLVE_NO_SYMLINKS
        RESOLVE_BENEATH
        RESOLVE_IN_ROOT
    struct open_how:
        uint64_t flags
        uint64_t mode
        uint64_t resolve


cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_openat2


cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)


cdef inline int openat2(int directory, const char *path, int flags, uint64_t resolve) noexcept nogil:
    """EAGAIN, which means that a rename raced with the resolution, comes back only when that has happened 128 times in a row."""
    cdef open_how how
    cdef int fd = -1
    how.flags = <uint32_t>flags
    how.mode = 0
    how.resolve = resolve
    for _ in range(128):
        fd = <int>syscall(SYS_openat2, directory, path, &how, sizeof(how))
        if fd >= 0 or (errno != EAGAIN and errno != EINTR):
            break
    return fd
