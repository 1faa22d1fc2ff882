/* Tests most of the interface with a single task and its daemon: the task communicates with itself. */
#include <stdio.h>
#include <pvm3.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

static int me;

static void send_int(int value, int tag)
{
    pvm_initsend(PvmDataDefault);
    IS(0, pvm_pkint(&value, 1, 1));
    IS(0, pvm_send(me, tag));
}

static int got_int(void)
{
    int value = -1;

    IS(0, pvm_upkint(&value, 1, 1));
    return value;
}

static void receiving(void)
{
    int mid, len, tag, src, again;
    struct timeval none = {0, 0}, little = {0, 20000}, past = {-1, 0};
    struct pvmminfo info;

    IS(0, pvm_nrecv(-1, -1));
    IS(0, pvm_trecv(-1, -1, &little));
    IS(0, pvm_trecv(-1, -1, &past));
    send_int(1, 10);
    send_int(2, 11);
    send_int(3, 10);
    IS(0, pvm_probe(me, 12));
    mid = pvm_probe(-1, 11);
    IS(1, mid > 0);
    IS(mid, pvm_recv(me, 11));
    IS(0, pvm_bufinfo(mid, &len, &tag, &src));
    IS(4, len);
    IS(11, tag);
    IS(me, src);
    IS(0, pvm_getminfo(mid, &info));
    IS(me, info.dst);
    IS(2, got_int());
    IS(1, pvm_recv(-1, -1) > 0);
    IS(1, got_int());
    IS(1, pvm_trecv(-1, -1, &none) > 0);
    IS(3, got_int());
    /* A receive without a message frees the previous receive buffer as well. */
    again = pvm_getrbuf();
    IS(0, pvm_nrecv(-1, -1));
    IS(0, pvm_getrbuf());
    IS(PvmNoSuchBuf, pvm_freebuf(again));
    IS(PvmBadParam, pvm_recv(-5, -1));
    IS(PvmBadParam, pvm_recv(-1, -2));
}

static void sending(void)
{
    int mid, tids[3];
    double back[2], data[2] = {1.25, 2.5};
    int rtid, rtag, rlen;
    char few[3];

    pvm_initsend(PvmDataDefault);
    IS(PvmBadParam, pvm_send(0, 1));
    IS(PvmBadParam, pvm_send(-23, 1));
    IS(PvmBadParam, pvm_send(me, -1));
    IS(0, pvm_setopt(PvmResvTids, 1));
    IS(0, pvm_send(me, -7));
    IS(1, pvm_recv(-1, -7) > 0);
    IS(1, pvm_setopt(PvmResvTids, 0));
    pvm_freebuf(pvm_getsbuf());
    IS(PvmNoBuf, pvm_send(me, 1));
    /* A multicast omits the calling task and sends once to a task that is listed twice. */
    mid = pvm_initsend(PvmDataDefault);
    tids[0] = tids[1] = me;
    tids[2] = me + 1;
    IS(0, pvm_mcast(tids, 3, 5));
    IS(0, pvm_mcast(tids, 0, 5));
    IS(PvmBadParam, pvm_mcast(tids, -1, 5));
    tids[1] = -3;
    IS(PvmBadParam, pvm_mcast(tids, 3, 5));
    IS(0, pvm_nrecv(-1, 5));
    IS(mid, pvm_getsbuf());
    IS(0, pvm_psend(me, 6, data, 2, PVM_DOUBLE));
    IS(mid, pvm_getsbuf());
    IS(0, pvm_precv(-1, 6, back, 2, PVM_DOUBLE, &rtid, &rtag, &rlen));
    IS(1, back[0] == 1.25 && back[1] == 2.5 && rtid == me && rtag == 6 && rlen == 16);
    IS(0, pvm_psend(me, 6, "truncated", 9, PVM_BYTE));
    IS(0, pvm_precv(me, 6, few, 3, PVM_BYTE, NULL, NULL, &rlen));
    IS(0, memcmp(few, "tru", 3));
    IS(9, rlen);
    IS(PvmNotImpl, pvm_psend(me, 6, "x", 1, PVM_STR));
    IS(PvmBadParam, pvm_psend(me, 6, "x", 1, 99));
    IS(PvmBadParam, pvm_psend(me, 6, "x", -1, PVM_BYTE));
}

static void in_place(void)
{
    int value[100], i, got[100], mid;

    pvm_initsend(PvmDataInPlace);
    for (i = 0; i < 100; i++)
        IS(0, pvm_pkint(&value[i], 1, 1));
    for (i = 0; i < 100; i++)
        value[i] = i * i;
    IS(0, pvm_send(me, 1));
    value[7] = -7;
    IS(0, pvm_send(me, 2));
    IS(1, pvm_recv(me, 1) > 0);
    IS(0, pvm_upkint(got, 100, 1));
    IS(49, got[7]);
    mid = pvm_recv(me, 2);
    IS(0, pvm_upkint(got, 100, 1));
    IS(-7, got[7]);
    /* A received message can be forwarded unchanged. */
    pvm_setsbuf(mid);
    IS(0, pvm_getrbuf());
    IS(0, pvm_send(me, 3));
    IS(1, pvm_recv(me, 3) > 0);
    IS(0, pvm_upkint(got, 100, 1));
    IS(81, got[9]);
}

