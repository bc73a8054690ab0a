#!/usr/bin/env python3
"""Is it arithmetic? kvlab and llama-perplexity on the same text, with a GGUF's weights as they are and as floats.

Over quantized weights llama.cpp rounds activations to 8 bits for its products; over float weights it does not. So the
file's weights are expanded, and each program writes its logits of the same windows and is judged by the other: once
with the file, once with its float twin. Ends with code 1 unless, over float weights, the perplexities agree within a
part of 0.001 and the KL divergences are below 1e-5 both ways.
Needs numpy and gguf (pip install gguf), llama-perplexity, and kvlab.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PPL_WITHIN = 1e-3
KLD_WITHIN = 1e-5


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="a GGUF file of quantized weights")
    p.add_argument("--text", type=Path, required=True)
    p.add_argument("--kvlab", type=Path, default=ROOT / "target/release/kvlab")
    p.add_argument("--llama-perplexity", type=Path, default=ROOT / "target/peers/llama.cpp/build/bin/llama-perplexity")
    p.add_argument("--ctx", type=int, default=512)
    p.add_argument("--chunks", type=int, default=8)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--float", choices=("f32", "f16"), default="f32", help="type of the expanded matrices")
    p.add_argument("--cache", default="f32", help="both caches' rows: f32, f16, ...")
    p.add_argument("--out", type=Path, default=ROOT / "target/float-weights")
    args = p.parse_args()
    for name in ("model", "text", "kvlab", "llama_perplexity"):
        if not getattr(args, name).exists():
            p.error(f"--{name.replace('_', '-')}: {getattr(args, name)} is not there")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def expanded(args):
    """The same model with every matrix as floats; the file's other keys stay."""
    import gguf
    import numpy

    path = args.out / f"{args.model.stem}.{args.float}.gguf"
    if path.exists():
        return path
    source = gguf.GGUFReader(args.model)
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, source.fields["general.architecture"].contents())
    kinds = {"f32": (numpy.float32, gguf.LlamaFileType.ALL_F32), "f16": (numpy.float16, gguf.LlamaFileType.MOSTLY_F16)}
    kind, file_type = kinds[args.float]
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = int(file_type) if field.name == "general.file_type" else field.contents()
        is_list = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, value, field.types[0], sub_type=field.types[-1] if is_list else None)
    for tensor in source.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(kind if values.ndim > 1 else numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path


def run(*command):
    child = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if child.returncode:
        tail = "\n".join((child.stdout + child.stderr).splitlines()[-15:])
        sys.exit(f"{' '.join(map(str, command))}\nended with code {child.returncode}:\n{tail}")
    return child.stdout + child.stderr


def both_ways(args, model):
    """What each program says of itself and of the other's file."""
    theirs, ours = args.out / "llama.kld", args.out / "kvlab.kld"
    llama = [args.llama_perplexity, "-m", model, "-t", args.threads, "-ctk", args.cache, "-ctv", args.cache]
    llama += ["-c", args.ctx, "-b", args.ctx]
    kvlab = [args.kvlab, "kld", "--model", model.resolve(), "--threads", args.threads, "--json", "-q"]
    windows = ["-c", args.ctx, "--chunks", args.chunks]
    run(*llama, "-f", args.text, "--chunks", args.chunks, "--kl-divergence-base", theirs)
    (judged,) = json.loads(run(*kvlab, "--base", theirs, "-s", args.cache))["rows"]
    run(*kvlab, "--write", "--base", ours, "-s", args.cache, "-f", args.text, *windows)
    text = run(*llama, "--kl-divergence-base", ours, "--kl-divergence")
    theirs.unlink()
    ours.unlink()
    said = {key: judged["statistics"][key]["value"] for key in ("ppl", "ppl_base", "kld")}
    lines = {"ppl": r"Mean PPL\(Q\)", "ppl_base": r"Mean PPL\(base\)", "kld": "Mean    KLD"}
    return said, {key: float(re.search(rf"^{line} *: *(\S+)", text, re.MULTILINE)[1]) for key, line in lines.items()}


def main():
    args = arguments()
    print("PPL: each program's own logits. in file: the same from its file of logits, where no token is less likely than")
    print("e^-16 of the likeliest. KLD: nats per token, of the one named first against the other's file.\n")
    print("| weights | PPL kvlab | PPL llama.cpp | ln ratio | kvlab's in file | llama.cpp's in file | KLD kvlab | KLD llama.cpp |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    agree = True
    for name, model in (("as they are", args.model), (args.float, expanded(args))):
        ours, theirs = both_ways(args, model)
        apart = math.log(ours["ppl"] / theirs["ppl"])
        agree = abs(apart) <= PPL_WITHIN and max(ours["kld"], theirs["kld"]) <= KLD_WITHIN
        print(
            f"| {name} | {ours['ppl']:.4f} | {theirs['ppl']:.4f} | {apart:+.1e} | {theirs['ppl_base']:.4f} "
            f"| {ours['ppl_base']:.4f} | {ours['kld']:.1e} | {theirs['kld']:.1e} |"
        )
    print("\nagree over float weights" if agree else "\ndo not agree over float weights")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
