// What the kernels share: the page, and numbers that need no NVIDIA header.
//
// Every kernel compiles in two ways from the same text: by NVRTC for a GPU, and by any C++17 compiler through
// host/cuda_host_shim.h. So nothing here or in a kernel includes a header of the CUDA toolkit.
// Fused multiply-adds are written `fmaf`; both compilers are told not to fuse anything else.

#pragma once

// Rows of one page: the live rows of one range of PAGE_ROWS absolute positions, in order of position.
constexpr int PAGE_ROWS = 128;

// An open page grows by this many rows: a page's buffer holds whole granules, and a kernel may load (never use)
// the bytes of the last one beyond the last row.
constexpr int GRANULE_ROWS = 16;

constexpr int WARP_LANES = 32;

static inline __device__ float negative_infinity()
{
    return __uint_as_float(0xff800000u);
}

// IEEE binary16 to binary32, exactly, subnormal numbers, infinities and NaN included.
static inline __device__ float f16_to_f32(unsigned bits)
{
    const unsigned sign = (bits & 0x8000u) << 16;
    const unsigned exponent = (bits >> 10) & 0x1fu;
    const unsigned fraction = bits & 0x3ffu;
    if (exponent == 0x1fu)
        return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent == 0) {
        // A subnormal f16 counts in steps of 2^-24, which binary32 holds as a normal number.
        const float magnitude = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -magnitude : magnitude;
    }
    return __uint_as_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
}
