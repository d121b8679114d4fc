#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cells.h"

namespace simulated {

namespace {

// Address space of a device; pages come with their first use.
constexpr size_t kRegion = size_t(32) << 30;
constexpr size_t kPage = 4096;

// [Note: two mappings] All devices lie in one reservation: kDevicesMax regions that the program holds pointers into and
// may never touch, then as many that map the same memory for device threads. So the second address is the first plus a
// constant.
uintptr_t reservation() {
  static const uintptr_t base = [] {
    void* place = mmap(nullptr, 2 * kDevicesMax * kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) throw std::runtime_error("the simulated accelerator gets no address space");
    return reinterpret_cast<uintptr_t>(place);
  }();
  return base;
}

int memory_files[kDevicesMax];

}  // namespace

size_t size_class(size_t nbytes) {
  const size_t step = nbytes < (size_t(1) << 20) ? 512 : size_t(64) << 10;
  return (nbytes + step - 1) / step * step;
}

Device::Device(int number) : index(number) {
  const uintptr_t program = reservation() + index * kRegion;
  const int file = memfd_create("simulated-accelerator", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kRegion) != 0) throw std::runtime_error("the simulated accelerator gets no memory");
  memory_files[index] = file;
  void* first = mmap(reinterpret_cast<void*>(program), kRegion, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
  void* second = mmap(Runtime::host_view(program), kRegion, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
  if (first == MAP_FAILED || second == MAP_FAILED) throw std::runtime_error("the simulated accelerator gets no mapping");
  madvise(second, kRegion, MADV_DONTDUMP);
  // A forked child shares nothing with the device.
  madvise(first, kRegion, MADV_DONTFORK);
  madvise(second, kRegion, MADV_DONTFORK);
  ranges[program] = kRegion;
}

uintptr_t Device::take_range(size_t size) {
  size = (size + kPage - 1) / kPage * kPage;
  for (auto range = ranges.begin(); range != ranges.end(); ++range) {
    if (range->second < size) continue;
    const uintptr_t begin = range->first;
    const size_t rest = range->second - size;
    ranges.erase(range);
    if (rest > 0) ranges[begin + size] = rest;
    return begin;
  }
  return 0;
}

void Device::give_range(uintptr_t begin, size_t size) {
  size = (size + kPage - 1) / kPage * kPage;
  fallocate(memory_files[index], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            begin - (reservation() + index * kRegion), size);
  auto range = ranges.emplace(begin, size).first;
  auto next = std::next(range);
  if (next != ranges.end() && range->first + range->second == next->first) {
    range->second += next->second;
    ranges.erase(next);
  }
  if (range != ranges.begin()) {
    auto previous = std::prev(range);
    if (previous->first + previous->second == range->first) {
      previous->second += range->second;
      ranges.erase(range);
    }
  }
}

void* Runtime::host_view(uintptr_t address) { return reinterpret_cast<void*>(address + kDevicesMax * kRegion); }

int64_t Runtime::region_nbytes() { return kRegion; }

bool Runtime::owns(uintptr_t address, int* device) const {
  const uintptr_t base = reservation();
  if (address < base || address >= base + kDevicesMax * kRegion) return false;
  if (device) *device = static_cast<int>((address - base) / kRegion);
  return true;
}

uintptr_t Runtime::allocate(int index, Stream* stream, size_t nbytes) {
  if (!usable()) throw std::runtime_error("the simulated accelerator cannot be used in a forked process or after exit");
  if (nbytes == 0) return 0;
  raise_pending();
  std::string line = line_now();
  const size_t size = size_class(nbytes);
  bool fails = fail_at_ > 0 && --fail_at_ == 0;
  for (int attempt = 0; attempt < 2; ++attempt) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Device& device = this->device(index);
      Stats& stats = device.stats;
      poll_deferred_locked(device);
      Block* block = nullptr;
      auto& cached = device.cached[{stream, size}];
      if (!fails && !cached.empty()) {
        block = cached.back();
        cached.pop_back();
      } else if (!fails && (stats.limit == 0 || stats.reserved.now + static_cast<int64_t>(size) <= stats.limit)) {
        const uintptr_t begin = device.take_range(size);
        if (begin != 0) {
          block = new Block{begin, size, 0, index, stream, 0, false, {}, {}, {}};
          device.blocks[begin].reset(block);
          if (settings_.poison) std::memset(host_view(begin), 0xff, size);
          stats.reserved.add(static_cast<int64_t>(size));
          stats.segments.add(1);
        }
      }
      if (block) {
        block->allocated = true;
        block->requested = nbytes;
        block->serial = ++serial_;
        block->line = line;
        stats.allocated.add(static_cast<int64_t>(size));
        stats.blocks.add(1);
        return block->begin;
      }
      if (attempt == 0 && !fails) ++stats.retries;
    }
    if (fails) break;
    if (attempt == 0) empty_cache(index);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Stats& stats = device(index).stats;
  ++stats.failures;
  throw OutOfMemory("simulated:" + std::to_string(index) + " out of memory. Tried to allocate " +
                    std::to_string(nbytes) + " bytes; " + std::to_string(stats.allocated.now) + " of " +
                    std::to_string(stats.reserved.now) + " reserved bytes are allocated, the limit is " +
                    (fails ? "a failure on request" : std::to_string(stats.limit)));
}

void Runtime::free(uintptr_t begin) noexcept {
  if (!usable()) return;
  std::string line = settings_.lines ? python_line(true) : std::string();
  std::lock_guard<std::mutex> lock(mutex_);
  int index = 0;
  if (!owns(begin, &index)) return;
  Device& device = this->device(index);
  auto found = device.blocks.find(begin);
  if (found == device.blocks.end() || !found->second->allocated) return;
  Block* block = found->second.get();
  block->allocated = false;
  block->line = line;
  device.stats.allocated.now -= static_cast<int64_t>(block->size);
  --device.stats.blocks.now;
  for (Stream* stream : block->used_by) block->pending.push_back(record_locked(stream, line));
  block->used_by.clear();
  if (block->pending.empty()) {
    poison_locked(block);
    device.cached[{block->owner, block->size}].push_back(block);
  } else {
    device.deferred.push_back(block);
  }
}

// The block's bytes become garbage where the stream that owns it stands: its next owner on that stream comes later.
void Runtime::poison_locked(Block* block) {
  for (auto& recording : block->pending) join(block->owner->clock, recording->clock);
  block->pending.clear();
  void* place = host_view(block->begin);
  const size_t size = block->size;
  const bool poison = settings_.poison;
  submit_locked(block->owner, Kind::Free, "free", size, {{block->begin, block->begin + size, true}},
                [place, size, poison] {
                  if (poison) std::memset(place, 0xff, size);
                },
                block->line);
}

void Runtime::poll_deferred_locked(Device& device) {
  auto rest = device.deferred.begin();
  for (Block* block : device.deferred) {
    bool passed = true;
    for (auto& recording : block->pending) passed = passed && recording->query();
    if (passed) {
      poison_locked(block);
      device.cached[{block->owner, block->size}].push_back(block);
    } else {
      *rest++ = block;
    }
  }
  device.deferred.erase(rest, device.deferred.end());
}

void Runtime::record_use(uintptr_t begin, Stream* stream) {
  if (!usable()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  int index = 0;
  if (!owns(begin, &index)) return;
  auto found = device(index).blocks.find(begin);
  if (found == device(index).blocks.end() || found->second->owner == stream) return;
  auto& used_by = found->second->used_by;
  if (std::find(used_by.begin(), used_by.end(), stream) == used_by.end()) used_by.push_back(stream);
}

void Runtime::empty_cache(int index) {
  synchronize(index, "empty_cache");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    poll_deferred_locked(device(index));
  }
  synchronize(index, "");
  std::lock_guard<std::mutex> lock(mutex_);
  release_cached_locked(device(index));
}

void Runtime::release_cached_locked(Device& device) {
  for (auto& [key, blocks] : device.cached) {
    auto rest = blocks.begin();
    for (Block* block : blocks) {
      // Freed by another thread since the streams were waited for: its poison is still to come.
      std::unique_lock<std::mutex> own(block->owner->mutex);
      if (block->owner->completed < block->owner->submitted) {
        *rest++ = block;
        continue;
      }
      own.unlock();
      cells_->forget(block->begin, block->begin + block->size);
      device.stats.reserved.now -= static_cast<int64_t>(block->size);
      --device.stats.segments.now;
      device.give_range(block->begin, block->size);
      device.blocks.erase(block->begin);
    }
    blocks.erase(rest, blocks.end());
  }
}

Stats Runtime::stats(int index) {
  std::lock_guard<std::mutex> lock(mutex_);
  return device(index).stats;
}

void Runtime::reset_peak(int index) {
  std::lock_guard<std::mutex> lock(mutex_);
  Stats& stats = device(index).stats;
  for (Tally* each : {&stats.allocated, &stats.reserved, &stats.blocks, &stats.segments}) each->peak = each->now;
}

std::string Runtime::where_locked(uintptr_t address) const {
  int index = 0;
  if (!owns(address, &index)) return "host memory";
  const auto& blocks = devices_[index]->blocks;
  auto found = blocks.upper_bound(address);
  if (found != blocks.begin()) {
    const Block& block = *std::prev(found)->second;
    if (address < block.begin + block.size) {
      return "simulated:" + std::to_string(index) + " allocation " + std::to_string(block.serial) + " of " +
             std::to_string(block.requested) + " bytes" + (block.allocated ? "" : ", freed") + ", at byte " +
             std::to_string(address - block.begin) + (block.line.empty() ? "" : " (" + block.line + ")");
    }
  }
  return "simulated:" + std::to_string(index) + ", no allocation";
}

std::string Runtime::describe(uintptr_t address, bool try_only) {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (try_only) {
    if (!lock.try_lock()) return "unknown: the allocator is busy";
  } else {
    lock.lock();
  }
  return where_locked(address);
}

}  // namespace simulated
