#include "registered.h"

#if __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace infinity::aio {
namespace {

constexpr size_t kPieces = 256;
constexpr size_t kFiles = 64;
// The kernel's limit on one registered piece of memory.
constexpr uint64_t kPieceNbytesMax = uint64_t{1} << 30;

long change(int ring_fd, unsigned int operation, void* what, unsigned int count) {
    return ::syscall(__NR_io_uring_register, ring_fd, operation, what, count);
}

}  // namespace

Registered::Registered(int ring_fd) : ring_fd_(ring_fd) {
    // Empty tables, which later calls fill without stopping the ring (files: Linux 5.5, memory: 5.19).
    std::vector<int32_t> none(kFiles, -1);
    if (change(ring_fd, IORING_REGISTER_FILES, none.data(), kFiles) == 0) files_.resize(kFiles);
#ifdef IORING_RSRC_REGISTER_SPARSE
    io_uring_rsrc_register table{};
    table.nr = kPieces;
    table.flags = IORING_RSRC_REGISTER_SPARSE;
    if (change(ring_fd, IORING_REGISTER_BUFFERS2, &table, sizeof table) == 0) pieces_.resize(kPieces);
#endif
}

int Registered::add_buffer(char* at, uint64_t nbytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (pieces_.empty()) return ENOSYS;
    size_t number = 0;
    for (uint64_t begin = 0; begin < nbytes; begin += kPieceNbytesMax) {
        while (number < pieces_.size() && pieces_[number].nbytes != 0) ++number;
        const Piece piece{at, at + begin, std::min(nbytes - begin, kPieceNbytesMax)};
        const int error = number == pieces_.size() ? ENOSPC : set_piece(number, piece);
        if (error != 0) {
            lock.unlock();
            remove_buffer(at);
            return error;
        }
    }
    return 0;
}

void Registered::remove_buffer(char* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t number = 0; number < pieces_.size(); ++number) {
        if (pieces_[number].nbytes != 0 && pieces_[number].owner == at) set_piece(number, Piece{});
    }
}

int Registered::buffer_of(const char* at, uint64_t nbytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t number = 0; number < pieces_.size(); ++number) {
        const Piece& piece = pieces_[number];
        if (piece.nbytes != 0 && at >= piece.at && at + nbytes <= piece.at + piece.nbytes) {
            return static_cast<int>(number);
        }
    }
    return -1;
}

int32_t Registered::add_file(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto place = std::find(files_.begin(), files_.end(), false);
    if (place == files_.end()) return -ENOSPC;
    const auto number = static_cast<size_t>(place - files_.begin());
    const int error = set_file(number, fd);
    if (error != 0) return -error;
    *place = true;
    return static_cast<int32_t>(number);
}

void Registered::remove_file(int32_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto place = static_cast<size_t>(number);
    if (place < files_.size() && files_[place] && set_file(place, -1) == 0) files_[place] = false;
}

int Registered::set_piece(size_t number, const Piece& piece) {
#ifdef IORING_RSRC_REGISTER_SPARSE
    iovec memory{piece.at, piece.nbytes};
    io_uring_rsrc_update2 update{};
    update.offset = static_cast<uint32_t>(number);
    update.data = reinterpret_cast<uint64_t>(&memory);
    update.nr = 1;
    if (change(ring_fd_, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) < 0) return errno;
    pieces_[number] = piece;
    return 0;
#else
    (void)number, (void)piece;
    return ENOSYS;
#endif
}

int Registered::set_file(size_t number, int fd) const {
    io_uring_files_update update{};
    update.offset = static_cast<uint32_t>(number);
    update.fds = reinterpret_cast<uint64_t>(&fd);
    return change(ring_fd_, IORING_REGISTER_FILES_UPDATE, &update, 1) < 0 ? errno : 0;
}

}  // namespace infinity::aio

#endif
