/*
 * pvm3.h - the C interface of a parallel virtual machine.
 *
 * Source and binary compatible with version 3.4.6 of PVM. Programs include this header and link with -lpvm3.
 * Unless stated otherwise, a call returns 0 or a positive result, and one of the negative error codes below on failure.
 */
#ifndef _PVM3_H_
#define _PVM3_H_

#include <stdio.h>
#include <sys/time.h>

/* The version of the interface. */
#define PVM_VER "3.4.6"
#define PVM_MAJOR_VERSION 3
#define PVM_MINOR_VERSION 4
#define PVM_PATCH_VERSION 6

/* ---- Encodings of messages: pvm_initsend, pvm_mkbuf ---- */

#define PvmDataDefault 0                /* portable (XDR) */
#define PvmDataRaw     1                /* memory layout of this machine */
#define PvmDataInPlace 2                /* raw; memory is read when the message is sent */
#define PvmDataFoo     PvmDataDefault
#define PvmDataTrace   4                /* a user-defined trace event */

/* ---- Where to start tasks: pvm_spawn ---- */

#define PvmTaskDefault    0
#define PvmTaskHost       1             /* on the named host */
#define PvmTaskArch       2             /* on hosts of the named architecture */
#define PvmTaskDebug      4             /* under a debugger */
#define PvmTaskTrace      8
#define PvmMppFront      16
#define PvmHostCompl     32             /* on all other hosts */
#define PvmNoSpawnParent 64             /* hides the parent from the task */

/* ---- Events: pvm_notify ---- */

#define PvmTaskExit       1
#define PvmHostDelete     2
#define PvmHostAdd        3
#define PvmRouteAdd       4
#define PvmRouteDelete    5
#define PvmNotifyCancel 256             /* added to an event: cancels the request */

/* ---- Options: pvm_getopt, pvm_setopt ---- */

#define PvmRoute              1
#define PvmDontRoute          1
#define PvmAllowDirect        2
#define PvmRouteDirect        3
#define PvmDebugMask          2
#define PvmAutoErr            3
#define PvmOutputTid          4
#define PvmOutputCode         5
#define PvmTraceTid           6
#define PvmTraceCode          7
#define PvmTraceBuffer        8
#define PvmTraceOptions       9
#define PvmTraceFull          1
#define PvmTraceTime          2
#define PvmTraceCount         3
#define PvmFragSize          10
#define PvmResvTids          11
#define PvmSelfOutputTid     12
#define PvmSelfOutputCode    13
#define PvmSelfTraceTid      14
#define PvmSelfTraceCode     15
#define PvmSelfTraceBuffer   16
#define PvmSelfTraceOptions  17
#define PvmShowTids          18
#define PvmPollType          19
#define PvmPollConstant       1
#define PvmPollSleep          2
#define PvmPollTime          20
#define PvmOutputContext     21
#define PvmTraceContext      22
#define PvmSelfOutputContext 23
#define PvmSelfTraceContext  24
#define PvmNoReset           25

/* ---- Owner of the trace mask: pvm_gettmask, pvm_settmask ---- */

#define PvmTaskSelf  0
#define PvmTaskChild 1

/* ---- Contexts ---- */

#define PvmBaseContext 0

/* ---- Mailbox flags: pvm_putinfo, pvm_recvinfo ---- */

#define PvmMboxDefault         0
#define PvmMboxPersistent      1        /* stays after the exit of its owner */
#define PvmMboxMultiInstance   2        /* adds an entry to those of the class */
#define PvmMboxOverWritable    4        /* other tasks may replace it */
#define PvmMboxFirstAvail      8        /* the first entry at or after an index */
#define PvmMboxReadAndDelete  16
#define PvmMboxWaitForInfo    32        /* waits until there is an entry */
#define PvmMboxMaxFlag       512
#define PvmMboxDirectIndexShift 10
#define PvmMboxMaxDirectIndex ((unsigned)1 << (31 - PvmMboxDirectIndexShift))
#define PvmMboxDirectIndex(index_) \
    ((unsigned)(index_) < PvmMboxMaxDirectIndex ? (index_) << PvmMboxDirectIndexShift \
     : (fprintf(stderr, "Mbox Direct Index Too Large: %d >= %d\n", (int)(index_), (int)PvmMboxMaxDirectIndex), 0))
#define PvmMboxDirectIndexOf(flags_) \
    (((flags_) >> PvmMboxDirectIndexShift) & (PvmMboxMaxDirectIndex - 1))

/* Mailbox classes with a special meaning. */
#define PVMNORESETCLASS "###_PVM_NO_RESET_###"
#define PVMHOSTERCLASS  "###_PVM_HOSTER_###"
#define PVMTASKERCLASS  "###_PVM_TASKER_###"
#define PVMTRACERCLASS  "###_PVM_TRACER_###"
#define PVMRMCLASS      "###_PVM_RM_###"

/* ---- Types of data: pvm_psend, pvm_precv, pvm_reduce, pvm_gather, pvm_scatter ---- */

