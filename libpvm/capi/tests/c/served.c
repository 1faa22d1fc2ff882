/*
 * Tasks that take over work of the daemon (tasker, hoster, resource manager), written as a user of PVM would write
 * them, and tasks that use them. The first argument selects the role of this process.
 */
#include <pvm3.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#define SM(n) ((int)(0x80040001u + (n)))
#define SM_SPAWN SM(0)
#define SM_EXEC SM(1)
#define SM_EXECACK SM(2)
#define SM_NOTIFY SM(9)
#define SM_TASKX SM(10)
#define SM_SCHED SM(13)
#define SM_STHOST SM(14)
#define SM_STHOSTACK SM(15)
#define SM_STTASK SM(16)

#define CHILDREN 64
#define TEXT 4096

static void must(int good, const char *what)
{
    if (!good) {
        fprintf(stderr, "%s failed, pvm_errno %d\n", what, pvm_errno);
        exit(1);
    }
}

static void say(const char *text)
{
    puts(text);
    fflush(stdout);
}

/* ---- Tasker ---- */

static struct {
    pid_t pid;
    int tid;
} children[CHILDREN];

static void start_task(void)
{
    char path[TEXT], text[TEXT], *argv[64];
    int tid, flags, argc, nenv, i, where[3];
    pid_t pid;

    must(pvm_upkint(&tid, 1, 1) == 0 && pvm_upkint(&flags, 1, 1) == 0 && pvm_upkstr(path) == 0, "the order");
    pvm_upkint(&argc, 1, 1);
    for (i = 0; i < argc; i++) {
        pvm_upkstr(text);
        argv[i] = strdup(text);
    }
    argv[argc] = 0;
    pvm_upkint(&nenv, 1, 1);
    pid = fork();
    for (i = 0; i < nenv; i++) {
        pvm_upkstr(text);
        if (i == 0 && pid != 0)
            must(strncmp(text, "PVMEPID=", 8) == 0, "the first variable");
        if (pid == 0)
            putenv(strdup(text));
    }
    if (pid == 0) {
        setenv("STARTED_BY", "tasker", 1);
        execv(path, argv);
        _exit(1);
    }
    must(pvm_upkint(where, 3, 1) == 0 && where[1] >= 1 && where[2] >= where[1], "the position");
    for (i = 0; i < CHILDREN && children[i].pid; i++)
        ;
    children[i].pid = pid;
    children[i].tid = tid;
}

static void reap(void)
{
    int status, i, zeros[4] = {0, 0, 0, 0};
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (i = 0; i < CHILDREN; i++)
            if (children[i].pid == pid) {
                pvm_initsend(PvmDataDefault);
                pvm_pkint(&children[i].tid, 1, 1);
                pvm_pkint(&status, 1, 1);
                pvm_pkint(zeros, 4, 1);
                pvm_send((int)0x80000000u, SM_TASKX);
                children[i].pid = 0;
            }
}

static int tasker(void)
{
    struct timeval moment = {0, 20000};

    pvm_setopt(PvmResvTids, 1);
    must(pvm_reg_tasker() == 0, "pvm_reg_tasker");
    say("serving");
    for (;;) {
        int got = pvm_trecv(-1, SM_STTASK, &moment);
        if (got < 0)
            return 0;
        if (got > 0)
            start_task();
        reap();
    }
}

/* ---- Hoster ---- */

