/* Group functions. Programs that use them must link with libgpvm3 as well. */

#include "fortran.h"

typedef void reducer(int *type, void *x, void *y, int *count, int *info);

void pvmfjoingroup_(char *group, int *instance, int length)
{
    WITH_TEXT(name, group, length, instance, pvm_joingroup(name));
}

void pvmflvgroup_(char *group, int *info, int length)
{
    WITH_TEXT(name, group, length, info, pvm_lvgroup(name));
}

void pvmfgsize_(char *group, int *size, int length)
{
    WITH_TEXT(name, group, length, size, pvm_gsize(name));
}

void pvmfgetinst_(char *group, int *tid, int *instance, int length)
{
    WITH_TEXT(name, group, length, instance, pvm_getinst(name, *tid));
}

void pvmfgettid_(char *group, int *instance, int *tid, int length)
{
    WITH_TEXT(name, group, length, tid, pvm_gettid(name, *instance));
}

void pvmfbarrier_(char *group, int *count, int *info, int length)
{
    WITH_TEXT(name, group, length, info, pvm_barrier(name, *count));
}

void pvmfbcast_(char *group, int *tag, int *info, int length)
{
    WITH_TEXT(name, group, length, info, pvm_bcast(name, *tag));
}

void pvmffreezegroup_(char *group, int *size, int *info, int length)
{
    WITH_TEXT(name, group, length, info, pvm_freezegroup(name, *size));
}

void pvmfgather_(void *result, void *data, int *count, int *type, int *tag, char *group, int *root, int *info,
                 int length)
{
    WITH_TEXT(name, group, length, info, pvm_gather(result, data, *count, *type, *tag, name, *root));
}

void pvmfscatter_(void *result, void *data, int *count, int *type, int *tag, char *group, int *root, int *info,
                  int length)
{
    WITH_TEXT(name, group, length, info, pvm_scatter(result, data, *count, *type, *tag, name, *root));
}

void pvmfreduce_(reducer *function, void *data, int *count, int *type, int *tag, char *group, int *root, int *info,
                 int length)
{
    WITH_TEXT(name, group, length, info, pvm_reduce(function, data, *count, *type, *tag, name, *root));
}

void pvmmax_(int *type, void *x, void *y, int *count, int *info) { PvmMax(type, x, y, count, info); }
void pvmmin_(int *type, void *x, void *y, int *count, int *info) { PvmMin(type, x, y, count, info); }
void pvmsum_(int *type, void *x, void *y, int *count, int *info) { PvmSum(type, x, y, count, info); }
void pvmproduct_(int *type, void *x, void *y, int *count, int *info) { PvmProduct(type, x, y, count, info); }
