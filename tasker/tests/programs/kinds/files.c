/* Files and directories. */
#include "kinds.h"
#include <dirent.h>
#include <sys/wait.h>

static void fill(const char *path, size_t words) {
    FILE *file = fopen(path, "w");
    CHECK(file);
    for (size_t i = 0; i < words; i++) {
        uint64_t word = word_at(i);
        CHECK(fwrite(&word, 8, 1, file) == 1);
    }
    CHECK(fclose(file) == 0);
}

static void reading(void) {
    uint64_t word;
    fill(in_place("in"), 10000);
    int fd = open(in_place("in"), O_RDONLY), twin = dup(fd), apart = open(in_place("in"), O_RDONLY);
    FILE *buffered = fopen(in_place("in"), "r");
    for (int i = 0; i < 500; i++) CHECK(read(fd, &word, 8) == 8 && word == word_at(i));
    for (int i = 0; i < 777; i++) CHECK(fread(&word, 8, 1, buffered) == 1 && word == word_at(i));
    moved();
    for (int i = 500; i < 1000; i++) CHECK(read(i % 2 ? fd : twin, &word, 8) == 8 && word == word_at(i));
    CHECK(read(apart, &word, 8) == 8 && word == word_at(0));
    for (int i = 777; i < 10000; i++) CHECK(fread(&word, 8, 1, buffered) == 1 && word == word_at(i));
    CHECK(fread(&word, 8, 1, buffered) == 0 && feof(buffered));
    CHECK((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY);
}

static void read_write(void) {
    uint64_t word;
    fill(in_place("both"), 1000);
    int fd = open(in_place("both"), O_RDWR), child_end;
    CHECK(lseek(fd, 400 * 8, SEEK_SET) == 400 * 8);
    word = word_at(5000);
    CHECK(write(fd, &word, 8) == 8);
    /* A child has the same open file, with the same position. */
    pid_t child = fork();
    if (child == 0) {
        UNTIL(told_to_go());
        word = word_at(5001);
        _exit(write(fd, &word, 8) == 8 ? 50 : 51);
    }
    moved();
    CHECK(waitpid(child, &child_end, 0) == child && WEXITSTATUS(child_end) == 50);
    CHECK(lseek(fd, 0, SEEK_CUR) == 402 * 8);
    word = word_at(5002);
    CHECK(write(fd, &word, 8) == 8);
    for (int i = 0; i < 1000; i++) {
        CHECK(pread(fd, &word, 8, i * 8) == 8);
        CHECK(word == word_at(i >= 400 && i < 403 ? 5000 + i - 400 : i));
    }
    CHECK(lseek(fd, 0, SEEK_END) == 8000 && write(fd, "end", 3) == 3);
}

/* The test appends a line while the program is stopped. */
static void appending(void) {
    int fd = open(in_place("log"), O_CREAT | O_WRONLY | O_APPEND, 0600);
    CHECK(write(fd, "before\n", 7) == 7);
    moved();
    CHECK(write(fd, "after\n", 6) == 6);
}

static void deleted_of(size_t words) {
    uint64_t word;
    char path[64], link[4096] = "";
    fill(in_place("gone"), words);
    int fd = open(in_place("gone"), O_RDWR);
    CHECK(lseek(fd, 80, SEEK_SET) == 80 && unlink(in_place("gone")) == 0);
    moved();
    CHECK(read(fd, &word, 8) == 8 && word == word_at(10));
    for (size_t i = 0; i < words; i++) CHECK(pread(fd, &word, 8, i * 8) == 8 && word == word_at(i));
    CHECK(pwrite(fd, "new", 3, words * 8) == 3);
    struct stat now;
    CHECK(fstat(fd, &now) == 0 && now.st_nlink == 0 && (size_t)now.st_size == words * 8 + 3);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK(readlink(path, link, sizeof link - 1) > 0 && strstr(link, "(deleted)"));
    CHECK(access(in_place("gone"), F_OK) == -1 && errno == ENOENT);
}

static void deleted_small(void) { deleted_of(100); }
static void deleted_large(void) { deleted_of(3 << 20 >> 3); }

/* Another file has taken the name of the one that is open. */
static void replaced(void) {
    char text[8] = "";
    int old = open(in_place("file"), O_CREAT | O_RDWR, 0600), new = open(in_place("next"), O_CREAT | O_RDWR, 0600);
    CHECK(write(old, "old", 3) == 3 && write(new, "newer", 5) == 5);
    CHECK(rename(in_place("next"), in_place("file")) == 0);
    moved();
    CHECK(pread(old, text, 8, 0) == 3 && !memcmp(text, "old", 3));
    CHECK(pread(new, text, 8, 0) == 5 && !memcmp(text, "newer", 5));
    new = open(in_place("file"), O_RDONLY);
    CHECK(pread(new, text, 8, 0) == 5 && !memcmp(text, "newer", 5));
}

/* Its own program is removed while it runs, as when it is compiled again. */
static void program_removed(void) {
    char path[4096] = "";
    CHECK(readlink("/proc/self/exe", path, sizeof path - 1) > 0 && unlink(path) == 0);
    moved();
    pid_t child = fork();
    int status;
    if (child == 0) _exit(60);
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 60);
}

