/* Receiving: matching, order, probes, time limits, matching functions. */
#include "conform.h"

/* Sends three messages, waits for one, sends another, and so on, as the numbers in the message say. */
static int talker(int argc, char **argv)
{
    int parent = pvm_parent(), what, k;
    (void)argc, (void)argv;
    tell(parent, 900, 1);
    while (pvm_recv(parent, 1) > 0) {
        pvm_upkint(&what, 1, 1);
        if (what == 0)
            break;
        if (what == 1)
            for (k = 0; k < 3; k++)
                tell(parent, 10 + k, k);
        if (what == 2) {
            usleep(200000);
            tell(parent, 20, 1);
        }
        if (what == 3) {
            for (k = 0; k < 5; k++)
                tell(parent, 30, k);
            tell(parent, 31, 0);
        }
    }
    pvm_exit();
    return 0;
}

static const role roles[] = { { "talker", talker }, { NULL, NULL } };
static int kid;

static void matching(void)
{
    int id, tag, src;
    tell(kid, 1, 1);
    is(await_int(kid, 12, -1), 2, "recv takes the message with the tag asked for, wherever it stands");
    id = await(-1, -1);
    pvm_bufinfo(id, NULL, &tag, &src);
    is(tag, 10, "recv with wildcards takes the oldest message");
    is(src, kid, "recv with wildcards tells the sender");
    is(pvm_nrecv(own_tid, 11), 0, "a message of another sender does not match");
    holds(pvm_nrecv(kid, -1) > 0, "a wildcard tag matches any tag");
    is(pvm_nrecv(-1, -1), 0, "nrecv returns 0 when there is nothing");
    tell(kid, 1, 1);
    holds(await(-1, 11) > 0, "a wildcard sender matches any sender");
    await(-1, 10);
    await(-1, 12);
}

static void bad_ones(void)
{
    struct timeval none = { 0, 0 };
    is(pvm_nrecv(-2, 1), PvmBadParam, "nrecv from tid -2 is a bad parameter");
    is(pvm_nrecv(-1, -2), PvmBadParam, "nrecv of tag -2 is a bad parameter");
    is(pvm_probe(-2, 1), PvmBadParam, "probe from tid -2 is a bad parameter");
    is(pvm_probe(-1, -2), PvmBadParam, "probe of tag -2 is a bad parameter");
    is(pvm_trecv(-2, 1, &none), PvmBadParam, "trecv from tid -2 is a bad parameter");
    is(pvm_trecv(-1, -2, &none), PvmBadParam, "trecv of tag -2 is a bad parameter");
}

static void probing(void)
{
    int id, again, tag, len, x;
    tell(kid, 1, 3);
    await(kid, 31);
    id = pvm_probe(kid, 30);
    holds(id > 0, "probe finds a message that has come");
    pvm_bufinfo(id, &len, &tag, NULL);
    holds(len == 4 && tag == 30, "bufinfo tells about a probed message");
    is(pvm_probe(kid, 30), id, "probe finds the same message again");
    again = pvm_nrecv(kid, 30);
    is(again, id, "a later receive takes the message that was probed");
    pvm_upkint(&x, 1, 1);
    is(x, 0, "a probed message is unpacked from its beginning");
    for (x = 1; x < 5; x++)
        pvm_nrecv(kid, 30);
    is(pvm_probe(kid, 30), 0, "probe returns 0 when all have been taken");
}

