/* Loaded into `criu swrk` for a dump. Relays CRIU's ptrace requests, and hides memory from CRIU.
 *
 * Relay: only the thread that traces another one may send requests for it. If a tracer is killed at
 * the wrong moment, the kernel delivers a trap to the traced thread, which kills it. So CRIU is not
 * the tracer: the program that has started CRIU traces the task, and cleans up after a CRIU that
 * was killed. Requests for other threads are executed here as usual.
 *
 * Words of the task's memory are read and written here: that takes no tracer, and CRIU copies its code
 * word by word.
 *
 * Each request has one reply, over the packet socket whose number is in SEMPA_RELAY. Both are the
 * structures below, followed by the memory that the request reads or writes.
 *
 * Mappings: the text of /proc/PID/smaps, for which the kernel visits all pages, comes from there as
 * well.
 *
 * Hiding: memory that is transferred after the dump is removed from the results of PAGEMAP_SCAN, so
 * that CRIU finds no pages there.
 */
#define _GNU_SOURCE
#include "open_mode.h"

#ifdef __x86_64__
#include <asm/prctl.h>
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
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

/* Maximum number of bytes that one request transfers. The largest are seccomp filters (32 KiB) and
 * vector registers.
 */
#define MEMORY_MAX (64 << 10)
/* Maximum size of a seccomp filter (4096 instructions): the request does not contain the length. */
#define FILTER_BYTES (4096 * 8)
/* Error number for a thread that does not belong to the dumped task. */
#define NOT_DUMPED (-1)
/* Requests and codes that may be missing in the headers of the C library. */
#define SHADOW_STACK_STATUS 0x5005
#define GET_SYSCALL_INFO 0x420e
#define GET_RSEQ_CONFIGURATION 0x420f
#define SET_SYSCALL_USER_DISPATCH 0x4210
#define GET_SYSCALL_USER_DISPATCH 0x4211
/* Not a request of the kernel: wait for the thread. `address` has the options. */
#define WAIT_REQUEST 0xffffffffffffffffULL
/* Not a request of the kernel: the reply has a descriptor of the mappings of the process. */
#define SMAPS_REQUEST 0xfffffffffffffffeULL
/* Use of the memory that `data` points to. */
enum {
    /* It is passed through an iovec, whose length is set to the number of bytes written. */
    BY_IOVEC = 1,
    /* The kernel reads it: it follows the request. */
    KERNEL_READS = 2,
    /* The kernel writes it: it follows the reply. */
    KERNEL_WRITES = 4,
    /* Not about memory: `data` and `address` are in swapped positions. */
    SWAPPED = 8,
};

struct request_message {
    uint64_t request;
    int64_t pid;
    uint64_t address;
    uint64_t data;
    /* Number of bytes at `address`, which follow, and at `data`. 0: a plain value. */
    uint32_t address_bytes;
    uint32_t data_bytes;
    uint32_t flags;
    uint32_t unused;
};

struct reply_message {
    int64_t result;
    int32_t error;
    int32_t status;
    /* Number of bytes for `data`, which follow. */
    uint64_t data_bytes;
};

/* Only one thread of CRIU traces, so these buffers need no lock. */
static char sent[sizeof(struct request_message) + MEMORY_MAX];
static char received[sizeof(struct reply_message) + MEMORY_MAX];

/* Returns the socket, or -1 if requests are executed here: without SEMPA_RELAY, and in CRIU's child
 * processes.
 */
static int relay_socket(void)
{
    const char *number = getenv("SEMPA_RELAY");
    return number && getpid() == getpgrp() ? atoi(number) : -1;
}

/* Sends a request with the memory that it refers to, and receives the reply. Returns 0 if the
 * socket has failed or the thread does not belong to the dumped task.
 */
static int exchange(int socket, const struct request_message *request_message, const void *address,
                    const void *data, struct reply_message *reply_message)
{
    size_t data_sent = request_message->flags & KERNEL_READS ? request_message->data_bytes : 0;
    size_t length = sizeof *request_message + request_message->address_bytes + data_sent;
    ssize_t got;

    if (length > sizeof sent || request_message->data_bytes > MEMORY_MAX)
        return 0;
    memcpy(sent, request_message, sizeof *request_message);
    if (request_message->address_bytes)
        memcpy(sent + sizeof *request_message, address, request_message->address_bytes);
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
    if (got < (ssize_t)sizeof *reply_message)
        return 0;
    memcpy(reply_message, received, sizeof *reply_message);
    return reply_message->data_bytes == (size_t)got - sizeof *reply_message && reply_message->data_bytes <= request_message->data_bytes &&
           reply_message->error != NOT_DUMPED;
}

