/*
 * Group calls are causes: what members send before a call is there at members for whom the call has returned.
 *
 *   -e barrier  each member sends data to all others and waits in a barrier; then the data of all others is there
 *   -e gather   as above with pvm_gather at instance 0, after which the root has the data of all; its broadcast then
 *               tells the others, which have the data of all, too
 *   -e reduce   as above with pvm_reduce
 *   -e cast     a member sends data to the next member and then broadcasts; all others send a word to this member on
 *               the broadcast, and it has the data before the first of these words
 */
#include "causal.h"

enum { MEMBER };
#define GROUP "causal"
/* A round has its own tag, so that a member finds the data of this round only. */
enum { TAG_CAST = 1, TAG_GATHER, TAG_REDUCE, TAG_WORD, TAG_DATA = 100 };

static void send_to_all(int round)
{
    for (int i = 0; i < task_count; i++)
        if (i != own_number)
            send_data(tids[i], TAG_DATA + round, round);
}

static void find_all(int round)
{
    for (int i = 0; i < task_count; i++)
        if (i != own_number)
            find_at_once(tids[i], TAG_DATA + round);
}

static void cast(int round)
{
    must(pvm_initsend(PvmDataDefault), "initsend");
    must(pvm_pkint(&round, 1, 1), "pkint");
    must(pvm_bcast(GROUP, TAG_CAST), "bcast");
}

/* A collective call at a root, and the broadcast of the root after it. */
static void run_rooted_round(int round)
{
    int root = pvm_gettid(GROUP, 0), own = 1, all[TASKS_MAX];
    must(root, "gettid");
    send_to_all(round);
    if (job.event == 'g')
        must(pvm_gather(all, &own, 1, PVM_INT, TAG_GATHER, GROUP, 0), "gather");
    else
        must(pvm_reduce(PvmSum, &own, 1, PVM_INT, TAG_REDUCE, GROUP, 0), "reduce");
    if (root != pvm_mytid())
        await(root, TAG_CAST);
    be_slow();
    find_all(round);
    if (root == pvm_mytid())
        cast(round);
}

static void run_cast_round(int round)
{
    int caster = round % task_count, receiver = (round + 1) % task_count;
    if (own_number == caster) {
        send_data(tids[receiver], TAG_DATA + round, round);
        cast(round);
    } else if (own_number != receiver) {
        await(tids[caster], TAG_CAST);
        tell(tids[receiver], TAG_WORD, round);
    } else {
        int is_first = 1;
        for (int words = 0; words < task_count - 2; words++) {
            be_slow();
            await(-1, TAG_WORD);
            if (is_first)
                find_at_once(tids[caster], TAG_DATA + round);
            is_first = 0;
        }
        await(tids[caster], TAG_CAST);
    }
}

static void wait_for_all(void)
{
    must(pvm_barrier(GROUP, task_count), "barrier");
}

static void run_member(void)
{
    must(pvm_joingroup(GROUP), "joingroup");
    wait_for_all();
    for (int round = 0; round < job.rounds; round++) {
        if (job.event == 'c') {
            run_cast_round(round);
        } else if (job.event != 'b') {
            run_rooted_round(round);
        } else {
            send_to_all(round);
            wait_for_all();
            be_slow();
            find_all(round);
        }
    }
    wait_for_all();
    must(pvm_lvgroup(GROUP), "lvgroup");
}

static struct role roles[ROLES_MAX] = { [MEMBER] = { "member", run_member, 4 } };

static void prepare(void)
{
    if (job.members > 2)
        roles[MEMBER].count = job.members;
    if (!job.event)
        job.event = 'b';
}

int main(int argc, char **argv)
{
    return run_causal("groups", argc, argv, prepare);
}
