/*
 * Two tasks exchange a small message now and then: each sleeps until the next one arrives. Each marks the beginning and
 * the end of what is counted with getppid(); see system_calls.c.
 *
 * Argument: the role.
 */
#include <pvm3.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAME "spaced"
#define WARM_UP 200
#define ROUND_TRIPS 200
#define PAUSE_MICROS 5000
#define TAG_ASK 1
#define TAG_MARK 2
#define TAG_ANSWER 3
#define TAG_END 4

static void must(int good, const char *what)
{
    if (!good) {
        printf("%s failed, pvm_errno %d\n", what, pvm_errno);
        exit(1);
    }
}

static void mark(void)
{
    syscall(SYS_getppid);
}

static void say(int tid, int tag, int number)
{
    must(pvm_initsend(PvmDataRaw) > 0 && pvm_pkint(&number, 1, 1) == 0 && pvm_send(tid, tag) == 0, "sending");
}

static void answer(void)
{
    int tag = 0, asker, number;

    must(pvm_initsend(PvmDataRaw) > 0 && pvm_putinfo(NAME, pvm_getsbuf(), PvmMboxDefault) >= 0, "pvm_putinfo");
    for (;;) {
        int buffer = pvm_recv(-1, -1);

        must(buffer > 0 && pvm_bufinfo(buffer, NULL, &tag, &asker) == 0, "pvm_recv");
        if (tag == TAG_MARK)
            mark();
        must(pvm_upkint(&number, 1, 1) == 0, "pvm_upkint");
        say(asker, TAG_ANSWER, number);
        if (tag == TAG_END)
            return;
    }
}

static void ask(int answerer, int tag, int number)
{
    int answered;

    say(answerer, tag, number);
    must(pvm_recv(answerer, TAG_ANSWER) > 0 && pvm_upkint(&answered, 1, 1) == 0 && answered == number, "an answer");
    usleep(PAUSE_MICROS);
}

static int find_answerer(void)
{
    struct pvmmboxinfo *entries;
    int count = 0;

    while (pvm_getmboxinfo(NAME, &count, &entries) < 0 || count == 0)
        usleep(PAUSE_MICROS);
    return entries[0].mi_owners[0];
}

int main(int argc, char **argv)
{
    int i, answerer;

    must(argc == 2 && pvm_mytid() > 0, "pvm_mytid");
    if (!strcmp(argv[1], "answer")) {
        answer();
    } else {
        answerer = find_answerer();
        for (i = 0; i < WARM_UP; i++)
            ask(answerer, TAG_ASK, i);
        mark();
        for (i = 0; i < ROUND_TRIPS; i++)
            ask(answerer, i ? TAG_ASK : TAG_MARK, i);
        mark();
        ask(answerer, TAG_MARK, i);
        ask(answerer, TAG_END, i);
    }
    must(pvm_exit() == 0, "pvm_exit");
    return 0;
}
