//! What `kvlab kld` found: llama-perplexity's lines, one line per strategy, or JSON.
//!
//! Invariant: labels, digits and order are those that `llama-perplexity --kl-divergence` prints, so that a script which reads
//! the one reads the other.

use serde_json::{Value, json};

use crate::eval::kld::{Estimate, Header, Ranks, Statistics};

/// One strategy against a file.
#[derive(Debug, Clone)]
pub struct Compared {
    /// The strategy's name.
    pub label: String,
    /// What its tokens say together.
    pub statistics: Statistics,
}

/// Strategies against a file.
#[derive(Debug, Clone)]
pub struct Sheet {
    /// The file.
    pub base: String,
    /// The model's name.
    pub model: String,
    /// What the file's header says.
    pub header: Header,
    /// Chunks of it that were compared.
    pub n_chunks: usize,
    /// Whether a BOS token began each chunk.
    pub with_bos: bool,
    /// The strategies.
    pub rows: Vec<Compared>,
}

/// For people: llama-perplexity's statistics of each strategy, then all of them in one table.
pub fn text(sheet: &Sheet) -> String {
    let bos = match sheet.with_bos {
        true => "BOS in the place of each chunk's first token",
        false => "no BOS",
    };
    let mut out = format!(
        "base {}: {} of {} chunks of {} tokens, scored from position {} on ({} tokens each), {bos}\n\
         ± is one standard error over tokens taken as independent; KLD is KL(base ‖ strategy) in nats\n",
        sheet.base,
        sheet.n_chunks,
        sheet.header.n_chunks,
        sheet.header.n_ctx,
        sheet.header.first_scored(),
        sheet.header.n_scored(),
    );
    for row in &sheet.rows {
        out += &format!("\n{}\n{}", row.label, statistics(&row.statistics));
    }
    out + &table(sheet)
}

/// The line of each strategy that llama-perplexity prints of each chunk.
fn table(sheet: &Sheet) -> String {
    let mut out = String::from(
        "\n| strategy | PPL(Q) | ln(PPL(Q)/PPL(base)) | KLD, nats | Δp RMS, % | same top p, % |\n\
         |---|---:|---:|---:|---:|---:|\n",
    );
    for row in &sheet.rows {
        let s = &row.statistics;
        out += &format!(
            "| {} | {} | {} | {} | {} | {} |\n",
            row.label,
            pm(s.ppl, 1.0, 4),
            pm(s.ln_ppl_ratio, 1.0, 5),
            pm(s.kld, 1.0, 6),
            pm(s.p_rms, 100.0, 3),
            pm(s.same_top, 100.0, 3),
        );
    }
    out
}

fn pm(e: Estimate, unit: f64, digits: usize) -> String {
    format!("{:.digits$} ± {:.digits$}", unit * e.value, unit * e.stderr)
}

fn statistics(s: &Statistics) -> String {
    let six = |e: Estimate| format!("{:10.6} ± {:10.6}", e.value, e.stderr);
    let percent = |e: Estimate| format!("{:6.3} ± {:5.3} %", 100.0 * e.value, 100.0 * e.stderr);
    let mut out = String::from("====== Perplexity statistics ======\n");
    for (name, value) in [
        ("Mean PPL(Q)                   ", six(s.ppl)),
        ("Mean PPL(base)                ", six(s.ppl_base)),
        (
            "Cor(ln(PPL(Q)), ln(PPL(base)))",
            format!("{:6.2}%", 100.0 * s.correlation),
        ),
        ("Mean ln(PPL(Q)/PPL(base))     ", six(s.ln_ppl_ratio)),
        ("Mean PPL(Q)/PPL(base)         ", six(s.ppl_ratio)),
        ("Mean PPL(Q)-PPL(base)         ", six(s.ppl_difference)),
    ] {
        out += &format!("{name}: {value}\n");
    }
    out += "\n====== KL divergence statistics ======\n";
    out += &format!("Mean    KLD: {}\n", six(s.kld));
    out += &ranks(&s.kld_ranks, |x| format!("KLD: {x:10.6}"));
    out += "\n====== Token probability statistics ======\n";
    out += &format!("Mean    Δp: {}\n", percent(s.p_difference));
    out += &ranks(&s.p_ranks, |x| format!("Δp: {:6.3}%", 100.0 * x));
    out += &format!("RMS Δp    : {}\n", percent(s.p_rms));
    out + &format!("Same top p: {}\n", percent(s.same_top))
}

fn ranks(ranks: &Ranks, show: impl Fn(f64) -> String) -> String {
    let mut out = format!("Maximum {}\n", show(ranks.max));
    for &(fraction, value) in &ranks.percentiles {
        let name = match fraction {
            0.5 => "Median ".to_owned(),
            _ => format!("{:4.1}%  ", 100.0 * fraction),
        };
        out += &format!("{name} {}\n", show(value));
    }
    out + &format!("Minimum {}\n", show(ranks.min))
}

/// For programs.
pub fn json(sheet: &Sheet) -> Value {
    let rows = sheet
        .rows
        .iter()
        .map(|row| json!({ "strategy": row.label, "statistics": row.statistics }));
    json!({
        "base": sheet.base,
        "model": sheet.model,
        "n_ctx": sheet.header.n_ctx,
        "n_chunks": sheet.n_chunks,
        "n_scored_per_chunk": sheet.header.n_scored(),
        "bos": sheet.with_bos,
        "rows": rows.collect::<Vec<_>>(),
    })
}
