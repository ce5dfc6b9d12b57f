// Preloaded into a process whose disk is to have a bad day: fault(KIND) says how, until fault("").
//
// short: a call moves 4096 bytes at most. odd: 5000, or what is left. interrupted: every second call is, by a signal.
// eio, enospc: every call after the next fails. lost: writes say that they were done. threads: no thread starts.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

namespace {

std::string kind;
std::atomic<int> calls;

template <typename F>
F next(const char* name) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

using Move = ssize_t (*)(int, const iovec*, int, off_t);

ssize_t at_most(size_t limit, Move move, int file, const iovec* parts, int count, off_t offset) {
    std::vector<iovec> some;
    for (int i = 0; i < count && limit; ++i) {
        some.push_back({parts[i].iov_base, std::min(parts[i].iov_len, limit)});
        limit -= some.back().iov_len;
    }
    return move(file, some.data(), static_cast<int>(some.size()), offset);
}

ssize_t moved(bool write, int file, const iovec* parts, int count, off_t offset) {
    const Move move = next<Move>(write ? "pwritev" : "preadv");
    const int call = calls++;
    if (kind == "short") return at_most(4096, move, file, parts, count, offset);
    if (kind == "odd") {  // all of it, and told that it was less: direct I/O moves no parts of a page
        const ssize_t got = move(file, parts, count, offset);
        return got > 5000 ? 5000 : got;
    }
    if (kind == "interrupted" && call % 2 == 0) return errno = EINTR, -1;
    if (kind == "eio" && call > 0) return errno = EIO, -1;
    if (kind == "enospc" && call > 0) return errno = ENOSPC, -1;
    if (kind == "lost" && write) {
        ssize_t all = 0;
        for (int i = 0; i < count; ++i) all += static_cast<ssize_t>(parts[i].iov_len);
        return all;
    }
    return move(file, parts, count, offset);
}

}  // namespace

extern "C" void fault(const char* which) {
    kind = which;
    calls = 0;
}

extern "C" ssize_t preadv(int file, const iovec* parts, int count, off_t offset) {
    return moved(false, file, parts, count, offset);
}
extern "C" ssize_t preadv64v2(int file, const iovec* parts, int count, off_t offset, int) {  // what Python calls
    return moved(false, file, parts, count, offset);
}
extern "C" ssize_t pwritev(int file, const iovec* parts, int count, off_t offset) {
    return moved(true, file, parts, count, offset);
}
extern "C" ssize_t pwritev64v2(int file, const iovec* parts, int count, off_t offset, int) {  // what Python calls
    return moved(true, file, parts, count, offset);
}
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* own) {
    if (kind == "threads") return EAGAIN;
    return next<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create")(
        thread, attributes, body, own);
}
