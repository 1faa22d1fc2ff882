/*
 * A task that spawns others that end at once.
 *
 *   brief COUNT AT_ONCE   from a command line: spawns COUNT tasks one after the other, and whenever AT_ONCE of them have been
 *                         started waits until these have ended; prints "all COUNT ended". Fails if one was not started.
 *   brief -               as a task: ends
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TAG_GONE = 1 };
enum { AT_ONCE_MAX = 1000 };

int main(int argc, char **argv)
{
    static int tids[AT_ONCE_MAX];
    if (argc == 2 && strcmp(argv[1], "-") == 0)
        return 0;
    int count = argc > 1 ? atoi(argv[1]) : 1, at_once = argc > 2 ? atoi(argv[2]) : 1;
    if (count < 1 || at_once < 1 || at_once > AT_ONCE_MAX)
        return 2;
    char *words[] = {"-", NULL};
    for (int begun = 0; begun < count;) {
        int open = 0;
        for (; open < at_once && begun < count; open++, begun++) {
            if (pvm_spawn(argv[0], words, PvmTaskDefault, "", 1, tids + open) != 1) {
                fprintf(stderr, "spawn %d: %d\n", begun, tids[open]);
                return 3;
            }
        }
        pvm_notify(PvmTaskExit, TAG_GONE, open, tids);
        for (; open > 0; open--)
            pvm_recv(-1, TAG_GONE);
    }
    printf("all %d ended\n", count);
    return pvm_exit();
}
