//! Models: from a name to a path, from a file to weights, hyperparameters and a tokenizer.
//!
//! [`source`] turns a name into a path and fetches what is missing; [`load`] opens a GGUF file or a Hugging Face folder.
//! Both formats end in the same three things: a [`ModelSpec`], a [`WeightSource`] and a [`Tokenizer`]; nothing outside
//! this module asks which format a model came from. Invariant: no content of a weight file can make the loader panic, overflow
//! or allocate more than a small multiple of the file's size; whatever is wrong is a one-line [`ModelError`].

pub mod geometry;
pub mod gguf;
pub mod ops;
pub mod safetensors;
pub mod shape;
pub mod source;
pub mod spec;
pub mod tiny;
pub mod tokenizer;
pub mod transformer;
pub mod weights;

use std::path::{Path, PathBuf};

pub use spec::{Activation, Architecture, LayerSpec, ModelSpec, RopeLayout, RopeScaling, RopeSpec};
pub use tokenizer::Tokenizer;
pub use weights::{Role, WeightSource};

/// What can go wrong between a model's name and its weights. Each message is one line that ends in what to do.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file can't be read or written.
    #[error("can't {action} `{path}`: {source}")]
    Io {
        /// What was tried: "read", "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The disk is full.
    #[error(
        "no space left on the disk while writing `{path}`: free some, or move the models with --models-dir or KVLAB_HOME"
    )]
    DiskFull {
        /// The file being written.
        path: PathBuf,
    },
    /// A file contradicts its own format: damaged or cut short.
    #[error("`{file}` is damaged or cut short: {problem}; fetch or convert it again")]
    Corrupt {
        /// The file.
        file: String,
        /// What contradicts what.
        problem: String,
    },
    /// A file is sound but holds something this program can't compute.
    #[error("`{file}` can't be used: {what} is {got}; supported: {allowed}")]
    Unsupported {
        /// The file.
        file: String,
        /// The key or feature.
        what: String,
        /// What the file says.
        got: String,
        /// What is supported.
        allowed: String,
    },
    /// Hyperparameters and tensors don't fit together.
    #[error("model `{model}` makes no sense: {problem}; convert it again from its original")]
    Invalid {
        /// The model's name or file.
        model: String,
        /// What doesn't fit.
        problem: String,
    },
    /// A text can't be encoded, ids can't be decoded, or a tokenizer can't be built.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A read outside a tensor, or of a tensor the model hasn't got.
    #[error(
        "the model has no rows {first}..{end} of {role:?} in layer {layer}: {rows} rows of {cols}"
    )]
    NoSuchRows {
        /// The tensor's role.
        role: Role,
        /// The layer, 0 for tensors outside layers.
        layer: usize,
        /// First row asked for.
        first: usize,
        /// One past the last row asked for.
        end: usize,
        /// Rows there are.
        rows: usize,
        /// Elements in each row.
        cols: usize,
    },
    /// A name that is neither built in nor a path.
    #[error(
        "no model is called `{name}`{hint}: give one of {known}, a .gguf file, a folder with config.json, or hub:org/name"
    )]
    UnknownModel {
        /// What was asked for.
        name: String,
        /// " (did you mean ...?)" or nothing.
        hint: String,
        /// The built-in names.
        known: String,
    },
    /// A path that isn't there, or holds no model.
    #[error(
        "`{path}` is no model: {problem}; give a .gguf file or a folder with config.json, tokenizer.json and weights"
    )]
    NotAModel {
        /// The path.
        path: PathBuf,
        /// What is missing.
        problem: String,
    },
    /// A fetched file isn't the expected one.
    #[error(
        "checksum of {what} differs: sha256 {got}, expected {expected}; nothing was kept, try again or report the source"
    )]
    Checksum {
        /// What was fetched.
        what: String,
        /// The sum of what came.
        got: String,
        /// The sum that was expected.
        expected: String,
    },
    /// A built-in model's file that is no longer what was fetched.
    #[error(
        "`{path}` is not `{name}`: sha256 {got}, expected {expected}; delete it to have it fetched again, or name it by its path"
    )]
    Altered {
        /// The file.
        path: PathBuf,
        /// The model's name.
        name: &'static str,
        /// Its sum.
        got: String,
        /// The sum it must have.
        expected: &'static str,
    },
    /// No source gave the model.
    #[error(
        "can't fetch `{name}`: {reasons}; check the network, or put the file at `{target}` yourself"
    )]
    Fetch {
        /// The model.
        name: String,
        /// Each source with its reason, in the order they were tried.
        reasons: String,
        /// Where the file belongs.
        target: PathBuf,
    },
    /// There is no folder to keep models in.
    #[error("no folder for models: set --models-dir or KVLAB_HOME (no home folder is known)")]
    NoModelDir,
}

impl ModelError {
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        if source.kind() == std::io::ErrorKind::StorageFull {
            return Self::DiskFull { path: path.into() };
        }
        Self::Io {
            action,
            path: path.into(),
            source,
        }
    }

    pub(crate) fn invalid(model: &str, problem: impl Into<String>) -> Self {
        Self::Invalid {
            model: model.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn corrupt(file: &Path, problem: impl Into<String>) -> Self {
        Self::Corrupt {
            file: file.display().to_string(),
            problem: problem.into(),
        }
    }
}

/// A model ready to run: what [`load`] gives.
pub struct LoadedModel {
    /// Hyperparameters.
    pub spec: ModelSpec,
    /// Weights, read from the mapped files when asked for.
    pub weights: Box<dyn WeightSource>,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// The model's identity in results: the sha256 of its GGUF file, or over the sums of a folder's files. Lower-case hex.
    pub sha256: String,
    /// The file or folder.
    pub path: PathBuf,
}

/// Opens a GGUF file or a Hugging Face folder.
///
/// Weights stay on disk and are mapped; the files must not change while the model is in use. The identity is cached in a
/// small file beside the weights, keyed by size and modification time.
///
/// # Errors
/// [`ModelError`] with the file and the reason: not a model, damaged, or of a kind that isn't supported.
pub fn load(path: &Path) -> Result<LoadedModel, ModelError> {
    let meta = std::fs::metadata(path).map_err(|e| ModelError::io("read", path, e))?;
    let (weights, tokenizer, files) = if meta.is_dir() {
        safetensors::open_folder(path)?
    } else {
        let (weights, tokenizer) = gguf::open_model(path)?;
        (weights, tokenizer, vec![path.to_path_buf()])
    };
    let sha256 = source::checksum::identity(&files)?;
    Ok(LoadedModel {
        spec: weights.spec().clone(),
        weights: Box::new(weights),
        tokenizer,
        sha256,
        path: path.into(),
    })
}
