// The kernels, written once over a vector type V; each instruction set includes this in its own translation unit.
//
// Everything here is in an unnamed namespace and uses no standard library template: an inline function compiled with
// AVX-512 flags must never be the copy that the linker keeps for the others.
//
// V has: width, F (a vector of floats), and the static functions used below. `flush` makes magnitudes below 2^-125
// zero and keeps the sign; `one_nan` makes every NaN 0x7FC00000. `store_weight` and `store_residual` write one half of a
// float each. The stores that end in `_past` go past the caches (whole cache lines that nobody reads soon; written the
// ordinary way they would first be read, 12 of 38 bytes an element), need pointers aligned to a cache line, and are
// ordered by `fence`. The reference is slideformer/optim/adamw.py; the order of operations here is the order there.

namespace {

using slideformer::Kernels;

// Elements that loads run ahead of the arithmetic. What the hardware fetches by itself is not enough between a root and
// a division: 124 GB/s without, 137 with 512, 1024 or 2048 (16 threads, AVX-512, H200 machine, 2026-11-30). Of scattered
// rows, which end sooner, 512 wastes less.
constexpr int64_t kAhead = 512;

// One element at a time, on any machine: the ends of ranges, and the whole of the baseline.
struct Scalar {
    static constexpr int64_t width = 1;
    using F = float;

