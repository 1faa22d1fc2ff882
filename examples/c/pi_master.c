/*
 * pi_master.c - estimates pi: counts random points of the unit square that lie in the quarter of a circle.
 *
 *   pi_master [WORKERS [PROGRAM]]
 *
 * The master spawns workers and hands out the work in pieces. A worker gets its next piece when it has sent a result.
 * When a worker ends too early, its piece goes to another one. The points of a piece depend on the number of the piece
 * only, so the result does not depend on the worker that computes it.
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>

#define TAG_WORK 1                      /* to a worker: the number of a piece, and how many points it has */
#define TAG_RESULT 2                    /* from a worker: the number of the piece, and how many points are hits */
#define TAG_DONE 3                      /* to a worker: there is no more work */
#define TAG_ENDED 4                     /* from the daemon: a worker has ended */

#define WORKERS_MAX 64
#define PIECES 64
#define POINTS 1000000                  /* in one piece */
#define IDLE -1

static int tids[WORKERS_MAX];           /* the workers; 0 for one that has ended */
static int piece_of[WORKERS_MAX];       /* what each of them works on, or IDLE */
static int todo[PIECES], todo_count;    /* pieces that no worker has */

/* Returns the answer of a call, or ends the program if the answer is an error. */
static int must(int answer, const char *call)
{
    if (answer < 0) {
        fprintf(stderr, "pi_master: %s: error %d\n", call, answer);
        pvm_exit();
        exit(1);
    }
    return answer;
}

/* Gives a piece to each worker that lives and has none, as long as there are pieces. */
static void hand_out(int workers)
{
    for (int i = 0; i < workers && todo_count > 0; i++) {
        if (tids[i] == 0 || piece_of[i] != IDLE)
            continue;
        piece_of[i] = todo[--todo_count];
        int words[] = { piece_of[i], POINTS };
        must(pvm_initsend(PvmDataDefault), "pvm_initsend");
        must(pvm_pkint(words, 2, 1), "pvm_pkint");
        must(pvm_send(tids[i], TAG_WORK), "pvm_send");
    }
}

int main(int argc, char **argv)
{
    int wanted = argc > 1 ? atoi(argv[1]) : 4, results = 0, lost = 0;
    char *program = argc > 2 ? argv[2] : "pi_worker";
    long long hits = 0;

    if (wanted < 1 || wanted > WORKERS_MAX) {
        fprintf(stderr, "usage: pi_master [WORKERS [PROGRAM]], with 1 to %d workers\n", WORKERS_MAX);
        return 2;
    }
    must(pvm_mytid(), "pvm_mytid");
    /* Without some of the workers it takes longer. Without any, the first one's error code says why. */
    int workers = must(pvm_spawn(program, NULL, PvmTaskDefault, "", wanted, tids), "pvm_spawn");
    if (workers == 0)
        must(tids[0], "pvm_spawn of the workers");
    must(pvm_notify(PvmTaskExit, TAG_ENDED, workers, tids), "pvm_notify");

    for (int i = 0; i < workers; i++)
        piece_of[i] = IDLE;
    while (todo_count < PIECES) {
        todo[todo_count] = todo_count;
        todo_count++;
    }
    while (results < PIECES && lost < workers) {
        int tag, bytes, tid, words[2], i = 0;
        hand_out(workers);
        int message = must(pvm_recv(-1, -1), "pvm_recv");
        must(pvm_bufinfo(message, &bytes, &tag, &tid), "pvm_bufinfo");
        if (tag == TAG_RESULT)
            must(pvm_upkint(words, 2, 1), "pvm_upkint");
        else
            must(pvm_upkint(&tid, 1, 1), "pvm_upkint");
        while (i < workers && tids[i] != tid)
            i++;
        if (i == workers)
            continue;
        if (tag == TAG_RESULT) {
            hits += words[1];
            results++;
        } else {
            /* This comes after the last result of that worker, so no piece counts twice. */
            if (piece_of[i] != IDLE)
                todo[todo_count++] = piece_of[i];
            tids[i] = 0;
            lost++;
        }
        piece_of[i] = IDLE;
    }
    if (results < PIECES) {
        fprintf(stderr, "pi_master: all workers have ended, %d of %d results are missing\n", PIECES - results, PIECES);
        pvm_exit();
        return 1;
    }
    must(pvm_initsend(PvmDataDefault), "pvm_initsend");
    for (int i = 0; i < workers; i++)
        if (tids[i] != 0)
            must(pvm_send(tids[i], TAG_DONE), "pvm_send");
    printf("pi is about %.6f: %lld of %lld points, %d of %d workers lost\n", 4.0 * hits / PIECES / POINTS, hits,
           (long long)PIECES * POINTS, lost, workers);
    return pvm_exit() < 0;
}
