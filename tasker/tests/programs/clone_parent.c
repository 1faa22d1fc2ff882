/*
 * Creates a computing child whose parent is the parent of this process (CLONE_PARENT), and prints "ready".
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
    if (syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0) == 0)
        for (volatile unsigned long n = 0;; n++)
            ;
    puts("ready");
    fflush(stdout);
    pause();
    return 0;
}
