//! The protocols by name: what `list` shows and which keys each takes.

/// A protocol's name, documentation and own keys.
#[derive(Debug)]
pub struct ProtocolDef {
    /// Name in the TOML.
    pub name: &'static str,
    /// One line.
    pub doc: &'static str,
    /// Who else measures so.
    pub paper: &'static str,
    /// Keys of `[protocol]` that only it takes.
    pub keys: &'static [&'static str],
}

/// `stream`.
pub(super) const STREAM: ProtocolDef = ProtocolDef {
    name: "stream",
    doc: "every token of a window is scored by a query that attends through the stored cache, as if decoded",
    paper: "the windows of llama-perplexity, the cache read at every step",
    keys: &["window", "windows"],
};

/// `compress-once`.
pub(super) const COMPRESS_ONCE: ProtocolDef = ProtocolDef {
    name: "compress-once",
    doc: "a context is prefilled exactly, compressed once, and its continuation is scored through the stored cache",
    paper: "as kvpress and KVzip evaluate",
    keys: &[
        "context",
        "score",
        "continuation",
        "floor",
        "layers",
        "passages",
    ],
};

/// `tasks`.
pub(super) const TASKS: ProtocolDef = ProtocolDef {
    name: "tasks",
    doc: "a context is prefilled exactly and compressed once; each question and each of its options goes on from a fork of it",
    paper: "scores as lm-evaluation-harness, the cache compressed before the answer is read",
    keys: &["shots", "length", "generate", "continuation"],
};

/// `generate`.
pub(super) const GENERATE: ProtocolDef = ProtocolDef {
    name: "generate",
    doc: "a context is prefilled exactly and compressed once, and a text generated from it, greedily or sampled with shared noise",
    paper: "where greedy texts part, as users compare them; distinct-n of Li et al. 2016, arXiv:1510.03055",
    keys: &["context", "tokens", "temperature", "top_p", "continuation"],
};

/// Every protocol.
pub static PROTOCOLS: &[ProtocolDef] = &[STREAM, COMPRESS_ONCE, TASKS, GENERATE];
