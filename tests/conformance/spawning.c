/* Spawning on three hosts: where tasks go, what they get, what refuses them. */
#include "conform.h"
#include <sys/stat.h>

/* Tells its directory, its name, its words and its environment. */
static int teller(int argc, char **argv)
{
    char here[1024] = "", *value;
    int k, parent = pvm_parent();
    if (!getcwd(here, sizeof here))
        here[0] = 0;
    pvm_initsend(PvmDataDefault);
    pvm_pkstr(here);
    pvm_pkstr(argv[0]);
    pvm_pkint(&argc, 1, 1);
    for (k = 2; k < argc; k++) {
        value = getenv(argv[k]);
        pvm_pkstr(value ? value : "(unset)");
    }
    pvm_send(parent, 1);
    pvm_exit();
    return 0;
}

/* Tells what it was given by the system: descriptors and signals. */
static int naked(int argc, char **argv)
{
    int facts[6], k, hup = signal(SIGHUP, SIG_DFL) == SIG_IGN, pip = signal(SIGPIPE, SIG_DFL) == SIG_IGN;
    struct stat in, null, out, err;
    (void)argc, (void)argv;
    stat("/dev/null", &null);
    facts[0] = fstat(0, &in) == 0 && in.st_rdev == null.st_rdev && S_ISCHR(in.st_mode);
    facts[1] = fstat(1, &out) == 0 && (S_ISFIFO(out.st_mode) || S_ISSOCK(out.st_mode));
    facts[2] = fstat(2, &err) == 0 && err.st_ino == out.st_ino;
    facts[3] = 0;
    for (k = 3; k < 200; k++)
        facts[3] += fcntl(k, F_GETFD) >= 0;
    facts[4] = hup;
    facts[5] = pip;
    tell_all(pvm_parent(), 4, facts, 6);
    pvm_exit();
    return 0;
}

/* Tells its process id and that of a child, and waits for its word. */
static int numbered(int argc, char **argv)
{
    int ids[2];
    (void)argc, (void)argv;
    ids[0] = getpid();
    ids[1] = fork();
    if (ids[1] == 0)
        _exit(0);
    waitpid(ids[1], NULL, 0);
    tell_all(pvm_parent(), 5, ids, 2);
    pvm_recv(pvm_parent(), 3);
    pvm_exit();
    return 0;
}

static const role roles[] = { { "teller", teller }, { "naked", naked }, { "numbered", numbered }, { NULL, NULL } };

static int on_host(int *tids, int n, int host)
{
    int k, count = 0;
    for (k = 0; k < n; k++)
        count += pvm_tidtohost(tids[k]) == host;
    return count;
}

/* Process ids, of which programs make seeds and names of files. */
static void process_ids(void)
{
    enum { TASKS = 8 };
    int tids[TASKS], ids[2 * TASKS], k, other, n = 0, alike = 0, listed = 0;
    struct pvmtaskinfo *info = NULL;
    start_as("numbered", PvmTaskHost, "h2", TASKS, tids);
    for (k = 0; k < TASKS; k++) {
        ids[2 * k] = ids[2 * k + 1] = -1;
        if (await(tids[k], 5) > 0)
            pvm_upkint(&ids[2 * k], 2, 1);
        if (pvm_tasks(tids[k], &n, &info) == PvmOk && n == 1)
            listed += info[0].ti_pid == ids[2 * k];
    }
    for (k = 0; k < 2 * TASKS; k++)
        for (other = 0; other < k; other++)
            alike += ids[k] == ids[other];
    is(alike, 0, "the tasks of a host and their children have different process ids");
    is(listed, TASKS, "tasks tells of each task what getpid returns in it");
    dismiss(tids, TASKS);
}

