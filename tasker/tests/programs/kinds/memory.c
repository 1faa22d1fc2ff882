/* Memory of every kind. */
#include "kinds.h"
#include <iconv.h>
#include <locale.h>
#include <sys/mman.h>

#define MIB ((size_t)1 << 20)

static char *anonymous(size_t bytes) {
    char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

/* Full memory, some that zeros were written to, some that was never touched, and some that was only read. */
static void big(void) {
    uint64_t *full = (void *)anonymous(300 * MIB);
    char *untouched = anonymous(4096 * MIB), *only_read = anonymous(512 * MIB);
    volatile char *zeros = anonymous(16 * MIB);
    uint64_t sum = 0;
    for (size_t i = 0; i < 300 * MIB / 8; i++) full[i] = word_at(i);
    for (size_t i = 0; i < 16 * MIB; i += 4096) zeros[i] = 0;
    madvise(only_read, 512 * MIB, MADV_NOHUGEPAGE);
    for (size_t i = 0; i < 512 * MIB; i += 4096) sum += ((volatile char *)only_read)[i];
    moved();
    for (size_t i = 0; i < 300 * MIB / 8; i++) CHECK(full[i] == word_at(i));
    for (size_t i = 0; i < 512 * MIB; i += 4096) sum += ((volatile char *)only_read)[i];
    for (size_t i = 0; i < 4096 * MIB; i += 512 * MIB) sum += ((volatile char *)untouched)[i];
    CHECK(sum == 0);
}

/* The flags of the mapping at this address, as smaps prints them. */
static void flags_of(const void *at, char *flags, size_t size) {
    FILE *smaps = fopen("/proc/self/smaps", "r");
    char line[4096];
    int inside = 0;
    CHECK(smaps);
    flags[0] = 0;
    while (fgets(line, sizeof line, smaps)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) inside = (uintptr_t)at >= begin && (uintptr_t)at < end;
        if (inside && !strncmp(line, "VmFlags:", 8)) snprintf(flags, size, "%s", line);
    }
    fclose(smaps);
    CHECK(flags[0]);
}

static void advised(void) {
    enum { KINDS = 6 };
    const int advice[KINDS] = {MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_DONTFORK, MADV_WIPEONFORK, MADV_NORMAL};
    char *at[KINDS], before[KINDS][256], now[256];
    for (int k = 0; k < KINDS; k++) {
        /* Mappings that touch could become one. */
        at[k] = anonymous(8 * MIB) + 2 * MIB;
        munmap(at[k] - 2 * MIB, 2 * MIB);
        munmap(at[k] + 4 * MIB, 2 * MIB);
        CHECK(madvise(at[k], 4 * MIB, advice[k]) == 0);
        for (size_t i = 0; i < 4 * MIB; i += 8) *(uint64_t *)(at[k] + i) = word_at(i + k);
    }
    CHECK(mlock(at[5], 4 * MIB) == 0);
    CHECK(mprotect(at[0] + 2 * MIB, 4096, PROT_NONE) == 0 && mprotect(at[1], 2 * MIB, PROT_READ) == 0);
    for (int k = 0; k < KINDS; k++) flags_of(at[k], before[k], sizeof before[k]);
    CHECK(strstr(before[5], " lo") && strstr(before[0], " hg") && strstr(before[3], " dc"));
    moved();
    for (int k = 0; k < KINDS; k++) {
        flags_of(at[k], now, sizeof now);
        if (strcmp(now, before[k])) printf("wrong: %d was %s is %s", k, before[k], now);
        CHECK(!strcmp(now, before[k]));
        for (size_t i = 0; i < 2 * MIB; i += 8) CHECK(*(uint64_t *)(at[k] + i) == word_at(i + k));
    }
    flags_of(at[0] + 2 * MIB, now, sizeof now);
    CHECK(!strstr(now, " rd") && !strstr(now, " wr"));
    CHECK(mprotect(at[0] + 2 * MIB, 4096, PROT_READ) == 0);
    for (size_t i = 2 * MIB; i < 4 * MIB; i += 8) CHECK(*(uint64_t *)(at[0] + i) == word_at(i));
}

