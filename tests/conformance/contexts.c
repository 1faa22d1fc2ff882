/* Contexts: making, choosing, freeing, and what they separate. */
#include "conform.h"

static int inheritor(int argc, char **argv)
{
    int parent = pvm_parent(), context = pvm_getcontext();
    (void)argc, (void)argv;
    pvm_setcontext(PvmBaseContext);
    tell(parent, 1, context);
    pvm_exit();
    return 0;
}

static int maker(int argc, char **argv)
{
    int parent = pvm_parent(), context = pvm_newcontext();
    (void)argc, (void)argv;
    tell(parent, 2, context);
    pvm_recv(parent, 3);
    pvm_exit();
    return 0;
}

static const role roles[] = { { "inheritor", inheritor }, { "maker", maker }, { NULL, NULL } };

static void sentences(void)
{
    int a, b, kid, theirs, info;
    struct pvmminfo head;
    is(pvm_getcontext(), PvmBaseContext, "a task from the command line begins in the base context");
    a = pvm_newcontext();
    b = pvm_newcontext();
    holds(a > 0 && b > 0 && a != b, "newcontext returns different contexts");
    is(a & 0x3ffc0000, pvm_tidtohost(own_tid), "a context has the host part of its maker");
    is(pvm_getcontext(), PvmBaseContext, "newcontext does not change the current context");
    is(pvm_setcontext(a), PvmBaseContext, "setcontext returns the previous context");
    is(pvm_getcontext(), a, "setcontext makes the context the current one");
    tell(own_tid, 5, 1);
    holds(await(own_tid, 5) > 0, "a message sent in a context is received in it");
    pvm_getminfo(pvm_getrbuf(), &head);
    is(head.ctx, a, "a message has the context it was sent in");
    tell(own_tid, 6, 2);
    is(pvm_setcontext(PvmBaseContext), a, "setcontext goes back to the base context");
    is(comes_soon(own_tid, 6), 0, "a message of another context does not match");
    is(pvm_probe(own_tid, 6), 0, "probe does not see a message of another context");
    pvm_setcontext(b);
    is(pvm_nrecv(-1, -1), 0, "wildcards do not match a message of another context");
    pvm_setcontext(-1);
    holds(pvm_nrecv(own_tid, 6) > 0, "context -1 receives from every context");
    pvm_setcontext(PvmBaseContext);
    pvm_initsend(PvmDataDefault);
    pvm_setcontext(a);
    pvm_send(own_tid, 7);
    pvm_setcontext(PvmBaseContext);
    is(comes_soon(own_tid, 7), 0, "the context of a message is the one at the send, not at the packing");
    pvm_setcontext(a);
    holds(pvm_nrecv(own_tid, 7) > 0, "the message is in the context of the send");
    kid = start_one("inheritor");
    pvm_setcontext(PvmBaseContext);
    is(await_int(kid, 1, -1), a, "a child inherits the context of its parent at the spawn");
    kid = start_one("maker");
    theirs = await_int(kid, 2, -1);
    holds(theirs > 0 && theirs != a && theirs != b, "contexts of two tasks are different");
    is(pvm_freecontext(theirs), PvmNotFound, "the context of another task cannot be freed");
    is(pvm_freecontext(a), PvmOk, "freecontext of an own context returns 0");
    is(pvm_freecontext(a), PvmNotFound, "freecontext of a freed context finds none");
    is(pvm_freecontext(PvmBaseContext), PvmNotFound, "the base context cannot be freed");
    info = pvm_setcontext(12345);
    is(pvm_setcontext(info), 12345, "setcontext takes any number");
    pvm_freecontext(b);
    tell(kid, 3, 0);
}
