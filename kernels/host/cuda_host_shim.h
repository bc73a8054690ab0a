// Runs a CUDA kernel on the CPU, so that its logic can be tested where there is no GPU.
//
// Include this, then the .cu file, in one C++17 translation unit. Each CUDA thread is a fiber (ucontext) with a stack of
// its own; one block runs at a time on one OS thread. A fiber runs until it meets a barrier or a shuffle; a warp goes on
// when all its live threads stand at a warp operation, a block when all its live threads stand at __syncthreads.
// Threads that stand at barriers which can never open end the program with a message: on a GPU they would hang.
//
// `Order` chooses which thread of a block runs first. A kernel that misses a barrier reads what another thread has not
// written yet in one order or the other: run both and compare the bits.
//
// What it does not show: timing, memory that is not coherent, partial masks, tensor cores, more than one block at a time.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_host {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

enum class Order { forward, backward };

// What keeps a fiber from running.
enum class Wait { nothing, warp, block, finished };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Wait wait;
    uint32_t offered;   // what this lane gives to the shuffle it stands at
    uint32_t exchanged; // what it gave to the last shuffle that opened
    bool took_part;     // whether it was alive then
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline unsigned current;
inline const std::function<void()> *kernel;

[[noreturn]] inline void die(const char *what)
{
    std::fprintf(stderr, "cuda_host_shim: block (%u, %u, %u), thread %u: %s\n", blockIdx.x, blockIdx.y, blockIdx.z,
                 current, what);
    std::_Exit(3); // no destructors: they would free the stack this runs on
}

inline void fiber_main()
{
    (*kernel)();
    fibers[current].wait = Wait::finished;
}

inline void pause(Wait wait)
{
    Fiber &self = fibers[current];
    self.wait = wait;
    swapcontext(&self.context, &scheduler);
}

inline void resume(unsigned thread)
{
    current = thread;
    threadIdx = dim3(thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y));
    swapcontext(&scheduler, &fibers[thread].context);
}

// Lets threads first .. end go on if all that are alive wait for `wait`. Says whether any did.
inline bool open(unsigned first, unsigned end, Wait wait)
{
    bool any = false;
    for (unsigned t = first; t < end; t++) {
        if (fibers[t].wait != Wait::finished && fibers[t].wait != wait)
            return false;
        any |= fibers[t].wait == wait;
    }
    for (unsigned t = first; t < end; t++) {
        fibers[t].took_part = fibers[t].wait == wait;
        if (!fibers[t].took_part)
            continue;
        fibers[t].exchanged = fibers[t].offered;
        fibers[t].wait = Wait::nothing;
    }
    return any;
}

inline void run_block(Order order)
{
    const unsigned n = fibers.size();
    for (Fiber &fiber : fibers) {
        getcontext(&fiber.context);
        fiber.stack.resize(STACK_BYTES);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.wait = Wait::nothing;
        makecontext(&fiber.context, fiber_main, 0);
    }
    for (;;) {
        for (unsigned i = 0; i < n; i++) {
            const unsigned thread = order == Order::forward ? i : n - 1 - i;
            if (fibers[thread].wait == Wait::nothing)
                resume(thread);
        }
        bool alive = false;
        for (const Fiber &fiber : fibers)
            alive |= fiber.wait != Wait::finished;
        if (!alive)
            return;
        bool moved = open(0, n, Wait::block);
        for (unsigned first = 0; first < n; first += WARP)
            moved |= open(first, first + WARP < n ? first + WARP : n, Wait::warp);
        if (!moved)
            die("the block's threads wait at different barriers");
    }
}

// kernel<<<grid, block>>>(arguments), with the arguments bound in `call`.
inline void launch(dim3 grid, dim3 block, Order order, const std::function<void()> &call)
{
    gridDim = grid;
    blockDim = block;
    kernel = &call;
    fibers.resize(block.x * block.y * block.z);
    const unsigned n_block = grid.x * grid.y * grid.z;
    for (unsigned i = 0; i < n_block; i++) {
        const unsigned b = order == Order::forward ? i : n_block - 1 - i;
        blockIdx = dim3(b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y));
        run_block(order);
    }
}

// The value that `source_lane` of this warp offers; a lane beyond the warp means one's own.
template <typename T> T exchange(unsigned mask, T value, unsigned source_lane)
{
    static_assert(sizeof(T) == sizeof(uint32_t), "shuffles move 32 bits");
    if (mask != 0xffffffffu)
        die("only full warp masks are modelled");
    std::memcpy(&fibers[current].offered, &value, sizeof value);
    pause(Wait::warp);
    if (source_lane >= WARP)
        return value;
    const unsigned source = current / WARP * WARP + source_lane;
    if (source >= fibers.size() || !fibers[source].took_part)
        die("a shuffle reads a lane that does not take part");
    std::memcpy(&value, &fibers[source].exchanged, sizeof value);
    return value;
}

} // namespace cuda_host

inline void __syncthreads()
{
    cuda_host::pause(cuda_host::Wait::block);
}

inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    cuda_host::exchange(mask, 0u, cuda_host::WARP);
}

template <typename T> T __shfl_sync(unsigned mask, T value, int source_lane)
{
    return cuda_host::exchange(mask, value, source_lane % cuda_host::WARP);
}

template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask)
{
    return cuda_host::exchange(mask, value, (cuda_host::current % cuda_host::WARP) ^ lane_mask);
}

template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned distance)
{
    return cuda_host::exchange(mask, value, cuda_host::current % cuda_host::WARP + distance);
}

inline float __uint_as_float(unsigned bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
