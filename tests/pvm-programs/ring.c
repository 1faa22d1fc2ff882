/*
 * A group of tasks in which a number goes around once. Each member adds its instance number.
 *
 *   ring MEMBERS   prints the number that comes back to the first member
 */
#include <stdio.h>
#include <stdlib.h>
#include <pvm3.h>

enum { TAG_NUMBER = 1, MEMBERS_MAX = 16 };

static char group[] = "ring";

int main(int argc, char **argv)
{
    int parent = pvm_parent(), members = argc > 1 ? atoi(argv[1]) : 3, tids[MEMBERS_MAX], number = 0;
    if (pvm_mytid() < 0)
        return 1;
    if (members < 2 || members > MEMBERS_MAX)
        return 2;
    int instance = pvm_joingroup(group);
    if (instance < 0)
        return 3;
    if (parent < 0 && pvm_spawn("ring", argv + 1, PvmTaskDefault, "", members - 1, tids) != members - 1) {
        fprintf(stderr, "ring: the members cannot be started\n");
        return 4;
    }
    if (pvm_barrier(group, members) < 0)
        return 5;
    int next = pvm_gettid(group, (instance + 1) % members);
    if (instance > 0) {
        pvm_recv(-1, TAG_NUMBER);
        pvm_upkint(&number, 1, 1);
        number += instance;
    }
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&number, 1, 1);
    pvm_send(next, TAG_NUMBER);
    if (instance == 0) {
        pvm_recv(-1, TAG_NUMBER);
        pvm_upkint(&number, 1, 1);
        printf("%d members: %d\n", members, number);
    }
    pvm_barrier(group, members);
    pvm_lvgroup(group);
    return pvm_exit();
}
