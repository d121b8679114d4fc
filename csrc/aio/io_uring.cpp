// io_uring by its three system calls: two rings shared with the kernel, one slot a transfer.

#include "kernel_queue.h"

#if __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <mutex>

#include "registered.h"

namespace infinity::aio {
namespace {

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

// An owned mapping of ring memory.
class Mapping {
  public:
    Mapping(int fd, off_t what, size_t nbytes) : nbytes_(nbytes) {
        at_ = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
        if (at_ == MAP_FAILED) fail(errno);
    }
    ~Mapping() { ::munmap(at_, nbytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    template <class T>
    T* at(size_t offset) const {
        return reinterpret_cast<T*>(static_cast<char*>(at_) + offset);
    }

  private:
    void* at_;
    size_t nbytes_;
};

int setup(uint32_t depth, io_uring_params* params) {
    return static_cast<int>(::syscall(__NR_io_uring_setup, depth, params));
}

size_t rings_nbytes(const io_uring_params& params) {
    return std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                            params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
}

class IoUring final : public KernelQueue {
  public:
    IoUring(uint32_t depth, int event_fd)
        : fd_(setup(depth, &params_)),
          rings_(fd_.get(), IORING_OFF_SQ_RING, rings_nbytes(params_)),
          entries_(fd_.get(), IORING_OFF_SQES, params_.sq_entries * sizeof(io_uring_sqe)),
          registered_(fd_.get()) {
        if (!(params_.features & IORING_FEAT_SINGLE_MMAP) || !offers_read_and_write()) fail(ENOSYS);
        if (::syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_EVENTFD, &event_fd, 1) < 0) fail(errno);
    }

    void stage(uint64_t slot, const Transfer& transfer) override {
        uint32_t* const tail = rings_.at<uint32_t>(params_.sq_off.tail);
        const uint32_t index = *tail & *rings_.at<uint32_t>(params_.sq_off.ring_mask);
        io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
        entry = io_uring_sqe{};
        entry.opcode = transfer.write ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = transfer.fd;
        entry.addr = reinterpret_cast<uint64_t>(transfer.at);
        entry.len = static_cast<uint32_t>(transfer.nbytes);
        entry.off = static_cast<uint64_t>(transfer.offset);
        entry.user_data = slot;
        if (transfer.registered >= 0) {
            entry.fd = transfer.registered;
            entry.flags = IOSQE_FIXED_FILE;
        }
        const int buffer = registered_.buffer_of(transfer.at, transfer.nbytes);
        if (buffer >= 0) {
            entry.opcode = transfer.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
            entry.buf_index = static_cast<uint16_t>(buffer);
        }
        rings_.at<uint32_t>(params_.sq_off.array)[index] = index;
        __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
        ++staged_;
        nbytes_max_ = std::max(nbytes_max_, transfer.nbytes);
    }

    bool begin(std::vector<Completion>* refused) override {
        while (staged_ != 0) {
            const size_t count = begun_at_once(staged_, nbytes_max_);
            const long taken = ::syscall(__NR_io_uring_enter, fd_.get(), count, 0, 0, nullptr, 0);
            const int error = taken < 0 ? errno : EAGAIN;
            if (taken > 0) {
                staged_ -= static_cast<uint32_t>(taken);
            } else if (error == EAGAIN || error == EBUSY || error == ENOMEM) {
                return false;
            } else if (error != EINTR) {
                refuse_staged(error, refused);
            }
        }
        nbytes_max_ = 0;
        return true;
    }

    void reap(std::vector<Completion>* completions) override {
        uint32_t* const head = rings_.at<uint32_t>(params_.cq_off.head);
        const uint32_t tail = __atomic_load_n(rings_.at<uint32_t>(params_.cq_off.tail), __ATOMIC_ACQUIRE);
        const uint32_t mask = *rings_.at<uint32_t>(params_.cq_off.ring_mask);
        for (uint32_t at = *head; at != tail; ++at) {
            const io_uring_cqe& entry = rings_.at<io_uring_cqe>(params_.cq_off.cqes)[at & mask];
            completions->push_back(Completion{entry.user_data, entry.res});
        }
        __atomic_store_n(head, tail, __ATOMIC_RELEASE);
    }

    int register_buffer(char* at, uint64_t nbytes) override { return registered_.add_buffer(at, nbytes); }
    void unregister_buffer(char* at) override { registered_.remove_buffer(at); }
    int32_t register_file(int fd) override { return registered_.add_file(fd); }
    void unregister_file(int32_t number) override { registered_.remove_file(number); }

  private:
    // The ring does not work: take back its entries, so that the kernel does not begin them later.
    void refuse_staged(int error, std::vector<Completion>* refused) {
        uint32_t* const tail = rings_.at<uint32_t>(params_.sq_off.tail);
        const uint32_t mask = *rings_.at<uint32_t>(params_.sq_off.ring_mask);
        for (; staged_ != 0; --staged_) {
            const uint32_t index = (*tail - 1) & mask;
            refused->push_back(Completion{entries_.at<io_uring_sqe>(0)[index].user_data, -error});
            __atomic_store_n(tail, *tail - 1, __ATOMIC_RELEASE);
        }
    }

    // Linux 5.6 added both.
    bool offers_read_and_write() const {
        constexpr uint32_t count = 256;
        std::vector<char> memory(sizeof(io_uring_probe) + count * sizeof(io_uring_probe_op));
        auto* const probe = reinterpret_cast<io_uring_probe*>(memory.data());
        if (::syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_PROBE, probe, count) < 0) return false;
        const auto offers = [probe](uint8_t operation) {
            return operation <= probe->last_op && (probe->ops[operation].flags & IO_URING_OP_SUPPORTED);
        };
        return offers(IORING_OP_READ) && offers(IORING_OP_WRITE);
    }

    io_uring_params params_{};
    const Fd fd_;
    const Mapping rings_;
    const Mapping entries_;
    Registered registered_;
    uint32_t staged_ = 0;
    // Bytes of the largest staged transfer.
    uint64_t nbytes_max_ = 0;
};

}  // namespace

std::unique_ptr<KernelQueue> make_io_uring(uint32_t depth, int event_fd) {
    return std::make_unique<IoUring>(depth, event_fd);
}

}  // namespace infinity::aio

#else

namespace infinity::aio {

std::unique_ptr<KernelQueue> make_io_uring(uint32_t, int) {
    throw std::system_error(ENOSYS, std::generic_category());
}

}  // namespace infinity::aio

#endif
