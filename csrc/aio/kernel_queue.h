// The interface of a queue inside the kernel, which begins many aligned reads and writes with one call.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>
#include <vector>

namespace infinity::aio {

// A file descriptor that is closed with this object.
class Fd {
  public:
    // Throws std::system_error with errno if `fd` is negative.
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
    // The slot of the transfer.
    uint64_t slot;
    // Bytes, or -errno.
    int64_t result;
};

// Returns how many of `staged` transfers, the largest of `nbytes_max` bytes, one system call begins. The kernel merges
// neighbours among more than two. That saves work for small transfers, but merged large blocks have several MiB, which
// drives serve more slowly and in bursts.
inline size_t begun_at_once(size_t staged, uint64_t nbytes_max) {
    constexpr size_t kNeverMerged = 2;
    constexpr uint64_t kSmallNbytesMax = 64 << 10;
    return nbytes_max <= kSmallNbytesMax ? staged : std::min(staged, kNeverMerged);
}

// One thread uses it, except for registration. A slot is below the queue's depth and holds one transfer at a time.
class KernelQueue {
  public:
    // No transfer may be in flight.
    virtual ~KernelQueue() = default;

    // Adds a transfer to those that `begin` submits.
    virtual void stage(uint64_t slot, const Transfer& transfer) = 0;
    // Submits the staged transfers, `begun_at_once` with each call. Appends those that the kernel refuses to `refused`.
    // Returns false if the kernel is busy (EAGAIN); the rest then stays staged.
    virtual bool begin(std::vector<Completion>* refused) = 0;
    // Appends the completed transfers without waiting.
    virtual void reap(std::vector<Completion>* completions) = 0;

    // Register memory and files that many transfers use. Any thread may call these. Registered memory and files stay
    // valid until they are unregistered, with no transfer in flight on them. The functions return an errno value if the
    // kernel refuses; transfers work without registration too.
    virtual int register_buffer(char*, uint64_t) { return ENOSYS; }
    virtual void unregister_buffer(char*) {}
    // The number of the file, or -errno.
    virtual int32_t register_file(int) { return -ENOSYS; }
    virtual void unregister_file(int32_t) {}
};

// Both signal completions on `event_fd`, and throw std::system_error if the system does not offer them.
std::unique_ptr<KernelQueue> make_io_uring(uint32_t depth, int event_fd);
std::unique_ptr<KernelQueue> make_libaio(uint32_t depth, int event_fd);

}  // namespace infinity::aio
