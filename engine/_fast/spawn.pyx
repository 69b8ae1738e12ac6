# cython: language_level=3
"""System interfaces for processes that Python's `os` lacks.

`spawn`: a vfork with a working directory, a resource limit and a mount namespace. `sealed`: a
program of an unprivileged user in namespaces of its own. `user_namespace`: one without a process,
with ids mapped to those of the host. `read_only`: a mount of a file that no other process can write
through. `exit_of`: the exit status of a process that is not a child.
`become_subreaper`: prctl(2).

Owns:    nothing; descriptors are the caller's.
Threads: any; `spawn` and `sealed` block until the program has been executed.
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
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/ioctl.h>
    #include <sys/mount.h>
    #include <sys/prctl.h>
    #include <sys/resource.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <sys/wait.h>
    #include <time.h>
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

    /* Linux 5.3 (clone3), 5.11 (close_range with CLOEXEC); older headers lack them. */
    #define ENGINE_CLONE3 435
    #define ENGINE_CLOSE_RANGE 436
    #define ENGINE_CLOSE_RANGE_CLOEXEC 4
    struct engine_clone {
        __u64 flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
    };

    struct engine_sealing {
        const char *program, *directory, *place;
        char *const *argv, *const *envp;
        int in, out, err;
        unsigned user, group;
        const unsigned long *limits;            /* pairs of resource and value */
        int count;
    };

    /* The steps of a sealed child up to exec. The mounts are private to it and read-only but for its directory,
       which is mounted at `place`. System calls alone change its ids: glibc's functions would signal threads that
       this process does not have. A change of ids clears the death signal, so that comes last. */
    static int engine_seal(const struct engine_sealing *wanted)
    {
        struct engine_mount_attributes all = {1 | 2, 0, 0, 0};          /* MOUNT_ATTR_RDONLY, _NOSUID */
        struct engine_mount_attributes own = {2 | 4, 1, 0, 0};          /* _NOSUID, _NODEV; not _RDONLY */
        unsigned long plain[4] = {(unsigned long)SIG_DFL, 0, 0, 0};     /* the kernel's struct sigaction */
        sigset_t none;
        int score;
        for (int number = 1; number < NSIG; number++)
            syscall(SYS_rt_sigaction, number, plain, NULL, 8);
        score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
        if (score >= 0) {
            if (write(score, "500", 3) < 0) { /* it has the parent's then */ }
            close(score);
        }
        if (setsid() < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0
            || mount(wanted->directory, wanted->place, NULL, MS_BIND, NULL) < 0
            || syscall(ENGINE_MOUNT_SETATTR, AT_FDCWD, "/", 0x8000 /* AT_RECURSIVE */, &all, sizeof(all)) < 0
            || syscall(ENGINE_MOUNT_SETATTR, AT_FDCWD, wanted->place, 0, &own, sizeof(own)) < 0
            || chdir(wanted->place) < 0)
            return -1;
        if (dup2(wanted->in, 0) < 0 || dup2(wanted->out, 1) < 0 || dup2(wanted->err, 2) < 0
            || syscall(ENGINE_CLOSE_RANGE, 3U, ~0U, ENGINE_CLOSE_RANGE_CLOEXEC) < 0)
            return -1;
        umask(022);
        for (int index = 0; index < wanted->count; index++) {
            struct rlimit limit = {wanted->limits[2 * index + 1], wanted->limits[2 * index + 1]};
            if (setrlimit(wanted->limits[2 * index], &limit) < 0)
                return -1;
        }
        if (syscall(SYS_setgroups, 0, NULL) < 0
            || syscall(SYS_setresgid, wanted->group, wanted->group, wanted->group) < 0
            || syscall(SYS_setresuid, wanted->user, wanted->user, wanted->user) < 0
            || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0
            || prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
            return -1;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        execve(wanted->program, wanted->argv, wanted->envp);
        return -1;
    }

    /* Not a vfork: a change of ids in shared memory would make the daemon undumpable (prctl(2), PR_SET_DUMPABLE).
       The child reports the error of a step through a pipe, which exec closes. */
    static pid_t engine_sealed(const struct engine_sealing *wanted, int *pidfd, int *failure)
    {
        struct engine_clone how = {
            .flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_PIDFD,
            .pidfd = (__u64)(unsigned long)pidfd,
            .exit_signal = SIGCHLD,
        };
        sigset_t all, before;
        int report[2], error = 0;
        pid_t pid;
        if (pipe2(report, O_CLOEXEC) < 0) {
            *failure = errno;
            return -1;
        }
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, &before);
        pid = syscall(ENGINE_CLONE3, &how, sizeof(how));
        if (pid == 0) {
            /* out of the way of descriptors 0 to 2, which the program gets */
            int last = fcntl(report[1], F_DUPFD_CLOEXEC, 3);
            engine_seal(wanted);
            error = errno;
            if (write(last, &error, sizeof(error)) < 0) { /* the parent has gone */ }
            _exit(127);
        }
        if (pid < 0)
            error = errno;
        sigprocmask(SIG_SETMASK, &before, NULL);
        close(report[1]);
        if (pid > 0)
            while (read(report[0], &error, sizeof(error)) < 0 && errno == EINTR)
                ;
        close(report[0]);
        *failure = error;
        return pid;
    }

    /* Holds its namespaces until it is killed, or its parent has ended. It shares the parent's memory, errno
       included, so it makes only system calls that do not fail. */
    static int engine_idle(void *unused)
    {
        struct timespec limit = {10, 0};
        (void)unused;
        syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        syscall(SYS_ppoll, NULL, 0, &limit, NULL, 0);
        return 0;
    }

    static int engine_proc_open(pid_t pid, const char *name, int flags)
    {
        char path[64];
        snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, name);
        return open(path, flags | O_CLOEXEC);
    }

    static int engine_write_map(pid_t pid, const char *name, const char *text)
    {
        int file = engine_proc_open(pid, name, O_WRONLY), error = 0;
        if (file < 0)
            return errno;
        if (write(file, text, strlen(text)) < 0)
            error = errno;
        close(file);
        return error;
    }

    /* A map is written from outside of the namespace, while a process is in it (user_namespaces(7)). That process
       is not a fork: it copies neither memory nor descriptors, and sends no SIGCHLD. */
    static int engine_user_namespace(const char *uids, const char *gids, int network, int *user, int *net)
    {
        enum { STACK = 16384 };
        int flags = CLONE_VM | CLONE_FILES | CLONE_NEWUSER | (network ? CLONE_NEWNET : 0), error;
        char *stack = malloc(STACK);
        sigset_t all, before;
        pid_t pid;
        *user = *net = -1;
        if (stack == NULL)
            return ENOMEM;
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, &before);
        pid = clone(engine_idle, stack + STACK, flags, NULL);
        error = pid < 0 ? errno : 0;
        sigprocmask(SIG_SETMASK, &before, NULL);
        if (pid > 0) {
            error = engine_write_map(pid, "uid_map", uids);
            if (!error)
                error = engine_write_map(pid, "gid_map", gids);
            if (!error && (*user = engine_proc_open(pid, "ns/user", O_RDONLY)) < 0)
                error = errno;
            if (!error && network && (*net = engine_proc_open(pid, "ns/net", O_RDONLY)) < 0)
                error = errno;
            kill(pid, SIGKILL);
            while (waitpid(pid, NULL, __WALL) < 0 && errno == EINTR)
                ;
        }
        free(stack);
        if (error && *user >= 0) {
            close(*user);
            *user = -1;
        }
        return error;
    }

    /* The child of a vfork enters the user namespace, which a thread of several cannot. Descriptors are shared. */
    struct engine_within {
        int user, net, error;
    };

    static int engine_enter(void *argument)
    {
        struct engine_within *wanted = argument;
        if (setns(wanted->user, CLONE_NEWUSER) < 0 || unshare(CLONE_NEWNET) < 0
            || (wanted->net = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC)) < 0)
            wanted->error = errno;
        return 0;
    }

    static int engine_network_within(int user, int *net)
    {
        enum { STACK = 16384 };
        struct engine_within wanted = {user, -1, 0};
        char *stack = malloc(STACK);
        sigset_t all, before;
        pid_t pid;
        if (stack == NULL)
            return ENOMEM;
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, &before);
        pid = clone(engine_enter, stack + STACK, CLONE_VM | CLONE_VFORK | CLONE_FILES, &wanted);
        if (pid < 0)
            wanted.error = errno;
        sigprocmask(SIG_SETMASK, &before, NULL);
        if (pid > 0)
            while (waitpid(pid, NULL, __WALL) < 0 && errno == EINTR)
                ;
        free(stack);
        *net = wanted.net;
        return wanted.error;
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
    cdef struct engine_sealing:
        const char *program
        const char *directory
        const char *place
        char **argv
        char **envp
        int input "in"
        int out
        int err
        unsigned user
        unsigned group
        const unsigned long *limits
        int count
    pid_t engine_sealed(const engine_sealing *wanted, int *pidfd, int *failure) nogil
    int engine_user_namespace(const char *uids, const char *gids, bint network, int *user, int *net) nogil
    int engine_network_within(int user, int *net) nogil
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


def sealed(
    list argv, list environment, bytes directory not None, bytes place not None, int stdin, int stdout, int stderr,
    unsigned user, unsigned group, limits=(),
) -> tuple:
    """Start the program `argv[0]` (bytes, an absolute path) as an unprivileged user; returns its
    pid and its pidfd (CLOEXEC), which the caller closes. The program is its child.

    It is the first process of a PID namespace: all its descendants end with it. It sees the host's
    files read-only and without setuid. `directory` is mounted at `place`, in its mount namespace
    alone; it starts there and may write there. The network is the host's. It has no other
    descriptors, groups and terminal, and gains no privileges. It is killed when the calling thread
    ends, so that thread waits for it.

    `limits`: at most 8 pairs of a resource and its limit (getrlimit(2)).

    If a step or the execution fails, raises OSError with the kernel's errno, and no child is left.
    """
    cdef int failure = 0
    cdef int pidfd = -1
    cdef pid_t pid
    cdef unsigned long pairs[16]
    cdef engine_sealing wanted
    cdef char **arguments = NULL
    cdef char **variables = NULL
    memset(&wanted, 0, sizeof(wanted))
    for resource, value in limits:
        if wanted.count == 8:
            raise ValueError("a process has at most 8 limits")
        pairs[2 * wanted.count] = resource
        pairs[2 * wanted.count + 1] = value
        wanted.count += 1
    if not argv:
        raise ValueError("no program")
    try:
        arguments = strings(argv)
        variables = strings(environment)
        wanted.program, wanted.directory, wanted.place = arguments[0], directory, place
        wanted.argv, wanted.envp = arguments, variables
        wanted.input, wanted.out, wanted.err = stdin, stdout, stderr
        wanted.user, wanted.group, wanted.limits = user, group, pairs
        with nogil:
            pid = engine_sealed(&wanted, &pidfd, &failure)
    finally:
        free(arguments)
        free(variables)
    if failure:
        if pid > 0:
            os.waitpid(pid, 0)
            os.close(pidfd)
        raise OSError(failure, os.strerror(failure), os.fsdecode(argv[0]))
    return pid, pidfd


def user_namespace(bytes uid_map not None, bytes gid_map not None, bint network=False) -> tuple:
    """A new user namespace with these maps (user_namespaces(7)): its descriptor, and that of a new
    network namespace which it owns; -1 without `network`. Both are CLOEXEC and the caller's.

    Raises OSError: ENOSPC or EUSERS beyond the host's limit of namespaces, EINVAL for a map that
    the kernel refuses.
    """
    cdef int user = -1
    cdef int net = -1
    cdef int failure
    cdef const char *uids = uid_map
    cdef const char *gids = gid_map
    with nogil:
        failure = engine_user_namespace(uids, gids, network, &user, &net)
    if failure:
        raise OSError(failure, os.strerror(failure), "user namespace")
    return user, net


def network_within(int user) -> int:
    """The descriptor (CLOEXEC) of a new network namespace that the user namespace `user` owns."""
    cdef int net = -1
    cdef int failure
    with nogil:
        failure = engine_network_within(user, &net)
    if failure:
        raise OSError(failure, os.strerror(failure), "network namespace")
    return net


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
