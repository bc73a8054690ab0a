//! From a bundle to rows: groups of items, one row per strategy in each, pairs of rows.
//!
//! Invariants: ratios are formed here and nowhere else, from sums; items enter in order of data and index, so nothing
//! depends on the journal's order; all numbers of a row belong to the same cells; a cell that failed has no numbers.

use std::collections::{BTreeMap, BTreeSet};

use crate::bundle::Contents;
use crate::bundle::environment::named;
use crate::bundle::header::{CellHeader, DataHeader, ProtocolHeader, ProtocolKind, RunHeader};
use crate::cache::strategy::Strategy;
use crate::eval::records::{CellStatus, ItemRecord, TrafficRecord};
use crate::eval::stats::{Comparison, Judged};

use super::accuracy::Accuracy;
use super::bars::{self, BarRow};
use super::depths::{self, DepthRow};
use super::drift::Drift;
use super::layers::Layers;
use super::measures::{Latency, Memory, Quality};
use super::pairs::{self, PairRow};
use super::positions::Positions;
use super::texts::Texts;
use super::traffic;

/// Everything that tables are made of.
#[derive(Debug, Clone)]
pub struct Report {
    /// What the run stated of itself.
    pub header: RunHeader,
    /// The bundle's folder name under its experiment.
    pub run_id: String,
    /// The command line, the program without its path.
    pub command: String,
    /// Whether all items are there.
    pub is_finished: bool,
    /// Cells that failed.
    pub n_failed: usize,
    /// One per protocol and text, one over all texts of a domain that has several, and one over all data.
    pub groups: Vec<Group>,
    /// What the experiment must show, held against the groups.
    pub bars: Vec<BarRow>,
    /// Right answers by depth and length, where items have a depth.
    pub depths: Vec<DepthRow>,
}

/// Items that are reported together.
#[derive(Debug, Clone)]
pub struct Group {
    /// Name of the data, and of the domain where the data has several; `all code`, `all data` for the pooled groups.
    pub title: String,
    /// The domain, where all items have the same.
    pub domain: Option<String>,
    /// The protocol.
    pub protocol: ProtocolHeader,
    /// The data it covers.
    pub data: Vec<DataHeader>,
    /// Tokens that no item covers, over `data`.
    pub n_tokens_dropped: usize,
    /// Distinct documents.
    pub n_docs: usize,
    /// The baselines, from the row with most items.
    pub baseline: Option<Baseline>,
    /// One per strategy, in the plan's order.
    pub rows: Vec<Row>,
    /// All pairs of scored rows, in order.
    pub pairs: Vec<PairRow>,
}

/// What every row of a group is held against.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Baseline {
    /// Items.
    pub n_items: usize,
    /// Tokens scored.
    pub n_scored: usize,
    /// Perplexity of the reference (a cache of f32 rows).
    pub reference_ppl: f64,
    /// Bits per byte of text of the reference.
    pub reference_bits_per_byte: f64,
    /// Perplexity with the context dropped but for its sinks.
    pub floor_ppl: Option<f64>,
}

/// One strategy in one group.
#[derive(Debug, Clone)]
pub struct Row {
    /// Name; with the seed where the plan has several.
    pub label: String,
    /// Ids of its cells: where the raw records are.
    pub cells: Vec<String>,
    /// The strategy.
    pub strategy: Strategy,
    /// The numbers, or why there are none.
    pub outcome: Outcome,
}

/// What came of a row.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// Numbers.
    Scored(Box<Scores>),
    /// A cell of the row failed.
    Failed(String),
    /// A cell of the row was not run.
    Skipped(String),
    /// No record yet.
    Pending,
}

