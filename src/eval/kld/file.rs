//! llama.cpp's file of base logits: what `llama-perplexity --save-all-logits` writes and `--kl-divergence` reads.
//!
//! ```text
//! "_logits_"  i32 n_ctx  i32 n_vocab  i32 n_chunk     little-endian
//! i32 × n_chunk · n_ctx                               token ids
//! per chunk: (n_ctx − 1 − n_ctx/2) packed rows        what follows position n_ctx/2, n_ctx/2 + 1, …
//! ```
//!
//! Invariants: the ids are those of one text cut into chunks; where a model wants a BOS token, each chunk is evaluated with it in
//! the place of its first token, though the file shows it in the first chunk at most. A file that is being written has another
//! name until it is whole.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::packed::{PackedRow, pack, row_words};

const MAGIC: &[u8; 8] = b"_logits_";

/// Bytes before the token ids.
const HEAD_BYTES: u64 = 20;

/// No model's context or vocabulary is larger.
const MAX_COUNT: i32 = 1 << 24;

/// What can be wrong with a file of base logits.
#[derive(Debug, thiserror::Error)]
pub enum LogitsFileError {
    /// It can't be opened, read or written.
    #[error("can't {what} `{path}`: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: String,
        /// Why not.
        source: std::io::Error,
    },
    /// It is something else.
    #[error(
        "`{path}` is no file of base logits: it begins with {got:?}, must begin with \"_logits_\"; write one with `kvlab kld --write` or `llama-perplexity --save-all-logits`"
    )]
    Magic {
        /// The file.
        path: String,
        /// Its first bytes.
        got: String,
    },
    /// A number of the header is out of range.
    #[error("`{path}`: {field} is {got}, must be {allowed}")]
    Header {
        /// The file.
        path: String,
        /// Which number.
        field: &'static str,
        /// Its value.
        got: i64,
        /// What is allowed.
        allowed: String,
    },
    /// It ends too early or goes on too long.
    #[error(
        "`{path}` has {got} bytes, {n_chunks} chunks of {n_ctx} tokens take {expected}: {whole} of them are whole; write it again"
    )]
    Size {
        /// The file.
        path: String,
        /// Its bytes.
        got: u64,
        /// Bytes that the header asks for.
        expected: u64,
        /// Chunks by the header.
        n_chunks: usize,
        /// Tokens of a chunk.
        n_ctx: usize,
        /// Chunks that are there.
        whole: u64,
    },
    /// A token that the vocabulary hasn't.
    #[error("`{path}`: token {index} has id {got}, must be from 0 to {max}")]
    Token {
        /// The file.
        path: String,
        /// Its index.
        index: usize,
        /// The id.
        got: i32,
        /// The largest id.
        max: usize,
    },
    /// A row that holds no distribution.
    #[error("`{path}`: chunk {chunk}, row {row}: {what}; the file is damaged")]
    Row {
        /// The file.
        path: String,
        /// Chunk index.
        chunk: usize,
        /// Row of the chunk.
        row: usize,
        /// What is wrong.
        what: String,
    },
}

/// What the file's header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Tokens of a chunk.
    pub n_ctx: usize,
    /// Tokens of the vocabulary.
    pub n_vocab: usize,
    /// Chunks.
    pub n_chunks: usize,
}

impl Header {
    /// The position whose next token is the first that is scored.
    pub fn first_scored(&self) -> usize {
        self.n_ctx / 2
    }

    /// Rows of a chunk.
    pub fn n_scored(&self) -> usize {
        self.n_ctx - 1 - self.first_scored()
    }

    /// Words of a chunk's rows.
    fn chunk_words(&self) -> usize {
        self.n_scored() * row_words(self.n_vocab)
    }

    /// Bytes of a whole file.
    pub fn file_bytes(&self) -> u64 {
        let ids = 4 * (self.n_chunks * self.n_ctx) as u64;
        HEAD_BYTES + ids + self.n_chunks as u64 * 2 * self.chunk_words() as u64
    }
}

/// The packed rows of one chunk.
#[derive(Debug, Clone, Default)]
pub struct PackedRows {
    words: Vec<u16>,
    n_vocab: usize,
}

impl PackedRows {
    /// Row i.
    pub fn row(&self, i: usize) -> PackedRow<'_> {
        let n = row_words(self.n_vocab);
        PackedRow::new(&self.words[i * n..(i + 1) * n], self.n_vocab)
    }
}

/// A file that is read, chunk by chunk.
#[derive(Debug)]
pub struct LogitsReader {
    path: String,
    file: BufReader<File>,
    header: Header,
    ids: Vec<u32>,
    next: usize,
}

