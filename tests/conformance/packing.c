/* Packing and unpacking: types, sizes, strides, encodings, whole messages, formats, errors. */
#include "conform.h"

static const role roles[] = { { NULL, NULL } };

static int length(void)
{
    int len = -1;
    pvm_bufinfo(pvm_getsbuf(), &len, NULL, NULL);
    return len;
}

static int loop(int tag)
{
    pvm_send(own_tid, tag);
    return await(own_tid, tag);
}

static void every_type_in(int encoding, const char *all_whole)
{
    char c[5] = { 'a', 0, -1, 'd', 127 }, C[5];
    short s[3] = { -32768, 0, 32767 }, S[3];
    unsigned short us[2] = { 0, 65535 }, US[2];
    int i[3] = { -2147483647 - 1, -1, 2147483647 }, I[3];
    unsigned u[2] = { 0, 4294967295u }, U[2];
    long l[2] = { 100, 2147483647 }, L[2];
    unsigned long ul[2] = { 0, 4294967295ul }, UL[2];
    float f[3] = { -1.5f, 0, 3.25e30f }, F[3];
    double d[3] = { -1.5, 1e-300, 1e300 }, D[3];
    float x[4] = { 1, 2, 3, 4 }, X[4];
    double z[4] = { 5, 6, 7, 8 }, Z[4];
    char t[32];
    pvm_initsend(encoding);
    pvm_pkbyte(c, 5, 1);
    pvm_pkshort(s, 3, 1);
    pvm_pkushort(us, 2, 1);
    pvm_pkint(i, 3, 1);
    pvm_pkuint(u, 2, 1);
    pvm_pklong(l, 2, 1);
    pvm_pkulong(ul, 2, 1);
    pvm_pkfloat(f, 3, 1);
    pvm_pkdouble(d, 3, 1);
    pvm_pkcplx(x, 2, 1);
    pvm_pkdcplx(z, 2, 1);
    pvm_pkstr("a text");
    pvm_pkstr("");
    loop(1);
    int good = !pvm_upkbyte(C, 5, 1) && !memcmp(c, C, 5);
    good = !pvm_upkshort(S, 3, 1) && !memcmp(s, S, sizeof s) && good;
    good = !pvm_upkushort(US, 2, 1) && !memcmp(us, US, sizeof us) && good;
    good = !pvm_upkint(I, 3, 1) && !memcmp(i, I, sizeof i) && good;
    good = !pvm_upkuint(U, 2, 1) && !memcmp(u, U, sizeof u) && good;
    good = !pvm_upklong(L, 2, 1) && !memcmp(l, L, sizeof l) && good;
    good = !pvm_upkulong(UL, 2, 1) && !memcmp(ul, UL, sizeof ul) && good;
    good = !pvm_upkfloat(F, 3, 1) && !memcmp(f, F, sizeof f) && good;
    good = !pvm_upkdouble(D, 3, 1) && !memcmp(d, D, sizeof d) && good;
    good = !pvm_upkcplx(X, 2, 1) && !memcmp(x, X, sizeof x) && good;
    good = !pvm_upkdcplx(Z, 2, 1) && !memcmp(z, Z, sizeof z) && good;
    good = !pvm_upkstr(t) && !strcmp(t, "a text") && good;
    good = !pvm_upkstr(t) && !strcmp(t, "") && good;
    holds(good, all_whole);
}

#define GROWS(call, bytes, sentence) (before = length(), call, is(length() - before, bytes, sentence))