static void rotation(void)
{
    int tids[8], first = start_one("waiter"), second = start_one("waiter"), third = start_one("waiter"), k, changes;
    is(pvm_tidtohost(first), 0x80000, "the first spawn goes to the host behind the own one");
    is(pvm_tidtohost(second), 0xc0000, "the next spawn goes to the next host");
    is(pvm_tidtohost(third), 0x40000, "behind the last host comes the first");
    tids[0] = first;
    tids[1] = second;
    tids[2] = third;
    start_as("waiter", PvmTaskHost, "h2", 1, &tids[3]);
    tids[4] = start_one("waiter");
    is(pvm_tidtohost(tids[4]), 0x80000, "a spawn on a named host takes nobody's turn");
    dismiss(tids, 5);
    start_as("waiter", PvmTaskDefault, NULL, 7, tids);
    for (k = 1, changes = 0; k < 7; k++)
        changes += pvm_tidtohost(tids[k]) != pvm_tidtohost(tids[k - 1]);
    is(changes, 2, "seven tasks on three hosts are three blocks");
    is(on_host(tids, 7, pvm_tidtohost(tids[0])), 3, "the first host of seven tasks gets three");
    is(on_host(tids, 7, pvm_tidtohost(tids[6])), 2, "the last host of seven tasks gets two");
    dismiss(tids, 7);
}

static void given(void)
{
    int facts[6] = { 0 }, tid = start_one("naked");
    await(tid, 4);
    pvm_upkint(facts, 6, 1);
    is(facts[0], 1, "a task's standard input is /dev/null");
    is(facts[1], 1, "a task's standard output leads to its daemon");
    is(facts[2], 1, "a task's standard error is its standard output");
    is(facts[3], 0, "a task has no other descriptors at its start");
    is(facts[4], 1, "a task ignores SIGHUP at its start");
    is(facts[5], 1, "a task ignores SIGPIPE at its start");
}

static void places(void)
{
    int tids[9], k, blocks = 1;
    is(start_as("waiter", PvmTaskDefault, NULL, 7, tids), 7, "spawn returns the number of tasks started");
    holds(on_host(tids, 7, 0x40000) >= 2 && on_host(tids, 7, 0x80000) >= 2 && on_host(tids, 7, 0xc0000) >= 2,
        "tasks are spread evenly over all hosts");
    for (k = 2; k < 7; k++)
        if (pvm_tidtohost(tids[k]) == pvm_tidtohost(tids[k - 2]))
            blocks = blocks && pvm_tidtohost(tids[k - 1]) == pvm_tidtohost(tids[k]);
    holds(blocks, "tasks of one host stand together in the list");
    dismiss(tids, 7);
    is(start_as("waiter", PvmTaskHost, "h2", 3, tids), 3, "spawn on a host by name starts all there");
    is(on_host(tids, 3, 0x80000), 3, "tasks for a named host are on it");
    dismiss(tids, 3);
    is(start_as("waiter", PvmTaskHost, ".", 2, tids), 2, "spawn takes a dot for the own host");
    is(on_host(tids, 2, 0x40000), 2, "tasks for the dot are on the own host");
    dismiss(tids, 2);
    is(start_as("waiter", PvmTaskArch, "LINUX64", 3, tids), 3, "spawn by architecture starts all");
    is(on_host(tids, 3, 0x40000), 1, "tasks for an architecture are spread over its hosts");
    dismiss(tids, 3);
    is(start_as("waiter", PvmTaskHost | PvmHostCompl, "h2", 4, tids), 4, "spawn on all hosts but one starts all");
    is(on_host(tids, 4, 0x80000), 0, "no task is on the host that was left out");
    dismiss(tids, 4);
    is(start_as("waiter", PvmTaskHost | PvmTaskArch, "h3", 1, tids), 1, "host wins over architecture");
    is(pvm_tidtohost(tids[0]), 0xc0000, "with both flags the name is a host's");
    dismiss(tids, 1);
    is(start_as("waiter", PvmTaskHost | PvmMppFront | PvmTaskTrace, "h2", 1, tids), 1, "flags for other machines are ignored");
    dismiss(tids, 1);
}

