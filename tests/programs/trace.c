/*
 * A task that shows where and when it runs.
 *
 *   trace FILE   as a task: appends "TID NUMBER HOST" to FILE every 20 ms
 *
 * Lines of two hosts in turns mean that two copies of one task run.
 */
#include <fcntl.h>
#include <pvm3.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    char host[65] = "", line[160];
    int tid = pvm_mytid();
    if (argc != 2 || tid < 0)
        return 2;
    for (int number = 0;; number++) {
        /* The task may have migrated since the last line. */
        gethostname(host, sizeof host - 1);
        int length = snprintf(line, sizeof line, "t%x %d %s\n", tid, number, host);
        int file = open(argv[1], O_WRONLY | O_CREAT | O_APPEND, 0644);
        if (file < 0 || write(file, line, length) != length)
            return 3;
        close(file);
        usleep(20000);
        while (pvm_nrecv(-1, -1) > 0)
            ;
    }
}
