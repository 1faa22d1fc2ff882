/* Loaded into a CRIU that fetches the memory of a restored task.
 *
 * While CRIU waits for an answer it asks the kernel for news again and again without a pause, and so takes a processor away
 * from those who bring the answer. As long as a question of its own is open it waits for news here. How many are open says a number
 * in a file that whoever answers keeps; it is lowered before the last byte of an answer is sent, so that nobody waits for
 * what has come already.
 */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>

/* Longer than any answer takes on a good day; then CRIU looks by itself again. */
#define PATIENCE_MS 20

static const volatile uint32_t *open_questions;

__attribute__((constructor)) static void find_open_questions(void)
{
    const char *number = getenv("SEMPA_OPEN_QUESTIONS");
    if (!number)
        return;
    void *at = mmap(NULL, sizeof *open_questions, PROT_READ, MAP_SHARED, atoi(number), 0);
    if (at != MAP_FAILED)
        open_questions = at;
}

__attribute__((visibility("default"))) int epoll_wait(int epoll, struct epoll_event *events, int events_max, int timeout)
{
    if (timeout == 0 && open_questions && *open_questions)
        timeout = PATIENCE_MS;
    return epoll_pwait(epoll, events, events_max, timeout, NULL);
}
