"""GGUF block formats by gguf-py: `python make_dequant.py OUT.safetensors`.

OUT holds, for each format F of F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K:
  F.blocks  u8[n_blocks][block_bytes]  random bytes under finite scales (zero, subnormal and negative ones too)
  F.values  f32[n_blocks][block_len]   their dequantization: products and sums rounded one by one, no fused multiply-add
and for quantization, by gguf-py's twin of ggml's quantize_row_q8_0_ref and quantize_row_q4_0_ref:
  quantize.x f32[64][64]   quantize.q8_0 u8[64][68]   quantize.q4_0 u8[64][36]
"""

import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.numpy import save_file

N_BLOCKS = 8

# Where each format keeps its f16 scales, in bytes from the block's start.
SCALES_AT = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def blocks_of(name, rng):
    if name in ("F16", "BF16"):
        values = rng.normal(size=(N_BLOCKS, 32)) * 10.0 ** rng.integers(-7, 4, size=(N_BLOCKS, 32))
        bits = values.astype(np.float16).view(np.uint16) if name == "F16" else (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        # Both zeros, the least subnormal and the greatest finite number.
        top = 0x7BFF if name == "F16" else 0x7F7F
        bits[0, :6] = [0, 0x8000, 1, 0x8001, top, top | 0x8000]
        return bits.view(np.uint8)
    block_bytes = gguf.GGML_QUANT_SIZES[Type[name]][1]
    blocks = rng.integers(0, 256, size=(N_BLOCKS, block_bytes), dtype=np.uint8)
    for at in SCALES_AT[name]:
        scale = (rng.normal(size=N_BLOCKS) * 10.0 ** rng.integers(-4, 1, size=N_BLOCKS)).astype(np.float16)
        scale[:3] = [0, 6e-8, -3e-6]
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks


def rows_to_quantize(rng):
    x = rng.normal(size=(64, 64)).astype(np.float32)
    # Magnitudes from "the f16 scale becomes 0 though the codes do not" to "near f16's largest scale".
    x[:16] *= (10.0 ** np.linspace(-9, 5, 16)).astype(np.float32)[:, None]
    # The largest magnitude negative, positive, and tied between signs in both orders (the first wins in q4_0).
    x[16:20, 5], x[20:24, 5] = -7.5, 7.5
    x[24:26, 3], x[24:26, 9] = 6.0, -6.0
    x[26:28, 3], x[26:28, 9] = -6.0, 6.0
    x[24:28, 33:] *= 0.25
    # Zero rows, a zero block beside a live one, one live value.
    x[28], x[29, :32], x[30, 32:] = 0.0, 0.0, 0.0
    x[31], x[31, 17] = 0.0, -0.3
    # Ties of the rounding: scales that are exact, values half-way between codes.
    half_steps = np.arange(-127.0, 127.5, 0.5, dtype=np.float32)
    for row in range(32, 44):
        x[row] = rng.choice(half_steps, 64)
        x[row, [0, 32]] = 127.0 if row % 2 else -127.0
        x[row] *= np.float32(2.0 ** rng.integers(-12, 6))
    for row in range(44, 56):
        x[row] = rng.choice(np.arange(-8.0, 8.5, 0.5, dtype=np.float32), 64)
        x[row, [0, 32]] = 8.0 if row % 2 else -8.0
        x[row] *= np.float32(2.0 ** rng.integers(-12, 6))
    # Heavy tails.
    x[56:] = rng.standard_t(2, size=(8, 64)).astype(np.float32)
    return x


def main():
    rng = np.random.default_rng(20240)
    arrays = {}
    for name in ("F16", "BF16", *SCALES_AT):
        blocks = blocks_of(name, rng)
        with np.errstate(invalid="raise", over="raise"):
            values = quants.dequantize(blocks.copy(), Type[name]).astype(np.float32)
        assert np.isfinite(values).all(), name
        arrays[f"{name}.blocks"], arrays[f"{name}.values"] = blocks, values
    x = rows_to_quantize(rng)
    assert len(np.unique(x, axis=0)) == 64
    arrays["quantize.x"] = x
    arrays["quantize.q8_0"] = quants.quantize(x, Type.Q8_0)
    arrays["quantize.q4_0"] = quants.quantize(x, Type.Q4_0)
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, sys.argv[1], {"source": "gguf-py"})
    print({key: (str(value.dtype), value.shape) for key, value in arrays.items()})


main()
