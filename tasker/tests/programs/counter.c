/* Counts without a gap: one thread makes numbers and hands them through a pipe to another, which checks and prints them;
   two more threads wait on a condition and compute, with values that stay in vector registers. With an argument it also fills that many MiB with random numbers
   and checks a few of them at each step. At the first thing that is not as it was it ends with a status that says what:
   3 a short write of the maker, 4 a short read, 5 a wrong number, 6 another process number, 7 memory, 8 a short write,
   9 a vector register. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int numbers[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
static uint64_t *memory;
static size_t words;

static uint64_t word_at(size_t i) { uint64_t x = i * 0x9e3779b97f4a7c15u; return x ^ (x >> 29); }

static void *make(void *unused) {
    for (uint32_t n = 0;; n++) {
        if (write(numbers[1], &n, sizeof n) != sizeof n) _exit(3);
        usleep(300);
    }
    return unused;
}

static void *wait_for_ever(void *unused) {
    pthread_mutex_lock(&lock);
    for (;;) pthread_cond_wait(&never, &lock);
    return unused;
}

static void *compute(void *unused) {
    for (double a = 1.5, b = 3.0;; usleep(50)) {
        for (int i = 0; i < 20000; i++) { a = a * b; b = b / 3.0; a = a / 3.0; b = b * 3.0; }
        if (a != 1.5 || b != 3.0) _exit(9);
    }
    return unused;
}

int main(int argc, char **argv) {
    pthread_t thread;
    if (argc > 1) {
        words = (size_t)atoi(argv[1]) * (1 << 20) / sizeof *memory;
        memory = malloc(words * sizeof *memory);
        for (size_t i = 0; i < words; i++) memory[i] = word_at(i);
    }
    if (pipe(numbers) != 0) return 3;
    pthread_create(&thread, 0, make, 0);
    pthread_create(&thread, 0, wait_for_ever, 0);
    pthread_create(&thread, 0, compute, 0);
    pid_t self = getpid();
    for (uint32_t expected = 0;; expected++) {
        uint32_t n;
        char line[32];
        if (read(numbers[0], &n, sizeof n) != sizeof n) return 4;
        if (n != expected) return 5;
        if (getpid() != self) return 6;
        for (int k = 0; words && k < 50; k++) {
            size_t i = word_at(expected * 50u + k) % words;
            if (memory[i] != word_at(i)) return 7;
        }
        int length = snprintf(line, sizeof line, "%u\n", n);
        if (write(1, line, length) != length) return 8;
    }
}
