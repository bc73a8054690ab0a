//! A writer of small GGUF files for tests: what the parser must read, and must survive when it is damaged.

use super::TensorType;

/// A GGUF file under construction.
pub(crate) struct Builder {
    version: u32,
    metadata: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

/// A metadata value to write.
pub(crate) enum Meta<'a> {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(&'a str),
    Texts(&'a [String]),
    Ints(&'a [i32]),
    Floats(&'a [f32]),
}

const ALIGNMENT: usize = 32;

impl Builder {
    pub fn new(version: u32) -> Self {
        Self {
            version,
            metadata: Vec::new(),
            tensors: Vec::new(),
        }
    }

    pub fn meta(mut self, key: &str, value: Meta) -> Self {
        self.metadata.push((key.into(), encoded(value)));
        self
    }

    /// Gives a key that is there another value.
    pub fn replace(mut self, key: &str, value: Meta) -> Self {
        let entry = self
            .metadata
            .iter_mut()
            .find(|(known, _)| known == key)
            .expect("the key is there");
        entry.1 = encoded(value);
        self
    }

    /// Adds a tensor; `dims` fastest first; bytes that fit the type are made up from `seed`.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: TensorType, seed: u8) -> Self {
        let n: u64 = dims.iter().product();
        let n_bytes = n as usize / kind.block_len() * kind.block_bytes();
        let bytes = match kind {
            // Bytes at random would be NaN now and then.
            TensorType::F32 => (0..n)
                .flat_map(|i| ((i % 7) as f32 * 0.25 + f32::from(seed)).to_le_bytes())
                .collect(),
            _ => (0..n_bytes)
                .map(|i| (i * 31 % 61) as u8 ^ seed & 15)
                .collect(),
        };
        let id = (0..64)
            .find(|&id| TensorType::from_id(id) == Some(kind))
            .expect("each type has a number");
        self.tensors.push((name.into(), dims.into(), id, bytes));
        self
    }

    pub fn build(self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut file, key);
            file.extend(value);
        }
        let mut offset = 0;
        for (name, dims, id, bytes) in &self.tensors {
            text(&mut file, name);
            file.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| file.extend(d.to_le_bytes()));
            file.extend(id.to_le_bytes());
            file.extend((offset as u64).to_le_bytes());
            offset += bytes.len().next_multiple_of(ALIGNMENT);
        }
        for (_, _, _, bytes) in &self.tensors {
            file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
            file.extend(bytes);
        }
        file
    }
}

