"""FP8, NVFP4 and MXFP4 goldens: `python make_codecs.py OUT.safetensors`.

FP8 by torch, F in fp8_e4m3 (float8_e4m3fn: no infinities, NaN = 0x7f and 0xff) and fp8_e5m2 (float8_e5m2):
  F.x f32[N]   F.bytes u8[N]   torch's cast of x clamped to the largest finite number: nearest, ties to even
  F.table f32[256]             the value of every byte
The clamp is ours: torch casts E5M2 to infinity from 61440 on, and its rule for E4M3 above 464 has changed (2.15 saturates,
infinities too; earlier ones gave NaN).
NVFP4 (E2M1 codes, blocks of 16, E4M3 block scales), by NVIDIA modelopt's NVFP4QTensor with a constant tensor amax of
448, so that the second-level scale nvfp4.s2 f32[1] is f32(448 / 2688):
  nvfp4.x f32[64][64]   nvfp4.codes u8[64][32] (even index in the low nibble)   nvfp4.scales u8[64][4]
  nvfp4.values f32[64][64] the dequantization, code value * (scale * s2)
MXFP4 (E2M1 codes, blocks of 32, E8M0 scales of 2^(floor(log2 amax) - 2)), by torchao's to_mx with FLOOR scaling:
  mxfp4.x f32[48][64]   mxfp4.bytes u8[48][34], each block the scale's byte and 16 bytes with channels j and j + 16
torchao divides by 2^-126 where the scale is 2^-127; such blocks are coded by the definition in f64, which is asserted to give
torchao's bytes for all others.
"""

import sys

import modelopt
import numpy as np
import torch
import torchao
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
DOWN, UP = np.float32(-np.inf), np.float32(np.inf)


def neighbours(values):
    values = np.asarray(values, np.float32)
    return np.concatenate([np.nextafter(values, DOWN), values, np.nextafter(values, UP)])


def fp8(rng, name, dtype, least):
    table = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    largest = torch.finfo(dtype).max
    grid = np.unique(table[:127].numpy())
    grid = grid[np.isfinite(grid)]
    ties = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    # Powers of two on both sides of the range, the saturation's edge, and everything a float can be.
    edges = neighbours([least, least / 2, largest / 2, largest, largest * 29 / 28, largest * 15 / 14, largest * 8 / 7])
    beyond = np.array([0, 1e-45, 1e-38, 1e-8, 1e4, 65504, 3e38, np.inf, np.nan], np.float32)
    low, high = round(np.log2(least)) - 3, round(np.log2(largest)) - 1
    spread = (rng.normal(size=450) * 2.0 ** rng.integers(low, high, size=450)).astype(np.float32)
    positive = np.concatenate([grid, neighbours(ties), edges, beyond, np.abs(spread)])
    x = torch.from_numpy(np.concatenate([positive, -positive]))
    return {f"{name}.x": x, f"{name}.bytes": x.clamp(-largest, largest).to(dtype).view(torch.uint8), f"{name}.table": table}


def tie_blocks(amax, s2):
    """Two blocks of an E4M3-exact amax: inputs whose quotient by the scale is a tie (to the bit where some f32 gives that), in
    both signs; and the f32 just below and just above each, in one sign."""
    unit = np.float32(amax) * s2
    ties = np.array([min(neighbours([np.float32(tie) * unit]), key=lambda x: abs(x / unit - np.float32(tie))) for tie in TIES])
    beside = np.concatenate([np.nextafter(ties, DOWN), np.nextafter(ties, UP)])
    return np.concatenate([[amax], ties, -ties, [-amax]]), np.concatenate([[amax], beside, [-amax]])


def nvfp4_rows(rng, s2):
    rows = []
    for row in range(16):
        first, second = ((8 + (2 * row + column) % 8) * 2.0 ** (row % 9 - 7) for column in range(2))
        rows.append(np.concatenate([*tie_blocks(first, s2), *(-block for block in tie_blocks(second, s2))]))
    x = np.zeros((64, 64), np.float32)
    x[:16] = rows
    x[16:48] = rng.normal(size=(32, 64)) * 2.0 ** rng.integers(-6, 6, size=(32, 1))
    # Negatives that round to zero (code 8), minus zero (code 0), zero blocks of both signs.
    x[48] = -np.abs(rng.normal(size=64)) * 0.01
    x[48, ::16] = 4.0
    x[49, 1:16:2], x[49, 0] = -0.0, 1.0
    x[49, 16:32], x[49, 32:48] = -0.0, 0.0
    x[49, 48:] = rng.normal(size=16)
    # Block scales clamped from below (amax under 2^-9, subnormal, tiny) and from above (amax over 448).
    amaxes = [2.0**-9, 2.0**-10, 1.2e-3, 1e-5, 1e-20, 1e-38, 1e-44, 2.0**-6, 447.0, 448.0, 449.0, 464.0, 465.0, 500.0, 1e4, 3e38]
    for index, amax in enumerate(amaxes):
        row, at = 50 + index // 4, 16 * (index % 4)
        x[row, at : at + 16] = rng.uniform(-1, 1, size=16) * amax
        x[row, at + index % 16] = amax * (-1) ** index
    # Block scales at E4M3's own ties and beside them.
    for row in range(54, 60):
        for column in range(4):
            tie = np.float32((8.5 + (row * 4 + column) % 8) * 2.0 ** (row - 59))
            amax = neighbours([tie])[(row + column) % 3]
            x[row, 16 * column : 16 * column + 16] = rng.uniform(-1, 1, size=16).astype(np.float32) * amax
            x[row, 16 * column + 7] = amax
    x[60:] = rng.standard_t(2, size=(4, 64))
    return x


