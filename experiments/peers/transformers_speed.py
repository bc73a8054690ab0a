"""Prefill, decode and scoring speed of transformers in f32 with its DynamicCache; a JSON array on standard output.

Run by compare.py in a process of its own, since importing torch and expanding the weights takes longer than a test.
"""

import argparse
import json
import time

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

CHUNK = 512


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("text")
    p.add_argument("--tokenizer", help="tokenizer.json; without it the ids are made up, and there is no perplexity")
    p.add_argument("--threads", type=int, required=True)
    p.add_argument("-p", default="0")
    p.add_argument("-n", type=int, default=0)
    p.add_argument("-d", default="0")
    p.add_argument("--n-score", type=int, default=0)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    folder, _, file = args.model.rpartition("/")
    model = AutoModelForCausalLM.from_pretrained(folder or ".", gguf_file=file, dtype=torch.float32).eval()
    ids = tokens(args)
    rows = [prefill(model, ids, int(n)) for n in args.p.split(",") if int(n)]
    if args.n:
        rows += [decode(model, ids, int(depth), args.n) for depth in args.d.split(",")]
    if args.n_score:
        rows.append(score(model, ids, args.n_score))
    print(json.dumps(rows))


def tokens(args):
    if args.tokenizer is None:
        return torch.arange(1 << 14)[None] * 97 % 40_000
    text = open(args.text, encoding="utf-8").read()[: 1 << 18]
    return torch.tensor([Tokenizer.from_file(args.tokenizer).encode(text, add_special_tokens=False).ids])


def timed(test, n, work):
    """The second of two runs: the first allocates."""
    for _ in range(2):
        cache = DynamicCache()
        run = work(cache)
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"test": test, "ts": n / wall, "tokens_per_cpu_s": n / cpu}


def feed(model, ids, cache):
    for chunk in ids.split(CHUNK, dim=1):
        model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)


def prefill(model, ids, n):
    return timed(f"pp{n}", n, lambda cache: lambda: feed(model, ids[:, :n], cache))


def decode(model, ids, depth, n):
    def work(cache):
        if depth:
            feed(model, ids[:, :depth], cache)

        def run():
            for i in range(depth, depth + n):
                model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)

        return run

    return timed(f"tg{n}" + (f" @ d{depth}" if depth else ""), n, work)


def score(model, ids, n):
    def run():
        logits = model(ids[:, :n], use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:n])

    return timed(f"ppl{n}", n, lambda cache: run)


if __name__ == "__main__":
    main()
