/* Calls without a daemon, calls that need none, and programs that start or end the virtual machine. */
#include "conform.h"

/* Prints the values of some calls made where there is no daemon. */
static int lonely(int argc, char **argv)
{
    int x = 0, got[8], k;
    (void)argc, (void)argv;
    got[0] = pvm_mytid();
    got[1] = pvm_spawn("anything", NULL, 0, NULL, 1, &x);
    got[2] = pvm_send(0x40001, 1);
    got[3] = pvm_recv(-1, -1);
    got[4] = pvm_config(&x, NULL, NULL);
    got[5] = pvm_getopt(PvmFragSize);
    got[6] = pvm_tidtohost(0x80003);
    got[7] = strcmp(pvm_version(), "3.4.6");
    for (k = 0; k < 8; k++)
        printf("%d ", got[k]);
    return 0;
}

static int lonely_words(int argc, char **argv)
{
    (void)argc, (void)argv;
    dup2(1, 2);
    return pvm_mytid() == PvmSysErr ? 0 : 1;
}

static volatile sig_atomic_t signalled;

static void note(int number)
{
    signalled = number;
}

/* Waits for a message that never comes. */
static int listener(int argc, char **argv)
{
    (void)argc;
    pvm_setopt(PvmAutoErr, 0);
    tell(atoi(argv[2]), 5, pvm_mytid());
    return pvm_recv(-1, -1) == PvmSysErr ? 3 : 4;
}

/* The same, but it has its own thoughts about SIGTERM. */
static int catcher(int argc, char **argv)
{
    signal(SIGTERM, note);
    return 10 * listener(argc, argv) + (signalled == SIGTERM);
}

/* Leaves the virtual machine and lives on until its pipe closes. */
static int leaver(int argc, char **argv)
{
    char byte;
    (void)argc;
    tell(atoi(argv[2]), 5, pvm_mytid());
    pvm_exit();
    return read(atoi(argv[3]), &byte, 1) == 0 ? 7 : 8;
}

static const role roles[] = { { "listener", listener }, { "catcher", catcher }, { "leaver", leaver }, { "lonely", lonely },
    { "lonely_words", lonely_words }, { NULL, NULL } };

/* Runs this program in a role where no daemon can be found; its standard output. */
static const char *without_daemon(const char *what)
{
    static char text[4096];
    int pipes[2], n, len = 0;
    pid_t child;
    if (pipe(pipes))
        return "";
    child = fork();
    if (child == 0) {
        dup2(pipes[1], 1);
        if (strcmp(what, "lonely_words"))
            freopen("/dev/null", "w", stderr);
        setenv("PVM_TMP", "/var/log", 1);
        setenv("PVM_VMID", "nobody-has-this", 1);
        unsetenv("PVMSOCK");
        execl("/proc/self/exe", own_name, what, NULL);
        _exit(1);
    }
    close(pipes[1]);
    while (len < (int)sizeof text - 1 && (n = read(pipes[0], text + len, sizeof text - 1 - len)) > 0)
        len += n;
    text[len] = 0;
    close(pipes[0]);
    waitpid(child, NULL, 0);
    return text;
}

/* Starts a program from the command line; runs until it is a task. */
static pid_t visitor(const char *what, int keep)
{
    pid_t child = from_command_line(what, keep);
    await(-1, 5);
    return child;
}

/* The signal that ended a process, or minus its exit status. */
static int end_of(pid_t child)
{
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static void halt(void)
{
    pid_t listens, catches, left;
    int pipes[2], leaver_tid = 0;
    if (pipe(pipes))
        return;
    fcntl(pipes[1], F_SETFD, FD_CLOEXEC);
    listens = visitor("listener", 0);
    catches = visitor("catcher", 0);
    left = visitor("leaver", pipes[0]);
    pvm_upkint(&leaver_tid, 1, 1);
    gone(leaver_tid);
    /* The daemon may end this program too. */
    signal(SIGTERM, SIG_IGN);
    is(pvm_halt(), PvmOk, "halt returns 0");
    is(end_of(listens), SIGTERM, "a program from the command line is ended by a halt");
    is(end_of(catches), -31, "a program that catches SIGTERM goes on after a halt, and its receive cannot contact the daemon");
    close(pipes[1]);
    is(end_of(left), -7, "a program that has left is not ended by a halt");
}

static void sentences(void)
{
    int got[8] = { 0 };
    const char *words = without_daemon("lonely");
    sscanf(words, "%d %d %d %d %d %d %d %d", got, got + 1, got + 2, got + 3, got + 4, got + 5, got + 6, got + 7);
    is(got[0], PvmSysErr, "mytid without a daemon cannot contact it");
    is(got[1], PvmSysErr, "spawn without a daemon cannot contact it");
    is(got[2], PvmSysErr, "send without a daemon cannot contact it");
    is(got[3], PvmSysErr, "recv without a daemon cannot contact it");
    is(got[4], PvmSysErr, "config without a daemon cannot contact it");
    is(got[5], 4080, "getopt needs no daemon");
    is(got[6], 0x80000, "tidtohost needs no daemon");
    is(got[7], 0, "version needs no daemon");
    words = without_daemon("lonely_words");
    holds(strstr(words, "pvm_mytid(): Can't contact local daemon\n") != NULL, "a call without a daemon prints that it cannot contact it");
    holds(strstr(words, "libpvm [pid") != NULL, "before it has a tid a program is named by its process id");
    is(pvm_start_pvmd(0, NULL, 0), PvmDupHost, "start_pvmd where a daemon runs finds a duplicate host");
    is(pvm_exit(), PvmOk, "pvm_exit where a daemon runs returns 0");
    own_tid = pvm_mytid();
    pvm_setopt(PvmAutoErr, 0);
    halt();
}