static void unnamed(void) {
    uint64_t word = word_at(1);
    int fd = open(place, O_TMPFILE | O_RDWR, 0600);
    NEED(fd >= 0);
    CHECK(write(fd, &word, 8) == 8);
    moved();
    CHECK(pread(fd, &word, 8, 0) == 8 && word == word_at(1));
}

static void named_pipe(void) {
    char got[16];
    CHECK(mkfifo(in_place("data/fifo"), 0600) == 0);
    int from = open(in_place("data/fifo"), O_RDONLY | O_NONBLOCK), to = open(in_place("data/fifo"), O_WRONLY);
    CHECK(from >= 0 && to >= 0 && write(to, "waiting", 7) == 7);
    moved();
    CHECK(read(from, got, sizeof got) == 7 && !memcmp(got, "waiting", 7));
    CHECK(write(to, "more", 4) == 4 && read(from, got, sizeof got) == 4);
    close(to);
    CHECK(read(from, got, sizeof got) == 0);
}

static void directories(void) {
    char name[16], seen[20] = {0};
    struct dirent *entry;
    CHECK(mkdir(in_place("dir"), 0700) == 0);
    for (int i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "dir/%d", i);
        CHECK(close(open(in_place(name), O_CREAT | O_WRONLY, 0600)) == 0);
    }
    DIR *dir = opendir(in_place("dir"));
    int at = open(in_place("dir"), O_RDONLY | O_DIRECTORY), path = open(in_place("dir"), O_PATH);
    for (int i = 0; i < 7; i++) {
        CHECK((entry = readdir(dir)));
        if (entry->d_name[0] != '.') seen[atoi(entry->d_name)]++;
    }
    moved();
    while ((entry = readdir(dir)))
        if (entry->d_name[0] != '.') seen[atoi(entry->d_name)]++;
    for (int i = 0; i < 20; i++) CHECK(seen[i] == 1);
    CHECK(faccessat(at, "5", R_OK, 0) == 0);
    struct stat now;
    CHECK(fstatat(path, "6", &now, 0) == 0 && S_ISREG(now.st_mode));
}

static void of_the_system(void) {
    char got[64], comm[64];
    int memory = open("/proc/meminfo", O_RDONLY), null = open("/dev/null", O_RDWR), sys = open("/proc/sys/kernel/ostype", O_RDONLY);
    CHECK(memory >= 0 && null >= 0 && sys >= 0);
    moved();
    CHECK(pread(memory, got, 9, 0) == 9 && !memcmp(got, "MemTotal:", 9));
    FILE *own = fopen("/proc/self/comm", "r");
    CHECK(own && fscanf(own, "%60s", comm) == 1 && !strcmp(comm, "files"));
    CHECK(read(sys, got, 5) == 5 && !memcmp(got, "Linux", 5));
    CHECK(read(null, got, 1) == 0 && read(0, got, 1) == 0);
}

/* A plain file, for tests with other files on the target. */
static void held(void) {
    fill(in_place("data/held"), 100);
    int fd = open(in_place("data/held"), O_RDONLY);
    uint64_t word;
    moved();
    CHECK(read(fd, &word, 8) == 8 && word == word_at(0));
}

int main(int argc, char **argv) {
    const struct row rows[] = {
        {"reading", reading}, {"read-write", read_write}, {"appending", appending}, {"deleted-small", deleted_small},
        {"deleted-large", deleted_large}, {"unnamed", unnamed}, {"named-pipe", named_pipe}, {"directories", directories},
        {"of-the-system", of_the_system}, {"held", held}, {"replaced", replaced},
        {"program-removed", program_removed}, {0, 0},
    };
    return run_row(rows, argc, argv);
}
