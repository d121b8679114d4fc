// A queue inside the kernel: reads and writes of aligned blocks are begun many at a time and end on their own.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>
#include <vector>

namespace infinity::aio {

// An owned descriptor.
class Fd {
  public:
    // Throws std::system_error with errno where `fd` is negative.
    explicit Fd(int fd) : fd_(fd) {
        if (fd < 0) throw std::system_error(errno, std::generic_category());
    }
    ~Fd() { ::close(fd_); }
    Fd(const Fd&) = delete;
    Fd& operator=(const Fd&) = delete;

    int get() const { return fd_; }

  private:
    const int fd_;
};

struct Transfer {
    bool write;
    int fd;
    // The number of `fd` among the registered files, or -1.
    int32_t registered;
    char* at;
    uint64_t nbytes;
    int64_t offset;
};

struct Completion {
    // The number that the transfer was begun with.
    uint64_t slot;
    // Bytes, or -errno.
    int64_t result;
};

// How many of `staged` transfers, of which the largest has `nbytes_max`, one system call begins. Of more than two the
// kernel merges neighbours: that saves work where they are small, but large blocks would become pieces of several MiB,
// which drives serve more slowly and which come back, and are begun anew, in bursts.
inline size_t begun_at_once(size_t staged, uint64_t nbytes_max) {
    constexpr size_t kNeverMerged = 2;
    constexpr uint64_t kSmallNbytesMax = 64 << 10;
    return nbytes_max <= kSmallNbytesMax ? staged : std::min(staged, kNeverMerged);
}

// Used by one thread, but for registering. Slots are below the depth that the queue was made with, and used once at a
// time.
class KernelQueue {
  public:
    // Nothing may be in flight.
    virtual ~KernelQueue() = default;

    // Puts a transfer with those that `begin` will begin.
    virtual void stage(uint64_t slot, const Transfer& transfer) = 0;
    // Begins what is staged, by calls of `begun_at_once` each. What the kernel does not take is appended to
    // `refused`. False where the kernel asks for patience: the rest stays staged.
    virtual bool begin(std::vector<Completion>* refused) = 0;
    // Appends what has completed, without waiting.
    virtual void reap(std::vector<Completion>* completions) = 0;

    // Memory and files that are used again and again can be made known to the kernel once. Called by any thread; what
    // is registered stays valid, and nothing in flight uses it, until it is taken back. They give an errno value where
    // the kernel refuses: transfers work without.
    virtual int register_buffer(char*, uint64_t) { return ENOSYS; }
    virtual void unregister_buffer(char*) {}
    // The number of the file, or -errno.
    virtual int32_t register_file(int) { return -ENOSYS; }
    virtual void unregister_file(int32_t) {}
};

// Both count completions up on `event_fd`. They throw std::system_error where the system does not offer them.
std::unique_ptr<KernelQueue> make_io_uring(uint32_t depth, int event_fd);
std::unique_ptr<KernelQueue> make_libaio(uint32_t depth, int event_fd);

}  // namespace infinity::aio
