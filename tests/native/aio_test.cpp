// csrc/aio through its C ABI, for the sanitizers: every back end that the system offers, several submitters, requests
// of mixed sizes and priorities against a byte oracle, and what happens around the edges: cancellation, a full queue,
// close with requests in flight, rough and hanging system calls.
//
//   aio_test DIRECTORY          what returns everything
//   aio_test DIRECTORY hangs    what must leave memory behind, because the kernel may still write to it

#include "../../csrc/aio/abi.cpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "faults.h"

namespace {

constexpr uint64_t kBlock = 64 << 10;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kSlot = 1 << 20;
constexpr int kSlots = 6;
constexpr int kSubmitters = 3;
constexpr double kLong = 60.0;

uint32_t next_number(uint64_t* state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(*state >> 33);
}

struct TestFile {
    explicit TestFile(const std::string& directory) {
        std::string path = directory + "/aio-test-XXXXXX";
        buffered = ::mkstemp(path.data());
        CHECK(buffered >= 0);
        clear();
        direct = ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
        ::unlink(path.c_str());
    }
    ~TestFile() {
        ::close(buffered);
        if (direct >= 0) ::close(direct);
    }
    // Nothing but zeros, as every submitter takes it to be.
    void clear() const {
        CHECK(::ftruncate(buffered, 0) == 0);
        CHECK(::ftruncate(buffered, kSubmitters * kSlots * kSlot) == 0);
    }
    Target target() const { return Target{direct, buffered, kPage, kPage, -1}; }

    int buffered;
    int direct;
};

// Memory of exact size, `shift` bytes behind a page.
class Memory {
  public:
    Memory(uint64_t nbytes, uint64_t shift)
        : whole_(static_cast<char*>(::aligned_alloc(kPage, (nbytes + shift + kPage - 1) / kPage * kPage))),
          at_(whole_ + shift) {}
    Memory(const Memory&) = delete;
    ~Memory() { ::free(whole_); }
    char* at() const { return at_; }

