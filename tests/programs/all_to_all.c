/*
 * Each worker sends numbered messages of 1 byte to 1 MiB to all others, or to some, and every pair checks its numbers.
 *
 *   all_to_all [OPTION]... HOST...   the director: spawns workers on the hosts in turn
 *     -n COUNT    number of workers; 6 if not given
 *     -k REACH    each exchanges messages with REACH workers on either side only, in a ring of all
 *     -b MIB      worker 2 holds this much memory in addition
 *     -d          the workers want direct routes (PvmRouteDirect)
 *     -f          as -d, and all but worker 2 fork while they run
 *     -r MS       interval at which the workers report their progress; 20 ms if not given
 *     -g          the workers give the memory of large messages back at once; otherwise the C library keeps it as it sees fit
 *
 * The director prints a line for each worker ("worker INDEX tTID HOST ROLE"), the workers' progress
 * ("progress INDEX TIME COUNT", time in microseconds since 1970), with -d each new direct route ("route INDEX PEER COUNT"),
 * and, when a line comes in on its standard input or that closes, ends all workers and prints the summary, with -f
 * also how many children there were. Exit status 0: nothing lost, doubled, damaged, out of order, and no child failed.
 *
 * The workers differ in how they spend their time: blocked in pvm_recv, computing without any call of PVM, in the
 * middle of large sends, or a mixture.
 */
#include <malloc.h>
#include <poll.h>
#include <pvm3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORKERS_MAX 64
#define BYTES_MAX (1 << 20)
#define GIVE_BACK_FROM (32 << 10)
#define MISSING_MAX 4096
#define QUIET_END_S 60
#define FORK_EVERY 40
#define CHILDREN_MAX 4

enum { TAG_PEERS = 1, TAG_DATA, TAG_ACK, TAG_FIN, TAG_STOP, TAG_PROGRESS, TAG_SUMMARY, TAG_ROUTE, TAG_ROUTES, TAG_READY };
enum { DIRECT = 1, FORKS };
/* Numbers in a worker's summary: who, checked, five kinds of faults, children. */
#define SUMMARY 8
#define FAULTS_FROM 2
#define CHILDREN 7
enum { BLOCKED, COMPUTING, LARGE, MIXED };
static const char *const role_names[] = { "blocked", "computing", "large", "mixed" };

struct pair {
    int sent;              /* number of the last data message to this peer */
    int acknowledged;      /* highest number it has acknowledged */
    int expected;          /* number of the next data message from this peer */
    int fin;               /* how many it says it sent; -1 until it says so */
    int missing[MISSING_MAX];
    int missing_count;
    int routes;            /* direct routes to this peer there have been */
};

/* What the director sends to each worker in addition to its number and the tids of all. */
static struct {
    int workers, reach, ballast, wants, report_ms, gives_back;
} job = { .workers = 6, .report_ms = 20 };
#define JOB_WORDS 6
static int me, role, director, peers[WORKERS_MAX];
static struct pair pairs[WORKERS_MAX];
static int checked, doubled, disordered, damaged, stopping;
static int children, children_now, children_failed;
static unsigned int progress;
static int64_t last_report;
static unsigned char *block;
static uint64_t dice = 88172645463325252ull;

static int64_t now_us(void)
{
    struct timeval t;
    gettimeofday(&t, NULL);
    return (int64_t)t.tv_sec * 1000000 + t.tv_usec;
}

static unsigned int roll(void)
{
    dice ^= dice << 13;
    dice ^= dice >> 7;
    dice ^= dice << 17;
    return (unsigned int)(dice >> 16);
}

static unsigned int checksum(const unsigned char *data, int len)
{
    unsigned int sum = 2166136261u;
    for (int i = 0; i < len; i++)
        sum = (sum ^ data[i]) * 16777619u;
    return sum;
}

/* True for a worker with whom this one talks. */
static int talks(int other)
{
    int apart = abs(other - me);
    if (job.workers - apart < apart)
        apart = job.workers - apart;
    return other != me && (job.reach == 0 || apart <= job.reach);
}

static int who(int tid)
{
    for (int i = 0; i < job.workers; i++)
        if (peers[i] == tid)
            return i;
    fprintf(stderr, "a message from a stranger: t%x\n", tid);
    exit(3);
}

static void must(int code, const char *what)
{
    if (code < 0) {
        fprintf(stderr, "worker %d: %s: %d\n", me, what, code);
        exit(3);
    }
}

/*
 * A child that knows nothing of PVM, as when a program starts another one: it ends at once, in an orderly way, as another
 * program, or after a while in which it holds all that it has inherited.
 */
