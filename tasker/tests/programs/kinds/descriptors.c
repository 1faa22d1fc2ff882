/* Descriptors that both ends of which, or all of which, are inside the task. */
#include "kinds.h"
#include <arpa/inet.h>
#include <linux/aio_abi.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>

static void pipes(void) {
    enum { BYTES = 60000 };
    static char in[BYTES], out[BYTES];
    int p[2], q[2];
    CHECK(pipe(p) == 0 && pipe2(q, O_NONBLOCK) == 0);
    CHECK(fcntl(q[1], F_SETPIPE_SZ, 1 << 18) >= 1 << 18);
    for (int i = 0; i < BYTES; i++) in[i] = word_at(i);
    CHECK(write(p[1], in, BYTES) == BYTES);
    CHECK(write(q[1], "one", 3) == 3);
    moved();
    for (int got = 0; got < BYTES;) {
        ssize_t n = read(p[0], out + got, BYTES - got);
        CHECK(n > 0);
        got += n;
    }
    CHECK(!memcmp(in, out, BYTES));
    CHECK(fcntl(q[1], F_GETPIPE_SZ) >= 1 << 18);
    CHECK(read(q[0], out, 100) == 3 && !memcmp(out, "one", 3));
    CHECK(read(q[0], out, 100) == -1 && errno == EAGAIN);
    close(p[1]);
    CHECK(read(p[0], out, 1) == 0);
}

static void pair_of(int kind) {
    int s[2];
    char got[64];
    CHECK(socketpair(AF_UNIX, kind, 0, s) == 0);
    CHECK(send(s[0], "first", 5, 0) == 5 && send(s[0], "next", 4, 0) == 4 && send(s[1], "back", 4, 0) == 4);
    moved();
    if (kind == SOCK_STREAM) {
        CHECK(recv(s[1], got, sizeof got, 0) == 9 && !memcmp(got, "firstnext", 9));
    } else {
        CHECK(recv(s[1], got, sizeof got, 0) == 5 && !memcmp(got, "first", 5));
        CHECK(recv(s[1], got, sizeof got, 0) == 4 && !memcmp(got, "next", 4));
    }
    CHECK(recv(s[0], got, sizeof got, 0) == 4 && !memcmp(got, "back", 4));
    CHECK(send(s[0], "on", 2, 0) == 2 && recv(s[1], got, sizeof got, 0) == 2);
    close(s[0]);
    if (kind != SOCK_DGRAM) CHECK(recv(s[1], got, sizeof got, 0) == 0);
}

static void stream_pair(void) { pair_of(SOCK_STREAM); }
static void datagram_pair(void) { pair_of(SOCK_DGRAM); }
static void packet_pair(void) { pair_of(SOCK_SEQPACKET); }

static void descriptor_in_flight(void) {
    int s[2], p[2], got = -1;
    char byte = 'x', space[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec io = {&byte, 1};
    struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0 && pipe(p) == 0);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &p[1], sizeof(int));
    CHECK(sendmsg(s[0], &message, 0) == 1);
    moved();
    message.msg_controllen = sizeof space;
    CHECK(recvmsg(s[1], &message, 0) == 1);
    head = CMSG_FIRSTHDR(&message);
    CHECK(head && head->cmsg_type == SCM_RIGHTS);
    memcpy(&got, CMSG_DATA(head), sizeof got);
    CHECK(write(got, "through", 7) == 7);
    char text[16];
    CHECK(read(p[0], text, sizeof text) == 7);
}

static void events(void) {
    uint64_t count;
    int plain = eventfd(5, EFD_NONBLOCK), other = eventfd(0, EFD_CLOEXEC);
    CHECK(plain >= 0 && other >= 0);
    moved();
    CHECK(read(plain, &count, 8) == 8 && count == 5);
    CHECK(read(plain, &count, 8) == -1 && errno == EAGAIN);
    CHECK(write(other, &count, 8) == 8 && read(other, &count, 8) == 8 && count == 5);
    CHECK(fcntl(other, F_GETFD) == FD_CLOEXEC && fcntl(plain, F_GETFD) == 0);
}

