/* Groups: joining, asking, broadcasts, barriers, collectives, static groups. */
#include "conform.h"

#define MEMBERS 4

/* No header of PVM declares these functions of its group library. */
int pvm_grphostinfo(char *group, int host_tid, int *coordinator, int *members, int *hosts);
int pvm_grpvhostinfo(char *group, int **coordinators, int **members, int *hosts);

/* Joins a group and then carries out commands: one int each time, the answer goes to the parent. */
enum { LEAVE, BARRIER, REDUCE, GATHER, SCATTER, FREEZE, RECEIVE, JOIN, SIZE };

static const char *const group = "conform";

static int answers[8];

static void act(int what, int count)
{
    int mine = pvm_getinst((char *)group, pvm_mytid()), values[2], all[16] = { 0 }, part[2] = { 0 }, info = 0;
    answers[1] = answers[2] = answers[3] = 0;
    values[0] = mine + 1;
    values[1] = 10 * (mine + 1);
    switch (what) {
    case JOIN: info = pvm_joingroup((char *)group); break;
    case LEAVE: info = pvm_lvgroup((char *)group); break;
    case BARRIER: info = pvm_barrier((char *)group, count); break;
    case FREEZE: info = pvm_freezegroup((char *)group, count); break;
    case SIZE: info = pvm_gsize((char *)group); break;
    case REDUCE: info = pvm_reduce(PvmSum, values, 2, PVM_INT, 40, (char *)group, 0); break;
    case GATHER: info = pvm_gather(all, values, 2, PVM_INT, 41, (char *)group, 0); break;
    case SCATTER: info = pvm_scatter(part, all, 2, PVM_INT, 42, (char *)group, 0); break;
    case RECEIVE:
        if (await(-1, 43) > 0) {
            pvm_upkint(&info, 1, 1);
            pvm_bufinfo(pvm_getrbuf(), NULL, NULL, &answers[3]);
        }
        break;
    }
    answers[0] = info;
    answers[1] = part[0];
    answers[2] = part[1];
}

static int member(int argc, char **argv)
{
    int parent = pvm_parent(), what[2], first;
    (void)argc, (void)argv;
    pvm_setopt(PvmAutoErr, 0);
    first = pvm_joingroup((char *)group);
    tell(parent, 1, first);
    while (pvm_recv(parent, 2) > 0) {
        pvm_upkint(what, 2, 1);
        act(what[0], what[1]);
        tell_all(parent, 3, answers, 4);
    }
    return 0;
}

static const role roles[] = { { "member", member }, { NULL, NULL } };

static int kids[MEMBERS], of_kid[MEMBERS][4];

static void order(int kid, int what, int count)
{
    int words[2] = { what, count };
    tell_all(kids[kid], 2, words, 2);
}

static void order_all(int what, int count)
{
    int k;
    for (k = 1; k < MEMBERS; k++)
        order(k, what, count);
}

static int answer(int kid)
{
    memset(of_kid[kid], -1, sizeof of_kid[kid]);
    if (await(kids[kid], 3) > 0)
        pvm_upkint(of_kid[kid], 4, 1);
    return of_kid[kid][0];
}

/* Waits until one of two kids answers; which one. */
static int answer_of_either(int a, int b)
{
    double end = now() + PATIENCE_SECONDS;
    while (pvm_probe(kids[a], 3) == 0 && pvm_probe(kids[b], 3) == 0 && now() < end)
        usleep(2000);
    if (pvm_probe(kids[a], 3) == 0)
        a = b;
    answer(a);
    return a;
}

/* True if all kids answer with this. */
static int all_answer(int wanted)
{
    int k, good = 1;
    for (k = 1; k < MEMBERS; k++)
        good = answer(k) == wanted && good;
    return good;
}