static void refusals(void)
{
    int tids[4] = { 0 };
    char *none[] = { NULL };
    is(start_as("waiter", PvmTaskHost, "nohost", 2, tids), 0, "spawn on an unknown host starts nothing");
    is(tids[0], PvmNoHost, "each task for an unknown host gets no such host");
    is(tids[1], PvmNoHost, "the last task for an unknown host gets no such host too");
    is(start_as("waiter", PvmTaskHost, "H2", 1, tids), 0, "host names are compared with upper and lower case");
    is(start_as("waiter", PvmTaskHost, "", 1, tids), 0, "spawn on a host without a name starts nothing");
    is(tids[0], PvmNoHost, "a task for a host without a name gets no such host");
    is(start_as("waiter", PvmTaskHost, NULL, 1, tids), 0, "spawn on a null host starts nothing");
    is(start_as("waiter", PvmTaskArch, "CRAY", 1, tids), 0, "spawn on an architecture that nobody has starts nothing");
    is(tids[0], PvmNoHost, "a task for an unknown architecture gets no such host");
    is(start_as("waiter", PvmTaskArch | PvmHostCompl, "LINUX64", 1, tids), 0, "spawn on the rest of nothing starts nothing");
    is(tids[0], PvmNoHost, "a task for the rest of nothing gets no such host");
    is(pvm_spawn("nosuchprogram", NULL, PvmTaskDefault, NULL, 3, tids), 0, "spawn of an unknown program starts nothing");
    holds(tids[0] == PvmNoFile && tids[2] == PvmNoFile, "each task of an unknown program gets no such file");
    is(pvm_spawn("/tmp", NULL, PvmTaskHost, ".", 1, tids), 0, "spawn of a folder starts nothing");
    is(tids[0], PvmNoFile, "a folder is no such file");
    is(pvm_spawn("/etc/hosts", none, PvmTaskHost, ".", 1, tids), 0, "spawn of a file that is no program starts nothing");
    is(tids[0], PvmNoFile, "a file that is no program is no such file");
    is(start_as("waiter", PvmTaskDefault, NULL, 0, tids), PvmBadParam, "spawn of no tasks is a bad parameter");
    is(start_as("waiter", PvmTaskDefault, NULL, -1, tids), PvmBadParam, "spawn of a negative number is a bad parameter");
    is(start_as("teller", PvmTaskDefault, NULL, 1, NULL), 1, "spawn without a list of tids starts its tasks");
    holds(await(-1, 1) > 0, "a task whose tid was not asked for runs");
}

/* A task that is found on one host only: the others say no such file. */
static void partly_there(void)
{
    int tids[3] = { 0 }, n;
    char *home = getenv("HOME"), name[1200], from[1200];
    FILE *file;
    snprintf(name, sizeof name, "/tmp/only-here");
    snprintf(from, sizeof from, "%s/pvm3/bin/LINUX64/%s", home, own_name);
    file = fopen(name, "w");
    fprintf(file, "#!/bin/sh\nexec %s \"$@\"\n", from);
    fclose(file);
    chmod(name, 0755);
    char *words[] = { "waiter", NULL };
    n = pvm_spawn(name, words, PvmTaskDefault, NULL, 3, tids);
    is(n, 1, "spawn counts only the tasks that started");
    holds(pvm_tidtohost(tids[0]) == 0x40000, "tids that are valid come first in the list");
    holds(tids[1] == PvmNoFile && tids[2] == PvmNoFile, "errors come behind the tids");
    dismiss(tids, n > 0 ? n : 0);
    unlink(name);
}

static void hear(int tid, char *here, char *name, int *argc)
{
    here[0] = name[0] = 0;
    *argc = 0;
    if (await(tid, 1) > 0) {
        pvm_upkstr(here);
        pvm_upkstr(name);
        pvm_upkint(argc, 1, 1);
    }
}

