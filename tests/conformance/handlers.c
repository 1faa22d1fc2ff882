/* Message handlers. */
#include "conform.h"

static int runs, seen_value, seen_tag, seen_sbuf, seen_rbuf_is_message, seen_context, answer_to, inner_recv;

static int note(int mid)
{
    runs++;
    seen_sbuf = pvm_getsbuf();
    seen_rbuf_is_message = pvm_getrbuf() == mid;
    seen_context = pvm_getcontext();
    pvm_bufinfo(mid, NULL, &seen_tag, NULL);
    pvm_upkint(&seen_value, 1, 1);
    return 0;
}

static int answers(int mid)
{
    int src;
    runs++;
    pvm_bufinfo(mid, NULL, NULL, &src);
    tell(answer_to ? answer_to : src, 60, 66);
    return 0;
}

static int receives(int mid)
{
    (void)mid;
    runs++;
    inner_recv = pvm_recv(-1, 4711);
    return 0;
}

/* Has a handler of its own which answers while it waits for the end. */
static int servant(int argc, char **argv)
{
    (void)argc, (void)argv;
    pvm_addmhf(-1, 50, -1, answers);
    tell(pvm_parent(), 900, 1);
    pvm_recv(pvm_parent(), 0);
    pvm_exit();
    return 0;
}

static const role roles[] = { { "servant", servant }, { NULL, NULL } };

static void sentences(void)
{
    int h, g, s, r, kid, context;
    h = pvm_addmhf(own_tid, 10, PvmBaseContext, note);
    is(h, 9, "the first handler of a program has number 9");
    g = pvm_addmhf(own_tid, 11, PvmBaseContext, note);
    holds(g >= 0 && g != h, "another handler has another number");
    is(pvm_addmhf(own_tid, 10, PvmBaseContext, note), PvmExists, "the same handler exists already");
    is(pvm_addmhf(-1, 10, PvmBaseContext, note), PvmExists, "a handler with a wildcard sender overlaps");
    is(pvm_addmhf(own_tid, -1, PvmBaseContext, note), PvmExists, "a handler with a wildcard tag overlaps");
    is(pvm_addmhf(own_tid, 10, -1, note), PvmExists, "a handler with a wildcard context overlaps");
    tell(own_tid, 20, 0);
    r = await(own_tid, 20);
    s = pvm_initsend(PvmDataDefault);
    g = 5;
    pvm_pkint(&g, 1, 1);
    pvm_send(own_tid, 10);
    pvm_send(own_tid, 21);
    pvm_setrbuf(0);
    await(own_tid, 21);
    is(runs, 1, "a handler runs when its message comes");
    is(seen_value, 5, "a handler unpacks its message");
    is(seen_tag, 10, "a handler's message has its tag");
    is(seen_sbuf, 0, "a handler has no active send buffer");
    holds(seen_rbuf_is_message, "a handler's message is its active receive buffer");
    is(pvm_getsbuf(), s, "the active send buffer is back after a handler");
    is(pvm_nrecv(own_tid, 10), 0, "a handled message cannot be received");
    is(pvm_bufinfo(r, NULL, NULL, NULL), PvmOk, "a handler leaves other buffers alone");
    pvm_freebuf(r);
    is(pvm_delmhf(h), PvmOk, "delmhf returns 0");
    is(pvm_delmhf(h), PvmNotFound, "delmhf of a deleted handler finds none");
    is(pvm_delmhf(4711), PvmNotFound, "delmhf of an unknown handler finds none");
    is(pvm_delmhf(-1), PvmBadParam, "delmhf of a negative number is a bad parameter");
    tell(own_tid, 10, 6);
    is(await_int(own_tid, 10, -1), 6, "a message whose handler was deleted is received");
    context = pvm_newcontext();
    pvm_addmhf(-1, -1, context, note);
    pvm_setcontext(context);
    tell(own_tid, 77, 8);
    pvm_setcontext(PvmBaseContext);
    tell(own_tid, 22, 0);
    await(own_tid, 22);
    is(seen_tag, 77, "a handler with wildcards takes any message of its context");
    is(seen_context, context, "a handler runs in the context of its message");
    is(pvm_getcontext(), PvmBaseContext, "the context is back after a handler");
    kid = start_one("servant");
    await(kid, 900);
    tell(kid, 50, 0);
    is(await_int(kid, 60, -1), 66, "a handler answers while its task waits for something else");
    tell(kid, 50, 0);
    tell(kid, 50, 0);
    await(kid, 60);
    holds(await(kid, 60) > 0, "a handler runs for each message");
    runs = 0;
    h = pvm_addmhf(kid, 60, PvmBaseContext, receives);
    tell(kid, 50, 0);
    tell(own_tid, 23, 0);
    for (g = 0; g < 100 && !runs; g++)
        comes_soon(-1, 4712);
    is(inner_recv, PvmNotImpl, "a blocking receive inside a handler is not implemented");
    pvm_delmhf(h);
    tell(kid, 0, 0);
    runs = 0;
    pvm_addmhf(-1, 30, -1, note);
    pvm_exit();
    own_tid = pvm_mytid();
    tell(own_tid, 30, 7);
    is(await_int(own_tid, 30, -1), 7, "pvm_exit removes all handlers");
    is(runs, 0, "a removed handler does not run");
}
