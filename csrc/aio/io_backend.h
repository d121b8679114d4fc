// A backend moves blocks: a pool of threads with pread and pwrite, or one thread with a queue in the kernel.
#pragma once

#include <memory>

#include "kernel_queue.h"
#include "pending.h"
#include "request.h"

namespace infinity::aio {

class IoBackend {
  public:
    virtual ~IoBackend() = default;

    // Where the request waits, from now on.
    virtual std::shared_ptr<Pending> push(std::shared_ptr<Request> request) = 0;

    // Moves what has been pushed, for up to `timeout_s`, then ends the threads. False where a thread hangs in a system
    // call or the kernel keeps a block: those are left behind with the memory they use, requests not begun are
    // cancelled with ETIMEDOUT, and nothing is ever joined again.
    virtual bool close(double timeout_s) = 0;

    // The queue in the kernel, null where there is none. Valid until the backend is destroyed.
    virtual KernelQueue* kernel() { return nullptr; }
};

// `threads` threads, started when there is use for them.
std::unique_ptr<IoBackend> make_thread_backend(int threads);

// `depth` blocks in flight in the kernel queue that `make` makes. Throws what that throws.
using KernelQueueMaker = std::unique_ptr<KernelQueue> (*)(uint32_t depth, int event_fd);
std::unique_ptr<IoBackend> make_kernel_backend(KernelQueueMaker make, uint32_t depth);

}  // namespace infinity::aio
