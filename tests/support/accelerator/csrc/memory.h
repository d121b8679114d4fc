// A device: its memory of two mappings, the allocator's blocks, its streams.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "runtime.h"

namespace simulated {

struct Device {
  explicit Device(int index);

  int index;
  std::vector<std::unique_ptr<Stream>> streams;
  uint64_t next_stream = 0;
  Stats stats;
  // Blocks by program address; those that wait for their stream's next allocation; those that other streams still use.
  std::map<uintptr_t, std::unique_ptr<Block>> blocks;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> cached;
  std::vector<Block*> deferred;
  // Free ranges of the region, begin -> size.
  std::map<uintptr_t, size_t> ranges;

  uintptr_t take_range(size_t size);
  void give_range(uintptr_t begin, size_t size);
};

// Bytes that a request takes.
size_t size_class(size_t nbytes);

}  // namespace simulated
