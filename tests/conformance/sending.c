/* Sending: pvm_send, pvm_mcast, pvm_psend and pvm_precv. */
#include "conform.h"

/* Sends back whatever comes with tag 1, as ints with the tag and the sender, until tag 0. */
static int echo(int argc, char **argv)
{
    int parent = pvm_parent(), tag, src, id;
    (void)argc, (void)argv;
    tell(parent, 900, 1);
    for (;;) {
        id = pvm_recv(-1, -1);
        pvm_bufinfo(id, NULL, &tag, &src);
        if (tag == 0)
            break;
        pvm_setrbuf(0);
        pvm_setsbuf(id);
        pvm_send(parent, tag + 1000);
        pvm_setsbuf(0);
        pvm_freebuf(id);
    }
    pvm_exit();
    return 0;
}

static const role roles[] = { { "echo", echo }, { NULL, NULL } };
static int kids[3];

static void plain(void)
{
    int k, good, x;
    pvm_initsend(PvmDataDefault);
    is(pvm_send(kids[0], -1), PvmBadParam, "a negative tag is a bad parameter");
    is(pvm_send(0, 1), PvmBadParam, "sending to tid 0 is a bad parameter");
    is(pvm_send(-1, 1), PvmBadParam, "sending to tid -1 is a bad parameter");
    is(pvm_send(pvm_tidtohost(own_tid), 1), PvmBadParam, "sending to a host's tid is a bad parameter");
    is(pvm_send((int)0x80040000, 1), PvmBadParam, "sending to a daemon is a bad parameter");
    is(pvm_send(pvm_tidtohost(own_tid) | 0x3f000, 1), PvmOk, "sending to a task that does not exist returns 0");
    is(pvm_send(0x3ffc0001, 1), PvmOk, "sending to a host that does not exist returns 0");
    is(pvm_send(kids[0], 0x7fffffff - 1000), PvmOk, "a large tag can be sent");
    holds(await(kids[0], 0x7fffffff) > 0, "a message with the largest tag can be received");
    for (k = 0; k < 300; k++)
        tell(kids[0], 7, k);
    for (k = 0, good = 1; k < 300; k++)
        good = await_int(kids[0], 1007, -1) == k && good;
    holds(good, "messages between two tasks keep their order");
    pvm_setopt(PvmResvTids, 1);
    pvm_initsend(PvmDataDefault);
    is(pvm_send(own_tid, -77), PvmOk, "with reserved tids allowed a negative tag can be sent");
    holds(await(own_tid, -77) > 0, "a message with a negative tag can be received");
    pvm_setopt(PvmResvTids, 0);
    x = 9;
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&x, 1, 1);
    pvm_send(kids[0], 8);
    x = 10;
    is(await_int(kids[0], 1008, 0), 9, "the data are copied when they are packed");
}

static void to_many(void)
{
    int all[5] = { kids[0], kids[1], kids[2], kids[1], own_tid }, k, src, id, good = 1;
    pvm_initsend(PvmDataDefault);
    k = 4242;
    pvm_pkint(&k, 1, 1);
    is(pvm_mcast(all, 5, 20), PvmOk, "mcast returns 0");
    for (k = 0; k < 3; k++)
        good = await_int(kids[k], 1020, 0) == 4242 && good;
    holds(good, "mcast reaches every task named");
    is(pvm_nrecv(kids[1], 1020), 0, "mcast sends one message to a task that is named twice");
    is(comes_soon(own_tid, 20), 0, "mcast leaves out the sender");
    is(pvm_mcast(all, 0, 20), PvmOk, "mcast to nobody returns 0");
    is(pvm_mcast(all, -1, 20), PvmBadParam, "mcast of a negative count is a bad parameter");
    is(pvm_mcast(all, 2, -1), PvmBadParam, "mcast of a negative tag is a bad parameter");
    all[1] = -5;
    is(pvm_mcast(all, 2, 21), PvmBadParam, "mcast to a bad tid is a bad parameter");
    is(comes_soon(kids[0], 1021), 0, "a refused mcast sends nothing");
    all[0] = own_tid;
    is(pvm_mcast(all, 1, 22), PvmOk, "mcast to oneself alone returns 0");
    pvm_setsbuf(0);
    is(pvm_mcast(kids, 2, 20), PvmNoBuf, "mcast without an active send buffer finds no buffer");
    pvm_initsend(PvmDataInPlace);
    k = 5;
    pvm_pkint(&k, 1, 1);
    pvm_mcast(kids, 3, 23);
    is(await_int(kids[2], 1023, 0), 5, "mcast sends in-place data");
    all[0] = kids[0];
    all[1] = pvm_tidtohost(own_tid) | 0x3f001;
    pvm_initsend(PvmDataDefault);
    is(pvm_mcast(all, 2, 24), PvmOk, "mcast to a task that does not exist returns 0");
    holds((id = await(kids[0], 1024)) > 0, "mcast reaches the others when one does not exist");
    pvm_bufinfo(id, NULL, NULL, &src);
    is(src, kids[0], "an echoed message has the one who echoed it as its sender");
}

/* Takes what is left of former exchanges. */
static void drain(void)
{
    int k;
    for (k = 0; k < 3; k++) {
        tell(kids[k], 99, 0);
        await(kids[k], 1099);
    }
    while (pvm_nrecv(-1, -1) > 0)
        ;
}