/// The numbers of a row.
#[derive(Debug, Clone)]
pub struct Scores {
    /// Items scored.
    pub n_items: usize,
    /// Items that could not be scored.
    pub n_skipped: usize,
    /// Tokens scored.
    pub n_scored: usize,
    /// Likelihood and distribution.
    pub quality: Quality,
    /// Answers, where questions were asked.
    pub accuracy: Option<Accuracy>,
    /// Texts, where they were generated.
    pub texts: Option<Texts>,
    /// Quantiles over tokens.
    pub drift: Drift,
    /// Bytes.
    pub memory: Option<Memory>,
    /// Bytes along what is scored, one entry per length, ascending; empty unless the experiment asks for it.
    pub memory_track: Vec<Memory>,
    /// Errors by position; `None` unless items score long spans.
    pub positions: Option<Positions>,
    /// The compressed context beside the exact one, where the experiment asks for it.
    pub layers: Layers,
    /// Times, one entry per depth, ascending.
    pub latency: Vec<Latency>,
    /// What decoded tokens read and what was moved for them, where they don't read all that is stored.
    pub traffic: Option<TrafficRecord>,
}

impl Group {
    /// Whether its items are questions or texts to go on, so that no perplexity is told.
    pub fn is_asked(&self) -> bool {
        matches!(
            self.protocol.kind,
            ProtocolKind::Tasks { .. } | ProtocolKind::Generate { .. }
        )
    }
}

impl Scores {
    /// Against the reference: in right answers, where questions were asked, else in likelihood.
    pub fn comparison(&self) -> &Comparison {
        let answers = self.accuracy.as_ref().map(|a| &a.paired.comparison);
        answers.unwrap_or(&self.quality.paired.comparison)
    }

    /// The words: of the answers, where questions were asked, else of the likelihood.
    pub fn judged(&self) -> &Judged {
        let answers = self.accuracy.as_ref().map(|a| &a.paired.judged);
        answers.unwrap_or(&self.quality.paired.judged)
    }
}

impl Row {
    /// The numbers, if there are any.
    pub fn scores(&self) -> Option<&Scores> {
        match &self.outcome {
            Outcome::Scored(scores) => Some(scores),
            Outcome::Failed(_) | Outcome::Skipped(_) | Outcome::Pending => None,
        }
    }

    /// Why there are no numbers; empty if there are.
    pub fn reason(&self) -> String {
        match &self.outcome {
            Outcome::Scored(_) => String::new(),
            Outcome::Failed(message) => format!("failed: {message}"),
            Outcome::Skipped(reason) => format!("skipped: {reason}"),
            Outcome::Pending => "not run yet".to_owned(),
        }
    }
}

/// A record and the place of its data in the header.
pub(super) type Located<'a> = (usize, &'a ItemRecord);

impl Report {
    /// Computes all groups of a bundle.
    pub fn new(contents: &Contents) -> Self {
        let source = Source::new(contents);
        let header = &contents.header;
        let groups: Vec<Group> = header
            .protocols
            .iter()
            .flat_map(|protocol| source.groups(protocol))
            .collect();
        let bars = bars::rows(&groups, &contents.bars);
        Self {
            header: header.clone(),
            run_id: contents
                .path
                .file_name()
                .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            // Older bundles have the program's path.
            command: named(contents.environment.command.iter().cloned()).join(" "),
            is_finished: contents.is_finished,
            n_failed: contents
                .cells
                .iter()
                .filter(|c| matches!(c.status, CellStatus::Failed { .. }))
                .count(),
            groups,
            bars,
            depths: depths::rows(contents),
        }
    }

    /// Whether a bar is missed.
    pub fn misses_a_bar(&self) -> bool {
        self.bars.iter().any(BarRow::is_missed)
    }
}

/// The bundle, indexed.
struct Source<'a> {
    contents: &'a Contents,
    by_cell: BTreeMap<&'a str, Vec<Located<'a>>>,
    has_several_seeds: bool,
}

/// Which items of a protocol form a group.
struct Selection<'a> {
    title: String,
    data: Vec<&'a DataHeader>,
    domain: Option<&'a str>,
}

