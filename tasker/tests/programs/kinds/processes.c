/* Processes of a task, what they share, and what each has of its own. */
#include "kinds.h"
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

extern char **environ;

/* Answers each number with the next one of its own, until its input ends. */
static void answer(int from, int to, uint32_t add) {
    uint32_t n;
    while (read(from, &n, sizeof n) == sizeof n) {
        n += add;
        if (write(to, &n, sizeof n) != sizeof n) _exit(3);
    }
    _exit(20 + add);
}

static void children(void) {
    enum { MANY = 4, WAITING = 500 };
    int to[MANY][2], from[MANY][2], status;
    pid_t child[MANY];
    for (int c = 0; c < MANY; c++) {
        CHECK(pipe(to[c]) == 0 && pipe(from[c]) == 0);
        child[c] = fork();
        if (child[c] == 0) {
            for (int i = 0; i <= c; i++) { close(to[i][1]); close(from[i][0]); }
            answer(to[c][0], from[c][1], c);
        }
        close(to[c][0]);
        close(from[c][1]);
    }
    /* Numbers are on their way in both directions when it moves. */
    for (int c = 0; c < MANY; c++)
        for (uint32_t n = 0; n < WAITING; n++) CHECK(write(to[c][1], &n, sizeof n) == sizeof n);
    moved();
    for (int c = 0; c < MANY; c++) {
        for (uint32_t n = 0; n < 2 * WAITING; n++) {
            uint32_t got;
            uint32_t next = n + WAITING;
            if (n < WAITING) CHECK(write(to[c][1], &next, sizeof next) == sizeof next);
            CHECK(read(from[c][0], &got, sizeof got) == sizeof got);
            CHECK(got == n + c);
        }
        close(to[c][1]);
        CHECK(waitpid(child[c], &status, 0) == child[c] && WIFEXITED(status) && WEXITSTATUS(status) == 20 + c);
    }
    CHECK(waitpid(-1, &status, 0) == -1 && errno == ECHILD);
}

static void zombie(void) {
    int status;
    siginfo_t info;
    pid_t ended = fork();
    if (ended == 0) _exit(5);
    pid_t killed = fork();
    if (killed == 0) { raise(SIGKILL); }
    CHECK(waitid(P_PID, ended, &info, WEXITED | WNOWAIT) == 0 && waitid(P_PID, killed, &info, WEXITED | WNOWAIT) == 0);
    moved();
    CHECK(waitpid(ended, &status, 0) == ended && WIFEXITED(status) && WEXITSTATUS(status) == 5);
    CHECK(waitpid(killed, &status, 0) == killed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* The state of a process, whose number in /proc is another one: a descriptor of it tells which. */
static char state_of(pid_t pid) {
    char path[64], line[256];
    int outer = 0, of = syscall(SYS_pidfd_open, pid, 0);
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", of);
    FILE *info = fopen(path, "r");
    CHECK(of >= 0 && info);
    while (fgets(line, sizeof line, info)) sscanf(line, "Pid: %d", &outer);
    fclose(info);
    close(of);
    snprintf(path, sizeof path, "/proc/%d/stat", outer);
    int stat = open(path, O_RDONLY);
    char state = state_in(stat);
    close(stat);
    return state;
}

static void stopped(void) {
    int status;
    siginfo_t info;
    pid_t child = fork();
    if (child == 0) {
        raise(SIGSTOP);
        _exit(6);
    }
    CHECK(waitid(P_PID, child, &info, WSTOPPED | WNOWAIT) == 0);
    moved();
    CHECK(state_of(child) == 'T');
    CHECK(kill(child, SIGCONT) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 6);
}

static void family(void) {
    int ready[2], status;
    char byte;
    CHECK(pipe(ready) == 0);
    pid_t self = getpid(), session = getsid(0), child = fork();
    if (child == 0) {
        CHECK(setsid() == getpid());
        pid_t parent = getpid(), grandchild = fork();
        if (grandchild == 0) {
            CHECK(setpgid(0, 0) == 0);
            CHECK(write(ready[1], "x", 1) == 1);
            UNTIL(told_to_go());
            _exit(getppid() == parent && getsid(0) == parent && getpgrp() == getpid() ? 30 : 31);
        }
        UNTIL(told_to_go());
        CHECK(getppid() == self && getsid(0) == getpid() && getpgrp() == getpid());
        CHECK(waitpid(grandchild, &status, 0) == grandchild && WIFEXITED(status) && WEXITSTATUS(status) == 30);
        _exit(33);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    moved();
    CHECK(getpid() == self && getsid(0) == session && getsid(child) == child);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 33);
    /* And it can still make processes. */
    child = fork();
    if (child == 0) {
        execl("/bin/sh", "sh", "-c", "exit 34", (char *)0);
        _exit(1);
    }
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 34);
}

struct shared {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int turn;
    uint64_t words[1 << 16];
};

static void share(struct shared *shared) {
    enum { WORDS = 1 << 16 };
    pthread_mutexattr_t both;
    pthread_condattr_t both_too;
    int status;
    pthread_mutexattr_init(&both);
    pthread_mutexattr_setpshared(&both, PTHREAD_PROCESS_SHARED);
    pthread_condattr_init(&both_too);
    pthread_condattr_setpshared(&both_too, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&shared->lock, &both);
    pthread_cond_init(&shared->changed, &both_too);
    for (int i = 0; i < WORDS; i++) shared->words[i] = word_at(i);
    pid_t child = fork();
    if (child == 0) {
        pthread_mutex_lock(&shared->lock);
        shared->turn = 1;
        pthread_cond_broadcast(&shared->changed);
        while (shared->turn != 2) pthread_cond_wait(&shared->changed, &shared->lock);
        for (int i = 0; i < WORDS; i++) CHECK(shared->words[i] == word_at(i + WORDS));
        for (int i = 0; i < WORDS; i++) shared->words[i] = word_at(i + 2 * WORDS);
        shared->turn = 3;
        pthread_cond_broadcast(&shared->changed);
        pthread_mutex_unlock(&shared->lock);
        _exit(40);
    }
    pthread_mutex_lock(&shared->lock);
    while (shared->turn != 1) pthread_cond_wait(&shared->changed, &shared->lock);
    pthread_mutex_unlock(&shared->lock);
    moved();
    pthread_mutex_lock(&shared->lock);
    for (int i = 0; i < WORDS; i++) CHECK(shared->words[i] == word_at(i));
    for (int i = 0; i < WORDS; i++) shared->words[i] = word_at(i + WORDS);
    shared->turn = 2;
    pthread_cond_broadcast(&shared->changed);
    while (shared->turn != 3) pthread_cond_wait(&shared->changed, &shared->lock);
    for (int i = 0; i < WORDS; i++) CHECK(shared->words[i] == word_at(i + 2 * WORDS));
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 40);
}

