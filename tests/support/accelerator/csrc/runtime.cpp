#include "runtime.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cells.h"
#include "memory.h"

namespace simulated {

namespace {

// More tasks than this in one stream stop the host, as a full launch queue does.
constexpr uint64_t kQueueMax = 4096;
// Races beyond these say nothing new.
constexpr size_t kRacesMax = 1000;

std::string name_of(int device, int64_t stream) {
  return "simulated:" + std::to_string(device) + " stream " + std::to_string(stream);
}

// The first line: torch's errors go on with a backtrace.
std::string message(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

bool Recording::query() {
  std::lock_guard<std::mutex> lock(mutex);
  return done;
}

void Recording::mark() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    when = std::chrono::steady_clock::now();
  }
  passed.notify_all();
}

void Recording::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  passed.wait(lock, [this] { return done; });
}

Runtime& Runtime::get() {
  // Never destroyed: tensors that outlive main() still free their memory.
  static Runtime* runtime = new Runtime();
  return *runtime;
}

Runtime::Runtime() : cells_(new Cells()) {
  devices_.resize(kDevicesMax);
  host_clock_.assign(1, 0);
  pthread_atfork(nullptr, nullptr, [] { Runtime::get().set_forked(); });
}

Device& Runtime::device(int index) {
  if (index < 0 || index >= kDevicesMax) throw std::runtime_error("no such simulated device: " + std::to_string(index));
  auto& slot = devices_[index];
  if (!slot) {
    slot.reset(new Device(index));
    slot->streams.resize(kPoolStreams + 1);
  }
  return *slot;
}

Stream* Runtime::stream(int index, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& slot = device(index).streams.at(id);
  if (!slot) {
    slot.reset(new Stream());
    slot->device = index;
    slot->id = id;
    slot->lane = lanes_++;
    slot->delays.seed(settings_.seed * 1000003 + index * 1009 + id);
  }
  return slot.get();
}

Stream* Runtime::next_pool_stream(int index) {
  int64_t id;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Device& owner = device(index);
    id = 1 + owner.next_stream++ % kPoolStreams;
  }
  return stream(index, id);
}

void Runtime::configure(const Settings& settings, int devices, int64_t limit) {
  std::lock_guard<std::mutex> lock(mutex_);
  settings_ = settings;
  devices_count_ = devices;
  kernel_threads_ = settings.kernel_threads;
  for (int index = 0; index < devices; ++index) device(index).stats.limit = limit;
  for (auto& each : devices_) {
    if (!each) continue;
    for (auto& stream : each->streams) {
      if (stream) stream->delays.seed(settings.seed * 1000003 + stream->device * 1009 + stream->id);
    }
  }
}

void Runtime::raise_pending() {
  if (!failed_) return;
  std::lock_guard<std::mutex> lock(error_mutex_);
  failed_ = false;
  throw std::runtime_error(error_);
}

uint64_t Runtime::submit(Stream* stream, Kind kind, const std::string& name, uint64_t nbytes,
                         const std::vector<Access>& accesses, std::function<void()> run) {
  if (!usable()) throw std::runtime_error("the simulated accelerator cannot be used in a forked process or after exit");
  raise_pending();
  std::string line = line_now();
  if (stream->submitted > kQueueMax) wait_for(stream, stream->submitted - kQueueMax);
  std::lock_guard<std::mutex> lock(mutex_);
  return submit_locked(stream, kind, name, nbytes, accesses, std::move(run), line);
}

uint64_t Runtime::submit_locked(Stream* stream, Kind kind, const std::string& name, uint64_t nbytes,
                                const std::vector<Access>& accesses, std::function<void()> run,
                                const std::string& line, std::vector<uint64_t> waits) {
  join(stream->clock, host_clock_);
  tick(stream->clock, stream->lane);
  const uint64_t id = first_id_ + log_.size();
  log_.push_back({id, kind, stream->device, stream->id, name, nbytes, std::move(waits), line});
  stream->last_id = id;
  for (const auto& access : accesses) {
    access_locked(access, stream->lane, stream->clock[stream->lane], stream->clock, id);
  }
  push_locked(stream, kind, name, std::move(run));
  return id;
}

