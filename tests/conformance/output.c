/* Output of spawned tasks: collected, printed, or sent as messages. */
#include "conform.h"

static int printer(int argc, char **argv)
{
    (void)argc, (void)argv;
    printf("first line\n");
    fflush(stdout);
    fprintf(stderr, "to standard error\n");
    printf("no newline at the end");
    fflush(stdout);
    pvm_exit();
    return 0;
}

static int loud(int argc, char **argv)
{
    int k;
    (void)argc, (void)argv;
    pvm_mytid();
    for (k = 0; k < 10000; k++)
        printf("%08d\n", k);
    fflush(stdout);
    pvm_exit();
    return 0;
}

/* Prints, sends its own output elsewhere, prints again. */
static int changer(int argc, char **argv)
{
    int parent = pvm_parent();
    (void)argc, (void)argv;
    printf("before\n");
    fflush(stdout);
    /* What was printed before goes the old way only when the daemon has read it: the collector has it. */
    wait_for_word();
    pvm_setopt(PvmSelfOutputTid, parent);
    pvm_setopt(PvmSelfOutputCode, 51);
    printf("after\n");
    fflush(stdout);
    pvm_exit();
    return 0;
}

/* Spawns a printer: the printer's output goes where this task's own children's goes. */
static int grandparent(int argc, char **argv)
{
    (void)argc, (void)argv;
    start_one("printer");
    pvm_exit();
    return 0;
}

/* Catches the output of a printer in its own standard output, which the first parent reads from a file. */
static int catcher(int argc, char **argv)
{
    int tid = 0, back;
    (void)argc;
    pvm_mytid();
    if (!freopen(argv[2], "w", stdout))
        return 1;
    pvm_setopt(PvmShowTids, atoi(argv[3]));
    pvm_catchout(stdout);
    tid = start_one("printer");
    back = pvm_getopt(PvmOutputTid) == pvm_mytid();
    pvm_exit();
    printf("tid %x, caught %d\n", tid, back);
    return fclose(stdout);
}

/* Prints the same again and again when it is told to, until it is told to leave. */
static int speaker(int argc, char **argv)
{
    double end;
    (void)argc, (void)argv;
    wait_for_word();
    tell(pvm_parent(), 2, 0);
    end = now() + 2 * PATIENCE_SECONDS;
    do {
        printf("spoken\n");
        fflush(stdout);
        usleep(10000);
    } while (pvm_nrecv(pvm_parent(), 3) == 0 && now() < end);
    pvm_exit();
    return 0;
}

/* Catches the output of a speaker in its own standard output, and no longer while the speaker speaks. Leaves while the
 * speaker runs, or, if it catches output again, when the speaker has ended. */
static int leaver(int argc, char **argv)
{
    int tid, k, ended, again = atoi(argv[3]);
    (void)argc;
    pvm_mytid();
    if (!freopen(argv[2], "w", stdout))
        return 1;
    pvm_catchout(stdout);
    tid = start_waiting("speaker", NULL);
    pvm_catchout(NULL);
    tell(tid, 3, 0);
    await(tid, 2);
    /* The speaker goes on meanwhile, and each call takes in what it has said. */
    for (k = 0; k < 100; k++) {
        pvm_pstat(tid);
        usleep(10000);
    }
    if (again) {
        pvm_catchout(stdout);
        tell(tid, 3, 0);
    }
    pvm_exit();
    printf("left, speaker ");
    /* PVM reports the end of the output before the daemon has reaped the process. */
    ended = again ? gone(tid) : pvm_pstat(tid) != PvmOk;
    printf("%s\n", ended ? "ended" : "runs");
    pvm_kill(tid);
    return fclose(stdout);
}

static const role roles[] = { { "printer", printer }, { "loud", loud }, { "speaker", speaker }, { "leaver", leaver },
    { "grandparent", grandparent }, { "catcher", catcher }, { "changer", changer }, { NULL, NULL } };

typedef struct {
    int spawned, created, ended, parent_said, bytes, ended_before_data;
    char text[200000];
} collected;

static collected one, two;

/* Collects the output of tasks until all that were announced have ended, or until there is some text if no task is to
 * end. */
static void collect_more(int tag, collected *of, int tasks)
{
    int tid, n, parent;
    while (tasks ? of->ended < tasks || of->spawned < tasks : !of->bytes) {
        if (await(-1, tag) <= 0)
            return;
        pvm_upkint(&tid, 1, 1);
        pvm_upkint(&n, 1, 1);
        if (n == -1) {
            of->spawned++;
            pvm_upkint(&parent, 1, 1);
            of->parent_said = parent;
        } else if (n == -2) {
            of->created++;
        } else if (n == 0) {
            of->ended++;
        } else if (of->bytes + n < (int)sizeof of->text) {
            pvm_upkbyte(of->text + of->bytes, n, 1);
            of->bytes += n;
            of->ended_before_data |= of->ended > 0 && tasks == 1;
        }
    }
}

static void collect(int tag, collected *of, int tasks)
{
    memset(of, 0, sizeof *of);
    collect_more(tag, of, tasks);
}

