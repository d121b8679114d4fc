#include "queue.h"

namespace infinity::aio {

Queue::Queue(Backend backend, uint32_t depth, int threads, uint64_t block_nbytes)
    : threads_(make_thread_lane(threads, block_nbytes)) {
    if (backend == Backend::kIoUring) kernel_ = make_kernel_lane(make_io_uring, depth, block_nbytes);
    if (backend == Backend::kLibaio) kernel_ = make_kernel_lane(make_libaio, depth, block_nbytes);
}

void Queue::push(std::shared_ptr<Request> request) {
    if (kernel_ && request->is_direct()) {
        kernel_->push(std::move(request));
    } else {
        threads_->push(std::move(request));
    }
}

bool Queue::close(double timeout_s) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
    // Kernel first: it may hand remainders to the threads.
    const bool kernel_clean = !kernel_ || kernel_->close(timeout_s);
    const std::chrono::duration<double> left = until - std::chrono::steady_clock::now();
    return threads_->close(left.count() > 0 ? left.count() : 0.0) && kernel_clean;
}

}  // namespace infinity::aio
