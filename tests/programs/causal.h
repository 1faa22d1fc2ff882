/*
 * What the programs that check causal order share (`causal_*.c`). Causal order: if one message was sent before another
 * one in the order of cause and effect, through whatever tasks, both with the same receiver, that receiver gets them in
 * this order.
 *
 * A program is started as its director. The director spawns the roles of the program on the hosts that it is given,
 * sends each role the settings and the tids of all, adds up the reports of all roles and prints one line:
 *
 *     causal NAME checked=N violations=V overtaken=O
 *
 * `checked` counts the observations of receivers, and `violations` those that contradict causal order. `overtaken` is
 * not 0 in `causal_quiet` only. The kernel ends a program that takes too long, by SIGALRM.
 */
#ifndef CAUSAL_H
#define CAUSAL_H

#include <fcntl.h>
#include <pvm3.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#define TASKS_MAX 16
#define ROLES_MAX 6
#define PATH_BYTES 512
/* The kernel ends a task that takes longer, in a run whose end is its own and in one whose end is a file. */
#define STUCK_SECONDS 50
#define ENDLESS_STUCK_SECONDS 300
/* Between two looks of the director for the file that ends an endless run, in microseconds. */
#define LOOK_US 20000
/* Bytes of large messages that may be on their way from one task to another. */
#define BYTES_ON_THEIR_WAY (16 << 20)
#define MESSAGES_ON_THEIR_WAY 1000
/* Turns of a loop between two receptions of a slow receiver: about 30 microseconds. */
#define SLOW_TURNS 30000

/* Messages between director and roles; the programs' own tags are below. */
enum { TAG_START = 9001, TAG_STOP, TAG_REPORT };

struct role {
    const char *name;
    void (*run)(void);
    int count;             /* tasks in this role */
};

/* The roles in the order of their spawns; the last one has no name. Options may change the counts. */
static struct role roles[ROLES_MAX];

/* What the director sends to each task. */
static struct settings {
    int rounds, bytes, slow, route, members, multicast, picks, notices, third_pair, endless, event, abrupt,
        has_phase_file;
} job = { .rounds = 100, .bytes = 8, .members = 1 };
#define SETTINGS (int)(sizeof job / sizeof(int))
static char phase_path[PATH_BYTES];

static int director, task_count, tids[TASKS_MAX], role_of[TASKS_MAX];
static int own_role, own_number; /* the number counts the tasks of one role from 0 */
static int checked, violations, overtaken;
static char *own_program;

static void must(int code, const char *call)
{
    if (code < 0) {
        fprintf(stderr, "%s: %s: %d\n", own_program, call, code);
        exit(3);
    }
}

/* The tid of a task by its role's place in `roles` and its number. */
static inline int tid_of(int role, int number)
{
    for (int i = 0; i < task_count; i++)
        if (role_of[i] == role && number-- == 0)
            return tids[i];
    must(-1, "no such task");
    return 0;
}

/* Sends a number. */
static inline void tell(int tid, int tag, int number)
{
    must(pvm_initsend(PvmDataDefault), "initsend");
    must(pvm_pkint(&number, 1, 1), "pkint");
    must(pvm_send(tid, tag), "send");
}

/* Makes a send buffer with a number and `job.bytes` bytes. */
static inline void pack_data(int number)
{
    static char *data;
    if (!data)
        data = calloc(1, (size_t)job.bytes);
    must(pvm_initsend(PvmDataRaw), "initsend");
    must(pvm_pkint(&number, 1, 1), "pkint");
    must(pvm_pkbyte(data, job.bytes, 1), "pkbyte");
}

static inline void send_data(int tid, int tag, int number)
{
    pack_data(number);
    must(pvm_send(tid, tag), "send data");
}

/* The number in the message that was received last. */
static inline int number_in_message(void)
{
    int number = -1;
    must(pvm_upkint(&number, 1, 1), "upkint");
    return number;
}

