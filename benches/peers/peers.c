/*
 * Measures the cost of messages and tasks. It uses only PVM calls, so the same program runs on every PVM.
 *
 *   peers WHAT [name=value ...]      see measure.h for the names
 *
 * WHAT: rtt, ring, one_way, spawn, mcast, fan, packing, add_hosts, await.
 * A round trip includes packing, sending, receiving and unpacking in both directions.
 */
#define _GNU_SOURCE
#include "measure.h"
#include <pvm3.h>
#include <sys/time.h>
#include <unistd.h>

enum { TAG_GO = 1, TAG_PING, TAG_PONG, TAG_END, TAG_HELLO, TAG_GONE };
enum { TASKS_MAX = 2048 };

static struct options o;
static char *block;

static void check(int info, const char *doing)
{
    if (info >= 0)
        return;
    fprintf(stderr, "peers %s: %s: %d\n", o.what, doing, info);
    pvm_exit();
    exit(3);
}

static void give(int tid, int tag, long size)
{
    if (o.way == 1) {
        check(pvm_psend(tid, tag, block, size, PVM_BYTE), "pvm_psend");
        return;
    }
    pvm_initsend(o.way == 2 ? PvmDataInPlace : o.xdr ? PvmDataDefault : PvmDataRaw);
    pvm_pkbyte(block, size, 1);
    check(pvm_send(tid, tag), "pvm_send");
}

static void take(int tid, int tag, long size)
{
    if (o.way == 1) {
        check(pvm_precv(tid, tag, block, size, PVM_BYTE, NULL, NULL, NULL), "pvm_precv");
        return;
    }
    check(pvm_recv(tid, tag), "pvm_recv");
    check(pvm_upkbyte(block, size, 1), "pvm_upkbyte");
}

static void give_up(int count, const int *tids, const char *words)
{
    fprintf(stderr, "peers %s: %s\n", o.what, words);
    for (int i = 0; i < count; i++)
        if (tids[i] > 0)
            pvm_kill(tids[i]);
    pvm_exit();
    exit(3);
}

/* Starts further tasks of this program with the same options: on hosts that the system chooses, on the named host, or,
 * if several hosts are named with commas, one task on each. */
static void start(char **argv, int count, int *tids)
{
    int started = 0;
    if (strchr(o.host, ',')) {
        char *names = strdup(o.host);
        for (char *name = strtok(names, ","); name && started < count; name = strtok(NULL, ","))
            started += pvm_spawn(argv[0], argv + 1, PvmTaskHost, name, 1, tids + started) == 1;
        free(names);
    } else {
        started = pvm_spawn(argv[0], argv + 1, *o.host ? PvmTaskHost : PvmTaskDefault, (char *)o.host, count, tids);
    }
    if (started != count) {
        char words[64];
        snprintf(words, sizeof words, "%d of %d tasks started", started, count);
        give_up(started < 0 ? 0 : count, tids, words);
    }
    for (int i = 0; i < count; i++) {
        struct timeval patience = { 60, 0 };
        if (pvm_trecv(-1, TAG_HELLO, &patience) <= 0) {
            char words[64];
            snprintf(words, sizeof words, "%d of %d tasks came up", i, count);
            give_up(count, tids, words);
        }
    }
}

/* Sends a child its number and, for rings, the tid of its successor. */
static void appoint(int tid, int number, int next)
{
    int facts[2] = { number, next };
    pvm_initsend(PvmDataRaw);
    pvm_pkint(facts, 2, 1);
    check(pvm_send(tid, TAG_GO), "pvm_send");
}

static void appoint_all(int count, const int *tids)
{
    for (int i = 0; i < count; i++)
        appoint(tids[i], i, i + 1 < count ? tids[i + 1] : pvm_mytid());
}

/* Lets the children exit after the last measurement. */
static void dismiss(int count, const int *tids)
{
    for (int i = 0; i < count; i++)
        give(tids[i], TAG_END, 1);
}

