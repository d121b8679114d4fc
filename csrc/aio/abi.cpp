// The C ABI: what infinity/ops/aio.py calls. Functions never throw; errors are errno values.

#include <cerrno>
#include <memory>
#include <new>
#include <system_error>

#include "queue.h"

#define INFINITY_EXPORT extern "C" __attribute__((visibility("default")))

using namespace infinity::aio;

namespace {

template <class Body>
int32_t guarded(const Body& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    } catch (const std::system_error& error) {
        return error.code().value();
    } catch (...) {
        return EIO;
    }
}

using Handle = std::shared_ptr<Request>;

}  // namespace

// A queue on `backend`, or null and an errno value: ENOSYS or EPERM where the system does not offer the back end.
INFINITY_EXPORT void* infinity_aio_open(int32_t backend, uint32_t depth, int32_t threads, uint64_t block_nbytes,
                                        int32_t* error) {
    std::unique_ptr<Queue> queue;
    *error = guarded([&] {
        queue = std::make_unique<Queue>(static_cast<Backend>(backend), depth, threads, block_nbytes);
        return 0;
    });
    return queue.release();
}

// Frees the queue. 1 where all threads have ended, 0 where some hang and were left behind with what they use.
INFINITY_EXPORT int32_t infinity_aio_close(void* queue, double timeout_s) {
    const std::unique_ptr<Queue> owned(static_cast<Queue*>(queue));
    return owned->close(timeout_s) ? 1 : 0;
}

// A request to be given to infinity_aio_release, or null and an errno value. `buffer` and the descriptors must live
// until the request is done.
INFINITY_EXPORT void* infinity_aio_submit(void* queue, int32_t write, const Target* target, void* buffer,
                                          int64_t offset, uint64_t nbytes, int32_t priority, int32_t* error) {
    std::unique_ptr<Handle> handle;
    *error = guarded([&] {
        handle = std::make_unique<Handle>(std::make_shared<Request>(write != 0, *target, static_cast<char*>(buffer),
                                                                    offset, nbytes, priority));
        static_cast<Queue*>(queue)->push(*handle);
        return 0;
    });
    return *error == 0 ? handle.release() : nullptr;
}

INFINITY_EXPORT int32_t infinity_aio_done(void* request) { return (*static_cast<Handle*>(request))->done() ? 1 : 0; }

// 1 when done, 0 after `timeout_s`.
INFINITY_EXPORT int32_t infinity_aio_wait(void* request, double timeout_s) {
    return (*static_cast<Handle*>(request))->wait(timeout_s) ? 1 : 0;
}

// Of a request that is done: errno (0: fine; -1: the file ended) and the byte of the request that it befell.
INFINITY_EXPORT void infinity_aio_outcome(void* request, int32_t* error, uint64_t* position) {
    (*static_cast<Handle*>(request))->outcome(error, position);
}

INFINITY_EXPORT void infinity_aio_release(void* request) { delete static_cast<Handle*>(request); }
