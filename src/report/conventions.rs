//! The lines above a table that say what its numbers mean.
//!
//! Invariant: whoever reads a table can tell from these lines which perplexity it is, over what, against what, and what
//! an interval means.

use crate::bundle::header::{Bos, ProtocolKind};
use crate::cache::Continuation;
use crate::eval::stats::bootstrap::MIN_CLUSTERS;
use crate::eval::stats::{ACCURACY_MARGIN, NLL_MARGIN, Over};

use super::format::{count, grouped, mean_count, significant};
use super::measures::Repetition;
use super::rows::{Group, Report};

/// What holds for every group of a report.
pub fn shared(report: &Report) -> Vec<String> {
    let per_token = grouped(report.header.geometry.f16_bytes_at(1));
    let mut lines = vec![
        "PPL is per token of this model's tokenizer: exp of the mean NLL, natural logarithm. The reference is a cache \
         of f32 rows on the same tokens. ΔPPL is against it, paired. KLD is \
         KL(full ‖ compressed), nats per token. Same top p: both rank the same token first."
            .to_owned(),
        format!(
            "Brackets hold a 95 % interval: bootstrap-t over the n items as clusters, weighted by their tokens; Student's t \
             below {MIN_CLUSTERS} items. p (Holm) is that of no difference from the reference, corrected over the rows of a table. {}",
            verdicts(),
        ),
        format!(
            "Sizes charge every stored byte of the live cache: codes, scales, indices, page tables, shared tables, \
             projections, exact rows, slack, parked pages. bytes_vs_f16 is over an f16 cache of the same tokens \
             ({per_token} bytes per token), bytes_vs_fp8 over half of that. effective bits: per value of the tokens that \
             came after the compression point, what they added."
        ),
    ];
    lines.extend(arithmetic(report));
    lines
}

/// What the verdicts mean, with the margin.
pub fn verdicts() -> String {
    format!(
        "The verdict is of NLL: better or worse at a corrected p below 5 %; within δ, or equivalent, where two one-sided tests \
         show the difference to be less than δ = {NLL_MARGIN} nats per token (about 1 % of perplexity), or where all is equal to \
         the bit; n ≈ N would tell: items for a chance of 80 %, were difference and spread as seen. Of answers it is of accuracy, δ = {} percentage point.",
        100.0 * ACCURACY_MARGIN,
    )
}

/// What linear layers compute in, where it is not f32.
pub fn arithmetic(report: &Report) -> Option<String> {
    let arithmetic = report.header.model.arithmetic;
    (!arithmetic.is_f32()).then(|| {
        format!(
            "Linear layers over q4_0, q4_1 and q8_0 weights compute in {}: activations as integers with a scale per 32, the \
             reference's and all strategies'.",
            arithmetic.name()
        )
    })
}

/// What holds for one group.
pub fn own(group: &Group) -> Vec<String> {
    let mut out = vec![protocol(group), data(group)];
    out.extend(reference(group));
    out.extend(taken_at(group));
    out.extend(over_blocks(group));
    out.extend(rebuilt(group));
    out
}

/// What an item is called under a protocol.
pub fn item_noun(kind: &ProtocolKind) -> &'static str {
    match kind {
        ProtocolKind::Stream { .. } => "window",
        ProtocolKind::CompressOnce { .. }
        | ProtocolKind::Tasks { .. }
        | ProtocolKind::Generate { .. } => "context",
    }
}

/// The protocol in one sentence.
pub fn protocol(group: &Group) -> String {
    let bos = match group.protocol.bos {
        Bos::None => "no BOS",
        Bos::EachItem => "BOS before each item, not scored",
    };
    let kind = match &group.protocol.kind {
        ProtocolKind::Stream {
            window,
            stride,
            unscored,
        } => format!(
            "`stream`: windows of {}, stride {}, each from an empty cache, {bos}; every query reads the stored cache as \
             if decoded; the first {} of a window not scored",
            count(*window, "token"),
            grouped(*stride as u64),
            count(*unscored, "token"),
        ),
        ProtocolKind::CompressOnce {
            context,
            scored,
            continuation,
        } => {
            let rows = own_rows(*continuation);
            format!(
                "`compress-once`: a context of {} read exactly, compressed once; a continuation of {} scored through \
                 the stored cache, its own rows {rows}; {bos}",
                count(*context, "token"),
                count(*scored, "token"),
            )
        }
        ProtocolKind::Generate {
            context,
            tokens,
            temperature,
            top_p,
            continuation,
        } => {
            let rows = own_rows(*continuation);
            let how = match temperature {
                0.0 => "greedily".to_owned(),
                t => format!(
                    "at temperature {t}, top_p {top_p}, strategy and reference with the same noise"
                ),
            };
            format!(
                "`generate`: a context of {} read exactly, all but its last token compressed once; up to {} generated {how}, their \
                 rows {rows}; {bos}. same tokens: before the first that is not the reference's; distinct-2: different pairs of \
                 tokens over all; repeated: tokens that end a run of four that stood before; NLL full: of the text under the f32 \
                 reference, nats per token; full: the reference's own text; KLD along the strategy's text",
                count(*context, "token"),
                count(*tokens, "token"),
            )
        }
        ProtocolKind::Tasks {
            shots,
            continuation,
            ..
        } => {
            let rows = own_rows(*continuation);
            format!(
                "`tasks`: a context ({} before each question of a task with a file) read exactly, all but its last token \
                 compressed once; each option goes on from a fork, its own rows {rows}; {bos}. acc: the right option is the most \
                 likely (one option: each of its tokens is), acc_norm: per character; full: the f32 reference, paired; lost: right \
                 with the reference alone; gold ΔNLL: of the right option, nats per token; KLD over the options' tokens",
                count(*shots, "solved example"),
            )
        }
    };
    format!("Protocol {kind}.")
}

