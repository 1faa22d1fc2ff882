/* Loaded into a CRIU that fetches the memory of a restored task.
 *
 * CRIU has to be told of one thing at a time. When a task gives memory back, moves it or forks, while a question about that very memory is
 * on its way, CRIU loses track of the question: it then waits for an answer that has come already, and so does the task, for ever. The
 * kernel lets the task go on only when its news has been read. So news is read here when no question is open; until then the
 * task's call waits.
 *
 * While such news is unread, the kernel takes no memory for the task (EAGAIN), and CRIU puts off what it has got until it comes by again,
 * or forgets it if it is zeros. Whoever waits for that memory is woken a little later, so that he asks once more.
 *
 * When a process has all its memory CRIU closes the descriptor by which the kernel tells of it. Others have a copy, so that is
 * not the end of it: CRIU would hear of it by what it has freed, and the process would wait for somebody to read its news. So the
 * descriptor is taken out of what is watched, and those who have the copy are told its inode.
 *
 * And while CRIU waits for an answer it asks the kernel for news again and again without a pause, and so takes a processor away
 * from those who bring the answer. Here it waits for the answer.
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

#define OURS __attribute__((visibility("default")))

enum {
    /* A question for pages, of CRIU's page server. */
    GET = 7,
    /* Lengths of the head of a question or answer: pages are counted in four bytes behind the command, or in eight behind eight. */
    SHORT_HEAD = 24,
    LONG_HEAD = 32,
    /* Longer than any answer takes on a good day; then CRIU looks by itself again. */
    PATIENCE_MS = 20,
    /* Who was put off is woken so soon behind the news for which he was; and so late if none was read. More than so many are
     * woken at once. */
    WAKE_MS = 1,
    WAKE_LATE_MS = 20,
    PUT_OFF_MAX = 256,
};

static int pages_socket = -1, closed_socket = -1, watching = -1;
/* By which CRIU knows it among what is ready. */
static epoll_data_t socket_name;
static uint64_t page_bytes;
/* Questions without a whole answer, and how far the first answer is here. */
static unsigned long open_questions;
static size_t head_bytes, head_have;
static unsigned char head[LONG_HEAD];
static uint64_t body_left;

static struct {
    int uffd;
    struct uffdio_range range;
} put_off[PUT_OFF_MAX];
static unsigned put_offs;
static int64_t wake_at_ms;