static void start_daemon(const char *login, const char *command, const char *vmid, char *line)
{
    int in[2], out[2];
    FILE *said;

    must(pipe(in) == 0 && pipe(out) == 0, "pipe");
    if (fork() == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        close(in[1]);
        close(out[0]);
        execl(getenv("PVM_RSH"), "rsh", login, command, (char *)0);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    if (*vmid)
        dprintf(in[1], "PVM_VMID=%s\n", vmid);
    said = fdopen(out[0], "r");
    strcpy(line, "PvmCantStart");
    while (fgets(line, TEXT, said) && strncmp(line, "ddpro", 5))
        strcpy(line, "PvmCantStart");
    line[strcspn(line, "\n")] = 0;
    close(in[1]);
    fclose(said);
}

static void start_hosts(void)
{
    char options[TEXT], login[TEXT], command[TEXT], other[TEXT], vmid[TEXT], line[TEXT];
    struct pvmminfo info;
    int n, i, host, mid, from, src;

    from = pvm_getrbuf();
    pvm_getminfo(from, &info);
    pvm_bufinfo(from, 0, 0, &src);
    pvm_upkint(&n, 1, 1);
    mid = pvm_initsend(PvmDataDefault);
    pvm_pkint(&n, 1, 1);
    for (i = 0; i < n; i++) {
        must(pvm_upkint(&host, 1, 1) == 0 && pvm_upkstr(options) == 0 && pvm_upkstr(login) == 0, "the order");
        must(pvm_upkstr(command) == 0 && pvm_upkstr(other) == 0 && pvm_upkstr(vmid) == 0, "the order");
        must(strlen(command) < 512 && strlen(vmid) < 256, "room for the order");
        printf("order %s so=%s\n", login, options);
        fflush(stdout);
        if (strcmp(login, "refused"))
            start_daemon(login, command, vmid, line);
        else
            strcpy(line, "PvmDupHost");
        pvm_pkint(&host, 1, 1);
        pvm_pkstr(line);
    }
    info.src = info.dst = 0;
    pvm_setminfo(mid, &info);
    pvm_send(src, SM_STHOSTACK);
}

static int hoster(int silent)
{
    pvm_setopt(PvmResvTids, 1);
    must(pvm_reg_hoster() == 0, "pvm_reg_hoster");
    say("serving");
    while (pvm_recv(-1, SM_STHOST) > 0) {
        if (silent)
            say("heard");
        else
            start_hosts();
    }
    return 0;
}

/* ---- Resource manager: starts all tasks on one host ---- */

static int manager(int host)
{
    struct pvmminfo info;
    struct pvmhostinfo *master;
    int before, client, tag, mid, waiting = 0, waiting_wid = 0;
    int watched[CHILDREN], nwatched = 0, watcher_tid = 0, watcher_tag = 0;

    pvm_setopt(PvmResvTids, 1);
    before = pvm_reg_rm(&master);
    printf("before %x master %x\n", before, master->hi_tid);
    say("serving");
    while ((mid = pvm_recv(-1, -1)) > 0) {
        pvm_getminfo(mid, &info);
        pvm_bufinfo(mid, 0, &tag, &client);
        if (tag == SM_SPAWN) {
            char file[TEXT], where[TEXT], text[TEXT];
            int flags, count, argc, sinks[6], nenv, i, position[2] = {0, 0};
            struct pvmminfo own = info;

            pvm_upkstr(file), pvm_upkint(&flags, 1, 1), pvm_upkstr(where), pvm_upkint(&count, 1, 1);
            pvm_upkint(&argc, 1, 1);
            mid = pvm_initsend(PvmDataDefault);
            pvm_pkint(&client, 1, 1), pvm_pkstr(file), pvm_pkint(&flags, 1, 1), pvm_pkint(&count, 1, 1);
            pvm_pkint(&argc, 1, 1);
            for (i = 0; i < argc; i++)
                pvm_upkstr(text), pvm_pkstr(text);
            pvm_upkint(sinks, 6, 1), pvm_pkint(sinks, 6, 1);
            pvm_upkint(&nenv, 1, 1), pvm_pkint(&nenv, 1, 1);
            for (i = 0; i < nenv; i++)
                pvm_upkstr(text), pvm_pkstr(text);
            position[1] = count;
            pvm_pkint(position, 2, 1);
            waiting = client, waiting_wid = info.wid;
            own.wid = 77;
            pvm_setminfo(mid, &own);
            pvm_send(host | (int)0x80000000u, SM_EXEC);
        } else if (tag == SM_EXECACK && info.wid == 77) {
            int n, tids[CHILDREN];

            pvm_upkint(&n, 1, 1);
            must(n <= CHILDREN && (n < 0 || pvm_upkint(tids, n, 1) == 0), "the acknowledgement");
            mid = pvm_initsend(PvmDataDefault);
            pvm_pkint(&n, 1, 1);
            pvm_pkint(tids, n, 1);
            info.wid = waiting_wid;
            pvm_setminfo(mid, &info);
            pvm_send(waiting, SM_SPAWN);
        } else if (tag == SM_NOTIFY) {
            int words[4];

            must(pvm_upkint(words, 4, 1) == 0 && words[0] == PvmTaskExit && words[3] <= CHILDREN, "the request");
            pvm_upkint(watched, words[3], 1);
            nwatched = words[3], watcher_tid = client, watcher_tag = words[2];
        } else if (tag == SM_TASKX) {
            int tid, i;

            pvm_upkint(&tid, 1, 1);
            for (i = 0; i < nwatched; i++)
                if (watched[i] == tid) {
                    pvm_initsend(PvmDataDefault);
                    pvm_pkint(&tid, 1, 1);
                    pvm_send(watcher_tid, watcher_tag);
                }
        } else if (tag == SM_SCHED) {
            int refused = -8;

            mid = pvm_initsend(PvmDataDefault);
            pvm_pkint(&refused, 1, 1);
            pvm_setminfo(mid, &info);
            pvm_send(client, SM_SCHED);
        }
    }
    return 0;
}

/* ---- Programs that use these services ---- */

static int worker(void)
{
    int parent = pvm_parent(), go;
    char *by = getenv("STARTED_BY");

    must(parent > 0, "pvm_parent");
    pvm_initsend(PvmDataDefault);
    pvm_pkstr(by ? by : "daemon");
    pvm_send(parent, 1);
    pvm_recv(parent, 2);
    pvm_upkint(&go, 1, 1);
    pvm_exit();
    return go;
}

/* Spawns workers, prints who started each of them, lets them exit and waits for their exit notifications. */
static int spawner(const char *self, int count)
{
    int tids[CHILDREN], i, tid, host;
    char *argv[] = {"worker", 0}, by[TEXT];

    must(pvm_mytid() > 0, "pvm_mytid");
    must(pvm_spawn((char *)self, argv, PvmTaskDefault, "", count, tids) == count, "pvm_spawn");
    pvm_notify(PvmTaskExit, 3, count, tids);
    for (i = 0; i < count; i++) {
        pvm_recv(-1, 1);
        pvm_bufinfo(pvm_getrbuf(), 0, 0, &tid);
        pvm_upkstr(by);
        host = pvm_tidtohost(tid);
        printf("by %s on %x\n", by, host);
        fflush(stdout);
        pvm_initsend(PvmDataDefault);
        host = 0;
        pvm_pkint(&host, 1, 1);
        pvm_send(tid, 2);
    }
    for (i = 0; i < count; i++)
        pvm_recv(-1, 3);
    pvm_exit();
    return 0;
}

/* Spawns one worker that does not exit by itself, and reports the notification of its end. */
static int watcher(const char *self)
{
    char *argv[] = {"worker", 0};
    int tid;

    must(pvm_spawn((char *)self, argv, PvmTaskDefault, "", 1, &tid) == 1, "pvm_spawn");
    pvm_recv(tid, 1);
    pvm_notify(PvmTaskExit, 3, 1, &tid);
    say("watching");
    pvm_recv(-1, 3);
    say("told");
    pvm_exit();
    return 0;
}

static int add(int count, char **names)
{
    int status[CHILDREN], i, good;

    good = pvm_addhosts(names, count, status);
    printf("added %d\n", good);
    for (i = 0; i < count; i++)
        printf("%s %d\n", names[i], status[i]);
    pvm_exit();
    return 0;
}

/* A service can be registered and unregistered. While registered, it shows in the task's flags and in the mailbox. */
static int twice(void)
{
    struct pvmtaskinfo *tasks;
    struct pvmmboxinfo *classes;
    int n, me = pvm_mytid();

    must(pvm_reg_hoster() == 0 && pvm_reg_tasker() == 0, "registering");
    must(pvm_tasks(me, &n, &tasks) == 0 && n == 1 && (tasks->ti_flag & 0x600) == 0x600, "the marks");
    must(pvm_getmboxinfo("###_PVM_TASKER_###", &n, &classes) == 0 && n == 1 && classes->mi_nentries == 1, "the class");
    must(pvm_reg_hoster() == 0 && pvm_reg_tasker() == 0, "giving back");
    must(pvm_tasks(me, &n, &tasks) == 0 && (tasks->ti_flag & 0x600) == 0, "no marks");
    must(pvm_getmboxinfo("###_PVM_TASKER_###", &n, &classes) == 0 && n == 0, "no class");
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    const char *part = argc > 1 ? argv[1] : "";

    if (!strcmp(part, "tasker"))
        return tasker();
    if (!strcmp(part, "hoster"))
        return hoster(argc > 2);
    if (!strcmp(part, "manager"))
        return manager((int)strtol(argv[2], 0, 16));
    if (!strcmp(part, "worker"))
        return worker();
    if (!strcmp(part, "spawner"))
        return spawner(argv[0], atoi(argv[2]));
    if (!strcmp(part, "watcher"))
        return watcher(argv[0]);
    if (!strcmp(part, "add"))
        return add(argc - 2, argv + 2);
    if (!strcmp(part, "twice"))
        return twice();
    if (!strcmp(part, "deposed")) {
        pvm_setopt(PvmAutoErr, 0);
        printf("%d\n", pvm_reg_rm(0));
        return 0;
    }
    if (!strcmp(part, "register")) {
        pvm_setopt(PvmAutoErr, 0);
        printf("hoster %d tasker %d\n", pvm_reg_hoster(), pvm_reg_tasker());
        return 0;
    }
    fprintf(stderr, "no such part: %s\n", part);
    return 2;
}
