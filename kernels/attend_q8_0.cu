// Decode attention over a cache stored as q8_0: softmax(q · Kᵀ · scale) · V, read from the stored bytes.
//
// Row.    HEAD_DIM values in N_BLOCK = ceil(HEAD_DIM / 32) blocks of 34 bytes, ggml's q8_0: an f16 scale d, then 32
//         signed bytes; a value is d · code. A last block that HEAD_DIM does not fill is padded; the pad is never used.
// Page.   Up to PAGE_ROWS rows, the live ones of one range of 128 absolute positions, in order of position. At least
//         one row. Its buffer starts at a multiple of 16 bytes and holds whole granules of GRANULE_ROWS rows.
// List.   What one (sequence, KV head) holds: one or more pages in order of position, contiguous in the page table.
//         n_query queries read each list: the heads of one GQA group. Every query reads every row (decoding: no mask).
// Keys and queries are already rotated.
//
// Order of summation, as on the CPU: a partial (m, l, acc) per page, inside it in order of position, partials merged
// in order of pages. It depends on no launch geometry, so results repeat to the bit on one kind of device. Apart from
// the CPU it differs in rounding only: a dot product is one chain per block of 32, the weight p meets the scale d
// before the code, and the merge knows the largest m before it starts instead of rescaling as it goes.
//
// Tolerance, against a reference in f64 on the same bytes: an output differs by at most
//     (2e-6 + 2e-7 · largest |score|) · Σ p |v|
// where the sum is the weighted mean of the magnitudes that were added up. The second term is what f32 scores cost
// any implementation: exp turns their absolute error into a relative one.
//
// Compile with -DHEAD_DIM=n. Launch, in one stream:
//     attend_q8_0_pages   grid n_page · n_query, block PAGE_ROWS
//     attend_q8_0_merge   grid n_list · n_query, block HEAD_DIM

#include "common.cuh"

#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=<values per head>"
#endif

constexpr int BLOCK_VALUES = 32;
constexpr int BLOCK_BYTES = 2 + BLOCK_VALUES;
constexpr int N_BLOCK = (HEAD_DIM + BLOCK_VALUES - 1) / BLOCK_VALUES;
constexpr int ROW_BYTES = N_BLOCK * BLOCK_BYTES;
constexpr int PAGE_BYTES = PAGE_ROWS * ROW_BYTES;
static_assert(HEAD_DIM >= 1 && HEAD_DIM <= 256, "a page of wider rows does not fit in 48 KiB of shared memory");
static_assert(GRANULE_ROWS * ROW_BYTES % 16 == 0, "granules are loaded 16 bytes at a time");

// All threads of the block copy the page's granules into shared memory.
static __device__ void stage(uint4 *shared, const unsigned char *page, int n_rows)
{
    const int n_granule = (n_rows + GRANULE_ROWS - 1) / GRANULE_ROWS;
    const int n_load = n_granule * GRANULE_ROWS * ROW_BYTES / 16;
    for (int i = threadIdx.x; i < n_load; i += PAGE_ROWS)
        shared[i] = ((const uint4 *)page)[i];
}

static __device__ float block_scale(const unsigned char *block)
{
    return f16_to_f32(block[0] | (unsigned)block[1] << 8);
}

static __device__ float code(const unsigned char *block, int i)
{
    return (float)(signed char)block[2 + i];
}

static __device__ float dot(const float *query, const unsigned char *row)
{
    float sum = 0.0f;
    for (int b = 0; b < N_BLOCK; b++) {
        const unsigned char *block = row + b * BLOCK_BYTES;
        float partial = 0.0f;
        for (int i = 0; i < BLOCK_VALUES && b * BLOCK_VALUES + i < HEAD_DIM; i++)
            partial = fmaf(query[b * BLOCK_VALUES + i], code(block, i), partial);
        sum = fmaf(block_scale(block), partial, sum);
    }
    return sum;
}

