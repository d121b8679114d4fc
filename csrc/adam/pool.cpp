#include "pool.h"

#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace infinity::adam {
namespace {

// Sets rounding to nearest and denormals on, and puts back what the thread had. A caller that flushes denormals would
// otherwise get other bits on its own thread than on the pool's.
class PlainFloats {
  public:
#if defined(__x86_64__)
    PlainFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~PlainFloats() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#elif defined(__aarch64__)
    PlainFloats() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~PlainFloats() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

  private:
    uint64_t saved_;
#endif
};

}  // namespace

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads) {}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::Job::drain() {
    [[maybe_unused]] const PlainFloats floats;
    for (;;) {
        const uint64_t index = next.fetch_add(1, std::memory_order_relaxed);
        if (index >= count) return;
        (*task)(index);
    }
}

void Pool::run(uint64_t count, const std::function<void(uint64_t)>& task) {
    std::lock_guard<std::mutex> caller(callers_);
    Job job{&task, count};
    if (size_ == 1 || count <= 1) return job.drain();
    start_threads();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = &job;
        ++jobs_begun_;
    }
    wake_.notify_all();
    job.drain();
    // A thread that wakes only now finds no job: the caller waits for those at work, never for a late sleeper.
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;
    left_.wait(lock, [&job] { return job.active == 0; });
}

void Pool::start_threads() {
    try {
        while (threads_.size() + 1 < static_cast<size_t>(size_)) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
        // The system gives no more threads: the ones there and the caller do the work, slower, with the same result.
    }
}

void Pool::work() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this, seen] { return stop_ || (job_ && jobs_begun_ != seen); });
        if (stop_) return;
        seen = jobs_begun_;
        Job& job = *job_;
        ++job.active;
        lock.unlock();
        job.drain();
        lock.lock();
        if (--job.active == 0) left_.notify_all();
    }
}

}  // namespace infinity::adam