static void polls(void) {
    struct epoll_event event = {.events = EPOLLIN}, got[4];
    int epoll = epoll_create1(0), a = eventfd(0, 0), b = eventfd(0, 0), p[2];
    uint64_t one = 1;
    CHECK(epoll >= 0 && pipe(p) == 0);
    event.data.u64 = 0x1122334455667788;
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, a, &event) == 0);
    event.events = EPOLLIN | EPOLLET;
    event.data.u64 = 2;
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, b, &event) == 0);
    event.events = EPOLLIN | EPOLLONESHOT;
    event.data.u64 = 3;
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, p[0], &event) == 0);
    moved();
    CHECK(epoll_wait(epoll, got, 4, 0) == 0);
    CHECK(write(a, &one, 8) == 8);
    CHECK(epoll_wait(epoll, got, 4, -1) == 1 && got[0].data.u64 == 0x1122334455667788);
    CHECK(read(a, &one, 8) == 8 && write(b, &one, 8) == 8);
    CHECK(epoll_wait(epoll, got, 4, -1) == 1 && got[0].data.u64 == 2);
    CHECK(epoll_wait(epoll, got, 4, 0) == 0);
    CHECK(write(p[1], "x", 1) == 1);
    CHECK(epoll_wait(epoll, got, 4, -1) == 1 && got[0].data.u64 == 3);
    CHECK(epoll_wait(epoll, got, 4, 0) == 0);
}

static void timers(void) {
    struct itimerspec far = {{7, 5}, {100000, 0}}, soon = {{0, 0}, {0, 300000000}}, now;
    uint64_t count = 0;
    int late = timerfd_create(CLOCK_MONOTONIC, 0), next = timerfd_create(CLOCK_MONOTONIC, 0);
    int wall = timerfd_create(CLOCK_REALTIME, 0);
    struct timespec clock;
    CHECK(timerfd_settime(late, 0, &far, 0) == 0);
    clock_gettime(CLOCK_REALTIME, &clock);
    struct itimerspec at = {{0, 0}, {clock.tv_sec + 100000, 0}};
    CHECK(timerfd_settime(wall, TFD_TIMER_ABSTIME, &at, 0) == 0);
    CHECK(timerfd_settime(next, 0, &soon, 0) == 0);
    moved();
    CHECK(timerfd_gettime(late, &now) == 0);
    CHECK(now.it_interval.tv_sec == 7 && now.it_interval.tv_nsec == 5);
    CHECK(now.it_value.tv_sec > 90000 && now.it_value.tv_sec <= 100000);
    CHECK(timerfd_gettime(wall, &now) == 0 && now.it_value.tv_sec > 90000 && now.it_value.tv_sec <= 100000);
    CHECK(read(next, &count, 8) == 8 && count == 1);
}

static void signals(void) {
    sigset_t set;
    struct signalfd_siginfo info;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    sigaddset(&set, SIGRTMIN + 3);
    CHECK(sigprocmask(SIG_BLOCK, &set, 0) == 0);
    int fd = signalfd(-1, &set, 0);
    CHECK(fd >= 0);
    CHECK(sigqueue(getpid(), SIGRTMIN + 3, (union sigval){.sival_int = 77}) == 0);
    moved();
    CHECK(read(fd, &info, sizeof info) == sizeof info);
    CHECK(info.ssi_signo == (uint32_t)SIGRTMIN + 3 && info.ssi_int == 77 && info.ssi_pid == (uint32_t)getpid());
    CHECK(kill(getpid(), SIGUSR2) == 0);
    CHECK(read(fd, &info, sizeof info) == sizeof info && info.ssi_signo == SIGUSR2);
}

