# cython: language_level=3
"""Calls libnftables in such a way that the process may have many open descriptors.

The library waits for its netlink socket with select(2), which supports only descriptors below
1,024; beyond that, glibc aborts the process. So each call runs in a thread of its own that does not
share the process's descriptors (close_range(2) with CLOSE_RANGE_UNSHARE, Linux 5.9), so the library
gets the lowest numbers. The thread inherits the caller's network namespace. Creating and joining it
takes 50 us.

Owns:    the library once it is loaded, for the process's life; nothing between calls.
Threads: one call at a time, which the caller ensures: creating a context initializes tables that
         the library shares between contexts.
Raises:  OSError when the thread cannot be created. A refusal by nftables is a return value, not an
         exception.
"""
from libc.errno cimport errno
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport strdup

import os

from engine._fast.linux cimport (
    CLOSE_RANGE_UNSHARE, RTLD_NOW, SYS_close_range, dlopen, dlsym, pthread_join, pthread_t,
    start_thread, syscall,
)

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
    int number              # errno of a failure before the library was called; 0: it was called
    int refused
    char *output            # allocated by strdup; NULL: out of memory
    char *error

cdef Library _library
cdef bint _loaded = False


def load() -> bool:
    """Load libnftables. Returns True if it is available; `run` may be called only then."""
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
    """Returns (True, output) if nftables accepted the commands, else (False, its message)."""
    if not _loaded:
        raise RuntimeError("libnftables is not loaded")
    cdef Call call
    cdef pthread_t thread
    cdef int number
    call.commands = commands
    call.number = call.refused = 0
    call.output = call.error = NULL
    with nogil:
        # Signals are blocked in it: Python's handler writes to a descriptor that it does not have.
        number = start_thread(&thread, _apart, &call)
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
