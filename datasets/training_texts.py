"""Makes the texts of training that no server offers as files: Rust and C code of this project's locked dependencies and
tables of numbers among it, Python code of the programs that kvlab is compared with, and short conversations as plain text.

Usage: python3 datasets/training_texts.py DATA_DIR
Reads DATA_DIR/chat/modelopt_synthetic_conversations_1k.jsonl where it is there, the sources that cargo holds for
Cargo.lock, and packages that pip downloads by name and version; writes code-rust.txt, code-c.txt, tables.txt,
code-python.txt and chat.txt into DATA_DIR/train. Their sums stand in manifest.toml.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

# As locked; `syn` is a text of the tests and must never be here.
CRATES = [
    "clap_builder",
    "minijinja",
    "nalgebra",
    "rayon-core",
    "regex-automata",
    "serde_json",
]
# As experiments/peers takes them; of transformers all but the models, which are many and alike.
PACKAGES = ["accelerate==1.15.0", "kvpress==0.5.5", "transformers==5.2.0"]
LEFT_OUT = "transformers/models/"
CHAT_ROWS = 500
# Files that are hardly more than numbers, of few digits and many, that repeat themselves or don't.
TABLES = {
    "crc32fast": ["src/table.rs"],
    "h2": ["src/hpack/huffman/table.rs"],
    "liblzma-sys": ["xz/src/liblzma/lzma/fastpos_table.c"],
    "onig_sys": ["oniguruma/src/unicode_property_data_posix.c", "oniguruma/src/unicode_unfold_key.c"],
    "rav1e": ["src/quantize/tables.rs", "src/rdo_tables.rs", "src/scan_order.rs", "src/token_cdfs.rs"],
    "ryu": ["src/d2s_full_table.rs"],
    "statrs": ["src/distribution/ziggurat_tables.rs"],
    "unicode-ident": ["src/tables.rs"],
    "unicode-width": ["src/gen/tables.rs"],
}


def folders(crates):
    """Where cargo holds the crates' sources."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["packages"]
    for name in crates:
        (package,) = [p for p in packages if p["name"] == name]
        print(f"{name} {package['version']}", file=sys.stderr)
        yield pathlib.Path(package["manifest_path"]).parent


def sources(crates, below, endings):
    """Every file of the crates below a folder with one of the endings, in order of crate and path."""
    for folder in folders(crates):
        files = [path for path in (folder / below).rglob("*") if path.suffix in endings]
        for path in sorted(files, key=lambda p: p.relative_to(folder).as_posix()):
            yield path.read_text(encoding="utf-8")


def tables():
    """The files of tables, in order of crate and path."""
    for folder, paths in zip(folders(TABLES), TABLES.values()):
        for path in paths:
            yield (folder / path).read_text(encoding="utf-8")


def packages():
    """Every `*.py` of the packages, in order of package and path."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        subprocess.run(pip + PACKAGES, check=True)
        for package in PACKAGES:
            (wheel,) = pathlib.Path(folder).glob(package.replace("==", "-") + "-*.whl")
            with zipfile.ZipFile(wheel) as files:
                for name in sorted(files.namelist()):
                    if name.endswith(".py") and not name.startswith(LEFT_OUT):
                        yield files.read(name).decode("utf-8")


def chats(path):
    """The first conversations, a line per turn."""
    with path.open(encoding="utf-8") as lines:
        for _, line in zip(range(CHAT_ROWS), lines):
            turns = json.loads(line)["messages"]
            yield "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def main():
    data = pathlib.Path(sys.argv[1])
    (data / "train").mkdir(parents=True, exist_ok=True)
    (data / "train/code-rust.txt").write_text("\n".join(sources(CRATES, "src", [".rs"])), encoding="utf-8")
    (data / "train/code-c.txt").write_text("\n".join(sources(["zstd-sys"], "zstd/lib", [".c", ".h"])), encoding="utf-8")
    (data / "train/tables.txt").write_text("\n".join(tables()), encoding="utf-8")
    (data / "train/code-python.txt").write_text("\n".join(packages()), encoding="utf-8")
    chat = data / "chat/modelopt_synthetic_conversations_1k.jsonl"
    if chat.exists():
        (data / "train/chat.txt").write_text("\n\n".join(chats(chat)) + "\n", encoding="utf-8")


main()
