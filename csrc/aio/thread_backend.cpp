// A pool of threads with pread and pwrite, which works on every system and serves requests that kernel queues refuse.

#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "io_backend.h"
#include "pending.h"

namespace infinity::aio {
namespace {

// Shared by the back end and its threads, so that a hanging thread keeps it alive after the back end is destroyed.
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
    // Tells threads that repeat a call after EAGAIN to give up.
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
        // Start threads before the push, so that the caller gets the error if the system refuses the first one.
        start_threads();
        state_->pending->push(std::move(request));
        // A large request has blocks for all threads.
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
            // The system refuses more threads; fewer suffice, but none is an error.
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
