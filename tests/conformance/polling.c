/* How many of the messages that have arrived a call takes in: a later receive sees no others. */
#include "conform.h"

typedef int (*matcher)(int, int, int);

static const int plain[] = { 11, 12, 13, 14, 15 };
static const int handled[] = { 50, 12, 50, 50, 13, 50 };
static int kid, other, runs;
static char signal_file[1200];

/* Sends a message with each tag. When all are on their way it makes a file, because a message would be taken in. */
static int talker(int argc, char **argv)
{
    int parent = pvm_parent(), what, k, context = pvm_newcontext();
    (void)argc;
    tell(parent, 900, 1);
    while (pvm_recv(parent, 1) > 0) {
        pvm_upkint(&what, 1, 1);
        /* The parent's send, which would take in a message, is over. */
        usleep(50000);
        for (k = 0; what == 1 && k < 5; k++)
            tell(parent, plain[k], k);
        for (k = 0; what == 2 && k < 6; k++)
            tell(parent, handled[k], k);
        for (k = 0; what == 3 && k < 3; k++) {
            pvm_setcontext(context);
            tell(parent, 41 + k, k);
            pvm_setcontext(PvmBaseContext);
            tell(parent, 61 + k, k);
        }
        pvm_pstat(parent);
        close(open(argv[2], O_CREAT | O_WRONLY, 0600));
    }
    return 0;
}

/* Counts its polls until it finds a message that was sent after the list of its siblings. */
static int sibling(int argc, char **argv)
{
    int polls = 0, end = 1;
    (void)argc, (void)argv;
    pvm_mytid();
    usleep(400000);
    while (end < 1000 && pvm_nrecv(pvm_parent(), 5) <= 0) {
        polls++;
        usleep(1000 * end++);
    }
    tell(pvm_parent(), 6, polls);
    return 0;
}

/* Says that it is ready, gets an order, and answers with the result and that it is ready. */
static int worker(int argc, char **argv)
{
    int parent = pvm_parent(), order;
    (void)argc, (void)argv;
    tell(parent, 70, 0);
    while (pvm_recv(parent, 71) > 0) {
        pvm_upkint(&order, 1, 1);
        tell(parent, 72, order);
        tell(parent, 70, 0);
    }
    return 0;
}

static const role roles[] = { { "talker", talker }, { "sibling", sibling }, { "worker", worker }, { NULL, NULL } };

/* Has messages sent, and waits until they have arrived without a call of the library. */
static void arrive(int what)
{
    double end = now() + PATIENCE_SECONDS;
    tell(kid, 1, what);
    while (access(signal_file, F_OK) && now() < end)
        usleep(2000);
    unlink(signal_file);
    usleep(100000);
}

/* Takes in all messages, in every context, and forgets them. */
static void forget(void)
{
    int context = pvm_setcontext(-1), k;
    pvm_pstat(own_tid);
    for (k = 0; k < 100; k++)
        pvm_nrecv(-1, -1);
    pvm_setcontext(context);
}

static matcher choose(matcher one)
{
    return (matcher)(void *)pvm_recvf(one);
}

static int calls, mids[100];

static int nothing(int mid, int tid, int tag)
{
    (void)mid, (void)tid, (void)tag;
    calls++;
    return 0;
}

static int anything(int mid, int tid, int tag)
{
    (void)tid, (void)tag;
    mids[calls++ % 100] = mid;
    return 2;
}

/* The tags of the messages that were taken in, at least one of them. A match of a low rank ends a poll only after all
 * messages were examined, and no other message is taken in. */
static const char *taken(void)
{
    static char text[400];
    int k, tag;
    calls = 0;
    choose(anything);
    pvm_probe(-1, -1);
    choose(NULL);
    for (k = 0, text[0] = 0; k < calls; k++) {
        pvm_bufinfo(mids[k], NULL, &tag, NULL);
        sprintf(text + strlen(text), k ? " %d" : "%d", tag);
    }
    return text;
}

enum poll { NRECV, PROBE, TRECV_NONE, TRECV_SHORT, TRECV_NEGATIVE };

static void poll_once(enum poll kind)
{
    struct timeval none = { 0, 0 }, some = { 0, 50000 }, negative = { -1, 0 };
    switch (kind) {
    case NRECV:
        pvm_nrecv(-1, 99);
        break;
    case PROBE:
        pvm_probe(-1, 99);
        break;
    case TRECV_NONE:
        pvm_trecv(-1, 99, &none);
        break;
    case TRECV_SHORT:
        pvm_trecv(-1, 99, &some);
        break;
    case TRECV_NEGATIVE:
        pvm_trecv(-1, 99, &negative);
        break;
    }
}

/* How many messages a matching function examines in each of seven polls. */
static const char *examined(enum poll kind)
{
    static char text[200];
    int k;
    arrive(1);
    choose(nothing);
    for (k = 0, text[0] = 0; k < 7; k++) {
        calls = 0;
        poll_once(kind);
        sprintf(text + strlen(text), k ? " %d" : "%d", calls);
    }
    choose(NULL);
    forget();
    return text;
}

