# C declarations for all modules of `_fast`, by header, under the names of man pages sections 2, 3
# and 7; and openat2(2), which glibc does not wrap. Cython's own `posix.*` and `libc.*` are used as
# well; no module declares C functions itself.
#
# System call numbers and flags that are younger than Linux 4.18 are spelled out: manylinux_2_28
# builds against its headers.
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from posix.time cimport timespec
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


cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
        POLLNVAL
    cdef struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *waited, unsigned long count, int timeout)


cdef extern from "<sys/ioctl.h>" nogil:
    enum:
        FIONREAD
    int ioctl(int fd, unsigned long request, ...)


cdef extern from "<linux/sockios.h>" nogil:
    enum:
        SIOCOUTQ


cdef extern from "<fcntl.h>" nogil:
    enum:
        AT_FDCWD
        AT_REMOVEDIR
        AT_SYMLINK_FOLLOW
        AT_SYMLINK_NOFOLLOW
        F_GETFL
        F_SETFL
        F_GETPIPE_SZ
        F_SETPIPE_SZ
        F_DUPFD_CLOEXEC
        O_CLOEXEC
        O_CREAT
        O_DIRECTORY
        O_EXCL
        O_NOATIME
        O_NOCTTY
        O_NOFOLLOW
        O_NONBLOCK
        O_PATH
        O_RDONLY
        O_WRONLY
        SPLICE_F_NONBLOCK
    int fcntl(int fd, int cmd, ...)
    int open(const char *path, int flags, ...)
    int openat(int directory, const char *path, int flags, ...)
    ssize_t splice(int source, void *source_offset, int target, void *target_offset, size_t size, unsigned int flags)


cdef extern from "<unistd.h>" nogil:
    enum:
        SEEK_CUR
        SEEK_DATA
        SEEK_HOLE
        _SC_NPROCESSORS_ONLN
    int close(int fd)
    ssize_t copy_file_range(
        int source, int64_t *source_at, int target, int64_t *target_at, size_t size, unsigned int flags
    )
    int fchown(int fd, uint32_t uid, uint32_t gid)
    int fchownat(int directory, const char *path, uint32_t uid, uint32_t gid, int flags)
    int ftruncate(int fd, int64_t size)
    int linkat(int old_directory, const char *old_path, int new_directory, const char *new_path, int flags)
    int64_t lseek(int fd, int64_t offset, int whence)
    ssize_t pread(int fd, void *data, size_t size, int64_t offset)
    ssize_t pwrite(int fd, const void *data, size_t size, int64_t offset)
    ssize_t read(int fd, void *data, size_t size)
    ssize_t readlinkat(int directory, const char *path, char *target, size_t size)
    int symlinkat(const char *target, int directory, const char *path)
    long syscall(long number, ...)
    long sysconf(int name)
    int unlinkat(int directory, const char *path, int flags)
    ssize_t write(int fd, const void *data, size_t size)


cdef extern from "<stdio.h>" nogil:
    int renameat(int old_directory, const char *old_path, int new_directory, const char *new_path)


cdef extern from "<dirent.h>" nogil:
    ctypedef struct DIR:
        pass
    cdef struct dirent:
        char *d_name
        unsigned char d_type
    enum:
        DT_DIR
        DT_FIFO
        DT_LNK
        DT_REG
        DT_SOCK
        DT_UNKNOWN
    DIR *fdopendir(int fd)
    dirent *readdir(DIR *directory)
    void rewinddir(DIR *directory)
    int closedir(DIR *directory)
    int dirfd(DIR *directory)


