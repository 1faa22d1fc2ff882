/* Loaded into `criu lazy-pages`. Makes it read userfaultfd events only when no page request is
 * open.
 *
 * Lost requests: when a task unmaps, remaps or forks memory while a request for that memory is
 * open, CRIU loses track of the request. Both CRIU and the task then wait for ever for a reply that
 * has already come. The kernel lets the task continue only when its event has been read. So events
 * are not read while a request is open; the task's system call waits until then.
 *
 * Refused pages: while such an event is unread, the kernel refuses pages for the task (UFFDIO_COPY
 * and UFFDIO_ZEROPAGE fail with EAGAIN). CRIU defers the page until it happens to come back to it,
 * and forgets a page of zeros. So the threads that wait for such a page are woken a little later;
 * they fault again, and CRIU requests the page once more.
 *
 * Closed descriptors: when a process has all its memory CRIU closes its userfaultfd. Other programs
 * have copies, so the userfaultfd remains open: CRIU would still receive its events from epoll
 * under a freed pointer, and the process would block at its next event. So the descriptor is
 * removed from epoll, and the holders of copies are notified of its inode.
 *
 * Busy waiting: while a reply is outstanding CRIU polls for events without a pause, and takes CPU
 * time from the processes that deliver the reply. Here it waits for the reply.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum {
    /* PS_IOV_GET: a request of CRIU's page server protocol. */
    PS_IOV_GET = 7,
    /* Length of a header, with the page count in 4 bytes or (since CRIU 4.2) in 8 bytes. */
    SHORT_HEADER = 24,
    LONG_HEADER = 32,
    /* Maximum wait for a reply before CRIU continues to poll. Longer than a reply usually takes. */
    REPLY_WAIT_MS = 20,
    /* Delay before waking refused threads: after the event has been read, and at the latest.
     * Threads beyond REFUSED_MAX are woken immediately.
     */
    WAKE_DELAY_MS = 1,
    WAKE_DELAY_MAX_MS = 20,
    REFUSED_MAX = 256,
};

static int page_socket = -1, closed_socket = -1, epoll_fd = -1;
/* The data with which CRIU has registered the page socket in epoll. */
static epoll_data_t page_socket_data;
static uint64_t page_bytes;
/* Requests without a complete reply, and how much of the first reply has arrived. */
static unsigned long open_requests;
static size_t header_bytes, header_filled;
static unsigned char header[LONG_HEADER];
static uint64_t body_left;

static struct {
    int uffd;
    struct uffdio_range range;
} refused[REFUSED_MAX];
static unsigned refused_count;
static int64_t wake_at_ms;

