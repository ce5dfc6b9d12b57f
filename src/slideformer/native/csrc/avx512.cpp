// x86-64 with AVX-512F: 16 elements at a time.
#include <immintrin.h>

#include "kernels.h"

#include "kernels.inl"

namespace {

struct Avx512 {
    static constexpr int64_t width = 16;
    using F = __m512;

    static F set(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F load_bf16(const uint16_t* p) { return _mm512_castsi512_ps(high(p)); }
    static F join(const uint16_t* w, const int16_t* r) {
        return _mm512_castsi512_ps(_mm512_add_epi32(high(w), _mm512_cvtepi16_epi32(load16(r))));
    }
    static void store_weight(uint16_t* w, F x) { store16(w, weight_of(x)); }
    static void store_residual(int16_t* r, F x) { store16(r, residual_of(x)); }
    static void store_past(float* p, F x) { _mm512_stream_ps(p, x); }
    static void store_weight_past(uint16_t* w, F x) { stream16(w, weight_of(x)); }
    static void store_residual_past(int16_t* r, F x) { stream16(r, residual_of(x)); }
    static void fence() { _mm_sfence(); }
    static void prefetch(const void* p) { __builtin_prefetch(p); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F flush(F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7F000000));
        return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, tiny, bits, _mm512_set1_epi32(int(0x80000000u))));
    }
    static F one_nan(F x) {
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_castps_si512(x), nan, _mm512_set1_epi32(0x7FC00000)));
    }
    static void stream(const sf_state& s, const uint16_t* grad, int64_t i) {
        const __m256i g = load16(grad + i);
        const __m512 wide = _mm512_castsi512_ps(_mm512_cvtepu16_epi32(g));
        store16(s.weight + i, _mm256_xor_si256(load16(s.weight + i), g));
        store16(s.residual + i, _mm256_xor_si256(load16(s.residual + i), g));
        store(s.exp_avg + i, mix(load(s.exp_avg + i), wide));
        store(s.exp_avg_sq + i, mix(load(s.exp_avg_sq + i), wide));
    }

private:
    static __m256i load16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static void store16(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
    static void stream16(void* p, __m256i x) { _mm256_stream_si256(static_cast<__m256i*>(p), x); }
    static __m256i weight_of(F x) {
        const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    }
    static __m256i residual_of(F x) { return _mm512_cvtepi32_epi16(_mm512_castps_si512(x)); }
    static __m512i high(const uint16_t* p) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(p)), 16); }
    static F mix(F a, F b) {
        return _mm512_castsi512_ps(_mm512_xor_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    }
};

}  // namespace

namespace slideformer {
const Kernels avx512_kernels = kernels_of<Avx512>("avx512");
}