static void joining(void)
{
    int k, good = 1;
    is(pvm_gsize("nobody"), PvmNoGroup, "the size of an unknown group finds no group");
    is(pvm_getinst("nobody", own_tid), PvmNoGroup, "getinst of an unknown group finds no group");
    is(pvm_gettid("nobody", 0), PvmNoGroup, "gettid of an unknown group finds no group");
    is(pvm_lvgroup("nobody"), PvmNoGroup, "leaving an unknown group finds no group");
    is(pvm_joingroup((char *)group), 0, "the first member of a group is instance 0");
    is(pvm_joingroup((char *)group), PvmDupGroup, "joining a group twice is refused");
    is(pvm_gsize((char *)group), 1, "a group of one has size 1");
    for (k = 1; k < MEMBERS; k++) {
        kids[k] = start_one("member");
        good = await_int(kids[k], 1, -1) == k && good;
    }
    holds(good, "members get the lowest free instance, one after the other");
    is(pvm_gsize((char *)group), MEMBERS, "the size of a group counts its members");
    is(pvm_getinst((char *)group, own_tid), 0, "getinst tells the own instance");
    is(pvm_getinst((char *)group, kids[2]), 2, "getinst tells the instance of another member");
    is(pvm_gettid((char *)group, 0), own_tid, "gettid tells the tid of instance 0");
    is(pvm_gettid((char *)group, 3), kids[3], "gettid tells the tid of another instance");
    is(pvm_getinst((char *)group, 0x3ffc0001), PvmNotInGroup, "getinst of a task that is no member says so");
    is(pvm_gettid((char *)group, 17), PvmNoInst, "gettid of an instance that is not there finds none");
    is(pvm_gettid((char *)group, -1), PvmNoInst, "gettid of a negative instance finds none");
    is(pvm_getinst((char *)group, -1), MEMBERS, "getinst of tid -1 tells the instance of the next member");
    is(pvm_getinst((char *)group, -2), PvmNotInGroup, "getinst of tid -2 says that it is no member");
    is(pvm_getinst("nobody", -1), PvmNoGroup, "getinst of tid -1 in an unknown group finds no group");
    is(pvm_joingroup(""), PvmNullGroup, "a group needs a name");
    is(pvm_freezegroup("", -1), PvmNullGroup, "freezing a group without a name is refused");
}

/* All members run on one host. */
static void host_information(void)
{
    int here = pvm_tidtohost(own_tid), lowest = own_tid, k, coord = 7, members = 7, hosts = 7, *coords = NULL, *counts = NULL;
    for (k = 1; k < MEMBERS; k++)
        if (kids[k] < lowest)
            lowest = kids[k];
    is(pvm_grphostinfo((char *)group, here, &coord, &members, &hosts), PvmOk, "grphostinfo returns 0");
    is(coord, lowest, "the coordinator of a host is the member with the lowest tid");
    is(members, MEMBERS, "grphostinfo counts the members on a host");
    is(hosts, 1, "grphostinfo counts the hosts with members");
    is(pvm_grphostinfo((char *)group, 0x3ffc0000, &coord, &members, &hosts), PvmOk, "grphostinfo takes a host without members");
    holds(coord == -1 && members == 0 && hosts == 0, "grphostinfo finds nobody on a host without members");
    is(pvm_grphostinfo("nobody", here, &coord, &members, &hosts), PvmOk, "grphostinfo takes an unknown group");
    holds(coord == -1 && members == 0 && hosts == 0, "grphostinfo finds nobody in an unknown group");
    is(pvm_grpvhostinfo((char *)group, &coords, &counts, &hosts), PvmOk, "grpvhostinfo returns 0");
    is(hosts, 1, "grpvhostinfo counts the hosts with members");
    holds(coords && counts && coords[0] == lowest && counts[0] == MEMBERS, "grpvhostinfo has one element for each host");
    is(pvm_grpvhostinfo("nobody", &coords, &counts, &hosts), PvmOk, "grpvhostinfo takes an unknown group");
    is(hosts, 0, "grpvhostinfo finds no host in an unknown group");
}

static void broadcasts(void)
{
    int x = 4711, k, good = 1, from = 1;
    order_all(RECEIVE, 0);
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&x, 1, 1);
    is(pvm_bcast((char *)group, 43), PvmOk, "bcast returns 0");
    for (k = 1; k < MEMBERS; k++) {
        good = answer(k) == 4711 && good;
        from = from && of_kid[k][3] == own_tid;
    }
    holds(good, "bcast reaches every other member");
    holds(from, "a broadcast has its sender");
    is(comes_soon(own_tid, 43), 0, "bcast leaves out the sender");
    pvm_initsend(PvmDataDefault);
    is(pvm_bcast("nobody", 43), PvmNoGroup, "bcast to an unknown group finds no group");
    is(pvm_bcast((char *)group, -1), PvmBadParam, "bcast of a negative tag is a bad parameter");
    pvm_joingroup("lonely");
    pvm_initsend(PvmDataDefault);
    is(pvm_bcast("lonely", 43), PvmNoInst, "bcast in a group of one finds nobody");
    pvm_lvgroup("lonely");
    is(pvm_gsize("lonely"), PvmNoGroup, "a group that everybody left is gone");
}

