# cython: language_level=3
"""System interfaces for processes that Python's `os` lacks.

`spawn`: a vfork with a working directory, a resource limit and a mount namespace. `read_only`: a
mount of a file that no other process can write through. `exit_of`: the exit status of a process
that is not a child. `become_subreaper`: prctl(2).

Owns:    nothing; descriptors are the caller's.
Threads: any; `spawn` blocks until the program has been executed.
Raises:  OSError with the kernel's errno.
"""
import os

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport errno
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset
from posix.types cimport pid_t

from engine._fast.linux cimport PR_SET_CHILD_SUBREAPER, ioctl, prctl

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <linux/types.h>
    #include <sched.h>
    #include <signal.h>
    #include <string.h>
    #include <sys/ioctl.h>
    #include <sys/resource.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    /* linux/mount.h and asm/unistd.h, Linux 5.2 and 5.12; older headers lack them. The numbers are the same on
       every architecture. */
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

    /* Start a program. posix_spawn(3) sets no resource limits and, before glibc 2.29, no working directory.
       With vfork(2) the monitor's pages are not copied, and the child can store the error of exec. Until exec the
       child runs on the parent's stack and memory, so it makes only system calls, with all signals blocked. A
       script cannot be executed by a close-on-exec descriptor; if that fails, its name is tried. */
    static pid_t engine_spawn(int program, char *const argv[], char *const envp[], const char *cwd,
                              int in, int out, int err, unsigned long files, const int *inherited, int count,
                              int namespace_, int *failure)
    {
        sigset_t all, before;
        volatile int error = 0;
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, &before);
        pid_t pid = vfork();
        if (pid == 0) {
            /* the kernel's struct sigaction, not glibc's */
            unsigned long plain[4] = {(unsigned long)SIG_DFL, 0, 0, 0};
            struct rlimit limit;
            sigset_t none;
            /* also 32 and 33, which glibc reserves and its posix_spawn does not reset */
            for (int number = 1; number < NSIG; number++)
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
    list argv, list environment, bytes cwd not None, int stdin, int stdout, int stderr, unsigned long files,
    int program=-1, inherited=(), int namespace=-1,
) -> int:
    """Start `argv` (bytes) with these three descriptors; returns its pid. Executes the file with
    the descriptor `program`, or `argv[0]`, looked up in PATH.

    The child keeps the descriptors `inherited` (at most 4) under their own numbers. `namespace`: a
    descriptor of the mount namespace to start it in.

    Signal handling is reset to the default. `files`: the soft limit of open files; 0: inherited. If
    execution fails, raises OSError with the kernel's errno, and no child is left.
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
        pid = engine_spawn(
            program, arguments, variables, cwd, stdin, stdout, stderr, files, kept, count, namespace, &failure
        )
    finally:
        free(arguments)
        free(variables)
    if failure:
        if pid > 0:
            os.waitpid(pid, 0)
        raise OSError(failure, os.strerror(failure), os.fsdecode(argv[0]))
    return pid


def read_only(bytes path not None) -> int:
    """A descriptor of the file at `path` in a read-only mount of its own, detached from the tree
    (open_tree(2), mount_setattr(2), Linux 5.12).

    A process that reaches the file through /proc/PID/exe of a process that executes it cannot write
    to it. Raises OSError.
    """
    cdef int descriptor = engine_read_only(path)
    if descriptor < 0:
        raise OSError(errno, os.strerror(errno), os.fsdecode(path))
    return descriptor


def exit_of(int pidfd) -> int | None:
    """Wait status of a process that another parent has reaped (PIDFD_GET_INFO, Linux 6.15 or
    newer). None if the kernel does not know it, or not yet.
    """
    cdef engine_pidfd_info info
    memset(&info, 0, sizeof(info))
    info.mask = ENGINE_PIDFD_INFO_EXIT
    if ioctl(pidfd, ENGINE_PIDFD_GET_INFO, &info) < 0 or not info.mask & ENGINE_PIDFD_INFO_EXIT:
        return None
    return info.exit_code


def become_subreaper() -> None:
    """Make this process a subreaper: orphaned descendants become its children (prctl(2),
    PR_SET_CHILD_SUBREAPER)."""
    if prctl(PR_SET_CHILD_SUBREAPER, <unsigned long>1, <unsigned long>0, <unsigned long>0, <unsigned long>0) < 0:
        PyErr_SetFromErrno(OSError)
