// A lane over a queue in the kernel, driven by one thread.
//
// One event descriptor counts what the thread has to look at: completions (the kernel adds to it), new requests and the
// order to stop (the lane does). It sleeps in a read of it, and wakes to take completions and to fill free slots.

#include <sys/eventfd.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <vector>

#include "kernel_queue.h"
#include "lane.h"
#include "pending.h"

namespace infinity::aio {
namespace {

// Below the kernel's own limit on one transfer, and a multiple of every alignment.
constexpr uint64_t kTransferNbytesMax = uint64_t{1} << 30;

struct State {
    State(KernelQueueMaker make, uint32_t depth, uint64_t block_nbytes)
        : event(::eventfd(0, EFD_CLOEXEC)), kernel(make(depth, event.get())), slots(depth), pending(block_nbytes) {
        for (uint32_t slot = 0; slot < depth; ++slot) free.push_back(slot);
    }
    void signal() const {
        const uint64_t one = 1;
        // Fails only when 2^64 signals are unread.
        [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
    }

    const Fd event;
    std::unique_ptr<KernelQueue> kernel;
    // The thread's own: what is in flight by slot, which slots are not, and what is to be asked for again.
    std::vector<Block> slots;
    std::vector<uint32_t> free;
    std::deque<Block> again;

    std::mutex mutex;
    std::condition_variable changed;
    // Guarded by mutex.
    Pending pending;
    bool stop = false;
    bool ended = false;
    std::atomic<bool> abandoned{false};
};

class Driver {
  public:
    explicit Driver(State& state) : state_(state) {}

    // Returns when told to stop and nothing is left, or when abandoned.
    void run() {
        for (;;) {
            fill();
            if (in_flight() == 0 && !state_.again.empty()) {
                std::this_thread::sleep_for(kPatience);
            } else if (in_flight() == 0 && finished()) {
                return;
            } else {
                uint64_t count;
                while (::read(state_.event.get(), &count, sizeof count) < 0 && errno == EINTR) continue;
            }
            if (state_.abandoned) return;
            Completion completion;
            while (state_.kernel->reap(&completion)) complete(completion);
        }
    }
    size_t in_flight() const { return state_.slots.size() - state_.free.size(); }

  private:
    void fill() {
        while (!state_.free.empty()) {
            Block block = next();
            if (!block.request) return;
            const uint32_t slot = state_.free.back();
            state_.free.pop_back();
            state_.slots[slot] = std::move(block);
            const int error = begin(slot);
            if (error == 0) continue;
            complete(Completion{slot, -error});
            // The kernel is full: the completions to come make room.
            if (error == EAGAIN) return;
        }
    }
    Block next() {
        if (!state_.again.empty()) {
            Block block = std::move(state_.again.front());
            state_.again.pop_front();
            return block;
        }
        std::lock_guard<std::mutex> lock(state_.mutex);
        return state_.pending.pop();
    }
    int begin(uint32_t slot) {
        const Block& block = state_.slots[slot];
        const Request& request = *block.request;
        return state_.kernel->begin(slot, Transfer{request.write, block.descriptor(), request.buffer + block.begin,
                                                   std::min(block.end - block.begin, kTransferNbytesMax),
                                                   request.offset + static_cast<int64_t>(block.begin)});
    }
    void complete(const Completion& completion) {
        Block block = std::move(state_.slots[completion.slot]);
        state_.free.push_back(static_cast<uint32_t>(completion.slot));
        if (settle(block, completion.result) == Verdict::kOver) return;
        if (block.descriptor() == block.request->target.direct_fd) {
            state_.again.push_back(std::move(block));
        } else {
            // A file that ends inside a sector left an unaligned rest: a call or two through the page cache.
            move_now(block, state_.abandoned);
        }
    }
    bool finished() {
        std::lock_guard<std::mutex> lock(state_.mutex);
        return state_.stop && state_.pending.empty();
    }

    State& state_;
};

void serve(const std::shared_ptr<State>& state) {
    Driver driver(*state);
    driver.run();
    if (driver.in_flight() != 0) {
        // The kernel still writes to these buffers and to the queue's memory: neither is ever freed.
        new std::shared_ptr<State>(state);
    }
    std::lock_guard<std::mutex> lock(state->mutex);
    state->ended = true;
    state->changed.notify_all();
}

class KernelLane final : public Lane {
  public:
    KernelLane(KernelQueueMaker make, uint32_t depth, uint64_t block_nbytes)
        : state_(std::make_shared<State>(make, depth, block_nbytes)) {}

    void push(std::shared_ptr<Request> request) override {
        std::lock_guard<std::mutex> lock(state_->mutex);
        if (!thread_.joinable()) thread_ = std::thread([state = state_] { serve(state); });
        state_->pending.push(std::move(request));
        state_->signal();
    }

    bool close(double timeout_s) override {
        std::unique_lock<std::mutex> lock(state_->mutex);
        if (!thread_.joinable()) return true;
        state_->stop = true;
        state_->signal();
        const auto ended = [this] { return state_->ended; };
        const bool clean = state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), ended);
        if (!clean) {
            state_->pending.cancel(ETIMEDOUT);
            state_->abandoned = true;
            state_->signal();
        }
        lock.unlock();
        clean ? thread_.join() : thread_.detach();
        return clean;
    }

  private:
    std::shared_ptr<State> state_;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<Lane> make_kernel_lane(KernelQueueMaker make, uint32_t depth, uint64_t block_nbytes) {
    return std::make_unique<KernelLane>(make, depth, block_nbytes);
}

}  // namespace infinity::aio
