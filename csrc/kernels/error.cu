// What the codes mean that the other functions return.

#include "grid.cuh"

using namespace infinity::kernels;

INFINITY_EXPORT const char* infinity_kernels_error(int32_t code) { return error_text(code); }
