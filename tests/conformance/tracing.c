/* Tracing: records of a task's own calls and of its children's, user events, and a tracer for all. */
#include "conform.h"
#include <pvmproto.h>
#include <pvmtev.h>

enum { SEND_EVENT = 47, NEWTASK_EVENT = 75, SPNTASK_EVENT = 77, ENTRY = 0x4000, EXIT = 0x8000, TASK_CONTROL = 0x7ffff };

static int traced(int argc, char **argv)
{
    (void)argc, (void)argv;
    pvm_mytid();
    tell(pvm_parent(), 1, 4711);
    pvm_recv(pvm_parent(), 2);
    pvm_exit();
    return 0;
}

/* Tells its trace mask when it gets the word. */
static int masked(int argc, char **argv)
{
    char own[36];
    (void)argc, (void)argv;
    wait_for_word();
    pvm_gettmask(PvmTaskSelf, own);
    pvm_initsend(PvmDataDefault);
    pvm_pkstr(own);
    pvm_send(pvm_parent(), 4);
    pvm_exit();
    return 0;
}

static const role roles[] = { { "traced", traced }, { "masked", masked }, { NULL, NULL } };

static char mask[36];

/* Chooses one event of the mask. */
static void choose(int event)
{
    mask[event / 4] |= 1 << (event & 3);
}

typedef struct {
    int first, later, entry, exit, other, named, by_daemons;
    char name[64];
} heard;

/* Reads the beginning of the records of one message. */
static void read_records(heard *of, int event)
{
    int marker, id;
    char name[256], description[256];
    while (pvm_upkint(&marker, 1, 1) == PvmOk) {
        if (marker == -3) {
            while (pvm_upkint(&id, 1, 1) == PvmOk && id != -4) {
                pvm_upkstr(name);
                pvm_upkstr(description);
                of->named++;
            }
            continue;
        }
        if (marker != -5 && marker != -7)
            return;
        pvm_upkint(&id, 1, 1);
        of->first += marker == -5;
        of->later += marker == -7;
        if ((id & 0x3fff) == event) {
            of->entry += (id & ENTRY) != 0;
            of->exit += (id & EXIT) != 0;
            if (marker == -5)
                pvm_upkstr(of->name);
        } else if (id >= NEWTASK_EVENT && id <= SPNTASK_EVENT) {
            of->by_daemons++;
        } else {
            of->other++;
        }
        return;
    }
}

static void children(void)
{
    heard of;
    int kid, round;
    memset(&of, 0, sizeof of);
    memset(mask, '@', 35);
    choose(SEND_EVENT);
    pvm_settmask(PvmTaskChild, mask);
    pvm_setopt(PvmTraceOptions, PvmTraceFull);
    pvm_setopt(PvmTraceTid, own_tid);
    pvm_setopt(PvmTraceCode, 70);
    kid = start_one("traced");
    is(await_int(kid, 1, 0), 4711, "a traced task works as any other");
    for (round = 0; round < 20 && !of.exit && await(-1, 70) > 0; round++)
        read_records(&of, SEND_EVENT);
    is(of.entry, 1, "a traced call has a record of its entry");
    is(of.exit, 1, "a traced call has a record of its exit");
    reads(of.name, "send", "the first record of an event describes it by name");
    holds(of.named > 0, "the names of data are told once");
    is(of.by_daemons, 2, "daemons tell that a traced task was spawned and that it has come");
    is(of.other, 0, "only events of the mask are told");
    tell(kid, 2, 0);
    pvm_setopt(PvmTraceTid, 0);
    pvm_setopt(PvmTraceCode, 0);
    kid = start_one("traced");
    await(kid, 1);
    is(comes_soon(kid, 70), 0, "a task whose parent does not trace is not traced");
    tell(kid, 2, 0);
}

static void a_tracer(void)
{
    struct pvmmboxinfo *list = NULL;
    int n = 0;
    char all[36];
    memset(all, '@', sizeof all);
    all[35] = 0;
    is(pvm_reg_tracer(0, 80, 0, 81, all, 0, PvmTraceFull), PvmOk, "registering as tracer returns 0");
    pvm_getmboxinfo(PVMTRACERCLASS, &n, &list);
    is(n, 1, "a tracer is in the mailbox");
    is(n == 1 ? list[0].mi_owners[0] : 0, own_tid, "the mailbox tells who the tracer is");
    is(pvm_reg_tracer(0, 80, 0, 81, all, 0, PvmTraceFull), PvmOk, "registering as tracer again takes it back");
    pvm_getmboxinfo(PVMTRACERCLASS, &n, &list);
    is(n, 0, "a tracer that took it back is not in the mailbox");
}

/* Tracers change what a task tells while it runs. */
static void from_outside(void)
{
    int kid = start_waiting("masked", NULL), old = pvm_setopt(PvmResvTids, 1);
    char text[64] = "";
    memset(mask, '@', 35);
    choose(SEND_EVENT);
    pvm_setcontext(TASK_CONTROL);
    pvm_initsend(PvmDataDefault);
    pvm_pkstr(mask);
    is(pvm_send(kid, TC_SETTMASK), PvmOk, "a message of task control can be sent with reserved tids allowed");
    pvm_setcontext(PvmBaseContext);
    pvm_setopt(PvmResvTids, old);
    tell(kid, 3, 0);
    if (await(kid, 4) > 0)
        pvm_upkstr(text);
    reads(text, mask, "a message of task control sets the trace mask of a task");
}

static void sentences(void)
{
    from_outside();
    children();
    a_tracer();
}
