/*
 * A member of groups that carries out commands, one per argument or, without arguments, per line of standard
 * input. Each command and its result are a line of standard output. The first line tells the task and its process.
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINE_BYTES 256
#define MEMBERS_MAX 16
#define ITEMS 5

/* All of `values` equal to a rule? */
#define HOLDS(count, is, should)                                \
    do {                                                        \
        for (int i_ = 0; i_ < (count); i_++) {                  \
            const int i = i_;                                   \
            if ((is) != (should)) {                             \
                printf("wrong at %d: %s\n", i, #is);            \
                return -999;                                    \
            }                                                   \
        }                                                       \
    } while (0)

/* Gathers, scatters and reduces elements of one type; `n` members, this one is `me`. */
#define TRY(type, code, group, root)                                                                    \
    do {                                                                                                \
        type own[ITEMS], part[ITEMS], all[MEMBERS_MAX * ITEMS];                                         \
        int n = pvm_gsize(group), me = pvm_getinst(group, pvm_mytid()), info;                           \
        for (int i = 0; i < ITEMS; i++)                                                                 \
            own[i] = (type)(10 * me + i);                                                               \
        if ((info = pvm_gather(all, own, ITEMS, code, 31, group, root)) < 0)                            \
            return info;                                                                                \
        if (me == root)                                                                                 \
            HOLDS(n * ITEMS, all[i], (type)(10 * (i / ITEMS) + i % ITEMS));                             \
        if ((info = pvm_scatter(part, all, ITEMS, code, 32, group, root)) < 0)                          \
            return info;                                                                                \
        HOLDS(ITEMS, part[i], own[i]);                                                                  \
        if ((info = pvm_reduce(PvmMax, part, ITEMS, code, 33, group, root)) < 0)                        \
            return info;                                                                                \
        if (me == root)                                                                                 \
            HOLDS(ITEMS, part[i], (type)(10 * (n - 1) + i));                                            \
        memcpy(part, own, sizeof part);                                                                 \
        if ((info = pvm_reduce(PvmMin, part, ITEMS, code, 34, group, root)) < 0)                        \
            return info;                                                                                \
        if (me == root)                                                                                 \
            HOLDS(ITEMS, part[i], (type)i);                                                             \
        if (code == PVM_BYTE)                                                                           \
            break;                                                                                      \
        memcpy(part, own, sizeof part);                                                                 \
        if ((info = pvm_reduce(PvmSum, part, ITEMS, code, 35, group, root)) < 0)                        \
            return info;                                                                                \
        if (me == root)                                                                                 \
            HOLDS(ITEMS, part[i], (type)(5 * n * (n - 1) + n * i));                                     \
    } while (0)

/* Own reduce function: counts the members and keeps the largest, in two places. */
static void count_and_keep(int *type, void *x, void *y, int *count, int *info)
{
    int *a = x, *b = y;

    *info = *type == PVM_INT && *count == 2 ? PvmOk : PvmBadParam;
    a[0] += b[0];
    a[1] = a[1] > b[1] ? a[1] : b[1];
}

/* Complex numbers: 1+i, 2+2i, ...; the largest modulus, the sum, the product. */
static int complex_numbers(char *group, int root)
{
    int n = pvm_gsize(group), me = pvm_getinst(group, pvm_mytid()), info;
    float z[2] = { (float)(me + 1), (float)(me + 1) };
    double w[2] = { 0.0, 1.0 };

    if ((info = pvm_reduce(PvmMax, z, 1, PVM_CPLX, 36, group, root)) < 0)
        return info;
    if (me == root)
        HOLDS(2, z[i], (float)n);
    if ((info = pvm_reduce(PvmProduct, w, 1, PVM_DCPLX, 37, group, root)) < 0)
        return info;
    /* i to the power of n */
    if (me == root) {
        const double re[] = { 1, 0, -1, 0 }, im[] = { 0, 1, 0, -1 };
        if (w[0] != re[n % 4] || w[1] != im[n % 4])
            return -998;
    }
    return PvmOk;
}

/* Every collective call with every type; the program's own buffers and context stay as they are. */
static int collective(char *group, int root)
{
    int pair[2] = { 1, pvm_getinst(group, pvm_mytid()) }, n = pvm_gsize(group), info;
    int sbuf = pvm_initsend(PvmDataDefault), context = pvm_setcontext(77);

    TRY(char, PVM_BYTE, group, root);
    TRY(short, PVM_SHORT, group, root);
    TRY(int, PVM_INT, group, root);
    TRY(float, PVM_FLOAT, group, root);
    TRY(double, PVM_DOUBLE, group, root);
    TRY(long, PVM_LONG, group, root);
    if ((info = complex_numbers(group, root)) < 0)
        return info;
    if ((info = pvm_reduce(count_and_keep, pair, 2, PVM_INT, 38, group, root)) < 0)
        return info;
    if (pvm_getinst(group, pvm_mytid()) == root && (pair[0] != n || pair[1] != n - 1))
        return -997;
    if (pvm_getsbuf() != sbuf || pvm_setcontext(context) != 77)
        return -996;
    return PvmOk;
}

static int handled;

static int handle(int mid)
{
    (void)mid;
    return handled++;
}

/* Counts the messages with a tag that come while this task does something else. */
static int listen(int tag)
{
    return pvm_addmhf(-1, tag, -1, handle) < 0 ? -1 : 0;
}

static int gather(char *group, int root)
{
    int own = pvm_mytid(), all[MEMBERS_MAX];

    return pvm_gather(all, &own, 1, PVM_INT, 39, group, root);
}

/* Waits for its part; the root gives each member a zero. */
static int scatter(char *group, int root)
{
    int own, all[MEMBERS_MAX] = { 0 };

    return pvm_scatter(&own, all, 1, PVM_INT, 40, group, root);
}

static int broadcast(char *group, int tag)
{
    pvm_initsend(PvmDataDefault);
    return pvm_bcast(group, tag);
}

/* Keeps a number in the mailbox, or waits for it there. */
static int keep(char *name, int value)
{
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&value, 1, 1);
    return pvm_putinfo(name, pvm_getsbuf(), PvmMboxPersistent);
}

