#include "queue.h"

namespace infinity::aio {

Queue::Queue(Backend backend, uint32_t depth, int threads, uint64_t block_nbytes, uint64_t pending_max)
    : block_nbytes_(block_nbytes),
      pending_limit_(std::make_shared<PendingLimit>(pending_max)),
      threads_(make_thread_backend(threads)) {
    if (backend == Backend::kIoUring) kernel_ = make_kernel_backend(make_io_uring, depth);
    if (backend == Backend::kLibaio) kernel_ = make_kernel_backend(make_libaio, depth);
}

Handle Queue::push(const IoRequest& io) {
    auto request = std::make_shared<Request>(io, block_nbytes_, pending_limit_);
    if (!pending_limit_->enter()) throw std::system_error(EBUSY, std::generic_category());
    try {
        IoBackend& backend = kernel_ && request->is_direct() ? *kernel_ : *threads_;
        auto pending = backend.push(request);
        return Handle{std::move(request), std::move(pending)};
    } catch (...) {
        pending_limit_->leave();
        throw;
    }
}

bool Queue::close(double timeout_s) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    const bool kernel_clean = !kernel_ || kernel_->close(timeout_s);
    const std::chrono::duration<double> left = until - std::chrono::steady_clock::now();
    return threads_->close(left.count() > 0 ? left.count() : 0.0) && kernel_clean;
}

}  // namespace infinity::aio
