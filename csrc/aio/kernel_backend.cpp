// A back end on a queue in the kernel, driven by one thread.
//
// The thread sleeps on one event descriptor. The kernel signals completions on it; the back end signals new requests
// and the order to stop. When the thread wakes, it takes completions, fills free slots, and then computes checksums
// while the drive works on the blocks that have begun.

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <vector>

#include "io_backend.h"
#include "kernel_queue.h"
#include "pending.h"

#ifdef INFINITY_AIO_FAULTS
// The test build replaces the result of every completion by that of a function that the loading program defines.
extern "C" int64_t infinity_aio_fault(int fd, int64_t result);
// The completion is lost.
constexpr int64_t kFaultHangs = INT64_MIN;
#endif

namespace infinity::aio {
namespace {

// Below the kernel's own limit on one transfer, and a multiple of every alignment.
constexpr uint64_t kTransferNbytesMax = uint64_t{1} << 30;

struct State {
    State(KernelQueueMaker make, uint32_t depth)
        : event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), kernel(make(depth, event.get())), slots(depth) {
        for (uint32_t slot = depth; slot-- > 0;) free.push_back(slot);
    }
    void signal() const {
        const uint64_t one = 1;
        // Fails only when 2^64 signals are unread.
        [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
    }

    const Fd event;
    std::unique_ptr<KernelQueue> kernel;
    // Used only by the thread: the block in flight or staged of each slot, the free slots, and the blocks to submit
    // again now or after kRetryDelay.
    std::vector<Block> slots;
    std::vector<uint32_t> free;
    std::deque<Block> again;
    std::deque<Block> later;

    const std::shared_ptr<Pending> pending = std::make_shared<Pending>();
    std::condition_variable changed;
    // Guarded by pending->mutex, as the flags below: whether a new request has to wake the thread.
    bool awaits_requests = false;
    bool stop = false;
    bool ended = false;
    std::atomic<bool> abandoned{false};
};

class Driver {
  public:
    explicit Driver(State& state) : state_(state) {}

    // Returns once told to stop with no block left, or once abandoned.
    void run() {
        while (!state_.abandoned) {
            fill();
            digest();
            if (over()) return;
            if (may_sleep()) sleep();
            reap();
        }
        give_up();
    }
    size_t in_flight() const { return state_.slots.size() - state_.free.size(); }

  private:
    using Clock = std::chrono::steady_clock;

