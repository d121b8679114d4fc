// Vector clocks, and the last accesses to every byte: where the happens-before checker looks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "runtime.h"

namespace simulated {

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t lane = 0; lane < other.size(); ++lane) into[lane] = std::max(into[lane], other[lane]);
}

inline void tick(Clock& clock, int lane) {
  if (clock.size() <= static_cast<size_t>(lane)) clock.resize(lane + 1, 0);
  ++clock[lane];
}

// When an access happened: the lane's tick, and the operation's place in the log.
struct Epoch {
  int lane;
  uint32_t tick;
  uint64_t id;

  bool before(const Clock& clock) const {
    return static_cast<size_t>(lane) < clock.size() ? tick <= clock[lane] : tick == 0;
  }
};

struct Cells {
  struct Cell {
    uintptr_t end;
    bool written = false;
    Epoch write{};
    std::vector<Epoch> reads;
  };

  std::map<uintptr_t, Cell> map;

  // Make a cell boundary at `address`.
  void split(uintptr_t address) {
    auto cell = map.upper_bound(address);
    if (cell == map.begin()) return;
    --cell;
    if (cell->first == address || cell->second.end <= address) return;
    Cell right = cell->second;
    cell->second.end = address;
    map.emplace(address, std::move(right));
  }

  void forget(uintptr_t begin, uintptr_t end) {
    split(begin);
    split(end);
    map.erase(map.lower_bound(begin), map.lower_bound(end));
  }

  // Note one access; call `race(epoch, writes, begin, end)` for every earlier one that no edge orders before it.
  template <typename Report>
  void access(const Access& access, const Epoch& now, const Clock& clock, Report race) {
    if (access.begin >= access.end) return;
    split(access.begin);
    split(access.end);
    uintptr_t reached = access.begin;
    for (auto cell = map.lower_bound(access.begin); cell != map.end() && cell->first < access.end; ++cell) {
      if (cell->first > reached && !access.write) {
        cell = map.emplace(reached, Cell{cell->first, false, {}, {now}}).first;
        reached = cell->second.end;
        continue;
      }
      Cell& found = cell->second;
      reached = found.end;
      if (found.written && !found.write.before(clock)) race(found.write, true, cell->first, found.end);
      if (access.write) {
        for (const Epoch& read : found.reads) {
          if (!read.before(clock)) race(read, false, cell->first, found.end);
        }
      } else {
        auto same = std::find_if(found.reads.begin(), found.reads.end(),
                                 [&](const Epoch& read) { return read.lane == now.lane; });
        if (same == found.reads.end()) {
          found.reads.push_back(now);
        } else {
          *same = now;
        }
      }
    }
    if (access.write) {
      map.erase(map.lower_bound(access.begin), map.lower_bound(access.end));
      map.emplace(access.begin, Cell{access.end, true, now, {}});
    } else if (reached < access.end) {
      map.emplace(reached, Cell{access.end, false, {}, {now}});
    }
  }
};

}  // namespace simulated
