"""Logits of Hugging Face transformers on a GGUF's weights dequantized to f32:
`python make_logits.py MODEL.gguf TOKENS.json N OUT.safetensors`, with N ids from TOKENS.json's `window`.

OUT holds, for one forward pass over the N ids from an empty cache (positions 0..N-1):
  ids        i32[N]     positions i32[P]   vocab_ids i32[S]   logits f32[P][S] at those positions and ids
  logsumexp  f32[N]     over the whole vocabulary, per position
  argmax     i32[N]     top token, per position; margin f32[N] = its logit minus the second's
  nll        f32[N-1]   -log p(ids[i+1] | ids[..=i]), natural log
Architectures llama and gemma3. Everything runs in f32 with eager attention on one thread.
"""

import json
import sys

import gguf
import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

# Not in the GGUF: Gemma 3's five-to-one layer pattern and the rope base of its sliding layers, as in transformers'
# Gemma3TextConfig and in llama.cpp's loader of gemma3.
GEMMA_PATTERN, GEMMA_LOCAL_ROPE_BASE = 6, 10_000.0

N_VOCAB_IDS = 512

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FFN_NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def hf_name(name, arch):
    plain = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stem = name.removesuffix(".weight")
    if stem in plain:
        return plain[stem] + ".weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{(NAMES | FFN_NORMS[arch])[part]}.weight"


def unpermute(weight, n_head):
    """GGUF `llama` files interleave each head's two rotary halves; transformers keeps the halves apart."""
    rows, cols = weight.shape
    return weight.reshape(n_head, rows // n_head // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def build_model(path):
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()

    def meta(key, default=None):
        field = reader.fields.get(f"{arch}.{key}")
        return default if field is None else field.contents()

    n_head, n_kv_head, width = meta("attention.head_count"), meta("attention.head_count_kv"), meta("embedding_length")
    head_dim = meta("attention.key_length", width // n_head)
    common = dict(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=width,
        intermediate_size=meta("feed_forward_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=n_head,
        num_key_value_heads=n_kv_head,
        head_dim=head_dim,
        rms_norm_eps=meta("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=meta("context_length"),
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        attn_implementation="eager",
    )
    rope = {"rope_type": "default", "rope_theta": meta("rope.freq_base")}
    if arch == "llama":
        config = transformers.LlamaConfig(**common, rope_parameters=rope)
        model = transformers.LlamaForCausalLM(config)
    elif arch == "gemma3":
        config = transformers.Gemma3TextConfig(
            **common,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=head_dim,
            sliding_window=meta("attention.sliding_window"),
            sliding_window_pattern=GEMMA_PATTERN,
            rope_parameters={"full_attention": rope, "sliding_attention": rope | {"rope_theta": GEMMA_LOCAL_ROPE_BASE}},
        )
        model = transformers.Gemma3ForCausalLM(config)
    else:
        raise SystemExit(f"architecture {arch!r}: this script knows llama and gemma3")

    state = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if arch == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = unpermute(weight, n_head if "attn_q" in tensor.name else n_kv_head)
        if arch == "gemma3" and tensor.name.endswith("norm.weight"):
            # The GGUF stores 1 + w, transformers adds the 1 itself; the sum must come back to the bit.
            stored, weight = weight, weight - np.float32(1)
            assert np.array_equal(weight + np.float32(1), stored), tensor.name
        state[hf_name(tensor.name, arch)] = torch.from_numpy(weight.copy())
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert not unexpected and missing == tied, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def main():
    path, tokens, n, out = sys.argv[1:]
    torch.set_num_threads(1)
    ids = json.load(open(tokens))["window"][: int(n)]
    assert len(ids) == int(n)
    with torch.no_grad():
        logits = build_model(path)(torch.tensor([ids])).logits[0]
    assert logits.dtype == torch.float32
    n, n_vocab = logits.shape
    positions = sorted({0, 1, 2, 3, 7, 15, 16, 31, 63, 127, 128, n // 2 - 1, n // 2, n - 2, n - 1} | set(range(37, n, n // 9)))
    # Evenly spread, and moved inside each stretch so that no stride of a matrix kernel can hide a wrong row.
    stride = n_vocab // N_VOCAB_IDS
    vocab_ids = [i * stride + i * 37 % stride for i in range(N_VOCAB_IDS)]
    top = logits.topk(2).values
    lse = torch.logsumexp(logits.double(), -1)
    nll = lse[:-1] - logits[:-1].double().gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    arrays = {
        "ids": np.array(ids, np.int32),
        "positions": np.array(positions, np.int32),
        "vocab_ids": np.array(vocab_ids, np.int32),
        "logits": logits[positions][:, vocab_ids].numpy().copy(),
        "logsumexp": lse.float().numpy(),
        "argmax": logits.argmax(-1).int().numpy(),
        "margin": (top[:, 0] - top[:, 1]).numpy(),
        "nll": nll.float().numpy(),
    }
    metadata = {"source": f"transformers {transformers.__version__}, torch {torch.__version__}, gguf-py weights in f32"}
    save_file(arrays, out, metadata)
    print(f"{out}: {len(positions)} positions, perplexity {nll.mean().exp():.6f}")


if __name__ == "__main__":
    main()
