/*
 * How Fortran calls: names in lower case with an underscore, every argument by reference, and the length of each
 * CHARACTER argument by value behind all others, in their order.
 */
#ifndef SEMPA_FORTRAN_H
#define SEMPA_FORTRAN_H

#include <pvm3.h>

/* Room for a string that comes from Fortran, with its NUL. */
#define TEXT_BYTES 257

/* Copies a Fortran string without its trailing blanks; PvmBadParam when it does not fit. */
int ftocstr(char *c, int csize, char *f, int flen);

/* Fills a Fortran string: cut or filled up with blanks. */
int ctofstr(char *f, int flen, char *c);

/* The C text of a Fortran string: `text` in the block that follows, unless it is too long, which `answer` is told. */
#define WITH_TEXT(text, f, flen, answer, call)                  \
    do {                                                        \
        char text[TEXT_BYTES];                                  \
        int fits_ = ftocstr(text, sizeof text, (f), (flen));    \
        *(answer) = fits_ < 0 ? fits_ : (call);                 \
    } while (0)

#endif
