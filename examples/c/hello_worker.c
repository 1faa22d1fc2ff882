/*
 * hello_worker.c - tells its parent on which host it runs. The program hello starts it.
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define TAG_HELLO 1
#define NAME_BYTES 65                   /* the longest name of a host on Linux, and a NUL */

/* Returns the answer of a call, or ends the program if the answer is an error. */
static int must(int answer, const char *call)
{
    if (answer < 0) {
        fprintf(stderr, "hello_worker: %s: error %d\n", call, answer);
        pvm_exit();
        exit(1);
    }
    return answer;
}

int main(void)
{
    char name[NAME_BYTES] = "", text[NAME_BYTES + 16];

    /* pvm_parent returns the error PvmNoParent in a program that no task has started. */
    int parent = must(pvm_parent(), "pvm_parent");
    must(gethostname(name, sizeof name - 1), "gethostname");
    snprintf(text, sizeof text, "hello from %s", name);

    must(pvm_initsend(PvmDataDefault), "pvm_initsend");
    must(pvm_pkstr(text), "pvm_pkstr");
    must(pvm_send(parent, TAG_HELLO), "pvm_send");
    return pvm_exit() < 0;
}