static void child(int kind)
{
    if (kind == 0)
        _exit(0);
    if (kind == 1)
        exit(0);
    if (kind == 2) {
        execl("/bin/true", "true", (char *)NULL);
        _exit(9);
    }
    usleep(300000);
    _exit(0);
}

static void fork_now_and_then(void)
{
    static unsigned int next = FORK_EVERY;
    int status;
    while (children_now > 0 && waitpid(-1, &status, WNOHANG) > 0) {
        children_now--;
        children_failed += status != 0;
    }
    if (job.wants < FORKS || me == LARGE || stopping || progress < next || children_now >= CHILDREN_MAX)
        return;
    next = progress + FORK_EVERY;
    pid_t pid = fork();
    if (pid == 0)
        child(children % 4);
    must(pid, "fork");
    children++;
    children_now++;
}

static void wait_for_children(void)
{
    int status;
    while (children_now > 0 && waitpid(-1, &status, 0) > 0) {
        children_now--;
        children_failed += status != 0;
    }
}

static void note_route(void)
{
    int tid = 0, peer, words[3];
    must(pvm_upkint(&tid, 1, 1), "unpack route");
    if (tid == director)
        return;
    peer = who(tid);
    words[0] = me;
    words[1] = peer;
    words[2] = ++pairs[peer].routes;
    must(pvm_initsend(PvmDataDefault), "initsend");
    pvm_pkint(words, 3, 1);
    must(pvm_send(director, TAG_ROUTES), "send routes");
}

static int choose_size(void)
{
    if (role == LARGE)
        return BYTES_MAX / 2 + (int)(roll() % (BYTES_MAX / 2 + 1));
    if (roll() % 50 == 0)
        return BYTES_MAX;
    return 1 + (int)(roll() % (1u << (roll() % 15)));
}

static void report(void)
{
    int64_t now = now_us();
    if (now - last_report < job.report_ms * 1000ll)
        return;
    last_report = now;
    int high = (int)(now / 1000000), low = (int)(now % 1000000);
    must(pvm_initsend(PvmDataDefault), "initsend");
    pvm_pkint(&high, 1, 1);
    pvm_pkint(&low, 1, 1);
    pvm_pkuint(&progress, 1, 1);
    must(pvm_send(director, TAG_PROGRESS), "send progress");
}

static void send_data(int to)
{
    struct pair *pair = &pairs[to];
    int len = choose_size(), number = ++pair->sent;
    int start = (int)(roll() % 251);
    for (int i = 0; i < len; i++)
        block[i] = (unsigned char)(start + i * 7 + number);
    unsigned int sum = checksum(block, len);
    must(pvm_initsend(PvmDataDefault), "initsend");
    pvm_pkint(&number, 1, 1);
    pvm_pkint(&len, 1, 1);
    pvm_pkuint(&sum, 1, 1);
    pvm_pkbyte((char *)block, len, 1);
    must(pvm_send(peers[to], TAG_DATA), "send data");
    progress++;
}

static void fill_windows(void)
{
    int window = role == LARGE ? 2 : 4;
    if (stopping)
        return;
    for (int i = 0; i < job.workers; i++)
        while (talks(i) && pairs[i].sent - pairs[i].acknowledged < window)
            send_data(i);
}

static void note_number(struct pair *pair, int number)
{
    if (number == pair->expected) {
        pair->expected++;
        return;
    }
    if (number > pair->expected) {
        for (; pair->expected < number; pair->expected++)
            if (pair->missing_count < MISSING_MAX)
                pair->missing[pair->missing_count++] = pair->expected;
        pair->expected = number + 1;
        return;
    }
    for (int i = 0; i < pair->missing_count; i++)
        if (pair->missing[i] == number) {
            pair->missing[i] = pair->missing[--pair->missing_count];
            disordered++;
            return;
        }
    doubled++;
}

static void take_data(int from)
{
    int number = 0, len = 0;
    unsigned int sum = 0;
    must(pvm_upkint(&number, 1, 1), "unpack number");
    must(pvm_upkint(&len, 1, 1), "unpack length");
    must(pvm_upkuint(&sum, 1, 1), "unpack sum");
    if (len < 1 || len > BYTES_MAX) {
        damaged++;
        return;
    }
    must(pvm_upkbyte((char *)block, len, 1), "unpack bytes");
    damaged += checksum(block, len) != sum;
    note_number(&pairs[from], number);
    checked++;
    progress++;
    must(pvm_initsend(PvmDataDefault), "initsend");
    pvm_pkint(&number, 1, 1);
    must(pvm_send(peers[from], TAG_ACK), "send ack");
}

