// Calls every function of the native library as the engine does: several pools, several threads on one pool, odd sizes
// and unaligned starts, in place and not, rows in and out of range, extents of a file, after a fork. Built with a
// sanitizer, which ends it with a report; by itself it checks only that nothing depends on threads or instruction set.
//
// usage: exercise LIBRARY
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "slideformer_native.h"

namespace {

struct Library {
    void* handle;
    template <typename F>
    F* get(const char* name) const {
        void* found = dlsym(handle, name);
        if (!found) std::abort();
        return reinterpret_cast<F*>(found);
    }
#define FUNCTION(name) decltype(name)* name##_ = get<decltype(name)>(#name)
    FUNCTION(sf_source_digest);
    FUNCTION(sf_isas);
    FUNCTION(sf_pool_create);
    FUNCTION(sf_pool_destroy);
    FUNCTION(sf_adamw);
    FUNCTION(sf_adamw_rows);
    FUNCTION(sf_gather_rows);
    FUNCTION(sf_split);
    FUNCTION(sf_join);
    FUNCTION(sf_stream);
    FUNCTION(sf_disk_create);
    FUNCTION(sf_disk_stop);
    FUNCTION(sf_disk_destroy);
    FUNCTION(sf_disk_move);
    FUNCTION(sf_checksum);
#undef FUNCTION
    explicit Library(const char* path) : handle(dlopen(path, RTLD_NOW)) {
        if (!handle) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(2);
        }
    }
};

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(3);
}

// Exactly as long as asked for, and `shift` elements behind an aligned place: what is read or written beyond is seen.
template <typename T>
struct Array {
    std::unique_ptr<T[]> memory;
    T* data;
    int64_t size;
    Array(int64_t numel, int shift) : memory(new T[numel + shift]), data(memory.get() + shift), size(numel) {}
    bool operator==(const Array& other) const { return !std::memcmp(data, other.data, size * sizeof(T)); }
};

struct State {
    Array<uint16_t> weight;
    Array<int16_t> residual;
    Array<float> exp_avg, exp_avg_sq;
    State(int64_t numel, int shift)
        : weight(numel, shift), residual(numel, shift), exp_avg(numel, shift), exp_avg_sq(numel, shift) {}
    void fill(std::mt19937& random) {
        for (int64_t i = 0; i < weight.size; ++i) {
            weight.data[i] = uint16_t(random());
            residual.data[i] = int16_t(random());
            const uint32_t bits[2] = {uint32_t(random()), uint32_t(random()) & 0x7fffffff};
            std::memcpy(exp_avg.data + i, bits, 4);
            std::memcpy(exp_avg_sq.data + i, bits + 1, 4);
        }
    }
    sf_state at() { return {weight.data, residual.data, exp_avg.data, exp_avg_sq.data}; }
    bool operator==(const State& o) const {
        return weight == o.weight && residual == o.residual && exp_avg == o.exp_avg && exp_avg_sq == o.exp_avg_sq;
    }
};

const sf_scalars kScalars{0.5f, 0.9f, 0.1f, 0.999f, 0.001f, 30.0f, 1e-8f, 0.9999f, 1e-3f};

// parts: what is written by each of the calls, out of place.
State adamw(const Library& l, sf_pool* pool, int64_t numel, int shift, int32_t kind, bool in_place,
            const std::vector<int32_t>& parts = {SF_ALL}) {
    std::mt19937 random{unsigned(numel * 31 + kind)};
    State state(numel, shift), out(numel, shift);
    state.fill(random);
    Array<uint16_t> half(numel, shift);
    Array<float> full(numel, shift);
    for (int64_t i = 0; i < numel; ++i) {
        half.data[i] = uint16_t(random());
        full.data[i] = float(random()) * 1e-9f - 1.0f;
    }
    const void* grad = kind == SF_GRAD_NONE ? nullptr : kind == SF_GRAD_BF16 ? (const void*)half.data : full.data;
    const sf_state from = state.at(), to = out.at();
    for (const int32_t part : parts) l.sf_adamw_(pool, &kScalars, &from, in_place ? nullptr : &to, part, kind, grad, numel);
    return in_place ? std::move(state) : std::move(out);
}

