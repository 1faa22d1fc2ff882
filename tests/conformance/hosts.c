/* Hosts: adding, deleting, listing; tasks by host; clocks. */
#include "conform.h"

static int printer(int argc, char **argv)
{
    (void)argc, (void)argv;
    pvm_mytid();
    printf("a line\n");
    fflush(stdout);
    pvm_exit();
    return 0;
}

/* Writes a file when it is requested to end. */
static void last_deed(int number)
{
    char name[1200];
    snprintf(name, sizeof name, "%s/told-to-end", getenv("HOME"));
    close(open(name, O_CREAT | O_WRONLY, 0600));
    _exit(number);
}

static int ender(int argc, char **argv)
{
    signal(SIGTERM, last_deed);
    return waiter(argc, argv);
}

/* Tells whether it may start daemons. */
static int would_be_hoster(int argc, char **argv)
{
    (void)argc, (void)argv;
    pvm_setopt(PvmAutoErr, 0);
    tell(pvm_parent(), 5, pvm_reg_hoster());
    pvm_exit();
    return 0;
}

static const role roles[] = { { "printer", printer }, { "ender", ender },
    { "would_be_hoster", would_be_hoster }, { NULL, NULL } };

static struct pvmhostinfo *list;

static int count(void)
{
    int n = -1;
    pvm_config(&n, NULL, &list);
    return n;
}

/* A deleted host leaves a little later. */
static int shows(int n)
{
    double end;
    for (end = now() + PATIENCE_SECONDS; count() != n && now() < end;)
        usleep(10000);
    return count() == n;
}

static void alone(void)
{
    int n = 0, narch = 0;
    is(pvm_config(&n, &narch, &list), PvmOk, "config returns 0");
    is(n, 1, "config counts the hosts");
    is(narch, 1, "config counts the data formats");
    is(list[0].hi_tid, 0x40000, "config tells a host's tid");
    reads(list[0].hi_name, "h1", "config tells a host's name");
    reads(list[0].hi_arch, "LINUX64", "config tells a host's architecture");
    is(list[0].hi_speed, 1000, "config tells a host's speed, 1000 if nobody said another");
    is(list[0].hi_dsig, 0x408c41, "config tells a host's data signature");
    is(pvm_config(NULL, NULL, NULL), PvmOk, "config takes null pointers");
    is(sizeof *list, 32, "the entry for a host has 32 bytes");
    is(pvm_archcode("LINUX64"), 0x408c41, "archcode tells the data signature of an architecture");
    is(pvm_archcode("CRAY"), PvmNotFound, "archcode of an architecture that nobody has finds none");
    is(pvm_archcode(NULL), PvmBadParam, "archcode of null is a bad parameter");
}

static void adding(void)
{
    char *two[] = { "h2", "nohost" }, *one[] = { "h3 sp=250 wd=/usr ep=/bin:$HOME/pvm3/bin/$PVM_ARCH bx=$HOME/conform-debugger" }, *again[] = { "h2" }, *wrong[] = { "h3 xx=1" };
    char *own[] = { "h1" }, *twice[] = { "h3", "h3" };
    int status[2] = { 0 }, joined;
    double end;
    is(pvm_addhosts(two, 2, status), 1, "addhosts returns the number of hosts that joined");
    is(status[0], 0x80000, "addhosts tells the tid of a host that joined");
    is(status[1], PvmNoHost, "addhosts of a name that nobody knows gets no such host");
    is(count(), 2, "config shows an added host");
    reads(list[1].hi_name, "h2", "config has hosts in the order of their numbers");
    is(pvm_addhosts(again, 1, status), 0, "addhosts of a host that is there adds none");
    is(status[0], PvmDupHost, "addhosts of a host that is there says so");
    is(pvm_addhosts(own, 1, status), 0, "addhosts of the own host adds none");
    is(status[0], PvmDupHost, "addhosts of the own host says that it is there");
    is(pvm_addhosts(wrong, 1, status), 0, "addhosts with an unknown option adds none");
    is(status[0], PvmBadParam, "addhosts with an unknown option gets a bad parameter");
    is(pvm_addhosts(twice, 2, status), 1, "addhosts of the same host twice adds it once");
    holds(status[0] == PvmDupHost || status[1] == PvmDupHost, "addhosts of the same host twice says so");
    pvm_delhosts(twice, 1, status);
    /* A daemon that was requested to end may still run. */
    for (end = now() + PATIENCE_SECONDS; (joined = pvm_addhosts(one, 1, status)) != 1 && now() < end;)
        usleep(100000);
    is(joined, 1, "addhosts takes options behind the name");
    holds(status[0] > 0xc0000, "the number of a deleted host is not used again at once");
    count();
    is(list[2].hi_speed, 250, "the option sp= sets a host's speed");
    is(pvm_addhosts(two, 0, status), PvmBadParam, "addhosts of no names is a bad parameter");
    is(pvm_addhosts(two, -1, status), PvmBadParam, "addhosts of a negative number is a bad parameter");
}

