// The simulated accelerator without torch: device memory, streams and events as threads, the allocator, the log of
// queued work and the happens-before checker. See ../README.md.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

constexpr int kDevicesMax = 4;
// Streams of a device: the default one and a pool that is handed out in turn, as CUDA does.
constexpr int kPoolStreams = 32;
// Lane 0 of every vector clock is the host: all its threads are one lane.
constexpr int kHostLane = 0;

using Clock = std::vector<uint32_t>;

// Bytes that an operation reads or writes, by program address.
struct Access {
  uintptr_t begin;
  uintptr_t end;
  bool write;
};

enum class Kind { Operator, CopyUp, CopyDown, CopyAcross, Copy, Record, Wait, Free, HostWait, HostAccess };

// One line of the log. `waits` holds the ids of the operations whose end this one waits for.
struct Record {
  uint64_t id;
  Kind kind;
  int device;
  int64_t stream;
  std::string name;
  uint64_t nbytes;
  std::vector<uint64_t> waits;
  std::string line;
};

// A point of a stream's time that a stream or the host can wait for.
struct Recording {
  std::mutex mutex;
  std::condition_variable passed;
  bool done = false;
  std::chrono::steady_clock::time_point when;
  Clock clock;
  uint64_t id = 0;

  bool query();
  void mark();
  void wait();
};

// A torch event: its last recording.
struct Event {
  int device = 0;
  std::shared_ptr<Recording> last;
};

struct Task {
  std::function<void()> run;
  std::chrono::microseconds delay;
  std::string name;
};

struct Stream {
  int device;
  int64_t id;
  int lane;
  // The submission lock guards these.
  Clock clock;
  std::mt19937_64 delays;
  uint64_t last_id = 0;
  // The stream's own lock guards these.
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> queue;
  std::atomic<uint64_t> submitted{0};
  uint64_t completed = 0;
  bool stop = false;
  std::thread thread;
};

// A block of device memory that the allocator gave or keeps for its stream.
struct Block {
  uintptr_t begin;
  size_t size;
  size_t requested;
  int device;
  Stream* owner;
  uint64_t serial;
  bool allocated;
  std::string line;
  std::vector<Stream*> used_by;
  std::vector<std::shared_ptr<Recording>> pending;
};

struct Settings {
  uint64_t seed = 0;
  uint64_t copy_us = 0;
  uint64_t event_us = 0;
  uint64_t operator_us = 0;
  bool poison = true;
  bool lines = true;
  // Threads of a kernel; 0 leaves them alone.
  int kernel_threads = 0;
};

// A quantity now, at most, and all that was ever added.
struct Tally {
  int64_t now = 0;
  int64_t peak = 0;
  int64_t total = 0;

  void add(int64_t amount) {
    now += amount;
    total += amount;
    if (now > peak) peak = now;
  }
};

// Of one device: bytes that tensors have, bytes taken from the region, and the blocks of each.
struct Stats {
  Tally allocated;
  Tally reserved;
  Tally blocks;
  Tally segments;
  int64_t retries = 0;
  int64_t failures = 0;
  int64_t limit = 0;
};

struct Race {
  Record first, second;
  bool first_writes, second_writes;
  uintptr_t begin, end;
  std::string where;
};

class OutOfMemory : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The Python line that the calling thread executes, and the release of the interpreter's lock while the host waits.
// python.cpp has both. only_if_held: torch frees memory under locks of its own, where waiting for the interpreter's lock
// could be for ever.
std::string python_line(bool only_if_held = false);
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();

 private:
  void* state_;
};

// Run a device thread's loop with torch's thread-local state set for kernels. fallback.cpp has it.
void with_kernel_state(const std::function<void()>& loop);
// Make kernels of this thread use that many threads: the order of a sum depends on it. fallback.cpp has it.
void use_kernel_threads(int count);

struct Cells;
struct Device;

// Every public method is safe to call from several threads. A forked child may only free.
class Runtime {
 public:
  static Runtime& get();

