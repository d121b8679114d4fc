// The C ABI: what infinity/ops/aio.py calls. Functions never throw; errors are errno values.
//
// A queue is opened, given requests, and closed once. A request is submitted, waited for or asked about any number of
// times by any thread, and released once, in any state, before or after its queue is closed; releasing one that is not
// done does not stop it. Buffers and descriptors belong to the caller, and must live until the request is done.

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

// A queue on `backend` (0 threads, 1 Linux AIO, 2 io_uring), or null and an errno value: ENOSYS or EPERM where the
// system does not offer the back end. `depth` blocks of `block_nbytes` are in flight in a kernel queue, `threads`
// threads serve what it does not take; at most `pending_max` requests are not done at a time.
INFINITY_EXPORT void* infinity_aio_open(int32_t backend, uint32_t depth, int32_t threads, uint64_t block_nbytes,
                                        uint64_t pending_max, int32_t* error) {
    std::unique_ptr<Queue> queue;
    *error = guarded([&] {
        queue = std::make_unique<Queue>(static_cast<Backend>(backend), depth, threads, block_nbytes, pending_max);
        return 0;
    });
    return queue.release();
}

// Frees the queue. 1 where all threads have ended, 0 where some hang and were left behind with what they use; requests
// not begun then end with ETIMEDOUT.
INFINITY_EXPORT int32_t infinity_aio_close(void* queue, double timeout_s) {
    const std::unique_ptr<Queue> owned(static_cast<Queue*>(queue));
    return owned->close(timeout_s) ? 1 : 0;
}

// A request to be given to infinity_aio_release, or null and an errno value: EBUSY where `pending_max` requests are
// not done yet. `write` is 0 or 1, `check` a Check (request.h); `nbytes` is at least 1. Of reads that wait, and of
// writes, those of greater `priority` begin first; with one below 0 they begin behind both.
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

// 1 where another request would be taken, 0 where that is not so for `timeout_s`.
INFINITY_EXPORT int32_t infinity_aio_wait_room(void* queue, double timeout_s) {
    return static_cast<Queue*>(queue)->pending_limit().wait(timeout_s) ? 1 : 0;
}

INFINITY_EXPORT int32_t infinity_aio_done(void* request) { return request_of(request).done() ? 1 : 0; }

// 1 when done, 0 after `timeout_s`.
INFINITY_EXPORT int32_t infinity_aio_wait(void* request, double timeout_s) {
    return request_of(request).wait(timeout_s) ? 1 : 0;
}

// Somebody waits for it: blocks that have not begun go before all requests of its kind, reads or writes, whatever their
// priority, behind those urged before.
INFINITY_EXPORT void infinity_aio_urge(void* request) {
    const Handle& handle = *static_cast<Handle*>(request);
    std::lock_guard<std::mutex> lock(handle.pending->mutex);
    handle.pending->urge(*handle.request);
}

// 1 where blocks had not begun and now never will: the request ends with ECANCELED once those in flight are over, and
// the buffer is in use until then. 0 where there were none: it ends as if nothing had happened.
INFINITY_EXPORT int32_t infinity_aio_cancel(void* request) {
    const Handle& handle = *static_cast<Handle*>(request);
    std::lock_guard<std::mutex> lock(handle.pending->mutex);
    return handle.pending->cancel(*handle.request, ECANCELED) ? 1 : 0;
}

// Of a request that is done: errno (0: fine; -1: the file ended) and the byte of the request that it befell.
INFINITY_EXPORT void infinity_aio_outcome(void* request, int32_t* error, uint64_t* position) {
    request_of(request).outcome(error, position);
}

// Of a checked request that is done without an error: the CRC-32C of the bytes that the check is of.
INFINITY_EXPORT uint32_t infinity_aio_checksum(void* request) { return request_of(request).checksum(); }

// Of a request that is done: when its first block began (0: none did) and when it was over, in nanoseconds of the
// steady clock.
INFINITY_EXPORT void infinity_aio_moments(void* request, int64_t* began_ns, int64_t* ended_ns) {
    request_of(request).moments(began_ns, ended_ns);
}

INFINITY_EXPORT void infinity_aio_release(void* request) { delete static_cast<Handle*>(request); }

// Makes memory known to the kernel, so that transfers in it cost less: 0, or an errno value where that cannot be had
// (ENOSYS: not this back end or kernel; ENOMEM: more than the process may lock). Everything works without. The memory
// stays as it is until it is unregistered, with nothing in flight in it, or the queue is closed.
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

// The same for a file: its number, for Target::registered, or -errno. The kernel keeps the file open until it is
// unregistered or the queue is closed.
INFINITY_EXPORT int32_t infinity_aio_register_file(void* queue, int32_t fd) {
    KernelQueue* const kernel = static_cast<Queue*>(queue)->kernel();
    return kernel ? kernel->register_file(fd) : -ENOSYS;
}

INFINITY_EXPORT void infinity_aio_unregister_file(void* queue, int32_t number) {
    KernelQueue* const kernel = static_cast<Queue*>(queue)->kernel();
    if (kernel) kernel->unregister_file(number);
}

// The CRC-32C of bytes behind others whose checksum is `crc` (0: none). `way`: 0 the fastest, 1 by tables, 2 by the
// processor's instruction for it.
INFINITY_EXPORT uint32_t infinity_aio_crc32c(uint32_t crc, const void* data, uint64_t nbytes, int32_t way) {
    if (way == 0) return crc32c(crc, data, nbytes);
    return way == 1 ? crc32c_by_tables(crc, data, nbytes) : crc32c_by_instruction(crc, data, nbytes);
}
