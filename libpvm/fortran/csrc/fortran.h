/*
 * Calling convention of Fortran: names are in lower case with a trailing underscore, every argument is passed by
 * reference, and the lengths of the CHARACTER arguments follow all other arguments by value, in the same order.
 */
#ifndef SEMPA_FORTRAN_H
#define SEMPA_FORTRAN_H

#include <pvm3.h>

/* Size of the buffer for a string from Fortran, including its NUL. */
#define TEXT_BYTES 257

/* Copies a Fortran string without its trailing blanks. Returns PvmBadParam if it does not fit. */
int ftocstr(char *c, int csize, char *f, int flen);

/* Copies a C string to a Fortran string: truncated, or padded with blanks. */
int ctofstr(char *f, int flen, char *c);

/* Converts a Fortran string to the C string `text`, evaluates `call` with it and stores the result in `answer`. If the
   string is too long, stores PvmBadParam instead. */
#define WITH_TEXT(text, f, flen, answer, call)                  \
    do {                                                        \
        char text[TEXT_BYTES];                                  \
        int fits_ = ftocstr(text, sizeof text, (f), (flen));    \
        *(answer) = fits_ < 0 ? fits_ : (call);                 \
    } while (0)

#endif
