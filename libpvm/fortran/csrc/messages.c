/* Functions for buffers, packing, sending, receiving and message handlers. */

#include "fortran.h"

void pvmfinitsend_(int *encoding, int *mid) { *mid = pvm_initsend(*encoding); }
void pvmfmkbuf_(int *encoding, int *mid) { *mid = pvm_mkbuf(*encoding); }
void pvmffreebuf_(int *mid, int *info) { *info = pvm_freebuf(*mid); }
void pvmfgetsbuf_(int *mid) { *mid = pvm_getsbuf(); }
void pvmfgetrbuf_(int *mid) { *mid = pvm_getrbuf(); }
void pvmfsetsbuf_(int *mid, int *old) { *old = pvm_setsbuf(*mid); }
void pvmfsetrbuf_(int *mid, int *old) { *old = pvm_setrbuf(*mid); }
void pvmfbufinfo_(int *mid, int *bytes, int *tag, int *tid, int *info) { *info = pvm_bufinfo(*mid, bytes, tag, tid); }

/* A string is packed as `count` bytes; the length that Fortran passes after the other arguments is ignored. */
void pvmfpack_(int *type, void *items, int *count, int *stride, int *info)
{
    switch (*type) {
    case PVM_STR:
    case PVM_BYTE: *info = pvm_pkbyte(items, *count, *stride); break;
    case PVM_SHORT: *info = pvm_pkshort(items, *count, *stride); break;
    case PVM_INT: *info = pvm_pkint(items, *count, *stride); break;
    case PVM_FLOAT: *info = pvm_pkfloat(items, *count, *stride); break;
    case PVM_CPLX: *info = pvm_pkcplx(items, *count, *stride); break;
    case PVM_DOUBLE: *info = pvm_pkdouble(items, *count, *stride); break;
    case PVM_DCPLX: *info = pvm_pkdcplx(items, *count, *stride); break;
    case PVM_LONG: *info = pvm_pklong(items, *count, *stride); break;
    default: *info = PvmBadParam;
    }
}

void pvmfunpack_(int *type, void *items, int *count, int *stride, int *info)
{
    switch (*type) {
    case PVM_STR:
    case PVM_BYTE: *info = pvm_upkbyte(items, *count, *stride); break;
    case PVM_SHORT: *info = pvm_upkshort(items, *count, *stride); break;
    case PVM_INT: *info = pvm_upkint(items, *count, *stride); break;
    case PVM_FLOAT: *info = pvm_upkfloat(items, *count, *stride); break;
    case PVM_CPLX: *info = pvm_upkcplx(items, *count, *stride); break;
    case PVM_DOUBLE: *info = pvm_upkdouble(items, *count, *stride); break;
    case PVM_DCPLX: *info = pvm_upkdcplx(items, *count, *stride); break;
    case PVM_LONG: *info = pvm_upklong(items, *count, *stride); break;
    default: *info = PvmBadParam;
    }
}

void pvmfsend_(int *tid, int *tag, int *info) { *info = pvm_send(*tid, *tag); }
void pvmfmcast_(int *count, int *tids, int *tag, int *info) { *info = pvm_mcast(tids, *count, *tag); }
void pvmfrecv_(int *tid, int *tag, int *mid) { *mid = pvm_recv(*tid, *tag); }
void pvmfnrecv_(int *tid, int *tag, int *mid) { *mid = pvm_nrecv(*tid, *tag); }
void pvmfprobe_(int *tid, int *tag, int *mid) { *mid = pvm_probe(*tid, *tag); }

/* With -1 seconds, waits without limit. */
void pvmftrecv_(int *tid, int *tag, int *seconds, int *micros, int *mid)
{
    struct timeval time = { .tv_sec = *seconds, .tv_usec = *micros };

    *mid = pvm_trecv(*tid, *tag, *seconds == -1 ? NULL : &time);
}

void pvmfpsend_(int *tid, int *tag, void *items, int *count, int *type, int *info)
{
    *info = pvm_psend(*tid, *tag, items, *count, *type);
}

void pvmfprecv_(int *tid, int *tag, void *items, int *count, int *type, int *from_tid, int *from_tag, int *from_length,
                int *info)
{
    *info = pvm_precv(*tid, *tag, items, *count, *type, from_tid, from_tag, from_length);
}

/* The handler receives the buffer number of the message by value, as in C. */
void pvmfaddmhf_(int *src, int *tag, int *ctx, int (*handler)(int), int *mhid)
{
    *mhid = pvm_addmhf(*src, *tag, *ctx, handler);
}

void pvmfdelmhf_(int *mhid, int *info) { *info = pvm_delmhf(*mhid); }
