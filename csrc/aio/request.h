// A read or write submitted by the caller, and the blocks that it is cut into.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace infinity::aio {

// An open file. The caller owns the descriptors and keeps them open until the request is done.
struct Target {
    // -1 if the file system does not support O_DIRECT.
    int32_t direct_fd;
    int32_t buffered_fd;
    // Alignment in bytes for direct I/O: of offset and length, and of the address.
    uint32_t alignment;
    uint32_t memory_alignment;
    // The number that infinity_aio_register_file returned for direct_fd, or -1.
    int32_t registered;
};

// The number of requests that are not done, and its limit.
class PendingLimit {
  public:
    explicit PendingLimit(uint64_t pending_max) : pending_max_(pending_max) {}

    bool enter() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (pending_ >= pending_max_) return false;
        ++pending_;
        return true;
    }
    void leave() {
        std::lock_guard<std::mutex> lock(mutex_);
        --pending_;
        changed_.notify_all();
    }
    // Waits up to `timeout_s` seconds; returns whether the limit admits another request.
    bool wait(double timeout_s) {
        std::unique_lock<std::mutex> lock(mutex_);
        return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                 [this] { return pending_ < pending_max_; });
    }

  private:
    const uint64_t pending_max_;
    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t pending_ = 0;
};

// The bytes of a request that its CRC-32C covers.
enum class Check : int32_t {
    kNone = 0,
    kAll = 1,
    // One line of each page, see sampled_line(): detects misplaced and stale pages at a negligible cost.
    kSample = 2,
};

constexpr uint64_t kPageNbytes = 4096;
constexpr uint64_t kLineNbytes = 64;

// Returns the byte of a request at which the sampled line of its page number `page` begins. The place differs from page
// to page, so that no column of a table is always left out.
inline uint64_t sampled_line(uint64_t page) {
    return page * kPageNbytes + page * 37 % (kPageNbytes / kLineNbytes) * kLineNbytes;
}

// The description of a request as a value.
struct IoRequest {
    bool write;
    Target target;
    char* buffer;
    int64_t offset;
    uint64_t nbytes;
    int32_t priority;
    // The bytes that the CRC-32C covers.
    Check check;
};

class Request {
  public:
    // The caller has entered `limit` for this request; the request leaves it when it is done.
    Request(const IoRequest& io, uint64_t block_nbytes, std::shared_ptr<PendingLimit> limit);

    // Returns the descriptor for bytes [begin, end) of the request. Unaligned bytes go through the page cache, which
    // the kernel keeps coherent with direct I/O. No other code decides about alignment.
    int descriptor_for(uint64_t begin, uint64_t end) const;
    bool is_direct() const;

    // Notes that a block begins; `last` if no further block follows. Returns false if the request has failed: it may be
    // over, and the buffer must not be touched again.
    bool begin_block(bool last);
    // Notes that a block is over, with errno 0 or the error at byte `position` of the request. The error at the lowest
    // byte counts, so that the outcome does not depend on the order of completion.
    void block_over(int32_t error, uint64_t position);
    // Notes that no block from byte `position` on will begin.
    void cancel(int32_t error, uint64_t position);

    bool done() const { return done_.load(std::memory_order_acquire); }
    // Waits up to `timeout_s` seconds; returns whether the request is done.
    bool wait(double timeout_s);
    // After done(): writes errno (0: all bytes moved) and the byte of the request at which it occurred.
    void outcome(int32_t* error, uint64_t* position) const;

    bool checked() const { return io.check != Check::kNone; }
    // Computes and stores the CRC-32C of the block that begins at byte `first`. Threads may call it for different
    // blocks at the same time.
    void digest(uint64_t first);
    // After done() of a checked request without an error: returns the CRC-32C of the covered bytes.
    uint32_t checksum() const;
    // After done(): writes when the first block began (0: none did) and when the request was over, in nanoseconds of
    // the steady clock.
    void moments(int64_t* began_ns, int64_t* ended_ns) const;

    const IoRequest io;
    // Bytes of all blocks but the last; a multiple of the file's alignment.
    const uint64_t block_nbytes;
    // The position among waiting requests; the lock of their list guards both.
    int64_t rank = 0;
    uint64_t arrival = 0;

  private:
    struct Digest {
        uint32_t crc = 0;
        uint64_t nbytes = 0;
    };

    void settle();
    Digest sample(uint64_t first, uint64_t end) const;

    const std::shared_ptr<PendingLimit> pending_limit_;
    // Indexed by block.
    std::vector<Digest> digests_;
    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t blocks_active_ = 0;
    bool all_begun_ = false;
    int32_t error_ = 0;
    uint64_t position_ = 0;
    int64_t began_ns_ = 0;
    int64_t ended_ns_ = 0;
    std::atomic<bool> done_{false};
};

// The bytes [begin, end) that are left of a block that began at byte `first` of a request. Keeps the request alive.
struct Block {
    std::shared_ptr<Request> request;
    uint64_t first = 0;
    uint64_t begin = 0;
    uint64_t end = 0;

    int descriptor() const { return request->descriptor_for(begin, end); }
    bool digests(bool write) const { return request->checked() && request->io.write == write; }
};

enum class Verdict {
    // All bytes are moved; the caller has to call block_over.
    kMoved,
    // The block has failed, and block_over has been called.
    kFailed,
    // The bytes from block.begin on are left.
    kAgain,
    // As kAgain, but the kernel was busy (EAGAIN).
    kLater,
};

// Applies the result of one system call (bytes, or -errno) to a block. All back ends call it for every completion.
Verdict settle(Block& block, int64_t result);

// Moves a block by any number of pread or pwrite calls and calls block_over; gives up with ETIMEDOUT once `abandoned`
// is set.
void move_now(Block& block, const std::atomic<bool>& abandoned);

// Delay before a transfer is submitted again after the kernel was busy (EAGAIN).
constexpr std::chrono::milliseconds kRetryDelay{1};

// The errno of a read or write that moved nothing, because the file ends there.
constexpr int32_t kEndOfFile = -1;

}  // namespace infinity::aio