#define PVM_STR     0
#define PVM_BYTE    1
#define PVM_SHORT   2
#define PVM_INT     3
#define PVM_FLOAT   4
#define PVM_CPLX    5
#define PVM_DOUBLE  6
#define PVM_DCPLX   7
#define PVM_LONG    8
#define PVM_USHORT  9
#define PVM_UINT   10
#define PVM_ULONG  11

/* ---- Error codes ---- */

#define PvmOk             0
#define PvmBadParam      -2             /* an argument is out of range */
#define PvmMismatch      -3             /* arguments of a collective call differ */
#define PvmOverflow      -4             /* a value does not fit */
#define PvmNoData        -5             /* read past the end of the message */
#define PvmNoHost        -6             /* no such host */
#define PvmNoFile        -7             /* no such executable */
#define PvmDenied        -8             /* not allowed */
#define PvmNoMem        -10             /* out of memory */
#define PvmBadMsg       -12             /* the message is malformed */
#define PvmSysErr       -14             /* the daemon does not answer */
#define PvmNoBuf        -15             /* no active buffer */
#define PvmNoSuchBuf    -16             /* no buffer with this number */
#define PvmNullGroup    -17             /* the group name is null */
#define PvmDupGroup     -18             /* already in the group */
#define PvmNoGroup      -19             /* no such group */
#define PvmNotInGroup   -20             /* not in the group */
#define PvmNoInst       -21             /* no such instance in the group */
#define PvmHostFail     -22             /* the host failed */
#define PvmNoParent     -23             /* the task has no parent */
#define PvmNotImpl      -24             /* not available here */
#define PvmDSysErr      -25             /* the daemon failed */
#define PvmBadVersion   -26             /* versions differ */
#define PvmOutOfRes     -27             /* a limit was reached */
#define PvmDupHost      -28             /* the host has already been added */
#define PvmCantStart    -29             /* the daemon could not be started */
#define PvmAlready      -30             /* another task does this already */
#define PvmNoTask       -31             /* no such task */
#define PvmNotFound     -32             /* no entry with this name */
#define PvmExists       -33             /* already exists */
#define PvmHostrNMstr   -34             /* a hoster must run on the master's host */
#define PvmParentNotSet -35             /* the parent hid itself (PvmNoSpawnParent) */
#define PvmIPLoopback   -36             /* the master's address is a loopback address */
#define PvmNoEntry      PvmNotFound
#define PvmDupEntry     PvmDenied

/* Size of the buffer for a name made by pvmtmpnam. */
#define PVMTMPNAMLEN 128
#define PVMTMPNAMFUN(place_) pvmtmpnam(place_)

/* ---- Records ---- */

struct pvmhostinfo {                    /* a host: pvm_config, pvm_reg_rm */
    int hi_tid;
    char *hi_name;
    char *hi_arch;
    int hi_speed;
    int hi_dsig;                        /* data signature: layout of numbers */
};

struct pvmtaskinfo {                    /* a task: pvm_tasks */
    int ti_tid;
    int ti_ptid;
    int ti_host;
    int ti_flag;
    char *ti_a_out;
    int ti_pid;
};

struct pvmminfo {                       /* the header of a message: pvm_getminfo, pvm_setminfo */
    int len;
    int ctx;
    int tag;
    int wid;
    int enc;
    int crc;
    int src;
    int dst;
};

struct pvmmboxinfo {                    /* a class of the mailbox: pvm_getmboxinfo */
    char *mi_name;
    int mi_nentries;
    int *mi_indices;
    int *mi_owners;
    int *mi_flags;
};