void Runtime::push_locked(Stream* stream, Kind kind, const std::string& name, std::function<void()> run) {
  uint64_t longest = settings_.operator_us;
  if (kind == Kind::Record || kind == Kind::Wait) longest = settings_.event_us;
  if (kind == Kind::CopyUp || kind == Kind::CopyDown || kind == Kind::CopyAcross) longest = settings_.copy_us;
  // Three of four operators run at once: they are many, and a few late ones show as much.
  const bool late = kind == Kind::Operator || kind == Kind::Copy || kind == Kind::Free ? stream->delays() % 4 == 0 : true;
  std::chrono::microseconds delay(longest == 0 || !late ? 0 : stream->delays() % (longest + 1));
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    if (!stream->thread.joinable()) {
      stream->thread = std::thread([this, stream] { with_kernel_state([this, stream] { this->run(stream); }); });
    }
    stream->queue.push_back({std::move(run), delay, name});
    ++stream->submitted;
  }
  stream->changed.notify_all();
}

void Runtime::run(Stream* stream) {
  pthread_setname_np(pthread_self(), ("sim" + std::to_string(stream->device) + "." + std::to_string(stream->id)).c_str());
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->changed.wait(lock, [stream] { return stream->stop || !stream->queue.empty(); });
      if (stream->queue.empty()) return;
      task = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    if (task.delay.count() > 0 && !closed_) std::this_thread::sleep_for(task.delay);
    use_kernel_threads(kernel_threads_);
    try {
      task.run();
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(error_mutex_);
      if (!failed_) error_ = task.name + " failed on " + name_of(stream->device, stream->id) + ": " + message(error);
      failed_ = true;
    }
    // What the task holds is released before the stream counts as idle.
    task.run = nullptr;
    {
      std::lock_guard<std::mutex> lock(stream->mutex);
      ++stream->completed;
    }
    stream->changed.notify_all();
  }
}

void Runtime::wait_for(Stream* stream, uint64_t submitted) {
  WithoutGil released;
  std::unique_lock<std::mutex> lock(stream->mutex);
  stream->changed.wait(lock, [&] { return stream->completed >= submitted; });
}

std::shared_ptr<Recording> Runtime::record_locked(Stream* stream, const std::string& line) {
  auto recording = std::make_shared<Recording>();
  recording->id = submit_locked(stream, Kind::Record, "record", 0, {}, [recording] { recording->mark(); }, line);
  recording->clock = stream->clock;
  return recording;
}

void Runtime::record(Event* event, Stream* stream) {
  if (!usable()) throw std::runtime_error("the simulated accelerator cannot be used in a forked process or after exit");
  raise_pending();
  std::string line = line_now();
  std::lock_guard<std::mutex> lock(mutex_);
  event->device = stream->device;
  event->last = record_locked(stream, line);
}

void Runtime::block(Event* event, Stream* stream) {
  if (!usable() || !event->last) return;
  std::string line = line_now();
  std::lock_guard<std::mutex> lock(mutex_);
  auto recording = event->last;
  join(stream->clock, recording->clock);
  submit_locked(stream, Kind::Wait, "wait", 0, {}, [recording] { recording->wait(); }, line, {recording->id});
}

void Runtime::host_passed(const Clock& clock, int device, int64_t stream, uint64_t id, const std::string& reason) {
  std::string line = line_now();
  std::lock_guard<std::mutex> lock(mutex_);
  join(host_clock_, clock);
  if (!reason.empty()) log_.push_back({first_id_ + log_.size(), Kind::HostWait, device, stream, reason, 0, {id}, line});
}

bool Runtime::query(Event* event) {
  if (!usable() || !event->last) return true;
  auto recording = event->last;
  if (!recording->query()) return false;
  host_passed(recording->clock, event->device, -1, recording->id, "");
  return true;
}

void Runtime::synchronize(Event* event) {
  if (!usable() || !event->last) return;
  auto recording = event->last;
  {
    WithoutGil released;
    recording->wait();
  }
  host_passed(recording->clock, event->device, -1, recording->id, "event");
  raise_pending();
}

Runtime::Submitted Runtime::submitted(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::lock_guard<std::mutex> own(stream->mutex);
  return {stream->clock, stream->last_id, stream->submitted, stream->completed};
}

bool Runtime::query(Stream* stream) {
  if (!usable()) return true;
  const Submitted last = submitted(stream);
  if (last.completed < last.count) return false;
  host_passed(last.clock, stream->device, stream->id, last.id, "");
  return true;
}

void Runtime::synchronize(Stream* stream, const std::string& reason) {
  if (!usable()) return;
  const Submitted last = submitted(stream);
  if (last.count == 0) return;
  wait_for(stream, last.count);
  host_passed(last.clock, stream->device, stream->id, last.id, reason);
  raise_pending();
}