static void directories_and_words(void)
{
    char here[1024], name[1024], full[2048], text[1024];
    char *words[] = { "teller", "NO_SUCH_VARIABLE_AT_ALL", "PVM_ARCH", "PVM_VMID", NULL };
    char *spawn_wd[] = { "teller", "PVMSPAWNWD", NULL };
    int tid, argc;
    pvm_spawn((char *)own_name, words, PvmTaskHost, "h2", 1, &tid);
    hear(tid, here, name, &argc);
    reads(here, getenv("HOME"), "a task begins in the home folder");
    snprintf(full, sizeof full, "%s/pvm3/bin/LINUX64/%s", getenv("HOME"), own_name);
    reads(name, full, "a task's own name is its full path");
    is(argc, 5, "a task gets as many words as were given");
    pvm_upkstr(text);
    reads(text, "(unset)", "a variable that nobody set is not set in the task");
    pvm_upkstr(text);
    reads(text, "LINUX64", "PVM_ARCH is set in a task");
    pvm_upkstr(text);
    reads(text, "(unset)", "PVM_VMID is not set in a task if the virtual machine has no name of its own");
    pvm_spawn((char *)own_name, spawn_wd, PvmTaskHost, "h2:/var", 1, &tid);
    hear(tid, here, name, &argc);
    is(pvm_tidtohost(tid), 0x80000, "a directory behind a host's name leaves the host as it is");
    reads(here, "/var", "a directory behind a host's name is where the task begins");
    pvm_upkstr(text);
    reads(text, "/var", "PVMSPAWNWD tells the task its directory");
    start_as("teller", PvmTaskDefault, ":/usr", 1, &tid);
    hear(tid, here, name, &argc);
    reads(here, "/usr", "a directory can be given without a host");
    start_as("teller", PvmTaskHost, "h2:/no/such/folder", 1, &tid);
    hear(tid, here, name, &argc);
    reads(here, getenv("HOME"), "a directory that does not exist is ignored");
    pvm_spawn(full, words, PvmTaskHost, "h3", 1, &tid);
    hear(tid, here, name, &argc);
    reads(name, full, "a program can be named by its path");
}

static void environment(void)
{
    char here[1024], name[1024], text[1024];
    char *words[] = { "teller", "CONFORM_A", "CONFORM_B", "PVM_EXPORT", NULL };
    int tid, argc;
    setenv("CONFORM_A", "first value", 1);
    pvm_spawn((char *)own_name, words, PvmTaskHost, "h2", 1, &tid);
    hear(tid, here, name, &argc);
    pvm_upkstr(text);
    reads(text, "(unset)", "the spawner's environment is not copied");
    is(pvm_export("CONFORM_A"), PvmOk, "export returns 0");
    is(pvm_export("CONFORM_B"), PvmOk, "export of a variable that is not set returns 0");
    is(pvm_export("CONFORM_A"), PvmOk, "export of the same variable again returns 0");
    reads(getenv("PVM_EXPORT"), "CONFORM_A:CONFORM_B", "export writes PVM_EXPORT, each name once");
    pvm_spawn((char *)own_name, words, PvmTaskHost, "h2", 1, &tid);
    hear(tid, here, name, &argc);
    pvm_upkstr(text);
    reads(text, "first value", "an exported variable is set in the task");
    pvm_upkstr(text);
    reads(text, "(unset)", "an exported variable that is not set is skipped");
    pvm_upkstr(text);
    reads(text, "CONFORM_A:CONFORM_B", "PVM_EXPORT itself is exported");
    setenv("CONFORM_A", "second value", 1);
    pvm_spawn((char *)own_name, words, PvmTaskHost, "h3", 1, &tid);
    hear(tid, here, name, &argc);
    pvm_upkstr(text);
    reads(text, "second value", "values are read at the spawn");
    is(pvm_unexport("CONFORM_B"), PvmOk, "unexport returns 0");
    reads(getenv("PVM_EXPORT"), "CONFORM_A", "unexport takes the name away");
    is(pvm_export(""), PvmOk, "export of an empty name returns 0");
    reads(getenv("PVM_EXPORT"), "CONFORM_A", "export of an empty name changes nothing");
    is(pvm_unexport("NEVER_EXPORTED"), PvmOk, "unexport of a name that was not exported returns 0");
    pvm_unexport("CONFORM_A");
    pvm_spawn((char *)own_name, words, PvmTaskHost, "h2", 1, &tid);
    hear(tid, here, name, &argc);
    pvm_upkstr(text);
    reads(text, "(unset)", "a variable that is no longer exported is not set in the task");
    setenv("PVMTASK", "1", 1);
    is(start_as("waiter", PvmTaskDefault, "h3", 1, &tid), 1, "PVMTASK adds flags to a spawn");
    is(pvm_tidtohost(tid), 0xc0000, "the flag of PVMTASK made the name a host's");
    unsetenv("PVMTASK");
    dismiss(&tid, 1);
}

static void sentences(void)
{
    char *names[] = { "h2", "h3" };
    int status[2];
    is(pvm_addhosts(names, 2, status), 2, "two more hosts for spawning are added");
    rotation();
    given();
    places();
    refusals();
    partly_there();
    directories_and_words();
    environment();
    process_ids();
}
