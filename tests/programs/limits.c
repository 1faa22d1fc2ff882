/*
 * What PVM 3.4.6 cannot do for want of room.
 *
 *   limits pending N       N messages wait at a task that asks for a later one first, and come in order
 *   limits environment N   a spawned task gets N variables of 100,000 bytes each
 *   limits tasks N         N tasks on one host at the same time, each of which says something
 *   limits giant MIB       one message of this number of MiB
 *   limits flood MIB ROUTE HOST FOLDER
 *                          this task and one on HOST send each other this number of MiB; none of them receives before both
 *                          have sent all. ROUTE: default, or direct: both wait until they have one, which on one host
 *                          is a ring
 *   limits full WHO        two tasks exchange messages while WHO may open no more descriptors: here, there, or a task named by a
 *                          FOLDER; its limit is reached between the files FOLDER/ready, made here, and FOLDER/go
 *
 * Each prints "good" and ends with 0, or says what is wrong.
 */
#include <fcntl.h>
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { TAG_DATA = 1, TAG_GO, TAG_DONE, TAG_ROUTE };
enum { VARIABLE_BYTES = 100000, PIECE_BYTES = 16 << 20, AT_ONCE = 500, LOOK_US = 20000 };
enum { WORDS = 200, WORD_BYTES = 4, DESCRIPTORS = 256, LARGE_BYTES = 1 << 20, LARGE_EVERY = 20 };

static int fail(const char *what, long number)
{
    printf("%s: %ld\n", what, number);
    return 1;
}

static int send_int(int tid, int tag, int value)
{
    pvm_initsend(PvmDataRaw);
    pvm_pkint(&value, 1, 1);
    return pvm_send(tid, tag);
}

static int receive_int(int tid, int tag)
{
    int value = -1;
    if (pvm_recv(tid, tag) > 0)
        pvm_upkint(&value, 1, 1);
    return value;
}

static int start(const char *self, char *role, char *count)
{
    char *arguments[] = { role, count, NULL };
    int tid = -1;
    return pvm_spawn((char *)self, arguments, PvmTaskDefault, "", 1, &tid) == 1 ? tid : -1;
}

static int pending(const char *self, char *count)
{
    int child = start(self, "pending-child", count), number = atoi(count);
    if (child < 0)
        return fail("spawn", child);
    for (int i = 0; i < number; i++)
        if (send_int(child, TAG_DATA, i) < 0)
            return fail("send", i);
    send_int(child, TAG_GO, 0);
    int right = receive_int(child, TAG_DONE);
    return right == number ? 0 : fail("in order", right);
}

static int pending_child(int number)
{
    int parent = pvm_parent(), right = 0;
    receive_int(parent, TAG_GO);
    while (right < number && receive_int(parent, TAG_DATA) == right)
        right++;
    return send_int(parent, TAG_DONE, right) < 0;
}

static int environment(const char *self, char *count)
{
    int number = atoi(count);
    char *value = malloc(VARIABLE_BYTES + 1), *names = calloc(number, 32), name[32];
    memset(value, 'x', VARIABLE_BYTES);
    value[VARIABLE_BYTES] = 0;
    for (int i = 0; i < number; i++) {
        sprintf(name, "LARGE_%d", i);
        setenv(name, value, 1);
        strcat(strcat(names, i ? ":" : ""), name);
    }
    setenv("PVM_EXPORT", names, 1);
    int child = start(self, "environment-child", count);
    int right = child < 0 ? child : receive_int(child, TAG_DONE);
    return right == number ? 0 : fail("variables", right);
}

static int environment_child(int number)
{
    int right = 0;
    char name[32];
    for (int i = 0; i < number; i++) {
        sprintf(name, "LARGE_%d", i);
        const char *value = getenv(name);
        right += value && strlen(value) == VARIABLE_BYTES;
    }
    return send_int(pvm_parent(), TAG_DONE, right) < 0;
}

static int tasks(const char *self, char *count)
{
    int number = atoi(count), *tids = calloc(number, sizeof *tids);
    char *arguments[] = { "tasks-child", NULL };
    long sum = 0;
    for (int i = 0; i < number; i += AT_ONCE) {
        int more = number - i < AT_ONCE ? number - i : AT_ONCE;
        int started = pvm_spawn((char *)self, arguments, PvmTaskDefault, "", more, tids + i);
        if (started != more)
            return fail("spawn", i + started);
        /* A round at a time: a small machine has enough to do with these. */
        for (int k = 0; k < more; k++)
            if (receive_int(-1, TAG_DATA) <= 0)
                return fail("greeting", i + k);
    }
    for (int i = 0; i < number; i++)
        send_int(tids[i], TAG_GO, i);
    for (int i = 0; i < number; i++)
        sum += receive_int(-1, TAG_DONE);
    return sum == (long)number * (number - 1) / 2 ? 0 : fail("sum", sum);
}

