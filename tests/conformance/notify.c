/* Notifications: of tasks, of hosts that come and go, of routes; order and cancelling. */
#include "conform.h"

#define DAEMON ((int)0x80000000)

/* Waits, then says much and ends. */
static int last_words(int argc, char **argv)
{
    int k;
    (void)argc, (void)argv;
    wait_for_word();
    for (k = 0; k < 200; k++)
        tell(pvm_parent(), 4, k);
    pvm_exit();
    return 0;
}

/* The file that ends a task which has left the virtual machine. */
static void sign_for(int parent, char *path, size_t room)
{
    snprintf(path, room, "%s/lingers.%x", getenv("HOME"), parent);
}

/* Leaves the virtual machine, but lives on until its file is there. */
static int lingerer(int argc, char **argv)
{
    char sign[1200];
    int k;
    (void)argc, (void)argv;
    wait_for_word();
    sign_for(pvm_parent(), sign, sizeof sign);
    pvm_exit();
    for (k = 0; k < 1000 && access(sign, F_OK); k++)
        usleep(10000);
    return 0;
}

static int crasher(int argc, char **argv)
{
    (void)argc, (void)argv;
    wait_for_word();
    abort();
}

/* From the command line: leaves on request and lives until its pipe closes. */
static int visitor(int argc, char **argv)
{
    int host = atoi(argv[2]);
    char byte;
    (void)argc;
    tell(host, 2, pvm_mytid());
    pvm_recv(host, 3);
    pvm_exit();
    return read(atoi(argv[3]), &byte, 1) == 0 ? 0 : 1;
}

static const role roles[] = { { "visitor", visitor }, { "last_words", last_words }, { "lingerer", lingerer },
    { "crasher", crasher }, { NULL, NULL } };

static void of_tasks(void)
{
    int kid = start_waiting("waiter", NULL), other = start_waiting("waiter", NULL), both[2], len = -1, src = 0, id, tids[2];
    both[0] = kid;
    both[1] = other;
    is(pvm_notify(PvmTaskExit, 10, 2, both), PvmOk, "notify of tasks returns 0");
    is(comes_soon(-1, 10), 0, "nothing comes while the tasks live");
    tell(kid, 3, 0);
    id = await(-1, 10);
    holds(id > 0, "a notification comes when a task ends");
    pvm_bufinfo(id, &len, NULL, &src);
    is(len, 4, "a notification of a task's end has one int");
    is(src, DAEMON, "a notification comes from the daemon");
    pvm_upkint(tids, 1, 1);
    is(tids[0], kid, "a notification names the task");
    is(comes_soon(-1, 10), 0, "the end of one task tells nothing of the other");
    tell(other, 3, 0);
    is(await_int(DAEMON, 10, 0), other, "a notification can be received by its source");
    pvm_notify(PvmTaskExit, 11, 1, &kid);
    is(await_int(-1, 11, 0), kid, "a task that is dead already is told at once");
    other = pvm_tidtohost(own_tid) | 0x3fff0;
    pvm_notify(PvmTaskExit, 12, 1, &other);
    is(await_int(-1, 12, 0), other, "a task that never was is told at once");
    other = 0x3ffc0001;
    pvm_notify(PvmTaskExit, 13, 1, &other);
    is(await_int(-1, 13, 0), other, "a task of a host that is not there is told at once");
    kid = start_waiting("crasher", NULL);
    pvm_notify(PvmTaskExit, 14, 1, &kid);
    tell(kid, 3, 0);
    is(await_int(-1, 14, 0), kid, "a task that crashes is told");
    kid = start_waiting("waiter", NULL);
    pvm_notify(PvmTaskExit, 15, 1, &kid);
    pvm_notify(PvmTaskExit, 15, 1, &kid);
    pvm_notify(PvmTaskExit, 16, 1, &kid);
    pvm_kill(kid);
    is(await_int(-1, 16, 0), kid, "a task that is killed is told");
    await(-1, 15);
    is(await_int(-1, 15, 0), kid, "each request has its own notification");
    is(comes_soon(-1, 15), 0, "a notification comes once");
    is(pvm_notify(PvmTaskExit, 17, 0, &kid), PvmBadParam, "notify of no tasks is a bad parameter");
    is(pvm_notify(PvmTaskExit, 17, -1, &kid), PvmBadParam, "notify of a negative count is a bad parameter");
    other = 0x40000;
    is(pvm_notify(PvmTaskExit, 17, 1, &other), PvmBadParam, "notify of the exit of a host is a bad parameter");
}

