"""FP8 and NVFP4 with scales, biases and choices learnt from calibration rows: `python make_scaled.py OUT.safetensors`.

  samples f32[2][8][64]   calibration rows of two KV heads of one layer; every format below is that of head 1
  x f32[32][64]           the rows that are coded
FP8, F in fp8_e4m3 and fp8_e5m2, S in tensor (one amax), head (head 1's amax), token (each row's amax):
  F.S.bytes u8[32][64]    torch's cast of clamp(x * (MAX / amax)); with S = token, F.token.scales f32[32] is 1 / (MAX / amax)
  F.S.values f32[32][64]  NVIDIA modelopt's eager fake quantization for E4M3 (asserted to be bytes * (1 / (MAX / amax))), the same
                          arithmetic for E5M2, which modelopt has not
NVFP4 by modelopt's NVFP4QTensor, MaxCalibrator and BiasCalibrator, V in calibrated, mean (affine, with the calibrated amax),
max_min (with the constant one), four_over_six (constant), all (calibrated, mean, four_over_six):
  nvfp4.V.bytes u8[32][36] codes, then scales   nvfp4.V.values f32[32][64]
Four over six takes the block scale whose dequantization has the smaller squared error, as modelopt's MSE calibration and the
paper's code (mit-han-lab/fouroversix) do; modelopt's own search runs on a GPU only. No block's choice hangs on the order of a
sum: its two errors are equal, or a millionth apart.
"""

import sys

import modelopt
import numpy as np
import torch
from modelopt.torch.quantization.calib import MaxCalibrator
from modelopt.torch.quantization.calib.bias import BiasCalibrator
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from modelopt.torch.quantization.tensor_quant import fp8_eager
from modelopt.torch.quantization.utils.numeric_utils import E4M3_MAX, E4M3_MAX_46
from safetensors.torch import save_file


def calibration_rows(rng):
    # Sixty-fourths, so that means of 8 rows are exact in any order of summation; channels have biases of their own.
    rows = rng.normal(size=(2, 8, 64)) * np.array([3.0, 1.5])[:, None, None] + rng.normal(size=(2, 1, 64)) * 2
    return torch.from_numpy((np.round(rows * 64) / 64).astype(np.float32))


def rows_to_code(rng, samples):
    x = rng.normal(size=(32, 64)) * 2.0 ** rng.integers(-6, 3, size=(32, 1))
    x[:12] = samples[1].numpy().mean(axis=0) + rng.normal(size=(12, 64))
    # Beyond every amax, zeros of both signs, nearly nothing (below and above 2^-24), one live channel.
    x[24], x[25], x[26] = rng.normal(size=64) * 100, 0.0, -0.0
    x[27], x[28] = rng.uniform(-1, 1, size=64) * 2.0**-25, rng.uniform(-1, 1, size=64) * 2.0**-23
    x[29], x[29, 17] = 0.0, -3.25
    x[30] = rng.standard_t(2, size=64)
    return torch.from_numpy(x.astype(np.float32))


def amax_of(rows):
    calibrator = MaxCalibrator(num_bits=8, axis=None)
    calibrator.collect(rows)
    return calibrator.compute_amax()


def fp8(samples, x):
    arrays = {}
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        largest = torch.finfo(dtype).max
        token = x.abs().amax(dim=1, keepdim=True)
        token = torch.where(token <= 2.0**-24, torch.ones_like(token), token)
        for scope, amax in (("tensor", amax_of(samples)), ("head", amax_of(samples[1])), ("token", token)):
            up = largest / amax
            codes = (x * up).clamp(-largest, largest).to(dtype)
            values = codes.float() * (1 / up)
            if name == "fp8_e4m3":
                assert (values == fp8_eager(x, amax)).all()
            arrays[f"{name}.{scope}.bytes"], arrays[f"{name}.{scope}.values"] = codes.view(torch.uint8), values
        arrays[f"{name}.token.scales"] = (1 / up).reshape(-1)
    return arrays


def biases(samples, method):
    if method is None:
        return torch.zeros(2, 1, 64)
    # [batch, heads, tokens, channels]; the recipe's axes -2 and -4 are those that are reduced.
    calibrator = BiasCalibrator(method=method, axis=(-2, -4))
    calibrator.collect(samples[None])
    return calibrator.compute_bias()[0]


def nvfp4(samples, x, calibrated, method, four_over_six):
    bias = biases(samples, method)
    fp8_max = E4M3_MAX_46 if four_over_six else E4M3_MAX
    s2 = amax_of(samples - bias) / (6.0 * fp8_max) if calibrated else torch.tensor(448.0) / 2688.0
    centred = x - bias[1]
    blocks = centred.view(-1, 16)

    def coded(multiplier):
        wanted = blocks.abs().amax(dim=1) * multiplier / (6.0 * s2)
        wanted[wanted == 0] = 1.0
        scales = NVFP4QTensor._cast_per_block_scale_to_fp8(wanted).view(32, 4)
        packed, _, _ = NVFP4QTensor.quantize(centred.clone(), 16, scales, s2)
        values = packed.dequantize(torch.float32, scale=scales, double_scale=s2, block_sizes={-1: 16})
        return packed._quantized_data.view(32, 4, 8), scales.view(torch.uint8), values

    codes, scales, values = coded(1.0)
    if four_over_six:
        others = coded(1.5)
        errors = [((v.double() - centred.double()) ** 2).view(32, 4, 16).sum(dim=2) for v in (values, others[2])]
        gap = (errors[0] - errors[1]).abs()
        assert ((gap == 0) | (gap > 1e-6 * errors[0])).all()
        four = errors[1] < errors[0]
        assert 20 < four.sum() < 108
        codes = torch.where(four[..., None], others[0], codes)
        scales = torch.where(four, others[1], scales)
        values = torch.where(four.repeat_interleave(16, dim=1), others[2], values)
    return torch.cat([codes.reshape(32, 32), scales], dim=1), values + bias[1] if method else values


def main():
    rng = np.random.default_rng(4606)
    torch.set_num_threads(1)
    samples = calibration_rows(rng)
    x = rows_to_code(rng, samples)
    arrays = {"samples": samples, "x": x} | fp8(samples, x)
    for name, settings in {
        "calibrated": (True, None, False),
        "mean": (True, "mean", False),
        "max_min": (False, "max_min", False),
        "four_over_six": (False, None, True),
        "all": (True, "mean", True),
    }.items():
        arrays[f"nvfp4.{name}.bytes"], arrays[f"nvfp4.{name}.values"] = nvfp4(samples, x, *settings)
    metadata = {"source": f"torch {torch.__version__}, nvidia-modelopt {modelopt.__version__}"}
    save_file({key: value.contiguous() for key, value in arrays.items()}, sys.argv[1], metadata)
    print({key: (str(value.dtype), tuple(value.shape)) for key, value in arrays.items()})


main()
