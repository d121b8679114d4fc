// The text of an error code.

#include "grid.cuh"

using namespace infinity::kernels;

INFINITY_EXPORT const char* infinity_kernels_error(int32_t code) { return error_text(code); }
