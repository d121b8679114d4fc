// The queue: sends each request down the lane that serves it best.
#pragma once

#include <memory>

#include "lane.h"
#include "request.h"

namespace infinity::aio {

enum class Backend : int32_t { kThreads = 0, kLibaio = 1, kIoUring = 2 };

class Queue {
  public:
    // Throws std::system_error where the system does not offer the back end.
    Queue(Backend backend, uint32_t depth, int threads, uint64_t block_nbytes);

    void push(std::shared_ptr<Request> request);
    // See Lane::close.
    bool close(double timeout_s);

  private:
    std::unique_ptr<Lane> threads_;
    // Serves aligned requests; null for Backend::kThreads.
    std::unique_ptr<Lane> kernel_;
};

}  // namespace infinity::aio
