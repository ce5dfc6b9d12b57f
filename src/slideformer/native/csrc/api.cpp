// The C interface: picks an instruction set, cuts a call into pieces, checks row numbers.
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "slideformer_native.h"

using slideformer::Kernels;
using slideformer::Pool;

struct sf_pool {
    Pool threads;
    const Kernels& kernels;
};

namespace {

// Pieces start at multiples of this many elements, so no two threads write to one cache line of an aligned array,
// and less than two pieces are not worth waking a thread for (4096 elements take ~5 us on one core).
constexpr int64_t kGrain = 4096;

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> usable{&slideformer::baseline_kernels};
#if defined(SF_HAVE_X86)
    if (__builtin_cpu_supports("avx2")) usable.push_back(&slideformer::avx2_kernels);
    if (__builtin_cpu_supports("avx512f")) usable.push_back(&slideformer::avx512_kernels);
#elif defined(SF_HAVE_NEON)
    usable.push_back(&slideformer::neon_kernels);
#endif
    return usable;
}

const Kernels* find_kernels(const char* isa) {
    const auto usable = usable_kernels();
    if (!isa) return usable.back();
    const auto found = std::find_if(usable.begin(), usable.end(), [=](auto* k) { return !std::strcmp(k->isa, isa); });
    return found == usable.end() ? nullptr : *found;
}

const void* grad_at(int32_t kind, const void* grad, int64_t index) {
    if (kind == SF_GRAD_NONE) return nullptr;
    return static_cast<const char*>(grad) + index * (kind == SF_GRAD_BF16 ? 2 : 4);
}

sf_state state_at(const sf_state& s, int64_t index) {
    return {s.weight + index, s.residual + index, s.exp_avg + index, s.exp_avg_sq + index};
}

// The first i with rows[i] outside [0, limit), or -1.
int64_t first_outside(const int64_t* rows, int64_t num, int64_t limit) {
    for (int64_t i = 0; i < num; ++i)
        if (rows[i] < 0 || rows[i] >= limit) return i;
    return -1;
}

// The first i whose row occurred before, or -1. Two threads on one row would tear it.
int64_t first_repeated(const int64_t* rows, int64_t num, int64_t num_rows) {
    std::vector<bool> seen(static_cast<size_t>(num_rows));
    for (int64_t i = 0; i < num; ++i) {
        if (seen[rows[i]]) return i;
        seen[rows[i]] = true;
    }
    return -1;
}

int64_t first_bad_grad_row(const int64_t* grad_rows, int64_t num, int64_t limit) {
    if (!grad_rows) return num > limit ? limit : -1;
    for (int64_t i = 0; i < num; ++i)
        if (grad_rows[i] >= limit) return i;
    return -1;
}

// Rows of gradients: `first` of them in one array, what comes after in another, none where the number is negative.
struct GradRows {
    int32_t kind;
    const void *grad, *more;
    const int64_t* rows;
    int64_t first, width;

    int64_t row(int64_t i) const { return rows ? rows[i] : i; }

    // Entry i's row lies right behind that of the entry before, or neither is there.
    bool follows(int64_t i) const {
        const int64_t before = row(i - 1), own = row(i);
        return before < 0 ? own < 0 : own == before + 1 && own != first;
    }

    int32_t kind_at(int64_t i) const { return row(i) < 0 ? int32_t(SF_GRAD_NONE) : kind; }

    const void* at(int64_t i) const {
        const int64_t own = row(i);
        return own < first ? grad_at(kind_at(i), grad, own * width) : grad_at(kind, more, (own - first) * width);
    }
};

int64_t row_grain(int64_t width) { return std::max<int64_t>(kGrain / std::max<int64_t>(width, 1), 1); }

}  // namespace

const char* sf_source_digest(void) { return SF_SOURCE_DIGEST; }

const char* sf_isas(void) {
    static const std::string names = [] {
        std::string joined;
        for (const Kernels* k : usable_kernels()) joined += (joined.empty() ? "" : ",") + std::string(k->isa);
        return joined;
    }();
    return names.c_str();
}