/* Sets the length of the memory that `address` and `data` point to, and whether it is read or
 * written.
 */
static void describe_memory(struct request_message *request_message, void *address, void *data)
{
    request_message->flags = KERNEL_WRITES;
    switch (request_message->request) {
    case PTRACE_PEEKTEXT:
    case PTRACE_PEEKDATA:
    case PTRACE_PEEKUSER:
    case PTRACE_GETEVENTMSG:
        request_message->data_bytes = sizeof(long);
        break;
#ifdef __x86_64__
    case PTRACE_SETREGS:
        request_message->flags = KERNEL_READS; /* fall through */
    case PTRACE_GETREGS:
        request_message->data_bytes = sizeof(struct user_regs_struct);
        break;
    case PTRACE_SETFPREGS:
    case PTRACE_SETFPXREGS:
        request_message->flags = KERNEL_READS; /* fall through */
    case PTRACE_GETFPREGS:
    case PTRACE_GETFPXREGS:
        request_message->data_bytes = sizeof(struct user_fpregs_struct);
        break;
#endif
    case PTRACE_SETREGSET:
        request_message->flags = KERNEL_READS; /* fall through */
    case PTRACE_GETREGSET:
        request_message->flags |= BY_IOVEC;
        request_message->data_bytes = ((struct iovec *)data)->iov_len;
        break;
    case PTRACE_SETSIGINFO:
        request_message->flags = KERNEL_READS; /* fall through */
    case PTRACE_GETSIGINFO:
        request_message->data_bytes = sizeof(siginfo_t);
        break;
    case PTRACE_PEEKSIGINFO:
        request_message->address_bytes = sizeof(struct __ptrace_peeksiginfo_args);
        request_message->data_bytes = ((struct __ptrace_peeksiginfo_args *)address)->nr * sizeof(siginfo_t);
        break;
    case PTRACE_SECCOMP_GET_FILTER:
        request_message->data_bytes = data ? FILTER_BYTES : 0;
        break;
    case PTRACE_SECCOMP_GET_METADATA:
        request_message->flags = KERNEL_READS | KERNEL_WRITES;
        request_message->data_bytes = request_message->address;
        break;
    case PTRACE_SETSIGMASK:
    case SET_SYSCALL_USER_DISPATCH:
        request_message->flags = KERNEL_READS; /* fall through */
    case PTRACE_GETSIGMASK:
    case GET_SYSCALL_INFO:
    case GET_RSEQ_CONFIGURATION:
    case GET_SYSCALL_USER_DISPATCH:
        request_message->data_bytes = request_message->address;
        break;
    default:
        request_message->flags = 0;
    }
}

#ifdef __x86_64__
/* PTRACE_ARCH_PRCTL: `data` is the code, `address` is a value or a pointer to one. */
static void describe_arch_prctl(struct request_message *request_message)
{
    uint64_t what = request_message->data;

    request_message->data = request_message->address;
    request_message->address = what;
    request_message->flags = SWAPPED;
    if (what == ARCH_GET_FS || what == ARCH_GET_GS || what == SHADOW_STACK_STATUS) {
        request_message->flags |= KERNEL_WRITES;
        request_message->data_bytes = sizeof(uint64_t);
    }
}
#endif

/* Returns 1 if the request was executed by the relay. */
static int relay_request(int socket, long request, pid_t pid, void *address, void *data, long *result)
{
    struct request_message request_message = { .request = request, .pid = pid, .address = (uintptr_t)address, .data = (uintptr_t)data };
    struct reply_message reply_message;

    describe_memory(&request_message, address, data);
#ifdef __x86_64__
    if (request == PTRACE_ARCH_PRCTL) {
        describe_arch_prctl(&request_message);
        data = address;
    }
#endif
    struct iovec *vector = request_message.flags & BY_IOVEC ? data : NULL;
    void *memory = vector ? vector->iov_base : data;
    if (!exchange(socket, &request_message, address, memory, &reply_message))
        return 0;
    if (reply_message.data_bytes)
        memcpy(memory, received + sizeof reply_message, reply_message.data_bytes);
    if (vector && !reply_message.error && request_message.flags & KERNEL_WRITES)
        vector->iov_len = reply_message.data_bytes;
    errno = reply_message.error;
    *result = reply_message.error ? -1 : reply_message.result;
    return 1;
}