static inline int await(int tid, int tag)
{
    must(pvm_recv(tid, tag), "recv");
    return number_in_message();
}

/* Checks that a message is there at once, and receives it. */
static inline int find_at_once(int tid, int tag)
{
    int buffer = pvm_nrecv(tid, tag);
    must(buffer, "nrecv");
    checked++;
    if (buffer > 0)
        return number_in_message();
    violations++;
    return await(tid, tag);
}

/* Checks that messages up to number `wanted` have come; `seen` is the number of the last one. */
static inline void check_seen(int seen, int wanted)
{
    checked++;
    violations += seen < wanted;
}

/* Computes between two calls, if the receivers are slow. */
static inline void be_slow(void)
{
    for (volatile int turn = job.slow ? SLOW_TURNS : 0; turn > 0; turn--)
        continue;
}

/* How many messages a sender may be ahead of its receiver. */
static inline int window(void)
{
    int count = BYTES_ON_THEIR_WAY / job.bytes;
    return count > MESSAGES_ON_THEIR_WAY ? MESSAGES_ON_THEIR_WAY : count < 2 ? 2 : count;
}

/* True if there is no further round: all have been done, or the director has ended an endless run. */
static inline int is_over(int rounds_done)
{
    if (!job.endless)
        return rounds_done >= job.rounds;
    int buffer = pvm_nrecv(director, TAG_STOP);
    must(buffer, "nrecv stop");
    return buffer > 0;
}

static inline void set_route(int route)
{
    must(pvm_setopt(PvmRoute, route), "setopt");
}

static inline void guard_against_hang(void)
{
    alarm(job.endless ? ENDLESS_STUCK_SECONDS : STUCK_SECONDS);
}

static void run_role(void)
{
    must(pvm_recv(-1, TAG_START), "recv start");
    must(pvm_bufinfo(pvm_getrbuf(), NULL, NULL, &director), "bufinfo");
    must(pvm_upkint((int *)&job, SETTINGS, 1), "unpack settings");
    must(pvm_upkstr(phase_path), "unpack path");
    must(pvm_upkint(&own_role, 1, 1), "unpack role");
    must(pvm_upkint(&own_number, 1, 1), "unpack number");
    must(pvm_upkint(&task_count, 1, 1), "unpack count");
    must(pvm_upkint(tids, task_count, 1), "unpack tids");
    must(pvm_upkint(role_of, task_count, 1), "unpack roles");
    guard_against_hang();
    if (job.route)
        set_route(job.route);
    roles[own_role].run();
    int report[] = { checked, violations, overtaken };
    must(pvm_initsend(PvmDataDefault), "initsend");
    must(pvm_pkint(report, 3, 1), "pack report");
    must(pvm_send(director, TAG_REPORT), "send report");
    pvm_exit();
}

static void spawn_roles(int host_count, char **hosts)
{
    char *arguments[] = { "role", NULL };
    for (int role = 0; roles[role].name; role++)
        for (int number = 0; number < roles[role].count; number++) {
            int *tid = &tids[task_count];
            char *host = host_count > 0 ? hosts[task_count % host_count] : NULL;
            int spawned = pvm_spawn(own_program, arguments, host ? PvmTaskHost : PvmTaskDefault, host, 1, tid);
            if (spawned != 1)
                must(spawned < 0 ? spawned : *tid, "spawn");
            printf("task %s t%x %s\n", roles[role].name, *tid, host ? host : "-");
            role_of[task_count++] = role;
        }
    for (int i = 0; i < task_count; i++) {
        int number = 0;
        for (int before = 0; before < i; before++)
            number += role_of[before] == role_of[i];
        must(pvm_initsend(PvmDataDefault), "initsend");
        pvm_pkint((int *)&job, SETTINGS, 1);
        pvm_pkstr(phase_path);
        pvm_pkint(&role_of[i], 1, 1);
        pvm_pkint(&number, 1, 1);
        pvm_pkint(&task_count, 1, 1);
        pvm_pkint(tids, task_count, 1);
        pvm_pkint(role_of, task_count, 1);
        must(pvm_send(tids[i], TAG_START), "send start");
    }
}

