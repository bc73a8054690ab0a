#!/usr/bin/env python3
"""kvlab's accuracy tasks beside lm-evaluation-harness: same weights, same items, option by option.

kvlab runs an experiment made for it, the harness (lm_eval_tasks/) answers the same items with the GGUF's weights in
transformers in f32. Compared is kvlab's reference: the full cache of f32 rows. Ends with code 1 unless every
log-likelihood agrees within 0.01 and the same option is chosen on at least 99 % of the items of each task.
docs/accuracy-against-lm-eval.md says what was found and how to install the harness.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TASKS = ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "openbookqa", "boolq", "lambada", "gsm8k"]
LIKELIHOOD_WITHIN = 1e-2
SAME_CHOICE_AT_LEAST = 0.99


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf, or another GGUF file")
    p.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json and tokenizer_config.json")
    p.add_argument("--data-dir", type=Path, required=True, help="folder of zeroshot/")
    p.add_argument("--kvlab", type=Path, default=ROOT / "target/release/kvlab")
    p.add_argument("--python", type=Path, default=ROOT / "target/lm-eval/venv/bin/python", help="one that has lm-eval")
    p.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    p.add_argument("--definitions", type=Path, help="folder of kvlab's TASK.toml, instead of those in the program")
    p.add_argument("--items", type=int, default=40, help="of each task, after the solved examples")
    p.add_argument("--shots", type=int, default=5, help="solved examples: the first items of each file")
    p.add_argument("--encode", default="f32", help="the one strategy's format; the reference is compared, whatever it is")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--whole", action="store_true", help="the harness reads each request from its first token (slow)")
    p.add_argument("--keep", action="store_true", help="take the harness's answers from an earlier run where there are any")
    p.add_argument("--out", type=Path, default=ROOT / "target/lm-eval/answers")
    args = p.parse_args()
    args.tasks = args.tasks.split(",")
    unknown = set(args.tasks) - set(TASKS)
    if unknown:
        p.error(f"--tasks: no task is called {', '.join(sorted(unknown))}; there are: {', '.join(TASKS)}")
    for name in ("model", "tokenizer", "data_dir", "kvlab", "python", "definitions"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            p.error(f"--{name.replace('_', '-')}: {path} is not there")
    args.out = args.out.resolve() / args.model.stem / f"{args.shots}-shot-{args.items}"
    args.out.mkdir(parents=True, exist_ok=True)
    return args


# ---------------------------------------------------------------------------------------------- the two sides


def kvlab(args):
    """{task: {"seconds", "items": {index in the file: answer}}} and the program's version."""
    named = [str((args.definitions / f"{t}.toml").resolve()) if args.definitions else t for t in args.tasks]
    experiment = args.out / "experiment.toml"
    experiment.write_text(
        "schema = 1\n"
        'name = "lm-eval"\n'
        f"model = {json.dumps(str(args.model.resolve()))}\n"
        f"[data]\ntasks = {json.dumps(named)}\nitems = {args.items}\n"
        f'[protocol]\nkind = "tasks"\nshots = {args.shots}\n'
        f"[[strategy]]\nencode = {json.dumps(args.encode)}\n"
    )
    command = [args.kvlab, "run", experiment, "--data-dir", args.data_dir, "--threads", args.threads, "-q"]
    shown = run([*command, "--results-dir", args.out / "kvlab"])
    bundle = Path(re.search(r"^Tables and raw records: (.+)$", shown, re.MULTILINE)[1])
    cells = {cell["id"]: cell["data"] for cell in json.loads((bundle / "header.json").read_text())["cells"]}
    answers = {task: {"seconds": 0.0, "items": {}} for task in args.tasks}
    for line in (bundle / "journal.jsonl").read_text().splitlines():
        entry = json.loads(line)["entry"]
        for item in entry.get("items", []):
            (answer,) = item["answers"]
            answers[cells[item["cell"]]]["items"][int(item["doc"].split()[-1])] = answer
        if "cell" in entry:
            answers[cells[entry["cell"]["id"]]]["seconds"] += entry["cell"]["wall_s"]
    return answers, run([args.kvlab, "--version"]).split()[-1]


def harness(args):
    """{task: what lm_eval_tasks/answers.py writes}."""
    out = args.out / "lm-eval"
    out.mkdir(exist_ok=True)
    todo = [t for t in args.tasks if not (args.keep and (out / f"{t}.json").exists())]
    if todo:
        command = [args.python, HERE / "lm_eval_tasks/answers.py", args.model.resolve(), out]
        command += ["--tokenizer", args.tokenizer.resolve(), "--data-dir", args.data_dir.resolve(), "--tasks", ",".join(todo)]
        command += ["--items", args.items, "--shots", args.shots, "--threads", args.threads]
        run([*command, *(["--whole"] if args.whole else [])])
    return {task: json.loads((out / f"{task}.json").read_text()) for task in args.tasks}


def run(command):
    command = [str(word) for word in command]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | offline)
    if child.returncode != 0:
        tail = "\n".join(child.stderr.splitlines()[-15:])
        sys.exit(f"{' '.join(command)}\nended with code {child.returncode}:\n{tail}")
    return child.stdout


# ---------------------------------------------------------------------------------------------- the comparison


