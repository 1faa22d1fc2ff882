/*
 * The job of ring_job.c, by tasks that write their own checkpoints: the same sums, log, times and
 * result.
 *
 *   own_ring WORKERS ROUNDS PAUSE FOLDER    as a task, as ring_job
 *
 * After SIGUSR1 a task receives what has arrived, writes its state into FOLDER/state-TID and exits
 * with status 85. When it is started again, it reads its state and continues; the first task cuts its
 * log back to its state. There is no barrier, because no task may block in a call when it is asked.
 * A worker has no arguments and finds the folder in OWN_RING_FOLDER. OWN_RING_WORKERS, if it is set,
 * becomes SEMPA_ENGINE of the workers.
 */
#include <limits.h>
#include <pvm3.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { TAG_RING = 1, TAG_NOTE, TAG_SETUP, WORKERS_MAX = 64, LATE = 2, KEPT = 8, MODULUS = 1000003, ASKED = 85,
       LAST = 1 << 30 };

static volatile sig_atomic_t asked;

static void note(int signal)
{
    (void)signal;
    asked = 1;
}

/* What a task holds; it is written as it is. */
static struct {
    int index, workers, rounds, pause, before, after, root, tids[WORKERS_MAX];
    /* The round that a task is in, its state, and the sum; of the first task also whether the sum has come around. */
    int round, state, sum, is_back;
    /* Notes that the first task has got and not taken, by round and worker. */
    int notes[KEPT][WORKERS_MAX], is_there[KEPT][WORKERS_MAX];
    long log;
    char folder[2048];
} my;

static FILE *opened(const char *name, const char *mode)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", my.folder, name);
    FILE *file = fopen(path, mode);
    if (file == NULL) {
        perror(path);
        exit(4);
    }
    return file;
}

/* Writes what the task holds, so that there is all of it or what was there before. */
static void keep(void)
{
    char name[64], fresh[PATH_MAX], path[PATH_MAX];
    snprintf(name, sizeof name, "fresh-t%x", pvm_mytid());
    FILE *file = opened(name, "w");
    snprintf(fresh, sizeof fresh, "%s/%s", my.folder, name);
    snprintf(path, sizeof path, "%s/state-t%x", my.folder, pvm_mytid());
    if (fwrite(&my, sizeof my, 1, file) != 1 || fclose(file) != 0 || rename(fresh, path) != 0) {
        perror(path);
        exit(4);
    }
}

static void go_on(void)
{
    char name[64];
    snprintf(name, sizeof name, "state-t%x", pvm_mytid());
    FILE *file = opened(name, "r");
    if (fread(&my, sizeof my, 1, file) != 1)
        exit(5);
    fclose(file);
}

static void busy(void)
{
    struct timeval begin, now;
    if (my.pause < 0) {
        usleep(-my.pause);
        return;
    }
    gettimeofday(&begin, NULL);
    do {
        gettimeofday(&now, NULL);
    } while (now.tv_sec == begin.tv_sec && now.tv_usec - begin.tv_usec < my.pause);
}

/* The round of a message is marked if it is the last one. */
static void pass(int to, int tag, int sum)
{
    int round = my.round + 1 == my.rounds ? my.round | LAST : my.round;
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&round, 1, 1);
    pvm_pkint(&sum, 1, 1);
    if (pvm_send(to, tag) < 0)
        exit(7);
}

static int next_sum(int sum, int state)
{
    return (int)((sum * 31L + state) % MODULUS);
}

static void next_state(void)
{
    my.state = (int)((my.state * 17L + my.round + my.index) % MODULUS);
}

/* The first task sends the sum around once more. A file FOLDER/last makes this round the last one. */
static void begin_round(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/last", my.folder);
    if (access(path, F_OK) == 0)
        my.rounds = my.round + 1;
    next_state();
    pass(my.tids[0], TAG_RING, next_sum(my.sum, my.state));
}

/* The first task has the sum of a round. It continues with the next round if it has the notes of this one, too. True at the end. */
static int end_round(void)
{
    struct timeval now;
    int of = (my.round - LATE) % KEPT;
    for (int i = 0; my.round >= LATE && i < my.workers; i++)
        if (!my.is_there[of][i])
            return 0;
    for (int i = 0; my.round >= LATE && i < my.workers; i++) {
        my.sum = next_sum(my.sum, my.notes[of][i]);
        my.is_there[of][i] = 0;
    }
    my.is_back = 0;
    FILE *log = opened("log", "a");
    /* What stands there that this task does not know of has not happened. */
    if (ftruncate(fileno(log), my.log) != 0)
        exit(6);
    fprintf(log, "%d %d\n", my.round, my.sum);
    my.log = ftell(log);
    fclose(log);
    gettimeofday(&now, NULL);
    FILE *times = opened("times", "a");
    fprintf(times, "%d %ld\n", my.round, now.tv_sec * 1000000L + now.tv_usec);
    fclose(times);
    if (++my.round == my.rounds) {
        FILE *result = opened("result", "w");
        fprintf(result, "%d\n", my.sum);
        fclose(result);
        return 1;
    }
    begin_round();
    return 0;
}

