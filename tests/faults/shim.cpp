// Preloaded into a process that is to meet a bad day: a disk that hangs, and a clock that somebody sets.
//
// FAULT_HANG=TEXT: a write to a file whose path has TEXT in it does not return, except, as a real one on a network
// file system, when a signal comes; it says so on standard error. FAULT_HANG_ONLY=KIND makes it one of write, fsync, pwritev, preadv.
// FAULT_ERROR=NUMBER, FAULT_ERROR_IN=TEXT: pwritev and preadv of a file whose path has TEXT in it end with that errno.
// FAULT_CLOCK=1: every look at the wall clock finds it years before or after the last one.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

template <typename F>
F next(const char* name) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

bool in_path(int fd, const char* text) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return false;
    path[length] = 0;
    return strstr(path, text) != nullptr;
}

bool hangs(int fd, const char* kind) {
    const char* text = getenv("FAULT_HANG");
    if (text == nullptr) return false;
    const char* only = getenv("FAULT_HANG_ONLY");
    return (only == nullptr || strcmp(only, kind) == 0) && in_path(fd, text);
}

bool errs(int fd) {
    const char *number = getenv("FAULT_ERROR"), *text = getenv("FAULT_ERROR_IN");
    if (number == nullptr || text == nullptr || !in_path(fd, text)) return false;
    errno = atoi(number);
    return true;
}

int hang() {
    const char said[] = "the disk hangs\n";
    next<ssize_t (*)(int, const void*, size_t)>("write")(STDERR_FILENO, said, sizeof said - 1);
    pause();
    errno = EINTR;
    return -1;
}

time_t jump() {
    static unsigned looks = 0;
    const time_t year = 365 * 86400;
    return (++looks % 3 == 0 ? 20 : looks % 3 == 1 ? -20 : 0) * year;
}

}  // namespace

extern "C" ssize_t write(int fd, const void* data, size_t size) {
    if (hangs(fd, "write")) return hang();
    return next<ssize_t (*)(int, const void*, size_t)>("write")(fd, data, size);
}

// As the disk tier moves its tiles, in threads to which no signal comes.
extern "C" ssize_t pwritev(int fd, const iovec* parts, int count, off_t offset) {
    while (hangs(fd, "pwritev")) hang();
    if (errs(fd)) return -1;
    return next<ssize_t (*)(int, const iovec*, int, off_t)>("pwritev")(fd, parts, count, offset);
}

extern "C" ssize_t preadv(int fd, const iovec* parts, int count, off_t offset) {
    while (hangs(fd, "preadv")) hang();
    if (errs(fd)) return -1;
    return next<ssize_t (*)(int, const iovec*, int, off_t)>("preadv")(fd, parts, count, offset);
}

extern "C" int fsync(int fd) {
    if (hangs(fd, "fsync")) return hang();
    return next<int (*)(int)>("fsync")(fd);
}

extern "C" int clock_gettime(clockid_t which, timespec* out) {
    const int status = next<int (*)(clockid_t, timespec*)>("clock_gettime")(which, out);
    if (which == CLOCK_REALTIME && getenv("FAULT_CLOCK") != nullptr) out->tv_sec += jump();
    return status;
}

extern "C" time_t time(time_t* out) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != nullptr) *out = now.tv_sec;
    return now.tv_sec;
}
