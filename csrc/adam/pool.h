// A pool of threads for one fork and join in each optimizer step.
//
// Threads start with the first job that needs them, sleep between jobs and end with the pool. The caller works too, so
// a pool of size n has n - 1 threads of its own. Every thread has a contiguous share of a job's indices and takes from
// other shares once its own is done, so that a delayed thread does not delay the job.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace infinity::adam {

class Pool {
  public:
    // `cores`: the cores of the threads, and of a caller while it works; empty: their affinity does not change.
    Pool(int threads, std::vector<int> cores);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Calls task(index) once for every index below count, on any thread; returns when all calls have returned. A lock
    // serializes concurrent callers. `task` must not throw.
    void run(uint64_t count, const std::function<void(uint64_t)>& task);

  private:
    // Indices [next, end); on a separate cache line, because every thread updates its own share.
    struct alignas(64) Share {
        std::atomic<uint64_t> next;
        uint64_t end;
    };

    struct Job {
        const std::function<void(uint64_t)>* task;
        std::vector<Share> shares;
        // Threads that work on the job; changed under mutex_.
        std::atomic<int> active{0};

        Job(const std::function<void(uint64_t)>& job, uint64_t count, int threads);
        void drain(size_t own);
    };

    void start_threads();
    void work(size_t own);
    void wait_for_threads(const Job& job);

    const int size_;
    const std::vector<int> cores_;
    std::mutex callers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable left_;
    // The job that threads may join, or null; guarded by mutex_.
    Job* job_ = nullptr;
    uint64_t jobs_begun_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace infinity::adam
