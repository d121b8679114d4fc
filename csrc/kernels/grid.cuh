// The CUDA features that the kernels use: function prefixes, IEEE rounding, work split over a grid, and error codes.
// tests/native/grid_on_host.h defines the same names for a C++ compiler, with a loop as the grid, so that tests run
// every line of a kernel except the launch without a device.
#ifndef INFINITY_GRID
#define INFINITY_GRID

#include <cuda_runtime_api.h>

#include <cstdint>

#define INFINITY_FN __device__ __forceinline__
#define INFINITY_SHARED __shared__
#define INFINITY_UNROLL _Pragma("unroll")
#define INFINITY_EXPORT extern "C" __attribute__((visibility("default")))

namespace infinity::kernels {
namespace {

// With any compiler flags, the intrinsics round once, to nearest even, keep denormals and are never contracted.
INFINITY_FN float fma_once(float a, float b, float c) { return __fmaf_rn(a, b, c); }
INFINITY_FN double fma_once(double a, double b, double c) { return __fma_rn(a, b, c); }
INFINITY_FN float product(float a, float b) { return __fmul_rn(a, b); }
INFINITY_FN float sum(float a, float b) { return __fadd_rn(a, b); }
INFINITY_FN float difference(float a, float b) { return __fsub_rn(a, b); }
INFINITY_FN float quotient(float a, float b) { return __fdiv_rn(a, b); }
INFINITY_FN float square_root(float a) { return __fsqrt_rn(a); }
INFINITY_FN double total(double a, double b) { return __dadd_rn(a, b); }

INFINITY_FN uint32_t bits_of(float value) { return __float_as_uint(value); }
INFINITY_FN float float_of(uint32_t bits) { return __uint_as_float(bits); }
// fp16 to fp32 is exact, denormals included; fp32 to fp16 rounds to nearest even.
INFINITY_FN float float_of_half(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}
INFINITY_FN uint16_t half_of_float(float value) {
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

INFINITY_FN void add_to_count(uint64_t* count, uint64_t more) {
    atomicAdd(reinterpret_cast<unsigned long long*>(count), static_cast<unsigned long long>(more));
}

// Calls body(thread) once on each of the block's threads; afterwards all threads see what each has written.
template <int threads, class Body>
INFINITY_FN void each_thread(const Body& body) {
    body(static_cast<int>(threadIdx.x));
    __syncthreads();
}

// Runs one block. A kernel is a value with its arguments, at most 4 KiB; kernel(block) does the work of one block.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) run_block(const __grid_constant__ Kernel kernel) {
    kernel(blockIdx.x);
}

// Launches a kernel without waiting. Returns 0 or an error code.
template <class Kernel>
int32_t launch(const Kernel& kernel, uint32_t blocks, void* stream) {
    static_assert(sizeof(Kernel) <= 4096, "all drivers take this much as an argument");
    if (blocks == 0) return 0;
    run_block<Kernel><<<blocks, Kernel::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(kernel);
    return static_cast<int32_t>(cudaGetLastError());
}

// Returns 0 if `device` can run the kernel, that is, the driver accepts this library and it has code for the device.
template <class Kernel>
int32_t runs_on(int32_t device) {
    if (const cudaError_t error = cudaSetDevice(device)) return static_cast<int32_t>(error);
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&run_block<Kernel>));
    // Clear the error, so that later calls do not report it.
    cudaGetLastError();
    return static_cast<int32_t>(error);
}

inline int32_t use_device(int32_t device) { return static_cast<int32_t>(cudaSetDevice(device)); }
inline int32_t driver_version() {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}
inline int32_t runtime_version() { return CUDART_VERSION; }
inline const char* error_text(int32_t code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace
}  // namespace infinity::kernels

#endif
