#include "pool.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <system_error>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace infinity::adam {
namespace {

// A caller spins this long before it sleeps, because at the end of a job other threads have about one index left.
constexpr std::chrono::microseconds kSpinTime{100};

// Sets rounding to nearest and enables denormals, and restores the thread's mode afterwards. Otherwise a caller that
// flushes denormals would compute other bits than the pool's threads.
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

// Moves the calling thread to `cores`, and restores its affinity afterwards. Does nothing if `cores` is empty or the
// system refuses; the results are the same.
class OnCores {
  public:
#if defined(__linux__)
    explicit OnCores(const std::vector<int>& cores) {
        if (cores.empty() || sched_getaffinity(0, sizeof before_, before_.data()) != 0) return;
        Mask wanted{};
        for (const int core : cores) CPU_SET_S(static_cast<size_t>(core), sizeof wanted, wanted.data());
        moved_ = !CPU_EQUAL_S(sizeof wanted, before_.data(), wanted.data()) &&
                 sched_setaffinity(0, sizeof wanted, wanted.data()) == 0;
    }
    ~OnCores() {
        if (moved_) sched_setaffinity(0, sizeof before_, before_.data());
    }

  private:
    // Covers 8192 cores; the kernel refuses a mask that is shorter than its own.
    using Mask = std::array<cpu_set_t, 8>;

    Mask before_{};
    bool moved_ = false;
#else
    explicit OnCores(const std::vector<int>&) {}
    ~OnCores() {}

  private:
#endif
    OnCores(const OnCores&) = delete;
    OnCores& operator=(const OnCores&) = delete;
};

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads, std::vector<int> cores) : size_(threads < 1 ? 1 : threads), cores_(std::move(cores)) {}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

Pool::Job::Job(const std::function<void(uint64_t)>& job, uint64_t count, int threads)
    : task(&job), shares(static_cast<size_t>(threads)) {
    const uint64_t parts = shares.size();
    for (uint64_t part = 0; part < parts; ++part) {
        // count / parts indices for each thread, and one more for the first ones, computed without overflow.
        const auto bound = [&](uint64_t at) { return count / parts * at + std::min(count % parts, at); };
        shares[part].next.store(bound(part), std::memory_order_relaxed);
        shares[part].end = bound(part + 1);
    }
}

void Pool::Job::drain(size_t own) {
    [[maybe_unused]] const PlainFloats floats;
    for (size_t offset = 0; offset < shares.size(); ++offset) {
        Share& share = shares[(own + offset) % shares.size()];
        for (;;) {
            const uint64_t index = share.next.fetch_add(1, std::memory_order_relaxed);
            if (index >= share.end) break;
            (*task)(index);
        }
    }
}

void Pool::run(uint64_t count, const std::function<void(uint64_t)>& task) {
    std::lock_guard<std::mutex> caller(callers_);
    if (size_ == 1 || count <= 1) return Job(task, count, 1).drain(0);
    Job job(task, count, size_);
    const OnCores here(cores_);
    start_threads();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = &job;
        ++jobs_begun_;
    }
    wake_.notify_all();
    job.drain(0);
    wait_for_threads(job);
}

// The caller waits only for threads that work on the job. A thread that wakes later finds no job.
void Pool::wait_for_threads(const Job& job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = nullptr;
    }
    const auto until = std::chrono::steady_clock::now() + kSpinTime;
    while (job.active.load(std::memory_order_acquire) != 0 && std::chrono::steady_clock::now() < until) pause();
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait(lock, [&job] { return job.active.load(std::memory_order_acquire) == 0; });
}

void Pool::start_threads() {
    try {
        while (threads_.size() + 1 < static_cast<size_t>(size_)) {
            threads_.emplace_back([this, own = threads_.size() + 1] { work(own); });
        }
    } catch (const std::system_error&) {
        // The system refuses more threads; the existing ones and the caller do the work with the same result.
    }
}

void Pool::work(size_t own) {
    const OnCores here(cores_);
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this, seen] { return stop_ || (job_ && jobs_begun_ != seen); });
        if (stop_) return;
        seen = jobs_begun_;
        Job& job = *job_;
        job.active.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        job.drain(own);
        lock.lock();
        if (job.active.fetch_sub(1, std::memory_order_release) == 1) left_.notify_all();
    }
}

}  // namespace infinity::adam
