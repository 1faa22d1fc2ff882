/* Options, error messages, versions and other small calls. */
#include "conform.h"
#include <pvmtev.h>

extern char *pvm_errlist[];
extern char *pvmtmpnam(char *), *pvmgettmp(void);
extern int pvm_nerr, pvm_errno, pvmmytid;

static int pauser(int argc, char **argv)
{
    (void)argc, (void)argv;
    tell(pvm_parent(), 1, pvm_getopt(PvmRoute));
    pvm_exit();
    return 0;
}

static int strict(int argc, char **argv)
{
    (void)argc, (void)argv;
    pvm_mytid();
    pvm_setopt(PvmAutoErr, 2);
    pvm_freebuf(-1);
    return 42;
}

static int aborter(int argc, char **argv)
{
    (void)argc, (void)argv;
    pvm_mytid();
    pvm_setopt(PvmAutoErr, 3);
    pvm_freebuf(-1);
    return 42;
}

/* Will not be ended by a reset. */
static int safe(int argc, char **argv)
{
    pvm_mytid();
    pvm_setopt(PvmNoReset, 1);
    return waiter(argc, argv);
}

static const role roles[] = { { "safe", safe }, { "pauser", pauser }, { "strict", strict }, { "aborter", aborter }, { NULL, NULL } };

static void defaults(void)
{
    is(pvm_getopt(PvmRoute), PvmAllowDirect, "the route is allowed to be direct to begin with");
    is(pvm_getopt(PvmDebugMask), 0, "the debug mask is 0 to begin with");
    is(pvm_getopt(PvmAutoErr), 1, "errors are printed to begin with");
    is(pvm_getopt(PvmOutputTid), 0, "output goes nowhere special to begin with");
    is(pvm_getopt(PvmOutputCode), 0, "the output code is 0 to begin with");
    is(pvm_getopt(PvmTraceTid), 0, "nothing is traced to begin with");
    is(pvm_getopt(PvmTraceBuffer), 0, "the trace buffer is 0 to begin with");
    is(pvm_getopt(PvmFragSize), 4080, "the fragment size is 4080 to begin with");
    is(pvm_getopt(PvmResvTids), 0, "reserved tids are not allowed to begin with");
    is(pvm_getopt(PvmShowTids), 1, "tids are shown to begin with");
    is(pvm_getopt(PvmNoReset), 0, "a reset takes a task to begin with");
    is(pvm_getopt(PvmSelfOutputTid), 0, "the own output goes nowhere special to begin with");
    is(pvm_getopt(PvmOutputContext), 0, "the output context is 0 to begin with");
}

static void setting(void)
{
    is(pvm_setopt(PvmRoute, PvmRouteDirect), PvmAllowDirect, "setopt returns the previous value");
    is(pvm_getopt(PvmRoute), PvmRouteDirect, "getopt returns what was set");
    is(pvm_setopt(PvmRoute, 4), PvmBadParam, "a route of 4 is a bad parameter");
    is(pvm_setopt(PvmRoute, 0), PvmBadParam, "a route of 0 is a bad parameter");
    is(pvm_getopt(PvmRoute), PvmRouteDirect, "a refused setopt changes nothing");
    pvm_setopt(PvmRoute, PvmAllowDirect);
    is(pvm_setopt(PvmFragSize, 51), PvmBadParam, "a fragment size of 51 is a bad parameter");
    is(pvm_setopt(PvmFragSize, 1048577), PvmBadParam, "a fragment size above a megabyte is a bad parameter");
    is(pvm_setopt(PvmFragSize, 1048576), 4080, "a fragment size of a megabyte can be set");
    is(pvm_setopt(PvmFragSize, 4080), 1048576, "the fragment size can be set back");
    is(pvm_setopt(PvmDebugMask, 0), 0, "the debug mask can be set");
    is(pvm_setopt(PvmTraceOptions, 4), PvmBadParam, "trace options of 4 are a bad parameter");
    is(pvm_setopt(PvmTraceOptions, PvmTraceTime), 0, "trace options can be set");
    is(pvm_getopt(PvmTraceOptions), PvmTraceTime, "trace options are read back");
    pvm_setopt(PvmTraceOptions, PvmTraceFull);
    is(pvm_setopt(PvmTraceBuffer, 1000), 0, "the trace buffer can be set");
    is(pvm_getopt(PvmTraceBuffer), 1000, "the trace buffer is read back");
    pvm_setopt(PvmTraceBuffer, 0);
    is(pvm_setopt(PvmOutputTid, 0x40fff), PvmBadParam, "output cannot be sent to any task");
    is(pvm_setopt(PvmOutputTid, own_tid), 0, "output can be sent to oneself");
    is(pvm_setopt(PvmOutputCode, 77), 0, "the output code can be set");
    is(pvm_getopt(PvmOutputCode), 77, "the output code is read back");
    is(pvm_setopt(PvmOutputTid, 0), own_tid, "output can be sent nowhere again");
    pvm_setopt(PvmOutputCode, 0);
    is(pvm_setopt(PvmResvTids, 1), 0, "reserved tids can be allowed");
    is(pvm_setopt(PvmResvTids, 0), 1, "reserved tids can be forbidden again");
    is(pvm_setopt(PvmShowTids, 0), 1, "tids can be hidden");
    pvm_setopt(PvmShowTids, 1);
    is(pvm_setopt(PvmPollType, PvmPollSleep), PvmNotImpl, "the way of polling cannot be set");
    is(pvm_setopt(PvmPollTime, 5), PvmNotImpl, "the time of polling cannot be set");
    is(pvm_getopt(PvmPollType), PvmBadParam, "the way of polling cannot be asked for");
    is(pvm_setopt(PvmSelfOutputContext, 5), PvmNotImpl, "the context of the own output cannot be set");
    is(pvm_setopt(PvmSelfTraceContext, 5), PvmNotImpl, "the context of the own trace cannot be set");
    is(pvm_setopt(PvmSelfOutputCode, 5), PvmBadParam, "the code of the own output cannot be set if nobody collects it");
    is(pvm_setopt(PvmSelfTraceCode, 5), PvmBadParam, "the code of the own trace cannot be set if nobody collects it");
    is(pvm_getopt(PvmSelfOutputCode), 0, "the code of the own output stays 0 if nobody collects it");
    is(pvm_setopt(99, 1), PvmBadParam, "setopt of an unknown option is a bad parameter");
    is(pvm_getopt(99), PvmBadParam, "getopt of an unknown option is a bad parameter");
}