impl LogitsReader {
    /// Opens a file and reads all but its rows.
    ///
    /// # Errors
    /// A file that is no such file, is not whole, or has ids outside its vocabulary.
    pub fn open(path: &Path) -> Result<Self, LogitsFileError> {
        let name = path.display().to_string();
        let io = |what: &'static str| {
            let path = name.clone();
            move |source| LogitsFileError::Io { what, path, source }
        };
        let file = File::open(path).map_err(io("open"))?;
        let got = file.metadata().map_err(io("open"))?.len();
        let mut file = BufReader::new(file);
        let mut magic = Vec::new();
        let eight = (&mut file).take(8).read_to_end(&mut magic);
        eight.map_err(io("read"))?;
        if magic != MAGIC {
            return Err(LogitsFileError::Magic {
                path: name,
                got: String::from_utf8_lossy(&magic).into_owned(),
            });
        }
        let mut numbers = [0u8; 12];
        file.read_exact(&mut numbers)
            .map_err(io("read the header of"))?;
        let header = header(&name, &numbers)?;
        let expected = header.file_bytes();
        if got != expected {
            let rows = got.saturating_sub(HEAD_BYTES + 4 * (header.n_chunks * header.n_ctx) as u64);
            let whole = rows / (2 * header.chunk_words() as u64);
            return Err(LogitsFileError::Size {
                path: name,
                got,
                expected,
                n_chunks: header.n_chunks,
                n_ctx: header.n_ctx,
                whole: whole.min(header.n_chunks as u64),
            });
        }
        let mut bytes = vec![0; 4 * header.n_chunks * header.n_ctx];
        file.read_exact(&mut bytes)
            .map_err(io("read the tokens of"))?;
        let mut ids = Vec::with_capacity(bytes.len() / 4);
        for (index, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let got = i32::from_le_bytes(*word);
            match u32::try_from(got)
                .ok()
                .filter(|&id| (id as usize) < header.n_vocab)
            {
                Some(id) => ids.push(id),
                None => {
                    return Err(LogitsFileError::Token {
                        path: name,
                        index,
                        got,
                        max: header.n_vocab - 1,
                    });
                }
            }
        }
        Ok(Self {
            path: name,
            file,
            header,
            ids,
            next: 0,
        })
    }

    /// The header.
    pub fn header(&self) -> Header {
        self.header
    }

    /// A chunk's tokens, as the file has them.
    pub fn tokens(&self, chunk: usize) -> &[u32] {
        &self.ids[chunk * self.header.n_ctx..(chunk + 1) * self.header.n_ctx]
    }

    /// The next chunk's rows into `rows`; false after the last chunk.
    ///
    /// # Errors
    /// A read that fails, a row that holds no distribution.
    pub fn next_rows(&mut self, rows: &mut PackedRows) -> Result<bool, LogitsFileError> {
        if self.next == self.header.n_chunks {
            return Ok(false);
        }
        rows.n_vocab = self.header.n_vocab;
        rows.words.resize(self.header.chunk_words(), 0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut rows.words);
        let read = self.file.read_exact(bytes);
        read.map_err(|source| LogitsFileError::Io {
            what: "read the rows of",
            path: self.path.clone(),
            source,
        })?;
        for word in &mut rows.words {
            *word = u16::from_le(*word);
        }
        for row in 0..self.header.n_scored() {
            if let Some(what) = rows.row(row).fault() {
                return Err(LogitsFileError::Row {
                    path: self.path.clone(),
                    chunk: self.next,
                    row,
                    what,
                });
            }
        }
        self.next += 1;
        Ok(true)
    }
}

fn header(path: &str, numbers: &[u8; 12]) -> Result<Header, LogitsFileError> {
    let number = |i: usize, field, min: i32| {
        let [a, b, c, d] = [0, 1, 2, 3].map(|j| numbers[4 * i + j]);
        let got = i32::from_le_bytes([a, b, c, d]);
        let fits = (min..=MAX_COUNT).contains(&got);
        let error = || LogitsFileError::Header {
            path: path.to_owned(),
            field,
            got: got.into(),
            allowed: format!("from {min} to {MAX_COUNT}"),
        };
        fits.then_some(got as usize).ok_or_else(error)
    };
    Ok(Header {
        // Of three tokens the last is scored.
        n_ctx: number(0, "n_ctx", 3)?,
        n_vocab: number(1, "n_vocab", 1)?,
        n_chunks: number(2, "n_chunk", 1)?,
    })
}

/// A file that is written, chunk by chunk.
#[derive(Debug)]
pub struct LogitsWriter {
    path: PathBuf,
    part: PathBuf,
    file: BufWriter<File>,
    header: Header,
    row: Vec<u16>,
    n_rows: usize,
}

impl LogitsWriter {
    /// Begins a file. `ids`: `n_chunks · n_ctx` tokens.
    ///
    /// # Errors
    /// A path that can't be written.
    pub fn create(path: &Path, header: Header, ids: &[u32]) -> Result<Self, LogitsFileError> {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let io = |source| LogitsFileError::Io {
            what: "write",
            path: part.display().to_string(),
            source,
        };
        let mut file = BufWriter::new(File::create(&part).map_err(io)?);
        let counts = [header.n_ctx, header.n_vocab, header.n_chunks].map(|n| n as u32);
        let mut bytes = MAGIC.to_vec();
        for n in counts.iter().chain(ids) {
            bytes.extend_from_slice(&n.to_le_bytes());
        }
        file.write_all(&bytes).map_err(io)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            row: vec![0; row_words(header.n_vocab)],
            header,
            n_rows: 0,
            part,
        })
    }

    /// Adds the next row of logits, `[n_vocab]`.
    ///
    /// # Errors
    /// A write that fails.
    pub fn push(&mut self, logits: &[f32]) -> Result<(), LogitsFileError> {
        pack(logits, &mut self.row);
        self.n_rows += 1;
        for word in &mut self.row {
            *word = word.to_le();
        }
        let written = self.file.write_all(bytemuck::cast_slice(&self.row));
        written.map_err(|e| self.io(e))
    }

    /// Ends the file and gives it its name.
    ///
    /// # Errors
    /// Rows that are missing, a write that fails.
    pub fn finish(mut self) -> Result<(), LogitsFileError> {
        let expected = self.header.n_chunks * self.header.n_scored();
        if self.n_rows != expected {
            let what = format!(
                "{} rows were written, {expected} were announced",
                self.n_rows
            );
            return Err(self.io(std::io::Error::other(what)));
        }
        self.file.flush().map_err(|e| self.io(e))?;
        std::fs::rename(&self.part, &self.path).map_err(|e| self.io(e))
    }

    fn io(&self, source: std::io::Error) -> LogitsFileError {
        LogitsFileError::Io {
            what: "write",
            path: self.part.display().to_string(),
            source,
        }
    }
}
