/* What the programs of the conformance suite share: one line for each sentence, and a child for each role.
 *
 * A program is its own child: it spawns itself with the name of a role as first argument. The child's function is in
 * the table `roles`, or `common_roles` below; the parent's is `sentences`. Children prove nothing themselves, they send
 * what they see.
 */
#ifndef CONFORM_H
#define CONFORM_H

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* It declares pvm_catchout only to those who know FILE. */
#include <pvm3.h>

/* Of the library's inner functions, which the header does not name: the console's reset. */
int pvmreset(int mytid, int kill_tasks, char *name, int index);

/* A program that takes longer is stuck; it says so and ends. */
#define STUCK_SECONDS 75
/* An answer that takes longer does not come. */
#define PATIENCE_SECONDS 15

typedef struct {
    const char *name;
    int (*run)(int argc, char **argv);
} role;

static const role roles[];
static void sentences(void);

static const char *own_name;
static int own_tid;

/* A sentence that is true or not. */
static inline int holds(int truth, const char *sentence)
{
    if (truth)
        printf("ok %s\n", sentence);
    else
        printf("not ok %s: got no, wanted yes\n", sentence);
    fflush(stdout);
    return truth;
}

/* A sentence about a number. */
static inline int is(long got, long wanted, const char *sentence)
{
    if (got == wanted)
        printf("ok %s\n", sentence);
    else
        printf("not ok %s: got %ld, wanted %ld\n", sentence, got, wanted);
    fflush(stdout);
    return got == wanted;
}

/* A sentence about a text. */
static inline int reads(const char *got, const char *wanted, const char *sentence)
{
    int same = got && !strcmp(got, wanted);
    if (same)
        printf("ok %s\n", sentence);
    else
        printf("not ok %s: got \"%s\", wanted \"%s\"\n", sentence, got ? got : "(null)", wanted);
    fflush(stdout);
    return same;
}

/* Receives, but not for ever: 0 when nothing comes. */
static inline int await(int tid, int tag)
{
    struct timeval limit = { PATIENCE_SECONDS, 0 };
    return pvm_trecv(tid, tag, &limit);
}

/* Receives a message of one int: `otherwise` when nothing comes. */
static inline int await_int(int tid, int tag, int otherwise)
{
    int value = otherwise;
    if (await(tid, tag) > 0)
        pvm_upkint(&value, 1, 1);
    return value;
}

/* Waits a little and says what has come: for what should not come. */
static inline int comes_soon(int tid, int tag)
{
    struct timeval limit = { 0, 300000 };
    return pvm_trecv(tid, tag, &limit);
}

/* Sends a message of some ints. */
static inline int tell_all(int tid, int tag, int *values, int n)
{
    pvm_initsend(PvmDataDefault);
    pvm_pkint(values, n, 1);
    return pvm_send(tid, tag);
}

/* Sends a message of one int. */
static inline int tell(int tid, int tag, int value)
{
    return tell_all(tid, tag, &value, 1);
}

/* Spawns this very program in a role. */
static inline int start_as(const char *role_name, int flags, const char *where, int n, int *tids)
{
    char *words[] = { (char *)role_name, NULL };
    return pvm_spawn((char *)own_name, words, flags, (char *)where, n, tids);
}

/* Spawns one child in a role; its tid, or the error. */
static inline int start_one(const char *role_name)
{
    int tid = 0;
    start_as(role_name, PvmTaskDefault, NULL, 1, &tid);
    return tid;
}

/* Starts this program from the command line in a role. Its words are the own tid and the number of a descriptor that it
 * keeps. */
static inline pid_t from_command_line(const char *role_name, int keep)
{
    char me[16], kept[16];
    pid_t child;
    snprintf(me, sizeof me, "%d", own_tid);
    snprintf(kept, sizeof kept, "%d", keep);
    child = fork();
    if (child == 0) {
        execl("/proc/self/exe", own_name, role_name, me, kept, NULL);
        _exit(1);
    }
    return child;
}

static inline double now(void)
{
    struct timeval tv;
    gettimeofday(&tv, NULL);
    return tv.tv_sec + tv.tv_usec / 1e6;
}

/* In a child: says that it is there, by a message with tag 2, and waits for the word to go on, with tag 3. */
static inline void wait_for_word(void)
{
    tell(pvm_parent(), 2, getpid());
    pvm_recv(pvm_parent(), 3);
}

