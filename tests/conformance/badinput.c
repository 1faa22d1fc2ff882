/* Calls with null pointers, negative numbers and things that do not exist, each in a process of its own. */
#include "conform.h"
#include <pvmtev.h>

/* What a process that makes one call comes to: below this its exit status is the negative of what the call returned. */
#define OTHER 120

static int x = 1, out;
static int *ints;
static char text[64], endless[20001];
static double wide[2];
static char *names[] = { "h1", (char *)1 };

static int packed(void)
{
    int mid = pvm_initsend(PvmDataDefault);
    pvm_pkint(&x, 1, 1);
    pvm_pkstr("text");
    return mid;
}

static int received(void)
{
    packed();
    pvm_send(own_tid, 1);
    return pvm_recv(own_tid, 1);
}

/* Calls a packing function of every type and gives what the first one answers that is not refused. */
#define EVERY_TYPE(verb, place, n)                                                                                     \
    {                                                                                                                  \
        int answers[] = { pvm_##verb##byte((void *)place, n, 1), pvm_##verb##short((void *)place, n, 1),               \
            pvm_##verb##ushort((void *)place, n, 1), pvm_##verb##int((void *)place, n, 1),                             \
            pvm_##verb##uint((void *)place, n, 1), pvm_##verb##long((void *)place, n, 1),                              \
            pvm_##verb##ulong((void *)place, n, 1), pvm_##verb##float((void *)place, n, 1),                            \
            pvm_##verb##double((void *)place, n, 1), pvm_##verb##cplx((void *)place, n, 1),                            \
            pvm_##verb##dcplx((void *)place, n, 1) };                                                                  \
        size_t k;                                                                                                      \
        for (k = 0; k < sizeof answers / sizeof answers[0]; k++)                                                       \
            if (answers[k] != PvmBadParam)                                                                             \
                return answers[k];                                                                                     \
        return PvmBadParam;                                                                                            \
    }

static int pack_all_from_null(void) EVERY_TYPE(pk, NULL, 1)
static int pack_all_negative(void) EVERY_TYPE(pk, &wide, -1)
static int unpack_all_to_null(void) EVERY_TYPE(upk, NULL, 1)
static int unpack_all_negative(void) EVERY_TYPE(upk, &wide, -1)

#define CALLS(call)                                                                                                    \
    call(spawn_null, pvm_spawn(NULL, NULL, 0, NULL, 1, &out), PvmBadParam, "spawn of a null name is a bad parameter")   \
    call(addhosts_null, pvm_addhosts(NULL, 1, &out), PvmBadParam, "addhosts of a null list is a bad parameter")         \
    call(addhosts_huge, pvm_addhosts(names, 5000, &out), PvmBadParam, "addhosts of more hosts than can be is refused")  \
    call(delhosts_null, pvm_delhosts(NULL, 1, &out), PvmBadParam, "delhosts of a null list is a bad parameter")         \
    call(delhosts_huge, pvm_delhosts(names, 5000, &out), PvmBadParam, "delhosts of more hosts than can be is refused")  \
    call(pkint_null, (packed(), pvm_pkint(NULL, 1, 1)), PvmBadParam, "packing ints from null is a bad parameter")       \
    call(pkbyte_null, (packed(), pvm_pkbyte(NULL, 1, 1)), PvmBadParam, "packing bytes from null is a bad parameter")    \
    call(pkdouble_null, (packed(), pvm_pkdouble(NULL, 1, 1)), PvmBadParam,                                              \
        "packing doubles from null is a bad parameter")                                                                \
    call(pk_null, (packed(), pack_all_from_null()), PvmBadParam, "packing any type from null is a bad parameter")       \
    call(pk_negative, (packed(), pack_all_negative()), PvmBadParam,                                                     \
        "packing a negative count of any type is a bad parameter")                                                     \
    call(upk_null, (received(), unpack_all_to_null()), PvmBadParam, "unpacking any type to null is a bad parameter")    \
    call(upk_negative, (received(), unpack_all_negative()), PvmBadParam,                                                \
        "unpacking a negative count of any type is a bad parameter")                                                   \
    call(mstat_long, pvm_mstat(endless), PvmNoHost, "mstat of a name of twenty thousand letters finds no such host")    \
    call(spawn_long, pvm_spawn(endless, NULL, 0, NULL, 1, &out), 0, "spawn of an endless name starts nothing")          \
    call(spawn_where, pvm_spawn("x", NULL, PvmTaskHost, endless, 1, &out), 0, "spawn on an endless host starts nothing") \
    call(archcode_long, pvm_archcode(endless), PvmNotFound, "archcode of an endless name finds none")                   \
    call(recvinfo_long, pvm_recvinfo(endless, 0, 0), PvmNotFound, "recvinfo of an endless name finds none")             \
    call(putinfo_long, pvm_putinfo(endless, packed(), 0), 0, "putinfo takes an endless name")                           \
    call(delinfo_huge, pvm_delinfo("a", 0x7fffffff, 0), PvmNotFound, "delinfo of a huge index finds none")              \
    call(lookup_huge, pvm_lookup("a", 0x7fffffff, &out), PvmNotFound, "lookup of a huge index finds none")              \
    call(gsize_long, pvm_gsize(endless), PvmNoGroup, "the size of a group with an endless name finds no group")         \
    call(hostsync_negative, pvm_hostsync(-1, NULL, NULL), PvmNoHost, "hostsync of a negative tid finds no such host")   \
    call(kill_huge, pvm_kill(0x7fffffff), PvmBadParam, "kill of a huge tid is a bad parameter")                         \
    call(pstat_huge, pvm_pstat(0x7fffffff), PvmBadParam, "pstat of a huge tid is a bad parameter")                      \
    call(send_huge, (packed(), pvm_send(0x7fffffff, 1)), PvmBadParam, "sending to a huge tid is a bad parameter")       \
    call(freecontext_huge, pvm_freecontext(0x7fffffff), PvmNotFound, "freecontext of a huge context finds none")        \
    call(setrbuf_huge, pvm_setrbuf(0x7fffffff), PvmNoSuchBuf, "setrbuf of a huge id finds no such buffer")              \
    call(delmhf_huge, pvm_delmhf(0x7fffffff), PvmNotFound, "delmhf of a huge id finds none")                            \
    call(pkstr_null, (packed(), pvm_pkstr(NULL)), PvmBadParam, "packing a null string is a bad parameter")              \
    call(pkint_none, (packed(), pvm_pkint(NULL, 0, 1)), PvmOk, "packing no ints from null returns 0")                   \
    call(upkint_null, (received(), pvm_upkint(NULL, 1, 1)), PvmBadParam, "unpacking ints to null is a bad parameter")   \
    call(upkstr_null, (received(), pvm_upkint(&out, 1, 1), pvm_upkstr(NULL)), PvmBadParam, "unpacking a string to null is a bad parameter")     \
    call(packf_null, (packed(), pvm_packf(NULL)), PvmBadParam, "packf of a null format is a bad parameter")             \
    call(unpackf_null, (received(), pvm_unpackf(NULL)), PvmBadParam, "unpackf of a null format is a bad parameter")     \
    call(mcast_null, (packed(), pvm_mcast(NULL, 1, 1)), PvmBadParam, "mcast to a null list is a bad parameter")         \
    call(psend_null, pvm_psend(own_tid, 1, NULL, 1, PVM_INT), PvmBadParam, "psend from null is a bad parameter")        \
    call(psend_negative, pvm_psend(own_tid, 1, &x, -1, PVM_INT), PvmBadParam,                                           \
        "psend of a negative count is a bad parameter")                                                                \
    call(precv_null, (pvm_psend(own_tid, 1, &x, 1, PVM_INT), pvm_precv(-1, 1, NULL, 1, PVM_INT, NULL, NULL, NULL)),     \
        PvmBadParam, "precv to null is a bad parameter")                                                               \
    call(precv_type, (pvm_psend(own_tid, 1, &x, 1, PVM_INT), pvm_precv(-1, 1, &out, 1, 99, NULL, NULL, NULL)),          \
        PvmBadParam, "precv of an unknown type is a bad parameter")                                                    \
    call(precv_str, (pvm_psend(own_tid, 1, &x, 1, PVM_INT), pvm_precv(-1, 1, &out, 1, PVM_STR, NULL, NULL, NULL)),      \
        PvmNotImpl, "precv of a string is not implemented")                                                            \
    call(precv_negative, (pvm_psend(own_tid, 1, &x, 1, PVM_INT), pvm_precv(-1, 1, &out, -1, PVM_INT, NULL, NULL, NULL)), \
        PvmBadParam, "precv of a negative count is a bad parameter")                                                   \
    call(notify_null, pvm_notify(PvmTaskExit, 1, 1, NULL), PvmBadParam, "notify of a null list is a bad parameter")     \
    call(notify_kind, pvm_notify(77, 1, 1, &own_tid), PvmBadParam, "notify of an unknown kind is a bad parameter")      \
    call(notify_tag, pvm_notify(PvmTaskExit, -1, 1, &own_tid), PvmBadParam, "notify of a negative tag is a bad parameter") \
    call(putinfo_null, pvm_putinfo(NULL, packed(), 0), PvmBadParam, "putinfo of a null name is a bad parameter")        \
    call(putinfo_empty, pvm_putinfo("", packed(), 0), PvmBadParam, "putinfo of an empty name is a bad parameter")       \
    call(putinfo_buffer, pvm_putinfo("a", 4711, 0), PvmNoSuchBuf, "putinfo of an unknown buffer finds no such buffer")  \
    call(recvinfo_null, pvm_recvinfo(NULL, 0, 0), PvmBadParam, "recvinfo of a null name is a bad parameter")            \
    call(recvinfo_negative, pvm_recvinfo("a", -1, 0), PvmBadParam, "recvinfo of a negative index is a bad parameter")   \
    call(delinfo_null, pvm_delinfo(NULL, 0, 0), PvmBadParam, "delinfo of a null name is a bad parameter")               \
    call(delinfo_negative, pvm_delinfo("a", -1, 0), PvmBadParam, "delinfo of a negative index is a bad parameter")      \
    call(mboxinfo_null, pvm_getmboxinfo(NULL, NULL, NULL), PvmOk, "getmboxinfo takes null pointers")                    \
    call(insert_null, pvm_insert(NULL, 0, 1), PvmBadParam, "insert of a null name is a bad parameter")                  \
    call(lookup_null, pvm_lookup(NULL, 0, &out), PvmBadParam, "lookup of a null name is a bad parameter")               \
    call(delete_null, pvm_delete(NULL, 0), PvmBadParam, "delete of a null name is a bad parameter")                     \
    call(getminfo_null, pvm_getminfo(packed(), NULL), PvmBadParam, "getminfo to null is a bad parameter")               \
    call(setminfo_null, pvm_setminfo(packed(), NULL), PvmBadParam, "setminfo from null is a bad parameter")             \
    call(getfds_null, pvm_getfds(NULL), PvmBadParam, "getfds to null is a bad parameter")                               \
    call(addmhf_null, pvm_addmhf(-1, 5, 0, NULL), PvmBadParam, "addmhf of a null function is a bad parameter")          \
    call(export_null, pvm_export(NULL), PvmBadParam, "export of a null name is a bad parameter")                        \
    call(unexport_null, pvm_unexport(NULL), PvmBadParam, "unexport of a null name is a bad parameter")                  \
    call(tickle_none, pvm_tickle(0, &x, &out, NULL), PvmBadParam, "tickle of no numbers is a bad parameter")            \
    call(tickle_many, pvm_tickle(11, &x, &out, NULL), PvmBadParam, "tickle of eleven numbers is a bad parameter")       \
    call(gettmask_who, pvm_gettmask(7, text), PvmBadParam, "gettmask of neither self nor child is a bad parameter")     \
    call(settmask_who, pvm_settmask(7, text), PvmBadParam, "settmask of neither self nor child is a bad parameter")     \
    call(pkmesg_negative, (packed(), pvm_pkmesg(-1)), PvmBadParam, "packing a message of a negative id is a bad parameter") \
    call(perror_null, pvm_perror(NULL), PvmOk, "perror takes a null pointer")                                           \
    call(noresets_null, pvm_getnoresets(NULL, NULL), PvmOk, "getnoresets takes null pointers")             \
    call(archcode_empty, pvm_archcode(""), PvmNotFound, "archcode of an empty name finds none")                         \
    call(mkbuf_huge, pvm_mkbuf(0x7fffffff), PvmBadParam, "mkbuf of a huge encoding is a bad parameter")                 \
    call(setopt_none, pvm_setopt(0, 1), PvmBadParam, "setopt of option 0 is a bad parameter")                           \
    call(setopt_huge, pvm_setopt(0x7fffffff, 1), PvmBadParam, "setopt of a huge option is a bad parameter")             \
    call(getopt_none, pvm_getopt(0), PvmBadParam, "getopt of option 0 is a bad parameter")                              \
    call(getopt_negative, pvm_getopt(-1), PvmBadParam, "getopt of a negative option is a bad parameter")                \
    call(recv_negative, pvm_recv(-2, 1), PvmBadParam, "recv from tid -2 is a bad parameter")                            \
    call(precv_tid, pvm_precv(-2, 1, &out, 1, PVM_INT, NULL, NULL, NULL), PvmBadParam,                                  \
        "precv from tid -2 is a bad parameter")                                                                        \
    call(pkint_no_room, (packed(), pvm_pkint(&x, -2147483647, 1)), PvmBadParam, "packing a huge negative count is refused") \
    call(join_null, pvm_joingroup(NULL), PvmNullGroup, "joining a null group is a null group")                          \
    call(join_empty, pvm_joingroup(""), PvmNullGroup, "joining a group without a name is a null group")                 \
    call(leave_null, pvm_lvgroup(NULL), PvmNullGroup, "leaving a null group is a null group")                           \
    call(size_null, pvm_gsize(NULL), PvmNullGroup, "the size of a null group is a null group")                          \
    call(barrier_null, pvm_barrier(NULL, 1), PvmNullGroup, "a barrier of a null group is a null group")                 \
    call(bcast_null, (packed(), pvm_bcast(NULL, 1)), PvmNullGroup, "a broadcast to a null group is a null group")

#define FUNCTION(name, expression, wanted, sentence) static int name(void) { return expression; }
CALLS(FUNCTION)

static const struct {
    const char *name, *sentence;
    int (*call)(void);
    int wanted;
} all[] = {
#define LINE(name, expression, wanted, sentence) { #name, sentence, name, wanted },
    CALLS(LINE)
};

static int one(int argc, char **argv)
{
    int result;
    size_t k;
    (void)argc, (void)ints;
    alarm(4);
    memset(endless, 'x', sizeof endless - 1);
    own_tid = pvm_mytid();
    for (k = 0; k < sizeof all / sizeof all[0]; k++)
        if (!strcmp(all[k].name, argv[2])) {
            result = all[k].call();
            _exit(result <= 0 && result > -OTHER ? -result : OTHER);
        }
    return OTHER;
}

static const role roles[] = { { "one", one }, { NULL, NULL } };

static void sentences(void)
{
    size_t k;
    for (k = 0; k < sizeof all / sizeof all[0]; k++) {
        int status = 0, quiet;
        pid_t child = fork();
        if (child == 0) {
            quiet = open("/dev/null", O_WRONLY);
            dup2(quiet, 1);
            dup2(quiet, 2);
            execlp("/proc/self/exe", own_name, "one", all[k].name, NULL);
            _exit(OTHER);
        }
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status))
            printf("not ok %s: got signal %d, wanted %d\n", all[k].sentence, WTERMSIG(status), all[k].wanted);
        else if (WEXITSTATUS(status) == 99)
            printf("not ok %s: got no answer, wanted %d\n", all[k].sentence, all[k].wanted);
        else
            is(-WEXITSTATUS(status), all[k].wanted, all[k].sentence);
    }
}
