/* A disk that can lose power, put under a process with LD_PRELOAD.
 *
 * Calls that change files or directories below DISK_LAYER_ROOT are carried out as they are, but for fsync and fdatasync:
 * those only take a while. Each is written to a log (DISK_LAYER_LOG) once it was done: what was written where, and
 * where a sync began and ended. tests/disk/image.py reads the log and makes of it what a disk could hold after a loss of
 * power. The log is complete when the process gets SIGKILL, because it goes straight to the kernel.
 *
 * A control file (DISK_LAYER_CONTROL) shared with the test schedules faults: see `struct control`. Calls that this layer
 * does not know how to follow (a writable shared mapping of anything but SQLite's -shm, fallocate with an odd mode, ...) end
 * the process with a word on stderr, rather than being missed.
 *
 * SQLite's -shm is left out: it is no more than an index of the log beside it, and is made anew from that.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* As tests/disk/layer.py has it. Countdowns: 0 is off, 1 is the next one. They count calls on files whose path contains
 * `match`. */
struct control {
    int64_t cut_in;        /* kill -9 before the n-th call that changes something */
    int64_t eio_sync_in;   /* the n-th sync fails with EIO; what it should have written is never written again */
    int64_t eio_write_in;  /* the n-th write fails with EIO */
    int64_t room_bytes;    /* files may grow by as much; then ENOSPC. -1: no bound */
    int64_t sync_delay_us; /* a sync takes up to as long */
    int64_t calls, syncs, faults, cuts; /* written by the layer */
    char match[64];
};

enum { CREATE = 1, WRITE, TRUNCATE, SYNC_BEGIN, SYNC_END, SYNC_FAILED, UNLINK, RENAME, LINK };

struct record {
    uint32_t magic, op;
    uint64_t inode, a, b;
    uint32_t length1, length2; /* of the bytes that follow */
};

