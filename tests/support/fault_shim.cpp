// Faults for storage tests: preloaded, it makes reads and writes of certain files go wrong.
//
//   FAULT_PATH   files whose path contains this text
//   FAULT_AFTER  number of calls on them that still go through
//   FAULT_MODE   short: at most 1000 bytes a call    eof: nothing is moved any more
//                eio, enospc: the errno              hang: never returns
//                eintr, eagain: every second call fails with that errno
//                ragged: as short
//
// The variables may change while the process runs; fault_reset() starts the count anew. posix_fallocate fails with mode
// enospc only.
//
// Queues in the kernel: the test build of the I/O library (-DINFINITY_AIO_FAULTS) asks here for the result of every
// completion, which counts as a call; mode short then leaves whole sectors, ragged does not. The system calls of these
// queues fail every second time in modes eintr and eagain, and take one transfer a call in mode short.

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
#include <stdarg.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

namespace {

constexpr size_t kShortNbytes = 1000;
constexpr int64_t kSectorsNbytes = 4096;

enum class Fate { kThrough, kShort, kNothing, kError, kHang };

bool mode_is(const char* name) {
    const char* mode = getenv("FAULT_MODE");
    return mode && !strcmp(mode, name);
}

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
    if (beyond < 0 || !getenv("FAULT_MODE")) return Fate::kThrough;
    if (mode_is("short") || mode_is("ragged")) return Fate::kShort;
    if (mode_is("eof")) return Fate::kNothing;
    if (mode_is("hang")) return Fate::kHang;
    if ((mode_is("eintr") || mode_is("eagain")) && beyond % 2) return Fate::kThrough;
    errno = mode_is("enospc") ? ENOSPC : mode_is("eintr") ? EINTR : mode_is("eagain") ? EAGAIN : EIO;
    return Fate::kError;
}

void hang() {
    for (;;) pause();
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
    if (what == Fate::kHang) hang();
    if (what == Fate::kNothing) return 0;
    if (what == Fate::kError) return -1;
    const size_t allowed = at_most(what, nbytes);
    const ssize_t moved = through(fd, buffer, allowed, offset);
    // O_DIRECT refuses the cut length: the cut is then made afterwards.
    if (moved >= 0 || allowed == nbytes || errno != EINVAL) return moved;
    const ssize_t whole = through(fd, buffer, nbytes, offset);
    if (whole <= static_cast<ssize_t>(allowed)) return whole;
    memset(static_cast<char*>(buffer) + allowed, 0, static_cast<size_t>(whole) - allowed);
    return static_cast<ssize_t>(allowed);
}

ssize_t faulty_write(int fd, const void* buffer, size_t nbytes, off_t offset) {
    static const Write through = real<Write>("pwrite");
    const Fate what = fate(fd);
    if (what == Fate::kHang) hang();
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
    if (mode_is("enospc") && concerns(fd)) return ENOSPC;
    return through(fd, offset, nbytes);
}

// Whether this system call of a kernel queue fails; sets errno.
bool fails(long number) {
    static std::atomic<long> count{0};
    const bool submits = number == SYS_io_uring_enter || number == SYS_io_submit;
    if (!submits && number != SYS_io_getevents) return false;
    errno = mode_is("eintr") ? EINTR : EAGAIN;
    return (mode_is("eintr") || (submits && mode_is("eagain"))) && count++ % 2 == 0;
}

}  // namespace

extern "C" {

void fault_reset() { calls = 0; }

// What the test build of the I/O library takes for the result of a completion; INT64_MIN: it never came.
int64_t infinity_aio_fault(int fd, int64_t result) {
    const int64_t allowed = mode_is("ragged") ? static_cast<int64_t>(kShortNbytes) : kSectorsNbytes;
    switch (fate(fd)) {
        case Fate::kThrough: return result;
        case Fate::kShort: return result > allowed ? allowed : result;
        case Fate::kNothing: return 0;
        case Fate::kError: return -errno;
        case Fate::kHang: return INT64_MIN;
    }
    return result;
}

long syscall(long number, ...) {
    static const auto through = real<long (*)(long, ...)>("syscall");
    va_list list;
    va_start(list, number);
    long words[6];
    for (long& word : words) word = va_arg(list, long);
    va_end(list);
    if (fails(number)) return -1;
    // Of io_uring_enter and io_submit the second argument is the number of transfers.
    const bool submits = number == SYS_io_uring_enter || number == SYS_io_submit;
    if (submits && mode_is("short") && words[1] > 1) words[1] = 1;
    return through(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

ssize_t pread(int fd, void* buffer, size_t nbytes, off_t offset) { return faulty_read(fd, buffer, nbytes, offset); }
ssize_t pread64(int fd, void* buffer, size_t nbytes, off_t offset) { return faulty_read(fd, buffer, nbytes, offset); }
ssize_t pwrite(int fd, const void* buffer, size_t nbytes, off_t offset) {
    return faulty_write(fd, buffer, nbytes, offset);
}
ssize_t pwrite64(int fd, const void* buffer, size_t nbytes, off_t offset) {
    return faulty_write(fd, buffer, nbytes, offset);
}

// The Python fallback passes one buffer a call, so the vector calls serve only the first.
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
