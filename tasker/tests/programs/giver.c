/* Fills memory, and when a file appears gives back every second stretch of it, and unmaps the last quarter, while two threads look at
 * what is kept and at memory that was never touched. Says what it does; then looks at all of it: what was given back has
 * to be zero, the rest as it was. The first wrong word is the last that it says. Arguments: megabytes, and the file. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, STRETCH = 3 * PAGE };

static unsigned char *memory, *untouched;
static size_t length;
static volatile int gives = 1;
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

static void check(size_t at, uint64_t seen, uint64_t right)
{
    if (seen == right)
        return;
    printf("bad %zu\n", at);
    fflush(stdout);
    _exit(3);
}

static void *look(void *seed_of)
{
    uint64_t seed = *(const uint64_t *)seed_of;
    for (size_t next = 0; gives; next += PAGE) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        size_t at = seed % (length / 4 * 3 / STRETCH / 2) * 2 * STRETCH + STRETCH + seed / 7 % (STRETCH / 8) * 8;
        check(at, *(const uint64_t *)(memory + at), expected(at));
        check(next, *(const uint64_t *)(untouched + next % length), 0);
    }
    return NULL;
}

static void *map(void)
{
    void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        abort();
    return at;
}

int main(int argc, char **argv)
{
    static const uint64_t seeds[] = { 88172645463325252ull, 7 };
    pthread_t thread, lookers[2];

    (void)argc;
    length = (size_t)atoi(argv[1]) << 20;
    file = argv[2];
    memory = map();
    untouched = map();
    for (size_t at = 0; at < length; at += sizeof(uint64_t))
        *(uint64_t *)(memory + at) = expected(at);
    pthread_create(&thread, NULL, give, NULL);
    puts("full");
    fflush(stdout);
    while (access(file, F_OK) != 0)
        usleep(1000);
    for (int i = 0; i < 2; i++)
        pthread_create(&lookers[i], NULL, look, (void *)&seeds[i]);
    pthread_join(thread, NULL);
    gives = 0;
    for (int i = 0; i < 2; i++)
        pthread_join(lookers[i], NULL);
    puts("gave");
    fflush(stdout);
    for (size_t at = 0; at + STRETCH <= length / 4 * 3; at += 64) {
        check(at, *(const uint64_t *)(memory + at), is_given(at) ? 0 : expected(at));
    }
    puts("right");
    fflush(stdout);
    pause();
}
