"""lm-evaluation-harness's own task definitions, read from the installed package and pointed at local files.

Prompts, choices, delimiters, filters and stop texts are the package's. Replaced are only where the items come from (the
files that kvlab reads, their fields renamed to the published ones), the split, and the sampler of solved examples:
`first_n` of the same file, so that the first k items are the examples and the questions start with item k.
"""

import json

import datasets
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml


def piqa(folder):
    labels = (folder / "piqa_valid-labels.lst").read_text().split()
    return [item | {"label": int(label)} for item, label in zip(jsonl(folder / "piqa_valid.jsonl"), labels, strict=True)]


def arc(file):
    def items(folder):
        return [
            lettered(item) | {"question": item["query"].removeprefix("Question: ")} for item in jsonl(folder / file)
        ]

    return items


def openbookqa(folder):
    return [lettered(item) | {"question_stem": item["query"]} for item in jsonl(folder / "openbookqa_test.jsonl")]


def lettered(item):
    letters = [chr(ord("A") + i) for i in range(len(item["choices"]))]
    return {"choices": {"text": item["choices"], "label": letters}, "answerKey": letters[item["gold"]]}


def hellaswag(folder):
    """The file holds what the definition's process_docs would make: query and choices."""
    lines = (folder / "hellaswag_val_every5th.txt").read_text().removesuffix("\n").split("\n")
    groups = [lines[i : i + 6] for i in range(0, len(lines), 6)]
    return [{"query": query, "choices": choices, "label": label} for query, label, *choices in groups]


def winogrande(folder):
    """Back to a sentence with a blank and two options: the contexts differ from the first unequal character on."""
    items = []
    for item in jsonl(folder / "winogrande_xl_dev.jsonl"):
        one, two = item["context_options"]
        n = next(i for i in range(len(one) + 1) if one[: i + 1] != two[: i + 1])
        sentence = f"{one[:n]}_ {item['continuation']}"
        items.append({"sentence": sentence, "option1": one[n:], "option2": two[n:], "answer": str(item["gold"] + 1)})
    return items


def boolq(folder):
    items = []
    for item in jsonl(folder / "boolq_dev_first2000.jsonl"):
        passage, question = item["query"].removeprefix("Passage: ").split("\nQuestion: ")
        items.append({"passage": passage, "question": question.removesuffix("?"), "label": item["gold"]})
    return items


def jsonl(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line.strip()]


# kvlab's name: the package's name and the items.
TASKS = {
    "piqa": ("piqa", piqa),
    "arc_easy": ("arc_easy", arc("arc_easy_test.jsonl")),
    "arc_challenge": ("arc_challenge", arc("arc_challenge_test.jsonl")),
    "hellaswag": ("hellaswag", hellaswag),
    "winogrande": ("winogrande", winogrande),
    "openbookqa": ("openbookqa", openbookqa),
    "boolq": ("boolq", boolq),
    "lambada": ("lambada_openai", lambda folder: jsonl(folder / "lambada_openai_test.jsonl")),
    "gsm8k": ("gsm8k", lambda folder: jsonl(folder / "gsm8k_test.jsonl")),
}


def definition(name, folder, n_items):
    """The package's definition over the first `n_items` local items."""
    published, items = TASKS[name]
    config = load_yaml(TaskManager().task_index[published].yaml_path)
    config.pop("tag", None)
    config.pop("process_docs", None)
    # Its error is a bootstrap over processes; the likelihoods themselves are compared.
    config["metric_list"] = [metric for metric in config["metric_list"] if metric["metric"] != "perplexity"]
    rows = datasets.Dataset.from_list(items(folder)[:n_items])
    return config | {
        "task": name,
        "custom_dataset": lambda **_: {"test": rows},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "test",
        "fewshot_config": {"sampler": "first_n"},
    }
