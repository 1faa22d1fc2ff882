/* Tests the calls that work without a daemon: buffers, packing, options, errors. */
#include <stdio.h>
#include <pvm3.h>
#include <unistd.h>
#include "check.h"

static int packed(int encoding, int (*pack)(void))
{
    int len = -1, mid = pvm_initsend(encoding);

    IS(0, pack());
    IS(0, pvm_bufinfo(mid, &len, NULL, NULL));
    return len;
}

static char bytes[8] = "abcdefg";
static short shorts[3] = {1, -2, 3};
static int ints[3] = {1, -2, 3};
static long longs[3] = {1, -2, 1L << 40};
static float floats[6] = {1.5, 2.5, 3.5, 4.5, 5.5, 6.5};
static double doubles[6] = {1.5, 2.5, 3.5, 4.5, 5.5, 6.5};

static int byte5(void) { return pvm_pkbyte(bytes, 5, 1); }
static int short3(void) { return pvm_pkshort(shorts, 3, 1); }
static int ushort3(void) { return pvm_pkushort((unsigned short *)shorts, 3, 1); }
static int int3(void) { return pvm_pkint(ints, 3, 1); }
static int uint3(void) { return pvm_pkuint((unsigned *)ints, 3, 1); }
static int long3(void) { return pvm_pklong(longs, 3, 1); }
static int ulong3(void) { return pvm_pkulong((unsigned long *)longs, 3, 1); }
static int float3(void) { return pvm_pkfloat(floats, 3, 1); }
static int double3(void) { return pvm_pkdouble(doubles, 3, 1); }
static int cplx3(void) { return pvm_pkcplx(floats, 3, 1); }
static int dcplx3(void) { return pvm_pkdcplx(doubles, 3, 1); }
static int str(void) { return pvm_pkstr("hello"); }

static void sizes(void)
{
    IS(8, packed(PvmDataDefault, byte5));
    IS(5, packed(PvmDataRaw, byte5));
    IS(12, packed(PvmDataDefault, short3));
    IS(6, packed(PvmDataRaw, short3));
    IS(12, packed(PvmDataDefault, ushort3));
    IS(6, packed(PvmDataRaw, ushort3));
    IS(12, packed(PvmDataDefault, int3));
    IS(12, packed(PvmDataRaw, int3));
    IS(12, packed(PvmDataDefault, uint3));
    IS(12, packed(PvmDataRaw, uint3));
    IS(24, packed(PvmDataDefault, long3));
    IS(24, packed(PvmDataRaw, long3));
    IS(24, packed(PvmDataDefault, ulong3));
    IS(12, packed(PvmDataDefault, float3));
    IS(12, packed(PvmDataRaw, float3));
    IS(24, packed(PvmDataDefault, double3));
    IS(24, packed(PvmDataRaw, double3));
    IS(24, packed(PvmDataDefault, cplx3));
    IS(24, packed(PvmDataRaw, cplx3));
    IS(48, packed(PvmDataDefault, dcplx3));
    IS(48, packed(PvmDataRaw, dcplx3));
    IS(12, packed(PvmDataDefault, str));
    IS(10, packed(PvmDataRaw, str));
    IS(0, packed(PvmDataInPlace, int3));
}

/* A packed buffer can be read after it has become the receive buffer. */
static void round_trip(int encoding)
{
    int i, mid, got[6] = {0};
    long wide[3];
    float pairs[12] = {0};
    double d[3];
    char text[16], some[8];
    unsigned short us[3];

    mid = pvm_initsend(encoding);
    IS(0, pvm_pkint(ints, 2, 2));
    IS(0, pvm_pklong(longs, 3, 1));
    IS(0, pvm_pkcplx(floats, 2, 2));
    IS(0, pvm_pkdouble(doubles, 3, 2));
    IS(0, pvm_pkstr("some text"));
    IS(0, pvm_pkbyte(bytes, 3, 2));
    IS(0, pvm_pkushort((unsigned short *)shorts, 3, 1));
    IS(mid, pvm_getsbuf());
    IS(0, pvm_setrbuf(mid));
    IS(0, pvm_getsbuf());
    IS(0, pvm_upkint(got, 2, 3));
    IS(1, got[0]);
    IS(3, got[3]);
    IS(0, got[1]);
    IS(0, pvm_upklong(wide, 3, 1));
    IS(-2, wide[1]);
    IS(1L << 40, wide[2]);
    IS(mid, pvm_setrbuf(0));
    IS(0, pvm_setrbuf(mid));
    IS(0, pvm_upkcplx(pairs, 2, 3));
    IS(1, pairs[0] == 1.5f && pairs[1] == 2.5f && pairs[6] == 5.5f && pairs[7] == 6.5f);
    IS(0, pvm_upkdouble(d, 3, 1));
    IS(1, d[0] == 1.5 && d[1] == 3.5 && d[2] == 5.5);
    IS(0, pvm_upkstr(text));
    SAYS("some text", text);
    IS(0, pvm_upkbyte(some, 3, 1));
    IS(0, memcmp(some, "ace", 3));
    IS(0, pvm_upkushort(us, 3, 1));
    IS(65534, us[1]);
    IS(PvmNoData, pvm_upkint(&i, 1, 1));
    SAYS("End of buffer", pvm_strerror());
    IS(0, pvm_freebuf(mid));
    IS(0, pvm_getrbuf());
    IS(PvmNoBuf, pvm_upkint(&i, 1, 1));
}