impl<'a> Source<'a> {
    fn new(contents: &'a Contents) -> Self {
        let header = &contents.header;
        let place: BTreeMap<&str, usize> = header
            .cells
            .iter()
            .filter_map(|cell| {
                let place = header.data.iter().position(|d| d.name == cell.data)?;
                Some((cell.id.as_str(), place))
            })
            .collect();
        let mut by_cell: BTreeMap<&str, Vec<Located<'_>>> = BTreeMap::new();
        for item in &contents.items {
            if let Some(&data) = place.get(item.cell.as_str()) {
                by_cell.entry(&item.cell).or_default().push((data, item));
            }
        }
        let seeds: BTreeSet<u64> = header.cells.iter().map(|cell| cell.seed).collect();
        Self {
            contents,
            by_cell,
            has_several_seeds: seeds.len() > 1,
        }
    }

    fn items(&self, cell: &CellHeader) -> &[Located<'a>] {
        self.by_cell
            .get(cell.id.as_str())
            .map_or(&[], Vec::as_slice)
    }

    fn groups(&self, protocol: &ProtocolHeader) -> Vec<Group> {
        let mut selections = Vec::new();
        let mut covered = Vec::new();
        let mut by_domain: Vec<(&str, Vec<&DataHeader>)> = Vec::new();
        for data in &self.contents.header.data {
            let cells = self.cells(protocol, &[data]);
            if cells.is_empty() {
                continue;
            }
            covered.push(data);
            let mut domains: Vec<&str> = Vec::new();
            for (_, item) in cells.iter().flat_map(|cell| self.items(cell)) {
                if !domains.contains(&item.domain.as_str()) {
                    domains.push(&item.domain);
                }
            }
            for domain in &domains {
                match by_domain.iter_mut().find(|(known, _)| known == domain) {
                    Some((_, texts)) => texts.push(data),
                    None => by_domain.push((domain, vec![data])),
                }
            }
            match domains.as_slice() {
                [] | [_] => selections.push(Selection {
                    title: data.name.clone(),
                    data: vec![data],
                    domain: None,
                }),
                several => selections.extend(several.iter().map(|domain| Selection {
                    title: format!("{}, {domain}", data.name),
                    data: vec![data],
                    domain: Some(domain),
                })),
            }
        }
        if by_domain.len() > 1 {
            let several = by_domain.into_iter().filter(|(_, texts)| texts.len() > 1);
            selections.extend(several.map(|(domain, data)| Selection {
                title: format!("all {domain}"),
                data,
                domain: Some(domain),
            }));
        }
        if selections.len() > 1 {
            selections.push(Selection {
                title: "all data".to_owned(),
                data: covered,
                domain: None,
            });
        }
        selections
            .iter()
            .map(|selection| self.group(protocol, selection))
            .collect()
    }

