/* Functions for hosts and daemons. */

#include "fortran.h"
#include <string.h>

/* Maximum number of arguments of a daemon. */
#define WORDS_MAX (TEXT_BYTES / 2)

void pvmfhalt_(int *info) { *info = pvm_halt(); }
void pvmftidtohost_(int *tid, int *host) { *host = pvm_tidtohost(*tid); }

static int add(char *name)
{
    int status, info = pvm_addhosts(&name, 1, &status);

    return info < 0 ? info : status;
}

static int del(char *name)
{
    int status, info = pvm_delhosts(&name, 1, &status);

    return info < 0 ? info : status;
}

void pvmfaddhost_(char *host, int *info, int length)
{
    WITH_TEXT(name, host, length, info, add(name));
}

void pvmfdelhost_(char *host, int *info, int length)
{
    WITH_TEXT(name, host, length, info, del(name));
}

void pvmfmstat_(char *host, int *status, int length)
{
    WITH_TEXT(name, host, length, status, pvm_mstat(name));
}

void pvmfarchcode_(char *arch, int *code, int length)
{
    WITH_TEXT(name, arch, length, code, pvm_archcode(name));
}

void pvmfhostsync_(int *host, int *clock_seconds, int *clock_micros, int *delta_seconds, int *delta_micros, int *info)
{
    struct timeval clock, delta;

    *info = pvm_hostsync(*host, &clock, &delta);
    if (*info < 0)
        return;
    *clock_seconds = (int)clock.tv_sec;
    *clock_micros = (int)clock.tv_usec;
    *delta_seconds = (int)delta.tv_sec;
    *delta_micros = (int)delta.tv_usec;
}

/* Returns one host of the table per call. Starts again after the last one, or if the count is passed as -1. */
void pvmfconfig_(int *count, int *formats, int *tid, char *name, char *arch, int *speed, int *info, int name_length,
                 int arch_length)
{
    static struct pvmhostinfo *hosts;
    static int known, kinds, next;

    if (count && *count == -1)
        next = 0;
    if (next == 0) {
        int asked = pvm_config(&known, &kinds, &hosts);
        if (info)
            *info = asked;
        if (asked < 0 || known < 1)
            return;
    }
    if (info)
        *info = PvmOk;
    if (count)
        *count = known;
    if (formats)
        *formats = kinds;
    if (tid)
        *tid = hosts[next].hi_tid;
    if (name)
        ctofstr(name, name_length, hosts[next].hi_name);
    if (arch)
        ctofstr(arch, arch_length, hosts[next].hi_arch);
    if (speed)
        *speed = hosts[next].hi_speed;
    next = (next + 1) % known;
}

static int start(char *words, int block)
{
    char *argv[WORDS_MAX + 1], *rest = NULL, *word;
    int argc = 0;

    for (word = strtok_r(words, " ", &rest); word && argc < WORDS_MAX; word = strtok_r(NULL, " ", &rest))
        argv[argc++] = word;
    argv[argc] = NULL;
    return pvm_start_pvmd(argc, argv, block);
}

void pvmfstartpvmd_(char *args, int *block, int *info, int length)
{
    WITH_TEXT(words, args, length, info, start(words, *block));
}