static int tasks_child(void)
{
    int parent = pvm_parent();
    send_int(parent, TAG_DATA, pvm_mytid());
    return send_int(parent, TAG_DONE, receive_int(parent, TAG_GO)) < 0;
}

static int giant(const char *self, char *mebibytes)
{
    int child = start(self, "giant-child", mebibytes), pieces = atoi(mebibytes) / (PIECE_BYTES >> 20);
    char *piece = malloc(PIECE_BYTES);
    pvm_initsend(PvmDataRaw);
    for (int i = 0; i < pieces; i++) {
        memset(piece, i & 0x7f, PIECE_BYTES);
        if (pvm_pkbyte(piece, PIECE_BYTES, 1) < 0)
            return fail("pack", i);
    }
    if (pvm_send(child, TAG_DATA) < 0)
        return fail("send", pieces);
    /* What was packed is not needed here any more. */
    pvm_freebuf(pvm_getsbuf());
    int right = receive_int(child, TAG_DONE);
    return right == pieces ? 0 : fail("pieces", right);
}

static int giant_child(int mebibytes)
{
    int pieces = mebibytes / (PIECE_BYTES >> 20), right = 0;
    char *piece = malloc(PIECE_BYTES), *wanted = malloc(PIECE_BYTES);
    pvm_recv(pvm_parent(), TAG_DATA);
    for (int i = 0; i < pieces; i++) {
        memset(wanted, i & 0x7f, PIECE_BYTES);
        if (pvm_upkbyte(piece, PIECE_BYTES, 1) < 0 || memcmp(piece, wanted, PIECE_BYTES) != 0)
            break;
        right++;
    }
    return send_int(pvm_parent(), TAG_DONE, right) < 0;
}

/* A file says how far this one is, another one how far the other: no call of PVM takes part in that. */
static void say_and_wait(const char *folder, const char *own, const char *other)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, own);
    FILE *said = fopen(path, "w");
    if (said)
        fclose(said);
    for (snprintf(path, sizeof path, "%s/%s", folder, other); access(path, F_OK) != 0;)
        usleep(LOOK_US);
}

static int exchange(int peer, int pieces, const char *folder, int mine, int theirs)
{
    const char *const names[] = { "sent-by-first", "sent-by-second" };
    char *piece = malloc(PIECE_BYTES), *wanted = malloc(PIECE_BYTES);
    if (!piece || !wanted)
        return fail("memory", pieces);
    for (int i = 0; i < pieces; i++) {
        memset(piece, (i + mine * 101) & 0xff, PIECE_BYTES);
        memcpy(piece, &i, sizeof i);
        if (pvm_initsend(PvmDataRaw) < 0 || pvm_pkbyte(piece, PIECE_BYTES, 1) < 0 || pvm_send(peer, TAG_DATA) < 0)
            return fail("send", i);
    }
    say_and_wait(folder, names[mine], names[theirs]);
    for (int i = 0; i < pieces; i++) {
        memset(wanted, (i + theirs * 101) & 0xff, PIECE_BYTES);
        memcpy(wanted, &i, sizeof i);
        if (pvm_recv(peer, TAG_DATA) < 0 || pvm_upkbyte(piece, PIECE_BYTES, 1) < 0)
            return fail("receive", i);
        if (memcmp(piece, wanted, PIECE_BYTES) != 0)
            return fail("not what was sent", i);
    }
    return 0;
}

/* From here on this task hears of its routes, those too for which others ask. */
static int want_route(const char *route)
{
    if (strcmp(route, "direct") != 0)
        return 0;
    return pvm_setopt(PvmRoute, PvmRouteDirect) < 0 || pvm_notify(PvmRouteAdd, TAG_ROUTE, -1, NULL) < 0;
}

/* Says a few words, so that what is wanted as a route stands before anything large is sent. */
static int meet(int peer, const char *route, int begins)
{
    int found = 0;
    for (int i = 0; i < 3; i++) {
        if (begins && send_int(peer, TAG_GO, i) < 0)
            return fail("greeting", i);
        if (receive_int(peer, TAG_GO) != i)
            return fail("greeted", i);
        if (!begins && send_int(peer, TAG_GO, i) < 0)
            return fail("greeting", i);
    }
    while (!strcmp(route, "direct") && found != peer)
        found = receive_int(-1, TAG_ROUTE);
    return 0;
}

