/*
 * Runs a program and counts, instruction by instruction, the locked operations and full fences that its first thread
 * executes between pairs of breakpoint instructions (int3). Prints the number of pairs and both totals for each of
 * SECTIONS sections that the program repeats in turn.
 *
 * Arguments: the program and its arguments.
 */
#define _GNU_SOURCE
#include "tracer.h"

#include <string.h>
#include <sys/user.h>

#define SECTIONS 5
#define INT3 0xcc
#define CODE_BYTES 16

/* Reads the instruction that comes next. Returns its first byte. */
static int read_next(pid_t pid, unsigned char code[CODE_BYTES])
{
    struct user_regs_struct registers;
    unsigned i;

    must(ptrace(PTRACE_GETREGS, pid, NULL, &registers) == 0, "registers");
    memset(code, 0, CODE_BYTES);
    for (i = 0; i < CODE_BYTES; i += sizeof(long)) {
        long word;

        errno = 0;
        word = ptrace(PTRACE_PEEKTEXT, pid, (char *)registers.rip + i, NULL);
        if (errno)
            break; /* The next page is no memory. */
        memcpy(code + i, &word, sizeof word);
    }
    return code[0];
}

/* True for a lock prefix, an exchange with memory, which locks without a prefix, and mfence. */
static int is_locked(const unsigned char *code)
{
    while (*code && strchr("\x26\x2e\x36\x3e\x64\x65\x66\x67\xf2\xf3", *code))
        code++;
    if (*code == 0xf0)
        return 1;
    if ((*code & 0xf0) == 0x40)
        code++;
    return ((code[0] | 1) == 0x87 && code[1] < 0xc0) || (code[0] == 0x0f && code[1] == 0xae && code[2] == 0xf0);
}

/* Lets the program run until its next stop. Returns the signal that stopped it; 0 after its end. */
static int resume(pid_t pid, int how, int signal)
{
    int status;

    must(ptrace(how, pid, NULL, (void *)(long)signal) == 0, "ptrace");
    must(waitpid(pid, &status, 0) == pid, "waitpid");
    if (WIFSTOPPED(status))
        return WSTOPSIG(status);
    must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the program failed");
    return 0;
}

int main(int argc, char **argv)
{
    static unsigned long pairs[SECTIONS], instructions[SECTIONS], locked[SECTIONS];
    unsigned section = 0;
    int signal = 0;
    pid_t pid = start_traced(argc, argv);

    while ((signal = resume(pid, PTRACE_CONT, signal)) != 0) {
        unsigned char code[CODE_BYTES];

        if (signal != SIGTRAP)
            continue;
        for (signal = 0; read_next(pid, code) != INT3; instructions[section]++) {
            locked[section] += is_locked(code);
            must(resume(pid, PTRACE_SINGLESTEP, 0) == SIGTRAP, "a signal in a section");
        }
        must(resume(pid, PTRACE_CONT, 0) == SIGTRAP, "the end of a section");
        pairs[section]++;
        section = (section + 1) % SECTIONS;
    }
    for (section = 0; section < SECTIONS; section++)
        printf("section %u: %lu times, %lu instructions, %lu locked\n", section, pairs[section], instructions[section],
            locked[section]);
    return 0;
}
