// x86-64 with AVX2: 8 elements at a time.
#include <immintrin.h>

#include "kernels.h"

#include "kernels.inl"

namespace {

struct Avx2 {
    static constexpr int64_t width = 8;
    using F = __m256;

    static F set(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F load_bf16(const uint16_t* p) { return _mm256_castsi256_ps(high(p)); }
    static F join(const uint16_t* w, const int16_t* r) {
        return _mm256_castsi256_ps(_mm256_add_epi32(high(w), _mm256_cvtepi16_epi32(load16(r))));
    }
    static void store_weight(uint16_t* w, F x) { store16(w, weight_of(x)); }
    static void store_residual(int16_t* r, F x) { store16(r, residual_of(x)); }
    static void store_past(float* p, F x) { _mm256_stream_ps(p, x); }
    static void store_weight_past(uint16_t* w, F x) { stream16(w, weight_of(x)); }
    static void store_residual_past(int16_t* r, F x) { stream16(r, residual_of(x)); }
    static void fence() { _mm_sfence(); }
    static void prefetch(const void* p) { __builtin_prefetch(p); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static F flush(F x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i high = _mm256_and_si256(bits, _mm256_set1_epi32(0x7F000000));
        const __m256i tiny = _mm256_cmpeq_epi32(high, _mm256_setzero_si256());
        const __m256i away = _mm256_and_si256(tiny, _mm256_set1_epi32(0x7FFFFFFF));
        return _mm256_castsi256_ps(_mm256_andnot_si256(away, bits));
    }
    static F one_nan(F x) {
        const F nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)), nan);
    }
    static void stream(const sf_state& s, const uint16_t* grad, int64_t i) {
        const __m128i g = load16(grad + i);
        const F wide = _mm256_castsi256_ps(_mm256_cvtepu16_epi32(g));
        store16(s.weight + i, _mm_xor_si128(load16(s.weight + i), g));
        store16(s.residual + i, _mm_xor_si128(load16(s.residual + i), g));
        store(s.exp_avg + i, _mm256_xor_ps(load(s.exp_avg + i), wide));
        store(s.exp_avg_sq + i, _mm256_xor_ps(load(s.exp_avg_sq + i), wide));
    }

private:
    static __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static void store16(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
    static void stream16(void* p, __m128i x) { _mm_stream_si128(static_cast<__m128i*>(p), x); }
    static __m128i weight_of(F x) {
        const __m256i rounded = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000));
        return narrow(_mm256_srai_epi32(rounded, 16));
    }
    static __m128i residual_of(F x) {
        return narrow(_mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(x), 16), 16));
    }
    static __m256i high(const uint16_t* p) { return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16); }
    // Eight int32 that fit into int16, to eight int16.
    static __m128i narrow(__m256i x) {
        return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    }
};

}  // namespace

namespace slideformer {
const Kernels avx2_kernels = kernels_of<Avx2>("avx2");
}