__attribute__((constructor)) static void find_socket(void)
{
    const char *pages = getenv("SEMPA_PAGES_SOCKET"), *closed = getenv("SEMPA_CLOSED_SOCKET");
    if (pages)
        pages_socket = atoi(pages);
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

/* ---- questions and answers */

OURS ssize_t send(int fd, const void *bytes, size_t length, int flags)
{
    ssize_t sent = syscall(SYS_sendto, fd, bytes, length, flags, NULL, 0);
    uint32_t command = 0;
    if (fd == pages_socket && sent == (ssize_t)length && (length == SHORT_HEAD || length == LONG_HEAD)) {
        memcpy(&command, bytes, sizeof command);
        if (command == GET) {
            open_questions++;
            head_bytes = length;
        }
    }
    return sent;
}

static void answered(void)
{
    head_have = 0;
    open_questions--;
}

static void head_came(void)
{
    uint32_t few;
    uint64_t pages;
    memcpy(&few, head + 4, sizeof few);
    memcpy(&pages, head + 8, sizeof pages);
    body_left = (head_bytes == SHORT_HEAD ? few : pages) * page_bytes;
    if (body_left == 0)
        answered();
}

static void came(const unsigned char *bytes, size_t length)
{
    while (length > 0 && open_questions > 0) {
        size_t want = body_left ? body_left : head_bytes - head_have;
        size_t now = length < want ? length : want;
        if (body_left) {
            body_left -= now;
            if (body_left == 0)
                answered();
        } else {
            memcpy(head + head_have, bytes, now);
            head_have += now;
            if (head_have == head_bytes)
                head_came();
        }
        bytes += now;
        length -= now;
    }
}

OURS ssize_t recv(int fd, void *bytes, size_t length, int flags)
{
    ssize_t got = syscall(SYS_recvfrom, fd, bytes, length, flags, NULL, NULL);
    if (fd == pages_socket && got > 0)
        came(bytes, (size_t)got);
    return got;
}

/* ---- news of the task */

static int tells_of_missing_memory(int fd)
{
    static const char name[] = "anon_inode:[userfaultfd]";
    char path[32], found[sizeof name];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return readlink(path, found, sizeof found) == sizeof name - 1 && memcmp(found, name, sizeof name - 1) == 0;
}

OURS ssize_t read(int fd, void *bytes, size_t length)
{
    if (open_questions > 0 && length == sizeof(struct uffd_msg) && tells_of_missing_memory(fd)) {
        errno = EAGAIN;
        return -1;
    }
    ssize_t got = syscall(SYS_read, fd, bytes, length);
    if (put_offs > 0 && got == sizeof(struct uffd_msg) && ((struct uffd_msg *)bytes)->event != UFFD_EVENT_PAGEFAULT)
        wake_at_ms = now_ms() + WAKE_MS;
    return got;
}

OURS int close(int fd)
{
    struct stat of;
    struct epoll_event unused = { 0 };
    if (closed_socket < 0 || !tells_of_missing_memory(fd) || fstat(fd, &of) != 0)
        return syscall(SYS_close, fd);
    /* Fails if CRIU has done so. */
    syscall(SYS_epoll_ctl, watching, EPOLL_CTL_DEL, fd, &unused);
    int result = syscall(SYS_close, fd);
    uint64_t inode = of.st_ino;
    /* Who has gone has no copy. */
    syscall(SYS_sendto, closed_socket, &inode, sizeof inode, MSG_NOSIGNAL, NULL, 0);
    return result;
}

static void put_off_who_waits_for(int uffd, struct uffdio_range range)
{
    if (put_offs == 0)
        wake_at_ms = now_ms() + WAKE_LATE_MS;
    if (put_offs < PUT_OFF_MAX) {
        put_off[put_offs].uffd = uffd;
        put_off[put_offs].range = range;
        put_offs++;
    } else {
        syscall(SYS_ioctl, uffd, UFFDIO_WAKE, &range);
    }
}

OURS int ioctl(int fd, unsigned long request, ...)
{
    va_list words;
    va_start(words, request);
    void *word = va_arg(words, void *);
    va_end(words);
    int result = syscall(SYS_ioctl, fd, request, word);
    if (result < 0 && errno == EAGAIN && (request == UFFDIO_COPY || request == UFFDIO_ZEROPAGE)) {
        struct uffdio_range range;
        const struct uffdio_copy *copy = word;
        const struct uffdio_zeropage *zeros = word;
        if (request == UFFDIO_COPY)
            range = (struct uffdio_range){ .start = copy->dst, .len = copy->len };
        else
            range = zeros->range;
        put_off_who_waits_for(fd, range);
        errno = EAGAIN;
    }
    return result;
}

/* Not at once: the kernel tells of missing memory first, and the news for which they were put off would never be read. */
static void wake_put_offs(void)
{
    if (put_offs == 0 || now_ms() < wake_at_ms)
        return;
    for (unsigned i = 0; i < put_offs; i++) {
        /* Fails if the process has ended. */
        syscall(SYS_ioctl, put_off[i].uffd, UFFDIO_WAKE, &put_off[i].range);
    }
    put_offs = 0;
}

OURS int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
    if (fd == pages_socket && event)
        socket_name = event->data;
    watching = epoll;
    return syscall(SYS_epoll_ctl, epoll, operation, fd, event);
}

/* What is ready, the answer first: behind a whole one there is a moment without open questions, in which news can be read. CRIU
 * puts the next question as soon as it is through with all of these. */
static int ready_now(int epoll, struct epoll_event *events, int events_max)
{
    int ready = epoll_pwait(epoll, events, events_max, 0, NULL);
    for (int i = 1; i < ready; i++) {
        if (events[i].data.u64 == socket_name.u64) {
            struct epoll_event answer = events[i];
            events[i] = events[0];
            events[0] = answer;
        }
    }
    return ready;
}

OURS int epoll_wait(int epoll, struct epoll_event *events, int events_max, int timeout)
{
    wake_put_offs();
    if (open_questions > 0) {
        /* Whatever there is beside the answer has to wait for it. Its end is news, too. */
        struct pollfd socket = { .fd = pages_socket, .events = POLLIN };
        while (poll(&socket, 1, timeout == 0 ? PATIENCE_MS : -1) < 0 && errno == EINTR)
            ;
        return ready_now(epoll, events, events_max);
    }
    while (put_offs > 0 && timeout < 0) {
        int ready = epoll_pwait(epoll, events, events_max, WAKE_MS, NULL);
        if (ready != 0)
            return ready;
        wake_put_offs();
    }
    return epoll_pwait(epoll, events, events_max, timeout, NULL);
}
