/* Message buffers: making, choosing, freeing, asking about them. */
#include "conform.h"

static const role roles[] = { { NULL, NULL } };

static void making(void)
{
    int a, b, c;
    holds((a = pvm_mkbuf(PvmDataDefault)) > 0, "mkbuf returns an id above 0");
    holds((b = pvm_mkbuf(PvmDataRaw)) > 0 && b != a, "mkbuf returns another id for another buffer");
    holds((c = pvm_mkbuf(PvmDataInPlace)) > 0, "mkbuf makes in-place buffers");
    is(pvm_mkbuf(3), PvmBadParam, "mkbuf of encoding 3 is a bad parameter");
    is(pvm_mkbuf(-1), PvmBadParam, "mkbuf of a negative encoding is a bad parameter");
    is(pvm_mkbuf(5), PvmBadParam, "mkbuf of encoding 5 is a bad parameter");
    is(pvm_getsbuf(), 0, "mkbuf does not make its buffer the active one");
    is(pvm_freebuf(a), PvmOk, "freebuf of a buffer returns 0");
    is(pvm_freebuf(a), PvmNoSuchBuf, "freebuf of a freed buffer finds none");
    is(pvm_freebuf(99999), PvmNoSuchBuf, "freebuf of an unknown buffer finds none");
    is(pvm_freebuf(-1), PvmBadParam, "freebuf of a negative id is a bad parameter");
    is(pvm_freebuf(0), PvmOk, "freebuf of buffer 0 returns 0");
    pvm_freebuf(b);
    pvm_freebuf(c);
}

static void sending_slot(void)
{
    int a, b, x = 7;
    is(pvm_getsbuf(), 0, "getsbuf is 0 without an active send buffer");
    is(pvm_pkint(&x, 1, 1), PvmNoBuf, "packing without an active send buffer finds no buffer");
    is(pvm_send(own_tid, 1), PvmNoBuf, "send without an active send buffer finds no buffer");
    a = pvm_initsend(PvmDataDefault);
    holds(a > 0, "initsend returns an id above 0");
    is(pvm_getsbuf(), a, "initsend makes its buffer the active send buffer");
    b = pvm_initsend(PvmDataRaw);
    is(pvm_getsbuf(), b, "a second initsend replaces the active send buffer");
    pvm_pkint(&x, 1, 1);
    is(pvm_initsend(77), PvmBadParam, "initsend of an unknown encoding is a bad parameter");
    is(pvm_getsbuf(), b, "a failed initsend leaves the old buffer active");
    a = pvm_mkbuf(PvmDataDefault);
    is(pvm_setsbuf(a), b, "setsbuf returns the previous buffer");
    is(pvm_getsbuf(), a, "setsbuf makes the buffer active");
    is(pvm_bufinfo(b, NULL, NULL, NULL), PvmOk, "setsbuf keeps the previous buffer");
    is(pvm_setsbuf(0), a, "setsbuf(0) returns the previous buffer");
    is(pvm_getsbuf(), 0, "setsbuf(0) leaves no active send buffer");
    is(pvm_setsbuf(a), 0, "setsbuf returns 0 when there was none");
    is(pvm_setsbuf(99999), PvmNoSuchBuf, "setsbuf of an unknown buffer finds none");
    is(pvm_setsbuf(-3), PvmBadParam, "setsbuf of a negative id is a bad parameter");
    is(pvm_getsbuf(), a, "a failed setsbuf leaves the old buffer active");
    pvm_freebuf(a);
    is(pvm_getsbuf(), 0, "freeing the active send buffer leaves none");
    pvm_freebuf(b);
}

static void initsend_frees(void)
{
    int a = pvm_initsend(PvmDataDefault), b, x = 1, len = -1;
    pvm_pkint(&x, 1, 1);
    b = pvm_initsend(PvmDataDefault);
    holds(b == a || pvm_bufinfo(a, NULL, NULL, NULL) == PvmNoSuchBuf, "initsend frees the previous active send buffer");
    pvm_bufinfo(b, &len, NULL, NULL);
    is(len, 0, "initsend's buffer is empty");
}

