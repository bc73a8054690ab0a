//! `joint`: one score decides of each row whether it leaves and, if not, how many bits its key and its value get, so that all
//! of it takes no more than a budget of bytes: reverse water-filling.
//!
//! A row that leaves costs its weight w, a power of its score; one that stays costs w · (d_K + d_V), d falling by 4 for each
//! bit, and its bytes at a price λ, the same for all rows of all heads. Each row takes what costs least; λ is the lowest
//! price at which the budget holds. One head, w = 1, 4, 16, 64, two bits of K costing 1/4 of w, of V 1/32, 4 bits a 16th of
//! that; a side of 2 bits has 4 bytes, one of 4 bits 8, a row 1 more:
//!
//! ```text
//! w      λ = 0.5                                                      λ = 1
//! 1      leaves: 1, or 0.281 + 0.5 · 9 if it stays                    leaves
//! 4      leaves: 4, or 1.125 + 4.5                                    leaves
//! 16     K 4 bits: 0.25 + 4 < 4 + 2, V 2 bits: 0.5 + 2.5 < 0.031 + 4.5    K 2 bits, V 2 bits
//! 256    K 4 bits: 4 + 4 < 64 + 2, V 4 bits: 0.5 + 4.5 < 8 + 2.5          K 4 bits, V 4 bits
//! ```
//!
//! Invariants: a row of a higher score has no fewer bits than another of its head, of those that aren't protected; rows of
//! equal scores have equal bits; protected rows have 4 bits at least; rows of heads with a sliding window, which
//! neither a repetition nor a trained gate compares with others, stay and have 4 bits.

use std::sync::Arc;

use super::super::Needs;
use super::super::stage::{
    BuildContext, Choice, ContextLayer, Costs, Domain, Kind, LiveRows, NewRow, ParamDef, Params,
    Retention, Shortage, Stage, StageDef, StageError, Tolerance, never,
};
use super::budget::{BYTES, BYTES_PER_TOKEN, RECENT_64, Rule, SINKS, WHITELIST};
use super::gate;
use super::kvzip::Repeated;
use super::selection::{Score, is_comparable};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "joint",
    kind: Kind::Retain,
    doc: "0, 2, 4 or 8 bits for each row by one score, all heads together within a budget of bytes",
    paper: "after RDKV, arXiv 2605.08317: reverse water-filling over rows; composed here",
    params: &[
        ParamDef {
            name: "score",
            domain: Domain::Choice {
                of: &["gate", "kvzip_plus"],
            },
            default: Some("gate"),
            doc: "what rows are worth: a learned gate's guess at `kvzip_plus`, or that itself",
        },
        ParamDef {
            name: "file",
            domain: Domain::File { or: &["random"] },
            default: None,
            doc: "the gate's weights; or `random`: an untrained one, a control",
        },
        ParamDef {
            name: "sha256",
            domain: Domain::Text,
            default: None,
            doc: "of the file; filled in, refused where it is another",
        },
        BYTES,
        BYTES_PER_TOKEN,
        SINKS,
        RECENT_64,
        WHITELIST,
    ],
    calibrated: never,
    examples: &[
        "{ method = \"joint\", file = \"random\", bytes_per_token = 300.0, recent = 16 }",
        "{ method = \"joint\", score = \"kvzip_plus\", bytes_per_token = 300.0, recent = 16 }",
    ],
    tolerance: Tolerance::Exact,
    build,
};

/// The power of a score that a row weighs.
const POWER: f64 = 0.75;

/// What 0 bits of a side would cost; each bit divides it by 4. Errors of K move weights, those of V are averaged away.
///
/// Both, and the power, were picked by hand on 4 contexts of 1024 tokens of Middlemarch and exllamav3.
const COST: [f64; 2] = [4.0, 0.5];

/// Level of 4 bits, which protected rows have at least.
const SAFE: u8 = 1;

/// Halvings of the interval in which ln λ is looked for.
const HALVINGS: usize = 40;

/// The interval: at one end every row has 8 bits, at the other all leave that may.
const LN_PRICE: (f64, f64) = (-60.0, 60.0);

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let refused = |problem: &str| StageError::Parameter {
        kind: Kind::Retain,
        name: DEF.name.to_owned(),
        problem: problem.to_owned(),
    };
    let is_learned = params.text("score") != Some("kvzip_plus");
    if !is_learned && params.text("file").is_some() {
        return Err(refused(
            "`score` = \"kvzip_plus\" reads no `file`: leave it out, or take score = \"gate\"",
        ));
    }
    if ["bytes", "bytes_per_token"]
        .iter()
        .all(|&b| params.float(b).is_none())
    {
        return Err(refused(
            "it has no budget: give `bytes` (of a sequence) or `bytes_per_token`",
        ));
    }
    let score: Box<dyn Score> = match is_learned {
        true => Box::new(gate::read(DEF.name, params, context)?),
        false => Box::new(Repeated::Weighted),
    };
    let rule = Rule::read(DEF.name, params, 0)?;
    Ok(Stage::Retain(Arc::new(Joint {
        score,
        rule,
        is_logarithm: is_learned,
    })))
}

/// The retention.
struct Joint {
    score: Box<dyn Score>,
    rule: Rule,
    /// Scores are logarithms.
    is_logarithm: bool,
}

/// What a row can have for its side: cost over weight and bytes, by level.
type Side = [(f64, f64); 3];

impl Joint {
    /// What a row weighs.
    fn weight(&self, score: f32) -> f64 {
        match self.is_logarithm {
            // Far beyond any score, and a number still.
            true => (POWER * f64::from(score).clamp(-40.0, 40.0)).exp(),
            // What got no attention at all stays too where there is room for everything.
            false => f64::from(score.max(1e-12)).powf(POWER),
        }
    }

