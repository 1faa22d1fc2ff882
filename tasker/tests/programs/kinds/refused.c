/* Resources that do not survive a migration. The program takes one, is inspected and not migrated, and continues. */
#include "kinds.h"
#include <arpa/inet.h>
#include <linux/io_uring.h>
#include <linux/perf_event.h>
#include <linux/userfaultfd.h>
#include <mqueue.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

static void uring(void) {
    struct io_uring_params params = {0};
    int fd = syscall(SYS_io_uring_setup, 4, &params);
    NEED(fd >= 0);
    moved();
    CHECK(syscall(SYS_io_uring_enter, fd, 0, 0, 0, 0, 0) == 0);
}

static void counting_eventfd(void) {
    uint64_t count;
    int fd = eventfd(2, EFD_SEMAPHORE);
    moved();
    CHECK(read(fd, &count, 8) == 8 && count == 1 && read(fd, &count, 8) == 8 && count == 1);
}

static void packets(void) {
    int p[2];
    char got[16];
    CHECK(pipe2(p, O_DIRECT) == 0 && write(p[1], "one", 3) == 3 && write(p[1], "second", 6) == 6);
    moved();
    CHECK(read(p[0], got, sizeof got) == 3 && read(p[0], got, sizeof got) == 6);
}

static void of_a_process(void) {
    int fd = open("/proc/self/stat", O_RDONLY);
    char got[16];
    CHECK(fd >= 0);
    moved();
    CHECK(read(fd, got, sizeof got) > 0);
}

static void another_user(void) {
    NEED(chdir(place) == 0 && chmod(place, 0777) == 0 && setresuid(4141, 4142, 4143) == 0);
    moved();
    CHECK(geteuid() == 4142);
}

/* With CAP_SYS_RESOURCE the tasker can do it. */
static void another_group(void) {
    char line[256];
    unsigned long long rights = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status)) sscanf(line, "CapEff: %llx", &rights);
    fclose(status);
    errno = 0;
    NEED(!(rights >> 24 & 1));
    NEED(setresgid(4241, 4242, 4243) == 0);
    moved();
    CHECK(getegid() == 4242);
}

static void fault_descriptor(void) {
    struct uffdio_api api = {.api = UFFD_API};
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC);
    if (fd < 0) fd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    NEED(fd >= 0);
    CHECK(ioctl(fd, UFFDIO_API, &api) == 0);
    moved();
}

static void perf(void) {
    struct perf_event_attr attr = {.type = PERF_TYPE_SOFTWARE, .size = sizeof attr, .config = PERF_COUNT_SW_CPU_CLOCK,
                                   .exclude_kernel = 1, .exclude_hv = 1};
    uint64_t count;
    int fd = syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0);
    NEED(fd >= 0);
    moved();
    CHECK(read(fd, &count, 8) == 8);
}

static void secret(void) {
    int fd = syscall(SYS_memfd_secret, 0);
    NEED(fd >= 0 && ftruncate(fd, 4096) == 0);
    char *at = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(at != MAP_FAILED);
    /* The mapping alone must be enough. */
    close(fd);
    strcpy(at, "secret");
    moved();
    CHECK(!strcmp(at, "secret"));
}

static void sysv_memory(void) {
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    NEED(id >= 0);
    char *at = shmat(id, 0, 0);
    shmctl(id, IPC_RMID, 0);
    CHECK(at != (void *)-1);
    strcpy(at, "shared");
    moved();
    CHECK(!strcmp(at, "shared"));
}

static void sysv_memory_unmapped(void) {
    int id = shmget(IPC_PRIVATE, 4096, 0600);
    NEED(id >= 0);
    moved();
    CHECK(shmctl(id, IPC_RMID, 0) == 0);
}

static void sysv_semaphore(void) {
    int id = semget(IPC_PRIVATE, 2, 0600);
    struct sembuf up = {.sem_num = 1, .sem_op = 1};
    NEED(id >= 0);
    CHECK(semop(id, &up, 1) == 0);
    moved();
    CHECK(semctl(id, 1, GETVAL) == 1 && semctl(id, 0, IPC_RMID) == 0);
}