static void shared_memory(void) {
    void *at = mmap(0, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    share(at);
}

static void shared_memory_file(void) {
    int fd = memfd_create("both", 0);
    CHECK(fd >= 0 && ftruncate(fd, sizeof(struct shared)) == 0);
    void *at = mmap(0, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED);
    share(at);
}

static void surroundings(void) {
    const int limits[] = {RLIMIT_CORE, RLIMIT_DATA, RLIMIT_STACK, RLIMIT_NOFILE, RLIMIT_FSIZE};
    struct rlimit before[5], now;
    char cwd[4096], name[16];
    int kept = 0;
    CHECK(mkdir(in_place("working"), 0700) == 0 && chdir(in_place("working")) == 0);
    umask(027);
    errno = 0;
    CHECK(nice(7) == 7);
    CHECK(setenv("SEMPA_ROW", "kept", 1) == 0);
    char **words = environ;
    CHECK(prctl(PR_SET_NAME, "a row") == 0 && prctl(PR_SET_PDEATHSIG, SIGUSR2) == 0);
    CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    signal(SIGUSR2, SIG_IGN);
    for (int i = 0; i < 5; i++) {
        CHECK(getrlimit(limits[i], &before[i]) == 0);
        if (before[i].rlim_cur == RLIM_INFINITY || before[i].rlim_cur > 1 << 20) before[i].rlim_cur = (8 << 20) + i * 4096;
        CHECK(setrlimit(limits[i], &before[i]) == 0);
    }
    moved();
    for (int i = 0; i < 5; i++) {
        CHECK(getrlimit(limits[i], &now) == 0);
        CHECK(now.rlim_cur == before[i].rlim_cur && now.rlim_max == before[i].rlim_max);
    }
    CHECK(getcwd(cwd, sizeof cwd) && !strcmp(cwd, in_place("working")));
    CHECK(umask(0) == 027);
    CHECK(getpriority(PRIO_PROCESS, 0) == 7);
    CHECK(!strcmp(getenv("SEMPA_ROW"), "kept") && !strcmp(getenv("MARK"), "here"));
    CHECK(prctl(PR_GET_NAME, name) == 0 && !strcmp(name, "a row"));
    CHECK(prctl(PR_GET_CHILD_SUBREAPER, &kept) == 0 && kept == 1);
    CHECK(prctl(PR_GET_PDEATHSIG, &kept) == 0 && kept == SIGUSR2);
    CHECK(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1);
    FILE *initial = fopen("/proc/self/environ", "r");
    char text[4096] = "";
    size_t read = fread(text, 1, sizeof text, initial);
    CHECK(memmem(text, read, "MARK=here", 9) && words == environ);
}

static void groups(void) {
    gid_t groups[] = {7, 11, 4242}, now[8];
    NEED(setgroups(3, groups) == 0);
    CHECK(prctl(PR_SET_DUMPABLE, 0) == 0 && prctl(PR_SET_DUMPABLE, 1) == 0);
    moved();
    CHECK(getgroups(8, now) == 3 && now[0] == 7 && now[1] == 11 && now[2] == 4242);
    CHECK(prctl(PR_GET_DUMPABLE) == 1);
}

static void random_addresses(void) {
    CHECK(personality(ADDR_NO_RANDOMIZE) != -1);
    moved();
    puts(personality(0xffffffff) == ADDR_NO_RANDOMIZE ? "kept" : "as usual");
}

static uint64_t number_in(const char *path, const char *after, int base) {
    char text[256] = "", *start = text;
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && read(fd, text, sizeof text - 1) > 0);
    close(fd);
    if (*after) CHECK((start = strstr(text, after)));
    return strtoull(start + strlen(after), 0, base);
}