static void at_once(void)
{
    int x[4] = { 1, 2, 3, 4 }, y[4] = { 0 }, tid = 0, tag = 0, len = 0, s, r;
    double d[2] = { 1.5, 2.5 }, e[2] = { 0 };
    struct pvmminfo info;
    s = pvm_initsend(PvmDataDefault);
    is(pvm_psend(kids[0], 30, x, 4, PVM_INT), PvmOk, "psend returns 0");
    is(pvm_getsbuf(), s, "psend leaves the active send buffer alone");
    tell(own_tid, 31, 0);
    r = await(own_tid, 31);
    is(pvm_precv(kids[0], 1030, y, 4, PVM_INT, &tid, &tag, &len), PvmOk, "precv returns 0");
    is(pvm_getrbuf(), r, "precv leaves the active receive buffer alone");
    holds(!memcmp(x, y, sizeof x), "precv gets what psend sent");
    is(tid, kids[0], "precv tells the sender");
    is(tag, 1030, "precv tells the tag");
    is(len, 16, "precv tells the length in bytes");
    pvm_psend(own_tid, 32, x, 4, PVM_INT);
    memset(y, 0, sizeof y);
    is(pvm_precv(own_tid, 32, y, 2, PVM_INT, &tid, &tag, &len), PvmOk, "precv into too small an array returns 0");
    is(len, 16, "precv into too small an array tells the full length");
    holds(y[0] == 1 && y[1] == 2 && y[2] == 0, "precv writes no more than the array holds");
    pvm_psend(own_tid, 33, x, 2, PVM_INT);
    memset(y, 0, sizeof y);
    pvm_precv(own_tid, 33, y, 4, PVM_INT, NULL, NULL, &len);
    is(len, 8, "precv of a shorter message tells its length");
    holds(y[1] == 2 && y[2] == 0, "precv of a shorter message leaves the rest of the array");
    pvm_psend(own_tid, 34, d, 2, PVM_DOUBLE);
    is(pvm_precv(-1, -1, e, 2, PVM_DOUBLE, NULL, NULL, NULL), PvmOk, "precv takes null pointers and wildcards");
    is((long)(e[1] * 10), 25, "psend sends doubles");
    pvm_psend(own_tid, 35, x, 4, PVM_INT);
    pvm_getminfo(await(own_tid, 35), &info);
    is(info.enc, 0x408c41, "psend sends a raw message");
    pvm_upkint(y, 4, 1);
    is(y[3], 4, "a message of psend can be unpacked");
    is(pvm_psend(own_tid, 36, "text", 4, PVM_STR), PvmNotImpl, "psend of a string is not implemented");
    is(pvm_psend(own_tid, 36, x, 1, 99), PvmBadParam, "psend of an unknown type is a bad parameter");
    is(pvm_psend(own_tid, -1, x, 1, PVM_INT), PvmBadParam, "psend of a negative tag is a bad parameter");
    is(pvm_psend(0, 1, x, 1, PVM_INT), PvmBadParam, "psend to tid 0 is a bad parameter");
    is(pvm_psend(own_tid, 36, x, 0, PVM_INT), PvmOk, "psend of nothing returns 0");
    pvm_precv(own_tid, 36, y, 4, PVM_INT, NULL, NULL, &len);
    is(len, 0, "psend of nothing arrives as an empty message");
    tell_all(own_tid, 37, x, 1);
    pvm_precv(own_tid, 37, y, 1, PVM_INT, NULL, NULL, NULL);
    is(y[0], 0x01000000, "precv of a default-encoded message gets its bytes as they travel");
    pvm_psend(own_tid, 38, "abcdef", 6, PVM_BYTE);
    pvm_precv(own_tid, 38, y, 6, PVM_BYTE, NULL, NULL, &len);
    holds(len == 6 && !memcmp(y, "abcdef", 6), "psend sends bytes");
}

static void types(void)
{
    static const struct {
        int type, size;
        const char *sentence;
    } all[] = {
        { PVM_BYTE, 1, "psend counts 1 byte for a byte" },
        { PVM_SHORT, 2, "psend counts 2 bytes for a short" },
        { PVM_INT, 4, "psend counts 4 bytes for an int" },
        { PVM_FLOAT, 4, "psend counts 4 bytes for a float" },
        { PVM_CPLX, 8, "psend counts 8 bytes for a complex" },
        { PVM_DOUBLE, 8, "psend counts 8 bytes for a double" },
        { PVM_DCPLX, 16, "psend counts 16 bytes for a double complex" },
        { PVM_LONG, 8, "psend counts 8 bytes for a long" },
        { PVM_USHORT, 2, "psend counts 2 bytes for an unsigned short" },
        { PVM_UINT, 4, "psend counts 4 bytes for an unsigned int" },
        { PVM_ULONG, 8, "psend counts 8 bytes for an unsigned long" },
    };
    char data[64] = "", back[64];
    size_t k;
    int len;
    for (k = 0; k < sizeof all / sizeof all[0]; k++) {
        len = -1;
        if (pvm_psend(own_tid, 50, data, 3, all[k].type) == PvmOk)
            pvm_precv(own_tid, 50, back, 3, all[k].type, NULL, NULL, &len);
        is(len, 3 * all[k].size, all[k].sentence);
    }
}

static void sentences(void)
{
    int k;
    is(start_as("echo", PvmTaskDefault, NULL, 3, kids), 3, "three children start");
    for (k = 0; k < 3; k++)
        await(kids[k], 900);
    plain();
    to_many();
    drain();
    at_once();
    types();
    for (k = 0; k < 3; k++)
        tell(kids[k], 0, 0);
}
