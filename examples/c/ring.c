/*
 * ring.c - passes a token round a ring of tasks. Each task adds 1 to the token.
 *
 *   ring [MEMBERS [ROUNDS]]
 *
 * The task that is started by hand is the first member. It spawns the others, which are this same program with the
 * argument "member".
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TAG_TOKEN 1                     /* from the member before: the token */
#define TAG_END 2                       /* from the daemon: a task has ended that the ring needs */
#define MEMBERS_MAX 64

/* Returns the answer of a call, or ends the program if the answer is an error. */
static int must(int answer, const char *call)
{
    if (answer < 0) {
        fprintf(stderr, "ring: %s: error %d\n", call, answer);
        pvm_exit();
        exit(1);
    }
    return answer;
}

static void send_token(int tid, int token)
{
    must(pvm_initsend(PvmDataDefault), "pvm_initsend");
    must(pvm_pkint(&token, 1, 1), "pvm_pkint");
    must(pvm_send(tid, TAG_TOKEN), "pvm_send");
}

/* Waits for the token. Returns 0 if TAG_END comes instead. */
static int token_comes(int *token)
{
    int tag, bytes, source;
    int message = must(pvm_recv(-1, -1), "pvm_recv");
    must(pvm_bufinfo(message, &bytes, &tag, &source), "pvm_bufinfo");
    if (tag != TAG_TOKEN)
        return 0;
    must(pvm_upkint(token, 1, 1), "pvm_upkint");
    return 1;
}

static int member(void)
{
    int first = must(pvm_parent(), "pvm_parent"), me = must(pvm_mytid(), "pvm_mytid"), next = first, token, *tids;
    int count = must(pvm_siblings(&tids), "pvm_siblings");

    /* The tasks that were spawned together have an order. The last one closes the ring. */
    for (int i = 0; i + 1 < count; i++)
        if (tids[i] == me)
            next = tids[i + 1];
    /* The daemon sends TAG_END when the first member ends, for whatever reason. */
    must(pvm_notify(PvmTaskExit, TAG_END, 1, &first), "pvm_notify");
    while (token_comes(&token))
        send_token(next, token + 1);
    return pvm_exit() < 0;
}

static int lead(int members, int rounds)
{
    char *arguments[] = { "member", NULL };
    int tids[MEMBERS_MAX], token = 0, others = members - 1;

    if (must(pvm_spawn("ring", arguments, PvmTaskDefault, "", others, tids), "pvm_spawn") < others)
        must(tids[others - 1], "pvm_spawn of ring");
    must(pvm_notify(PvmTaskExit, TAG_END, others, tids), "pvm_notify");

    for (int round = 1; round <= rounds; round++) {
        send_token(tids[0], token + 1);
        if (!token_comes(&token) || token != round * members) {
            fprintf(stderr, "ring: a member or the token is lost in round %d\n", round);
            pvm_exit();
            return 1;
        }
    }
    printf("the token is %d after %d rounds of %d members\n", token, rounds, members);
    /* The other members end when this one does. */
    return pvm_exit() < 0;
}

int main(int argc, char **argv)
{
    /* Tasks on different hosts connect to each other; messages do not pass the daemons then. */
    must(pvm_setopt(PvmRoute, PvmRouteDirect), "pvm_setopt");
    if (argc == 2 && strcmp(argv[1], "member") == 0)
        return member();

    int members = argc > 1 ? atoi(argv[1]) : 4, rounds = argc > 2 ? atoi(argv[2]) : 1000;
    if (members < 2 || members > MEMBERS_MAX || rounds < 1 || rounds > 1000000) {
        fprintf(stderr, "usage: ring [MEMBERS [ROUNDS]], with 2 to %d members\n", MEMBERS_MAX);
        return 2;
    }
    return lead(members, rounds);
}