static void watches(void) {
    char bytes[4096];
    struct inotify_event *event = (void *)bytes;
    CHECK(mkdir(in_place("watched"), 0700) == 0);
    int fd = inotify_init1(0), watch = inotify_add_watch(fd, in_place("watched"), IN_CREATE | IN_DELETE);
    CHECK(fd >= 0 && watch >= 0);
    moved();
    CHECK(close(open(in_place("watched/new"), O_CREAT | O_WRONLY, 0600)) == 0);
    CHECK(read(fd, bytes, sizeof bytes) > 0);
    CHECK(event->wd == watch && event->mask == IN_CREATE && !strcmp(event->name, "new"));
    CHECK(inotify_rm_watch(fd, watch) == 0);
}

static void unread_watches(void) {
    char bytes[4096];
    CHECK(mkdir(in_place("watched"), 0700) == 0);
    int fd = inotify_init1(IN_NONBLOCK), watch = inotify_add_watch(fd, in_place("watched"), IN_CREATE | IN_DELETE);
    CHECK(fd >= 0 && watch >= 0);
    CHECK(close(open(in_place("watched/new"), O_CREAT | O_WRONLY, 0600)) == 0);
    moved();
    puts(read(fd, bytes, sizeof bytes) > 0 ? "kept" : "lost");
}

static void options(void) {
    int s[2], one = 1, big = 300000, got = 0;
    struct timeval patience = {77, 0}, then;
    socklen_t length = sizeof got, long_length = sizeof then;
    char byte;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, s) == 0);
    CHECK(setsockopt(s[0], SOL_SOCKET, SO_PASSCRED, &one, sizeof one) == 0);
    CHECK(setsockopt(s[0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) == 0);
    CHECK(setsockopt(s[0], SOL_SOCKET, SO_SNDBUF, &big, sizeof big) == 0);
    CHECK(getsockopt(s[0], SOL_SOCKET, SO_SNDBUF, &big, &length) == 0);
    CHECK(shutdown(s[1], SHUT_WR) == 0);
    moved();
    CHECK(getsockopt(s[0], SOL_SOCKET, SO_PASSCRED, &got, &length) == 0 && got == 1);
    CHECK(getsockopt(s[0], SOL_SOCKET, SO_RCVTIMEO, &then, &long_length) == 0 && then.tv_sec == 77);
    CHECK(getsockopt(s[0], SOL_SOCKET, SO_SNDBUF, &got, &length) == 0 && got == big);
    CHECK(recv(s[0], &byte, 1, 0) == 0);
    CHECK(send(s[0], "y", 1, 0) == 1 && recv(s[1], &byte, 1, 0) == 1 && byte == 'y');
}

static int pidfd_of(pid_t pid) { return syscall(SYS_pidfd_open, pid, 0); }

static void pidfds(void) {
    pid_t child = fork();
    if (child == 0) for (;;) pause();
    int fd = pidfd_of(child), self = pidfd_of(getpid());
    siginfo_t info;
    CHECK(fd >= 0 && self >= 0);
    moved();
    CHECK(syscall(SYS_pidfd_send_signal, self, 0, 0, 0) == 0);
    CHECK(syscall(SYS_pidfd_send_signal, fd, SIGTERM, 0, 0) == 0);
    CHECK(waitid(P_PIDFD, fd, &info, WEXITED) == 0);
    CHECK(info.si_pid == child && info.si_status == SIGTERM);
}

static void memory_files(void) {
    char got[16];
    int fd = memfd_create("mine", MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, 3 << 20) == 0);
    char *at = mmap(0, 3 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED);
    memcpy(at + (2 << 20), "through", 7);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(lseek(fd, 2 << 20, SEEK_SET) == 2 << 20);
    moved();
    CHECK(read(fd, got, 7) == 7 && !memcmp(got, "through", 7));
    CHECK(pwrite(fd, "again", 5, 100) == 5 && !memcmp(at + 100, "again", 5));
    CHECK(ftruncate(fd, 4096) == -1 && errno == EPERM);
}

