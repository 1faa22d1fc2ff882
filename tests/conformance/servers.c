/* Programs that do a part of the daemons' work: resource manager, tasker, hoster. */
#include "conform.h"

#include <pvmproto.h>

#define DAEMON ((int)0x80000000)
/* A tid without a task; messages to it have no effect. */
#define NOBODY 0x7fff0

/* Answers a message of the resource manager while a request waits for it. */
static int acknowledge(int mid)
{
    int from = 0;
    pvm_bufinfo(mid, NULL, NULL, &from);
    tell(from, 45, 0);
    return 0;
}

/* Asks for everything that a resource manager serves, and tells it what came. */
static int client(int argc, char **argv)
{
    char *names[] = { "elsewhere" }, *words[] = { "a", "b", NULL };
    struct pvmhostinfo *hosts = NULL;
    struct pvmtaskinfo *tasks = NULL;
    int got[16] = { 0 }, rm = atoi(argv[2]), subject = NOBODY, n = 0, narch = 0, status = 1, tids[2] = { 0 };
    (void)argc;
    got[0] = pvm_mytid();
    pvm_addmhf(rm, 44, 0, acknowledge);
    got[1] = pvm_config(&n, &narch, &hosts);
    got[2] = n == 1 ? hosts[0].hi_speed : -1;
    got[3] = narch;
    got[4] = pvm_tasks(0, &n, &tasks);
    got[5] = n == 1 ? tasks[0].ti_tid : -1;
    got[6] = pvm_addhosts(names, 1, &status);
    got[7] = status;
    got[8] = pvm_delhosts(names, 1, &status);
    got[9] = status;
    got[10] = pvm_notify(PvmTaskExit, 33, 1, &subject);
    got[11] = pvm_spawn("forged", words, PvmTaskHost, "somewhere", 2, tids);
    got[12] = tids[0];
    got[13] = tids[1];
    got[14] = pvm_archcode("FORGED");
    got[15] = pvm_mstat("h1") | pvm_pstat(pvm_mytid());
    tell_all(rm, 40, got, 16);
    tell(rm, 41, await_int(rm, 33, 0));
    pvm_exit();
    return 0;
}

/* Tries to serve where another task already does. */
static int rival(int argc, char **argv)
{
    int got[2], boss = atoi(argv[2]);
    (void)argc;
    pvm_setopt(PvmAutoErr, 0);
    got[0] = pvm_reg_tasker();
    got[1] = pvm_reg_hoster();
    tell_all(boss, 50, got, 2);
    pvm_exit();
    return 0;
}

/* Adds two hosts and tells what became of them. */
static int adder(int argc, char **argv)
{
    char *names[] = { "h2 so=ms", "h3 lo=someuser" };
    int got[3] = { 0 }, boss = atoi(argv[2]);
    (void)argc;
    got[0] = pvm_addhosts(names, 2, got + 1);
    tell_all(boss, 60, got, 3);
    pvm_exit();
    return 0;
}

/* Tells that it runs, and as whom. */
static int worker(int argc, char **argv)
{
    (void)argc, (void)argv;
    tell(pvm_parent(), 51, pvm_mytid());
    pvm_exit();
    return 0;
}

static const role roles[] = { { "client", client }, { "rival", rival }, { "adder", adder }, { "worker", worker },
    { NULL, NULL } };

static int flags_of(int tid)
{
    struct pvmtaskinfo *info = NULL;
    int n = 0;
    pvm_tasks(tid, &n, &info);
    return n == 1 ? info[0].ti_flag : -1;
}

/* Sends the active send buffer with a wait id. */
static void send_with(int wid, int dst, int tag)
{
    struct pvmminfo info;
    pvm_getminfo(pvm_getsbuf(), &info);
    info.wid = wid;
    pvm_setminfo(pvm_getsbuf(), &info);
    pvm_send(dst, tag);
}

static void pack_host(int tid, char *name, int speed)
{
    int dsig = 0x408c41;
    pvm_pkint(&tid, 1, 1);
    pvm_pkstr(name);
    pvm_pkstr("FORGED");
    pvm_pkint(&speed, 1, 1);
    pvm_pkint(&dsig, 1, 1);
}

static void pack_ints(int a, int b)
{
    pvm_pkint(&a, 1, 1);
    pvm_pkint(&b, 1, 1);
}

