/* Functions for tasks, options, contexts and the mailbox. */

#include "fortran.h"

int pvmsleep(int seconds);

void pvmfmytid_(int *tid) { *tid = pvm_mytid(); }
void pvmfparent_(int *tid) { *tid = pvm_parent(); }
void pvmfexit_(int *info) { *info = pvm_exit(); }
void pvmfkill_(int *tid, int *info) { *info = pvm_kill(*tid); }
void pvmfpstat_(int *tid, int *status) { *status = pvm_pstat(*tid); }
void pvmfsendsig_(int *tid, int *sig, int *info) { *info = pvm_sendsig(*tid, *sig); }
void pvmfgetopt_(int *what, int *value) { *value = pvm_getopt(*what); }
void pvmfsetopt_(int *what, int *value, int *old) { *old = pvm_setopt(*what, *value); }
void pvmfcatchout_(int *onoff, int *info) { *info = pvm_catchout(*onoff ? stdout : NULL); }
void pvmfsleep_(int *seconds) { pvmsleep(*seconds); }

void pvmfperror_(char *text, int *info, int length)
{
    WITH_TEXT(said, text, length, info, pvm_perror(said));
}

void pvmfnotify_(int *what, int *tag, int *count, int *tids, int *info)
{
    *info = pvm_notify(*what, *tag, *count, tids);
}

/* A `where` that begins with a star means any host. */
void pvmfspawn_(char *file, int *flags, char *where, int *count, int *tids, int *started, int file_length,
                int where_length)
{
    char program[TEXT_BYTES], place[TEXT_BYTES];

    if (ftocstr(program, sizeof program, file, file_length) < 0
        || ftocstr(place, sizeof place, where, where_length) < 0) {
        *started = PvmBadParam;
        return;
    }
    *started = pvm_spawn(program, NULL, *flags, place[0] == '*' ? NULL : place, *count, tids);
}

/* Returns one task of the spawn that started this task. The list is requested from the daemon only once. */
void pvmfsiblings_(int *count, int *index, int *tid)
{
    static int known = -1;
    static int *tids;

    if (known < 0)
        known = pvm_siblings(&tids);
    *count = known;
    *tid = *index >= 0 && *index < known ? tids[*index] : PvmNoTask;
}

/* Returns one task of a list per call. Starts again after the last one, or if the count is passed as -1. */
void pvmftasks_(int *where, int *count, int *tid, int *parent, int *host, int *flag, char *name, int *info, int length)
{
    static struct pvmtaskinfo *tasks;
    static int known, next;

    if (*count == -1)
        next = 0;
    if (next == 0) {
        *info = pvm_tasks(*where, &known, &tasks);
        if (*info < 0)
            return;
    }
    *info = PvmOk;
    *count = known;
    if (next >= known) {
        next = 0;
        return;
    }
    *tid = tasks[next].ti_tid;
    *parent = tasks[next].ti_ptid;
    *host = tasks[next].ti_host;
    *flag = tasks[next].ti_flag;
    ctofstr(name, length, tasks[next].ti_a_out);
    next = (next + 1) % known;
}

void pvmfgetcontext_(int *ctx) { *ctx = pvm_getcontext(); }
void pvmfnewcontext_(int *ctx) { *ctx = pvm_newcontext(); }
void pvmfsetcontext_(int *ctx, int *old) { *old = pvm_setcontext(*ctx); }
void pvmffreecontext_(int *ctx, int *info) { *info = pvm_freecontext(*ctx); }

void pvmfputinfo_(char *name, int *mid, int *flags, int *index, int length)
{
    WITH_TEXT(class, name, length, index, pvm_putinfo(class, *mid, *flags));
}

void pvmfrecvinfo_(char *name, int *index, int *flags, int *mid, int length)
{
    WITH_TEXT(class, name, length, mid, pvm_recvinfo(class, *index, *flags));
}

void pvmfdelinfo_(char *name, int *index, int *flags, int *info, int length)
{
    WITH_TEXT(class, name, length, info, pvm_delinfo(class, *index, *flags));
}

/* Returns one mailbox class per call, as pvmftasks does. The arrays must be long enough for its entries. */
void pvmfgetmboxinfo_(char *pattern, char *name, int *count, int *entries, int *indices, int *owners, int *flags,
                      int *info, int pattern_length, int name_length)
{
    static struct pvmmboxinfo *classes;
    static int known, next;
    int i;

    if (*count == -1)
        next = 0;
    if (next == 0) {
        WITH_TEXT(wanted, pattern, pattern_length, info, pvm_getmboxinfo(wanted, &known, &classes));
        if (*info < 0)
            return;
    }
    *info = PvmOk;
    *count = known;
    if (next >= known) {
        *entries = 0;
        next = 0;
        return;
    }
    ctofstr(name, name_length, classes[next].mi_name);
    *entries = classes[next].mi_nentries;
    for (i = 0; i < *entries; i++) {
        indices[i] = classes[next].mi_indices[i];
        owners[i] = classes[next].mi_owners[i];
        flags[i] = classes[next].mi_flags[i];
    }
    next = (next + 1) % known;
}