static volatile int told;
static void tell(int number) { told = number; }

static void numbers(void) {
    struct rlimit limit;
    int p[2], nul = open("/dev/null", O_WRONLY), zero = open("/dev/zero", O_RDONLY), dice = open("/dev/urandom", O_RDONLY);
    char byte = 1;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur > 700);
    CHECK(pipe2(p, O_CLOEXEC | O_NONBLOCK) == 0 && dup2(p[1], 700) == 700);
    CHECK(nul >= 0 && zero >= 0 && dice >= 0);
    signal(SIGRTMIN + 1, tell);
    CHECK(fcntl(p[0], F_SETSIG, SIGRTMIN + 1) == 0 && fcntl(p[0], F_SETOWN, getpid()) == 0);
    CHECK(fcntl(p[0], F_SETFL, O_NONBLOCK | O_ASYNC) == 0);
    moved();
    CHECK(fcntl(p[0], F_GETFD) == FD_CLOEXEC && fcntl(700, F_GETFD) == 0);
    CHECK(fcntl(p[0], F_GETFL) & O_NONBLOCK);
    CHECK(read(p[0], &byte, 1) == -1 && errno == EAGAIN);
    CHECK(write(700, "x", 1) == 1);
    UNTIL(told == SIGRTMIN + 1);
    CHECK(read(p[0], &byte, 1) == 1 && byte == 'x');
    CHECK(write(nul, "x", 1) == 1 && read(zero, &byte, 1) == 1 && byte == 0 && read(dice, &byte, 1) == 1);
    close(p[1]);
    CHECK(read(p[0], &byte, 1) == -1 && errno == EAGAIN);
    close(700);
    CHECK(read(p[0], &byte, 1) == 0);
}

static void listening(void) {
    struct sockaddr_in inet = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, udp = inet;
    struct sockaddr_un unix_name = {.sun_family = AF_UNIX};
    socklen_t length = sizeof inet;
    char got[8];
    int tcp = socket(AF_INET, SOCK_STREAM, 0), datagrams = socket(AF_INET, SOCK_DGRAM, 0);
    int named = socket(AF_UNIX, SOCK_STREAM, 0);
    strcpy(unix_name.sun_path, in_place("listening"));
    CHECK(bind(tcp, (void *)&inet, sizeof inet) == 0 && listen(tcp, 5) == 0);
    CHECK(getsockname(tcp, (void *)&inet, &length) == 0);
    CHECK(bind(datagrams, (void *)&udp, sizeof udp) == 0 && getsockname(datagrams, (void *)&udp, &length) == 0);
    CHECK(bind(named, (void *)&unix_name, sizeof unix_name) == 0 && listen(named, 5) == 0);
    moved();
    int client = socket(AF_INET, SOCK_STREAM, 0), other = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(connect(client, (void *)&inet, sizeof inet) == 0);
    int met = accept(tcp, 0, 0);
    CHECK(met >= 0 && send(client, "hello", 5, 0) == 5 && recv(met, got, 5, MSG_WAITALL) == 5);
    CHECK(connect(other, (void *)&unix_name, sizeof unix_name) == 0);
    met = accept(named, 0, 0);
    CHECK(met >= 0 && send(other, "hello", 5, 0) == 5 && recv(met, got, 5, MSG_WAITALL) == 5);
    CHECK(sendto(datagrams, "self", 4, 0, (void *)&udp, sizeof udp) == 4 && recv(datagrams, got, 8, 0) == 4);
}

/* Sockets that are bound to an address of the source only, the second by its connection. */
static void host_address(void) {
    struct sockaddr_in here = {.sin_family = AF_INET}, peer = {.sin_family = AF_INET, .sin_port = htons(9)};
    int bound = socket(AF_INET, SOCK_DGRAM, 0), connected = socket(AF_INET, SOCK_DGRAM, 0);
    CHECK(inet_pton(AF_INET, extra, &here.sin_addr) == 1 && inet_pton(AF_INET, extra, &peer.sin_addr) == 1);
    CHECK(bind(bound, (void *)&here, sizeof here) == 0 && connect(connected, (void *)&peer, sizeof peer) == 0);
    moved();
}

