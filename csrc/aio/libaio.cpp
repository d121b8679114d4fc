// Linux AIO by its system calls: asynchronous for O_DIRECT, and allowed in containers that block io_uring.

#include <linux/aio_abi.h>
#include <sys/syscall.h>

#include <vector>

#include "kernel_queue.h"

namespace infinity::aio {
namespace {

class Libaio final : public KernelQueue {
  public:
    Libaio(uint32_t depth, int event_fd) : event_fd_(event_fd), blocks_(depth) {
        if (::syscall(__NR_io_setup, depth, &context_) < 0) throw std::system_error(errno, std::generic_category());
    }
    ~Libaio() override { ::syscall(__NR_io_destroy, context_); }

    int begin(uint64_t slot, const Transfer& transfer) override {
        iocb& block = blocks_[slot];
        block = iocb{};
        block.aio_data = slot;
        block.aio_lio_opcode = transfer.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = static_cast<uint32_t>(transfer.fd);
        block.aio_buf = reinterpret_cast<uint64_t>(transfer.at);
        block.aio_nbytes = transfer.nbytes;
        block.aio_offset = transfer.offset;
        block.aio_flags = IOCB_FLAG_RESFD;
        block.aio_resfd = static_cast<uint32_t>(event_fd_);
        iocb* const list[] = {&block};
        for (;;) {
            const long begun = ::syscall(__NR_io_submit, context_, 1, list);
            if (begun == 1) return 0;
            if (begun == 0) return EAGAIN;
            if (errno != EINTR) return errno;
        }
    }

    bool reap(Completion* completion) override {
        io_event event{};
        timespec no_time{};
        if (::syscall(__NR_io_getevents, context_, 0, 1, &event, &no_time) != 1) return false;
        *completion = Completion{event.data, event.res};
        return true;
    }

  private:
    const int event_fd_;
    aio_context_t context_ = 0;
    std::vector<iocb> blocks_;
};

}  // namespace

std::unique_ptr<KernelQueue> make_libaio(uint32_t depth, int event_fd) {
    return std::make_unique<Libaio>(depth, event_fd);
}

}  // namespace infinity::aio
