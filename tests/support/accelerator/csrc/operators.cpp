// Operators that make memory, views and copies; all others go by the fallback in fallback.cpp.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "device.h"

namespace simulated {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
// A tensor of more rows than this counts as everything between its first and last byte.
constexpr size_t kRowsMax = 256;

// A storage that was resized may be smaller than its views. A GPU would read what lies there.
void check_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                         static_cast<size_t>(tensor.storage_offset()));
  TORCH_CHECK(needed <= tensor.storage().nbytes(), "out of bounds: the tensor needs ", needed, " bytes, its storage has ",
              tensor.storage().nbytes());
}

uintptr_t address_of(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()); }

at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> layout, std::optional<at::Device> device,
                               std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only CPU memory can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "simulated tensors are strided");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only CPU memory can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (!(self.sizes() == size)) {
    const size_t needed = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
    if (needed > self.storage().nbytes() && impl->numel() >= 0) at::native::resize_bytes_nocuda(self.storage(), needed);
    impl->set_sizes_contiguous(size);
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device() == self.device(), "the storage lies on ", source.device(), ", the tensor on ",
              self.device());
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  const size_t needed =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.numel() > 0 && needed > source.nbytes()) at::native::resize_bytes_nocuda(source, needed);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  return set_storage(self, source, 0, {static_cast<int64_t>(source.nbytes() / self.itemsize())}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage(self, storage, 0, {0}, {1});
}

// Move bytes between dense memory of host and device. Only pinned memory lets the host go on.
void transfer(const at::Tensor& device_side, const at::Tensor& host_side, bool up, bool non_blocking) {
  Runtime& runtime = Runtime::get();
  check_storage(device_side);
  const size_t nbytes = device_side.nbytes();
  const uintptr_t on_device = address_of(device_side), on_host = address_of(host_side);
  std::shared_ptr<void> owner;
  const bool pinned = runtime.is_pinned(on_host, nbytes, &owner);
  std::vector<Access> accesses{{on_device, on_device + nbytes, up}};
  if (pinned) accesses.push_back({on_host, on_host + nbytes, !up});
  Stream* stream = current_stream(device_side.device().index());
  runtime.submit(stream, up ? Kind::CopyUp : Kind::CopyDown, up ? "copy up" : "copy down", nbytes, accesses,
                 [=, keep = std::move(owner)] {
                   void* here = Runtime::host_view(on_device);
                   auto* there = reinterpret_cast<void*>(on_host);
                   up ? std::memcpy(here, there, nbytes) : std::memcpy(there, here, nbytes);
                 });
  if (!pinned) {
    runtime.synchronize(stream, up ? "pageable copy up" : "pageable copy down");
  } else if (!non_blocking) {
    runtime.synchronize(stream, up ? "blocking copy up" : "blocking copy down");
  }
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || (a.strides() == b.strides() && a.is_non_overlapping_and_dense());
}

void copy_up(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::Tensor cast = source.to(target.scalar_type());
  if (same_layout(cast, target)) {
    transfer(target, cast, true, non_blocking);
    return;
  }
  if (target.is_contiguous()) {
    transfer(target, cast.contiguous(), true, non_blocking);
    return;
  }
  at::Tensor dense = at::empty(target.sizes(), target.options());
  transfer(dense, cast.contiguous(), true, non_blocking);
  target.copy_(dense);
}

void copy_down(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::Tensor cast = source.to(target.scalar_type());
  if (same_layout(cast, target)) {
    transfer(cast, target, false, non_blocking);
    return;
  }
  const at::Tensor dense = cast.contiguous();
  if (target.is_contiguous()) {
    transfer(dense, target, false, non_blocking);
    return;
  }
  at::Tensor host = at::empty(target.sizes(), target.options().pinned_memory(false));
  transfer(dense, host, false, false);
  target.copy_(host);
}

// Order `later` after everything that `earlier` has queued.
void order(Stream* earlier, Stream* later) {
  Event event;
  Runtime::get().record(&event, earlier);
  Runtime::get().block(&event, later);
}

