// The device as torch sees it: guard, hooks, allocators, generators.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstring>

namespace simulated {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local int device_now = 0;
thread_local std::array<int64_t, kDevicesMax> streams_now{};

Runtime& runtime() { return Runtime::get(); }

int index_of(c10::DeviceIndex index) { return index < 0 ? device_now : index; }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(kType, device_now); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device.index());
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), streams_now[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index_of(device.index())), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    Stream* stream = runtime().next_pool_stream(index_of(device.index()));
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, stream->device), stream->id);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream old = getStream(stream.device());
    streams_now[index_of(stream.device_index())] = stream.id();
    return old;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event is recorded on a stream of its device");
    if (!*event) *event = new Event();
    runtime().record(static_cast<Event*>(*event), stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) runtime().block(static_cast<Event*>(event), stream_of(stream));
  }
  bool queryEvent(void* event) const override { return !event || runtime().query(static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) runtime().synchronize(static_cast<Event*>(event));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(runtime().device_count());
  }
  bool queryStream(const c10::Stream& stream) const override { return runtime().query(stream_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    runtime().synchronize(stream_of(stream), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    runtime().synchronize(index_of(device), "device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    runtime().record_use(reinterpret_cast<uintptr_t>(pointer.get()), stream_of(stream));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto* begin = static_cast<Event*>(first);
    auto* end = static_cast<Event*>(second);
    TORCH_CHECK(begin && end && begin->last && end->last, "both events must be recorded");
    TORCH_CHECK(begin->last->query() && end->last->query(), "both events must have passed");
    return std::chrono::duration<double, std::milli>(end->last->when - begin->last->when).count();
  }
};

c10::impl::DeviceGuardImplRegistrar guard_registrar(kType, new Guard());

struct DeviceAllocator final : public c10::DeviceAllocator {
  static void release(void* context) { runtime().free(reinterpret_cast<uintptr_t>(context)); }

  c10::DataPtr allocate(size_t nbytes) override {
    const int device = device_now;
    try {
      const uintptr_t begin = runtime().allocate(device, current_stream(device), nbytes);
      auto* pointer = reinterpret_cast<void*>(begin);
      return {pointer, pointer, &release, c10::Device(kType, device)};
    } catch (const OutOfMemory& error) {
      C10_THROW_ERROR(OutOfMemoryError, error.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    const auto to = reinterpret_cast<uintptr_t>(target), from = reinterpret_cast<uintptr_t>(source);
    int device = 0;
    TORCH_CHECK(runtime().owns(to, &device) && runtime().owns(from, nullptr), "both lie in device memory");
    runtime().submit(current_stream(device), Kind::Copy, "copy_data", nbytes,
                     {{from, from + nbytes, false}, {to, to + nbytes, true}},
                     [=] { std::memcpy(Runtime::host_view(to), Runtime::host_view(from), nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < runtime().device_count(); ++device) runtime().empty_cache(device);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    runtime().record_use(reinterpret_cast<uintptr_t>(pointer.get()), stream_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Stats stats = runtime().stats(index_of(device));
    c10::CachingDeviceAllocator::DeviceStats out;
    auto fill = [](decltype(out.allocation)& into, const Tally& tally) {
      into[0].current = tally.now;
      into[0].peak = tally.peak;
      into[0].allocated = tally.total;
      into[0].freed = tally.total - tally.now;
    };
    fill(out.allocation, stats.blocks);
    fill(out.active, stats.blocks);
    fill(out.segment, stats.segments);
    fill(out.allocated_bytes, stats.allocated);
    fill(out.active_bytes, stats.allocated);
    fill(out.requested_bytes, stats.allocated);
    fill(out.reserved_bytes, stats.reserved);
    out.num_alloc_retries = stats.retries;
    out.num_ooms = stats.failures;
    out.num_device_alloc = stats.segments.total;
    out.num_device_free = stats.segments.total - stats.segments.now;
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { runtime().reset_peak(index_of(device)); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const Stats stats = runtime().stats(index_of(device));
    const int64_t total = stats.limit ? stats.limit : Runtime::region_nbytes();
    return {static_cast<size_t>(total - stats.reserved.now), static_cast<size_t>(total)};
  }
};

DeviceAllocator allocator_instance;
REGISTER_ALLOCATOR(kType, &allocator_instance);

// Host memory that is pinned from birth. Copies that still run keep it.
struct PinnedAllocator final : public c10::Allocator {
  static void release(void* context) {
    if (context && runtime().usable()) runtime().unpin(reinterpret_cast<uintptr_t>(context));
  }
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    std::shared_ptr<void> memory(std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096), std::free);
    TORCH_CHECK(memory, "no memory to pin");
    void* pointer = memory.get();
    runtime().pin(reinterpret_cast<uintptr_t>(pointer), nbytes, std::move(memory));
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

PinnedAllocator pinned_instance;

// [Note: random numbers] An operator takes a seed when it is submitted, as a CUDA kernel takes an offset, and draws from
// a CPU generator of that seed when it runs. So the state is a seed and a count, and streams do not share an engine.
struct DeviceGenerator final : public c10::GeneratorImpl {
  explicit DeviceGenerator(int device)
      : GeneratorImpl(c10::Device(kType, static_cast<c10::DeviceIndex>(device)),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.is_cpu() &&
                    state.is_contiguous(),
                "the state of a simulated device's generator is [16] uint8 on the CPU");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* bytes = static_cast<char*>(state.data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  uint64_t draw() {
    // splitmix64 of seed and count.
    uint64_t x = seed_ + 0x9e3779b97f4a7c15ULL * ++offset_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(index_of(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(index_of(device)); }
  c10::Device getDeviceFromPtr(void* data) const override {
    int device = 0;
    TORCH_CHECK(runtime().owns(reinterpret_cast<uintptr_t>(data), &device), "the pointer is not of a simulated device");
    return c10::Device(kType, static_cast<c10::DeviceIndex>(device));
  }
  bool isPinnedPtr(const void* data) const override {
    return runtime().is_pinned(reinterpret_cast<uintptr_t>(data), 1, nullptr);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_instance; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(runtime().device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device_now); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto old = static_cast<c10::DeviceIndex>(device_now);
    if (device >= 0) set_current_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "the storage cannot be resized");
    const c10::Device device = impl->device();
    c10::OptionalDeviceGuard guard(device);
    c10::DataPtr data = nbytes == 0 ? c10::DataPtr(nullptr, device) : allocator_instance.allocate(nbytes);
    const size_t kept = std::min<size_t>(nbytes, impl->nbytes());
    if (kept > 0 && impl->data()) allocator_instance.copy_data(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};

struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} registered;

}  // namespace

int current_device() { return device_now; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < runtime().device_count(), "no such simulated device: ", device);
  device_now = device;
}

Stream* current_stream(int device) { return runtime().stream(device, streams_now[device]); }

Stream* stream_of(const c10::Stream& stream) {
  return runtime().stream(index_of(stream.device_index()), stream.id());
}

c10::Allocator* device_allocator() { return &allocator_instance; }

c10::Allocator* pinned_allocator() { return &pinned_instance; }

at::Generator new_generator(int device) { return at::make_generator<DeviceGenerator>(device); }

const at::Generator& default_generator(int device) {
  static std::array<at::Generator, kDevicesMax> all = [] {
    std::array<at::Generator, kDevicesMax> made;
    for (int index = 0; index < kDevicesMax; ++index) made[index] = new_generator(index);
    return made;
  }();
  return all.at(device);
}

uint64_t draw_seed(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto* own = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(own, "expected a generator of a simulated device, got one of ", generator.device());
  return own->draw();
}

}  // namespace simulated