static void sizes(void)
{
    char c[8] = "1234567";
    short s[3] = { 0 };
    unsigned short us[3] = { 0 };
    int i[3] = { 0 }, before;
    unsigned u[3] = { 0 };
    long l[3] = { 0 };
    unsigned long ul[3] = { 0 };
    float f[6] = { 0 };
    double d[6] = { 0 };
    pvm_initsend(PvmDataDefault);
    GROWS(pvm_pkbyte(c, 5, 1), 8, "bytes take a multiple of 4 per call in the default encoding");
    GROWS(pvm_pkshort(s, 3, 1), 12, "a short takes 4 bytes in the default encoding");
    GROWS(pvm_pkushort(us, 3, 1), 12, "an unsigned short takes 4 bytes in the default encoding");
    GROWS(pvm_pkint(i, 3, 1), 12, "an int takes 4 bytes in the default encoding");
    GROWS(pvm_pkuint(u, 3, 1), 12, "an unsigned int takes 4 bytes in the default encoding");
    GROWS(pvm_pklong(l, 3, 1), 24, "a long takes 8 bytes in the default encoding");
    GROWS(pvm_pkulong(ul, 3, 1), 24, "an unsigned long takes 8 bytes in the default encoding");
    GROWS(pvm_pkfloat(f, 3, 1), 12, "a float takes 4 bytes in the default encoding");
    GROWS(pvm_pkdouble(d, 3, 1), 24, "a double takes 8 bytes in the default encoding");
    GROWS(pvm_pkcplx(f, 3, 1), 24, "a complex takes 8 bytes in the default encoding");
    GROWS(pvm_pkdcplx(d, 3, 1), 48, "a double complex takes 16 bytes in the default encoding");
    GROWS(pvm_pkstr("12345"), 12, "a string takes its length, its bytes and padding in the default encoding");
    GROWS(pvm_pkint(i, 0, 1), 0, "packing no items adds nothing");
    pvm_initsend(PvmDataRaw);
    GROWS(pvm_pkbyte(c, 5, 1), 5, "a byte takes 1 byte in the raw encoding");
    GROWS(pvm_pkshort(s, 3, 1), 6, "a short takes 2 bytes in the raw encoding");
    GROWS(pvm_pkushort(us, 3, 1), 6, "an unsigned short takes 2 bytes in the raw encoding");
    GROWS(pvm_pkint(i, 3, 1), 12, "an int takes 4 bytes in the raw encoding");
    GROWS(pvm_pkuint(u, 3, 1), 12, "an unsigned int takes 4 bytes in the raw encoding");
    GROWS(pvm_pklong(l, 3, 1), 24, "a long takes 8 bytes in the raw encoding");
    GROWS(pvm_pkulong(ul, 3, 1), 24, "an unsigned long takes 8 bytes in the raw encoding");
    GROWS(pvm_pkfloat(f, 3, 1), 12, "a float takes 4 bytes in the raw encoding");
    GROWS(pvm_pkdouble(d, 3, 1), 24, "a double takes 8 bytes in the raw encoding");
    GROWS(pvm_pkcplx(f, 3, 1), 24, "a complex takes 8 bytes in the raw encoding");
    GROWS(pvm_pkdcplx(d, 3, 1), 48, "a double complex takes 16 bytes in the raw encoding");
    GROWS(pvm_pkstr("12345"), 10, "a string takes its length and its bytes in the raw encoding");
}

static void longs(void)
{
    long l[2] = { -2, 0x123456789abcdefL }, got[2] = { 0, 0 };
    unsigned long ul = 0xfedcba9876543210ul, ugot = 0;
    pvm_initsend(PvmDataDefault);
    pvm_pklong(l, 2, 1);
    pvm_pkulong(&ul, 1, 1);
    loop(1);
    pvm_upklong(got, 2, 1);
    pvm_upkulong(&ugot, 1, 1);
    is(got[0], -2, "a negative long stays negative in the default encoding");
    is(got[1], 0x123456789abcdefL, "a long keeps its high half in the default encoding");
    is((long)ugot, (long)ul, "an unsigned long keeps its high half in the default encoding");
    pvm_initsend(PvmDataRaw);
    pvm_pklong(l, 2, 1);
    loop(1);
    pvm_upklong(got, 2, 1);
    is(got[1], l[1], "a long keeps its high half in the raw encoding");
}

static void strides(void)
{
    int in[9] = { 0, 1, 2, 3, 4, 5, 6, 7, 8 }, out[9], k;
    double pairs[12] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }, back[12] = { 0 };
    char bytes[6] = "abcdef", letters[4] = "";
    memset(out, -1, sizeof out);
    pvm_initsend(PvmDataDefault);
    pvm_pkint(in, 3, 3);
    loop(1);
    pvm_upkint(out, 3, 1);
    holds(out[0] == 0 && out[1] == 3 && out[2] == 6, "a stride of 3 packs every third item");
    pvm_initsend(PvmDataRaw);
    pvm_pkint(in, 3, 3);
    loop(1);
    memset(out, -1, sizeof out);
    pvm_upkint(out, 3, 1);
    holds(out[0] == 0 && out[1] == 3 && out[2] == 6, "a stride works in the raw encoding");
    pvm_initsend(PvmDataDefault);
    pvm_pkint(in, 3, 1);
    loop(1);
    memset(out, -1, sizeof out);
    pvm_upkint(out, 3, 2);
    holds(out[0] == 0 && out[2] == 1 && out[4] == 2, "a stride of 2 unpacks to every second item");
    holds(out[1] == -1 && out[3] == -1, "unpacking with a stride leaves what lies between");
    pvm_initsend(PvmDataDefault);
    pvm_pkdcplx(pairs, 2, 2);
    loop(1);
    pvm_upkdcplx(back, 2, 1);
    holds(back[0] == 0 && back[1] == 1 && back[2] == 4 && back[3] == 5, "strides of complex numbers count pairs");
    pvm_initsend(PvmDataDefault);
    pvm_pkbyte(bytes, 3, 2);
    loop(1);
    pvm_upkbyte(letters, 3, 1);
    reads(letters, "ace", "bytes can be packed with a stride");
    pvm_initsend(PvmDataDefault);
    for (k = 0; k < 3; k++)
        pvm_pkint(in + k, 1, 1);
    loop(1);
    memset(out, -1, sizeof out);
    pvm_upkint(out, 3, 1);
    holds(out[0] == 0 && out[1] == 1 && out[2] == 2, "items packed one by one can be unpacked together");
}