    void fill() {
        {
            std::lock_guard<std::mutex> lock(state_.pending->mutex);
            for (Block block = next(); block.request; block = next()) {
                const uint32_t slot = state_.free.back();
                state_.free.pop_back();
                state_.slots[slot] = std::move(block);
                fresh_.push_back(slot);
            }
        }
        for (const uint32_t slot : fresh_) stage(slot);
        fresh_.clear();
        staged_all_ = state_.kernel->begin(&completions_);
        complete_all();
    }
    Block next() {
        if (state_.free.empty()) return Block{};
        if (state_.again.empty()) return state_.pending->pop();
        Block block = std::move(state_.again.front());
        state_.again.pop_front();
        return block;
    }
    void stage(uint32_t slot) {
        const Block& block = state_.slots[slot];
        const IoRequest& io = block.request->io;
        if (block.digests(true) && block.begin == block.first) undigested_.push_back(slot);
        state_.kernel->stage(slot, Transfer{io.write, block.descriptor(), io.target.registered,
                                            io.buffer + block.begin,
                                            std::min(block.end - block.begin, kTransferNbytesMax),
                                            io.offset + static_cast<int64_t>(block.begin)});
    }
    void digest() {
        // Blocks that are being written; their slots hold them until this thread takes their completions.
        for (const uint32_t slot : undigested_) {
            const Block& block = state_.slots[slot];
            if (block.request) block.request->digest(block.first);
        }
        undigested_.clear();
        for (const Block& block : arrived_) {
            block.request->digest(block.first);
            block.request->block_over(0, 0);
        }
        arrived_.clear();
    }
    bool over() {
        if (in_flight() != 0 || !state_.again.empty() || !state_.later.empty()) return false;
        std::lock_guard<std::mutex> lock(state_.pending->mutex);
        return state_.stop && state_.pending->empty();
    }
    // Returns whether no block can begin before the next signal.
    bool may_sleep() {
        const bool room = !state_.free.empty();
        if (room && !state_.again.empty()) return false;
        std::lock_guard<std::mutex> lock(state_.pending->mutex);
        if (room && !state_.pending->empty()) return false;
        state_.awaits_requests = room;
        return true;
    }
    void sleep() {
        pollfd event{state_.event.get(), POLLIN, 0};
        const bool no_deadline = staged_all_ && state_.later.empty();
        ::poll(&event, 1, no_deadline ? -1 : static_cast<int>(kRetryDelay.count()));
        uint64_t count;
        // After a timeout or a signal there is nothing to read; the next round finds no work and sleeps again.
        [[maybe_unused]] const ssize_t got = ::read(state_.event.get(), &count, sizeof count);
        if (!state_.later.empty() && Clock::now() >= retry_at_) {
            std::move(state_.later.begin(), state_.later.end(), std::back_inserter(state_.again));
            state_.later.clear();
        }
    }
    // Ends the blocks that are not in the kernel.
    void give_up() {
        digest();
        for (std::deque<Block>* blocks : {&state_.again, &state_.later}) {
            for (const Block& block : *blocks) block.request->block_over(ETIMEDOUT, block.begin);
            blocks->clear();
        }
    }
    void reap() {
        state_.kernel->reap(&completions_);
        complete_all();
    }
    void complete_all() {
        for (const Completion& completion : completions_) complete(completion);
        completions_.clear();
    }
    void complete(const Completion& completion) {
        const auto slot = static_cast<uint32_t>(completion.slot);
        int64_t result = completion.result;
#ifdef INFINITY_AIO_FAULTS
        result = infinity_aio_fault(state_.slots[slot].descriptor(), result);
        if (result == kFaultHangs) return;
#endif
        Block block = std::move(state_.slots[slot]);
        state_.slots[slot] = Block{};
        state_.free.push_back(slot);
        switch (settle(block, result)) {
            case Verdict::kMoved:
                if (block.digests(false)) {
                    arrived_.push_back(std::move(block));
                } else {
                    block.request->block_over(0, 0);
                }
                break;
            case Verdict::kFailed: break;
            case Verdict::kAgain:
                if (block.descriptor() == block.request->io.target.direct_fd) {
                    state_.again.push_back(std::move(block));
                } else {
                    // The unaligned rest of a file that ends inside a sector takes a call or two through the page
                    // cache.
                    move_now(block, state_.abandoned);
                }
                break;
            case Verdict::kLater:
                retry_at_ = Clock::now() + kRetryDelay;
                state_.later.push_back(std::move(block));
                break;
        }
    }

    State& state_;
    // Kept between rounds to reuse their memory.
    std::vector<uint32_t> fresh_;
    std::vector<Completion> completions_;
    // Slots of blocks being written, and blocks that were read, without a checksum yet.
    std::vector<uint32_t> undigested_;
    std::vector<Block> arrived_;
    bool staged_all_ = true;
    Clock::time_point retry_at_;
};

void serve(const std::shared_ptr<State>& state) {
    Driver driver(*state);
    driver.run();
    if (driver.in_flight() != 0) {
        // The kernel still writes to these buffers and to the queue's memory, so they are never freed.
        new std::shared_ptr<State>(state);
    }
    std::lock_guard<std::mutex> lock(state->pending->mutex);
    state->ended = true;
    state->changed.notify_all();
}

class KernelBackend final : public IoBackend {
  public:
    KernelBackend(KernelQueueMaker make, uint32_t depth) : state_(std::make_shared<State>(make, depth)) {}

    std::shared_ptr<Pending> push(std::shared_ptr<Request> request) override {
        std::lock_guard<std::mutex> lock(state_->pending->mutex);
        if (!thread_.joinable()) thread_ = std::thread([state = state_] { serve(state); });
        state_->pending->push(std::move(request));
        if (state_->awaits_requests) state_->signal();
        state_->awaits_requests = false;
        return state_->pending;
    }

    bool close(double timeout_s) override {
        std::unique_lock<std::mutex> lock(state_->pending->mutex);
        if (!thread_.joinable()) return true;
        state_->stop = true;
        state_->signal();
        const auto ended = [this] { return state_->ended; };
        const bool clean = state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), ended);
        if (!clean) {
            state_->pending->cancel_all(ETIMEDOUT);
            state_->abandoned = true;
            state_->signal();
        }
        lock.unlock();
        clean ? thread_.join() : thread_.detach();
        return clean;
    }

    KernelQueue* kernel() override { return state_->kernel.get(); }

  private:
    std::shared_ptr<State> state_;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<IoBackend> make_kernel_backend(KernelQueueMaker make, uint32_t depth) {
    return std::make_unique<KernelBackend>(make, depth);
}

}  // namespace infinity::aio
