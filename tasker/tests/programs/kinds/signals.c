/* Signals and what the clock sends. */
#include "kinds.h"
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/time.h>

static volatile int seen[128], values[128], count;
static void *volatile stack_at;

static void take(int number, siginfo_t *info, void *unused) {
    (void)unused;
    /* Only the first ones are looked at; a timer may fire many times on a loaded machine. */
    if (count < 128) {
        seen[count] = number;
        values[count] = info->si_value.sival_int;
    }
    stack_at = &number;
    count++;
}

static void handle(int number, int flags) {
    struct sigaction action = {.sa_sigaction = take, .sa_flags = SA_SIGINFO | flags};
    sigemptyset(&action.sa_mask);
    sigaddset(&action.sa_mask, SIGUSR1);
    CHECK(sigaction(number, &action, 0) == 0);
}

static void handlers(void) {
    static char stack[1 << 16];
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack}, then;
    struct sigaction action;
    CHECK(sigaltstack(&other, 0) == 0);
    handle(SIGUSR1, SA_ONSTACK | SA_RESTART);
    handle(SIGUSR2, SA_RESETHAND);
    signal(SIGHUP, SIG_IGN);
    moved();
    CHECK(sigaltstack(0, &then) == 0 && then.ss_sp == stack && then.ss_size == sizeof stack);
    CHECK(sigaction(SIGUSR1, 0, &action) == 0 && action.sa_sigaction == take);
    CHECK(action.sa_flags & SA_ONSTACK && action.sa_flags & SA_RESTART && sigismember(&action.sa_mask, SIGUSR1));
    CHECK(raise(SIGHUP) == 0);
    CHECK(raise(SIGUSR1) == 0 && count == 1 && seen[0] == SIGUSR1);
    CHECK((char *)stack_at >= stack && (char *)stack_at < stack + sizeof stack);
    CHECK(raise(SIGUSR2) == 0 && count == 2);
    CHECK(sigaction(SIGUSR2, 0, &action) == 0 && action.sa_handler == SIG_DFL);
}

static pthread_t other;
static volatile int other_waits;

static void *waits_blocked(void *unused) {
    other_waits = 1;
    UNTIL(told_to_go());
    return unused;
}

static void pending(void) {
    sigset_t all, now;
    siginfo_t info;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_BLOCK, &all, 0) == 0);
    CHECK(pthread_create(&other, 0, waits_blocked, 0) == 0);
    UNTIL(other_waits);
    for (int i = 0; i < 5; i++) CHECK(sigqueue(getpid(), SIGRTMIN + 2, (union sigval){.sival_int = 100 + i}) == 0);
    CHECK(kill(getpid(), SIGUSR1) == 0);
    CHECK(pthread_kill(pthread_self(), SIGUSR2) == 0);
    moved();
    CHECK(pthread_sigmask(SIG_BLOCK, 0, &now) == 0 && sigismember(&now, SIGUSR1) && sigismember(&now, SIGTERM));
    CHECK(sigpending(&now) == 0);
    CHECK(sigismember(&now, SIGUSR1) && sigismember(&now, SIGUSR2) && sigismember(&now, SIGRTMIN + 2));
    for (int i = 0; i < 5; i++) {
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, SIGRTMIN + 2);
        CHECK(sigwaitinfo(&one, &info) == SIGRTMIN + 2);
        CHECK(info.si_value.sival_int == 100 + i && info.si_code == SI_QUEUE && info.si_pid == getpid());
    }
    handle(SIGUSR1, 0);
    handle(SIGUSR2, 0);
    CHECK(pthread_join(other, 0) == 0 && count == 0);
    sigemptyset(&now);
    CHECK(pthread_sigmask(SIG_SETMASK, &now, 0) == 0);
    CHECK(count == 2 && seen[0] + seen[1] == SIGUSR1 + SIGUSR2);
    CHECK(sigpending(&now) == 0 && !sigismember(&now, SIGRTMIN + 2));
}

static void *waits_for_signal(void *unused) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    siginfo_t info;
    other_waits = 1;
    /* A stop ends this call on any Linux. */
    while (sigwaitinfo(&set, &info) < 0) CHECK(errno == EINTR);
    CHECK(info.si_value.sival_int == 31);
    return unused;
}

static void waited_for(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &set, 0) == 0);
    CHECK(pthread_create(&other, 0, waits_for_signal, 0) == 0);
    UNTIL(other_waits);
    moved();
    CHECK(sigqueue(getpid(), SIGUSR1, (union sigval){.sival_int = 31}) == 0);
    CHECK(pthread_join(other, 0) == 0);
}

static void posix_timers(void) {
    struct itimerspec far = {{9, 0}, {100000, 0}}, again = {{0, 20000000}, {0, 20000000}}, now;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 5, .sigev_value.sival_int = 55};
    timer_t late, often, quiet;
    handle(SIGRTMIN + 5, SA_RESTART);
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &late) == 0 && timer_settime(late, 0, &far, 0) == 0);
    event.sigev_value.sival_int = 66;
    CHECK(timer_create(CLOCK_REALTIME, &event, &often) == 0);
    event.sigev_notify = SIGEV_NONE;
    CHECK(timer_create(CLOCK_BOOTTIME, &event, &quiet) == 0);
    CHECK(timer_settime(often, 0, &again, 0) == 0);
    moved();
    CHECK(timer_gettime(late, &now) == 0 && now.it_interval.tv_sec == 9);
    CHECK(now.it_value.tv_sec > 90000 && now.it_value.tv_sec <= 100000);
    CHECK(timer_gettime(quiet, &now) == 0 && now.it_value.tv_sec == 0 && now.it_value.tv_nsec == 0);
    count = 0;
    UNTIL(count >= 3);
    CHECK(timer_delete(often) == 0 && seen[0] == SIGRTMIN + 5 && values[0] == 66);
    CHECK(timer_delete(late) == 0 && timer_delete(quiet) == 0);
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &late) == 0);
}

