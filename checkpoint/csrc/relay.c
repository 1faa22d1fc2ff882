/* Loaded into CRIU: hands what CRIU asks of a traced thread to the process that started it.
 *
 * Only the thread that traces another one may ask anything of it, and when a tracer is killed at the wrong moment the
 * kernel hands the traced thread a signal that it does not survive. So CRIU is not the tracer: whoever started it is, and
 * puts right what a killed CRIU leaves behind. Whatever belongs to threads that are not meant is done here as always.
 *
 * One question, one answer, over the packet socket whose number is in SEMPA_RELAY; both are the structures below, with
 * the memory that the request reads or writes after them.
 *
 * Beside that it keeps memory from CRIU's eyes that follows the task. */
#define _GNU_SOURCE
#ifdef __x86_64__
#include <asm/prctl.h>
#endif
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

/* Bytes that one request moves at most; the largest are filters, at 32 KiB, and vector registers. */
#define MEMORY_MAX (64 << 10)
/* The kernel's limit of a filter, whose length a request does not say: 4096 instructions. */
#define FILTER_BYTES (4096 * 8)
/* In place of an error number: not one of the threads that are meant. */
#define NOT_MEANT (-1)
/* Requests and words that the C library's headers lack. */
#define SHADOW_STACK_STATUS 0x5005
#define GET_SYSCALL_INFO 0x420e
#define GET_RSEQ_CONFIGURATION 0x420f
#define SET_SYSCALL_USER_DISPATCH 0x4210
#define GET_SYSCALL_USER_DISPATCH 0x4211
/* Not a request of the kernel's: wait for the thread. `address` has the options. */
#define WAIT 0xffffffffffffffffULL
/* What happens to the memory behind `data`. */
enum { BY_VECTOR = 1, /* It is found through a vector, whose length is set to what was written. */
       READ = 2,      /* The kernel reads it: it follows the question. */
       WRITTEN = 4,   /* The kernel writes it: it follows the answer. */
       EXCHANGED = 8, /* Not a matter of memory: this request has `data` where others have `address`. */
};

struct question {
    uint64_t request;
    int64_t pid;
    uint64_t address;
    uint64_t data;
    /* Bytes behind `address`, which follow, and behind `data`. 0: it is a plain value. */
    uint32_t address_bytes;
    uint32_t data_bytes;
    uint32_t flags;
    uint32_t unused;
};

struct answer {
    int64_t result;
    int32_t error;
    /* Wait status. */
    int32_t status;
    /* Bytes for `data`, which follow. */
    uint64_t data_bytes;
};

/* One thread of CRIU traces; these are its alone. */
static char sent[sizeof(struct question) + MEMORY_MAX];
static char received[sizeof(struct answer) + MEMORY_MAX];

/* The socket, or -1 where everything is as always: without a socket, and in children of CRIU. */
static int relay(void)
{
    const char *number = getenv("SEMPA_RELAY");
    return number && getpid() == getpgrp() ? atoi(number) : -1;
}

/* Sends the question with the memory that it refers to, and takes the answer. 0 if the socket is of no use, or if the
 * thread is not meant. */
static int ask(int socket, const struct question *question, const void *address, const void *data, struct answer *answer)
{
    size_t data_sent = question->flags & READ ? question->data_bytes : 0;
    size_t length = sizeof *question + question->address_bytes + data_sent;
    ssize_t got;

    if (length > sizeof sent || question->data_bytes > MEMORY_MAX)
        return 0;
    memcpy(sent, question, sizeof *question);
    if (question->address_bytes)
        memcpy(sent + sizeof *question, address, question->address_bytes);
    if (data_sent)
        memcpy(sent + length - data_sent, data, data_sent);
    do
        got = send(socket, sent, length, MSG_NOSIGNAL);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return 0;
    do
        got = recv(socket, received, sizeof received, 0);
    while (got < 0 && errno == EINTR);
    if (got < (ssize_t)sizeof *answer)
        return 0;
    memcpy(answer, received, sizeof *answer);
    return answer->data_bytes == (size_t)got - sizeof *answer && answer->data_bytes <= question->data_bytes &&
           answer->error != NOT_MEANT;
}