static void barriers(void)
{
    double before;
    int waiting;
    order(1, BARRIER, 2);
    is(pvm_nrecv(kids[1], 3), 0, "a barrier waits");
    is(pvm_barrier((char *)group, 2), PvmOk, "a barrier returns 0");
    is(answer(1), PvmOk, "a barrier lets the other one go");
    order_all(BARRIER, MEMBERS);
    before = now();
    pvm_barrier((char *)group, MEMBERS);
    holds(all_answer(PvmOk), "a barrier of all lets all go");
    holds(now() - before < PATIENCE_SECONDS, "a barrier does not wait longer than it must");
    order_all(BARRIER, -1);
    is(pvm_barrier((char *)group, -1), PvmOk, "a barrier with count -1 takes the size of the group");
    holds(all_answer(PvmOk), "a barrier with count -1 lets all go");
    is(pvm_barrier("nobody", 1), PvmNoGroup, "a barrier of an unknown group finds no group");
    /* The first of the two waits. */
    order(1, BARRIER, 2);
    order(2, BARRIER, 3);
    waiting = answer_of_either(1, 2) == 1 ? 2 : 1;
    is(of_kid[3 - waiting][0], PvmMismatch, "barriers with different counts do not match");
    if (waiting == 2)
        order(1, BARRIER, 3);
    is(pvm_barrier((char *)group, waiting + 1), PvmOk, "a barrier goes on after one that did not match");
    answer(waiting);
    if (waiting == 2)
        answer(1);
    is(pvm_barrier((char *)group, 1), PvmOk, "a barrier of one does not wait");
    pvm_joingroup("zero");
    is(pvm_barrier("zero", 0), PvmMismatch, "a barrier of nobody is a mismatch");
    pvm_lvgroup("zero");
}

static void collectives(void)
{
    int values[2] = { 1, 10 }, all[16] = { 0 }, part[2] = { 0 }, from[8] = { 1, 2, 3, 4, 5, 6, 7, 8 }, k, good, kept;
    order_all(REDUCE, 0);
    is(pvm_reduce(PvmSum, values, 2, PVM_INT, 40, (char *)group, 0), PvmOk, "reduce returns 0");
    holds(values[0] == 10 && values[1] == 100, "reduce adds up at the root");
    holds(all_answer(PvmOk), "reduce returns 0 to all");
    values[0] = 1;
    values[1] = 10;
    order_all(GATHER, 0);
    is(pvm_gather(all, values, 2, PVM_INT, 41, (char *)group, 0), PvmOk, "gather returns 0");
    for (k = 0, good = 1; k < MEMBERS; k++)
        good = good && all[2 * k] == k + 1 && all[2 * k + 1] == 10 * (k + 1);
    holds(good, "gather puts the data in the order of instances");
    holds(all_answer(PvmOk), "gather returns 0 to all");
    order_all(SCATTER, 0);
    kept = pvm_initsend(PvmDataDefault);
    is(pvm_scatter(part, from, 2, PVM_INT, 42, (char *)group, 0), PvmOk, "scatter returns 0");
    is(pvm_getsbuf(), kept, "scatter leaves the active send buffer alone");
    holds(part[0] == 1 && part[1] == 2, "scatter gives the root its part");
    holds(all_answer(PvmOk), "scatter returns 0 to all");
    for (k = 1, good = 1; k < MEMBERS; k++)
        good = good && of_kid[k][1] == 2 * k + 1 && of_kid[k][2] == 2 * k + 2;
    holds(good, "scatter gives each member its part");
}

static void alone(void)
{
    int ints[3] = { 3, -5, 7 }, out[3] = { 0 };
    double doubles[2] = { 1.5, -2.5 };
    char *g = "single";
    pvm_setopt(PvmAutoErr, 0);
    pvm_joingroup(g);
    is(pvm_reduce(PvmMax, ints, 3, PVM_INT, 44, g, 0), PvmOk, "reduce works in a group of one");
    is(ints[1], -5, "reduce in a group of one leaves the data");
    is(pvm_reduce(PvmProduct, doubles, 2, PVM_DOUBLE, 44, g, 0), PvmOk, "reduce takes doubles");
    is(pvm_gather(out, ints, 3, PVM_INT, 44, g, 0), PvmOk, "gather works in a group of one");
    is(out[2], 7, "gather in a group of one copies the data");
    is(pvm_reduce(PvmSum, ints, 0, PVM_INT, 44, g, 0), PvmBadParam, "reduce of no items is a bad parameter");
    is(pvm_reduce(PvmSum, NULL, 3, PVM_INT, 44, g, 0), PvmBadParam, "reduce of null data is a bad parameter");
    is(pvm_gather(out, ints, 3, PVM_UINT, 44, g, 0), PvmBadParam, "gather of unsigned ints is a bad parameter");
    is(pvm_gather(out, ints, -3, PVM_INT, 44, g, 0), PvmBadParam, "gather of a negative count is a bad parameter");
    is(pvm_reduce(PvmSum, ints, 3, PVM_INT, 44, "nobody", 0), PvmNoGroup, "reduce in an unknown group finds no group");
    pvm_lvgroup(g);
}

