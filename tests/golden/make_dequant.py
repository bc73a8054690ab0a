"""GGUF block formats by gguf-py: `python make_dequant.py OUT.safetensors`.

OUT holds, for each format F of F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K:
  F.blocks  u8[n_blocks][block_bytes]  random bytes under finite scales (zero, subnormal and negative ones too)
  F.values  f32[n_blocks][block_len]   their dequantization: products and sums rounded one by one, no fused multiply-add
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


def main():
    rng = np.random.default_rng(20240)
    arrays = {}
    for name in ("F16", "BF16", *SCALES_AT):
        blocks = blocks_of(name, rng)
        with np.errstate(invalid="raise", over="raise"):
            values = quants.dequantize(blocks.copy(), Type[name]).astype(np.float32)
        assert np.isfinite(values).all(), name
        arrays[f"{name}.blocks"], arrays[f"{name}.values"] = blocks, values
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, sys.argv[1], {"source": "gguf-py"})
    print({key: (str(value.dtype), value.shape) for key, value in arrays.items()})


main()
