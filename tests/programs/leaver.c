/*
 * A task with a child that computes for ever and has no descriptor of the task. Prints nothing.
 *
 *   leaver child   the child is an ordinary one
 *   leaver vfork   the child is between vfork and exec, and holds the task's descriptors
 */
#include <pvm3.h>
#include <string.h>
#include <unistd.h>

static void compute(void)
{
    for (volatile unsigned long n = 0;; n++)
        ;
}

int main(int argc, char **argv)
{
    if (argc != 2 || pvm_mytid() < 0)
        return 1;
    if (strcmp(argv[1], "vfork") == 0) {
        if (vfork() == 0)
            compute();
    } else if (fork() == 0) {
        for (int fd = 0; fd < 1024; fd++)
            close(fd);
        compute();
    }
    pvm_recv(-1, -1);
    return 0;
}