static void failing_polls(void)
{
    int k;
    reads(examined(NRECV), "1 2 3 4 5 5 5", "a failing nrecv takes in one message, and examines each message once");
    reads(examined(PROBE), "1 2 3 4 5 5 5", "a failing probe takes in one message, and examines each message once");
    reads(examined(TRECV_NONE), "5 5 5 5 5 5 5", "a failing trecv with no time takes in all that has arrived");
    reads(examined(TRECV_SHORT), "5 5 5 5 5 5 5", "a failing trecv takes in all that arrives in its time");
    reads(examined(TRECV_NEGATIVE), "0 0 0 0 0 0 0", "a trecv with a negative time examines nothing");
    arrive(1);
    for (k = 0; k < 3; k++)
        pvm_nrecv(-1, 99);
    reads(taken(), "11 12 13", "three failing nrecvs take in three messages");
    forget();
    arrive(1);
    for (k = 0; k < 3; k++)
        pvm_probe(-1, 99);
    reads(taken(), "11 12 13", "three failing probes take in three messages");
    forget();
    arrive(1);
    reads(taken(), "11", "a probe that matches takes in one message");
    forget();
    arrive(3);
    for (k = 0; k < 3; k++)
        pvm_nrecv(-1, 99);
    pvm_setcontext(-1);
    reads(taken(), "41 61 42", "messages of other contexts are taken in like others");
    pvm_setcontext(PvmBaseContext);
    forget();
}

static void matching_receives(void)
{
    struct timeval none = { 0, 0 }, some = { 5, 0 };
    int x;
    arrive(1);
    pvm_recv(-1, 13);
    reads(taken(), "11 12", "recv takes in messages up to its own");
    forget();
    arrive(1);
    pvm_precv(-1, 13, &x, 1, PVM_INT, NULL, NULL, NULL);
    reads(taken(), "11 12", "precv takes in messages up to its own");
    forget();
    arrive(1);
    pvm_trecv(-1, 13, &none);
    reads(taken(), "11 12", "trecv with no time takes in messages up to its own");
    forget();
    arrive(1);
    pvm_trecv(-1, 13, &some);
    reads(taken(), "11 12", "trecv takes in messages up to its own");
    forget();
    arrive(1);
    for (x = 0; x < 3; x++)
        pvm_nrecv(-1, 99);
    pvm_recv(-1, 12);
    reads(taken(), "11 13", "a recv of a message that was taken in takes in no other");
    holds(pvm_probe(-1, 11) > 0 && pvm_nrecv(-1, 11) > 0, "a probe and nrecv find a message that was taken in");
    reads(taken(), "13", "a probe or nrecv of a message that was taken in takes in no other");
    calls = 0;
    choose(anything);
    pvm_recv(-1, 99);
    choose(NULL);
    is(calls, 1, "a rank above 1 wins without the messages that were not taken in");
    forget();
    arrive(1);
    calls = 0;
    choose(anything);
    pvm_recv(-1, 99);
    choose(NULL);
    is(calls, 1, "recv takes the first message that it takes in if the rank is above 1");
    forget();
}

static void other_calls(void)
{
    int tids[2], x = 0, *list;
    tids[0] = kid, tids[1] = other;
#define CALL(call, tags, sentence)                                                                                     \
    arrive(1);                                                                                                         \
    pvm_nrecv(-1, 99);                                                                                                 \
    pvm_initsend(PvmDataDefault);                                                                                      \
    call;                                                                                                              \
    reads(taken(), tags, sentence);                                                                                    \
    forget();
    CALL(pvm_mytid(), "11", "mytid takes in no message")
    CALL(pvm_send(other, 7), "11 12", "a send takes in one message")
    CALL(pvm_send(other, 7); pvm_send(other, 7), "11 12 13", "each send takes in one message")
    CALL(pvm_psend(other, 7, &x, 1, PVM_INT), "11 12", "a psend takes in one message")
    CALL(pvm_mcast(tids, 2, 7), "11 12 13", "an mcast takes in two messages")
    CALL(pvm_mcast(tids, 0, 7), "11", "an mcast to nobody takes in no message")
    CALL(pvm_notify(PvmTaskExit, 8, 1, &other), "11 12", "a notify takes in one message")
    CALL(pvm_sendsig(other, SIGCONT), "11 12 13 14 15", "sendsig takes in all that arrived before its answer")
    CALL(pvm_catchout(NULL), "11", "a catchout of null takes in no message")
    CALL(pvm_catchout(stdout); pvm_catchout(NULL), "11 12", "a catchout takes in one message")
    CALL(pvm_setopt(PvmSelfOutputTid, 0), "11", "leaving the destination of the own output takes in no message")
    CALL(pvm_setopt(PvmSelfOutputTid, other); pvm_setopt(PvmSelfOutputTid, 0), "11 12 13 14 15",
        "changing the destination of the own output takes in all that arrived before the answer")
    CALL(pvm_getfds(&list), "11", "getfds takes in no message")
    CALL(pvm_pstat(other), "11 12 13 14 15", "pstat takes in all that arrived before its answer")
    CALL(pvm_config(NULL, NULL, NULL), "11 12 13 14 15", "config takes in all that arrived before its answer")
    CALL(pvm_freecontext(pvm_newcontext()), "11 12 13 14 15", "newcontext takes in all that arrived before its answer")
    CALL(pvm_lookup("polling-none", 0, &x), "11 12 13 14 15", "lookup takes in all that arrived before its answer")
    CALL(pvm_gsize("polling-none"), "11 12 13 14 15", "gsize takes in all that arrived before its answer")
    CALL(pvm_pstat(0), "11", "a pstat that is refused takes in no message")
    CALL(pvm_sendsig(0, SIGCONT), "11", "a sendsig that is refused takes in no message")
    CALL(pvm_spawn((char *)own_name, NULL, PvmTaskDefault, NULL, 0, tids), "11",
        "a spawn of no task takes in no message")
    CALL(pvm_mstat(""), "11", "a mstat of no host takes in no message")
    CALL(pvm_insert("", 0, 1), "11", "an insert without a name takes in no message")
    CALL(pvm_lookup("", 0, &x), "11", "a lookup without a name takes in no message")
}