  void configure(const Settings& settings, int devices, int64_t limit);
  int device_count() const { return devices_count_; }
  void reset();
  void close();
  bool usable() const { return !forked_ && !closed_; }
  void set_forked() { forked_ = true; }

  // Device memory. `host_view` maps a program address to where device threads find it.
  uintptr_t allocate(int device, Stream* stream, size_t nbytes);
  void free(uintptr_t begin) noexcept;
  void record_use(uintptr_t begin, Stream* stream);
  void empty_cache(int device);
  bool owns(uintptr_t address, int* device) const;
  static void* host_view(uintptr_t address);
  static int64_t region_nbytes();
  void fail_at(int64_t nth) { fail_at_ = nth; }
  Stats stats(int device);
  void reset_peak(int device);
  std::string describe(uintptr_t address, bool try_only);

  // Streams and events.
  Stream* stream(int device, int64_t id);
  Stream* next_pool_stream(int device);
  uint64_t submit(Stream* stream, Kind kind, const std::string& name, uint64_t nbytes,
                  const std::vector<Access>& accesses, std::function<void()> run);
  void record(Event* event, Stream* stream);
  void block(Event* event, Stream* stream);
  bool query(Event* event);
  bool query(Stream* stream);
  void synchronize(Event* event);
  void synchronize(Stream* stream, const std::string& reason);
  void synchronize(int device, const std::string& reason);

  // Host memory that copies reach without stopping the host. `owner` keeps it alive until copies have run.
  std::string pin(uintptr_t begin, size_t nbytes, std::shared_ptr<void> owner);
  std::shared_ptr<void> unpin(uintptr_t begin);
  bool is_pinned(uintptr_t begin, size_t nbytes, std::shared_ptr<void>* owner);
  void host_access(uintptr_t begin, size_t nbytes, bool write, const std::string& name);

  std::vector<Race> races();
  std::vector<Record> log();

 private:
  // What a stream was given last: its clock and id, and how much it was given and has done.
  struct Submitted {
    Clock clock;
    uint64_t id;
    uint64_t count;
    uint64_t completed;
  };

  Runtime();
  Submitted submitted(Stream* stream);
  Device& device(int index);
  uint64_t submit_locked(Stream* stream, Kind kind, const std::string& name, uint64_t nbytes,
                         const std::vector<Access>& accesses, std::function<void()> run, const std::string& line,
                         std::vector<uint64_t> waits = {});
  std::shared_ptr<Recording> record_locked(Stream* stream, const std::string& line);
  void access_locked(const Access& access, int lane, uint32_t tick, const Clock& clock, uint64_t id);
  void push_locked(Stream* stream, Kind kind, const std::string& name, std::function<void()> run);
  void poll_deferred_locked(Device& device);
  void poison_locked(Block* block);
  void release_cached_locked(Device& device);
  void host_passed(const Clock& clock, int device, int64_t stream, uint64_t id, const std::string& reason);
  void wait_for(Stream* stream, uint64_t submitted);
  void raise_pending();
  std::string line_now() const { return settings_.lines ? python_line() : std::string(); }
  void run(Stream* stream);
  std::string where_locked(uintptr_t address) const;

  std::mutex mutex_;
  Settings settings_;
  std::atomic<int> devices_count_{1};
  std::atomic<int> kernel_threads_{0};
  std::vector<std::unique_ptr<Device>> devices_;
  std::atomic<int64_t> fail_at_{0};
  std::atomic<bool> forked_{false};
  std::atomic<bool> closed_{false};
  Clock host_clock_;
  int lanes_ = 1;
  uint64_t serial_ = 0;
  std::unique_ptr<Cells> cells_;
  uint64_t first_id_ = 0;
  std::vector<Record> log_;
  std::vector<Race> races_;
  std::map<uintptr_t, std::pair<uintptr_t, std::shared_ptr<void>>> pinned_;
  std::mutex error_mutex_;
  std::string error_;
  std::atomic<bool> failed_{false};
};

}  // namespace simulated
