// System calls that go wrong on demand. The linker sends the library's calls here (--wrap).
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <mutex>

enum class Fault {
    kNone,
    // Less is moved than was asked for, and signals and a busy kernel come in between.
    kRough,
    // Calls of pread and pwrite do not return until they are let go; the kernel's queues lose what they are given.
    kHangs,
};

class Faults {
  public:
    static void set(Fault fault) {
        std::lock_guard<std::mutex> lock(mutex_);
        fault_ = fault;
        changed_.notify_all();
    }
    // How many calls met the fault that is set.
    static int met() { return met_; }

    static bool hangs() {
        if (fault_ != Fault::kHangs) return false;
        ++met_;
        return true;
    }
    static void hang_here() {
        if (!hangs()) return;
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [] { return fault_ != Fault::kHangs; });
    }
    // 0, or the errno of this call: every third is interrupted, every fifth meets a busy kernel.
    static int rough() {
        if (fault_ != Fault::kRough) return 0;
        const int call = ++met_;
        return call % 3 == 0 ? EINTR : call % 5 == 0 ? EAGAIN : 0;
    }
    static size_t shortened(size_t nbytes) { return fault_ == Fault::kRough && nbytes > 4096 ? nbytes / 2 : nbytes; }

  private:
    static inline std::mutex mutex_;
    static inline std::condition_variable changed_;
    static inline std::atomic<Fault> fault_{Fault::kNone};
    static inline std::atomic<int> met_{0};
};

extern "C" {
ssize_t __real_pread(int fd, void* at, size_t nbytes, off_t offset);
ssize_t __real_pwrite(int fd, const void* at, size_t nbytes, off_t offset);
long __real_syscall(long number, ...);

ssize_t __wrap_pread(int fd, void* at, size_t nbytes, off_t offset) {
    Faults::hang_here();
    errno = Faults::rough();
    return errno ? -1 : __real_pread(fd, at, Faults::shortened(nbytes), offset);
}

ssize_t __wrap_pwrite(int fd, const void* at, size_t nbytes, off_t offset) {
    Faults::hang_here();
    errno = Faults::rough();
    return errno ? -1 : __real_pwrite(fd, at, Faults::shortened(nbytes), offset);
}

long __wrap_syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long words[6];
    for (long& word : words) word = va_arg(list, long);
    va_end(list);
    const bool begins = number == __NR_io_submit || number == __NR_io_uring_enter;
    // The second argument is the number of transfers that are to begin.
    if (begins && Faults::hangs()) return words[1];
    errno = begins ? Faults::rough() : 0;
    return errno ? -1 : __real_syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
}
