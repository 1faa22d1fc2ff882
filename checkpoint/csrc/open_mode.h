/* The optional argument of the open functions. */

#ifndef OPEN_MODE_H
#define OPEN_MODE_H

#include <fcntl.h>
#include <stdarg.h>
#include <sys/types.h>

/* Returns the mode of a new file; 0 if these flags create no file, because the caller then passes no mode. */
static inline mode_t open_mode(int flags, va_list arguments)
{
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

#endif