static void order_and_context(void)
{
    int kid = start_waiting("last_words", NULL), k, good, context, early;
    char sign[1200];
    pvm_notify(PvmTaskExit, 20, 1, &kid);
    tell(kid, 3, 0);
    await(-1, 20);
    for (k = 0, good = 1; k < 200; k++)
        good = pvm_nrecv(kid, 4) > 0 && good;
    holds(good, "when a task's end is told, all its messages are there");
    context = pvm_newcontext();
    kid = start_waiting("waiter", NULL);
    pvm_setcontext(context);
    pvm_notify(PvmTaskExit, 21, 1, &kid);
    pvm_setcontext(PvmBaseContext);
    tell(kid, 3, 0);
    gone(kid);
    is(comes_soon(-1, 21), 0, "a notification does not come in another context");
    pvm_setcontext(context);
    holds(await(-1, 21) > 0, "a notification comes in the context of its request");
    pvm_setcontext(PvmBaseContext);
    kid = start_waiting("lingerer", NULL);
    pvm_notify(PvmTaskExit, 22, 1, &kid);
    tell(kid, 3, 0);
    early = comes_soon(-1, 22);
    is(early, 0, "a spawned task that only left the virtual machine is not told yet");
    sign_for(own_tid, sign, sizeof sign);
    fclose(fopen(sign, "w"));
    holds(await(-1, 22) > 0, "a spawned task is told when its process ends");
    unlink(sign);
}

static void of_a_visitor(void)
{
    int pipes[2], tid;
    if (pipe(pipes))
        return;
    fcntl(pipes[1], F_SETFD, FD_CLOEXEC);
    from_command_line("visitor", pipes[0]);
    tid = await_int(-1, 2, 0);
    pvm_notify(PvmTaskExit, 23, 1, &tid);
    tell(tid, 3, 0);
    is(await_int(-1, 23, 0), tid, "a task from the command line is told when it leaves");
    close(pipes[0]);
    close(pipes[1]);
    wait(NULL);
}

static void cancelling(void)
{
    int kid = start_waiting("waiter", NULL), host = 0x40000, k;
    pvm_notify(PvmTaskExit, 30, 1, &kid);
    is(pvm_notify(PvmTaskExit | PvmNotifyCancel, 30, 1, &kid), PvmOk, "cancelling returns 0");
    is(await_int(-1, 30, 0), kid, "a cancelled notification of a task comes at once");
    is(pvm_notify(PvmTaskExit | PvmNotifyCancel, 30, 1, &kid), PvmOk, "cancelling what was not asked for returns 0");
    is(comes_soon(-1, 30), 0, "cancelling what was not asked for brings nothing");
    pvm_notify(PvmTaskExit, 31, 1, &kid);
    pvm_notify(PvmTaskExit | PvmNotifyCancel, 32, 1, &kid);
    is(comes_soon(-1, 32), 0, "cancelling with another tag cancels nothing");
    pvm_notify(PvmTaskExit, 31, 1, &kid);
    pvm_notify(PvmTaskExit | PvmNotifyCancel, 31, 1, &kid);
    await(-1, 31);
    is(comes_soon(-1, 31), 0, "cancelling cancels one of two requests");
    tell(kid, 3, 0);
    is(await_int(-1, 31, 0), kid, "the other of two requests stays");
    pvm_notify(PvmHostDelete, 33, 1, &host);
    pvm_notify(PvmHostDelete | PvmNotifyCancel, 33, 1, &host);
    is(await_int(-1, 33, 0), host, "a cancelled notification of a host comes at once");
    k = 1;
    pvm_notify(PvmHostAdd, 34, -1, &k);
    is(pvm_notify(PvmHostAdd | PvmNotifyCancel, 34, 0, &k), PvmOk, "cancelling the notification of new hosts returns 0");
    is(comes_soon(-1, 34), 0, "cancelling the notification of new hosts brings nothing");
}