static void rtt(char **argv)
{
    static int tids[TASKS_MAX];
    int count = 1 + o.idle;
    start(argv, count, tids);
    appoint_all(count, tids);
    stay_on(o.cores[0]);
    struct samples trips = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us();
        give(tids[0], TAG_PING, o.size);
        take(tids[0], TAG_PONG, o.size);
        if (i >= 0)
            note(&trips, now_us() - begun);
    }
    tell_copy(o.size);
    dismiss(count, tids);
    tell("rtt", &trips);
}

static void rtt_child(int parent, int number)
{
    if (number == 0) {
        stay_on(o.cores[1]);
        for (int i = -o.warm; i < o.rounds; i++) {
            take(parent, TAG_PING, o.size);
            give(parent, TAG_PONG, o.size);
        }
    }
}

/* Sends a message around a ring. Each sample is one lap divided by the number of hops. */
static void ring(char **argv)
{
    static int tids[TASKS_MAX];
    int count = o.tasks - 1;
    start(argv, count, tids);
    appoint_all(count, tids);
    struct samples hops = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us();
        give(tids[0], TAG_PING, o.size);
        take(tids[count - 1], TAG_PING, o.size);
        if (i >= 0)
            note(&hops, (now_us() - begun) / o.tasks);
    }
    dismiss(count, tids);
    tell("hop", &hops);
}

static void ring_child(int next)
{
    for (int i = -o.warm; i < o.rounds; i++) {
        take(-1, TAG_PING, o.size);
        give(next, TAG_PING, o.size);
    }
}

/* Sends a batch of messages and waits for one acknowledgement. Each sample is a batch divided by its messages. */
static void one_way(char **argv)
{
    int tid;
    start(argv, 1, &tid);
    appoint_all(1, &tid);
    stay_on(o.cores[0]);
    struct samples each = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us();
        for (int k = 0; k < o.batch; k++)
            give(tid, TAG_PING, o.size);
        take(tid, TAG_PONG, 1);
        if (i >= 0)
            note(&each, (now_us() - begun) / o.batch);
    }
    dismiss(1, &tid);
    tell("message", &each);
}

static void one_way_child(int parent)
{
    stay_on(o.cores[1]);
    for (int i = -o.warm; i < o.rounds; i++) {
        for (int k = 0; k < o.batch; k++)
            take(parent, TAG_PING, o.size);
        give(parent, TAG_PONG, 1);
    }
}

/* Measures from the call of pvm_spawn to its return, to the first message of a child, and to those of all. */
static void spawn(char **argv)
{
    static int tids[TASKS_MAX];
    struct samples call = samples_for(o.rounds), first = samples_for(o.rounds), all = samples_for(o.rounds);
    int flag = *o.host ? PvmTaskHost : PvmTaskDefault;
    for (int i = -o.warm; i < o.rounds; i++) {
        if (o.pause > 0)
            usleep((useconds_t)o.pause * 1000);
        double begun = now_us();
        int started = pvm_spawn(argv[0], argv + 1, flag, (char *)o.host, o.tasks, tids);
        double returned = now_us();
        check(started == o.tasks ? 0 : -1, "pvm_spawn");
        take(-1, TAG_HELLO, 1);
        double heard = now_us();
        for (int k = 1; k < o.tasks; k++)
            take(-1, TAG_HELLO, 1);
        double up = now_us();
        if (i >= 0) {
            note(&call, returned - begun);
            note(&first, heard - begun);
            note(&all, up - begun);
        }
        /* The next round begins when all tasks of this one have exited. */
        check(pvm_notify(PvmTaskExit, TAG_GONE, o.tasks, tids), "pvm_notify");
        for (int k = 0; k < o.tasks; k++)
            appoint(tids[k], k, 0);
        dismiss(o.tasks, tids);
        for (int k = 0; k < o.tasks; k++)
            check(pvm_recv(-1, TAG_GONE), "pvm_recv");
    }
    tell("call", &call);
    tell("first", &first);
    tell("all", &all);
}

static void answers(int count)
{
    for (int i = 0; i < count; i++)
        take(-1, TAG_PONG, 1);
}