void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  Runtime& runtime = Runtime::get();
  const bool across = source.device() != target.device();
  Stream* stream = current_stream(source.device().index());
  Stream* other = current_stream(target.device().index());
  std::vector<Access> accesses;
  add_accesses(source, false, &accesses);
  add_accesses(target, true, &accesses);
  const at::Tensor from = thread_view(source, thread_storage(source));
  const at::Tensor to = thread_view(
      target, source.storage().is_alias_of(target.storage()) ? from.storage() : thread_storage(target));
  // The copy runs on the source's stream, in turn with both.
  if (across) order(other, stream);
  runtime.submit(stream, across ? Kind::CopyAcross : Kind::Copy, across ? "copy across" : "copy_", target.nbytes(),
                 accesses, [from, to] { to.copy_(from); });
  if (across) order(stream, other);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0 || self.is_same(target)) return target;
  const at::Tensor source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  if (!source.is_privateuseone()) {
    TORCH_CHECK(source.is_cpu(), "copies come from the CPU or a simulated device");
    const c10::DeviceGuard guard(target.device());
    copy_up(source, target, non_blocking);
  } else if (!target.is_privateuseone()) {
    TORCH_CHECK(target.is_cpu(), "copies go to the CPU or a simulated device");
    const c10::DeviceGuard guard(source.device());
    copy_down(source, target, non_blocking);
  } else {
    copy_on_device(source, target);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Stream* stream = current_stream(self.device().index());
  std::vector<Access> accesses;
  add_accesses(self, false, &accesses);
  const at::Tensor there = thread_view(self, thread_storage(self));
  at::Tensor value = at::empty(self.sizes(), self.options().device(at::kCPU));
  Runtime::get().submit(stream, Kind::CopyDown, "item", self.nbytes(), accesses, [=] { value.copy_(there); });
  Runtime::get().synchronize(stream, "item");
  return at::native::_local_scalar_dense_cpu(value);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  Runtime::get().record_use(reinterpret_cast<uintptr_t>(self.storage().data()), stream_of(stream));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, mask_options)};
  if (p == 1) return {at::zeros_like(input), at::zeros_like(input, mask_options)};
  at::Tensor mask = at::empty_like(input, mask_options).bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(1 / (1 - p)), mask};
}

}  // namespace

void add_accesses(const at::Tensor& tensor, bool write, std::vector<Access>* accesses) {
  if (tensor.numel() == 0) return;
  const uintptr_t begin = address_of(tensor);
  const int64_t item = static_cast<int64_t>(tensor.itemsize());
  // Dimensions from the innermost; those that continue the row before them are one with it.
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != 0) dims.emplace_back(tensor.stride(dim) * item, tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t row = item;
  size_t first = 0;
  while (first < dims.size() && dims[first].first <= row) {
    row = std::max(row, (dims[first].second - 1) * dims[first].first + row);
    ++first;
  }
  size_t rows = 1;
  int64_t reach = row;
  for (size_t dim = first; dim < dims.size(); ++dim) {
    rows *= static_cast<size_t>(dims[dim].second);
    reach += (dims[dim].second - 1) * dims[dim].first;
  }
  if (rows > kRowsMax) {
    accesses->push_back({begin, begin + reach, write});
    return;
  }
  std::vector<uintptr_t> starts{begin};
  for (size_t dim = first; dim < dims.size(); ++dim) {
    const size_t count = starts.size();
    for (int64_t step = 1; step < dims[dim].second; ++step) {
      for (size_t each = 0; each < count; ++each) starts.push_back(starts[each] + step * dims[dim].first);
    }
  }
  for (uintptr_t start : starts) accesses->push_back({start, start + row, write});
}

c10::Storage thread_storage(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto address = reinterpret_cast<uintptr_t>(storage.data());
  void* place = address == 0 ? nullptr : Runtime::host_view(address);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(place, c10::Device(c10::DeviceType::CPU)), nullptr, false);
}

at::Tensor thread_view(const at::Tensor& tensor, const c10::Storage& storage) {
  check_storage(tensor);
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
}

}  // namespace simulated