static int await(char *name)
{
    int value, info = pvm_recvinfo(name, 0, PvmMboxWaitForInfo);

    return info < 0 ? info : pvm_upkint(&value, 1, 1) < 0 ? -995 : value;
}

static int obey(const char *line, int last)
{
    char word[LINE_BYTES] = "", g[LINE_BYTES] = "";
    int n = 0;

    sscanf(line, "%255s %255s %i", word, g, &n);
    if (!strcmp(word, "join")) return pvm_joingroup(g);
    if (!strcmp(word, "leave")) return pvm_lvgroup(g);
    if (!strcmp(word, "size")) return pvm_gsize(g);
    if (!strcmp(word, "inst")) return pvm_getinst(g, n ? n : pvm_mytid());
    if (!strcmp(word, "tid")) return pvm_gettid(g, n);
    if (!strcmp(word, "barrier")) return pvm_barrier(g, n);
    if (!strcmp(word, "freeze")) return pvm_freezegroup(g, n);
    if (!strcmp(word, "bcast")) return broadcast(g, n);
    if (!strcmp(word, "gather")) return gather(g, n);
    if (!strcmp(word, "scatter")) return scatter(g, n);
    if (!strcmp(word, "collective")) return collective(g, n);
    if (!strcmp(word, "recv")) return pvm_recv(-1, atoi(g)) > 0 ? 0 : -1;
    if (!strcmp(word, "listen")) return listen(atoi(g));
    if (!strcmp(word, "handled")) return handled;
    if (!strcmp(word, "keep")) return keep(g, last);
    if (!strcmp(word, "await")) return await(g);
    if (!strcmp(word, "exit")) return pvm_exit();
    return -994;
}

int main(int argc, char **argv)
{
    char line[LINE_BYTES];
    int result = 0;

    setvbuf(stdout, NULL, _IOLBF, 0);
    pvm_setopt(PvmAutoErr, 0);
    printf("task t%x process %d\n", pvm_mytid(), (int)getpid());
    for (int i = 1; i < argc; i++)
        printf("%s = %d\n", argv[i], result = obey(argv[i], result));
    while (argc == 1 && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        printf("%s = %d\n", line, result = obey(line, result));
    }
    return 0;
}
