/* The least that the kernel takes for some rows: their system calls from C, with no engine around them. See floors.py.

   floors receive ARCHIVE                  the archive through a socket into one buffer, forgotten
   floors files DIRECTORY COUNT THREADS    so many small files, a hundred in a directory, like those of the archive
   floors large DIRECTORY SIZE             one file, 512 KiB at a time
   floors put DIRECTORY COUNT SIZE ARCHIVE all three at once: two threads make files while the archive is received, and its end written
   floors terminal BYTES PROGRAM...        what a program writes to a terminal with the kernel's own settings, read and forgotten

   Each writes the milliseconds that passed, and those of its own processor time (the receiving side's). */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <pty.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 512 << 10 };

static char buffer[BUFFER];
static int count, threads;

static double milliseconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static int directory(const char *path)
{
    int found = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (found < 0)
        err(1, "%s", path);
    return found;
}

static void write_file(int where, const char *name, const char *data, size_t size)
{
    struct timespec times[2] = {{1600000000, 0}, {1600000000, 0}};
    int file = openat(where, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (file < 0 || write(file, data, size) != (ssize_t)size || futimens(file, times) < 0 || close(file) < 0)
        err(1, "%s", name);
}

struct share {
    int top;
    int first;
};

static void *write_share(void *argument)
{
    struct share *share = argument;
    for (int begin = share->first * 100; begin < count; begin += threads * 100) {
        char name[32];
        snprintf(name, sizeof name, "d%d", begin / 100);
        if (mkdirat(share->top, name, 0755) < 0)
            err(1, "%s", name);
        int where = openat(share->top, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
        for (int at = begin; at < begin + 100 && at < count; at++) {
            snprintf(name, sizeof name, "file%d", at);
            write_file(where, name, buffer, 100 + at % 4000);
        }
        close(where);
    }
    return NULL;
}

static void start(pthread_t *thread, struct share *share)
{
    if (pthread_create(thread, NULL, write_share, share) != 0)
        errx(1, "no thread");
}

/* A descriptor to receive the file from. */
static int sent(const char *path)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        err(1, "socketpair");
    pid_t child = fork();
    if (child < 0)
        err(1, "fork");
    if (child == 0) {
        int file = open(path, O_RDONLY);
        close(ends[1]);
        while (sendfile(ends[0], file, NULL, 1 << 30) > 0)
            ;
        _exit(0);
    }
    close(ends[0]);
    return ends[1];
}

static void receive(int from, int file, long skipped)
{
    ssize_t size;
    while (skipped > 0 && (size = recv(from, buffer, skipped < BUFFER ? skipped : BUFFER, 0)) > 0)
        skipped -= size;
    while ((size = recv(from, buffer, BUFFER, 0)) > 0)
        if (file >= 0 && write(file, buffer, size) != size)
            err(1, "large");
}

static int large(int where)
{
    int file = openat(where, "large", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file < 0)
        err(1, "large");
    return file;
}

static void terminal(long wanted, char **program)
{
    int master;
    ssize_t size;
    pid_t child = forkpty(&master, NULL, NULL, NULL);
    if (child < 0)
        err(1, "forkpty");
    if (child == 0) {
        execv(program[0], program);
        err(1, "%s", program[0]);
    }
    while (wanted > 0 && (size = read(master, buffer, BUFFER)) > 0)
        for (char *at = buffer; (at = memchr(at, '\n', buffer + size - at)) != NULL; at++)
            wanted -= 1;
    if (wanted > 0)
        errx(1, "%ld lines did not come", wanted);
    close(master);
    waitpid(child, NULL, 0);
}

int main(int many, char **words)
{
    const char *what = many > 2 ? words[1] : "";
    pthread_t others[16];
    struct share shares[16];
    memset(buffer, 'x', sizeof buffer);
    double begin = milliseconds(CLOCK_MONOTONIC), processor = milliseconds(CLOCK_PROCESS_CPUTIME_ID);
    if (strcmp(what, "receive") == 0 && many == 3) {
        receive(sent(words[2]), -1, 0);
    } else if ((strcmp(what, "files") == 0 || strcmp(what, "put") == 0) && many >= 5) {
        int put = what[0] == 'p', top = directory(words[2]);
        count = atoi(words[3]);
        threads = put ? 2 : atoi(words[4]);
        for (int at = 0; at < threads && at < 16; at++) {
            shares[at] = (struct share){top, at};
            start(&others[at], &shares[at]);
        }
        if (put) {
            struct stat archive;
            if (many != 6 || stat(words[5], &archive) < 0)
                err(1, "archive");
            receive(sent(words[5]), large(top), archive.st_size - atol(words[4]));
        }
        for (int at = 0; at < threads && at < 16; at++)
            pthread_join(others[at], NULL);
    } else if (strcmp(what, "large") == 0 && many == 4) {
        int file = large(directory(words[2]));
        for (long left = atol(words[3]); left > 0; left -= BUFFER)
            if (write(file, buffer, left < BUFFER ? left : BUFFER) < 0)
                err(1, "large");
        close(file);
    } else if (strcmp(what, "terminal") == 0 && many > 3) {
        terminal(atol(words[2]), words + 3);
    } else {
        errx(2, "see the source");
    }
    printf("%.3f %.3f\n", milliseconds(CLOCK_MONOTONIC) - begin, milliseconds(CLOCK_PROCESS_CPUTIME_ID) - processor);
    return 0;
}
