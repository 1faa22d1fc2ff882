/* Fills memory and then looks at it for ever, here and there and in two threads, now and then also in a child. Says what it
 * has seen; the first wrong word is the last that it says. Arguments: megabytes, and a file without which there are no
 * children. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t *words;
static size_t count;

static uint64_t expected(size_t at)
{
    return (at + 1) * 0x9e3779b97f4a7c15ull;
}

static void look(uint64_t *seed, int times)
{
    for (int i = 0; i < times; i++) {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        size_t at = *seed % count;
        if (words[at] != expected(at)) {
            printf("bad %zu\n", at);
            fflush(stdout);
            _exit(3);
        }
    }
}

static void *other(void *unused)
{
    uint64_t seed = 7;
    for (;;) {
        look(&seed, 20);
        usleep(500);
    }
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    uint64_t seed = 88172645463325252ull;

    (void)argc;
    count = ((size_t)atoi(argv[1]) << 20) / sizeof *words;
    words = malloc(count * sizeof *words);
    for (size_t at = 0; at < count; at++)
        words[at] = expected(at);
    pthread_create(&thread, NULL, other, NULL);
    for (long round = 1;; round++) {
        look(&seed, 50);
        if (round % 20 == 0 && access(argv[2], F_OK) == 0) {
            int status;
            pid_t child = fork();
            if (child == 0) {
                look(&seed, 30);
                _exit(0);
            }
            waitpid(child, &status, 0);
            if (status)
                _exit(4);
        }
        printf("round %ld\n", round);
        fflush(stdout);
        usleep(1000);
    }
}
