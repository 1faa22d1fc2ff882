/*
 * hello.c - starts the program hello_worker on each host and prints what each of them says.
 *
 *   hello
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>

#define TAG_HELLO 1
#define HOSTS_MAX 256
#define TEXT_BYTES 256                  /* hello_worker sends less */

/* Returns the answer of a call, or ends the program if the answer is an error. */
static int must(int answer, const char *call)
{
    if (answer < 0) {
        fprintf(stderr, "hello: %s: error %d\n", call, answer);
        pvm_exit();
        exit(1);
    }
    return answer;
}

int main(void)
{
    struct pvmhostinfo *hosts;
    int count, formats, tids[HOSTS_MAX];

    must(pvm_mytid(), "pvm_mytid");
    must(pvm_config(&count, &formats, &hosts), "pvm_config");
    if (count > HOSTS_MAX)
        count = HOSTS_MAX;

    /* pvm_spawn returns how many tasks it has started. tids holds an error code for each of the others. */
    for (int i = 0; i < count; i++)
        if (must(pvm_spawn("hello_worker", NULL, PvmTaskHost, hosts[i].hi_name, 1, &tids[i]), "pvm_spawn") < 1)
            must(tids[i], "pvm_spawn of hello_worker");

    for (int i = 0; i < count; i++) {
        char text[TEXT_BYTES];
        struct timeval minute = { .tv_sec = 60 };
        /* A worker that is lost sends nothing: pvm_trecv returns 0 after a minute. */
        if (must(pvm_trecv(tids[i], TAG_HELLO, &minute), "pvm_trecv") == 0) {
            fprintf(stderr, "hello: task t%x does not answer\n", tids[i]);
            pvm_exit();
            return 1;
        }
        must(pvm_upkstr(text), "pvm_upkstr");
        printf("%s\n", text);
    }
    return pvm_exit() < 0;
}
