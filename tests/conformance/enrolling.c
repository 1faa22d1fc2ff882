/* Enrolling and leaving, parents and siblings, forks, signals. */
#include "conform.h"

/* Tells what a spawned task sees of itself. */
static int newborn(int argc, char **argv)
{
    int *list = NULL, n, facts[6], context = 0;
    (void)argv;
    facts[0] = pvm_mytid();
    facts[1] = pvm_parent();
    facts[2] = argc;
    n = pvm_siblings(&list);
    facts[3] = n;
    facts[4] = pvm_getcontext();
    facts[5] = getppid();
    (void)context;
    pvm_initsend(PvmDataDefault);
    pvm_pkint(facts, 6, 1);
    pvm_pkint(list, n, 1);
    pvm_send(pvm_parent(), 1);
    pvm_exit();
    return 0;
}

/* Leaves, comes back, and tells its first parent what changed. */
static int returner(int argc, char **argv)
{
    int parent = pvm_parent(), facts[3];
    (void)argc, (void)argv;
    facts[0] = pvm_mytid();
    pvm_exit();
    facts[1] = pvm_mytid();
    pvm_setopt(PvmAutoErr, 0);
    facts[2] = pvm_parent();
    tell_all(parent, 2, facts, 3);
    pvm_exit();
    return 0;
}

/* Its child makes the first call and so is the task. */
static int forker(int argc, char **argv)
{
    pid_t child = fork();
    (void)argc, (void)argv;
    if (child == 0) {
        tell(pvm_parent(), 3, pvm_mytid());
        pvm_exit();
        _exit(0);
    }
    waitpid(child, NULL, 0);
    return 0;
}

static int orphan(int argc, char **argv)
{
    int old = pvm_setopt(PvmAutoErr, 0), parent;
    (void)argc;
    parent = pvm_parent();
    pvm_setopt(PvmAutoErr, old);
    tell(atoi(argv[2]), 4, parent);
    pvm_exit();
    return 0;
}

#define LARGE (1 << 20)
static char large[LARGE];

/* Sends a large message, full of its number, whenever it is asked for one. */
static int giver(int argc, char **argv)
{
    int parent = pvm_parent(), number;
    (void)argc, (void)argv;
    while (pvm_recv(parent, 8) > 0 && pvm_upkint(&number, 1, 1) == 0 && number > 0) {
        memset(large, number, LARGE);
        pvm_initsend(PvmDataRaw);
        pvm_pkbyte(large, LARGE, 1);
        pvm_send(parent, 9);
    }
    pvm_exit();
    return 0;
}

/* Receives that message; true when it comes. */
static int get_large(int from, int number)
{
    tell(from, 8, number);
    return await(from, 9) > 0;
}

/* True when the active receive buffer is full of the number. */
static int is_full_of(int number)
{
    int i;
    if (pvm_upkbyte(large, LARGE, 1) != 0)
        return 0;
    for (i = 0; i < LARGE && large[i] == number; i++)
        ;
    return i == LARGE;
}

static void messages_across_a_fork(void)
{
    int from = 0, k, good = 1, status = -1, go[2];
    pid_t child;
    holds(start_as("giver", 0, "", 1, &from) == 1 && pipe(go) == 0, "a task that sends large messages starts");
    for (k = 1; k <= 10; k++)
        good = get_large(from, k) && is_full_of(k) && good;
    holds(good, "large messages come whole");
    get_large(from, 11);
    child = fork();
    if (child == 0) {
        char word;
        _exit(read(go[0], &word, 1) == 1 && is_full_of(11) ? 0 : 1);
    }
    for (k = 12; k <= 20; k++)
        good = get_large(from, k) && is_full_of(k) && good;
    holds(good, "large messages come whole after a fork");
    holds(write(go[1], "", 1) == 1 && waitpid(child, &status, 0) == child, "the child of the fork ends");
    is(status, 0, "a forked child reads the message its parent had received, whatever the parent has received since");
    tell(from, 8, 0);
    close(go[0]);
    close(go[1]);
}

static volatile sig_atomic_t signalled;

static void note(int number)
{
    signalled = number;
}

/* Tells which signal it got. */
static int target(int argc, char **argv)
{
    int parent = pvm_parent();
    (void)argc, (void)argv;
    signal(SIGUSR1, note);
    tell(parent, 5, 1);
    while (!signalled)
        usleep(2000);
    tell(parent, 6, signalled);
    pvm_recv(parent, 7);
    pvm_exit();
    return 0;
}

static const role roles[] = { { "newborn", newborn }, { "returner", returner }, { "forker", forker },
    { "orphan", orphan }, { "target", target }, { "giver", giver }, { NULL, NULL } };

