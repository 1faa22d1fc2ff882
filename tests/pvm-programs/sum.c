/*
 * A master whose workers add the numbers of one part of a range each.
 *
 *   sum WORKERS LAST   prints the sum of 1 to LAST
 */
#include <stdio.h>
#include <stdlib.h>
#include <pvm3.h>

enum { TAG_PART = 1, TAG_SUM = 2, WORKERS_MAX = 16 };

static int work(int master)
{
    long first, last, sum = 0;
    pvm_recv(master, TAG_PART);
    pvm_upklong(&first, 1, 1);
    pvm_upklong(&last, 1, 1);
    for (long number = first; number <= last; number++)
        sum += number;
    pvm_initsend(PvmDataDefault);
    pvm_pklong(&sum, 1, 1);
    pvm_send(master, TAG_SUM);
    return pvm_exit();
}

int main(int argc, char **argv)
{
    int master = pvm_parent();
    if (pvm_mytid() < 0)
        return 1;
    if (master > 0)
        return work(master);
    int workers = argc > 1 ? atoi(argv[1]) : 2, tids[WORKERS_MAX];
    long last = argc > 2 ? atol(argv[2]) : 1000, sum = 0, part;
    if (workers < 1 || workers > WORKERS_MAX)
        return 2;
    if (pvm_spawn("sum", NULL, PvmTaskDefault, "", workers, tids) != workers) {
        fprintf(stderr, "sum: the workers cannot be started\n");
        return 3;
    }
    for (int i = 0; i < workers; i++) {
        long begin = last * i / workers + 1, end = last * (i + 1) / workers;
        pvm_initsend(PvmDataDefault);
        pvm_pklong(&begin, 1, 1);
        pvm_pklong(&end, 1, 1);
        pvm_send(tids[i], TAG_PART);
    }
    for (int i = 0; i < workers; i++) {
        pvm_recv(-1, TAG_SUM);
        pvm_upklong(&part, 1, 1);
        sum += part;
    }
    printf("%d workers: %ld\n", workers, sum);
    return pvm_exit();
}
