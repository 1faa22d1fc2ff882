/*
 * Runs a program and counts the system calls that all its threads begin between pairs of calls of getppid(). Sleeps of
 * the program (clock_nanosleep) do not count. Prints the count of each system call by its number, and the total.
 *
 * Arguments: the program and its arguments.
 */
#define _GNU_SOURCE
#include "tracer.h"

#include <signal.h>
#include <sys/syscall.h>

#define NUMBERS 512
#define OPTIONS (PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL)
#define SYSTEM_CALL_STOP (SIGTRAP | 0x80)
#define ENTRY 1

/* The part of struct ptrace_syscall_info that is used. */
struct system_call {
    unsigned char op, padding[3];
    unsigned arch;
    unsigned long long instruction, stack, number, arguments[6];
};

static unsigned long counts[NUMBERS];

static void count(pid_t thread, int *counts_now)
{
    struct system_call call;

    must(ptrace(PTRACE_GET_SYSCALL_INFO, thread, (void *)sizeof call, &call) > 0, "the system call");
    if (call.op != ENTRY)
        return;
    if (call.number == SYS_getppid)
        *counts_now = !*counts_now;
    else if (*counts_now && call.number != SYS_clock_nanosleep && call.number < NUMBERS)
        counts[call.number]++;
}

int main(int argc, char **argv)
{
    unsigned long total = 0;
    int status, counts_now = 0, number;
    pid_t pid = start_traced(argc, argv), thread;

    must(ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(long)OPTIONS) == 0, "options");
    must(ptrace(PTRACE_SYSCALL, pid, NULL, NULL) == 0, "ptrace");
    for (;;) {
        int signal = 0;

        thread = waitpid(-1, &status, __WALL);
        must(thread > 0, "waitpid");
        if (!WIFSTOPPED(status)) {
            if (thread != pid)
                continue;
            must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the program failed");
            break;
        }
        if (WSTOPSIG(status) == SYSTEM_CALL_STOP)
            count(thread, &counts_now);
        else if (WSTOPSIG(status) != SIGTRAP && WSTOPSIG(status) != SIGSTOP)
            signal = WSTOPSIG(status);
        /* A thread may end at any time. */
        must(ptrace(PTRACE_SYSCALL, thread, NULL, (void *)(long)signal) == 0 || errno == ESRCH, "ptrace");
    }
    for (number = 0; number < NUMBERS; number++) {
        if (counts[number])
            printf("system call %d: %lu\n", number, counts[number]);
        total += counts[number];
    }
    printf("total %lu\n", total);
    return 0;
}
