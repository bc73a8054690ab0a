#!/usr/bin/env python3
"""Speed of kvlab beside llama.cpp and transformers: same machine, model file and text, alternating A B A B in one run.

One measured process at a time. Every ratio is ours / peer within one round; the table shows the median over rounds and
the range. README.md in this folder says what the columns mean and what to beware of.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PARTS = ["prefill", "decode", "perplexity", "transformers"]
# What a strategy of ours is held against where llama.cpp has no cache of that name.
DEFAULT_PEER_CACHE = "f16"
# Load average before the first round from which on the table says so.
BUSY = 0.5
LLAMA_CACHES = {"f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf, or another GGUF file")
    p.add_argument("--text", type=Path, required=True, help="wiki.test.raw of WikiText-2")
    p.add_argument("--tokenizer", type=Path, help="tokenizer.json for transformers (its own reading of the GGUF is wrong)")
    p.add_argument("--kvlab", type=Path, default=ROOT / "target/release/kvlab")
    p.add_argument("--llama", type=Path, default=ROOT / "target/peers/llama/bin", help="folder of llama-bench")
    p.add_argument("--python", type=Path, default=ROOT / "target/peers/venv/bin/python", help="one that has transformers")
    p.add_argument("--only", type=words, default=PARTS, help="comma-separated: " + ", ".join(PARTS))
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--caches", type=words, default=["f16", "q8_0", "q4_0"], help="kvlab strategies")
    p.add_argument("--threads", type=numbers, default=[1, 2])
    p.add_argument("--prompts", type=numbers, default=[512, 2048])
    p.add_argument("--depths", type=numbers, default=[0, 2048, 7500])
    p.add_argument("--tokens", type=int, default=64, help="tokens decoded at each depth")
    p.add_argument("--window", type=int, default=2048, help="tokens of a perplexity window")
    p.add_argument("--windows", type=int, default=2, help="windows that llama-perplexity takes in a round")
    p.add_argument("--rotate", action="store_true", help="quantized caches rotated on both sides, llama.cpp's default")
    p.add_argument("--arithmetic", default="f32", help="of kvlab's linear layers: f32, int16 or int8 (llama.cpp's are int8)")
    p.add_argument("--out", type=Path, default=ROOT / "target/peers.json", help="every round, as JSON")
    args = p.parse_args()
    unknown = set(args.only) - set(PARTS)
    if unknown:
        p.error(f"--only: no part is called {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    return args


def words(text):
    return [word.strip() for word in text.split(",")]


def numbers(text):
    return [int(word) for word in words(text)]


# ---------------------------------------------------------------------------------------------- running one child


class Child:
    """A finished child: its output, CPU and wall seconds, and its CPU seconds at each line of its standard error."""

    def __init__(self, command, environment=None):
        command = [str(word) for word in command]
        start = time.monotonic()
        with tempfile.TemporaryFile() as out:
            env = {**os.environ, **(environment or {})}
            child = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, env=env)
            self.marks = [(line.strip(), cpu_seconds(child.pid)) for line in child.stderr]
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            self.wall_s = time.monotonic() - start
            self.cpu_s = usage.ru_utime + usage.ru_stime
            out.seek(0)
            self.out = out.read().decode()
        if child.returncode != 0:
            tail = "\n".join(line for line, _ in self.marks[-15:])
            sys.exit(f"{' '.join(command)}\nended with code {child.returncode}:\n{tail}")


def cpu_seconds(pid):
    """CPU time of all threads of a running process, in ticks of 10 ms; None where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ----------------------------------------------- systems: each gives {(test, threads): (tokens/s, tokens/CPU s)}


def kvlab(args, cache, tests):
    command = [args.kvlab, "bench", "-m", args.model, "-f", args.text, "-s", kvlab_strategy(args, cache), "-p", 0, "-n", 0]
    command += [*tests, "-t", joined(args.threads), "-r", 1, "-o", "json", "-q", "--arithmetic", args.arithmetic]
    rows = json.loads(Child(command).out)
    for row in rows:
        if row["perplexity"] is not None:
            PERPLEXITIES[f"kvlab {cache}"] = row["perplexity"]
    return {(row["test"], row["n_threads"]): (row["avg_ts"], row["tokens_per_cpu_s"]) for row in rows}


def kvlab_strategy(args, cache):
    rotated = args.rotate and cache in LLAMA_CACHES and cache.startswith(("q", "iq"))
    return f'project = "hadamard", encode = "{cache}"' if rotated else cache


def peer_cache(cache):
    return cache if cache in LLAMA_CACHES else DEFAULT_PEER_CACHE


def llama_environment(args):
    return {} if args.rotate else {"LLAMA_ATTN_ROT_DISABLE": "1"}


def llama_bench(args, cache, tests):
    cache = peer_cache(cache)
    command = [args.llama / "llama-bench", "-m", args.model, "-fa", 1, "-ctk", cache, "-ctv", cache, "-p", 0, "-n", 0]
    command += [*tests, "-t", joined(args.threads), "-r", 1, "-o", "json", "--progress"]
    child = Child(command, llama_environment(args))
    # The CPU time of a run is what passes between its line of progress and the next one.
    ends = [cpu for _, cpu in child.marks[1:]] + [child.cpu_s]
    is_run = re.compile(r"benchmark \d+/\d+: (prompt|generation) run \d+/\d+$")
    spent = [end - cpu for (line, cpu), end in zip(child.marks, ends) if is_run.search(line) and cpu is not None]
    results = {}
    for i, row in enumerate(json.loads(child.out)):
        n = row["n_prompt"] + row["n_gen"]
        name = ("pp" if row["n_prompt"] else "tg") + str(n) + (f" @ d{row['n_depth']}" if row["n_depth"] else "")
        per_cpu_s = n / spent[i] if i < len(spent) and spent[i] > 0.05 else None
        results[name, row["n_threads"]] = (row["avg_ts"], per_cpu_s)
    return results


