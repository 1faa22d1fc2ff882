/*
 * Round trips between two tasks on the default route, until a file appears.
 *
 *   turns HOST COUNT_FILE [dont]   spawns its other half on HOST and writes the number of round
 *                                  trips to COUNT_FILE; ends when COUNT_FILE.stop exists. With
 *                                  `dont` the other half forbids direct routes.
 */
#include <fcntl.h>
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TAG_TURN = 1, TAG_END };

static int answer(int forbids)
{
    if (forbids)
        pvm_setopt(PvmRoute, PvmDontRoute);
    for (int expected = 0;; expected++) {
        int bytes, tag, tid, number;
        int buf = pvm_recv(-1, -1);
        if (buf < 0 || pvm_bufinfo(buf, &bytes, &tag, &tid) < 0)
            return 3;
        if (tag == TAG_END)
            break;
        if (pvm_upkint(&number, 1, 1) < 0 || number != expected)
            return 4;
        pvm_initsend(PvmDataDefault);
        pvm_pkint(&number, 1, 1);
        if (pvm_send(tid, TAG_TURN) < 0)
            return 3;
    }
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    int other, number = 0, answered;
    char stop_file[4096], text[32];
    if (pvm_mytid() < 0)
        return 2;
    if (pvm_parent() > 0)
        return answer(argc > 1 && !strcmp(argv[1], "dont"));
    if (argc < 3 || pvm_spawn(argv[0], argv + 3, PvmTaskHost, argv[1], 1, &other) != 1) {
        fprintf(stderr, "turns: cannot spawn on %s\n", argc < 3 ? "(no host named)" : argv[1]);
        return 2;
    }
    int file = open(argv[2], O_WRONLY | O_CREAT, 0644);
    snprintf(stop_file, sizeof stop_file, "%s.stop", argv[2]);
    while (file >= 0 && access(stop_file, F_OK) != 0) {
        pvm_initsend(PvmDataDefault);
        pvm_pkint(&number, 1, 1);
        if (pvm_send(other, TAG_TURN) < 0 || pvm_recv(other, -1) < 0 || pvm_upkint(&answered, 1, 1) < 0 || answered != number)
            return 3;
        number++;
        int length = snprintf(text, sizeof text, "%d\n", number);
        if (pwrite(file, text, length, 0) != length)
            return 3;
    }
    pvm_initsend(PvmDataDefault);
    pvm_send(other, TAG_END);
    printf("%d turns in order\n", number);
    pvm_exit();
    return 0;
}
