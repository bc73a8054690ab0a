"""Integer groups, TurboQuant and KVQuant goldens: `python make_int.py OUT.safetensors`.

Integer groups, written from their definition in numpy's f32 (steps and zeros in f16, bf16 or E4M3). Cases are
named int.B.AXIS.ZERO.SCALES.N.DIM.GROUP, B bits, N rows, and code the rows x.N.DIM f32[N][DIM]:
  CASE.codes u8[N][DIM]   CASE.step f32[groups]   CASE.zero f32[groups]
Groups are [row][group of channels] by token, [group of rows][channel] by channel; a value is zero + code * step.
KIVI's own arithmetic, all of it in f16 (scale = (max - min) / (2^b - 1), code = round(clamp((x - min) / scale))), by torch:
  kivi.x f16[128][64]   kivi.B.k f16[128][64] by channel over 32 rows   kivi.B.v f16[128][64] by token over 32 channels
TurboQuant's levels, of sqrt(d) times a coordinate of a random point on the unit sphere, with scipy's incomplete beta function:
  turbo.D.B f64[2^B]
KVQuant with uniform weights, a share of outliers of 0.05, fitted to kvquant.samples f32[96][20] and used on kvquant.x f32[12][20]:
  kvquant.SIDE.B.levels f64[2^B]   .codes u8[12][20]   .outliers u8[12][1]   .values f32[12][20] decoded
"""

import sys

import numpy as np
import scipy
import torch
from safetensors.numpy import save_file
from scipy.special import betainc

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def to_f16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


def f16_down(x):
    near = x.astype(np.float16)
    return np.where(near > x, np.nextafter(near, np.float16(-np.inf)), near).astype(np.float32)


def bf16_down(x):
    """Cutting the mantissa goes towards zero: of negative numbers one step more."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    cut = bits & np.uint32(0xFFFF0000)
    return np.where((cut != bits) & (x < 0), cut + np.uint32(0x10000), cut).astype(np.uint32).view(np.float32)


def e4m3_up(magnitude):
    """The smallest E4M3 number that is not below."""
    return E4M3[np.minimum(np.searchsorted(E4M3, magnitude, side="left"), 126)]


def e4m3_down(magnitude):
    return E4M3[np.searchsorted(E4M3, magnitude, side="right") - 1]


def e4m3_down_signed(x):
    return np.where(x < 0, -e4m3_up(np.maximum(-x, 0)), e4m3_down(np.maximum(x, 0)))


DOWN = {"f16": f16_down, "bf16": bf16_down, "fp8": e4m3_down_signed}


def grid(low, high, bits, zero, scales):
    """Stored step (rounded up) and zero (rounded down) of groups from `low` to `high`; E4M3 holds the span."""
    symmetric, down = zero == "symmetric", DOWN[scales]
    divisor = np.float32(2 ** (bits - 1) - 1 if symmetric else 2**bits - 1)
    stored = None if symmetric else down(low + np.float32(0)).astype(np.float32)
    span = np.maximum(high, -low) if symmetric else high - stored
    step = -down(-span) / divisor if scales == "fp8" else -down(-(span / divisor))
    step = step.astype(np.float32)
    return step, np.float32(-(2 ** (bits - 1))) * step if symmetric else stored


def integer(x, bits, axis, zero, scales, group):
    n, dim = x.shape
    along = x if axis == "token" else x.T
    step, stored, codes = [], [], np.zeros_like(along, dtype=np.uint8)
    for first in range(0, along.shape[1], group):
        part = along[:, first : first + group]
        s, z = grid(part.min(1), part.max(1), bits, zero, scales)
        divided = (part - z[:, None]) / np.where(s == 0, np.float32(np.inf), s)[:, None]
        q = np.clip(np.rint(divided), 1 if zero == "symmetric" else 0, 2**bits - 1)
        codes[:, first : first + group] = q
        step.append(s)
        stored.append(z)
    step, stored = np.stack(step), np.stack(stored)
    if axis == "token":
        return codes, step.T, stored.T
    return codes.T, step, stored


def rows(rng, n, dim):
    """Channels with an offset and a size of their own, a few outliers, a constant channel, zeros."""
    x = rng.normal(size=(n, dim)) * 2.0 ** rng.integers(-4, 3, size=dim) + rng.normal(size=dim) * 2
    x[:, dim // 2] = 0.7182
    x[n // 2] = 0
    x[rng.integers(0, n, 5), rng.integers(0, dim, 5)] *= 20
    return x.astype(np.float32)


SHAPES = [("token", 6, 80, 32), ("channel", 40, 33, 32)]
MORE_SHAPES = [("token", 6, 64, 64), ("token", 6, 33, 32), ("token", 6, 256, 128), ("token", 6, 20, 64)]
MORE_SHAPES += [("channel", 128, 80, 128), ("channel", 128, 20, 32), ("channel", 40, 64, 64)]
VARIANTS = [("asymmetric", "f16"), ("symmetric", "f16"), ("asymmetric", "bf16"), ("asymmetric", "fp8"), ("symmetric", "fp8")]


def integers(rng):
    arrays = {f"x.{n}.{dim}": rows(rng, n, dim) for _, n, dim, _ in SHAPES + MORE_SHAPES}
    for bits in (2, 3, 4, 8):
        for zero, scales in VARIANTS:
            for axis, n, dim, group in SHAPES + MORE_SHAPES * ((zero, scales) == VARIANTS[0]):
                coded = integer(arrays[f"x.{n}.{dim}"], bits, axis, zero, scales, group)
                name = f"int.{bits}.{axis}.{zero}.{scales}.{n}.{dim}.{group}"
                arrays |= {f"{name}.{key}": value for key, value in zip(("codes", "step", "zero"), coded)}
    return arrays


def kivi_group(x, bits):
    """KIVI's quantizer over the last axis, in f16 throughout."""
    low, high = x.min(-1, keepdim=True).values, x.max(-1, keepdim=True).values
    scale = (high - low) / (2**bits - 1)
    codes = ((x - low) / scale).clamp(0, 2**bits - 1).round()
    return codes * scale + low


