//! How many rows live, which ones always do, and how heads share: the parameters that all scored stages have.
//!
//! Invariants: a budget says what stays, never what goes; protected rows count towards it and stay even where they exceed
//! it; at least one row of each head lives.

use std::fmt;
use std::ops::Range;

use super::super::stage::{Domain, Kind, LiveRows, ParamDef, Params, StageError};
use super::growth::Growth;
use super::positions;

/// A count of positions.
const POSITIONS: Domain = Domain::Int {
    min: 0,
    max: u32::MAX as i64,
};

/// `tokens`.
pub const TOKENS: ParamDef = ParamDef {
    name: "tokens",
    domain: Domain::Int {
        min: 1,
        max: u32::MAX as i64,
    },
    default: None,
    doc: "rows that live per head (their mean where heads share); give this or `kept_fraction`",
};

/// `kept_fraction`.
pub const KEPT_FRACTION: ParamDef = ParamDef {
    name: "kept_fraction",
    domain: Domain::Fraction { min: 0.0, max: 1.0 },
    default: None,
    doc: "rows that live per position, rounded up; give this or `tokens`",
};

/// `bytes`.
pub const BYTES: ParamDef = ParamDef {
    name: "bytes",
    domain: Domain::Int {
        min: 1,
        max: 1 << 50,
    },
    default: None,
    doc: "resident bytes of a sequence right after its compression point, all told but for what `place` holds besides (bounds of `quest`, tables of `specache`); or this",
};

/// `bytes_per_token`.
pub const BYTES_PER_TOKEN: ParamDef = ParamDef {
    name: "bytes_per_token",
    domain: Domain::Fraction {
        min: 0.0,
        max: 1e12,
    },
    default: None,
    doc: "the same per position seen; or this",
};

/// `sinks`.
pub const SINKS: ParamDef = ParamDef {
    name: "sinks",
    domain: POSITIONS,
    default: Some("4"),
    doc: "first positions, which always live",
};

/// `recent` with none by default.
pub const RECENT: ParamDef = ParamDef {
    name: "recent",
    domain: POSITIONS,
    default: Some("0"),
    doc: "newest positions, which always live",
};

/// `recent` of stages whose scores say little about the newest rows.
pub const RECENT_64: ParamDef = ParamDef {
    default: Some("64"),
    ..RECENT
};

/// `whitelist`.
pub const WHITELIST: ParamDef = ParamDef {
    name: "whitelist",
    domain: Domain::Text,
    default: None,
    doc: "positions that always live, such as a system prompt's: `0-31, 90-99`, both ends included",
};

/// `segments`.
pub const SEGMENTS: ParamDef = ParamDef {
    name: "segments",
    domain: Domain::Text,
    default: None,
    doc: "positions at which another segment begins, each with its share of the budget: `120, 800`",
};

/// How heads share: the words.
const WORDS: &[&str] = &["uniform", "adakv", "pyramid", "global", "heads"];

/// `allocate`, each head for itself.
pub const ALLOCATE: ParamDef = ParamDef {
    name: "allocate",
    domain: Domain::Choice { of: WORDS },
    default: Some("uniform"),
    doc: "who shares a budget: nobody, the heads of a layer, all heads; `pyramid`: early layers have more; `heads`: the best heads keep all rows, the others what is protected",
};

/// `allocate` among the heads of a layer.
pub const ALLOCATE_ADAKV: ParamDef = ParamDef {
    default: Some("adakv"),
    ..ALLOCATE
};

/// `allocate` by layers.
pub const ALLOCATE_PYRAMID: ParamDef = ParamDef {
    default: Some("pyramid"),
    ..ALLOCATE
};

/// `allocate` among all heads.
pub const ALLOCATE_GLOBAL: ParamDef = ParamDef {
    default: Some("global"),
    ..ALLOCATE
};

/// `safeguard`.
pub const SAFEGUARD: ParamDef = ParamDef {
    name: "safeguard",
    domain: Domain::Share { max: 1.0 },
    default: Some("0.2"),
    doc: "part of its uniform budget that a head keeps whatever the others score (`adakv`)",
};

/// `beta`.
pub const BETA: ParamDef = ParamDef {
    name: "beta",
    domain: Domain::Int { min: 1, max: 1000 },
    default: Some("20"),
    doc: "the mean budget over the last layer's (`pyramid`)",
};

/// `rebuild`, of stages that act while decoding.
pub const REBUILD: ParamDef = ParamDef {
    name: "rebuild",
    domain: Domain::Fraction { min: 0.0, max: 1.0 },
    default: None,
    doc: "a page of rows coded together is coded anew, from its decoded rows, once no more than this part of its stored rows lives; never, if not given",
};

/// What every scored stage takes that has nothing to add.
pub const COMMON: &[ParamDef] = &[
    TOKENS,
    KEPT_FRACTION,
    BYTES,
    BYTES_PER_TOKEN,
    ALLOCATE,
    SAFEGUARD,
    BETA,
    SINKS,
    RECENT,
    WHITELIST,
    SEGMENTS,
];

