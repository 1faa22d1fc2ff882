/*
 * A spawn is a cause, and so is its result.
 *
 * The parent sends data to the receiver and then spawns children, which send the round to the receiver: it has the data
 * first. When the spawn has returned, the parent sends data to each child, and then the children's tids to the
 * receiver, which sends a word to each child: a child has the data first, and sends its verdict to the receiver.
 */
#include "causal.h"

enum { PARENT, RECEIVER };
enum { TAG_DATA = 1, TAG_BORN, TAG_TIDS, TAG_WORD, TAG_VERDICT, TAG_NEXT };
#define CHILDREN_MAX 8

/* The child's arguments: the word "child", the receiver's tid, the round. */
static int run_child(char **argv)
{
    int receiver = (int)strtol(argv[2], NULL, 16), tag;
    guard_against_hang();
    tell(receiver, TAG_BORN, atoi(argv[3]));
    must(pvm_recv(-1, -1), "recv");
    must(pvm_bufinfo(pvm_getrbuf(), NULL, &tag, NULL), "bufinfo");
    must(pvm_recv(-1, -1), "recv");
    tell(receiver, TAG_VERDICT, tag == TAG_DATA);
    pvm_exit();
    return 0;
}

static void run_parent(void)
{
    int receiver = tid_of(RECEIVER, 0), children[CHILDREN_MAX];
    char receiver_word[16], round_word[16];
    char *arguments[] = { "child", receiver_word, round_word, NULL };
    snprintf(receiver_word, sizeof receiver_word, "%x", receiver);
    for (int round = 1; round <= job.rounds; round++) {
        snprintf(round_word, sizeof round_word, "%d", round);
        send_data(receiver, TAG_DATA, round);
        int count = pvm_spawn(own_program, arguments, PvmTaskDefault, NULL, job.members, children);
        if (count != job.members)
            must(count < 0 ? count : children[count], "spawn");
        for (int i = 0; i < count; i++)
            send_data(children[i], TAG_DATA, round);
        must(pvm_initsend(PvmDataDefault), "initsend");
        must(pvm_pkint(children, count, 1), "pack tids");
        must(pvm_send(receiver, TAG_TIDS), "send tids");
        await(receiver, TAG_NEXT);
    }
}

/* Receives the data, the list of children and their first words in any order; checks that the data precedes the words. */
static void take_round(int round, int *children)
{
    static int data;
    int has_tids = 0;
    for (int born = 0; born < job.members || !has_tids || data < round;) {
        int tag;
        must(pvm_recv(-1, -1), "recv");
        must(pvm_bufinfo(pvm_getrbuf(), NULL, &tag, NULL), "bufinfo");
        if (tag == TAG_DATA) {
            data = number_in_message();
        } else if (tag == TAG_BORN) {
            check_seen(data, number_in_message());
            born++;
        } else {
            must(pvm_upkint(children, job.members, 1), "unpack tids");
            has_tids = 1;
        }
        be_slow();
    }
}

static void run_receiver(void)
{
    int children[CHILDREN_MAX];
    for (int round = 1; round <= job.rounds; round++) {
        take_round(round, children);
        for (int i = 0; i < job.members; i++)
            tell(children[i], TAG_WORD, round);
        for (int i = 0; i < job.members; i++)
            check_seen(await(children[i], TAG_VERDICT), 1);
        tell(tid_of(PARENT, 0), TAG_NEXT, round);
    }
}

static struct role roles[ROLES_MAX] = {
    [PARENT] = { "parent", run_parent, 1 },
    [RECEIVER] = { "receiver", run_receiver, 1 },
};

static void prepare(void)
{
    must(job.members > CHILDREN_MAX ? -1 : 0, "too many children");
}

int main(int argc, char **argv)
{
    own_program = argv[0];
    if (argc > 3 && !strcmp(argv[1], "child"))
        return run_child(argv);
    return run_causal("spawn", argc, argv, prepare);
}
