// A read or write asked for by the caller, and the blocks that it is cut into.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace infinity::aio {

// An open file. The descriptors belong to the caller, who keeps them open until the request is done.
struct Target {
    // -1 where the file system does not take O_DIRECT.
    int32_t direct_fd;
    int32_t buffered_fd;
    // Of offset and length, and of the address, for direct I/O; bytes.
    uint32_t alignment;
    uint32_t memory_alignment;
};

class Request {
  public:
    Request(bool write, Target target, char* buffer, int64_t offset, uint64_t nbytes, int32_t priority)
        : write(write), target(target), buffer(buffer), offset(offset), nbytes(nbytes), priority(priority) {}

    // The descriptor for bytes [begin, end) of the request: the one place that knows about alignment. Whatever is not
    // aligned goes through the page cache, which the kernel keeps coherent with direct I/O.
    int descriptor_for(uint64_t begin, uint64_t end) const {
        const bool aligned = (static_cast<uint64_t>(offset) + begin) % target.alignment == 0 &&
                             (end - begin) % target.alignment == 0 &&
                             reinterpret_cast<uintptr_t>(buffer + begin) % target.memory_alignment == 0;
        return aligned && target.direct_fd >= 0 ? target.direct_fd : target.buffered_fd;
    }
    bool is_direct() const { return target.direct_fd >= 0 && descriptor_for(0, nbytes) == target.direct_fd; }

    // A block is about to be worked on; `last` where no further block follows. False where the request has failed
    // and may be over: the buffer must not be touched again.
    bool begin_block(bool last) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (error_ != 0) return false;
        ++blocks_active_;
        all_begun_ = last;
        return true;
    }
    // A block is over: errno 0, or what went wrong at which byte of the request. Of several failures the one at the
    // lowest byte counts, so that the outcome does not depend on the order of completion.
    void block_over(int32_t error, uint64_t position) {
        std::lock_guard<std::mutex> lock(mutex_);
        --blocks_active_;
        if (error != 0) {
            all_begun_ = true;
            if (error_ == 0 || position < position_) {
                error_ = error;
                position_ = position;
            }
        }
        settle();
    }
    // The queue closes: nothing from byte `position` on will begin.
    void cancel(int32_t error, uint64_t position) {
        std::lock_guard<std::mutex> lock(mutex_);
        all_begun_ = true;
        if (error_ == 0) {
            error_ = error;
            position_ = position;
        }
        settle();
    }

    bool done() const { return done_.load(std::memory_order_acquire); }
    bool wait(double timeout_s) {
        std::unique_lock<std::mutex> lock(mutex_);
        return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done(); });
    }
    // After done(): errno (0: all bytes moved) and the byte of the request at which it occurred.
    void outcome(int32_t* error, uint64_t* position) const {
        *error = error_;
        *position = error_ == 0 ? nbytes : position_;
    }

    const bool write;
    const Target target;
    char* const buffer;
    const int64_t offset;
    const uint64_t nbytes;
    const int32_t priority;

  private:
    void settle() {
        if (!all_begun_ || blocks_active_ != 0) return;
        done_.store(true, std::memory_order_release);
        changed_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t blocks_active_ = 0;
    bool all_begun_ = false;
    int32_t error_ = 0;
    uint64_t position_ = 0;
    std::atomic<bool> done_{false};
};

// Bytes [begin, end) of a request that are still to be moved. Keeps the request alive.
struct Block {
    std::shared_ptr<Request> request;
    uint64_t begin = 0;
    uint64_t end = 0;

    int descriptor() const { return request->descriptor_for(begin, end); }
};

enum class Verdict {
    // All bytes moved, or failed: the request has been told.
    kOver,
    // Some are left, from block.begin on.
    kAgain,
    // As kAgain, but the kernel asks for patience.
    kLater,
};

// What one system call's result (bytes, or -errno) means for a block. Every completion of every back end comes here.
Verdict settle(Block& block, int64_t result);

// Moves a block by pread or pwrite, however many calls that takes; gives up with ETIMEDOUT once `abandoned` is set.
void move_now(Block& block, const std::atomic<bool>& abandoned);

// What a thread sleeps before it asks again, when the kernel asks for patience.
constexpr std::chrono::milliseconds kPatience{1};

// errno of "the file ends here": a read or write that moved nothing.
constexpr int32_t kEndOfFile = -1;

}  // namespace infinity::aio