static int note(int mid)
{
    (void)mid;
    runs++;
    return 0;
}

/* How often a handler has run after each of eight polls. */
static const char *handler_runs(enum poll kind)
{
    static char text[200];
    int k;
    runs = 0;
    arrive(2);
    for (k = 0, text[0] = 0; k < 8; k++) {
        poll_once(kind);
        sprintf(text + strlen(text), k ? " %d" : "%d", runs);
    }
    forget();
    return text;
}

static void handlers(void)
{
    int h = pvm_addmhf(kid, 50, PvmBaseContext, note), *list;
    reads(handler_runs(NRECV), "1 1 2 3 3 4 4 4", "a failing nrecv takes in one message, also for a handler");
    reads(handler_runs(PROBE), "1 1 2 3 3 4 4 4", "a failing probe takes in one message, also for a handler");
    reads(handler_runs(TRECV_NONE), "4 4 4 4 4 4 4 4", "a failing trecv with no time runs a handler for all messages");
    runs = 0;
    arrive(2);
    is(runs, 0, "no handler runs between calls");
    pvm_recv(kid, 12);
    is(runs, 1, "recv runs a handler for messages before its own");
    pvm_recv(kid, 13);
    is(runs, 3, "the next recv runs it for those before the next one");
    forget();
    runs = 0;
    arrive(2);
    pvm_recv(kid, 13);
    pvm_recv(kid, 12);
    is(runs, 3, "a recv of a message that was taken in runs no handler");
    forget();
#define RUN(call, count, sentence)                                                                                     \
    runs = 0;                                                                                                          \
    arrive(2);                                                                                                         \
    pvm_initsend(PvmDataDefault);                                                                                      \
    call;                                                                                                              \
    is(runs, count, sentence);                                                                                         \
    forget();
    RUN(pvm_mytid(), 0, "mytid runs no handler")
    RUN(pvm_getfds(&list), 0, "getfds runs no handler")
    RUN(pvm_send(other, 7), 1, "a send takes in one message for a handler")
    RUN(pvm_psend(other, 7, &h, 1, PVM_INT), 1, "a psend takes in one message for a handler")
    RUN(pvm_sendsig(other, SIGCONT), 4, "sendsig runs a handler for all messages before its answer")
    RUN(pvm_pstat(other), 4, "pstat runs a handler for all messages before its answer")
    RUN(pvm_gsize("polling-none"), 4, "gsize runs a handler for all messages before its answer")
    pvm_delmhf(h);
}

/* A work loop: polls in turn for the worker that is ready and for its result, which it sends first. */
static void polls_in_turn(void)
{
    int tid = start_one("worker"), sent = 0, open = 0, early = 0, order;
    double end = now() + PATIENCE_SECONDS;
    while ((sent < 50 || open) && now() < end) {
        if (sent < 50 && pvm_nrecv(tid, 70) > 0) {
            early += open;
            open = 1;
            tell(tid, 71, sent++);
        }
        if (open && pvm_nrecv(tid, 72) > 0) {
            pvm_upkint(&order, 1, 1);
            open = 0;
        }
    }
    is(sent, 50, "polls for two tags in turn get all messages");
    is(early, 0, "polls for two tags in turn find the earlier message first");
    pvm_kill(tid);
}

static void sentences(void)
{
    char *words[] = { "talker", signal_file, NULL };
    int tid;
    snprintf(signal_file, sizeof signal_file, "%s/polling-arrived", getenv("HOME"));
    unlink(signal_file);
    pvm_spawn((char *)own_name, words, PvmTaskDefault, NULL, 1, &kid);
    await(kid, 900);
    other = start_waiting("waiter", NULL);
    pvm_setopt(PvmAutoErr, 0);
    failing_polls();
    matching_receives();
    other_calls();
    handlers();
    polls_in_turn();
    tid = start_one("sibling");
    tell(tid, 5, 0);
    is(await_int(tid, 6, -1), 1, "the list of siblings is one message for a poll");
    pvm_kill(kid);
    pvm_kill(other);
}