/* Takes a message. True when the task's work is done. */
static int take(int buf)
{
    int len, tag, tid, round, sum;
    pvm_bufinfo(buf, &len, &tag, &tid);
    if (tag == TAG_SETUP) {
        int setup[4];
        pvm_upkint(setup, 4, 1);
        pvm_upkint(&my.after, 1, 1);
        pvm_upkstr(my.folder);
        my.index = setup[0], my.workers = setup[1], my.rounds = setup[2], my.pause = setup[3];
        return 0;
    }
    pvm_upkint(&round, 1, 1);
    pvm_upkint(&sum, 1, 1);
    int is_last = round & LAST;
    round &= ~LAST;
    if (tag == TAG_NOTE) {
        int from = 0;
        while (from < my.workers && my.tids[from] != tid)
            from++;
        if (from == my.workers || my.is_there[round % KEPT][from])
            exit(8);
        my.notes[round % KEPT][from] = sum, my.is_there[round % KEPT][from] = 1;
        return my.is_back && end_round();
    }
    if (tag != TAG_RING || round != my.round || my.is_back)
        exit(9);
    if (is_last)
        my.rounds = round + 1;
    if (my.index == 0) {
        my.sum = sum, my.is_back = 1;
        return end_round();
    }
    busy();
    next_state();
    pass(my.root, TAG_NOTE, my.state);
    pass(my.after, TAG_RING, next_sum(sum, my.state));
    return ++my.round == my.rounds;
}

static int work(void)
{
    struct timeval step = { 0, 2000 }, none = { 0, 0 };
    for (;;) {
        int buf = pvm_trecv(-1, -1, &step);
        if (buf < 0)
            return 10;
        if (buf > 0 && take(buf))
            return 0;
        if (!asked)
            continue;
        while (pvm_trecv(-1, -1, &none) > 0)
            if (take(pvm_getrbuf()))
                return 0;
        /* A task that knows nothing yet starts from the beginning. */
        if (my.folder[0] != '\0')
            keep();
        return ASKED;
    }
}

static void begin(char **words)
{
    my.workers = atoi(words[0]), my.rounds = atoi(words[1]), my.pause = atoi(words[2]), my.sum = 1;
    snprintf(my.folder, sizeof my.folder, "%s", words[3]);
    if (getenv("OWN_RING_WORKERS") != NULL)
        setenv("SEMPA_ENGINE", getenv("OWN_RING_WORKERS"), 1);
    if (my.workers < 1 || my.workers > WORKERS_MAX || pvm_spawn("own_ring", NULL, 0, "", my.workers, my.tids) != my.workers)
        exit(11);
    for (int i = 0; i < my.workers; i++) {
        int setup[4] = { i + 1, my.workers, my.rounds, my.pause }, me = pvm_mytid();
        pvm_initsend(PvmDataDefault);
        pvm_pkint(setup, 4, 1);
        pvm_pkint(i + 1 < my.workers ? &my.tids[i + 1] : &me, 1, 1);
        pvm_pkstr(my.folder);
        pvm_send(my.tids[i], TAG_SETUP);
    }
    begin_round();
}

int main(int argc, char **argv)
{
    struct sigaction action = { .sa_handler = note };
    sigaction(SIGUSR1, &action, NULL);
    if (pvm_mytid() < 0)
        return 2;
    /* A worker receives its folder; the first task knows it. */
    const char *folder = argc == 5 ? argv[4] : getenv("OWN_RING_FOLDER");
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/state-t%x", folder != NULL ? folder : ".", pvm_mytid());
    if (getenv("SEMPA_AGAIN") != NULL && access(path, R_OK) == 0) {
        snprintf(my.folder, sizeof my.folder, "%s", folder);
        go_on();
    } else if (argc == 5) {
        begin(argv + 1);
    }
    my.root = pvm_parent();
    int code = work();
    if (code == ASKED)
        return code;
    pvm_exit();
    return code;
}
