/* Start of programs that trace another program with ptrace. The including file defines _GNU_SOURCE. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static void must(int good, const char *what)
{
    if (!good) {
        perror(what);
        exit(1);
    }
}

/* Starts the program that the arguments of main() name, and stops it at its first instruction. */
static pid_t start_traced(int argc, char **argv)
{
    int status;
    pid_t pid;

    must(argc > 1, "usage");
    pid = fork();
    must(pid >= 0, "fork");
    if (pid == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        execv(argv[1], argv + 1);
        _exit(127);
    }
    must(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status), "exec");
    return pid;
}
