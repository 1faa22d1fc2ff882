/* Starting a virtual machine from a program: a second one in addition to that which runs the program. */
#include "conform.h"

static const role roles[] = { { NULL, NULL } };

/* Goes to the virtual machine of this name; NULL: to the one that the program was started in. */
static void go_to(const char *name)
{
    pvm_exit();
    unsetenv("PVMSOCK");
    if (name)
        setenv("PVM_VMID", name, 1);
    else
        unsetenv("PVM_VMID");
}

static char hosts[1024];

/* Starts a virtual machine of this name with these lines as host file. */
static int start_with(const char *name, const char *lines, const char *sentence)
{
    char *words[] = { hosts };
    FILE *file;
    go_to(name);
    snprintf(hosts, sizeof hosts, "%s/hosts-to-start", getenv("HOME"));
    file = fopen(hosts, "w");
    fputs(lines, file);
    fclose(file);
    return is(pvm_start_pvmd(1, words, 1), PvmOk, sentence);
}

/* Whose own line, or else whose defaults, the options are for. */
static void own_options(const char *lines, int speed, const char *starts, const char *of_sp, const char *of_wd, const char *of_ep, const char *of_bx)
{
    char here[1024], debugged[1024], path[1200], *sleeps[] = { "1", NULL };
    const char *debugger = make_debugger();
    struct pvmhostinfo *list = NULL;
    int n = 0, tid;
    start_with("options", lines, starts);
    pvm_config(&n, NULL, &list);
    is(n == 1 ? list[0].hi_speed : 0, speed, of_sp);
    look(PvmTaskDefault, "h1", here, debugged);
    reads(here, "/usr", of_wd);
    is(pvm_spawn("sleep", sleeps, PvmTaskDefault, NULL, 1, &tid), 1, of_ep);
    snprintf(path, sizeof path, "%s/pvm3/bin/LINUX64/%s", getenv("HOME"), own_name);
    look(PvmTaskDebug, "h1", here, debugged);
    reads(debugged, path, of_bx);
    unlink(debugger);
    pvm_halt();
}

static void sentences(void)
{
    struct pvmhostinfo *list = NULL;
    int n = 0, tid;
    /* A halt may end its caller too. */
    signal(SIGTERM, SIG_IGN);
    pvm_setopt(PvmAutoErr, 0);
    go_to("second");
    is(pvm_mytid(), PvmSysErr, "a virtual machine with another PVM_VMID is another one");
    is(pvm_start_pvmd(0, NULL, 0), PvmOk, "start_pvmd starts a daemon and returns 0");
    tid = pvm_mytid();
    is(pvm_tidtohost(tid), 0x40000, "a daemon that a program starts is the first of its virtual machine");
    pvm_config(&n, NULL, NULL);
    is(n, 1, "a daemon that is started without words is alone");
    is(pvm_start_pvmd(0, NULL, 0), PvmDupHost, "start_pvmd twice finds a duplicate host");
    is(pvm_halt(), PvmOk, "a virtual machine that a program started can be halted by it");
    start_with("third", "h1\nh2 sp=300\nh3\n", "start_pvmd takes the words for the daemon");
    pvm_config(&n, NULL, &list);
    is(n, 3, "start_pvmd with block returns when the hosts of the host file are there");
    is(n == 3 ? list[1].hi_speed : 0, 300, "the options of a host file count for hosts of its start");
    pvm_halt();
    own_options("* sp=50 wd=/var\nh1 sp=450 wd=/usr ep=/bin:$HOME/pvm3/bin/$PVM_ARCH bx=$HOME/conform-debugger\n", 450,
        "start_pvmd takes a host file with a line for the master", "sp= on the master's own line is for the master",
        "wd= on the master's own line is for the master", "ep= on the master's own line is for the master",
        "bx= on the master's own line is for the master");
    own_options("* sp=550 wd=/usr ep=/bin:$HOME/pvm3/bin/$PVM_ARCH bx=$HOME/conform-debugger\n", 550,
        "start_pvmd takes a host file without a line for the master",
        "sp= in the defaults is for a master that has no line", "wd= in the defaults is for a master that has no line",
        "ep= in the defaults is for a master that has no line", "bx= in the defaults is for a master that has no line");
    unlink(hosts);
    go_to(NULL);
    is(pvm_mytid() > 0, 1, "after a halt of another virtual machine the first one is still there");
}
