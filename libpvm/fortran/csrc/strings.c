/* Conversion of strings between C and Fortran. */

#include "fortran.h"
#include <string.h>

int ftocstr(char *c, int csize, char *f, int flen)
{
    while (flen > 0 && f[flen - 1] == ' ')
        flen--;
    if (flen < 0 || flen >= csize)
        return PvmBadParam;
    memcpy(c, f, (size_t)flen);
    c[flen] = '\0';
    return PvmOk;
}

int ctofstr(char *f, int flen, char *c)
{
    size_t room = flen > 0 ? (size_t)flen : 0, length = c ? strlen(c) : 0;

    if (length > room)
        length = room;
    if (length > 0)
        memcpy(f, c, length);
    memset(f + length, ' ', room - length);
    return PvmOk;
}
