// io_uring by its three system calls: two rings shared with the kernel, one slot a transfer.

#include "kernel_queue.h"

#if __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <vector>

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
          entries_(fd_.get(), IORING_OFF_SQES, params_.sq_entries * sizeof(io_uring_sqe)) {
        if (!(params_.features & IORING_FEAT_SINGLE_MMAP) || !offers_read_and_write()) fail(ENOSYS);
        if (::syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_EVENTFD, &event_fd, 1) < 0) fail(errno);
    }

    int begin(uint64_t slot, const Transfer& transfer) override {
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
        rings_.at<uint32_t>(params_.sq_off.array)[index] = index;
        __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
        for (;;) {
            const long begun = ::syscall(__NR_io_uring_enter, fd_.get(), 1, 0, 0, nullptr, 0);
            if (begun == 1) return 0;
            if (begun < 0 && errno == EINTR) continue;
            // Not taken: the entry goes back, so that the next one is not taken for it.
            const int error = begun < 0 ? errno : EAGAIN;
            __atomic_store_n(tail, *tail - 1, __ATOMIC_RELEASE);
            return error == EBUSY ? EAGAIN : error;
        }
    }

    bool reap(Completion* completion) override {
        uint32_t* const head = rings_.at<uint32_t>(params_.cq_off.head);
        if (*head == __atomic_load_n(rings_.at<uint32_t>(params_.cq_off.tail), __ATOMIC_ACQUIRE)) return false;
        const uint32_t index = *head & *rings_.at<uint32_t>(params_.cq_off.ring_mask);
        const io_uring_cqe& entry = rings_.at<io_uring_cqe>(params_.cq_off.cqes)[index];
        *completion = Completion{entry.user_data, entry.res};
        __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
        return true;
    }

  private:
    // Both came with Linux 5.6.
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
