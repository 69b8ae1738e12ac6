# cython: language_level=3
"""libnftables, called so that the number of descriptors a process has open does not matter.

The library waits for its netlink socket with select(2), which takes descriptors below 1,024 alone: beyond, glibc ends the process. So each call is
made in a thread of its own without the process's descriptors (close_range(2) with CLOSE_RANGE_UNSHARE, Linux 5.9), where the library's are the
lowest ones. The thread is in the caller's network namespace, as clone(2) has it; to make and join it takes 50 us.

Owns:    the library once it is loaded, for the process's life; nothing between calls.
Threads: one call at a time, the caller sees to it: a context sets up tables that the library shares between contexts.
Raises:  OSError when the thread cannot be made. What nftables refuses is an answer, not an exception.
"""
from libc.errno cimport errno
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport strdup

import os

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t
    ctypedef struct pthread_attr_t:
        pass
    int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *) noexcept nogil, void *argument)
    int pthread_join(pthread_t thread, void **result)

cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    enum:
        SIG_SETMASK
    int sigfillset(sigset_t *signals)
    int pthread_sigmask(int how, const sigset_t *signals, sigset_t *before)

cdef extern from "<dlfcn.h>" nogil:
    enum:
        RTLD_NOW
    void *dlopen(const char *name, int flags)
    void *dlsym(void *library, const char *name)

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_close_range
    long syscall(long number, ...)

cdef extern from "<linux/close_range.h>" nogil:
    enum:
        CLOSE_RANGE_UNSHARE

ctypedef void *(*new_t)(uint32_t) noexcept nogil
ctypedef void (*free_t)(void *) noexcept nogil
ctypedef int (*buffer_t)(void *) noexcept nogil
ctypedef const char *(*text_t)(void *) noexcept nogil
ctypedef int (*run_t)(void *, const char *) noexcept nogil

cdef struct Library:
    new_t new
    free_t free
    buffer_t buffer_output
    buffer_t buffer_error
    text_t output
    text_t error
    run_t run

cdef struct Call:
    const char *commands
    int number              # errno of what went before the library; 0: it was called
    int refused
    char *output            # strdup'ed; NULL: no memory
    char *error

cdef Library _library
cdef bint _loaded = False


def load() -> bool:
    """Whether libnftables is there; from then on `run` may be called."""
    global _loaded
    if _loaded:
        return True
    cdef void *library = dlopen(b"libnftables.so.1", RTLD_NOW)
    if library == NULL:
        return False
    _library.new = <new_t>dlsym(library, b"nft_ctx_new")
    _library.free = <free_t>dlsym(library, b"nft_ctx_free")
    _library.buffer_output = <buffer_t>dlsym(library, b"nft_ctx_buffer_output")
    _library.buffer_error = <buffer_t>dlsym(library, b"nft_ctx_buffer_error")
    _library.output = <text_t>dlsym(library, b"nft_ctx_get_output_buffer")
    _library.error = <text_t>dlsym(library, b"nft_ctx_get_error_buffer")
    _library.run = <run_t>dlsym(library, b"nft_run_cmd_from_buffer")
    _loaded = _library.run != NULL
    return _loaded


def run(bytes commands not None) -> tuple[bool, bytes]:
    """Whether nftables took the commands, and what it printed; else what it said instead."""
    if not _loaded:
        raise RuntimeError("libnftables is not loaded")
    cdef Call call
    cdef pthread_t thread
    cdef sigset_t every, before
    cdef int number
    call.commands = commands
    call.number = call.refused = 0
    call.output = call.error = NULL
    with nogil:
        # A handler would find none of the process's descriptors there, and Python's writes to one.
        sigfillset(&every)
        pthread_sigmask(SIG_SETMASK, &every, &before)
        number = pthread_create(&thread, NULL, _apart, &call)
        pthread_sigmask(SIG_SETMASK, &before, NULL)
        if number == 0:
            pthread_join(thread, NULL)
            number = call.number
    try:
        if number:
            raise OSError(number, os.strerror(number))
        if call.output == NULL or call.error == NULL:
            raise MemoryError()
        return not call.refused, call.error if call.refused else call.output
    finally:
        free(call.output)
        free(call.error)


cdef void *_apart(void *argument) noexcept nogil:
    cdef Call *call = <Call *>argument
    cdef void *context
    if syscall(SYS_close_range, 3, ~<unsigned int>0, CLOSE_RANGE_UNSHARE) < 0:
        call.number = errno
        return NULL
    context = _library.new(0)
    if context == NULL:
        call.number = errno
        return NULL
    _library.buffer_output(context)
    _library.buffer_error(context)
    call.refused = _library.run(context, call.commands) != 0
    call.output = _text(_library.output(context))
    call.error = _text(_library.error(context))
    _library.free(context)
    return NULL


cdef char *_text(const char *given) noexcept nogil:
    return strdup(given) if given != NULL else <char *>calloc(1, 1)