    static uint32_t bits(F x) {
        uint32_t b;
        __builtin_memcpy(&b, &x, 4);
        return b;
    }
    static F from_bits(uint32_t b) {
        F x;
        __builtin_memcpy(&x, &b, 4);
        return x;
    }
    static F set(float x) { return x; }
    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static F load_bf16(const uint16_t* p) { return from_bits(uint32_t(*p) << 16); }
    static F join(const uint16_t* w, const int16_t* r) { return from_bits((uint32_t(*w) << 16) + uint32_t(int32_t(*r))); }
    static void store_weight(uint16_t* w, F x) { *w = uint16_t((bits(x) + 0x8000u) >> 16); }
    static void store_residual(int16_t* r, F x) { *r = int16_t(uint16_t(bits(x))); }
    static void store_past(float* p, F x) { store(p, x); }
    static void store_weight_past(uint16_t* w, F x) { store_weight(w, x); }
    static void store_residual_past(int16_t* r, F x) { store_residual(r, x); }
    static void fence() {}
    static void prefetch(const void*) {}
    static F mul(F a, F b) { return a * b; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) { return __builtin_sqrtf(a); }
    static F flush(F x) {
        const uint32_t b = bits(x);
        return from_bits((b & 0x7F000000u) == 0 ? b & 0x80000000u : b);
    }
    static F one_nan(F x) {
        const uint32_t b = bits(x);
        return from_bits((b & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : b);
    }
    static void stream(const sf_state& s, const uint16_t* grad, int64_t i) {
        const uint16_t g = grad[i];
        s.weight[i] = uint16_t(s.weight[i] ^ g);
        s.residual[i] = int16_t(s.residual[i] ^ int16_t(g));
        s.exp_avg[i] = from_bits(bits(s.exp_avg[i]) ^ g);
        s.exp_avg_sq[i] = from_bits(bits(s.exp_avg_sq[i]) ^ g);
    }
};

template <class V, int32_t kind>
struct Gradient {
    static typename V::F load(const void* grad, int64_t i, typename V::F scale) {
        typename V::F g = kind == SF_GRAD_BF16 ? V::load_bf16(static_cast<const uint16_t*>(grad) + i)
                                               : V::load(static_cast<const float*>(grad) + i);
        return V::flush(V::mul(V::flush(g), scale));
    }
    static void prefetch(const void* grad, int64_t i) {
        V::prefetch(static_cast<const char*>(grad) + i * (kind == SF_GRAD_BF16 ? 2 : 4));
    }
};

template <class V>
struct Gradient<V, SF_GRAD_NONE> {
    static typename V::F load(const void*, int64_t, typename V::F) { return V::set(0.0f); }
    static void prefetch(const void*, int64_t) {}
};

template <class V, bool past_caches>
void store(float* p, typename V::F x) {
    past_caches ? V::store_past(p, x) : V::store(p, x);
}

template <class V, bool past_caches>
void store_weight(uint16_t* p, typename V::F x) {
    past_caches ? V::store_weight_past(p, x) : V::store_weight(p, x);
}

template <class V, bool past_caches>
void store_residual(int16_t* p, typename V::F x) {
    past_caches ? V::store_residual_past(p, x) : V::store_residual(p, x);
}

// Elements [i, numel) in steps of V::width; returns where it stopped. whole: parts is SF_ALL, which is then not asked
// for every vector. Without either half of the master none of it is read.
template <class V, int32_t kind, bool past_caches, bool whole>
int64_t adamw_from(int64_t i, const sf_scalars& s, const sf_state& state, const sf_state& to, int32_t parts,
                   const void* grad, int64_t numel) {
    using F = typename V::F;
    const bool weight = whole || parts & SF_WEIGHT, residual = whole || parts & SF_RESIDUAL,
               moments = whole || parts & SF_MOMENTS, master = weight || residual;
    const F scale = V::set(s.grad_scale), beta1 = V::set(s.beta1), one_minus_beta1 = V::set(s.one_minus_beta1),
            beta2 = V::set(s.beta2), one_minus_beta2 = V::set(s.one_minus_beta2), rsqrt_bias2 = V::set(s.rsqrt_bias2),
            eps = V::set(s.eps), decay = V::set(s.decay), step_size = V::set(s.step_size);
    for (; i + V::width <= numel; i += V::width) {
        V::prefetch(state.exp_avg + i + kAhead);
        V::prefetch(state.exp_avg_sq + i + kAhead);
        if (master) {
            V::prefetch(state.weight + i + kAhead);
            V::prefetch(state.residual + i + kAhead);
        }
        Gradient<V, kind>::prefetch(grad, i + kAhead);
        const F g = Gradient<V, kind>::load(grad, i, scale);
        F m = V::load(state.exp_avg + i);
        F v = V::load(state.exp_avg_sq + i);
        F p = master ? V::join(state.weight + i, state.residual + i) : m;
        m = V::flush(V::add(V::flush(V::mul(m, beta1)), V::flush(V::mul(g, one_minus_beta1))));
        v = V::flush(V::add(V::flush(V::mul(v, beta2)), V::flush(V::mul(V::flush(V::mul(g, one_minus_beta2)), g))));
        if (master) {
            const F denom = V::add(V::mul(V::sqrt(v), rsqrt_bias2), eps);
            p = V::flush(V::mul(p, decay));
            p = V::one_nan(V::flush(V::sub(p, V::flush(V::mul(V::flush(V::div(m, denom)), step_size)))));
        }
        if (moments) {
            store<V, past_caches>(to.exp_avg + i, V::one_nan(m));
            store<V, past_caches>(to.exp_avg_sq + i, V::one_nan(v));
        }
        if (weight) store_weight<V, past_caches>(to.weight + i, p);
        if (residual) store_residual<V, past_caches>(to.residual + i, p);
    }
    return i;
}

bool on_cache_lines(const sf_state& s) {
    const auto at = uintptr_t(s.weight) | uintptr_t(s.residual) | uintptr_t(s.exp_avg) | uintptr_t(s.exp_avg_sq);
    return at % 64 == 0;
}

template <class V, int32_t kind, bool whole>
void adamw_of(const sf_scalars& s, const sf_state& from, const sf_state& to, int32_t parts, const void* grad,
              int64_t numel) {
    int64_t done = 0;
    if (from.weight != to.weight && on_cache_lines(to)) {
        done = adamw_from<V, kind, true, whole>(0, s, from, to, parts, grad, numel);
        V::fence();
    } else {
        done = adamw_from<V, kind, false, whole>(0, s, from, to, parts, grad, numel);
    }
    adamw_from<Scalar, kind, false, whole>(done, s, from, to, parts, grad, numel);
}

template <class V, int32_t kind>
void adamw_of(const sf_scalars& s, const sf_state& from, const sf_state& to, int32_t parts, const void* grad,
              int64_t numel) {
    if (parts == SF_ALL) return adamw_of<V, kind, true>(s, from, to, parts, grad, numel);
    adamw_of<V, kind, false>(s, from, to, parts, grad, numel);
}

template <class V>
void adamw(const sf_scalars& s, const sf_state& from, const sf_state& to, int32_t parts, int32_t grad_kind,
           const void* grad, int64_t numel) {
    switch (grad_kind) {
        case SF_GRAD_BF16: return adamw_of<V, SF_GRAD_BF16>(s, from, to, parts, grad, numel);
        case SF_GRAD_FP32: return adamw_of<V, SF_GRAD_FP32>(s, from, to, parts, grad, numel);
        default: return adamw_of<V, SF_GRAD_NONE>(s, from, to, parts, grad, numel);
    }
}

template <class V>
void split(const float* master, uint16_t* weight, int16_t* residual, int64_t numel) {
    int64_t i = 0;
    for (; i + V::width <= numel; i += V::width) {
        const typename V::F x = V::load(master + i);
        V::store_weight(weight + i, x);
        V::store_residual(residual + i, x);
    }
    for (; i < numel; ++i) {
        Scalar::store_weight(weight + i, master[i]);
        Scalar::store_residual(residual + i, master[i]);
    }
}

template <class V>
void join(const uint16_t* weight, const int16_t* residual, float* master, int64_t numel) {
    int64_t i = 0;
    for (; i + V::width <= numel; i += V::width) V::store(master + i, V::join(weight + i, residual + i));
    for (; i < numel; ++i) Scalar::store(master + i, Scalar::join(weight + i, residual + i));
}

template <class V>
void stream(const sf_state& state, const uint16_t* grad, int64_t numel) {
    int64_t i = 0;
    for (; i + V::width <= numel; i += V::width) V::stream(state, grad, i);
    for (; i < numel; ++i) Scalar::stream(state, grad, i);
}

template <class V>
constexpr Kernels kernels_of(const char* isa) {
    return Kernels{isa, adamw<V>, split<V>, join<V>, stream<V>};
}

}  // namespace
