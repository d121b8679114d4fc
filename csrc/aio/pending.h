// Waiting requests, handed out block by block: urged ones first, then by priority, then in order of arrival. Reads and
// writes alternate whatever their priorities, because a drive moves more bytes with both in flight. A request with a
// priority below 0 that was not urged comes after all other reads and writes.
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

// Not synchronised: the owner holds `mutex` around every call.
class Pending {
  public:
    bool empty() const { return reads_.empty() && writes_.empty(); }

    void push(std::shared_ptr<Request> request) {
        request->rank = -static_cast<int64_t>(request->io.priority);
        request->arrival = arrivals_++;
        const Key key = key_of(*request);
        list_of(*request).emplace(key, Entry{request, 0});
    }

    // Begins the next block; returns a Block without a request if none waits.
    Block pop() {
        while (!empty()) {
            List& list = next_list();
            const auto first = list.begin();
            Entry& entry = first->second;
            const Request& request = *entry.request;
            const uint64_t nbytes = request.io.nbytes;
            const uint64_t end = entry.next + std::min(nbytes - entry.next, request.block_nbytes);
            Block block{entry.request, entry.next, entry.next, end};
            entry.next = end;
            const bool last = end == nbytes;
            const bool begun = block.request->begin_block(last);
            if (last || !begun) list.erase(first);
            if (!begun) continue;
            wrote_last_ = block.request->io.write;
            return block;
        }
        return Block{};
    }

    // Moves a waiting request before all that were not urged.
    void urge(const Request& request) {
        List& list = list_of(request);
        auto waiting = list.extract(key_of(request));
        if (waiting.empty()) return;
        Request& raised = *waiting.mapped().request;
        // Below the rank of every priority.
        raised.rank = -static_cast<int64_t>(std::numeric_limits<int32_t>::max()) - 1;
        waiting.key() = key_of(raised);
        list.insert(std::move(waiting));
    }

    // Stops the blocks of a request that have not begun; returns false if all have.
    bool cancel(const Request& request, int32_t error) {
        List& list = list_of(request);
        const auto found = list.find(key_of(request));
        if (found == list.end()) return false;
        const Entry entry = std::move(found->second);
        list.erase(found);
        entry.request->cancel(error, entry.next);
        return true;
    }

    // Stops the blocks of all requests that have not begun.
    void cancel_all(int32_t error) {
        for (List* list : {&reads_, &writes_}) {
            for (auto& [key, entry] : *list) entry.request->cancel(error, entry.next);
            list->clear();
        }
    }

    std::mutex mutex;

  private:
    using Key = std::pair<int64_t, uint64_t>;
    struct Entry {
        std::shared_ptr<Request> request;
        // First byte that has not begun.
        uint64_t next;
    };
    using List = std::map<Key, Entry>;

    List& list_of(const Request& request) { return request.io.write ? writes_ : reads_; }
    // The kind that was not served last, unless only one kind's first request has a priority below 0.
    List& next_list() {
        if (reads_.empty()) return writes_;
        if (writes_.empty()) return reads_;
        const int64_t read_rank = reads_.begin()->first.first;
        const int64_t write_rank = writes_.begin()->first.first;
        if ((read_rank > 0) != (write_rank > 0)) return read_rank > 0 ? writes_ : reads_;
        return wrote_last_ ? reads_ : writes_;
    }
    static Key key_of(const Request& request) { return {request.rank, request.arrival}; }

    uint64_t arrivals_ = 0;
    bool wrote_last_ = false;
    List reads_;
    List writes_;
};

}  // namespace infinity::aio
