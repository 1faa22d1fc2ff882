/*
 * A farm that computes pictures: each worker sends pieces of a picture to the collector and then "done" to the master.
 * When all workers are done, the master tells the collector to close the picture, of which no piece may be missing.
 */
#include "causal.h"

enum { MASTER, COLLECTOR, WORKER };
enum { TAG_WORK = 1, TAG_DONE, TAG_CLOSE, TAG_CLOSED, TAG_PIECE = 100 };
#define PIECES 4
/* Pictures that may be in work at the same time. */
#define PICTURES 2

static void run_master(void)
{
    for (int picture = 0; picture < job.rounds; picture++) {
        for (int i = 0; i < job.members; i++)
            tell(tid_of(WORKER, i), TAG_WORK, picture);
        for (int i = 0; i < job.members; i++)
            await(-1, TAG_DONE);
        tell(tid_of(COLLECTOR, 0), TAG_CLOSE, picture);
        if (picture >= PICTURES)
            await(tid_of(COLLECTOR, 0), TAG_CLOSED);
    }
}

static void run_worker(void)
{
    for (int picture = 0; picture < job.rounds; picture++) {
        await(tid_of(MASTER, 0), TAG_WORK);
        for (int piece = 0; piece < PIECES; piece++)
            send_data(tid_of(COLLECTOR, 0), TAG_PIECE + picture, piece);
        tell(tid_of(MASTER, 0), TAG_DONE, picture);
    }
}

static void run_collector(void)
{
    for (int picture = 0; picture < job.rounds; picture++) {
        await(tid_of(MASTER, 0), TAG_CLOSE);
        for (int i = 0; i < job.members * PIECES; i++)
            find_at_once(-1, TAG_PIECE + picture);
        be_slow();
        tell(tid_of(MASTER, 0), TAG_CLOSED, picture);
    }
}

static struct role roles[ROLES_MAX] = {
    [MASTER] = { "master", run_master, 1 },
    [COLLECTOR] = { "collector", run_collector, 1 },
    [WORKER] = { "worker", run_worker, 1 },
};

static void prepare(void)
{
    roles[WORKER].count = job.members;
}

int main(int argc, char **argv)
{
    return run_causal("farm", argc, argv, prepare);
}