static void stop_sending(void)
{
    stopping = 1;
    for (int i = 0; i < job.workers; i++) {
        if (!talks(i))
            continue;
        must(pvm_initsend(PvmDataDefault), "initsend");
        pvm_pkint(&pairs[i].sent, 1, 1);
        must(pvm_send(peers[i], TAG_FIN), "send fin");
    }
}

static void take(int buf)
{
    int bytes, tag, tid, number = 0;
    must(pvm_bufinfo(buf, &bytes, &tag, &tid), "bufinfo");
    if (tag == TAG_STOP) {
        stop_sending();
        return;
    }
    if (tag == TAG_ROUTE) {
        note_route();
        return;
    }
    int from = who(tid);
    if (tag == TAG_DATA) {
        take_data(from);
        return;
    }
    must(pvm_upkint(&number, 1, 1), "unpack");
    if (tag == TAG_FIN)
        pairs[from].fin = number;
    else if (number <= pairs[from].acknowledged)
        disordered++;
    else
        pairs[from].acknowledged = number;
}

static int all_finished(void)
{
    for (int i = 0; i < job.workers; i++)
        if (talks(i) && (pairs[i].fin < 0 || pairs[i].expected <= pairs[i].fin || pairs[i].missing_count > 0))
            return 0;
    return stopping;
}

static void compute(void)
{
    /* About a tenth of a second without any call of PVM. */
    static volatile unsigned int sink;
    int64_t until = now_us() + 100000;
    while (now_us() < until) {
        for (int i = 0; i < 20000; i++)
            sink = sink * 1664525u + 1013904223u;
        progress++;
    }
}

static void work(void)
{
    while (!all_finished()) {
        int buf;
        struct timeval patience = { QUIET_END_S, 0 };
        report();
        fork_now_and_then();
        fill_windows();
        if (role == COMPUTING && !stopping) {
            compute();
            report();
            while ((buf = pvm_nrecv(-1, -1)) > 0)
                take(buf);
            must(buf, "nrecv");
            continue;
        }
        if (stopping) {
            buf = pvm_trecv(-1, -1, &patience);
            if (buf == 0)
                return; /* what has not come by now is lost */
        } else {
            buf = pvm_recv(-1, -1);
        }
        must(buf, "recv");
        take(buf);
    }
}

static int worker(void)
{
    director = pvm_parent();
    /* Nobody sends before all are ready, so that no route is missed. */
    must(pvm_notify(PvmRouteAdd, TAG_ROUTE, -1, NULL), "notify");
    must(pvm_initsend(PvmDataDefault), "initsend");
    must(pvm_send(director, TAG_READY), "send ready");
    must(pvm_recv(director, TAG_PEERS), "recv peers");
    pvm_upkint(&me, 1, 1);
    pvm_upkint((int *)&job, JOB_WORDS, 1);
    pvm_upkint(peers, job.workers, 1);
    if (job.gives_back)
        mallopt(M_MMAP_THRESHOLD, GIVE_BACK_FROM);
    if (job.wants >= DIRECT)
        must(pvm_setopt(PvmRoute, PvmRouteDirect), "setopt");
    role = me < MIXED ? me : MIXED;
    dice += (uint64_t)me * 7919;
    block = malloc(BYTES_MAX);
    size_t held = me == LARGE ? (size_t)job.ballast << 20 : 0;
    unsigned char *weight = malloc(held + 1);
    for (size_t i = 0; i < held; i += 64)
        weight[i] = (unsigned char)roll();
    for (int i = 0; i < job.workers; i++) {
        pairs[i].expected = 1;
        pairs[i].fin = -1;
    }
    work();
    wait_for_children();
    int lost = 0;
    for (int i = 0; i < job.workers; i++) {
        if (!talks(i))
            continue;
        int from_peer = pairs[i].missing_count + (pairs[i].fin < 0 ? 1 : pairs[i].fin + 1 - pairs[i].expected);
        if (from_peer > 0) /* The daemon's log shows this line. */
            fprintf(stderr, "worker %d misses %d messages of worker %d (t%x): next is %d, its last %d\n", me, from_peer, i,
                    peers[i], pairs[i].expected, pairs[i].fin);
        lost += from_peer;
    }
    int summary[SUMMARY] = { me, checked, lost, doubled, disordered, damaged, children_failed, children };
    must(pvm_initsend(PvmDataDefault), "initsend");
    pvm_pkint(summary, SUMMARY, 1);
    must(pvm_send(director, TAG_SUMMARY), "send summary");
    pvm_exit();
    return 0;
}