static volatile pid_t timed_thread, told_thread;

static void tell_thread(int number) {
    (void)number;
    told_thread = thread_id();
}

static void *is_timed(void *unused) {
    timed_thread = thread_id();
    UNTIL(told_thread);
    return unused;
}

static void thread_timers(void) {
    struct itimerspec again = {{0, 20000000}, {0, 20000000}};
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + 6};
    timer_t often;
    CHECK(pthread_create(&other, 0, is_timed, 0) == 0);
    UNTIL(timed_thread);
    event._sigev_un._tid = timed_thread;
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &often) == 0);
    signal(SIGRTMIN + 6, SIG_IGN);
    CHECK(timer_settime(often, 0, &again, 0) == 0);
    moved();
    signal(SIGRTMIN + 6, tell_thread);
    CHECK(pthread_join(other, 0) == 0 && told_thread == timed_thread);
}

static void used(void) {
    struct timespec before, now;
    for (volatile unsigned i = 0; i < 200000000; i++) {}
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    moved();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    puts(now.tv_sec > before.tv_sec || (now.tv_sec == before.tv_sec && now.tv_nsec > before.tv_nsec) ? "continues" : "restarted");
}

static void interval_timers(void) {
    struct itimerval far = {{3, 0}, {100000, 0}}, fast = {{0, 10000}, {0, 10000}}, now;
    handle(SIGALRM, SA_RESTART);
    handle(SIGVTALRM, SA_RESTART);
    handle(SIGPROF, SA_RESTART);
    CHECK(setitimer(ITIMER_REAL, &far, 0) == 0 && setitimer(ITIMER_VIRTUAL, &far, 0) == 0);
    CHECK(setitimer(ITIMER_PROF, &fast, 0) == 0);
    moved();
    CHECK(getitimer(ITIMER_REAL, &now) == 0 && now.it_interval.tv_sec == 3);
    CHECK(now.it_value.tv_sec > 90000 && now.it_value.tv_sec <= 100000);
    CHECK(getitimer(ITIMER_VIRTUAL, &now) == 0 && now.it_value.tv_sec > 90000 && now.it_value.tv_sec <= 100000);
    count = 0;
    for (volatile unsigned i = 0; count < 2; i++) {}
    CHECK(seen[0] == SIGPROF);
}

static void alarms(void) {
    handle(SIGALRM, SA_RESTART);
    alarm(100000);
    moved();
    unsigned left = alarm(1);
    CHECK(left > 90000 && left <= 100000);
    UNTIL(count == 1);
    CHECK(seen[0] == SIGALRM);
}

static void clocks(void) {
    /* Less than the difference between any two hosts that the test makes. */
    enum { DAY = 86400 };
    const clockid_t clock[] = {CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_MONOTONIC_RAW, CLOCK_MONOTONIC_COARSE};
    struct timespec before[4], now;
    for (int i = 0; i < 4; i++) clock_gettime(clock[i], &before[i]);
    CHECK(write(1, "ready\n", 6) == 6);
    do {
        for (int i = 0; i < 4; i++) {
            clock_gettime(clock[i], &now);
            CHECK(now.tv_sec > before[i].tv_sec || (now.tv_sec == before[i].tv_sec && now.tv_nsec >= before[i].tv_nsec));
            CHECK(now.tv_sec - before[i].tv_sec < DAY);
            before[i] = now;
            struct timespec asked;
            CHECK(syscall(SYS_clock_gettime, clock[i], &asked) == 0 && asked.tv_sec - now.tv_sec < DAY);
        }
    } while (!told_to_go());
}

static volatile int ended_early;
static volatile int sleeper, poller;

static void *sleeps(void *unused) {
    struct timespec span = {100000, 0}, rest = {0, 0};
    sleeper = to_be_seen();
    ended_early = nanosleep(&span, &rest) == -1 && errno == EINTR && rest.tv_sec > 90000 && rest.tv_sec <= 100000;
    return unused;
}

static volatile int polled;

static void *polls(void *unused) {
    poller = to_be_seen();
    polled = poll(0, 0, 100000000);
    if (polled == -1 && errno == EINTR) polled = -2;
    return unused;
}

static void sleepers(void) {
    pthread_t first, second;
    CHECK(pthread_create(&first, 0, sleeps, 0) == 0 && pthread_create(&second, 0, polls, 0) == 0);
    until_asleep(&sleeper);
    until_asleep(&poller);
    moved();
    CHECK(pthread_join(first, 0) == 0 && pthread_join(second, 0) == 0);
    CHECK(ended_early && polled == -2);
}

int main(int argc, char **argv) {
    const struct row rows[] = {
        {"handlers", handlers}, {"pending", pending}, {"waited-for", waited_for}, {"posix-timers", posix_timers},
        {"interval-timers", interval_timers}, {"alarms", alarms}, {"clocks", clocks}, {"sleepers", sleepers},
        {"thread-timers", thread_timers}, {"used", used}, {0, 0},
    };
    return run_row(rows, argc, argv);
}