def compared(task, ours, theirs):
    """A row of the table, and what is wrong, one line each."""
    if sorted(ours["items"]) != [item["doc"] for item in theirs["items"]]:
        return None, [f"{task}: kvlab has items {sorted(ours['items'])}, lm-eval {[i['doc'] for i in theirs['items']]}"]
    pairs = [(ours["items"][item["doc"]], item) for item in theirs["items"]]
    row = {"task": task, "items": len(pairs), "kvlab s": ours["seconds"], "lm-eval s": theirs["seconds"]}
    wrong = []
    if "generated" in pairs[0][1]:
        scores = [(a["generated"]["score_reference"], b["metrics"]["exact_match"]) for a, b in pairs]
        equal = [a["generated"]["text_reference"].strip() == b["generated"].strip() for a, b in pairs]
        row |= {"generated equal %": 100 * mean(equal), "same acc %": 100 * mean([a == b for a, b in scores])}
        row |= {"acc": [estimate(side) for side in zip(*scores, strict=True)]}
    else:
        wrong += likelihoods(task, pairs, row)
        choices(pairs, row)
    for metric in ("acc", "acc_norm"):
        same = row.get(f"same {metric} %")
        if same is not None and same < 100 * SAME_CHOICE_AT_LEAST:
            wrong.append(f"{task}: the same {metric} choice on {same:.1f} % of {len(pairs)} items")
    return row, wrong


def likelihoods(task, pairs, row):
    wrong, deltas, n_borders = [], [], 0
    for ours, theirs in pairs:
        if len(ours["options"]) != len(theirs["options"]):
            return [f"{task} {theirs['doc']}: {len(ours['options'])} options, lm-eval has {len(theirs['options'])}"]
        for i, (a, b) in enumerate(zip(ours["options"], theirs["options"], strict=True)):
            delta = -a["nll_reference"] - b["log_likelihood"]
            deltas.append(abs(delta))
            if a["n_tokens"] != b["n_tokens"]:
                n_borders += 1
            if not abs(delta) <= LIKELIHOOD_WITHIN:
                wrong.append(
                    f"{task} {theirs['doc']}, option {i}: {-a['nll_reference']:.4f} of {a['n_tokens']} tokens, "
                    f"lm-eval {b['log_likelihood']:.4f} of {b['n_tokens']}"
                )
    row |= {"options": len(deltas), "max": max(deltas), "mean": mean(deltas), "other tokens": n_borders}
    return wrong


def choices(pairs, row):
    if len(pairs[0][0]["options"]) == 1:
        picked = [(a["options"][0]["is_greedy_reference"], b["options"][0]["is_greedy"]) for a, b in pairs]
        row |= {"same acc %": 100 * mean([a == b for a, b in picked])}
        row |= {"acc": [estimate(side) for side in zip(*picked, strict=True)]}
        return
    for metric in ("acc", "acc_norm"):
        if metric not in pairs[0][1]["metrics"]:
            continue
        picked, right = [], []
        for ours, theirs in pairs:
            lengths = [option["n_chars"] if metric == "acc_norm" else 1 for option in ours["options"]]
            mine = best([-option["nll_reference"] for option in ours["options"]], lengths)
            picked.append((mine, best([option["log_likelihood"] for option in theirs["options"]], lengths)))
            right.append((mine == ours["gold"], theirs["metrics"][metric]))
        row[f"same {metric} %"] = 100 * mean([a == b for a, b in picked])
        row[metric] = [estimate(side) for side in zip(*right, strict=True)]


def best(scores, lengths):
    """The index of the highest score per length; the first of equals."""
    return max(range(len(scores)), key=lambda i: scores[i] / lengths[i])


def mean(values):
    return sum(values) / len(values)


def estimate(values):
    """Mean and its standard error, the harness's: sample deviation over the root of n."""
    n, m = len(values), mean(values)
    return m, math.sqrt(sum((v - m) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.nan


# ---------------------------------------------------------------------------------------------- the table


def table(rows):
    head = ["task", "items", "options", "max abs dLL", "mean abs dLL", "other tokens", "same acc %", "same acc_norm %"]
    head += ["acc kvlab", "acc lm-eval", "acc_norm kvlab", "acc_norm lm-eval", "generated equal %", "s kvlab", "s lm-eval"]
    yield head
    yield ["---"] + ["---:"] * (len(head) - 1)
    for row in rows:
        cells = [row["task"], row["items"], row.get("options"), tiny(row.get("max")), tiny(row.get("mean"))]
        cells += [row.get("other tokens"), percent(row.get("same acc %")), percent(row.get("same acc_norm %"))]
        for metric in ("acc", "acc_norm"):
            cells += [f"{m:.3f} ± {e:.3f}" for m, e in row[metric]] if metric in row else [None, None]
        cells += [percent(row.get("generated equal %")), f"{row['kvlab s']:.0f}", f"{row['lm-eval s']:.0f}"]
        yield ["" if cell is None else str(cell) for cell in cells]


def tiny(value):
    return None if value is None else f"{value:.1e}"


def percent(value):
    return None if value is None else f"{value:.1f}".removesuffix(".0")


def main():
    args = arguments()
    ours, version = kvlab(args)
    theirs = harness(args)
    rows, wrong = [], []
    for task in args.tasks:
        row, faults = compared(task, ours[task], theirs[task])
        rows += [row] if row else []
        wrong += faults
    versions = ", ".join(f"{name} {v}" for name, v in theirs[args.tasks[0]]["versions"].items())
    print(f"kvlab {version}, {versions}; {args.model.name}, {args.shots} shots, n = items; ± is the standard error\n")
    for cells in table(rows):
        print(f"| {' | '.join(cells)} |")
    for line in wrong[:20]:
        print(f"\n{line}", end="")
    if wrong[20:]:
        print(f"\n... and {len(wrong) - 20} more", end="")
    print("\nagree" if not wrong else "\n\ndo not agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
