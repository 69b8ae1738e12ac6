/* A web server for tests of load: `server PORT MILLISECONDS`.
 *
 * Answers each connection with its host name and closes it. After SIGTERM it serves on for so many
 * milliseconds, then exits with 0. Unlike busybox's, it has a long queue of connections: with a short
 * one the kernel drops a SYN under load, and the client's next one comes a second later, to a server
 * that may have ended by then.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000LL + time.tv_nsec / 1000000;
}

int main(int count, char **words) {
    if (count != 3)
        return 2;
    char name[65] = {0}, answer[256], request[4096];
    gethostname(name, sizeof name - 1);
    int size = snprintf(answer, sizeof answer, "HTTP/1.0 200 OK\r\nContent-Length: %zu\r\n\r\n%s\n", strlen(name) + 1, name);
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    int ended = signalfd(-1, &signals, SFD_CLOEXEC), listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1]))};
    if (ended < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096))
        return 1;
    long long until = 0;
    for (;;) {
        struct pollfd both[2] = {{.fd = listener, .events = POLLIN}, {.fd = until ? -1 : ended, .events = POLLIN}};
        long long left = until - now();
        if (until && left <= 0)
            return 0;
        if (poll(both, 2, until ? left : -1) < 0)
            return 1;
        if (both[1].revents)
            until = now() + atoi(words[2]);
        if (!both[0].revents)
            continue;
        int connection = accept(listener, NULL, NULL);
        if (connection < 0)
            continue;
        struct timeval patience = {.tv_sec = 1}; /* a client that sends nothing */
        setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        if (read(connection, request, sizeof request) > 0 && write(connection, answer, size) < size)
            perror("write");
        close(connection);
    }
}