/* Returns a descriptor of the memory of a thread, or -1. It stays open for the next word. */
static int memory_of(pid_t pid)
{
    static pid_t opened_pid;
    static int descriptor = -1;
    char path[64];

    if (pid == opened_pid)
        return descriptor;
    if (descriptor >= 0)
        close(descriptor);
    snprintf(path, sizeof path, "/proc/%d/mem", (int)pid);
    descriptor = open(path, O_RDWR | O_CLOEXEC);
    opened_pid = pid;
    return descriptor;
}

/* Reads or writes a word of a thread's memory, for which the caller need not be its tracer. Returns
 * 1 on success. A stopped task keeps its memory, so the descriptor remains valid for it.
 */
static int copy_word(long request, pid_t pid, void *address, void *data, long *word)
{
    off_t offset = (uintptr_t)address;
    int descriptor;

    switch (request) {
    case PTRACE_PEEKTEXT:
    case PTRACE_PEEKDATA:
        descriptor = memory_of(pid);
        return descriptor >= 0 && pread(descriptor, word, sizeof *word, offset) == sizeof *word;
    case PTRACE_POKETEXT:
    case PTRACE_POKEDATA:
        descriptor = memory_of(pid);
        return descriptor >= 0 && pwrite(descriptor, &data, sizeof data, offset) == sizeof data;
    default:
        return 0;
    }
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
    int socket = relay_socket();
    if (socket >= 0 && copy_word(request, pid, address, data, &word)) {
        errno = 0;
        return word;
    }
    if (peeks)
        data = &word;
    if (socket < 0 || !relay_request(socket, request, pid, address, data, &result))
        result = syscall(SYS_ptrace, request, pid, address, data);
    if (!peeks || result < 0)
        return result;
    errno = 0;
    return word;
}

__attribute__((visibility("default"))) pid_t wait4(pid_t pid, int *status, int options, struct rusage *usage)
{
    struct request_message request_message = { .request = WAIT_REQUEST, .pid = pid, .address = (uint32_t)options };
    struct reply_message reply_message;
    int socket = relay_socket();

    do {
        /* A wait for any process includes CRIU's own children. */
        if (socket >= 0 && pid == -1) {
            pid_t child = syscall(SYS_wait4, pid, status, options | WNOHANG, usage);
            if (child > 0)
                return child;
        }
        if (socket < 0 || !exchange(socket, &request_message, NULL, NULL, &reply_message))
            return syscall(SYS_wait4, pid, status, options, usage);
    } while (pid == -1 && !reply_message.error && !reply_message.result && !(options & WNOHANG));
    if (usage)
        memset(usage, 0, sizeof *usage);
    if (status && reply_message.result > 0)
        *status = reply_message.status;
    errno = reply_message.error;
    return reply_message.error ? -1 : reply_message.result;
}

__attribute__((visibility("default"))) pid_t waitpid(pid_t pid, int *status, int options)
{
    return wait4(pid, status, options, NULL);
}

/* Returns a descriptor of the mappings of a process (/proc/PID/smaps), which the program that has
 * started CRIU has read since the process was stopped, or -1. `directory` is /proc/PID.
 */
static int read_smaps(int directory)
{
    struct request_message request_message = { .request = SMAPS_REQUEST };
    struct reply_message reply_message;
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = { .iov_base = &reply_message, .iov_len = sizeof reply_message };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
    int socket = relay_socket(), end = 0, descriptor;
    char link[64], path[64];
    unsigned long pid;
    ssize_t got;

    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (socket < 0 || length < 0)
        return -1;
    path[length] = 0;
    if (sscanf(path, "/proc/%lu%n", &pid, &end) != 1 || end != length)
        return -1;
    request_message.pid = pid;
    do
        got = send(socket, &request_message, sizeof request_message, MSG_NOSIGNAL);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return -1;
    do
        got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (got != sizeof reply_message || reply_message.error || !header || header->cmsg_type != SCM_RIGHTS)
        return -1;
    memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    return descriptor;
}

__attribute__((visibility("default"))) int openat64(int directory, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = open_mode(flags, arguments);
    va_end(arguments);
    int descriptor = strcmp(path, "smaps") == 0 ? read_smaps(directory) : -1;
    return descriptor >= 0 ? descriptor : (int)syscall(SYS_openat, directory, path, flags, mode);
}

/* A range of a process's memory that is hidden from CRIU. */
struct hidden_range {
    uint64_t pid, start, end;
};

/* The argument of PAGEMAP_SCAN (struct pm_scan_arg) and its results (struct page_region), which are
 * missing in older headers.
 */
struct scan {
    uint64_t size, flags, start, end, walk_end, regions, regions_max, pages_max, inverted, all_of, any_of, returned;
};
struct region {
    uint64_t start, end, categories;
};
#define PAGEMAP_SCAN_REQUEST _IOWR('f', 16, struct scan)
#define GUARD_CATEGORY (1 << 8)

