/* Functions and variables of the library that programs use although no manual names them. */
#include "conform.h"

extern char *pvmnametag(int tag, int *found), *pvmgetrsh(void), *pvmgetroot(void);
extern int pvmstrtoi(char *), pvmxtoi(char *), pvmmatchstring(char *, char *), pvmputenv(char *), pvmgetclock(struct timeval *);
extern int pvmsleep(int), pvmendtask(void), pvmbeatask(void), pvmsettaskname(char *), errnamecode(char *);
extern int pvmupkstralloc(char **), pvmgetdsig(void);
extern char *i_malloc(unsigned, char *), *i_realloc(char *, unsigned);
extern void i_free(char *);
extern int lpvmerr(char *, int);
extern int pvm_errno, pvmmytid, pvmmyptid, pvmmydsig, pvmmyctx, pvmtoplvl, pvmautoerr, pvmfrgsiz, pvmschedtid, pvmnsibs;
extern int pvmshowtaskid, pvmrouteopt, pvmrescode;

static const role roles[] = { { NULL, NULL } };

static void words_and_numbers(void)
{
    int found = -1;
    char text[16];
    is(pvmstrtoi("123"), 123, "pvmstrtoi reads decimal numbers");
    is(pvmstrtoi("0x1f"), 31, "pvmstrtoi reads hexadecimal numbers");
    is(pvmstrtoi("017"), 15, "pvmstrtoi reads octal numbers");
    is(pvmxtoi("40002"), 0x40002, "pvmxtoi reads hexadecimal numbers");
    holds(pvmmatchstring("anything", "*"), "a star matches any text");
    holds(pvmmatchstring("anything", "any*"), "a star matches the end of a text");
    holds(!pvmmatchstring("anything", "some*"), "a pattern does not match another text");
    reads(pvmnametag((int)0x80040001, &found), "SM_SPAWN", "pvmnametag names a reserved tag");
    is(found, 1, "pvmnametag tells that it knows a tag");
    snprintf(text, sizeof text, "%d", 4711);
    reads(pvmnametag(4711, &found), text, "pvmnametag gives the number of an ordinary tag");
    is(found, 0, "pvmnametag tells that it does not know a tag");
    is(errnamecode("PvmBadParam"), PvmBadParam, "errnamecode gives the number of an error's name");
    is(pvmputenv("CONFORM_PUT=yes"), 0, "pvmputenv returns 0");
    reads(getenv("CONFORM_PUT"), "yes", "pvmputenv sets a variable");
    holds(pvmgetrsh() != NULL, "pvmgetrsh names a program");
}

static void clocks_and_memory(void)
{
    struct timeval a, b;
    char *place;
    gettimeofday(&a, NULL);
    pvmgetclock(&b);
    holds(labs(b.tv_sec - a.tv_sec) <= 1, "pvmgetclock tells the time of day");
    is(pvmsleep(0), 0, "pvmsleep of no time returns 0");
    place = i_malloc(10, "here");
    strcpy(place, "123456789");
    place = i_realloc(place, 1000);
    reads(place, "123456789", "i_realloc keeps what was there");
    i_free(place);
}

static void variables(void)
{
    is(pvmmytid, own_tid, "the variable pvmmytid is the tid");
    is(pvmmyptid, 0, "the variable pvmmyptid is 0 without a parent");
    is(pvmmyctx, 0, "the variable pvmmyctx is the context");
    is(pvmtoplvl, 1, "the variable pvmtoplvl is 1 outside the library");
    is(pvmautoerr, 1, "the variable pvmautoerr is the option");
    is(pvmfrgsiz, 4080, "the variable pvmfrgsiz is the option");
    is(pvmschedtid, 0, "the variable pvmschedtid is 0 without a resource manager");
    is(pvmgetdsig(), 0x408c41, "pvmgetdsig tells the data signature");
    is(pvmmydsig, 0x408c41, "the variable pvmmydsig is the data signature");
    pvm_setopt(PvmAutoErr, 0);
    is(lpvmerr("here", PvmNoHost), PvmNoHost, "lpvmerr returns its code");
    is(pvm_errno, PvmNoHost, "lpvmerr sets pvm_errno");
    pvm_setopt(PvmShowTids, 0);
    is(pvmshowtaskid, 0, "the variable pvmshowtaskid follows its option");
    pvm_setopt(PvmShowTids, 1);
    pvm_setopt(PvmRoute, PvmDontRoute);
    is(pvmrouteopt, PvmDontRoute, "the variable pvmrouteopt follows its option");
    pvm_setopt(PvmRoute, PvmAllowDirect);
}

static void leaving_and_names(void)
{
    int old = own_tid;
    char *copy = NULL;
    pvm_initsend(PvmDataDefault);
    pvm_pkstr("a string of any length");
    pvm_send(own_tid, 1);
    await(own_tid, 1);
    pvmupkstralloc(&copy);
    reads(copy, "a string of any length", "pvmupkstralloc makes room for a string");
    pvmendtask();
    is(pvmmytid, -1, "pvmendtask leaves the virtual machine");
    is(pvmbeatask(), 0, "pvmbeatask enrols");
    own_tid = pvm_mytid();
    holds(own_tid > 0 && own_tid != old, "after pvmendtask a program has another tid");
}

static void sentences(void)
{
    words_and_numbers();
    clocks_and_memory();
    variables();
    leaving_and_names();
}