def kivi(rng):
    x = torch.from_numpy(rows(rng, 128, 64) + rng.normal(size=(128, 64)).astype(np.float32) * np.float32(0.01)).half()
    arrays = {"kivi.x": x}
    for bits in (2, 4):
        arrays[f"kivi.{bits}.k"] = kivi_group(x.T.reshape(64, 4, 32), bits).reshape(64, 128).T
        arrays[f"kivi.{bits}.v"] = kivi_group(x.reshape(128, 2, 32), bits).reshape(128, 64)
    return {key: value.numpy() for key, value in arrays.items()}


def sphere_levels(dim, bits):
    """(t + 1) / 2 of a coordinate t is Beta(a, a) with a = (d - 1) / 2; the mean below a border is that of Beta(a + 1, a)."""
    a = (dim - 1) / 2
    levels = np.linspace(0, 1, 2**bits + 2)[1:-1] * 2 - 1
    levels *= min(1, 3 / np.sqrt(dim))
    for _ in range(5000):
        borders = np.concatenate([[0], ((levels[1:] + levels[:-1]) / 2 + 1) / 2, [1]])
        mass, moment = np.diff(betainc(a, a, borders)), np.diff(betainc(a + 1, a, borders)) / 2
        levels = moment / mass * 2 - 1
    return levels * np.sqrt(dim)


def turbo():
    return {f"turbo.{dim}.{bits}": sphere_levels(dim, bits) for dim in (4, 20, 33, 64, 128, 256) for bits in (2, 3, 4)}


def line_levels(numbers, bits):
    numbers, n = np.sort(numbers.astype(np.float64)), 2**bits
    levels = numbers[(2 * np.arange(n) + 1) * len(numbers) // (2 * n)]
    for _ in range(3000):
        cells = np.digitize(numbers, (levels[1:] + levels[:-1]) / 2)
        levels = np.array([numbers[cells == i].mean() if (cells == i).any() else levels[i] for i in range(n)])
    return levels


def half(low, high):
    return low / np.float32(2) + high / np.float32(2), high / np.float32(2) - low / np.float32(2)


def kvquant(rng):
    share, n_outliers = 0.05, 1
    samples, x = np.split(rows(rng, 108, 20) - np.float32(0.25), [96])
    arrays = {"kvquant.samples": samples, "kvquant.x": x}
    cut = int(len(samples) * share / 2)
    ordered = np.sort(samples, axis=0)
    key_middle, key_width = half(ordered[cut], ordered[-1 - cut])
    key_width = np.where(key_width > 0, key_width, np.float32(1))

    def normalised(r, side):
        if side == "k":
            z = (r - key_middle) / key_width
            outlier = np.argsort(-np.abs(z), axis=1, kind="stable")[:, :n_outliers]
            return z, outlier, key_middle, key_width
        mean = r.astype(np.float64).mean(1, keepdims=True).astype(np.float32)
        outlier = np.argsort(-np.abs(r - mean), axis=1, kind="stable")[:, :n_outliers]
        rest = np.ma.masked_array(r, np.zeros(r.shape, bool))
        np.put_along_axis(rest.mask, outlier, True, 1)
        middle, width = (to_f16(part.data)[:, None] for part in half(rest.min(1), rest.max(1)))
        return np.where(width > 0, (r - middle) / np.where(width > 0, width, 1), 0), outlier, middle, width

    for side in "kv":
        z, outlier, *_ = normalised(samples, side)
        dense = np.ones(z.shape, bool)
        np.put_along_axis(dense, outlier, False, 1)
        for bits in (2, 3, 4):
            levels = line_levels(z[dense], bits)
            coded, outlier, middle, width = normalised(x, side)
            codes = np.digitize(coded, ((levels[1:] + levels[:-1]) / 2).astype(np.float32))
            values = levels.astype(np.float32)[codes] * width + middle
            np.put_along_axis(values, outlier, to_f16(np.take_along_axis(x, outlier, 1)), 1)
            parts = {"levels": levels, "codes": codes.astype(np.uint8), "outliers": outlier.astype(np.uint8), "values": values}
            arrays |= {f"kvquant.{side}.{bits}.{key}": value for key, value in parts.items()}
    return arrays


def main():
    rng = np.random.default_rng(2402)
    arrays = {key: np.ascontiguousarray(value) for key, value in (integers(rng) | kivi(rng) | turbo() | kvquant(rng)).items()}
    save_file(arrays, sys.argv[1], {"source": f"numpy {np.__version__}, scipy {scipy.__version__}, torch {torch.__version__}"})
    print(len(arrays), "arrays", sum(value.nbytes for value in arrays.values()), "bytes")


main()
