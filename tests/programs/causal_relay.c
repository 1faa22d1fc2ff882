/*
 * The sender sends data to the receiver and then a word to the first relay. The relays pass the word on, and the last
 * one sends it to the receiver, which must get the data first.
 *
 *   -m  the sender sends the data to the receiver and to the first relay in one multicast, instead of the word
 *   -p  the receiver waits for the word of the last relay and must then find the data at once
 *   -w  a small message of the sender follows each data message, which the word must not overtake either
 *   -t  a third pair of tasks exchanges messages on an explicit direct route meanwhile
 */
#include "causal.h"

enum { SENDER, RECEIVER, RELAY, THIRD };
enum { TAG_DATA = 1, TAG_NOTICE, TAG_WORD, TAG_TAKEN, TAG_LAST, TAG_PING, TAG_LAST_PING };

static void end_third_pair(void)
{
    if (job.third_pair)
        tell(tid_of(THIRD, 0), TAG_LAST, 0);
}

static void run_sender(void)
{
    int receiver = tid_of(RECEIVER, 0), relay = tid_of(RELAY, 0), both[] = { receiver, relay }, taken = 0, round = 0;
    while (!is_over(round)) {
        round++;
        pack_data(round);
        if (job.multicast)
            must(pvm_mcast(both, 2, TAG_DATA), "mcast");
        else
            must(pvm_send(receiver, TAG_DATA), "send");
        if (job.notices)
            tell(receiver, TAG_NOTICE, round);
        if (!job.multicast)
            tell(relay, TAG_WORD, round);
        while (round - taken >= window())
            taken = await(receiver, TAG_TAKEN);
    }
    tell(relay, TAG_LAST, round);
    end_third_pair();
}

static void run_relay(void)
{
    int before = own_number == 0 ? tid_of(SENDER, 0) : tid_of(RELAY, own_number - 1);
    int after = own_number == job.members - 1 ? tid_of(RECEIVER, 0) : tid_of(RELAY, own_number + 1);
    for (int tag = TAG_WORD; tag != TAG_LAST;) {
        must(pvm_recv(before, -1), "recv");
        must(pvm_bufinfo(pvm_getrbuf(), NULL, &tag, NULL), "bufinfo");
        tell(after, tag == TAG_LAST ? TAG_LAST : TAG_WORD, number_in_message());
    }
}

static void take_all(void)
{
    int data = 0, notice = 0, last = -1, sender = tid_of(SENDER, 0);
    /* A word that breaks the order is followed by its data, so the last round is over when both have come. */
    while (last < 0 || data < last || (job.notices && notice < last)) {
        int tag;
        must(pvm_recv(-1, -1), "recv");
        must(pvm_bufinfo(pvm_getrbuf(), NULL, &tag, NULL), "bufinfo");
        int number = number_in_message();
        if (tag == TAG_DATA) {
            data = number;
            tell(sender, TAG_TAKEN, data);
        } else if (tag == TAG_NOTICE) {
            notice = number;
        } else {
            check_seen(data, number);
            if (job.notices)
                check_seen(notice, number);
            if (tag == TAG_LAST)
                last = number;
        }
        be_slow();
    }
}

static void pick_words_first(void)
{
    int last_relay = tid_of(RELAY, job.members - 1), sender = tid_of(SENDER, 0);
    for (;;) {
        int tag;
        must(pvm_recv(last_relay, -1), "recv");
        must(pvm_bufinfo(pvm_getrbuf(), NULL, &tag, NULL), "bufinfo");
        if (tag == TAG_LAST)
            return;
        int data = find_at_once(sender, TAG_DATA);
        if (job.notices)
            find_at_once(sender, TAG_NOTICE);
        tell(sender, TAG_TAKEN, data);
        be_slow();
    }
}

static void run_receiver(void)
{
    if (job.picks)
        pick_words_first();
    else
        take_all();
}

/* The first of the pair sends and the second answers, until the sender has sent its last word. */
static void run_third(void)
{
    int other = tid_of(THIRD, 1 - own_number), is_last = 0;
    set_route(PvmRouteDirect);
    while (!is_last) {
        if (own_number == 0) {
            is_last = pvm_nrecv(tid_of(SENDER, 0), TAG_LAST) > 0;
            tell(other, is_last ? TAG_LAST_PING : TAG_PING, 0);
            await(other, TAG_PING);
        } else {
            must(pvm_recv(other, -1), "recv");
            int tag;
            must(pvm_bufinfo(pvm_getrbuf(), NULL, &tag, NULL), "bufinfo");
            is_last = tag == TAG_LAST_PING;
            tell(other, TAG_PING, 0);
        }
    }
}

static struct role roles[ROLES_MAX] = {
    [SENDER] = { "sender", run_sender, 1 },
    [RECEIVER] = { "receiver", run_receiver, 1 },
    [RELAY] = { "relay", run_relay, 1 },
    [THIRD] = { "third", run_third, 0 },
};

static void prepare(void)
{
    roles[RELAY].count = job.members;
    if (job.third_pair)
        roles[THIRD].count = 2;
}

int main(int argc, char **argv)
{
    return run_causal("relay", argc, argv, prepare);
}