static void formats(void)
{
    int i, n = 2, mid, many[4] = {1, 2, 3, 4}, back[4] = {0};
    short h;
    long l;
    float f;
    double d;
    unsigned u;
    float x[2] = {1, 2}, y[2];
    char c[2], text[16];

    IS(0, pvm_packf("%+ %d %hd, %ld %f %lf %u %c %s %x", PvmDataDefault, -5, 7, 1L << 40, 1.5, 2.5, 9u, 'q', "text",
                    x));
    IS(0, pvm_packf("%*d%2.3d", n, many, many));
    mid = pvm_getsbuf();
    pvm_setrbuf(mid);
    IS(0, pvm_unpackf("%d %hd %ld %f %lf %u %c %s %x", &i, &h, &l, &f, &d, &u, c, text, y));
    IS(-5, i);
    IS(7, h);
    IS(1L << 40, l);
    IS(1, f == 1.5f && d == 2.5 && u == 9 && c[0] == 'q' && y[0] == 1 && y[1] == 2);
    SAYS("text", text);
    IS(0, pvm_unpackf("%2d %*.*d", back, 2, 2, back));
    IS(1, back[0]);
    IS(4, back[2]);
    IS(PvmBadParam, pvm_packf("%z", 1));
    IS(PvmNoBuf, pvm_packf("%d", 1));
    IS(0, pvm_packf("%+", PvmDataInPlace));
    IS(0, pvm_packf("%d %s", 1, "in place"));
    IS(0, pvm_freebuf(pvm_getsbuf()));
}

static void messages_in_messages(void)
{
    int inner, outer, n = 0, len;

    inner = pvm_mkbuf(PvmDataDefault);
    IS(0, pvm_setsbuf(inner));
    IS(0, pvm_pkint(ints, 3, 1));
    outer = pvm_mkbuf(PvmDataDefault);
    IS(inner, pvm_setsbuf(outer));
    IS(PvmBadParam, pvm_pkmesg(outer));
    IS(PvmNoSuchBuf, pvm_pkmesg(9999));
    IS(0, pvm_pkmesg(inner));
    IS(0, pvm_bufinfo(outer, &len, NULL, NULL));
    IS(32 + 4 + 12, len);
    IS(0, pvm_pkmesgbody(inner));
    IS(0, pvm_bufinfo(outer, &len, NULL, NULL));
    IS(32 + 4 + 12 + 12, len);
    pvm_setrbuf(0);
    IS(0, pvm_setrbuf(outer));
    n = pvm_upkmesg();
    IS(1, n > 0 && n != outer && n != inner);
    IS(outer, pvm_setrbuf(n));
    IS(0, pvm_upkint(&n, 1, 1));
    IS(1, n);
    pvm_setsbuf(pvm_mkbuf(PvmDataRaw));
    IS(PvmMismatch, pvm_pkmesgbody(inner));
}

static int length_of(int mid)
{
    int bytes = -1;

    IS(0, pvm_bufinfo(mid, &bytes, NULL, NULL));
    return bytes;
}

/* A buffer begins alike in new memory and in the memory of the previous send buffer. */
static void reused_memory(void)
{
    int encodings[] = {PvmDataDefault, PvmDataRaw, PvmDataInPlace, PvmDataTrace}, i, mid, length, number = 1;

    for (i = 0; i < 4; i++) {
        mid = pvm_mkbuf(encodings[i]);
        length = length_of(mid);
        IS(0, pvm_freebuf(mid));
        pvm_initsend(PvmDataRaw);
        IS(0, pvm_pkint(&number, 1, 1));
        IS(length, length_of(pvm_initsend(encodings[i])));
    }
}

