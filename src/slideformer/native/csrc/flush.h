// Flush-to-zero for the life of an object: without it a denormal operand costs a microcode detour of ~150 cycles on
// x86. Results do not depend on it (kernels.inl flushes by itself); speed does.
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace slideformer {

class FlushDenormals {
public:
#if defined(__x86_64__)
    FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
    ~FlushDenormals() { _mm_setcsr(saved_); }

private:
    static constexpr uint32_t kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    const uint32_t saved_;
#elif defined(__aarch64__)
    FlushDenormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" : : "r"(saved_ | kFlushToZero));
    }
    ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

private:
    static constexpr uint64_t kFlushToZero = uint64_t(1) << 24;
    uint64_t saved_;
#endif
};

}  // namespace slideformer
