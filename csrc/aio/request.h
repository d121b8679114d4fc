// A read or write asked for by the caller, and the blocks that it is cut into.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace infinity::aio {

// An open file. The descriptors belong to the caller, who keeps them open until the request is done.
struct Target {
    // -1 where the file system does not take O_DIRECT.
    int32_t direct_fd;
    int32_t buffered_fd;
    // Of offset and length, and of the address, for direct I/O; bytes.
    uint32_t alignment;
    uint32_t memory_alignment;
    // What infinity_aio_register_file gave for direct_fd, or -1.
    int32_t registered;
};

// How many requests are not done yet, and the bound on that.
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
    // Whether there is room for another, after at most `timeout_s` seconds.
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

// Which bytes of a request its CRC-32C is of.
enum class Check : int32_t {
    kNone = 0,
    kAll = 1,
    // One line of each page, see sampled_line(): a page that is another one's, or an older one, is found at a cost that
    // no transfer shows.
    kSample = 2,
};

constexpr uint64_t kPageNbytes = 4096;
constexpr uint64_t kLineNbytes = 64;

// The byte of a request at which the sampled line of its page number `page` begins. The places differ from page to
// page, so that no column of a table is always left out.
inline uint64_t sampled_line(uint64_t page) {
    return page * kPageNbytes + page * 37 % (kPageNbytes / kLineNbytes) * kLineNbytes;
}

// What a request does, in one value.
struct IoRequest {
    bool write;
    Target target;
    char* buffer;
    int64_t offset;
    uint64_t nbytes;
    int32_t priority;
    // Of which bytes the CRC-32C is wanted.
    Check check;
};

class Request {
  public:
    // `room` was entered for this request, and is left when it is done.
    Request(const IoRequest& io, uint64_t block_nbytes, std::shared_ptr<PendingLimit> limit);

    // The descriptor for bytes [begin, end) of the request: the one place that knows about alignment. Whatever is not
    // aligned goes through the page cache, which the kernel keeps coherent with direct I/O.
    int descriptor_for(uint64_t begin, uint64_t end) const;
    bool is_direct() const;

    // A block is about to be worked on; `last` where no further block follows. False where the request has failed
    // and may be over: the buffer must not be touched again.
    bool begin_block(bool last);
    // A block is over: errno 0, or what went wrong at which byte of the request. Of several failures the one at the
    // lowest byte counts, so that the outcome does not depend on the order of completion.
    void block_over(int32_t error, uint64_t position);
    // Nothing from byte `position` on will begin.
    void cancel(int32_t error, uint64_t position);

    bool done() const { return done_.load(std::memory_order_acquire); }
    // Whether it is done, after at most `timeout_s` seconds.
    bool wait(double timeout_s);
    // After done(): errno (0: all bytes moved) and the byte of the request at which it occurred.
    void outcome(int32_t* error, uint64_t* position) const;

    bool checked() const { return io.check != Check::kNone; }
    // Computes and keeps the CRC-32C of the block that begins at byte `first`. Different blocks may be digested at the
    // same time.
    void digest(uint64_t first);
    // After done(), of a checked request without an error: the CRC-32C of all bytes that the check is of.
    uint32_t checksum() const;
    // After done(): when its first block began (0: none did) and when it was over; steady clock, nanoseconds.
    void moments(int64_t* began_ns, int64_t* ended_ns) const;

    const IoRequest io;
    // Of all blocks but the last; a multiple of the file's alignment.
    const uint64_t block_nbytes;
    // Where the request stands among those that wait: the lock of the list that it waits in guards these.
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
    // By block.
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

// Bytes [begin, end) of a request that are still to be moved, of a block that began at `first`. Keeps the request
// alive.
struct Block {
    std::shared_ptr<Request> request;
    uint64_t first = 0;
    uint64_t begin = 0;
    uint64_t end = 0;

    int descriptor() const { return request->descriptor_for(begin, end); }
    bool digests(bool write) const { return request->checked() && request->io.write == write; }
};

enum class Verdict {
    // All bytes moved; the request is to be told.
    kMoved,
    // Failed: the request has been told.
    kFailed,
    // Some bytes are left, from block.begin on.
    kAgain,
    // As kAgain, but the kernel asks for patience.
    kLater,
};

// What one system call's result (bytes, or -errno) means for a block. Every completion of every back end comes here.
Verdict settle(Block& block, int64_t result);

// Moves a block by pread or pwrite, however many calls that takes; gives up with ETIMEDOUT once `abandoned` is set.
// The request is told.
void move_now(Block& block, const std::atomic<bool>& abandoned);

// What a thread sleeps before it asks again, when the kernel asks for patience.
constexpr std::chrono::milliseconds kPatience{1};

// errno of "the file ends here": a read or write that moved nothing.
constexpr int32_t kEndOfFile = -1;

}  // namespace infinity::aio