#define FDS 65536
static struct tracked { char *path; uint64_t inode; } fds[FDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static struct control *control;
static int witness; /* DISK_LAYER_WITNESS: this process's calls count, but the faults are for others */
static uint64_t sync_number;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

static void give_up(const char *what, const char *path) {
    dprintf(2, "disk layer: can't follow %s of %s\n", what, path);
    abort();
}

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("DISK_LAYER_ROOT"), *log = getenv("DISK_LAYER_LOG"), *shared = getenv("DISK_LAYER_CONTROL");
    if (!where || !log || !shared) return;
    int fd = REAL(open)(shared, O_RDWR | O_CLOEXEC);
    if (fd < 0) give_up("the opening", shared);
    control = REAL(mmap)(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REAL(close)(fd);
    log_fd = REAL(open)(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (log_fd < 0 || control == MAP_FAILED) give_up("the opening", log);
    witness = getenv("DISK_LAYER_WITNESS") != NULL;
    strncpy(root, where, sizeof root - 1);
    root_length = strlen(root);
}

/* The absolute path, if it is one of ours; NULL otherwise. */
static char *ours(int directory, const char *path) {
    char whole[2 * PATH_MAX];
    if (!root_length || !path) return NULL;
    if (path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        char base[PATH_MAX], link[64];
        ssize_t n;
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        if ((n = readlink(link, base, sizeof base - 1)) < 0) return NULL;
        base[n] = 0;
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    size_t length = strlen(whole);
    if (strncmp(whole, root, root_length) || (whole[root_length] != '/' && whole[root_length])) return NULL;
    if (length > 4 && !strcmp(whole + length - 4, "-shm")) return NULL;
    while (length > root_length + 1 && whole[length - 1] == '/') whole[--length] = 0;
    return strdup(whole);
}

static uint64_t inode_of(const char *path) {
    struct stat status;
    return lstat(path, &status) ? 0 : status.st_ino;
}

static uint64_t parent_of(const char *path, const char **name) {
    char parent[PATH_MAX];
    *name = strrchr(path, '/') + 1;
    snprintf(parent, sizeof parent, "%.*s", (int)(*name - 1 - path), path);
    return inode_of(parent);
}

static void tell(uint32_t op, uint64_t inode, uint64_t a, uint64_t b, const void *one, size_t n1, const void *two, size_t n2) {
    struct record head = {0x4b534944, op, inode, a, b, n1, n2};
    struct iovec parts[3] = {{&head, sizeof head}, {(void *)one, n1}, {(void *)two, n2}};
    ssize_t length = sizeof head + n1 + n2;
    if (REAL(writev)(log_fd, parts, 3) != length) give_up("the log", "itself");
}

static int due(int64_t *countdown, const char *path) {
    if (witness || *countdown <= 0 || !strstr(path, control->match)) return 0;
    return --*countdown == 0;
}

/* Every call that changes something begins here, with the lock held. */
static void enter(const char *path) {
    pthread_mutex_lock(&lock);
    control->calls += !witness;
    if (due(&control->cut_in, path)) {
        control->cuts++;
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
}

static int leave_with(int error) {
    pthread_mutex_unlock(&lock);
    errno = error;
    return -1;
}

static struct tracked *tracked(int fd) { return fd >= 0 && fd < FDS && fds[fd].path ? &fds[fd] : NULL; }

static void track(int fd, char *path) {
    if (fd < 0 || fd >= FDS) give_up("the descriptor", path);
    free(fds[fd].path);
    fds[fd].path = path;
    fds[fd].inode = inode_of(path);
}

/* --- names ------------------------------------------------------------------------------------------------------- */

static int open_ours(int directory, char *path, int flags, mode_t mode) {
    if ((flags & O_TMPFILE) == O_TMPFILE) { /* a file system that has no unnamed files */
        free(path);
        errno = EOPNOTSUPP;
        return -1;
    }
    enter(path);
    int existed = inode_of(path) != 0;
    if (!witness && !existed && (flags & O_CREAT) && control->room_bytes == 0 && strstr(path, control->match)) {
        free(path);
        control->faults++;
        return leave_with(ENOSPC);
    }
    int fd = REAL(openat)(directory, path, flags, mode), error = errno;
    if (fd >= 0) {
        const char *name;
        uint64_t parent = parent_of(path, &name);
        track(fd, path);
        if (!existed) tell(CREATE, fds[fd].inode, parent, 0, name, strlen(name), NULL, 0);
        else if (flags & O_TRUNC) tell(TRUNCATE, fds[fd].inode, 0, 0, NULL, 0, NULL, 0);
    } else {
        free(path);
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

static int open_any(int directory, const char *path, int flags, mode_t mode) {
    char *mine = ours(directory, path);
    return mine ? open_ours(directory, mine, flags, mode) : REAL(openat)(directory, path, flags, mode);
}

#define MODE_OF(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags) return open_any(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return open_any(AT_FDCWD, path, flags, mode); }
int openat(int directory, const char *path, int flags, ...) { MODE_OF(flags) return open_any(directory, path, flags, mode); }
int openat64(int directory, const char *path, int flags, ...) { MODE_OF(flags) return open_any(directory, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open_any(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

int close(int fd) {
    if (!tracked(fd)) return REAL(close)(fd);
    pthread_mutex_lock(&lock);
    if (tracked(fd)) {
        free(fds[fd].path);
        fds[fd].path = NULL;
    }
    int result = REAL(close)(fd), error = errno;
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

static int copied(int from, int to) {
    struct tracked *file = tracked(from);
    if (to >= 0 && file) track(to, strdup(file->path));
    return to;
}

int dup(int fd) { return copied(fd, REAL(dup)(fd)); }
int dup2(int fd, int to) { return copied(fd, REAL(dup2)(fd, to)); }
int dup3(int fd, int to, int flags) { return copied(fd, REAL(dup3)(fd, to, flags)); }

int mkdirat(int directory, const char *path, mode_t mode) {
    char *mine = ours(directory, path);
    if (!mine) return REAL(mkdirat)(directory, path, mode);
    enter(mine);
    int result = REAL(mkdirat)(directory, path, mode), error = errno;
    if (!result) {
        const char *name;
        uint64_t parent = parent_of(mine, &name);
        tell(CREATE, inode_of(mine), parent, 1, name, strlen(name), NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    free(mine);
    errno = error;
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int directory, const char *path, int flags) {
    char *mine = ours(directory, path);
    if (!mine) return REAL(unlinkat)(directory, path, flags);
    enter(mine);
    const char *name;
    struct stat status;
    uint64_t parent = parent_of(mine, &name);
    int64_t freed = !lstat(mine, &status) && status.st_nlink == 1 ? status.st_size : 0;
    int result = REAL(unlinkat)(directory, path, flags), error = errno;
    if (!result) {
        tell(UNLINK, 0, parent, 0, name, strlen(name), NULL, 0);
        if (control->room_bytes >= 0) control->room_bytes += freed;
    }
    pthread_mutex_unlock(&lock);
    free(mine);
    errno = error;
    return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    char *mine = ours(AT_FDCWD, path);
    if (mine) give_up("remove", mine);
    return REAL(remove)(path);
}

int renameat2(int directory1, const char *from, int directory2, const char *to, unsigned flags) {
    char *mine1 = ours(directory1, from), *mine2 = ours(directory2, to);
    if (!mine1 && !mine2) return REAL(renameat2)(directory1, from, directory2, to, flags);
    if (!mine1 || !mine2 || (flags & ~(unsigned)RENAME_NOREPLACE)) give_up("the renaming", from);
    enter(mine1);
    int result = REAL(renameat2)(directory1, from, directory2, to, flags), error = errno;
    if (!result) {
        const char *name1, *name2;
        uint64_t parent1 = parent_of(mine1, &name1), parent2 = parent_of(mine2, &name2);
        tell(RENAME, inode_of(mine2), parent1, parent2, name1, strlen(name1), name2, strlen(name2));
    }
    pthread_mutex_unlock(&lock);
    free(mine1);
    free(mine2);
    errno = error;
    return result;
}
int renameat(int directory1, const char *from, int directory2, const char *to) { return renameat2(directory1, from, directory2, to, 0); }
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int directory1, const char *from, int directory2, const char *to, int flags) {
    char *mine = ours(directory2, to);
    if (!mine) return REAL(linkat)(directory1, from, directory2, to, flags);
    enter(mine);
    int result = REAL(linkat)(directory1, from, directory2, to, flags), error = errno;
    if (!result) {
        const char *name;
        uint64_t parent = parent_of(mine, &name);
        tell(LINK, inode_of(mine), parent, 0, name, strlen(name), NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    free(mine);
    errno = error;
    return result;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int symlink(const char *from, const char *to) {
    char *mine = ours(AT_FDCWD, to);
    if (mine) give_up("symlink", mine);
    return REAL(symlink)(from, to);
}

/* --- contents ---------------------------------------------------------------------------------------------------- */

/* How much of a write there is room for; 0 with errno: a fault is due. */
static size_t allowed(const struct tracked *file, int fd, size_t size, off_t offset) {
    struct stat status;
    if (due(&control->eio_write_in, file->path)) {
        control->faults++;
        errno = EIO;
        return 0;
    }
    if (witness || control->room_bytes < 0 || !strstr(file->path, control->match)) return size;
    if (fstat(fd, &status)) abort();
    int64_t growth = offset + (int64_t)size - status.st_size;
    if (growth <= 0) return size;
    if (growth > control->room_bytes) {
        size -= growth - control->room_bytes; /* a short write first, as disks do */
        growth = control->room_bytes;
        if ((ssize_t)size <= 0) {
            control->faults++;
            errno = ENOSPC;
            return 0;
        }
    }
    control->room_bytes -= growth;
    return size;
}

static ssize_t write_ours(int fd, const void *data, size_t size, off_t offset, int at_offset) {
    const struct tracked *file = &fds[fd];
    enter(file->path);
    int append = !at_offset && (fcntl(fd, F_GETFL) & O_APPEND);
    if (!at_offset) offset = lseek(fd, 0, append ? SEEK_END : SEEK_CUR);
    ssize_t written = 0;
    if (size && !(size = allowed(file, fd, size, offset))) return leave_with(errno);
    written = at_offset ? REAL(pwrite)(fd, data, size, offset) : REAL(write)(fd, data, size);
    int error = errno;
    if (written > 0) tell(WRITE, file->inode, offset, 0, data, written, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return written;
}

ssize_t write(int fd, const void *data, size_t size) {
    return tracked(fd) ? write_ours(fd, data, size, 0, 0) : REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    return tracked(fd) ? write_ours(fd, data, size, offset, 1) : REAL(pwrite)(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }

/* Vectors: the first part that is not empty, as a short write. Callers have to go on from there anyway. */
static ssize_t writev_ours(int fd, const struct iovec *parts, int count, off_t offset, int at_offset) {
    while (count > 1 && !parts->iov_len) parts++, count--;
    return write_ours(fd, parts->iov_base, parts->iov_len, offset, at_offset);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return tracked(fd) && count > 0 ? writev_ours(fd, parts, count, 0, 0) : REAL(writev)(fd, parts, count);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return tracked(fd) && count > 0 ? writev_ours(fd, parts, count, offset, 1) : REAL(pwritev)(fd, parts, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) { return pwritev(fd, parts, count, offset); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    if (!tracked(fd)) return REAL(pwritev2)(fd, parts, count, offset, flags);
    return offset == -1 ? writev(fd, parts, count) : pwritev(fd, parts, count, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    return pwritev2(fd, parts, count, offset, flags);
}

int ftruncate(int fd, off_t size) {
    struct tracked *file = tracked(fd);
    if (!file) return REAL(ftruncate)(fd, size);
    enter(file->path);
    struct stat status;
    if (fstat(fd, &status)) abort();
    int result = REAL(ftruncate)(fd, size), error = errno;
    if (!result) {
        tell(TRUNCATE, file->inode, size, 0, NULL, 0, NULL, 0);
        if (control->room_bytes >= 0 && size < status.st_size) control->room_bytes += status.st_size - size;
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int truncate(const char *path, off_t size) {
    char *mine = ours(AT_FDCWD, path);
    if (mine) give_up("truncate", mine);
    return REAL(truncate)(path, size);
}
int truncate64(const char *path, off_t size) { return truncate(path, size); }

int fallocate(int fd, int mode, off_t offset, off_t size) {
    struct tracked *file = tracked(fd);
    if (!file) return REAL(fallocate)(fd, mode, offset, size);
    if (mode) give_up("fallocate with another mode", file->path);
    struct stat status;
    if (fstat(fd, &status)) abort();
    if (offset + size <= status.st_size) return 0;
    if (!witness && control->room_bytes >= 0 && strstr(file->path, control->match)) {
        if (offset + size - status.st_size > control->room_bytes) {
            control->faults++;
            errno = ENOSPC;
            return -1;
        }
        control->room_bytes -= offset + size - status.st_size;
    }
    return ftruncate(fd, offset + size);
}
int fallocate64(int fd, int mode, off_t offset, off_t size) { return fallocate(fd, mode, offset, size); }
int posix_fallocate(int fd, off_t offset, off_t size) {
    if (!tracked(fd)) return REAL(posix_fallocate)(fd, offset, size);
    return fallocate(fd, 0, offset, size) ? errno : 0;
}
int posix_fallocate64(int fd, off_t offset, off_t size) { return posix_fallocate(fd, offset, size); }

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    if ((flags & MAP_SHARED) && (protection & PROT_WRITE) && !(flags & MAP_ANONYMOUS) && tracked(fd))
        give_up("a writable shared mapping", fds[fd].path);
    return REAL(mmap)(address, size, protection, flags, fd, offset);
}
void *mmap64(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap(address, size, protection, flags, fd, offset);
}
ssize_t copy_file_range(int from, off_t *at1, int to, off_t *at2, size_t size, unsigned flags) {
    if (tracked(to)) give_up("copy_file_range", fds[to].path);
    return REAL(copy_file_range)(from, at1, to, at2, size, flags);
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    if (tracked(to)) give_up("sendfile", fds[to].path);
    return REAL(sendfile)(to, from, offset, size);
}
ssize_t sendfile64(int to, int from, off_t *offset, size_t size) { return sendfile(to, from, offset, size); }
ssize_t splice(int from, off_t *at1, int to, off_t *at2, size_t size, unsigned flags) {
    if (tracked(to)) give_up("splice", fds[to].path);
    return REAL(splice)(from, at1, to, at2, size, flags);
}

/* --- syncs ------------------------------------------------------------------------------------------------------- */

static int sync_ours(int fd) {
    static __thread unsigned dice;
    uint64_t inode = fds[fd].inode;
    enter(fds[fd].path);
    control->syncs += !witness;
    uint64_t number = ((uint64_t)getpid() << 32) + ++sync_number;
    if (due(&control->eio_sync_in, fds[fd].path)) {
        control->faults++;
        tell(SYNC_FAILED, inode, number, 0, NULL, 0, NULL, 0);
        return leave_with(EIO);
    }
    tell(SYNC_BEGIN, inode, number, 0, NULL, 0, NULL, 0);
    int64_t delay_us = control->sync_delay_us;
    pthread_mutex_unlock(&lock);
    if (!dice) dice = number ^ (unsigned)(uintptr_t)&dice;
    if (delay_us > 0) usleep(rand_r(&dice) % delay_us);
    pthread_mutex_lock(&lock);
    tell(SYNC_END, inode, number, 0, NULL, 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    return 0;
}
int fsync(int fd) { return tracked(fd) ? sync_ours(fd) : REAL(fsync)(fd); }
int fdatasync(int fd) { return tracked(fd) ? sync_ours(fd) : REAL(fdatasync)(fd); }
int sync_file_range(int fd, off_t offset, off_t size, unsigned flags) {
    if (tracked(fd)) give_up("sync_file_range", fds[fd].path);
    return REAL(sync_file_range)(fd, offset, size, flags);
}
