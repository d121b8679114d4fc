// Files and memory that an io_uring knows: transfers on them spare the kernel looking up the file and pinning pages.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace infinity::aio {

class Registered {
  public:
    // `ring_fd` outlives this.
    explicit Registered(int ring_fd);

    // 0, or an errno value: the kernel is too old, or may not lock so much memory.
    int add_buffer(char* at, uint64_t nbytes);
    // Whatever was added at `at`.
    void remove_buffer(char* at);
    // The number of the piece of memory that holds all of these bytes, or -1.
    int buffer_of(const char* at, uint64_t nbytes) const;

    // A number, or -errno.
    int32_t add_file(int fd);
    void remove_file(int32_t number);

  private:
    // A piece of what was added at `owner`; of no bytes where the number is free.
    struct Piece {
        char* owner = nullptr;
        char* at = nullptr;
        uint64_t nbytes = 0;
    };
    int set_piece(size_t number, const Piece& piece);
    int set_file(size_t number, int fd) const;

    const int ring_fd_;
    mutable std::mutex mutex_;
    // By number; empty where the kernel offers no table.
    std::vector<Piece> pieces_;
    std::vector<bool> files_;
};

}  // namespace infinity::aio
