//! Fitted predictors on disk, so that a later run need not fit them again.
//!
//! Invariant: a file is used only if everything that the fit depends on is what the file says: the model's bytes, the
//! calibration text and its length, the stages, the version of the program. Its name is the hash of all that.
//!
//! The file is safetensors: `layer.L.k.weight` and `layer.L.v.weight`, a row of bytes for each input, and `….bias`, f32.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use sha2::{Digest, Sha256};

use super::{Affine, Predictor};
use crate::cache::project::aqua::{DEF, WeightFormat};
use crate::cache::stage::{Kind, Side, StageError};
use crate::cache::strategy::Strategy;

/// Raised when the file's layout, or what a fit does, changes.
const FORMAT: &str = "1";

/// A folder of fitted predictors.
#[derive(Debug, Clone)]
pub struct Shelf {
    /// The folder, which need not exist yet.
    pub dir: PathBuf,
    /// What all fits of a run depend on: hashes of the model and the calibration text, its tokens, the program.
    pub origin: BTreeMap<String, String>,
}

impl Shelf {
    /// The predictors of a strategy, if they were fitted before.
    ///
    /// # Errors
    /// [`StageError::Parameter`] that names the file, if it isn't what its name says.
    pub fn load(&self, strategy: &Strategy) -> Result<Option<Predictor>, StageError> {
        let wanted = self.metadata(strategy);
        let path = self.path(&wanted);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(refused(&path, &e.to_string())),
        };
        read(&bytes, &wanted)
            .map(Some)
            .map_err(|why| refused(&path, &why))
    }

    /// Keeps a strategy's predictors. A folder that can't be written costs the next run a fit and nothing else, so
    /// nothing is said about it.
    pub fn store(&self, strategy: &Strategy, predictor: &Predictor) {
        let metadata = self.metadata(strategy);
        let path = self.path(&metadata);
        let _ = write(&self.dir, &path, predictor, metadata);
    }

    fn metadata(&self, strategy: &Strategy) -> BTreeMap<String, String> {
        let mut all = self.origin.clone();
        let parts = [
            ("format", FORMAT.to_owned()),
            ("keys", text(&strategy.keys)),
            ("sinks", strategy.sinks.to_string()),
            ("project_k", text(&strategy.project_k)),
            ("project_v", text(&strategy.project_v)),
            ("encode_k", text(&strategy.encode_k)),
            ("encode_v", text(&strategy.encode_v)),
        ];
        all.extend(parts.map(|(key, value)| (key.to_owned(), value)));
        all
    }

    fn path(&self, metadata: &BTreeMap<String, String>) -> PathBuf {
        let mut hash = Sha256::new();
        for (key, value) in metadata {
            hash.update(format!("{key}\0{value}\0"));
        }
        self.dir.join(format!("{:x}.safetensors", hash.finalize()))
    }
}

/// Part of a strategy as text; data of ours is always JSON.
fn text(part: &impl serde::Serialize) -> String {
    serde_json::to_string(part).unwrap_or_default()
}

fn name(layer: usize, side: Side, what: &str) -> String {
    let side = match side {
        Side::K => "k",
        Side::V => "v",
    };
    format!("layer.{layer}.{side}.{what}")
}

fn refused(path: &Path, why: &str) -> StageError {
    StageError::Parameter {
        kind: Kind::Project,
        name: DEF.name.to_owned(),
        problem: format!(
            "the fitted predictors in {} can't be used: {why}; remove the file, and they are fitted again",
            path.display()
        ),
    }
}

/// All weights and biases as bytes, in order of layer and side.
fn tensors(predictor: &Predictor) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
    let mut all = Vec::new();
    for (layer, sides) in predictor.layers.iter().enumerate() {
        for (side, affine) in Side::BOTH.into_iter().zip(sides) {
            let width = affine.bias.len();
            let row = predictor.format.codec().row_bytes(width);
            all.push((
                name(layer, side, "weight"),
                Dtype::U8,
                vec![affine.weights.len() / row, row],
                affine.weights.clone(),
            ));
            let bias = affine.bias.iter().flat_map(|b| b.to_le_bytes());
            all.push((
                name(layer, side, "bias"),
                Dtype::F32,
                vec![width],
                bias.collect(),
            ));
        }
    }
    all
}

fn digest(predictor: &Predictor) -> String {
    let mut hash = Sha256::new();
    for (name, _, _, bytes) in tensors(predictor) {
        hash.update(name);
        hash.update(bytes);
    }
    format!("{:x}", hash.finalize())
}

