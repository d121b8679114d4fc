// Requests that wait for their turn: highest priority first, then in order of arrival; handed out block by block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "request.h"

namespace infinity::aio {

// Not synchronised: `mutex` is for its owner, who holds it around every call.
class Pending {
  public:
    bool empty() const { return requests_.empty(); }

    void push(std::shared_ptr<Request> request) {
        request->rank = -static_cast<int64_t>(request->order.priority);
        request->arrival = arrivals_++;
        const Key key = key_of(*request);
        requests_.emplace(key, Entry{std::move(request), 0});
    }

    // The next block, begun; without a request where nothing waits.
    Block pop() {
        while (!requests_.empty()) {
            const auto first = requests_.begin();
            Entry& entry = first->second;
            const Request& request = *entry.request;
            const uint64_t nbytes = request.order.nbytes;
            const uint64_t end = entry.next + std::min(nbytes - entry.next, request.block_nbytes);
            Block block{entry.request, entry.next, entry.next, end};
            entry.next = end;
            const bool last = end == nbytes;
            const bool begun = block.request->begin_block(last);
            if (last || !begun) requests_.erase(first);
            if (begun) return block;
        }
        return Block{};
    }

    // Puts a request that waits before all that nobody waits for.
    void urge(const Request& request) {
        auto waiting = requests_.extract(key_of(request));
        if (waiting.empty()) return;
        Request& raised = *waiting.mapped().request;
        // Below what any priority gives.
        raised.rank = -static_cast<int64_t>(std::numeric_limits<int32_t>::max()) - 1;
        waiting.key() = key_of(raised);
        requests_.insert(std::move(waiting));
    }

    // What of a request has not begun does not begin. False where all of it has.
    bool cancel(const Request& request, int32_t error) {
        const auto found = requests_.find(key_of(request));
        if (found == requests_.end()) return false;
        const Entry entry = std::move(found->second);
        requests_.erase(found);
        entry.request->cancel(error, entry.next);
        return true;
    }

    // The same for every request.
    void cancel_all(int32_t error) {
        for (auto& [key, entry] : requests_) entry.request->cancel(error, entry.next);
        requests_.clear();
    }

    std::mutex mutex;

  private:
    using Key = std::pair<int64_t, uint64_t>;
    struct Entry {
        std::shared_ptr<Request> request;
        // First byte that has not begun.
        uint64_t next;
    };
    static Key key_of(const Request& request) { return {request.rank, request.arrival}; }

    uint64_t arrivals_ = 0;
    std::map<Key, Entry> requests_;
};

}  // namespace infinity::aio