/* A send to one task and a multicast to all: the call alone, and until all receivers have acknowledged. */
static void mcast(char **argv)
{
    static int tids[TASKS_MAX];
    start(argv, o.tasks, tids);
    appoint_all(o.tasks, tids);
    struct samples send_call = samples_for(o.rounds), send_all = samples_for(o.rounds);
    struct samples call = samples_for(o.rounds), all = samples_for(o.rounds);
    for (int i = -o.warm; i < o.rounds; i++) {
        double begun = now_us();
        give(tids[0], TAG_PING, o.size);
        double returned = now_us();
        answers(1);
        double there = now_us(), again = there;
        pvm_initsend(o.xdr ? PvmDataDefault : PvmDataRaw);
        pvm_pkbyte(block, o.size, 1);
        check(pvm_mcast(tids, o.tasks, TAG_PING), "pvm_mcast");
        double called = now_us();
        answers(o.tasks);
        double everywhere = now_us();
        if (i >= 0) {
            note(&send_call, returned - begun);
            note(&send_all, there - begun);
            note(&call, called - again);
            note(&all, everywhere - again);
        }
    }
    dismiss(o.tasks, tids);
    tell("send_call", &send_call);
    tell("send_all", &send_all);
    tell("mcast_call", &call);
    tell("mcast_all", &all);
}

static void mcast_child(int parent, int number)
{
    for (int i = -o.warm; i < o.rounds; i++)
        for (int k = number == 0 ? 2 : 1; k > 0; k--) {
            take(parent, TAG_PING, o.size);
            give(parent, TAG_PONG, 1);
        }
}

/* Round trips with many tasks in turn. If no host is named, the system places the tasks. */
static void fan(char **argv)
{
    static int tids[TASKS_MAX];
    start(argv, o.tasks, tids);
    appoint_all(o.tasks, tids);
    struct samples trips = samples_for(o.rounds * o.tasks);
    for (int i = -o.warm; i < o.rounds; i++)
        for (int k = 0; k < o.tasks; k++) {
            double begun = now_us();
            give(tids[k], TAG_PING, o.size);
            take(tids[k], TAG_PONG, o.size);
            if (i >= 0)
                note(&trips, now_us() - begun);
        }
    dismiss(o.tasks, tids);
    tell("rtt", &trips);
}

static void fan_child(int parent)
{
    for (int i = -o.warm; i < o.rounds; i++) {
        take(parent, TAG_PING, o.size);
        give(parent, TAG_PONG, o.size);
    }
}

