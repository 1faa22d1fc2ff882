/*
 * A child between vfork and exec that computes for ever. Prints the child's process id in the
 * namespace first. The parent waits in the kernel.
 */
#include <stdio.h>
#include <unistd.h>

int main(void)
{
    puts("ready");
    fflush(stdout);
    if (vfork() == 0)
        for (volatile unsigned long n = 0;; n++)
            ;
    pause();
    return 0;
}
