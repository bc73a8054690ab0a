//! What a check finds: where an output first differs, what it is and what it must be.
//!
//! Invariant: a failure names everything that a repetition needs but the strategy, the check and the seed, which whoever
//! ran the check knows.

use std::fmt;

use crate::cache::{CacheError, Geometry};

/// A place in an attention output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Layer index.
    pub layer: usize,
    /// Absolute position of the query.
    pub position: usize,
    /// Query head.
    pub head: usize,
    /// Channel of the head.
    pub channel: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "layer {}, head {}, position {}, channel {}",
            self.layer, self.head, self.position, self.channel
        )
    }
}

/// A check that does not hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// What was compared with what.
    pub what: String,
    /// Heads and channels of the layers.
    pub geometry: String,
    /// Which tokens went in, and how.
    pub tokens: String,
    /// The first output that differs, if outputs were compared.
    pub place: Option<Place>,
    /// What came.
    pub got: String,
    /// What had to come.
    pub expected: String,
    /// Largest error of all outputs, if outputs were compared.
    pub max_error: Option<f64>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.what, self.geometry, self.tokens)?;
        if let Some(place) = self.place {
            write!(f, "; first at {place}")?;
        }
        write!(f, ": got {}, expected {}", self.got, self.expected)?;
        match self.max_error {
            Some(error) => write!(f, " (largest error {error:.3e})"),
            None => Ok(()),
        }
    }
}

/// Why a check ends early.
#[derive(Debug, Clone, PartialEq)]
pub enum Stop {
    /// The strategy makes no such promise.
    NotApplicable(String),
    /// The check does not hold.
    Failed(Box<Failure>),
}

/// A check that holds, with what it could not look at; or why not.
pub type Verdict = Result<Option<String>, Stop>;

/// Where a comparison stands: what is compared, on which layers, with which tokens.
#[derive(Debug, Clone, Copy)]
pub struct Scene<'a> {
    /// What is compared with what.
    pub what: &'a str,
    /// The layers.
    pub geometry: &'a Geometry,
    /// The tokens in words.
    pub tokens: &'a str,
    /// Position of the first output.
    pub first: usize,
}

impl Scene<'_> {
    /// A failure without a place.
    pub fn failed(&self, got: impl fmt::Display, expected: impl fmt::Display) -> Stop {
        Stop::Failed(Box::new(Failure {
            what: self.what.to_owned(),
            geometry: shape(self.geometry),
            tokens: self.tokens.to_owned(),
            place: None,
            got: got.to_string(),
            expected: expected.to_string(),
            max_error: None,
        }))
    }

    /// A step that a cache refused though nothing was wrong with it.
    pub fn refused(&self, error: &CacheError) -> Stop {
        self.failed(format!("the error \"{error}\""), "no error")
    }

    /// Fails unless two facts are the same.
    ///
    /// # Errors
    /// The failure.
    pub fn same<T: PartialEq + fmt::Debug>(&self, got: T, expected: T) -> Result<(), Stop> {
        match got == expected {
            true => Ok(()),
            false => Err(self.failed(format!("{got:?}"), format!("{expected:?}"))),
        }
    }

    /// Fails unless two outputs have the same bits, `[layer][token · head · channel]`.
    ///
    /// # Errors
    /// The failure, with the first place by layer and position.
    pub fn same_bits(&self, got: &[Vec<f32>], expected: &[Vec<f32>]) -> Result<(), Stop> {
        for (layer, (got, expected)) in got.iter().zip(expected).enumerate() {
            self.same(got.len(), expected.len())?;
            let differs = |i: &usize| got[*i].to_bits() != expected[*i].to_bits();
            if let Some(i) = (0..got.len()).find(differs) {
                let pairs = got.iter().zip(expected);
                let pairs = pairs.map(|(&a, &b)| (f64::from(a), f64::from(b)));
                return Err(self.differs((layer, i), (got[i], expected[i]), pairs));
            }
        }
        self.same(got.len(), expected.len())
    }

    /// Fails unless one layer's output is within `bound` of the expected one.
    ///
    /// # Errors
    /// The failure, with the first position.
    pub fn close(
        &self,
        layer: usize,
        got: &[f32],
        expected: &[f64],
        bound: f64,
    ) -> Result<(), Stop> {
        self.same(got.len(), expected.len())?;
        let near = |i: &usize| (f64::from(got[*i]) - expected[*i]).abs() <= bound;
        // A NaN is near nothing.
        match (0..got.len()).find(|i| !near(i)) {
            None => Ok(()),
            Some(i) => {
                let pairs = got.iter().zip(expected).map(|(&a, &b)| (f64::from(a), b));
                Err(self.differs((layer, i), (got[i], expected[i]), pairs))
            }
        }
    }

    fn differs<T: fmt::Display, U: fmt::Display>(
        &self,
        (layer, index): (usize, usize),
        (got, expected): (T, U),
        pairs: impl Iterator<Item = (f64, f64)>,
    ) -> Stop {
        let g = &self.geometry.layers[layer];
        let (row, dim) = (g.n_heads * g.head_dim, g.head_dim);
        let largest = |worst: f64, error: f64| match error.is_nan() {
            true => f64::INFINITY,
            false => worst.max(error),
        };
        Stop::Failed(Box::new(Failure {
            what: self.what.to_owned(),
            geometry: shape(self.geometry),
            tokens: self.tokens.to_owned(),
            place: Some(Place {
                layer,
                position: self.first + index / row,
                head: index % row / dim,
                channel: index % dim,
            }),
            got: got.to_string(),
            expected: expected.to_string(),
            max_error: Some(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, largest)),
        }))
    }
}

/// `2 layers, 4 query heads, 2 KV heads, head_dim 32`.
pub fn shape(geometry: &Geometry) -> String {
    let Some(g) = geometry.layers.first() else {
        return "no layers".to_owned();
    };
    let windows: Vec<String> = geometry
        .layers
        .iter()
        .enumerate()
        .filter_map(|(i, l)| {
            l.window
                .map(|w| format!(", layer {i} with a window of {w}"))
        })
        .collect();
    format!(
        "{} layers, {} query heads, {} KV heads, head_dim {}{}",
        geometry.layers.len(),
        g.n_heads,
        g.n_kv_heads,
        g.head_dim,
        windows.concat()
    )
}
