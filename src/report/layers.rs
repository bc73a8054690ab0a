//! Where a compressed context goes wrong: stored rows, attention maps and outputs by layer and head.
//!
//! Invariants: a head's error is a ratio of sums over the compared documents and queries; a layer's is the mean of its heads'; every
//! layer and head is in the CSV at full precision.

use crate::eval::layers::{HeadRecord, KvHeadRecord, LayerRecord};
use crate::eval::records::ItemRecord;

use super::columns::Text;
use super::csv::{Lines, names, rows, values};
use super::fields::{PLACE, number};
use super::format::significant;
use super::markdown::{document, plain, table};
use super::rows::Report;

/// Heads that are named.
const WORST: usize = 5;

/// Layers of a row, summed over the items that were compared.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Layers {
    /// Items.
    pub n_items: usize,
    /// By layer; empty unless the experiment asks for them.
    pub layers: Vec<LayerRecord>,
}

impl Layers {
    /// Of some items.
    pub fn new(items: &[&ItemRecord]) -> Self {
        let mut sum = Self::default();
        for item in items.iter().filter(|r| !r.layers.is_empty()) {
            sum.n_items += 1;
            sum.layers.resize(item.layers.len(), LayerRecord::default());
            for (a, b) in sum.layers.iter_mut().zip(&item.layers) {
                a.add(b);
            }
        }
        sum
    }

    /// Every head, in order.
    fn heads(&self) -> impl Iterator<Item = Head<'_>> {
        self.layers.iter().enumerate().flat_map(|(layer, record)| {
            let group = record.heads.len() / record.kv_heads.len().max(1);
            record
                .heads
                .iter()
                .enumerate()
                .map(move |(head, sums)| Head {
                    layer,
                    head,
                    kv_head: head / group,
                    n_queries: record.n_queries,
                    rows: &record.kv_heads[head / group],
                    sums,
                })
        })
    }
}

/// One query head with the rows that it reads.
#[derive(Clone, Copy)]
struct Head<'a> {
    layer: usize,
    head: usize,
    kv_head: usize,
    n_queries: usize,
    rows: &'a KvHeadRecord,
    sums: &'a HeadRecord,
}

/// A number of a head.
type Measure = fn(&Head<'_>) -> f64;

fn relative(error_sq: f64, norm_sq: f64) -> f64 {
    (error_sq / norm_sq).sqrt()
}

impl Head<'_> {
    fn k(&self) -> f64 {
        relative(self.rows.k_error_sq, self.rows.k_norm_sq)
    }

    fn v(&self) -> f64 {
        relative(self.rows.v_error_sq, self.rows.v_norm_sq)
    }

    fn output(&self) -> f64 {
        relative(self.sums.error_sq, self.sums.norm_sq)
    }

    fn by_k(&self) -> f64 {
        relative(self.sums.error_sq_by_k, self.sums.norm_sq)
    }

    fn by_v(&self) -> f64 {
        relative(self.sums.error_sq_by_v, self.sums.norm_sq)
    }

    fn map_kl(&self) -> f64 {
        self.sums.map_kl / self.n_queries as f64
    }

    fn evicted_mass(&self) -> f64 {
        self.sums.evicted_mass / self.n_queries as f64
    }
}

/// Columns of the table: name, value, what it is multiplied by.
const COLUMNS: &[(&str, Measure, f64)] = &[
    ("K %", |h| h.k(), 100.0),
    ("V %", |h| h.v(), 100.0),
    ("output %", |h| h.output(), 100.0),
    ("by K %", |h| h.by_k(), 100.0),
    ("by V %", |h| h.by_v(), 100.0),
    ("map KL", |h| h.map_kl(), 1.0),
    ("evicted mass %", |h| h.evicted_mass(), 100.0),
];

/// A field of the CSV: its name and its text.
type Field = (&'static str, fn(&Head<'_>) -> String);

static FIELDS: &[Field] = &[
    ("layer", |h| h.layer.to_string()),
    ("head", |h| h.head.to_string()),
    ("kv_head", |h| h.kv_head.to_string()),
    ("n_queries", |h| h.n_queries.to_string()),
    ("n_rows", |h| h.rows.n_rows.to_string()),
    ("k_relative_error", |h| number(h.k())),
    ("v_relative_error", |h| number(h.v())),
    ("output_relative_error", |h| number(h.output())),
    ("output_relative_error_by_k", |h| number(h.by_k())),
    ("output_relative_error_by_v", |h| number(h.by_v())),
    ("map_kl", |h| number(h.map_kl())),
    ("evicted_mass", |h| number(h.evicted_mass())),
];

const INTRO: &str = "The compressed context beside the exact one, on the first item of each text, before anything is added to \
    it. K, V: norm of the error of the stored rows that live over the norm of the exact ones, keys in the form in which they are \
    stored (a rotation by position changes no norm). output: the same of a head's attention output, over \
    the reference's queries at the first 16 tokens of the continuation, which attend to the context alone, each as far as its \
    layer's window; the exact output is that over all rows. by K, by V: stored keys with exact values, and the reverse. map \
    KL: KL(full ‖ strategy) of the attention map over the rows that live, both sides renormalised to them, nats per query; \
    evicted mass: what the full map gives to rows that are gone. A layer's number is the mean of its heads'. layers.csv has \
    every head.";

