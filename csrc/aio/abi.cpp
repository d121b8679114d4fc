// The C ABI that infinity/ops/aio_native.py calls. Functions never throw; errors are errno values.
//
// A queue is opened and closed once. Any thread may wait for a submitted request or query it any number of times. The
// caller releases a request once, in any state, before or after its queue is closed; a release does not stop the
// request. Buffers and descriptors belong to the caller and must live until the request is done.

#include <cerrno>
#include <memory>
#include <new>
#include <system_error>

#include "crc32c.h"
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

Request& request_of(void* handle) { return *static_cast<Handle*>(handle)->request; }

}  // namespace

// Opens a queue on `backend` (0 threads, 1 Linux AIO, 2 io_uring). Returns null with an errno value on failure: ENOSYS
// or EPERM if the system does not offer the back end. A kernel queue has `depth` blocks of `block_nbytes` in flight;
// `threads` threads serve the requests that it does not accept. At most `pending_max` requests are not done at a time.
INFINITY_EXPORT void* infinity_aio_open(int32_t backend, uint32_t depth, int32_t threads, uint64_t block_nbytes,
                                        uint64_t pending_max, int32_t* error) {
    std::unique_ptr<Queue> queue;
    *error = guarded([&] {
        queue = std::make_unique<Queue>(static_cast<Backend>(backend), depth, threads, block_nbytes, pending_max);
        return 0;
    });
    return queue.release();
}

// Frees the queue. Returns 1 if all threads have ended. Returns 0 if a thread hangs: it is abandoned with the memory
// that it uses, and requests that have not begun end with ETIMEDOUT.
INFINITY_EXPORT int32_t infinity_aio_close(void* queue, double timeout_s) {
    const std::unique_ptr<Queue> owned(static_cast<Queue*>(queue));
    return owned->close(timeout_s) ? 1 : 0;
}

// Submits a request, which the caller gives to infinity_aio_release. Returns null with an errno value on failure: EBUSY
// if `pending_max` requests are not done yet. `write` is 0 or 1, `check` a Check (request.h); `nbytes` is at least 1.
// Among waiting reads, and among waiting writes, greater `priority` begins first; a priority below 0 begins after both.
INFINITY_EXPORT void* infinity_aio_submit(void* queue, int32_t write, const Target* target, void* buffer,
                                          int64_t offset, uint64_t nbytes, int32_t priority, int32_t check,
                                          int32_t* error) {
    std::unique_ptr<Handle> handle;
    *error = guarded([&] {
        handle = std::make_unique<Handle>();
        *handle = static_cast<Queue*>(queue)->push(
            IoRequest{write != 0, *target, static_cast<char*>(buffer), offset, nbytes, priority,
                      static_cast<Check>(check)});
        return 0;
    });
    return *error == 0 ? handle.release() : nullptr;
}

// Returns 1 once another request would be accepted, 0 after `timeout_s`.
INFINITY_EXPORT int32_t infinity_aio_wait_room(void* queue, double timeout_s) {
    return static_cast<Queue*>(queue)->pending_limit().wait(timeout_s) ? 1 : 0;
}

INFINITY_EXPORT int32_t infinity_aio_done(void* request) { return request_of(request).done() ? 1 : 0; }

// Returns 1 once the request is done, 0 after `timeout_s`.
INFINITY_EXPORT int32_t infinity_aio_wait(void* request, double timeout_s) {
    return request_of(request).wait(timeout_s) ? 1 : 0;
}

// Moves the blocks of a request that have not begun before all requests of its kind, reads or writes, whatever their
// priority, and behind those urged before. Called when a thread waits for the request.
INFINITY_EXPORT void infinity_aio_urge(void* request) {
    const Handle& handle = *static_cast<Handle*>(request);
    std::lock_guard<std::mutex> lock(handle.pending->mutex);
    handle.pending->urge(*handle.request);
}

// Stops the blocks that have not begun and returns 1: the request ends with ECANCELED once the blocks in flight are
// over, and uses its buffer until then. Returns 0 without any effect if all blocks have begun.
INFINITY_EXPORT int32_t infinity_aio_cancel(void* request) {
    const Handle& handle = *static_cast<Handle*>(request);
    std::lock_guard<std::mutex> lock(handle.pending->mutex);
    return handle.pending->cancel(*handle.request, ECANCELED) ? 1 : 0;
}

// Writes the errno of a request that is done (0: success; -1: end of file) and the byte of the request at which it
// occurred.
INFINITY_EXPORT void infinity_aio_outcome(void* request, int32_t* error, uint64_t* position) {
    request_of(request).outcome(error, position);
}

// Returns the CRC-32C of the bytes that the check covers, of a checked request that is done without an error.
INFINITY_EXPORT uint32_t infinity_aio_checksum(void* request) { return request_of(request).checksum(); }

// Writes when the first block of a request that is done began (0: none did) and when the request was over, in
// nanoseconds of the steady clock.
INFINITY_EXPORT void infinity_aio_moments(void* request, int64_t* began_ns, int64_t* ended_ns) {
    request_of(request).moments(began_ns, ended_ns);
}

INFINITY_EXPORT void infinity_aio_release(void* request) { delete static_cast<Handle*>(request); }

// Registers memory with the kernel, which makes transfers cheaper. Returns 0 or an errno value (ENOSYS: this back end
// or kernel cannot; ENOMEM: more than the process may lock); transfers work without registration too. The memory must
// stay valid until it is unregistered, with no transfer in flight, or the queue is closed.
INFINITY_EXPORT int32_t infinity_aio_register_buffer(void* queue, void* buffer, uint64_t nbytes) {
    return guarded([&] {
        KernelQueue* const kernel = static_cast<Queue*>(queue)->kernel();
        return kernel ? kernel->register_buffer(static_cast<char*>(buffer), nbytes) : ENOSYS;
    });
}

INFINITY_EXPORT void infinity_aio_unregister_buffer(void* queue, void* buffer) {
    KernelQueue* const kernel = static_cast<Queue*>(queue)->kernel();
    if (kernel) kernel->unregister_buffer(static_cast<char*>(buffer));
}

// Registers a file. Returns its number, for Target::registered, or -errno. The kernel keeps the file open until it is
// unregistered or the queue is closed.
INFINITY_EXPORT int32_t infinity_aio_register_file(void* queue, int32_t fd) {
    KernelQueue* const kernel = static_cast<Queue*>(queue)->kernel();
    return kernel ? kernel->register_file(fd) : -ENOSYS;
}

INFINITY_EXPORT void infinity_aio_unregister_file(void* queue, int32_t number) {
    KernelQueue* const kernel = static_cast<Queue*>(queue)->kernel();
    if (kernel) kernel->unregister_file(number);
}

// Returns the CRC-32C of earlier bytes with checksum `crc` (0: none) followed by these. `way`: 0 the fastest, 1 tables,
// 2 the processor's instruction.
INFINITY_EXPORT uint32_t infinity_aio_crc32c(uint32_t crc, const void* data, uint64_t nbytes, int32_t way) {
    if (way == 0) return crc32c(crc, data, nbytes);
    return way == 1 ? crc32c_by_tables(crc, data, nbytes) : crc32c_by_instruction(crc, data, nbytes);
}