/* The other half of each pair is closed, as a Java virtual machine does it with one of its pairs. */
static void lone_halves(void) {
    int kinds[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET}, pair[3][2];
    char got[8];
    for (int k = 0; k < 3; k++) {
        CHECK(socketpair(AF_UNIX, kinds[k], 0, pair[k]) == 0);
        close(pair[k][1]);
    }
    moved();
    CHECK(read(pair[0][0], got, sizeof got) == 0);
    for (int k = 0; k < 3; k++) CHECK(send(pair[k][0], "x", 1, MSG_NOSIGNAL) == -1);
}

static void named_within(void) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    char got[8];
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), client = socket(AF_UNIX, SOCK_STREAM, 0);
    strcpy(name.sun_path, in_place("meeting"));
    CHECK(bind(listener, (void *)&name, sizeof name) == 0 && listen(listener, 1) == 0);
    CHECK(connect(client, (void *)&name, sizeof name) == 0);
    int met = accept(listener, 0, 0);
    CHECK(met >= 0 && send(client, "before", 6, 0) == 6);
    moved();
    CHECK(recv(met, got, 8, 0) == 6 && !memcmp(got, "before", 6));
    CHECK(send(met, "after", 5, 0) == 5 && recv(client, got, 8, 0) == 5);
}

static void asynchronous(void) {
    aio_context_t context = 0;
    struct io_event event;
    char bytes[16];
    int fd = open("/proc/self/exe", O_RDONLY);
    struct iocb work = {.aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (uintptr_t)bytes, .aio_nbytes = 4}, *all = &work;
    NEED(syscall(SYS_io_setup, 8, &context) == 0);
    moved();
    CHECK(syscall(SYS_io_submit, context, 1, &all) == 1);
    CHECK(syscall(SYS_io_getevents, context, 1, 1, &event, 0) == 1 && event.res == 4 && !memcmp(bytes, "\x7f" "ELF", 4));
}

static void terminal(void) {
    struct winsize size = {.ws_row = 33, .ws_col = 77};
    struct termios mode;
    char got[16];
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    CHECK(slave >= 0 && ioctl(master, TIOCSWINSZ, &size) == 0 && tcgetattr(slave, &mode) == 0);
    mode.c_lflag &= ~(ECHO | ICANON);
    CHECK(tcsetattr(slave, TCSANOW, &mode) == 0);
    moved();
    size.ws_row = 0;
    CHECK(ioctl(slave, TIOCGWINSZ, &size) == 0 && size.ws_row == 33 && size.ws_col == 77);
    CHECK(tcgetattr(slave, &mode) == 0 && !(mode.c_lflag & (ECHO | ICANON)));
    CHECK(write(master, "typed", 5) == 5 && read(slave, got, sizeof got) == 5);
    CHECK(write(slave, "shown", 5) == 5 && read(master, got, sizeof got) == 5);
}

int main(int argc, char **argv) {
    const struct row rows[] = {
        {"pipes", pipes}, {"stream-pair", stream_pair}, {"datagram-pair", datagram_pair}, {"packet-pair", packet_pair},
        {"descriptor-in-flight", descriptor_in_flight}, {"events", events}, {"polls", polls}, {"timers", timers},
        {"signals", signals}, {"watches", watches}, {"pidfds", pidfds}, {"memory-files", memory_files},
        {"numbers", numbers}, {"listening", listening}, {"named-within", named_within}, {"terminal", terminal},
        {"unread-watches", unread_watches}, {"options", options}, {"asynchronous", asynchronous},
        {"lone-halves", lone_halves}, {"host-address", host_address}, {0, 0},
    };
    return run_row(rows, argc, argv);
}
