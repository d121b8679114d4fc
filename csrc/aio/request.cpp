#include "request.h"

#include <unistd.h>

#include <cerrno>
#include <thread>

namespace infinity::aio {

Verdict settle(Block& block, int64_t result) {
    if (result == -EINTR) return Verdict::kAgain;
    if (result == -EAGAIN) return Verdict::kLater;
    if (result <= 0) {
        block.request->block_over(result == 0 ? kEndOfFile : static_cast<int32_t>(-result), block.begin);
        return Verdict::kOver;
    }
    block.begin += static_cast<uint64_t>(result);
    if (block.begin < block.end) return Verdict::kAgain;
    block.request->block_over(0, 0);
    return Verdict::kOver;
}

void move_now(Block& block, const std::atomic<bool>& abandoned) {
    for (;;) {
        Request& request = *block.request;
        const int fd = block.descriptor();
        char* const at = request.buffer + block.begin;
        const size_t nbytes = block.end - block.begin;
        const off_t offset = static_cast<off_t>(request.offset + static_cast<int64_t>(block.begin));
        const ssize_t moved = request.write ? ::pwrite(fd, at, nbytes, offset) : ::pread(fd, at, nbytes, offset);
        switch (settle(block, moved < 0 ? -static_cast<int64_t>(errno) : moved)) {
            case Verdict::kOver: return;
            case Verdict::kAgain: break;
            case Verdict::kLater: std::this_thread::sleep_for(kPatience);
        }
        if (abandoned) return request.block_over(ETIMEDOUT, block.begin);
    }
}

}  // namespace infinity::aio