cdef extern from "<sys/stat.h>" nogil:
    cdef struct stat_t "stat":
        uint32_t st_mode
        uint32_t st_uid
        uint32_t st_gid
        int64_t st_size
        int64_t st_blocks
        uint64_t st_nlink
        uint64_t st_rdev
        uint64_t st_dev
        uint64_t st_ino
        timespec st_atim
        timespec st_mtim
    enum:
        S_IFBLK
        S_IFCHR
        S_IFIFO
        S_IFMT
        S_ISGID
    int fstat(int fd, stat_t *found)
    int fstatat(int directory, const char *path, stat_t *found, int flags)
    int fchmod(int fd, uint32_t mode)
    int fchmodat(int directory, const char *path, uint32_t mode, int flags)
    int mkdirat(int directory, const char *path, uint32_t mode)
    int mknodat(int directory, const char *path, uint32_t mode, uint64_t device)
    int futimens(int fd, const timespec *times)
    int utimensat(int directory, const char *path, const timespec *times, int flags)
    bint S_ISBLK(uint32_t mode)
    bint S_ISCHR(uint32_t mode)
    bint S_ISDIR(uint32_t mode)
    bint S_ISFIFO(uint32_t mode)
    bint S_ISLNK(uint32_t mode)
    bint S_ISREG(uint32_t mode)
    bint S_ISSOCK(uint32_t mode)


cdef extern from "<sys/statvfs.h>" nogil:
    cdef struct statvfs_t "statvfs":
        unsigned long f_flag
        unsigned long f_frsize
        uint64_t f_blocks
        uint64_t f_bavail
        uint64_t f_files
        uint64_t f_favail
    enum:
        ST_NODEV
    int fstatvfs(int fd, statvfs_t *found)


cdef extern from "<sys/sysmacros.h>" nogil:
    uint32_t major(uint64_t device)
    uint32_t minor(uint64_t device)
    uint64_t makedev(uint32_t major, uint32_t minor)


cdef extern from "<sys/xattr.h>" nogil:
    ssize_t flistxattr(int fd, char *names, size_t size)
    ssize_t listxattr(const char *path, char *names, size_t size)
    ssize_t llistxattr(const char *path, char *names, size_t size)
    ssize_t fgetxattr(int fd, const char *name, void *value, size_t size)
    ssize_t getxattr(const char *path, const char *name, void *value, size_t size)
    ssize_t lgetxattr(const char *path, const char *name, void *value, size_t size)
    int fsetxattr(int fd, const char *name, const void *value, size_t size, int flags)
    int lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags)


cdef extern from "<linux/fs.h>" nogil:
    enum:
        FICLONE


cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t
    ctypedef struct pthread_attr_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_create(
        pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *) noexcept nogil, void *argument
    )
    int pthread_join(pthread_t thread, void **result)
    int pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_cond_init(pthread_cond_t *condition, const void *attributes)
    int pthread_cond_destroy(pthread_cond_t *condition)
    int pthread_cond_broadcast(pthread_cond_t *condition)
    int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)


cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    enum:
        SIG_SETMASK
    int sigfillset(sigset_t *signals)
    int pthread_sigmask(int how, const sigset_t *signals, sigset_t *before)


cdef extern from "<sys/prctl.h>" nogil:
    enum:
        PR_SET_CHILD_SUBREAPER
    int prctl(int option, ...)


cdef extern from "<dlfcn.h>" nogil:
    enum:
        RTLD_NOW
    void *dlopen(const char *name, int flags)
    void *dlsym(void *library, const char *name)


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
        SO_PROTOCOL
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
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    cdef struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    cdef struct mmsghdr:
        msghdr msg_hdr
        unsigned int msg_len
    int sendmmsg(int fd, mmsghdr *messages, unsigned int count, int flags)
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


cdef extern from "<sys/uio.h>" nogil:
    enum:
        RWF_NOWAIT
    ssize_t preadv2(int fd, const iovec *pieces, int count, int64_t offset, int flags)


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


cdef extern from "<time.h>" nogil:
    ctypedef long time_t
    cdef struct tm_t "tm":
        int tm_sec
        int tm_min
        int tm_hour
        int tm_mday
        int tm_mon
        long tm_gmtoff
    tm_t *localtime_r(const time_t *at, tm_t *into)
    void tzset()