static void reset(void)
{
    int tids[2] = { start_waiting("waiter", NULL), start_waiting("safe", NULL) };
    pvmreset(own_tid, 1, "", 0);
    holds(gone(tids[0]), "a reset ends other tasks");
    is(pvm_pstat(tids[1]), PvmOk, "a reset leaves a task that is safe from it");
    dismiss(tids + 1, 1);
}

static void inside_the_daemon(void)
{
    int words[2] = { 6, 0x40 }, count = -1, got[10] = { -1 };
    is(pvm_tickle(2, words, &count, got), PvmOk, "tickle 6 returns 0");
    words[0] = 5;
    is(pvm_tickle(1, words, &count, got), PvmOk, "tickle 5 returns 0");
    is(count, 1, "tickle 5 answers with one number");
    is(got[0], 0x40, "tickle 5 tells the daemon's debug mask, which tickle 6 has set");
    words[0] = 6;
    words[1] = 0;
    pvm_tickle(2, words, &count, got);
    words[0] = 77;
    is(pvm_tickle(1, words, &count, got), PvmOk, "tickle of a number that means nothing returns 0");
    is(count, 0, "tickle of a number that means nothing answers with none");
}

static void noreset(void)
{
    int *tids = NULL, n = -1;
    is(pvm_getnoresets(&tids, &n), PvmOk, "getnoresets returns 0");
    is(n, 0, "nobody is safe from a reset to begin with");
    is(pvm_setopt(PvmNoReset, 1), 0, "a task can be made safe from a reset");
    pvm_getnoresets(&tids, &n);
    is(n, 1, "getnoresets counts the tasks that are safe");
    is(n == 1 ? tids[0] : 0, own_tid, "getnoresets names a task that is safe");
    is(pvm_setopt(PvmNoReset, 0), 1, "a task can give up being safe from a reset");
    pvm_getnoresets(&tids, &n);
    is(n, 0, "a task that gave it up is not listed");
}

