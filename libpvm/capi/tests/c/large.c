/* Large messages between two tasks of a host, packed in all ways. The program runs as two tasks: "answer" sends every
   message back, and "ask" checks that it is what was sent. */
#include <pvm3.h>

#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

/* The asking task finds the other one each other by this entry of the mailbox. */
#define NAME "large"
#define COUNT (1 << 20)
#define LAST_TAG 99

static double numbers[COUNT], got_numbers[COUNT];
static int ints[COUNT], got_ints[COUNT];

/* Fills the arrays with content that depends on the round. */
static void fill(int round)
{
    int i;

    for (i = 0; i < COUNT; i++) {
        numbers[i] = i * 0.5 + round;
        ints[i] = i * 31 + round;
    }
    memset(got_numbers, 0, sizeof got_numbers);
    memset(got_ints, 0, sizeof got_ints);
}

static void answer(void)
{
    int mid, bytes, tag, tid;

    IS(1, pvm_mytid() > 0);
    IS(1, pvm_initsend(PvmDataDefault) > 0);
    IS(1, pvm_putinfo(NAME, pvm_getsbuf(), PvmMboxDefault) >= 0);
    puts("here");
    fflush(stdout);
    do {
        IS(1, (mid = pvm_recv(-1, -1)) > 0);
        IS(PvmOk, pvm_bufinfo(mid, &bytes, &tag, &tid));
        pvm_setsbuf(mid);
        IS(PvmOk, pvm_send(tid, tag));
        pvm_setsbuf(0);
    } while (tag != LAST_TAG);
    pvm_exit();
}

/* Packs an array in one call, in rows, or as every second element of an array. */
static void pack(int way)
{
    static double sparse[2 * COUNT];
    int i;

    IS(PvmOk, pvm_pkint(ints, 3, 1));
    IS(PvmOk, pvm_pkstr("a text"));
    if (way == 0)
        IS(PvmOk, pvm_pkdouble(numbers, COUNT, 1));
    if (way == 1)
        for (i = 0; i < COUNT; i += COUNT / 512)
            IS(PvmOk, pvm_pkdouble(numbers + i, COUNT / 512, 1));
    if (way == 2) {
        for (i = 0; i < COUNT; i++)
            sparse[2 * i] = numbers[i];
        IS(PvmOk, pvm_pkdouble(sparse, COUNT, 2));
    }
    IS(PvmOk, pvm_pkstr("another text"));
    IS(PvmOk, pvm_pkbyte((char *)ints, 7, 1));
    IS(PvmOk, pvm_pkint(ints, COUNT, 1));
    IS(PvmOk, pvm_pkstr("the last text"));
}

static void check_answer(int tid, int tag)
{
    char text[32], bytes[7];
    int three[3];

    IS(1, pvm_recv(tid, tag) > 0);
    IS(PvmOk, pvm_upkint(three, 3, 1));
    IS(0, memcmp(three, ints, sizeof three));
    IS(PvmOk, pvm_upkstr(text));
    SAYS("a text", text);
    IS(PvmOk, pvm_upkdouble(got_numbers, COUNT, 1));
    IS(0, memcmp(numbers, got_numbers, sizeof numbers));
    IS(PvmOk, pvm_upkstr(text));
    SAYS("another text", text);
    IS(PvmOk, pvm_upkbyte(bytes, 7, 1));
    IS(0, memcmp(bytes, ints, 7));
    IS(PvmOk, pvm_upkint(got_ints, COUNT, 1));
    IS(0, memcmp(ints, got_ints, sizeof ints));
    IS(PvmOk, pvm_upkstr(text));
    SAYS("the last text", text);
    IS(PvmNoData, pvm_upkint(three, 1, 1));
}

/* A child that was forked in the middle of packing continues its copy of the message, and so does its parent. */
static void fork_while_packing(int tid)
{
    int status, half = COUNT / 2, mid;
    pid_t pid;

    fill(1000);
    IS(1, pvm_initsend(PvmDataRaw) > 0);
    IS(PvmOk, pvm_pkdouble(numbers, half, 1));
    pid = fork();
    if (pid == 0) {
        mid = pvm_getsbuf();
        IS(PvmOk, pvm_pkdouble(numbers + half, half, 1));
        pvm_setsbuf(0);
        pvm_setrbuf(mid);
        IS(PvmOk, pvm_upkdouble(got_numbers, COUNT, 1));
        _exit(memcmp(numbers, got_numbers, sizeof numbers) == 0 ? 7 : 1);
    }
    IS(PvmOk, pvm_pkdouble(numbers + half, half, 1));
    IS(pid, waitpid(pid, &status, 0));
    IS(7, WEXITSTATUS(status));
    IS(PvmOk, pvm_send(tid, 5));
    IS(1, pvm_recv(tid, 5) > 0);
    IS(PvmOk, pvm_upkdouble(got_numbers, COUNT, 1));
    IS(0, memcmp(numbers, got_numbers, sizeof numbers));
}

static void ask(void)
{
    int round, tid, mid;

    IS(1, pvm_mytid() > 0);
    IS(1, (mid = pvm_recvinfo(NAME, 0, PvmMboxWaitForInfo)) > 0);
    IS(PvmOk, pvm_bufinfo(mid, 0, 0, &tid));
    for (round = 0; round < 12; round++) {
        fill(round);
        IS(1, pvm_initsend(round % 2 == 0 ? PvmDataRaw : PvmDataDefault) > 0);
        pack(round / 2 % 3);
        IS(PvmOk, pvm_send(tid, 1));
        check_answer(tid, 1);

        /* The buffer is sent again, and then extended. */
        IS(PvmOk, pvm_send(tid, 2));
        IS(PvmOk, pvm_pkint(ints, COUNT, 1));
        memset(got_numbers, 0, sizeof got_numbers);
        memset(got_ints, 0, sizeof got_ints);
        check_answer(tid, 2);

        IS(PvmOk, pvm_psend(tid, 3, ints, COUNT, PVM_INT));
        memset(got_ints, 0, sizeof got_ints);
        IS(PvmOk, pvm_precv(tid, 3, got_ints, COUNT, PVM_INT, 0, 0, 0));
        IS(0, memcmp(ints, got_ints, sizeof ints));

        IS(1, pvm_initsend(PvmDataInPlace) > 0);
        IS(PvmOk, pvm_pkint(ints, COUNT, 1));
        IS(PvmOk, pvm_pkdouble(numbers, COUNT, 1));
        IS(PvmOk, pvm_send(tid, 4));
        memset(got_numbers, 0, sizeof got_numbers);
        memset(got_ints, 0, sizeof got_ints);
        IS(1, pvm_recv(tid, 4) > 0);
        IS(PvmOk, pvm_upkint(got_ints, COUNT, 1));
        IS(PvmOk, pvm_upkdouble(got_numbers, COUNT, 1));
        IS(0, memcmp(ints, got_ints, sizeof ints));
        IS(0, memcmp(numbers, got_numbers, sizeof numbers));
        if (round % 6 == 5)
            fork_while_packing(tid);
    }
    IS(1, pvm_initsend(PvmDataRaw) > 0);
    IS(PvmOk, pvm_send(tid, LAST_TAG));
    IS(1, pvm_recv(tid, LAST_TAG) > 0);
    pvm_exit();
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "answer") == 0)
        answer();
    else
        ask();
    return 0;
}
