/* Takes hold of one thing that does not survive a move (or looks as if), says "held" or "unable", and waits. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <mqueue.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static int hold(const char *what, const char *scratch) {
    if (!strcmp(what, "sysv")) {
        int id = shmget(IPC_PRIVATE, 4096, 0600);
        void *at = id < 0 ? (void *)-1 : shmat(id, 0, 0);
        if (id >= 0) shmctl(id, IPC_RMID, 0);
        return at != (void *)-1;
    }
    if (!strcmp(what, "tcp")) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t length = sizeof a;
        int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
        return bind(listener, (void *)&a, sizeof a) == 0 && listen(listener, 1) == 0
            && getsockname(listener, (void *)&a, &length) == 0 && connect(client, (void *)&a, sizeof a) == 0;
    }
    if (!strcmp(what, "orphan")) {
        int ready[2];
        char byte;
        if (pipe(ready) != 0) return 0;
        if (fork() == 0) {
            if (fork() == 0) {
                while (getppid() != 1) usleep(100);
                close(ready[1]);
                for (;;) pause();
            }
            _exit(0);
        }
        close(ready[1]);
        return read(ready[0], &byte, 1) == 0;
    }
    if (!strcmp(what, "lock")) {
        int fd = open(scratch, O_RDWR | O_CREAT, 0600);
        return fd >= 0 && flock(fd, LOCK_EX) == 0;
    }
    if (!strcmp(what, "pty")) {
        int master = posix_openpt(O_RDWR | O_NOCTTY);
        return master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0 && open(ptsname(master), O_RDWR | O_NOCTTY) >= 0;
    }
    if (!strcmp(what, "cwd")) {
        return mkdir(scratch, 0700) == 0 && chdir(scratch) == 0 && rmdir(scratch) == 0;
    }
    if (!strcmp(what, "mqueue")) {
        char name[64];
        snprintf(name, sizeof name, "/sempa-%d-%ld", getpid(), (long)random());
        mqd_t queue = mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0600, 0);
        if (queue == (mqd_t)-1) return 0;
        mq_unlink(name);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    puts(hold(argv[1], argv[2]) ? "held" : "unable");
    fflush(stdout);
    for (;;) pause();
}