typedef struct {
    int newcomer, configs, tasks, adds, deletes, notifies, spawns, in_base, with_wid, handled;
    int where, what, about, flags, count, words, variables;
    char added[64], deleted[64], file[64], place[64], second[64], variable[256];
} asked;

/* True if a handler of the client runs while the client waits for the answer to its request. */
static int runs_handler(int client_tid)
{
    int request = pvm_setrbuf(0), runs;
    tell(client_tid, 44, 0);
    runs = await(client_tid, 45) > 0;
    pvm_freebuf(pvm_setrbuf(request));
    return runs;
}

/* Answers one request of the client; 0 when it was none. */
static int serve(asked *of)
{
    struct pvmminfo info;
    int n, k, sinks[6];
    char text[1024];
    pvm_getminfo(pvm_getrbuf(), &info);
    if (info.tag == SM_SPAWN || info.tag == SM_ADDHOST)
        of->handled += runs_handler(info.src);
    pvm_initsend(PvmDataDefault);
    switch (info.tag) {
    case SM_EXECACK:
        pvm_upkint(&n, 1, 1);
        pvm_upkint(&of->newcomer, 1, 1);
        return 1;
    case SM_CONFIG:
        of->configs++;
        pack_ints(1, 1);
        pack_host(0x40000, "h1", 777);
        break;
    case SM_TASK:
        of->tasks++;
        pvm_upkint(&of->where, 1, 1);
        pack_ints(0, NOBODY);
        pack_ints(0, 0x40000);
        n = 6;
        pvm_pkint(&n, 1, 1);
        pvm_pkstr("forged");
        pvm_pkint(&n, 1, 1);
        break;
    case SM_ADDHOST:
        of->adds++;
        pvm_upkint(&n, 1, 1);
        pvm_upkstr(of->added);
        pack_ints(1, 1);
        pack_host(0xc0000, "elsewhere", 1);
        break;
    case SM_DELHOST:
        of->deletes++;
        pvm_upkint(&n, 1, 1);
        pvm_upkstr(of->deleted);
        pack_ints(1, PvmOk);
        break;
    case SM_NOTIFY:
        of->notifies++;
        pvm_upkint(&of->what, 1, 1);
        pvm_upkint(sinks, 3, 1);
        pvm_upkint(&of->about, 1, 1);
        tell(info.src, sinks[1], of->about);
        return 1;
    case SM_SPAWN:
        of->spawns++;
        pvm_upkstr(of->file);
        pvm_upkint(&of->flags, 1, 1);
        pvm_upkstr(of->place);
        pvm_upkint(&of->count, 1, 1);
        pvm_upkint(&of->words, 1, 1);
        for (k = 0; k < of->words; k++)
            pvm_upkstr(of->second);
        pvm_upkint(sinks, 6, 1);
        pvm_upkint(&of->variables, 1, 1);
        for (k = 0; k < of->variables; k++) {
            pvm_upkstr(text);
            if (!k)
                snprintf(of->variable, sizeof of->variable, "%.9s", text);
        }
        pack_ints(2, NOBODY);
        n = PvmNoFile;
        pvm_pkint(&n, 1, 1);
        break;
    default:
        return 0;
    }
    of->in_base += info.ctx == 0;
    of->with_wid += info.wid != 0;
    send_with(info.wid, info.src, info.tag);
    return 1;
}