static void print_progress(void)
{
    int bytes, tag, tid, high, low;
    unsigned int count;
    pvm_bufinfo(pvm_getrbuf(), &bytes, &tag, &tid);
    pvm_upkint(&high, 1, 1);
    pvm_upkint(&low, 1, 1);
    pvm_upkuint(&count, 1, 1);
    printf("progress %d %lld %u\n", who(tid), (long long)high * 1000000 + low, count);
}

static void print_route(void)
{
    int words[3];
    pvm_upkint(words, 3, 1);
    printf("route %d %d %d\n", words[0], words[1], words[2]);
}

static void spawn_workers(int count, char **hosts, char *program)
{
    for (int i = 0; i < job.workers; i++) {
        char *host = hosts[i % count];
        int got = pvm_spawn(program, NULL, PvmTaskHost, host, 1, &peers[i]);
        if (got != 1) {
            fprintf(stderr, "cannot spawn on %s: %d\n", host, got == 0 ? peers[i] : got);
            exit(2);
        }
        printf("worker %d t%x %s %s\n", i, peers[i], host, role_names[i < MIXED ? i : MIXED]);
    }
    for (int i = 0; i < job.workers; i++)
        must(pvm_recv(peers[i], TAG_READY), "recv ready");
    for (int i = 0; i < job.workers; i++) {
        must(pvm_initsend(PvmDataDefault), "initsend");
        pvm_pkint(&i, 1, 1);
        pvm_pkint((int *)&job, JOB_WORDS, 1);
        pvm_pkint(peers, job.workers, 1);
        must(pvm_send(peers[i], TAG_PEERS), "send peers");
    }
}

static int direct(int count, char **hosts, char *program)
{
    int told = 0, ended = 0, total[SUMMARY] = { 0 };
    int64_t give_up = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    spawn_workers(count, hosts, program);
    while (ended < job.workers) {
        struct timeval step = { 0, 50000 };
        struct pollfd input = { 0, POLLIN, 0 };
        int bytes, tag, tid, summary[SUMMARY];
        if (!told && poll(&input, 1, 0) > 0) {
            told = 1;
            give_up = now_us() + 2 * QUIET_END_S * 1000000ll;
            pvm_initsend(PvmDataDefault);
            must(pvm_mcast(peers, job.workers, TAG_STOP), "send stop");
        }
        if (told && now_us() > give_up) {
            printf("summary: %d workers gave no account\n", job.workers - ended);
            return 2;
        }
        int buf = pvm_trecv(-1, -1, &step);
        must(buf, "recv");
        if (buf == 0)
            continue;
        pvm_bufinfo(buf, &bytes, &tag, &tid);
        if (tag == TAG_PROGRESS) {
            print_progress();
        } else if (tag == TAG_ROUTES) {
            print_route();
        } else if (tag == TAG_SUMMARY) {
            pvm_upkint(summary, SUMMARY, 1);
            for (int i = 1; i < SUMMARY; i++)
                total[i] += summary[i];
            printf("account %d checked=%d lost=%d doubled=%d disordered=%d damaged=%d\n", summary[0], summary[1],
                   summary[2], summary[3], summary[4], summary[5]);
            ended++;
        }
    }
    printf("summary: checked=%d lost=%d doubled=%d disordered=%d damaged=%d\n", total[1], total[2], total[3], total[4],
           total[5]);
    if (job.wants >= FORKS)
        printf("children: %d, of which %d failed\n", total[CHILDREN], total[CHILDREN - 1]);
    pvm_exit();
    for (int i = FAULTS_FROM; i < CHILDREN; i++)
        if (total[i] != 0)
            return 1;
    return 0;
}

int main(int argc, char **argv)
{
    int option;
    must(pvm_mytid(), "mytid");
    if (pvm_parent() > 0)
        return worker();
    while ((option = getopt(argc, argv, "n:k:b:dfr:g")) != -1) {
        switch (option) {
        case 'n': job.workers = atoi(optarg); break;
        case 'k': job.reach = atoi(optarg); break;
        case 'b': job.ballast = atoi(optarg); break;
        case 'd': job.wants = DIRECT; break;
        case 'f': job.wants = FORKS; break;
        case 'r': job.report_ms = atoi(optarg); break;
        case 'g': job.gives_back = 1; break;
        default: optind = argc;
        }
    }
    if (optind >= argc || job.workers < 2 || job.workers > WORKERS_MAX) {
        fprintf(stderr, "usage: all_to_all [-n COUNT] [-k REACH] [-b MIB] [-d | -f] [-r MS] [-g] HOST...\n");
        return 2;
    }
    return direct(argc - optind, argv + optind, argv[0]);
}
