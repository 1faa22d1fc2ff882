/* Makes processes all the time. `crowd`: this process makes children that compute for some milliseconds each. `chain`: a child
   makes a child and ends, that one too, and so on for ever. `vfork`: this process waits for one child after the other, which
   borrows its memory. Each process that runs counts in the file named first. The file also
   has how often this process was notified that a child had stopped, and how often that one had been continued. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct shared { _Atomic uint64_t steps; _Atomic uint64_t made; _Atomic uint64_t stops_told; _Atomic uint64_t went_on; };
static struct shared *shared;

static void went_on(int signal) { (void)signal; shared->went_on++; }

static void compute(long micros) {
    struct timespec now, begin;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    do {
        for (volatile int i = 0; i < 500; i++) {}
        shared->steps++;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    } while ((now.tv_sec - begin.tv_sec) * 1000000 + (now.tv_nsec - begin.tv_nsec) / 1000 < micros);
}

int main(int argc, char **argv) {
    int file = open(argv[1], O_RDWR);
    if (argc < 3 || file < 0) return 2;
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) return 3;
    struct sigaction action = {.sa_handler = went_on, .sa_flags = SA_RESTART};
    sigaction(SIGCONT, &action, 0);
    if (strcmp(argv[2], "chain") == 0) {
        if (fork() == 0)
            for (;;) {
                compute(50);
                shared->made++;
                if (fork() != 0) _exit(0);
            }
        for (;;) pause();
    }
    while (strcmp(argv[2], "vfork") == 0) {
        pid_t child = vfork();
        if (child == 0) {
            compute(2000);
            _exit(0);
        }
        shared->made++;
        waitpid(child, 0, 0);
    }
    for (int running = 0;;) {
        if (running < 8 && fork() == 0) {
            compute(3000);
            _exit(0);
        }
        running++;
        shared->made++;
        compute(100);
        int status;
        while (waitpid(-1, &status, WNOHANG | WUNTRACED) > 0) {
            if (WIFSTOPPED(status)) shared->stops_told++;
            else running--;
        }
        if (running >= 8) usleep(200);
    }
}