static void limits(void)
{
    struct timeval none = { 0, 0 }, short_one = { 0, 250000 }, negative = { -1, 0 }, long_one = { 10, 0 };
    double before = now(), took;
    is(pvm_trecv(kid, 99, &short_one), 0, "trecv returns 0 when its time is over");
    took = now() - before;
    holds(took > 0.2 && took < 3, "trecv waits as long as it was told");
    before = now();
    is(pvm_trecv(kid, 99, &none), 0, "trecv with no time returns 0 when nothing has come");
    is(pvm_trecv(kid, 99, &negative), 0, "trecv with a negative time returns 0");
    holds(now() - before < 1, "trecv with no time does not wait");
    before = now();
    tell(kid, 1, 2);
    holds(pvm_trecv(kid, 20, &long_one) > 0, "trecv returns a message that comes in time");
    holds(now() - before < 8, "trecv returns as soon as the message has come");
    tell(kid, 1, 2);
    holds(pvm_trecv(kid, 20, NULL) > 0, "trecv with no limit waits for the message");
    tell(kid, 1, 2);
    before = now();
    while (pvm_probe(kid, 20) == 0 && now() - before < PATIENCE_SECONDS)
        usleep(1000);
    holds(pvm_trecv(kid, 20, &none) > 0, "trecv with no time takes a message that has come");
    tell(kid, 1, 2);
    holds(pvm_recv(kid, 20) > 0, "recv waits for its message");
    tell(kid, 1, 2);
    for (before = now(); pvm_nrecv(kid, 20) == 0 && now() - before < PATIENCE_SECONDS;)
        ;
    holds(now() - before < PATIENCE_SECONDS, "asking with nrecv again and again gets the message");
    tell(kid, 1, 2);
    for (before = now(); pvm_probe(kid, 20) == 0 && now() - before < PATIENCE_SECONDS;)
        ;
    holds(pvm_nrecv(kid, 20) > 0, "asking with probe again and again finds the message");
}

typedef int (*matcher)(int, int, int);

/* PVM's own header declares the result in a strange way. */
static matcher choose(matcher one)
{
    return (matcher)(void *)pvm_recvf(one);
}

static int asked_tid, asked_tag, calls;

static int take_odd(int mid, int tid, int tag)
{
    int n, src;
    asked_tid = tid;
    asked_tag = tag;
    calls++;
    pvm_bufinfo(mid, NULL, &n, &src);
    return src == tid && n % 2 == 1;
}

static int rank_by_tag(int mid, int tid, int tag)
{
    int n;
    (void)tid, (void)tag;
    pvm_bufinfo(mid, NULL, &n, NULL);
    return n == 30 || n == 31 ? 1 : n;
}

static int refuse(int mid, int tid, int tag)
{
    (void)mid, (void)tid, (void)tag;
    return -42;
}

static int nothing(int mid, int tid, int tag)
{
    (void)mid, (void)tid, (void)tag;
    return 0;
}

static void matching_functions(void)
{
    matcher standard;
    int tag, k;
    tell(kid, 1, 1);
    await(kid, 12);
    standard = choose(take_odd);
    pvm_bufinfo(pvm_nrecv(kid, 4711), NULL, &tag, NULL);
    is(tag, 11, "a matching function that says 1 takes its message");
    holds(asked_tid == kid && asked_tag == 4711, "a matching function is told what recv was asked for");
    is(pvm_nrecv(kid, 10), 0, "a matching function that says 0 leaves the message");
    holds(standard != NULL, "recvf returns the standard matcher's address");
    holds(choose(nothing) == take_odd, "recvf returns the previous function");
    is(pvm_probe(-1, -1), 0, "probe asks the matching function");
    choose(refuse);
    is(pvm_nrecv(kid, 10), -42, "a negative answer of a matching function is what the receive returns");
    choose(NULL);
    holds(pvm_nrecv(kid, 10) > 0, "recvf of null restores the standard matching");
    tell(kid, 1, 1);
    await(kid, 12);
    tell(kid, 1, 1);
    await(kid, 12);
    choose(rank_by_tag);
    pvm_bufinfo(pvm_nrecv(-1, -1), NULL, &tag, NULL);
    is(tag, 11, "of answers above 1 the highest wins");
    choose(standard);
    for (k = 0; k < 3; k++)
        pvm_nrecv(-1, -1);
    is(pvm_nrecv(-1, -1), 0, "the standard matcher can be put back by its address");
}

static void sentences(void)
{
    kid = start_one("talker");
    await(kid, 900);
    matching();
    bad_ones();
    probing();
    limits();
    matching_functions();
    tell(kid, 1, 0);
}