/// A value's type and bytes.
fn encoded(value: Meta) -> Vec<u8> {
    let mut out = Vec::new();
    let array = |out: &mut Vec<u8>, kind: u32, n: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((n as u64).to_le_bytes());
    };
    match value {
        Meta::U32(x) => out.extend([4u32.to_le_bytes(), x.to_le_bytes()].concat()),
        Meta::F32(x) => out.extend([6u32.to_le_bytes(), x.to_le_bytes()].concat()),
        Meta::Bool(x) => out.extend([&7u32.to_le_bytes()[..], &[x.into()]].concat()),
        Meta::Text(x) => {
            out.extend(8u32.to_le_bytes());
            text(&mut out, x);
        }
        Meta::Texts(list) => {
            array(&mut out, 8, list.len());
            list.iter().for_each(|x| text(&mut out, x));
        }
        Meta::Ints(list) => {
            array(&mut out, 5, list.len());
            list.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        Meta::Floats(list) => {
            array(&mut out, 6, list.len());
            list.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
    }
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// GPT-2's characters for the 256 bytes, in an order of our own: printable ASCII first.
pub(crate) fn byte_characters() -> Vec<String> {
    let printable =
        |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut moved = 256..;
    let character = |b: u32| {
        if printable(b) {
            b
        } else {
            moved.next().expect("endless")
        }
    };
    let characters = (0..256).map(character).collect::<Vec<u32>>();
    characters
        .into_iter()
        .map(|c| char::from_u32(c).expect("below the surrogates").to_string())
        .collect()
}

/// The vocabulary of [`tiny_llama`]: the bytes, two words, two special tokens.
pub(crate) fn tiny_tokens() -> Vec<String> {
    let mut tokens = byte_characters();
    tokens.extend(["he", "ll", "<|begin|>", "<|end|>"].map(String::from));
    tokens
}

/// A complete llama model of two layers with a byte-level vocabulary of 260 tokens, all weights of `kind`.
pub(crate) fn tiny_llama(kind: TensorType) -> Builder {
    let (embd, ff) = (
        kind.block_len().max(32) as u64,
        2 * kind.block_len().max(32) as u64,
    );
    let tokens = tiny_tokens();
    let vocab = tokens.len() as u64;
    let mut kinds = vec![1; tokens.len()];
    kinds[258..].fill(3);
    let merges = ["h e", "l l"].map(String::from);
    let mut builder = Builder::new(3)
        .meta("general.architecture", Meta::Text("llama"))
        .meta("general.name", Meta::Text("tiny"))
        .meta("llama.block_count", Meta::U32(2))
        .meta("llama.context_length", Meta::U32(64))
        .meta("llama.embedding_length", Meta::U32(embd as u32))
        .meta("llama.feed_forward_length", Meta::U32(ff as u32))
        .meta("llama.attention.head_count", Meta::U32(4))
        .meta("llama.attention.head_count_kv", Meta::U32(2))
        .meta("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5))
        .meta("llama.rope.freq_base", Meta::F32(1e5))
        .meta("tokenizer.ggml.model", Meta::Text("gpt2"))
        .meta("tokenizer.ggml.pre", Meta::Text("smollm"))
        .meta("tokenizer.ggml.tokens", Meta::Texts(&tokens))
        .meta("tokenizer.ggml.token_type", Meta::Ints(&kinds))
        .meta("tokenizer.ggml.merges", Meta::Texts(&merges))
        .meta("tokenizer.ggml.bos_token_id", Meta::U32(258))
        .meta("tokenizer.ggml.eos_token_id", Meta::U32(259))
        .meta("tokenizer.ggml.add_bos_token", Meta::Bool(false))
        .tensor("token_embd.weight", &[embd, vocab], kind, 1)
        .tensor("output_norm.weight", &[embd], TensorType::F32, 2);
    for layer in 0..2u8 {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        builder = builder
            .tensor(&name("attn_norm"), &[embd], TensorType::F32, layer)
            .tensor(&name("attn_q"), &[embd, embd], kind, 10 + layer)
            .tensor(&name("attn_k"), &[embd, embd / 2], kind, 20 + layer)
            .tensor(&name("attn_v"), &[embd, embd / 2], kind, 30 + layer)
            .tensor(&name("attn_output"), &[embd, embd], kind, 40 + layer)
            .tensor(&name("ffn_norm"), &[embd], TensorType::F32, 50 + layer)
            .tensor(&name("ffn_gate"), &[embd, ff], kind, 60 + layer)
            .tensor(&name("ffn_up"), &[embd, ff], kind, 70 + layer)
            .tensor(&name("ffn_down"), &[ff, embd], kind, 80 + layer);
    }
    builder
}

/// A gemma3 model of seven layers with a SentencePiece vocabulary, its heads wider than the embedding allows for.
pub(crate) fn tiny_gemma() -> Builder {
    let mut tokens: Vec<String> = ["<unk>", "<eos>", "<bos>", "  "].map(String::from).to_vec();
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(["▁", "h", "e", "l", "o", "he", "ll", "▁he", "llo", "▁hello"].map(String::from));
    let mut kinds = vec![1; tokens.len()];
    kinds[..4].copy_from_slice(&[2, 3, 3, 4]);
    kinds[4..260].fill(6);
    let scores: Vec<f32> = (0..tokens.len())
        .map(|id| if id < 265 { -1000.0 } else { -(id as f32) })
        .collect();
    let (embd, heads) = (64, 4 * 32);
    let f16 = TensorType::F16;
    let mut builder = Builder::new(3)
        .meta("general.architecture", Meta::Text("gemma3"))
        .meta("gemma3.block_count", Meta::U32(7))
        .meta("gemma3.context_length", Meta::U32(4096))
        .meta("gemma3.embedding_length", Meta::U32(embd as u32))
        .meta("gemma3.feed_forward_length", Meta::U32(96))
        .meta("gemma3.attention.head_count", Meta::U32(4))
        .meta("gemma3.attention.head_count_kv", Meta::U32(1))
        .meta("gemma3.attention.key_length", Meta::U32(32))
        .meta("gemma3.attention.value_length", Meta::U32(32))
        .meta("gemma3.attention.sliding_window", Meta::U32(512))
        .meta("gemma3.attention.layer_norm_rms_epsilon", Meta::F32(1e-6))
        .meta("gemma3.rope.freq_base", Meta::F32(1e6))
        .meta("tokenizer.ggml.model", Meta::Text("llama"))
        .meta("tokenizer.ggml.tokens", Meta::Texts(&tokens))
        .meta("tokenizer.ggml.token_type", Meta::Ints(&kinds))
        .meta("tokenizer.ggml.scores", Meta::Floats(&scores))
        .meta("tokenizer.ggml.bos_token_id", Meta::U32(2))
        .meta("tokenizer.ggml.eos_token_id", Meta::U32(1))
        .meta("tokenizer.ggml.add_space_prefix", Meta::Bool(false))
        .tensor("token_embd.weight", &[embd, tokens.len() as u64], f16, 1)
        .tensor("output_norm.weight", &[embd], TensorType::F32, 2);
    for layer in 0..7u8 {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        for (part, n) in [
            ("attn_norm", embd),
            ("post_attention_norm", embd),
            ("ffn_norm", embd),
            ("post_ffw_norm", embd),
            ("attn_q_norm", 32),
            ("attn_k_norm", 32),
        ] {
            builder = builder.tensor(&name(part), &[n], TensorType::F32, layer);
        }
        builder = builder
            .tensor(&name("attn_q"), &[embd, heads], f16, 1)
            .tensor(&name("attn_k"), &[embd, 32], f16, 2)
            .tensor(&name("attn_v"), &[embd, 32], f16, 3)
            .tensor(&name("attn_output"), &[heads, embd], f16, 4)
            .tensor(&name("ffn_gate"), &[embd, 96], f16, 5)
            .tensor(&name("ffn_up"), &[embd, 96], f16, 6)
            .tensor(&name("ffn_down"), &[96, embd], f16, 7);
    }
    builder
}