void rows(const Library& l, sf_pool* pool, int64_t width) {
    const int64_t num_rows = 50;
    std::mt19937 random{unsigned(width)};
    State state(num_rows * width, 1), before(num_rows * width, 1), out(num_rows * width, 0);
    state.fill(random);
    random.seed(unsigned(width));
    before.fill(random);
    out.fill(random);
    std::vector<int64_t> picked{49, 0, 7, 31}, grad_rows{1, -1, 0, 1};
    Array<uint16_t> grad(4 * width, 0);
    for (int64_t i = 0; i < grad.size; ++i) grad.data[i] = uint16_t(0x3c00 + i % 64);
    const sf_state from = state.at(), to = out.at();
    auto call = [&](const std::vector<int64_t>& r, const int64_t* g, int64_t limit) {
        // the last of them lie elsewhere
        const void* more = grad.data + (limit - 1) * width;
        return l.sf_adamw_rows_(pool, &kScalars, &from, &to, SF_ALL, SF_GRAD_BF16, grad.data, more, r.data(), g,
                                int64_t(r.size()), num_rows, limit - 1, 1, width);
    };
    require(call({1, 50}, nullptr, 4) == 1, "a row beyond the table is named");
    require(call({1, -1}, nullptr, 4) == 1, "a negative row is named");
    require(call({1, 2, 1}, nullptr, 4) == 2, "a repeated row is named");
    require(call(picked, grad_rows.data(), 1) == 0, "a gradient row beyond the gradient is named");
    require(state == before, "a refused call changes nothing");
    require(call(picked, grad_rows.data(), 2) == -1, "rows");
    require(l.sf_adamw_rows_(pool, &kScalars, &from, nullptr, SF_ALL, SF_GRAD_NONE, nullptr, nullptr, picked.data(),
                             nullptr, 4, num_rows, 0, 0, width) == -1, "rows without a gradient");
    Array<uint16_t> gathered(4 * width, 1);
    auto gather = [&] {
        return l.sf_gather_rows_(pool, state.weight.data, picked.data(), gathered.data, 4, num_rows, 2 * width);
    };
    require(gather() == -1, "gather");
    for (int64_t i = 0; i < 4; ++i)
        require(!std::memcmp(gathered.data + i * width, state.weight.data + picked[i] * width, 2 * width), "gathered");
    picked[2] = num_rows;
    require(gather() == 2, "a row beyond the table is named by gather");
}

void planes(const Library& l, sf_pool* pool, int64_t numel, int shift) {
    std::mt19937 random{unsigned(numel)};
    Array<float> master(numel, shift), back(numel, shift);
    for (int64_t i = 0; i < numel; ++i) {
        const uint32_t bits = uint32_t(random());
        std::memcpy(master.data + i, &bits, 4);
    }
    State state(numel, shift);
    l.sf_split_(pool, master.data, state.weight.data, state.residual.data, numel);
    l.sf_join_(pool, state.weight.data, state.residual.data, back.data, numel);
    require(back == master, "what was split is joined");
    state.fill(random);
    Array<uint16_t> grad(numel, shift);
    std::memset(grad.data, 0, numel * 2);
    const sf_state at = state.at();
    l.sf_stream_(pool, &at, grad.data, numel);
}

void everything(const Library& l, sf_pool* pool, sf_pool* plain) {
    for (const int64_t numel : {0, 1, 3, 15, 16, 17, 31, 33, 63, 65, 4095, 4097, 8193, 40001})
        for (const int shift : {0, 1})
            for (const int32_t kind : {SF_GRAD_NONE, SF_GRAD_BF16, SF_GRAD_FP32}) {
                const State expected = adamw(l, plain, numel, shift, kind, true);
                require(adamw(l, pool, numel, shift, kind, true) == expected, "in place");
                require(adamw(l, pool, numel, shift, kind, false) == expected, "out of place");
                for (const int32_t first : {int32_t(SF_WEIGHT), SF_WEIGHT | SF_RESIDUAL})
                    require(adamw(l, pool, numel, shift, kind, false, {first, SF_ALL - first}) == expected, "in parts");
            }
    for (const int64_t width : {1, 16, 33, 5000}) rows(l, pool, width);
    for (const int64_t numel : {0, 1, 17, 4097, 100003}) planes(l, pool, numel, 1);
}

char* aligned_to_pages(int64_t nbytes) {
    return static_cast<char*>(std::aligned_alloc(4096, (nbytes + 4096) / 4096 * 4096));
}