fn own_rows(continuation: Continuation) -> &'static str {
    match continuation {
        Continuation::Strategy => "go through the same strategy",
        Continuation::Exact => "stay exact (f32)",
    }
}

/// The data in one sentence.
pub fn data(group: &Group) -> String {
    let names: Vec<String> = group
        .data
        .iter()
        .map(|d| format!("{} (sha256 {})", d.name, short(&d.sha256)))
        .collect();
    let noun = item_noun(&group.protocol.kind);
    let counts = group.baseline.as_ref().map_or_else(
        || "nothing scored".to_owned(),
        |b| {
            format!(
                "n = {} of {}, {} scored",
                count(b.n_items, noun),
                count(group.n_docs, "document"),
                count(b.n_scored, "token"),
            )
        },
    );
    format!(
        "Data {}: {counts}, {} dropped{}.",
        names.join(", "),
        count(group.n_tokens_dropped, "token"),
        left_out(group),
    )
}

/// Items that were too long, and answers that begin inside a token.
fn left_out(group: &Group) -> String {
    let cuts = || {
        let all = group.data.iter().flat_map(|d| &d.cuts);
        all.filter(|cut| cut.protocol == group.protocol.name)
    };
    let mut out = String::new();
    let skipped: Vec<&str> = cuts()
        .flat_map(|c| &c.skipped)
        .map(String::as_str)
        .collect();
    if !skipped.is_empty() {
        let n = count(skipped.len(), "item");
        out.push_str(&format!(
            "; {n} longer than the model's context skipped: {}",
            skipped.join(", ")
        ));
    }
    let n_split: usize = cuts().map(|c| c.n_split_borders).sum();
    if n_split > 0 {
        let n = count(n_split, "option");
        out.push_str(&format!(
            "; {n} meet their context inside a token (the context's own tokens are kept)"
        ));
    }
    out
}

fn reference(group: &Group) -> Option<String> {
    if group.is_asked() {
        return None;
    }
    let baseline = group.baseline.as_ref()?;
    let floor = baseline.floor_ppl.map_or_else(String::new, |ppl| {
        format!("; floor (context dropped but its sinks): PPL {ppl:.4}")
    });
    Some(format!(
        "Reference: PPL {:.4}, {} bits per byte{floor}.",
        baseline.reference_ppl,
        significant(baseline.reference_bits_per_byte, 4),
    ))
}

/// What the intervals of one item are.
fn over_blocks(group: &Group) -> Option<String> {
    let scores = group.rows.iter().filter_map(|row| row.scores());
    let of_blocks = scores
        .map(|s| s.quality.kld.over)
        .find(|over| *over != Over::Items);
    of_blocks.map(|_| {
        "One item: intervals and verdicts are over moving blocks of its tokens and hold for this text alone.".to_owned()
    })
}

/// What pages are that were coded anew, where any were.
fn rebuilt(group: &Group) -> Option<String> {
    let mut scores = group.rows.iter().filter_map(|row| row.scores());
    let any = scores.any(|s| s.memory.is_some_and(|m| m.rebuilt().is_some()));
    any.then(|| {
        "Pages rebuilt: pages of rows coded together, by KV head and side, that were coded anew from their decoded rows \
         after others had left, per item until its end; error: root mean square of what one such coding changed in \
         the rows that lived, over that of the rows, beyond what the codings before it had lost."
            .to_owned()
    })
}

/// At which lengths sizes and times were taken, where they were.
fn taken_at(group: &Group) -> Option<String> {
    let scores = || group.rows.iter().filter_map(|row| row.scores());
    let sizes = scores()
        .find_map(|s| s.memory)
        .map(|m| format!("Sizes at {} tokens.", mean_count(m.mean_tokens())));
    let times = scores().find_map(|s| s.latency.last()).map(|l| {
        let over = match l.over {
            Repetition::Items => "items",
            Repetition::Steps => "the steps of one item, so too narrow",
        };
        format!(
            "ms/token: wall time of decoding at depth {}, {}, interval over {over}.",
            grouped(l.depth as u64),
            count(l.n_steps, "step"),
        )
    });
    let parts: Vec<String> = [sizes, times].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(" "))
}

/// The first digits of a hash.
pub fn short(sha256: &str) -> &str {
    sha256.get(..12).unwrap_or(sha256)
}