static void receiving_slot(void)
{
    int first, second, s, x;
    is(pvm_getrbuf(), 0, "getrbuf is 0 before anything was received");
    is(pvm_upkint(&x, 1, 1), PvmNoBuf, "unpacking without an active receive buffer finds no buffer");
    tell(own_tid, 5, 11);
    tell(own_tid, 5, 12);
    first = await(own_tid, 5);
    is(pvm_getrbuf(), first, "a received message is the active receive buffer");
    is(pvm_setrbuf(0), first, "setrbuf returns the previous buffer");
    is(pvm_getrbuf(), 0, "setrbuf(0) leaves no active receive buffer");
    second = await(own_tid, 5);
    holds(second > 0 && second != first, "a kept message has another id than the next one");
    pvm_upkint(&x, 1, 1);
    is(x, 12, "the next message has its own contents");
    is(pvm_setrbuf(first), second, "setrbuf goes back to a kept message");
    pvm_upkint(&x, 1, 1);
    is(x, 11, "a kept message has kept its contents");
    pvm_setrbuf(second);
    is(pvm_upkint(&x, 1, 1), PvmNoData, "switching away and back does not rewind");
    is(pvm_setrbuf(99999), PvmNoSuchBuf, "setrbuf of an unknown buffer finds none");
    is(pvm_setrbuf(-1), PvmBadParam, "setrbuf of a negative id is a bad parameter");
    s = pvm_getsbuf();
    is(pvm_setsbuf(first), s, "a received message can become the send buffer");
    pvm_setrbuf(second);
    is(pvm_setsbuf(second), first, "the active receive buffer can become the send buffer");
    is(pvm_getrbuf(), 0, "a buffer that becomes the send buffer leaves the receive slot");
    is(pvm_setrbuf(second), 0, "the active send buffer can become the receive buffer");
    is(pvm_getsbuf(), 0, "a buffer that becomes the receive buffer leaves the send slot");
    is(pvm_freebuf(second), PvmOk, "the active receive buffer can be freed");
    is(pvm_getrbuf(), 0, "freeing the active receive buffer leaves none");
    pvm_freebuf(first);
}

static void forwarding(void)
{
    int got, x = 0, y = 0;
    char text[16] = "";
    x = 77;
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&x, 1, 1);
    pvm_pkstr("forward");
    pvm_send(own_tid, 6);
    is(pvm_send(own_tid, 7), PvmOk, "a buffer can be sent twice");
    got = await(own_tid, 6);
    pvm_upkint(&y, 1, 1);
    pvm_setsbuf(got);
    pvm_send(own_tid, 8);
    await(own_tid, 8);
    y = 0;
    pvm_upkint(&y, 1, 1);
    pvm_upkstr(text);
    is(y, 77, "a forwarded message has the whole body, however much of it had been unpacked");
    reads(text, "forward", "a forwarded message has its text");
    await(own_tid, 7);
    y = 0;
    pvm_upkint(&y, 1, 1);
    is(y, 77, "the second sending of a buffer has the same contents");
    x = 78;
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&x, 1, 1);
    pvm_send(own_tid, 9);
    pvm_pkint(&x, 1, 1);
    pvm_send(own_tid, 10);
    await(own_tid, 10);
    pvm_bufinfo(pvm_getrbuf(), &y, NULL, NULL);
    is(y, 8, "packing goes on after a send");
    await(own_tid, 9);
}

static void received_is_freed(void)
{
    int id;
    tell(own_tid, 20, 1);
    id = await(own_tid, 20);
    holds(id > 0, "a message to oneself arrives");
    is(pvm_nrecv(own_tid, 4711), 0, "nrecv returns 0 when nothing matches");
    is(pvm_getrbuf(), 0, "a failed nrecv leaves no active receive buffer");
    is(pvm_bufinfo(id, NULL, NULL, NULL), PvmNoSuchBuf, "a failed nrecv has freed the old receive buffer");
    tell(own_tid, 21, 1);
    id = await(own_tid, 21);
    is(pvm_probe(own_tid, 4711), 0, "probe returns 0 when nothing matches");
    is(pvm_getrbuf(), id, "a probe leaves the active receive buffer alone");
}

