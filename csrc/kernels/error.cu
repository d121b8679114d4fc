// The text of an error code, and the versions that an error may be about.

#include "grid.cuh"

using namespace infinity::kernels;

INFINITY_EXPORT const char* infinity_kernels_error(int32_t code) { return error_text(code); }

// The CUDA version that the driver runs at most, 0 without a driver, and the one that built this library: 13020 is 13.2.
INFINITY_EXPORT int32_t infinity_kernels_driver_version() { return driver_version(); }
INFINITY_EXPORT int32_t infinity_kernels_runtime_version() { return runtime_version(); }
