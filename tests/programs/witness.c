/*
 * Tasks that would notice if they ran twice, or if a message were lost.
 *
 *   witness [direct]           from a command line: the director. Reads lines: "spawn HOST NAME FOLDER" prints "witness NAME tTID";
 *                              with direct all want direct routes, and "route tTID" tells of one; "ask tTID" prints "account tTID got N bad N theirs N", N messages that came, faults that it
 *                              and the task have seen; "stop tTID" ends one, "end" all. Prints "gone tTID" when a task has ended.
 *   witness NAME FOLDER [direct]
 *                              as a task: appends 0, 1, 2, … to FOLDER/NAME, a line each few milliseconds, and sends the
 *                              director numbered messages of different sizes, each of which is answered with its number
 *
 * A second copy would write a number that is there already. With WITNESS_MIB in its environment a task has this much memory
 * that is in use.
 */
#include <fcntl.h>
#include <poll.h>
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { TAG_DATA = 1, TAG_ANSWER, TAG_END, TAG_GONE, TAG_ROUTE };
enum { WITNESSES_MAX = 1024, WINDOW = 8, DATA_MAX = 60000, ANSWER_MAX = 3000, LINE = 1024 };

static struct witness {
    int tid, got, bad, theirs;
} all[WITNESSES_MAX];
static int count, wants_direct;

static int length(int number, int most)
{
    return 1 + (int)(number * 7919u % (unsigned int)most);
}

static void fill(char *bytes, int number, int len)
{
    for (int i = 0; i < len; i++)
        bytes[i] = (char)(number + i * 7);
}

static void pass(int to, int tag, int number, int most, int bad)
{
    static char bytes[DATA_MAX];
    int len = length(number, most);
    fill(bytes, number, len);
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&number, 1, 1);
    pvm_pkint(&bad, 1, 1);
    pvm_pkbyte(bytes, len, 1);
    if (pvm_send(to, tag) < 0)
        exit(4);
}

/* The number of what was received; 0 if it is damaged. */
static int take(int most, int *theirs)
{
    static char bytes[DATA_MAX], right[DATA_MAX];
    int number = 0;
    if (pvm_upkint(&number, 1, 1) < 0 || pvm_upkint(theirs, 1, 1) < 0 || number < 1)
        return 0;
    int len = length(number, most);
    fill(right, number, len);
    return pvm_upkbyte(bytes, len, 1) >= 0 && memcmp(bytes, right, (size_t)len) == 0 ? number : 0;
}

static int testify(const char *name, const char *folder)
{
    char path[LINE];
    int director = pvm_parent(), sent = 0, answered = 0, bad = 0;
    const char *mib = getenv("WITNESS_MIB");
    size_t ballast = mib == NULL ? 0 : (size_t)atoi(mib) << 20;
    unsigned char *memory = ballast == 0 ? NULL : malloc(ballast);
    for (size_t i = 0; memory != NULL && i < ballast; i++)
        memory[i] = (unsigned char)(i * 2654435761u >> 13 | 1);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int log = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (log < 0)
        return 3;
    for (unsigned long now = 0;; now++) {
        char line[32];
        struct timeval step = { 0, 4000 };
        int len = snprintf(line, sizeof line, "%lu\n", now), theirs;
        if (write(log, line, (size_t)len) != len || (memory != NULL && memory[now * 4096 % ballast] == 0))
            return 5;
        if (sent - answered < WINDOW)
            pass(director, TAG_DATA, ++sent, DATA_MAX, bad);
        if (pvm_trecv(director, TAG_END, &(struct timeval){ 0, 0 }) > 0)
            break;
        if (pvm_trecv(director, TAG_ANSWER, &step) > 0) {
            bad += take(ANSWER_MAX, &theirs) != answered + 1;
            answered++;
        }
    }
    pvm_exit();
    return 0;
}

static struct witness *of(int tid)
{
    for (int i = 0; i < count; i++)
        if (all[i].tid == tid)
            return &all[i];
    return NULL;
}

static void obey(char *program, char *line)
{
    char host[LINE], name[LINE], folder[LINE];
    unsigned int tid;
    if (sscanf(line, "spawn %1023s %1023s %1023s", host, name, folder) == 3 && count < WITNESSES_MAX) {
        char *words[] = { name, folder, wants_direct ? "direct" : NULL, NULL };
        struct witness *fresh = &all[count];
        if (pvm_spawn(program, words, PvmTaskHost, host, 1, &fresh->tid) != 1) {
            printf("refused %s %d\n", name, fresh->tid);
            return;
        }
        count++;
        pvm_notify(PvmTaskExit, TAG_GONE, 1, &fresh->tid);
        printf("witness %s t%x\n", name, fresh->tid);
    } else if (sscanf(line, "ask t%x", &tid) == 1 && of((int)tid)) {
        struct witness *one = of((int)tid);
        printf("account t%x got %d bad %d theirs %d\n", tid, one->got, one->bad, one->theirs);
    } else if (sscanf(line, "stop t%x", &tid) == 1) {
        pvm_initsend(PvmDataDefault);
        pvm_send((int)tid, TAG_END);
    } else {
        printf("not understood: %s\n", line);
    }
}

static void hear(int buf)
{
    int bytes, tag, tid, gone = 0;
    pvm_bufinfo(buf, &bytes, &tag, &tid);
    if (tag == TAG_GONE) {
        pvm_upkint(&gone, 1, 1);
        printf("gone t%x\n", gone);
        return;
    }
    if (tag == TAG_ROUTE) {
        pvm_upkint(&tid, 1, 1);
        printf("route t%x\n", tid);
        return;
    }
    struct witness *from = of(tid);
    if (from == NULL)
        return;
    int number = take(DATA_MAX, &from->theirs);
    from->bad += number != from->got + 1;
    from->got++;
    pass(tid, TAG_ANSWER, from->got, ANSWER_MAX, 0);
}

static int direct(char *program)
{
    char held[LINE * 4];
    size_t have = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (;;) {
        struct timeval step = { 0, 5000 };
        struct pollfd input = { 0, POLLIN, 0 };
        int buf = pvm_trecv(-1, -1, &step);
        if (buf < 0)
            return 6;
        if (buf > 0)
            hear(buf);
        while (poll(&input, 1, 0) > 0) {
            ssize_t more = read(0, held + have, sizeof held - have - 1);
            if (more <= 0)
                return 0;
            have += (size_t)more;
            held[have] = 0;
            for (char *end; (end = strchr(held, '\n')) != NULL;) {
                *end = 0;
                if (strcmp(held, "end") == 0) {
                    for (int i = 0; i < count; i++) {
                        pvm_initsend(PvmDataDefault);
                        pvm_send(all[i].tid, TAG_END);
                    }
                    pvm_exit();
                    return 0;
                }
                obey(program, held);
                have -= (size_t)(end + 1 - held);
                memmove(held, end + 1, have + 1);
            }
        }
    }
}

int main(int argc, char **argv)
{
    if (pvm_mytid() < 0)
        return 2;
    wants_direct = argc > 1 && strcmp(argv[argc - 1], "direct") == 0;
    if (wants_direct && pvm_setopt(PvmRoute, PvmRouteDirect) < 0)
        return 2;
    if (argc > 2)
        return testify(argv[1], argv[2]);
    if (wants_direct && pvm_notify(PvmRouteAdd, TAG_ROUTE, -1, NULL) < 0)
        return 2;
    return direct(argv[0]);
}
