/* What bench/micro/conftest.py needs below valgrind: client requests of callgrind, and openat2(2).
 * Preloaded, and called by ctypes. Outside of valgrind the requests do nothing. */
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <valgrind/callgrind.h>

int under_valgrind(void) { return RUNNING_ON_VALGRIND; }

/* Before: a large block joins all small ones that were freed since the last, which costs thousands
 * of instructions for what others have left. */
void count_from_here(void) {
    malloc_trim(0);
    free(malloc(100 << 10));
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

/* Writes the count since count_from_here to the next output file, under this name. */
void count_to_here(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}

/* valgrind 3.19 knows no openat2(2). Here it is openat(2), which ignores `resolve`. */
long syscall(long number, ...) {
    long a, b, c, d, e, f, result;
    va_list rest;
    va_start(rest, number);
    a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
    d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_openat2) {
        const struct open_how *how = (const struct open_how *)c;
        return openat((int)a, (const char *)b, (int)how->flags, (mode_t)how->mode);
    }
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if ((unsigned long)result > -4096UL) {
        errno = (int)-result;
        return -1;
    }
    return result;
}
