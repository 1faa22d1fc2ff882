/*
 * Round trips and throughput between two tasks.
 *
 *   pingpong HOST    spawns its other half on HOST and prints a line for each size
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

enum { TAG_PING = 1, TAG_PONG, TAG_END };
static const int sizes[] = { 8, 1024, 65536, 1 << 20 };

static double now_us(void)
{
    struct timeval t;
    gettimeofday(&t, NULL);
    return t.tv_sec * 1e6 + t.tv_usec;
}

static int answer(void)
{
    for (;;) {
        int bytes, tag, tid;
        int buf = pvm_recv(-1, -1);
        if (buf < 0)
            return 3;
        pvm_bufinfo(buf, &bytes, &tag, &tid);
        if (tag == TAG_END)
            break;
        pvm_setsbuf(buf);
        pvm_setrbuf(0);
        if (pvm_send(tid, TAG_PONG) < 0)
            return 3;
        pvm_freebuf(buf);
    }
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    int other;
    if (pvm_mytid() < 0)
        return 2;
    if (pvm_parent() > 0)
        return answer();
    if (argc < 2 || pvm_spawn(argv[0], NULL, PvmTaskHost, argv[1], 1, &other) != 1) {
        fprintf(stderr, "pingpong: cannot spawn on %s\n", argc < 2 ? "(no host named)" : argv[1]);
        return 2;
    }
    char *block = calloc(1, 1 << 20);
    for (unsigned int i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int rounds = sizes[i] >= 65536 ? 100 : 1000;
        double begun = now_us();
        for (int round = 0; round < rounds; round++) {
            pvm_initsend(PvmDataRaw);
            pvm_pkbyte(block, sizes[i], 1);
            if (pvm_send(other, TAG_PING) < 0 || pvm_recv(other, TAG_PONG) < 0)
                return 3;
        }
        double trip = (now_us() - begun) / rounds;
        printf("%8d bytes: %9.1f us there and back, %8.1f MiB/s each way\n", sizes[i], trip,
               2.0 * sizes[i] / 1048576.0 / (trip / 1e6));
    }
    pvm_initsend(PvmDataRaw);
    pvm_send(other, TAG_END);
    pvm_exit();
    return 0;
}
