/*
 * Counts, keeps its count in a file, and answers every question with the next number. It can be taken elsewhere by being
 * started again: when it is asked by SIGUSR1, or by a message with tag 77, it writes its count and ends with exit status 85.
 *
 *   again FILE [HOW]         as a task. HOW: deaf (ignores the signal), other (ends with status 3 instead), dies (is killed
 *                            instead), late (does it when the first question comes after it was asked), plain (keeps nothing), waits (for
 *                            messages, without a look at signals)
 *   again ask TID COUNT      from a command line: asks COUNT questions, one after the other, and prints the numbers that
 *                            were answered, how often the task had been started again, and where it works
 *   again flood TID COUNT    the same, but all questions are sent before the first answer is awaited
 *   again until TID TIMES    asks one question after the other until a process answers that was started again TIMES times
 */
#include <limits.h>
#include <pvm3.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { TAG_ASK = 1, TAG_ANSWER, TAG_WRITE = 77 };

static volatile sig_atomic_t asked;

static void note(int signal)
{
    (void)signal;
    asked = 1;
}

static void keep(const char *name, int count)
{
    char fresh[PATH_MAX];
    snprintf(fresh, sizeof fresh, "%s.fresh", name);
    FILE *file = fopen(fresh, "w");
    if (file == NULL || fprintf(file, "%d\n", count) < 0 || fclose(file) != 0 || rename(fresh, name) != 0) {
        perror(fresh);
        exit(4);
    }
}

static int kept(const char *name)
{
    int count = 0;
    FILE *file = fopen(name, "r");
    if (file != NULL && fscanf(file, "%d", &count) != 1)
        count = -1;
    if (file != NULL)
        fclose(file);
    return count;
}

static void answer(int buf, int count)
{
    int len, tag, tid;
    char here[PATH_MAX];
    const char *again = getenv("SEMPA_AGAIN");
    pvm_bufinfo(buf, &len, &tag, &tid);
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&count, 1, 1);
    pvm_pkstr(again != NULL ? (char *)again : "0");
    pvm_pkstr(getcwd(here, sizeof here) != NULL ? here : "nowhere");
    pvm_send(tid, TAG_ANSWER);
}

/* Waits for a question; 0 if there is none yet, or it is time to write. */
static int question(int waits)
{
    struct timeval step = { 0, 1000 };
    int buf, len, tag, tid, seconds;
    if (!waits)
        return pvm_trecv(-1, TAG_ASK, &step);
    buf = pvm_recv(-1, -1);
    if (buf < 0 || pvm_bufinfo(buf, &len, &tag, &tid) < 0)
        return -1;
    if (tag != TAG_WRITE)
        return buf;
    if (pvm_upkint(&seconds, 1, 1) == 0) {
        printf("is to write within %d s\n", seconds);
        fflush(stdout);
        asked = 1;
    }
    return 0;
}

static int serve(const char *file, const char *how)
{
    struct timeval none = { 0, 0 };
    int count = strcmp(how, "plain") == 0 ? 0 : kept(file);
    printf("begins with %d, started again %s\n", count, getenv("SEMPA_AGAIN") ? getenv("SEMPA_AGAIN") : "0");
    fflush(stdout);
    for (;;) {
        int buf = question(strcmp(how, "waits") == 0);
        if (buf < 0)
            return 2;
        if (buf > 0)
            answer(buf, ++count);
        if (!asked || (strcmp(how, "late") == 0 && buf == 0))
            continue;
        if (strcmp(how, "other") == 0)
            return 3;
        if (strcmp(how, "dies") == 0)
            kill(getpid(), SIGKILL);
        /* What has come is dealt with; what comes from now on is for the next process. */
        while (pvm_trecv(-1, TAG_ASK, &none) > 0)
            answer(pvm_getrbuf(), ++count);
        keep(file, count);
        return 85;
    }
}

/* The number of restarts of the task that answers next; -1 if none answers. */
static int hear(int tid)
{
    struct timeval patience = { 60, 0 };
    char again[16], here[PATH_MAX];
    int count;
    if (pvm_trecv(tid, TAG_ANSWER, &patience) <= 0) {
        printf("no answer\n");
        return -1;
    }
    pvm_upkint(&count, 1, 1);
    pvm_upkstr(again);
    pvm_upkstr(here);
    printf("%d again %s in %s\n", count, again, here);
    fflush(stdout);
    return atoi(again);
}

int main(int argc, char **argv)
{
    struct sigaction action = { .sa_handler = note };
    sigaction(SIGUSR1, &action, NULL);
    if (argc > 2 && strcmp(argv[2], "deaf") == 0)
        signal(SIGUSR1, SIG_IGN);
    if (pvm_mytid() < 0)
        return 2;
    if (argc < 4)
        return serve(argc > 1 ? argv[1] : "again.count", argc > 2 ? argv[2] : "");
    int tid = (int)strtoul(argv[2] + (argv[2][0] == 't'), NULL, 16), number = atoi(argv[3]), again = 0;
    int flood = strcmp(argv[1], "flood") == 0, until = strcmp(argv[1], "until") == 0;
    for (int i = 0; until ? again >= 0 && again < number : i < number && again >= 0; i++) {
        pvm_initsend(PvmDataDefault);
        pvm_send(tid, TAG_ASK);
        if (!flood)
            again = hear(tid);
    }
    for (int i = 0; flood && i < number && again >= 0; i++)
        again = hear(tid);
    if (again < 0)
        return 1;
    pvm_exit();
    return 0;
}
