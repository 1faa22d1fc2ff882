/*
 * A job that computes in a ring, for checkpoints.
 *
 *   ring_job WORKERS ROUNDS PAUSE FOLDER [HOST]    as a task
 *
 * The first task spawns the workers, on HOST if it is given, and sends a sum around once per round.
 * In each round a task computes for PAUSE microseconds, or sleeps for -PAUSE. The first task appends
 * "ROUND SUM" to FOLDER/log for each round and writes FOLDER/result at the end. If FOLDER/times
 * exists, it appends "ROUND MICROSECONDS" (since 1970) to it; that file is closed after each line, so
 * a checkpoint does not know it, and a restart does not cut it back. A round that finds FOLDER/last is
 * the last one.
 *
 * Each worker also sends the first task a note per round, which is received two rounds later: some
 * notes are always in transit or in the inbox. Every ten rounds all tasks meet at a barrier of the
 * job's group. The sum depends on the state of all tasks.
 */
#include <fcntl.h>
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { TAG_RING = 1, TAG_NOTE, TAG_SETUP, WORKERS_MAX = 64, LATE = 2, MODULUS = 1000003, LAST = 1 << 30 };

static char group[32];

static void busy(int microseconds)
{
    struct timeval begin, now;
    if (microseconds < 0) {
        usleep(-microseconds);
        return;
    }
    gettimeofday(&begin, NULL);
    do {
        gettimeofday(&now, NULL);
        /* A task that was stopped for long does not catch up. */
    } while (now.tv_sec == begin.tv_sec && now.tv_usec - begin.tv_usec < microseconds);
}

static int next_state(int state, int round, int index)
{
    return (int)((state * 17L + round + index) % MODULUS);
}

static int next_sum(int sum, int state)
{
    return (int)((sum * 31L + state) % MODULUS);
}

static void pass(int to, int tag, int round, int sum)
{
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&round, 1, 1);
    pvm_pkint(&sum, 1, 1);
    if (pvm_send(to, tag) < 0)
        exit(4);
}

static void take(int from, int tag, int *round, int *sum)
{
    if (pvm_recv(from, tag) < 0)
        exit(5);
    pvm_upkint(round, 1, 1);
    pvm_upkint(sum, 1, 1);
}

static void note_time(const char *folder, int round)
{
    char path[4096];
    struct timeval now;
    snprintf(path, sizeof path, "%s/times", folder);
    int times = open(path, O_WRONLY | O_APPEND);
    if (times < 0)
        return;
    gettimeofday(&now, NULL);
    dprintf(times, "%d %ld\n", round, now.tv_sec * 1000000L + now.tv_usec);
    close(times);
}

static int meet(int round, int all)
{
    return round % 10 == 9 ? pvm_barrier(group, all) : 0;
}

static int work(int root)
{
    int setup[4], before, after, state = 0;
    if (pvm_recv(root, TAG_SETUP) < 0)
        return 6;
    pvm_upkint(setup, 4, 1);
    pvm_upkint(&before, 1, 1);
    pvm_upkint(&after, 1, 1);
    if (pvm_joingroup(group) < 0 || pvm_barrier(group, setup[1]) < 0)
        return 7;
    for (int round = 0, seen = 0; round < setup[2] && !(seen & LAST); round++) {
        int sum;
        take(before, TAG_RING, &seen, &sum);
        if ((seen & ~LAST) != round)
            return 8;
        busy(setup[3]);
        state = next_state(state, round, setup[0]);
        pass(root, TAG_NOTE, round, state);
        pass(after, TAG_RING, seen, next_sum(sum, state));
        if (meet(round, setup[1]) < 0)
            return 9;
    }
    return 0;
}

static int lead(char **words)
{
    int workers = atoi(words[0]), rounds = atoi(words[1]), pause = atoi(words[2]), all = workers + 1;
    int tids[WORKERS_MAX], me = pvm_mytid(), sum = 1, state = 0;
    char path[4096], end[4096], *host = words[4];
    if (workers < 1 || workers > WORKERS_MAX)
        return 10;
    if (pvm_spawn("ring_job", NULL, host ? PvmTaskHost : PvmTaskDefault, host ? host : "", workers, tids) != workers)
        return 10;
    snprintf(end, sizeof end, "%s/last", words[3]);
    for (int i = 0; i < workers; i++) {
        int setup[4] = { i + 1, all, rounds, pause };
        pvm_initsend(PvmDataDefault);
        pvm_pkint(setup, 4, 1);
        pvm_pkint(i ? &tids[i - 1] : &me, 1, 1);
        pvm_pkint(i + 1 < workers ? &tids[i + 1] : &me, 1, 1);
        pvm_send(tids[i], TAG_SETUP);
    }
    if (pvm_joingroup(group) < 0 || pvm_barrier(group, all) < 0)
        return 7;
    snprintf(path, sizeof path, "%s/log", words[3]);
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    for (int round = 0, last = 0; round < rounds && !last; round++) {
        int seen, note;
        last = access(end, F_OK) ? 0 : LAST;
        state = next_state(state, round, 0);
        pass(tids[0], TAG_RING, round | last, next_sum(sum, state));
        take(tids[workers - 1], TAG_RING, &seen, &sum);
        if (seen != (round | last))
            return 8;
        for (int i = 0; round >= LATE && i < workers; i++) {
            take(tids[i], TAG_NOTE, &seen, &note);
            if (seen != round - LATE)
                return 11;
            sum = next_sum(sum, note);
        }
        dprintf(log, "%d %d\n", round, sum);
        note_time(words[3], round);
        if (meet(round, all) < 0)
            return 9;
    }
    snprintf(path, sizeof path, "%s/result", words[3]);
    int result = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dprintf(result, "%d\n", sum);
    return 0;
}

int main(int argc, char **argv)
{
    int me = pvm_mytid();
    if (me < 0)
        return 2;
    int root = pvm_parent();
    snprintf(group, sizeof group, "ring-t%x", argc >= 5 ? me : root);
    int code = argc >= 5 ? lead(argv + 1) : work(root);
    pvm_exit();
    return code;
}