// Extents of a file, written and read from several threads; memory that starts on a page, and some that does not.
void extents(const Library& l, sf_disk* disk, int file, int64_t which) {
    std::mt19937 random(static_cast<unsigned>(which));
    for (const int64_t nbytes : {0, 1, 4095, 4096, 4097, 20480, 65537})
        for (const int shift : {0, 64}) {
            const int64_t offset = which << 20;
            std::unique_ptr<char, decltype(&std::free)> from(aligned_to_pages(nbytes + shift), &std::free);
            std::unique_ptr<char, decltype(&std::free)> to(aligned_to_pages(nbytes + 64 - shift), &std::free);
            char* const source = from.get() + shift;
            char* const target = to.get() + 64 - shift;
            for (int64_t i = 0; i < nbytes; ++i) source[i] = static_cast<char>(random());
            Array<char> head(4096, 0), back(4096, 0);
            std::memset(head.data, static_cast<int>(which), 4096);
            sf_disk_moved written{}, read{};
            require(l.sf_disk_move_(disk, 1, file, offset, head.data, source, nbytes, &written) == 0, "a write");
            require(l.sf_disk_move_(disk, 0, file, offset, back.data, target, nbytes, &read) == 0, "a read");
            require(!std::memcmp(source, target, nbytes) && written.sum == read.sum, "what was written");
            require(!std::memcmp(head.data, back.data, 4096), "and its header");
        }
}

void files(const Library& l) {
    char name[] = "exercise-XXXXXX";
    const int file = mkstemp(name);
    require(file >= 0 && unlink(name) == 0 && ftruncate(file, 4 << 20) == 0, "a file");
    for (const int threads : {1, 3}) {
        sf_disk* disk = l.sf_disk_create_(threads, 8192, threads == 3);
        require(disk, "threads for the disk");
        std::vector<std::thread> callers;
        for (int64_t i = 0; i < 3; ++i) callers.emplace_back([&, i] { extents(l, disk, file, i); });
        for (std::thread& caller : callers) caller.join();
        callers.clear();
        Array<char> head(4096, 0), data(1 << 20, 0);
        std::memset(head.data, 1, 4096);
        std::memset(data.data, 1, 1 << 20);
        sf_disk_moved moved{};
        require(l.sf_disk_move_(disk, 0, file, 4 << 20, head.data, data.data, 1, &moved) == SF_DISK_SHORT, "an end");
        require(moved.offset == 4 << 20 && moved.missing == 8192, "where it is");
        require(l.sf_disk_move_(disk, 0, -1, 0, head.data, data.data, 1 << 20, &moved) > 0, "an error");
        for (int i = 0; i < 3; ++i)
            callers.emplace_back([&, i] {
                Array<char> own(4096, 0);
                std::memset(own.data, i, 4096);
                sf_disk_moved one{};
                while (l.sf_disk_move_(disk, 1, file, i << 20, own.data, data.data, 900000, &one) == 0) {
                }
            });
        l.sf_disk_stop_(disk);
        for (std::thread& caller : callers) caller.join();
        l.sf_disk_destroy_(disk);
    }
    close(file);
}

}  // namespace

int main(int count, char** words) {
    if (count != 2) return 2;
    const Library l(words[1]);
    require(std::strlen(l.sf_source_digest_()) == 64, "a digest");
    require(!l.sf_pool_create_(2, "no such instruction set"), "an unknown instruction set is refused");
    for (int i = 0; i < 50; ++i) l.sf_pool_destroy_(l.sf_pool_create_(1 + i % 4, nullptr));
    sf_pool* plain = l.sf_pool_create_(1, "baseline");
    std::string isas = l.sf_isas_();
    for (size_t start = 0, end; start < isas.size(); start = end + 1) {
        end = std::min(isas.find(',', start), isas.size());
        const std::string isa = isas.substr(start, end - start);
        sf_pool* pool = l.sf_pool_create_(3, isa.c_str());
        require(pool, "a pool");
        std::vector<std::thread> callers;
        for (int i = 0; i < 3; ++i) callers.emplace_back([&] { everything(l, pool, plain); });
        for (std::thread& caller : callers) caller.join();
        l.sf_pool_destroy_(pool);
        std::printf("%s\n", isa.c_str());
    }
    files(l);
    sf_pool* pool = l.sf_pool_create_(3, nullptr);
    sf_disk* disk = l.sf_disk_create_(2, 8192, 1);
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        adamw(l, pool, 40001, 0, SF_GRAD_BF16, true);
        l.sf_pool_destroy_(pool);
        char page[4096];
        sf_disk_moved moved{};
        require(l.sf_disk_move_(disk, 0, 0, 0, page, page, 0, &moved) == SF_DISK_STOPPED, "no threads in a child");
        l.sf_disk_stop_(disk);
        l.sf_disk_destroy_(disk);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(status == 0, "calls work in a child");
    l.sf_pool_destroy_(pool);
    l.sf_pool_destroy_(plain);
    l.sf_disk_destroy_(disk);
    return 0;
}