static void functions(void)
{
    int type = PVM_INT, n = 3, info = 0, a[3] = { 1, 5, 3 }, b[3] = { 4, 2, 3 };
    double x[2] = { 1.5, -1 }, y[2] = { 2, 3 };
    PvmMax(&type, a, b, &n, &info);
    holds(a[0] == 4 && a[1] == 5 && a[2] == 3, "PvmMax keeps the larger of two");
    PvmMin(&type, a, b, &n, &info);
    holds(a[0] == 4 && a[1] == 2 && a[2] == 3, "PvmMin keeps the smaller of two");
    PvmSum(&type, a, b, &n, &info);
    holds(a[0] == 8 && a[1] == 4 && a[2] == 6, "PvmSum adds");
    PvmProduct(&type, a, b, &n, &info);
    holds(a[0] == 32 && a[1] == 8 && a[2] == 18, "PvmProduct multiplies");
    is(info, PvmOk, "the functions of reduce tell that they worked");
    type = PVM_DOUBLE;
    n = 2;
    PvmSum(&type, x, y, &n, &info);
    holds(x[0] == 3.5 && x[1] == 2, "PvmSum adds doubles");
    type = PVM_UINT;
    PvmSum(&type, a, b, &n, &info);
    is(info, PvmBadParam, "PvmSum of unsigned ints is a bad parameter");
    type = PVM_BYTE;
    PvmProduct(&type, a, b, &n, &info);
    is(info, PvmBadParam, "PvmProduct of bytes is a bad parameter");
}

static void leaving(void)
{
    int inst;
    order(2, LEAVE, 0);
    is(answer(2), PvmOk, "leaving a group returns 0");
    is(pvm_gsize((char *)group), MEMBERS - 1, "a member that left does not count");
    is(pvm_gettid((char *)group, 2), PvmNoInst, "the instance of a member that left is empty");
    is(pvm_getinst((char *)group, -1), 2, "getinst of tid -1 tells the instance of a member that left");
    order(2, LEAVE, 0);
    is(answer(2), PvmNotInGroup, "leaving a group twice is refused");
    order(2, BARRIER, 1);
    is(answer(2), PvmNotInGroup, "a barrier is for members");
    order(2, JOIN, 0);
    is(answer(2), 2, "who joins again gets the lowest free instance");
    pvm_kill(kids[3]);
    for (inst = 0; inst < 300 && pvm_gettid((char *)group, 3) > 0; inst++)
        usleep(10000);
    is(pvm_gettid((char *)group, 3), PvmNoInst, "a member that dies leaves the group");
    is(pvm_gsize((char *)group), MEMBERS - 1, "a member that died does not count");
    kids[3] = start_one("member");
    is(await_int(kids[3], 1, -1), 3, "a new member takes the instance of the dead one");
}