/// How many rows of a head live.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// At most so many.
    Tokens(u32),
    /// So many per position that the head can still reach, rounded up; in (0, 1].
    KeptFraction(f64),
    /// Rows that score at least this.
    Threshold(f32),
    /// As many as fit, all heads together, into so many bytes of a sequence.
    Bytes(u64),
    /// The same per position seen.
    BytesPerToken(f64),
}

impl Budget {
    /// Rows that may live of a head after `n` positions; at least 1.
    pub fn rows(self, n: u32) -> f64 {
        match self {
            Budget::Tokens(tokens) => f64::from(tokens.max(1)),
            Budget::KeptFraction(f) => part(f, n),
            Budget::Threshold(_) => 1.0,
            // A compression point says what fits; without one nothing is known to have to leave.
            Budget::Bytes(_) | Budget::BytesPerToken(_) => f64::from(n),
        }
    }

    /// Bytes that a sequence may take after a context of `n` positions, if bytes are what is given.
    pub fn bytes(self, n: u32) -> Option<u64> {
        match self {
            Budget::Bytes(bytes) => Some(bytes),
            Budget::BytesPerToken(bytes) => Some((bytes * f64::from(n)) as u64),
            _ => None,
        }
    }

    /// The one that is given.
    fn read(params: &Params) -> Result<Self, String> {
        let whole = |name: &str| params.int(name).unwrap_or(0).max(0);
        let of = |name: &str| -> Option<Self> {
            Some(match name {
                "tokens" => Budget::Tokens(positions(params, name)),
                "bytes" => Budget::Bytes(whole(name) as u64),
                "kept_fraction" => Budget::KeptFraction(params.float(name)?),
                "bytes_per_token" => Budget::BytesPerToken(params.float(name)?),
                _ => Budget::Threshold(params.float(name)? as f32),
            })
        };
        let names = [
            "tokens",
            "kept_fraction",
            "bytes",
            "bytes_per_token",
            "threshold",
        ];
        let given: Vec<&str> = names
            .into_iter()
            .filter(|&name| params.0.contains_key(name))
            .collect();
        match given[..] {
            [name] => of(name).ok_or_else(|| format!("`{name}` is no number")),
            [] => Err(
                "it has no budget: give `tokens` (rows per head), `kept_fraction` (0 to 1), `bytes` (of a sequence) or \
                 `bytes_per_token`"
                    .to_owned(),
            ),
            _ => {
                let shown = given
                    .iter()
                    .filter_map(|k| Some(format!("`{k}` = {}", params.0.get(*k)?)));
                let shown: Vec<String> = shown.collect();
                let n = ["two", "three", "four", "five"][given.len().min(5) - 2];
                Err(format!(
                    "{} are {n} budgets: give one of them",
                    shown.join(" and ")
                ))
            }
        }
    }
}

/// ⌈f · n⌉, at least 1.
pub fn part(f: f64, n: u32) -> f64 {
    // A hair less, or 0.07 · 100 = 7.000000000000001 would be 8 rows.
    (f * f64::from(n) * (1.0 - 1e-12)).ceil().max(1.0)
}

/// Who shares a budget.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Allocate {
    /// Nobody.
    Uniform,
    /// The heads of a layer, each with at least this part of its uniform budget (AdaKV, arXiv 2407.11550).
    Layer(f64),
    /// Nobody; early layers have more, the last one 1/β of the mean (PyramidKV, arXiv 2406.02069).
    Pyramid(f64),
    /// All heads of all layers.
    Global,
    /// All heads of all layers: those whose best row scores highest keep all rows, as many heads as fit, the others what is
    /// protected (KVzip's head level, arXiv 2505.23416).
    Heads,
}

impl Allocate {
    /// A layer's budget over the mean one, in a model of `n_layers`, for heads that reach `n` positions, of which
    /// `protected` always live, with a mean budget of `mean` rows. What falls from layer to layer is what the protected
    /// rows leave.
    pub fn layer_rows(
        self,
        (layer, n_layers): (usize, usize),
        mean: f64,
        (n, protected): (u32, u32),
    ) -> f64 {
        let Allocate::Pyramid(beta) = self else {
            return mean;
        };
        let (n, protected) = (n.saturating_sub(protected), f64::from(protected));
        let mean = (mean - protected).max(0.0);
        // What the first layers can't use, the last ones get.
        let most = (2.0 * mean - mean / beta).min(f64::from(n));
        // From 1 to −1, and as far above the mean as below it, so that rounding keeps the sum.
        let last = n_layers.saturating_sub(1).max(1) as f64;
        let height = match n_layers {
            0 | 1 => 0.0,
            _ => last - 2.0 * layer as f64,
        };
        (protected + mean + ((most - mean) * height / last).round()).max(1.0)
    }
}

/// Rows that live whatever their scores.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Protect {
    /// First positions.
    pub sinks: u32,
    /// Newest positions.
    pub recent: u32,
    /// Others.
    pub whitelist: Vec<Range<u32>>,
}

impl Protect {
    /// Whether the row always lives.
    pub fn holds(&self, position: u32, n_seen: u32) -> bool {
        position < self.sinks
            || position >= n_seen.saturating_sub(self.recent)
            || self.whitelist.iter().any(|r| r.contains(&position))
    }

