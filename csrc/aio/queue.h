// The queue: sends each request down the lane that serves it best.
#pragma once

#include <memory>

#include "lane.h"
#include "request.h"

namespace infinity::aio {

enum class Backend : int32_t { kThreads = 0, kLibaio = 1, kIoUring = 2 };

// A request as its submitter holds it, and where it waits.
struct Handle {
    std::shared_ptr<Request> request;
    std::shared_ptr<Pending> pending;
};

class Queue {
  public:
    // Throws std::system_error where the system does not offer the back end.
    Queue(Backend backend, uint32_t depth, int threads, uint64_t block_nbytes, uint64_t pending_max);

    // Throws std::system_error with EBUSY where `pending_max` requests are not done yet.
    Handle push(const Order& order);
    Room& room() { return *room_; }
    // See Lane::close.
    bool close(double timeout_s);
    // Null for Backend::kThreads.
    KernelQueue* kernel() { return kernel_ ? kernel_->kernel() : nullptr; }

  private:
    const uint64_t block_nbytes_;
    const std::shared_ptr<Room> room_;
    std::unique_ptr<Lane> threads_;
    // Serves aligned requests; null for Backend::kThreads.
    std::unique_ptr<Lane> kernel_;
};

}  // namespace infinity::aio