__attribute__((constructor)) static void read_environment(void)
{
    const char *pages = getenv("SEMPA_PAGES_SOCKET"), *closed = getenv("SEMPA_CLOSED_SOCKET");
    if (pages)
        page_socket = atoi(pages);
    if (closed)
        closed_socket = atoi(closed);
    page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- requests and replies */

EXPORTED ssize_t send(int fd, const void *bytes, size_t length, int flags)
{
    ssize_t sent = syscall(SYS_sendto, fd, bytes, length, flags, NULL, 0);
    uint32_t command = 0;
    if (fd == page_socket && sent == (ssize_t)length && (length == SHORT_HEADER || length == LONG_HEADER)) {
        memcpy(&command, bytes, sizeof command);
        if (command == PS_IOV_GET) {
            open_requests++;
            header_bytes = length;
        }
    }
    return sent;
}

static void finish_reply(void)
{
    header_filled = 0;
    open_requests--;
}

static void header_complete(void)
{
    uint32_t short_count;
    uint64_t pages;
    memcpy(&short_count, header + 4, sizeof short_count);
    memcpy(&pages, header + 8, sizeof pages);
    body_left = (header_bytes == SHORT_HEADER ? short_count : pages) * page_bytes;
    if (body_left == 0)
        finish_reply();
}

static void count_reply_bytes(const unsigned char *bytes, size_t length)
{
    while (length > 0 && open_requests > 0) {
        size_t want = body_left ? body_left : header_bytes - header_filled;
        size_t now = length < want ? length : want;
        if (body_left) {
            body_left -= now;
            if (body_left == 0)
                finish_reply();
        } else {
            memcpy(header + header_filled, bytes, now);
            header_filled += now;
            if (header_filled == header_bytes)
                header_complete();
        }
        bytes += now;
        length -= now;
    }
}

EXPORTED ssize_t recv(int fd, void *bytes, size_t length, int flags)
{
    ssize_t got = syscall(SYS_recvfrom, fd, bytes, length, flags, NULL, NULL);
    if (fd == page_socket && got > 0)
        count_reply_bytes(bytes, (size_t)got);
    return got;
}

/* ---- events of the task */

static int is_userfaultfd(int fd)
{
    static const char name[] = "anon_inode:[userfaultfd]";
    char path[32], found[sizeof name];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return readlink(path, found, sizeof found) == sizeof name - 1 && memcmp(found, name, sizeof name - 1) == 0;
}

EXPORTED ssize_t read(int fd, void *bytes, size_t length)
{
    if (open_requests > 0 && length == sizeof(struct uffd_msg) && is_userfaultfd(fd)) {
        errno = EAGAIN;
        return -1;
    }
    ssize_t got = syscall(SYS_read, fd, bytes, length);
    if (refused_count > 0 && got == sizeof(struct uffd_msg) && ((struct uffd_msg *)bytes)->event != UFFD_EVENT_PAGEFAULT)
        wake_at_ms = now_ms() + WAKE_DELAY_MS;
    return got;
}

EXPORTED int close(int fd)
{
    struct stat status;
    struct epoll_event unused = { 0 };
    if (closed_socket < 0 || !is_userfaultfd(fd) || fstat(fd, &status) != 0)
        return syscall(SYS_close, fd);
    /* Fails if CRIU has removed it already. */
    syscall(SYS_epoll_ctl, epoll_fd, EPOLL_CTL_DEL, fd, &unused);
    int result = syscall(SYS_close, fd);
    uint64_t inode = status.st_ino;
    /* Fails if no program holds copies any more. */
    syscall(SYS_sendto, closed_socket, &inode, sizeof inode, MSG_NOSIGNAL, NULL, 0);
    return result;
}

static void remember_refused(int uffd, struct uffdio_range range)
{
    if (refused_count == 0)
        wake_at_ms = now_ms() + WAKE_DELAY_MAX_MS;
    if (refused_count < REFUSED_MAX) {
        refused[refused_count].uffd = uffd;
        refused[refused_count].range = range;
        refused_count++;
    } else {
        syscall(SYS_ioctl, uffd, UFFDIO_WAKE, &range);
    }
}

EXPORTED int ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    int result = syscall(SYS_ioctl, fd, request, argument);
    if (result < 0 && errno == EAGAIN && (request == UFFDIO_COPY || request == UFFDIO_ZEROPAGE)) {
        struct uffdio_range range;
        const struct uffdio_copy *copy = argument;
        const struct uffdio_zeropage *zeros = argument;
        if (request == UFFDIO_COPY)
            range = (struct uffdio_range){ .start = copy->dst, .len = copy->len };
        else
            range = zeros->range;
        remember_refused(fd, range);
        errno = EAGAIN;
    }
    return result;
}

/* Must not happen at once: the kernel returns page faults before other events, so the event for
 * which the pages were refused would never be read.
 */
static void wake_refused(void)
{
    if (refused_count == 0 || now_ms() < wake_at_ms)
        return;
    for (unsigned i = 0; i < refused_count; i++) {
        /* Fails if the process has exited. */
        syscall(SYS_ioctl, refused[i].uffd, UFFDIO_WAKE, &refused[i].range);
    }
    refused_count = 0;
}

EXPORTED int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
    if (fd == page_socket && event)
        page_socket_data = event->data;
    epoll_fd = epoll;
    return syscall(SYS_epoll_ctl, epoll, operation, fd, event);
}

/* Returns the ready descriptors, the page socket first. After a complete reply there is a moment
 * without open requests, in which events can be read; CRIU sends its next request when it has
 * handled all ready descriptors.
 */
static int ready_page_socket_first(int epoll, struct epoll_event *events, int events_max)
{
    int ready = epoll_pwait(epoll, events, events_max, 0, NULL);
    for (int i = 1; i < ready; i++) {
        if (events[i].data.u64 == page_socket_data.u64) {
            struct epoll_event answer = events[i];
            events[i] = events[0];
            events[0] = answer;
        }
    }
    return ready;
}

EXPORTED int epoll_wait(int epoll, struct epoll_event *events, int events_max, int timeout)
{
    wake_refused();
    if (open_requests > 0) {
        /* All other events wait for the reply. A closed socket also ends the wait. */
        struct pollfd socket = { .fd = page_socket, .events = POLLIN };
        while (poll(&socket, 1, timeout == 0 ? REPLY_WAIT_MS : -1) < 0 && errno == EINTR)
            ;
        return ready_page_socket_first(epoll, events, events_max);
    }
    while (refused_count > 0 && timeout < 0) {
        int ready = epoll_pwait(epoll, events, events_max, WAKE_DELAY_MS, NULL);
        if (ready != 0)
            return ready;
        wake_refused();
    }
    return epoll_pwait(epoll, events, events_max, timeout, NULL);
}