#ifdef __cplusplus
extern "C" {
#endif

/* ---- This task ---- */

int pvm_mytid(void);
int pvm_parent(void);
int pvm_exit(void);
int pvm_siblings(int **tids);
int pvm_getopt(int what);
int pvm_setopt(int what, int value);
int pvm_catchout(FILE *stream);
int pvm_getfds(int **fds);
int pvm_gettmask(int who, char *mask);
int pvm_settmask(int who, char *mask);
int pvm_export(char *name);
int pvm_unexport(char *name);
int pvm_perror(char *text);
char *pvm_strerror(void);
char *pvm_version(void);
extern int pvm_errno;

/* ---- Other tasks ---- */

int pvm_spawn(char *file, char **argv, int flags, char *where, int count, int *tids);
int pvm_kill(int tid);
int pvm_sendsig(int tid, int signal);
int pvm_pstat(int tid);
int pvm_tasks(int where, int *count, struct pvmtaskinfo **tasks);
int pvm_notify(int what, int tag, int count, int *vals);
int pvm_getnoresets(int **tids, int *count);

/* ---- Hosts ---- */

int pvm_addhosts(char **names, int count, int *status);
int pvm_delhosts(char **names, int count, int *status);
int pvm_config(int *hosts, int *formats, struct pvmhostinfo **list);
int pvm_mstat(char *name);
int pvm_archcode(char *arch);
int pvm_tidtohost(int tid);
int pvm_hostsync(int host, struct timeval *clock, struct timeval *delta);
int pvm_halt(void);
int pvm_start_pvmd(int argc, char **argv, int block);
int pvm_tickle(int count, int *args, int *results, int *result);

/* ---- Message buffers ---- */

int pvm_initsend(int encoding);
int pvm_mkbuf(int encoding);
int pvm_freebuf(int mid);
int pvm_getsbuf(void);
int pvm_getrbuf(void);
int pvm_setsbuf(int mid);
int pvm_setrbuf(int mid);
int pvm_bufinfo(int mid, int *len, int *tag, int *src);
int pvm_getminfo(int mid, struct pvmminfo *info);
int pvm_setminfo(int mid, struct pvmminfo *info);

/* ---- Packing; strides count in elements ---- */

int pvm_packf(const char *format, ...);
int pvm_pkbyte(char *items, int count, int stride);
int pvm_pkcplx(float *items, int count, int stride);
int pvm_pkdcplx(double *items, int count, int stride);
int pvm_pkdouble(double *items, int count, int stride);
int pvm_pkfloat(float *items, int count, int stride);
int pvm_pkint(int *items, int count, int stride);
int pvm_pkuint(unsigned int *items, int count, int stride);
int pvm_pklong(long *items, int count, int stride);
int pvm_pkulong(unsigned long *items, int count, int stride);
int pvm_pkshort(short *items, int count, int stride);
int pvm_pkushort(unsigned short *items, int count, int stride);
int pvm_pkstr(char *text);
int pvm_pkmesg(int mid);
int pvm_pkmesgbody(int mid);

int pvm_unpackf(const char *format, ...);
int pvm_upkbyte(char *items, int count, int stride);
int pvm_upkcplx(float *items, int count, int stride);
int pvm_upkdcplx(double *items, int count, int stride);
int pvm_upkdouble(double *items, int count, int stride);
int pvm_upkfloat(float *items, int count, int stride);
int pvm_upkint(int *items, int count, int stride);
int pvm_upkuint(unsigned int *items, int count, int stride);
int pvm_upklong(long *items, int count, int stride);
int pvm_upkulong(unsigned long *items, int count, int stride);
int pvm_upkshort(short *items, int count, int stride);
int pvm_upkushort(unsigned short *items, int count, int stride);
int pvm_upkstr(char *text);
int pvm_upkmesg(void);

/* ---- Sending and receiving; -1 as tid or tag means any ---- */

int pvm_send(int tid, int tag);
int pvm_mcast(int *tids, int count, int tag);
int pvm_psend(int tid, int tag, void *items, int count, int type);
int pvm_recv(int tid, int tag);
int pvm_nrecv(int tid, int tag);
int pvm_trecv(int tid, int tag, struct timeval *time);
int pvm_probe(int tid, int tag);
int pvm_precv(int tid, int tag, void *items, int count, int type, int *from_tid, int *from_tag, int *from_len);
int (*pvm_recvf(int (*matcher)(int mid, int tid, int tag)))(int mid, int tid, int tag);
int pvm_addmhf(int src, int tag, int ctx, int (*handler)(int mid));
int pvm_delmhf(int mhid);

/* ---- Contexts ---- */

int pvm_getcontext(void);
int pvm_setcontext(int ctx);
int pvm_newcontext(void);
int pvm_freecontext(int ctx);

/* ---- The mailbox ---- */

int pvm_putinfo(char *name, int mid, int flags);
int pvm_recvinfo(char *name, int index, int flags);
int pvm_delinfo(char *name, int index, int flags);
int pvm_getmboxinfo(char *pattern, int *count, struct pvmmboxinfo **classes);
int pvm_insert(char *name, int index, int value);
int pvm_lookup(char *name, int index, int *value);
int pvm_delete(char *name, int index);

/* ---- Roles in running the virtual machine ---- */

int pvm_reg_rm(struct pvmhostinfo **master);
int pvm_reg_hoster(void);
int pvm_reg_tasker(void);
int pvm_reg_tracer(int trace_ctx, int trace_tag, int out_ctx, int out_tag, char *mask, int buffer, int options);

/* ---- Groups (link with -lgpvm3 as well) ---- */

int pvm_joingroup(char *group);
int pvm_lvgroup(char *group);
int pvm_getinst(char *group, int tid);
int pvm_gettid(char *group, int instance);
int pvm_gsize(char *group);
int pvm_barrier(char *group, int count);
int pvm_bcast(char *group, int tag);
int pvm_freezegroup(char *group, int size);
int pvm_gather(void *result, void *data, int count, int type, int tag, char *group, int root);
int pvm_scatter(void *result, void *data, int count, int type, int tag, char *group, int root);
int pvm_reduce(void (*function)(int *type, void *x, void *y, int *count, int *info), void *data, int count, int type,
               int tag, char *group, int root);
void PvmMax(int *type, void *x, void *y, int *count, int *info);
void PvmMin(int *type, void *x, void *y, int *count, int *info);
void PvmSum(int *type, void *x, void *y, int *count, int *info);
void PvmProduct(int *type, void *x, void *y, int *count, int *info);

/* ---- Utilities ---- */

char *pvmgettmp(void);
char *pvmgetrsh(void);
char *pvmtmpnam(char *place);

#ifdef __cplusplus
}
#endif

#endif /* _PVM3_H_ */