    /// The rows of a head as they are weighed, given their bytes by level.
    fn weighed(&self, live: LiveRows<'_>, bytes: &[[f64; 2]]) -> Head {
        let side = |side: usize| -> Side {
            std::array::from_fn(|level| {
                let n_bits = [2, 4, 8][level];
                let bytes = bytes.get(level).map_or(0.0, |b| b[side]);
                (COST[side] * 4f64.powi(-n_bits), bytes)
            })
        };
        let rows = live.positions.iter().zip(live.scores);
        let is_compared = is_comparable(live);
        Head {
            rows: rows
                .map(|(&p, &score)| Row {
                    weight: self.weight(score),
                    is_protected: self.rule.protect.holds(p, live.n_seen),
                })
                .collect(),
            sides: [side(0), side(1)],
            is_compared,
        }
    }
}

/// A row as it is weighed.
struct Row {
    weight: f64,
    is_protected: bool,
}

/// A head's rows, and what K and V can have.
struct Head {
    rows: Vec<Row>,
    sides: [Side; 2],
    /// Whether its rows have scores to compare.
    is_compared: bool,
}

impl Head {
    /// Rows that leave at a price, and the levels of all rows.
    fn at_price(&self, price: f64) -> (Vec<usize>, Vec<[u8; 2]>) {
        if !self.is_compared {
            return (Vec::new(), vec![[SAFE; 2]; self.rows.len()]);
        }
        let (mut gone, mut levels) = (Vec::new(), Vec::with_capacity(self.rows.len()));
        for (i, row) in self.rows.iter().enumerate() {
            let sides = self.sides.each_ref();
            let [k, v] = sides.map(|side| cheapest(side, row.weight, price));
            let least = if row.is_protected { SAFE } else { 0 };
            levels.push([k.1, v.1].map(|level| level.max(least)));
            if !row.is_protected && row.weight <= k.0 + v.0 {
                gone.push(i);
            }
        }
        if gone.len() == self.rows.len() {
            self.spare(&mut gone);
        }
        (gone, levels)
    }

    /// Keeps the best row of a head that would have none, the newest of equals.
    fn spare(&self, gone: &mut Vec<usize>) {
        let by_weight = |a: &usize, b: &usize| {
            let weight = |i: usize| self.rows[i].weight;
            weight(*a).total_cmp(&weight(*b))
        };
        if let Some(best) = gone.iter().copied().max_by(by_weight) {
            gone.remove(best);
        }
    }
}

/// The least cost of a side, its bytes paid for, and at which level.
fn cheapest(side: &Side, weight: f64, price: f64) -> (f64, u8) {
    let mut best = (f64::INFINITY, 0);
    for (level, &(cost, bytes)) in (0..).zip(side) {
        let cost = weight.mul_add(cost, price * bytes);
        if cost < best.0 {
            best = (cost, level);
        }
    }
    best
}

impl Retention for Joint {
    fn needs(&self) -> Needs {
        self.score.needs()
    }

    fn score(&self, row: NewRow<'_>) -> f32 {
        self.score.arrival(row)
    }

    fn score_context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        self.score.context(context)
    }

    /// While decoding, nothing leaves.
    fn evict(&self, _: LiveRows<'_>) -> Vec<usize> {
        Vec::new()
    }

    fn choose(&self, heads: &[Vec<LiveRows<'_>>], costs: &dyn Costs) -> Result<Choice, Shortage> {
        let n_seen = heads.iter().flatten().map(|h| h.n_seen).max();
        let budget_bytes = self.budget_bytes(n_seen.unwrap_or(0)).unwrap_or(u64::MAX);
        let weighed: Vec<Vec<Head>> = heads
            .iter()
            .enumerate()
            .map(|(l, heads)| {
                let of_head = |(h, &live)| self.weighed(live, &costs.row_bytes(l, h));
                heads.iter().enumerate().map(of_head).collect()
            })
            .collect();
        let at = |ln_price: f64| {
            let mut choice = Choice::default();
            for heads in &weighed {
                let (gone, levels) = heads.iter().map(|h| h.at_price(ln_price.exp())).unzip();
                choice.gone.push(gone);
                choice.levels.push(levels);
            }
            (costs.bytes(heads, &choice), choice)
        };
        let (mut low, mut high) = LN_PRICE;
        let (bytes, choice) = at(low);
        if bytes <= budget_bytes {
            return Ok(choice);
        }
        let (needed_bytes, mut best) = at(high);
        if needed_bytes > budget_bytes {
            return Err(Shortage {
                needed_bytes,
                budget_bytes,
            });
        }
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            let (bytes, choice) = at(middle);
            if bytes <= budget_bytes {
                (high, best) = (middle, choice);
            } else {
                low = middle;
            }
        }
        Ok(best)
    }

    fn chooses_levels(&self) -> bool {
        true
    }

    fn acts_once(&self) -> bool {
        true
    }

    fn budget_bytes(&self, n_tokens: u32) -> Option<u64> {
        self.rule.budget.bytes(n_tokens)
    }

    fn needs_point(&self) -> Option<&'static str> {
        Some("its budget is in bytes, which all rows of a context share")
    }

    fn compares_windows(&self) -> bool {
        self.score.compares_windows()
    }

    fn weight_bytes(&self) -> u64 {
        self.score.weight_bytes()
    }

    fn hidden_width(&self) -> Option<usize> {
        self.score.hidden_width()
    }

    fn made_for(&self) -> Option<&str> {
        self.score.made_for()
    }
}
