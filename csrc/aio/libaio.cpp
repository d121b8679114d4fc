// Linux AIO by its system calls: asynchronous with O_DIRECT, and permitted in containers that block io_uring.

#include <linux/aio_abi.h>
#include <sys/syscall.h>

#include "kernel_queue.h"

namespace infinity::aio {
namespace {

class Libaio final : public KernelQueue {
  public:
    Libaio(uint32_t depth, int event_fd) : event_fd_(event_fd), blocks_(depth), events_(depth) {
        if (::syscall(__NR_io_setup, depth, &context_) < 0) throw std::system_error(errno, std::generic_category());
    }
    ~Libaio() override { ::syscall(__NR_io_destroy, context_); }

    void stage(uint64_t slot, const Transfer& transfer) override {
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
        staged_.push_back(&block);
        nbytes_max_ = std::max(nbytes_max_, transfer.nbytes);
    }

    bool begin(std::vector<Completion>* refused) override {
        size_t begun = 0;
        bool patience = false;
        while (begun < staged_.size() && !patience) {
            const size_t count = begun_at_once(staged_.size() - begun, nbytes_max_);
            const long taken = ::syscall(__NR_io_submit, context_, count, staged_.data() + begun);
            const int error = taken < 0 ? errno : EAGAIN;
            if (taken > 0) {
                begun += static_cast<size_t>(taken);
            } else if (error == EAGAIN) {
                patience = true;
            } else if (error != EINTR) {
                // The kernel reports an error of the first entry of the list.
                refused->push_back(Completion{staged_[begun]->aio_data, -error});
                ++begun;
            }
        }
        staged_.erase(staged_.begin(), staged_.begin() + static_cast<ptrdiff_t>(begun));
        if (staged_.empty()) nbytes_max_ = 0;
        return !patience;
    }

    void reap(std::vector<Completion>* completions) override {
        timespec no_time{};
        const auto room = static_cast<long>(events_.size());
        for (long taken = room; taken == room || (taken < 0 && errno == EINTR);) {
            taken = ::syscall(__NR_io_getevents, context_, 0, room, events_.data(), &no_time);
            for (long index = 0; index < taken; ++index) {
                const io_event& event = events_[static_cast<size_t>(index)];
                completions->push_back(Completion{event.data, event.res});
            }
        }
    }

  private:
    const int event_fd_;
    aio_context_t context_ = 0;
    std::vector<iocb> blocks_;
    std::vector<iocb*> staged_;
    // Bytes of the largest staged transfer.
    uint64_t nbytes_max_ = 0;
    std::vector<io_event> events_;
};

}  // namespace

std::unique_ptr<KernelQueue> make_libaio(uint32_t depth, int event_fd) {
    return std::make_unique<Libaio>(depth, event_fd);
}

}  // namespace infinity::aio