/* Says how much memory `address` and `data` of a request point to, and which way it goes. */
static void measure(struct question *question, void *address, void *data)
{
    question->flags = WRITTEN;
    switch (question->request) {
    case PTRACE_PEEKTEXT:
    case PTRACE_PEEKDATA:
    case PTRACE_PEEKUSER:
    case PTRACE_GETEVENTMSG:
        question->data_bytes = sizeof(long);
        break;
#ifdef __x86_64__
    case PTRACE_SETREGS:
        question->flags = READ; /* fall through */
    case PTRACE_GETREGS:
        question->data_bytes = sizeof(struct user_regs_struct);
        break;
    case PTRACE_SETFPREGS:
    case PTRACE_SETFPXREGS:
        question->flags = READ; /* fall through */
    case PTRACE_GETFPREGS:
    case PTRACE_GETFPXREGS:
        question->data_bytes = sizeof(struct user_fpregs_struct);
        break;
#endif
    case PTRACE_SETREGSET:
        question->flags = READ; /* fall through */
    case PTRACE_GETREGSET:
        question->flags |= BY_VECTOR;
        question->data_bytes = ((struct iovec *)data)->iov_len;
        break;
    case PTRACE_SETSIGINFO:
        question->flags = READ; /* fall through */
    case PTRACE_GETSIGINFO:
        question->data_bytes = sizeof(siginfo_t);
        break;
    case PTRACE_PEEKSIGINFO:
        question->address_bytes = sizeof(struct __ptrace_peeksiginfo_args);
        question->data_bytes = ((struct __ptrace_peeksiginfo_args *)address)->nr * sizeof(siginfo_t);
        break;
    case PTRACE_SECCOMP_GET_FILTER:
        question->data_bytes = data ? FILTER_BYTES : 0;
        break;
    case PTRACE_SECCOMP_GET_METADATA:
        question->flags = READ | WRITTEN;
        question->data_bytes = question->address;
        break;
    case PTRACE_SETSIGMASK:
    case SET_SYSCALL_USER_DISPATCH:
        question->flags = READ; /* fall through */
    case PTRACE_GETSIGMASK:
    case GET_SYSCALL_INFO:
    case GET_RSEQ_CONFIGURATION:
    case GET_SYSCALL_USER_DISPATCH:
        question->data_bytes = question->address;
        break;
    default:
        question->flags = 0;
    }
}

#ifdef __x86_64__
/* What belongs to the architecture: `data` says what is asked, `address` is a value or takes one. */
static void measure_arch(struct question *question)
{
    uint64_t what = question->data;

    question->data = question->address;
    question->address = what;
    question->flags = EXCHANGED;
    if (what == ARCH_GET_FS || what == ARCH_GET_GS || what == SHADOW_STACK_STATUS) {
        question->flags |= WRITTEN;
        question->data_bytes = sizeof(uint64_t);
    }
}
#endif

/* Returns 1 if the request was carried out elsewhere. */
static int traced(int socket, long request, pid_t pid, void *address, void *data, long *result)
{
    struct question question = { .request = request, .pid = pid, .address = (uintptr_t)address, .data = (uintptr_t)data };
    struct answer answer;

    measure(&question, address, data);
#ifdef __x86_64__
    if (request == PTRACE_ARCH_PRCTL) {
        measure_arch(&question);
        data = address;
    }
#endif
    struct iovec *vector = question.flags & BY_VECTOR ? data : NULL;
    void *memory = vector ? vector->iov_base : data;
    if (!ask(socket, &question, address, memory, &answer))
        return 0;
    if (answer.data_bytes)
        memcpy(memory, received + sizeof answer, answer.data_bytes);
    if (vector && !answer.error && question.flags & WRITTEN)
        vector->iov_len = answer.data_bytes;
    errno = answer.error;
    *result = answer.error ? -1 : answer.result;
    return 1;
}

__attribute__((visibility("default"))) long ptrace(enum __ptrace_request request, ...)
{
    va_list list;
    va_start(list, request);
    pid_t pid = va_arg(list, pid_t);
    void *address = va_arg(list, void *);
    void *data = va_arg(list, void *);
    va_end(list);

    /* The kernel stores a word that it peeks at; the C library returns it. */
    long word = 0, result;
    int peeks = request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER;
    int socket = relay();
    if (peeks)
        data = &word;
    if (socket < 0 || !traced(socket, request, pid, address, data, &result))
        result = syscall(SYS_ptrace, request, pid, address, data);
    if (!peeks || result < 0)
        return result;
    errno = 0;
    return word;
}

