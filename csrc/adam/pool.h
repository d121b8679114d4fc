// A pool of threads for one fork and join per optimizer step.
//
// Threads start with the first job that has use for them, sleep between jobs and end with the pool. The caller works
// too, so that a pool of n has n - 1 threads of its own.
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
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Calls task(index) for every index below count, each once, on any thread; returns when all have returned. Calls
    // from several threads are served one after the other. `task` must not throw.
    void run(uint64_t count, const std::function<void(uint64_t)>& task);

  private:
    struct Job {
        const std::function<void(uint64_t)>* task;
        uint64_t count;
        std::atomic<uint64_t> next{0};
        // Threads inside the job; guarded by mutex_.
        int active = 0;

        void drain();
    };

    void start_threads();
    void work();

    const int size_;
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
