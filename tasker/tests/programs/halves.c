/* A program that computes, with a thread of its library's name, a child that computes and a child that has stopped itself. They count in
   the file named first: the program in its first word, the thread in its second, the child in its third, and the other child in its
   fourth after it was continued. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

struct shared { _Atomic uint64_t program; _Atomic uint64_t library; _Atomic uint64_t child; _Atomic uint64_t woken; };
static struct shared *shared;

static void *library(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "pvm-helper");
    for (;; usleep(200)) shared->library++;
    return 0;
}

static void compute(_Atomic uint64_t *steps) {
    for (;;) {
        for (volatile int i = 0; i < 500; i++) {}
        (*steps)++;
    }
}

int main(int argc, char **argv) {
    int file = argc == 2 ? open(argv[1], O_RDWR) : -1;
    if (file < 0) return 2;
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) return 3;
    if (fork() == 0) {
        raise(SIGSTOP);
        for (;; pause()) shared->woken++;
    }
    if (fork() == 0) compute(&shared->child);
    pthread_t thread;
    if (pthread_create(&thread, 0, library, 0) != 0) return 4;
    compute(&shared->program);
}