static void locked_for_good(void) {
    char flags[256];
    NEED(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    moved();
    char *at = anonymous(MIB);
    flags_of(at, flags, sizeof flags);
    puts(strstr(flags, " lo") ? "kept" : "forgotten");
}

static int readable(const char *at) {
    int p[2];
    CHECK(pipe(p) == 0);
    int written = write(p[1], at, 1);
    CHECK(written == 1 || errno == EFAULT);
    close(p[0]);
    close(p[1]);
    return written == 1;
}

static void guarded(void) {
    char *at = anonymous(16 * 4096);
    memset(at, 7, 16 * 4096);
    NEED(madvise(at + 4 * 4096, 4096, 102 /* MADV_GUARD_INSTALL */) == 0);
    moved();
    for (int i = 0; i < 16; i++) CHECK(i == 4 ? !readable(at + i * 4096) : at[i * 4096] == 7);
    CHECK(madvise(at + 4 * 4096, 4096, 103 /* MADV_GUARD_REMOVE */) == 0 && at[4 * 4096] == 0);
}

static void sealed(void) {
    char *at = anonymous(4096);
    strcpy(at, "sealed");
    CHECK(mprotect(at, 4096, PROT_READ) == 0);
    NEED(syscall(462 /* mseal */, at, 4096, 0) == 0);
    CHECK(mprotect(at, 4096, PROT_READ | PROT_WRITE) == -1 && errno == EPERM);
    moved();
    CHECK(!strcmp(at, "sealed"));
    puts(mprotect(at, 4096, PROT_READ | PROT_WRITE) == 0 ? "forgotten" : "kept");
}

static void droppable(void) {
    char flags[256];
    char *at = mmap(0, 4096, PROT_READ | PROT_WRITE, 0x08 /* MAP_DROPPABLE */ | MAP_ANONYMOUS, -1, 0);
    NEED(at != MAP_FAILED);
    strcpy(at, "there");
    moved();
    flags_of(at, flags, sizeof flags);
    CHECK(!at[0] || !strcmp(at, "there"));
    at[0] = 1;
    CHECK(at[0] == 0 || at[0] == 1);
    puts(strstr(flags, " dp") ? "kept" : "forgotten");
}

static void mapped(void) {
    enum { PAGES = 64, SIZE = PAGES * 4096 };
    char zeros[4096] = {0};
    int fd = open(in_place("mapped"), O_CREAT | O_RDWR, 0600);
    for (int i = 0; i < PAGES; i++) CHECK(write(fd, zeros, 4096) == 4096);
    char *own = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    close(fd);
    fd = open(in_place("both"), O_CREAT | O_RDWR, 0600);
    CHECK(ftruncate(fd, SIZE) == 0);
    char *shared = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *part = mmap(0, 2 * 4096, PROT_READ, MAP_SHARED, fd, 3 * 4096);
    CHECK(own != MAP_FAILED && shared != MAP_FAILED && part != MAP_FAILED);
    strcpy(own + 5 * 4096, "only mine");
    strcpy(shared + 3 * 4096, "for all");
    moved();
    CHECK(!strcmp(own + 5 * 4096, "only mine") && own[0] == 0 && own[SIZE - 1] == 0);
    CHECK(!strcmp(shared + 3 * 4096, "for all") && !strcmp(part, "for all"));
    strcpy(shared + 4 * 4096, "later");
    char got[16];
    CHECK(pread(fd, got, 6, 4 * 4096) == 6 && !strcmp(got, "later"));
    CHECK(!strcmp(part + 4096, "later"));
    int again = open(in_place("mapped"), O_RDONLY);
    CHECK(pread(again, got, 9, 5 * 4096) == 9 && !got[0]);
}

static uint64_t deep(int level) {
    volatile uint64_t here[64];
    for (int i = 0; i < 64; i++) here[i] = word_at(level * 64 + i);
    if (level == 0) moved();
    uint64_t below = level ? deep(level - 1) : 0;
    for (int i = 0; i < 64; i++) CHECK(here[i] == word_at(level * 64 + i));
    return below + here[5];
}

static void stack(void) {
    enum { LEVELS = 10000 };
    uint64_t expected = 0;
    for (int level = 0; level <= LEVELS; level++) expected += word_at(level * 64 + 5);
    CHECK(deep(LEVELS) == expected);
    /* It still grows on demand. */
    volatile char more[2 << 20];
    for (size_t i = 0; i < sizeof more; i += 4096) more[i] = 1;
}

static void heap(void) {
    enum { BLOCKS = 20000 };
    static char *block[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        size_t bytes = 8 + word_at(i) % 5000;
        block[i] = malloc(bytes);
        memset(block[i], i, bytes);
    }
    for (int i = 0; i < BLOCKS; i += 3) { free(block[i]); block[i] = 0; }
    moved();
    for (int i = 0; i < BLOCKS; i++) {
        size_t bytes = 8 + word_at(i) % 5000;
        if (!block[i]) block[i] = memset(malloc(bytes), i, bytes);
        CHECK(block[i][0] == (char)i && block[i][bytes - 1] == (char)i);
    }
    for (int i = 0; i < BLOCKS; i++) free(block[i]);
}

static void language(void) {
    char in[] = "\xe4\xf6", out[16] = "", *from = in, *to = out, text[64];
    size_t left = 2, room = sizeof out;
    time_t noon = 1720000000;
    CHECK(setlocale(LC_ALL, "C.UTF-8"));
    setenv("TZ", "Europe/Berlin", 1);
    tzset();
    iconv_t latin = iconv_open("UTF-8", "LATIN1");
    CHECK(latin != (iconv_t)-1);
    strftime(text, sizeof text, "%H:%M %A", localtime(&noon));
    int fd = open("/etc/localtime", O_RDONLY);
    struct stat zone;
    char *at = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &zone) == 0) at = mmap(0, zone.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    char first = at == MAP_FAILED ? 0 : at[0];
    moved();
    char now[64];
    CHECK(at == MAP_FAILED || at[0] == first);
    CHECK(!strcmp(setlocale(LC_ALL, 0), "C.UTF-8"));
    strftime(now, sizeof now, "%H:%M %A", localtime(&noon));
    CHECK(!strcmp(text, now));
    CHECK(iconv(latin, &from, &left, &to, &room) == 0 && !strcmp(out, "\xc3\xa4\xc3\xb6"));
    wchar_t wide;
    CHECK(mbtowc(&wide, out, 2) == 2 && wide == 0xe4);
}

int main(int argc, char **argv) {
    const struct row rows[] = {
        {"big", big}, {"advised", advised}, {"mapped", mapped}, {"stack", stack}, {"heap", heap}, {"language", language},
        {"locked-for-good", locked_for_good}, {"guarded", guarded}, {"sealed", sealed}, {"droppable", droppable}, {0, 0},
    };
    return run_row(rows, argc, argv);
}