/// A table for each strategy; empty where nobody asked for them.
pub fn markdown(report: &Report) -> String {
    if all(report).next().is_none() {
        return String::new();
    }
    document(
        report,
        "errors by layer",
        &[INTRO.to_owned()],
        |group, out| {
            for row in &group.rows {
                let Some(scores) = row.scores().filter(|s| !s.layers.layers.is_empty()) else {
                    continue;
                };
                let layers = &scores.layers;
                let n = layers.n_items;
                let documents = if n == 1 { "document" } else { "documents" };
                out.push_str(&format!("### {} ({n} {documents})\n\n", row.label));
                out.push_str(&table(&text(layers)));
                out.push_str(&format!("\n{}\n\n", worst(layers)));
            }
        },
    )
}

fn text(layers: &Layers) -> Text {
    let heads: Vec<&str> = std::iter::once("layer")
        .chain(COLUMNS.iter().map(|(name, ..)| *name))
        .collect();
    let line = |name: String, of: &dyn Fn(&Head<'_>) -> bool| {
        let here: Vec<Head<'_>> = layers.heads().filter(of).collect();
        let mean = |measure: &Measure| here.iter().map(measure).sum::<f64>() / here.len() as f64;
        let cells = COLUMNS
            .iter()
            .map(|(_, measure, unit)| significant(unit * mean(measure), 3));
        std::iter::once(name).chain(cells).collect()
    };
    let rows = (0..layers.layers.len())
        .map(|layer| line(layer.to_string(), &|h| h.layer == layer))
        .chain([line("all".to_owned(), &|_| true)]);
    plain(&heads, rows)
}

/// The heads whose outputs are furthest off.
fn worst(layers: &Layers) -> String {
    let mut heads: Vec<Head<'_>> = layers.heads().collect();
    heads.sort_by(|a, b| b.output().total_cmp(&a.output()));
    let named = heads.iter().take(WORST).map(|h| {
        let [output, by_k, by_v] =
            [h.output(), h.by_k(), h.by_v()].map(|x| significant(100.0 * x, 3));
        format!(
            "layer {} head {} (KV head {}) {output} % (by K {by_k}, by V {by_v})",
            h.layer, h.head, h.kv_head
        )
    });
    format!("Furthest off: {}.", named.collect::<Vec<_>>().join("; "))
}

/// A line for each layer and head; empty where nobody asked for them.
pub fn csv(report: &Report) -> String {
    if all(report).next().is_none() {
        return String::new();
    }
    let mut out = Lines::new(names(PLACE).chain(names(FIELDS)));
    for at in rows(report) {
        for head in at.row.scores().iter().flat_map(|s| s.layers.heads()) {
            let place = values(PLACE, |text| text(&at));
            out.push(place.chain(values(FIELDS, |text| text(&head))));
        }
    }
    out.0
}

/// What was compared in all rows.
fn all(report: &Report) -> impl Iterator<Item = &LayerRecord> {
    let rows = report.groups.iter().flat_map(|g| &g.rows);
    rows.filter_map(|row| row.scores())
        .flat_map(|s| &s.layers.layers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::fixture::all_items;

    fn rows(k_error_sq: f64) -> KvHeadRecord {
        KvHeadRecord {
            n_rows: 8,
            k_error_sq,
            k_norm_sq: 4.0,
            v_error_sq: 0.0,
            v_norm_sq: 1.0,
        }
    }

    fn head(error_sq: f64) -> HeadRecord {
        HeadRecord {
            map_kl: 0.5,
            evicted_mass: 1.0,
            error_sq,
            error_sq_by_k: error_sq,
            error_sq_by_v: 0.0,
            norm_sq: 1.0,
        }
    }

    fn items() -> Vec<ItemRecord> {
        let mut items = all_items()[0].clone();
        for (i, item) in items.iter_mut().take(2).enumerate() {
            let error = [0.01, 0.07][i];
            item.layers = vec![LayerRecord {
                n_queries: 4,
                kv_heads: vec![rows(0.16), rows(0.0)],
                heads: vec![head(error), head(0.0), head(0.0), head(0.0)],
            }];
        }
        items
    }

    #[test]
    fn ratios_are_of_sums_over_items_and_layers_are_means_over_heads() {
        let items = items();
        let layers = Layers::new(&items.iter().collect::<Vec<_>>());
        assert_eq!((layers.n_items, layers.layers.len()), (2, 1));
        let heads: Vec<Head<'_>> = layers.heads().collect();
        let kv: Vec<usize> = heads.iter().map(|h| h.kv_head).collect();
        assert_eq!(kv, [0, 0, 1, 1]);
        // √(2·0.16 / 2·4); √((0.01 + 0.07) / 2).
        assert!((heads[0].k() - 0.2).abs() < 1e-15 && (heads[0].output() - 0.2).abs() < 1e-15);
        assert_eq!(
            (heads[3].k(), heads[3].output(), heads[3].n_queries),
            (0.0, 0.0, 8)
        );
        assert_eq!((heads[0].map_kl(), heads[0].evicted_mass()), (0.125, 0.25));
        let shown = table(&text(&layers));
        assert!(
            shown.contains("| 0     | 10.0 | 0   | 5.00     | 5.00   | 0      | 0.125  | 25.0 "),
            "{shown}"
        );
        let named = worst(&layers);
        let first = "layer 0 head 0 (KV head 0) 20.0 % (by K 20.0, by V 0); layer 0 head 1 (";
        assert!(named.contains(first), "{named}");
        assert!(Layers::new(&[&items[2]]).layers.is_empty());
    }
}