/* Adds up the reports. Ends an endless run when there is a file `end_path`: the first role decides about rounds. */
static void gather_reports(const char *end_path)
{
    int told = 0;
    for (int reports = 0; reports < task_count;) {
        struct timeval until_look = { 0, LOOK_US };
        int buffer = end_path && !told ? pvm_trecv(-1, TAG_REPORT, &until_look) : pvm_recv(-1, TAG_REPORT), report[3];
        must(buffer, "recv report");
        if (end_path && !told && access(end_path, F_OK) == 0) {
            told = 1;
            tell(tids[0], TAG_STOP, 0);
        }
        if (buffer == 0)
            continue;
        must(pvm_upkint(report, 3, 1), "unpack report");
        checked += report[0];
        violations += report[1];
        overtaken += report[2];
        reports++;
    }
}

/* Prints the result, or writes it to a file whose name is complete only when the line is. */
static void print_result(const char *name, const char *result_path)
{
    char new_path[PATH_BYTES + 8];
    FILE *out = stdout;
    if (result_path) {
        snprintf(new_path, sizeof new_path, "%s.new", result_path);
        out = fopen(new_path, "w");
        must(out ? 0 : -1, "open result");
    }
    fprintf(out, "causal %s checked=%d violations=%d overtaken=%d\n", name, checked, violations, overtaken);
    if (result_path) {
        must(fclose(out), "write result");
        must(rename(new_path, result_path), "rename result");
    }
}

static int route_of(const char *name)
{
    return !strcmp(name, "dont") ? PvmDontRoute : !strcmp(name, "direct") ? PvmRouteDirect : 0;
}

/*
 * Runs a program. The options are for all programs, and each program ignores those that it has no use for:
 *   -n ROUNDS  -s BYTES of data in addition to the number  -k MEMBERS: tasks of the role of which there are several
 *   -r default|dont|direct: route of all tasks  -b: receivers are busy between two receptions
 *   -u FILE: no end of the rounds until there is this file  -o FILE: the result is written to it
 *   -m, -p, -w, -t, -x, -e EVENT, -f FILE: see the program
 */
static int run_causal(const char *name, int argc, char **argv, void (*prepare)(void))
{
    const char *end_path = NULL, *result_path = NULL;
    int option;
    own_program = argv[0];
    guard_against_hang();
    must(pvm_mytid(), "mytid");
    if (argc > 1 && !strcmp(argv[1], "role")) {
        run_role();
        return 0;
    }
    while ((option = getopt(argc, argv, "n:s:k:r:bu:o:mpwtxe:f:")) != -1) {
        switch (option) {
        case 'n': job.rounds = atoi(optarg); break;
        case 's': job.bytes = atoi(optarg); break;
        case 'k': job.members = atoi(optarg); break;
        case 'r': job.route = route_of(optarg); break;
        case 'b': job.slow = 1; break;
        case 'u': job.endless = 1; end_path = optarg; break;
        case 'o': result_path = optarg; break;
        case 'm': job.multicast = 1; break;
        case 'p': job.picks = 1; break;
        case 'w': job.notices = 1; break;
        case 't': job.third_pair = 1; break;
        case 'x': job.abrupt = 1; break;
        case 'e': job.event = optarg[0]; break;
        case 'f':
            job.has_phase_file = 1;
            snprintf(phase_path, sizeof phase_path, "%s", optarg);
            break;
        default: return 2;
        }
    }
    guard_against_hang();
    setvbuf(stdout, NULL, _IOLBF, 0);
    prepare();
    spawn_roles(argc - optind, argv + optind);
    gather_reports(end_path);
    print_result(name, result_path);
    pvm_exit();
    return 0;
}
#endif
