// What one instruction set provides: functions over a range of elements, for one thread.
#pragma once

#include "slideformer_native.h"

namespace slideformer {

struct Kernels {
    const char* isa;
    // Reads the state from one place and writes its parts (sf_part) to another, or to the same. A gradient pointer
    // points at the first element of the range.
    void (*adamw)(const sf_scalars&, const sf_state& from, const sf_state& to, int32_t parts, int32_t grad_kind,
                  const void* grad, int64_t numel);
    void (*split)(const float* master, uint16_t* weight, int16_t* residual, int64_t numel);
    void (*join)(const uint16_t* weight, const int16_t* residual, float* master, int64_t numel);
    void (*stream)(const sf_state&, const uint16_t* grad, int64_t numel);
};

extern const Kernels baseline_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels neon_kernels;

}  // namespace slideformer
