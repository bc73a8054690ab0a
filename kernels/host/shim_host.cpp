// The shim and common.cuh, examined by themselves. The first argument says what to do:
//   f16         prints f16_to_f32 of all 65,536 bit patterns as binary f32
//   warp        prints one u32 per thread of a block of 64: shuffles, in a fixed mix
//   barrier     prints one u32 per thread of a block of 64: each reads what its neighbour wrote before a barrier
//   no-barrier  the same without the barrier: wrong in one order of threads, which is what the shim must show
//   hang        the odd threads wait for the block, the even ones for their warp: must end with status 3
// The second argument, "forward" or "backward", is the order of threads.

#include "cuda_host_shim.h"

#include <string>

#include "../common.cuh"

static void shuffles(uint32_t *out)
{
    const uint32_t lane = threadIdx.x % WARP_LANES;
    uint32_t sum = threadIdx.x;
    for (int distance = WARP_LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    const uint32_t next = __shfl_down_sync(0xffffffffu, lane, 1);
    const uint32_t third = __shfl_sync(0xffffffffu, threadIdx.x, 3);
    __syncwarp();
    out[threadIdx.x] = sum * 10000 + next * 100 + third;
}

static void neighbours(uint32_t *out, bool with_barrier)
{
    __shared__ uint32_t written[64];
    written[threadIdx.x] = 0;
    __syncthreads();
    written[threadIdx.x] = threadIdx.x + 1;
    if (with_barrier)
        __syncthreads();
    out[threadIdx.x] = written[(threadIdx.x + 1) % 64];
}

static void meets_nobody()
{
    if (threadIdx.x % 2)
        __syncthreads();
    else
        __syncwarp();
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    const std::string what = argv[1];
    const auto order = std::strcmp(argv[2], "backward") ? cuda_host::Order::forward : cuda_host::Order::backward;
    if (what == "f16") {
        for (unsigned bits = 0; bits < 65536; bits++) {
            const float value = f16_to_f32(bits);
            std::fwrite(&value, sizeof value, 1, stdout);
        }
        return 0;
    }
    uint32_t out[64] = {};
    cuda_host::launch(1, 64, order, [&] {
        if (what == "warp")
            shuffles(out);
        else if (what == "hang")
            meets_nobody();
        else
            neighbours(out, what == "barrier");
    });
    std::fwrite(out, sizeof out, 1, stdout);
    return 0;
}