static void as_messages(void)
{
    int k, tid, good, at;
    char line[16];
    pvm_setopt(PvmOutputTid, own_tid);
    pvm_setopt(PvmOutputCode, 50);
    start_one("printer");
    collect(50, &one, 1);
    is(one.spawned, 1, "a spawn is told to who collects the output");
    is(one.parent_said, own_tid, "a spawn's message names the parent");
    is(one.ended, 1, "the end of output is told");
    holds(strstr(one.text, "first line\n") != NULL, "output is sent to who collects it");
    holds(strstr(one.text, "to standard error\n") != NULL, "standard error is sent with it");
    holds(strstr(one.text, "no newline at the end") != NULL, "a last line without newline is sent");
    is(one.ended_before_data, 0, "the end of output comes last");
    is(one.bytes, 50, "every byte of output is sent once");
    start_one("quiet");
    collect(50, &two, 1);
    is(two.bytes, 0, "a task that writes nothing sends no output");
    is(two.created, 1, "a task that was created is told");
    start_one("loud");
    collect(50, &two, 1);
    is(two.bytes, 90000, "much output is sent in full");
    for (k = at = 0, good = 1; k < 10000; k++, at += 9) {
        snprintf(line, sizeof line, "%08d\n", k);
        good = good && !memcmp(two.text + at, line, 9);
    }
    holds(good, "output keeps its order");
    start_one("grandparent");
    collect(50, &one, 2);
    holds(strstr(one.text, "first line\n") != NULL, "the output of grandchildren goes to the same collector");
    tid = start_waiting("changer", NULL);
    collect(50, &one, 0);
    tell(tid, 3, 0);
    collect_more(50, &one, 1);
    collect(51, &two, 1);
    reads(one.text, "before\n", "what a task prints before it sends its output elsewhere goes the old way");
    reads(two.text, "after\n", "what a task prints afterwards goes the new way");
    is(one.ended, 1, "the old collector is told the end");
    is(two.spawned, 1, "the new collector is told the beginning");
    pvm_setopt(PvmOutputTid, 0);
    pvm_setopt(PvmOutputCode, 0);
    start_one("printer");
    is(comes_soon(-1, 50), 0, "output goes there no more when it was taken back");
}

static const char *catch(const char *role_name, const char *file, const char *word)
{
    static char text[4096];
    char *words[] = { (char *)role_name, (char *)file, (char *)word, NULL };
    int tid = 0, n = 0;
    FILE *from;
    pvm_spawn((char *)own_name, words, PvmTaskHost, ".", 1, &tid);
    gone(tid);
    from = fopen(file, "r");
    if (from) {
        n = fread(text, 1, sizeof text - 1, from);
        fclose(from);
        unlink(file);
    }
    text[n] = 0;
    return text;
}

static void caught_by_the_library(void)
{
    char wanted[64], *tail, text[4096];
    unsigned tid = 0;
    snprintf(text, sizeof text, "%s", catch("catcher", "/tmp/caught-with", "1"));
    tail = strstr(text, "tid ");
    sscanf(tail ? tail : "", "tid %x", &tid);
    holds(tail && strstr(tail, "caught 1"), "catchout makes the caller the collector");
    snprintf(wanted, sizeof wanted, "[t%x] BEGIN\n", tid);
    holds(strstr(text, wanted) != NULL, "catchout prints that a task has begun");
    snprintf(wanted, sizeof wanted, "[t%x] first line\n", tid);
    holds(strstr(text, wanted) != NULL, "catchout prints lines with the task's tid");
    snprintf(wanted, sizeof wanted, "[t%x] no newline at the end\n", tid);
    holds(strstr(text, wanted) != NULL, "catchout ends the last line");
    snprintf(wanted, sizeof wanted, "[t%x] EOF\n", tid);
    holds(strstr(text, wanted) != NULL, "catchout prints that a task has ended");
    holds(tail && strstr(text, wanted) && strstr(text, wanted) < tail, "pvm_exit waits for the output it catches");
    snprintf(text, sizeof text, "%s", catch("catcher", "/tmp/caught-without", "0"));
    holds(!strncmp(text, "first line\n", 11), "with tids hidden catchout prints the bare lines");
    holds(!strstr(text, "EOF") && !strstr(text, "BEGIN"), "with tids hidden catchout prints neither beginning nor end");
    is(pvm_catchout(NULL), PvmOk, "catchout of null returns 0");
    snprintf(text, sizeof text, "%s", catch("leaver", "/tmp/caught-left", "0"));
    holds(strstr(text, "left, speaker runs\n") != NULL, "after catchout of null pvm_exit does not wait for children");
    holds(!strstr(text, "spoken"), "after catchout of null nothing is printed");
    snprintf(text, sizeof text, "%s", catch("leaver", "/tmp/caught-again", "1"));
    holds(strstr(text, "EOF\nleft, speaker ended\n") != NULL, "when output is caught again pvm_exit waits again");
}

static void sentences(void)
{
    as_messages();
    caught_by_the_library();
}
