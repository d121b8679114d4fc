// Files and memory registered with an io_uring, so that the kernel need not look up files and pin pages at each
// transfer.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace infinity::aio {

class Registered {
  public:
    // `ring_fd` must outlive this object.
    explicit Registered(int ring_fd);

    // Returns 0 or an errno value: the kernel is too old, or the process may not lock so much memory.
    int add_buffer(char* at, uint64_t nbytes);
    // Removes the memory that was added at `at`.
    void remove_buffer(char* at);
    // Returns the number of the registered piece that holds all of these bytes, or -1.
    int buffer_of(const char* at, uint64_t nbytes) const;

    // Returns the number of the file, or -errno.
    int32_t add_file(int fd);
    void remove_file(int32_t number);

  private:
    // A registered piece of the memory that was added at `owner`; it has no bytes if its number is free.
    struct Piece {
        char* owner = nullptr;
        char* at = nullptr;
        uint64_t nbytes = 0;
    };
    int set_piece(size_t number, const Piece& piece);
    int set_file(size_t number, int fd) const;

    const int ring_fd_;
    mutable std::mutex mutex_;
    // Indexed by number; empty if the kernel offers no table.
    std::vector<Piece> pieces_;
    std::vector<bool> files_;
};

}  // namespace infinity::aio
