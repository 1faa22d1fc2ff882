/* Threads and what they wait for. */
#include "kinds.h"
#include <pthread.h>
#include <semaphore.h>

#define MANY 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static volatile int waiting, turn, arrived;
static __thread uint64_t mine;

static volatile int waiter;

static void *takes_lock(void *other) {
    waiter = to_be_seen();
    CHECK(pthread_mutex_lock(other) == 0);
    CHECK(turn == 1);
    turn = 2;
    CHECK(pthread_mutex_unlock(other) == 0);
    return other;
}

static void mutex(void) {
    pthread_mutexattr_t robust;
    pthread_mutex_t held;
    pthread_t thread;
    void *result;
    pthread_mutexattr_init(&robust);
    pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_settype(&robust, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(&held, &robust);
    CHECK(pthread_mutex_lock(&held) == 0);
    CHECK(pthread_create(&thread, 0, takes_lock, &held) == 0);
    until_asleep(&waiter);
    moved();
    CHECK(turn == 0);
    CHECK(pthread_mutex_lock(&held) == EDEADLK);
    turn = 1;
    CHECK(pthread_mutex_unlock(&held) == 0);
    CHECK(pthread_join(thread, &result) == 0);
    CHECK(result == &held && turn == 2);
}

static void *waits_for_turn(void *number) {
    pthread_mutex_lock(&lock);
    waiting++;
    while (turn != (int)(intptr_t)number) CHECK(pthread_cond_wait(&changed, &lock) == 0);
    turn++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void *waits_until(void *unused) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 100000;
    pthread_mutex_lock(&lock);
    waiting++;
    while (turn == 0) CHECK(pthread_cond_timedwait(&changed, &lock, &until) == 0);
    pthread_mutex_unlock(&lock);
    return unused;
}

static void condition(void) {
    pthread_t thread[9];
    for (intptr_t n = 0; n < 8; n++) CHECK(pthread_create(&thread[n], 0, waits_for_turn, (void *)(8 - n)) == 0);
    CHECK(pthread_create(&thread[8], 0, waits_until, 0) == 0);
    UNTIL(waiting == 9);
    moved();
    pthread_mutex_lock(&lock);
    turn = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    for (int n = 0; n < 9; n++) CHECK(pthread_join(thread[n], 0) == 0);
    CHECK(turn == 9);
}

static pthread_barrier_t barrier;
static sem_t semaphore;
static pthread_rwlock_t shared = PTHREAD_RWLOCK_INITIALIZER;

static void *at_barrier(void *unused) {
    __sync_fetch_and_add(&waiting, 1);
    pthread_barrier_wait(&barrier);
    __sync_fetch_and_add(&arrived, 1);
    return unused;
}

static void *at_semaphore(void *unused) {
    __sync_fetch_and_add(&waiting, 1);
    UNTIL(sem_wait(&semaphore) == 0);
    __sync_fetch_and_add(&arrived, 1);
    return unused;
}

static void *at_rwlock(void *unused) {
    __sync_fetch_and_add(&waiting, 1);
    CHECK(pthread_rwlock_wrlock(&shared) == 0);
    __sync_fetch_and_add(&arrived, 1);
    pthread_rwlock_unlock(&shared);
    return unused;
}

static void barriers(void) {
    pthread_t thread[6];
    pthread_barrier_init(&barrier, 0, 3);
    sem_init(&semaphore, 0, 0);
    CHECK(pthread_rwlock_rdlock(&shared) == 0);
    for (int n = 0; n < 2; n++) CHECK(pthread_create(&thread[n], 0, at_barrier, 0) == 0);
    for (int n = 2; n < 4; n++) CHECK(pthread_create(&thread[n], 0, at_semaphore, 0) == 0);
    for (int n = 4; n < 6; n++) CHECK(pthread_create(&thread[n], 0, at_rwlock, 0) == 0);
    UNTIL(waiting == 6);
    moved();
    CHECK(arrived == 0);
    pthread_rwlock_unlock(&shared);
    sem_post(&semaphore);
    sem_post(&semaphore);
    pthread_barrier_wait(&barrier);
    for (int n = 0; n < 6; n++) CHECK(pthread_join(thread[n], 0) == 0);
    CHECK(arrived == 6);
}

static pthread_t all[MANY];
static pid_t ids[MANY];

static void *computes(void *argument) {
    intptr_t n = (intptr_t)argument;
    char name[16], now[16];
    sigset_t blocked, then;
    mine = word_at(n);
    snprintf(name, sizeof name, "worker %d", (int)n);
    pthread_setname_np(pthread_self(), name);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGRTMIN + n % 20);
    pthread_sigmask(SIG_BLOCK, &blocked, 0);
    ids[n] = thread_id();
    __sync_fetch_and_add(&waiting, 1);
    for (double a = 1.5, b = 3.0; !turn;) {
        for (int i = 0; i < 2000; i++) { a = a * b; b = b / 3.0; a = a / 3.0; b = b * 3.0; }
        CHECK(a == 1.5 && b == 3.0);
    }
    CHECK(mine == word_at(n) && thread_id() == ids[n]);
    CHECK(pthread_getname_np(pthread_self(), now, sizeof now) == 0 && !strcmp(name, now));
    pthread_sigmask(SIG_SETMASK, 0, &then);
    for (int s = 0; s < 20; s++) CHECK(sigismember(&then, SIGRTMIN + s) == (s == n % 20));
    return argument;
}

static void many(void) {
    for (intptr_t n = 0; n < MANY; n++) CHECK(pthread_create(&all[n], 0, computes, (void *)n) == 0);
    UNTIL(waiting == MANY);
    moved();
    turn = 1;
    for (intptr_t n = 0; n < MANY; n++) {
        void *result;
        CHECK(pthread_join(all[n], &result) == 0 && result == (void *)n);
    }
    /* New ones can be made as well. */
    turn = 0;
    waiting = 0;
    CHECK(pthread_create(&all[0], 0, computes, (void *)5) == 0);
    UNTIL(waiting == 1);
    turn = 1;
    CHECK(pthread_join(all[0], 0) == 0);
}

static void *ends_it(void *unused) {
    /* The first thread is gone when nothing of its stack is used any more. */
    for (;; usleep(1000)) {
        char text[4096] = "";
        FILE *stat = fopen("/proc/self/stat", "r");
        size_t read = stat ? fread(text, 1, sizeof text - 1, stat) : 0;
        if (stat) fclose(stat);
        if (read && strstr(text, ") Z ")) break;
    }
    moved();
    puts("right");
    fflush(stdout);
    _exit(7);
    return unused;
}

static void leaderless(void) {
    pthread_t thread;
    pthread_create(&thread, 0, ends_it, 0);
    pthread_exit(0);
}

int main(int argc, char **argv) {
    const struct row rows[] = {
        {"mutex", mutex}, {"condition", condition}, {"barriers", barriers}, {"many", many}, {"leaderless", leaderless}, {0, 0},
    };
    return run_row(rows, argc, argv);
}