def llama_perplexity(args, cache, _tests):
    cache = peer_cache(cache)
    n = args.window * args.windows
    results = {}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        # As much as the windows need and a margin: the whole file would be encoded at our peer's expense.
        text.write(args.text.read_text()[: 12 * n])
        text.flush()
        for threads in args.threads:
            command = [args.llama / "llama-perplexity", "-m", args.model, "-f", text.name, "-c", args.window]
            command += ["-b", args.window, "-t", threads, "--chunks", args.windows, "-fa", "on", "-ctk", cache, "-ctv", cache]
            child = Child(command, llama_environment(args))
            output = child.out + "\n".join(line for line, _ in child.marks)
            PERPLEXITIES[f"llama.cpp {cache}"] = float(re.search(r"\[1\]([\d.]+)", output).group(1))
            results[f"ppl{args.window}", threads] = (n / child.wall_s, n / child.cpu_s)
    return results


def transformers(args, _cache, tests):
    results = {}
    for threads in args.threads:
        command = [args.python, HERE / "transformers_speed.py", args.model, args.text, "--threads", threads, *tests]
        command += ["--tokenizer", args.tokenizer] if args.tokenizer else []
        for row in json.loads(Child(command).out):
            results[row["test"], threads] = (row["ts"], row["tokens_per_cpu_s"])
    return results


PERPLEXITIES = {}


def joined(values):
    return ",".join(str(value) for value in values)


# -------------------------------------------------------------------------------------------------- the comparison


def plan(args):
    """What is run in each round, in order: (part, cache, its tests, [(system, function)])."""
    prompts = ["-p", joined(args.prompts)]
    decodes = ["-n", args.tokens, "-d", joined(args.depths)]
    scores = ["--n-score", args.window]
    peers = {"prefill": (prompts, llama_bench), "decode": (decodes, llama_bench), "perplexity": (scores, llama_perplexity)}
    for part, (tests, peer) in peers.items():
        if part in args.only:
            for cache in args.caches:
                name = f"llama.cpp {peer_cache(cache)}"
                yield tests, [(f"kvlab {cache}", kvlab, cache), (name, peer, cache)]
    if "transformers" in args.only:
        for tests in (prompts, decodes, scores):
            yield tests, [("kvlab f16", kvlab, "f16"), ("transformers f32", transformers, "f16")]


def compare(args):
    """{(test, threads, ours, peer): [{system: (tokens/s, tokens/CPU s)} of each round]}"""
    pairs = {}
    for round_ in range(args.rounds):
        for tests, systems in plan(args):
            results = {}
            for name, function, cache in systems:
                print(f"round {round_ + 1}/{args.rounds}: {name} {' '.join(map(str, tests))}", file=sys.stderr, flush=True)
                results[name] = function(args, cache, tests)
            ours, peer = results
            for test, threads in results[ours]:
                if (test, threads) in results[peer]:
                    both = {name: result[test, threads] for name, result in results.items()}
                    pairs.setdefault((test, threads, ours, peer), []).append(both)
    return pairs


def summary(rounds, ours, peer, which):
    """Medians of both, and of the ratio with its range; None where a system does not tell."""
    values = [(r[ours][which], r[peer][which]) for r in rounds]
    if any(value is None for pair in values for value in pair):
        return None
    ratios = [a / b for a, b in values]
    return {
        "ours": statistics.median(a for a, _ in values),
        "peer": statistics.median(b for _, b in values),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def table(cases):
    lines = ["| test | threads | ours | peer | t/CPU s | peer's | ratio | t/s | peer's | ratio |", "|---" * 10 + "|"]

    def cells(s):
        if s is None:
            return ["", "", ""]
        low, high = s["ratio_range"]
        return [f"{s['ours']:.1f}", f"{s['peer']:.1f}", f"**{s['ratio']:.2f}** [{low:.2f} … {high:.2f}]"]

    for c in cases:
        row = [c["test"], str(c["threads"]), c["ours"], c["peer"], *cells(c["cpu"]), *cells(c["wall"])]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main():
    args = arguments()
    before = os.getloadavg()
    pairs = compare(args)
    cases = [
        {
            "test": test,
            "threads": threads,
            "ours": ours,
            "peer": peer,
            "cpu": summary(rounds, ours, peer, 1),
            "wall": summary(rounds, ours, peer, 0),
            "rounds": rounds,
        }
        for (test, threads, ours, peer), rounds in pairs.items()
    ]
    load = {"before": before, "after": os.getloadavg()}
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform(), "load_average": load}
    options = {key: str(value) for key, value in vars(args).items() if not isinstance(value, Path)}
    result = {"machine": machine, "options": options, "cases": cases, "perplexity_of_first_window": PERPLEXITIES}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(cases))
    for name, value in PERPLEXITIES.items():
        print(f"perplexity of the second half of the first window: {name} {value:.4f}")
    print(f"{machine['cpu']}, {machine['cores']} cores, load {before[0]:.2f}; {args.rounds} rounds; {args.out}")
    if before[0] > BUSY:
        print("The machine was busy before the first round: only ratios of CPU time at one thread mean something.")


def cpu_name():
    try:
        return re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text()).group(1)
    except (OSError, AttributeError):
        return platform.processor()


if __name__ == "__main__":
    main()