static void asking_a_manager(void)
{
    asked of;
    int got[16] = { 0 };
    memset(&of, 0, sizeof of);
    from_command_line("client", 0);
    while (await(-1, -1) > 0 && serve(&of))
        ;
    pvm_upkint(got, 16, 1);
    is(of.newcomer, got[0], "a resource manager is told of a task that comes by itself");
    is(got[1], PvmOk, "config works with a resource manager");
    is(got[2], 777, "config gets the hosts from the resource manager");
    is(got[3], 1, "config gets the number of data formats from the resource manager");
    is(of.configs, 2, "config and archcode ask the resource manager for the hosts");
    is(got[14], 0x408c41, "archcode finds an architecture among the resource manager's");
    is(of.tasks, 1, "tasks asks the resource manager");
    is(of.where, 0, "tasks tells the resource manager where");
    is(got[5], NOBODY, "tasks gets the tasks from the resource manager");
    is(of.adds, 1, "addhosts asks the resource manager");
    reads(of.added, "elsewhere", "addhosts tells the resource manager the name");
    is(got[6], 1, "addhosts gets the number of hosts from the resource manager");
    is(got[7], 0xc0000, "addhosts gets the tid from the resource manager");
    is(of.deletes, 1, "delhosts asks the resource manager");
    reads(of.deleted, "elsewhere", "delhosts tells the resource manager the name");
    is(got[8], 1, "delhosts gets the number of hosts from the resource manager");
    is(got[9], PvmOk, "delhosts gets the answer for a host from the resource manager");
    is(of.notifies, 1, "notify asks the resource manager");
    is(of.what, PvmTaskExit, "notify tells the resource manager about what");
    is(of.about, NOBODY, "notify tells the resource manager about whom");
    is(got[10], PvmOk, "notify does not wait for the resource manager");
    is(of.spawns, 1, "spawn asks the resource manager");
    reads(of.file, "forged", "spawn tells the resource manager the program");
    reads(of.place, "somewhere", "spawn tells the resource manager the place");
    is(of.flags, PvmTaskHost, "spawn tells the resource manager its flags");
    is(of.count, 2, "spawn tells the resource manager how many");
    is(of.words, 2, "spawn tells the resource manager how many words there are");
    reads(of.second, "b", "spawn tells the resource manager the words");
    reads(of.variable, "PVMTMASK=", "spawn tells the resource manager the variables, the trace mask first");
    is(got[11], 1, "spawn counts the tasks that the resource manager started");
    is(got[12], NOBODY, "spawn gets tids from the resource manager");
    is(got[13], PvmNoFile, "spawn gets errors from the resource manager");
    is(of.handled, 2, "a handler runs while addhosts and spawn wait for the resource manager");
    is(got[15], PvmOk, "mstat and pstat ask the daemon");
    is(of.in_base, 6, "requests to a resource manager are in context 0");
    is(of.with_wid, 6, "requests to a resource manager have a wait id");
    is(await_int(-1, 41, 0), NOBODY, "a notification may come from the resource manager");
    is(await_int(DAEMON, SM_TASKX, 0), got[0], "a resource manager is told of the end of a task that had come by itself");
}

/* Makes the daemon start one task of a role that has no parent. */
static void exec_quiet(int wid)
{
    char path[1200];
    int head[3] = { PvmTaskDefault, 1, 1 }, none[6] = { 0 }, parent = 0;
    snprintf(path, sizeof path, "%s/pvm3/bin/LINUX64/%s", getenv("HOME"), own_name);
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&parent, 1, 1);
    pvm_pkstr(path);
    pvm_pkint(head, 3, 1);
    pvm_pkstr("quiet");
    pvm_pkint(none, 6, 1);
    pack_ints(0, 0);
    pvm_pkint(head + 1, 1, 1);
    send_with(wid, DAEMON, SM_EXEC);
}

static void working_for_a_manager(void)
{
    struct pvmminfo info = { 0 };
    char *names[] = { "h2" }, text[1024];
    int n = 0, tid = 0, status, words[2];
    exec_quiet(4711);
    holds(await(-1, SM_EXECACK) > 0, "a daemon answers when its resource manager has it start a task");
    pvm_getminfo(pvm_getrbuf(), &info);
    is(info.wid, 4711, "a daemon's answer to its resource manager has the request's wait id");
    pvm_upkint(&n, 1, 1);
    pvm_upkint(&tid, 1, 1);
    is(n, 1, "a daemon tells its resource manager for how many tasks it answers");
    is(pvm_tidtohost(tid), 0x40000, "a daemon tells its resource manager the tid");
    holds(await(-1, SM_TASKX) > 0, "a resource manager is told of the end of a task that it had started");
    words[0] = words[1] = -1;
    pvm_upkint(words, 2, 1);
    is(words[0], tid, "the end of a task names it to the resource manager");
    is(words[1], 0, "the end of a task tells the resource manager its status");
    pvm_initsend(PvmDataDefault);
    n = 1;
    pvm_pkint(&n, 1, 1);
    pvm_pkstr("h2");
    send_with(4712, DAEMON, SM_ADD);
    holds(await(-1, SM_ADDACK) > 0, "the master answers when its resource manager has it add a host");
    pvm_getminfo(pvm_getrbuf(), &info);
    is(info.wid, 4712, "the master's answer to its resource manager has the request's wait id");
    pvm_upkint(words, 2, 1);
    is(words[0], 1, "the master tells its resource manager for how many hosts it answers");
    pvm_upkint(&tid, 1, 1);
    /* The hoster's hosts had numbers, too. */
    is(tid, 0x100000, "the master tells its resource manager the tid of a new host");
    text[0] = 0;
    pvm_upkstr(text);
    reads(text, "h2", "the master tells its resource manager the name of a new host");
    is(pvm_delhosts(names, 1, &status), 1, "a resource manager's own calls go to its daemon");
    is(await_int(-1, SM_HOSTX, 0), (int)0x80100000, "a resource manager is told of a host that has gone");
}

