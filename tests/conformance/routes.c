/* Messages between hosts, by the daemons and direct; notifications of routes; many and large messages. */
#include "conform.h"

/* Sends every message back until an empty one comes. */
static int mirror(int argc, char **argv)
{
    int parent = pvm_parent(), id, len, tag;
    pvm_setopt(PvmRoute, argc > 2 ? atoi(argv[2]) : PvmAllowDirect);
    tell(parent, 900, 1);
    for (;;) {
        id = pvm_recv(parent, -1);
        pvm_bufinfo(id, &len, &tag, NULL);
        if (len == 0)
            break;
        pvm_setrbuf(0);
        pvm_setsbuf(id);
        pvm_send(parent, tag);
        pvm_setsbuf(0);
        pvm_freebuf(id);
    }
    pvm_exit();
    return 0;
}

static const role roles[] = { { "mirror", mirror }, { NULL, NULL } };

static int start_mirror(const char *where, const char *route)
{
    char *words[] = { "mirror", (char *)route, NULL };
    int tid = 0;
    pvm_spawn((char *)own_name, words, PvmTaskHost, (char *)where, 1, &tid);
    await(tid, 900);
    return tid;
}

static void stop(int tid)
{
    pvm_initsend(PvmDataDefault);
    pvm_send(tid, 0);
    gone(tid);
}

/* Sends n ints there and back; true if they are the same. */
static int there_and_back(int tid, int encoding, int n)
{
    int *out = malloc((n + 1) * sizeof *out), *in = calloc(n + 1, sizeof *in), k, good;
    for (k = 0; k < n; k++)
        out[k] = k * 31 + n;
    pvm_initsend(encoding);
    pvm_pkint(out, n, 1);
    pvm_send(tid, 5);
    good = await(tid, 5) > 0 && pvm_upkint(in, n, 1) == PvmOk && !memcmp(in, out, n * sizeof *out);
    free(out);
    free(in);
    return good;
}

static void between_hosts(int tid, const char *small, const char *raw, const char *large, const char *many)
{
    int k, good = 1, value;
    holds(there_and_back(tid, PvmDataDefault, 10), small);
    holds(there_and_back(tid, PvmDataRaw, 1000) && there_and_back(tid, PvmDataInPlace, 1000), raw);
    holds(there_and_back(tid, PvmDataDefault, 1 << 20), large);
    for (k = 0; k < 500; k++)
        tell(tid, 6, k);
    for (k = 0; k < 500; k++) {
        value = await_int(tid, 6, -1);
        good = good && value == k;
    }
    holds(good, many);
}

static void by_daemons(void)
{
    int tid;
    pvm_setopt(PvmRoute, PvmDontRoute);
    tid = start_mirror("h2", "1");
    between_hosts(tid, "a small message goes to another host and back", "raw and in-place messages go to another host and back",
        "a message of four megabytes goes to another host and back", "five hundred messages between hosts keep their order");
    stop(tid);
}

static void direct(void)
{
    struct timeval limit = { 3, 0 };
    int tid, fd_of[2] = { 0 }, id, src = 0;
    pvm_setopt(PvmRoute, PvmRouteDirect);
    is(pvm_notify(PvmRouteAdd, 70, -1, NULL), PvmOk, "notify of new routes returns 0");
    tid = start_mirror("h2", "3");
    between_hosts(tid, "a small message goes by a direct route and back", "raw and in-place messages go by a direct route and back",
        "a message of four megabytes goes by a direct route and back", "five hundred messages by a direct route keep their order");
    id = pvm_trecv(-1, 70, &limit);
    if (id > 0) {
        pvm_upkint(fd_of, 2, 1);
        pvm_bufinfo(id, NULL, NULL, &src);
    }
    is(fd_of[0], tid, "a new direct route is told with the task it leads to");
    is(src, own_tid, "a notification of a route comes from oneself");
    is(pvm_notify(PvmRouteDelete, 71, 1, &tid), PvmOk, "notify of the end of a route returns 0");
    stop(tid);
    is(await_int(-1, 71, 0), tid, "the end of a direct route is told");
    tid = start_mirror("h3", "1");
    pvm_notify(PvmRouteDelete, 72, 1, &tid);
    is(await_int(-1, 72, 0), tid, "the end of a route that was never there is told at once");
    holds(there_and_back(tid, PvmDataDefault, 10), "a task that wants no direct route is reached by the daemons");
    stop(tid);
    is(pvm_notify(PvmRouteAdd | PvmNotifyCancel, 70, 0, NULL), PvmOk, "cancelling the notification of new routes returns 0");
    tid = start_mirror(".", "3");
    holds(there_and_back(tid, PvmDataDefault, 1000), "a direct route leads to a task of the same host too");
    pvm_setopt(PvmRoute, PvmDontRoute);
    holds(there_and_back(tid, PvmDataDefault, 1000), "messages arrive after the route was changed");
    stop(tid);
}

static void sentences(void)
{
    char *names[] = { "h2", "h3" };
    int status[2];
    is(pvm_addhosts(names, 2, status), 2, "two more hosts for messages are added");
    by_daemons();
    direct();
}
