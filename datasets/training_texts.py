"""Makes the texts of training that no server offers as files: Rust code of this project's locked dependencies, and
short conversations as plain text.

Usage: python3 datasets/training_texts.py DATA_DIR
Reads DATA_DIR/chat/modelopt_synthetic_conversations_1k.jsonl where it is there, and the sources that cargo holds for
Cargo.lock; writes DATA_DIR/train/code-rust.txt and DATA_DIR/train/chat.txt. Their sums stand in manifest.toml.
"""

import json
import pathlib
import subprocess
import sys

# As locked; `syn` is a text of the tests and must never be here.
CRATES = [
    "clap_builder",
    "minijinja",
    "nalgebra",
    "rayon-core",
    "regex-automata",
    "serde_json",
]
CHAT_ROWS = 500


def sources():
    """Every `src/**/*.rs` of the crates, in order of crate and path."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["packages"]
    for name in CRATES:
        (package,) = [p for p in packages if p["name"] == name]
        print(f"{name} {package['version']}", file=sys.stderr)
        folder = pathlib.Path(package["manifest_path"]).parent / "src"
        for path in sorted(folder.rglob("*.rs"), key=lambda p: p.relative_to(folder).as_posix()):
            yield path.read_text(encoding="utf-8")


def chats(path):
    """The first conversations, a line per turn."""
    with path.open(encoding="utf-8") as lines:
        for _, line in zip(range(CHAT_ROWS), lines):
            turns = json.loads(line)["messages"]
            yield "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def main():
    data = pathlib.Path(sys.argv[1])
    (data / "train").mkdir(parents=True, exist_ok=True)
    (data / "train/code-rust.txt").write_text("\n".join(sources()), encoding="utf-8")
    chat = data / "chat/modelopt_synthetic_conversations_1k.jsonl"
    if chat.exists():
        (data / "train/chat.txt").write_text("\n\n".join(chats(chat)) + "\n", encoding="utf-8")


main()