static int flood(const char *self, char **words)
{
    char *arguments[] = { "flood-child", words[0], words[1], words[3], NULL };
    int child = -1, status = 1;
    if (want_route(words[1]))
        return fail("route", 0);
    if (pvm_spawn((char *)self, arguments, PvmTaskHost, words[2], 1, &child) != 1)
        return fail("spawn", child);
    /* The child has asked for news of its routes before it says its first word. */
    if (meet(child, words[1], 0) == 0)
        status = exchange(child, atoi(words[0]) / (PIECE_BYTES >> 20), words[3], 0, 1);
    int theirs = status == 0 ? receive_int(child, TAG_DONE) : 0;
    return status ? status : theirs == 0 ? 0 : fail("the other one", theirs);
}

static int flood_child(char **words)
{
    int parent = pvm_parent(), status = want_route(words[1]) || meet(parent, words[1], 1);
    if (status == 0)
        status = exchange(parent, atoi(words[0]) / (PIECE_BYTES >> 20), words[2], 1, 0);
    return send_int(parent, TAG_DONE, status) < 0;
}

static void get_full(void)
{
    struct rlimit few = { DESCRIPTORS, DESCRIPTORS };
    setrlimit(RLIMIT_NOFILE, &few);
    while (open("/dev/null", O_RDONLY) >= 0)
        ;
}

static int send_filled(int tid, int value, int bytes)
{
    static char body[LARGE_BYTES];
    memset(body, value, bytes);
    pvm_initsend(PvmDataRaw);
    pvm_pkbyte(body, bytes, 1);
    return pvm_send(tid, TAG_DATA);
}

static int receive_filled(int tid, int value, int bytes)
{
    static char body[LARGE_BYTES], wanted[LARGE_BYTES];
    memset(wanted, value, bytes);
    return pvm_recv(tid, TAG_DATA) > 0 && pvm_upkbyte(body, bytes, 1) == 0 && memcmp(body, wanted, bytes) == 0;
}

/* Words and large messages, each of which comes back. */
static int talk(int tid, int begins)
{
    for (int i = 0; i < WORDS; i++) {
        for (int large = 0; large <= (i % LARGE_EVERY == 0); large++) {
            int bytes = large ? LARGE_BYTES : WORD_BYTES;
            if (begins && send_filled(tid, i, bytes) < 0)
                return fail("send", i);
            if (!receive_filled(tid, i, bytes))
                return fail("receive", i);
            if (!begins && send_filled(tid, i, bytes) < 0)
                return fail("send", i);
        }
    }
    return 0;
}

static int full(const char *self, char *who)
{
    int child = start(self, "full-child", who);
    if (receive_int(child, TAG_GO) < 0)
        return fail("spawn", child);
    if (!strcmp(who, "here"))
        get_full();
    if (who[0] == '/')
        say_and_wait(who, "ready", "go");
    return talk(child, 1) || receive_int(child, TAG_DONE);
}

static int full_child(const char *who)
{
    if (!strcmp(who, "there"))
        get_full();
    send_int(pvm_parent(), TAG_GO, 1);
    return send_int(pvm_parent(), TAG_DONE, talk(pvm_parent(), 0)) < 0;
}

int main(int argc, char **argv)
{
    const char *role = argc > 2 ? argv[1] : "";
    int status;
    if (pvm_parent() > 0) {
        role = argv[1];
        int number = argc > 2 ? atoi(argv[2]) : 0;
        status = !strcmp(role, "pending-child")       ? pending_child(number)
                 : !strcmp(role, "environment-child") ? environment_child(number)
                 : !strcmp(role, "tasks-child")       ? tasks_child()
                 : !strcmp(role, "full-child")        ? full_child(argv[2])
                 : argc > 4                           ? flood_child(argv + 2)
                                                      : giant_child(number);
        pvm_exit();
        return status;
    }
    status = !strcmp(role, "pending")       ? pending(argv[0], argv[2])
             : !strcmp(role, "environment") ? environment(argv[0], argv[2])
             : !strcmp(role, "tasks")       ? tasks(argv[0], argv[2])
             : !strcmp(role, "giant")       ? giant(argv[0], argv[2])
             : !strcmp(role, "full")        ? full(argv[0], argv[2])
             : argc > 5                     ? flood(argv[0], argv + 2)
                                            : fail("unknown role", argc);
    if (status == 0)
        printf("good\n");
    pvm_exit();
    return status;
}