static void texts(void)
{
    static const struct {
        int code;
        const char *text;
    } known[] = {
        { PvmBadParam, "Bad parameter" }, { PvmMismatch, "Parameter mismatch" }, { PvmOverflow, "Value too large" },
        { PvmNoData, "End of buffer" }, { PvmNoHost, "No such host" }, { PvmNoFile, "No such file" },
        { PvmDenied, "Permission denied" }, { PvmNoMem, "Malloc failed" }, { PvmBadMsg, "Can't decode message" },
        { PvmSysErr, "Can't contact local daemon" }, { PvmNoBuf, "No current buffer" },
        { PvmNoSuchBuf, "No such buffer" }, { PvmNullGroup, "Null group name" }, { PvmDupGroup, "Already in group" },
        { PvmNoGroup, "No such group" }, { PvmNotInGroup, "Not in group" }, { PvmNoInst, "No such instance" },
        { PvmHostFail, "Host failed" }, { PvmNoParent, "No parent task" }, { PvmNotImpl, "Not implemented" },
        { PvmDSysErr, "Pvmd system error" }, { PvmBadVersion, "Version mismatch" },
        { PvmOutOfRes, "Out of resources" }, { PvmDupHost, "Duplicate host" }, { PvmCantStart, "Can't start pvmd" },
        { PvmAlready, "Already in progress" }, { PvmNoTask, "No such task" }, { PvmNotFound, "Not Found" },
        { PvmExists, "Already Exists" }, { PvmHostrNMstr, "Hoster must run on master host" },
        { PvmParentNotSet, "Spawning parent set PvmNoParent" },
    };
    char wanted[200];
    size_t k;
    int good = 1;
    for (k = 0; k < sizeof known / sizeof known[0]; k++)
        good = good && !strcmp(pvm_errlist[-known[k].code], known[k].text);
    holds(good, "every error code has its text");
    is(pvm_nerr, 37, "there are 37 error texts");
    pvm_errno = PvmNoSuchBuf;
    reads(pvm_strerror(), "No such buffer", "strerror gives the text of the last error");
    catch_stderr();
    pvm_freebuf(-1);
    snprintf(wanted, sizeof wanted, "libpvm [t%x]: pvm_freebuf(): Bad parameter\n", own_tid);
    reads(caught(), wanted, "a failing call prints its name and its error");
    is(pvm_errno, PvmBadParam, "a failing call sets pvm_errno");
    catch_stderr();
    is(pvm_perror("here"), PvmOk, "perror returns 0");
    snprintf(wanted, sizeof wanted, "libpvm [t%x]: here: Bad parameter\n", own_tid);
    reads(caught(), wanted, "perror prints the text of the last error");
    pvm_setopt(PvmAutoErr, 0);
    catch_stderr();
    pvm_freebuf(-1);
    reads(caught(), "", "with errors silent a failing call prints nothing");
    pvm_setopt(PvmAutoErr, 1);
    catch_stderr();
    pvm_mstat("nohost");
    pvm_pstat(0x40fff);
    pvm_parent();
    pvm_lookup("nothing of the kind", 0, NULL);
    pvm_recvinfo("nothing of the kind", 0, 0);
    reads(caught(), "", "answers that are no faults of the caller are not printed");
    pvm_freebuf(-1);
    pvm_mytid();
    is(pvm_errno, PvmBadParam, "a call that works leaves pvm_errno");
}

static int run_as(const char *what)
{
    int status = 0, quiet;
    pid_t child = fork();
    if (child == 0) {
        quiet = open("/dev/null", O_WRONLY);
        dup2(quiet, 2);
        execl("/proc/self/exe", own_name, what, NULL);
        _exit(0);
    }
    waitpid(child, &status, 0);
    return status;
}

static void strictness(void)
{
    int status = run_as("strict");
    is(WIFEXITED(status) ? WEXITSTATUS(status) : -1, (-2) & 255, "with PvmAutoErr 2 an error ends the program with its code");
    status = run_as("aborter");
    is(WIFSIGNALED(status) ? WTERMSIG(status) : -1, SIGABRT, "with PvmAutoErr 3 an error aborts the program");
}

static void small_calls(void)
{
    int *fds = NULL, n, route;
    char name[128], mask[64], back[64];
    reads(pvm_version(), "3.4.6", "version tells 3.4.6");
    n = pvm_getfds(&fds);
    holds(n >= 1, "getfds counts at least the daemon's descriptor");
    holds(n >= 1 && fcntl(fds[0], F_GETFD) >= 0, "getfds tells descriptors that are open");
    is(pvmmytid, own_tid, "the variable pvmmytid is the own tid");
    holds(pvmtmpnam(name) != NULL && name[0] == '/', "pvmtmpnam gives the name of a file");
    reads(pvmgettmp(), "/tmp", "pvmgettmp is /tmp if nobody said another folder");
    memset(mask, '@', sizeof mask);
    mask[3] = 'B';
    mask[35] = 0;
    is(pvm_settmask(PvmTaskChild, mask), PvmOk, "settmask returns 0");
    is(pvm_gettmask(PvmTaskChild, back), PvmOk, "gettmask returns 0");
    holds(!memcmp(mask, back, 36), "gettmask gives what settmask took");
    pvm_gettmask(PvmTaskSelf, back);
    is(back[3], '@', "the masks of oneself and of children are two");
    is(strlen(back), 35, "a trace mask has 35 characters");
    memset(mask, '@', 35);
    pvm_settmask(PvmTaskChild, mask);
    route = start_one("pauser");
    is(await_int(route, 1, 0), PvmAllowDirect, "a child begins with its own options");
    is(pvm_reg_hoster() | pvm_reg_hoster(), PvmOk, "registering as hoster twice takes it back");
    is(pvm_reg_tasker() | pvm_reg_tasker(), PvmOk, "registering as tasker twice takes it back");
}

static void sentences(void)
{
    defaults();
    setting();
    reset();
    inside_the_daemon();
    noreset();
    texts();
    strictness();
    small_calls();
}
