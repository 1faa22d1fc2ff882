/*
 * A parent that prints the output of a child on another host, and leaves.
 *
 *   left_behind HOST    prints "child tTID" when the child has written, and "left" when pvm_exit has returned
 *
 * The child writes a line and a half, and waits until it is ended.
 */
#include <stdio.h>

#include <pvm3.h>
#include <stdlib.h>
#include <unistd.h>

static _Noreturn void child(void)
{
    printf("whole line\nhalf a line");
    fflush(stdout);
    pvm_initsend(PvmDataDefault);
    pvm_send(pvm_parent(), 1);
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    int tid;
    if (argc < 2)
        child();
    pvm_catchout(stdout);
    if (pvm_spawn(argv[0], NULL, PvmTaskHost, argv[1], 1, &tid) != 1)
        return 3;
    if (pvm_recv(tid, 1) < 0)
        return 3;
    printf("child t%x\n", tid);
    fflush(stdout);
    if (pvm_exit() < 0)
        return 3;
    printf("left\n");
    return 0;
}