/* Measures the calls that pack `batch` items of a type and unpack them from a message to the task itself. */
#define PACKING(name, type, pk, upk)                                                                                   \
    static void packing_##name(int encoding, const char *called)                                                       \
    {                                                                                                                  \
        char packed[32], unpacked[32];                                                                                 \
        struct samples in = samples_for(o.rounds), out = samples_for(o.rounds);                                        \
        type *items = (type *)block;                                                                                   \
        snprintf(packed, sizeof packed, "pack_%s_%s", #name, called);                                                  \
        snprintf(unpacked, sizeof unpacked, "unpack_%s_%s", #name, called);                                            \
        for (int i = -o.warm; i < o.rounds; i++) {                                                                     \
            pvm_initsend(encoding);                                                                                    \
            double begun = now_us();                                                                                   \
            check(pk, "packing");                                                                                      \
            double there = now_us();                                                                                   \
            check(pvm_send(pvm_mytid(), TAG_PING), "pvm_send");                                                        \
            check(pvm_recv(pvm_mytid(), TAG_PING), "pvm_recv");                                                        \
            double again = now_us();                                                                                   \
            check(upk, "unpacking");                                                                                   \
            double back = now_us();                                                                                    \
            if (i >= 0) {                                                                                              \
                note(&in, there - begun);                                                                              \
                note(&out, back - again);                                                                              \
            }                                                                                                          \
        }                                                                                                              \
        tell(packed, &in);                                                                                             \
        tell(unpacked, &out);                                                                                          \
    }

#define NUMBERS(name, type) PACKING(name, type, pvm_pk##name(items, o.batch, 1), pvm_upk##name(items, o.batch, 1))
NUMBERS(byte, char)
NUMBERS(short, short)
NUMBERS(int, int)
NUMBERS(long, long)
NUMBERS(float, float)
NUMBERS(double, double)
NUMBERS(cplx, float)
NUMBERS(dcplx, double)
PACKING(str, char, pvm_pkstr(items), pvm_upkstr(items))

static void packing(void)
{
    static void (*const all[])(int, const char *) = {
        packing_byte,  packing_short,  packing_int,  packing_long,  packing_float,
        packing_double, packing_cplx, packing_dcplx, packing_str,
    };
    free(block);
    block = block_of(16L * o.batch);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        memset(block, 0, 16L * o.batch);
        if (all[i] == packing_str)
            memset(block, 'a', o.batch - 1);
        all[i](PvmDataRaw, "raw");
        all[i](PvmDataDefault, "xdr");
    }
}

/* Adds the hosts of host=h2,h3 in one call. Deletes them again unless keep=1. */
static void add_hosts(void)
{
    static char names[4096];
    char *hosts[64];
    int infos[64], count = 0;
    snprintf(names, sizeof names, "%s", o.host);
    for (char *name = strtok(names, ","); name && count < 64; name = strtok(NULL, ","))
        hosts[count++] = name;
    struct samples call = samples_for(1);
    double begun = now_us();
    int added = pvm_addhosts(hosts, count, infos);
    note(&call, now_us() - begun);
    check(added == count ? 0 : -1, "pvm_addhosts");
    if (!o.keep)
        check(pvm_delhosts(hosts, count, infos), "pvm_delhosts");
    tell("call", &call);
}

/* Waits until at least `tasks` tasks run in addition to this one. */
static void await(void)
{
    for (int tries = 0; tries < 3000; tries++) {
        struct pvmtaskinfo *all;
        int count = 0;
        check(pvm_tasks(0, &count, &all), "pvm_tasks");
        if (count > o.tasks)
            return;
        usleep(10000);
    }
    check(-1, "waiting for tasks");
}

static int child(int parent)
{
    give(parent, TAG_HELLO, 1);
    int facts[2];
    check(pvm_recv(parent, TAG_GO), "pvm_recv");
    pvm_upkint(facts, 2, 1);
    if (!strcmp(o.what, "rtt"))
        rtt_child(parent, facts[0]);
    else if (!strcmp(o.what, "ring"))
        ring_child(facts[1]);
    else if (!strcmp(o.what, "one_way"))
        one_way_child(parent);
    else if (!strcmp(o.what, "mcast"))
        mcast_child(parent, facts[0]);
    else if (!strcmp(o.what, "fan"))
        fan_child(parent);
    take(parent, TAG_END, 1);
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    o = options_of(argc, argv);
    block = block_of(o.size);
    check(pvm_mytid(), "pvm_mytid");
    static const int routes[] = { PvmAllowDirect, PvmRouteDirect, PvmDontRoute };
    pvm_setopt(PvmRoute, routes[o.direct < 0 || o.direct > 2 ? 0 : o.direct]);
    if (o.idle + 1 > TASKS_MAX || o.tasks > TASKS_MAX) {
        fprintf(stderr, "peers: too many tasks\n");
        return 2;
    }
    if (pvm_parent() > 0)
        return child(pvm_parent());
    if (!strcmp(o.what, "rtt"))
        rtt(argv);
    else if (!strcmp(o.what, "ring"))
        ring(argv);
    else if (!strcmp(o.what, "one_way"))
        one_way(argv);
    else if (!strcmp(o.what, "spawn"))
        spawn(argv);
    else if (!strcmp(o.what, "mcast"))
        mcast(argv);
    else if (!strcmp(o.what, "fan"))
        fan(argv);
    else if (!strcmp(o.what, "add_hosts"))
        add_hosts();
    else if (!strcmp(o.what, "packing"))
        packing();
    else if (!strcmp(o.what, "await"))
        await();
    else {
        fprintf(stderr, "peers: no such thing to measure: %s\n", o.what);
        return 2;
    }
    pvm_exit();
    return 0;
}
