/*
 * A notification is an effect of the end of a task. In each round the watcher spawns a task that sends data to the
 * receiver and ends. When the watcher has been notified of the end, it sends a word to the receiver, which has the data
 * first.
 *
 *   -x  the task ends without pvm_exit in odd rounds. PVM 3.4.6 loses the data of such a task now and then.
 */
#include "causal.h"

enum { WATCHER, RECEIVER };
enum { TAG_DATA = 1, TAG_GO, TAG_EXIT, TAG_WORD, TAG_TAKEN };
#define MORTALS_MAX 8

static int run_mortal(void)
{
    int receiver, round, leaves;
    guard_against_hang();
    must(pvm_recv(pvm_parent(), TAG_GO), "recv");
    must(pvm_upkint(&receiver, 1, 1), "unpack");
    must(pvm_upkint(&round, 1, 1), "unpack");
    must(pvm_upkint(&job.bytes, 1, 1), "unpack");
    must(pvm_upkint(&leaves, 1, 1), "unpack");
    send_data(receiver, TAG_DATA, round);
    if (leaves)
        pvm_exit();
    return 0;
}

static void run_watcher(void)
{
    int receiver = tid_of(RECEIVER, 0), mortals[MORTALS_MAX];
    char *arguments[] = { "mortal", NULL };
    for (int round = 0; round < job.rounds; round++) {
        int count = pvm_spawn(own_program, arguments, PvmTaskDefault, NULL, job.members, mortals);
        if (count != job.members)
            must(count < 0 ? count : mortals[count], "spawn");
        must(pvm_notify(PvmTaskExit, TAG_EXIT, count, mortals), "notify");
        for (int i = 0; i < count; i++) {
            int words[] = { receiver, round, job.bytes, !job.abrupt || round % 2 == 0 };
            must(pvm_initsend(PvmDataDefault), "initsend");
            must(pvm_pkint(words, 4, 1), "pkint");
            must(pvm_send(mortals[i], TAG_GO), "send go");
        }
        for (int i = 0; i < count; i++)
            tell(receiver, TAG_WORD, await(-1, TAG_EXIT));
        await(receiver, TAG_TAKEN);
    }
}

static void run_receiver(void)
{
    int watcher = tid_of(WATCHER, 0);
    for (int round = 0; round < job.rounds; round++) {
        for (int i = 0; i < job.members; i++) {
            int ended = await(watcher, TAG_WORD);
            find_at_once(ended, TAG_DATA);
            be_slow();
        }
        tell(watcher, TAG_TAKEN, round);
    }
}

static struct role roles[ROLES_MAX] = {
    [WATCHER] = { "watcher", run_watcher, 1 },
    [RECEIVER] = { "receiver", run_receiver, 1 },
};

static void prepare(void)
{
    must(job.members > MORTALS_MAX ? -1 : 0, "too many tasks");
}

int main(int argc, char **argv)
{
    own_program = argv[0];
    if (argc > 1 && !strcmp(argv[1], "mortal"))
        return run_mortal();
    return run_causal("notify", argc, argv, prepare);
}