static void ends_and_errors(void)
{
    int x[4] = { 1, 2, 3, 4 }, y[4] = { 0 }, id;
    char text[16] = "";
    char joined[8] = "";
    pvm_initsend(PvmDataDefault);
    is(pvm_pkint(x, -1, 1), PvmBadParam, "packing a negative count is a bad parameter");
    is(pvm_pkbyte(text, -1, 1), PvmBadParam, "packing a negative count of bytes is a bad parameter");
    is(pvm_pkint(x, 0, 1), PvmOk, "packing no items returns 0");
    pvm_pkint(x, 2, 1);
    loop(1);
    is(pvm_upkint(y, -1, 1), PvmBadParam, "unpacking a negative count is a bad parameter");
    is(pvm_upkint(y, 0, 1), PvmOk, "unpacking no items returns 0");
    is(pvm_upkint(y, 3, 1), PvmNoData, "unpacking past the end finds no data");
    holds(y[0] == 1 && y[1] == 2, "what there was is unpacked before the end is noticed");
    is(pvm_upkint(y, 1, 1), PvmNoData, "at the end there is no data");
    is(pvm_upkstr(text), PvmNoData, "at the end there is no string");
    pvm_initsend(PvmDataDefault);
    pvm_pkbyte("abc", 3, 1);
    pvm_pkbyte("def", 3, 1);
    loop(1);
    pvm_upkbyte(joined, 6, 1);
    holds(!memcmp(joined, "abc", 3) && !memcmp(joined + 4, "de", 2), "bytes packed in two calls have padding between them");
    pvm_initsend(PvmDataDefault);
    pvm_pkstr("abcd");
    loop(1);
    is(pvm_upkint(y, 1, 1), PvmOk, "unpacking another type than was packed succeeds");
    is(y[0], 5, "a string begins with its length, the end included");
    pvm_initsend(PvmDataRaw);
    pvm_pkint(x, 2, 1);
    loop(1);
    is(pvm_upkint(y, 3, 1), PvmNoData, "unpacking past the end of a raw message finds no data");
    pvm_initsend(PvmDataDefault);
    loop(1);
    id = pvm_getrbuf();
    pvm_bufinfo(id, x, NULL, NULL);
    is(x[0], 0, "an empty message has length 0");
    is(pvm_upkint(y, 1, 1), PvmNoData, "an empty message has no data");
}

static void large(void)
{
    int n = 300000, k, good = 1, len = 0;
    int *many = malloc(n * sizeof *many);
    for (k = 0; k < n; k++)
        many[k] = k * 7;
    pvm_initsend(PvmDataDefault);
    pvm_pkint(many, n, 1);
    is(length(), 4 * n, "a long message counts all its bytes");
    loop(1);
    pvm_bufinfo(pvm_getrbuf(), &len, NULL, NULL);
    is(len, 4 * n, "a long message arrives in full length");
    memset(many, 0, n * sizeof *many);
    is(pvm_upkint(many, n, 1), PvmOk, "a long message is unpacked in one call");
    for (k = 0; k < n; k++)
        good = good && many[k] == k * 7;
    holds(good, "a long message is whole");
    pvm_initsend(PvmDataRaw);
    pvm_pkint(many, n, 1);
    loop(1);
    memset(many, 0, n * sizeof *many);
    for (k = 0, good = 1; k + 1000 <= n; k += 1000)
        good = good && !pvm_upkint(many + k, 1000, 1);
    for (k = 0; k < n; k++)
        good = good && many[k] == k * 7;
    holds(good, "a long raw message can be unpacked in parts");
    free(many);
}

