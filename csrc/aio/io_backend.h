// The interface of a back end, which moves blocks: a pool of threads with pread and pwrite, or one thread with a queue
// in the kernel.
#pragma once

#include <memory>

#include "kernel_queue.h"
#include "pending.h"
#include "request.h"

namespace infinity::aio {

class IoBackend {
  public:
    virtual ~IoBackend() = default;

    // Queues a request; returns the list in which it waits.
    virtual std::shared_ptr<Pending> push(std::shared_ptr<Request> request) = 0;

    // Completes the pushed requests for up to `timeout_s`, then ends the threads. Returns false if a thread hangs in a
    // system call or the kernel keeps a block. These are abandoned with the memory they use and never joined, and
    // requests that have not begun are cancelled with ETIMEDOUT.
    virtual bool close(double timeout_s) = 0;

    // The queue in the kernel, or null. Valid until the back end is destroyed.
    virtual KernelQueue* kernel() { return nullptr; }
};

// A pool of `threads` threads, which start when they are needed.
std::unique_ptr<IoBackend> make_thread_backend(int threads);

// A thread with `depth` blocks in flight in the kernel queue that `make` returns. Throws what `make` throws.
using KernelQueueMaker = std::unique_ptr<KernelQueue> (*)(uint32_t depth, int event_fd);
std::unique_ptr<IoBackend> make_kernel_backend(KernelQueueMaker make, uint32_t depth);

}  // namespace infinity::aio
