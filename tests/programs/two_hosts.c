/*
 * A parent with a child on another host. The child is no task of the console that started the parent.
 *
 *   two_hosts FILE HOST    prints a word, waits until FILE exists, and prints another word
 */
#include <pvm3.h>
#include <stdio.h>
#include <unistd.h>

static _Noreturn void child(void)
{
    pvm_initsend(PvmDataDefault);
    pvm_send(pvm_parent(), 1);
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    int tid;
    if (argc < 3)
        child();
    pvm_mytid();
    pvm_setopt(PvmOutputTid, 0);
    if (pvm_spawn(argv[0], NULL, PvmTaskHost, argv[2], 1, &tid) != 1 || pvm_recv(tid, 1) < 0)
        return 1;
    printf("ready\n");
    fflush(stdout);
    while (access(argv[1], F_OK))
        usleep(20000);
    printf("again\n");
    fflush(stdout);
    pvm_kill(tid);
    pvm_exit();
    return 0;
}