static void a_manager(void)
{
    struct pvmhostinfo *master = NULL;
    struct pvmmboxinfo *list = NULL;
    int n = 0, old = pvm_setopt(PvmResvTids, 1);
    is(pvm_reg_rm(&master), 0, "the first resource manager has none before it");
    is(master ? master->hi_tid : 0, 0x40000, "a resource manager is told the master's tid");
    reads(master ? master->hi_name : NULL, "h1", "a resource manager is told the master's name");
    is(pvm_reg_rm(NULL), own_tid, "registering as resource manager again tells the one before");
    pvm_getmboxinfo(PVMRMCLASS, &n, &list);
    holds(n == 1 && list[0].mi_owners[0] == own_tid, "a resource manager is in the mailbox");
    is(flags_of(own_tid), 0x104, "a resource manager has flag 0x100");
    asking_a_manager();
    working_for_a_manager();
    pvm_initsend(PvmDataDefault);
    n = 0;
    pvm_pkint(&n, 1, 1);
    pvm_send(DAEMON, SM_HANDOFF);
    is(pvm_reg_rm(NULL), 0, "a resource manager that hands its work to nobody is none any more");
    pvm_send(DAEMON, SM_HANDOFF);
    pvm_setopt(PvmResvTids, old);
}

typedef struct {
    int tid, argc, variables, whole[3];
    char path[1200], zeroth[1200], first[64], number[64];
    char *environment[64];
} order;

/* Reads what the daemon wants started. */
static void read_order(order *of)
{
    static char texts[64][1024];
    int flags, k;
    memset(of, 0, sizeof *of);
    pvm_upkint(&of->tid, 1, 1);
    pvm_upkint(&flags, 1, 1);
    pvm_upkstr(of->path);
    pvm_upkint(&of->argc, 1, 1);
    for (k = 0; k < of->argc; k++)
        pvm_upkstr(k ? of->first : of->zeroth);
    pvm_upkint(&of->variables, 1, 1);
    for (k = 0; k < of->variables && k < 64; k++) {
        pvm_upkstr(texts[k]);
        of->environment[k] = texts[k];
    }
    snprintf(of->number, sizeof of->number, "%.8s", of->environment[0] ? of->environment[0] : "");
    pvm_upkint(of->whole, 3, 1);
}

