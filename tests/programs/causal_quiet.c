/*
 * A quiet task's message does not wait behind later messages of busy tasks. Two floods send small messages to the
 * receiver all the time. The quiet task first sends many messages to a partner, so that a logical clock of it would be
 * far ahead; then it sends one message to the receiver, and then tells the floods so. The messages of a flood carry the
 * number of quiet messages that the flood has been told of.
 *
 * Messages of floods that were told of the quiet message and still come before it are violations.
 *
 *   -f FILE  a file that all tasks share. The quiet task counts its messages there, too. `overtaken` is the largest
 *            number of messages that floods sent after such a count, and that came before the quiet message. The floods
 *            do not know of the message, so some may overtake it, but not as many as the logical clock is ahead.
 *   -k AHEAD the number of messages to the partner
 */
#include "causal.h"

enum { RECEIVER, QUIET, PARTNER, FLOOD };
enum { TAG_QUIET = 1, TAG_FLOOD, TAG_TOLD, TAG_TAKEN, TAG_NEXT, TAG_LAST, TAG_TALK, TAG_HEARD };
#define FLOODS 2
/* Messages of a flood that may be on their way, and after how many the receiver says that it has them. */
#define FLOOD_WINDOW 1000
#define TAKEN_EVERY 250
/* A flood ends after this many messages even if nobody tells it to. */
#define FLOOD_MAX 2000000
/* The partner says after how many messages that it has them. */
#define TALK_WINDOW 1000

static volatile int *shared_count;

static void map_shared_count(void)
{
    static int own_count;
    shared_count = &own_count;
    if (!job.has_phase_file)
        return;
    int file = open(phase_path, O_RDWR | O_CREAT, 0600);
    must(file, "open shared file");
    must(ftruncate(file, sizeof(int)), "size of shared file");
    void *page = mmap(NULL, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    must(page == MAP_FAILED ? -1 : 0, "map shared file");
    shared_count = page;
}

static void talk_to_partner(void)
{
    int partner = tid_of(PARTNER, 0);
    for (int i = 1; i <= job.members; i++) {
        tell(partner, TAG_TALK, i);
        if (i % TALK_WINDOW == 0)
            await(partner, TAG_HEARD);
    }
}

static void run_partner(void)
{
    int quiet = tid_of(QUIET, 0);
    for (int round = 1; round <= job.rounds; round++)
        for (int i = 1; i <= job.members; i++)
            if (await(quiet, TAG_TALK) % TALK_WINDOW == 0)
                tell(quiet, TAG_HEARD, i);
}

static void run_quiet(void)
{
    map_shared_count();
    for (int round = 1; round <= job.rounds; round++) {
        await(tid_of(RECEIVER, 0), TAG_NEXT);
        talk_to_partner();
        tell(tid_of(RECEIVER, 0), TAG_QUIET, round);
        *shared_count = round;
        for (int i = 0; i < FLOODS; i++)
            tell(tid_of(FLOOD, i), TAG_TOLD, round);
    }
}

static void run_flood(void)
{
    int receiver = tid_of(RECEIVER, 0), sent = 0, taken = 0, is_last = 0;
    int counts[2] = { 0, 0 }; /* of which the flood was told; that it reads in the shared file */
    map_shared_count();
    while (!is_last && sent < FLOOD_MAX) {
        while (!is_last && (pvm_probe(-1, -1) > 0 || sent - taken >= FLOOD_WINDOW)) {
            int tag;
            must(pvm_recv(-1, -1), "recv");
            must(pvm_bufinfo(pvm_getrbuf(), NULL, &tag, NULL), "bufinfo");
            if (tag == TAG_TOLD)
                counts[0] = number_in_message();
            else if (tag == TAG_TAKEN)
                taken += number_in_message();
            else
                is_last = 1;
        }
        counts[1] = *shared_count;
        must(pvm_initsend(PvmDataDefault), "initsend");
        must(pvm_pkint(counts, 2, 1), "pkint");
        must(pvm_send(receiver, TAG_FLOOD), "send");
        sent++;
    }
}

static void run_receiver(void)
{
    int floods[FLOODS], taken[FLOODS] = { 0 };
    for (int i = 0; i < FLOODS; i++)
        floods[i] = tid_of(FLOOD, i);
    for (int round = 1; round <= job.rounds; round++) {
        int tag = 0, round_overtaken = 0;
        tell(tid_of(QUIET, 0), TAG_NEXT, round);
        while (tag != TAG_QUIET) {
            int sender, counts[2];
            must(pvm_recv(-1, -1), "recv");
            must(pvm_bufinfo(pvm_getrbuf(), NULL, &tag, &sender), "bufinfo");
            if (tag == TAG_QUIET)
                continue;
            must(pvm_upkint(counts, 2, 1), "upkint");
            checked++;
            violations += counts[0] >= round;
            round_overtaken += counts[1] >= round;
            int flood = sender == floods[1];
            if (++taken[flood] == TAKEN_EVERY) {
                tell(sender, TAG_TAKEN, taken[flood]);
                taken[flood] = 0;
            }
            be_slow();
        }
        checked++;
        if (round_overtaken > overtaken)
            overtaken = round_overtaken;
    }
    for (int i = 0; i < FLOODS; i++)
        tell(floods[i], TAG_LAST, 0);
}

static struct role roles[ROLES_MAX] = {
    [RECEIVER] = { "receiver", run_receiver, 1 },
    [QUIET] = { "quiet", run_quiet, 1 },
    [PARTNER] = { "partner", run_partner, 1 },
    [FLOOD] = { "flood", run_flood, FLOODS },
};

static void prepare(void)
{
    if (!job.has_phase_file)
        return;
    /* An earlier run may have left its count. */
    map_shared_count();
    *shared_count = 0;
}

int main(int argc, char **argv)
{
    return run_causal("quiet", argc, argv, prepare);
}
