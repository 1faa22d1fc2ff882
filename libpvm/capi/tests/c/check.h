/* Checks for test programs: a failed check prints its position and exits the program. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IS(wanted_, got_) \
    do { \
        long want__ = (long)(wanted_), got__ = (long)(got_); \
        if (want__ != got__) { \
            printf("%s:%d: %s is %ld, not %ld\n", __FILE__, __LINE__, #got_, got__, want__); \
            exit(1); \
        } \
    } while (0)

#define SAYS(wanted_, got_) \
    do { \
        const char *got__ = (got_); \
        if (strcmp((wanted_), got__) != 0) { \
            printf("%s:%d: %s is \"%s\", not \"%s\"\n", __FILE__, __LINE__, #got_, got__, (wanted_)); \
            exit(1); \
        } \
    } while (0)
