/* Loaded into `criu swrk` for a restore on behalf of another user. Makes CRIU access that user's
 * files with the user's rights.
 *
 * CRIU is root, and opens and creates the files of the restored task by the paths in the images.
 * The user may replace a file or a directory of such a path at any time, so a check beforehand
 * proves nothing. So each access is made with the ids and groups of the user: the kernel refuses
 * what it would refuse to the user. Exceptions are /proc, /sys and the directory of the service
 * (SEMPA_OWN_DIR), which contains the images: no user can create or replace anything there.
 *
 * SEMPA_FILE_IDS has the user id, the group id and the other groups, separated by commas.
 */
#define _GNU_SOURCE
#include "open_mode.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
/* As in the kernel (NGROUPS_MAX). */
#define GROUPS_MAX 65536

static uid_t user;
static gid_t group;
static int is_active;

/* Returns the number at the start of the text, and moves the text behind it and its comma. */
static unsigned next_number(const char **text)
{
    char *end;
    unsigned long number = strtoul(*text, &end, 10);
    *text = *end == ',' ? end + 1 : end;
    return number;
}

__attribute__((constructor)) static void read_environment(void)
{
    static gid_t groups[GROUPS_MAX];
    const char *text = getenv("SEMPA_FILE_IDS");
    size_t count = 0;

    if (!text)
        return;
    user = next_number(&text);
    group = next_number(&text);
    while (*text && count < GROUPS_MAX)
        groups[count++] = next_number(&text);
    /* Without the user's rights nothing may be restored. */
    if (!user || syscall(SYS_setgroups, count, groups) != 0)
        _exit(1);
    is_active = 1;
}

