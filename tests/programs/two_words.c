/*
 * A task that prints a word, waits until a file exists, and prints another word.
 *
 *   two_words FILE [HOST]    with HOST, the task has a child there, which is no task of the console that started the task
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
    int tid = 0;
    if (pvm_mytid() < 0)
        return 1;
    if (argc < 2)
        child();
    if (argc > 2) {
        pvm_setopt(PvmOutputTid, 0);
        if (pvm_spawn(argv[0], NULL, PvmTaskHost, argv[2], 1, &tid) != 1 || pvm_recv(tid, 1) < 0)
            return 1;
    }
    printf("ready\n");
    fflush(stdout);
    while (access(argv[1], F_OK))
        usleep(20000);
    printf("again\n");
    fflush(stdout);
    if (tid > 0)
        pvm_kill(tid);
    pvm_exit();
    return 0;
}