def nvfp4(rng):
    s2 = torch.tensor([448.0], dtype=torch.float32) / 2688.0
    x = torch.from_numpy(nvfp4_rows(rng, s2.numpy()[0]))
    packed, scales, _ = NVFP4QTensor.quantize(x.clone(), 16, None, s2)
    values = packed.dequantize(torch.float32, scale=scales, double_scale=s2, block_sizes={-1: 16})
    # What the vectors are for must be in them: exact ties of every kind in both signs, and every code.
    quotient = (x.view(64, 4, 16) / (scales.float() * s2).unsqueeze(-1)).view(64, 64)
    codes = torch.stack([packed._quantized_data & 15, packed._quantized_data >> 4], -1).view(64, 64)
    met = {tie: ((quotient == tie).sum().item(), (quotient == -tie).sum().item()) for tie in TIES}
    assert all(min(counts) >= 4 for counts in met.values()), met
    assert set(codes.flatten().tolist()) == set(range(16))
    assert ((quotient < 0) & (codes == 8)).sum() > 20 and codes[49, 1] == 0
    print("exact ties (positive, negative):", met)
    return {"nvfp4.s2": s2, "nvfp4.x": x, "nvfp4.codes": packed._quantized_data, "nvfp4.scales": scales.view(torch.uint8), "nvfp4.values": values}


def mxfp4_rows(rng):
    x = np.zeros((48, 64), np.float32)
    x[:16] = rng.normal(size=(16, 64)) * 2.0 ** rng.integers(-20, 20, size=(16, 1))
    # Ties of every kind and the f32 beside them, in both signs, for several scales; magnitudes that saturate.
    cases = np.concatenate([neighbours(TIES), neighbours([6.0, 7.0]), [7.99, 4.0, -0.0, 0.0, 1e-30]])
    cases = np.concatenate([cases, -cases])[:63].astype(np.float32)
    for row in range(16, 28):
        both = np.concatenate([cases, [4.0]]).reshape(2, 32)
        both[:, 31] = [4.0 if row % 2 else 7.5, -6.5]
        x[row] = rng.permuted(both, axis=1).reshape(64) * np.float32(2.0 ** rng.integers(-100, 100))
    # Largest magnitudes at and beside powers of two, where a logarithm in f32 goes wrong.
    for row in range(28, 36):
        amax = neighbours([2.0 ** (3 * row - 90)])
        for block in range(2):
            x[row, 32 * block : 32 * block + 32] = rng.uniform(-1, 1, size=32).astype(np.float32) * amax[0]
            x[row, 32 * block + row % 32] = amax[(row + block) % 3] * (-1) ** row
    # From the smallest numbers to the largest, and zeros.
    for row, amax in enumerate([1e-45, 2.0**-148, 2.0**-130, 2.0**-127, 2.0**-126, 2.0**-125, 2.0**-124, 2.0**-123, 1e38, 3.4028235e38]):
        x[36 + row] = rng.uniform(-1, 1, size=64) * amax
        x[36 + row, [3, 50]] = amax
    x[46, 32:] = -0.0
    x[47] = rng.standard_t(2, size=64)
    return x


def mxfp4_by_definition(blocks):
    amax = np.abs(blocks).max(axis=1).astype(np.float64)
    exponent = np.where(amax == 0, -1000, np.frexp(amax)[1] - 1) - 2
    exponent = np.clip(exponent, -127, 127)
    quotient = np.abs(blocks.astype(np.float64)) / 2.0 ** exponent[:, None]
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(quotient[..., None] - magnitudes)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    # Of two nearest ones the even code.
    code = np.where(nearest.sum(axis=-1) == 2, (nearest * (np.arange(8) % 2 == 0)).argmax(axis=-1), nearest.argmax(axis=-1))
    return exponent + 127, code + 8 * np.signbit(blocks)


def mxfp4(rng):
    x = mxfp4_rows(rng)
    blocks = x.reshape(-1, 32)
    scale, codes = mxfp4_by_definition(blocks)
    theirs, packed = to_mx(torch.from_numpy(blocks.copy()), torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)
    packed = packed.view(torch.uint8).numpy()
    unpacked = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 32)
    usual = scale > 0
    assert (theirs.view(torch.uint8).numpy().reshape(-1) == scale).all()
    assert (unpacked == codes)[usual].all() and 80 < usual.sum() < len(usual)
    assert set(codes.flatten().tolist()) == set(range(16))
    out = np.concatenate([scale[:, None], codes[:, :16] | codes[:, 16:] << 4], axis=1).astype(np.uint8)
    return {"mxfp4.x": torch.from_numpy(x), "mxfp4.bytes": torch.from_numpy(out.reshape(48, 34))}


def main():
    rng = np.random.default_rng(4480)
    torch.set_num_threads(1)
    arrays = fp8(rng, "fp8_e4m3", torch.float8_e4m3fn, 2.0**-9)
    arrays |= nvfp4(rng)
    arrays |= fp8(rng, "fp8_e5m2", torch.float8_e5m2, 2.0**-16)
    arrays |= mxfp4(rng)
    versions = f"torch {torch.__version__}, nvidia-modelopt {modelopt.__version__}, torchao {torchao.__version__}"
    metadata = {"source": versions}
    save_file({key: value.contiguous() for key, value in arrays.items()}, sys.argv[1], metadata)
    print({key: (str(value.dtype), tuple(value.shape)) for key, value in arrays.items()})


main()