static void sysv_queue(void) {
    struct { long kind; char text[8]; } message = {1, "waiting"};
    int id = msgget(IPC_PRIVATE, 0600);
    NEED(id >= 0);
    CHECK(msgsnd(id, &message, 8, 0) == 0);
    moved();
    CHECK(msgrcv(id, &message, 8, 0, 0) == 8 && msgctl(id, IPC_RMID, 0) == 0);
}

static void posix_queue(void) {
    char name[64], got[64];
    struct mq_attr attr = {.mq_maxmsg = 4, .mq_msgsize = sizeof got};
    snprintf(name, sizeof name, "/sempa-%d-%d", getpid(), rand());
    mqd_t queue = mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0600, &attr);
    NEED(queue != (mqd_t)-1);
    mq_unlink(name);
    CHECK(mq_send(queue, "waiting", 7, 0) == 0);
    moved();
    CHECK(mq_receive(queue, got, sizeof got, 0) == 7);
}

static void posix_memory(void) {
    char name[64];
    snprintf(name, sizeof name, "/sempa-%s", strrchr(place, '/') + 1);
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    NEED(fd >= 0);
    CHECK(ftruncate(fd, 4096) == 0);
    char *at = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED);
    close(fd);
    strcpy(at, "shared");
    moved();
    CHECK(!strcmp(at, "shared") && shm_unlink(name) == 0);
}

static void tcp(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(atoi(extra))};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, (void *)&to, sizeof to) == 0);
    moved();
    CHECK(send(fd, "on", 2, MSG_NOSIGNAL) == 2);
}

static void unix_socket(void) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strcpy(to.sun_path, extra);
    CHECK(connect(fd, (void *)&to, sizeof to) == 0);
    moved();
    CHECK(send(fd, "on", 2, MSG_NOSIGNAL) == 2);
}

/* The test has the other end open. */
static void foreign_pipe(void) {
    int fd = open(extra, O_WRONLY);
    CHECK(fd >= 0);
    moved();
    CHECK(write(fd, "on", 2) == 2);
}

static void device(void) {
    int fd = open("/dev/loop-control", O_RDWR);
    if (fd < 0) fd = open("/dev/fuse", O_RDWR);
    if (fd < 0) fd = open("/dev/net/tun", O_RDWR);
    if (fd < 0) fd = open("/dev/autofs", O_RDONLY);
    NEED(fd >= 0);
    moved();
}

static void terminal(void) {
    int fd = open(extra, O_RDWR | O_NOCTTY);
    CHECK(fd >= 0);
    moved();
    CHECK(write(fd, "on", 2) == 2);
}

static void locks_of(int kind) {
    int fd = open(in_place("locked"), O_RDWR | O_CREAT, 0600), twin;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    CHECK(fd >= 0);
    CHECK(kind == F_SETLEASE ? fcntl(fd, F_SETLEASE, F_WRLCK) == 0 : kind ? fcntl(fd, kind, &lock) == 0 : flock(fd, LOCK_EX) == 0);
    moved();
    if (kind == 0) CHECK((twin = open(in_place("locked"), O_RDWR)) >= 0 && flock(twin, LOCK_EX | LOCK_NB) == -1);
}

static void whole_lock(void) { locks_of(0); }
static void record_lock(void) { locks_of(F_SETLK); }
static void open_file_lock(void) { locks_of(F_OFD_SETLK); }
static void lease(void) { locks_of(F_SETLEASE); }

static void orphan(void) {
    int ready[2];
    char byte;
    CHECK(pipe(ready) == 0);
    if (fork() == 0) {
        if (fork() == 0) {
            setsid();
            UNTIL(getppid() == 1);
            close(ready[1]);
            UNTIL(told_to_go());
            _exit(0);
        }
        _exit(0);
    }
    close(ready[1]);
    CHECK(read(ready[0], &byte, 1) == 0 && wait(0) > 0);
    moved();
}

