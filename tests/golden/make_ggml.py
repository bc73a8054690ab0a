"""ggml's own block quantizers, called in the shared library of the xllamacpp wheel: `python make_ggml.py OUT.safetensors`.

OUT holds rows x f32[N][64] and, for each format F of q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl,
  F.bytes u8[N][row_bytes]   by quantize_row_F_ref, which is what a cache on a CPU is written with (q8_0's SIMD twin apart)
  F.values f32[N][64]        by dequantize_row_F (f16 scales that overflowed give infinities and NaN)
and for mxfp4, whose quantizer is not ours (ties): mxfp4.bytes u8[64][34] random, mxfp4.values f32[64][64].

gguf-py's numpy twins are asserted to agree wherever it has them. The library is compiled for plain x86-64, so products and
sums are rounded one by one; rows 64 to 79 hold values where a fused multiply-add would give another code.
"""

import ctypes
import pathlib
import sys

import gguf
import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.numpy import save_file

BLOCK = 32
BLOCK_BYTES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18, "mxfp4": 17}
DOWN, UP = np.float32(-np.inf), np.float32(np.inf)


def library():
    folder = pathlib.Path(xllamacpp.__file__).parent
    return ctypes.CDLL(str(next(folder.glob("*.so"))))


def call(function, source, target):
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    n_values = (source if source.dtype == np.float32 else target).size
    function(source.ctypes.data, target.ctypes.data, n_values)