static void oneself(void)
{
    int *list = NULL, first, again, buffer;
    first = own_tid;
    holds(own_tid > 0, "mytid returns a tid above 0");
    is(pvm_mytid(), own_tid, "mytid returns the same tid every time");
    is(own_tid & 0x3ffc0000, 0x40000, "the first host's number is 1");
    holds((own_tid & 0x3ffff) > 0, "the local part of a tid is not 0");
    is(pvm_tidtohost(own_tid), 0x40000, "tidtohost gives the host part");
    is(pvm_tidtohost(0x80001), 0x80000, "tidtohost does not look whether the task exists");
    is(pvm_parent(), PvmNoParent, "a task from the command line has no parent");
    is(pvm_siblings(&list), 1, "a task from the command line is its only sibling");
    is(list ? list[0] : 0, own_tid, "the siblings of a task from the command line are itself");
    tell(own_tid, 8, 1);
    buffer = pvm_getsbuf();
    is(pvm_exit(), PvmOk, "pvm_exit returns 0");
    again = pvm_mytid();
    holds(again > 0 && again != first, "after pvm_exit the next call enrols under a new tid");
    is(pvm_pstat(first), PvmNoTask, "the tid of a task that left exists no more");
    own_tid = again;
    is(pvm_bufinfo(buffer, NULL, NULL, NULL), PvmOk, "buffers outlive pvm_exit");
    is(comes_soon(-1, 8), 0, "messages that were not received do not outlive pvm_exit");
}

static void children(void)
{
    int tids[3], facts[6], list[3], k, good = 1, in_order = 1, with_parent = 1, words = 1, base = 1;
    start_as("newborn", PvmTaskDefault, NULL, 3, tids);
    for (k = 0; k < 3; k++) {
        await(tids[k], 1);
        pvm_upkint(facts, 6, 1);
        pvm_upkint(list, 3, 1);
        good = good && facts[0] == tids[k];
        with_parent = with_parent && facts[1] == own_tid;
        words = words && facts[2] == 2;
        in_order = in_order && facts[3] == 3 && !memcmp(list, tids, sizeof tids);
        base = base && facts[4] == PvmBaseContext;
    }
    holds(good, "a child's own tid is the one that spawn returned");
    holds(with_parent, "a child's parent is the task that spawned it");
    holds(words, "a child gets the arguments of the spawn");
    holds(in_order, "the siblings of a child are all of its spawn, in order");
    holds(base, "a child begins in its parent's context");
}

static void comings_and_goings(void)
{
    int tid, facts[3] = { 0 };
    char me[16], *words[] = { "orphan", me, NULL };
    tid = start_one("returner");
    await(-1, 2);
    pvm_upkint(facts, 3, 1);
    is(facts[0], tid, "a task that will return has its spawned tid first");
    holds(facts[1] > 0 && facts[1] != tid, "a spawned task that left and returned has another tid");
    is(facts[2], PvmNoParent, "a spawned task that left and returned has no parent");
    tid = start_one("forker");
    is(await_int(tid, 3, 0), tid, "a child process that makes the first call is the spawned task");
    snprintf(me, sizeof me, "%d", own_tid);
    pvm_spawn((char *)own_name, words, PvmNoSpawnParent, NULL, 1, &tid);
    is(await_int(tid, 4, 0), PvmParentNotSet, "a task spawned with PvmNoSpawnParent has no parent set");
}

static void signals(void)
{
    int tid = start_one("target"), quiet;
    await(tid, 5);
    is(pvm_pstat(tid), PvmOk, "pstat of a running task returns 0");
    is(pvm_sendsig(tid, SIGUSR1), PvmOk, "sendsig returns 0");
    is(await_int(tid, 6, 0), SIGUSR1, "sendsig's signal reaches the task");
    tell(tid, 7, 0);
    tid = start_waiting("waiter", NULL);
    is(pvm_kill(tid), PvmOk, "kill returns 0");
    holds(gone(tid), "a killed task is gone");
    quiet = pvm_setopt(PvmAutoErr, 0);
    is(pvm_kill(tid), PvmOk, "kill of a task that is gone returns 0");
    is(pvm_kill(0), PvmBadParam, "kill of tid 0 is a bad parameter");
    is(pvm_kill(-1), PvmBadParam, "kill of a negative tid is a bad parameter");
    is(pvm_kill(0x40000), PvmBadParam, "kill of a host is a bad parameter");
    is(pvm_sendsig(0, SIGUSR1), PvmBadParam, "sendsig to tid 0 is a bad parameter");
    is(pvm_sendsig(0x40000, SIGUSR1), PvmBadParam, "sendsig to a host is a bad parameter");
    is(pvm_pstat(tid), PvmNoTask, "pstat of a task that is gone finds no task");
    is(pvm_pstat(0x40000), PvmBadParam, "pstat of a host is a bad parameter");
    is(pvm_pstat(0), PvmBadParam, "pstat of tid 0 is a bad parameter");
    is(pvm_pstat(-1), PvmBadParam, "pstat of a negative tid is a bad parameter");
    is(pvm_pstat(own_tid), PvmOk, "pstat of oneself returns 0");
    pvm_setopt(PvmAutoErr, quiet);
}

static void sentences(void)
{
    oneself();
    children();
    comings_and_goings();
    messages_across_a_fork();
    signals();
}