/* Returns all hidden ranges, sorted by process and address, from the file whose number is in
 * SEMPA_WITHHELD.
 */
static const struct hidden_range *hidden_ranges(size_t *count)
{
    static const struct hidden_range *ranges;
    static size_t ranges_count;
    const char *number = getenv("SEMPA_WITHHELD");
    struct stat file;

    if (!ranges && number && fstat(atoi(number), &file) == 0 && file.st_size > 0) {
        void *memory = mmap(NULL, file.st_size, PROT_READ, MAP_SHARED, atoi(number), 0);
        if (memory != MAP_FAILED) {
            ranges = memory;
            ranges_count = file.st_size / sizeof *ranges;
        }
    }
    *count = ranges_count;
    return ranges;
}

/* Returns the PID of a descriptor of /proc/PID/pagemap, or 0 for any other file. */
static uint64_t pid_of_pagemap(int descriptor)
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

/* True if the scan is for guard pages only (MADV_GUARD_INSTALL). They have no content, are never
 * transferred after the dump, and are noted in the images also where they are in a hidden range.
 */
static int scans_guard_pages(const struct scan *scan)
{
    return (scan->all_of & ~scan->inverted & GUARD_CATEGORY) != 0;
}

/* Scans the memory between the hidden ranges. Returns the number of regions found, like the kernel.
 */
static int scan_visible(int (*original)(int, unsigned long, ...), int descriptor, struct scan *scan, uint64_t pid)
{
    size_t count;
    const struct hidden_range *ranges = hidden_ranges(&count), *next = ranges;
    struct scan part = *scan;
    uint64_t at = scan->start;
    int regions = 0;

    while (at < scan->end) {
        while (next < ranges + count && (next->pid != pid || next->end <= at))
            next++;
        int here = next < ranges + count;
        if (here && next->start <= at) {
            at = next->end;
            continue;
        }
        part.start = at;
        part.end = here && next->start < scan->end ? next->start : scan->end;
        part.regions = scan->regions + regions * sizeof(struct region);
        part.regions_max = scan->regions_max - regions;
        int more = original(descriptor, PAGEMAP_SCAN_REQUEST, &part);
        if (more < 0)
            return more;
        regions += more;
        at = part.walk_end;
        if (part.walk_end < part.end || (uint64_t)regions == scan->regions_max)
            break;
    }
    scan->walk_end = at < scan->end ? at : scan->end;
    return regions;
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
    if (request == PAGEMAP_SCAN_REQUEST && hidden_ranges(&count) && ((struct scan *)argument)->pages_max == 0 &&
        !scans_guard_pages(argument))
        pid = pid_of_pagemap(descriptor);
    return pid ? scan_visible(original, descriptor, argument, pid) : original(descriptor, request, argument);
}

/* Reads or sets the limits of another process. Without CAP_SYS_RESOURCE the kernel permits it to a
 * process with the same real ids (prlimit(2)), so CRIU has those of the task for the moment.
 * SEMPA_TASK_IDS has the user id and the group id of the task.
 */
static long limit_other_process(long (*original)(long, ...), long pid, long resource, long new_limit, long old_limit)
{
    const char *ids = getenv("SEMPA_TASK_IDS");
    unsigned user, group;

    if (!ids || pid == 0 || pid == getpid() || sscanf(ids, "%u,%u", &user, &group) != 2)
        return original(SYS_prlimit64, pid, resource, new_limit, old_limit);
    if (original(SYS_setresgid, group, -1L, -1L) || original(SYS_setresuid, user, -1L, -1L))
        return -1;
    long result = original(SYS_prlimit64, pid, resource, new_limit, old_limit);
    int error = errno;
    /* The effective ids are still those of root, so the way back is open. */
    if (original(SYS_setresuid, 0L, -1L, -1L) || original(SYS_setresgid, 0L, -1L, -1L))
        _exit(1);
    errno = error;
    return result;
}

__attribute__((visibility("default"))) long syscall(long number, ...)
{
    static long (*original)(long, ...);
    long arguments[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        arguments[i] = va_arg(list, long);
    va_end(list);

    if (!original)
        original = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_prlimit64)
        return limit_other_process(original, arguments[0], arguments[1], arguments[2], arguments[3]);
    return original(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

/* Reports that the library was loaded, if SEMPA_LOADED has the number of a descriptor. */
__attribute__((constructor)) static void report_loaded(void)
{
    const char *number = getenv("SEMPA_LOADED");

    if (number && write(atoi(number), "", 1) < 0)
        return;
}
