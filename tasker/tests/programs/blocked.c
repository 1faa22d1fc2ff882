/*
 * A parent that waits in the kernel without being interruptible, and a child that computes. Prints "ready" first.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGE = 4096 };

int main(void)
{
    static char copy[PAGE];
    char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register area = {.range = {(unsigned long)page, PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    struct iovec to = {copy, PAGE}, from = {page, PAGE};

    if (faults < 0 || ioctl(faults, UFFDIO_API, &api) < 0 || ioctl(faults, UFFDIO_REGISTER, &area) < 0) {
        perror("userfaultfd");
        return 1;
    }
    if (fork() == 0)
        for (volatile unsigned long n = 0;; n++)
            ;
    puts("ready");
    fflush(stdout);
    /* Nobody provides the page. */
    process_vm_readv(getpid(), &to, 1, &from, 1, 0);
    return 1;
}