/* Starts a child that does so, on a host if one is named, and waits until it is there. */
static inline int start_waiting(const char *role_name, const char *where)
{
    int tid = 0;
    start_as(role_name, where ? PvmTaskHost : PvmTaskDefault, where, 1, &tid);
    await(tid, 2);
    return tid;
}

/* Waits for its word and leaves. */
static inline int waiter(int argc, char **argv)
{
    (void)argc, (void)argv;
    wait_for_word();
    pvm_exit();
    return 0;
}

/* Comes and leaves. */
static inline int quiet(int argc, char **argv)
{
    (void)argc, (void)argv;
    pvm_mytid();
    pvm_exit();
    return 0;
}

/* Tells its directory and the variable that the debugger below sets. */
static inline int looker(int argc, char **argv)
{
    char here[1024] = "", *debugged = getenv("DEBUGGED");
    (void)argc, (void)argv;
    if (!getcwd(here, sizeof here))
        here[0] = 0;
    pvm_initsend(PvmDataDefault);
    pvm_pkstr(here);
    pvm_pkstr(debugged ? debugged : "");
    pvm_send(pvm_parent(), 4);
    pvm_exit();
    return 0;
}

/* Starts one that does so; what it tells. */
static inline void look(int flags, const char *host, char *here, char *debugged)
{
    int tid;
    here[0] = debugged[0] = 0;
    start_as("looker", PvmTaskHost | flags, host, 1, &tid);
    if (await(tid, 4) > 0) {
        pvm_upkstr(here);
        pvm_upkstr(debugged);
    }
}

/* A debugger in the home directory: it does nothing but tell the program's path. */
static inline const char *make_debugger(void)
{
    static char name[1200];
    FILE *file;
    snprintf(name, sizeof name, "%s/conform-debugger", getenv("HOME"));
    file = fopen(name, "w");
    fprintf(file, "#!/bin/sh\nDEBUGGED=$1\nexport DEBUGGED\nexec \"$@\"\n");
    fchmod(fileno(file), 0755);
    fclose(file);
    return name;
}

static const role common_roles[] = { { "waiter", waiter }, { "quiet", quiet }, { "looker", looker }, { NULL, NULL } };

/* Runs until a task is gone. */
static inline int gone(int tid)
{
    double end = now() + PATIENCE_SECONDS;
    int old = pvm_setopt(PvmAutoErr, 0), answer = PvmOk;
    while ((answer = pvm_pstat(tid)) == PvmOk && now() < end)
        usleep(2000);
    pvm_setopt(PvmAutoErr, old);
    return answer == PvmNoTask;
}

/* Has children go on that wait for their word, and waits until they are gone. */
static inline void dismiss(const int *tids, int n)
{
    int k;
    for (k = 0; k < n; k++)
        tell(tids[k], 3, 0);
    for (k = 0; k < n; k++)
        gone(tids[k]);
}

/* Plays a role if it is in this table; -1 if not. */
static inline int play(const role *one, int argc, char **argv)
{
    for (; one->name; one++)
        if (!strcmp(one->name, argv[1]))
            return one->run(argc, argv);
    return -1;
}

/* What is written to standard error between the two is caught. */
static int kept_stderr = -1, caught_stderr = -1;

static inline void catch_stderr(void)
{
    char name[] = "/tmp/conformXXXXXX";
    fflush(stderr);
    caught_stderr = mkstemp(name);
    unlink(name);
    kept_stderr = dup(2);
    dup2(caught_stderr, 2);
}

static inline const char *caught(void)
{
    static char text[4096];
    ssize_t n;
    fflush(stderr);
    dup2(kept_stderr, 2);
    close(kept_stderr);
    n = pread(caught_stderr, text, sizeof text - 1, 0);
    close(caught_stderr);
    text[n > 0 ? n : 0] = 0;
    return text;
}

static void stuck(int number)
{
    static const char words[] = "stuck\n";
    (void)number;
    if (write(1, words, sizeof words - 1) < 0)
        _exit(98);
    _exit(99);
}

int main(int argc, char **argv)
{
    own_name = basename(strdup(argv[0]));
    signal(SIGALRM, stuck);
    alarm(STUCK_SECONDS);
    if (argc > 1) {
        int status = play(roles, argc, argv);
        if (status < 0)
            status = play(common_roles, argc, argv);
        if (status >= 0)
            return status;
        fprintf(stderr, "%s: no role %s\n", own_name, argv[1]);
        return 97;
    }
    own_tid = pvm_mytid();
    sentences();
    pvm_exit();
    printf("end\n");
    return 0;
}

#endif
