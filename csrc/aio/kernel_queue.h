// A queue inside the kernel: reads and writes of aligned blocks are begun by one call and end on their own.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>

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

// Used by one thread. Slots are below the depth that the queue was made with, and used once at a time.
class KernelQueue {
  public:
    // Nothing may be in flight.
    virtual ~KernelQueue() = default;

    // 0, or an errno value; the transfer has then not begun.
    virtual int begin(uint64_t slot, const Transfer& transfer) = 0;
    // Takes one completion, without waiting; false where there is none.
    virtual bool reap(Completion* completion) = 0;
};

// Both count completions up on `event_fd`. They throw std::system_error where the system does not offer them.
std::unique_ptr<KernelQueue> make_io_uring(uint32_t depth, int event_fd);
std::unique_ptr<KernelQueue> make_libaio(uint32_t depth, int event_fd);

}  // namespace infinity::aio
