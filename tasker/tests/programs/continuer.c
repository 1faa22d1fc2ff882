/*
 * A parent and a child that compute. The child continues its parent by SIGCONT all the time. Prints "ready".
 */
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
    puts("ready");
    fflush(stdout);
    if (fork() == 0)
        for (;;)
            kill(getppid(), SIGCONT);
    for (volatile unsigned long n = 0;; n++)
        ;
}
