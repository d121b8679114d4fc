// The queue, which gives each request to the back end that serves it best.
#pragma once

#include <memory>

#include "io_backend.h"
#include "request.h"

namespace infinity::aio {

enum class Backend : int32_t { kThreads = 0, kLibaio = 1, kIoUring = 2 };

// The submitter's reference to a request and to the list in which it waits.
struct Handle {
    std::shared_ptr<Request> request;
    std::shared_ptr<Pending> pending;
};

class Queue {
  public:
    // Throws std::system_error if the system does not offer the back end.
    Queue(Backend backend, uint32_t depth, int threads, uint64_t block_nbytes, uint64_t pending_max);

    // Throws std::system_error with EBUSY if `pending_max` requests are not done yet.
    Handle push(const IoRequest& io);
    PendingLimit& pending_limit() { return *pending_limit_; }
    // See IoBackend::close.
    bool close(double timeout_s);
    // Null for Backend::kThreads.
    KernelQueue* kernel() { return kernel_ ? kernel_->kernel() : nullptr; }

  private:
    const uint64_t block_nbytes_;
    const std::shared_ptr<PendingLimit> pending_limit_;
    std::unique_ptr<IoBackend> threads_;
    // Serves aligned requests; null for Backend::kThreads.
    std::unique_ptr<IoBackend> kernel_;
};

}  // namespace infinity::aio
