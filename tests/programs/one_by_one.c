/*
 * A task that spawns others one after the other, each in the same way.
 *
 *   one_by_one COUNT      from a command line: spawns COUNT tasks, each when the one before has said its number, and prints "tTID"
 *                         of each; then asks all of them to end and prints "all N ended". Fails if one was not started.
 *   one_by_one            as a task: says its number to its parent, and ends when it is asked to
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>

enum { TAG_HERE = 1, TAG_END, TAG_GONE };
enum { TASKS_MAX = 1000 };

static int child(int parent)
{
    int number = pvm_mytid();
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&number, 1, 1);
    pvm_send(parent, TAG_HERE);
    pvm_recv(parent, TAG_END);
    return pvm_exit();
}

int main(int argc, char **argv)
{
    static int tids[TASKS_MAX];
    int parent = pvm_parent();
    if (parent > 0)
        return child(parent);
    int count = argc > 1 ? atoi(argv[1]) : 1;
    if (count < 1 || count > TASKS_MAX)
        return 2;
    for (int i = 0; i < count; i++) {
        int number = 0, started = pvm_spawn(argv[0], 0, PvmTaskDefault, "", 1, tids + i);
        if (started != 1) {
            fprintf(stderr, "spawn %d: %d\n", i, tids[i]);
            return 3;
        }
        pvm_recv(tids[i], TAG_HERE);
        pvm_upkint(&number, 1, 1);
        if (number != tids[i])
            return 4;
        printf("t%x\n", (unsigned)tids[i]);
        fflush(stdout);
    }
    pvm_notify(PvmTaskExit, TAG_GONE, count, tids);
    pvm_initsend(PvmDataDefault);
    pvm_mcast(tids, count, TAG_END);
    for (int i = 0; i < count; i++)
        pvm_recv(-1, TAG_GONE);
    printf("all %d ended\n", count);
    return pvm_exit();
}