  private:
    char* const whole_;
    char* const at_;
};

void* open_queue(int32_t backend, uint32_t depth = 8, int threads = 3, uint64_t pending_max = 1000) {
    int32_t error = 0;
    void* const queue = infinity_aio_open(backend, depth, threads, kBlock, pending_max, &error);
    CHECK((queue != nullptr) == (error == 0));
    return queue;
}

void* submit(void* queue, bool write, const Target& target, char* at, uint64_t offset, uint64_t nbytes,
             int32_t priority = 0, int32_t check = 0) {
    int32_t error = 0;
    void* const request = infinity_aio_submit(queue, write, &target, at, static_cast<int64_t>(offset), nbytes,
                                              priority, check, &error);
    CHECK((request != nullptr) == (error == 0));
    return request;
}

int32_t outcome(void* request) {
    CHECK(infinity_aio_wait(request, kLong));
    CHECK(infinity_aio_done(request));
    int32_t error = 0;
    uint64_t position = 0;
    infinity_aio_outcome(request, &error, &position);
    return error;
}

// The checksum of one line of 64 bytes of each page.
uint32_t sample(const char* at, uint64_t nbytes) {
    uint32_t crc = 0;
    for (uint64_t page = 0; page * kPage < nbytes; ++page) {
        const uint64_t line = page * kPage + page * 37 % 64 * 64;
        if (line < nbytes) crc = infinity_aio_crc32c(crc, at + line, std::min<uint64_t>(64, nbytes - line), 1);
    }
    return crc;
}

// One submitter: rounds of one request a slot, all in flight together, each a write or a read that is compared.
void traffic(void* queue, const Target& target, int submitter, int rounds) {
    static constexpr uint64_t kSizes[] = {1, 511, 512, 4096, 4097, 65536, 262144, 716928};
    uint64_t seed = static_cast<uint64_t>(submitter) + 1;
    const uint64_t base = static_cast<uint64_t>(submitter) * kSlots * kSlot;
    std::vector<char> oracle(kSlots * kSlot);
    for (int round = 0; round < rounds; ++round) {
        std::vector<std::unique_ptr<Memory>> memory;
        std::vector<void*> requests;
        std::vector<uint64_t> places, sizes;
        const bool write = round % 2 == 0;
        for (int slot = 0; slot < kSlots; ++slot) {
            const uint64_t nbytes = kSizes[next_number(&seed) % 8];
            const bool aligned = next_number(&seed) % 4 != 0;
            const uint64_t inside = next_number(&seed) % (kSlot - nbytes);
            const uint64_t place = slot * kSlot + (aligned ? inside / kPage * kPage : inside);
            memory.push_back(std::make_unique<Memory>(nbytes, aligned ? 0 : 3));
            char* const at = memory.back()->at();
            for (uint64_t index = 0; write && index < nbytes; ++index) at[index] = static_cast<char>(next_number(&seed));
            if (write) std::copy(at, at + nbytes, oracle.begin() + static_cast<ptrdiff_t>(place));
            const auto priority = static_cast<int32_t>(next_number(&seed) % 3);
            requests.push_back(submit(queue, write, target, at, base + place, nbytes, priority, slot % 3));
            places.push_back(place);
            sizes.push_back(nbytes);
        }
        // Somebody else looks at the requests meanwhile.
        std::thread onlooker([&] {
            for (int look = 0; look < 20; ++look) {
                void* const request = requests[static_cast<size_t>(look) % requests.size()];
                infinity_aio_done(request);
                if (look % 3 == 0) infinity_aio_urge(request);
                if (look % 5 == 0) infinity_aio_wait(request, 1e-4);
            }
        });
        for (void* request : requests) CHECK(outcome(request) == 0);
        onlooker.join();
        for (size_t slot = 0; slot < requests.size(); ++slot) {
            const char* const at = memory[slot]->at();
            CHECK(std::memcmp(at, oracle.data() + places[slot], sizes[slot]) == 0);
            if (slot % 3 == 1) {
                CHECK(infinity_aio_checksum(requests[slot]) == infinity_aio_crc32c(0, at, sizes[slot], 1));
            } else if (slot % 3 == 2) {
                CHECK(infinity_aio_checksum(requests[slot]) == sample(at, sizes[slot]));
            }
            infinity_aio_release(requests[slot]);
        }
    }
}

void all_submitters(void* queue, const TestFile& file, int rounds) {
    file.clear();
    std::vector<std::thread> threads;
    for (int submitter = 0; submitter < kSubmitters; ++submitter) {
        threads.emplace_back([&, submitter] { traffic(queue, file.target(), submitter, rounds); });
    }
    for (std::thread& thread : threads) thread.join();
}

// Memory and a file that the kernel knows, others coming and going meanwhile.
void registered(int32_t backend, const TestFile& file) {
    void* const queue = open_queue(backend);
    const Memory memory(kSlot, 0), other(kSlot, 0);
    const int refused = infinity_aio_register_buffer(queue, memory.at(), kSlot);
    Target target = file.target();
    if (file.direct >= 0) target.registered = std::max(-1, infinity_aio_register_file(queue, file.direct));
    std::thread changing([&] {
        for (int round = 0; round < 20; ++round) {
            if (infinity_aio_register_buffer(queue, other.at(), kSlot) == 0) {
                infinity_aio_unregister_buffer(queue, other.at());
            }
        }
    });
    for (int round = 0; round < 20; ++round) {
        std::memset(memory.at(), round, kSlot);
        void* const written = submit(queue, true, target, memory.at(), 0, kSlot);
        CHECK(outcome(written) == 0);
        std::memset(memory.at(), 99, kSlot);
        void* const read = submit(queue, false, target, memory.at(), 0, kSlot);
        CHECK(outcome(read) == 0 && memory.at()[0] == round && memory.at()[kSlot - 1] == round);
        infinity_aio_release(written);
        infinity_aio_release(read);
    }
    changing.join();
    if (refused == 0) infinity_aio_unregister_buffer(queue, memory.at());
    if (target.registered >= 0) infinity_aio_unregister_file(queue, target.registered);
    CHECK(infinity_aio_close(queue, kLong) == 1);
}

// Cancelled by another thread while they run; some released before they are over.
void cancelled(int32_t backend, const TestFile& file) {
    void* const queue = open_queue(backend, 2, 1);
    const Memory memory(kSlot, 0);
    std::vector<void*> requests;
    for (int index = 0; index < 60; ++index) {
        requests.push_back(submit(queue, false, file.target(), memory.at(), 0, kSlot, index % 2));
    }
    int stopped = 0;
    std::thread canceller([&] {
        for (size_t index = 0; index < requests.size(); index += 3) stopped += infinity_aio_cancel(requests[index]);
    });
    for (size_t index = 1; index < requests.size(); index += 3) infinity_aio_release(requests[index]);
    for (size_t index = 2; index < requests.size(); index += 3) CHECK(outcome(requests[index]) == 0);
    canceller.join();
    for (size_t index = 0; index < requests.size(); index += 3) {
        const int32_t error = outcome(requests[index]);
        stopped -= error == ECANCELED;
        CHECK(error == 0 || error == ECANCELED);
        infinity_aio_release(requests[index]);
    }
    CHECK(stopped == 0);
    for (size_t index = 2; index < requests.size(); index += 3) infinity_aio_release(requests[index]);
    CHECK(infinity_aio_close(queue, kLong) == 1);
}

// A queue with room for four, closed with all of them in flight; errors reach whoever asks.
void edges(int32_t backend, const TestFile& file) {
    void* const queue = open_queue(backend, 2, 1, 4);
    const Memory memory(kSlot, 0);
    std::vector<void*> requests;
    int32_t error = 0;
    const Target target = file.target();
    for (int index = 0; index < 200; ++index) {
        void* const request = infinity_aio_submit(queue, 0, &target, memory.at(), 0, kSlot, 0, 0, &error);
        if (request) {
            requests.push_back(request);
        } else {
            CHECK(error == EBUSY);
            CHECK(infinity_aio_wait_room(queue, kLong));
        }
    }
    void* beyond = nullptr;
    while (!beyond) {
        CHECK(infinity_aio_wait_room(queue, kLong));
        beyond = infinity_aio_submit(queue, 0, &target, memory.at(), kSubmitters * kSlots * kSlot, 4096, 0, 0, &error);
    }
    Target broken = target;
    broken.direct_fd = broken.buffered_fd = -1;
    CHECK(infinity_aio_wait_room(queue, kLong));
    void* const bad = infinity_aio_submit(queue, 1, &broken, memory.at(), 0, 4096, 0, 0, &error);
    CHECK(infinity_aio_close(queue, kLong) == 1);
    CHECK(outcome(beyond) == kEndOfFile);
    CHECK(outcome(bad) == EBADF);
    for (void* request : requests) {
        CHECK(outcome(request) == 0);
        infinity_aio_release(request);
    }
    infinity_aio_release(beyond);
    infinity_aio_release(bad);
}

// The system call hangs, or the kernel keeps the blocks: close gives up in time, and says so.
void hanging(int32_t backend, const TestFile& file) {
    // Leaked where the kernel keeps it, as the callers do.
    auto* const memory = new Memory(kSlots * kSlot, 0);
    std::memset(memory->at(), 0, kSlots * kSlot);
    void* const queue = open_queue(backend, 2, 2);
    const int met = Faults::met();
    Faults::set(Fault::kHangs);
    std::vector<void*> requests;
    // Memory of its own for each: what a queue that was closed leaves to end may end at any time.
    for (int index = 0; index < kSlots; ++index) {
        requests.push_back(submit(queue, index % 2, file.target(), memory->at() + index * kSlot, 0, kSlot, 0, true));
    }
    CHECK(!infinity_aio_wait(requests[0], 0.05));
    CHECK(infinity_aio_cancel(requests[5]) == 1 && outcome(requests[5]) == ECANCELED);
    CHECK(infinity_aio_close(queue, 0.1) == 0);
    CHECK(Faults::met() > met);
    // Not begun: over. In a system call: not before that returns.
    CHECK(outcome(requests[4]) == ETIMEDOUT);
    CHECK(!infinity_aio_done(requests[0]));
    Faults::set(Fault::kNone);
    if (backend == 0) {
        for (void* request : requests) CHECK(outcome(request) != 0);
        delete memory;
    }
    for (void* request : requests) infinity_aio_release(request);
    // What the threads do last, after the requests are over.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

void everything(int32_t backend, const TestFile& file) {
    void* const queue = open_queue(backend);
    all_submitters(queue, file, 16);
    const int met = Faults::met();
    Faults::set(Fault::kRough);
    all_submitters(queue, file, 6);
    Faults::set(Fault::kNone);
    CHECK(Faults::met() > met);
    CHECK(infinity_aio_close(queue, kLong) == 1);
    registered(backend, file);
    cancelled(backend, file);
    edges(backend, file);
    // Queues that never had anything to do.
    for (int round = 0; round < 3; ++round) CHECK(infinity_aio_close(open_queue(backend), kLong) == 1);
}

}  // namespace

int main(int argument_count, char** arguments) {
    if (planted(argument_count, arguments)) return 0;
    CHECK(argument_count >= 2);
    const bool hangs = argument_count > 2 && std::string(arguments[2]) == "hangs";
    const TestFile file(arguments[1]);
    static constexpr const char* kNames[] = {"threads", "libaio", "io_uring"};
    for (int32_t backend = 0; backend < 3; ++backend) {
        int32_t error = 0;
        void* const queue = infinity_aio_open(backend, 2, 1, kBlock, 10, &error);
        if (!queue) {
            std::printf("aio: %s is not offered here: %s\n", kNames[backend], std::strerror(error));
            CHECK(backend != 0);
            continue;
        }
        CHECK(infinity_aio_close(queue, kLong) == 1);
        hangs ? hanging(backend, file) : everything(backend, file);
        std::printf("aio: %s, %s%s: fine\n", kNames[backend], file.direct >= 0 ? "O_DIRECT" : "page cache only",
                    hangs ? ", hanging" : "");
    }
    return 0;
}
