/* What the programs of the table of moves have in common. A program is called with the name of a row and a folder of its own.
   It sets something up, says "ready", is moved, is told by a file named "go" in the folder, looks whether all is as it was,
   says "right" and ends with status 7. At the first thing that is wrong it says what and ends with status 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* The folder, and a further word for rows that need one. */
static const char *place, *extra = "";

#define CHECK(what) \
    do { \
        if (!(what)) { \
            int why = errno; \
            printf("wrong: line %d: %s (errno %d, %s)\n", __LINE__, #what, why, strerror(why)); \
            fflush(stdout); \
            _exit(1); \
        } \
    } while (0)

/* For what this machine may not have: the test then has nothing to try. */
#define NEED(what) \
    do { \
        if (!(what)) { \
            printf("unable: %s: %s\n", #what, strerror(errno)); \
            fflush(stdout); \
            _exit(7); \
        } \
    } while (0)

/* Waits for a condition that is sure to come; the test has a deadline. */
#define UNTIL(what) do { while (!(what)) usleep(1000); } while (0)

static inline const char *in_place(const char *name) {
    static char path[8][4096];
    static int next;
    char *here = path[next++ % 8];
    snprintf(here, sizeof path[0], "%s/%s", place, name);
    return here;
}

static inline int told_to_go(void) { return access(in_place("go"), F_OK) == 0; }

static inline void moved(void) {
    if (write(1, "ready\n", 6) != 6) _exit(1);
    while (!told_to_go()) usleep(1000);
}

static inline pid_t thread_id(void) { return syscall(SYS_gettid); }

/* The state of the thread that this was opened for, by its own /proc/thread-self/stat. Numbers in /proc are not the task's. */
static inline char state_in(int stat) {
    char text[4096], *after;
    ssize_t read = pread(stat, text, sizeof text - 1, 0);
    text[read > 0 ? read : 0] = 0;
    after = strrchr(text, ')');
    return after && after[1] ? after[2] : 0;
}

/* Waits until the thread sleeps in the kernel, and closes what it has opened to be seen. */
static inline void until_asleep(volatile int *stat) {
    UNTIL(*stat > 0 && state_in(*stat) == 'S');
    close(*stat);
}

static inline int to_be_seen(void) { return open("/proc/thread-self/stat", O_RDONLY); }

/* Words that show where they belong. */
static inline uint64_t word_at(uint64_t i) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
}

struct row {
    const char *name;
    void (*run)(void);
};

static inline int run_row(const struct row *rows, int argc, char **argv) {
    if (argc < 3) return 2;
    place = argv[2];
    if (argc > 3) extra = argv[3];
    for (; rows->name; rows++) {
        if (!strcmp(rows->name, argv[1])) {
            rows->run();
            puts("right");
            fflush(stdout);
            _exit(7);
        }
    }
    printf("wrong: no row %s\n", argv[1]);
    return 2;
}
