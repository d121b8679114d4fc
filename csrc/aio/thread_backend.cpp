// Threads with pread and pwrite: works everywhere, and carries what the kernel's queues do not take.

#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "io_backend.h"
#include "pending.h"

namespace infinity::aio {
namespace {

// Shared by the backend and its threads: a thread that hangs keeps it alive when the backend is gone.
struct State {
    explicit State(int threads) : threads_max(threads) {}

    const int threads_max;
    const std::shared_ptr<Pending> pending = std::make_shared<Pending>();
    std::condition_variable work;
    std::condition_variable changed;
    // Guarded by pending->mutex.
    int idle = 0;
    int alive = 0;
    bool stop = false;
    // Of threads that wait for the kernel's patience: give up.
    std::atomic<bool> abandoned{false};
};

void serve(const std::shared_ptr<State>& state) {
    std::unique_lock<std::mutex> lock(state->pending->mutex);
    for (;;) {
        ++state->idle;
        state->work.wait(lock, [&] { return state->stop || !state->pending->empty(); });
        --state->idle;
        Block block = state->pending->pop();
        if (block.request) {
            lock.unlock();
            move_now(block, state->abandoned);
            block = Block{};
            lock.lock();
        } else if (state->stop) {
            break;
        }
    }
    --state->alive;
    state->changed.notify_all();
}

class ThreadBackend final : public IoBackend {
  public:
    explicit ThreadBackend(int threads) : state_(std::make_shared<State>(threads)) {}

    std::shared_ptr<Pending> push(std::shared_ptr<Request> request) override {
        std::lock_guard<std::mutex> lock(state_->pending->mutex);
        // Before the push: where no thread can be had at all, the caller learns it and nothing waits for ever.
        start_threads();
        state_->pending->push(std::move(request));
        // A large request has work for all.
        state_->work.notify_all();
        return state_->pending;
    }

    bool close(double timeout_s) override {
        std::unique_lock<std::mutex> lock(state_->pending->mutex);
        state_->stop = true;
        state_->work.notify_all();
        const auto all_gone = [this] { return state_->alive == 0; };
        const bool clean = state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), all_gone);
        if (!clean) {
            state_->pending->cancel_all(ETIMEDOUT);
            state_->abandoned = true;
        }
        lock.unlock();
        for (std::thread& thread : threads_) clean ? thread.join() : thread.detach();
        threads_.clear();
        return clean;
    }

  private:
    void start_threads() {
        if (state_->idle > 0 || state_->alive >= state_->threads_max) return;
        const auto wanted = static_cast<size_t>(state_->threads_max);
        try {
            while (threads_.size() < wanted) {
                threads_.emplace_back([state = state_] { serve(state); });
                ++state_->alive;
            }
        } catch (const std::system_error&) {
            // The system gives no more threads: fewer serve as well, none at all is an error.
            if (threads_.empty()) throw;
        }
    }

    std::shared_ptr<State> state_;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoBackend> make_thread_backend(int threads) {
    return std::make_unique<ThreadBackend>(threads);
}

}  // namespace infinity::aio