static void linked(void) {
    int fd = open(in_place("name"), O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && link(in_place("name"), in_place("other")) == 0 && unlink(in_place("name")) == 0);
    moved();
}

static void removed_directory(void) {
    CHECK(mkdir(in_place("gone"), 0700) == 0 && chdir(in_place("gone")) == 0 && rmdir(in_place("gone")) == 0);
    moved();
}

static void own_root(void) {
    CHECK(mkdir(in_place("root"), 0700) == 0);
    int ready[2];
    char byte;
    pid_t child;
    CHECK(pipe(ready) == 0);
    if ((child = fork()) == 0) {
        NEED(chroot(in_place("root")) == 0);
        close(ready[1]);
        for (;;) pause();
    }
    close(ready[1]);
    CHECK(read(ready[0], &byte, 1) == 0);
    moved();
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, 0, 0) == child);
}

static void own_namespace(int kind) {
    int ready[2], status;
    char byte = 0;
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        if (unshare(kind) != 0) { CHECK(write(ready[1], "u", 1) == 1); _exit(0); }
        /* A process-id namespace is that of the next child. */
        pid_t inner = kind == CLONE_NEWPID ? fork() : 0;
        if (inner == 0) CHECK(write(ready[1], "x", 1) == 1);
        UNTIL(told_to_go());
        if (inner) waitpid(inner, 0, 0);
        _exit(0);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    NEED(byte == 'x');
    moved();
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void own_mounts(void) { own_namespace(CLONE_NEWNS); }
static void own_network(void) { own_namespace(CLONE_NEWNET); }
static void own_ipc(void) { own_namespace(CLONE_NEWIPC); }
static void own_name(void) { own_namespace(CLONE_NEWUTS); }
static void own_users(void) { own_namespace(CLONE_NEWUSER); }
static void own_processes(void) { own_namespace(CLONE_NEWPID); }

/* What the second thread of a row gets of its own. */
static int unshared;
static volatile int is_unshared;

static void *unshares(void *unused) {
    is_unshared = unshare(unshared) == 0 ? 1 : -1;
    UNTIL(told_to_go());
    return unused;
}

static void own_of_a_thread(int kind) {
    pthread_t thread;
    unshared = kind;
    CHECK(pthread_create(&thread, 0, unshares, 0) == 0);
    UNTIL(is_unshared);
    NEED(is_unshared == 1);
    moved();
    CHECK(pthread_join(thread, 0) == 0);
}

static void directory_of_a_thread(void) { own_of_a_thread(CLONE_FS); }
static void descriptors_of_a_thread(void) { own_of_a_thread(CLONE_FILES); }
static void network_of_a_thread(void) { own_of_a_thread(CLONE_NEWNET); }
static void name_of_a_thread(void) { own_of_a_thread(CLONE_NEWUTS); }
static void processes_of_a_thread(void) { own_of_a_thread(CLONE_NEWPID); }

static void in_vfork(void) {
    static volatile pid_t child;
    const char *sign = in_place("go");
    child = vfork();
    if (child == 0) {
        if (write(1, "ready\n", 6) != 6) _exit(1);
        while (access(sign, F_OK)) usleep(1000);
        _exit(0);
    }
    CHECK(waitpid(child, 0, 0) == child);
}

static char stack_of_child[1 << 16];

static int runs_until_go(void *unused) {
    (void)unused;
    while (!told_to_go()) usleep(1000);
    _exit(0);
}

static void sharing_child(int flags) {
    int status;
    pid_t child = clone(runs_until_go, stack_of_child + sizeof stack_of_child, flags | SIGCHLD, 0);
    CHECK(child > 0);
    moved();
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void memory_of_a_child(void) { sharing_child(CLONE_VM); }
static void directory_of_a_child(void) { sharing_child(CLONE_FS); }

static void few_descriptors(void) {
    struct rlimit limit = {atoi(extra), 4096};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    while (dup(0) >= 0) {}
    moved();
}

static void other_socket(void) {
    int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
    if (fd < 0) fd = socket(AF_ALG, SOCK_SEQPACKET, 0);
    NEED(fd >= 0);
    moved();
}

static int may_start_programs(void) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        execl("/bin/true", "true", (char *)0);
        _exit(1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return status == 0;
}

/* From now on the program may start no other, and may mount nothing, whatever rights it has. With a
   further word, the confinement is lost when it has been moved. */
static void confined(void) {
    uint64_t handled[2] = {1 /* LANDLOCK_ACCESS_FS_EXECUTE */, 0};
    int rules = syscall(444 /* landlock_create_ruleset */, handled, 8, 0);
    NEED(rules >= 0);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(446 /* landlock_restrict_self */, rules, 0) == 0);
    close(rules);
    CHECK(!may_start_programs());
    moved();
    CHECK(may_start_programs() == (*extra != 0));
}

/* Only root may look into the process. */
static void not_dumpable(void) {
    CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
    moved();
}

static void own_control_group(void) { own_namespace(CLONE_NEWCGROUP); }

static void own_time(void) {
    NEED(unshare(0x80 /* CLONE_NEWTIME */) == 0);
    moved();
}

static void *waits(void *unused) {
    printf("thread %d\n", thread_id());
    fflush(stdout);
    UNTIL(told_to_go());
    return unused;
}

/* Another process traces its second thread. */
static void traced(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, 0, waits, 0) == 0);
    moved();
    CHECK(pthread_join(thread, 0) == 0);
}