cdef extern from "<stdlib.h>" nogil:
    void qsort_r(
        void *base, size_t count, size_t size,
        int (*compare)(const void *, const void *, void *) noexcept nogil, void *context
    )


cdef extern from "<malloc.h>" nogil:
    enum:
        M_MMAP_THRESHOLD
        M_TRIM_THRESHOLD
    int mallopt(int parameter, int value)


cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_getdents64


# openat2(2), Linux 5.6, and close_range(2), 5.9; these numbers are the same on every architecture
# that Python 3.11 runs on.
cdef enum:
    SYS_close_range = 436
    SYS_openat2 = 437

    CLOSE_RANGE_UNSHARE = 2

    RESOLVE_NO_XDEV = 1
    RESOLVE_NO_MAGICLINKS = 2
    RESOLVE_NO_SYMLINKS = 4
    RESOLVE_BENEATH = 8
    RESOLVE_IN_ROOT = 16
    RESOLVE_CACHED = 32                 # Linux 5.12

cdef struct open_how:
    uint64_t flags
    uint64_t mode
    uint64_t resolve


cdef inline int openat2(int directory, const char *path, int flags, uint64_t resolve) noexcept nogil:
    """Retries on EAGAIN, which means that a rename raced with the resolution, 128 times at most.
    Not with RESOLVE_CACHED, where it means that a directory on the way has to be read first.
    """
    cdef open_how how
    cdef int fd = -1
    how.flags = <uint32_t>flags
    how.mode = 0
    how.resolve = resolve
    for _ in range(1 if resolve & RESOLVE_CACHED else 128):
        fd = <int>syscall(SYS_openat2, directory, path, &how, sizeof(how))
        if fd >= 0 or (errno != EAGAIN and errno != EINTR):
            break
    return fd


cdef extern from *:
    """
    #include <errno.h>
    #include <stddef.h>
    extern void *memrchr(const void *, int, size_t);
    static inline void set_errno(int number) { errno = number; }
    """
    void *memrchr(const void *data, int byte, size_t size) noexcept nogil
    void set_errno(int number) noexcept nogil


cdef inline int start_thread(pthread_t *thread, void *(*run)(void *) noexcept nogil, void *argument) noexcept nogil:
    """pthread_create(3) with all signals blocked in the new thread, so that handlers run in the
    caller's threads only.

    Returns 0 or an error number.
    """
    cdef sigset_t every, before
    cdef int error
    sigfillset(&every)
    pthread_sigmask(SIG_SETMASK, &every, &before)
    error = pthread_create(thread, NULL, run, argument)
    pthread_sigmask(SIG_SETMASK, &before, NULL)
    return error


cdef inline void close_own(int fd) noexcept nogil:
    """close(2) for `__dealloc__`. It also runs for an object whose `__cinit__` has refused its
    arguments before its first line, with 0 in all fields. 0 is standard input, never an object's.
    """
    if fd > 0:
        close(fd)


cdef inline bint is_dot(const char *name) noexcept nogil:
    """True for `.` and `..`."""
    return name[0] == b"." and (name[1] == 0 or (name[1] == b"." and name[2] == 0))


cdef inline bint is_whiteout(const stat_t *found) noexcept nogil:
    """True for overlayfs's whiteout, a character device 0/0."""
    return S_ISCHR(found.st_mode) and found.st_rdev == 0


cdef inline size_t hash_inode(uint64_t device, uint64_t inode) noexcept nogil:
    return <size_t>((inode * <uint64_t>0x9E3779B97F4A7C15 ^ device * <uint64_t>0xC2B2AE3D27D4EB4F) >> 20)


cdef inline int chmod_opened(int fd, uint32_t mode) noexcept nogil:
    """chmod(2) by an O_PATH descriptor, which fchmod(2) refuses. chmod(2) by name would follow a
    link that a container has put there instead; /proc/self/fd leads to the opened file itself.
    """
    cdef char path[32]
    snprintf(path, sizeof(path), b"/proc/self/fd/%d", fd)
    return fchmodat(AT_FDCWD, path, mode, 0)
