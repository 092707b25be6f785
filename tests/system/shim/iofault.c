/* Makes system calls of a live process fail, fall short, take long or hang, as a mapped control file says at that moment.
 *
 * Purpose: disk trouble for tests, re-armed without a restart: LD_PRELOAD this and name the control file in IOFAULT_CONTROL. Non-purpose: what is
 * tested with it. tests/system/shim/iofault.py writes the control file; the two agree on `struct control`. Invariants: without an armed rule a call
 * costs one look at memory; a rule's hits are counted whether or not it fires; a hung call returns when its rule is disarmed, and is then done.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { OPEN, READ, PREAD, WRITE, PWRITE, FSYNC, FDATASYNC, RENAME, UNLINK, FALLOCATE, FTRUNCATE, ACCEPT, CLOSE };
enum action { ERROR = 1, SHORT, DELAY, HANG };

#define RULES 4
#define FAILED 4096

struct rule {
    _Atomic uint32_t armed;   /* written last */
    uint32_t calls;           /* bit per enum call */
    uint32_t action;
    int32_t error;
    uint32_t first, times;    /* from this hit on, from 1; so often, 0: for ever */
    uint32_t delay_us;
    _Atomic uint32_t hits, fired, hanging;
    char pattern[216];        /* fnmatch over the absolute path */
};

struct control {
    _Atomic uint32_t loaded;        /* processes that have mapped this */
    _Atomic uint32_t synced_again;  /* syncs of a file whose sync has failed */
    _Atomic uint32_t written_after; /* writes to a file whose sync has failed */
    uint32_t reserved;
    struct rule rules[RULES];
};

static struct control *control;
static struct { _Atomic uint64_t dev, ino; } failed[FAILED];
static _Atomic uint32_t failures;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("IOFAULT_CONTROL");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (at == MAP_FAILED) return;
    control = at;
    control->loaded++;
}

static void pause_us(uint32_t us) {
    struct timespec rest = {us / 1000000, (long)(us % 1000000) * 1000};
    while (syscall(SYS_nanosleep, &rest, &rest) && errno == EINTR) {}
}

static int armed(enum call call) {
    if (!control) return 0;
    for (int i = 0; i < RULES; i++)
        if (control->rules[i].armed && (control->rules[i].calls >> call & 1)) return 1;
    return 0;
}

/* The rule that is due for this call on this path; NULL for none. Delays and hangs are served here. */
static struct rule *due(enum call call, const char *path) {
    struct rule *found = NULL;
    for (int i = 0; i < RULES && !found; i++) {
        struct rule *rule = &control->rules[i];
        if (!rule->armed || !(rule->calls >> call & 1) || fnmatch(rule->pattern, path, 0)) continue;
        uint32_t hit = ++rule->hits;
        if (hit < rule->first || (rule->times && hit >= rule->first + rule->times)) continue;
        rule->fired++;
        found = rule;
    }
    if (found && found->action == DELAY) pause_us(found->delay_us);
    if (found && found->action == HANG) {
        uint32_t armed_as = found->armed;
        found->hanging++;
        while (found->armed == armed_as) pause_us(2000);
        found->hanging--;
    }
    return found && (found->action == ERROR || found->action == SHORT) ? found : NULL;
}

static struct rule *due_fd(enum call call, int fd) {
    char link[40], path[PATH_MAX];
    if (!armed(call)) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return NULL;
    path[length] = 0;
    return due(call, path);
}

static struct rule *due_path(enum call call, int dir, const char *name) {
    char link[40], path[PATH_MAX * 2];
    if (!armed(call)) return NULL;
    if (name[0] == '/') return due(call, name);
    if (dir == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length < 0) return NULL;
    snprintf(path + length, sizeof path - (size_t)length, "/%s", name);
    return due(call, path);
}

/* -- files whose sync has failed */

static int find_failed(uint64_t dev, uint64_t ino) {
    uint32_t count = failures < FAILED ? failures : FAILED;
    for (uint32_t i = 0; i < count; i++)
        if (failed[i].dev == dev && failed[i].ino == ino) return (int)i;
    return -1;
}

