// Requests that wait for their turn: highest priority first, then in order of arrival; handed out block by block.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "request.h"

namespace infinity::aio {

// Not synchronised: the owner's lock guards it.
class Pending {
  public:
    explicit Pending(uint64_t block_nbytes) : block_nbytes_(block_nbytes) {}

    bool empty() const { return requests_.empty(); }

    void push(std::shared_ptr<Request> request) {
        const Key key{-static_cast<int64_t>(request->priority), arrivals_++};
        requests_.emplace(key, Entry{std::move(request), 0});
    }

    // The next block, begun; without a request where nothing waits.
    Block pop() {
        while (!requests_.empty()) {
            const auto first = requests_.begin();
            Entry& entry = first->second;
            const uint64_t alignment = entry.request->target.alignment;
            const uint64_t step = alignment * ((block_nbytes_ + alignment - 1) / alignment);
            const uint64_t nbytes = entry.request->nbytes;
            Block block{entry.request, entry.next, nbytes - entry.next > step ? entry.next + step : nbytes};
            entry.next = block.end;
            const bool last = block.end == nbytes;
            const bool begun = block.request->begin_block(last);
            if (last || !begun) requests_.erase(first);
            if (begun) return block;
        }
        return Block{};
    }

    // Fails everything that waits and has not begun; what has begun gets no further block.
    void cancel(int32_t error) {
        for (auto& [key, entry] : requests_) entry.request->cancel(error, entry.next);
        requests_.clear();
    }

  private:
    using Key = std::pair<int64_t, uint64_t>;
    struct Entry {
        std::shared_ptr<Request> request;
        uint64_t next;
    };

    const uint64_t block_nbytes_;
    uint64_t arrivals_ = 0;
    std::map<Key, Entry> requests_;
};

}  // namespace infinity::aio
