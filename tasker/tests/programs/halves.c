/* A program that computes, and a thread of its library's name beside it. Both count in the file named first: the program in its
   first word, the other one in its second. */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

struct shared { _Atomic uint64_t program; _Atomic uint64_t library; };
static struct shared *shared;

static void *library(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "pvm-helper");
    for (;; usleep(200)) shared->library++;
    return 0;
}

int main(int argc, char **argv) {
    int file = argc == 2 ? open(argv[1], O_RDWR) : -1;
    if (file < 0) return 2;
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) return 3;
    pthread_t thread;
    if (pthread_create(&thread, 0, library, 0) != 0) return 4;
    for (;;) {
        for (volatile int i = 0; i < 500; i++) {}
        shared->program++;
    }
}
