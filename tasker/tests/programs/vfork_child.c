/*
 * A child between vfork and exec that computes for ever. The parent waits in the kernel. Prints "ready" first.
 *
 *   vfork_child           the parent has one thread
 *   vfork_child threads   the parent has a second thread, which sleeps
 */
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

static void *sleep_forever(void *unused)
{
    for (;;)
        sleep(1000);
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    (void)argv;
    if (argc > 1 && pthread_create(&thread, NULL, sleep_forever, NULL) != 0)
        return 1;
    puts("ready");
    fflush(stdout);
    if (vfork() == 0)
        for (volatile unsigned long n = 0;; n++)
            ;
    pause();
    return 0;
}