static void frozen(void)
{
    char *g = "cold";
    pvm_joingroup(g);
    is(pvm_freezegroup(g, -1), 1, "a freeze with count -1 takes the size of the group");
    is(pvm_freezegroup(g, -1), PvmDupGroup, "a freeze with count -1 of a static group is refused");
    is(pvm_freezegroup(g, 0), PvmDupGroup, "a freeze for nobody of a static group is refused");
    is(pvm_getinst(g, own_tid), 0, "getinst tells the own instance in a static group");
    is(pvm_getinst(g, -1), 1, "getinst of tid -1 in a static group tells its size");
    is(pvm_getinst(g, 0x3ffc0001), PvmNotInGroup, "getinst in a static group of a task that is no member says so");
    is(pvm_gettid(g, -1), PvmNoInst, "gettid of a negative instance of a static group finds none");
    is(pvm_barrier(g, -1), PvmOk, "a barrier with count -1 works in a static group");
    is(pvm_joingroup(g), PvmNotInGroup, "joining a static group is refused");
    is(pvm_lvgroup(g), PvmOk, "the only member may leave a static group");
    is(pvm_freezegroup(g, -1), PvmNoGroup, "freezing a group that everybody left finds no group");
    is(pvm_joingroup(g), 0, "a static group that everybody left can be joined again");
    pvm_lvgroup(g);
    order_all(FREEZE, -1);
    usleep(300000);
    is(pvm_freezegroup((char *)group, MEMBERS), MEMBERS, "freezing a group returns its size");
    holds(all_answer(MEMBERS), "freezing a group returns its size to all");
    is(pvm_gettid((char *)group, 1), kids[1], "a static group is asked as any other");
    is(pvm_gsize((char *)group), MEMBERS, "a static group has its size");
    is(pvm_freezegroup((char *)group, MEMBERS), PvmDupGroup, "freezing a group twice is refused");
    order_all(BARRIER, MEMBERS);
    is(pvm_barrier((char *)group, MEMBERS), PvmOk, "a barrier works in a static group");
    holds(all_answer(PvmOk), "a barrier of a static group lets all go");
    order_all(REDUCE, 0);
    int values[2] = { 1, 10 };
    pvm_reduce(PvmSum, values, 2, PVM_INT, 40, (char *)group, 0);
    is(values[1], 100, "reduce works in a static group");
    all_answer(PvmOk);
    order(1, LEAVE, 0);
    is(answer(1), PvmOk, "leaving a static group returns 0");
    is(pvm_barrier((char *)group, MEMBERS), PvmNoGroup, "a static group that a member left is dead");
}

/* The others leave the group; the own task and two of them join again. */
static void join_with_two(void)
{
    order_all(LEAVE, 0);
    all_answer(PvmOk);
    pvm_lvgroup((char *)group);
    pvm_joingroup((char *)group);
    order(1, JOIN, 0);
    answer(1);
    order(2, JOIN, 0);
    answer(2);
}

/* True if a kid answers within two seconds. The answer is not received. */
static int answers_soon(int kid)
{
    double end = now() + 2;
    while (pvm_probe(kids[kid], 3) == 0 && now() < end)
        usleep(2000);
    return pvm_probe(kids[kid], 3) > 0;
}

/* Member 1 calls with count -1 in a group of three, then member 3 joins, then member 2 calls with count -1. If member 1
 * was late, its -1 stands for four, too: then all finish the call together, and the scene is repeated with a longer
 * pause. The answers of members 3 and 2. */
static void grow(int what, int *joined, int *second)
{
    int pause_us, end;
    for (pause_us = 300000;; pause_us *= 2) {
        join_with_two();
        order(1, what, -1);
        usleep(pause_us);
        order(3, JOIN, 0);
        *joined = answer(3);
        order(2, what, -1);
        if (pause_us > 2000000 || answers_soon(2))
            break;
        order(3, what, MEMBERS);
        end = what == BARRIER ? pvm_barrier((char *)group, MEMBERS) : pvm_freezegroup((char *)group, MEMBERS);
        answer(3);
        /* Then member 2 was late, not member 1. */
        if (end == PvmMismatch)
            break;
        answer(1);
        answer(2);
    }
    *second = answer(2);
}

/* Counts of -1 stand for different sizes when a member joins between them. */
static void grown(void)
{
    int joined, second, end, good;
    grow(BARRIER, &joined, &second);
    is(joined, 3, "a group may be joined while members wait in a barrier");
    is(second, PvmMismatch, "a barrier with count -1 does not match one of a smaller group");
    order(2, BARRIER, 3);
    end = pvm_barrier((char *)group, 3);
    good = answer(1) == PvmOk;
    good = answer(2) == PvmOk && good;
    holds(end == PvmOk && good, "a barrier with count -1 takes the size at its begin");
    grow(FREEZE, &joined, &second);
    is(joined, 3, "a group may be joined while members wait in a freeze");
    is(second, PvmMismatch, "a freeze with count -1 does not match one of a smaller group");
}

static void sentences(void)
{
    int k;
    pvm_setopt(PvmAutoErr, 0);
    joining();
    host_information();
    broadcasts();
    barriers();
    collectives();
    alone();
    functions();
    leaving();
    frozen();
    grown();
    for (k = 1; k < MEMBERS; k++)
        pvm_kill(kids[k]);
}
