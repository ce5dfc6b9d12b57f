// 64-bit Arm: 4 elements at a time.
#include <arm_neon.h>

#include "kernels.h"

#include "kernels.inl"

namespace {

struct Neon {
    static constexpr int64_t width = 4;
    using F = float32x4_t;

    static F set(float x) { return vdupq_n_f32(x); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static F load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(high(p)); }
    static F join(const uint16_t* w, const int16_t* r) {
        return vreinterpretq_f32_u32(vaddq_u32(high(w), vreinterpretq_u32_s32(vmovl_s16(vld1_s16(r)))));
    }
    static void store_weight(uint16_t* w, F x) {
        vst1_u16(w, vshrn_n_u32(vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000)), 16));
    }
    static void store_residual(int16_t* r, F x) {
        vst1_s16(r, vreinterpret_s16_u16(vmovn_u32(vreinterpretq_u32_f32(x))));
    }
    static void store_past(float* p, F x) { store(p, x); }
    static void store_weight_past(uint16_t* w, F x) { store_weight(w, x); }
    static void store_residual_past(int16_t* r, F x) { store_residual(r, x); }
    static void fence() {}
    static void prefetch(const void* p) { __builtin_prefetch(p); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static F flush(F x) {
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t tiny = vceqzq_u32(vandq_u32(bits, vdupq_n_u32(0x7F000000)));
        return vreinterpretq_f32_u32(vbicq_u32(bits, vandq_u32(tiny, vdupq_n_u32(0x7FFFFFFF))));
    }
    static F one_nan(F x) {
        return vbslq_f32(vceqq_f32(x, x), x, vreinterpretq_f32_u32(vdupq_n_u32(0x7FC00000)));
    }
    static void stream(const sf_state& s, const uint16_t* grad, int64_t i) {
        const uint16x4_t g = vld1_u16(grad + i);
        const uint32x4_t wide = vmovl_u16(g);
        vst1_u16(s.weight + i, veor_u16(vld1_u16(s.weight + i), g));
        vst1_s16(s.residual + i, veor_s16(vld1_s16(s.residual + i), vreinterpret_s16_u16(g)));
        store(s.exp_avg + i, mix(load(s.exp_avg + i), wide));
        store(s.exp_avg_sq + i, mix(load(s.exp_avg_sq + i), wide));
    }

private:
    static uint32x4_t high(const uint16_t* p) { return vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16); }
    static F mix(F a, uint32x4_t b) { return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), b)); }
};

}  // namespace

namespace slideformer {
const Kernels neon_kernels = kernels_of<Neon>("neon");
}
