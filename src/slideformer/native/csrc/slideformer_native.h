// The C interface of the native library: raw pointers, sizes and one struct. No torch, no Python.
//
// Every call blocks the calling thread, which works too, until the work is done. Calls from several threads on one
// pool run side by side. Results do not depend on the number of threads nor on the instruction set. Pointers need
// only the alignment of their element type.
#pragma once

#include <stdint.h>

#define SF_API extern "C" __attribute__((visibility("default")))

struct sf_pool;

// What the update multiplies, divides and adds (slideformer.optim.Scalars, same order).
struct sf_scalars {
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bias2, eps, decay, step_size;
};

// The four arrays of a tile, or of a [rows, width] matrix: master planes and moments.
struct sf_state {
    uint16_t* weight;
    int16_t* residual;
    float* exp_avg;
    float* exp_avg_sq;
};

// Of a state, to be written: any sum of these.
enum sf_part { SF_WEIGHT = 1, SF_RESIDUAL = 2, SF_MOMENTS = 4, SF_ALL = 7 };

enum sf_grad { SF_GRAD_NONE = 0, SF_GRAD_BF16 = 1, SF_GRAD_FP32 = 2 };

// SHA-256 over the sources that this library was built from; the loader takes no library of other sources.
SF_API const char* sf_source_digest(void);
// Instruction sets of this build that this machine can run, slowest first, separated by commas.
SF_API const char* sf_isas(void);

// A pool of `threads` threads, the caller counted in, that runs the kernels of `isa` (null: the fastest).
// Null if the instruction set is unknown or cannot run here, or no thread could be started.
// After a fork the child has none of the threads: calls there run on the caller alone.
SF_API sf_pool* sf_pool_create(int32_t threads, const char* isa);
// Waits for running calls and joins the threads. No call may start once this has.
SF_API void sf_pool_destroy(sf_pool* pool);

// One AdamW step over `numel` elements; grad_kind says what `grad` points to. The new state goes to `out`, or takes the
// old one's place if that is null; the two must be the same arrays or not overlap. Of `out` only `parts` are written
// (sf_part; SF_ALL without one).
SF_API void sf_adamw(sf_pool* pool, const sf_scalars* scalars, const sf_state* state, const sf_state* out,
                     int32_t parts, int32_t grad_kind, const void* grad, int64_t numel);

// The same for the rows `rows[0..num]` of [num_rows, width] arrays; row rows[i] takes row grad_rows[i] of the
// [num_grad_rows, width] gradient (row i if grad_rows is null), or a gradient of zero where that is negative. What
// comes after the gradient's last row is in `more`, [num_more_rows, width].
// Returns -1, or the first i whose row is out of range or occurs twice, or whose gradient row is out of range;
// then nothing was changed.
SF_API int64_t sf_adamw_rows(sf_pool* pool, const sf_scalars* scalars, const sf_state* state, const sf_state* out,
                             int32_t parts, int32_t grad_kind, const void* grad, const void* more,
                             const int64_t* rows, const int64_t* grad_rows, int64_t num, int64_t num_rows,
                             int64_t num_grad_rows, int64_t num_more_rows, int64_t width);

// out[i] = src[rows[i]] for rows of row_nbytes bytes. Returns -1, or the first i out of range (nothing was written).
SF_API int64_t sf_gather_rows(sf_pool* pool, const void* src, const int64_t* rows, void* out, int64_t num,
                              int64_t num_rows, int64_t row_nbytes);

SF_API void sf_split(sf_pool* pool, const float* master, uint16_t* weight, int16_t* residual, int64_t numel);
SF_API void sf_join(sf_pool* pool, const uint16_t* weight, const int16_t* residual, float* master, int64_t numel);

// Reads 14 and writes 12 bytes an element in the pattern of sf_adamw with a bf16 gradient, and computes next to
// nothing: the speed limit that a benchmark compares with. Fills the state with meaningless bits.
SF_API void sf_stream(sf_pool* pool, const sf_state* state, const uint16_t* grad, int64_t numel);

struct sf_disk;

// What a move did. sum: over the data, padded with zeros to whole pages. missing, offset: for SF_DISK_SHORT.
struct sf_disk_moved {
    uint64_t sum;
    int64_t missing, offset;
};

// Besides 0 and errno. SHORT: the file gave or took no more. STOPPED: sf_disk_stop came before the end; or a fork did.
enum sf_disk_status { SF_DISK_SHORT = -1, SF_DISK_STOPPED = -2 };

// `threads` threads that move blocks of block_nbytes, whole pages of 4096 bytes. sums: 0: without, all are
// 0 then. Null if a thread could not be started.
SF_API sf_disk* sf_disk_create(int32_t threads, int64_t block_nbytes, int32_t sums);
// Finishes the blocks under way, drops all others, and joins the threads. Later moves give SF_DISK_STOPPED.
SF_API void sf_disk_stop(sf_disk* disk);
// The same, and frees it. No move may be running.
SF_API void sf_disk_destroy(sf_disk* disk);

// Moves an extent between memory and `file`: at `offset` the page `head`, behind it nbytes of data, padded with zeros
// to whole pages. write: to the file, else from it. offset: whole pages. data: any alignment; straight from or to
// memory if it starts on a page. The caller sleeps meanwhile, and several may call. Returns 0, an errno, or a
// sf_disk_status; then the contents of what was to be written to are undefined.
SF_API int32_t sf_disk_move(sf_disk* disk, int32_t write, int32_t file, int64_t offset, void* head, void* data,
                            int64_t nbytes, sf_disk_moved* moved);

// The sum of `num` whole pages of which the first is page `page` of an extent. Sums of parts add up to that of the
// whole. Specification: slideformer.memory.disk_extent.checksum.
SF_API uint64_t sf_checksum(const void* pages, int64_t num, int64_t page);
