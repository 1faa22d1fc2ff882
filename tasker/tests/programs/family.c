/* A process with little memory of its own, and a child with much. When a file appears the first makes children all the time,
 * and says how many have ended; the other one looks at all of its memory for ever. The first wrong word ends both.
 * Arguments: megabytes of the child, and the file. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t expected(size_t at)
{
    return (at + 1) * 0x9e3779b97f4a7c15ull;
}

static void look(size_t megabytes, int ready)
{
    size_t count = (megabytes << 20) / sizeof(uint64_t);
    uint64_t *words = malloc(count * sizeof *words);
    for (size_t at = 0; at < count; at++)
        words[at] = expected(at);
    if (write(ready, "", 1) != 1)
        abort();
    for (size_t at = 0;; at = (at + 511) % count) {
        if (words[at] != expected(at))
            abort();
        usleep(100);
    }
}

int main(int argc, char **argv)
{
    int ready[2];
    char byte;
    (void)argc;
    if (pipe(ready) != 0)
        return 1;
    pid_t large = fork();
    if (large == 0)
        look((size_t)atoi(argv[1]), ready[1]);
    if (read(ready[0], &byte, 1) != 1)
        return 1;
    puts("full");
    fflush(stdout);
    while (access(argv[2], F_OK) != 0)
        usleep(1000);
    for (int ended = 1;; ended++) {
        int status;
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        if (waitpid(child, &status, 0) != child || status != 0 || waitpid(large, &status, WNOHANG) != 0)
            return 3;
        printf("%d\n", ended);
        fflush(stdout);
        usleep(1000);
    }
}
