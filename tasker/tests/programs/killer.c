/* Loaded into an engine: ends it by SIGKILL at one step of its work. Steps are counted before and after each call by which
   the engine touches the task; the number of the deadly one is in KILL_AT. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void step(void) {
    static long steps;
    const char *deadly = getenv("KILL_AT");
    if (deadly && getpid() == getpgrp() && ++steps == atol(deadly)) kill(getpid(), SIGKILL);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

long ptrace(enum __ptrace_request request, ...) {
    va_list list;
    va_start(list, request);
    pid_t pid = va_arg(list, pid_t);
    void *address = va_arg(list, void *), *data = va_arg(list, void *);
    va_end(list);
    step();
    long result = NEXT(ptrace)(request, pid, address, data);
    step();
    return result;
}

pid_t wait4(pid_t pid, int *status, int options, struct rusage *usage) {
    step();
    pid_t result = NEXT(wait4)(pid, status, options, usage);
    step();
    return result;
}

/* The library that relays asks by these, and the engine talks to its code inside the task by these. */
ssize_t send(int fd, const void *bytes, size_t length, int flags) {
    step();
    ssize_t result = NEXT(send)(fd, bytes, length, flags);
    step();
    return result;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    step();
    ssize_t result = NEXT(recvmsg)(fd, message, flags);
    step();
    return result;
}