static void asking(void)
{
    int id, x[3] = { 1, 2, 3 }, len = -1, tag = -1, src = -1;
    struct pvmminfo info;
    is(pvm_bufinfo(99999, &len, &tag, &src), PvmNoSuchBuf, "bufinfo of an unknown buffer finds none");
    is(pvm_bufinfo(0, &len, &tag, &src), PvmBadParam, "bufinfo of buffer 0 is a bad parameter");
    is(pvm_bufinfo(-1, &len, &tag, &src), PvmBadParam, "bufinfo of a negative id is a bad parameter");
    id = pvm_initsend(PvmDataDefault);
    pvm_pkint(x, 3, 1);
    is(pvm_bufinfo(id, &len, &tag, &src), PvmOk, "bufinfo of a buffer being packed returns 0");
    is(len, 12, "bufinfo tells the length of a buffer being packed");
    is(tag, 0, "bufinfo of a buffer that was not sent has tag 0");
    is(src, own_tid, "bufinfo of a buffer being packed has the own tid as source");
    pvm_send(own_tid, 31);
    pvm_bufinfo(id, &len, &tag, &src);
    is(tag, 31, "bufinfo of a sent buffer has the tag of the last send");
    id = await(-1, -1);
    pvm_bufinfo(id, &len, &tag, &src);
    is(len, 12, "bufinfo of a received message has its length");
    is(tag, 31, "bufinfo of a received message has its tag");
    is(src, own_tid, "bufinfo of a received message has its sender");
    is(pvm_bufinfo(id, NULL, NULL, NULL), PvmOk, "bufinfo takes null pointers");
    pvm_upkint(x, 2, 1);
    pvm_bufinfo(id, &len, NULL, NULL);
    is(len, 12, "unpacking does not change the length");
    is(pvm_getminfo(99999, &info), PvmNoSuchBuf, "getminfo of an unknown buffer finds none");
    is(pvm_getminfo(0, &info), PvmBadParam, "getminfo of buffer 0 is a bad parameter");
    is(pvm_setminfo(0, &info), PvmBadParam, "setminfo of buffer 0 is a bad parameter");
    is(pvm_setminfo(99999, &info), PvmNoSuchBuf, "setminfo of an unknown buffer finds none");
    memset(&info, 0, sizeof info);
    is(pvm_getminfo(id, &info), PvmOk, "getminfo returns 0");
    is(info.len, 12, "getminfo tells the length");
    is(info.tag, 31, "getminfo tells the tag");
    is(info.src, own_tid, "getminfo tells the sender");
    is(info.ctx, pvm_getcontext(), "getminfo tells the context");
    is(info.enc, 0x10000000, "getminfo of the default encoding has 0x10000000");
    pvm_getminfo(pvm_initsend(PvmDataRaw), &info);
    is(info.enc, 0x408c41, "getminfo of the raw encoding has the data signature");
    pvm_getminfo(pvm_initsend(PvmDataInPlace), &info);
    is(info.enc, 0x20000000, "getminfo of the in-place encoding has 0x20000000");
    pvm_getminfo(pvm_initsend(PvmDataTrace), &info);
    is(info.enc, 0x40000000, "getminfo of the trace encoding has 0x40000000");
    id = pvm_initsend(PvmDataDefault);
    pvm_getminfo(id, &info);
    info.wid = 1234567;
    is(pvm_setminfo(id, &info), PvmOk, "setminfo returns 0");
    pvm_pkint(x, 1, 1);
    pvm_send(own_tid, 32);
    pvm_getminfo(await(own_tid, 32), &info);
    is(info.wid, 1234567, "a wait id set by setminfo travels with the message");
}

static void sentences(void)
{
    making();
    sending_slot();
    initsend_frees();
    receiving_slot();
    forwarding();
    received_is_freed();
    asking();
}