    fn cells(&self, protocol: &ProtocolHeader, data: &[&DataHeader]) -> Vec<&'a CellHeader> {
        let header = &self.contents.header;
        let is_here = |cell: &&CellHeader| {
            cell.protocol == protocol.name && data.iter().any(|d| d.name == cell.data)
        };
        header.cells.iter().filter(is_here).collect()
    }

    fn group(&self, protocol: &ProtocolHeader, selection: &Selection<'_>) -> Group {
        let mut keyed: Vec<((&str, u64), Vec<&CellHeader>)> = Vec::new();
        for cell in self.cells(protocol, &selection.data) {
            let key = (cell.label.as_str(), cell.seed);
            match keyed.iter_mut().find(|(known, _)| *known == key) {
                Some((_, cells)) => cells.push(cell),
                None => keyed.push((key, vec![cell])),
            }
        }
        let mut with_items: Vec<(Row, Vec<Located<'_>>)> = keyed
            .iter()
            .map(|(_, cells)| self.row(cells, (&protocol.kind, selection.domain)))
            .collect();
        pairs::judge(&mut with_items);
        let most = with_items
            .iter()
            .map(|(_, items)| items)
            .rev()
            .max_by_key(|i| i.len());
        let docs: BTreeSet<(usize, &str)> = most
            .into_iter()
            .flatten()
            .map(|(data, item)| (*data, item.doc.as_str()))
            .collect();
        let domains: BTreeSet<&str> = most
            .into_iter()
            .flatten()
            .map(|(_, item)| item.domain.as_str())
            .collect();
        let domain = domains.first().filter(|_| domains.len() == 1);
        Group {
            title: selection.title.clone(),
            domain: domain.map(|d| (*d).to_owned()),
            protocol: protocol.clone(),
            data: selection.data.iter().map(|d| (*d).clone()).collect(),
            n_tokens_dropped: selection
                .data
                .iter()
                .flat_map(|d| &d.cuts)
                .filter(|cut| cut.protocol == protocol.name)
                .map(|cut| cut.n_tokens_dropped)
                .sum(),
            n_docs: docs.len(),
            baseline: most.and_then(|items| Baseline::new(items)),
            pairs: pairs::pairs(&with_items),
            rows: with_items.into_iter().map(|(row, _)| row).collect(),
        }
    }

    fn row(
        &self,
        cells: &[&CellHeader],
        (kind, domain): (&ProtocolKind, Option<&str>),
    ) -> (Row, Vec<Located<'a>>) {
        let first = cells[0];
        let mut items: Vec<Located<'a>> = cells
            .iter()
            .flat_map(|cell| self.items(cell))
            .filter(|(_, item)| domain.is_none_or(|d| item.domain == d))
            .copied()
            .collect();
        items.sort_by_key(|(data, item)| (*data, item.item));
        let outcome = self.outcome(cells, &items, kind);
        if !matches!(outcome, Outcome::Scored(_)) {
            items.clear();
        }
        let label = if self.has_several_seeds {
            format!("{} (seed {})", first.label, first.seed)
        } else {
            first.label.clone()
        };
        let row = Row {
            label,
            cells: cells.iter().map(|cell| cell.id.clone()).collect(),
            strategy: first.strategy.clone(),
            outcome,
        };
        (row, items)
    }

    fn outcome(
        &self,
        cells: &[&CellHeader],
        items: &[Located<'_>],
        kind: &ProtocolKind,
    ) -> Outcome {
        let ends = || {
            self.contents
                .cells
                .iter()
                .filter(|end| cells.iter().any(|cell| cell.id == end.id))
        };
        for end in ends() {
            match &end.status {
                CellStatus::Failed { message } => return Outcome::Failed(message.clone()),
                CellStatus::Skipped { reason } => return Outcome::Skipped(reason.clone()),
                CellStatus::Done => {}
            }
        }
        let records: Vec<&ItemRecord> = items.iter().map(|(_, item)| *item).collect();
        let Some((quality, drift)) = Quality::new(&records).zip(Drift::new(&records)) else {
            return Outcome::Pending;
        };
        Outcome::Scored(Box::new(Scores {
            n_items: records.len(),
            n_skipped: ends().map(|end| end.n_skipped).sum(),
            n_scored: records.iter().map(|r| r.n_scored).sum(),
            quality,
            accuracy: Accuracy::new(&records),
            texts: Texts::new(&records),
            drift,
            memory: Memory::new(&records, &self.contents.header.geometry),
            memory_track: Memory::track(&records, &self.contents.header.geometry),
            positions: Positions::new(&records, kind),
            layers: Layers::new(&records),
            latency: Latency::by_depth(&records),
            traffic: traffic::sum(&records),
        }))
    }
}

impl Baseline {
    fn new(items: &[Located<'_>]) -> Option<Self> {
        let n_scored: usize = items.iter().map(|(_, r)| r.n_scored).sum();
        let n_bytes: usize = items.iter().map(|(_, r)| r.bytes_text).sum();
        let nll: f64 = items.iter().map(|(_, r)| r.nll_reference).sum();
        let floor: Option<f64> = items.iter().map(|(_, r)| r.nll_floor).sum();
        (n_scored > 0).then(|| Self {
            n_items: items.len(),
            n_scored,
            reference_ppl: (nll / n_scored as f64).exp(),
            reference_bits_per_byte: nll / std::f64::consts::LN_2 / n_bytes as f64,
            floor_ppl: floor.map(|nll| (nll / n_scored as f64).exp()),
        })
    }
}