static void in_place(void)
{
    int x[4] = { 1, 2, 3, 4 }, y[4] = { 0 }, len = -1;
    struct pvmminfo info;
    pvm_initsend(PvmDataInPlace);
    is(pvm_pkint(x, 4, 1), PvmOk, "in-place packing returns 0");
    is(pvm_pkint(x, 2, 2), PvmNotImpl, "in-place packing with a stride is not implemented");
    is(pvm_pkstr("text"), PvmNotImpl, "in-place packing of a string is not implemented");
    is(length(), 0, "an in-place buffer has length 0 at its sender");
    x[2] = 33;
    loop(1);
    pvm_bufinfo(pvm_getrbuf(), &len, NULL, NULL);
    is(len, 16, "an in-place message has its length at the receiver");
    pvm_upkint(y, 4, 1);
    is(y[2], 33, "in-place data are read when the message is sent");
    pvm_getminfo(pvm_getrbuf(), &info);
    is(info.enc, 0x408c41, "an in-place message arrives as a raw one");
    x[2] = 44;
    loop(2);
    pvm_upkint(y, 4, 1);
    is(y[2], 44, "in-place data are read again at each send");
}

static void whole_messages(void)
{
    int inner, outer, got, x = 55, y = 0, len;
    char text[16] = "";
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&x, 1, 1);
    pvm_pkstr("inner");
    pvm_send(own_tid, 41);
    inner = await(own_tid, 41);
    pvm_setrbuf(0);
    outer = pvm_initsend(PvmDataDefault);
    is(pvm_pkmesg(outer), PvmBadParam, "a message cannot be packed into itself");
    is(pvm_pkmesg(99999), PvmNoSuchBuf, "packing an unknown message finds no such buffer");
    is(pvm_pkmesg(inner), PvmOk, "a message can be packed into another");
    len = length();
    is(len, 32 + 4 + 16, "a packed message counts its head, its fragments and its body");
    pvm_pkint(&x, 1, 1);
    loop(42);
    got = pvm_upkmesg();
    holds(got > 0, "upkmesg returns a new buffer");
    y = 0;
    pvm_upkint(&y, 1, 1);
    is(y, 55, "unpacking goes on behind a packed message");
    pvm_setrbuf(got);
    pvm_upkint(&y, 1, 1);
    pvm_upkstr(text);
    reads(text, "inner", "a message taken out of another has its body");
    pvm_bufinfo(got, NULL, &y, &x);
    is(y, 41, "a message taken out of another has its tag");
    is(x, own_tid, "a message taken out of another has its sender");
    pvm_freebuf(got);
    pvm_initsend(PvmDataDefault);
    x = 56;
    pvm_pkint(&x, 1, 1);
    is(pvm_pkmesgbody(inner), PvmOk, "the body of a message can be appended");
    loop(43);
    pvm_upkint(&y, 1, 1);
    pvm_upkint(&x, 1, 1);
    pvm_upkstr(text);
    holds(y == 56 && x == 55 && !strcmp(text, "inner"), "an appended body follows what was packed before");
    pvm_initsend(PvmDataRaw);
    is(pvm_pkmesgbody(inner), PvmMismatch, "a body of another encoding is a mismatch");
    is(pvm_pkmesgbody(99999), PvmNoSuchBuf, "the body of an unknown message finds no such buffer");
    pvm_freebuf(inner);
}