// The largest x of the block's PAGE_ROWS threads, given to all of them. Holds a barrier.
static __device__ float block_max(float x, float *warp_max)
{
    for (int distance = WARP_LANES / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    if (threadIdx.x % WARP_LANES == 0)
        warp_max[threadIdx.x / WARP_LANES] = x;
    __syncthreads();
    x = warp_max[0];
    for (int warp = 1; warp < PAGE_ROWS / WARP_LANES; warp++)
        x = fmaxf(x, warp_max[warp]);
    return x;
}

// One page for one query: the partial softmax of its rows.
//   q          [list][query][HEAD_DIM]
//   k_pages, v_pages, page_rows, page_list   [page]: where it lies, its rows, its list
//   part_m, part_l [page][query], part_acc [page][query][HEAD_DIM]   out
// Neighbouring blocks share a page, so that it comes from memory once and from the L2 cache for the other queries.
extern "C" __global__ void __launch_bounds__(PAGE_ROWS)
attend_q8_0_pages(const float *q, const unsigned char *const *k_pages, const unsigned char *const *v_pages,
                  const int *page_rows, const int *page_list, int n_query, float scale,
                  float *part_m, float *part_l, float *part_acc)
{
    __shared__ uint4 staged[PAGE_BYTES / 16];
    __shared__ float query[HEAD_DIM];
    __shared__ float weight[PAGE_ROWS];
    __shared__ float scaled_weight[N_BLOCK][PAGE_ROWS];
    __shared__ float warp_max[PAGE_ROWS / WARP_LANES];

    const size_t part = blockIdx.x;
    const int page = blockIdx.x / n_query;
    const int n_rows = page_rows[page];
    const unsigned char *rows = (const unsigned char *)staged;
    const int row = threadIdx.x;

    const size_t query_index = (size_t)page_list[page] * n_query + blockIdx.x % n_query;
    for (int d = threadIdx.x; d < HEAD_DIM; d += PAGE_ROWS)
        query[d] = q[query_index * HEAD_DIM + d];
    stage(staged, k_pages[page], n_rows);
    __syncthreads();

    const float score = row < n_rows ? scale * dot(query, rows + row * ROW_BYTES) : negative_infinity();
    const float m = block_max(score, warp_max);

    // The barrier in block_max stands between the last read of K and this.
    stage(staged, v_pages[page], n_rows);
    __syncthreads();

    if (row < n_rows) {
        weight[row] = expf(score - m);
        for (int b = 0; b < N_BLOCK; b++)
            scaled_weight[b][row] = weight[row] * block_scale(rows + row * ROW_BYTES + b * BLOCK_BYTES);
    }
    __syncthreads();

    for (int d = threadIdx.x; d < HEAD_DIM; d += PAGE_ROWS) {
        const int b = d / BLOCK_VALUES;
        float l = 0.0f;
        float acc = 0.0f;
        for (int r = 0; r < n_rows; r++) {
            l += weight[r];
            acc = fmaf(scaled_weight[b][r], code(rows + r * ROW_BYTES + b * BLOCK_BYTES, d % BLOCK_VALUES), acc);
        }
        part_acc[part * HEAD_DIM + d] = acc;
        if (d == 0) {
            part_m[part] = m;
            part_l[part] = l;
        }
    }
}

// All pages of one list for one query: partials to the attention output.
//   list_start [list + 1]: pages list_start[i] .. list_start[i + 1] belong to list i
//   out        [list][query][HEAD_DIM]
extern "C" __global__ void __launch_bounds__(HEAD_DIM)
attend_q8_0_merge(const int *list_start, int n_query, const float *part_m, const float *part_l,
                  const float *part_acc, float *out)
{
    const int list = blockIdx.x / n_query;
    const int query = blockIdx.x % n_query;
    const int d = threadIdx.x;
    const int first = list_start[list];
    const int end = list_start[list + 1];

    float m = negative_infinity();
    for (int page = first; page < end; page++)
        m = fmaxf(m, part_m[(size_t)page * n_query + query]);

    float l = 0.0f;
    float acc = 0.0f;
    for (int page = first; page < end; page++) {
        const size_t part = (size_t)page * n_query + query;
        const float weight = expf(part_m[part] - m);
        l = fmaf(weight, part_l[part], l);
        acc = fmaf(weight, part_acc[part * HEAD_DIM + d], acc);
    }
    out[(size_t)blockIdx.x * HEAD_DIM + d] = acc / l;
}
