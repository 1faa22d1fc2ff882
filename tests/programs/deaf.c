/*
 * A job whose tasks do not listen to SIGTERM, but for one.
 *
 *   deaf COUNT     from a command line: spawns COUNT tasks, waits until all have said that they are there, prints "ready tTID"
 *                  and its own tid, and waits for ever
 *   deaf [listen]  as a task: says that it is there, and waits for ever; with "listen" it ends when it is asked to
 */
#include <pvm3.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { TAG_HERE = 1, TASKS_MAX = 100 };

int main(int argc, char **argv)
{
    int tids[TASKS_MAX], parent, i, count;
    char *listen[] = {"listen", NULL};
    if (argc < 2 || argv[1][0] != 'l')
        signal(SIGTERM, SIG_IGN);
    parent = pvm_parent();
    if (parent > 0) {
        pvm_initsend(PvmDataDefault);
        pvm_send(parent, TAG_HERE);
    } else {
        count = argc > 1 ? atoi(argv[1]) : 1;
        if (count < 1 || count > TASKS_MAX)
            return 2;
        for (i = 0; i < count; i++)
            if (pvm_spawn(argv[0], i == 0 ? listen : NULL, PvmTaskDefault, "", 1, tids + i) != 1)
                return 3;
        for (i = 0; i < count; i++)
            pvm_recv(-1, TAG_HERE);
        printf("ready t%x\n", pvm_mytid());
        fflush(stdout);
    }
    for (;;)
        pause();
}