static void formats(void)
{
    int i = 0, three[3] = { 7, 8, 9 }, got[3] = { 0 }, six[6] = { 1, 2, 3, 4, 5, 6 }, odd[3] = { 0 };
    short h = 0;
    long l = 0;
    float f = 0, x[2] = { 1.5f, 2.5f }, X[2] = { 0 };
    double d = 0, z[2] = { 3.5, 4.5 }, Z[2] = { 0 };
    char c = 0, text[16] = "";
    is(pvm_packf("%+ %d", PvmDataRaw, 5), PvmOk, "packf with a plus begins a buffer of the encoding given");
    is(length(), 4, "packf packs an int by value");
    is(pvm_packf("%c%hd%ld%f%lf%s", 'q', 12, 77L, 1.25, 2.5, "words"), PvmOk, "packf packs items of all kinds by value");
    is(pvm_packf("%3d %*d", three, 2, six), PvmOk, "packf with a count takes a pointer");
    is(pvm_packf("%3.2d", six), PvmOk, "packf takes a count and a stride");
    is(pvm_packf("%x %lx", x, z), PvmOk, "packf takes complex numbers by pointer");
    loop(1);
    is(pvm_unpackf("%d", &i), PvmOk, "unpackf returns 0");
    is(i, 5, "unpackf reads the int that packf wrote");
    pvm_unpackf("%c%hd%ld%f%lf%s", &c, &h, &l, &f, &d, text);
    holds(c == 'q' && h == 12 && l == 77, "unpackf reads byte, short and long");
    holds(f == 1.25f && d == 2.5, "unpackf reads float and double");
    reads(text, "words", "unpackf reads a string");
    pvm_unpackf("%3d", got);
    holds(got[0] == 7 && got[2] == 9, "unpackf reads a count of ints");
    pvm_unpackf("%*d", 2, got);
    holds(got[0] == 1 && got[1] == 2, "unpackf takes its count from the arguments");
    pvm_unpackf("%3d", odd);
    holds(odd[0] == 1 && odd[1] == 3 && odd[2] == 5, "packf's stride chose every second item");
    pvm_unpackf("%x %lx", X, Z);
    holds(X[1] == 2.5f && Z[1] == 4.5, "unpackf reads complex numbers");
    is(pvm_unpackf("%d", &i), PvmNoData, "unpackf past the end finds no data");
    is(pvm_packf("%k", 1), PvmBadParam, "packf of an unknown conversion is a bad parameter");
    is(pvm_unpackf("%k", &i), PvmBadParam, "unpackf of an unknown conversion is a bad parameter");
    pvm_initsend(PvmDataDefault);
    is(pvm_packf("a count: %d, done", 3), PvmOk, "packf ignores other text");
    is(length(), 4, "other text adds nothing to the buffer");
}

static void appended(void)
{
    int x = 1, y = 0, id;
    pvm_initsend(PvmDataRaw);
    pvm_pkint(&x, 1, 1);
    pvm_send(own_tid, 51);
    id = await(own_tid, 51);
    pvm_setsbuf(id);
    x = 2;
    is(pvm_pkint(&x, 1, 1), PvmOk, "packing into a received raw message works");
    loop(52);
    pvm_upkint(&y, 1, 1);
    pvm_upkint(&x, 1, 1);
    holds(y == 1 && x == 2, "packing into a received raw message appends");
}

static void fragments(void)
{
    int old, x[100], y[100], k, len = 0;
    for (k = 0; k < 100; k++)
        x[k] = k;
    old = pvm_setopt(PvmFragSize, 52);
    is(old, 4080, "fragments have 4080 bytes to begin with");
    pvm_initsend(PvmDataDefault);
    pvm_pkint(x, 100, 1);
    is(length(), 400, "small fragments do not show in the length");
    loop(1);
    pvm_bufinfo(pvm_getrbuf(), &len, NULL, NULL);
    pvm_upkint(y, 100, 1);
    holds(len == 400 && !memcmp(x, y, sizeof x), "a message in small fragments arrives whole");
    pvm_setopt(PvmFragSize, old);
}

/* A message as a machine of another kind would send it, taken out of one that says so. */
static void of_another_machine(void)
{
    int head[8] = { 8, 0, 5, 0, 0x40bcc3, 0, 0, 0 }, length = 8, number = 0, id, auto_error = pvm_setopt(PvmAutoErr, 0);
    char bytes[8] = "abcdefg";
    head[6] = head[7] = own_tid;
    pvm_initsend(PvmDataDefault);
    pvm_pkint(head, 8, 1);
    pvm_pkint(&length, 1, 1);
    pvm_pkbyte(bytes, 8, 1);
    pvm_send(own_tid, 95);
    await(own_tid, 95);
    id = pvm_upkmesg();
    holds(id > 0, "a raw message of another machine can be taken out of one");
    pvm_setrbuf(id);
    memset(bytes, 0, sizeof bytes);
    is(pvm_upkint(&number, 1, 1), PvmBadMsg, "the numbers of a raw message of another machine cannot be read");
    is(pvm_upkbyte(bytes, 8, 1), PvmOk, "the bytes of a raw message of another machine can be read");
    reads(bytes, "abcdefg", "the bytes of a raw message of another machine are as they were sent");
    pvm_setopt(PvmAutoErr, auto_error);
}

static void sentences(void)
{
    every_type_in(PvmDataDefault, "every type survives the default encoding");
    every_type_in(PvmDataRaw, "every type survives the raw encoding");
    sizes();
    longs();
    strides();
    ends_and_errors();
    large();
    in_place();
    whole_messages();
    formats();
    appended();
    fragments();
    of_another_machine();
}