static void set_to(const char *path, const char *text) {
    int fd = open(path, O_WRONLY);
    CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
}

static volatile int slack_is_set, slack_may_be_read;

static void *slack_of_thread(void *unused) {
    CHECK(prctl(PR_SET_TIMERSLACK, 123456) == 0);
    slack_is_set = 1;
    UNTIL(slack_may_be_read);
    CHECK(prctl(PR_GET_TIMERSLACK) == 123456);
    return unused;
}

static void settings(void) {
    pthread_t thread;
    int status, has_autogroup = access("/proc/self/autogroup", W_OK) == 0;
    CHECK(pthread_create(&thread, 0, slack_of_thread, 0) == 0);
    UNTIL(slack_is_set);
    CHECK(prctl(PR_SET_TIMERSLACK, 77777) == 0);
    set_to("/proc/self/coredump_filter", "0x7f");
    if (has_autogroup) set_to("/proc/self/autogroup", "9");
    pid_t child = fork();
    if (child == 0) {
        set_to("/proc/self/coredump_filter", "0x3");
        UNTIL(told_to_go());
        _exit(number_in("/proc/self/coredump_filter", "", 16) == 3 && prctl(PR_GET_TIMERSLACK) == 77777 ? 50 : 51);
    }
    UNTIL(number_in("/proc/self/coredump_filter", "", 16) == 0x7f);
    moved();
    CHECK(number_in("/proc/self/coredump_filter", "", 16) == 0x7f);
    CHECK(prctl(PR_GET_TIMERSLACK) == 77777);
    if (has_autogroup) CHECK(number_in("/proc/self/autogroup", " nice ", 10) == 9);
    slack_may_be_read = 1;
    CHECK(pthread_join(thread, 0) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 50);
}

static void write_or_execute(void) {
    NEED(prctl(65 /* PR_SET_MDWE */, 1, 0, 0, 0) == 0);
    moved();
    puts(prctl(66 /* PR_GET_MDWE */, 0, 0, 0, 0) == 0 ? "forgotten" : "kept");
}

static void memory_errors(void) {
    NEED(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0) == 0);
    moved();
    puts(prctl(PR_MCE_KILL_GET, 0, 0, 0, 0) == PR_MCE_KILL_EARLY ? "kept" : "forgotten");
}

/* A child with its own memory and the parent's table of descriptors. */
static void shared_descriptors(void) {
    int p[2], status;
    char byte = 0;
    CHECK(pipe(p) == 0);
    pid_t child = syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        UNTIL(told_to_go());
        dup2(p[1], 300);
        _exit(0);
    }
    moved();
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(write(300, "x", 1) == 1 && read(p[0], &byte, 1) == 1 && byte == 'x');
}

static void filtered(void) {
    struct sock_filter all[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {1, all};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    moved();
    CHECK(prctl(PR_GET_SECCOMP) == SECCOMP_MODE_FILTER);
}

static void bound(void) {
    cpu_set_t all, one, now;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    NEED(CPU_COUNT(&all) > 1);
    CPU_ZERO(&one);
    for (int cpu = CPU_SETSIZE - 1; cpu >= 0 && CPU_COUNT(&one) == 0; cpu--)
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    moved();
    CHECK(sched_getaffinity(0, sizeof now, &now) == 0);
    puts(CPU_EQUAL(&now, &one) ? "bound" : CPU_EQUAL(&now, &all) ? "free" : "something else");
}

static void batch(void) {
    struct sched_param none = {0};
    CHECK(sched_setscheduler(0, SCHED_BATCH, &none) == 0);
    moved();
    CHECK(sched_getscheduler(0) == SCHED_BATCH);
}

static void output(void) {
    int go = 0;
    /* Half a line is in the program's own buffer, the other half comes afterwards. */
    printf("half a ");
    for (uint32_t n = 0; n < 500 || !go; n++) {
        char line[32];
        int length = snprintf(line, sizeof line, "%u\n", n);
        CHECK(write(1 + n % 2, line, length) == length);
        if (n == 400) CHECK(write(1, "ready\n", 6) == 6);
        if (n % 64 == 0) { go = told_to_go(); usleep(200); }
    }
    printf("line\n");
}

int main(int argc, char **argv) {
    const struct row rows[] = {
        {"children", children}, {"zombie", zombie}, {"stopped", stopped}, {"family", family},
        {"shared-memory", shared_memory}, {"shared-memory-file", shared_memory_file}, {"surroundings", surroundings},
        {"groups", groups}, {"random-addresses", random_addresses}, {"filtered", filtered}, {"bound", bound}, {"batch", batch}, {"output", output},
        {"settings", settings}, {"write-or-execute", write_or_execute}, {"memory-errors", memory_errors},
        {"shared-descriptors", shared_descriptors}, {0, 0},
    };
    return run_row(rows, argc, argv);
}