sf_pool* sf_pool_create(int32_t threads, const char* isa) {
    const Kernels* kernels = find_kernels(isa);
    if (!kernels) return nullptr;
    try {
        return new sf_pool{Pool(threads), *kernels};
    } catch (const std::exception&) {
        return nullptr;
    }
}

void sf_pool_destroy(sf_pool* pool) {
    if (!pool->threads.forked()) delete pool;
}

void sf_adamw(sf_pool* pool, const sf_scalars* scalars, const sf_state* state, const sf_state* out, int32_t parts,
              int32_t grad_kind, const void* grad, int64_t numel) {
    const sf_state* to = out ? out : state;
    pool->threads.run(numel, kGrain, [=](int64_t begin, int64_t end) {
        pool->kernels.adamw(*scalars, state_at(*state, begin), state_at(*to, begin), parts, grad_kind,
                            grad_at(grad_kind, grad, begin), end - begin);
    });
}

int64_t sf_adamw_rows(sf_pool* pool, const sf_scalars* scalars, const sf_state* state, const sf_state* out,
                      int32_t parts, int32_t grad_kind, const void* grad, const void* more, const int64_t* rows,
                      const int64_t* grad_rows, int64_t num, int64_t num_rows, int64_t num_grad_rows,
                      int64_t num_more_rows, int64_t width) {
    int64_t bad = first_outside(rows, num, num_rows);
    if (bad < 0) bad = first_repeated(rows, num, num_rows);
    if (bad < 0 && grad_kind != SF_GRAD_NONE) bad = first_bad_grad_row(grad_rows, num, num_grad_rows + num_more_rows);
    if (bad >= 0) return bad;
    const sf_state* to = out ? out : state;
    const GradRows grads{grad_kind, grad, more, grad_rows, num_grad_rows, width};
    pool->threads.run(num, row_grain(width), [=](int64_t begin, int64_t end) {
        for (int64_t i = begin, next; i < end; i = next) {
            next = i + 1;  // to the end of rows that lie one behind the other, and whose gradients do
            while (next < end && rows[next] == rows[next - 1] + 1 && grads.follows(next)) ++next;
            pool->kernels.adamw(*scalars, state_at(*state, rows[i] * width), state_at(*to, rows[i] * width), parts,
                                grads.kind_at(i), grads.at(i), (next - i) * width);
        }
    });
    return -1;
}

int64_t sf_gather_rows(sf_pool* pool, const void* src, const int64_t* rows, void* out, int64_t num, int64_t num_rows,
                       int64_t row_nbytes) {
    const int64_t bad = first_outside(rows, num, num_rows);
    if (bad >= 0) return bad;
    const char* from = static_cast<const char*>(src);
    char* to = static_cast<char*>(out);
    pool->threads.run(num, row_grain(row_nbytes / 2), [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            std::memcpy(to + i * row_nbytes, from + rows[i] * row_nbytes, static_cast<size_t>(row_nbytes));
    });
    return -1;
}

void sf_split(sf_pool* pool, const float* master, uint16_t* weight, int16_t* residual, int64_t numel) {
    pool->threads.run(numel, kGrain, [=](int64_t begin, int64_t end) {
        pool->kernels.split(master + begin, weight + begin, residual + begin, end - begin);
    });
}

void sf_join(sf_pool* pool, const uint16_t* weight, const int16_t* residual, float* master, int64_t numel) {
    pool->threads.run(numel, kGrain, [=](int64_t begin, int64_t end) {
        pool->kernels.join(weight + begin, residual + begin, master + begin, end - begin);
    });
}

void sf_stream(sf_pool* pool, const sf_state* state, const uint16_t* grad, int64_t numel) {
    pool->threads.run(numel, kGrain, [=](int64_t begin, int64_t end) {
        pool->kernels.stream(state_at(*state, begin), grad + begin, end - begin);
    });
}