static void options(void)
{
    char here[1024], debugged[1024], path[1200], *words[] = { "1", NULL };
    const char *debugger = make_debugger();
    int tid;
    look(PvmTaskDefault, "h3", here, debugged);
    reads(here, "/usr", "the option wd= sets where tasks begin");
    reads(debugged, "", "a task is not debugged if nobody wants it");
    is(pvm_spawn("sleep", words, PvmTaskHost, "h3", 1, &tid), 1, "the option ep= sets where programs are looked for");
    is(pvm_spawn("sleep", words, PvmTaskHost, "h2", 1, &tid), 0, "the option ep= is for its own host");
    snprintf(path, sizeof path, "%s/pvm3/bin/LINUX64/%s", getenv("HOME"), own_name);
    look(PvmTaskDebug, "h3", here, debugged);
    reads(debugged, path, "the option bx= names the debugger, which gets the program's path");
    unlink(debugger);
    tid = 0;
    start_as("would_be_hoster", PvmTaskHost, "h2", 1, &tid);
    is(await_int(tid, 5, 0), PvmHostrNMstr, "a hoster must be on the master");
    gone(tid);
}

static void states(void)
{
    struct timeval clock, difference, here;
    gettimeofday(&here, NULL);
    is(pvm_mstat("h1"), PvmOk, "mstat of a host that is up returns 0");
    is(pvm_mstat("h2"), PvmOk, "mstat of another host that is up returns 0");
    is(pvm_mstat("."), PvmOk, "mstat takes a dot for the own host");
    is(pvm_mstat("nohost"), PvmNoHost, "mstat of an unknown host finds none");
    is(pvm_mstat(""), PvmBadParam, "mstat of an empty name is a bad parameter");
    is(pvm_mstat(NULL), PvmBadParam, "mstat of null is a bad parameter");
    is(pvm_hostsync(0x80000, &clock, &difference), PvmOk, "hostsync returns 0");
    holds(labs(clock.tv_sec - here.tv_sec) < 30, "hostsync tells the other host's time of day");
    holds(difference.tv_usec >= 0 && difference.tv_usec < 1000000, "hostsync's microseconds are from 0 to 999999");
    holds(labs(difference.tv_sec) < 3, "hostsync tells how far clocks are apart");
    is(pvm_hostsync(0x40000, &clock, &difference), PvmOk, "hostsync of the own host returns 0");
    is(pvm_hostsync(0x3ffc0000, &clock, &difference), PvmNoHost, "hostsync of an unknown host finds none");
    is(pvm_hostsync(0x80000, NULL, NULL), PvmOk, "hostsync takes null pointers");
    is(pvm_hostsync(own_tid, &clock, &difference), PvmOk, "hostsync of a task asks its host");
    is(pvm_hostsync(0, &clock, &difference), PvmNoHost, "hostsync of no host finds none");
}

