#!/usr/bin/env bash
# Installs what compare.py measures beside kvlab, all by name from package registries: transformers, torch and kvpress into
# a virtual environment (about 6 GB), llama-bench and llama-perplexity built from the source package of llama-cpp-python
# (about 7 CPU minutes; needs a C++ compiler). Usage: install.sh DIR   [default: target/peers]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
dir="${1:-$here/../../target/peers}"
mkdir -p "$dir"
dir="$(cd "$dir" && pwd)"

python3 -m venv "$dir/venv"
pip="$dir/venv/bin/pip"
# gguf and accelerate: what transformers wants to read a GGUF file. kvpress pins transformers.
"$pip" install --quiet cmake ninja 'transformers==5.2.0' torch gguf accelerate 'kvpress==0.5.5'

if [ ! -x "$dir/llama/bin/llama-bench" ]; then
    "$pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$dir" 'llama-cpp-python==0.3.36'
    tar -xzf "$dir"/llama_cpp_python-0.3.36.tar.gz -C "$dir"
    PATH="$dir/venv/bin:$PATH"
    cmake -G Ninja -S "$dir/llama_cpp_python-0.3.36/vendor/llama.cpp" -B "$dir/llama" -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build "$dir/llama" --target llama-bench llama-perplexity
fi
echo "python: $dir/venv/bin/python"
echo "llama:  $dir/llama/bin"