    /// Rows of `n_seen` positions that always live.
    pub fn n_of(&self, n_seen: u32) -> u32 {
        // Counted from range to range: a position may be whitelisted twice.
        let newest = n_seen.saturating_sub(self.recent)..n_seen;
        let mut ranges = vec![0..self.sinks.min(n_seen), newest];
        ranges.extend(self.whitelist.iter().map(|r| r.start..r.end.min(n_seen)));
        ranges.sort_unstable_by_key(|r| r.start);
        let (mut n, mut end) = (0, 0);
        for r in ranges {
            n += r.end.saturating_sub(r.start.max(end));
            end = end.max(r.end);
        }
        n
    }

    /// By index, the rows that may leave.
    pub fn candidates<'a>(&'a self, live: LiveRows<'a>) -> impl Iterator<Item = usize> + 'a {
        let free = move |&i: &usize| !self.holds(live.positions[i], live.n_seen);
        (0..live.positions.len()).filter(free)
    }
}

impl fmt::Display for Protect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`sinks` = {} and `recent` = {}", self.sinks, self.recent)?;
        match self.whitelist.is_empty() {
            true => Ok(()),
            false => f.write_str(", and `whitelist`"),
        }
    }
}

/// All of these settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// How many.
    pub budget: Budget,
    /// Who shares.
    pub allocate: Allocate,
    /// Which always.
    pub protect: Protect,
    /// Where segments begin, ascending, the first one's 0 left out.
    pub segments: Vec<u32>,
    /// Another budget for what comes after a compression point.
    pub growth: Option<Growth>,
    /// When pages are coded anew: see [`super::super::stage::Retention::rebuild`].
    pub rebuild: Option<f64>,
}

impl Rule {
    /// Reads them; `name` is the stage's. `window`: newest rows that the stage itself must keep.
    pub fn read(name: &str, params: &Params, window: u32) -> Result<Self, StageError> {
        let refused = |problem: String| StageError::Parameter {
            kind: Kind::Retain,
            name: name.to_owned(),
            problem,
        };
        let protect = Protect {
            sinks: positions(params, "sinks"),
            recent: positions(params, "recent").max(window),
            whitelist: match params.text("whitelist") {
                Some(text) => ranges(text).map_err(&refused)?,
                None => Vec::new(),
            },
        };
        let segments = match params.text("segments") {
            Some(text) => starts(text).map_err(&refused)?,
            None => Vec::new(),
        };
        let budget = Budget::read(params).map_err(&refused)?;
        // Whitelisted ones count when a context's length says which of them it has.
        let protected = u64::from(protect.sinks) + u64::from(protect.recent);
        if let Budget::Tokens(n) = budget
            && u64::from(n) < protected
        {
            return Err(refused(format!(
                "`tokens` = {n} can't hold the {protected} protected rows (`sinks` = {} and `recent` = {}): give at least \
                 {protected}, or protect fewer",
                protect.sinks, protect.recent
            )));
        }
        if let (Budget::Threshold(_), Some(first)) = (budget, segments.first()) {
            return Err(refused(format!(
                "`segments` (from {first} on) share a budget, and `threshold` is none: leave `segments` out, or give \
                 `tokens` or `kept_fraction`"
            )));
        }
        let allocate = match params.text("allocate") {
            Some("adakv") => Allocate::Layer(params.float("safeguard").unwrap_or(0.0)),
            Some("pyramid") => Allocate::Pyramid(params.int("beta").unwrap_or(1) as f64),
            Some("global") => Allocate::Global,
            Some("heads") => Allocate::Heads,
            _ => Allocate::Uniform,
        };
        Ok(Self {
            budget,
            allocate,
            protect,
            segments,
            growth: Growth::read(params).map_err(&refused)?,
            rebuild: params.float("rebuild"),
        })
    }

    /// The segments, in order.
    pub fn segments(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        let starts = std::iter::once(0).chain(self.segments.iter().copied());
        let ends = self.segments.iter().copied().chain([u32::MAX]);
        starts.zip(ends).map(|(start, end)| start..end)
    }
}

/// `0-31, 90-99`.
fn ranges(text: &str) -> Result<Vec<Range<u32>>, String> {
    let one = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: u32 = first.trim().parse().ok()?;
        let last: u32 = last.trim().parse().ok()?;
        (first <= last).then_some(first..last.saturating_add(1))
    };
    let all: Option<Vec<Range<u32>>> = text.split(',').map(one).collect();
    all.ok_or_else(|| {
        format!(
            "`whitelist` is \"{text}\": give positions and ranges of them, such as \"0-31, 90-99\""
        )
    })
}

/// `120, 800`.
fn starts(text: &str) -> Result<Vec<u32>, String> {
    let all: Option<Vec<u32>> = text.split(',').map(|s| s.trim().parse().ok()).collect();
    all.filter(|s| s.first() != Some(&0) && s.is_sorted_by(|a, b| a < b))
        .ok_or_else(|| {
            format!(
                "`segments` is \"{text}\": give the positions at which the second and later segments begin, ascending, \
                 such as \"120, 800\""
            )
        })
}
