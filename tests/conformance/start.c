/* Starting a virtual machine from a program: a second one beside that which runs the program. */
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

static void sentences(void)
{
    struct pvmhostinfo *list = NULL;
    char hosts[1024], *words[] = { hosts };
    int n = 0, tid;
    FILE *file;
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
    go_to("third");
    snprintf(hosts, sizeof hosts, "%s/hosts-to-start", getenv("HOME"));
    file = fopen(hosts, "w");
    fprintf(file, "h1\nh2 sp=300\nh3\n");
    fclose(file);
    is(pvm_start_pvmd(1, words, 1), PvmOk, "start_pvmd takes the words for the daemon");
    pvm_config(&n, NULL, &list);
    is(n, 3, "start_pvmd with block returns when the hosts of the host file are there");
    is(n == 3 ? list[1].hi_speed : 0, 300, "the options of a host file count for hosts of its start");
    unlink(hosts);
    pvm_halt();
    go_to(NULL);
    is(pvm_mytid() > 0, 1, "after a halt of another virtual machine the first one is still there");
}