static void tasks(void)
{
    struct pvmtaskinfo *info = NULL;
    char *words[] = { "60", NULL };
    int kid = start_waiting("waiter", "h2"), n = -1, k, found, other = 0;
    is(pvm_tasks(0, &n, &info), PvmOk, "tasks returns 0");
    for (k = found = 0; k < n; k++) {
        if (info[k].ti_tid == kid)
            found = k;
        if (info[k].ti_tid == own_tid)
            other = k;
    }
    is(info[found].ti_tid, kid, "tasks of all hosts lists a task of another host");
    is(info[other].ti_tid, own_tid, "tasks of all hosts lists the caller");
    is(info[found].ti_ptid, own_tid, "tasks tells the parent");
    is(info[found].ti_host, 0x80000, "tasks tells the host");
    is(info[found].ti_flag, 6, "tasks gives a spawned task that has connected flags 2 and 4");
    reads(info[found].ti_a_out, own_name, "tasks tells the name of the program as it was spawned");
    holds(info[found].ti_pid > 0, "tasks tells the process id");
    is(info[other].ti_ptid, 0, "tasks tells no parent of a task from the command line");
    is(info[other].ti_flag, 4, "tasks gives a task from the command line flag 4");
    reads(info[other].ti_a_out, "", "tasks tells no name of a task from the command line");
    is(info[other].ti_pid, getpid(), "tasks tells the process id of a task from the command line");
    is(sizeof *info, 32, "the entry for a task has 32 bytes");
    is(pvm_tasks(0x80000, &n, &info), PvmOk, "tasks of one host returns 0");
    is(n, 1, "tasks of one host lists only its own");
    is(pvm_tasks(kid, &n, &info), PvmOk, "tasks of one task returns 0");
    is(n, 1, "tasks of one task lists one");
    is(info[0].ti_tid, kid, "tasks of one task lists it");
    is(pvm_tasks(0x80000 | 0x3ffff, &n, &info), PvmOk, "tasks of a task that does not exist returns 0");
    is(n, 0, "tasks of a task that does not exist lists none");
    is(pvm_tasks(0x3ffc0000, &n, &info), PvmNoHost, "tasks of an unknown host finds no such host");
    is(pvm_tasks(0x3ffc0001, &n, &info), PvmNoHost, "tasks of a task of an unknown host finds no such host");
    is(pvm_tasks(0xbffc0000, &n, &info), PvmNoHost, "tasks of the daemon of an unknown host finds no such host");
    is(pvm_tasks(5, &n, &info), PvmNoHost, "tasks of a tid without a host finds no such host");
    is(pvm_tasks(0x80000000, &n, &info), PvmNoHost, "tasks of the daemon, as tasks address their own, finds no such host");
    is(pvm_tasks(0x80080000, &n, &info), PvmOk, "tasks of the address of a daemon returns 0");
    is(n, 1, "tasks of the address of a daemon lists the tasks of its host");
    is(pvm_tasks(0x40080000, &n, &info), PvmOk, "tasks of the group bit and a host returns 0");
    is(n, 1, "tasks of the group bit and a host lists the tasks of that host");
    is(pvm_tasks(0x40000000 | kid, &n, &info), PvmOk, "tasks of the group bit and a task returns 0");
    is(n, 0, "tasks of the group bit and a task lists none");
    is(pvm_tasks(-5, &n, &info), PvmNoHost, "tasks of a negative tid finds no such host");
    is(pvm_tasks(0, NULL, NULL), PvmOk, "tasks takes null pointers");
    dismiss(&kid, 1);
    pvm_spawn("/bin/sleep", words, PvmTaskHost | PvmNoSpawnParent, "h2", 1, &kid);
    is(pvm_tasks(kid, &n, &info), PvmOk, "tasks of a task that knows nothing of PVM returns 0");
    is(n == 1 ? info[0].ti_flag : -1, 2, "tasks gives a spawned task that has not connected flag 2");
    is(n == 1 ? info[0].ti_ptid : -1, PvmParentNotSet, "tasks tells of a parent that does not want to be known");
    reads(n == 1 ? info[0].ti_a_out : NULL, "/bin/sleep", "tasks tells the path of a program that was spawned by it");
    pvm_kill(kid);
    holds(gone(kid), "a task that knows nothing of PVM can be killed");
}

