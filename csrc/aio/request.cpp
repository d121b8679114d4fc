#include "request.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "crc32c.h"

namespace infinity::aio {

namespace {

// Distance of the prefetches of sampled lines.
constexpr uint64_t kPagesAhead = 16;

int64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace

Request::Request(const IoRequest& io, uint64_t block_nbytes, std::shared_ptr<PendingLimit> limit)
    : io(io),
      block_nbytes((block_nbytes + io.target.alignment - 1) / io.target.alignment * io.target.alignment),
      pending_limit_(std::move(limit)) {
    if (checked()) digests_.resize((io.nbytes + this->block_nbytes - 1) / this->block_nbytes);
}

int Request::descriptor_for(uint64_t begin, uint64_t end) const {
    const Target& target = io.target;
    const bool aligned = (static_cast<uint64_t>(io.offset) + begin) % target.alignment == 0 &&
                         (end - begin) % target.alignment == 0 &&
                         reinterpret_cast<uintptr_t>(io.buffer + begin) % target.memory_alignment == 0;
    return aligned && target.direct_fd >= 0 ? target.direct_fd : target.buffered_fd;
}

bool Request::is_direct() const {
    return io.target.direct_fd >= 0 && descriptor_for(0, io.nbytes) == io.target.direct_fd;
}

bool Request::begin_block(bool last) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_ != 0) return false;
    ++blocks_active_;
    all_begun_ = last;
    if (began_ns_ == 0) began_ns_ = now_ns();
    return true;
}

void Request::block_over(int32_t error, uint64_t position) {
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

void Request::cancel(int32_t error, uint64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    all_begun_ = true;
    if (error_ == 0) {
        error_ = error;
        position_ = position;
    }
    settle();
}

bool Request::wait(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done(); });
}

void Request::outcome(int32_t* error, uint64_t* position) const {
    *error = error_;
    *position = error_ == 0 ? io.nbytes : position_;
}

void Request::digest(uint64_t first) {
    const uint64_t nbytes = std::min(io.nbytes - first, block_nbytes);
    digests_[first / block_nbytes] = io.check == Check::kSample
                                         ? sample(first, first + nbytes)
                                         : Digest{crc32c(0, io.buffer + first, nbytes), nbytes};
}

// Returns the digest of the parts of sampled lines in [first, end).
Request::Digest Request::sample(uint64_t first, uint64_t end) const {
    Digest digest;
    for (uint64_t page = first / kPageNbytes; page * kPageNbytes < end; ++page) {
        // The processor does not prefetch across pages; without this hint, which may point beyond the end, the sampling
        // takes four times as long.
        __builtin_prefetch(io.buffer + sampled_line(page + kPagesAhead));
        const uint64_t low = std::max(sampled_line(page), first);
        const uint64_t high = std::min(sampled_line(page) + kLineNbytes, end);
        if (low >= high) continue;
        digest.crc = crc32c(digest.crc, io.buffer + low, high - low);
        digest.nbytes += high - low;
    }
    return digest;
}

uint32_t Request::checksum() const {
    uint32_t all = 0;
    for (const Digest& digest : digests_) all = crc32c_combine(all, digest.crc, digest.nbytes);
    return all;
}

void Request::moments(int64_t* began_ns, int64_t* ended_ns) const {
    *began_ns = began_ns_;
    *ended_ns = ended_ns_;
}

void Request::settle() {
    if (!all_begun_ || blocks_active_ != 0 || done()) return;
    ended_ns_ = now_ns();
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
    pending_limit_->leave();
}

Verdict settle(Block& block, int64_t result) {
    if (result == -EINTR) return Verdict::kAgain;
    if (result == -EAGAIN) return Verdict::kLater;
    if (result <= 0) {
        block.request->block_over(result == 0 ? kEndOfFile : static_cast<int32_t>(-result), block.begin);
        return Verdict::kFailed;
    }
    block.begin += static_cast<uint64_t>(result);
    return block.begin < block.end ? Verdict::kAgain : Verdict::kMoved;
}

void move_now(Block& block, const std::atomic<bool>& abandoned) {
    Request& request = *block.request;
    const IoRequest& io = request.io;
    for (;;) {
        const int fd = block.descriptor();
        char* const at = io.buffer + block.begin;
        const size_t nbytes = block.end - block.begin;
        const off_t offset = static_cast<off_t>(io.offset + static_cast<int64_t>(block.begin));
        const ssize_t moved = io.write ? ::pwrite(fd, at, nbytes, offset) : ::pread(fd, at, nbytes, offset);
        switch (settle(block, moved < 0 ? -static_cast<int64_t>(errno) : moved)) {
            case Verdict::kMoved:
                if (request.checked()) request.digest(block.first);
                return request.block_over(0, 0);
            case Verdict::kFailed: return;
            case Verdict::kAgain: break;
            case Verdict::kLater: std::this_thread::sleep_for(kRetryDelay);
        }
        if (abandoned) return request.block_over(ETIMEDOUT, block.begin);
    }
}

}  // namespace infinity::aio
