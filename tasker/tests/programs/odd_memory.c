/* Holds memory of kinds that are read, mapped or restored in another way than most, besides a filled heap, and looks at all of
 * it for ever. Says what it has seen; the first wrong word is the last that it says. Arguments: megabytes, and a file. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ul
#define STRETCHES 64
#define GUARD_INSTALL 102 /* MADV_GUARD_INSTALL, Linux 6.13 */

static char *words;
static size_t bytes;
static char *guarded, *hidden, *private_file, *beyond, *undumped, *thread_stack;
static int guards, channel[2];

static void bad(const char *what)
{
    printf("bad %s %d\n", what, errno);
    fflush(stdout);
    _exit(3);
}

static char *map(size_t length)
{
    char *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        bad("map");
    return at;
}

/* Whether the kernel can read this byte of the program. */
static int readable(const char *at)
{
    char got;
    if (write(channel[1], at, 1) == 1)
        return read(channel[0], &got, 1) == 1;
    if (errno != EFAULT)
        bad("write");
    return 0;
}

static void *waits(void *unused)
{
    for (;;)
        pause();
    return unused;
}

/* Every eighth megabyte of the heap has a page of guards, if there are any here. */
static int is_guard(size_t page)
{
    return guards && page % (8 << 8) == 5;
}

static void look(void)
{
    for (size_t page = 0; page < bytes / PAGE; page += 7) {
        char *at = words + page * PAGE;
        if (is_guard(page) ? readable(at) : at[page % PAGE] != (char)(page + 1))
            bad("word");
    }
    for (size_t page = 5; page < bytes / PAGE; page += 8 << 8)
        if (guards && readable(words + page * PAGE))
            bad("guard in the heap");
    for (int i = 0; guards && i < STRETCHES; i++)
        if (readable(guarded + 2 * i * PAGE) || guarded[(2 * i + 1) * PAGE] != i + 1)
            bad("guarded");
    if (guards && readable(thread_stack))
        bad("stack of a thread");
    if (readable(hidden) || mprotect(hidden, PAGE, PROT_READ) || strcmp(hidden, "hidden") || mprotect(hidden, PAGE, PROT_NONE))
        bad("without permission");
    if (strcmp(private_file, "mine") || private_file[PAGE] != 'f')
        bad("private file");
    if (readable(beyond + PAGE))
        bad("beyond the end");
    if (strcmp(undumped, "undumped"))
        bad("not dumped");
}

int main(int argc, char **argv)
{
    char name[4096], filled[2 * PAGE];
    pthread_t thread;
    pthread_attr_t with_stack;

    (void)argc;
    if (pipe(channel))
        bad("pipe");
    bytes = (size_t)atoi(argv[1]) << 20;
    words = map(bytes);
    for (size_t page = 0; page < bytes / PAGE; page++)
        words[page * PAGE + page % PAGE] = page + 1;
    guarded = map(2 * STRETCHES * PAGE);
    for (int i = 0; i < STRETCHES; i++)
        guarded[(2 * i + 1) * PAGE] = i + 1;
    guards = madvise(guarded, PAGE, GUARD_INSTALL) == 0;
    for (int i = 0; guards && i < STRETCHES; i++)
        if (madvise(guarded + 2 * i * PAGE, PAGE, GUARD_INSTALL))
            bad("guard");
    for (size_t page = 5; guards && page < bytes / PAGE; page += 8 << 8)
        if (madvise(words + page * PAGE, PAGE, GUARD_INSTALL))
            bad("guard");
    /* As the C library makes the stacks of threads since glibc 2.42. */
    thread_stack = map(1 << 20);
    if (guards && madvise(thread_stack, PAGE, GUARD_INSTALL))
        bad("guard");
    pthread_attr_init(&with_stack);
    pthread_attr_setstack(&with_stack, thread_stack + PAGE, (1 << 20) - PAGE);
    if (pthread_create(&thread, &with_stack, waits, NULL))
        bad("thread");
    hidden = map(PAGE);
    strcpy(hidden, "hidden");
    mprotect(hidden, PAGE, PROT_NONE);
    undumped = map(PAGE);
    strcpy(undumped, "undumped");
    madvise(undumped, PAGE, MADV_DONTDUMP);
    snprintf(name, sizeof name, "%s.mapped", argv[2]);
    int file = open(name, O_RDWR | O_CREAT, 0600);
    memset(filled, 'f', sizeof filled);
    if (file < 0 || write(file, filled, sizeof filled) != sizeof filled)
        bad("file");
    private_file = mmap(NULL, sizeof filled, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    beyond = mmap(NULL, sizeof filled, PROT_READ, MAP_SHARED, open(name, O_RDONLY), PAGE);
    if (private_file == MAP_FAILED || beyond == MAP_FAILED)
        bad("map of the file");
    strcpy(private_file, "mine");
    printf(guards ? "with guards\n" : "without guards\n");
    for (long round = 1;; round++) {
        look();
        printf("round %ld\n", round);
        fflush(stdout);
        usleep(1000);
    }
}
