// What the parts of the torch back end share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

#include "runtime.h"

namespace simulated {

int current_device();
void set_current_device(int device);
Stream* current_stream(int device);
Stream* stream_of(const c10::Stream& stream);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// The device's default generator, and the seed of the next random operator that takes numbers from a generator.
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
uint64_t draw_seed(at::Generator generator);

// The bytes that a tensor covers: one range where they are dense, else its rows if they are few.
void add_accesses(const at::Tensor& tensor, bool write, std::vector<Access>* accesses);
// A tensor of the CPU over the same device memory, for device threads only.
at::Tensor thread_view(const at::Tensor& tensor, const c10::Storage& storage);
c10::Storage thread_storage(const at::Tensor& tensor);

at::Tensor empty_like_device(const at::Tensor& like, int device);

}  // namespace simulated
