//! Tables as CSV (RFC 4180, `\n` ends), for programs: every field of every row at full precision.
//!
//! Invariants: one fixed set of fields per file; an absent number is an empty field, never 0 or NaN; each row names the
//! cells whose raw records it is made of.

use super::bars::BarRow;
use super::fields::{
    At, BAR, BUCKET, DRIFT, LATENCY, MEMORY, PAIR, PLACE, SCORES, SLOPE, STRATEGY, TESTS, number,
};
use super::rows::{Report, Scores};

/// Main table: every group and row, scored or not.
pub fn results(report: &Report) -> String {
    let heads = names(PLACE).chain(names(STRATEGY)).chain(names(SCORES));
    let mut out = Lines::new(heads.chain(names(TESTS)));
    for at in rows(report) {
        let place = values(PLACE, |text| text(&at));
        let strategy = values(STRATEGY, |text| text(&at));
        let scores = at.row.scores();
        let tests = values(TESTS, |text| {
            scores.map_or_else(String::new, |s| text(&(*s.comparison(), *s.judged())))
        });
        let scores = values(SCORES, |text| scores.map_or_else(String::new, text));
        out.push(place.chain(strategy).chain(scores).chain(tests));
    }
    out.0
}

/// The main table as a JSON array of objects with the same fields; an absent value is null.
pub fn results_json(report: &Report) -> String {
    let rows: Vec<serde_json::Value> = rows(report)
        .map(|at| {
            let texts = PLACE.iter().map(|(name, text)| (*name, text(&at).into()));
            let scores = at.row.scores();
            let measured = STRATEGY
                .iter()
                .map(|(name, text)| (*name, text(&at)))
                .chain(
                    SCORES
                        .iter()
                        .map(|(name, text)| (*name, scores.map_or_else(String::new, text))),
                )
                .chain(TESTS.iter().map(|(name, text)| {
                    let of = |s: &Scores| text(&(*s.comparison(), *s.judged()));
                    (*name, scores.map_or_else(String::new, of))
                }));
            let values = measured.map(|(name, text)| (name, json_value(text)));
            let bars = bars_of(&at).map(|bars| ("bars", bars));
            let rebuilt = scores.and_then(|s| s.memory?.rebuilt());
            let rebuilt = rebuilt
                .map(|(n, error)| [("pages_rebuilt", n.into()), ("rebuild_error", error.into())]);
            texts
                .chain(values)
                .chain(bars)
                .chain(rebuilt.into_iter().flatten())
                .map(|(name, value)| (name.to_owned(), value))
                .collect()
        })
        .collect();
    serde_json::Value::from(rows).to_string()
}

/// The bars that are about a row, as objects; nothing for a report without bars.
fn bars_of(at: &At<'_>) -> Option<serde_json::Value> {
    let is_here = |bar: &&BarRow| {
        let place = (&at.group.protocol.name, &at.group.title, &at.row.label);
        (&bar.protocol, &bar.data, &bar.strategy) == place
    };
    let object = |bar: &BarRow| -> serde_json::Value {
        // The row names place and strategy already.
        let fields = BAR.iter().skip(3);
        fields
            .map(|(name, text)| ((*name).to_owned(), json_value(text(bar))))
            .collect()
    };
    let bars = &at.report.bars;
    (!bars.is_empty()).then(|| bars.iter().filter(is_here).map(object).collect())
}

fn json_value(text: String) -> serde_json::Value {
    match text.parse::<f64>() {
        _ if text.is_empty() => serde_json::Value::Null,
        Ok(number) if number.is_finite() => number.into(),
        _ if text == "true" || text == "false" => (text == "true").into(),
        _ => text.into(),
    }
}

/// Drift: quantiles over tokens and errors over items, a line per row.
pub fn drift(report: &Report) -> String {
    let mut out = Lines::new(names(PLACE).chain(names(DRIFT)));
    for at in rows(report) {
        if let Some(scores) = at.row.scores() {
            let place = values(PLACE, |text| text(&at));
            out.push(place.chain(values(DRIFT, |text| text(scores))));
        }
    }
    out.0
}

/// Bytes by part, summed over the items of each row.
pub fn memory(report: &Report) -> String {
    let mut out = Lines::new(names(PLACE).chain(names(MEMORY)));
    for at in rows(report) {
        if let Some(memory) = at.row.scores().and_then(|s| s.memory.as_ref()) {
            let place = values(PLACE, |text| text(&at));
            out.push(place.chain(values(MEMORY, |text| text(memory))));
        }
    }
    out.0
}