static int has_prefix(const char *path, const char *prefix)
{
    size_t length = strlen(prefix);
    return length > 0 && strncmp(path, prefix, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* True if no user can create or replace files below the path. Files in memory (memfd_create(2)) have
 * names that no directory contains; CRIU creates them as root, and gives them to the user.
 */
static int is_own_path(const char *path)
{
    const char *own = getenv("SEMPA_OWN_DIR");
    return !strstr(path, "/../") &&
           (strncmp(path, "/memfd:", 7) == 0 || has_prefix(path, "/proc") || has_prefix(path, "/sys") || (own && has_prefix(path, own)));
}

/* Begins an access with the user's rights, unless the path is one of the exceptions. `directory` is
 * the descriptor to which a relative path refers. Returns 1 if `end_access` must be called.
 */
static int begin_access(int directory, const char *path)
{
    char link[64], target[4096];

    if (!is_active)
        return 0;
    if (path && path[0] != '/') {
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, target, sizeof target - 1);
        target[length > 0 ? length : 0] = 0;
        if (strncmp(path, "../", 3) != 0 && !strstr(path, "/../") && is_own_path(target))
            return 0;
    } else if (path && is_own_path(path))
        return 0;
    syscall(SYS_setfsgid, group);
    syscall(SYS_setfsuid, user);
    return 1;
}

static void end_access(int has_begun)
{
    int error = errno;

    if (has_begun) {
        syscall(SYS_setfsuid, 0);
        syscall(SYS_setfsgid, 0);
    }
    errno = error;
}

#define ACCESS(directory, path, ...)                                                                                   \
    do {                                                                                                               \
        int has_begun = begin_access(directory, path);                                                                 \
        long result = syscall(__VA_ARGS__);                                                                            \
        end_access(has_begun);                                                                                         \
        return result;                                                                                                 \
    } while (0)

EXPORTED int openat64(int directory, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = open_mode(flags, arguments);
    va_end(arguments);
    ACCESS(directory, path, SYS_openat, directory, path, flags, mode);
}

EXPORTED int open64(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = open_mode(flags, arguments);
    va_end(arguments);
    ACCESS(AT_FDCWD, path, SYS_openat, AT_FDCWD, path, flags, mode);
}

EXPORTED int creat64(const char *path, mode_t mode)
{
    ACCESS(AT_FDCWD, path, SYS_openat, AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

EXPORTED int mkdirat(int directory, const char *path, mode_t mode)
{
    ACCESS(directory, path, SYS_mkdirat, directory, path, mode);
}

EXPORTED int mkdir(const char *path, mode_t mode)
{
    ACCESS(AT_FDCWD, path, SYS_mkdirat, AT_FDCWD, path, mode);
}

EXPORTED int mknodat(int directory, const char *path, mode_t mode, dev_t device)
{
    ACCESS(directory, path, SYS_mknodat, directory, path, mode, (unsigned)device);
}

EXPORTED int mknod(const char *path, mode_t mode, dev_t device)
{
    ACCESS(AT_FDCWD, path, SYS_mknodat, AT_FDCWD, path, mode, (unsigned)device);
}

EXPORTED int unlinkat(int directory, const char *path, int flags)
{
    ACCESS(directory, path, SYS_unlinkat, directory, path, flags);
}

EXPORTED int unlink(const char *path)
{
    ACCESS(AT_FDCWD, path, SYS_unlinkat, AT_FDCWD, path, 0);
}

EXPORTED int rename(const char *from, const char *to)
{
    ACCESS(AT_FDCWD, is_own_path(from) ? to : from, SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

EXPORTED int symlinkat(const char *target, int directory, const char *path)
{
    ACCESS(directory, path, SYS_symlinkat, target, directory, path);
}

EXPORTED int symlink(const char *target, const char *path)
{
    ACCESS(AT_FDCWD, path, SYS_symlinkat, target, AT_FDCWD, path);
}

/* CRIU links a file from its descriptor in /proc, which the user's rights permit as well. */
EXPORTED int linkat(int from_directory, const char *from, int directory, const char *path, int flags)
{
    ACCESS(directory, path, SYS_linkat, from_directory, from, directory, path, flags);
}

EXPORTED int fchmodat(int directory, const char *path, mode_t mode, int flags)
{
    if (flags) {
        errno = EOPNOTSUPP;
        return -1;
    }
    ACCESS(directory, path, SYS_fchmodat, directory, path, mode);
}

EXPORTED int chmod(const char *path, mode_t mode)
{
    ACCESS(AT_FDCWD, path, SYS_fchmodat, AT_FDCWD, path, mode);
}

EXPORTED int fchmod(int descriptor, mode_t mode)
{
    ACCESS(descriptor, "", SYS_fchmod, descriptor, mode);
}

EXPORTED int fchownat(int directory, const char *path, uid_t owner, gid_t owner_group, int flags)
{
    ACCESS(directory, path, SYS_fchownat, directory, path, owner, owner_group, flags);
}

EXPORTED int fchown(int descriptor, uid_t owner, gid_t owner_group)
{
    ACCESS(descriptor, "", SYS_fchown, descriptor, owner, owner_group);
}

EXPORTED int chdir(const char *path)
{
    ACCESS(AT_FDCWD, path, SYS_chdir, path);
}

EXPORTED int access(const char *path, int mode)
{
    ACCESS(AT_FDCWD, path, SYS_faccessat2, AT_FDCWD, path, mode, AT_EACCESS);
}

EXPORTED int faccessat(int directory, const char *path, int mode, int flags)
{
    ACCESS(directory, path, SYS_faccessat2, directory, path, mode, flags | AT_EACCESS);
}

EXPORTED int lutimes(const char *path, const struct timeval times[2])
{
    struct timespec spec[2];
    for (int i = 0; i < 2; i++) {
        spec[i].tv_sec = times[i].tv_sec;
        spec[i].tv_nsec = times[i].tv_usec * 1000;
    }
    ACCESS(AT_FDCWD, path, SYS_utimensat, AT_FDCWD, path, spec, AT_SYMLINK_NOFOLLOW);
}

/* Sockets with names: the kernel creates or opens a file. A socket of CRIU itself has a name in the
 * directory of the service, or none that the file system knows.
 */
static const char *socket_path(const struct sockaddr *address)
{
    const char *name = address->sa_data;
    return address->sa_family == AF_UNIX && name[0] ? name : "/proc";
}

/* A socket belongs to the user whose file rights its creator has. The kernel shares a port between
 * sockets of one user only (SO_REUSEPORT).
 */
EXPORTED int socket(int domain, int type, int protocol)
{
    ACCESS(AT_FDCWD, NULL, SYS_socket, domain, type, protocol);
}

EXPORTED int socketpair(int domain, int type, int protocol, int descriptors[2])
{
    ACCESS(AT_FDCWD, NULL, SYS_socketpair, domain, type, protocol, descriptors);
}

EXPORTED int bind(int descriptor, const struct sockaddr *address, socklen_t length)
{
    ACCESS(AT_FDCWD, socket_path(address), SYS_bind, descriptor, address, length);
}

EXPORTED int connect(int descriptor, const struct sockaddr *address, socklen_t length)
{
    ACCESS(AT_FDCWD, socket_path(address), SYS_connect, descriptor, address, length);
}