static int is_failed(int fd) {
    struct stat found;
    int saved = errno, is = control && failures && !fstat(fd, &found) && find_failed(found.st_dev, found.st_ino) >= 0;
    errno = saved;
    return is;
}

static void note_failed(int fd) {
    struct stat found;
    if (fstat(fd, &found) || S_ISDIR(found.st_mode) || find_failed(found.st_dev, found.st_ino) >= 0) return;
    uint32_t at = failures;
    if (at >= FAILED) return;
    failed[at].dev = found.st_dev;
    failed[at].ino = found.st_ino;
    failures = at + 1;
}

/* Its number may be given to another file now. */
static void forget_failed(int dir, const char *name) {
    struct stat found;
    int saved = errno, at;
    if (control && failures && !fstatat(dir, name, &found, AT_SYMLINK_NOFOLLOW)
        && (at = find_failed(found.st_dev, found.st_ino)) >= 0) failed[at].ino = 0;
    errno = saved;
}

/* -- the calls */

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
#define FAIL_IF(found) do { struct rule *it_ = (found); if (it_) { errno = it_->error; return -1; } } while (0)

static size_t cut(size_t length) {
    if (length >= 8192) return length / 2 & ~(size_t)4095;
    return length >= 1024 ? length / 2 & ~(size_t)511 : length - length / 2;
}

/* The vector cut short: at most its first buffers. Gives how many. */
static int cut_vector(const struct iovec *from, int count, struct iovec *to) {
    int kept = count > 1 ? (count + 1) / 2 : 1;
    if (kept > 64) kept = 64;
    memcpy(to, from, sizeof(struct iovec) * (size_t)kept);
    if (count == 1) to[0].iov_len = cut(from[0].iov_len);
    return kept;
}

