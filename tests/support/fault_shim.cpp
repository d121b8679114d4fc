// Faults for storage tests: preloaded, it makes reads and writes of certain files go wrong.
//
//   FAULT_PATH   files whose path contains this text
//   FAULT_AFTER  number of calls on them that still go through
//   FAULT_MODE   short: at most 1000 bytes a call    eof: nothing is moved any more
//                eio, enospc: the errno              hang: never returns
//                eintr, eagain: every second call fails with that errno
//
// The variables may change while the process runs; fault_reset() starts the count anew. posix_fallocate fails with mode
// enospc only.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

namespace {

constexpr size_t kShortNbytes = 1000;

enum class Fate { kThrough, kShort, kNothing, kError };

bool concerns(int fd) {
    const char* wanted = getenv("FAULT_PATH");
    if (!wanted) return false;
    char link[64];
    char path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return false;
    path[length] = 0;
    return strstr(path, wanted) != nullptr;
}

std::atomic<long> calls{0};

// What happens to this call; sets errno for kError.
Fate fate(int fd) {
    if (!concerns(fd)) return Fate::kThrough;
    const char* after = getenv("FAULT_AFTER");
    const long beyond = calls++ - (after ? atol(after) : 0);
    const char* mode = getenv("FAULT_MODE");
    if (beyond < 0 || !mode) return Fate::kThrough;
    if (!strcmp(mode, "short")) return Fate::kShort;
    if (!strcmp(mode, "eof")) return Fate::kNothing;
    if (!strcmp(mode, "hang")) {
        for (;;) pause();
    }
    const bool passing = !strcmp(mode, "eintr") || !strcmp(mode, "eagain");
    if (passing && beyond % 2) return Fate::kThrough;
    errno = !strcmp(mode, "enospc") ? ENOSPC : !strcmp(mode, "eintr") ? EINTR : !strcmp(mode, "eagain") ? EAGAIN : EIO;
    return Fate::kError;
}

size_t at_most(Fate what, size_t nbytes) {
    return what == Fate::kShort && nbytes > kShortNbytes ? kShortNbytes : nbytes;
}

template <class Function>
Function real(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

using Read = ssize_t (*)(int, void*, size_t, off_t);
using Write = ssize_t (*)(int, const void*, size_t, off_t);

ssize_t faulty_read(int fd, void* buffer, size_t nbytes, off_t offset) {
    static const Read through = real<Read>("pread");
    const Fate what = fate(fd);
    if (what == Fate::kNothing) return 0;
    if (what == Fate::kError) return -1;
    const size_t allowed = at_most(what, nbytes);
    const ssize_t moved = through(fd, buffer, allowed, offset);
    // O_DIRECT refuses the cut length: the cut is then made afterwards.
    if (moved >= 0 || allowed == nbytes || errno != EINVAL) return moved;
    const ssize_t whole = through(fd, buffer, nbytes, offset);
    return whole > static_cast<ssize_t>(allowed) ? static_cast<ssize_t>(allowed) : whole;
}

ssize_t faulty_write(int fd, const void* buffer, size_t nbytes, off_t offset) {
    static const Write through = real<Write>("pwrite");
    const Fate what = fate(fd);
    if (what == Fate::kNothing) return 0;
    if (what == Fate::kError) return -1;
    const size_t allowed = at_most(what, nbytes);
    const ssize_t moved = through(fd, buffer, allowed, offset);
    if (moved >= 0 || allowed == nbytes || errno != EINVAL) return moved;
    const ssize_t whole = through(fd, buffer, nbytes, offset);
    return whole > static_cast<ssize_t>(allowed) ? static_cast<ssize_t>(allowed) : whole;
}

int faulty_fallocate(int fd, off_t offset, off_t nbytes) {
    static const auto through = real<int (*)(int, off_t, off_t)>("posix_fallocate");
    const char* mode = getenv("FAULT_MODE");
    if (mode && !strcmp(mode, "enospc") && concerns(fd)) return ENOSPC;
    return through(fd, offset, nbytes);
}

}  // namespace

extern "C" {

void fault_reset() { calls = 0; }

ssize_t pread(int fd, void* buffer, size_t nbytes, off_t offset) { return faulty_read(fd, buffer, nbytes, offset); }
ssize_t pread64(int fd, void* buffer, size_t nbytes, off_t offset) { return faulty_read(fd, buffer, nbytes, offset); }
ssize_t pwrite(int fd, const void* buffer, size_t nbytes, off_t offset) {
    return faulty_write(fd, buffer, nbytes, offset);
}
ssize_t pwrite64(int fd, const void* buffer, size_t nbytes, off_t offset) {
    return faulty_write(fd, buffer, nbytes, offset);
}

// The twin passes one buffer a call: the vector calls serve the first.
ssize_t preadv(int fd, const iovec* parts, int, off_t offset) {
    return faulty_read(fd, parts->iov_base, parts->iov_len, offset);
}
ssize_t preadv64(int fd, const iovec* parts, int count, off_t offset) { return preadv(fd, parts, count, offset); }
ssize_t preadv2(int fd, const iovec* parts, int count, off_t offset, int) { return preadv(fd, parts, count, offset); }
ssize_t preadv64v2(int fd, const iovec* parts, int count, off_t offset, int) {
    return preadv(fd, parts, count, offset);
}
ssize_t pwritev(int fd, const iovec* parts, int, off_t offset) {
    return faulty_write(fd, parts->iov_base, parts->iov_len, offset);
}
ssize_t pwritev64(int fd, const iovec* parts, int count, off_t offset) { return pwritev(fd, parts, count, offset); }
ssize_t pwritev2(int fd, const iovec* parts, int count, off_t offset, int) { return pwritev(fd, parts, count, offset); }
ssize_t pwritev64v2(int fd, const iovec* parts, int count, off_t offset, int) {
    return pwritev(fd, parts, count, offset);
}

int posix_fallocate(int fd, off_t offset, off_t nbytes) { return faulty_fallocate(fd, offset, nbytes); }
int posix_fallocate64(int fd, off_t offset, off_t nbytes) { return faulty_fallocate(fd, offset, nbytes); }

}  // extern "C"