def quantized(ggml, name, x):
    out = np.zeros((len(x), x.shape[1] // BLOCK * BLOCK_BYTES[name]), np.uint8)
    call(getattr(ggml, f"quantize_row_{name}_ref"), np.ascontiguousarray(x), out)
    return out


def dequantized(ggml, name, blocks):
    out = np.zeros((len(blocks), blocks.shape[1] // BLOCK_BYTES[name] * BLOCK), np.float32)
    call(getattr(ggml, f"dequantize_row_{name}"), np.ascontiguousarray(blocks), out)
    return out


def first_rows(rng):
    x = rng.normal(size=(64, 64)).astype(np.float32)
    # Magnitudes from "the f16 scale becomes 0 though the codes do not" to "beyond f16's largest minimum".
    x[:16] *= (10.0 ** np.linspace(-9, 5, 16)).astype(np.float32)[:, None]
    # The largest magnitude negative, positive, and tied between signs in both orders (the first wins).
    x[16:20, 5], x[20:24, 5] = -7.5, 7.5
    x[24:26, 3], x[24:26, 9] = 6.0, -6.0
    x[26:28, 3], x[26:28, 9] = -6.0, 6.0
    x[24:28, 33:] *= 0.25
    # Zero rows, a zero block beside a live one, one live value.
    x[28], x[29, :32], x[30, 32:] = 0.0, 0.0, 0.0
    x[31], x[31, 17] = 0.0, -0.3
    # Ties of the rounding: scales that are exact, values half-way between codes.
    half_steps = np.arange(-127.0, 127.5, 0.5, dtype=np.float32)
    for row in range(32, 40):
        x[row] = rng.choice(half_steps, 64)
        x[row, [0, 32]] = 127.0 if row % 2 else -127.0
    for row in range(40, 56):
        codes = 8.0 if row < 48 else 16.0
        x[row] = rng.choice(np.arange(-codes, codes + 0.5, 0.5, dtype=np.float32), 64)
        x[row, [0, 32]] = codes if row % 2 else -codes
    x[32:56] *= (2.0 ** rng.integers(-12, 6, size=24)).astype(np.float32)[:, None]
    # Heavy tails.
    x[56:] = rng.standard_t(2, size=(8, 64)).astype(np.float32)
    return x


def fused_rows(rng, codes):
    """Rows whose values stand within an ulp of a tie between two of the codes of a signed scale, where product and sum rounded
    one by one differ from a fused multiply-add."""
    rows = []
    while len(rows) < 8:
        row = []
        for _ in range(2):
            extreme = -np.float32(rng.uniform(codes, 2 * codes))
            inverse = np.float32(1) / (extreme / np.float32(-codes))
            ties = ((rng.integers(0, 2 * codes, 31) - codes + 0.5) / np.float64(inverse)).astype(np.float32)
            row += [[extreme], np.nextafter(ties, rng.choice([DOWN, UP], 31))]
        row = np.concatenate(row).astype(np.float32)
        inverse = np.float32(1) / (row.reshape(2, 32)[:, :1] / np.float32(-codes))
        apart = row.reshape(2, 32) * inverse + np.float32(codes + 0.5)
        fused = (row.reshape(2, 32).astype(np.float64) * inverse.astype(np.float64) + (codes + 0.5)).astype(np.float32)
        if (np.trunc(apart) != np.trunc(fused)).any():
            rows.append(row)
    return rows


def range_rows(rng):
    """Ties for scales with a minimum, zeros of both signs as the minimum, equal values, and blocks that are nearly nothing."""
    rows = []
    for row in range(8):
        codes = 15 if row % 2 else 31
        steps = rng.choice(np.arange(0, codes + 0.5, 0.5), 64)
        steps[[1, 33]], steps[[7, 40]] = 0, codes
        rows.append((steps * 2.0 ** rng.integers(-6, 6) - rng.integers(0, 20)).astype(np.float32))
    zeros = np.abs(rng.normal(size=(2, 64))).astype(np.float32) + np.float32(0.1)
    zeros[0, [5, 38]], zeros[0, [21, 60]] = -0.0, 0.0
    zeros[1, [5, 38]], zeros[1, [21, 60]] = 0.0, -0.0
    equal = np.repeat(np.array([[2.5, -0.75]], np.float32), 32, axis=1)
    tiny = (rng.normal(size=(3, 64)) * np.array([[1e-13], [2e-15], [1e-16]])).astype(np.float32)
    negative = np.array([[-0.0] * 64], np.float32)
    levels = np.array(quants.IQ4_NL.kvalues, np.float32)
    middles = np.concatenate([levels, (levels[1:] + levels[:-1]) / 2, [5.0]])
    uneven = np.stack([rng.permutation(np.concatenate([middles, middles])) * np.float32(2.0**s) for s in (-9, 0)]).astype(np.float32)
    return [*rows, *zeros, *equal, *tiny, *negative, *uneven]


def main():
    rng = np.random.default_rng(20261)
    ggml = library()
    x = np.stack([*first_rows(rng), *fused_rows(rng, 8), *fused_rows(rng, 16), *range_rows(rng)])
    arrays = {"x": x}
    for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"):
        got = quantized(ggml, name, x)
        if name == "iq4_nl":
            # This version leaves the codes of a block below 1e-15 as its stack held them; newer ones write zeros.
            blocks = got.reshape(-1, BLOCK_BYTES[name])
            blocks[np.abs(x.reshape(-1, BLOCK)).max(axis=1) < 1e-15] = 0
        else:
            with np.errstate(over="ignore"):
                twin = quants.quantize(x, Type[name.upper()])
            # Of zeros of both signs numpy's minimum and maximum may take another one than a loop.
            plain = ~((x == 0) & np.signbit(x)).any(axis=1)
            assert (got == twin)[plain].all() and plain.sum() > 90, name
        arrays[f"{name}.bytes"] = got
        arrays[f"{name}.values"] = dequantized(ggml, name, got)
    blocks = rng.integers(0, 256, size=(64, 34), dtype=np.uint8)
    # 255 is E8M0's NaN, which ggml reads as a number.
    blocks[:, [0, 17]] = np.minimum(blocks[:, [0, 17]], 254)
    blocks[:4, 0] = [0, 1, 2, 254]
    arrays["mxfp4.bytes"], arrays["mxfp4.values"] = blocks, dequantized(ggml, "mxfp4", blocks)
    source = f"xllamacpp {xllamacpp.__version__} (ggml), gguf-py"
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, sys.argv[1], {"source": source})
    print(source, {key: (str(value.dtype), value.shape) for key, value in arrays.items()})


main()
