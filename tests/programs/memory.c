/*
 * Holds memory of numbers that no two pages share, and watches its own clock.
 *
 *   memory MIB FILE         as a task
 *   memory MIB FILE alone   the same without a virtual machine
 *
 * Five thousand times a second it looks at a word somewhere in its memory and writes it again. FILE gets a line "ready PID 0" when
 * the memory is filled, then "gap FROM TO" for each time its clock jumped by more than GAP_US, in microseconds since 1970,
 * and "bad 0 0" for each word that is not what it was. The file is closed in between: a copy that is built elsewhere needs
 * nothing but its name.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pvm3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define GAP_US 10000
#define LOOK_NS 200000

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* A number for each place, the same at any time. */
static uint64_t mixed(uint64_t place)
{
    place += 0x9e3779b97f4a7c15u;
    place = (place ^ (place >> 30)) * 0xbf58476d1ce4e5b9u;
    place = (place ^ (place >> 27)) * 0x94d049bb133111ebu;
    return place ^ (place >> 31);
}

static int note(const char *file, const char *word, int64_t first, int64_t second)
{
    FILE *out = fopen(file, "a");
    if (!out)
        return 0;
    fprintf(out, "%s %lld %lld\n", word, (long long)first, (long long)second);
    return fclose(out) == 0;
}

/* Closes everything that leads out of the process: the process that started it may have opened it on another host. */
static int is_alone(void)
{
    int null = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; fd++)
        if (dup2(null, fd) < 0)
            return 0;
    return close_range(3, ~0U, 0) == 0 && setsid() >= 0;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    if (argc == 3 ? pvm_mytid() < 0 : !is_alone())
        return 2;
    const char *file = argv[2];
    size_t words = ((size_t)atoi(argv[1]) << 20) / sizeof(uint64_t);
    uint64_t *held = malloc(words * sizeof *held + 1), dice = 1;
    if (!held || !words)
        return 3;
    for (size_t i = 0; i < words; i++)
        held[i] = mixed(i);
    if (!note(file, "ready", getpid(), 0))
        return 4;
    int64_t last = now_us();
    for (;;) {
        struct timespec pause = { 0, LOOK_NS };
        nanosleep(&pause, NULL);
        dice = mixed(dice);
        volatile uint64_t *word = &held[dice % words];
        if (*word != mixed(dice % words) && !note(file, "bad", 0, 0))
            return 4;
        *word = mixed(dice % words);
        int64_t now = now_us();
        if (now - last > GAP_US && !note(file, "gap", last, now))
            return 4;
        last = now_us();
    }
}
