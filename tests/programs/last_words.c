/*
 * What a task has sent over a direct route before it is killed is received, then the word of its end.
 *
 *   last_words COUNT BYTES HOST1 HOST2    spawns a talker on HOST1 and a listener on HOST2
 *
 * Prints "talker tTID", "listener tTID" and, when their route stands and has carried something, "ready". When a line comes
 * in on its standard input, the talker sends COUNT numbered messages of BYTES bytes and kills itself. The listener says
 * what it has got: "heard COUNT in order, then the end", or what else. Exit status 0: all of it, and in order.
 */
#include <pvm3.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WARM_UP 200
enum { TAG_START = 1, TAG_WARM, TAG_WARMED, TAG_READY, TAG_GO, TAG_WORD, TAG_END, TAG_HEARD };

static void must(int code, const char *what)
{
    if (code >= 0)
        return;
    fprintf(stderr, "last_words: %s: %d\n", what, code);
    exit(3);
}

static void say(int to, int tag, int number, char *block, int bytes)
{
    must(pvm_initsend(PvmDataRaw), "initsend");
    pvm_pkint(&number, 1, 1);
    pvm_pkbyte(block, bytes, 1);
    must(pvm_send(to, tag), "send");
}

static int talk(int director, int count, int bytes)
{
    int other;
    char *block = calloc(1, bytes);
    must(pvm_setopt(PvmRoute, PvmRouteDirect), "setopt");
    must(pvm_recv(director, TAG_START), "recv start");
    pvm_upkint(&other, 1, 1);
    /* The connection learns how much it may have on its way. */
    for (int i = 0; i < WARM_UP; i++)
        say(other, TAG_WARM, i, block, bytes);
    must(pvm_recv(other, TAG_WARMED), "recv warmed");
    must(pvm_recv(director, TAG_GO), "recv go");
    for (int i = 0; i < count; i++)
        say(other, TAG_WORD, i, block, bytes);
    kill(getpid(), SIGKILL);
    return 3;
}

static int listen_to_the_end(int director)
{
    int other, heard = 0, good = 1, number, bytes, tag, tid;
    must(pvm_recv(director, TAG_START), "recv start");
    pvm_upkint(&other, 1, 1);
    must(pvm_notify(PvmTaskExit, TAG_END, 1, &other), "notify");
    for (int i = 0; i < WARM_UP; i++)
        must(pvm_recv(other, TAG_WARM), "recv warm");
    /*
     * This message acknowledges all warm messages. Without it, an acknowledgement of the last warm messages could fall due
     * after the talker's death; the talker's kernel would then discard the messages that it has not sent yet.
     */
    must(pvm_setopt(PvmRoute, PvmRouteDirect), "setopt");
    must(pvm_initsend(PvmDataDefault), "initsend");
    must(pvm_send(other, TAG_WARMED), "send warmed");
    must(pvm_initsend(PvmDataDefault), "initsend");
    must(pvm_send(director, TAG_READY), "send ready");
    for (;;) {
        must(pvm_recv(-1, -1), "recv");
        pvm_bufinfo(pvm_getrbuf(), &bytes, &tag, &tid);
        if (tag == TAG_END)
            break;
        pvm_upkint(&number, 1, 1);
        good = good && number == heard;
        heard++;
    }
    must(pvm_initsend(PvmDataDefault), "initsend");
    pvm_pkint(&heard, 1, 1);
    pvm_pkint(&good, 1, 1);
    must(pvm_send(director, TAG_HEARD), "send heard");
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    int tids[2], heard, good, parent;
    char line[16];
    must(pvm_mytid(), "mytid");
    parent = pvm_parent();
    if (argc == 3)
        return talk(parent, atoi(argv[1]), atoi(argv[2]));
    if (argc == 1)
        return listen_to_the_end(parent);
    setvbuf(stdout, NULL, _IOLBF, 0);
    char *words[] = { argv[1], argv[2], NULL };
    if (argc != 5 || pvm_spawn(argv[0], words, PvmTaskHost, argv[3], 1, &tids[0]) != 1
        || pvm_spawn(argv[0], NULL, PvmTaskHost, argv[4], 1, &tids[1]) != 1) {
        fprintf(stderr, "usage: last_words COUNT BYTES HOST1 HOST2\n");
        return 2;
    }
    printf("talker t%x\nlistener t%x\n", tids[0], tids[1]);
    for (int i = 1; i >= 0; i--) {
        must(pvm_initsend(PvmDataDefault), "initsend");
        pvm_pkint(&tids[1 - i], 1, 1);
        must(pvm_send(tids[i], TAG_START), "send start");
    }
    must(pvm_recv(tids[1], TAG_READY), "recv ready");
    printf("ready\n");
    if (fgets(line, sizeof line, stdin) == NULL)
        return 2;
    must(pvm_initsend(PvmDataDefault), "initsend");
    must(pvm_send(tids[0], TAG_GO), "send go");
    must(pvm_recv(tids[1], TAG_HEARD), "recv heard");
    pvm_upkint(&heard, 1, 1);
    pvm_upkint(&good, 1, 1);
    printf("heard %d %s, then the end\n", heard, good ? "in order" : "out of order");
    pvm_exit();
    return good && heard == atoi(argv[1]) ? 0 : 1;
}