/* Collects the output of many short tasks of another host; half of them know nothing of PVM. */
static void output_from_afar(void)
{
    char *words[] = { "a line", NULL };
    int tids[10], round, n, ended = 0, bytes = 0, tid, kind, late = 0;
    pvm_setopt(PvmOutputTid, own_tid);
    pvm_setopt(PvmOutputCode, 60);
    for (round = 0; round < 10 && !late; round++) {
        if (round % 2)
            n = start_as("printer", PvmTaskHost, "h2", 10, tids);
        else
            n = pvm_spawn("/bin/echo", words, PvmTaskHost, "h2", 10, tids);
        while (n > 0 && !late) {
            late = await(-1, 60) <= 0;
            kind = -3;
            pvm_upkint(&tid, 1, 1);
            pvm_upkint(&kind, 1, 1);
            if (kind == 0) {
                ended++;
                n--;
            } else if (kind > 0) {
                bytes += kind;
            }
        }
    }
    is(ended, 100, "the end of output is told for every task of another host");
    is(bytes, 100 * 7, "the output of every task of another host arrives");
    for (round = ended = 0; round < 40 && !late; round++) {
        n = start_as("quiet", PvmTaskDefault, NULL, 3, tids);
        while (n > 0 && !late) {
            late = await(-1, 60) <= 0;
            kind = -3;
            pvm_upkint(&tid, 1, 1);
            pvm_upkint(&kind, 1, 1);
            ended += kind == 0;
            n -= kind == 0;
        }
    }
    is(ended, 120, "the end of output is told for every task that writes nothing");
    pvm_setopt(PvmOutputTid, 0);
    pvm_setopt(PvmOutputCode, 0);
}

static void deleting(void)
{
    char *names[] = { "h2", "nohost" }, *own[] = { "h1" }, *three[] = { "h3", "h3" }, *dots[] = { ".", "." };
    int status[2] = { 0 };
    char deed[1200];
    double end;
    snprintf(deed, sizeof deed, "%s/told-to-end", getenv("HOME"));
    start_waiting("ender", "h2");
    is(pvm_delhosts(names, 2, status), 1, "delhosts returns the number of hosts that left");
    is(status[0], PvmOk, "delhosts tells of a host that left");
    is(status[1], PvmNoHost, "delhosts of an unknown host finds none");
    holds(shows(2), "config does not show a deleted host");
    is(pvm_mstat("h2"), PvmNoHost, "mstat of a deleted host finds none");
    for (end = now() + PATIENCE_SECONDS; access(deed, F_OK) && now() < end;)
        usleep(10000);
    is(access(deed, F_OK), 0, "the tasks of a deleted host get SIGTERM");
    unlink(deed);
    is(pvm_delhosts(own, 1, status), 0, "delhosts of the master deletes none");
    is(status[0], PvmBadParam, "delhosts of the master is a bad parameter");
    is(pvm_delhosts(three, 2, status), 1, "delhosts of the same host twice deletes it once");
    holds(status[0] == PvmDupHost || status[1] == PvmDupHost, "delhosts of the same host twice says so");
    is(pvm_delhosts(dots, 2, status), 0, "delhosts of a dot deletes none");
    is(status[0], PvmBadParam, "delhosts of a dot is a bad parameter, as of the master's name");
    is(status[1], PvmBadParam, "delhosts of a dot twice is a bad parameter both times");
    is(pvm_delhosts(names, 0, status), PvmBadParam, "delhosts of no names is a bad parameter");
    holds(shows(1), "the master stays");
}

static void sentences(void)
{
    alone();
    adding();
    options();
    states();
    tasks();
    output_from_afar();
    deleting();
}
