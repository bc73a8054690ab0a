//! Presets: strategies with a name, written as an experiment would write them.
//!
//! Invariant: a preset holds nothing but a composition; it can do nothing that the same lines in a `[[strategy]]` can't.
//! Lossy presets keep 4 sinks and a tail of 32 rows exact; the bare formats (`encode = "q4_0"` alone) stand beside them.

/// A named composition of stages.
#[derive(Debug)]
pub struct Preset {
    /// Name in the TOML.
    pub name: &'static str,
    /// One line.
    pub doc: &'static str,
    /// Where it was published or is the default.
    pub paper: &'static str,
    /// The keys of the `[[strategy]]` it stands for.
    pub composition: &'static str,
}

const COMPOSED: &str = "composed here (experiments/int4-sweep.toml); parts from KVQuant (arXiv 2401.18079), KIVI (arXiv 2402.02750) \
     and QuaRot (arXiv 2404.00456)";

/// Every preset.
pub static PRESETS: &[Preset] = &[
    Preset {
        name: "q8_0-tail",
        doc: "8 bits per value in blocks of 32, sinks and newest rows exact",
        paper: "ggml's Q8_0 block",
        composition: "encode = \"q8_0\"\ntail = 32\nsinks = 4",
    },
    Preset {
        name: "q4_0-tail",
        doc: "4 bits per value in blocks of 32, sinks and newest rows exact",
        paper: "ggml's Q4_0 block",
        composition: "encode = \"q4_0\"\ntail = 32\nsinks = 4",
    },
    Preset {
        name: "q4_0-hadamard",
        doc: "q4_0 of rotated Q, K and V: llama.cpp's default for q4_0 caches since April 2026 (there: tail = 0, sinks = 0)",
        paper: "ggml-org/llama.cpp PR 21038",
        composition: "project = \"hadamard\"\nencode = \"q4_0\"\ntail = 32\nsinks = 4",
    },
    Preset {
        name: "nvfp4-tail",
        doc: "NVFP4 blocks of 16 with FP8 scales, sinks and newest rows exact",
        paper: "NVIDIA, Optimizing inference with NVFP4 KV cache, 2025",
        composition: "encode = \"nvfp4\"\ntail = 32\nsinks = 4",
    },
    Preset {
        name: "nvfp4-rotate",
        doc: "NVFP4 with Q and K rotated, V as it is",
        paper: "NVIDIA Model-Optimizer, recipe nvfp4_rotate",
        composition: "project = { k = \"hadamard\" }\nencode = \"nvfp4\"\ntail = 32\nsinks = 4",
    },
    Preset {
        name: "nvfp4-affine",
        doc: "NVFP4 with a calibrated tensor scale and each channel's calibrated mean taken off",
        paper: "NVIDIA Model-Optimizer, recipe nvfp4_affine",
        composition: "encode = { method = \"nvfp4\", amax = \"calibrated\", affine = \"mean\" }\ntail = 32\nsinks = 4",
    },
    Preset {
        name: "nvfp4-four-over-six",
        doc: "NVFP4 whose blocks are laid on 4 or 6, whichever errs less",
        paper: "Cook et al., Four Over Six, 2025 (arXiv 2512.02010)",
        composition: "encode = { method = \"nvfp4\", blocks = \"four_over_six\" }\ntail = 32\nsinks = 4",
    },
    Preset {
        name: "k8v4",
        doc: "K in q8_0, V in q4_0: errors of K hurt far more than errors of V",
        paper: "ggml-org/llama.cpp PR 7412",
        composition: "encode = { k = \"q8_0\", v = \"q4_0\" }\ntail = 32\nsinks = 4",
    },
    Preset {
        name: "kivi",
        doc: "K by channel over 32 tokens, V by token over 32 channels, 4 bits; the newest 128 rows exact, K flushed 128 at a time",
        paper: "Liu et al., KIVI, 2024 (arXiv 2402.02750)",
        composition: "encode = { k = { method = \"int4\", axis = \"channel\", group = 32, page = 128 }, v = { method = \"int4\", group = 32 } }\ntail = { k = 0, v = 128 }",
    },
    Preset {
        name: "kivi-2",
        doc: "KIVI at 2 bits",
        paper: "Liu et al., KIVI, 2024 (arXiv 2402.02750)",
        composition: "encode = { k = { method = \"int2\", axis = \"channel\", group = 32, page = 128 }, v = { method = \"int2\", group = 32 } }\ntail = { k = 0, v = 128 }",
    },
    Preset {
        name: "int4-best",
        doc: "K before RoPE in pages of 128 tokens, by channel over 64 (4.5 bits), V rotated by token (4.25 bits); 4 sinks exact",
        paper: COMPOSED,
        composition: "keys = \"pre_rope\"\nproject = { v = \"hadamard\" }\nencode = { k = { method = \"int4\", axis = \"channel\", group = 64, page = 128 }, v = { method = \"int4\", group = 64, scales = \"fp8\" } }\nsinks = 4",
    },
    Preset {
        name: "int4-v3",
        doc: "as int4-best with K over 128 tokens and V at 3 bits: 3.75 bits",
        paper: COMPOSED,
        composition: "keys = \"pre_rope\"\nproject = { v = \"hadamard\" }\nencode = { k = { method = \"int4\", axis = \"channel\", group = 128 }, v = { method = \"int3\", group = 64, fit = \"mse\", scales = \"fp8\" } }\nsinks = 4",
    },
    Preset {
        name: "int3-best",
        doc: "as int4-v3 with K at 3 bits: 3.25 bits",
        paper: COMPOSED,
        composition: "keys = \"pre_rope\"\nproject = { v = \"hadamard\" }\nencode = { k = { method = \"int3\", axis = \"channel\", group = 128 }, v = { method = \"int3\", group = 64, fit = \"mse\", scales = \"fp8\" } }\nsinks = 4",
    },
    Preset {
        name: "int2-best",
        doc: "as int3-best with V at 2 bits: 2.75 bits",
        paper: COMPOSED,
        composition: "keys = \"pre_rope\"\nproject = { v = \"hadamard\" }\nencode = { k = { method = \"int3\", axis = \"channel\", group = 128 }, v = { method = \"int2\", group = 64, fit = \"mse\", scales = \"fp8\" } }\nsinks = 4",
    },
    Preset {
        name: "streaming-llm",
        doc: "4 sinks and the 252 newest rows in f16, everything between is dropped",
        paper: "Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023 (arXiv 2309.17453)",
        composition: "retain = { method = \"window\", recent = 252, sinks = 4 }\nencode = \"f16\"",
    },
];

/// The preset of that name.
pub fn find(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|p| p.name == name)
}