static void errors(void)
{
    int i = 0, mid = pvm_initsend(PvmDataDefault);
    struct pvmminfo info;

    IS(PvmBadParam, pvm_mkbuf(3));
    IS(PvmBadParam, pvm_initsend(99));
    IS(mid, pvm_getsbuf());
    IS(PvmBadParam, pvm_pkint(&i, -1, 1));
    IS(PvmBadParam, pvm_pkint(NULL, 1, 1));
    IS(0, pvm_pkint(NULL, 0, 1));
    IS(PvmBadParam, pvm_pkstr(NULL));
    IS(PvmBadParam, pvm_freebuf(-1));
    IS(0, pvm_freebuf(0));
    IS(PvmNoSuchBuf, pvm_freebuf(12345));
    IS(PvmBadParam, pvm_bufinfo(0, &i, &i, &i));
    IS(PvmNoSuchBuf, pvm_bufinfo(12345, &i, &i, &i));
    IS(PvmBadParam, pvm_setsbuf(-2));
    IS(PvmNoSuchBuf, pvm_setrbuf(4711));
    IS(PvmBadParam, pvm_getminfo(mid, NULL));
    IS(0, pvm_getminfo(mid, &info));
    IS(0x10000000, info.enc);
    info.wid = 42;
    IS(0, pvm_setminfo(mid, &info));
    info.wid = 0;
    IS(0, pvm_getminfo(mid, &info));
    IS(42, info.wid);
    pvm_initsend(PvmDataInPlace);
    IS(PvmNotImpl, pvm_pkint(&i, 2, 2));
    IS(PvmNotImpl, pvm_pkstr("x"));
    IS(PvmSysErr, pvm_tickle(0, NULL, NULL, NULL));
    IS(PvmSysErr, pvm_reg_tasker());
    IS(PvmSysErr, pvm_reg_hoster());
    IS(PvmSysErr, pvm_reg_tracer(0, 0, 0, 0, NULL, 0, 0));
    IS(PvmNotFound, pvm_delmhf(99));
    IS(PvmBadParam, pvm_delmhf(-1));
    IS(PvmBadParam, pvm_gettmask(2, NULL));
}

static void options(void)
{
    char mask[36];
    int (*before)(int, int, int);

    IS(PvmAllowDirect, pvm_setopt(PvmRoute, PvmDontRoute));
    IS(PvmDontRoute, pvm_getopt(PvmRoute));
    IS(PvmBadParam, pvm_setopt(PvmRoute, 7));
    IS(PvmBadParam, pvm_getopt(PvmPollType));
    IS(PvmNotImpl, pvm_setopt(PvmPollType, 1));
    IS(PvmBadParam, pvm_setopt(PvmNoReset, 1));
    IS(4080, pvm_setopt(PvmFragSize, 100));
    IS(1, pvm_getopt(PvmShowTids));
    IS(0, pvm_gettmask(PvmTaskSelf, mask));
    IS('@', mask[34]);
    IS(0, mask[35]);
    IS(0, pvm_settmask(PvmTaskChild, mask));
    SAYS("3.4.6", pvm_version());
    IS(0x80000, pvm_tidtohost(0x80005));
    IS(0, pvm_setcontext(7));
    IS(7, pvm_getcontext());
    IS(7, pvm_setcontext(0));
    before = pvm_recvf(NULL);
    IS(1, before != NULL);
    IS(1, pvm_recvf(before) == before);
    IS(0, pvm_export("ONE"));
    IS(0, pvm_export("TWO"));
    IS(0, pvm_export("ONE"));
    SAYS("ONE:TWO", getenv("PVM_EXPORT"));
    IS(0, pvm_unexport("ONE"));
    SAYS("TWO", getenv("PVM_EXPORT"));
    IS(0, pvm_exit());
}

static void no_daemon(void)
{
    struct timeval tv = {0, 0};

    pvm_initsend(PvmDataDefault);
    IS(PvmSysErr, pvm_mytid());
    IS(PvmSysErr, pvm_parent());
    IS(PvmSysErr, pvm_send(0x40001, 1));
    IS(PvmSysErr, pvm_mcast(NULL, -1, 1));
    IS(PvmSysErr, pvm_recv(-1, -1));
    IS(PvmSysErr, pvm_nrecv(-1, -1));
    IS(PvmSysErr, pvm_trecv(-1, -1, &tv));
    IS(PvmSysErr, pvm_probe(-1, -1));
    IS(PvmSysErr, pvm_spawn("x", NULL, 0, NULL, 1, NULL));
    IS(PvmSysErr, pvm_config(NULL, NULL, NULL));
    IS(PvmSysErr, pvm_tasks(0, NULL, NULL));
    IS(PvmSysErr, pvm_notify(PvmTaskExit, 1, 0, NULL));
    IS(PvmSysErr, pvm_siblings(NULL));
    IS(PvmSysErr, pvm_newcontext());
    IS(PvmSysErr, pvm_putinfo(NULL, 1, 0));
    IS(PvmSysErr, pvm_catchout(stdout));
    IS(PvmSysErr, pvm_addhosts(NULL, 1, NULL));
    IS(PvmSysErr, pvm_halt());
}

int main(int argc, char **argv)
{
    (void)argv;
    /* Ends a test that hangs. */
    alarm(60);
    if (argc > 1) {
        /* Makes the calls whose error lines the test reads. */
        printf("%d\n", pvm_mytid());
        fflush(stdout);
        pvm_perror("I");
        pvm_setopt(PvmAutoErr, 0);
        pvm_send(-1, 1);
        pvm_setopt(PvmAutoErr, 2);
        pvm_freebuf(4711);
        printf("not reached\n");
        return 0;
    }
    pvm_setopt(PvmAutoErr, 0);
    sizes();
    round_trip(PvmDataDefault);
    round_trip(PvmDataRaw);
    formats();
    messages_in_messages();
    reused_memory();
    errors();
    options();
    no_daemon();
    return 0;
}