static void of_hosts(void)
{
    char *two[] = { "h2", "h3" }, *first[] = { "h2" }, *second[] = { "h3" };
    int status[2], n = 0, tids[4] = { 0 }, gone_host, kid, unknown = 0x3ffc0000, src = 0;
    is(pvm_notify(PvmHostAdd, 40, -1, NULL), PvmOk, "notify of new hosts returns 0");
    pvm_notify(PvmHostAdd, 41, 1, NULL);
    pvm_notify(PvmHostAdd, 46, 2, NULL);
    pvm_notify(PvmHostAdd, 46, 1, NULL);
    pvm_addhosts(first, 1, status);
    await(-1, 40);
    pvm_upkint(&n, 1, 1);
    is(n, 1, "a notification of new hosts tells how many");
    pvm_upkint(tids, 1, 1);
    is(tids[0], status[0], "a notification of new hosts tells the tids");
    pvm_bufinfo(pvm_getrbuf(), &n, NULL, &src);
    is(n, 8, "a notification of one new host has two ints");
    is(src, DAEMON, "a notification of new hosts comes from the daemon");
    holds(await(-1, 41) > 0, "a notification of new hosts comes for each request");
    pvm_addhosts(second, 1, status + 1);
    holds(await(-1, 40) > 0, "a notification of new hosts comes again if the count allows");
    is(comes_soon(-1, 41), 0, "a notification of new hosts comes as often as the count says");
    await(-1, 46);
    is(comes_soon(-1, 46), 0, "the same request for new hosts again replaces the count");
    pvm_notify(PvmHostAdd, 40, 0, NULL);
    kid = start_waiting("waiter", "h2");
    pvm_notify(PvmTaskExit, 44, 1, &kid);
    is(pvm_notify(PvmHostDelete, 42, 2, status), PvmOk, "notify of hosts that go returns 0");
    pvm_delhosts(first, 1, &n);
    gone_host = await_int(-1, 42, 0);
    is(gone_host, status[0], "a notification of a host that goes names it");
    pvm_bufinfo(pvm_getrbuf(), &n, NULL, NULL);
    is(n, 4, "a notification of a host that goes has one int");
    is(await_int(-1, 44, 0), kid, "the tasks of a host that goes are told");
    is(comes_soon(-1, 42), 0, "a host that stays is not told");
    pvm_notify(PvmHostDelete, 43, 1, &unknown);
    is(await_int(-1, 43, 0), unknown, "a host that is not there is told at once");
    n = own_tid;
    is(pvm_notify(PvmHostDelete, 45, 0, &n), PvmBadParam, "notify of no hosts is a bad parameter");
    pvm_addhosts(two, 1, status);
    is(comes_soon(-1, 40), 0, "a count of 0 ends the notification of new hosts");
}

static int ends_told, end_named;

static int note(int mid)
{
    (void)mid;
    ends_told++;
    pvm_upkint(&end_named, 1, 1);
    return 0;
}

static int cancelled_told;

static int note_cancelled(int mid)
{
    (void)mid;
    cancelled_told++;
    return 0;
}

/* Cancels a notification for which there is a handler. */
static int cancel(int mid)
{
    (void)mid;
    pvm_notify(PvmTaskExit | PvmNotifyCancel, 53, 1, &own_tid);
    return 0;
}

static void of_oneself(void)
{
    int me = own_tid, src = 0, canceller = pvm_addmhf(-1, 52, -1, cancel), noter = pvm_addmhf(-1, 53, -1, note_cancelled);
    pvm_notify(PvmTaskExit, 53, 1, &me);
    tell(me, 52, 0);
    pvm_pstat(me);
    pvm_pstat(me);
    is(cancelled_told, 1, "a handler may cancel a notification for which there is another handler");
    pvm_delmhf(canceller);
    pvm_delmhf(noter);
    pvm_notify(PvmTaskExit, 51, 1, &me);
    is(pvm_notify(PvmTaskExit | PvmNotifyCancel, 51, 1, &me), PvmOk, "cancelling the notification of the own exit returns 0");
    pvm_bufinfo(await(-1, 51), NULL, NULL, &src);
    is(src, DAEMON, "a cancelled notification of the own exit comes from the daemon");
    is(pvm_notify(PvmTaskExit, 50, 1, &me), PvmOk, "notify of the own exit returns 0");
    is(comes_soon(-1, 50), 0, "the own exit is not told before it");
    pvm_addmhf(-1, 50, -1, note);
    pvm_exit();
    is(ends_told, 1, "the own exit is told at it, to a handler");
    is(end_named, me, "the notification of the own exit names oneself");
    own_tid = pvm_mytid();
}

static void sentences(void)
{
    of_tasks();
    order_and_context();
    of_a_visitor();
    cancelling();
    of_hosts();
    of_oneself();
}