static void contexts(void)
{
    int ctx = pvm_newcontext();

    IS(0x40001, ctx);
    send_int(1, 1);
    IS(0, pvm_setcontext(ctx));
    IS(0, pvm_nrecv(-1, -1));
    send_int(2, 1);
    IS(1, pvm_nrecv(-1, -1) > 0);
    IS(2, got_int());
    IS(ctx, pvm_setcontext(-1));
    IS(1, pvm_nrecv(-1, -1) > 0);
    IS(1, got_int());
    IS(-1, pvm_setcontext(0));
    IS(0, pvm_freecontext(ctx));
    IS(PvmNotFound, pvm_freecontext(5));
}

static int rank_by_value(int mid, int tid, int tag)
{
    int value, before = pvm_setrbuf(mid);

    (void)tid;
    (void)tag;
    value = got_int();
    pvm_setrbuf(before);
    return value;
}

static void matching(void)
{
    int (*own)(int, int, int) = pvm_recvf(rank_by_value);

    send_int(0, 1);
    send_int(5, 1);
    send_int(9, 1);
    send_int(9, 2);
    /* A poll takes in one message only; a request takes in all. */
    IS(0, pvm_pstat(me));
    IS(1, pvm_nrecv(-1, -1) > 0);
    IS(1, pvm_recvf(own) == rank_by_value);
    /* The first of the two messages with the highest rank was received. */
    IS(0, pvm_nrecv(-1, 3));
    IS(1, pvm_recv(-1, 2) > 0);
    IS(1, pvm_recv(-1, 1) > 0);
    IS(1, pvm_recv(-1, 1) > 0);
    IS(0, pvm_nrecv(-1, -1));
}

/* More messages than a search examines one by one: an index finds them. */
static void many_waiting(void)
{
    int i, mid, ctx, last = -1;
    struct pvmminfo info;

    for (i = 0; i < 60; i++)
        send_int(i, i % 20);
    IS(0, pvm_pstat(me));
    IS(0, pvm_probe(me, 20));
    mid = pvm_probe(me, 7);
    IS(mid, pvm_probe(-1, 7));
    ctx = pvm_setcontext(5);
    IS(0, pvm_probe(-1, 7));
    pvm_setcontext(-1);
    IS(mid, pvm_probe(-1, 7));
    pvm_setcontext(ctx);
    /* A message that the program changes is found by its new header. */
    IS(0, pvm_getminfo(mid, &info));
    info.tag = 500;
    IS(0, pvm_setminfo(mid, &info));
    IS(mid, pvm_recv(-1, 500));
    IS(7, got_int());
    IS(1, pvm_recv(me, 7) > 0);
    IS(27, got_int());
    IS(0, pvm_freebuf(pvm_probe(-1, 9)));
    IS(1, pvm_recv(-1, 9) > 0);
    IS(29, got_int());
    /* So is a message that the program sends on before it receives it. */
    mid = pvm_probe(-1, 10);
    i = pvm_setsbuf(mid);
    IS(0, pvm_send(me, 600));
    IS(mid, pvm_setsbuf(i));
    IS(mid, pvm_recv(-1, 600));
    IS(10, got_int());
    IS(1, pvm_recv(-1, 600) > 0);
    IS(1, pvm_nrecv(-1, 10) > 0);
    for (i = 0; pvm_nrecv(-1, -1) > 0; i++) {
        IS(1, pvm_upkint(&mid, 1, 1) == 0 && mid > last);
        last = mid;
    }
    IS(54, i);
    /* The list was empty. Its index works again. */
    for (i = 0; i < 60; i++)
        send_int(i, i % 20);
    IS(0, pvm_pstat(me));
    for (i = 0; i < 60; i++) {
        IS(1, pvm_recv(i % 2 ? me : -1, (59 - i) % 20) > 0);
        IS((59 - i) % 20 + i / 20 * 20, got_int());
    }
    IS(0, pvm_nrecv(-1, -1));
}

static int handled, handled_tag;

static int handler(int mid)
{
    int tag;

    IS(mid, pvm_getrbuf());
    IS(0, pvm_getsbuf());
    IS(0, pvm_bufinfo(mid, NULL, &tag, NULL));
    IS(PvmNotImpl, pvm_recv(-1, 77));
    handled += got_int();
    handled_tag = tag;
    if (handled < 3)
        send_int(handled, 99);
    return 0;
}

