"""lm-evaluation-harness's answers to the first items of local files: OUT/TASK.json for each task, written as it is done.

Run by lm_eval.py in a process of its own. The model is a GGUF file's weights, expanded to f32 by transformers.
"""

import argparse
import json
import logging
import platform
import time
from pathlib import Path

import lm_eval
import torch
import transformers
from definitions import definition
from lm_eval.models.huggingface import HFLM

# Another version has other prompts, and other names inside.
VERSION = "0.4.13"
# Logits kept before the first token that a request does not share with the one before it: the longest beginning that two
# choices may share.
KEPT = 128


class SharedPrefix(HFLM):
    """The harness's own model class, which reads only what a request does not share with the one before it.

    Prompts, tokens, batches and scores are the parent's: it looks at the last logits of a call only, as many as the
    continuation has tokens, and fewer are an error here.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._ids, self._rows, self._logits = [], transformers.DynamicCache(), None

    def _model_call(self, inps, attn_mask=None, labels=None):
        (ids,) = inps.tolist()
        pairs = enumerate(zip(self._ids, ids[:-1], strict=False))
        n = next((i for i, (a, b) in pairs if a != b), min(len(self._ids), len(ids) - 1))
        self._rows.crop(n)
        with torch.no_grad():
            logits = self.model(inps[:, n:], past_key_values=self._rows, use_cache=True).logits
        if n:
            first = len(self._ids) - self._logits.shape[1]
            logits = torch.cat([self._logits[:, max(n - KEPT - first, 0) : max(n - first, 0)], logits], 1)
        self._ids, self._logits = ids, logits
        return logits

    def _select_cont_toks(self, logits, contlen=None, inplen=None):
        assert contlen <= inplen <= logits.shape[0], "a continuation begins before the logits that were kept"
        return super()._select_cont_toks(logits, contlen, inplen)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--data-dir", type=Path, required=True)
    p.add_argument("--tasks", required=True)
    p.add_argument("--items", type=int, required=True)
    p.add_argument("--shots", type=int, required=True)
    p.add_argument("--threads", type=int, required=True)
    p.add_argument("--whole", action="store_true", help="read every request from its first token")
    args = p.parse_args()
    if lm_eval.__version__ != VERSION:
        raise SystemExit(f"lm-eval is {lm_eval.__version__}, compared is {VERSION}: pip install 'lm-eval=={VERSION}'")
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    lm = model(args)
    for task in args.tasks.split(","):
        out = args.out / f"{task}.json"
        whole = out.with_suffix(".part")
        whole.write_text(json.dumps(answers(lm, task, args)))
        whole.rename(out)


def model(args):
    weights = transformers.AutoModelForCausalLM.from_pretrained(
        args.model.parent, gguf_file=args.model.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer)
    kind = HFLM if args.whole else SharedPrefix
    return kind(weights.eval(), tokenizer=tokenizer, backend="causal", device="cpu", batch_size=1)


def answers(lm, task, args):
    last = args.shots + args.items
    config = definition(task, args.data_dir / "zeroshot", last)
    start = time.monotonic()
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=[config],
        num_fewshot=args.shots,
        samples={task: list(range(args.shots, last))},
        bootstrap_iters=0,
    )
    seconds = time.monotonic() - start
    items = [item(lm, config, s) for s in results["samples"][task] if s["filter"] in ("none", "strict-match")]
    return {"versions": versions(), "seconds": seconds, "items": sorted(items, key=lambda i: i["doc"])}


def versions():
    modules = (lm_eval, transformers, torch)
    return {m.__name__: m.__version__ for m in modules} | {"python": platform.python_version()}


def item(lm, config, sample):
    """What is compared of a logged sample."""
    one = {"doc": sample["doc_id"], "metrics": {m: float(sample[m]) for m in sample["metrics"]}}
    if config["output_type"] == "generate_until":
        return one | {"generated": sample["resps"][0][0]}
    one["options"] = [
        {"log_likelihood": answer[0], "is_greedy": bool(answer[1]), "n_tokens": len(lm._encode_pair(*arguments)[1])}
        for arguments, (answer,) in zip(sample["arguments"], sample["resps"], strict=True)
    ]
    return one


if __name__ == "__main__":
    main()