fn write(
    dir: &Path,
    path: &Path,
    predictor: &Predictor,
    metadata: BTreeMap<String, String>,
) -> std::io::Result<()> {
    let mut metadata: Vec<(String, String)> = metadata.into_iter().collect();
    metadata.push(("sha256".to_owned(), digest(predictor)));
    metadata.push(("weights".to_owned(), predictor.format.name().to_owned()));
    metadata.push(("n_layers".to_owned(), predictor.layers.len().to_string()));
    let tensors = tensors(predictor);
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
        .map_err(std::io::Error::other)?;
    let bytes = safetensors::serialize(views, Some(metadata.into_iter().collect()))
        .map_err(std::io::Error::other)?;
    std::fs::create_dir_all(dir)?;
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(&bytes)?;
    file.persist(path)?;
    Ok(())
}

fn read(bytes: &[u8], wanted: &BTreeMap<String, String>) -> Result<Predictor, String> {
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
    let found = header.metadata().clone().unwrap_or_default();
    for (key, wanted) in wanted {
        match found.get(key) {
            Some(value) if value == wanted => {}
            Some(value) => return Err(format!("its `{key}` is {value}, this run's is {wanted}")),
            None => return Err(format!("it does not say what its `{key}` is")),
        }
    }
    let n_layers = found.get("n_layers").and_then(|n| n.parse::<usize>().ok());
    let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let tensor = |layer, side, what| -> Result<Vec<u8>, String> {
        let name = name(layer, side, what);
        let tensor = file
            .tensor(&name)
            .map_err(|_| format!("it has no `{name}`"))?;
        Ok(tensor.data().to_vec())
    };
    let format = found
        .get("weights")
        .and_then(|name| WeightFormat::named(name));
    let mut predictor = Predictor {
        format: format.ok_or("it does not say how its weights are stored")?,
        layers: Vec::new(),
    };
    for layer in 0..n_layers.ok_or("it does not say how many layers it has")? {
        let affine = |side| -> Result<Affine, String> {
            let bias = tensor(layer, side, "bias")?;
            Ok(Affine {
                weights: tensor(layer, side, "weight")?,
                bias: bias
                    .as_chunks()
                    .0
                    .iter()
                    .map(|b| f32::from_le_bytes(*b))
                    .collect(),
            })
        };
        predictor.layers.push([affine(Side::K)?, affine(Side::V)?]);
    }
    if found.get("sha256") != Some(&digest(&predictor)) {
        return Err("its weights are not those that were written".to_owned());
    }
    Ok(predictor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::KeyForm;

    fn shelf(dir: &Path) -> Shelf {
        let origin = [("model", "abc"), ("text", "def"), ("tokens", "100")];
        Shelf {
            dir: dir.join("learned"),
            origin: origin.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
        }
    }

    fn predictor() -> Predictor {
        let affine = |n_inputs: usize, first: f32| Affine {
            weights: (0..n_inputs * 4).map(|i| i as u8 + first as u8).collect(),
            bias: vec![first, -first],
        };
        Predictor {
            format: WeightFormat::F16,
            layers: vec![
                [affine(0, 1.0), affine(0, 2.0)],
                [affine(2, 3.0), affine(4, 4.0)],
            ],
        }
    }

    #[test]
    fn what_was_stored_is_loaded_for_the_same_origin_and_stages_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (shelf, strategy) = (shelf(dir.path()), Strategy::bare("q4_0"));
        assert!(shelf.load(&strategy).unwrap().is_none());
        shelf.store(&strategy, &predictor());
        assert_eq!(shelf.load(&strategy).unwrap(), Some(predictor()));
        let labelled = Strategy {
            label: "another name".into(),
            ..strategy.clone()
        };
        assert_eq!(shelf.load(&labelled).unwrap(), Some(predictor()));
        for other in [
            Strategy::bare("q8_0"),
            Strategy {
                keys: KeyForm::PreRope,
                ..strategy.clone()
            },
            Strategy {
                sinks: 4,
                ..strategy.clone()
            },
        ] {
            assert!(shelf.load(&other).unwrap().is_none());
        }
        let mut elsewhere = shelf.clone();
        elsewhere.origin.insert("model".into(), "xyz".into());
        assert!(elsewhere.load(&strategy).unwrap().is_none());
    }

    #[test]
    fn a_file_that_is_not_what_its_name_says_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (shelf, strategy) = (shelf(dir.path()), Strategy::bare("q4_0"));
        shelf.store(&strategy, &predictor());
        let path = shelf.path(&shelf.metadata(&strategy));
        let other = Strategy::bare("q8_0");
        let other_path = shelf.path(&shelf.metadata(&other));
        std::fs::copy(&path, &other_path).unwrap();
        let error = shelf.load(&other).unwrap_err().to_string();
        assert!(
            error.contains("its `encode_k` is") && error.contains("remove the file"),
            "{error}"
        );
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let error = shelf.load(&strategy).unwrap_err().to_string();
        assert!(error.contains("not those that were written"), "{error}");
        std::fs::write(&path, &bytes[..20]).unwrap();
        assert!(shelf.load(&strategy).is_err());
    }
}