static void handlers(void)
{
    int id, sbuf;

    id = pvm_addmhf(-1, 20, 0, handler);
    IS(9, id);
    IS(PvmExists, pvm_addmhf(me, 20, -1, handler));
    IS(PvmBadParam, pvm_addmhf(me, 21, -1, NULL));
    IS(10, pvm_addmhf(me, 21, 0, handler));
    send_int(2, 20);
    sbuf = pvm_getsbuf();
    IS(0, pvm_nrecv(-1, 20));
    IS(2, handled);
    IS(20, handled_tag);
    IS(sbuf, pvm_getsbuf());
    IS(1, pvm_recv(-1, 99) > 0);
    IS(2, got_int());
    IS(0, pvm_delmhf(id));
    send_int(1, 20);
    IS(1, pvm_recv(-1, 20) > 0);
    IS(2, handled);
}

static void mailbox(void)
{
    int mid, value, index, n, *tids;
    struct pvmmboxinfo *classes;

    mid = pvm_initsend(PvmDataDefault);
    value = 5;
    pvm_pkint(&value, 1, 1);
    IS(0, pvm_putinfo("one", mid, PvmMboxDefault));
    IS(3, pvm_putinfo("one", mid, PvmMboxDirectIndex(3)));
    IS(PvmBadParam, pvm_putinfo("", mid, 0));
    IS(PvmBadParam, pvm_putinfo(NULL, mid, 0));
    IS(PvmNoSuchBuf, pvm_putinfo("one", 4711, 0));
    IS(1, pvm_recvinfo("one", 0, 0) > 0);
    IS(5, got_int());
    IS(PvmNotFound, pvm_recvinfo("one", 1, 0));
    IS(0, pvm_getrbuf());
    IS(PvmBadParam, pvm_recvinfo("one", -1, 0));
    IS(0, pvm_getmboxinfo("", &n, &classes));
    IS(1, n);
    SAYS("one", classes[0].mi_name);
    IS(2, classes[0].mi_nentries);
    IS(3, classes[0].mi_indices[1]);
    IS(me, classes[0].mi_owners[0]);
    IS(3, pvm_delinfo("one", 3, 0));
    IS(PvmNotFound, pvm_delinfo("one", 3, 0));
    index = pvm_insert("old", -1, 1234);
    IS(0, index);
    IS(PvmDenied, pvm_insert("old", 0, 1));
    IS(4, pvm_insert("old", 4, 9));
    IS(0, pvm_lookup("old", -1, &value));
    IS(1234, value);
    IS(PvmNotFound, pvm_lookup("old", 3, &value));
    IS(4, pvm_delete("old", 4));
    IS(0, pvm_setopt(PvmNoReset, 1));
    IS(0, pvm_getnoresets(&tids, &n));
    IS(1, n);
    IS(me, tids[0]);
    IS(1, pvm_setopt(PvmNoReset, 0));
}

static void hosts_and_tasks(void)
{
    int hosts, formats, n, tids[3];
    struct pvmhostinfo *h;
    struct pvmtaskinfo *t;
    struct timeval clock, delta;
    char *args[] = {"a", NULL};
    int *fds;

    IS(0, pvm_config(&hosts, &formats, &h));
    IS(1, hosts);
    IS(1, formats);
    SAYS("here", h[0].hi_name);
    SAYS("LINUX64", h[0].hi_arch);
    IS(0x40000, h[0].hi_tid);
    IS(1000, h[0].hi_speed);
    IS(0, pvm_config(NULL, NULL, NULL));
    IS(0x408c41, pvm_archcode("LINUX64"));
    IS(PvmNotFound, pvm_archcode("VAX"));
    IS(PvmBadParam, pvm_archcode(NULL));
    IS(0, pvm_mstat("here"));
    IS(PvmNoHost, pvm_mstat("elsewhere"));
    IS(PvmBadParam, pvm_mstat(""));
    IS(PvmBadParam, pvm_mstat(NULL));
    IS(0, pvm_tasks(0, &n, &t));
    IS(1, n);
    IS(me, t[0].ti_tid);
    IS(77, t[0].ti_pid);
    SAYS("", t[0].ti_a_out);
    IS(0, pvm_pstat(me));
    IS(PvmNoTask, pvm_pstat(0x40009));
    IS(PvmBadParam, pvm_pstat(-1));
    IS(PvmBadParam, pvm_kill(0x40000));
    IS(0, pvm_sendsig(0x40009, SIGUSR1));
    IS(0, pvm_hostsync(0x40000, &clock, &delta));
    IS(1000000, clock.tv_sec);
    IS(1, delta.tv_sec > 0 && delta.tv_usec >= 0);
    IS(1, pvm_spawn("child", args, 0, NULL, 3, tids));
    IS(0x40002, tids[0]);
    IS(PvmOutOfRes, tids[1]);
    IS(PvmOutOfRes, tids[2]);
    IS(0, pvm_spawn("nowhere", NULL, 0, "", 2, tids));
    IS(PvmNoFile, tids[1]);
    IS(0, pvm_spawn("child", NULL, PvmTaskHost, NULL, 2, tids));
    IS(PvmNoHost, tids[0]);
    IS(PvmBadParam, pvm_spawn("child", NULL, 0, NULL, 0, tids));
    IS(PvmBadParam, pvm_spawn(NULL, NULL, 0, NULL, 1, tids));
    IS(1, pvm_getfds(&fds));
    IS(1, fds[0] >= 0);
}