void Runtime::synchronize(int index, const std::string& reason) {
  if (!usable()) return;
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : device(index).streams) {
      if (each) streams.push_back(each.get());
    }
  }
  for (Stream* each : streams) synchronize(each, reason);
}

void Runtime::reset() {
  for (int index = 0; index < kDevicesMax; ++index) {
    if (devices_[index]) empty_cache(index);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  fail_at_ = 0;
  failed_ = false;
  // Clocks and numbers go on, for events of before may still be waited for.
  first_id_ += log_.size();
  log_.clear();
  races_.clear();
  cells_->map.clear();
}

void Runtime::close() {
  if (!usable()) return;
  closed_ = true;
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : devices_) {
      if (!each) continue;
      for (auto& stream : each->streams) {
        if (stream) streams.push_back(stream.get());
      }
    }
  }
  WithoutGil released;
  for (Stream* stream : streams) {
    {
      std::lock_guard<std::mutex> lock(stream->mutex);
      stream->stop = true;
    }
    stream->changed.notify_all();
  }
  for (Stream* stream : streams) {
    if (stream->thread.joinable()) stream->thread.join();
  }
}

std::vector<Record> Runtime::log() {
  std::lock_guard<std::mutex> lock(mutex_);
  return log_;
}

std::vector<Race> Runtime::races() {
  std::lock_guard<std::mutex> lock(mutex_);
  return races_;
}

void Runtime::access_locked(const Access& access, int lane, uint32_t now, const Clock& clock, uint64_t id) {
  cells_->access(access, {lane, now, id}, clock, [&](const Epoch& earlier, bool earlier_writes, uintptr_t begin,
                                                     uintptr_t end) {
    if (races_.size() >= kRacesMax) return;
    for (const auto& race : races_) {
      if (race.first.id == earlier.id && race.second.id == id) return;
    }
    races_.push_back({log_[earlier.id - first_id_], log_[id - first_id_], earlier_writes, access.write, begin, end, where_locked(begin)});
  });
}

void Runtime::host_access(uintptr_t begin, size_t nbytes, bool write, const std::string& name) {
  std::string line = line_now();
  std::lock_guard<std::mutex> lock(mutex_);
  tick(host_clock_, kHostLane);
  const uint64_t id = first_id_ + log_.size();
  log_.push_back({id, Kind::HostAccess, -1, -1, name, nbytes, {}, line});
  access_locked({begin, begin + nbytes, write}, kHostLane, host_clock_[kHostLane], host_clock_, id);
}

std::string Runtime::pin(uintptr_t begin, size_t nbytes, std::shared_ptr<void> owner) {
  if (nbytes == 0) return "nothing to register";
  std::lock_guard<std::mutex> lock(mutex_);
  auto after = pinned_.lower_bound(begin);
  if (after != pinned_.end() && after->first < begin + nbytes) return "host memory is already registered";
  if (after != pinned_.begin() && std::prev(after)->second.first > begin) return "host memory is already registered";
  pinned_[begin] = {begin + nbytes, std::move(owner)};
  return "";
}

std::shared_ptr<void> Runtime::unpin(uintptr_t begin) {
  if (forked_) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = pinned_.find(begin);
  if (found == pinned_.end()) throw std::runtime_error("host memory is not registered");
  const uintptr_t end = found->second.first;
  auto owner = std::move(found->second.second);
  if (!owner) {
    // The memory may go: copies that still reach it must be known to have ended. An allocation is kept by its copies.
    tick(host_clock_, kHostLane);
    const uint64_t id = first_id_ + log_.size();
    log_.push_back({id, Kind::HostAccess, -1, -1, "unregister", end - begin, {}, ""});
    access_locked({begin, end, true}, kHostLane, host_clock_[kHostLane], host_clock_, id);
  }
  cells_->forget(begin, end);
  pinned_.erase(found);
  return owner;
}

bool Runtime::is_pinned(uintptr_t begin, size_t nbytes, std::shared_ptr<void>* owner) {
  if (forked_) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const uintptr_t end = begin + std::max<size_t>(nbytes, 1);
  auto region = pinned_.upper_bound(begin);
  if (region == pinned_.begin()) return false;
  --region;
  if (owner) *owner = region->second.second;
  // Registration in chunks makes neighbours, which one copy may span.
  while (region->second.first < end) {
    const uintptr_t reached = region->second.first;
    if (reached <= begin || ++region == pinned_.end() || region->first != reached) return false;
  }
  return true;
}

}  // namespace simulated
