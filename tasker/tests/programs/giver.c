/* Fills memory, and when a file appears gives back every second stretch of it, and unmaps the last quarter. Says what it does; then
 * looks at all of it for ever: what was given back has to be zero, the rest as it was. The first wrong word is the last that
 * it says. Arguments: megabytes, and the file. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, STRETCH = 3 * PAGE };

static unsigned char *memory;
static size_t length;
static const char *file;

static uint64_t expected(size_t at)
{
    return (at + 1) * 0x9e3779b97f4a7c15ull;
}

static int is_given(size_t at)
{
    return at / STRETCH % 2 == 0;
}

static void *give(void *unused)
{
    while (access(file, F_OK) != 0)
        usleep(1000);
    puts("gives");
    fflush(stdout);
    for (size_t at = 0; at + STRETCH <= length / 4 * 3; at += STRETCH) {
        if (is_given(at) && madvise(memory + at, STRETCH, MADV_DONTNEED) != 0)
            abort();
    }
    for (size_t at = length / 4 * 3; at < length; at += 16 * PAGE) {
        if (munmap(memory + at, 16 * PAGE) != 0)
            abort();
    }
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t thread;

    (void)argc;
    length = (size_t)atoi(argv[1]) << 20;
    file = argv[2];
    memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < length; at += sizeof(uint64_t))
        *(uint64_t *)(memory + at) = expected(at);
    pthread_create(&thread, NULL, give, NULL);
    puts("full");
    fflush(stdout);
    pthread_join(thread, NULL);
    puts("gave");
    fflush(stdout);
    for (size_t at = 0; at + STRETCH <= length / 4 * 3; at += 64) {
        uint64_t seen = *(uint64_t *)(memory + at);
        if (seen != (is_given(at) ? 0 : expected(at))) {
            printf("bad %zu\n", at);
            return 3;
        }
    }
    puts("right");
    fflush(stdout);
    pause();
}