static void notifications(void)
{
    int tids[2], mid, gone[2];

    tids[0] = 0x40002;
    IS(0, pvm_notify(PvmTaskExit, 30, 1, tids));
    IS(PvmBadParam, pvm_notify(PvmTaskExit, 30, 0, tids));
    tids[0] = -1;
    IS(PvmBadParam, pvm_notify(PvmTaskExit, 30, 1, tids));
    IS(PvmBadParam, pvm_notify(77, 30, 1, tids));
    IS(0, pvm_notify(PvmHostAdd, 30, -1, NULL));
    tids[0] = 0x40007;
    IS(0, pvm_notify(PvmRouteDelete, 31, 1, tids));
    mid = pvm_recv(-1, 31);
    IS(1, mid > 0);
    IS(0, pvm_upkint(gone, 2, 1));
    IS(0x40007, gone[0]);
    IS(-1, gone[1]);
    /* A cancelled notification of the task's own exit is delivered immediately. */
    tids[0] = me;
    IS(0, pvm_notify(PvmTaskExit, 32, 1, tids));
    IS(0, pvm_nrecv(-1, 32));
    IS(0, pvm_notify(PvmTaskExit | PvmNotifyCancel, 32, 1, tids));
    IS(1, pvm_nrecv(-1, 32) > 0);
    IS(me, got_int());
}

static int told;

static int last_words(int mid)
{
    (void)mid;
    told = got_int();
    return 0;
}

static void forking(void)
{
    int status;
    pid_t child;

    fflush(stdout);
    child = fork();
    if (child == 0) {
        /* The daemon of this test assigns the same tid to every process; only the new connection matters. */
        IS(1, pvm_mytid() > 0);
        send_int(3, 3);
        IS(1, pvm_recv(-1, 3) > 0);
        IS(3, got_int());
        pvm_exit();
        _exit(0);
    }
    IS(child, waitpid(child, &status, 0));
    IS(0, status);
    send_int(4, 3);
    IS(1, pvm_recv(-1, 3) > 0);
    IS(4, got_int());
}

int main(int argc, char **argv)
{
    int tids[2], *siblings;

    /* Ends a test that hangs. */
    alarm(60);
    me = pvm_mytid();
    IS(0x40001, me);
    if (argc > 1 && strcmp(argv[1], "catch") == 0) {
        IS(0, pvm_catchout(stdout));
        if (argc > 2 && strcmp(argv[argc - 1], "bare") == 0)
            IS(1, pvm_setopt(PvmShowTids, 0));
        IS(1, pvm_spawn(argc > 2 && strcmp(argv[2], "lost") == 0 ? "lost" : "child", NULL, 0, NULL, 1, tids));
        return pvm_exit();
    }
    if (argc > 1 && strcmp(argv[1], "orphan") == 0) {
        IS(0x40008, pvm_parent());
        pvm_setopt(PvmAutoErr, 0);
        IS(PvmNoParent, pvm_siblings(&siblings));
        return pvm_exit();
    }
    if (argc > 1 && strcmp(argv[1], "siblings") == 0) {
        IS(0x40009, pvm_parent());
        IS(2, pvm_siblings(&siblings));
        IS(me, siblings[0]);
        IS(0x40002, siblings[1]);
        return pvm_exit();
    }
    pvm_setopt(PvmAutoErr, 0);
    IS(PvmNoParent, pvm_parent());
    IS(1, pvm_siblings(&siblings));
    IS(me, siblings[0]);
    receiving();
    sending();
    in_place();
    contexts();
    matching();
    many_waiting();
    handlers();
    mailbox();
    hosts_and_tasks();
    notifications();
    forking();
    tids[0] = me;
    IS(0, pvm_notify(PvmTaskExit, 40, 1, tids));
    IS(1, pvm_addmhf(-1, 40, -1, last_words) > 0);
    IS(0, pvm_exit());
    IS(me, told);
    /* The next call enrols the process again. */
    IS(1, pvm_mytid() > 0);
    IS(0, pvm_exit());
    return 0;
}