static void a_tasker(void)
{
    char path[1200];
    int old = pvm_setopt(PvmResvTids, 1), tid, k, got[2] = { 0 }, end[6] = { 0 };
    pid_t child;
    order of;
    is(pvm_reg_tasker(), PvmOk, "registering as tasker returns 0");
    is(flags_of(own_tid), 0x404, "a tasker has flag 0x400");
    from_command_line("rival", 0);
    await(-1, 50);
    pvm_upkint(got, 2, 1);
    is(got[0], PvmAlready, "there is one tasker on a host");
    start_as("worker", PvmTaskHost, ".", 1, &tid);
    holds(pvm_tidtohost(tid) == 0x40000, "spawn returns before the tasker has started anything");
    holds(await(DAEMON, SM_STTASK) > 0, "a tasker is asked to start a task");
    read_order(&of);
    is(of.tid, tid, "a tasker is told the tid");
    snprintf(path, sizeof path, "%s/pvm3/bin/LINUX64/%s", getenv("HOME"), own_name);
    reads(of.path, path, "a tasker is told the path of the program");
    is(of.argc, 2, "a tasker is told how many words there are, the path included");
    reads(of.zeroth, path, "the first word that a tasker is told is the path");
    reads(of.first, "worker", "a tasker is told the words");
    reads(of.number, "PVMEPID=", "the first variable that a tasker is told is PVMEPID");
    is(of.whole[2], 1, "a tasker is told how many tasks the spawn has");
    is(flags_of(tid), 0, "a task that its tasker has not started has no flags");
    is(pvm_pstat(tid), PvmOk, "a task that its tasker has not started is there");
    child = fork();
    if (child == 0) {
        for (k = 0; of.environment[k]; k++)
            putenv(of.environment[k]);
        execl(of.path, of.zeroth, of.first, NULL);
        _exit(1);
    }
    is(await_int(tid, 51, 0), tid, "a process that a tasker started is the task");
    waitpid(child, NULL, 0);
    holds(gone(tid), "a task of a tasker ends when it leaves");
    start_as("worker", PvmTaskHost, ".", 1, &tid);
    await(DAEMON, SM_STTASK);
    pvm_notify(PvmTaskExit, 52, 1, &tid);
    end[0] = tid;
    end[1] = 256;
    tell_all(DAEMON, SM_TASKX, end, 6);
    is(await_int(-1, 52, 0), tid, "a task ends when its tasker says so");
    is(pvm_reg_tasker(), PvmOk, "a tasker takes its registration back");
    is(flags_of(own_tid), 4, "who is tasker no more has no flag for it");
    tid = start_waiting("waiter", ".");
    is(flags_of(tid), 6, "without a tasker the daemon starts tasks again");
    dismiss(&tid, 1);
    pvm_setopt(PvmResvTids, old);
}

static void a_hoster(void)
{
    struct pvmminfo info = { 0 };
    char so[2][64] = { "", "" }, login[2][256] = { "", "" }, command[1024] = "", rest[1024];
    int old = pvm_setopt(PvmResvTids, 1), n = 0, k, tids[2] = { 0 }, got[3] = { 0 };
    char *answers[] = { "PvmCantStart", "PvmDupHost" };
    is(pvm_reg_hoster(), PvmOk, "registering as hoster returns 0");
    is(flags_of(own_tid), 0x204, "a hoster has flag 0x200");
    from_command_line("rival", 0);
    await(-1, 50);
    pvm_upkint(got, 2, 1);
    is(got[1], PvmAlready, "there is one hoster");
    from_command_line("adder", 0);
    holds(await(DAEMON, SM_STHOST) > 0, "a hoster is asked to start daemons");
    pvm_getminfo(pvm_getrbuf(), &info);
    pvm_upkint(&n, 1, 1);
    is(n, 2, "a hoster is told how many daemons to start");
    for (k = 0; k < n && k < 2; k++) {
        pvm_upkint(&tids[k], 1, 1);
        pvm_upkstr(so[k]);
        pvm_upkstr(login[k]);
        pvm_upkstr(command);
        pvm_upkstr(rest);
        pvm_upkstr(rest);
    }
    is(tids[1] - tids[0], 0x40000, "a hoster is told the tids of the hosts");
    reads(so[0], "ms", "a hoster is told the option so=");
    reads(so[1], "", "a hoster is told nothing for so= if it was not given");
    reads(login[0], "h2", "a hoster is told where to log in");
    reads(login[1], "someuser@h3", "a hoster is told as whom to log in");
    holds(command[0] != 0, "a hoster is told the command");
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&n, 1, 1);
    for (k = 0; k < n && k < 2; k++) {
        pvm_pkint(&tids[k], 1, 1);
        pvm_pkstr(answers[k]);
    }
    send_with(info.wid, DAEMON, SM_STHOSTACK);
    await(-1, 60);
    pvm_upkint(got, 3, 1);
    is(got[0], 0, "addhosts counts no host that the hoster could not start");
    is(got[1], PvmCantStart, "addhosts gets an error by the name that the hoster gave");
    is(got[2], PvmDupHost, "addhosts gets another error by its name");
    is(pvm_reg_hoster(), PvmOk, "a hoster takes its registration back");
    pvm_setopt(PvmResvTids, old);
}

static void sentences(void)
{
    a_tasker();
    a_hoster();
    a_manager();
}
