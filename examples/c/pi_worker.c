/*
 * pi_worker.c - counts random points for pi_master, which starts it. The masters in other languages can use it as well.
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>

#define TAG_WORK 1                      /* from the master: the number of a piece, and how many points it has */
#define TAG_RESULT 2                    /* to the master: the number of the piece, and how many points are hits */
#define TAG_DONE 3                      /* there is no more work, or no master */

#define MODULUS 2147483647LL            /* the generator of random numbers: x becomes x * FACTOR mod MODULUS */
#define FACTOR 48271
#define SEED_STEP 1000003               /* the seed of a piece depends on its number only */

/* Returns the answer of a call, or ends the program if the answer is an error. */
static int must(int answer, const char *call)
{
    if (answer < 0) {
        fprintf(stderr, "pi_worker: %s: error %d\n", call, answer);
        pvm_exit();
        exit(1);
    }
    return answer;
}

/* Returns how many points of a piece lie in the quarter of a circle around 0 with the radius MODULUS. */
static int hits_in(int piece, int points)
{
    long long x, y = 1 + (long long)piece * SEED_STEP;
    int hits = 0;

    for (int i = 0; i < points; i++) {
        x = y * FACTOR % MODULUS;
        y = x * FACTOR % MODULUS;
        if (x * x + y * y < MODULUS * MODULUS)
            hits++;
    }
    return hits;
}

int main(void)
{
    int master = must(pvm_parent(), "pvm_parent");

    /* The daemon sends TAG_DONE when the master ends: no worker waits for a master that is lost. */
    must(pvm_notify(PvmTaskExit, TAG_DONE, 1, &master), "pvm_notify");
    for (;;) {
        int bytes, tag, source, words[2];
        int message = must(pvm_recv(-1, -1), "pvm_recv");
        must(pvm_bufinfo(message, &bytes, &tag, &source), "pvm_bufinfo");
        if (tag == TAG_DONE)
            return pvm_exit() < 0;
        must(pvm_upkint(words, 2, 1), "pvm_upkint");
        words[1] = hits_in(words[0], words[1]);
        must(pvm_initsend(PvmDataDefault), "pvm_initsend");
        must(pvm_pkint(words, 2, 1), "pvm_pkint");
        must(pvm_send(master, TAG_RESULT), "pvm_send");
    }
}
