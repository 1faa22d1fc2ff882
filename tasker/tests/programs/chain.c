/*
 * Waits for a signal, with a chain of processes: each creates the next one, after a moment, and exits. Prints "ready".
 * The chain ends after some time.
 */
#include <stdio.h>
#include <unistd.h>

enum { GENERATIONS_MAX = 50000 };

int main(void)
{
    if (fork() != 0) {
        puts("ready");
        fflush(stdout);
        pause();
        return 0;
    }
    for (int generation = 0; generation < GENERATIONS_MAX; generation++) {
        usleep(200);
        if (fork() != 0)
            _exit(0);
    }
    return 0;
}