/* The one who traces: not a task. */
static void tracer(void) {
    char byte;
    if (ptrace(PTRACE_SEIZE, atoi(extra), 0, 0) != 0) {
        printf("unable: %s\n", strerror(errno));
        return;
    }
    puts("traces");
    fflush(stdout);
    while (read(0, &byte, 1) > 0) {}
}

int main(int argc, char **argv) {
    const struct row rows[] = {
        {"uring", uring}, {"userfaultfd", fault_descriptor}, {"perf", perf}, {"secret", secret},
        {"sysv-memory", sysv_memory}, {"sysv-memory-unmapped", sysv_memory_unmapped}, {"sysv-semaphore", sysv_semaphore},
        {"sysv-queue", sysv_queue}, {"posix-queue", posix_queue}, {"posix-memory", posix_memory}, {"tcp", tcp},
        {"unix-socket", unix_socket}, {"foreign-pipe", foreign_pipe}, {"device", device}, {"terminal", terminal},
        {"whole-lock", whole_lock}, {"record-lock", record_lock}, {"open-file-lock", open_file_lock}, {"lease", lease},
        {"orphan", orphan}, {"linked", linked}, {"removed-directory", removed_directory}, {"own-root", own_root},
        {"own-mounts", own_mounts}, {"own-network", own_network}, {"own-ipc", own_ipc}, {"own-name", own_name},
        {"own-users", own_users}, {"own-processes", own_processes}, {"counting-eventfd", counting_eventfd}, {"packets", packets},
        {"of-a-process", of_a_process}, {"another-user", another_user}, {"another-group", another_group}, {"traced", traced}, {"tracer", tracer},
        {"directory-of-a-thread", directory_of_a_thread}, {"descriptors-of-a-thread", descriptors_of_a_thread},
        {"network-of-a-thread", network_of_a_thread}, {"name-of-a-thread", name_of_a_thread},
        {"processes-of-a-thread", processes_of_a_thread}, {"in-vfork", in_vfork}, {"memory-of-a-child", memory_of_a_child},
        {"directory-of-a-child", directory_of_a_child}, {"few-descriptors", few_descriptors}, {"other-socket", other_socket},
        {"own-control-group", own_control_group}, {"own-time", own_time}, {"confined", confined},
        {"not-dumpable", not_dumpable}, {0, 0},
    };
    return run_row(rows, argc, argv);
}