__attribute__((visibility("default"))) pid_t wait4(pid_t pid, int *status, int options, struct rusage *usage)
{
    struct question question = { .request = WAIT, .pid = pid, .address = (uint32_t)options };
    struct answer answer;
    int socket = relay();

    do {
        /* Whoever waits for anybody waits for children of CRIU too. */
        if (socket >= 0 && pid == -1) {
            pid_t child = syscall(SYS_wait4, pid, status, options | WNOHANG, usage);
            if (child > 0)
                return child;
        }
        if (socket < 0 || !ask(socket, &question, NULL, NULL, &answer))
            return syscall(SYS_wait4, pid, status, options, usage);
    } while (pid == -1 && !answer.error && !answer.result && !(options & WNOHANG));
    if (usage)
        memset(usage, 0, sizeof *usage);
    if (status && answer.result > 0)
        *status = answer.status;
    errno = answer.error;
    return answer.error ? -1 : answer.result;
}

__attribute__((visibility("default"))) pid_t waitpid(pid_t pid, int *status, int options)
{
    return wait4(pid, status, options, NULL);
}

/* A stretch of the memory of a process that CRIU is not to find, because it follows the task. */
struct stretch {
    uint64_t pid, start, end;
};

/* What the kernel is asked, and answers: PAGEMAP_SCAN with a struct pm_scan_arg and struct page_region, which the headers of older
 * systems lack. */
struct scan {
    uint64_t size, flags, start, end, walk_end, found, found_max, pages_max, inverted, all_of, any_of, told;
};
struct region {
    uint64_t start, end, categories;
};
#define SCAN _IOWR('f', 16, struct scan)

/* All stretches, by processes and addresses in their order, from the file whose number is in SEMPA_WITHHELD. */
static const struct stretch *withheld(size_t *count)
{
    static const struct stretch *all;
    static size_t known;
    const char *number = getenv("SEMPA_WITHHELD");
    struct stat file;

    if (!all && number && fstat(atoi(number), &file) == 0 && file.st_size > 0) {
        void *memory = mmap(NULL, file.st_size, PROT_READ, MAP_SHARED, atoi(number), 0);
        if (memory != MAP_FAILED) {
            all = memory;
            known = file.st_size / sizeof *all;
        }
    }
    *count = known;
    return all;
}

/* The process of a file /proc/PID/pagemap; 0 if it is another one. */
static uint64_t process_of(int descriptor)
{
    char link[64], path[64];
    unsigned long pid = 0;
    int end = 0;

    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return sscanf(path, "/proc/%lu/pagemap%n", &pid, &end) == 1 && end == length ? pid : 0;
}

/* Looks for pages around what is withheld. Returns how many regions were found, as the kernel does. */
static int scan_around(int (*original)(int, unsigned long, ...), int descriptor, struct scan *scan, uint64_t pid)
{
    size_t count;
    const struct stretch *all = withheld(&count), *next = all;
    struct scan part = *scan;
    uint64_t at = scan->start;
    int found = 0;

    while (at < scan->end) {
        while (next < all + count && (next->pid != pid || next->end <= at))
            next++;
        int here = next < all + count;
        if (here && next->start <= at) {
            at = next->end;
            continue;
        }
        part.start = at;
        part.end = here && next->start < scan->end ? next->start : scan->end;
        part.found = scan->found + found * sizeof(struct region);
        part.found_max = scan->found_max - found;
        int more = original(descriptor, SCAN, &part);
        if (more < 0)
            return more;
        found += more;
        at = part.walk_end;
        if (part.walk_end < part.end || (uint64_t)found == scan->found_max)
            break;
    }
    scan->walk_end = at < scan->end ? at : scan->end;
    return found;
}

__attribute__((visibility("default"))) int ioctl(int descriptor, unsigned long request, ...)
{
    static int (*original)(int, unsigned long, ...);
    size_t count = 0;
    uint64_t pid = 0;
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);

    if (!original)
        original = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
    if (request == SCAN && withheld(&count) && ((struct scan *)argument)->pages_max == 0)
        pid = process_of(descriptor);
    return pid ? scan_around(original, descriptor, argument, pid) : original(descriptor, request, argument);
}

/* Says that it is here, to whoever wants to know whether it would be. */
__attribute__((constructor)) static void loaded(void)
{
    const char *number = getenv("SEMPA_LOADED");

    if (number && write(atoi(number), "", 1) < 0)
        return;
}
