/*
 * Holds memory and counts.
 *
 *   hold MIB        as a task: holds this number of MiB, counts, and answers every message with its count; if it is negative,
 *                   MiB of zeros that were written
 *   hold MIB FILE   the same, with this file open for writing
 *   hold MIB memfd  the same, with 32 MiB more that are a file without a name
 *   hold MIB guards the same, with a page that nobody can read (MADV_GUARD_INSTALL, Linux 6.13)
 *   hold MIB writes the same, but it changes a few pages each time it counts
 *   hold ask TID    from a command line: asks one such task and prints "count N sum GOOD|BAD"
 *   hold end TID    ends such a task
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

enum { TAG_ASK = 1, TAG_ANSWER, TAG_END };

enum { EXTRA_BYTES = 32 << 20, EXTRA = 7 };

enum { PAGE_BYTES = 4096, PAGES_AT_ONCE = 4 };

enum { GUARD_INSTALL = 102 };

/* The page that nobody can read, or none. */
static unsigned char *guard;

static int make_guard(void)
{
    guard = mmap(NULL, 256 * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    guard[PAGE_BYTES] = EXTRA;
    return madvise(guard, PAGE_BYTES, GUARD_INSTALL) == 0;
}

static int is_guard_good(void)
{
    int ends[2], is_unreadable;
    if (pipe(ends) != 0)
        return 0;
    is_unreadable = write(ends[1], guard, 1) < 0 && errno == EFAULT;
    close(ends[0]);
    close(ends[1]);
    return is_unreadable && guard[PAGE_BYTES] == EXTRA;
}

static FILE *extra_memory(void)
{
    FILE *file = fdopen(memfd_create("held", 0), "w+");
    for (int i = 0; file && i < EXTRA_BYTES; i++)
        if (putc(EXTRA, file) == EOF)
            return NULL;
    return file && fflush(file) == 0 ? file : NULL;
}

static int is_extra_good(FILE *file)
{
    int bytes = 0, byte;
    rewind(file);
    while ((byte = getc(file)) == EXTRA)
        bytes++;
    return byte == EOF && bytes == EXTRA_BYTES;
}

/* Adds to one byte each of a few pages, and to the sum of all. */
static void write_some(unsigned char *held, size_t bytes, unsigned int *dice, unsigned long long *sum)
{
    for (int i = 0; i < PAGES_AT_ONCE; i++) {
        *dice = *dice * 1664525u + 1013904223u;
        unsigned char *at = held + *dice % (bytes / PAGE_BYTES) * PAGE_BYTES + i;
        *sum -= *at;
        *sum += ++*at;
    }
}

static int serve(size_t bytes, int zeros, int writes, FILE *extra)
{
    unsigned int dice = 1, count = 0;
    unsigned long long sum = 0;
    unsigned char *held = malloc(bytes + 1);
    /* Or the compiler would know that fresh memory has zeros already. */
    for (volatile unsigned char *at = held; at < held + bytes; at++)
        *at = zeros ? 0 : (unsigned char)((dice = dice * 1664525u + 1013904223u) >> 24);
    for (size_t i = 0; i < bytes; i++)
        sum += held[i];
    for (;;) {
        struct timeval step = { 0, 1000 };
        int buf = pvm_trecv(-1, -1, &step), len, tag, tid;
        count++;
        if (buf < 0)
            return 3;
        if (writes)
            write_some(held, bytes, &dice, &sum);
        if (buf == 0)
            continue;
        pvm_bufinfo(buf, &len, &tag, &tid);
        if (tag == TAG_END)
            break;
        unsigned long long again = 0;
        for (size_t i = 0; i < bytes; i++)
            again += held[i];
        int good = again == sum && (!extra || is_extra_good(extra)) && (!guard || is_guard_good());
        pvm_initsend(PvmDataDefault);
        pvm_pkuint(&count, 1, 1);
        pvm_pkint(&good, 1, 1);
        pvm_send(tid, TAG_ANSWER);
    }
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    if (pvm_mytid() < 0)
        return 2;
    if (argc < 3 || (strcmp(argv[1], "ask") != 0 && strcmp(argv[1], "end") != 0)) {
        int is_memory = argc > 2 && strcmp(argv[2], "memfd") == 0;
        int writes = argc > 2 && strcmp(argv[2], "writes") == 0;
        int guards = argc > 2 && strcmp(argv[2], "guards") == 0;
        FILE *extra = is_memory ? extra_memory() : NULL;
        FILE *file = argc > 2 && !is_memory && !writes && !guards ? fopen(argv[2], "a+") : NULL;
        if (guards && !make_guard())
            return 5;
        if (argc > 2 && !extra && !writes && !guards && (!file || fputs("held\n", file) < 0 || fflush(file) != 0))
            return 4;
        int mib = argc > 1 ? atoi(argv[1]) : 0;
        return serve((size_t)abs(mib) << 20, mib < 0, writes, extra);
    }
    int tid = (int)strtoul(argv[2] + (argv[2][0] == 't'), NULL, 16);
    pvm_initsend(PvmDataDefault);
    if (pvm_send(tid, strcmp(argv[1], "end") == 0 ? TAG_END : TAG_ASK) < 0)
        return 2;
    if (strcmp(argv[1], "end") != 0) {
        struct timeval patience = { 30, 0 };
        unsigned int count;
        int good;
        if (pvm_trecv(tid, TAG_ANSWER, &patience) <= 0) {
            printf("no answer\n");
            return 1;
        }
        pvm_upkuint(&count, 1, 1);
        pvm_upkint(&good, 1, 1);
        printf("count %u sum %s\n", count, good ? "GOOD" : "BAD");
    }
    pvm_exit();
    return 0;
}