/// Bytes along what is scored, a line per row and length.
pub fn memory_track(report: &Report) -> String {
    let at_tokens = std::iter::once("at_tokens".to_owned());
    let mut out = Lines::new(names(PLACE).chain(at_tokens).chain(names(MEMORY)));
    let mut is_empty = true;
    for at in rows(report) {
        for memory in at.row.scores().map_or(&[][..], |s| &s.memory_track) {
            let place = values(PLACE, |text| text(&at));
            let at_tokens = std::iter::once(number(memory.mean_tokens()));
            out.push(
                place
                    .chain(at_tokens)
                    .chain(values(MEMORY, |text| text(memory))),
            );
            is_empty = false;
        }
    }
    if is_empty { String::new() } else { out.0 }
}

/// What the experiment must show, a line per bar and place; empty where it states nothing.
pub fn bars(report: &Report) -> String {
    if report.bars.is_empty() {
        return String::new();
    }
    let mut out = Lines::new(names(BAR));
    for bar in &report.bars {
        out.push(values(BAR, |text| text(bar)));
    }
    out.0
}

/// Errors by position, a line per row and bucket; empty where no span is long enough.
pub fn positions(report: &Report) -> String {
    let mut out = Lines::new(names(PLACE).chain(names(BUCKET)).chain(names(SLOPE)));
    let mut is_empty = true;
    for at in rows(report) {
        let Some(positions) = at.row.scores().and_then(|s| s.positions.as_ref()) else {
            continue;
        };
        for bucket in &positions.buckets {
            let place = values(PLACE, |text| text(&at));
            let errors = values(BUCKET, |text| text(bucket));
            out.push(
                place
                    .chain(errors)
                    .chain(values(SLOPE, |text| text(positions))),
            );
            is_empty = false;
        }
    }
    if is_empty { String::new() } else { out.0 }
}

/// Times, a line per row and depth.
pub fn latency(report: &Report) -> String {
    let mut out = Lines::new(names(PLACE).chain(names(LATENCY)));
    for at in rows(report) {
        for latency in at.row.scores().map_or(&[][..], |s| &s.latency) {
            let place = values(PLACE, |text| text(&at));
            out.push(place.chain(values(LATENCY, |text| text(latency))));
        }
    }
    out.0
}

/// All pairs of strategies.
pub fn pairs(report: &Report) -> String {
    let heads = ["protocol", "data", "a", "b"].map(str::to_owned);
    let tests = names(PAIR).chain(names(TESTS));
    let mut out = Lines::new(heads.into_iter().chain(tests));
    for group in &report.groups {
        for pair in &group.pairs {
            let place = [&group.protocol.name, &group.title, &pair.a, &pair.b].map(Clone::clone);
            out.push(
                place
                    .into_iter()
                    .chain(values(PAIR, |text| text(pair)))
                    .chain(values(TESTS, |text| {
                        text(&(*pair.comparison(), *pair.judged()))
                    })),
            );
        }
    }
    out.0
}

pub(super) fn rows(report: &Report) -> impl Iterator<Item = At<'_>> {
    report
        .groups
        .iter()
        .flat_map(move |group| group.rows.iter().map(move |row| At { report, group, row }))
}

pub(super) fn names<F>(fields: &[(&'static str, F)]) -> impl Iterator<Item = String> {
    fields.iter().map(|(name, _)| (*name).to_owned())
}

pub(super) fn values<F>(
    fields: &[(&'static str, F)],
    apply: impl Fn(&F) -> String,
) -> impl Iterator<Item = String> {
    fields.iter().map(move |(_, text)| apply(text))
}

/// Lines of comma-separated, quoted fields.
pub(super) struct Lines(pub(super) String);

impl Lines {
    pub(super) fn new(heads: impl Iterator<Item = String>) -> Self {
        let mut lines = Self(String::new());
        lines.push(heads);
        lines
    }

    pub(super) fn push(&mut self, fields: impl Iterator<Item = String>) {
        let quoted: Vec<String> = fields.map(|field| quote(&field)).collect();
        self.0.push_str(&quoted.join(","));
        self.0.push('\n');
    }
}

fn quote(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_quoted_where_they_must_be() {
        assert_eq!(quote("plain text"), "plain text");
        assert_eq!(quote("a,b"), "\"a,b\"");
        assert_eq!(quote("say \"x\"\n"), "\"say \"\"x\"\"\n\"");
    }
}
