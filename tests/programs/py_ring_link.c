/* The member in C of the ring of py_ring.py: adds 1 to the token, halves its weight, passes it on. */

#include <pvm3.h>
#include <stdio.h>

#define TAG_NEXT 1
#define TAG_TOKEN 2
/* Size in bytes of the token's name, with its final NUL. */
#define NAME_BYTES_MAX 64

int main(void)
{
    int next, rounds;

    if (pvm_mytid() < 0)
        return 1;
    pvm_recv(pvm_parent(), TAG_NEXT);
    pvm_upkint(&next, 1, 1);
    pvm_upkint(&rounds, 1, 1);
    while (rounds-- > 0) {
        int value;
        double weight;
        char name[NAME_BYTES_MAX];

        if (pvm_recv(-1, TAG_TOKEN) < 0 || pvm_upkint(&value, 1, 1) < 0
            || pvm_upkdouble(&weight, 1, 1) < 0 || pvm_upkstr(name) < 0)
            return 1;
        value++;
        weight /= 2;
        pvm_initsend(PvmDataDefault);
        pvm_pkint(&value, 1, 1);
        pvm_pkdouble(&weight, 1, 1);
        pvm_pkstr(name);
        pvm_send(next, TAG_TOKEN);
    }
    pvm_exit();
    return 0;
}
