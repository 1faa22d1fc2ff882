/*
 * Measures what the machine and its kernel achieve without a message-passing library: the lower bound for the times of
 * peers.c.
 *
 *   floor WHAT [name=value ...]      see measure.h for the names
 *
 * WHAT:
 *   spin, futex, socket   round trips between two processes
 *   copy                  a copy in memory
 *   start                 from the start of a process to its first output
 *   tcp                   to a `serve` on the named host: a round trip, or with batch=N a stream
 */
#define _GNU_SOURCE
#include "measure.h"
#include <linux/futex.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PORT = 7077 };

extern char **environ;
static struct options o;

static void must(int good, const char *doing)
{
    if (good)
        return;
    perror(doing);
    exit(3);
}

/* Two words in shared memory, each on a cache line of its own. */
struct words {
    _Alignas(128) atomic_int there;
    _Alignas(128) atomic_int back;
};

static void pass(atomic_int *word, int value, int sleeps)
{
    atomic_store_explicit(word, value, memory_order_release);
    if (sleeps)
        syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void await(atomic_int *word, int value, int sleeps)
{
    int seen;
    while ((seen = atomic_load_explicit(word, memory_order_acquire)) != value)
        if (sleeps)
            syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void words(int sleeps)
{
    struct words *w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(w != MAP_FAILED, "mmap");
    pid_t other = fork();
    must(other >= 0, "fork");
    stay_on(o.cores[other == 0]);
    struct samples trips = samples_for(o.rounds);
    for (int i = 1; i <= o.warm + o.rounds; i++) {
        if (other == 0) {
            await(&w->there, i, sleeps);
            pass(&w->back, i, sleeps);
            continue;
        }
        double begun = now_us();
        pass(&w->there, i, sleeps);
        await(&w->back, i, sleeps);
        if (i > o.warm)
            note(&trips, now_us() - begun);
    }
    if (other == 0)
        _exit(0);
    waitpid(other, NULL, 0);
    tell("time", &trips);
}

static void put(int fd, const char *bytes, long count)
{
    for (long done = 0, n; done < count; done += n)
        must((n = write(fd, bytes + done, count - done)) > 0, "write");
}

/* Returns 0 at the end of the stream. */
static int get(int fd, char *bytes, long count)
{
    for (long done = 0, n; done < count; done += n)
        if ((n = read(fd, bytes + done, count - done)) <= 0)
            return 0;
    return 1;
}

static void socket_pair(void)
{
    int ends[2];
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
    char *block = block_of(o.size);
    pid_t other = fork();
    must(other >= 0, "fork");
    close(ends[other == 0]);
    int fd = ends[other != 0];
    stay_on(o.cores[other == 0]);
    if (other == 0) {
        while (get(fd, block, o.size))
            put(fd, block, o.size);
        _exit(0);
    }
    struct samples trips = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us();
        put(fd, block, o.size);
        must(get(fd, block, o.size), "read");
        if (i >= 0)
            note(&trips, now_us() - begun);
    }
    close(fd);
    waitpid(other, NULL, 0);
    tell("time", &trips);
}

static void copy(void)
{
    char *from = block_of(o.size), *to = block_of(o.size);
    struct samples copies = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us();
        memcpy(to, from, o.size);
        /* Changes the source and uses the target, so that the compiler cannot remove the copy. */
        from[(i + o.warm) % o.size] = to[0] + 1;
        __asm__ volatile("" : : "r"(to) : "memory");
        if (i >= 0)
            note(&copies, now_us() - begun);
    }
    tell("time", &copies);
}

static void start(char *own)
{
    struct samples times = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        int ends[2];
        pid_t other;
        char byte, *words[] = { own, "word", NULL };
        posix_spawn_file_actions_t actions;
        must(pipe(ends) == 0, "pipe");
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
        double begun = now_us();
        must(posix_spawn(&other, own, &actions, NULL, words, environ) == 0, "posix_spawn");
        close(ends[1]);
        must(get(ends[0], &byte, 1), "read");
        if (i >= 0)
            note(&times, now_us() - begun);
        waitpid(other, NULL, 0);
        close(ends[0]);
        posix_spawn_file_actions_destroy(&actions);
    }
    tell("time", &times);
}

/* The first data that a client sends to `serve`. */
struct course {
    long size, batch;
};

static void serve(void)
{
    int one = 1, listening = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in place = { .sin_family = AF_INET, .sin_port = htons(PORT) };
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    must(bind(listening, (struct sockaddr *)&place, sizeof place) == 0 && listen(listening, 1) == 0, "listen");
    int fd = accept(listening, NULL, NULL);
    must(fd >= 0, "accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct course course;
    must(get(fd, (char *)&course, sizeof course), "read");
    char *block = block_of(course.size);
    for (;;) {
        for (long i = 0; i < course.batch; i++)
            if (!get(fd, block, course.size))
                return;
        put(fd, block, course.batch == 1 ? course.size : 1);
    }
}

static int dial(void)
{
    struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *found;
    must(getaddrinfo(o.host, NULL, &hints, &found) == 0, "getaddrinfo");
    ((struct sockaddr_in *)found->ai_addr)->sin_port = htons(PORT);
    for (int tries = 0; tries < 1000; tries++) {
        int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            return fd;
        }
        /* The server may not be listening yet. */
        close(fd);
        usleep(10000);
    }
    must(0, "connect");
    return -1;
}

static void tcp(void)
{
    int fd = dial();
    struct course course = { o.size, o.batch };
    char *block = block_of(o.size);
    put(fd, (char *)&course, sizeof course);
    struct samples times = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us();
        for (int k = 0; k < o.batch; k++)
            put(fd, block, o.size);
        must(get(fd, block, o.batch == 1 ? o.size : 1), "read");
        if (i >= 0)
            note(&times, (now_us() - begun) / o.batch);
    }
    tell("time", &times);
}

int main(int argc, char **argv)
{
    o = options_of(argc, argv);
    if (!strcmp(o.what, "word"))
        put(1, "w", 1);
    else if (!strcmp(o.what, "spin") || !strcmp(o.what, "futex"))
        words(!strcmp(o.what, "futex"));
    else if (!strcmp(o.what, "socket"))
        socket_pair();
    else if (!strcmp(o.what, "copy"))
        copy();
    else if (!strcmp(o.what, "start"))
        start(argv[0]);
    else if (!strcmp(o.what, "serve"))
        serve();
    else if (!strcmp(o.what, "tcp"))
        tcp();
    else {
        fprintf(stderr, "floor: no such thing to measure: %s\n", o.what);
        return 2;
    }
    return 0;
}