#define SCALAR(symbol, kind, buffer, ...)                                                             \
    ssize_t symbol(int fd, buffer data, size_t length __VA_OPT__(, off64_t at)) {                     \
        ssize_t (*real)(int, buffer, size_t __VA_OPT__(, off64_t)) = dlsym(RTLD_NEXT, #symbol);       \
        if ((kind == WRITE || kind == PWRITE) && is_failed(fd)) control->written_after++;             \
        struct rule *rule = due_fd(kind, fd);                                                         \
        if (rule && rule->action == ERROR) { errno = rule->error; return -1; }                        \
        return real(fd, data, rule ? cut(length) : length __VA_OPT__(, at));                          \
    }
#define VECTOR(symbol, kind, more, pass)                                                              \
    ssize_t symbol(int fd, const struct iovec *data, int count, off64_t at more) {                    \
        ssize_t (*real)(int, const struct iovec *, int, off64_t more) = dlsym(RTLD_NEXT, #symbol);    \
        struct iovec part[64];                                                                        \
        if (kind == PWRITE && is_failed(fd)) control->written_after++;                                \
        struct rule *rule = due_fd(kind, fd);                                                         \
        if (rule && rule->action == ERROR) { errno = rule->error; return -1; }                        \
        if (rule && count) { count = cut_vector(data, count, part); data = part; }                    \
        return real(fd, data, count, at pass);                                                        \
    }
#define COMMA_FLAGS , int flags
#define PASS_FLAGS , flags
#define NOTHING

SCALAR(read, READ, void *)
SCALAR(write, WRITE, const void *)
SCALAR(pread, PREAD, void *, at)
SCALAR(pread64, PREAD, void *, at)
SCALAR(pwrite, PWRITE, const void *, at)
SCALAR(pwrite64, PWRITE, const void *, at)
VECTOR(preadv, PREAD, NOTHING, NOTHING)
VECTOR(preadv64, PREAD, NOTHING, NOTHING)
VECTOR(preadv2, PREAD, COMMA_FLAGS, PASS_FLAGS)
VECTOR(preadv64v2, PREAD, COMMA_FLAGS, PASS_FLAGS)
VECTOR(pwritev, PWRITE, NOTHING, NOTHING)
VECTOR(pwritev64, PWRITE, NOTHING, NOTHING)
VECTOR(pwritev2, PWRITE, COMMA_FLAGS, PASS_FLAGS)
VECTOR(pwritev64v2, PWRITE, COMMA_FLAGS, PASS_FLAGS)

static int sync_file(int fd, enum call call, const char *symbol) {
    if (is_failed(fd)) control->synced_again++;
    struct rule *rule = due_fd(call, fd);
    if (rule) {
        if (rule->error != EINTR) note_failed(fd); /* interrupted is not failed */
        errno = rule->error;
        return -1;
    }
    return REAL(int, symbol, int)(fd);
}
int fsync(int fd) { return sync_file(fd, FSYNC, "fsync"); }
int fdatasync(int fd) { return sync_file(fd, FDATASYNC, "fdatasync"); }

#define MODE                                                        \
    mode_t mode = 0;                                                \
    if (flags & (O_CREAT | O_TMPFILE)) {                            \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        mode = (mode_t)va_arg(rest, int);                           \
        va_end(rest);                                               \
    }
#define OPENER(symbol)                                              \
    int symbol(const char *path, int flags, ...) {                  \
        MODE                                                        \
        FAIL_IF(due_path(OPEN, AT_FDCWD, path));                    \
        return REAL(int, #symbol, const char *, int, ...)(path, flags, mode); \
    }
#define OPENER_AT(symbol)                                           \
    int symbol(int dir, const char *path, int flags, ...) {         \
        MODE                                                        \
        FAIL_IF(due_path(OPEN, dir, path));                         \
        return REAL(int, #symbol, int, const char *, int, ...)(dir, path, flags, mode); \
    }
OPENER(open)
OPENER(open64)
OPENER_AT(openat)
OPENER_AT(openat64)

int rename(const char *from, const char *to) {
    FAIL_IF(due_path(RENAME, AT_FDCWD, to));
    forget_failed(AT_FDCWD, to);
    return REAL(int, "rename", const char *, const char *)(from, to);
}
int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    FAIL_IF(due_path(RENAME, to_dir, to));
    forget_failed(to_dir, to);
    return REAL(int, "renameat", int, const char *, int, const char *)(from_dir, from, to_dir, to);
}
int unlink(const char *path) {
    FAIL_IF(due_path(UNLINK, AT_FDCWD, path));
    forget_failed(AT_FDCWD, path);
    return REAL(int, "unlink", const char *)(path);
}
int unlinkat(int dir, const char *path, int flags) {
    FAIL_IF(due_path(UNLINK, dir, path));
    forget_failed(dir, path);
    return REAL(int, "unlinkat", int, const char *, int)(dir, path, flags);
}

#define ALLOCATOR(symbol)                                           \
    int symbol(int fd, off64_t at, off64_t length) {                \
        struct rule *rule = due_fd(FALLOCATE, fd);                  \
        if (rule) return rule->error; /* not by errno */            \
        return REAL(int, #symbol, int, off64_t, off64_t)(fd, at, length); \
    }
ALLOCATOR(posix_fallocate)
ALLOCATOR(posix_fallocate64)

#define TRUNCATER(symbol)                                           \
    int symbol(int fd, off64_t length) {                            \
        FAIL_IF(due_fd(FTRUNCATE, fd));                             \
        return REAL(int, #symbol, int, off64_t)(fd, length);        \
    }
TRUNCATER(ftruncate)
TRUNCATER(ftruncate64)

int accept4(int fd, struct sockaddr *peer, socklen_t *length, int flags) {
    FAIL_IF(due_fd(ACCEPT, fd));
    return REAL(int, "accept4", int, struct sockaddr *, socklen_t *, int)(fd, peer, length, flags);
}

int close(int fd) {
    struct rule *rule = due_fd(CLOSE, fd);
    int result = REAL(int, "close", int)(fd); /* the descriptor is gone, whatever close says */
    if (rule) {
        errno = rule->error;
        return -1;
    }
    return result;
}
