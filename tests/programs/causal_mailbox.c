/*
 * An entry of the mailbox is a cause: the sender sends data to the receiver and then makes an entry. In even rounds the
 * reader reads the entry and sends a word to the receiver, which has the data before the word. In odd rounds the
 * receiver reads the entry itself and then has the data.
 *
 * Half of the reads wait in the call for the entry; the others return at once and are repeated.
 */
#include "causal.h"

enum { SENDER, RECEIVER, READER };
enum { TAG_DATA = 1, TAG_WORD, TAG_NEXT };

static const char *entry_name(int round)
{
    static char name[64];
    snprintf(name, sizeof name, "causal-%x-%d", tid_of(SENDER, 0), round);
    return name;
}

static void read_entry(int round)
{
    int buffer;
    if (round % 4 < 2) {
        buffer = pvm_recvinfo((char *)entry_name(round), 0, PvmMboxWaitForInfo);
    } else {
        /* The library must not print each "not found". */
        pvm_setopt(PvmAutoErr, 0);
        do
            buffer = pvm_recvinfo((char *)entry_name(round), 0, PvmMboxDefault);
        while (buffer == PvmNotFound);
    }
    must(buffer, "recvinfo");
    if (number_in_message() != round)
        must(-1, "entry of another round");
}

static void run_sender(void)
{
    int receiver = tid_of(RECEIVER, 0), round = 0;
    for (; round < job.rounds; round++) {
        if (round % 2 == 0)
            tell(tid_of(READER, 0), TAG_NEXT, round);
        send_data(receiver, TAG_DATA, round);
        must(pvm_initsend(PvmDataDefault), "initsend");
        must(pvm_pkint(&round, 1, 1), "pkint");
        int index = pvm_putinfo((char *)entry_name(round), pvm_getsbuf(), PvmMboxDefault);
        must(index, "putinfo");
        await(receiver, TAG_NEXT);
        must(pvm_delinfo((char *)entry_name(round), index, PvmMboxDefault), "delinfo");
    }
}

static void run_reader(void)
{
    for (int round = 0; round < job.rounds; round += 2) {
        await(tid_of(SENDER, 0), TAG_NEXT);
        read_entry(round);
        tell(tid_of(RECEIVER, 0), TAG_WORD, round);
    }
}

static void run_receiver(void)
{
    int sender = tid_of(SENDER, 0), reader = tid_of(READER, 0);
    for (int round = 0; round < job.rounds; round++) {
        if (round % 2 == 0)
            await(reader, TAG_WORD);
        else
            read_entry(round);
        find_at_once(sender, TAG_DATA);
        be_slow();
        tell(sender, TAG_NEXT, round);
    }
}

static struct role roles[ROLES_MAX] = {
    [SENDER] = { "sender", run_sender, 1 },
    [RECEIVER] = { "receiver", run_receiver, 1 },
    [READER] = { "reader", run_reader, 1 },
};

static void prepare(void)
{
}

int main(int argc, char **argv)
{
    return run_causal("mailbox", argc, argv, prepare);
}
